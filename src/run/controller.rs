//! Plans a job again while it runs, when measured latencies drift from those of the plan.
//!
//! After each iteration, a mean latency of each operator and a mean slowdown of each direction of
//! the link are updated with the measured values (exponentially, the newest with weight 0.9). When
//! the sum of the operators' latencies, or of a direction's copies, has changed by more than the
//! threshold since the last planning, a thread plans the job again. It uses the mean latencies and
//! the link as measured. A new plan is used from the end of the iteration in which it is ready, if
//! it passes the checker and is predicted to gain enough. Weight and threshold are those of
//! TENSILE's published code. The caller supplies the function that makes plans.

use std::thread::{Scope, ScopedJoinHandle};
use std::time::Instant;

use super::backend::Measured;
use crate::contract::{JobPlan, Plan, check};
use crate::device::latency::LONGEST;
use crate::device::{Latency, Link, Profile, Source};
use crate::job::Graph;
use crate::sim::engine;
use crate::sim::program::{Direction, Program};
use crate::units::Nanos;

/// Makes a plan for a device and the latencies of its operators, or says why there is none.
pub type Planner<'a> = dyn Fn(&Profile, &[Latency]) -> Result<Plan, String> + Sync + 'a;

/// By how much the sum of latencies must change before the job is planned again, in thousandths.
pub const THRESHOLD: u64 = 300;

/// The predicted gain, in thousandths of an iteration, below which a new plan is not used: smaller
/// gains are noise.
const WORTH: u64 = 20;

/// When and how to plan again.
#[derive(Clone, Copy)]
pub struct Replan<'a> {
    /// Makes the new plan.
    pub planner: &'a Planner<'a>,
    /// The threshold, in thousandths of the sum at the last planning.
    pub threshold_per_mille: u64,
}

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

/// One time that the job was planned again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// The iteration after which the drift was seen.
    pub seen: u32,
    /// The drift.
    pub drift: Drift,
    /// The first iteration under the new plan; `None` when it was not applied.
    pub applied: Option<u32>,
    /// Why it was not applied.
    pub kept_because: Option<String>,
    /// Predicted time of an iteration under the old plan with the new latencies.
    pub predicted_before: Option<Nanos>,
    /// Predicted time of an iteration under the new plan.
    pub predicted_after: Option<Nanos>,
    /// Median of the last three iterations before the drift.
    pub measured_undisturbed: Option<Nanos>,
    /// Median of the iterations under the old plan since the drift.
    pub measured_before: Option<Nanos>,
    /// Median of the first three iterations under the new plan.
    pub measured_after: Option<Nanos>,
    /// How long planning took, in the background.
    pub planning: Nanos,
}

/// A new plan that may be used.
struct Proposal {
    plan: Plan,
    before: Nanos,
    after: Nanos,
}

type Answer = (Result<Proposal, String>, Nanos);

/// Observes a run and plans again when necessary.
pub struct Controller<'scope, 'env> {
    scope: &'scope Scope<'scope, 'env>,
    graph: &'env Graph,
    replan: Replan<'env>,
    /// The plan in use, and the device as it was known when that plan was made.
    job: JobPlan,
    device: Profile,
    /// Mean latencies of operators in nanoseconds, and their sum when the job was last planned.
    means: Vec<u64>,
    planned: u64,
    /// The time of copies in each direction, in thousandths of the time by the plan's link, and the
    /// same at the last planning.
    slow: [u64; 2],
    slow_then: [u64; 2],
    /// For each copy of the program, the time that the engine predicts.
    steps: Vec<Option<usize>>,
    copies: Vec<(Direction, u64)>,
    /// Whether no iteration of this plan has ended yet.
    fresh: bool,
    pending: Option<ScopedJoinHandle<'scope, Answer>>,
    next: Option<Plan>,
    changes: Vec<Change>,
}

impl<'scope, 'env> Controller<'scope, 'env> {
    /// A controller for a run that starts with `job` on `device`.
    #[must_use]
    pub fn new(
        scope: &'scope Scope<'scope, 'env>,
        graph: &'env Graph,
        device: &Profile,
        job: &JobPlan,
        replan: &Replan<'env>,
    ) -> Self {
        let means: Vec<u64> = job.latencies.iter().map(|l| l.time.0).collect();
        Self {
            scope,
            graph,
            replan: *replan,
            job: job.clone(),
            device: device.clone(),
            planned: means.iter().sum(),
            means,
            slow: [1000; 2],
            slow_then: [1000; 2],
            steps: Vec::new(),
            copies: Vec::new(),
            fresh: true,
            pending: None,
            next: None,
            changes: Vec::new(),
        }
    }

    /// From now on `program` runs, which was planned for `link`.
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

    /// Records an iteration. Returns true when a new plan is ready to be used.
    pub fn boundary(&mut self, iteration: u32, measured: &Measured) -> bool {
        // The first iteration of a plan is slower, because it touches its memory for the first
        // time.
        if !std::mem::take(&mut self.fresh) {
            self.learn(measured);
        }
        let Some(pending) = self.pending.take() else {
            let drift = self.drift();
            let moved = |now: u64| now.abs_diff(1000) > self.replan.threshold_per_mille;
            if [drift.operators_per_mille, drift.h2d_per_mille, drift.d2h_per_mille]
                .into_iter()
                .any(moved)
            {
                self.plan_anew(iteration, drift);
            }
            return false;
        };
        if !pending.is_finished() {
            self.pending = Some(pending);
            return false;
        }
        let (answer, planning) = pending
            .join()
            .unwrap_or_else(|_| (Err("the planner panicked".to_owned()), Nanos::ZERO));
        let Some(change) = self.changes.last_mut() else { return false };
        change.planning = planning;
        match answer {
            Err(why) => change.kept_because = Some(why),
            Ok(proposal) => {
                (change.predicted_before, change.predicted_after) =
                    (Some(proposal.before), Some(proposal.after));
                if proposal.after.0 <= proposal.before.0 - proposal.before.0 / 1000 * WORTH {
                    change.applied = Some(iteration + 1);
                    self.next = Some(proposal.plan);
                    return true;
                }
                change.kept_because =
                    Some(format!("the new plan would gain less than {} %", WORTH / 10));
            }
        }
        false
    }

    /// Returns the new plan, which is then the plan in use.
    pub fn take(&mut self) -> Option<Plan> {
        let plan = self.next.take()?;
        self.job = plan.jobs.first()?.clone();
        // The measured slowdown of the link is kept, now relative to the new plan's link.
        for (slow, then) in self.slow.iter_mut().zip(&mut self.slow_then) {
            *slow = (*slow * 1000 / (*then).max(1)).max(1);
            *then = 1000;
        }
        self.device = plan.device.clone();
        Some(plan)
    }

    /// What was planned again, with the measured times from `iterations`.
    #[must_use]
    pub fn changes(mut self, iterations: &[Nanos]) -> Vec<Change> {
        let middle = |from: u32, to: u32| {
            let at = |i: u32| (i as usize).min(iterations.len());
            let mut all = iterations[at(from)..at(to.max(from))].to_vec();
            all.sort_unstable();
            all.get(all.len() / 2).copied()
        };
        let last = u32::try_from(iterations.len()).unwrap_or(u32::MAX);
        for change in &mut self.changes {
            change.measured_undisturbed = middle(change.seen.saturating_sub(3), change.seen);
            change.measured_before = middle(change.seen, change.applied.unwrap_or(last));
            change.measured_after =
                change.applied.and_then(|from| middle(from, from.saturating_add(3)));
            if change.applied.is_none() && change.kept_because.is_none() {
                change.kept_because = Some("the run ended before it was ready".to_owned());
            }
            if change.applied.is_some_and(|from| from >= last) {
                change.applied = None;
                change.kept_because = Some("the run ended as it was ready".to_owned());
            }
        }
        self.changes
    }

    fn learn(&mut self, measured: &Measured) {
        let times = |items: &[(Nanos, Nanos)]| {
            items.iter().map(|(start, end)| (*end - *start).0).collect::<Vec<u64>>()
        };
        let (steps, copies) = measured.items.split_at(self.steps.len().min(measured.items.len()));
        for (operator, time) in self.steps.iter().zip(times(steps)) {
            if let Some(operator) = *operator {
                self.means[operator] = mean(self.means[operator], time).clamp(1, LONGEST.0);
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
    }

    fn drift(&self) -> Drift {
        let share = |now: u64, then: u64| {
            u64::try_from(u128::from(now) * 1000 / u128::from(then.max(1))).unwrap_or(u64::MAX)
        };
        Drift {
            operators_per_mille: share(self.means.iter().sum(), self.planned),
            h2d_per_mille: share(self.slow[0], self.slow_then[0]),
            d2h_per_mille: share(self.slow[1], self.slow_then[1]),
        }
    }

    fn plan_anew(&mut self, iteration: u32, drift: Drift) {
        self.changes.push(Change {
            seen: iteration,
            drift,
            applied: None,
            kept_because: None,
            predicted_before: None,
            predicted_after: None,
            measured_undisturbed: None,
            measured_before: None,
            measured_after: None,
            planning: Nanos::ZERO,
        });
        self.planned = self.means.iter().sum();
        self.slow_then = self.slow;
        let latencies: Vec<Latency> = self
            .means
            .iter()
            .map(|&ns| Latency { time: Nanos(ns), source: Source::Measured })
            .collect();
        let device = Profile { link: slowed(&self.device.link, self.slow), ..self.device.clone() };
        let (graph, planner, job) = (self.graph, self.replan.planner, self.job.clone());
        self.pending = Some(self.scope.spawn(move || {
            let began = Instant::now();
            let answer = propose(graph, job, &device, &latencies, planner);
            (answer, Nanos(u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX)))
        }));
    }
}

/// The mean with weight 0.9 for the new value and 0.1 for the old one.
fn mean(old: u64, new: u64) -> u64 {
    u64::try_from((u128::from(new) * 9 + u128::from(old)) / 10).unwrap_or(u64::MAX)
}

/// The link on which copies take `slow` thousandths of their time.
fn slowed(link: &Link, slow: [u64; 2]) -> Link {
    let rate = |rate: u64, slow: u64| {
        u64::try_from(u128::from(rate) * 1000 / u128::from(slow.max(1)))
            .unwrap_or(1 << 60)
            .clamp(1, 1 << 60)
    };
    Link {
        h2d: rate(link.h2d, slow[0]),
        d2h: rate(link.d2h, slow[1]),
        h2d_contended: rate(link.h2d_contended, slow[0]),
        d2h_contended: rate(link.d2h_contended, slow[1]),
        overhead_ns: link.overhead_ns,
    }
}

fn propose(
    graph: &Graph,
    mut job: JobPlan,
    device: &Profile,
    latencies: &[Latency],
    planner: &Planner<'_>,
) -> Result<Proposal, String> {
    job.latencies = latencies.to_vec();
    let program = Program::placed(graph, &job).map_err(|e| e.to_string())?;
    let before = engine::nominal(&program, &device.link).map_err(|e| e.to_string())?;
    let plan = planner(device, latencies)?;
    check::check(&plan, std::slice::from_ref(graph)).map_err(|refusals| {
        format!(
            "the new plan is refused: {}",
            refusals.first().map(ToString::to_string).unwrap_or_default()
        )
    })?;
    Ok(Proposal { before: before.iteration, after: plan.figures.iteration_ns, plan })
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
