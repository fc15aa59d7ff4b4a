//! What would happen: the event engine and the host link.
//!
//! For: simulated time and memory under a plan. Not for: how plans are found.

pub mod engine;
pub mod noise;
pub mod program;
