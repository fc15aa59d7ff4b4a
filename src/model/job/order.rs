//! The order of execution, which follows from reads and writes and is deterministic.
//!
//! An operator that reads a version runs after the one that writes it. The operator that writes the
//! next version runs after all that write or read the version before. A tensor that is kept round
//! the end of the iteration is generated after the operator that frees the last iteration's. Of the
//! operators that may run next, the one listed first runs.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use petgraph::algo::kosaraju_scc;
use petgraph::graph::{DiGraph, NodeIndex};

use super::build::Versions;
use super::graph::{GraphError, Operator, Tensor};
use crate::units::{TensorId, id32};

/// Which operator must run before which; nodes are positions in the listing.
pub(super) type Dependencies = DiGraph<(), (), u32>;

/// The dependencies of a listing, in time linear in the number of operands.
pub(super) fn dependencies(
    tensors: &[Tensor],
    operators: &[Operator],
    versions: &Versions,
) -> Result<Dependencies, GraphError> {
    let mut before = Dependencies::with_capacity(operators.len(), operators.len() * 4);
    for _ in operators {
        before.add_node(());
    }
    let edge = |before: &mut Dependencies, first: u32, then: u32| {
        before.add_edge(NodeIndex::new(first as usize), NodeIndex::new(then as usize), ());
    };
    for (then, operator) in (0..).zip(operators) {
        for operand in operator.reads() {
            let tensor = &tensors[operand.tensor.index()].name;
            let own =
                |version: u32| versions.writer(operand.tensor, version).is_some_and(|w| w == then);
            if own(operand.version) {
                let problem = format!(
                    "reads version {} of tensor `{tensor}`, which it writes itself",
                    operand.version
                );
                return Err(GraphError::Operator { operator: operator.name.clone(), problem });
            }
            if let Some(writer) = versions.writer(operand.tensor, operand.version) {
                edge(&mut before, writer, then);
            }
            // An update may read the version that it replaces.
            if let Some(next) =
                operand.version.checked_add(1).and_then(|v| versions.writer(operand.tensor, v))
                && next != then
            {
                edge(&mut before, then, next);
            }
        }
    }
    for (index, tensor) in tensors.iter().enumerate() {
        let mut last = None;
        for (version, writer) in versions.writes(TensorId::from_index(index)) {
            if last == Some(writer) {
                let problem = format!(
                    "writes versions {} and {version} of tensor `{}`; one call writes a tensor once",
                    version - 1,
                    tensor.name
                );
                return Err(GraphError::Operator {
                    operator: operators[writer as usize].name.clone(),
                    problem,
                });
            }
            if let Some(last) = last {
                edge(&mut before, last, writer);
            }
            last = Some(writer);
        }
        if let (Some(until), Some(generator)) =
            (tensor.kept_until, versions.generator(TensorId::from_index(index)))
            && until.0 != generator
        {
            edge(&mut before, until.0, generator);
        }
    }
    Ok(before)
}

/// Positions in the listing, in order of execution.
pub(super) fn order(operators: &[Operator], before: &Dependencies) -> Result<Vec<u32>, GraphError> {
    let mut waits = vec![0u32; operators.len()];
    for edge in before.raw_edges() {
        waits[edge.target().index()] += 1;
    }
    let mut ready: BinaryHeap<_> =
        (0..).zip(&waits).filter(|(_, n)| **n == 0).map(|(op, _): (u32, _)| Reverse(op)).collect();
    let mut listed = Vec::with_capacity(operators.len());
    while let Some(Reverse(op)) = ready.pop() {
        listed.push(op);
        for then in before.neighbors(NodeIndex::new(op as usize)) {
            let n = &mut waits[then.index()];
            *n -= 1;
            if *n == 0 {
                ready.push(Reverse(id32(then.index())));
            }
        }
    }
    if listed.len() == operators.len() {
        return Ok(listed);
    }
    let names =
        circle(before).into_iter().map(|node| operators[node.index()].name.clone()).collect();
    Err(GraphError::Cycle { operators: names })
}

/// A shortest circle through the operator that is listed first among those on circles.
fn circle(before: &Dependencies) -> Vec<NodeIndex> {
    let components = kosaraju_scc(before);
    let mut component = vec![0; before.node_count()];
    for (number, nodes) in components.iter().enumerate() {
        for node in nodes {
            component[node.index()] = number;
        }
    }
    let Some(start) = components.iter().filter(|c| c.len() > 1).flatten().min().copied() else {
        return Vec::new();
    };
    let mut from = vec![None; before.node_count()];
    let mut queue = VecDeque::from([start]);
    while let Some(node) = queue.pop_front() {
        let mut after: Vec<_> = before
            .neighbors(node)
            .filter(|n| component[n.index()] == component[start.index()])
            .collect();
        after.sort_unstable();
        for next in after {
            if next == start {
                let mut path = vec![node];
                while let Some(previous) = from[path[path.len() - 1].index()] {
                    path.push(previous);
                }
                path.reverse();
                return path;
            }
            if from[next.index()].is_none() {
                from[next.index()] = Some(node);
                queue.push_back(next);
            }
        }
    }
    Vec::new()
}
