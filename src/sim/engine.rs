//! The event engine: when each step and copy of a program runs, and what memory does meanwhile.
//!
//! The rules are those of [`crate::schedule::plan`], "What a plan means". Integer time, exact link
//! progress, ends before starts at the same instant. Cost: O((steps + copies) · log) a run.
//! Not for: proving plans, sharing a device between jobs.

use super::program::{Begin, Direction, Program, Residency};
use crate::device::Link;
use crate::units::{Bytes, Nanos};

/// How long things take in one run.
#[derive(Clone, Debug)]
pub struct Durations {
    /// Of each step, at least 1 ns.
    pub steps: Vec<Nanos>,
    /// Work of each copy, in bytes times 10^9 (see the link's rule).
    pub copies: Vec<u128>,
}

impl Durations {
    /// As planned: no noise.
    #[must_use]
    pub fn nominal(program: &Program, link: &Link) -> Self {
        Self {
            steps: program.steps.iter().map(|s| Nanos(s.time.0.max(1))).collect(),
            copies: program.copies.iter().map(|c| work(link, c.direction, c.bytes)).collect(),
        }
    }
}

/// A copy's work: bytes times 10^9 plus the overhead at the uncontended rate.
#[must_use]
pub fn work(link: &Link, direction: Direction, bytes: Bytes) -> u128 {
    u128::from(bytes.0) * 1_000_000_000 + u128::from(link.overhead_ns) * u128::from(rate(link, direction, false))
}

/// Bytes a second in one direction.
#[must_use]
pub const fn rate(link: &Link, direction: Direction, contended: bool) -> u64 {
    match (direction, contended) {
        (Direction::H2d, false) => link.h2d,
        (Direction::H2d, true) => link.h2d_contended,
        (Direction::D2h, false) => link.d2h,
        (Direction::D2h, true) => link.d2h_contended,
    }
}

/// How long a copy takes alone, or contended from start to end.
#[must_use]
pub fn copy_time(link: &Link, direction: Direction, bytes: Bytes, contended: bool) -> Nanos {
    let whole = work(link, direction, bytes).div_ceil(u128::from(rate(link, direction, contended)));
    Nanos(u64::try_from(whole).unwrap_or(u64::MAX / 4).max(1))
}

/// Why the compute stream stood still.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stalls {
    /// Waiting for a swap-in to arrive.
    pub swap_in: Nanos,
    /// Waiting for bytes that were still leaving.
    pub swap_out: Nanos,
    /// After the last step, for copies to end.
    pub tail: Nanos,
}

/// One simulated iteration.
#[derive(Clone, Debug)]
pub struct Run {
    /// Start and end of each step.
    pub steps: Vec<(Nanos, Nanos)>,
    /// Start and end of each copy.
    pub copies: Vec<(Nanos, Nanos)>,
    /// When all of it had ended.
    pub iteration: Nanos,
    /// Waiting, by cause.
    pub stalls: Stalls,
    /// Steps that waited for a copy: the executor would say "late".
    pub late_copies: u32,
}

/// Items wait for each other in a circle.
#[derive(Debug, thiserror::Error)]
#[error("the plan deadlocks at {at}: step {step} never starts")]
pub struct Deadlock {
    /// When nothing moved any more.
    pub at: Nanos,
    /// The next step.
    pub step: usize,
}

/// Runs one iteration.
///
/// # Errors
/// When items wait for each other in a circle, which [`crate::schedule::check`] excludes.
pub fn run(program: &Program, link: &Link, durations: &Durations) -> Result<Run, Deadlock> {
    Engine::new(program, link, durations).run()
}

const NEVER: Nanos = Nanos(u64::MAX);

struct Queue {
    direction: Direction,
    copies: Vec<usize>,
    next: usize,
    running: bool,
    remaining: u128,
    /// Delays of the copies before this position are cut short.
    cut: usize,
}

struct Engine<'a> {
    program: &'a Program,
    link: &'a Link,
    durations: &'a Durations,
    now: Nanos,
    step: usize,
    step_running: bool,
    ready_since: Nanos,
    steps: Vec<(Nanos, Nanos)>,
    copies: Vec<(Nanos, Nanos)>,
    queues: [Queue; 2],
    position: Vec<usize>,
    stalls: Stalls,
    late: u32,
}

impl<'a> Engine<'a> {
    fn new(program: &'a Program, link: &'a Link, durations: &'a Durations) -> Self {
        let queue = |direction| Queue {
            direction,
            copies: (0..program.copies.len()).filter(|&c| program.copies[c].direction == direction).collect(),
            next: 0,
            running: false,
            remaining: 0,
            cut: 0,
        };
        let queues = [queue(Direction::H2d), queue(Direction::D2h)];
        let mut position = vec![0; program.copies.len()];
        for q in &queues {
            for (at, &copy) in q.copies.iter().enumerate() {
                position[copy] = at;
            }
        }
        Self {
            program,
            link,
            durations,
            now: Nanos::ZERO,
            step: 0,
            step_running: false,
            ready_since: Nanos::ZERO,
            steps: vec![(NEVER, NEVER); program.steps.len()],
            copies: vec![(NEVER, NEVER); program.copies.len()],
            queues,
            position,
            stalls: Stalls::default(),
            late: 0,
        }
    }

    fn run(mut self) -> Result<Run, Deadlock> {
        loop {
            while self.start_something() {}
            let Some(next) = self.next_instant() else { break };
            self.advance(next);
        }
        let waiting = self.queues.iter().any(|q| q.next < q.copies.len());
        if self.step < self.steps.len() || waiting {
            return Err(Deadlock { at: self.now, step: self.step });
        }
        self.stalls.tail = self.now - self.steps.last().map_or(Nanos::ZERO, |s| s.1);
        Ok(Run { steps: self.steps, copies: self.copies, iteration: self.now, stalls: self.stalls, late_copies: self.late })
    }

    fn step_done(&self, step: usize) -> bool {
        self.steps[step].1 <= self.now
    }

    fn copy_done(&self, copy: usize) -> bool {
        self.copies[copy].1 <= self.now
    }

    /// Whether the residency's bytes are free by now.
    fn ended(&self, index: usize) -> bool {
        let r = &self.program.residencies[index];
        if r.stays {
            return false;
        }
        let begun = match r.begin {
            Begin::Iteration => true,
            Begin::Step(s) => self.step_done(s),
            Begin::Copy(c) => self.copy_done(c),
        };
        begun && r.last_step.is_none_or(|s| self.step_done(s)) && r.out.is_none_or(|c| self.copy_done(c))
    }

    fn due(&self, copy: usize, cut: bool) -> Nanos {
        let c = &self.program.copies[copy];
        let end = c.trigger.map_or(Nanos::ZERO, |s| self.steps[s].1);
        if end > self.now {
            NEVER
        } else if cut {
            end
        } else {
            Nanos(end.0.saturating_add(c.delay.0))
        }
    }

    fn copy_ready(&self, copy: usize, cut: bool) -> bool {
        let c = &self.program.copies[copy];
        self.due(copy, cut) <= self.now
            && c.written_by.is_none_or(|s| self.step_done(s))
            && c.source.is_none_or(|s| self.copy_done(s))
            && c.slab.iter().all(|&s| self.copy_done(s))
            && (c.direction == Direction::D2h || self.bytes_free(c.residency))
    }

    fn bytes_free(&self, residency: usize) -> bool {
        let r = &self.program.residencies[residency];
        r.previous.iter().chain(&r.after).all(|&other| self.ended(other))
    }

    fn start_something(&mut self) -> bool {
        let mut started = false;
        for q in 0..2 {
            let queue = &self.queues[q];
            if queue.running || queue.next >= queue.copies.len() {
                continue;
            }
            let copy = queue.copies[queue.next];
            if self.copy_ready(copy, queue.next < queue.cut) {
                self.copies[copy].0 = self.now;
                let queue = &mut self.queues[q];
                queue.running = true;
                queue.remaining = self.durations.copies[copy].max(1);
                started = true;
            }
        }
        if !self.step_running && self.step < self.program.steps.len() {
            let step = &self.program.steps[self.step];
            let missing: Vec<usize> = step.reads_copies.iter().copied().filter(|&c| !self.copy_done(c)).collect();
            if missing.is_empty() && step.begins.iter().all(|&r| self.bytes_free(r)) {
                let waited = self.now - self.ready_since;
                if waited > Nanos::ZERO {
                    let arrived = step.reads_copies.iter().any(|&c| self.copies[c].1 == self.now);
                    if arrived {
                        self.stalls.swap_in += waited;
                    } else {
                        self.stalls.swap_out += waited;
                    }
                }
                self.late += u32::from(step.reads_copies.iter().any(|&c| self.copies[c].1 > self.ready_since));
                self.steps[self.step].0 = self.now;
                self.steps[self.step].1 = Nanos(self.now.0.saturating_add(self.durations.steps[self.step].0));
                self.step_running = true;
                started = true;
            } else {
                // Passive: whatever stands before the copies this step waits for goes without delay.
                for copy in missing {
                    let reach = self.position[copy] + 1;
                    if self.queues[0].cut < reach {
                        self.queues[0].cut = reach;
                        started = true;
                    }
                }
            }
        }
        started
    }

    fn next_instant(&self) -> Option<Nanos> {
        let mut next = NEVER;
        if self.step_running {
            next = next.min(self.steps[self.step].1);
        }
        let both = self.queues.iter().all(|q| q.running);
        for q in &self.queues {
            if q.running {
                let wait = q.remaining.div_ceil(u128::from(rate(self.link, q.direction, both)));
                next = next.min(Nanos(self.now.0.saturating_add(u64::try_from(wait).unwrap_or(u64::MAX / 2))));
            } else if q.next < q.copies.len() {
                let due = self.due(q.copies[q.next], q.next < q.cut);
                if due > self.now {
                    next = next.min(due);
                }
            }
        }
        (next < NEVER).then_some(next)
    }

    fn advance(&mut self, to: Nanos) {
        let passed = u128::from((to - self.now).0);
        let both = self.queues.iter().all(|q| q.running);
        self.now = to;
        for q in &mut self.queues {
            if q.running {
                let done = passed * u128::from(rate(self.link, q.direction, both));
                q.remaining = q.remaining.saturating_sub(done);
                if q.remaining == 0 {
                    self.copies[q.copies[q.next]].1 = to;
                    q.running = false;
                    q.next += 1;
                }
            }
        }
        if self.step_running && self.steps[self.step].1 == to {
            self.step_running = false;
            self.step += 1;
            self.ready_since = to;
        }
    }
}

/// Resident bytes over time: the value from each instant on, first at zero. Ends count before begins.
#[must_use]
pub fn memory(program: &Program, run: &Run) -> Vec<(Nanos, Bytes)> {
    let mut changes: Vec<(Nanos, bool, u64)> = Vec::with_capacity(program.residencies.len() * 2);
    for r in &program.residencies {
        let (begin, end) = life(r, run);
        if begin < end {
            changes.push((begin, true, r.bytes.0));
            changes.push((end, false, r.bytes.0));
        }
    }
    changes.sort_unstable();
    let mut curve: Vec<(Nanos, Bytes)> = Vec::new();
    let mut level = 0;
    for (at, begins, bytes) in changes {
        level = if begins { level + bytes } else { level - bytes };
        match curve.last_mut() {
            Some(last) if last.0 == at => last.1 = Bytes(level),
            _ => curve.push((at, Bytes(level))),
        }
    }
    curve
}

/// When a residency begins and ends, in a run.
#[must_use]
pub fn life(r: &Residency, run: &Run) -> (Nanos, Nanos) {
    let (begin, brought) = match r.begin {
        Begin::Iteration => (Nanos::ZERO, Nanos::ZERO),
        Begin::Step(s) => run.steps[s],
        Begin::Copy(c) => run.copies[c],
    };
    let end = if r.stays {
        run.iteration
    } else {
        let steps = r.last_step.map_or(brought, |s| run.steps[s].1).max(brought);
        r.out.map_or(steps, |c| steps.max(run.copies[c].1))
    };
    (begin, end)
}

/// The largest value of a curve.
#[must_use]
pub fn peak(curve: &[(Nanos, Bytes)]) -> Bytes {
    curve.iter().map(|p| p.1).max().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::{Arg, Dtype, Graph, Operand, Operator, Phase, Replay, Role, Tensor};
    use crate::schedule::{Event, Latency, Source, Trigger};
    use crate::units::{OpId, TensorId};

    /// One gigabyte a second alone, half of that contended, no overhead: a byte is a nanosecond.
    const LINK: Link =
        Link { h2d: 1_000_000_000, d2h: 1_000_000_000, h2d_contended: 500_000_000, d2h_contended: 500_000_000, overhead_ns: 0 };

    fn operand(tensor: u32) -> Operand {
        Operand { tensor: TensorId(tensor), version: 0, dtype: Dtype::U8, offset: 0, shape: vec![1024], stride: vec![1] }
    }

    fn operator(index: usize, reads: &[u32], makes: Option<u32>) -> Operator {
        Operator {
            name: format!("op{index}"),
            kind: "test".to_owned(),
            phase: Phase::Forward,
            args: reads.iter().map(|&t| Arg::Tensor(operand(t))).collect(),
            outputs: makes.into_iter().map(|t| Some(operand(t))).collect(),
            hidden: Vec::new(),
            workspace: Bytes::ZERO,
            replay: Replay::Pure,
            random: false,
            duration_ns: None,
        }
    }

    /// op0 makes a, op1 makes b, op2 makes c from b, op3 reads a, op4 reads b and c; 1,000 ns each.
    fn graph() -> Graph {
        let tensor = |name: &str| Tensor {
            name: name.to_owned(),
            bytes: Bytes(1024),
            role: Role::Activation,
            dtype: Dtype::U8,
            shape: vec![1024],
            kept_until: None,
        };
        let operators = vec![
            operator(0, &[], Some(0)),
            operator(1, &[], Some(1)),
            operator(2, &[1], Some(2)),
            operator(3, &[0], None),
            operator(4, &[1, 2], None),
        ];
        Graph::new("five".to_owned(), vec![tensor("a"), tensor("b"), tensor("c")], operators, None, None, None).unwrap()
    }

    fn after(op: u32, delay: u64) -> Trigger {
        Trigger { after: Some(OpId(op)), delay: Nanos(delay) }
    }

    fn simulate(events: &[Event]) -> (Run, Bytes) {
        let latencies = vec![Latency { time: Nanos(1000), source: Source::Graph }; 5];
        let program = Program::new(&graph(), &latencies, events).unwrap();
        let run = run(&program, &LINK, &Durations::nominal(&program, &LINK)).unwrap();
        let peak = peak(&memory(&program, &run));
        (run, peak)
    }

    #[test]
    fn without_events_memory_is_liveness() {
        let (run, peak) = simulate(&[]);
        assert_eq!((run.iteration, peak), (Nanos(5000), Bytes(3072)));
    }

    #[test]
    fn a_late_swap_in_is_waited_for_and_counted() {
        let a = TensorId(0);
        let events = [Event::SwapOut { tensor: a, trigger: after(0, 0) }, Event::SwapIn { tensor: a, trigger: after(2, 0) }];
        let (run, _) = simulate(&events);
        // Out from 1,000 to 2,024; in from 3,000 to 4,024, which op3 waits for.
        assert_eq!(run.copies, vec![(Nanos(1000), Nanos(2024)), (Nanos(3000), Nanos(4024))]);
        assert_eq!((run.steps[3].0, run.iteration), (Nanos(4024), Nanos(6024)));
        assert_eq!((run.stalls.swap_in, run.late_copies), (Nanos(1024), 1));
    }

    #[test]
    fn a_delay_ends_when_a_step_waits() {
        let a = TensorId(0);
        let events = [Event::SwapOut { tensor: a, trigger: after(0, 0) }, Event::SwapIn { tensor: a, trigger: after(1, 700_000) }];
        let (run, _) = simulate(&events);
        assert_eq!(run.copies[1], (Nanos(3000), Nanos(4024)));
    }

    #[test]
    fn directions_slow_each_other_while_both_are_busy() {
        let (a, b) = (TensorId(0), TensorId(1));
        let events = [
            Event::SwapOut { tensor: a, trigger: after(0, 0) },
            Event::SwapIn { tensor: a, trigger: after(1, 500) },
            Event::SwapOut { tensor: b, trigger: after(2, 0) },
            Event::SwapIn { tensor: b, trigger: after(3, 0) },
        ];
        let (run, _) = simulate(&events);
        // a comes back from 2,500 to 3,000 alone and is slowed by b's departure from then on: 524 bytes take 1,048 ns.
        assert_eq!(run.copies[1], (Nanos(2500), Nanos(4048)));
        // b: 524 bytes' worth by 4,048, the other 500 alone.
        assert_eq!(run.copies[2], (Nanos(3000), Nanos(4548)));
    }
}
