//! The copies of one direction, and how others make room for one more.
//!
//! A copy out may run between the instant at which its tensor is free to leave and the one at which
//! it must be gone; a copy in between the instant from which there is room for it and its tensor's
//! next use. Where no free interval is long enough for one more copy, those that may run at other
//! times make room: from its first instant on, of the copies that may run the one that must end
//! first runs next (earliest deadline first, Jackson, 1955), until none waits. For copies in, time
//! runs backwards, so that they stay as late as they may.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashSet};

use crate::timetable::Timetable;
use crate::units::TensorId;

/// What a copy is for: a tensor, and the slot of its next use.
pub(super) type Of = (TensorId, u32);

/// The instants between which a copy may run.
pub(super) type Window = (u64, u64);

/// A copy that is planned, in its lane's own time.
#[derive(Clone, Copy, Debug)]
struct Booking {
    /// `None` for a copy that does not move for others.
    of: Option<Of>,
    /// When it may run.
    from: u64,
    until: u64,
    start: u64,
    length: u64,
}

/// Copies of one direction.
#[derive(Debug)]
pub(super) struct Lane {
    table: Timetable,
    bookings: Vec<Booking>,
    /// The numbers of the bookings, sorted by when they may begin.
    by_from: Vec<usize>,
    /// The bookings, sorted by when they must have ended: by that instant, where it is and its
    /// number, side by side.
    by_until: Vec<(u64, Window, usize)>,
    /// Windows and lengths for which there was no room since the bookings last changed: most of
    /// what is looked for is looked for again. Which of them may move changes without that too;
    /// none of 51 plans differs for it.
    full: HashSet<(Window, u64)>,
    backwards: bool,
}

/// Room for one more copy.
#[derive(Debug)]
pub(super) struct Room {
    /// Where it starts.
    pub(super) start: u64,
    /// Copies that move, with their numbers, and where they start then.
    moved: Vec<(usize, u64)>,
}

/// Later than any instant, so that time can run backwards from it.
const END: u64 = 1 << 62;

impl Lane {
    pub(super) fn new(backwards: bool) -> Self {
        Self {
            table: Timetable::default(),
            bookings: Vec::new(),
            by_from: Vec::new(),
            by_until: Vec::new(),
            full: HashSet::new(),
            backwards,
        }
    }

    /// The earliest free time for a copy within a window; for copies in the latest.
    pub(super) fn free(&self, (from, until): Window, length: u64) -> Option<u64> {
        if self.backwards {
            self.table.latest(from, until, length)
        } else {
            self.table.earliest(from, until, length)
        }
    }

    /// Whether any part of an interval is taken.
    pub(super) fn busy(&self, from: u64, until: u64) -> bool {
        self.table.busy(from, until)
    }

    /// An interval in time that runs as the lane's does, and the other way round.
    const fn turned(&self, (from, until): (u64, u64)) -> (u64, u64) {
        if self.backwards { (END - until, END - from) } else { (from, until) }
    }

    /// Whether there is free time for a copy, from `start` on, and it lies within a window.
    pub(super) fn is_free(&self, window: Window, (start, length): (u64, u64)) -> bool {
        let end = start + length;
        window.0 <= start && end <= window.1 && !self.table.busy(start, end)
    }

    /// Takes free time for a copy that does not move for others.
    pub(super) fn take(&mut self, start: u64, length: u64) {
        self.add(None, (start, start + length), (start, length));
    }

    /// Takes free time for a copy that may move within a window.
    pub(super) fn book(&mut self, of: Of, window: Window, copy: (u64, u64)) {
        self.add(Some(of), window, copy);
    }

    fn add(&mut self, of: Option<Of>, window: Window, (start, length): (u64, u64)) {
        self.full.clear();
        self.table.take(start, length);
        let (from, until) = self.turned(window);
        let (start, _) = self.turned((start, start + length));
        let number = self.bookings.len();
        self.bookings.push(Booking { of, from, until, start, length });
        let at = self.by_from.partition_point(|&n| self.bookings[n].from <= from);
        self.by_from.insert(at, number);
        let at = self.by_until.partition_point(|due| due.0 <= until);
        self.by_until.insert(at, (until, (start, start + length), number));
    }

    /// Whether it is known that there is no room for a copy of this length within a window.
    pub(super) fn is_full(&self, window: Window, length: u64) -> bool {
        self.full.contains(&(window, length))
    }

    /// There is no room for such a copy, until the bookings change.
    pub(super) fn note_full(&mut self, window: Window, length: u64) {
        self.full.insert((window, length));
    }

    /// Room for a copy of this length within a window, where others make it. Those that are not
    /// `movable`, given the instants at which they may start and do, stay where they are.
    pub(super) fn room(
        &self,
        window: Window,
        length: u64,
        movable: impl Fn(Of, Window, Window) -> bool,
    ) -> Option<Room> {
        let (from, until) = self.turned(window);
        if until.checked_sub(from)? < length {
            return None;
        }
        // What has begun, or is over, stays.
        let ends = |&(_, at, _): &(u64, Window, usize)| if at.0 < from { at.1 } else { from };
        let mut now = self.due_after(from).iter().map(ends).max().unwrap_or(from).max(from);
        if !self.may_end_in_time(now, (from, until), length) {
            return None;
        }
        // By the ends of their windows and by their numbers.
        let mut waiting = BinaryHeap::from([Reverse((until, usize::MAX, length))]);
        // When those that follow may run, at first as if all could move; then where they stay.
        let later = |&&number: &&usize| self.bookings[number].start >= from;
        let mut rest = self.by_from.iter().filter(later).peekable();
        let mut fixed = BinaryHeap::new();
        let mut room = Room { start: 0, moved: Vec::new() };
        loop {
            loop {
                let next = rest.peek().map(|&&number| (self.bookings[number].from, number));
                let stays = fixed.peek().map(|&Reverse(fixed)| fixed);
                let first = next.filter(|next| stays.is_none_or(|stays| *next < stays));
                let Some((_, number)) = first.or(stays).filter(|(at, _)| *at <= now) else { break };
                if first.is_some() {
                    rest.next();
                } else {
                    fixed.pop();
                }
                let booking = self.bookings[number];
                let stays = (booking.start, booking.start + booking.length);
                let window = self.turned((booking.from, booking.until));
                let moves = |of| first.is_some() && movable(of, window, self.turned(stays));
                if booking.of.is_some_and(moves) {
                    waiting.push(Reverse((booking.until, number, booking.length)));
                } else if booking.start <= now {
                    waiting.push(Reverse((stays.1, number, booking.length)));
                } else {
                    fixed.push(Reverse((booking.start, number)));
                }
            }
            // What comes later can stay.
            let Some(Reverse((until, number, length))) = waiting.pop() else { return Some(room) };
            let end = now + length;
            if end > until {
                return None;
            }
            let (start, _) = self.turned((now, end));
            if number == usize::MAX {
                room.start = start;
            } else if self.bookings[number].start != now {
                room.moved.push((number, start));
            }
            now = end;
        }
    }

    /// The bookings that need not have ended by an instant.
    fn due_after(&self, instant: u64) -> &[(u64, Window, usize)] {
        &self.by_until[self.by_until.partition_point(|due| due.0 <= instant)..]
    }

    /// Whether all that must end by an instant can end by it, with a new copy and from `now` on, if
    /// all may begin at any time. Those that began before the new copy's window are over by then.
    fn may_end_in_time(&self, now: u64, (from, until): Window, length: u64) -> bool {
        let mut end = now;
        let mut new = Some(length);
        for &(due, at, _) in self.due_after(from) {
            if due > until
                && let Some(length) = new.take()
            {
                end += length;
                if end > until {
                    return false;
                }
            }
            if at.0 >= from {
                end += at.1 - at.0;
                if new.is_none() && end > due {
                    return false;
                }
            }
        }
        new.is_none_or(|length| end + length <= until)
    }

    /// Moves what makes room, and returns what each of these copies is for, where it starts, and
    /// its length.
    pub(super) fn give(&mut self, room: Room) -> Vec<(Of, u64, u64)> {
        self.full.clear();
        let mut moved = Vec::with_capacity(room.moved.len());
        for (number, start) in room.moved {
            let booking = self.bookings[number];
            let length = booking.length;
            self.bookings[number].start = self.turned((start, start + length)).0;
            moved.extend(booking.of.map(|of| (of, start, length)));
        }
        for (_, at, number) in &mut self.by_until {
            let Booking { start, length, .. } = self.bookings[*number];
            *at = (start, start + length);
        }
        self.table = Timetable::default();
        for booking in &self.bookings {
            let (start, _) = self.turned((booking.start, booking.start + booking.length));
            self.table.take(start, booking.length);
        }
        moved
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection;
    use proptest::prelude::*;

    /// The copies of a lane, by start.
    fn copies(lane: &Lane) -> Vec<(Window, Window)> {
        let turned = |of: &Booking| {
            (lane.turned((of.start, of.start + of.length)), lane.turned((of.from, of.until)))
        };
        let mut all: Vec<_> = lane.bookings.iter().map(turned).collect();
        all.sort_unstable();
        all
    }

    #[test]
    fn a_copy_that_may_wait_makes_room() {
        let of = Some((TensorId::from_index(0), 7));
        let mut lane = Lane::new(false);
        lane.add(of, (0, 100), (0, 10));
        lane.take(20, 10);
        // From 0 to 10, the one that is there from 10 to 20.
        let movable = |_: Of, _: Window, _: Window| true;
        let room = lane.room((0, 10), 10, movable).unwrap();
        assert_eq!(room.start, 0);
        assert_eq!(lane.give(room), [((TensorId::from_index(0), 7), 10, 10)]);
        assert_eq!(lane.free((0, 10), 10), Some(0));
        // What does not move leaves no room.
        assert!(lane.room((15, 29), 10, movable).is_none());
        assert!(lane.room((0, 19), 15, |_, _, _| false).is_none());
    }

    proptest! {
        #[test]
        fn copies_stay_within_their_windows_and_apart(
            wanted in collection::vec((0u64..60, 1u64..40, 1u64..12, any::<bool>()), 1..12),
            backwards: bool,
        ) {
            let mut lane = Lane::new(backwards);
            for (number, (from, width, length, fixed)) in wanted.into_iter().enumerate() {
                let (window, of) = ((from, from + width), (TensorId::from_index(number), 0));
                let start = match lane.free(window, length) {
                    Some(start) => start,
                    None => match lane.room(window, length, |_, _, _| true) {
                        Some(room) => {
                            let start = room.start;
                            lane.give(room);
                            start
                        }
                        None => continue,
                    },
                };
                prop_assert!(lane.is_free(window, (start, length)));
                if fixed {
                    lane.take(start, length);
                } else {
                    lane.book(of, window, (start, length));
                }
            }
            let all = copies(&lane);
            prop_assert!(all.iter().all(|(at, of)| of.0 <= at.0 && at.1 <= of.1));
            prop_assert!(all.windows(2).all(|two| two[0].0.1 <= two[1].0.0));
        }
    }
}
