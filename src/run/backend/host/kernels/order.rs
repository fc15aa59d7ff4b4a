//! Sorting, and the gradients of what picks elements by their order.

use std::cmp::Ordering;

use crate::backend::operators::KernelError;
use crate::backend::operators::arguments::{flag, int_or, output, result, tensor};
use crate::backend::operators::error::{data_error, invalid};
use crate::backend::operators::index::whole;
use crate::backend::operators::shapes::{dimension, each};
use crate::backend::operators::view::{Call, View};
use crate::backend::operators::{Table, table};
use crate::job::Arg;

use super::Kernel;
use super::elements::{copy_element, fill, read, read_int, write, write_int};

pub const TABLE: Table<Kernel> = table! {
    "sort" => |c| {
        // The form with a flag for stability has it before the dimension.
        let shift = usize::from(c.operator.args.len() == 4);
        sorted(c, 1 + shift, flag(c, 2 + shift)?, [Some(output(c)?), result(c, 1)?])
    },
    "msort" => |c| sorted(c, usize::MAX, false, [Some(output(c)?), None]),
    "argsort" => |c| {
        let shift = usize::from(c.operator.args.len() == 4);
        sorted(c, 1 + shift, flag(c, 2 + shift)?, [None, Some(output(c)?)])
    },
    "topk" => |c| {
        let largest = !matches!(c.operator.args.get(3), Some(Arg::Bool(false)));
        sorted(c, 2, largest, [Some(output(c)?), result(c, 1)?])
    },
    "value_selecting_reduction_backward" => selected_backward,
    "gather_backward" => |c| gathered_backward(c, tensor(c, 3)?, int_or(c, 2, 0)?),
};

/// Orders the elements along the dimension in argument `dim` (0 without it), stably; NaN counts as
/// the largest. A result may have room for the first of them only.
fn sorted(
    call: &Call<'_>,
    dim: usize,
    falling: bool,
    [values, indices]: [Option<&View>; 2],
) -> Result<(), KernelError> {
    let from = tensor(call, 0)?;
    let rank = from.shape.len();
    let default = if dim == usize::MAX { 0 } else { -1 };
    let dim = dimension(int_or(call, dim, default)?, rank)?;
    let (length, step) = match from.shape.get(dim) {
        Some(&n) => (n, from.stride[dim]),
        None => (1, 0),
    };
    let kept = [values, indices].into_iter().flatten().next().ok_or("it has no output")?;
    let count = kept.shape.get(dim).copied().unwrap_or(1);
    let mut outer = from.shape.clone();
    let mut strides = [from.stride.clone(), vec![0; rank], vec![0; rank]];
    for (view, stride) in [values, indices].into_iter().zip(&mut strides[1..]) {
        let Some(view) = view else { continue };
        let fits = view.shape.len() == rank
            && (0..rank).all(|d| view.shape[d] == if d == dim { count } else { from.shape[d] });
        if !fits || count > length {
            return Err(invalid!("{:?} ordered into {:?}", from.shape, view.shape));
        }
        stride.clone_from(&view.stride);
    }
    if let Some(extent) = outer.get_mut(dim) {
        *extent = 1;
    }
    let steps = [values, indices].map(|v| v.and_then(|v| v.stride.get(dim).copied()).unwrap_or(0));
    each(&outer, &strides, |[first, value, index]| {
        let mut order: Vec<usize> = (0..length).collect();
        let keys: Vec<f64> = order.iter().map(|i| read(from, first + i * step)).collect();
        let compare = |a: f64, b: f64| match (a.is_nan(), b.is_nan()) {
            (false, false) => a.partial_cmp(&b).unwrap_or(Ordering::Equal),
            (a, b) => a.cmp(&b),
        };
        order.sort_by(|&a, &b| {
            let order = compare(keys[a], keys[b]);
            if falling { order.reverse() } else { order }
        });
        for (at, &place) in order.iter().take(count).enumerate() {
            if let Some(view) = values {
                copy_element(view, value + at * steps[0], from, first + place * step);
            }
            if let Some(view) = indices {
                write_int(view, index + at * steps[1], place as i64);
            }
        }
    });
    Ok(())
}

/// The gradient of what `max`, `topk` or `sort` picked: `(grad, dim, indices, sizes, keepdim)`.
fn selected_backward(call: &Call<'_>) -> Result<(), KernelError> {
    let (out, indices) = (output(call)?, tensor(call, 2)?);
    let dim = dimension(int_or(call, 1, 0)?, out.shape.len())?;
    let with_dim = |view: &View| {
        let mut view = view.clone();
        if view.shape.len() + 1 == out.shape.len() {
            view.shape.insert(dim, 1);
            view.stride.insert(dim, 0);
        }
        view
    };
    spread(out, &with_dim(tensor(call, 0)?), &with_dim(indices), dim)
}

fn gathered_backward(call: &Call<'_>, indices: &View, dim: i64) -> Result<(), KernelError> {
    let out = output(call)?;
    spread(out, tensor(call, 0)?, indices, dimension(dim, out.shape.len())?)
}

/// Adds each gradient to the element along `dim` that its index names, in zeros.
fn spread(out: &View, grad: &View, indices: &View, dim: usize) -> Result<(), KernelError> {
    fill(out, 0.0)?;
    let inside = indices.shape.len() == out.shape.len()
        && (0..out.shape.len()).all(|d| d == dim || indices.shape[d] <= out.shape[d]);
    if grad.shape != whole(indices)?.shape || !inside {
        return Err(invalid!("gradients of {:?} into {:?}", grad.shape, out.shape));
    }
    let mut base = out.stride.clone();
    let (step, extent) = match base.get_mut(dim) {
        Some(step) => (std::mem::replace(step, 0), out.shape[dim]),
        None => (0, 1),
    };
    let mut outcome = Ok(());
    each(&grad.shape, &[grad.stride.clone(), indices.stride.clone(), base], |[from, place, to]| {
        let index = read_int(indices, place);
        match usize::try_from(index).ok().filter(|&i| i < extent) {
            Some(index) => {
                let to = to + index * step;
                write(out, to, (read(out, to) + read(grad, from)) as f32);
            }
            None => outcome = Err(data_error!("index {index} into {extent} elements")),
        }
    });
    outcome
}
