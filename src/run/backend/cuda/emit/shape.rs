//! Moving elements, and tensors of a constant.

use crate::backend::host::kernels::elements::{Lane, read, read_int};
use crate::backend::operators::arguments::{Input, is_floating, number_or, output, tensor};
use crate::backend::operators::error::unsupported;
use crate::backend::operators::moves::{self, Moves};
use crate::backend::operators::shapes::{count, each, narrow};
use crate::backend::operators::view::{Call, View};
use crate::backend::operators::{KernelError, Table, table};

use super::super::launch::{Action, Actions, Family};
use super::Emit;
use super::map::{Extra, blocks, copy, fill, map, params};

pub const TABLE: Table<Emit> = table! {
    "clone" | "contiguous" | "reshape" | "to" | "_to_copy" | "expand" | "expand_copy"
    | "_unsafe_view" | "view" | "flatten" | "unflatten" | "alias" | "detach" | "lift_fresh"
    | "squeeze" | "unsqueeze" | "_reshape_alias" | "type_as" => |c, a| moves::move_from(a, c, 0),
    "copy_" | "copy" => |c, a| moves::move_from(a, c, 1),
    "zeros" | "zeros_like" | "zero_" | "new_zeros" | "empty" | "empty_like" | "empty_strided"
    | "new_empty" | "new_empty_strided" | "empty_permuted" => |c, a| fill(a, output(c)?, 0.0),
    "ones" | "ones_like" | "new_ones" => |c, a| fill(a, output(c)?, 1.0),
    "full" | "full_like" | "fill" | "fill_" => |c, a| moves::fill_from(a, c, 1),
    "new_full" => |c, a| moves::fill_from(a, c, 2),
    "scalar_tensor" => |c, a| moves::fill_from(a, c, 0),
    "arange" => arange,
    "cat" | "concat" => |c, a| moves::cat(a, c),
    "stack" => |c, a| moves::stack(a, c),
    "pad" => |c, a| moves::pad(a, c),
    "constant_pad_nd" => |c, a| moves::padded(a, c, number_or(c, 2, 0.0)?),
    "slice_backward" => |c, a| moves::slice_backward(a, c),
    "select_backward" => |c, a| moves::select_backward(a, c),
    "diagonal_backward" => |c, a| moves::diagonal_backward(a, c),
    "slice_scatter" => |c, a| moves::slice_scatter(a, c),
    "select_scatter" => |c, a| moves::select_scatter(a, c),
    "repeat" => |c, a| moves::repeat(a, c),
    "repeat_interleave" => |c, a| moves::repeat_interleave(a, c),
    "roll" => |c, a| moves::roll(a, c),
    "flip" => flip,
    "tril" | "tril_" => |c, a| triangle(c, a, true),
    "triu" | "triu_" => |c, a| triangle(c, a, false),
};

impl Moves for Actions {
    fn copy(&mut self, out: &View, from: &View) -> Result<(), KernelError> {
        copy(self, out, from)
    }

    fn fill(&mut self, out: &View, value: f64) -> Result<(), KernelError> {
        fill(self, out, value)
    }

    /// In the output's type and order, worked out here once.
    fn upload(&mut self, out: &View, batch: &View) -> Result<(), KernelError> {
        let size = out.dtype.size() as usize;
        let mut laid = vec![0u8; count(out) * size];
        if laid.is_empty() {
            return Ok(());
        }
        let last: usize = out.shape.iter().zip(&out.stride).map(|(n, s)| (n - 1) * s).sum();
        if last + 1 != count(out) {
            return Err(unsupported!("batch data goes to a tensor of strides {:?}", out.stride));
        }
        each(&out.shape, &[&out.stride, &batch.stride], |[to, from]| {
            let slot = laid[to * size..].as_mut_ptr();
            // SAFETY: the slot is one of `count` elements of the output's type.
            unsafe {
                if is_floating(out) || is_floating(batch) {
                    f32::store(out.dtype, slot, 1, &[read(batch, from) as f32]);
                } else {
                    i64::store(out.dtype, slot, 1, &[read_int(batch, from)]);
                }
            }
        });
        self.list.push(Action::Upload { to: out.data, data: laid });
        Ok(())
    }
}

fn arange(call: &Call<'_>, actions: &mut Actions) -> Result<(), KernelError> {
    let (out, (start, step)) = (output(call)?, moves::arange(call)?);
    let [zero, start, step] = [0.0, start, step].map(|value| Input::Number { value, float: true });
    map(actions, is_floating(out), "arange", out, &[zero, start, step], &Extra::default())
}

fn flip(call: &Call<'_>, actions: &mut Actions) -> Result<(), KernelError> {
    let (out, from, (dim, extent)) = (output(call)?, tensor(call, 0)?, moves::flipped(call)?);
    if count(from) == 0 {
        return Ok(());
    }
    // From the last element backwards.
    let mut reversed = narrow(from, dim, extent - 1..extent)?;
    reversed.shape[dim] = extent;
    reversed.stride[dim] = from.stride[dim].wrapping_neg();
    let float = is_floating(out) || is_floating(from);
    map(actions, float, "copy", out, &[Input::View(&reversed)], &Extra::default())
}

/// Keeps the lower (upper) triangle of the last two dimensions, up to (from) a diagonal.
fn triangle(call: &Call<'_>, actions: &mut Actions, lower: bool) -> Result<(), KernelError> {
    let (out, from, diagonal) = moves::triangle(call)?;
    let extra = Extra { k: [diagonal, i64::from(lower), 0, 0], apart: true, ..Extra::default() };
    let map = params(out, &[Input::View(from)], &extra)?;
    let kernel = if is_floating(out) { "f_triangle" } else { "i_triangle" };
    actions.launch(Family::Pointwise, kernel, blocks(&map), [256, 1], &map);
    Ok(())
}
