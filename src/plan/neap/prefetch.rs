//! When swapped tensors leave and come back, once it is decided which tensors are swapped: they
//! leave as late, and come back as early, as the bytes allow.
//!
//! Swap-outs run first come, first served, which keeps their direction of the link busy. Swap-ins
//! start as late as they can without being late (earliest deadline first, from the last need
//! backwards), so the tensor that is needed first comes first. Both widen only into bytes that the
//! target leaves free. Times are those of the previous run, stalls included: while an operator
//! waits in the first pass, the link has time that the second pass can use.

use super::{Apart, Variant};
use crate::clock::Clock;
use crate::device::Link;
use crate::residency::{Gap, Residencies, Swap};
use crate::sim::program::Direction;
use crate::units::TensorId;

/// The windows of all swaps.
pub type Swaps = Vec<(TensorId, usize, Swap)>;

/// Puts windows back that were taken before, on the same decisions.
pub fn restore(residencies: &mut Residencies<'_>, windows: &Swaps) {
    for &(tensor, gap, window) in windows {
        residencies.decide(tensor, gap, Gap::Swap(window));
    }
}

/// The windows as they are.
#[must_use]
pub fn swaps(residencies: &Residencies<'_>) -> Swaps {
    let mut all = Vec::new();
    residencies.each_swap(|tensor, gap, swap| all.push((tensor, gap, swap)));
    all
}

/// Gives every swap its window again, in which tensors that nothing generates are kept apart from
/// large ones.
pub fn fit(
    residencies: &mut Residencies<'_>,
    clock: &Clock,
    link: &Link,
    target: u64,
    variant: Variant,
    apart: Apart,
) {
    let mut swaps = swaps(residencies);
    for (tensor, gap, w) in &mut swaps {
        *w = Swap { starts: w.starts, ..residencies.tightest(*tensor, *gap) };
        residencies.decide(*tensor, *gap, Gap::Swap(*w));
    }
    let length = |residencies: &Residencies<'_>, t: TensorId, d| {
        variant.time(link, d, residencies.graph.tensor(t).bytes)
    };
    // Ins: the latest start of each, from the last need to the first.
    let mut order: Vec<usize> = (0..swaps.len()).collect();
    order.sort_unstable_by_key(|&i| (residencies.ends(swaps[i].0, swaps[i].1).1, swaps[i].0, i));
    let mut free = u64::MAX;
    for &i in order.iter().rev() {
        let (tensor, gap, ref mut w) = swaps[i];
        let wanted = clock.slot(residencies.ends(tensor, gap).1);
        free = free.min(wanted).saturating_sub(length(residencies, tensor, Direction::H2d));
        w.starts.1 = free;
    }
    let large = if apart == Apart::No { Vec::new() } else { large(residencies, target) };
    let around = if apart == Apart::Around { &large[..] } else { &[] };
    // Outs, in the order that was chosen.
    let mut leaving = order.clone();
    leaving.sort_unstable_by_key(|&i| (swaps[i].2.starts.0, swaps[i].2.out_place, swaps[i].0, i));
    let (mut free, mut place) = (0, 0);
    let last = u32::try_from(residencies.load.slots().saturating_sub(2)).unwrap_or(u32::MAX);
    for &i in &leaving {
        let (tensor, gap, mut w) = swaps[i];
        if residencies.clean(tensor, gap) {
            continue;
        }
        if variant.early {
            let first = residencies.leaves_from(tensor, gap);
            w.out_place = clock.place_by(free).clamp(first, w.out_place);
        }
        // None leaves before one that stands before it in the queue.
        place = w.out_place.max(place);
        w.out_place = place;
        w.starts.0 = clock.place(place).max(free);
        free = w.starts.0 + length(residencies, tensor, Direction::D2h);
        let (_, b, round) = residencies.ends(tensor, gap);
        let latest = if round { last } else { (b & !1).saturating_sub(1) };
        let latest = latest.min(left_by(residencies, around, (tensor, gap, w)));
        let ideal = clock.slot_before(free, w.out_until).min(latest);
        let bytes = residencies.lifetime(tensor).bytes;
        let until = reach(residencies, w.out_until as usize + 1, ideal as usize + 1, bytes, target);
        w.out_until = u32::try_from(until - 1).unwrap_or(w.out_until).max(w.out_until);
        residencies.decide(tensor, gap, Gap::Swap(w));
        swaps[i].2 = w;
    }
    for &i in &order {
        back(residencies, clock, &mut swaps[i], 0, target, (&large, apart));
    }
    // Where there is room still, copies may be late by a little without making an operator wait.
    let margin = clock.total / 64;
    for &i in &leaving {
        let (tensor, gap, mut w) = swaps[i];
        if residencies.clean(tensor, gap) {
            continue;
        }
        let (_, b, round) = residencies.ends(tensor, gap);
        let latest = if round { last } else { w.back_from.min(b & !1).saturating_sub(1) };
        let latest = latest.min(left_by(residencies, around, (tensor, gap, w)));
        let ideal = clock
            .slot_before(
                w.starts.0 + length(residencies, tensor, Direction::D2h) + margin,
                w.out_until,
            )
            .min(latest);
        let bytes = residencies.lifetime(tensor).bytes;
        let until = reach(residencies, w.out_until as usize + 1, ideal as usize + 1, bytes, target);
        w.out_until = u32::try_from(until - 1).unwrap_or(w.out_until).max(w.out_until);
        residencies.decide(tensor, gap, Gap::Swap(w));
        swaps[i].2 = w;
    }
    for &i in &order {
        back(residencies, clock, &mut swaps[i], margin, target, (&large, apart));
    }
}

/// What something generates is large from this part of the target on (one in 8).
const LARGE: u64 = 8;

/// The first and the last slot of each large tensor that something generates, up to its first gap
/// in which it does not stay.
fn large(residencies: &Residencies<'_>, target: u64) -> Vec<(u32, u32)> {
    let lifetimes = residencies.lifetimes.iter();
    let mut all: Vec<(u32, u32)> = lifetimes
        .filter(|l| !l.long_lived && l.bytes >= target / LARGE)
        .filter_map(|l| {
            let gone = l.gaps.others().next().map_or(l.gaps.len(), |(gap, _)| gap);
            Some((*l.uses.first()?, *l.uses.get(gone)?))
        })
        .collect();
    all.sort_unstable();
    all
}

/// The last slot in which a tensor that nothing generates may be there, so that the last of the
/// `large` ones whose whole life is in the gap can lie at its address. Any slot if there is none.
fn left_by(
    residencies: &Residencies<'_>,
    large: &[(u32, u32)],
    (tensor, gap, swap): (TensorId, usize, Swap),
) -> u32 {
    let (_, b, round) = residencies.ends(tensor, gap);
    if large.is_empty() || round || !residencies.lifetime(tensor).long_lived {
        return u32::MAX;
    }
    let tight = residencies.tightest(tensor, gap).out_until;
    let within = |l: &&(u32, u32)| tight < l.0 && l.1 < b.min(swap.back_from);
    large.iter().rev().find(within).map_or(u32::MAX, |l| l.0 - 1)
}

/// A swap comes back by its start less a margin, as far as there is room. A tensor that nothing
/// generates comes after the `large` ones that began while it was away.
fn back(
    residencies: &mut Residencies<'_>,
    clock: &Clock,
    swap: &mut (TensorId, usize, Swap),
    margin: u64,
    target: u64,
    (large, apart): (&[(u32, u32)], Apart),
) {
    let (tensor, gap, ref mut w) = *swap;
    let (a, _, round) = residencies.ends(tensor, gap);
    let earliest = if round { 0 } else { w.out_until.max(a) + 1 };
    let ideal =
        (2 * clock.place_by(w.starts.1.saturating_sub(margin))).max(earliest.next_multiple_of(2));
    // It comes back to the address at which it began the iteration. A large tensor that was made
    // since may lie there; where they are kept apart all around, only if it can be waited for.
    let stays = residencies.lifetime(tensor).long_lived;
    let last = if apart == Apart::Around { w.back_from } else { u32::MAX };
    let there = large.iter().filter(|l| stays && w.out_until < l.0 && l.1 < last);
    let ideal = there.fold(ideal, |ideal, l| {
        if l.0 < ideal && ideal <= l.1 { (l.1 + 1).next_multiple_of(2) } else { ideal }
    });
    let bytes = residencies.lifetime(tensor).bytes;
    w.back_from = reach_back(residencies, ideal, w.back_from, bytes, target);
    residencies.decide(tensor, gap, Gap::Swap(*w));
}

/// How far from `from` towards `until` there is room for `bytes`.
fn reach(
    residencies: &Residencies<'_>,
    from: usize,
    until: usize,
    bytes: u64,
    target: u64,
) -> usize {
    let Some(limit) = target.checked_sub(bytes) else { return from };
    residencies.load.first_over(from, until, limit).unwrap_or(until).max(from)
}

/// How far back from `until` towards `from` there is room for `bytes`; even.
fn reach_back(
    residencies: &Residencies<'_>,
    from: u32,
    until: u32,
    bytes: u64,
    target: u64,
) -> u32 {
    let Some(limit) = target.checked_sub(bytes) else { return until };
    let from = from.min(until);
    match residencies.load.last_over(from as usize, until as usize, limit) {
        Some(slot) => (u32::try_from(slot).unwrap_or(until) + 1).next_multiple_of(2).min(until),
        None => from,
    }
}
