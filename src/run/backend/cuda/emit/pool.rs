//! Pooling in two dimensions.
//!
//! Not for: the arithmetic (kernels/pool.cu).

use super::super::super::host::kernels::strided::{flag, int, pair, product};
use super::super::super::host::view::{Call, View};
use super::super::launch::{Actions, Family, Operand, Pool};
use super::Emit;
use super::args::{distinct, expect_shape, real, result, shaped, tensor};
use crate::job::{Arg, Dtype};

/// What makes the actions of `kind`.
pub fn find(kind: &str) -> Option<Emit> {
    Some(match kind {
        "aten::max_pool2d_with_indices" | "aten::max_pool2d" => max,
        "aten::max_pool2d_with_indices_backward" => max_backward,
        "aten::avg_pool2d" => |c, a| average(c, a, 0, None),
        "aten::avg_pool2d_backward" => |c, a| average(c, a, 1, Some(0)),
        "aten::adaptive_avg_pool2d" | "aten::_adaptive_avg_pool2d" => {
            |c, a| adaptive(c, a, 0, None)
        }
        "aten::_adaptive_avg_pool2d_backward" => |c, a| adaptive(c, a, 1, Some(0)),
        _ => return None,
    })
}

/// Extents of images: batch, channels, height, width.
fn images(call: &Call<'_>, shape: &[usize]) -> Result<[usize; 4], String> {
    let four = match *shape {
        [c, h, w] => [1, c, h, w],
        [n, c, h, w] => [n, c, h, w],
        _ => {
            return Err(format!(
                "{} pools images of three or four dimensions, not {shape:?}",
                call.operator.kind
            ));
        }
    };
    product(call, &four)?;
    if four[2].max(four[3]) > 1 << 30 || four[1] > 1 << 31 {
        return Err(format!(
            "{} pools images of at most 2^30 rows and columns, not {shape:?}",
            call.operator.kind
        ));
    }
    Ok(four)
}

fn resized(like: &[usize], [height, width]: [usize; 2]) -> Vec<usize> {
    let mut shape = like.to_vec();
    let rank = shape.len();
    (shape[rank - 2], shape[rank - 1]) = (height, width);
    shape
}

/// With a batch dimension in front.
fn operand(view: &View) -> Result<Operand, String> {
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

/// Windows of a fixed size: kernel, stride and padding from arguments `at..at + 3`.
fn windows(
    call: &Call<'_>,
    shape: [usize; 4],
    at: usize,
    dilation: [usize; 2],
    ceil: bool,
) -> Result<Pool, String> {
    let kind = &call.operator.kind;
    let size = [shape[2], shape[3]];
    let kernel = pair(call, at, 1)?.ok_or_else(|| format!("{kind} needs a kernel size"))?;
    let stride = pair(call, at + 1, 1)?.unwrap_or(kernel);
    let padding = pair(call, at + 2, 0)?.unwrap_or([0; 2]);
    let mut out = [0; 2];
    for i in 0..2 {
        if padding[i] > kernel[i] / 2 {
            return Err(format!(
                "{kind}: the padding {padding:?} is more than half of the kernel {kernel:?}"
            ));
        }
        let reach = (kernel[i] - 1)
            .checked_mul(dilation[i])
            .and_then(|r| r.checked_add(1))
            .filter(|&r| r < 1 << 30);
        let round = if ceil { stride[i] - 1 } else { 0 };
        let room =
            reach.and_then(|reach| size[i].checked_add(2 * padding[i] + round)?.checked_sub(reach));
        let Some(room) = room.filter(|_| size[i] > 0) else {
            return Err(format!("{kind}: the kernel {kernel:?} does not fit into {size:?}"));
        };
        out[i] = room / stride[i] + 1;
        // The last window must start inside the image or the padding before it.
        if ceil && (out[i] - 1) * stride[i] >= size[i] + padding[i] {
            out[i] -= 1;
        }
    }
    Ok(Pool {
        kernel: small(kernel),
        stride: small(stride),
        padding: small(padding),
        dilation: small(dilation),
        ..blank(shape, out)
    })
}

fn outs(p: &Pool) -> [usize; 2] {
    p.out.map(|n| n as usize)
}

/// Launches over all elements of `over`.
fn launch(actions: &mut Actions, kernel: &str, mut p: Pool, over: &View) {
    p.count = super::args::elements(over);
    actions.launch(Family::Pool, kernel, (p.count + 255) / 256, [256, 1], &p);
}

fn max(call: &Call<'_>, actions: &mut Actions) -> Result<(), String> {
    let x = real(call, 0)?;
    let dilation = pair(call, 4, 1)?.unwrap_or([1; 2]);
    let mut p = windows(call, images(call, &x.shape)?, 1, dilation, flag(call, 5)?)?;
    let shape = resized(&x.shape, outs(&p));
    let out = shaped(call, 0, &shape)?;
    if let Some(indices) = result(call, 1)? {
        if indices.dtype != Dtype::I64 {
            return Err(format!(
                "{} writes its indices as I64, not {:?}",
                call.operator.kind, indices.dtype
            ));
        }
        expect_shape(indices, &shape)?;
        distinct(call, indices)?;
        p.index = operand(indices)?;
    }
    (p.pooled, p.pixels) = (operand(out)?, operand(x)?);
    launch(actions, "max_pool", p, out);
    Ok(())
}

fn max_backward(call: &Call<'_>, actions: &mut Actions) -> Result<(), String> {
    let (gradient, x, indices) = (real(call, 0)?, real(call, 1)?, tensor(call, 7)?);
    let dilation = pair(call, 5, 1)?.unwrap_or([1; 2]);
    let mut p = windows(call, images(call, &x.shape)?, 2, dilation, flag(call, 6)?)?;
    let shape = resized(&x.shape, outs(&p));
    expect_shape(gradient, &shape)?;
    expect_shape(indices, &shape)?;
    if indices.dtype != Dtype::I64 {
        return Err(format!(
            "{} reads its indices as I64, not {:?}",
            call.operator.kind, indices.dtype
        ));
    }
    let into = shaped(call, 0, &x.shape)?;
    (p.pooled, p.pixels, p.index) = (operand(gradient)?, operand(into)?, operand(indices)?);
    launch(actions, "max_pool_backward", p, into);
    Ok(())
}

/// Forward from argument 0 to output 0, or backward from the gradient in argument `gradient` to output 0.
fn average(
    call: &Call<'_>,
    actions: &mut Actions,
    x: usize,
    gradient: Option<usize>,
) -> Result<(), String> {
    let x = tensor(call, x)?;
    let first = if gradient.is_some() { 2 } else { 1 };
    let mut p = windows(call, images(call, &x.shape)?, first, [1; 2], flag(call, first + 3)?)?;
    p.count_padding =
        i32::from(!matches!(call.operator.args.get(first + 4), Some(Arg::Bool(false))));
    p.divisor = match call.operator.args.get(first + 5) {
        None | Some(Arg::None) => 0.0,
        Some(_) => match int(call, first + 5)? {
            0 => return Err(format!("{} cannot divide by 0", call.operator.kind)),
            d => d as f64,
        },
    };
    averages(call, actions, x, gradient, p)
}

fn adaptive(
    call: &Call<'_>,
    actions: &mut Actions,
    x: usize,
    gradient: Option<usize>,
) -> Result<(), String> {
    let x = tensor(call, x)?;
    let shape = images(call, &x.shape)?;
    let out = match gradient {
        None => pair(call, 1, 0)?
            .ok_or_else(|| format!("{} needs an output size", call.operator.kind))?,
        Some(at) => {
            let [_, _, height, width] = images(call, &tensor(call, at)?.shape)?;
            [height, width]
        }
    };
    if shape[2] == 0 || shape[3] == 0 {
        return Err(format!("{} needs an image, not {:?}", call.operator.kind, x.shape));
    }
    // What is inside counts, as where padding does not.
    averages(
        call,
        actions,
        x,
        gradient,
        Pool { adaptive: 1, count_padding: 0, ..blank(shape, out) },
    )
}

fn averages(
    call: &Call<'_>,
    actions: &mut Actions,
    x: &View,
    gradient: Option<usize>,
    mut p: Pool,
) -> Result<(), String> {
    let shape = resized(&x.shape, outs(&p));
    if let Some(at) = gradient {
        let gradient = real(call, at)?;
        expect_shape(gradient, &shape)?;
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
