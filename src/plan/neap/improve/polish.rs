//! Polishing: one choice of a plan is changed, and all others are made again as they were.
//!
//! The greedy choice goes on from what it chose before, so a change early in it changes everything
//! behind it, and what that comes to is a matter of luck. Here the choices of the best plan are
//! made again one by one, in their order, but for one:
//! - a tensor that is made again is swapped, in the least room or with as much as its copies need;
//! - a copy that an operator waits for gets the room to come in time;
//! - a choice is left out.
//!
//! And the tensors that leave last stay over the end of the iteration ([`crate::neap::linger`]),
//! either before other changes or after them. The choices of a search at random ([`super::random`])
//! are changed too.
//!
//! What is then over the target is chosen as in any step, so that room for one tensor is taken
//! from others. The dearest are changed first, and what is quicker stays. The plan itself comes
//! from [`super`].

use std::cmp::Reverse;
use std::collections::BTreeSet;

use super::{Found, OPERATORS, Search, Warm, share};
use crate::neap::{Options, Variant};
use crate::parallel::{in_parallel, width};
use crate::planner::Given;
use crate::residency::{Gap, Residencies, Swap};
use crate::sim::engine::copy_time;
use crate::sim::program::Direction;
use crate::units::TensorId;

/// What was decided for the gap that ends with the use in slot `until`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The tensor.
    pub tensor: TensorId,
    /// The slot of the next use.
    pub until: u32,
    /// The decision.
    pub made: Made,
    /// When its copy out and its copy back may run; `None` where they do not move for others.
    pub windows: Option<[(u64, u64); 2]>,
}

/// What was decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Made {
    /// It leaves and comes back.
    Swapped(Swap),
    /// It is made again; if the load is below the limit, what it is made from stays.
    Again(u64),
}

impl Choice {
    /// Its gap; `None` where other choices have left no slot in it.
    #[must_use]
    pub fn gap(&self, residencies: &Residencies<'_>) -> Option<usize> {
        let gap = residencies.gap_until(self.tensor, self.until)?;
        let longest = Gap::Swap(residencies.tightest(self.tensor, gap));
        let away = residencies.away(self.tensor, gap, longest);
        away.iter().any(|(from, until)| from < until).then_some(gap)
    }

    /// `swap` unchanged, if the gap as it is now is long enough for it; otherwise the tightest swap
    /// of the gap, with the instants at which `swap`'s copies were meant to begin.
    #[must_use]
    pub fn swap(&self, residencies: &Residencies<'_>, gap: usize, swap: Swap) -> Swap {
        let tight = residencies.tightest(self.tensor, gap);
        let same = swap.out_until >= tight.out_until
            && swap.out_place >= residencies.leaves_from(self.tensor, gap)
            && swap.back_from <= tight.back_from;
        if same { swap } else { Swap { starts: swap.starts, ..tight } }
    }

    /// Whether nothing is decided for a gap yet.
    #[must_use]
    pub fn open(&self, residencies: &Residencies<'_>, gap: usize) -> bool {
        residencies.gap(self.tensor, gap) == Gap::Keep
    }
}

/// How a choice is changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Change {
    /// It is swapped, and away as long as possible.
    Tight,
    /// It is swapped with the time that its copies need.
    Wide,
    /// It is left out.
    Out,
}

/// A change of a tensor's choice for the gap that ends with the use in a slot.
type Changed = (TensorId, u32, Change);

/// No plan got quicker by more than this part of its time; 7 % was the most.
pub const MOST: u64 = 8;

/// How many targets are tried.
const TARGETS: u64 = 8;

/// Steps of polishing for each step of effort.
const STEPS: u32 = 2;

/// How many operators are decided for in all when pairs of changes are tried, for each step of
/// effort.
const PAIRED: u64 = 1 << 14;

/// How many tensors that leave last stay over the end of the iteration, tried in turn. With all of
/// them the first copies of the next iteration have to wait.
const LINGERING: [u32; 5] = [1, 2, 4, 8, 16];

/// What is done before single choices are changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Before {
    /// Nothing.
    Nothing,
    /// Tensors that leave last stay over the end of the iteration. Where that is no quicker nothing
    /// is changed.
    Linger,
    /// Rules are changed at random ([`super::random`]). Where that is no quicker nothing is
    /// changed.
    Random,
}

/// Decides which changes count.
pub trait Judge: Sync {
    /// What is known of a change that is better.
    type Verdict: Send;

    /// Looks at the decisions that a change comes to; `None` where they are no better than the
    /// best. Several changes are looked at at once.
    fn look(&self, residencies: &Residencies<'_>) -> Option<Self::Verdict>;

    /// Makes a change the best.
    fn take(&mut self, verdict: Self::Verdict);
}

/// Changes what a search chose for the first target, at the second one. What is quicker is taken if
/// the judge finds it better.
pub fn polish(
    given: [Given<'_>; 2],
    options: &Options,
    warm: &Warm,
    before: Before,
    judge: &mut impl Judge,
) {
    let mut search = Search::new(&given[0], options);
    search.clock = warm.clock.clone();
    // Where tensors stay that were chosen at first, the load is higher.
    let start = Given { target: given[0].target.max(search.load(warm)), ..given[0] };
    search.given = &start;
    let from = (warm.variant, &warm.rules[..]);
    let mut best = search.choose_after(from, &warm.choices, u64::MAX);
    search.left =
        share(options.effort.saturating_mul(STEPS), OPERATORS.1, given[0].graph.operators.len());
    // As near to the second target as what comes of it can be placed.
    let spread = given[1].target.saturating_sub(start.target);
    let raised = (0..TARGETS).map(|part| given[1].target - spread * part / TARGETS);
    let raised: Vec<Given<'_>> = raised.map(|target| Given { target, ..given[1] }).collect();
    for raised in raised.iter().filter(|_| spread > 0 && !best.key.0) {
        let before = std::mem::replace(&mut search.given, raised);
        let found = search.choose_after(from, &warm.choices, best.most());
        if found.key < best.key
            && let Some(verdict) = judge.look(&found.residencies)
        {
            judge.take(verdict);
            best = found;
            break;
        }
        search.given = before;
    }
    let quicker = !best.key.0
        && match before {
            Before::Nothing => true,
            Before::Linger => search.linger(&mut best, judge),
            Before::Random => search.at_random(&mut best, judge),
        };
    if !quicker {
        return;
    }
    while search.pass(&mut best, judge) {}
    if before != Before::Linger && search.linger(&mut best, judge) {
        while search.pass(&mut best, judge) {}
    }
    if options.pairs {
        search.pairs(&mut best, judge);
    }
}

impl<'a> Search<'a, '_> {
    /// The load with the choices of another search.
    fn load(&self, warm: &Warm) -> u64 {
        let mut chooser = self.chooser(warm.variant, &warm.rules);
        chooser.replay(&warm.choices);
        chooser.residencies.load.peak().1
    }

    /// The best with other parameters or choices, if it is better by its key and by the judge.
    fn better<J: Judge>(
        &self,
        best: &Found<'a>,
        variant: Variant,
        choices: &[Choice],
        judge: &J,
    ) -> Option<(Found<'a>, J::Verdict)> {
        let found = self.choose_after((variant, &best.rules), choices, best.most());
        let quicker = found.key < best.key;
        let verdict = quicker.then(|| judge.look(&found.residencies)).flatten()?;
        Some((found, verdict))
    }

    /// Lets tensors that leave last stay over the end. Whether that was for the better.
    fn linger(&self, best: &mut Found<'a>, judge: &mut impl Judge) -> bool {
        if best.variant.linger > 0 || !self.options.linger {
            return false;
        }
        let before = best.key;
        let mut turn = 0;
        while turn < LINGERING.len() {
            let next = &LINGERING[turn..LINGERING.len().min(turn + width())];
            let all = in_parallel(next.len(), |at| {
                let variant = Variant { linger: next[at], ..best.variant };
                self.better(best, variant, &best.choices, judge)
            });
            for found in all {
                turn += 1;
                if let Some((found, verdict)) = found {
                    judge.take(verdict);
                    *best = found;
                    break;
                }
            }
        }
        best.key < before
    }

    /// Every change once, the dearest first. Whether one of them was for the better.
    fn pass(&mut self, best: &mut Found<'a>, judge: &mut impl Judge) -> bool {
        let mut tried: BTreeSet<Changed> = BTreeSet::new();
        let before = best.key;
        loop {
            let most = Self::at_once(self.left.max(1));
            // `None` stands for a change that makes no sense.
            let mut next: Vec<(Changed, Option<Vec<Choice>>)> = Vec::new();
            let mut count = 0;
            for (_, at, change) in self.changes(best) {
                if count == most {
                    break;
                }
                let Choice { tensor, until, .. } = best.choices[at];
                if !tried.contains(&(tensor, until, change)) {
                    let choices = self.changed(best, at, change);
                    count += usize::from(choices.is_some());
                    next.push(((tensor, until, change), choices));
                }
            }
            if count == 0 {
                break;
            }
            if self.left == 0 || best.key.1 <= self.nominal.total {
                return false;
            }
            let all = in_parallel(next.len(), |at| {
                self.better(best, best.variant, next[at].1.as_ref()?, judge)
            });
            for ((change, choices), found) in next.into_iter().zip(all) {
                tried.insert(change);
                self.left -= u32::from(choices.is_some());
                if let Some((found, verdict)) = found {
                    judge.take(verdict);
                    *best = found;
                    break;
                }
            }
        }
        best.key < before
    }

    /// Two changes at once, those of the dearest first, until no pair is for the better.
    fn pairs(&self, best: &mut Found<'a>, judge: &mut impl Judge) {
        let operators = self.given.graph.operators.len().max(1) as u64;
        let mut left = u64::from(self.options.effort) * PAIRED / operators;
        'better: while left > 0 && best.key.1 > self.nominal.total {
            let mut pairs = self.pairs_of(best);
            while left > 0 {
                let most = usize::try_from(left).unwrap_or(usize::MAX).min(width());
                let next: Vec<Vec<Choice>> = pairs.by_ref().take(most).collect();
                if next.is_empty() {
                    return;
                }
                let all =
                    in_parallel(next.len(), |at| self.better(best, best.variant, &next[at], judge));
                for found in all {
                    left -= 1;
                    if let Some((found, verdict)) = found {
                        judge.take(verdict);
                        *best = found;
                        continue 'better;
                    }
                }
            }
        }
    }

    /// The choices with two of them changed, for each pair that makes sense. They are made one by
    /// one, since in large graphs there are millions.
    fn pairs_of(&self, best: &Found<'a>) -> impl Iterator<Item = Vec<Choice>> + use<> {
        let made = |at: usize, change| -> Option<Option<Made>> {
            match change {
                Change::Out => Some(None),
                _ => Some(Some(self.changed(best, at, change)?[at].made)),
            }
        };
        let changes: Vec<(usize, Option<Made>)> = (self.changes(best).into_iter())
            .filter_map(|(_, at, change)| Some((at, made(at, change)?)))
            .collect();
        let all = best.choices.clone();
        let count = changes.len();
        let pairs = (0..count).flat_map(move |first| (first + 1..count).map(move |by| (first, by)));
        pairs.filter_map(move |(first, second)| {
            let mut changed = [changes[first], changes[second]];
            if changed[0].0 == changed[1].0 {
                return None;
            }
            changed.sort_by_key(|&(at, _)| Reverse(at));
            let mut choices = all.clone();
            for (at, made) in changed {
                match made {
                    Some(made) => choices[at].made = made,
                    None => drop(choices.remove(at)),
                }
            }
            Some(choices)
        })
    }

    /// What may be changed: what it costs now, which choice, and how.
    fn changes(&self, best: &Found<'_>) -> Vec<(u64, usize, Change)> {
        let mut waited = vec![0; self.fresh.lifetimes.len()];
        for &(tensor, _, time) in &best.clock.late {
            waited[tensor.index()] += time;
        }
        let mut changes = Vec::new();
        for (at, choice) in best.choices.iter().enumerate() {
            match choice.made {
                Made::Again(_) => {
                    let key = (choice.until & !1, choice.tensor);
                    let chain = best.residencies.chains.get(&key);
                    let operators = chain.map_or(&[][..], |chain| &chain.operators);
                    let times = operators.iter().map(|id| self.given.latencies[id.index()].time.0);
                    let cost = times.sum();
                    changes.extend([
                        (cost, at, Change::Tight),
                        (cost, at, Change::Wide),
                        (cost, at, Change::Out),
                    ]);
                }
                Made::Swapped(_) => {
                    let cost = waited[choice.tensor.index()];
                    if cost > 0 {
                        changes.push((cost, at, Change::Wide));
                    }
                    changes.push((cost, at, Change::Out));
                }
            }
        }
        changes.sort_by_key(|&(cost, at, change)| (Reverse(cost), at, change));
        changes
    }

    /// The choices with one changed; `None` where that makes no sense.
    fn changed(&self, best: &Found<'_>, at: usize, change: Change) -> Option<Vec<Choice>> {
        let choice = best.choices[at];
        let mut choices = best.choices.clone();
        if change == Change::Out {
            choices.remove(at);
            return Some(choices);
        }
        let clock = &best.clock;
        let gap = choice.gap(&self.fresh)?;
        let tight = self.fresh.tightest(choice.tensor, gap);
        let bytes = self.given.graph.tensor(choice.tensor).bytes;
        let time = |direction| copy_time(self.given.link, direction, bytes, true).0;
        let waited: u64 =
            clock.late.iter().filter(|late| late.0 == choice.tensor).map(|late| late.2).sum();
        let leaves = clock.place(tight.out_place);
        let comes = clock.slot(choice.until).saturating_sub(waited + time(Direction::H2d));
        let mut swap = match choice.made {
            Made::Swapped(swap) => swap,
            Made::Again(_) if change == Change::Tight => {
                Swap { starts: (leaves, clock.slot(choice.until)), ..tight }
            }
            Made::Again(_) => {
                let gone = leaves + time(Direction::D2h);
                let out_until = clock.slot_before(gone, tight.out_until);
                Swap { out_until, starts: (leaves, comes), ..tight }
            }
        };
        if change == Change::Wide {
            swap.back_from = (2 * clock.place_by(comes)).min(tight.back_from);
            swap.starts.1 = comes;
            let (_, _, round) = self.fresh.ends(choice.tensor, gap);
            if !round && swap.back_from <= swap.out_until {
                return None;
            }
        }
        choices[at].made = Made::Swapped(swap);
        (choices[at] != choice).then_some(choices)
    }
}
