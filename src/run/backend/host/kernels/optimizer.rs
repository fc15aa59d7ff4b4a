//! One optimizer step of one parameter, for every optimizer that has a [`Rule`].
//!
//! The arithmetic is in f32, in the order of PyTorch's multi-tensor steps.

use crate::backend::operators::KernelError;
use crate::backend::operators::error::invalid;
use crate::backend::operators::optimizer::{Moments, Momentum, Rule, Step, kinds};
use crate::backend::operators::view::Call;
use crate::job::{Arg, Dtype};

use super::strided::{base, f32_operands, runs};
use super::{Kernel, half};

/// The kernel for a kind, if it is one of this file's.
pub fn find(kind: &str) -> Option<Kernel> {
    kinds().any(|known| known == kind).then_some(step as Kernel)
}

/// Applies `update(parameter, gradient, states)` to every element.
fn each<const S: usize>(
    call: &Call<'_>,
    of: &Step,
    update: impl Fn(f32, f32, [f32; S]) -> (f32, [f32; S]),
) -> Result<(), KernelError> {
    f32_operands(call)?;
    let views = of.views(call)?;
    let [parameter, gradient] = [&views[0], &views[1]];
    if views.len() != S + 2 {
        return Err(invalid!("its rule has {} states and its kernel {S}", views.len() - 2));
    }
    let states: [_; S] = std::array::from_fn(|at| &views[at + 2]);
    let (p, g, s) = (base(parameter), base(gradient), states.map(base));
    let strides = [&parameter.stride[..], &gradient.stride[..]];
    let one = |p: *mut f32, g: *mut f32, s: [*mut f32; S]| {
        // SAFETY: the addresses are those of one element of each view; every one written is its
        // own.
        unsafe {
            let (parameter, written) = update(*p, *g, s.map(|s| *s));
            *p = parameter;
            for (to, value) in s.into_iter().zip(written) {
                *to = value;
            }
        }
    };
    let dense = states.iter().all(|state| state.stride == parameter.stride)
        && gradient.stride == parameter.stride;
    if dense {
        // One walk serves all views, and the compiler sees steps of 1.
        runs(&parameter.shape, [strides[0]], |[at], [step], length| {
            if step == 1 {
                for i in at..at + length {
                    one(p.wrapping_add(i), g.wrapping_add(i), s.map(|s| s.wrapping_add(i)));
                }
            } else {
                for i in (0..length).map(|i| at + i * step) {
                    one(p.wrapping_add(i), g.wrapping_add(i), s.map(|s| s.wrapping_add(i)));
                }
            }
        });
        return Ok(());
    }
    // At most three states: what a state lacks is walked as the parameter.
    let of = |at: usize| states.get(at).map_or(strides[0], |state| &state.stride);
    runs(&parameter.shape, [strides[0], strides[1], of(0), of(1), of(2)], |at, steps, length| {
        for i in 0..length {
            let places: [*mut f32; S] =
                std::array::from_fn(|k| s[k].wrapping_add(at[k + 2] + i * steps[k + 2]));
            one(p.wrapping_add(at[0] + i * steps[0]), g.wrapping_add(at[1] + i * steps[1]), places);
        }
    });
    Ok(())
}

/// `a + weight * (b - a)`, from the nearer end.
pub fn lerp(a: f32, b: f32, weight: f32) -> f32 {
    if weight.abs() < 0.5 { a + weight * (b - a) } else { b - (b - a) * (1.0 - weight) }
}

/// What one operation of PyTorch's step makes of its result: parameters of bf16 and f16 are stepped
/// in their own type, rounded after each operation. The fused steps compute in f32.
fn step(call: &Call<'_>) -> Result<(), KernelError> {
    let fused = call.optimizer.is_some_and(|group| group.on("fused"));
    let dtype = match call.operator.args.first() {
        Some(Arg::Tensor(parameter)) if !fused => parameter.dtype,
        _ => Dtype::F32,
    };
    match dtype {
        Dtype::Bf16 => rounded(call, |x| half::from_bf16(half::to_bf16(x))),
        Dtype::F16 => rounded(call, |x| half::from_f16(half::to_f16(x))),
        _ => rounded(call, |x| x),
    }
}

fn rounded(call: &Call<'_>, r: impl Fn(f32) -> f32 + Copy) -> Result<(), KernelError> {
    let step = Step::new(&call.operator.kind, call.optimizer, call.steps_done)?;
    let gradient = move |p: f32, g: f32| {
        let g = if step.maximize { -g } else { g };
        step.decay.map_or(g, |decay| r(g + decay * p))
    };
    match step.rule {
        Rule::Sgd { minus_lr, momentum: None } => {
            each(call, &step, |p, g, []| (p + minus_lr * gradient(p, g), []))
        }
        Rule::Sgd { minus_lr, momentum: Some(Momentum { momentum, fresh, first, nesterov }) } => {
            each(call, &step, |p, g, [buffer]| {
                let g = gradient(p, g);
                let buffer = if first { g } else { r(r(buffer * momentum) + fresh * g) };
                let step = if nesterov { r(g + momentum * buffer) } else { buffer };
                (p + minus_lr * step, [buffer])
            })
        }
        Rule::Adam { .. } => adam(call, &step, gradient, r),
        Rule::Nadam { of, correction2, fresh, mean: share } => {
            each(call, &step, |p, g, [mean, square]| {
                let (p, g, mean, square) = moments(&of, p, gradient(p, g), mean, square);
                let root = (square / correction2).sqrt() + of.eps;
                (p + fresh * g / root + share * mean / root, [mean, square])
            })
        }
        Rule::Radam { of, step_size, rectified } => each(call, &step, |p, g, [mean, square]| {
            let (p, _, mean, square) = moments(&of, p, gradient(p, g), mean, square);
            let factor = rectified.map_or(1.0, |factor| factor / (square.sqrt() + of.eps));
            (p + step_size * mean * factor, [mean, square])
        }),
        Rule::Adamax { of, step_size } => each(call, &step, |p, g, [mean, norm]| {
            let g = gradient(p, g);
            let mean = lerp(mean, g, of.weight1);
            let (old, new) = (norm * of.keep2, g.abs() + of.eps);
            let norm = if old > new || old.is_nan() { old } else { new };
            (p + step_size * mean / norm, [mean, norm])
        }),
        Rule::Adadelta { keep, weight, minus_lr, eps } => {
            each(call, &step, |p, g, [square, moved]| {
                let g = gradient(p, g);
                let square = square * keep + weight * g * g;
                let delta = (moved + eps).sqrt() / (square + eps).sqrt() * g;
                (p + minus_lr * delta, [square, moved * keep + weight * delta * delta])
            })
        }
        Rule::Asgd { shrink, minus_rate, share } => each(call, &step, |p, g, [average]| {
            let g = gradient(p, g);
            let p = p * shrink + minus_rate * g;
            (p, [if share == 1.0 { p } else { average + (p - average) * share }])
        }),
        Rule::Rprop { factors, limits, start } => each(call, &step, |p, g, [before, size]| {
            let g = gradient(p, g);
            let turn = g * before;
            let factor = if turn > 0.0 {
                factors[1]
            } else if turn < 0.0 {
                factors[0]
            } else {
                1.0
            };
            let size = (start.unwrap_or(size) * factor).clamp(limits[0], limits[1]);
            let g = if turn < 0.0 { 0.0 } else { g };
            (p - super::pointwise::sign(g) * size, [g, size])
        }),
        Rule::RmsProp { .. } => rmsprop(call, &step, gradient),
        Rule::Adagrad { minus_rate, eps } => each(call, &step, |p, g, [sum]| {
            let g = gradient(p, g);
            let sum = sum + g * g;
            (p + g * minus_rate / (sum.sqrt() + eps), [sum])
        }),
    }
}

/// Parameter, gradient and moments of Adam's family after this gradient.
fn moments(of: &Moments, p: f32, g: f32, mean: f32, square: f32) -> (f32, f32, f32, f32) {
    let p = of.shrink.map_or(p, |shrink| p * shrink);
    (p, g, lerp(mean, g, of.weight1), square * of.keep2 + of.weight2 * g * g)
}

fn adam(
    call: &Call<'_>,
    step: &Step,
    gradient: impl Fn(f32, f32) -> f32 + Copy,
    r: impl Fn(f32) -> f32 + Copy,
) -> Result<(), KernelError> {
    let Rule::Adam { shrink, weight1, keep2, weight2, step_size, correction, eps, amsgrad } =
        step.rule
    else {
        return Ok(());
    };
    let moments = |p: f32, g: f32, mean: f32, square: f32| {
        let g = gradient(p, g);
        let p = shrink.map_or(p, |shrink| r(p * shrink));
        (p, r(lerp(mean, g, weight1)), r(r(square * keep2) + weight2 * g * g))
    };
    let moved = |p: f32, mean: f32, square: f32| {
        p + step_size * mean / r(r(r(square.sqrt()) / correction) + eps)
    };
    if amsgrad {
        return each(call, step, |p, g, [mean, square, highest]| {
            let (p, mean, square) = moments(p, g, mean, square);
            // As `torch.maximum`: NaN wins.
            let highest = if square > highest || square.is_nan() { square } else { highest };
            (moved(p, mean, highest), [mean, square, highest])
        });
    }
    each(call, step, |p, g, [mean, square]| {
        let (p, mean, square) = moments(p, g, mean, square);
        (moved(p, mean, square), [mean, square])
    })
}

fn rmsprop(
    call: &Call<'_>,
    step: &Step,
    gradient: impl Fn(f32, f32) -> f32 + Copy,
) -> Result<(), KernelError> {
    let Rule::RmsProp { keep, weight, minus_lr, momentum, eps, centered } = step.rule else {
        return Ok(());
    };
    let squared = |square: f32, g: f32| square * keep + weight * g * g;
    let spread = |square: f32| square.sqrt() + eps;
    let centre = |average: f32, g: f32, square: f32| {
        let average = lerp(average, g, weight);
        (average, spread(square - average * average))
    };
    match (momentum, centered) {
        (None, false) => each(call, step, |p, g, [square]| {
            let g = gradient(p, g);
            let square = squared(square, g);
            (p + minus_lr * g / spread(square), [square])
        }),
        (None, true) => each(call, step, |p, g, [square, average]| {
            let g = gradient(p, g);
            let square = squared(square, g);
            let (average, spread) = centre(average, g, square);
            (p + minus_lr * g / spread, [square, average])
        }),
        (Some(momentum), false) => each(call, step, |p, g, [square, buffer]| {
            let g = gradient(p, g);
            let square = squared(square, g);
            let buffer = buffer * momentum + g / spread(square);
            (p + minus_lr * buffer, [square, buffer])
        }),
        (Some(momentum), true) => each(call, step, |p, g, [square, buffer, average]| {
            let g = gradient(p, g);
            let square = squared(square, g);
            let (average, spread) = centre(average, g, square);
            let buffer = buffer * momentum + g / spread;
            (p + minus_lr * buffer, [square, buffer, average])
        }),
    }
}
