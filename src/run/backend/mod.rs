//! Devices that can run a job: the embedded host, and CUDA where there is a GPU.
//!
//! The interface is [`Device`]: one arena, one pinned host store, three in-order streams, and items
//! whose waits are fixed once for each plan in a [`Script`]. Items correspond to CUDA calls: a wait
//! for an item of another stream is `cuStreamWaitEvent`, a copy `cuMemcpyAsync`, an end
//! `cuEventRecord` with timing. Each item is enqueued after all items that it waits for, so every
//! event is recorded before it is waited for.

#![expect(clippy::cast_possible_truncation, reason = "PyTorch's conversions between types")]

#[cfg(feature = "cuda")]
pub mod cuda;
pub mod host;
pub mod operators;
pub mod window;

use crate::job::Dtype;
use crate::units::{Bytes, Nanos, OpId, TensorId};

/// A queue of a device. Its items run in order, one at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stream {
    /// Operators.
    Compute,
    /// Copies from host to device.
    H2d,
    /// Copies from device to host.
    D2h,
}

impl Stream {
    /// All streams, by index.
    pub const ALL: [Self; 3] = [Self::Compute, Self::H2d, Self::D2h];

    /// Its position in [`Stream::ALL`].
    #[must_use]
    pub const fn index(self) -> usize {
        match self {
            Self::Compute => 0,
            Self::H2d => 1,
            Self::D2h => 2,
        }
    }
}

/// The memories of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// The arena.
    Device,
    /// The pinned store.
    Host,
}

/// A number that is read right after the step that wrote it, before its bytes are reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capture {
    /// Its address in the arena.
    pub offset: Bytes,
    /// Its type, a floating-point one.
    pub dtype: Dtype,
}

/// One execution of an operator, with addresses.
#[derive(Clone, Debug)]
pub struct StepWork {
    /// The operator.
    pub operator: OpId,
    /// The address of the storage of each tensor that it touches, sorted by tensor. A tensor that
    /// is not in the list is left out by a replay.
    pub addresses: Vec<(TensorId, Bytes)>,
    /// Whether it repeats an operator of the same iteration.
    pub replay: bool,
    /// The operator whose random numbers it draws.
    pub random_key: u64,
    /// Address and size of each residency that begins with it: outputs and workspace.
    pub begins: Vec<(Bytes, Bytes)>,
    /// Address and size of the operator's own workspace, if it has one.
    pub workspace: Option<(Bytes, Bytes)>,
    /// Where to read the loss, if it writes the loss.
    pub capture: Option<Capture>,
}

/// What an item does.
#[derive(Clone, Debug)]
pub enum Work {
    /// Run an operator.
    Step(StepWork),
    /// Copy between arena and store, in the direction of its stream.
    Copy {
        /// Address in the arena.
        device: Bytes,
        /// Address in the store.
        host: Bytes,
        /// Number of bytes.
        bytes: Bytes,
    },
}

/// Something that a stream does once in each iteration. Items are identified by their position in
/// [`Script::items`].
#[derive(Clone, Debug)]
pub struct Item {
    /// The stream that runs it.
    pub stream: Stream,
    /// Items of other streams that must have ended, a copy's trigger among them; those that follow
    /// from others are left out.
    pub waits: Vec<usize>,
    /// The copies among `waits` whose tensors a step reads. A step that has to
    /// wait for one of them is late.
    pub fetches: Vec<usize>,
    /// The step after whose end a copy becomes due; `None` for steps, and for copies that are due
    /// at the start of the iteration.
    pub trigger: Option<usize>,
    /// The work.
    pub work: Work,
    /// The end of the highest bytes of the arena that it touches.
    pub top: Bytes,
    /// The stretch for which the job must hold the window when it starts ([`crate::sim::window`]).
    pub stretch: Option<usize>,
}

/// An iteration in the form that a device runs.
#[derive(Clone, Debug)]
pub struct Script {
    /// Steps, then copies.
    pub items: Vec<Item>,
    /// The items of each stream, in order.
    pub streams: [Vec<usize>; 3],
    /// All items, each after those that it waits for.
    pub order: Vec<usize>,
    /// Bytes of the arena.
    pub arena: Bytes,
    /// Bytes of the pinned store.
    pub store: Bytes,
    /// For each stretch in the window, the items after whose ends it is over.
    pub stretches: Vec<Vec<usize>>,
}

/// The measurements of one iteration.
#[derive(Clone, Debug, Default)]
pub struct Measured {
    /// Start and end of each item, from the start of the iteration; nothing where they were not
    /// timed.
    pub items: Vec<(Nanos, Nanos)>,
    /// How long a GPU stood still from the end of the iteration before.
    pub gap: Nanos,
    /// When all items had ended.
    pub iteration: Nanos,
    /// How many steps had to wait for a copy that they read, where items were timed.
    pub late: u64,
    /// How long it waited for the window while other jobs held it.
    pub window: Nanos,
    /// The captured loss.
    pub loss: Option<f32>,
}

/// Why a device stopped.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Failure {
    /// An operator could not be run.
    #[error("{problem}")]
    Operator {
        /// The operator.
        operator: OpId,
        /// The kernel's error.
        problem: operators::KernelError,
    },
    /// The device itself failed.
    #[error("{0}")]
    Device(String),
}

/// A device with a script loaded. No method allocates after the first iteration has begun.
pub trait Device {
    /// Writes bytes while no iteration runs.
    ///
    /// # Errors
    /// When they don't fit, or the device fails.
    fn write(&mut self, memory: Memory, offset: Bytes, data: &[u8]) -> Result<(), Failure>;

    /// Reads bytes while no iteration runs.
    ///
    /// # Errors
    /// As [`Device::write`].
    fn read(&mut self, memory: Memory, offset: Bytes, into: &mut [u8]) -> Result<(), Failure>;

    /// Starts the clock of an iteration, counted from 0. Each item must be timed if `timed`; where
    /// that costs time, none is otherwise.
    ///
    /// # Errors
    /// When the device has failed.
    fn begin(&mut self, iteration: u64, timed: bool) -> Result<(), Failure>;

    /// Puts the next item of [`Script::order`] on its stream.
    ///
    /// # Errors
    /// When the device has failed.
    fn enqueue(&mut self, item: usize) -> Result<(), Failure>;

    /// Waits until all enqueued items have ended, and returns their measurements.
    ///
    /// # Errors
    /// The first failure of an item.
    fn finish(&mut self, measured: &mut Measured) -> Result<(), Failure>;

    /// The end of the highest bytes of the arena touched so far.
    fn high_water(&self) -> Bytes;
}
