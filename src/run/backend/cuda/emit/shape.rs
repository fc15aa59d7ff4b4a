//! Moving elements: copies and casts, joining, padding, slices' gradients, and tensors of a constant.
//!
//! Not for: views, which cost nothing and are part of how operators read.

use super::super::super::host::kernels::arguments::{Input, int_or, ints, number, number_or, text};
use super::super::super::host::kernels::elements::{
    count, dimension, is_contiguous, narrow, repeats, row_major, same_shape, select,
};
use super::super::super::host::view::{Call, Operand, View};
use super::super::launch::{Action, Actions, Family};
use super::Emit;
use super::args::{input, is_floating, output, supported, tensor, tensors};
use super::map::{Extra, blocks, copy, fill, map, params};
use crate::job::{Arg, Dtype};

/// What makes the actions of `kind`.
pub fn find(kind: &str) -> Option<Emit> {
    Some(match kind.strip_prefix("aten::")? {
        "clone" | "contiguous" | "reshape" | "to" | "_to_copy" | "expand" | "expand_copy"
        | "_unsafe_view" | "view" | "flatten" | "unflatten" | "alias" | "detach" | "lift_fresh"
        | "squeeze" | "unsqueeze" | "_reshape_alias" | "type_as" => |c, a| move_from(c, a, 0),
        "copy_" | "copy" => |c, a| move_from(c, a, 1),
        "zeros" | "zeros_like" | "zero_" | "new_zeros" | "empty" | "empty_like"
        | "empty_strided" | "new_empty" | "new_empty_strided" | "empty_permuted" => {
            |c, a| fill(a, output(c)?, 0.0)
        }
        "ones" | "ones_like" | "new_ones" => |c, a| fill(a, output(c)?, 1.0),
        "full" | "full_like" | "fill" | "fill_" => |c, a| fill_from(c, a, 1),
        "new_full" => |c, a| fill_from(c, a, 2),
        "scalar_tensor" => |c, a| fill_from(c, a, 0),
        "arange" => arange,
        "cat" | "concat" => cat,
        "stack" => stack,
        "pad" => |c, a| match text(c, 2) {
            "" | "constant" => padded(c, a, number_or(c, 3, 0.0)?),
            other => Err(format!("padding mode `{other}` is not supported; only constant is")),
        },
        "constant_pad_nd" => |c, a| padded(c, a, number_or(c, 2, 0.0)?),
        "slice_backward" => slice_backward,
        "select_backward" => select_backward,
        "repeat" => repeat,
        "repeat_interleave" => repeat_interleave,
        "flip" => flip,
        "tril" | "tril_" => |c, a| triangle(c, a, true),
        "triu" | "triu_" => |c, a| triangle(c, a, false),
        _ => return None,
    })
}

fn move_from(call: &Call<'_>, actions: &mut Actions, index: usize) -> Result<(), String> {
    let out = output(call)?;
    if let Some(Arg::Host { input: Some(position), dtype, .. }) = call.operator.args.get(index) {
        let data = call
            .batch
            .get(*position as usize)
            .ok_or_else(|| format!("there is no batch data for copy {position}"))?;
        return upload(actions, out, *dtype, data, *position);
    }
    if !matches!(call.args.get(index), Some(Operand::Tensor(_))) {
        return fill_from(call, actions, index);
    }
    let from = tensor(call, index)?;
    if out.shape == from.shape || index == 1 {
        return copy(actions, out, from);
    }
    if count(out) == count(from) {
        // Another shape on the same row-major order: one of the two must be dense to wear the other's shape.
        if is_contiguous(out) {
            return copy(
                actions,
                &View { shape: from.shape.clone(), stride: row_major(&from.shape), ..out.clone() },
                from,
            );
        }
        if is_contiguous(from) {
            return copy(
                actions,
                out,
                &View { shape: out.shape.clone(), stride: row_major(&out.shape), ..from.clone() },
            );
        }
        return Err(format!(
            "shape {:?} to {:?} between two tensors that are not contiguous",
            from.shape, out.shape
        ));
    }
    copy(actions, out, from)
}

/// Batch data in the output's type and order, worked out here once.
fn upload(
    actions: &mut Actions,
    out: &View,
    dtype: Dtype,
    data: &[u8],
    position: u32,
) -> Result<(), String> {
    use super::super::super::host::kernels::elements::{Lane, each, read};
    let bytes = count(out) * dtype.size() as usize;
    if data.len() != bytes {
        return Err(format!(
            "batch data {position} has {} bytes where {bytes} are needed for shape {:?}",
            data.len(),
            out.shape
        ));
    }
    if count(out) == 0 {
        return Ok(());
    }
    if dtype == out.dtype && is_contiguous(out) {
        actions.list.push(Action::Upload { to: out.data, data: data.to_vec() });
        return Ok(());
    }
    let batch = View {
        data: data.as_ptr().cast_mut(),
        dtype,
        shape: out.shape.clone(),
        stride: row_major(&out.shape),
    };
    super::super::super::host::kernels::arguments::supported(&batch)?;
    let last: usize = out.shape.iter().zip(&out.stride).map(|(n, s)| (n - 1) * s).sum();
    if last + 1 != count(out) || out.dtype == Dtype::Bf16 {
        return Err(format!(
            "batch data {position} goes to a tensor of type {:?} and strides {:?}",
            out.dtype, out.stride
        ));
    }
    let size = out.dtype.size() as usize;
    let mut laid = vec![0u8; count(out) * size];
    each(&out.shape, &[out.stride.clone(), batch.stride.clone()], |[to, from]| {
        let slot = laid[to * size..].as_mut_ptr();
        let value = read(&batch, from);
        // SAFETY: the slot is one of `count` elements of the output's type.
        unsafe {
            if out.dtype == Dtype::F32 {
                f32::store(out.dtype, slot, 1, &[value as f32]);
            } else {
                i64::store(out.dtype, slot, 1, &[value as i64]);
            }
        }
    });
    actions.list.push(Action::Upload { to: out.data, data: laid });
    Ok(())
}

fn fill_from(call: &Call<'_>, actions: &mut Actions, index: usize) -> Result<(), String> {
    match input(call, index)? {
        Input::View(view) => copy(actions, output(call)?, view),
        Input::Number { value, .. } => fill(actions, output(call)?, value),
    }
}

fn arange(call: &Call<'_>, actions: &mut Actions) -> Result<(), String> {
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
    let [zero, start, step] = [0.0, start, step].map(|value| Input::Number { value, float: true });
    map(actions, is_floating(out), "arange", out, &[zero, start, step], &Extra::default())
}

fn cat(call: &Call<'_>, actions: &mut Actions) -> Result<(), String> {
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
        same_shape(&to, part)?;
        copy(actions, &to, part)?;
        at += extent;
    }
    if out.shape.get(dim) == Some(&at) {
        Ok(())
    } else {
        Err(format!("the parts fill {at} along dimension {dim} of shape {:?}", out.shape))
    }
}

fn stack(call: &Call<'_>, actions: &mut Actions) -> Result<(), String> {
    let out = output(call)?;
    let dim = dimension(int_or(call, 1, 0)?, out.shape.len())?;
    let list = tensors(call, 0)?;
    if out.shape.get(dim) != Some(&list.len()) {
        return Err(format!("{} tensors stacked to shape {:?}", list.len(), out.shape));
    }
    for (i, part) in list.iter().enumerate() {
        let (to, part) =
            (select(out, dim, i)?, part.as_ref().ok_or("one of the tensors is undefined")?);
        same_shape(&to, part)?;
        copy(actions, &to, part)?;
    }
    Ok(())
}

/// Pads by argument 1: two numbers for each dimension, from the last on; negative ones crop.
fn padded(call: &Call<'_>, actions: &mut Actions, value: f64) -> Result<(), String> {
    let (out, mut from, pads) = (output(call)?, tensor(call, 0)?.clone(), ints(call, 1)?);
    let rank = from.shape.len();
    if pads.len() % 2 != 0 || pads.len() / 2 > rank || out.shape.len() != rank {
        return Err(format!("padding {pads:?} of shape {:?}", from.shape));
    }
    fill(actions, out, value)?;
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
    same_shape(&to, &from)?;
    copy(actions, &to, &from)
}

fn slice_backward(call: &Call<'_>, actions: &mut Actions) -> Result<(), String> {
    let (out, grad) = (output(call)?, tensor(call, 0)?);
    let dim = dimension(int_or(call, 2, 0)?, out.shape.len())?;
    let extent = *out.shape.get(dim).ok_or("a slice of a scalar")? as i64;
    let place = |x: i64| if x < 0 { (x + extent).max(0) } else { x.min(extent) };
    let (start, end, step) =
        (place(int_or(call, 3, 0)?), place(int_or(call, 4, i64::MAX)?), int_or(call, 5, 1)?);
    let step =
        usize::try_from(step).ok().filter(|&s| s > 0).ok_or("a slice's step must be positive")?;
    let (start, end) = (start as usize, end.max(start) as usize);
    fill(actions, out, 0.0)?;
    let mut to = narrow(out, dim, start..end)?;
    to.shape[dim] = (end - start).div_ceil(step);
    to.stride[dim] = to.stride[dim].saturating_mul(step);
    same_shape(&to, grad)?;
    copy(actions, &to, grad)
}

fn select_backward(call: &Call<'_>, actions: &mut Actions) -> Result<(), String> {
    let (out, grad) = (output(call)?, tensor(call, 0)?);
    let dim = dimension(int_or(call, 2, 0)?, out.shape.len())?;
    let extent = *out.shape.get(dim).ok_or("a part of a scalar")?;
    let index = dimension(int_or(call, 3, 0)?, extent)?;
    fill(actions, out, 0.0)?;
    let to = select(out, dim, index)?;
    same_shape(&to, grad)?;
    copy(actions, &to, grad)
}

/// Copies `from` to `out`, repeated.
fn repeated(
    actions: &mut Actions,
    out: &View,
    from: &View,
    times: &[usize],
    tiled: bool,
) -> Result<(), String> {
    let (to, source) = repeats(out, from, times, tiled)?;
    copy(actions, &to, &source)
}

fn repeat(call: &Call<'_>, actions: &mut Actions) -> Result<(), String> {
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
    repeated(actions, out, &from, &times, true)
}

fn repeat_interleave(call: &Call<'_>, actions: &mut Actions) -> Result<(), String> {
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
    repeated(actions, out, from, &times, false)
}

fn flip(call: &Call<'_>, actions: &mut Actions) -> Result<(), String> {
    let (out, from) = (output(call)?, tensor(call, 0)?);
    same_shape(out, from)?;
    let dims = ints(call, 1)?;
    let [dim] = dims[..] else {
        return Err("flips along several dimensions are not supported".into());
    };
    let dim = dimension(dim, from.shape.len())?;
    let extent = *from.shape.get(dim).ok_or("a flip of a scalar")?;
    if count(from) == 0 {
        return Ok(());
    }
    // From the last element backwards.
    let mut reversed = narrow(supported(from)?, dim, extent - 1..extent)?;
    reversed.shape[dim] = extent;
    reversed.stride[dim] = from.stride[dim].wrapping_neg();
    map(
        actions,
        is_floating(out) || is_floating(from),
        "copy",
        out,
        &[Input::View(&reversed)],
        &Extra::default(),
    )
}

/// Keeps the lower (upper) triangle of the last two dimensions, up to (from) a diagonal.
fn triangle(call: &Call<'_>, actions: &mut Actions, lower: bool) -> Result<(), String> {
    let (out, from) = (output(call)?, tensor(call, 0)?);
    same_shape(out, from)?;
    if out.shape.len() < 2 {
        return Err("a triangle of a tensor of fewer than two dimensions".into());
    }
    let diagonal = int_or(call, 1, 0)?.clamp(-(1 << 40), 1 << 40);
    let extra = Extra { k: [diagonal, i64::from(lower), 0, 0], apart: true, ..Extra::default() };
    let map = params(out, &[Input::View(from)], &extra)?;
    let kernel = if is_floating(out) { "f_triangle" } else { "i_triangle" };
    actions.launch(Family::Pointwise, kernel, blocks(&map), [256, 1], &map);
    Ok(())
}
