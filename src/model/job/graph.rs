//! The job graph: tensors, operators and how operators read and write tensors.
//!
//! A *tensor* is one storage, from its allocation to its free. A view is part of how an operator
//! reads it ([`Operand`]). An in-place write makes the next *version* of the same tensor on the
//! same bytes. Operators are in the order of execution ([`super::order`] finds and checks it).

use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::arrange::Origin;
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
    /// A batch of data.
    Input,
    /// A trained weight.
    Parameter,
    /// A tensor that stays but is not trained, such as a running mean.
    Buffer,
    /// A tensor that the optimizer keeps for a parameter.
    OptimizerState,
    /// The gradient of a parameter.
    Gradient,
    /// Any other tensor.
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

/// Whether an operator may run a second time in one iteration: it then gives the same values and
/// changes nothing else.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Replay {
    /// Yes: it writes nothing that outlives the iteration. In-place writes on activations are run
    /// again as a chain.
    #[default]
    Pure,
    /// Yes, if its in-place writes on long-lived tensors are left out (batch norm's running
    /// statistics).
    SkipUpdates,
    /// No.
    Never,
}

/// One storage. It lives within the iteration, or across iterations if no operator generates it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Unique in the graph.
    pub name: String,
    /// Unrounded size of the storage in bytes.
    pub bytes: Bytes,
    /// Its role.
    pub role: Role,
    /// Element type of the storage as first seen.
    pub dtype: Dtype,
    /// Shape of the first view of it.
    pub shape: Vec<u64>,
    /// The operator before which the framework frees it, if the framework keeps it past its last
    /// use and round the end of the iteration (a gradient that waits for `zero_grad`). No operator
    /// reads it in between.
    pub kept_until: Option<OpId>,
}

/// The version of a tensor that an operator uses, and the view through which it does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operand {
    /// The tensor.
    pub tensor: TensorId,
    /// How many in-place writes came before. Version 0 is written by the generating operator; a
    /// long-lived tensor has it at the start of the iteration. In an output: the version that is
    /// written.
    pub version: u32,
    /// Type of the elements of this view.
    pub dtype: Dtype,
    /// Offset of the first element, in elements of `dtype`.
    pub offset: u64,
    /// Extent of each dimension; empty for a scalar.
    pub shape: Vec<u64>,
    /// Step of each dimension in elements; 0 in dimensions that `expand` repeats.
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
    /// A tensor on the host: type, shape, and the value of a 0-dim tensor if it was recorded.
    Host {
        /// Type of its elements.
        dtype: Dtype,
        /// Its shape.
        shape: Vec<u64>,
        /// The recorded value of a 0-dim tensor; never guessed.
        value: Option<f64>,
        /// For batch data: the number of the host-to-device copy in the iteration, from 0.
        input: Option<u32>,
    },
    /// A whole number.
    Int(i64),
    /// A floating-point number.
    Float(f64),
    /// A flag.
    Bool(bool),
    /// Whole numbers.
    Ints(Vec<i64>),
    /// Floating-point numbers.
    Floats(Vec<f64>),
    /// Flags.
    Bools(Vec<bool>),
    /// A word, such as a padding mode or a device.
    Text(String),
}

impl Arg {
    /// The tensors of one argument, to be changed.
    pub(crate) fn operands_mut(&mut self) -> impl Iterator<Item = &mut Operand> {
        let (one, more): (_, &mut [Option<Operand>]) = match self {
            Self::Tensor(operand) => (Some(operand), &mut []),
            Self::Tensors(list) => (None, list),
            _ => (None, &mut []),
        };
        one.into_iter().chain(more.iter_mut().flatten())
    }
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
    /// Declared outputs in schema order; `None` where undefined. Version 0 generates the tensor. A
    /// later version is an in-place write, which also reads the version before.
    pub outputs: Vec<Option<Operand>>,
    /// Tensors that it writes without declaring them: outputs kept for backward, in-place writes
    /// that the schema lacks, writes to lists.
    pub hidden: Vec<Operand>,
    /// Bytes of scratch memory that it allocates and frees, rounded to blocks.
    pub workspace: Bytes,
    /// Whether it may be run again.
    pub replay: Replay,
    /// Whether it draws random numbers (from a counter keyed by operator and iteration).
    pub random: bool,
    /// Its time in nanoseconds, if the graph gives it (hand-written graphs).
    pub duration_ns: Option<u64>,
    /// The parameter group of [`Graph::optimizer`] that an update operator steps; `None`: the
    /// first.
    pub group: Option<u32>,
    /// The path of the framework's module that called it, such as `encoder.layer.3.attention`.
    pub module: Option<String>,
}

impl Default for Operator {
    /// An operator without arguments and outputs. Use it to leave out fields that few operators
    /// have.
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
    /// A name for people to read.
    pub name: String,
    /// Tensors in order of first appearance.
    pub tensors: Vec<Tensor>,
    /// Operators in the order of execution.
    pub operators: Vec<Operator>,
    /// The optimizer, if the importer recognised one.
    pub optimizer: Option<Optimizer>,
    /// The loss, if the importer recognised one.
    pub loss: Option<Operand>,
    /// Liveness peak of the recorded operators, before optimizer steps were lowered.
    pub recorded_peak: Option<Bytes>,
    /// What it was arranged from ([`super::arrange()`]); `None` for a graph as its file has it.
    pub origin: Option<Arc<Origin>>,
}

/// Why parts do not make a graph.
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
    /// An operator names something that the graph does not have, or a number is out of range.
    #[error("operator `{operator}`: {problem}")]
    Operator {
        /// Its name.
        operator: String,
        /// What is wrong.
        problem: String,
    },
    /// A tensor's figures are impossible.
    #[error("tensor `{tensor}`: {problem}")]
    Tensor {
        /// Its name.
        tensor: String,
        /// What is wrong.
        problem: String,
    },
    /// The loss is not in the graph.
    #[error("`loss`: {0}")]
    Loss(String),
    /// The optimizer has no groups, or lacks fields.
    #[error("`optimizer`: {0}")]
    Optimizer(String),
    /// Operators depend on each other in a circle.
    #[error("these operators wait for each other in a circle: {}; break it where an output is read before it is made", operators.join(" -> "))]
    Cycle {
        /// Their names.
        operators: Vec<String>,
    },
    /// The sum of all tensors is larger than the largest size that is counted.
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

    /// The number of elements that the view shows.
    #[must_use]
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Whether its elements lie one after the other in row-major order.
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
    // Most operators write one tensor; then this stays empty.
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
    /// Every operand that it reads as an argument, in schema order. A tensor that it writes in
    /// place is included where it is an argument.
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

    /// Every operand, to be changed: arguments, then writes.
    pub(crate) fn operands_mut(&mut self) -> impl Iterator<Item = &mut Operand> {
        let Self { args, outputs, hidden, .. } = self;
        let writes = outputs.iter_mut().flatten().chain(hidden);
        args.iter_mut().flat_map(Arg::operands_mut).chain(writes)
    }

    /// Everything it writes: declared outputs, then hidden ones.
    pub fn writes(&self) -> impl Iterator<Item = &Operand> {
        self.outputs.iter().flatten().chain(&self.hidden)
    }

    /// The tensors that it generates, each once. (An operator may return one tensor twice, as an
    /// LSTM cell's backward does.)
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
        // A multi-tensor step touches thousands of tensors, for which searching a list would be
        // quadratic.
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

    /// For each tensor the operator that generates it; `None` for tensors older than the iteration.
    #[must_use]
    pub fn generators(&self) -> Vec<Option<OpId>> {
        let mut of = vec![None; self.tensors.len()];
        for (index, operator) in self.operators.iter().enumerate() {
            for operand in operator.generates() {
                of[operand.tensor.index()] = Some(OpId::from_index(index));
            }
        }
        of
    }

    /// For each tensor the operators that touch it, in order: the paper's tensor access sequence
    /// (TENSILE section IV-B). The generating access is the first, if there is one.
    #[must_use]
    pub fn accesses(&self) -> Vec<Vec<OpId>> {
        let mut of = vec![Vec::new(); self.tensors.len()];
        for (index, operator) in self.operators.iter().enumerate() {
            for tensor in operator.touches() {
                of[tensor.index()].push(OpId::from_index(index));
            }
        }
        of
    }
}
