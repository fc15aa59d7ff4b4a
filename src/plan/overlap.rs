//! Several jobs that share bytes: each has a part of the arena of its own and all have a window together, which they hold in turn
//! ([`crate::schedule::plan`], "The window").
//!
//! What a job has resident round its iteration's boundary is its own for good; most of the rest is there for a part of the iteration only, and other jobs may
//! use the same bytes meanwhile: what is saved are bytes of all jobs but one, what is paid is waiting. (Salus, its GPU lanes, lets whole ephemeral regions
//! pass from job to job at iteration boundaries; here it is the stretch about the peak, and it passes at operator boundaries.)
//!
//! The search: each job is planned for some arenas of its own, from what it needs unplanned to the least. Each of these plans is divided at some heights: the window is held
//! where its load is higher, and as much longer as it takes to find enough that begins and ends while it is held. Then, for some sizes of the window, every job takes the
//! quickest plan and division, and gives way to one with a smaller part where that costs least, until parts and window fit ([`super::global`] does the same without a
//! window); once counting the time for which the window is held, for which others may have to wait, and once not. What fits is simulated side by side with everybody's waiting, and the
//! quickest is taken, be it the plan without a window. A job's timeline alone does not change by sharing: lives are those of its noiseless run, so bytes pass from hand to
//! hand in an order that this run keeps to, and that can therefore not be a circle.
//! Cost: `LEVELS` plans of each job, and some hundred simulations of some iterations.
//!
//! Not for: deciding what is swapped; lanes and policies ([`super::lane`]).

use std::collections::{BTreeMap, BTreeSet};

use super::budget::{self, Infeasible, PlanError, Planned, Request};
use super::global::{self, Jobs, Together};
use super::method::Method;
use super::place::{self, Item};
use crate::device::{Profile, roofline};
use crate::job::liveness::Liveness;
use crate::schedule::{Place, Placement, Plan, Window};
use crate::sim::engine::{self, Durations, Run};
use crate::sim::program::{Begin, Program};
use crate::sim::together::{Shared, Work};
use crate::sim::window;
use crate::units::{Bytes, Nanos, OpId};

/// How many arenas each job is planned for, besides its least.
const LEVELS: u64 = 8;

/// How many sizes of the window are tried.
const SIZES: usize = 10;

/// Into how many parts what of a plan can be shared is cut.
const PARTS: u64 = 10;

/// How much of the time for which a plan holds the window counts as lost to others, in parts of four.
const HOLDING: [u64; 2] = [0, 2];

/// How often parts are made smaller because placing them took more than their loads.
const RETRIES: usize = 4;

/// For what part of an iteration the window has to be empty to be handed over within it, one over this; not at all, where there is none.
const GAPS: [Option<u64>; 3] = [None, Some(64), Some(u64::MAX)];

/// How many iterations every job runs in a simulation.
const ROUNDS: usize = 5;

/// And how many at most, waiting for slower ones.
const MOST: usize = 64;

/// A plan of several jobs, with or without a window.
#[derive(Clone, Debug)]
pub struct Overlapped {
    /// The plan. Arenas of the jobs' own plans are what they have of their own.
    pub together: Together,
    /// Mean iteration of each job side by side with the others, all busy.
    pub beside: Vec<Nanos>,
    /// The same with a sub-arena for each; `None` where the budget is too small for that.
    pub apart: Option<Vec<Nanos>>,
    /// For how long each job holds the window in an iteration alone.
    pub held: Vec<Nanos>,
}

impl Overlapped {
    /// What the jobs share, if anything.
    #[must_use]
    pub fn window(&self) -> Option<&Window> {
        self.together.plan.jobs.iter().find_map(|job| job.window.as_ref())
    }
}

/// Makes one plan of all jobs within the budget, in which they share bytes where that is quicker than not to, or the only way.
///
/// # Errors
/// [`PlanError::Infeasible`] when there is none to be found.
pub fn make(jobs: &Jobs<'_>) -> Result<Overlapped, PlanError> {
    let (mut best, refused) = match global::make(jobs) {
        Ok(together) => {
            let times = beside(jobs, &together.plan)?;
            let held = vec![Nanos::ZERO; times.len()];
            (Some(Overlapped { together, apart: Some(times.clone()), beside: times, held }), None)
        }
        Err(PlanError::Infeasible(no)) => (None, Some(no)),
        Err(defect) => return Err(defect),
    };
    // Where nothing is moved or made again, nothing is to be gained.
    if best.as_ref().is_some_and(|b| b.together.plan.jobs.iter().all(|job| job.events.is_empty())) {
        return best.ok_or_else(|| none(jobs, None, u64::MAX));
    }
    let mut lowest = u64::MAX;
    for devices in [vec![jobs.device.clone(); jobs.jobs.len()], global::shares(jobs)] {
        let options = Options::new(jobs, &devices, best.is_none())?;
        let pinned = options.search(&mut best, &mut lowest)?;
        if !pinned {
            break;
        }
    }
    best.ok_or_else(|| none(jobs, refused, lowest))
}

/// Makes the plan with the least arena that is found.
///
/// # Errors
/// [`PlanError::Infeasible`] when a job can't even be placed unplanned within the budget.
pub fn minimum(jobs: &Jobs<'_>) -> Result<Overlapped, PlanError> {
    let apart = global::minimum(jobs)?.plan.figures.arena_bytes;
    let devices = global::shares(jobs);
    let shared = Options::new(jobs, &devices, true)?.least()?;
    let mut made = make(&Jobs { budget: shared.map_or(apart, |shared| apart.min(Bytes(shared))), ..jobs.clone() })?;
    made.together.plan.budget = made.together.plan.figures.arena_bytes;
    Ok(made)
}

fn none(jobs: &Jobs<'_>, refused: Option<Box<Infeasible>>, lowest: u64) -> PlanError {
    let nothing = Infeasible { budget: jobs.budget, floor: Bytes::ZERO, lowest: Bytes(lowest), blocked: String::new() };
    let mut no = refused.unwrap_or_else(|| Box::new(nothing));
    no.lowest = no.lowest.min(Bytes(lowest)).max(jobs.budget + Bytes(1));
    no.blocked += "; nor does a window to share make up for it";
    PlanError::Infeasible(no)
}

fn defect(error: impl ToString) -> PlanError {
    PlanError::Defect(error.to_string())
}

/// Times relative to the jobs' own unplanned ones, by priority, in millionths.
fn cost(jobs: &Jobs<'_>, plan: &Plan, times: &[Nanos]) -> u128 {
    let all = jobs.jobs.iter().zip(&plan.jobs).zip(times).map(|((job, planned), time)| {
        let unplanned: u128 = planned.latencies.iter().map(|l| u128::from(l.time.0)).sum();
        u128::from(time.0) * u128::from(job.priority.max(1)) * 1000 / unplanned.max(1)
    });
    all.sum()
}

fn programs(jobs: &Jobs<'_>, plan: &Plan) -> Result<Vec<Program>, PlanError> {
    jobs.jobs.iter().zip(&plan.jobs).map(|(job, planned)| Program::placed(job.graph, planned).map_err(defect)).collect()
}

/// The mean iteration of each job while all run side by side.
fn beside(jobs: &Jobs<'_>, plan: &Plan) -> Result<Vec<Nanos>, PlanError> {
    let link = &jobs.device.link;
    let programs = programs(jobs, plan)?;
    let durations: Vec<Durations> = programs.iter().map(|program| Durations::nominal(program, link)).collect();
    let utilisation: Vec<u32> =
        jobs.jobs.iter().map(|job| roofline::utilisation(&job.graph.operators, job.latencies, jobs.device)).collect();
    let work = |job: usize| Work { program: &programs[job], durations: &durations[job], utilisation: utilisation[job] };
    let mut device = Shared::new(link);
    (0..programs.len()).for_each(|job| device.begin(job, work(job)));
    let mut times: Vec<Vec<u64>> = vec![Vec::new(); programs.len()];
    while times.iter().any(|t| t.len() < ROUNDS) {
        let Some((job, run)) = device.until(Nanos(u64::MAX)).map_err(defect)? else { break };
        times[job].push(run.iteration.0);
        if times[job].len() < MOST {
            device.begin(job, work(job));
        }
    }
    // The first finds everybody at the start, which is rare.
    let mean = |times: &Vec<u64>| {
        let counted = &times[times.len().min(1)..];
        let sum: u128 = counted.iter().map(|&t| u128::from(t)).sum();
        Nanos(u64::try_from(sum / (counted.len() as u128).max(1)).unwrap_or(u64::MAX))
    };
    Ok(times.iter().map(mean).collect())
}

/// How long each job alone holds the window.
fn held(jobs: &Jobs<'_>, plan: &Plan) -> Result<Vec<Nanos>, PlanError> {
    let held = |program: &Program| {
        let run = engine::nominal(program, &jobs.device.link).map_err(defect)?;
        let mut stretches: BTreeMap<usize, (Nanos, Nanos)> = BTreeMap::new();
        for r in &program.residencies {
            let stretch = match r.begin {
                Begin::Iteration => None,
                Begin::Step(s) => program.stretches.step(s),
                Begin::Copy(c) => program.stretches.copy(c),
            };
            let Some(stretch) = stretch.filter(|_| inside(plan, r.offset)) else { continue };
            let (from, until) = engine::life(r, &run);
            let all = stretches.entry(stretch).or_insert((from, until));
            *all = (all.0.min(from), all.1.max(until));
        }
        Ok(stretches.values().map(|(from, until)| until.saturating_sub(*from)).sum())
    };
    programs(jobs, plan)?.iter().map(held).collect()
}

fn inside(plan: &Plan, offset: Option<Bytes>) -> bool {
    let window = plan.jobs.iter().find_map(|job| job.window.as_ref());
    window.zip(offset).is_some_and(|(w, o)| o >= w.offset && o < w.offset + w.bytes)
}

/// Something of a job that gets an offset, with its life in the noiseless run.
struct Shape {
    item: Item,
    residencies: Vec<usize>,
    /// How long it lives.
    life: u64,
    /// It begins and ends within the iteration.
    passes: bool,
}

impl Shape {
    /// Its first span, which is the only one of what passes.
    fn span(&self) -> (usize, usize) {
        self.item.spans.first().map_or((0, 0), |&(from, until)| (from as usize, until as usize))
    }
}

/// What there is to place of a job.
fn shapes(part: &Planned) -> (Vec<Shape>, Vec<Nanos>) {
    let lives: Vec<(Nanos, Nanos)> = part.program.residencies.iter().map(|r| engine::life(r, &part.run)).collect();
    let mut times: Vec<Nanos> = lives.iter().flat_map(|l| [l.0, l.1]).chain([Nanos::ZERO]).collect();
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
struct Offer {
    /// Which of the job's plans.
    pick: usize,
    shared: Vec<bool>,
    own: u64,
    window: u64,
    held: u64,
}

/// A plan that a job may have.
struct Choice {
    planned: Planned,
    shapes: Vec<Shape>,
    /// The instants that spans count.
    times: Vec<Nanos>,
    /// Bytes from each instant on.
    load: Vec<u64>,
}

impl Choice {
    fn new(planned: Planned) -> Self {
        let (shapes, times) = shapes(&planned);
        let mut choice = Self { planned, shapes, load: vec![0; times.len()], times };
        choice.load = choice.loads(|_| true);
        choice
    }

    fn time(&self) -> u64 {
        self.planned.run.iteration.0
    }

    /// Bytes of some shapes from each instant on.
    fn loads(&self, of: impl Fn(usize) -> bool) -> Vec<u64> {
        let (mut begins, mut ends) = (vec![0u64; self.times.len() + 1], vec![0u64; self.times.len() + 1]);
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
    fn offers(&self, pick: usize) -> Vec<Offer> {
        let most = |loads: Vec<u64>| loads.into_iter().max().unwrap_or(0);
        let (all, least) = (most(self.load.clone()), most(self.loads(|i| !self.shapes[i].passes)));
        let part = |k: u64| least + u64::try_from(u128::from(all - least) * u128::from(k) / u128::from(PARTS)).unwrap_or(0);
        let none = Offer { pick, shared: vec![false; self.shapes.len()], own: all, window: 0, held: 0 };
        std::iter::once(none).chain((0..PARTS).rev().filter_map(|k| self.offer(pick, part(k)))).collect()
    }

    /// Keeps the load of its own part at or below a target: the window is held where the load is higher, and as much longer as it takes to
    /// have enough in it that begins and ends while it is held. `None` if nothing does.
    fn offer(&self, pick: usize, target: u64) -> Option<Offer> {
        let count = self.times.len();
        let mut inside: Vec<bool> = self.load.iter().map(|&load| load > target).collect();
        let fits = loop {
            let mut outside = vec![0usize; count + 1];
            for t in 0..count {
                outside[t + 1] = outside[t] + usize::from(!inside[t]);
            }
            let fits: Vec<bool> = self.shapes.iter().map(|s| s.passes && outside[s.span().0] == outside[s.span().1]).collect();
            let own = self.loads(|i| !fits[i]);
            let (at, load) = highest(&own);
            if load <= target {
                break fits;
            }
            // Whoever takes the least time more for the bytes that are too many.
            let mut best: Option<(u128, u128, usize)> = None;
            for (i, shape) in self.shapes.iter().enumerate().filter(|(i, s)| s.passes && !fits[*i] && s.item.bytes > 0) {
                let (from, until) = shape.span();
                if !(from..until).contains(&at) {
                    continue;
                }
                let longer: u64 = (from..until).filter(|&t| !inside[t]).map(|t| self.length(t)).sum();
                let (longer, given) = (u128::from(longer), u128::from(shape.item.bytes.min(load - target)));
                if best.is_none_or(|(l, g, _)| longer * g < l * given) {
                    best = Some((longer, given, i));
                }
            }
            let (from, until) = self.shapes[best?.2].span();
            inside[from..until].fill(true);
        };
        // Of what could be in the window only as much as is needed, the shortest lives first.
        let mut order: Vec<usize> = (0..self.shapes.len()).filter(|&i| fits[i] && self.shapes[i].item.bytes > 0).collect();
        order.sort_by_key(|&i| (self.shapes[i].life, std::cmp::Reverse(self.shapes[i].item.bytes), i));
        let (mut own, mut shared) = (self.load.clone(), vec![false; self.shapes.len()]);
        loop {
            let (at, load) = highest(&own);
            if load <= target {
                break;
            }
            let moves = order.iter().copied().find(|&i| !shared[i] && (self.shapes[i].span().0..self.shapes[i].span().1).contains(&at))?;
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
    loads.iter().enumerate().fold((0, 0), |most, (t, &load)| if load > most.1 { (t, load) } else { most })
}

/// Addresses of a choice's shapes, and how high its own part and what it has in the window are.
type Layout = (Vec<u64>, [u64; 2]);

/// What each job may choose from.
struct Options<'a> {
    jobs: &'a Jobs<'a>,
    /// Of each job its entry in `choices`: copies of a job choose from the same.
    of: Vec<usize>,
    choices: Vec<Vec<Choice>>,
    offers: Vec<Vec<Offer>>,
}

/// Which of its offers each job takes.
type Division = Vec<usize>;

/// A division with addresses.
struct Laid {
    bytes: u64,
    /// Of each job.
    own: Vec<u64>,
    parts: Vec<Planned>,
    /// They differ in when the window is handed over.
    plans: Vec<Timed>,
}

/// A plan, and every job's program and run alone.
type Timed = (Plan, Vec<(Program, Run)>);

impl<'a> Options<'a> {
    /// With everybody's least plan, which takes longest to find, or without.
    fn new(jobs: &'a Jobs<'a>, devices: &[Profile], least: bool) -> Result<Self, PlanError> {
        let mut all = Self { jobs, of: Vec::new(), choices: Vec::new(), offers: Vec::new() };
        let mut known: Vec<(&str, &Method, u64)> = Vec::new();
        for (job, device) in jobs.jobs.iter().zip(devices) {
            let key = (&*job.file.1, &job.method, device.pinned_bytes.0);
            if let Some(same) = known.iter().position(|k| *k == key) {
                all.of.push(same);
                continue;
            }
            known.push(key);
            all.of.push(all.choices.len());
            let request = Request {
                graph: job.graph,
                file: job.file.clone(),
                device,
                latencies: job.latencies,
                budget: jobs.budget,
                method: job.method.clone(),
                recorded_options: jobs.recorded_options.clone(),
            };
            let choices = choices(&request, least)?;
            all.offers.push(choices.iter().enumerate().flat_map(|(pick, choice)| choice.offers(pick)).collect());
            all.choices.push(choices);
        }
        Ok(all)
    }

    fn offer(&self, job: usize, offer: usize) -> &Offer {
        &self.offers[self.of[job]][offer]
    }

    fn choice(&self, job: usize, offer: usize) -> &Choice {
        &self.choices[self.of[job]][self.offer(job, offer).pick]
    }

    /// Sizes of the window to try.
    fn sizes(&self) -> Vec<u64> {
        let mut all: Vec<u64> = self.offers.iter().flatten().map(|offer| offer.window).filter(|&window| window > 0).collect();
        all.sort_unstable();
        all.dedup();
        let count = all.len();
        (1..=SIZES.min(count)).map(|k| all[count * k / SIZES.min(count) - 1]).collect()
    }

    /// A job's offers that do with a window.
    fn within(&self, job: usize, size: u64) -> impl Iterator<Item = usize> {
        let offers = &self.offers[self.of[job]];
        (0..offers.len()).filter(move |&i| offers[i].window <= size)
    }

    /// Everybody's smallest part.
    fn smallest(&self, size: u64) -> Division {
        (0..self.of.len()).map(|job| self.within(job, size).min_by_key(|&i| (self.offer(job, i).own, i)).unwrap_or(0)).collect()
    }

    /// The quickest plans, and then smaller ones where that costs least, until they fit. `None` if they don't.
    fn quickest(&self, size: u64, budget: u64, holding: u64) -> Option<Division> {
        let cost = |job: usize, i: usize| {
            let (choice, asked) = (self.choice(job, i), &self.jobs.jobs[job]);
            let time = u128::from(choice.time()) + u128::from(self.offer(job, i).held) * u128::from(holding) / 4;
            let unplanned = choice.planned.plan.figures.unplanned_iteration_ns.0.max(1);
            time * u128::from(asked.priority.max(1)) * 1_000_000 / u128::from(unplanned)
        };
        let own = |job: usize, i: usize| self.offer(job, i).own;
        let quickest = |job| self.within(job, size).min_by_key(|&i| (cost(job, i), own(job, i), i)).unwrap_or(0);
        let mut division: Division = (0..self.of.len()).map(quickest).collect();
        while self.bytes(&division) > budget {
            let mut cheapest: Option<(u128, u128, usize, usize)> = None;
            for (job, &now) in division.iter().enumerate() {
                for i in self.within(job, size).filter(|&i| own(job, i) < own(job, now)) {
                    let (lost, given) = (cost(job, i).saturating_sub(cost(job, now)), u128::from(own(job, now) - own(job, i)));
                    if cheapest.is_none_or(|(l, g, ..)| lost * g < l * given || (lost * g == l * given && given > g)) {
                        cheapest = Some((lost, given, job, i));
                    }
                }
            }
            let (_, _, job, i) = cheapest?;
            division[job] = i;
        }
        Some(division)
    }

    /// By loads; placed it may take more.
    fn bytes(&self, division: &Division) -> u64 {
        let offers = || division.iter().enumerate().map(|(job, &i)| self.offer(job, i));
        offers().map(|o| o.own).fold(0, u64::saturating_add).saturating_add(offers().map(|o| o.window).max().unwrap_or(0))
    }

    /// The smallest arena.
    fn least(&self) -> Result<Option<u64>, PlanError> {
        let (mut least, mut layouts): (Option<u64>, _) = (None, BTreeMap::new());
        for size in self.sizes() {
            let laid = self.lay(&self.smallest(size), &mut layouts)?;
            if let Some(laid) = laid.filter(|laid| !laid.plans.is_empty()) {
                least = Some(least.map_or(laid.bytes, |l| l.min(laid.bytes)));
            }
        }
        Ok(least)
    }

    /// Looks for what is quicker than the best so far; whether the host's memory was in the way of anything.
    fn search(&self, best: &mut Option<Overlapped>, lowest: &mut u64) -> Result<bool, PlanError> {
        let jobs = self.jobs;
        let apart = best.as_ref().and_then(|b| b.apart.clone());
        let (mut pinned, mut seen, mut layouts) = (false, BTreeSet::new(), BTreeMap::new());
        for size in self.sizes() {
            *lowest = (*lowest).min(self.bytes(&self.smallest(size)));
            for holding in HOLDING {
                let mut budget = jobs.budget.0 / 512 * 512;
                for attempt in 0..=RETRIES {
                    let division = match self.quickest(size, budget, holding) {
                        Some(division) if attempt < RETRIES => division,
                        None if attempt == 0 => break,
                        _ => self.smallest(size),
                    };
                    if seen.contains(&division) {
                        break;
                    }
                    let Some(laid) = self.lay(&division, &mut layouts)? else { break };
                    if let Some(over) = laid.bytes.checked_sub(jobs.budget.0).filter(|over| *over > 0) {
                        *lowest = (*lowest).min(laid.bytes);
                        budget = budget.saturating_sub(over.max(512));
                        continue;
                    }
                    seen.insert(division);
                    for (plan, runs) in laid.plans {
                        if plan.figures.pinned_bytes > jobs.device.pinned_bytes {
                            pinned = true;
                            continue;
                        }
                        // Beside others nobody is quicker than alone.
                        let alone: Vec<Nanos> = runs.iter().map(|(_, run)| run.iteration).collect();
                        if best.as_ref().is_some_and(|b| cost(jobs, &plan, &alone) >= cost(jobs, &plan, &b.beside)) {
                            continue;
                        }
                        let times = beside(jobs, &plan)?;
                        if best.as_ref().is_none_or(|b| cost(jobs, &plan, &times) < cost(jobs, &plan, &b.beside)) {
                            let mut parts = laid.parts.clone();
                            for ((part, own), (program, run)) in parts.iter_mut().zip(&laid.own).zip(runs) {
                                let figures = &mut part.plan.figures;
                                let gained = part.run.iteration - run.iteration;
                                figures.arena_bytes = Bytes(*own);
                                figures.iteration_ns = run.iteration;
                                figures.first_iteration_ns = figures.first_iteration_ns.saturating_sub(gained);
                                figures.peak_bytes = engine::peak(&engine::memory(&program, &run));
                                (part.program, part.run) = (program, run);
                            }
                            let (held, together) = (held(jobs, &plan)?, Together { plan: plan.clone(), parts });
                            *best = Some(Overlapped { together, beside: times, apart: apart.clone(), held });
                        }
                    }
                    break;
                }
            }
        }
        Ok(pinned)
    }

    /// Addresses for a division; `None` where nothing lies in the window.
    fn lay(&self, division: &Division, layouts: &mut BTreeMap<(usize, usize), Layout>) -> Result<Option<Laid>, PlanError> {
        for (job, &i) in division.iter().enumerate() {
            layouts.entry((self.of[job], i)).or_insert_with(|| place_both(self.choice(job, i), self.offer(job, i)));
        }
        let picked: Vec<&Layout> = self.of.iter().zip(division).map(|(&of, &i)| &layouts[&(of, i)]).collect();
        let own: Vec<u64> = picked.iter().map(|l| l.1[0]).collect();
        let offset = own.iter().copied().fold(0, u64::saturating_add);
        let size = picked.iter().map(|l| l.1[1]).max().unwrap_or(0);
        if size == 0 {
            return Ok(None);
        }
        let parts: Vec<Planned> = division.iter().enumerate().map(|(job, &i)| self.choice(job, i).planned.clone()).collect();
        let mut laid = Laid { bytes: offset.saturating_add(size), own, parts, plans: Vec::new() };
        for gap in GAPS {
            if let Some(plan) = self.plan(division, &picked, &laid, (offset, size), gap)?
                && !laid.plans.iter().any(|other| other.0.jobs == plan.0.jobs)
            {
                laid.plans.push(plan);
            }
        }
        Ok(Some(laid))
    }

    /// The plan with a window at an offset, of a size; `None` if handing it over makes a job slower alone.
    fn plan(
        &self,
        division: &Division,
        picked: &[&Layout],
        laid: &Laid,
        window: (u64, u64),
        gap: Option<u64>,
    ) -> Result<Option<Timed>, PlanError> {
        let mut plan = global::joined(self.jobs, &laid.parts);
        let (mut base, mut peaks, mut peak) = (0, [0, 0], 0);
        let mut runs = Vec::with_capacity(plan.jobs.len());
        let mut gained = Nanos::ZERO;
        for (index, job) in plan.jobs.iter_mut().enumerate() {
            let (choice, offsets) = (self.choice(index, division[index]), &picked[index].0);
            let shared = &self.offer(index, division[index]).shared;
            let mut placements: Vec<(u32, Placement)> = Vec::with_capacity(choice.shapes.len());
            for (i, shape) in choice.shapes.iter().enumerate() {
                if let (Some(&(from, _)), Some(&r)) = (shape.item.spans.last(), shape.residencies.last()) {
                    let offset = Bytes(offsets[i] + if shared[i] { window.0 } else { base });
                    placements.push((from, Placement { place: choice.planned.program.residencies[r].place, offset }));
                }
            }
            placements.sort_unstable_by_key(|(from, placement)| (*from, placement.place));
            job.placements = placements.into_iter().map(|p| p.1).collect();
            let shapes = choice.shapes.iter().zip(shared).filter(|(_, shared)| **shared);
            let inside: BTreeSet<usize> = shapes.map(|(shape, _)| shape.residencies[0]).collect();
            if !inside.is_empty() {
                let hands_over_after = hand_overs(&choice.planned, &inside, gap);
                job.window = Some(Window { offset: Bytes(window.0), bytes: Bytes(window.1), hands_over_after });
            }
            base += laid.own[index];
            let program = Program::placed(self.jobs.jobs[index].graph, job).map_err(defect)?;
            let Ok(run) = engine::nominal(&program, &self.jobs.device.link) else { return Ok(None) };
            // It may well be quicker: other bytes are shared.
            if run.iteration > choice.planned.run.iteration {
                return Ok(None);
            }
            gained += choice.planned.run.iteration - run.iteration;
            for (side, most) in peaks.iter_mut().enumerate() {
                let mut some = program.clone();
                some.residencies = program
                    .residencies
                    .iter()
                    .enumerate()
                    .filter(|(r, _)| usize::from(inside.contains(r)) == side)
                    .map(|r| r.1.clone())
                    .collect();
                let load = engine::peak(&engine::memory(&some, &run)).0;
                *most = if side == 0 { *most + load } else { load.max(*most) };
            }
            peak += engine::peak(&engine::memory(&program, &run)).0;
            runs.push((program, run));
        }
        plan.figures.iteration_ns = plan.figures.iteration_ns.saturating_sub(gained);
        plan.figures.first_iteration_ns = plan.figures.first_iteration_ns.saturating_sub(gained);
        plan.figures.arena_bytes = Bytes(laid.bytes);
        plan.figures.peak_bytes = Bytes(peak.min(peaks[0] + peaks[1]));
        Ok(Some((plan, runs)))
    }
}

/// A job's plans, from that which needs most to that which needs least.
fn choices(request: &Request<'_>, least: bool) -> Result<Vec<Choice>, PlanError> {
    let whole = budget::unplanned(request)?;
    let (top, floor) = (whole.plan.figures.arena_bytes.0, Liveness::of(request.graph).floor.0);
    let mut all = vec![Choice::new(whole)];
    let mut add = |planned: Planned| {
        if !all.iter().any(|other| other.planned.plan.figures == planned.plan.figures) {
            all.push(Choice::new(planned));
        }
    };
    let mut most = top;
    for level in (1..LEVELS).rev() {
        let target = floor + u64::try_from(u128::from(top.saturating_sub(floor)) * u128::from(level) / u128::from(LEVELS)).unwrap_or(0);
        match budget::make(&Request { budget: Bytes(target), ..request.clone() }) {
            Ok(planned) => {
                most = planned.plan.figures.arena_bytes.0;
                add(planned);
            }
            Err(PlanError::Infeasible(_)) => break,
            Err(defect) => return Err(defect),
        }
    }
    if !least {
        return Ok(all);
    }
    match budget::minimum(&Request { budget: Bytes(most), ..request.clone() }) {
        Ok(planned) => add(planned),
        Err(PlanError::Infeasible(_)) => {}
        Err(defect) => return Err(defect),
    }
    Ok(all)
}

/// Addresses from 0 of a choice's own part, and from 0 of what it has in the window.
fn place_both(choice: &Choice, offer: &Offer) -> Layout {
    let mut offsets = vec![0; choice.shapes.len()];
    let mut heights = [0, 0];
    for (side, height) in heights.iter_mut().enumerate() {
        let mine = |&i: &usize| usize::from(offer.shared[i]) == side && choice.shapes[i].item.bytes > 0;
        let which: Vec<usize> = (0..choice.shapes.len()).filter(mine).collect();
        if which.is_empty() {
            continue;
        }
        let items: Vec<Item> = which.iter().map(|&i| choice.shapes[i].item.clone()).collect();
        let layout = place::place(&items, [offer.own, offer.window][side]);
        which.iter().zip(&layout.offsets).for_each(|(&i, &offset)| offsets[i] = offset);
        *height = layout.height;
    }
    (offsets, heights)
}

/// Operators after which a job has nothing in the window for long enough, by its noiseless run.
fn hand_overs(part: &Planned, inside: &BTreeSet<usize>, gap: Option<u64>) -> Vec<OpId> {
    let Some(gap) = gap else { return Vec::new() };
    let least = part.run.iteration.0 / gap;
    let places = window::places(&part.program);
    let mut lives: Vec<(usize, Nanos, Nanos)> = Vec::with_capacity(inside.len());
    for &r in inside {
        let (from, until) = engine::life(&part.program.residencies[r], &part.run);
        lives.extend(places[r].map(|place| (place, from, until)));
    }
    lives.sort_unstable();
    let mut next: Vec<Nanos> = lives.iter().map(|l| l.1).collect();
    for i in (1..next.len()).rev() {
        next[i - 1] = next[i - 1].min(next[i]);
    }
    let (mut ended, mut all) = (Nanos::ZERO, Vec::new());
    for (i, pair) in lives.windows(2).enumerate() {
        ended = ended.max(pair[0].2);
        if pair[0].0 < pair[1].0 && next[i + 1].0 >= ended.0.saturating_add(least) {
            all.push(OpId::of(pair[1].0 - 1));
        }
    }
    all
}
