//! Writes a job's requests as the memory snapshot that PyTorch would have recorded.
//!
//! A block's stack names the tensor, the operator that generates it and the phase.

use std::io::{self, Write};

use super::requests::Request;
use super::reserved::{Framework, Holder, Timeline};
use super::snapshot::write::{self, Event, Frame, StackId, Stacks, Target};
use crate::job::{Graph, Operator, Phase, Role};
use crate::units::OpId;

/// Writes the snapshot of `iterations` iterations. `alloc_conf` is the text of the framework's
/// settings.
///
/// # Errors
/// When writing to `out` fails.
pub fn write(
    out: &mut dyn Write,
    graph: &Graph,
    timeline: &Timeline,
    framework: &Framework,
    alloc_conf: &str,
    iterations: u32,
) -> io::Result<()> {
    let mut stacks = Stacks::default();
    let mut generators = vec![None; graph.tensors.len()];
    for (index, operator) in graph.operators.iter().enumerate().rev() {
        for operand in operator.generates() {
            generators[operand.tensor.index()] = Some(OpId::from_index(index));
        }
    }
    let tensors: Vec<StackId> = graph
        .tensors
        .iter()
        .zip(&generators)
        .map(|(tensor, by)| {
            let top = Frame { filename: "tensor".to_owned(), name: tensor.name.clone(), line: 0 };
            stacks.add(std::iter::once(top).chain(by.iter().flat_map(|&op| operator(graph, op))))
        })
        .collect();
    let workspaces: Vec<StackId> = (0..graph.operators.len())
        .map(|index| {
            let top = Frame { filename: "workspace".to_owned(), name: String::new(), line: 0 };
            stacks.add(std::iter::once(top).chain(operator(graph, OpId::from_index(index))))
        })
        .collect();
    let name = "workspace of the matrix library".to_owned();
    let library = stacks.add([Frame { filename: "cublas".to_owned(), name, line: 0 }]);
    let events = timeline.requests(iterations).map(|(time, request)| {
        let (stack, category) = match request {
            Request::Allocate { id, .. } | Request::Free { id } => match timeline.holder(id) {
                Holder::Tensor(t) => (tensors[t.index()], category(graph.tensor(t).role)),
                Holder::Workspace(op) => (workspaces[op.index()], "temporaries"),
                Holder::Library => (library, "workspaces"),
                Holder::First => (StackId::default(), "unknown"),
            },
            Request::EmptyCache => (StackId::default(), "unknown"),
        };
        Event { request, time, stack, category: Some(category) }
    });
    let target = Target { config: &framework.config, alloc_conf, capacity: framework.capacity };
    write::write(out, &target, &stacks, events)
}

fn operator(graph: &Graph, id: OpId) -> [Frame; 2] {
    let Operator { name, kind, phase, .. } = graph.operator(id);
    let phase = match phase {
        Phase::Forward => "forward",
        Phase::Backward => "backward",
        Phase::Optimize => "optimizer step",
    };
    let line = u32::try_from(id.index()).unwrap_or(u32::MAX);
    [
        Frame { filename: kind.clone(), name: name.clone(), line },
        Frame { filename: graph.name.clone(), name: phase.to_owned(), line: 0 },
    ]
}

const fn category(role: Role) -> &'static str {
    match role {
        Role::Input => "batch_data",
        Role::Parameter => "parameters",
        Role::Buffer => "buffers",
        Role::OptimizerState => "optimizer_states",
        Role::Gradient => "gradients",
        Role::Activation => "activations",
    }
}
