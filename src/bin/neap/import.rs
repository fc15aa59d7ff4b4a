//! `neap import`: turns a recorded PyTorch trace into a job graph.

use std::fmt;
use std::path::{Path, PathBuf};

use neap::job::chakra::{self, Imported, Options};
use neap::job::{Role, json, liveness::Liveness};
use neap::units::Bytes;
use serde::Serialize;

use crate::output::{self, Answer, note};
use crate::settings::{self, Outputs};

/// Turn a PyTorch execution trace (Chakra JSON, plain or gzip) into a job graph.
#[derive(clap::Args)]
pub struct Flags {
    /// The trace.
    trace: PathBuf,
    /// The output file; by default TRACE's name with .graph.json, in the current folder.
    #[arg(short, long, value_name = "FILE.graph.json")]
    output: Option<PathBuf>,
    /// Keep the framework's operators exactly, including multi-tensor optimizer steps.
    #[arg(long)]
    as_recorded: bool,
    /// Where to put lowered updates: all at the optimizer's step, or each as early as its gradient
    /// allows.
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
    Outputs::new(&[&flags.trace], &[Some(&output)])?;
    let imported = chakra::import(&flags.trace, &options)?;
    json::write(&output, &imported.graph)?;
    for text in &imported.notes {
        note(&format!("note: {text}"));
    }
    output::report(&Report::new(&output, imported), as_json)?;
    Ok(Answer::Yes)
}

#[derive(Serialize)]
struct Report {
    /// The path of the file written.
    graph: String,
    operators: usize,
    tensors: usize,
    parameter_bytes: Bytes,
    buffer_bytes: Bytes,
    peak_bytes: Bytes,
    /// The liveness peak before the optimizer's steps were lowered.
    recorded_peak_bytes: Bytes,
    notes: Vec<String>,
}

impl Report {
    fn new(output: &Path, imported: Imported) -> Self {
        let graph = &imported.graph;
        let liveness = Liveness::new(graph);
        Self {
            graph: output.to_string_lossy().into_owned(),
            operators: graph.operators.len(),
            tensors: graph.tensors.len(),
            parameter_bytes: liveness.role(Role::Parameter),
            buffer_bytes: liveness.role(Role::Buffer),
            peak_bytes: liveness.peak,
            recorded_peak_bytes: graph.recorded_peak.unwrap_or(liveness.peak),
            notes: imported.notes,
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { graph, operators, tensors, peak_bytes, .. } = self;
        write!(
            f,
            "{graph}: {operators} operators, {tensors} tensors, peak {peak_bytes} ({} bytes)",
            peak_bytes.0
        )
    }
}
