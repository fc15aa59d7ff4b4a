//! Reductions over dimensions, extremes with places, and running sums.
//!
//! Not for: losses and norms.

use super::super::super::host::kernels::arguments::{Input, int_or, ints};
use super::super::super::host::kernels::elements::{count, dimension};
use super::super::super::host::kernels::reduce::without_dims;
use super::super::super::host::view::{Call, View};
use super::super::launch::{Actions, Family, Operand, RANK, Reduce};
use super::Emit;
use super::args::{is_floating, output, result, tensor};
use super::map::{Extra, copy, join, map, signed};
use crate::job::Arg;

/// What makes the actions of `kind`.
pub fn find(kind: &str) -> Option<Emit> {
    Some(match kind.strip_prefix("aten::")? {
        "sum" => |c, a| {
            let gone = if without_dims(c) { everything(c)? } else { chosen(c)? };
            sum(a, output(c)?, tensor(c, 0)?, &gone, 1.0)
        },
        "mean" => |c, a| {
            let (out, from) = (output(c)?, tensor(c, 0)?);
            let gone = if without_dims(c) { everything(c)? } else { chosen(c)? };
            let terms: usize =
                from.shape.iter().zip(&gone).filter(|(_, g)| **g).map(|(n, _)| *n).product();
            if !is_floating(out) {
                return Err("a mean that is not floating".into());
            }
            sum(a, out, from, &gone, terms as f64)
        },
        "prod" => |c, a| {
            let gone = if c.operator.args.len() <= 2 { everything(c)? } else { chosen(c)? };
            reduce(a, "prod", output(c)?, tensor(c, 0)?, &gone, 1.0)
        },
        "amax" => |c, a| reduce(a, "max", output(c)?, tensor(c, 0)?, &chosen(c)?, 1.0),
        "amin" => |c, a| reduce(a, "min", output(c)?, tensor(c, 0)?, &chosen(c)?, 1.0),
        "all" => |c, a| truth(c, a, "all"),
        "any" => |c, a| truth(c, a, "any"),
        "max" => |c, a| extreme(c, a, true),
        "min" => |c, a| extreme(c, a, false),
        "argmax" => |c, a| arg_extreme(c, a, true),
        "argmin" => |c, a| arg_extreme(c, a, false),
        "cumsum" | "cumsum_" => cumsum,
        _ => return None,
    })
}

fn everything(call: &Call<'_>) -> Result<Vec<bool>, String> {
    Ok(vec![true; tensor(call, 0)?.shape.len()])
}

/// The dimensions named in argument 1, all of them when it names none, as one flag for each.
fn chosen(call: &Call<'_>) -> Result<Vec<bool>, String> {
    let (rank, named) = (tensor(call, 0)?.shape.len(), ints(call, 1)?);
    let mut chosen = vec![named.is_empty(); rank];
    for dim in named {
        let dim = dimension(dim, rank)?;
        if let Some(slot) = chosen.get_mut(dim) {
            *slot = true;
        }
    }
    Ok(chosen)
}

fn truth(call: &Call<'_>, actions: &mut Actions, name: &str) -> Result<(), String> {
    let gone = if call.operator.args.len() <= 1 { everything(call)? } else { chosen(call)? };
    reduce(actions, name, output(call)?, tensor(call, 0)?, &gone, 1.0)
}

/// The sum over dimensions in the wider of the two types, divided.
pub fn sum(
    actions: &mut Actions,
    out: &View,
    from: &View,
    gone: &[bool],
    divisor: f64,
) -> Result<(), String> {
    let float = is_floating(from) || is_floating(out);
    launch(actions, if float { "reduce_f_sum" } else { "reduce_i_sum" }, out, from, gone, divisor)
}

fn reduce(
    actions: &mut Actions,
    name: &str,
    out: &View,
    from: &View,
    gone: &[bool],
    divisor: f64,
) -> Result<(), String> {
    launch(
        actions,
        &format!("reduce_{}_{name}", if is_floating(from) { "f" } else { "i" }),
        out,
        from,
        gone,
        divisor,
    )
}

/// Of extents or strides, those that go (or stay).
fn pick<T: Copy>(values: &[T], gone: &[bool], which: bool) -> Vec<T> {
    values.iter().zip(gone).filter(|(_, g)| **g == which).map(|(v, _)| *v).collect()
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
) -> Result<(), String> {
    let (kept, reduced) = (pick(&from.shape, gone, false), pick(&from.shape, gone, true));
    let out_stride = if out.shape == kept {
        signed(&out.stride)
    } else if out.shape.len() == gone.len()
        && pick(&out.shape, gone, false) == kept
        && pick(&out.shape, gone, true).iter().all(|&n| n == 1)
    {
        signed(&pick(&out.stride, gone, false))
    } else {
        return Err(format!("reducing shape {:?} does not give {:?}", from.shape, out.shape));
    };
    let (kept_stride, reduced_stride) =
        (signed(&pick(&from.stride, gone, false)), signed(&pick(&from.stride, gone, true)));
    let nearest = |strides: &[i64], shape: &[usize]| {
        strides
            .iter()
            .zip(shape)
            .filter(|&(&s, &n)| n > 1 && s > 0)
            .map(|(&s, _)| s)
            .min()
            .unwrap_or(i64::MAX)
    };
    let columns = nearest(&reduced_stride, &reduced) > nearest(&kept_stride, &kept);
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
    if columns {
        actions.launch(Family::Reduce, kernel, (kept_count + 31) / 32, [32, 16], &p);
    } else {
        actions.launch(Family::Reduce, kernel, kept_count, [threads(reduced_count, 512), 1], &p);
    }
    Ok(())
}

/// A power of two of threads for so many elements, at least a warp.
pub fn threads(elements: i64, most: u32) -> u32 {
    u32::try_from(elements.clamp(32, i64::from(most))).unwrap_or(32).next_power_of_two()
}

/// `max` and `min`: of all, of two tensors, or along a dimension with positions.
fn extreme(call: &Call<'_>, actions: &mut Actions, most: bool) -> Result<(), String> {
    let name = if most { "max" } else { "min" };
    if call.operator.args.len() <= 1 {
        return reduce(actions, name, output(call)?, tensor(call, 0)?, &everything(call)?, 1.0);
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

fn arg_extreme(call: &Call<'_>, actions: &mut Actions, most: bool) -> Result<(), String> {
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
) -> Result<(), String> {
    if count(from) == 0 {
        return Err("the largest of no elements".into());
    }
    let gone: Vec<bool> = (0..from.shape.len()).map(|d| dim.is_none_or(|dim| d == dim)).collect();
    let (kept, reduced) = (pick(&from.shape, &gone, false), pick(&from.shape, &gone, true));
    let strides_of = |view: Option<&View>| -> Result<Vec<i64>, String> {
        let Some(view) = view else { return Ok(vec![0; kept.len()]) };
        if view.shape == kept {
            Ok(signed(&view.stride))
        } else if view.shape.len() == gone.len()
            && pick(&view.shape, &gone, false) == kept
            && count(view) == kept.iter().product::<usize>()
        {
            Ok(signed(&pick(&view.stride, &gone, false)))
        } else {
            Err(format!(
                "a result of shape {:?} for an input of shape {:?}",
                view.shape, from.shape
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

fn cumsum(call: &Call<'_>, actions: &mut Actions) -> Result<(), String> {
    let (out, from) = (output(call)?, tensor(call, 0)?);
    super::args::expect_shape(from, &out.shape)?;
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
