//! Orders in which the largest updates wait: beside the early order, for jobs in which one update
//! has a large part of all states.
//!
//! In VGG-16 the first fully connected layer has three quarters of all states, and its gradient is
//! among the first. As early as that allows, its update falls to the moment at which activations
//! take most memory, so its states come and go while all else waits. Some way into the backward
//! they come beside operators that take long, and there is room. So there they run as a whole, or
//! in pieces that are spread over the backward ([`SPREADS`]).

use super::{Candidate, PIECE, early, pieces};
use crate::budget::Request;
use crate::contract::Latency;
use crate::device::Link;
use crate::job::arrange::{Arrangement, Moved, Pieces, splittable};
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

/// Ways to spread the pieces of a large update over the backward. Of beginnings of 0 to 35 %, for
/// three VGGs and an AlexNet at 70 to 40 % of their peak on an a6000, each of the first three is
/// the best for some. The last two make plans of four VGGs quicker at 80 to 40 % on an rtx4090, an
/// a6000 and an h100, by up to 7 %.
const SPREADS: [Spread; 5] = [
    Spread { begin: 0, at_once: 0, pace: 100 },
    Spread { begin: 20, at_once: 0, pace: 100 },
    Spread { begin: 35, at_once: 0, pace: 100 },
    Spread { begin: 0, at_once: 0, pace: 50 },
    Spread { begin: 0, at_once: 50, pace: 100 },
];

/// Where the pieces of an update run, in percent.
#[derive(Clone, Copy, Debug)]
struct Spread {
    /// The first ones wait for this part of the time from their early place to the first update of
    /// the framework's order.
    begin: u64,
    /// This part of the pieces runs there, one after the other.
    at_once: u64,
    /// The others follow as far apart as this part of the time that the link takes for the states
    /// of one, both ways at once. Below 100 the link can carry the states of some pieces only, and
    /// the gradient is freed sooner.
    pace: u64,
}

/// The job with its largest updates later than early, and with their pieces spread over the
/// backward in several ways; none where no update has a large part.
pub(super) fn candidates(request: &Request<'_>) -> impl Iterator<Item = Candidate> {
    let graph = request.graph;
    let found = match &request.method {
        Method::Neap(options) if options.reorder && options.delay && options.swap => {
            let pieces = if options.split { pieces(graph, PIECE) } else { Vec::new() };
            let places = Places::of(graph, request.latencies, LARGE);
            places.filter(|_| graph.origin.is_none()).map(|places| (places, pieces))
        }
        _ => None,
    };
    let arrangements = found.map(|(places, pieces)| {
        let link = &request.device.link;
        let spread = SPREADS.iter().filter_map(|by| places.spread(graph, &pieces, link, *by));
        let orders: Vec<_> = std::iter::once(places.waiting()).chain(spread).collect();
        orders.into_iter().map(move |order| Arrangement { order, pieces: pieces.clone() })
    });
    let arrangements = arrangements.into_iter().flatten();
    arrangements.filter_map(|arrangement| Candidate::new(request, &arrangement))
}

/// Where updates run: each as early as it may, but for those that wait.
struct Places {
    order: Vec<Moved>,
    /// In `order`, those with at least one in `large` parts of all states.
    large: Vec<usize>,
    /// When each operator of the framework's order begins, in nanoseconds; the end comes last.
    starts: Vec<u64>,
    /// The first update of the framework's order.
    first: usize,
}

impl Places {
    /// `None` where no update is large.
    fn of(graph: &Graph, latencies: &[Latency], large: u64) -> Option<Self> {
        let all: u64 = (0..graph.operators.len()).map(|at| states(graph, OpId::of(at))).sum();
        let least = (all / large).max(1);
        let order = early(graph);
        let is_large = |moved: &Moved| states(graph, moved.operator) >= least;
        let large = (0..order.len()).filter(|at| is_large(&order[*at])).collect::<Vec<_>>();
        let first = graph.operators.iter().position(is_update)?;
        let mut starts = vec![0u64];
        for latency in latencies {
            starts.push(starts[starts.len() - 1].saturating_add(latency.time.0));
        }
        (!large.is_empty()).then_some(Self { order, large, starts, first })
    }

    /// The operator that runs `later` nanoseconds after the early place of an update, and before
    /// the framework's first update.
    fn behind(&self, moved: &Moved, later: u64) -> Option<OpId> {
        let at = moved.after?.index();
        let until = self.starts[at + 1].saturating_add(later);
        let behind = self.starts.partition_point(|start| *start < until).saturating_sub(1);
        Some(OpId::of(behind.min(self.first.saturating_sub(1)).max(at)))
    }

    /// The time from the early place of an update to the framework's first one.
    fn left(&self, moved: &Moved) -> u64 {
        let from = moved.after.map_or(0, |after| self.starts[after.index() + 1]);
        self.starts[self.first].saturating_sub(from)
    }

    /// Each update as early as it may run, but for the large ones.
    fn waiting(&self) -> Vec<Moved> {
        let mut order = self.order.clone();
        for &at in &self.large {
            let moved = &mut order[at];
            moved.after = self.behind(moved, self.left(moved) / PART);
        }
        order
    }

    /// The pieces of the large ones spread over the backward. `None` where none of them is in
    /// pieces.
    fn spread(
        &self,
        graph: &Graph,
        pieces: &[Pieces],
        link: &Link,
        by: Spread,
    ) -> Option<Vec<Moved>> {
        let mut order = self.order.clone();
        let rate = link.h2d_contended.min(link.d2h_contended).max(1);
        for &at in &self.large {
            let moved = &self.order[at];
            let Some(of) = pieces.iter().find(|of| of.operator == moved.operator) else { continue };
            let all = splittable(graph, of.operator).ok()?;
            let count = u32::try_from(all.div_ceil(of.elements)).ok()?;
            let bytes = u128::from(states(graph, of.operator)) * u128::from(of.elements);
            let each = bytes * 1_000_000_000 / (u128::from(all) * u128::from(rate));
            let each = u64::try_from(each).unwrap_or(u64::MAX) / 100 * by.pace;
            let first = self.left(moved) / 100 * by.begin;
            let at_once = u64::from(count) * by.at_once / 100;
            let wait = |number: u32| {
                let later = u64::from(number).saturating_sub(at_once);
                each.saturating_mul(later).saturating_add(first)
            };
            order.extend((0..count).map(|number| Moved {
                piece: Some(number),
                after: self.behind(moved, wait(number)),
                ..*moved
            }));
        }
        (order.len() > self.order.len()).then_some(order)
    }
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
        assert!(Places::of(&graph, &latencies, LARGE).is_none());
        let places = Places::of(&graph, &latencies, 8).unwrap();
        let waiting = places.waiting();
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
        let pieces = pieces(&graph, 1 << 20);
        let device = crate::device::builtin::find("a6000").unwrap();
        for by in SPREADS {
            let spread = places.spread(&graph, &pieces, &device.link, by).unwrap();
            let alone: Vec<_> = spread.iter().filter(|moved| moved.piece.is_some()).collect();
            assert!(alone.len() > 3 && spread.len() == waiting.len() + alone.len());
            assert!(alone.is_sorted_by_key(|moved| (moved.operator, moved.after)));
            assert!(alone.first().unwrap().after < alone.last().unwrap().after, "{by:?}");
            arrange(&graph, &Arrangement { order: spread, pieces: pieces.clone() }).unwrap();
        }
        arrange(&graph, &Arrangement { order: waiting, pieces: Vec::new() }).unwrap();
    }
}
