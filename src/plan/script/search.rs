//! Which ranges run again.
//!
//! Sets are compared by a sketch of their plans: the planner's first choice, without addresses,
//! since PyTorch's allocator finds its own. Only the best few are planned with the usual effort.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use super::actions::{Actions, Plan, actions};
use super::course::Course;
use super::graph::{Planned, graph};
use super::problem::{Iteration, Problem, Range};
use super::ranges::{by_worth, families, unchained};
use super::updates::step_peak;
use super::world::{Way, World};
use super::{Answer, Ask, ScriptError};
use crate::arrange;
use crate::budget::{self, PlanError, Request, feasible};
use crate::contract::Event;
use crate::device::Profile;
use crate::method::Method;
use crate::neap;
use crate::parallel::in_parallel;
use crate::planner::{Given, Memory};
use crate::sim::engine::{self, Run};
use crate::sim::program::Program;
use crate::units::Bytes;

/// Fewer bytes are no budget.
const LEAST: u64 = 1024;

/// How often a piece of the step is halved, in bytes of states, where the budget asks for it.
const HALVINGS: u32 = 2;

/// Where swaps alone take no more than this in thousandths of the time without a plan, nothing runs
/// again; and where operators that run again take no more than that, calls are not looked at.
const FREE: u64 = 1005;
const GOOD: u64 = 1050;

/// How often a set is exchanged for a better one that differs in one range, and how many with a
/// range less and with one more are looked at each time.
const ROUNDS: usize = 8;
const NEAR: usize = 6;

/// How many sets are planned with the usual effort.
const FINALISTS: usize = 3;

/// For how many lower budgets sets are compared again where the allocator reserves too much. Each
/// is lower by half of what the quickest plan reserves too much, and at least by this part of it.
const BUDGETS: usize = 4;
pub(super) const LEAST_PART: u64 = 100;

/// How many targets are tried for a set whose actions exceed the budget.
const TARGETS: u32 = 4;

/// Small tensors move only where nothing else helps.
const LARGER: Bytes = Bytes(2 << 20);

/// How good a plan is, smaller being better: first what the allocator has room for, by time; then
/// what stands within the budget, by what is reserved; then the rest by what stands.
pub(super) type Worth = (Keeps, u64, u64);

/// What a plan keeps within the budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Keeps {
    /// What is reserved, or where that is not asked, what stands.
    All,
    /// What stands, while more is reserved.
    Standing,
    /// Nothing.
    Nothing,
}

/// A plan as the package carries it out.
pub(super) struct Found {
    pub actions: Actions,
    /// With that of giving memory back.
    pub time: u64,
    pub keeps: Keeps,
    /// What the planner was given of the budget.
    pub target: u64,
}

impl Found {
    fn met(&self) -> bool {
        self.keeps != Keeps::Nothing
    }

    const fn worth(&self) -> Worth {
        let bytes = self.actions.peak_bytes;
        match self.keeps {
            Keeps::All => (self.keeps, self.time, bytes),
            Keeps::Standing => (self.keeps, self.actions.reserved_bytes, self.time),
            Keeps::Nothing => (self.keeps, bytes, self.time),
        }
    }
}

/// What the planner decided.
pub(super) struct Decided {
    pub events: Vec<Event>,
    pub program: Program,
    pub run: Run,
    /// Whether a lower target may give a lower peak.
    pub reached: bool,
}

/// A plan of a world.
pub(super) struct Made<'a> {
    pub world: World<'a>,
    pub planned: Planned,
    pub found: Found,
}

impl Made<'_> {
    pub(super) const fn worth(&self) -> Worth {
        self.found.worth()
    }

    /// Takes another plan of the same world, if it is better.
    pub(super) fn improve(&mut self, other: Option<Found>) {
        if let Some(other) = other.filter(|other| other.worth() < self.worth()) {
            self.found = other;
        }
    }
}

/// The best plan so far.
struct Best<'a> {
    made: Made<'a>,
    /// The time of the quickest sketch that stands within the budget.
    quickest: Option<u64>,
    /// By how many bytes the quickest plan that stands within the budget reserves too much.
    missed: u64,
}

impl Best<'_> {
    fn is_no_slower(&self, than: Option<u64>) -> bool {
        let found = &self.made.found;
        found.keeps == Keeps::All && than.is_none_or(|time| found.time <= time)
    }

    fn is_quickest(&self) -> bool {
        self.is_no_slower(self.quickest)
    }
}

/// Sets of ranges that were sketched, in any order of the ranges.
type Key = BTreeSet<usize>;

/// The search of one way to plan.
pub(super) struct Search<'a> {
    pub problem: &'a Problem,
    iteration: &'a Iteration,
    pub way: Way,
    device: &'a Profile,
    /// What the allocator may reserve.
    pub limit: u64,
    /// What may stand at once, which leaves the allocator the rest.
    pub budget: u64,
    /// Whether it is predicted what that reserves.
    pub predicts: bool,
    pub divisible: bool,
    pub effort: u32,
    tried: BTreeMap<Key, Worth>,
}

/// The plan for a budget.
///
/// # Errors
/// When the recording contradicts itself, or the planner does. A budget that can't be met is none:
/// then the plan is the lowest that was found.
pub fn plan(problem: &Problem, device: &Profile, ask: &Ask) -> Result<Answer, ScriptError> {
    let left = |predicts: bool, less: i64| {
        if predicts { less } else { less.saturating_add(ask.unpredicted) }
    };
    let bound = |less: i64| ask.budget.saturating_add_signed(less.saturating_neg()).max(LEAST);
    let whole = problem.piece.bytes;
    let step = |way| {
        step_peak(&World::new(problem, way, Vec::new())) <= bound(left(ask.expandable, ask.less.0))
    };
    let ahead = step(Way { ahead: true, piece: whole, ..Way::default() });
    // Pieces are no smaller than the budget asks for, since each costs the host its time.
    let mut sizes = (0..=HALVINGS).map(|halved| whole >> halved);
    let piece = sizes.find(|&piece| step(Way { piece, ..Way::default() }));
    let usual = Way { ahead, piece: piece.unwrap_or(whole >> HALVINGS), ..Way::default() };
    let early = Way { early: true, piece: whole, ..Way::default() };
    let search = |way: Way| {
        let (less, banned) =
            if way.early { (ask.less.1, &ask.banned.1) } else { (ask.less.0, &ask.banned.0) };
        let predicts = ask.expandable && !way.early && !way.lend;
        let less = left(predicts, less);
        let iteration = problem.soon.as_ref().filter(|_| way.early).unwrap_or(&problem.usual);
        let divisible = problem.move_states && !way.early;
        let (tried, limit) = (BTreeMap::new(), bound(less));
        let effort = ask.effort.unwrap_or(neap::EFFORT);
        let budget = limit;
        let search = Search {
            problem,
            iteration,
            way,
            device,
            limit,
            budget,
            predicts,
            divisible,
            effort,
            tried,
        };
        search.best(banned)
    };
    let mut best = search(usual)?;
    // Other bytes may stand in the step than without a plan, and what is slow may be quicker with
    // pieces that are half as large, where states leave for the host.
    let slow = problem.usual.at_most(GOOD);
    for (halved, piece) in sizes.enumerate() {
        let is_slow =
            ask.effort != Some(0) && best.found.time > slow && !best.found.actions.away.is_empty();
        if !best.found.met() || (halved == 0 && is_slow) {
            let smaller = search(Way { piece, ..usual })?;
            best = better(best, smaller);
        }
    }
    if !best.found.met() && !problem.lend.is_empty() && problem.backward.is_some() {
        let lent = search(Way { lend: true, ..best.world.way })?;
        best = better(best, lent);
    }
    if problem.soon.is_some() {
        best = better(best, search(early)?);
    }
    let Made { world, planned, found } = best;
    let (met, Found { actions, time, .. }) = (found.met(), found);
    let course = Course::new(&world, &planned, &actions.ran).text();
    Ok(Answer {
        met,
        early: world.way.early,
        iteration_ns: time - actions.giving_back_ns,
        actions,
        course,
        ranges: world.ranges,
        ahead: world.way.ahead,
        piece: world.way.piece,
    })
}

/// The planner contradicted itself.
fn defect(error: &dyn ToString) -> PlanError {
    PlanError::Defect(error.to_string())
}

impl Iteration {
    /// A time in thousandths of that without a plan.
    fn at_most(&self, thousandths: u64) -> u64 {
        self.operators.iter().map(|o| o.ns).sum::<u64>() * thousandths / 1000
    }
}

pub(super) fn better<'a>(one: Made<'a>, other: Made<'a>) -> Made<'a> {
    if other.worth() < one.worth() { other } else { one }
}

impl<'a> Search<'a> {
    /// Whether the first plan that keeps to the budget is enough.
    pub(super) const fn takes_the_first(&self) -> bool {
        self.effort == 0
    }

    /// The best plan, of sets without these ranges.
    fn best(mut self, banned: &[usize]) -> Result<Made<'a>, ScriptError> {
        let banned: BTreeSet<usize> = banned.iter().copied().collect();
        let all = 0..self.iteration.ranges.len();
        let usable: Vec<usize> = all.filter(|number| !banned.contains(number)).collect();
        let mut best = self.round(&usable, None)?;
        for _ in 0..BUDGETS {
            let stands = best.made.found.actions.peak_bytes <= self.limit;
            let enough = self.takes_the_first() && best.made.found.keeps == Keeps::All;
            if !self.predicts || best.is_quickest() || !stands || enough {
                break;
            }
            self.budget =
                self.budget.saturating_sub((best.missed / 2).max(self.budget / LEAST_PART));
            best = self.round(&usable, Some(best))?;
        }
        Ok(best.made)
    }

    /// The best plan in which no more than the budget stands, or the one before.
    fn round(
        &mut self,
        usable: &[usize],
        before: Option<Best<'a>>,
    ) -> Result<Best<'a>, ScriptError> {
        let nothing = self.sketch(Vec::new(), false)?;
        self.tried.insert(Key::new(), nothing.worth());
        if !nothing.found.met() || nothing.found.time > self.iteration.at_most(FREE) {
            self.compare_sets(usable)?;
        }
        let mut sets: Vec<(Worth, Vec<usize>)> = std::mem::take(&mut self.tried)
            .into_iter()
            .map(|(set, worth)| (worth, set.into_iter().collect()))
            .collect();
        sets.sort();
        let mut rest = sets.split_off(sets.len().min(FINALISTS));
        // Where no sketch fits, swaps alone may reach less than their sketch says.
        if sets[0].0.0 == Keeps::Nothing {
            rest.retain(|(_, set)| set.is_empty());
            sets.append(&mut rest);
        }
        let quickest = sets
            .iter()
            .filter(|(worth, _)| worth.0 != Keeps::Nothing)
            .map(|(worth, _)| worth.1)
            .min();
        let before = match before {
            // What stands within less is no quicker.
            Some(before) if before.is_no_slower(quickest) => {
                return Ok(Best { quickest, ..before });
            }
            before => before,
        };
        let made = in_parallel(sets.len(), |at| self.carefully(&sets[at].1, usable.is_empty()));
        let mut made: Vec<Made<'a>> = made.into_iter().collect::<Result<_, _>>()?;
        made.sort_by_key(Made::worth);
        let stand = made.iter().filter(|made| made.found.actions.peak_bytes <= self.budget);
        let quick = stand.min_by_key(|made| made.found.time - made.found.actions.giving_back_ns);
        let reserved = quick.map_or(0, |made| made.found.actions.without_trims);
        let missed = reserved.saturating_sub(self.limit);
        let best = made.into_iter().chain(before.map(|b| b.made));
        let best = best.reduce(better).unwrap_or(nothing);
        let sets: Vec<Vec<usize>> = sets.into_iter().map(|(_, set)| set).collect();
        let made = self.fitted(&sets, best)?;
        Ok(Best { made, quickest, missed })
    }

    /// Sketches sets of ranges, those that follow from what came of others.
    fn compare_sets(&mut self, usable: &[usize]) -> Result<(), ScriptError> {
        let range = |number: usize| &self.iteration.ranges[number];
        let is_call = |number: &usize| range(*number).call.is_some();
        // Operators give back most for their time, so these come first, and stay beside calls.
        let operators = usable.iter().copied().filter(|number| !is_call(number));
        let cheap = unchained(self.iteration, operators);
        let mut best = self.along(&cheap, |set| set.to_vec())?;
        let made = best.1.clone();
        if best.0 <= (Keeps::All, self.iteration.at_most(GOOD), u64::MAX) {
            return Ok(());
        }
        let beside = |calls: &[usize], operators: &[usize]| {
            let about: Vec<_> = calls.iter().map(|&call| range(call)).collect();
            let fits = operators.iter().copied().filter(|&one| range(one).beside(&about));
            calls.iter().copied().chain(fits).collect::<Vec<_>>()
        };
        let iteration = self.iteration;
        for family in families(self.problem, iteration, usable) {
            let order = by_worth(self.problem, self.way, &family);
            best = self.along(&order, |calls| beside(calls, &made))?.min(best);
        }
        let calls: Vec<usize> = best.1.iter().copied().filter(is_call).collect();
        if !calls.is_empty() {
            let left = beside(&calls, &cheap).split_off(calls.len());
            let with = |more: &[usize]| [&calls[..], more].concat();
            best = self.along(&left, with)?.min(best);
        }
        for _ in 0..ROUNDS {
            let sets = self.neighbours(&best.1, usable);
            match self.attempt(sets)?.into_iter().min() {
                Some(better) if better.0 < best.0 => best = better,
                _ => break,
            }
        }
        Ok(())
    }

    /// Sets with one range less, those first that give back least for their time, and with one
    /// operator more, those first that give back most.
    fn neighbours(&self, set: &[usize], usable: &[usize]) -> Vec<Vec<usize>> {
        let range = |number: usize| &self.iteration.ranges[number];
        let worth =
            |number: usize| range(number).worth(range(number).bytes(self.problem), self.iteration);
        let mut inside = set.to_vec();
        inside.sort_by_key(|&number| (worth(number), Reverse(range(number).first)));
        // What is last in forward is there again when memory is full, and may give nothing back.
        let last = set.iter().copied().max_by_key(|&number| range(number).first);
        let removed = inside.into_iter().take(NEAR).chain(last);
        let without = |one: usize| set.iter().copied().filter(|&other| other != one).collect();
        let about: Vec<_> = set.iter().map(|&number| range(number)).collect();
        let apart = |number: &usize| {
            let one = range(*number);
            let chained = |other: &&Range| {
                one.inputs.iter().any(|storage| other.brings.contains(storage))
                    || other.inputs.contains(&one.brings[0])
            };
            !set.contains(number) && one.beside(&about) && !about.iter().any(chained)
        };
        let mut outside: Vec<usize> = usable.iter().copied().filter(apart).collect();
        outside.retain(|&number| range(number).call.is_none());
        outside.sort_by_key(|&number| (Reverse(worth(number)), Reverse(range(number).first)));
        let with = |one: usize| [set, &[one]].concat();
        removed.map(without).chain(outside.into_iter().take(NEAR).map(with)).collect()
    }

    /// The best beginning of `order`: a coarse look, then between the best's neighbours.
    fn along(
        &mut self,
        order: &[usize],
        set: impl Fn(&[usize]) -> Vec<usize>,
    ) -> Result<(Worth, Vec<usize>), ScriptError> {
        let count = order.len();
        let mut looked: BTreeSet<usize> = (0..5).map(|part| (count * part + 2) / 4).collect();
        loop {
            let all: Vec<usize> = looked.iter().copied().collect();
            let answers = self.attempt(all.iter().map(|&n| set(&order[..n])).collect())?;
            let least = answers.iter().map(|answer| answer.0).min();
            let at = answers.iter().position(|answer| Some(answer.0) == least).unwrap_or(0);
            let low = all[at.saturating_sub(1)];
            let high = all[(at + 1).min(all.len() - 1)];
            let before = looked.len();
            looked.extend([(low + all[at]) / 2, (all[at] + high) / 2]);
            if looked.len() == before {
                return Ok(answers[at].clone());
            }
        }
    }

    /// What sketches of several sets are worth.
    fn attempt(&mut self, sets: Vec<Vec<usize>>) -> Result<Vec<(Worth, Vec<usize>)>, ScriptError> {
        let key = |set: &[usize]| set.iter().copied().collect::<Key>();
        let mut new: Vec<&Vec<usize>> = Vec::new();
        for set in &sets {
            let known = self.tried.contains_key(&key(set));
            if !known && !new.iter().any(|other| key(other) == key(set)) {
                new.push(set);
            }
        }
        let this = &*self;
        let made =
            in_parallel(new.len(), |at| this.sketch(new[at].clone(), false).map(|m| m.worth()));
        for (set, worth) in new.into_iter().zip(made) {
            self.tried.insert(key(set), worth?);
        }
        Ok(sets.into_iter().map(|set| (self.tried[&key(&set)], set)).collect())
    }

    /// The planner's first choice for a set of ranges; with `allocator` also what the allocator
    /// reserves for it.
    fn sketch(&self, set: Vec<usize>, allocator: bool) -> Result<Made<'a>, ScriptError> {
        let world = World::new(self.problem, self.way, set);
        let planned = graph(&world, self.divisible)?;
        let found = self.lowering(self.budget, allocator, |target| {
            let Decided { events, program, run, reached } = self.decide(&planned, target)?;
            let actions = self.actions(&world, &planned, &events, &program, &run, allocator);
            Ok(Some((actions, run.iteration.0, reached)))
        })?;
        let found = found.ok_or_else(|| defect(&"it decided nothing"))?;
        Ok(Made { world, planned, found })
    }

    /// The planner's first choice for a target.
    pub(super) fn decide(&self, planned: &Planned, target: u64) -> Result<Decided, PlanError> {
        // Streaming is a search of its own, too long for each set; the finalists get it.
        let (stream, linger) = (false, false);
        let method = Method::Neap(neap::Options { stream, linger, ..options(0, false) });
        let Planned { graph, latencies, .. } = planned;
        let (link, pinned) = (&self.device.link, self.device.pinned_bytes);
        let given = Given { graph, latencies, link, pinned, target: target / 512 * 512 };
        let decided = method.decide(&given, &mut Memory::Nothing);
        let (events, reached) = (decided.emitted.events, decided.reached);
        let program = Program::new(graph, latencies, &events).map_err(|e| defect(&e))?;
        let run = engine::nominal(&program, link).map_err(|e| defect(&e))?;
        Ok(Decided { events, program, run, reached })
    }

    /// The best of the plans for ever lower targets: what a plan gives back at once stands until
    /// the next point at which the package acts. `plan` gives actions, their time, and whether a
    /// lower target may help.
    fn lowering(
        &self,
        mut target: u64,
        allocator: bool,
        mut plan: impl FnMut(u64) -> Result<Option<(Actions, u64, bool)>, ScriptError>,
    ) -> Result<Option<Found>, ScriptError> {
        let mut best: Option<Found> = None;
        for _ in 0..TARGETS {
            let Some((actions, time, may_be_lower)) = plan(target)? else { break };
            let over = actions.peak_bytes.saturating_sub(self.budget);
            let found = self.found(actions, time, target, allocator);
            if best.as_ref().is_none_or(|best| found.worth() < best.worth()) {
                best = Some(found);
            }
            if over == 0 || !may_be_lower || over.saturating_add(LEAST) > target {
                break;
            }
            target -= over;
        }
        Ok(best)
    }

    pub(super) const fn found(
        &self,
        actions: Actions,
        time: u64,
        target: u64,
        allocator: bool,
    ) -> Found {
        let keeps = if actions.peak_bytes > self.budget {
            Keeps::Nothing
        } else if allocator && actions.reserved_bytes > self.limit {
            Keeps::Standing
        } else {
            Keeps::All
        };
        Found { keeps, time: time + actions.giving_back_ns, actions, target }
    }

    /// What carries out a plan; with `allocator` also what the allocator reserves for it.
    pub(super) fn actions(
        &self,
        world: &World<'_>,
        planned: &Planned,
        events: &[Event],
        program: &Program,
        run: &Run,
        allocator: bool,
    ) -> Actions {
        let limit = if allocator && self.predicts { self.limit } else { 0 };
        let peak = engine::peak(&engine::memory(program, run)).0;
        actions(world, planned, &Plan { events, program, run, peak }, self.divisible, limit)
    }

    /// The best plan for a set of ranges that the usual effort finds; where none fits, the lowest.
    fn carefully(&self, set: &[usize], all_banned: bool) -> Result<Made<'a>, ScriptError> {
        let mut best = self.sketch(set.to_vec(), true)?;
        if self.takes_the_first() && best.found.met() {
            return Ok(best);
        }
        best.improve(self.made(&best, options(self.effort, true))?);
        // Swaps alone are many, and each costs the host its time: fewer may be as quick.
        if all_banned && best.found.met() {
            let fewer = neap::Options { min_swap: LARGER, ..options(self.effort, true) };
            best.improve(self.made(&best, fewer)?);
        }
        Ok(best)
    }

    /// A plan by these options, if there is one.
    pub(super) fn made(
        &self,
        sketch: &Made<'_>,
        options: neap::Options,
    ) -> Result<Option<Found>, ScriptError> {
        let Planned { graph, latencies, .. } = &sketch.planned;
        let with = |budget: u64| Request {
            method: Method::Neap(options.clone()),
            ..Request::new(graph, self.device, latencies, Bytes(budget))
        };
        let carried_out = |made: arrange::Arranged| {
            let budget::Planned { plan, program, run, .. } = made.planned;
            let events = &plan.jobs[0].events;
            let actions =
                self.actions(&sketch.world, &sketch.planned, events, &program, &run, true);
            (actions, run.iteration.0)
        };
        let stands = |found: &Found| found.actions.peak_bytes <= self.budget;
        let from = if stands(&sketch.found) { sketch.found.target } else { self.budget };
        let made = self.lowering(from, true, |target| {
            let made = feasible(arrange::make_for(&with(target), None))?.ok().map(carried_out);
            Ok(made.map(|(actions, time)| (actions, time, true)))
        })?;
        if stands(&sketch.found) || made.as_ref().is_some_and(stands) {
            return Ok(made);
        }
        let most = 2 * sketch.world.peak().max(self.budget);
        let lowest = self.lowering(from, true, |_| {
            let made = feasible(arrange::minimum_for(&with(most), None))?.ok().map(carried_out);
            Ok(made.map(|(actions, time)| (actions, time, false)))
        })?;
        Ok(made.into_iter().chain(lowest).min_by_key(Found::worth))
    }
}

/// A script runs its operators in its own order, each of them as a whole, and may write to a tensor
/// up to its last use. What runs again is not the planner's choice.
pub(super) fn options(effort: u32, portfolio: bool) -> neap::Options {
    let (recompute, reorder, split, early) = (false, false, false, false);
    neap::Options { effort, portfolio, recompute, reorder, split, early, ..Default::default() }
}
