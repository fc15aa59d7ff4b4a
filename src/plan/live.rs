//! Jobs that come and go: all are planned again together at each launch and each end, and each job
//! takes up its new plan at an iteration boundary.
//!
//! In the paper's terms (TENSILE, its architecture figure), the *controller* is [`Live::run`],
//! which sees launches and ends. The *scheduler* is [`super::global`]. Executors and the swap
//! executor are [`crate::sim::together`]. The persistent memory of a job is what is resident at the
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
//! in the policy's order, and the result says what it waits for. Cost: one [`super::global`] plan
//! for each launch or end.

mod turns;

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use super::budget::{self, PlanError, Planned, Request};
use super::global::{self, Job, Jobs, Memo, limits};
use super::share::Share;
use crate::device::latency::{Table, latencies};
use crate::device::{Profile, roofline};
use crate::job::Graph;
use crate::job::arrange::{ArrangeError, arrange};
use crate::sim::engine::{self, Deadlock, Durations};
use crate::sim::noise::Noise;
use crate::sim::program::{Begin, Direction, Program};
use crate::sim::share::mechanism::Settings;
use crate::sim::share::policy::{Facts, Pack, Policy};
use crate::sim::together::{Carried, Shared, Work};
use crate::units::{Bytes, Nanos, TensorId};

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
    pub policy: &'a dyn Policy,
    /// The latencies at which operators really run.
    pub real: Option<&'a Table>,
    /// By how much every latency varies.
    pub noise: Option<Noise>,
}

impl Default for Conditions<'_> {
    fn default() -> Self {
        Self { policy: &Pack, real: None, noise: None }
    }
}

/// The history of a job.
#[derive(Clone, Debug, Default)]
pub struct Story {
    /// Start and length of each iteration.
    pub iterations: Vec<(Nanos, Nanos)>,
    /// When it was admitted; `None` if it never was.
    pub admitted: Option<Nanos>,
    /// When it ended.
    pub ended: Option<Nanos>,
    /// The reason for its first wait.
    pub waited_for: Option<String>,
    /// Its sub-arenas: from which time on, address and size.
    pub arenas: Vec<(Nanos, Bytes, Bytes)>,
    /// Number of late copies.
    pub late: u64,
    /// The largest part of all jobs' swaps that any plan let it make beside others.
    pub swap_part: Share,
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

/// A job's plan at its place in the arena.
#[derive(Clone)]
struct Seat {
    part: Part,
    base: u64,
}

impl Seat {
    fn touches(&self, other: &Self) -> bool {
        self.base < other.base + other.part.bytes && other.base < self.base + self.part.bytes
    }

    /// The tensors on the device between iterations.
    fn persistent(&self) -> BTreeSet<TensorId> {
        self.part
            .program
            .residencies
            .iter()
            .filter(|r| r.begin == Begin::Iteration)
            .filter_map(|r| r.tensor)
            .collect()
    }
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

/// A job's iteration under its plan.
#[derive(Clone)]
struct Part {
    program: Rc<Program>,
    /// Without noise.
    durations: Rc<Durations>,
    /// How long the iteration was planned to take alone.
    planned: Nanos,
    bytes: u64,
}

/// The controller.
pub struct Live<'a> {
    arrivals: &'a [Arrival<'a>],
    device: &'a Profile,
    budget: Bytes,
    conditions: Conditions<'a>,
    memo: Memo,
    /// Unplanned iterations by the graph's hash.
    unplanned: BTreeMap<&'a str, Part>,
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
        Self {
            arrivals,
            device,
            budget,
            conditions: Conditions::default(),
            memo: Memo::default(),
            unplanned: BTreeMap::new(),
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
        self.outcome.carried = shared.carried;
        Ok(self.outcome)
    }

    /// The members that begin an iteration now.
    fn turn(&self, now: Nanos) -> Vec<usize> {
        let resident = |member: &Member| turns::Resident {
            facts: self.facts(member.arrival, Some(member)),
            service: member.service,
            begun: self.begun(member),
            running: member.running,
            ready: member.seat.is_some() && member.starts.is_some_and(|at| at <= now),
            loaded: member.loaded,
        };
        let residents: Vec<turns::Resident> = self.members.iter().map(resident).collect();
        let oldest = self.members.iter().enumerate().min_by_key(|(_, member)| member.arrival);
        let overdue = oldest.filter(|(_, m)| self.overdue(m.arrival, now)).map(|(index, _)| index);
        turns::begin(self.conditions.policy, &residents, overdue)
    }

    /// Whether the policy lets this job go first because it was submitted long ago.
    fn overdue(&self, arrival: usize, now: Nanos) -> bool {
        let submitted = self.arrivals[arrival].submitted;
        self.conditions.policy.ages()
            && submitted.0.saturating_add(Settings::default().patience.0) <= now.0
    }

    fn begun(&self, member: &Member) -> bool {
        member.running || !self.outcome.jobs[member.arrival].iterations.is_empty()
    }

    /// What the policy knows of a job. An iteration is expected to take as long as the last one, or
    /// as long as the plan says; before there is a plan, as long as its operators.
    fn facts(&self, arrival: usize, member: Option<&Member>) -> Facts {
        let it = &self.arrivals[arrival];
        let last = self.outcome.jobs[arrival].iterations.last().map(|iteration| iteration.1);
        let seat = member.and_then(|m| m.seat.as_ref().or(m.next.as_ref()));
        let each = last
            .or(seat.map(|seat| seat.part.planned))
            .unwrap_or_else(|| it.job.latencies.iter().map(|latency| latency.time).sum());
        let left = member.map_or(it.iterations, |m| m.left);
        Facts {
            submit: it.submitted,
            remaining: Nanos(each.0.saturating_mul(u64::from(left))),
            utilisation: member.map_or(0, |m| m.utilisation),
        }
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
        let rank = |job: &usize| (self.conditions.policy.rank(&self.facts(*job, None)), *job);
        self.waiting.iter().copied().min_by_key(rank)
    }

    /// Admits waiting jobs, in order, that can be planned beside the others. A job that can't be
    /// admitted is tried again only after another job has left: until then planning would fail in
    /// the same way.
    fn admit(&mut self, now: Nanos) -> Result<(), LiveError> {
        while let Some(first) = self.first_in_line(now)
            && self.blocked != Some(first)
        {
            if let Some(why) = self.plan(Some(first))? {
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
        if let Some(all) = self.all_unplanned(&indices)? {
            self.enter(more);
            self.seat(all);
            return Ok(None);
        }
        let jobs = indices.iter().map(|&index| self.arrivals[index].job.clone()).collect();
        let asked = Jobs {
            jobs,
            device: self.device,
            budget: self.budget,
            recorded_options: BTreeMap::new(),
        };
        let together = match global::make_with(&asked, &mut self.memo) {
            Ok(together) => together,
            Err(PlanError::Infeasible(no)) => {
                return Ok(Some(format!(
                    "{} of memory, {} of which were the least for it and those before it",
                    no.budget, no.lowest
                )));
            }
            Err(defect) => return Err(defect.into()),
        };
        self.enter(more);
        for (&index, part) in indices.iter().zip(limits::swap_parts(&together.parts)) {
            let story = &mut self.outcome.jobs[index];
            story.swap_part = story.swap_part.max(part);
        }
        let planned = indices.iter().zip(together.parts).map(|(&job, part)| self.part(job, part));
        let planned = planned.collect::<Result<Vec<Part>, LiveError>>()?;
        self.seat(planned);
        Ok(None)
    }

    /// A job's iteration under a plan, at the latencies at which it really runs.
    fn part(&self, job: usize, made: Planned) -> Result<Part, LiveError> {
        let mut durations = Durations::nominal(&made.program, &self.device.link);
        if let Some(table) = self.conditions.real {
            let graph = arrange(self.arrivals[job].job.graph, &made.plan.jobs[0].arrangement)?;
            let real = latencies(&graph, self.device, Some(table));
            for (step, time) in made.program.steps.iter().zip(&mut durations.steps) {
                *time = real[step.operator.index()].time;
            }
        }
        Ok(Part {
            bytes: made.plan.figures.arena_bytes.0,
            planned: made.run.iteration,
            durations: Rc::new(durations),
            program: Rc::new(made.program),
        })
    }

    /// All jobs without events, if they fit so and are too many to be planned for each other. This
    /// is the result of [`global::make_with`], without the cost of calling it at each launch and
    /// end.
    fn all_unplanned(&mut self, indices: &[usize]) -> Result<Option<Vec<Part>>, LiveError> {
        if indices.len() <= global::aware::FEW {
            return Ok(None);
        }
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
                let unplanned = self.part(index, made)?;
                self.unplanned.insert(&job.file.1, unplanned);
            }
            let one = &self.unplanned[&*job.file.1];
            sum = sum.saturating_add(one.bytes);
            all.push(one.clone());
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
    fn seat(&mut self, parts: Vec<Part>) {
        let mut base = 0;
        for (member, part) in self.members.iter_mut().zip(parts) {
            let bytes = part.bytes;
            let next = Seat { part, base };
            let same = member
                .seat
                .as_ref()
                .is_some_and(|seat| (seat.base, seat.part.bytes) == (base, bytes));
            // The same place and size come from the same plan.
            member.next = (!same).then_some(next);
            base += bytes;
        }
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
                    self.outcome.jobs[member.arrival].arenas.push((
                        now,
                        Bytes(next.base),
                        Bytes(next.part.bytes),
                    ));
                    member.seat = Some(next);
                }
                member.starts = Some(now + wait);
                changed = true;
            }
        }
    }
}

/// The time to change from one plan's boundary to another's.
fn moving(graph: &Graph, device: &Profile, from: Option<&Seat>, to: &Seat) -> Nanos {
    let alone = |direction, tensor: &TensorId| {
        engine::copy_time(&device.link, direction, graph.tensor(*tensor).bytes, false)
    };
    let there = to.persistent();
    let Some(from) = from else {
        return there.iter().map(|tensor| alone(Direction::H2d, tensor)).sum();
    };
    let here = from.persistent();
    // Bytes that stay on the device are read and written once.
    let moved: u128 =
        here.intersection(&there).map(|t| 2 * u128::from(graph.tensor(*t).bytes.0)).sum();
    let on_device = (moved * 1_000_000_000).div_ceil(u128::from(device.memory_bandwidth.max(1)));
    let out: Nanos = here.difference(&there).map(|tensor| alone(Direction::D2h, tensor)).sum();
    let back: Nanos = there.difference(&here).map(|tensor| alone(Direction::H2d, tensor)).sum();
    Nanos(u64::try_from(on_device).unwrap_or(u64::MAX / 4)) + out + back
}
