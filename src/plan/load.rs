//! Bytes in each slot. Ranges are added and the largest sum is found in logarithmic time.

/// A segment tree over slots: range add, range maximum, first slot of the maximum.
#[derive(Clone, Debug)]
pub struct Load {
    slots: usize,
    leaves: usize,
    /// The largest sum below each node. It includes additions pending at the node but not those
    /// above it, so it may be negative for a while.
    most: Vec<i64>,
    /// Bytes added to all slots of a node.
    add: Vec<i64>,
}

impl Load {
    /// A tree over the bytes of each slot. Sums must stay below 2^62.
    #[must_use]
    pub fn new(bytes: &[u64]) -> Self {
        let leaves = bytes.len().next_power_of_two().max(1);
        let mut most = vec![0; 2 * leaves];
        for (leaf, &bytes) in most[leaves..].iter_mut().zip(bytes) {
            *leaf = bytes.cast_signed();
        }
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
        self.change(from, until, bytes.cast_signed());
    }

    /// Subtracts from every slot of `from..until`, which must hold at least that much.
    pub fn subtract(&mut self, from: usize, until: usize, bytes: u64) {
        self.change(from, until, bytes.cast_signed().wrapping_neg());
    }

    fn change(&mut self, from: usize, until: usize, by: i64) {
        if from >= until {
            return;
        }
        let (mut low, mut high) = (from + self.leaves, until + self.leaves);
        let (mut first, mut last) = (low, high - 1);
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
        while first != last {
            (first, last) = (first / 2, last / 2);
            self.anew(first);
            if last != first {
                self.anew(last);
            }
        }
        // Above all that was added to, a node that stays as it was ends the change.
        while first > 1 {
            first /= 2;
            if !self.anew(first) {
                return;
            }
        }
    }

    /// Whether the node has another sum than before.
    fn anew(&mut self, node: usize) -> bool {
        let most = self.most[2 * node].max(self.most[2 * node + 1]).wrapping_add(self.add[node]);
        std::mem::replace(&mut self.most[node], most) != most
    }

    fn whole(&mut self, node: usize, by: i64) {
        self.most[node] = self.most[node].wrapping_add(by);
        self.add[node] = self.add[node].wrapping_add(by);
    }

    /// Bytes pending in the nodes above a node.
    fn above(&self, mut node: usize) -> i64 {
        let mut bytes: i64 = 0;
        while node > 1 {
            node /= 2;
            bytes = bytes.wrapping_add(self.add[node]);
        }
        bytes
    }

    /// The bytes of one slot.
    #[must_use]
    pub fn at(&self, slot: usize) -> u64 {
        let node = slot + self.leaves;
        self.most[node].wrapping_add(self.above(node)).cast_unsigned()
    }

    /// The first slot with the most bytes, and its bytes.
    #[must_use]
    pub fn peak(&self) -> (usize, u64) {
        let mut node = 1;
        while node < self.leaves {
            node *= 2;
            if self.most[node] < self.most[node + 1] {
                node += 1;
            }
        }
        (node - self.leaves, self.most[1].cast_unsigned())
    }

    /// The most bytes in a slot of `from..until`; zero if the range is empty.
    #[must_use]
    pub fn most(&self, from: usize, until: usize) -> u64 {
        if from >= until {
            return 0;
        }
        let (mut first, mut last) = (from + self.leaves, until - 1 + self.leaves);
        let (mut low, mut high) = (self.most[first], self.most[last]);
        while first / 2 != last / 2 {
            if first & 1 == 0 {
                low = low.max(self.most[first + 1]);
            }
            if last & 1 == 1 {
                high = high.max(self.most[last - 1]);
            }
            (first, last) = (first / 2, last / 2);
            low = low.wrapping_add(self.add[first]);
            high = high.wrapping_add(self.add[last]);
        }
        low.max(high).wrapping_add(self.above(first)).cast_unsigned()
    }

    /// The first slot of `from..until` with more than `limit`.
    #[must_use]
    pub fn first_over(&self, from: usize, until: usize, limit: u64) -> Option<usize> {
        if from >= until {
            None
        } else {
            self.over(1, (0, self.leaves), (from, until), i64::try_from(limit).ok()?, false)
        }
    }

    /// The last slot of `from..until` with more than `limit`.
    #[must_use]
    pub fn last_over(&self, from: usize, until: usize, limit: u64) -> Option<usize> {
        if from >= until {
            None
        } else {
            self.over(1, (0, self.leaves), (from, until), i64::try_from(limit).ok()?, true)
        }
    }

    /// `limit` is relative to the bytes pending above the node.
    fn over(
        &self,
        node: usize,
        span: (usize, usize),
        range: (usize, usize),
        limit: i64,
        last: bool,
    ) -> Option<usize> {
        if span.0 >= range.1 || span.1 <= range.0 || self.most[node] <= limit {
            return None;
        }
        if node >= self.leaves {
            return Some(span.0);
        }
        let middle = usize::midpoint(span.0, span.1);
        let limit = limit.wrapping_sub(self.add[node]);
        let left = |this: &Self| this.over(2 * node, (span.0, middle), range, limit, last);
        let right = |this: &Self| this.over(2 * node + 1, (middle, span.1), range, limit, last);
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
            .map(|slot| {
                self.most[slot + self.leaves]
                    .wrapping_add(if self.leaves > 1 { above[(slot + self.leaves) / 2] } else { 0 })
                    .cast_unsigned()
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn agrees_with_a_list(
            changes in proptest::collection::vec((0usize..30, 0usize..30, 1u64..100), 1..40),
            slots in 1usize..30,
        ) {
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
                prop_assert_eq!(
                    load.most(from, until),
                    list[from..until.max(from)].iter().copied().max().unwrap_or(0)
                );
                prop_assert_eq!(load.at(slots - 1), list[slots - 1]);
                let over = |slot: &usize| (from..until).contains(slot) && list[*slot] > 150;
                prop_assert_eq!(load.first_over(from, until, 150), (0..slots).find(over));
                prop_assert_eq!(load.last_over(from, until, 150), (0..slots).rev().find(over));
            }
            // Subtract parts of it first, so that nodes are below the bytes pending above them.
            for &(from, until, bytes) in &undo {
                let middle = usize::midpoint(from, until);
                load.subtract(from, middle, bytes);
                for slot in &mut list[from..middle.max(from)] {
                    *slot -= bytes;
                }
                prop_assert_eq!(load.peak().1, *list.iter().max().unwrap());
                prop_assert_eq!(
                    load.most(from, until),
                    list[from..until.max(from)].iter().copied().max().unwrap_or(0)
                );
            }
            for (from, until, bytes) in undo {
                load.subtract(usize::midpoint(from, until).max(from), until, bytes);
            }
            prop_assert_eq!(load.peak(), (0, 0));
        }
    }
}
