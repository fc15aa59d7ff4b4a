//! The window that jobs hold in turn: which steps and swap-ins of a job need it, when the job may
//! let go of it, and which job holds it next.
//!
//! The simulator ([`super::beside`]) and the executor of several jobs both use this, so that they
//! read a plan alike ([`crate::contract::plan`], "The window"). A program made by
//! [`super::program::Program::placed`] has its [`Stretches`]: the parts of an iteration that need
//! the window. Its residencies wait for those of the stretch before. The caller must do this:
//!
//! - When a step or swap-in for which [`Stretches::at`] names a stretch waits for nothing but the
//!   link, and the job does not hold the window for that stretch, call [`Turns::ask`]. The item
//!   starts once that returns true. Until then a copy must not stand in a queue that other jobs'
//!   copies use: the holder of the window may need the link to let go of it.
//! - When all residencies in [`Stretches::lasts`] of the stretch held have ended, call
//!   [`Turns::leave`]; also when a job is ended from outside, once nothing of it runs any more.
//!
//! The checker proves with code of its own that no job waits for ever.

use std::collections::{BTreeSet, VecDeque};

use super::program::{Begin, Program};
use crate::contract::Window;

/// A job's stretches in the window, in order; empty if it has no window.
#[derive(Clone, Debug, Default)]
pub struct Stretches {
    steps: Vec<Option<usize>>,
    copies: Vec<Option<usize>>,
    lasts: Vec<Vec<usize>>,
}

impl Stretches {
    /// Reads the stretches from a program whose residencies have their addresses.
    #[must_use]
    pub fn new(program: &Program, window: &Window) -> Self {
        let stretch = |place: usize| window.hands_over_after.partition_point(|k| k.index() < place);
        let end = window.offset.0.saturating_add(window.bytes.0);
        // For each residency: its part of the window, what begins it, and its index.
        let mut inside: Vec<(usize, Begin, usize)> = Vec::new();
        for (index, (r, place)) in program.residencies.iter().zip(places(program)).enumerate() {
            let Some(place) = place else { continue };
            if r.offset.is_some_and(|o| o >= window.offset && o.0 < end) && r.bytes.0 > 0 {
                inside.push((stretch(place), r.begin, index));
            }
        }
        let used: BTreeSet<usize> = inside.iter().map(|i| i.0).collect();
        let mut all = Self {
            steps: vec![None; program.steps.len()],
            copies: vec![None; program.copies.len()],
            lasts: vec![Vec::new(); used.len()],
        };
        let mut last: Vec<Option<usize>> = vec![None; used.len()];
        for (part, begin, index) in inside {
            // Parts in which no residency begins don't count as stretches.
            let number = used.range(..part).count();
            match begin {
                Begin::Iteration => {}
                Begin::Step(s) => all.steps[s] = Some(number),
                Begin::Copy(c) => all.copies[c] = Some(number),
            }
            // Steps end in order, so of the residencies that end with a step only the last matters.
            let r = &program.residencies[index];
            let latest = last[number].and_then(|l: usize| program.residencies[l].last_step);
            if r.last_step > latest {
                last[number] = Some(index);
            }
            if r.out.is_some() || r.last_step.is_none() {
                all.lasts[number].push(index);
            }
        }
        for (lasts, last) in all.lasts.iter_mut().zip(last) {
            lasts.extend(last);
            lasts.sort_unstable();
            lasts.dedup();
        }
        all
    }

    /// The number of stretches.
    #[must_use]
    pub const fn count(&self) -> usize {
        self.lasts.len()
    }

    /// The stretch that a step or swap-in must hold at its start.
    #[must_use]
    pub fn at(&self, begin: Begin) -> Option<usize> {
        match begin {
            Begin::Iteration => None,
            Begin::Step(step) => *self.steps.get(step)?,
            Begin::Copy(copy) => *self.copies.get(copy)?,
        }
    }

    /// The residencies that end last: once they have ended, the stretch has.
    #[must_use]
    pub fn lasts(&self, stretch: usize) -> &[usize] {
        self.lasts.get(stretch).map_or(&[], Vec::as_slice)
    }
}

/// For each residency that begins within the iteration, how many operators come before the item
/// that begins it, in program order.
pub fn places(program: &Program) -> Vec<Option<usize>> {
    let mut before = 0;
    let mut steps = Vec::with_capacity(program.steps.len());
    for step in &program.steps {
        steps.push(if step.event.is_some() { before } else { step.operator.index() });
        if step.event.is_none() {
            before = step.operator.index() + 1;
        }
    }
    let place = |begin| match begin {
        Begin::Iteration => None,
        Begin::Step(s) => Some(steps[s]),
        Begin::Copy(c) => Some(program.copies[c].trigger.map_or(0, |s| steps[s] + 1)),
    };
    program.residencies.iter().map(|r| place(r.begin)).collect()
}

/// The line of jobs for the window: first come, first served.
#[derive(Clone, Debug, Default)]
pub struct Turns {
    /// The holder of the window, then the jobs that wait.
    line: VecDeque<usize>,
}

impl Turns {
    /// Asks for the window. Returns whether the job holds it now. Asking again keeps its place in
    /// line.
    pub fn ask(&mut self, job: usize) -> bool {
        if !self.line.contains(&job) {
            self.line.push_back(job);
        }
        self.line.front() == Some(&job)
    }

    /// Removes a job, whether it holds the window or waits for it. Returns the job that holds the
    /// window then.
    pub fn leave(&mut self, job: usize) -> Option<usize> {
        self.line.retain(|&other| other != job);
        self.line.front().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::{Event, Latency, Place, Placement, Source, Trigger};
    use crate::engine::tests::{after, graph};
    use crate::units::{Bytes, Nanos, OpId, TensorId};

    #[test]
    fn turns_are_first_come_first_served() {
        let mut turns = Turns::default();
        assert_eq!(
            [turns.ask(2), turns.ask(0), turns.ask(1), turns.ask(0), turns.ask(2)],
            [true, false, false, false, true]
        );
        assert_eq!([2, 0].map(|job| turns.leave(job)), [Some(0), Some(1)]);
        assert_eq!((turns.ask(2), turns.leave(1), turns.leave(2)), (false, Some(2), None));
    }

    /// op0 makes a, op1 makes b, op2 makes c from b, op3 reads a, op4 reads b and c. a leaves after
    /// op0 and is back for op3.
    #[test]
    fn stretches_are_read_off_a_program() {
        let a = TensorId(0);
        let events = [
            Event::SwapOut { tensor: a, trigger: after(0) },
            Event::SwapIn { tensor: a, trigger: Trigger { after: Some(OpId(1)) } },
        ];
        let latencies = vec![Latency { time: Nanos(1000), source: Source::Graph }; 5];
        let mut program = Program::new(&graph(), &latencies, &events).unwrap();
        let at = |tensor, residency, offset| Placement {
            place: Place::Tensor { tensor: TensorId(tensor), residency },
            offset: Bytes(offset),
        };
        program.place(&[at(0, 0, 2048), at(1, 0, 0), at(0, 1, 2048), at(2, 0, 1024)]).unwrap();
        let window =
            |hands_over_after| Window { offset: Bytes(2048), bytes: Bytes(1024), hands_over_after };
        let one = Stretches::new(&program, &window(vec![]));
        let (step, copy) = (Begin::Step, Begin::Copy);
        let at = [step(0), step(1), copy(0), copy(1)].map(|begin| one.at(begin));
        assert_eq!((one.count(), at), (1, [Some(0), None, None, Some(0)]));
        assert_eq!(one.lasts(0).len(), 2, "the copy that leaves, and the last use");
        // Operator 1 begins nothing there, so three parts are two stretches; the events of op1
        // belong to what follows.
        let two = Stretches::new(&program, &window(vec![OpId(0), OpId(1)]));
        assert_eq!((two.count(), two.at(step(0)), two.at(copy(1))), (2, Some(0), Some(1)));
        program.enter(&window(vec![OpId(0)]));
        let back = program.residencies.iter().position(|r| r.begin == Begin::Copy(1)).unwrap();
        assert!(program.residencies[back].after.contains(&program.stretches.lasts(0)[0]));
    }
}
