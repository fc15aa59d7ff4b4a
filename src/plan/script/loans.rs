//! Parameters that leave during backward while it uses none of them.

use std::collections::{BTreeMap, BTreeSet};

use super::problem::Backward;
use super::world::World;
use crate::units::Bytes;

/// A parameter of at least this many bytes leaves by itself, and so many leave together at most:
/// what comes back needs one free range of its size.
const LARGE: u64 = 32 << 20;

/// Parameters that can leave together.
#[derive(Clone, Debug)]
pub struct Loan {
    /// In the planner's graph.
    pub name: String,
    /// The parameters.
    pub members: Vec<usize>,
    /// The steps of backward that use any of them, ascending.
    pub uses: Vec<usize>,
    /// Their bytes in one storage, unrounded if it is one alone.
    pub bytes: u64,
}

impl Loan {
    /// One more that leaves together with these. Its uses are not in order yet.
    fn add(&mut self, member: usize, bytes: u64, uses: Vec<usize>) {
        self.members.push(member);
        self.bytes = Bytes(self.bytes).in_blocks().0 + Bytes(bytes).in_blocks().0;
        self.uses.extend(uses);
    }

    fn in_order(mut self) -> Self {
        self.uses.sort_unstable();
        self.uses.dedup();
        self
    }
}

/// Where backward runs, in places of steps; `None` where no parameter may leave.
#[must_use]
pub fn backward(world: &World<'_>) -> Option<(Backward, usize, usize)> {
    let known = world.problem.backward.filter(|_| world.way.lend && !world.way.early)?;
    Some((known, world.before(known.begin), world.before(known.end)))
}

/// The parameters that can leave: large ones by themselves, and neighbours of a type together that
/// backward has used before the peak of what stays.
#[must_use]
pub fn loans(world: &World<'_>) -> Vec<Loan> {
    let Some((known, first, after)) = backward(world) else { return Vec::new() };
    let size = |storage: usize| world.problem.storages[storage].bytes;
    let mut uses: BTreeMap<usize, BTreeSet<usize>> = BTreeMap::new();
    uses.extend(
        world
            .problem
            .lend
            .iter()
            .filter(|&&s| size(s) >= world.problem.smallest)
            .map(|&s| (s, BTreeSet::new())),
    );
    for place in first..after {
        let operator = world.operator(&world.steps[place]);
        for storage in operator.reads.iter().chain(&operator.writes) {
            if let Some(places) = uses.get_mut(storage) {
                places.insert(place);
            }
        }
    }
    let within = known.begin..=known.end;
    let mut asked_at = Vec::new();
    for pack in &world.iteration.packs {
        let places = pack.asked.iter().map(|asked| asked.place);
        let asked: Vec<usize> = places
            .filter(|place| within.contains(place))
            .map(|place| world.before(place))
            .collect();
        asked_at.extend_from_slice(&asked);
        if let Some(places) = pack.storage.and_then(|s| uses.get_mut(&s)) {
            places.extend(asked);
        }
    }
    asked_at.sort_unstable();
    // A function of autograd's holds what it needs until the next one asks for its own.
    let held = |place: usize| {
        let next = asked_at.partition_point(|&at| at <= place);
        place..asked_at.get(next).copied().unwrap_or(after).max(place + 1)
    };
    let held_at: Vec<(usize, Vec<usize>)> = uses
        .into_iter()
        .map(|(storage, places)| {
            let all: BTreeSet<usize> = places.into_iter().flat_map(held).collect();
            (storage, all.into_iter().filter(|place| (first..after).contains(place)).collect())
        })
        .collect();
    let peak = peak_of_what_stays(world, first, after);
    let mut found = Vec::new();
    let mut small: BTreeMap<&str, Vec<Loan>> = BTreeMap::new();
    for (storage, places) in held_at {
        let about = &world.problem.storages[storage];
        if about.bytes >= LARGE {
            let (name, members) = (about.name.clone(), vec![storage]);
            found.push(Loan { name, members, uses: places, bytes: about.bytes });
        } else if places.first().is_none_or(|&place| place > peak) {
            // PyTorch saves no two tensors of different types that share memory.
            let groups = small.entry(&about.dtype).or_default();
            match groups.last_mut().filter(|group| group.bytes + about.bytes <= LARGE) {
                Some(group) => group.add(storage, about.bytes, places),
                None => {
                    let name = format!("parameters in {} ({})", about.dtype, groups.len() + 1);
                    let (members, bytes) = (vec![storage], about.bytes);
                    groups.push(Loan { name, members, uses: places, bytes });
                }
            }
        }
    }
    found.extend(small.into_values().flatten().map(Loan::in_order));
    found
}

/// The first step of backward at which most bytes stand when all activations have left.
fn peak_of_what_stays(world: &World<'_>, first: usize, after: usize) -> usize {
    let mut rest = world.resident[first..after].to_vec();
    for one in &world.movable {
        let bytes = world.problem.storages[one.storage].blocks().cast_signed();
        let (from, until) = (one.born.max(first), one.gone.min(after));
        for place in from..until {
            rest[place - first] -= bytes;
        }
    }
    let most = rest.iter().copied().max().unwrap_or(0);
    first + rest.iter().position(|&bytes| bytes == most).unwrap_or(0)
}
