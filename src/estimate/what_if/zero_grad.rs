//! Clears gradients at another point of the iteration.
//!
//! `zero-grad` moves the point at which an iteration frees the gradients of the iteration before:
//! right before the model is first called (`start`), or right before `backward()` (`backward`).
//! Nothing else changes.

use std::collections::BTreeMap;

use super::super::forecast::{Block, Forecast, Job};
use super::super::roles::Role;
use super::{ZeroGrad, splice};
use crate::sim::requests::Request;

/// Moves the frees of gradients.
pub(super) fn moved(job: &Job, forecast: &Forecast, zero_grad: ZeroGrad) -> Forecast {
    let Forecast { requests, times, blocks, starts, .. } = forecast;
    let iterations = &job.phases.iterations[..job.phases.iterations.len().min(starts.len())];
    let mut made = vec![0; blocks.len()];
    let mut moved = vec![false; requests.len()];
    // The frees of each iteration, in their order.
    let mut cleared: Vec<Vec<Request>> = vec![Vec::new(); iterations.len()];
    let mut at = 0;
    for (index, &request) in requests.iter().enumerate() {
        while at < iterations.len() && starts[at] <= index {
            at += 1;
        }
        match request {
            Request::Allocate { id, .. } => made[id as usize] = at,
            Request::Free { id } if blocks[id as usize].role == Role::Gradient && at > 0 => {
                let iteration = &iterations[at - 1];
                let now = times[index];
                let target = if made[id as usize] < at {
                    // Cleared before this iteration makes its own gradients.
                    iteration.backward.is_none_or(|b| now < b.start).then_some(at - 1)
                } else {
                    // Cleared after the step; the edit lets the next iteration clear them.
                    iteration.steps.last().is_some_and(|s| now > s.end).then_some(at)
                };
                if let Some(target) = target {
                    moved[index] = true;
                    if let Some(list) = cleared.get_mut(target) {
                        list.push(request);
                    }
                }
            }
            Request::Free { .. } | Request::EmptyCache => {}
        }
    }
    let mut inserts: BTreeMap<usize, Vec<Request>> = BTreeMap::new();
    for ((iteration, list), &start) in iterations.iter().zip(cleared).zip(starts) {
        let place = match (zero_grad, iteration.backward) {
            (ZeroGrad::Start, _) => times.partition_point(|&t| t < iteration.called).max(start),
            (ZeroGrad::Backward, Some(backward)) => {
                let mut place = times.partition_point(|&t| t < backward.start).max(start);
                // The seed of backward is made after the script's zero_grad.
                while place > start && is_seed(job, blocks, requests[place - 1]) {
                    place -= 1;
                }
                place
            }
            (ZeroGrad::Backward, None) => start,
        };
        inserts.entry(place).or_default().extend(list);
    }
    let mut result = splice(forecast, &moved, &inserts);
    if !moved.contains(&true) {
        result.notes.push("no iteration of the trace clears the gradients of one before it: zero-grad changes nothing".to_owned());
    }
    result
}

fn is_seed(job: &Job, blocks: &[Block], request: Request) -> bool {
    let Request::Allocate { id, .. } = request else { return false };
    blocks[id as usize].op.is_some_and(|op| {
        job.trace.text(job.trace.ops[job.calls.outermost(op) as usize].name) == "aten::ones_like"
    })
}
