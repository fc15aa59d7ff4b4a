//! The events up to one allocation, and the readings that they have.

use std::ops::Range;

use super::{Mark, State, Trace};
use crate::allocator::Change;
use crate::snapshot::value::{Event, Stack};
use crate::snapshot::words::Word;

/// How many frees an allocation may be split at into those before its search and those after.
const SPLITS: usize = 8;

/// How often `torch.cuda.empty_cache` may have run just before one allocation.
const CALLS: u32 = 4;

/// An event between two allocations. Places are those of events in the trace.
#[derive(Clone, Copy, Debug)]
enum Item {
    /// A block became free; `odd` where that another stream still used it would be a surprise.
    Freed { at: usize, addr: i64, odd: bool },
    /// Memory went back to the device.
    Given { at: usize, size: u64, stack: Stack },
    /// Memory was taken from it.
    Taken { addr: i64, size: u64 },
}

/// The allocation that closes a group.
#[derive(Clone, Copy, Debug)]
struct Close {
    at: usize,
    addr: i64,
    bytes: u64,
    stream: u32,
    fails: bool,
}

/// Events that belong together.
pub(super) struct Group {
    /// What happened outside the allocation that closes the group.
    outside: Vec<Item>,
    /// What may have happened inside it: nothing that the job itself did came later.
    perhaps: Vec<Item>,
    close: Option<Close>,
}

impl Group {
    /// The events of a range, and the one that closes it.
    pub(super) fn new(trace: &Trace<'_>, range: Range<usize>, close: Option<Event>) -> Self {
        let (mut outside, mut perhaps) = (Vec::new(), Vec::new());
        let end = range.end;
        let (mut requested, mut last_at_once) = (None, false);
        for at in range {
            let Some(e) = trace.at(at) else { continue };
            match e.action {
                Word::FreeCompleted => {
                    let odd = requested == Some(e.addr);
                    perhaps.push(Item::Freed { at, addr: e.addr, odd });
                }
                Word::SegmentFree | Word::SegmentUnmap => {
                    let size = e.size.unsigned_abs();
                    perhaps.push(Item::Given { at, size, stack: e.stack });
                }
                Word::SegmentAlloc | Word::SegmentMap => {
                    perhaps.push(Item::Taken { addr: e.addr, size: e.size.unsigned_abs() });
                }
                _ => {}
            }
            // The job asked for a free, and what completes at once needed no other stream.
            let at_once = e.action == Word::FreeCompleted && requested == Some(e.addr);
            if at_once || matches!(e.action, Word::FreeRequested | Word::Taken) {
                outside.append(&mut perhaps);
                last_at_once = at_once;
            }
            requested = (e.action == Word::FreeRequested).then_some(e.addr);
        }
        // Unless the next thing was that the allocation waited for that stream.
        let waits = |i: &Item| matches!(i, Item::Given { .. });
        let fails = close.is_some_and(|e| e.action == Word::Oom);
        if last_at_once && (fails || perhaps.iter().any(waits)) {
            perhaps.splice(0..0, outside.pop());
        }
        let close = close.map(|e| Close {
            at: end,
            addr: e.addr,
            bytes: e.size.unsigned_abs(),
            stream: trace.past.stream_of(end, &e),
            fails,
        });
        Self { outside, perhaps, close }
    }

    /// Whether there is only one reading.
    pub(super) fn is_plain(&self) -> bool {
        let gives = |i: &Item| matches!(i, Item::Given { .. });
        !self.outside.iter().any(gives)
            && self.perhaps.iter().all(|i| matches!(i, Item::Taken { .. }))
    }

    pub(super) fn len(&self) -> u64 {
        (self.outside.len() + self.perhaps.len() + 1) as u64
    }

    pub(super) fn bytes(&self) -> u64 {
        (self.outside.capacity() + self.perhaps.capacity()) as u64 * size_of::<Item>() as u64
    }

    /// Adds what becomes of a state under each reading that explains the group, the likelier first.
    pub(super) fn readings(&self, state: &State, all: &mut Vec<State>) {
        let mut state = state.clone();
        let mut rest = self.outside.as_slice();
        while let Some(given) = rest.iter().position(|i| matches!(i, Item::Given { .. })) {
            state.free_all(&rest[..given]);
            let Some(used) = state.empties(&rest[given..]) else { return };
            rest = &rest[given + used..];
        }
        state.free_all(rest);
        self.inside(&state, &self.perhaps, CALLS, all);
    }

    /// As [`Group::readings`], of what is left of `perhaps`.
    fn inside(&self, state: &State, items: &[Item], calls: u32, all: &mut Vec<State>) {
        let given = items.iter().position(|i| matches!(i, Item::Given { .. }));
        match &self.close {
            Some(close) => close.readings(state, items, all),
            None if given.is_none() => {
                let mut state = state.clone();
                state.free_all(items);
                all.push(state);
                return;
            }
            None => {}
        }
        let Some(given) = given.filter(|_| calls > 0) else { return };
        if items[..given].iter().any(|i| matches!(i, Item::Taken { .. })) {
            return;
        }
        let mut state = state.clone();
        state.free_all(&items[..given]);
        if let Some(used) = state.empties(&items[given..]) {
            self.inside(&state, &items[given + used..], calls - 1, all);
        }
    }
}

impl Close {
    /// Adds what becomes of a state if all items happened while the allocation was served.
    fn readings(&self, state: &State, items: &[Item], all: &mut Vec<State>) {
        let (mut given, mut taken, mut frees, mut named) = (Vec::new(), Vec::new(), Vec::new(), 0);
        let mut leading = 0;
        for item in items {
            match *item {
                Item::Freed { at, addr, odd } => {
                    leading += usize::from(given.is_empty() && taken.is_empty());
                    frees.push((at, addr, odd));
                }
                Item::Given { size, stack, .. } => {
                    named |= u32::from(stack == Stack::EmptyCache);
                    given.push(size);
                }
                Item::Taken { size, .. } => taken.push(size),
            }
        }
        given.sort_unstable();
        taken.sort_unstable();
        // Frees that completed while it waited for other streams: only short of memory it does.
        let waited = self.fails || !given.is_empty();
        let splits = (0..=leading)
            .rev()
            .filter(|n| *n == leading || waited && (*n == 0 || leading - n <= SPLITS));
        for split in splits {
            let mut state = state.clone();
            for (_, addr, _) in &frees[..split] {
                state.free(*addr);
            }
            let later = &frees[split..];
            // What was given out again was free before.
            if later.iter().any(|(_, addr, _)| !self.fails && *addr == self.addr) {
                continue;
            }
            if state.allocate(self.addr, self.bytes, self.stream) == self.fails {
                continue;
            }
            let held = state.allocator.stats().reserved.0;
            let (mut back, took) = state.changes(items);
            state.compare(self);
            for (at, addr, odd) in later {
                state.free(*addr);
                state.marks.push((*at, Mark::Later));
                state.cost += u32::from(*odd);
            }
            if took != taken {
                continue;
            }
            if back != given {
                if later.is_empty() {
                    continue;
                }
                state.allocator.empty_cache();
                back.extend(state.changes(&[]).0);
                back.sort_unstable();
                if back != given {
                    continue;
                }
                state.marks.push((self.at, Mark::EmptiedThen(held)));
            }
            state.cost += named;
            all.push(state);
        }
    }
}

impl State {
    /// Follows a group with one reading. Returns whether it explains the group.
    pub(super) fn plainly(&mut self, group: &Group) -> bool {
        self.free_all(&group.outside);
        let Some(close) = &group.close else { return group.perhaps.is_empty() };
        if self.allocate(close.addr, close.bytes, close.stream) == close.fails {
            return false;
        }
        let (back, took) = self.changes(&group.perhaps);
        self.compare(close);
        if took.is_empty() && back.is_empty() && group.perhaps.is_empty() {
            return true;
        }
        let size = |i: &Item| if let Item::Taken { size, .. } = *i { size } else { 0 };
        let mut taken: Vec<u64> = group.perhaps.iter().map(size).collect();
        taken.sort_unstable();
        self.needless = took.is_empty() && !taken.is_empty();
        back.is_empty() && took == taken
    }

    /// Whether the closing allocation, which is not explained, found a cached block and yet took
    /// memory in the trace.
    pub(super) fn spared(&self, group: &Group) -> bool {
        if group.is_plain() {
            return self.needless;
        }
        let takes = |i: &Item| matches!(i, Item::Taken { .. });
        let takes = group.perhaps.iter().any(takes);
        let Some(close) = group.close.filter(|c| takes && !c.fails) else { return false };
        let mut state = self.clone();
        state.free_all(&group.outside);
        state.free_all(&group.perhaps);
        state.changes(&[]);
        state.allocate(close.addr, close.bytes, close.stream) && state.changes(&[]).1.is_empty()
    }

    /// Empties the cache, which must give back just what the items begin with. Returns how many.
    fn empties(&mut self, items: &[Item]) -> Option<usize> {
        self.allocator.empty_cache();
        let (back, _) = self.changes(&[]);
        if back.is_empty() || back.len() > items.len() {
            return None;
        }
        let (mut given, mut last) = (Vec::new(), 0);
        for item in &items[..back.len()] {
            let Item::Given { at, size, stack } = *item else { return None };
            self.cost += u32::from(stack == Stack::Other && given.is_empty());
            given.push(size);
            last = at;
        }
        given.sort_unstable();
        self.marks.push((last, Mark::Emptied));
        (given == back).then_some(back.len())
    }

    fn free_all(&mut self, items: &[Item]) {
        for item in items {
            if let Item::Freed { addr, .. } = item {
                self.free(*addr);
            }
        }
    }

    /// What was given back and taken since the last call, by size. What was taken is where the
    /// trace took it.
    fn changes(&mut self, items: &[Item]) -> (Vec<u64>, Vec<u64>) {
        let (mut back, mut took) = (Vec::new(), Vec::new());
        let taken =
            |i: &Item| if let Item::Taken { addr, size } = *i { Some((addr, size)) } else { None };
        let mut taken = items.iter().filter_map(taken);
        for change in self.allocator.take_changes() {
            let (from, size) = (change.address, change.bytes.0);
            match change.change {
                Change::Taken | Change::Mapped => {
                    took.push(size);
                    if let Some((addr, _)) = taken.next().filter(|(_, n)| *n == size) {
                        self.shifts.insert(from, addr.wrapping_sub(from.cast_signed()));
                    }
                }
                Change::GivenBack | Change::Unmapped => {
                    back.push(size);
                    while let Some((start, _)) = self.shifts.range(from..from + size).next() {
                        let start = *start;
                        self.shifts.remove(&start);
                    }
                }
            }
        }
        back.sort_unstable();
        took.sort_unstable();
        (back, took)
    }

    /// Counts an allocation that is not where the trace has it.
    fn compare(&mut self, close: &Close) {
        let Some(view) = self.live.get(&close.addr).and_then(|h| self.allocator.view(*h)) else {
            return;
        };
        let shift = self.shifts.range(..=view.address).next_back().map(|(_, shift)| *shift);
        let there = shift.map(|s| view.address.cast_signed().wrapping_add(s));
        self.astray += u32::from(there.is_some_and(|there| there != close.addr));
    }
}
