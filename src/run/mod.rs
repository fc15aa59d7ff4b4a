//! Making it happen: executor, swap executor, and the devices behind one trait.
//!
//! Not for: how plans are found.

pub mod device;
