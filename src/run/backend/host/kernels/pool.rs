//! Pooling in two dimensions: maximum with indices, average, adaptive average, and their backwards.
//!
//! Images may lack the batch dimension. Averages are summed in double precision.

use crate::backend::operators::arguments::{expect_shape, real, result, shaped, tensor};
use crate::backend::operators::error::data_error;
use crate::backend::operators::pool::{self, Windows, images, resized};
use crate::backend::operators::shapes::distinct;
use crate::backend::operators::view::{Call, View};
use crate::backend::operators::{KernelError, Table, table};

use super::Kernel;
use super::strided::{base, f32_operands, fill};

pub const TABLE: Table<Kernel> = table! {
    "max_pool2d_with_indices" | "max_pool2d" => max,
    "max_pool2d_with_indices_backward" => max_backward,
    "avg_pool2d" => |call| average(call, 0, None),
    "avg_pool2d_backward" => |call| average(call, 1, Some(0)),
    "adaptive_avg_pool2d" | "_adaptive_avg_pool2d" => {
            |call| adaptive(call, 0, None)
        },
    "_adaptive_avg_pool2d_backward" => |call| adaptive(call, 1, Some(0)),
};

/// Strides of images, with a batch dimension.
fn steps(view: &View) -> [usize; 4] {
    let missing = 4 - view.stride.len();
    std::array::from_fn(|i| if i < missing { 0 } else { view.stride[i - missing] })
}

impl Windows {
    /// The pixels under window `o` in dimension `i`: first, end (exclusive), with holes of the
    /// dilation.
    fn span(&self, i: usize, o: usize) -> (usize, usize) {
        let (start, step) = (o * self.stride[i], self.dilation[i]);
        let end = (start + (self.kernel[i] - 1) * step + 1)
            .saturating_sub(self.padding[i])
            .min(self.size[i]);
        // Steps inside the padding are skipped, not cut, so that dilated pixels stay where they
        // are.
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

fn max(call: &Call<'_>) -> Result<(), KernelError> {
    f32_operands(call)?;
    let x = real(call, 0)?;
    let [batch, channels, _, width] = images(&x.shape)?;
    let windows = Windows::of_max(call, &x.shape, 1)?;
    let shape = resized(&x.shape, windows.out);
    let out = shaped(call, 0, &shape)?;
    let indices = result(call, 1)?;
    if let Some(indices) = indices {
        pool::expect_indices(indices, &shape)?;
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
                        column += windows.dilation[1];
                    }
                    row += windows.dilation[0];
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

fn max_backward(call: &Call<'_>) -> Result<(), KernelError> {
    f32_operands(call)?;
    let (gradient, x, indices) = (real(call, 0)?, real(call, 1)?, tensor(call, 7)?);
    let [batch, channels, height, width] = images(&x.shape)?;
    let [rows, columns] = Windows::of_max(call, &x.shape, 2)?.out;
    let shape = resized(&x.shape, [rows, columns]);
    expect_shape("its output gradient", gradient, &shape)?;
    pool::expect_indices(indices, &shape)?;
    let into = shaped(call, 0, &x.shape)?;
    // SAFETY: `result` checked that the output is of f32 and used by this call alone.
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
                    return Err(data_error!(
                        "the index {index} is outside an image of {height} by {width}"
                    ));
                };
                // SAFETY: the pixel is inside the image.
                unsafe { *to.wrapping_add(pixel / width * ds[2] + pixel % width * ds[3]) += value };
            }
        }
    }
    Ok(())
}

/// Forward from argument 0 to output 0, or backward from the gradient in argument `gradient` to
/// output 0.
fn average(call: &Call<'_>, x: usize, gradient: Option<usize>) -> Result<(), KernelError> {
    let x = real(call, x)?;
    let first = if gradient.is_some() { 2 } else { 1 };
    let (windows, divisor) = pool::average(call, &x.shape, first)?;
    let window = |oh: usize, ow: usize| {
        let ((top, bottom), (left, right)) = (windows.span(0, oh), windows.span(1, ow));
        let padded = windows.padded(0, oh) * windows.padded(1, ow);
        let inside = bottom.saturating_sub(top) * right.saturating_sub(left);
        let count = match divisor.fixed {
            Some(fixed) => fixed as f64,
            None => (if divisor.with_padding { padded } else { inside }) as f64,
        };
        ([top, bottom, left, right], count)
    };
    averages(call, x, gradient, windows.out, window)
}

/// As [`average`], with windows that split the image evenly.
fn adaptive(call: &Call<'_>, x: usize, gradient: Option<usize>) -> Result<(), KernelError> {
    let x = real(call, x)?;
    let [_, _, height, width] = images(&x.shape)?;
    let out = pool::adaptive(call, &x.shape, gradient)?;
    let span = |o: usize, out: usize, size: usize| (o * size / out, ((o + 1) * size).div_ceil(out));
    let window = |oh: usize, ow: usize| {
        let ((top, bottom), (left, right)) = (span(oh, out[0], height), span(ow, out[1], width));
        let count = ((bottom - top) * (right - left)) as f64;
        ([top, bottom, left, right], count)
    };
    averages(call, x, gradient, out, window)
}

/// Averages over the windows `[top, bottom, left, right]`, or spreads gradients over them.
fn averages(
    call: &Call<'_>,
    x: &View,
    gradient: Option<usize>,
    out: [usize; 2],
    window: impl Fn(usize, usize) -> ([usize; 4], f64),
) -> Result<(), KernelError> {
    f32_operands(call)?;
    let [batch, channels, ..] = images(&x.shape)?;
    let shape = resized(&x.shape, out);
    // Pooled values on one side, pixels on the other; which of them is written depends on the
    // direction.
    let (pooled, pixels) = if let Some(at) = gradient {
        let gradient = real(call, at)?;
        expect_shape("its output gradient", gradient, &shape)?;
        let into = shaped(call, 0, &x.shape)?;
        // SAFETY: the output is of f32 and apart from all other operands.
        unsafe { fill(into, 0.0) };
        (gradient, into)
    } else {
        (shaped(call, 0, &shape)?, x)
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
                let share = if gradient.is_some() {
                    // SAFETY: inside the pooled view, whose shape was checked.
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
