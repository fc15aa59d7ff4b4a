//! The job graph: tensors, operators and how they read and write each other.
//!
//! A *tensor* is one storage with a life. Views are part of how an operator reads it ([`Operand`]).
//! Writing in place makes the next *version* of the same tensor on the same bytes.
//! Operators stand in the order of execution ([`super::order`] finds it and proves it).

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::optimizer::{Group, Optimizer};
use crate::units::{Bytes, OpId, TensorId};

/// The type of a tensor's elements.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "the names are the documentation")]
pub enum Dtype {
    F32,
    F64,
    F16,
    Bf16,
    I64,
    I32,
    I16,
    I8,
    U8,
    Bool,
    C64,
    C128,
}

impl Dtype {
    /// Bytes per element.
    #[must_use]
    pub const fn size(self) -> u64 {
        match self {
            Self::C128 => 16,
            Self::F64 | Self::I64 | Self::C64 => 8,
            Self::F32 | Self::I32 => 4,
            Self::F16 | Self::Bf16 | Self::I16 => 2,
            Self::I8 | Self::U8 | Self::Bool => 1,
        }
    }
}

/// What a tensor is in the job (the papers' categories).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Batch data.
    Input,
    /// A trained weight.
    Parameter,
    /// Long-lived but not trained, such as a running mean.
    Buffer,
    /// What the optimizer keeps for a parameter.
    OptimizerState,
    /// The gradient of a parameter.
    Gradient,
    /// Everything else.
    Activation,
}

/// Which part of the iteration an operator belongs to.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "the names are the documentation")]
pub enum Phase {
    Forward,
    Backward,
    Optimize,
}

/// Whether running an operator a second time in one iteration gives the same values and harms
/// nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Replay {
    /// Yes: it writes nothing that outlives the iteration. In-place writes on activations replay as
    /// a chain.
    #[default]
    Pure,
    /// Yes, when its in-place writes on long-lived tensors are left out (batch norm's running
    /// statistics).
    SkipUpdates,
    /// No.
    Never,
}

/// One storage with a life inside the iteration, or across iterations when nothing generates it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Unique in the graph.
    pub name: String,
    /// Unrounded size of the storage.
    pub bytes: Bytes,
    /// Its role.
    pub role: Role,
    /// Element type of the storage as first seen.
    pub dtype: Dtype,
    /// Shape as first seen (the parameter's, the output's).
    pub shape: Vec<u64>,
    /// The framework keeps it past its last use, round the end of the iteration, and frees it
    /// before this operator (a gradient that waits for `zero_grad`). Its contents are not read
    /// then.
    pub kept_until: Option<OpId>,
}

/// How an operator sees a tensor: which version, and through which view.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operand {
    /// The storage.
    pub tensor: TensorId,
    /// How many in-place writes came before. Version 0 is what the generating operator wrote, or
    /// for a long-lived tensor what the iteration started with. In an output: the version that is
    /// written.
    pub version: u32,
    /// Type of the elements of this view.
    pub dtype: Dtype,
    /// First element, counted in elements of `dtype`.
    pub offset: u64,
    /// Extent of each dimension; empty for a scalar.
    pub shape: Vec<u64>,
    /// Step of each dimension in elements; 0 where `expand` repeats.
    pub stride: Vec<u64>,
}

/// One positional argument of an operator, in the order of its `ATen` schema.
#[derive(Clone, Debug, PartialEq)]
pub enum Arg {
    /// Absent or undefined.
    None,
    /// A tensor on the device.
    Tensor(Operand),
    /// A list of tensors; `None` where one is undefined, empty or on the host.
    Tensors(Vec<Option<Operand>>),
    /// A tensor on the host: type, shape, and its value where a 0-dim number was recorded with one.
    Host {
        /// Type of its elements.
        dtype: Dtype,
        /// Its shape.
        shape: Vec<u64>,
        /// Its value, for a number; never guessed.
        value: Option<f64>,
        /// For batch data: which host-to-device copy of the iteration this is, from 0.
        input: Option<u32>,
    },
    /// A number.
    Int(i64),
    /// A number.
    Float(f64),
    /// A flag.
    Bool(bool),
    /// Numbers.
    Ints(Vec<i64>),
    /// Numbers.
    Floats(Vec<f64>),
    /// Flags.
    Bools(Vec<bool>),
    /// A word, such as a padding mode or a device.
    Text(String),
}

/// One call on the compute stream.
#[derive(Clone, Debug, PartialEq)]
pub struct Operator {
    /// Unique in the graph.
    pub name: String,
    /// The framework's operator, such as `aten::conv2d`, or one of neap's own, such as
    /// `neap::adamw`.
    pub kind: String,
    /// Its phase.
    pub phase: Phase,
    /// Arguments in schema order.
    pub args: Vec<Arg>,
    /// Declared outputs in schema order; `None` where undefined. Version 0 generates the tensor, a
    /// later version is an in-place write and reads the version before.
    pub outputs: Vec<Option<Operand>>,
    /// Written too, but not declared: outputs kept for backward, unannotated in-place writes, list
    /// writes.
    pub hidden: Vec<Operand>,
    /// Scratch that it allocates and drops, rounded to blocks.
    pub workspace: Bytes,
    /// Whether it may be run again.
    pub replay: Replay,
    /// Draws random numbers (from a counter keyed by operator and iteration).
    pub random: bool,
    /// How long it takes, when the graph's author says so (hand-written graphs).
    pub duration_ns: Option<u64>,
    /// For an update operator, which parameter group of [`Graph::optimizer`] it steps; the first by
    /// default.
    pub group: Option<u32>,
    /// The path of the framework's module that called it, such as `encoder.layer.3.attention`.
    pub module: Option<String>,
}

impl Default for Operator {
    /// An operator that does nothing, for what only some operators have.
    fn default() -> Self {
        Self {
            name: String::new(),
            kind: "custom".to_owned(),
            phase: Phase::Forward,
            args: Vec::new(),
            outputs: Vec::new(),
            hidden: Vec::new(),
            workspace: Bytes::ZERO,
            replay: Replay::Pure,
            random: false,
            duration_ns: None,
            group: None,
            module: None,
        }
    }
}

/// A job: one iteration. Make one with [`Graph::new`], which checks it.
#[derive(Clone, Debug, PartialEq)]
pub struct Graph {
    /// For people.
    pub name: String,
    /// Storages, in order of first appearance.
    pub tensors: Vec<Tensor>,
    /// Operators in the order of execution.
    pub operators: Vec<Operator>,
    /// Where an optimizer was recognised.
    pub optimizer: Option<Optimizer>,
    /// The loss, where one was recognised.
    pub loss: Option<Operand>,
    /// Liveness peak of the framework's own operators, before lowering.
    pub recorded_peak: Option<Bytes>,
}

/// A graph that contradicts itself.
#[derive(Debug, thiserror::Error)]
pub enum GraphError {
    /// Two tensors or operators share a name.
    #[error(
        "two {what} are named `{name}`; names are how plans refer to them, so give each its own"
    )]
    DuplicateName {
        /// `tensors` or `operators`.
        what: &'static str,
        /// The name.
        name: String,
    },
    /// An operator refers to something the graph does not have, or that is out of range.
    #[error("operator `{operator}`: {problem}")]
    Operator {
        /// Its name.
        operator: String,
        /// What is wrong.
        problem: String,
    },
    /// A tensor is impossible.
    #[error("tensor `{tensor}`: {problem}")]
    Tensor {
        /// Its name.
        tensor: String,
        /// What is wrong.
        problem: String,
    },
    /// The loss is not something the graph has.
    #[error("`loss`: {0}")]
    Loss(String),
    /// The optimizer has no groups, or says too little.
    #[error("`optimizer`: {0}")]
    Optimizer(String),
    /// Operators wait for each other.
    #[error("these operators wait for each other in a circle: {}; break it where an output is read before it is made", operators.join(" -> "))]
    Cycle {
        /// Their names.
        operators: Vec<String>,
    },
    /// All tensors together are beyond what is counted.
    #[error("all tensors together are larger than 2^62 bytes; check the shapes")]
    TooLarge,
}

impl Operand {
    /// One past the last byte of the storage that this view can touch; `None` when that overflows.
    #[must_use]
    pub fn end_byte(&self) -> Option<u64> {
        if self.shape.contains(&0) {
            return Some(0);
        }
        let mut last = self.offset;
        for (extent, step) in self.shape.iter().zip(&self.stride) {
            last = last.checked_add((extent - 1).checked_mul(*step)?)?;
        }
        last.checked_add(1)?.checked_mul(self.dtype.size())
    }

    /// How many elements the view shows.
    #[must_use]
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Whether its elements lie one after another in row-major order.
    #[must_use]
    pub fn is_contiguous(&self) -> bool {
        self.stride == contiguous(&self.shape) || {
            let mut expected = 1;
            self.shape.iter().zip(&self.stride).rev().all(|(&n, &s)| {
                let fits = n == 1 || s == expected;
                expected *= n;
                fits
            })
        }
    }
}

/// Row-major strides of a shape.
#[must_use]
pub fn contiguous(shape: &[u64]) -> Vec<u64> {
    let mut stride = vec![1u64; shape.len()];
    for i in (1..shape.len()).rev() {
        stride[i - 1] = stride[i].saturating_mul(shape[i].max(1));
    }
    stride
}

/// The first operand of each tensor.
fn distinct<'a>(all: impl Iterator<Item = &'a Operand>) -> impl Iterator<Item = &'a Operand> {
    let mut first = None;
    // Most operators write one tensor, for which this stays empty.
    let mut more = std::collections::BTreeSet::new();
    all.filter(move |o| match first {
        None => {
            first = Some(o.tensor);
            true
        }
        Some(first) => first != o.tensor && more.insert(o.tensor),
    })
}

impl Operator {
    /// Every tensor it reads as an argument, in schema order. In-place writes appear where they are
    /// arguments.
    pub fn reads(&self) -> impl Iterator<Item = &Operand> {
        self.args.iter().flat_map(|arg| {
            let (one, more): (_, &[Option<Operand>]) = match arg {
                Arg::Tensor(operand) => (Some(operand), &[]),
                Arg::Tensors(list) => (None, list),
                _ => (None, &[]),
            };
            one.into_iter().chain(more.iter().flatten())
        })
    }

    /// Everything it writes: declared outputs, then hidden ones.
    pub fn writes(&self) -> impl Iterator<Item = &Operand> {
        self.outputs.iter().flatten().chain(&self.hidden)
    }

    /// The tensors it generates, each once: an operator may return one tensor twice (an LSTM cell's
    /// backward does).
    pub fn generates(&self) -> impl Iterator<Item = &Operand> {
        distinct(self.writes().filter(|o| o.version == 0))
    }

    /// The tensors it writes in place, each once.
    pub fn updates(&self) -> impl Iterator<Item = &Operand> {
        distinct(self.writes().filter(|o| o.version > 0))
    }

    /// Each tensor it touches once, in order of first mention: arguments, then writes.
    #[must_use]
    pub fn touches(&self) -> Vec<TensorId> {
        let mut seen = Vec::new();
        // A multi-tensor step touches thousands: beyond a few, looking through a list is quadratic.
        let mut set = std::collections::HashSet::new();
        for operand in self.reads().chain(self.writes()) {
            let new = if seen.len() < 32 {
                !seen.contains(&operand.tensor)
            } else {
                if set.is_empty() {
                    set.extend(seen.iter().copied());
                }
                set.insert(operand.tensor)
            };
            if new {
                seen.push(operand.tensor);
            }
        }
        seen
    }
}

impl Graph {
    /// The tensor of an id.
    #[must_use]
    pub fn tensor(&self, id: TensorId) -> &Tensor {
        &self.tensors[id.index()]
    }

    /// The operator of an id.
    #[must_use]
    pub fn operator(&self, id: OpId) -> &Operator {
        &self.operators[id.index()]
    }

    /// The parameter group that an update operator steps.
    #[must_use]
    pub fn group(&self, operator: &Operator) -> Option<&Group> {
        self.optimizer.as_ref().and_then(|o| o.group(operator.group))
    }

    /// For each tensor the operator that generates it; `None` for what exists before the iteration.
    #[must_use]
    pub fn generators(&self) -> Vec<Option<OpId>> {
        let mut of = vec![None; self.tensors.len()];
        for (index, operator) in self.operators.iter().enumerate() {
            for operand in operator.generates() {
                of[operand.tensor.index()] = Some(OpId::of(index));
            }
        }
        of
    }

    /// For each tensor the operators that touch it, in order: the paper's tensor access sequence
    /// (TENSILE section IV-B), the first being the generating access where there is one.
    #[must_use]
    pub fn accesses(&self) -> Vec<Vec<OpId>> {
        let mut of = vec![Vec::new(); self.tensors.len()];
        for (index, operator) in self.operators.iter().enumerate() {
            for tensor in operator.touches() {
                of[tensor.index()].push(OpId::of(index));
            }
        }
        of
    }
}
