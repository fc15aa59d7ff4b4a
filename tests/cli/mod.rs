//! The command line as people and scripts use it: files in, files and JSON out, exit codes.
//!
//! On the tiny fixtures only, so that it stays quick without optimisation.

mod accounting;
#[cfg(target_os = "linux")]
mod cached;
mod compare;
#[cfg(feature = "cuda")]
mod cuda;
mod estimate;
mod explain;
pub mod folder;
#[cfg(target_os = "linux")]
mod hostile;
mod idioms;
mod import;
mod page;
mod pages;
mod profile;
mod refusals;
mod replay;
mod reserved;
mod round;
mod score;
#[cfg(target_os = "linux")]
pub mod served;
mod service;
mod share;
mod supported;
mod together;
#[cfg(target_os = "linux")]
mod torch;
