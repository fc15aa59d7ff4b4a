//! Lowest first: of the unplaced items, the one that can lie lowest comes next, ties by a rank.
//!
//! What one dive of the exact search does, without its bounds: where lives nest, as a training iteration's do, it often
//! reaches the load at once. Cost: n log n a few times over. Not for: given offsets.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::collections::binary_heap::PeekMut;

use super::cliques::Cliques;
use super::{Item, Layout};

/// Orders in which to prefer `which`, by what falls: the most alive with an item, its life, its size and products of these.
pub(super) fn orders(items: &[Item], cliques: &Cliques, which: &[u32]) -> [Vec<u32>; 4] {
    let mut sums = vec![0u64; cliques.count];
    for &i in which {
        cliques.each(i, |c| sums[c] += items[i as usize].bytes);
    }
    let total = |i: u32| {
        let mut most = 0;
        cliques.each(i, |c| most = most.max(sums[c]));
        u128::from(most)
    };
    let width = |i: u32| u128::from(items[i as usize].spans.iter().map(|s| u64::from(s.1 - s.0)).sum::<u64>());
    let size = |i: u32| u128::from(items[i as usize].bytes);
    let sorted = |key: &dyn Fn(u32) -> [u128; 3]| {
        let mut by = which.to_vec();
        by.sort_by_cached_key(|&i| (Reverse(key(i)), i));
        by
    };
    [
        sorted(&|i| [total(i), width(i), size(i)]),
        sorted(&|i| [total(i), width(i) * size(i), width(i)]),
        sorted(&|i| [width(i), width(i) * size(i), total(i)]),
        sorted(&|i| [width(i) * size(i), total(i), size(i)]),
    ]
}

/// Places all items, none below `bottom`; stops where it would rise above `limit`.
pub(super) fn skyline(items: &[Item], cliques: &Cliques, order: &[u32], bottom: &Layout, limit: u64) -> Option<Layout> {
    let mut layout = bottom.clone();
    let mut floors = Floors::new(cliques.count, bottom.height);
    let mut waiting: BinaryHeap<Reverse<(u64, u32)>> =
        (0..u32::try_from(order.len()).unwrap_or(u32::MAX)).map(|rank| Reverse((bottom.height, rank))).collect();
    while let Some(mut next) = waiting.peek_mut() {
        let Reverse((offset, rank)) = *next;
        let index = order[rank as usize];
        let item = &items[index as usize];
        let ranges = &cliques.ranges[index as usize];
        let floor = ranges.iter().map(|&r| floors.highest(r)).max().unwrap_or(bottom.height).next_multiple_of(item.align);
        let end = floor + item.bytes;
        if end > limit {
            return None;
        }
        if floor > offset {
            *next = Reverse((floor, rank));
            continue;
        }
        PeekMut::pop(next);
        layout.offsets[index as usize] = floor;
        layout.height = layout.height.max(end);
        ranges.iter().for_each(|&r| floors.raise(r, end));
    }
    Some(layout)
}

/// Where the free space begins, by clique: a tree of maxima, of which a range is raised or asked in logarithmic time.
struct Floors {
    leaves: usize,
    /// The highest below each node.
    highest: Vec<u64>,
    /// What everything below a node has been raised to.
    whole: Vec<u64>,
}

impl Floors {
    fn new(count: usize, floor: u64) -> Self {
        let leaves = count.next_power_of_two();
        Self { leaves, highest: vec![floor; 2 * leaves], whole: vec![floor; 2 * leaves] }
    }

    /// Raises a range of cliques to a height.
    fn raise(&mut self, range: (u32, u32), height: u64) {
        self.nodes(range, |floors, node| {
            floors.whole[node] = floors.whole[node].max(height);
            floors.highest[node] = floors.highest[node].max(height);
        });
        self.above(range, |floors, node| floors.highest[node] = floors.highest[node].max(height));
    }

    /// The highest in a range.
    fn highest(&mut self, range: (u32, u32)) -> u64 {
        let mut most = 0;
        self.nodes(range, |floors, node| most = most.max(floors.highest[node]));
        self.above(range, |floors, node| most = most.max(floors.whole[node]));
        most
    }

    /// Visits the nodes that make up a range.
    fn nodes(&mut self, (from, until): (u32, u32), mut f: impl FnMut(&mut Self, usize)) {
        let (mut from, mut until) = (from as usize + self.leaves, until as usize + self.leaves);
        while from < until {
            if from % 2 == 1 {
                f(self, from);
                from += 1;
            }
            if until % 2 == 1 {
                until -= 1;
                f(self, until);
            }
            from /= 2;
            until /= 2;
        }
    }

    /// Visits the nodes above the ends of a range.
    fn above(&mut self, (from, until): (u32, u32), mut f: impl FnMut(&mut Self, usize)) {
        let (mut from, mut last) = ((from as usize + self.leaves) / 2, (until as usize - 1 + self.leaves) / 2);
        while from > 0 {
            f(self, from);
            if from != last {
                f(self, last);
            }
            from /= 2;
            last /= 2;
        }
    }
}
