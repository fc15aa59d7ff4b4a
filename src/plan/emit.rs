//! Decisions written down as events, in the order that the queues of copies need.

use std::collections::{BTreeMap, BTreeSet};

use super::residency::{Gap, Residencies};
use crate::contract::{Event, Trigger};
use crate::units::{OpId, TensorId};

/// Events, and for each swap-out the last operator during which its bytes may still be leaving.
#[derive(Clone, Debug, Default)]
pub struct Emitted {
    /// In program order.
    pub events: Vec<Event>,
    /// By position of the swap-out in `events`.
    pub leaving_until: BTreeMap<usize, OpId>,
}

/// The order of events: by place (the number of operators before it). At one place tensors first
/// leave, then others arrive in the order in which they are needed, then recomputes run, and then
/// tensors leave that a recompute used last.
type Rank = (u32, u8, u64, u32);

/// Writes the decisions as events.
#[must_use]
pub fn events(residencies: &Residencies<'_>) -> Emitted {
    let mut ranked: Vec<(Rank, Event, Option<OpId>)> = Vec::new();
    let at = |place: u32| Trigger { after: place.checked_sub(1).map(OpId) };
    for (tensor, gap, decision) in residencies.decisions() {
        let (a, _, _) = residencies.ends(tensor, gap);
        let (place, late) = (a.div_ceil(2), if a % 2 == 0 { 3 } else { 0 });
        let leaves = (place, late, 0, tensor.0);
        let release = Event::Release { tensor, trigger: at(place) };
        match decision {
            Gap::Keep => {}
            Gap::Recompute => ranked.push((leaves, release, None)),
            Gap::Swap(swap) => {
                if residencies.clean(tensor, gap) {
                    ranked.push((leaves, release, None));
                } else {
                    let from = residencies.out_place(tensor, gap, &swap);
                    let late = if from == place { late } else { 0 };
                    let rank = (from, late, swap.starts.0, tensor.0);
                    let event = Event::SwapOut { tensor, trigger: at(from) };
                    ranked.push((rank, event, Some(OpId(swap.out_until.saturating_sub(1) / 2))));
                }
                let place = swap.back_from / 2;
                let event = Event::SwapIn { tensor, trigger: at(place) };
                ranked.push(((place, 1, swap.starts.1, tensor.0), event, None));
            }
        }
    }
    let mut kept: BTreeMap<(u32, TensorId), Vec<TensorId>> = BTreeMap::new();
    for (&(slot, tensor), &maker) in &residencies.shared {
        kept.entry((slot, maker)).or_default().push(tensor);
    }
    for (position, (slot, tensor)) in in_order(residencies).into_iter().enumerate() {
        let operators = &residencies.chains[&(slot, tensor)].operators;
        for (step, &operator) in (0..).zip(operators) {
            let mut keep = Vec::new();
            if step == 0 {
                keep.push(tensor);
                keep.extend(kept.get(&(slot, tensor)).into_iter().flatten());
            }
            let event = Event::Recompute { operator, trigger: at(slot / 2), keep };
            ranked.push(((slot / 2, 2, position as u64, step), event, None));
        }
    }
    ranked.sort_by_key(|r| r.0);
    let mut emitted = Emitted::default();
    for (_, event, until) in ranked {
        if let Some(until) = until {
            emitted.leaving_until.insert(emitted.events.len(), until);
        }
        emitted.events.push(event);
    }
    emitted
}

/// Chains by slot and turn, but after those that make what they read.
fn in_order(residencies: &Residencies<'_>) -> Vec<(u32, TensorId)> {
    type Key = (u32, TensorId);
    fn visit(of: &Residencies<'_>, key: Key, done: &mut BTreeSet<Key>, order: &mut Vec<Key>) {
        if !done.insert(key) {
            return;
        }
        for &id in &of.chains[&key].operators {
            for maker in of.needs(id, key.1).filter_map(|read| of.made_by(key.0, read)) {
                visit(of, (key.0, maker), done, order);
            }
        }
        order.push(key);
    }
    let mut keys: Vec<Key> = residencies.chains.keys().copied().collect();
    keys.sort_by_key(|key| (key.0, residencies.chains[key].turn, key.1));
    let mut done = BTreeSet::new();
    let mut order = Vec::with_capacity(keys.len());
    for key in keys {
        visit(residencies, key, &mut done, &mut order);
    }
    order
}
