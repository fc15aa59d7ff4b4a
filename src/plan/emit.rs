//! Decisions written down as events, in the order that the queues need.
//!
//! Not for: deciding ([`super::tensile`]) or addresses ([`super::place`]).

use std::collections::BTreeMap;

use super::ledger::{Chain, Gap, Ledger};
use crate::contract::{Event, Trigger};
use crate::units::{Nanos, OpId, TensorId};

/// Events, and for each swap-out the last operator during which its bytes may still be leaving.
#[derive(Clone, Debug, Default)]
pub struct Emitted {
    /// In program order.
    pub events: Vec<Event>,
    /// By position of the swap-out in `events`.
    pub leaving_until: BTreeMap<usize, OpId>,
}

/// Where an event stands among those of the same trigger: departures, then arrivals in order of need, then recomputes.
type Rank = (u32, u8, u64, u32);

/// Writes the ledger's decisions as events.
#[must_use]
pub fn events(ledger: &Ledger<'_>) -> Emitted {
    let mut ranked: Vec<(Rank, Event, Option<OpId>)> = Vec::new();
    for (index, account) in ledger.accounts.iter().enumerate() {
        let tensor = TensorId::of(index);
        for (gap, &decision) in account.gaps.iter().enumerate() {
            let (p, _, _) = ledger.ends(tensor, gap);
            let leave = Trigger { after: Some(OpId(p)), delay: Nanos::ZERO };
            match decision {
                Gap::Keep => {}
                Gap::Swap { out_until, back_from, out_after, starts, .. } => {
                    if ledger.clean(tensor, gap) {
                        ranked.push((
                            (p + 1, 0, 0, tensor.0),
                            Event::Release { tensor, trigger: leave },
                            None,
                        ));
                    } else {
                        let until = Some(OpId((out_until - 1) / 2));
                        let trigger = Trigger { after: Some(OpId(out_after)), delay: Nanos::ZERO };
                        ranked.push((
                            (out_after + 1, 0, starts.0, tensor.0),
                            Event::SwapOut { tensor, trigger },
                            until,
                        ));
                    }
                    let place = back_from / 2;
                    let trigger =
                        Trigger { after: place.checked_sub(1).map(OpId), delay: Nanos::ZERO };
                    ranked.push((
                        (place, 1, starts.1, tensor.0),
                        Event::SwapIn { tensor, trigger },
                        None,
                    ));
                }
                Gap::Recompute => ranked.push((
                    (p + 1, 0, 0, tensor.0),
                    Event::Release { tensor, trigger: leave },
                    None,
                )),
            }
        }
    }
    for (position, chain) in in_order(ledger).into_iter().enumerate() {
        for (step, &operator) in chain.operators.iter().enumerate() {
            let keep = if step == 0 { vec![chain.tensor] } else { Vec::new() };
            let trigger =
                Trigger { after: chain.before.checked_sub(1).map(OpId), delay: Nanos::ZERO };
            let rank = (chain.before, 2, position as u64, u32::try_from(step).unwrap_or(u32::MAX));
            ranked.push((rank, Event::Recompute { operator, trigger, keep }, None));
        }
    }
    ranked.sort_by_key(|a| a.0);
    let mut emitted = Emitted::default();
    for (_, event, until) in ranked {
        if let Some(until) = until {
            emitted.leaving_until.insert(emitted.events.len(), until);
        }
        emitted.events.push(event);
    }
    emitted
}

/// Chains, those before whose tensors others are made from first.
fn in_order<'l>(ledger: &'l Ledger<'_>) -> Vec<&'l Chain> {
    fn visit<'l>(
        ledger: &'l Ledger<'_>,
        index: usize,
        done: &mut [bool],
        order: &mut Vec<&'l Chain>,
    ) {
        if std::mem::replace(&mut done[index], true) {
            return;
        }
        let chain = &ledger.chains[index];
        for &id in &chain.operators {
            for read in ledger.graph.operator(id).reads() {
                for (other, c) in ledger.chains.iter().enumerate() {
                    if c.before == chain.before && c.tensor == read.tensor && other != index {
                        visit(ledger, other, done, order);
                    }
                }
            }
        }
        order.push(chain);
    }
    let mut done = vec![false; ledger.chains.len()];
    let mut order = Vec::with_capacity(ledger.chains.len());
    for index in 0..ledger.chains.len() {
        visit(ledger, index, &mut done, &mut order);
    }
    order
}
