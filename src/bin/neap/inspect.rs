//! `neap inspect`: sizes, peak, floor, and the tensors at the peak.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use neap::job::liveness::Liveness;
use neap::job::{Graph, Phase, Role};
use neap::report::table::{Side, Table};
use neap::units::{Bytes, OpId};
use serde::Serialize;

use crate::output::{self, Answer};
use crate::settings;

/// Show a job: counts, bytes by role, the liveness peak and the tensors resident at it.
#[derive(clap::Args)]
pub struct Flags {
    /// The job.
    graph: PathBuf,
    /// How many of the tensors at the peak to list.
    #[arg(long, value_name = "N", default_value_t = 10)]
    top: usize,
}

pub fn main(flags: &Flags, as_json: bool) -> anyhow::Result<Answer> {
    let graph = settings::graph(&flags.graph)?;
    output::report(&Report::new(&graph, flags.top), as_json)?;
    Ok(Answer::Yes)
}

/// A job in figures.
#[derive(Serialize)]
struct Report {
    name: String,
    operators: usize,
    forward_operators: usize,
    backward_operators: usize,
    optimize_operators: usize,
    kinds: BTreeMap<String, usize>,
    tensors: usize,
    #[serde(flatten)]
    roles: Roles,
    peak_bytes: Bytes,
    peak_at: Option<String>,
    /// The liveness peak before the optimizer's steps were lowered.
    recorded_peak_bytes: Bytes,
    floor_bytes: Bytes,
    floor_at: Option<String>,
    no_free_bytes: Bytes,
    workspace_at_peak_bytes: Bytes,
    at_peak: Vec<Standing>,
    #[serde(skip)]
    tensors_at_peak: usize,
    #[serde(skip)]
    lowered: bool,
}

/// Bytes by role.
#[derive(Serialize)]
struct Roles {
    parameter_bytes: Bytes,
    buffer_bytes: Bytes,
    optimizer_state_bytes: Bytes,
    gradient_bytes: Bytes,
    input_bytes: Bytes,
    activation_bytes: Bytes,
}

/// A tensor at the peak.
#[derive(Serialize)]
struct Standing {
    tensor: String,
    role: Role,
    bytes: Bytes,
    made_by: Option<String>,
    #[serde(skip)]
    kind: String,
}

impl Report {
    fn new(graph: &Graph, top: usize) -> Self {
        let liveness = Liveness::new(graph);
        let count = |phase: Phase| graph.operators.iter().filter(|o| o.phase == phase).count();
        let name = |op: OpId| graph.operator(op).name.clone();
        let mut kinds = BTreeMap::new();
        for operator in &graph.operators {
            *kinds.entry(operator.kind.clone()).or_default() += 1;
        }
        let standing = |s: &neap::job::liveness::Standing| Standing {
            tensor: graph.tensor(s.tensor).name.clone(),
            role: graph.tensor(s.tensor).role,
            bytes: s.bytes,
            made_by: s.made_by.map(name),
            kind: s.made_by.map_or_else(String::new, |op| graph.operator(op).kind.clone()),
        };
        Self {
            name: graph.name.clone(),
            operators: graph.operators.len(),
            forward_operators: count(Phase::Forward),
            backward_operators: count(Phase::Backward),
            optimize_operators: count(Phase::Optimize),
            kinds,
            tensors: graph.tensors.len(),
            roles: Roles {
                parameter_bytes: liveness.role(Role::Parameter),
                buffer_bytes: liveness.role(Role::Buffer),
                optimizer_state_bytes: liveness.role(Role::OptimizerState),
                gradient_bytes: liveness.role(Role::Gradient),
                input_bytes: liveness.role(Role::Input),
                activation_bytes: liveness.role(Role::Activation),
            },
            peak_bytes: liveness.peak,
            peak_at: liveness.peak_at.map(name),
            recorded_peak_bytes: graph.recorded_peak.unwrap_or(liveness.peak),
            floor_bytes: liveness.floor,
            floor_at: liveness.floor_at.map(name),
            no_free_bytes: liveness.no_free,
            workspace_at_peak_bytes: liveness.workspace_at_peak,
            at_peak: liveness.at_peak.iter().take(top).map(standing).collect(),
            tensors_at_peak: liveness.at_peak.len(),
            lowered: graph.recorded_peak.is_some(),
        }
    }

    fn sizes(&self) -> Table {
        let heads = [("", Side::Left), ("size", Side::Right), ("bytes", Side::Right)];
        let mut table = Table::new(&heads);
        let mut row = |name: &str, bytes: Bytes| {
            table.row([name.to_owned(), bytes.to_string(), bytes.0.to_string()]);
        };
        let roles = &self.roles;
        row("parameter", roles.parameter_bytes);
        row("buffer", roles.buffer_bytes);
        row("optimizer state", roles.optimizer_state_bytes);
        row("gradient", roles.gradient_bytes);
        row("input", roles.input_bytes);
        row("activation", roles.activation_bytes);
        row("peak (liveness)", self.peak_bytes);
        if self.lowered {
            row("peak as recorded", self.recorded_peak_bytes);
        }
        row("floor", self.floor_bytes);
        row("nothing freed", self.no_free_bytes);
        table
    }

    fn standing(&self) -> Table {
        let mut table = Table::new(&[
            ("tensor", Side::Left),
            ("role", Side::Left),
            ("size", Side::Right),
            ("made by", Side::Left),
        ]);
        for s in &self.at_peak {
            let maker = s.made_by.as_ref().map(|maker| format!("{maker} ({})", s.kind));
            table.row([
                s.tensor.clone(),
                output::word(s.role),
                s.bytes.to_string(),
                maker.unwrap_or_else(|| "-".to_owned()),
            ]);
        }
        table
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{}: {} operators ({} forward, {} backward, {} optimize), {} tensors\n\n{}",
            self.name,
            self.operators,
            self.forward_operators,
            self.backward_operators,
            self.optimize_operators,
            self.tensors,
            self.sizes()
        )?;
        let at = |name: &Option<String>| name.clone().unwrap_or_else(|| "the start".to_owned());
        writeln!(
            f,
            "The peak is at {}; the floor is the working set of {}.\n\
             At the peak ({} tensors, {} of workspace):\n{}",
            at(&self.peak_at),
            at(&self.floor_at),
            self.tensors_at_peak,
            self.workspace_at_peak_bytes,
            self.standing()
        )
    }
}
