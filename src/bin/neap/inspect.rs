//! `neap inspect`: sizes, peak, floor, what stands at the peak.

use std::collections::BTreeMap;
use std::path::PathBuf;

use neap::job::liveness::Liveness;
use neap::job::{Graph, Phase, Role};
use neap::report::table::{Side, Table};
use neap::units::Bytes;
use serde_json::json;

use crate::output::{self, Answer};
use crate::settings;

/// Show a job: counts, bytes by role, the liveness peak and what stands there.
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
    let liveness = Liveness::of(&graph);
    if as_json {
        print_json(&graph, &liveness, flags.top)?
    } else {
        print_text(&graph, &liveness, flags.top)?
    }
    Ok(Answer::Yes)
}

fn count(graph: &Graph, phase: Phase) -> usize {
    graph.operators.iter().filter(|o| o.phase == phase).count()
}

fn kinds(graph: &Graph) -> BTreeMap<&str, usize> {
    let mut kinds = BTreeMap::new();
    for operator in &graph.operators {
        *kinds.entry(operator.kind.as_str()).or_default() += 1;
    }
    kinds
}

const ROLES: [(Role, &str); 6] = [
    (Role::Parameter, "parameter"),
    (Role::Buffer, "buffer"),
    (Role::OptimizerState, "optimizer_state"),
    (Role::Gradient, "gradient"),
    (Role::Input, "input"),
    (Role::Activation, "activation"),
];

fn print_json(graph: &Graph, liveness: &Liveness, top: usize) -> anyhow::Result<()> {
    let mut object = json!({
        "name": graph.name,
        "operators": graph.operators.len(),
        "forward_operators": count(graph, Phase::Forward),
        "backward_operators": count(graph, Phase::Backward),
        "optimize_operators": count(graph, Phase::Optimize),
        "kinds": kinds(graph),
        "tensors": graph.tensors.len(),
        "peak_bytes": liveness.peak,
        "peak_at": liveness.peak_at.map(|op| graph.operator(op).name.clone()),
        "recorded_peak_bytes": graph.recorded_peak.unwrap_or(liveness.peak),
        "floor_bytes": liveness.floor,
        "floor_at": liveness.floor_at.map(|op| graph.operator(op).name.clone()),
        "no_free_bytes": liveness.no_free,
        "workspace_at_peak_bytes": liveness.workspace_at_peak,
        "at_peak": liveness.at_peak.iter().take(top).map(|s| json!({
            "tensor": graph.tensor(s.tensor).name,
            "role": graph.tensor(s.tensor).role,
            "bytes": s.bytes,
            "made_by": s.made_by.map(|op| graph.operator(op).name.clone()),
        })).collect::<Vec<_>>(),
    });
    for (role, name) in ROLES {
        object[format!("{name}_bytes")] = json!(liveness.role(role));
    }
    output::json(&object)
}

fn both(bytes: Bytes) -> [String; 2] {
    [bytes.to_string(), bytes.0.to_string()]
}

fn print_text(graph: &Graph, liveness: &Liveness, top: usize) -> anyhow::Result<()> {
    let mut text = format!(
        "{}: {} operators ({} forward, {} backward, {} optimize), {} tensors\n\n",
        graph.name,
        graph.operators.len(),
        count(graph, Phase::Forward),
        count(graph, Phase::Backward),
        count(graph, Phase::Optimize),
        graph.tensors.len()
    );
    let mut table = Table::new(&[("", Side::Left), ("size", Side::Right), ("bytes", Side::Right)]);
    let mut row = |name: &str, bytes: Bytes| {
        let [size, exact] = both(bytes);
        table.row([name.to_owned(), size, exact]);
    };
    for (role, name) in ROLES {
        row(&name.replace('_', " "), liveness.role(role));
    }
    row("peak (liveness)", liveness.peak);
    if let Some(recorded) = graph.recorded_peak {
        row("peak as recorded", recorded);
    }
    row("floor", liveness.floor);
    row("nothing freed", liveness.no_free);
    text += &format!("{table}\n");
    let name = |op: Option<neap::units::OpId>| {
        op.map_or("the start".to_owned(), |op| graph.operator(op).name.clone())
    };
    text += &format!(
        "The peak is at {}; the floor is the working set of {}.\n",
        name(liveness.peak_at),
        name(liveness.floor_at)
    );
    text += &format!(
        "At the peak ({} tensors, {} of workspace):\n",
        liveness.at_peak.len(),
        liveness.workspace_at_peak
    );
    let mut table = Table::new(&[
        ("tensor", Side::Left),
        ("role", Side::Left),
        ("size", Side::Right),
        ("made by", Side::Left),
    ]);
    for standing in liveness.at_peak.iter().take(top) {
        let tensor = graph.tensor(standing.tensor);
        let role = ROLES.iter().find(|r| r.0 == tensor.role).map_or("", |r| r.1).replace('_', " ");
        let maker = standing.made_by.map_or("-".to_owned(), |op| {
            format!("{} ({})", graph.operator(op).name, graph.operator(op).kind)
        });
        table.row([tensor.name.clone(), role, standing.bytes.to_string(), maker]);
    }
    text += &format!("{table}\n");
    output::data(&text)
}
