//! The CUDA device: one arena, one pinned slab, three streams, and libraries found at run time.
//!
//! Not for: plans; nor for what an operator means, which is the host device's to say.

pub mod emit;
pub mod launch;
#[cfg(test)]
mod shim;
