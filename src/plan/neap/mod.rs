//! The planner `neap`: swap, recompute or keep, decided together for every gap of every tensor.
//!
//! 1. **Greedy** ([`choose`]). In the slot with the highest load, the link's time goes to the
//!    largest tensors that are not cheap to recompute, as far as their copies fit in time both
//!    ways. What is still over the target is recomputed, cheapest per byte first. Last come swaps
//!    that an operator waits for. Capuchin swaps first and compares with recomputation only what
//!    does not hide; here a tensor that is cheap to recompute never takes link time from one that
//!    is dear. What counts as cheap is searched.
//! 2. **Chains** ([`super::recompute`]). What a recompute needs and is gone is recomputed too, or
//!    comes back early.
//! 3. **Longer lives** ([`extend`]). Small inputs live on where large tensors can be recomputed
//!    from them.
//! 4. **Taking back** ([`mod@drop`]). What later choices made superfluous is undone.
//! 5. **Lingering** ([`mod@linger`]). What is updated last leaves in the next forward.
//! 6. **Prefetch** ([`prefetch`]). Once it is decided which tensors move, their copies get their
//!    order and times.
//! 7. **Improvement** ([`improve`]). Each step chooses again with one thing changed, runs the
//!    result on a clock with both directions of the link ([`super::clock`]), and keeps it if it is
//!    better. Effort counts steps, so plans do not depend on the machine.
//! 8. **Polishing** ([`improve::polish`]). Of a plan that is placed already single choices are
//!    changed, and what is quicker and can be placed stays.
//! 9. **Iterated local search** ([`improve::random`]). What the greedy must observe is changed at
//!    random, and what comes of it is polished too.
//!
//! Each part is a switch in [`Options`]; `bench/ablation` measures what each is worth. A step looks
//! at every tensor once for each slot that is the highest in turn, so planning takes O(effort ·
//! rounds · tensors); large graphs get fewer steps. On two cores, chains of 1,000, 10,000, 30,000
//! and 100,000 operators at half their peak took 0.01 s, 0.1 s, 0.9 s and 5 s
//! (`benches/planning.rs`), mostly in placing small tensors among many long lives.

pub mod choose;
pub mod drop;
pub mod extend;
pub mod improve;
pub mod linger;
pub mod prefetch;
pub mod stream;
#[cfg(test)]
mod tests;

pub use improve::Warm;

use serde::{Deserialize, Serialize};

use super::planner::{Decision, Given, Memory, Planner};
use super::recompute::Reach;
use crate::device::Link;
use crate::sim::engine::copy_time;
use crate::sim::program::Direction;
use crate::units::Bytes;

/// The planner's switches.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Options {
    /// Swap tensors.
    pub swap: bool,
    /// Swap what nothing generates round the end of the iteration.
    pub across: bool,
    /// Make tensors again.
    pub recompute: bool,
    /// Recompute what a recompute needs, and bring it back early.
    pub chains: bool,
    /// Keep from a recompute what else it generates and would be made again later.
    pub share: bool,
    /// Dead inputs may live on so that larger tensors can be made from them.
    pub extend: bool,
    /// Swap with waiting where nothing else is left.
    pub passive: bool,
    /// Take back what other choices made superfluous.
    pub drop: bool,
    /// Give copies their order and times after choosing.
    pub prefetch: bool,
    /// Leave smaller tensors alone while there is anything else.
    pub min_swap: Bytes,
    /// The largest share of a job's tensors that may be swapped, in thousandths; see
    /// [`super::share`], which records it.
    #[serde(skip, default = "all")]
    pub swap_share: u32,
    /// Run updates as early as their gradients allow.
    pub reorder: bool,
    /// Where one update has a large part of all states, also try to run it later than that.
    pub delay: bool,
    /// There, where its gradient is far larger than what that is made from, also make the gradient
    /// later.
    pub late_gradients: bool,
    /// Run updates of large states in pieces.
    pub split: bool,
    /// Where the link takes a large part of the iteration for a piece, also try finer ones.
    pub finer: bool,
    /// Make gradients in pieces where they and their updates can be
    /// ([`crate::arrange::in_pieces`]).
    pub split_gradients: bool,
    /// Where operators wait long for the link, stream what one operator alone uses ([`stream`]).
    pub stream: bool,
    /// Where operators wait long, also make a plan in which streamed tensors that are used last
    /// stay over the end of the iteration ([`mod@linger`]), and let tensors of a plan stay so when
    /// it is polished.
    pub linger: bool,
    /// This is that plan.
    #[serde(skip)]
    pub lingering: bool,
    /// Where a plan can't be placed, or an allocator reserves too much for it, also make one in
    /// which parameters and states leave before large tensors that can lie at their addresses, and
    /// come back after them ([`mod@prefetch`]).
    pub apart: bool,
    /// This is that plan.
    #[serde(skip)]
    pub set_apart: Apart,
    /// Where the plan is slow, also make one without [`Self::extend`]: that search goes other ways.
    pub twice: bool,
    /// Where the plan is slow, also make one from starts that are drawn from a linear program
    /// ([`improve`]).
    pub guide: bool,
    /// In that plan, at the highest slot, what relieves most slots over the target is swapped
    /// first, rather than the largest, unless little time is added. What leaves without a copy
    /// counts twice.
    pub widest: bool,
    /// This is that plan.
    #[serde(skip)]
    pub by_reach: bool,
    /// Some of these starts copy parameters out ahead ([`Variant::ahead`]).
    pub ahead: bool,
    /// Copies make room on the link for others ([`Variant::shift`]).
    pub shift: bool,
    /// Some plans copy tensors out before their last use ([`Variant::early`]).
    pub early: bool,
    /// Where operators wait long, change single choices of the plan ([`improve::polish`]).
    pub polish: bool,
    /// Change two choices of the plan at once too, where single ones are changed for a framework's
    /// allocator.
    pub pairs: bool,
    /// With more than [`MUCH`] effort, or where operators wait little, also change what the greedy
    /// must observe at random, and polish what comes of it ([`improve::random`]).
    pub random: bool,
    /// For a framework's allocator: leave out swaps that leave its memory in pieces.
    pub mend: bool,
    /// This is a plan that is mended from more targets, each without what was found before, and
    /// polished by pairs.
    #[serde(skip)]
    pub thorough: bool,
    /// Steps of improvement.
    pub effort: u32,
    /// Fall back on another planner's plan where there is no own one.
    pub portfolio: bool,
    /// Of several jobs: plan them in several ways, and choose by what they come to beside each
    /// other ([`super::together`]).
    pub together: bool,
    /// Of several jobs: plan them also for the part of the link that each gets.
    pub link_share: bool,
}

/// How parameters and states are kept apart from large tensors that something generates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Apart {
    /// Not at all.
    #[default]
    No,
    /// They come back after those that began while they were away.
    After,
    /// Where the whole life of one lies between two of their uses, they also leave before it.
    Around,
}

/// How many tensors one recompute may make or bring back besides its own: most need fewer than
/// five, and beyond this a recompute is as good as none.
const DEPTH: usize = 16;

/// Enough to try each of the greedy's parameters once; twice as much gains less than half a percent
/// on what waits for the link.
pub const EFFORT: u32 = 16;

/// With more than this, rules are changed at random for every plan, and in more steps.
pub const MUCH: u32 = 4 * EFFORT;

impl Default for Options {
    fn default() -> Self {
        Self {
            swap: true,
            across: true,
            recompute: true,
            chains: true,
            share: true,
            extend: true,
            passive: true,
            drop: true,
            prefetch: true,
            min_swap: Bytes(64 << 10),
            swap_share: all(),
            reorder: true,
            delay: true,
            late_gradients: true,
            split: true,
            finer: true,
            split_gradients: true,
            stream: true,
            linger: true,
            lingering: false,
            apart: true,
            set_apart: Apart::No,
            twice: true,
            guide: true,
            widest: true,
            by_reach: false,
            ahead: true,
            shift: true,
            early: true,
            polish: true,
            pairs: true,
            random: true,
            mend: true,
            thorough: false,
            effort: EFFORT,
            portfolio: true,
            together: true,
            link_share: true,
        }
    }
}

/// What differs between the starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variant {
    /// By how much longer a copy is assumed to take than alone, in percent.
    pub slack: u64,
    /// What is cheapest to make again is not swapped at first: this share of what must go, in
    /// percent.
    pub recomputed: u64,
    /// The dearest to make again go first, rather than the largest.
    pub dearest: bool,
    /// Dead inputs live on where that frees more than it costs.
    pub extend: bool,
    /// Of what is over the target, this share is streamed, in percent ([`stream`]).
    pub streamed: u64,
    /// Parameters are streamed too.
    pub parameters: bool,
    /// Of what is streamed, this share is what is used last, in percent.
    pub last: u64,
    /// The most tensors that stay over the end of the iteration, of those that leave last
    /// ([`mod@linger`]).
    pub linger: u32,
    /// Parameters also leave after their updates and come back for the next forward, so that they
    /// leave there without a copy ([`choose`]).
    pub ahead: bool,
    /// Where the link is free for too short a time, copies that were chosen before run at other
    /// instants ([`choose`]).
    pub shift: bool,
    /// Where the link is free, tensors are copied out before their last use, as soon as nothing
    /// writes them any more.
    pub early: bool,
}

impl Variant {
    /// The first start.
    const FIRST: Self = Self {
        slack: 0,
        recomputed: 50,
        dearest: false,
        extend: false,
        streamed: 0,
        parameters: false,
        last: 0,
        linger: 0,
        ahead: false,
        shift: false,
        early: false,
    };

    /// The same but for one thing: what a step of improvement tries, the most promising first.
    fn neighbours(self) -> [Self; 13] {
        let by = |slack, recomputed| Self { slack, recomputed, ..self };
        [
            Self { extend: !self.extend, ..self },
            by(0, self.recomputed),
            by(self.slack, 100),
            by(self.slack, 75),
            by(self.slack, 25),
            by(33, self.recomputed),
            by(self.slack, 0),
            Self { dearest: !self.dearest, ..self },
            by(15, self.recomputed),
            by(self.slack, 50),
            by(self.slack, 150),
            Self { shift: !self.shift, ..self },
            Self { early: !self.early, ..self },
        ]
    }

    fn time(self, link: &Link, direction: Direction, bytes: Bytes) -> u64 {
        copy_time(link, direction, bytes, false).0 * (100 + self.slack) / 100
    }
}

/// What the greedy must observe for a tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rule {
    /// It may not be swapped in time.
    pub no_swap: bool,
    /// It may not be made again.
    pub no_recompute: bool,
    /// It is swapped before others, even if it is cheap to make again.
    pub first: bool,
}

impl Rule {
    /// It stays.
    const STAYS: Self = Self { no_swap: true, no_recompute: true, first: false };

    /// Forbids to swap it too, or else to make it again.
    const fn without(self, swap: bool) -> Self {
        Self { no_swap: self.no_swap || swap, no_recompute: self.no_recompute || !swap, ..self }
    }
}

/// Every tensor may be swapped.
const fn all() -> u32 {
    super::share::Share::ALL.thousandths()
}

impl Options {
    const fn streams(&self) -> bool {
        self.stream && self.swap && self.across && self.passive
    }

    const fn reach(&self) -> Reach {
        Reach { depth: if self.chains { DEPTH } else { 0 }, share: self.share }
    }
}

impl Planner for Options {
    fn decide(&self, given: &Given<'_>) -> Decision {
        self.decide_again(given, &mut Memory::Nothing)
    }

    fn decide_again(&self, given: &Given<'_>, memory: &mut Memory) -> Decision {
        let (residencies, end) = improve::search(given, self, memory);
        *memory = Memory::Warm(end);
        Decision::new(&residencies, given.target)
    }

    fn quick(&self) -> Self {
        Self { effort: 0, ..self.clone() }
    }

    fn narrow(&self) -> Option<Self> {
        self.prefetch.then(|| Self { prefetch: false, ..self.clone() })
    }

    fn limited(&self, share: u32) -> Option<Self> {
        // The portfolio's planners would not keep to the limit.
        Some(Self { swap_share: self.swap_share.min(share), portfolio: false, ..self.clone() })
    }
}
