//! Quick layouts: first fit by size, lowest first (`super::skyline`), and where that is not enough
//! first fit over a few orders (by size, by size times life, by life), in which the item that ends
//! up on top moves to the front and all are placed again. What is always there goes to the bottom,
//! unless something has a given offset.
//!
//! Cost of first fit: O(items²) a pass in the worst case, far less where spans are short.

use super::cliques::Cliques;
use super::fit::{Start, first_fit};
use super::skyline::{Orders, skyline};
use super::{Item, Layout, load};

/// How many pairs of items the tries of one order may compare, and the fewest and most tries
/// whatever that takes.
const PAIRS: usize = 4_000_000;
const TRIES: (usize, usize) = (2, 128);

/// With more items than this, one try an order.
const MANY: usize = 20_000;

/// Within a 128th of the load nothing lower is looked for.
const CLOSE: u64 = 128;

/// Places items, aiming for `capacity` and for the load; the lowest layout found, which may be
/// higher than both.
#[must_use]
pub fn place(items: &[Item], capacity: u64) -> Layout {
    let last = items.iter().flat_map(|i| &i.spans).map(|s| s.1).max().unwrap_or(0);
    let length = |i: usize| -> u64 { items[i].spans.iter().map(|s| u64::from(s.1 - s.0)).sum() };
    let (given, free): (Vec<usize>, Vec<usize>) =
        (0..items.len()).partition(|&i| items[i].fixed.is_some());
    // What is always there is in the way of all others wherever it lies: it goes to the bottom,
    // once and for all.
    let (always, others): (Vec<usize>, Vec<usize>) =
        free.into_iter().partition(|&i| given.is_empty() && length(i) == u64::from(last));
    let start = Start::new(items, &always, given);
    let mut by_size = others.clone();
    by_size.sort_by_key(|&i| (std::cmp::Reverse(items[i].bytes), std::cmp::Reverse(length(i)), i));
    let mut best = first_fit(items, &by_size, &start);
    let load = load(items);
    let aim = (load + load / CLOSE).min(capacity.max(load));
    if start.given.is_empty() && best.height > aim {
        let which: Vec<u32> =
            others.iter().map(|&i| u32::try_from(i).unwrap_or(u32::MAX)).collect();
        let cliques = Cliques::of(items);
        let orders = Orders::of(items, &cliques, &which);
        for number in 0..2 {
            if let Some(lower) =
                skyline(items, &cliques, &orders.order(number), &start.layout, best.height - 1)
            {
                best = lower;
            }
            if best.height <= aim {
                break;
            }
        }
    }
    if best.height <= capacity.max(load) {
        return best;
    }
    let mut by_life = others;
    by_life.sort_by_key(|&i| (std::cmp::Reverse(length(i)), std::cmp::Reverse(items[i].bytes), i));
    let mut by_area = by_size.clone();
    by_area.sort_by_key(|&i| {
        (std::cmp::Reverse(u128::from(items[i].bytes) * u128::from(length(i))), i)
    });
    let fewest = if items.len() > MANY { 1 } else { TRIES.0 };
    let tries = (PAIRS / (by_size.len() * by_size.len()).max(1)).clamp(fewest, TRIES.1);
    for first in [by_size, by_area, by_life] {
        let mut order = first;
        for _ in 0..tries {
            let layout = first_fit(items, &order, &start);
            let (height, top) = (
                layout.height,
                order.iter().position(|&i| layout.offsets[i] + items[i].bytes == layout.height),
            );
            if height < best.height {
                best = layout;
            }
            if height <= capacity {
                return best;
            }
            // The item that ended up on top goes first in the next try.
            let Some(worst) = top.filter(|&at| at > 0) else { break };
            let item = order.remove(worst);
            order.insert(0, item);
        }
    }
    best
}
