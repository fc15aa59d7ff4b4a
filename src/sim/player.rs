//! One job on a device: which of its steps and copies may start, and when each ran.
//!
//! The rules are those of [`crate::contract::plan`], "What a plan means". Time and the link's rates
//! belong to the device: [`super::engine`] runs one job alone on a device, [`super::beside`]
//! several jobs on one.

use std::ops::Deref;

use super::program::{Begin, Direction, Program};
use super::timing::{DIRECTIONS, Durations, NEVER, Run, Stalls};
use crate::units::Nanos;

/// The speed of a step that has the device to itself, in units of work per nanosecond.
pub(super) const ALONE: u64 = 1_000_000;

/// One direction's copies of one job, in order.
struct Queue {
    copies: Vec<usize>,
    next: usize,
    running: bool,
}

/// The step that is running.
#[derive(Clone, Copy)]
struct Running {
    /// Units of work left at `since`.
    left: u128,
    since: Nanos,
    speed: u64,
    ends: Nanos,
}

/// A job within an iteration. All times are absolute.
pub(super) struct Player<P, D> {
    program: P,
    durations: D,
    began: Nanos,
    step: usize,
    running: Option<Running>,
    ready_since: Nanos,
    steps: Vec<(Nanos, Nanos)>,
    copies: Vec<(Nanos, Nanos)>,
    queues: [Queue; 2],
    stalls: Stalls,
    late: u32,
    /// Whether other jobs use the window too.
    shares: bool,
    /// The stretch for which this job holds the window.
    held: Option<usize>,
}

impl<P: Deref<Target = Program>, D: Deref<Target = Durations>> Player<P, D> {
    /// A job at the start of an iteration. If other jobs share its window, it must hold the window
    /// where it needs it.
    pub fn new(program: P, durations: D, began: Nanos, shares: bool) -> Self {
        let queue = |direction| {
            let of = |&copy: &usize| program.copies[copy].direction == direction;
            let copies = (0..program.copies.len()).filter(of).collect();
            Queue { copies, next: 0, running: false }
        };
        let queues = DIRECTIONS.map(queue);
        Self {
            steps: vec![(NEVER, NEVER); program.steps.len()],
            copies: vec![(NEVER, NEVER); program.copies.len()],
            program,
            durations,
            began,
            step: 0,
            running: None,
            ready_since: began,
            queues,
            stalls: Stalls::default(),
            late: 0,
            shares,
            held: None,
        }
    }

    /// The stretch for which this job needs the window and does not hold it. `None` if anything
    /// other than a busy link also keeps the job from going on.
    pub fn wants_window(&self, now: Nanos) -> Option<usize> {
        let stretches = &self.program.stretches;
        if stretches.count() == 0 {
            return None;
        }
        let copy = self.copy_due(0, now).and_then(|copy| stretches.at(Begin::Copy(copy)));
        let step = || stretches.at(Begin::Step(self.step)).filter(|_| self.step_due(now));
        copy.filter(|&k| self.lacks(Some(k))).or_else(step).filter(|&k| self.lacks(Some(k)))
    }

    /// Gives the job the window for `stretch`.
    pub const fn hold_window(&mut self, stretch: usize) {
        self.held = Some(stretch);
    }

    /// Lets go of the window if its stretch is over. Returns whether it did.
    pub fn let_go(&mut self, now: Nanos) -> bool {
        let lasts = self.held.map(|stretch| self.program.stretches.lasts(stretch));
        let over = lasts.is_some_and(|lasts| lasts.iter().all(|&r| self.ended(r, now)));
        self.held = self.held.filter(|_| !over);
        over
    }

    fn lacks(&self, stretch: Option<usize>) -> bool {
        self.shares && stretch.is_some() && stretch != self.held
    }

    /// Whether the whole iteration has ended.
    pub fn done(&self) -> bool {
        self.step == self.steps.len() && self.queues.iter().all(|q| q.next == q.copies.len())
    }

    /// The step that runs, or that starts next.
    pub const fn step(&self) -> usize {
        self.step
    }

    /// Whether one of its steps is running.
    pub const fn computes(&self) -> bool {
        self.running.is_some()
    }

    /// The record of the iteration that ends at `now`, with times counted from the iteration's
    /// start.
    pub fn run(mut self, now: Nanos) -> Run {
        self.stalls.tail = now - self.steps.last().map_or(self.began, |s| s.1);
        let began = self.began;
        if began > Nanos::ZERO {
            for (start, end) in self.steps.iter_mut().chain(&mut self.copies) {
                (*start, *end) = (*start - began, *end - began);
            }
        }
        Run {
            steps: self.steps,
            copies: self.copies,
            iteration: now - began,
            stalls: self.stalls,
            late_copies: self.late,
        }
    }

    /// The index of its next copy in a direction, among its copies of both directions. If there is
    /// none, the number of all copies.
    pub fn next_copy(&self, direction: usize) -> usize {
        let queue = &self.queues[direction];
        queue.copies.get(queue.next).copied().unwrap_or(usize::MAX)
    }

    /// The work of its next copy in a direction, if that copy may start `now`.
    pub fn copy_ready(&self, direction: usize, now: Nanos) -> Option<u128> {
        let copy = self.copy_due(direction, now)?;
        (!self.lacks(self.program.stretches.at(Begin::Copy(copy))))
            .then(|| self.durations.copies[copy].max(1))
    }

    /// Its next copy in a direction, if that copy may start at `now` apart from the window.
    fn copy_due(&self, direction: usize, now: Nanos) -> Option<usize> {
        let queue = &self.queues[direction];
        let &copy = queue.copies.get(queue.next).filter(|_| !queue.running)?;
        let c = &self.program.copies[copy];
        let ready = c.trigger.map_or(self.began, |s| self.steps[s].1) <= now
            && c.written_by.is_none_or(|s| self.steps[s].1 <= now)
            && c.source.is_none_or(|s| self.copies[s].1 <= now)
            && c.pool_waits.iter().all(|&s| self.copies[s].1 <= now)
            && (c.direction == Direction::D2h || self.bytes_free(c.residency, now));
        ready.then_some(copy)
    }

    /// Whether its next step may start at `now` apart from the window.
    fn step_due(&self, now: Nanos) -> bool {
        let next = self.program.steps.get(self.step).filter(|_| self.running.is_none());
        next.is_some_and(|step| {
            step.reads_copies.iter().all(|&copy| self.copies[copy].1 <= now)
                && step.begins.iter().all(|&r| self.bytes_free(r, now))
        })
    }

    /// Starts the copy that is ready.
    pub fn start_copy(&mut self, direction: usize, now: Nanos) {
        let queue = &mut self.queues[direction];
        queue.running = true;
        self.copies[queue.copies[queue.next]].0 = now;
    }

    /// Ends the copy that runs.
    pub fn end_copy(&mut self, direction: usize, now: Nanos) {
        let queue = &mut self.queues[direction];
        self.copies[queue.copies[queue.next]].1 = now;
        queue.running = false;
        queue.next += 1;
    }

    /// Starts the next step if it may start. Returns whether it did.
    pub fn start_step(&mut self, now: Nanos, speed: u64) -> bool {
        if !self.step_due(now) || self.lacks(self.program.stretches.at(Begin::Step(self.step))) {
            return false;
        }
        let step = &self.program.steps[self.step];
        let waited = now - self.ready_since;
        if waited > Nanos::ZERO {
            let arrived = step.reads_copies.iter().any(|&c| self.copies[c].1 == now);
            *(if arrived { &mut self.stalls.swap_in } else { &mut self.stalls.swap_out }) += waited;
        }
        self.late +=
            u32::from(step.reads_copies.iter().any(|&c| self.copies[c].1 > self.ready_since));
        let time = self.durations.steps[self.step];
        let ends = Nanos(now.0.saturating_add(time.0));
        self.steps[self.step].0 = now;
        self.running = Some(Running {
            left: u128::from(time.0) * u128::from(ALONE),
            since: now,
            speed: ALONE,
            ends,
        });
        self.pace(now, speed);
        true
    }

    /// Changes the speed of the running step.
    pub fn pace(&mut self, now: Nanos, speed: u64) {
        let Some(running) = self.running.as_mut().filter(|r| r.speed != speed) else { return };
        let done = u128::from((now - running.since).0) * u128::from(running.speed);
        let left = running.left.saturating_sub(done);
        let takes = u64::try_from(left.div_ceil(u128::from(speed.max(1)))).unwrap_or(u64::MAX);
        *running = Running { left, since: now, speed, ends: Nanos(now.0.saturating_add(takes)) };
    }

    /// Ends the step if its work is done at `now`. Returns whether it did.
    pub fn end_step(&mut self, now: Nanos) -> bool {
        if self.running.is_none_or(|r| r.ends > now) {
            return false;
        }
        self.running = None;
        self.steps[self.step].1 = now;
        self.step += 1;
        self.ready_since = now;
        true
    }

    /// When its running step ends.
    pub fn next(&self) -> Nanos {
        self.running.map_or(NEVER, |r| r.ends)
    }

    fn bytes_free(&self, residency: usize, now: Nanos) -> bool {
        let r = &self.program.residencies[residency];
        r.previous.iter().chain(&r.after).all(|&other| self.ended(other, now))
    }

    /// Whether the residency has ended by `now`, so that its bytes are free.
    fn ended(&self, index: usize, now: Nanos) -> bool {
        let r = &self.program.residencies[index];
        if r.stays {
            return false;
        }
        let begun = match r.begin {
            Begin::Iteration => true,
            Begin::Step(s) => self.steps[s].1 <= now,
            Begin::Copy(c) => self.copies[c].1 <= now,
        };
        begun
            && r.last_step.is_none_or(|s| self.steps[s].1 <= now)
            && r.out.is_none_or(|c| self.copies[c].1 <= now)
    }
}
