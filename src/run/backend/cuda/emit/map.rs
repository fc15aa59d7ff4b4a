//! Elementwise launches: operands broadcast, dimensions joined, dense ones recognised.

use crate::backend::operators::KernelError;
use crate::backend::operators::arguments::{Input, is_floating};
use crate::backend::operators::error::unsupported;
use crate::backend::operators::shapes::{broadcast, count, is_contiguous};
use crate::backend::operators::view::View;
use crate::job::Dtype;

use super::super::launch::{Action, Actions, Family};
use super::super::params::{Map, Operand, RANK, Random};

/// Extents, and the strides of each of several operands, with neighbours joined where all operands
/// allow it.
pub fn join(
    shape: &[usize],
    strides: &[Vec<i64>],
    reorder: bool,
) -> Result<(Vec<u32>, Vec<Vec<i64>>), KernelError> {
    let mut dims: Vec<(usize, Vec<i64>)> = shape
        .iter()
        .enumerate()
        .filter(|(_, n)| **n != 1)
        .map(|(d, &n)| (n, strides.iter().map(|s| s[d]).collect()))
        .collect();
    if reorder {
        dims.sort_by_key(|(_, s)| std::cmp::Reverse(s[0].abs()));
    }
    let mut joined: Vec<(usize, Vec<i64>)> = Vec::new();
    for (n, s) in dims {
        match joined.last_mut() {
            Some((m, t)) if t.iter().zip(&s).all(|(t, s)| *t == s * n as i64) => {
                (*m, *t) = (*m * n, s)
            }
            _ => joined.push((n, s)),
        }
    }
    if joined.len() > RANK {
        return Err(unsupported!(
            "a tensor of shape {shape:?} whose strides leave more than {RANK} dimensions"
        ));
    }
    let extents = joined
        .iter()
        .map(|(n, _)| u32::try_from(*n).map_err(|_| unsupported!("an extent of {n}")))
        .collect::<Result<_, _>>();
    // One dimension alone is counted, not looked up, and may be of any size.
    let extents = if joined.len() == 1 {
        vec![u32::try_from(joined[0].0).unwrap_or(u32::MAX)]
    } else {
        extents?
    };
    Ok((extents, (0..strides.len()).map(|k| joined.iter().map(|(_, s)| s[k]).collect()).collect()))
}

/// Signed strides.
pub fn signed(strides: &[usize]) -> Vec<i64> {
    // Reversed views have strides that wrap around, which the cast undoes.
    strides.iter().map(|&s| s as i64).collect()
}

/// What a map takes besides operands.
#[derive(Clone, Copy, Debug, Default)]
pub struct Extra {
    /// Floating scalars.
    pub s: [f32; 4],
    /// Whole ones.
    pub k: [i64; 4],
    /// For dropout.
    pub random: Random,
    /// The elements must be numbered row-major.
    pub ordered: bool,
    /// Dimensions stay as they are.
    pub apart: bool,
}

/// Parameters of a map of `inputs` to `out`.
pub fn params(out: &View, inputs: &[Input<'_>], extra: &Extra) -> Result<Map, KernelError> {
    let mut strides = vec![signed(&out.stride)];
    let mut o = [Operand::number(0.0); 4];
    for input in inputs {
        strides.push(match input {
            Input::View(view) => signed(&broadcast(view, &out.shape)?),
            Input::Number { .. } => vec![0; out.shape.len()],
        });
    }
    // What a number is read with must not keep dimensions apart, and 0 never does.
    let (shape, strides) = if extra.apart {
        let shape = out
            .shape
            .iter()
            .map(|&n| u32::try_from(n).map_err(|_| unsupported!("an extent of {n}")))
            .collect::<Result<_, _>>()?;
        (shape, strides)
    } else {
        join_numbers(out, inputs, strides, extra.ordered)?
    };
    if shape.len() > RANK {
        return Err(unsupported!("a tensor of more than {RANK} dimensions"));
    }
    o[0] = Operand::strided(out, &strides[0])?;
    for ((slot, input), stride) in o[1..].iter_mut().zip(inputs).zip(&strides[1..]) {
        *slot = match input {
            Input::View(view) => Operand::strided(view, stride)?,
            Input::Number { value, .. } => Operand::number(*value),
        };
    }
    let views = || {
        inputs
            .iter()
            .filter_map(|i| if let Input::View(view) = i { Some(*view) } else { None })
            .chain([out])
    };
    let width = match out.dtype {
        Dtype::F32 => 16,
        _ => 8,
    };
    let dense = shape.len() <= 1
        && is_floating(out)
        && views().all(|v| v.dtype == out.dtype && v.data.addr() % width == 0)
        && strides.iter().zip(&o).all(|(s, o)| o.number == 1 || s.first().is_none_or(|&s| s == 1));
    let mut map = Map {
        count: count(out) as i64,
        rank: shape.len() as i32,
        dense: match out.dtype {
            _ if !dense => 0,
            Dtype::F32 => 1,
            Dtype::Bf16 => 2,
            Dtype::F16 => 3,
            _ => 0,
        },
        shape: [1; RANK],
        o,
        s: extra.s,
        k: extra.k,
        random: extra.random,
    };
    map.shape[..shape.len()].copy_from_slice(&shape);
    Ok(map)
}

fn join_numbers(
    out: &View,
    inputs: &[Input<'_>],
    strides: Vec<Vec<i64>>,
    ordered: bool,
) -> Result<(Vec<u32>, Vec<Vec<i64>>), KernelError> {
    let real: Vec<usize> = std::iter::once(0)
        .chain(
            inputs
                .iter()
                .enumerate()
                .filter(|(_, i)| matches!(i, Input::View(_)))
                .map(|(k, _)| k + 1),
        )
        .collect();
    let (shape, some) =
        join(&out.shape, &real.iter().map(|&k| strides[k].clone()).collect::<Vec<_>>(), !ordered)?;
    let mut all = vec![vec![0; shape.len()]; strides.len()];
    for (k, stride) in real.into_iter().zip(some) {
        all[k] = stride;
    }
    Ok((shape, all))
}

/// Blocks of a map.
pub fn blocks(map: &Map) -> i64 {
    map.count.div_euclid(if map.dense == 0 { 256 } else { 1024 }) + i64::from(map.count > 0)
}

/// Adds kernel `name` (without `f_` or `i_`) over the inputs.
pub fn map(
    actions: &mut Actions,
    float: bool,
    name: &str,
    out: &View,
    inputs: &[Input<'_>],
    extra: &Extra,
) -> Result<(), KernelError> {
    let map = params(out, inputs, extra)?;
    let kernel = format!("{}_{name}", if float { "f" } else { "i" });
    actions.launch(Family::Pointwise, &kernel, blocks(&map), [256, 1], &map);
    Ok(())
}

/// Copies `from`, broadcast and converted, to `out`.
pub fn copy(actions: &mut Actions, out: &View, from: &View) -> Result<(), KernelError> {
    let bytes = count(out) * out.dtype.size() as usize;
    if out.dtype == from.dtype
        && out.shape == from.shape
        && is_contiguous(out)
        && is_contiguous(from)
    {
        if bytes > 0 && out.data != from.data {
            actions.list.push(Action::Copy { from: from.data, to: out.data, bytes });
        }
        return Ok(());
    }
    let float = is_floating(out) || is_floating(from);
    map(actions, float, "copy", out, &[Input::View(from)], &Extra::default())
}

/// Sets every element.
pub fn fill(actions: &mut Actions, out: &View, value: f64) -> Result<(), KernelError> {
    let bytes = count(out) * out.dtype.size() as usize;
    if value == 0.0 && value.is_sign_positive() && is_contiguous(out) {
        if bytes > 0 {
            actions.list.push(Action::Zero { to: out.data, bytes });
        }
        return Ok(());
    }
    map(
        actions,
        is_floating(out),
        "copy",
        out,
        &[Input::Number { value, float: true }],
        &Extra::default(),
    )
}
