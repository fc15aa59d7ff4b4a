//! Simulation of time and memory under a plan: the event engine, the host link and the framework's
//! allocator.

// Bytes, times and ids are never cut off silently.
#![cfg_attr(not(test), warn(clippy::cast_possible_truncation))]

use neap_model::{contract, device, files, job, parallel, records, units};

pub mod accounting;
pub mod allocator;
pub mod beside;
pub mod difference;
pub mod engine;
pub mod noise;
pub mod passive;
mod player;
pub mod program;
pub mod recording;
pub mod requests;
pub mod reserved;
pub mod rounds;
pub mod sequence;
pub mod share;
pub mod snapshot;
mod timing;
pub mod window;
