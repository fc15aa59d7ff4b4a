//! The device that a job runs on: memory, link and rates. Also the sources of latencies: measured
//! tables, learned predictors, and the roofline.

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
