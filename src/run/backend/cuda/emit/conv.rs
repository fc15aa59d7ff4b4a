//! Convolutions in two dimensions, forward and backward.
//!
//! Not for: which algorithm carries one out.

use super::super::super::host::kernels::arguments::Input;
use super::super::super::host::kernels::strided::{flag, int, mask, pair, product};
use super::super::super::host::view::{Call, View};
use super::super::launch::{Action, Actions, Conv, Convolution, Operand, Pass};
use super::Emit;
use super::args::{expect_shape, maybe_tensor, real, shaped};
use super::map::{Extra, map};
use super::reduce::sum;
use crate::job::Arg;

/// What makes the actions of `kind`.
pub fn find(kind: &str) -> Option<Emit> {
    Some(match kind {
        "aten::conv2d" => |c, a| forward(c, a, Some(2), [3, 4, 5], 6),
        "aten::cudnn_convolution" => |c, a| forward(c, a, None, [3, 2, 4], 5),
        "aten::convolution" | "aten::_convolution" => |c, a| {
            if flag(c, 6)? {
                return Err("transposed convolutions are not supported".into());
            }
            forward(c, a, Some(2), [3, 4, 5], 8)
        },
        "aten::convolution_backward" => backward,
        _ => return None,
    })
}

/// What is convolved, checked; operands are still to be filled in.
fn settings(
    call: &Call<'_>,
    input: &View,
    weight: &View,
    [stride, padding, dilation]: [usize; 3],
    groups: usize,
) -> Result<Convolution, String> {
    let kind = &call.operator.kind;
    let (stride, dilation) =
        (pair(call, stride, 1)?.unwrap_or([1; 2]), pair(call, dilation, 1)?.unwrap_or([1; 2]));
    let (&[images, all_in, height, width], &[all_out, channels_in, kernel_h, kernel_w]) =
        (&input.shape[..], &weight.shape[..])
    else {
        return Err(format!(
            "{kind} convolves images of four dimensions only, not {:?} with {:?}",
            input.shape, weight.shape
        ));
    };
    let (size, kernel) = ([height, width], [kernel_h, kernel_w]);
    if kernel.contains(&0) {
        return Err(format!("{kind}: the kernel {:?} is empty", weight.shape));
    }
    let reach = |i: usize| {
        (kernel[i] - 1)
            .checked_mul(dilation[i])
            .filter(|&r| r < 1 << 30)
            .ok_or_else(|| format!("{kind}: the kernel is too wide"))
    };
    let reach = [reach(0)?, reach(1)?];
    let padding = match call.operator.args.get(padding) {
        Some(Arg::Text(word)) if word == "valid" => [0; 2],
        Some(Arg::Text(word)) => {
            if word != "same" || reach.iter().any(|r| r % 2 != 0) || stride != [1; 2] {
                return Err(format!("{kind} does not support the padding `{word}` here"));
            }
            reach.map(|r| r / 2)
        }
        _ => pair(call, padding, 0)?.unwrap_or([0; 2]),
    };
    let groups = if call.operator.args.len() > groups { int(call, groups)? } else { 1 };
    let groups = usize::try_from(groups)
        .ok()
        .filter(|&g| g > 0 && all_out % g == 0 && Some(all_in) == channels_in.checked_mul(g));
    let Some(groups) = groups else {
        return Err(format!(
            "{kind}: the groups do not divide the channels of {:?} and {:?}",
            input.shape, weight.shape
        ));
    };
    let extent = |i: usize| {
        Some(size[i].checked_add(2 * padding[i])?.checked_sub(reach[i] + 1)? / stride[i] + 1)
    };
    let Some((out_h, out_w)) = extent(0).zip(extent(1)) else {
        return Err(format!(
            "{kind}: the kernel {:?} does not fit into {:?}",
            weight.shape, input.shape
        ));
    };
    product(call, &[images, all_out, out_h, out_w])?;
    product(call, &[images, all_in, height, width])?;
    product(call, &[all_out, all_in, kernel_h, kernel_w])?;
    let small = |n: usize| {
        i32::try_from(n)
            .ok()
            .filter(|&n| n <= 1 << 30)
            .ok_or_else(|| format!("{kind}: an extent of {n}"))
    };
    let two = |[a, b]: [usize; 2]| Ok::<_, String>([small(a)?, small(b)?]);
    let none = Operand::number(0.0);
    Ok(Convolution {
        images: images as i64,
        groups: small(groups)?,
        channels_in: small(channels_in)?,
        channels_out: small(all_out / groups)?,
        size: two(size)?,
        out: two([out_h, out_w])?,
        kernel: two(kernel)?,
        stride: two(stride)?,
        padding: two(padding)?,
        dilation: two(dilation)?,
        pad: 0,
        x: none,
        w: none,
        y: none,
        bias: none,
    })
}

fn output_shape(p: &Convolution) -> [usize; 4] {
    [p.images as usize, (p.groups * p.channels_out) as usize, p.out[0] as usize, p.out[1] as usize]
}

fn push(
    actions: &mut Actions,
    pass: Pass,
    p: &Convolution,
    [x, w, y]: [&View; 3],
) -> Result<(), String> {
    if x.dtype != w.dtype || x.dtype != y.dtype {
        return Err(format!("a convolution of {:?}, {:?} and {:?}", x.dtype, w.dtype, y.dtype));
    }
    let written = match pass {
        Pass::Forward => y,
        Pass::BackInput => x,
        Pass::BackWeight => w,
    };
    if !written.shape.contains(&0) {
        let params =
            Convolution { x: Operand::of(x)?, w: Operand::of(w)?, y: Operand::of(y)?, ..*p };
        actions.list.push(Action::Conv(Box::new(Conv { pass, dtype: x.dtype, params })));
    }
    Ok(())
}

fn forward(
    call: &Call<'_>,
    actions: &mut Actions,
    bias: Option<usize>,
    places: [usize; 3],
    groups: usize,
) -> Result<(), String> {
    let (input, weight) = (real(call, 0)?, real(call, 1)?);
    let p = settings(call, input, weight, places, groups)?;
    let shape = output_shape(&p);
    let output = shaped(call, 0, &shape)?;
    push(actions, Pass::Forward, &p, [input, weight, output])?;
    let bias = bias.map(|at| maybe_tensor(call, at)).transpose()?.flatten();
    if let Some(bias) = bias {
        expect_shape(bias, &shape[1..2])?;
        let column = View {
            shape: vec![shape[1], 1, 1],
            stride: vec![bias.stride[0], 0, 0],
            ..bias.clone()
        };
        map(
            actions,
            true,
            "add",
            output,
            &[Input::View(output), Input::View(&column)],
            &Extra::default(),
        )?;
    }
    Ok(())
}

fn backward(call: &Call<'_>, actions: &mut Actions) -> Result<(), String> {
    let (gradient, input, weight) = (real(call, 0)?, real(call, 1)?, real(call, 2)?);
    if flag(call, 7)? {
        return Err("transposed convolutions are not supported".into());
    }
    let p = settings(call, input, weight, [4, 5, 6], 9)?;
    expect_shape(gradient, &output_shape(&p))?;
    let wanted = mask(call, 10)?;
    let present = |at: usize| wanted[at] && call.outputs.get(at).is_some_and(Option::is_some);
    if present(0) {
        let into = shaped(call, 0, &input.shape)?;
        push(actions, Pass::BackInput, &p, [into, weight, gradient])?;
    }
    if present(1) {
        let into = shaped(call, 1, &weight.shape)?;
        push(actions, Pass::BackWeight, &p, [input, into, gradient])?;
    }
    if present(2) {
        let into = shaped(call, 2, &gradient.shape[1..2])?;
        sum(actions, into, gradient, &[true, false, true, true], 1.0)?;
    }
    Ok(())
}
