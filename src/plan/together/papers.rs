//! Several jobs by the planners of papers, as those plan them.
//!
//! - TENSILE plans all jobs in one search (`tensile::together`).
//! - Capuchin and vDNN are planners of one job that know nothing of others. So Capuchin's jobs get
//!   parts of the budget in proportion to their unplanned peaks, and each is planned within its
//!   part. vDNN's policies know no budget: each job's plan is what the policy gives, and all plans
//!   together fit or don't.
//!
//! Each job has its part of the host memory. The papers have no priorities: among jobs that are
//! otherwise alike, the one of higher priority gets the quicker plan.

use std::sync::Arc;

use super::{Infeasible, Job, Jobs, Memo, PlanError, Together, by_peak, shares, ways};
use crate::budget;
use crate::device::Profile;
use crate::method::Method;
use crate::planner::Given;
use crate::tensile;
use crate::units::{Bytes, scaled};

/// How often TENSILE's target is lowered because the arenas are larger than it.
const TIGHTENINGS: usize = 12;

/// Whether a planner is a static policy, which swaps even where everything fits.
#[must_use]
pub fn is_static(method: &Method) -> bool {
    matches!(method, Method::VdnnAll(_) | Method::VdnnConv(_))
}

/// The plan of all jobs within the budget; `None` where the planners are others.
pub(super) fn make(jobs: &Jobs<'_>, memo: &Memo) -> Option<Result<Together, PlanError>> {
    let all = |is: fn(&Method) -> bool| jobs.jobs.iter().all(|job| is(&job.method));
    if all(is_static) {
        return Some(each(jobs, memo, &vec![jobs.budget; jobs.jobs.len()]));
    }
    if jobs.jobs.len() > 1 && all(|method| matches!(method, Method::Capuchin(_))) {
        let even = by_peak(jobs, jobs.budget, memo);
        return Some(each(jobs, memo, &even));
    }
    options(jobs).map(|options| tensile(jobs, memo, options))
}

/// TENSILE's plan of all jobs with the smallest arena that its search reaches; `None` where the
/// planners are others.
pub(super) fn least(jobs: &Jobs<'_>, memo: &Memo) -> Option<Result<Together, PlanError>> {
    let options = options(jobs)?;
    Some(attempt(jobs, &shares(jobs, memo), &options, 0).map(|(_, made)| made))
}

/// TENSILE's switches for each of several jobs.
fn options(jobs: &Jobs<'_>) -> Option<Vec<tensile::Options>> {
    let several = jobs.jobs.len() > 1;
    let one = |job: &Job<'_>| match &job.method {
        Method::Tensile(options) if several => Some(options.clone()),
        _ => None,
    };
    jobs.jobs.iter().map(one).collect()
}

/// Each job by itself within its part.
fn each(jobs: &Jobs<'_>, memo: &Memo, within: &[Bytes]) -> Result<Together, PlanError> {
    let devices = shares(jobs, memo);
    let mut parts = Vec::with_capacity(within.len());
    for (index, (job, device)) in jobs.jobs.iter().zip(&devices).enumerate() {
        let request = jobs.request(job, device, within[index]);
        let unplanned = memo.unplanned(&request)?;
        // A policy that knows a budget leaves a job alone that fits.
        if !is_static(&job.method) && unplanned.plan.figures.arena_bytes <= within[index] {
            parts.push(unplanned);
            continue;
        }
        match memo.plan(&request)? {
            Ok(part) => parts.push(part),
            Err(mut no) => {
                // The budget of which its part would be enough.
                let whole = scaled(no.lowest.0, jobs.budget.0, within[index].0);
                no.lowest = Bytes(whole).max(no.lowest);
                no.blocked = format!("job {index} (`{}`): {}", job.graph.name, no.blocked);
                (no.budget, no.floor) = (jobs.budget, floor(jobs, memo));
                no.lowest = no.lowest.max(no.floor);
                return Err(PlanError::Infeasible(no));
            }
        }
    }
    let made = Together::new(jobs, ways::by_priority(jobs, parts));
    let arena = made.plan.figures.arena_bytes;
    if arena <= jobs.budget { Ok(made) } else { Err(refusal(jobs, memo, arena)) }
}

fn floor(jobs: &Jobs<'_>, memo: &Memo) -> Bytes {
    jobs.jobs.iter().map(|job| memo.known(job, jobs.device).floor).sum()
}

fn refusal(jobs: &Jobs<'_>, memo: &Memo, lowest: Bytes) -> PlanError {
    PlanError::Infeasible(Box::new(Infeasible {
        budget: jobs.budget,
        floor: floor(jobs, memo),
        lowest,
        blocked: format!("the jobs' plans take {lowest} together"),
    }))
}

/// TENSILE's plan of all jobs: the target is lowered until the arenas fit.
fn tensile(
    jobs: &Jobs<'_>,
    memo: &Memo,
    options: Vec<tensile::Options>,
) -> Result<Together, PlanError> {
    let devices = shares(jobs, memo);
    let budget = jobs.budget.0 / 512 * 512;
    // Plans without early and late copies are easier to place.
    let narrow = |of: &tensile::Options| tensile::Options { prefetch: false, ..of.clone() };
    let narrow: Vec<tensile::Options> = options.iter().map(narrow).collect();
    let mut lowest = Bytes(u64::MAX);
    for options in [&options, &narrow] {
        let mut target = budget;
        for time in 0..TIGHTENINGS {
            let (peak, made) = attempt(jobs, &devices, options, target)?;
            let arena = made.plan.figures.arena_bytes;
            if arena.0 <= budget {
                return Ok(made);
            }
            lowest = lowest.min(arena);
            let step = (arena.0 - budget) + ((budget / 1024) << time.min(6)).max(512);
            if peak.0 > target || step >= target {
                break;
            }
            target = (target - step) / 512 * 512;
        }
    }
    Err(refusal(jobs, memo, lowest))
}

/// One search for a sum of peaks, with that sum, placed.
fn attempt<'a>(
    jobs: &Jobs<'a>,
    devices: &'a [Profile],
    options: &[tensile::Options],
    target: u64,
) -> Result<(Bytes, Together), PlanError> {
    let given = |(job, device): (&Job<'a>, &'a Profile)| Given {
        graph: job.graph,
        latencies: job.latencies,
        link: &jobs.device.link,
        pinned: device.pinned_bytes,
        target,
    };
    let given: Vec<Given<'_>> = jobs.jobs.iter().zip(devices).map(given).collect();
    let mut peak = 0u64;
    let mut parts = Vec::with_capacity(given.len());
    let decided = tensile::together(&given, options, target);
    for ((job, device), decision) in jobs.jobs.iter().zip(devices).zip(decided) {
        peak = peak.saturating_add(decision.peak.1);
        let request = jobs.request(job, device, jobs.budget);
        parts.push(Arc::new(budget::written(&request, decision.emitted)?));
    }
    Ok((Bytes(peak), Together::new(jobs, ways::by_priority(jobs, parts))))
}
