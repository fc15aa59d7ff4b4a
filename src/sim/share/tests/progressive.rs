//! Jobs that take their memory bit by bit, as frameworks do. Without lanes they may wait for each
//! other for ever, with lanes they always end. This reproduces the deadlock of Salus's Fig. 6,
//! without times.

use super::super::lanes::{Join, Lanes, Mode};
use crate::units::{Bytes, id32};

/// Persistent and ephemeral bytes of a job, and its iterations.
pub type Job = (Bytes, Bytes, u32);

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// All jobs ended.
    Done,
    /// These jobs (by position) hold memory and wait for each other's.
    Deadlock(Vec<usize>),
}

/// Runs jobs that take `step` bytes at a time, in turn. With `lanes`, no job starts an iteration
/// that would break the safety condition.
#[must_use]
pub fn run(capacity: Bytes, jobs: &[Job], step: Bytes, lanes: bool) -> End {
    let step = step.0.max(1);
    let mut admission = Lanes::new(capacity, Mode::Neap, 1);
    let mut left: Vec<u32> = jobs.iter().map(|j| j.2).collect();
    let mut held = vec![0u64; jobs.len()];
    let mut runner: Option<usize> = None;
    loop {
        if left.iter().all(|l| *l == 0) {
            return End::Done;
        }
        let mut moved = false;
        for (at, (persistent, ephemeral, _)) in jobs.iter().enumerate() {
            if left[at] == 0 {
                continue;
            }
            if lanes {
                if admission.admit(id32(at), (*persistent, *ephemeral), Join::Share).is_none()
                    || runner.is_some_and(|r| r != at)
                {
                    continue;
                }
                runner = Some(at);
            }
            let want = (persistent.0 + ephemeral.0 - held[at]).min(step);
            if held.iter().sum::<u64>() + want > capacity.0 {
                continue;
            }
            held[at] += want;
            moved = true;
            if held[at] == persistent.0 + ephemeral.0 {
                // The iteration ends: the job gives its ephemeral bytes back, and after its last
                // iteration all its bytes.
                left[at] -= 1;
                held[at] = if left[at] == 0 { 0 } else { persistent.0 };
                runner = None;
                if left[at] == 0 {
                    admission.leave(id32(at));
                }
            }
        }
        if !moved {
            return End::Deadlock(
                (0..jobs.len()).filter(|&j| left[j] > 0 && held[j] > 0).collect(),
            );
        }
    }
}
