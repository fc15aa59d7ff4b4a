//! Reductions over dimensions, and running sums.
//!
//! Floating sums are kept in double precision, in an order that depends on shapes and strides alone.
//! Not for: losses and norms, which have files of their own.

use crate::job::{Arg, Dtype};

use super::super::view::{Call, View};
use super::Kernel;
use super::arguments::{Input, int_or, ints, output, result, tensor};
use super::elements::{BLOCK, Lane, at, broadcast, copy, count, dimension, each, map2, read, walk};

/// The kernel for `kind`.
pub fn find(kind: &str) -> Option<Kernel> {
    let kernel: Kernel = match kind.strip_prefix("aten::")? {
        "sum" => sum,
        "mean" => mean,
        "prod" => |c| {
            if c.operator.args.len() <= 2 {
                whole(c, 1.0, |a, b| a * b, |a, b| a * b)
            } else {
                over(c, 1.0, |a, b| a * b, |a, b| a * b)
            }
        },
        "amax" => |c| over(c, f64::NEG_INFINITY, larger, i64::max),
        "amin" => |c| over(c, f64::INFINITY, smaller, i64::min),
        "all" => |c| truth(c, true),
        "any" => |c| truth(c, false),
        "max" => |c| extreme(c, true),
        "min" => |c| extreme(c, false),
        "argmax" => |c| arg_extreme(c, true),
        "argmin" => |c| arg_extreme(c, false),
        "cumsum" | "cumsum_" => cumsum,
        _ => return None,
    };
    Some(kernel)
}

fn larger(a: f64, b: f64) -> f64 {
    if a.is_nan() || a > b { a } else { b }
}

fn smaller(a: f64, b: f64) -> f64 {
    if a.is_nan() || a < b { a } else { b }
}

/// The dimensions named in argument 1, all of them when it names none, as one flag for each.
fn chosen(call: &Call<'_>, rank: usize) -> Result<Vec<bool>, String> {
    let named = ints(call, 1)?;
    let mut chosen = vec![named.is_empty(); rank];
    for dim in named {
        let dim = dimension(dim, rank)?;
        if let Some(slot) = chosen.get_mut(dim) {
            *slot = true;
        }
    }
    Ok(chosen)
}

/// Reduces `from` over the dimensions `gone` into `out`, whose shape may keep them as 1 or leave them out.
fn reduce<T: Lane>(
    out: &View,
    from: &View,
    gone: &[bool],
    start: T::Wide,
    join: impl Fn(T::Wide, T::Wide) -> T::Wide,
    finish: impl Fn(T::Wide) -> T,
) -> Result<(), String> {
    let pick = |values: &[usize], which: bool| -> Vec<usize> {
        values.iter().zip(gone).filter(|(_, g)| **g == which).map(|(v, _)| *v).collect()
    };
    let (kept, reduced) = (pick(&from.shape, false), pick(&from.shape, true));
    let (kept_stride, reduced_stride) = (pick(&from.stride, false), pick(&from.stride, true));
    let out_stride = if out.shape == kept {
        out.stride.clone()
    } else if out.shape.len() == gone.len()
        && pick(&out.shape, false) == kept
        && pick(&out.shape, true).iter().all(|&n| n == 1)
    {
        pick(&out.stride, false)
    } else {
        return Err(format!("reducing shape {:?} does not give {:?}", from.shape, out.shape));
    };
    let nearest = |strides: &[usize], shape: &[usize]| {
        strides
            .iter()
            .zip(shape)
            .filter(|&(&s, &n)| n > 1 && s > 0)
            .map(|(&s, _)| s)
            .min()
            .unwrap_or(usize::MAX)
    };
    let mut loaded = [T::default(); BLOCK];
    if nearest(&reduced_stride, &reduced) <= nearest(&kept_stride, &kept) {
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
                            *strand = join(*strand, value.wide());
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
                    *total = join(*total, value.wide());
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

fn sum_over(out: &View, from: &View, gone: &[bool], divisor: f64) -> Result<(), String> {
    if from.dtype == Dtype::F32 || out.dtype == Dtype::F32 {
        reduce::<f32>(out, from, gone, 0.0, |a, b| a + b, |total| (total / divisor) as f32)
    } else {
        reduce::<i64>(out, from, gone, 0, i64::wrapping_add, |total| total)
    }
}

/// Whether the call is the form without dimensions, `(self, dtype)`.
#[must_use]
pub fn without_dims(call: &Call<'_>) -> bool {
    call.operator.args.len() <= 2 && !matches!(call.operator.args.get(1), Some(Arg::Ints(_)))
}

fn sum(call: &Call<'_>) -> Result<(), String> {
    let (out, from) = (output(call)?, tensor(call, 0)?);
    let gone = if without_dims(call) {
        vec![true; from.shape.len()]
    } else {
        chosen(call, from.shape.len())?
    };
    sum_over(out, from, &gone, 1.0)
}

fn mean(call: &Call<'_>) -> Result<(), String> {
    let (out, from) = (output(call)?, tensor(call, 0)?);
    let gone = if without_dims(call) {
        vec![true; from.shape.len()]
    } else {
        chosen(call, from.shape.len())?
    };
    let terms: usize = from.shape.iter().zip(&gone).filter(|(_, g)| **g).map(|(n, _)| *n).product();
    if out.dtype != Dtype::F32 {
        return Err("a mean that is not f32".into());
    }
    sum_over(out, from, &gone, terms as f64)
}

fn fold(
    out: &View,
    from: &View,
    gone: &[bool],
    start: f64,
    real: impl Fn(f64, f64) -> f64,
    int: impl Fn(i64, i64) -> i64,
) -> Result<(), String> {
    if from.dtype == Dtype::F32 {
        reduce::<f32>(out, from, gone, start, real, |total| total as f32)
    } else {
        reduce::<i64>(out, from, gone, start as i64, int, |total| total)
    }
}

fn over(
    call: &Call<'_>,
    start: f64,
    real: impl Fn(f64, f64) -> f64,
    int: impl Fn(i64, i64) -> i64,
) -> Result<(), String> {
    let (out, from) = (output(call)?, tensor(call, 0)?);
    fold(out, from, &chosen(call, from.shape.len())?, start, real, int)
}

fn whole(
    call: &Call<'_>,
    start: f64,
    real: impl Fn(f64, f64) -> f64,
    int: impl Fn(i64, i64) -> i64,
) -> Result<(), String> {
    let (out, from) = (output(call)?, tensor(call, 0)?);
    fold(out, from, &vec![true; from.shape.len()], start, real, int)
}

fn truth(call: &Call<'_>, all: bool) -> Result<(), String> {
    let (out, from) = (output(call)?, tensor(call, 0)?);
    let gone = if call.operator.args.len() <= 1 {
        vec![true; from.shape.len()]
    } else {
        chosen(call, from.shape.len())?
    };
    let real = |a: f64, b: f64| {
        f64::from(u8::from(if all { a != 0.0 && b != 0.0 } else { a != 0.0 || b != 0.0 }))
    };
    let int = |a: i64, b: i64| i64::from(if all { a != 0 && b != 0 } else { a != 0 || b != 0 });
    fold(out, from, &gone, f64::from(u8::from(all)), real, int)
}

/// `max` and `min`: of all, of two tensors, or along a dimension with positions.
fn extreme(call: &Call<'_>, most: bool) -> Result<(), String> {
    if call.operator.args.len() <= 1 {
        let start = if most { f64::NEG_INFINITY } else { f64::INFINITY };
        return whole(
            call,
            start,
            if most { larger } else { smaller },
            if most { i64::max } else { i64::min },
        );
    }
    let (out, from) = (output(call)?, tensor(call, 0)?);
    if let Ok(other) = tensor(call, 1) {
        let (a, b) = (Input::View(from), Input::View(other));
        return if out.dtype == Dtype::F32 {
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

fn arg_extreme(call: &Call<'_>, most: bool) -> Result<(), String> {
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
) -> Result<(), String> {
    if count(from) == 0 {
        return Err("the largest of no elements".into());
    }
    let mut shape = from.shape.clone();
    let (length, stride) = match dim {
        Some(dim) if !shape.is_empty() => (std::mem::replace(&mut shape[dim], 1), from.stride[dim]),
        Some(_) => (1, 0),
        None => (0, 0),
    };
    let kept = if dim.is_some() { shape } else { Vec::new() };
    let strides_of = |view: Option<&View>| -> Result<Vec<usize>, String> {
        let Some(view) = view else { return Ok(vec![0; kept.len()]) };
        let mut squeezed: Vec<usize> = kept.clone();
        if view.shape.len() + 1 == kept.len() {
            squeezed.remove(dim.unwrap_or(0));
        }
        if count(view) != kept.iter().product::<usize>()
            || (view.shape != squeezed && dim.is_some())
        {
            return Err(format!(
                "a result of shape {:?} for an input of shape {:?}",
                view.shape, from.shape
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
                    if view.dtype == Dtype::F32 {
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

fn cumsum(call: &Call<'_>) -> Result<(), String> {
    let (out, from) = (output(call)?, tensor(call, 0)?);
    if out.shape != from.shape {
        return Err(format!("a running sum of shape {:?} for {:?}", out.shape, from.shape));
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
                if out.dtype == Dtype::F32 {
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
