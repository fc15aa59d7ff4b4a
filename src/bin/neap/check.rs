//! `neap check`: the independent proof that a plan is safe.

use std::path::PathBuf;

use neap::contract::check::check;
use neap::units::Bytes;
use serde_json::json;

use crate::output::{self, Answer};
use crate::settings;

/// Prove that a plan is safe, or say why it is not.
#[derive(clap::Args)]
pub struct Flags {
    /// The plan.
    plan: PathBuf,
    /// Its graph, in place of the path that the plan records.
    #[arg(long, value_name = "FILE.graph.json")]
    graph: Vec<PathBuf>,
}

pub fn main(flags: &Flags, as_json: bool) -> anyhow::Result<Answer> {
    let (plan, graphs) = settings::plan(&flags.plan, &flags.graph)?;
    match check(&plan, &graphs) {
        Ok(proof) => {
            let window = plan.jobs.iter().find_map(|job| job.window.as_ref());
            let sharing = plan.jobs.iter().filter(|job| job.window.is_some()).count();
            if as_json {
                let mut object = serde_json::to_value(proof.figures)?;
                object["safe"] = json!(true);
                object["budget_bytes"] = json!(plan.budget);
                object["window_bytes"] = json!(window.map_or(Bytes::ZERO, |w| w.bytes));
                output::json(&object)?;
            } else {
                output::data(&format!(
                    "{}: safe; peak {} ({} bytes), arena {} ({} bytes) of a budget of {} bytes, iteration {} ({} ns){}",
                    flags.plan.display(),
                    proof.figures.peak_bytes,
                    proof.figures.peak_bytes.0,
                    proof.figures.arena_bytes,
                    proof.figures.arena_bytes.0,
                    plan.budget.0,
                    proof.figures.iteration_ns,
                    proof.figures.iteration_ns.0,
                    window.map_or_else(String::new, |w| format!(
                        "; {sharing} jobs hold {} ({} bytes) of it in turn",
                        w.bytes, w.bytes.0
                    ))
                ))?;
            }
            Ok(Answer::Yes)
        }
        Err(refusals) => {
            let reasons: Vec<String> = refusals.iter().map(ToString::to_string).collect();
            if as_json {
                output::json(&json!({ "safe": false, "reasons": reasons }))?;
            } else {
                let lines: Vec<String> = reasons
                    .iter()
                    .map(|r| format!("refused: {}", neap::report::plain(r)))
                    .collect();
                output::data(&lines.join("\n"))?;
            }
            Ok(Answer::No)
        }
    }
}
