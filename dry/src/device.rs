//! The runtime's device functions: how many there are, which is current, what they are like.

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};

use crate::config::config;
use crate::kernels;
use crate::properties;
use crate::state::with;
use crate::sys::{self, INVALID_DEVICE, INVALID_VALUE, SUCCESS, Status, put};

thread_local! {
    static DEVICE: Cell<c_int> = const { Cell::new(0) };
    static ERROR: Cell<Status> = const { Cell::new(SUCCESS) };
}

/// The calling thread's device.
pub fn current() -> c_int {
    DEVICE.with(Cell::get)
}

/// Keeps an error for `cudaGetLastError`.
pub fn fail(status: Status) -> Status {
    ERROR.with(|e| e.set(status));
    status
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetLastError() -> Status {
    ERROR.with(|e| e.replace(SUCCESS))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaPeekAtLastError() -> Status {
    ERROR.with(Cell::get)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetErrorString(status: Status) -> *const c_char {
    let text: &CStr = match status {
        SUCCESS => c"no error",
        INVALID_VALUE => c"invalid argument",
        sys::OUT_OF_MEMORY => c"out of memory",
        100 => c"no CUDA-capable device is detected",
        INVALID_DEVICE => c"invalid device ordinal",
        98 => c"invalid device function",
        kernels::NO_IMAGE => c"no kernel image is available for execution on the device",
        sys::FILE_NOT_FOUND => c"file not found",
        sys::NOT_FOUND => c"named symbol not found",
        sys::NOT_READY => c"device not ready",
        sys::NOT_SUPPORTED => c"operation not supported by neap's dry device",
        _ => c"an error of neap's dry device",
    };
    text.as_ptr()
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetErrorName(status: Status) -> *const c_char {
    let text: &CStr = match status {
        SUCCESS => c"cudaSuccess",
        INVALID_VALUE => c"cudaErrorInvalidValue",
        sys::OUT_OF_MEMORY => c"cudaErrorMemoryAllocation",
        100 => c"cudaErrorNoDevice",
        INVALID_DEVICE => c"cudaErrorInvalidDevice",
        98 => c"cudaErrorInvalidDeviceFunction",
        kernels::NO_IMAGE => c"cudaErrorNoKernelImageForDevice",
        sys::FILE_NOT_FOUND => c"cudaErrorFileNotFound",
        sys::NOT_FOUND => c"cudaErrorSymbolNotFound",
        sys::NOT_READY => c"cudaErrorNotReady",
        sys::NOT_SUPPORTED => c"cudaErrorNotSupported",
        _ => c"cudaErrorUnknown",
    };
    text.as_ptr()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaGetDeviceCount(out: *mut c_int) -> Status {
    unsafe { put(out, config().devices) };
    if config().devices > 0 { SUCCESS } else { 100 }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaGetDevice(out: *mut c_int) -> Status {
    unsafe { put(out, current()) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaSetDevice(device: c_int) -> Status {
    if !(0..config().devices).contains(&device) {
        return fail(INVALID_DEVICE);
    }
    DEVICE.with(|d| d.set(device));
    SUCCESS
}

/// CUDA 13's structure under its plain name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaGetDeviceProperties(out: *mut u8, device: c_int) -> Status {
    unsafe { properties::fill(out, device, true) };
    SUCCESS
}

/// CUDA 12's structure: its headers rename the function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaGetDeviceProperties_v2(out: *mut u8, device: c_int) -> Status {
    unsafe { properties::fill(out, device, false) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaDeviceGetAttribute(
    out: *mut c_int,
    which: c_int,
    device: c_int,
) -> Status {
    unsafe { put(out, properties::attribute(which, device)) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaDriverGetVersion(out: *mut c_int) -> Status {
    unsafe { put(out, config().cuda) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaRuntimeGetVersion(out: *mut c_int) -> Status {
    unsafe { put(out, config().cuda) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaDeviceCanAccessPeer(out: *mut c_int, a: c_int, b: c_int) -> Status {
    unsafe { put(out, (a != b) as c_int) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaDeviceGetP2PAttribute(
    out: *mut c_int,
    _which: c_int,
    _a: c_int,
    _b: c_int,
) -> Status {
    unsafe { put(out, 1) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaDeviceGetPCIBusId(
    out: *mut c_char,
    room: c_int,
    device: c_int,
) -> Status {
    let text = format!("0000:{:02X}:00.0", device + 1);
    unsafe { sys::put_text(out, room.max(0) as usize, &text) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaDeviceGetByPCIBusId(out: *mut c_int, text: *const c_char) -> Status {
    // SAFETY: the caller gives a C string.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    let bus = text.split(':').nth_back(1).and_then(|b| i32::from_str_radix(b, 16).ok());
    let Some(device) = bus.map(|b| b - 1).filter(|d| (0..config().devices).contains(d)) else {
        return fail(INVALID_DEVICE);
    };
    unsafe { put(out, device) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaDeviceGetStreamPriorityRange(
    least: *mut c_int,
    greatest: *mut c_int,
) -> Status {
    unsafe {
        put(least, 0);
        put(greatest, -5);
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaDeviceGetLimit(out: *mut usize, which: c_int) -> Status {
    // Stack size a thread, printf buffer, malloc heap.
    let value = [1024, 7 << 20, 8 << 20].get(which as usize).copied().unwrap_or(0);
    unsafe { put(out, value) };
    SUCCESS
}

/// Any pointer that is not null stands for a memory pool.
fn pool() -> *mut c_void {
    crate::library::dummy()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaDeviceGetDefaultMemPool(out: *mut *mut c_void, _: c_int) -> Status {
    unsafe { put(out, pool()) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaDeviceGetMemPool(out: *mut *mut c_void, _: c_int) -> Status {
    unsafe { put(out, pool()) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaMemPoolCreate(out: *mut *mut c_void, _: *const c_void) -> Status {
    unsafe { put(out, pool()) };
    SUCCESS
}

/// Used and reserved bytes are all what the device has given out.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaMemPoolGetAttribute(
    _pool: *mut c_void,
    which: c_int,
    out: *mut u64,
) -> Status {
    let (used, peak) = with(|s| (s.memory.used(current()), s.memory.highest(current())));
    // 1..=3 are switches (int), 4 the release threshold; then reserved and used, now and at most.
    unsafe {
        match which {
            5 | 7 => put(out, used),
            6 | 8 => put(out, peak),
            4 => put(out, u64::MAX),
            _ => put(out.cast::<c_int>(), 1),
        }
    }
    SUCCESS
}

/// Looks a driver function up for the runtime's callers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaGetDriverEntryPointByVersion(
    name: *const c_char,
    out: *mut *mut c_void,
    _version: c_uint,
    _flags: c_ulonglong,
    result: *mut c_int,
) -> Status {
    // SAFETY: the caller gives a C string.
    let found = unsafe { crate::driver::find(CStr::from_ptr(name)) };
    unsafe {
        put(out, found);
        put(result, found.is_null() as c_int);
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaGetDriverEntryPoint(
    name: *const c_char,
    out: *mut *mut c_void,
    flags: c_ulonglong,
    result: *mut c_int,
) -> Status {
    unsafe { cudaGetDriverEntryPointByVersion(name, out, 0, flags, result) }
}
