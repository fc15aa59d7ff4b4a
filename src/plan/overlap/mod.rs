//! Several jobs that share bytes: each has a part of the arena of its own, and all have a window in
//! common, which they hold in turn ([`crate::contract::plan`], "The window").
//!
//! The tensors that a job has resident round its iteration's boundary stay in its own part. Most
//! others are resident for only a part of the iteration, and other jobs may use the same bytes
//! meanwhile. That saves bytes of all jobs but one, and costs waiting. (In Salus's GPU lanes, whole
//! ephemeral regions pass from job to job at iteration boundaries. Here it is the bytes around the
//! peak, and they pass at operator boundaries.)
//!
//! The search: each job is planned for several arenas of its own, from its unplanned need down to
//! the smallest. Each of these plans is divided at several heights. The job holds the window while
//! its load is above the height, and longer if that is necessary to find enough tensors that begin
//! and end while it holds the window. Then, for several sizes of the window, every job takes its
//! fastest plan and division. While parts and window do not fit, the job for which it costs least
//! takes one with a smaller part ([`super::together`] does the same without a window). This is done
//! twice: once the time for which the window is held counts as lost to other jobs, and once it does
//! not. The results that fit are simulated beside each other, including all waits, and the fastest
//! is chosen; it may be the plan without a window. Sharing does not change a job's timeline alone:
//! lives are those of its run without noise, so bytes change owner in the order of that run, which
//! has no circle. Cost: `LEVELS` plans of each job, and some hundred simulations of some
//! iterations.

mod offers;
mod search;

use std::collections::BTreeMap;
use std::sync::Arc;

use super::budget::{Infeasible, PlanError, Planned, feasible};
use super::together::{self, Job, Jobs, Memo, Together};
use crate::contract::Plan;
use crate::device::roofline;
use crate::job::liveness::Liveness;
use crate::sim::beside::{Shared, Work};
use crate::sim::engine::{self, Durations};
use crate::sim::rounds::Under;
use crate::units::{Bytes, Nanos, saturated};
use search::Options;

/// Iterations of every job in a simulation.
const ROUNDS: usize = 5;

/// The most iterations of a job that waits for slower ones to finish theirs.
const MOST: usize = 64;

/// A plan of several jobs, with or without a window.
#[derive(Clone, Debug)]
pub struct Overlapped {
    /// The plan. The arenas of the jobs' own plans are their own parts.
    pub together: Together,
    /// Mean iteration of each job beside each other with the others, all busy.
    pub beside: Vec<Nanos>,
    /// The same times if each job has a sub-arena; `None` if the budget is too small for that.
    pub apart: Option<Vec<Nanos>>,
    /// How long each job holds the window in an iteration alone.
    pub held: Vec<Nanos>,
}

/// Makes one plan of all jobs within the budget. They share bytes if that is faster than without,
/// or the only way to meet the budget.
///
/// # Errors
/// [`PlanError::Infeasible`] when no plan is found.
pub fn make(jobs: &Jobs<'_>, memo: &Memo) -> Result<Overlapped, PlanError> {
    let (mut best, refused) = match feasible(together::make(jobs, memo))? {
        Ok(together) => {
            let times = beside(jobs, &together.parts)?;
            let held = vec![Nanos::ZERO; times.len()];
            (Some(Overlapped { together, apart: Some(times.clone()), beside: times, held }), None)
        }
        Err(no) => (None, Some(no)),
    };
    // If no job swaps or recomputes, sharing can gain nothing.
    if best.as_ref().is_some_and(|b| b.together.plan.jobs.iter().all(|job| job.events.is_empty())) {
        return best.ok_or_else(|| none(jobs, None, u64::MAX));
    }
    let mut lowest = u64::MAX;
    for devices in [vec![jobs.device.clone(); jobs.jobs.len()], together::shares(jobs, memo)] {
        let options = Options::new(jobs, &devices, best.is_none(), memo)?;
        let pinned = options.search(&mut best, &mut lowest)?;
        if !pinned {
            break;
        }
    }
    best.ok_or_else(|| none(jobs, refused, lowest))
}

/// Makes the plan with the smallest arena that is found.
///
/// # Errors
/// [`PlanError::Infeasible`] when a job can't even be placed unplanned within the budget.
pub fn minimum(jobs: &Jobs<'_>, memo: &Memo) -> Result<Overlapped, PlanError> {
    let apart = together::minimum(jobs, memo)?.plan.figures.arena_bytes;
    let devices = together::shares(jobs, memo);
    let shared = Options::new(jobs, &devices, true, memo)?.least()?;
    let budget = shared.map_or(apart, |shared| apart.min(Bytes(shared)));
    let mut made = make(&Jobs { budget, ..jobs.clone() }, memo)?;
    made.together.plan.budget = made.together.plan.figures.arena_bytes;
    Ok(made)
}

fn none(jobs: &Jobs<'_>, refused: Option<Box<Infeasible>>, lowest: u64) -> PlanError {
    let lowest = Bytes(lowest);
    let nothing = || Infeasible { budget: jobs.budget, lowest, ..Infeasible::default() };
    let mut no = refused.unwrap_or_else(|| Box::new(nothing()));
    // Bytes are shared, so needs no longer add up. But each job still needs its own floor.
    no.floor = jobs.jobs.iter().map(|job| Liveness::new(job.graph).floor).max().unwrap_or_default();
    no.lowest = no.lowest.min(lowest).max(jobs.budget + Bytes(1));
    no.blocked += "; nor does a window to share make up for it";
    PlanError::Infeasible(no)
}

fn defect(error: impl ToString) -> PlanError {
    PlanError::Defect(error.to_string())
}

/// The jobs' times relative to their own unplanned times, weighted by priority, in millionths.
fn cost(jobs: &Jobs<'_>, plan: &Plan, times: &[Nanos]) -> u128 {
    let all = jobs.jobs.iter().zip(&plan.jobs).zip(times).map(|((job, planned), time)| {
        let unplanned: u128 = planned.latencies.iter().map(|l| u128::from(l.time.0)).sum();
        u128::from(time.0) * u128::from(job.priority.max(1)) * 1000 / unplanned.max(1)
    });
    all.sum()
}

/// The mean iteration of each job while all run beside each other.
fn beside(jobs: &Jobs<'_>, parts: &[Arc<Planned>]) -> Result<Vec<Nanos>, PlanError> {
    let link = &jobs.device.link;
    let durations = parts.iter().map(|part| Durations::nominal(&part.program, link));
    let durations: Vec<Durations> = durations.collect();
    let work = |(at, job): (usize, &Job<'_>)| Work {
        program: &parts[at].program,
        durations: &durations[at],
        utilisation: roofline::utilisation(&job.graph.operators, job.latencies, jobs.device),
    };
    let works: Vec<Under<'_>> = jobs.jobs.iter().enumerate().map(work).collect();
    let mut device = Shared::new(link);
    works.iter().enumerate().for_each(|(job, work)| device.begin(job, *work));
    let mut times: Vec<Vec<u64>> = vec![Vec::new(); parts.len()];
    while times.iter().any(|t| t.len() < ROUNDS) {
        let Some((job, run)) = device.until(Nanos(u64::MAX)).map_err(defect)? else { break };
        times[job].push(run.iteration.0);
        if times[job].len() < MOST {
            device.begin(job, works[job]);
        }
    }
    // The first iteration is left out: all jobs start it together, which is rare.
    let mean = |times: &Vec<u64>| {
        let counted = &times[times.len().min(1)..];
        let sum: u128 = counted.iter().map(|&t| u128::from(t)).sum();
        Nanos(saturated(sum / (counted.len() as u128).max(1)))
    };
    Ok(times.iter().map(mean).collect())
}

/// How long each job, alone, holds the window in an iteration.
fn held(of: &Together) -> Vec<Nanos> {
    let window = of.plan.window().map_or(0..0, |w| w.offset.0..(w.offset + w.bytes).0);
    let held = |part: &Arc<Planned>| {
        let mut stretches: BTreeMap<usize, (Nanos, Nanos)> = BTreeMap::new();
        for r in &part.program.residencies {
            let inside = r.offset.is_some_and(|at| window.contains(&at.0));
            let stretch = part.program.stretches.at(r.begin).filter(|_| inside);
            let Some(stretch) = stretch else { continue };
            let (from, until) = engine::life(r, &part.run);
            let all = stretches.entry(stretch).or_insert((from, until));
            *all = (all.0.min(from), all.1.max(until));
        }
        stretches.values().map(|(from, until)| until.saturating_sub(*from)).sum()
    };
    of.parts.iter().map(held).collect()
}
