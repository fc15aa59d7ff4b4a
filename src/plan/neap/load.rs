//! Bytes by slot, with ranges added to and the largest found in logarithmic time.
//!
//! Not for: who holds the bytes ([`super::book`]).

/// A segment tree over slots: range add, range maximum, first slot of the maximum.
#[derive(Clone, Debug)]
pub struct Load {
    slots: usize,
    leaves: usize,
    /// Largest sum below each node, additions pending at it included, those above it not.
    most: Vec<u64>,
    /// What was added to a whole node; wraps, so that subtraction is addition.
    add: Vec<u64>,
}

impl Load {
    /// From the bytes of each slot.
    #[must_use]
    pub fn new(bytes: &[u64]) -> Self {
        let leaves = bytes.len().next_power_of_two().max(1);
        let mut most = vec![0; 2 * leaves];
        most[leaves..leaves + bytes.len()].copy_from_slice(bytes);
        for node in (1..leaves).rev() {
            most[node] = most[2 * node].max(most[2 * node + 1]);
        }
        Self { slots: bytes.len(), leaves, most, add: vec![0; 2 * leaves] }
    }

    /// The number of slots.
    #[must_use]
    pub const fn slots(&self) -> usize {
        self.slots
    }

    /// Adds to every slot of `from..until`.
    pub fn add(&mut self, from: usize, until: usize, bytes: u64) {
        self.change(from, until, bytes);
    }

    /// Takes from every slot of `from..until`, which hold at least as much.
    pub fn subtract(&mut self, from: usize, until: usize, bytes: u64) {
        self.change(from, until, bytes.wrapping_neg());
    }

    fn change(&mut self, from: usize, until: usize, by: u64) {
        if from >= until {
            return;
        }
        let (mut low, mut high) = (from + self.leaves, until + self.leaves);
        let (first, last) = (low, high - 1);
        while low < high {
            if low & 1 == 1 {
                self.whole(low, by);
                low += 1;
            }
            if high & 1 == 1 {
                high -= 1;
                self.whole(high, by);
            }
            low /= 2;
            high /= 2;
        }
        for mut node in [first, last] {
            while node > 1 {
                node /= 2;
                self.most[node] = self.most[2 * node].max(self.most[2 * node + 1]).wrapping_add(self.add[node]);
            }
        }
    }

    fn whole(&mut self, node: usize, by: u64) {
        self.most[node] = self.most[node].wrapping_add(by);
        self.add[node] = self.add[node].wrapping_add(by);
    }

    /// The bytes of one slot.
    #[must_use]
    pub fn at(&self, slot: usize) -> u64 {
        let mut node = slot + self.leaves;
        let mut bytes = self.most[node];
        while node > 1 {
            node /= 2;
            bytes = bytes.wrapping_add(self.add[node]);
        }
        bytes
    }

    /// The first slot with the most bytes, and these.
    #[must_use]
    pub fn peak(&self) -> (usize, u64) {
        let mut node = 1;
        while node < self.leaves {
            node *= 2;
            if self.most[node] < self.most[node + 1] {
                node += 1;
            }
        }
        (node - self.leaves, self.most[1])
    }

    /// The most bytes in `from..until`; zero where that is empty.
    #[must_use]
    pub fn most(&self, from: usize, until: usize) -> u64 {
        if from >= until {
            return 0;
        }
        self.most_below(1, 0, self.leaves, from, until)
    }

    fn most_below(&self, node: usize, start: usize, end: usize, from: usize, until: usize) -> u64 {
        if from <= start && end <= until {
            return self.most[node];
        }
        let middle = usize::midpoint(start, end);
        let mut best = 0;
        if from < middle {
            best = self.most_below(2 * node, start, middle, from, until);
        }
        if until > middle {
            best = best.max(self.most_below(2 * node + 1, middle, end, from, until));
        }
        best.wrapping_add(self.add[node])
    }

    /// The first slot of `from..until` with more than `limit`.
    #[must_use]
    pub fn first_over(&self, from: usize, until: usize, limit: u64) -> Option<usize> {
        if from >= until { None } else { self.over(1, (0, self.leaves), (from, until), limit, 0, false) }
    }

    /// The last slot of `from..until` with more than `limit`.
    #[must_use]
    pub fn last_over(&self, from: usize, until: usize, limit: u64) -> Option<usize> {
        if from >= until { None } else { self.over(1, (0, self.leaves), (from, until), limit, 0, true) }
    }

    fn over(&self, node: usize, span: (usize, usize), range: (usize, usize), limit: u64, above: u64, last: bool) -> Option<usize> {
        if span.0 >= range.1 || span.1 <= range.0 || self.most[node].wrapping_add(above) <= limit {
            return None;
        }
        if node >= self.leaves {
            return Some(span.0);
        }
        let middle = usize::midpoint(span.0, span.1);
        let above = above.wrapping_add(self.add[node]);
        let left = |this: &Self| this.over(2 * node, (span.0, middle), range, limit, above, last);
        let right = |this: &Self| this.over(2 * node + 1, (middle, span.1), range, limit, above, last);
        if last { right(self).or_else(|| left(self)) } else { left(self).or_else(|| right(self)) }
    }

    /// The bytes of every slot.
    #[must_use]
    pub fn all(&self) -> Vec<u64> {
        let mut above = self.add.clone();
        for node in 2..2 * self.leaves {
            above[node] = above[node].wrapping_add(above[node / 2]);
        }
        (0..self.slots)
            .map(|slot| self.most[slot + self.leaves].wrapping_add(if self.leaves > 1 { above[(slot + self.leaves) / 2] } else { 0 }))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn agrees_with_a_list(changes in proptest::collection::vec((0usize..30, 0usize..30, 1u64..100), 1..40), slots in 1usize..30) {
            let mut list = vec![0u64; slots];
            let mut load = Load::new(&list);
            let mut undo = Vec::new();
            for (a, b, bytes) in changes {
                let (from, until) = (a.min(slots), b.min(slots));
                load.add(from, until, bytes);
                for slot in &mut list[from..until.max(from)] {
                    *slot += bytes;
                }
                undo.push((from, until, bytes));
                prop_assert_eq!(&load.all(), &list);
                let most = *list.iter().max().unwrap();
                prop_assert_eq!(load.peak(), (list.iter().position(|&l| l == most).unwrap(), most));
                prop_assert_eq!(load.most(from, until), list[from..until.max(from)].iter().copied().max().unwrap_or(0));
                prop_assert_eq!(load.at(slots - 1), list[slots - 1]);
                let over = |slot: &usize| (from..until).contains(slot) && list[*slot] > 150;
                prop_assert_eq!(load.first_over(from, until, 150), (0..slots).find(over));
                prop_assert_eq!(load.last_over(from, until, 150), (0..slots).rev().find(over));
            }
            for (from, until, bytes) in undo {
                load.subtract(from, until, bytes);
            }
            prop_assert_eq!(load.peak(), (0, 0));
        }
    }
}
