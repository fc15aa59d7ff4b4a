//! Why a plan treats a tensor as it does: what it does between two uses, what that costs, and why
//! it does not do otherwise.
//!
//! Everything is derived from the plan's own program and its run without noise, so it holds for
//! plans of any planner: gaps between uses, when copies run and who waits for them, when the link
//! is busy, what is resident. For each way to treat a tensor in a gap, a verdict says that the
//! plan does so, or what time doing so would cost, or why it is impossible. The cost is that of
//! this one change in the noiseless run, with the rest of the plan unchanged.

mod verdict;

use crate::contract::Plan;
use crate::job::Graph;
use crate::sim::engine::{self, Run};
use crate::sim::program::{Begin, Program};
use crate::units::{Bytes, Nanos, OpId, TensorId};

pub use verdict::{Reason, Verdict};

/// A plan's program and its run without noise.
#[derive(Debug)]
pub struct Explained<'a> {
    graph: &'a Graph,
    plan: &'a Plan,
    program: Program,
    run: Run,
    /// Resident bytes from each instant on.
    memory: Vec<(Nanos, Bytes)>,
    /// For each operator, the step that is its own run (not a recompute).
    turns: Vec<usize>,
    /// Start and end of the first time at which the most bytes are resident.
    pub peak: (Nanos, Nanos),
    /// The resident bytes then.
    pub peak_bytes: Bytes,
    /// The step that runs then, or the one that waits.
    pub peak_step: usize,
}

/// Why a tensor holds bytes at the peak.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// It holds none.
    Away,
    /// The step at the peak works on it.
    InUse,
    /// Its copy to the host runs, or waits to start.
    Leaving,
    /// Its copy from the host runs.
    Arriving,
    /// It has come back, or was recomputed, and waits for its next use.
    Early,
    /// It stays between two uses.
    Kept,
}

/// A copy in the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copied {
    /// The copy's time.
    pub time: Nanos,
    /// The part of it for which the compute stream waits.
    pub exposed: Nanos,
}

/// What a plan does with a tensor between two uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Choice {
    /// It stays.
    Keep,
    /// It is swapped out and in. `out` is `None` if the host's copy is still valid.
    Swap {
        /// The copy to the host.
        out: Option<Copied>,
        /// The copy back.
        back: Copied,
    },
    /// It is dropped, and these operators recompute it. Other tensors recomputed for it are
    /// included.
    Recompute {
        /// The operators, in order.
        operators: Vec<OpId>,
        /// The sum of their times.
        time: Nanos,
    },
}

impl Choice {
    /// The choice in one word.
    #[must_use]
    pub const fn word(&self) -> &'static str {
        match self {
            Self::Keep => "keep",
            Self::Swap { .. } => "swap",
            Self::Recompute { .. } => "recompute",
        }
    }
}

/// The time between two uses of a tensor.
#[derive(Clone, Debug)]
pub struct Gap {
    /// The step after which it begins.
    pub after: usize,
    /// The step before which it ends.
    pub before: usize,
    /// Whether it goes round the end of the iteration.
    pub round: bool,
    /// Whether the peak is within it.
    pub at_peak: bool,
    /// From the end of the first step to the start of the second. Round the end, both parts
    /// together.
    pub length: Nanos,
    /// What the plan does in it.
    pub choice: Choice,
    /// Whether the tensor is, could be or can't be kept.
    pub keep: Verdict,
    /// The same for swapping.
    pub swap: Verdict,
    /// The same for recomputing.
    pub recompute: Verdict,
}

/// The explanation of one tensor.
#[derive(Clone, Debug)]
pub struct Story {
    /// The tensor.
    pub tensor: TensorId,
    /// Its bytes, rounded to blocks.
    pub bytes: Bytes,
    /// Why it holds bytes at the peak.
    pub presence: Presence,
    /// The times at which it holds device bytes.
    pub residencies: Vec<(Nanos, Nanos)>,
    /// The gaps between its uses, in order.
    pub gaps: Vec<Gap>,
}

impl<'a> Explained<'a> {
    /// Reads and simulates a plan that [`crate::contract::check`] has accepted.
    ///
    /// # Errors
    /// One sentence, if the plan was not checked and can't be read.
    pub fn new(plan: &'a Plan, graph: &'a Graph) -> Result<Self, String> {
        let job = plan.jobs.first().ok_or("the plan has no job")?;
        let program = Program::placed(graph, job).map_err(|e| e.to_string())?;
        let link = &plan.device.link;
        let run = engine::nominal(&program, link).map_err(|e| e.to_string())?;
        let memory = engine::memory(&program, &run);
        let peak_bytes = engine::peak(&memory);
        let at = memory.iter().position(|p| p.1 == peak_bytes).unwrap_or(0);
        let from = memory.get(at).map_or(Nanos::ZERO, |p| p.0);
        let until = memory.get(at + 1).map_or(run.iteration, |p| p.0);
        let started = run.steps.partition_point(|s| s.0 <= from);
        let peak_step = match started.checked_sub(1) {
            Some(last) if run.steps[last].1 > from => last,
            _ => started.min(run.steps.len().saturating_sub(1)),
        };
        let mut turns = vec![0; graph.operators.len()];
        for (index, step) in program.steps.iter().enumerate().filter(|(_, s)| s.event.is_none()) {
            turns[step.operator.index()] = index;
        }
        Ok(Self {
            graph,
            plan,
            program,
            run,
            memory,
            turns,
            peak: (from, until),
            peak_bytes,
            peak_step,
        })
    }

    /// The tensors resident at the peak, largest first.
    #[must_use]
    pub fn at_peak(&self) -> Vec<TensorId> {
        let there = self.program.residencies.iter().filter(|r| self.covers(r));
        let mut all: Vec<(Bytes, TensorId)> =
            there.filter_map(|r| Some((r.bytes, r.tensor?))).collect();
        all.sort_by_key(|&(bytes, tensor)| (std::cmp::Reverse(bytes), tensor));
        all.dedup();
        all.into_iter().map(|a| a.1).collect()
    }

    /// The workspace resident at the peak.
    #[must_use]
    pub fn workspace_at_peak(&self) -> Bytes {
        self.program
            .residencies
            .iter()
            .filter(|r| r.tensor.is_none() && self.covers(r))
            .map(|r| r.bytes)
            .sum()
    }

    /// The operator of a step, and whether the step is a recompute.
    #[must_use]
    pub fn step(&self, step: usize) -> Option<(OpId, bool)> {
        self.program.steps.get(step).map(|s| (s.operator, s.event.is_some()))
    }

    fn covers(&self, r: &crate::sim::program::Residency) -> bool {
        let (begin, end) = engine::life(r, &self.run);
        begin <= self.peak.0 && self.peak.0 < end
    }

    /// The explanation of a tensor.
    #[must_use]
    pub fn story(&self, tensor: TensorId) -> Story {
        let mine: Vec<usize> = (0..self.program.residencies.len())
            .filter(|&r| self.program.residencies[r].tensor == Some(tensor))
            .collect();
        // Each use with the residency it belongs to.
        let uses: Vec<(usize, usize)> = self
            .program
            .steps
            .iter()
            .enumerate()
            .filter_map(|(index, s)| Some((index, s.binds.iter().find(|b| b.0 == tensor)?.1)))
            .collect();
        let mut gaps: Vec<Gap> =
            uses.windows(2).map(|pair| self.gap(tensor, &mine, pair[0], pair[1], false)).collect();
        let long_lived =
            mine.iter().any(|&r| {
                self.program.residencies[r].begin == Begin::Iteration
                    || self.program.residencies[r].stays
            }) || self.graph.generators().get(tensor.index()).is_some_and(Option::is_none);
        if let (true, Some(&first), Some(&last)) = (long_lived, uses.first(), uses.last()) {
            gaps.push(self.gap(tensor, &mine, last, first, true));
        }
        let residencies = mine
            .iter()
            .map(|&r| engine::life(&self.program.residencies[r], &self.run))
            .filter(|l| l.0 < l.1)
            .collect();
        let bytes = self.graph.tensor(tensor).bytes.in_blocks();
        Story { tensor, bytes, presence: self.presence(&mine, &uses), residencies, gaps }
    }

    fn presence(&self, mine: &[usize], uses: &[(usize, usize)]) -> Presence {
        let at = self.peak.0;
        let Some(&here) = mine.iter().find(|&&r| self.covers(&self.program.residencies[r])) else {
            return Presence::Away;
        };
        let r = &self.program.residencies[here];
        let running = self.run.steps.get(self.peak_step).is_some_and(|s| s.0 <= at && at < s.1);
        if running && uses.contains(&(self.peak_step, here)) {
            return Presence::InUse;
        }
        if let Begin::Copy(c) = r.begin
            && at < self.run.copies[c].1
        {
            return Presence::Arriving;
        }
        let used = |after: bool| {
            uses.iter().any(|u| {
                u.1 == here
                    && if after { self.run.steps[u.0].0 > at } else { self.run.steps[u.0].1 <= at }
            })
        };
        match (used(false), used(true)) {
            (_, false) if r.out.is_some() => Presence::Leaving,
            (false, true) if matches!(r.begin, Begin::Copy(_)) => Presence::Early,
            // The tensor is recomputed: the step that makes it is not a use.
            (true, true)
                if uses
                    .iter()
                    .filter(|u| u.1 == here && self.run.steps[u.0].1 <= at)
                    .all(|u| self.program.steps[u.0].event.is_some()) =>
            {
                Presence::Early
            }
            _ => Presence::Kept,
        }
    }

    fn gap(
        &self,
        tensor: TensorId,
        mine: &[usize],
        from: (usize, usize),
        to: (usize, usize),
        round: bool,
    ) -> Gap {
        let (start, end) = (self.run.steps[from.0].1, self.run.steps[to.0].0);
        let length = if round {
            self.run.iteration.saturating_sub(start) + end
        } else {
            end.saturating_sub(start)
        };
        let at = self.peak.0;
        let at_peak = if round { at >= start || at < end } else { at >= start && at < end };
        let choice = self.choice(tensor, mine, from, to, round);
        let mut gap = Gap {
            after: from.0,
            before: to.0,
            round,
            at_peak,
            length,
            choice,
            keep: Verdict::Chosen,
            swap: Verdict::Chosen,
            recompute: Verdict::Chosen,
        };
        if gap.choice != Choice::Keep {
            gap.keep = self.keep(tensor, &gap);
        }
        if !matches!(gap.choice, Choice::Swap { .. }) {
            gap.swap = self.swap(tensor, &gap);
        }
        if !matches!(gap.choice, Choice::Recompute { .. }) {
            gap.recompute = self.recompute(tensor, &gap);
        }
        gap
    }

    fn choice(
        &self,
        tensor: TensorId,
        mine: &[usize],
        from: (usize, usize),
        to: (usize, usize),
        round: bool,
    ) -> Choice {
        let residencies = &self.program.residencies;
        let same = if round {
            residencies[from.1].stays
                && (from.1 == to.1 || residencies[to.1].begin == Begin::Iteration)
        } else {
            from.1 == to.1
        };
        if same {
            return Choice::Keep;
        }
        match residencies[to.1].begin {
            Begin::Copy(back) => {
                // Round the end it may leave after the end, in the residency with which the
                // iteration starts.
                let head = mine
                    .iter()
                    .copied()
                    .find(|&r| round && residencies[r].begin == Begin::Iteration && r != from.1);
                let out = residencies[from.1].out.or_else(|| head.and_then(|r| residencies[r].out));
                Choice::Swap { out: out.map(|c| self.copied(c)), back: self.copied(back) }
            }
            Begin::Step(s) => {
                let operators = self.remake(tensor, s);
                let time = operators.iter().map(|&s| self.program.steps[s].time).sum();
                Choice::Recompute {
                    operators: operators
                        .into_iter()
                        .map(|s| self.program.steps[s].operator)
                        .collect(),
                    time,
                }
            }
            Begin::Iteration => Choice::Keep,
        }
    }

    /// The recomputes that a recompute of a tensor needs before the next operator's own run, itself
    /// included.
    fn remake(&self, tensor: TensorId, step: usize) -> Vec<usize> {
        let steps = &self.program.steps;
        let first = (0..step).rev().find(|&s| steps[s].event.is_none()).map_or(0, |s| s + 1);
        let last = (step..steps.len()).find(|&s| steps[s].event.is_none()).unwrap_or(steps.len());
        // First the operators that write the tensor after it is generated, then, backwards, the
        // operators that make their inputs.
        let mut wanted = vec![false; steps.len()];
        wanted[step] = true;
        for s in step + 1..last {
            let operator = self.graph.operator(steps[s].operator);
            wanted[s] = operator.updates().any(|u| u.tensor == tensor);
        }
        for s in (first..last).rev() {
            if !wanted[s] {
                continue;
            }
            for read in self.graph.operator(steps[s].operator).reads() {
                let made = |p: usize| {
                    self.graph.operator(steps[p].operator).writes().any(|w| w.tensor == read.tensor)
                };
                for p in (first..s).filter(|&p| made(p)) {
                    wanted[p] = true;
                }
            }
        }
        (first..last).filter(|&s| wanted[s]).collect()
    }

    /// A copy and how long the compute stream waits for it: from the time at which the step could
    /// otherwise have started to the copy's end.
    fn copied(&self, copy: usize) -> Copied {
        let (start, end) = self.run.copies[copy];
        let ready = |step: usize| step.checked_sub(1).map_or(Nanos::ZERO, |s| self.run.steps[s].1);
        let residency = self.program.copies[copy].residency;
        let waits = |step: usize| {
            let step = &self.program.steps[step];
            let bytes = |&r: &usize| {
                let r = &self.program.residencies[r];
                self.program.residencies[residency].out == Some(copy)
                    && (r.previous == Some(residency) || r.after.contains(&residency))
            };
            step.reads_copies.contains(&copy) || step.begins.iter().any(bytes)
        };
        let exposed = (0..self.program.steps.len())
            .filter(|&s| waits(s))
            .map(|s| end.saturating_sub(ready(s)))
            .max()
            .unwrap_or_default();
        let time = end.saturating_sub(start);
        Copied { time, exposed: exposed.min(time) }
    }

    /// Whether a tensor is completely on the device just before a step.
    fn there(&self, tensor: TensorId, step: usize) -> bool {
        let start = self.run.steps[step].0;
        self.program.residencies.iter().filter(|r| r.tensor == Some(tensor)).any(|r| {
            let arrived = match r.begin {
                Begin::Iteration => true,
                Begin::Step(s) => s < step,
                Begin::Copy(c) => self.run.copies[c].1 <= start,
            };
            let (begin, end) = engine::life(r, &self.run);
            arrived && begin <= start && start < end
        })
    }
}

#[cfg(test)]
mod tests;
