//! Jobs, devices, and plans of jobs for devices.
//!
//! Each module imports only from those above it in the list below.

pub mod units;

pub mod files;

pub mod job;

pub mod device;

pub mod contract;
