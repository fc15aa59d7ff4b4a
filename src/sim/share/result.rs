//! What became of a trace: each job's times and verdict, and the figures that policies are compared
//! by.

use super::jobs::Job;
use crate::units::{Bytes, Nanos};

/// How a job ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It did all it had to do.
    Done,
    /// It had nothing to do.
    Empty,
    /// Its time to be killed came first.
    Killed,
    /// It needs more memory than it could ever have.
    NeverFits,
    /// It turned out, once it ran, to need more memory than it could ever have.
    Outgrew,
}

impl Verdict {
    /// In a word or two.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Empty => "nothing to do",
            Self::Killed => "killed",
            Self::NeverFits => "never fits",
            Self::Outgrew => "outgrew the device",
        }
    }
}

/// A job's times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobResult {
    /// When its first iteration began.
    pub start: Option<Nanos>,
    /// When it ended.
    pub end: Nanos,
    /// How.
    pub verdict: Verdict,
    /// Work that it did, as time alone; of an inference job, time of service.
    pub served: Nanos,
    /// How often it gave way.
    pub switches: u32,
    /// For an inference job: how much slower than alone the device was in its time, per mille.
    pub dilation: u32,
}

/// A span of time in which a job ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Its position in the trace.
    pub job: u32,
    /// From.
    pub from: Nanos,
    /// Until.
    pub to: Nanos,
}

/// A moment's memory: persistent bytes of residents, and each lane's or process's size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Moment {
    /// From when on.
    pub at: Nanos,
    /// Persistent bytes, all residents.
    pub persistent: Bytes,
    /// Lanes with their numbers; processes are one.
    pub lanes: Vec<(u32, Bytes)>,
}

/// All of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// In the order of the trace.
    pub jobs: Vec<JobResult>,
    /// Times at which one job gave way to another.
    pub switches: u64,
    /// Persistent bytes copied to the host and back.
    pub moved: u128,
    /// Times that the device's memory was packed, to make one hole of several.
    pub packs: u64,
    /// Persistent bytes copied within the device.
    pub packed: u128,
    /// Jobs that outgrew what they were admitted with: they grew where they were, or left and
    /// waited anew.
    pub grew: u64,
    /// Of these, those who left.
    pub outgrown: u64,
    /// Where asked for: changes that were proved safe.
    pub proved: u64,
    /// Where asked for: the first one that was not, and why.
    pub harm: Option<(Nanos, String)>,
    /// Compute in use: per mille times nanoseconds.
    pub busy: u128,
    /// Where asked for: memory over time.
    pub moments: Vec<Moment>,
    /// Where asked for: who ran when.
    pub spans: Vec<Span>,
    /// Where asked for: what one job waited for, from when on.
    pub reasons: Vec<(Nanos, String)>,
}

/// What policies are compared by, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Figures {
    /// From the first submission to the last end.
    pub makespan: u64,
    /// Mean time to the first iteration.
    pub queuing: u64,
    /// Mean time to the end.
    pub completion: u64,
    /// The 95th of 100, by nearest rank.
    pub p95: u64,
    /// Compute in use over the makespan.
    pub utilisation: f64,
    /// Jain's index of work over time to the end.
    pub fairness: f64,
    /// Jobs that did all they had to do.
    pub done: usize,
}

impl Outcome {
    /// The figures, over jobs that did all they had to do.
    #[must_use]
    pub fn figures(&self, jobs: &[Job]) -> Figures {
        let all = || {
            jobs.iter()
                .zip(&self.jobs)
                .filter(|(_, r)| matches!(r.verdict, Verdict::Done | Verdict::Empty))
        };
        let mut times: Vec<u64> = all().map(|(j, r)| r.end.saturating_sub(j.submit).0).collect();
        times.sort_unstable();
        let first = jobs.iter().map(|j| j.submit).min().unwrap_or_default();
        let last = self
            .jobs
            .iter()
            .filter(|r| r.verdict != Verdict::NeverFits)
            .map(|r| r.end)
            .max()
            .unwrap_or_default();
        let makespan = last.saturating_sub(first).0;
        let count = times.len().max(1) as u128;
        let mean = |sum: u128| u64::try_from(sum / count).unwrap_or(u64::MAX);
        let queuing = all()
            .map(|(j, r)| u128::from(r.start.unwrap_or(r.end).saturating_sub(j.submit).0))
            .sum();
        let (mut sum, mut squares, mut n) = (0.0, 0.0, 0.0);
        for (job, result) in all().filter(|(j, r)| j.work.0 > 0 && r.end > j.submit) {
            let rate = job.work.0 as f64 / (result.end - job.submit).0 as f64;
            (sum, squares, n) = (sum + rate, squares + rate * rate, n + 1.0);
        }
        Figures {
            makespan,
            queuing: mean(queuing),
            completion: mean(times.iter().map(|t| u128::from(*t)).sum()),
            p95: times
                .get((times.len() * 95).div_ceil(100).max(1) - 1)
                .copied()
                .unwrap_or_default(),
            utilisation: if makespan == 0 {
                0.0
            } else {
                self.busy as f64 / 1000.0 / makespan as f64
            },
            fairness: if squares > 0.0 { sum * sum / (n * squares) } else { 1.0 },
            done: times.len(),
        }
    }
}
