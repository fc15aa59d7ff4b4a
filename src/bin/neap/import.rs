//! `neap import`: what PyTorch recorded becomes a job.

use std::path::PathBuf;

use neap::job::chakra::{self, Options};
use neap::job::{Role, json, liveness::Liveness};
use serde_json::json;

use crate::output::{self, Answer, note};
use crate::settings;

/// Turn a PyTorch execution trace (Chakra JSON, plain or gzip) into a job graph.
#[derive(clap::Args)]
pub struct Flags {
    /// The trace.
    trace: PathBuf,
    /// Where to write the graph; TRACE's name with .graph.json in this folder if not given.
    #[arg(short, long, value_name = "FILE.graph.json")]
    output: Option<PathBuf>,
    /// Keep the framework's operators exactly, multi-tensor optimizer steps included.
    #[arg(long)]
    as_recorded: bool,
    /// Where lowered updates go: all at the optimizer's step, or each as early as its gradient allows.
    #[arg(long, value_enum, default_value_t = Updates::Step, conflicts_with = "as_recorded")]
    updates: Updates,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Updates {
    Step,
    Early,
}

pub fn main(flags: &Flags, as_json: bool) -> anyhow::Result<Answer> {
    let options =
        Options { as_recorded: flags.as_recorded, updates_early: flags.updates == Updates::Early };
    let output = match &flags.output {
        Some(path) => path.clone(),
        None => PathBuf::from(format!("{}.graph.json", settings::stem(&flags.trace)?)),
    };
    settings::outputs(&[&flags.trace], &[Some(&output)])?;
    let imported = chakra::import(&flags.trace, &options)?;
    json::write(&output, &imported.graph)?;
    for text in &imported.notes {
        note(&format!("note: {text}"));
    }
    let graph = &imported.graph;
    let liveness = Liveness::of(graph);
    if as_json {
        output::json(&json!({
            "graph": output.to_string_lossy(),
            "operators": graph.operators.len(),
            "tensors": graph.tensors.len(),
            "parameter_bytes": liveness.role(Role::Parameter),
            "buffer_bytes": liveness.role(Role::Buffer),
            "peak_bytes": liveness.peak,
            "recorded_peak_bytes": graph.recorded_peak.unwrap_or(liveness.peak),
            "notes": imported.notes,
        }))?;
    } else {
        output::data(&format!(
            "{}: {} operators, {} tensors, peak {} ({} bytes)",
            output.display(),
            graph.operators.len(),
            graph.tensors.len(),
            liveness.peak,
            liveness.peak.0
        ))?;
    }
    Ok(Answer::Yes)
}
