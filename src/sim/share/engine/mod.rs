//! A trace of jobs through a policy and a mechanism: what happens when, on one device.
//!
//! Between two events (a job comes, ends, is killed, gives way, falls overdue) all that run go at one speed, so that time advances in
//! closed form: a clock of progress, in 2^-20 ns of a job's time alone, and for each running job the reading at which it ends. Giving
//! way waits for the end of an iteration. Events at the same time go by kind, then by job. Turns (policy `fair`) are their limit:
//! everyone progresses alike, true to within a turn. Not for: why anybody's turn it is ([`super::policy`]) nor who fits
//! ([`super::lanes`]).

mod schedule;
mod tell;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use super::contention::WHOLE;
use super::jobs::Job;
use super::lanes::Mode;
use super::mechanism::{Mechanism, Room, Settings};
use super::policy::{Facts, Policy, Style};
use super::result::{JobResult, Outcome, Stretch, Verdict};
use crate::units::{Bytes, Nanos};

/// Those who wait that are looked at when room is free, in the policy's order.
const LOOK: usize = 64;
/// Bits of a nanosecond on the clock of progress.
const FINE: u32 = 20;
const NEVER: u64 = u64::MAX;

/// What is kept beside the figures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Keep {
    /// Memory over time, and who ran when.
    pub moments: bool,
    /// Why this job waited.
    pub reasons: Option<u32>,
}

/// Runs the trace, whose jobs are in order of submission.
#[must_use]
pub fn simulate(jobs: &[Job], policy: &dyn Policy, settings: &Settings, keep: Keep) -> Outcome {
    let mut engine = Engine::new(jobs, policy, settings, keep);
    engine.run();
    engine.outcome
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Not there yet, or no more.
    Away,
    /// There, without a byte on the device.
    Waiting,
    /// Resident, and not running.
    Idle,
    Running,
    /// An inference job being served.
    Serving,
}

/// Priority, rank and position: smaller goes first.
type Key = (i64, u64, u32);

struct Engine<'a> {
    jobs: &'a [Job],
    policy: &'a dyn Policy,
    settings: &'a Settings,
    keep: Keep,
    style: Style,
    room: Room,
    /// Whether persistent memory of those who wait may leave.
    moves: bool,
    now: u64,
    clock: u128,
    /// Progress in a nanosecond, as a fraction.
    speed: (u128, u128),
    utilised: u64,
    serving: u64,
    /// Sum over running jobs of need and of iteration, for paging.
    iterations: u128,
    state: Vec<State>,
    remaining: Vec<u64>,
    /// Reading of the clock when the work of a running job begins, and when it was put on the device.
    base: Vec<u128>,
    since: Vec<u64>,
    on_host: Vec<bool>,
    running: BTreeSet<(u128, u32)>,
    drains: BTreeSet<(u128, u32)>,
    waiting: BTreeSet<Key>,
    idle: BTreeSet<Key>,
    services: BTreeSet<u32>,
    /// Trace jobs that are there, oldest first.
    there: BTreeSet<u32>,
    timers: BinaryHeap<Reverse<(u64, u32)>>,
    next: usize,
    /// Who has the device where one has it: its memory goes out at a switch.
    last: Option<u32>,
    /// For turns: persistent bytes and largest needs of those who take turns.
    sharers: (u128, BTreeSet<(u64, u32)>),
    /// Whether room came free since those who wait were looked at.
    freed: bool,
    came: Vec<u32>,
    /// Integral of slowness over time, per mille nanoseconds; and its value when a service began.
    slow: u128,
    slow_at: BTreeMap<u32, u128>,
    /// Persistent bytes and largest need of those that are served.
    served: (u64, BTreeSet<(u64, u32)>),
    /// Bytes that a turn moves, and the turn with its copies.
    turning: Option<(u128, u128)>,
    outcome: Outcome,
}

impl<'a> Engine<'a> {
    fn new(jobs: &'a [Job], policy: &'a dyn Policy, settings: &'a Settings, keep: Keep) -> Self {
        let style = settings.style(policy.style());
        let n = jobs.len();
        let result = JobResult { start: None, end: Nanos::ZERO, verdict: Verdict::Done, switches: 0, dilation: 1000 };
        Self {
            jobs,
            policy,
            settings,
            keep,
            style,
            room: settings.room(style),
            moves: policy.moves() && settings.mechanism == Mechanism::Lanes && settings.mode == Mode::Neap,
            now: 0,
            clock: 0,
            speed: (1, 1),
            utilised: 0,
            serving: 0,
            iterations: 0,
            state: vec![State::Away; n],
            remaining: jobs.iter().map(|j| j.work.0).collect(),
            base: vec![0; n],
            since: vec![0; n],
            on_host: vec![false; n],
            running: BTreeSet::new(),
            drains: BTreeSet::new(),
            waiting: BTreeSet::new(),
            idle: BTreeSet::new(),
            services: BTreeSet::new(),
            there: BTreeSet::new(),
            timers: BinaryHeap::new(),
            next: 0,
            last: None,
            sharers: (0, BTreeSet::new()),
            freed: false,
            came: Vec::new(),
            slow: 0,
            slow_at: BTreeMap::new(),
            served: (0, BTreeSet::new()),
            turning: None,
            outcome: Outcome {
                jobs: vec![result; n],
                switches: 0,
                moved: 0,
                busy: 0,
                moments: Vec::new(),
                stretches: Vec::new(),
                reasons: Vec::new(),
            },
        }
    }

    fn run(&mut self) {
        loop {
            let arrival = self.jobs.get(self.next).map_or(NEVER, |j| j.submit.0);
            let timer = self.timers.peek().map_or(NEVER, |t| t.0.0);
            let end = self.running.first().map_or(NEVER, |r| self.reached(r.0));
            let drain = self.drains.first().map_or(NEVER, |d| self.reached(d.0));
            let at = arrival.min(timer).min(end).min(drain).min(self.falls_overdue());
            if at == NEVER {
                return;
            }
            self.advance(at);
            self.events();
            self.schedule();
            self.set_speed();
            self.tell();
        }
    }

    /// When the clock reads `target` at the present speed.
    fn reached(&self, target: u128) -> u64 {
        let wait = (target.saturating_sub(self.clock) * self.speed.1).div_ceil(self.speed.0 << FINE);
        u64::try_from(wait).unwrap_or(NEVER).saturating_add(self.now)
    }

    fn advance(&mut self, at: u64) {
        let passed = u128::from(at - self.now);
        self.clock += (passed * (self.speed.0 << FINE)) / self.speed.1;
        let load = self.load();
        self.outcome.busy += passed * u128::from(load.min(u64::from(WHOLE)));
        self.slow += passed * u128::from(load.max(u64::from(WHOLE)));
        if let Some((bytes, turn)) = self.turning {
            self.outcome.moved += bytes * passed / turn;
        }
        self.now = at;
    }

    /// Compute asked for, per mille.
    fn load(&self) -> u64 {
        match (self.style, self.running.len() as u64) {
            (Style::Rotating, n) if n > 0 => self.utilised / n + self.serving,
            _ => self.utilised + self.serving,
        }
    }

    fn set_speed(&mut self) {
        self.turning = None;
        let n = self.running.len() as u128;
        let whole = u128::from(WHOLE);
        let (mut num, mut den) = (whole, u128::from(self.load()).max(whole));
        match self.settings.mechanism {
            // Partitions are slow by themselves.
            Mechanism::Static => den = whole,
            Mechanism::MpsOc if n > 0 => {
                let over = self.room.used().saturating_sub(self.settings.capacity);
                let paging = u128::from(self.settings.copies(over, over));
                let iteration = (self.iterations / n).max(1);
                (num, den) = (num * iteration, den * iteration + whole * paging);
            }
            _ => {}
        }
        if self.style == Style::Rotating && n > 0 {
            den *= n;
            let largest = self.sharers.1.last().map_or(0, |l| l.0);
            let all = self.sharers.0 + u128::from(largest) > u128::from(self.settings.capacity.0);
            if n > 1
                && (all || self.settings.mechanism == Mechanism::Checkpoint)
                && (self.moves || self.settings.mechanism == Mechanism::Checkpoint)
            {
                let mean = Bytes(u64::try_from(self.sharers.0 / n).unwrap_or(u64::MAX));
                let turn = u128::from(self.settings.turn.0.max(1));
                let whole = turn + u128::from(self.settings.copies(mean, mean));
                (num, den) = (num * turn, den * whole);
                self.turning = Some((2 * u128::from(mean.0), whole));
            }
        }
        let bits = (128 - den.leading_zeros()).saturating_sub(38);
        self.speed = ((num >> bits).max(1), den >> bits);
    }

    fn key(&self, job: u32) -> Key {
        let it = &self.jobs[job as usize];
        let facts = Facts { submit: it.submit, remaining: Nanos(self.left(job)), utilisation: it.utilisation };
        (-i64::from(it.priority), self.policy.rank(&facts), job)
    }

    /// Work left of a job now.
    fn left(&self, job: u32) -> u64 {
        let index = job as usize;
        if self.state[index] != State::Running {
            return self.remaining[index];
        }
        let done = (self.clock.saturating_sub(self.base[index]) * 1000 / self.stretch(job)) >> FINE;
        self.remaining[index].saturating_sub(u64::try_from(done).unwrap_or(NEVER))
    }

    fn stretch(&self, job: u32) -> u128 {
        u128::from(self.settings.stretch(self.jobs[job as usize].utilisation))
    }

    fn events(&mut self) {
        while let Some(&(end, job)) = self.running.first()
            && end <= self.clock
        {
            self.end(job, Verdict::Done);
        }
        while let Some(&(at, job)) = self.drains.first()
            && at <= self.clock
        {
            self.stop(job, at);
        }
        while let Some(&Reverse((at, job))) = self.timers.peek()
            && at <= self.now
        {
            self.timers.pop();
            match self.state[job as usize] {
                State::Away => {}
                State::Serving if self.jobs[job as usize].kill.is_none_or(|k| k.0 > at) => self.end(job, Verdict::Done),
                _ => self.end(job, Verdict::Killed),
            }
        }
        while let Some(job) = self.jobs.get(self.next)
            && job.submit.0 <= self.now
        {
            let id = self.next as u32;
            self.next += 1;
            let early = if !self.room.ever(job) {
                Some(Verdict::NeverFits)
            } else if job.work == Nanos::ZERO {
                Some(Verdict::Empty)
            } else {
                None
            };
            if let Some(verdict) = early {
                (self.outcome.jobs[id as usize].verdict, self.outcome.jobs[id as usize].end) = (verdict, job.submit);
                if self.keep.reasons == Some(id) {
                    self.outcome
                        .reasons
                        .push((Nanos(self.now), format!("{}: needs {} + {}", verdict.word(), job.persistent, job.ephemeral)));
                }
                continue;
            }
            if let Some(kill) = job.kill {
                self.timers.push(Reverse((kill.0, id)));
            }
            self.state[id as usize] = State::Waiting;
            if job.rate.is_some() {
                self.services.insert(id);
            } else {
                self.there.insert(id);
                self.waiting.insert(self.key(id));
                self.came.push(id);
            }
        }
    }

    /// Takes a job away, wherever it is.
    fn end(&mut self, job: u32, verdict: Verdict) {
        let index = job as usize;
        match self.state[index] {
            State::Away => return,
            State::Waiting => {
                self.waiting.remove(&self.key(job));
                self.services.remove(&job);
            }
            State::Idle => {
                self.idle.remove(&self.key(job));
                self.release(job);
            }
            State::Running => {
                self.take_off(job);
                self.release(job);
            }
            State::Serving => {
                self.serving -= u64::from(self.demand(job));
                let it = &self.jobs[index];
                self.served.1.remove(&(it.ephemeral.0, job));
                self.served.0 -= it.persistent.0;
                if let Some(before) = self.slow_at.remove(&job) {
                    let time = u128::from(self.now - self.since[index]).max(1);
                    self.outcome.jobs[index].dilation = u32::try_from((self.slow - before) / time).unwrap_or(u32::MAX).max(1000);
                }
                self.room.leave(job, &self.jobs[index]);
                self.freed = true;
            }
        }
        self.state[index] = State::Away;
        self.there.remove(&job);
        self.outcome.jobs[index].end = Nanos(self.now);
        self.outcome.jobs[index].verdict = verdict;
        if self.last == Some(job) {
            self.last = None;
        }
    }

    fn release(&mut self, job: u32) {
        let it = &self.jobs[job as usize];
        if self.sharers.1.remove(&(it.ephemeral.0, job)) {
            self.sharers.0 -= u128::from(it.persistent.0);
            if self.turns_move() {
                return;
            }
        }
        self.room.leave(job, it);
        self.freed = true;
    }

    /// Whether everyone is in, and persistent memory comes and goes with the turns.
    fn turns_move(&self) -> bool {
        self.style == Style::Rotating && (self.moves || self.settings.mechanism == Mechanism::Checkpoint)
    }

    /// Ends a running job's stretch on the device, without its memory.
    fn take_off(&mut self, job: u32) {
        let index = job as usize;
        let length = (u128::from(self.remaining[index]) * self.stretch(job) / 1000) << FINE;
        self.running.remove(&(self.base[index] + length, job));
        self.drains.retain(|d| d.1 != job);
        self.utilised -= u64::from(self.jobs[index].utilisation);
        self.iterations -= u128::from(self.jobs[index].iteration.0);
        if self.keep.moments {
            self.outcome.stretches.push(Stretch { job, from: Nanos(self.since[index]), to: Nanos(self.now) });
        }
    }

    /// A running job gives way at the end of an iteration, when the clock read `at`.
    fn stop(&mut self, job: u32, at: u128) {
        let index = job as usize;
        let iteration = u128::from(self.jobs[index].iteration.0);
        let done = ((at.saturating_sub(self.base[index]) * 1000 / self.stretch(job)) >> FINE) + iteration / 2;
        self.take_off(job);
        let done = u64::try_from(done / iteration * iteration).unwrap_or(NEVER);
        self.remaining[index] = self.remaining[index].saturating_sub(done).max(1);
        self.outcome.jobs[index].switches += 1;
        self.outcome.switches += 1;
        if self.settings.mechanism == Mechanism::Lanes {
            if let (Room::Lanes(lanes), Style::UntilBusy { .. }) = (&mut self.room, self.style) {
                lanes.park(job);
            }
            self.state[index] = State::Idle;
            self.idle.insert(self.key(job));
        } else {
            self.room.leave(job, &self.jobs[index]);
            self.on_host[index] = true;
            self.last = Some(job);
            self.state[index] = State::Waiting;
            self.waiting.insert(self.key(job));
        }
        self.freed = true;
    }

    /// Asks a running job to give way at the end of its iteration.
    fn drain(&mut self, job: u32) {
        if self.drains.iter().any(|d| d.1 == job) {
            return;
        }
        let base = self.base[job as usize];
        let iteration = (u128::from(self.jobs[job as usize].iteration.0) * self.stretch(job) / 1000) << FINE;
        let at = base + self.clock.saturating_sub(base).div_ceil(iteration) * iteration;
        if at <= self.clock.max(base) {
            self.stop(job, at);
        } else {
            self.drains.insert((at, job));
        }
    }

    /// Puts a job that has its memory on the device, after copies that take `delay`.
    fn start(&mut self, job: u32, delay: u64) {
        let index = job as usize;
        let it = &self.jobs[index];
        self.state[index] = State::Running;
        self.since[index] = self.now;
        self.base[index] = self.clock + (u128::from(delay) << FINE);
        let length = (u128::from(self.remaining[index]) * self.stretch(job) / 1000) << FINE;
        self.running.insert((self.base[index] + length, job));
        self.utilised += u64::from(it.utilisation);
        self.iterations += u128::from(it.iteration.0);
        self.outcome.jobs[index].start.get_or_insert(Nanos(self.now));
    }

    /// What a service keeps busy, per mille.
    fn demand(&self, job: u32) -> u32 {
        let it = &self.jobs[job as usize];
        let asked = u128::from(it.rate.unwrap_or(0)) * u128::from(it.iteration.0) * u128::from(it.utilisation) / 1_000_000_000_000;
        u32::try_from(asked).unwrap_or(u32::MAX).clamp(1, WHOLE)
    }
}
