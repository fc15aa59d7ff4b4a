//! First fit over a few orders (by size, by size times life, by life), where the item that ends up on top moves to the
//! front and all are placed again. What is always there goes to the bottom, unless something has a given offset.
//!
//! Cost: O(items² ) a pass in the worst case, far less where spans are short. Not for: exact optima ([`super::search`]).

use super::{Item, Layout};

/// How many pairs of items the tries of one order may compare, and the fewest tries of a job's items whatever that takes.
const PAIRS: usize = 8_000_000;
const TRIES: usize = 8;

/// With more items than this, one try an order.
const MANY: usize = 20_000;

/// Places items, aiming for `capacity`; the lowest layout found, which may be higher.
#[must_use]
pub fn place(items: &[Item], capacity: u64) -> Layout {
    let last = items.iter().flat_map(|i| &i.spans).map(|s| s.1).max().unwrap_or(0);
    let length = |i: usize| -> u64 { items[i].spans.iter().map(|s| u64::from(s.1 - s.0)).sum() };
    // What is always there is in everybody's way wherever it lies: it goes to the bottom, once and for all.
    let (given, free): (Vec<usize>, Vec<usize>) = (0..items.len()).partition(|&i| items[i].fixed.is_some());
    let (always, others): (Vec<usize>, Vec<usize>) = free.into_iter().partition(|&i| given.is_empty() && length(i) == u64::from(last));
    let mut bottom = Layout { offsets: vec![0; items.len()], height: 0 };
    for &i in &always {
        bottom.offsets[i] = bottom.height.next_multiple_of(items[i].align);
        bottom.height = bottom.offsets[i] + items[i].bytes;
    }
    let start = Start { bottom: bottom.height, given };
    let mut by_size = others.clone();
    by_size.sort_by_key(|&i| (std::cmp::Reverse(items[i].bytes), std::cmp::Reverse(length(i)), i));
    let mut by_life = others;
    by_life.sort_by_key(|&i| (std::cmp::Reverse(length(i)), std::cmp::Reverse(items[i].bytes), i));
    let mut by_area = by_size.clone();
    by_area.sort_by_key(|&i| (std::cmp::Reverse(u128::from(items[i].bytes) * u128::from(length(i))), i));
    let fewest = if items.len() > MANY { 1 } else { TRIES };
    let tries = (PAIRS / (by_size.len() * by_size.len()).max(1)).clamp(fewest, 256);
    let mut best: Option<Layout> = None;
    for first in [by_size, by_area, by_life] {
        let mut order = first;
        for _ in 0..tries {
            let layout = first_fit(items, &order, &bottom, &start);
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

/// What lies where before the first item is placed.
struct Start {
    /// The height of what is always there.
    bottom: u64,
    /// Items with a given offset.
    given: Vec<usize>,
}

/// The lowest free offset for each item in turn, above the bottom.
fn first_fit(items: &[Item], order: &[usize], bottom: &Layout, start: &Start) -> Layout {
    let mut layout = bottom.clone();
    // By offset, so that the search stops at the first gap.
    let mut placed: Vec<(u64, usize)> = Vec::with_capacity(order.len() + start.given.len());
    for &index in &start.given {
        let offset = items[index].fixed.unwrap_or(0);
        layout.offsets[index] = offset;
        layout.height = layout.height.max(offset + items[index].bytes);
        placed.push((offset, index));
    }
    placed.sort_unstable();
    for &index in order {
        let item = &items[index];
        let mut offset = start.bottom.next_multiple_of(item.align);
        for &(from, other) in &placed {
            if from >= offset + item.bytes {
                break;
            }
            let end = from + items[other].bytes;
            if end > offset && overlap(&item.spans, &items[other].spans) {
                offset = end.next_multiple_of(item.align);
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
