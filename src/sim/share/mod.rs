//! Many jobs on one device: lanes, policies and mechanisms, and a simulator of them.
//!
//! The decisions ([`policy`], [`lanes`]) are pure functions over jobs and time, so that a service
//! that runs real jobs asks the same ones at iteration boundaries. A job's graph is only a size and
//! a time here.

pub mod check;
pub mod contention;
pub mod engine;
pub mod jobs;
pub mod lanes;
pub mod latency;
pub mod layout;
pub mod mechanism;
pub mod memory;
pub mod policy;
pub mod progressive;
pub mod result;
pub mod weigh;

#[cfg(test)]
mod tests;
