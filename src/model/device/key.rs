//! The key under which an operator's latency stands in a table.

use std::fmt::Write as _;

use crate::job::{Arg, Operand, Operator};

/// The operator's kind and shapes: its kind, then each argument in schema order. A tensor is
/// written as its type and shape, `f32[16,64,7,7]`, followed by its strides when it is not
/// contiguous. Scalar arguments are included. Values of numbers that arrive as tensors on the host
/// are left out.
#[must_use]
pub fn key(operator: &Operator) -> String {
    let mut key = format!("{}(", operator.kind);
    for (index, arg) in operator.args.iter().enumerate() {
        if index > 0 {
            key.push(',');
        }
        argument(&mut key, arg);
    }
    key.push(')');
    key
}

pub(super) fn argument(out: &mut String, arg: &Arg) {
    // Writing to a String cannot fail.
    let _ = match arg {
        Arg::None => write!(out, "-"),
        Arg::Tensor(operand) => view(out, operand),
        Arg::Tensors(operands) => list(out, operands, |out, one| match one {
            Some(operand) => view(out, operand),
            None => write!(out, "-"),
        }),
        Arg::Host { dtype, shape, .. } => {
            write!(out, "host ").and_then(|()| typed(out, *dtype, shape))
        }
        Arg::Int(x) => write!(out, "{x}"),
        Arg::Float(x) => write!(out, "{x:?}"),
        Arg::Bool(x) => write!(out, "{x}"),
        Arg::Ints(all) => list(out, all, |out, x| write!(out, "{x}")),
        Arg::Floats(all) => list(out, all, |out, x| write!(out, "{x:?}")),
        Arg::Bools(all) => list(out, all, |out, x| write!(out, "{x}")),
        Arg::Text(text) => write!(out, "{text:?}"),
    };
}

fn view(out: &mut String, operand: &Operand) -> std::fmt::Result {
    typed(out, operand.dtype, &operand.shape)?;
    if operand.is_contiguous() {
        return Ok(());
    }
    write!(out, "/")?;
    list(out, &operand.stride, |out, x| write!(out, "{x}"))
}

fn typed(out: &mut String, dtype: crate::job::Dtype, shape: &[u64]) -> std::fmt::Result {
    write!(out, "{}", format!("{dtype:?}").to_ascii_lowercase())?;
    list(out, shape, |out, x| write!(out, "{x}"))
}

fn list<T>(
    out: &mut String,
    all: &[T],
    mut one: impl FnMut(&mut String, &T) -> std::fmt::Result,
) -> std::fmt::Result {
    out.push('[');
    for (index, x) in all.iter().enumerate() {
        if index > 0 {
            out.push(',');
        }
        one(out, x)?;
    }
    out.push(']');
    Ok(())
}
