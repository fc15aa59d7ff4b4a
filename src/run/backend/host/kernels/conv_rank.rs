//! Convolutions of one, two or three dimensions: which kernel does them.
//!
//! In one dimension they are those of images of height 1.

use crate::backend::operators::arguments::{flag, real};
use crate::backend::operators::conv::Places;
use crate::backend::operators::view::{Call, Operand, View};
use crate::backend::operators::{KernelError, Table, table};
use crate::job::{Arg, Operator};

use super::{Kernel, conv, conv_volume};

pub const TABLE: Table<Kernel> = table! {
    "conv2d" | "conv1d" | "conv3d" => |call| forward(call, Some(2), Places::CONV2D),
    "cudnn_convolution" => |call| forward(call, None, Places::CUDNN),
    "convolution" | "_convolution" => |call| {
            if flag(call, 6)? {
                return transposed(call, Places::CONVOLUTION);
            }
            forward(call, Some(2), Places::CONVOLUTION)
        },
    "conv_transpose2d" | "conv_transpose1d" | "conv_transpose3d" => {
            |call| transposed(call, Places::TRANSPOSED)
        },
    "convolution_backward" => backward,
};

fn forward(call: &Call<'_>, bias: Option<usize>, places: Places) -> Result<(), KernelError> {
    match real(call, 1)?.shape.len() {
        3 => on_rows(call, places, |call| conv::forward(call, bias, places)),
        5 => conv_volume::forward(call, places),
        _ => conv::forward(call, bias, places),
    }
}

fn transposed(call: &Call<'_>, places: Places) -> Result<(), KernelError> {
    match real(call, 1)?.shape.len() {
        3 => on_rows(call, places, |call| conv::transposed(call, places)),
        5 => conv_volume::transposed(call, places),
        _ => conv::transposed(call, places),
    }
}

fn backward(call: &Call<'_>) -> Result<(), KernelError> {
    match real(call, 2)?.shape.len() {
        3 => on_rows(call, Places::BACKWARD, conv::backward),
        5 => conv_volume::backward(call),
        _ => conv::backward(call),
    }
}

/// The same call on images of height 1: views of three dimensions get a height, and lists of one
/// number a number for it.
fn on_rows(
    call: &Call<'_>,
    places: Places,
    work: impl FnOnce(&Call<'_>) -> Result<(), KernelError>,
) -> Result<(), KernelError> {
    let row = |view: &View| {
        let mut view = view.clone();
        if view.shape.len() == 3 {
            view.shape.insert(2, 1);
            view.stride.insert(2, view.shape[3] * view.stride[2]);
        }
        view
    };
    let number = |(at, arg): (usize, &Arg)| match arg {
        Arg::Ints(list) if list.len() == 1 => {
            Arg::Ints(vec![i64::from(at != places.padding), list[0]])
        }
        other => other.clone(),
    };
    let args: Vec<Operand> = call
        .args
        .iter()
        .map(|arg| if let Operand::Tensor(v) = arg { Operand::Tensor(row(v)) } else { arg.clone() })
        .collect();
    let outputs: Vec<Option<View>> = call.outputs.iter().map(|v| v.as_ref().map(row)).collect();
    let operator = Operator {
        args: call.operator.args.iter().enumerate().map(number).collect(),
        ..call.operator.clone()
    };
    work(&Call { operator: &operator, args: &args, outputs: &outputs, ..*call })
}
