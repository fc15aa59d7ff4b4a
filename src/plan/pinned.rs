//! Addresses of host copies in the pinned pool, found in the same way as those on the device.
//!
//! A tensor that starts the iteration on the host holds its bytes always. Another tensor holds them
//! from its first copy to its last, in the order of the plan, so sharing is safe at any timing. As
//! on the device, sharing has a price: the later copy waits for the earlier. So bytes are shared
//! only if the iteration takes no longer, or if the pool would not fit otherwise.

use std::collections::BTreeMap;

use super::place::{self, Item, heuristic};
use crate::device::Link;
use crate::sim::engine::{self, Deadlock, Durations, Run};
use crate::sim::program::{Direction, Program};
use crate::units::{Bytes, TensorId};

/// The addresses in the pinned pool, and the run with them.
#[derive(Clone, Debug)]
pub struct Pool {
    /// The offset of each tensor.
    pub offsets: BTreeMap<TensorId, Bytes>,
    /// The size of the pool.
    pub bytes: Bytes,
    /// The run without noise.
    pub run: Run,
}

/// When a tensor holds its bytes, counted in copies and in triggers.
struct Life {
    bytes: u64,
    copies: (u32, u32),
    triggers: (u32, u32),
}

/// Places the host copies of a program, tells the program which of them share bytes, and simulates
/// it.
///
/// # Errors
/// When the program deadlocks, which planners exclude.
pub fn place(program: &mut Program, link: &Link, pinned: Bytes) -> Result<Pool, Deadlock> {
    let mut lives: BTreeMap<TensorId, Life> = BTreeMap::new();
    let all = u32::try_from(program.copies.len()).unwrap_or(u32::MAX);
    let last = u32::try_from(program.steps.len()).unwrap_or(u32::MAX - 2) + 2;
    for (index, copy) in (0u32..).zip(&program.copies) {
        let starts_there = copy.direction == Direction::H2d && copy.source.is_none();
        let trigger =
            copy.trigger.map_or(0, |step| u32::try_from(step).unwrap_or(u32::MAX - 2) + 1);
        let new = Life {
            bytes: copy.bytes.in_blocks().0,
            copies: (index, index),
            triggers: (trigger, trigger),
        };
        let life = lives.entry(copy.tensor).or_insert(new);
        if starts_there {
            (life.copies, life.triggers) = ((0, all), (0, last));
        }
        (life.copies.1, life.triggers.1) =
            (life.copies.1.max(index + 1), life.triggers.1.max(trigger + 1));
    }
    let durations = Durations::nominal(program, link);
    let mut apart = Pool {
        offsets: BTreeMap::new(),
        bytes: Bytes::ZERO,
        run: engine::run(program, link, &durations)?,
    };
    for (&tensor, life) in &lives {
        apart.offsets.insert(tensor, apart.bytes);
        apart.bytes += Bytes(life.bytes);
    }
    // A swap-in waits for a swap-out with the same trigger that frees its address. If that swap-out
    // used the swap-in's host bytes, each would wait for the other. In that case only tensors whose
    // triggers differ share host bytes.
    for spans in [|life: &Life| life.copies, |life: &Life| life.triggers] {
        // A tensor of no bytes needs no address.
        let (tensors, items): (Vec<TensorId>, Vec<Item>) = lives
            .iter()
            .filter(|l| l.1.bytes > 0)
            .map(|(&t, l)| (t, Item::new(l.bytes, vec![spans(l)])))
            .unzip();
        let layout = heuristic::place(&items, place::load(&items));
        if layout.height >= apart.bytes.0 {
            return Ok(apart);
        }
        let mut offsets: BTreeMap<TensorId, Bytes> =
            lives.keys().map(|&t| (t, Bytes::ZERO)).collect();
        offsets.extend(tensors.into_iter().zip(layout.offsets.iter().map(|&o| Bytes(o))));
        program.share(&offsets);
        match engine::run(program, link, &durations) {
            Ok(run) if run.iteration <= apart.run.iteration || apart.bytes > pinned => {
                return Ok(Pool { offsets, bytes: Bytes(layout.height), run });
            }
            Ok(_) => break,
            Err(_) => {}
        }
    }
    program.share(&apart.offsets);
    Ok(apart)
}
