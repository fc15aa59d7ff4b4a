//! Scaled dot-product attention: the kernel that a GPU chooses, and the memory that it uses.
//!
//! The CPU runs its own flash kernel or, with dropout or a mask, the plain sequence of products
//! ("math"). In single precision a GPU runs the memory-efficient kernel, or math where heads are
//! grouped; in half precision it runs the flash kernel. The fused kernels keep query, key, value,
//! result and one logarithm per row. Math keeps scaled copies and the whole score matrix. The rules
//! reproduce the requests of PyTorch 2.11. Attention that a model writes out consists of ordinary
//! operators and is not handled here.

mod math;

use neap_model::units::id32;
use std::collections::HashMap;

use super::super::calls::NONE;
use super::super::inputs::{Inputs, Tensor};
use super::super::lives::Key;
use super::super::trace::LARGEST_BLOCK;
use super::{Editor, Rule};

/// The columns of a mask are rounded up to a multiple of this.
const MASK_COLUMNS: u64 = 8;

/// Strides of a packed tensor.
fn packed(dims: [u64; 4]) -> [u64; 4] {
    [dims[1] * dims[2] * dims[3], dims[2] * dims[3], dims[3], 1]
}

/// One call and the backward nodes that belong to it.
#[derive(Clone, Debug, Default)]
pub(super) struct Group {
    /// The outermost operators of its backward nodes, in order.
    nodes: Vec<u32>,
}

/// The ways to compute attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kernel {
    Math,
    Efficient,
    Flash,
}

/// The sizes of one call.
struct Shape {
    batch: u64,
    heads: u64,
    rows: u64,
    columns: u64,
    width: u64,
    element: u64,
    grouped: bool,
    masked: bool,
    causal: bool,
    dropout: bool,
}

impl Shape {
    fn new(inputs: &Inputs) -> Option<Self> {
        let (query, key) = (inputs.tensor(0)?, inputs.tensor(1)?);
        let [batch, heads, rows, width] = query.dims[..] else { return None };
        let [_, key_heads, columns, _] = key.dims[..] else { return None };
        // The products of these sizes must be as credible as a tensor of that size.
        for sides in [[batch, heads, rows, columns], [batch, heads, columns, width]] {
            sides
                .iter()
                .try_fold(1, |all: u64, &n| all.checked_mul(n.max(1)))
                .filter(|n| *n <= LARGEST_BLOCK)?;
        }
        Some(Self {
            batch,
            heads,
            rows,
            columns,
            width,
            element: query.element,
            grouped: key_heads != heads,
            masked: inputs.tensor(3).is_some_and(|m| !m.dims.is_empty()),
            causal: inputs.is_true(5),
            dropout: inputs.number(4).is_some_and(|p| p > 0.0),
        })
    }

    fn on_gpu(&self) -> Kernel {
        match (self.element, self.grouped) {
            (2, _) if !self.masked && self.width <= 256 => Kernel::Flash,
            (_, false) => Kernel::Efficient,
            _ => Kernel::Math,
        }
    }

    fn query(&self) -> u64 {
        self.batch * self.heads * self.rows * self.width * self.element
    }

    fn scores(&self) -> u64 {
        self.batch * self.heads * self.rows * self.columns
    }

    /// Bytes of keys or values after they are repeated for every head.
    fn repeated(&self) -> u64 {
        self.batch * self.heads * self.columns * self.width * self.element
    }

    /// Bytes of the logarithms that a fused kernel keeps.
    fn logarithms(&self, kernel: Kernel) -> u64 {
        let rows =
            if kernel == Kernel::Efficient { self.rows.next_multiple_of(32) } else { self.rows };
        self.batch * self.heads * rows * 4
    }
}

impl Editor<'_> {
    /// Every call, with the backward nodes that have the sequence numbers of its operators.
    pub(super) fn attention_groups(&self) -> HashMap<u32, Group> {
        let trace = self.trace;
        let mut groups: HashMap<u32, Group> = HashMap::new();
        let mut of_sequence: HashMap<i64, u32> = HashMap::new();
        for op in 0..id32(trace.ops.len()) {
            let o = self.op(op);
            if self.kind(op) == super::Kind::Attention {
                groups.insert(op, Group::default());
                for &inner in std::iter::once(&op).chain(self.calls.inside(trace, op)) {
                    if trace.ops[inner as usize].sequence >= 0 {
                        of_sequence.insert(trace.ops[inner as usize].sequence, op);
                    }
                }
            } else if o.sequence >= 0
                && self.calls.parent[op as usize] == NONE
                && let Some(call) = of_sequence.get(&o.sequence)
                && self.name(op).starts_with(super::NODE)
                && let Some(group) = groups.get_mut(call)
            {
                group.nodes.push(op);
            }
        }
        groups
    }

    /// Rewrites one call and its backward nodes. Returns true when the rules need not look inside
    /// it.
    pub(super) fn attention(&mut self, op: u32, group: &Group) -> bool {
        let inputs = self.inputs(op);
        let Some(shape) = Shape::new(&inputs) else { return false };
        let inner =
            |e: &Self, name: &str| e.calls.inside(e.trace, op).iter().any(|&o| e.name(o) == name);
        let on_cpu = if inner(self, "aten::_scaled_dot_product_attention_math") {
            Kernel::Math
        } else if inner(self, "aten::_scaled_dot_product_flash_attention_for_cpu") {
            Kernel::Flash
        } else {
            return false;
        };
        match (on_cpu, shape.on_gpu()) {
            // Without backward nodes it is not known which of math's blocks are kept.
            (Kernel::Math, _) if group.nodes.is_empty() => false,
            (Kernel::Math, Kernel::Math) => false,
            (_, Kernel::Math) => self.as_math(op, &shape, group),
            (_, fused) => self.as_fused(op, &inputs, &shape, group, on_cpu, fused),
        }
    }

    /// The end of the group's last backward node; `None` if there is none.
    fn backward_end(&mut self, group: &Group) -> Option<Key> {
        let last = group.nodes.iter().map(|&n| self.op(n).end).max()?;
        Some(self.edited.lives.key(last, 2))
    }

    fn as_fused(
        &mut self,
        op: u32,
        inputs: &Inputs,
        shape: &Shape,
        group: &Group,
        on_cpu: Kernel,
        fused: Kernel,
    ) -> bool {
        let taken = self.taken(op);
        let kept: Vec<u32> = taken.iter().copied().filter(|&l| !self.is_transient(l, op)).collect();
        // The flash kernel's result is its first block; math's result is the last block that
        // survives.
        let result = if on_cpu == Kernel::Flash { kept.first() } else { kept.last() };
        let Some(&result) =
            result.filter(|&&l| self.edited.lives.list[l as usize].bytes == shape.query())
        else {
            return false;
        };
        for life in taken {
            if life != result {
                self.drop(life, Rule::Attention);
            }
        }
        let released = self.backward_end(group);
        let laid_out = match on_cpu {
            Kernel::Math => packed([shape.batch, shape.heads, shape.rows, shape.width]),
            _ => {
                inputs.tensor(0).and_then(|q| q.strides.clone().try_into().ok()).unwrap_or_default()
            }
        };
        let relaid = self.relaid(op, shape, laid_out);
        match (on_cpu, relaid) {
            // The fused result has the layout that the model wants, so the copy that follows is not
            // made.
            (Kernel::Math, Some((_, false)) | None) => {
                if let Some(copy) = self.copy_after(op, shape.query()) {
                    let end = self.edited.lives.list[copy as usize].end;
                    self.drop(copy, Rule::Attention);
                    self.outlive(result, end);
                }
            }
            // It doesn't have it, while the CPU's result does: one more copy, until the
            // projection's backward.
            (Kernel::Flash, Some((next, true))) => {
                let start = self.edited.lives.key(self.op(next).end, 0);
                let until = group.nodes.first().map(|&n| self.op(n).start);
                let end =
                    until
                        .map(|time| self.edited.lives.key(time, 0))
                        .or(self.edited.lives.list[result as usize].end);
                self.add(shape.query(), start, end, op, Rule::Attention);
            }
            _ => {}
        }
        let end = self.op(op).end;
        if let Some(released) = released {
            if on_cpu == Kernel::Math {
                self.outlive(result, Some(released));
                self.hold_inputs(op, inputs, released);
            }
            let start = self.edited.lives.key(end, 0);
            self.add(shape.logarithms(fused), start, Some(released), op, Rule::Attention);
            self.fused_backward(inputs, shape, group, on_cpu, fused);
        }
        true
    }

    /// The first operator after `op` that needs its result contiguous in some order of dimensions,
    /// and whether a fused kernel's result (row by row, all heads of a row together) must be copied
    /// for it. `strides` are those of the CPU's result: batch, head, row and column.
    fn relaid(&mut self, op: u32, shape: &Shape, strides: [u64; 4]) -> Option<(u32, bool)> {
        let dims = [shape.batch, shape.heads, shape.rows, shape.width];
        let fused =
            [shape.rows * shape.heads * shape.width, shape.width, shape.heads * shape.width, 1];
        let following: Vec<u32> =
            self.calls.following(self.trace, op).iter().copied().take(12).collect();
        for next in following {
            if matches!(self.kind(next), super::Kind::Multiplication) {
                return None;
            }
            // If a tensor is contiguous already, the trace has no `contiguous` call, but the view
            // that needs it.
            if !matches!(self.name(next), "aten::contiguous" | "aten::view") {
                continue;
            }
            let inputs = self.inputs(next);
            let Some(view) = inputs.tensor(0).filter(|t| {
                t.dims.len() == 4 && t.strides.len() == 4 && t.bytes() == shape.query()
            }) else {
                continue;
            };
            let mut left: Vec<usize> = (0..4).collect();
            let mut there = Vec::with_capacity(4);
            for (&size, &stride) in view.dims.iter().zip(&view.strides) {
                let same = left
                    .iter()
                    .position(|&d| dims[d] == size && (strides[d] == stride || size == 1))?;
                there.push(left.remove(same));
            }
            if there == [0, 1, 2, 3] {
                continue;
            }
            let on_gpu = Tensor {
                dims: view.dims.clone(),
                strides: there.iter().map(|&d| fused[d]).collect(),
                ..Tensor::default()
            };
            return Some((next, !on_gpu.is_contiguous()));
        }
        None
    }

    /// A block of `bytes` that the first operators after `op` allocate, before any multiplication.
    fn copy_after(&self, op: u32, bytes: u64) -> Option<u32> {
        let following = self.calls.following(self.trace, op);
        for &next in following.iter().take(12) {
            if matches!(self.kind(next), super::Kind::Multiplication) {
                return None;
            }
            if matches!(self.name(next), "aten::contiguous" | "aten::reshape" | "aten::clone") {
                let taken = self.taken(next);
                if let [copy] = taken[..] {
                    return (self.edited.lives.list[copy as usize].bytes == bytes).then_some(copy);
                }
            }
        }
        None
    }

    fn outlive(&mut self, life: u32, end: Option<Key>) {
        let life = &mut self.edited.lives.list[life as usize];
        life.end = match (life.end, end) {
            (Some(a), Some(b)) => Some(a.max(b)),
            _ => None,
        };
    }

    /// Keeps query, key, value and mask until backward. Their blocks are found by the bytes that
    /// their strides span. A boolean mask first becomes one of numbers. A mask whose rows are not a
    /// whole number of vectors is copied into one whose rows are.
    fn hold_inputs(&mut self, op: u32, inputs: &Inputs, until: Key) {
        let mut held: Vec<u32> = Vec::new();
        for index in [3, 2, 1, 0] {
            let Some(tensor) = inputs.tensor(index).filter(|t| !t.dims.is_empty()) else {
                continue;
            };
            let columns = tensor.dims.last().copied().unwrap_or(1).max(1);
            if tensor.integral || (index == 3 && columns % MASK_COLUMNS != 0) {
                let start = self.edited.lives.key(self.op(op).start, 2);
                let count = tensor.count() / columns * columns.next_multiple_of(MASK_COLUMNS);
                self.add(
                    count * inputs.tensor(0).map_or(4, |q| q.element),
                    start,
                    Some(until),
                    op,
                    Rule::Attention,
                );
                continue;
            }
            if let Some(life) = self.block_of(op, tensor, &held) {
                held.push(life);
                self.outlive(life, Some(until));
            }
        }
    }

    /// The latest block alive at `op` of which `tensor` can be a view. Packed tensors share one
    /// block, other tensors have one each.
    fn block_of(&self, op: u32, tensor: &Tensor, others: &[u32]) -> Option<u32> {
        let varying: Tensor = Tensor {
            dims: tensor.dims.iter().copied().filter(|&d| d > 1).collect(),
            strides: tensor
                .dims
                .iter()
                .zip(&tensor.strides)
                .filter(|&(&d, _)| d > 1)
                .map(|(_, &s)| s)
                .collect(),
            ..tensor.clone()
        };
        let span = varying.span();
        let shared = span > tensor.bytes();
        let start = self.op(op).start;
        let lives = &self.edited.lives;
        let recent =
            lives.list.partition_point(|l| l.start.side == 1 && l.start.time < start || l.before);
        (0..id32(recent)).rev().take(512).find(|id| {
            let l = &lives.list[*id as usize];
            !l.dropped
                && l.bytes == span
                && l.end.is_none_or(|k| k.time >= start)
                && (shared || !others.contains(id))
        })
    }

    fn fused_backward(
        &mut self,
        inputs: &Inputs,
        shape: &Shape,
        group: &Group,
        on_cpu: Kernel,
        fused: Kernel,
    ) {
        let (Some(&first), Some(&last)) = (group.nodes.first(), group.nodes.last()) else { return };
        let time = self.op(first).start;
        let survivors = self.survivors(group);
        let [query, key, value] = [0, 1, 2].map(|i| inputs.tensor(i).map_or(0, Tensor::bytes));
        // Math computes the value's gradient first and the query's last.
        let order = if on_cpu == Kernel::Math { [value, key, query] } else { [query, key, value] };
        let mut ends: Vec<(u64, Option<Key>)> = Vec::new();
        let mut rest = Vec::new();
        for life in survivors {
            let l = self.edited.lives.list[life as usize];
            if ends.len() < 3 && l.bytes == order[ends.len()] {
                let end = if on_cpu == Kernel::Math { self.through_copies(life) } else { l.end };
                ends.push((l.bytes, end));
                self.drop(life, Rule::Attention);
            } else {
                rest.push(life);
            }
        }
        if on_cpu == Kernel::Math {
            ends.reverse();
        }
        for (bytes, end) in ends {
            let start = self.edited.lives.key(time, 0);
            self.add(bytes, start, end, first, Rule::Attention);
        }
        self.backward_transients(inputs, shape, fused, time, first);
        // The other surviving block is the mask's gradient: the gradient of the whole score matrix,
        // summed over the broadcast dimensions.
        let after = self.op(last).end;
        for life in rest {
            let start = self.edited.lives.key(time, 0);
            let summed = self.edited.lives.key(after, 0);
            let end = self.edited.lives.key(after, 0);
            self.edited.lives.list[life as usize].start = summed;
            self.add(shape.scores() * shape.element, start, Some(end), first, Rule::Attention);
        }
    }

    /// Temporary blocks of the fused backward kernels.
    fn backward_transients(
        &mut self,
        inputs: &Inputs,
        shape: &Shape,
        fused: Kernel,
        time: u64,
        op: u32,
    ) {
        let sizes = if fused == Kernel::Efficient {
            let rows_of_tiles = shape.rows.div_ceil(64);
            let tiles = rows_of_tiles * shape.width.div_ceil(64);
            // Sixteen bytes of locks for each row of tiles, and 64 x 64 partial sums for each tile.
            let workspace = shape.batch * shape.heads * (rows_of_tiles * 16 + tiles * 64 * 64 * 4);
            let sums = shape.batch * shape.heads * shape.rows * 4;
            let packed = if self.gradient_is_packed(op, shape) { 0 } else { shape.query() };
            // In half precision the kernel itself sums the products of gradient and result.
            let products = if shape.element == 4 {
                vec![packed, shape.query(), sums, sums]
            } else {
                Vec::new()
            };
            vec![products, vec![packed, sums, workspace]]
        } else {
            let rows = shape.rows.next_multiple_of(128);
            let sums = shape.batch * shape.heads * rows * 4;
            let partial = shape.batch * shape.heads * rows * shape.width.next_multiple_of(32) * 4;
            let key_heads = inputs.tensor(1).map_or(shape.heads, |k| k.dims[1]);
            let expanded = if key_heads == shape.heads { 0 } else { shape.repeated() };
            vec![vec![sums, partial, expanded, expanded]]
        };
        for together in sizes {
            let starts: Vec<_> = together.iter().map(|_| self.edited.lives.key(time, 0)).collect();
            for (bytes, start) in together.into_iter().zip(starts) {
                let end = self.edited.lives.key(time, 0);
                if bytes > 0 {
                    self.add(bytes, start, Some(end), op, Rule::Attention);
                }
            }
        }
    }

    /// Whether the gradient that reaches backward lies row by row, all heads of a row together, as
    /// the kernel needs it.
    fn gradient_is_packed(&mut self, node: u32, shape: &Shape) -> bool {
        let inner = self.calls.inside(self.trace, node).first().copied();
        let Some(inputs) = inner.map(|op| self.inputs(op)) else { return true };
        let Some(gradient) = inputs.tensor(0) else { return true };
        let [_, heads, rows, width] = gradient.strides[..] else { return true };
        if gradient.dims != [shape.batch, shape.heads, shape.rows, gradient.dims[3]] {
            return true;
        }
        width == 1
            && (heads == gradient.dims[3] || shape.heads == 1)
            && (rows == shape.heads * gradient.dims[3] || shape.rows == 1)
    }

    /// Drops the blocks that the group's nodes allocate for each other. Returns the blocks that
    /// other operators use, in order.
    fn survivors(&mut self, group: &Group) -> Vec<u32> {
        let last = group.nodes.iter().map(|&n| self.op(n).end).max().unwrap_or(0);
        let mut survivors = Vec::new();
        for &node in &group.nodes {
            for life in self.taken(node) {
                let end = self.edited.lives.list[life as usize].end;
                let inside = end.is_some_and(|k| {
                    k.time <= last
                        && group
                            .nodes
                            .iter()
                            .any(|&n| self.op(n).start <= k.time && k.time <= self.op(n).end)
                });
                if inside {
                    self.drop(life, Rule::Attention);
                } else {
                    survivors.push(life);
                }
            }
        }
        survivors
    }

    /// When a gradient ends if the nodes that copy it into another layout are not needed. Drops
    /// those copies.
    fn through_copies(&mut self, life: u32) -> Option<Key> {
        let (mut end, bytes) = {
            let l = self.edited.lives.list[life as usize];
            (l.end, l.bytes)
        };
        for _ in 0..4 {
            let key = end?;
            let Some(owner) = self.free_owner(key) else { return end };
            let node = self.calls.outermost(owner);
            let view = [
                "ViewBackward0",
                "UnsafeViewBackward0",
                "CloneBackward0",
                "TransposeBackward0",
                "ReshapeAliasBackward0",
            ];
            if !view.iter().any(|v| self.name(node).ends_with(v)) {
                return end;
            }
            let copies: Vec<u32> = self
                .taken(node)
                .into_iter()
                .filter(|&l| {
                    !self.is_transient(l, node) && self.edited.lives.list[l as usize].bytes == bytes
                })
                .collect();
            let [copy] = copies[..] else { return end };
            end = self.edited.lives.list[copy as usize].end;
            self.drop(copy, Rule::Attention);
        }
        end
    }

    /// The operator in which the trace's event with this key happened.
    fn free_owner(&self, key: Key) -> Option<u32> {
        (key.side == 1).then(|| self.calls.owner[key.order as usize]).filter(|&o| o != NONE)
    }

    /// When the module that calls `op` directly returns; if the trace has no modules, when `op`
    /// does.
    fn module_end(&self, op: u32) -> u64 {
        let o = self.op(op);
        self.modules_around(op).map(|m| m.end).min().unwrap_or(o.end)
    }

    /// When the outermost module around `op` returns.
    fn model_end(&self, op: u32) -> u64 {
        self.modules_around(op).map(|m| m.end).max().unwrap_or(self.op(op).end)
    }

    fn modules_around(&self, op: u32) -> impl Iterator<Item = &super::super::trace::Module> {
        let o = *self.op(op);
        let modules = &self.trace.modules;
        let to = modules.partition_point(|m| m.start <= o.start);
        modules[..to].iter().filter(move |m| m.end >= o.end && m.thread == o.thread)
    }
}
