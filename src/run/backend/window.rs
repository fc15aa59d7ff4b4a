//! The window of each lane of an arena: which job holds it, and the jobs that wait for it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::sim::share::lanes::{JobId, LaneId};
use crate::sim::window::Turns;

/// How often a job that waits looks whether it was stopped.
const LOOK: Duration = Duration::from_millis(20);

/// A job, and the lane whose window it uses.
pub type Member = (LaneId, JobId);

/// The windows of all lanes.
#[derive(Default)]
pub struct Windows {
    lines: Mutex<BTreeMap<LaneId, Turns>>,
    changed: Condvar,
}

impl Windows {
    fn lines(&self) -> MutexGuard<'_, BTreeMap<LaneId, Turns>> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the job holds its lane's window. Returns how long another job held it
    /// meanwhile; `None` if `stop` is set before.
    pub fn wait(&self, (lane, job): Member, stop: &AtomicBool) -> Option<Duration> {
        let mut lines = self.lines();
        if lines.entry(lane).or_default().ask(job as usize) {
            return Some(Duration::ZERO);
        }
        let asked = Instant::now();
        while !lines.entry(lane).or_default().ask(job as usize) {
            if stop.load(Ordering::Relaxed) {
                return None;
            }
            let waited = self.changed.wait_timeout(lines, LOOK);
            lines = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        Some(asked.elapsed())
    }

    /// The job lets go of its lane's window, or no longer waits for it.
    pub fn let_go(&self, (lane, job): Member) {
        let mut lines = self.lines();
        if lines.get_mut(&lane).is_some_and(|line| line.leave(job as usize).is_none()) {
            lines.remove(&lane);
        }
        self.changed.notify_all();
    }
}

/// Lets go of a job's window when the job ends, even if it panics: a job that failed may still
/// hold it.
pub struct Left<'w>(pub Option<(&'w Windows, Member)>);

impl Drop for Left<'_> {
    fn drop(&mut self) {
        if let Some((windows, member)) = self.0 {
            windows.let_go(member);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    #[test]
    fn a_job_that_panics_lets_go_of_its_window() {
        let (windows, stop) = (Windows::default(), AtomicBool::new(true));
        let job = AssertUnwindSafe(|| {
            let _left = Left(Some((&windows, (0, 1))));
            assert_eq!(windows.wait((0, 1), &stop), Some(Duration::ZERO));
            assert_eq!(windows.wait((0, 2), &stop), None, "another job holds it");
            panic!("as a test");
        });
        assert!(catch_unwind(job).is_err());
        assert_eq!(windows.wait((0, 2), &stop), Some(Duration::ZERO));
    }
}
