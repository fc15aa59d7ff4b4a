//! A linear program that no plan beats: the whole iteration at once, and its best prices.
//!
//! [`crate::bound`] looks at one instant at a time. Here memory is looked at in several instants
//! together, so that a copy counts for only one of them.
//!
//! # The program
//!
//! The instants are the starts of some operators that run in the graph's order, which is the same
//! in every plan, and the ends of those that take long: what an operator works on is there at both.
//! An *interval* reaches from one to the next, and the first one from the last instant of the
//! iteration before. Take any plan and look at one of its iterations. Let wₖ be what operators wait
//! and recompute in interval k, so that the iteration takes T + Σ wₖ. Then
//! 1. *Memory*: at instant k, what is resident without a plan, less what is away, is within the
//!    budget.
//! 2. *Link*: interval k takes what its operators take, and wₖ. No more is copied in that time than
//!    the link can carry: bytes to the device and from it together at most a point of the triangle
//!    of one direction alone, the other one alone, and both.
//! 3. *Recomputing* in interval k takes at most wₖ.
//!
//! Each byte of a tensor goes its own way (`path.rs`). At an instant it is resident, and its copy
//! on the host is right or out of date, or it is away over the link, or dropped. It must be there
//! when an operator uses the tensor. It must be away where nothing generates the tensor, it lies in
//! one piece, and does not fit into the budget beside what the instant's operator needs: then none
//! of its bytes can be there. To be away it is copied out since the last write, and back before the
//! next use. A byte counts as back from the end of its own copy on, and a plan holds memory for the
//! whole tensor from the start of the copy on, so the program allows more. A dropped byte is made
//! again by every operator that wrote the tensor so far, of which each byte that it writes bears an
//! equal part, and by what those need (`needs.rs`). A tensor that nothing generates goes round: at
//! the end of the iteration its bytes are in the state in which they began.
//!
//! With updates that may run later (`late`) an update runs in any interval from its early place
//! on, within its iteration and before the next use of what it writes. Its time counts in the
//! interval in which it runs. Until then its gradient is alive, so where it runs late that
//! takes memory that the early order does not take, unless the gradient is away. Parameter, states
//! and gradient of one update run it in the same interval, in any parts of it, since it may run in
//! pieces. What several updates touch is as if none wrote it. What makes a gradient that may wait
//! ([`crate::arrange::may_wait`]) runs in any interval from its place on too; such a gradient takes
//! no memory here, and what it is made from is alive until its maker runs. The same holds for a
//! gradient that may be made in pieces.
//!
//! What a plan does is a point of this program, so its least Σ wₖ is a lower bound on the added
//! time. Left out are addresses, that most tensors leave as wholes, and most of the bytes that a
//! recompute needs.
//!
//! # Its dual
//!
//! Give memory at each instant a price λₖ, copies in each interval prices per byte, which cost cₖ
//! per nanosecond of the interval at the best use of the link, and recomputing 1 - cₖ per
//! nanosecond. For all λₖ ≥ 0 and 0 ≤ cₖ ≤ 1 the program's least value is at least
//!
//! Σ λₖ · (bytes over the budget) - Σ cₖ · (time of the interval's operators) - Σ over tensors of
//! the most that their bytes can earn on any way,
//!
//! because wₖ bears at most its own price. Any prices give a valid bound. Good ones are found by a
//! bundle method (`bundle.rs`), first with few instants, then with more, for which the same prices
//! are at least as good. Sums are made of numbers of 64 bits, in a fixed order and without
//! functions of a mathematics library, so the bound is the same on any machine. A slack is taken
//! off for their rounding.
//!
//! Cost: a step takes O(tensors that differ · instants), and the bundle's O(planes · instants)
//! times a hundred.

mod bundle;
mod course;
mod hints;
mod needs;
mod path;
#[cfg(test)]
mod tests;

pub use hints::{Guide, Hint, guide};

use std::sync::{Mutex, PoisonError};

use bundle::Found;
use course::{Group, Job};
use path::{Course, Event, Flow, Paths, Prices};

use crate::contract::Latency;
use crate::device::Link;
use crate::job::Graph;
use crate::parallel::in_parallel;
use crate::residency::Residencies;
use crate::sim::engine::rate;
use crate::sim::program::Direction;
use crate::units::{Bytes, Nanos};

/// Bytes of a MiB, in which a relaxation counts.
const MIB: f64 = 1_048_576.0;

/// A tensor that one update touches and no other.
#[derive(Clone, Debug)]
struct Member {
    course: Course,
    mib: f64,
    /// What the update does to it; `None` for what is generated and ends with the update.
    event: Option<Event>,
}

/// Updates that are alike, with their tensors.
#[derive(Clone, Debug)]
struct Unit {
    /// The first interval in which they may run, and the number of intervals from there on.
    early: usize,
    width: usize,
    /// Nanoseconds.
    time: f64,
    members: Vec<Member>,
}

/// The job at some instants, and what a plan of it may do.
#[derive(Debug)]
struct Relaxation {
    /// The parts of the iteration of which each has an instant.
    parts: u32,
    /// Starts and ends of operators, in order.
    instants: Vec<u32>,
    /// By instant, the MiB that are too much without a plan; negative where there is room.
    over: Vec<f64>,
    /// By interval, nanoseconds.
    lengths: Vec<f64>,
    /// The iteration's time, nanoseconds.
    total: f64,
    alike: course::Alike,
    link: Rates,
}

/// MiB per nanosecond.
#[derive(Clone, Copy, Debug)]
struct Rates {
    back: f64,
    back_busy: f64,
    out: f64,
    out_busy: f64,
}

impl Rates {
    fn new(link: &Link) -> Self {
        let of = |direction, busy| rate(link, direction, busy) as f64 / 1e9 / MIB;
        Self {
            back: of(Direction::H2d, false),
            back_busy: of(Direction::H2d, true),
            out: of(Direction::D2h, false),
            out_busy: of(Direction::D2h, true),
        }
    }

    /// Nanoseconds of the other direction's time that a MiB takes while both are busy.
    fn beside(self) -> (f64, f64) {
        let back = (self.back - self.back_busy) / (self.back * self.out_busy);
        let out = (self.out - self.out_busy) / (self.out * self.back_busy);
        (back.max(0.0), out.max(0.0))
    }
}

/// Memory that evaluations use again.
#[derive(Debug, Default)]
struct Memory {
    prices: Prices,
    /// By share of the tensors.
    shares: Vec<Mutex<Share>>,
}

/// What some of the tensors come to at some prices.
#[derive(Debug, Default)]
struct Share {
    value: f64,
    flow: Flow,
    paths: Paths,
    worths: Vec<f64>,
}

/// Steps of courses that one core looks at. Starting another one takes as long as some hundred.
const TOGETHER: usize = 8192;

impl Relaxation {
    /// A relaxation of a job within a budget, with an instant in each of `parts` parts; `None`
    /// where all operators are updates.
    fn new(
        residencies: &Residencies<'_>,
        latencies: &[Latency],
        link: &Link,
        rules: Rules,
        parts: u32,
    ) -> Option<Self> {
        let job = Job::new(residencies, latencies, link, rules, parts);
        if job.instants.is_empty() {
            return None;
        }
        let over = |bytes: u64| (bytes as f64 - rules.budget.0 as f64) / MIB;
        Some(Self {
            parts,
            over: job.standing().into_iter().map(over).collect(),
            lengths: job.lengths().into_iter().map(|time| time as f64).collect(),
            total: latencies.iter().map(|l| l.time.0.max(1)).sum::<u64>() as f64,
            alike: job.alike(),
            link: Rates::new(link),
            instants: job.instants,
        })
    }

    fn count(&self) -> usize {
        self.instants.len()
    }

    /// Sets prices from a point: by instant the price of memory, in the time that a MiB takes to
    /// the device; by interval the prices of time on the link while one direction is alone, to the
    /// device and from it.
    fn prices(&self, point: &[f64], prices: &mut Prices) {
        let n = self.count();
        let (beside_back, beside_out) = self.link.beside();
        let each = |of: fn(f64, f64, [f64; 4]) -> f64| -> Vec<f64> {
            let constants = [self.link.back, self.link.out, beside_back, beside_out];
            (0..n).map(|at| of(point[n + at], point[2 * n + at], constants)).collect()
        };
        prices.memory = point[..n].iter().map(|price| price / self.link.back).collect();
        prices.back = each(|a, b, [back, _, _, beside]| a / back + b * beside);
        prices.out = each(|a, b, [_, out, beside, _]| b / out + a * beside);
        let Rates { back, back_busy, out, out_busy } = self.link;
        let room = |(&to, &from): (&f64, &f64)| {
            (to * back).max(from * out).max(to * back_busy + from * out_busy)
        };
        prices.room = prices.back.iter().zip(&prices.out).map(room).collect();
        prices.again = prices.room.iter().map(|room| (1.0 - room).max(0.0)).collect();
    }

    /// The value of the relaxation at a point, and how it rises with each coordinate, both as parts
    /// of the iteration's time.
    fn value(&self, point: &[f64], rises: &mut [f64], memory: &mut Memory) -> f64 {
        let n = self.count();
        let Memory { prices, shares } = memory;
        self.prices(point, prices);
        // Sums are in a fixed order, on any number of cores.
        shares.resize_with(self.size().div_ceil(TOGETHER).max(1), Mutex::default);
        let lock = |at: usize| shares[at].lock().unwrap_or_else(PoisonError::into_inner);
        in_parallel(shares.len(), |at| {
            self.share((at, shares.len()), prices, &mut lock(at));
        });
        let mut all = lock(0);
        for at in 1..shares.len() {
            let share = lock(at);
            all.value += share.value;
            all.flow.add(&share.flow);
        }
        let Share { value, flow, .. } = &mut *all;
        for at in 0..n {
            *value += prices.memory[at] * self.over[at] - prices.room[at] * self.lengths[at];
        }
        for &(early, late, time) in &self.alike.updates {
            let width = (late as usize + n - early as usize) % n;
            let at = (0..=width).map(|by| (early as usize + by) % n);
            let best = at.max_by(|&a, &b| prices.room[a].total_cmp(&prices.room[b])).unwrap_or(0);
            *value -= time * prices.room[best];
            flow.updates[best] += time;
        }
        let (beside_back, beside_out) = self.link.beside();
        let Rates { back, out, .. } = self.link;
        for at in 0..n {
            let time = self.lengths[at] + flow.updates[at] + flow.again[at];
            rises[at] = (self.over[at] - flow.away[at]) / back / self.total;
            rises[n + at] = (flow.back[at] / back + flow.out[at] * beside_back - time) / self.total;
            rises[2 * n + at] =
                (flow.out[at] / out + flow.back[at] * beside_out - time) / self.total;
        }
        *value / self.total
    }

    /// What every `count`th group of tensors and every `count`th unit come to.
    fn share(&self, (first, count): (usize, usize), prices: &Prices, share: &mut Share) {
        let n = self.count();
        let Share { value, flow, paths, worths } = share;
        *value = 0.0;
        flow.clear(n);
        for Group { course, mib, .. } in self.alike.groups.iter().skip(first).step_by(count) {
            *value -= mib * paths.best(course, prices);
            paths.add(course, prices, None, *mib, flow);
        }
        for unit in self.alike.units.iter().skip(first).step_by(count) {
            let at = |by: usize| unit.early + by - if unit.early + by < n { 0 } else { n };
            worths.clear();
            worths.extend((0..unit.width).map(|by| unit.time * prices.room[at(by)]));
            for member in &unit.members {
                match member.event {
                    Some(event) => paths.with_updates(
                        &member.course,
                        prices,
                        event,
                        (0..unit.width).map(at),
                        worths,
                        member.mib,
                    ),
                    None => paths.until(&member.course, prices, worths, member.mib),
                }
            }
            let best =
                (0..unit.width).max_by(|&a, &b| worths[a].total_cmp(&worths[b])).unwrap_or(0);
            *value -= worths[best];
            flow.updates[at(best)] += unit.time;
            for Member { course, mib, event } in &unit.members {
                let update = match event {
                    Some(event) => {
                        let update = (at(best), *event);
                        paths.best_with(course, prices, update);
                        Some(update)
                    }
                    None => {
                        paths.walk_until(course, prices, course.steps.len() - unit.width + best);
                        None
                    }
                };
                paths.add(course, prices, update, *mib, flow);
            }
        }
    }

    /// The point of another relaxation of the same job at which this one has at least its value.
    fn point_of(&self, other: &Self, point: &[f64]) -> Vec<f64> {
        let (n, m) = (self.count(), other.count());
        let mut mine = vec![0.0; 3 * n];
        for (at, instant) in self.instants.iter().enumerate() {
            let of = other.instants.partition_point(|i| i < instant);
            if other.instants.get(of) == Some(instant) {
                mine[at] = point[of];
            }
            mine[n + at] = point[m + of % m];
            mine[2 * n + at] = point[2 * m + of % m];
        }
        mine
    }

    /// The best prices that are found from those of another relaxation with fewer instants on, or
    /// the first whose value is `enough` nanoseconds.
    fn rise(&self, from: Option<&(Self, Found)>, enough: f64) -> Found {
        let start = match from {
            Some((other, found)) => self.point_of(other, &found.point),
            None => vec![0.0; 3 * self.count()],
        };
        bundle::rise(self, start, enough / self.total)
    }

    /// What a value, a part of the iteration's time, proves that every plan adds.
    fn proved(&self, value: f64) -> Nanos {
        let added = ((value - SLACK) * self.total).max(0.0);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "at least 0, and far below 2^64"
        )]
        Nanos(added.floor() as u64)
    }

    /// What prices prove that every plan adds with so many MiB less memory.
    fn proved_for(&self, point: &[f64], less: f64) -> Nanos {
        let mut memory = Memory::default();
        let value = self.value(point, &mut vec![0.0; point.len()], &mut memory);
        // Each of these MiB is missing at every instant.
        let prices = memory.prices.memory.iter().sum::<f64>();
        self.proved(value + prices * less / self.total)
    }

    /// The size of one evaluation.
    fn size(&self) -> usize {
        let members = self.alike.units.iter().map(|unit| unit.members.len());
        let steps = self.alike.groups.iter().map(|group| group.course.steps.len());
        steps.sum::<usize>() + 4 * self.count() * members.sum::<usize>()
    }
}

/// In how many parts of the iteration memory is looked at, one after the other.
const PARTS: [u32; 4] = [6, 12, 24, FINEST];
const FINEST: u32 = 48;

/// Relaxations with larger evaluations are left out.
const SIZE: usize = 100_000;

/// This part of the iteration's time is taken off.
const SLACK: f64 = 1e-9;

/// What a relaxation takes into account.
#[derive(Clone, Copy, Debug)]
struct Rules {
    budget: Bytes,
    /// Updates may run later than in the graph.
    late: bool,
    /// What recomputes need ([`mod@needs`]).
    needs: bool,
    /// The ends of operators that take longer than the finest part are instants too: while these
    /// run, much can be copied.
    ends: bool,
    /// An operator that proves most alone: its start is an instant, and its end as of a long one.
    proving: Option<u32>,
}

/// The best prices found with one number of parts after the other, until their value is `enough`
/// nanoseconds; `None` where all operators are updates.
fn solved(
    residencies: &Residencies<'_>,
    latencies: &[Latency],
    link: &Link,
    rules: Rules,
    parts: &[u32],
    enough: f64,
) -> Option<(Relaxation, Found)> {
    let mut last: Option<(Relaxation, Found)> = None;
    for &parts in parts {
        let enough_found = |(of, found): &(Relaxation, Found)| found.value * of.total >= enough;
        if last.as_ref().is_some_and(enough_found) {
            break;
        }
        // What recomputes need seldom matters to prices, so it may count from the last number on.
        let rules = Rules { needs: rules.needs && parts == FINEST, ..rules };
        let relaxation = Relaxation::new(residencies, latencies, link, rules, parts)?;
        if last.is_some() && relaxation.size() > SIZE {
            break;
        }
        let found = relaxation.rise(last.as_ref(), enough);
        last = Some((relaxation, found));
    }
    last
}

/// A lower bound on what any plan within a budget adds to the iteration of `graph`. With `late` it
/// also holds for plans that run updates, and make their gradients, later than in the graph. The
/// search ends at `enough`.
#[must_use]
pub fn added(
    graph: &Graph,
    latencies: &[Latency],
    link: &Link,
    budget: Bytes,
    late: bool,
    enough: Nanos,
    proving: Option<u32>,
) -> Nanos {
    let (rules, enough) =
        (Rules { budget, late, needs: true, ends: true, proving }, enough.0 as f64);
    let residencies = Residencies::new(graph);
    let Some(solved) = solved(&residencies, latencies, link, rules, &PARTS, enough) else {
        return Nanos::ZERO;
    };
    let (of, found) = &solved;
    let mut value = found.value;
    if value * of.total < enough && of.parts < FINEST {
        let more = Relaxation::new(&residencies, latencies, link, rules, of.parts);
        let more = more.filter(|more| more.size() <= SIZE);
        let risen = more.map(|more| more.rise(Some(&solved), enough).value);
        value = risen.unwrap_or(value).max(value);
    }
    of.proved(value)
}
