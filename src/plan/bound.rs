//! What no plan can beat: a lower bound on the peak at a given added time, and on the time at a given budget.
//!
//! For: saying how far a plan is from the best possible. Not for: finding plans; the bounds need not be reachable.
//!
//! # The bound and its proof
//!
//! Let T be the sum of the operators' latencies and take any plan whose iteration takes at most T + D. All waiting and all
//! recomputing together then take at most D. Look at the instant τ that lies θ into operator q, 0 ≤ θ < its latency. By the meaning of plans
//! ([`crate::schedule::plan`]) everything q touches and its workspace hold bytes at τ. Every other tensor X that is
//! used both before and after (round the end of the iteration, if nothing generates it) holds its bytes too unless it is *away*. To be away it must
//! come back before its next use n, in one of two ways:
//!
//! 1. *By the link.* Its copy in starts after τ and ends by the start of n. From τ until then operators take tₙ − t_q − θ (t: nominal starts, plus T
//!    where n lies in the next iteration), so at most D more passes. What it copies was copied out after the end of the last write w
//!    before τ (a write costs the host copy its validity) and by τ: within t_q + θ − end_w + D. A tensor that no operator writes may have been on the
//!    host for ever. A direction carries one copy at a time, and none is faster than alone. So for the set S of tensors away
//!    by the link and for every next use n: the copies in of those of S wanted by n, together, take at most n's window; and likewise for
//!    copies out and every last write. A plan is steady, so windows that reach over the end of the iteration are as good as any. A tensor whose
//!    own copy exceeds its own window is not in S.
//! 2. *By recomputing.* Then every operator that has written X up to τ runs again, the first because it generates X and the others because
//!    a version is only made from the one before. Each takes its latency, once for all it writes: the sum over these operators is at most D.
//!    An operator that may never run again rules its tensors out.
//!
//! Let every X be away to a fraction from 0 to 1; that only allows more. Then
//! - the bytes of S are at most what the copies in allow, and at most what the copies out allow: each a linear program whose
//!   constraints are nested windows, which is solved exactly by going through the windows from the shortest and throwing out
//!   the least bytes per nanosecond whenever one overflows;
//! - an operator's latency is at least the sum of its parts if each tensor that wants it bears a part by its bytes, and
//!   with such parts (rounded down) the bytes recomputed are at most those of a fractional knapsack of size D.
//!
//! What stands at τ without a plan, less both, is therefore a lower bound on the peak. It is taken at the start, the middle and the end
//! of every operator, and never below the floor. Bytes that are away are rounded up, times of copies are the link's own. It
//! falls as D grows: so the least D at which it is within a budget is a lower bound on the added time at that budget.
//!
//! Cost: O(operators · tensors · log) at worst; operators below the best bound so far are skipped.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use super::ledger::Ledger;
use crate::device::Link;
use crate::job::{Graph, Replay};
use crate::schedule::Latency;
use crate::sim::engine::{rate, work};
use crate::sim::program::Direction;
use crate::units::{Bytes, Nanos, TensorId};

/// The bounds of one job on one link.
#[derive(Clone, Debug)]
pub struct Bounds<'a> {
    ledger: Ledger<'a>,
    /// Nominal start of each operator, and the end of the last.
    starts: Vec<u64>,
    /// By tensor: how long its copies take at the least.
    back: Vec<u64>,
    out: Vec<u64>,
    /// By operator: running it again takes so long at the least; `None` where that is ruled out.
    again: Vec<Option<u64>>,
    /// Operators, the one with most resident bytes first.
    order: Vec<u32>,
    floor: u64,
}

impl<'a> Bounds<'a> {
    /// The bounds of a job with these latencies on this link.
    #[must_use]
    pub fn new(graph: &'a Graph, latencies: &[Latency], link: &Link) -> Self {
        let ledger = Ledger::new(graph);
        let mut starts = vec![0];
        let mut now = 0;
        for latency in latencies {
            now += latency.time.0.max(1);
            starts.push(now);
        }
        let least = |direction, bytes: Bytes| {
            let fastest = rate(link, direction, false).max(rate(link, direction, true)).max(1);
            u64::try_from(work(link, direction, bytes).div_ceil(u128::from(fastest))).unwrap_or(u64::MAX / 4).clamp(1, u64::MAX / 4)
        };
        let copies = |direction| graph.tensors.iter().map(|t| least(direction, t.bytes)).collect();
        let again = graph.operators.iter().zip(latencies).map(|(o, l)| (o.replay != Replay::Never).then_some(l.time.0.max(1))).collect();
        let mut order: Vec<u32> = (0..).take(graph.operators.len()).collect();
        order.sort_by_key(|&q| (std::cmp::Reverse(ledger.load[2 * q as usize + 1]), q));
        let floor = crate::job::liveness::Liveness::of(graph).floor.0;
        Self { ledger, starts, back: copies(Direction::H2d), out: copies(Direction::D2h), again, order, floor }
    }

    /// No plan is below this: the largest working set of an operator.
    #[must_use]
    pub const fn floor(&self) -> Bytes {
        Bytes(self.floor)
    }

    /// No plan whose iteration takes at most `added` longer than the unplanned one has a lower peak.
    #[must_use]
    pub fn peak(&self, added: Nanos) -> Bytes {
        let mut best = self.floor;
        for &q in &self.order {
            let standing = self.ledger.load[2 * q as usize + 1];
            if standing <= best {
                break;
            }
            for moment in self.moments(q) {
                best = best.max(standing - moment.away(added.0));
            }
        }
        Bytes(best)
    }

    /// No plan with a peak of at most `budget` has a shorter iteration; `None` where there is no such plan.
    #[must_use]
    pub fn iteration(&self, budget: Bytes) -> Option<Nanos> {
        if budget.0 < self.floor {
            return None;
        }
        let mut added = 0;
        for &q in &self.order {
            let standing = self.ledger.load[2 * q as usize + 1];
            if standing <= budget.0 {
                break;
            }
            for moment in self.moments(q) {
                let within = |added| standing - moment.away(added) <= budget.0;
                if within(added) {
                    continue;
                }
                // `low` is not enough, `high` is.
                let (mut low, mut high) = (added, added.max(1_000) * 2);
                while !within(high) {
                    low = high;
                    high = high.checked_mul(2)?;
                }
                while high - low > 1 {
                    let middle = low + (high - low) / 2;
                    if within(middle) { high = middle } else { low = middle }
                }
                added = high;
            }
        }
        Some(Nanos(self.starts.last().map_or(0, |t| t + added)))
    }

    /// The instants at which an operator is looked at.
    fn moments(&self, q: u32) -> Vec<Moment> {
        let length = self.starts[q as usize + 1] - self.starts[q as usize];
        let mut offsets = vec![0, (length - 1) / 2, length - 1];
        offsets.dedup();
        offsets.into_iter().map(|offset| self.moment(q, offset)).collect()
    }

    /// What may be away `offset` into operator `q`, and what that takes.
    fn moment(&self, q: u32, offset: u64) -> Moment {
        let (now, total) = (self.starts[q as usize] + offset, self.starts.last().copied().unwrap_or(0));
        let slot = 2 * q as usize + 1;
        let mut moment = Moment::default();
        // For recomputing: who writes what, to share the writers' time.
        let mut shared: Vec<(u64, Vec<u32>)> = Vec::new();
        let mut wanted = vec![0u64; self.again.len()];
        for (index, account) in self.ledger.accounts.iter().enumerate() {
            let tensor = TensorId::of(index);
            if account.bytes == 0 {
                continue;
            }
            let (until, unused) = match self.ledger.gap_over(tensor, slot) {
                Some(gap) => {
                    let n = self.starts[self.ledger.ends(tensor, gap).1 as usize];
                    // Round the end of the iteration the next use is the next iteration's.
                    (if n > now { n } else { n + total }, false)
                }
                None if account.uses.is_empty() && account.long_lived => (now + total, true),
                None => continue,
            };
            let ended = |w: u32| self.starts[w as usize + 1];
            let before = account.writes.iter().rev().find(|&&w| w < q).map(|&w| ended(w));
            let since = match (before, account.writes.last()) {
                (Some(end), _) => Some(now - end),
                (None, Some(&last)) => Some(now + total - ended(last)),
                (None, None) => None,
            };
            let away = Away {
                bytes: account.bytes,
                back: (until - now, self.back[index]),
                out: since.map(|window| (window, self.out[index])),
            };
            moment.link.push(away);
            moment.all += account.bytes;
            if account.long_lived || unused {
                continue;
            }
            let writers: Vec<u32> = account.writes.iter().copied().take_while(|&w| w < q).collect();
            if writers.iter().all(|&w| self.again[w as usize].is_some()) {
                for &w in &writers {
                    wanted[w as usize] += account.bytes;
                }
                shared.push((account.bytes, writers));
            }
        }
        for (bytes, writers) in shared {
            let part = |w: &u32| {
                let latency = u128::from(self.again[*w as usize].unwrap_or(0));
                latency * u128::from(bytes) / u128::from(wanted[*w as usize].max(1))
            };
            let longest = writers.iter().filter_map(|&w| self.again[w as usize]).max().unwrap_or(0);
            let cost = u64::try_from(writers.iter().map(part).sum::<u128>()).unwrap_or(u64::MAX);
            moment.recompute.push(Recomputed { bytes, cost, longest });
        }
        moment.recompute.sort_by(|a, b| denser(b.bytes, b.cost, a.bytes, a.cost));
        moment
    }
}

/// A tensor that may be away by the link.
#[derive(Clone, Copy, Debug)]
struct Away {
    bytes: u64,
    /// The window of its copy in without any waiting, and how long that takes.
    back: (u64, u64),
    /// The same of its copy out, if it needs one.
    out: Option<(u64, u64)>,
}

/// A tensor that may be recomputed: its part of the operators' time, and the longest of them.
#[derive(Clone, Copy, Debug)]
struct Recomputed {
    bytes: u64,
    cost: u64,
    longest: u64,
}

/// An instant of the iteration.
#[derive(Clone, Debug, Default)]
struct Moment {
    link: Vec<Away>,
    /// Most bytes a nanosecond first.
    recompute: Vec<Recomputed>,
    /// All that may be away.
    all: u64,
}

impl Moment {
    /// The most bytes that can be away if the iteration takes `added` longer.
    fn away(&self, added: u64) -> u64 {
        let fits = |(window, time): (u64, u64)| time <= window.saturating_add(added);
        let able = || self.link.iter().filter(|a| fits(a.back) && a.out.is_none_or(fits));
        let back = most(able().map(|a| Part { window: a.back.0, bytes: a.bytes, time: a.back.1, left: a.back.1 }).collect(), added);
        let leaving = able().filter_map(|a| a.out.map(|(window, time)| Part { window, bytes: a.bytes, time, left: time }));
        let clean: u64 = able().filter(|a| a.out.is_none()).map(|a| a.bytes).sum();
        let out = clean + most(leaving.collect(), added);
        self.all.min(back.min(out) + self.recomputed(added))
    }

    fn recomputed(&self, added: u64) -> u64 {
        let (mut left, mut bytes) = (added, 0);
        for item in self.recompute.iter().filter(|r| r.longest <= added) {
            if item.cost > left {
                return bytes + share(item.bytes, left, item.cost);
            }
            left -= item.cost;
            bytes += item.bytes;
        }
        bytes
    }
}

/// A copy in the relaxation, of which some may be left out.
#[derive(Clone, Copy, Debug)]
struct Part {
    window: u64,
    bytes: u64,
    time: u64,
    /// Of `time`, what is still in.
    left: u64,
}

/// `bytes · part / whole`, rounded up.
fn share(bytes: u64, part: u64, whole: u64) -> u64 {
    u64::try_from((u128::from(bytes) * u128::from(part)).div_ceil(u128::from(whole.max(1)))).unwrap_or(bytes)
}

/// Compares bytes a nanosecond.
fn denser(bytes_a: u64, time_a: u64, bytes_b: u64, time_b: u64) -> Ordering {
    (u128::from(bytes_a) * u128::from(time_b)).cmp(&(u128::from(bytes_b) * u128::from(time_a)))
}

/// Orders parts so that a heap gives the least dense first.
struct LeastDense(Part);

impl Ord for LeastDense {
    fn cmp(&self, other: &Self) -> Ordering {
        denser(other.0.bytes, other.0.time, self.0.bytes, self.0.time)
    }
}
impl PartialOrd for LeastDense {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl PartialEq for LeastDense {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}
impl Eq for LeastDense {}

/// The most bytes of which the copies fit into their nested windows, each `added` longer, rounded up.
fn most(mut parts: Vec<Part>, added: u64) -> u64 {
    parts.sort_unstable_by_key(|p| p.window);
    let mut chosen = BinaryHeap::with_capacity(parts.len());
    let mut taken: u128 = 0;
    for part in parts {
        taken += u128::from(part.time);
        chosen.push(LeastDense(part));
        let room = u128::from(part.window) + u128::from(added);
        while taken > room {
            let Some(LeastDense(mut least)) = chosen.pop() else { break };
            let over = taken - room;
            if over >= u128::from(least.left) {
                taken -= u128::from(least.left);
            } else {
                least.left -= u64::try_from(over).unwrap_or(least.left);
                taken = room;
                chosen.push(LeastDense(least));
            }
        }
    }
    chosen.into_iter().map(|LeastDense(p)| share(p.bytes, p.left, p.time)).sum()
}

