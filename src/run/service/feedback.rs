//! What running jobs tell about the device, and when that asks for new plans.
//!
//! Each job has its [`Means`]. Its copies are compared with the device's link as the profile has
//! it, so that slowdowns of different jobs and plans can be compared. The link's slowdown is that
//! of the least slowed job: what jobs lose to each other's copies is left to the planner, which
//! simulates them side by side.

use super::worker::Work;
use crate::backend::Measured;
use crate::contract::{JobPlan, Latency};
use crate::device::{Link, Profile};
use crate::drift::{Means, exceeds, slowed};
use crate::sim::engine;
use crate::sim::program::Program;
use crate::units::Nanos;

/// A job to be planned again, with its latencies as measured.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The job.
    pub work: &'a Work,
    /// The mean latency of each operator.
    pub latencies: &'a [Latency],
}

/// The means of all jobs that have come, by job number.
pub(super) struct Feedback {
    jobs: Vec<Means>,
    link: Link,
    /// The link's slowdown in each direction at the last planning, in thousandths.
    slow_then: [u64; 2],
    /// By how much a sum must change, in thousandths.
    threshold: u64,
}

impl Feedback {
    pub(super) fn new(device: &Profile, threshold: u64) -> Self {
        Self { jobs: Vec::new(), link: device.link, slow_then: [1000; 2], threshold }
    }

    /// A job gets its number.
    pub(super) fn came(&mut self, plan: &JobPlan) {
        self.jobs.push(Means::new(&plan.latencies));
    }

    /// From now on job `id` runs this plan.
    pub(super) fn follow(&mut self, id: usize, work: &Work, plan: &JobPlan) {
        if let Ok(program) = Program::placed(&work.graph, plan) {
            self.jobs[id].follow(&program, &self.link);
        }
    }

    /// Learns from an iteration of job `id`. Returns what has drifted by more than the threshold,
    /// among the jobs that are `present`.
    pub(super) fn learn(
        &mut self,
        id: usize,
        measured: &Measured,
        present: impl Fn(usize) -> bool,
    ) -> Option<String> {
        self.jobs[id].learn(measured);
        let of_planned = |what: &str, per_mille: u64| {
            exceeds(per_mille, self.threshold)
                .then(|| format!("{what} {} % of their planned time", per_mille / 10))
        };
        let slow = self.slow(present);
        let link = |way: usize| slow[way] * 1000 / self.slow_then[way].max(1);
        let drifted: Vec<String> = [
            of_planned("operators take", self.jobs[id].drift().operators_per_mille),
            of_planned("copies to the device take", link(0)),
            of_planned("copies from the device take", link(1)),
        ]
        .into_iter()
        .flatten()
        .collect();
        (!drifted.is_empty()).then(|| drifted.join(", "))
    }

    /// The slowdown of the link in each direction: the least among the present jobs that copy, or
    /// the last known.
    fn slow(&self, present: impl Fn(usize) -> bool) -> [u64; 2] {
        let least = |way: usize| {
            let jobs = self.jobs.iter().enumerate().filter(|(id, _)| present(*id));
            let slow = jobs.map(|(_, job)| job.slowdown()[way]).filter(|(_, copied)| *copied > 0);
            slow.map(|(slow, _)| slow).min().unwrap_or(self.slow_then[way])
        };
        [least(0), least(1)]
    }

    /// All jobs are planned now. Returns the link as measured.
    pub(super) fn planning(&mut self, present: impl Fn(usize) -> bool) -> Link {
        self.slow_then = self.slow(present);
        self.jobs.iter_mut().for_each(Means::planning);
        slowed(&self.link, self.slow_then)
    }

    /// The mean latencies of job `id`.
    pub(super) fn latencies(&self, id: usize) -> Vec<Latency> {
        self.jobs[id].latencies()
    }
}

/// The predicted time of an iteration of each job by itself, added up: under these plans, with
/// these latencies and this link.
pub(super) fn predicted(
    jobs: &[Request<'_>],
    plans: &[JobPlan],
    link: &Link,
) -> Result<Nanos, String> {
    let mut sum = Nanos::ZERO;
    for (job, plan) in jobs.iter().zip(plans) {
        let plan = JobPlan { latencies: job.latencies.to_vec(), ..plan.clone() };
        let program = Program::placed(&job.work.graph, &plan).map_err(|e| e.to_string())?;
        sum += engine::nominal(&program, link).map_err(|e| e.to_string())?.iteration;
    }
    Ok(sum)
}
