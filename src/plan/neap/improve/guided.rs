//! Starts that are drawn from a linear program (randomised rounding, Raghavan and Thompson, 1987).
//!
//! The program of [`crate::relax`] looks at the whole iteration at once, and so knows which tensors
//! are worth the link's time where the greedy, slot by slot, does not. It says which part of each
//! tensor is away over the link, and which is dropped. A draw makes that whole: at random, by these
//! parts, a tensor is swapped before others, or not swapped, or as the greedy wants. What comes of
//! it is chosen and run as in any step, and the best stays. Half as many draws again also copy
//! parameters out ahead ([`Variant::ahead`]). Then, round by round, some of the best one's rules
//! are drawn anew. Random numbers depend on the draw alone.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use rand_core::Rng as _;
use rand_pcg::Pcg64Mcg;

use super::polish::Choice;
use super::{Chosen, Found, OPERATORS, Search, share};
use crate::neap::{Options, Rule, Variant};
use crate::parallel::in_parallel;
use crate::relax::Hint;

/// How many draws are made for four steps of effort; fewer for large graphs. Four times as many, of
/// draws and rounds, and of changes when plans are polished, gained 0.1 % on the mean of 33 plans,
/// and took two and a half times as long.
const DRAWS: u32 = 3;

/// One in this many draws goes by half the parts alone.
const ROUNDED: u64 = 3;

/// What the program moves less of than this stays where it may.
const LITTLE: u32 = Hint::WHOLE / 50;

/// How many rounds of changes follow for four steps of effort, and how many changes a round tries.
/// As 16 rounds of eight they made 30 of 80 plans quicker, by up to 3 %, and 8 slower, by up to
/// 0.6 %; on 40 of these plans 32 rounds of four gained as much, and twice as many little more.
const ROUNDS: u32 = 2;
const ROUND: u64 = 4;

/// What a search starts with.
type Start = (Variant, Vec<Rule>);

/// How far apart the numbers of two sets of draws are, and where in one of them those that are
/// changes begin.
const SET: u64 = 1 << 24;
const CHANGES: u64 = 1 << 20;

impl<'a> Search<'a, '_> {
    /// Draws starts from the program's hints, by a set of numbers, then changes the best, and keeps
    /// what is best.
    pub(super) fn guided(&self, best: &mut Found<'a>, none: &[Rule], hints: &[Hint], set: u64) {
        let operators = self.given.graph.operators.len();
        let effort = |times: u32| {
            let effort = self.options.effort.saturating_mul(times) / 4;
            u64::from(share(effort, OPERATORS.0, operators))
        };
        let draws = effort(DRAWS);
        let center = best.variant;
        let mut tried = Tried::default();
        let ahead = if self.options.ahead { draws / 2 } else { 0 };
        self.best_of(best, &mut tried, 0..draws + ahead, &|draw, _| {
            let (variant, rules) = drawn(draw + set * SET, center, hints, none);
            (self.own(Variant { ahead: draw >= draws, ..variant }, draw), rules)
        });
        for round in 0..effort(ROUNDS) {
            let first = set * SET + CHANGES + round * ROUND;
            self.best_of(best, &mut tried, first..first + ROUND, &|draw, best| {
                let (variant, rules) = drawn(draw, best.variant, hints, none);
                let new = (self.own(variant, draw), rules);
                changed(draw, (best.variant, &best.rules), new)
            });
        }
    }

    /// A draw's parameters: copies of each make room for others, of every other one begin early.
    fn own(&self, variant: Variant, draw: u64) -> Variant {
        let Options { shift, early, .. } = *self.options;
        Variant { shift, early: early && !draw.is_multiple_of(2), ..variant }
    }

    /// Keeps the best of what comes of these draws. A start that was tried before, or whose choices
    /// were, comes to the same, and is left out.
    fn best_of(
        &self,
        best: &mut Found<'a>,
        tried: &mut Tried,
        draws: Range<u64>,
        start: &dyn Fn(u64, &Found<'a>) -> Start,
    ) {
        let starts = draws.map(|draw| start(draw, best));
        let starts: Vec<Start> = starts.filter(|start| tried.starts.is_new(start)).collect();
        let mut all = in_parallel(starts.len(), |at| {
            let (variant, rules) = &starts[at];
            Some(self.chosen(*variant, rules.clone(), None))
        });
        all.retain(|chosen| {
            let Some(Chosen { variant, choices, .. }) = chosen else { return false };
            // These parameters are the greedy's alone.
            let variant = Variant { recomputed: 0, dearest: false, shift: false, ..*variant };
            tried.choices.is_new(&(variant, choices.clone()))
        });
        let most = best.most();
        let all: Vec<Mutex<Option<Chosen<'a>>>> = all.into_iter().map(Mutex::new).collect();
        let all = in_parallel(all.len(), |at| {
            let chosen = all[at].lock().unwrap_or_else(PoisonError::into_inner).take();
            chosen.map(|chosen| self.timed(chosen, most))
        });
        best.keep_best(all.into_iter().flatten().collect());
    }
}

/// What was tried on one clock.
#[derive(Default)]
struct Tried {
    starts: Known<Start>,
    choices: Known<(Variant, Vec<Choice>)>,
}

/// Different values. They are few, and most differ from each other near their beginnings.
struct Known<T>(Vec<T>);

impl<T> Default for Known<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T: Clone + PartialEq> Known<T> {
    /// Whether it is different from all before it; it is known from now on.
    fn is_new(&mut self, value: &T) -> bool {
        let new = !self.0.contains(value);
        if new {
            self.0.push(value.clone());
        }
        new
    }
}

/// Parameters and rules of the best, of which a part at random is as in a new draw.
fn changed(
    draw: u64,
    (variant, rules): (Variant, &[Rule]),
    (new_variant, new_rules): Start,
) -> Start {
    // The draw's own numbers made the new rules.
    let mut random = Pcg64Mcg::new(u128::from(draw) << 32);
    let mut below = |most: u64| random.next_u64() % most;
    let one_in = 2 << below(5);
    let each = rules.iter().zip(new_rules);
    let rules = each.map(|(rule, new)| if below(one_in) == 0 { new } else { *rule }).collect();
    (if below(2) == 0 { new_variant } else { variant }, rules)
}

/// Parameters and rules by the parts that the program swaps and drops.
fn drawn(draw: u64, center: Variant, hints: &[Hint], none: &[Rule]) -> Start {
    let mut random = Pcg64Mcg::new(u128::from(draw));
    let mut below = |most: u64| u32::try_from(random.next_u64() % most).unwrap_or_default();
    let whole = u64::from(Hint::WHOLE);
    // How far from half the parts lie that decide, at most.
    let spread = if draw.is_multiple_of(ROUNDED) { 1 } else { u64::from(below(whole)) + 1 };
    let strict = below(2) == 0;
    let mut variant = [
        center,
        Variant::FIRST,
        Variant { extend: true, ..center },
        Variant { recomputed: 100, ..center },
        Variant { recomputed: 75, ..center },
        Variant { recomputed: 0, ..center },
        Variant { slack: 33, ..center },
        Variant { dearest: !center.dearest, ..center },
    ][below(8) as usize];
    if below(2) == 0 {
        variant.linger = u32::MAX;
    }
    let rule = |(hint, rule): (&Hint, &Rule)| {
        let half = u32::try_from((whole - spread) / 2).unwrap_or_default();
        let part = half + below(spread);
        let (swapped, moved) = (hint.swapped, hint.swapped + hint.dropped);
        if part < swapped {
            Rule { first: true, no_recompute: strict, ..*rule }
        } else if part < moved || strict && moved < LITTLE {
            Rule { no_swap: true, ..*rule }
        } else {
            *rule
        }
    };
    (variant, hints.iter().zip(none).map(rule).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_follow_the_hints_and_depend_on_their_number_alone() {
        let whole = Hint::WHOLE;
        let hints = [
            Hint { swapped: whole, dropped: 0 },
            Hint { swapped: 0, dropped: whole },
            Hint::default(),
            Hint { swapped: whole / 2, dropped: 0 },
        ];
        let none = [Rule::default(); 4];
        let mut halves = [0; 2];
        for draw in 0..200 {
            let drawn = || drawn(draw, Variant::FIRST, &hints, &none);
            assert_eq!(drawn(), drawn());
            let rules = drawn().1;
            assert!(rules[0].first && !rules[0].no_swap);
            assert!(!rules[1].first && rules[1].no_swap && !rules[1].no_recompute);
            assert!(!rules[2].first && !rules[2].no_recompute);
            halves[usize::from(rules[3].first)] += 1;
        }
        assert!(halves.iter().all(|half| *half > 30), "{halves:?}");
    }

    #[test]
    fn changes_keep_most_rules_of_the_best() {
        let hints = [Hint { swapped: Hint::WHOLE, dropped: 0 }; 64];
        let none = [Rule::default(); 64];
        let mut kept = 0;
        for draw in 0..100 {
            let new = drawn(draw, Variant::FIRST, &hints, &none);
            let (_, rules) = changed(draw, (Variant::FIRST, &none), new);
            let same = rules.iter().filter(|rule| **rule == Rule::default()).count();
            assert!(same < 64 || rules.iter().all(|rule| !rule.first));
            kept += same;
        }
        assert!((64 * 60..64 * 98).contains(&kept), "{kept}");
    }
}
