//! A profiler's CPU trace, as the estimator keeps it: small records in time order, texts interned.
//!
//! It holds what a Kineto Chrome trace says about operators, memory events, marks and modules. It
//! is read in one pass in bounded memory.

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

/// No block or tensor has more bytes: 1 TiB, far above any GPU's, while millions of them still add
/// up below 2^63.
pub const LARGEST_BLOCK: u64 = 1 << 40;

/// An interned text (an operator's name, a JSON value as it stood in the file).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Text(pub u32);

/// A thread of the trace, numbered in order of first appearance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Thread(pub u16);

/// What an operator was called with: four columns of the event's `args`, each the JSON text as it
/// stood in the file, `None` where the trace has none (`record_shapes` off). Interned whole.
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
    /// `aten::add`, …
    pub name: Text,
    /// The thread it ran on.
    pub thread: Thread,
    /// Position in [`Trace::args`].
    pub args: u32,
    /// `Sequence number`, which ties a backward operator to its forward one; -1 where there is
    /// none.
    pub sequence: i64,
}

/// A `[memory]` instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// The instant.
    pub time: u64,
    /// The address; reused after a free.
    pub address: u64,
    /// Bytes taken, negative when given back.
    pub bytes: i64,
    /// The thread it ran on.
    pub thread: Thread,
    /// Whether it is the host's memory (`Device Type` 0); a GPU's otherwise.
    pub host: bool,
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

/// A call of a module: a `python_function` named `nn.Module: Conv2d_3`. All other Python events are
/// skipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Module {
    /// When it began.
    pub start: u64,
    /// When it ended.
    pub end: u64,
    /// `Conv2d_3`.
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
    /// What a reader of the estimate should know about the file: it was cut off, events were left
    /// out, … Whole sentences.
    pub notes: Vec<String>,
    /// The file's bytes, decompressed, as far as they were read.
    pub bytes: Bytes,
}

impl Trace {
    /// The text behind an id.
    #[must_use]
    pub fn text(&self, id: Text) -> &str {
        &self.texts[id.0 as usize]
    }
}
