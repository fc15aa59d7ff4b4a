//! Starts that are drawn from a linear program (randomised rounding, Raghavan and Thompson, 1987).
//!
//! The program of [`crate::relax`] looks at the whole iteration at once, and so knows which tensors
//! are worth the link's time where the greedy, slot by slot, does not. It says which part of each
//! tensor is away over the link, and which is dropped. A draw makes that whole: at random, by these
//! parts, a tensor is swapped before others, or not swapped, or as the greedy wants. What comes of
//! it is chosen and run as in any step, and the best stays. Random numbers depend on the draw
//! alone.

use rand_core::Rng as _;
use rand_pcg::Pcg64Mcg;

use super::{Found, OPERATORS, Search, share};
use crate::neap::{Rule, Variant};
use crate::relax::{Hint, hints};
use crate::units::Bytes;

/// How many draws are made for each step of effort; fewer for large graphs. Four times as many
/// gained nothing in four cases.
const DRAWS: u32 = 3;

/// One in this many draws goes by half the parts alone.
const ROUNDED: u64 = 3;

/// What the program moves less of than this stays where it may.
const LITTLE: u32 = Hint::WHOLE / 50;

impl<'a> Search<'a, '_> {
    /// Draws starts from the program's hints, and keeps the best.
    pub(super) fn guided(&self, best: &mut Found<'a>, none: &[Rule]) {
        let given = self.given;
        let target = Bytes(given.target);
        let hints = hints(given.graph, given.latencies, given.link, target);
        let effort = self.options.effort.saturating_mul(DRAWS);
        let draws = share(effort, OPERATORS.0, given.graph.operators.len());
        let center = best.variant;
        let all = self.choose_each(draws as usize, &|draw| {
            let (variant, rules) = drawn(draw as u64, center, &hints, none);
            (variant, rules.into())
        });
        for found in all {
            if found.key < best.key {
                *best = found;
            }
        }
    }
}

/// Parameters and rules by the parts that the program swaps and drops.
fn drawn(draw: u64, center: Variant, hints: &[Hint], none: &[Rule]) -> (Variant, Vec<Rule>) {
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
}
