//! Running without a plan: no events, and every residency placed first fit.
//!
//! Not for: good placement.

use std::collections::{BTreeMap, BTreeSet};

use crate::job::Graph;
use crate::schedule::{JobPlan, Latency, Placement};
use crate::sim::program::{Begin, Program, ProgramError, Residency};
use crate::units::Bytes;

/// A plan without events for `graph`, whose name and hash are left empty, and the arena that it needs.
///
/// # Errors
/// When the graph itself can't run in its order.
pub fn unplanned(graph: &Graph, latencies: &[Latency]) -> Result<(JobPlan, Bytes), ProgramError> {
    let (placements, arena) = first_fit(&Program::new(graph, latencies, &[])?);
    let job = JobPlan {
        graph: String::new(),
        graph_sha256: String::new(),
        latencies: latencies.to_vec(),
        events: Vec::new(),
        placements,
        host_slots: BTreeMap::new(),
    };
    Ok((job, arena))
}

/// Gives every residency the lowest address that is free at its place in program order, and says how much that takes.
///
/// Bytes pass on in program order, so copies wait for each other but never in a circle. A long-lived tensor that leaves
/// the device and comes back keeps its bytes all the while.
#[must_use]
pub fn first_fit(program: &Program) -> (Vec<Placement>, Bytes) {
    let place_of = |trigger: Option<usize>| trigger.map_or(0, |s| s + 1);
    let begin = |r: usize| match program.residencies[r].begin {
        Begin::Iteration => 0,
        Begin::Step(s) => s + 1,
        Begin::Copy(c) => place_of(program.copies[c].trigger) + 1,
    };
    let at_start = |r: &Residency| r.begin == Begin::Iteration;
    let returning: BTreeSet<_> = program.residencies.iter().filter(|r| r.stays && !at_start(r)).map(|r| r.tensor).collect();
    let mut order: Vec<usize> = (0..program.residencies.len()).collect();
    order.sort_by_key(|&r| begin(r));
    // Live stretches by address: start, end, last place that they are needed at.
    let mut live: Vec<(u64, u64, usize)> = Vec::new();
    let mut kept: BTreeMap<_, u64> = BTreeMap::new();
    let mut placements = Vec::with_capacity(order.len());
    let mut top = 0;
    for r in order {
        let residency = &program.residencies[r];
        if let Some(&start) = kept.get(&residency.tensor).filter(|_| residency.stays) {
            placements.push(Placement { place: residency.place, offset: Bytes(start) });
            continue;
        }
        let now = begin(r);
        live.retain(|&(_, _, last)| last >= now);
        let stays = residency.stays || at_start(residency) && returning.contains(&residency.tensor);
        let out = residency.out.map_or(0, |c| place_of(program.copies[c].trigger));
        let last = if stays { usize::MAX } else { residency.last_step.map_or(now, |s| s + 1).max(out) };
        let need = residency.bytes.0;
        let mut start = 0;
        let mut at = live.len();
        for (i, &(from, until, _)) in live.iter().enumerate() {
            if from >= start + need {
                at = i;
                break;
            }
            start = until;
        }
        if need > 0 {
            live.insert(at, (start, start + need, last));
        }
        if stays && !residency.stays {
            kept.insert(residency.tensor, start);
        }
        top = top.max(start + need);
        placements.push(Placement { place: residency.place, offset: Bytes(start) });
    }
    (placements, Bytes(top))
}
