//! What turned out not to be needed is taken back: the dearest recomputes first, then swaps.
//!
//! Greedy choices for one slot make earlier choices for another superfluous.

use crate::contract::Latency;
use crate::residency::{Gap, Residencies};
use crate::units::TensorId;

/// Keeps again what there is room for, within `target`. With `ahead`, what saves another swap its
/// copy out stays swapped.
pub fn drop(residencies: &mut Residencies<'_>, latencies: &[Latency], target: u64, ahead: bool) {
    let mut recomputes: Vec<(u64, TensorId, u32)> = residencies
        .chains
        .iter()
        .map(|(&(slot, tensor), chain)| {
            (chain.operators.iter().map(|id| latencies[id.index()].time.0).sum(), tensor, slot)
        })
        .collect();
    recomputes.sort_by_key(|&(cost, tensor, slot)| (std::cmp::Reverse(cost), tensor, slot));
    for (_, tensor, slot) in recomputes {
        if residencies.shared.iter().any(|(&(at, _), &maker)| at == slot && maker == tensor) {
            continue;
        }
        let lifetime = residencies.lifetime(tensor);
        // The gap that ends with this chain: its next use is in the slot or in the operator after
        // it.
        let ends = |(gap, decision): &(usize, Gap)| {
            *decision == Gap::Recompute
                && lifetime.uses.get(gap + 1).is_some_and(|u| u & !1 == slot)
        };
        let Some((gap, _)) = lifetime.gaps.others().find(ends) else { continue };
        if room(residencies, tensor, gap, target) {
            residencies.decide(tensor, gap, Gap::Keep);
            residencies.chains.remove(&(slot, tensor));
        }
    }
    for index in 0..residencies.lifetimes.len() {
        let tensor = TensorId::from_index(index);
        let others: Vec<_> = residencies.lifetimes[index].gaps.others().collect();
        for (gap, decision) in others {
            if matches!(decision, Gap::Swap(_))
                && room(residencies, tensor, gap, target)
                && !(ahead && saves_a_copy(residencies, tensor, gap))
            {
                residencies.decide(tensor, gap, Gap::Keep);
            }
        }
    }
}

/// Whether another swap needs no copy out because this one goes round the end.
fn saves_a_copy(residencies: &Residencies<'_>, tensor: TensorId, gap: usize) -> bool {
    let lifetime = residencies.lifetime(tensor);
    let last = lifetime.gaps.len() - 1;
    let swapped = |gap: usize| matches!(lifetime.gaps[gap], Gap::Swap(_));
    lifetime.long_lived
        && gap == last
        && (0..last).any(|gap| swapped(gap) && lifetime.unwritten_before(gap))
}

fn room(residencies: &Residencies<'_>, tensor: TensorId, gap: usize, target: u64) -> bool {
    let bytes = residencies.lifetime(tensor).bytes;
    residencies
        .away(tensor, gap, residencies.gap(tensor, gap))
        .iter()
        .all(|&(a, b)| a >= b || residencies.load.most(a, b) + bytes <= target)
}
