//! Batch and layer normalisation. The arithmetic is in kernels/norm.cu.

use crate::backend::operators::error::unsupported;
use crate::backend::operators::norm::{
    BatchNorm as Of, BatchNormBackward, LayerNorm, LayerNormBackward, without_channels,
};
use crate::backend::operators::view::{Call, View};
use crate::backend::operators::{KernelError, Table, table};

use super::super::launch::{Actions, Family};
use super::super::params::{BatchNorm, Operand, Parts, RANK, Rows};
use super::Emit;
use super::map::{join, signed};
use super::reduce::threads;
use super::rows::{Row, params};

pub const TABLE: Table<Emit> = table! {
    "batch_norm" | "_batch_norm_impl_index" | "cudnn_batch_norm" | "native_batch_norm" => batch_norm,
    "cudnn_batch_norm_backward" => |c, a| backward(a, &BatchNormBackward::cudnn(c)?),
    "native_batch_norm_backward" => |c, a| backward(a, &BatchNormBackward::native(c)?),
    "layer_norm" | "native_layer_norm" => layer_norm,
    "native_layer_norm_backward" => layer_norm_backward,
};

/// One value per channel, or what stands for it where the tensor is absent.
fn per_channel(view: Option<&View>, otherwise: f64) -> Result<Operand, KernelError> {
    view.map_or(Ok(Operand::number(otherwise)), Operand::new)
}

/// Extents and strides of `x`, `y` and `out` (the same where absent), the inner dimension apart.
fn planes(p: &mut BatchNorm, x: &View, y: &View, out: Option<&View>) -> Result<(), KernelError> {
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
        return Err(unsupported!(
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

/// Launches a kernel of batch normalisation, each channel in as many parts as fill the device; in
/// one go where nothing is summed.
fn channels(actions: &mut Actions, kernel: &str, count: usize, mut p: BatchNorm, sums: bool) {
    let blocks = count as i64;
    let wanted = Parts::new(blocks, p.elements, 4096).count;
    let rows = p.outer.max(1);
    // As many of the outer rows in each part as in any other.
    let across = rows.div_euclid((rows + wanted - 1) / wanted).max(1);
    let inner = (wanted / across).max(1);
    (p.parts.count, p.inner_parts) = (across * inner, inner as i32);
    let all = p.parts.count * blocks;
    if sums {
        let at = std::mem::offset_of!(BatchNorm, parts);
        let beside = (p.parts.count, (16 * all) as u64);
        actions.in_parts(Family::Norm, kernel, (blocks, all), block(&p), (&p, at), beside);
    } else {
        actions.launch(Family::Norm, kernel, all, block(&p), &p);
    }
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
        inner_parts: 1,
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
        parts: Parts::new(1, 0, 1),
    }
}

fn batch_norm(call: &Call<'_>, actions: &mut Actions) -> Result<(), KernelError> {
    let of = Of::new(call)?;
    let mut p = BatchNorm {
        training: i32::from(of.training),
        update: i32::from(of.update),
        momentum: of.momentum,
        eps: of.eps,
        weight: per_channel(of.weight, 1.0)?,
        bias: per_channel(of.bias, 0.0)?,
        mean: per_channel(of.running[0], 0.0)?,
        deviation: per_channel(of.running[1], 1.0)?,
        first: per_channel(of.saved[0], 0.0)?,
        second: per_channel(of.saved[1], 0.0)?,
        ..blank()
    };
    planes(&mut p, of.x, of.x, Some(of.out))?;
    channels(actions, "batch_norm", of.channels, p, of.training);
    Ok(())
}

fn backward(actions: &mut Actions, of: &BatchNormBackward<'_>) -> Result<(), KernelError> {
    let [dx, dw, db] = of.results;
    let mut p = BatchNorm {
        training: i32::from(of.training),
        eps: of.eps,
        weight: per_channel(of.weight, 1.0)?,
        mean: per_channel(Some(of.mean), 0.0)?,
        deviation: per_channel(Some(of.scale), 1.0)?,
        first: per_channel(dw, 0.0)?,
        second: per_channel(db, 0.0)?,
        ..blank()
    };
    planes(&mut p, of.x, of.gradient, dx)?;
    channels(actions, "batch_norm_backward", of.channels, p, true);
    Ok(())
}

/// A weight or bias as one row.
fn row_of(view: Option<&View>, inner: usize, otherwise: f64) -> Result<Row<'_>, KernelError> {
    view.map_or(Ok(Row::number(otherwise)), |view| Ok(Row::last(view, inner)?.0))
}

/// A result with one element for each row, such as the mean.
fn per_row<'a>(view: Option<&'a View>, outer: &[usize]) -> Row<'a> {
    view.map_or(Row::number(0.0), |view| Row::each(Some(view), &view.stride[..outer.len()]))
}

fn layer_norm(call: &Call<'_>, actions: &mut Actions) -> Result<(), KernelError> {
    let of = LayerNorm::new(call)?;
    let ((to, length), (rows, _)) = (Row::last(of.out, of.inner)?, Row::last(of.from, of.inner)?);
    let operands = [
        to,
        rows,
        row_of(of.weight, of.inner, 1.0)?,
        row_of(of.bias, of.inner, 0.0)?,
        per_row(of.saved[0], of.outer),
        per_row(of.saved[1], of.outer),
    ];
    let mut p = params(actions, of.outer, length, &operands)?;
    p.s[0] = of.eps;
    actions.launch(Family::Norm, "layer_norm", p.rows, [threads(length, 512), 1], &p);
    Ok(())
}

fn layer_norm_backward(call: &Call<'_>, actions: &mut Actions) -> Result<(), KernelError> {
    let LayerNormBackward { gradient, from, inner, outer, mean, rstd, weight, results } =
        LayerNormBackward::new(call)?;
    let ((grad_row, length), (rows, _)) = (Row::last(gradient, inner)?, Row::last(from, inner)?);
    let (mean, rstd) = (per_row(Some(mean), outer), per_row(Some(rstd), outer));
    if let Some(out) = results[0] {
        let operands = [
            Row::last(out, inner)?.0,
            grad_row.clone(),
            rows.clone(),
            mean.clone(),
            rstd.clone(),
            row_of(weight, inner, 1.0)?,
        ];
        let p = params(actions, outer, length, &operands)?;
        actions.launch(Family::Norm, "layer_norm_backward", p.rows, [threads(length, 512), 1], &p);
    }
    let [_, weight, bias] = results;
    if weight.is_some() || bias.is_some() {
        let operands =
            [row_of(weight, inner, 0.0)?, grad_row, rows, mean, rstd, row_of(bias, inner, 0.0)?];
        let mut p = params(actions, outer, length, &operands)?;
        let blocks = (length + 31) / 32;
        p.parts = Parts::new(blocks, p.rows, 128);
        let (at, count) = (std::mem::offset_of!(Rows, parts), p.parts.count);
        let sums = (count, (16 * count * length) as u64);
        actions.in_parts(
            Family::Norm,
            "layer_norm_weights",
            (blocks, blocks),
            [32, 16],
            (&p, at),
            sums,
        );
    }
    Ok(())
}
