//! The greedy choice: which gaps leave over the link, and which are made again.
//!
//! At the highest slot, the link goes first to what is dearest to make again per byte, as far as
//! copies fit in time (a weighted matching of copies to link time: the opportunity cost of a swap
//! is the recompute it saves); what then is missing is made again, cheapest first per byte and slot
//! over the target that it relieves; only then does a copy that an operator has to wait for. Not
//! for: when copies run in the end ([`super::prefetch`]).

mod ahead;
mod lane;
mod replay;
mod room;

use std::cmp::Reverse;

use lane::{Lane, Window};

use super::improve::polish::{Choice, Made};
use super::stream::{Streamed, streamable};
use super::{Options, Rule, Variant};
use crate::clock::Clock;
use crate::contract::Latency;
use crate::device::Link;
use crate::recompute::{Part, Recompute, Recomputer};
use crate::residency::{Gap, Residencies, Swap};
use crate::sim::engine::copy_time;
use crate::sim::program::Direction;
use crate::units::{Bytes, TensorId};

/// What choices are made by.
#[derive(Clone, Copy)]
pub struct Setting<'o> {
    /// One for each operator.
    pub latencies: &'o [Latency],
    /// The link.
    pub link: &'o Link,
    /// Host memory for copies.
    pub pinned: Bytes,
    /// The load that is aimed at.
    pub target: u64,
    /// The planner's switches.
    pub options: &'o Options,
    /// When operators are taken to run.
    pub clock: &'o Clock,
    /// The greedy's parameters.
    pub variant: Variant,
    /// By tensor.
    pub rules: &'o [Rule],
    /// What is ever used.
    pub all: &'o [TensorId],
    /// What of it is not too small to be swapped while there is anything else.
    pub large: &'o [TensorId],
}

/// Greedy decisions on a clock.
pub struct Chooser<'a, 'o> {
    /// The decisions.
    pub residencies: Residencies<'a>,
    setting: Setting<'o>,
    out: Lane,
    back: Lane,
    swapped: Vec<bool>,
    pinned_left: u64,
    /// Slots over the target, summed from the first.
    over: Vec<u64>,
    /// What may be streamed, where the variant streams anything.
    streamable: Vec<TensorId>,
    /// What was chosen, in order.
    pub choices: Vec<Choice>,
}

/// A gap at the peak.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    tensor: TensorId,
    gap: usize,
    bytes: u64,
    /// Picoseconds for each byte of making it again; what can't be is dearest.
    price: u128,
    /// The slots over the target that it relieves for the bytes of two copies, where that counts.
    relieved: u64,
}

impl Candidate {
    /// With nanoseconds for making it again, `None` where it can't be.
    fn new(tensor: TensorId, gap: usize, bytes: u64, cost: Option<u64>) -> Self {
        let price = cost.map_or(u128::MAX, |cost| match cost.checked_mul(1_000_000) {
            Some(cost) => u128::from(cost / bytes),
            None => u128::from(cost) * 1_000_000 / u128::from(bytes),
        });
        Self { tensor, gap, bytes, price, relieved: 0 }
    }
}

impl<'a, 'o> Chooser<'a, 'o> {
    /// Nothing decided yet.
    #[must_use]
    pub fn new(residencies: Residencies<'a>, setting: Setting<'o>) -> Self {
        Self {
            swapped: vec![false; residencies.lifetimes.len()],
            residencies,
            setting,
            out: Lane::new(false),
            back: Lane::new(true),
            pinned_left: setting.pinned.0,
            over: Vec::new(),
            streamable: Vec::new(),
            choices: Vec::new(),
        }
    }

    /// Streams the variant's share of what is over the target.
    pub fn stream(&mut self) {
        let Setting { options, target, variant, .. } = self.setting;
        let (slot, load) = self.residencies.load.peak();
        let missing = u128::from(load.saturating_sub(target)) * u128::from(variant.streamed) / 100;
        self.streamable = streamable(&self.residencies, options.min_swap.0, variant.parameters);
        self.stream_more(
            u32::try_from(slot).unwrap_or(u32::MAX),
            u64::try_from(missing).unwrap_or(u64::MAX),
        );
    }

    /// Streams `wanted` bytes more at a slot. Returns whether there was anything to stream.
    fn stream_more(&mut self, slot: u32, wanted: u64) -> bool {
        let Setting { clock, link, rules, .. } = self.setting;
        let from = clock.slot(slot);
        let mut all = Vec::new();
        for &tensor in &self.streamable {
            let lifetime = self.residencies.lifetime(tensor);
            let gap = lifetime.gaps.len() - 1;
            let is = matches!(self.residencies.gap(tensor, gap), Gap::Swap(_));
            let tight = Gap::Swap(self.residencies.tightest(tensor, gap));
            let may = !rules[tensor.index()].no_swap
                && self.residencies.gap(tensor, gap) == Gap::Keep
                && self.may_swap(tensor, gap)
                && self.residencies.relieves(tensor, gap, tight, slot as usize);
            if is || may {
                let at = clock.slot(lifetime.uses[0]);
                let after = if at >= from { at - from } else { at + clock.total - from };
                let bytes = self.residencies.graph.tensor(tensor).bytes;
                let time = copy_time(link, Direction::H2d, bytes, true).0;
                all.push(Streamed { tensor, bytes: lifetime.bytes, time, after, is });
            }
        }
        all.sort_by_key(|of| (of.after, of.tensor));
        let last = u128::from(wanted) * u128::from(self.setting.variant.last) / 100;
        let last = super::stream::last(&all, u64::try_from(last).unwrap_or(wanted));
        let mut left = wanted;
        for &at in &last {
            // The others are spread as if these took no time: little else is copied so late.
            all[at] = Streamed { is: true, time: 0, ..all[at] };
            left -= all[at].bytes;
        }
        let spread = super::stream::spread(&all, left);
        let chosen: Vec<TensorId> =
            last.into_iter().chain(spread).map(|at| all[at].tensor).collect();
        for &tensor in &chosen {
            let bytes = self.residencies.graph.tensor(tensor).bytes;
            let time = copy_time(link, Direction::H2d, bytes, true).0;
            let gap = self.residencies.lifetime(tensor).gaps.len() - 1;
            // Pinned memory may have run out meanwhile.
            if !self.may_swap(tensor, gap) {
                continue;
            }
            self.leave_at_once(tensor, gap);
            let (a, b, _) = self.residencies.ends(tensor, gap);
            let window = (clock.place(a.div_ceil(2)), clock.total);
            if let Some(out) = self.out.free(window, time) {
                self.out.take(out, time);
            }
            if let Some(back) = self.back.free((0, clock.slot(b)), time) {
                self.back.take(back, time);
            }
        }
        !chosen.is_empty()
    }

    /// Decides until no slot is over the target, or nothing helps.
    pub fn rounds(&mut self) {
        loop {
            let (slot, load) = self.residencies.load.peak();
            if load <= self.setting.target {
                return;
            }
            let slot = u32::try_from(slot).unwrap_or(u32::MAX);
            if !self.round(slot, self.setting.options.min_swap.0) && !self.round(slot, 0) {
                return;
            }
        }
    }

    fn count_over(&mut self) {
        self.over.clear();
        self.over.push(0);
        let mut sum = 0;
        for load in self.residencies.load.all() {
            sum += u64::from(load > self.setting.target);
            self.over.push(sum);
        }
    }

    fn round(&mut self, slot: u32, least: u64) -> bool {
        let before = self.residencies.load.at(slot as usize);
        let mut candidates = self.at_peak(slot, least);
        let theta = self.cheap_below(slot, &candidates);
        if self.setting.options.swap {
            let rules = self.setting.rules;
            let first = |c: &Candidate| rules[c.tensor.index()].first;
            let dearest = self.setting.variant.dearest;
            candidates.sort_by_key(|c| {
                let price = if dearest { c.price } else { 0 };
                let worth = (Reverse(price), Reverse(c.relieved), Reverse(c.bytes));
                (Reverse(first(c)), worth, c.tensor, c.gap)
            });
            for c in candidates
                .iter()
                .filter(|c| (c.price >= theta || first(c)) && !rules[c.tensor.index()].no_swap)
            {
                if self.residencies.load.at(slot as usize) <= self.setting.target {
                    break;
                }
                if self.may_swap(c.tensor, c.gap) {
                    self.try_swap(c.tensor, c.gap, slot);
                }
            }
        }
        if self.setting.options.recompute
            && self.residencies.load.at(slot as usize) > self.setting.target
        {
            self.recompute(slot, &candidates);
        }
        if self.residencies.load.at(slot as usize) > self.setting.target
            && theta > 0
            && self.setting.options.swap
        {
            for c in &candidates {
                if self.residencies.load.at(slot as usize) <= self.setting.target {
                    break;
                }
                if self.still(c, slot)
                    && !self.setting.rules[c.tensor.index()].no_swap
                    && self.may_swap(c.tensor, c.gap)
                {
                    self.try_swap(c.tensor, c.gap, slot);
                }
            }
        }
        if self.setting.options.passive
            && self.setting.options.swap
            && self.residencies.load.at(slot as usize) == before
        {
            self.swap_passively(slot, &candidates);
        }
        self.residencies.load.at(slot as usize) < before
    }

    /// The price below which tensors at the slot are recomputed and not swapped: the cheaper ones
    /// make up the share of the missing bytes that the variant leaves to recomputation.
    fn cheap_below(&self, slot: u32, candidates: &[Candidate]) -> u128 {
        let missing = self.residencies.load.at(slot as usize) - self.setting.target;
        let share = u128::from(missing) * u128::from(self.setting.variant.recomputed) / 100;
        let mut prices: Vec<(u128, u64)> = candidates.iter().map(|c| (c.price, c.bytes)).collect();
        prices.sort_unstable();
        let mut sum = 0;
        for (price, bytes) in prices {
            if sum >= share {
                return if share == 0 { 0 } else { price };
            }
            sum += u128::from(bytes);
        }
        u128::MAX
    }

    fn still(&self, c: &Candidate, slot: u32) -> bool {
        self.residencies.gap_over(c.tensor, slot) == Some(c.gap)
            && self.residencies.gap(c.tensor, c.gap) == Gap::Keep
    }

    fn at_peak(&mut self, slot: u32, least: u64) -> Vec<Candidate> {
        let by_reach = self.setting.options.by_reach;
        if by_reach {
            self.count_over();
        }
        let mut found = Vec::new();
        let mut maker = Recomputer::new(
            &self.residencies,
            self.setting.latencies,
            self.setting.options.reach(),
        );
        for &tensor in if least >= self.setting.options.min_swap.0 {
            self.setting.large
        } else {
            self.setting.all
        } {
            let (index, lifetime) = (tensor.index(), self.residencies.lifetime(tensor));
            if lifetime.bytes >= least.max(1)
                && let Some(gap) = self.residencies.gap_over(tensor, slot)
                && self.residencies.gap(tensor, gap) == Gap::Keep
            {
                let may = self.setting.options.recompute && !self.setting.rules[index].no_recompute;
                let cost = if may { maker.cost(tensor, gap) } else { None };
                let relieved = if by_reach { self.relieved(tensor, gap) } else { 0 };
                let candidate = Candidate::new(tensor, gap, lifetime.bytes, cost);
                found.push(Candidate { relieved, ..candidate });
            }
        }
        found
    }

    fn may_swap(&self, tensor: TensorId, gap: usize) -> bool {
        let lifetime = self.residencies.lifetime(tensor);
        let round = lifetime.long_lived && gap + 1 == lifetime.gaps.len();
        // What is over the share may not be swapped even where nothing else is left.
        let forbidden =
            self.setting.options.swap_share < 1000 && self.setting.rules[tensor.index()].no_swap;
        !forbidden
            && (!round || self.setting.options.across)
            && (self.swapped[tensor.index()] || lifetime.bytes <= self.pinned_left)
    }

    fn note_swapped(&mut self, tensor: TensorId) {
        if !std::mem::replace(&mut self.swapped[tensor.index()], true) {
            self.pinned_left -= self.residencies.lifetime(tensor).bytes;
        }
    }

    /// Looks for intervals on the link that relieve `slot`, and decides the swap if there are.
    fn try_swap(&mut self, tensor: TensorId, gap: usize, slot: u32) -> bool {
        let (a, b, round) = self.residencies.ends(tensor, gap);
        let bytes = self.residencies.graph.tensor(tensor).bytes;
        let tight = self.residencies.tightest(tensor, gap);
        if !self.residencies.relieves(tensor, gap, Gap::Swap(tight), slot as usize) {
            return false;
        }
        let clean = self.residencies.clean(tensor, gap);
        // The slot lies in the next iteration, before the tensor comes back.
        let after_end = round && slot < b;
        let wanted = self.setting.clock.slot(b);
        let first = self.leaves_from(tensor, gap);
        let leaves = self.setting.clock.place(first);
        let (peak_start, peak_end) =
            (self.setting.clock.slot(slot), self.setting.clock.slot(slot + 1));
        let deadline = if after_end { self.setting.clock.total } else { peak_start };
        if !clean && self.setting.variant.ahead && self.swap_ahead(tensor, gap, slot) {
            return true;
        }
        let mut out = None;
        if !clean {
            out = self.time_for(Direction::D2h, (leaves, deadline), bytes);
            if out.is_none() {
                return false;
            }
        }
        let (out_at, gone) =
            out.as_ref().map_or((leaves, leaves), |out| (out.start, out.start + out.length));
        let earliest = match (round, after_end) {
            (true, false) => 0,
            (true, true) => peak_end,
            (false, _) => peak_end.max(gone),
        };
        let back = self.time_for(Direction::H2d, (earliest, wanted), bytes);
        let Some(back) = back else { return false };
        let swap = Swap {
            out_until: if clean {
                a
            } else {
                self.setting.clock.slot_before(gone, tight.out_until)
            },
            back_from: (2 * self.setting.clock.place_by(back.start)).min(tight.back_from),
            out_place: self.setting.clock.place_by(out_at).max(first),
            starts: (out_at, back.start),
            passive: false,
        };
        if !self.residencies.relieves(tensor, gap, Gap::Swap(swap), slot as usize) {
            return false;
        }
        let windows = [(leaves, deadline), (earliest, wanted)];
        if let Some(out) = out {
            self.book(Direction::D2h, (tensor, b), windows[0], out);
        }
        self.book(Direction::H2d, (tensor, b), windows[1], back);
        self.swap(tensor, gap, swap, Some(windows));
        true
    }

    /// The first place at which this variant may begin to copy a tensor out.
    fn leaves_from(&self, tensor: TensorId, gap: usize) -> u32 {
        if self.setting.variant.early {
            self.residencies.leaves_from(tensor, gap)
        } else {
            self.residencies.tightest(tensor, gap).out_place
        }
    }

    fn swap(&mut self, tensor: TensorId, gap: usize, swap: Swap, windows: Option<[Window; 2]>) {
        let until = self.residencies.ends(tensor, gap).1;
        self.choices.push(Choice { tensor, until, made: Made::Swapped(swap), windows });
        self.residencies.decide(tensor, gap, Gap::Swap(swap));
        self.note_swapped(tensor);
    }

    fn length(&self, direction: Direction, bytes: Bytes, contended: bool) -> u64 {
        if contended {
            copy_time(self.setting.link, direction, bytes, true).0
        } else {
            self.setting.variant.time(self.setting.link, direction, bytes)
        }
    }

    /// Makes again what is cheapest for what it relieves.
    fn recompute(&mut self, slot: u32, candidates: &[Candidate]) {
        let mut heap: std::collections::BinaryHeap<Reverse<(u128, TensorId, usize)>> =
            std::collections::BinaryHeap::new();
        for c in candidates {
            if c.price < u128::MAX
                && self.still(c, slot)
                && let Some((key, _)) = self.rate(c.tensor, c.gap, slot)
            {
                heap.push(Reverse((key, c.tensor, c.gap)));
            }
        }
        let peak = self.residencies.load.at(slot as usize);
        while let Some(Reverse((_, tensor, gap))) = heap.pop() {
            if self.residencies.load.at(slot as usize) <= self.setting.target {
                return;
            }
            if self.residencies.gap_over(tensor, slot) != Some(gap)
                || self.residencies.gap(tensor, gap) != Gap::Keep
            {
                continue;
            }
            // Its price may have risen since, or fallen: what is made in passing, what is gone.
            let Some((key, recompute)) = self.rate(tensor, gap, slot) else { continue };
            if heap.peek().is_some_and(|next| next.0.0 < key) {
                heap.push(Reverse((key, tensor, gap)));
                continue;
            }
            let limit = self
                .setting
                .target
                .max(peak.saturating_sub(self.residencies.lifetime(tensor).bytes));
            let (limit, until) = (limit.min(peak), self.residencies.ends(tensor, gap).1);
            self.choices.push(Choice { tensor, until, made: Made::Again(limit), windows: None });
            self.residencies.apply(tensor, gap, recompute, limit, self.setting.options.reach());
        }
    }

    /// Nanoseconds for each byte and slot over the target relieved, and what it takes.
    fn rate(&self, tensor: TensorId, gap: usize, slot: u32) -> Option<(u128, Recompute)> {
        if !self.residencies.relieves(tensor, gap, Gap::Recompute, slot as usize) {
            return None;
        }
        let recompute = self.residencies.recompute_of(
            self.setting.latencies,
            tensor,
            gap,
            self.setting.options.reach(),
        )?;
        if matches!(recompute.parts[..], [Part::Shared(_, at, _)] if at <= slot) {
            return None;
        }
        let (_, b, _) = self.residencies.ends(tensor, gap);
        let at = (b & !1) as usize;
        let peak = self.residencies.load.at(slot as usize);
        if self.residencies.load.at(at) + recompute.extra >= peak {
            return None;
        }
        let key = u128::from(recompute.cost) * 1_000_000_000_000
            / u128::from(self.residencies.lifetime(tensor).bytes).max(1);
        Some((key, recompute))
    }

    /// The slots over the target that a swap relieves at most, for the bytes of two copies.
    fn relieved(&self, tensor: TensorId, gap: usize) -> u64 {
        let tight = Gap::Swap(self.residencies.tightest(tensor, gap));
        let copies = if self.residencies.clean(tensor, gap) { 1 } else { 2 };
        self.covered(tensor, gap, tight) * 2 / copies
    }

    fn covered(&self, tensor: TensorId, gap: usize, decision: Gap) -> u64 {
        self.residencies
            .away(tensor, gap, decision)
            .iter()
            .map(|&(a, b)| if a < b { self.over[b] - self.over[a] } else { 0 })
            .sum()
    }

    /// Frees bytes at the slot whatever it costs: first swaps that linger there leave at once, then
    /// others are swapped.
    fn swap_passively(&mut self, slot: u32, candidates: &[Candidate]) {
        let mut lingering: Option<(u64, TensorId, usize)> = None;
        for (index, lifetime) in self.residencies.lifetimes.iter().enumerate() {
            let tensor = TensorId::from_index(index);
            let Some(gap) = self.residencies.gap_over(tensor, slot) else { continue };
            if let Gap::Swap(_) = lifetime.gaps[gap]
                && !self.residencies.relieves(tensor, gap, lifetime.gaps[gap], slot as usize)
                && self.residencies.relieves(
                    tensor,
                    gap,
                    Gap::Swap(self.residencies.tightest(tensor, gap)),
                    slot as usize,
                )
                && lingering.is_none_or(|l| lifetime.bytes > l.0)
            {
                lingering = Some((lifetime.bytes, tensor, gap));
            }
        }
        if let Some((_, tensor, gap)) = lingering {
            self.leave_at_once(tensor, gap);
            return;
        }
        let missing = self.residencies.load.at(slot as usize) - self.setting.target;
        if !self.streamable.is_empty() && self.stream_more(slot, missing) {
            return;
        }
        self.count_over();
        let mut worth: Vec<(u128, TensorId, usize)> = Vec::new();
        for c in candidates.iter().filter(|c| self.still(c, slot)) {
            let swap = self.residencies.tightest(c.tensor, c.gap);
            if self.residencies.relieves(c.tensor, c.gap, Gap::Swap(swap), slot as usize) {
                let copies = if self.residencies.clean(c.tensor, c.gap) { 1 } else { 2 };
                let useful = u128::from(c.bytes.min(missing))
                    * u128::from(self.covered(c.tensor, c.gap, Gap::Swap(swap)).max(1));
                worth.push((useful * 1_000_000 / (u128::from(c.bytes) * copies), c.tensor, c.gap));
            }
        }
        worth.sort_unstable_by_key(|&(worth, tensor, gap)| (Reverse(worth), tensor, gap));
        for (_, tensor, gap) in worth {
            if self.residencies.load.at(slot as usize) <= self.setting.target {
                return;
            }
            if self.may_swap(tensor, gap) {
                self.leave_at_once(tensor, gap);
            }
        }
    }

    fn leave_at_once(&mut self, tensor: TensorId, gap: usize) {
        let mut swap = self.residencies.tightest(tensor, gap);
        let (_, b, _) = self.residencies.ends(tensor, gap);
        swap.starts = (self.setting.clock.place(swap.out_place), self.setting.clock.slot(b));
        self.swap(tensor, gap, swap, None);
    }
}
