//! Multi-tensor calls as they are recorded: entry by entry, checked once for every backend.
//!
//! In place they write through their first list; otherwise into the outputs, then the hidden
//! outputs, in order. Nothing is done for an entry of the first list that is absent (empty, or on
//! the host).

use super::KernelError;
use super::arguments::{expect_shape, floating, number_or, tensors};
use super::error::{invalid, unsupported};
use super::shapes::{once, same};
use super::view::{Call, Operand, View};
use crate::job::Arg;

/// One entry of the lists.
pub struct Entry<'a> {
    /// This entry's tensor in each list.
    pub inputs: Vec<&'a View>,
    /// Where the result goes.
    pub out: &'a View,
    /// The scalar operand of this entry.
    pub scalar: f32,
}

/// One number for all, or one for each.
///
/// # Errors
/// When argument `at` is something else.
pub fn scalars(call: &Call<'_>, at: usize) -> Result<Vec<f32>, KernelError> {
    Ok(match call.operator.args.get(at) {
        Some(Arg::Floats(numbers)) => numbers.iter().map(|&x| x as f32).collect(),
        Some(Arg::Ints(numbers)) => numbers.iter().map(|&n| n as f32).collect(),
        _ => vec![number_or(call, at, 1.0)? as f32],
    })
}

/// The second operand of a binary call.
pub enum Second {
    /// A list.
    List,
    /// A number for each entry, or one for all.
    Numbers(Vec<f32>),
    /// One tensor for all.
    Tensor,
}

/// What argument 1 is.
///
/// # Errors
/// When it is no operand.
pub fn second(call: &Call<'_>) -> Result<Second, KernelError> {
    Ok(match call.args.get(1) {
        Some(Operand::Tensors(_)) => Second::List,
        Some(Operand::Tensor(_)) => Second::Tensor,
        _ => Second::Numbers(scalars(call, 1)?),
    })
}

/// The entries of the first `count` lists.
///
/// # Errors
/// When the lists don't fit each other or the outputs.
pub fn entries<'a>(
    call: &'a Call<'_>,
    count: usize,
    scalars: &[f32],
) -> Result<Vec<Entry<'a>>, KernelError> {
    let first = tensors(call, 0)?;
    let others = (1..count).map(|at| tensors(call, at)).collect::<Result<Vec<_>, _>>()?;
    if others.iter().any(|other| other.len() != first.len())
        || ![1, first.len()].contains(&scalars.len())
    {
        return Err(invalid!("its lists are not of the same length"));
    }
    let mut outputs = call.outputs.iter().flatten().chain(call.hidden);
    let mut entries = Vec::with_capacity(first.len());
    for (i, a) in first.iter().enumerate() {
        let Some(a) = a else { continue };
        let mut inputs = vec![floating(a)?];
        for other in &others {
            let other = other[i]
                .as_ref()
                .ok_or_else(|| invalid!("entry {i} is missing from one of its lists"))?;
            expect_shape("an entry of its lists", floating(other)?, &a.shape)?;
            inputs.push(other);
        }
        let out = if call.operator.kind.ends_with('_') {
            outputs
                .clone()
                .find(|written| same(written, a))
                .ok_or_else(|| invalid!("entry {i} is written, but the graph does not say so"))?
        } else {
            outputs.next().ok_or_else(|| invalid!("it has fewer outputs than tensors"))?
        };
        expect_shape("an output", floating(out)?, &a.shape)?;
        if !once(out) {
            return Err(unsupported!("an element of entry {i} would be written more than once"));
        }
        let scalar = scalars[if scalars.len() == 1 { 0 } else { i }];
        entries.push(Entry { inputs, out, scalar });
    }
    Ok(entries)
}
