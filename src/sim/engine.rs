//! The event engine: when each step and copy of a program runs, and what memory does meanwhile.
//!
//! The rules are those of [`crate::contract::plan`], "What a plan means". Integer time, exact link
//! progress, ends before starts at the same instant. Cost: O((steps + copies) · log) a run.
//! Not for: proving plans, sharing a device between jobs ([`super::together`]).

use super::player::{ALONE, DIRECTIONS, NEVER, Player};
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
    u128::from(bytes.0) * 1_000_000_000
        + u128::from(link.overhead_ns) * u128::from(rate(link, direction, false))
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

/// How long so much work takes at a rate, rounded up. Nearly all work fits in 64 bits, in which dividing is several times as fast.
#[must_use]
pub fn wait(work: u128, rate: u64) -> u128 {
    u64::try_from(work)
        .map_or_else(|_| work.div_ceil(u128::from(rate)), |work| u128::from(work.div_ceil(rate)))
}

/// How long a copy takes alone, or contended from start to end.
#[must_use]
pub fn copy_time(link: &Link, direction: Direction, bytes: Bytes, contended: bool) -> Nanos {
    let whole = wait(work(link, direction, bytes), rate(link, direction, contended));
    Nanos(u64::try_from(whole).unwrap_or(u64::MAX / 4).max(1))
}

/// Why the compute stream stood still.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stalls {
    /// Waiting for a swap-in to arrive.
    pub swap_in: Nanos,
    /// Waiting for bytes that were still leaving, or that another job held.
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

/// Runs one iteration, alone on the device.
///
/// # Errors
/// When items wait for each other in a circle, which [`crate::contract::check`] excludes.
pub fn run(program: &Program, link: &Link, durations: &Durations) -> Result<Run, Deadlock> {
    alone(program, link, durations, false)
}

/// Runs one iteration as planned: alone and without noise.
///
/// # Errors
/// As [`run`].
pub fn nominal(program: &Program, link: &Link) -> Result<Run, Deadlock> {
    run(program, link, &Durations::nominal(program, link))
}

/// As [`run`], on a link that carries one copy at a time, whichever way it goes: each at its direction's uncontended rate. Of two that
/// could start, the one that stands first in the plan does; the directions are queues of their own still. Only
/// [`super::accounting`] has a use for it.
///
/// # Errors
/// As [`run`].
pub fn run_one_way_at_a_time(
    program: &Program,
    link: &Link,
    durations: &Durations,
) -> Result<Run, Deadlock> {
    alone(program, link, durations, true)
}

fn alone(
    program: &Program,
    link: &Link,
    durations: &Durations,
    one: bool,
) -> Result<Run, Deadlock> {
    let mut player = Player::new(program, durations, Nanos::ZERO);
    let mut wires = Wires::default();
    let mut now = Nanos::ZERO;
    loop {
        let mut started = true;
        while started {
            started = false;
            // Copies stand in the plan's order.
            for direction in
                if one && player.next_copy(1) < player.next_copy(0) { [1, 0] } else { [0, 1] }
            {
                if wires.free(direction)
                    && (!one || wires.free(1 - direction))
                    && let Some(work) = player.copy_ready(direction, now)
                {
                    player.start_copy(direction, now);
                    wires.start(direction, work);
                    started = true;
                }
            }
            started |= player.start_step(now, ALONE);
        }
        let next = player.next(now).min(wires.next(now, link));
        if next == NEVER {
            break;
        }
        for direction in wires.advance(next - now, link) {
            player.end_copy(direction, next);
        }
        now = next;
        player.end_step(now);
    }
    if player.done() { Ok(player.run(now)) } else { Err(Deadlock { at: now, step: player.step() }) }
}

/// The link's two directions, each with at most one copy.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Wires([Option<u128>; 2]);

impl Wires {
    /// Nothing is copied in this direction.
    pub const fn free(&self, direction: usize) -> bool {
        self.0[direction].is_none()
    }

    /// Begins a copy.
    pub const fn start(&mut self, direction: usize, work: u128) {
        self.0[direction] = Some(work);
    }

    fn rate(&self, direction: usize, link: &Link) -> u64 {
        rate(link, DIRECTIONS[direction], self.0.iter().all(Option::is_some))
    }

    /// When the first copy ends if nothing starts before.
    pub fn next(&self, now: Nanos, link: &Link) -> Nanos {
        let end = |direction: usize| {
            let wait = wait(self.0[direction]?, self.rate(direction, link));
            Some(Nanos(now.0.saturating_add(u64::try_from(wait).unwrap_or(u64::MAX / 2))))
        };
        (0..2).filter_map(end).min().unwrap_or(NEVER)
    }

    /// Lets time pass; the directions whose copies end with it.
    pub fn advance(&mut self, passed: Nanos, link: &Link) -> impl Iterator<Item = usize> + use<> {
        let rates = [0, 1].map(|direction| self.rate(direction, link));
        let mut ended = [false; 2];
        for (direction, rate) in rates.into_iter().enumerate() {
            if let Some(left) = &mut self.0[direction] {
                *left = left.saturating_sub(u128::from(passed.0) * u128::from(rate));
                if *left == 0 {
                    (self.0[direction], ended[direction]) = (None, true);
                }
            }
        }
        (0..2).filter(move |&direction| ended[direction])
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
pub(super) mod tests {
    use super::*;
    use crate::contract::{Event, Latency, Source, Trigger};
    use crate::job::{Arg, Dtype, Graph, Operand, Operator, Phase, Replay, Role, Tensor};
    use crate::units::{OpId, TensorId};

    /// One gigabyte a second alone, half of that contended, no overhead: a byte is a nanosecond.
    pub const LINK: Link = Link {
        h2d: 1_000_000_000,
        d2h: 1_000_000_000,
        h2d_contended: 500_000_000,
        d2h_contended: 500_000_000,
        overhead_ns: 0,
    };

    fn operand(tensor: u32) -> Operand {
        Operand {
            tensor: TensorId(tensor),
            version: 0,
            dtype: Dtype::U8,
            offset: 0,
            shape: vec![1024],
            stride: vec![1],
        }
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
    pub fn graph() -> Graph {
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
        Graph::new(
            "five".to_owned(),
            vec![tensor("a"), tensor("b"), tensor("c")],
            operators,
            None,
            None,
            None,
        )
        .unwrap()
    }

    pub fn after(op: u32, delay: u64) -> Trigger {
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
        let events = [
            Event::SwapOut { tensor: a, trigger: after(0, 0) },
            Event::SwapIn { tensor: a, trigger: after(2, 0) },
        ];
        let (run, _) = simulate(&events);
        // Out from 1,000 to 2,024; in from 3,000 to 4,024, which op3 waits for.
        assert_eq!(run.copies, vec![(Nanos(1000), Nanos(2024)), (Nanos(3000), Nanos(4024))]);
        assert_eq!((run.steps[3].0, run.iteration), (Nanos(4024), Nanos(6024)));
        assert_eq!((run.stalls.swap_in, run.late_copies), (Nanos(1024), 1));
    }

    #[test]
    fn a_delay_ends_when_a_step_waits() {
        let a = TensorId(0);
        let events = [
            Event::SwapOut { tensor: a, trigger: after(0, 0) },
            Event::SwapIn { tensor: a, trigger: after(1, 700_000) },
        ];
        let (run, _) = simulate(&events);
        assert_eq!(run.copies[1], (Nanos(3000), Nanos(4024)));
    }

    #[test]
    fn on_one_link_the_directions_take_turns() {
        let (a, b) = (TensorId(0), TensorId(1));
        let events = [
            Event::SwapOut { tensor: a, trigger: after(0, 0) },
            Event::SwapOut { tensor: b, trigger: after(2, 0) },
            Event::SwapIn { tensor: a, trigger: after(2, 0) },
            Event::SwapIn { tensor: b, trigger: after(3, 0) },
        ];
        let latencies = vec![Latency { time: Nanos(1000), source: Source::Graph }; 5];
        let program = Program::new(&graph(), &latencies, &events).unwrap();
        let run =
            run_one_way_at_a_time(&program, &LINK, &Durations::nominal(&program, &LINK)).unwrap();
        // Both may start at 3,000: b's departure stands first. Neither is slowed.
        assert_eq!(run.copies[1..3], [(Nanos(3000), Nanos(4024)), (Nanos(4024), Nanos(5048))]);
        assert_eq!(
            (run.steps[3].0, run.copies[3], run.iteration),
            (Nanos(5048), (Nanos(6048), Nanos(7072)), Nanos(8072))
        );
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
