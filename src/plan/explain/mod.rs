//! Why a plan treats a tensor as it does: what it does between any two uses and what that costs,
//! what stands against doing otherwise.
//!
//! Answers why a tensor is in the way. Everything is read off the plan's own program
//! and its noiseless run, so it holds for plans of any planner: gaps between uses, when copies run
//! and who waits for them, which links are busy, what is resident. A verdict is one of: what the
//! plan does, what could be done instead at a price, or what is ruled out and by what. A price is
//! what the change alone costs by these clocks: the rest of the plan is taken to stay as it is. Not
//! for: finding a better plan.

mod verdict;

use crate::contract::Plan;
use crate::job::Graph;
use crate::sim::engine::{self, Run};
use crate::sim::program::{Begin, Program};
use crate::units::{Bytes, Nanos, OpId, TensorId};

pub use verdict::{Reason, Verdict};

/// A plan's program with its noiseless run, ready to be asked.
#[derive(Debug)]
pub struct Explained<'a> {
    graph: &'a Graph,
    plan: &'a Plan,
    program: Program,
    run: Run,
    /// Resident bytes from each instant on.
    memory: Vec<(Nanos, Bytes)>,
    /// The position of each operator's own turn among the steps.
    turns: Vec<usize>,
    /// The first instant at which most is resident, and until when.
    pub peak: (Nanos, Nanos),
    /// What is resident then.
    pub peak_bytes: Bytes,
    /// The step that runs then, or the one that is waited for.
    pub peak_step: usize,
}

/// Why a tensor holds bytes at the peak.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// It does not.
    Away,
    /// The step at the peak works on it.
    InUse,
    /// Its copy to the host runs or is waited for.
    Leaving,
    /// Its copy from the host runs.
    Arriving,
    /// It has come back, or was made again, and waits for its next use.
    Early,
    /// Between two uses it stays.
    Kept,
}

/// A copy in the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copied {
    /// How long it takes.
    pub time: Nanos,
    /// How much of that the compute stream waits for it.
    pub exposed: Nanos,
}

/// What a plan does with a tensor between two uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Choice {
    /// It stays.
    Keep,
    /// It leaves over the link and comes back; without a copy out where the host's is still valid.
    Swap {
        /// Out.
        out: Option<Copied>,
        /// Back.
        back: Copied,
    },
    /// It is dropped and made again by these steps' operators, others' recomputes for its sake
    /// included.
    Recompute {
        /// In order.
        operators: Vec<OpId>,
        /// All of them together.
        time: Nanos,
    },
}

impl Choice {
    /// In one word.
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
    /// The step it begins after.
    pub after: usize,
    /// The step it ends before.
    pub before: usize,
    /// It goes round the end of the iteration.
    pub round: bool,
    /// The peak lies in it.
    pub at_peak: bool,
    /// From the end of one to the start of the other; round the end both parts together.
    pub length: Nanos,
    /// What the plan does.
    pub choice: Choice,
    /// What is to be said of each way, the chosen one included.
    pub keep: Verdict,
    /// The same.
    pub swap: Verdict,
    /// The same.
    pub recompute: Verdict,
}

/// All about one tensor.
#[derive(Clone, Debug)]
pub struct Story {
    /// The tensor.
    pub tensor: TensorId,
    /// Rounded to blocks.
    pub bytes: Bytes,
    /// At the peak.
    pub presence: Presence,
    /// When it holds device bytes.
    pub residencies: Vec<(Nanos, Nanos)>,
    /// Between its uses, in order.
    pub gaps: Vec<Gap>,
}

impl<'a> Explained<'a> {
    /// Reads and runs a plan that [`crate::contract::check`] has passed.
    ///
    /// # Errors
    /// One sentence, for a plan that has not.
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

    /// The operator of a step, and whether it is run again there.
    #[must_use]
    pub fn step(&self, step: usize) -> Option<(OpId, bool)> {
        self.program.steps.get(step).map(|s| (s.operator, s.event.is_some()))
    }

    fn covers(&self, r: &crate::sim::program::Residency) -> bool {
        let (begin, end) = engine::life(r, &self.run);
        begin <= self.peak.0 && self.peak.0 < end
    }

    /// Everything about a tensor.
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
            // Made again: the step that made it is no use.
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
                // Round the end it may leave after the end, in the residency that the iteration
                // starts with.
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

    /// The recomputes that a recompute of a tensor needs before the next operator has its turn,
    /// itself included.
    fn remake(&self, tensor: TensorId, step: usize) -> Vec<usize> {
        let steps = &self.program.steps;
        let first = (0..step).rev().find(|&s| steps[s].event.is_none()).map_or(0, |s| s + 1);
        let last = (step..steps.len()).find(|&s| steps[s].event.is_none()).unwrap_or(steps.len());
        // What writes the tensor again after it is made, then backwards whatever makes what these
        // read.
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

    /// A copy and how long the compute stream waits for it: from when the step could have started
    /// otherwise to the copy's end.
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

    /// Whether a tensor is on the device just before a step, whole.
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
