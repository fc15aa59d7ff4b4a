//! Looking rows up by number, and adding gradients back to them.
//!
//! Numbers are checked on the device, which reports a bad one after the iteration.

use crate::backend::operators::arguments::{is_floating, output, tensor};
use crate::backend::operators::error::{data_error, unsupported};
use crate::backend::operators::index::{self, EmbeddingBackward, Places};
use crate::backend::operators::shapes::count;
use crate::backend::operators::view::{Call, View};
use crate::backend::operators::{KernelError, Table, table};

use super::super::launch::{Actions, Family};
use super::super::params::{Index, Operand, RANK, Rows};
use super::Emit;
use super::map::{copy, join, signed};
use super::rows::{Row, params};

pub const TABLE: Table<Emit> = table! {
    "embedding" => |c, a| rows(a, &index::Rows::embedding(c)?),
    "embedding_backward" | "embedding_dense_backward" => embedding_backward,
    "index_select" => |c, a| rows(a, &index::Rows::index_select(c)?),
    "gather" => gather,
    "index" => places,
};

/// `out[i] = from[place + steps of the numbers]`, with all strides by `out`'s dimensions.
fn look_up(
    actions: &mut Actions,
    out: &View,
    from: (&View, Vec<i64>),
    numbers: &[(&View, Vec<i64>, i64, usize)],
    wrap: bool,
) -> Result<(), KernelError> {
    let mut all = vec![signed(&out.stride), from.1];
    all.extend(numbers.iter().map(|n| n.1.clone()));
    if numbers.len() > 4 {
        return Err(unsupported!("more than four indices"));
    }
    let (shape, strides) = join(&out.shape, &all, false)?;
    let mut p = Index {
        count: count(out) as i64,
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
        p.index[k] = Operand::strided(view, &strides[k + 2])?;
        (p.step[k], p.extent[k]) = (*step, *extent as i64);
    }
    let kernel = if is_floating(out) { "f_look_up" } else { "i_look_up" };
    if p.count > 0 && p.extent[..numbers.len()].contains(&0) {
        return Err(data_error!("looking up in no rows"));
    }
    actions.launch(Family::Index, kernel, (p.count + 255) / 256, [256, 1], &p);
    Ok(())
}

/// A table's strides by the result's dimensions. The numbers' dimensions take the place of those
/// that are looked up, `count` from `first` on, and are steps of none.
fn strides(table: &View, first: usize, count: usize, out: &View) -> Vec<i64> {
    let own = signed(&table.stride);
    let (before, behind) = (&own[..first], &own[first + count..]);
    let mut all = vec![0; out.shape.len()];
    all[..first].copy_from_slice(before);
    let end = all.len() - behind.len();
    all[end..].copy_from_slice(behind);
    all
}

/// Rows of a table: in the result the indices' dimensions take the place of the table's.
fn rows(actions: &mut Actions, of: &index::Rows<'_>) -> Result<(), KernelError> {
    let (rank, dim) = (of.indices.shape.len(), of.dim);
    let from = strides(of.table, dim, 1, of.out);
    let mut places = vec![0; of.out.shape.len()];
    places[dim..dim + rank].copy_from_slice(&signed(&of.indices.stride));
    let numbers = [(of.indices, places, of.table.stride[dim] as i64, of.table.shape[dim])];
    look_up(actions, of.out, (of.table, from), &numbers, false)
}

/// As in kernels/index.cu: the table's rows of a block.
const TABLE_ROWS: i64 = 16;

fn embedding_backward(call: &Call<'_>, actions: &mut Actions) -> Result<(), KernelError> {
    let EmbeddingBackward { out, rows: (first, all), gradient, indices, padding } =
        EmbeddingBackward::new(call)?;
    let rank = indices.shape.len();
    let gradient = Row {
        view: Some(gradient),
        value: 0.0,
        stride: signed(&gradient.stride[..rank]),
        step: gradient.stride[rank] as i64,
    };
    let table = Row { view: Some(out), value: 0.0, stride: Vec::new(), step: out.stride[1] as i64 };
    let rows = [table, gradient, Row::each(Some(indices), &indices.stride)];
    let mut p: Rows = params(actions, &indices.shape, out.shape[1] as i64, &rows)?;
    // A block finds its rows of the table by this.
    p.o[0].stride[0] = out.stride[0] as i64;
    p.k = [padding, out.shape[0] as i64, first as i64, all as i64];
    let blocks = (out.shape[0] as i64 + TABLE_ROWS - 1) / TABLE_ROWS;
    actions.launch(Family::Index, "embedding_backward", blocks, [256, 1], &p);
    Ok(())
}

fn gather(call: &Call<'_>, actions: &mut Actions) -> Result<(), KernelError> {
    let (out, from, indices) = (output(call)?, tensor(call, 0)?, tensor(call, 2)?);
    let dim = index::gather(call)?;
    let mut base = signed(&from.stride);
    let step = std::mem::replace(&mut base[dim], 0);
    let numbers = [(indices, signed(&indices.stride), step, from.shape[dim])];
    look_up(actions, out, (from, base), &numbers, false)
}

/// `self[i, j, …]`.
fn places(call: &Call<'_>, actions: &mut Actions) -> Result<(), KernelError> {
    let (out, table) = (output(call)?, tensor(call, 0)?);
    let Some(Places { first, shape, indices }) = Places::new(call, table, &out.shape)? else {
        return copy(actions, out, table);
    };
    let from = strides(table, first, indices.len(), out);
    let mut numbers = Vec::new();
    for (d, (view, steps)) in (first..).zip(indices) {
        let mut stride = vec![0; out.shape.len()];
        stride[first..first + shape.len()].copy_from_slice(&signed(&steps));
        numbers.push((view, stride, table.stride[d] as i64, table.shape[d]));
    }
    look_up(actions, out, (table, from), &numbers, true)
}
