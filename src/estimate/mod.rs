//! From a framework's CPU trace to the memory its GPU twin would take.
//!
//! For: reading a profiler's trace ([`trace`]), working out which request sequence the same job makes on a
//! GPU, and replaying it through the allocator. Not for: plans, nor the allocator itself ([`crate::sim`]).

pub mod before;
pub mod calls;
pub mod inputs;
pub mod lives;
pub mod sequence;
pub mod twin;
pub mod trace;
