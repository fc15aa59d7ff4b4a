//! The planner `dtr`: dynamic tensor rematerialization (Kirisame et al., ICLR 2021), played through
//! on the recorded operators.
//!
//! What the paper defines (as others describe it; the paper itself was not read):
//! - Operators run in the framework's order. Where there is no room for one, the resident tensor
//!   with the least h(t) = (c(t) + c(e*(t))) / (bytes · staleness) is evicted, again and again
//!   until there is room. c is the time to recompute; e*(t), the evicted neighbourhood, holds the
//!   evicted tensors that t is made from, or that are made from t, through evicted tensors only.
//!   Staleness is the time since the last access.
//! - An evicted tensor is recomputed when an operator wants it, and what that needs and is gone
//!   before it.
//! - Eager eviction: what the framework releases is evicted at once, and can be recomputed too.
//!
//! Here the operators are played through slot by slot: what is over the target is evicted as above,
//! and is recomputed for its next use. Departures, all in favour of the paper's planner: the whole
//! iteration is known, so an evicted tensor counts as gone from its last use on; what no operator
//! uses again is no part of the neighbourhood that is made from a tensor; and what is recomputed on
//! the way is dropped where the slots up to its next use have no room for it. h is computed once
//! for all tensors that one operator evicts. Nothing is swapped. Cost: O(operators · resident
//! tensors · neighbourhood).

use serde::{Deserialize, Serialize};

use super::clock::Clock;
use super::planner::{Decision, Given, Planner};
use super::recompute::Reach;
use super::residency::{Gap, Residencies};
use crate::units::{OpId, TensorId};

/// The planner. It has no switches.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dtr {}

/// As many tensors as one recompute may make: more than any operator of a network needs.
const REACH: Reach = Reach { depth: 256, share: false };

impl Planner for Dtr {
    fn decide(&self, given: &Given<'_>) -> Decision {
        let mut played = Played::new(given);
        for slot in 0..played.residencies.load.slots() {
            let slot = u32::try_from(slot).unwrap_or(u32::MAX);
            while played.residencies.load.at(slot as usize) > given.target && played.evict(slot) {}
        }
        Decision::new(&played.residencies, given.target)
    }
}

/// The iteration as far as it is played through.
struct Played<'a, 'g> {
    given: &'g Given<'a>,
    residencies: Residencies<'a>,
    clock: Clock,
    /// By tensor: the time to recompute it, what it is made from, and what is made from it.
    cost: Vec<u64>,
    from: Vec<Vec<TensorId>>,
    into: Vec<Vec<TensorId>>,
}

/// A resident tensor and its h, as cost over bytes and staleness.
struct Resident {
    tensor: TensorId,
    gap: usize,
    cost: u64,
    over: u128,
}

impl<'a, 'g> Played<'a, 'g> {
    fn new(given: &'g Given<'a>) -> Self {
        let residencies = Residencies::new(given.graph);
        let tensors = given.graph.tensors.len();
        let (mut from, mut into) = (vec![Vec::new(); tensors], vec![Vec::new(); tensors]);
        for (operator, _) in given.latencies.iter().enumerate() {
            let id = OpId::from_index(operator);
            for &made in residencies.generates(id) {
                for &read in residencies.reads(id) {
                    if !residencies.lifetime(read).long_lived && read != made {
                        from[made.index()].push(read);
                        into[read.index()].push(made);
                    }
                }
            }
        }
        let writes = residencies.lifetimes.iter().map(|l| &l.writes);
        let time = |&w: &u32| given.latencies[w as usize].time.0;
        let cost = writes.map(|writes| writes.iter().map(time).sum()).collect();
        Self { given, residencies, clock: Clock::nominal(given.latencies), cost, from, into }
    }

    /// Evicts tensors that can be recomputed, those with the least h first, until the slot's load
    /// is within the target. Returns whether the load has become smaller.
    fn evict(&mut self, slot: u32) -> bool {
        let now = self.clock.slot(slot);
        let gone = self.gone(slot);
        let mut seen = vec![0u32; gone.len()];
        let mut residents = Vec::new();
        for (index, lifetime) in self.residencies.lifetimes.iter().enumerate() {
            let tensor = TensorId::from_index(index);
            if lifetime.long_lived || lifetime.bytes == 0 {
                continue;
            }
            let Some(gap) = self.residencies.gap_over(tensor, slot) else { continue };
            if self.residencies.gap(tensor, gap) == Gap::Keep {
                let mark = u32::try_from(residents.len() + 1).unwrap_or(u32::MAX);
                let cost = self.cost[index] + self.neighbourhood(tensor, &gone, &mut seen, mark);
                let stale = now.saturating_sub(self.clock.slot(lifetime.uses[gap])).max(1);
                let over = u128::from(lifetime.bytes) * u128::from(stale);
                residents.push(Resident { tensor, gap, cost, over });
            }
        }
        residents.sort_by(|a, b| {
            let (left, right) = (u128::from(a.cost) * b.over, u128::from(b.cost) * a.over);
            left.cmp(&right).then(a.tensor.cmp(&b.tensor))
        });
        let (latencies, target) = (self.given.latencies, self.given.target);
        let full = self.residencies.load.at(slot as usize);
        for Resident { tensor, gap, .. } in residents {
            if self.residencies.load.at(slot as usize) <= target {
                break;
            }
            // Evictions before this one may have changed the tensor's gaps.
            if self.residencies.gap_over(tensor, slot) != Some(gap)
                || self.residencies.gap(tensor, gap) != Gap::Keep
                || !self.residencies.relieves(tensor, gap, Gap::Recompute, slot as usize)
            {
                continue;
            }
            let recompute = self.residencies.recompute_of(latencies, tensor, gap, REACH);
            if let Some(recompute) = recompute {
                self.residencies.apply(tensor, gap, recompute, target, REACH);
            }
        }
        self.residencies.load.at(slot as usize) < full
    }

    /// By tensor: made before the slot and not resident in it; and whether it is used again.
    fn gone(&self, slot: u32) -> Vec<Option<bool>> {
        let of = |(index, lifetime): (usize, &super::residency::Lifetime)| {
            let made = lifetime.uses.first().is_some_and(|&first| first < slot);
            let again = lifetime.uses.last().is_some_and(|&last| last > slot);
            let gone = made && !lifetime.long_lived;
            (gone && !self.residencies.held(TensorId::from_index(index), slot)).then_some(again)
        };
        self.residencies.lifetimes.iter().enumerate().map(of).collect()
    }

    /// The time to recompute the evicted neighbourhood of a tensor. What is counted gets `mark`.
    fn neighbourhood(
        &self,
        tensor: TensorId,
        gone: &[Option<bool>],
        seen: &mut [u32],
        mark: u32,
    ) -> u64 {
        let mut sum = 0;
        for (next, dead_too) in [(&self.from, true), (&self.into, false)] {
            let mut open = vec![tensor];
            while let Some(of) = open.pop() {
                for &other in &next[of.index()] {
                    let counts = gone[other.index()].is_some_and(|again| again || dead_too);
                    if counts && seen[other.index()] != mark {
                        seen[other.index()] = mark;
                        sum += self.cost[other.index()];
                        open.push(other);
                    }
                }
            }
        }
        sum
    }
}
