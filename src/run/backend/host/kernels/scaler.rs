//! Gradient scaling for training in f16, as `torch.amp.GradScaler` does it.

use crate::backend::operators::KernelError;
use crate::backend::operators::arguments::{floating, number, output, real, tensor, tensors};
use crate::backend::operators::error::invalid;
use crate::backend::operators::shapes::{each, same};
use crate::backend::operators::view::Call;
use crate::backend::operators::{Table, table};

use super::Kernel;
use super::elements::{Lane, read, read_int, write};
use crate::backend::operators::shapes::at;

pub const TABLE: Table<Kernel> = table! {
    "_amp_foreach_non_finite_check_and_unscale_" => unscale,
    "_amp_update_scale_" => update_scale,
};

/// Multiplies every gradient by argument 2 and sets argument 1 to one where a number is not finite.
fn unscale(call: &Call<'_>) -> Result<(), KernelError> {
    let (found, factor) = (real(call, 1)?, read(real(call, 2)?, 0) as f32);
    let written = |view| call.writes().any(|w| same(w, view));
    if !written(found) {
        return Err(invalid!("it writes argument 1, but the graph does not say so"));
    }
    let mut infinite = read(found, 0) != 0.0;
    for view in tensors(call, 0)?.iter().flatten() {
        if !written(floating(view)?) {
            return Err(invalid!("it writes a gradient, but the graph does not say so"));
        }
        each(&view.shape, &[&view.stride], |[at]| {
            let g = read(view, at) as f32;
            infinite |= !g.is_finite();
            write(view, at, g * factor);
        });
    }
    write(found, 0, f32::from(u8::from(infinite)));
    Ok(())
}

/// The scale after a step: smaller where a number was not finite, larger after many good steps.
fn update_scale(call: &Call<'_>) -> Result<(), KernelError> {
    let (scale, tracker, found) = (output(call)?, tensor(call, 1)?, real(call, 2)?);
    let (growth, backoff, interval) = (number(call, 3)?, number(call, 4)?, number(call, 5)?);
    let mut good = read_int(tracker, 0);
    if read(found, 0) != 0.0 {
        write(scale, 0, (read(scale, 0) * backoff) as f32);
        good = 0;
    } else {
        good += 1;
        if good as f64 == interval {
            let grown = (read(scale, 0) * growth) as f32;
            if grown.is_finite() {
                write(scale, 0, grown);
            }
            good = 0;
        }
    }
    // SAFETY: the tracker has one element.
    unsafe { i64::store(tracker.dtype, at(tracker, 0), 1, &[good]) };
    Ok(())
}
