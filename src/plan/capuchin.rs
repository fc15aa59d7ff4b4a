//! The planner `capuchin`: the policy maker of Capuchin (Peng et al., ASPLOS 2020).
//!
//! What the paper defines (sections 4.2 "Design Overview" to 4.5 "Selecting Memory Optimization";
//! read from others' notes on it that go section by section, not from the paper itself):
//! - A first iteration in passive mode (4.2: evict on demand; [`crate::sim::passive`]) measures
//!   when each tensor is accessed. Two successive accesses are an *evicted-access* and its
//!   *back-access*.
//! - A swap's *free time* (4.3) is FT = swap-in start − swap-out end, where the copy out starts at
//!   the evicted-access's end and the copy in ends at the back-access; a copy takes size over
//!   bandwidth, and (4.4) one copy waits for the one before it. A recomputation's value is MSPS =
//!   memory saving / recomputation time.
//! - A copy in is triggered (4.4) by the access nearest before back-access − copy time, not while
//!   memory is at its peak; a late one is triggered earlier by 5 % of its time in the next
//!   iteration. Recomputation is on demand, from the nearest inputs that are there (lineage).
//! - Candidates (4.5) have more than one access and are idle while memory is at its peak. They are
//!   chosen by falling FT as long as their copies are hidden completely. A swap that can't be
//!   hidden is compared with recomputing its tensor, and the smaller overhead wins. A tensor to be
//!   recomputed changes the MSPS of others, so all MSPS are computed again after each choice.
//! - This continues until the memory that passive mode had to evict is saved. A tensor that is
//!   still missing is fetched on demand.
//!
//! Departures. The measured pattern is that of the given latencies (a measured table if there is
//! one). The planner stops when every slot is within the target, not at a sum of bytes, so that a
//! plan's safety doesn't depend on timing. One value, bytes saved per nanosecond of overhead, ranks
//! swaps that are not hidden beside recomputations. Lineage goes back over in-place writes, but not
//! to tensors that no longer exist. A copy in gets the latest free interval of the link, and there
//! is no feedback, because a plan is made once. No tensor leaves round the end of the iteration.
//! Cost: O(candidates · slots).

use std::cmp::Reverse;

use serde::{Deserialize, Serialize};

use super::clock::Clock;
use super::planner::{Decision, Given, Planner};
use super::residency::{Gap, Residencies, Swap};
use super::timetable::Timetable;
use crate::sim::engine::copy_time;
use crate::sim::program::Direction;
use crate::units::TensorId;

/// The planner. It has no options, because the paper leaves no choice.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Capuchin {}

impl Planner for Capuchin {
    fn decide(&self, given: &Given<'_>) -> Decision {
        let mut maker = PolicyMaker {
            residencies: Residencies::new(given.graph),
            clock: Clock::nominal(given.latencies),
            given: *given,
            out: Timetable::default(),
            back: Timetable::default(),
            swapped: vec![false; given.graph.tensors.len()],
            pinned: given.pinned.0,
        };
        maker.hidden();
        while maker.residencies.load.peak().1 > given.target && maker.exposed() {}
        Decision::new(&maker.residencies, given.target)
    }
}

/// A copy's nominal start and its time, in nanoseconds.
type Copied = (u64, u64);

/// The ways to free a candidate's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Means {
    Swap,
    Recompute,
}

struct PolicyMaker<'a> {
    residencies: Residencies<'a>,
    clock: Clock,
    given: Given<'a>,
    out: Timetable,
    back: Timetable,
    swapped: Vec<bool>,
    pinned: u64,
}

impl PolicyMaker<'_> {
    /// End of the evicted-access, start of the back-access, and the times of the copies out and in.
    fn pair(&self, tensor: TensorId, gap: usize) -> (u64, u64, u64, u64) {
        let (p, n, _) = self.residencies.operators(tensor, gap);
        let bytes = self.given.graph.tensor(tensor).bytes;
        let out = if self.residencies.clean(tensor, gap) {
            0
        } else {
            copy_time(self.given.link, Direction::D2h, bytes, true).0
        };
        let back = copy_time(self.given.link, Direction::H2d, bytes, true).0;
        (self.clock.end(p), self.clock.start(n), out, back)
    }

    /// The free time of a swap; negative if the two copies don't fit between the accesses.
    fn free_time(&self, tensor: TensorId, gap: usize) -> i128 {
        let (leaves, wanted, out, back) = self.pair(tensor, gap);
        i128::from(wanted) - i128::from(back) - i128::from(leaves) - i128::from(out)
    }

    fn may_swap(&self, tensor: TensorId) -> bool {
        self.swapped[tensor.index()]
            || self.residencies.lifetimes[tensor.index()].bytes <= self.pinned
    }

    fn swap(&mut self, tensor: TensorId, gap: usize, decision: Swap) {
        if !std::mem::replace(&mut self.swapped[tensor.index()], true) {
            self.pinned -= self.residencies.lifetimes[tensor.index()].bytes;
        }
        self.residencies.decide(tensor, gap, Gap::Swap(decision));
    }

    /// Chooses swaps that are hidden completely, by falling free time.
    fn hidden(&mut self) {
        let mut candidates: Vec<(Reverse<i128>, TensorId, usize)> = Vec::new();
        for (index, lifetime) in self.residencies.lifetimes.iter().enumerate() {
            let tensor = TensorId::from_index(index);
            for gap in 0..lifetime.uses.len().saturating_sub(1) {
                let free = self.free_time(tensor, gap);
                if lifetime.bytes > 0
                    && free >= 0
                    && self.helps(tensor, gap, self.residencies.tightest(tensor, gap))
                {
                    candidates.push((Reverse(free), tensor, gap));
                }
            }
        }
        candidates.sort();
        for (_, tensor, gap) in candidates {
            if self.may_swap(tensor)
                && let Some((decision, out, back)) = self.on_the_link(tensor, gap)
                && self.helps(tensor, gap, decision)
            {
                self.out.take(out.0, out.1);
                self.back.take(back.0, back.1);
                self.swap(tensor, gap, decision);
            }
        }
    }

    /// Whether a swap frees bytes in a slot that is above the target.
    fn helps(&self, tensor: TensorId, gap: usize, swap: Swap) -> bool {
        let (from, until) = (swap.out_until as usize + 1, swap.back_from as usize);
        debug_assert!(!self.residencies.ends(tensor, gap).2);
        self.residencies.load.first_over(from, until, self.given.target).is_some()
    }

    /// Intervals on both directions of the link that hide the copies: start and length of each.
    fn on_the_link(&self, tensor: TensorId, gap: usize) -> Option<(Swap, Copied, Copied)> {
        let tight = self.residencies.tightest(tensor, gap);
        let (leaves, wanted, out, back) = self.pair(tensor, gap);
        let out_at = if out == 0 { leaves } else { self.out.earliest(leaves, wanted, out)? };
        let back_at = self.back.latest(out_at + out, wanted, back)?;
        let out_until = if out == 0 {
            tight.out_until
        } else {
            self.clock.slot_before(out_at + out, tight.out_until)
        };
        let back_from = 2 * self.clock.place_by(back_at);
        let out_place = self.clock.place_by(out_at).max(tight.out_place);
        let starts = (out_at, back_at);
        let swap = Swap { out_until, back_from, out_place, starts, passive: false };
        (back_from > out_until).then_some((swap, (out_at, out), (back_at, back)))
    }

    /// A swap that leaves at once, and for whose return the next access waits.
    fn on_demand(&self, tensor: TensorId, gap: usize) -> Swap {
        let (leaves, wanted, _, _) = self.pair(tensor, gap);
        let starts = (leaves, wanted);
        Swap { starts, passive: true, ..self.residencies.tightest(tensor, gap) }
    }

    /// Makes one choice at the peak among candidates with an overhead. Returns whether there was
    /// one.
    fn exposed(&mut self) -> bool {
        let (peak, load) = self.residencies.load.peak();
        let slot = u32::try_from(peak).unwrap_or(u32::MAX);
        let mut ranked: Vec<(Reverse<u128>, Means, TensorId, usize)> = Vec::new();
        for index in 0..self.residencies.lifetimes.len() {
            let tensor = TensorId::from_index(index);
            let Some(gap) = self.residencies.gap_over(tensor, slot) else { continue };
            let lifetime = &self.residencies.lifetimes[index];
            if lifetime.gaps[gap] != Gap::Keep
                || self.residencies.ends(tensor, gap).2
                || lifetime.bytes == 0
            {
                continue;
            }
            let value = |overhead: u64| {
                Reverse(u128::from(lifetime.bytes) * 1_000_000_000 / u128::from(overhead.max(1)))
            };
            if self.may_swap(tensor) {
                // A copy in without a free interval of the link is fetched on demand: no part of it
                // is hidden.
                let (_, _, _, back) = self.pair(tensor, gap);
                let late = u64::try_from(-self.free_time(tensor, gap)).unwrap_or(0);
                ranked.push((value(late.max(back)), Means::Swap, tensor, gap));
            }
            if !lifetime.long_lived {
                let made = lifetime.writes.iter().filter(|&&w| 2 * w < lifetime.uses[gap]);
                let overhead = made.map(|&w| self.given.latencies[w as usize].time.0).sum();
                ranked.push((value(overhead), Means::Recompute, tensor, gap));
            }
        }
        ranked.sort();
        for (_, means, tensor, gap) in ranked {
            if means == Means::Swap {
                let decision = self.on_demand(tensor, gap);
                self.swap(tensor, gap, decision);
                return true;
            }
            if let Some((operators, with)) =
                self.residencies.direct(self.given.latencies, tensor, gap)
                && with < load
            {
                self.residencies.recompute(tensor, gap, operators);
                return true;
            }
        }
        self.hurry(slot)
    }

    /// Lets the largest swap whose copies hold bytes in the slot leave at once and come back on
    /// demand.
    fn hurry(&mut self, slot: u32) -> bool {
        let mut lingering: Option<(u64, TensorId, usize)> = None;
        for (index, lifetime) in self.residencies.lifetimes.iter().enumerate() {
            let tensor = TensorId::from_index(index);
            let Some(gap) = self.residencies.gap_over(tensor, slot) else { continue };
            let swap = matches!(lifetime.gaps[gap], Gap::Swap(_))
                && !self.residencies.relieves(tensor, gap, lifetime.gaps[gap], slot as usize);
            if swap && lingering.is_none_or(|l| lifetime.bytes > l.0) {
                lingering = Some((lifetime.bytes, tensor, gap));
            }
        }
        let Some((_, tensor, gap)) = lingering else { return false };
        let decision = self.on_demand(tensor, gap);
        self.residencies.decide(tensor, gap, Gap::Swap(decision));
        true
    }
}
