//! Better decisions than the first ones: from start to start, then by exchange, until the effort is
//! spent.
//!
//! A step chooses all over again with one thing changed, and runs what came of it on
//! [`crate::clock`]; the best stays, so no effort makes a plan worse than the first choice. First
//! the greedy's own parameters are changed ([`super::Variant`]), one at a time, from the best so
//! far (coordinate descent); then single tensors are excluded from what they were chosen for, those
//! first that cost most: swaps that an operator waited for, recomputes that take longest. The
//! greedy exchanges them for something else, and takes back what is not needed then. Where steps
//! wait for the link whatever one does, the choice is made once more on the clock of the best run,
//! on which the link has the time that the waiting gives it. Where operators hardly wait, a quarter
//! of the effort finds what there is to find; large graphs get less of it (`OPERATORS`). When the
//! budget loop tightens the target, the search goes on from where it ended ([`Warm`]). Effort
//! counts steps, so that plans do not depend on the machine.

pub mod clear;
mod guided;
pub mod polish;
pub mod random;

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::sync::Arc;

use polish::Choice;

use super::choose::{Chooser, Setting};
use super::{Options, Rule, Variant, drop, extend, linger, prefetch, stream};
use crate::clock::{self, Clock};
use crate::job::Graph;
use crate::parallel::{in_parallel, width};
use crate::planner::{Given, Memory};
use crate::residency::Residencies;
use crate::units::TensorId;

struct Search<'a, 'o> {
    given: &'o Given<'a>,
    options: &'o Options,
    fresh: Residencies<'a>,
    /// Without a plan.
    nominal: Arc<Clock>,
    /// What choices are made on.
    clock: Arc<Clock>,
    left: u32,
    /// The steps that are left out where operators wait for no more than a [`CALM`]th.
    calm: u32,
    /// The steps that are left out where they wait for no more than a [`BUSY`]th.
    half: u32,
    /// What is ever used, and what of it may be swapped at first.
    all: Vec<TensorId>,
    large: Vec<TensorId>,
}

/// Where a search ended, for the next one with nearly the same target to begin.
#[derive(Clone, Debug)]
pub struct Warm {
    variant: Variant,
    rules: Vec<Rule>,
    clock: Arc<Clock>,
    choices: Vec<Choice>,
}

impl Warm {
    /// The same where these tensors stay.
    #[must_use]
    pub fn keeping(&self, kept: &BTreeSet<TensorId>) -> Self {
        let mut warm = self.clone();
        for tensor in kept {
            warm.rules[tensor.index()] = Rule::STAYS;
        }
        warm.choices.retain(|choice| !kept.contains(&choice.tensor));
        warm
    }
}

/// Where steps wait for no more than this part of the unplanned time, a quarter of the effort is
/// made.
const CALM: u64 = 64;

/// And where they wait for no more than this part of it, half on all but small graphs.
const BUSY: u64 = 2;

/// Streaming is tried where operators wait longer than this part of the unplanned time, with these
/// shares of what is over the target, in percent, without and with parameters.
const LONG: u64 = 32;
const STREAMED: [(u64, bool); 6] =
    [(40, false), (70, false), (95, false), (40, true), (70, true), (95, true)];

/// What is tried with lingering: as above, and the share of what is used last.
const LINGERING: [(u64, bool, u64); 5] =
    [(70, true, 0), (70, true, 20), (40, true, 40), (40, true, 60), (70, false, 60)];

/// Where tensors are streamed, the part of the target that stays free for tensors that come and go.
const ROOM: u64 = 32;

/// The largest graphs, in operators, for which the whole effort is made: where operators wait long
/// for the link, and where they do not. Beyond, the effort falls so that its time stays about the
/// same.
const OPERATORS: (u64, u64) = (2500, 400);

/// A share of the effort for a graph of `operators`, from a quarter to all of it.
fn share(effort: u32, most: u64, operators: usize) -> u32 {
    let scaled = u64::from(effort) * most / operators.max(1) as u64;
    u32::try_from(scaled.clamp(u64::from(effort / 4), u64::from(effort))).unwrap_or(effort)
}

/// What a step came to: over the target or not, time, load; the smaller the better.
type Key = (bool, u64, u64);

#[derive(Clone)]
struct Found<'a> {
    key: Key,
    residencies: Residencies<'a>,
    clock: Clock,
    variant: Variant,
    rules: Vec<Rule>,
    choices: Vec<Choice>,
}

/// What the greedy chose for a start.
struct Chosen<'a> {
    variant: Variant,
    rules: Vec<Rule>,
    choices: Vec<Choice>,
    residencies: Residencies<'a>,
}

impl Found<'_> {
    /// The longest time that may be better.
    const fn most(&self) -> u64 {
        if self.key.0 { u64::MAX } else { self.key.1 }
    }

    /// Becomes the first of the best, if that is better.
    fn keep_best(&mut self, all: Vec<Self>) {
        for found in all {
            if found.key < self.key {
                *self = found;
            }
        }
    }
}

/// The best decisions found, and where that ended. From where another search ended a quarter of the
/// effort is enough.
#[must_use]
pub fn search<'a>(
    given: &Given<'a>,
    options: &Options,
    memory: &Memory,
) -> (Residencies<'a>, Warm) {
    let mut search = Search::new(given, options);
    let n = given.graph.operators.len();
    search.left = share(options.effort, OPERATORS.0, n);
    search.calm = search.left - share(options.effort, OPERATORS.1, n);
    search.half = if n as u64 > OPERATORS.1 { search.left / 2 } else { 0 };
    let none = unswappable(given.graph, options.swap_share);
    if let Memory::Warm(warm) = memory {
        search.left = options.effort / 4;
        search.calm = options.effort / 8;
        search.half = options.effort / 8;
        search.clock = warm.clock.clone();
        let mut best = search.choose(warm.variant, &warm.rules);
        if !best.key.0 {
            search.rechoose(&mut best);
            search.vary(&mut best, &none, 0);
            search.exchange(&mut best);
            return search.done(best);
        }
        search.clock = search.nominal.clone();
    }
    let mut best = search.choose(Variant::FIRST, &none);
    if best.key.0 {
        // Recomputes want their inputs at one time; near the floor everything must be able to
        // leave.
        let swaps: Vec<Rule> =
            none.iter().map(|rule| Rule { no_recompute: true, ..*rule }).collect();
        let found = search.choose(Variant::FIRST, &swaps);
        if found.key < best.key {
            best = Found { rules: none.clone(), ..found };
        }
    }
    search.stream(&mut best, &none);
    if let Memory::Hints(hints, set) = memory {
        search.guided(&mut best, &none, hints, *set);
    }
    // Half of it from the clock without waiting, so that a plan without any is found where there is
    // one.
    let rest = search.left / 4 * 3;
    search.vary(&mut best, &none, rest);
    search.rechoose(&mut best);
    if !Arc::ptr_eq(&search.clock, &search.nominal) {
        search.vary(&mut best, &none, 0);
        search.rechoose(&mut best);
    } else {
        search.vary(&mut best, &none, 0);
    }
    search.exchange(&mut best);
    search.done(best)
}

/// Forbids to swap all but the largest tensors, as many as the limit allows.
fn unswappable(graph: &Graph, share_per_mille: u32) -> Vec<Rule> {
    let mut order: Vec<usize> = (0..graph.tensors.len()).collect();
    order.sort_by_key(|&t| (Reverse(graph.tensors[t].bytes), t));
    let may = order.len().saturating_mul(share_per_mille as usize) / 1000;
    let mut rules = vec![Rule::default(); order.len()];
    for &tensor in order.iter().skip(may) {
        rules[tensor].no_swap = true;
    }
    rules
}

impl<'a, 'o> Search<'a, 'o> {
    fn new(given: &'o Given<'a>, options: &'o Options) -> Self {
        let nominal = Arc::new(Clock::nominal(given.latencies));
        let fresh = Residencies::new(given.graph);
        let all: Vec<TensorId> = (0..fresh.lifetimes.len())
            .filter(|&i| !fresh.lifetimes[i].uses.is_empty() && fresh.lifetimes[i].bytes > 0)
            .map(TensorId::from_index)
            .collect();
        let least = options.min_swap.0;
        let large = all.iter().copied().filter(|&t| fresh.lifetime(t).bytes >= least).collect();
        let clock = nominal.clone();
        Self { given, options, fresh, nominal, clock, left: 0, calm: 0, half: 0, all, large }
    }

    fn done(self, best: Found<'a>) -> (Residencies<'a>, Warm) {
        let Found { variant, rules, choices, .. } = best;
        (best.residencies, Warm { variant, rules, clock: self.clock, choices })
    }

    /// How many steps may follow: none where no better plan is possible or no effort is left.
    fn steps(&self, best: &Found<'_>) -> u32 {
        // Where operators wait little, there is little to gain.
        let waited: u64 = best.clock.late.iter().map(|l| l.2).sum();
        let done = match waited {
            _ if best.key.0 => 0,
            _ if waited <= self.nominal.total / CALM => self.calm,
            _ if waited <= self.nominal.total / BUSY => self.half,
            _ => 0,
        };
        let ideal = !best.key.0 && best.key.1 <= self.nominal.total;
        if ideal { 0 } else { self.left.saturating_sub(done) }
    }

    /// Whether a step may follow; if so, counts it.
    fn step(&mut self, best: &Found<'_>) -> bool {
        let may = self.steps(best) > 0;
        self.left -= u32::from(may);
        may
    }

    /// How many of the next steps are made at once, of those that may follow. What the first one
    /// that is better leaves behind is made again, so the number changes nothing but the time.
    fn at_once(most: u32) -> usize {
        width().min(usize::try_from(most).unwrap_or(usize::MAX))
    }

    fn choose(&self, variant: Variant, rules: &[Rule]) -> Found<'a> {
        self.timed(self.chosen(variant, rules.to_vec(), None), u64::MAX)
    }

    fn chooser<'s>(&'s self, variant: Variant, rules: &'s [Rule]) -> Chooser<'a, 's> {
        let Given { latencies, link, pinned, target, .. } = *self.given;
        let mut residencies = self.fresh.clone();
        if variant.extend && self.options.extend {
            extend::extend(&mut residencies, self.options.min_swap.0);
        }
        let setting = Setting {
            latencies,
            link,
            pinned,
            target,
            options: self.options,
            clock: &self.clock,
            variant,
            rules,
            all: &self.all,
            large: &self.large,
        };
        Chooser::new(residencies, setting)
    }

    /// What comes of each of `count` starts; what takes longer than `most` does not count. (In one
    /// piece: what runs on all cores is compiled anew for every caller.)
    fn choose_each<'s>(
        &self,
        count: usize,
        most: u64,
        start: &(dyn Fn(usize) -> (Variant, Cow<'s, [Rule]>) + Sync),
    ) -> Vec<Found<'a>> {
        in_parallel(count, |at| {
            let (variant, rules) = start(at);
            self.timed(self.chosen(variant, rules.into_owned(), None), most)
        })
    }

    /// As [`Self::choose`], after choices that were made before; what takes longer than `most` does
    /// not count.
    fn choose_after(
        &self,
        (variant, rules): (Variant, &[Rule]),
        choices: &[Choice],
        most: u64,
    ) -> Found<'a> {
        self.timed(self.chosen(variant, rules.to_vec(), Some(choices)), most)
    }

    /// What the greedy chooses.
    fn chosen(&self, variant: Variant, rules: Vec<Rule>, choices: Option<&[Choice]>) -> Chosen<'a> {
        let mut chooser = self.chooser(variant, &rules);
        match choices {
            Some(choices) => chooser.replay(choices),
            None if variant.streamed > 0 => chooser.stream(),
            None => {}
        }
        chooser.rounds();
        let (choices, residencies) = (chooser.choices, chooser.residencies);
        Chosen { variant, rules, choices, residencies }
    }

    /// What was chosen, with the instants at which copies run, and the time that it takes. If that
    /// is more than `most` however copies run, they stay as they are.
    fn timed(&self, chosen: Chosen<'a>, most: u64) -> Found<'a> {
        let Given { latencies, link, target, .. } = *self.given;
        let Chosen { variant, rules, choices, mut residencies } = chosen;
        if self.options.drop {
            // What is streamed needs room to come while others leave.
            let room = if variant.streamed > 0 { target / ROOM } else { 0 };
            drop::drop(&mut residencies, latencies, target - room, variant.ahead);
        }
        if variant.linger > 0 {
            linger::linger(&mut residencies, &self.clock, link, target, variant);
        }
        let mut clock = clock::run(&residencies, latencies, link);
        let peak = residencies.load.peak().1;
        // Without any waiting.
        let least = self.nominal.total + residencies.made_again(latencies);
        if self.options.prefetch && peak <= target && least <= most {
            let mut best = prefetch::swaps(&residencies);
            for slack in [variant.slack, 33] {
                for _ in 0..2 {
                    if clock.total <= least {
                        break;
                    }
                    prefetch::fit(
                        &mut residencies,
                        &clock,
                        link,
                        target,
                        Variant { slack, ..variant },
                        self.options.set_apart,
                    );
                    let now = clock::run(&residencies, latencies, link);
                    if now.total >= clock.total {
                        prefetch::restore(&mut residencies, &best);
                        break;
                    }
                    clock = now;
                    best = prefetch::swaps(&residencies);
                }
            }
        }
        let peak = residencies.load.peak().1;
        Found {
            key: (peak > target, clock.total, peak),
            residencies,
            clock,
            variant,
            rules,
            choices,
        }
    }

    /// Streams some of what one operator alone uses, where operators wait long.
    fn stream(&mut self, best: &mut Found<'a>, none: &[Rule]) {
        let all = stream::streamable(&self.fresh, self.options.min_swap.0, true);
        let bytes: u64 = all.iter().map(|&t| self.fresh.lifetime(t).bytes).sum();
        let missing = self.fresh.load.peak().1.saturating_sub(self.given.target);
        let waits = best.key.0 || best.key.1 > self.nominal.total + self.nominal.total / LONG;
        if !waits || !self.options.streams() || missing == 0 || bytes < missing / 4 {
            return;
        }
        let streamed = STREAMED.map(|(streamed, parameters)| Variant {
            streamed,
            parameters,
            ..Variant::FIRST
        });
        let lingering = LINGERING.map(|(streamed, parameters, last)| Variant {
            streamed,
            parameters,
            last,
            linger: u32::MAX,
            ..Variant::FIRST
        });
        let lingering = lingering.into_iter().filter(|_| self.options.lingering);
        let variants: Vec<Variant> = streamed.into_iter().chain(lingering).collect();
        best.keep_best(
            self.choose_each(variants.len(), best.most(), &|at| (variants[at], none.into())),
        );
    }

    /// One parameter at a time, from the best so far, until none helps or no more than `rest` steps
    /// are left.
    fn vary(&mut self, best: &mut Found<'a>, none: &[Rule], rest: u32) {
        let mut tried = vec![best.variant];
        loop {
            let from = best.variant;
            let mut turn = 0;
            loop {
                // Without the switch it is the same again.
                let same = |of: &Variant| {
                    of.extend && !self.options.extend
                        || of.shift && !self.options.shift
                        || of.early && !self.options.early
                };
                let next: Vec<(usize, Variant)> = best
                    .variant
                    .neighbours()
                    .into_iter()
                    .enumerate()
                    .skip(turn)
                    .filter(|(_, variant)| !same(variant) && !tried.contains(variant))
                    .take(width())
                    .collect();
                if next.is_empty() {
                    break;
                }
                let most = self.steps(best).min(self.left.saturating_sub(rest));
                if most == 0 {
                    return;
                }
                let count = Self::at_once(most).min(next.len());
                let all = self.choose_each(count, best.most(), &|at| (next[at].1, none.into()));
                for ((at, variant), found) in next.into_iter().zip(all) {
                    self.left -= 1;
                    tried.push(variant);
                    turn = at + 1;
                    if found.key < best.key {
                        *best = found;
                        break;
                    }
                }
            }
            if best.variant == from {
                return;
            }
        }
    }

    /// On the clock of the best run, again and again while that helps.
    fn rechoose(&mut self, best: &mut Found<'a>) {
        while !best.clock.late.is_empty() && self.step(best) {
            let before = std::mem::replace(&mut self.clock, Arc::new(best.clock.clone()));
            let found = self.choose(best.variant, &best.rules);
            if found.key >= best.key {
                self.clock = before;
                return;
            }
            *best = found;
        }
    }

    /// What costs most may not be chosen again.
    fn exchange(&mut self, best: &mut Found<'a>) {
        let mut tried: BTreeSet<(TensorId, bool)> = BTreeSet::new();
        loop {
            let mut next: Vec<(TensorId, bool)> = Vec::new();
            let most = Self::at_once(self.steps(best));
            for (tensor, swap) in self.dearest(best) {
                if next.len() == most {
                    break;
                }
                if !tried.contains(&(tensor, swap)) && !next.contains(&(tensor, swap)) {
                    next.push((tensor, swap));
                }
            }
            if next.is_empty() {
                return;
            }
            let all = self.choose_each(next.len(), best.most(), &|at| {
                let (tensor, swap) = next[at];
                let mut rules = best.rules.clone();
                rules[tensor.index()] = rules[tensor.index()].without(swap);
                (best.variant, rules.into())
            });
            for (change, found) in next.into_iter().zip(all) {
                self.left -= 1;
                tried.insert(change);
                if found.key < best.key {
                    *best = found;
                    break;
                }
            }
        }
    }

    /// What was chosen, the dearest first: tensors, and whether they are swapped or made again.
    fn dearest(&self, best: &Found<'_>) -> impl Iterator<Item = (TensorId, bool)> + use<> {
        let mut dear: Vec<(u64, TensorId, bool)> =
            best.clock.late.iter().map(|&(tensor, _, waited)| (waited, tensor, true)).collect();
        for (&(_, tensor), chain) in &best.residencies.chains {
            let times = chain.operators.iter().map(|id| self.given.latencies[id.index()].time.0);
            dear.push((times.sum(), tensor, false));
        }
        dear.sort_by_key(|&(cost, tensor, swap)| (Reverse(cost), tensor, swap));
        dear.into_iter().map(|(_, tensor, swap)| (tensor, swap))
    }
}
