//! Plans for tighter budgets, so that a looser budget is never slower.
//!
//! The planners are greedy, so a tighter budget sometimes has the quicker plan. Tighter budgets are
//! therefore tried too, on *rungs*: fixed shares of the unplanned peak. What is found on a rung
//! depends on the rung alone, and a rung is passed over only where the lower bound proves that
//! nothing there is quicker ([`Bounds::exceeds`]). A plan is polished ([`mod@super::polish`]) only
//! where that can make it the quickest, given that polishing never gained an eighth
//! ([`neap::improve::polish::MOST`]). Nothing is looked for where a linear program proves that it
//! gains less than a `CLOSE`th. So, up to that part,
//! - of two budgets on rungs, the looser one never has the slower plan;
//! - no budget has a slower plan than the rungs below it;
//! - a budget that is met on a lower rung, or by the lowest plan, is met.
//!
//! Where the plan takes no longer than the unplanned job, nothing is tried.

use super::polish::{adds_more, polish, slow};
use super::{Infeasible, PlanError, Planned, Request, alone, bound_by, minimum, waits, within};
use crate::bound::Bounds;
use crate::job::liveness::Liveness;
use crate::method::Method;
use crate::neap;
use crate::neap::improve::polish;
use crate::parallel::in_parallel;
use crate::planner::Memory;
use crate::relax::{self, Guide};
use crate::units::{Bytes, Nanos};

/// The number of parts into which the rungs divide the unplanned peak of the framework's order.
const RUNGS: u64 = 10;

/// Where operators wait long for the link, `LOOKED_AT` budgets just below a rung count as part of
/// it. They are one part in `FINE` of the planned order's own peak apart, finer than the rungs. On
/// graphs of more than `LOOKED_AT_FOR` operators they take long and gain nothing.
const FINE: u64 = 50;
const LOOKED_AT: usize = 3;
const LOOKED_AT_FOR: usize = 1000;

/// These budgets count too where a slow plan is for a target that is lower than the budget by more
/// than this part of it, because plans for higher targets could not be placed; up to the first
/// that has no quicker plan.
const FELL: u64 = 64;

/// The rungs below a budget, the highest first.
pub(super) fn below(request: &Request<'_>, budget: Bytes) -> impl Iterator<Item = Bytes> + use<> {
    parts_below(Liveness::new(request.graph.framework()).peak, budget, RUNGS)
}

/// Whole parts of a peak that are less than a budget, the largest first.
fn parts_below(peak: Bytes, budget: Bytes, parts: u64) -> impl Iterator<Item = Bytes> + use<> {
    let part = move |number: u64| {
        let whole = peak.0 / parts * number;
        Bytes((whole + peak.0 % parts * number / parts) / 512 * 512)
    };
    (1..=parts).rev().map(part).filter(move |part| *part < budget)
}

/// No plan of a search got quicker by more than this part of its time by all that is tried beside
/// it; 14 % was the most.
const MOST: u64 = 4;

/// Where a plan adds no more than this part of the unplanned time, no other is looked for.
const LITTLE: u64 = 256;

/// Nor where the linear program of its order ([`relax::Guide`]) proves that no plan is quicker than
/// the best one by more than this part of its time.
const CLOSE: u64 = 256;

/// Where a slow plan adds no more than this part of the unplanned time, four times the effort is
/// made.
const NEAR: u64 = 32;

/// Whether another plan is hardly worth looking for.
pub(crate) fn settled(planned: &Planned) -> bool {
    !adds_more(planned, LITTLE)
}

/// Even with an `n`th less time it is no quicker than the rival.
fn hopeless(planned: &Planned, n: u64, rival: Option<Nanos>) -> bool {
    let time = planned.run.iteration.0;
    rival.is_some_and(|rival| time - time / n >= rival.0)
}

/// No plan is quicker than the best one by more than a [`CLOSE`]th, as a bound proves.
const fn no_quicker(best: Nanos, bound: Nanos) -> bool {
    best.0 - best.0 / CLOSE <= bound.0
}

/// How a job is planned where its first plan is slow.
#[derive(Clone, Copy)]
enum Way {
    /// As at first.
    Same,
    /// Without dead inputs that live on ([`neap::Options::extend`]), from other draws.
    Twice,
    /// From what a linear program says ([`neap::Options::guide`]).
    Guided,
}

/// What comes of the plan that was made at first for a budget. Where it is slow, the job is also
/// planned in other ways, which are often better. Where its linear program was solved, it is
/// `known`.
fn on_rung(
    request: &Request<'_>,
    liveness: &Liveness,
    rival: Option<Nanos>,
    first: Planned,
    known: &mut Option<Guide>,
) -> Result<Planned, PlanError> {
    if hopeless(&first, MOST, rival) || settled(&first) {
        return Ok(first);
    }
    // What is not below this does not get below the rival by polishing.
    let most = rival.map_or(u64::MAX, |r| r.0.saturating_add(r.0 / (polish::MOST - 1)));
    let slow = slow(&first);
    let improved = |request: &Request<'_>, planned: Planned, memory: &Memory| {
        if !slow {
            return Ok(planned);
        }
        improved(request, (liveness, memory), rival, (planned, most))
    };
    let Method::Neap(options) = &request.method else {
        return improved(request, first, &Memory::Nothing);
    };
    let time = first.run.iteration.0;
    let limit = Nanos(most.min(time.saturating_add(time / polish::MOST)));
    let twice = slow && options.twice && options.extend && options.recompute;
    let Request { graph, latencies, device, budget, .. } = *request;
    let guided = options.guide && options.swap;
    *known = guided.then(|| relax::guide(graph, latencies, &device.link, budget));
    let guide = known.as_ref();
    let best = rival.map_or(first.run.iteration, |rival| rival.min(first.run.iteration));
    if guide.is_some_and(|guide| no_quicker(best, request.unplanned() + guide.added)) {
        return Ok(first);
    }
    // Draws are what finds the little there is to gain.
    let near = slow && !adds_more(&first, NEAR);
    let times = if near { 4 } else { 1 };
    let effort = options.effort.saturating_mul(times);
    // What takes longest comes first.
    let ways = [guide.map(|_| Way::Guided), Some(Way::Same), twice.then_some(Way::Twice)];
    let ways: Vec<Way> = ways.into_iter().flatten().collect();
    let drawn = |set: u64| match guide {
        Some(guide) => Memory::Hints(guide.hints.clone(), set),
        None => Memory::Nothing,
    };
    let made = in_parallel(ways.len(), |at| {
        let (options, memory) = match ways[at] {
            Way::Same => return improved(request, first.clone(), &Memory::Nothing).map(Some),
            Way::Twice => (neap::Options { extend: false, effort, ..options.clone() }, drawn(1)),
            Way::Guided => {
                // Where little time is added, it made as many plans slower as quicker.
                let by_reach = options.widest && !near;
                (neap::Options { by_reach, effort, ..options.clone() }, drawn(0))
            }
        };
        let request = Request { method: Method::Neap(options), ..request.clone() };
        match alone(&request, liveness, None, Some(limit), &mut memory.clone()) {
            Ok(planned) => improved(&request, planned, &memory).map(Some),
            Err(PlanError::Infeasible(_)) => Ok(None),
            Err(defect) => Err(defect),
        }
    });
    let mut best = first;
    for planned in made {
        if let Some(planned) = planned?.filter(|p| p.run.iteration < best.run.iteration) {
            best = planned;
        }
    }
    Ok(best)
}

/// The plan could not be placed for targets near its budget.
fn fell(planned: &Planned, budget: Bytes) -> bool {
    let target = planned.basis.as_ref().map(|basis| basis.target);
    target.is_some_and(|target| target < budget.0 - budget.0 / FELL)
}

/// The plan or a quicker one for the same budget, if that takes less time than `most`. Where
/// operators wait long for the link, a greedy choice at a somewhat tighter budget is often the
/// better one.
fn improved(
    request: &Request<'_>,
    (liveness, memory): (&Liveness, &Memory),
    rival: Option<Nanos>,
    (mut best, most): (Planned, u64),
) -> Result<Planned, PlanError> {
    let take_quicker = |request: &Request<'_>, best: &mut Planned| {
        let limit = Nanos(best.run.iteration.0.min(most));
        match alone(request, liveness, None, Some(limit), &mut memory.clone()) {
            Ok(planned) => *best = planned,
            Err(PlanError::Infeasible(_)) => {}
            Err(defect) => return Err(defect),
        }
        Ok(())
    };
    let mut fell = slow(&best) && !waits(&best) && fell(&best, request.budget);
    let before = fell.then(|| best.clone());
    let few = request.graph.operators.len() <= LOOKED_AT_FOR;
    let looked_at = if few { LOOKED_AT } else { 0 };
    for budget in parts_below(liveness.peak, request.budget, FINE).take(looked_at) {
        if !waits(&best) && !fell {
            break;
        }
        let was = best.run.iteration;
        take_quicker(&Request { budget, ..request.clone() }, &mut best)?;
        fell &= best.run.iteration < was;
    }
    // Its start is often the better one and its end the worse one, so it is a plan of its own.
    if let Method::Neap(options) = &request.method
        && options.linger
        && waits(&best)
    {
        let method = Method::Neap(neap::Options { lingering: true, ..options.clone() });
        take_quicker(&Request { method, ..request.clone() }, &mut best)?;
    }
    if hopeless(&best, polish::MOST, rival) {
        return Ok(best);
    }
    let before = before.filter(|before| best.run.iteration < before.run.iteration);
    let polished = polish(request, liveness, best)?;
    let Some(before) = before else { return Ok(polished) };
    // What is the quicker one before it is polished need not be it afterwards.
    let other = polish(request, liveness, before)?;
    Ok(if other.run.iteration < polished.run.iteration { other } else { polished })
}

/// The quickest of the plans for the budget and for the rungs below it. With the time of another
/// plan, what is proved to be no quicker is not looked for. `first` is what [`within`] made.
pub(super) fn make(
    request: &Request<'_>,
    liveness: &Liveness,
    first: Result<Planned, PlanError>,
    other: Option<Nanos>,
) -> Result<Planned, PlanError> {
    let asked = request.budget;
    // As rungs are, so that a budget which is one by its blocks is not looked at twice.
    let request = &Request { budget: Bytes(asked.0 / 512 * 512), ..request.clone() };
    let unplanned = request.unplanned();
    let mut guide = None;
    let (mut best, mut refusal) = match first {
        Ok(planned) => (Some(on_rung(request, liveness, other, planned, &mut guide)?), None),
        Err(PlanError::Infeasible(no)) => (None, Some(no)),
        Err(defect) => return Err(defect),
    };
    // The lowest plan meets budgets that the planners by themselves do not.
    let anywhere = |best: &mut Option<Planned>| -> Result<Bytes, PlanError> {
        let found = minimum::anywhere(request, liveness, None)?;
        let bound = found.as_ref().map_or(Bytes(u64::MAX), Planned::bound);
        take(request, best, found);
        Ok(bound)
    };
    let mut reached = None;
    if let Some(no) = &mut refusal {
        let bound = anywhere(&mut best)?;
        no.lowest = no.lowest.min(bound);
        reached = Some(bound);
    }
    let done = |best: &Option<Planned>| best.as_ref().is_some_and(|b| b.run.iteration <= unplanned);
    let bounds =
        (!done(&best)).then(|| Bounds::new(request.graph, request.latencies, &request.device.link));
    let time = |best: &Option<Planned>| best.as_ref().map(|b| b.run.iteration);
    // No plan within a budget that is too low is quicker than the best.
    let too_low = |best: &Option<Planned>, guide: &Option<Guide>, budget: Bytes| {
        let time = time(best).into_iter().chain(other).min();
        let added = time.map(|time| Nanos(time.0.saturating_sub(unplanned.0 + 1)));
        let proof = bounds.as_ref().zip(added);
        budget < liveness.floor
            || proof.is_some_and(|(bounds, added)| {
                guide.as_ref().is_some_and(|guide| guide.added_within(budget) > added)
                    || bounds.exceeds(added, budget)
            })
    };
    for budget in below(request, request.budget) {
        if done(&best) || budget < reached.unwrap_or_default() || too_low(&best, &guide, budget) {
            break;
        }
        let rival = time(&best).into_iter().chain(other).min();
        let rung = Request { budget, ..request.clone() };
        match within(&rung, None) {
            Ok(planned) => {
                let planned = on_rung(&rung, liveness, rival, planned, &mut guide)?;
                take(request, &mut best, Some(planned));
            }
            Err(PlanError::Infeasible(_)) if reached.is_none() => {
                reached = Some(anywhere(&mut best)?);
            }
            Err(PlanError::Infeasible(_)) => {}
            Err(defect) => return Err(defect),
        }
    }
    match (best, refusal) {
        (Some(best), _) => Ok(bound_by(best, asked)),
        (None, Some(no)) => {
            Err(PlanError::Infeasible(Box::new(Infeasible { budget: asked, ..*no })))
        }
        (None, None) => Err(PlanError::Defect("neither a plan nor a refusal".to_owned())),
    }
}

/// Keeps a plan that is within the request's budget and quicker than the best.
fn take(request: &Request<'_>, best: &mut Option<Planned>, found: Option<Planned>) {
    let quicker = |p: &Planned| best.as_ref().is_none_or(|b| p.run.iteration < b.run.iteration);
    if let Some(found) = found.filter(|p| p.bound() <= request.budget && quicker(p)) {
        *best = Some(found);
    }
}
