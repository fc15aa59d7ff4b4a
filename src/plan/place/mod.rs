//! Addresses: every item of known size and lifetime gets an offset in one arena, so that planned
//! bytes are real bytes.
//!
//! - [`place`] is fast: it tries several ways on the few hundred items that hold nearly all bytes,
//!   the last one a short exact search ([`search`]), and puts the others into the holes.
//! - [`heuristic`] uses first fit and skyline over all items.
//! - [`least()`] and [`within()`] use the effort that they are given and return what is proved.
//! - [`problem`] reads problems from CSV. [`check`] proves a layout on its own. [`program`] lists
//!   the items of a plan.

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
pub use program::{items, placements, tied};

/// An item that needs an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// Its size in bytes, at least 1.
    pub bytes: u64,
    /// When it is alive: half-open ranges of positions, ascending. A tensor that leaves and comes
    /// back to stay round the end has two.
    pub spans: Vec<(u32, u32)>,
    /// Its alignment: its offset is a multiple of this, at least 1.
    pub align: u64,
    /// Its offset, if that is given.
    pub fixed: Option<u64>,
}

impl Item {
    /// An item without a given offset.
    #[must_use]
    pub const fn new(bytes: u64, spans: Vec<(u32, u32)>) -> Self {
        Self { bytes, spans, align: 1, fixed: None }
    }
}

/// An arena layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The offset of each item.
    pub offsets: Vec<u64>,
    /// The highest end.
    pub height: u64,
}

/// The largest sum of sizes at any position, below which no layout can be.
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

/// The steps of the exact search for a plan's items, divided by their number: some milliseconds.
const STEPS: u64 = 60_000_000;

/// Places a plan's items fast, aiming for `capacity`. Returns the lowest layout found, which may be
/// higher.
#[must_use]
pub fn place(items: &[Item], capacity: u64) -> Layout {
    if items.iter().any(|i| i.fixed.is_some()) {
        heuristic::place(items, capacity)
    } else {
        large::place(items, capacity, STEPS)
    }
}
