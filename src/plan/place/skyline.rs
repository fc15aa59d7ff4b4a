//! Skyline: of the unplaced items, the one that can be placed lowest comes next; ties go by a rank.
//!
//! This is one dive of the exact search without its bounds. If lives nest, as in a training
//! iteration, it often reaches the load at once. No item is ever placed below an item placed
//! before, so the height from which on space is free only rises, clique by clique. At each height,
//! the cliques that are free there form *runs*, and the first item by rank that fits within a run
//! comes next. A placement splits its run, and the item's end frees the cliques again. Cost: O(n)
//! queries for the first rank within a run, each answered by a tree over the ends of lives
//! ([`super::within_run`]).

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use super::cliques::Cliques;
use super::within_run::WithinRun;
use super::{Item, Layout};

/// The number of orders.
pub(super) const ORDERS: usize = 4;

/// Orders of items by falling load during an item's life, by life, by size, and by products of
/// these.
pub(super) struct Orders {
    which: Vec<u32>,
    /// For each item: the load during its life, its life, its size.
    of: Vec<[u128; 3]>,
}

impl Orders {
    /// The orders of these items.
    pub fn new(items: &[Item], cliques: &Cliques, which: &[u32]) -> Self {
        let most = most_alive(items, cliques, which);
        let of = which.iter().zip(most).map(|(&i, most)| {
            let item = &items[i as usize];
            let width = item.spans.iter().map(|s| u64::from(s.1 - s.0)).sum::<u64>();
            [most, width, item.bytes].map(u128::from)
        });
        Self { which: which.to_vec(), of: of.collect() }
    }

    /// The order with this number, below [`ORDERS`].
    pub fn order(&self, number: usize) -> Vec<u32> {
        let key = |&[total, width, size]: &[u128; 3]| match number {
            0 => [total, width, size],
            1 => [total, width * size, width],
            2 => [width, width * size, total],
            _ => [width * size, total, size],
        };
        let mut by: Vec<([u128; 3], u32)> =
            self.of.iter().map(key).zip(self.which.iter().copied()).collect();
        by.sort_unstable_by_key(|&(key, i)| (Reverse(key), i));
        by.into_iter().map(|(_, i)| i).collect()
    }
}

/// For each of `which`, the largest load during its life.
fn most_alive(items: &[Item], cliques: &Cliques, which: &[u32]) -> Vec<u64> {
    let mut change = vec![0i64; cliques.count + 1];
    for &i in which {
        for &(from, until) in &cliques.ranges[i as usize] {
            // Sums of sizes stay below 2^62.
            change[from as usize] += items[i as usize].bytes.cast_signed();
            change[until as usize] -= items[i as usize].bytes.cast_signed();
        }
    }
    // A tree of maxima over the cliques.
    let leaves = cliques.count.max(1);
    let mut highest = vec![0u64; 2 * leaves];
    let mut level = 0i64;
    for (leaf, by) in highest[leaves..].iter_mut().zip(change) {
        level += by;
        *leaf = level.cast_unsigned();
    }
    for node in (1..leaves).rev() {
        highest[node] = highest[2 * node].max(highest[2 * node + 1]);
    }
    let most = |&(from, until): &(u32, u32)| {
        let (mut low, mut high) = (from as usize + leaves, until as usize + leaves);
        let mut most = 0;
        while low < high {
            if low % 2 == 1 {
                most = most.max(highest[low]);
                low += 1;
            }
            if high % 2 == 1 {
                high -= 1;
                most = most.max(highest[high]);
            }
            low /= 2;
            high /= 2;
        }
        most
    };
    which.iter().map(|&i| cliques.ranges[i as usize].iter().map(most).max().unwrap_or(0)).collect()
}

/// Places all items, none below `bottom`. Stops when one would end above `limit`.
pub(super) fn skyline(
    items: &[Item],
    cliques: &Cliques,
    order: &[u32],
    bottom: &Layout,
    limit: u64,
) -> Option<Layout> {
    let count = u32::try_from(cliques.count).unwrap_or(u32::MAX);
    let mut layout = bottom.clone();
    let mut left = order.len();
    for &i in order.iter().filter(|&&i| cliques.ranges[i as usize].is_empty()) {
        // This item is never alive.
        layout.offsets[i as usize] = 0;
        left -= 1;
    }
    if left == 0 {
        return Some(layout);
    }
    let mut field = Field::new(cliques, order, count);
    // The heights at which cliques become free again.
    let mut ends: BinaryHeap<Reverse<(u64, (u32, u32))>> = BinaryHeap::new();
    let mut height = bottom.height;
    field.free((0, count));
    field.ask();
    loop {
        while let Some(rank) = field.take(cliques, order) {
            let index = order[rank as usize] as usize;
            let offset = height.next_multiple_of(items[index].align);
            let end = offset + items[index].bytes;
            if end > limit {
                return None;
            }
            layout.offsets[index] = offset;
            layout.height = layout.height.max(end);
            ends.extend(cliques.ranges[index].iter().map(|&range| Reverse((end, range))));
            left -= 1;
            field.ask();
        }
        // No item waits for cliques that never become free.
        let Some(&Reverse((next, _))) = ends.peek().filter(|_| left > 0) else {
            return Some(layout);
        };
        height = next;
        while let Some(&Reverse((_, range))) = ends.peek().filter(|e| e.0.0 == height) {
            ends.pop();
            field.free(range);
        }
        field.ask();
    }
}

/// The free cliques at a height, and the items that may come next there.
struct Field {
    count: u32,
    /// Disjoint runs of free cliques: the end of each by its start.
    runs: BTreeMap<u32, u32>,
    /// Starts of runs for which no item was chosen yet.
    new: Vec<u32>,
    /// Items with one range, and items with two ranges that together go round the end.
    within: WithinRun,
    around: WithinRun,
    /// Other items with several ranges. Each waits at a clique that is not free: clique and rank.
    waiting: BTreeSet<(u32, u32)>,
    /// Ranks that may come next; some of them turn out not to fit.
    next: BinaryHeap<Reverse<u32>>,
    /// Whether each item is placed, by rank.
    placed: Vec<bool>,
}

/// The range that goes round the end, if these ranges form one.
fn goes_round(ranges: &[(u32, u32)], count: u32) -> Option<(u32, u32)> {
    match *ranges {
        [(0, until), (from, end)] if end == count => Some((from, until)),
        _ => None,
    }
}

impl Field {
    fn new(cliques: &Cliques, order: &[u32], count: u32) -> Self {
        let (mut within, mut around, mut waiting) = (Vec::new(), Vec::new(), BTreeSet::new());
        for (rank, &i) in (0u32..).zip(order) {
            let ranges = &cliques.ranges[i as usize];
            match (goes_round(ranges, count), &ranges[..]) {
                (_, []) => {}
                (_, &[range]) => within.push((range, rank)),
                (Some(range), _) => around.push((range, rank)),
                (None, &[first, ..]) => {
                    waiting.insert((first.0, rank));
                }
            }
        }
        Self {
            count,
            runs: BTreeMap::new(),
            new: Vec::new(),
            within: WithinRun::new(within, order.len()),
            around: WithinRun::new(around, order.len()),
            waiting,
            next: BinaryHeap::new(),
            placed: vec![false; order.len()],
        }
    }

    /// Frees a range that was taken.
    fn free(&mut self, (mut from, mut until): (u32, u32)) {
        while let Some(&(clique, rank)) = self.waiting.range((from, 0)..(until, 0)).next() {
            self.waiting.remove(&(clique, rank));
            self.next.push(Reverse(rank));
        }
        if let Some((&start, &end)) = self.runs.range(..from).next_back()
            && end == from
        {
            from = start;
        }
        if let Some(end) = self.runs.remove(&until) {
            until = end;
        }
        self.runs.insert(from, until);
        self.new.push(from);
    }

    /// Proposes the first rank within each new run, and the first rank that goes round the end if
    /// its run changed.
    fn ask(&mut self) {
        let mut ends = false;
        while let Some(start) = self.new.pop() {
            // The run may have become part of another one since.
            let Some(&end) = self.runs.get(&start) else { continue };
            ends |= start == 0 || end == self.count;
            self.next.extend(self.within.first(start, end).map(Reverse));
        }
        if ends
            && let (Some(&until), Some((&from, &end))) =
                (self.runs.get(&0), self.runs.last_key_value())
            && end == self.count
        {
            self.next.extend(self.around.first(from, until).map(Reverse));
        }
    }

    /// The end of the run that contains a clique; the clique itself if it is not free.
    fn free_until(&self, clique: u32) -> u32 {
        self.runs.range(..=clique).next_back().map_or(clique, |(_, &end)| end.max(clique))
    }

    /// The next rank whose ranges are free. Takes these ranges.
    fn take(&mut self, cliques: &Cliques, order: &[u32]) -> Option<u32> {
        while let Some(Reverse(rank)) = self.next.pop() {
            if self.placed[rank as usize] {
                continue;
            }
            let ranges = &cliques.ranges[order[rank as usize] as usize];
            let taken = ranges
                .iter()
                .map(|&(from, until)| (self.free_until(from), until))
                .find(|&(free, until)| free < until);
            if let Some((clique, _)) = taken {
                // An item within a run is proposed again when a run contains it.
                if ranges.len() > 1 && goes_round(ranges, self.count).is_none() {
                    self.waiting.insert((clique, rank));
                }
                continue;
            }
            self.placed[rank as usize] = true;
            self.within.remove(rank);
            self.around.remove(rank);
            for &range in ranges {
                self.split(range);
            }
            return Some(rank);
        }
        None
    }

    /// Takes a range out of the run that contains it.
    fn split(&mut self, (from, until): (u32, u32)) {
        let Some((&start, &end)) = self.runs.range(..=from).next_back() else { return };
        self.runs.remove(&start);
        for (start, end) in [(start, from), (until, end)] {
            if start < end {
                self.runs.insert(start, end);
                self.new.push(start);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The same result by examining every item every time.
    fn slowly(items: &[Item], order: &[u32]) -> Layout {
        let mut layout = Layout { offsets: vec![0; items.len()], height: 7 };
        let mut floors = vec![7u64; 64];
        let mut left: Vec<u32> = order.to_vec();
        while !left.is_empty() {
            let slots =
                |i: u32| items[i as usize].spans.iter().flat_map(|&(a, b)| a as usize..b as usize);
            let lowest = (0..left.len())
                .min_by_key(|&at| (slots(left[at]).map(|s| floors[s]).max().unwrap_or(0), at))
                .unwrap();
            let i = left.remove(lowest);
            let item = &items[i as usize];
            let Some(floor) = slots(i).map(|s| floors[s]).max() else { continue };
            let offset = floor.next_multiple_of(item.align);
            slots(i).for_each(|s| floors[s] = offset + item.bytes);
            layout.offsets[i as usize] = offset;
            layout.height = layout.height.max(offset + item.bytes);
        }
        layout
    }

    fn spans() -> impl Strategy<Value = Vec<(u32, u32)>> {
        let one = (0u32..30, 0u32..20).prop_map(|(from, width)| vec![(from, from + width)]);
        let round =
            (0u32..20, 1u32..20).prop_map(|(until, gap)| vec![(0, until), (until + gap, 50)]);
        let any = proptest::collection::vec((1u32..5, 1u32..9), 1..4).prop_map(|gaps| {
            let mut at = 0;
            let next = |(gap, width): (u32, u32)| {
                let from = at + gap;
                at = from + width;
                (from, at)
            };
            gaps.into_iter().map(next).collect()
        });
        prop_oneof![4 => one, 2 => round, 1 => any]
    }

    proptest! {
        #[test]
        fn agrees_with_looking_at_all(
            raw in proptest::collection::vec((1u64..6, spans(), 0u32..3), 0..40),
            turn in 0usize..40,
        ) {
            let items: Vec<Item> = raw
                .into_iter()
                .map(|(bytes, spans, align)| Item { align: 1 << align, ..Item::new(bytes, spans) })
                .collect();
            let cliques = Cliques::new(&items);
            let mut order: Vec<u32> = (0..items.len() as u32).collect();
            order.rotate_left(turn % items.len().max(1));
            let floor = Layout { offsets: vec![7; items.len()], height: 7 };
            let found = skyline(&items, &cliques, &order, &floor, u64::MAX).unwrap();
            let wanted = slowly(&items, &order);
            prop_assert_eq!(&found, &wanted);
            prop_assert_eq!(
                skyline(&items, &cliques, &order, &floor, wanted.height - 1).is_none(),
                wanted.height > 7
            );
        }
    }
}
