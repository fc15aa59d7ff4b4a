//! Which order and which pieces a plan gives the job's updates.
//!
//! A model that is mostly parameters peaks when all gradients wait for the optimizer's step beside
//! all states, and a large state needs room for all of itself at once. So each update may run as
//! soon as its gradient and its parameter's last reader allow, and in pieces. What is planned is
//! the arranged graph ([`crate::job::arrange()`]); the quickest plan wins, the framework's order
//! first among equals.

mod delayed;
mod fragments;
mod gradients;
mod makers;

pub use makers::{in_pieces, makers, may_wait};

use std::collections::BTreeMap;

use super::budget::{self, PlanError, Planned, Request};
use super::method::Method;
use super::residency::Residencies;
use crate::contract::Latency;
use crate::job::arrange::{Arrangement, Moved, Pieces, arrange, splittable};
use crate::job::liveness::Liveness;
use crate::job::optimizer::is_update;
use crate::job::{Graph, Operator, Role};
use crate::neap;
use crate::parallel::in_parallel;
use crate::sim::reserved::Framework;
use crate::units::{Bytes, Nanos, OpId, TensorId};

/// The size of a state's pieces, in bytes: copying one takes about a millisecond, a hundred times a
/// copy's overhead.
const PIECE: u64 = 32 << 20;

/// Where the link takes more than this part of the iteration for a piece, finer ones are tried too,
/// but none below `FINEST`, for which a copy's overhead is 4 % of its time on an a6000. Of 60 plans
/// of AlexNet (16 to 128 images, three devices, 80 to 40 % of the peak) 39 are quicker, by 8 % on
/// the mean of all, and none is slower.
const LONG: u64 = 24;
const FINEST: u64 = 4 << 20;

/// Above the usual effort, plans with this many times less are made too. Four times the usual
/// effort alone made 12 of 27 plans quicker, and 7 slower, by up to 1.8 % (27 graphs on an a6000 at
/// 60 % of the peak). Where nothing may be swapped steps are quick, and this many times as many are
/// usual: GPT-2 at 80 % takes 1.004 of the unplanned time then, and 1.023 with no more than that.
const MORE: u32 = 4;

/// A plan, and the graph that it refers to where that is not the request's.
#[derive(Clone, Debug)]
pub struct Arranged {
    /// The plan.
    pub planned: Planned,
    /// The arranged graph; `None` where the plan keeps the framework's order.
    pub graph: Option<Graph>,
}

/// An arranged job to plan.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// The arranged graph.
    pub graph: Graph,
    /// One for each of its operators.
    pub latencies: Vec<Latency>,
    /// What operators that run in pieces take as a whole.
    pub whole: BTreeMap<OpId, Latency>,
}

impl Candidate {
    /// The request's job, arranged; `None` where the graph does not allow it.
    #[must_use]
    pub fn new(request: &Request<'_>, arrangement: &Arrangement) -> Option<Self> {
        let graph = arrange(request.graph, arrangement).ok()?;
        let origin = graph.origin.as_ref()?;
        let overhead = request.device.launch_overhead_ns;
        let mut latencies = Vec::with_capacity(graph.operators.len());
        let mut whole = BTreeMap::new();
        for (operator, &(id, piece)) in graph.operators.iter().zip(&origin.operators) {
            let latency = request.latencies[id.index()];
            latencies.push(if piece.is_some() {
                whole.insert(id, latency);
                let all = origin.graph.operator(id);
                Latency {
                    time: part(latency.time, elements(operator), elements(all), overhead),
                    ..latency
                }
            } else {
                latency
            });
        }
        Some(Self { graph, latencies, whole })
    }

    /// To plan it as `request` asks.
    #[must_use]
    pub fn request<'b>(&'b self, request: &Request<'b>) -> Request<'b> {
        Request {
            graph: &self.graph,
            latencies: &self.latencies,
            whole: self.whole.clone(),
            ..request.clone()
        }
    }
}

/// How many elements an operator writes; of a list of tensors the first one's.
fn elements(operator: &Operator) -> u64 {
    operator.writes().next().map_or(1, |o| o.elements().max(1))
}

/// The time of a piece: a launch, and its part of the rest.
fn part(whole: Nanos, elements: u64, all: u64, overhead: u64) -> Nanos {
    let launch = overhead.min(whole.0);
    let rest = u128::from(whole.0 - launch) * u128::from(elements);
    let rest = u64::try_from(rest.div_ceil(u128::from(all.max(1)))).unwrap_or(whole.0);
    Nanos((launch + rest).max(1))
}

/// Plans the job in the framework's order and in another, as far as the planner's switches allow;
/// otherwise as [`budget::make_for`]. Where the other order's peak is much lower, the framework's
/// is planned only if the other one can't be. For a framework's allocator other pieces are planned
/// too. With much effort the plans with less are made too, since a search that goes on for longer
/// may end elsewhere, and the quickest is taken.
///
/// # Errors
/// As [`budget::make_for`], for the framework's order, when no order can be planned.
pub fn make_for(
    request: &Request<'_>,
    framework: Option<&Framework>,
) -> Result<Arranged, PlanError> {
    let Method::Neap(options) = &request.method else { return make_once(request, framework) };
    let unplanned = request.unplanned();
    let times = if options.swap { 1 } else { MORE };
    let most = options.effort.saturating_mul(times);
    let mut effort = most.min(neap::EFFORT);
    let with = |effort| {
        let method = Method::Neap(neap::Options { effort, ..options.clone() });
        make_once(&Request { method, ..request.clone() }, framework)
    };
    let mut made = with(effort);
    // What is refused is seldom met with more.
    let limit = if made.is_ok() { most } else { options.effort };
    while effort < limit && time(&made).is_none_or(|time| time > unplanned) {
        effort = limit.min(effort.saturating_mul(MORE));
        made = quicker(made, with(effort));
    }
    made
}

/// With the effort that is asked for alone.
fn make_once(request: &Request<'_>, framework: Option<&Framework>) -> Result<Arranged, PlanError> {
    match framework {
        Some(framework) => for_allocator(request, framework),
        None => in_all_orders(request, None),
    }
}

/// The plan with single choices changed for the better, within what the allocator reserves.
fn polished(request: &Request<'_>, made: Arranged) -> Result<Arranged, PlanError> {
    let Arranged { planned, graph } = made;
    let Some(origin) = graph.as_ref().and_then(|graph| graph.origin.as_ref()) else {
        return Ok(Arranged { planned: budget::polished(request, planned)?, graph });
    };
    let planned = match Candidate::new(request, &origin.arrangement) {
        Some(candidate) => budget::polished(&candidate.request(request), planned)?,
        None => planned,
    };
    Ok(Arranged { planned, graph })
}

fn for_allocator(request: &Request<'_>, framework: &Framework) -> Result<Arranged, PlanError> {
    // Where the other order is the better one, plans in equal pieces seldom leave anything to gain.
    let first = request.budget < Liveness::new(request.graph).peak && early_is_much_lower(request);
    if first && let Some(found) = fragments::quicker(request, framework, None)? {
        return Ok(found);
    }
    match in_all_orders(request, Some(framework)) {
        Ok(made) => {
            let made = polished(request, made)?;
            let quicker = fragments::quicker(request, framework, Some(&made))?;
            Ok(quicker.unwrap_or(made))
        }
        Err(PlanError::Infeasible(no)) if !first => {
            fragments::quicker(request, framework, None)?.ok_or(PlanError::Infeasible(no))
        }
        refused => refused,
    }
}

fn early_is_much_lower(request: &Request<'_>) -> bool {
    let peak = freed_after_use(request.graph);
    candidate(request, PIECE).is_some_and(|other| much_lower(freed_after_use(&other.graph), peak))
}

/// The quickest plan in any of the orders. Those with the largest update later come last, where
/// there is anything to gain, in finer pieces too if these are quicker for the early order.
fn in_all_orders(
    request: &Request<'_>,
    framework: Option<&Framework>,
) -> Result<Arranged, PlanError> {
    let mut early = early_orders(request).into_iter();
    let made = in_two_orders(request, framework, early.next());
    let unplanned = request.unplanned();
    if time(&made).is_some_and(|time| time <= unplanned) {
        return made;
    }
    let with = |made, early: Early| {
        let time = time(&made);
        quicker(made, early.make(request, framework, time))
    };
    let settled = made.as_ref().is_ok_and(|made| budget::settled(&made.planned));
    let made = early.filter(|_| !settled).fold(made, with);
    let usual = time(&made).unwrap_or(Nanos(u64::MAX));
    let finer = finer(request).filter(|_| framework.is_none() && slow(&made));
    let made = match finer.and_then(|piece| candidate(request, piece)) {
        Some(candidate) => with(made, candidate.into()),
        None => made,
    };
    let finer = finer.filter(|_| time(&made).is_some_and(|time| time < usual));
    let sizes = finer.into_iter().chain([PIECE]);
    let mut delayed: Vec<Early> =
        sizes.flat_map(|piece| delayed::candidates(request, piece)).map(Early::from).collect();
    if framework.is_none() {
        plan_first(request, &mut delayed);
    }
    delayed.into_iter().fold(made, with)
}

/// There is no plan, or one that can be made quicker by more than a little.
fn slow(made: &Result<Arranged, PlanError>) -> bool {
    made.as_ref().map_or(true, |made| budget::slow(&made.planned))
}

/// The size of finer pieces, a power of two; `None` where the link is quick enough for the usual
/// ones, nothing is large enough to be cut finer, or the planner may not do it.
fn finer(request: &Request<'_>) -> Option<u64> {
    let Method::Neap(options) = &request.method else { return None };
    let link = &request.device.link;
    let rate = u128::from(link.h2d_contended.min(link.d2h_contended));
    let unplanned = request.unplanned().0;
    let bytes = u128::from(unplanned) * rate / u128::from(LONG * 1_000_000_000);
    let bytes = u64::try_from(bytes).ok().filter(|bytes| *bytes < PIECE)?.max(FINEST);
    let finer = 1 << bytes.ilog2();
    let may = options.split && options.finer;
    (may && pieces(request.graph, finer) != pieces(request.graph, PIECE)).then_some(finer)
}

/// An order with updates earlier than the framework's.
struct Early {
    candidate: Candidate,
    /// Its first plan for an arena, where that was made.
    first: Option<budget::First>,
}

impl From<Candidate> for Early {
    fn from(candidate: Candidate) -> Self {
        Self { candidate, first: None }
    }
}

impl Early {
    fn made_first(&self, request: &Request<'_>) -> budget::First {
        budget::First::new(&self.candidate.request(request), None)
    }

    /// Its first plan for an arena.
    fn first(&mut self, request: &Request<'_>) -> &budget::First {
        let made = self.first.take().unwrap_or_else(|| self.made_first(request));
        self.first.insert(made)
    }

    /// The plan for a budget; only a quicker one where there is another.
    fn make(
        self,
        request: &Request<'_>,
        framework: Option<&Framework>,
        other: Option<Nanos>,
    ) -> Result<Arranged, PlanError> {
        let arranged = self.candidate.request(request);
        let planned = match self.first.filter(|_| framework.is_none()) {
            Some(first) => budget::make_of(&arranged, first, other),
            None => budget::make_against(&arranged, framework, other),
        }?;
        Ok(Arranged { planned, graph: Some(self.candidate.graph) })
    }
}

/// The early orders with gradients in pieces and whole, where they differ. The one whose first plan
/// is the quickest comes first; with whole gradients where that leaves little to gain.
fn early_orders(request: &Request<'_>) -> Vec<Early> {
    let mut all: Vec<Early> = gradients::ways(request).into_iter().map(Early::from).collect();
    if let Some(mut whole) = all.pop() {
        if all.is_empty() || whole.first(request).is_slow() {
            all.push(whole);
            plan_first(request, &mut all);
        } else {
            all.insert(0, whole);
        }
    }
    all
}

/// Makes the first plan of each, and sorts them by its time: the likely ones first, so that less is
/// tried for the others.
fn plan_first(request: &Request<'_>, all: &mut [Early]) {
    if all.len() < 2 {
        return;
    }
    let made = |early: &Early| early.first.is_none().then(|| early.made_first(request));
    let firsts = in_parallel(all.len(), |at| made(&all[at]));
    for (early, first) in all.iter_mut().zip(firsts) {
        early.first = early.first.take().or(first);
    }
    let time = |early: &Early| early.first.as_ref().and_then(budget::First::time);
    all.sort_by_key(|early| time(early).unwrap_or(Nanos(u64::MAX)));
}

fn in_two_orders(
    request: &Request<'_>,
    framework: Option<&Framework>,
    early: Option<Early>,
) -> Result<Arranged, PlanError> {
    let Some(early) = early else {
        return budget::make_for(request, framework).map(alone);
    };
    let own = |other| budget::make_against(request, framework, other).map(alone);
    let peak = Liveness::new(request.graph).peak;
    let arranged = freed_after_use(&early.candidate.graph);
    let lower = much_lower(arranged, freed_after_use(request.graph));
    if lower && request.budget < peak {
        return match early.make(request, framework, None) {
            Err(PlanError::Infeasible(no)) => quicker(own(None), Err(PlanError::Infeasible(no))),
            made => made,
        };
    }
    if framework.is_none() {
        return the_likely_one_first(request, early);
    }
    let own = own(None);
    let unplanned = request.unplanned();
    if time(&own).is_some_and(|own| own <= unplanned) {
        return own;
    }
    let other = early.make(request, framework, time(&own));
    quicker(own, other)
}

/// For an arena. The order whose first plan is the quicker one goes first, so that less is tried
/// for the other.
fn the_likely_one_first(request: &Request<'_>, mut early: Early) -> Result<Arranged, PlanError> {
    let unplanned = request.unplanned();
    let is_ideal = |time: Option<Nanos>| time.is_some_and(|time| time <= unplanned);
    let make_own = |first, rival| budget::make_of(request, first, rival).map(alone);
    let own = budget::First::new(request, None);
    if is_ideal(own.time()) {
        return make_own(own, None);
    }
    if early.first(request).is_quicker_than(&own) {
        let other = early.make(request, None, None);
        let own = make_own(own, time(&other));
        return quicker(own, other);
    }
    let own = make_own(own, None);
    if is_ideal(time(&own)) {
        return own;
    }
    let other = early.make(request, None, time(&own));
    quicker(own, other)
}

/// The time of a plan, if there is one.
fn time(planned: &Result<Arranged, PlanError>) -> Option<Nanos> {
    planned.as_ref().ok().map(|arranged| arranged.planned.run.iteration)
}

/// A peak that is lower by more than a tenth: its order is likely to be the quicker one.
const fn much_lower(other: Bytes, own: Bytes) -> bool {
    other.0 < own.0 / 10 * 9
}

/// The peak where what the framework keeps past its last use is freed, as under any plan.
fn freed_after_use(graph: &Graph) -> Bytes {
    Bytes(Residencies::new(graph).load.peak().1)
}

/// The quicker one, and of equals the first. Of two refusals the first, with the lowest of both.
fn quicker(
    own: Result<Arranged, PlanError>,
    other: Result<Arranged, PlanError>,
) -> Result<Arranged, PlanError> {
    match (own, other) {
        (Ok(own), Ok(other)) if other.planned.run.iteration < own.planned.run.iteration => {
            Ok(other)
        }
        (Err(PlanError::Infeasible(_)), Ok(other)) => Ok(other),
        (_, Err(defect @ PlanError::Defect(_))) => Err(defect),
        (Err(PlanError::Infeasible(mut own)), Err(PlanError::Infeasible(other))) => {
            own.lowest = own.lowest.min(other.lowest);
            Err(PlanError::Infeasible(own))
        }
        (own, _) => own,
    }
}

/// As [`budget::minimum_for`], in the order with the lowest plan.
///
/// # Errors
/// As [`budget::minimum_for`].
pub fn minimum_for(
    request: &Request<'_>,
    framework: Option<&Framework>,
) -> Result<Arranged, PlanError> {
    let mut best = alone(budget::minimum_for(request, framework)?);
    if let Some(candidate) = candidate(request, PIECE) {
        let lower = budget::minimum_for(&candidate.request(request), framework);
        match lower {
            Ok(planned) if planned.bound() < best.planned.bound() => {
                best = Arranged { planned, graph: Some(candidate.graph) };
            }
            Ok(_) | Err(PlanError::Infeasible(_)) => {}
            Err(defect) => return Err(defect),
        }
    }
    Ok(best)
}

const fn alone(planned: Planned) -> Arranged {
    Arranged { planned, graph: None }
}

/// The job with its updates early and in pieces, as far as there is anything to change.
fn candidate(request: &Request<'_>, piece: u64) -> Option<Candidate> {
    let mut arrangement = arrangement(request, piece)?;
    gradients::cut(request, &mut arrangement, true);
    if arrangement.is_empty() { None } else { Candidate::new(request, &arrangement) }
}

/// Updates early and in pieces, and gradients whole; `None` where the planner may not do it.
fn arrangement(request: &Request<'_>, piece: u64) -> Option<Arrangement> {
    let Method::Neap(options) = &request.method else { return None };
    if request.graph.origin.is_some() || !options.swap {
        return None;
    }
    let order = if options.reorder { early(request.graph) } else { Vec::new() };
    let pieces = if options.split { pieces(request.graph, piece) } else { Vec::new() };
    Some(Arrangement { order, pieces })
}

/// The job with each update as early as it may run, and whole. Its bound is
/// [`crate::bound::Bounds::any_order`].
#[must_use]
pub fn early_job(graph: &Graph, latencies: &[Latency]) -> (Graph, Vec<Latency>) {
    let arrangement = Arrangement { order: early(graph), pieces: Vec::new() };
    match arrange(graph, &arrangement) {
        Ok(arranged) => {
            let of = |id| latencies[arranged.framework_operator(id).index()];
            let latencies = (0..latencies.len()).map(|at| of(OpId::from_index(at))).collect();
            (arranged, latencies)
        }
        Err(_) => (graph.clone(), latencies.to_vec()),
    }
}

/// The operator that holds an update back, and the tensor that it waits for: what it reads is
/// written there last, or what it writes is used there last. `None` where nothing does.
#[must_use]
pub fn held_back(graph: &Graph, update: OpId) -> Option<(OpId, TensorId)> {
    let of = graph.operator(update);
    let written: Vec<TensorId> = of.writes().map(|o| o.tensor).collect();
    let touched = of.touches();
    graph.operators[..update.index()].iter().enumerate().rev().find_map(|(at, operator)| {
        let writes: Vec<TensorId> = operator.writes().map(|o| o.tensor).collect();
        let uses = operator.touches();
        let tensor = touched
            .iter()
            .find(|t| writes.contains(t) || (written.contains(t) && uses.contains(t)))?;
        Some((OpId::from_index(at), *tensor))
    })
}

/// Each update behind the last operator that it depends on.
#[must_use]
pub fn early(graph: &Graph) -> Vec<Moved> {
    let mut moved = Vec::new();
    // By tensor, behind which operator its last write and its last use stand.
    let none = vec![None::<usize>; graph.tensors.len()];
    let (mut writes, mut uses) = (none.clone(), none);
    let mut stays = None;
    for (at, operator) in graph.operators.iter().enumerate() {
        let written: Vec<usize> = operator.writes().map(|o| o.tensor.index()).collect();
        let mut place = at;
        if is_update(operator) {
            let read = operator.reads().filter_map(|o| writes[o.tensor.index()]);
            let behind = read.chain(written.iter().filter_map(|t| uses[*t])).max();
            if let Some(behind) = behind.filter(|behind| stays > Some(*behind)) {
                let after = Some(OpId::from_index(behind));
                moved.push(Moved { operator: OpId::from_index(at), piece: None, after });
                place = behind;
            }
        }
        if place == at {
            stays = Some(at);
        }
        for tensor in operator.touches() {
            let last = &mut uses[tensor.index()];
            *last = (*last).max(Some(place));
        }
        for tensor in written {
            writes[tensor] = writes[tensor].max(Some(place));
        }
    }
    moved
}

/// Updates of large states in pieces of about `bytes`.
#[must_use]
pub fn pieces(graph: &Graph, bytes: u64) -> Vec<Pieces> {
    let of = |(index, operator): (usize, &Operator)| {
        let id = OpId::from_index(index);
        let states = operator.reads().map(|o| graph.tensor(o.tensor));
        let largest = states.filter(|t| t.role == Role::OptimizerState).map(|t| t.bytes).max()?;
        let count = largest.0.div_ceil(bytes);
        let all = splittable(graph, id).ok().filter(|_| count > 1)?;
        // Whole blocks, whatever the type.
        let elements = all.div_ceil(count).next_multiple_of(512);
        (elements < all).then_some(Pieces { operator: id, elements })
    };
    graph.operators.iter().enumerate().filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exact;

    #[test]
    fn pieces_are_finer_where_the_link_takes_long_for_one() {
        let graph = exact::resnet18();
        let mut device = exact::device();
        device.link.h2d_contended = 20_000_000_000;
        device.link.d2h_contended = 25_000_000_000;
        let size = |graph: &Graph, milliseconds: u64, options: &neap::Options| {
            let mut latencies = crate::device::latency::latencies(graph, &device, None);
            latencies.iter_mut().for_each(|latency| latency.time = Nanos(0));
            latencies[0].time = Nanos(milliseconds * 1_000_000);
            let request = Request::new(graph, &device, &latencies, Bytes(1 << 30));
            finer(&Request { method: Method::Neap(options.clone()), ..request })
        };
        let usual = neap::Options::default();
        // In a 24th of 10 ms the link carries 8.3 MB, of 20 ms 16.7 MB, of 50 ms 41.7 MB.
        assert_eq!(size(&graph, 10, &usual), Some(4 << 20));
        assert_eq!(size(&graph, 20, &usual), Some(8 << 20));
        assert_eq!(size(&graph, 50, &usual), None);
        assert_eq!(size(&graph, 1, &usual), Some(FINEST));
        // The largest state has 9 MiB.
        assert_eq!(size(&graph, 39, &usual), None);
        for options in [
            neap::Options { finer: false, ..usual.clone() },
            neap::Options { split: false, ..usual.clone() },
        ] {
            assert_eq!(size(&graph, 10, &options), None);
        }
        let (small, _) = exact::wide_job(&mut exact::Random(0));
        assert_eq!(size(&small, 10, &usual), None);
    }
}
