//! Fast layouts for all items.
//!
//! First `super::skyline`, then, if that is not low enough, first fit in several orders (by size,
//! by size times life, by life). After each try of first fit, the item with the highest end moves
//! to the front of the order. Items that are always alive go to the bottom, unless some item has a
//! given offset.
//!
//! Cost of first fit: O(items²) for each try in the worst case, far less if lives are short.

use super::cliques::Cliques;
use super::fit::{Start, first_fit};
use super::skyline::{Orders, skyline};
use super::{Item, Layout, load};

/// How many pairs of items the tries of one order may compare together.
const PAIRS: usize = 4_000_000;
/// The fewest and the most tries of one order, whatever the number of pairs.
const TRIES: (usize, usize) = (2, 128);

/// With more items than this, each order is tried once.
const MANY: usize = 20_000;

/// A layout within this part of the load (one in 128) is low enough.
const CLOSE: u64 = 128;

/// Places items, aiming for `capacity` and for the load. Returns the lowest layout found, which may
/// be higher than both.
#[must_use]
pub fn place(items: &[Item], capacity: u64) -> Layout {
    let last = items.iter().flat_map(|i| &i.spans).map(|s| s.1).max().unwrap_or(0);
    let length = |i: usize| -> u64 { items[i].spans.iter().map(|s| u64::from(s.1 - s.0)).sum() };
    let (given, free): (Vec<usize>, Vec<usize>) =
        (0..items.len()).partition(|&i| items[i].fixed.is_some());
    // An item that is always alive blocks its bytes for all others. So these items go to the
    // bottom, and stay there.
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
        let cliques = Cliques::new(items);
        let orders = Orders::new(items, &cliques, &which);
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
            // The item with the highest end goes first in the next try.
            let Some(worst) = top.filter(|&at| at > 0) else { break };
            let item = order.remove(worst);
            order.insert(0, item);
        }
    }
    best
}
