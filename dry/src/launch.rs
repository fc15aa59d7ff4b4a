//! Kernels: registered, launched, never run. Each launch moves a virtual clock.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::library::dummy;
use crate::sys::{SUCCESS, Status, put};

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

#[unsafe(no_mangle)]
pub extern "C" fn __cudaRegisterFatBinary(_: *const c_void) -> *mut c_void {
    dummy()
}

/// Defines functions that start a kernel and whose arguments do not matter.
macro_rules! launches {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() -> Status {
            tick();
            SUCCESS
        }
    )* };
}

launches! {
    cudaLaunchKernel __cudaLaunchKernel cudaLaunchKernelExC cudaLaunchCooperativeKernel
    cuLaunchKernel cuLaunchKernelEx cuLaunchCooperativeKernel cudaGraphLaunch cuGraphLaunch
}

/// The caller falls back on what the launch itself gives: a grid and a block of one, no shared
/// memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __cudaPopCallConfiguration(
    grid: *mut [c_uint; 3],
    block: *mut [c_uint; 3],
    shared: *mut usize,
    stream: *mut *mut c_void,
) -> Status {
    unsafe {
        put(grid, [1; 3]);
        put(block, [1; 3]);
        put(shared, 0);
        put(stream, std::ptr::null_mut());
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn __cudaGetKernel(out: *mut *mut c_void, function: *mut c_void) -> Status {
    unsafe { put(out, function) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaGetFuncBySymbol(
    out: *mut *mut c_void,
    function: *mut c_void,
) -> Status {
    unsafe { put(out, function) };
    SUCCESS
}

/// The leading fields of `struct cudaFuncAttributes`.
#[repr(C)]
pub struct FunctionAttributes {
    shared: usize,
    constant: usize,
    local: usize,
    max_threads: c_int,
    registers: c_int,
    ptx_version: c_int,
    binary_version: c_int,
    cache_mode: c_int,
    max_dynamic_shared: c_int,
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaFuncGetAttributes(
    out: *mut FunctionAttributes,
    _function: *const c_void,
) -> Status {
    let version = crate::config::config().capability;
    let answer = FunctionAttributes {
        shared: 0,
        constant: 0,
        local: 0,
        max_threads: 1024,
        registers: 32,
        ptx_version: version,
        binary_version: version,
        cache_mode: 0,
        max_dynamic_shared: 49152,
    };
    unsafe { put(out, answer) };
    SUCCESS
}

/// The driver's counterpart: 0 is the largest block, 4 registers; 5 and 6 versions.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFuncGetAttribute(
    out: *mut c_int,
    which: c_int,
    _function: *const c_void,
) -> Status {
    let version = crate::config::config().capability;
    let value = match which {
        0 => 1024,
        4 => 32,
        5 | 6 => version,
        8 => 49152,
        _ => 0,
    };
    unsafe { put(out, value) };
    SUCCESS
}

/// Defines occupancy questions, whose first argument takes the answer.
macro_rules! occupancies {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(out: *mut c_int) -> Status {
            unsafe { put(out, 2) };
            SUCCESS
        }
    )* };
}

occupancies! {
    cudaOccupancyMaxActiveBlocksPerMultiprocessor
    cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags cudaOccupancyMaxActiveClusters
    cudaOccupancyMaxPotentialClusterSize cuOccupancyMaxActiveBlocksPerMultiprocessor
    cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags cuOccupancyMaxActiveClusters
    cuOccupancyMaxPotentialClusterSize
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaOccupancyAvailableDynamicSMemPerBlock(out: *mut usize) -> Status {
    unsafe { put(out, 49152) };
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
