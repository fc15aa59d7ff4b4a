//! Which job runs next: policies as pure decisions over jobs and time.
//!
//! A policy ranks jobs and says how many run at once; [`choose`] picks the jobs that run next. Both
//! the simulator and the service ask at iteration boundaries, and both check memory themselves.

mod fair;
mod fifo;
mod neap;
mod pack;
mod srtf;

pub use pack::Pack;

use super::contention::WHOLE;
use crate::units::Nanos;

/// What a policy may know of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// When it was submitted.
    pub submit: Nanos,
    /// Work that is left, as time alone.
    pub remaining: Nanos,
    /// The share of the device that it keeps busy alone, per mille.
    pub utilisation: u32,
}

/// How many jobs run at once, and which give way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// One job at a time.
    One {
        /// Whether a better job takes over at the next iteration boundary.
        preempts: bool,
    },
    /// As many jobs as fit, each in a lane of its own, until they end.
    All,
    /// All jobs in turn, so that all have the same service.
    Rotating,
    /// Jobs in order until the device is busy.
    UntilBusy {
        /// Whether a better job takes over at the next iteration boundary.
        preempts: bool,
    },
}

/// A policy.
pub trait Policy: Sync {
    /// Its name on the command line.
    fn name(&self) -> &'static str;
    /// Smaller goes first; equal ranks go in order of submission.
    fn rank(&self, job: &Facts) -> u64;
    /// How many jobs run at once.
    fn style(&self) -> Style;
    /// Whether later jobs pass a job that can't be admitted, until that job is overdue.
    fn skips(&self) -> bool {
        false
    }
    /// Whether the persistent memory of waiting jobs goes to the host when another job's turn needs
    /// the room (mode `neap`).
    fn moves(&self) -> bool {
        false
    }
    /// Whether the oldest job goes first once it is overdue.
    fn ages(&self) -> bool {
        false
    }
}

/// The policies, in the order of the paper, neap's own last.
pub const ALL: &[&dyn Policy] = &[&fifo::Fifo, &srtf::Srtf, &pack::Pack, &fair::Fair, &neap::Neap];

/// Their names.
pub fn names() -> impl Iterator<Item = &'static str> {
    ALL.iter().map(|policy| policy.name())
}

/// The policy with this name.
#[must_use]
pub fn find(name: &str) -> Option<&'static dyn Policy> {
    ALL.iter().copied().find(|policy| policy.name() == name)
}

/// Which of `ranked` (best first, with utilisations) run: the first that fits, and more until the
/// device is busy. `fits` is called once for each job, in order, and must count the jobs that it
/// accepted. An `overdue` first job is joined only by jobs that fit in the utilisation left.
pub fn choose<T: Copy>(
    ranked: impl Iterator<Item = (T, u32)>,
    most: usize,
    overdue: bool,
    mut fits: impl FnMut(T) -> bool,
) -> Vec<T> {
    let (mut chosen, mut busy) = (Vec::new(), 0);
    for (job, utilisation) in ranked {
        if chosen.len() >= most || busy >= WHOLE {
            break;
        }
        if overdue && !chosen.is_empty() && busy + utilisation > WHOLE {
            continue;
        }
        if fits(job) {
            chosen.push(job);
            busy += utilisation;
        }
    }
    chosen
}
