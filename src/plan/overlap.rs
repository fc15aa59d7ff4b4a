//! Several jobs that share bytes: each has a part of the arena of its own and all have a window together, which they hold in turn
//! ([`crate::schedule::plan`], "The window").
//!
//! What a job has resident round its iteration's boundary is its own for good; most of the rest is there for a part of the iteration only, and other jobs may
//! use the same bytes meanwhile: what is saved are bytes of all jobs but one, what is paid is waiting. (Salus, its GPU lanes, lets whole ephemeral regions
//! pass from job to job at iteration boundaries; here it is the stretch about the peak, and it passes at operator boundaries.)
//!
//! The search: plans that are made for more than the budget are pressed into it by a window. For each of some budgets from the real one up to what all
//! need unplanned, [`super::global`] plans the jobs; for each of some sizes of the window, what shortens the peak of a job's own part goes into
//! the window, the shortest-lived first, while there is room. What fits is simulated side by side with everybody's waiting, and the quickest is taken; so
//! where bytes of their own cost nothing, or no more than waiting, nothing is shared. A job's own timeline does not change: lives are those of its noiseless run, so
//! bytes pass from hand to hand in an order that this run keeps to, and that can therefore not be a circle.
//!
//! Not for: deciding what is swapped; lanes and policies ([`super::lane`]).

use std::collections::BTreeMap;

use super::budget::{Infeasible, PlanError, Planned};
use super::global::{self, Jobs, Memo, Together};
use super::place::{self, Item};
use crate::device::roofline;
use crate::schedule::{Figures, Place, Placement, Plan, Window};
use crate::sim::engine::{self, Durations};
use crate::sim::program::{Begin, Program};
use crate::sim::together::{Shared, Work};
use crate::sim::window;
use crate::units::{Bytes, Nanos, OpId};

/// How many budgets above the real one are planned for.
const LEVELS: u64 = 8;

/// How many sizes of the window are tried with each.
const SIZES: u64 = 24;

/// Of those that fit, how many are simulated.
const SIMULATED: usize = 2;

/// And how many are placed for that.
const PLACED: usize = 6;

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
    search(jobs, &mut Memo::default())
}

/// Makes the plan with the least arena that is found.
///
/// # Errors
/// [`PlanError::Infeasible`] when a job can't even be placed unplanned within the budget.
pub fn minimum(jobs: &Jobs<'_>) -> Result<Overlapped, PlanError> {
    let least = global::minimum(jobs)?;
    let mut memo = Memo::default();
    let mut lowest: Option<u64> = None;
    let floor = least.plan.figures.arena_bytes;
    let mut together = Some(least.clone());
    for budget in levels(jobs, floor, &mut memo)?.into_iter().rev() {
        let parts = match together.take() {
            Some(least) => least,
            None => match global::make_with(&Jobs { budget, ..jobs.clone() }, &mut memo) {
                Ok(parts) => parts,
                Err(PlanError::Infeasible(_)) => continue,
                Err(defect) => return Err(defect),
            },
        };
        let parts = Parts::new(jobs, &parts);
        let mut divisions = parts.divisions();
        divisions.sort_by_key(|division| division.bytes);
        for division in divisions.iter().take(SIMULATED) {
            if let Some(laid) = parts.lay(division)? {
                lowest = Some(lowest.map_or(laid.bytes, |l| l.min(laid.bytes)));
            }
        }
    }
    let budget = lowest.map_or(floor, |lowest| floor.min(Bytes(lowest)));
    let mut made = search(&Jobs { budget, ..jobs.clone() }, &mut memo)?;
    made.together.plan.budget = made.together.plan.figures.arena_bytes;
    Ok(made)
}

/// Budgets to plan for, falling, from what all need unplanned to the least.
fn levels(jobs: &Jobs<'_>, least: Bytes, memo: &mut Memo) -> Result<Vec<Bytes>, PlanError> {
    let whole = global::make_with(&Jobs { budget: Bytes(u64::MAX / 4), ..jobs.clone() }, memo)?;
    let above = whole.plan.figures.arena_bytes.saturating_sub(least).0;
    let part = |level: u64| u64::try_from(u128::from(above) * u128::from(level) / u128::from(LEVELS)).unwrap_or(above);
    Ok((0..=LEVELS).rev().map(|level| least + Bytes(part(level))).collect())
}

fn search(jobs: &Jobs<'_>, memo: &mut Memo) -> Result<Overlapped, PlanError> {
    let (mut best, mut refused) = match global::make_with(jobs, memo) {
        Ok(together) => {
            let beside = beside(jobs, &together.plan)?;
            let held = vec![Nanos::ZERO; beside.len()];
            (Some(Overlapped { together, apart: Some(beside.clone()), beside, held }), None)
        }
        Err(PlanError::Infeasible(no)) => (None, Some(no)),
        Err(defect) => return Err(defect),
    };
    if best.as_ref().is_some_and(|b| b.together.plan.figures.iteration_ns <= b.together.plan.figures.unplanned_iteration_ns) {
        return best.ok_or_else(|| none(jobs, None));
    }
    let apart = best.as_ref().and_then(|b| b.apart.clone());
    let mut seen: Vec<Figures> = Vec::new();
    for budget in levels(jobs, jobs.budget, memo)? {
        let together = match global::make_with(&Jobs { budget, ..jobs.clone() }, memo) {
            Ok(together) => together,
            Err(PlanError::Infeasible(_)) => continue,
            Err(defect) => return Err(defect),
        };
        if seen.contains(&together.plan.figures) {
            continue;
        }
        seen.push(together.plan.figures);
        let parts = Parts::new(jobs, &together);
        let mut divisions = parts.divisions();
        if let (Some(no), Some(least)) = (&mut refused, divisions.iter().map(|division| division.bytes).min()) {
            no.lowest = no.lowest.min(Bytes(least.max(jobs.budget.0 + 1)));
        }
        divisions.retain(|division| division.bytes <= jobs.budget.0);
        let mut simulated = 0;
        for division in divisions.iter().take(PLACED) {
            let Some(laid) = parts.lay(division)? else { continue };
            if laid.bytes > jobs.budget.0 {
                continue;
            }
            for plan in laid.plans {
                let times = beside(jobs, &plan)?;
                if best.as_ref().is_none_or(|b| cost(jobs, &plan, &times) < cost(jobs, &plan, &b.beside)) {
                    let mut parts = together.parts.clone();
                    for (part, own) in parts.iter_mut().zip(&laid.own) {
                        part.plan.figures.arena_bytes = Bytes(*own);
                    }
                    let held = held(jobs, &plan)?;
                    best = Some(Overlapped { together: Together { plan, parts }, beside: times, apart: apart.clone(), held });
                }
            }
            simulated += 1;
            if simulated == SIMULATED {
                break;
            }
        }
    }
    best.ok_or_else(|| none(jobs, refused))
}

fn none(jobs: &Jobs<'_>, refused: Option<Box<Infeasible>>) -> PlanError {
    let nothing = Infeasible { budget: jobs.budget, floor: Bytes::ZERO, lowest: jobs.budget + Bytes(1), blocked: String::new() };
    let mut no = refused.unwrap_or_else(|| Box::new(nothing));
    no.blocked = format!("{}; nor is there a window to share that would do", no.blocked);
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

/// What there is to place of a job.
fn shapes(part: &Planned) -> (Vec<Shape>, usize) {
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
    (shapes, times.len())
}

/// Which shapes of a job go into the window, and the loads of both.
#[derive(Clone)]
struct Split {
    shared: Vec<bool>,
    own: u64,
    window: u64,
}

/// Brings the load of what stays a job's own down by what a window of `size` holds, the shortest lives first.
fn split(shapes: &[Shape], times: usize, order: &[usize], size: u64) -> Split {
    let each = |shape: &Shape, f: &mut dyn FnMut(usize)| {
        for &(from, until) in &shape.item.spans {
            (from as usize..until as usize).for_each(&mut *f);
        }
    };
    let (mut own, mut window) = (vec![0u64; times + 1], vec![0u64; times + 1]);
    for shape in shapes {
        each(shape, &mut |t| own[t] += shape.item.bytes);
    }
    let mut shared = vec![false; shapes.len()];
    loop {
        let (highest, load) = own.iter().enumerate().fold((0, 0), |most, (t, &load)| if load > most.1 { (t, load) } else { most });
        let moves = order.iter().copied().find(|&index| {
            let (from, until) = shapes[index].item.spans[0];
            let alive = (from as usize..until as usize).contains(&highest) && !shared[index];
            alive && (from as usize..until as usize).all(|t| window[t] + shapes[index].item.bytes <= size)
        });
        let Some(index) = moves else { return Split { shared, own: load, window: window.iter().copied().max().unwrap_or(0) } };
        shared[index] = true;
        each(&shapes[index], &mut |t| {
            own[t] -= shapes[index].item.bytes;
            window[t] += shapes[index].item.bytes;
        });
    }
}

/// One way to divide the arena: a split for each different job.
struct Division {
    splits: Vec<Split>,
    /// By loads; placed it may take more.
    bytes: u64,
}

/// Plans to be divided.
struct Parts<'a> {
    jobs: &'a Jobs<'a>,
    together: &'a Together,
    /// Of each job its entry in `shapes`: copies of a job are divided alike.
    of: Vec<usize>,
    /// What there is to place, with the first job that it is of, and how many instants it has.
    shapes: Vec<(usize, Vec<Shape>, usize)>,
}

/// A division with addresses.
struct Laid {
    bytes: u64,
    /// Of each job.
    own: Vec<u64>,
    /// They differ in when the window is handed over.
    plans: Vec<Plan>,
}

impl<'a> Parts<'a> {
    fn new(jobs: &'a Jobs<'a>, together: &'a Together) -> Self {
        let mut all = Self { jobs, together, of: Vec::new(), shapes: Vec::new() };
        for (index, part) in together.parts.iter().enumerate() {
            let same = |&(first, _, _): &(usize, Vec<Shape>, usize)| {
                let other = &together.parts[first];
                jobs.jobs[first].file.1 == jobs.jobs[index].file.1
                    && (&other.plan.jobs[0].events, other.plan.figures) == (&part.plan.jobs[0].events, part.plan.figures)
            };
            let known = all.shapes.iter().position(same);
            all.of.push(known.unwrap_or(all.shapes.len()));
            if known.is_none() {
                let (shapes, times) = shapes(part);
                all.shapes.push((index, shapes, times));
            }
        }
        all
    }

    /// Ways to divide, by growing window; with one job only there is nobody to share with.
    fn divisions(&self) -> Vec<Division> {
        let orders: Vec<Vec<usize>> = self.shapes.iter().map(|(_, shapes, _)| by_life(shapes)).collect();
        let each = |size: u64| -> Vec<Split> {
            self.shapes.iter().zip(&orders).map(|((_, shapes, times), order)| split(shapes, *times, order, size)).collect()
        };
        let most = each(u64::MAX).iter().map(|s| s.window).max().unwrap_or(0);
        let mut all: Vec<Division> = Vec::new();
        for size in (1..=SIZES).map(|part| u64::try_from(u128::from(most) * u128::from(part) / u128::from(SIZES)).unwrap_or(most)) {
            let splits = each(size);
            let window = splits.iter().map(|s| s.window).max().unwrap_or(0);
            let own = self.of.iter().map(|&of| splits[of].own).fold(0, u64::saturating_add);
            all.push(Division { splits, bytes: own.saturating_add(window) });
        }
        all
    }

    /// Addresses for a division; `None` where nothing is gained by it.
    fn lay(&self, division: &Division) -> Result<Option<Laid>, PlanError> {
        let mut layouts = Vec::with_capacity(self.shapes.len());
        for ((_, shapes, _), split) in self.shapes.iter().zip(&division.splits) {
            let mut offsets = vec![0; shapes.len()];
            let mut heights = [0, 0];
            for (side, height) in heights.iter_mut().enumerate() {
                let which: Vec<usize> =
                    (0..shapes.len()).filter(|&i| usize::from(split.shared[i]) == side && shapes[i].item.bytes > 0).collect();
                let items: Vec<Item> = which.iter().map(|&i| shapes[i].item.clone()).collect();
                if items.is_empty() {
                    continue;
                }
                let layout = place::place(&items, [split.own, split.window][side]);
                which.iter().zip(&layout.offsets).for_each(|(&i, &offset)| offsets[i] = offset);
                *height = layout.height;
            }
            layouts.push((offsets, heights));
        }
        let own: Vec<u64> = self.of.iter().map(|&of| layouts[of].1[0]).collect();
        let offset = own.iter().copied().fold(0, u64::saturating_add);
        let size = layouts.iter().map(|l| l.1[1]).max().unwrap_or(0);
        let bytes = offset.saturating_add(size);
        if size == 0 {
            return Ok(None);
        }
        let mut plans: Vec<Plan> = Vec::new();
        for gap in GAPS {
            let mut plan = self.together.plan.clone();
            let (mut base, mut peaks, mut peak, mut as_quick) = (0, [0, 0], 0, true);
            for (index, (job, &of)) in plan.jobs.iter_mut().zip(&self.of).enumerate() {
                let (shapes, part) = (&self.shapes[of].1, &self.together.parts[index]);
                let (offsets, shared) = (&layouts[of].0, &division.splits[of].shared);
                let at = |i: usize| Bytes(offsets[i] + if shared[i] { offset } else { base });
                let mut placements: Vec<(u32, Placement)> = Vec::with_capacity(shapes.len());
                for (i, shape) in shapes.iter().enumerate() {
                    if let (Some(&(from, _)), Some(&r)) = (shape.item.spans.last(), shape.residencies.last()) {
                        placements.push((from, Placement { place: part.program.residencies[r].place, offset: at(i) }));
                    }
                }
                placements.sort_unstable_by_key(|(from, placement)| (*from, placement.place));
                job.placements = placements.into_iter().map(|p| p.1).collect();
                let inside: Vec<usize> = (0..shapes.len()).filter(|&i| shared[i]).map(|i| shapes[i].residencies[0]).collect();
                if !inside.is_empty() {
                    let hands_over_after = hand_overs(part, &inside, gap);
                    job.window = Some(Window { offset: Bytes(offset), bytes: Bytes(size), hands_over_after });
                }
                base += own[index];
                let program = Program::placed(self.jobs.jobs[index].graph, job).map_err(defect)?;
                let Ok(run) = engine::nominal(&program, &self.jobs.device.link) else {
                    as_quick = false;
                    break;
                };
                as_quick &= run.iteration == part.run.iteration;
                let [of_own, held] = [false, true].map(|held| {
                    let mut some = program.clone();
                    some.residencies =
                        program.residencies.iter().enumerate().filter(|(r, _)| inside.contains(r) == held).map(|r| r.1.clone()).collect();
                    engine::peak(&engine::memory(&some, &run)).0
                });
                peaks = [peaks[0] + of_own, held.max(peaks[1])];
                peak += engine::peak(&engine::memory(&program, &run)).0;
            }
            if as_quick && !plans.iter().any(|other| other.jobs == plan.jobs) {
                plan.budget = self.jobs.budget;
                plan.figures.arena_bytes = Bytes(bytes);
                plan.figures.peak_bytes = Bytes(peak.min(peaks[0] + peaks[1]));
                plans.push(plan);
            }
        }
        Ok((!plans.is_empty()).then_some(Laid { bytes, own, plans }))
    }
}

/// Shapes that may be shared, those with the shortest lives first.
fn by_life(shapes: &[Shape]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..shapes.len()).filter(|&i| shapes[i].passes && shapes[i].item.bytes > 0).collect();
    order.sort_by_key(|&i| (shapes[i].life, std::cmp::Reverse(shapes[i].item.bytes), i));
    order
}

/// Operators after which a job has nothing in the window for long enough, by its noiseless run.
fn hand_overs(part: &Planned, inside: &[usize], gap: Option<u64>) -> Vec<OpId> {
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
