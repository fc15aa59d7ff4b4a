//! The planner `tensile`: TENSILE (Zhang et al., 2023), Algorithms 1 to 3, for one job, and for
//! several in `together`.
//!
//! Round by round it finds the peak, takes the largest tensor there that is idle between two uses,
//! and searches the link for two free intervals: one to swap the tensor out before the peak (as
//! early as possible) and one to swap it in before its next use (as late as possible). Then its
//! other gaps are tried greedily. Parameters and optimizer states are idle round the end of the
//! iteration: they leave in the optimize phase and come back before their first use in the next
//! iteration. If no tensor at the peak can be swapped in time, the one that frees most bytes per
//! second of recomputing (MSPS) is recomputed from inputs that were never released. The paper's
//! fallback, passive swapping, comes last: a copy for which the compute stream may have to wait.
//!
//! The algorithms' numbers and the published code's constants are from notes on the paper. Section
//! numbers are not verified.
//!
//! Departures from the paper: lifetimes are physical and in program order, so a plan stays safe
//! when latencies are wrong. Rounds continue until the budget is met. Each part is a switch in
//! [`Options`]. Cost: O(rounds · (slots + tensors at the peak)).

mod together;

pub(super) use together::together;

use serde::{Deserialize, Serialize};

use super::clock::Clock;
use super::planner::{Decision, Given, Planner};
use super::residency::{Gap, Residencies, Swap};
use super::timetable::Timetable;
use crate::sim::engine::copy_time;
use crate::sim::program::Direction;
use crate::units::{Bytes, TensorId, id32};

/// The planner's switches.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Options {
    /// Swap tensors (Algorithm 2).
    pub swap: bool,
    /// Swap parameters and optimizer states round the end of the iteration.
    pub across: bool,
    /// Recompute by MSPS (Algorithm 3).
    pub recompute: bool,
    /// Swap with waiting if nothing else is left.
    pub passive: bool,
    /// Search each direction of the link by itself. Otherwise one timetable is for both, as in the
    /// paper (§IV-C): the link carries one tensor at a time, whichever way it goes.
    pub duplex: bool,
    /// Let passive swaps start early and end late where bytes allow.
    pub prefetch: bool,
    /// Stop swapping in time after 100 rounds, once the last three rounds together gained less than
    /// 0.05 %.
    pub stop_rule: bool,
    /// The largest share of its tensors that a job may swap, in percent.
    pub max_swap_rate: u32,
    /// Several jobs: the largest part of all tensors swapped that may be one job's, in percent (the
    /// paper's max swapping rate).
    pub max_swap_part: u32,
    /// Keep smaller tensors on the device while anything else helps.
    pub min_swap: Bytes,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            swap: true,
            across: true,
            recompute: true,
            passive: true,
            duplex: true,
            prefetch: true,
            stop_rule: true,
            max_swap_rate: 100,
            max_swap_part: 100,
            min_swap: Bytes(64 << 10),
        }
    }
}

/// TENSILE's planner with the switches that it shares with neap's.
impl From<&super::neap::Options> for Options {
    fn from(options: &super::neap::Options) -> Self {
        let &super::neap::Options { swap, across, recompute, passive, prefetch, min_swap, .. } =
            options;
        Self { swap, across, recompute, passive, prefetch, min_swap, ..Self::default() }
    }
}

impl Planner for Options {
    fn decide(&self, given: &Given<'_>) -> Decision {
        let mut search = Search::new(given, self);
        search.rounds(given.target);
        if self.prefetch {
            search.widen_passive(given.target);
        }
        Decision::new(&search.residencies, given.target)
    }

    fn narrow(&self) -> Option<Self> {
        Some(Self { prefetch: false, ..self.clone() })
    }

    fn limited(&self, share: u32) -> Option<Self> {
        Some(Self { max_swap_rate: self.max_swap_rate.min(share / 10), ..self.clone() })
    }
}

/// A copy over the link, in nanoseconds from the beginning of its job's iteration.
#[derive(Clone, Copy, Debug)]
struct Scheduled {
    direction: Direction,
    start: u64,
    length: u64,
}

struct Search<'a, 'o> {
    given: &'o Given<'a>,
    options: &'o Options,
    residencies: Residencies<'a>,
    /// The times without a plan.
    clock: Clock,
    /// Tensors large enough to be swapped in time.
    large: Vec<TensorId>,
    /// The other tensors.
    small: Vec<TensorId>,
    out: Timetable,
    back: Timetable,
    swapped: Vec<bool>,
    swapped_count: usize,
    pinned_left: u64,
    /// Copies that were scheduled, and that no other job's timetable shows yet.
    scheduled: Vec<Scheduled>,
}

/// The stop rule of the paper's published code: the rounds before it applies, and the rounds that
/// it compares. Here it compares the bytes above the target in all slots, since a round may lower
/// only one of many equal peaks.
const STOP_AFTER: usize = 100;
const STOP_WINDOW: usize = 3;

impl<'a, 'o> Search<'a, 'o> {
    fn new(given: &'o Given<'a>, options: &'o Options) -> Self {
        let residencies = Residencies::new(given.graph);
        let size = |t: &TensorId| residencies.lifetime(*t).bytes;
        let (large, small) = (0..given.graph.tensors.len())
            .map(TensorId::from_index)
            .filter(|t| size(t) > 0)
            .partition(|t| size(t) >= options.min_swap.0);
        Self {
            given,
            options,
            large,
            small,
            residencies,
            clock: Clock::nominal(given.latencies),
            out: Timetable::default(),
            back: Timetable::default(),
            swapped: vec![false; given.graph.tensors.len()],
            swapped_count: 0,
            pinned_left: given.pinned.0,
            scheduled: Vec::new(),
        }
    }

    fn rounds(&mut self, target: u64) {
        let mut excess: Vec<u128> = Vec::new();
        let mut in_time = self.options.swap;
        loop {
            let (peak, load) = self.residencies.load.peak();
            let slot = u32::try_from(peak).unwrap_or(u32::MAX);
            if load <= target {
                return;
            }
            if in_time && self.options.stop_rule {
                excess.push(self.excess(target));
                if excess.len() > STOP_AFTER {
                    let (before, now) =
                        (excess[excess.len() - 1 - STOP_WINDOW], excess[excess.len() - 1]);
                    in_time = before.saturating_sub(now) * 2000 >= before;
                }
            }
            let candidates = self.at_peak(slot, &self.large);
            if in_time && self.swap_in_time(slot, &candidates, target) {
                continue;
            }
            // The many small tensors are tried only if the large ones can't help.
            if !self.relieve(slot, load, &candidates) {
                let small = self.at_peak(slot, &self.small);
                if !self.relieve(slot, load, &small) {
                    return;
                }
            }
        }
    }

    /// The bytes above `target`, summed over all slots.
    fn excess(&self, target: u64) -> u128 {
        let loads = self.residencies.load.all();
        loads.into_iter().map(|load| u128::from(load.saturating_sub(target))).sum()
    }

    /// Frees bytes if no swap in time does: recomputes, then swaps passively.
    fn relieve(&mut self, slot: u32, load: u64, candidates: &[(TensorId, usize)]) -> bool {
        self.options.recompute && self.recompute(slot, load, candidates)
            || self.options.passive && self.options.swap && self.swap_passively(slot, candidates)
    }

    /// Tensors that are idle in the slot, the largest first: the paper's memory peak tensors
    /// without those in use.
    fn at_peak(&self, slot: u32, among: &[TensorId]) -> Vec<(TensorId, usize)> {
        let mut found: Vec<(TensorId, usize)> = Vec::new();
        for &tensor in among {
            if let Some(gap) = self.residencies.gap_over(tensor, slot)
                && self.residencies.lifetimes[tensor.index()].gaps[gap] == Gap::Keep
            {
                found.push((tensor, gap));
            }
        }
        found.sort_by_key(|&(t, gap)| {
            (std::cmp::Reverse(self.residencies.lifetimes[t.index()].bytes), t, gap)
        });
        found
    }

    fn may_swap(&self, tensor: TensorId, gap: usize) -> bool {
        let lifetime = &self.residencies.lifetimes[tensor.index()];
        let round = lifetime.long_lived && gap + 1 == lifetime.gaps.len();
        if round && !self.options.across {
            return false;
        }
        self.swapped[tensor.index()]
            || (lifetime.bytes <= self.pinned_left
                && (self.swapped_count + 1) * 100
                    <= self.options.max_swap_rate as usize * self.residencies.lifetimes.len())
    }

    /// Schedules a copy at a time when its direction of the link is free.
    fn take(&mut self, direction: Direction, start: u64, length: u64) {
        for lane in self.lanes(direction) {
            lane.take(start, length);
        }
        self.scheduled.push(Scheduled { direction, start, length });
    }

    /// The timetables in which a copy shows.
    fn lanes(&mut self, direction: Direction) -> impl Iterator<Item = &mut Timetable> {
        let both = !self.options.duplex;
        let out = (both || direction == Direction::D2h).then_some(&mut self.out);
        let back = (both || direction == Direction::H2d).then_some(&mut self.back);
        out.into_iter().chain(back)
    }

    /// Nanoseconds of a copy. On a link for one copy at a time none slows another.
    fn length(&self, direction: Direction, bytes: Bytes) -> u64 {
        copy_time(self.given.link, direction, bytes, self.options.duplex).0
    }

    fn note_swapped(&mut self, tensor: TensorId) {
        if !std::mem::replace(&mut self.swapped[tensor.index()], true) {
            self.swapped_count += 1;
            self.pinned_left -= self.residencies.lifetimes[tensor.index()].bytes;
        }
    }

    /// One round: tries candidates, the largest first, that the link can take out before the peak
    /// and bring back in time, until the peak is within the target. Returns whether there was any.
    fn swap_in_time(&mut self, slot: u32, candidates: &[(TensorId, usize)], target: u64) -> bool {
        let mut any = false;
        for &(tensor, gap) in candidates {
            if self.residencies.load.at(slot as usize) <= target {
                break;
            }
            if self.may_swap(tensor, gap) && self.try_swap(tensor, gap, Some(slot)) {
                self.remaining_gaps(tensor, gap);
                any = true;
            }
        }
        any
    }

    /// Swaps in the other gaps of a tensor that now has a host copy, as far as the link has room.
    fn remaining_gaps(&mut self, tensor: TensorId, done: usize) {
        for gap in 0..self.residencies.lifetimes[tensor.index()].gaps.len() {
            if gap != done
                && self.residencies.lifetimes[tensor.index()].gaps[gap] == Gap::Keep
                && self.residencies.clean(tensor, gap)
            {
                self.try_swap(tensor, gap, None);
            }
        }
    }

    /// Searches for intervals on the link that free bytes in `slot` (or anywhere in the gap), and
    /// decides the swap if there are any.
    fn try_swap(&mut self, tensor: TensorId, gap: usize, slot: Option<u32>) -> bool {
        let (p, n, round) = self.residencies.operators(tensor, gap);
        let bytes = self.residencies.graph.tensor(tensor).bytes;
        let clean = self.residencies.clean(tensor, gap);
        let end = self.clock.total;
        let (leaves, wanted) = (self.clock.end(p), self.clock.start(n));
        // The peak is after the departure in this iteration, or (only round the end) before the
        // return in the next one.
        let in_head = round && slot.is_some_and(|q| q < 2 * n);
        let peak_start = slot.map(|q| self.clock.slot(q & !1));
        let peak_end = slot.map(|q| self.clock.slot((q + 1) & !1));
        let out_length = if clean { 0 } else { self.length(Direction::D2h, bytes) };
        let deadline = match peak_start {
            Some(start) if !in_head => start,
            _ if round => end,
            _ => wanted,
        };
        let Some(out_at) =
            (if clean { Some(leaves) } else { self.out.earliest(leaves, deadline, out_length) })
        else {
            return false;
        };
        let gone = out_at + out_length;
        let back_length = self.length(Direction::H2d, bytes);
        let earliest = match (round, in_head) {
            (true, false) => 0,
            (true, true) => peak_end.unwrap_or(0),
            (false, _) => peak_end.unwrap_or(0).max(gone),
        };
        let Some(back_at) = self.back.latest(earliest, wanted, back_length) else { return false };
        // Without a peak to lower, a swap must at least free its bytes for one whole operator.
        let tight = self.residencies.tightest(tensor, gap);
        let out_until =
            if clean { tight.out_until } else { self.clock.slot_before(gone, tight.out_until) };
        let back_from = 2 * self.clock.place_by(back_at);
        if slot.is_none() && !round && back_from < out_until + 3 {
            return false;
        }
        let out_place = self.clock.place_by(out_at).max(tight.out_place);
        let starts = (out_at, back_at);
        let decision = Gap::Swap(Swap { out_until, back_from, out_place, starts, passive: false });
        if slot.is_some_and(|q| !self.residencies.relieves(tensor, gap, decision, q as usize)) {
            return false;
        }
        if !clean {
            self.take(Direction::D2h, out_at, out_length);
        }
        self.take(Direction::H2d, back_at, back_length);
        self.residencies.decide(tensor, gap, decision);
        self.note_swapped(tensor);
        true
    }

    /// Recomputes the candidate with the most bytes freed per second (the paper's MSPS).
    fn recompute(&mut self, slot: u32, load: u64, candidates: &[(TensorId, usize)]) -> bool {
        self.by_msps(slot, candidates)
            .into_iter()
            .any(|(_, tensor, gap)| self.try_recompute(tensor, gap, load))
    }

    /// The candidates that recomputing would free in the slot, by bytes freed per second.
    fn by_msps(&self, slot: u32, candidates: &[(TensorId, usize)]) -> Vec<(u128, TensorId, usize)> {
        let mut ranked: Vec<(u128, TensorId, usize)> = Vec::with_capacity(candidates.len());
        for &(tensor, gap) in candidates {
            let lifetime = &self.residencies.lifetimes[tensor.index()];
            if lifetime.long_lived
                || !self.residencies.relieves(tensor, gap, Gap::Recompute, slot as usize)
            {
                continue;
            }
            let made = lifetime.writes.iter().filter(|&&w| 2 * w < lifetime.uses[gap]);
            let time: u128 = made
                .map(|&w| u128::from(self.given.latencies[w as usize].time.0))
                .sum::<u128>()
                .max(1);
            // Bytes per second, in integers.
            ranked.push((u128::from(lifetime.bytes) * 1_000_000_000 / time, tensor, gap));
        }
        ranked.sort_by_key(|&(msps, tensor, gap)| (std::cmp::Reverse(msps), tensor, gap));
        ranked
    }

    /// Recomputes a tensor from inputs that are there, if that stays below `load`.
    fn try_recompute(&mut self, tensor: TensorId, gap: usize, load: u64) -> bool {
        let direct = self.residencies.direct(self.given.latencies, tensor, gap);
        let Some((operators, _)) = direct.filter(|(_, with)| *with < load) else { return false };
        self.residencies.recompute(tensor, gap, operators);
        true
    }

    /// Frees bytes in the slot at any cost: first swaps that are still leaving there leave at once,
    /// then the largest idle tensor is swapped.
    fn swap_passively(&mut self, slot: u32, candidates: &[(TensorId, usize)]) -> bool {
        let mut lingering: Option<(u64, TensorId, usize)> = None;
        for (index, lifetime) in self.residencies.lifetimes.iter().enumerate() {
            let tensor = TensorId::from_index(index);
            let Some(gap) = self.residencies.gap_over(tensor, slot) else { continue };
            if matches!(lifetime.gaps[gap], Gap::Swap(_))
                && !self.residencies.relieves(tensor, gap, lifetime.gaps[gap], slot as usize)
                && lingering.is_none_or(|l| lifetime.bytes > l.0)
            {
                lingering = Some((lifetime.bytes, tensor, gap));
            }
        }
        let chosen = lingering.map(|l| (l.1, l.2)).or_else(|| {
            candidates.iter().copied().find(|&(tensor, gap)| self.may_swap(tensor, gap))
        });
        let Some((tensor, gap)) = chosen else { return false };
        let (p, n, _) = self.residencies.operators(tensor, gap);
        let starts = (self.clock.end(p), self.clock.start(n));
        let swap = Swap { starts, passive: true, ..self.residencies.tightest(tensor, gap) };
        self.residencies.decide(tensor, gap, Gap::Swap(swap));
        self.note_swapped(tensor);
        true
    }

    /// Lets passive swaps leave later and come back earlier where the target has room, so that
    /// fewer operators wait.
    fn widen_passive(&mut self, target: u64) {
        let mut passive: Vec<(u32, TensorId, usize)> = Vec::new();
        self.residencies.each_swap(|tensor, gap, swap| {
            if swap.passive {
                passive.push((self.residencies.operators(tensor, gap).1, tensor, gap));
            }
        });
        passive.sort();
        for (_, tensor, gap) in passive {
            self.widen(tensor, gap, target);
        }
    }

    fn widen(&mut self, tensor: TensorId, gap: usize, target: u64) {
        let Gap::Swap(mut swap) = self.residencies.gap(tensor, gap) else { return };
        let (p, n, round) = self.residencies.operators(tensor, gap);
        let bytes = self.residencies.lifetimes[tensor.index()].bytes;
        let raw = self.residencies.graph.tensor(tensor).bytes;
        let wanted = self.clock.start(n);
        let back_length = self.length(Direction::H2d, raw);
        let earliest = if round { 0 } else { self.clock.end(p) };
        if let Some(at) = self.back.latest(earliest, wanted, back_length) {
            self.take(Direction::H2d, at, back_length);
            swap.starts.1 = at;
            let ideal =
                (2 * self.clock.place_by(at)).max(if round { 0 } else { swap.out_until + 1 });
            while swap.back_from > ideal
                && self.fits(swap.back_from as usize - 2, swap.back_from as usize, bytes, target)
            {
                swap.back_from -= 2;
            }
        }
        if !self.residencies.clean(tensor, gap) {
            let out_length = self.length(Direction::D2h, raw);
            let until = if round { self.clock.total } else { wanted };
            if let Some(at) = self.out.earliest(self.clock.end(p), until, out_length) {
                self.take(Direction::D2h, at, out_length);
                swap.starts.0 = at;
                let last = if round {
                    id32(self.residencies.load.slots()) - 2
                } else {
                    swap.back_from.saturating_sub(1)
                };
                let ideal = self.clock.slot_before(at + out_length, 1).min(last);
                while swap.out_until + 2 <= ideal
                    && self.fits(
                        swap.out_until as usize + 1,
                        swap.out_until as usize + 3,
                        bytes,
                        target,
                    )
                {
                    swap.out_until += 2;
                }
            }
        }
        self.residencies.decide(tensor, gap, Gap::Swap(swap));
    }

    fn fits(&self, from: usize, until: usize, bytes: u64, target: u64) -> bool {
        self.residencies.load.most(from, until) + bytes <= target
    }
}
