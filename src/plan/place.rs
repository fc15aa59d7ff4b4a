//! Addresses: every residency gets an offset in one arena, so that planned bytes are real bytes.
//!
//! A program's residencies become items with spans of positions in program order (position 2s+1 is
//! step s, 2s+2 the moment after it); items whose spans overlap must not share bytes. First fit over a
//! few orders, the largest first; an item that ends up too high moves to the front and all are placed
//! again. The spans hold at any timing, so no order of copies can deadlock on them.
//! Cost: O(items² ) a pass in the worst case, far less where spans are short.
//! Not for: exact optima, pinned slabs of several jobs.

use std::collections::BTreeMap;

use super::emit::Emitted;
use crate::schedule::{Place, Placement};
use crate::sim::program::{Begin, Program};
use crate::units::{BLOCK, Bytes};

/// Something to place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// Its size.
    pub bytes: u64,
    /// When it holds bytes: half-open ranges of positions, ascending. Two for a tensor that leaves and
    /// comes back to stay round the end.
    pub spans: Vec<(u32, u32)>,
}

/// An arena layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// By item.
    pub offsets: Vec<u64>,
    /// The highest end.
    pub height: u64,
}

/// How often a layout that is too high is tried again in another order.
const TRIES: usize = 24;

/// Places items, aiming for `capacity`; the lowest layout found, which may be higher.
#[must_use]
pub fn place(items: &[Item], capacity: u64) -> Layout {
    let mut order: Vec<usize> = (0..items.len()).collect();
    let length = |i: usize| -> u64 { items[i].spans.iter().map(|s| u64::from(s.1 - s.0)).sum() };
    order.sort_by_key(|&i| (std::cmp::Reverse(items[i].bytes), std::cmp::Reverse(length(i)), i));
    let mut best = first_fit(items, &order);
    // Long lives first: parameters and states at the bottom, what comes and goes above them.
    let mut by_life = order.clone();
    by_life.sort_by_key(|&i| (std::cmp::Reverse(length(i)), std::cmp::Reverse(items[i].bytes), i));
    for first in [by_life, order] {
        let mut order = first;
        for _ in 0..TRIES {
            if best.height <= capacity {
                return best;
            }
            let layout = first_fit(items, &order);
            let Some(worst) = order.iter().position(|&i| layout.offsets[i] + items[i].bytes == layout.height) else { break };
            if layout.height < best.height {
                best = layout;
            }
            let item = order.remove(worst);
            order.insert(0, item);
            if worst == 0 {
                break;
            }
        }
    }
    best
}

/// The lowest free offset for each item in turn.
fn first_fit(items: &[Item], order: &[usize]) -> Layout {
    let mut offsets = vec![0; items.len()];
    let mut placed: Vec<usize> = Vec::with_capacity(items.len());
    let mut height = 0;
    let mut taken: Vec<(u64, u64)> = Vec::new();
    for &index in order {
        let item = &items[index];
        taken.clear();
        for &other in &placed {
            if overlap(&item.spans, &items[other].spans) {
                taken.push((offsets[other], offsets[other] + items[other].bytes));
            }
        }
        taken.sort_unstable();
        let mut offset = 0;
        for &(start, end) in &taken {
            if start >= offset + item.bytes {
                break;
            }
            offset = offset.max(end);
        }
        offsets[index] = offset;
        height = height.max(offset + item.bytes);
        placed.push(index);
    }
    Layout { offsets, height }
}

fn overlap(a: &[(u32, u32)], b: &[(u32, u32)]) -> bool {
    a.iter().any(|x| b.iter().any(|y| x.0 < y.1 && y.0 < x.1))
}

/// The largest sum of sizes at any position: no layout is lower.
#[must_use]
pub fn load(items: &[Item]) -> u64 {
    let mut changes: Vec<(u32, bool, u64)> = Vec::with_capacity(items.len() * 2);
    for item in items {
        for &(from, until) in &item.spans {
            changes.push((from, true, item.bytes));
            changes.push((until, false, item.bytes));
        }
    }
    changes.sort_unstable();
    let (mut level, mut most) = (0u64, 0);
    for (_, begins, bytes) in changes {
        level = if begins { level + bytes } else { level - bytes };
        most = most.max(level);
    }
    most
}

/// The items of a program, each with the residencies that share its offset.
#[must_use]
pub fn items(program: &Program, emitted: &Emitted) -> Vec<(Item, Vec<usize>)> {
    let end_of_iteration = 2 * u32::try_from(program.steps.len()).unwrap_or(u32::MAX / 2) + 1;
    let mut step_of_operator = BTreeMap::new();
    for (index, step) in program.steps.iter().enumerate() {
        if step.event.is_none() {
            step_of_operator.insert(step.operator, index);
        }
    }
    let position = |step: usize| 2 * u32::try_from(step).unwrap_or(u32::MAX / 2) + 1;
    let mut items: Vec<(Item, Vec<usize>)> = Vec::with_capacity(program.residencies.len());
    let mut starts: BTreeMap<u32, usize> = BTreeMap::new();
    for (index, r) in program.residencies.iter().enumerate() {
        let from = match r.begin {
            Begin::Iteration => 0,
            Begin::Step(s) => position(s),
            Begin::Copy(c) => program.copies[c].trigger.map_or(0, |s| position(s) + 1),
        };
        let mut until = r.last_step.map_or(from, position) + 1;
        if let Some(copy) = r.out {
            let copy = &program.copies[copy];
            let leaving = emitted.leaving_until.get(&copy.event).and_then(|op| step_of_operator.get(op)).map_or(0, |&s| position(s) + 1);
            until = until.max(leaving).max(copy.trigger.map_or(0, position) + 1);
        }
        if r.stays {
            until = end_of_iteration + 1;
        }
        let tied = r.tensor.filter(|_| r.stays).and_then(|t| starts.get(&t.0).copied());
        if let Some(first) = tied {
            items[first].0.spans.push((from, until));
            items[first].1.push(index);
        } else {
            if let (Some(t), Begin::Iteration) = (r.tensor, r.begin) {
                starts.insert(t.0, items.len());
            }
            items.push((Item { bytes: r.bytes.0, spans: vec![(from, until)] }, vec![index]));
        }
    }
    items
}

/// The placements of a layout in the order in which shared bytes pass from hand to hand.
#[must_use]
pub fn placements(program: &Program, items: &[(Item, Vec<usize>)], layout: &Layout) -> Vec<Placement> {
    let mut all: Vec<(u32, Place, u64)> = Vec::with_capacity(program.residencies.len());
    for ((item, residencies), &offset) in items.iter().zip(&layout.offsets) {
        // Of a tensor that leaves and comes back to stay, the return is what takes its turn in the list.
        if let (Some(&(from, _)), Some(&r)) = (item.spans.last(), residencies.last()) {
            all.push((from, program.residencies[r].place, offset));
        }
    }
    all.sort_unstable();
    all.into_iter().map(|(_, place, offset)| Placement { place, offset: Bytes(offset) }).collect()
}

const _: () = assert!(BLOCK == 512, "items are sized in blocks, so offsets are aligned without further care");

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn nothing_overlaps_and_load_is_a_bound(raw in proptest::collection::vec((1u64..50, 0u32..40, 1u32..20), 1..40)) {
            let items: Vec<Item> = raw.iter().map(|&(b, f, l)| Item { bytes: b * 512, spans: vec![(f, f + l)] }).collect();
            let layout = place(&items, 0);
            prop_assert!(layout.height >= load(&items));
            for i in 0..items.len() {
                prop_assert!(layout.offsets[i] + items[i].bytes <= layout.height);
                for j in 0..i {
                    if overlap(&items[i].spans, &items[j].spans) {
                        let (a, b) = (layout.offsets[i], layout.offsets[j]);
                        prop_assert!(a + items[i].bytes <= b || b + items[j].bytes <= a);
                    }
                }
            }
        }
    }
}
