//! cuBLAS, cuDNN's graph interface and the rest of the libraries: handles, versions, and sizes that
//! callers read. Structures behind handles are one page of zeros that all share.

use std::ffi::{CStr, c_char, c_int, c_void};

use crate::config::config;
use crate::sys::{self, SUCCESS, Status, put};

type Handle = *mut c_void;

#[repr(C, align(4096))]
struct Page(std::cell::UnsafeCell<[u8; 4096]>);
// SAFETY: nothing here reads or writes it.
unsafe impl Sync for Page {}
static PAGE: Page = Page(std::cell::UnsafeCell::new([0; 4096]));

/// What every handle without content points to.
pub fn dummy() -> Handle {
    PAGE.0.get().cast()
}

/// Defines functions whose first argument takes a handle of its own: PyTorch keeps a workspace for
/// each handle.
macro_rules! contexts {
    ($($create:ident $destroy:ident;)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $create(out: *mut Handle) -> Status {
            unsafe { put(out, Box::into_raw(Box::new([0u64; 512])).cast()) };
            SUCCESS
        }

        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $destroy(handle: Handle) -> Status {
            if !handle.is_null() {
                // SAFETY: made by the function above.
                drop(unsafe { Box::from_raw(handle.cast::<[u64; 512]>()) });
            }
            SUCCESS
        }
    )* };
}

contexts! {
    cublasCreate_v2 cublasDestroy_v2;
    cublasLtCreate cublasLtDestroy;
    cusparseCreate cusparseDestroy;
    cusolverDnCreate cusolverDnDestroy;
    cudnnCreate cudnnDestroy;
}

/// Defines functions whose first argument takes a handle without content.
macro_rules! handles {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(out: *mut Handle) -> Status {
            unsafe { put(out, dummy()) };
            SUCCESS
        }
    )* };
}

handles! {
    cublasLtMatmulDescCreate cublasLtMatmulPreferenceCreate
    cublasLtMatrixLayoutCreate cublasLtMatrixTransformDescCreate
    cusparseCreateCoo cusparseCreateCsr cusparseCreateCsc cusparseCreateBsr
    cusparseCreateDnMat cusparseCreateDnVec cusparseCreateSpVec cusparseCreateMatDescr
    cusparseCreateBsrsm2Info cusparseCreateBsrsv2Info cusparseSpGEMM_createDescr cusparseSpSM_createDescr
    cusparseSpSV_createDescr
    cusolverDnCreateParams cusolverDnCreateGesvdjInfo cusolverDnCreateSyevjInfo
    cusolverSpCreate
    cudnnCreateActivationDescriptor cudnnCreateCTCLossDescriptor
    cudnnCreateConvolutionDescriptor cudnnCreateDropoutDescriptor cudnnCreatePoolingDescriptor
    cudnnCreateSpatialTransformerDescriptor cudnnCreateLRNDescriptor cudnnCreateOpTensorDescriptor
    cudnnCreateReduceTensorDescriptor cudnnCreateSeqDataDescriptor cudnnCreateAttnDescriptor
    curandCreateGenerator
}

/// Defines functions that write one value through one of their arguments. Every argument is as wide
/// as a register.
macro_rules! answers {
    ($($name:ident ( $($before:ident)* => $out:ident : $t:ty = $value:expr ) )*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($before: usize,)* $out: *mut $t) -> Status {
            $(let _ = $before;)*
            unsafe { put($out, $value) };
            SUCCESS
        }
    )* };
}

/// As `answers`, for values that only the vendor's library knows.
macro_rules! estimates {
    ($($name:ident ( $($before:ident)* => $out:ident : $t:ty = $value:expr ) )*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($before: usize,)* $out: *mut $t) -> Status {
            $(let _ = $before;)*
            crate::log::estimated(stringify!($name));
            unsafe { put($out, $value) };
            SUCCESS
        }
    )* };
}
pub(crate) use estimates;

answers! {
    cublasGetMathMode(_h => out: c_int = 0)
    cublasGetPointerMode_v2(_h => out: c_int = 0)
    cublasGetAtomicsMode(_h => out: c_int = 0)
    cublasGetVersion_v2(_h => out: c_int = config().cuda / 1000 * 10000)
    cublasGetStream_v2(_h => out: usize = 0)
    cublasGetSmCountTarget(_h => out: c_int = 0)
    cusparseGetVersion(_h => out: c_int = config().cuda / 1000 * 1000)
    cusparseGetPointerMode(_h => out: c_int = 0)
    cusolverGetVersion(=> out: c_int = config().cuda / 1000 * 1000)
    cufftGetVersion(=> out: c_int = config().cuda / 1000 * 1000)
    cufftCreate(=> out: c_int = 1)
    cudnnGetStream(_h => out: usize = 0)
    cusparseXbsrsm2_zeroPivot(_h _i => out: c_int = -1)
    cusparseXbsrsv2_zeroPivot(_h _i => out: c_int = -1)
}

estimates! {
    cudnnDropoutGetStatesSize(_h => out: usize = dropout_states())
    cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(_h _m _o _x _z _y _s _a => out: usize = 0)
    cudnnGetBatchNormalizationTrainingExReserveSpaceSize(_h _m _o _a _x => out: usize = 0)
    cudnnGetBatchNormalizationBackwardExWorkspaceSize(_h _m _o _x _y _dy _dz _dx _s _a => out: usize = 0)
    cudnnGetConvolutionForwardWorkspaceSize(_h _x _w _c _y _a => out: usize = convolution())
    cudnnGetConvolutionBackwardDataWorkspaceSize(_h _w _dy _c _dx _a => out: usize = convolution())
    cudnnGetConvolutionBackwardFilterWorkspaceSize(_h _x _dy _c _dw _a => out: usize = convolution())
    cudnnGetCTCLossWorkspaceSize(_h _p _g _l _ll _il _a _d => out: usize = 0)
    cudnnGetCTCLossWorkspaceSize_v8(_h _a _d _p _g => out: usize = 0)
    cusparseSpMM_bufferSize(_h _oa _ob _al _a _b _be _c _t _alg => out: usize = 0)
    cusparseSpMV_bufferSize(_h _o _al _a _x _be _y _t _alg => out: usize = 0)
    cusparseSDDMM_bufferSize(_h _oa _ob _al _a _b _be _c _t _alg => out: usize = 0)
    cusparseSpSV_bufferSize(_h _o _al _a _x _y _t _alg _d => out: usize = 0)
    cusparseSpSM_bufferSize(_h _oa _ob _al _a _b _c _t _alg _d => out: usize = 0)
    cusparseXcoosort_bufferSizeExt(_h _m _n _nnz _r _c => out: usize = 0)
    cusparseXcsrsort_bufferSizeExt(_h _m _n _nnz _r _c => out: usize = 0)
    cusparseLtMatmulGetWorkspace(_h _p => out: usize = 0)
}

/// Defines decompositions of batches that write to the host whether their arguments were right.
macro_rules! informs {
    ($($name:ident ( $($before:ident)* => $out:ident ) )*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($before: usize,)* $out: *mut c_int) -> Status {
            $(let _ = $before;)*
            crate::launch::tick();
            unsafe { put($out, 0) };
            SUCCESS
        }
    )* };
}

informs! {
    cublasSgeqrfBatched(_h _m _n _a _l _t => info)
    cublasDgeqrfBatched(_h _m _n _a _l _t => info)
    cublasCgeqrfBatched(_h _m _n _a _l _t => info)
    cublasZgeqrfBatched(_h _m _n _a _l _t => info)
    cublasSgetrsBatched(_h _o _n _r _a _l _p _b _m => info)
    cublasDgetrsBatched(_h _o _n _r _a _l _p _b _m => info)
    cublasCgetrsBatched(_h _o _n _r _a _l _p _b _m => info)
    cublasZgetrsBatched(_h _o _n _r _a _l _p _b _m => info)
    cublasSgelsBatched(_h _o _m _n _r _a _l _c _k => info)
    cublasDgelsBatched(_h _o _m _n _r _a _l _c _k => info)
    cublasCgelsBatched(_h _o _m _n _r _a _l _c _k => info)
    cublasZgelsBatched(_h _o _m _n _r _a _l _c _k => info)
}

/// cuFFT plans: the last out-parameter is the size of the work area.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cufftXtMakePlanMany(
    _plan: c_int,
    _rank: c_int,
    _n: *mut i64,
    _inembed: *mut i64,
    _istride: i64,
    _idist: i64,
    _input: c_int,
    _onembed: *mut i64,
    _ostride: i64,
    _odist: i64,
    _output: c_int,
    _batch: i64,
    work: *mut usize,
    _execution: c_int,
) -> Status {
    crate::log::estimated("cufftXtMakePlanMany");
    unsafe { put(work, 0) };
    SUCCESS
}

/// One generator state of 16 bytes a resident thread; an estimate.
fn dropout_states() -> usize {
    config().multiprocessors as usize * 2048 * 16
}

fn convolution() -> usize {
    config().cudnn_workspace_bytes as usize
}

/// PyTorch allocates the memory in which cuBLAS works: which blocks those are is seen here alone.
#[unsafe(no_mangle)]
pub extern "C" fn cublasSetWorkspace_v2(_h: Handle, at: *const c_void, _bytes: usize) -> Status {
    crate::watch::note_workspace(at);
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatmul(
    _handle: usize,
    _operation: usize,
    _alpha: usize,
    _a: usize,
    _a_layout: usize,
    _b: usize,
    _b_layout: usize,
    _beta: usize,
    _c: usize,
    _c_layout: usize,
    _d: usize,
    _d_layout: usize,
    _algorithm: usize,
    workspace: *const c_void,
    _bytes: usize,
    _stream: usize,
) -> Status {
    crate::launch::tick();
    crate::watch::note_workspace(workspace);
    SUCCESS
}

/// One algorithm, without a workspace.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulAlgoGetHeuristic(
    _handle: usize,
    _operation: usize,
    _a: usize,
    _b: usize,
    _c: usize,
    _d: usize,
    _preference: usize,
    asked: c_int,
    results: *mut u8,
    found: *mut c_int,
) -> Status {
    /// `sizeof(cublasLtMatmulHeuristicResult_t)`
    const RESULT: usize = 96;
    unsafe {
        if asked > 0 && !results.is_null() {
            std::ptr::write_bytes(results, 0, RESULT * asked as usize);
        }
        put(found, asked.min(1));
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtGetVersion() -> usize {
    (config().cuda / 1000 * 10000) as usize
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtGetCudartVersion() -> usize {
    config().cuda as usize
}

fn text_of(status: Status) -> *const c_char {
    let text: &CStr = if status == SUCCESS { c"success" } else { c"refused by neap's dry device" };
    text.as_ptr()
}

/// Defines functions that name a status.
macro_rules! texts {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name(status: Status) -> *const c_char {
            text_of(status)
        }
    )* };
}

texts! {
    cublasGetStatusName cublasGetStatusString cublasLtGetStatusName cublasLtGetStatusString
    cusparseGetErrorName cusparseGetErrorString cudnnGetErrorString cusparseLtGetErrorName
    cusparseLtGetErrorString
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnGetLastErrorString(out: *mut c_char, room: usize) {
    unsafe { sys::put_text(out, room, "refused by neap's dry device") };
}

/// The version of the installed cuDNN, which answers without a device.
#[unsafe(no_mangle)]
pub extern "C" fn cudnnGetVersion() -> usize {
    for library in [c"libcudnn.so.9", c"libcudnn.so.8"] {
        if let Some(found) = sys::real(library, c"cudnnGetVersion") {
            // SAFETY: cuDNN's own function of this type.
            let real: extern "C" fn() -> usize = unsafe { std::mem::transmute(found) };
            return real();
        }
    }
    91900
}

#[unsafe(no_mangle)]
pub extern "C" fn cudnnGetCudartVersion() -> usize {
    config().cuda as usize
}

/// Major, minor or patch level.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnGetProperty(which: c_int, out: *mut c_int) -> Status {
    let version = cudnnGetVersion() as c_int;
    // cuDNN 9 counts major × 10000 + minor × 100 + patch, cuDNN 8 major × 1000.
    let major = if version >= 90000 { version / 10000 } else { version / 1000 };
    let minor = version / 100 % if version >= 90000 { 100 } else { 10 };
    let value = [major, minor, version % 100].get(which as usize).copied().unwrap_or(0);
    unsafe { put(out, value) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnBackendCreateDescriptor(_kind: c_int, out: *mut Handle) -> Status {
    unsafe { put(out, dummy()) };
    SUCCESS
}

/// What callers read of a finished graph: one engine, one plan, its workspace.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnBackendGetAttribute(
    _descriptor: Handle,
    which: c_int,
    _kind: c_int,
    _asked: i64,
    count: *mut i64,
    out: *mut c_void,
) -> Status {
    const HEURISTIC_RESULTS: c_int = 202;
    const CONFIG_ENGINE: c_int = 300;
    const CONFIG_SHARED_MEMORY: c_int = 304;
    const PLAN_WORKSPACE: c_int = 402;
    const ENGINE_COUNT: c_int = 802;
    const ENGINE_INDEX: c_int = 1301;
    let mut elements = 1;
    // SAFETY: the caller gives room for one element of the attribute's type.
    unsafe {
        match which {
            // The caller's own descriptor stands for the one result.
            HEURISTIC_RESULTS | CONFIG_ENGINE => {}
            CONFIG_SHARED_MEMORY => put(out.cast::<c_int>(), 0),
            PLAN_WORKSPACE => {
                crate::log::estimated("cudnnBackendGetAttribute");
                put(out.cast::<i64>(), config().cudnn_workspace_bytes);
            }
            ENGINE_COUNT => put(out.cast::<i64>(), 1),
            ENGINE_INDEX => put(out.cast::<i64>(), 0),
            _ => elements = 0,
        }
        put(count, elements);
    }
    SUCCESS
}

/// One algorithm that needs the set workspace: algorithm, status, time, memory, determinism, mode,
/// reserved.
#[repr(C)]
pub struct Performance {
    algorithm: c_int,
    status: Status,
    time: f32,
    memory: usize,
    determinism: c_int,
    mode: c_int,
    reserved: [c_int; 3],
}

/// Defines cuDNN's older questions for an algorithm.
macro_rules! algorithms {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            _handle: usize,
            _a: usize,
            _b: usize,
            _c: usize,
            _d: usize,
            _asked: c_int,
            found: *mut c_int,
            results: *mut Performance,
        ) -> Status {
            let answer = Performance {
                algorithm: 1,
                status: SUCCESS,
                time: 1.0,
                memory: convolution(),
                determinism: 1,
                mode: 0,
                reserved: [0; 3],
            };
            crate::log::estimated(stringify!($name));
            unsafe {
                put(results, answer);
                put(found, 1);
            }
            SUCCESS
        }
    )* };
}

algorithms! {
    cudnnGetConvolutionForwardAlgorithm_v7 cudnnGetConvolutionBackwardDataAlgorithm_v7
    cudnnGetConvolutionBackwardFilterAlgorithm_v7
}

/// Profiling: nothing is recorded, and reading the record says so.
#[unsafe(no_mangle)]
pub extern "C" fn cuptiActivityGetNextRecord() -> Status {
    /// `CUPTI_ERROR_MAX_LIMIT_REACHED`
    const END: Status = 12;
    END
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuptiGetVersion(out: *mut u32) -> Status {
    unsafe { put(out, (config().cuda / 1000 * 10000) as u32) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuptiGetResultString(status: Status, out: *mut *const c_char) -> Status {
    unsafe { put(out, text_of(status)) };
    SUCCESS
}

answers! {
    cuptiActivityGetNumDroppedRecords(_c _s => out: usize = 0)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuptiGetTimestamp(out: *mut u64) -> Status {
    unsafe { put(out, crate::launch::now() * 10_000) };
    SUCCESS
}
