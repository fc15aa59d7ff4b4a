//! The planner `checkpoint`: training with sublinear memory (Chen et al., 2016), segments kept by their boundaries.
//!
//! What the paper defines (section 4.1 and Algorithm 1 on segments, 4.3 and Algorithm 3 on choosing them by memory; read from its text):
//! - The forward is cut into segments. What crosses from one segment into a later one is kept, what a segment
//!   only needs itself is dropped after its last use in the forward.
//! - Before a segment's backward its forward runs again from what was kept, and the results stay until the
//!   backward has used them. With √n segments of an n layer network memory is O(√n) for one more forward.
//! - Algorithm 3 cuts where the bytes since the last cut exceed a budget, and searches over that budget.
//! - The last segment's results are wanted at once, and so are not dropped.
//!
//! Here the segments have equal shares of the bytes that the backward wants from the forward, and their number is the smallest from 1 to
//! 2·√n (n forward operators) that is within the target: fewer segments leave more in the last, which costs
//! nothing. Departures: an operator that may not run again, or whose input was overwritten since, keeps its result; what is made beside a
//! sixteen times larger tensor (batch norm's statistics) is kept, as it costs more to make than to keep; what only the
//! second forward needs between its operators is counted as if it all were there at once.
//! Cost: O(√n · tensors · slots). Not for: swapping.

use std::collections::BTreeSet;

use super::ledger::Ledger;
use super::method::Given;
use super::tensile::Decided;
use crate::job::Phase;
use crate::units::TensorId;

/// Decides for the smallest number of segments within the target, or for the one that comes nearest to it.
#[must_use]
pub fn decide<'a>(given: &Given<'a>) -> Decided<'a> {
    let forward: Vec<bool> =
        given.graph.operators.iter().map(|o| o.phase == Phase::Forward).collect();
    let whole = Ledger::new(given.graph);
    let saved = saved(&whole, &forward);
    let operators = forward.iter().filter(|&&f| f).count();
    let mut best: Option<Decided<'a>> = None;
    for segments in 1..=2 * operators.isqrt().max(1) {
        let ledger = segmented(whole.clone(), &saved, segments);
        let peak = ledger.peak();
        let decided = Decided { reached: peak.1 <= given.target, peak, ledger };
        if decided.reached {
            return decided;
        }
        if best.as_ref().is_none_or(|b| decided.peak.1 < b.peak.1) {
            best = Some(decided);
        }
    }
    best.unwrap_or_else(|| {
        let peak = whole.peak();
        Decided { reached: peak.1 <= given.target, peak, ledger: whole }
    })
}

/// What the backward wants from the forward.
struct Saved {
    tensor: TensorId,
    made: u32,
    last: u32,
    wanted: u32,
    bytes: u64,
    /// Large enough beside what its operator makes with it.
    main: bool,
}

fn saved(ledger: &Ledger<'_>, forward: &[bool]) -> Vec<Saved> {
    let mut found = Vec::new();
    for (index, account) in ledger.accounts.iter().enumerate() {
        let Some(gap) =
            account.uses.windows(2).position(|u| forward[u[0] as usize] && !forward[u[1] as usize])
        else {
            continue;
        };
        let Some(&made) =
            account.writes.first().filter(|_| !account.long_lived && account.bytes > 0)
        else {
            continue;
        };
        let beside = ledger.graph.operators[made as usize]
            .generates()
            .map(|o| ledger.accounts[o.tensor.index()].bytes);
        found.push(Saved {
            tensor: TensorId::of(index),
            made,
            last: account.uses[gap],
            wanted: account.uses[gap + 1],
            bytes: account.bytes,
            main: account.bytes >= beside.max().unwrap_or(0) / 16,
        });
    }
    found.sort_by_key(|s| (s.made, s.tensor));
    found
}

fn segmented<'a>(mut ledger: Ledger<'a>, saved: &[Saved], segments: usize) -> Ledger<'a> {
    let total: u128 = saved.iter().map(|s| u128::from(s.bytes)).sum();
    // The operator with which each segment begins.
    let mut cuts: Vec<u32> = vec![0];
    let mut sum = 0;
    for s in saved {
        let segment =
            usize::try_from(sum * segments as u128 / total.max(1)).unwrap_or(segments - 1);
        if segment >= cuts.len() {
            cuts.resize(segment + 1, s.made);
        }
        sum += u128::from(s.bytes);
    }
    let segment_of = |operator: u32| cuts.partition_point(|&c| c <= operator) - 1;
    for segment in 0..cuts.len() - 1 {
        let inside =
            |s: &&Saved| s.main && segment_of(s.made) == segment && segment_of(s.last) == segment;
        let dropped: Vec<&Saved> = saved.iter().filter(inside).collect();
        let Some(before) = dropped.iter().map(|s| s.wanted).min() else { continue };
        for tensor in again(&ledger, &dropped, before) {
            let account = &ledger.accounts[tensor.index()];
            let Some(last) = account.uses.iter().rposition(|&u| u < before) else { continue };
            let here = account.writes.first().is_some_and(|&w| segment_of(w) == segment)
                && segment_of(account.uses[last]) == segment;
            ledger.want(tensor, before);
            // What comes from an earlier segment is a boundary: it is kept.
            if here && let Some(chain) = ledger.chain(tensor, last) {
                ledger.recompute(tensor, last, chain);
            }
        }
    }
    ledger
}

/// What has to be there before operator `before` to make `dropped` again, itself included, in the order of making.
fn again(ledger: &Ledger<'_>, dropped: &[&Saved], before: u32) -> Vec<TensorId> {
    let mut needed: BTreeSet<TensorId> = dropped.iter().map(|s| s.tensor).collect();
    let mut open: Vec<TensorId> = needed.iter().copied().collect();
    while let Some(tensor) = open.pop() {
        for &write in ledger.accounts[tensor.index()].writes.iter().filter(|&&w| w < before) {
            for read in ledger.graph.operators[write as usize].reads() {
                let account = &ledger.accounts[read.tensor.index()];
                // What is there anyway need not be asked for.
                if !account.long_lived
                    && !ledger.held(read.tensor, 2 * before as usize)
                    && needed.insert(read.tensor)
                {
                    open.push(read.tensor);
                }
            }
        }
    }
    let mut order: Vec<TensorId> = needed.into_iter().collect();
    order.sort_by_key(|t| (ledger.accounts[t.index()].writes.first().copied(), *t));
    order
}
