//! Which of a trace's readings PyTorch's allocator would have followed.
//!
//! A trace says which segments were given back and when blocks became free, and not why: because of
//! `torch.cuda.empty_cache`, or of an allocation that was short of memory; before that allocation
//! looked for a free block, or while it waited for other streams. So the allocator itself is asked.
//! Between two allocations there are few readings. Each is played, and those stay that give back
//! and take exactly what was recorded; what follows decides between them. The job may have
//! been short of memory too, of the device's or of a share of it ([`Limit`]), which the trace does
//! not say either: limits are tried until one explains the whole trace.

mod group;
mod limit;

use std::collections::{BTreeMap, HashMap};

use super::past::{Past, event};
use super::source::Budget;
use super::value::{Event, Pickle, Value};
use super::words::Word;
use super::{Limit, Problem, Settings};
use crate::allocator::replay::LARGEST_DEVICE;
use crate::allocator::{Allocator, BlockHandle, Config};
use crate::units::Bytes;
use group::Group;

/// The most readings that are followed at a time.
const WIDTH: usize = 6;

/// Bytes counted for a live block of a reading.
const BLOCK: u64 = 256;

/// Blocks that may be looked at, besides a number for each event: beyond it readings are not tried.
const EFFORT: u64 = 50_000_000;

/// What an event means besides what it says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mark {
    /// After it `torch.cuda.empty_cache` has run.
    Emptied,
    /// The free completed only after the allocation that follows had looked for a block.
    Later,
    /// After the allocation, the frees that completed later and the cached memory went back; when
    /// it was answered, this many bytes were held.
    EmptiedThen(u64),
}

/// How a trace is to be read.
#[derive(Debug, Default)]
pub(super) struct Reading {
    /// By event, ascending.
    pub(super) marks: Vec<(usize, Mark)>,
    /// Events before this one are explained.
    pub(super) until: usize,
    /// The event whose group is not.
    pub(super) stopped: usize,
    /// What limited the job.
    pub(super) limit: Option<Limit>,
    /// How often it contradicts the recorded stacks.
    cost: u32,
    /// Whether the first event that is not explained took memory although a cached block would do.
    pub(super) needless: bool,
}

/// One allocator and how it got there.
#[derive(Clone)]
struct State {
    allocator: Allocator,
    live: HashMap<i64, BlockHandle>,
    /// Marks since the readings parted.
    marks: Vec<(usize, Mark)>,
    /// How often it contradicts the recorded stacks, or is odd otherwise.
    cost: u32,
    /// How many allocations were not where the trace has them. Addresses are not the same on every
    /// device, so this decides between readings and refutes none.
    astray: u32,
    /// By the start of memory taken, what its addresses are less than the trace's.
    shifts: BTreeMap<u64, i64>,
    /// Whether the trace took memory where this found a cached block.
    needless: bool,
}

/// A trace to be explained.
struct Trace<'a> {
    pickle: &'a Pickle,
    events: &'a [Value],
    past: &'a Past,
    config: Config,
}

impl Trace<'_> {
    /// The event at a position, if it means anything.
    fn at(&self, at: usize) -> Option<Event> {
        event(self.pickle, self.events, at).ok().flatten()
    }
}

/// Finds the reading of a trace that was recorded from the start: one that explains all of it, or
/// as much as any does.
pub(super) fn read(
    pickle: &Pickle,
    events: &[Value],
    past: &Past,
    settings: &Settings,
    budget: &mut Budget,
) -> Result<Reading, Problem> {
    let whole = past.reserved == 0 && past.blocks.is_empty() && !past.contradicted;
    let Some(config) = settings.config().filter(|_| whole && !past.by_request) else {
        return Ok(Reading::default());
    };
    if past.most > i128::from(LARGEST_DEVICE.0) {
        return Ok(Reading::default());
    }
    let trace = Trace { pickle, events, past, config };
    let mut effort = EFFORT + 8 * events.len() as u64;
    let mut best = Reading::default();
    for limit in limit::candidates(&trace) {
        let mut walk = Walk::new(&trace, limit, effort);
        let found = walk.all(budget)?;
        effort = walk.effort;
        let rank = |r: &Reading| (r.limit.is_some(), r.until, std::cmp::Reverse(r.cost));
        if rank(&found) > rank(&best) {
            best = found;
        }
        if best.until == events.len() && best.cost == 0 || effort == 0 {
            break;
        }
    }
    Ok(best)
}

/// One walk through the events under a limit.
struct Walk<'a> {
    trace: &'a Trace<'a>,
    limit: Limit,
    states: Vec<State>,
    marks: Vec<(usize, Mark)>,
    effort: u64,
    /// Bytes on the account for the states' blocks.
    charged: u64,
}

impl<'a> Walk<'a> {
    fn new(trace: &'a Trace<'a>, limit: Limit, effort: u64) -> Self {
        // A share of 1 is none, whatever the settings say.
        let fraction = Some(limit.fraction.unwrap_or(1.0));
        let mut allocator = Allocator::new(&trace.config, limit.capacity, fraction);
        allocator.record();
        let first = State {
            allocator,
            live: HashMap::new(),
            marks: Vec::new(),
            cost: 0,
            astray: 0,
            shifts: BTreeMap::new(),
            needless: false,
        };
        Self { trace, limit, states: vec![first], marks: Vec::new(), effort, charged: 0 }
    }

    /// Explains as many events as it can.
    fn all(&mut self, budget: &mut Budget) -> Result<Reading, Problem> {
        let (mut from, mut stopped, mut needless) = (0, 0, false);
        let count = self.trace.events.len();
        for at in 0..=count {
            let event = if at < count { self.trace.at(at) } else { None };
            let closes = event.is_some_and(|e| matches!(e.action, Word::Alloc | Word::Oom));
            if !closes && at < count {
                continue;
            }
            stopped = at;
            let group = Group::new(self.trace, from..at, event);
            if !self.afford(&group, budget) {
                break;
            }
            if !self.follow(&group) {
                needless = self.states.iter().any(|s| s.spared(&group));
                break;
            }
            from = (at + 1).min(count);
            if let [only] = self.states.as_mut_slice() {
                for mark in only.marks.drain(..) {
                    budget.push(&mut self.marks, mark)?;
                }
            }
        }
        budget.release(std::mem::take(&mut self.charged));
        if let Some(first) = self.states.first_mut() {
            for mark in first.marks.drain(..).filter(|(at, _)| *at < from) {
                budget.push(&mut self.marks, mark)?;
            }
        }
        self.marks.sort_by_key(|(at, _)| *at);
        let marks = std::mem::take(&mut self.marks);
        let cost = self.states.first().map_or(0, |s| s.cost);
        Ok(Reading { marks, until: from, stopped, limit: Some(self.limit), cost, needless })
    }

    /// Whether there is memory and time for one more group.
    fn afford(&mut self, group: &Group, budget: &mut Budget) -> bool {
        let live: usize = self.states.iter().map(|s| s.live.len() + 1).sum();
        // Trying readings copies them.
        let copies = if group.is_plain() { 1 } else { 4 };
        let wanted = live as u64 * copies * BLOCK + group.bytes();
        if let Some(more) = wanted.checked_sub(self.charged) {
            if budget.charge(more, 0).is_err() {
                return false;
            }
            self.charged = wanted;
        }
        let looked_at = if group.is_plain() { group.len() } else { live as u64 * 8 + group.len() };
        self.effort = self.effort.saturating_sub(looked_at);
        self.effort > 0
    }

    /// Keeps the readings that explain a group; without any, all.
    fn follow(&mut self, group: &Group) -> bool {
        if group.is_plain() {
            let does: Vec<bool> = self.states.iter_mut().map(|s| s.plainly(group)).collect();
            let any = does.contains(&true);
            let mut does = does.into_iter();
            self.states.retain(|_| does.next() == Some(true) || !any);
            return any;
        }
        let mut next: Vec<State> = Vec::new();
        for state in &self.states {
            group.readings(state, &mut next);
        }
        if next.is_empty() {
            return false;
        }
        next.sort_by_key(|s| (s.astray, s.cost));
        if next.len() > 1 {
            next = self.apart(next);
        }
        next.truncate(WIDTH);
        self.states = next;
        true
    }

    /// Leaves out states that are like one before them. With garbage collection the age of blocks
    /// counts too, and those with a layout of their own come first.
    fn apart(&self, states: Vec<State>) -> Vec<State> {
        let collects = self.trace.config.gc_threshold.is_some() && self.limit.fraction.is_some();
        let (mut layouts, mut new, mut old) = (Vec::new(), Vec::new(), Vec::new());
        for state in states {
            let layout = state.allocator.segments();
            if !layouts.contains(&layout) {
                layouts.push(layout);
                new.push(state);
            } else if collects {
                old.push(state);
            }
        }
        new.append(&mut old);
        new
    }
}

impl State {
    fn allocate(&mut self, addr: i64, bytes: u64, stream: u32) -> bool {
        match self.allocator.allocate(Bytes(bytes), stream) {
            Ok(handle) => {
                self.live.insert(addr, handle);
                true
            }
            Err(_) => false,
        }
    }

    fn free(&mut self, addr: i64) {
        if let Some(handle) = self.live.remove(&addr) {
            self.allocator.free(handle);
        }
    }
}
