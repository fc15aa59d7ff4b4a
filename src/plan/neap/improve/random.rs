//! Iterated local search (Lourenço, Martin and Stützle, 2003): a few rules that the greedy must
//! observe ([`Rule`]) are changed at random at once, and all is chosen anew.
//!
//! The greedy swaps the largest tensors first and makes again what is cheapest, and every other
//! search changes one thing at a time. From a plan that makes one large tensor again, no single
//! change leads to a quicker one that swaps four others instead.
//!
//! The search goes on from what is quicker, sometimes from what is a little slower, and from the
//! best again when nothing was better for a while. Random numbers depend on the step alone, so a
//! plan is the same on any machine.

use rand_core::Rng as _;
use rand_pcg::Pcg64Mcg;

use super::polish::{Judge, MOST};
use super::{Found, Search, unswappable};
use crate::neap::{MUCH, Rule, Variant};
use crate::parallel::width;
use crate::units::TensorId;

/// How many operators are decided for in all, for each step of effort.
const OPERATORS: u64 = 1 << 13;

/// With no more than [`MUCH`] effort it is this part of that (one in 16).
const USUAL: u64 = 16;

/// At most this many rules are changed at once.
const RULES: usize = 3;

/// Of the dearest choices, this many may be forbidden.
const DEAREST: usize = 12;

/// One in this many steps may go on from what is slower, by less than this part of the time.
const ONE_IN: usize = 8;
const SLOWER: u64 = 400;

/// After this many steps in which nothing was better the search goes on from the best.
const PATIENCE: u32 = 100;

/// And after this many it ends, whatever the effort.
const END: u64 = 4096;

/// What a step tries.
struct Trial {
    variant: Variant,
    rules: Vec<Rule>,
    /// Whether the search may go on from it if it is a little slower.
    may_be_slower: bool,
}

impl<'a> Search<'a, '_> {
    /// Changes rules at random. Whether something was better.
    pub(super) fn at_random(&self, best: &mut Found<'a>, judge: &mut impl Judge) -> bool {
        let operators = self.given.graph.operators.len().max(1) as u64;
        let effort = self.options.effort;
        let part = if effort > MUCH { 1 } else { USUAL };
        let steps = u64::from(effort) * OPERATORS / operators / part;
        let none = unswappable(self.given.graph, self.options.swap_share);
        let before = best.key;
        // More than this, polishing is said not to gain.
        let enough = self.nominal.total.max(before.1 - before.1 / MOST);
        let mut from = best.clone();
        let (mut step, mut failed, mut last) = (0, 0, 0);
        while step < steps.min(last + END) && best.key.1 > enough {
            let many = (steps - step).min(width() as u64);
            let trials: Vec<Trial> =
                (step..step + many).map(|step| self.trial(&from, &none, step)).collect();
            // What may be gone on from.
            let most = from.most().saturating_add(from.key.1 / SLOWER);
            let all = self.choose_each(trials.len(), most, &|at| {
                (trials[at].variant, trials[at].rules.as_slice().into())
            });
            for (found, trial) in all.into_iter().zip(trials) {
                step += 1;
                failed += 1;
                let near = !found.key.0 && found.key.1 < from.key.1 + from.key.1 / SLOWER;
                if found.key < best.key {
                    let Some(verdict) = judge.look(&found.residencies) else { continue };
                    judge.take(verdict);
                    *best = found;
                    last = step;
                } else if failed < PATIENCE {
                    if found.key < from.key || near && trial.may_be_slower {
                        from = found;
                        break;
                    }
                    continue;
                }
                from = best.clone();
                failed = 0;
                break;
            }
        }
        best.key < before
    }

    /// Parameters and rules of which some are changed. `none` are the rules of the search itself.
    fn trial(&self, from: &Found<'a>, none: &[Rule], step: u64) -> Trial {
        let mut random = Pcg64Mcg::new(u128::from(step));
        let mut below = |most: usize| {
            usize::try_from(random.next_u64() % most.max(1) as u64).unwrap_or_default()
        };
        let mut rules = from.rules.clone();
        let dearest: Vec<(TensorId, bool)> = self.dearest(from).take(DEAREST).collect();
        for _ in 0..=below(RULES) {
            let kind = below(5);
            let changed = match kind {
                // What is dear is forbidden.
                0 | 1 => pick(&dearest, &mut below)
                    .map(|(tensor, swap)| (tensor, rules[tensor.index()].without(swap))),
                // What is swapped is not.
                2 => {
                    let mut swapped = Vec::new();
                    from.residencies.each_swap(|tensor, _, _| swapped.push(tensor));
                    pick(&swapped, &mut below)
                        .map(|tensor| (tensor, rules[tensor.index()].without(true)))
                }
                // A tensor is swapped before others, or no longer.
                3 => {
                    let dear = (below(2) == 0).then(|| pick(&dearest, &mut below)).flatten();
                    let tensor = dear.map(|(tensor, _)| tensor);
                    tensor.or_else(|| pick(self.large.as_slice(), &mut below)).map(|tensor| {
                        let first = !rules[tensor.index()].first;
                        let rule = Rule { first, no_recompute: first, ..none[tensor.index()] };
                        (tensor, rule)
                    })
                }
                // A rule is taken back.
                _ => {
                    let all = (0..rules.len()).filter(|&at| rules[at] != none[at]);
                    let changed: Vec<TensorId> = all.map(TensorId::from_index).collect();
                    pick(&changed, &mut below).map(|tensor| (tensor, none[tensor.index()]))
                }
            };
            // What an allocator's plan keeps stays.
            if let Some((tensor, rule)) = changed.filter(|(t, _)| rules[t.index()] != Rule::STAYS) {
                rules[tensor.index()] = rule;
            }
        }
        let neighbours = from.variant.neighbours();
        let variant =
            if below(3) == 0 { neighbours[below(neighbours.len())] } else { from.variant };
        Trial { variant, rules, may_be_slower: below(ONE_IN) == 0 }
    }
}

/// One of them; `None` where there is none.
fn pick<T: Copy>(all: &[T], below: &mut impl FnMut(usize) -> usize) -> Option<T> {
    all.get(below(all.len())).copied()
}
