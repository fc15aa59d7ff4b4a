//! Streams and events. Work is done when it is asked for, so that only events can be unfinished,
//! and only where the run asks for late ones.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::config::config;
use crate::launch::now;
use crate::state::with;
use crate::sys::{NOT_READY, SUCCESS, Status, put};

type Handle = *mut c_void;

/// What one operation takes on the virtual clock, in milliseconds.
const OPERATION_MS: f32 = 0.01;

/// An event: the clock when it was recorded, and the capture in which that was.
pub struct Event {
    at: AtomicU64,
    capture: AtomicU64,
    pending: AtomicBool,
}

/// Waits that the host made, for late events: a synchronisation finishes all that was recorded
/// before it.
static SYNCHRONISED: AtomicU64 = AtomicU64::new(0);

fn synchronise() -> Status {
    SYNCHRONISED.store(now(), Ordering::SeqCst);
    SUCCESS
}

macro_rules! synchronising {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() -> Status {
            synchronise()
        }
    )* };
}

synchronising! {
    cudaDeviceSynchronize cudaStreamSynchronize cuCtxSynchronize cuStreamSynchronize
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaStreamCreateWithPriority(
    out: *mut Handle,
    _flags: c_uint,
    priority: c_int,
) -> Status {
    unsafe { put(out, Box::into_raw(Box::new([priority; 16])).cast()) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaStreamCreate(out: *mut Handle) -> Status {
    unsafe { cudaStreamCreateWithPriority(out, 0, 0) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaStreamCreateWithFlags(out: *mut Handle, flags: c_uint) -> Status {
    unsafe { cudaStreamCreateWithPriority(out, flags, 0) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreate(out: *mut Handle, flags: c_uint) -> Status {
    unsafe { cudaStreamCreateWithPriority(out, flags, 0) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreateWithPriority(
    out: *mut Handle,
    flags: c_uint,
    priority: c_int,
) -> Status {
    unsafe { cudaStreamCreateWithPriority(out, flags, priority) }
}

/// Streams are few and their addresses tell them apart in reports: none is reused.
#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamDestroy(_: Handle) -> Status {
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaStreamGetPriority(stream: Handle, out: *mut c_int) -> Status {
    // Handles 0, 1 and 2 are the default streams.
    let value = if stream as usize <= 2 { 0 } else { unsafe { *stream.cast::<c_int>() } };
    unsafe { put(out, value) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaStreamGetFlags(_stream: Handle, out: *mut c_uint) -> Status {
    unsafe { put(out, 1) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamQuery(_stream: Handle) -> Status {
    SUCCESS
}

/// A wait on a stream: an event of a capture draws the stream into it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaStreamWaitEvent(stream: Handle, event: Handle, _: c_uint) -> Status {
    // SAFETY: the caller gives an event of ours, or null.
    if let Some(event) = unsafe { event.cast::<Event>().as_ref() } {
        let capture = event.capture.load(Ordering::Relaxed);
        if capture != 0 {
            with(|s| s.captures.join(stream as u64, capture));
        }
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamWaitEvent(stream: Handle, event: Handle, flags: c_uint) -> Status {
    unsafe { cudaStreamWaitEvent(stream, event, flags) }
}

/// Host functions run at once: all work before them is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaLaunchHostFunc(
    _stream: Handle,
    function: Option<unsafe extern "C" fn(*mut c_void)>,
    data: *mut c_void,
) -> Status {
    if let Some(function) = function {
        // SAFETY: the caller's function with the caller's data.
        unsafe { function(data) };
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaStreamAddCallback(
    stream: Handle,
    function: Option<unsafe extern "C" fn(Handle, Status, *mut c_void)>,
    data: *mut c_void,
    _flags: c_uint,
) -> Status {
    if let Some(function) = function {
        // SAFETY: the caller's function with the caller's data.
        unsafe { function(stream, SUCCESS, data) };
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaEventCreateWithFlags(out: *mut Handle, _flags: c_uint) -> Status {
    let event = Event {
        at: AtomicU64::new(0),
        capture: AtomicU64::new(0),
        pending: AtomicBool::new(false),
    };
    unsafe { put(out, Box::into_raw(Box::new(event)).cast()) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaEventCreate(out: *mut Handle) -> Status {
    unsafe { cudaEventCreateWithFlags(out, 0) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventCreate(out: *mut Handle, flags: c_uint) -> Status {
    unsafe { cudaEventCreateWithFlags(out, flags) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaEventDestroy(event: Handle) -> Status {
    if !event.is_null() {
        // SAFETY: the caller gives an event of ours, once.
        drop(unsafe { Box::from_raw(event.cast::<Event>()) });
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventDestroy_v2(event: Handle) -> Status {
    unsafe { cudaEventDestroy(event) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaEventRecord(event: Handle, stream: Handle) -> Status {
    // SAFETY: the caller gives an event of ours, or null.
    if let Some(event) = unsafe { event.cast::<Event>().as_ref() } {
        event.at.store(now(), Ordering::Relaxed);
        event.pending.store(true, Ordering::Relaxed);
        let capture = with(|s| s.captures.containing(stream as u64));
        event.capture.store(capture.unwrap_or(0), Ordering::Relaxed);
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaEventRecordWithFlags(
    event: Handle,
    stream: Handle,
    _flags: c_uint,
) -> Status {
    unsafe { cudaEventRecord(event, stream) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventRecord(event: Handle, stream: Handle) -> Status {
    unsafe { cudaEventRecord(event, stream) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaEventQuery(event: Handle) -> Status {
    if !config().late {
        return SUCCESS;
    }
    // SAFETY: the caller gives an event of ours, or null.
    let Some(event) = (unsafe { event.cast::<Event>().as_ref() }) else { return SUCCESS };
    let at = event.at.load(Ordering::Relaxed);
    if event.pending.load(Ordering::Relaxed) && at >= SYNCHRONISED.load(Ordering::SeqCst) {
        return NOT_READY;
    }
    event.pending.store(false, Ordering::Relaxed);
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventQuery(event: Handle) -> Status {
    unsafe { cudaEventQuery(event) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaEventSynchronize(event: Handle) -> Status {
    // SAFETY: the caller gives an event of ours, or null.
    if let Some(event) = unsafe { event.cast::<Event>().as_ref() } {
        event.pending.store(false, Ordering::Relaxed);
        SYNCHRONISED.fetch_max(event.at.load(Ordering::Relaxed), Ordering::SeqCst);
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventSynchronize(event: Handle) -> Status {
    unsafe { cudaEventSynchronize(event) }
}

/// Milliseconds by the virtual clock; never 0, since scripts divide by it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaEventElapsedTime(out: *mut f32, start: Handle, end: Handle) -> Status {
    // SAFETY: the caller gives events of ours, or null.
    let at = |e: Handle| {
        unsafe { e.cast::<Event>().as_ref() }.map_or(0, |e| e.at.load(Ordering::Relaxed))
    };
    let operations = at(end).saturating_sub(at(start)).max(1);
    unsafe { put(out, operations as f32 * OPERATION_MS) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaEventElapsedTime_v2(
    out: *mut f32,
    start: Handle,
    end: Handle,
) -> Status {
    unsafe { cudaEventElapsedTime(out, start, end) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventElapsedTime(out: *mut f32, start: Handle, end: Handle) -> Status {
    unsafe { cudaEventElapsedTime(out, start, end) }
}
