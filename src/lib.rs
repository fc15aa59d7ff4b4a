//! neap lowers the high-water mark of GPU memory in deep-learning training.
//!
//! It reads a recorded training iteration, decides offline which tensors to swap, drop and
//! recompute and when, proves the plan safe, simulates it, and runs it. Each module below is a
//! crate of its own, so that a change recompiles little. A module imports only from those above it
//! in this list.

pub use neap_model::{contract, device, files, job, parallel, private, records, units};

pub use neap_sim as sim;

pub use neap_plan as plan;

pub use neap_estimate as estimate;

pub use neap_run as run;

pub mod report;
