//! The fastest schedule of a small job within a budget, by exhaustive search.
//!
//! A schedule says when operators run (updates wherever their dependences allow, all others in
//! the job's order), which run again and when, when tensors are copied to the host and back, and
//! when their bytes are given back. Each start can be moved ahead to the end of an operator or copy
//! that it has to wait for; no schedule gets longer by that. So it is enough to search schedules
//! in which each operator and copy starts at the end of another, and in which bytes are given back
//! only when an operator or copy that starts needs them. The search goes through the states at
//! these instants as A* does: first the state with the least sum of elapsed time and a lower bound
//! of the remaining time. A state is skipped if one with the same progress was reached at least as
//! early and holds at least the same tensors.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use crate::contract::Latency;
use crate::device::Link;
use crate::job::optimizer::is_update;
use crate::job::{Graph, Role};
use crate::sim::engine::copy_time;
use crate::sim::program::Direction;
use crate::units::{Bytes, Nanos};

/// Sets of tensors or of operators, a bit each.
type Set = u16;

struct Operator {
    time: u16,
    update: bool,
    reads: Set,
    makes: Set,
    updates: Set,
    /// What must have run before: all before it; of an update only what it depends on.
    after: Set,
}

pub struct Job {
    operators: Vec<Operator>,
    bytes: Vec<u64>,
    copies: [Vec<u16>; 2],
    /// What nothing makes.
    long_lived: Set,
    budget: u64,
    /// What is used no more may come back before the end of the iteration, for the next one.
    pub ahead: bool,
}

/// Something that runs, and for how much longer.
type Running = Option<(u8, u16)>;

/// What was done and runs.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Progress {
    /// What is on the device at the start of the iteration, and so must be at its end.
    start: Set,
    done: Set,
    step: Running,
    /// Copies out and in.
    copy: [Running; 2],
    /// What was looked at already at this instant: the step, the copy in, the copy out.
    turn: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct State {
    at: Progress,
    device: Set,
    /// Whose copies on the host are right.
    host: Set,
}

/// What was reached with the same progress: on the device, on the host, when.
#[derive(Default)]
struct Reached(Vec<(Set, Set, u64)>);

impl Reached {
    /// Notes a state, unless one was reached as early that has as much: of what is too much there
    /// something can be given back at any time.
    fn is_new(&mut self, state: &State, time: u64) -> bool {
        let as_good = |&(device, host, before): &(Set, Set, u64)| {
            before <= time && state.device & !device == 0 && state.host & !host == 0
        };
        if self.0.iter().any(as_good) {
            return false;
        }
        self.0.retain(|&(device, host, before)| {
            before < time || device & !state.device != 0 || host & !state.host != 0
        });
        self.0.push((state.device, state.host, time));
        true
    }

    /// Whether the state is still as good as any.
    fn has(&self, state: &State, time: u64) -> bool {
        self.0.contains(&(state.device, state.host, time))
    }
}

fn short(time: Nanos) -> u16 {
    u16::try_from(time.0).expect("times are small")
}

/// The tensor that a copy moves.
fn moving(copy: Running) -> Set {
    copy.map_or(0, |(tensor, _)| bit(usize::from(tensor)))
}

fn left_of(running: Running) -> u64 {
    running.map_or(0, |(_, left)| u64::from(left))
}

const fn bit(at: usize) -> Set {
    1 << at
}

fn members(mut set: Set) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let at = set.trailing_zeros() as usize;
        set &= set.wrapping_sub(1);
        (at < 16).then_some(at)
    })
}

impl Job {
    pub fn new(graph: &Graph, latencies: &[Latency], link: &Link, budget: Bytes) -> Self {
        assert!(graph.tensors.len() < 16 && graph.operators.len() < 16, "the job is small");
        let set = |tensors: &mut dyn Iterator<Item = usize>| tensors.fold(0, |s, t| s | bit(t));
        let mut operators: Vec<Operator> = Vec::new();
        for (operator, latency) in graph.operators.iter().zip(latencies) {
            let reads = set(&mut operator.reads().map(|o| o.tensor.index()));
            let makes = set(&mut operator.generates().map(|o| o.tensor.index()));
            let updates = set(&mut operator.updates().map(|o| o.tensor.index()));
            let update = is_update(operator);
            let before = operators.iter().enumerate().filter(|(_, other)| {
                let touched = reads | makes | updates;
                let clash =
                    (other.makes | other.updates) & touched != 0 || other.reads & updates != 0;
                clash || !update && !other.update
            });
            let after = set(&mut before.map(|(at, _)| at));
            let time = short(latency.time);
            operators.push(Operator { time, update, reads, makes, updates, after });
        }
        let made = operators.iter().fold(0, |s, o| s | o.makes);
        let all = set(&mut (0..graph.tensors.len()));
        let time = |direction| {
            let of = |t: &crate::job::Tensor| short(copy_time(link, direction, t.bytes, false));
            graph.tensors.iter().map(of).collect()
        };
        let used = operators.iter().fold(0, |s, o| s | o.reads | o.updates);
        assert!(graph.tensors.iter().all(|t| t.role != Role::Buffer && t.kept_until.is_none()));
        Self {
            bytes: graph.tensors.iter().map(|t| t.bytes.in_blocks().0).collect(),
            copies: [time(Direction::D2h), time(Direction::H2d)],
            long_lived: all & !made & used,
            operators,
            budget: budget.0,
            ahead: true,
        }
    }

    /// The best schedule that takes no longer than `limit`.
    pub fn best(&self, limit: Nanos) -> Option<Nanos> {
        let mut open = BinaryHeap::new();
        let mut reached: HashMap<Progress, Reached> = HashMap::new();
        let mut next = Vec::new();
        let kept: Vec<usize> = members(self.long_lived).collect();
        for choice in 0..bit(kept.len()) {
            let chosen = kept.iter().enumerate().filter(|(at, _)| choice & bit(*at) != 0);
            let start = chosen.fold(0, |s, (_, &t)| s | bit(t));
            let host = self.long_lived & !start;
            let at = Progress { start, done: 0, step: None, copy: [None; 2], turn: 0 };
            let state = State { at, device: start, host };
            if self.held(&state) <= self.budget {
                next.push((state, 0));
            }
        }
        loop {
            for (state, time) in next.drain(..) {
                let state = self.without_the_useless(state);
                let ends = time + self.left(&state);
                if ends <= limit.0 && reached.entry(state.at).or_default().is_new(&state, time) {
                    open.push(Reverse((ends, Reverse(time), state)));
                }
            }
            let Reverse((_, Reverse(time), state)) = open.pop()?;
            if !reached[&state.at].has(&state, time) {
                continue;
            }
            if self.is_end(&state) {
                return Some(Nanos(time));
            }
            self.follow(&state, time, &mut next);
        }
    }

    /// No schedule from here takes less: what operators still take, or either direction of the link
    /// for what must be copied.
    fn left(&self, state: &State) -> u64 {
        let step = state.at.step.map(|(at, _)| usize::from(at));
        let to_do = self.to_do(state).filter(|(at, _)| step != Some(*at));
        let (mut steps, mut used, mut changed) = (left_of(state.at.step), 0, 0);
        for (_, operator) in to_do {
            steps += u64::from(operator.time);
            used |= operator.reads | operator.updates;
            changed |= operator.updates;
        }
        changed |= step.map_or(0, |at| self.operators[at].updates);
        let away = self.long_lived & !state.at.start;
        let wanted = [
            away & (changed | !state.host) & !moving(state.at.copy[0]),
            self.long_lived & (used | state.at.start) & !state.device & !moving(state.at.copy[1]),
        ];
        let copies = [0, 1].map(|direction: usize| {
            let times = members(wanted[direction]).map(|t| u64::from(self.copies[direction][t]));
            left_of(state.at.copy[direction]) + times.sum::<u64>()
        });
        steps.max(copies[0]).max(copies[1])
    }

    /// What has not run to its end yet.
    fn to_do(&self, state: &State) -> impl Iterator<Item = (usize, &Operator)> {
        let done = state.at.done;
        self.operators.iter().enumerate().filter(move |(at, _)| done & bit(*at) == 0)
    }

    /// A tensor that is of no more use is given back at once: nothing is lost by that.
    fn without_the_useless(&self, mut state: State) -> State {
        let running = state.at.step.map(|(at, _)| &self.operators[usize::from(at)]);
        let held = running.map_or(0, |o| o.reads | o.updates);
        let useful = self.useful(&state) | moving(state.at.copy[0]) | moving(state.at.copy[1]);
        state.device &= useful | held;
        state.host &= useful | self.long_lived;
        state
    }

    fn is_end(&self, state: &State) -> bool {
        let idle = state.at.step.is_none() && state.at.copy == [None; 2];
        let away = self.long_lived & !state.at.start;
        idle && state.at.done == bit(self.operators.len()) - 1
            && state.at.start & !state.device == 0
            && away & !state.host == 0
    }

    fn held(&self, state: &State) -> u64 {
        let coming = moving(state.at.copy[1]);
        let making = state.at.step.map_or(0, |(step, _)| self.operators[usize::from(step)].makes);
        members(state.device | coming | making).map(|t| self.bytes[t]).sum()
    }

    /// What may still be of use: what an operator that is still to run reads or the end wants, and
    /// what that can be made from.
    fn useful(&self, state: &State) -> Set {
        let mut useful = self.long_lived & (state.at.start | !state.host);
        useful |= self.to_do(state).fold(0, |s, (_, o)| s | o.reads | o.updates);
        for operator in self.operators.iter().rev().filter(|o| !o.update) {
            if operator.makes & useful != 0 {
                useful |= operator.reads;
            }
        }
        useful
    }

    /// The states after this one, with their times.
    fn follow(&self, state: &State, time: u64, next: &mut Vec<(State, u64)>) {
        let at = Progress { turn: state.at.turn + 1, ..state.at };
        let later = State { at, ..*state };
        match state.at.turn {
            0 => {
                next.push((later, time));
                if state.at.step.is_none() {
                    self.steps(state, time, next);
                }
            }
            1 => {
                next.push((later, time));
                if state.at.copy[1].is_none() {
                    let useful = self.useful(state) & state.host & !state.device;
                    let making =
                        state.at.step.map_or(0, |(s, _)| self.operators[usize::from(s)].makes);
                    for tensor in members(useful & !making) {
                        let left = self.copies[1][tensor];
                        let mut with = later;
                        with.at.copy[1] = Some((tensor as u8, left));
                        self.with_room(&with, 0, time, next);
                    }
                }
            }
            2 => {
                next.push((later, time));
                if state.at.copy[0].is_none() {
                    let step = state.at.step.map(|(s, _)| &self.operators[usize::from(s)]);
                    let changing = step.map_or(0, |o| o.makes | o.updates);
                    let useful = self.useful(state) & state.device & !state.host & !changing;
                    for tensor in members(useful) {
                        let mut with = later;
                        with.at.copy[0] = Some((tensor as u8, self.copies[0][tensor]));
                        next.push((with, time));
                    }
                }
            }
            _ => self.wait(state, time, next),
        }
    }

    /// Every operator that may start: for the first time or again.
    fn steps(&self, state: &State, time: u64, next: &mut Vec<(State, u64)>) {
        let useful = self.useful(state);
        let leaving = moving(state.at.copy[0]);
        let coming = moving(state.at.copy[1]);
        let changed = members(state.at.done).fold(0, |s, at| s | self.operators[at].updates);
        for (at, operator) in self.operators.iter().enumerate() {
            let done = state.at.done & bit(at) != 0;
            let reads = operator.reads | operator.updates;
            let again = !operator.update
                && operator.reads & changed == 0
                && operator.makes & useful & !state.device & !coming != 0;
            let first = operator.after & !state.at.done == 0;
            let may = if done { again } else { first };
            if !may || reads & !state.device != 0 || operator.updates & leaving != 0 {
                continue;
            }
            let running = Some((at as u8, operator.time));
            let at = Progress { step: running, turn: 1, ..state.at };
            let with = State { at, ..*state };
            self.with_room(&with, reads, time, next);
        }
    }

    /// The state, after whatever it takes to give back for it; not what a step reads.
    fn with_room(&self, state: &State, reads: Set, time: u64, next: &mut Vec<(State, u64)>) {
        let needed = state.at.step.map_or(0, |(s, _)| {
            let operator = &self.operators[usize::from(s)];
            operator.reads | operator.updates
        });
        let leaving = moving(state.at.copy[0]);
        let mut lost = self.long_lived & !state.host;
        if !self.ahead {
            lost |=
                state.at.start & !self.to_do(state).fold(0, |s, (_, o)| s | o.reads | o.updates);
        }
        let may = state.device & !(needed | reads | leaving | lost);
        let over = self.held(state).saturating_sub(self.budget);
        let mut given = 0;
        loop {
            let freed: u64 = members(given).map(|t| self.bytes[t]).sum();
            let too_much = members(given).any(|t| freed - self.bytes[t] >= over);
            if freed >= over && !too_much {
                next.push((State { device: state.device & !given, ..*state }, time));
            }
            // The next subset of what may be given back.
            given = given.wrapping_sub(may) & may;
            if given == 0 || over == 0 {
                break;
            }
        }
    }

    /// Until the next end.
    fn wait(&self, state: &State, time: u64, next: &mut Vec<(State, u64)>) {
        let running = [state.at.step, state.at.copy[0], state.at.copy[1]];
        let Some(passes) = running.iter().flatten().map(|(_, left)| *left).min() else { return };
        let at = Progress { turn: 0, ..state.at };
        let mut after = State { at, ..*state };
        let go_on = |(what, left)| (what, left - passes);
        after.at.step = state.at.step.map(go_on);
        after.at.copy = state.at.copy.map(|copy: Running| copy.map(go_on));
        if let Some((step, 0)) = after.at.step {
            let operator = &self.operators[usize::from(step)];
            after.at.step = None;
            after.at.done |= bit(usize::from(step));
            after.device |= operator.makes;
            after.host &= !operator.updates;
        }
        if let Some((tensor, 0)) = after.at.copy[0] {
            after.at.copy[0] = None;
            after.host |= bit(usize::from(tensor));
        }
        if let Some((tensor, 0)) = after.at.copy[1] {
            after.at.copy[1] = None;
            after.device |= bit(usize::from(tensor));
        }
        next.push((after, time + u64::from(passes)));
    }
}
