//! Pooling in two dimensions. The arithmetic is in kernels/pool.cu.

use crate::backend::operators::arguments::{expect_shape, real, result, shaped, tensor};
use crate::backend::operators::pool::{self, Windows, images, resized};
use crate::backend::operators::shapes::{count, distinct};
use crate::backend::operators::view::{Call, View};
use crate::backend::operators::{KernelError, Table, table};

use super::super::launch::{Actions, Family};
use super::super::params::{Operand, Pool};
use super::Emit;

pub const TABLE: Table<Emit> = table! {
    "max_pool2d_with_indices" | "max_pool2d" => max,
    "max_pool2d_with_indices_backward" => max_backward,
    "avg_pool2d" => |c, a| average(c, a, 0, None),
    "avg_pool2d_backward" => |c, a| average(c, a, 1, Some(0)),
    "adaptive_avg_pool2d" | "_adaptive_avg_pool2d" => |c, a| adaptive(c, a, 0, None),
    "_adaptive_avg_pool2d_backward" => |c, a| adaptive(c, a, 1, Some(0)),
};

/// With a batch dimension in front.
fn operand(view: &View) -> Result<Operand, KernelError> {
    let mut stride: Vec<i64> = view.stride.iter().map(|&s| s as i64).collect();
    if stride.len() == 3 {
        stride.insert(0, 0);
    }
    Operand::strided(view, &stride)
}

fn small(pair: [usize; 2]) -> [i32; 2] {
    pair.map(|n| n as i32)
}

fn blank(shape: [usize; 4], out: [usize; 2]) -> Pool {
    let none = Operand::number(0.0);
    Pool {
        count: 0,
        channels: shape[1] as i64,
        size: small([shape[2], shape[3]]),
        out: small(out),
        kernel: [1; 2],
        stride: [1; 2],
        padding: [0; 2],
        dilation: [1; 2],
        adaptive: 0,
        count_padding: 1,
        divisor: 0.0,
        pooled: none,
        pixels: none,
        index: none,
    }
}

/// Windows of a fixed size.
fn windows(shape: &[usize], of: &Windows) -> Result<Pool, KernelError> {
    Ok(Pool {
        kernel: small(of.kernel),
        stride: small(of.stride),
        padding: small(of.padding),
        dilation: small(of.dilation),
        ..blank(images(shape)?, of.out)
    })
}

/// Launches over all elements of `over`.
fn launch(actions: &mut Actions, kernel: &str, mut p: Pool, over: &View) {
    p.count = count(over) as i64;
    actions.launch(Family::Pool, kernel, (p.count + 255) / 256, [256, 1], &p);
}

fn max(call: &Call<'_>, actions: &mut Actions) -> Result<(), KernelError> {
    let x = real(call, 0)?;
    let of = Windows::of_max(call, &x.shape, 1)?;
    let mut p = windows(&x.shape, &of)?;
    let shape = resized(&x.shape, of.out);
    let out = shaped(call, 0, &shape)?;
    if let Some(indices) = result(call, 1)? {
        pool::expect_indices(indices, &shape)?;
        distinct(call, indices)?;
        p.index = operand(indices)?;
    }
    (p.pooled, p.pixels) = (operand(out)?, operand(x)?);
    launch(actions, "max_pool", p, out);
    Ok(())
}

fn max_backward(call: &Call<'_>, actions: &mut Actions) -> Result<(), KernelError> {
    let (gradient, x, indices) = (real(call, 0)?, real(call, 1)?, tensor(call, 7)?);
    let of = Windows::of_max(call, &x.shape, 2)?;
    let mut p = windows(&x.shape, &of)?;
    let shape = resized(&x.shape, of.out);
    expect_shape("its output gradient", gradient, &shape)?;
    pool::expect_indices(indices, &shape)?;
    let into = shaped(call, 0, &x.shape)?;
    (p.pooled, p.pixels, p.index) = (operand(gradient)?, operand(into)?, operand(indices)?);
    launch(actions, "max_pool_backward", p, into);
    Ok(())
}

/// Forward from argument 0 to output 0, or backward from the gradient in argument `gradient` to
/// output 0.
fn average(
    call: &Call<'_>,
    actions: &mut Actions,
    x: usize,
    gradient: Option<usize>,
) -> Result<(), KernelError> {
    let x = real(call, x)?;
    let first = if gradient.is_some() { 2 } else { 1 };
    let (of, divisor) = pool::average(call, &x.shape, first)?;
    let p = Pool {
        count_padding: i32::from(divisor.with_padding),
        divisor: divisor.fixed.map_or(0.0, |d| d as f64),
        ..windows(&x.shape, &of)?
    };
    averages(call, actions, x, gradient, of.out, p)
}

fn adaptive(
    call: &Call<'_>,
    actions: &mut Actions,
    x: usize,
    gradient: Option<usize>,
) -> Result<(), KernelError> {
    let x = real(call, x)?;
    let out = pool::adaptive(call, &x.shape, gradient)?;
    // What is inside counts, as where padding does not.
    let p = Pool { adaptive: 1, count_padding: 0, ..blank(images(&x.shape)?, out) };
    averages(call, actions, x, gradient, out, p)
}

fn averages(
    call: &Call<'_>,
    actions: &mut Actions,
    x: &View,
    gradient: Option<usize>,
    out: [usize; 2],
    mut p: Pool,
) -> Result<(), KernelError> {
    let shape = resized(&x.shape, out);
    if let Some(at) = gradient {
        let gradient = real(call, at)?;
        expect_shape("its output gradient", gradient, &shape)?;
        let into = shaped(call, 0, &x.shape)?;
        (p.pooled, p.pixels) = (operand(gradient)?, operand(into)?);
        launch(actions, "average_pool_backward", p, into);
    } else {
        let out = shaped(call, 0, &shape)?;
        (p.pooled, p.pixels) = (operand(out)?, operand(x)?);
        launch(actions, "average_pool", p, out);
    }
    Ok(())
}
