//! Addresses: every residency gets an offset in one arena, so that planned bytes are real bytes.
//!
//! A program's residencies become items with spans of positions in program order (position 2s+1 is
//! step s, 2s+2 the moment after it); items whose spans overlap must not share bytes. What is always there goes
//! to the bottom; the rest first fit over a few orders (by size, by size times life, by life), where the item that
//! ends up on top moves to the front and all are placed again. The spans hold at any timing, so no order of copies can deadlock on them.
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

/// How many pairs of items the tries of one order may compare, and the fewest tries whatever that takes.
const PAIRS: usize = 8_000_000;
const TRIES: usize = 8;

/// Places items, aiming for `capacity`; the lowest layout found, which may be higher.
#[must_use]
pub fn place(items: &[Item], capacity: u64) -> Layout {
    let last = items.iter().flat_map(|i| &i.spans).map(|s| s.1).max().unwrap_or(0);
    let length = |i: usize| -> u64 { items[i].spans.iter().map(|s| u64::from(s.1 - s.0)).sum() };
    // What is always there is in everybody's way wherever it lies: it goes to the bottom, once and for all.
    let (always, others): (Vec<usize>, Vec<usize>) = (0..items.len()).partition(|&i| length(i) == u64::from(last));
    let mut bottom = Layout { offsets: vec![0; items.len()], height: 0 };
    for &i in &always {
        bottom.offsets[i] = bottom.height;
        bottom.height += items[i].bytes;
    }
    let mut by_size = others.clone();
    by_size.sort_by_key(|&i| (std::cmp::Reverse(items[i].bytes), std::cmp::Reverse(length(i)), i));
    let mut by_life = others;
    by_life.sort_by_key(|&i| (std::cmp::Reverse(length(i)), std::cmp::Reverse(items[i].bytes), i));
    let mut by_area = by_size.clone();
    by_area.sort_by_key(|&i| (std::cmp::Reverse(u128::from(items[i].bytes) * u128::from(length(i))), i));
    let tries = (PAIRS / (by_size.len() * by_size.len()).max(1)).clamp(TRIES, 256);
    let mut best: Option<Layout> = None;
    for first in [by_size, by_area, by_life] {
        let mut order = first;
        for _ in 0..tries {
            let layout = first_fit(items, &order, &bottom);
            let (height, top) = (layout.height, order.iter().position(|&i| layout.offsets[i] + items[i].bytes == layout.height));
            if best.as_ref().is_none_or(|b| height < b.height) {
                best = Some(layout);
            }
            if height <= capacity {
                break;
            }
            // Whoever ended up on top goes first in the next try.
            let Some(worst) = top.filter(|&at| at > 0) else { break };
            let item = order.remove(worst);
            order.insert(0, item);
        }
        if best.as_ref().is_some_and(|b| b.height <= capacity) {
            break;
        }
    }
    best.unwrap_or(bottom)
}

/// The lowest free offset for each item in turn, above the bottom.
fn first_fit(items: &[Item], order: &[usize], bottom: &Layout) -> Layout {
    let mut layout = bottom.clone();
    // By offset, so that the search stops at the first gap.
    let mut placed: Vec<(u64, usize)> = Vec::with_capacity(order.len());
    for &index in order {
        let item = &items[index];
        let mut offset = bottom.height;
        for &(start, other) in &placed {
            if start >= offset + item.bytes {
                break;
            }
            let end = start + items[other].bytes;
            if end > offset && overlap(&item.spans, &items[other].spans) {
                offset = end;
            }
        }
        layout.offsets[index] = offset;
        layout.height = layout.height.max(offset + item.bytes);
        let at = placed.partition_point(|p| p.0 < offset);
        placed.insert(at, (offset, index));
    }
    layout
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
