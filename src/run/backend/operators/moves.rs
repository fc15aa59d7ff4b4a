//! Operators that only move elements: copies and casts, joining, padding, slices' gradients.
//!
//! They are written once, over the copies and fills of a backend.

use std::ops::Range;

use super::KernelError;
use super::arguments::{
    Input, input, int_or, ints, number, number_or, output, supported, tensor, tensors, text,
};
use super::error::{data_error, invalid, unsupported};
use super::shapes::{
    count, dimension, is_contiguous, narrow, repeats, row_major, same_shape, select,
};
use super::view::{Call, Operand, View};
use crate::job::Arg;

/// What a backend moves elements with.
pub trait Moves {
    /// Copies `from`, broadcast and converted, to `out`.
    ///
    /// # Errors
    /// When it can't be broadcast or converted.
    fn copy(&mut self, out: &View, from: &View) -> Result<(), KernelError>;

    /// Sets every element.
    ///
    /// # Errors
    /// When the type can't be written.
    fn fill(&mut self, out: &View, value: f64) -> Result<(), KernelError>;

    /// Copies batch data, which lies in host memory in row-major order, to `out` of the same shape.
    ///
    /// # Errors
    /// When it can't be converted.
    fn upload(&mut self, out: &View, batch: &View) -> Result<(), KernelError>;
}

/// Copies argument `index` to the output: a tensor of as many elements, a number, or batch
/// data.
///
/// # Errors
/// When the shapes don't fit.
pub fn move_from(by: &mut dyn Moves, call: &Call<'_>, index: usize) -> Result<(), KernelError> {
    let out = output(call)?;
    if let Some(Arg::Host { input: Some(position), dtype, .. }) = call.operator.args.get(index) {
        let data = call
            .batch
            .get(*position as usize)
            .ok_or_else(|| data_error!("there is no batch data for copy {position}"))?;
        let bytes = count(out) * dtype.size() as usize;
        if data.len() != bytes {
            return Err(data_error!(
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
        return by.upload(out, supported(&batch)?);
    }
    if !matches!(call.args.get(index), Some(Operand::Tensor(_))) {
        return fill_from(by, call, index);
    }
    let from = tensor(call, index)?;
    if out.shape == from.shape || index == 1 {
        return by.copy(out, from);
    }
    if count(out) == count(from) {
        // Another shape on the same row-major order: one of the two must be dense to wear the
        // other's shape.
        if is_contiguous(out) {
            return by.copy(
                &View { shape: from.shape.clone(), stride: row_major(&from.shape), ..out.clone() },
                from,
            );
        }
        if is_contiguous(from) {
            return by.copy(
                out,
                &View { shape: out.shape.clone(), stride: row_major(&out.shape), ..from.clone() },
            );
        }
        return Err(invalid!(
            "shape {:?} to {:?} between two tensors that are not contiguous",
            from.shape,
            out.shape
        ));
    }
    by.copy(out, from)
}

/// Sets the output to argument `index`, a tensor or a number.
///
/// # Errors
/// When it is absent.
pub fn fill_from(by: &mut dyn Moves, call: &Call<'_>, index: usize) -> Result<(), KernelError> {
    match input(call, index)? {
        Input::View(view) => by.copy(output(call)?, view),
        Input::Number { value, .. } => by.fill(output(call)?, value),
    }
}

/// Joins the tensors of argument 0 along dimension 1.
///
/// # Errors
/// When they don't fill the output.
pub fn cat(by: &mut dyn Moves, call: &Call<'_>) -> Result<(), KernelError> {
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
        by.copy(&to, part)?;
        at += extent;
    }
    if out.shape.get(dim) == Some(&at) {
        Ok(())
    } else {
        Err(invalid!("the parts fill {at} along dimension {dim} of shape {:?}", out.shape))
    }
}

/// Joins the tensors of argument 0 along a new dimension.
///
/// # Errors
/// When they don't fill the output.
pub fn stack(by: &mut dyn Moves, call: &Call<'_>) -> Result<(), KernelError> {
    let out = output(call)?;
    let dim = dimension(int_or(call, 1, 0)?, out.shape.len())?;
    let list = tensors(call, 0)?;
    if out.shape.get(dim) != Some(&list.len()) {
        return Err(invalid!("{} tensors stacked to shape {:?}", list.len(), out.shape));
    }
    for (i, part) in list.iter().enumerate() {
        let (to, part) =
            (select(out, dim, i)?, part.as_ref().ok_or("one of the tensors is undefined")?);
        same_shape(&to, part)?;
        by.copy(&to, part)?;
    }
    Ok(())
}

/// Pads by argument 1: two numbers for each dimension, from the last on; negative ones crop.
///
/// # Errors
/// When the shapes don't fit.
pub fn padded(by: &mut dyn Moves, call: &Call<'_>, value: f64) -> Result<(), KernelError> {
    let (out, mut from, pads) = (output(call)?, tensor(call, 0)?.clone(), ints(call, 1)?);
    let rank = from.shape.len();
    if pads.len() % 2 != 0 || pads.len() / 2 > rank || out.shape.len() != rank {
        return Err(invalid!("padding {pads:?} of shape {:?}", from.shape));
    }
    by.fill(out, value)?;
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
    by.copy(&to, &from)
}

/// Dimension, places and step that arguments `at..at + 4` (dimension, start, end, step) name.
fn slice_of(
    call: &Call<'_>,
    out: &View,
    at: usize,
) -> Result<(usize, Range<usize>, usize), KernelError> {
    let dim = dimension(int_or(call, at, 0)?, out.shape.len())?;
    let extent = *out.shape.get(dim).ok_or("a slice of a scalar")?;
    let length = i64::try_from(extent).map_err(|_| "a slice of too many elements")?;
    let place = |x: i64| {
        let x = if x < 0 { (x + length).max(0) } else { x.min(length) };
        usize::try_from(x).unwrap_or(extent)
    };
    let start = place(int_or(call, at + 1, 0)?);
    let end = place(int_or(call, at + 2, i64::MAX)?).max(start);
    let step = usize::try_from(int_or(call, at + 3, 1)?).unwrap_or(0);
    if step == 0 {
        return Err(invalid!("a slice's step must be positive"));
    }
    Ok((dim, start..end, step))
}

/// That part of `out`.
fn sliced(call: &Call<'_>, out: &View, at: usize) -> Result<View, KernelError> {
    let (dim, places, step) = slice_of(call, out, at)?;
    let mut part = narrow(out, dim, places.clone())?;
    part.shape[dim] = places.len().div_ceil(step);
    part.stride[dim] = part.stride[dim].saturating_mul(step);
    Ok(part)
}

/// The part of `out` that arguments `at` and `at + 1` (dimension, index) name.
fn selected(call: &Call<'_>, out: &View, at: usize) -> Result<View, KernelError> {
    let dim = dimension(int_or(call, at, 0)?, out.shape.len())?;
    let extent = *out.shape.get(dim).ok_or("a part of a scalar")?;
    select(out, dim, dimension(int_or(call, at + 1, 0)?, extent)?)
}

fn put(by: &mut dyn Moves, part: &View, from: &View) -> Result<(), KernelError> {
    same_shape(part, from)?;
    by.copy(part, from)
}

/// The gradient of a slice: zeros outside it.
///
/// # Errors
/// When the shapes don't fit.
pub fn slice_backward(by: &mut dyn Moves, call: &Call<'_>) -> Result<(), KernelError> {
    let out = output(call)?;
    let (dim, places, step) = slice_of(call, out, 2)?;
    let extent = out.shape.get(dim).copied().unwrap_or(0);
    let outside = if step == 1 { [0..places.start, places.end..extent] } else { [0..extent, 0..0] };
    for part in outside.into_iter().filter(|part| !part.is_empty()) {
        by.fill(&narrow(out, dim, part)?, 0.0)?;
    }
    put(by, &sliced(call, out, 2)?, tensor(call, 0)?)
}

/// The gradient of one part of a dimension: zeros outside it.
///
/// # Errors
/// When the shapes don't fit.
pub fn select_backward(by: &mut dyn Moves, call: &Call<'_>) -> Result<(), KernelError> {
    let out = output(call)?;
    by.fill(out, 0.0)?;
    put(by, &selected(call, out, 2)?, tensor(call, 0)?)
}

/// The gradient of a diagonal (argument 2 above the main one, in dimensions 3 and 4): zeros beside
/// it.
///
/// # Errors
/// When the shapes don't fit.
pub fn diagonal_backward(by: &mut dyn Moves, call: &Call<'_>) -> Result<(), KernelError> {
    let out = output(call)?;
    let (above, rank) = (int_or(call, 2, 0)?, out.shape.len());
    let (rows, columns) =
        (dimension(int_or(call, 3, 0)?, rank)?, dimension(int_or(call, 4, 1)?, rank)?);
    if rank < 2 || rows == columns {
        return Err(invalid!("a diagonal of dimensions {rows} and {columns} of {rank}"));
    }
    by.fill(out, 0.0)?;
    let (dim, skip) =
        if above < 0 { (rows, above.unsigned_abs()) } else { (columns, above.unsigned_abs()) };
    let extent = out.shape[dim];
    let mut line = narrow(out, dim, usize::try_from(skip).unwrap_or(extent).min(extent)..extent)?;
    line.shape.push(line.shape[rows].min(line.shape[columns]));
    line.stride.push(line.stride[rows] + line.stride[columns]);
    for dim in [rows.max(columns), rows.min(columns)] {
        line.shape.remove(dim);
        line.stride.remove(dim);
    }
    put(by, &line, tensor(call, 0)?)
}

/// Argument 0 with a slice of it replaced by argument 1.
///
/// # Errors
/// When the shapes don't fit.
pub fn slice_scatter(by: &mut dyn Moves, call: &Call<'_>) -> Result<(), KernelError> {
    let out = output(call)?;
    put(by, out, tensor(call, 0)?)?;
    put(by, &sliced(call, out, 2)?, tensor(call, 1)?)
}

/// Argument 0 with one part of a dimension replaced by argument 1.
///
/// # Errors
/// When the shapes don't fit.
pub fn select_scatter(by: &mut dyn Moves, call: &Call<'_>) -> Result<(), KernelError> {
    let out = output(call)?;
    put(by, out, tensor(call, 0)?)?;
    put(by, &selected(call, out, 2)?, tensor(call, 1)?)
}

/// Copies `from` to `out`, repeated.
fn repeated(
    by: &mut dyn Moves,
    out: &View,
    from: &View,
    times: &[usize],
    tiled: bool,
) -> Result<(), KernelError> {
    let (to, source) = repeats(out, from, times, tiled)?;
    by.copy(&to, &source)
}

/// The whole tensor, as often as argument 1 says along each dimension.
///
/// # Errors
/// When the shapes don't fit.
pub fn repeat(by: &mut dyn Moves, call: &Call<'_>) -> Result<(), KernelError> {
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
    repeated(by, out, &from, &times, true)
}

/// Each element of a dimension, argument 1 times in a row.
///
/// # Errors
/// When the shapes don't fit.
pub fn repeat_interleave(by: &mut dyn Moves, call: &Call<'_>) -> Result<(), KernelError> {
    let (out, from) = (output(call)?, tensor(call, 0)?);
    let n = usize::try_from(int_or(call, 1, 1)?).map_err(|_| "a negative number of repeats")?;
    if from.shape.is_empty()
        || out.shape.len() != from.shape.len()
        || matches!(call.operator.args.get(2), None | Some(Arg::None)) && from.shape.len() != 1
    {
        return Err(invalid!("repeating shape {:?} into {:?}", from.shape, out.shape));
    }
    let mut times = vec![1; from.shape.len()];
    times[dimension(int_or(call, 2, 0)?, from.shape.len())?] = n;
    repeated(by, out, from, &times, false)
}

/// The constant padding of `pad`.
///
/// # Errors
/// For another mode, and when the shapes don't fit.
pub fn pad(by: &mut dyn Moves, call: &Call<'_>) -> Result<(), KernelError> {
    match text(call, 2) {
        "" | "constant" => padded(by, call, number_or(call, 3, 0.0)?),
        other => Err(unsupported!("padding mode `{other}` is not supported; only constant is")),
    }
}

/// Shifts argument 0 by the numbers of argument 1 along the dimensions of argument 2; what leaves
/// at one end enters at the other.
///
/// # Errors
/// When the shapes don't fit, and for shifts of a flattened tensor along several dimensions.
pub fn roll(by: &mut dyn Moves, call: &Call<'_>) -> Result<(), KernelError> {
    let (out, from) = (output(call)?, tensor(call, 0)?);
    same_shape(out, from)?;
    let (shifts, mut dims) = (ints(call, 1)?, ints(call, 2)?);
    let (mut out, mut from) = (out.clone(), from.clone());
    if dims.is_empty() && shifts.len() == 1 {
        if !is_contiguous(&out) || !is_contiguous(&from) {
            return Err(unsupported!("a flattened tensor that is not contiguous is not rolled"));
        }
        for view in [&mut out, &mut from] {
            (view.shape, view.stride) = (vec![count(view)], vec![1]);
        }
        dims = vec![0];
    }
    if dims.len() != shifts.len() {
        return Err(invalid!("{} shifts along {} dimensions", shifts.len(), dims.len()));
    }
    // Each shift cuts every part in two.
    let mut parts = vec![(out, from)];
    for (shift, dim) in shifts.into_iter().zip(dims) {
        let mut cut = Vec::with_capacity(2 * parts.len());
        for (out, from) in parts {
            let dim = dimension(dim, from.shape.len())?;
            let extent = *from.shape.get(dim).ok_or("a roll of a scalar")?;
            let Ok(length) = i64::try_from(extent) else { return Err("too long".into()) };
            if length == 0 {
                continue;
            }
            let shift = usize::try_from(shift.rem_euclid(length)).unwrap_or(0);
            let split = extent - shift;
            cut.push((narrow(&out, dim, shift..extent)?, narrow(&from, dim, 0..split)?));
            if shift > 0 {
                cut.push((narrow(&out, dim, 0..shift)?, narrow(&from, dim, split..extent)?));
            }
        }
        parts = cut;
    }
    parts.iter().try_for_each(|(out, from)| by.copy(out, from))
}

/// Start and step of `arange`.
///
/// # Errors
/// When they don't give the output's shape.
pub fn arange(call: &Call<'_>) -> Result<(f64, f64), KernelError> {
    let out = output(call)?;
    let (start, end, step) = match call.operator.args.len() {
        1 | 5 => (0.0, number(call, 0)?, 1.0),
        2 | 6 => (number(call, 0)?, number(call, 1)?, 1.0),
        3 | 4 | 7 => (number(call, 0)?, number(call, 1)?, number(call, 2)?),
        n => return Err(unsupported!("a form of arange with {n} arguments")),
    };
    let steps = ((end - start) / step).ceil();
    if out.shape.len() != 1 || steps != out.shape[0] as f64 {
        return Err(invalid!(
            "from {start} to {end} by {step} does not give shape {:?}",
            out.shape
        ));
    }
    Ok((start, step))
}

/// The dimension that `flip` turns round, and its extent.
///
/// # Errors
/// When the shapes differ, and for several dimensions.
pub fn flipped(call: &Call<'_>) -> Result<(usize, usize), KernelError> {
    let from = tensor(call, 0)?;
    same_shape(output(call)?, from)?;
    let [dim] = ints(call, 1)?[..] else {
        return Err(unsupported!("flips along several dimensions are not supported"));
    };
    let dim = dimension(dim, from.shape.len())?;
    Ok((dim, *from.shape.get(dim).ok_or("a flip of a scalar")?))
}

/// Output, input and diagonal of `tril` and `triu`.
///
/// # Errors
/// When the shapes differ or have no matrices.
pub fn triangle<'a>(call: &'a Call<'_>) -> Result<(&'a View, &'a View, i64), KernelError> {
    let (out, from) = (output(call)?, tensor(call, 0)?);
    same_shape(out, from)?;
    if out.shape.len() < 2 {
        return Err(invalid!("a triangle of a tensor of fewer than two dimensions"));
    }
    Ok((out, from, int_or(call, 1, 0)?.clamp(-(1 << 40), 1 << 40)))
}
