//! The outcome of a trace: each job's times and verdict, and the figures by which policies are
//! compared.

use super::jobs::Job;
use crate::noise::percentile;
use crate::units::{Bytes, Nanos, saturated};

/// How a job ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verdict {
    /// It did all its work.
    #[default]
    Done,
    /// It had no work.
    Empty,
    /// It was killed before it was done.
    Killed,
    /// It needs more memory than the device could ever give it.
    NeverFits,
    /// It was admitted and then needed more memory than the device could ever give it.
    Outgrew,
}

impl Verdict {
    /// The verdict in a word or two.
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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JobResult {
    /// When it was first admitted to the device's memory.
    pub admitted: Option<Nanos>,
    /// When its first iteration began.
    pub start: Option<Nanos>,
    /// When it ended.
    pub end: Nanos,
    /// How it ended.
    pub verdict: Verdict,
    /// Work done, as time alone; for an inference job, how long it was served.
    pub served: Nanos,
    /// How many times it gave way.
    pub switches: u32,
    /// For an inference job: the mean slowdown of the device while it was served, per mille.
    pub dilation: u32,
}

/// The memory in use from an instant on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Moment {
    /// The instant.
    pub at: Nanos,
    /// Sum of the persistent bytes of all residents.
    pub persistent: Bytes,
    /// Numbers and bytes of the lanes. Processes count as one lane.
    pub lanes: Vec<(u32, Bytes)>,
    /// How many jobs run, take turns or serve.
    pub running: usize,
    /// How many jobs are submitted and hold no memory of the device.
    pub waiting: usize,
}

impl Moment {
    /// The bytes of all lanes.
    #[must_use]
    pub fn in_lanes(&self) -> Bytes {
        self.lanes.iter().map(|lane| lane.1).sum()
    }

    /// All bytes that are promised to jobs.
    #[must_use]
    pub fn promised(&self) -> Bytes {
        self.persistent + self.in_lanes()
    }
}

/// What a job does for a while.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doing {
    /// It is submitted and not on the device.
    Waits,
    /// It is on the device and does not run.
    Rests,
    /// It runs, alone or in turn with others of its lane.
    Runs,
    /// It serves requests.
    Serves,
}

impl Doing {
    /// The word for it.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Waits => "waits",
            Self::Rests => "rests",
            Self::Runs => "runs",
            Self::Serves => "serves",
        }
    }
}

/// A time in which a job does one thing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// The job's place in the trace.
    pub job: u32,
    /// What it does.
    pub doing: Doing,
    /// From when on.
    pub from: Nanos,
    /// Until when.
    pub to: Nanos,
}

/// The outcome of a simulation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// In the order of the trace.
    pub jobs: Vec<JobResult>,
    /// How many times a job gave way to another.
    pub switches: u64,
    /// Persistent bytes copied to the host and back.
    pub moved: u128,
    /// How many times the device's memory was packed to join its holes.
    pub packs: u64,
    /// Persistent bytes copied within the device.
    pub packed: u128,
    /// How many times a job outgrew what it was admitted with. It grew where it was, or left and
    /// waited again.
    pub grew: u64,
    /// How many of these left.
    pub outgrown: u64,
    /// Number of changes that were proved safe, if proofs were asked for.
    pub proved: u64,
    /// The first change that was not safe, and why.
    pub harm: Option<(Nanos, String)>,
    /// Compute in use, in per mille times nanoseconds.
    pub busy: u128,
    /// Memory in use, in bytes times nanoseconds.
    pub held: u128,
    /// The most memory in use.
    pub most: Bytes,
    /// Memory over time, if asked for.
    pub moments: Vec<Moment>,
    /// What each job does, if asked for, in the order of the ends.
    pub stretches: Vec<Stretch>,
    /// What one job waited for from each time on, if asked for.
    pub reasons: Vec<(Nanos, String)>,
}

/// The figures by which policies are compared. Times are in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Figures {
    /// Time from the first submission to the last end.
    pub makespan: u64,
    /// Mean time from submission to admission to the device's memory.
    pub admission: u64,
    /// Mean time from submission to the first iteration.
    pub queuing: u64,
    /// Mean time from submission to the end.
    pub completion: u64,
    /// 95th percentile of the time to the end, by nearest rank.
    pub p95: u64,
    /// Mean share of the compute in use over the makespan.
    pub utilisation: f64,
    /// Mean of the memory in use over the makespan: persistent bytes and lanes, or processes.
    pub memory: Bytes,
    /// Jain's index over each job's work divided by its time to the end.
    pub fairness: f64,
    /// Number of jobs that did all their work.
    pub done: usize,
}

impl Outcome {
    /// The figures over the jobs that did all their work.
    #[must_use]
    pub fn figures(&self, jobs: &[Job]) -> Figures {
        let did = |r: &JobResult| matches!(r.verdict, Verdict::Done | Verdict::Empty);
        let all = || jobs.iter().zip(&self.jobs).filter(|(_, r)| did(r));
        let mut times: Vec<Nanos> = all().map(|(j, r)| r.end.saturating_sub(j.submit)).collect();
        times.sort_unstable();
        let first = jobs.iter().map(|j| j.submit).min().unwrap_or_default();
        let ran = self.jobs.iter().filter(|r| r.verdict != Verdict::NeverFits);
        let last = ran.map(|r| r.end).max().unwrap_or_default();
        let makespan = last.saturating_sub(first).0;
        let count = times.len().max(1) as u128;
        // The mean time from submission on.
        let until = |of: fn(&JobResult) -> Option<Nanos>| {
            let wait = |(j, r): (&Job, &JobResult)| of(r).unwrap_or(r.end).saturating_sub(j.submit);
            saturated(all().map(|both| u128::from(wait(both).0)).sum::<u128>() / count)
        };
        let (mut sum, mut squares, mut n) = (0.0, 0.0, 0.0);
        for (job, result) in all().filter(|(j, r)| j.work.0 > 0 && r.end > j.submit) {
            let rate = job.work.0 as f64 / (result.end - job.submit).0 as f64;
            (sum, squares, n) = (sum + rate, squares + rate * rate, n + 1.0);
        }
        Figures {
            makespan,
            admission: until(|result| result.admitted),
            queuing: until(|result| result.start),
            completion: until(|_| None),
            p95: percentile(&times, 95).0,
            utilisation: match makespan {
                0 => 0.0,
                _ => self.busy as f64 / 1000.0 / makespan as f64,
            },
            memory: Bytes(saturated(self.held.checked_div(u128::from(makespan)).unwrap_or(0))),
            fairness: if squares > 0.0 { sum * sum / (n * squares) } else { 1.0 },
            done: times.len(),
        }
    }
}
