//! Finds a layout within a capacity, or the lowest that the effort allows, and what is proved about
//! it.
//!
//! It starts with fast layouts: first fit, skyline, and best fit over several orders, in which the
//! item with the highest end moves to the front. Then the exact search continues.

use std::cmp::Reverse;

use super::fit::{Start, best_fit};
use super::search::{self, Options, Outcome, Spent};
use super::{Item, Layout, heuristic, load};

/// The part of the effort (one in 2) for best fit. A try compares every pair of items about once.
const PART: u64 = 2;

/// How many times best fit goes through its orders.
const ROUNDS: usize = 5;

/// With more items than this, a layout within 1/128 of the load is low enough: the exact search
/// never finds a lower one there.
const MANY: usize = 5_000;
const CLOSE: u64 = 128;

/// The result of placing within a capacity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Within {
    /// A layout, a proof that there is none, or neither.
    pub outcome: Outcome,
    /// Steps of the search.
    pub spent: Spent,
}

/// The lowest layout found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Least {
    /// The layout.
    pub layout: Layout,
    /// A proved lower bound on the height of any layout; at least the load.
    pub bound: u64,
    /// Steps of the search.
    pub spent: Spent,
}

/// Places within `capacity`: first fit, then the exact search.
#[must_use]
pub fn within(items: &[Item], capacity: u64, options: &Options) -> Within {
    if load(items) > capacity {
        return Within { outcome: Outcome::Impossible, spent: Spent::default() };
    }
    let (quick, spent) = start(items, capacity, options.effort);
    if quick.height <= capacity {
        return Within { outcome: Outcome::Placed(quick), spent };
    }
    let left = options.effort.saturating_sub(spent.steps);
    let options = Options { effort: left, without: options.without.clone() };
    let (outcome, took) = search::search(items, capacity, &options);
    let mut spent = spent;
    spent += took;
    Within { outcome, spent }
}

/// Searches for the lowest layout: first at the load, then by bisection between the highest
/// capacity that was not met and the lowest that was.
#[must_use]
pub fn least(items: &[Item], options: &Options) -> Least {
    let mut bound = load(items);
    let (mut layout, mut spent) = start(items, bound, options.effort);
    if items.len() > MANY && layout.height <= bound + bound / CLOSE {
        return Least { layout, bound, spent };
    }
    // Offsets in a layout that is pushed down are sums of sizes, rounded up to alignments and given
    // offsets.
    let unit = items
        .iter()
        .fold(0, |unit, i| {
            gcd(
                gcd(unit, i.bytes),
                gcd(i.fixed.unwrap_or(0), if i.align > 1 { i.align } else { 0 }),
            )
        })
        .max(1);
    // The least height that may still be possible, and the next one to try.
    let mut unmet = bound;
    let mut target = bound;
    while bound < layout.height {
        let left = options.effort.saturating_sub(spent.steps);
        let share = Options { effort: left / 4, without: options.without.clone() };
        if share.effort == 0 {
            break;
        }
        let (outcome, took) = search::search(items, target, &share);
        spent += took;
        let met = matches!(outcome, Outcome::Placed(_));
        match outcome {
            Outcome::Placed(found) => layout = found,
            Outcome::Impossible => bound = (target + 1).next_multiple_of(unit),
            Outcome::GaveUp => {}
        }
        if !met {
            unmet = target + 1;
        }
        let high = layout.height.saturating_sub(unit);
        if unmet > high {
            break;
        }
        target = (unmet + (high - unmet) / 2).next_multiple_of(unit).min(high);
    }
    Least { bound: bound.min(layout.height), layout, spent }
}

/// A fast layout that aims for `capacity`, or for a height close to the load if that is more.
fn start(items: &[Item], capacity: u64, effort: u64) -> (Layout, Spent) {
    let mut best = heuristic::place(items, capacity);
    let mut spent = Spent::default();
    if items.iter().any(|i| i.fixed.is_some()) {
        return (best, spent);
    }
    let most = load(items);
    let aim =
        if items.len() > MANY { capacity.max(most + most / CLOSE) } else { capacity.max(most) };
    let life = |i: usize| -> u64 { items[i].spans.iter().map(|s| u64::from(s.1 - s.0)).sum() };
    let area = |i: usize| u128::from(items[i].bytes) * u128::from(life(i));
    let all = || (0..items.len()).collect::<Vec<usize>>();
    let mut orders = [all(), all(), all()];
    orders[0].sort_by_key(|&i| (Reverse(items[i].bytes), i));
    orders[1].sort_by_key(|&i| (Reverse(area(i)), i));
    orders[2].sort_by_key(|&i| (Reverse(life(i)), Reverse(items[i].bytes), i));
    let start = Start::new(items, &[], Vec::new());
    let pairs = (items.len() as u64 * items.len() as u64 / 2).max(1);
    for _ in 0..ROUNDS {
        for order in &mut orders {
            if best.height <= aim || spent.steps.saturating_add(pairs) > effort / PART {
                return (best, spent);
            }
            spent.steps += pairs;
            let found = best_fit(items, order, &start);
            let top = order.iter().position(|&i| found.offsets[i] + items[i].bytes == found.height);
            if found.height < best.height {
                best = found;
            }
            if let Some(top) = top {
                order[..=top].rotate_right(1);
            }
        }
    }
    (best, spent)
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}
