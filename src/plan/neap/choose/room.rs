//! Time on the link for one more copy, where others move if need be.

use super::lane::{Lane, Of, Room, Window};
use super::{Choice, Chooser, Made};
use crate::residency::{Gap, Swap};
use crate::sim::program::Direction;
use crate::units::Bytes;

/// Time for a copy.
pub(super) struct Time {
    pub(super) start: u64,
    pub(super) length: u64,
    /// What moves for it.
    room: Option<Room>,
}

impl Chooser<'_, '_> {
    const fn lanes(&self, direction: Direction) -> (&Lane, &Lane) {
        match direction {
            Direction::D2h => (&self.out, &self.back),
            Direction::H2d => (&self.back, &self.out),
        }
    }

    const fn lane(&mut self, direction: Direction) -> &mut Lane {
        match direction {
            Direction::D2h => &mut self.out,
            Direction::H2d => &mut self.back,
        }
    }

    /// Time for a copy of these bytes within a window: free time, or room that other copies make.
    pub(super) fn time_for(
        &mut self,
        direction: Direction,
        window: Window,
        bytes: Bytes,
    ) -> Option<Time> {
        let (own, other) = self.lanes(direction);
        // As slow as when both directions are busy, only if the other one is.
        let free = |contended: bool| {
            let length = self.length(direction, bytes, contended);
            let start = own.free(window, length)?;
            let alone = contended || !other.busy(start, start + length);
            alone.then_some(Time { start, length, room: None })
        };
        if let Some(time) = free(false).or_else(|| free(true)) {
            return Some(time);
        }
        let length = self.length(direction, bytes, true);
        if !self.setting.variant.shift || own.is_full(window, length) {
            return None;
        }
        let movable = |of, window, at| self.movable(direction, of, window, at);
        let room = own.room(window, length, movable);
        if room.is_none() {
            self.lane(direction).note_full(window, length);
        }
        room.map(|room| Time { start: room.start, length, room: Some(room) })
    }

    /// Takes the time for a copy, and moves those that make room.
    pub(super) fn book(&mut self, direction: Direction, of: Of, window: Window, time: Time) {
        if let Some(room) = time.room {
            self.give(direction, room);
        }
        self.lane(direction).book(of, window, (time.start, time.length));
    }

    /// Whether a booked copy's swap still is as it was booked, with these windows.
    fn movable(&self, direction: Direction, of: Of, window: Window, at: Window) -> bool {
        let (tensor, until) = of;
        let Some(gap) = self.residencies.gap_until(tensor, until) else { return false };
        let Gap::Swap(swap) = self.residencies.gap(tensor, gap) else { return false };
        match direction {
            Direction::D2h => {
                let leaves = self.setting.clock.place(self.leaves_from(tensor, gap));
                swap.starts.0 == at.0 && leaves == window.0
            }
            Direction::H2d => swap.starts.1 == at.0,
        }
    }

    /// Moves the copies that make room.
    fn give(&mut self, direction: Direction, room: Room) {
        let clock = self.setting.clock;
        for ((tensor, until), start, length) in self.lane(direction).give(room) {
            let Some(gap) = self.residencies.gap_until(tensor, until) else { continue };
            let Gap::Swap(swap) = self.residencies.gap(tensor, gap) else { continue };
            let tight = self.residencies.tightest(tensor, gap);
            let swap = match direction {
                Direction::D2h => Swap {
                    out_until: clock.slot_before(start + length, tight.out_until),
                    out_place: clock.place_by(start).max(self.leaves_from(tensor, gap)),
                    starts: (start, swap.starts.1),
                    ..swap
                },
                Direction::H2d => Swap {
                    back_from: (2 * clock.place_by(start)).min(tight.back_from),
                    starts: (swap.starts.0, start),
                    ..swap
                },
            };
            self.residencies.decide(tensor, gap, Gap::Swap(swap));
            let made = Made::Swapped(swap);
            let same = |choice: &&mut Choice| choice.tensor == tensor && choice.until == until;
            if let Some(choice) = self.choices.iter_mut().rev().find(same) {
                choice.made = made;
            }
        }
    }
}
