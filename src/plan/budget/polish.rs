//! A plan that is slower than the unplanned job is polished: single choices of it are changed
//! ([`crate::neap::improve::polish`]), and what is quicker within the budget is taken.
//!
//! What a change frees may come to lie in pieces, so each change for the better is placed before
//! it counts. Changes are made at the budget itself: the plan may have been made for a tighter
//! target, since one for the budget could not be placed.

use std::collections::BTreeSet;

use super::mend::Mended;
use super::{Memory, PlanError, Planned, Request, Search, finish, nominal, placed};
use crate::job::Graph;
use crate::job::liveness::Liveness;
use crate::method::Method;
use crate::neap::improve::polish::{self, Before, Judge};
use crate::neap::{MUCH, Options, Warm};
use crate::planner::{Decision, Given};
use crate::residency::Residencies;
use crate::sim::program::Program;
use crate::sim::reserved::Framework;
use crate::units::{Nanos, TensorId};

/// Where a plan comes from.
#[derive(Debug)]
pub(super) struct Basis {
    pub(super) target: u64,
    options: Options,
    warm: Warm,
    /// For which framework's allocator.
    framework: Option<Framework>,
    /// The graph with more workspace for what needs room in one piece, where it was planned so.
    graph: Option<Graph>,
}

impl Basis {
    /// Of what `method` decided for `target`, if it can be polished.
    pub(super) fn new(
        method: &Method,
        target: u64,
        memory: &Memory,
        framework: Option<&Framework>,
    ) -> Option<Self> {
        let (Method::Neap(options), Memory::Warm(warm)) = (method, memory) else { return None };
        let (options, warm, framework) = (options.clone(), warm.clone(), framework.cloned());
        Some(Self { target, options, warm, framework, graph: None })
    }

    /// The same with tensors that stay, on a graph with more workspace.
    pub(super) fn keeping(self, tensors: &BTreeSet<TensorId>, graph: Graph) -> Self {
        Self { warm: self.warm.keeping(tensors), graph: Some(graph), ..self }
    }
}

/// Added time beyond this part of the unplanned time is worth polishing.
const SLOW: u64 = 64;

/// Where added time is at most this part of the unplanned time, rules are changed at random even
/// with no more than [`MUCH`] effort.
const CALM: u64 = 16;

/// How many times the steps are tried for a framework's allocator, for which single choices matter
/// most.
const FRAMEWORK: u32 = 4;

/// Whether there is enough to gain.
pub(crate) fn slow(planned: &Planned) -> bool {
    adds_more(planned, SLOW)
}

/// Whether a plan adds more than this part of the unplanned time.
pub(super) fn adds_more(planned: &Planned, part: u64) -> bool {
    let unplanned = planned.plan.figures.unplanned_iteration_ns.0;
    planned.run.iteration.0 > unplanned + unplanned / part
}

/// The plan or a quicker one.
pub(super) fn polish(
    request: &Request<'_>,
    liveness: &Liveness,
    mut best: Planned,
) -> Result<Planned, PlanError> {
    let worth = slow(&best);
    let Some(basis) = best.basis.take().filter(|basis| basis.options.polish && worth) else {
        return Ok(best);
    };
    let budget = request.budget.0 / 512 * 512;
    let Request { graph, latencies, device, .. } = *request;
    let given = |target| Given {
        graph: basis.graph.as_ref().unwrap_or(graph),
        latencies,
        link: &device.link,
        pinned: device.pinned_bytes,
        target,
    };
    let given = [basis.target, budget.max(basis.target)].map(given);
    let Options { effort, thorough, .. } = basis.options;
    // Beyond that it is the link that everything waits for, and a search at random finds little.
    let more = basis.framework.is_none() && (effort > MUCH || !adds_more(&best, CALM));
    let pairs = thorough && basis.options.pairs;
    let times = if basis.framework.is_some() { FRAMEWORK } else { 1 };
    let options = Options { pairs, effort: effort.saturating_mul(times), ..basis.options.clone() };
    let random = (more && options.random).then_some(Before::Random);
    let first = best.clone();
    for before in [Before::Nothing, Before::Linger].into_iter().chain(random) {
        let mut judge = Within { request, liveness, basis: &basis, best: Ok(first.clone()) };
        polish::polish(given, &options, &basis.warm, before, &mut judge);
        let polished = judge.best?;
        if polished.run.iteration < best.run.iteration {
            best = polished;
        }
    }
    Ok(best)
}

/// Takes changes that are quicker within the budget.
struct Within<'a> {
    request: &'a Request<'a>,
    liveness: &'a Liveness,
    basis: &'a Basis,
    best: Result<Planned, PlanError>,
}

impl Judge for Within<'_> {
    type Verdict = Result<Planned, PlanError>;

    fn look(&self, residencies: &Residencies<'_>) -> Option<Self::Verdict> {
        let Self { request, liveness, basis, .. } = *self;
        let rival = self.best.as_ref().ok()?.run.iteration;
        let found = match &basis.framework {
            Some(framework) => {
                let mend = basis.options.mend;
                reserved(request, liveness, residencies, framework, rival, mend)
            }
            None => quicker(request, liveness, residencies, rival),
        };
        found.transpose()
    }

    fn take(&mut self, verdict: Self::Verdict) {
        self.best = verdict;
    }
}

/// The plan of decisions, if it is within the budget and quicker.
fn quicker(
    request: &Request<'_>,
    liveness: &Liveness,
    residencies: &Residencies<'_>,
    rival: Nanos,
) -> Result<Option<Planned>, PlanError> {
    let budget = request.budget.0 / 512 * 512;
    let emitted = Decision::new(residencies, budget).emitted;
    let program = Program::new(request.graph, request.latencies, &emitted.events)
        .map_err(|e| PlanError::Defect(e.to_string()))?;
    // Without addresses it is no slower than with them.
    if nominal(&program, &request.device.link)?.iteration >= rival {
        return Ok(None);
    }
    let (program, placements, height) = placed(program, &emitted, budget)?;
    if height > budget {
        return Ok(None);
    }
    let planned = finish(request, liveness, emitted, program, placements, height)?;
    Ok((planned.run.iteration < rival).then_some(planned))
}

/// The same for a framework's allocator, and mended where it would reserve too much if plans may
/// be.
fn reserved(
    request: &Request<'_>,
    liveness: &Liveness,
    residencies: &Residencies<'_>,
    framework: &Framework,
    rival: Nanos,
    mend: bool,
) -> Result<Option<Planned>, PlanError> {
    let memory = &mut Memory::Nothing;
    let search = Search::new(request, Some(framework), liveness, Some(rival), memory);
    let emitted = Decision::new(residencies, search.budget).emitted;
    if !mend {
        return search.write(emitted, framework);
    }
    Ok(match search.mend(&emitted, framework)? {
        Mended::Fits(kept) => Some(kept.planned),
        Mended::Short(..) | Mended::Not => None,
    })
}
