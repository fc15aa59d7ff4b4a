//! Several jobs that share bytes: each has a part of the arena of its own and all have a window
//! together, which they hold in turn ([`crate::contract::plan`], "The window").
//!
//! What a job has resident round its iteration's boundary is its own for good; most of the rest is
//! there for a part of the iteration only, and other jobs may use the same bytes meanwhile: what is
//! saved are bytes of all jobs but one, what is paid is waiting. (Salus, its GPU lanes, lets whole
//! ephemeral regions pass from job to job at iteration boundaries; here it is the stretch about the
//! peak, and it passes at operator boundaries.)
//!
//! The search: each job is planned for some arenas of its own, from what it needs unplanned to the
//! least. Each of these plans is divided at some heights: the window is held where its load is
//! higher, and as much longer as it takes to find enough that begins and ends while it is held.
//! Then, for some sizes of the window, every job takes the quickest plan and division, and gives
//! way to one with a smaller part where that costs least, until parts and window fit
//! ([`super::global`] does the same without a window); once counting the time for which the window
//! is held, for which others may have to wait, and once not. What fits is simulated side by side
//! with the waiting of all jobs, and the quickest is taken, be it the plan without a window. A
//! job's timeline alone does not change by sharing: lives are those of its noiseless run, so bytes
//! pass from hand to hand in an order that this run keeps to, and that can therefore not be a
//! circle. Cost: `LEVELS` plans of each job, and some hundred simulations of some iterations.

mod offers;
mod search;

use std::collections::BTreeMap;

use super::budget::{Infeasible, PlanError};
use super::global::{self, Jobs, Memo, Together};
use crate::contract::{Plan, Window};
use crate::device::roofline;
use crate::job::liveness::Liveness;
use crate::sim::engine::{self, Durations};
use crate::sim::program::{Begin, Program};
use crate::sim::together::{Shared, Work};
use crate::units::{Bytes, Nanos};
use search::Options;

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

/// Makes one plan of all jobs within the budget, in which they share bytes where that is quicker
/// than not to, or the only way.
///
/// # Errors
/// [`PlanError::Infeasible`] when there is none to be found.
pub fn make(jobs: &Jobs<'_>) -> Result<Overlapped, PlanError> {
    make_with(jobs, &mut Memo::default())
}

fn make_with(jobs: &Jobs<'_>, memo: &mut Memo) -> Result<Overlapped, PlanError> {
    let (mut best, refused) = match global::make_with(jobs, memo) {
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
        let options = Options::new(jobs, &devices, best.is_none(), memo)?;
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
    let memo = &mut Memo::default();
    let apart = global::minimum_with(jobs, memo)?.plan.figures.arena_bytes;
    let devices = global::shares(jobs);
    let shared = Options::new(jobs, &devices, true, memo)?.least()?;
    let mut made = make_with(
        &Jobs { budget: shared.map_or(apart, |shared| apart.min(Bytes(shared))), ..jobs.clone() },
        memo,
    )?;
    made.together.plan.budget = made.together.plan.figures.arena_bytes;
    Ok(made)
}

fn none(jobs: &Jobs<'_>, refused: Option<Box<Infeasible>>, lowest: u64) -> PlanError {
    let nothing = Infeasible {
        budget: jobs.budget,
        floor: Bytes::ZERO,
        lowest: Bytes(lowest),
        blocked: String::new(),
    };
    let mut no = refused.unwrap_or_else(|| Box::new(nothing));
    // Bytes are shared, so what the jobs need add up no longer; each alone still needs its own.
    no.floor = jobs.jobs.iter().map(|job| Liveness::of(job.graph).floor).max().unwrap_or_default();
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
    jobs.jobs
        .iter()
        .zip(&plan.jobs)
        .map(|(job, planned)| Program::placed(job.graph, planned).map_err(defect))
        .collect()
}

/// The mean iteration of each job while all run side by side.
fn beside(jobs: &Jobs<'_>, plan: &Plan) -> Result<Vec<Nanos>, PlanError> {
    let link = &jobs.device.link;
    let programs = programs(jobs, plan)?;
    let durations: Vec<Durations> =
        programs.iter().map(|program| Durations::nominal(program, link)).collect();
    let utilisation: Vec<u32> = jobs
        .jobs
        .iter()
        .map(|job| roofline::utilisation(&job.graph.operators, job.latencies, jobs.device))
        .collect();
    let work = |job: usize| Work {
        program: &programs[job],
        durations: &durations[job],
        utilisation: utilisation[job],
    };
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
    // The first finds all jobs at the start, which is rare.
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
