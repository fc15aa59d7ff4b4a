//! Orders in which the largest updates wait: beside the early order, for jobs in which one update
//! has a large part of all states.
//!
//! In VGG-16 the first fully connected layer has three quarters of all states, and its gradient is
//! among the first. As early as that allows, its update falls to the moment at which activations
//! take most memory, so its states come and go while all else waits. Some way into the backward
//! they come beside operators that take long, and there is room. So there they run as a whole, or
//! in pieces that are spread over the backward. Where the gradient is far larger than what it is
//! made from, it is made late too ([`super::makers`]), so that it takes no memory until
//! then.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::{Candidate, early, makers, pieces};
use crate::budget::Request;
use crate::contract::Latency;
use crate::device::Link;
use crate::job::arrange::{Arrangement, Moved, Pieces, splittable};
use crate::job::optimizer::is_update;
use crate::job::{Graph, Role};
use crate::method::Method;
use crate::units::OpId;

/// An update that writes at least this part of what all updates write waits.
const LARGE: u64 = 4;

/// How a large update runs later than early.
#[derive(Clone, Copy, Debug)]
enum Way {
    /// As a whole. It waits for this part of the time from its early place to the first update of
    /// the framework's order, in percent.
    Whole(u64),
    /// In pieces.
    Pieces(Spread),
}

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

impl Way {
    const fn pieces(begin: u64, at_once: u64, pace: u64) -> Self {
        Self::Pieces(Spread { begin, at_once, pace })
    }
}

/// The ways that are tried; bench/ablation says how they were chosen.
const WAYS: [Way; 6] = [
    Way::Whole(33),
    Way::pieces(0, 0, 100),
    Way::pieces(20, 0, 100),
    Way::pieces(35, 0, 100),
    Way::pieces(0, 0, 50),
    Way::pieces(0, 50, 100),
];

/// The ways that are tried where the gradient waits too, chosen likewise.
const MADE_LATE: [Way; 6] = [
    Way::Whole(15),
    Way::Whole(33),
    Way::Whole(66),
    Way::Whole(80),
    Way::Whole(100),
    Way::pieces(80, 0, 100),
];

/// The job with its largest updates later than early, and with their pieces spread over the
/// backward in several ways; none where no update has a large part. Pieces are of about `piece`
/// bytes.
pub(super) fn candidates(request: &Request<'_>, piece: u64) -> impl Iterator<Item = Candidate> {
    let graph = request.graph;
    let mut orders: Vec<Vec<Moved>> = Vec::new();
    let mut of_pieces = Vec::new();
    if let Method::Neap(options) = &request.method
        && options.reorder
        && options.delay
        && options.swap
        && graph.origin.is_none()
    {
        if options.split {
            of_pieces = pieces(graph, piece);
        }
        // Where several updates are large, what is best for one need not be for the others.
        for alone in [true, false] {
            let late = options.late_gradients;
            let Some(places) = Places::new(graph, request.latencies, LARGE, late, alone) else {
                break;
            };
            let ways = if places.makers.is_empty() { &WAYS } else { &MADE_LATE };
            for &way in ways {
                let order = places.order(graph, &of_pieces, &request.device.link, way);
                let new = |order: &Vec<Moved>| *order != places.order && !orders.contains(order);
                orders.extend(order.filter(new));
            }
        }
    }
    orders.into_iter().filter_map(move |order| {
        Candidate::new(request, &Arrangement { order, pieces: of_pieces.clone() })
    })
}

/// Where updates run: each as early as it may, but for those that wait.
struct Places {
    order: Vec<Moved>,
    /// In `order`, those that write at least one in `large` parts of what all updates write.
    large: Vec<usize>,
    /// When each operator of the framework's order begins, in nanoseconds; the end comes last.
    starts: Vec<u64>,
    /// The first update of the framework's order.
    first: usize,
    /// By large update, what makes its gradient and waits with it.
    makers: BTreeMap<OpId, Vec<OpId>>,
}

impl Places {
    /// `None` where no update is large. With `late` gradients wait where they may. With `alone` of
    /// several large updates only the largest one waits, if its gradient does.
    fn new(
        graph: &Graph,
        latencies: &[Latency],
        large: u64,
        late: bool,
        alone: bool,
    ) -> Option<Self> {
        let all: u64 =
            (0..graph.operators.len()).map(|at| written(graph, OpId::from_index(at))).sum();
        let least = (all / large).max(1);
        let order = early(graph);
        let mut makers = if late { makers(graph) } else { BTreeMap::new() };
        // An update without states gains by waiting only if its gradient can wait too.
        let waits = |id: OpId| states(graph, id) > 0 || makers.contains_key(&id);
        let is_large =
            |moved: &Moved| written(graph, moved.operator) >= least && waits(moved.operator);
        let mut large = (0..order.len()).filter(|at| is_large(&order[*at])).collect::<Vec<_>>();
        let of = |at: &usize| written(graph, order[*at].operator);
        if alone
            && let Some(largest) = large.iter().copied().min_by_key(|at| Reverse(of(at)))
            && makers.contains_key(&order[largest].operator)
        {
            large = vec![largest];
        }
        let first = graph.operators.iter().position(is_update)?;
        let mut starts = vec![0u64];
        for latency in latencies {
            starts.push(starts[starts.len() - 1].saturating_add(latency.time.0));
        }
        makers.retain(|update, _| large.iter().any(|at| order[*at].operator == *update));
        (!large.is_empty()).then_some(Self { order, large, starts, first, makers })
    }

    /// The operator that runs `later` nanoseconds after the early place of an update, and before
    /// the framework's first update.
    fn behind(&self, moved: &Moved, later: u64) -> Option<OpId> {
        let at = moved.after?.index();
        let until = self.starts[at + 1].saturating_add(later);
        let behind = self.starts.partition_point(|start| *start < until).saturating_sub(1);
        Some(OpId::from_index(behind.min(self.first.saturating_sub(1)).max(at)))
    }

    /// The time from the early place of an update to the framework's first one.
    fn left(&self, moved: &Moved) -> u64 {
        let from = moved.after.map_or(0, |after| self.starts[after.index() + 1]);
        self.starts[self.first].saturating_sub(from)
    }

    /// Each update as early as it may run, but for the large ones. `None` where these should run in
    /// pieces, and none of them does.
    fn order(&self, graph: &Graph, pieces: &[Pieces], link: &Link, way: Way) -> Option<Vec<Moved>> {
        let mut order = match way {
            Way::Whole(part) => self.waiting(part),
            Way::Pieces(by) => self.spread(graph, pieces, link, by)?,
        };
        for (&update, makers) in &self.makers {
            let moves = order.iter().filter(|moved| moved.operator == update);
            let (alone, whole): (Vec<Moved>, Vec<Moved>) =
                moves.partition(|moved| moved.piece.is_some());
            let of = if alone.is_empty() { whole } else { alone };
            let of = of.into_iter().filter(|moved| moved.after.is_some());
            let Some(first) = of.min_by_key(|moved| moved.after) else { continue };
            // Nothing runs behind an operator that moves.
            for moved in &mut order {
                if moved.after.is_some_and(|after| makers.contains(&after)) {
                    moved.after = first.after;
                }
            }
            if first.after.is_some_and(|after| makers.contains(&after)) {
                continue;
            }
            // Just before the update, so that of several gradients one is made after another's
            // update.
            let at = order.iter().position(|moved| *moved == first).unwrap_or_default();
            let waits = |maker: &OpId| Moved { operator: *maker, piece: None, after: first.after };
            order.splice(at..at, makers.iter().map(waits));
        }
        Some(order)
    }

    /// The large ones as a whole, after this part of the time, in percent.
    fn waiting(&self, part: u64) -> Vec<Moved> {
        let mut order = self.order.clone();
        for &at in &self.large {
            let moved = &mut order[at];
            moved.after = self.behind(moved, self.left(moved) / 100 * part);
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

/// The bytes that an update writes: of its parameter and its states.
fn written(graph: &Graph, id: OpId) -> u64 {
    let operator = graph.operator(id);
    let written = operator.updates().map(|o| graph.tensor(o.tensor).bytes.0);
    if is_update(operator) { written.sum() } else { 0 }
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
    use super::super::{early_job, freed_after_use};
    use super::*;
    use crate::bound::Bounds;
    use crate::exact;
    use crate::job::arrange::arrange;
    use crate::units::{Bytes, Nanos};

    #[test]
    fn only_large_updates_wait_and_none_beyond_the_backward() {
        let graph = exact::resnet18();
        let device = crate::device::builtin::find("a6000").unwrap();
        let latencies = crate::device::latency::latencies(&graph, &device, None);
        // The largest update of a ResNet-18 has 21 % of all states.
        assert!(Places::new(&graph, &latencies, LARGE, true, false).is_none());
        let places = Places::new(&graph, &latencies, 8, true, false).unwrap();
        assert!(places.makers.is_empty());
        let part = 33;
        let waiting = places.waiting(part);
        let first = graph.operators.iter().position(is_update).unwrap();
        let all: u64 =
            (0..graph.operators.len()).map(|at| states(&graph, OpId::from_index(at))).sum();
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
            let left = time(OpId::from_index(first - 1)) - time(early);
            let waited = time(behind) - time(early);
            let longest = latencies.iter().map(|l| l.time.0).max().unwrap();
            let least = left / 100 * part;
            assert!((least..=least + longest).contains(&waited));
            later += 1;
        }
        assert_eq!(later, 3);
        let pieces = pieces(&graph, 1 << 20);
        let device = crate::device::builtin::find("a6000").unwrap();
        for way in WAYS.into_iter().skip(1) {
            let spread = places.order(&graph, &pieces, &device.link, way).unwrap();
            let alone: Vec<_> = spread.iter().filter(|moved| moved.piece.is_some()).collect();
            assert!(alone.len() > 3 && spread.len() == waiting.len() + alone.len());
            assert!(alone.is_sorted_by_key(|moved| (moved.operator, moved.after)));
            assert!(alone.first().unwrap().after < alone.last().unwrap().after, "{way:?}");
            arrange(&graph, &Arrangement { order: spread, pieces: pieces.clone() }).unwrap();
        }
        arrange(&graph, &Arrangement { order: waiting, pieces: Vec::new() }).unwrap();
    }

    #[test]
    fn of_several_gradients_that_wait_one_is_made_after_anothers_update() {
        let (graph, _) = exact::wide_job(&mut exact::Random(0));
        let at = |operator, after| Moved {
            operator: OpId(operator),
            piece: None,
            after: Some(OpId(after)),
        };
        // Operators 2 and 4 make what 8 and 9 update with; 5 and 6 need none of these.
        let places = Places {
            order: vec![at(8, 2), at(9, 4)],
            large: vec![0, 1],
            starts: (0..=10).map(|at| at * 1000).collect(),
            first: 8,
            makers: BTreeMap::from([(OpId(8), vec![OpId(2)]), (OpId(9), vec![OpId(4)])]),
        };
        let link = exact::device().link;
        let order = places.order(&graph, &[], &link, Way::Whole(100)).unwrap();
        assert_eq!(order, [at(2, 7), at(8, 7), at(4, 7), at(9, 7)]);
    }

    #[test]
    fn a_gradient_waits_with_its_update_where_it_is_larger_than_what_it_is_made_from() {
        let (mut waited, mut others, mut lower) = (0, 0, 0);
        for (seed, alone) in (0..40).flat_map(|seed| [(seed, false), (seed, true)]) {
            let (mut graph, latencies) = exact::wide_job(&mut exact::Random(seed));
            // What runs between a gradient and its update takes more memory than the update.
            let data = graph.operators.iter_mut().filter(|o| o.name.starts_with("data"));
            data.for_each(|o| o.workspace = Bytes(64 << 10));
            let link = exact::device().link;
            let (early, of_early) = early_job(&graph, &latencies);
            let bounds = Bounds::any_order(&early, &of_early, &link);
            let places = Places::new(&graph, &latencies, LARGE, true, alone);
            let Some(places) = places else { continue };
            assert!(!alone || places.makers.len() < 2, "seed {seed}");
            for way in MADE_LATE {
                let Some(order) = places.order(&graph, &[], &link, way) else { continue };
                let made = arrange(&graph, &Arrangement { order, pieces: Vec::new() }).unwrap();
                let place = |name: &str| made.operators.iter().position(|o| o.name == name);
                let updates = graph.operators.iter().enumerate().filter(|(_, o)| is_update(o));
                for (number, update) in updates {
                    let maker = place(&update.name.replace("update", "weight")).unwrap();
                    let update = place(&update.name).unwrap();
                    if places.makers.contains_key(&OpId::from_index(number)) {
                        assert_eq!(maker + 1, update, "seed {seed}");
                        waited += 1;
                    } else {
                        assert!(maker < update, "seed {seed}");
                        others += 1;
                    }
                }
                // Without any copy it is a plan for its own peak.
                let peak = freed_after_use(&made);
                let bound = bounds.iteration_for(peak, Nanos(u64::MAX));
                let time = latencies.iter().map(|l| l.time).sum();
                assert!(bound.is_some_and(|bound| bound <= time), "seed {seed}: {bound:?}");
                assert!(bounds.peak(Nanos::ZERO) <= peak, "seed {seed}");
                lower += usize::from(peak < freed_after_use(&early));
            }
        }
        assert!(waited > 20 && others > 20 && lower > 10, "{waited} {others} {lower}");
    }
}
