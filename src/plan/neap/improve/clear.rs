//! The plan again with some tensors away where another one needs their room in one piece.

use super::polish::{Choice, Made};
use super::{Found, Search, Warm};
use crate::neap::Options;
use crate::planner::Given;
use crate::residency::{Residencies, Swap};
use crate::units::{OpId, TensorId};

/// The slot in which an operator runs.
const fn slot(operator: OpId) -> u32 {
    2 * operator.0 + 1
}

/// Whether a tensor can be away while an operator runs.
#[must_use]
pub fn may_leave(fresh: &Residencies<'_>, tensor: TensorId, operator: OpId) -> bool {
    fresh.gap_over(tensor, slot(operator)).is_some()
}

/// What a search chose, with these tensors away while these operators run: all swapped, or what
/// the iteration generates made again, whichever takes less time. `None` where the target is
/// exceeded then.
#[must_use]
pub fn clear<'a>(
    given: &Given<'a>,
    options: &Options,
    warm: &Warm,
    away: &[(TensorId, OpId)],
) -> Option<(Residencies<'a>, Warm)> {
    let mut search = Search::new(given, options);
    search.clock = warm.clock.clone();
    let mut best: Option<Found<'a>> = None;
    for again in [false, true] {
        let mut first = Vec::with_capacity(away.len());
        let mut choices = warm.choices.clone();
        for &(tensor, operator) in away {
            let Some(gap) = search.fresh.gap_over(tensor, slot(operator)) else { continue };
            let (_, until, _) = search.fresh.ends(tensor, gap);
            choices.retain(|choice| choice.tensor != tensor || choice.until != until);
            let tight = search.fresh.tightest(tensor, gap);
            let starts = (search.clock.place(tight.out_place), search.clock.slot(until));
            let made = if again && !search.fresh.lifetime(tensor).long_lived {
                Made::Again(given.target)
            } else {
                Made::Swapped(Swap { starts, ..tight })
            };
            first.push(Choice { tensor, until, made, windows: None });
        }
        first.append(&mut choices);
        let found = search.choose_after((warm.variant, &warm.rules), &first, u64::MAX);
        if !found.key.0 && best.as_ref().is_none_or(|best| found.key < best.key) {
            best = Some(found);
        }
    }
    Some(search.done(best?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{builtin, latency};
    use crate::neap::improve;

    #[test]
    fn what_is_in_the_way_is_away() {
        let graph = crate::exact::resnet18();
        let device = builtin::find("a6000").unwrap();
        let latencies = latency::latencies(&graph, &device, None);
        let fresh = Residencies::new(&graph);
        let target = fresh.load.peak().1 / 10 * 7;
        let options = Options::default();
        let of = |graph| Given {
            graph,
            latencies: &latencies,
            link: &device.link,
            pinned: device.pinned_bytes,
            target,
        };
        let (planned, warm) =
            improve::search(&of(&graph), &options, &crate::planner::Memory::Nothing);
        // Of what is held where half of the operators have run, the largest that can leave.
        let operator = OpId::from_index(graph.operators.len() / 2);
        let held = |tensor: &TensorId| planned.held(*tensor, slot(operator));
        let all = (0..graph.tensors.len()).map(TensorId::from_index).filter(held);
        let tensor = all
            .filter(|t| may_leave(&fresh, *t, operator))
            .max_by_key(|t| (graph.tensor(*t).bytes, *t))
            .unwrap();
        // It stays away as long as the operator seems to need its memory.
        let load = planned.load.all()[slot(operator) as usize];
        let more = target - load + graph.tensor(tensor).bytes.in_blocks().0;
        let mut fuller = graph.clone();
        fuller.operators[operator.index()].workspace += crate::units::Bytes(more).in_blocks();
        let (cleared, _) = clear(&of(&fuller), &options, &warm, &[(tensor, operator)]).unwrap();
        assert!(!cleared.held(tensor, slot(operator)));
        assert!(cleared.load.peak().1 <= target);
    }
}
