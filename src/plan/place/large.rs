//! Fast layouts of a plan's items: the large items first, then the small ones in the holes by first
//! fit.
//!
//! Of a plan's thousands of items a few hundred hold nearly all bytes, so only these are tried in
//! several ways: [`super::skyline`], then first fit by size, in which the item with the highest end
//! moves to the front, then the exact search. A failure here proves nothing, because the small
//! items may be the cause.

use super::cliques::Cliques;
use super::fit::{Start, first_fit};
use super::search::{self, Options, Outcome};
use super::skyline::{ORDERS, Orders, skyline};
use super::{Item, Layout};

/// The small items together hold at most this part of the load (one in 100) at any moment.
const SMALL: u64 = 100;

/// How many pairs of items the tries of first fit may compare together.
const PAIRS: usize = 1_000_000;
/// The most tries, whatever the number of pairs.
const TRIES: usize = 32;

/// The fewest steps of the exact search, however many items there are.
const LEAST: u64 = 100_000;

/// The most steps of the exact search for each item: where it fails on few items, more steps fail
/// too.
const EACH: u64 = 20_000;

/// With more items than this, only two orders are tried by skyline.
const FEW: usize = 256;

/// With more items than this, one order is tried by skyline, and neither first fit nor the exact
/// search.
const MANY: usize = 5_000;

/// If the capacity can't be met, a layout within this part of the load (one in 128) is low enough.
const CLOSE: u64 = 128;

/// The exact search is not tried if the layout exceeds the capacity by more than this part of it
/// (one in 16).
const FAR: u64 = 16;

/// Returns the first layout found within `capacity`, or else the lowest. The exact search takes
/// `effort` steps divided by the number of large items.
pub(super) fn place(items: &[Item], capacity: u64, effort: u64) -> Layout {
    let last = items.iter().flat_map(|i| &i.spans).map(|s| s.1).max().unwrap_or(0);
    let (always, others): (Vec<usize>, Vec<usize>) =
        (0..items.len()).partition(|&i| items[i].spans == [(0, last)]);
    let start = Start::new(items, &always, Vec::new());
    let bottom = start.layout.height;
    let (large, small, load) = split(items, others, last, bottom);
    // If the capacity can't be met, any layout close to the load is good enough.
    let goal = if capacity < load { load + load / CLOSE } else { capacity };
    let chosen: Vec<Item> = large.iter().map(|&i| items[i].clone()).collect();
    // The large items are fixed, and the small ones go where there is room.
    let mut standing = items.to_vec();
    let mut whole = |found: &Layout| {
        for (&i, &offset) in large.iter().zip(&found.offsets) {
            standing[i].fixed = Some(offset);
        }
        first_fit(&standing, &small, &Start { layout: start.layout.clone(), given: large.clone() })
    };
    let floor = Layout { offsets: vec![bottom; chosen.len()], height: bottom };
    let mut tried = Tried { goal, lowest: floor.clone(), best: None, whole: &mut whole };
    tried.lowest.height = u64::MAX;
    let near = |tried: &Tried<'_>| {
        load <= capacity
            && chosen.len() <= MANY
            && tried.lowest.height.saturating_sub(goal) <= goal / FAR
    };
    if !quick(&chosen, &floor, &mut |found| tried.enough(found)) && near(&tried) {
        let options = Options { effort: steps(effort, chosen.len() as u64), without: Vec::new() };
        if let (Outcome::Placed(mut found), _) =
            search::search(&chosen, capacity - bottom, &options)
        {
            found.offsets.iter_mut().for_each(|o| *o += bottom);
            found.height += bottom;
            tried.enough(found);
        }
    }
    let Tried { best, lowest, .. } = tried;
    best.unwrap_or_else(|| whole(&lowest))
}

/// The steps of the exact search for `items` items.
fn steps(effort: u64, items: u64) -> u64 {
    (effort / items.max(1)).min(EACH * items).max(LEAST)
}

/// Layouts of the large items that were tried.
struct Tried<'w> {
    goal: u64,
    lowest: Layout,
    /// The lowest layout, with the small items.
    best: Option<Layout>,
    whole: &'w mut dyn FnMut(&Layout) -> Layout,
}

impl Tried<'_> {
    /// Adds the small items to a layout. Returns whether the result is low enough.
    fn enough(&mut self, found: Layout) -> bool {
        if found.height <= self.goal {
            let all = (self.whole)(&found);
            if self.best.as_ref().is_none_or(|b| all.height < b.height) {
                self.best = Some(all);
            }
        }
        if found.height < self.lowest.height {
            self.lowest = found;
        }
        self.best.as_ref().is_some_and(|b| b.height <= self.goal)
    }
}

/// Tries layouts of the large items until one is low enough: by skyline, then by first fit.
fn quick(items: &[Item], floor: &Layout, enough: &mut dyn FnMut(Layout) -> bool) -> bool {
    let cliques = Cliques::new(items);
    let which: Vec<u32> = (0..u32::try_from(items.len()).unwrap_or(u32::MAX)).collect();
    let mut limit = u64::MAX;
    let count = if items.len() <= FEW {
        ORDERS
    } else if items.len() <= MANY {
        2
    } else {
        1
    };
    let orders = Orders::new(items, &cliques, &which);
    for number in 0..count {
        if let Some(found) = skyline(items, &cliques, &orders.order(number), floor, limit) {
            limit = found.height.saturating_sub(1);
            if enough(found) {
                return true;
            }
        }
    }
    let life = |i: usize| -> u64 { items[i].spans.iter().map(|s| u64::from(s.1 - s.0)).sum() };
    let start = Start { layout: floor.clone(), given: Vec::new() };
    let mut order: Vec<usize> = (0..items.len()).collect();
    order.sort_by_key(|&i| (std::cmp::Reverse(items[i].bytes), std::cmp::Reverse(life(i)), i));
    let fewest = usize::from(items.len() <= MANY);
    for _ in 0..(PAIRS / (items.len() * items.len()).max(1)).clamp(fewest, TRIES) {
        let found = first_fit(items, &order, &start);
        let top = order.iter().position(|&i| found.offsets[i] + items[i].bytes == found.height);
        if found.height < limit {
            limit = found.height;
            if enough(found) {
                return true;
            }
        }
        let Some(top) = top.filter(|&at| at > 0) else { break };
        // The item with the highest end goes first in the next try.
        let item = order.remove(top);
        order.insert(0, item);
    }
    false
}

/// The large items, the small ones by falling size, and the load.
fn split(
    items: &[Item],
    mut others: Vec<usize>,
    last: u32,
    bottom: u64,
) -> (Vec<usize>, Vec<usize>, u64) {
    others.sort_by_key(|&i| (items[i].bytes, std::cmp::Reverse(i)));
    let load = |of: &[usize]| {
        let mut change = vec![0i64; last as usize + 1];
        for &i in of {
            for &(from, until) in &items[i].spans {
                // Sums of sizes stay below 2^62.
                change[from as usize] += items[i].bytes.cast_signed();
                change[until as usize] -= items[i].bytes.cast_signed();
            }
        }
        let (mut level, mut most) = (0, 0);
        for by in change {
            level += by;
            most = most.max(level);
        }
        most.cast_unsigned()
    };
    let all = bottom + load(&others);
    // The most items that are small together. Items of equal size are all small or all large, since
    // only the size distinguishes them.
    let (mut few, mut many) = (0, others.len() + 1);
    while few + 1 < many {
        let middle = usize::midpoint(few, many);
        if load(&others[..middle]) <= all / SMALL {
            few = middle;
        } else {
            many = middle;
        }
    }
    let mut large = others.split_off(few);
    large.sort();
    others.reverse();
    (large, others, all)
}
