//! Addresses: every item of known size and life gets an offset in one arena, so that planned bytes
//! are real bytes.
//!
//! [`place`] is quick: it tries what it tries on the few hundred items that hold nearly all bytes,
//! a small exact search ([`search`]) last, and lets the others fill the holes. [`heuristic`] is
//! first fit and lowest first over all items. [`least()`] and [`within()`] take the effort they are
//! given and say what is proved. [`problem`] reads bare problems, [`check`] knows nothing of how a
//! layout was found, [`program`] says what of a plan must be placed.

pub mod check;
mod cliques;
mod fit;
pub mod heuristic;
mod large;
pub mod least;
mod parts;
pub mod problem;
pub mod program;
pub mod search;
mod skyline;
mod technique;
mod within_run;

pub use least::{Least, Within, least, within};
pub use program::{items, placements};

/// Something to place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// Its size, at least 1.
    pub bytes: u64,
    /// When it holds bytes: half-open ranges of positions, ascending. Two for a tensor that leaves
    /// and comes back to stay round the end.
    pub spans: Vec<(u32, u32)>,
    /// Its offset is a multiple of this, at least 1.
    pub align: u64,
    /// Its offset, where that is given.
    pub fixed: Option<u64>,
}

impl Item {
    /// An item that may lie anywhere.
    #[must_use]
    pub const fn new(bytes: u64, spans: Vec<(u32, u32)>) -> Self {
        Self { bytes, spans, align: 1, fixed: None }
    }
}

/// An arena layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// By item.
    pub offsets: Vec<u64>,
    /// The highest end.
    pub height: u64,
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

/// What the exact search may take for a plan's items, over their number: some milliseconds.
const STEPS: u64 = 60_000_000;

/// Places a plan's items quickly, aiming for `capacity`; the lowest layout found, which may be
/// higher.
#[must_use]
pub fn place(items: &[Item], capacity: u64) -> Layout {
    if items.iter().any(|i| i.fixed.is_some()) {
        heuristic::place(items, capacity)
    } else {
        large::place(items, capacity, STEPS)
    }
}
