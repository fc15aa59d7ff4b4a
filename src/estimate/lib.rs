//! Estimates from a framework's CPU trace how much memory the same job uses on a GPU.
//!
//! [`trace`] reads a profiler's trace, [`forecast`] computes the requests that the job makes on a
//! GPU, and [`answer`] replays them through PyTorch's allocator. Every memory event of the trace is
//! kept unless a rule of the GPU model ([`gpu`]) replaces it. The roles of blocks ([`roles`])
//! explain the answer and do not change it.

// Bytes, times and ids are never cut off silently.
#![cfg_attr(not(test), warn(clippy::cast_possible_truncation))]

use neap_model::{files, parallel, units};
use neap_sim as sim;

pub mod answer;
pub mod attribution;
pub mod before;
pub mod calls;
pub mod forecast;
pub mod gpu;
pub mod inputs;
pub mod lives;
pub mod phases;
pub mod recording;
pub mod roles;
pub mod score;
mod sequence;
pub mod trace;
pub mod truth;
pub mod what_if;
pub mod xmem;
