//! The order in which the largest update waits: beside the early order, for jobs in which one
//! update has a large part of all states.
//!
//! In VGG-16 the first fully connected layer has three quarters of all states, and its gradient is
//! among the first. As early as that allows, its update falls to the moment at which activations
//! take most memory, so its states come and go while all else waits. Some way into the backward
//! they come beside operators that take long, and there is room. Not for: where other updates run.

use super::{Candidate, PIECE, early, pieces};
use crate::budget::Request;
use crate::contract::Latency;
use crate::job::arrange::{Arrangement, Moved};
use crate::job::optimizer::is_update;
use crate::job::{Graph, Role};
use crate::method::Method;
use crate::units::OpId;

/// An update with at least this part of all states waits.
const LARGE: u64 = 4;

/// It waits for this part of the time from its early place to the first update of the framework's
/// order. Of 15 to 85 %, a third came within 1 % of the best, with the early order beside it, for
/// VGG-16 at 40 to 70 % of its peak on a6000 and h100.
const PART: u64 = 3;

/// The job with its largest updates later than early; `None` where none has a large part.
pub(super) fn candidate(request: &Request<'_>) -> Option<Candidate> {
    let Method::Neap(options) = &request.method else { return None };
    let graph = request.graph;
    let may = options.reorder && options.delay && options.swap && graph.origin.is_none();
    if !may {
        return None;
    }
    let order = order(graph, request.latencies, LARGE)?;
    let pieces = if options.split { pieces(graph, PIECE) } else { Vec::new() };
    Candidate::new(request, &Arrangement { order, pieces })
}

/// Each update as early as it may run, but for those with at least one in `large` parts of all
/// states; `None` without any of those.
fn order(graph: &Graph, latencies: &[Latency], large: u64) -> Option<Vec<Moved>> {
    let all: u64 = (0..graph.operators.len()).map(|at| states(graph, OpId::of(at))).sum();
    let least = (all / large).max(1);
    let waits = |moved: &Moved| states(graph, moved.operator) >= least;
    let mut order = early(graph);
    if !order.iter().any(waits) {
        return None;
    }
    let mut starts = vec![0u64];
    for latency in latencies {
        starts.push(starts[starts.len() - 1].saturating_add(latency.time.0));
    }
    let first = graph.operators.iter().position(is_update)?;
    for moved in order.iter_mut().filter(|moved| waits(moved)) {
        let at = moved.after?.index();
        let from = starts[at + 1];
        let until = from + starts[first].saturating_sub(from) / PART;
        let behind = starts.partition_point(|start| *start < until).saturating_sub(1);
        moved.after = Some(OpId::of(behind.min(first.saturating_sub(1)).max(at)));
    }
    Some(order)
}

/// The bytes of an update's states.
fn states(graph: &Graph, id: OpId) -> u64 {
    let operator = graph.operator(id);
    if !is_update(operator) {
        return 0;
    }
    let tensors = operator.reads().map(|o| graph.tensor(o.tensor));
    tensors.filter(|t| t.role == Role::OptimizerState).map(|t| t.bytes.0).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::arrange::arrange;
    use crate::job::chakra;
    use crate::units::Nanos;
    use std::path::Path;

    #[test]
    fn only_large_updates_wait_and_none_beyond_the_backward() {
        let trace =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/resnet18-adam.et.json.gz");
        let graph = chakra::import(&trace, &chakra::Options::default()).unwrap().graph;
        let device = crate::device::builtin::find("a6000").unwrap();
        let latencies = crate::device::latency::latencies(&graph, &device, None);
        // The largest update of a ResNet-18 has 21 % of all states.
        assert_eq!(order(&graph, &latencies, LARGE), None);
        let waiting = order(&graph, &latencies, 8).unwrap();
        let first = graph.operators.iter().position(is_update).unwrap();
        let all: u64 = (0..graph.operators.len()).map(|at| states(&graph, OpId::of(at))).sum();
        let time = |until: OpId| {
            let before = latencies[..=until.index()].iter().map(|l| l.time);
            before.sum::<Nanos>().0
        };
        let mut later = 0;
        for (moved, early) in waiting.iter().zip(early(&graph)) {
            assert_eq!(moved.operator, early.operator);
            if states(&graph, moved.operator) < all / 8 {
                assert_eq!(moved, &early);
                continue;
            }
            let (behind, early) = (moved.after.unwrap(), early.after.unwrap());
            assert!(behind > early && behind.index() < first, "{early:?} {behind:?}");
            let left = time(OpId::of(first - 1)) - time(early);
            let waited = time(behind) - time(early);
            let longest = latencies.iter().map(|l| l.time.0).max().unwrap();
            assert!((left / PART..=left / PART + longest).contains(&waited));
            later += 1;
        }
        assert_eq!(later, 3);
        arrange(&graph, &Arrangement { order: waiting, pieces: Vec::new() }).unwrap();
    }
}
