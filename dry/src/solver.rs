//! cuSOLVER's workspaces. Their true sizes are the library's secret: what stands here is an
//! estimate of the order that the algorithms need (blocked panels of 64 columns; a second matrix
//! where eigenvectors are made).

use std::ffi::c_int;

use crate::library::estimates;
use crate::sys::{SUCCESS, Status, put};

/// Columns of a blocked panel.
const PANEL: c_int = 64;

fn panel(n: usize) -> c_int {
    (n as c_int).max(1).saturating_mul(PANEL)
}

fn square(n: usize) -> c_int {
    let n = n as c_int;
    n.saturating_mul(n).saturating_mul(2).saturating_add(n.saturating_mul(PANEL)).max(1)
}

estimates! {
    cusolverDnSgetrf_bufferSize(_h m n _a _l => out: c_int = panel(m.max(n)))
    cusolverDnDgetrf_bufferSize(_h m n _a _l => out: c_int = panel(m.max(n)))
    cusolverDnCgetrf_bufferSize(_h m n _a _l => out: c_int = panel(m.max(n)))
    cusolverDnZgetrf_bufferSize(_h m n _a _l => out: c_int = panel(m.max(n)))
    cusolverDnSgeqrf_bufferSize(_h m n _a _l => out: c_int = panel(m.max(n)))
    cusolverDnDgeqrf_bufferSize(_h m n _a _l => out: c_int = panel(m.max(n)))
    cusolverDnCgeqrf_bufferSize(_h m n _a _l => out: c_int = panel(m.max(n)))
    cusolverDnZgeqrf_bufferSize(_h m n _a _l => out: c_int = panel(m.max(n)))
    cusolverDnSpotrf_bufferSize(_h _u n _a _l => out: c_int = panel(n))
    cusolverDnDpotrf_bufferSize(_h _u n _a _l => out: c_int = panel(n))
    cusolverDnCpotrf_bufferSize(_h _u n _a _l => out: c_int = panel(n))
    cusolverDnZpotrf_bufferSize(_h _u n _a _l => out: c_int = panel(n))
    cusolverDnSgesvd_bufferSize(_h m n => out: c_int = square(m.min(n)))
    cusolverDnDgesvd_bufferSize(_h m n => out: c_int = square(m.min(n)))
    cusolverDnCgesvd_bufferSize(_h m n => out: c_int = square(m.min(n)))
    cusolverDnZgesvd_bufferSize(_h m n => out: c_int = square(m.min(n)))
    cusolverDnSorgqr_bufferSize(_h m n _k _a _l _t => out: c_int = panel(m.max(n)))
    cusolverDnDorgqr_bufferSize(_h m n _k _a _l _t => out: c_int = panel(m.max(n)))
    cusolverDnCungqr_bufferSize(_h m n _k _a _l _t => out: c_int = panel(m.max(n)))
    cusolverDnZungqr_bufferSize(_h m n _k _a _l _t => out: c_int = panel(m.max(n)))
    cusolverDnSormqr_bufferSize(_h _s _o m n _k _a _l _t _c _lc => out: c_int = panel(m.max(n)))
    cusolverDnDormqr_bufferSize(_h _s _o m n _k _a _l _t _c _lc => out: c_int = panel(m.max(n)))
    cusolverDnCunmqr_bufferSize(_h _s _o m n _k _a _l _t _c _lc => out: c_int = panel(m.max(n)))
    cusolverDnZunmqr_bufferSize(_h _s _o m n _k _a _l _t _c _lc => out: c_int = panel(m.max(n)))
    cusolverDnSsyevd_bufferSize(_h _j _u n _a _l _w => out: c_int = square(n))
    cusolverDnDsyevd_bufferSize(_h _j _u n _a _l _w => out: c_int = square(n))
    cusolverDnCheevd_bufferSize(_h _j _u n _a _l _w => out: c_int = square(n))
    cusolverDnZheevd_bufferSize(_h _j _u n _a _l _w => out: c_int = square(n))
    cusolverDnSsyevj_bufferSize(_h _j _u n _a _l _w => out: c_int = square(n))
    cusolverDnDsyevj_bufferSize(_h _j _u n _a _l _w => out: c_int = square(n))
    cusolverDnCheevj_bufferSize(_h _j _u n _a _l _w => out: c_int = square(n))
    cusolverDnZheevj_bufferSize(_h _j _u n _a _l _w => out: c_int = square(n))
    cusolverDnSsyevjBatched_bufferSize(_h _j _u n _a _l _w => out: c_int = square(n))
    cusolverDnDsyevjBatched_bufferSize(_h _j _u n _a _l _w => out: c_int = square(n))
    cusolverDnCheevjBatched_bufferSize(_h _j _u n _a _l _w => out: c_int = square(n))
    cusolverDnZheevjBatched_bufferSize(_h _j _u n _a _l _w => out: c_int = square(n))
    cusolverDnSsytrf_bufferSize(_h n _a _l => out: c_int = panel(n))
    cusolverDnDsytrf_bufferSize(_h n _a _l => out: c_int = panel(n))
    cusolverDnCsytrf_bufferSize(_h n _a _l => out: c_int = panel(n))
    cusolverDnZsytrf_bufferSize(_h n _a _l => out: c_int = panel(n))
    cusolverDnSgesvdj_bufferSize(_h _j _e m n _a _l _s _u _lu _v _lv => out: c_int = square(m.max(n)))
    cusolverDnDgesvdj_bufferSize(_h _j _e m n _a _l _s _u _lu _v _lv => out: c_int = square(m.max(n)))
    cusolverDnCgesvdj_bufferSize(_h _j _e m n _a _l _s _u _lu _v _lv => out: c_int = square(m.max(n)))
    cusolverDnZgesvdj_bufferSize(_h _j _e m n _a _l _s _u _lu _v _lv => out: c_int = square(m.max(n)))
    cusolverDnSgesvdjBatched_bufferSize(_h _j m n _a _l _s _u _lu _v _lv => out: c_int = square(m.max(n)))
    cusolverDnDgesvdjBatched_bufferSize(_h _j m n _a _l _s _u _lu _v _lv => out: c_int = square(m.max(n)))
    cusolverDnCgesvdjBatched_bufferSize(_h _j m n _a _l _s _u _lu _v _lv => out: c_int = square(m.max(n)))
    cusolverDnZgesvdjBatched_bufferSize(_h _j m n _a _l _s _u _lu _v _lv => out: c_int = square(m.max(n)))
    cusolverDnSgesvdaStridedBatched_bufferSize(
        _h _j _r m n _a _l _sa _s _ss _u _lu _su _v _lv _sv => out: c_int = square(m.max(n)))
    cusolverDnDgesvdaStridedBatched_bufferSize(
        _h _j _r m n _a _l _sa _s _ss _u _lu _su _v _lv _sv => out: c_int = square(m.max(n)))
    cusolverDnCgesvdaStridedBatched_bufferSize(
        _h _j _r m n _a _l _sa _s _ss _u _lu _su _v _lv _sv => out: c_int = square(m.max(n)))
    cusolverDnZgesvdaStridedBatched_bufferSize(
        _h _j _r m n _a _l _sa _s _ss _u _lu _su _v _lv _sv => out: c_int = square(m.max(n)))
}

/// Bytes of an element of the `cudaDataType` that the 64-bit interface names.
fn element(kind: usize) -> usize {
    match kind {
        1 | 4 => 8,
        5 => 16,
        _ => 4,
    }
}

/// Defines the 64-bit questions: device and host bytes.
macro_rules! sizes {
    ($($name:ident ( $($before:ident)* ; $bytes:expr ) )*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            $($before: usize,)*
            device: *mut usize,
            host: *mut usize,
        ) -> Status {
            $(let _ = $before;)*
            crate::log::estimated(stringify!($name));
            unsafe {
                put(device, $bytes);
                put(host, 0);
            }
            SUCCESS
        }
    )* };
}

sizes! {
    cusolverDnXgeqrf_bufferSize(_h _p m n t _a _l _tt _tau _c; m.max(n) * 64 * element(t))
    cusolverDnXgetrf_bufferSize(_h _p m n t _a _l _c; m.max(n) * 64 * element(t))
    cusolverDnXpotrf_bufferSize(_h _p _u n t _a _l _c; n * 64 * element(t))
    cusolverDnXsyevd_bufferSize(_h _p _j _u n t _a _l _tw _w _c; 2 * n * (n + 32) * element(t))
    cusolverDnXsyevBatched_bufferSize(_h _p _j _u n t _a _l _tw _w _c; 2 * n * (n + 32) * element(t))
    cusolverDnXgeev_bufferSize(
        _h _p _jl _jr n t _a _l _tw _w _tl _vl _ll _tr _vr _lr _c; 2 * n * (n + 32) * element(t))
    cusolverDnXsytrs_bufferSize(_h _u n _r t _a _l _i _tb _b _lb; n * 64 * element(t))
}
