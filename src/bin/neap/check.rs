//! `neap check`: the independent proof that a plan is safe.

use std::fmt;
use std::path::PathBuf;

use neap::contract::{Figures, check::check};
use neap::units::Bytes;
use serde::Serialize;

use crate::output::{self, Answer};
use crate::settings;

/// Prove that a plan is safe, or print why it is not.
#[derive(clap::Args)]
pub struct Flags {
    /// The plan.
    plan: PathBuf,
    /// The graph of the plan; by default at the path that the plan records.
    #[arg(long, value_name = "FILE.graph.json")]
    graph: Vec<PathBuf>,
}

pub fn main(flags: &Flags, as_json: bool) -> anyhow::Result<Answer> {
    let (plan, graphs) = settings::plan(&flags.plan, &flags.graph)?;
    match check(&plan, &graphs) {
        Ok(proof) => {
            let window = plan.window();
            let report = Proved {
                safe: true,
                figures: proof.figures,
                budget_bytes: plan.budget,
                window_bytes: window.map_or(Bytes::ZERO, |w| w.bytes),
                plan: flags.plan.display().to_string(),
                sharing: plan.jobs.iter().filter(|job| job.window.is_some()).count(),
            };
            output::report(&report, as_json)?;
            Ok(Answer::Yes)
        }
        Err(refusals) => {
            let reasons = refusals.iter().map(ToString::to_string).collect();
            output::report(&Refused { safe: false, reasons }, as_json)?;
            Ok(Answer::No)
        }
    }
}

/// A safe plan.
#[derive(Serialize)]
struct Proved {
    safe: bool,
    #[serde(flatten)]
    figures: Figures,
    budget_bytes: Bytes,
    window_bytes: Bytes,
    #[serde(skip)]
    plan: String,
    /// How many jobs share the window.
    #[serde(skip)]
    sharing: usize,
}

impl fmt::Display for Proved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Figures { peak_bytes, arena_bytes, iteration_ns, .. } = self.figures;
        write!(
            f,
            "{}: safe; peak {peak_bytes} ({} bytes), arena {arena_bytes} ({} bytes) of a budget of \
             {} bytes, iteration {iteration_ns} ({} ns)",
            self.plan, peak_bytes.0, arena_bytes.0, self.budget_bytes.0, iteration_ns.0,
        )?;
        if self.window_bytes > Bytes::ZERO {
            let (window, jobs) = (self.window_bytes, self.sharing);
            write!(f, "; {jobs} jobs hold {window} ({} bytes) of it in turn", window.0)?;
        }
        Ok(())
    }
}

/// A plan that is not safe.
#[derive(Serialize)]
struct Refused {
    safe: bool,
    reasons: Vec<String>,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // `plain` keeps a name in a reason from starting a line of its own.
        self.reasons.iter().try_for_each(|r| writeln!(f, "refused: {}", neap::report::plain(r)))
    }
}
