//! From a framework's CPU trace to the memory its GPU twin would take.
//!
//! For: reading a profiler's trace ([`trace`]), working out which request sequence the same job makes on a
//! GPU ([`forecast`]), and replaying it through the allocator ([`answer`]). Every event of the trace is kept unless a rule of
//! [`twin`] knows what the GPU does instead; what blocks are for ([`roles`]) explains and decides nothing. Not for: plans,
//! nor the allocator itself ([`crate::sim`]).

use neap_model::{files, units};
use neap_sim as sim;

pub mod answer;
pub mod attribution;
pub mod before;
pub mod calls;
pub mod forecast;
pub mod inputs;
pub mod lives;
pub mod phases;
pub mod roles;
pub mod score;
mod sequence;
pub mod trace;
pub mod truth;
pub mod twin;
pub mod what_if;
pub mod xmem;
