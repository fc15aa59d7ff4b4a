//! Orders and pieces of updates for which a framework's allocator fragments less.
//!
//! An allocator hands a freed block on whole only to a request of the same size. Pieces of one size
//! for all states fit each other's places, and so do whole states and the gradients of their
//! parameters. Which of these is best differs from job to job, and how much polishing gains from
//! plan to plan, so each is planned at the targets of [`budget::quicker_for`] and polished, and the
//! quickest plan wins.

use super::{Arranged, Candidate, PIECE, delayed, early, in_all_orders, pieces};
use crate::budget::{self, PlanError, Request};
use crate::job::arrange::{Arrangement, Moved, Pieces, splittable};
use crate::job::{Graph, Operator, Role};
use crate::method::Method;
use crate::neap;
use crate::parallel::in_parallel;
use crate::sim::reserved::Framework;
use crate::units::{Bytes, Nanos, OpId};

/// How updates are cut.
#[derive(Clone, Copy, Debug)]
enum Cut {
    /// The fewest pieces of equal size that have at most this many bytes of one state.
    Alike(u64),
    /// Pieces with this many bytes of one state, and a rest.
    Equal(u64),
    /// Whole states.
    Not,
}

/// What is tried, the most promising first. At 10 MiB or more each piece has a segment of its own
/// where segments do not grow.
const CUTS: [Cut; 7] = [
    Cut::Alike(28 << 20),
    Cut::Alike(20 << 20),
    Cut::Equal(64 << 20),
    Cut::Equal(24 << 20),
    Cut::Equal(32 << 20),
    Cut::Equal(16 << 20),
    Cut::Not,
];

/// Mending a plan takes most of the time. In graphs of at most `SMALL` operators the plans with all
/// cuts are mended; in others those with the first `MENDED` cuts, and the one with the order and
/// pieces of the arena's plan.
const SMALL: usize = 600;
const MENDED: usize = 3;

/// The search ends with a plan that adds at most one part in `SLIGHT` to the unplanned time, or at
/// most one part in `NEAR` to the time of the arena's plan.
const SLIGHT: u64 = 128;
const NEAR: u64 = 28;

/// A plan is polished, too, if it is slower than the quickest by at most one part in `POLISHED`:
/// polishing made plans for an allocator quicker by up to 4.4 %.
const POLISHED: u64 = 16;

/// The turns after the first are for plans that take longer than the arena's by more than one part
/// in `FAR`: all cuts with parameters that come back after large tensors
/// ([`neap::Options::apart`]), the best plan so far thoroughly ([`neap::Options::thorough`]), all
/// cuts with twice the effort, and with four times. In large graphs that would take minutes, so it
/// is not done there.
const FAR: u64 = 22;
const TURNS: [Turn; 5] = [
    Turn { effort: 1, kind: Kind::Plain },
    Turn { effort: 1, kind: Kind::Apart },
    Turn { effort: 4, kind: Kind::Thorough },
    Turn { effort: 2, kind: Kind::Apart },
    Turn { effort: 4, kind: Kind::Apart },
];

/// The largest graph, in operators, that is planned thoroughly: that takes two seconds.
const THOROUGH: usize = 200;

/// How plans are looked for.
#[derive(Clone, Copy, Debug)]
struct Turn {
    /// How many times the effort.
    effort: u32,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// As the planner's options say.
    Plain,
    /// With parameters that come back after large tensors.
    Apart,
    /// With the best plan's order and pieces only.
    Thorough,
}

/// A plan with other pieces that is quicker than the one that was made, if one was. Updates run in
/// the order of the arena's plan, or early where that has the framework's.
pub(super) fn quicker(
    request: &Request<'_>,
    framework: &Framework,
    made: Option<&Arranged>,
) -> Result<Option<Arranged>, PlanError> {
    let Method::Neap(options) = &request.method else { return Ok(None) };
    if request.graph.origin.is_some() || !options.swap {
        return Ok(None);
    }
    let unplanned = request.unplanned().0;
    let slight = unplanned + unplanned / SLIGHT;
    let time = made.map_or(u64::MAX, |made| made.planned.run.iteration.0);
    if time <= slight {
        return Ok(None);
    }
    let arena = in_the_arena(request, framework)?;
    let own = arena.as_ref().map_or(0, |arena| arena.planned.run.iteration.0);
    let enough = slight.max(own + own / NEAR);
    let order = match arena.as_ref().and_then(arrangement).map(|of| &of.order) {
        Some(order) if !order.is_empty() => order.clone(),
        _ if options.reorder => early(request.graph),
        _ => Vec::new(),
    };
    let mut best: Option<Arranged> = None;
    for (turn, Turn { effort, kind }) in TURNS.into_iter().enumerate() {
        let rival = best.as_ref().map_or(time, |best| best.planned.run.iteration.0);
        let is_far = own > 0 && rival < u64::MAX && rival > slight.max(own + own / FAR);
        if turn > 0 && (!is_far || request.is_large()) {
            break;
        }
        let is_apart = kind == Kind::Apart && options.apart;
        let set_apart = if is_apart { neap::Apart::After } else { neap::Apart::No };
        let thorough = kind == Kind::Thorough;
        let is_small = request.graph.operators.len() <= THOROUGH;
        if kind == Kind::Apart && effort == 1 && !is_apart || thorough && !is_small {
            continue;
        }
        let effort = options.effort.saturating_mul(effort);
        let method = Method::Neap(neap::Options { effort, set_apart, thorough, ..options.clone() });
        let request = Request { method, ..request.clone() };
        let found = if thorough {
            let arrangement = match best.as_ref().or(made).and_then(arrangement) {
                Some(arrangement) => arrangement.clone(),
                None => Arrangement { order: order.clone(), pieces: Vec::new() },
            };
            with(&request, framework, &arrangement, Nanos(rival), true)?
        } else {
            let own = arena.as_ref().and_then(arrangement);
            cut(&request, framework, own, &order, Nanos(rival), enough)?
        };
        best = found.or(best);
    }
    Ok(best)
}

/// The order and pieces of a plan that has others than the framework's.
fn arrangement(made: &Arranged) -> Option<&Arrangement> {
    Some(&made.graph.as_ref()?.origin.as_ref()?.arrangement)
}

/// The quicker of the arena's plans for the budget and for the budget less the workspaces of the
/// matrix library: a greedy choice at the smaller one is sometimes the better one.
fn in_the_arena(
    request: &Request<'_>,
    framework: &Framework,
) -> Result<Option<Arranged>, PlanError> {
    let less = Bytes(request.budget.0.saturating_sub(framework.workspaces().0));
    let mut best: Option<Arranged> = None;
    for budget in [request.budget, less] {
        match in_all_orders(&Request { budget, ..request.clone() }, None) {
            Ok(arena) => {
                let time = |arena: &Arranged| arena.planned.run.iteration;
                if best.as_ref().is_none_or(|best| time(&arena) < time(best)) {
                    best = Some(arena);
                }
            }
            Err(PlanError::Infeasible(_)) => {}
            Err(defect) => return Err(defect),
        }
    }
    Ok(best)
}

/// The quickest plan with any of the pieces, with the arena's `own` order and pieces, or with large
/// updates that wait, that takes less time than `rival`. When the first one takes no more than
/// `enough`, no other is looked for; otherwise all others are, at once.
fn cut(
    request: &Request<'_>,
    framework: &Framework,
    own: Option<&Arrangement>,
    order: &[Moved],
    rival: Nanos,
    enough: u64,
) -> Result<Option<Arranged>, PlanError> {
    let Method::Neap(options) = &request.method else { return Ok(None) };
    let mut arrangements: Vec<Arrangement> = Vec::new();
    for cut in CUTS.into_iter().filter(|cut| options.split || matches!(cut, Cut::Not)) {
        let pieces = match cut {
            Cut::Alike(bytes) => pieces(request.graph, bytes),
            Cut::Equal(bytes) => equal(request.graph, bytes),
            Cut::Not => Vec::new(),
        };
        let arrangement = Arrangement { order: order.to_vec(), pieces };
        if !arrangement.is_empty() && !arrangements.contains(&arrangement) {
            arrangements.push(arrangement);
        }
    }
    let mended = arrangements.len().min(MENDED);
    if let Some(own) = own.filter(|own| !arrangements.contains(own)) {
        arrangements.insert(mended, own.clone());
    }
    for Candidate { graph, .. } in delayed::candidates(request, PIECE) {
        let arrangement = graph.origin.map(|origin| origin.arrangement.clone());
        arrangements.extend(arrangement.filter(|waiting| !arrangements.contains(waiting)));
    }
    let mut best: Option<Arranged> = None;
    for turns in [0..arrangements.len().min(1), 1..arrangements.len()] {
        let rival = best.as_ref().map_or(rival, |best| best.planned.run.iteration);
        if rival.0 <= enough {
            break;
        }
        let found = in_parallel(turns.len(), |at| {
            let turn = turns.start + at;
            let few = request.graph.operators.len() <= SMALL || turn <= MENDED;
            with(request, framework, &arrangements[turn], rival, few)
        });
        for found in found {
            let rival = best.as_ref().map_or(rival, |best| best.planned.run.iteration);
            if let Some(found) = found?.filter(|found| found.planned.run.iteration < rival) {
                best = Some(found);
            }
        }
    }
    Ok(best)
}

/// The quickest plan with an order and pieces that takes less time than `rival`, polished.
fn with(
    request: &Request<'_>,
    framework: &Framework,
    arrangement: &Arrangement,
    rival: Nanos,
    mend: bool,
) -> Result<Option<Arranged>, PlanError> {
    let Method::Neap(options) = &request.method else { return Ok(None) };
    let Some(candidate) = Candidate::new(request, arrangement) else { return Ok(None) };
    let request = candidate.request(request);
    let gain = if options.polish { rival.0 / POLISHED } else { 0 };
    let limit = Nanos(rival.0.saturating_add(gain));
    let Some(planned) = budget::quicker_for(&request, framework, limit, mend)? else {
        return Ok(None);
    };
    let planned = budget::polished(&request, planned)?;
    let is_quicker = planned.run.iteration < rival;
    let graph = Some(candidate.graph);
    Ok(is_quicker.then_some(Arranged { planned, graph }))
}

/// Updates in pieces whose largest state has `bytes`; the last piece of each has the rest.
fn equal(graph: &Graph, bytes: u64) -> Vec<Pieces> {
    let of = |(index, operator): (usize, &Operator)| {
        let id = OpId::from_index(index);
        let states = operator.reads().map(|o| graph.tensor(o.tensor));
        let largest = states.filter(|t| t.role == Role::OptimizerState).map(|t| t.bytes).max()?;
        let all = splittable(graph, id).ok().filter(|_| largest.0 > bytes)?;
        let part = u128::from(all) * u128::from(bytes) / u128::from(largest.0);
        // Whole blocks, whatever the type.
        let elements = u64::try_from(part).unwrap_or(all) / 512 * 512;
        (elements > 0 && elements < all).then_some(Pieces { operator: id, elements })
    };
    graph.operators.iter().enumerate().filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::Latency;
    use crate::device::Profile;
    use crate::exact;
    use crate::job::arrange::arrange;
    use crate::sim::reserved;
    use std::collections::BTreeMap;

    /// ResNet-18 on an a6000 within nine tenths of its peak, with expandable segments.
    struct Case {
        graph: Graph,
        device: Profile,
        latencies: Vec<Latency>,
        budget: Bytes,
        framework: Framework,
    }

    impl Case {
        fn new() -> Self {
            let graph = exact::resnet18();
            let device = crate::device::builtin::find("a6000").unwrap();
            let latencies = crate::device::latency::latencies(&graph, &device, None);
            let peak = crate::job::liveness::Liveness::new(&graph).peak;
            let budget = Bytes(peak.0 / 10 * 9);
            let framework = Framework::on(&device, "expandable_segments:True".parse().unwrap());
            Self { graph, device, latencies, budget, framework }
        }

        fn request(&self, options: neap::Options) -> Request<'_> {
            let method = Method::Neap(options);
            let request = Request::new(&self.graph, &self.device, &self.latencies, self.budget);
            Request { method, ..request }
        }
    }

    #[test]
    fn what_exceeds_a_budget_is_what_settles_above_it() {
        let graph = exact::resnet18();
        let device = crate::device::builtin::find("a6000").unwrap();
        let latencies = crate::device::latency::latencies(&graph, &device, None);
        let planned =
            budget::unplanned(&Request::new(&graph, &device, &latencies, Bytes::ZERO)).unwrap();
        for conf in ["", "expandable_segments:True"] {
            let framework = Framework::on(&device, conf.parse().unwrap());
            let requests = reserved::planned(&graph, &planned.program, &planned.run, &framework);
            let reserved = requests.settle(&framework).at_peak.reserved;
            assert_eq!(requests.exceeds(&framework, reserved), None, "{conf}");
            let less = Bytes(reserved.0 - 1);
            assert_eq!(requests.exceeds(&framework, less), Some(reserved), "{conf}");
        }
    }

    #[test]
    fn a_thorough_plan_keeps_to_what_is_reserved() {
        let case = Case::new();
        let arrangement = Arrangement { order: early(&case.graph), pieces: Vec::new() };
        let made = [false, true].map(|thorough| {
            let options = neap::Options { thorough, effort: 64, ..neap::Options::default() };
            let request = case.request(options);
            with(&request, &case.framework, &arrangement, Nanos(u64::MAX), true).unwrap().unwrap()
        });
        for made in &made {
            assert!(made.planned.bound() <= case.budget, "{}", made.planned.bound());
        }
        let [usual, thorough] = made.map(|made| made.planned.run.iteration);
        assert_ne!(usual, thorough, "other plans are mended");
    }

    #[test]
    fn the_order_and_pieces_of_the_arenas_plan_are_tried_too() {
        let case = Case::new();
        // Without pieces and with the framework's order nothing else is left to try.
        let request = case.request(neap::Options { split: false, ..neap::Options::default() });
        let own = Arrangement { order: early(&case.graph), pieces: Vec::new() };
        let found = |own| cut(&request, &case.framework, own, &[], Nanos(u64::MAX), 0).unwrap();
        assert!(found(None).is_none());
        let found = found(Some(&own)).unwrap();
        assert_eq!(arrangement(&found), Some(&own));
    }

    #[test]
    fn pieces_have_one_size_and_a_rest() {
        let graph = exact::resnet18();
        let bytes = 1 << 20;
        let pieces = equal(&graph, bytes);
        assert!(!pieces.is_empty());
        let count = pieces.len();
        let arranged = arrange(&graph, &Arrangement { order: Vec::new(), pieces }).unwrap();
        let mut sizes = BTreeMap::<u64, usize>::new();
        let of_pieces = |name: &str| name.contains('#');
        for tensor in &arranged.tensors {
            if tensor.role == Role::OptimizerState && of_pieces(&tensor.name) {
                assert!(tensor.bytes.0 <= bytes, "{}", tensor.name);
                *sizes.entry(tensor.bytes.0).or_default() += 1;
            }
        }
        let whole = sizes.remove(&bytes).unwrap_or_default();
        let rests: usize = sizes.values().sum();
        assert!(whole > count && rests <= 2 * count, "{whole} of {bytes}, rests {sizes:?}");
    }
}
