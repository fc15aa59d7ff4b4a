//! The course of a planned iteration beside that of the same iteration without a plan, to be drawn:
//! bytes over time, copies, what runs again, and waits. Its size is bounded whatever the script is.

use std::collections::BTreeMap;
use std::ops::Range;
use std::slice;

use serde::{Deserialize, Serialize};

use super::graph::{Is, Planned};
use super::updates;
use super::world::{Way, World};
use crate::sim::engine::Run;
use crate::sim::program::{Direction, Program};
use crate::units::TensorId;

/// The most stretches of a curve. Of each the lowest and the highest value are kept.
const STRETCHES: usize = 512;
/// The most things that have a row: those of the most bytes.
const THINGS: usize = 400;
/// The most waits: the longest.
const WAITS: usize = 100;

/// How a plan runs: the bytes that stand during each step, when the step runs, and the copies.
#[derive(Debug, Default)]
pub struct Ran {
    /// By step.
    standing: Vec<i64>,
    /// The first nanosecond of each step, and the one after its last.
    steps: Vec<(u64, u64)>,
    /// By tensor, in order of their start: whether it comes back, from when and until when.
    copies: BTreeMap<TensorId, Vec<(bool, u64, u64)>>,
    /// The time of the iteration.
    end: u64,
}

impl Ran {
    /// What was simulated, with the bytes that stand.
    #[must_use]
    pub fn new(program: &Program, run: &Run, standing: Vec<i64>) -> Self {
        let mut copies: BTreeMap<TensorId, Vec<_>> = BTreeMap::new();
        for (copy, &(from, until)) in program.copies.iter().zip(&run.copies) {
            let back = copy.direction == Direction::H2d;
            copies.entry(copy.tensor).or_default().push((back, from.0, until.0));
        }
        copies.values_mut().for_each(|all| all.sort_unstable_by_key(|&(_, from, _)| from));
        let steps = run.steps.iter().map(|&(from, until)| (from.0, until.0)).collect();
        Self { standing, steps, copies, end: run.iteration.0 }
    }

    /// The most bytes that stand during a step that runs within these nanoseconds.
    fn most(&self, within: &Range<u64>) -> u64 {
        let inside = |&(&(from, until), _): &(&(u64, u64), &i64)| {
            within.start <= from && until <= within.end && from < until
        };
        let steps = self.steps.iter().zip(&self.standing).filter(inside);
        steps.map(|(_, &bytes)| bytes).max().unwrap_or(0).max(0).cast_unsigned()
    }
}

/// The course of an iteration. It is kept as the text of [`Course::text`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Course {
    /// Bytes over time without a plan.
    pub unplanned: Curve,
    /// With the plan.
    pub planned: Curve,
    /// What the plan moves or runs again, those of the most bytes first.
    pub things: Vec<Thing>,
    /// How many of these there are in all.
    pub count: usize,
    /// The operators that wait longest: the name, when the wait begins, and how long it is.
    pub waits: Vec<(String, u64, u64)>,
}

/// Something that leaves the device, or runs again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Thing {
    /// Its name in the recording.
    pub name: String,
    /// The module that it belongs to; empty where that is not known.
    pub module: String,
    /// What it is.
    pub kind: Kind,
    /// The bytes that its absence gives back.
    pub bytes: u64,
    /// How many nanoseconds of the iteration it is away.
    pub away_ns: u64,
    /// The most bytes that would stand while it is away if it alone stayed.
    pub else_bytes: u64,
    /// Its copies, or its running again: what, from when, and for how long.
    pub spans: Vec<(What, u64, u64)>,
}

/// What a [`Thing`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// What autograd saved for backward.
    Activation,
    /// A state of the optimizer, or a part of one.
    State,
    /// Parameters that leave during backward.
    Parameters,
    /// A call of a module, or an operator, that runs again.
    Again,
}

/// What happens in a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum What {
    /// A copy to the host.
    Out,
    /// A copy back.
    In,
    /// Operators run again.
    Again,
}

/// A value over time as differences to the instant and the value before, which are mostly short.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Curve {
    at: Vec<u64>,
    bytes: Vec<i64>,
}

impl Curve {
    /// The value from each instant on. Of many instants those are kept at which a stretch of them
    /// has its lowest and its highest value; the last, where the curve ends, is always kept.
    fn new(points: &[(u64, u64)]) -> Self {
        let mut curve = Self::default();
        let mut before = (0u64, 0u64);
        let mut add = |(at, bytes): (u64, u64)| {
            curve.at.push(at.saturating_sub(before.0));
            curve.bytes.push(bytes.cast_signed().wrapping_sub(before.1.cast_signed()));
            before = (at, bytes);
        };
        let Some((last, rest)) = points.split_last() else { return curve };
        for stretch in rest.chunks(rest.len().div_ceil(STRETCHES).max(1)) {
            let numbered = || stretch.iter().enumerate();
            let highest = numbered().max_by_key(|(n, point)| (point.1, stretch.len() - n));
            let lowest = numbered().min_by_key(|&(n, point)| (point.1, n));
            let mut kept: Vec<usize> = lowest.into_iter().chain(highest).map(|one| one.0).collect();
            kept.sort_unstable();
            kept.dedup();
            kept.into_iter().for_each(|n| add(stretch[n]));
        }
        add(*last);
        curve
    }

    /// The value from each instant on, in order of time; nothing if it is no curve.
    #[must_use]
    pub fn points(&self) -> Option<Vec<(u64, u64)>> {
        let mut before = (0u64, 0i64);
        let point = |(&later, &more): (&u64, &i64)| {
            before = (before.0.checked_add(later)?, before.1.checked_add(more)?);
            Some((before.0, u64::try_from(before.1).ok()?))
        };
        (self.at.len() == self.bytes.len()).then_some(())?;
        self.at.iter().zip(&self.bytes).map(point).collect()
    }
}

impl Course {
    /// The course of a plan of this world.
    #[must_use]
    pub fn new(world: &World<'_>, planned: &Planned, ran: &Ran) -> Self {
        let mut things = moved(world, planned, ran);
        things.extend(again(world, ran));
        things.sort_by_key(|thing| std::cmp::Reverse(thing.bytes));
        let count = things.len();
        things.truncate(THINGS);
        let mut waits = Vec::new();
        let mut before = 0;
        for (step, &(from, until)) in world.steps.iter().zip(&ran.steps) {
            if from > before {
                waits.push((world.name(step), before, from - before));
            }
            before = until;
        }
        waits.sort_by_key(|&(_, from, long)| (std::cmp::Reverse(long), from));
        waits.truncate(WAITS);
        waits.sort_by_key(|&(_, from, _)| from);
        let (unplanned, planned) = (unplanned(world), with_plan(ran));
        Self { unplanned, planned, things, count, waits }
    }

    /// As text that the package keeps and does not look into.
    #[must_use]
    pub fn text(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Reads what [`Course::text`] wrote; nothing if it is of another version.
    #[must_use]
    pub fn read(text: &str) -> Option<Self> {
        serde_json::from_str(text).ok()
    }
}

/// The script's own iteration. One call of the optimizer's updates all parameters, and holds the
/// temporaries of all of them at once.
fn unplanned(world: &World<'_>) -> Curve {
    let way = Way { piece: u64::MAX, ..Way::default() };
    let usual = World::new(world.problem, way, Vec::new());
    let standing = updates::standing(&usual, &vec![false; usual.states.len()], false);
    let mut now = 0;
    let mut points = Vec::new();
    for (step, bytes) in usual.steps.iter().zip(standing) {
        points.push((now, bytes.max(0).cast_unsigned()));
        now += usual.operator(step).ns;
    }
    points.extend(points.last().map(|&(_, bytes)| (now, bytes)));
    Curve::new(&points)
}

fn with_plan(ran: &Ran) -> Curve {
    let bytes = ran.standing.iter().map(|&bytes| bytes.max(0).cast_unsigned());
    let mut points: Vec<_> = ran.steps.iter().map(|&(from, _)| from).zip(bytes).collect();
    points.extend(points.last().map(|&(_, bytes)| (ran.end, bytes)));
    Curve::new(&points)
}

/// What leaves and comes back.
fn moved(world: &World<'_>, planned: &Planned, ran: &Ran) -> Vec<Thing> {
    let mut modules: BTreeMap<usize, &str> = BTreeMap::new();
    for pack in &world.iteration.packs {
        if let Some(storage) = pack.storage {
            modules.entry(storage).or_insert(&pack.module);
        }
    }
    let mut things = Vec::new();
    for (&tensor, copies) in &ran.copies {
        let (kind, storage) = match planned.is(world, tensor) {
            Is::Held => continue,
            Is::State(_) => (Kind::State, None),
            Is::Loan(_) => (Kind::Parameters, None),
            Is::Activation(one) => (Kind::Activation, Some(world.movable[one].storage)),
        };
        let module = storage.and_then(|storage| modules.get(&storage)).copied();
        let about = planned.graph.tensor(tensor);
        let span = |&(back, from, until): &(bool, u64, u64)| {
            (if back { What::In } else { What::Out }, from, until - from)
        };
        let thing = Thing {
            name: about.name.clone(),
            module: module.unwrap_or_default().to_owned(),
            kind,
            bytes: about.bytes.in_blocks().0,
            away_ns: 0,
            else_bytes: 0,
            spans: copies.iter().map(span).collect(),
        };
        things.push(thing.while_away(&absences(copies, ran.end), ran));
    }
    things
}

/// When something is away that these copies move. What first comes was away before, and what last
/// leaves is away to the end.
fn absences(copies: &[(bool, u64, u64)], end: u64) -> Vec<Range<u64>> {
    let mut found = Vec::new();
    let mut left = copies.first().filter(|(back, ..)| *back).map(|_| 0);
    for &(back, from, until) in copies {
        if back {
            found.extend(left.take().map(|left| left..from));
        } else {
            left = Some(until);
        }
    }
    found.extend(left.map(|left| left..end));
    found
}

/// What runs again.
fn again(world: &World<'_>, ran: &Ran) -> Vec<Thing> {
    let mut things = Vec::new();
    for &range in &world.ranges {
        let range = &world.iteration.ranges[range];
        let within = world.before(range.again)..world.at(range.again);
        let mut places = within.filter(|&place| {
            let step = &world.steps[place];
            step.again && (range.first..range.cut).contains(&step.origin)
        });
        let Some(first) = places.next() else { continue };
        let last = places.next_back().unwrap_or(first);
        let (Some(begin), Some(end)) = (ran.steps.get(first), ran.steps.get(last)) else {
            continue;
        };
        let left = world.at(range.cut).checked_sub(1).and_then(|place| ran.steps.get(place));
        let left = left.map_or(0, |step| step.1);
        let name = match range.call {
            Some(_) => range.name.clone(),
            None => world.operator(&world.steps[first]).name.clone(),
        };
        let thing = Thing {
            name,
            module: range.name.clone(),
            kind: Kind::Again,
            bytes: range.bytes(world.problem),
            away_ns: 0,
            else_bytes: 0,
            spans: vec![(What::Again, begin.0, end.1 - begin.0)],
        };
        let away = left..begin.0.max(left);
        things.push(thing.while_away(slice::from_ref(&away), ran));
    }
    things
}

impl Thing {
    /// Says for how long it is away, and what would stand then if it alone stayed.
    fn while_away(mut self, absences: &[Range<u64>], ran: &Ran) -> Self {
        self.away_ns = absences.iter().map(|away| away.end.saturating_sub(away.start)).sum();
        let most = absences.iter().map(|away| ran.most(away)).max().unwrap_or(0);
        self.else_bytes = if most > 0 { most.saturating_add(self.bytes) } else { 0 };
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_instants_of_a_curve_are_there_as_they_are() {
        let points = vec![(0, 5), (3, 900), (3, 2), (10, 2)];
        let curve = Curve::new(&points);
        assert_eq!((&*curve.at, &*curve.bytes), (&[0, 3, 0, 7][..], &[5, 895, -898, 0][..]));
        assert_eq!(curve.points(), Some(points));
        assert_eq!(Curve::new(&[]).points(), Some(Vec::new()));
    }

    #[test]
    fn a_curve_is_bounded_and_keeps_its_peak_and_its_end() {
        let value = |t: u64| if t == 77_777 { 9_999_999 } else { t * 7_919 % 1_009 };
        let points: Vec<(u64, u64)> = (0..200_001).map(|t| (t, value(t))).collect();
        let kept = Curve::new(&points).points().unwrap();
        assert!(kept.len() <= 2 * STRETCHES + 1, "{}", kept.len());
        assert!(kept.contains(&(77_777, 9_999_999)));
        assert_eq!(kept.last(), points.last());
        assert!(kept.is_sorted_by_key(|point| point.0));
        assert!(kept.iter().all(|&(at, bytes)| bytes == value(at)));
    }

    #[test]
    fn what_is_no_curve_has_no_points() {
        for (at, bytes) in [
            (vec![0], vec![]),
            (vec![0], vec![-1]),
            (vec![u64::MAX, 1], vec![0, 0]),
            (vec![0, 0], vec![i64::MAX, 1]),
        ] {
            assert_eq!(Curve { at, bytes }.points(), None);
        }
    }

    #[test]
    fn a_state_is_away_but_around_its_update() {
        assert_eq!(absences(&[(true, 10, 12), (false, 15, 17)], 40), [0..10, 17..40]);
        assert_eq!(absences(&[(false, 1, 3), (true, 20, 22)], 40), [Range { start: 3, end: 20 }]);
        assert!(absences(&[], 40).is_empty());
    }
}
