//! Finds the first rank among lives that lie within a range of time, while lives are removed one by
//! one.
//!
//! A life is a point (start, end). A life is within a range if it starts no earlier and ends no
//! later. The points are halved by start and by end alternately. Every node has its bounding box
//! and its first rank. Cost of a query: O(√n) in the worst case, O(log n) if lives nest or are
//! short. Cost of a removal: O(log n).

use crate::units::id32;

/// The most points in a leaf.
const LEAF: usize = 4;

/// Stands for "no rank".
const NONE: u32 = u32::MAX;

/// Start, end and rank of a life. The rank is [`NONE`] once the life is removed.
type Life = ((u32, u32), u32);

#[derive(Clone, Copy)]
struct Node {
    /// Earliest and latest start; earliest and latest end.
    starts: (u32, u32),
    ends: (u32, u32),
    /// The first rank below the node, or [`NONE`].
    first: u32,
}

/// Lives by start and end.
pub(super) struct WithinRun {
    leaves: usize,
    nodes: Vec<Node>,
    lives: Vec<Life>,
    /// Where each leaf's lives begin, followed by the number of lives.
    begins: Vec<u32>,
    /// For each rank, its leaf and its position among the lives.
    places: Vec<(u32, u32)>,
}

impl WithinRun {
    /// A set of lives with distinct ranks below `ranks`.
    pub fn new(lives: Vec<Life>, ranks: usize) -> Self {
        let leaves = lives.len().div_ceil(LEAF).next_power_of_two();
        let empty = Node { starts: (u32::MAX, 0), ends: (u32::MAX, 0), first: NONE };
        let places = if lives.is_empty() { Vec::new() } else { vec![(NONE, NONE); ranks] };
        let mut tree = Self {
            leaves,
            nodes: vec![empty; 2 * leaves],
            begins: Vec::with_capacity(leaves + 1),
            lives,
            places,
        };
        let all = tree.lives.len();
        tree.build(1, 0, all, true);
        tree.begins.push(u32::try_from(all).unwrap_or(NONE));
        tree
    }

    fn build(&mut self, node: usize, from: usize, until: usize, by_start: bool) {
        if node >= self.leaves {
            self.begins.push(u32::try_from(from).unwrap_or(NONE));
            for at in from..until {
                let ((start, end), rank) = self.lives[at];
                let n = &mut self.nodes[node];
                n.starts = (n.starts.0.min(start), n.starts.1.max(start));
                n.ends = (n.ends.0.min(end), n.ends.1.max(end));
                n.first = n.first.min(rank);
                self.places[rank as usize] = (id32(node - self.leaves), id32(at));
            }
            return;
        }
        let middle = usize::midpoint(from, until);
        if middle < until {
            let key =
                |&((start, end), rank): &Life| if by_start { (start, rank) } else { (end, rank) };
            self.lives[from..until].select_nth_unstable_by_key(middle - from, key);
        }
        self.build(2 * node, from, middle, !by_start);
        self.build(2 * node + 1, middle, until, !by_start);
        let (a, b) = (self.nodes[2 * node], self.nodes[2 * node + 1]);
        let hull = |a: (u32, u32), b: (u32, u32)| (a.0.min(b.0), a.1.max(b.1));
        self.nodes[node] = Node {
            starts: hull(a.starts, b.starts),
            ends: hull(a.ends, b.ends),
            first: a.first.min(b.first),
        };
    }

    /// The first rank of a life that starts at or after `from` and ends at or before `until`.
    pub fn first(&self, from: u32, until: u32) -> Option<u32> {
        let mut best = NONE;
        self.below(1, from, until, &mut best);
        (best < NONE).then_some(best)
    }

    fn below(&self, node: usize, from: u32, until: u32, best: &mut u32) {
        let n = &self.nodes[node];
        if n.first >= *best || n.starts.1 < from || n.ends.0 > until {
            return;
        }
        if n.starts.0 >= from && n.ends.1 <= until {
            *best = n.first;
            return;
        }
        if node >= self.leaves {
            for &((start, end), rank) in self.leaf(node - self.leaves) {
                if start >= from && end <= until {
                    *best = rank.min(*best);
                }
            }
            return;
        }
        let swap = usize::from(self.nodes[2 * node + 1].first < self.nodes[2 * node].first);
        self.below(2 * node + swap, from, until, best);
        self.below(2 * node + 1 - swap, from, until, best);
    }

    fn leaf(&self, leaf: usize) -> &[Life] {
        &self.lives[self.begins[leaf] as usize..self.begins[leaf + 1] as usize]
    }

    /// Removes a life, if it is in the set.
    pub fn remove(&mut self, rank: u32) {
        let Some(&(leaf, at)) = self.places.get(rank as usize).filter(|p| p.0 != NONE) else {
            return;
        };
        self.lives[at as usize].1 = NONE;
        let mut first = self.leaf(leaf as usize).iter().map(|l| l.1).min().unwrap_or(NONE);
        let mut node = leaf as usize + self.leaves;
        while self.nodes[node].first != first {
            self.nodes[node].first = first;
            if node == 1 {
                break;
            }
            first = first.min(self.nodes[node ^ 1].first);
            node /= 2;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn agrees_with_looking_at_all(
            lives in proptest::collection::vec((0u32..40, 1u32..20), 0..60),
            asked in proptest::collection::vec((0u32..50, 0u32..50), 0..20),
            gone in proptest::collection::vec(0u32..60, 0..60),
        ) {
            let mut left: Vec<Life> = lives
                .iter()
                .zip(0u32..)
                .map(|(&(start, width), rank)| ((start, start + width), rank))
                .collect();
            let mut tree = WithinRun::new(left.clone(), left.len());
            for rank in [None].into_iter().chain(gone.into_iter().map(Some)) {
                if let Some(rank) = rank {
                    tree.remove(rank);
                    left.retain(|l| l.1 != rank);
                }
                for &(from, until) in &asked {
                    let first =
                        left.iter().filter(|l| l.0.0 >= from && l.0.1 <= until).map(|l| l.1).min();
                    prop_assert_eq!(tree.first(from, until), first);
                }
            }
        }
    }
}
