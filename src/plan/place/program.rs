//! The items of a program that need addresses, and a layout written as a plan's placements.
//!
//! The spans of items are positions in program order: position 2s+1 is step s, and 2s+2 the moment
//! after it. They hold at any timing, so no order of copies can deadlock on them.

use std::collections::BTreeMap;

use super::Item;
use crate::contract::{Place, Placement};
use crate::emit::Emitted;
use crate::sim::program::{Begin, Direction, Program, Residency};
use crate::units::{BLOCK, Bytes};

const _: () =
    assert!(BLOCK == 512, "items are sized in blocks, so offsets are aligned without further care");

/// The items of a program, each with the residencies that share its offset.
#[must_use]
pub fn items(program: &Program, emitted: &Emitted) -> Vec<(Item, Vec<usize>)> {
    let end_of_iteration = 2 * u32::try_from(program.steps.len()).unwrap_or(u32::MAX / 2) + 1;
    let mut step_of_operator = BTreeMap::new();
    for (index, step) in program.steps.iter().enumerate() {
        if step.event.is_none() {
            step_of_operator.insert(step.operator, index);
        }
    }
    let position = |step: usize| 2 * u32::try_from(step).unwrap_or(u32::MAX / 2) + 1;
    // A copy out starts when those before it have started, each of them after its trigger and when
    // its tensor is there: what is recomputed at a trigger is there some steps later.
    let mut started = vec![0; program.copies.len()];
    let mut before = 0;
    for (at, copy) in program.copies.iter().enumerate() {
        if copy.direction == Direction::D2h {
            before = [copy.trigger, copy.written_by]
                .into_iter()
                .flatten()
                .map(position)
                .fold(before, u32::max);
            started[at] = before;
        }
    }
    tied(program, |_, r| {
        let from = match r.begin {
            Begin::Iteration => 0,
            Begin::Step(s) => position(s),
            Begin::Copy(c) => program.copies[c].trigger.map_or(0, |s| position(s) + 1),
        };
        let mut until = r.last_step.map_or(from, position) + 1;
        if let Some(out) = r.out {
            let copy = &program.copies[out];
            let leaving = emitted
                .leaving_until
                .get(&copy.event)
                .and_then(|op| step_of_operator.get(op))
                .map_or(0, |&s| position(s) + 1);
            until = until.max(leaving).max(started[out] + 1);
        }
        if r.stays {
            until = end_of_iteration + 1;
        }
        (from, until)
    })
}

/// The items of a program with these spans of residencies, which may share an offset: a tensor that
/// leaves and comes back to stay has one address for both.
pub fn tied(
    program: &Program,
    span: impl Fn(usize, &Residency) -> (u32, u32),
) -> Vec<(Item, Vec<usize>)> {
    let mut items: Vec<(Item, Vec<usize>)> = Vec::with_capacity(program.residencies.len());
    let mut starts: BTreeMap<u32, usize> = BTreeMap::new();
    for (index, r) in program.residencies.iter().enumerate() {
        let span = span(index, r);
        let tied = r.tensor.filter(|_| r.stays).and_then(|t| starts.get(&t.0).copied());
        if let Some(first) = tied {
            items[first].0.spans.push(span);
            items[first].1.push(index);
        } else {
            if let (Some(t), Begin::Iteration) = (r.tensor, r.begin) {
                starts.insert(t.0, items.len());
            }
            items.push((Item::new(r.bytes.0, vec![span]), vec![index]));
        }
    }
    items
}

/// The placements of items at these offsets, in the order in which residencies take over shared
/// bytes.
#[must_use]
pub fn placements(
    program: &Program,
    items: &[(Item, Vec<usize>)],
    offsets: &[u64],
) -> Vec<Placement> {
    let mut all: Vec<(u32, Place, u64)> = Vec::with_capacity(program.residencies.len());
    for ((item, residencies), &offset) in items.iter().zip(offsets) {
        // For a tensor that leaves and comes back to stay, its place in the list is that of its
        // return.
        if let (Some(&(from, _)), Some(&r)) = (item.spans.last(), residencies.last()) {
            all.push((from, program.residencies[r].place, offset));
        }
    }
    all.sort();
    all.into_iter().map(|(_, place, offset)| Placement { place, offset: Bytes(offset) }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::program::{Copy, Step};
    use crate::sim::window::Stretches;
    use crate::units::{Nanos, OpId, TensorId};

    /// Two tensors are recomputed at one trigger and leave at once, the later one first: a tensor
    /// between them must not get the bytes of the other, whose copy stands behind in the queue.
    #[test]
    fn what_leaves_behind_another_copy_holds_its_bytes_until_that_one_can_start() {
        let (first, second) = (TensorId(0), TensorId(1));
        let step = |event: Option<usize>, begins: Vec<usize>| Step {
            operator: OpId(0),
            event,
            time: Nanos(1),
            binds: Vec::new(),
            scratch: Vec::new(),
            workspace: None,
            reads_copies: Vec::new(),
            begins,
        };
        let copy = |tensor: TensorId, residency: usize, written_by: usize| Copy {
            direction: Direction::D2h,
            tensor,
            bytes: Bytes(512),
            residency,
            trigger: Some(0),
            written_by: Some(written_by),
            source: None,
            event: 2 + residency,
            pool_waits: Vec::new(),
        };
        let residency = |tensor: TensorId, at: usize, out: usize| Residency {
            tensor: Some(tensor),
            place: Place::Tensor { tensor, residency: 0 },
            bytes: Bytes(512),
            begin: Begin::Step(at),
            first_step: Some(at),
            last_step: Some(at),
            out: Some(out),
            stays: false,
            offset: None,
            previous: None,
            after: Vec::new(),
        };
        let program = Program {
            steps: vec![step(None, vec![]), step(Some(0), vec![0]), step(Some(1), vec![1])],
            copies: vec![copy(second, 1, 2), copy(first, 0, 1)],
            residencies: vec![residency(first, 1, 1), residency(second, 2, 0)],
            loaded: Bytes::ZERO,
            stretches: Stretches::default(),
        };
        let items = items(&program, &Emitted::default());
        let spans: Vec<_> = items.iter().map(|(item, _)| item.spans.clone()).collect();
        assert_eq!(spans, [[(3, 6)], [(5, 6)]]);
    }
}
