//! Planners, and the loop that makes their decisions fit a budget.
//!
//! A planner decides, for each gap between two uses of a tensor, whether the tensor stays, is
//! swapped or is recomputed. [`residency`] keeps account of the resident bytes, [`clock`] of the
//! time, [`emit`] turns the decisions into events, [`place`] finds addresses, and [`budget`]
//! repeats that until the arena fits. [`method`] lists the planners.

// Bytes, times and ids are never cut off silently.
#![cfg_attr(not(test), warn(clippy::cast_possible_truncation))]

use neap_model::{contract, device, files, job, parallel, records, units};
use neap_sim as sim;

pub mod arrange;
pub mod bound;
pub mod budget;
pub mod capuchin;
pub mod checkpoint;
pub mod clock;
pub mod dtr;
pub mod emit;
#[cfg(test)]
mod exact;
pub mod explain;
pub mod gaps;
pub mod live;
pub mod load;
pub mod method;
pub mod neap;
pub mod offload;
pub mod overlap;
pub mod pinned;
pub mod place;
pub mod planner;
pub mod recompute;
pub mod relax;
pub mod residency;
pub mod robust;
pub mod script;
pub mod share;
pub mod tensile;
pub mod timetable;
pub mod together;
pub mod vdnn;

pub use budget::{
    Infeasible, PlanError, Planned, Request, make, make_for, minimum, minimum_for, unplanned,
    written,
};
pub use method::Method;
pub use planner::{Given, Planner};
pub use share::{Of, Share};
