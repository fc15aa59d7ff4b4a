//! Multi-tensor calls as they are recorded, for jobs that are run without lowering the optimizer.
//!
//! In place they write through their first list; otherwise into the outputs, then the hidden outputs, in
//! order. Where an entry of the first list is absent (empty, or on the host) nothing is done for it. The
//! recorded scalars are the recorded iteration's. Not for: updates that know the step ([`super::optimizer`]).

use super::super::view::{Call, Operand, View};
use super::Kernel;
use super::optimizer::lerp;
use super::strided::{base, f32_only, float_or, once, runs, same, same_shape};
use crate::job::Arg;

/// The kernel for a kind, if it is one of this file's.
pub fn find(kind: &str) -> Option<Kernel> {
    Some(match kind {
        "aten::_foreach_add_" | "aten::_foreach_add" => add,
        "aten::_foreach_mul_" | "aten::_foreach_mul" => |call| binary(call, |a, b| a * b),
        "aten::_foreach_div_" | "aten::_foreach_div" => |call| binary(call, |a, b| a / b),
        "aten::_foreach_sqrt_" | "aten::_foreach_sqrt" => {
            |call| lists(call, 1, &[0.0], |[a, ..], _| a.sqrt())
        }
        "aten::_foreach_lerp_" => {
            |call| lists(call, 2, &scalars(call, 2)?, |[a, b, _], weight| lerp(a, b, weight))
        }
        "aten::_foreach_addcmul_" => {
            |call| lists(call, 3, &scalars(call, 3)?, |[a, b, c], value| a + value * b * c)
        }
        "aten::_foreach_addcdiv_" => {
            |call| lists(call, 3, &scalars(call, 3)?, |[a, b, c], value| a + value * b / c)
        }
        _ => return None,
    })
}

/// `a + alpha * b` with a list, or `a + b` with numbers.
fn add(call: &Call<'_>) -> Result<(), String> {
    if matches!(call.args.get(1), Some(Operand::Tensors(_))) {
        #[expect(clippy::cast_possible_truncation, reason = "scalars are cast to the element type")]
        let alpha = float_or(call, 2, 1.0)? as f32;
        return lists(call, 2, &[alpha], |[a, b, _], alpha| a + alpha * b);
    }
    binary(call, |a, b| a + b)
}

fn binary(call: &Call<'_>, combine: fn(f32, f32) -> f32) -> Result<(), String> {
    match call.args.get(1) {
        Some(Operand::Tensors(_)) => lists(call, 2, &[0.0], |[a, b, _], _| combine(a, b)),
        Some(Operand::Tensor(_)) => {
            Err(format!("{} with a single tensor is not supported", call.operator.kind))
        }
        _ => lists(call, 1, &scalars(call, 1)?, |[a, ..], b| combine(a, b)),
    }
}

/// One number for all, or one for each.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "scalars are cast to the element type"
)]
fn scalars(call: &Call<'_>, at: usize) -> Result<Vec<f32>, String> {
    match call.operator.args.get(at) {
        Some(Arg::Floats(numbers)) => Ok(numbers.iter().map(|&x| x as f32).collect()),
        Some(Arg::Ints(numbers)) => Ok(numbers.iter().map(|&n| n as f32).collect()),
        _ => Ok(vec![float_or(call, at, 1.0)? as f32]),
    }
}

fn list<'a>(call: &Call<'a>, at: usize) -> Result<&'a [Option<View>], String> {
    match call.args.get(at) {
        Some(Operand::Tensors(list)) => Ok(list),
        _ => Err(format!("{} needs a list of tensors as argument {at}", call.operator.kind)),
    }
}

/// Writes `combine([a, b, c], scalar)` for each element of each tensor of the first `count` lists.
fn lists(
    call: &Call<'_>,
    count: usize,
    scalars: &[f32],
    combine: impl Fn([f32; 3], f32) -> f32,
) -> Result<(), String> {
    let kind = &call.operator.kind;
    let first = list(call, 0)?;
    let mut others = Vec::new();
    for at in 1..count {
        others.push(list(call, at)?);
    }
    if others.iter().any(|other| other.len() != first.len())
        || ![1, first.len()].contains(&scalars.len())
    {
        return Err(format!("{kind}: its lists are not of the same length"));
    }
    let in_place = kind.ends_with('_');
    let mut outputs = call.outputs.iter().flatten().chain(call.hidden);
    for (i, a) in first.iter().enumerate() {
        let Some(a) = a else { continue };
        let a = f32_only(call, a)?;
        let mut views = [a; 3];
        for (view, other) in views[1..].iter_mut().zip(&others) {
            let other = other[i]
                .as_ref()
                .ok_or_else(|| format!("{kind}: entry {i} is missing from one of its lists"))?;
            same_shape(call, "an entry of its lists", f32_only(call, other)?, &a.shape)?;
            *view = other;
        }
        let into = if in_place {
            outputs
                .clone()
                .find(|written| same(written, a))
                .ok_or_else(|| format!("{kind} writes entry {i}, but the graph does not say so"))?
        } else {
            outputs.next().ok_or_else(|| format!("{kind} has fewer outputs than tensors"))?
        };
        same_shape(call, "an output", f32_only(call, into)?, &a.shape)?;
        if !once(into) {
            return Err(format!("{kind} would write an element of entry {i} more than once"));
        }
        let scalar = scalars[if scalars.len() == 1 { 0 } else { i }];
        let [one, two, three] = views;
        runs(
            &a.shape,
            [&one.stride, &two.stride, &three.stride, &into.stride],
            |at, steps, length| {
                let [a, b, c, o] = [
                    base(one).wrapping_add(at[0]),
                    base(two).wrapping_add(at[1]),
                    base(three).wrapping_add(at[2]),
                    base(into).wrapping_add(at[3]),
                ];
                if steps == [1; 4] {
                    for i in 0..length {
                        // SAFETY: runs stay inside the views; each element is read before it is written.
                        unsafe {
                            *o.wrapping_add(i) = combine(
                                [*a.wrapping_add(i), *b.wrapping_add(i), *c.wrapping_add(i)],
                                scalar,
                            )
                        };
                    }
                } else {
                    for i in 0..length {
                        let values = [
                            a.wrapping_add(i * steps[0]),
                            b.wrapping_add(i * steps[1]),
                            c.wrapping_add(i * steps[2]),
                        ];
                        // SAFETY: as above.
                        unsafe {
                            *o.wrapping_add(i * steps[3]) = combine(values.map(|x| *x), scalar)
                        };
                    }
                }
            },
        );
    }
    Ok(())
}
