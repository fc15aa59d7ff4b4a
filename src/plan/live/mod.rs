//! Jobs that come and go: all are planned again together at each launch and each end, and each job
//! takes up its new plan at an iteration boundary.
//!
//! In the paper's terms (TENSILE, its architecture figure), the *controller* is [`Live::run`],
//! which sees launches and ends. The *scheduler* is [`super::together`]. Executors and the swap
//! executor are [`crate::sim::beside`]. The persistent memory of a job is what is resident at the
//! end of its iteration. A new plan moves a job to its new sub-arena between two iterations. That
//! takes the time to move its persistent memory within the device, and the time of the copies of
//! tensors that the two plans keep in different memories.
//!
//! # Why no job waits for ever
//!
//! Sub-arenas lie in the order of launch, before and after planning. A job takes up its new plan at
//! the first boundary at which its new sub-arena touches no other job's present one. Suppose that
//! job i waits for a later job j, and j for i. Then the new end of i is above the present start of
//! j, which is at or above the present end of i. And the new start of j is below the present end of
//! i. So the new end of i is above the new start of j, which contradicts that new sub-arenas are
//! apart. So waits never form a circle, and each job's iterations end.
//!
//! A launch loads the tensors that start on the device, alone on the link. Host slots change at the
//! same boundary as the sub-arena. A job that can't be planned beside the others waits in line,
//! in the policy's order, and the result says what it waits for. Cost: one [`super::together`] plan
//! for each launch or end.

mod seat;
mod turns;

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;

use seat::{Part, Seat, moving};
use serde::Serialize;

use super::budget::{self, PlanError, Planned, Request};
use super::share::Share;
use super::together::{self, Job, Jobs, Memo, limits};
use crate::device::latency::{Table, latencies};
use crate::device::{Profile, roofline};
use crate::job::arrange::{ArrangeError, arrange};
use crate::sim::beside::{Carried, Shared, Work};
use crate::sim::engine::{Deadlock, Durations};
use crate::sim::noise::Noise;
use crate::sim::share::mechanism::Settings;
use crate::sim::share::policy::{Candidate, PACK, Policy, Style};
use crate::units::{Bytes, Nanos};

/// A job, when it is submitted and how many iterations it runs.
#[derive(Clone, Debug)]
pub struct Arrival<'a> {
    /// The job.
    pub job: Job<'a>,
    /// When the job is submitted.
    pub submitted: Nanos,
    /// How many iterations it runs; at least 1.
    pub iterations: u32,
}

/// What differs from what the jobs are planned for.
#[derive(Clone, Copy)]
pub struct Conditions<'a> {
    /// Decides which admitted jobs run their next iteration, and the order of admission.
    pub policy: &'a Policy,
    /// The latencies at which operators really run.
    pub real: Option<&'a Table>,
    /// By how much every latency varies.
    pub noise: Option<Noise>,
}

impl Default for Conditions<'_> {
    fn default() -> Self {
        Self { policy: &PACK, real: None, noise: None }
    }
}

/// The history of a job.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Story {
    /// Start and length of each iteration.
    #[serde(skip)]
    pub iterations: Vec<(Nanos, Nanos)>,
    /// When it was admitted; `None` if it never was.
    #[serde(rename = "admitted_ns")]
    pub admitted: Option<Nanos>,
    /// When it ended.
    #[serde(rename = "end_ns")]
    pub ended: Option<Nanos>,
    /// The reason for its first wait.
    pub waited_for: Option<String>,
    /// Its sub-arenas, in order of time.
    pub arenas: Vec<Arena>,
    /// Number of late copies.
    #[serde(rename = "late_copies")]
    pub late: u64,
    /// The largest part of all jobs' swaps that any plan let it make beside others.
    #[serde(skip)]
    pub swap_part: Share,
}

/// A sub-arena of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Arena {
    /// The time from which the job has it.
    pub at_ns: Nanos,
    /// Its address.
    pub base_bytes: Bytes,
    /// Its size.
    pub arena_bytes: Bytes,
}

/// The outcome of a simulation.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// The history of each job.
    pub jobs: Vec<Story>,
    /// How many times all jobs were planned again.
    pub replans: u32,
    /// Every copy.
    pub carried: Vec<Carried>,
    /// How many plans of single jobs were made for that.
    pub plans: usize,
    /// How often it was looked whether a job can go on.
    pub looks: u64,
}

/// Why a simulation failed.
#[derive(Debug, thiserror::Error)]
pub enum LiveError {
    /// A defect in planning.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A defect in a plan.
    #[error(transparent)]
    Deadlock(#[from] Deadlock),
    /// A defect in a plan's order or pieces.
    #[error(transparent)]
    Arrange(#[from] ArrangeError),
}

/// A job that was admitted.
struct Member {
    arrival: usize,
    /// Its number on the device. Numbers of jobs that have left are used again, so that an instant
    /// costs only as much as the present jobs.
    number: usize,
    /// Its present place; `None` until it takes up its first plan.
    seat: Option<Seat>,
    /// Its next place.
    next: Option<Seat>,
    left: u32,
    /// The part of the device's compute that it uses, in thousandths.
    utilisation: u32,
    /// Whether it is within an iteration.
    running: bool,
    /// From when on it can begin its next iteration.
    starts: Option<Nanos>,
    /// Whether what it keeps between iterations has been loaded.
    loaded: bool,
    /// The time of its iterations so far, at least the least of the jobs that were there before it.
    service: Nanos,
}

/// The controller.
pub struct Live<'a> {
    arrivals: &'a [Arrival<'a>],
    /// For each of them the time of an iteration alone and without a plan.
    alone: Vec<Nanos>,
    device: &'a Profile,
    budget: Bytes,
    conditions: Conditions<'a>,
    memo: Memo,
    /// Plans without events by the graph's hash.
    unplanned: BTreeMap<&'a str, Arc<Planned>>,
    /// Iterations by the address of their plan, with the plan.
    parts: BTreeMap<usize, (Arc<Planned>, Part)>,
    members: Vec<Member>,
    waiting: BTreeSet<usize>,
    /// The first job in line, where it must wait until another job leaves.
    blocked: Option<usize>,
    outcome: Outcome,
    /// How many of the copies carried name their job by its arrival.
    named: usize,
}

impl<'a> Live<'a> {
    /// Jobs in the order of their arrival, on a device with `budget` bytes for them.
    #[must_use]
    pub fn new(arrivals: &'a [Arrival<'a>], device: &'a Profile, budget: Bytes) -> Self {
        let outcome =
            Outcome { jobs: vec![Story::default(); arrivals.len()], ..Outcome::default() };
        let alone = |arrival: &Arrival<'_>| arrival.job.latencies.iter().map(|l| l.time).sum();
        Self {
            arrivals,
            alone: arrivals.iter().map(alone).collect(),
            device,
            budget,
            conditions: Conditions::default(),
            memo: Memo::for_many(),
            unplanned: BTreeMap::new(),
            parts: BTreeMap::new(),
            members: Vec::new(),
            waiting: BTreeSet::new(),
            blocked: None,
            outcome,
            named: 0,
        }
    }

    /// The same under other conditions.
    #[must_use]
    pub fn under(self, conditions: Conditions<'a>) -> Self {
        Self { conditions, ..self }
    }

    /// Simulates the jobs until all have ended.
    ///
    /// # Errors
    /// Only through a defect. A job that never fits is no error; its story says so.
    pub fn run(self) -> Result<Outcome, LiveError> {
        self.run_with(|_| {})
    }

    /// As [`Live::run`]. It calls `ended` with the number of ended jobs whenever that changes.
    ///
    /// # Errors
    /// As [`Live::run`].
    pub fn run_with(mut self, mut ended: impl FnMut(usize)) -> Result<Outcome, LiveError> {
        let mut gone = 0;
        let mut shared = Shared::new(&self.device.link);
        let mut coming = 0;
        loop {
            let arrival = self.arrivals.get(coming).map(|a| a.submitted);
            let passed = shared.now();
            let start =
                self.members.iter().filter_map(|m| m.starts).filter(|at| *at > passed).min();
            let limit = arrival.into_iter().chain(start).min().unwrap_or(Nanos(u64::MAX));
            let iteration = shared.until(limit)?;
            let now = shared.now();
            match iteration {
                Some((number, run)) => {
                    self.name(&mut shared.carried);
                    if self.ended(number, now, run.iteration, run.late_copies)? {
                        gone += 1;
                        ended(gone);
                    }
                }
                None if arrival.is_some_and(|at| at <= now) => {
                    self.waiting.insert(coming);
                    coming += 1;
                    self.admit(now)?;
                }
                None if start.is_none() => break,
                None => {}
            }
            self.settle(now);
            for member in &mut self.members {
                member.loaded |= member.starts.is_some_and(|at| at <= now);
            }
            for index in self.turn(now) {
                let member = &mut self.members[index];
                let Some(seat) = &member.seat else { continue };
                (member.starts, member.running) = (None, true);
                let run = &self.outcome.jobs[member.arrival].iterations;
                let durations = self.conditions.noise.map_or_else(
                    || Rc::clone(&seat.part.durations),
                    |noise| {
                        // Each iteration of each job draws from a sequence of its own.
                        let run = (member.arrival as u64) << 32 | run.len() as u64;
                        Rc::new(noise.apply(&seat.part.durations, run))
                    },
                );
                let work = Work {
                    program: Rc::clone(&seat.part.program),
                    durations,
                    utilisation: member.utilisation,
                };
                shared.begin(member.number, work);
            }
        }
        self.outcome.looks = shared.looks;
        self.outcome.plans = self.memo.made();
        self.outcome.carried = shared.carried;
        Ok(self.outcome)
    }

    /// The members that begin an iteration now.
    fn turn(&self, now: Nanos) -> Vec<usize> {
        // Only the oldest may be overdue.
        let oldest = self.members.iter().map(|member| member.arrival).min();
        let resident = |member: &Member| turns::Resident {
            candidate: Candidate {
                submit: self.arrivals[member.arrival].submitted,
                rank: self.rank(member.arrival, Some(member)),
                service: member.service,
                begun: self.begun(member),
                overdue: oldest == Some(member.arrival) && self.overdue(member.arrival, now),
            },
            utilisation: member.utilisation,
            running: member.running,
            ready: member.seat.is_some() && member.starts.is_some_and(|at| at <= now),
            loaded: member.loaded,
        };
        turns::begin(self.conditions.policy, &self.members.iter().map(resident).collect::<Vec<_>>())
    }

    /// Whether the policy lets this job go first because it was submitted long ago.
    fn overdue(&self, arrival: usize, now: Nanos) -> bool {
        let submitted = self.arrivals[arrival].submitted;
        self.conditions.policy.overdue(submitted, Settings::default().patience, now)
    }

    fn begun(&self, member: &Member) -> bool {
        member.running || !self.outcome.jobs[member.arrival].iterations.is_empty()
    }

    /// A job's rank by the policy. An iteration is expected to take as long as the last one, or as
    /// long as the plan says; before there is a plan, as long as its operators.
    fn rank(&self, arrival: usize, member: Option<&Member>) -> u64 {
        let it = &self.arrivals[arrival];
        let last = self.outcome.jobs[arrival].iterations.last().map(|iteration| iteration.1);
        let seat = member.and_then(|m| m.seat.as_ref().or(m.next.as_ref()));
        let each = last.or(seat.map(|seat| seat.part.planned)).unwrap_or(self.alone[arrival]);
        let left = member.map_or(it.iterations, |m| m.left);
        let left = Nanos(each.0.saturating_mul(u64::from(left)));
        self.conditions.policy.rank(it.submitted, left)
    }

    /// Replaces device numbers by arrivals in the copies since the last iteration's end.
    fn name(&mut self, carried: &mut [Carried]) {
        for copy in &mut carried[self.named..] {
            copy.job =
                self.members.iter().find(|m| m.number == copy.job).map_or(copy.job, |m| m.arrival);
        }
        self.named = carried.len();
    }

    /// Ends an iteration of a job. Returns whether it was the job's last.
    fn ended(
        &mut self,
        number: usize,
        now: Nanos,
        took: Nanos,
        late: u32,
    ) -> Result<bool, LiveError> {
        let Some(index) = self.members.iter().position(|m| m.number == number) else {
            return Ok(false);
        };
        let member = &mut self.members[index];
        let job = member.arrival;
        let story = &mut self.outcome.jobs[job];
        story.iterations.push((now - took, took));
        story.late += u64::from(late);
        member.running = false;
        member.service += took;
        member.left -= 1;
        let last = member.left == 0;
        if last {
            self.members.remove(index);
            self.blocked = None;
            self.outcome.jobs[job].ended = Some(now);
            if !self.members.is_empty() {
                self.plan(None)?;
            }
            self.admit(now)?;
        }
        Ok(last)
    }

    /// The waiting job that is admitted next: the first by the policy, or the oldest if overdue.
    fn first_in_line(&self, now: Nanos) -> Option<usize> {
        let oldest = self.waiting.first().copied()?;
        if self.overdue(oldest, now) {
            return Some(oldest);
        }
        self.waiting.iter().copied().min_by_key(|&job| (self.rank(job, None), job))
    }

    /// Admits waiting jobs, in order, that can be planned beside the others. A job that can't be
    /// admitted is tried again only after another job has left: until then planning would fail in
    /// the same way.
    fn admit(&mut self, now: Nanos) -> Result<(), LiveError> {
        while let Some(first) = self.first_in_line(now)
            && self.blocked != Some(first)
        {
            let refused = if self.may_enter(first)? {
                self.plan(Some(first))?
            } else {
                Some(
                    "its turn, because it fits only if the jobs before it give up memory"
                        .to_owned(),
                )
            };
            if let Some(why) = refused {
                self.outcome.jobs[first].waited_for.get_or_insert(why);
                if self.members.is_empty() {
                    // It is alone on the device and still too large, so it never fits.
                    self.waiting.remove(&first);
                    continue;
                }
                self.blocked = Some(first);
                break;
            }
            self.waiting.remove(&first);
            self.outcome.jobs[first].admitted = Some(now);
        }
        Ok(())
    }

    /// Plans all admitted jobs and one more. Returns why that one can't be admitted, if it can't.
    fn plan(&mut self, more: Option<usize>) -> Result<Option<String>, LiveError> {
        let indices: Vec<usize> = self.members.iter().map(|m| m.arrival).chain(more).collect();
        // More than `FEW` jobs are not planned for each other, so this is the result of
        // [`together::make`] without the cost of calling it at each launch and end.
        let policies =
            |index: &usize| together::papers::is_static(&self.arrivals[*index].job.method);
        if indices.len() > together::ways::FEW
            && !indices.iter().all(policies)
            && let Some(all) = self.all_unplanned(&indices)?
        {
            self.enter(more);
            self.seat(&indices, all)?;
            return Ok(None);
        }
        let one = self.conditions.policy.style.in_turn();
        let job = |&index: &usize| {
            let job = self.arrivals[index].job.clone();
            // Where one job runs at a time, none is beside others.
            if one { Job { method: job.method.alone(), ..job } } else { job }
        };
        let jobs = indices.iter().map(job).collect();
        let asked = Jobs {
            jobs,
            device: self.device,
            budget: self.budget,
            recorded_options: BTreeMap::new(),
        };
        let parts = match budget::feasible(together::make(&asked, &self.memo))? {
            Ok(made) => made.parts,
            Err(no) => {
                return Ok(Some(format!(
                    "{} of memory, {} of which were the least for it and those before it",
                    no.budget, no.lowest
                )));
            }
        };
        self.enter(more);
        for (&index, part) in indices.iter().zip(limits::swap_parts(&parts)) {
            let story = &mut self.outcome.jobs[index];
            story.swap_part = story.swap_part.max(part);
        }
        self.seat(&indices, parts)?;
        Ok(None)
    }

    /// A job's iteration under a plan, at the latencies at which it really runs.
    fn part(&mut self, job: usize, made: Arc<Planned>) -> Result<Part, LiveError> {
        let key = Arc::as_ptr(&made).addr();
        if let Some((_, known)) = self.parts.get(&key) {
            return Ok(known.clone());
        }
        let mut durations = Durations::nominal(&made.program, &self.device.link);
        if let Some(table) = self.conditions.real {
            let graph = arrange(self.arrivals[job].job.graph, &made.plan.jobs[0].arrangement)?;
            let real = latencies(&graph, self.device, Some(table));
            for (step, time) in made.program.steps.iter().zip(&mut durations.steps) {
                *time = real[step.operator.index()].time;
            }
        }
        let part = Part {
            bytes: made.plan.figures.arena_bytes.0,
            planned: made.run.iteration,
            durations: Rc::new(durations),
            program: Rc::new(made.program.clone()),
        };
        self.parts.insert(key, (made, part.clone()));
        Ok(part)
    }

    /// Whether a job may be admitted beside the members now. Where one job runs at a time, it may
    /// if it takes no memory away from the others, or if it runs next and preempts them: memory of
    /// a job that waits slows those that run.
    fn may_enter(&mut self, first: usize) -> Result<bool, LiveError> {
        let policy = self.conditions.policy;
        if !policy.style.in_turn() {
            return Ok(true);
        }
        let own = self.rank(first, None);
        let next = self.members.iter().all(|m| own < self.rank(m.arrival, Some(m)));
        if self.members.is_empty() || policy.style == Style::Best && next {
            return Ok(true);
        }
        let indices: Vec<usize> = self.members.iter().map(|m| m.arrival).chain([first]).collect();
        Ok(self.all_unplanned(&indices)?.is_some())
    }

    /// All jobs without events, if they fit so.
    fn all_unplanned(&mut self, indices: &[usize]) -> Result<Option<Vec<Arc<Planned>>>, LiveError> {
        let mut all = Vec::with_capacity(indices.len());
        let mut sum = 0u64;
        for &index in indices {
            let job = &self.arrivals[index].job;
            if !self.unplanned.contains_key(&*job.file.1) {
                let made = budget::unplanned(&Request {
                    file: job.file.clone(),
                    method: job.method.clone(),
                    ..Request::new(job.graph, self.device, job.latencies, Bytes::ZERO)
                })?;
                self.unplanned.insert(&job.file.1, Arc::new(made));
            }
            let one = &self.unplanned[&*job.file.1];
            sum = sum.saturating_add(one.plan.figures.arena_bytes.0);
            all.push(Arc::clone(one));
        }
        Ok((sum <= self.budget.0 / 512 * 512).then_some(all))
    }

    /// Counts a new plan of all jobs, and admits one more.
    fn enter(&mut self, more: Option<usize>) {
        self.outcome.replans += 1;
        if let Some(arrival) = more {
            let left = self.arrivals[arrival].iterations.max(1);
            let job = &self.arrivals[arrival].job;
            let utilisation =
                roofline::utilisation(&job.graph.operators, job.latencies, self.device);
            let number = (0..)
                .find(|number| self.members.iter().all(|m| m.number != *number))
                .unwrap_or(arrival);
            self.members.push(Member {
                arrival,
                number,
                seat: None,
                next: None,
                left,
                utilisation,
                running: false,
                starts: None,
                loaded: false,
                service: self.members.iter().map(|m| m.service).min().unwrap_or_default(),
            });
        }
    }

    /// Gives every job its place in the arena, in the order of launch.
    fn seat(&mut self, jobs: &[usize], plans: Vec<Arc<Planned>>) -> Result<(), LiveError> {
        let mut base = 0;
        for (index, (&job, plan)) in jobs.iter().zip(plans).enumerate() {
            let part = self.part(job, plan)?;
            let member = &mut self.members[index];
            let bytes = part.bytes;
            let next = Seat { part, base };
            let same = member.seat.as_ref().is_some_and(|seat| {
                seat.base == base && Rc::ptr_eq(&seat.part.program, &next.part.program)
            });
            member.next = (!same).then_some(next);
            base += bytes;
        }
        Ok(())
    }

    /// Lets jobs between iterations take up their new plans where no other job is in the way, and
    /// continue.
    fn settle(&mut self, now: Nanos) {
        let mut changed = true;
        while changed {
            changed = false;
            for index in 0..self.members.len() {
                let member = &self.members[index];
                if member.running || member.starts.is_some_and(|at| at > now) {
                    continue;
                }
                let free = |seat: &Seat| {
                    let others =
                        self.members.iter().enumerate().filter(|(other, _)| *other != index);
                    others
                        .filter_map(|(_, m)| m.seat.as_ref())
                        .all(|present| !present.touches(seat))
                };
                let moves = member.next.as_ref().is_some_and(free);
                // A job that waits for its turn stays where it is, or moves.
                if !moves && (member.seat.is_none() || member.starts.is_some()) {
                    continue;
                }
                let member = &mut self.members[index];
                let mut wait = Nanos::ZERO;
                if moves && let Some(next) = member.next.take() {
                    let graph = self.arrivals[member.arrival].job.graph;
                    wait = moving(graph, self.device, member.seat.as_ref(), &next);
                    let (base_bytes, arena_bytes) = (Bytes(next.base), Bytes(next.part.bytes));
                    let arena = Arena { at_ns: now, base_bytes, arena_bytes };
                    self.outcome.jobs[member.arrival].arenas.push(arena);
                    member.seat = Some(next);
                }
                member.starts = Some(now + wait);
                changed = true;
            }
        }
    }
}
