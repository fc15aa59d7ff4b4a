//! The driver's functions, for Triton, for PyTorch's lazily bound calls, and for libraries that
//! bring a runtime of their own.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_ulonglong, c_void};

use crate::config::config;
use crate::device::{cudaGetErrorName, cudaGetErrorString, cudaSetDevice, current};
use crate::library::dummy;
use crate::state::with;
use crate::sys::{self, INVALID_DEVICE, NOT_FOUND, SUCCESS, Status, put};
use crate::transfer::{copy, cudaFree, cudaHostAlloc, cudaMalloc, fill};

type Handle = *mut c_void;

/// The function that a caller means by `name`: the newest version of it, as the driver itself would
/// answer.
pub unsafe fn find(name: &CStr) -> *mut c_void {
    let plain = name.to_string_lossy();
    for suffix in ["_v2", ""] {
        let Ok(full) = CString::new(format!("{plain}{suffix}")) else { break };
        let found = sys::symbol(&full);
        if !found.is_null() {
            return found;
        }
    }
    std::ptr::null_mut()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetProcAddress_v2(
    name: *const c_char,
    out: *mut *mut c_void,
    _version: c_int,
    _flags: c_ulonglong,
    result: *mut c_int,
) -> Status {
    // SAFETY: the caller gives a C string.
    let found = unsafe { find(CStr::from_ptr(name)) };
    unsafe {
        put(out, found);
        put(result, found.is_null() as c_int);
    }
    if found.is_null() { NOT_FOUND } else { SUCCESS }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetProcAddress(
    name: *const c_char,
    out: *mut *mut c_void,
    version: c_int,
    flags: c_ulonglong,
) -> Status {
    unsafe { cuGetProcAddress_v2(name, out, version, flags, std::ptr::null_mut()) }
}

/// Private tables of the driver. Only a CUDA runtime asks for them, and the one under PyTorch is
/// this library: so here is a library that brings its own, which the report names.
#[cfg(target_arch = "x86_64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub extern "C" fn cuGetExportTable(_out: *mut *const c_void, _id: *const c_void) -> Status {
    // The third argument is where the caller goes on, which says what library it is.
    std::arch::naked_asm!("mov rdx, [rsp]", "jmp {}", sym export_table)
}

#[cfg(not(target_arch = "x86_64"))]
#[unsafe(no_mangle)]
pub extern "C" fn cuGetExportTable(out: *mut *const c_void, id: *const c_void) -> Status {
    export_table(out, id, std::ptr::null())
}

extern "C" fn export_table(
    _out: *mut *const c_void,
    _id: *const c_void,
    caller: *const c_void,
) -> Status {
    /// NVIDIA's compilers ask as well; they take no device memory.
    const COMPILERS: [&str; 3] = ["libnvrtc", "libnvJitLink", "libnvvm"];
    let library = sys::library_at(caller).unwrap_or_else(|| "a library".into());
    let file = library.rsplit('/').next().unwrap_or_default();
    let compiles = COMPILERS.iter().any(|name| file.starts_with(name));
    if !compiles && with(|s| s.foreign.insert(library.clone())) {
        crate::log::line(format_args!("foreign {library}"));
    }
    NOT_FOUND
}

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(_flags: c_uint) -> Status {
    if config().devices > 0 { SUCCESS } else { 100 }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(out: *mut c_int) -> Status {
    unsafe { put(out, config().cuda) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(out: *mut c_int) -> Status {
    unsafe { put(out, config().devices) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(out: *mut c_int, device: c_int) -> Status {
    if !(0..config().devices).contains(&device) {
        return INVALID_DEVICE;
    }
    unsafe { put(out, device) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetName(out: *mut c_char, room: c_int, _device: c_int) -> Status {
    unsafe { sys::put_text(out, room.max(0) as usize, &config().name) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetUuid_v2(out: *mut [u8; 16], device: c_int) -> Status {
    let mut uuid = [0; 16];
    uuid[15] = device as u8 + 1;
    unsafe { put(out, uuid) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetUuid(out: *mut [u8; 16], device: c_int) -> Status {
    unsafe { cuDeviceGetUuid_v2(out, device) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceTotalMem_v2(out: *mut usize, _device: c_int) -> Status {
    unsafe { put(out, config().total_bytes as usize) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetAttribute(
    out: *mut c_int,
    which: c_int,
    device: c_int,
) -> Status {
    unsafe { put(out, crate::properties::attribute(which, device)) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceComputeCapability(
    major: *mut c_int,
    minor: *mut c_int,
    _device: c_int,
) -> Status {
    unsafe {
        put(major, config().capability / 10);
        put(minor, config().capability % 10);
    }
    SUCCESS
}

/// A context is the device's number, raised by one so that it is not null.
fn context(device: c_int) -> Handle {
    (device as usize + 1) as Handle
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetCurrent(out: *mut Handle) -> Status {
    unsafe { put(out, context(current())) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(context: Handle) -> Status {
    if context.is_null() { SUCCESS } else { cudaSetDevice(context as c_int - 1) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxPushCurrent_v2(context: Handle) -> Status {
    cuCtxSetCurrent(context)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxPopCurrent_v2(out: *mut Handle) -> Status {
    unsafe { cuCtxGetCurrent(out) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetDevice(out: *mut c_int) -> Status {
    unsafe { put(out, current()) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(out: *mut Handle, device: c_int) -> Status {
    unsafe { put(out, context(device)) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxGetState(
    _device: c_int,
    flags: *mut c_uint,
    active: *mut c_int,
) -> Status {
    unsafe {
        put(flags, 0);
        put(active, 1);
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxCreate_v2(out: *mut Handle, _: c_uint, device: c_int) -> Status {
    unsafe { put(out, context(device)) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(status: Status, out: *mut *const c_char) -> Status {
    unsafe { put(out, cudaGetErrorString(status)) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(status: Status, out: *mut *const c_char) -> Status {
    unsafe { put(out, cudaGetErrorName(status)) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(out: *mut Handle, bytes: usize) -> Status {
    unsafe { cudaMalloc(out, bytes) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFree_v2(at: Handle) -> Status {
    cudaFree(at)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostAlloc(out: *mut Handle, bytes: usize, flags: c_uint) -> Status {
    unsafe { cudaHostAlloc(out, bytes, flags) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> Status {
    unsafe { crate::transfer::cudaMemGetInfo(free, total) }
}

/// Defines the driver's copies, which differ in name only.
macro_rules! copies {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name(to: u64, from: u64, bytes: usize) -> Status {
            copy(to, from, bytes as u64)
        }
    )* };
}

copies! {
    cuMemcpy cuMemcpyAsync cuMemcpyHtoD_v2 cuMemcpyHtoDAsync_v2 cuMemcpyDtoH_v2
    cuMemcpyDtoHAsync_v2 cuMemcpyDtoD_v2 cuMemcpyDtoDAsync_v2
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD8_v2(at: u64, value: u8, count: usize) -> Status {
    fill(at, value, count as u64)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD8Async(at: u64, value: u8, count: usize, _: Handle) -> Status {
    fill(at, value, count as u64)
}

/// Values of four bytes that are not one byte repeated read 0 afterwards.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD32_v2(at: u64, value: c_uint, count: usize) -> Status {
    let byte = value as u8;
    let same = value.to_ne_bytes().iter().all(|b| *b == byte);
    fill(at, if same { byte } else { 0 }, 4 * count as u64)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD32Async(at: u64, value: c_uint, count: usize, _: Handle) -> Status {
    cuMemsetD32_v2(at, value, count)
}

/// Memory kind, device pointer, host pointer, device ordinal and the like of an address.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuPointerGetAttribute(out: *mut c_void, which: c_int, at: u64) -> Status {
    let Some((start, block)) = with(|s| s.memory.block_of(at)) else {
        return sys::INVALID_VALUE;
    };
    unsafe {
        match which {
            1 => put(out.cast(), context(block.device)),
            2 => put(out.cast::<c_uint>(), 2),
            3 => put(out.cast(), at),
            // CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, RANGE_START_ADDR, RANGE_SIZE
            9 => put(out.cast::<c_int>(), block.device),
            11 => put(out.cast(), start),
            12 => put(out.cast(), block.mapped),
            7 => put(out.cast(), start),
            6 | 8 => put(out.cast::<c_int>(), 0),
            _ => put(out.cast::<c_int>(), 1),
        }
    }
    SUCCESS
}

/// Defines functions whose first argument takes a handle.
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
    cuGraphInstantiateWithFlags cuGreenCtxCreate
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetGlobal_v2(out: *mut Handle, bytes: *mut usize) -> Status {
    unsafe {
        put(out, dummy());
        put(bytes, 4096);
    }
    SUCCESS
}
