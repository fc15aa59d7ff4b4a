//! Moving elements, and tensors of a constant.
//!
//! Memory from `empty` kinds is zeroed, so that results never depend on what lay there.

use crate::backend::operators::arguments::{number, number_or, output, tensor};
use crate::backend::operators::moves::{self, Moves};
use crate::backend::operators::shapes::narrow;
use crate::backend::operators::view::{Call, View};
use crate::backend::operators::{KernelError, Table, table};

use super::Kernel;
use super::elements::{copy, fill};

pub const TABLE: Table<Kernel> = table! {
    "clone" | "contiguous" | "reshape" | "to" | "_to_copy" | "expand" | "expand_copy" | "_unsafe_view" | "view" | "flatten" | "unflatten" | "alias" | "detach" | "lift_fresh" | "squeeze" | "unsqueeze" | "_reshape_alias" | "type_as" => {
            |c| moves::move_from(&mut Host, c, 0)
        },
    "copy_" | "copy" => |c| moves::move_from(&mut Host, c, 1),
    "zeros" | "zeros_like" | "zero_" | "new_zeros" | "empty" | "empty_like" | "empty_strided" | "new_empty" | "new_empty_strided" | "empty_permuted" => {
            |c| fill(output(c)?, 0.0)
        },
    "ones" | "ones_like" | "new_ones" => |c| fill(output(c)?, 1.0),
    "full" | "full_like" | "fill" | "fill_" => |c| moves::fill_from(&mut Host, c, 1),
    "new_full" => |c| moves::fill_from(&mut Host, c, 2),
    "scalar_tensor" => |c| moves::fill_from(&mut Host, c, 0),
    "arange" => arange,
    "linspace" => linspace,
    "eye" => |c| {
            let out = output(c)?;
            fill(out, 0.0)?;
            let steps = out.stride.iter().sum();
            let shape = out.shape.iter().min().copied().into_iter().collect();
            fill(&View { shape, stride: vec![steps], ..out.clone() }, 1.0)
        },
    "cat" | "concat" => |c| moves::cat(&mut Host, c),
    "stack" => |c| moves::stack(&mut Host, c),
    "constant_pad_nd" => |c| moves::padded(&mut Host, c, number_or(c, 2, 0.0)?),
    "slice_backward" => |c| moves::slice_backward(&mut Host, c),
    "select_backward" => |c| moves::select_backward(&mut Host, c),
    "diagonal_backward" => |c| moves::diagonal_backward(&mut Host, c),
    "repeat" => |c| moves::repeat(&mut Host, c),
    "repeat_interleave" => |c| moves::repeat_interleave(&mut Host, c),
    "roll" => |c| moves::roll(&mut Host, c),
    "flip" => flip,
    "tril" | "tril_" => |c| triangle(c, true),
    "triu" | "triu_" => |c| triangle(c, false),
    "slice_scatter" => |c| moves::slice_scatter(&mut Host, c),
    "select_scatter" => |c| moves::select_scatter(&mut Host, c),
};

/// Moves elements at once.
pub struct Host;

impl Moves for Host {
    fn copy(&mut self, out: &View, from: &View) -> Result<(), KernelError> {
        copy(out, from)
    }

    fn fill(&mut self, out: &View, value: f64) -> Result<(), KernelError> {
        fill(out, value)
    }

    fn upload(&mut self, out: &View, batch: &View) -> Result<(), KernelError> {
        copy(out, batch)
    }
}

fn arange(call: &Call<'_>) -> Result<(), KernelError> {
    let (out, (start, step)) = (output(call)?, moves::arange(call)?);
    (0..out.shape[0]).try_for_each(|i| fill(&narrow(out, 0, i..i + 1)?, start + i as f64 * step))
}

/// `(start, end, steps)`: evenly spaced numbers, from both ends to the middle as PyTorch counts.
fn linspace(call: &Call<'_>) -> Result<(), KernelError> {
    let (out, start, end) = (output(call)?, number(call, 0)?, number(call, 1)?);
    let steps = out.shape.first().copied().unwrap_or(1);
    let step = if steps > 1 { (end - start) / (steps - 1) as f64 } else { 0.0 };
    (0..steps).try_for_each(|i| {
        let from_start = start + step * i as f64;
        let value = if i < steps / 2 { from_start } else { end - step * (steps - 1 - i) as f64 };
        fill(&narrow(out, 0, i..i + 1)?, if steps == 1 { start } else { value })
    })
}

fn flip(call: &Call<'_>) -> Result<(), KernelError> {
    let (out, from, (dim, extent)) = (output(call)?, tensor(call, 0)?, moves::flipped(call)?);
    for i in 0..extent {
        copy(&narrow(out, dim, i..i + 1)?, &narrow(from, dim, extent - 1 - i..extent - i)?)?;
    }
    Ok(())
}

/// Keeps the lower (upper) triangle of the last two dimensions, up to (from) a diagonal.
fn triangle(call: &Call<'_>, lower: bool) -> Result<(), KernelError> {
    let (out, from, diagonal) = moves::triangle(call)?;
    copy(out, from)?;
    let rank = out.shape.len();
    let columns = out.shape[rank - 1] as i64;
    for row in 0..out.shape[rank - 2] {
        let edge = row as i64 + diagonal;
        let zeroed =
            if lower { (edge + 1).clamp(0, columns)..columns } else { 0..edge.clamp(0, columns) };
        let part = narrow(
            &narrow(out, rank - 2, row..row + 1)?,
            rank - 1,
            zeroed.start as usize..zeroed.end as usize,
        )?;
        fill(&part, 0.0)?;
    }
    Ok(())
}
