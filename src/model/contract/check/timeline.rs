//! The checker's clock: start and end of every task without noise, in whole nanoseconds.

use super::program::{Kind, Program};
use crate::contract::plan::JobPlan;
use crate::device::Link;

/// Start and end of each task, and of the iteration.
pub(super) struct Clock {
    pub start: Vec<u128>,
    pub stop: Vec<u128>,
    pub end: u128,
}

/// A copy in progress.
struct Flight {
    task: usize,
    /// Units of work left; not zero when it starts.
    left: u128,
}

/// Units of work of a copy of `bytes` at `rate` bytes per second; a unit is a billionth of a byte.
pub(super) fn work(bytes: u64, rate: u64, link: &Link) -> u128 {
    let units = u128::from(bytes) * 1_000_000_000 + u128::from(link.overhead_ns) * u128::from(rate);
    // A copy takes at least a nanosecond.
    units.max(1)
}

/// One direction of the link.
struct Queue {
    copies: Vec<usize>,
    next: usize,
    flight: Option<Flight>,
    alone: u64,
    contended: u64,
}

struct Run<'a> {
    followers: Vec<Vec<usize>>,
    pending: Vec<usize>,
    clock: Clock,
    program: &'a Program<'a>,
}

/// Simulates one iteration. `None` if it can't end, or takes longer than can be counted.
pub(super) fn run(job: &JobPlan, program: &Program, link: &Link) -> Option<Clock> {
    let tasks = &program.tasks;
    let mut followers = vec![Vec::new(); tasks.len()];
    for (task, what) in tasks.iter().enumerate() {
        for wait in &what.waits {
            followers[wait.task].push(task);
        }
    }
    let queue = |wanted: fn(Kind) -> bool, alone, contended| {
        let copies = (0..tasks.len()).filter(|t| wanted(tasks[*t].kind)).collect();
        Queue { copies, next: 0, flight: None, alone, contended }
    };
    let mut queues = [
        queue(|kind| matches!(kind, Kind::Out { .. }), link.d2h, link.d2h_contended),
        queue(|kind| matches!(kind, Kind::In { .. }), link.h2d, link.h2d_contended),
    ];
    let pending = tasks.iter().map(|t| t.waits.len()).collect();
    let clock = Clock { start: vec![0; tasks.len()], stop: vec![0; tasks.len()], end: 0 };
    let mut run = Run { followers, pending, clock, program };
    let mut steps = program.steps.iter().copied().peekable();
    let mut running: Option<(usize, u128)> = None;
    let mut now = 0u128;
    loop {
        // Start every task that can start at this instant.
        loop {
            let mut started = false;
            if running.is_none()
                && let Some(&step) = steps.peek()
                && run.pending[step] == 0
            {
                steps.next();
                run.begin(step, now);
                let Kind::Step { operator, .. } = tasks[step].kind else { return None };
                running = Some((step, now + u128::from(job.latencies[operator].time.0)));
                started = true;
            }
            for queue in &mut queues {
                if let (None, Some(&copy)) = (&queue.flight, queue.copies.get(queue.next))
                    && run.pending[copy] == 0
                {
                    queue.next += 1;
                    run.begin(copy, now);
                    let left =
                        work(program.graph.tensors[run.tensor(copy)].bytes.0, queue.alone, link);
                    queue.flight = Some(Flight { task: copy, left });
                    started = true;
                }
            }
            if !started {
                break;
            }
        }
        let both = queues.iter().all(|q| q.flight.is_some());
        let mut next = running.map(|(_, end)| end);
        for queue in &queues {
            let rate = u128::from(if both { queue.contended } else { queue.alone });
            let at = queue.flight.as_ref().map(|flight| now + flight.left.div_ceil(rate));
            next = [next, at].into_iter().flatten().min();
        }
        let Some(next) = next else { break };
        for queue in &mut queues {
            let rate = u128::from(if both { queue.contended } else { queue.alone });
            if let Some(flight) = &mut queue.flight {
                flight.left = flight.left.saturating_sub((next - now).checked_mul(rate)?);
                if flight.left == 0 {
                    run.finish(flight.task, next);
                    queue.flight = None;
                }
            }
        }
        if let Some((step, end)) = running
            && end == next
        {
            run.finish(step, end);
            running = None;
        }
        now = next;
        // Larger times could overflow in the products above, and do not fit in the figures.
        if now > u128::from(u64::MAX) {
            return None;
        }
    }
    run.clock.end = now;
    (steps.peek().is_none() && queues.iter().all(|q| q.next == q.copies.len())).then_some(run.clock)
}

impl Run<'_> {
    fn begin(&mut self, task: usize, now: u128) {
        self.clock.start[task] = now;
    }

    fn finish(&mut self, task: usize, now: u128) {
        self.clock.stop[task] = now;
        for &follower in &self.followers[task] {
            self.pending[follower] -= 1;
        }
    }

    fn tensor(&self, copy: usize) -> usize {
        match self.program.tasks[copy].kind {
            Kind::Out { tensor, .. }
            | Kind::In { tensor, .. }
            | Kind::Step { operator: tensor, .. } => tensor,
        }
    }
}
