//! The embedded host device: two memories, threads for streams, real copies, real arithmetic.

pub mod kernels;
pub mod view;
