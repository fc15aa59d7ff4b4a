//! Moving elements: copies and casts, joining, padding, slices' gradients, and tensors of a constant.
//!
//! Memory from `empty` kinds is zeroed, so that results never depend on what lay there. Not for:
//! views, which cost nothing and are part of how operators read.

use crate::job::Arg;

use super::super::view::{Call, Operand, View};
use super::Kernel;
use super::arguments::{
    Input, input, int_or, ints, number, number_or, output, tensor, tensors, text,
};
use super::elements::{
    copy, count, dimension, fill, is_contiguous, narrow, repeats, row_major, select,
};

/// The kernel for `kind`.
pub fn find(kind: &str) -> Option<Kernel> {
    let kernel: Kernel = match kind.strip_prefix("aten::")? {
        "clone" | "contiguous" | "reshape" | "to" | "_to_copy" | "expand" | "expand_copy"
        | "_unsafe_view" | "view" | "flatten" | "unflatten" | "alias" | "detach" | "lift_fresh"
        | "squeeze" | "unsqueeze" | "_reshape_alias" | "type_as" => |c| move_from(c, 0),
        "copy_" | "copy" => |c| move_from(c, 1),
        "zeros" | "zeros_like" | "zero_" | "new_zeros" | "empty" | "empty_like"
        | "empty_strided" | "new_empty" | "new_empty_strided" | "empty_permuted" => {
            |c| fill(output(c)?, 0.0)
        }
        "ones" | "ones_like" | "new_ones" => |c| fill(output(c)?, 1.0),
        "full" | "full_like" | "fill" | "fill_" => |c| fill_from(c, 1),
        "new_full" => |c| fill_from(c, 2),
        "scalar_tensor" => |c| fill_from(c, 0),
        "arange" => arange,
        "cat" | "concat" => cat,
        "stack" => stack,
        "pad" => pad,
        "constant_pad_nd" => |c| padded(c, number_or(c, 2, 0.0)?),
        "slice_backward" => slice_backward,
        "select_backward" => select_backward,
        "repeat" => repeat,
        "repeat_interleave" => repeat_interleave,
        "flip" => flip,
        "tril" | "tril_" => |c| triangle(c, true),
        "triu" | "triu_" => |c| triangle(c, false),
        _ => return None,
    };
    Some(kernel)
}

/// Copies argument `index` to the output: a tensor of the same number of elements, a number, or batch data.
fn move_from(call: &Call<'_>, index: usize) -> Result<(), String> {
    let out = output(call)?;
    if let Some(Arg::Host { input: Some(position), dtype, .. }) = call.operator.args.get(index) {
        let data = call
            .batch
            .get(*position as usize)
            .ok_or_else(|| format!("there is no batch data for copy {position}"))?;
        let bytes = count(out) * dtype.size() as usize;
        if data.len() != bytes {
            return Err(format!(
                "batch data {position} has {} bytes where {bytes} are needed for shape {:?}",
                data.len(),
                out.shape
            ));
        }
        let stride = row_major(&out.shape);
        let batch = View {
            data: data.as_ptr().cast_mut(),
            dtype: *dtype,
            shape: out.shape.clone(),
            stride,
        };
        return copy(out, super::arguments::supported(&batch)?);
    }
    if !matches!(call.args.get(index), Some(Operand::Tensor(_))) {
        return fill_from(call, index);
    }
    let from = tensor(call, index)?;
    if out.shape == from.shape || index == 1 {
        return copy(out, from);
    }
    if count(out) == count(from) {
        // Another shape on the same row-major order: one of the two must be dense to wear the other's shape.
        if is_contiguous(out) {
            return copy(
                &View { shape: from.shape.clone(), stride: row_major(&from.shape), ..out.clone() },
                from,
            );
        }
        if is_contiguous(from) {
            return copy(
                out,
                &View { shape: out.shape.clone(), stride: row_major(&out.shape), ..from.clone() },
            );
        }
        return Err(format!(
            "shape {:?} to {:?} between two tensors that are not contiguous",
            from.shape, out.shape
        ));
    }
    copy(out, from)
}

fn fill_from(call: &Call<'_>, index: usize) -> Result<(), String> {
    match input(call, index)? {
        Input::View(view) => copy(output(call)?, view),
        Input::Number { value, .. } => fill(output(call)?, value),
    }
}

fn arange(call: &Call<'_>) -> Result<(), String> {
    let out = output(call)?;
    let (start, end, step) = match call.operator.args.len() {
        1 | 5 => (0.0, number(call, 0)?, 1.0),
        2 | 6 => (number(call, 0)?, number(call, 1)?, 1.0),
        3 | 4 | 7 => (number(call, 0)?, number(call, 1)?, number(call, 2)?),
        n => return Err(format!("a form of arange with {n} arguments")),
    };
    let steps = ((end - start) / step).ceil();
    if out.shape.len() != 1 || steps != out.shape[0] as f64 {
        return Err(format!("from {start} to {end} by {step} does not give shape {:?}", out.shape));
    }
    (0..out.shape[0]).try_for_each(|i| fill(&narrow(out, 0, i..i + 1)?, start + i as f64 * step))
}

fn cat(call: &Call<'_>) -> Result<(), String> {
    let out = output(call)?;
    let dim = dimension(int_or(call, 1, 0)?, out.shape.len())?;
    let mut at = 0;
    for part in tensors(call, 0)?.iter().flatten().filter(|part| part.shape != [0]) {
        let extent = *part
            .shape
            .get(dim)
            .filter(|_| part.shape.len() == out.shape.len())
            .ok_or("parts of different ranks")?;
        if extent == 0 {
            continue;
        }
        let to = narrow(out, dim, at..at + extent)?;
        super::elements::same_shape(&to, part)?;
        copy(&to, part)?;
        at += extent;
    }
    if out.shape.get(dim) == Some(&at) {
        Ok(())
    } else {
        Err(format!("the parts fill {at} along dimension {dim} of shape {:?}", out.shape))
    }
}

fn stack(call: &Call<'_>) -> Result<(), String> {
    let out = output(call)?;
    let dim = dimension(int_or(call, 1, 0)?, out.shape.len())?;
    let list = tensors(call, 0)?;
    if out.shape.get(dim) != Some(&list.len()) {
        return Err(format!("{} tensors stacked to shape {:?}", list.len(), out.shape));
    }
    for (i, part) in list.iter().enumerate() {
        let (to, part) =
            (select(out, dim, i)?, part.as_ref().ok_or("one of the tensors is undefined")?);
        super::elements::same_shape(&to, part)?;
        copy(&to, part)?;
    }
    Ok(())
}

fn pad(call: &Call<'_>) -> Result<(), String> {
    match text(call, 2) {
        "" | "constant" => padded(call, number_or(call, 3, 0.0)?),
        other => Err(format!("padding mode `{other}` is not supported; only constant is")),
    }
}

/// Pads by argument 1: two numbers for each dimension, from the last on; negative ones crop.
fn padded(call: &Call<'_>, value: f64) -> Result<(), String> {
    let (out, mut from, pads) = (output(call)?, tensor(call, 0)?.clone(), ints(call, 1)?);
    let rank = from.shape.len();
    if pads.len() % 2 != 0 || pads.len() / 2 > rank || out.shape.len() != rank {
        return Err(format!("padding {pads:?} of shape {:?}", from.shape));
    }
    fill(out, value)?;
    let mut to = out.clone();
    for (i, pair) in pads.chunks(2).enumerate() {
        let dim = rank - 1 - i;
        let extent = from.shape[dim];
        let crop = |pad: i64| usize::try_from(-pad.min(0)).unwrap_or(usize::MAX);
        let grow = |pad: i64| usize::try_from(pad.max(0)).unwrap_or(usize::MAX);
        let end = extent.saturating_sub(crop(pair[1]));
        from = narrow(&from, dim, crop(pair[0]).min(end)..end)?;
        let end = to.shape[dim].saturating_sub(grow(pair[1]));
        to = narrow(&to, dim, grow(pair[0]).min(end)..end)?;
    }
    super::elements::same_shape(&to, &from)?;
    copy(&to, &from)
}

fn slice_backward(call: &Call<'_>) -> Result<(), String> {
    let (out, grad) = (output(call)?, tensor(call, 0)?);
    let dim = dimension(int_or(call, 2, 0)?, out.shape.len())?;
    let extent = *out.shape.get(dim).ok_or("a slice of a scalar")? as i64;
    let place = |x: i64| if x < 0 { (x + extent).max(0) } else { x.min(extent) };
    let (start, end, step) =
        (place(int_or(call, 3, 0)?), place(int_or(call, 4, i64::MAX)?), int_or(call, 5, 1)?);
    let step =
        usize::try_from(step).ok().filter(|&s| s > 0).ok_or("a slice's step must be positive")?;
    let (start, end) = (start as usize, end.max(start) as usize);
    fill(out, 0.0)?;
    let mut to = narrow(out, dim, start..end)?;
    to.shape[dim] = (end - start).div_ceil(step);
    to.stride[dim] = to.stride[dim].saturating_mul(step);
    super::elements::same_shape(&to, grad)?;
    copy(&to, grad)
}

fn select_backward(call: &Call<'_>) -> Result<(), String> {
    let (out, grad) = (output(call)?, tensor(call, 0)?);
    let dim = dimension(int_or(call, 2, 0)?, out.shape.len())?;
    let extent = *out.shape.get(dim).ok_or("a part of a scalar")?;
    let index = dimension(int_or(call, 3, 0)?, extent)?;
    fill(out, 0.0)?;
    let to = select(out, dim, index)?;
    super::elements::same_shape(&to, grad)?;
    copy(&to, grad)
}

/// Copies `from` to `out`, repeated.
fn repeated(out: &View, from: &View, times: &[usize], tiled: bool) -> Result<(), String> {
    let (to, source) = repeats(out, from, times, tiled)?;
    copy(&to, &source)
}

fn repeat(call: &Call<'_>) -> Result<(), String> {
    let (out, mut from) = (output(call)?, tensor(call, 0)?.clone());
    let times: Option<Vec<usize>> =
        ints(call, 1)?.iter().map(|&n| usize::try_from(n).ok()).collect();
    let times = times
        .filter(|t| t.len() >= from.shape.len() && t.len() == out.shape.len())
        .ok_or("repeats that don't fit the shapes")?;
    while from.shape.len() < times.len() {
        from.shape.insert(0, 1);
        from.stride.insert(0, 0);
    }
    repeated(out, &from, &times, true)
}

fn repeat_interleave(call: &Call<'_>) -> Result<(), String> {
    let (out, from) = (output(call)?, tensor(call, 0)?);
    let n = usize::try_from(int_or(call, 1, 1)?).map_err(|_| "a negative number of repeats")?;
    if from.shape.is_empty()
        || out.shape.len() != from.shape.len()
        || matches!(call.operator.args.get(2), None | Some(Arg::None)) && from.shape.len() != 1
    {
        return Err(format!("repeating shape {:?} into {:?}", from.shape, out.shape));
    }
    let mut times = vec![1; from.shape.len()];
    times[dimension(int_or(call, 2, 0)?, from.shape.len())?] = n;
    repeated(out, from, &times, false)
}

fn flip(call: &Call<'_>) -> Result<(), String> {
    let (out, from) = (output(call)?, tensor(call, 0)?);
    super::elements::same_shape(out, from)?;
    let dims = ints(call, 1)?;
    let [dim] = dims[..] else {
        return Err("flips along several dimensions are not supported".into());
    };
    let dim = dimension(dim, from.shape.len())?;
    let extent = *from.shape.get(dim).ok_or("a flip of a scalar")?;
    for i in 0..extent {
        copy(&narrow(out, dim, i..i + 1)?, &narrow(from, dim, extent - 1 - i..extent - i)?)?;
    }
    Ok(())
}

/// Keeps the lower (upper) triangle of the last two dimensions, up to (from) a diagonal.
fn triangle(call: &Call<'_>, lower: bool) -> Result<(), String> {
    let (out, from) = (output(call)?, tensor(call, 0)?);
    super::elements::same_shape(out, from)?;
    let rank = out.shape.len();
    if rank < 2 {
        return Err("a triangle of a tensor of fewer than two dimensions".into());
    }
    let diagonal = int_or(call, 1, 0)?;
    copy(out, from)?;
    let columns = out.shape[rank - 1] as i64;
    for row in 0..out.shape[rank - 2] {
        let edge = (row as i64).saturating_add(diagonal);
        let zeroed = if lower {
            edge.saturating_add(1).clamp(0, columns)..columns
        } else {
            0..edge.clamp(0, columns)
        };
        let part = narrow(
            &narrow(out, rank - 2, row..row + 1)?,
            rank - 1,
            zeroed.start as usize..zeroed.end as usize,
        )?;
        fill(&part, 0.0)?;
    }
    Ok(())
}
