//! Softmax and its logarithm along one dimension, and their gradients.
//!
//! Each row is passed over three times, a block at a time; denominators are kept in double
//! precision.

use crate::backend::operators::arguments::{int_or, output, tensor};
use crate::backend::operators::shapes::{dimension, each, same_shape};
use crate::backend::operators::view::{Call, View};
use crate::backend::operators::{KernelError, Table, table};

use super::Kernel;
use super::elements::{BLOCK, Rows, parts, sum_of};
use super::math::exp;

pub const TABLE: Table<Kernel> = table! {
    "softmax" | "_softmax" | "_safe_softmax" => |c| forward(c, false),
    "log_softmax" | "_log_softmax" => |c| forward(c, true),
    "_softmax_backward_data" => |c| backward(c, false),
    "_log_softmax_backward_data" => |c| backward(c, true),
};

/// The largest element of a row and the sum of the exponentials of the differences from it.
pub fn extent_of(rows: &Rows<'_>, offset: usize) -> (f32, f64) {
    let mut block = [0.0f32; BLOCK];
    let mut strands = [f32::NEG_INFINITY; 16];
    for (first, n) in parts(rows.length) {
        rows.load(offset, first, &mut block[..n]);
        for some in block[..n].chunks(16) {
            for (most, &x) in strands.iter_mut().zip(some) {
                *most = if x > *most || x.is_nan() { x } else { *most };
            }
        }
    }
    let most =
        strands.iter().fold(f32::NEG_INFINITY, |m, &x| if x > m || x.is_nan() { x } else { m });
    let mut sum = 0.0;
    for (first, n) in parts(rows.length) {
        rows.load(offset, first, &mut block[..n]);
        block[..n].iter_mut().for_each(|x| *x = exp(*x - most));
        sum += sum_of(n, |i| f64::from(block[i]));
    }
    (most, sum)
}

/// Writes softmax (or its logarithm) of `from` along `dim`; a row of nothing but minus infinities
/// gives zeros.
pub fn apply(
    out: &View,
    from: &View,
    dim: usize,
    log: bool,
    safe: bool,
) -> Result<(), KernelError> {
    same_shape(out, from)?;
    let (to, rows) = (Rows::along(out, dim)?, Rows::along(from, dim)?);
    let mut block = [0.0f32; BLOCK];
    each(&rows.outer, &[&to.stride, &rows.stride], |[target, source]| {
        let (most, sum) = extent_of(&rows, source);
        let (log_sum, scale) = (sum.ln() as f32, (1.0 / sum) as f32);
        for (first, n) in parts(rows.length) {
            let block = &mut block[..n];
            rows.load(source, first, block);
            if log {
                block.iter_mut().for_each(|x| *x = (*x - most) - log_sum);
            } else if safe && most == f32::NEG_INFINITY {
                block.fill(0.0);
            } else {
                block.iter_mut().for_each(|x| *x = exp(*x - most) * scale);
            }
            to.store(target, first, block);
        }
    });
    Ok(())
}

fn forward(call: &Call<'_>, log: bool) -> Result<(), KernelError> {
    let (out, from) = (output(call)?, tensor(call, 0)?);
    apply(
        out,
        from,
        dimension(int_or(call, 1, -1)?, from.shape.len())?,
        log,
        call.operator.kind == "aten::_safe_softmax",
    )
}

fn backward(call: &Call<'_>, log: bool) -> Result<(), KernelError> {
    let (out, grad, saved) = (output(call)?, tensor(call, 0)?, tensor(call, 1)?);
    same_shape(out, saved)?;
    same_shape(out, grad)?;
    let dim = dimension(int_or(call, 2, -1)?, out.shape.len())?;
    let (to, grad, saved) =
        (Rows::along(out, dim)?, Rows::along(grad, dim)?, Rows::along(saved, dim)?);
    let (mut g, mut y) = ([0.0f32; BLOCK], [0.0f32; BLOCK]);
    each(&to.outer, &[&to.stride, &grad.stride, &saved.stride], |[target, from, with]| {
        let mut sum = 0.0;
        for (first, n) in parts(to.length) {
            grad.load(from, first, &mut g[..n]);
            if !log {
                saved.load(with, first, &mut y[..n]);
            }
            sum += if log {
                sum_of(n, |i| f64::from(g[i]))
            } else {
                sum_of(n, |i| f64::from(g[i]) * f64::from(y[i]))
            };
        }
        let sum = sum as f32;
        for (first, n) in parts(to.length) {
            grad.load(from, first, &mut g[..n]);
            saved.load(with, first, &mut y[..n]);
            for (g, &y) in g[..n].iter_mut().zip(&y[..n]) {
                *g = if log { *g - exp(y) * sum } else { y * (*g - sum) };
            }
            to.store(target, first, &g[..n]);
        }
    });
    Ok(())
}
