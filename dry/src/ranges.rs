//! Stretches of addresses.

use std::collections::BTreeMap;

/// A set of addresses, as disjoint stretches: start to end.
#[derive(Default)]
pub struct Ranges(BTreeMap<u64, u64>);

impl Ranges {
    /// Whether a whole stretch is in the set.
    pub fn holds(&self, start: u64, end: u64) -> bool {
        let mut at = start;
        for (s, e) in self.parts(start, end) {
            if s > at {
                return false;
            }
            at = e;
        }
        at >= end
    }

    /// The parts of a stretch that are in the set, in order.
    pub fn parts(&self, start: u64, end: u64) -> Vec<(u64, u64)> {
        let parts = self.touching(start, end).into_iter();
        parts.map(|(s, e)| (s.max(start), e.min(end))).collect()
    }

    /// Adds a stretch.
    pub fn add(&mut self, mut start: u64, mut end: u64) {
        if start >= end {
            return;
        }
        for (s, e) in self.touching(start, end) {
            self.0.remove(&s);
            start = start.min(s);
            end = end.max(e);
        }
        self.0.insert(start, end);
    }

    /// Takes a stretch out, and no more than that; the parts that were in the set.
    pub fn remove(&mut self, start: u64, end: u64) -> Vec<(u64, u64)> {
        let touching = self.touching(start, end);
        for &(s, e) in &touching {
            self.0.remove(&s);
            if s < start {
                self.0.insert(s, start);
            }
            if e > end {
                self.0.insert(end, e);
            }
        }
        touching.into_iter().map(|(s, e)| (s.max(start), e.min(end))).collect()
    }

    fn touching(&self, start: u64, end: u64) -> Vec<(u64, u64)> {
        if start >= end {
            return Vec::new();
        }
        let before = self.0.range(..start).next_back().filter(|&(_, &e)| e > start);
        before.into_iter().chain(self.0.range(start..end)).map(|(&s, &e)| (s, e)).collect()
    }
}
