//! Looking rows up by number, and adding gradients back to them.
//!
//! Every number is checked against the table; a bad one is an error. Not for: masks.

use super::super::view::{Call, View};
use super::Kernel;
use super::arguments::{flag, floating, int_or, output, tensor, tensors};
use super::elements::{
    BLOCK, Lane, at, broadcast, copy, dimension, each, fill, narrow, parts, read_int, same_shape,
};
use crate::job::Dtype;

/// The kernel for `kind`.
pub fn find(kind: &str) -> Option<Kernel> {
    let kernel: Kernel = match kind.strip_prefix("aten::")? {
        "embedding" => embedding,
        "embedding_backward" | "embedding_dense_backward" => embedding_backward,
        "index_select" => index_select,
        "gather" => gather,
        "index" => index,
        _ => return None,
    };
    Some(kernel)
}

fn whole(view: &View) -> Result<&View, String> {
    if matches!(view.dtype, Dtype::I64 | Dtype::I32) {
        Ok(view)
    } else {
        Err(format!("indices are {:?}, not whole numbers", view.dtype))
    }
}

/// `visit` with the place in `other` (of the indices' leading shape) and each checked index.
fn each_index(
    indices: &View,
    other: Vec<usize>,
    extent: usize,
    mut visit: impl FnMut(usize, usize) -> Result<(), String>,
) -> Result<(), String> {
    let mut outcome = Ok(());
    each(&whole(indices)?.shape, &[indices.stride.clone(), other], |[from, other]| {
        if outcome.is_ok() {
            let index = read_int(indices, from);
            outcome = match usize::try_from(index).ok().filter(|&i| i < extent) {
                Some(index) => visit(other, index),
                None => Err(format!("index {index} into {extent} rows")),
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

/// Copies row `index[…]` of dimension 0 of `table` to each place of `out`.
fn look_up(out: &View, table: &View, indices: &View) -> Result<(), String> {
    let rank = indices.shape.len();
    let (lead, rest) =
        out.shape.split_at_checked(rank).ok_or("a result of fewer dimensions than the indices")?;
    let (extent, width) = table.shape.split_first().ok_or("a table without dimensions")?;
    if lead != indices.shape || rest != width {
        return Err(format!(
            "rows of {:?} by indices of {:?} don't give {:?}",
            table.shape, indices.shape, out.shape
        ));
    }
    each_index(indices, out.stride[..rank].to_vec(), *extent, |to, index| {
        copy(&row(out, to, rank), &row(table, index * table.stride[0], 1))
    })
}

fn embedding(call: &Call<'_>) -> Result<(), String> {
    look_up(output(call)?, tensor(call, 0)?, tensor(call, 1)?)
}

fn embedding_backward(call: &Call<'_>) -> Result<(), String> {
    let (out, grad, indices) =
        (floating(output(call)?)?, floating(tensor(call, 0)?)?, tensor(call, 1)?);
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
    fill(out, 0.0)?;
    let (mut sums, mut more) = ([0.0f32; BLOCK], [0.0f32; BLOCK]);
    let (step, grad_step) = (out.stride[1], grad.stride[rank]);
    each_index(indices, grad.stride[..rank].to_vec(), out.shape[0], |from, index| {
        if index as i64 == padding {
            return Ok(());
        }
        for (first, n) in parts(out.shape[1]) {
            let slot = at(out, index * out.stride[0] + first * step);
            // SAFETY: the index is checked against the table, the part lies inside its row and the gradient's.
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

/// A view with dimension `dim` moved to the front.
fn to_front(view: &View, dim: usize) -> View {
    let mut moved = view.clone();
    moved.shape[..=dim].rotate_right(1);
    moved.stride[..=dim].rotate_right(1);
    moved
}

fn index_select(call: &Call<'_>) -> Result<(), String> {
    let (out, table, indices) = (output(call)?, tensor(call, 0)?, tensor(call, 2)?);
    let dim = dimension(int_or(call, 1, 0)?, table.shape.len())?;
    if dim >= table.shape.len() || out.shape.len() != table.shape.len() || indices.shape.len() != 1
    {
        return Err(format!(
            "rows of {:?} by indices of {:?} into {:?}",
            table.shape, indices.shape, out.shape
        ));
    }
    look_up(&to_front(out, dim), &to_front(table, dim), indices)
}

fn gather(call: &Call<'_>) -> Result<(), String> {
    let (out, from, indices) = (output(call)?, tensor(call, 0)?, tensor(call, 2)?);
    same_shape(out, whole(indices)?)?;
    let dim = dimension(int_or(call, 1, 0)?, from.shape.len())?;
    let fits = out.shape.len() == from.shape.len()
        && (0..from.shape.len()).all(|d| d == dim || out.shape[d] <= from.shape[d]);
    if !fits || from.shape.is_empty() {
        return Err(format!("gathering {:?} from {:?}", out.shape, from.shape));
    }
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
            None => outcome = Err(format!("index {index} into {} elements", from.shape[dim])),
        }
    });
    outcome
}

/// `self[i, j, …]`: whole-number tensors for the leading dimensions, broadcast together, or one for any dimension.
fn index(call: &Call<'_>) -> Result<(), String> {
    let (out, table, list) = (output(call)?, tensor(call, 0)?, tensors(call, 1)?);
    let given: Vec<(usize, &View)> =
        list.iter().enumerate().filter_map(|(d, v)| Some((d, v.as_ref()?))).collect();
    let Some(&(first, _)) = given.first() else { return copy(out, table) };
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
    let total: usize = places.iter().product();
    let strides: Vec<Vec<usize>> =
        given.iter().map(|(_, v)| broadcast(whole(v)?, places)).collect::<Result<_, _>>()?;
    for place in 0..total {
        // The place's coordinates, from the last dimension on.
        let (mut rest, mut coordinates) = (place, vec![0; rank]);
        for d in (0..rank).rev() {
            (rest, coordinates[d]) = (rest / places[d], rest % places[d]);
        }
        let (mut to, mut from) = (out.clone(), table.clone());
        for &c in &coordinates {
            to = narrow(&to, first, c..c + 1)?;
            to.shape.remove(first);
            to.stride.remove(first);
        }
        for ((_, view), stride) in given.iter().zip(&strides) {
            let extent = from.shape[first];
            let index = read_int(view, coordinates.iter().zip(stride).map(|(c, s)| c * s).sum());
            let index = dimension(index, extent)
                .ok()
                .filter(|&i| i < extent)
                .ok_or_else(|| format!("index {index} into {extent} rows"))?;
            from = narrow(&from, first, index..index + 1)?;
            from.shape.remove(first);
            from.stride.remove(first);
        }
        copy(&to, &from)?;
    }
    Ok(())
}
