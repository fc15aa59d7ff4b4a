//! Simulates a trace of jobs under a policy and a mechanism on one device.
//!
//! Between two events (a job comes, ends, is killed, gives way or falls overdue) each running job
//! progresses at one speed, so time advances in closed form. A `clock` counts progress, and each
//! running job ends at a known reading of its clock. A job gives way at the end of an iteration.
//! Events at the same time are ordered by kind, then by clock and job. Turns (policy `fair`) are
//! modelled as their limit: all jobs of a lane progress alike, which is true to within a turn.
//!
//! In lanes, all memory has an address ([`super::layout`]). Where no hole is large enough, memory
//! is packed once the jobs whose memory moves are between two iterations, and packing takes time.

mod clock;
mod record;
mod room;
mod schedule;
mod turns;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use clock::{Clock, ClockId};

use super::contention::WHOLE;
use super::jobs::Job;
use super::lanes::{LaneId, Lanes, Mode};
use super::layout::{Item, Layout};
use super::mechanism::{Mechanism, Settings};
use super::memory::Need;
use super::policy::{Policy, Style};
use super::result::{JobResult, Outcome, Verdict};
use crate::units::{Bytes, Nanos, id32, saturated};

/// How many waiting jobs are tried when room is free, in the policy's order, unless all are.
const LOOK: usize = 64;
/// Fractional bits of the clock's nanoseconds.
const FINE: u32 = 20;
const NEVER: u64 = u64::MAX;

/// What an outcome records besides the figures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Keep {
    /// Memory over time.
    pub moments: bool,
    /// What each job does over time.
    pub stretches: bool,
    /// Records why this job waited.
    pub reasons: Option<u32>,
    /// Whether every change of memory is proved safe ([`super::check`]). Only lanes are checked,
    /// since other mechanisms keep only sums.
    pub proof: bool,
}

/// Simulates the trace, whose jobs are in order of submission.
#[must_use]
pub fn simulate(jobs: &[Job], policy: &Policy, settings: &Settings, keep: Keep) -> Outcome {
    let mut engine = Engine::new(jobs, policy, settings, keep);
    engine.run();
    engine.outcome
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Not submitted yet, or ended.
    Away,
    /// Submitted, without a byte on the device.
    Waiting,
    /// Resident, and not running.
    Idle,
    Running,
    /// An inference job being served.
    Serving,
}

/// Priority, rank and position: smaller goes first.
type Key = (i64, u64, u32);

/// The memory needs of several jobs, by size.
#[derive(Clone, Debug, Default)]
struct Group {
    persistent: u128,
    /// The jobs by persistent bytes, by ephemeral bytes and by their sum.
    by: [BTreeSet<(Bytes, u32)>; 3],
}

impl Group {
    fn add(&mut self, job: u32, need: Need) {
        self.persistent += u128::from(need.0.0);
        for (by, bytes) in self.by.iter_mut().zip([need.0, need.1, need.0 + need.1]) {
            by.insert((bytes, job));
        }
    }

    fn remove(&mut self, job: u32, need: Need) {
        let sizes = self.by.iter_mut().zip([need.0, need.1, need.0 + need.1]);
        if sizes.fold(false, |_, (by, bytes)| by.remove(&(bytes, job))) {
            self.persistent -= u128::from(need.0.0);
        }
    }

    fn is_empty(&self) -> bool {
        self.by[0].is_empty()
    }

    fn jobs(&self) -> Vec<u32> {
        self.by[0].iter().map(|job| job.1).collect()
    }

    /// The largest persistent bytes, ephemeral bytes and sum, perhaps of different jobs.
    fn largest(&self) -> [Bytes; 3] {
        self.by.each_ref().map(|by| by.last().map_or(Bytes::ZERO, |last| last.0))
    }
}

#[derive(Default)]
struct Engine<'a> {
    jobs: &'a [Job],
    policy: Policy,
    settings: Settings,
    keep: Keep,
    style: Style,
    room: Lanes,
    /// Addresses, in lanes. Salus's released code leaves them to the framework's allocator.
    layout: Option<Layout>,
    /// Items of the room that may have changed since the layout was last updated.
    touched: Vec<Item>,
    /// What each job needs. It rises when a job outgrows what it was admitted with.
    needs: Vec<Need>,
    /// Jobs that have outgrown what they were admitted with.
    grown: BTreeSet<u32>,
    /// Whether persistent memory of waiting jobs may go to the host.
    moves: bool,
    /// Whether lanes follow Salus's released code.
    released: bool,
    /// Whether every waiting job is tried whenever room is free, whatever waits before it.
    tries_all: bool,
    /// The least persistent bytes of any job.
    least: Bytes,
    now: u64,
    /// The running jobs, by clock.
    clocks: BTreeMap<ClockId, Clock>,
    clock_of: Vec<ClockId>,
    serving: u64,
    /// Sum of the running jobs' iteration times, for the cost of paging.
    iterations: u128,
    state: Vec<State>,
    /// Since when each job is in its state, where that is kept.
    since: Vec<u64>,
    remaining: Vec<u64>,
    /// The clock's reading when the work of a running job began.
    base: Vec<u128>,
    on_host: Vec<bool>,
    waiting: BTreeSet<Key>,
    /// The residents that do not run, by lane; in lane 0 those without one.
    idle: BTreeSet<(LaneId, Key)>,
    services: BTreeSet<u32>,
    /// Jobs that are submitted and not done, oldest first.
    there: BTreeSet<u32>,
    timers: BinaryHeap<Reverse<(u64, u32)>>,
    next: usize,
    /// The job that last had the device to itself; its memory is copied out at a switch.
    last: Option<u32>,
    /// The jobs that take turns, and which of them have memory on the device.
    sharers: Group,
    seated: turns::Seated,
    /// The memory that any of them may need in its turn.
    turn: Need,
    /// Whether room was freed since the waiting jobs were last tried.
    freed: bool,
    came: Vec<u32>,
    /// Integral of slowness over time, in per mille nanoseconds, and its value when each service
    /// began.
    slow: u128,
    slow_at: BTreeMap<u32, u128>,
    /// Inference jobs that are being served.
    served: Group,
    /// The bytes that a turn moves, and the time of a turn with its copies.
    turning: Option<(u128, u128)>,
    outcome: Outcome,
}

impl<'a> Engine<'a> {
    fn new(jobs: &'a [Job], policy: &Policy, settings: &Settings, keep: Keep) -> Self {
        let style = settings.style(policy.style);
        let n = jobs.len();
        let result = JobResult { dilation: 1000, ..JobResult::default() };
        let lanes = settings.mechanism == Mechanism::Lanes;
        let released = lanes && settings.mode == Mode::AsReleased;
        Self {
            jobs,
            policy: *policy,
            settings: *settings,
            keep,
            style,
            room: settings.room(style),
            layout: (lanes && !released).then(|| Layout::new(settings.capacity)),
            needs: jobs.iter().map(|job| job.need).collect(),
            moves: policy.moves && lanes && settings.mode == Mode::Neap && !settings.stays,
            released,
            tries_all: lanes && settings.mode == Mode::Paper,
            least: jobs.iter().map(|job| job.need.0).min().unwrap_or_default(),
            clock_of: vec![0; n],
            state: vec![State::Away; n],
            since: vec![0; if keep.stretches { n } else { 0 }],
            remaining: jobs.iter().map(|j| j.work.0).collect(),
            base: vec![0; n],
            on_host: vec![false; n],
            outcome: Outcome { jobs: vec![result; n], ..Outcome::default() },
            ..Self::default()
        }
    }

    fn run(&mut self) {
        loop {
            let arrival = self.jobs.get(self.next).map_or(NEVER, |j| j.submit.0);
            let timer = self.timers.peek().map_or(NEVER, |t| t.0.0);
            let at = arrival.min(timer).min(self.reached()).min(self.falls_overdue());
            if at == NEVER {
                return;
            }
            self.advance(at);
            self.events();
            self.schedule();
            self.lie();
            self.settle_clocks();
            self.set_speed();
            self.record();
        }
    }

    fn key(&self, job: u32) -> Key {
        let it = &self.jobs[job as usize];
        (-i64::from(it.priority), self.policy.rank(it.submit, Nanos(self.left(job))), job)
    }

    /// A waiting job's place in line. The released code admits in order of submission under every
    /// policy.
    fn line_key(&self, job: u32) -> Key {
        let it = &self.jobs[job as usize];
        if self.released { (-i64::from(it.priority), it.submit.0, job) } else { self.key(job) }
    }

    /// A resident's place among those that do not run.
    fn idle_key(&self, job: u32) -> (LaneId, Key) {
        (self.lane_of(job), self.key(job))
    }

    /// A resident does not run for now.
    fn rest(&mut self, job: u32) {
        self.turn_to(job, State::Idle);
        self.idle.insert(self.idle_key(job));
    }

    /// The work that a job has left now, in nanoseconds alone.
    fn left(&self, job: u32) -> u64 {
        let index = job as usize;
        if self.state[index] != State::Running {
            return self.remaining[index];
        }
        let done = saturated(self.done(job, self.clock(job).at));
        self.remaining[index].saturating_sub(done)
    }

    /// The work that a running job has done since it started, when its clock reads `at`.
    fn done(&self, job: u32, at: u128) -> u128 {
        (at.saturating_sub(self.base[job as usize]) * 1000 / self.slowdown(job)) >> FINE
    }

    fn slowdown(&self, job: u32) -> u128 {
        u128::from(self.settings.slowdown(self.jobs[job as usize].utilisation))
    }

    /// The time that some work of a job takes, in units of the clock.
    fn units(&self, job: u32, work: u64) -> u128 {
        (u128::from(work) * self.slowdown(job) / 1000) << FINE
    }

    fn events(&mut self) {
        while let Some((_, job)) = self.due(|clock| &clock.running) {
            self.end(job, Verdict::Done);
        }
        while let Some((at, job)) = self.due(|clock| &clock.growths) {
            self.clock_mut(job).growths.pop_first();
            self.outgrow(job, at);
        }
        while let Some((at, job)) = self.due(|clock| &clock.drains) {
            self.stop(job, at);
        }
        while let Some(&Reverse((at, job))) = self.timers.peek()
            && at <= self.now
        {
            self.timers.pop();
            match self.state[job as usize] {
                State::Away => {}
                State::Serving if self.jobs[job as usize].kill.is_none_or(|k| k.0 > at) => {
                    self.end(job, Verdict::Done)
                }
                _ => self.end(job, Verdict::Killed),
            }
        }
        while let Some(job) = self.jobs.get(self.next)
            && job.submit.0 <= self.now
        {
            let id = id32(self.next);
            self.next += 1;
            let fits = self.room.ever(job.need);
            if !fits || job.work == Nanos::ZERO {
                let verdict = if fits { Verdict::Empty } else { Verdict::NeverFits };
                let result = &mut self.outcome.jobs[id as usize];
                (result.verdict, result.end) = (verdict, job.submit);
                let (persistent, ephemeral) = job.need;
                self.say(id, || format!("{}: needs {persistent} + {ephemeral}", verdict.word()));
                continue;
            }
            if let Some(kill) = job.kill {
                self.timers.push(Reverse((kill.0, id)));
            }
            self.turn_to(id, State::Waiting);
            if job.rate.is_some() {
                self.services.insert(id);
            } else {
                self.there.insert(id);
                self.waiting.insert(self.line_key(id));
                self.came.push(id);
            }
        }
    }

    /// Removes a job from every list that it is in.
    fn end(&mut self, job: u32, verdict: Verdict) {
        let index = job as usize;
        let left = if verdict == Verdict::Done { 0 } else { self.left(job) };
        self.outcome.jobs[index].served = self.jobs[index].work.saturating_sub(Nanos(left));
        match self.state[index] {
            State::Away => return,
            State::Waiting => {
                self.waiting.remove(&self.line_key(job));
                self.services.remove(&job);
            }
            State::Idle => _ = self.idle.remove(&self.idle_key(job)),
            State::Running => self.take_off(job),
            State::Serving => {
                self.serving -= u64::from(self.demand(job));
                let result = &mut self.outcome.jobs[index];
                let time = self.now - result.start.unwrap_or_default().0;
                if let Some(before) = self.slow_at.remove(&job) {
                    let mean = (self.slow - before) / u128::from(time).max(1);
                    result.dilation = u32::try_from(mean).unwrap_or(u32::MAX).max(1000);
                }
                result.served = Nanos(time);
            }
        }
        self.release(job);
        self.turn_to(job, State::Away);
        self.there.remove(&job);
        let result = &mut self.outcome.jobs[index];
        (result.end, result.verdict) = (Nanos(self.now), verdict);
        self.last = self.last.filter(|last| *last != job);
    }

    /// Stops a running job. Its memory stays where it is.
    fn take_off(&mut self, job: u32) {
        let index = job as usize;
        let (end, growth) = (self.base[index] + self.length(job), self.growth(job));
        let utilisation = u64::from(self.jobs[index].utilisation);
        let clock = self.clock_mut(job);
        clock.running.remove(&(end, job));
        clock.drains.retain(|d| d.1 != job);
        if let Some(at) = growth {
            clock.growths.remove(&(at, job));
        }
        clock.utilised -= utilisation;
        self.iterations -= u128::from(self.jobs[index].iteration.0);
    }

    /// A running job gives way at the end of an iteration, when the clock read `at`.
    fn stop(&mut self, job: u32, at: u128) {
        let index = job as usize;
        let iteration = u128::from(self.jobs[index].iteration.0);
        let done = self.done(job, at) + iteration / 2;
        self.take_off(job);
        let done = saturated(done / iteration * iteration);
        self.remaining[index] = self.remaining[index].saturating_sub(done).max(1);
        self.outcome.jobs[index].switches += 1;
        self.outcome.switches += 1;
        if self.settings.mechanism == Mechanism::Lanes {
            if matches!(self.style, Style::Fill | Style::UntilBusy) {
                self.park(job);
            }
            self.rest(job);
        } else {
            self.room.leave(job);
            self.on_host[index] = true;
            self.last = Some(job);
            self.turn_to(job, State::Waiting);
            self.waiting.insert(self.line_key(job));
        }
        self.freed = true;
    }

    /// Asks a running job to give way at the end of its iteration.
    fn drain(&mut self, job: u32) {
        let (base, iteration) = (self.base[job as usize], self.boundary(job));
        let clock = self.clock_mut(job);
        if clock.drains.iter().any(|d| d.1 == job) {
            return;
        }
        let at = base + clock.at.saturating_sub(base).div_ceil(iteration) * iteration;
        if at <= clock.at.max(base) {
            self.stop(job, at);
        } else {
            clock.drains.insert((at, job));
        }
    }

    /// Starts a job that is resident, after `out` bytes are moved to the host and its own
    /// persistent memory, if it is on the host, is moved back.
    fn start(&mut self, job: u32, out: Bytes) {
        let index = job as usize;
        let back = std::mem::take(&mut self.on_host[index]);
        let into = if back { self.needs[index].0 } else { Bytes::ZERO };
        self.outcome.moved += u128::from((out + into).0);
        let delay = self.settings.copies(out, into);
        let it = &self.jobs[index];
        self.turn_to(job, State::Running);
        self.iterations += u128::from(it.iteration.0);
        self.outcome.jobs[index].start.get_or_insert(Nanos(self.now));
        self.on_clock(job);
        self.base[index] = self.clock_mut(job).at + (u128::from(delay) << FINE);
        let end = self.base[index] + self.length(job);
        let growth = self.growth(job).filter(|at| *at < end);
        let clock = self.clock_mut(job);
        clock.running.insert((end, job));
        clock.utilised += u64::from(it.utilisation);
        clock.growths.extend(growth.map(|at| (at, job)));
    }

    /// The work that a running job had left when it started, in units of the clock.
    fn length(&self, job: u32) -> u128 {
        self.units(job, self.remaining[job as usize])
    }

    /// The length of a job's iteration, in units of the clock.
    fn boundary(&self, job: u32) -> u128 {
        self.units(job, self.jobs[job as usize].iteration.0)
    }

    /// The clock's reading at which a running job will outgrow what it was admitted with; `None` if
    /// it ends before.
    fn growth(&self, job: u32) -> Option<u128> {
        let it = &self.jobs[job as usize];
        let after = it.growth.as_ref().filter(|_| !self.grown.contains(&job))?.after;
        let done = (it.work.0 - self.remaining[job as usize]) / it.iteration.0;
        let until =
            u128::from(after.saturating_sub(done).max(1)).saturating_mul(self.boundary(job));
        Some(self.base[job as usize].saturating_add(until))
    }

    /// The share of the device that a service keeps busy, per mille.
    fn demand(&self, job: u32) -> u32 {
        let it = &self.jobs[job as usize];
        let asked = u128::from(it.rate.unwrap_or(0))
            * u128::from(it.iteration.0)
            * u128::from(it.utilisation)
            / 1_000_000_000_000;
        u32::try_from(asked).unwrap_or(u32::MAX).clamp(1, WHOLE)
    }
}
