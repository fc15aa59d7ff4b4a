//! What a job runs on: memory, link and rates; and where latencies come from.
//!
//! Built-in and user-given profiles, measured tables, learned predictors, the roofline.

pub mod builtin;
mod figure;
mod key;
pub mod latency;
pub mod library;
pub mod predictor;
pub mod present;
pub mod profile;
pub mod roofline;
mod table;

pub use latency::{Latency, Source};
pub use profile::{DeviceError, Link, Multiprocessors, Profile, Rates};
