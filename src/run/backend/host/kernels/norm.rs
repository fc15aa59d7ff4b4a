//! Batch normalisation, forward and backward, under all the names it is recorded by.
//!
//! Statistics are summed in double precision in a fixed order; the mean first, then the squared
//! distances from it.

use crate::backend::operators::norm::{BatchNorm, BatchNormBackward, without_channels};
use crate::backend::operators::view::{Call, View};
use crate::backend::operators::{KernelError, Table, table};

use super::Kernel;
use super::conv::total;
use super::strided::{base, f32_operands, runs};

pub const TABLE: Table<Kernel> = table! {
    "batch_norm" | "_batch_norm_impl_index" | "cudnn_batch_norm" | "native_batch_norm" => forward,
    "cudnn_batch_norm_backward" => |call| backward(call, &BatchNormBackward::cudnn(call)?),
    "native_batch_norm_backward" => {
            |call| backward(call, &BatchNormBackward::native(call)?)
        },
};

/// One value per channel, or what stands for it where the tensor is undefined.
#[derive(Clone, Copy)]
struct PerChannel<'a> {
    view: Option<&'a View>,
    otherwise: f32,
}

impl PerChannel<'_> {
    fn get(&self, channel: usize) -> f32 {
        // SAFETY: the view has one element for each channel, checked before.
        self.view.map_or(self.otherwise, |view| unsafe {
            *base(view).wrapping_add(channel * view.stride[0])
        })
    }
}

fn set(view: Option<&View>, channel: usize, value: f64) {
    if let Some(view) = view {
        // SAFETY: callers checked that the view has one element for each channel and is used by
        // this call alone.
        unsafe {
            *base(view).wrapping_add(channel * view.stride[0]) = value as f32;
        }
    }
}

fn forward(call: &Call<'_>) -> Result<(), KernelError> {
    f32_operands(call)?;
    let of = BatchNorm::new(call)?;
    let BatchNorm { x, out, training, update, momentum, eps, .. } = of;
    let count = of.channels;
    let (weight, bias) = (
        PerChannel { view: of.weight, otherwise: 1.0 },
        PerChannel { view: of.bias, otherwise: 0.0 },
    );
    let [running_mean, running_var] = [(of.running[0], 0.0), (of.running[1], 1.0)]
        .map(|(view, otherwise)| PerChannel { view, otherwise });
    let [save_mean, save_invstd] = of.saved;
    let (shape, steps, out_steps) =
        (without_channels(&x.shape), without_channels(&x.stride), without_channels(&out.stride));
    let elements = shape.iter().product::<usize>() as f64;
    for channel in 0..count {
        let start = base(x).wrapping_add(channel * x.stride[1]);
        let (mean, invstd) = if training {
            let (mean, squares) = moments(start, &shape, &steps, elements);
            let variance = squares / elements;
            if update {
                let momentum_kept = 1.0 - momentum;
                set(
                    of.running[0],
                    channel,
                    momentum_kept * f64::from(running_mean.get(channel)) + momentum * mean,
                );
                set(
                    of.running[1],
                    channel,
                    momentum_kept * f64::from(running_var.get(channel))
                        + momentum * squares / (elements - 1.0),
                );
            }
            (mean, 1.0 / (variance + eps).sqrt())
        } else {
            (
                f64::from(running_mean.get(channel)),
                1.0 / (f64::from(running_var.get(channel)) + eps).sqrt(),
            )
        };
        set(save_mean, channel, mean);
        set(save_invstd, channel, invstd);
        let (mean, scale, shift) =
            (mean as f32, (invstd * f64::from(weight.get(channel))) as f32, bias.get(channel));
        let into = base(out).wrapping_add(channel * out.stride[1]);
        let one = |x: f32| (x - mean) * scale + shift;
        runs(&shape, [&steps, &out_steps], |[from, to], [from_step, to_step], length| {
            let (from, to) = (start.wrapping_add(from), into.wrapping_add(to));
            if (from_step, to_step) == (1, 1) {
                // SAFETY: runs stay inside the views; `result` checked that the output is apart
                // from the input.
                let (from, to) = unsafe {
                    (
                        std::slice::from_raw_parts(from, length),
                        std::slice::from_raw_parts_mut(to, length),
                    )
                };
                for (to, &from) in to.iter_mut().zip(from) {
                    *to = one(from);
                }
            } else {
                for i in 0..length {
                    // SAFETY: as above, element by element.
                    unsafe {
                        *to.wrapping_add(i * to_step) = one(*from.wrapping_add(i * from_step))
                    };
                }
            }
        });
    }
    Ok(())
}

/// The mean of one channel and the sum of the squared distances from it.
fn moments(start: *const f32, shape: &[usize], steps: &[usize], elements: f64) -> (f64, f64) {
    let mut sum = 0.0;
    runs(shape, [steps], |[at], [step], length| {
        // SAFETY: runs stay inside the channel.
        sum += unsafe { total(start.wrapping_add(at), step, length) }
    });
    let mean = sum / elements;
    let mut squares = 0.0;
    runs(shape, [steps], |[at], [step], length| {
        let at = start.wrapping_add(at);
        // SAFETY: as above.
        squares += unsafe { sum_of(at, at, [step; 2], length, mean, mean) };
    });
    (mean, squares)
}

/// The sum of `(a - a0) * (b - b0)` in double precision and a fixed order.
///
/// # Safety
/// Both runs lie inside live memory that no thread writes.
unsafe fn sum_of(
    a: *const f32,
    b: *const f32,
    [a_step, b_step]: [usize; 2],
    length: usize,
    a0: f64,
    b0: f64,
) -> f64 {
    let term = |a: f32, b: f32| (f64::from(a) - a0) * (f64::from(b) - b0);
    if (a_step, b_step) != (1, 1) {
        // SAFETY: the caller's promise.
        return (0..length)
            .map(|i| unsafe { term(*a.wrapping_add(i * a_step), *b.wrapping_add(i * b_step)) })
            .sum();
    }
    // SAFETY: the caller's promise.
    let (a, b) =
        unsafe { (std::slice::from_raw_parts(a, length), std::slice::from_raw_parts(b, length)) };
    let mut lanes = [0.0f64; 8];
    let (a_chunks, b_chunks) = (a.chunks_exact(8), b.chunks_exact(8));
    let rest: f64 =
        a_chunks.remainder().iter().zip(b_chunks.remainder()).map(|(&a, &b)| term(a, b)).sum();
    for (a, b) in a_chunks.zip(b_chunks) {
        for i in 0..8 {
            lanes[i] += term(a[i], b[i]);
        }
    }
    lanes.iter().sum::<f64>() + rest
}

fn backward(call: &Call<'_>, of: &BatchNormBackward<'_>) -> Result<(), KernelError> {
    f32_operands(call)?;
    let BatchNormBackward { x, gradient, channels: count, results: [dx, dw, db], .. } = *of;
    let weight = PerChannel { view: of.weight, otherwise: 1.0 };
    let [means, scales] =
        [of.mean, of.scale].map(|view| PerChannel { view: Some(view), otherwise: 0.0 });
    let (shape, steps, gradient_steps) = (
        without_channels(&x.shape),
        without_channels(&x.stride),
        without_channels(&gradient.stride),
    );
    let elements = shape.iter().product::<usize>() as f64;
    for channel in 0..count {
        let (xs, gs) = (
            base(x).wrapping_add(channel * x.stride[1]),
            base(gradient).wrapping_add(channel * gradient.stride[1]),
        );
        let mean = f64::from(means.get(channel));
        let scale = f64::from(scales.get(channel));
        let invstd = if of.training { scale } else { 1.0 / (scale + of.eps).sqrt() };
        let (mut sum, mut product) = (0.0, 0.0);
        runs(&shape, [&steps, &gradient_steps], |[x, g], [x_step, g_step], length| {
            let (x, g) = (xs.wrapping_add(x), gs.wrapping_add(g));
            // SAFETY: runs stay inside the views.
            unsafe {
                sum += total(g, g_step, length);
                product += sum_of(x, g, [x_step, g_step], length, mean, 0.0);
            }
        });
        set(dw, channel, product * invstd);
        set(db, channel, sum);
        let Some(dx) = dx else { continue };
        let slope = (invstd * f64::from(weight.get(channel))) as f32;
        let (level, tilt) = if of.training {
            ((sum / elements) as f32, (product * invstd * invstd / elements) as f32)
        } else {
            (0.0, 0.0)
        };
        let mean = mean as f32;
        let one = |x: f32, g: f32| (g - level - (x - mean) * tilt) * slope;
        let (ds, dx_steps) =
            (base(dx).wrapping_add(channel * dx.stride[1]), without_channels(&dx.stride));
        runs(
            &shape,
            [&steps, &gradient_steps, &dx_steps],
            |[x, g, d], [x_step, g_step, d_step], length| {
                let (x, g, d) = (xs.wrapping_add(x), gs.wrapping_add(g), ds.wrapping_add(d));
                if (x_step, g_step, d_step) == (1, 1, 1) {
                    // SAFETY: runs stay inside the views; `writable` checked that the output is
                    // apart from the inputs.
                    let (x, g) = unsafe {
                        (
                            std::slice::from_raw_parts(x, length),
                            std::slice::from_raw_parts(g, length),
                        )
                    };
                    // SAFETY: as above.
                    let d = unsafe { std::slice::from_raw_parts_mut(d, length) };
                    for ((d, &x), &g) in d.iter_mut().zip(x).zip(g) {
                        *d = one(x, g);
                    }
                } else {
                    for i in 0..length {
                        // SAFETY: as above, element by element.
                        unsafe {
                            *d.wrapping_add(i * d_step) =
                                one(*x.wrapping_add(i * x_step), *g.wrapping_add(i * g_step))
                        };
                    }
                }
            },
        );
    }
    Ok(())
}
