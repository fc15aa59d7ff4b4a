//! What a job may have of its own and in the window: its plans, and the ways to divide each.

use std::collections::BTreeMap;

use crate::budget::{PlanError, Planned, Request};
use crate::contract::Place;
use crate::global::Memo;
use crate::job::liveness::Liveness;
use crate::place::Item;
use crate::sim::engine;
use crate::sim::program::Begin;
use crate::units::{Bytes, Nanos};

/// How many arenas each job is planned for, besides its least.
const LEVELS: u64 = 8;

/// Into how many parts what of a plan can be shared is cut.
const PARTS: u64 = 10;

/// Something of a job that gets an offset, with its life in the noiseless run.
pub(super) struct Shape {
    pub(super) item: Item,
    pub(super) residencies: Vec<usize>,
    /// How long it lives.
    pub(super) life: u64,
    /// It begins and ends within the iteration.
    pub(super) passes: bool,
}

impl Shape {
    /// Its first span, which is the only one of what passes.
    pub(super) fn span(&self) -> (usize, usize) {
        self.item.spans.first().map_or((0, 0), |&(from, until)| (from as usize, until as usize))
    }
}

/// What there is to place of a job.
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
            // A tensor that leaves and comes back to stay has one place.
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

/// Which shapes of a plan go into the window, the loads of both, and for how long it is held.
pub(super) struct Offer {
    /// Which of the job's plans.
    pub(super) pick: usize,
    pub(super) shared: Vec<bool>,
    pub(super) own: u64,
    pub(super) window: u64,
    pub(super) held: u64,
}

/// A plan that a job may have.
pub(super) struct Choice {
    pub(super) planned: Planned,
    pub(super) shapes: Vec<Shape>,
    /// The instants that spans count.
    pub(super) times: Vec<Nanos>,
    /// Bytes from each instant on.
    pub(super) load: Vec<u64>,
}

impl Choice {
    fn new(planned: Planned) -> Self {
        let (shapes, times) = shapes(&planned);
        let mut choice = Self { planned, shapes, load: vec![0; times.len()], times };
        choice.load = choice.loads(|_| true);
        choice
    }

    pub(super) fn time(&self) -> u64 {
        self.planned.run.iteration.0
    }

    /// Bytes of some shapes from each instant on.
    fn loads(&self, of: impl Fn(usize) -> bool) -> Vec<u64> {
        let (mut begins, mut ends) =
            (vec![0u64; self.times.len() + 1], vec![0u64; self.times.len() + 1]);
        for (_, shape) in self.shapes.iter().enumerate().filter(|(i, _)| of(*i)) {
            for &(from, until) in &shape.item.spans {
                begins[from as usize] += shape.item.bytes;
                ends[until as usize] += shape.item.bytes;
            }
        }
        let mut level = 0;
        (0..self.times.len())
            .map(|t| {
                level = level + begins[t] - ends[t];
                level
            })
            .collect()
    }

    /// From an instant to the next, in nanoseconds.
    fn length(&self, t: usize) -> u64 {
        self.times.get(t + 1).map_or(0, |next| (*next - self.times[t]).0)
    }

    /// Ways to divide it, the first of which needs no window.
    pub(super) fn offers(&self, pick: usize) -> Vec<Offer> {
        let most = |loads: Vec<u64>| loads.into_iter().max().unwrap_or(0);
        let (all, least) = (most(self.load.clone()), most(self.loads(|i| !self.shapes[i].passes)));
        let part = |k: u64| {
            least
                + u64::try_from(u128::from(all - least) * u128::from(k) / u128::from(PARTS))
                    .unwrap_or(0)
        };
        let none =
            Offer { pick, shared: vec![false; self.shapes.len()], own: all, window: 0, held: 0 };
        std::iter::once(none)
            .chain((0..PARTS).rev().filter_map(|k| self.offer(pick, part(k))))
            .collect()
    }

    /// Keeps the load of its own part at or below a target: the window is held where the load is
    /// higher, and as much longer as it takes to have enough in it that begins and ends while it is
    /// held. `None` if nothing does.
    fn offer(&self, pick: usize, target: u64) -> Option<Offer> {
        let count = self.times.len();
        let mut inside: Vec<bool> = self.load.iter().map(|&load| load > target).collect();
        let fits = loop {
            let mut outside = vec![0usize; count + 1];
            for t in 0..count {
                outside[t + 1] = outside[t] + usize::from(!inside[t]);
            }
            let fits: Vec<bool> = self
                .shapes
                .iter()
                .map(|s| s.passes && outside[s.span().0] == outside[s.span().1])
                .collect();
            let own = self.loads(|i| !fits[i]);
            let (at, load) = highest(&own);
            if load <= target {
                break fits;
            }
            // The job that takes the least additional time for the bytes that are too many.
            let mut best: Option<(u128, u128, usize)> = None;
            for (i, shape) in self
                .shapes
                .iter()
                .enumerate()
                .filter(|(i, s)| s.passes && !fits[*i] && s.item.bytes > 0)
            {
                let (from, until) = shape.span();
                if !(from..until).contains(&at) {
                    continue;
                }
                let longer: u64 =
                    (from..until).filter(|&t| !inside[t]).map(|t| self.length(t)).sum();
                let (longer, given) =
                    (u128::from(longer), u128::from(shape.item.bytes.min(load - target)));
                if best.is_none_or(|(l, g, _)| longer * g < l * given) {
                    best = Some((longer, given, i));
                }
            }
            let (from, until) = self.shapes[best?.2].span();
            inside[from..until].fill(true);
        };
        // Of what could be in the window only as much as is needed, the shortest lives first.
        let mut order: Vec<usize> =
            (0..self.shapes.len()).filter(|&i| fits[i] && self.shapes[i].item.bytes > 0).collect();
        order.sort_by_key(|&i| {
            (self.shapes[i].life, std::cmp::Reverse(self.shapes[i].item.bytes), i)
        });
        let (mut own, mut shared) = (self.load.clone(), vec![false; self.shapes.len()]);
        loop {
            let (at, load) = highest(&own);
            if load <= target {
                break;
            }
            let moves = order.iter().copied().find(|&i| {
                !shared[i] && (self.shapes[i].span().0..self.shapes[i].span().1).contains(&at)
            })?;
            shared[moves] = true;
            let (from, until) = self.shapes[moves].span();
            own[from..until].iter_mut().for_each(|load| *load -= self.shapes[moves].item.bytes);
        }
        let window = self.loads(|i| shared[i]);
        let held = (0..count).filter(|&t| window[t] > 0).map(|t| self.length(t)).sum();
        Some(Offer { pick, shared, own: highest(&own).1, window: highest(&window).1, held })
    }
}

fn highest(loads: &[u64]) -> (usize, u64) {
    loads
        .iter()
        .enumerate()
        .fold((0, 0), |most, (t, &load)| if load > most.1 { (t, load) } else { most })
}

/// A job's plans, from that which needs most to that which needs least.
pub(super) fn choices(
    request: &Request<'_>,
    least: bool,
    memo: &mut Memo,
) -> Result<Vec<Choice>, PlanError> {
    let whole = memo.unplanned(request)?;
    let (top, floor) = (whole.plan.figures.arena_bytes.0, Liveness::of(request.graph).floor.0);
    let mut all = vec![Choice::new(whole)];
    let mut add = |planned: Planned| {
        if !all.iter().any(|other| other.planned.plan.figures == planned.plan.figures) {
            all.push(Choice::new(planned));
        }
    };
    let mut most = top;
    for level in (1..LEVELS).rev() {
        let target = floor
            + u64::try_from(
                u128::from(top.saturating_sub(floor)) * u128::from(level) / u128::from(LEVELS),
            )
            .unwrap_or(0);
        match memo.plan(&Request { budget: Bytes(target), ..request.clone() })? {
            Ok(planned) => {
                most = planned.plan.figures.arena_bytes.0;
                add(planned);
            }
            Err(_) => break,
        }
    }
    if least && let Ok(planned) = memo.least(request, Bytes(most))? {
        add(planned);
    }
    Ok(all)
}
