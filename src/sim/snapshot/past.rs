//! The first pass over a device's events: what the recording began with, and how much was held.

use std::collections::HashMap;

use super::Problem;
use super::source::Budget;
use super::value::{Event, Pickle, Value};
use super::words::Word;
use crate::requests::PRIVATE;
use crate::units::id32;

/// The most segments of private pools that are kept apart.
const POOLS: usize = 1 << 12;

/// The id of a freed block.
pub(super) const GONE: u32 = u32::MAX;

/// A block that was live before the recording began.
pub(super) struct Start {
    pub(super) addr: i64,
    pub(super) size: u64,
    pub(super) stream: i64,
}

/// What the first pass over the events finds.
#[derive(Default)]
pub(super) struct Past {
    pub(super) blocks: Vec<Start>,
    /// Segments that existed before the recording, by address and size.
    pub(super) segments: Vec<(i64, i64)>,
    /// Bytes held before the recording; negative when the events contradict the segments.
    pub(super) reserved: i128,
    /// The most bytes held at any time.
    pub(super) most: i128,
    /// Bytes held and free at the last failure.
    pub(super) capacity: Option<i128>,
    /// Every address that ever had a block; all ids are [`GONE`].
    pub(super) ids: HashMap<i64, u32>,
    /// Whether the trace has `free_requested` events only.
    pub(super) by_request: bool,
    /// Whether the events contradict each other or the segments.
    pub(super) contradicted: bool,
    /// Segments of private pools that stand at the snapshot.
    pub(super) pools: Vec<Pool>,
    /// PyTorch's names of the streams, by number, and back.
    pub(super) streams: Vec<i64>,
    numbers: HashMap<i64, u32>,
    /// Private pools and their streams, by number.
    named: Vec<(u32, i64)>,
    pub(super) notes: Vec<String>,
}

/// A segment of a private pool.
pub(super) struct Pool {
    start: i64,
    size: i64,
    /// The event that took it last; before, the address may have been another pool's.
    since: usize,
    /// The number of its pool and stream, with [`PRIVATE`].
    number: u32,
}

impl Past {
    /// The number of the stream or private pool that event `at` allocates from.
    pub(super) fn stream_of(&self, at: usize, e: &Event) -> u32 {
        if e.pool != 0
            && let Some(number) = self.named.iter().position(|n| *n == (e.pool, e.stream))
        {
            return PRIVATE | id32(number);
        }
        self.stream_at(at, e.addr, e.stream, e.action == Word::Alloc)
    }

    /// Whether some of the job's memory was of private pools that have names.
    pub(super) fn has_pools(&self) -> bool {
        !self.named.is_empty()
    }

    /// The number of a private pool, named or not yet.
    fn private(&mut self, pool: u32, stream: i64) -> u32 {
        let known = self.named.iter().position(|n| *n == (pool, stream));
        let number = known.unwrap_or_else(|| {
            self.named.push((pool, stream));
            self.named.len() - 1
        });
        PRIVATE | id32(number)
    }

    /// As [`Past::stream_of`], of a block at an address.
    pub(super) fn stream_at(&self, at: usize, addr: i64, stream: i64, placed: bool) -> u32 {
        let before = self.pools.partition_point(|p| p.start <= addr);
        let last = before.checked_sub(1).and_then(|last| self.pools.get(last));
        let within = |p: &&Pool| addr.wrapping_sub(p.start) < p.size && at >= p.since;
        let pool = last.filter(|_| placed).filter(within);
        pool.map_or_else(|| self.numbers.get(&stream).copied().unwrap_or(0), |p| p.number)
    }

    /// Numbers the streams in order of first use.
    fn number(
        &mut self,
        pickle: &Pickle,
        events: &[Value],
        budget: &mut Budget,
    ) -> Result<(), Problem> {
        let first = self.blocks.iter().map(|b| b.stream).collect::<Vec<_>>();
        let allocated = |at: usize| match event(pickle, events, at) {
            Ok(Some(e)) if matches!(e.action, Word::Alloc | Word::Oom) => Some((e.pool, e.stream)),
            _ => None,
        };
        let first = first.into_iter().map(|stream| (0, stream));
        for (pool, stream) in first.chain((0..events.len()).filter_map(allocated)) {
            if pool != 0 && self.named.len() < POOLS {
                self.private(pool, stream);
            }
            if !self.numbers.contains_key(&stream) {
                room(&mut self.numbers, budget)?;
                self.numbers.insert(stream, id32(self.streams.len()));
                budget.push(&mut self.streams, stream)?;
            }
        }
        self.pools.sort_by_key(|p| p.start);
        let count = if self.pools.is_empty() { 0 } else { events.len() };
        for at in 0..count {
            let Ok(Some(e)) = event(pickle, events, at) else { continue };
            if matches!(e.action, Word::SegmentAlloc | Word::SegmentMap)
                && let Ok(place) = self.pools.binary_search_by_key(&e.addr, |p| p.start)
            {
                self.pools[place].since = at;
            }
        }
        Ok(())
    }
}

fn contradiction(at: usize, what: &str) -> Problem {
    Problem::Contradiction(format!("event {at} of the trace {what}; record the snapshot again"))
}

/// The event at position `at`; `Ok(None)` when its action has no meaning here.
pub(super) fn event(
    pickle: &Pickle,
    events: &[Value],
    at: usize,
) -> Result<Option<Event>, Problem> {
    match pickle.event(events[at]) {
        Some(e) if !(0..=1 << 62).contains(&e.size) => {
            Err(contradiction(at, "has a negative or enormous size"))
        }
        Some(e) => Ok(Some(e)),
        // Later versions may add actions. An event with a known action must be complete.
        None if pickle.get(events[at], Word::Action) == Some(Value::Other) => Ok(None),
        None => Err(contradiction(at, "lacks its action, address, size or stream")),
    }
}

/// Makes room for one more entry and counts its memory.
pub(super) fn room<V>(map: &mut HashMap<i64, V>, budget: &mut Budget) -> Result<(), Problem> {
    if map.len() == map.capacity() {
        // The standard table fills seven eighths of its buckets (a tiny one all but one) and then
        // doubles.
        let buckets = map.capacity() + map.capacity().div_ceil(7);
        let bytes = |n: usize| (n * (size_of::<(i64, V)>() + 1) + 64) as u64;
        budget.charge(bytes((buckets * 2).max(16)) - bytes(buckets), bytes(buckets))?;
        map.reserve(1);
    }
    Ok(())
}

pub(super) fn past(
    pickle: &Pickle,
    device: u32,
    events: &[Value],
    budget: &mut Budget,
) -> Result<Past, Problem> {
    const LIVE: u32 = 0;
    let mut past = Past::default();
    let mut segments: HashMap<i64, ()> = HashMap::new();
    let (mut held, mut most, mut stray, mut completed, mut requested, mut unknown) =
        (0i128, 0i128, 0u64, false, false, 0u64);
    for at in 0..events.len() {
        match event(pickle, events, at)?.map(|e| e.action) {
            Some(Word::FreeCompleted) => completed = true,
            Some(Word::FreeRequested) => requested = true,
            Some(_) => {}
            None => unknown += 1,
        }
    }
    past.by_request = requested && !completed;
    let freeing = if past.by_request { Word::FreeRequested } else { Word::FreeCompleted };
    for at in 0..events.len() {
        let Some(e) = event(pickle, events, at)? else { continue };
        match e.action {
            Word::Alloc => {
                room(&mut past.ids, budget)?;
                past.ids.insert(e.addr, LIVE);
            }
            action if action == freeing => match past.ids.get_mut(&e.addr) {
                Some(state) if *state == LIVE => *state = GONE,
                Some(_) => stray += 1,
                None => {
                    room(&mut past.ids, budget)?;
                    past.ids.insert(e.addr, GONE);
                    budget.push(
                        &mut past.blocks,
                        Start { addr: e.addr, size: e.size as u64, stream: e.stream },
                    )?;
                }
            },
            Word::SegmentAlloc | Word::SegmentMap => {
                held += i128::from(e.size);
                most = most.max(held);
                if e.action == Word::SegmentAlloc {
                    room(&mut segments, budget)?;
                    segments.insert(e.addr, ());
                }
            }
            Word::SegmentFree | Word::SegmentUnmap => {
                held -= i128::from(e.size);
                if e.action == Word::SegmentFree && !segments.contains_key(&e.addr) {
                    room(&mut segments, budget)?;
                    segments.insert(e.addr, ());
                    budget.push(&mut past.segments, (e.addr, e.size))?;
                }
            }
            Word::Oom => past.capacity = Some(held + i128::from(e.addr)),
            _ => {}
        }
    }
    let (total, odd) = standing(pickle, device, &mut past, &segments, budget)?;
    past.reserved = total - held;
    past.most = past.reserved + most;
    past.capacity = past.capacity.map(|c| c + past.reserved);
    past.contradicted = stray > 0 || odd > 0;
    past.blocks.sort_by_key(|b| b.addr);
    past.number(pickle, events, budget)?;
    // The second pass assigns all ids anew.
    past.ids.values_mut().for_each(|id| *id = GONE);
    let mut note = |n: u64, what: &str| {
        if n > 0 {
            past.notes.push(format!("{what}: {n}."));
        }
    };
    note(stray, "Frees of blocks that were free already (left out)");
    note(
        odd,
        "Blocks live at the snapshot that the trace freed and did not allocate again (the trace was believed)",
    );
    note(unknown, "Entries of the trace with an action that is not known here (left out)");
    Ok(past)
}

/// Reads the segments of the snapshot. Adds the live blocks and the segments that the trace never
/// names to `past`. Returns the bytes held and how many blocks contradict the trace.
fn standing(
    pickle: &Pickle,
    device: u32,
    past: &mut Past,
    traced: &HashMap<i64, ()>,
    budget: &mut Budget,
) -> Result<(i128, u64), Problem> {
    let wrong = |what: &str| Problem::NoSnapshot(what.to_owned());
    let all = pickle
        .get(pickle.root, Word::Segments)
        .and_then(|s| pickle.list(s))
        .ok_or_else(|| wrong("it has no list of `segments`"))?;
    let (mut total, mut odd, mut seen) = (0i128, 0u64, 0usize);
    for segment in all {
        let number = |of: Value, key| match pickle.get(of, key) {
            Some(Value::Int(n)) => Some(n),
            _ => None,
        };
        let get = |key| {
            number(*segment, key)
                .ok_or_else(|| wrong("a segment lacks its address, size or stream"))
        };
        if number(*segment, Word::Device).unwrap_or(0) != i64::from(device) {
            continue;
        }
        let (address, size, stream) =
            (get(Word::Address)?, get(Word::TotalSize)?, get(Word::Stream)?);
        if size < 0 {
            return Err(wrong("a segment has a negative size"));
        }
        total += i128::from(size);
        let pool = pickle
            .get(*segment, Word::SegmentPoolId)
            .and_then(|p| pickle.list(p))
            .unwrap_or_default();
        if pool.iter().any(|v| *v != Value::Int(0)) && past.pools.len() < POOLS {
            let number = past.private(super::value::pool(pool), stream);
            budget.push(&mut past.pools, Pool { start: address, size, since: 0, number })?;
        }
        if !traced.contains_key(&address) {
            budget.push(&mut past.segments, (address, size))?;
        }
        let blocks = pickle
            .get(*segment, Word::Blocks)
            .and_then(|b| pickle.list(b))
            .ok_or_else(|| wrong("a segment has no blocks"))?;
        // Each block is a dictionary of its own. More blocks than dictionaries means that a list is
        // shared.
        seen = seen.saturating_add(blocks.len()).saturating_add(1);
        if seen > pickle.nodes.len() {
            return Err(wrong("segments share blocks"));
        }
        let mut next = address;
        for block in blocks {
            let size = number(*block, Word::Size)
                .filter(|n| (0..=1 << 62).contains(n))
                .ok_or_else(|| wrong("a block lacks its size"))?;
            // Old versions write no block addresses: each block follows the one before.
            let addr = number(*block, Word::Address).unwrap_or(next);
            next = addr.saturating_add(size);
            match pickle.get(*block, Word::State) {
                Some(Value::Word(Word::Inactive)) => continue,
                Some(Value::Word(Word::ActiveAllocated | Word::ActivePendingFree)) => {}
                _ => return Err(wrong("a block has no known state")),
            }
            match past.ids.get(&addr) {
                Some(state) => odd += u64::from(*state == GONE),
                None => {
                    let size = number(*block, Word::RequestedSize)
                        .filter(|n| (1..=1 << 62).contains(n))
                        .unwrap_or(size) as u64;
                    room(&mut past.ids, budget)?;
                    past.ids.insert(addr, 0);
                    budget.push(&mut past.blocks, Start { addr, size, stream })?;
                }
            }
        }
    }
    Ok((total, odd))
}
