//! Pooling in two dimensions: maximum with indices, average, adaptive average, and their backwards.
//!
//! Images may lack the batch dimension. Averages are summed in double precision.

use super::super::view::{Call, View};
use super::Kernel;
use super::strided::{
    base, distinct, f32_only, fill, flag, int, optional, output, pair, product, result, same_shape,
    tensor,
};
use crate::job::{Arg, Dtype};

/// The kernel for a kind, if it is one of this file's.
pub fn find(kind: &str) -> Option<Kernel> {
    Some(match kind {
        "aten::max_pool2d_with_indices" | "aten::max_pool2d" => max,
        "aten::max_pool2d_with_indices_backward" => max_backward,
        "aten::avg_pool2d" => |call| average(call, 0, None),
        "aten::avg_pool2d_backward" => |call| average(call, 1, Some(0)),
        "aten::adaptive_avg_pool2d" | "aten::_adaptive_avg_pool2d" => {
            |call| adaptive(call, 0, None)
        }
        "aten::_adaptive_avg_pool2d_backward" => |call| adaptive(call, 1, Some(0)),
        _ => return None,
    })
}

/// Extents of images: batch, channels, height, width.
fn images(call: &Call<'_>, shape: &[usize]) -> Result<[usize; 4], String> {
    let four = match *shape {
        [c, h, w] => [1, c, h, w],
        [n, c, h, w] => [n, c, h, w],
        _ => {
            return Err(format!(
                "{} pools images of three or four dimensions, not {shape:?}",
                call.operator.kind
            ));
        }
    };
    product(call, &four)?;
    if four[2].max(four[3]) > 1 << 31 {
        return Err(format!(
            "{} pools images of at most 2^31 rows and columns, not {shape:?}",
            call.operator.kind
        ));
    }
    Ok(four)
}

/// The same rank as `like`, with another height and width.
fn resized(like: &[usize], [height, width]: [usize; 2]) -> Vec<usize> {
    let mut shape = like.to_vec();
    let rank = shape.len();
    (shape[rank - 2], shape[rank - 1]) = (height, width);
    shape
}

/// Strides of images, with a batch dimension.
fn steps(view: &View) -> [usize; 4] {
    let missing = 4 - view.stride.len();
    std::array::from_fn(|i| if i < missing { 0 } else { view.stride[i - missing] })
}

/// Windows of a fixed size.
struct Windows {
    kernel: [usize; 2],
    stride: [usize; 2],
    padding: [usize; 2],
    dilation: [usize; 2],
    size: [usize; 2],
    out: [usize; 2],
}

impl Windows {
    /// Reads kernel, stride and padding from arguments `at..at + 3`.
    fn new(
        call: &Call<'_>,
        size: [usize; 2],
        at: usize,
        dilation: [usize; 2],
        ceil: bool,
    ) -> Result<Self, String> {
        let kind = &call.operator.kind;
        let kernel = pair(call, at, 1)?.ok_or_else(|| format!("{kind} needs a kernel size"))?;
        let stride = pair(call, at + 1, 1)?.unwrap_or(kernel);
        let padding = pair(call, at + 2, 0)?.unwrap_or([0; 2]);
        let mut out = [0; 2];
        for i in 0..2 {
            if padding[i] > kernel[i] / 2 {
                return Err(format!(
                    "{kind}: the padding {padding:?} is more than half of the kernel {kernel:?}"
                ));
            }
            let reach = (kernel[i] - 1).checked_mul(dilation[i]).and_then(|r| r.checked_add(1));
            let round = if ceil { stride[i] - 1 } else { 0 };
            // The padded image may be shorter than the window by what rounding up makes good.
            let room = reach
                .and_then(|reach| size[i].checked_add(2 * padding[i] + round)?.checked_sub(reach));
            let Some(room) = room.filter(|_| size[i] > 0) else {
                return Err(format!("{kind}: the kernel {kernel:?} does not fit into {size:?}"));
            };
            out[i] = room / stride[i] + 1;
            // The last window must start inside the image or the padding before it.
            if ceil && (out[i] - 1) * stride[i] >= size[i] + padding[i] {
                out[i] -= 1;
            }
        }
        Ok(Self { kernel, stride, padding, dilation, size, out })
    }

    /// The pixels under window `o` in dimension `i`: first, end (exclusive), with holes of the dilation.
    fn span(&self, i: usize, o: usize) -> (usize, usize) {
        let (start, step) = (o * self.stride[i], self.dilation[i]);
        let end = (start + (self.kernel[i] - 1) * step + 1)
            .saturating_sub(self.padding[i])
            .min(self.size[i]);
        // Steps inside the padding are skipped, not cut, so that dilated pixels stay where they are.
        let first = if start >= self.padding[i] {
            start - self.padding[i]
        } else {
            (step - (self.padding[i] - start) % step) % step
        };
        (first, end)
    }

    /// The window's extent in dimension `i` with the padding that counts.
    fn padded(&self, i: usize, o: usize) -> usize {
        let start = o * self.stride[i];
        (start + self.kernel[i]).min(self.size[i] + 2 * self.padding[i]) - start
    }
}

fn max(call: &Call<'_>) -> Result<(), String> {
    let x = tensor(call, 0, "self")?;
    let [batch, channels, height, width] = images(call, &x.shape)?;
    let dilation = pair(call, 4, 1)?.unwrap_or([1; 2]);
    let windows = Windows::new(call, [height, width], 1, dilation, flag(call, 5)?)?;
    let shape = resized(&x.shape, windows.out);
    let out = result(call, 0, &shape)?;
    let indices = output(call, 1);
    if let Some(indices) = indices {
        if indices.dtype != Dtype::I64 {
            return Err(format!(
                "{} writes its indices as I64, not {:?}",
                call.operator.kind, indices.dtype
            ));
        }
        same_shape(call, "its indices", indices, &shape)?;
        distinct(call, indices)?;
    }
    let (xs, os, is) = (steps(x), steps(out), indices.map(steps));
    for plane in 0..batch * channels {
        let (n, c) = (plane / channels, plane % channels);
        let from = base(x).wrapping_add(n * xs[0] + c * xs[1]);
        for oh in 0..windows.out[0] {
            let (top, bottom) = windows.span(0, oh);
            for ow in 0..windows.out[1] {
                let (left, right) = windows.span(1, ow);
                let (mut best, mut at) = (f32::NEG_INFINITY, top * width + left);
                let mut row = top;
                while row < bottom {
                    let mut column = left;
                    while column < right {
                        // SAFETY: spans stay inside the image.
                        let value = unsafe { *from.wrapping_add(row * xs[2] + column * xs[3]) };
                        // As PyTorch: the first of equals, and NaN wins.
                        if value > best || value.is_nan() {
                            (best, at) = (value, row * width + column);
                        }
                        column += dilation[1];
                    }
                    row += dilation[0];
                }
                let place = |s: &[usize; 4]| n * s[0] + c * s[1] + oh * s[2] + ow * s[3];
                // SAFETY: inside the output, whose shape `result` checked.
                unsafe { *base(out).wrapping_add(place(&os)) = best };
                if let (Some(indices), Some(is)) = (indices, &is) {
                    // SAFETY: inside the indices, whose shape and type were checked.
                    unsafe {
                        *indices.data.cast::<i64>().wrapping_add(place(is)) =
                            i64::try_from(at).unwrap_or(i64::MAX)
                    };
                }
            }
        }
    }
    Ok(())
}

fn max_backward(call: &Call<'_>) -> Result<(), String> {
    let (gradient, x) = (tensor(call, 0, "grad_output")?, tensor(call, 1, "self")?);
    let [batch, channels, height, width] = images(call, &x.shape)?;
    let Some(super::super::view::Operand::Tensor(indices)) = call.args.get(7) else {
        return Err(format!("{} needs its indices", call.operator.kind));
    };
    let [_, _, rows, columns] = images(call, &gradient.shape)?;
    same_shape(call, "its output gradient", gradient, &resized(&x.shape, [rows, columns]))?;
    same_shape(call, "its indices", indices, &gradient.shape)?;
    if indices.dtype != Dtype::I64 {
        return Err(format!(
            "{} reads its indices as I64, not {:?}",
            call.operator.kind, indices.dtype
        ));
    }
    let into = result(call, 0, &x.shape)?;
    // SAFETY: `result` checked that the output is of f32 and nobody else's.
    unsafe { fill(into, 0.0) };
    let (gs, is, ds) = (steps(gradient), steps(indices), steps(into));
    for plane in 0..batch * channels {
        let (n, c) = (plane / channels, plane % channels);
        let to = base(into).wrapping_add(n * ds[0] + c * ds[1]);
        for oh in 0..rows {
            for ow in 0..columns {
                let place = |s: &[usize; 4]| n * s[0] + c * s[1] + oh * s[2] + ow * s[3];
                // SAFETY: inside the two views, whose shapes agree.
                let (index, value) = unsafe {
                    (
                        *indices.data.cast::<i64>().wrapping_add(place(&is)),
                        *base(gradient).wrapping_add(place(&gs)),
                    )
                };
                let Some(pixel) =
                    usize::try_from(index).ok().filter(|&pixel| pixel < height * width)
                else {
                    return Err(format!(
                        "{}: the index {index} is outside an image of {height} by {width}",
                        call.operator.kind
                    ));
                };
                // SAFETY: the pixel is inside the image.
                unsafe { *to.wrapping_add(pixel / width * ds[2] + pixel % width * ds[3]) += value };
            }
        }
    }
    Ok(())
}

/// Forward from argument 0 to output 0, or backward from the gradient in argument `gradient` to output 0.
fn average(call: &Call<'_>, x: usize, gradient: Option<usize>) -> Result<(), String> {
    let x = tensor(call, x, "self")?;
    let first = if gradient.is_some() { 2 } else { 1 };
    let [_, _, height, width] = images(call, &x.shape)?;
    let windows = Windows::new(call, [height, width], first, [1; 2], flag(call, first + 3)?)?;
    let count_padding = !matches!(call.operator.args.get(first + 4), Some(Arg::Bool(false)));
    let divisor = match call.operator.args.get(first + 5) {
        None | Some(Arg::None) => None,
        Some(_) => Some(int(call, first + 5)?)
            .filter(|&d| d != 0)
            .map(Some)
            .ok_or_else(|| format!("{} cannot divide by 0", call.operator.kind))?,
    };
    let window = |oh: usize, ow: usize| {
        let ((top, bottom), (left, right)) = (windows.span(0, oh), windows.span(1, ow));
        let padded = windows.padded(0, oh) * windows.padded(1, ow);
        let inside = bottom.saturating_sub(top) * right.saturating_sub(left);
        #[expect(clippy::cast_precision_loss, reason = "windows are far smaller than 2^52")]
        let count =
            divisor.map_or((if count_padding { padded } else { inside }) as f64, |d| d as f64);
        ([top, bottom, left, right], count)
    };
    averages(call, x, gradient, windows.out, window)
}

/// As [`average`], with windows that split the image evenly.
fn adaptive(call: &Call<'_>, x: usize, gradient: Option<usize>) -> Result<(), String> {
    let x = tensor(call, x, "self")?;
    let [_, _, height, width] = images(call, &x.shape)?;
    let out = match gradient {
        None => pair(call, 1, 0)?
            .ok_or_else(|| format!("{} needs an output size", call.operator.kind))?,
        Some(at) => {
            let [_, _, height, width] = images(call, &tensor(call, at, "grad_output")?.shape)?;
            [height, width]
        }
    };
    if height == 0 || width == 0 {
        return Err(format!("{} needs an image, not {:?}", call.operator.kind, x.shape));
    }
    let span = |o: usize, out: usize, size: usize| (o * size / out, ((o + 1) * size).div_ceil(out));
    let window = |oh: usize, ow: usize| {
        let ((top, bottom), (left, right)) = (span(oh, out[0], height), span(ow, out[1], width));
        #[expect(clippy::cast_precision_loss, reason = "windows are far smaller than 2^52")]
        let count = ((bottom - top) * (right - left)) as f64;
        ([top, bottom, left, right], count)
    };
    averages(call, x, gradient, out, window)
}

/// Averages over the windows `[top, bottom, left, right]`, or spreads gradients over them.
#[expect(clippy::cast_possible_truncation, reason = "rounded once, to what is stored")]
fn averages(
    call: &Call<'_>,
    x: &View,
    gradient: Option<usize>,
    out: [usize; 2],
    window: impl Fn(usize, usize) -> ([usize; 4], f64),
) -> Result<(), String> {
    let [batch, channels, ..] = images(call, &x.shape)?;
    let shape = resized(&x.shape, out);
    // Pooled values on one side, pixels on the other; which of them is written depends on the direction.
    let (pooled, pixels) = if let Some(at) = gradient {
        let gradient = optional(call, at)?
            .ok_or_else(|| format!("{} needs its output gradient", call.operator.kind))?;
        same_shape(call, "its output gradient", gradient, &shape)?;
        let into = result(call, 0, &x.shape)?;
        // SAFETY: `result` checked that the output is of f32 and nobody else's.
        unsafe { fill(into, 0.0) };
        (gradient, into)
    } else {
        (result(call, 0, &shape)?, f32_only(call, x)?)
    };
    let (ps, xs) = (steps(pooled), steps(pixels));
    for plane in 0..batch * channels {
        let (n, c) = (plane / channels, plane % channels);
        let image = base(pixels).wrapping_add(n * xs[0] + c * xs[1]);
        for oh in 0..out[0] {
            for ow in 0..out[1] {
                let ([top, bottom, left, right], count) = window(oh, ow);
                let value =
                    base(pooled).wrapping_add(n * ps[0] + c * ps[1] + oh * ps[2] + ow * ps[3]);
                // SAFETY: inside the pooled view, whose shape was checked.
                let share = if gradient.is_some() {
                    (f64::from(unsafe { *value }) / count) as f32
                } else {
                    0.0
                };
                let mut sum = 0.0f64;
                for row in top..bottom {
                    for column in left..right {
                        let pixel = image.wrapping_add(row * xs[2] + column * xs[3]);
                        // SAFETY: windows stay inside the image.
                        unsafe {
                            if gradient.is_some() {
                                *pixel += share
                            } else {
                                sum += f64::from(*pixel)
                            }
                        };
                    }
                }
                if gradient.is_none() {
                    // SAFETY: inside the output, whose shape `result` checked.
                    unsafe { *value = (sum / count) as f32 };
                }
            }
        }
    }
    Ok(())
}
