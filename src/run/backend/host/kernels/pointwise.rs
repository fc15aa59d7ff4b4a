//! Arithmetic element by element, with broadcasting and mixed types; comparisons and selection.
//!
//! In-place kinds are the same kernels: their output is the memory of argument 0.

use crate::backend::operators::arguments::{
    Input, floating, input, is_floating as is_float, maybe_input, number_or, output, text,
};
use crate::backend::operators::error::{invalid, unsupported};
use crate::backend::operators::view::{Call, View};
use crate::backend::operators::{KernelError, Table, table};
use crate::job::Dtype;

use super::Kernel;
use super::elements::{map1, map2, map3};
use super::math;

pub const TABLE: Table<Kernel> = table! {
    "add" => |c| scaled(c, false),
    "sub" | "subtract" => |c| scaled(c, true),
    "rsub" => rsub,
    "mul" | "multiply" => |c| binary(c, |a, b| a * b, i64::wrapping_mul),
    "div" | "true_divide" | "divide" => div,
    "floor_divide" => {
            |c| binary(c, |a, b| (a / b).floor(), |a, b| if b == 0 { 0 } else { floor_div(a, b) })
        },
    "remainder" => |c| {
            binary(
                c,
                |a, b| a - b * (a / b).floor(),
                |a, b| if b == 0 { 0 } else { a.wrapping_sub(b.wrapping_mul(floor_div(a, b))) },
            )
        },
    "maximum" => |c| binary(c, |a, b| if a.is_nan() || a > b { a } else { b }, i64::max),
    "minimum" => |c| binary(c, |a, b| if a.is_nan() || a < b { a } else { b }, i64::min),
    "pow" => pow,
    "neg" | "negative" => |c| unary(c, |a| -a, i64::wrapping_neg),
    "abs" => |c| unary(c, f32::abs, i64::wrapping_abs),
    "square" => |c| unary(c, |a| a * a, |a| a.wrapping_mul(a)),
    "sign" | "sgn" => |c| unary(c, sign, i64::signum),
    "sqrt" => |c| real(c, f32::sqrt),
    "rsqrt" => |c| real(c, |a| 1.0 / a.sqrt()),
    "reciprocal" => |c| real(c, |a| 1.0 / a),
    "exp" => |c| real(c, math::exp),
    "expm1" => |c| real(c, f32::exp_m1),
    "log" => |c| real(c, f32::ln),
    "log1p" => |c| real(c, f32::ln_1p),
    "erf" => |c| real(c, math::erf),
    "sin" => |c| real(c, f32::sin),
    "cos" => |c| real(c, f32::cos),
    "tanh" => |c| real(c, math::tanh),
    "floor" => |c| unary(c, f32::floor, |a| a),
    "ceil" => |c| unary(c, f32::ceil, |a| a),
    "clamp" | "clip" => clamp,
    "clamp_min" => |c| binary(c, |a, b| if a < b { b } else { a }, i64::max),
    "clamp_max" => |c| binary(c, |a, b| if a > b { b } else { a }, i64::min),
    "where" => choose,
    "masked_fill" => masked_fill,
    "eq" => |c| compare(c, |a, b| a == b, |a, b| a == b),
    "ne" => |c| compare(c, |a, b| a != b, |a, b| a != b),
    "lt" => |c| compare(c, |a, b| a < b, |a, b| a < b),
    "le" => |c| compare(c, |a, b| a <= b, |a, b| a <= b),
    "gt" => |c| compare(c, |a, b| a > b, |a, b| a > b),
    "ge" => |c| compare(c, |a, b| a >= b, |a, b| a >= b),
    "logical_and" => |c| compare(c, |a, b| a != 0.0 && b != 0.0, |a, b| a != 0 && b != 0),
    "logical_or" => |c| compare(c, |a, b| a != 0.0 || b != 0.0, |a, b| a != 0 || b != 0),
    "logical_xor" => {
            |c| compare(c, |a, b| (a != 0.0) != (b != 0.0), |a, b| (a != 0) != (b != 0))
        },
    "logical_not" => |c| test(c, |a| a == 0.0, |a| a == 0),
    "isneginf" => |c| test(c, |a| a == f32::NEG_INFINITY, |_| false),
    "isposinf" => |c| test(c, |a| a == f32::INFINITY, |_| false),
    "isinf" => |c| test(c, f32::is_infinite, |_| false),
    "isnan" => |c| test(c, f32::is_nan, |_| false),
    "isfinite" => |c| test(c, f32::is_finite, |_| true),
    "bitwise_and" | "__and__" => |c| whole(c, |a, b| a & b),
    "bitwise_or" | "__or__" => |c| whole(c, |a, b| a | b),
    "bitwise_xor" | "__xor__" => |c| whole(c, |a, b| a ^ b),
    "bitwise_not" => bitwise_not,
    "addcmul" => |c| addc(c, |a, b, d, value| a + value * b * d),
    "addcdiv" => |c| addc(c, |a, b, d, value| a + value * b / d),
    "lerp" => lerp,
    "xlogy" => |c| {
        map2::<f32>(floating(output(c)?)?, &input(c, 0)?, &input(c, 1)?, |a, b| {
            if b.is_nan() { b } else if a == 0.0 { 0.0 } else { a * b.ln() }
        })
    },
    "nan_to_num" => |c| {
        let number = |at, otherwise: f32| {
            Ok::<_, KernelError>(number_or(c, at, f64::from(otherwise))? as f32)
        };
        let (nan, high, low) = (number(1, 0.0)?, number(2, f32::MAX)?, number(3, f32::MIN)?);
        real(c, |a| match a {
            a if a.is_nan() => nan,
            f32::INFINITY => high,
            f32::NEG_INFINITY => low,
            a => a,
        })
    },
    "log2" => |c| real(c, f32::log2),
    "log10" => |c| real(c, f32::log10),
    "exp2" => |c| real(c, f32::exp2),
    "tan" => |c| real(c, f32::tan),
    "atan" => |c| real(c, f32::atan),
    "sinh" => |c| real(c, f32::sinh),
    "cosh" => |c| real(c, f32::cosh),
    "asin" => |c| real(c, f32::asin),
    "acos" => |c| real(c, f32::acos),
    "asinh" => |c| real(c, f32::asinh),
    "acosh" => |c| real(c, f32::acosh),
    "atanh" => |c| real(c, f32::atanh),
    "atan2" => |c| map2::<f32>(floating(output(c)?)?, &input(c, 0)?, &input(c, 1)?, f32::atan2),
    "hypot" => |c| map2::<f32>(floating(output(c)?)?, &input(c, 0)?, &input(c, 1)?, f32::hypot),
    "copysign" => {
            |c| map2::<f32>(floating(output(c)?)?, &input(c, 0)?, &input(c, 1)?, f32::copysign)
        },
    "fmod" => |c| binary(c, |a, b| a % b, |a, b| if b == 0 { 0 } else { a.wrapping_rem(b) }),
    "fmax" => |c| binary(c, f32::max, i64::max),
    "fmin" => |c| binary(c, f32::min, i64::min),
    "logaddexp" => |c| {
            map2::<f32>(floating(output(c)?)?, &input(c, 0)?, &input(c, 1)?, |a, b| {
                let high = a.max(b);
                if high.is_infinite() { high } else { high + (-(a - b).abs()).exp().ln_1p() }
            })
        },
    "frac" => |c| real(c, f32::fract),
    "threshold" => |c| {
            let (edge, value) = (number_or(c, 1, 0.0)? as f32, number_or(c, 2, 0.0)?);
            unary(c, |a| if a <= edge { value as f32 } else { a }, |a| {
                if a as f32 <= edge { value as i64 } else { a }
            })
        },
    "round" => |c| unary(c, f32::round_ties_even, |a| a),
    "trunc" => |c| unary(c, f32::trunc, |a| a),
};

fn floor_div(a: i64, b: i64) -> i64 {
    let (q, r) = (a.wrapping_div(b), a.wrapping_rem(b));
    if r != 0 && (r < 0) != (b < 0) { q - 1 } else { q }
}

/// Refuses an in-place or other result of a type that promotion doesn't give.
fn whole_result(out: &View, inputs: &[&Input<'_>]) -> Result<(), KernelError> {
    if inputs.iter().any(|i| i.is_float()) {
        return Err(invalid!("a floating operand and a result of {:?}", out.dtype));
    }
    Ok(())
}

fn unary(
    call: &Call<'_>,
    f: impl Fn(f32) -> f32,
    g: impl Fn(i64) -> i64,
) -> Result<(), KernelError> {
    let (out, a) = (output(call)?, input(call, 0)?);
    if is_float(out) {
        return map1::<f32>(out, &a, f);
    }
    whole_result(out, &[&a])?;
    map1::<i64>(out, &a, g)
}

/// A function whose result is floating whatever it is given.
fn real(call: &Call<'_>, f: impl Fn(f32) -> f32) -> Result<(), KernelError> {
    map1::<f32>(floating(output(call)?)?, &input(call, 0)?, f)
}

fn binary(
    call: &Call<'_>,
    f: impl Fn(f32, f32) -> f32,
    g: impl Fn(i64, i64) -> i64,
) -> Result<(), KernelError> {
    let (out, a, b) = (output(call)?, input(call, 0)?, input(call, 1)?);
    if is_float(out) {
        return map2::<f32>(out, &a, &b, f);
    }
    whole_result(out, &[&a, &b])?;
    map2::<i64>(out, &a, &b, g)
}

/// `a ± alpha b`; addition and subtraction.
fn scaled(call: &Call<'_>, minus: bool) -> Result<(), KernelError> {
    let alpha = number_or(call, 2, 1.0)?;
    let alpha = if minus { -alpha } else { alpha };
    let (real, int) = (alpha as f32, alpha as i64);
    if alpha == 1.0 {
        binary(call, |a, b| a + b, i64::wrapping_add)
    } else if alpha == -1.0 {
        binary(call, |a, b| a - b, i64::wrapping_sub)
    } else {
        binary(call, |a, b| a + real * b, |a, b| a.wrapping_add(int.wrapping_mul(b)))
    }
}

fn rsub(call: &Call<'_>) -> Result<(), KernelError> {
    let alpha = number_or(call, 2, 1.0)?;
    let (real, int) = (alpha as f32, alpha as i64);
    binary(call, |a, b| b - real * a, |a, b| b.wrapping_sub(int.wrapping_mul(a)))
}

fn div(call: &Call<'_>) -> Result<(), KernelError> {
    match text(call, 2) {
        "" => binary(call, |a, b| a / b, |a, b| if b == 0 { 0 } else { a.wrapping_div(b) }),
        "floor" => {
            binary(call, |a, b| (a / b).floor(), |a, b| if b == 0 { 0 } else { floor_div(a, b) })
        }
        "trunc" => {
            binary(call, |a, b| (a / b).trunc(), |a, b| if b == 0 { 0 } else { a.wrapping_div(b) })
        }
        other => Err(unsupported!("rounding mode `{other}` is not known")),
    }
}

fn pow(call: &Call<'_>) -> Result<(), KernelError> {
    let (out, base, exponent) = (output(call)?, input(call, 0)?, input(call, 1)?);
    if !is_float(out) {
        whole_result(out, &[&base, &exponent])?;
        return map2::<i64>(out, &base, &exponent, |a, b| match u32::try_from(b) {
            Ok(b) => a.wrapping_pow(b),
            Err(_) => i64::from(a == 1) + if a == -1 { 1 - 2 * (b & 1) } else { 0 },
        });
    }
    let Input::Number { value, .. } = exponent else {
        return map2::<f32>(out, &base, &exponent, f32::powf);
    };
    // The framework's own special cases, which round differently from a general power.
    if value == 2.0 {
        map1::<f32>(out, &base, |a| a * a)
    } else if value == 3.0 {
        map1::<f32>(out, &base, |a| a * a * a)
    } else if value == 1.0 {
        map1::<f32>(out, &base, |a| a)
    } else if value == 0.5 {
        map1::<f32>(out, &base, f32::sqrt)
    } else if value == -0.5 {
        map1::<f32>(out, &base, |a| 1.0 / a.sqrt())
    } else if value == -1.0 {
        map1::<f32>(out, &base, |a| 1.0 / a)
    } else if value == -2.0 {
        map1::<f32>(out, &base, |a| 1.0 / (a * a))
    } else {
        map1::<f32>(out, &base, |a| a.powf(value as f32))
    }
}

fn clamp(call: &Call<'_>) -> Result<(), KernelError> {
    let low =
        maybe_input(call, 1)?.unwrap_or(Input::Number { value: f64::NEG_INFINITY, float: false });
    let high =
        maybe_input(call, 2)?.unwrap_or(Input::Number { value: f64::INFINITY, float: false });
    let (out, a) = (output(call)?, input(call, 0)?);
    if is_float(out) {
        return map3::<f32>(out, &a, &low, &high, |a, low, high| {
            let a = if a < low { low } else { a };
            if a > high { high } else { a }
        });
    }
    whole_result(out, &[&a, &low, &high])?;
    map3::<i64>(out, &a, &low, &high, |a, low, high| a.max(low).min(high))
}

fn choose(call: &Call<'_>) -> Result<(), KernelError> {
    let (out, condition, a, b) = (output(call)?, input(call, 0)?, input(call, 1)?, input(call, 2)?);
    if is_float(out) {
        return map3::<f32>(out, &condition, &a, &b, |c, a, b| if c != 0.0 { a } else { b });
    }
    whole_result(out, &[&a, &b])?;
    map3::<i64>(out, &condition, &a, &b, |c, a, b| if c != 0 { a } else { b })
}

fn masked_fill(call: &Call<'_>) -> Result<(), KernelError> {
    let (out, a, mask, value) = (output(call)?, input(call, 0)?, input(call, 1)?, input(call, 2)?);
    if is_float(out) {
        return map3::<f32>(out, &a, &mask, &value, |a, m, value| if m != 0.0 { value } else { a });
    }
    map3::<i64>(out, &a, &mask, &value, |a, m, value| if m != 0 { value } else { a })
}

fn compare(
    call: &Call<'_>,
    f: impl Fn(f32, f32) -> bool,
    g: impl Fn(i64, i64) -> bool,
) -> Result<(), KernelError> {
    let (out, a, b) = (output(call)?, input(call, 0)?, input(call, 1)?);
    if a.is_float() || b.is_float() {
        map2::<f32>(out, &a, &b, |a, b| f32::from(u8::from(f(a, b))))
    } else {
        map2::<i64>(out, &a, &b, |a, b| i64::from(g(a, b)))
    }
}

fn test(
    call: &Call<'_>,
    f: impl Fn(f32) -> bool,
    g: impl Fn(i64) -> bool,
) -> Result<(), KernelError> {
    let (out, a) = (output(call)?, input(call, 0)?);
    if a.is_float() {
        map1::<f32>(out, &a, |a| f32::from(u8::from(f(a))))
    } else {
        map1::<i64>(out, &a, |a| i64::from(g(a)))
    }
}

fn whole(call: &Call<'_>, f: impl Fn(i64, i64) -> i64) -> Result<(), KernelError> {
    let (out, a, b) = (output(call)?, input(call, 0)?, input(call, 1)?);
    if is_float(out) {
        return Err(unsupported!("bits of a floating tensor are not combined"));
    }
    whole_result(out, &[&a, &b])?;
    map2::<i64>(out, &a, &b, f)
}

fn bitwise_not(call: &Call<'_>) -> Result<(), KernelError> {
    let (out, a) = (output(call)?, input(call, 0)?);
    whole_result(out, &[&a])?;
    match out.dtype {
        Dtype::Bool => map1::<i64>(out, &a, |a| i64::from(a == 0)),
        _ if is_float(out) => Err(unsupported!("bits of a floating tensor are not combined")),
        _ => map1::<i64>(out, &a, |a| !a),
    }
}

fn addc(call: &Call<'_>, f: impl Fn(f32, f32, f32, f32) -> f32) -> Result<(), KernelError> {
    let out = floating(output(call)?)?;
    let value = number_or(call, 3, 1.0)? as f32;
    map3::<f32>(out, &input(call, 0)?, &input(call, 1)?, &input(call, 2)?, |a, b, d| {
        f(a, b, d, value)
    })
}

/// -1, 0 or 1; NaN stays.
pub fn sign(a: f32) -> f32 {
    if a > 0.0 {
        1.0
    } else if a < 0.0 {
        -1.0
    } else {
        a * 0.0
    }
}

fn lerp(call: &Call<'_>) -> Result<(), KernelError> {
    let (out, a, b) = (floating(output(call)?)?, input(call, 0)?, input(call, 1)?);
    map3::<f32>(out, &a, &b, &input(call, 2)?, super::optimizer::lerp)
}
