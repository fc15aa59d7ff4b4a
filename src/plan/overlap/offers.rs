//! The choices of a job: its plans, and the ways to divide each into its own part and the window.

use std::cmp::Reverse;
use std::sync::Arc;

use crate::budget::{PlanError, Planned, Request};
use crate::job::liveness::Liveness;
use crate::place::{self, Item};
use crate::sim::engine;
use crate::sim::program::Begin;
use crate::together::Memo;
use crate::units::{Bytes, Nanos, scaled};

/// The number of arenas for which each job is planned, besides its smallest.
const LEVELS: u64 = 8;

/// The number of heights at which a plan is divided.
const PARTS: u64 = 10;

/// The items of a plan that go into the window, the loads of window and own part, and how long the
/// window is held.
pub(super) struct Offer {
    /// The number of the job's plan.
    pub(super) pick: usize,
    pub(super) shared: Vec<bool>,
    pub(super) own: u64,
    pub(super) window: u64,
    pub(super) held: u64,
}

/// A plan of a job.
pub(super) struct Choice {
    pub(super) planned: Arc<Planned>,
    /// The items that get an offset, with their residencies, in the run without noise.
    pub(super) items: Vec<(Item, Vec<usize>)>,
    /// The lives of all residencies.
    lives: Vec<(Nanos, Nanos)>,
    /// The instants to which the positions in spans refer.
    times: Vec<Nanos>,
    /// The load from each instant on.
    load: Vec<u64>,
}

impl Choice {
    fn new(planned: Arc<Planned>) -> Self {
        let (program, run) = (&planned.program, &planned.run);
        let lives: Vec<(Nanos, Nanos)> =
            program.residencies.iter().map(|r| engine::life(r, run)).collect();
        let mut times: Vec<Nanos> =
            lives.iter().flat_map(|l| [l.0, l.1]).chain([Nanos::ZERO]).collect();
        times.sort();
        times.dedup();
        let rank =
            |at: Nanos| u32::try_from(times.partition_point(|t| *t < at)).unwrap_or(u32::MAX);
        let last = u32::try_from(times.len()).unwrap_or(u32::MAX);
        let items = place::tied(program, |index, r| {
            let from = rank(lives[index].0);
            (from, if r.stays { last } else { rank(lives[index].1).max(from + 1) })
        });
        let mut choice = Self { planned, items, lives, load: vec![0; times.len()], times };
        choice.load = choice.loads(|_| true);
        choice
    }

    /// Whether an item begins and ends within the iteration.
    fn passes(&self, item: usize) -> bool {
        let r = &self.planned.program.residencies[self.items[item].1[0]];
        r.begin != Begin::Iteration && !r.stays
    }

    /// An item's first span. One that begins and ends within the iteration has only this one.
    fn span(&self, item: usize) -> (usize, usize) {
        let (from, until) = self.items[item].0.spans[0];
        (from as usize, until as usize)
    }

    pub(super) fn time(&self) -> u64 {
        self.planned.run.iteration.0
    }

    /// The load of some items from each instant on.
    fn loads(&self, of: impl Fn(usize) -> bool) -> Vec<u64> {
        let count = self.times.len();
        let (mut begins, mut ends) = (vec![0u64; count + 1], vec![0u64; count + 1]);
        for (_, (item, _)) in self.items.iter().enumerate().filter(|(i, _)| of(*i)) {
            for &(from, until) in &item.spans {
                begins[from as usize] += item.bytes;
                ends[until as usize] += item.bytes;
            }
        }
        let next = |level: &mut u64, t: usize| {
            *level = *level + begins[t] - ends[t];
            Some(*level)
        };
        (0..count).scan(0, next).collect()
    }

    /// The time from an instant to the next, in nanoseconds.
    fn length(&self, t: usize) -> u64 {
        self.times.get(t + 1).map_or(0, |next| (*next - self.times[t]).0)
    }

    /// The ways to divide the plan. The first one needs no window.
    pub(super) fn offers(&self, pick: usize) -> Vec<Offer> {
        let all = highest(&self.load).1;
        let least = highest(&self.loads(|i| !self.passes(i))).1;
        let part = |k: u64| least + scaled(all - least, k, PARTS);
        let shared = vec![false; self.items.len()];
        let mut offers = vec![Offer { pick, shared, own: all, window: 0, held: 0 }];
        offers.extend((0..PARTS).rev().filter_map(|k| self.offer(pick, part(k))));
        offers
    }

    /// Divides the plan so that the load of its own part is at most `target`. The job holds the
    /// window while its load is above that, and longer if that is necessary to find enough items
    /// that begin and end while it holds the window. `None` if there are not enough.
    fn offer(&self, pick: usize, target: u64) -> Option<Offer> {
        let count = self.times.len();
        let mut inside: Vec<bool> = self.load.iter().map(|&load| load > target).collect();
        let fits = loop {
            let mut outside = vec![0usize; count + 1];
            for t in 0..count {
                outside[t + 1] = outside[t] + usize::from(!inside[t]);
            }
            let within = |(from, until): (usize, usize)| outside[from] == outside[until];
            let fits = |i: usize| self.passes(i) && within(self.span(i));
            let fits: Vec<bool> = (0..self.items.len()).map(fits).collect();
            let own = self.loads(|i| !fits[i]);
            let (at, load) = highest(&own);
            if load <= target {
                break fits;
            }
            // The choice that costs the least additional time for the bytes above the target.
            let mut best: Option<(u128, u128, usize)> = None;
            for (i, (item, _)) in self.items.iter().enumerate() {
                let (from, until) = self.span(i);
                let may = self.passes(i) && !fits[i] && item.bytes > 0;
                if !may || !(from..until).contains(&at) {
                    continue;
                }
                let outside = (from..until).filter(|&t| !inside[t]);
                let longer = u128::from(outside.map(|t| self.length(t)).sum::<u64>());
                let given = u128::from(item.bytes.min(load - target));
                if best.is_none_or(|(l, g, _)| longer * g < l * given) {
                    best = Some((longer, given, i));
                }
            }
            let (from, until) = self.span(best?.2);
            inside[from..until].fill(true);
        };
        // Only as many items as necessary go into the window, those with the shortest lifetimes
        // first.
        let life = |i: usize| {
            let (from, until) = self.lives[self.items[i].1[0]];
            until - from
        };
        let bytes = |i: usize| self.items[i].0.bytes;
        let mut order: Vec<usize> = (0..fits.len()).filter(|&i| fits[i] && bytes(i) > 0).collect();
        order.sort_by_key(|&i| (life(i), Reverse(bytes(i)), i));
        let (mut own, mut shared) = (self.load.clone(), vec![false; fits.len()]);
        loop {
            let (at, load) = highest(&own);
            if load <= target {
                break;
            }
            let lies = |&&i: &&usize| {
                let (from, until) = self.span(i);
                !shared[i] && (from..until).contains(&at)
            };
            let &moves = order.iter().find(lies)?;
            shared[moves] = true;
            let (from, until) = self.span(moves);
            own[from..until].iter_mut().for_each(|load| *load -= bytes(moves));
        }
        let window = self.loads(|i| shared[i]);
        let held = (0..count).filter(|&t| window[t] > 0).map(|t| self.length(t)).sum();
        Some(Offer { pick, shared, own: highest(&own).1, window: highest(&window).1, held })
    }
}

/// The first instant with the largest load, and that load.
fn highest(loads: &[u64]) -> (usize, u64) {
    let first = (0..loads.len()).max_by_key(|&t| (loads[t], Reverse(t)));
    first.map_or((0, 0), |t| (t, loads[t]))
}

/// A job's plans, from the largest arena to the smallest.
pub(super) fn choices(
    request: &Request<'_>,
    least: bool,
    memo: &Memo,
) -> Result<Vec<Choice>, PlanError> {
    let whole = memo.unplanned(request)?;
    let (top, floor) = (whole.plan.figures.arena_bytes.0, Liveness::new(request.graph).floor.0);
    let mut all = vec![Choice::new(whole)];
    let mut add = |planned: Arc<Planned>| {
        if !all.iter().any(|other| other.planned.plan.figures == planned.plan.figures) {
            all.push(Choice::new(planned));
        }
    };
    let mut most = top;
    for level in (1..LEVELS).rev() {
        let budget = Bytes(floor + scaled(top.saturating_sub(floor), level, LEVELS));
        let made = memo.plan(&Request { budget, ..request.clone() })?;
        let Ok(planned) = made else { break };
        most = planned.plan.figures.arena_bytes.0;
        add(planned);
    }
    if least && let Ok(planned) = memo.least(request, Bytes(most))? {
        add(planned);
    }
    Ok(all)
}
