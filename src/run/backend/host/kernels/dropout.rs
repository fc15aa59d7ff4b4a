//! Dropout and its gradient.
//!
//! Masks come from [`super::random`], numbered by an element's place in row-major order whatever the strides.
//! Not for: dropout inside attention.

use super::super::view::{Call, View};
use super::Kernel;
use super::arguments::{Input, flag, floating, number, output, result, tensor};
use super::elements::{BLOCK, Lane, at, copy, fill, map2, same_shape, walk};
use super::random::{Random, survivors, unrounded};
use crate::job::Arg;

/// The kernel for `kind`.
pub fn find(kind: &str) -> Option<Kernel> {
    let kernel: Kernel = match kind.strip_prefix("aten::")? {
        "dropout" | "dropout_" | "native_dropout" => dropout,
        "native_dropout_backward" => dropout_backward,
        _ => return None,
    };
    Some(kernel)
}

fn dropout(call: &Call<'_>) -> Result<(), String> {
    let (out, from, p) = (floating(output(call)?)?, floating(tensor(call, 0)?)?, number(call, 1)?);
    same_shape(out, from)?;
    let mask = result(call, 1)?;
    if let Some(mask) = mask {
        same_shape(out, mask)?;
    }
    // An absent flag means training.
    let training = flag(call, 2) || matches!(call.operator.args.get(2), None | Some(Arg::None));
    if !training || p == 0.0 {
        if let Some(mask) = mask {
            fill(mask, 1.0)?;
        }
        return copy(out, from);
    }
    let random = Random { key: call.random_key, iteration: call.iteration };
    let scale = survivors(p);
    // Without a mask the third operand is the input again, and is not written.
    let flags: &View = mask.unwrap_or(from);
    let (mut keep, mut x, mut marks) = ([false; BLOCK], [0.0f32; BLOCK], [0i64; BLOCK]);
    let mut element = 0;
    walk(&out.shape, &[&out.stride, &from.stride, &flags.stride], false, |start, length, step| {
        for done in (0..length).step_by(BLOCK) {
            let n = (length - done).min(BLOCK);
            random.keep(p, element, &mut keep[..n]);
            element += n as u64;
            // SAFETY: the walk stays inside all three views.
            unsafe {
                f32::load(from.dtype, at(from, start[1] + done * step[1]), step[1], &mut x[..n]);
                for ((x, &k), mark) in x[..n].iter_mut().zip(&keep).zip(&mut marks) {
                    *x = if k { *x * scale } else { 0.0 };
                    *mark = i64::from(k);
                }
                f32::store(out.dtype, at(out, start[0] + done * step[0]), step[0], &x[..n]);
                if mask.is_some() {
                    i64::store(
                        flags.dtype,
                        at(flags, start[2] + done * step[2]),
                        step[2],
                        &marks[..n],
                    );
                }
            }
        }
    });
    Ok(())
}

fn dropout_backward(call: &Call<'_>) -> Result<(), String> {
    let (out, grad, mask) = (floating(output(call)?)?, tensor(call, 0)?, tensor(call, 1)?);
    let scale = unrounded(number(call, 2)?);
    map2::<f32>(out, &Input::View(grad), &Input::View(mask), |g, m| g * m * scale)
}
