//! What several test binaries use.

pub mod random;
