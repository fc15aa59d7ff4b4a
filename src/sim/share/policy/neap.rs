//! neap's own policy: the job with the shortest remaining time runs first, and beside it the next
//! jobs in that order until the device is busy.
//!
//! A job that waits lends its room: its persistent memory goes to the host if the next job's turn
//! needs the room. The oldest job goes first once it was submitted longer ago than the patience.
//! Other jobs then run beside it only if they do not slow it. So after its patience a job waits at
//! most for the work left of the jobs submitted before it, for one iteration of each running job,
//! and for copies.

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
