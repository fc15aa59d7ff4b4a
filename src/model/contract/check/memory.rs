//! Addresses, the pinned pool, and the bytes held at each instant.

use std::collections::BTreeMap;

use super::program::{Kind, Program, Residency, Wait, Why};
use super::refusal::Refusal;
use super::timeline::{Clock, work};
use super::{Refusals, blocks};
use crate::contract::plan::{JobPlan, Place};
use crate::device::Link;
use crate::job::Graph;
use crate::units::{Bytes, TensorId, saturated};

/// Checks the slots in the pinned pool, and adds the waits that shared bytes cause. Returns the
/// ranges of the slots.
pub(super) fn slots(
    job: &JobPlan,
    program: &mut Program,
    pinned: Bytes,
    refusals: &mut Refusals,
) -> Vec<(u128, u128)> {
    for tensor in (0..program.copied.len()).filter(|t| program.copied[*t]) {
        if !job.host_slots.contains_key(&TensorId::from_index(tensor)) {
            refusals.add(Refusal::SlotMissing { tensor: program.tensor(tensor) });
        }
    }
    let mut all = Vec::with_capacity(job.host_slots.len());
    for (&tensor, &offset) in &job.host_slots {
        let name = || program.tensor(tensor.index());
        if !program.copied[tensor.index()] {
            refusals.add(Refusal::SlotUnused { tensor: name() });
        }
        if offset.0 % 512 != 0 {
            refusals.add(Refusal::SlotMisaligned { tensor: name(), offset: offset.0 });
        }
        let end = u128::from(offset.0) + blocks(program.graph.tensors[tensor.index()].bytes);
        if end > u128::from(pinned.0) {
            refusals.add(Refusal::BeyondPinned { tensor: name(), end, pinned: pinned.0 });
        }
        all.push((u128::from(offset.0), end));
    }
    share(job, program, refusals);
    all
}

/// Goes through the slots in the order of their first copies, with a map of the owner of each byte.
/// A tensor owns its bytes from its first copy to its last; a tensor that starts on the host always
/// owns them.
fn share(job: &JobPlan, program: &mut Program, refusals: &mut Refusals) {
    // The first copy and all copies of each tensor, in order.
    let mut copies: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for (task, what) in program.tasks.iter().enumerate() {
        if let Kind::Out { tensor, .. } | Kind::In { tensor, .. } = what.kind {
            copies.entry(tensor).or_default().push(task);
        }
    }
    let mut order: Vec<(bool, usize, usize, u128)> = Vec::with_capacity(copies.len());
    for (&tensor, tasks) in &copies {
        if let (Some(offset), Some(&first)) =
            (job.host_slots.get(&TensorId::from_index(tensor)), tasks.first())
        {
            order.push((!program.on_host[tensor], first, tensor, u128::from(offset.0)));
        }
    }
    order.sort_unstable();
    let mut owners: BTreeMap<u128, Owner> = BTreeMap::new();
    for (_, first, tensor, offset) in order {
        let end = offset + blocks(program.graph.tensors[tensor].bytes);
        let place = Place::Tensor { tensor: TensorId::from_index(tensor), residency: 0 };
        for (start, earlier) in take(&mut owners, offset, Owner { end, place, holder: Ok(tensor) })
        {
            let (Ok(other) | Err(other)) = earlier.holder;
            let theirs = &copies[&other];
            if program.on_host[other]
                || program.on_host[tensor]
                || theirs.iter().any(|task| *task >= first)
            {
                let (one, two) = (program.tensor(other), program.tensor(tensor));
                refusals.add(Refusal::SlotsOverlap {
                    first: one,
                    second: two,
                    offset: saturated(start.max(offset)),
                });
                continue;
            }
            program.tasks[first]
                .waits
                .extend(theirs.iter().map(|&task| Wait { task, why: Why::Pool(other) }));
        }
    }
}

/// A residency or workspace that needs an address.
#[derive(Default)]
pub(super) struct Spot {
    pub size: u128,
    /// The residency that exists at the start of the iteration.
    pub head: Option<usize>,
    /// The residency that begins in the iteration.
    pub body: Option<usize>,
    /// The step whose workspace it is.
    pub step: Option<usize>,
    placed: Option<u64>,
}

/// The last owner of a range of the arena.
#[derive(Clone, Copy)]
struct Owner {
    end: u128,
    place: Place,
    /// `Ok`: the residency. `Err`: the step of a workspace.
    holder: Result<usize, usize>,
}

/// Checks the placements and adds the waits that they cause. Returns the placed ranges and the end
/// of the arena.
pub(super) fn places(
    job: &JobPlan,
    program: &mut Program,
    budget: Bytes,
    refusals: &mut Refusals,
) -> (BTreeMap<Place, Spot>, u128) {
    let mut spots = expected(program);
    let mut arena = 0;
    for (position, placement) in job.placements.iter().enumerate() {
        let (place, offset) = (placement.place, placement.offset.0);
        let Some(spot) = spots.get_mut(&place) else {
            refusals.add(Refusal::PlacedNothing { position, place: program.place(place) });
            continue;
        };
        if let Some(first) = spot.placed {
            refusals.add(Refusal::PlacedTwice {
                place: program.place(place),
                first,
                second: offset,
            });
            continue;
        }
        spot.placed = Some(offset);
        if offset % 512 != 0 {
            refusals.add(Refusal::Misaligned { place: program.place(place), offset });
        }
        let end = u128::from(offset) + spot.size;
        if end > u128::from(budget.0) {
            refusals.add(Refusal::BeyondBudget {
                place: program.place(place),
                offset,
                end,
                budget: budget.0,
            });
        }
        arena = end.max(arena);
    }
    for (place, _) in spots.iter().filter(|(_, spot)| spot.placed.is_none()) {
        refusals.add(Refusal::NotPlaced { place: program.place(*place) });
    }
    if refusals.0.is_empty() {
        hand_over(job, program, &spots, refusals);
    }
    (spots, arena)
}

fn expected(program: &Program) -> BTreeMap<Place, Spot> {
    let mut spots: BTreeMap<Place, Spot> = BTreeMap::new();
    for (index, residency) in program.residencies.iter().enumerate() {
        let place = Place::Tensor {
            tensor: TensorId::from_index(residency.tensor),
            residency: residency.number,
        };
        let spot = spots.entry(place).or_default();
        spot.size = blocks(program.graph.tensors[residency.tensor].bytes);
        if residency.begin.is_none() {
            spot.head = Some(index);
        } else {
            spot.body = Some(index);
        }
    }
    for (step, &task) in (0u32..).zip(&program.steps) {
        let size = program.tasks[task].workspace;
        if size > 0 {
            spots.insert(
                Place::Workspace { step },
                Spot { size, step: Some(task), ..Spot::default() },
            );
        }
    }
    spots
}

/// Goes through the placements in their order, with a map of the last owner of each byte. Each
/// owner has waited for the one before, so only the last owners matter.
fn hand_over(
    job: &JobPlan,
    program: &mut Program,
    spots: &BTreeMap<Place, Spot>,
    refusals: &mut Refusals,
) {
    let mut owners: BTreeMap<u128, Owner> = BTreeMap::new();
    let listed = || {
        job.placements
            .iter()
            .filter_map(|p| Some((p.place, u128::from(p.offset.0), spots.get(&p.place)?)))
    };
    for (place, offset, spot) in listed() {
        if let Some(head) = spot.head {
            for (start, earlier) in take(
                &mut owners,
                offset,
                Owner { end: offset + spot.size, place, holder: Ok(head) },
            ) {
                let (first, second) = (program.place(earlier.place), program.place(place));
                refusals.add(Refusal::Overlap {
                    first,
                    second,
                    offset: saturated(start.max(offset)),
                });
            }
        }
    }
    for (place, offset, spot) in listed() {
        let (holder, begin) = match (spot.body, spot.step) {
            (Some(body), _) => (Ok(body), program.residencies[body].begin),
            (None, Some(step)) => (Err(step), Some(step)),
            (None, None) => continue,
        };
        let Some(begin) = begin else { continue };
        for (start, earlier) in
            take(&mut owners, offset, Owner { end: offset + spot.size, place, holder })
        {
            let at = saturated(start.max(offset));
            let ends: Vec<usize> = match earlier.holder {
                Err(step) => vec![step],
                Ok(residency) if program.residencies[residency].stays => {
                    let (first, second) = (program.place(earlier.place), program.place(place));
                    refusals.add(Refusal::Overlap { first, second, offset: at });
                    continue;
                }
                Ok(residency) => program.residencies[residency].ends(&program.tasks).collect(),
            };
            let why = Why::Address(earlier.place, at);
            program.tasks[begin].waits.extend(ends.into_iter().map(|task| Wait { task, why }));
        }
    }
}

/// Gives a range to a new owner. Returns the old owners and where their ranges started.
fn take(owners: &mut BTreeMap<u128, Owner>, start: u128, owner: Owner) -> Vec<(u128, Owner)> {
    if start >= owner.end {
        return Vec::new();
    }
    let first = owners
        .range(..=start)
        .next_back()
        .filter(|(_, o)| o.end > start)
        .map_or(start, |(s, _)| *s);
    let old: Vec<(u128, Owner)> = owners.range(first..owner.end).map(|(s, o)| (*s, *o)).collect();
    for (s, o) in &old {
        owners.remove(s);
        if *s < start {
            owners.insert(*s, Owner { end: start, ..*o });
        }
        if o.end > owner.end {
            owners.insert(owner.end, *o);
        }
    }
    owners.insert(start, owner);
    old
}

/// The largest sum of bytes at any instant of the timeline, over some residencies and the
/// workspaces of some steps.
pub(super) fn peak(
    program: &Program,
    clock: &Clock,
    residencies: impl Fn(usize) -> bool,
    workspaces: impl Fn(usize) -> bool,
) -> u128 {
    let mut changes: Vec<(u128, bool, u128)> = Vec::with_capacity(2 * program.residencies.len());
    let mut hold = |start: u128, end: u128, size: u128| {
        if start < end {
            changes.push((start, true, size));
            changes.push((end, false, size));
        }
    };
    for (_, residency) in
        program.residencies.iter().enumerate().filter(|(index, _)| residencies(*index))
    {
        let start = residency.begin.map_or(0, |task| clock.start[task]);
        hold(
            start,
            end(residency, program, clock),
            blocks(program.graph.tensors[residency.tensor].bytes),
        );
    }
    for &task in program.steps.iter().filter(|task| workspaces(**task)) {
        hold(clock.start[task], clock.stop[task], program.tasks[task].workspace);
    }
    // At the same instant, ends come before starts.
    changes.sort_unstable();
    let (mut held, mut peak) = (0u128, 0);
    for (_, start, size) in changes {
        held = if start { held + size } else { held - size };
        peak = held.max(peak);
    }
    peak
}

fn end(residency: &Residency, program: &Program, clock: &Clock) -> u128 {
    if residency.stays {
        return clock.end;
    }
    let ends = residency.ends(&program.tasks).map(|task| clock.stop[task]);
    ends.max().unwrap_or(0)
}

/// Nanoseconds to load the tensors that start on the device, one copy after the other.
pub(super) fn loading(program: &Program, link: &Link) -> u128 {
    let start =
        (0..program.graph.tensors.len()).filter(|t| !program.generated[*t] && !program.on_host[*t]);
    start
        .map(|t| {
            work(program.graph.tensors[t].bytes.0, link.h2d, link).div_ceil(u128::from(link.h2d))
        })
        .sum()
}

/// The liveness peak: every tensor is freed after its last use; kept tensors stay round the end.
pub(super) fn unplanned_peak(graph: &Graph) -> u128 {
    let operators = graph.operators.len();
    // For each tensor the operator that generates it and the last one that touches it.
    let mut lives: Vec<(Option<usize>, usize)> = vec![(None, 0); graph.tensors.len()];
    for (position, operator) in graph.operators.iter().enumerate() {
        for operand in operator.reads().chain(operator.writes()) {
            lives[operand.tensor.index()].1 = position;
        }
        for operand in operator.generates() {
            lives[operand.tensor.index()].0 = Some(position);
        }
    }
    // Bytes that begin with each operator, and bytes freed before it starts.
    let (mut begins, mut ends) = (vec![0u128; operators + 1], vec![0u128; operators + 1]);
    for (tensor, (generator, last)) in graph.tensors.iter().zip(lives) {
        let size = blocks(tensor.bytes);
        let Some(generator) = generator else {
            begins[0] += size;
            continue;
        };
        begins[generator] += size;
        match tensor.kept_until {
            None => ends[last + 1] += size,
            Some(until) => {
                // It is also held at the start; if it is generated before it is freed, it counts
                // once.
                begins[0] += size;
                ends[until.index().min(generator)] += size;
            }
        }
    }
    let (mut held, mut peak) = (0u128, 0);
    for position in 0..=operators {
        held = held + begins[position] - ends[position];
        let workspace = graph.operators.get(position).map_or(0, |o| blocks(o.workspace));
        peak = (held + workspace).max(peak);
    }
    peak
}
