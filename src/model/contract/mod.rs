//! A plan (events, triggers, placements), its file form, and the independent proof that it is safe
//! ([`check`]).

pub mod check;
pub mod diff;
mod form;
pub mod json;
pub mod plan;

pub use check::{Proof, Refusal};
pub use plan::{
    Chosen, Event, Figures, JobPlan, Latency, Place, Placement, Plan, Source, Trigger, Window,
};
