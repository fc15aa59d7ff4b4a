//! Lower bounds that hold for every plan: on the peak at a given added time, and on the time at a
//! given budget.
//!
//! They show how far a plan can be from the best one. No plan need reach them.
//!
//! # The bound and its proof
//!
//! Let T be the sum of the operators' latencies and take any plan whose iteration takes at most T +
//! D. All waiting and all recomputing together then take at most D. Look at the instant τ that lies
//! θ into operator q, 0 ≤ θ < its latency. By the meaning of plans ([`crate::contract::plan`]) the
//! workspace of q and everything that q touches hold bytes at τ. So does every other tensor X that
//! is used both before and after τ (round the end of the iteration, if no operator generates it),
//! unless it is *away*. To be away it must come back before its next use n, in one of two ways:
//! 1. *By the link.* Its copy in starts after τ and ends by the start of n. From τ until then
//!    operators take tₙ − t_q − θ (t: nominal starts, plus T where n lies in the next iteration),
//!    so at most D more passes. What it copies was copied out after the end of the last write w
//!    before τ (a write costs the host copy its validity) and by τ: within t_q + θ − end_w + D. A
//!    tensor that no operator writes may have been on the host for ever. A direction carries one
//!    copy at a time, and none is faster than alone. So for the set S of tensors away by the link
//!    and for every next use n: the copies in of those of S wanted by n, together, take at most n's
//!    window; and likewise for copies out and every last write. A plan is steady, so windows that
//!    reach over the end of the iteration are as good as any. A tensor whose own copy exceeds its
//!    own window is not in S.
//! 2. *By recomputing.* Then every operator that has written X up to τ runs again, the first
//!    because it generates X and the others because a version is only made from the one before.
//!    Each takes its latency, once for all it writes: the sum over these operators is at most D. An
//!    operator that may never run again rules its tensors out.
//!
//! Let every X be away to a fraction from 0 to 1, which only allows more. Then
//! - the bytes of S are at most what the copies in allow, and at most what the copies out allow:
//!   each a linear program whose constraints are nested windows, which is solved exactly by going
//!   through the windows from the shortest and throwing out the least bytes per nanosecond whenever
//!   one overflows;
//! - an operator's latency is at least the sum of its parts if each tensor that wants it bears a
//!   part by its bytes, and with such parts (rounded down) the bytes recomputed are at most those
//!   of a fractional knapsack of size D.
//!
//! The plan is steady, and repeats with a period of at most T + D. What is used at all is used once
//! a period at least, so no window is longer than a period, in whatever order. In it all copies in
//! of S take place, and all copies out of those that are written. Where a copy is slower while both
//! directions are busy, let a and b be the times that the copies in and out would then take: with x
//! nanoseconds in which both are busy, y and z in which one is, and speeds up κ and λ times as high
//! alone, a + b = 2x + κy + λz, at most max(2, κ, λ) · (T + D). So the bytes of S are at most a
//! fractional knapsack of that size.
//!
//! So the bytes resident at τ without a plan, less both, are a lower bound on the peak. It is
//! computed at the start, the middle and the end of operators, and it is never below the floor. Any
//! set of operators gives a valid bound. Of a long job, the highest operator in each of `PARTS`
//! parts is tried, then all operators in the `CLOSE` parts with the highest bounds. Of a very long
//! job fewer are tried, so that the time stays the same (`LOOKS`). Bytes that are away are rounded
//! up; copies take the link's own times. The bound falls as D grows, so the least D at which it is
//! within a budget is a lower bound on the added time at that budget.
//!
//! # Other orders and pieces
//!
//! [`Bounds::any_order`] also holds for plans that run updates at any other place and in pieces,
//! and that make gradients later, up to their updates ([`crate::arrange::may_wait`]). It looks at
//! the job with each update as early as its dependences allow, and only at operators that run where
//! the framework has them. During those no order has fewer tensors alive: in no order does a
//! gradient die earlier, gradients that may be made late are not counted, and a later maker only
//! keeps its inputs alive longer. Windows are as long as in the order that makes them longest. A
//! use by an operator that may run elsewhere may be as late as the end of the next iteration, and
//! the last write by one as early as the start of the iteration before. Any other window grows by
//! the operators that may fall into it: those before the operator that is looked at, or all where
//! it goes round the end. What an update touches may leave in pieces, so its own copy need not fit
//! its window; nor need its states fit beside each other, so the floor counts its parameter and
//! gradient alone. Where a gradient may be made in pieces in turn with the update's
//! ([`crate::arrange::in_pieces`]), it need never be there as a whole: it does not count, nor does
//! what its makers hand on to each other, and they are taken for operators that may run elsewhere.
//!
//! Cost: O(tensors · log) for each operator that is tried, and a few dozen times that for a bound
//! on time.

mod moment;

use moment::{Copied, Moment, Recomputed, denser, rank};

use super::arrange::{in_pieces, may_wait};
use super::relax;
use super::residency::{Lifetime, Residencies};
use crate::contract::Latency;
use crate::device::Link;
use crate::job::optimizer::is_update;
use crate::job::{Graph, Operator, Replay, Role};
use crate::parallel::in_parallel;
use crate::sim::engine::{rate, work};
use crate::sim::program::Direction;
use crate::units::{Bytes, Nanos, TensorId};

/// How many parts a job is cut into, and in how many of them all operators are tried.
const PARTS: u32 = 96;
const CLOSE: usize = 4;

/// A bound is close to a plan's time where it is less than this part of it below.
const ENOUGH: u64 = 1000;

/// The number of operators tried in such a part, times the operators of the job. All of the part is
/// tried up to about twenty thousand operators.
const LOOKS: usize = 4_000_000;

/// The bounds of one job on one link.
#[derive(Clone, Debug)]
pub struct Bounds<'a> {
    latencies: Vec<Latency>,
    link: Link,
    residencies: Residencies<'a>,
    /// For each operator, the bytes resident during it without a plan.
    standing: Vec<u64>,
    /// Nominal start of each operator, and the end of the last.
    starts: Vec<u64>,
    /// For each tensor, the shortest time of its copies.
    back: Vec<u64>,
    out: Vec<u64>,
    /// For each tensor, its copies' times while both directions are busy.
    busy: Vec<(u64, u64)>,
    /// The most of such time that fits into a nanosecond, in 1024ths.
    capacity: u64,
    /// For each operator, the shortest time to run it again; `None` if it may not run again.
    again: Vec<Option<u64>>,
    /// For each tensor, the slots outside of which it can't be away.
    within: Vec<(u32, u32)>,
    /// Of the operators of a part, one in this many is tried.
    stride: usize,
    parts: Vec<Part>,
    floor: u64,
    loose: Option<Loose>,
}

/// Operators that may run elsewhere: updates, and what makes gradients for them.
#[derive(Clone, Debug)]
struct Loose {
    /// By operator: it is one of them.
    operators: Vec<bool>,
    /// By operator: what those before it take.
    before: Vec<u64>,
    /// What all of them take.
    all: u64,
    /// By tensor: an update touches it.
    touched: Vec<bool>,
    /// By tensor: an update writes it.
    written: Vec<bool>,
}

impl Loose {
    fn new(graph: &Graph, latencies: &[Latency]) -> Self {
        let mut loose = Self {
            operators: may_wait(graph),
            before: Vec::with_capacity(graph.operators.len()),
            all: 0,
            touched: vec![false; graph.tensors.len()],
            written: vec![false; graph.tensors.len()],
        };
        for (at, (operator, latency)) in graph.operators.iter().zip(latencies).enumerate() {
            loose.before.push(loose.all);
            if loose.operators[at] {
                loose.all += latency.time.0.max(1);
            }
            if is_update(operator) {
                operator.touches().into_iter().for_each(|t| loose.touched[t.index()] = true);
                operator.writes().for_each(|o| loose.written[o.tensor.index()] = true);
            }
        }
        loose
    }

    /// Whether something makes and uses a tensor, and all of that may run elsewhere.
    fn only_these(&self, lifetime: &Lifetime) -> bool {
        let mut uses = lifetime.uses.iter().map(|slot| (slot / 2) as usize);
        !lifetime.long_lived && uses.all(|at| self.operators[at])
    }

    /// The largest working set of an operator; of an update without its states.
    fn floor(graph: &Graph) -> u64 {
        let makers = in_pieces(graph);
        let makers = makers.iter().flat_map(|(_, makers)| makers);
        let made: Vec<TensorId> =
            makers.flat_map(|maker| graph.operator(*maker).generates()).map(|o| o.tensor).collect();
        let of = |operator: &Operator| {
            let update = is_update(operator);
            let held = |t: &TensorId| {
                !(update && graph.tensor(*t).role == Role::OptimizerState || made.contains(t))
            };
            let touched = operator.touches().into_iter().filter(held);
            let bytes: Bytes = touched.map(|t| graph.tensor(t).bytes.in_blocks()).sum();
            bytes.0 + operator.workspace.in_blocks().0
        };
        graph.operators.iter().map(of).max().unwrap_or(0)
    }
}

impl<'a> Bounds<'a> {
    /// The bounds of a job with these latencies on this link, for plans that keep its order.
    #[must_use]
    pub fn new(graph: &'a Graph, latencies: &[Latency], link: &Link) -> Self {
        Self::with_loose(graph, latencies, link, None)
    }

    /// The bounds for plans that may also run updates at other places and in pieces, and make
    /// gradients later. `graph` has its updates as early as they may run
    /// ([`crate::arrange::early_job`]).
    #[must_use]
    pub fn any_order(graph: &'a Graph, latencies: &[Latency], link: &Link) -> Self {
        Self::with_loose(graph, latencies, link, Some(Loose::new(graph, latencies)))
    }

    fn with_loose(
        graph: &'a Graph,
        latencies: &[Latency],
        link: &Link,
        loose: Option<Loose>,
    ) -> Self {
        let residencies = Residencies::new(graph);
        let mut standing: Vec<u64> =
            residencies.load.all().into_iter().skip(1).step_by(2).collect();
        if let Some(loose) = &loose {
            for lifetime in residencies.lifetimes.iter().filter(|of| loose.only_these(of)) {
                let ends = lifetime.uses.first().zip(lifetime.uses.last());
                let alive = ends.map_or(0..0, |(a, b)| (a / 2) as usize..(b / 2) as usize + 1);
                standing[alive].iter_mut().for_each(|standing| *standing -= lifetime.bytes);
            }
            // Where one of these runs nothing is known.
            let these = standing.iter_mut().zip(&loose.operators).filter(|(_, is)| **is);
            these.for_each(|(standing, _)| *standing = 0);
        }
        let mut starts = vec![0];
        let mut now = 0;
        for latency in latencies {
            now += latency.time.0.max(1);
            starts.push(now);
        }
        let least = |direction, bytes: Bytes| {
            let fastest = rate(link, direction, false).max(rate(link, direction, true)).max(1);
            u64::try_from(work(link, direction, bytes).div_ceil(u128::from(fastest)))
                .unwrap_or(u64::MAX / 4)
                .clamp(1, u64::MAX / 4)
        };
        let copies = |direction| graph.tensors.iter().map(|t| least(direction, t.bytes)).collect();
        let slow = |direction, bytes: Bytes| {
            let time =
                work(link, direction, bytes) / u128::from(rate(link, direction, true).max(1));
            u64::try_from(time).unwrap_or(u64::MAX / 4).min(u64::MAX / 4)
        };
        let busy = graph
            .tensors
            .iter()
            .map(|t| (slow(Direction::H2d, t.bytes), slow(Direction::D2h, t.bytes)))
            .collect();
        let faster = |direction| {
            let alone = u128::from(rate(link, direction, false)) * 1024;
            let times = alone.div_ceil(u128::from(rate(link, direction, true).max(1)));
            u64::try_from(times).unwrap_or(u64::MAX)
        };
        let capacity = faster(Direction::H2d).max(faster(Direction::D2h)).max(2048);
        let again = graph
            .operators
            .iter()
            .zip(latencies)
            .map(|(o, l)| (o.replay != Replay::Never).then_some(l.time.0.max(1)))
            .collect();
        let operators = u32::try_from(graph.operators.len()).unwrap_or(u32::MAX);
        let width = operators.div_ceil(PARTS).max(1);
        let part = |from: u32| {
            let until = operators.min(from + width);
            let highest =
                (from..until).max_by_key(|&q| (standing[q as usize], std::cmp::Reverse(q)));
            Part { from, until, highest: highest.unwrap_or(from) }
        };
        let parts = (0..operators).step_by(width as usize).map(part).collect();
        let floor = match &loose {
            Some(_) => Loose::floor(graph),
            None => crate::job::liveness::Liveness::new(graph).floor.0,
        };
        let within = |lifetime: &Lifetime| match (lifetime.uses.first(), lifetime.uses.last()) {
            _ if lifetime.bytes == 0 => (1, 0),
            _ if loose.as_ref().is_some_and(|loose| loose.only_these(lifetime)) => (1, 0),
            _ if lifetime.long_lived => (0, u32::MAX),
            (Some(&first), Some(&last)) => (first, last),
            _ => (1, 0),
        };
        let within = residencies.lifetimes.iter().map(within).collect();
        let stride = (width as usize).div_ceil((LOOKS / graph.operators.len().max(1)).max(1));
        Self {
            latencies: latencies.to_vec(),
            link: *link,
            within,
            stride,
            residencies,
            standing,
            starts,
            back: copies(Direction::H2d),
            out: copies(Direction::D2h),
            busy,
            capacity,
            again,
            parts,
            floor,
            loose,
        }
    }

    /// The floor: the largest working set of an operator.
    #[must_use]
    pub const fn floor(&self) -> Bytes {
        Bytes(self.floor)
    }

    /// A lower bound on the peak of every plan whose iteration takes at most `added` longer than
    /// the unplanned one.
    #[must_use]
    pub fn peak(&self, added: Nanos) -> Bytes {
        let mut best = self.floor;
        let mut look = |q: u32| -> u64 {
            let highest = self.resident(q, added, best);
            best = best.max(highest);
            highest
        };
        let mut seen: Vec<(u64, usize)> =
            self.parts.iter().enumerate().map(|(s, part)| (look(part.highest), s)).collect();
        seen.sort_by_key(|&(value, part)| (std::cmp::Reverse(value), part));
        for (_, part) in seen.into_iter().take(CLOSE) {
            self.parts[part].operators().step_by(self.stride).for_each(|q| {
                look(q);
            });
        }
        Bytes(best)
    }

    /// Whether every plan whose iteration takes at most `added` longer than the unplanned one is
    /// proved to have a peak above `budget`. Proofs are sought as in [`Self::peak`], and the first
    /// one ends the search.
    #[must_use]
    pub fn exceeds(&self, added: Nanos, budget: Bytes) -> bool {
        if budget.0 < self.floor {
            return true;
        }
        let look = |q: u32| self.resident(q, added, budget.0);
        let mut parts: Vec<usize> = (0..self.parts.len()).collect();
        let standing = |part: usize| self.standing(self.parts[part].highest);
        parts.sort_by_key(|&part| std::cmp::Reverse(standing(part)));
        let mut seen = Vec::with_capacity(parts.len());
        for part in parts {
            let highest = look(self.parts[part].highest);
            if highest > budget.0 {
                return true;
            }
            seen.push((highest, part));
        }
        seen.sort_by_key(|&(value, part)| (std::cmp::Reverse(value), part));
        let close = seen.into_iter().take(CLOSE).any(|(_, part)| {
            self.parts[part].operators().step_by(self.stride).any(|q| look(q) > budget.0)
        });
        let more = Nanos(added.0.saturating_add(1));
        close || self.together(budget, more, None) >= more
    }

    /// What several instants together prove that a plan adds, those of an operator among them; no
    /// more than `enough` is looked for.
    fn together(&self, budget: Bytes, enough: Nanos, proving: Option<u32>) -> Nanos {
        let (graph, late) = (self.residencies.graph, self.loose.is_some());
        relax::added(graph, &self.latencies, &self.link, budget, late, enough, proving)
    }

    /// As [`Self::iteration`], from all instants together too ([`crate::relax`]), for a plan with
    /// this time: where the bound is close to it, no better one is looked for.
    #[must_use]
    pub fn iteration_for(&self, budget: Bytes, plan: Nanos) -> Option<Nanos> {
        let (added, proving) = self.proved(budget)?;
        let total = Nanos(self.total());
        let enough = plan.saturating_sub(Nanos(plan.0 / ENOUGH)).saturating_sub(total);
        if added >= enough {
            return Some(total + added);
        }
        Some(total + added.max(self.together(budget, enough, proving)))
    }

    /// A lower bound on the iteration's time of every plan with a peak of at most `budget`; `None`
    /// if there is no such plan. It looks at one instant at a time.
    #[must_use]
    pub fn iteration(&self, budget: Bytes) -> Option<Nanos> {
        self.proved(budget).map(|(added, _)| Nanos(self.total()) + added)
    }

    /// What such a plan adds at least, and an operator that proves it.
    fn proved(&self, budget: Bytes) -> Option<(Nanos, Option<u32>)> {
        if budget.0 < self.floor {
            return None;
        }
        // What an operator proves, if that is more than `added`.
        let least = |q: u32, added: u64| -> u64 {
            let standing = self.standing(q);
            if standing <= budget.0 {
                return added;
            }
            let moment = self.moment(q);
            let enough = |added, offset| standing - moment.away(added, offset) <= budget.0;
            let from = |added, offset| least_at(added, |added| enough(added, offset));
            self.offsets(q).into_iter().fold(added, from)
        };
        // Each part that raises the bound is higher than those before it, so the last ones are
        // worth a closer look.
        let (mut added, mut best) = (0, None);
        let mut proving = Vec::new();
        for part in &self.parts {
            let least = least(part.highest, added);
            if least > added {
                (added, best) = (least, Some(part.highest));
                proving.push(part);
            }
        }
        let close = proving.into_iter().rev().take(CLOSE);
        let close: Vec<u32> =
            close.flat_map(|part| part.operators().step_by(self.stride)).collect();
        let all = in_parallel(close.len(), |at| least(close[at], added));
        for (operator, least) in close.into_iter().zip(all) {
            if least > added {
                (added, best) = (least, Some(operator));
            }
        }
        Some((Nanos(added), best))
    }

    /// The most bytes that must be resident at some instant of an operator where the iteration
    /// takes `added` longer than the unplanned one; 0 where even without a plan there are no more
    /// than `least`.
    fn resident(&self, q: u32, added: Nanos, least: u64) -> u64 {
        let standing = self.standing(q);
        if standing <= least {
            return 0;
        }
        let moment = self.moment(q);
        let resident = |offset| standing - moment.away(added.0, offset);
        self.offsets(q).into_iter().map(resident).max().unwrap_or(0)
    }

    fn total(&self) -> u64 {
        self.starts.last().copied().unwrap_or(0)
    }

    /// The bytes resident during an operator without a plan.
    fn standing(&self, q: u32) -> u64 {
        self.standing[q as usize]
    }

    /// The instants within an operator for which the bound is computed.
    fn offsets(&self, q: u32) -> Vec<u64> {
        let length = self.starts[q as usize + 1] - self.starts[q as usize];
        let mut offsets = vec![0, (length - 1) / 2, length - 1];
        offsets.dedup();
        offsets
    }

    /// Whether an update touches a tensor, and by how much windows grow that end in this iteration
    /// and that go round its end.
    fn loosened(&self, tensor: usize, q: u32) -> (bool, (u64, u64)) {
        self.loose.as_ref().map_or((false, (0, 0)), |loose| {
            (loose.touched[tensor], (loose.before[q as usize], loose.all))
        })
    }

    /// The tensors that may be away during operator `q`, and the time that this takes.
    fn moment(&self, q: u32) -> Moment {
        let (now, total) = (self.starts[q as usize], self.total());
        let slot = 2 * q + 1;
        let mut moment = Moment { period: total, width: self.capacity, ..Moment::default() };
        // For recomputing: the writers of each tensor, whose time is shared among their tensors.
        let mut shared: Vec<(u64, &[u32])> = Vec::new();
        let mut wanted = vec![0u64; self.again.len()];
        for (index, lifetime) in self.residencies.lifetimes.iter().enumerate() {
            if slot < self.within[index].0 || slot > self.within[index].1 {
                continue;
            }
            let tensor = TensorId::from_index(index);
            let (loose, more) = self.loosened(index, q);
            let until = match self.residencies.gap_over(tensor, slot) {
                Some(gap) => {
                    let next = self.residencies.operators(tensor, gap).1 as usize;
                    let n = self.starts[next];
                    if self.loose.as_ref().is_some_and(|loose| loose.operators[next]) {
                        2 * total + more.0
                    } else if n > now {
                        n + more.0
                    } else {
                        // The next use is in the next iteration.
                        n + total + more.1
                    }
                }
                // No operator uses it, so it may leave and come back at any time.
                None if lifetime.uses.is_empty() && lifetime.long_lived => now + total,
                None => continue,
            };
            let ended = |w: u32| self.starts[w as usize + 1];
            let written = lifetime.writes.partition_point(|&w| w < q);
            let since = match (written.checked_sub(1), lifetime.writes.last()) {
                _ if self.loose.as_ref().is_some_and(|loose| loose.written[index]) => {
                    Some(now + total)
                }
                (Some(last), _) => Some(now - ended(lifetime.writes[last]) + more.0),
                (None, Some(&last)) => Some(now + total - ended(last) + more.1),
                (None, None) => None,
            };
            let (bytes, back, out) = (lifetime.bytes, self.back[index], self.out[index]);
            moment.all += bytes;
            let (comes, leaves) = self.busy[index];
            moment.copied.push((bytes, comes + since.map_or(0, |_| leaves)));
            moment.back.push(Copied {
                rank: 0,
                bytes,
                time: back,
                window: until - now,
                loose,
                other: since.map(|window| (window, out)),
            });
            match since {
                Some(window) => moment.out.push(Copied {
                    rank: 0,
                    bytes,
                    time: out,
                    window,
                    loose,
                    other: Some((until - now, back)),
                }),
                None => moment.clean.push(Copied {
                    rank: 0,
                    bytes,
                    time: back,
                    window: until - now,
                    loose,
                    other: None,
                }),
            }
            let writers = &lifetime.writes[..written];
            if !lifetime.long_lived && writers.iter().all(|&w| self.again[w as usize].is_some()) {
                for &w in writers {
                    wanted[w as usize] += bytes;
                }
                shared.push((bytes, writers));
            }
        }
        rank(&mut moment.back);
        rank(&mut moment.out);
        moment.copied.sort_unstable_by(|a, b| denser(b.0, b.1, a.0, a.1).then(a.cmp(b)));
        for (bytes, writers) in shared {
            let latency = |w: &u32| self.again[*w as usize].unwrap_or(0);
            let part = |w: &u32| {
                u128::from(latency(w)) * u128::from(bytes) / u128::from(wanted[*w as usize].max(1))
            };
            let longest = writers.iter().map(latency).max().unwrap_or(0);
            let cost = u64::try_from(writers.iter().map(part).sum::<u128>()).unwrap_or(u64::MAX);
            moment.recompute.push(Recomputed { bytes, cost, longest });
        }
        moment.recompute.sort_by(|a, b| denser(b.bytes, b.cost, a.bytes, a.cost));
        moment
    }
}

/// The least value from `from` on for which `enough` holds, if it also holds for all greater
/// values; at most 2^62.
fn least_at(from: u64, enough: impl Fn(u64) -> bool) -> u64 {
    if enough(from) {
        return from;
    }
    // `enough` is false for `low` and true for `high`.
    let (mut low, mut high) = (from, from.max(1_000) * 2);
    while high < 1 << 62 && !enough(high) {
        low = high;
        high *= 2;
    }
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if enough(middle) { high = middle } else { low = middle }
    }
    high
}

/// Consecutive operators, and the one of them with most bytes.
#[derive(Clone, Copy, Debug)]
struct Part {
    from: u32,
    until: u32,
    highest: u32,
}

impl Part {
    fn operators(self) -> impl Iterator<Item = u32> {
        (self.from..self.until).filter(move |&q| q != self.highest)
    }
}
