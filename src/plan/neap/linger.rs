//! Lingering: what is updated last stays on the device over the end of the iteration, and leaves
//! in the next forward.
//!
//! An iteration ends when its copies have ended, so what is updated last and leaves at once makes
//! the end wait, and takes the link from what comes in then. By that time gradients are gone and
//! activations are not there yet: there is room, and in the forward the direction out has little
//! to do. Which tensors leave is decided before ([`super::choose`]).

use std::cmp::Reverse;

use super::Variant;
use crate::clock::Clock;
use crate::device::Link;
use crate::residency::{Gap, Residencies, Swap};
use crate::sim::program::Direction;
use crate::units::TensorId;

/// Lets what leaves last, round the end, leave from the iteration's start on instead, one after
/// the other, as far as there is room for it until then: the variant's number of tensors, the one
/// that is used last first.
pub fn linger(
    residencies: &mut Residencies<'_>,
    clock: &Clock,
    link: &Link,
    target: u64,
    variant: Variant,
) {
    let mut last: Vec<(Reverse<u32>, TensorId, Swap)> = Vec::new();
    for (index, lifetime) in residencies.lifetimes.iter().enumerate() {
        let (tensor, gap) = (TensorId::from_index(index), lifetime.gaps.len().wrapping_sub(1));
        if lifetime.long_lived
            && gap < lifetime.gaps.len()
            && let Gap::Swap(swap) = lifetime.gaps[gap]
            && !residencies.clean(tensor, gap)
        {
            last.push((Reverse(lifetime.uses[gap]), tensor, swap));
        }
    }
    last.sort_by_key(|&(at, tensor, _)| (at, tensor));
    let end = residencies.load.slots();
    let (mut free, mut left) = (0, variant.linger);
    for (_, tensor, swap) in last {
        if left == 0 {
            break;
        }
        let lifetime = residencies.lifetime(tensor);
        let Some(limit) = target.checked_sub(lifetime.bytes) else { continue };
        let bytes = residencies.graph.tensor(tensor).bytes;
        let time = variant.time(link, Direction::D2h, bytes);
        let until = clock.slot_before(free + time, 0);
        if until + 1 >= swap.back_from
            || residencies.load.most(swap.out_until as usize + 1, end) > limit
            || residencies.load.most(0, until as usize + 1) > limit
        {
            continue;
        }
        let gap = lifetime.gaps.len() - 1;
        residencies.decide(tensor, gap, Gap::Keep);
        // The gap from the start to the first use.
        residencies.use_at(tensor, 0);
        let leaves = residencies.tightest(tensor, 0);
        let starts = (free, swap.starts.1);
        let swap = Swap { out_until: until, back_from: swap.back_from, starts, ..leaves };
        residencies.decide(tensor, 0, Gap::Swap(swap));
        free += time;
        left -= 1;
    }
}
