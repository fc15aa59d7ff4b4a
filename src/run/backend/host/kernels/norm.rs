//! Batch normalisation, forward and backward, under all the names it is recorded by.
//!
//! Statistics are summed in double precision in a fixed order; the mean first, then the squared distances
//! from it. Not for: layer normalisation.

use super::super::view::{Call, View};
use super::Kernel;
use super::conv::total;
use super::strided::{
    base, distinct, f32_only, flag, float, mask, optional, output, result, runs, same, same_shape,
    tensor, writable,
};

/// The kernel for a kind, if it is one of this file's.
pub fn find(kind: &str) -> Option<Kernel> {
    Some(match kind {
        "aten::batch_norm"
        | "aten::_batch_norm_impl_index"
        | "aten::cudnn_batch_norm"
        | "aten::native_batch_norm" => forward,
        "aten::cudnn_batch_norm_backward" => |call| {
            let eps = float(call, 7)?;
            backward(
                call,
                &Backward {
                    input: 0,
                    gradient: 1,
                    weight: 2,
                    running: [3, 4],
                    saved: [5, 6],
                    training: true,
                    eps,
                    wanted: [true; 3],
                },
            )
        },
        "aten::native_batch_norm_backward" => |call| {
            let (training, eps, wanted) = (flag(call, 7)?, float(call, 8)?, mask(call, 9)?);
            backward(
                call,
                &Backward {
                    gradient: 0,
                    input: 1,
                    weight: 2,
                    running: [3, 4],
                    saved: [5, 6],
                    training,
                    eps,
                    wanted,
                },
            )
        },
        _ => return None,
    })
}

/// One value per channel, or what stands for it where the tensor is undefined.
#[derive(Clone, Copy)]
struct PerChannel<'a> {
    view: Option<&'a View>,
    otherwise: f32,
}

impl<'a> PerChannel<'a> {
    fn new(
        call: &Call<'a>,
        at: usize,
        name: &str,
        channels: usize,
        otherwise: f32,
    ) -> Result<Self, String> {
        let view = optional(call, at)?;
        if let Some(view) = view {
            same_shape(call, name, view, &[channels])?;
        }
        Ok(Self { view, otherwise })
    }

    fn get(&self, channel: usize) -> f32 {
        // SAFETY: the view has one element for each channel, checked in `new`.
        self.view.map_or(self.otherwise, |view| unsafe {
            *base(view).wrapping_add(channel * view.stride[0])
        })
    }
}

fn set(view: Option<&View>, channel: usize, value: f64) {
    if let Some(view) = view {
        #[expect(clippy::cast_possible_truncation, reason = "rounded once, to what is stored")]
        // SAFETY: callers checked that the view has one element for each channel and is nobody else's.
        unsafe {
            *base(view).wrapping_add(channel * view.stride[0]) = value as f32;
        }
    }
}

/// Number of channels of a batch.
///
/// # Errors
/// When it has no dimension for them.
pub fn channels(call: &Call<'_>, view: &View) -> Result<usize, String> {
    view.shape.get(1).copied().ok_or_else(|| {
        format!("{} needs at least two dimensions, not {:?}", call.operator.kind, view.shape)
    })
}

fn without_channels(of: &[usize]) -> Vec<usize> {
    of.iter().take(1).chain(&of[2..]).copied().collect()
}

/// Where a long-lived statistic is written: the argument's own elements, if the operator declares that it writes them.
fn statistic<'a>(call: &Call<'a>, at: usize, channels: usize) -> Result<Option<&'a View>, String> {
    let Some(view) = optional(call, at)? else { return Ok(None) };
    same_shape(call, "its running statistic", view, &[channels])?;
    if call.outputs.iter().flatten().chain(call.hidden).any(|written| same(written, view)) {
        Ok(Some(view))
    } else {
        Err(format!(
            "{} updates its running statistics, but the graph does not say that they are written",
            call.operator.kind
        ))
    }
}

/// An output with one element per channel; `None` where undefined or empty.
fn saved<'a>(call: &Call<'a>, at: usize, channels: usize) -> Result<Option<&'a View>, String> {
    // `batch_norm` declares one output: what it saves is hidden, before the running statistics.
    let view = output(call, at).filter(|view| view.shape == [channels] && channels > 0);
    let running = (3..5).filter_map(|at| match call.args.get(at) {
        Some(super::super::view::Operand::Tensor(view)) => Some(view),
        _ => None,
    });
    match view {
        Some(view) if !running.into_iter().any(|argument| same(argument, view)) => {
            distinct(call, f32_only(call, view)?).map(Some)
        }
        _ => Ok(None),
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "statistics are rounded once, to f32; counts are far below 2^52"
)]
fn forward(call: &Call<'_>) -> Result<(), String> {
    let x = tensor(call, 0, "input")?;
    let count = channels(call, x)?;
    let out = result(call, 0, &x.shape)?;
    let (weight, bias) = (
        PerChannel::new(call, 1, "weight", count, 1.0)?,
        PerChannel::new(call, 2, "bias", count, 0.0)?,
    );
    let (training, momentum, eps) = (flag(call, 5)?, float(call, 6)?, float(call, 7)?);
    let (running_mean, running_var) = (
        PerChannel::new(call, 3, "running_mean", count, 0.0)?,
        PerChannel::new(call, 4, "running_var", count, 1.0)?,
    );
    if !training && (running_mean.view.is_none() || running_var.view.is_none()) {
        return Err(format!(
            "{} needs running statistics when it is not training",
            call.operator.kind
        ));
    }
    let update = training && !call.replay;
    let updated = if update {
        [statistic(call, 3, count)?, statistic(call, 4, count)?]
    } else {
        [None, None]
    };
    let (save_mean, save_invstd) = (saved(call, 1, count)?, saved(call, 2, count)?);
    let (shape, steps, out_steps) =
        (without_channels(&x.shape), without_channels(&x.stride), without_channels(&out.stride));
    let elements = shape.iter().product::<usize>() as f64;
    for channel in 0..count {
        let start = base(x).wrapping_add(channel * x.stride[1]);
        let (mean, invstd) = if training {
            let (mean, squares) = moments(start, &shape, &steps, elements);
            let variance = squares / elements;
            // A replay does not touch the running statistics, which need not even be there.
            if update {
                let momentum_kept = 1.0 - momentum;
                set(
                    updated[0],
                    channel,
                    momentum_kept * f64::from(running_mean.get(channel)) + momentum * mean,
                );
                set(
                    updated[1],
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
                // SAFETY: runs stay inside the views; `result` checked that the output is apart from the input.
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
    // SAFETY: runs stay inside the channel.
    runs(shape, [steps], |[at], [step], length| {
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
/// Both runs lie inside live memory that nobody writes.
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

/// Where a backward variant has its arguments.
struct Backward {
    input: usize,
    gradient: usize,
    weight: usize,
    running: [usize; 2],
    saved: [usize; 2],
    training: bool,
    eps: f64,
    wanted: [bool; 3],
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "statistics are rounded once, to f32; counts are far below 2^52"
)]
fn backward(call: &Call<'_>, of: &Backward) -> Result<(), String> {
    let (x, gradient) =
        (tensor(call, of.input, "input")?, tensor(call, of.gradient, "grad_output")?);
    let count = channels(call, x)?;
    same_shape(call, "its output gradient", gradient, &x.shape)?;
    let weight = PerChannel::new(call, of.weight, "weight", count, 1.0)?;
    let [mean_at, scale_at] = if of.training { of.saved } else { of.running };
    let (means, scales) = (
        PerChannel::new(call, mean_at, "mean", count, 0.0)?,
        PerChannel::new(call, scale_at, "deviation", count, 1.0)?,
    );
    if means.view.is_none() || scales.view.is_none() {
        return Err(format!(
            "{} needs the mean and deviation of its forward operator",
            call.operator.kind
        ));
    }
    let into = |at: usize, shape: &[usize]| -> Result<Option<&View>, String> {
        let Some(view) = writable(call, at)?.filter(|_| of.wanted[at]) else { return Ok(None) };
        same_shape(call, "its output", view, shape)?;
        Ok(Some(view))
    };
    let (dx, dw, db) = (into(0, &x.shape)?, into(1, &[count])?, into(2, &[count])?);
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
                    // SAFETY: runs stay inside the views; `writable` checked that the output is apart from the inputs.
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
