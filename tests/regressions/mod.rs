//! What use showed to be wrong, a file for each group.

mod outputs;
mod plans;
#[cfg(unix)]
mod signals;
mod words;
