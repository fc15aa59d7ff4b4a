//! Looking rows up by number, and adding gradients back to them.
//!
//! Numbers are checked on the device, which reports a bad one after the iteration. Not for: masks.

use super::super::super::host::kernels::arguments::{flag, int_or};
use super::super::super::host::kernels::elements::{broadcast, dimension, same_shape};
use super::super::super::host::view::{Call, View};
use super::super::launch::{Actions, Family, Index, Operand, RANK, Rows};
use super::Emit;
use super::args::{elements, floating, is_floating, output, tensor, tensors};
use super::map::{copy, join, signed};
use super::rows::{Row, params};
use crate::job::Dtype;

/// What makes the actions of `kind`.
pub fn find(kind: &str) -> Option<Emit> {
    Some(match kind.strip_prefix("aten::")? {
        "embedding" => |c, a| rows(a, output(c)?, tensor(c, 0)?, tensor(c, 1)?, 0),
        "embedding_backward" | "embedding_dense_backward" => embedding_backward,
        "index_select" => |c, a| {
            let (out, table, indices) = (output(c)?, tensor(c, 0)?, tensor(c, 2)?);
            let dim = dimension(int_or(c, 1, 0)?, table.shape.len())?;
            if dim >= table.shape.len()
                || out.shape.len() != table.shape.len()
                || indices.shape.len() != 1
            {
                return Err(format!(
                    "rows of {:?} by indices of {:?} into {:?}",
                    table.shape, indices.shape, out.shape
                ));
            }
            rows(a, out, table, indices, dim)
        },
        "gather" => gather,
        "index" => index,
        _ => return None,
    })
}

fn whole(view: &View) -> Result<&View, String> {
    if matches!(view.dtype, Dtype::I64 | Dtype::I32) {
        Ok(view)
    } else {
        Err(format!("indices are {:?}, not whole numbers", view.dtype))
    }
}

/// `out[i] = from[place + steps of the numbers]`, with all strides by `out`'s dimensions.
fn look_up(
    actions: &mut Actions,
    out: &View,
    from: (&View, Vec<i64>),
    numbers: &[(&View, Vec<i64>, i64, usize)],
    wrap: bool,
) -> Result<(), String> {
    let mut all = vec![signed(&out.stride), from.1];
    all.extend(numbers.iter().map(|n| n.1.clone()));
    if numbers.len() > 4 {
        return Err("more than four indices".into());
    }
    let (shape, strides) = join(&out.shape, &all, false)?;
    let mut p = Index {
        count: elements(out),
        rank: shape.len() as i32,
        indices: numbers.len() as i32,
        shape: [1; RANK],
        out: Operand::strided(out, &strides[0])?,
        from: Operand::strided(from.0, &strides[1])?,
        index: [Operand::number(0.0); 4],
        step: [0; 4],
        extent: [0; 4],
        wrap: i64::from(wrap),
        status: actions.status,
        item: actions.item,
    };
    p.shape[..shape.len()].copy_from_slice(&shape);
    for (k, (view, _, step, extent)) in numbers.iter().enumerate() {
        p.index[k] = Operand::strided(whole(view)?, &strides[k + 2])?;
        (p.step[k], p.extent[k]) = (*step, *extent as i64);
    }
    let kernel = if is_floating(out) { "f_look_up" } else { "i_look_up" };
    if p.count > 0 && p.extent[..numbers.len()].contains(&0) {
        return Err("looking up in no rows".into());
    }
    actions.launch(Family::Index, kernel, (p.count + 255) / 256, [256, 1], &p);
    Ok(())
}

/// Rows of dimension `dim` of a table: the indices' dimensions take its place.
fn rows(
    actions: &mut Actions,
    out: &View,
    table: &View,
    indices: &View,
    dim: usize,
) -> Result<(), String> {
    let rank = indices.shape.len();
    let fits = dim < table.shape.len()
        && out.shape.len() + 1 == table.shape.len() + rank
        && out.shape[..dim] == table.shape[..dim]
        && out.shape[dim..dim + rank] == indices.shape[..]
        && out.shape[dim + rank..] == table.shape[dim + 1..];
    if !fits {
        return Err(format!(
            "rows of {:?} by indices of {:?} don't give {:?}",
            table.shape, indices.shape, out.shape
        ));
    }
    let mut from = signed(&table.stride);
    from.splice(dim..=dim, vec![0; rank]);
    let mut places = vec![0; out.shape.len()];
    places[dim..dim + rank].copy_from_slice(&signed(&indices.stride));
    look_up(
        actions,
        out,
        (table, from),
        &[(indices, places, table.stride[dim] as i64, table.shape[dim])],
        false,
    )
}

fn embedding_backward(call: &Call<'_>, actions: &mut Actions) -> Result<(), String> {
    let (out, grad, indices) =
        (floating(output(call)?)?, floating(tensor(call, 0)?)?, whole(tensor(call, 1)?)?);
    let padding = int_or(call, 3, -1)?;
    if flag(call, 4) {
        return Err("gradients scaled by frequency are not supported".into());
    }
    let rank = indices.shape.len();
    if out.shape.len() != 2
        || grad.shape.len() != rank + 1
        || grad.shape[..rank] != indices.shape
        || grad.shape[rank] != out.shape[1]
    {
        return Err(format!(
            "gradients of {:?} for indices of {:?} and a table of {:?}",
            grad.shape, indices.shape, out.shape
        ));
    }
    let gradient = Row {
        view: Some(grad),
        value: 0.0,
        stride: signed(&grad.stride[..rank]),
        step: grad.stride[rank] as i64,
    };
    let table = Row { view: Some(out), value: 0.0, stride: Vec::new(), step: out.stride[1] as i64 };
    let rows = [table, gradient, Row::each(Some(indices), &indices.stride)];
    let mut p: Rows = params(actions, &indices.shape, out.shape[1] as i64, &rows)?;
    // A block finds its own row of the table by this.
    p.o[0].stride[0] = out.stride[0] as i64;
    p.k = [padding, out.shape[0] as i64, 0, 0];
    actions.launch(Family::Index, "embedding_backward", out.shape[0] as i64, [256, 1], &p);
    Ok(())
}

fn gather(call: &Call<'_>, actions: &mut Actions) -> Result<(), String> {
    let (out, from, indices) = (output(call)?, tensor(call, 0)?, tensor(call, 2)?);
    same_shape(out, whole(indices)?)?;
    let dim = dimension(int_or(call, 1, 0)?, from.shape.len())?;
    let fits = out.shape.len() == from.shape.len()
        && (0..from.shape.len()).all(|d| d == dim || out.shape[d] <= from.shape[d]);
    if !fits || from.shape.is_empty() {
        return Err(format!("gathering {:?} from {:?}", out.shape, from.shape));
    }
    let mut base = signed(&from.stride);
    let step = std::mem::replace(&mut base[dim], 0);
    look_up(
        actions,
        out,
        (from, base),
        &[(indices, signed(&indices.stride), step, from.shape[dim])],
        false,
    )
}

/// `self[i, j, …]`: whole-number tensors for neighbouring dimensions, broadcast together.
fn index(call: &Call<'_>, actions: &mut Actions) -> Result<(), String> {
    let (out, table, list) = (output(call)?, tensor(call, 0)?, tensors(call, 1)?);
    let given: Vec<(usize, &View)> =
        list.iter().enumerate().filter_map(|(d, v)| Some((d, v.as_ref()?))).collect();
    let Some(&(first, _)) = given.first() else { return copy(actions, out, table) };
    if given.iter().enumerate().any(|(i, (d, _))| *d != first + i)
        || first + given.len() > table.shape.len()
    {
        return Err("indices of dimensions that are not neighbours are not supported".into());
    }
    let rank = given.iter().map(|(_, v)| v.shape.len()).max().unwrap_or(0);
    let (before, after) = (&table.shape[..first], &table.shape[first + given.len()..]);
    if out.shape.len() != before.len() + rank + after.len()
        || !out.shape.starts_with(before)
        || !out.shape.ends_with(after)
    {
        return Err(format!("indexing {:?} into {:?}", table.shape, out.shape));
    }
    let places = &out.shape[first..first + rank];
    let mut from = signed(&table.stride);
    from.splice(first..first + given.len(), vec![0; rank]);
    let mut numbers = Vec::new();
    for (d, view) in given {
        let mut stride = vec![0; out.shape.len()];
        stride[first..first + rank].copy_from_slice(&signed(&broadcast(whole(view)?, places)?));
        numbers.push((view, stride, table.stride[d] as i64, table.shape[d]));
    }
    look_up(actions, out, (table, from), &numbers, true)
}
