//! Plans all jobs of the service again, in the background.
//!
//! Where the policy runs several jobs at once, they are planned together: each within a part of the
//! arena, for one link. Where it runs one at a time, each has device and link for itself while it
//! runs, and the jobs' ephemeral parts share one lane. Predicted times are those of
//! iterations beside the others, or alone.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use super::record::Planning;
use super::split::Split;
use super::worker::Work;
use super::{Message, Notice, Service, Stage, coming};
use crate::backend::Measured;
use crate::contract::{JobPlan, Latency, Plan, check};
use crate::controller::WORTH;
use crate::device::Profile;
use crate::plan::budget::feasible;
use crate::plan::together::{self, Job, Jobs, Memo, ways};
use crate::plan::{PlanError, Planned, overlap};
use crate::sim::engine;
use crate::sim::program::Program;
use crate::sim::share::lanes::JobId;
use crate::units::{Bytes, Nanos, id32, saturated};

/// A job to be planned again.
pub(super) struct Asked {
    work: Arc<Work>,
    /// The hash of its graph.
    sha256: String,
    /// Its plan so far.
    plan: JobPlan,
    /// The mean latency of each operator.
    latencies: Vec<Latency>,
}

/// New plans, or why there are none.
pub(super) struct Made {
    /// How many times the set of jobs had changed when this planning began, and the jobs then.
    number: u64,
    jobs: Vec<JobId>,
    plans: Result<Vec<JobPlan>, String>,
    planning: Planning,
}

/// Where jobs are planned.
struct Place {
    asked: Vec<Asked>,
    device: Profile,
    arena: Bytes,
    /// Whether one job runs at a time.
    in_turn: bool,
}

impl Place {
    fn jobs(&self) -> Jobs<'_> {
        let jobs = self.asked.iter().map(|asked| {
            let Work { graph, method, priority, swap_limit, .. } = &*asked.work;
            let (priority, swap_limit) = (*priority, *swap_limit);
            // Where one runs at a time, none is beside others.
            let method = if self.in_turn { method.alone() } else { method.clone() };
            let file = (String::new(), asked.sha256.clone());
            Job { graph, file, latencies: &asked.latencies, method, priority, swap_limit }
        });
        Jobs {
            jobs: jobs.collect(),
            device: &self.device,
            budget: self.arena,
            recorded_options: BTreeMap::new(),
        }
    }

    /// A checked plan for each job, or why there is none.
    fn plans(&self) -> Result<Vec<JobPlan>, String> {
        let jobs = self.jobs();
        let shares = self.asked.iter().any(|asked| asked.plan.window.is_some());
        // On one core: the jobs compute on the others.
        let memo = Memo::default();
        let parts = match (self.in_turn, shares) {
            (false, true) => {
                let made = overlap::make(&jobs, &memo).map_err(|e| e.to_string())?;
                let made = made.together.plan;
                let graphs: Vec<_> = jobs.jobs.iter().map(|job| job.graph.clone()).collect();
                return checked(&made, &graphs).map(|()| made.jobs);
            }
            (false, false) => together::make(&jobs, &memo).map(|made| made.parts),
            (true, _) => lane(&jobs, &memo),
        };
        let mut plans = Vec::with_capacity(jobs.jobs.len());
        for (part, job) in parts.map_err(|e| e.to_string())?.into_iter().zip(&jobs.jobs) {
            checked(&part.plan, std::slice::from_ref(job.graph))?;
            plans.extend(part.plan.jobs.first().cloned());
        }
        Ok(plans)
    }

    /// The predicted time of an iteration of each job under these plans, added up.
    fn predicted(&self, plans: &[JobPlan]) -> Option<Nanos> {
        let jobs = self.jobs();
        let mut programs = Vec::with_capacity(plans.len());
        for (job, plan) in jobs.jobs.iter().zip(plans) {
            let plan = JobPlan { latencies: job.latencies.to_vec(), ..plan.clone() };
            programs.push(Program::placed(job.graph, &plan).ok()?);
        }
        if !self.in_turn {
            let times = ways::beside(&jobs, &programs.iter().collect::<Vec<_>>()).ok()?;
            return Some(times.into_iter().sum());
        }
        let alone = |program| engine::nominal(program, &self.device.link).ok();
        programs.iter().map(|program| alone(program).map(|run| run.iteration)).sum()
    }
}

fn checked(plan: &Plan, graphs: &[crate::job::Graph]) -> Result<(), String> {
    let first = |r: Vec<check::Refusal>| r.first().map(ToString::to_string).unwrap_or_default();
    check::check(plan, graphs).map(drop).map_err(|r| format!("a new plan is refused: {}", first(r)))
}

/// How often the gap between a sum of arenas that fits and one that does not is halved.
const HALVINGS: usize = 4;

type Parts = Result<Vec<Arc<Planned>>, PlanError>;

/// Plans for jobs of which one runs at a time. What they keep between iterations and the largest of
/// the rest must fit in the arena. So they are planned for a sum of arenas that is larger than
/// that, the largest found.
fn lane(jobs: &Jobs<'_>, memo: &Memo) -> Parts {
    let fits = |parts: &[Arc<Planned>]| {
        let splits = || parts.iter().map(|part| Split::new(&part.program, None));
        let kept: Bytes = splits().map(|split| split.persistent).sum();
        kept + splits().map(|split| split.ephemeral).max().unwrap_or_default() <= jobs.budget
    };
    let make = |budget: u64| -> Parts {
        let asked = Jobs { budget: Bytes(budget), ..jobs.clone() };
        together::make(&asked, memo).map(|made| made.parts)
    };
    let graphs: Vec<_> = jobs.jobs.iter().map(|job| job.graph).collect();
    // Fragments may need a little more than the peaks.
    let peaks = together::unplanned_peak(&graphs).0;
    let (mut low, mut high) = (jobs.budget.0, peaks.saturating_add(peaks / 8).max(jobs.budget.0));
    let widest = make(high)?;
    if fits(&widest) {
        return Ok(widest);
    }
    let mut best = make(low);
    for _ in 0..HALVINGS {
        let middle = low + (high - low) / 2;
        match feasible(make(middle))? {
            Ok(parts) if fits(&parts) => (best, low) = (Ok(parts), middle),
            Ok(_) => high = middle,
            Err(_) => low = middle,
        }
    }
    best
}

/// Equal jobs have equal operators: each takes the mean of what was measured, or of what is known
/// if nothing was. Of each job it is given the hash of its graph and whether it was measured.
fn level(jobs: &[(&str, bool)], latencies: &mut [Vec<Latency>]) {
    for first in 0..jobs.len() {
        let alike = |at: &usize| jobs[*at].0 == jobs[first].0;
        if (0..first).any(|at| alike(&at)) {
            continue;
        }
        let twins: Vec<usize> = (first..jobs.len()).filter(alike).collect();
        let measured = twins.iter().any(|&at| jobs[at].1);
        let from: Vec<usize> = twins.iter().copied().filter(|&at| jobs[at].1 == measured).collect();
        let mut means = latencies[from[0]].clone();
        for (operator, mean) in means.iter_mut().enumerate() {
            let times = from.iter().map(|&at| u128::from(latencies[at][operator].time.0));
            let sum = times.sum::<u128>() / from.len() as u128;
            mean.time = Nanos(saturated(sum));
        }
        twins.into_iter().for_each(|at| latencies[at].clone_from(&means));
    }
}

impl Service<'_, '_> {
    /// Learns from a job's iteration, and plans all jobs again when something has drifted.
    pub(super) fn learn(&mut self, id: JobId, measured: &Measured) {
        if !self.options.replan {
            return;
        }
        let drifted = self.feedback.learn(id as usize, measured);
        if let Some(what) = drifted.filter(|_| !self.is_planning) {
            self.why.push(format!("`{}`: {what}", self.seats[id as usize].name));
            self.plan();
        }
    }

    /// The set of jobs has changed: plans all of them again in the background, if that was asked
    /// for.
    pub(super) fn changed(&mut self, why: String) {
        self.asked += 1;
        self.why.push(why);
        self.plan();
    }

    fn plan(&mut self) {
        if !self.options.replan || self.is_planning {
            return;
        }
        let present = |id: &usize| self.seats[*id].stage == Stage::There;
        let jobs: Vec<usize> = (0..self.seats.len()).filter(present).collect();
        if jobs.is_empty() {
            return;
        }
        let device = Profile { link: self.feedback.planning(), ..self.options.device.clone() };
        let in_turn = self.options.policy.style.in_turn();
        let seats: Vec<_> = jobs.iter().map(|&id| (id, &*self.seats[id].work)).collect();
        let mut latencies = self.feedback.latencies(&seats, &device, in_turn);
        let kind = |&id: &usize| (&*self.seats[id].sha256, self.feedback.ran(id));
        level(&jobs.iter().map(kind).collect::<Vec<_>>(), &mut latencies);
        let one = |(&id, latencies): (&usize, Vec<Latency>)| {
            let seat = &self.seats[id];
            let plan = seat.newest().1.clone();
            Asked { work: Arc::clone(&seat.work), sha256: seat.sha256.clone(), plan, latencies }
        };
        let asked = jobs.iter().zip(latencies).map(one).collect();
        let place = Place { asked, device, arena: self.options.arena, in_turn };
        let (number, sender) = (self.asked, self.mailbox.sender.clone());
        let jobs = jobs.into_iter().map(id32).collect();
        self.is_planning = true;
        let why = std::mem::take(&mut self.why).join(", ");
        self.scope.spawn(move || {
            let (began, plans) = (Instant::now(), place.plans());
            let old: Vec<JobPlan> = place.asked.iter().map(|asked| asked.plan.clone()).collect();
            let times = |new: &Vec<JobPlan>| Some((place.predicted(&old)?, place.predicted(new)?));
            let (before, after) = plans.as_ref().ok().and_then(times).unzip();
            let planning = Planning {
                why,
                predicted_before_ns: before,
                predicted_after_ns: after,
                planning_ns: Nanos(saturated(began.elapsed().as_nanos())),
                ..Planning::default()
            };
            let _ = sender.send(Message::Planned(Box::new(Made { number, jobs, plans, planning })));
        });
    }

    pub(super) fn planned(&mut self, made: Made, notice: &mut dyn FnMut(Notice<'_>)) {
        let Made { number, jobs, plans, mut planning } = made;
        self.is_planning = false;
        if number != self.asked {
            // The set of jobs has changed meanwhile.
            self.why.insert(0, planning.why);
            return self.plan();
        }
        let drifted = std::mem::replace(&mut self.planned_for, number) == number;
        let mut changed = Vec::new();
        let plans = plans.and_then(|plans| {
            let gains = |(before, after): (Nanos, Nanos)| {
                after.0 <= before.0 - before.0 / 1000 * WORTH || before.0 == 0
            };
            let predicted = planning.predicted_before_ns.zip(planning.predicted_after_ns);
            if drifted && !predicted.is_some_and(gains) {
                return Err(format!("the new plans would gain less than {} %", WORTH / 10));
            }
            for (&id, plan) in jobs.iter().zip(plans) {
                let seat = &mut self.seats[id as usize];
                let (number, last) = seat.newest();
                // New latencies alone change nothing that the job does.
                if *last == (JobPlan { latencies: last.latencies.clone(), ..plan.clone() }) {
                    continue;
                }
                let needs = coming(&seat.work, &plan, number + 1)
                    .map_err(|e| format!("`{}`: {e}", seat.name))?
                    .needs;
                self.scheduler.replanned(id, needs);
                // A service that runs for long makes thousands of plans: those that no order may
                // name again are dropped.
                let used: Vec<usize> = self.scheduler.plans(id).chain([seat.follows]).collect();
                seat.plans.retain(|number, _| used.contains(number));
                seat.plans.insert(number + 1, plan);
                changed.push(id);
            }
            Ok(())
        });
        (planning.at_ns, planning.kept_because) = (self.now(), plans.err());
        notice(Notice::Planned(self.records.planned(planning, &changed)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Source;

    #[test]
    fn equal_jobs_take_the_mean_of_what_was_measured() {
        let level = |jobs: &[(&str, bool)], times: &[u64]| -> Vec<u64> {
            let one = |&ns: &u64| vec![Latency { time: Nanos(ns), source: Source::Measured }];
            let mut latencies: Vec<Vec<Latency>> = times.iter().map(one).collect();
            level(jobs, &mut latencies);
            latencies.iter().map(|of| of[0].time.0).collect()
        };
        let jobs = [("a", false), ("b", false), ("a", true), ("a", true), ("b", false)];
        assert_eq!(level(&jobs, &[900, 10, 100, 200, 30]), [150, 20, 150, 150, 20]);
        assert_eq!(level(&[], &[]), [0u64; 0]);
    }
}
