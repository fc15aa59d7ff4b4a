//! The planner `neap`: swap, recompute or keep, decided together for every gap of every tensor.
//!
//! 1. **Greedy** ([`choose`]). At the highest slot, link time goes to the largest tensors that are not cheap to make again, as
//!    far as their copies fit in time both ways; what is missing is made again, cheapest first per byte; only then leaves what
//!    the compute stream has to wait for. Capuchin swaps first and recomputes what is left by one price; here what is cheap to make
//!    again does not take link time from what is dear, and how much that is, is searched.
//! 2. **Chains** ([`remake`]). What a recompute needs and is gone is made again too, comes back early, or
//!    is kept along by another's chain; what is made in passing stays where that costs no peak.
//! 3. **Longer lives** ([`extend`]). Small dead inputs live on where large tensors can be made from them.
//! 4. **Heads**. A tensor that nothing generates may leave *after* the end of the iteration, in the next one's head, while the
//!    forward pass runs: optimizer states needn't delay the end.
//! 5. **Taking back** ([`mod@drop`]). What other choices made superfluous is kept after all.
//! 6. **Windows** ([`windows`]). Copies get their order and times once it is decided which: outs first come first served, ins by
//!    earliest deadline seen from the end, each as far as bytes allow.
//! 7. **Improvement** ([`improve`]). Steps choose again with one thing changed, run it on a clock that knows both directions'
//!    contention ([`clock`]), and keep the best. Never worse than the first; deterministic, since effort counts steps.
//!
//! All sizes and times are integers. Slots are of program order, so what fits fits at any timing. 1 without 2 to 7 is
//! close to Capuchin's choice on TENSILE's intervals. Each part is a switch in [`Options`].
//! Cost: a step of improvement looks at every tensor once for each slot that is the highest in turn, so effort · rounds · tensors; larger
//! graphs get fewer steps. Chains of 1,000, 10,000, 30,000 and 100,000 operators (`benches/planning.rs`) at half their peak took 0.01 s, 0.1 s,
//! 0.9 s and 5 s on a two-core machine (12 s the last while others kept it busy), most of that in first fit of small tensors among many long lives
//! ([`crate::place`]). Not for: several jobs, noise.

pub mod book;
pub mod choose;
pub mod clock;
pub mod drop;
pub mod extend;
pub mod improve;
pub mod load;
pub mod remake;
#[cfg(test)]
mod tests;
pub mod windows;
pub mod write;

pub use improve::Warm;

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
    /// How many tensors one remake may make or fetch besides; none leaves chains of one tensor.
    pub depth: usize,
    /// Keep from a recompute what else it generates and would be made again later.
    pub share: bool,
    /// Dead inputs may live on so that larger tensors can be made from them.
    pub extend: bool,
    /// Swap with waiting where nothing else is left.
    pub passive: bool,
    /// Take back what other choices made superfluous.
    pub drop: bool,
    /// Fit windows to the clock after choosing.
    pub fit: bool,
    /// Leave smaller tensors alone while there is anything else.
    pub min_swap: Bytes,
    /// The largest share of a job's tensors that may be swapped, in thousandths; TENSILE's max swapping rate.
    pub swap_share: u32,
    /// Steps of improvement.
    pub effort: u32,
    /// Fall back on another planner's plan where that is quicker, or the only one.
    pub portfolio: bool,
    /// Of several jobs: plan them in several ways, and choose by what they come to side by side ([`super::global`]).
    pub joint: bool,
    /// Of several jobs: plan them also for the part of the link that each gets.
    pub link_share: bool,
}

/// Beyond this many tensors a remake is as good as none: most need fewer than five.
pub const DEPTH: usize = 16;

/// Enough to try each of the greedy's parameters once; twice as much gains less than half a percent on what waits for the link.
pub const EFFORT: u32 = 16;

impl Default for Options {
    fn default() -> Self {
        Self {
            swap: true,
            across: true,
            head: true,
            recompute: true,
            depth: DEPTH,
            share: true,
            extend: true,
            passive: true,
            drop: true,
            fit: true,
            min_swap: Bytes(64 << 10),
            swap_share: 1000,
            effort: EFFORT,
            portfolio: true,
            joint: true,
            link_share: true,
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
    /// Long-lived tensors may leave after the end of the iteration. That is worth much where all copies hide, and costs
    /// where the link is what everybody waits for.
    pub head: bool,
}

impl Variant {
    /// The first start.
    const FIRST: Self = Self { slack: 0, remade: 50, dearest: false, extend: false, head: true };

    /// The same but for one thing: what a step of improvement tries, the most promising first.
    fn neighbours(self) -> [Self; 12] {
        let by = |slack, remade| Self { slack, remade, ..self };
        [
            Self { head: !self.head, ..self },
            Self { extend: !self.extend, ..self },
            by(0, self.remade),
            by(self.slack, 100),
            by(self.slack, 75),
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
/// What was decided for nearly the same target, in `warm`, is where it begins, and what is found is left there.
#[must_use]
pub fn decide(given: &Given<'_>, options: &Options, warm: &mut Option<Warm>) -> Decision {
    let (book, end) = improve::search(given, options, warm.as_ref());
    *warm = Some(end);
    let peak = book.load.peak();
    Decision { emitted: write::events(&book), peak, reached: peak.1 <= given.target }
}
