//! What a job runs on: memory, link and rates; and where latencies come from.
//!
//! For: built-in and user-given profiles, measured tables, learned predictors, the roofline.
//! Not for: plans.

pub mod builtin;
pub mod latency;
pub mod library;
pub mod predictor;
pub mod present;
pub mod profile;
pub mod roofline;

pub use latency::{Latency, Source};
pub use profile::{DeviceError, Link, Multiprocessors, Profile, Rates};
