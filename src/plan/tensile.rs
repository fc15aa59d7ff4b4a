//! The planner `tensile`: TENSILE (Zhang et al., 2023), Algorithms 1 to 3, for one job.
//!
//! Round by round it finds the peak, takes the largest tensor there that rests between two uses, and
//! looks for a free interval of the link to take it out before the peak (as early as can be) and one to
//! bring it back before its next use (as late as can be). Its remaining gaps follow greedily. Parameters and
//! optimizer states rest round the end of the iteration: out in the optimize phase, back before their
//! first use in the next. Where nothing at the peak can be swapped in time, the tensor that frees most bytes
//! per second of recomputing (MSPS) is recomputed from inputs that were never released. The paper's fallback,
//! passive swapping, comes last: a copy that the compute stream may have to wait for.
//!
//! The algorithms' numbers and the published code's constants are from notes on the paper; sections are not verified.
//!
//! Departures from the paper: accounting is physical and in program order, so a plan stays safe when latencies
//! are wrong; rounds go on until the budget is met. Each part is a switch in [`Options`].
//! Cost: O(rounds · (slots + tensors at the peak)). Not for: other planners, several jobs.

use super::lane::Lane;
use super::ledger::{Gap, Ledger};
use crate::contract::Latency;
use crate::device::Link;
use crate::sim::engine::copy_time;
use crate::sim::program::Direction;
use crate::units::{Bytes, TensorId};

/// The planner's switches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Swap tensors (Algorithm 2).
    pub swap: bool,
    /// Swap parameters and optimizer states round the end of the iteration.
    pub across: bool,
    /// Recompute by MSPS (Algorithm 3).
    pub recompute: bool,
    /// Swap with waiting where nothing else is left.
    pub passive: bool,
    /// Let passive swaps start early and end late where bytes allow.
    pub prefetch: bool,
    /// No more swaps in time once the last three rounds gained less than 0.05 % and more than 100 ran.
    pub stop_rule: bool,
    /// The largest share of tensors that may be swapped, in percent (the paper's max swapping rate).
    pub max_swap_rate: u32,
    /// Leave smaller tensors alone while there is anything else.
    pub min_swap: Bytes,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            swap: true,
            across: true,
            recompute: true,
            passive: true,
            prefetch: true,
            stop_rule: true,
            max_swap_rate: 100,
            min_swap: Bytes(64 << 10),
        }
    }
}

/// How far the decisions came.
#[derive(Clone, Debug)]
pub struct Decided<'a> {
    /// The decisions.
    pub ledger: Ledger<'a>,
    /// Slot and load at the end.
    pub peak: (usize, u64),
    /// The load is within the target.
    pub reached: bool,
}

/// Decides until no slot's load exceeds `target`, or nothing is left to do.
#[must_use]
pub fn decide<'a>(
    graph: &'a crate::job::Graph,
    latencies: &[Latency],
    link: &Link,
    pinned: Bytes,
    target: u64,
    options: &Options,
) -> Decided<'a> {
    let mut planner = Planner::new(graph, latencies, link, pinned, options);
    planner.rounds(target);
    if options.prefetch {
        planner.widen_passive(target);
    }
    let peak = planner.ledger.peak();
    Decided { reached: peak.1 <= target, peak, ledger: planner.ledger }
}

struct Planner<'a, 'o> {
    ledger: Ledger<'a>,
    /// Tensors worth swapping in time.
    large: Vec<TensorId>,
    /// The rest.
    small: Vec<TensorId>,
    link: &'o Link,
    options: &'o Options,
    /// Nominal start of each operator, and the end of the last.
    time: Vec<u64>,
    latencies: &'o [Latency],
    out: Lane,
    back: Lane,
    swapped: Vec<bool>,
    swapped_count: usize,
    pinned_left: u64,
}

/// The stop rule of the paper's published code: rounds before it applies, rounds it looks back over. What it
/// compares here is the excess over the target in all slots, since a round lowers one of many equal peaks.
const STOP_AFTER: usize = 100;
const STOP_WINDOW: usize = 3;

impl<'a, 'o> Planner<'a, 'o> {
    fn new(
        graph: &'a crate::job::Graph,
        latencies: &'o [Latency],
        link: &'o Link,
        pinned: Bytes,
        options: &'o Options,
    ) -> Self {
        let mut time = Vec::with_capacity(latencies.len() + 1);
        let mut now = 0;
        time.push(0);
        for latency in latencies {
            now += latency.time.0;
            time.push(now);
        }
        let ledger = Ledger::new(graph);
        let size = |t: &TensorId| ledger.accounts[t.index()].bytes;
        let (large, small) = (0..graph.tensors.len())
            .map(TensorId::of)
            .filter(|t| size(t) > 0)
            .partition(|t| size(t) >= options.min_swap.0);
        Self {
            large,
            small,
            ledger,
            link,
            options,
            time,
            latencies,
            out: Lane::default(),
            back: Lane::default(),
            swapped: vec![false; graph.tensors.len()],
            swapped_count: 0,
            pinned_left: pinned.0,
        }
    }

    fn rounds(&mut self, target: u64) {
        let mut excess: Vec<u128> = Vec::new();
        let mut in_time = self.options.swap;
        loop {
            let (slot, load) = self.ledger.peak();
            if load <= target {
                return;
            }
            if in_time && self.options.stop_rule {
                excess.push(self.ledger.excess(target));
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
            // The small ones, of which there are many, are looked at only where the large ones are of no help.
            if !self.relieve(slot, load, &candidates) {
                let small = self.at_peak(slot, &self.small);
                if !self.relieve(slot, load, &small) {
                    return;
                }
            }
        }
    }

    /// What frees bytes where no swap in time does: recomputing, then swapping passively.
    fn relieve(&mut self, slot: usize, load: u64, candidates: &[(TensorId, usize)]) -> bool {
        self.options.recompute && self.recompute(slot, load, candidates)
            || self.options.passive && self.options.swap && self.swap_passively(slot, candidates)
    }

    /// Tensors that rest over the slot, largest first: the paper's memory peak tensors less those in use.
    fn at_peak(&self, slot: usize, among: &[TensorId]) -> Vec<(TensorId, usize)> {
        let mut found: Vec<(TensorId, usize)> = Vec::new();
        for &tensor in among {
            if let Some(gap) = self.ledger.gap_over(tensor, slot)
                && self.ledger.accounts[tensor.index()].gaps[gap] == Gap::Keep
            {
                found.push((tensor, gap));
            }
        }
        found.sort_by_key(|&(t, gap)| {
            (std::cmp::Reverse(self.ledger.accounts[t.index()].bytes), t, gap)
        });
        found
    }

    fn may_swap(&self, tensor: TensorId, gap: usize) -> bool {
        let account = &self.ledger.accounts[tensor.index()];
        let round = account.long_lived && gap + 1 == account.gaps.len();
        if round && !self.options.across {
            return false;
        }
        self.swapped[tensor.index()]
            || (account.bytes <= self.pinned_left
                && (self.swapped_count + 1) * 100
                    <= self.options.max_swap_rate as usize * self.ledger.accounts.len())
    }

    fn note_swapped(&mut self, tensor: TensorId) {
        if !std::mem::replace(&mut self.swapped[tensor.index()], true) {
            self.swapped_count += 1;
            self.pinned_left -= self.ledger.accounts[tensor.index()].bytes;
        }
    }

    /// One round: the largest candidates first, those that the link can take out before the peak and bring back in time,
    /// until the peak is within the target. Says whether there was any.
    fn swap_in_time(&mut self, slot: usize, candidates: &[(TensorId, usize)], target: u64) -> bool {
        let mut any = false;
        for &(tensor, gap) in candidates {
            if self.ledger.load[slot] <= target {
                break;
            }
            if self.may_swap(tensor, gap) && self.try_swap(tensor, gap, Some(slot)) {
                self.remaining_gaps(tensor, gap);
                any = true;
            }
        }
        any
    }

    /// The other gaps of a tensor that has a host copy now, as far as the link has room.
    fn remaining_gaps(&mut self, tensor: TensorId, done: usize) {
        for gap in 0..self.ledger.accounts[tensor.index()].gaps.len() {
            if gap != done
                && self.ledger.accounts[tensor.index()].gaps[gap] == Gap::Keep
                && self.ledger.clean(tensor, gap)
            {
                self.try_swap(tensor, gap, None);
            }
        }
    }

    /// Looks for intervals on the link that relieve `slot` (or the gap at all), and decides the swap if there are.
    fn try_swap(&mut self, tensor: TensorId, gap: usize, slot: Option<usize>) -> bool {
        let (p, n, round) = self.ledger.ends(tensor, gap);
        let bytes = self.ledger.graph.tensor(tensor).bytes;
        let clean = self.ledger.clean(tensor, gap);
        let end = *self.time.last().unwrap_or(&0);
        let (leaves, wanted) = (self.time[p as usize + 1], self.time[n as usize]);
        // The peak lies after the departure in this iteration, or (round the end only) before the return in the next.
        let in_head = round && slot.is_some_and(|q| q < 2 * n as usize);
        let peak_start = slot.map(|q| self.time[q / 2]);
        let peak_end = slot.map(|q| self.time[q / 2 + q % 2]);
        let out_length =
            if clean { 0 } else { copy_time(self.link, Direction::D2h, bytes, true).0 };
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
        let back_length = copy_time(self.link, Direction::H2d, bytes, true).0;
        let earliest = match (round, in_head) {
            (true, false) => 0,
            (true, true) => peak_end.unwrap_or(0),
            (false, _) => peak_end.unwrap_or(0).max(gone),
        };
        let Some(back_at) = self.back.latest(earliest, wanted, back_length) else { return false };
        // Without a peak to relieve, a swap must at least free one whole operator.
        let out_until = if clean { 2 * p + 1 } else { self.slot_before(gone).max(2 * p + 1) };
        let back_from = self.place_by(back_at);
        if slot.is_none() && !round && back_from < out_until + 3 {
            return false;
        }
        let out_after = self.place_by(out_at).saturating_sub(2) / 2;
        let decision = Gap::Swap {
            out_until,
            back_from,
            out_after: out_after.max(p),
            starts: (out_at, back_at),
            passive: false,
        };
        if slot.is_some_and(|q| !self.ledger.relieves(tensor, gap, decision, q)) {
            return false;
        }
        if !clean {
            self.out.take(out_at, out_length);
        }
        self.back.take(back_at, back_length);
        self.ledger.decide(tensor, gap, decision);
        self.note_swapped(tensor);
        true
    }

    /// The slot of the last operator that starts before an instant.
    fn slot_before(&self, instant: u64) -> u32 {
        let operators = self.time.len() - 1;
        let started = self.time[..operators].partition_point(|&t| t < instant);
        2 * u32::try_from(started.max(1) - 1).unwrap_or(u32::MAX / 2) + 1
    }

    /// The slot right after the last operator that has ended by an instant.
    fn place_by(&self, instant: u64) -> u32 {
        2 * u32::try_from(self.time[1..].partition_point(|&t| t <= instant)).unwrap_or(u32::MAX / 2)
    }

    /// Recomputes the candidate with the most bytes freed per second (the paper's MSPS).
    fn recompute(&mut self, slot: usize, load: u64, candidates: &[(TensorId, usize)]) -> bool {
        let mut ranked: Vec<(u128, TensorId, usize)> = Vec::with_capacity(candidates.len());
        for &(tensor, gap) in candidates {
            let account = &self.ledger.accounts[tensor.index()];
            if account.long_lived || !self.ledger.relieves(tensor, gap, Gap::Recompute, slot) {
                continue;
            }
            let made = account.writes.iter().filter(|&&w| w <= account.uses[gap]);
            let time: u128 =
                made.map(|&w| u128::from(self.latencies[w as usize].time.0)).sum::<u128>().max(1);
            // Bytes per second, in integers.
            ranked.push((u128::from(account.bytes) * 1_000_000_000 / time, tensor, gap));
        }
        ranked.sort_by_key(|&(msps, tensor, gap)| (std::cmp::Reverse(msps), tensor, gap));
        for (_, tensor, gap) in ranked {
            let (_, before, _) = self.ledger.ends(tensor, gap);
            if let Some(chain) = self.ledger.chain(tensor, gap)
                && self.ledger.load_with_chain(tensor, before, &chain) < load
            {
                self.ledger.recompute(tensor, gap, chain);
                return true;
            }
        }
        false
    }

    /// Frees bytes at the slot whatever it costs: first swaps that linger there leave at once, then the largest rest is swapped.
    fn swap_passively(&mut self, slot: usize, candidates: &[(TensorId, usize)]) -> bool {
        let mut lingering: Option<(u64, TensorId, usize)> = None;
        for (index, account) in self.ledger.accounts.iter().enumerate() {
            let tensor = TensorId::of(index);
            let Some(gap) = self.ledger.gap_over(tensor, slot) else { continue };
            if matches!(account.gaps[gap], Gap::Swap { .. })
                && !self.ledger.relieves(tensor, gap, account.gaps[gap], slot)
                && lingering.is_none_or(|l| account.bytes > l.0)
            {
                lingering = Some((account.bytes, tensor, gap));
            }
        }
        let chosen = lingering.map(|l| (l.1, l.2)).or_else(|| {
            candidates.iter().copied().find(|&(tensor, gap)| self.may_swap(tensor, gap))
        });
        let Some((tensor, gap)) = chosen else { return false };
        let mut decision = self.ledger.tightest(tensor, gap);
        if let Gap::Swap { starts, .. } = &mut decision {
            let (p, n, _) = self.ledger.ends(tensor, gap);
            *starts = (self.time[p as usize + 1], self.time[n as usize]);
        }
        self.ledger.decide(tensor, gap, decision);
        self.note_swapped(tensor);
        true
    }

    /// Passive swaps linger and come back as early as the target leaves bytes for, so that fewer operators wait.
    fn widen_passive(&mut self, target: u64) {
        let mut passive: Vec<(u32, TensorId, usize)> = Vec::new();
        for (index, account) in self.ledger.accounts.iter().enumerate() {
            for (gap, decision) in account.gaps.iter().enumerate() {
                if matches!(decision, Gap::Swap { passive: true, .. }) {
                    let tensor = TensorId::of(index);
                    passive.push((self.ledger.ends(tensor, gap).1, tensor, gap));
                }
            }
        }
        passive.sort_unstable();
        for (_, tensor, gap) in passive {
            self.widen(tensor, gap, target);
        }
    }

    fn widen(&mut self, tensor: TensorId, gap: usize, target: u64) {
        let Gap::Swap { mut out_until, mut back_from, out_after, mut starts, passive } =
            self.ledger.accounts[tensor.index()].gaps[gap]
        else {
            return;
        };
        let (p, n, round) = self.ledger.ends(tensor, gap);
        let bytes = self.ledger.accounts[tensor.index()].bytes;
        let raw = self.ledger.graph.tensor(tensor).bytes;
        let wanted = self.time[n as usize];
        let back_length = copy_time(self.link, Direction::H2d, raw, true).0;
        let earliest = if round { 0 } else { self.time[p as usize + 1] };
        if let Some(at) = self.back.latest(earliest, wanted, back_length) {
            self.back.take(at, back_length);
            starts.1 = at;
            let ideal = self.place_by(at).max(if round { 0 } else { out_until + 1 });
            while back_from > ideal
                && self.fits(back_from as usize - 2, back_from as usize, bytes, target)
            {
                back_from -= 2;
            }
        }
        if !self.ledger.clean(tensor, gap) {
            let out_length = copy_time(self.link, Direction::D2h, raw, true).0;
            let until = if round { *self.time.last().unwrap_or(&0) } else { wanted };
            if let Some(at) = self.out.earliest(self.time[p as usize + 1], until, out_length) {
                self.out.take(at, out_length);
                starts.0 = at;
                let last = if round {
                    self.ledger.slots() as u32 - 2
                } else {
                    back_from.saturating_sub(1)
                };
                let ideal = self.slot_before(at + out_length).min(last);
                while out_until + 2 <= ideal
                    && self.fits(out_until as usize + 1, out_until as usize + 3, bytes, target)
                {
                    out_until += 2;
                }
            }
        }
        self.ledger.decide(
            tensor,
            gap,
            Gap::Swap { out_until, back_from, out_after, starts, passive },
        );
    }

    fn fits(&self, from: usize, until: usize, bytes: u64, target: u64) -> bool {
        self.ledger.load[from..until].iter().all(|&load| load + bytes <= target)
    }
}
