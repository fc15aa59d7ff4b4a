//! Batch and layer normalisation.
//!
//! Not for: the arithmetic (kernels/norm.cu).

use super::super::super::host::kernels::arguments::{ints, number_or};
use super::super::super::host::kernels::elements::same_shape;
use super::super::super::host::kernels::norm::channels;
use super::super::super::host::kernels::strided::{flag, float, mask, same};
use super::super::super::host::view::{Call, Operand as Given, View};
use super::super::launch::{Actions, BatchNorm, Family, Operand, RANK};
use super::Emit;
use super::args::{
    distinct, expect_shape, floating, maybe_tensor, output, real, result, shaped, tensor,
};
use super::map::{join, signed};
use super::reduce::threads;
use super::rows::{Row, params};
use crate::job::Arg;

/// What makes the actions of `kind`.
pub fn find(kind: &str) -> Option<Emit> {
    Some(match kind {
        "aten::batch_norm"
        | "aten::_batch_norm_impl_index"
        | "aten::cudnn_batch_norm"
        | "aten::native_batch_norm" => batch_norm,
        "aten::cudnn_batch_norm_backward" => |c, a| {
            let eps = float(c, 7)?;
            backward(
                c,
                a,
                &Backward {
                    input: 0,
                    gradient: 1,
                    weight: 2,
                    running: [3, 4],
                    saved: [5, 6],
                    training: true,
                    eps,
                    wanted: [true; 3],
                },
            )
        },
        "aten::native_batch_norm_backward" => |c, a| {
            let (training, eps, wanted) = (flag(c, 7)?, float(c, 8)?, mask(c, 9)?);
            backward(
                c,
                a,
                &Backward {
                    gradient: 0,
                    input: 1,
                    weight: 2,
                    running: [3, 4],
                    saved: [5, 6],
                    training,
                    eps,
                    wanted,
                },
            )
        },
        "aten::layer_norm" | "aten::native_layer_norm" => layer_norm,
        "aten::native_layer_norm_backward" => layer_norm_backward,
        _ => return None,
    })
}

/// One value per channel, or what stands for it where the tensor is undefined.
fn per_channel(
    call: &Call<'_>,
    at: usize,
    channels: usize,
    otherwise: f64,
) -> Result<Operand, String> {
    match maybe_tensor(call, at)? {
        None => Ok(Operand::number(otherwise)),
        Some(view) => {
            expect_shape(floating(view)?, &[channels])?;
            Operand::of(view)
        }
    }
}

fn without_channels<T: Copy>(of: &[T]) -> Vec<T> {
    of.iter().take(1).chain(&of[2..]).copied().collect()
}

/// Extents and strides of `x`, `y` and `out` (the same where absent), the inner dimension apart.
fn planes(p: &mut BatchNorm, x: &View, y: &View, out: Option<&View>) -> Result<(), String> {
    let shape = without_channels(&x.shape);
    let views = [x, y, out.unwrap_or(x)];
    let (mut extents, mut strides) =
        join(&shape, &views.map(|v| signed(&without_channels(&v.stride))), true)?;
    if shape.contains(&0) {
        (extents, strides) = (vec![0], vec![vec![0]; 3]);
    }
    p.elements = shape.iter().product::<usize>() as i64;
    p.inner = extents.pop().map_or(1, i64::from);
    if extents.len() + 2 > RANK {
        return Err(format!(
            "{:?} in strides that leave more than {} dimensions",
            x.shape,
            RANK - 1
        ));
    }
    p.outer = extents.iter().map(|&n| i64::from(n)).product();
    p.rank = extents.len() as i32;
    p.shape[..extents.len()].copy_from_slice(&extents);
    let mut operands = [Operand::number(0.0); 3];
    for ((operand, view), mut stride) in operands.iter_mut().zip(views).zip(strides) {
        let inner = stride.pop().unwrap_or(1);
        *operand = Operand::strided(view, &stride)?;
        operand.stride[RANK - 2] = inner;
        operand.stride[RANK - 1] = view.stride[1] as i64;
    }
    [p.x, p.y, p.out] = operands;
    if out.is_none() {
        p.out.number = 1;
    }
    Ok(())
}

/// Threads along the inner dimension and across the others.
fn block(p: &BatchNorm) -> [u32; 2] {
    let x = threads(p.inner.min(256), 256);
    [x, 512 / x]
}

fn blank() -> BatchNorm {
    let none = Operand::number(0.0);
    BatchNorm {
        elements: 0,
        outer: 1,
        inner: 1,
        rank: 0,
        training: 0,
        update: 0,
        pad: 0,
        shape: [1; RANK],
        x: none,
        y: none,
        out: none,
        weight: none,
        bias: none,
        mean: none,
        deviation: none,
        first: none,
        second: none,
        momentum: 0.0,
        eps: 0.0,
    }
}

/// An output with one element per channel; `None` where undefined or empty.
fn saved(call: &Call<'_>, at: usize, channels: usize) -> Result<Operand, String> {
    // `batch_norm` declares one output: what it saves is hidden, before the running statistics.
    let view = result(call, at)?.filter(|view| view.shape == [channels] && channels > 0);
    let mut running = (3..5).filter_map(|at| {
        if let Some(Given::Tensor(view)) = call.args.get(at) { Some(view) } else { None }
    });
    match view {
        Some(view) if !running.any(|argument| same(argument, view)) => {
            distinct(call, floating(view)?)?;
            Operand::of(view)
        }
        _ => Ok(Operand::number(0.0)),
    }
}

fn batch_norm(call: &Call<'_>, actions: &mut Actions) -> Result<(), String> {
    let x = real(call, 0)?;
    let count = channels(call, x)?;
    let out = shaped(call, 0, &x.shape)?;
    let (training, momentum, eps) = (flag(call, 5)?, float(call, 6)?, float(call, 7)?);
    let mut p = BatchNorm {
        training: i32::from(training),
        update: i32::from(training && !call.replay),
        momentum,
        eps,
        weight: per_channel(call, 1, count, 1.0)?,
        bias: per_channel(call, 2, count, 0.0)?,
        mean: per_channel(call, 3, count, 0.0)?,
        deviation: per_channel(call, 4, count, 1.0)?,
        first: saved(call, 1, count)?,
        second: saved(call, 2, count)?,
        ..blank()
    };
    if !training && (p.mean.number == 1 || p.deviation.number == 1) {
        return Err(format!(
            "{} needs running statistics when it is not training",
            call.operator.kind
        ));
    }
    if p.update == 1 {
        for at in 3..5 {
            let Some(view) = maybe_tensor(call, at)? else { continue };
            if !call.outputs.iter().flatten().chain(call.hidden).any(|written| same(written, view))
            {
                return Err(format!(
                    "{} updates its running statistics, but the graph does not say that they are written",
                    call.operator.kind
                ));
            }
        }
    }
    planes(&mut p, x, x, Some(out))?;
    actions.launch(Family::Norm, "batch_norm", count as i64, block(&p), &p);
    Ok(())
}

/// Where a backward variant has its arguments.
struct Backward {
    input: usize,
    gradient: usize,
    weight: usize,
    running: [usize; 2],
    saved: [usize; 2],
    training: bool,
    eps: f64,
    wanted: [bool; 3],
}

fn backward(call: &Call<'_>, actions: &mut Actions, of: &Backward) -> Result<(), String> {
    let (x, gradient) = (real(call, of.input)?, real(call, of.gradient)?);
    let count = channels(call, x)?;
    expect_shape(gradient, &x.shape)?;
    let [mean, scale] = if of.training { of.saved } else { of.running };
    let into = |at: usize, shape: &[usize]| -> Result<Option<&View>, String> {
        if of.wanted[at] && result(call, at)?.is_some() {
            shaped(call, at, shape).map(Some)
        } else {
            Ok(None)
        }
    };
    let channel = |at: usize| into(at, &[count])?.map_or(Ok(Operand::number(0.0)), Operand::of);
    let mut p = BatchNorm {
        training: i32::from(of.training),
        eps: of.eps,
        weight: per_channel(call, of.weight, count, 1.0)?,
        mean: per_channel(call, mean, count, 0.0)?,
        deviation: per_channel(call, scale, count, 1.0)?,
        first: channel(1)?,
        second: channel(2)?,
        ..blank()
    };
    if p.mean.number == 1 || p.deviation.number == 1 {
        return Err(format!(
            "{} needs the mean and deviation of its forward operator",
            call.operator.kind
        ));
    }
    planes(&mut p, x, gradient, into(0, &x.shape)?)?;
    actions.launch(Family::Norm, "batch_norm_backward", count as i64, block(&p), &p);
    Ok(())
}

/// A weight or bias as one row, checked against the rows it scales.
fn row_of<'a>(
    view: Option<&'a View>,
    inner: usize,
    length: i64,
    otherwise: f64,
) -> Result<Row<'a>, String> {
    let Some(view) = view else { return Ok(Row::number(otherwise)) };
    let (row, own) = Row::last(view, inner)?;
    if own != length || view.shape.len() != inner {
        return Err(format!("weights of shape {:?} for rows of {length} elements", view.shape));
    }
    Ok(row)
}

/// A per-row result such as the mean: the outer dimensions, then ones.
fn per_row<'a>(view: Option<&'a View>, outer: &[usize]) -> Result<Row<'a>, String> {
    let Some(view) = view else { return Ok(Row::number(0.0)) };
    floating(view)?;
    let (own, rest) = view.shape.split_at_checked(outer.len()).unwrap_or((&[], &[0]));
    if own != outer || rest.iter().any(|&n| n != 1) {
        return Err(format!("statistics of shape {:?} for rows of shape {outer:?}", view.shape));
    }
    Ok(Row::each(Some(view), &view.stride[..outer.len()]))
}

fn layer_norm(call: &Call<'_>, actions: &mut Actions) -> Result<(), String> {
    let (out, from, inner) = (output(call)?, tensor(call, 0)?, ints(call, 1)?.len());
    same_shape(out, from)?;
    let ((to, length), (rows, _)) = (Row::last(out, inner)?, Row::last(from, inner)?);
    let outer = &from.shape[..from.shape.len() - inner];
    let operands = [
        to,
        rows,
        row_of(maybe_tensor(call, 2)?, inner, length, 1.0)?,
        row_of(maybe_tensor(call, 3)?, inner, length, 0.0)?,
        per_row(result(call, 1)?, outer)?,
        per_row(result(call, 2)?, outer)?,
    ];
    let mut p = params(actions, outer, length, &operands)?;
    p.s[0] = number_or(call, 4, 1e-5)?;
    actions.launch(Family::Norm, "layer_norm", p.rows, [threads(length, 512), 1], &p);
    Ok(())
}

fn layer_norm_backward(call: &Call<'_>, actions: &mut Actions) -> Result<(), String> {
    let (grad, from, inner) = (tensor(call, 0)?, tensor(call, 1)?, ints(call, 2)?.len());
    same_shape(grad, from)?;
    let ((grad_row, length), (rows, _)) = (Row::last(grad, inner)?, Row::last(from, inner)?);
    let outer = &from.shape[..from.shape.len() - inner];
    let (mean, rstd) =
        (per_row(Some(tensor(call, 3)?), outer)?, per_row(Some(tensor(call, 4)?), outer)?);
    let wanted = |k: usize| match call.operator.args.get(7) {
        Some(Arg::Bools(mask)) => mask.get(k).copied().unwrap_or(false),
        _ => true,
    };
    if let Some(out) = result(call, 0)?.filter(|_| wanted(0)) {
        same_shape(out, from)?;
        let operands = [
            Row::last(out, inner)?.0,
            grad_row.clone(),
            rows.clone(),
            mean.clone(),
            rstd.clone(),
            row_of(maybe_tensor(call, 5)?, inner, length, 1.0)?,
        ];
        let p = params(actions, outer, length, &operands)?;
        actions.launch(Family::Norm, "layer_norm_backward", p.rows, [threads(length, 512), 1], &p);
    }
    let (weight, bias) =
        (result(call, 1)?.filter(|_| wanted(1)), result(call, 2)?.filter(|_| wanted(2)));
    if weight.is_some() || bias.is_some() {
        let operands = [
            row_of(weight, inner, length, 0.0)?,
            grad_row,
            rows,
            mean,
            rstd,
            row_of(bias, inner, length, 0.0)?,
        ];
        let p = params(actions, outer, length, &operands)?;
        actions.launch(Family::Norm, "layer_norm_weights", (length + 31) / 32, [32, 16], &p);
    }
    Ok(())
}
