//! What running jobs tell about the device, and when that asks for new plans.
//!
//! Each job has its [`Means`]. All jobs use one link, so its slowdown is one mean of all their
//! copies, each compared with its time on the device's link as the profile has it. A job that has
//! not run yet has the latencies that are known for the load that the others put on the device.

use super::worker::Work;
use crate::backend::Measured;
use crate::contract::{JobPlan, Latency};
use crate::device::{Link, Profile, roofline};
use crate::drift::{Means, exceeds, slowed};
use crate::sim::program::Program;

/// The means of all jobs that have come, by job number.
pub(super) struct Feedback {
    /// With whether the job's operators were measured.
    jobs: Vec<(Means, bool)>,
    link: Link,
    /// In each direction the time that copies took and the time by the profile's link, as [`newer`]
    /// adds them up.
    copied: [(u128, u128); 2],
    /// The link's slowdown in each direction at the last planning, in thousandths.
    slow_then: [u64; 2],
    /// By how much a sum must change, in thousandths.
    threshold: u64,
}

impl Feedback {
    pub(super) fn new(device: &Profile, threshold: u64) -> Self {
        let (link, copied, slow_then) = (device.link, [(0, 0); 2], [1000; 2]);
        Self { jobs: Vec::new(), link, copied, slow_then, threshold }
    }

    /// Adds a job. Jobs are numbered from 0 in the order in which they are added.
    pub(super) fn came(&mut self, plan: &JobPlan) {
        self.jobs.push((Means::new(&plan.latencies), false));
    }

    /// From now on job `id` runs this plan.
    pub(super) fn follow(&mut self, id: usize, work: &Work, plan: &JobPlan) {
        if let Ok(program) = Program::placed(&work.graph, plan) {
            self.jobs[id].0.follow(&program, &self.link);
        }
    }

    /// Learns from an iteration of job `id`. Returns what has drifted by more than the threshold.
    pub(super) fn learn(&mut self, id: usize, measured: &Measured) -> Option<String> {
        let (means, ran) = &mut self.jobs[id];
        if let Some(copied) = means.learn(measured) {
            *ran = true;
            for (sum, (time, nominal)) in self.copied.iter_mut().zip(copied) {
                if nominal > 0 {
                    *sum = newer(*sum, (time, nominal));
                }
            }
        }
        let slow = self.slow();
        let link = |way: usize| slow[way] * 1000 / self.slow_then[way].max(1);
        let all = [
            ("operators take", self.jobs[id].0.drift().operators_per_mille),
            ("copies to the device take", link(0)),
            ("copies from the device take", link(1)),
        ];
        let drifted = all.iter().filter(|(_, per_mille)| exceeds(*per_mille, self.threshold));
        let drifted: Vec<String> = drifted
            .map(|(what, per_mille)| format!("{what} {} % of their planned time", per_mille / 10))
            .collect();
        (!drifted.is_empty()).then(|| drifted.join(", "))
    }

    /// The slowdown of the link in each direction.
    fn slow(&self) -> [u64; 2] {
        self.copied.map(|(time, nominal)| match (time * 1000).checked_div(nominal) {
            Some(slow) => u64::try_from(slow).unwrap_or(u64::MAX).clamp(1, 1_000_000),
            None => 1000,
        })
    }

    /// All jobs are planned now. Returns the link as measured.
    pub(super) fn planning(&mut self) -> Link {
        self.slow_then = self.slow();
        self.jobs.iter_mut().for_each(|(means, _)| means.planning());
        slowed(&self.link, self.slow_then)
    }

    /// Whether the operators of job `id` were measured.
    pub(super) fn ran(&self, id: usize) -> bool {
        self.jobs[id].1
    }

    /// The latencies of the present `jobs`: the means of those that have run; of others those under
    /// the load of all jobs beside them, none where one runs at a time.
    pub(super) fn latencies(
        &self,
        jobs: &[(usize, &Work)],
        device: &Profile,
        in_turn: bool,
    ) -> Vec<Vec<Latency>> {
        let known: Vec<Vec<Latency>> =
            jobs.iter().map(|&(id, _)| self.jobs[id].0.latencies()).collect();
        let used = jobs.iter().zip(&known).map(|((_, work), latencies)| {
            roofline::utilisation(&work.graph.operators, latencies, device)
        });
        let used: Vec<u32> = used.collect();
        let all: u32 = used.iter().sum();
        let under_load = |((&(id, work), latencies), used): ((&(usize, &Work), _), &u32)| {
            let load = if in_turn { 0 } else { (all - used) / 100 };
            let at_load = work.at_loads.get(load.min(10) as usize);
            at_load.filter(|_| !self.jobs[id].1).cloned().unwrap_or(latencies)
        };
        jobs.iter().zip(known).zip(&used).map(under_load).collect()
    }
}

/// Sums of the time that copies took and of the time by the profile's link, with those of one more
/// iteration. If that one copies as much as the sums are of, it displaces nine tenths of them; if
/// it copies little, it displaces little, since the sums may be of other jobs' large copies.
fn newer(sum: (u128, u128), (time, nominal): (u128, u128)) -> (u128, u128) {
    let kept = |part: u128| {
        part.saturating_mul(sum.1).checked_div(sum.1.saturating_add(nominal.saturating_mul(9)))
    };
    (kept(sum.0).unwrap_or(0) + time, kept(sum.1).unwrap_or(0) + nominal)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiny_copies_do_not_swing_the_mean_of_large_ones() {
        let mut sum = (0, 0);
        for _ in 0..100 {
            sum = newer(sum, (2_000_000, 1_000_000));
            // One that was preempted.
            sum = newer(sum, (40_000, 100));
            let slow = sum.0 * 1000 / sum.1;
            assert!((2000..2100).contains(&slow), "{slow}");
        }
    }

    #[test]
    fn the_newest_of_equal_copies_counts_most() {
        let mut sum = (0, 0);
        for _ in 0..20 {
            sum = newer(sum, (1000, 1000));
        }
        let (time, nominal) = newer(sum, (2000, 1000));
        assert!((1850..1950).contains(&(time * 1000 / nominal)), "{time} of {nominal}");
        assert_eq!(newer((0, 0), (30, 10)), (30, 10));
    }
}
