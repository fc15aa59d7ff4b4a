//! Shortest remaining time first: the job with the least work left runs alone, and gives way at an
//! iteration boundary. Jobs are admitted in that order too, as far as memory allows. An admitted
//! job keeps its persistent memory on the device.

use super::{Facts, Policy, Style};

/// The policy.
pub struct Srtf;

impl Policy for Srtf {
    fn name(&self) -> &'static str {
        "srtf"
    }

    fn rank(&self, job: &Facts) -> u64 {
        job.remaining.0
    }

    fn style(&self) -> Style {
        Style::One { preempts: true }
    }

    fn skips(&self) -> bool {
        true
    }
}
