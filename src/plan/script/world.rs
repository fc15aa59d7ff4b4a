//! An iteration as it would be if some ranges ran again in backward: the operators in that order,
//! the bytes that stand during each, and what can leave for the host meanwhile.

use std::collections::{BTreeMap, BTreeSet};
use std::iter;

use super::problem::{Iteration, Phase, Problem, Role};
use super::updates::{self, Piece, State};
use crate::units::Bytes;

/// An operator of the planned iteration.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// Its place in the recorded iteration.
    pub origin: usize,
    /// Whether it runs again.
    pub again: bool,
    /// Which part of the update of a large parameter it is.
    pub piece: Piece,
}

/// A storage that can leave between its last use in forward and its first in backward, and between
/// two runs of backward that both ask for it. Places are those of steps.
#[derive(Clone, Debug)]
pub struct Activation {
    /// The storage.
    pub storage: usize,
    /// The step that makes it.
    pub born: usize,
    /// Where it can leave, in order: the first place at which nothing but autograd holds it, and
    /// the place before which backward asks for it.
    pub absences: Vec<(usize, usize)>,
    /// The place at which it is freed.
    pub gone: usize,
}

impl Activation {
    /// The places at which it is on the device after its birth, with whether it counts as written
    /// there: what came back is copied anew when it leaves again, since a function of the user's
    /// may have changed it unseen.
    #[must_use]
    pub fn touches(&self) -> Vec<(usize, bool)> {
        let backs = self.absences.iter().map(|&(_, back)| back);
        let leaves = self.absences.iter().map(|&(leaves, _)| leaves).chain([self.gone]);
        let here = iter::once(self.born + 1).chain(backs).zip(leaves).enumerate();
        let within = |(number, (from, until)): (usize, (usize, usize))| {
            let back = (1..self.absences.len()).contains(&number);
            (from..until).map(move |place| (place, back && place == from))
        };
        here.flat_map(within).collect()
    }
}

/// The places at which PyTorch calls the package.
struct Points {
    /// By the number of the tensor that autograd saves there.
    packs: Vec<usize>,
    /// Those at which it asks for one, in order.
    asked: Vec<usize>,
}

impl Points {
    /// The first of them at which a storage can leave that is let go of at this place, when so many
    /// tensors have been saved.
    fn leaves(&self, place: usize, saved: usize) -> usize {
        let first = |all: &[usize]| all.get(all.partition_point(|&at| at < place)).copied();
        let found = first(&self.packs[saved..]).into_iter().chain(first(&self.asked));
        found.min().unwrap_or(place)
    }
}

/// Bytes that the allocator gives out as one block.
#[derive(Clone, Copy, Debug)]
pub struct Stand {
    /// The storage; nothing for what runs again.
    pub storage: Option<usize>,
    /// The bytes.
    pub bytes: i64,
    /// The step that makes it; nothing if it is there before the first.
    pub first: Option<usize>,
    /// The first place at which it is gone. Places of the next iteration follow on the last one's
    /// end.
    pub end: usize,
}

/// Bytes that come and go between places.
pub struct Change(Vec<i64>);

impl Change {
    /// Nothing, for `count` places.
    #[must_use]
    pub fn new(count: usize) -> Self {
        Self(vec![0; count + 1])
    }

    /// Adds bytes that stand from the first place to before the end.
    pub fn stand(&mut self, bytes: i64, first: usize, end: usize) {
        if end > first {
            self.0[first] += bytes;
            self.0[end] -= bytes;
        }
    }

    /// What stands at each place, given what stands without this.
    #[must_use]
    pub fn added_to(&self, standing: &[i64]) -> Vec<i64> {
        let mut more = 0;
        standing
            .iter()
            .zip(&self.0)
            .map(|(bytes, change)| {
                more += change;
                bytes + more
            })
            .collect()
    }
}

/// How a world differs from the script's iteration, beside what runs again.
#[derive(Clone, Copy, Debug, Default)]
pub struct Way {
    /// Updates run inside backward; only states of these move then.
    pub early: bool,
    /// Parameters may leave during backward.
    pub lend: bool,
    /// Copies of states run beside the updates of other pieces of the step.
    pub ahead: bool,
    /// The bytes of states that a piece of the step should have.
    pub piece: u64,
    /// Of the bytes of activations that can leave, those that stay because they are born last, in
    /// percent. What stays then lies together in the allocator's memory, and so does what is free.
    pub stay: u32,
}

/// One iteration with some ranges run again.
pub struct World<'a> {
    /// What was recorded.
    pub problem: &'a Problem,
    /// The iteration.
    pub iteration: &'a Iteration,
    /// How else it differs.
    pub way: Way,
    /// The ranges that run again.
    pub ranges: Vec<usize>,
    /// The operators in their new order.
    pub steps: Vec<Step>,
    /// Bytes that stand during each, when nothing is moved.
    pub resident: Vec<i64>,
    /// Bytes that stand during the whole iteration and between iterations.
    pub always: i64,
    /// The storages among these.
    pub lasting: Vec<usize>,
    /// What comes and goes, when nothing is moved.
    pub stands: Vec<Stand>,
    /// Bytes beside these during single steps, with each step's scratch.
    pub beside: Vec<i64>,
    /// What can leave, in order of birth.
    pub movable: Vec<Activation>,
    /// Optimizer states that can stay on the host.
    pub states: Vec<State>,
    /// From places of the recording to new places.
    at: Vec<usize>,
    /// The same, ahead of what runs again just before that place.
    before: Vec<usize>,
    /// By storage: when it is there.
    spans: Vec<(usize, usize)>,
    /// The saved tensors that what runs again makes.
    within: BTreeSet<usize>,
}

const fn signed(bytes: u64) -> i64 {
    bytes.cast_signed()
}

/// The bytes that the allocator gives out for a tensor of this size.
pub(super) const fn blocks(bytes: u64) -> i64 {
    signed(Bytes(bytes).in_blocks().0)
}

impl<'a> World<'a> {
    /// The iteration with these ranges run again.
    #[must_use]
    pub fn new(problem: &'a Problem, way: Way, ranges: Vec<usize>) -> Self {
        let early = problem.soon.as_ref().filter(|_| way.early);
        let iteration = early.unwrap_or(&problem.usual);
        let within = ranges.iter().flat_map(|&r| iteration.ranges[r].saved.iter().copied());
        let mut world = Self {
            within: within.collect(),
            problem,
            iteration,
            way,
            ranges,
            steps: Vec::new(),
            resident: Vec::new(),
            always: 0,
            lasting: Vec::new(),
            stands: Vec::new(),
            beside: Vec::new(),
            movable: Vec::new(),
            states: Vec::new(),
            at: Vec::new(),
            before: Vec::new(),
            spans: vec![(0, 0); problem.storages.len()],
        };
        let rerun = world.lay_out();
        world.account(&rerun);
        world.movable = world.can_leave();
        if problem.move_states {
            world.states = updates::states(&world);
        }
        world
    }

    /// The most bytes that stand when nothing is moved.
    #[must_use]
    pub fn peak(&self) -> u64 {
        self.resident.iter().copied().max().unwrap_or(0).max(0).cast_unsigned()
    }

    /// The new place of a recorded one.
    #[must_use]
    pub fn at(&self, place: usize) -> usize {
        self.at[place]
    }

    /// The same, ahead of what runs again there.
    #[must_use]
    pub fn before(&self, place: usize) -> usize {
        self.before[place]
    }

    /// Whether what runs again makes a saved tensor.
    #[must_use]
    pub fn runs_again(&self, pack: usize) -> bool {
        self.within.contains(&pack)
    }

    /// A step's operator.
    #[must_use]
    pub fn operator(&self, step: &Step) -> &'a super::problem::Operator {
        &self.iteration.operators[step.origin]
    }

    /// A step's phase.
    #[must_use]
    pub fn phase(&self, step: &Step) -> Phase {
        if step.again { Phase::Backward } else { self.operator(step).phase }
    }

    /// A step's scratch in bytes.
    #[must_use]
    pub fn workspace(&self, step: &Step) -> i64 {
        blocks(self.operator(step).workspace.div_ceil(u64::from(step.piece.count)))
    }

    /// Puts the steps in order; for each range the step at which it begins again.
    fn lay_out(&mut self) -> Vec<usize> {
        let mut waiting: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (number, &range) in self.ranges.iter().enumerate() {
            waiting.entry(self.iteration.ranges[range].again).or_default().push(number);
        }
        let pieces = updates::pieces_of_updates(self);
        let mut rerun = vec![0; self.ranges.len()];
        for (place, count) in pieces.into_iter().enumerate() {
            self.before.push(self.steps.len());
            let mut due = waiting.remove(&place).unwrap_or_default();
            due.sort_by_key(|&number| self.iteration.ranges[self.ranges[number]].order);
            for number in due {
                rerun[number] = self.steps.len();
                let range = &self.iteration.ranges[self.ranges[number]];
                let again = |origin| Step { origin, again: true, piece: Piece::WHOLE };
                self.steps.extend((range.first..range.cut).map(again));
            }
            self.at.push(self.steps.len());
            let part =
                |number| Step { origin: place, again: false, piece: Piece { number, count } };
            self.steps.extend((0..count).map(part));
        }
        self.before.push(self.steps.len());
        self.at.push(self.steps.len());
        rerun
    }

    /// Counts the bytes that stand during each step.
    fn account(&mut self, rerun: &[usize]) {
        let (problem, iteration) = (self.problem, self.iteration);
        let operators = &iteration.operators;
        let size = |storage: usize| signed(problem.storages[storage].blocks());
        let mut lives = Change::new(operators.len());
        for life in &iteration.lives {
            lives.stand(-size(life.storage), life.born.unwrap_or(0), life.end);
        }
        let standing: Vec<i64> = operators.iter().map(|o| signed(o.standing)).collect();
        let fixed = lives.added_to(&standing);
        let mut carried = Change::new(operators.len());
        for life in &iteration.lives {
            carried.stand(size(life.storage), 0, life.until.unwrap_or(0));
        }
        let carried = carried.added_to(&vec![0; operators.len()]);
        let scratch = |place: usize| blocks(operators[place].workspace);
        let bare = |place: usize| fixed[place] - carried[place] - scratch(place);
        self.always = (0..operators.len()).map(bare).min().unwrap_or(0);
        let more = |step: &Step| if step.again { 0 } else { bare(step.origin) - self.always };
        self.beside = self.steps.iter().map(|step| more(step) + self.workspace(step)).collect();
        let coming: BTreeSet<usize> = iteration.lives.iter().map(|life| life.storage).collect();
        self.lasting = (0..problem.storages.len()).filter(|s| !coming.contains(s)).collect();
        // What runs again has what stands at the place where it runs, and its own scratch.
        let mut follower = operators.len() - 1;
        let mut resident = vec![0; self.steps.len()];
        for (bytes, step) in resident.iter_mut().zip(&self.steps).rev() {
            if !step.again {
                follower = step.origin;
            }
            *bytes = fixed[follower] - blocks(operators[follower].workspace) + self.workspace(step);
        }
        let mut change = Change::new(self.steps.len());
        let mut needed: BTreeMap<usize, usize> = BTreeMap::new();
        for &range in &self.ranges {
            let range = &iteration.ranges[range];
            for &input in &range.inputs {
                let until = needed.entry(input).or_insert(0);
                *until = range.over.max(*until);
            }
        }
        let freed = self.only_within();
        let known: BTreeMap<usize, &super::problem::Life> =
            iteration.lives.iter().map(|life| (life.storage, life)).collect();
        for life in &iteration.lives {
            let end = if freed.contains(&life.storage) { life.let_go } else { life.end };
            let end = end.max(needed.get(&life.storage).copied().unwrap_or(0));
            // What is freed before an operator is freed before what runs again ahead of it.
            let span = (self.at[life.born.unwrap_or(0)], self.before[end.min(operators.len())]);
            self.spans[life.storage] = span;
            change.stand(size(life.storage), span.0, span.1);
            let over = life.until.map(|until| self.steps.len() + 1 + self.before[until]);
            self.stands.push(Stand {
                storage: Some(life.storage),
                bytes: size(life.storage),
                first: life.born.map(|_| span.0),
                end: over.unwrap_or(span.1),
            });
        }
        for (&range, &begin) in self.ranges.iter().zip(rerun) {
            let range = &iteration.ranges[range];
            let last = begin + (range.cut - range.first);
            for (origin, place) in (range.first..range.cut).zip(begin..) {
                for &storage in &operators[origin].makes {
                    let Some(life) = known.get(&storage) else { continue };
                    let end = if range.brings.contains(&storage) {
                        let asked = if freed.contains(&storage) {
                            life.end
                        } else {
                            self.asked(storage, range)
                        };
                        self.before[asked.max(range.again + 1).min(operators.len())]
                    } else if (range.first..range.cut).contains(&life.let_go) {
                        (begin + life.let_go - range.first).min(last)
                    } else {
                        last
                    };
                    let end = end.max(place + 1);
                    change.stand(size(storage), place, end);
                    let (storage, bytes, first) = (None, size(storage), Some(place));
                    self.stands.push(Stand { storage, bytes, first, end });
                }
            }
        }
        self.resident = change.added_to(&resident);
    }

    /// The place after backward's last use of what a range saved of a storage.
    fn asked(&self, storage: usize, range: &super::problem::Range) -> usize {
        let saved = range.saved.iter().map(|&number| &self.iteration.packs[number]);
        let own = saved.filter(|pack| pack.storage == Some(storage));
        let last = own.filter_map(|pack| pack.asked.last()).map(|asked| asked.place).max();
        last.map_or(range.over, |last| last + 1)
    }

    /// Storages that only ranges that run again have saved.
    fn only_within(&self) -> BTreeSet<usize> {
        let (mut inside, mut outside) = (BTreeSet::new(), BTreeSet::new());
        for (number, pack) in self.iteration.packs.iter().enumerate() {
            let to = if self.runs_again(number) { &mut inside } else { &mut outside };
            to.extend(pack.storage);
        }
        &inside - &outside
    }

    fn can_leave(&self) -> Vec<Activation> {
        let mut movable = Vec::new();
        let rounds = self.rounds();
        let points = self.points();
        for life in &self.iteration.lives {
            let storage = life.storage;
            let Some(rounds) = rounds.get(&storage) else { continue };
            let small = self.problem.storages[storage].bytes < self.problem.smallest;
            if small || life.born.is_none() || life.until.is_some() || life.held {
                continue;
            }
            let (born, gone) = self.spans[storage];
            let let_go = points.leaves(self.at[life.let_go], life.let_go_pack);
            let mut leaves = let_go;
            let mut absences = Vec::new();
            for &(first, last) in rounds {
                // A swap needs an operator between that neither makes nor uses it.
                if born < leaves && leaves < first && first < self.steps.len() {
                    absences.push((leaves, first));
                }
                leaves = last.max(let_go);
            }
            if !absences.is_empty() {
                movable.push(Activation { storage, born, absences, gone });
            }
        }
        movable.sort_by_key(|one| (one.born, one.storage));
        let size = |one: &Activation| self.problem.storages[one.storage].bytes;
        let all: u64 = movable.iter().map(size).sum();
        let mut left = all - all / 100 * u64::from(self.way.stay);
        movable.retain(|one| {
            let leaves = left > 0;
            left = left.saturating_sub(size(one));
            leaves
        });
        movable
    }

    fn points(&self) -> Points {
        let packs = &self.iteration.packs;
        let asked = packs.iter().flat_map(|pack| &pack.asked);
        let mut points = Points {
            packs: packs.iter().map(|pack| self.at[pack.packed]).collect(),
            asked: asked.map(|asked| self.at[asked.place]).collect(),
        };
        points.asked.sort_unstable();
        points
    }

    /// By storage: for each run of backward that asks for it the first place at which it is needed,
    /// and the place after the last.
    fn rounds(&self) -> BTreeMap<usize, Vec<(usize, usize)>> {
        let mut asked: BTreeMap<usize, Vec<(usize, Option<usize>)>> = BTreeMap::new();
        for (number, pack) in self.iteration.packs.iter().enumerate() {
            if let Some(storage) = pack.storage.filter(|_| !self.runs_again(number)) {
                let places = pack.asked.iter().map(|asked| (asked.place, Some(number)));
                asked.entry(storage).or_default().extend(places);
            }
        }
        for &range in &self.ranges {
            let range = &self.iteration.ranges[range];
            for &input in &range.inputs {
                asked.entry(input).or_default().push((range.again, None));
            }
        }
        asked.retain(|_, places| !places.is_empty());
        let split = |(storage, mut places): (usize, Vec<(usize, Option<usize>)>)| {
            places.sort_unstable();
            // What is asked for a second time is asked for by another run of backward.
            let mut rounds: Vec<Vec<usize>> = vec![Vec::new()];
            let mut seen = BTreeSet::new();
            for (place, pack) in places {
                if pack.is_some_and(|pack| !seen.insert(pack)) {
                    rounds.push(Vec::new());
                    seen = pack.into_iter().collect();
                }
                rounds.last_mut().expect("there is one").push(place);
            }
            let mut found: Vec<(usize, usize)> = Vec::new();
            for (number, round) in rounds.iter().enumerate() {
                let next = rounds.get(number + 1).map_or(round[0], |next| next[0]);
                found.push((self.before[round[0]], self.used(storage, round, next)));
            }
            (storage, found)
        };
        asked.into_iter().map(split).collect()
    }

    /// The place after the last use of a storage that is asked for at these places, before another.
    fn used(&self, storage: usize, asked: &[usize], next: usize) -> usize {
        let mut uses = (asked[0]..next).rev();
        let last = uses.find(|&o| self.iteration.operators[o].reads.contains(&storage));
        let last = asked.iter().copied().chain(last).max().unwrap_or(next);
        self.at.get(last + 1).copied().unwrap_or(self.steps.len())
    }

    /// What a storage is for.
    #[must_use]
    pub fn role(&self, storage: usize) -> Role {
        self.problem.storages[storage].role
    }
}
