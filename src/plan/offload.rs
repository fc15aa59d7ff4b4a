//! The planner `offload-optimizer`: every optimizer state, and every parameter that only the
//! optimizer touches (a master weight), lives on the host and is streamed through the device.
//!
//! ZeRO-Offload (Ren et al., USENIX ATC 2021) keeps optimizer states and master weights in host
//! memory and updates there. A plan has operators on the device only, so here the states of an
//! update come for it and leave after it, as in ZeRO-Infinity's streamed step (Rajbhandari et al.,
//! SC 2021): the next update's states come while an update runs, and those of the one before leave.
//! Where that needs more than the target, states come no sooner than their update and leave right
//! after it. Nothing else leaves and nothing is recomputed. The policy is static: a budget that it
//! does not meet is infeasible for it. Cost: O(states · log).

use serde::{Deserialize, Serialize};

use super::clock::Clock;
use super::planner::{Decision, Given, Planner};
use super::residency::{Gap, Residencies, Swap};
use crate::job::{Phase, Role};
use crate::units::{OpId, TensorId};

/// The planner. It has no switches.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Optimizer {}

impl Planner for Optimizer {
    fn decide(&self, given: &Given<'_>) -> Decision {
        let ahead = streamed(given, true);
        let residencies =
            if ahead.load.peak().1 <= given.target { ahead } else { streamed(given, false) };
        Decision::new(&residencies, given.target)
    }
}

/// All states on the host between two iterations, as far as there is pinned memory; `ahead`: one
/// update's states come while the update before runs.
fn streamed<'a>(given: &Given<'a>, ahead: bool) -> Residencies<'a> {
    let mut residencies = Residencies::new(given.graph);
    let clock = Clock::nominal(given.latencies);
    let states: Vec<TensorId> = (0..given.graph.tensors.len())
        .map(TensorId::from_index)
        .filter(|&t| {
            let lifetime = residencies.lifetime(t);
            let step = |slot: &u32| given.graph.operator(OpId(slot / 2)).phase == Phase::Optimize;
            let state = match given.graph.tensor(t).role {
                Role::OptimizerState => true,
                // Master weights.
                Role::Parameter => lifetime.uses.iter().all(step),
                _ => false,
            };
            state && lifetime.long_lived && lifetime.bytes > 0 && !lifetime.uses.is_empty()
        })
        .collect();
    let mut updates: Vec<u32> = states
        .iter()
        .flat_map(|&t| residencies.lifetime(t).uses.iter().map(|slot| slot / 2))
        .collect();
    updates.sort();
    updates.dedup();
    let end = u32::try_from(residencies.load.slots().saturating_sub(2)).unwrap_or(u32::MAX);
    let mut pinned = given.pinned.0;
    for tensor in states {
        let lifetime = residencies.lifetime(tensor);
        if lifetime.bytes > pinned {
            continue;
        }
        pinned -= lifetime.bytes;
        let gap = lifetime.gaps.len() - 1;
        let (last, first, _) = residencies.operators(tensor, gap);
        let tight = residencies.tightest(tensor, gap);
        let (mut until, mut back) = (tight.out_until, tight.back_from / 2);
        if ahead {
            let at = updates.partition_point(|&u| u < first);
            back = at.checked_sub(1).map_or(first.saturating_sub(1), |before| updates[before]);
            let next = updates.get(updates.partition_point(|&u| u <= last));
            until = next.map_or(end, |&next| 2 * next + 1).clamp(until, end.max(until));
        }
        let swap = Swap {
            out_until: until,
            back_from: 2 * back,
            starts: (clock.end(last), clock.place(back)),
            ..tight
        };
        residencies.decide(tensor, gap, Gap::Swap(swap));
    }
    residencies
}
