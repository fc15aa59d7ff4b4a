//! Gradient scaling for training in f16.

use crate::backend::operators::arguments::Input;
use crate::backend::operators::scaler;
use crate::backend::operators::view::Call;
use crate::backend::operators::{KernelError, Table, table};

use super::super::launch::{Actions, Family};
use super::super::params::Operand;
use super::Emit;
use super::map::{Extra, blocks, params};
use super::rows::{self, Row};

pub const TABLE: Table<Emit> = table! {
    "_amp_foreach_non_finite_check_and_unscale_" => unscale,
    "_amp_update_scale_" => update_scale,
};

fn unscale(call: &Call<'_>, actions: &mut Actions) -> Result<(), KernelError> {
    let of = scaler::unscale(call)?;
    for gradient in of.gradients {
        let mut map = params(gradient, &[Input::View(gradient)], &Extra::default())?;
        // One element each, not broadcast: gradients keep the dense path.
        (map.o[2], map.o[3]) = (Operand::new(of.factor)?, Operand::new(of.found)?);
        actions.launch(Family::Pointwise, "f_unscale", blocks(&map), [256, 1], &map);
    }
    Ok(())
}

fn update_scale(call: &Call<'_>, actions: &mut Actions) -> Result<(), KernelError> {
    let of = scaler::update(call)?;
    let mut p = rows::params(actions, &[], 1, &[Row::number(0.0)])?;
    for (slot, view) in p.o.iter_mut().zip([of.scale, of.tracker, of.found]) {
        *slot = Operand::new(view)?;
    }
    p.s[..3].copy_from_slice(&[of.factors[0], of.factors[1], of.interval]);
    actions.launch(Family::Pointwise, "update_scale", 1, [32, 1], &p);
    Ok(())
}
