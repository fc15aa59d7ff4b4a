//! The driver's virtual memory functions, for PyTorch's expandable segments: addresses and pages
//! apart.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::device::current;
use crate::memory::PAGE;
use crate::state::with;
use crate::sys::{INVALID_VALUE, OUT_OF_MEMORY, SUCCESS, Status, put};

/// Pages that were created: handle to (device, bytes, references).
static PAGES: Mutex<BTreeMap<u64, (i32, u64, u32)>> = Mutex::new(BTreeMap::new());
static NEXT: AtomicU64 = AtomicU64::new(1);

fn pages<T>(f: impl FnOnce(&mut BTreeMap<u64, (i32, u64, u32)>) -> T) -> T {
    f(&mut PAGES.lock().unwrap_or_else(std::sync::PoisonError::into_inner))
}

/// The leading fields of `CUmemAllocationProp`.
#[repr(C)]
pub struct AllocationProperties {
    kind: c_int,
    handle_types: c_int,
    location_kind: c_int,
    location: c_int,
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAddressReserve(
    out: *mut u64,
    bytes: usize,
    _align: usize,
    _hint: u64,
    _flags: c_ulonglong,
) -> Status {
    match with(|s| s.memory.reserve(current(), bytes as u64)) {
        Some(at) => {
            unsafe { put(out, at) };
            SUCCESS
        }
        None => OUT_OF_MEMORY,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAddressFree(at: u64, _bytes: usize) -> Status {
    if with(|s| s.memory.release(at)) { SUCCESS } else { INVALID_VALUE }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemCreate(
    out: *mut u64,
    bytes: usize,
    properties: *const AllocationProperties,
    _flags: c_ulonglong,
) -> Status {
    // SAFETY: the caller gives the structure or null.
    let device = unsafe { properties.as_ref() }.map_or(current(), |p| p.location.max(0));
    if !with(|s| s.memory.charge(device, bytes as u64)) {
        return OUT_OF_MEMORY;
    }
    let handle = NEXT.fetch_add(1, Ordering::Relaxed);
    pages(|p| p.insert(handle, (device, bytes as u64, 1)));
    unsafe { put(out, handle) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemRelease(handle: u64) -> Status {
    let gone = pages(|p| {
        let entry = p.get_mut(&handle)?;
        entry.2 -= 1;
        if entry.2 == 0 { p.remove(&handle).map(Some) } else { Some(None) }
    });
    match gone {
        Some(Some((device, bytes, _))) => with(|s| s.memory.discharge(device, bytes)),
        Some(None) => {}
        None => return INVALID_VALUE,
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemMap(
    _at: u64,
    _bytes: usize,
    _offset: usize,
    handle: u64,
    _flags: c_ulonglong,
) -> Status {
    // Mapped pages live until they are unmapped, even where their handle is released first; PyTorch
    // unmaps first.
    if pages(|p| p.contains_key(&handle)) { SUCCESS } else { INVALID_VALUE }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemUnmap(at: u64, bytes: usize) -> Status {
    with(|s| s.memory.forget(at, at + bytes as u64));
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemSetAccess(_: u64, _: usize, _: *const c_void, _: usize) -> Status {
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetAllocationGranularity(
    out: *mut usize,
    _properties: *const c_void,
    _which: c_int,
) -> Status {
    unsafe { put(out, PAGE as usize) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemRetainAllocationHandle(_out: *mut u64, _at: *mut c_void) -> Status {
    crate::sys::NOT_SUPPORTED
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetAddressRange_v2(
    base: *mut u64,
    bytes: *mut usize,
    at: u64,
) -> Status {
    match with(|s| s.memory.block_of(at)) {
        Some((start, block)) => {
            unsafe {
                put(base, start);
                put(bytes, block.mapped as usize);
            }
            SUCCESS
        }
        None => INVALID_VALUE,
    }
}

/// Memory handles between processes are not offered.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemExportToShareableHandle(
    _out: *mut c_void,
    _handle: u64,
    _kind: c_int,
    _flags: c_ulonglong,
) -> Status {
    crate::sys::NOT_SUPPORTED
}

/// Memory handles between processes are not offered.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemImportFromShareableHandle(
    _out: *mut u64,
    _handle: *mut c_void,
    _kind: c_uint,
) -> Status {
    crate::sys::NOT_SUPPORTED
}
