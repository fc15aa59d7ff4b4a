//! The busy intervals of one direction of the link, and free intervals for copies.
//!
//! TENSILE's swap scheduling (its Algorithm 2; section not verified) looks for the earliest
//! interval for a swap-out and the latest for a swap-in.

/// Busy intervals of one direction, sorted, disjoint, half-open, in nanoseconds.
#[derive(Clone, Debug, Default)]
pub struct Timetable {
    busy: Vec<(u64, u64)>,
}

impl Timetable {
    /// The earliest start of `length` free nanoseconds within `from..until`.
    #[must_use]
    pub fn earliest(&self, from: u64, until: u64, length: u64) -> Option<u64> {
        let mut start = from;
        let mut next = self.busy.partition_point(|b| b.1 <= from);
        loop {
            if start.checked_add(length)? > until {
                return None;
            }
            match self.busy.get(next) {
                Some(&(s, e)) if s < start + length => {
                    start = start.max(e);
                    next += 1;
                }
                _ => return Some(start),
            }
        }
    }

    /// The latest start of `length` free nanoseconds within `from..until`.
    #[must_use]
    pub fn latest(&self, from: u64, until: u64, length: u64) -> Option<u64> {
        let mut end = until;
        let mut next = self.busy.partition_point(|b| b.0 < until);
        loop {
            let start = end.checked_sub(length)?;
            if start < from {
                return None;
            }
            match next.checked_sub(1).map(|i| self.busy[i]) {
                Some((s, e)) if e > start => {
                    end = end.min(s);
                    next -= 1;
                }
                _ => return Some(start),
            }
        }
    }

    /// Whether any part of `from..until` is busy.
    #[must_use]
    pub fn busy(&self, from: u64, until: u64) -> bool {
        self.busy.get(self.busy.partition_point(|b| b.1 <= from)).is_some_and(|b| b.0 < until)
    }

    /// Makes `start..start + length`, which must be free, busy.
    pub fn take(&mut self, start: u64, length: u64) {
        let (at, end) = (self.busy.partition_point(|b| b.0 < start), start + length);
        // Adjacent intervals become one, so that a busy link is a short list.
        let before = at.checked_sub(1).filter(|&b| self.busy[b].1 == start);
        let after = self.busy.get(at).filter(|b| b.0 == end).map(|b| b.1);
        match (before, after) {
            (Some(before), Some(until)) => {
                self.busy[before].1 = until;
                self.busy.remove(at);
            }
            (Some(before), None) => self.busy[before].1 = end,
            (None, Some(_)) => self.busy[at].0 = start,
            (None, None) => self.busy.insert(at, (start, end)),
        }
    }
}

impl Timetable {
    /// Makes `start..start + length` busy, of which parts may be busy already.
    pub fn cover(&mut self, start: u64, length: u64) {
        let (mut from, mut until) = (start, start.saturating_add(length));
        let first = self.busy.partition_point(|b| b.1 < from);
        let after = self.busy.partition_point(|b| b.0 <= until);
        if first < after {
            from = from.min(self.busy[first].0);
            until = until.max(self.busy[after - 1].1);
        }
        self.busy.splice(first..after, [(from, until)]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn finds_the_ends_of_gaps() {
        let mut lane = Timetable::default();
        lane.take(10, 10);
        lane.take(30, 10);
        assert_eq!(lane.earliest(0, 100, 10), Some(0));
        assert_eq!(lane.earliest(1, 100, 10), Some(20));
        assert_eq!(lane.earliest(5, 100, 11), Some(40));
        assert_eq!(lane.latest(0, 100, 10), Some(90));
        assert_eq!(lane.latest(0, 45, 10), Some(20));
        assert_eq!(lane.latest(0, 29, 10), Some(0));
        assert_eq!(lane.latest(5, 29, 10), None);
        assert_eq!(lane.earliest(0, 9, 10), None);
        assert_eq!(
            [(0, 10), (0, 11), (20, 30), (39, 50), (40, 50)].map(|(a, b)| lane.busy(a, b)),
            [false, true, false, true, false]
        );
    }

    proptest! {
        #[test]
        fn covers_what_is_busy_already(
            taken in proptest::collection::vec((0u64..60, 1u64..20), 0..12),
        ) {
            let mut lane = Timetable::default();
            for &(start, length) in &taken {
                lane.cover(start, length);
            }
            for at in 0..90 {
                let busy = taken.iter().any(|&(s, l)| s <= at && at < s + l);
                prop_assert_eq!(lane.busy(at, at + 1), busy);
            }
            prop_assert!(lane.busy.windows(2).all(|pair| pair[0].1 < pair[1].0));
        }

        #[test]
        fn agrees_with_trying_every_start(
            taken in proptest::collection::vec((0u64..60, 1u64..8), 0..8),
            from in 0u64..60,
            width in 0u64..60,
            length in 1u64..10,
        ) {
            let mut lane = Timetable::default();
            for (start, len) in taken {
                if lane.earliest(start, start + len, len) == Some(start) {
                    lane.take(start, len);
                }
            }
            let until = from + width;
            let free = |s: u64| lane.busy.iter().all(|&(a, b)| s + length <= a || s >= b);
            let fits: Vec<u64> =
                (from..=until).filter(|&s| s + length <= until && free(s)).collect();
            prop_assert_eq!(lane.earliest(from, until, length), fits.first().copied());
            prop_assert_eq!(lane.latest(from, until, length), fits.last().copied());
        }
    }
}
