//! Padding with an image's own pixels, and its gradient: reflected, replicated or circular.

use crate::backend::operators::KernelError;
use crate::backend::operators::arguments::{ints, number_or, output, real, shaped, tensor, text};
use crate::backend::operators::error::{invalid, unsupported};
use crate::backend::operators::moves;
use crate::backend::operators::view::{Call, View};
use crate::backend::operators::{Table, table};

use super::Kernel;
use super::elements::{fill, read, write};
use super::shape::Host;

pub const TABLE: Table<Kernel> = table! {
    "pad" => |c| match text(c, 2) {
        "" | "constant" => moves::padded(&mut Host, c, number_or(c, 3, 0.0)?),
        "reflect" => forward(c, reflected),
        "replicate" => forward(c, replicated),
        "circular" => forward(c, circular),
        other => Err(unsupported!("padding mode `{other}` is not known")),
    },
    "reflection_pad1d" | "reflection_pad2d" | "reflection_pad3d" => |c| forward(c, reflected),
    "replication_pad1d" | "replication_pad2d" | "replication_pad3d" => {
            |c| forward(c, replicated)
        },
    "_pad_circular" => |c| forward(c, circular),
    "reflection_pad1d_backward" | "reflection_pad2d_backward" | "reflection_pad3d_backward" => {
            |c| backward(c, reflected)
        },
    "replication_pad1d_backward" | "replication_pad2d_backward" | "replication_pad3d_backward" => {
            |c| backward(c, replicated)
        },
};

/// The pixel, of `n`, that stands at `at`, which may lie outside.
type Rule = fn(i64, i64) -> i64;

fn reflected(at: i64, n: i64) -> i64 {
    if at < 0 {
        -at
    } else if at >= n {
        2 * (n - 1) - at
    } else {
        at
    }
}

fn replicated(at: i64, n: i64) -> i64 {
    at.clamp(0, n - 1)
}

fn circular(at: i64, n: i64) -> i64 {
    at.rem_euclid(n)
}

fn forward(call: &Call<'_>, rule: Rule) -> Result<(), KernelError> {
    let (out, from) = (output(call)?, real(call, 0)?);
    each(&ints(call, 1)?, out, from, rule, |to, at| write(out, to, read(from, at) as f32))
}

/// Adds the gradient of every padded pixel to the pixel that it copied.
fn backward(call: &Call<'_>, rule: Rule) -> Result<(), KernelError> {
    let into = shaped(call, 0, &tensor(call, 1)?.shape)?;
    let gradient = real(call, 0)?;
    fill(into, 0.0)?;
    each(&ints(call, 2)?, gradient, into, rule, |from, to| {
        write(into, to, (read(into, to) + read(gradient, from)) as f32);
    })
}

/// `visit` with the place of every pixel of `padded` and of the pixel of `inner` that it copies.
fn each(
    pads: &[i64],
    padded: &View,
    inner: &View,
    rule: Rule,
    mut visit: impl FnMut(usize, usize),
) -> Result<(), KernelError> {
    let rank = padded.shape.len();
    if !pads.len().is_multiple_of(2) || pads.len() / 2 > rank || inner.shape.len() != rank {
        return Err(invalid!("padding {pads:?} of shape {:?}", inner.shape));
    }
    // For each dimension, the pixel of `inner` that each pixel of `padded` copies.
    let mut sources: Vec<Vec<usize>> = Vec::with_capacity(rank);
    for d in 0..rank {
        let n = i64::try_from(inner.shape[d]).map_err(|_| "too many pixels")?;
        let [before, after] = match pads.get(2 * (rank - 1 - d)..2 * (rank - d)) {
            Some(&[before, after]) => [before, after],
            _ => [0, 0],
        };
        let extent = i64::try_from(padded.shape[d]).map_err(|_| "too many pixels")?;
        let source = |o: i64| usize::try_from(rule(o - before, n)).ok().filter(|&s| s < n as usize);
        let all: Option<Vec<usize>> = (0..extent).map(source).collect();
        let all = all.filter(|_| n + before + after == extent);
        sources.push(all.ok_or_else(|| {
            invalid!("padding {pads:?} of shape {:?} into {:?}", inner.shape, padded.shape)
        })?);
    }
    let count = padded.shape.iter().product::<usize>();
    let mut index = vec![0usize; rank];
    for _ in 0..count {
        let place = |view: &View, at: &dyn Fn(usize) -> usize| {
            (0..rank).map(|d| at(d) * view.stride[d]).sum::<usize>()
        };
        visit(place(padded, &|d| index[d]), place(inner, &|d| sources[d][index[d]]));
        for d in (0..rank).rev() {
            index[d] += 1;
            if index[d] < padded.shape[d] {
                break;
            }
            index[d] = 0;
        }
    }
    Ok(())
}
