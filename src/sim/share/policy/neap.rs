//! neap's own policy: shortest remaining time first, and beside that job the next ones in that
//! order until the device is busy.
//!
//! A job that waits lends its room: its persistent memory goes to the host if the next job's turn
//! needs it. A job that has been there for longer than the patience goes first, the oldest of all,
//! with company only as far as that costs it nothing. So after its patience P a job waits at most
//! for the work left of the jobs submitted before it, for one iteration of each job that runs, and
//! for moving.

use super::{Facts, Policy, Style};

/// The policy.
pub struct Neap;

impl Policy for Neap {
    fn name(&self) -> &'static str {
        "neap"
    }

    fn rank(&self, job: &Facts) -> u64 {
        job.remaining.0
    }

    fn style(&self) -> Style {
        Style::UntilBusy { preempts: true }
    }

    fn skips(&self) -> bool {
        true
    }

    fn moves(&self) -> bool {
        true
    }

    fn ages(&self) -> bool {
        true
    }
}
