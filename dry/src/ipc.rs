//! Device memory and events that one process opens and another one owns. The owner is charged for
//! the memory; here the other sees zeros in its place.

use std::ffi::{c_uint, c_void};

use crate::device::{current, fail};
use crate::state::with;
use crate::stream::cudaEventCreateWithFlags;
use crate::sys::{INVALID_VALUE, OUT_OF_MEMORY, SUCCESS, Status, put};

/// What the owner sends to the other process: 64 bytes that only this library reads.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Shared {
    /// Length of the mapping; 0 for an event.
    mapped: u64,
    /// Tells blocks apart: PyTorch opens each block once.
    address: u64,
    process: u64,
    rest: [u64; 5],
}

fn shared(mapped: u64, address: u64) -> Shared {
    Shared { mapped, address, process: u64::from(std::process::id()), rest: [0; 5] }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaIpcGetMemHandle(out: *mut Shared, at: *mut c_void) -> Status {
    let Some((start, block)) = with(|s| s.memory.block_of(at as u64)) else {
        return fail(INVALID_VALUE);
    };
    unsafe { put(out, shared(block.mapped, start)) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaIpcOpenMemHandle(
    out: *mut *mut c_void,
    handle: Shared,
    _flags: c_uint,
) -> Status {
    if handle.mapped == 0 {
        return fail(INVALID_VALUE);
    }
    let device = current();
    let Some(at) = with(|s| s.memory.reserve(device, handle.mapped)) else {
        return fail(OUT_OF_MEMORY);
    };
    unsafe { put(out, at as *mut c_void) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaIpcCloseMemHandle(at: *mut c_void) -> Status {
    if with(|s| s.memory.release(at as u64)) { SUCCESS } else { fail(INVALID_VALUE) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaIpcGetEventHandle(out: *mut Shared, event: *mut c_void) -> Status {
    unsafe { put(out, shared(0, event as u64)) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaIpcOpenEventHandle(out: *mut *mut c_void, _handle: Shared) -> Status {
    const INTERPROCESS: c_uint = 4;
    unsafe { cudaEventCreateWithFlags(out, INTERPROCESS) }
}
