//! Plans for noisy latencies: the best plan is the one with the lowest 95th percentile of the
//! iteration's time.
//!
//! A planner knows only one set of latencies. So it plans several times for a link that is slower
//! than the real one by multiples of the noise ([`SLOWER`]). Only the ratio of copies to operators
//! matters, so operators stay as they are. Copies that are in time on a slower link have slack on
//! the real one; the price may be other waits or recomputes. Each plan is put back on the real link
//! and simulated [`RUNS`] times under noise from [`SEED`]. The plan with the lowest 95th percentile
//! wins. Ties go to the shorter time without noise, then to the link nearest to the real one. All
//! plans get the same noise, so differences come from the plans. The real link is one of the
//! candidates, so by this measure the result is never worse than the plan without noise. A plan
//! fits at any timing, so a noisy run neither exceeds the budget nor changes a result.
//!
//! This works with every planner and is deterministic. Cost: a planning and [`RUNS`] simulated
//! iterations for each distinct candidate.

use super::budget::{self, PlanError, Planned, Request, first_load};
use crate::device::{Link, Profile};
use crate::sim::engine::{self, Durations};
use crate::sim::noise::{Noise, WHOLE, percentile};
use crate::sim::reserved::{self, Framework};
use crate::units::Nanos;

/// How much slower the link is assumed to be, in halves of the noise.
pub const SLOWER: [u64; 5] = [0, 1, 2, 4, 6];

/// The number of noisy iterations by which a plan is judged.
pub const RUNS: u64 = 100;

/// The seed of their noise. It differs from `neap simulate`'s default, so that a plan is not judged
/// by the runs for which it was chosen.
pub const SEED: u64 = 95;

/// A plan and its time under noise.
#[derive(Clone, Debug)]
pub struct Robust {
    /// The plan, with the figures of its noiseless run on the real link.
    pub planned: Planned,
    /// The 95th percentile of its iteration's time over [`RUNS`] runs from [`SEED`].
    pub p95: Nanos,
    /// The same for the plan made without noise; `None` if that plan does not meet the budget.
    pub before: Option<Nanos>,
}

/// Makes the plan within the budget with the lowest 95th percentile of noisy iterations. `share` is
/// the largest deviation, as in [`Noise`].
///
/// # Errors
/// As [`budget::make_for`], when no candidate meets the budget.
pub fn make_for(
    request: &Request<'_>,
    share: u64,
    framework: Option<&Framework>,
) -> Result<Robust, PlanError> {
    choose(request, None, share, framework)
}

/// As [`make_for`], at the lowest budget that is found without noise.
///
/// # Errors
/// As [`budget::minimum_for`].
pub fn minimum_for(
    request: &Request<'_>,
    share: u64,
    framework: Option<&Framework>,
) -> Result<Robust, PlanError> {
    let lowest = budget::minimum_for(request, framework)?;
    choose(
        &Request { budget: lowest.plan.budget, ..request.clone() },
        Some(lowest),
        share,
        framework,
    )
}

fn choose(
    request: &Request<'_>,
    mut first: Option<Planned>,
    share: u64,
    framework: Option<&Framework>,
) -> Result<Robust, PlanError> {
    let link = &request.device.link;
    let noise = Noise { share, seed: SEED };
    let mut seen: Vec<Planned> = Vec::new();
    let mut best: Option<Robust> = None;
    let mut before = None;
    let mut refused = None;
    for halves in SLOWER {
        let planned = match first.take() {
            Some(planned) => planned,
            None => {
                let device =
                    Profile { link: slower(link, share * halves / 2), ..request.device.clone() };
                match budget::within(&Request { device: &device, ..request.clone() }, framework) {
                    Ok(planned) => on_the_real_link(planned, request, framework)?,
                    Err(no @ PlanError::Infeasible(_)) => {
                        refused.get_or_insert(no);
                        continue;
                    }
                    Err(defect) => return Err(defect),
                }
            }
        };
        // The bytes that a framework's allocator reserves depend on the order of requests, which
        // the link changes.
        let fits = planned.bound() <= request.budget
            && planned.reserved.as_ref().is_none_or(|r| r.stats.ooms == 0);
        if !fits || seen.iter().any(|other| other.plan.jobs == planned.plan.jobs) {
            continue;
        }
        let p95 = p95(&planned, link, noise)?;
        if halves == 0 {
            before = Some(p95);
        }
        if best
            .as_ref()
            .is_none_or(|b| (p95, planned.run.iteration) < (b.p95, b.planned.run.iteration))
        {
            best = Some(Robust { planned: planned.clone(), p95, before: None });
        }
        seen.push(planned);
    }
    match (best, refused) {
        (Some(best), _) => Ok(Robust { before, ..best }),
        (None, Some(refused)) => Err(refused),
        (None, None) => Err(PlanError::Defect("no candidate stayed within the budget".to_owned())),
    }
}

/// A link on which every copy takes longer by `by`, in thousandths of a percent.
fn slower(link: &Link, by: u64) -> Link {
    let slowed = |rate: u64| {
        u64::try_from(u128::from(rate) * u128::from(WHOLE) / u128::from(WHOLE + by))
            .unwrap_or(rate)
            .max(1)
    };
    let overhead = u128::from(link.overhead_ns) * u128::from(WHOLE + by) / u128::from(WHOLE);
    let overhead_ns = u64::try_from(overhead).unwrap_or(link.overhead_ns);
    Link { overhead_ns, ..link.with([slowed; 2]) }
}

/// The same events and addresses, with the figures of the real device.
fn on_the_real_link(
    mut planned: Planned,
    request: &Request<'_>,
    framework: Option<&Framework>,
) -> Result<Planned, PlanError> {
    let Planned { plan, program, .. } = &mut planned;
    let run = budget::nominal(program, &request.device.link)?;
    plan.device = request.device.clone();
    plan.figures.peak_bytes = engine::peak(&engine::memory(program, &run));
    plan.figures.iteration_ns = run.iteration;
    plan.figures.first_iteration_ns =
        first_load(request.graph, program, request.device) + run.iteration;
    planned.reserved =
        framework.map(|f| reserved::planned(request.graph, program, &run, f).settle(f));
    planned.run = run;
    Ok(planned)
}

fn p95(planned: &Planned, link: &Link, noise: Noise) -> Result<Nanos, PlanError> {
    let durations = Durations::nominal(&planned.program, link);
    let mut times = (0..RUNS)
        .map(|run| {
            engine::run(&planned.program, link, &noise.apply(&durations, run)).map(|r| r.iteration)
        })
        .collect::<Result<Vec<Nanos>, _>>()
        .map_err(|e| PlanError::Defect(e.to_string()))?;
    times.sort_unstable();
    Ok(percentile(&times, 95))
}
