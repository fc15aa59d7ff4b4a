//! Which ranges run again.
//!
//! Sets are compared by a sketch of their plans: the planner's first choice, without addresses,
//! since PyTorch's allocator finds its own. Only the best few are planned with the usual effort.

use std::collections::{BTreeMap, BTreeSet};

use super::actions::{self, Plan};
use super::graph::{Planned, graph};
use super::problem::{Iteration, Problem};
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

/// How many of the last ranges are left out on trial.
const PRUNED: usize = 2;

/// How many sets are planned with the usual effort.
const FINALISTS: usize = 3;

/// Small tensors move only where nothing else helps.
const LARGER: Bytes = Bytes(2 << 20);

/// How good a plan is, smaller being better: first what fits, by time; else by peak.
type Worth = (bool, u64, u64);

const fn worth(met: bool, peak: u64, time: u64) -> Worth {
    if met { (false, time, peak) } else { (true, peak, time) }
}

/// A plan of a world, with what it was made of.
struct Made<'a> {
    world: World<'a>,
    planned: Planned,
    events: Vec<Event>,
    program: Program,
    run: Run,
    peak: u64,
    met: bool,
}

impl Made<'_> {
    const fn worth(&self) -> Worth {
        worth(self.met, self.peak, self.run.iteration.0)
    }
}

/// Sets of ranges that were sketched, in any order of the ranges.
type Key = BTreeSet<usize>;

/// The search of one way to plan.
struct Search<'a> {
    problem: &'a Problem,
    iteration: &'a Iteration,
    way: Way,
    device: &'a Profile,
    budget: u64,
    divisible: bool,
    effort: u32,
    tried: BTreeMap<Key, Worth>,
}

/// The plan for a budget.
///
/// # Errors
/// When the recording contradicts itself, or the planner does. A budget that can't be met is none:
/// then the plan is the lowest that was found.
pub fn plan(
    problem: &Problem,
    device: &Profile,
    ask: &Ask,
) -> Result<Answer, ScriptError> {
    let made = once(problem, device, ask, ask.less)?;
    let over = made.actions.peak_bytes.saturating_sub(ask.budget);
    if !made.met || over == 0 {
        return Ok(made);
    }
    // Bytes that the planner gives back at once stand until the next point.
    for part in [1, 2, 4] {
        let more = over.div_ceil(part);
        let less = (ask.less.0.saturating_add(more), ask.less.1.saturating_add(more));
        let lower = once(problem, device, ask, less)?;
        if lower.met && lower.actions.peak_bytes <= ask.budget {
            return Ok(lower);
        }
    }
    Ok(made)
}

fn once(
    problem: &Problem,
    device: &Profile,
    ask: &Ask,
    less: (u64, u64),
) -> Result<Answer, ScriptError> {
    let bound = |less: u64| ask.budget.saturating_sub(less).max(LEAST);
    let whole = problem.piece.bytes;
    let step = |way| step_peak(&World::new(problem, way, Vec::new())) <= bound(less.0);
    let ahead = step(Way { ahead: true, piece: whole, ..Way::default() });
    // Pieces are no smaller than the budget asks for, since each costs the host its time.
    let mut sizes = (0..=HALVINGS).map(|halved| whole >> halved);
    let piece = sizes.find(|&piece| step(Way { piece, ..Way::default() }));
    let usual = Way { ahead, piece: piece.unwrap_or(whole >> HALVINGS), ..Way::default() };
    let early = Way { early: true, piece: whole, ..Way::default() };
    let search = |way: Way| {
        let (less, banned) = if way.early {
            (less.1, &ask.banned.1)
        } else {
            (less.0, &ask.banned.0)
        };
        let iteration = problem.soon.as_ref().filter(|_| way.early).unwrap_or(&problem.usual);
        let divisible = problem.move_states && !way.early;
        let (tried, budget) = (BTreeMap::new(), bound(less));
        let effort = ask.effort.unwrap_or(neap::EFFORT);
        Search { problem, iteration, way, device, budget, divisible, effort, tried }.best(banned)
    };
    let mut best = search(usual)?;
    if !best.met && !problem.lend.is_empty() {
        best = better(best, search(Way { lend: true, ..usual })?);
    }
    if problem.soon.is_some() {
        best = better(best, search(early)?);
    }
    let Made { world, planned, events, program, run, peak, met } = best;
    let plan = Plan { events: &events, program: &program, run: &run, peak };
    let divisible = problem.move_states && !world.way.early;
    Ok(Answer {
        met,
        early: world.way.early,
        iteration_ns: run.iteration.0,
        actions: actions::actions(&world, &planned, &plan, divisible),
        ranges: world.ranges,
        ahead: world.way.ahead,
        piece: world.way.piece,
    })
}

fn better<'a>(one: Made<'a>, other: Made<'a>) -> Made<'a> {
    if other.worth() < one.worth() { other } else { one }
}

impl<'a> Search<'a> {
    /// The best plan, of sets without these ranges.
    fn best(mut self, banned: &[usize]) -> Result<Made<'a>, ScriptError> {
        let nothing = self.sketch(Vec::new())?;
        if !nothing.met || nothing.run.iteration.0 > self.at_most(FREE) {
            self.compare_sets(banned)?;
        }
        self.tried.entry(Key::new()).or_insert(nothing.worth());
        let mut sets: Vec<(Worth, Vec<usize>)> = std::mem::take(&mut self.tried)
            .into_iter()
            .map(|(set, worth)| (worth, set.into_iter().collect()))
            .collect();
        sets.sort();
        sets.truncate(FINALISTS);
        let made = in_parallel(sets.len(), |at| self.carefully(&sets[at].1));
        let mut best = nothing;
        for made in made {
            best = better(best, made?);
        }
        Ok(best)
    }

    /// A time in thousandths of that without a plan.
    fn at_most(&self, thousandths: u64) -> u64 {
        self.iteration.operators.iter().map(|o| o.ns).sum::<u64>() / 1000 * thousandths
    }

    /// Sketches sets of ranges, those that follow from what came of others.
    fn compare_sets(&mut self, banned: &[usize]) -> Result<(), ScriptError> {
        let banned: BTreeSet<usize> = banned.iter().copied().collect();
        let all = 0..self.iteration.ranges.len();
        let usable: Vec<usize> = all.filter(|number| !banned.contains(number)).collect();
        let range = |number: usize| &self.iteration.ranges[number];
        let is_call = |number: &usize| range(*number).call.is_some();
        // Operators give back most for their time, so these come first, and stay beside calls.
        let operators = usable.iter().copied().filter(|number| !is_call(number));
        let cheap = unchained(self.iteration, operators);
        let mut best = self.along(&cheap, |set| set.to_vec())?;
        let made = best.1.clone();
        if best.0 <= (false, self.at_most(GOOD), u64::MAX) {
            return Ok(());
        }
        let beside = |calls: &[usize], operators: &[usize]| {
            let about: Vec<_> = calls.iter().map(|&call| range(call)).collect();
            let fits = operators.iter().copied().filter(|&one| range(one).beside(&about));
            calls.iter().copied().chain(fits).collect::<Vec<_>>()
        };
        let iteration = self.iteration;
        for family in families(self.problem, iteration, &usable) {
            let order = by_worth(self.problem, self.way, &family);
            best = self.along(&order, |calls| beside(calls, &made))?.min(best);
        }
        let calls: Vec<usize> = best.1.iter().copied().filter(is_call).collect();
        if !calls.is_empty() {
            let left = beside(&calls, &cheap).split_off(calls.len());
            let with = |more: &[usize]| [&calls[..], more].concat();
            best = self.along(&left, with)?.min(best);
        }
        // The last of the forward often gives nothing back: it is there again when memory is full.
        let mut last = best.1.clone();
        last.sort_by_key(|&number| std::cmp::Reverse(range(number).first));
        for one in last.into_iter().take(PRUNED) {
            let without = best.1.iter().copied().filter(|&other| other != one).collect();
            best = self.attempt(vec![without])?.remove(0).min(best);
        }
        Ok(())
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
        let made = in_parallel(new.len(), |at| this.sketch(new[at].clone()).map(|m| m.worth()));
        for (set, worth) in new.into_iter().zip(made) {
            self.tried.insert(key(set), worth?);
        }
        Ok(sets.into_iter().map(|set| (self.tried[&key(&set)], set)).collect())
    }

    fn world(&self, set: Vec<usize>) -> Result<(World<'a>, Planned), ScriptError> {
        let world = World::new(self.problem, self.way, set);
        let planned = graph(&world, self.divisible)?;
        Ok((world, planned))
    }

    /// The planner's first choice for a set of ranges.
    fn sketch(&self, set: Vec<usize>) -> Result<Made<'a>, ScriptError> {
        let (world, planned) = self.world(set)?;
        let method = Method::Neap(options(0, false));
        let Planned { graph, latencies, .. } = &planned;
        let (link, pinned) = (&self.device.link, self.device.pinned_bytes);
        let target = self.budget / 512 * 512;
        let given = Given { graph, latencies, link, pinned, target };
        let decided = method.decide(&given, &mut Memory::Nothing);
        let events = decided.emitted.events;
        let defect = |e: &dyn ToString| PlanError::Defect(e.to_string());
        let program = Program::new(graph, latencies, &events).map_err(|e| defect(&e))?;
        let run = engine::nominal(&program, link).map_err(|e| defect(&e))?;
        let peak = engine::peak(&engine::memory(&program, &run)).0;
        let (met, peak) = if decided.reached { (true, peak) } else { (false, decided.peak.1) };
        Ok(Made { world, planned, events, program, run, peak, met })
    }

    /// The best plan for a set of ranges that the usual effort finds; where none fits, the lowest.
    fn carefully(&self, set: &[usize]) -> Result<Made<'a>, ScriptError> {
        let sketch = self.sketch(set.to_vec())?;
        if self.effort == 0 && sketch.met {
            return Ok(sketch);
        }
        let Planned { graph, latencies, .. } = &sketch.planned;
        let with = |min_swap: Option<Bytes>| {
            let mut options = options(self.effort, true);
            options.min_swap = min_swap.unwrap_or(options.min_swap);
            let budget = Bytes(self.budget);
            Request {
                method: Method::Neap(options),
                ..Request::new(graph, self.device, latencies, budget)
            }
        };
        let mut made = feasible(arrange::make_for(&with(None), None))?.ok();
        if made.is_none() && !sketch.met {
            made = feasible(arrange::minimum_for(&with(None), None))?.ok();
        }
        // Swaps alone are many. Often fewer are as quick, and each costs the host its time.
        if set.is_empty() && self.iteration.ranges.is_empty() && made.is_some() {
            let fewer = feasible(arrange::make_for(&with(Some(LARGER)), None))?.ok();
            let time = |made: &arrange::Arranged| made.planned.run.iteration;
            let fits = |made: &&arrange::Arranged| made.planned.bound().0 <= self.budget;
            if let (Some(one), Some(other)) = (&made, fewer.as_ref().filter(fits))
                && (time(other) < time(one) || one.planned.bound().0 > self.budget)
            {
                made = fewer;
            }
        }
        let Some(made) = made else { return Ok(sketch) };
        let budget::Planned { mut plan, program, run, .. } = made.planned;
        let (peak, met) = (plan.figures.peak_bytes.0, plan.figures.arena_bytes.0 <= self.budget);
        let events = std::mem::take(&mut plan.jobs[0].events);
        if worth(met, peak, run.iteration.0) >= sketch.worth() {
            return Ok(sketch);
        }
        Ok(Made { events, program, run, peak, met, ..sketch })
    }
}

/// A script runs its operators in its own order, each of them as a whole, and may write to a tensor
/// up to its last use. What runs again is not the planner's choice.
fn options(effort: u32, portfolio: bool) -> neap::Options {
    let (recompute, reorder, split, early) = (false, false, false, false);
    neap::Options { effort, portfolio, recompute, reorder, split, early, ..Default::default() }
}
