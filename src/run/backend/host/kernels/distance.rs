//! Losses that compare two tensors element by element, and their gradients.
//!
//! Sums are kept in double precision.

use crate::backend::operators::KernelError;
use crate::backend::operators::arguments::{
    Input, flag, floating, maybe_real, number_or, output, real, tensor,
};
use crate::backend::operators::error::{data_error, invalid};
use crate::backend::operators::index::whole;
use crate::backend::operators::loss::{Reduction, reduction};
use crate::backend::operators::shapes::{broadcast, count, each, same_shape};
use crate::backend::operators::view::{Call, View};
use crate::backend::operators::{Table, table};

use super::Kernel;
use super::elements::{map2, map3, read, read_int, write};

pub const TABLE: Table<Kernel> = table! {
    "mse_loss" => |c| loss(c, 2, |a, b| (a - b) * (a - b)),
    "mse_loss_backward" => |c| gradient(c, 3, |a, b| 2.0 * (a - b)),
    "l1_loss" => |c| loss(c, 2, |a, b| (a - b).abs()),
    "smooth_l1_loss" => |c| {
        let beta = number_or(c, 3, 1.0)? as f32;
        loss(c, 2, |a, b| {
            let z = (a - b).abs();
            if z < beta { 0.5 * z * z / beta } else { z - 0.5 * beta }
        })
    },
    "smooth_l1_loss_backward" => |c| {
        let beta = number_or(c, 4, 1.0)? as f32;
        gradient(c, 3, |a, b| {
            let x = a - b;
            if x <= -beta { -1.0 } else if x >= beta { 1.0 } else { x / beta }
        })
    },
    "huber_loss" => |c| {
        let delta = number_or(c, 3, 1.0)? as f32;
        loss(c, 2, |a, b| {
            let z = (a - b).abs();
            if z < delta { 0.5 * z * z } else { delta * (z - 0.5 * delta) }
        })
    },
    "huber_loss_backward" => |c| {
        let delta = number_or(c, 4, 1.0)? as f32;
        gradient(c, 3, |a, b| (a - b).clamp(-delta, delta))
    },
    "kl_div" => |c| {
        if flag(c, 3)? {
            loss(c, 2, |x, t| t.exp() * (t - x))
        } else {
            loss(c, 2, |x, t| if t > 0.0 { t * (t.ln() - x) } else { 0.0 })
        }
    },
    "binary_cross_entropy" => |c| {
        weighted(c, 3, |_, x, t| {
            // The logarithms stop at -100, as PyTorch's do.
            (t - 1.0) * (-x).ln_1p().max(-100.0) - t * x.ln().max(-100.0)
        })
    },
    "multi_margin_loss" => |c| margins(c, false),
    "multi_margin_loss_backward" => |c| margins(c, true),
    "binary_cross_entropy_backward" => binary_cross_entropy_backward,
    "binary_cross_entropy_with_logits" => |c| {
        weighted(c, 4, |positive, x, t| {
            let softplus = (-x.abs()).exp().ln_1p() + (-x).max(0.0);
            (1.0 - t) * x + (1.0 + (positive - 1.0) * t) * softplus
        })
    },
};

/// The loss of two tensors of one shape; the reduction is argument `at`.
fn loss(call: &Call<'_>, at: usize, f: impl Fn(f32, f32) -> f32) -> Result<(), KernelError> {
    let (out, a, b) = (floating(output(call)?)?, real(call, 0)?, real(call, 1)?);
    same_shape(a, b)?;
    let how = reduction(call, at)?;
    if how == Reduction::None {
        return map2::<f32>(out, &Input::View(a), &Input::View(b), f);
    }
    let mut sum = 0.0;
    each(&a.shape, &[&a.stride, &b.stride], |[x, y]| {
        sum += f64::from(f(read(a, x) as f32, read(b, y) as f32));
    });
    reduced(out, how, sum, count(a));
    Ok(())
}

fn reduced(out: &View, how: Reduction, sum: f64, elements: usize) {
    let divisor = if how == Reduction::Mean { elements as f64 } else { 1.0 };
    write(out, 0, (sum / divisor) as f32);
}

/// `slope(a, b)` times the gradient, over the elements where the loss was their mean.
fn gradient(
    call: &Call<'_>,
    at: usize,
    slope: impl Fn(f32, f32) -> f32,
) -> Result<(), KernelError> {
    let (out, grad, a, b) =
        (floating(output(call)?)?, real(call, 0)?, real(call, 1)?, real(call, 2)?);
    let norm = mean_factor(call, at, a)?;
    map3::<f32>(out, &Input::View(grad), &Input::View(a), &Input::View(b), |g, a, b| {
        norm * slope(a, b) * g
    })
}

fn mean_factor(call: &Call<'_>, at: usize, of: &View) -> Result<f32, KernelError> {
    Ok(if reduction(call, at)? == Reduction::Mean { 1.0 / count(of) as f32 } else { 1.0 })
}

/// A loss of scores and targets with optional weights in argument 2 and, before the reduction in
/// argument `at`, of positive ones in argument 3: `f(positive weight, score, target)`.
fn weighted(
    call: &Call<'_>,
    at: usize,
    f: impl Fn(f32, f32, f32) -> f32,
) -> Result<(), KernelError> {
    let (out, a, b) = (floating(output(call)?)?, real(call, 0)?, real(call, 1)?);
    same_shape(a, b)?;
    let how = reduction(call, at)?;
    let weight = maybe_real(call, 2)?;
    let positive = if at > 3 { maybe_real(call, 3)? } else { None };
    let steps = |view: Option<&View>| {
        view.map_or(Ok(vec![0; a.shape.len()]), |view| broadcast(view, &a.shape))
    };
    let value = |view: Option<&View>, at: usize| view.map_or(1.0, |view| read(view, at) as f32);
    let to = if how == Reduction::None {
        same_shape(out, a)?;
        out.stride.clone()
    } else {
        vec![0; a.shape.len()]
    };
    let mut sum = 0.0;
    let strides = [to, a.stride.clone(), b.stride.clone(), steps(weight)?, steps(positive)?];
    each(&a.shape, &strides, |[to, x, t, w, p]| {
        let (x, t) = (read(a, x) as f32, read(b, t) as f32);
        let loss = f(value(positive, p), x, t) * value(weight, w);
        sum += f64::from(loss);
        if how == Reduction::None {
            write(out, to, loss);
        }
    });
    if how != Reduction::None {
        reduced(out, how, sum, count(a));
    }
    Ok(())
}

/// `(scores, targets, p, margin, weights, reduction)`, with the gradient before them backward: by
/// how much each other class comes nearer to the target's score than the margin.
fn margins(call: &Call<'_>, backward: bool) -> Result<(), KernelError> {
    let at = usize::from(backward);
    let (scores, targets) = (real(call, at)?, whole(tensor(call, at + 1)?)?);
    let (power, margin) = (number_or(call, at + 2, 1.0)?, number_or(call, at + 3, 1.0)?);
    let (weights, how) = (maybe_real(call, at + 4)?, reduction(call, at + 5)?);
    let out = floating(output(call)?)?;
    let (&[n, classes], &[n_too]) = (&scores.shape[..], &targets.shape[..]) else {
        return Err(invalid!("margins of {:?} for {:?}", scores.shape, targets.shape));
    };
    let shape = if backward {
        &scores.shape[..]
    } else if how == Reduction::None {
        &[n][..]
    } else {
        &[]
    };
    if n != n_too || classes == 0 || out.shape != shape {
        return Err(invalid!("margins of {:?} for {:?}", scores.shape, targets.shape));
    }
    let share = 1.0 / classes as f64 / if how == Reduction::Mean { n as f64 } else { 1.0 };
    let mut sum = 0.0;
    for i in 0..n {
        let class = read_int(targets, i * targets.stride[0]);
        let target = usize::try_from(class).ok().filter(|&c| c < classes);
        let target = target.ok_or_else(|| data_error!("target {class} is not one of {classes}"))?;
        let score = |c: usize| read(scores, i * scores.stride[0] + c * scores.stride[1]);
        let weight = weights.map_or(1.0, |w| read(w, target * w.stride[0]));
        let over = |c: usize| (margin - score(target) + score(c)).max(0.0);
        let others = (0..classes).filter(|&c| c != target);
        if backward {
            let grad = real(call, 0)?;
            let step = if how == Reduction::None { grad.stride[0] } else { 0 };
            let factor = read(grad, i * step) * weight * share;
            let slope = |c: usize| match over(c) {
                0.0 => 0.0,
                z => factor * power * z.powf(power - 1.0),
            };
            let total: f64 = others.map(slope).sum();
            for c in 0..classes {
                let value = if c == target { -total } else { slope(c) };
                write(out, i * out.stride[0] + c * out.stride[1], value as f32);
            }
        } else {
            let loss = share * weight * others.map(|c| over(c).powf(power)).sum::<f64>();
            sum += loss;
            if how == Reduction::None {
                write(out, i * out.stride[0], loss as f32);
            }
        }
    }
    if !backward && how != Reduction::None {
        write(out, 0, sum as f32);
    }
    Ok(())
}

fn binary_cross_entropy_backward(call: &Call<'_>) -> Result<(), KernelError> {
    let (out, grad, x, t) =
        (floating(output(call)?)?, real(call, 0)?, real(call, 1)?, real(call, 2)?);
    let norm = mean_factor(call, 4, x)?;
    map3::<f32>(out, &Input::View(grad), &Input::View(x), &Input::View(t), |g, x, t| {
        norm * g * (x - t) / ((1.0 - x) * x).max(1e-12)
    })?;
    match maybe_real(call, 3)? {
        None => Ok(()),
        Some(weight) => map2::<f32>(out, &Input::View(out), &Input::View(weight), |g, w| g * w),
    }
}
