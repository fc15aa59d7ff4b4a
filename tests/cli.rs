//! The command line as people and scripts use it: files in, files and JSON out, exit codes.
//!
//! On the tiny fixtures only, so that it stays quick without optimisation.

#[path = "cli/accounting.rs"]
mod accounting;
#[path = "cli/compare.rs"]
mod compare;
#[cfg(feature = "cuda")]
#[path = "cli/cuda.rs"]
mod cuda;
#[path = "cli/estimate.rs"]
mod estimate;
#[path = "cli/explain.rs"]
mod explain;
#[path = "cli/folder.rs"]
mod folder;
#[path = "cli/import.rs"]
mod import;
#[path = "cli/profile.rs"]
mod profile;
#[path = "cli/refusals.rs"]
mod refusals;
#[path = "cli/replay.rs"]
mod replay;
#[path = "cli/reserved.rs"]
mod reserved;
#[path = "cli/round.rs"]
mod round;
#[path = "cli/score.rs"]
mod score;
#[path = "cli/service.rs"]
mod service;
#[path = "cli/share.rs"]
mod share;
#[path = "cli/together.rs"]
mod together;
