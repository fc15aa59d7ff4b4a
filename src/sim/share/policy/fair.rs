//! The same service for all jobs: they take turns, and all progress alike.
//!
//! Salus's code compares the service since each job's birth, so a newcomer keeps the device until
//! it has caught up. Here all jobs share equally from the moment they are admitted.

use super::{Facts, Policy, Style};

/// The policy.
pub struct Fair;

impl Policy for Fair {
    fn name(&self) -> &'static str {
        "fair"
    }

    fn rank(&self, job: &Facts) -> u64 {
        job.submit.0
    }

    fn style(&self) -> Style {
        Style::Rotating
    }

    fn skips(&self) -> bool {
        true
    }

    fn moves(&self) -> bool {
        true
    }
}
