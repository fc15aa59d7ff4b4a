//! The planner `checkpoint`: training with sublinear memory (Chen et al., 2016), segments kept by
//! their boundaries.
//!
//! What the paper defines (section 4.1 and Algorithm 1 on segments, 4.3 and Algorithm 3 on choosing
//! them by memory; read from its text):
//! - The forward is cut into segments. What crosses from one segment into a later one is kept, what
//!   a segment only needs itself is dropped after its last use in the forward.
//! - Before a segment's backward its forward runs again from what was kept, and the results stay
//!   until the backward has used them. With √n segments of an n layer network memory is O(√n) for
//!   one more forward.
//! - Algorithm 3 cuts where the bytes since the last cut exceed a budget, and searches over that
//!   budget.
//! - The last segment's results are wanted at once, and so are not dropped.
//!
//! Here the segments have equal shares of the bytes that the backward needs from the forward. Their
//! number is the smallest from 1 to 2·√n (n forward operators) that is within the target: with
//! fewer segments the last one keeps more, which costs no time. Departures: an operator that may
//! not run again, or whose input was overwritten since, keeps its result. A tensor made beside one
//! that is sixteen times larger (batch norm's statistics) is kept, because it costs more to
//! recompute than to keep. Tensors that only the second forward needs between its operators count
//! as if all were resident at once. Cost: O(√n · tensors · slots).

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::planner::{Decision, Given, Planner};
use super::residency::Residencies;
use crate::contract::Latency;
use crate::job::Phase;
use crate::units::TensorId;

/// The planner. Only the target decides how many segments there are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Checkpoint {}

impl Planner for Checkpoint {
    /// Decides for the smallest number of segments within the target, or else for the number that
    /// comes nearest to it.
    fn decide(&self, given: &Given<'_>) -> Decision {
        let forward: Vec<bool> =
            given.graph.operators.iter().map(|o| o.phase == Phase::Forward).collect();
        let whole = Residencies::new(given.graph);
        let saved = saved(&whole, &forward);
        let operators = forward.iter().filter(|&&f| f).count();
        let mut best: Option<Residencies<'_>> = None;
        for segments in 1..=2 * operators.isqrt().max(1) {
            let residencies = segmented(whole.clone(), given.latencies, &saved, segments);
            let peak = residencies.load.peak().1;
            if best.as_ref().is_none_or(|b| peak < b.load.peak().1) {
                best = Some(residencies);
            }
            if peak <= given.target {
                break;
            }
        }
        Decision::new(best.as_ref().unwrap_or(&whole), given.target)
    }
}

/// A tensor that the backward needs from the forward.
struct Saved {
    tensor: TensorId,
    made: u32,
    last: u32,
    wanted: u32,
    bytes: u64,
    /// Whether it is large enough relative to the other outputs of its operator.
    main: bool,
}

fn saved(residencies: &Residencies<'_>, forward: &[bool]) -> Vec<Saved> {
    let mut found = Vec::new();
    for (index, lifetime) in residencies.lifetimes.iter().enumerate() {
        let Some(gap) = lifetime
            .uses
            .windows(2)
            .position(|u| forward[u[0] as usize / 2] && !forward[u[1] as usize / 2])
        else {
            continue;
        };
        let Some(&made) =
            lifetime.writes.first().filter(|_| !lifetime.long_lived && lifetime.bytes > 0)
        else {
            continue;
        };
        let beside = residencies.graph.operators[made as usize]
            .generates()
            .map(|o| residencies.lifetimes[o.tensor.index()].bytes);
        found.push(Saved {
            tensor: TensorId::from_index(index),
            made,
            last: lifetime.uses[gap] / 2,
            wanted: lifetime.uses[gap + 1] / 2,
            bytes: lifetime.bytes,
            main: lifetime.bytes >= beside.max().unwrap_or(0) / 16,
        });
    }
    found.sort_by_key(|s| (s.made, s.tensor));
    found
}

fn segmented<'a>(
    mut residencies: Residencies<'a>,
    latencies: &[Latency],
    saved: &[Saved],
    segments: usize,
) -> Residencies<'a> {
    let total: u128 = saved.iter().map(|s| u128::from(s.bytes)).sum();
    // The operator with which each segment begins.
    let mut cuts: Vec<u32> = vec![0];
    let mut sum = 0;
    for s in saved {
        let segment =
            usize::try_from(sum * segments as u128 / total.max(1)).unwrap_or(segments - 1);
        if segment >= cuts.len() {
            cuts.resize(segment + 1, s.made);
        }
        sum += u128::from(s.bytes);
    }
    let segment_of = |operator: u32| cuts.partition_point(|&c| c <= operator) - 1;
    for segment in 0..cuts.len() - 1 {
        let inside =
            |s: &&Saved| s.main && segment_of(s.made) == segment && segment_of(s.last) == segment;
        let dropped: Vec<&Saved> = saved.iter().filter(inside).collect();
        let Some(before) = dropped.iter().map(|s| s.wanted).min() else { continue };
        for tensor in again(&residencies, &dropped, before) {
            let lifetime = &residencies.lifetimes[tensor.index()];
            let Some(last) = lifetime.uses.iter().rposition(|&u| u / 2 < before) else { continue };
            let here = lifetime.writes.first().is_some_and(|&w| segment_of(w) == segment)
                && segment_of(lifetime.uses[last] / 2) == segment;
            want(&mut residencies, tensor, before);
            // A tensor from an earlier segment is a boundary, which is kept.
            if here && let Some((operators, _)) = residencies.direct(latencies, tensor, last) {
                residencies.recompute(tensor, last, operators);
            }
        }
    }
    residencies
}

/// Makes the tensor resident just before operator `before`. A tensor whose last use is earlier
/// stays until then and no longer.
fn want(residencies: &mut Residencies<'_>, tensor: TensorId, before: u32) {
    let lifetime = residencies.lifetime(tensor);
    let (slot, bytes) = (2 * before + 1, lifetime.bytes);
    if !lifetime.long_lived && lifetime.uses.last().is_some_and(|&last| last < slot) {
        residencies.live_on(tensor, slot);
        residencies.load.subtract(slot as usize, slot as usize + 1, bytes);
    } else {
        residencies.use_at(tensor, slot);
    }
}

/// The tensors that must be resident before operator `before` to recompute `dropped`, including
/// those, in the order of their making.
fn again(residencies: &Residencies<'_>, dropped: &[&Saved], before: u32) -> Vec<TensorId> {
    let mut needed: BTreeSet<TensorId> = dropped.iter().map(|s| s.tensor).collect();
    let mut open: Vec<TensorId> = needed.iter().copied().collect();
    while let Some(tensor) = open.pop() {
        for &write in residencies.lifetimes[tensor.index()].writes.iter().filter(|&&w| w < before) {
            for read in residencies.graph.operators[write as usize].reads() {
                let lifetime = &residencies.lifetimes[read.tensor.index()];
                // A tensor that is resident anyway needs no action.
                if !lifetime.long_lived
                    && !residencies.held(read.tensor, 2 * before)
                    && needed.insert(read.tensor)
                {
                    open.push(read.tensor);
                }
            }
        }
    }
    let mut order: Vec<TensorId> = needed.into_iter().collect();
    order.sort_by_key(|t| (residencies.lifetimes[t.index()].writes.first().copied(), *t));
    order
}
