//! The choices of a job: its plans, and the ways to divide each into its own part and the window.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;

use crate::budget::{PlanError, Planned, Request};
use crate::compact::CompactSort;
use crate::contract::Place;
use crate::job::liveness::Liveness;
use crate::place::Item;
use crate::sim::engine;
use crate::sim::program::Begin;
use crate::together::Memo;
use crate::units::{Bytes, Nanos, scaled};

/// The number of arenas for which each job is planned, besides its smallest.
const LEVELS: u64 = 8;

/// The number of heights at which a plan is divided.
const PARTS: u64 = 10;

/// An item of a job that gets an offset, with its lifetime in the run without noise.
pub(super) struct Shape {
    pub(super) item: Item,
    pub(super) residencies: Vec<usize>,
    /// Its lifetime in nanoseconds.
    pub(super) life: u64,
    /// Whether it begins and ends within the iteration.
    pub(super) passes: bool,
}

impl Shape {
    /// Its first span. An item that begins and ends within the iteration has only this one.
    pub(super) fn span(&self) -> (usize, usize) {
        self.item.spans.first().map_or((0, 0), |&(from, until)| (from as usize, until as usize))
    }
}

/// The items of a job's plan that get an offset.
fn shapes(part: &Planned) -> (Vec<Shape>, Vec<Nanos>) {
    let lives: Vec<(Nanos, Nanos)> =
        part.program.residencies.iter().map(|r| engine::life(r, &part.run)).collect();
    let mut times: Vec<Nanos> =
        lives.iter().flat_map(|l| [l.0, l.1]).chain([Nanos::ZERO]).collect();
    times.sort_unstable();
    times.dedup();
    let rank = |at: Nanos| u32::try_from(times.partition_point(|t| *t < at)).unwrap_or(u32::MAX);
    let last = u32::try_from(times.len()).unwrap_or(u32::MAX);
    let mut starts: BTreeMap<Place, usize> = BTreeMap::new();
    let mut shapes: Vec<Shape> = Vec::with_capacity(lives.len());
    for (index, (r, &(begin, end))) in part.program.residencies.iter().zip(&lives).enumerate() {
        let from = rank(begin);
        let until = if r.stays { last } else { rank(end).max(from + 1) };
        match starts.get(&r.place) {
            // A tensor that leaves and comes back to stay has one address for both residencies.
            Some(&first) if r.stays => {
                shapes[first].item.spans.push((from, until));
                shapes[first].residencies.push(index);
            }
            _ => {
                if r.begin == Begin::Iteration {
                    starts.insert(r.place, shapes.len());
                }
                shapes.push(Shape {
                    item: Item::new(r.bytes.0, vec![(from, until)]),
                    residencies: vec![index],
                    life: (end - begin).0,
                    passes: r.begin != Begin::Iteration && !r.stays,
                });
            }
        }
    }
    (shapes, times)
}

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
    pub(super) shapes: Vec<Shape>,
    /// The instants to which the positions in spans refer.
    pub(super) times: Vec<Nanos>,
    /// The load from each instant on.
    pub(super) load: Vec<u64>,
}

impl Choice {
    fn new(planned: Arc<Planned>) -> Self {
        let (shapes, times) = shapes(&planned);
        let mut choice = Self { planned, shapes, load: vec![0; times.len()], times };
        choice.load = choice.loads(|_| true);
        choice
    }

    pub(super) fn time(&self) -> u64 {
        self.planned.run.iteration.0
    }

    /// The load of some items from each instant on.
    fn loads(&self, of: impl Fn(usize) -> bool) -> Vec<u64> {
        let count = self.times.len();
        let (mut begins, mut ends) = (vec![0u64; count + 1], vec![0u64; count + 1]);
        for (_, shape) in self.shapes.iter().enumerate().filter(|(i, _)| of(*i)) {
            for &(from, until) in &shape.item.spans {
                begins[from as usize] += shape.item.bytes;
                ends[until as usize] += shape.item.bytes;
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
        let least = highest(&self.loads(|i| !self.shapes[i].passes)).1;
        let part = |k: u64| least + scaled(all - least, k, PARTS);
        let shared = vec![false; self.shapes.len()];
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
            let within = |s: &Shape| outside[s.span().0] == outside[s.span().1];
            let fits: Vec<bool> = self.shapes.iter().map(|s| s.passes && within(s)).collect();
            let own = self.loads(|i| !fits[i]);
            let (at, load) = highest(&own);
            if load <= target {
                break fits;
            }
            // The choice that costs the least additional time for the bytes above the target.
            let mut best: Option<(u128, u128, usize)> = None;
            for (i, shape) in self.shapes.iter().enumerate() {
                let (from, until) = shape.span();
                let may = shape.passes && !fits[i] && shape.item.bytes > 0;
                if !may || !(from..until).contains(&at) {
                    continue;
                }
                let outside = (from..until).filter(|&t| !inside[t]);
                let longer = u128::from(outside.map(|t| self.length(t)).sum::<u64>());
                let given = u128::from(shape.item.bytes.min(load - target));
                if best.is_none_or(|(l, g, _)| longer * g < l * given) {
                    best = Some((longer, given, i));
                }
            }
            let (from, until) = self.shapes[best?.2].span();
            inside[from..until].fill(true);
        };
        // Only as many items as necessary go into the window, those with the shortest lifetimes
        // first.
        let mut order: Vec<usize> =
            (0..self.shapes.len()).filter(|&i| fits[i] && self.shapes[i].item.bytes > 0).collect();
        order
            .compact_sort_by_key(|&i| (self.shapes[i].life, Reverse(self.shapes[i].item.bytes), i));
        let (mut own, mut shared) = (self.load.clone(), vec![false; self.shapes.len()]);
        loop {
            let (at, load) = highest(&own);
            if load <= target {
                break;
            }
            let lies = |&&i: &&usize| {
                let (from, until) = self.shapes[i].span();
                !shared[i] && (from..until).contains(&at)
            };
            let &moves = order.iter().find(lies)?;
            shared[moves] = true;
            let (from, until) = self.shapes[moves].span();
            own[from..until].iter_mut().for_each(|load| *load -= self.shapes[moves].item.bytes);
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
    let (top, floor) = (whole.plan.figures.arena_bytes.0, Liveness::of(request.graph).floor.0);
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
