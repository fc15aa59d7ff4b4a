//! Gradient scaling for training in f16, as `torch.amp.GradScaler` does it: what its two calls
//! take, checked once for every backend.

use super::KernelError;
use super::arguments::{floating, number, output, real, tensor, tensors};
use super::error::invalid;
use super::shapes::{count, once, same};
use super::view::{Call, View};

/// Every gradient is multiplied by `factor`; `found` becomes one where a number is not finite.
pub struct Unscale<'a> {
    /// The gradients, which are read and written.
    pub gradients: Vec<&'a View>,
    /// One number, which stays as it is where all numbers are finite.
    pub found: &'a View,
    /// One number.
    pub factor: &'a View,
}

/// A tensor of one element.
fn one<'a>(what: &str, view: &'a View) -> Result<&'a View, KernelError> {
    match count(view) {
        1 => Ok(view),
        n => Err(invalid!("{what} has {n} elements, not one")),
    }
}

/// Of `_amp_foreach_non_finite_check_and_unscale_`.
///
/// # Errors
/// When the graph does not say that what is written is written.
pub fn unscale<'a>(call: &'a Call<'_>) -> Result<Unscale<'a>, KernelError> {
    let (found, factor) = (one("argument 1", real(call, 1)?)?, one("argument 2", real(call, 2)?)?);
    let written = |view| call.writes().any(|w| same(w, view));
    if !written(found) {
        return Err(invalid!("it writes argument 1, but the graph does not say so"));
    }
    let gradients: Vec<&View> = tensors(call, 0)?.iter().flatten().collect();
    for view in &gradients {
        if !written(floating(view)?) || !once(view) {
            return Err(invalid!("it writes a gradient, but the graph does not say so"));
        }
    }
    Ok(Unscale { gradients, found, factor })
}

/// The scale after a step: smaller where a number was not finite, larger after `interval` good
/// steps.
pub struct Update<'a> {
    /// One number, which is read and written.
    pub scale: &'a View,
    /// Good steps since the scale last changed.
    pub tracker: &'a View,
    /// Not zero after a bad step.
    pub found: &'a View,
    /// Factors after `interval` good steps, and after a bad one.
    pub factors: [f64; 2],
    /// How many good steps it takes.
    pub interval: f64,
}

/// Of `_amp_update_scale_`.
///
/// # Errors
/// When an argument is missing, or is no single number.
pub fn update<'a>(call: &'a Call<'_>) -> Result<Update<'a>, KernelError> {
    Ok(Update {
        scale: one("argument 0", floating(output(call)?)?)?,
        tracker: one("argument 1", tensor(call, 1)?)?,
        found: one("argument 2", real(call, 2)?)?,
        factors: [number(call, 3)?, number(call, 4)?],
        interval: number(call, 5)?,
    })
}
