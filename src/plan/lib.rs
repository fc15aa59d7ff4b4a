//! How plans are found.
//!
//! A planner decides, for each gap between two uses of a tensor, whether the tensor stays, is swapped
//! or is recomputed ([`ledger`] keeps the accounts, in *slots* of program order, so that what fits fits
//! at any timing); [`emit`] writes the decisions down as events, [`place`] finds the addresses, and
//! [`budget`] repeats that until the arena fits. Not for: flags, files, proofs.

use neap_model::{contract, device, files, job, units};
use neap_sim as sim;

pub mod bound;
pub mod budget;
pub mod capuchin;
pub mod checkpoint;
pub mod clock;
pub mod emit;
pub mod explain;
pub mod global;
pub mod lane;
pub mod ledger;
pub mod live;
pub mod method;
pub mod neap;
pub mod overlap;
pub mod place;
pub mod robust;
pub mod slab;
pub mod tensile;
pub mod vdnn;

pub use budget::{
    Infeasible, PlanError, Planned, Request, make, make_for, minimum, minimum_for, unplanned,
};
pub use method::{Given, Method};
pub use tensile::Options;
