//! As many jobs at once as memory holds, in order of submission, each in a lane of its own, to its
//! end.

use super::{Facts, Policy, Style};

/// The policy.
pub struct Pack;

impl Policy for Pack {
    fn name(&self) -> &'static str {
        "pack"
    }

    fn rank(&self, job: &Facts) -> u64 {
        job.submit.0
    }

    fn style(&self) -> Style {
        Style::All
    }
}
