//! The optimizer's step: which updates run in one call, which states are on the device for them,
//! and how large updates are divided. `python/neap/torch/_states.py` carries this out and divides
//! the step in the same way.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use super::problem::{Phase, Role};
use super::world::{Step, World};
use crate::units::Bytes;

/// Which part of an update a step is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Piece {
    /// Its number.
    pub number: u32,
    /// Of how many.
    pub count: u32,
}

impl Piece {
    /// The only one.
    pub const WHOLE: Self = Self { number: 0, count: 1 };
}

/// An optimizer state, or the part of it that one step uses.
#[derive(Clone, Debug)]
pub struct State {
    /// The state.
    pub storage: usize,
    /// The number of the part, where it has several.
    pub part: Option<u32>,
    /// Its bytes, unrounded.
    pub bytes: u64,
    /// The steps that use it.
    pub uses: Vec<usize>,
}

impl State {
    /// The bytes that the allocator gives out for it.
    #[must_use]
    pub const fn blocks(&self) -> u64 {
        Bytes(self.bytes).in_blocks().0
    }
}

/// The parts in which a parameter of `size` bytes is updated, each by its first byte and the one
/// after its last, given the bytes of all its states and those that a piece should have.
fn bounds(size: u64, states: u64, piece: u64) -> Vec<(u64, u64)> {
    let count = states / piece.max(1);
    if count < 2 {
        return vec![(0, size)];
    }
    let step = Bytes(size.div_ceil(count)).in_blocks().0;
    let firsts = (0..).map(|n| n * step).take_while(|&first| first < size);
    firsts.map(|first| (first, (first + step).min(size))).collect()
}

/// Those of the storages that are states large enough to move, each once.
fn large<'s>(world: &'s World<'_>, storages: impl IntoIterator<Item = &'s usize>) -> Vec<usize> {
    let mut found = Vec::new();
    for &storage in storages {
        let is = world.role(storage) == Role::OptimizerState
            && world.problem.storages[storage].bytes >= world.problem.smallest;
        if is && !found.contains(&storage) {
            found.push(storage);
        }
    }
    found
}

/// In how many parts each recorded operator runs.
#[must_use]
pub fn pieces_of_updates(world: &World<'_>) -> Vec<u32> {
    let operators = &world.iteration.operators;
    let mut pieces = vec![1; operators.len()];
    // Inside backward an update is not divided.
    if !world.problem.move_states || world.way.early {
        return pieces;
    }
    // For each state the one operator that uses it.
    let mut owners: BTreeMap<usize, Option<usize>> = BTreeMap::new();
    for (place, operator) in operators.iter().enumerate() {
        for state in large(world, operator.reads.iter().chain(&operator.writes)) {
            owners.entry(state).and_modify(|owner| *owner = None).or_insert(Some(place));
        }
    }
    for (place, operator) in operators.iter().enumerate() {
        let written = operator.writes.iter().filter(|&&s| world.role(s) == Role::Parameter);
        let [parameter] = written.collect::<Vec<_>>()[..] else { continue };
        if !operator.update || operator.phase != Phase::Optimize {
            continue;
        }
        let size = world.problem.storages[*parameter].bytes;
        let states = large(world, operator.reads.iter().chain(&operator.writes));
        let alone = |&state: &usize| {
            owners[&state] == Some(place) && world.problem.storages[state].bytes == size
        };
        if !states.is_empty() && states.iter().all(alone) {
            let parts = bounds(size, states.len() as u64 * size, world.way.piece);
            pieces[place] = u32::try_from(parts.len()).unwrap_or(1);
        }
    }
    pieces
}

/// Optimizer states that only updates of single parameters use.
#[must_use]
pub fn states(world: &World<'_>) -> Vec<State> {
    let mut found: Vec<State> = Vec::new();
    let mut number: BTreeMap<(usize, Option<u32>), usize> = BTreeMap::new();
    for (place, step) in world.steps.iter().enumerate() {
        let operator = world.operator(step);
        let states = large(world, operator.reads.iter().chain(&operator.writes));
        for &storage in &states {
            let part = (step.piece.count > 1).then_some(step.piece.number);
            let at = *number.entry((storage, part)).or_insert_with(|| {
                let bytes = world.problem.storages[storage].bytes;
                let parts = bounds(bytes, states.len() as u64 * bytes, world.way.piece);
                let (first, after) =
                    part.and_then(|n| parts.get(n as usize)).copied().unwrap_or((0, bytes));
                found.push(State { storage, part, bytes: after - first, uses: Vec::new() });
                found.len() - 1
            });
            found[at].uses.push(place);
        }
    }
    found.retain(|state| {
        let updates = |&place: &usize| world.operator(&world.steps[place]).update;
        let early =
            state.uses.len() == 1 && world.phase(&world.steps[state.uses[0]]) == Phase::Backward;
        state.uses.iter().all(updates) && (early || !world.way.early)
    });
    found
}

/// Whether a piece that has these parameters and bytes of states takes no more bytes. All states of
/// a piece are on the device for its update, so what would make it much larger begins the next.
const fn full(parameters: usize, most: usize, size: u64, more: u64, piece: u64) -> bool {
    parameters >= most || size >= piece || (size > 0 && 2 * (size + more) > piece.saturating_mul(3))
}

/// Which updates run in one call, by step.
#[must_use]
pub fn calls(world: &World<'_>, divisible: bool) -> Vec<Vec<usize>> {
    let mut calls: Vec<Vec<usize>> = Vec::new();
    let (mut size, most) = (0, world.problem.piece.parameters);
    for (place, step) in world.steps.iter().enumerate() {
        let operator = world.operator(step);
        if !operator.update || operator.phase != Phase::Optimize || step.again {
            continue;
        }
        let more = written_states(world, step);
        let last = calls.last();
        let begins = last.is_none_or(|call| {
            let is_full = full(call.len(), most, size, more, world.way.piece);
            (divisible && is_full) || call.last() != place.checked_sub(1).as_ref()
        });
        if begins {
            calls.push(Vec::new());
            size = 0;
        }
        if let Some(call) = calls.last_mut() {
            call.push(place);
        }
        size += more;
    }
    calls
}

/// The bytes of the states that a step writes.
fn written_states(world: &World<'_>, step: &Step) -> u64 {
    let states = large(world, &world.operator(step).writes);
    let part = |&storage: &usize| {
        let bytes = world.problem.storages[storage].bytes;
        let known = (step.piece.count > 1).then(|| {
            let named = |s: &&State| s.storage == storage && s.part == Some(step.piece.number);
            world.states.iter().find(named).map(|state| state.bytes)
        });
        known.flatten().unwrap_or(bytes)
    };
    states.iter().map(part).sum()
}

/// For each update the steps while which its states are on the device.
pub type Here = BTreeMap<usize, Rc<[usize]>>;

/// See [`Here`].
#[must_use]
pub fn here(world: &World<'_>, calls: &[Vec<usize>]) -> Here {
    let reach = usize::from(world.way.ahead);
    let mut found = BTreeMap::new();
    for (number, call) in calls.iter().enumerate() {
        let near = &calls[number.saturating_sub(reach)..(number + reach + 1).min(calls.len())];
        let places: Rc<[usize]> = near.iter().flatten().copied().collect();
        found.extend(call.iter().map(|&place| (place, Rc::clone(&places))));
    }
    found
}

/// The steps while which a state is on the device, ascending.
#[must_use]
pub fn while_here(state: &State, here: &Here) -> BTreeSet<usize> {
    let mut places: BTreeSet<usize> = state.uses.iter().copied().collect();
    places.extend(state.uses.iter().filter_map(|place| here.get(place)).flat_map(|near| &**near));
    places
}

/// The least bytes that stand during the optimizer's step when all states are away that can be:
/// with those of one piece, or where copies run ahead, of three.
#[must_use]
pub fn step_peak(world: &World<'_>) -> u64 {
    let here = here(world, &calls(world, true));
    let away: u64 = world.states.iter().map(State::blocks).sum();
    let mut bytes: BTreeMap<usize, u64> = here.keys().map(|&place| (place, 0)).collect();
    for state in &world.states {
        for place in while_here(state, &here) {
            *bytes.entry(place).or_insert(0) += state.blocks();
        }
    }
    let at = |(&place, &more): (&usize, &u64)| {
        world.resident[place] - away.cast_signed() + more.cast_signed()
    };
    bytes.iter().map(at).max().unwrap_or(0).max(0).cast_unsigned()
}

/// For each update the bytes beyond its own workspace: one operator that updates many parameters
/// holds the temporaries of all of them at once.
#[must_use]
pub fn scratch(world: &World<'_>, calls: &[Vec<usize>]) -> Vec<(usize, i64)> {
    let mut found = Vec::new();
    for call in calls.iter().filter(|_| world.problem.multi_tensor) {
        let workspace = |&place: &usize| world.workspace(&world.steps[place]);
        let all: i64 = call.iter().map(workspace).sum();
        found.extend(call.iter().map(|place| (*place, all - workspace(place))));
    }
    found
}

/// The bytes that stand during each step when no activation is moved, and these states are on the
/// device for their updates only.
#[must_use]
pub fn standing(world: &World<'_>, moved: &[bool], divisible: bool) -> Vec<i64> {
    let calls = calls(world, divisible);
    let here = here(world, &calls);
    let mut found = world.resident.clone();
    for (place, more) in scratch(world, &calls) {
        found[place] += more;
    }
    let mut away = 0;
    for (state, _) in world.states.iter().zip(moved).filter(|(_, moved)| **moved) {
        let bytes = state.blocks().cast_signed();
        away += bytes;
        for place in while_here(state, &here) {
            found[place] += bytes;
        }
    }
    found.iter_mut().for_each(|bytes| *bytes -= away);
    found
}
