//! What PyTorch's allocator reserves for a script that runs by a plan, and where it should give
//! free memory back.
//!
//! Free memory lies in pieces, and what fits into none of them is reserved anew, so more is
//! reserved than stands at any instant. The requests of an iteration are those of the recording:
//! each storage for as long as it stands, each operator's scratch, and what the plan's actions give
//! back and ask for again. They are replayed by the allocator's simulation, a few iterations one
//! after another. With expandable segments the allocator can give whole free pages back to the
//! device (`torch.cuda.empty_cache`), and reserve others in their place. That takes time; it is
//! done only at points after which too much would be reserved.

use std::collections::{BTreeMap, BTreeSet};

use super::actions::{Moment, Move, Point, What};
use super::problem::Role;
use super::updates;
use super::world::{World, blocks};
use crate::sim::allocator::Config;
use crate::sim::allocator::replay::{LARGEST_DEVICE, Replay};
use crate::sim::requests::Request;
use crate::units::Bytes;

/// Iterations that are replayed: a later one begins with the gaps that the one before it left, and
/// more may be reserved in each of the first few.
const ITERATIONS: usize = 6;

/// The most points of an iteration at which memory is given back.
const POINTS: usize = 12;

/// What giving back takes, for each page and at each point. `python/neap/torch/_pages.py` has both
/// times, too.
const PAGE_NS: u64 = 150_000;
const WAIT_NS: u64 = 100_000;

/// When something happens, in the order of things at one place: what ends there, what is there when
/// an iteration begins, the points at which the package acts, a piece of the step, then what the
/// operator makes, its scratch, and the end of that.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum When {
    Ends,
    Begins,
    /// The number of the moment.
    At(usize, Turn),
    Piece(Turn),
    Scratch,
    Made,
    Over,
}

/// What goes makes room for what comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Turn {
    Goes,
    GivesBack,
    Comes,
}

/// What happens to memory.
#[derive(Clone, Copy, Debug)]
enum Change {
    Allocate(u32, u64),
    Free(u32),
    /// A point at which memory can be given back.
    Point(usize),
}

/// The requests of one iteration. What stands over its end has places of the next one.
#[derive(Default)]
struct Timeline {
    changes: Vec<(usize, When, Change)>,
    blocks: u32,
    points: Vec<Point>,
}

impl Timeline {
    fn stand(&mut self, bytes: i64, from: (usize, When), until: (usize, When)) {
        if bytes <= 0 || until <= from {
            return;
        }
        let id = self.blocks;
        self.blocks += 1;
        self.changes.push((from.0, from.1, Change::Allocate(id, bytes.cast_unsigned())));
        self.changes.push((until.0, until.1, Change::Free(id)));
    }

    fn point(&mut self, point: Point, place: usize, when: When) {
        self.changes.push((place, when, Change::Point(self.points.len())));
        self.points.push(point);
    }
}

/// What the allocator reserves.
#[derive(Clone, Debug, Default)]
pub(super) struct Reserved {
    /// The most bytes.
    pub bytes: u64,
    /// The same if no memory is given back.
    pub without: u64,
    /// Points at which it gives memory back, and the bytes that it reserves until the next.
    pub trims: Vec<(Point, u64)>,
    /// How long that takes in an iteration, about.
    pub giving_back_ns: u64,
}

/// What a world and a plan's moves ask of the allocator.
pub(super) struct Asked<'a> {
    pub world: &'a World<'a>,
    pub moments: &'a [Moment],
    pub moves: &'a [Move],
    /// The storage of each activation that moves.
    pub moved: &'a [usize],
    /// Which states stay on the host.
    pub away: &'a [bool],
    pub divisible: bool,
}

impl Asked<'_> {
    /// What is reserved; within `limit` bytes if giving memory back achieves that.
    pub fn reserved(&self, limit: u64) -> Reserved {
        let timeline = self.timeline();
        let (replay, next) = self.start();
        let mut more = vec![0; timeline.points.len()];
        let mut give: BTreeSet<usize> = BTreeSet::new();
        let mut first: Option<Reserved> = None;
        while give.len() <= POINTS {
            let pass = Pass::new(&timeline, replay.clone(), next, self.world.steps.len());
            let pass = pass.run(&give, &more, limit);
            let grew = more.iter().zip(&pass.more).any(|(known, seen)| seen > known);
            let bytes = pass.peak;
            let found = Reserved {
                bytes,
                without: first.as_ref().map_or(bytes, |first| first.bytes),
                trims: give
                    .iter()
                    .map(|&p| (timeline.points[p], pass.more[p].max(more[p])))
                    .collect(),
                giving_back_ns: pass.giving_back_ns,
            };
            for (known, seen) in more.iter_mut().zip(&pass.more) {
                *known = (*known).max(*seen);
            }
            let Some(over) = pass.over else { return found };
            first.get_or_insert(found);
            match over {
                Some(point) if give.insert(point) || grew => {}
                _ => break,
            }
        }
        first.unwrap_or_default()
    }

    fn timeline(&self) -> Timeline {
        let Self { world, moments, moves, .. } = *self;
        let count = world.steps.len();
        let mut timeline = Timeline::default();
        let at = |moment: usize, turn| {
            (moments.get(moment).map_or(count, |m| m.place), When::At(moment, turn))
        };
        let mut of: BTreeMap<usize, Vec<&Move>> = BTreeMap::new();
        for one in moves {
            if let What::Activation(number) = one.what {
                of.entry(self.moved[number]).or_default().push(one);
            }
        }
        for stand in &world.stands {
            let mut from = match stand.first {
                Some(first) => (first, When::Made),
                None => (0, When::Begins),
            };
            let own = stand.storage.and_then(|storage| of.get(&storage));
            for one in own.into_iter().flatten() {
                timeline.stand(stand.bytes, from, at(one.drop, Turn::Goes));
                from = at(one.back, Turn::Comes);
            }
            timeline.stand(stand.bytes, from, (stand.end, When::Ends));
        }
        for (number, moment) in moments.iter().enumerate() {
            timeline.point(moment.point, moment.place, When::At(number, Turn::GivesBack));
        }
        for (place, &bytes) in world.beside.iter().enumerate() {
            timeline.stand(bytes, (place, When::Scratch), (place, When::Over));
        }
        self.step(&mut timeline);
        timeline.changes.sort_by_key(|&(place, when, _)| (place, when));
        timeline
    }

    /// The pieces of the optimizer's step.
    fn step(&self, timeline: &mut Timeline) {
        let Self { world, away, .. } = *self;
        let calls = updates::calls(world, self.divisible);
        let reach = usize::from(world.way.ahead);
        for (number, call) in calls.iter().enumerate() {
            let first = calls[number.saturating_sub(reach)][0];
            let last = &calls[(number + reach).min(calls.len() - 1)];
            let uses = |state: &updates::State| state.uses.iter().any(|u| call.contains(u));
            let own = world.states.iter().zip(away).filter(|(s, away)| **away && uses(s));
            let bytes = own.map(|(state, _)| state.blocks().cast_signed()).sum();
            if number == 0 || away.contains(&true) {
                timeline.point(Point("step", number), call[0], When::Piece(Turn::GivesBack));
            }
            let until = (last[last.len() - 1] + 1, When::Ends);
            timeline.stand(bytes, (first, When::Piece(Turn::Comes)), until);
        }
        for (place, more) in updates::scratch(world, &calls) {
            timeline.stand(more, (place, When::Scratch), (place, When::Over));
        }
    }

    /// The allocator with what stands always, and the first free number of a block.
    fn start(&self) -> (Replay, u32) {
        let Self { world, away, .. } = *self;
        let config = Config { expandable: true, ..Config::default() };
        let mut replay = Replay::new(&config, LARGEST_DEVICE, None);
        let mut next = 0;
        let mut ask = |replay: &mut Replay, bytes: i64| {
            let bytes = Bytes(bytes.max(0).cast_unsigned());
            replay.step(Request::Allocate { id: next, bytes, stream: 0 });
            next += 1;
            next - 1
        };
        let leaving = world.states.iter().zip(away).filter(|(_, away)| **away);
        let leaving: BTreeSet<usize> = leaving.map(|(state, _)| state.storage).collect();
        let size = |storage: usize| blocks(world.problem.storages[storage].bytes);
        let known: i64 = world.lasting.iter().map(|&storage| size(storage)).sum();
        let (states, rest): (Vec<usize>, Vec<usize>) =
            world.lasting.iter().partition(|&&s| world.role(s) == Role::OptimizerState);
        for storage in rest {
            ask(&mut replay, size(storage));
        }
        // Such as the workspaces of libraries, which the first iteration asks for before its step.
        ask(&mut replay, world.always - known);
        let ids: Vec<(usize, u32)> =
            states.into_iter().map(|s| (s, ask(&mut replay, size(s)))).collect();
        for (_, id) in ids.into_iter().filter(|(storage, _)| leaving.contains(storage)) {
            replay.step(Request::Free { id });
        }
        replay.step(Request::EmptyCache);
        (replay, next)
    }
}

/// One replay of a few iterations.
struct Pass<'t> {
    timeline: &'t Timeline,
    replay: Replay,
    /// The number of the first block of an iteration, by whether it is even.
    base: [u32; 2],
    count: usize,
    /// The most bytes that are reserved.
    peak: u64,
    /// By point the most bytes that are reserved after it, before the next.
    more: Vec<u64>,
    /// Whether too much is reserved, and the last point before it is for the first time.
    over: Option<Option<usize>>,
    /// How long giving back takes, in the iteration of those after the first that takes longest.
    giving_back_ns: u64,
}

impl<'t> Pass<'t> {
    fn new(timeline: &'t Timeline, replay: Replay, next: u32, count: usize) -> Self {
        let (base, more) = ([next, next + timeline.blocks], vec![0; timeline.points.len()]);
        Self { timeline, replay, base, count, peak: 0, more, over: None, giving_back_ns: 0 }
    }

    fn run(mut self, give: &BTreeSet<usize>, more: &[u64], limit: u64) -> Self {
        let changes = &self.timeline.changes;
        let own = changes.partition_point(|&(place, ..)| place <= self.count);
        let (own, over) = changes.split_at(own);
        let (mut last, mut growth): (Option<usize>, u64) = (None, 0);
        let page = Config::default().large_segment.0;
        for iteration in 0..ITERATIONS {
            let mut spent = 0;
            let mut before = over.iter().filter(|_| iteration > 0).peekable();
            for &(place, when, change) in own {
                let due = |&&(next, other, _): &&(usize, When, Change)| {
                    (next - self.count - 1, other) <= (place, when)
                };
                while let Some(&(_, _, ended)) = before.next_if(due) {
                    if let Change::Free(id) = ended {
                        let id = self.base[(iteration + 1) % 2] + id;
                        self.replay.step(Request::Free { id });
                    }
                }
                let base = self.base[iteration % 2];
                let reserved = |replay: &Replay| replay.allocator().stats().reserved.0;
                match change {
                    Change::Free(id) => {
                        self.replay.step(Request::Free { id: base + id });
                    }
                    Change::Allocate(id, bytes) => {
                        let known = reserved(&self.replay);
                        let (id, bytes) = (base + id, Bytes(bytes));
                        self.replay.step(Request::Allocate { id, bytes, stream: 0 });
                        let now = reserved(&self.replay);
                        growth += now.saturating_sub(known);
                        if let Some(last) = last {
                            self.more[last] = self.more[last].max(growth);
                        }
                        self.peak = self.peak.max(now);
                        if now > limit {
                            self.over.get_or_insert(last);
                        }
                    }
                    Change::Point(point) => {
                        (last, growth) = (Some(point), 0);
                        let known = reserved(&self.replay);
                        if give.contains(&point) && known + more[point] > limit {
                            self.replay.step(Request::EmptyCache);
                            let given = known - reserved(&self.replay);
                            spent += WAIT_NS + given / page * PAGE_NS;
                        }
                    }
                }
            }
            if iteration > 0 {
                self.giving_back_ns = self.giving_back_ns.max(spent);
            }
        }
        self
    }
}
