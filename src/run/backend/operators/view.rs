//! How a kernel sees its operands: strided views of raw arena bytes.
//!
//! The executor has decided where everything lies, and the plan checker has proved that what is
//! read is there and that what is written belongs to this call alone.

use crate::job::{Dtype, Group, Operator};

/// The most memory a kernel may take for itself (packing and im2col tiles), however large the
/// operator.
pub const TILE_BYTES: usize = 8 << 20;

/// A strided view of an arena's bytes.
#[derive(Clone, Debug)]
pub struct View {
    /// First byte of the storage's element 0 plus the view's offset: the address of the view's
    /// first element. Null for a tensor that a replay leaves out
    /// ([`crate::job::Replay::SkipUpdates`]).
    pub data: *mut u8,
    /// Element type.
    pub dtype: Dtype,
    /// Extents.
    pub shape: Vec<usize>,
    /// Steps in elements.
    pub stride: Vec<usize>,
}

/// One argument as the kernel sees it.
#[derive(Clone, Debug)]
pub enum Operand {
    /// A tensor, or a tensor of a list.
    Tensor(View),
    /// A list of tensors.
    Tensors(Vec<Option<View>>),
    /// Anything else: look it up in the operator's own arguments.
    Plain,
}

/// One execution of an operator.
pub struct Call<'a> {
    /// The operator with its scalar arguments.
    pub operator: &'a Operator,
    /// One for each of the operator's arguments.
    pub args: &'a [Operand],
    /// One for each of the operator's declared outputs.
    pub outputs: &'a [Option<View>],
    /// One for each of the operator's hidden outputs.
    pub hidden: &'a [View],
    /// The iteration, from 0: with the operator's position it keys random numbers.
    pub iteration: u64,
    /// The operator's position in the graph.
    pub position: u64,
    /// Optimizer steps done before this one (the first step is step 1, so this is 0 then).
    pub steps_done: u64,
    /// The position of the forward operator whose random numbers a backward one repeats (same key).
    pub random_key: u64,
    /// A recompute: in-place writes on long-lived tensors are left out where the operator says so.
    pub replay: bool,
    /// For an optimizer's update: its parameter group.
    pub optimizer: Option<&'a Group>,
    /// Batch data by number of host-to-device copy, as raw little-endian bytes in the dtype of the
    /// copy.
    pub batch: &'a [Vec<u8>],
}

impl Call<'_> {
    /// All tensors that are read.
    pub fn reads(&self) -> impl Iterator<Item = &View> {
        self.args.iter().flat_map(|operand| {
            let (one, list): (_, &[Option<View>]) = match operand {
                Operand::Tensor(view) => (Some(view), &[]),
                Operand::Tensors(list) => (None, list),
                Operand::Plain => (None, &[]),
            };
            one.into_iter().chain(list.iter().flatten())
        })
    }

    /// All tensors that are written.
    pub fn writes(&self) -> impl Iterator<Item = &View> {
        self.outputs.iter().flatten().chain(self.hidden)
    }

    /// All tensors.
    pub fn views(&self) -> impl Iterator<Item = &View> {
        self.reads().chain(self.writes())
    }
}
