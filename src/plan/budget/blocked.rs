//! What a refusal says stands in the way.

use std::collections::BTreeSet;

use super::Request;
use crate::contract::Event;
use crate::job::Graph;
use crate::units::{Bytes, TensorId};

/// The operator with the highest load, and pinned memory where hardly any is left.
pub(super) fn blocked(request: &Request<'_>, peak: (usize, u64), events: &[Event]) -> String {
    let (slot, load) = peak;
    let mut text = at_operator(request.graph, slot, load);
    let (copies, pinned) = (on_host(request.graph, events), request.device.pinned_bytes);
    // A tensor that is larger than what is left of it can't leave.
    if copies.0 > pinned.0 / 16 * 15 {
        text += &format!(
            "; copies on the host take {copies} of the {pinned} of pinned memory that the device's \
             profile allows (`pinned_bytes`)"
        );
    }
    text
}

/// The bytes of all tensors that have a copy on the host, each in memory of its own.
fn on_host(graph: &Graph, events: &[Event]) -> Bytes {
    let copied: BTreeSet<TensorId> = events
        .iter()
        .filter_map(|event| match event {
            Event::SwapOut { tensor, .. } | Event::SwapIn { tensor, .. } => Some(*tensor),
            Event::Release { .. } | Event::Recompute { .. } => None,
        })
        .collect();
    copied.into_iter().map(|tensor| graph.tensor(tensor).bytes.in_blocks()).sum()
}

fn at_operator(graph: &Graph, slot: usize, load: u64) -> String {
    let Some(operator) = graph.operators.get(slot / 2) else {
        return "the end of the iteration".to_owned();
    };
    let mut touched: Vec<(Bytes, TensorId)> =
        operator.touches().into_iter().map(|t| (graph.tensor(t).bytes, t)).collect();
    touched.sort_by_key(|&(bytes, t)| (std::cmp::Reverse(bytes), t));
    let names: Vec<String> = touched
        .iter()
        .take(3)
        .map(|(bytes, t)| format!("{} ({bytes})", graph.tensor(*t).name))
        .collect();
    format!(
        "blocked at operator `{}` ({}) which stands at {}: it works on {}",
        operator.name,
        operator.kind,
        Bytes(load),
        names.join(", ")
    )
}
