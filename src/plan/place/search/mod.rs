//! Exact placement by branch and bound, after the published ideas of M. Moffitt, "MiniMalloc: A
//! Lightweight Memory Allocator for Hardware-Accelerated Machine Learning" (ASPLOS 2023, volume 4).
//!
//! A layout that fits can be pushed down until every item lies at 0 or on another item: a
//! *canonical* layout. In the order of rising offset (ties by a fixed rank), each item then lies at
//! its *offset so far*: the highest end of the items before it that overlap it in time. So the
//! search places one item after the other at its offset so far, never below the item before
//! ([`Technique::Monotone`]), and misses no layout that fits. An item that could have been placed
//! and was not is *passed*: another item must still come under it. At a node, each item has a lower
//! bound on its final offset. It is its offset so far, or, if it is passed, the lowest end of an
//! item that may come under it ([`Technique::Support`]). The *cliques*, the largest sets of items
//! alive at the same time, then show whether a node is hopeless ([`Technique::Sections`]).
//!
//! Effort is counted in steps, so that answers are the same on every machine. There is no
//! recursion, so only memory limits the depth. [`mod@super::least`] finds the least capacity.

mod bounds;

use rand_core::Rng as _;
use rand_pcg::Pcg64Mcg;

use super::cliques::Cliques;
use super::parts;
use super::skyline::{ORDERS, Orders};
use super::technique::On;
pub use super::technique::{Options, Technique};
use super::{Item, Layout};

/// The effort of a search.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spent {
    /// Number of nodes.
    pub nodes: u64,
    /// Cliques of the unplaced items, summed over the nodes.
    pub steps: u64,
}

impl std::ops::AddAssign for Spent {
    fn add_assign(&mut self, other: Self) {
        self.nodes += other.nodes;
        self.steps += other.steps;
    }
}

/// The result of a search.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// A layout within the capacity.
    Placed(Layout),
    /// There is none: every case was examined.
    Impossible,
    /// Neither was found within the effort.
    GaveUp,
}

/// The nodes of a try in the first round. Each round has a `GROWTH`th more.
const FIRST: u64 = 1024;
const GROWTH: u64 = 16;

/// The seed of the shuffling.
const SEED: u128 = 0x6e65_6170;

/// Searches for a layout within `capacity`. Returns the outcome and the effort. Given offsets must
/// not overlap.
#[must_use]
pub fn search(items: &[Item], capacity: u64, options: &Options) -> (Outcome, Spent) {
    let cliques = Cliques::new(items);
    let mut spent = Spent::default();
    let too_high =
        |i: &Item| i.fixed.unwrap_or(0).checked_add(i.bytes).is_none_or(|end| end > capacity);
    if items.iter().any(too_high) || cliques.load(items) > capacity {
        return (Outcome::Impossible, spent);
    }
    let mut search = Search::new(items, &cliques, capacity, options);
    let mut gave_up = false;
    for (from, until) in search.parts() {
        match search.part(from, until) {
            Some(true) => {}
            Some(false) => return (Outcome::Impossible, search.spent),
            // Another part could still prove that there is no layout, but the effort is spent.
            None => {
                gave_up = true;
                break;
            }
        }
    }
    spent = search.spent;
    if gave_up {
        return (Outcome::GaveUp, spent);
    }
    let offsets = search.offset;
    let height = offsets.iter().zip(items).map(|(o, i)| o + i.bytes).max().unwrap_or(0);
    (Outcome::Placed(Layout { offsets, height }), spent)
}

/// Offset and rank of the last placement. Later placements come after it. Ranks start at 1.
type Key = (u64, u32);

/// A node: a set of unplaced items, the choices among them, and the progress.
struct Frame {
    /// The items are `order[from..until]`.
    from: usize,
    until: usize,
    last: Key,
    /// The items that may be placed next, the best last.
    choices: Vec<u32>,
    /// The length of the trail before the current choice.
    mark: usize,
    /// The parts that the current choice leaves to be solved, as ranges of `order`, the first part
    /// last.
    rest: Vec<(usize, usize)>,
    /// The last placement, from which these parts start.
    next: Key,
    /// The item that the current choice places.
    placed: Option<u32>,
    /// The range of cliques that caused the failures below.
    blame: (u32, u32),
}

const NO_CLIQUES: (u32, u32) = (u32::MAX, 0);

fn join(a: (u32, u32), b: (u32, u32)) -> (u32, u32) {
    (a.0.min(b.0), a.1.max(b.1))
}

/// A change that can be undone.
enum Change {
    /// The item's offset so far was raised; this is the old value.
    Raised(u32, u64),
    /// The item's known bound was replaced; this is the old value.
    Bound(u32, u64),
    /// The item was placed.
    Placed(u32),
}

/// The lowest bound in a clique, and the second lowest, which may be the same; also the lowest end.
#[derive(Clone, Copy)]
struct Low {
    first: u64,
    second: u64,
    end: u64,
}

const NOTHING: Low = Low { first: u64::MAX, second: u64::MAX, end: u64::MAX };

struct Search<'a> {
    items: &'a [Item],
    /// Sizes of the items.
    bytes: Vec<u64>,
    cliques: &'a Cliques,
    capacity: u64,
    on: On,
    effort: u64,
    spent: Spent,
    /// The offset so far; the final offset once the item is placed.
    offset: Vec<u64>,
    /// The lower bound on the final offset at the current node.
    bound: Vec<u64>,
    /// The bounds at the node above, with which all cliques passed.
    known: Vec<u64>,
    rank: Vec<u32>,
    twin: Vec<Option<u32>>,
    unplaced: Vec<bool>,
    /// A permutation of the items; each node owns a range of it.
    order: Vec<u32>,
    /// How many unplaced items span the border before each clique.
    crossing: Vec<u32>,
    trail: Vec<Change>,
    /// How many times each clique caused a node to fail.
    weight: Vec<u64>,
    /// The range of cliques that caused the last failure.
    blame: (u32, u32),
    /// Whether alternatives may be skipped in this try, and whether any were.
    may_jump: bool,
    jumped: bool,
    // Scratch.
    sums: Vec<u64>,
    low: Vec<Low>,
    sorted: Vec<(u64, u32)>,
    /// The passed items of the current node.
    passed: Vec<u32>,
}

/// Moves every item at random by up to a fifth of the length.
fn shuffle(by: &mut [u32], random: &mut Pcg64Mcg) {
    let reach = by.len() as u64 * 100 / 5 + 1;
    let mut keyed: Vec<(u64, u32)> = by
        .iter()
        .enumerate()
        .map(|(at, &i)| (at as u64 * 100 + random.next_u64() % reach, i))
        .collect();
    keyed.sort_unstable();
    for (slot, (_, i)) in by.iter_mut().zip(keyed) {
        *slot = i;
    }
}

fn align(offset: u64, item: &Item) -> u64 {
    offset.next_multiple_of(item.align)
}

impl<'a> Search<'a> {
    fn new(items: &'a [Item], cliques: &'a Cliques, capacity: u64, options: &Options) -> Self {
        let on = On::new(options);
        let count = u32::try_from(items.len()).unwrap_or(u32::MAX);
        let mut crossing = vec![0; cliques.count + 1];
        for &(from, until) in cliques.ranges.iter().flatten() {
            for c in from + 1..until {
                crossing[c as usize] += 1;
            }
        }
        // Twins: items of the same size and life. For each item the twin before it.
        let mut alike: Vec<u32> = (0..count).collect();
        let key = |i: u32| {
            (items[i as usize].bytes, items[i as usize].align, &cliques.ranges[i as usize], i)
        };
        alike.sort_by_key(|&i| key(i));
        let mut twin = vec![None; items.len()];
        for pair in alike.windows(2) {
            let (a, b) = (key(pair[0]), key(pair[1]));
            let fixed = pair.iter().any(|&i| items[i as usize].fixed.is_some());
            if (a.0, a.1, a.2) == (b.0, b.1, b.2) && !fixed {
                twin[pair[1] as usize] = Some(pair[0]);
            }
        }
        Self {
            items,
            bytes: items.iter().map(|i| i.bytes).collect(),
            cliques,
            capacity,
            on,
            effort: options.effort,
            spent: Spent::default(),
            offset: items.iter().map(|i| i.fixed.unwrap_or(0)).collect(),
            bound: vec![0; items.len()],
            known: vec![u64::MAX; items.len()],
            rank: vec![0; items.len()],
            twin,
            unplaced: vec![true; items.len()],
            order: (0..count).filter(|&i| !cliques.ranges[i as usize].is_empty()).collect(),
            crossing,
            trail: Vec::new(),
            weight: vec![0; cliques.count],
            blame: NO_CLIQUES,
            may_jump: false,
            jumped: false,
            sums: vec![0; cliques.count],
            low: vec![NOTHING; cliques.count],
            sorted: Vec::new(),
            passed: Vec::new(),
        }
    }

    fn parts(&mut self) -> Vec<(usize, usize)> {
        let all = (0, self.order.len());
        if self.on.partition { self.split(all.0, all.1) } else { vec![all] }
    }

    /// Sorts `order[from..until]` so that unconnected parts are contiguous. Returns the parts,
    /// small ones first.
    fn split(&mut self, from: usize, until: usize) -> Vec<(usize, usize)> {
        let mut parts = parts::split(self.cliques, &mut self.order[from..until]);
        for part in &mut parts {
            *part = (part.0 + from, part.1 + from);
        }
        parts
    }

    /// Solves one part: `Some(solved)`, or `None` when the effort is spent.
    fn part(&mut self, from: usize, until: usize) -> Option<bool> {
        let orders = Orders::new(self.items, self.cliques, &self.order[from..until]);
        let ranks: Vec<Vec<u32>> = (0..if self.on.portfolio { ORDERS } else { 1 })
            .map(|number| orders.order(number))
            .collect();
        let mut random = Pcg64Mcg::new(SEED);
        let (mut limit, mut round) = (FIRST, 0);
        while self.spent.steps < self.effort {
            for rank in &ranks {
                let mut by = rank.clone();
                if round % 3 != 0 && self.on.weights {
                    self.heavy_first(&mut by);
                }
                if round > 0 && round % 3 == 0 && self.on.shuffle {
                    shuffle(&mut by, &mut random);
                }
                for (position, &i) in by.iter().enumerate() {
                    self.rank[i as usize] = u32::try_from(position + 1).unwrap_or(u32::MAX);
                }
                let limit = if self.on.restarts { limit } else { u64::MAX };
                self.may_jump = self.on.jump;
                self.jumped = false;
                let mut solved = self.run(from, until, limit);
                if solved == Some(false) && self.jumped {
                    self.may_jump = false;
                    solved = self.run(from, until, limit);
                }
                if solved.is_some() {
                    return solved;
                }
            }
            limit += limit / GROWTH;
            round += 1;
        }
        None
    }

    /// Moves items of cliques that failed often to the front, in a few coarse classes within which
    /// the rank decides.
    fn heavy_first(&self, by: &mut [u32]) {
        let weight = |i: u32| {
            let mut sum = 0u128;
            self.cliques.each(i, |c| sum += u128::from(self.weight[c]));
            sum
        };
        let mean = (by.iter().map(|&i| weight(i)).sum::<u128>() / by.len().max(1) as u128).max(1);
        by.sort_by_cached_key(|&i| std::cmp::Reverse((weight(i) * 2 / mean).min(64)));
    }

    /// Searches depth first from the root until the part is solved, refuted, or `limit` nodes were
    /// visited.
    fn run(&mut self, from: usize, until: usize, limit: u64) -> Option<bool> {
        let until_nodes = self.spent.nodes.saturating_add(limit);
        let base = self.trail.len();
        let mut frames: Vec<Frame> = Vec::new();
        let mut answer = self.enter(from, until, (0, 0), &mut frames);
        loop {
            let Some(frame) = frames.last_mut() else { return answer };
            match answer {
                // A part of the rest is solved: continue with the next one, or this node is solved
                // too.
                Some(true) => match frame.rest.pop() {
                    Some((a, b)) => {
                        let next = frame.next;
                        answer = self.enter(a, b, next, &mut frames);
                    }
                    None => {
                        frames.pop();
                    }
                },
                // A part failed: undo the choice.
                Some(false) => {
                    self.undo(frame.mark);
                    frame.rest.clear();
                    let blame = self.blame;
                    let concerned = |i: u32| {
                        self.cliques.ranges[i as usize]
                            .iter()
                            .any(|r| r.0 < blame.1 && blame.0 < r.1)
                    };
                    if self.may_jump
                        && frame.placed.is_some_and(|i| !concerned(i))
                        && !frame.choices.is_empty()
                    {
                        self.jumped = true;
                        frame.choices.clear();
                        frame.blame = blame;
                    } else {
                        frame.blame = join(frame.blame, blame);
                    }
                    answer = None;
                }
                None => {
                    if self.spent.nodes >= until_nodes || self.spent.steps >= self.effort {
                        self.undo(base);
                        return None;
                    }
                    let Some(choice) = frame.choices.pop() else {
                        self.blame = frame.blame;
                        frames.pop();
                        answer = Some(false);
                        continue;
                    };
                    let (a, b, last) = (frame.from, frame.until, frame.last);
                    frame.placed = Some(choice);
                    let Some(free) = self.place(choice, a, b) else {
                        self.blame = (0, u32::MAX);
                        answer = Some(false);
                        continue;
                    };
                    if free && self.on.free {
                        frame.choices.clear();
                        frame.next = last;
                    } else {
                        frame.next = (self.offset[choice as usize], self.rank[choice as usize]);
                    }
                    frame.rest = if self.on.decompose && self.parted(choice) {
                        let mut parts = self.split(a, b - 1);
                        parts.reverse();
                        parts
                    } else if a < b - 1 {
                        vec![(a, b - 1)]
                    } else {
                        Vec::new()
                    };
                    answer = Some(true);
                }
            }
        }
    }

    /// Opens a node. Returns the answer if it is known at once.
    fn enter(
        &mut self,
        from: usize,
        until: usize,
        last: Key,
        frames: &mut Vec<Frame>,
    ) -> Option<bool> {
        self.spent.nodes += 1;
        let least_end = match self.bounds(from, until, last) {
            Ok(least_end) => least_end,
            Err(clique) => {
                self.blame(from, until, clique);
                return Some(false);
            }
        };
        let mut choices: Vec<u32> = Vec::new();
        for &i in &self.order[from..until] {
            let offset = self.offset[i as usize];
            let live = !self.on.monotone || (offset, self.rank[i as usize]) > last;
            let dominated = self.on.dominance && offset >= least_end;
            let second =
                self.on.twins && self.twin[i as usize].is_some_and(|t| self.unplaced[t as usize]);
            if live && !dominated && !second {
                choices.push(i);
            }
        }
        if self.on.lowest {
            choices.sort_unstable_by_key(|&i| {
                std::cmp::Reverse((self.offset[i as usize], self.rank[i as usize]))
            });
        } else {
            choices.sort_unstable_by_key(|&i| std::cmp::Reverse(self.rank[i as usize]));
        }
        frames.push(Frame {
            from,
            until,
            last,
            choices,
            mark: self.trail.len(),
            rest: Vec::new(),
            next: last,
            placed: None,
            blame: NO_CLIQUES,
        });
        None
    }

    /// Blames the cliques of all unplaced items of a clique.
    fn blame(&mut self, from: usize, until: usize, clique: usize) {
        let mut blame = NO_CLIQUES;
        for &i in &self.order[from..until] {
            let ranges = &self.cliques.ranges[i as usize];
            if ranges.iter().any(|r| (r.0 as usize..r.1 as usize).contains(&clique)) {
                blame = ranges.iter().fold(blame, |all, &r| join(all, r));
            }
        }
        self.blame = blame;
    }

    /// Places an item of `order[from..until]` at its offset so far and moves it to the end of that
    /// range. Returns whether it raised no other item, or `None` if it overlaps a fixed item.
    fn place(&mut self, item: u32, from: usize, until: usize) -> Option<bool> {
        let at = (from..until).find(|&at| self.order[at] == item)?;
        self.order.swap(at, until - 1);
        self.unplaced[item as usize] = false;
        self.trail.push(Change::Placed(item));
        for &(low, high) in &self.cliques.ranges[item as usize] {
            for border in low + 1..high {
                self.crossing[border as usize] -= 1;
            }
        }
        let end = self.offset[item as usize] + self.items[item as usize].bytes;
        let mut free = true;
        for &other in &self.order[from..until - 1] {
            let before = self.offset[other as usize];
            if before < end && self.cliques.overlap(item, other) {
                if self.items[other as usize].fixed.is_some() {
                    // An item may also come below a fixed item if it ends low enough. The fixed
                    // item's offset never rises.
                    if end > before {
                        return None;
                    }
                    continue;
                }
                self.trail.push(Change::Raised(other, before));
                self.offset[other as usize] = align(end, &self.items[other as usize]);
                free = false;
            }
        }
        Some(free)
    }

    /// Whether placing this item may have split the others into unconnected parts.
    fn parted(&self, item: u32) -> bool {
        let ranges = &self.cliques.ranges[item as usize];
        ranges.len() > 1
            || ranges.iter().any(|&(low, high)| {
                (low + 1..high).any(|border| self.crossing[border as usize] == 0)
            })
    }

    fn undo(&mut self, mark: usize) {
        while self.trail.len() > mark {
            match self.trail.pop() {
                Some(Change::Raised(item, before)) => self.offset[item as usize] = before,
                Some(Change::Bound(item, before)) => self.known[item as usize] = before,
                Some(Change::Placed(item)) => {
                    self.unplaced[item as usize] = true;
                    for &(low, high) in &self.cliques.ranges[item as usize] {
                        for border in low + 1..high {
                            self.crossing[border as usize] += 1;
                        }
                    }
                }
                None => return,
            }
        }
    }
}
