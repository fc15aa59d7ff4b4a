//! First come, first served: one job at a time, to its end.

use super::{Facts, Policy, Style};

/// The policy.
pub struct Fifo;

impl Policy for Fifo {
    fn name(&self) -> &'static str {
        "fifo"
    }

    fn rank(&self, job: &Facts) -> u64 {
        job.submit.0
    }

    fn style(&self) -> Style {
        Style::One { preempts: false }
    }
}
