//! Activation functions and their gradients.
//!
//! Argument orders are the framework's, which differ: some gradients read the input, some the
//! output.

use super::Kernel;
use super::elements::{map1, map2, map3};
use super::math::{erf, exp, sigmoid, tanh};
use crate::backend::operators::arguments::{
    Input, flag, floating, input, int_or, number_or, output, real, result, text,
};
use crate::backend::operators::error::{invalid, unsupported};
use crate::backend::operators::shapes::{dimension, narrow};
use crate::backend::operators::view::{Call, View};
use crate::backend::operators::{KernelError, Table, table};

pub const TABLE: Table<Kernel> = table! {
    "relu" => |c| unary(c, |x| if x < 0.0 { 0.0 } else { x }),
    "relu6" => |c| unary(c, |x| clip(x, 0.0, 6.0)),
    "threshold_backward" => threshold_backward,
    "sigmoid" => |c| unary(c, sigmoid),
    "sigmoid_backward" => |c| gradient(c, |g, y| g * (1.0 - y) * y),
    "tanh_backward" => |c| gradient(c, |g, y| g * (1.0 - y * y)),
    "silu" => |c| unary(c, |x| x / (1.0 + exp(-x))),
    "silu_backward" => |c| {
            gradient(c, |g, x| {
                let s = sigmoid(x);
                g * (s * (1.0 + x * (1.0 - s)))
            })
        },
    "gelu" => gelu,
    "gelu_backward" => gelu_backward,
    "hardsigmoid" => |c| unary(c, |x| clip(x + 3.0, 0.0, 6.0) / 6.0),
    "hardsigmoid_backward" => {
            |c| gradient(c, |g, x| if x > -3.0 && x < 3.0 { g / 6.0 } else { 0.0 })
        },
    "hardswish" => |c| unary(c, |x| x * clip(x + 3.0, 0.0, 6.0) / 6.0),
    "hardswish_backward" => |c| {
            gradient(c, |g, x| {
                if x <= -3.0 {
                    0.0
                } else if x < 3.0 {
                    g * (x / 3.0 + 0.5)
                } else {
                    g
                }
            })
        },
    "hardtanh" => hardtanh,
    "hardtanh_backward" => hardtanh_backward,
    "leaky_relu" => leaky_relu,
    "leaky_relu_backward" => leaky_relu_backward,
    "elu" => elu,
    "softplus" => softplus,
    "log_sigmoid" | "log_sigmoid_forward" => |c| unary(c, log_sigmoid),
    "log_sigmoid_backward" => |c| gradient(c, |g, x| g * sigmoid(-x)),
    "softplus_backward" => |c| {
        let (beta, threshold) = (number_or(c, 2, 1.0)? as f32, number_or(c, 3, 20.0)? as f32);
        gradient(c, |g, x| if x * beta > threshold { g } else { g * sigmoid(x * beta) })
    },
    "elu_backward" => elu_backward,
    "mish" => |c| unary(c, |x| x * tanh(softplus_of(x))),
    "mish_backward" => |c| gradient(c, |g, x| {
        let t = tanh(softplus_of(x));
        g * (t + x * sigmoid(x) * (1.0 - t * t))
    }),
    "hardshrink" => |c| {
            let edge = number_or(c, 1, 0.5)? as f32;
            unary(c, |x| if x.abs() <= edge { 0.0 } else { x })
        },
    "softshrink" => |c| {
            let edge = number_or(c, 1, 0.5)? as f32;
            unary(c, |x| {
                if x > edge {
                    x - edge
                } else if x < -edge {
                    x + edge
                } else {
                    x * 0.0
                }
            })
        },
    "hardshrink_backward" | "softshrink_backward" => |c| {
            let edge = number_or(c, 2, 0.5)? as f32;
            gradient(c, |g, x| if x.abs() <= edge { 0.0 } else { g })
        },
    "celu" => |c| {
            let alpha = number_or(c, 1, 1.0)? as f32;
            unary(c, |x| if x > 0.0 { x } else { alpha * (x / alpha).exp_m1() })
        },
    "selu" => |c| {
            unary(c, |x| SELU_SCALE * if x > 0.0 { x } else { SELU_ALPHA * x.exp_m1() })
        },
    "prelu" | "_prelu_kernel" => prelu,
    "_prelu_kernel_backward" => prelu_backward,
    "glu" => glu,
    "glu_backward" => glu_backward,
};

/// The two constants of self-normalising networks (Klambauer et al., 2017).
const SELU_ALPHA: f32 = 1.673_263_2;
const SELU_SCALE: f32 = 1.050_701;
const SQRT_2_OVER_PI: f32 = 0.797_884_6;
const CUBIC: f32 = 0.044_715;

fn clip(x: f32, low: f32, high: f32) -> f32 {
    let x = if x < low { low } else { x };
    if x > high { high } else { x }
}

fn unary(call: &Call<'_>, f: impl Fn(f32) -> f32) -> Result<(), KernelError> {
    map1::<f32>(floating(output(call)?)?, &input(call, 0)?, f)
}

/// `f(gradient, saved)`, the arguments 0 and 1.
fn gradient(call: &Call<'_>, f: impl Fn(f32, f32) -> f32) -> Result<(), KernelError> {
    map2::<f32>(floating(output(call)?)?, &input(call, 0)?, &input(call, 1)?, f)
}

fn threshold_backward(call: &Call<'_>) -> Result<(), KernelError> {
    let threshold = number_or(call, 2, 0.0)? as f32;
    gradient(call, |g, x| if x <= threshold { 0.0 } else { g })
}

fn is_tanh(call: &Call<'_>, index: usize) -> Result<bool, KernelError> {
    match text(call, index) {
        "" | "none" => Ok(false),
        "tanh" => Ok(true),
        other => Err(unsupported!("the GELU approximation `{other}` is not known")),
    }
}

fn gelu(call: &Call<'_>) -> Result<(), KernelError> {
    if is_tanh(call, 1)? {
        unary(call, |x| 0.5 * x * (1.0 + tanh(SQRT_2_OVER_PI * (x + CUBIC * x * x * x))))
    } else {
        unary(call, |x| x * 0.5 * (1.0 + erf(x * std::f32::consts::FRAC_1_SQRT_2)))
    }
}

fn gelu_backward(call: &Call<'_>) -> Result<(), KernelError> {
    if is_tanh(call, 2)? {
        gradient(call, |g, x| {
            let t = tanh(SQRT_2_OVER_PI * (x + CUBIC * x * x * x));
            let inner = SQRT_2_OVER_PI * (1.0 + 3.0 * CUBIC * x * x);
            g * (0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner)
        })
    } else {
        // The normal density's factor is 1 / sqrt(2 pi).
        gradient(call, |g, x| {
            let cdf = 0.5 * (1.0 + erf(x * std::f32::consts::FRAC_1_SQRT_2));
            g * (cdf + x * 0.398_942_3 * exp(-0.5 * x * x))
        })
    }
}

fn hardtanh(call: &Call<'_>) -> Result<(), KernelError> {
    let (low, high) = (number_or(call, 1, -1.0)? as f32, number_or(call, 2, 1.0)? as f32);
    unary(call, |x| clip(x, low, high))
}

fn hardtanh_backward(call: &Call<'_>) -> Result<(), KernelError> {
    let (low, high) = (number_or(call, 2, -1.0)? as f32, number_or(call, 3, 1.0)? as f32);
    gradient(call, |g, x| if x <= low || x >= high { 0.0 } else { g })
}

fn leaky_relu(call: &Call<'_>) -> Result<(), KernelError> {
    let slope = number_or(call, 1, 0.01)? as f32;
    unary(call, |x| if x > 0.0 { x } else { x * slope })
}

fn leaky_relu_backward(call: &Call<'_>) -> Result<(), KernelError> {
    let slope = number_or(call, 2, 0.01)? as f32;
    gradient(call, |g, x| if x > 0.0 { g } else { g * slope })
}

fn elu(call: &Call<'_>) -> Result<(), KernelError> {
    let (alpha, scale, rate) = (
        number_or(call, 1, 1.0)? as f32,
        number_or(call, 2, 1.0)? as f32,
        number_or(call, 3, 1.0)? as f32,
    );
    unary(call, |x| if x > 0.0 { x * scale } else { (x * rate).exp_m1() * alpha * scale })
}

fn softplus(call: &Call<'_>) -> Result<(), KernelError> {
    let (beta, threshold) = (number_or(call, 1, 1.0)? as f32, number_or(call, 2, 20.0)? as f32);
    unary(call, |x| if x * beta > threshold { x } else { (x * beta).exp().ln_1p() / beta })
}

fn softplus_of(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

fn log_sigmoid(x: f32) -> f32 {
    x.min(0.0) - (-x.abs()).exp().ln_1p()
}

fn elu_backward(call: &Call<'_>) -> Result<(), KernelError> {
    let (alpha, scale, rate) = (
        number_or(call, 1, 1.0)? as f32,
        number_or(call, 2, 1.0)? as f32,
        number_or(call, 3, 1.0)? as f32,
    );
    let of_result = flag(call, 4)?;
    let out = floating(output(call)?)?;
    map2::<f32>(out, &input(call, 0)?, &input(call, 5)?, |g, y| {
        if y > 0.0 {
            g * scale
        } else if of_result {
            g * rate * (y + alpha * scale)
        } else {
            g * rate * alpha * scale * (y * rate).exp()
        }
    })
}

/// The slopes of a parametric rectifier, one for all or one for each channel, as a view that
/// broadcasts to `x`.
fn slopes(call: &Call<'_>, x: &View) -> Result<View, KernelError> {
    let mut slopes = real(call, 1)?.clone();
    if slopes.shape.len() == 1 && x.shape.len() > 2 {
        slopes.shape.extend(vec![1; x.shape.len() - 2]);
        slopes.stride.extend(vec![0; x.shape.len() - 2]);
    }
    Ok(slopes)
}

fn prelu(call: &Call<'_>) -> Result<(), KernelError> {
    let (out, x) = (floating(output(call)?)?, real(call, 0)?);
    let slopes = slopes(call, x)?;
    map2::<f32>(out, &Input::View(x), &Input::View(&slopes), |x, a| if x > 0.0 { x } else { a * x })
}

/// `(grad, x, slopes)` to the gradients of both; the slopes' is not summed yet.
fn prelu_backward(call: &Call<'_>) -> Result<(), KernelError> {
    let [grad, x, slopes] = [input(call, 0)?, input(call, 1)?, input(call, 2)?];
    let (to_x, to_slopes) = (floating(output(call)?)?, result(call, 1)?);
    if let Some(view) = to_slopes {
        map2::<f32>(view, &grad, &x, |g, x| if x > 0.0 { 0.0 } else { g * x })?;
    }
    map3::<f32>(to_x, &grad, &x, &slopes, |g, x, a| if x > 0.0 { g } else { a * g })
}

/// The two halves of a tensor along the dimension that argument `at` names.
fn halves(call: &Call<'_>, of: &View, at: usize) -> Result<[View; 2], KernelError> {
    let dim = dimension(int_or(call, at, -1)?, of.shape.len())?;
    match of.shape.get(dim) {
        Some(&extent) if extent % 2 == 0 => {
            Ok([narrow(of, dim, 0..extent / 2)?, narrow(of, dim, extent / 2..extent)?])
        }
        _ => Err(invalid!("halves of dimension {dim} of {:?}", of.shape)),
    }
}

/// The first half times the sigmoid of the second.
fn glu(call: &Call<'_>) -> Result<(), KernelError> {
    let [a, b] = halves(call, real(call, 0)?, 1)?;
    let out = floating(output(call)?)?;
    map2::<f32>(out, &Input::View(&a), &Input::View(&b), |a, b| a * sigmoid(b))
}

fn glu_backward(call: &Call<'_>) -> Result<(), KernelError> {
    let (grad, x) = (real(call, 0)?, real(call, 1)?);
    let ([a, b], [da, db]) = (halves(call, x, 2)?, halves(call, output(call)?, 2)?);
    let [grad, a, b] = [grad, &a, &b].map(Input::View);
    map2::<f32>(&da, &grad, &b, |g, b| g * sigmoid(b))?;
    map3::<f32>(&db, &grad, &a, &b, |g, a, b| {
        let s = sigmoid(b);
        g * a * s * (1.0 - s)
    })
}
