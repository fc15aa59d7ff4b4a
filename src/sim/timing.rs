//! The times of one run: durations in, start, end and waiting times out, and the link's rates.
//!
//! The event loops ([`super::engine`], [`super::beside`]) and the job that they drive
//! ([`super::player`]) share these types.

use super::program::{Direction, Program};
use crate::device::Link;
use crate::units::{Bytes, Nanos};

/// Later than anything.
pub(super) const NEVER: Nanos = Nanos(u64::MAX);

/// The link's two directions, in the order in which queues and wires are indexed.
pub(super) const DIRECTIONS: [Direction; 2] = [Direction::H2d, Direction::D2h];

/// How long steps and copies take in one run.
#[derive(Clone, Debug)]
pub struct Durations {
    /// Time of each step, at least 1 ns.
    pub steps: Vec<Nanos>,
    /// Work of each copy, in bytes times 10^9 (see [`work`]).
    pub copies: Vec<u128>,
}

impl Durations {
    /// The planned durations, without noise.
    #[must_use]
    pub fn nominal(program: &Program, link: &Link) -> Self {
        Self {
            steps: program.steps.iter().map(|s| Nanos(s.time.0.max(1))).collect(),
            copies: program.copies.iter().map(|c| work(link, c.direction, c.bytes)).collect(),
        }
    }
}

/// A copy's work: bytes times 10^9 plus the overhead at the uncontended rate.
#[must_use]
pub fn work(link: &Link, direction: Direction, bytes: Bytes) -> u128 {
    u128::from(bytes.0) * 1_000_000_000
        + u128::from(link.overhead_ns) * u128::from(rate(link, direction, false))
}

/// Bytes a second in one direction.
#[must_use]
pub const fn rate(link: &Link, direction: Direction, contended: bool) -> u64 {
    match (direction, contended) {
        (Direction::H2d, false) => link.h2d,
        (Direction::H2d, true) => link.h2d_contended,
        (Direction::D2h, false) => link.d2h,
        (Direction::D2h, true) => link.d2h_contended,
    }
}

/// How long this work takes at a rate, in nanoseconds, rounded up. Nearly all work fits in 64 bits,
/// and a 64-bit division is several times as fast as one of 128 bits.
#[must_use]
pub fn wait(work: u128, rate: u64) -> u128 {
    u64::try_from(work)
        .map_or_else(|_| work.div_ceil(u128::from(rate)), |work| u128::from(work.div_ceil(rate)))
}

/// How long a copy takes alone, or contended all the time.
#[must_use]
pub fn copy_time(link: &Link, direction: Direction, bytes: Bytes, contended: bool) -> Nanos {
    let whole = wait(work(link, direction, bytes), rate(link, direction, contended));
    Nanos(u64::try_from(whole).unwrap_or(u64::MAX / 4).max(1))
}

/// How long the compute stream waited, by cause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stalls {
    /// Waiting for a swap-in to arrive.
    pub swap_in: Nanos,
    /// Waiting for bytes that were still being swapped out, or that another job held.
    pub swap_out: Nanos,
    /// Waiting after the last step for copies to end.
    pub tail: Nanos,
}

/// One simulated iteration.
#[derive(Clone, Debug)]
pub struct Run {
    /// Start and end of each step.
    pub steps: Vec<(Nanos, Nanos)>,
    /// Start and end of each copy.
    pub copies: Vec<(Nanos, Nanos)>,
    /// When everything had ended.
    pub iteration: Nanos,
    /// Waiting, by cause.
    pub stalls: Stalls,
    /// Number of steps that waited for a copy; the executor calls such copies late.
    pub late_copies: u32,
}

/// Items wait for each other in a circle.
#[derive(Debug, thiserror::Error)]
#[error("the plan deadlocks at {at}: step {step} never starts")]
pub struct Deadlock {
    /// The time from which on nothing could start.
    pub at: Nanos,
    /// The step that could not start.
    pub step: usize,
}

/// The copy in progress in each direction of the link, as its work left.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Wires([Option<u128>; 2]);

impl Wires {
    /// Whether no copy is in progress in this direction.
    pub const fn free(&self, direction: usize) -> bool {
        self.0[direction].is_none()
    }

    /// Begins a copy.
    pub const fn start(&mut self, direction: usize, work: u128) {
        self.0[direction] = Some(work);
    }

    fn rate(&self, direction: usize, link: &Link) -> u64 {
        rate(link, DIRECTIONS[direction], self.0.iter().all(Option::is_some))
    }

    /// When the first copy ends if no other copy starts before.
    pub fn next(&self, now: Nanos, link: &Link) -> Nanos {
        let end = |direction: usize| {
            let wait = wait(self.0[direction]?, self.rate(direction, link));
            Some(Nanos(now.0.saturating_add(u64::try_from(wait).unwrap_or(u64::MAX / 2))))
        };
        (0..2).filter_map(end).min().unwrap_or(NEVER)
    }

    /// Lets `passed` nanoseconds pass. Returns the directions whose copies end.
    pub fn advance(&mut self, passed: Nanos, link: &Link) -> impl Iterator<Item = usize> + use<> {
        let rates = [0, 1].map(|direction| self.rate(direction, link));
        let mut ended = [false; 2];
        for (direction, rate) in rates.into_iter().enumerate() {
            if let Some(left) = &mut self.0[direction] {
                *left = left.saturating_sub(u128::from(passed.0) * u128::from(rate));
                if *left == 0 {
                    (self.0[direction], ended[direction]) = (None, true);
                }
            }
        }
        (0..2).filter(move |&direction| ended[direction])
    }
}
