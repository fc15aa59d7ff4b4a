//! A profiler's CPU trace in the estimator's form: small records in time order, interned texts.
//!
//! It has the operators, memory events, marks and modules of a Kineto Chrome trace, which is read
//! in one pass in bounded memory.

mod buffer;
mod event;
mod intern;
mod keep;
mod number;
mod read;
mod scan;
#[cfg(test)]
mod tests;

pub use read::{Limits, TraceError, parse, read};

use crate::units::Bytes;

/// The largest block or tensor: 1 TiB. That is far above any GPU's memory, and millions of such
/// sizes still add up to less than 2^63.
pub const LARGEST_BLOCK: u64 = 1 << 40;

/// The id of an interned text: an operator's name, or a JSON value as it is in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Text(pub u32);

/// A thread of the trace, numbered in order of first appearance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Thread(pub u16);

/// The arguments of a call: four columns of the event's `args`, each with its JSON text as it is in
/// the file. `None` where the trace has none (`record_shapes` off). All four are interned together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Args {
    /// `Input Dims`.
    pub dims: Option<Text>,
    /// `Input Strides`.
    pub strides: Option<Text>,
    /// `Input type`.
    pub types: Option<Text>,
    /// `Concrete Inputs`.
    pub concrete: Option<Text>,
}

/// A complete event of category `cpu_op`. Times are nanoseconds since the trace's first event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Op {
    /// When it began.
    pub start: u64,
    /// When it ended; equal starts nest by the later end.
    pub end: u64,
    /// The name, such as `aten::add`.
    pub name: Text,
    /// The thread it ran on.
    pub thread: Thread,
    /// Position in [`Trace::args`].
    pub args: u32,
    /// `Sequence number`, which a backward operator shares with its forward operator; -1 if there
    /// is none.
    pub sequence: i64,
}

/// A `[memory]` instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Its time.
    pub time: u64,
    /// The address, which may be reused after a free.
    pub address: u64,
    /// Bytes allocated; negative for a free.
    pub bytes: i64,
    /// The thread in which it happened.
    pub thread: Thread,
    /// Whether it is host memory (`Device Type` 0) rather than a GPU's.
    pub host: bool,
}

/// What a trace recorded on a GPU says of that GPU's memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Measured {
    /// The kind of the device, PyTorch's `Device Type`: 1 is CUDA.
    pub kind: i64,
    /// Its number.
    pub device: i64,
    /// Its memory events.
    pub events: u64,
    /// The largest `Total Allocated` of an event; none where no event has it.
    pub allocated: Option<Bytes>,
    /// The largest `Total Reserved` of an event; none where no event has it.
    pub reserved: Option<Bytes>,
}

/// A `user_annotation`: `ProfilerStep#3`, `Optimizer.step#Adam.step`,
/// `Optimizer.zero_grad#Adam.zero_grad`, …
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// When it began.
    pub start: u64,
    /// When it ended.
    pub end: u64,
    /// The name.
    pub name: Text,
    /// The thread it ran on.
    pub thread: Thread,
}

/// A call of a module: a `python_function` named `nn.Module: Conv2d_3`. Other Python events are not
/// kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Module {
    /// When it began.
    pub start: u64,
    /// When it ended.
    pub end: u64,
    /// The name, such as `Conv2d_3`.
    pub name: Text,
    /// The thread it ran on.
    pub thread: Thread,
}

/// A whole trace. Every list is in time order.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    /// Interned texts, by [`Text`].
    pub texts: Vec<Box<str>>,
    /// Interned arguments; [`Op::args`] points here.
    pub args: Vec<Args>,
    /// Operators, by start, enclosing before enclosed.
    pub ops: Vec<Op>,
    /// Memory events, in the file's order where their times are equal.
    pub memory: Vec<Memory>,
    /// Marks, by start, enclosing before enclosed.
    pub marks: Vec<Mark>,
    /// Module calls, by start, enclosing before enclosed.
    pub modules: Vec<Module>,
    /// What was recorded of each device that is not the host, by kind and number. Nothing in a
    /// trace that was recorded on a CPU.
    pub measured: Vec<Measured>,
    /// Sentences about the file that a user of the estimate should know, such as that it was cut
    /// off or that events were left out.
    pub notes: Vec<String>,
    /// Bytes of the file that were read, after decompression.
    pub bytes: Bytes,
}

impl Trace {
    /// The text of an id.
    #[must_use]
    pub fn text(&self, id: Text) -> &str {
        &self.texts[id.0 as usize]
    }
}
