//! neap lowers the high-water mark of GPU memory in deep-learning training.
//!
//! It reads what a framework already writes, decides offline which tensors to move, drop and recompute
//! and when, proves the decision safe, simulates it, and runs it. A module imports only from those
//! above it in this list.

pub mod units;

pub mod files;

pub mod job;

pub mod device;

pub mod schedule;

pub mod sim;

pub mod plan;

pub mod estimate;

pub mod run;

pub mod report;
