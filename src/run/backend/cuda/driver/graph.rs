//! Calls of a library, recorded on their second run and replayed from then on.
//!
//! cuDNN's convolutions keep the host for 0.16 ms each (ResNet-50 with 16 images on an H200, 158
//! calls an iteration), which is longer than most of them take there. A replay launches the same
//! kernels on the same memory, in some microseconds.

use cudarc::driver::{result, sys};

use super::{Queue, fault};
use crate::backend::operators::KernelError;

/// How a call that is the same in each iteration comes onto a stream.
pub enum Replay {
    /// By the library; its kernels are loaded meanwhile.
    First,
    /// By the library, and recorded.
    Second,
    /// As recorded.
    Recorded(Recorded),
    /// By the library: it can't be recorded.
    Never,
}

/// The kernels of a call.
pub struct Recorded(sys::CUgraphExec);

impl Replay {
    /// Puts what `call` does on the queue.
    ///
    /// # Errors
    /// When the library or the driver refuses.
    pub fn run(
        &mut self,
        queue: &Queue,
        call: impl Fn() -> Result<(), KernelError>,
    ) -> Result<(), KernelError> {
        match self {
            Self::First => *self = Self::Second,
            Self::Second => *self = queue.record_call(&call).map_or(Self::Never, Self::Recorded),
            _ => {}
        }
        match self {
            Self::Recorded(recorded) => Ok(queue.replay(recorded)?),
            _ => call(),
        }
    }
}

impl Queue {
    /// Records what a call puts on this stream, and does not run it. `None` where the call or the
    /// driver does not allow that.
    fn record_call(&self, call: impl Fn() -> Result<(), KernelError>) -> Option<Recorded> {
        // Other threads may do what they like meanwhile, and the library may load kernels.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is alive, and its capture ends below.
        unsafe { result::stream::begin_capture(self.stream, mode) }.ok()?;
        let called = call();
        // SAFETY: as above.
        let graph = unsafe { result::stream::end_capture(self.stream) }.ok()?;
        if graph.is_null() {
            return None;
        }
        let flags = sys::CUgraphInstantiate_flags(0);
        // SAFETY: the graph was made above, and goes when it is instantiated.
        let made = unsafe {
            let made = called.is_ok().then(|| result::graph::instantiate(graph, flags));
            let _ = sys::cuGraphDestroy(graph);
            made
        };
        Some(Recorded(made?.ok()?))
    }

    fn replay(&self, recorded: &Recorded) -> Result<(), super::Fault> {
        // SAFETY: the recorded call's operands are those of its step, which runs now; the next
        // launch comes after this one on the same stream.
        unsafe { sys::cuGraphLaunch(recorded.0, self.stream) }
            .result()
            .map_err(fault("does not replay a library's call"))
    }
}

impl Drop for Recorded {
    fn drop(&mut self) {
        // SAFETY: made once, given back once.
        let _ = unsafe { sys::cuGraphExecDestroy(self.0) };
    }
}
