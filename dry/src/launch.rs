//! Kernels: launched, never run. Each launch moves a virtual clock.

use std::cell::Cell;
use std::ffi::{c_uint, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::device::fail;
use crate::kernels::{NO_IMAGE, can_launch};
use crate::library::dummy;
use crate::sys::{SUCCESS, Status, put};

/// `cudaErrorMissingConfiguration`
const MISSING_CONFIGURATION: Status = 52;

/// Kernels, copies and fills that were asked for since the start.
static LAUNCHES: AtomicU64 = AtomicU64::new(0);

/// Moves the virtual clock by one operation.
pub fn tick() {
    LAUNCHES.fetch_add(1, Ordering::Relaxed);
}

/// Operations since the start.
pub fn now() -> u64 {
    LAUNCHES.load(Ordering::Relaxed)
}

/// `cudaErrorNoKernelImageForDevice`, where a kernel's library has none for this device.
fn launch(function: *const c_void) -> Status {
    tick();
    if can_launch(function) { SUCCESS } else { fail(NO_IMAGE) }
}

/// Defines functions that start a kernel: the first argument says which.
macro_rules! launches {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name(function: *const c_void) -> Status {
            launch(function)
        }
    )* };
}

launches! {
    cudaLaunchKernel __cudaLaunchKernel cudaLaunchCooperativeKernel cuLaunchKernel
    cuLaunchCooperativeKernel
}

/// The same where the configuration comes before the kernel.
macro_rules! configured_launches {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name(_launch: *const c_void, function: *const c_void) -> Status {
            launch(function)
        }
    )* };
}

configured_launches! { cudaLaunchKernelExC cuLaunchKernelEx }

macro_rules! graph_launches {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() -> Status {
            tick();
            SUCCESS
        }
    )* };
}

graph_launches! { cudaGraphLaunch cuGraphLaunch }

/// `dim3`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Dimensions([c_uint; 3]);

/// What `<<< >>>` says: grid, block, shared memory, stream.
type Configuration = (Dimensions, Dimensions, usize, *mut c_void);

thread_local! {
    static PUSHED: Cell<Option<Configuration>> = const { Cell::new(None) };
}

#[unsafe(no_mangle)]
pub extern "C" fn __cudaPushCallConfiguration(
    grid: Dimensions,
    block: Dimensions,
    shared: usize,
    stream: *mut c_void,
) -> c_uint {
    PUSHED.set(Some((grid, block, shared, stream)));
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn __cudaPopCallConfiguration(
    grid: *mut Dimensions,
    block: *mut Dimensions,
    shared: *mut usize,
    stream: *mut *mut c_void,
) -> Status {
    let Some(pushed) = PUSHED.take() else { return fail(MISSING_CONFIGURATION) };
    unsafe {
        put(grid, pushed.0);
        put(block, pushed.1);
        put(shared, pushed.2);
        put(stream, pushed.3);
    }
    SUCCESS
}

/// Addresses of device variables: host memory of one page serves all.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaGetSymbolAddress(
    out: *mut *mut c_void,
    _symbol: *const c_void,
) -> Status {
    unsafe { put(out, dummy()) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaGetSymbolSize(out: *mut usize, _symbol: *const c_void) -> Status {
    unsafe { put(out, 4096) };
    SUCCESS
}
