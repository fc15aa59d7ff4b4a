//! CUDA graphs: which streams are being captured, and graphs that remember how much they hold.

use std::collections::HashMap;
use std::ffi::{c_int, c_uint, c_void};

use crate::launch::now;
use crate::state::with;
use crate::sys::{SUCCESS, Status, put};

type Handle = *mut c_void;

/// Captures under way.
#[derive(Default)]
pub struct Captures {
    last: u64,
    /// Stream to capture.
    streams: HashMap<u64, u64>,
    /// Capture to the operations before it.
    started: HashMap<u64, u64>,
}

/// Kernels, copies and calls of libraries so far: what a graph has as its nodes.
fn operations() -> u64 {
    now() + crate::log::work()
}

impl Captures {
    /// The capture that a stream is in.
    pub fn containing(&self, stream: u64) -> Option<u64> {
        self.streams.get(&stream).copied()
    }

    /// Draws a stream into a capture that is still under way.
    pub fn join(&mut self, stream: u64, capture: u64) {
        if self.started.contains_key(&capture) {
            self.streams.entry(stream).or_insert(capture);
        }
    }

    fn begin(&mut self, stream: u64) {
        self.last += 1;
        self.streams.insert(stream, self.last);
        self.started.insert(self.last, operations());
    }

    /// Ends a stream's capture; the number of operations in it.
    fn end(&mut self, stream: u64) -> u64 {
        let Some(capture) = self.streams.remove(&stream) else { return 0 };
        self.streams.retain(|_, c| *c != capture);
        self.started.remove(&capture).map_or(0, |start| operations() - start)
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamBeginCapture(stream: Handle, _mode: c_int) -> Status {
    with(|s| s.captures.begin(stream as u64));
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaStreamEndCapture(stream: Handle, out: *mut Handle) -> Status {
    let operations = with(|s| s.captures.end(stream as u64));
    unsafe { put(out, Box::into_raw(Box::new(operations)).cast()) };
    SUCCESS
}

/// 0 is none, 1 active.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaStreamIsCapturing(stream: Handle, out: *mut c_int) -> Status {
    unsafe { put(out, with(|s| s.captures.containing(stream as u64)).is_some() as c_int) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamIsCapturing(stream: Handle, out: *mut c_int) -> Status {
    unsafe { cudaStreamIsCapturing(stream, out) }
}

/// Status, number, graph and dependencies of a capture. Later versions have one more out-parameter
/// (edges) before the last; all behind the graph are pointers that a caller may leave null, and
/// there is nothing to put there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaStreamGetCaptureInfo(
    stream: Handle,
    status: *mut c_int,
    number: *mut u64,
    graph: *mut Handle,
) -> Status {
    let capture = with(|s| s.captures.containing(stream as u64));
    unsafe {
        put(status, capture.is_some() as c_int);
        put(number, capture.unwrap_or(0));
        if capture.is_some() {
            put(graph, crate::library::dummy());
        }
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaStreamGetCaptureInfo_v2(
    stream: Handle,
    status: *mut c_int,
    number: *mut u64,
    graph: *mut Handle,
) -> Status {
    unsafe { cudaStreamGetCaptureInfo(stream, status, number, graph) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaStreamGetCaptureInfo_v3(
    stream: Handle,
    status: *mut c_int,
    number: *mut u64,
    graph: *mut Handle,
) -> Status {
    unsafe { cudaStreamGetCaptureInfo(stream, status, number, graph) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaGraphCreate(out: *mut Handle, _flags: c_uint) -> Status {
    unsafe { put(out, Box::into_raw(Box::new(0u64)).cast()) };
    SUCCESS
}

macro_rules! instantiate {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(out: *mut Handle) -> Status {
            unsafe { put(out, crate::library::dummy()) };
            SUCCESS
        }
    )* };
}

instantiate! {
    cudaGraphInstantiate cudaGraphInstantiateWithFlags cudaGraphInstantiateWithParams
    cudaUserObjectCreate
}

/// How many nodes a graph has; PyTorch asks in order to warn of an empty one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaGraphGetNodes(
    graph: Handle,
    nodes: *mut Handle,
    count: *mut usize,
) -> Status {
    // SAFETY: the caller gives a graph of ours, or null.
    let operations = unsafe { graph.cast::<u64>().as_ref() }.copied().unwrap_or(0) as usize;
    unsafe {
        if nodes.is_null() {
            put(count, operations);
        } else if !count.is_null() {
            for i in 0..*count {
                nodes.add(i).write(crate::library::dummy());
            }
        }
    }
    SUCCESS
}
