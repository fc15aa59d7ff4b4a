//! Arithmetic, comparisons, activations and dropout, element by element.
//!
//! In-place kinds are the same kernels: their output is the memory of argument 0.

use crate::backend::operators::arguments::{
    Input, flag, floating, input, is_floating, maybe_input, number, number_or, output,
    real as real_at, result, tensor, text,
};
use crate::backend::operators::error::{invalid, unsupported};
use crate::backend::operators::foreach::{Second, entries, scalars as numbers, second};
use crate::backend::operators::random::{survivors, threshold, unrounded};
use crate::backend::operators::shapes::same_shape;
use crate::backend::operators::view::{Call, Operand, View};
use crate::backend::operators::{KernelError, Table, table};
use crate::job::{Arg, Dtype};

use super::super::launch::{Actions, Family, Vary};
use super::super::params::{Map, Random};
use super::Emit;
use super::map::{Extra, blocks, copy, fill, map, params};

pub const TABLE: Table<Emit> = table! {
    "add" => |c, a| scaled(c, a, false),
    "sub" | "subtract" => |c, a| scaled(c, a, true),
    "rsub" => |c, a| {
        let alpha = number_or(c, 2, 1.0)?;
        numeric(c, a, "rsub", 2, &scalar(alpha))
    },
    "mul" | "multiply" => |c, a| numeric(c, a, "mul", 2, &Extra::default()),
    "div" | "true_divide" | "divide" => |c, a| {
        let name = match text(c, 2) {
            "" => "div",
            "floor" => "div_floor",
            "trunc" if is_floating(output(c)?) => "div_trunc",
            "trunc" => "div",
            other => return Err(unsupported!("rounding mode `{other}` is not known")),
        };
        numeric(c, a, name, 2, &Extra::default())
    },
    "floor_divide" => |c, a| numeric(c, a, "div_floor", 2, &Extra::default()),
    "remainder" => |c, a| numeric(c, a, "remainder", 2, &Extra::default()),
    "maximum" => |c, a| numeric(c, a, "maximum", 2, &Extra::default()),
    "minimum" => |c, a| numeric(c, a, "minimum", 2, &Extra::default()),
    "pow" => pow,
    "neg" | "negative" => |c, a| numeric(c, a, "neg", 1, &Extra::default()),
    "abs" => |c, a| numeric(c, a, "abs", 1, &Extra::default()),
    "square" => |c, a| numeric(c, a, "square", 1, &Extra::default()),
    "sign" => |c, a| numeric(c, a, "sign", 1, &Extra::default()),
    "sqrt" => |c, a| real(c, a, "sqrt", 1, &Extra::default()),
    "rsqrt" => |c, a| real(c, a, "rsqrt", 1, &Extra::default()),
    "reciprocal" => |c, a| real(c, a, "reciprocal", 1, &Extra::default()),
    "exp" => |c, a| real(c, a, "exp", 1, &Extra::default()),
    "expm1" => |c, a| real(c, a, "expm1", 1, &Extra::default()),
    "log" => |c, a| real(c, a, "log", 1, &Extra::default()),
    "log1p" => |c, a| real(c, a, "log1p", 1, &Extra::default()),
    "erf" => |c, a| real(c, a, "erf", 1, &Extra::default()),
    "sin" => |c, a| real(c, a, "sin", 1, &Extra::default()),
    "cos" => |c, a| real(c, a, "cos", 1, &Extra::default()),
    "tanh" => |c, a| real(c, a, "tanh", 1, &Extra::default()),
    "floor" => |c, a| rounded(c, a, "floor"),
    "ceil" => |c, a| rounded(c, a, "ceil"),
    "clamp" | "clip" => clamp,
    "clamp_min" => |c, a| {
        numeric(
            c,
            a,
            if is_floating(output(c)?) { "clamp_min" } else { "maximum" },
            2,
            &Extra::default(),
        )
    },
    "clamp_max" => |c, a| {
        numeric(
            c,
            a,
            if is_floating(output(c)?) { "clamp_max" } else { "minimum" },
            2,
            &Extra::default(),
        )
    },
    "where" => choose,
    "masked_fill" => |c, a| {
        let (out, inputs) = (output(c)?, [input(c, 0)?, input(c, 1)?, input(c, 2)?]);
        map(a, is_floating(out), "masked_fill", out, &inputs, &Extra::default())
    },
    "eq" => |c, a| compare(c, a, "eq", 2),
    "ne" => |c, a| compare(c, a, "ne", 2),
    "lt" => |c, a| compare(c, a, "lt", 2),
    "le" => |c, a| compare(c, a, "le", 2),
    "gt" => |c, a| compare(c, a, "gt", 2),
    "ge" => |c, a| compare(c, a, "ge", 2),
    "logical_and" => |c, a| compare(c, a, "logical_and", 2),
    "logical_or" => |c, a| compare(c, a, "logical_or", 2),
    "logical_xor" => |c, a| compare(c, a, "logical_xor", 2),
    "logical_not" => |c, a| compare(c, a, "logical_not", 1),
    "isneginf" => |c, a| test(c, a, "isneginf"),
    "isposinf" => |c, a| test(c, a, "isposinf"),
    "isinf" => |c, a| test(c, a, "isinf"),
    "isnan" => |c, a| test(c, a, "isnan"),
    "bitwise_and" | "__and__" => |c, a| bits(c, a, "and", 2),
    "bitwise_or" | "__or__" => |c, a| bits(c, a, "or", 2),
    "bitwise_xor" | "__xor__" => |c, a| bits(c, a, "xor", 2),
    "bitwise_not" => |c, a| {
        bits(c, a, if output(c)?.dtype == Dtype::Bool { "logical_not" } else { "not" }, 1)
    },
    "addcmul" => |c, a| {
        let value = number_or(c, 3, 1.0)?;
        real(c, a, "addcmul", 3, &scalar(value))
    },
    "addcdiv" => |c, a| {
        let value = number_or(c, 3, 1.0)?;
        real(c, a, "addcdiv", 3, &scalar(value))
    },
    "lerp" => |c, a| {
        let weight = number(c, 2)?;
        real(c, a, "lerp", 2, &scalar(weight))
    },
    "relu" => |c, a| real(c, a, "relu", 1, &Extra::default()),
    "relu6" => |c, a| real(c, a, "clip", 1, &scalars([0.0, 6.0, 0.0])),
    "threshold_backward" => |c, a| {
        let threshold = number_or(c, 2, 0.0)?;
        real(c, a, "threshold_backward", 2, &scalar(threshold))
    },
    "sigmoid" => |c, a| real(c, a, "sigmoid", 1, &Extra::default()),
    "sigmoid_backward" => |c, a| real(c, a, "sigmoid_backward", 2, &Extra::default()),
    "tanh_backward" => |c, a| real(c, a, "tanh_backward", 2, &Extra::default()),
    "silu" => |c, a| real(c, a, "silu", 1, &Extra::default()),
    "silu_backward" => |c, a| real(c, a, "silu_backward", 2, &Extra::default()),
    "gelu" => |c, a| {
        real(c, a, if is_tanh(c, 1)? { "gelu_tanh" } else { "gelu" }, 1, &Extra::default())
    },
    "gelu_backward" => |c, a| {
        real(
            c,
            a,
            if is_tanh(c, 2)? { "gelu_tanh_backward" } else { "gelu_backward" },
            2,
            &Extra::default(),
        )
    },
    "hardsigmoid" => |c, a| real(c, a, "hardsigmoid", 1, &Extra::default()),
    "hardsigmoid_backward" => |c, a| real(c, a, "hardsigmoid_backward", 2, &Extra::default()),
    "hardswish" => |c, a| real(c, a, "hardswish", 1, &Extra::default()),
    "hardswish_backward" => |c, a| real(c, a, "hardswish_backward", 2, &Extra::default()),
    "hardtanh" => |c, a| {
        let extra = scalars([number_or(c, 1, -1.0)?, number_or(c, 2, 1.0)?, 0.0]);
        real(c, a, "clip", 1, &extra)
    },
    "hardtanh_backward" => |c, a| {
        let extra = scalars([number_or(c, 2, -1.0)?, number_or(c, 3, 1.0)?, 0.0]);
        real(c, a, "hardtanh_backward", 2, &extra)
    },
    "leaky_relu" => |c, a| {
        let slope = number_or(c, 1, 0.01)?;
        real(c, a, "leaky_relu", 1, &scalar(slope))
    },
    "leaky_relu_backward" => |c, a| {
        let slope = number_or(c, 2, 0.01)?;
        real(c, a, "leaky_relu_backward", 2, &scalar(slope))
    },
    "elu" => |c, a| {
        let extra =
            scalars([number_or(c, 1, 1.0)?, number_or(c, 2, 1.0)?, number_or(c, 3, 1.0)?]);
        real(c, a, "elu", 1, &extra)
    },
    "softplus" => |c, a| {
        let extra = scalars([number_or(c, 1, 1.0)?, number_or(c, 2, 20.0)?, 0.0]);
        real(c, a, "softplus", 1, &extra)
    },
    "native_dropout_backward" => |c, a| {
        let factor = f64::from(unrounded(number(c, 2)?));
        real(c, a, "dropout_backward", 2, &scalar(factor))
    },
};

/// Multi-tensor calls as they are recorded, and what has no form in place.
pub const MORE: Table<Emit> = table! {
    "dropout" | "dropout_" | "native_dropout" => dropout,
    "_foreach_add_" | "_foreach_add" => |c, a| match second(c)? {
        Second::List => lists(c, a, "add_scaled", 2, &[number_or(c, 2, 1.0)? as f32]),
        _ => binary(c, a, "add"),
    },
    "_foreach_sub_" | "_foreach_sub" => |c, a| match second(c)? {
        Second::List => lists(c, a, "add_scaled", 2, &[-number_or(c, 2, 1.0)? as f32]),
        _ => binary(c, a, "sub"),
    },
    "_foreach_maximum_" | "_foreach_maximum" | "_foreach_clamp_min_" | "_foreach_clamp_min" => {
        |c, a| binary(c, a, "maximum")
    },
    "_foreach_minimum_" | "_foreach_minimum" | "_foreach_clamp_max_" | "_foreach_clamp_max" => {
        |c, a| binary(c, a, "minimum")
    },
    "_foreach_pow_" | "_foreach_pow" => |c, a| binary(c, a, "pow"),
    "_foreach_copy_" | "_foreach_copy" => |c, a| {
        entries(c, 2, &[0.0])?.iter().try_for_each(|e| copy(a, e.out, e.inputs[1]))
    },
    "_foreach_zero_" => |c, a| entries(c, 1, &[0.0])?.iter().try_for_each(|e| fill(a, e.out, 0.0)),
    "_foreach_neg_" | "_foreach_neg" => |c, a| lists(c, a, "neg", 1, &[0.0]),
    "_foreach_abs_" | "_foreach_abs" => |c, a| lists(c, a, "abs", 1, &[0.0]),
    "_foreach_rsqrt_" | "_foreach_rsqrt" => |c, a| lists(c, a, "rsqrt", 1, &[0.0]),
    "_foreach_exp_" | "_foreach_exp" => |c, a| lists(c, a, "exp", 1, &[0.0]),
    "_foreach_reciprocal_" | "_foreach_reciprocal" => |c, a| lists(c, a, "reciprocal", 1, &[0.0]),
    "_foreach_sign_" | "_foreach_sign" => |c, a| lists(c, a, "sign", 1, &[0.0]),
    "_foreach_mul_" | "_foreach_mul" => |c, a| binary(c, a, "mul"),
    "_foreach_div_" | "_foreach_div" => |c, a| binary(c, a, "div"),
    "_foreach_sqrt_" | "_foreach_sqrt" => |c, a| lists(c, a, "sqrt", 1, &[0.0]),
    "_foreach_lerp_" | "_foreach_lerp" => |c, a| match c.args.get(2) {
        Some(Operand::Tensors(_)) => lists(c, a, "lerp_each", 3, &[0.0]),
        _ => lists(c, a, "lerp", 2, &numbers(c, 2)?),
    },
    "_foreach_addcmul_" | "_foreach_addcmul" => |c, a| lists(c, a, "addcmul", 3, &numbers(c, 3)?),
    "_foreach_addcdiv_" | "_foreach_addcdiv" => |c, a| lists(c, a, "addcdiv", 3, &numbers(c, 3)?),
};

fn scalars([a, b, c]: [f64; 3]) -> Extra {
    Extra { s: [a as f32, b as f32, c as f32, 0.0], ..Extra::default() }
}

fn scalar(value: f64) -> Extra {
    Extra { s: [value as f32, 0.0, 0.0, 0.0], k: [value as i64, 0, 0, 0], ..Extra::default() }
}

fn inputs<'a>(call: &'a Call<'_>, count: usize) -> Result<Vec<Input<'a>>, KernelError> {
    (0..count).map(|at| input(call, at)).collect()
}

fn whole_result(out: &View, inputs: &[Input<'_>]) -> Result<(), KernelError> {
    if inputs.iter().any(Input::is_float) {
        Err(invalid!("a floating operand and a result of {:?}", out.dtype))
    } else {
        Ok(())
    }
}

/// In the result's kind of numbers.
fn numeric(
    call: &Call<'_>,
    actions: &mut Actions,
    name: &str,
    count: usize,
    extra: &Extra,
) -> Result<(), KernelError> {
    let (out, inputs) = (output(call)?, inputs(call, count)?);
    let float = is_floating(out);
    if !float {
        whole_result(out, &inputs)?;
    }
    map(actions, float, name, out, &inputs, extra)
}

/// Floating whatever it is given.
fn real(
    call: &Call<'_>,
    actions: &mut Actions,
    name: &str,
    count: usize,
    extra: &Extra,
) -> Result<(), KernelError> {
    map(actions, true, name, floating(output(call)?)?, &inputs(call, count)?, extra)
}

fn rounded(call: &Call<'_>, actions: &mut Actions, name: &str) -> Result<(), KernelError> {
    let name = if is_floating(output(call)?) { name } else { "copy" };
    numeric(call, actions, name, 1, &Extra::default())
}

fn scaled(call: &Call<'_>, actions: &mut Actions, minus: bool) -> Result<(), KernelError> {
    let alpha = number_or(call, 2, 1.0)?;
    let alpha = if minus { -alpha } else { alpha };
    let name = if alpha == 1.0 {
        "add"
    } else if alpha == -1.0 {
        "sub"
    } else {
        "add_scaled"
    };
    numeric(call, actions, name, 2, &scalar(alpha))
}

fn pow(call: &Call<'_>, actions: &mut Actions) -> Result<(), KernelError> {
    let (out, base, exponent) = (output(call)?, input(call, 0)?, input(call, 1)?);
    if !is_floating(out) {
        return numeric(call, actions, "pow", 2, &Extra::default());
    }
    let special = match exponent {
        Input::Number { value, .. } => [
            (2.0, "square"),
            (3.0, "cube"),
            (1.0, "copy"),
            (0.5, "sqrt"),
            (-0.5, "rsqrt"),
            (-1.0, "reciprocal"),
            (-2.0, "inverse_square"),
        ]
        .into_iter()
        .find(|(at, _)| *at == value),
        Input::View(_) => None,
    };
    match special {
        Some((_, name)) => map(actions, true, name, out, &[base], &Extra::default()),
        None => map(actions, true, "pow", out, &[base, exponent], &Extra::default()),
    }
}

fn clamp(call: &Call<'_>, actions: &mut Actions) -> Result<(), KernelError> {
    let (out, a) = (output(call)?, input(call, 0)?);
    let float = is_floating(out);
    // The ends of what converts to whole numbers without overflow.
    let (lowest, highest) = if float {
        (f64::NEG_INFINITY, f64::INFINITY)
    } else {
        (-9_223_372_036_854_775_808.0, 9_223_372_036_854_774_784.0)
    };
    let low = maybe_input(call, 1)?.unwrap_or(Input::Number { value: lowest, float: false });
    let high = maybe_input(call, 2)?.unwrap_or(Input::Number { value: highest, float: false });
    if !float {
        whole_result(out, &[a, low, high])?;
    }
    map(actions, float, "clamp", out, &[a, low, high], &Extra::default())
}

fn choose(call: &Call<'_>, actions: &mut Actions) -> Result<(), KernelError> {
    let (out, condition, a, b) = (output(call)?, input(call, 0)?, input(call, 1)?, input(call, 2)?);
    let float = is_floating(out);
    if !float {
        whole_result(out, &[a, b])?;
    }
    map(actions, float, "where", out, &[condition, a, b], &Extra::default())
}

fn compare(
    call: &Call<'_>,
    actions: &mut Actions,
    name: &str,
    count: usize,
) -> Result<(), KernelError> {
    let inputs = inputs(call, count)?;
    map(
        actions,
        inputs.iter().any(Input::is_float),
        name,
        output(call)?,
        &inputs,
        &Extra::default(),
    )
}

fn test(call: &Call<'_>, actions: &mut Actions, name: &str) -> Result<(), KernelError> {
    let (out, a) = (output(call)?, input(call, 0)?);
    // No whole number is infinite or NaN.
    if a.is_float() {
        map(actions, true, name, out, &[a], &Extra::default())
    } else {
        map(actions, false, "zero", out, &[a], &Extra::default())
    }
}

fn bits(
    call: &Call<'_>,
    actions: &mut Actions,
    name: &str,
    count: usize,
) -> Result<(), KernelError> {
    if is_floating(output(call)?) {
        return Err(unsupported!("bits of a floating tensor are not combined"));
    }
    numeric(call, actions, name, count, &Extra::default())
}

fn is_tanh(call: &Call<'_>, index: usize) -> Result<bool, KernelError> {
    match text(call, index) {
        "" | "none" => Ok(false),
        "tanh" => Ok(true),
        other => Err(unsupported!("the GELU approximation `{other}` is not known")),
    }
}

fn dropout(call: &Call<'_>, actions: &mut Actions) -> Result<(), KernelError> {
    let (out, from, p) = (floating(output(call)?)?, real_at(call, 0)?, number(call, 1)?);
    same_shape(out, from)?;
    let mask = result(call, 1)?;
    if let Some(mask) = mask {
        same_shape(out, mask)?;
    }
    let training = flag(call, 2)? || matches!(call.operator.args.get(2), None | Some(Arg::None));
    if !training || p == 0.0 {
        if let Some(mask) = mask {
            fill(actions, mask, 1.0)?;
        }
        return copy(actions, out, from);
    }
    let random =
        Random { key: call.random_key, iteration: call.iteration, threshold: threshold(p) };
    let extra =
        Extra { s: [survivors(p), 0.0, 0.0, 0.0], random, ordered: true, ..Extra::default() };
    let flags = mask.map_or(Input::Number { value: 0.0, float: false }, Input::View);
    let map = params(out, &[Input::View(from), flags], &extra)?;
    let iteration = std::mem::offset_of!(Map, random) + std::mem::offset_of!(Random, iteration);
    actions.vary(
        Family::Pointwise,
        "f_dropout",
        blocks(&map),
        [256, 1],
        &map,
        Vary::Iteration(iteration),
    );
    Ok(())
}

/// Kernel `name` for each entry of the first `count` lists.
fn lists(
    call: &Call<'_>,
    actions: &mut Actions,
    name: &str,
    count: usize,
    numbers: &[f32],
) -> Result<(), KernelError> {
    for entry in entries(call, count, numbers)? {
        let inputs: Vec<Input<'_>> = entry.inputs.iter().map(|v| Input::View(v)).collect();
        map(actions, true, name, entry.out, &inputs, &scalar(f64::from(entry.scalar)))?;
    }
    Ok(())
}

/// Kernel `name` for each entry of the first list and of a second list, a number or a tensor.
fn binary(call: &Call<'_>, actions: &mut Actions, name: &str) -> Result<(), KernelError> {
    let numbers = match second(call)? {
        Second::List => return lists(call, actions, name, 2, &[0.0]),
        Second::Numbers(numbers) => numbers,
        Second::Tensor => vec![0.0],
    };
    let tensor = tensor(call, 1).ok();
    for entry in entries(call, 1, &numbers)? {
        let number = Input::Number { value: f64::from(entry.scalar), float: true };
        let inputs = [Input::View(entry.inputs[0]), tensor.map_or(number, Input::View)];
        map(actions, true, name, entry.out, &inputs, &Extra::default())?;
    }
    Ok(())
}
