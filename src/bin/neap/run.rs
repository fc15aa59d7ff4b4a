//! `neap run`: a plan, or a job without one, executed for real.

use std::path::PathBuf;

use crate::output::Answer;

/// Run a plan, or a job without one.
#[derive(clap::Args)]
pub struct Flags {
    /// A *.plan.json, or a *.graph.json to run without a plan.
    subject: PathBuf,
}

pub fn main(_flags: &Flags, _as_json: bool) -> anyhow::Result<Answer> {
    anyhow::bail!("not yet")
}
