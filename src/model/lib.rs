//! Jobs, devices, and plans of jobs for devices.
//!
//! Each module imports only from those above it in the list below.

// Bytes, times and ids are never cut off silently.
#![cfg_attr(not(test), warn(clippy::cast_possible_truncation))]

pub mod units;

pub mod files;

pub mod private;

pub mod records;

pub mod parallel;

pub mod job;

pub mod device;

pub mod contract;
