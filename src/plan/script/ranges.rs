//! Sets of ranges to choose from, and the order in which they are worth running again.

use std::collections::BTreeSet;

use super::problem::{Iteration, Problem, Range};
use super::world::{Way, World};

/// The most ranges that are ordered by how much each lowers the peak.
const FEW: usize = 16;

impl Range {
    /// Bytes that it keeps from forward to backward, unless it runs again.
    #[must_use]
    pub fn bytes(&self, problem: &Problem) -> u64 {
        self.brings.iter().map(|&storage| problem.storages[storage].blocks()).sum()
    }

    /// How long running it again takes.
    #[must_use]
    pub fn time(&self, iteration: &Iteration) -> u64 {
        iteration.operators[self.first..self.cut].iter().map(|operator| operator.ns).sum()
    }

    /// What giving back these bytes is worth for its time: bytes for a million nanoseconds.
    #[must_use]
    pub fn worth(&self, bytes: u64, iteration: &Iteration) -> u128 {
        u128::from(bytes) * 1_000_000 / (u128::from(self.time(iteration)) + 1)
    }

    /// Whether an operator may run again where these calls do: none of them runs it or saves its
    /// output, and none needs that as an argument.
    #[must_use]
    pub fn beside(&self, calls: &[&Self]) -> bool {
        let packs = || self.saved.iter().chain(&self.asked);
        calls.iter().filter_map(|one| Some((one, one.call?))).all(|(one, (first, after))| {
            !one.inputs.contains(&self.brings[0])
                && !packs().any(|pack| (first..after).contains(pack))
        })
    }
}

/// Of some operators, in order, those of which none needs what another makes again.
#[must_use]
pub fn unchained(iteration: &Iteration, ranges: impl Iterator<Item = usize>) -> Vec<usize> {
    let (mut made, mut needed) = (BTreeSet::<usize>::new(), BTreeSet::<usize>::new());
    let mut chosen = Vec::new();
    for number in ranges {
        let range = &iteration.ranges[number];
        if range.inputs.iter().any(|s| made.contains(s))
            || range.brings.iter().any(|s| needed.contains(s))
        {
            continue;
        }
        chosen.push(number);
        made.extend(&range.brings);
        needed.extend(&range.inputs);
    }
    chosen
}

/// Sets of disjoint calls to choose from: the largest that are no more than a share of all that is
/// kept, for several shares. A call as large as the model gives nothing back: running it again
/// needs all its memory at once.
#[must_use]
pub fn families(problem: &Problem, iteration: &Iteration, usable: &[usize]) -> Vec<Vec<usize>> {
    let calls: BTreeSet<usize> =
        usable.iter().copied().filter(|&n| iteration.ranges[n].call.is_some()).collect();
    let outer = |number: usize| iteration.ranges[number].inside;
    let all = 0..iteration.ranges.len();
    let is_root = |&n: &usize| iteration.ranges[n].call.is_some() && outer(n).is_none();
    let roots: Vec<usize> = all.filter(is_root).collect();
    let bytes = |number: usize| iteration.ranges[number].bytes(problem);
    let total: u64 = roots.iter().map(|&root| bytes(root)).sum();
    let mut found: Vec<Vec<usize>> = Vec::new();
    for share in [3, 8, 24] {
        let mut chosen = Vec::new();
        let mut waiting: Vec<usize> = roots.iter().rev().copied().collect();
        while let Some(number) = waiting.pop() {
            if calls.contains(&number) && bytes(number).saturating_mul(share) <= total {
                chosen.push(number);
            } else {
                let all = (0..iteration.ranges.len()).rev();
                waiting.extend(all.filter(|&inner| outer(inner) == Some(number)));
            }
        }
        if !chosen.is_empty() && !found.contains(&chosen) {
            found.push(chosen);
        }
    }
    found
}

/// Ranges by how much they lower the peak for their time; among equals the later first, since what
/// an earlier one keeps has longer to be away.
#[must_use]
pub fn by_worth(problem: &Problem, way: Way, family: &[usize]) -> Vec<usize> {
    let peak = |ranges: Vec<usize>| World::new(problem, way, ranges).peak();
    let iteration = World::new(problem, way, Vec::new()).iteration;
    let range = |number: usize| &iteration.ranges[number];
    let mut left = family.to_vec();
    left.sort_by_key(|&number| std::cmp::Reverse(range(number).first));
    let mut chosen: Vec<usize> = Vec::new();
    while !left.is_empty() {
        let worth = |bytes: u64, number: usize| range(number).worth(bytes, iteration);
        let mut gains = vec![0];
        if family.len() <= FEW {
            let with = |number: usize| peak([&chosen[..], &[number]].concat());
            let before = peak(chosen.clone());
            gains = left.iter().map(|&n| worth(before.saturating_sub(with(n)), n)).collect();
        }
        if gains.iter().all(|&gain| gain == 0) {
            // The peak may need several at once: by what they keep for their time.
            gains = left.iter().map(|&n| worth(range(n).bytes(problem), n)).collect();
        }
        let best = gains.iter().copied().max().unwrap_or(0);
        let at = gains.iter().position(|&gain| gain == best).unwrap_or(0);
        chosen.push(left.remove(at));
    }
    chosen
}
