//! What a job runs on: memory, link and rates; and where latencies come from.
//!
//! For: built-in and user-given profiles, measured tables, the roofline.
//! Not for: plans.

pub mod builtin;
pub mod latency;
pub mod profile;

pub use profile::{Link, Profile, Rates};
