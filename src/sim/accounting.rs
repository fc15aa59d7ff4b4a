//! The papers' accounting: the figures that their tables would print for a plan, and the causes of
//! a plan's extra time.
//!
//! A plan is always made, proved and run by physical accounting ([`crate::contract::plan`]). This
//! is a second *reading* of the same plan. It counts as TENSILE's paper (Zhang et al.) does:
//!
//! - **Memory.** A swap-in's bytes count from the *end* of its copy, a recompute's from the *end*
//!   of its step, and an operator's outputs from the *end* of the operator. A swap-out's bytes
//!   count until the end of its copy, or of its last use where that is later; both readings agree
//!   there. Only tensors count: no workspace, no scratch of a recompute. Sizes are rounded to
//!   blocks, as everywhere.
//! - **Link.** It carries one copy at a time in either direction, at the direction's uncontended
//!   rate ([`engine::run_one_way_at_a_time`]). Everything else waits as the plan says, also for
//!   addresses. So an iteration can take longer than on the physical link, because copies in
//!   opposite directions take turns. It can also be shorter, because no copy slows another.
//! - **Without a plan.** Liveness by the same rule: an operator's outputs and its workspace do not
//!   count while it runs. The papers' "vanilla" frees nothing: its peak is the sum of all tensors.
//!
//! For the same start and end times, the papers' peak is never above the physical one. The papers'
//! link may change those times.

use super::engine::{self, Deadlock, Durations, Run};
use super::program::{Begin, Program};
use crate::device::Link;
use crate::job::Graph;
use crate::job::liveness::Liveness;
use crate::units::{Bytes, Nanos};

/// A plan as the papers count it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Paper {
    /// The largest sum of resident bytes.
    pub peak: Bytes,
    /// The iteration's time on one link for both directions.
    pub iteration: Nanos,
    /// The same peak without a plan, when every tensor is freed after its last use.
    pub unplanned_peak: Bytes,
    /// The same peak without a plan, when no tensor is freed.
    pub no_free: Bytes,
    /// Where the extra time comes from.
    pub extra: Extra,
}

/// Reads a program as the papers would. `liveness` is that of the graph as its file has it.
///
/// # Errors
/// When the program deadlocks, as [`engine::run`].
pub fn paper(
    graph: &Graph,
    liveness: &Liveness,
    program: &Program,
    link: &Link,
) -> Result<Paper, Deadlock> {
    let run = engine::run_one_way_at_a_time(program, link, &Durations::nominal(program, link))?;
    Ok(Paper {
        peak: peak(program, &run),
        iteration: run.iteration,
        unplanned_peak: unplanned_peak(graph.framework(), liveness),
        no_free: graph.framework().tensors.iter().map(|t| t.bytes.in_blocks()).sum(),
        extra: Extra::new(program, link, run.iteration)?,
    })
}

/// The largest sum of a run's resident bytes by the papers' rule.
fn peak(program: &Program, run: &Run) -> Bytes {
    let mut changes: Vec<(Nanos, bool, u64)> = Vec::with_capacity(program.residencies.len() * 2);
    for residency in program.residencies.iter().filter(|r| r.tensor.is_some()) {
        let (_, end) = engine::life(residency, run);
        let begin = match residency.begin {
            Begin::Iteration => Nanos::ZERO,
            Begin::Step(step) => run.steps[step].1,
            Begin::Copy(copy) => run.copies[copy].1,
        };
        if begin < end {
            changes.push((begin, true, residency.bytes.0));
            changes.push((end, false, residency.bytes.0));
        }
    }
    changes.sort_unstable();
    let (mut level, mut highest) = (0, 0);
    for (_, begins, bytes) in changes {
        level = if begins { level + bytes } else { level - bytes };
        highest = highest.max(level);
    }
    Bytes(highest)
}

fn unplanned_peak(graph: &Graph, liveness: &Liveness) -> Bytes {
    let mut seen = vec![usize::MAX; graph.tensors.len()];
    let mut highest = Bytes::ZERO;
    for (index, operator) in graph.operators.iter().enumerate() {
        let mut made = operator.workspace.in_blocks();
        for operand in operator.generates() {
            if std::mem::replace(&mut seen[operand.tensor.index()], index) != index {
                made += graph.tensor(operand.tensor).bytes.in_blocks();
            }
        }
        highest = highest.max(liveness.resident[index].saturating_sub(made));
    }
    highest
}

/// An iteration's time beyond the sum of the operators' latencies, by cause. The parts add up to
/// that time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extra {
    /// Time of the operators that run again.
    pub recompute: Nanos,
    /// Waits for a swap-in, on a link whose directions do not slow each other.
    pub swap_in: Nanos,
    /// Waits for bytes that are still being swapped out, on such a link.
    pub swap_out: Nanos,
    /// Time of copies after the last operator, on such a link.
    pub tail: Nanos,
    /// Nanoseconds that the iteration takes longer because the two directions slow each other. It
    /// is negative where the slower link happens to give a better order.
    pub contention: i128,
}

impl Extra {
    /// Splits the extra time of an iteration that took `iteration`.
    ///
    /// # Errors
    /// As [`engine::run`].
    pub fn new(program: &Program, link: &Link, iteration: Nanos) -> Result<Self, Deadlock> {
        let free = Link { h2d_contended: link.h2d, d2h_contended: link.d2h, ..*link };
        let run = engine::nominal(program, &free)?;
        Ok(Self {
            recompute: program
                .steps
                .iter()
                .filter(|s| s.event.is_some())
                .map(|s| s.time.max(Nanos(1)))
                .sum(),
            swap_in: run.stalls.swap_in,
            swap_out: run.stalls.swap_out,
            tail: run.stalls.tail,
            contention: i128::from(iteration.0) - i128::from(run.iteration.0),
        })
    }

    /// The sum of all causes, in nanoseconds.
    #[must_use]
    pub fn total(&self) -> i128 {
        i128::from((self.recompute + self.swap_in + self.swap_out + self.tail).0) + self.contention
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::{Event, Latency, Source};
    use crate::engine::tests::{LINK, after, graph};
    use crate::units::TensorId;

    fn program(events: &[Event]) -> Program {
        let latencies = vec![Latency { time: Nanos(1000), source: Source::Graph }; 5];
        Program::new(&graph(), &latencies, events).unwrap()
    }

    fn both_ways() -> Program {
        let (a, b) = (TensorId(0), TensorId(1));
        program(&[
            Event::SwapOut { tensor: a, trigger: after(0) },
            Event::SwapOut { tensor: b, trigger: after(2) },
            Event::SwapIn { tensor: a, trigger: after(2) },
            Event::SwapIn { tensor: b, trigger: after(3) },
        ])
    }

    #[test]
    fn without_a_plan_outputs_count_from_the_end_of_their_operator() {
        let (graph, program) = (graph(), program(&[]));
        let read = paper(&graph, &Liveness::new(&graph), &program, &LINK).unwrap();
        // a, b and c stand together while op3 reads a.
        assert_eq!(
            (read.peak, read.unplanned_peak, read.no_free),
            (Bytes(3072), Bytes(3072), Bytes(3072))
        );
        assert_eq!((read.iteration, read.extra), (Nanos(5000), Extra::default()));
        // op0's output alone: physically it stands during op0, by the papers' rule only after it.
        let first = Liveness::new(&graph).resident[0];
        assert_eq!(
            (
                first,
                peak(
                    &program,
                    &engine::run(&program, &LINK, &Durations::nominal(&program, &LINK)).unwrap()
                )
            ),
            (Bytes(1024), Bytes(3072))
        );
    }

    #[test]
    fn swap_ins_count_from_their_end_and_the_physical_peak_is_higher() {
        let (graph, program) = (graph(), both_ways());
        let read = paper(&graph, &Liveness::new(&graph), &program, &LINK).unwrap();
        // a 1,000 to 2,024 and 5,048 to 6,048; b 2,000 to 4,024 and from 7,072; c from 3,000.
        assert_eq!((read.peak, read.iteration), (Bytes(2048), Nanos(8072)));
        let run = engine::run(&program, &LINK, &Durations::nominal(&program, &LINK)).unwrap();
        assert_eq!(engine::peak(&engine::memory(&program, &run)), Bytes(3072));
    }

    #[test]
    fn causes_add_up_to_the_extra_time() {
        let program = both_ways();
        let run = engine::run(&program, &LINK, &Durations::nominal(&program, &LINK)).unwrap();
        let extra = Extra::new(&program, &LINK, run.iteration).unwrap();
        // Alone, a would arrive 1,024 ns after op3 could start; so would b before op4. At half
        // speed a takes 1,024 more.
        assert_eq!(extra, Extra { swap_in: Nanos(2048), contention: 1024, ..Extra::default() });
        assert_eq!(extra.total(), i128::from(run.iteration.0) - 5000);
    }
}
