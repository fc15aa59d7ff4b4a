//! Reductions over dimensions, and running sums.
//!
//! Floating sums are kept in double precision, in an order that depends on shapes and strides
//! alone.

use crate::backend::operators::arguments::{
    Input, floating, int_or, is_floating, maybe_tensor, number_or, output, result, tensor,
};
use crate::backend::operators::error::{invalid, unsupported};
use crate::backend::operators::reduce::{
    Split, all_or_chosen, chosen, chosen_at, everything, summed, terms,
};
use crate::backend::operators::shapes::{at, broadcast, count, dimension, each, narrow, walk};
use crate::backend::operators::view::{Call, View};
use crate::backend::operators::{KernelError, Table, table};
use crate::job::Arg;

use super::Kernel;
use super::elements::{BLOCK, Lane, copy, map2, read, write};

pub const TABLE: Table<Kernel> = table! {
    "sum" => sum,
    "mean" => mean,
    "prod" => |c| over(c, &all_or_chosen(c, 2)?, 1.0, |a, b| a * b, |a, b| a * b),
    "amax" => |c| over(c, &chosen(c)?, f64::NEG_INFINITY, larger, i64::max),
    "amin" => |c| over(c, &chosen(c)?, f64::INFINITY, smaller, i64::min),
    "all" => |c| truth(c, true),
    "any" => |c| truth(c, false),
    "max" => |c| extreme(c, true),
    "min" => |c| extreme(c, false),
    "argmax" => |c| arg_extreme(c, true),
    "argmin" => |c| arg_extreme(c, false),
    "cumsum" | "cumsum_" => cumsum,
    "linalg_vector_norm" => |c| {
        norm(output(c)?, tensor(c, 0)?, &chosen_at(c, 2)?, number_or(c, 1, 2.0)?)
    },
    "norm" => |c| norm(output(c)?, tensor(c, 0)?, &chosen_at(c, 2)?, number_or(c, 1, 2.0)?),
    "logsumexp" => logsumexp,
    "var" => |c| spread(c, false, false),
    "std" => |c| spread(c, true, false),
    "var_mean" => |c| spread(c, false, true),
    "std_mean" => |c| spread(c, true, true),
    "diff" => diff,
};

fn larger(a: f64, b: f64) -> f64 {
    if a.is_nan() || a > b { a } else { b }
}

fn smaller(a: f64, b: f64) -> f64 {
    if a.is_nan() || a < b { a } else { b }
}

/// Reduces `of` each element of `from` over the dimensions `gone` into `out`, whose shape may keep
/// them as 1 or leave them out.
fn reduce<T: Lane>(
    out: &View,
    from: &View,
    gone: &[bool],
    (start, of): (T::Wide, impl Fn(T::Wide) -> T::Wide),
    join: impl Fn(T::Wide, T::Wide) -> T::Wide,
    finish: impl Fn(T::Wide) -> T,
) -> Result<(), KernelError> {
    let split = Split::new(from, gone);
    let out_stride = split.result(out, gone)?;
    let Split { kept, reduced, kept_stride, reduced_stride, columns } = split;
    let mut loaded = [T::default(); BLOCK];
    if !columns {
        // Neighbours are reduced: one result at a time, in eight strands.
        each(&kept, &[out_stride, kept_stride], |[to, first]| {
            let mut strands = [start; 8];
            walk(&reduced, &[&reduced_stride], true, |[offset], length, [step]| {
                for done in (0..length).step_by(BLOCK) {
                    let n = (length - done).min(BLOCK);
                    let part = at(from, first + offset + done * step);
                    // SAFETY: the walk stays inside the view.
                    unsafe { T::load(from.dtype, part, step, &mut loaded[..n]) };
                    for eight in loaded[..n].chunks(8) {
                        for (strand, value) in strands.iter_mut().zip(eight) {
                            *strand = join(*strand, of(value.wide()));
                        }
                    }
                }
            });
            let total = strands[1..].iter().fold(strands[0], |a, b| join(a, *b));
            // SAFETY: the walk stays inside the output's view.
            unsafe { T::store(out.dtype, at(out, to), 1, &[finish(total)]) };
        });
        return Ok(());
    }
    // Neighbours are kept: a block of results at a time, adding row on row.
    let mut totals = [start; BLOCK];
    let mut finished = [T::default(); BLOCK];
    walk(&kept, &[kept_stride, out_stride], true, |[first, to], length, [step, to_step]| {
        for done in (0..length).step_by(BLOCK) {
            let n = (length - done).min(BLOCK);
            totals[..n].fill(start);
            each(&reduced, &[&reduced_stride], |[offset]| {
                let part = at(from, first + offset + done * step);
                // SAFETY: the walk stays inside the view.
                unsafe { T::load(from.dtype, part, step, &mut loaded[..n]) };
                for (total, value) in totals[..n].iter_mut().zip(&loaded[..n]) {
                    *total = join(*total, of(value.wide()));
                }
            });
            for (slot, total) in finished[..n].iter_mut().zip(&totals[..n]) {
                *slot = finish(*total);
            }
            // SAFETY: the walk stays inside the output's view.
            unsafe { T::store(out.dtype, at(out, to + done * to_step), to_step, &finished[..n]) };
        }
    });
    Ok(())
}

/// The sum over the dimensions `gone`, divided by `divisor`.
///
/// # Errors
/// When the shapes do not fit.
pub fn sum_over(out: &View, from: &View, gone: &[bool], divisor: f64) -> Result<(), KernelError> {
    if is_floating(from) || is_floating(out) {
        reduce::<f32>(out, from, gone, (0.0, |x| x), |a, b| a + b, |total| (total / divisor) as f32)
    } else {
        reduce::<i64>(out, from, gone, (0, |x| x), i64::wrapping_add, |total| total)
    }
}

fn sum(call: &Call<'_>) -> Result<(), KernelError> {
    sum_over(output(call)?, tensor(call, 0)?, &summed(call)?, 1.0)
}

fn mean(call: &Call<'_>) -> Result<(), KernelError> {
    let (out, from, gone) = (output(call)?, tensor(call, 0)?, summed(call)?);
    if !is_floating(out) {
        return Err(unsupported!("a mean that is not floating"));
    }
    sum_over(out, from, &gone, terms(from, &gone) as f64)
}

fn fold(
    out: &View,
    from: &View,
    gone: &[bool],
    start: f64,
    real: impl Fn(f64, f64) -> f64,
    int: impl Fn(i64, i64) -> i64,
) -> Result<(), KernelError> {
    if is_floating(from) {
        reduce::<f32>(out, from, gone, (start, |x| x), real, |total| total as f32)
    } else {
        reduce::<i64>(out, from, gone, (start as i64, |x| x), int, |total| total)
    }
}

fn over(
    call: &Call<'_>,
    gone: &[bool],
    start: f64,
    real: impl Fn(f64, f64) -> f64,
    int: impl Fn(i64, i64) -> i64,
) -> Result<(), KernelError> {
    fold(output(call)?, tensor(call, 0)?, gone, start, real, int)
}

fn truth(call: &Call<'_>, all: bool) -> Result<(), KernelError> {
    let real = |a: f64, b: f64| {
        f64::from(u8::from(if all { a != 0.0 && b != 0.0 } else { a != 0.0 || b != 0.0 }))
    };
    let int = |a: i64, b: i64| i64::from(if all { a != 0 && b != 0 } else { a != 0 || b != 0 });
    over(call, &all_or_chosen(call, 1)?, f64::from(u8::from(all)), real, int)
}

/// `max` and `min`: of all, of two tensors, or along a dimension with positions.
fn extreme(call: &Call<'_>, most: bool) -> Result<(), KernelError> {
    if call.operator.args.len() <= 1 {
        let start = if most { f64::NEG_INFINITY } else { f64::INFINITY };
        return over(
            call,
            &everything(call)?,
            start,
            if most { larger } else { smaller },
            if most { i64::max } else { i64::min },
        );
    }
    let (out, from) = (output(call)?, tensor(call, 0)?);
    if let Ok(other) = tensor(call, 1) {
        let (a, b) = (Input::View(from), Input::View(other));
        return if is_floating(out) {
            map2::<f32>(
                out,
                &a,
                &b,
                |a, b| if a.is_nan() || (a > b) == most && a != b { a } else { b },
            )
        } else {
            map2::<i64>(out, &a, &b, if most { i64::max } else { i64::min })
        };
    }
    let dim = dimension(int_or(call, 1, 0)?, from.shape.len())?;
    positions(from, Some(dim), most, Some(out), result(call, 1)?)
}

fn arg_extreme(call: &Call<'_>, most: bool) -> Result<(), KernelError> {
    let (out, from) = (output(call)?, tensor(call, 0)?);
    let dim = match call.operator.args.get(1) {
        Some(Arg::Int(dim)) => Some(dimension(*dim, from.shape.len())?),
        _ => None,
    };
    positions(from, dim, most, None, Some(out))
}

/// The extreme elements along `dim` (of all, without one) and where they first stand.
fn positions(
    from: &View,
    dim: Option<usize>,
    most: bool,
    values: Option<&View>,
    indices: Option<&View>,
) -> Result<(), KernelError> {
    if count(from) == 0 {
        return Err(invalid!("the largest of no elements"));
    }
    let mut shape = from.shape.clone();
    let (length, stride) = match dim {
        Some(dim) if !shape.is_empty() => (std::mem::replace(&mut shape[dim], 1), from.stride[dim]),
        Some(_) => (1, 0),
        None => (0, 0),
    };
    let kept = if dim.is_some() { shape } else { Vec::new() };
    let strides_of = |view: Option<&View>| -> Result<Vec<usize>, KernelError> {
        let Some(view) = view else { return Ok(vec![0; kept.len()]) };
        let mut squeezed: Vec<usize> = kept.clone();
        if view.shape.len() + 1 == kept.len() {
            squeezed.remove(dim.unwrap_or(0));
        }
        if count(view) != kept.iter().product::<usize>()
            || (view.shape != squeezed && dim.is_some())
        {
            return Err(invalid!(
                "a result of shape {:?} for an input of shape {:?}",
                view.shape,
                from.shape
            ));
        }
        if dim.is_none() {
            return Ok(Vec::new());
        }
        let mut stride = view.stride.clone();
        if stride.len() < kept.len() {
            stride.insert(dim.unwrap_or(0), 0);
        }
        Ok(stride)
    };
    let strides = [
        if dim.is_some() { from.stride.clone() } else { Vec::new() },
        strides_of(values)?,
        strides_of(indices)?,
    ];
    let better = |a: f64, b: f64| !b.is_nan() && (a.is_nan() || if most { a > b } else { a < b });
    each(&kept, &strides, |[first, value, index]| {
        let (mut best, mut place) = (read(from, first), 0usize);
        if dim.is_some() {
            for i in 1..length {
                let x = read(from, first + i * stride);
                if better(x, best) {
                    (best, place) = (x, i);
                }
            }
        } else {
            let mut i = 0;
            each(&from.shape, &[&from.stride], |[offset]| {
                let x = read(from, offset);
                if better(x, best) {
                    (best, place) = (x, i);
                }
                i += 1;
            });
        }
        for (view, offset, number) in [(values, value, best), (indices, index, place as f64)] {
            if let Some(view) = view {
                // SAFETY: the walk stays inside the results' views.
                unsafe {
                    if is_floating(view) {
                        f32::store(view.dtype, at(view, offset), 1, &[number as f32]);
                    } else {
                        i64::store(view.dtype, at(view, offset), 1, &[number as i64]);
                    }
                }
            }
        }
    });
    Ok(())
}

fn cumsum(call: &Call<'_>) -> Result<(), KernelError> {
    let (out, from) = (output(call)?, tensor(call, 0)?);
    if out.shape != from.shape {
        return Err(invalid!("a running sum of shape {:?} for {:?}", out.shape, from.shape));
    }
    if from.shape.is_empty() {
        return copy(out, from);
    }
    let dim = dimension(int_or(call, 1, 0)?, from.shape.len())?;
    let mut shape = from.shape.clone();
    let length = std::mem::replace(&mut shape[dim], 1);
    each(&shape, &[out.stride.clone(), broadcast(from, &from.shape)?], |[to, first]| {
        let (mut real, mut int) = (0.0f64, 0i64);
        for i in 0..length {
            let (slot, part) =
                (at(out, to + i * out.stride[dim]), at(from, first + i * from.stride[dim]));
            // SAFETY: both stay inside their views.
            unsafe {
                if is_floating(out) {
                    let mut x = [0.0f32];
                    f32::load(from.dtype, part, 1, &mut x);
                    real += f64::from(x[0]);
                    f32::store(out.dtype, slot, 1, &[real as f32]);
                } else {
                    let mut x = [0i64];
                    i64::load(from.dtype, part, 1, &mut x);
                    int = int.wrapping_add(x[0]);
                    i64::store(out.dtype, slot, 1, &[int]);
                }
            }
        }
    });
    Ok(())
}

/// The vector norm of `order` over the dimensions `gone`, in double precision.
pub fn norm(out: &View, from: &View, gone: &[bool], order: f64) -> Result<(), KernelError> {
    floating(out)?;
    let larger = |a: f64, b: f64| larger(a, b.abs());
    let smaller = |a: f64, b: f64| smaller(a, b.abs());
    if order == 2.0 {
        reduce::<f32>(out, from, gone, (0.0, |x: f64| x * x), |a, b| a + b, |s| s.sqrt() as f32)
    } else if order == 1.0 {
        reduce::<f32>(out, from, gone, (0.0, f64::abs), |a, b| a + b, |s| s as f32)
    } else if order == f64::INFINITY {
        reduce::<f32>(out, from, gone, (0.0, f64::abs), larger, |s| s as f32)
    } else if order == f64::NEG_INFINITY {
        reduce::<f32>(out, from, gone, (f64::INFINITY, f64::abs), smaller, |s| s as f32)
    } else if order == 0.0 {
        let one = |x: f64| f64::from(u8::from(x != 0.0));
        reduce::<f32>(out, from, gone, (0.0, one), |a, b| a + b, |s| s as f32)
    } else {
        let power = move |x: f64| x.abs().powf(order);
        reduce::<f32>(
            out,
            from,
            gone,
            (0.0, power),
            |a, b| a + b,
            move |s| s.powf(1.0 / order) as f32,
        )
    }
}

/// `visit(result's place, first element)` for each result, and the extents and steps of what it is
/// made of.
fn groups(
    outs: &[&View],
    from: &View,
    gone: &[bool],
    mut visit: impl FnMut(&[usize], usize, &Split),
) -> Result<(), KernelError> {
    let split = Split::new(from, gone);
    let mut strides =
        [split.kept_stride.clone(), vec![0; split.kept.len()], vec![0; split.kept.len()]];
    for (slot, out) in strides[1..].iter_mut().zip(outs) {
        *slot = split.result(floating(out)?, gone)?;
    }
    each(&split.kept, &strides, |[first, a, b]| visit(&[a, b], first, &split));
    Ok(())
}

fn logsumexp(call: &Call<'_>) -> Result<(), KernelError> {
    let (out, from) = (output(call)?, tensor(call, 0)?);
    groups(&[out], from, &chosen(call)?, |to, first, split| {
        let value = |at: usize| read(from, first + at);
        let (mut most, mut sum) = (f64::NEG_INFINITY, 0.0);
        each(&split.reduced, &[&split.reduced_stride], |[at]| most = larger(value(at), most));
        let most = if most.is_infinite() { 0.0 } else { most };
        each(&split.reduced, &[&split.reduced_stride], |[at]| sum += (value(at) - most).exp());
        write(out, to[0], (most + sum.ln()) as f32);
    })
}

/// Variance or deviation, and the mean where it is wanted. The forms are `(self, unbiased)`,
/// `(self, dim, unbiased, keepdim)` and `(self, dim, correction, keepdim)`.
fn spread(call: &Call<'_>, root: bool, with_mean: bool) -> Result<(), KernelError> {
    let (out, from) = (output(call)?, tensor(call, 0)?);
    let args = &call.operator.args;
    let overall = args.len() <= 2 && matches!(args.get(1), None | Some(Arg::Bool(_)));
    let gone = if overall { everything(call)? } else { chosen(call)? };
    let correction = number_or(call, if overall { 1 } else { 2 }, 1.0)?;
    let mean_out = if with_mean { result(call, 1)? } else { None };
    let outs: Vec<&View> = [Some(out), mean_out].into_iter().flatten().collect();
    let elements = terms(from, &gone) as f64;
    groups(&outs, from, &gone, |to, first, split| {
        let value = |at: usize| read(from, first + at);
        let (mut sum, mut squares) = (0.0, 0.0);
        each(&split.reduced, &[&split.reduced_stride], |[at]| sum += value(at));
        let mean = sum / elements;
        each(&split.reduced, &[&split.reduced_stride], |[at]| {
            squares += (value(at) - mean).powi(2)
        });
        let variance = squares / (elements - correction).max(0.0);
        write(out, to[0], (if root { variance.sqrt() } else { variance }) as f32);
        if let Some(mean_out) = mean_out {
            write(mean_out, to[1], mean as f32);
        }
    })
}

/// Each element less the one before it, along dimension 2; tensors 3 and 4 stand before and after.
fn diff(call: &Call<'_>) -> Result<(), KernelError> {
    let (out, from) = (output(call)?, tensor(call, 0)?);
    if int_or(call, 1, 1)? != 1 {
        return Err(unsupported!("differences of higher order are not supported"));
    }
    let dim = dimension(int_or(call, 2, -1)?, from.shape.len())?;
    let (mut at, mut before) = (0, None::<View>);
    for part in [maybe_tensor(call, 3)?, Some(from), maybe_tensor(call, 4)?].into_iter().flatten() {
        let extent = *part.shape.get(dim).ok_or("differences of a scalar")?;
        if extent == 0 {
            continue;
        }
        if let Some(before) = &before {
            subtract(&narrow(out, dim, at..at + 1)?, &narrow(part, dim, 0..1)?, before)?;
            at += 1;
        }
        let (a, b) = (narrow(part, dim, 1..extent)?, narrow(part, dim, 0..extent - 1)?);
        subtract(&narrow(out, dim, at..at + extent - 1)?, &a, &b)?;
        at += extent - 1;
        before = Some(narrow(part, dim, extent - 1..extent)?);
    }
    if before.is_none() || out.shape.get(dim) != Some(&at) {
        return Err(invalid!("{at} differences for shape {:?}", out.shape));
    }
    Ok(())
}

fn subtract(out: &View, a: &View, b: &View) -> Result<(), KernelError> {
    let (a, b) = (Input::View(a), Input::View(b));
    if is_floating(out) {
        map2::<f32>(out, &a, &b, |a, b| a - b)
    } else {
        map2::<i64>(out, &a, &b, i64::wrapping_sub)
    }
}
