//! Devices that can run a job: the embedded host, and CUDA where there is a GPU.
//!
//! The seam is [`Device`]: one arena, one pinned host store, three in-order streams, and items
//! whose waits are fixed once per plan in a [`Script`]. An item maps to CUDA calls one to one: a
//! wait on an item of another stream is `cuStreamWaitEvent`, a copy `cuMemcpyAsync`, an end
//! `cuEventRecord` with timing. Items are enqueued in an order in which each stands after all it
//! waits for, so every event is recorded before it is waited on.

#[cfg(feature = "cuda")]
pub mod cuda;
pub mod host;
pub mod operators;

use crate::job::Dtype;
use crate::units::{Bytes, Nanos, OpId, TensorId};

/// A queue of a device; what is on it runs in order, one item at a time.
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
    /// All of them, by index.
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

/// A memory of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// The arena.
    Device,
    /// The pinned store.
    Host,
}

/// A number to keep right after the step that wrote it, before its bytes are used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capture {
    /// Where it lies in the arena.
    pub offset: Bytes,
    /// Its type; a floating one.
    pub dtype: Dtype,
}

/// One execution of an operator, by addresses.
#[derive(Clone, Debug)]
pub struct StepWork {
    /// The operator.
    pub operator: OpId,
    /// Where the storage of each tensor it touches begins, sorted by tensor. A tensor that is
    /// missing is one that a replay leaves out.
    pub addresses: Vec<(TensorId, Bytes)>,
    /// It repeats an operator of the same iteration.
    pub replay: bool,
    /// The operator whose random numbers it draws.
    pub random_key: u64,
    /// Address and size of what begins with it: outputs and workspace.
    pub begins: Vec<(Bytes, Bytes)>,
    /// Address and size of the operator's own workspace, where it has one.
    pub workspace: Option<(Bytes, Bytes)>,
    /// The loss, when it writes it.
    pub capture: Option<Capture>,
}

/// What an item does.
#[derive(Clone, Debug)]
pub enum Work {
    /// Run an operator.
    Step(StepWork),
    /// Copy between arena and store, in the direction of its stream.
    Copy {
        /// First byte in the arena.
        device: Bytes,
        /// First byte in the store.
        host: Bytes,
        /// How much.
        bytes: Bytes,
    },
}

/// When an item may start by the clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Due {
    /// The item after whose end; `None` for the start of the iteration.
    pub after: Option<usize>,
    /// How long after it.
    pub delay: Nanos,
}

/// Something that a stream does once in each iteration. Items are known by their position in
/// [`Script::items`].
#[derive(Clone, Debug)]
pub struct Item {
    /// Where it runs.
    pub stream: Stream,
    /// Items of other streams that must have ended.
    pub waits: Vec<usize>,
    /// Those of `waits` that bring what a step reads: when the step has to wait for one, the delays
    /// before it on its stream are cut short.
    pub fetches: Vec<usize>,
    /// For copies.
    pub due: Option<Due>,
    /// The work.
    pub work: Work,
    /// The end of the highest bytes that it touches.
    pub top: Bytes,
}

/// An iteration as a device sees it.
#[derive(Clone, Debug)]
pub struct Script {
    /// Steps, then copies.
    pub items: Vec<Item>,
    /// The items of each stream, in order.
    pub streams: [Vec<usize>; 3],
    /// All items in an order in which each stands after what it waits for.
    pub order: Vec<usize>,
    /// Size of the arena.
    pub arena: Bytes,
    /// Size of the pinned store.
    pub store: Bytes,
}

/// What one iteration was like.
#[derive(Clone, Debug, Default)]
pub struct Measured {
    /// Start and end of each item, from the start of the iteration.
    pub items: Vec<(Nanos, Nanos)>,
    /// When all had ended.
    pub iteration: Nanos,
    /// Steps that found what they read still on its way.
    pub late: u64,
    /// Copies whose delay was cut short.
    pub passive: u64,
    /// The captured loss.
    pub loss: Option<f32>,
}

/// A device that stopped.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Failure {
    /// An operator could not be run.
    #[error("{problem}")]
    Operator {
        /// The operator.
        operator: OpId,
        /// What its kernel said.
        problem: operators::KernelError,
    },
    /// The device itself.
    #[error("{0}")]
    Device(String),
}

/// A device with a script loaded. Nothing here allocates once the first iteration has begun.
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

    /// Starts the clock of an iteration, counted from 0.
    ///
    /// # Errors
    /// When the device has failed.
    fn begin(&mut self, iteration: u64) -> Result<(), Failure>;

    /// Puts the next item of [`Script::order`] on its stream.
    ///
    /// # Errors
    /// When the device has failed.
    fn enqueue(&mut self, item: usize) -> Result<(), Failure>;

    /// Waits until all that was enqueued has ended, and says how it went.
    ///
    /// # Errors
    /// The first failure of an item.
    fn finish(&mut self, measured: &mut Measured) -> Result<(), Failure>;

    /// The end of the highest bytes of the arena that anything has touched so far.
    fn high_water(&self) -> Bytes;
}
