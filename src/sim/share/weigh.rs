//! A job's memory need from a file: its graph, or an estimate of it.

use std::path::Path;

use serde::Deserialize;

use super::memory::Need;
use crate::files;
use crate::job::Graph;
use crate::job::json;
use crate::job::liveness::{Liveness, Span, spans};
use crate::units::{Bytes, Nanos, saturated};

/// What a file says about a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Weighed {
    /// Persistent and ephemeral bytes.
    pub need: Need,
    /// The estimate's margin: by how many bytes it may be too low.
    pub margin: Option<Bytes>,
    /// Time of an iteration alone.
    pub iteration: Option<Nanos>,
}

/// The largest estimate that is read, in bytes.
const LARGEST: u64 = 256 << 20;

/// Reads the need of a *.graph.json.
///
/// # Errors
/// When the file can't be used; the error names it.
pub fn graph(file: &Path) -> Result<Weighed, String> {
    let graph = json::read(file).map_err(|e| e.to_string())?;
    let durations: Option<u64> = graph.operators.iter().map(|o| o.duration_ns).sum();
    let iteration = durations.filter(|d| *d > 0).map(Nanos);
    Ok(Weighed { need: need(&graph), margin: None, iteration })
}

/// Persistent and ephemeral bytes of a graph: the bytes resident at the iteration boundary, and how
/// much its peak adds.
#[must_use]
pub fn need(graph: &Graph) -> Need {
    let spans = spans(graph);
    let all = spans.iter().zip(&graph.tensors);
    let kept = all.filter(|(span, _)| !matches!(span, Span::Within { .. }));
    let kept = kept.map(|(_, tensor)| tensor.bytes.in_blocks()).sum();
    (kept, Liveness::new(graph).peak.saturating_sub(kept))
}

/// The part of an estimate that is read.
#[derive(Deserialize)]
struct Estimate {
    peak_reserved_bytes: u64,
    margin_bytes: u64,
    at_peak: Roles,
}

/// The parts that stay across iterations.
#[derive(Deserialize)]
struct Roles {
    parameters_bytes: u64,
    buffers_bytes: u64,
    optimizer_states_bytes: u64,
    workspaces_bytes: u64,
}

/// Reads the need of a file that `neap estimate --json` wrote. Parameters, buffers, optimizer
/// states and library workspaces persist. All other bytes that the allocator reserves are
/// ephemeral.
///
/// # Errors
/// When the file can't be used; the error names it.
pub fn estimate(file: &Path) -> Result<Weighed, String> {
    let content = files::read(file, LARGEST).map_err(|e| e.to_string())?;
    let wrong = |problem: String| {
        format!("{}: {problem}; write it anew with `neap estimate --json`", file.display())
    };
    let Estimate { peak_reserved_bytes: peak, margin_bytes: margin, at_peak } =
        serde_json::from_slice(&content).map_err(|e| wrong(format!("is not an estimate: {e}")))?;
    if peak.max(margin) > 1 << 50 {
        let both = format!("says {peak} bytes and a margin of {margin}, more than any device has");
        return Err(wrong(both));
    }
    let Roles { parameters_bytes, buffers_bytes, optimizer_states_bytes, workspaces_bytes } =
        at_peak;
    let roles = [parameters_bytes, buffers_bytes, optimizer_states_bytes, workspaces_bytes];
    let kept = saturated(roles.map(u128::from).iter().sum());
    if kept > peak {
        let more = format!("says that more than its peak of {peak} bytes stays across iterations");
        return Err(wrong(more));
    }
    let need = (Bytes(kept), Bytes(peak - kept));
    Ok(Weighed { need, margin: Some(Bytes(margin)), iteration: None })
}
