//! Reductions over dimensions, extremes with places, and running sums.

use crate::backend::operators::arguments::{
    Input, floating, int_or, is_floating, number_or, output, result, tensor, tensors,
};
use crate::backend::operators::error::{invalid, unsupported};
use crate::backend::operators::reduce::{
    Split, all_or_chosen, chosen, chosen_at, everything, pick, summed, terms,
};
use crate::backend::operators::shapes::{count, dimension, same_shape};
use crate::backend::operators::view::{Call, View};
use crate::backend::operators::{KernelError, Table, table};
use crate::job::Arg;

use super::super::launch::{Actions, Family};
use super::super::params::{Operand, Parts, RANK, Reduce};
use super::Emit;
use super::map::{Extra, copy, join, map, signed};

pub const TABLE: Table<Emit> = table! {
    "sum" => |c, a| sum(a, output(c)?, tensor(c, 0)?, &summed(c)?, 1.0),
    "mean" => |c, a| {
        let (out, from, gone) = (output(c)?, tensor(c, 0)?, summed(c)?);
        if !is_floating(out) {
            return Err(unsupported!("a mean that is not floating"));
        }
        sum(a, out, from, &gone, terms(from, &gone) as f64)
    },
    "prod" => |c, a| reduce(c, a, "prod", &all_or_chosen(c, 2)?),
    "amax" => |c, a| reduce(c, a, "max", &chosen(c)?),
    "amin" => |c, a| reduce(c, a, "min", &chosen(c)?),
    "all" => |c, a| reduce(c, a, "all", &all_or_chosen(c, 1)?),
    "any" => |c, a| reduce(c, a, "any", &all_or_chosen(c, 1)?),
    "max" => |c, a| extreme(c, a, true),
    "min" => |c, a| extreme(c, a, false),
    "argmax" => |c, a| arg_extreme(c, a, true),
    "argmin" => |c, a| arg_extreme(c, a, false),
    "cumsum" | "cumsum_" => cumsum,
    "linalg_vector_norm" | "norm" => |c, a| {
        norm(a, output(c)?, tensor(c, 0)?, &chosen_at(c, 2)?, number_or(c, 1, 2.0)?)
    },
    "_foreach_norm" => norms,
};

/// The sum over dimensions in the wider of the two types, divided.
pub fn sum(
    actions: &mut Actions,
    out: &View,
    from: &View,
    gone: &[bool],
    divisor: f64,
) -> Result<(), KernelError> {
    let float = is_floating(from) || is_floating(out);
    launch(actions, if float { "reduce_f_sum" } else { "reduce_i_sum" }, out, from, gone, divisor)
}

/// The vector norm of `order` over dimensions.
fn norm(
    actions: &mut Actions,
    out: &View,
    from: &View,
    gone: &[bool],
    order: f64,
) -> Result<(), KernelError> {
    let kernel = match order {
        2.0 => "reduce_f_norm",
        1.0 => "reduce_f_norm_one",
        f64::INFINITY => "reduce_f_norm_most",
        _ => return Err(unsupported!("a norm of order {order}; CUDA has 1, 2 and infinity")),
    };
    launch(actions, kernel, floating(out)?, floating(from)?, gone, 1.0)
}

/// The norm of each tensor of a list.
fn norms(call: &Call<'_>, actions: &mut Actions) -> Result<(), KernelError> {
    let order = number_or(call, 1, 2.0)?;
    let mut outputs = call.writes();
    for from in tensors(call, 0)?.iter().flatten() {
        let out = outputs.next().ok_or("it has fewer outputs than tensors")?;
        norm(actions, out, from, &vec![true; from.shape.len()], order)?;
    }
    Ok(())
}

fn reduce(
    call: &Call<'_>,
    actions: &mut Actions,
    name: &str,
    gone: &[bool],
) -> Result<(), KernelError> {
    let (out, from) = (output(call)?, tensor(call, 0)?);
    let kernel = format!("reduce_{}_{name}", if is_floating(from) { "f" } else { "i" });
    launch(actions, &kernel, out, from, gone, 1.0)
}

fn blank() -> Reduce {
    let none = Operand::number(0.0);
    Reduce {
        kept: 1,
        reduced: 1,
        kept_rank: 0,
        reduced_rank: 0,
        kept_shape: [1; RANK],
        reduced_shape: [1; RANK],
        out: none,
        from: none,
        index: none,
        step: [0; RANK],
        out_step: 0,
        divisor: 1.0,
        columns: 0,
        most: 0,
        parts: Parts::new(1, 0, 1),
    }
}

fn fill_shape(to: &mut [u32; RANK], from: &[u32]) -> i32 {
    to[..from.len()].copy_from_slice(from);
    from.len() as i32
}

fn launch(
    actions: &mut Actions,
    kernel: &str,
    out: &View,
    from: &View,
    gone: &[bool],
    divisor: f64,
) -> Result<(), KernelError> {
    let split = Split::new(from, gone);
    let out_stride = signed(&split.result(out, gone)?);
    let Split { kept, reduced, columns, .. } = split;
    let (kept_stride, reduced_stride) = (signed(&split.kept_stride), signed(&split.reduced_stride));
    let (kept_count, reduced_count) =
        (kept.iter().product::<usize>() as i64, reduced.iter().product::<usize>() as i64);
    let (kept_shape, kept_strides) = join(&kept, &[kept_stride, out_stride], true)?;
    let (reduced_shape, steps) = join(&reduced, &[reduced_stride], true)?;
    let mut p = Reduce {
        kept: kept_count,
        reduced: reduced_count,
        divisor,
        columns: i32::from(columns),
        ..blank()
    };
    p.kept_rank = fill_shape(&mut p.kept_shape, &kept_shape);
    p.reduced_rank = fill_shape(&mut p.reduced_shape, &reduced_shape);
    p.step[..steps[0].len()].copy_from_slice(&steps[0]);
    p.from = Operand::strided(from, &kept_strides[0])?;
    p.out = Operand::strided(out, &kept_strides[1])?;
    if kept_count == 0 {
        return Ok(());
    }
    // A thread then adds at least eight terms.
    let (blocks, block, least) = if columns {
        ((kept_count + 31) / 32, [32, 16], 128)
    } else {
        (kept_count, [threads(reduced_count, 512), 1], 4096)
    };
    p.parts = Parts::new(blocks, reduced_count, least);
    let (at, count) = (std::mem::offset_of!(Reduce, parts), p.parts.count);
    let sums = (count, (count * kept_count * 8) as u64);
    actions.in_parts(Family::Reduce, kernel, (blocks, blocks), block, (&p, at), sums);
    Ok(())
}

/// The number of threads for `elements` elements: a power of two, at least a warp.
pub fn threads(elements: i64, most: u32) -> u32 {
    u32::try_from(elements.clamp(32, i64::from(most))).unwrap_or(32).next_power_of_two()
}

/// `max` and `min`: of all, of two tensors, or along a dimension with positions.
fn extreme(call: &Call<'_>, actions: &mut Actions, most: bool) -> Result<(), KernelError> {
    let name = if most { "max" } else { "min" };
    if call.operator.args.len() <= 1 {
        return reduce(call, actions, name, &everything(call)?);
    }
    let (out, from) = (output(call)?, tensor(call, 0)?);
    if let Ok(other) = tensor(call, 1) {
        let name = if most { "maximum" } else { "minimum" };
        return map(
            actions,
            is_floating(out),
            name,
            out,
            &[Input::View(from), Input::View(other)],
            &Extra::default(),
        );
    }
    let dim = dimension(int_or(call, 1, 0)?, from.shape.len())?;
    positions(actions, from, Some(dim), most, Some(out), result(call, 1)?)
}

fn arg_extreme(call: &Call<'_>, actions: &mut Actions, most: bool) -> Result<(), KernelError> {
    let (out, from) = (output(call)?, tensor(call, 0)?);
    let dim = match call.operator.args.get(1) {
        Some(Arg::Int(dim)) => Some(dimension(*dim, from.shape.len())?),
        _ => None,
    };
    positions(actions, from, dim, most, None, Some(out))
}

/// The extreme elements along `dim` (of all, without one) and where they first stand.
fn positions(
    actions: &mut Actions,
    from: &View,
    dim: Option<usize>,
    most: bool,
    values: Option<&View>,
    indices: Option<&View>,
) -> Result<(), KernelError> {
    if count(from) == 0 {
        return Err(invalid!("the largest of no elements"));
    }
    let gone: Vec<bool> = (0..from.shape.len()).map(|d| dim.is_none_or(|dim| d == dim)).collect();
    let (kept, reduced) = (pick(&from.shape, &gone, false), pick(&from.shape, &gone, true));
    let strides_of = |view: Option<&View>| -> Result<Vec<i64>, KernelError> {
        let Some(view) = view else { return Ok(vec![0; kept.len()]) };
        if view.shape == kept {
            Ok(signed(&view.stride))
        } else if view.shape.len() == gone.len()
            && pick(&view.shape, &gone, false) == kept
            && count(view) == kept.iter().product::<usize>()
        {
            Ok(signed(&pick(&view.stride, &gone, false)))
        } else {
            Err(invalid!(
                "a result of shape {:?} for an input of shape {:?}",
                view.shape,
                from.shape
            ))
        }
    };
    let all =
        [signed(&pick(&from.stride, &gone, false)), strides_of(values)?, strides_of(indices)?];
    let (kept_shape, strides) = join(&kept, &all, false)?;
    // Places are counted row-major.
    let (reduced_shape, steps) =
        join(&reduced, &[signed(&pick(&from.stride, &gone, true))], false)?;
    let mut p = Reduce {
        kept: kept.iter().product::<usize>() as i64,
        reduced: reduced.iter().product::<usize>() as i64,
        most: i32::from(most),
        ..blank()
    };
    p.kept_rank = fill_shape(&mut p.kept_shape, &kept_shape);
    p.reduced_rank = fill_shape(&mut p.reduced_shape, &reduced_shape);
    p.step[..steps[0].len()].copy_from_slice(&steps[0]);
    p.from = Operand::strided(from, &strides[0])?;
    p.out = values.map_or(Ok(Operand::number(0.0)), |v| Operand::strided(v, &strides[1]))?;
    p.index = indices.map_or(Ok(Operand::number(0.0)), |v| Operand::strided(v, &strides[2]))?;
    actions.launch(Family::Reduce, "reduce_place", p.kept, [threads(p.reduced, 256), 1], &p);
    Ok(())
}

fn cumsum(call: &Call<'_>, actions: &mut Actions) -> Result<(), KernelError> {
    let (out, from) = (output(call)?, tensor(call, 0)?);
    same_shape(out, from)?;
    if from.shape.is_empty() {
        return copy(actions, out, from);
    }
    let dim = dimension(int_or(call, 1, 0)?, from.shape.len())?;
    let gone: Vec<bool> = (0..from.shape.len()).map(|d| d == dim).collect();
    let kept = pick(&from.shape, &gone, false);
    let (shape, strides) = join(
        &kept,
        &[signed(&pick(&from.stride, &gone, false)), signed(&pick(&out.stride, &gone, false))],
        false,
    )?;
    let mut p = Reduce {
        kept: kept.iter().product::<usize>() as i64,
        reduced: from.shape[dim] as i64,
        ..blank()
    };
    p.kept_rank = fill_shape(&mut p.kept_shape, &shape);
    p.from = Operand::strided(from, &strides[0])?;
    p.out = Operand::strided(out, &strides[1])?;
    p.step[0] = from.stride[dim] as i64;
    p.out_step = out.stride[dim] as i64;
    if p.kept > 0 {
        let kernel = if is_floating(out) { "running_f_sum" } else { "running_i_sum" };
        actions.launch(Family::Reduce, kernel, (p.kept + 255) / 256, [256, 1], &p);
    }
    Ok(())
}
