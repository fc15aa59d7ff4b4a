//! Many jobs on one device: lanes, policies and mechanisms, and a simulator of them.
//!
//! The decisions ([`policy`], [`lanes`]) are pure functions of jobs and time. [`engine`] simulates
//! whole traces by them; [`scheduler`] gives orders by them at the iteration boundaries of real
//! jobs. Here a job's graph is only a size and a time.

pub mod check;
pub mod contention;
pub mod courses;
pub mod engine;
pub mod events;
pub mod jobs;
pub mod lanes;
pub mod latency;
pub mod layout;
pub mod mechanism;
pub mod memory;
pub mod policy;
pub mod replay;
pub mod result;
pub mod rows;
pub mod scheduler;
pub mod spots;
pub mod tokens;
pub mod weigh;

#[cfg(test)]
mod tests;
