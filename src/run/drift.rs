//! Mean latencies of a running job, and their drift since the job was last planned.
//!
//! After each iteration, a mean latency of each operator and a mean slowdown of each direction of
//! the link are updated with the measured values (exponentially, the newest with weight 0.9, as in
//! TENSILE's published code).

use super::backend::Measured;
use crate::device::latency::LONGEST;
use crate::device::{Latency, Link, Source};
use crate::sim::engine;
use crate::sim::program::{Direction, Program};
use crate::units::Nanos;

/// By how much the sum of latencies must change before a job is planned again, in thousandths: the
/// threshold of TENSILE's published code.
pub const THRESHOLD: u64 = 300;

/// Sums of latencies now, in thousandths of the sums when the job was last planned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drift {
    /// The sum of all operators.
    pub operators_per_mille: u64,
    /// The sum of copies to the device, relative to the bytes copied.
    pub h2d_per_mille: u64,
    /// The same of copies from the device.
    pub d2h_per_mille: u64,
}

impl Drift {
    /// Whether a sum has changed by more than `threshold` thousandths.
    #[must_use]
    pub fn exceeds(self, threshold: u64) -> bool {
        [self.operators_per_mille, self.h2d_per_mille, self.d2h_per_mille]
            .into_iter()
            .any(|now| exceeds(now, threshold))
    }
}

/// Whether a sum, in thousandths of what it was, has changed by more than `threshold` thousandths.
#[must_use]
pub fn exceeds(now_per_mille: u64, threshold: u64) -> bool {
    now_per_mille.abs_diff(1000) > threshold
}

/// Mean latencies of a job's operators and copies.
#[derive(Clone, Debug)]
pub struct Means {
    /// Mean latencies of operators in nanoseconds, and their sum when the job was last planned.
    operators: Vec<u64>,
    planned: u64,
    /// The time of copies in each direction, in thousandths of the time by the plan's link, and the
    /// same at the last planning.
    slow: [u64; 2],
    slow_then: [u64; 2],
    /// For each step of the program, its operator if it is one.
    steps: Vec<Option<usize>>,
    /// For each copy of the program, the time that the engine predicts in nanoseconds.
    copies: Vec<(Direction, u64)>,
    /// Whether no iteration of this program has ended yet.
    fresh: bool,
}

impl Means {
    /// The latencies with which a job was planned.
    #[must_use]
    pub fn new(latencies: &[Latency]) -> Self {
        let operators: Vec<u64> = latencies.iter().map(|l| l.time.0).collect();
        Self {
            planned: operators.iter().sum(),
            operators,
            slow: [1000; 2],
            slow_then: [1000; 2],
            steps: Vec::new(),
            copies: Vec::new(),
            fresh: true,
        }
    }

    /// From now on `program` runs. Its copies are compared with their times on `link`.
    pub fn follow(&mut self, program: &Program, link: &Link) {
        self.fresh = true;
        self.steps =
            program.steps.iter().map(|s| s.event.is_none().then(|| s.operator.index())).collect();
        let times = engine::nominal(program, link).map(|run| run.copies).unwrap_or_default();
        self.copies = program
            .copies
            .iter()
            .zip(times)
            .map(|(c, (start, end))| (c.direction, (end - start).0))
            .collect();
    }

    /// Learns from an iteration. The first iteration of a program is left out: it is slower,
    /// because it touches its memory for the first time. Otherwise returns for each direction the
    /// time of its copies, and the predicted one.
    pub fn learn(&mut self, measured: &Measured) -> Option<[(u128, u128); 2]> {
        if std::mem::take(&mut self.fresh) {
            return None;
        }
        let times = |items: &[(Nanos, Nanos)]| {
            items.iter().map(|(start, end)| (*end - *start).0).collect::<Vec<u64>>()
        };
        let (steps, copies) = measured.items.split_at(self.steps.len().min(measured.items.len()));
        for (operator, time) in self.steps.iter().zip(times(steps)) {
            if let Some(operator) = *operator {
                self.operators[operator] = mean(self.operators[operator], time).clamp(1, LONGEST.0);
            }
        }
        let mut sums = [(0u128, 0u128); 2];
        for ((direction, nominal), time) in self.copies.iter().zip(times(copies)) {
            let sum = &mut sums[usize::from(*direction == Direction::D2h)];
            *sum = (sum.0 + u128::from(time), sum.1 + u128::from(*nominal));
        }
        for (slow, (time, nominal)) in self.slow.iter_mut().zip(sums) {
            if let Some(now) = (time * 1000).checked_div(nominal) {
                *slow =
                    mean(*slow, u64::try_from(now).unwrap_or(u64::MAX).clamp(1, 1_000_000)).max(1);
            }
        }
        Some(sums)
    }

    /// The drift since the last planning.
    #[must_use]
    pub fn drift(&self) -> Drift {
        let share = |now: u64, then: u64| {
            u64::try_from(u128::from(now) * 1000 / u128::from(then.max(1))).unwrap_or(u64::MAX)
        };
        Drift {
            operators_per_mille: share(self.operators.iter().sum(), self.planned),
            h2d_per_mille: share(self.slow[0], self.slow_then[0]),
            d2h_per_mille: share(self.slow[1], self.slow_then[1]),
        }
    }

    /// The job is planned now: later drift is relative to these means.
    pub fn planning(&mut self) {
        self.planned = self.operators.iter().sum();
        self.slow_then = self.slow;
    }

    /// The plan that was made at the last planning is used from now on. The measured slowdown of
    /// the link is kept, now relative to that plan's link.
    pub fn adopted(&mut self) {
        for (slow, then) in self.slow.iter_mut().zip(&mut self.slow_then) {
            *slow = (*slow * 1000 / (*then).max(1)).max(1);
            *then = 1000;
        }
    }

    /// The mean latencies of the operators.
    #[must_use]
    pub fn latencies(&self) -> Vec<Latency> {
        let latency = |&ns: &u64| Latency { time: Nanos(ns), source: Source::Measured };
        self.operators.iter().map(latency).collect()
    }

    /// The link as measured, if its copies were compared with `link`.
    #[must_use]
    pub fn link(&self, link: &Link) -> Link {
        slowed(link, self.slow)
    }
}

/// The mean with weight 0.9 for the new value and 0.1 for the old one.
fn mean(old: u64, new: u64) -> u64 {
    u64::try_from((u128::from(new) * 9 + u128::from(old)) / 10).unwrap_or(u64::MAX)
}

/// The link on which copies take `slow` thousandths of their time.
#[must_use]
pub fn slowed(link: &Link, slow: [u64; 2]) -> Link {
    link.with(slow.map(|slow| {
        move |rate| {
            u64::try_from(u128::from(rate) * 1000 / u128::from(slow.max(1)))
                .unwrap_or(1 << 60)
                .clamp(1, 1 << 60)
        }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_follow_the_newest_and_links_slow_down() {
        assert_eq!(mean(100, 200), 190);
        assert_eq!(mean(u64::MAX, u64::MAX), u64::MAX);
        let link =
            Link { h2d: 1000, d2h: 500, h2d_contended: 600, d2h_contended: 300, overhead_ns: 7 };
        let slow = slowed(&link, [2000, 500]);
        assert_eq!(
            slow,
            Link { h2d: 500, d2h: 1000, h2d_contended: 300, d2h_contended: 600, overhead_ns: 7 }
        );
        assert_eq!(slowed(&link, [u64::MAX, 0]).h2d, 1, "never nothing");
    }
}
