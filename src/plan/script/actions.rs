//! From a plan to what is done at the points at which PyTorch calls the package: where each copy
//! begins, and where its bytes are given back.

use std::collections::BTreeMap;

use serde::Serialize;

use super::course::Ran;
use super::graph::{self, Is, Planned};
use super::loans;
use super::reserved::{Asked, Reserved};
use super::updates;
use super::world::{Change, World, blocks};
use crate::contract::Event;
use crate::sim::engine::Run;
use crate::sim::program::{Direction, Program};
use crate::units::TensorId;

/// A point at which the package acts: its kind, and its number among those. The number of
/// `("unpack", n)` counts on after the last saved tensor with those that are asked for again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Point(pub &'static str, pub usize);

/// Where backward has ended.
const AFTER: Point = Point("after", 0);

/// A point, with the step that follows it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moment {
    pub place: usize,
    pub point: Point,
}

/// What happens to something at a point.
pub type Action = (&'static str, usize);

/// A schedule as the package carries it out.
#[derive(Debug, Default, Serialize)]
pub struct Actions {
    /// The storage of each activation that moves; actions name activations by number.
    pub moved: Vec<usize>,
    /// By point.
    pub actions: Vec<(&'static str, usize, Vec<Action>)>,
    /// The states that stay on the host between their updates, by the names of whole states.
    pub away: Vec<String>,
    /// For each parameter that is updated in backward the storages of its states that come and go.
    pub turns: Vec<Vec<usize>>,
    /// The storages of each parcel of parameters that leaves during backward.
    pub lent: Vec<Vec<usize>>,
    /// The most bytes that stand.
    pub peak_bytes: u64,
    /// What runs when, and what stands then.
    #[serde(skip)]
    pub ran: Ran,
    /// The most bytes that PyTorch's allocator reserves, if that is predicted.
    pub reserved_bytes: u64,
    /// The same if the allocator gives no memory back.
    #[serde(skip)]
    pub without_trims: u64,
    /// Points at which the allocator gives memory back, each with the bytes that it reserves until
    /// the next point.
    pub trims: Vec<(&'static str, usize, u64)>,
    /// How long that takes in an iteration, about.
    pub giving_back_ns: u64,
}

/// What moves.
pub(super) enum What {
    Activation(usize),
    /// A parcel, and the moment at which it must be back.
    Loan(usize, usize),
    /// The states of a parameter, and the moment at which they come.
    Turn(Vec<usize>, usize),
}

/// One way out and back: the step before which the copy to the host has ended, and the moments at
/// which it begins, at which its bytes are given back, and at which it comes back.
pub(super) struct Move {
    pub what: What,
    pub bytes: i64,
    copied: usize,
    out: usize,
    pub drop: usize,
    pub back: usize,
}

/// A plan of a world's graph.
pub struct Plan<'p> {
    /// Its events.
    pub events: &'p [Event],
    /// Its program.
    pub program: &'p Program,
    /// Its run.
    pub run: &'p Run,
    /// Its peak in bytes.
    pub peak: u64,
}

impl Plan<'_> {
    /// The start and end of a tensor's copy, by how many of its copies come before.
    fn copy(&self, direction: Direction, tensor: TensorId, before: usize) -> Option<(u64, u64)> {
        let copies = self.program.copies.iter().zip(&self.run.copies);
        let own = copies.filter(|(c, _)| c.direction == direction && c.tensor == tensor);
        let mut own: Vec<(u64, u64)> = own.map(|(_, &(start, end))| (start.0, end.0)).collect();
        own.sort_unstable();
        own.get(before).copied()
    }

    /// The first step that starts at an instant or later.
    fn step_from(&self, instant: u64) -> usize {
        self.run.steps.partition_point(|step| step.0.0 + 1 < instant)
    }

    /// The first step that starts after a copy of the tensor to the host has ended.
    fn left(&self, tensor: TensorId, before: usize, otherwise: usize) -> usize {
        let copy = self.copy(Direction::D2h, tensor, before);
        copy.map_or(otherwise, |copy| self.step_from(copy.1))
    }

    /// The first step that starts after a copy of the tensor to the device has begun.
    fn comes(&self, tensor: TensorId, before: usize) -> usize {
        let copy = self.copy(Direction::H2d, tensor, before);
        copy.map_or(0, |copy| self.step_from(copy.0))
    }
}

/// Where a tensor leaves and comes back, as places of steps.
#[derive(Default)]
struct Times {
    outs: Vec<usize>,
    ins: Vec<usize>,
}

/// Moments at which PyTorch calls the package, in order.
fn moments(world: &World<'_>, lends: bool) -> Vec<Moment> {
    let mut triggers: BTreeMap<usize, u32> = BTreeMap::new();
    for &range in &world.ranges {
        let range = &world.iteration.ranges[range];
        let order = triggers.entry(range.again).or_insert(range.order);
        *order = range.order.min(*order);
    }
    // Of those at one place what is saved comes between the askings before it and those after it.
    let mut found: Vec<(usize, i64, Point)> = Vec::new();
    for (number, pack) in world.iteration.packs.iter().enumerate() {
        found.push((world.at(pack.packed), 2 * i64::from(pack.order), Point("pack", number)));
        for (time, asked) in pack.asked.iter().enumerate() {
            let ahead = triggers.get(&asked.place).is_some_and(|&order| asked.order <= order);
            let place = if ahead { world.before(asked.place) } else { world.at(asked.place) };
            let point = Point("unpack", time * world.iteration.packs.len() + number);
            found.push((place, 2 * i64::from(asked.order) + 1, point));
        }
    }
    if let Some((_, first, after)) = loans::backward(world).filter(|_| lends) {
        found.push((first, -1, Point("backward", 0)));
        found.push((after, -1, AFTER));
    }
    found.sort_by_key(|&(place, order, _)| (place, order));
    found.into_iter().map(|(place, _, point)| Moment { place, point }).collect()
}

/// The first moment at or after a step.
fn first(moments: &[Moment], place: usize) -> Option<usize> {
    let found = moments.partition_point(|moment| moment.place < place);
    (found < moments.len()).then_some(found)
}

/// The last moment at or before a step.
fn last(moments: &[Moment], place: usize) -> Option<usize> {
    moments.partition_point(|moment| moment.place <= place).checked_sub(1)
}

/// The actions that carry out a plan of the world's graph. Their peak may be lower than the plan's,
/// as copies begin later than a plan may ask for them. With a limit it is predicted what the
/// allocator reserves, and where it should give memory back to keep to that.
#[must_use]
pub fn actions(
    world: &World<'_>,
    planned: &Planned,
    plan: &Plan<'_>,
    divisible: bool,
    limit: u64,
) -> Actions {
    let moments = moments(world, !planned.loans.is_empty());
    let mut times: BTreeMap<TensorId, Times> = BTreeMap::new();
    for event in plan.events {
        let place = event.trigger().after.map_or(0, |after| after.index() + 1);
        match *event {
            Event::SwapOut { tensor, .. } => times.entry(tensor).or_default().outs.push(place),
            Event::SwapIn { tensor, .. } => times.entry(tensor).or_default().ins.push(place),
            // What is clean leaves without a copy.
            Event::Release { tensor, .. } => {
                if matches!(planned.is(world, tensor), Is::Loan(_)) {
                    times.entry(tensor).or_default().outs.push(place);
                }
                times.entry(tensor).or_default();
            }
            Event::Recompute { .. } => {}
        }
    }
    for times in times.values_mut() {
        times.outs.sort_unstable();
        times.ins.sort_unstable();
    }
    let mut made = Actions::default();
    let mut moves = activations(world, planned, plan, &moments, &times, &mut made.moved);
    let states = times.keys().filter_map(|&tensor| match planned.is(world, tensor) {
        Is::State(state) => Some(state),
        _ => None,
    });
    let moved = if world.way.early {
        vec![false; world.states.len()]
    } else {
        graph::leaving_together(world, &states.collect())
    };
    for (tensor, times) in &times {
        if let Is::Loan(loan) = planned.is(world, *tensor) {
            let ways = loan_moves(world, planned, plan, &moments, loan, *tensor, times);
            moves.extend(ways);
        }
    }
    if world.way.early {
        moves.extend(turns(world, planned, plan, &moments, &times));
    }
    let mut unmoved = updates::standing(world, &moved, divisible);
    for one in &moves {
        if let What::Turn(_, come) = one.what {
            unmoved[..moments[come].place].iter_mut().for_each(|bytes| *bytes -= one.bytes);
        }
    }
    let standing = drop_in_time(&unmoved, &moments, &mut moves, plan.peak);
    made.peak_bytes = standing.iter().copied().max().unwrap_or(0).max(0).cast_unsigned();
    if limit > 0 {
        let (moments, moves, away, storages) = (&moments, &moves, &moved, &made.moved);
        let asked = Asked { world, moments, moves, moved: storages, away, divisible };
        let Reserved { bytes, without, trims, giving_back_ns } = asked.reserved(limit);
        let trims = trims.into_iter().map(|(Point(kind, number), more)| (kind, number, more));
        made.trims = trims.collect();
        (made.reserved_bytes, made.giving_back_ns) = (bytes, giving_back_ns);
        made.without_trims = without;
    }
    made.ran = Ran::new(plan.program, plan.run, standing);
    let name = |state: usize| world.problem.storages[world.states[state].storage].name.clone();
    made.away =
        moved.iter().enumerate().filter(|(_, moved)| **moved).map(|(s, _)| name(s)).collect();
    made.away.sort_unstable();
    made.away.dedup();
    made.write(planned, &moments, moves);
    made
}

impl Actions {
    /// Notes what is done at each point.
    fn write(&mut self, planned: &Planned, moments: &[Moment], moves: Vec<Move>) {
        let mut parcels: BTreeMap<usize, usize> = BTreeMap::new();
        let mut at: BTreeMap<(&'static str, usize), Vec<Action>> = BTreeMap::new();
        let mut act = |Point(kind, number): Point, action: Action| {
            at.entry((kind, number)).or_default().push(action);
        };
        for Move { what, out, drop, back, .. } in moves {
            match what {
                What::Activation(one) => {
                    for (what, moment) in [("out", out), ("drop", drop), ("in", back)] {
                        act(moments[moment].point, (what, one));
                    }
                }
                What::Loan(loan, home) => {
                    let one = *parcels.entry(loan).or_insert_with(|| {
                        self.lent.push(planned.loans[loan].members.clone());
                        self.lent.len() - 1
                    });
                    let ways = [("copy", out), ("lend", drop), ("fetch", back), ("home", home)];
                    for (what, moment) in ways {
                        // After backward all come back in any case.
                        if moments[moment].point != AFTER {
                            act(moments[moment].point, (what, one));
                        }
                    }
                }
                What::Turn(states, come) => {
                    self.turns.push(states);
                    let one = self.turns.len() - 1;
                    act(moments[come].point, ("come", one));
                    if let Some(moment) = moments.get(drop) {
                        act(moment.point, ("go", one));
                    }
                }
            }
        }
        self.actions =
            at.into_iter().map(|((kind, number), actions)| (kind, number, actions)).collect();
    }
}

/// One absence of an activation: what the plan says of it, and where it may be.
struct Absence {
    out: usize,
    /// The activation's, among those that move.
    number: usize,
    tensor: TensorId,
    storage: usize,
    /// How many of its absences come before.
    before: usize,
    back: usize,
    leaves: usize,
    home: usize,
}

/// The ways of activations, those that leave first in front.
fn activations(
    world: &World<'_>,
    planned: &Planned,
    plan: &Plan<'_>,
    moments: &[Moment],
    times: &BTreeMap<TensorId, Times>,
    moved: &mut Vec<usize>,
) -> Vec<Move> {
    // An operator may save several tensors, one after another: what is not saved yet can't be
    // copied, and what it read is held until it has saved the last.
    let mut held: BTreeMap<usize, usize> = BTreeMap::new();
    let mut packs = vec![0; world.iteration.packs.len()];
    for (number, moment) in moments.iter().enumerate() {
        let Point("pack", pack) = moment.point else { continue };
        packs[pack] = number;
        if let Some(storage) = world.iteration.packs[pack].storage
            && !world.runs_again(pack)
        {
            held.entry(storage).or_insert(number);
        }
    }
    for life in &world.iteration.lives {
        if let Some(last) = life.let_go_pack.checked_sub(1) {
            let free = packs[last] + 1;
            held.entry(life.storage).and_modify(|from| *from = free.max(*from)).or_insert(free);
        }
    }
    let mut all: Vec<Absence> = Vec::new();
    for (&tensor, times) in times {
        let Is::Activation(one) = planned.is(world, tensor) else { continue };
        let storage = world.movable[one].storage;
        let absences = &world.movable[one].absences;
        let known = all.len();
        for (before, (&out, &back)) in times.outs.iter().zip(&times.ins).enumerate() {
            if let Some(&(leaves, home)) = absences.iter().find(|&&(_, home)| back <= home) {
                let number = moved.len();
                all.push(Absence { out, number, tensor, storage, before, back, leaves, home });
            }
        }
        if all.len() > known {
            moved.push(storage);
        }
    }
    all.sort_by_key(|one| (one.out, one.number));
    let end = moments.len().saturating_sub(1);
    let way = |one: Absence| {
        let Absence { out, back, leaves, tensor, before, .. } = one;
        let copied = plan.left(tensor, before, out).max(leaves);
        // Pack and unpack come one after another; what is due between two waits for the later.
        let begin = first(moments, out.max(leaves))?;
        let begin = begin.max(held.get(&one.storage).copied().unwrap_or(0));
        let drop = first(moments, copied)?.max(begin);
        let home = first(moments, one.home).unwrap_or(end);
        let back = first(moments, back.max(plan.comes(tensor, before))).unwrap_or(end).min(home);
        let bytes = world.problem.storages[one.storage].blocks().cast_signed();
        let what = What::Activation(one.number);
        (begin < home && drop < back).then_some(Move {
            what,
            bytes,
            copied,
            out: begin,
            drop,
            back,
        })
    };
    all.into_iter().filter_map(way).collect()
}

/// The absences of a parcel that the moments allow. It is copied to the host once; the copy may
/// begin in forward, and its bytes are freed in backward only.
fn loan_moves(
    world: &World<'_>,
    planned: &Planned,
    plan: &Plan<'_>,
    moments: &[Moment],
    loan: usize,
    tensor: TensorId,
    times: &Times,
) -> Vec<Move> {
    let Some((_, begin, after)) = loans::backward(world) else { return Vec::new() };
    let about = &planned.loans[loan];
    let way = |(number, &out): (usize, &usize)| {
        let back = times.ins.iter().copied().filter(|&place| place >= out).min()?;
        let needed = about.uses.iter().copied().filter(|&p| p >= back).min().unwrap_or(after);
        let leaves =
            about.uses.iter().copied().filter(|&p| p < back).max().map_or(begin, |p| p + 1);
        let copied = if number == 0 { plan.left(tensor, 0, out).max(leaves) } else { leaves };
        // Nothing changes the parameters from here on, so their copy may begin as early as this.
        let ask = first(moments, out.min(begin))?;
        let drop = first(moments, copied.max(begin))?;
        // What reads a parameter without having saved it must find it there.
        let mut home = last(moments, needed)?;
        while home > 0 && moments[home - 1].place == needed {
            home -= 1;
        }
        let comes = if number == 0 { back.max(plan.comes(tensor, 0)) } else { back };
        let bring = first(moments, comes).unwrap_or(home).min(home);
        let bytes = blocks(about.bytes);
        let what = What::Loan(loan, home);
        let copied = copied.max(begin);
        (moments[drop].place >= begin && drop < bring).then_some(Move {
            what,
            bytes,
            copied,
            out: ask.min(drop),
            drop,
            back: bring,
        })
    };
    times.outs.iter().enumerate().filter_map(way).collect()
}

/// A parameter, the step of its update, and each of its states that moves, with its tensor and the
/// place at which it comes.
type Turn = (String, usize, Vec<(usize, TensorId, usize)>);

/// For each parameter that is updated in backward the states that the plan moves; they come and go
/// together.
fn turns(
    world: &World<'_>,
    planned: &Planned,
    plan: &Plan<'_>,
    moments: &[Moment],
    times: &BTreeMap<TensorId, Times>,
) -> Vec<Move> {
    let mut moved: Vec<Turn> = Vec::new();
    for (&tensor, times) in times {
        let Is::State(state) = planned.is(world, tensor) else { continue };
        let (Some(_), Some(&back)) = (times.outs.last(), times.ins.last()) else { continue };
        let (parameter, update) = (graph::parameter(world, state), world.states[state].uses[0]);
        let known = moved.iter_mut().find(|(p, u, _)| *p == parameter && *u == update);
        match known {
            Some((_, _, states)) => states.push((state, tensor, back)),
            None => moved.push((parameter, update, vec![(state, tensor, back)])),
        }
    }
    let end = moments.len();
    let way = |(_, update, states): Turn| {
        let comes = states.iter().map(|&(_, t, back)| back.max(plan.comes(t, 0))).min()?;
        let copied =
            states.iter().map(|&(_, t, _)| plan.left(t, 0, update + 1)).max()?.max(update + 1);
        let home = last(moments, update)?;
        let come = first(moments, comes).unwrap_or(end - 1).min(home);
        let bytes = states.iter().map(|&(s, ..)| world.states[s].blocks().cast_signed()).sum();
        let storages = states.iter().map(|&(s, ..)| world.states[s].storage).collect();
        let out = first(moments, update + 1).unwrap_or(end);
        let drop = first(moments, copied).unwrap_or(end);
        Some(Move { what: What::Turn(storages, come), bytes, copied, out, drop, back: end })
    };
    moved.into_iter().filter_map(way).collect()
}

/// The bytes that stand during each step, given what stands when no activation moves.
///
/// A copy may end between two moments. Where the peak allows, its bytes are given back at the
/// later; else at the earlier, where the GPU waits for the rest of the copy.
fn drop_in_time(unmoved: &[i64], moments: &[Moment], moves: &mut [Move], peak: u64) -> Vec<i64> {
    let place = |moment: usize| moments.get(moment).map_or(unmoved.len(), |m| m.place);
    let mut change = Change::new(unmoved.len());
    for one in &*moves {
        change.stand(-one.bytes, place(one.drop), unmoved.len());
        change.stand(one.bytes, place(one.back), unmoved.len());
    }
    let mut standing = change.added_to(unmoved);
    for one in moves {
        let late = place(one.drop);
        let most = standing.get(one.copied..late).and_then(|all| all.iter().max());
        if most.is_none_or(|&most| most <= peak.cast_signed()) {
            continue;
        }
        one.drop = last(moments, one.copied).map_or(one.out, |moment| moment.max(one.out));
        for bytes in standing.get_mut(place(one.drop)..late).into_iter().flatten() {
            *bytes -= one.bytes;
        }
    }
    standing
}
