//! Plans a job again while it runs, when measured latencies drift from those of the plan.
//!
//! [`Means`] learns from each iteration. When the sum of the operators' latencies, or of a
//! direction's copies, has changed by more than the threshold since the last planning, a thread
//! plans the job again. It uses the mean latencies and the link as measured. A new plan is used
//! from the end of the iteration in which it is ready, if it passes the checker and is predicted to
//! gain enough. The caller supplies the function that makes plans.

use std::thread::{Scope, ScopedJoinHandle};
use std::time::Instant;

use super::backend::Measured;
use super::drift::{Drift, Means};
use crate::contract::{JobPlan, Plan, check};
use crate::device::{Latency, Link, Profile};
use crate::job::Graph;
use crate::sim::engine;
use crate::sim::program::Program;
use crate::units::Nanos;

/// Makes a plan for a device and the latencies of its operators, or says why there is none.
pub type Planner<'a> = dyn Fn(&Profile, &[Latency]) -> Result<Plan, String> + Sync + 'a;

/// The predicted gain, in thousandths of an iteration, below which a new plan is not used: smaller
/// gains are noise.
pub(super) const WORTH: u64 = 20;

/// When and how to plan again.
#[derive(Clone, Copy)]
pub struct Replan<'a> {
    /// Makes the new plan.
    pub planner: &'a Planner<'a>,
    /// The threshold, in thousandths of the sum at the last planning.
    pub threshold_per_mille: u64,
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
    means: Means,
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
        Self {
            scope,
            graph,
            replan: *replan,
            job: job.clone(),
            device: device.clone(),
            means: Means::new(&job.latencies),
            pending: None,
            next: None,
            changes: Vec::new(),
        }
    }

    /// From now on `program` runs, which was planned for `link`.
    pub fn follow(&mut self, program: &Program, link: &Link) {
        self.means.follow(program, link);
    }

    /// Records an iteration. Returns true when a new plan is ready to be used.
    pub fn boundary(&mut self, iteration: u32, measured: &Measured) -> bool {
        let _ = self.means.learn(measured);
        let Some(pending) = self.pending.take() else {
            let drift = self.means.drift();
            if drift.exceeds(self.replan.threshold_per_mille) {
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
        self.means.adopted();
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
        self.means.planning();
        let latencies = self.means.latencies();
        let device = Profile { link: self.means.link(&self.device.link), ..self.device.clone() };
        let (graph, planner, job) = (self.graph, self.replan.planner, self.job.clone());
        self.pending = Some(self.scope.spawn(move || {
            let began = Instant::now();
            let answer = propose(graph, job, &device, &latencies, planner);
            (answer, Nanos(u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX)))
        }));
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
