//! Parameters that are copied out ahead.
//!
//! A parameter that leaves in the forward, after its use, is copied out there, where the link has
//! most to do: everything that the backward needs leaves in the forward. But an update writes a
//! parameter once an iteration. If it also leaves after its update, and comes back for its use in
//! the next forward, the host holds what the device does, and in the forward it leaves without a
//! copy. That takes another copy to the device, in the forward, where few go that way.

use super::Chooser;
use crate::residency::{Gap, Swap};
use crate::sim::program::Direction;
use crate::units::TensorId;

impl Chooser<'_, '_> {
    /// Swaps what nothing writes from the iteration's start to the gap, and also round the end of
    /// the iteration before, so that it relieves `slot` without a copy out in this iteration.
    /// Returns whether it does.
    pub(in crate::neap) fn swap_ahead(&mut self, tensor: TensorId, gap: usize, slot: u32) -> bool {
        let residencies = &self.residencies;
        let lifetime = residencies.lifetime(tensor);
        let last = lifetime.gaps.len() - 1;
        if !lifetime.long_lived
            || gap == last
            || !lifetime.unwritten_before(gap)
            || residencies.gap(tensor, last) != Gap::Keep
            || !self.setting.options.across
        {
            return false;
        }
        let (clock, bytes) = (self.setting.clock, residencies.graph.tensor(tensor).bytes);
        let round = residencies.tightest(tensor, last);
        let within = residencies.tightest(tensor, gap);
        // The next use after each of the two gaps.
        let uses = [last, gap].map(|gap| clock.slot(residencies.ends(tensor, gap).1));
        let out_time = self.length(Direction::D2h, bytes, true);
        let time = self.length(Direction::H2d, bytes, true);
        let leaves = clock.place(round.out_place);
        let clean = residencies.clean(tensor, last);
        let out = if clean {
            Some((leaves, round.out_until))
        } else {
            let at = self.out.free((leaves, clock.total), out_time);
            at.map(|at| (at, clock.slot_before(at + out_time, round.out_until)))
        };
        let Some((out, out_until)) = out else { return false };
        let Some(first) = self.back.free((0, uses[0]), time) else { return false };
        let Some(second) = self.back.free((clock.slot(slot + 1), uses[1]), time) else {
            return false;
        };
        let back = |at: u64, tight: Swap| (2 * clock.place_by(at)).min(tight.back_from);
        let round = Swap {
            out_until,
            back_from: back(first, round),
            out_place: clock.place_by(out).max(round.out_place),
            starts: (out, first),
            passive: false,
        };
        let starts = (clock.place(within.out_place), second);
        let within = Swap { back_from: back(second, within), starts, ..within };
        if !residencies.relieves(tensor, gap, Gap::Swap(within), slot as usize) {
            return false;
        }
        if !clean {
            self.out.take(out, out_time);
        }
        self.back.take(first, time);
        self.back.take(second, time);
        self.swap(tensor, last, round, None);
        self.swap(tensor, gap, within, None);
        true
    }
}
