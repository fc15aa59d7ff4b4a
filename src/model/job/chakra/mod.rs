//! PyTorch's Chakra execution traces become job graphs.
//!
//! [`import`] reads the file of `torch.profiler.ExecutionTraceObserver` (schema 1.1.1-chakra.0.0.4,
//! plain or gzip), with or without the `neap.*` names of long-lived tensors. `parse` reads it,
//! `storage` separates the lives behind recycled ids, `select` chooses the operators, `build` makes
//! the graph and `roles` finds out what each tensor is.

mod build;
mod names;
mod parse;
mod roles;
mod select;
mod storage;
mod value;

#[cfg(test)]
mod tests;

use std::fmt;
use std::path::{Path, PathBuf};

use super::{Arg, Dtype, Graph, GraphError};

/// How to import.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Keep the framework's optimizer operators instead of lowering them to one update per
    /// parameter.
    pub as_recorded: bool,
    /// Place each lowered update as early as its gradient allows.
    pub updates_early: bool,
}

/// A graph, and notes for the user.
#[derive(Debug)]
pub struct Imported {
    /// The job.
    pub graph: Graph,
    /// Sentences about assumptions, recovered values and omissions.
    pub notes: Vec<String>,
}

/// A node of the trace, named in error messages.
#[derive(Clone, Debug)]
pub struct Place {
    /// Its id in the file.
    pub id: u64,
    /// Its name.
    pub name: String,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node {} `{}`", self.id, self.name)
    }
}

/// Why a trace can't be imported.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// The file can't be opened or read.
    #[error(transparent)]
    File(#[from] crate::files::FileError),
    /// It is not JSON, is truncated, or does not have the form of a trace.
    #[error("{}: {problem}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// What is wrong and where, and the remedy.
        problem: String,
    },
    /// The schema is not known.
    #[error("{}: schema `{found}` is not known; known are 1.1.1-chakra.0.0.4 and, with a note, other 1.x Chakra schemas: record the trace with a PyTorch that writes one", path.display())]
    Schema {
        /// The file.
        path: PathBuf,
        /// The text found.
        found: String,
    },
    /// One node is wrong.
    #[error("{}: {place}: {problem}", path.display())]
    Node {
        /// The file.
        path: PathBuf,
        /// The node.
        place: Place,
        /// What is wrong and what to do.
        problem: String,
    },
    /// The trace as a whole is wrong.
    #[error("{}: {problem}", path.display())]
    Trace {
        /// The file.
        path: PathBuf,
        /// What is wrong and what to do.
        problem: String,
    },
    /// The resulting graph contradicts itself.
    #[error("{}: {source}", path.display())]
    Graph {
        /// The file.
        path: PathBuf,
        /// The contradiction.
        source: GraphError,
    },
}

impl ImportError {
    fn json(path: &Path, error: serde_json::Error) -> Self {
        use serde_json::error::Category;
        let problem = match error.classify() {
            Category::Eof => {
                format!(
                    "the trace is cut off ({error}); stop and unregister the observer before the program ends, and copy the whole file"
                )
            }
            Category::Io => {
                format!(
                    "the content can't be read ({error}); if it is gzip, it is damaged or cut off: copy or record it again"
                )
            }
            Category::Syntax => format!(
                "not JSON ({error}); give a trace written by torch.profiler.ExecutionTraceObserver, plain or gzip"
            ),
            Category::Data => format!(
                "not an execution trace ({error}); give one written by torch.profiler.ExecutionTraceObserver"
            ),
        };
        Self::Json { path: path.to_owned(), problem }
    }
}

/// Reads a trace and makes the graph of its iteration.
///
/// # Errors
/// When the file can't be read, is not a trace, contradicts itself, or holds no operator that
/// touches the device.
pub fn import(path: &Path, options: &Options) -> Result<Imported, ImportError> {
    let mut trace = parse::read(path)?;
    let lives = storage::lives(&mut trace);
    let names = names::find(&trace);
    refuse_generated(path, &trace, &names)?;
    let declared = select::Declared::new(&trace);
    let chosen = select::choose(&trace, &lives, &names, &declared);
    if chosen.is_empty() {
        let problem =
            "no call in it touches a device's memory; record an iteration that runs on a GPU"
                .to_owned();
        return Err(ImportError::Trace { path: path.to_owned(), problem });
    }
    let built = build::build(&trace, &lives, &names, &declared, &chosen, title(path));
    let mut notes = std::mem::take(&mut trace.notes);
    drop(trace);
    let mut graph = roles::finish(built, names, options, &mut notes)
        .map_err(|source| ImportError::Graph { path: path.to_owned(), source })?;
    let counters = count_batches(&mut graph);
    if counters > 0 {
        notes.push(format!("{counters} batch norms count their batches by a number that the trace does not record; it is 1"));
    }
    Ok(Imported { graph, notes })
}

/// Returns an error if a compiler generated kernels: a trace says neither what they compute nor
/// what they allocate.
fn refuse_generated(
    path: &Path,
    trace: &parse::Trace,
    names: &names::Names,
) -> Result<(), ImportError> {
    let generated =
        |name: &str| name.starts_with("## Call CompiledFxGraph") || name.starts_with("triton_");
    let mut nodes = trace.nodes.iter().zip(&names.context);
    let Some((node, _)) = nodes.find(|(n, context)| context.included && generated(&n.name)) else {
        return Ok(());
    };
    Err(ImportError::Node {
        path: path.to_owned(),
        place: Place { id: node.id, name: node.name.clone() },
        problem: "torch.compile generated the kernels here, and a trace does not say what they compute or allocate; record with TORCH_COMPILE_DISABLE=1, or compile with backend=\"aot_eager\"".to_owned(),
    })
}

/// Batch norm in training adds one to an integer scalar, its `num_batches_tracked`, right before it
/// runs. If the trace leaves that number out, this fills it in. Returns how many were filled in.
fn count_batches(graph: &mut Graph) -> usize {
    let generators = graph.generators();
    let mut counters = Vec::new();
    for (index, pair) in graph.operators.windows(2).enumerate() {
        let [operator, next] = pair else { continue };
        let (
            Some(Arg::Tensor(counter)),
            Some(Arg::Host { value: None, input: None, dtype: Dtype::I64, shape }),
        ) = (operator.args.first(), operator.args.get(1))
        else {
            continue;
        };
        let scalar = counter.dtype == Dtype::I64 && counter.shape.is_empty() && shape.is_empty();
        let long_lived = generators[counter.tensor.index()].is_none();
        if operator.kind == "aten::add_" && scalar && long_lived && next.kind.contains("batch_norm")
        {
            counters.push(index);
        }
    }
    for &index in &counters {
        if let Some(Arg::Host { value, .. }) = graph.operators[index].args.get_mut(1) {
            *value = Some(1.0);
        }
    }
    counters.len()
}

/// The file's name without folder and extensions.
fn title(path: &Path) -> String {
    let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let name = name.strip_suffix(".gz").unwrap_or(&name);
    let name = name.strip_suffix(".json").unwrap_or(name);
    name.strip_suffix(".et").unwrap_or(name).to_owned()
}
