//! Many jobs on one device: lanes, policies and mechanisms, and a simulator of them.
//!
//! For: what becomes of a trace of jobs. The decisions ([`policy`], [`lanes`]) are pure, over jobs and time, so that whoever runs
//! jobs for real asks the same ones at iteration boundaries. Not for: one job's inside (its graph is a size and a time here).

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
