//! The planner `neap`.
//!
//! TODO

pub mod book;
pub mod choose;
pub mod clock;
pub mod drop;
pub mod extend;
pub mod improve;
pub mod load;
pub mod remake;
pub mod windows;
pub mod write;

use super::method::{Decision, Given};
use crate::device::Link;
use crate::sim::engine::copy_time;
use crate::sim::program::Direction;
use crate::units::Bytes;

/// The planner's switches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Swap tensors.
    pub swap: bool,
    /// Swap what nothing generates round the end of the iteration.
    pub across: bool,
    /// Let it leave in the head of the next iteration where that is enough.
    pub head: bool,
    /// Make tensors again.
    pub recompute: bool,
    /// How many tensors may be made for one other's sake.
    pub depth: usize,
    /// The link goes to what is dearest to make again, rather than to what is largest.
    pub price: bool,
    /// Swap with waiting where nothing else is left.
    pub passive: bool,
    /// Windows are fitted to the clock after choosing.
    pub fit: bool,
    /// Leave smaller tensors alone while there is anything else.
    pub min_swap: Bytes,
    /// Steps of improvement.
    pub effort: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            swap: true,
            across: true,
            head: true,
            recompute: true,
            depth: 16,
            price: true,
            passive: true,
            fit: true,
            min_swap: Bytes(64 << 10),
            effort: std::env::var("EFFORT").map_or(24, |e| e.parse().unwrap()),
        }
    }
}

/// What differs between the starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variant {
    /// Copies are taken to last so much longer than alone, in percent.
    pub slack: u64,
    /// What is cheapest to make again is not swapped at first: this share of what must go, in percent.
    pub remade: u64,
    /// The dearest to make again go first, rather than the largest.
    pub dearest: bool,
    /// Dead inputs live on where that frees more than it costs.
    pub extend: bool,
    /// Long-lived tensors leave before the end of the iteration rather than after it, where both would do: the link has
    /// nothing else to do then, but little time.
    pub tail: bool,
}

impl Variant {
    /// The first start.
    const FIRST: Self = Self { slack: 15, remade: 50, dearest: false, extend: false, tail: true };

    /// The same but for one thing: what a step of improvement tries, the most promising first.
    fn neighbours(self) -> [Self; 12] {
        let by = |slack, remade| Self { slack, remade, ..self };
        [
            Self { extend: !self.extend, ..self },
            by(0, self.remade),
            by(self.slack, 100),
            by(self.slack, 75),
            Self { tail: !self.tail, ..self },
            by(self.slack, 25),
            by(33, self.remade),
            by(self.slack, 0),
            Self { dearest: !self.dearest, ..self },
            by(15, self.remade),
            by(self.slack, 50),
            by(self.slack, 150),
        ]
    }

    fn time(self, link: &Link, direction: Direction, bytes: Bytes) -> u64 {
        copy_time(link, direction, bytes, false).0 * (100 + self.slack) / 100
    }
}

/// What a tensor may not be chosen for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ban {
    /// Swapping in time.
    pub swap: bool,
    /// Making again.
    pub remake: bool,
}

/// Decides until no slot's load exceeds the target, or nothing is left to do.
#[must_use]
pub fn decide(given: &Given<'_>, options: &Options) -> Decision {
    let book = improve::search(given, options);
    let peak = book.load.peak();
    Decision { emitted: write::events(&book), peak, reached: peak.1 <= given.target }
}
