//! `neap diff`: two plans compared by meaning.

use std::path::PathBuf;

use neap::contract::diff::diff;
use serde_json::json;

use crate::output::{self, Answer};
use crate::settings;

/// Compare two plans by meaning and name what changed; exit 1 when they differ.
#[derive(clap::Args)]
pub struct Flags {
    /// The first plan.
    a: PathBuf,
    /// The second plan.
    b: PathBuf,
}

pub fn main(flags: &Flags, as_json: bool) -> anyhow::Result<Answer> {
    let (a, graphs_a) = settings::plan(&flags.a, &[])?;
    let (b, graphs_b) = settings::plan(&flags.b, &[])?;
    let differences: Vec<String> =
        diff(&a, &graphs_a, &b, &graphs_b).iter().map(ToString::to_string).collect();
    if as_json {
        output::json(&json!({ "equal": differences.is_empty(), "differences": differences }))?;
    } else if differences.is_empty() {
        output::data("the plans mean the same")?;
    } else {
        output::data(&differences.join("\n"))?;
    }
    Ok(if differences.is_empty() { Answer::Yes } else { Answer::No })
}
