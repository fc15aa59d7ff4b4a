//! One optimizer step of one parameter: SGD, Adam, AdamW, RMSprop and Adagrad.
//!
//! Arguments are the parameter, its gradient and its states, in the order in which PyTorch makes them. The
//! arithmetic is that of PyTorch's multi-tensor steps: scalars in double precision, rounded to f32 where they
//! meet a tensor, and f32 in the same order. Not for: recorded multi-tensor calls ([`super::foreach`]).

use super::super::view::Call;
use super::Kernel;
use super::strided::{base, once, runs, same, same_shape, tensor};

/// The kernel for a kind, if it is one of this file's.
pub fn find(kind: &str) -> Option<Kernel> {
    Some(match kind {
        "neap::sgd" => sgd,
        "neap::adam" => |call| adam(call, false),
        "neap::adamw" => |call| adam(call, true),
        "neap::rmsprop" => rmsprop,
        "neap::adagrad" => adagrad,
        _ => return None,
    })
}

/// A hyperparameter that the update can't do without.
fn needed(call: &Call<'_>, name: &str) -> Result<f64, String> {
    let group = call
        .optimizer
        .ok_or_else(|| format!("{} needs the job's optimizer", call.operator.kind))?;
    group
        .value(name, call.steps_done)
        .ok_or_else(|| format!("{} needs the hyperparameter `{name}`", call.operator.kind))
}

/// A hyperparameter whose absence means that the feature is off.
fn optional(call: &Call<'_>, name: &str) -> f64 {
    call.optimizer.and_then(|group| group.value(name, 0)).unwrap_or(0.0)
}

#[expect(clippy::cast_precision_loss, reason = "steps are far below 2^52")]
fn step(call: &Call<'_>) -> f64 {
    (call.steps_done + 1) as f64
}

/// Applies `update(parameter, gradient, states)` to every element.
fn each<const S: usize>(
    call: &Call<'_>,
    update: impl Fn(f32, f32, [f32; S]) -> (f32, [f32; S]),
) -> Result<(), String> {
    let kind = &call.operator.kind;
    if call.args.len() != S + 2 {
        return Err(format!(
            "{kind} needs a parameter, a gradient and {S} states, not {} arguments",
            call.args.len()
        ));
    }
    let (parameter, gradient) = (tensor(call, 0, "parameter")?, tensor(call, 1, "gradient")?);
    let mut states = [parameter; S];
    for (at, state) in states.iter_mut().enumerate() {
        *state = tensor(call, at + 2, "state")?;
    }
    same_shape(call, "the gradient", gradient, &parameter.shape)?;
    for (at, view) in std::iter::once(parameter).chain(states).enumerate() {
        same_shape(call, "a state", view, &parameter.shape)?;
        let declared =
            call.outputs.iter().flatten().chain(call.hidden).any(|written| same(written, view));
        let shared = same(view, gradient) || states[at..].iter().any(|other| same(view, other));
        if !declared || shared || !once(view) {
            return Err(format!(
                "{kind} cannot update argument {}: the graph must say that it is written, and share none of it",
                if at == 0 { 0 } else { at + 1 }
            ));
        }
    }
    let (p, g, s) = (base(parameter), base(gradient), states.map(base));
    let strides = [&parameter.stride[..], &gradient.stride[..]];
    let one = |p: *mut f32, g: *mut f32, s: [*mut f32; S]| {
        // SAFETY: the addresses are those of one element of each view; every one written is its own.
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

/// The gradient as the update sees it: negated to maximise, with L2 decay added.
#[expect(
    clippy::cast_possible_truncation,
    reason = "scalars are rounded to f32 where they meet a tensor"
)]
fn decayed(call: &Call<'_>, decay: f64) -> impl Fn(f32, f32) -> f32 + use<> {
    let (maximize, decays, decay) = (optional(call, "maximize") != 0.0, decay != 0.0, decay as f32);
    move |p, g| {
        let g = if maximize { -g } else { g };
        if decays { g + decay * p } else { g }
    }
}

/// `a + weight * (b - a)`, from the nearer end.
pub fn lerp(a: f32, b: f32, weight: f32) -> f32 {
    if weight.abs() < 0.5 { a + weight * (b - a) } else { b - (b - a) * (1.0 - weight) }
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "scalars are rounded to f32 where they meet a tensor"
)]
fn sgd(call: &Call<'_>) -> Result<(), String> {
    let minus_lr = -needed(call, "lr")? as f32;
    let gradient = decayed(call, optional(call, "weight_decay"));
    let momentum = optional(call, "momentum");
    if momentum == 0.0 {
        return each(call, |p, g, []: [f32; 0]| (p + minus_lr * gradient(p, g), []));
    }
    let (momentum, fresh) = (momentum as f32, (1.0 - optional(call, "dampening")) as f32);
    let (first, nesterov) = (call.steps_done == 0, optional(call, "nesterov") != 0.0);
    each(call, |p, g, [buffer]| {
        let g = gradient(p, g);
        let buffer = if first { g } else { buffer * momentum + fresh * g };
        let step = if nesterov { g + momentum * buffer } else { buffer };
        (p + minus_lr * step, [buffer])
    })
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "scalars are rounded to f32 where they meet a tensor"
)]
fn adam(call: &Call<'_>, decoupled: bool) -> Result<(), String> {
    let (lr, beta1, beta2, eps) = (
        needed(call, "lr")?,
        needed(call, "beta1")?,
        needed(call, "beta2")?,
        needed(call, "eps")? as f32,
    );
    let decay = optional(call, "weight_decay");
    let decoupled = decoupled || optional(call, "decoupled_weight_decay") != 0.0;
    let gradient = decayed(call, if decoupled { 0.0 } else { decay });
    let shrinks = decoupled && decay != 0.0;
    let shrink = (1.0 - lr * decay) as f32;
    let (weight1, keep2, weight2) = ((1.0 - beta1) as f32, beta2 as f32, (1.0 - beta2) as f32);
    let step_size = -(lr / (1.0 - beta1.powf(step(call)))) as f32;
    let correction = (1.0 - beta2.powf(step(call))).sqrt() as f32;
    let moments = |p: f32, g: f32, mean: f32, square: f32| {
        let g = gradient(p, g);
        let p = if shrinks { p * shrink } else { p };
        (p, lerp(mean, g, weight1), square * keep2 + weight2 * g * g)
    };
    let moved =
        |p: f32, mean: f32, square: f32| p + step_size * mean / (square.sqrt() / correction + eps);
    if optional(call, "amsgrad") != 0.0 {
        return each(call, |p, g, [mean, square, highest]| {
            let (p, mean, square) = moments(p, g, mean, square);
            // As `torch.maximum`: NaN wins.
            let highest = if square > highest || square.is_nan() { square } else { highest };
            (moved(p, mean, highest), [mean, square, highest])
        });
    }
    each(call, |p, g, [mean, square]| {
        let (p, mean, square) = moments(p, g, mean, square);
        (moved(p, mean, square), [mean, square])
    })
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "scalars are rounded to f32 where they meet a tensor"
)]
fn rmsprop(call: &Call<'_>) -> Result<(), String> {
    let (lr, alpha, eps) =
        (needed(call, "lr")?, needed(call, "alpha")?, needed(call, "eps")? as f32);
    let gradient = decayed(call, optional(call, "weight_decay"));
    let (keep, weight, minus_lr) = (alpha as f32, (1.0 - alpha) as f32, -lr as f32);
    let momentum = optional(call, "momentum");
    let (with_momentum, centered) = (momentum > 0.0, optional(call, "centered") != 0.0);
    let momentum = momentum as f32;
    let squared = |square: f32, g: f32| square * keep + weight * g * g;
    let spread = |square: f32| square.sqrt() + eps;
    let centre = |average: f32, g: f32, square: f32| {
        let average = lerp(average, g, weight);
        (average, spread(square - average * average))
    };
    match (with_momentum, centered) {
        (false, false) => each(call, |p, g, [square]| {
            let g = gradient(p, g);
            let square = squared(square, g);
            (p + minus_lr * g / spread(square), [square])
        }),
        (false, true) => each(call, |p, g, [square, average]| {
            let g = gradient(p, g);
            let square = squared(square, g);
            let (average, spread) = centre(average, g, square);
            (p + minus_lr * g / spread, [square, average])
        }),
        (true, false) => each(call, |p, g, [square, buffer]| {
            let g = gradient(p, g);
            let square = squared(square, g);
            let buffer = buffer * momentum + g / spread(square);
            (p + minus_lr * buffer, [square, buffer])
        }),
        (true, true) => each(call, |p, g, [square, buffer, average]| {
            let g = gradient(p, g);
            let square = squared(square, g);
            let (average, spread) = centre(average, g, square);
            let buffer = buffer * momentum + g / spread;
            (p + minus_lr * buffer, [square, buffer, average])
        }),
    }
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "scalars are rounded to f32 where they meet a tensor"
)]
fn adagrad(call: &Call<'_>) -> Result<(), String> {
    let (lr, eps) = (needed(call, "lr")?, needed(call, "eps")? as f32);
    let gradient = decayed(call, optional(call, "weight_decay"));
    let minus_rate = -(lr / (1.0 + (step(call) - 1.0) * optional(call, "lr_decay"))) as f32;
    each(call, |p, g, [sum]| {
        let g = gradient(p, g);
        let sum = sum + g * g;
        (p + g * minus_rate / (sum.sqrt() + eps), [sum])
    })
}
