//! Budgets that no plan meets, known without looking for one.

use super::{Infeasible, PlanError, Request, minimum};
use crate::job::liveness::Liveness;
use crate::sim::reserved::Framework;
use crate::units::Bytes;

/// What no plan of the request's planner is below.
#[derive(Clone, Copy)]
struct Proof {
    floor: Bytes,
    /// The bytes that live through all iterations, and how many of them the host may hold.
    lasting: Bytes,
    host: Bytes,
    swaps: bool,
}

impl Proof {
    /// What lives through all iterations is on the device or on the host at any time. So during an
    /// operator the device holds what the host has no room for, or what the operator touches of it
    /// if that is more, and all else that the operator works on.
    fn new(request: &Request<'_>, liveness: &Liveness) -> Self {
        let graph = request.graph;
        let generators = graph.generators();
        let mut used = vec![false; graph.tensors.len()];
        for tensor in graph.operators.iter().flat_map(|operator| operator.touches()) {
            used[tensor.index()] = true;
        }
        let bytes = |index: usize| graph.tensors[index].bytes.in_blocks();
        let lasts = |index: usize| generators[index].is_none();
        let lasting: Bytes = (0..used.len()).filter(|&t| used[t] && lasts(t)).map(bytes).sum();
        let swaps = request.method.swaps();
        let host = if swaps { request.device.pinned_bytes } else { Bytes::ZERO };
        let always = lasting.saturating_sub(host);
        let during = graph.operators.iter().map(|operator| {
            let touched = operator.touches();
            let sum = |all: bool| -> Bytes {
                let of = touched.iter().map(|t| t.index()).filter(|&t| lasts(t) == all);
                of.map(bytes).sum()
            };
            sum(true).max(always) + sum(false) + operator.workspace.in_blocks()
        });
        let floor = during.max().unwrap_or(always).max(liveness.floor);
        Self { floor, lasting, host, swaps }
    }

    fn text(self) -> String {
        let lasting = format!("what lives through all iterations takes {}", self.lasting);
        if !self.swaps {
            return format!("{lasting}, and the planner swaps nothing");
        }
        format!(
            "{lasting}, and copies on the host may take no more than the {} of pinned memory that \
             the device's profile allows (`pinned_bytes`)",
            self.host
        )
    }
}

/// What no plan of the request's planner is below.
pub(super) fn floor(request: &Request<'_>, liveness: &Liveness) -> Bytes {
    Proof::new(request, liveness).floor
}

/// The refusal of a budget that is below what must be on the device beside the operator that takes
/// most; `None` where that proves nothing. The least that is reached is looked for with little
/// effort.
///
/// # Errors
/// A defect.
pub(super) fn refusal(
    request: &Request<'_>,
    liveness: &Liveness,
    framework: Option<&Framework>,
) -> Result<Option<Box<Infeasible>>, PlanError> {
    let proof = Proof::new(request, liveness);
    // Where the operators alone take too much, the least that can be reached is soon found.
    if request.budget >= proof.floor || proof.floor == liveness.floor {
        return Ok(None);
    }
    let found = minimum::roughly(request, liveness, framework, proof.floor)?;
    Ok(Some(Box::new(Infeasible {
        budget: request.budget,
        floor: proof.floor,
        lowest: found.unwrap_or(liveness.peak),
        blocked: proof.text(),
    })))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget::within;
    use crate::exact::{Random, device, job};
    use crate::method::Method;
    use crate::neap::Options;

    #[test]
    fn no_plan_is_below_what_is_proved() {
        let (mut met, mut higher) = (0, 0);
        for seed in 0..60 {
            let mut random = Random(seed);
            let (graph, latencies) = job(&mut random);
            let mut device = device();
            device.pinned_bytes = Bytes(random.between(0, 4) * 1024);
            let liveness = Liveness::new(&graph);
            let swap = random.between(0, 1) == 1;
            let method = Method::Neap(Options { swap, ..Options::default() });
            for share in [95, 85, 75, 65] {
                let budget = Bytes(liveness.peak.0 * share / 100);
                let asked = Request {
                    method: method.clone(),
                    ..Request::new(&graph, &device, &latencies, budget)
                };
                let proof = Proof::new(&asked, &liveness);
                higher += u32::from(proof.floor > liveness.floor);
                let refused = refusal(&asked, &liveness, None).unwrap();
                if let Ok(planned) = within(&asked, None) {
                    met += 1;
                    let arena = planned.plan.figures.arena_bytes;
                    assert!(proof.floor <= arena, "seed {seed}, {share} %: {}", proof.floor);
                    assert!(refused.is_none(), "seed {seed}, {share} %: {refused:?}");
                }
                if let Some(no) = refused {
                    assert!(no.lowest >= no.floor && no.floor > budget, "seed {seed}: {no:?}");
                    let named = if !swap { "swaps nothing" } else { "pinned_bytes" };
                    assert!(no.blocked.contains(named), "seed {seed}: {}", no.blocked);
                }
            }
        }
        assert!(met >= 40 && higher >= 40, "{met} plans, {higher} floors are higher");
    }
}
