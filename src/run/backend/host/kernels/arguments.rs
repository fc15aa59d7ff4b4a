//! A call's arguments and results, with their types checked.
//!
//! Numbers come as plain arguments or as 0-dim tensors of the host; a number that the recording left out is
//! an error, never a guess. Not for: reading elements ([`super::elements`]).

use super::super::view::{Call, Operand, View};
use crate::job::{Arg, Dtype};

/// An operand of arithmetic: a tensor or a host number.
#[derive(Clone, Copy, Debug)]
pub enum Input<'a> {
    /// A tensor.
    View(&'a View),
    /// A number; `float` says whether it was one with a fraction part.
    Number {
        /// Its value.
        value: f64,
        /// Whether it takes part in promotion as a floating number.
        float: bool,
    },
}

impl Input<'_> {
    /// Whether arithmetic with it is floating.
    pub fn is_float(&self) -> bool {
        match self {
            Self::View(view) => view.dtype == Dtype::F32,
            Self::Number { float, .. } => *float,
        }
    }
}

/// Refuses element types that kernels can't work in.
///
/// # Errors
/// For everything but f32, i64, i32, u8 and bool.
pub fn supported(view: &View) -> Result<&View, String> {
    match view.dtype {
        Dtype::F32 | Dtype::I64 | Dtype::I32 | Dtype::U8 | Dtype::Bool => Ok(view),
        other => Err(format!(
            "a tensor is {other:?}; of the floating types the host device supports f32 only"
        )),
    }
}

fn plain<'a>(call: &'a Call<'_>, index: usize) -> &'a Arg {
    call.operator.args.get(index).unwrap_or(&Arg::None)
}

/// Argument `index`, a tensor.
///
/// # Errors
/// When it is something else or of an unsupported type.
pub fn tensor<'a>(call: &'a Call<'_>, index: usize) -> Result<&'a View, String> {
    match call.args.get(index) {
        Some(Operand::Tensor(view)) => supported(view),
        _ => Err(format!("argument {index} is not a tensor on the device")),
    }
}

/// Argument `index` where it is a tensor.
///
/// # Errors
/// When its type is unsupported.
pub fn maybe_tensor<'a>(call: &'a Call<'_>, index: usize) -> Result<Option<&'a View>, String> {
    match call.args.get(index) {
        Some(Operand::Tensor(view)) => supported(view).map(Some),
        _ => Ok(None),
    }
}

/// Argument `index`, a list of tensors.
///
/// # Errors
/// When it is something else or one is of an unsupported type.
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
///
/// # Errors
/// When it is neither, or a number the recording left out.
pub fn maybe_input<'a>(call: &'a Call<'_>, index: usize) -> Result<Option<Input<'a>>, String> {
    if let Some(view) = maybe_tensor(call, index)? {
        return Ok(Some(Input::View(view)));
    }
    match plain(call, index) {
        Arg::None => Ok(None),
        Arg::Int(value) => Ok(Some(Input::Number { value: *value as f64, float: false })),
        Arg::Bool(value) => {
            Ok(Some(Input::Number { value: f64::from(u8::from(*value)), float: false }))
        }
        Arg::Float(value) => Ok(Some(Input::Number { value: *value, float: true })),
        Arg::Text(word) => match word.trim_start_matches('-') {
            "inf" if word.starts_with('-') => {
                Ok(Some(Input::Number { value: f64::NEG_INFINITY, float: true }))
            }
            "inf" => Ok(Some(Input::Number { value: f64::INFINITY, float: true })),
            _ => Err(format!("argument {index} is the word `{word}` where a number is needed")),
        },
        Arg::Host { value: Some(value), dtype, .. } => {
            let float = matches!(dtype, Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::Bf16);
            Ok(Some(Input::Number { value: *value, float }))
        }
        Arg::Host { value: None, shape, .. } if shape.is_empty() => Err(format!(
            "argument {index} is a number that the trace did not record; record it inside a range named neap.scalar:VALUE"
        )),
        _ => Err(format!("argument {index} is neither a device tensor nor a number")),
    }
}

/// Argument `index`, a tensor or a number.
///
/// # Errors
/// As [`maybe_input`], and when it is absent.
pub fn input<'a>(call: &'a Call<'_>, index: usize) -> Result<Input<'a>, String> {
    maybe_input(call, index)?.ok_or_else(|| format!("argument {index} is missing"))
}

/// Argument `index`, a number; `None` where it is absent.
///
/// # Errors
/// When it is something else.
pub fn maybe_number(call: &Call<'_>, index: usize) -> Result<Option<f64>, String> {
    match maybe_input(call, index)? {
        None => Ok(None),
        Some(Input::Number { value, .. }) => Ok(Some(value)),
        Some(Input::View(_)) => {
            Err(format!("argument {index} is a tensor where a number is needed"))
        }
    }
}

/// Argument `index`, a number, or `default` where it is absent.
///
/// # Errors
/// When it is something else.
pub fn number_or(call: &Call<'_>, index: usize, default: f64) -> Result<f64, String> {
    Ok(maybe_number(call, index)?.unwrap_or(default))
}

/// Argument `index`, a number.
///
/// # Errors
/// When it is something else or absent.
pub fn number(call: &Call<'_>, index: usize) -> Result<f64, String> {
    maybe_number(call, index)?.ok_or_else(|| format!("argument {index} is missing"))
}

/// Argument `index`, a whole number, or `default` where it is absent.
///
/// # Errors
/// When it is something else.
pub fn int_or(call: &Call<'_>, index: usize, default: i64) -> Result<i64, String> {
    match plain(call, index) {
        Arg::Int(value) => Ok(*value),
        Arg::Bool(value) => Ok(i64::from(*value)),
        Arg::None => Ok(default),
        _ => Err(format!("argument {index} is not a whole number")),
    }
}

/// Argument `index`, a flag; absent is false.
pub fn flag(call: &Call<'_>, index: usize) -> bool {
    matches!(plain(call, index), Arg::Bool(true))
        || matches!(plain(call, index), Arg::Int(n) if *n != 0)
}

/// Argument `index`, a list of whole numbers; absent is empty.
///
/// # Errors
/// When it is something else.
pub fn ints(call: &Call<'_>, index: usize) -> Result<Vec<i64>, String> {
    match plain(call, index) {
        Arg::Ints(list) => Ok(list.clone()),
        Arg::Int(value) => Ok(vec![*value]),
        Arg::None => Ok(Vec::new()),
        Arg::Floats(list) if list.is_empty() => Ok(Vec::new()),
        Arg::Bools(list) if list.is_empty() => Ok(Vec::new()),
        Arg::Tensors(list) if list.is_empty() => Ok(Vec::new()),
        _ => Err(format!("argument {index} is not a list of whole numbers")),
    }
}

/// Argument `index`, a word; absent is empty.
pub fn text<'a>(call: &'a Call<'_>, index: usize) -> &'a str {
    match plain(call, index) {
        Arg::Text(word) => word,
        _ => "",
    }
}

/// The first declared output.
///
/// # Errors
/// When there is none or its type is unsupported.
pub fn output<'a>(call: &'a Call<'_>) -> Result<&'a View, String> {
    supported(call.outputs.first().and_then(Option::as_ref).ok_or("it has no output to write")?)
}

/// Result `index`, declared or hidden: hidden ones follow the declared.
///
/// # Errors
/// When its type is unsupported.
pub fn result<'a>(call: &'a Call<'_>, index: usize) -> Result<Option<&'a View>, String> {
    let declared = call.outputs.len();
    let view = if index < declared {
        call.outputs[index].as_ref()
    } else {
        call.hidden.get(index - declared)
    };
    view.map(supported).transpose()
}

/// Refuses all but f32.
///
/// # Errors
/// For another type.
pub fn floating(view: &View) -> Result<&View, String> {
    if view.dtype == Dtype::F32 {
        Ok(view)
    } else {
        Err(format!("a tensor is {:?}; this operator supports f32 only", view.dtype))
    }
}
