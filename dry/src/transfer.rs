//! The runtime's memory functions: allocation, copies, fills, pointer attributes.

use std::ffi::{c_int, c_uint, c_void};

use crate::config::config;
use crate::device::current;
use crate::launch::tick;
use crate::memory::{BACKED, Content, Pinned};
use crate::read;
use crate::state::with;
use crate::sys::{self, INVALID_VALUE, OUT_OF_MEMORY, SUCCESS, Status, put};

type Pointer = *mut c_void;

/// Device memory on the current device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaMalloc(out: *mut Pointer, bytes: usize) -> Status {
    if bytes == 0 {
        unsafe { put(out, std::ptr::null_mut()) };
        return SUCCESS;
    }
    match with(|s| s.memory.allocate(current(), bytes as u64)) {
        Some(at) => {
            unsafe { put(out, at as Pointer) };
            SUCCESS
        }
        None => crate::device::fail(OUT_OF_MEMORY),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaMallocManaged(out: *mut Pointer, bytes: usize, _: c_uint) -> Status {
    unsafe { cudaMalloc(out, bytes) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaMallocAsync(out: *mut Pointer, bytes: usize, _: Pointer) -> Status {
    match with(|s| s.memory.allocate_pooled(current(), bytes as u64)) {
        Some(at) => {
            unsafe { put(out, at as Pointer) };
            SUCCESS
        }
        None => crate::device::fail(OUT_OF_MEMORY),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaMallocFromPoolAsync(
    out: *mut Pointer,
    bytes: usize,
    _pool: Pointer,
    stream: Pointer,
) -> Status {
    unsafe { cudaMallocAsync(out, bytes, stream) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaFree(at: Pointer) -> Status {
    if at.is_null() || with(|s| s.memory.release(at as u64)) { SUCCESS } else { INVALID_VALUE }
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaFreeAsync(at: Pointer, _: Pointer) -> Status {
    cudaFree(at)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaMemGetInfo(free: *mut usize, total: *mut usize) -> Status {
    unsafe {
        put(free, with(|s| s.memory.free(current())) as usize);
        put(total, config().total_bytes as usize);
    }
    SUCCESS
}

/// Pinned memory: zeros that take room once they are touched.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaHostAlloc(out: *mut Pointer, bytes: usize, _: c_uint) -> Status {
    let Some(at) = sys::map_lazily(0, bytes.max(1)) else {
        return crate::device::fail(OUT_OF_MEMORY);
    };
    let pinned = Pinned { bytes: bytes.max(1) as u64, ours: true, lazy: true };
    with(|s| s.memory.pin(at, pinned));
    unsafe { put(out, at as Pointer) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaMallocHost(out: *mut Pointer, bytes: usize) -> Status {
    unsafe { cudaHostAlloc(out, bytes, 0) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaFreeHost(at: Pointer) -> Status {
    if at.is_null() || with(|s| s.memory.unpin(at as u64)) { SUCCESS } else { INVALID_VALUE }
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaHostRegister(at: Pointer, bytes: usize, _: c_uint) -> Status {
    let (at, bytes) = (at as u64, bytes as u64);
    let lazy = sys::is_private(at, bytes);
    with(|s| s.memory.pin(at, Pinned { bytes, ours: false, lazy }));
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaHostUnregister(at: Pointer) -> Status {
    if with(|s| s.memory.unpin(at as u64)) { SUCCESS } else { INVALID_VALUE }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaHostGetDevicePointer(
    out: *mut Pointer,
    host: Pointer,
    _: c_uint,
) -> Status {
    unsafe { put(out, host) };
    SUCCESS
}

/// Carries out a copy, whichever way its addresses say.
pub fn copy(to: u64, from: u64, bytes: u64) -> Status {
    if bytes == 0 {
        return SUCCESS;
    }
    tick();
    let (to_device, from_device) =
        with(|s| (s.memory.block_of(to).is_some(), s.memory.block_of(from).is_some()));
    match (from_device, to_device) {
        (false, false) => unsafe { raw(to, from, bytes) },
        (false, true) if bytes <= BACKED => {
            unsafe { raw(to, from, bytes) };
            with(|s| s.memory.note(to, to + bytes));
        }
        (false, true) => with(|s| s.memory.forget(to, to + bytes)),
        (true, true) => with(|s| s.memory.carry(from, to, bytes)),
        (true, false) => to_host(to, from, bytes),
    }
    SUCCESS
}

/// Copies from the device, and tells of the read.
fn to_host(to: u64, from: u64, bytes: u64) {
    let (content, nothing) = with(|s| {
        let known = s.memory.known_parts(from, from + bytes);
        (s.memory.content(from, from + bytes), known.is_empty())
    });
    if nothing && let Some(answer) = read::answer(bytes) {
        // SAFETY: the caller answers for its host address; ours are mapped.
        unsafe { raw(to, answer.as_ptr() as u64, bytes) };
        return;
    }
    if content != Content::Unknown || bytes <= BACKED && !nothing {
        unsafe { raw(to, from, bytes) };
    } else if with(|s| s.memory.is_lazy(to, bytes)) {
        sys::zero_lazily(to, bytes);
    } else {
        // SAFETY: host memory that the caller answers for.
        unsafe { std::ptr::write_bytes(to as *mut u8, 0, bytes as usize) };
    }
    read::tell(content, from, bytes);
}

/// The fewest bytes for which it pays to ask whether they are zeros that nothing has touched.
const LARGE: u64 = 32 << 10;

/// Copies; the state must not be locked.
///
/// SAFETY: the caller of the CUDA function answers for its host addresses; ours are mapped.
unsafe fn raw(to: u64, from: u64, bytes: u64) {
    let lazy = |at| with(|s| s.memory.is_lazy(at, bytes));
    if bytes >= LARGE && lazy(to) && lazy(from) && sys::is_untouched(from, bytes) {
        sys::zero_lazily(to, bytes);
        // The pages at both ends may hold something else, too.
        let (first, last) = sys::whole_pages(from, bytes);
        for (start, end) in [(from, first), (last, from + bytes)] {
            let length = (end - start) as usize;
            // SAFETY: inside the stretch that is copied.
            let edge = unsafe { std::slice::from_raw_parts(start as *const u8, length) };
            if edge.iter().any(|&byte| byte != 0) {
                let at = to + (start - from);
                unsafe { std::ptr::copy(edge.as_ptr(), at as *mut u8, length) };
            }
        }
        return;
    }
    unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes as usize) };
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemcpy(to: Pointer, from: Pointer, bytes: usize, _kind: c_int) -> Status {
    copy(to as u64, from as u64, bytes as u64)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemcpyAsync(
    to: Pointer,
    from: Pointer,
    bytes: usize,
    _kind: c_int,
    _stream: Pointer,
) -> Status {
    copy(to as u64, from as u64, bytes as u64)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemcpyPeer(
    to: Pointer,
    _to_device: c_int,
    from: Pointer,
    _from_device: c_int,
    bytes: usize,
) -> Status {
    copy(to as u64, from as u64, bytes as u64)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemcpyPeerAsync(
    to: Pointer,
    _to_device: c_int,
    from: Pointer,
    _from_device: c_int,
    bytes: usize,
    _stream: Pointer,
) -> Status {
    copy(to as u64, from as u64, bytes as u64)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemcpy2D(
    to: Pointer,
    to_pitch: usize,
    from: Pointer,
    from_pitch: usize,
    width: usize,
    height: usize,
    _kind: c_int,
) -> Status {
    for row in 0..height {
        let (to, from) = (to as usize + row * to_pitch, from as usize + row * from_pitch);
        copy(to as u64, from as u64, width as u64);
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemcpy2DAsync(
    to: Pointer,
    to_pitch: usize,
    from: Pointer,
    from_pitch: usize,
    width: usize,
    height: usize,
    kind: c_int,
    _stream: Pointer,
) -> Status {
    cudaMemcpy2D(to, to_pitch, from, from_pitch, width, height, kind)
}

/// Fills device memory. PyTorch clears with this what a kernel is to add to: that is not known, and
/// 0 like all that isn't.
pub fn fill(at: u64, byte: u8, bytes: u64) -> Status {
    tick();
    with(|s| {
        if s.memory.block_of(at).is_none() {
            // SAFETY: host memory that the caller answers for.
            unsafe { std::ptr::write_bytes(at as *mut u8, byte, bytes as usize) };
            return;
        }
        s.memory.forget(at, at + bytes);
        if bytes <= BACKED && byte != 0 {
            // SAFETY: inside one of our blocks.
            unsafe { std::ptr::write_bytes(at as *mut u8, byte, bytes as usize) };
            s.memory.note(at, at + bytes);
        }
    });
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemset(at: Pointer, byte: c_int, bytes: usize) -> Status {
    fill(at as u64, byte as u8, bytes as u64)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemsetAsync(at: Pointer, byte: c_int, bytes: usize, _: Pointer) -> Status {
    fill(at as u64, byte as u8, bytes as u64)
}

/// `struct cudaPointerAttributes` as CUDA 12 and 13 share it; CUDA 13 has reserved words behind it.
#[repr(C)]
pub struct PointerAttributes {
    kind: c_int,
    device: c_int,
    device_pointer: Pointer,
    host_pointer: Pointer,
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaPointerGetAttributes(
    out: *mut PointerAttributes,
    at: Pointer,
) -> Status {
    let address = at as u64;
    let null = std::ptr::null_mut();
    let answer = with(|s| match s.memory.block_of(address) {
        Some((_, block)) => PointerAttributes {
            kind: 2,
            device: block.device,
            device_pointer: at,
            host_pointer: null,
        },
        None if s.memory.is_pinned(address) => {
            PointerAttributes { kind: 1, device: 0, device_pointer: at, host_pointer: at }
        }
        None => PointerAttributes { kind: 0, device: -2, device_pointer: null, host_pointer: at },
    });
    unsafe { put(out, answer) };
    SUCCESS
}

/// What is known of a stretch of device memory, as [`Content`]'s numbers, where someone noted what
/// is in the allocation that it lies in.
#[unsafe(no_mangle)]
pub extern "C" fn neap_dry_content(allocation: u64, at: u64, bytes: u64) -> c_int {
    with(|s| match s.allocations.is_noted(allocation) {
        true => s.memory.content(at, at + bytes) as c_int,
        false => Content::Unknown as c_int,
    })
}

/// Notes what a caller put into device memory: [`Content`]'s numbers. Unknown makes it 0.
#[unsafe(no_mangle)]
pub extern "C" fn neap_dry_set_content(allocation: u64, at: u64, bytes: u64, content: c_int) {
    with(|s| {
        match content {
            1 => s.memory.note(at, at + bytes),
            2 => s.memory.note_assumed(at, at + bytes),
            _ => return s.memory.forget(at, at + bytes),
        }
        s.allocations.note(allocation);
    });
}

/// Bytes that a device has given out.
#[unsafe(no_mangle)]
pub extern "C" fn neap_dry_reserved(device: c_int) -> u64 {
    with(|s| s.memory.used(device))
}

/// Bytes that a device can give out.
#[unsafe(no_mangle)]
pub extern "C" fn neap_dry_total(_device: c_int) -> u64 {
    config().capacity_bytes
}
