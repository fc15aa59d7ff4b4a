//! Writes a forecast as the memory snapshot that PyTorch would have recorded of the job on a GPU.
//!
//! A block's stack has the operators that allocate it, innermost first, then the modules around
//! them. A profile has no Python lines for its operators, so files and lines are left out.

use std::collections::HashMap;
use std::io::{self, Write};

use super::attribution::Places;
use super::calls::NONE;
use super::forecast::{Block, Forecast, Job};
use super::gpu::NODE;
use crate::sim::requests::Request;
use crate::sim::snapshot::write::{self, Event, Frame, StackId, Stacks, Target};
use crate::units::Nanos;

/// Writes the snapshot of a forecast's requests, replayed on `target`.
///
/// # Errors
/// When writing to `out` fails.
pub fn write(
    out: &mut dyn Write,
    job: &Job,
    places: &Places<'_>,
    forecast: &Forecast,
    target: &Target<'_>,
) -> io::Result<()> {
    let mut stacks = Stacks::default();
    let mut known: HashMap<(Option<u32>, Option<&str>), StackId> = HashMap::new();
    let of_block: Vec<StackId> = forecast
        .blocks
        .iter()
        .map(|block| {
            *known
                .entry((block.op, block.rule))
                .or_insert_with(|| stacks.add(frames(job, places, block)))
        })
        .collect();
    let events = forecast.requests.iter().zip(&forecast.times).map(|(&request, &time)| {
        let (stack, category) = match request {
            Request::Allocate { id, .. } | Request::Free { id } => {
                (of_block[id as usize], forecast.blocks[id as usize].role.name())
            }
            Request::EmptyCache => (StackId::default(), "unknown"),
        };
        Event { request, time: Nanos(time), stack, category: Some(category) }
    });
    write::write(out, target, &stacks, events)
}

fn frames(job: &Job, places: &Places<'_>, block: &Block) -> Vec<Frame> {
    let frame = |filename: &str, name: &str| Frame {
        filename: filename.to_owned(),
        name: name.to_owned(),
        line: 0,
    };
    let mut frames = Vec::new();
    if let Some(rule) = block.rule {
        frames.push(frame("neap estimate", &format!("rule {rule}")));
    }
    let Some(innermost) = block.op else {
        if block.before {
            frames.push(frame("neap estimate", "from before the trace"));
        }
        return frames;
    };
    let mut op = innermost;
    while op != NONE {
        let name = job.trace.text(job.trace.ops[op as usize].name);
        let (file, name) = match name.strip_prefix(NODE) {
            Some(node) => ("backward", node),
            None => ("operator", name),
        };
        frames.push(frame(file, name));
        op = job.calls.parent[op as usize];
    }
    if let Some(module) = places.module(innermost) {
        let path = places.path(module);
        let mut end = path.len();
        while end > 0 {
            let start = path[..end].rfind('/').map_or(0, |at| at + 1);
            frames.push(frame("module", &path[start..end]));
            end = start.saturating_sub(1);
        }
    }
    frames
}
