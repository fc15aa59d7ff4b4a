//! Gradient scaling for training in f16, as `torch.amp.GradScaler` does it.

use crate::backend::operators::scaler;
use crate::backend::operators::shapes::{at, each};
use crate::backend::operators::view::Call;
use crate::backend::operators::{KernelError, Table, table};

use super::Kernel;
use super::elements::{Lane, read, read_int, write};

pub const TABLE: Table<Kernel> = table! {
    "_amp_foreach_non_finite_check_and_unscale_" => unscale,
    "_amp_update_scale_" => update_scale,
};

fn unscale(call: &Call<'_>) -> Result<(), KernelError> {
    let of = scaler::unscale(call)?;
    let factor = read(of.factor, 0) as f32;
    let mut infinite = read(of.found, 0) != 0.0;
    for view in of.gradients {
        each(&view.shape, &[&view.stride], |[at]| {
            let g = read(view, at) as f32;
            infinite |= !g.is_finite();
            write(view, at, g * factor);
        });
    }
    write(of.found, 0, f32::from(u8::from(infinite)));
    Ok(())
}

fn update_scale(call: &Call<'_>) -> Result<(), KernelError> {
    let of = scaler::update(call)?;
    let [growth, backoff] = of.factors;
    let mut good = read_int(of.tracker, 0);
    if read(of.found, 0) != 0.0 {
        write(of.scale, 0, (read(of.scale, 0) * backoff) as f32);
        good = 0;
    } else {
        good += 1;
        if good as f64 == of.interval {
            let grown = (read(of.scale, 0) * growth) as f32;
            if grown.is_finite() {
                write(of.scale, 0, grown);
            }
            good = 0;
        }
    }
    // SAFETY: the tracker has one element.
    unsafe { i64::store(of.tracker.dtype, at(of.tracker, 0), 1, &[good]) };
    Ok(())
}
