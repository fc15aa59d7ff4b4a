//! Decisions written down as events, in the order that the queues need.
//!
//! Not for: deciding, or addresses.

use std::collections::BTreeMap;

use super::book::{Book, Gap};
use crate::contract::{Event, Trigger};
use crate::emit::Emitted;
use crate::units::{Nanos, OpId, TensorId};

/// Where an event stands: its place, then departures, arrivals in order of need, recomputes, what leaves after these.
type Rank = (u32, u8, u64, u32);

/// Writes the decisions as events.
#[must_use]
pub fn events(book: &Book<'_>) -> Emitted {
    let mut ranked: Vec<(Rank, Event, Option<OpId>)> = Vec::new();
    let at = |place: u32| Trigger { after: place.checked_sub(1).map(OpId), delay: Nanos::ZERO };
    for (index, account) in book.accounts.iter().enumerate() {
        let tensor = TensorId::of(index);
        for (gap, &decision) in account.gaps.iter().enumerate() {
            let (a, _, _) = book.ends(tensor, gap);
            let (place, late) = (a.div_ceil(2), if a % 2 == 0 { 3 } else { 0 });
            let leaves = (place, late, 0, tensor.0);
            let release = Event::Release { tensor, trigger: at(place) };
            match decision {
                Gap::Keep => {}
                Gap::Remake => ranked.push((leaves, release, None)),
                Gap::Swap(w) => {
                    if book.clean(tensor, gap) {
                        ranked.push((leaves, release, None));
                    } else {
                        let rank = if w.out_place == place && !w.head { late } else { 0 };
                        let trigger = at(w.out_place);
                        let until = Some(OpId(w.out_until.saturating_sub(1) / 2));
                        ranked.push((
                            (w.out_place, rank, w.starts.0, tensor.0),
                            Event::SwapOut { tensor, trigger },
                            until,
                        ));
                    }
                    let place = w.back_from / 2;
                    ranked.push((
                        (place, 1, w.starts.1, tensor.0),
                        Event::SwapIn { tensor, trigger: at(place) },
                        None,
                    ));
                }
            }
        }
    }
    let mut kept: BTreeMap<(u32, TensorId), Vec<TensorId>> = BTreeMap::new();
    for (&(slot, tensor), &maker) in &book.shared {
        kept.entry((slot, maker)).or_default().push(tensor);
    }
    for (position, (slot, tensor)) in in_order(book).into_iter().enumerate() {
        for (step, &operator) in book.chains[&(slot, tensor)].iter().enumerate() {
            let mut keep = Vec::new();
            if step == 0 {
                keep.push(tensor);
                keep.extend(kept.get(&(slot, tensor)).into_iter().flatten());
            }
            let rank = (slot / 2, 2, position as u64, u32::try_from(step).unwrap_or(u32::MAX));
            ranked.push((rank, Event::Recompute { operator, trigger: at(slot / 2), keep }, None));
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

/// Chains by slot, those before whose tensors others are made from first.
fn in_order(book: &Book<'_>) -> Vec<(u32, TensorId)> {
    fn visit(
        book: &Book<'_>,
        key: (u32, TensorId),
        done: &mut BTreeMap<(u32, TensorId), ()>,
        order: &mut Vec<(u32, TensorId)>,
    ) {
        if done.insert(key, ()).is_some() {
            return;
        }
        for &id in &book.chains[&key] {
            for read in book.needs(id, key.1) {
                if let Some(maker) = book.maker(key.0, read) {
                    visit(book, (key.0, maker), done, order);
                }
            }
        }
        order.push(key);
    }
    let mut done = BTreeMap::new();
    let mut order = Vec::with_capacity(book.chains.len());
    for &key in book.chains.keys() {
        visit(book, key, &mut done, &mut order);
    }
    order
}
