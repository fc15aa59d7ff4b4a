//! Many jobs on one device: lanes, policies and mechanisms, and a simulator of them.
//!
//! The decisions ([`policy`], [`lanes`]) are pure functions of jobs and time, so a service that
//! runs real jobs can call them at iteration boundaries. Here a job's graph is only a size and a
//! time.

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
pub mod result;
pub mod rows;
pub mod weigh;

#[cfg(test)]
mod tests;
