//! Which job runs next: policies as pure decisions over jobs and time.
//!
//! A policy ranks jobs ([`Policy::place`]) and picks those that run next ([`Policy::choose`]). The
//! simulators and the service ask at iteration boundaries, and all check memory themselves.

use super::contention::WHOLE;
use crate::units::Nanos;

/// How many jobs run at once, and which give way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Style {
    /// One job at a time, until it ends.
    One,
    /// One job at a time. A better job takes over at the next iteration boundary.
    Best,
    /// As many jobs as fit, each in a lane of its own, until they end.
    #[default]
    All,
    /// All jobs in turn, so that all have the same service.
    Rotating,
    /// Jobs in order until the device is busy, each until it ends.
    Fill,
    /// Jobs in order until the device is busy. Better jobs take over at iteration boundaries.
    UntilBusy,
}

impl Style {
    /// Whether one job runs at a time.
    #[must_use]
    pub const fn in_turn(self) -> bool {
        matches!(self, Self::One | Self::Best | Self::Rotating)
    }
}

/// A policy.
#[derive(Clone, Copy, Debug, Default)]
pub struct Policy {
    /// Its name on the command line.
    pub name: &'static str,
    /// Whether the job with the least work left goes first, in place of the one submitted first.
    pub shortest: bool,
    /// How many jobs run at once.
    pub style: Style,
    /// Whether later jobs pass a job that can't be admitted, until that job is overdue.
    pub skips: bool,
    /// Whether the persistent memory of waiting jobs goes to the host when another job's turn needs
    /// the room (mode `neap`).
    pub moves: bool,
    /// Whether the oldest job goes first once it is overdue.
    pub ages: bool,
}

/// First come, first served: one job at a time, to its end.
const FIFO: Policy = Policy {
    name: "fifo",
    shortest: false,
    style: Style::One,
    skips: false,
    moves: false,
    ages: false,
};

/// The policies, in the order of the paper, neap's own last.
pub const ALL: &[Policy] = &[
    FIFO,
    // The job with the least work left runs alone, and gives way at an iteration boundary. It is
    // admitted whatever runs: the persistent memory of longer jobs goes to the host for it.
    Policy { name: "srtf", shortest: true, style: Style::Best, skips: true, moves: true, ..FIFO },
    PACK,
    // All jobs share equally from the moment they are admitted. (Salus's code compares the service
    // since each job's birth, so a newcomer keeps the device until it has caught up.)
    Policy { name: "fair", style: Style::Rotating, skips: true, moves: true, ..FIFO },
    NEAP,
];

/// Beside the job with the least work left the next ones run, until the device is busy. A job
/// that waits lends its room. An overdue job goes first, and others run beside it only if they
/// do not slow it. So after its patience a job waits at most for the work left of the jobs
/// submitted before it, for one iteration of each running job, and for copies.
pub const NEAP: Policy = Policy {
    name: "neap",
    shortest: true,
    style: Style::UntilBusy,
    skips: true,
    moves: true,
    ages: true,
};

/// As many jobs at once as memory holds, each to its end.
pub const PACK: Policy = Policy { name: "pack", style: Style::All, ..FIFO };

/// A present job, as a policy sees it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Candidate {
    /// When it was submitted.
    pub submit: Nanos,
    /// Its rank by the policy.
    pub rank: u64,
    /// The time of its iterations so far. A new job begins with the least of the present jobs.
    pub service: Nanos,
    /// Whether it has begun its first iteration.
    pub begun: bool,
    /// Whether it goes first whatever its rank.
    pub overdue: bool,
}

impl Policy {
    /// The rank of a job by when it was submitted and the work that is left, as time alone. Smaller
    /// goes first; equal ranks go in order of submission.
    #[must_use]
    pub const fn rank(&self, submit: Nanos, left: Nanos) -> u64 {
        if self.shortest { left.0 } else { submit.0 }
    }

    /// The place of a job among those that may run next. Smaller goes first.
    #[must_use]
    pub fn place(&self, job: &Candidate) -> (bool, bool, u64, Nanos) {
        let (rank, submit) = match self.style {
            Style::Rotating => (job.service.0, Nanos::ZERO),
            _ => (job.rank, job.submit),
        };
        (self.style == Style::One && !job.begun, !job.overdue, rank, submit)
    }

    /// Whether a job goes first because it was submitted longer ago than `patience`.
    #[must_use]
    pub fn overdue(&self, submit: Nanos, patience: Nanos, now: Nanos) -> bool {
        self.ages && submit.0.saturating_add(patience.0) <= now.0
    }

    /// Which of `ranked` (best first, with utilisations) run: the first that fits, and more until
    /// the policy's limit or `most`. `fits` is called once for each job, in order, and must count
    /// the jobs that it accepted. An `overdue` first job is joined only by jobs that fit in the
    /// utilisation left.
    pub fn choose<T: Copy>(
        &self,
        ranked: impl Iterator<Item = (T, u32)>,
        most: usize,
        overdue: bool,
        mut fits: impl FnMut(T) -> bool,
    ) -> Vec<T> {
        let most = if self.style.in_turn() { 1 } else { most };
        let whole = if self.style == Style::All { u32::MAX } else { WHOLE };
        let (mut chosen, mut busy) = (Vec::new(), 0u32);
        for (job, utilisation) in ranked {
            if chosen.len() >= most || busy >= whole {
                break;
            }
            if overdue && !chosen.is_empty() && busy + utilisation > WHOLE {
                continue;
            }
            if fits(job) {
                chosen.push(job);
                busy = busy.saturating_add(utilisation);
            }
        }
        chosen
    }
}

/// The policies' names.
pub fn names() -> impl Iterator<Item = &'static str> {
    ALL.iter().map(|policy| policy.name)
}

/// The policy with this name.
#[must_use]
pub fn find(name: &str) -> Option<&'static Policy> {
    ALL.iter().find(|policy| policy.name == name)
}
