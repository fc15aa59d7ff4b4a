//! Multi-tensor calls as they are recorded, for jobs that are run without lowering the optimizer.
//!
//! The recorded scalars are the recorded iteration's.

use crate::backend::operators::arguments::{Input, number_or, tensor, tensors};
use crate::backend::operators::error::unsupported;
use crate::backend::operators::foreach::{Second, entries, scalars, second};
use crate::backend::operators::shapes::count;
use crate::backend::operators::view::{Call, Operand};
use crate::backend::operators::{KernelError, Table, table};

use super::Kernel;
use super::elements::{map1, map2, map3, read};
use super::math::exp;
use super::optimizer::lerp;
use super::pointwise::sign;
use super::reduce::norm;

pub const TABLE: Table<Kernel> = table! {
    "_foreach_add_" | "_foreach_add" => |c| scaled(c, 1.0),
    "_foreach_sub_" | "_foreach_sub" => |c| scaled(c, -1.0),
    "_foreach_mul_" | "_foreach_mul" => |call| binary(call, |a, b| a * b),
    "_foreach_div_" | "_foreach_div" => |call| binary(call, |a, b| a / b),
    "_foreach_maximum_" | "_foreach_maximum" | "_foreach_clamp_min_" | "_foreach_clamp_min" => {
        |call| binary(call, |a, b| if a.is_nan() || a > b { a } else { b })
    },
    "_foreach_minimum_" | "_foreach_minimum" | "_foreach_clamp_max_" | "_foreach_clamp_max" => {
        |call| binary(call, |a, b| if a.is_nan() || a < b { a } else { b })
    },
    "_foreach_pow_" | "_foreach_pow" => |call| binary(call, f32::powf),
    "_foreach_copy_" | "_foreach_copy" => |call| two(call, &[0.0], |_, b, _| b),
    "_foreach_neg_" | "_foreach_neg" => |call| one(call, &[0.0], |a, _| -a),
    "_foreach_abs_" | "_foreach_abs" => |call| one(call, &[0.0], |a, _| a.abs()),
    "_foreach_sqrt_" | "_foreach_sqrt" => |call| one(call, &[0.0], |a, _| a.sqrt()),
    "_foreach_rsqrt_" | "_foreach_rsqrt" => |call| one(call, &[0.0], |a, _| 1.0 / a.sqrt()),
    "_foreach_exp_" | "_foreach_exp" => |call| one(call, &[0.0], |a, _| exp(a)),
    "_foreach_reciprocal_" | "_foreach_reciprocal" => |call| one(call, &[0.0], |a, _| 1.0 / a),
    "_foreach_sign_" | "_foreach_sign" => |call| one(call, &[0.0], |a, _| sign(a)),
    "_foreach_zero_" => |call| one(call, &[0.0], |_, _| 0.0),
    "_foreach_lerp_" | "_foreach_lerp" => lerps,
    "_foreach_addcmul_" | "_foreach_addcmul" => {
        |call| three(call, |a, b, c, value| a + value * b * c)
    },
    "_foreach_addcdiv_" | "_foreach_addcdiv" => {
        |call| three(call, |a, b, c, value| a + value * b / c)
    },
    "_foreach_norm" => norms,
};

/// `f(element, scalar)` for each entry.
fn one(call: &Call<'_>, scalars: &[f32], f: impl Fn(f32, f32) -> f32) -> Result<(), KernelError> {
    entries(call, 1, scalars)?
        .iter()
        .try_for_each(|e| map1::<f32>(e.out, &Input::View(e.inputs[0]), |a| f(a, e.scalar)))
}

/// `f(first, second, scalar)` for each entry of two lists.
fn two(
    call: &Call<'_>,
    scalars: &[f32],
    f: impl Fn(f32, f32, f32) -> f32,
) -> Result<(), KernelError> {
    entries(call, 2, scalars)?.iter().try_for_each(|e| {
        let [a, b] = [0, 1].map(|at| Input::View(e.inputs[at]));
        map2::<f32>(e.out, &a, &b, |a, b| f(a, b, e.scalar))
    })
}

/// `f(first, second, third, scalar)` for each entry of three lists.
fn three(call: &Call<'_>, f: impl Fn(f32, f32, f32, f32) -> f32) -> Result<(), KernelError> {
    entries(call, 3, &scalars(call, 3)?)?.iter().try_for_each(|e| {
        let [a, b, c] = [0, 1, 2].map(|at| Input::View(e.inputs[at]));
        map3::<f32>(e.out, &a, &b, &c, |a, b, c| f(a, b, c, e.scalar))
    })
}

/// `a ± alpha * b` with a list, or `a ± b` with numbers.
fn scaled(call: &Call<'_>, sign: f32) -> Result<(), KernelError> {
    match second(call)? {
        Second::List => {
            let alpha = sign * number_or(call, 2, 1.0)? as f32;
            two(call, &[alpha], |a, b, alpha| a + alpha * b)
        }
        _ => binary(call, |a, b| a + sign * b),
    }
}

/// Towards a second list, by a number or by a third list of weights.
fn lerps(call: &Call<'_>) -> Result<(), KernelError> {
    if matches!(call.args.get(2), Some(Operand::Tensors(_))) {
        return entries(call, 3, &[0.0])?.iter().try_for_each(|e| {
            let [a, b, c] = [0, 1, 2].map(|at| Input::View(e.inputs[at]));
            map3::<f32>(e.out, &a, &b, &c, lerp)
        });
    }
    two(call, &scalars(call, 2)?, lerp)
}

/// The norm of each tensor of a list.
fn norms(call: &Call<'_>) -> Result<(), KernelError> {
    let order = number_or(call, 1, 2.0)?;
    let mut outputs = call.writes();
    for from in tensors(call, 0)?.iter().flatten() {
        let out = outputs.next().ok_or("it has fewer outputs than tensors")?;
        norm(out, from, &vec![true; from.shape.len()], order)?;
    }
    Ok(())
}

fn binary(call: &Call<'_>, f: impl Fn(f32, f32) -> f32) -> Result<(), KernelError> {
    match second(call)? {
        Second::List => two(call, &[0.0], |a, b, _| f(a, b)),
        Second::Numbers(numbers) => one(call, &numbers, f),
        Second::Tensor => {
            let other = tensor(call, 1)?;
            if count(other) != 1 {
                return Err(unsupported!("a second operand of shape {:?}", other.shape));
            }
            one(call, &[read(other, 0) as f32], f)
        }
    }
}
