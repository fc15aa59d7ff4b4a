//! The event engine: when each step and copy of a program runs, and how much memory is resident
//! when.
//!
//! It follows the rules of [`crate::contract::plan`], "What a plan means". Time is counted in
//! integer nanoseconds and a copy's progress in exact work units. At one instant, ends come before
//! starts. A run costs O((steps + copies) · log). [`super::beside`] runs several jobs on one
//! device.

use super::player::{ALONE, Player};
use super::program::{Begin, Program, Residency};
pub use super::timing::{Deadlock, Durations, Run, Stalls, copy_time, rate, wait, work};
use super::timing::{NEVER, Wires};
use crate::device::Link;
use crate::units::{Bytes, Nanos};

/// Runs one iteration of a job that is alone on the device.
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

/// As [`run`], on a link that carries one copy at a time in either direction, at that direction's
/// uncontended rate. The directions keep separate queues. Of two copies that could start, the one
/// that stands first in the plan does. Only [`super::accounting`] uses this.
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
    let mut player = Player::new(program, durations, Nanos::ZERO, false);
    let mut wires = Wires::default();
    let mut now = Nanos::ZERO;
    loop {
        let mut started = true;
        while started {
            started = false;
            // Copies are numbered in the plan's order.
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
        let next = player.next().min(wires.next(now, link));
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

/// Resident bytes over time: the value from each instant on, the first at zero. At one instant,
/// ends count before begins.
#[must_use]
pub fn memory(program: &Program, run: &Run) -> Vec<(Nanos, Bytes)> {
    let mut changes: Vec<(Nanos, i64)> = Vec::with_capacity(program.residencies.len() * 2);
    for r in &program.residencies {
        let (begin, end) = life(r, run);
        if begin < end {
            let bytes = r.bytes.0.cast_signed();
            changes.extend([(begin, bytes), (end, -bytes)]);
        }
    }
    curve(changes)
}

/// The bytes from each instant on, from changes by signed bytes.
#[must_use]
pub fn curve(mut changes: Vec<(Nanos, i64)>) -> Vec<(Nanos, Bytes)> {
    changes.sort_unstable();
    let mut curve: Vec<(Nanos, Bytes)> = Vec::new();
    let mut level = 0;
    for (at, change) in changes {
        level = i64::saturating_add(level, change);
        let bytes = Bytes(level.cast_unsigned());
        match curve.last_mut() {
            Some(last) if last.0 == at => last.1 = bytes,
            _ => curve.push((at, bytes)),
        }
    }
    curve
}

/// When a residency begins and ends in a run.
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

    /// 1 GB/s alone, half of that contended, no overhead: a byte takes a nanosecond.
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
            ..Operator::default()
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

    pub fn after(op: u32) -> Trigger {
        Trigger { after: Some(OpId(op)) }
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
            Event::SwapOut { tensor: a, trigger: after(0) },
            Event::SwapIn { tensor: a, trigger: after(2) },
        ];
        let (run, _) = simulate(&events);
        // Out from 1,000 to 2,024; in from 3,000 to 4,024, which op3 waits for.
        assert_eq!(run.copies, vec![(Nanos(1000), Nanos(2024)), (Nanos(3000), Nanos(4024))]);
        assert_eq!((run.steps[3].0, run.iteration), (Nanos(4024), Nanos(6024)));
        assert_eq!((run.stalls.swap_in, run.late_copies), (Nanos(1024), 1));
    }

    #[test]
    fn on_one_link_the_directions_take_turns() {
        let (a, b) = (TensorId(0), TensorId(1));
        let events = [
            Event::SwapOut { tensor: a, trigger: after(0) },
            Event::SwapOut { tensor: b, trigger: after(2) },
            Event::SwapIn { tensor: a, trigger: after(2) },
            Event::SwapIn { tensor: b, trigger: after(3) },
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
            Event::SwapOut { tensor: a, trigger: after(0) },
            Event::SwapIn { tensor: a, trigger: after(1) },
            Event::SwapOut { tensor: b, trigger: after(2) },
            Event::SwapIn { tensor: b, trigger: after(3) },
        ];
        let (run, _) = simulate(&events);
        // a comes back from 2,024 to 3,000 alone and is slowed by b's departure from then on: 48
        // bytes take 96 ns.
        assert_eq!(run.copies[1], (Nanos(2024), Nanos(3096)));
        // b: 48 bytes' worth by 3,096, the other 976 alone.
        assert_eq!(run.copies[2], (Nanos(3000), Nanos(4072)));
    }
}
