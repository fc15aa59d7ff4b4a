//! A call's tensors as CUDA takes them: f32 and bf16 where the host has f32.
//!
//! Plain arguments are read by the host's functions. Not for: actions.

use super::super::super::host::kernels::arguments::{self, Input};
use super::super::super::host::kernels::elements::count;
use super::super::super::host::view::{Call, Operand, View};
use super::super::launch::code;
use crate::job::Dtype;

/// Whether arithmetic with it is floating.
pub fn is_floating(view: &View) -> bool {
    matches!(view.dtype, Dtype::F32 | Dtype::Bf16)
}

/// [`is_floating`] of a tensor, or whether a number has a fraction part.
pub fn input_is_float(input: &Input<'_>) -> bool {
    match input {
        Input::View(view) => is_floating(view),
        Input::Number { float, .. } => *float,
    }
}

/// Refuses what kernels can't read.
pub fn supported(view: &View) -> Result<&View, String> {
    code(view.dtype).map(|_| view)
}

/// Refuses all but f32 and bf16.
pub fn floating(view: &View) -> Result<&View, String> {
    if is_floating(view) {
        Ok(view)
    } else {
        Err(format!("a tensor is {:?}; this operator supports F32 and Bf16", view.dtype))
    }
}

/// Argument `index`, a tensor.
pub fn tensor<'a>(call: &'a Call<'_>, index: usize) -> Result<&'a View, String> {
    maybe_tensor(call, index)?
        .ok_or_else(|| format!("argument {index} is not a tensor on the device"))
}

/// Argument `index` where it is a tensor.
pub fn maybe_tensor<'a>(call: &'a Call<'_>, index: usize) -> Result<Option<&'a View>, String> {
    match call.args.get(index) {
        Some(Operand::Tensor(view)) => supported(view).map(Some),
        _ => Ok(None),
    }
}

/// Argument `index`, a floating tensor.
pub fn real<'a>(call: &'a Call<'_>, index: usize) -> Result<&'a View, String> {
    floating(tensor(call, index)?)
}

/// Argument `index`, a list of tensors.
pub fn tensors<'a>(call: &'a Call<'_>, index: usize) -> Result<&'a [Option<View>], String> {
    match call.args.get(index) {
        Some(Operand::Tensors(list)) => list
            .iter()
            .flatten()
            .try_for_each(|v| supported(v).map(|_| ()))
            .map(|()| list.as_slice()),
        _ => Err(format!("argument {index} is not a list of tensors")),
    }
}

/// Argument `index`, a tensor or a number; `None` where it is absent.
pub fn maybe_input<'a>(call: &'a Call<'_>, index: usize) -> Result<Option<Input<'a>>, String> {
    match maybe_tensor(call, index)? {
        Some(view) => Ok(Some(Input::View(view))),
        None => arguments::maybe_input(call, index),
    }
}

/// Argument `index`, a tensor or a number.
pub fn input<'a>(call: &'a Call<'_>, index: usize) -> Result<Input<'a>, String> {
    maybe_input(call, index)?.ok_or_else(|| format!("argument {index} is missing"))
}

/// The first declared output.
pub fn output<'a>(call: &'a Call<'_>) -> Result<&'a View, String> {
    result(call, 0)?
        .filter(|_| !call.outputs.is_empty())
        .ok_or_else(|| "it has no output to write".to_owned())
}

/// Result `index`, declared or hidden: hidden ones follow the declared.
pub fn result<'a>(call: &'a Call<'_>, index: usize) -> Result<Option<&'a View>, String> {
    let declared = call.outputs.len();
    let view = if index < declared {
        call.outputs[index].as_ref()
    } else {
        call.hidden.get(index - declared)
    };
    view.map(supported).transpose()
}

/// A floating output of a shape.
pub fn shaped<'a>(call: &'a Call<'_>, index: usize, shape: &[usize]) -> Result<&'a View, String> {
    let view = floating(result(call, index)?.ok_or_else(|| format!("it has no output {index}"))?)?;
    expect_shape(view, shape)?;
    distinct(call, view)?;
    Ok(view)
}

/// Refuses another shape.
pub fn expect_shape(view: &View, shape: &[usize]) -> Result<(), String> {
    if view.shape == shape {
        Ok(())
    } else {
        Err(format!("a tensor is of shape {:?} where {shape:?} is needed", view.shape))
    }
}

/// Refuses an output that arguments or other outputs share.
pub fn distinct(call: &Call<'_>, view: &View) -> Result<(), String> {
    super::super::super::host::kernels::strided::distinct(call, view).map(|_| ())
}

/// Elements as a signed number.
pub fn elements(view: &View) -> i64 {
    count(view) as i64
}
