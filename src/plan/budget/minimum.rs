//! The lowest plan, whatever it costs in time.

use super::{
    PlanError, Planned, Request, alone, finish, placed, proof, rungs, simulated, stand_in, within,
};
use crate::job::liveness::Liveness;
use crate::method::Method;
use crate::parallel::in_parallel;
use crate::planner::{Given, Memory};
use crate::sim::program::Program;
use crate::sim::reserved::Framework;
use crate::units::Bytes;

/// Targets between the unplanned peak and the floor at which the lowest plan is looked for, and how
/// often the steps around the best of them are halved.
const TARGETS: u64 = 16;
const CLOSER: u32 = 5;

/// Targets where the answer is no anyway.
const ROUGH: u64 = 4;

/// The plan with the smallest budget that is found.
///
/// # Errors
/// As [`super::make`], when nothing is found within the request's budget.
pub fn minimum(request: &Request<'_>) -> Result<Planned, PlanError> {
    minimum_for(request, None)
}

/// As [`minimum`]; with a framework the budget binds what its allocator would reserve, beside the
/// arena.
///
/// # Errors
/// As [`minimum`].
pub fn minimum_for(
    request: &Request<'_>,
    framework: Option<&Framework>,
) -> Result<Planned, PlanError> {
    let liveness = Liveness::new(request.graph);
    match anywhere(request, &liveness, framework)? {
        Some(mut planned) if planned.bound() <= request.budget => {
            planned.plan.budget = planned.bound();
            Ok(planned)
        }
        _ => within(request, framework),
    }
}

/// The plan with the smallest budget that is found, be it above the request's: no rung below it
/// can be met.
pub(super) fn anywhere(
    request: &Request<'_>,
    liveness: &Liveness,
    framework: Option<&Framework>,
) -> Result<Option<Planned>, PlanError> {
    let mut best = least(request, liveness, framework)?;
    let bound = best.as_ref().map_or(liveness.peak, Planned::bound);
    for budget in rungs::below(request, bound).take_while(|b| *b >= liveness.floor) {
        let found = feasible(within(&Request { budget, ..request.clone() }, framework))?;
        best = found.or(best);
    }
    Ok(best)
}

/// The lowest plan that is found between the unplanned peak and the floor.
fn least(
    request: &Request<'_>,
    liveness: &Liveness,
    framework: Option<&Framework>,
) -> Result<Option<Planned>, PlanError> {
    let Some(mut best) = lowest(request, liveness, framework)? else { return Ok(None) };
    // With all the effort lower budgets are met: in steps that double while they succeed.
    let (mut part, mut memory) = (64, Memory::Nothing);
    loop {
        let step = (best.bound().0 / part).max(512);
        let floor = liveness.floor.0.div_ceil(512) * 512;
        let budget = Bytes((best.bound().0.saturating_sub(step) / 512 * 512).max(floor));
        if budget >= best.bound() {
            break;
        }
        let probe = Request { budget, ..request.clone() };
        let made = feasible(alone(&probe, liveness, framework, None, &mut memory))?;
        match made {
            Some(planned) => (best, part) = (planned, (part / 2).max(8)),
            None if part >= 256 || step == 512 => break,
            None => part *= 4,
        }
    }
    // The same budget may be met by a quicker plan.
    let full = within(&Request { budget: best.bound(), ..request.clone() }, framework);
    if let Some(planned) = feasible(full)?
        && planned.run.iteration < best.run.iteration
    {
        best = planned;
    }
    Ok(Some(best))
}

/// A plan, or none where the answer is no.
fn feasible(made: Result<Planned, PlanError>) -> Result<Option<Planned>, PlanError> {
    match made {
        Ok(planned) => Ok(Some(planned)),
        Err(PlanError::Infeasible(_)) => Ok(None),
        Err(defect) => Err(defect),
    }
}

/// The lowest plan that is found with little effort, whatever the request's budget: what a planner
/// reaches does not fall steadily with its target, so targets all the way from the unplanned peak
/// to the floor are tried, then others around the best.
fn lowest(
    request: &Request<'_>,
    liveness: &Liveness,
    framework: Option<&Framework>,
) -> Result<Option<Planned>, PlanError> {
    let (floor, range) = (liveness.floor.0, liveness.peak.0 - liveness.floor.0);
    let mut best: Option<Planned> = None;
    let quick = request.method.quick();
    let narrow = quick.narrow();
    // No plan is below the floor, so one that reaches it ends the search.
    for method in [&quick].into_iter().chain(&narrow) {
        let found = reached(request, liveness, framework, method, floor, &mut Memory::Nothing)?;
        if found.as_ref().is_some_and(|planned| planned.bound() <= liveness.floor) {
            return Ok(found);
        }
    }
    for method in [quick].into_iter().chain(narrow).chain(request.method.portfolio()) {
        let own = method.name() == request.method.name();
        let (mut memory, mut tried) = (Memory::Nothing, Vec::new());
        // The last of the targets at which a plan lower than those before it was found.
        let mut at = |targets: &[u64], best: &mut Option<Planned>| {
            let bound =
                |best: &Option<Planned>| best.as_ref().map_or(Bytes(u64::MAX), Planned::bound);
            let look = |target: u64, memory: &mut Memory| {
                reached(request, liveness, framework, &method, target, memory)
            };
            let mut new = targets.to_vec();
            new.retain(|target| !tried.contains(&(target / 512)));
            tried.extend(new.iter().map(|target| target / 512));
            // The search of the planner itself goes on from target to target.
            let count = if own { 0 } else { new.len() };
            let mut ahead =
                in_parallel(count, |at| look(new[at], &mut Memory::Nothing)).into_iter();
            let mut last = None;
            for target in new {
                if own && bound(best) <= liveness.floor {
                    break;
                }
                let found = match ahead.next() {
                    Some(found) => found?,
                    None => look(target, &mut memory)?,
                };
                if let Some(mut planned) = found.filter(|p| p.bound() < bound(best)) {
                    stand_in(request, &mut planned, &method);
                    *best = Some(planned);
                    last = Some(target);
                }
            }
            Ok::<_, PlanError>(last)
        };
        // Another planner is asked on only where it gets lower with one of these.
        if !own && let Some(bound) = best.as_ref().map(|b| b.bound().0) {
            let asked = Request { method: method.clone(), ..request.clone() };
            if proof::floor(&asked, liveness).0 >= bound {
                continue;
            }
            let lower = at(&[bound - bound / 256], &mut best)?;
            if lower.is_none() && at(&[floor], &mut best)?.is_none() {
                continue;
            }
        }
        let all: Vec<u64> = (0..TARGETS).rev().map(|part| floor + range / TARGETS * part).collect();
        let mut around = at(&all, &mut best)?.unwrap_or(floor);
        let mut step = range / TARGETS;
        for _ in 0..CLOSER {
            step /= 2;
            let both = [around.saturating_sub(step).max(floor), around + step];
            around = at(&both, &mut best)?.unwrap_or(around);
        }
    }
    Ok(best)
}

/// The least bytes that the planner reaches with little effort at a few targets above a floor.
pub(super) fn roughly(
    request: &Request<'_>,
    liveness: &Liveness,
    framework: Option<&Framework>,
    floor: Bytes,
) -> Result<Option<Bytes>, PlanError> {
    let (quick, mut memory, mut least) = (request.method.quick(), Memory::Nothing, None);
    let range = liveness.peak.saturating_sub(floor).0;
    for part in 0..ROUGH {
        let target = floor.0 + range / ROUGH * part;
        let found = reached(request, liveness, framework, &quick, target, &mut memory)?;
        least = found.as_ref().map(Planned::bound).into_iter().chain(least).min();
    }
    Ok(least)
}

/// What a planner comes to at a target, be it above the target; `None` where a framework's
/// allocator refuses a request.
fn reached(
    request: &Request<'_>,
    liveness: &Liveness,
    framework: Option<&Framework>,
    method: &Method,
    target: u64,
    memory: &mut Memory,
) -> Result<Option<Planned>, PlanError> {
    let Request { graph, latencies, device, .. } = *request;
    let target = target / 512 * 512;
    let given = Given { graph, latencies, link: &device.link, pinned: device.pinned_bytes, target };
    let emitted = method.decide(&given, memory).emitted;
    let program = Program::new(graph, latencies, &emitted.events)
        .map_err(|e| PlanError::Defect(e.to_string()))?;
    let (program, placements, height) = placed(program, &emitted, target)?;
    let mut planned = finish(request, liveness, emitted, program, placements, height)?;
    planned.reserved = simulated(graph, &planned, framework);
    Ok(Some(planned).filter(|p| !p.fails()))
}
