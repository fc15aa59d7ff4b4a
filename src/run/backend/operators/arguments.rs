//! A call's arguments and results, with their types checked, for every backend.
//!
//! A number is a plain argument or a 0-dim tensor on the host. A number that the recording left out
//! is an error.

use super::KernelError;
use super::error::{invalid, unsupported};
use super::shapes::distinct;
use super::view::{Call, Operand, View};
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
            Self::View(view) => is_floating(view),
            Self::Number { float, .. } => *float,
        }
    }
}

/// Whether the elements are floating-point numbers that kernels work in.
#[must_use]
pub fn is_floating(view: &View) -> bool {
    matches!(view.dtype, Dtype::F32 | Dtype::Bf16 | Dtype::F16 | Dtype::F64)
}

/// Refuses element types that no kernel works in.
///
/// # Errors
/// For everything but f32, bf16, f16, f64, i64, i32, u8 and bool.
pub fn supported(view: &View) -> Result<&View, KernelError> {
    match view.dtype {
        Dtype::I64 | Dtype::I32 | Dtype::U8 | Dtype::Bool => Ok(view),
        _ if is_floating(view) => Ok(view),
        other => Err(unsupported!(
            "a tensor is {other:?}; supported are F32, Bf16, F16, F64, I64, I32, U8 and Bool"
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
pub fn tensor<'a>(call: &'a Call<'_>, index: usize) -> Result<&'a View, KernelError> {
    match call.args.get(index) {
        Some(Operand::Tensor(view)) => supported(view),
        _ if matches!(call.operator.args.get(index), Some(Arg::None)) => Err(invalid!(
            "argument {index} has no elements in the trace; where a mask decides how many there are, record on a device that computes, or multiply by the mask"
        )),
        _ => Err(invalid!("argument {index} is not a tensor on the device")),
    }
}

/// Argument `index` where it is a tensor.
///
/// # Errors
/// When its type is unsupported.
pub fn maybe_tensor<'a>(call: &'a Call<'_>, index: usize) -> Result<Option<&'a View>, KernelError> {
    match call.args.get(index) {
        Some(Operand::Tensor(view)) => supported(view).map(Some),
        _ => Ok(None),
    }
}

/// Argument `index`, a list of tensors.
///
/// # Errors
/// When it is something else or one is of an unsupported type.
pub fn tensors<'a>(call: &'a Call<'_>, index: usize) -> Result<&'a [Option<View>], KernelError> {
    match call.args.get(index) {
        Some(Operand::Tensors(list)) => list
            .iter()
            .flatten()
            .try_for_each(|v| supported(v).map(|_| ()))
            .map(|()| list.as_slice()),
        _ => Err(invalid!("argument {index} is not a list of tensors")),
    }
}

/// Argument `index`, a tensor or a number; `None` where it is absent.
///
/// # Errors
/// When it is neither, or a number the recording left out.
pub fn maybe_input<'a>(call: &'a Call<'_>, index: usize) -> Result<Option<Input<'a>>, KernelError> {
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
            _ => Err(invalid!("argument {index} is the word `{word}` where a number is needed")),
        },
        Arg::Host { value: Some(value), dtype, .. } => {
            let float = matches!(dtype, Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::Bf16);
            Ok(Some(Input::Number { value: *value, float }))
        }
        Arg::Host { value: None, shape, .. } if shape.is_empty() => Err(invalid!(
            "argument {index} is a number that the trace did not record; record it inside a range named neap.scalar:VALUE"
        )),
        _ => Err(invalid!("argument {index} is neither a device tensor nor a number")),
    }
}

/// Argument `index`, a tensor or a number.
///
/// # Errors
/// As [`maybe_input`], and when it is absent.
pub fn input<'a>(call: &'a Call<'_>, index: usize) -> Result<Input<'a>, KernelError> {
    maybe_input(call, index)?.ok_or_else(|| invalid!("argument {index} is missing"))
}

/// Argument `index`, a number; `None` where it is absent.
///
/// # Errors
/// When it is something else.
pub fn maybe_number(call: &Call<'_>, index: usize) -> Result<Option<f64>, KernelError> {
    match maybe_input(call, index)? {
        None => Ok(None),
        Some(Input::Number { value, .. }) => Ok(Some(value)),
        Some(Input::View(_)) => {
            Err(invalid!("argument {index} is a tensor where a number is needed"))
        }
    }
}

/// Argument `index`, a number, or `default` where it is absent.
///
/// # Errors
/// When it is something else.
pub fn number_or(call: &Call<'_>, index: usize, default: f64) -> Result<f64, KernelError> {
    Ok(maybe_number(call, index)?.unwrap_or(default))
}

/// Argument `index`, a number.
///
/// # Errors
/// When it is something else or absent.
pub fn number(call: &Call<'_>, index: usize) -> Result<f64, KernelError> {
    maybe_number(call, index)?.ok_or_else(|| invalid!("argument {index} is missing"))
}

/// Argument `index`, a whole number; `None` where it is absent.
///
/// # Errors
/// When it is something else.
pub fn maybe_int(call: &Call<'_>, index: usize) -> Result<Option<i64>, KernelError> {
    match plain(call, index) {
        Arg::Int(value) => Ok(Some(*value)),
        Arg::Bool(value) => Ok(Some(i64::from(*value))),
        Arg::None => Ok(None),
        other => Err(invalid!("argument {index} is not a whole number but {other:?}")),
    }
}

/// Argument `index`, a whole number, or `default` where it is absent.
///
/// # Errors
/// When it is something else.
pub fn int_or(call: &Call<'_>, index: usize, default: i64) -> Result<i64, KernelError> {
    Ok(maybe_int(call, index)?.unwrap_or(default))
}

/// Argument `index`, a flag; absent is false.
///
/// # Errors
/// When it is something else.
pub fn flag(call: &Call<'_>, index: usize) -> Result<bool, KernelError> {
    Ok(int_or(call, index, 0)? != 0)
}

/// Argument `index`, one flag for each of three results such as gradients; absent is all.
///
/// # Errors
/// When it is something else, or the operator has no place for a result that is wanted.
pub fn mask(call: &Call<'_>, index: usize) -> Result<[bool; 3], KernelError> {
    let wanted = match call.operator.args.get(index) {
        Some(Arg::Bools(flags)) if flags.len() == 3 => [flags[0], flags[1], flags[2]],
        None => return Ok([true; 3]),
        other => return Err(invalid!("argument {index} is not three flags but {other:?}")),
    };
    let places = call.outputs.len();
    match wanted.iter().rposition(|&wanted| wanted).filter(|&last| last >= places) {
        Some(last) => Err(invalid!(
            "argument {index} wants output {last}, but it has {places} outputs: record the graph again"
        )),
        None => Ok(wanted),
    }
}

/// Argument `index`, one or two whole numbers for height and width, at least `least`; `None` where
/// it is empty or absent.
///
/// # Errors
/// When it is something else or out of range.
pub fn pair(
    call: &Call<'_>,
    index: usize,
    least: usize,
) -> Result<Option<[usize; 2]>, KernelError> {
    let one = |n: i64| {
        // Far above any real kernel, far below where sums could overflow.
        usize::try_from(n)
            .ok()
            .filter(|&n| n >= least && n <= 1 << 24)
            .ok_or_else(|| invalid!("{n} as argument {index} is out of range"))
    };
    match ints(call, index)?[..] {
        [] => Ok(None),
        [n] => Ok(Some([one(n)?; 2])),
        [h, w] => Ok(Some([one(h)?, one(w)?])),
        ref more => Err(unsupported!(
            "argument {index} is {more:?}, but the device works in two dimensions"
        )),
    }
}

/// Argument `index`, a list of whole numbers; absent is empty.
///
/// # Errors
/// When it is something else.
pub fn ints(call: &Call<'_>, index: usize) -> Result<Vec<i64>, KernelError> {
    match plain(call, index) {
        Arg::Ints(list) => Ok(list.clone()),
        Arg::Int(value) => Ok(vec![*value]),
        Arg::None => Ok(Vec::new()),
        Arg::Floats(list) if list.is_empty() => Ok(Vec::new()),
        Arg::Bools(list) if list.is_empty() => Ok(Vec::new()),
        Arg::Tensors(list) if list.is_empty() => Ok(Vec::new()),
        _ => Err(invalid!("argument {index} is not a list of whole numbers")),
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
pub fn output<'a>(call: &'a Call<'_>) -> Result<&'a View, KernelError> {
    supported(call.outputs.first().and_then(Option::as_ref).ok_or("it has no output to write")?)
}

/// Result `index`, declared or hidden: hidden ones follow the declared.
///
/// # Errors
/// When its type is unsupported.
pub fn result<'a>(call: &'a Call<'_>, index: usize) -> Result<Option<&'a View>, KernelError> {
    let declared = call.outputs.len();
    let view = if index < declared {
        call.outputs[index].as_ref()
    } else {
        call.hidden.get(index - declared)
    };
    view.map(supported).transpose()
}

/// Result `index`, floating and apart from all other operands; `None` where it is absent.
///
/// # Errors
/// When it is of another type, or shares memory with another operand.
pub fn writable<'a>(call: &'a Call<'_>, index: usize) -> Result<Option<&'a View>, KernelError> {
    result(call, index)?.map(|view| distinct(call, floating(view)?)).transpose()
}

/// Result `index`, floating, of a shape, and apart from all other operands.
///
/// # Errors
/// As [`writable`], and when it is absent or of another shape.
pub fn shaped<'a>(
    call: &'a Call<'_>,
    index: usize,
    shape: &[usize],
) -> Result<&'a View, KernelError> {
    let view = writable(call, index)?.ok_or_else(|| invalid!("it has no output {index}"))?;
    expect_shape("its output", view, shape)?;
    Ok(view)
}

/// Refuses another shape of `what`.
///
/// # Errors
/// When the shape is another.
pub fn expect_shape(what: &str, view: &View, shape: &[usize]) -> Result<(), KernelError> {
    if view.shape == shape {
        Ok(())
    } else {
        Err(invalid!("{what} is of shape {:?} where {shape:?} is needed", view.shape))
    }
}

/// Refuses all but floating types.
///
/// # Errors
/// For another type.
pub fn floating(view: &View) -> Result<&View, KernelError> {
    if is_floating(view) {
        Ok(view)
    } else {
        Err(unsupported!("a tensor is {:?} where a floating one is needed", view.dtype))
    }
}

/// Argument `index`, a floating tensor.
///
/// # Errors
/// When it is something else.
pub fn real<'a>(call: &'a Call<'_>, index: usize) -> Result<&'a View, KernelError> {
    floating(tensor(call, index)?)
}

/// Argument `index`, a floating tensor; `None` where it is absent.
///
/// # Errors
/// When it is of another type.
pub fn maybe_real<'a>(call: &'a Call<'_>, index: usize) -> Result<Option<&'a View>, KernelError> {
    maybe_tensor(call, index)?.map(floating).transpose()
}

/// A product of extents that stays far from overflow.
///
/// # Errors
/// When it does not.
pub fn product(factors: &[usize]) -> Result<usize, KernelError> {
    factors
        .iter()
        .try_fold(1usize, |all, &n| all.checked_mul(n))
        .filter(|&n| n <= 1 << 48)
        .ok_or_else(|| invalid!("the extents {factors:?} are too large"))
}
