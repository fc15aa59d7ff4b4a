//! The cliques of a problem: the largest sets of items that are all alive at the same time.
//!
//! In the order of time, every item belongs to a range of consecutive cliques for each of its
//! spans. Two items overlap in time exactly if they share a clique. So any statement about instants
//! is equivalent to one about cliques.

use std::ops::Range;

use super::Item;

/// The cliques, numbered in the order of time.
pub(super) struct Cliques {
    /// Number of cliques.
    pub count: usize,
    /// For each item the half-open ranges of cliques to which it belongs, ascending and disjoint.
    pub ranges: Vec<Vec<(u32, u32)>>,
    /// For each item the number of its cliques.
    pub width: Vec<u32>,
    /// For each item the range from its first to its last clique.
    reach: Vec<(u32, u32)>,
}

impl Cliques {
    /// The cliques of all items. Cost: that of sorting.
    pub fn new(items: &[Item]) -> Self {
        // Ends before beginnings: spans are half-open.
        let mut events: Vec<(u32, bool, usize)> = Vec::new();
        for (index, item) in items.iter().enumerate() {
            for &(from, until) in item.spans.iter().filter(|s| s.0 < s.1) {
                events.push((from, true, index));
                events.push((until, false, index));
            }
        }
        events.sort_unstable();
        let mut ranges: Vec<Vec<(u32, u32)>> = vec![Vec::new(); items.len()];
        // A clique is complete when an item ends after another one began.
        let (mut count, mut began) = (0u32, false);
        for (_, begins, index) in events {
            if begins {
                began = true;
                ranges[index].push((count, u32::MAX));
            } else {
                if std::mem::take(&mut began) {
                    count += 1;
                }
                if let Some(range) = ranges[index].last_mut() {
                    range.1 = count;
                }
            }
        }
        for range in &mut ranges {
            // Adjacent spans become one range.
            range.dedup_by(|b, a| {
                let meet = b.0 <= a.1;
                if meet {
                    a.1 = a.1.max(b.1);
                }
                meet
            });
        }
        let reach = |r: &Vec<(u32, u32)>| Some((r.first()?.0, r.last()?.1));
        let reach = ranges.iter().map(|r| reach(r).unwrap_or_default()).collect();
        let width = ranges.iter().map(|r| r.iter().map(|r| r.1 - r.0).sum()).collect();
        Self { count: count as usize, ranges, width, reach }
    }

    /// Calls `f` with each clique of an item.
    #[inline]
    pub fn each(&self, item: u32, mut f: impl FnMut(usize)) {
        for &(from, until) in &self.ranges[item as usize] {
            for c in from..until {
                f(c as usize);
            }
        }
    }

    /// Whether a range holds any clique between an item's first and last.
    #[inline]
    pub fn reaches(&self, item: u32, hull: (u32, u32)) -> bool {
        let (first, end) = self.reach[item as usize];
        first < hull.1 && hull.0 < end
    }

    /// The cliques of an item within a range, in pieces.
    #[inline]
    pub fn within(&self, item: u32, hull: (u32, u32)) -> impl Iterator<Item = Range<usize>> {
        let pieces = self.ranges[item as usize].iter();
        pieces
            .map(move |r| r.0.max(hull.0) as usize..r.1.min(hull.1) as usize)
            .filter(|r| r.start < r.end)
    }

    /// The least range that holds all cliques of these items; empty for none.
    pub fn hull(&self, items: impl Iterator<Item = u32>) -> (u32, u32) {
        let reach = items.map(|i| self.reach[i as usize]);
        let hull = reach.fold((u32::MAX, 0), |(a, b), r| (a.min(r.0), b.max(r.1)));
        if hull.0 < hull.1 { hull } else { (0, 0) }
    }

    /// The first clique of an item that has at least one.
    pub fn first(&self, item: u32) -> usize {
        self.ranges[item as usize].first().map_or(0, |r| r.0 as usize)
    }

    /// Whether two items are alive at the same time.
    #[inline]
    pub fn overlap(&self, a: u32, b: u32) -> bool {
        let (x, y) = (self.reach[a as usize], self.reach[b as usize]);
        if x.0 >= y.1 || y.0 >= x.1 {
            return false;
        }
        let (a, b) = (&self.ranges[a as usize], &self.ranges[b as usize]);
        a.iter().any(|x| b.iter().any(|y| x.0 < y.1 && y.0 < x.1))
    }

    /// The largest sum of sizes in a clique, below which no layout can be.
    pub fn load(&self, items: &[Item]) -> u64 {
        let mut sums = vec![0u64; self.count];
        for (index, item) in items.iter().enumerate() {
            self.each(u32::try_from(index).unwrap_or(u32::MAX), |c| sums[c] += item.bytes);
        }
        sums.into_iter().max().unwrap_or(0)
    }
}
