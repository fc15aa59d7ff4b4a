//! A layout within a capacity, or as low as the effort allows, with what is proved about it.
//!
//! Not for: the quick placement inside the planner ([`super::place`]).

use super::search::{self, Options, Outcome, Spent};
use super::{Item, Layout, heuristic, load};

/// What came of placing within a capacity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Within {
    /// A layout, a proof that there is none, or neither.
    pub outcome: Outcome,
    /// What it took.
    pub spent: Spent,
}

/// The lowest layout found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Least {
    /// The layout.
    pub layout: Layout,
    /// Proved: no layout is lower than this. At least the load.
    pub bound: u64,
    /// What it took.
    pub spent: Spent,
}

/// Places within `capacity`: first fit, then the exact search.
#[must_use]
pub fn within(items: &[Item], capacity: u64, options: &Options) -> Within {
    if load(items) > capacity {
        return Within { outcome: Outcome::Impossible, spent: Spent::default() };
    }
    let quick = heuristic::place(items, capacity);
    if quick.height <= capacity {
        return Within { outcome: Outcome::Placed(quick), spent: Spent::default() };
    }
    let (outcome, spent) = search::search(items, capacity, options);
    Within { outcome, spent }
}

/// Looks for the lowest layout: at the load first, then by halving what lies between the highest capacity that was
/// not met and the lowest that was.
#[must_use]
pub fn least(items: &[Item], options: &Options) -> Least {
    let mut bound = load(items);
    let mut layout = heuristic::place(items, bound);
    let mut spent = Spent::default();
    // Offsets in a layout that is pushed down are sums of sizes, raised to alignments and given offsets.
    let unit = items
        .iter()
        .fold(0, |unit, i| {
            gcd(
                gcd(unit, i.bytes),
                gcd(i.fixed.unwrap_or(0), if i.align > 1 { i.align } else { 0 }),
            )
        })
        .max(1);
    // The least that is not known to be out of reach, and what to try next.
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

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}
