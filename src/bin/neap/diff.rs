//! `neap diff`: two plans compared by meaning.

use std::fmt;
use std::path::PathBuf;

use neap::contract::diff::diff;
use serde::Serialize;

use crate::output::{self, Answer};
use crate::settings;

/// Compare two plans by meaning and print the differences; the exit code is 1 if there are any.
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
    let report = Report { equal: differences.is_empty(), differences };
    output::report(&report, as_json)?;
    Ok(Answer::yes_if(report.equal))
}

#[derive(Serialize)]
struct Report {
    equal: bool,
    differences: Vec<String>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.equal {
            return f.write_str("the plans mean the same");
        }
        f.write_str(&self.differences.join("\n"))
    }
}
