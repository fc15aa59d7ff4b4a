//! Small tensors live longer so that large ones need not: inputs that are dead by the time their
//! products could be made again.
//!
//! A concatenation's inputs die with it, and then nothing can make it again but the operators that
//! made them. Where several large tensors share small dead inputs (DenseNet's cats over the same
//! features), keeping the inputs frees more than it costs. The choice is a closure problem
//! (products to drop, inputs to keep); by shared inputs it falls into parts, each taken where it
//! pays as a whole.

use crate::job::Replay;
use crate::residency::Residencies;
use crate::units::{OpId, TensorId};

/// A tensor that could be made again if its dead inputs lived on.
struct Product {
    bytes: u64,
    slot: u32,
    dead: Vec<TensorId>,
}

/// Extends lives where that frees bytes in the highest slot. Tensors below `least` are not worth
/// it.
pub fn extend(residencies: &mut Residencies<'_>, least: u64) {
    let slot = u32::try_from(residencies.load.peak().0).unwrap_or(u32::MAX);
    let mut products: Vec<Product> = Vec::new();
    for (index, lifetime) in residencies.lifetimes.iter().enumerate() {
        let tensor = TensorId::from_index(index);
        if lifetime.bytes >= least.max(1)
            && let Some(gap) = residencies.gap_over(tensor, slot)
            && let Some(product) = product(residencies, tensor, gap)
        {
            products.push(product);
        }
    }
    let mut part: Vec<usize> = (0..products.len()).collect();
    let mut of = std::collections::BTreeMap::new();
    for (index, product) in products.iter().enumerate() {
        for &dead in &product.dead {
            let other = *of.entry(dead).or_insert(index);
            let (a, b) = (root(&part, other), root(&part, index));
            part[a.max(b)] = a.min(b);
        }
    }
    for first in 0..products.len() {
        if root(&part, first) != first {
            continue;
        }
        let members: Vec<&Product> = (first..products.len())
            .filter(|&i| root(&part, i) == first)
            .map(|i| &products[i])
            .collect();
        let mut until: std::collections::BTreeMap<TensorId, u32> =
            std::collections::BTreeMap::new();
        for member in &members {
            for &dead in &member.dead {
                let slot = until.entry(dead).or_insert(0);
                *slot = member.slot.max(*slot);
            }
        }
        let gain: u64 = members.iter().map(|m| m.bytes).sum();
        let cost: u64 = until.keys().map(|&t| residencies.lifetime(t).bytes).sum();
        // Less than a quarter of what it frees, or the recomputes' time is hardly worth it.
        if cost * 4 > gain * 3 {
            continue;
        }
        for (tensor, until) in until {
            residencies.live_on(tensor, until);
        }
    }
}

fn root(part: &[usize], mut of: usize) -> usize {
    while part[of] != of {
        of = part[of];
    }
    of
}

fn product(residencies: &Residencies<'_>, tensor: TensorId, gap: usize) -> Option<Product> {
    let lifetime = residencies.lifetime(tensor);
    let (_, b, round) = residencies.ends(tensor, gap);
    if round || lifetime.long_lived {
        return None;
    }
    let slot = b & !1;
    let mut dead = Vec::new();
    for (position, id) in
        lifetime.writes.iter().map(|&w| OpId(w)).filter(|id| 2 * id.0 + 1 < slot).enumerate()
    {
        let operator = residencies.graph.operator(id);
        if operator.replay != Replay::Pure
            || residencies.generates(id).contains(&tensor) != (position == 0)
            || residencies.updates(id).iter().any(|&u| u != tensor)
        {
            return None;
        }
        for read in residencies.needs(id, tensor) {
            if residencies.rewritten(read, id, slot) {
                return None;
            }
            let input = residencies.lifetime(read);
            if !residencies.held(read, slot) {
                let gone = !input.long_lived && input.uses.last().is_some_and(|&last| last < slot);
                if !gone {
                    return None;
                }
                if !dead.contains(&read) {
                    dead.push(read);
                }
            }
        }
    }
    (!dead.is_empty()).then_some(Product { bytes: lifetime.bytes, slot, dead })
}
