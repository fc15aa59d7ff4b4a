//! Lowest first: of the unplaced items, the one that can lie lowest comes next, ties by a rank.
//!
//! What one dive of the exact search does, without its bounds: where lives nest, as a training iteration's do, it often
//! reaches the load at once. Cost: O(n log n), and again for each time that an item moves from one clique to another. Not for: given offsets.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

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
///
/// An item waits at a clique of its own, and no lower than that is free: the clique whose turn it is by (free from, first
/// rank that waits there) holds the next item, unless that has another clique which is free from higher up only, to which it then moves. So
/// a placement under which thousands wait costs one look, not thousands.
pub(super) fn skyline(items: &[Item], cliques: &Cliques, order: &[u32], bottom: &Layout, limit: u64) -> Option<Layout> {
    let mut layout = bottom.clone();
    let mut floors = Floors::new(cliques.count, bottom.height);
    let mut queues: Vec<Queue> = Vec::new();
    queues.resize_with(cliques.count, Queue::default);
    let busiest = busiest(items, cliques, order);
    for (rank, &at) in (0u32..).zip(&busiest) {
        match at {
            Some(at) => queues[at as usize].waiting.push(Reverse(rank)),
            // Never alive.
            None => layout.offsets[order[rank as usize] as usize] = 0,
        }
    }
    let mut turns: BinaryHeap<Reverse<Turn>> = BinaryHeap::new();
    for (clique, queue) in (0u32..).zip(&mut queues) {
        queue.turn = queue.waiting.peek().map(|r| (bottom.height, r.0));
        turns.extend(queue.turn.map(|(floor, rank)| Reverse((floor, rank, clique))));
    }
    while let Some(&Reverse((from, rank, clique))) = turns.peek() {
        let queue = &mut queues[clique as usize];
        if queue.turn != Some((from, rank)) {
            turns.pop();
            continue;
        }
        let free = floors.highest((clique, clique + 1));
        if free > from {
            queue.turn = Some((free, rank));
            replace(&mut turns, (free, rank, clique));
            continue;
        }
        queue.waiting.pop();
        queue.turn = queue.waiting.peek().map(|r| (free, r.0));
        match queue.turn {
            Some((_, next)) => replace(&mut turns, (free, next, clique)),
            None => drop(turns.pop()),
        }
        let index = order[rank as usize] as usize;
        let (item, ranges) = (&items[index], &cliques.ranges[index]);
        let (mut floor, mut highest) = (free, None);
        for &range in ranges {
            let most = floors.highest(range);
            if most > floor {
                (floor, highest) = (most, Some(range));
            }
        }
        if let Some(at) = highest.and_then(|range| floors.first_at(range, floor)) {
            let queue = &mut queues[at as usize];
            queue.waiting.push(Reverse(rank));
            if queue.turn.is_none_or(|t| rank < t.1) {
                queue.turn = Some((floor, rank));
                turns.push(Reverse((floor, rank, at)));
            }
            continue;
        }
        let offset = floor.next_multiple_of(item.align);
        let end = offset + item.bytes;
        if end > limit {
            return None;
        }
        layout.offsets[index] = offset;
        layout.height = layout.height.max(end);
        ranges.iter().for_each(|&r| floors.raise(r, end));
    }
    Some(layout)
}

/// Puts another in the place of the first.
fn replace(turns: &mut BinaryHeap<Reverse<Turn>>, turn: Turn) {
    if let Some(mut first) = turns.peek_mut() {
        *first = Reverse(turn);
    }
}

/// From where a clique is free, as far as is known, the first rank that waits there, and which it is.
type Turn = (u64, u32, u32);

/// What waits at a clique.
#[derive(Default)]
struct Queue {
    /// Ranks.
    waiting: BinaryHeap<Reverse<u32>>,
    /// From where it is free, as far as is known, and the first rank: its entry among the turns, if anything waits.
    turn: Option<(u64, u32)>,
}

/// By rank, the clique of an item in which most is alive: there it has to wait longest.
fn busiest(items: &[Item], cliques: &Cliques, order: &[u32]) -> Vec<Option<u32>> {
    let mut change = vec![0i64; cliques.count + 1];
    for &i in order {
        for &(from, until) in &cliques.ranges[i as usize] {
            // Sums of sizes stay below 2^62.
            change[from as usize] += items[i as usize].bytes.cast_signed();
            change[until as usize] -= items[i as usize].bytes.cast_signed();
        }
    }
    let mut sums = Floors::new(cliques.count, 0);
    let mut sum = 0i64;
    for (clique, by) in (0u32..).zip(&change[..cliques.count]) {
        sum += by;
        sums.raise((clique, clique + 1), sum.cast_unsigned());
    }
    let most = |&i: &u32| {
        let most = cliques.ranges[i as usize].iter().map(|&r| (sums.highest(r), Reverse(r))).max();
        most.and_then(|(sum, Reverse(range))| sums.first_at(range, sum))
    };
    order.iter().map(most).collect()
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
    fn highest(&self, (from, until): (u32, u32)) -> u64 {
        let (mut low, mut high) = (from as usize + self.leaves, until as usize + self.leaves);
        let (mut first, mut last) = (low / 2, (high - 1) / 2);
        let mut most = 0;
        while low < high {
            if low % 2 == 1 {
                most = most.max(self.highest[low]);
                low += 1;
            }
            if high % 2 == 1 {
                high -= 1;
                most = most.max(self.highest[high]);
            }
            low /= 2;
            high /= 2;
        }
        while first > 0 {
            most = most.max(self.whole[first]).max(self.whole[last]);
            first /= 2;
            last /= 2;
        }
        most
    }

    /// The first of a range that has at least this height.
    fn first_at(&self, range: (u32, u32), height: u64) -> Option<u32> {
        let range = (range.0 as usize, range.1 as usize);
        u32::try_from(self.first_below(1, (0, self.leaves), range, height)?).ok()
    }

    fn first_below(&self, node: usize, span: (usize, usize), range: (usize, usize), height: u64) -> Option<usize> {
        if span.0 >= range.1 || span.1 <= range.0 || self.highest[node] < height {
            return None;
        }
        if self.whole[node] >= height || node >= self.leaves {
            return Some(span.0.max(range.0));
        }
        let middle = usize::midpoint(span.0, span.1);
        let left = self.first_below(2 * node, (span.0, middle), range, height);
        left.or_else(|| self.first_below(2 * node + 1, (middle, span.1), range, height))
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
