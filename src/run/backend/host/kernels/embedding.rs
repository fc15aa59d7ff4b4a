//! Looking rows up by number, and adding gradients back to them.
//!
//! Every number is checked against the table; a bad one is an error.

use crate::backend::operators::arguments::{output, tensor};
use crate::backend::operators::error::data_error;
use crate::backend::operators::index::{self, EmbeddingBackward, Places, Rows, whole};
use crate::backend::operators::shapes::{at, dimension, each, select};
use crate::backend::operators::view::{Call, View};
use crate::backend::operators::{KernelError, Table, table};

use super::Kernel;
use super::elements::{BLOCK, Lane, copy, fill, parts, read_int};
use super::scatter::marked;

pub const TABLE: Table<Kernel> = table! {
    "embedding" => |call| look_up(&Rows::embedding(call)?),
    "embedding_backward" | "embedding_dense_backward" => embedding_backward,
    "index_select" => |call| look_up(&Rows::index_select(call)?),
    "gather" => gather,
    "index" => index_places,
};

/// `visit` with the place in `other` (of the indices' leading shape) and each checked index.
fn each_index(
    indices: &View,
    other: Vec<usize>,
    extent: usize,
    mut visit: impl FnMut(usize, usize) -> Result<(), KernelError>,
) -> Result<(), KernelError> {
    let mut outcome = Ok(());
    each(&whole(indices)?.shape, &[indices.stride.clone(), other], |[from, other]| {
        if outcome.is_ok() {
            let index = read_int(indices, from);
            outcome = match usize::try_from(index).ok().filter(|&i| i < extent) {
                Some(index) => visit(other, index),
                None => Err(data_error!("index {index} into {extent} rows")),
            };
        }
    });
    outcome
}

/// One row of `view`, which starts `offset` elements in and has the dimensions from `first` on.
fn row(view: &View, offset: usize, first: usize) -> View {
    View {
        data: at(view, offset),
        dtype: view.dtype,
        shape: view.shape[first..].to_vec(),
        stride: view.stride[first..].to_vec(),
    }
}

/// Copies row `index[…]` of a table to each place of the result.
fn look_up(of: &Rows<'_>) -> Result<(), KernelError> {
    // The indexed dimension first, in the result the indices' dimensions.
    let rank = of.indices.shape.len();
    let table = to_front(of.table, of.dim, 1);
    let out = to_front(of.out, of.dim, rank);
    each_index(of.indices, out.stride[..rank].to_vec(), table.shape[0], |to, index| {
        copy(&row(&out, to, rank), &row(&table, index * table.stride[0], 1))
    })
}

/// A view with dimensions `dim..dim + count` moved to the front.
fn to_front(view: &View, dim: usize, count: usize) -> View {
    let mut moved = view.clone();
    moved.shape[..dim + count].rotate_right(count);
    moved.stride[..dim + count].rotate_right(count);
    moved
}

fn embedding_backward(call: &Call<'_>) -> Result<(), KernelError> {
    let EmbeddingBackward { out, rows: (first, all), gradient: grad, indices, padding } =
        EmbeddingBackward::new(call)?;
    let rank = indices.shape.len();
    fill(out, 0.0)?;
    let (mut sums, mut more) = ([0.0f32; BLOCK], [0.0f32; BLOCK]);
    let (step, grad_step) = (out.stride[1], grad.stride[rank]);
    each_index(indices, grad.stride[..rank].to_vec(), all, |from, index| {
        let row = index.checked_sub(first).filter(|row| *row < out.shape[0]);
        let Some(row) = row.filter(|_| index as i64 != padding) else { return Ok(()) };
        for (first, n) in parts(out.shape[1]) {
            let slot = at(out, row * out.stride[0] + first * step);
            // SAFETY: the row is one of `out`'s, the part lies inside it and the gradient's row.
            unsafe {
                f32::load(out.dtype, slot, step, &mut sums[..n]);
                f32::load(
                    grad.dtype,
                    at(grad, from + first * grad_step),
                    grad_step,
                    &mut more[..n],
                );
                sums[..n].iter_mut().zip(&more).for_each(|(sum, g)| *sum += g);
                f32::store(out.dtype, slot, step, &sums[..n]);
            }
        }
        Ok(())
    })
}

fn gather(call: &Call<'_>) -> Result<(), KernelError> {
    let (out, from, indices) = (output(call)?, tensor(call, 0)?, tensor(call, 2)?);
    let dim = index::gather(call)?;
    let mut base = from.stride.clone();
    let step = std::mem::replace(&mut base[dim], 0);
    let mut outcome = Ok(());
    each(&out.shape, &[out.stride.clone(), indices.stride.clone(), base], |[to, place, base]| {
        let index = read_int(indices, place);
        match usize::try_from(index).ok().filter(|&i| i < from.shape[dim]) {
            Some(index) if outcome.is_ok() => {
                outcome = copy(
                    &row(out, to, out.shape.len()),
                    &row(from, base + index * step, from.shape.len()),
                )
            }
            Some(_) => {}
            None => outcome = Err(data_error!("index {index} into {} elements", from.shape[dim])),
        }
    });
    outcome
}

/// `visit` with the part of `picked` and the part of `table` at each place.
pub fn each_place(
    places: &Places<'_>,
    picked: &View,
    table: &View,
    mut visit: impl FnMut(&View, &View) -> Result<(), KernelError>,
) -> Result<(), KernelError> {
    let (first, rank) = (places.first, places.shape.len());
    for place in 0..places.shape.iter().product() {
        // The place's coordinates, from the last dimension on.
        let (mut rest, mut coordinates) = (place, vec![0; rank]);
        for d in (0..rank).rev() {
            (rest, coordinates[d]) = (rest / places.shape[d], rest % places.shape[d]);
        }
        let (mut part, mut from) = (picked.clone(), table.clone());
        for &c in &coordinates {
            part = select(&part, first, c)?;
        }
        for (view, stride) in &places.indices {
            let extent = from.shape[first];
            let index = read_int(view, coordinates.iter().zip(stride).map(|(c, s)| c * s).sum());
            let index = dimension(index, extent)
                .ok()
                .filter(|&i| i < extent)
                .ok_or_else(|| data_error!("index {index} into {extent} rows"))?;
            from = select(&from, first, index)?;
        }
        visit(&part, &from)?;
    }
    Ok(())
}

/// `self[i, j, …]`.
fn index_places(call: &Call<'_>) -> Result<(), KernelError> {
    let (out, table) = (output(call)?, tensor(call, 0)?);
    if let Some((mask, first)) = index::mask(call)? {
        let places = marked(table, &mask, first)?;
        let before: usize = table.shape[..first].iter().product();
        if out.shape.get(first).is_none_or(|n| n * before != places.len()) {
            return Err(data_error!(
                "a mask picks {} elements where {:?} were recorded; how many it picks is part of the recording",
                places.len(),
                out.shape
            ));
        }
        let rows = out.shape[..=first].to_vec();
        let mut at = 0;
        let mut outcome = Ok(());
        each(&rows, &[&out.stride[..=first]], |[to]| {
            if outcome.is_ok() {
                outcome = copy(&row(out, to, first + 1), &places[at]);
            }
            at += 1;
        });
        return outcome;
    }
    match Places::new(call, table, &out.shape)? {
        None => copy(out, table),
        Some(places) => each_place(&places, out, table, copy),
    }
}
