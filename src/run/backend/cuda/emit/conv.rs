//! Convolutions in two dimensions, forward and backward.
//!
//! Which algorithm carries one out is chosen later.

use crate::backend::operators::arguments::{
    Input, expect_shape, flag, mask, maybe_real, real, result, shaped,
};
use crate::backend::operators::conv::{Convolution as Of, Places};
use crate::backend::operators::error::unsupported;
use crate::backend::operators::view::{Call, View};
use crate::backend::operators::{KernelError, Table, table};

use super::super::launch::{Action, Actions, Conv, Pass};
use super::super::params::{Convolution, Operand};
use super::Emit;
use super::map::{Extra, map};
use super::reduce::sum;

pub const TABLE: Table<Emit> = table! {
    "conv2d" => |c, a| forward(c, a, Some(2), Places::CONV2D),
    "cudnn_convolution" => |c, a| forward(c, a, None, Places::CUDNN),
    "convolution" | "_convolution" => |c, a| {
        if flag(c, 6)? {
            return transposed(c, a, Places::CONVOLUTION);
        }
        forward(c, a, Some(2), Places::CONVOLUTION)
    },
    "conv_transpose2d" => |c, a| transposed(c, a, Places::TRANSPOSED),
    "convolution_backward" => backward,
};

/// Extents as kernels take them; operands are still to be filled in.
fn params(of: &Of) -> Result<Convolution, KernelError> {
    let small = |n: usize| {
        i32::try_from(n)
            .ok()
            .filter(|&n| n <= 1 << 30)
            .ok_or_else(|| unsupported!("an extent of {n}"))
    };
    let two = |[a, b]: [usize; 2]| Ok::<_, KernelError>([small(a)?, small(b)?]);
    let none = Operand::number(0.0);
    Ok(Convolution {
        images: i64::from(small(of.images)?),
        groups: small(of.groups)?,
        channels_in: small(of.channels[0])?,
        channels_out: small(of.channels[1])?,
        size: two(of.size)?,
        out: two(of.out)?,
        kernel: two(of.kernel)?,
        stride: two(of.stride)?,
        padding: two(of.padding)?,
        dilation: two(of.dilation)?,
        pad: 0,
        x: none,
        w: none,
        y: none,
        bias: none,
    })
}

/// Adds one pass between the large side `x` and the small side `y`.
fn push(
    actions: &mut Actions,
    pass: Pass,
    of: &Of,
    [x, w, y]: [&View; 3],
) -> Result<(), KernelError> {
    if x.dtype != w.dtype || x.dtype != y.dtype {
        return Err(unsupported!(
            "a convolution of {:?}, {:?} and {:?}",
            x.dtype,
            w.dtype,
            y.dtype
        ));
    }
    let written = match pass {
        Pass::Forward => y,
        Pass::BackInput => x,
        Pass::BackWeight => w,
    };
    if !written.shape.contains(&0) {
        let params = Convolution {
            x: Operand::new(x)?,
            w: Operand::new(w)?,
            y: Operand::new(y)?,
            ..params(of)?
        };
        actions.list.push(Action::Conv(Box::new(Conv { pass, dtype: x.dtype, params })));
    }
    Ok(())
}

/// Adds one value to each channel of `output`.
fn add_bias(
    call: &Call<'_>,
    actions: &mut Actions,
    at: Option<usize>,
    output: &View,
) -> Result<(), KernelError> {
    let bias = at.map(|at| maybe_real(call, at)).transpose()?.flatten();
    let Some(bias) = bias else { return Ok(()) };
    expect_shape("its bias", bias, &output.shape[1..2])?;
    let column = View {
        shape: vec![output.shape[1], 1, 1],
        stride: vec![bias.stride[0], 0, 0],
        ..bias.clone()
    };
    let inputs = [Input::View(output), Input::View(&column)];
    map(actions, true, "add", output, &inputs, &Extra::default())
}

fn forward(
    call: &Call<'_>,
    actions: &mut Actions,
    bias: Option<usize>,
    places: Places,
) -> Result<(), KernelError> {
    let (input, weight) = (real(call, 0)?, real(call, 1)?);
    let of = Of::new(call, &input.shape, weight, places)?;
    let output = shaped(call, 0, &of.output())?;
    push(actions, Pass::Forward, &of, [input, weight, output])?;
    add_bias(call, actions, bias, output)
}

/// A transposed convolution is the gradient of the convolution from its output to its input.
fn transposed(call: &Call<'_>, actions: &mut Actions, places: Places) -> Result<(), KernelError> {
    let (input, weight) = (real(call, 0)?, real(call, 1)?);
    let output = result(call, 0)?.ok_or("it has no output 0")?;
    let of = Of::transposed(call, &output.shape, &input.shape, weight, places)?;
    let output = shaped(call, 0, &output.shape)?;
    push(actions, Pass::BackInput, &of, [output, weight, input])?;
    add_bias(call, actions, Some(2), output)
}

fn backward(call: &Call<'_>, actions: &mut Actions) -> Result<(), KernelError> {
    let (gradient, input, weight) = (real(call, 0)?, real(call, 1)?, real(call, 2)?);
    let (transposed, wanted) = (flag(call, 7)?, mask(call, 10)?);
    let (of, large, small) = Of::backward(call, [gradient, input, weight], transposed)?;
    let present = |at: usize| wanted[at] && call.outputs.get(at).is_some_and(Option::is_some);
    if present(0) {
        let into = shaped(call, 0, &input.shape)?;
        if transposed {
            push(actions, Pass::Forward, &of, [gradient, weight, into])?;
        } else {
            push(actions, Pass::BackInput, &of, [into, weight, gradient])?;
        }
    }
    if present(1) {
        let into = shaped(call, 1, &weight.shape)?;
        push(actions, Pass::BackWeight, &of, [large, into, small])?;
    }
    if present(2) {
        let into = shaped(call, 2, &gradient.shape[1..2])?;
        sum(actions, into, gradient, &[true, false, true, true], 1.0)?;
    }
    Ok(())
}
