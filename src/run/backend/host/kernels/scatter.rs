//! Writing and adding elements at places given by number.
//!
//! Every number is checked against the extent; elements are written in row-major order of the
//! indices, so the last of several writes to one place stays.

use crate::backend::operators::KernelError;
use crate::backend::operators::arguments::{
    Input, flag, input, int_or, is_floating, number_or, output, tensor, text,
};
use crate::backend::operators::error::{data_error, invalid, unsupported};
use crate::backend::operators::index::{self, Places, whole};
use crate::backend::operators::shapes::{at, broadcast, dimension, each, same_shape, select};
use crate::backend::operators::view::{Call, View};
use crate::backend::operators::{Table, table};

use super::Kernel;
use super::elements::{copy, fill, map2, read, read_int, write};
use super::embedding::each_place;

pub const TABLE: Table<Kernel> = table! {
    "scatter" | "scatter_" => |c| {
        match text(c, 4) {
            "" => scatter(c, false),
            "add" => scatter(c, true),
            other => Err(unsupported!("the reduction `{other}` is not supported")),
        }
    },
    "scatter_add" | "scatter_add_" => |c| scatter(c, true),
    "one_hot" => one_hot,
    "index_put" | "index_put_" | "_index_put_impl_" | "_unsafe_index_put" => index_put,
    "index_add" | "index_add_" => index_add,
};

/// Starts the output as argument 0; in place it is that already.
fn start<'a>(call: &'a Call<'_>) -> Result<&'a View, KernelError> {
    let (out, from) = (output(call)?, tensor(call, 0)?);
    same_shape(out, from)?;
    if out.data != from.data {
        copy(out, from)?;
    }
    Ok(out)
}

/// The element `offset` elements after the first, as a tensor without dimensions.
fn element(view: &View, offset: usize) -> View {
    View { data: at(view, offset), dtype: view.dtype, shape: Vec::new(), stride: Vec::new() }
}

/// Adds one element or tensor to another of its shape.
fn add(out: &View, more: &View) -> Result<(), KernelError> {
    let (a, b) = (Input::View(out), Input::View(more));
    if is_floating(out) {
        map2::<f32>(out, &a, &b, |a, b| a + b)
    } else {
        map2::<i64>(out, &a, &b, i64::wrapping_add)
    }
}

/// `out[… index …] = source`, or `+=`.
fn scatter(call: &Call<'_>, adds: bool) -> Result<(), KernelError> {
    let (out, indices, source) = (start(call)?, whole(tensor(call, 2)?)?, input(call, 3)?);
    let dim = dimension(int_or(call, 1, 0)?, out.shape.len())?;
    let fits = |shape: &[usize]| {
        shape.len() == indices.shape.len() && (0..shape.len()).all(|d| indices.shape[d] <= shape[d])
    };
    let inside = out.shape.len() == indices.shape.len()
        && (0..out.shape.len()).all(|d| d == dim || indices.shape[d] <= out.shape[d]);
    let source_stride = match source {
        Input::View(view) if fits(&view.shape) => view.stride.clone(),
        Input::Number { .. } => vec![0; indices.shape.len()],
        Input::View(view) => {
            return Err(invalid!("{:?} scattered by {:?}", view.shape, indices.shape));
        }
    };
    if !inside {
        return Err(invalid!("scattering by {:?} into {:?}", indices.shape, out.shape));
    }
    let mut base = out.stride.clone();
    let (step, extent) = match base.get_mut(dim) {
        Some(step) => (std::mem::replace(step, 0), out.shape[dim]),
        None => (0, 1),
    };
    let mut outcome = Ok(());
    let strides = [indices.stride.clone(), base, source_stride];
    each(&indices.shape, &strides, |[place, base, from]| {
        if outcome.is_err() {
            return;
        }
        let index = read_int(indices, place);
        outcome = match usize::try_from(index).ok().filter(|&i| i < extent) {
            None => Err(data_error!("index {index} into {extent} elements")),
            Some(index) => {
                let to = element(out, base + index * step);
                match source {
                    Input::View(view) if adds => add(&to, &element(view, from)),
                    Input::View(view) => copy(&to, &element(view, from)),
                    Input::Number { value, .. } if adds => {
                        write(&to, 0, read(&to, 0) as f32 + value as f32);
                        Ok(())
                    }
                    Input::Number { value, .. } => fill(&to, value),
                }
            }
        };
    });
    outcome
}

/// A one in the last dimension at each number, zeros elsewhere.
fn one_hot(call: &Call<'_>) -> Result<(), KernelError> {
    let (out, indices) = (output(call)?, whole(tensor(call, 0)?)?);
    let Some((&classes, rest)) = out.shape.split_last() else {
        return Err(invalid!("one-hot numbers without a dimension"));
    };
    if rest != indices.shape {
        return Err(invalid!("one-hot numbers of {:?} as {:?}", indices.shape, out.shape));
    }
    fill(out, 0.0)?;
    let (last, stride) = (out.stride[rest.len()], out.stride[..rest.len()].to_vec());
    let mut outcome = Ok(());
    each(rest, &[indices.stride.clone(), stride], |[place, to]| {
        let index = read_int(indices, place);
        match usize::try_from(index).ok().filter(|&i| i < classes) {
            Some(index) => write(out, to + index * last, 1.0),
            None => outcome = Err(data_error!("class {index} of {classes}")),
        }
    });
    outcome
}

/// `self[i, j, …] = values`, or `+=`; or where a mask is true, one value.
fn index_put(call: &Call<'_>) -> Result<(), KernelError> {
    let (out, adds) = (start(call)?, flag(call, 3)?);
    if let Some((mask, first)) = index::mask(call)? {
        return masked_put(call, out, &mask, first, adds);
    }
    let values = tensor(call, 2)?;
    let picked = Places::shape_of(call, out)?;
    let values = View { stride: broadcast(values, &picked)?, shape: picked, ..values.clone() };
    match Places::new(call, out, &values.shape)? {
        None if adds => add(out, &values),
        None => copy(out, &values),
        Some(places) => {
            each_place(
                &places,
                &values,
                out,
                |from, to| {
                    if adds { add(to, from) } else { copy(to, from) }
                },
            )
        }
    }
}

/// Writes at the places where a mask of the dimensions from `first` on is true: one value, or as
/// many as there are.
fn masked_put(
    call: &Call<'_>,
    out: &View,
    mask: &View,
    first: usize,
    adds: bool,
) -> Result<(), KernelError> {
    let value = input(call, 2)?;
    let many = matches!(value, Input::View(v) if !v.shape.is_empty() && v.shape != [1]);
    if many && first != 0 {
        return Err(unsupported!("many values at the places of a mask after other dimensions"));
    }
    let places = marked(out, mask, first)?;
    for (at, place) in places.iter().enumerate() {
        let from = match value {
            Input::Number { value, .. } if adds => {
                let (a, b) = (Input::View(place), Input::Number { value, float: true });
                map2::<f32>(place, &a, &b, |a, b| a + b)?;
                continue;
            }
            Input::Number { value, .. } => {
                fill(place, value)?;
                continue;
            }
            Input::View(view) if many => {
                if view.shape[0] != places.len() {
                    return Err(data_error!(
                        "{} values for {} places of a mask; how many there are is part of the recording",
                        view.shape[0],
                        places.len()
                    ));
                }
                select(view, 0, at)?
            }
            Input::View(view) => view.clone(),
        };
        if adds { add(place, &from)? } else { copy(place, &from)? }
    }
    Ok(())
}

/// The parts of `table` at which `mask` is true, in row-major order. The mask covers the table's
/// dimensions from `first` on and applies at each position of the dimensions before `first`.
pub fn marked(table: &View, mask: &View, first: usize) -> Result<Vec<View>, KernelError> {
    let end = first + mask.shape.len();
    if table.shape.get(first..end) != Some(&mask.shape[..]) {
        return Err(invalid!("a mask of {:?} for {:?}", mask.shape, table.shape));
    }
    let mut outer = vec![0; first];
    outer.extend(&mask.stride);
    let mut places = Vec::new();
    each(&table.shape[..end], &[&outer, &table.stride[..end]], |[flag, at_place]| {
        if read_int(mask, flag) != 0 {
            places.push(View {
                data: at(table, at_place),
                dtype: table.dtype,
                shape: table.shape[end..].to_vec(),
                stride: table.stride[end..].to_vec(),
            });
        }
    });
    Ok(places)
}

/// `out[… index …] += alpha * source`, whole slices of dimension `dim`.
fn index_add(call: &Call<'_>) -> Result<(), KernelError> {
    let (out, indices, source) = (start(call)?, whole(tensor(call, 2)?)?, tensor(call, 3)?);
    let dim = dimension(int_or(call, 1, 0)?, out.shape.len())?;
    let alpha = number_or(call, 4, 1.0)? as f32;
    let (count, step) = match (&indices.shape[..], &indices.stride[..]) {
        ([count], [step]) => (*count, *step),
        _ => return Err(invalid!("indices of shape {:?}", indices.shape)),
    };
    for i in 0..count {
        let index = read_int(indices, i * step);
        let index = usize::try_from(index)
            .ok()
            .filter(|&i| out.shape.get(dim).is_some_and(|&n| i < n))
            .ok_or_else(|| data_error!("index {index} into {:?}", out.shape))?;
        let (to, from) = (select(out, dim, index)?, select(source, dim, i)?);
        same_shape(&to, &from)?;
        if is_floating(out) {
            let (a, b) = (Input::View(&to), Input::View(&from));
            map2::<f32>(&to, &a, &b, |a, b| a + alpha * b)?;
        } else {
            add(&to, &from)?;
        }
    }
    Ok(())
}
