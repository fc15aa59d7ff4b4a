//! A kernel's operands: strided views of bytes in the arena.
//!
//! The executor has set all addresses. The plan checker has proved that operands are resident and
//! that no other call writes the bytes that this call writes.

use crate::job::{Dtype, Group, Operator};

/// The most memory that a kernel may allocate for itself (tiles for packing and im2col), whatever
/// the size of the operator.
pub const TILE_BYTES: usize = 8 << 20;

/// A strided view of an arena's bytes.
#[derive(Clone, Debug)]
pub struct View {
    /// The address of the view's first element. Null for a tensor that a replay leaves out
    /// ([`crate::job::Replay::SkipUpdates`]).
    pub data: *mut u8,
    /// Element type.
    pub dtype: Dtype,
    /// Extent of each dimension.
    pub shape: Vec<usize>,
    /// Step of each dimension in elements.
    pub stride: Vec<usize>,
}

/// An argument in the form that a kernel uses.
#[derive(Clone, Debug)]
pub enum Operand {
    /// A tensor, or a tensor of a list.
    Tensor(View),
    /// A list of tensors.
    Tensors(Vec<Option<View>>),
    /// Any other argument; the operator's own arguments have it.
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
    /// The iteration, from 0. Together with the operator's position it is the key of random
    /// numbers.
    pub iteration: u64,
    /// The operator's position in the graph.
    pub position: u64,
    /// Number of optimizer steps before this one; 0 in the first step.
    pub steps_done: u64,
    /// The position of the operator whose random numbers this one uses: for a backward operator,
    /// that of its forward operator.
    pub random_key: u64,
    /// Whether this is a recompute, in which some operators leave out in-place writes on long-lived
    /// tensors.
    pub replay: bool,
    /// For an optimizer's update: its parameter group.
    pub optimizer: Option<&'a Group>,
    /// Batch data by the number of the host-to-device copy, as little-endian bytes in the copy's
    /// dtype.
    pub batch: &'a [Vec<u8>],
}

impl Call<'_> {
    /// All tensors that it reads.
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

    /// All tensors that it writes.
    pub fn writes(&self) -> impl Iterator<Item = &View> {
        self.outputs.iter().flatten().chain(self.hidden)
    }

    /// All tensors that it reads or writes.
    pub fn views(&self) -> impl Iterator<Item = &View> {
        self.reads().chain(self.writes())
    }
}
