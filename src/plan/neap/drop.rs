//! What turned out not to be needed is taken back: the dearest remakes first, then swaps.
//!
//! Greedy choices for one slot make earlier choices for another superfluous. Not for: exchanging one choice for another
//! ([`super::improve`]).

use super::book::{Book, Gap};
use crate::contract::Latency;
use crate::units::TensorId;

/// Keeps again what there is room for, within `target`.
pub fn drop(book: &mut Book<'_>, latencies: &[Latency], target: u64) {
    let mut remakes: Vec<(u64, TensorId, u32)> = book
        .chains
        .iter()
        .map(|(&(slot, tensor), chain)| {
            (chain.iter().map(|id| latencies[id.index()].time.0).sum(), tensor, slot)
        })
        .collect();
    remakes.sort_unstable_by_key(|&(cost, tensor, slot)| (std::cmp::Reverse(cost), tensor, slot));
    for (_, tensor, slot) in remakes {
        if book.shared.iter().any(|(&(at, _), &maker)| at == slot && maker == tensor) {
            continue;
        }
        let account = book.account(tensor);
        // The gap that ends with this chain: its next use is in the slot or in the operator after it.
        let Some(gap) = account.gaps.iter().enumerate().position(|(g, d)| {
            *d == Gap::Remake && account.uses.get(g + 1).is_some_and(|u| u & !1 == slot)
        }) else {
            continue;
        };
        if room(book, tensor, gap, target) {
            book.decide(tensor, gap, Gap::Keep);
            book.chains.remove(&(slot, tensor));
        }
    }
    for index in 0..book.accounts.len() {
        let tensor = TensorId::of(index);
        for gap in 0..book.accounts[index].gaps.len() {
            if matches!(book.gap(tensor, gap), Gap::Swap(_)) && room(book, tensor, gap, target) {
                book.decide(tensor, gap, Gap::Keep);
            }
        }
    }
}

fn room(book: &Book<'_>, tensor: TensorId, gap: usize, target: u64) -> bool {
    let bytes = book.account(tensor).bytes;
    book.away(tensor, gap, book.gap(tensor, gap))
        .iter()
        .all(|&(a, b)| a >= b || book.load.most(a, b) + bytes <= target)
}
