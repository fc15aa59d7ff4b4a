//! Turns one device's events of a decoded snapshot into requests: first the blocks that were live
//! before the recording, then the events in order.
//!
//! A snapshot records allocations with their requested bytes, when a free was requested and when it
//! completed (later, if another stream still used the block), and the segments taken and given
//! back. Only `free_completed` counts as a free: a replay could not predict when it came.
//!
//! `torch.cuda.empty_cache` itself leaves no event, only the segments that it gives back. But an
//! allocation that fails and is tried again gives segments back too. A run of segments given back
//! becomes [`Request::EmptyCache`] in these cases:
//!
//! - A stack was recorded with it and contains `empty_cache` of `torch/cuda/memory.py`.
//! - No stacks were recorded, the run leaves no segment idle, and the next event can't be the rest
//!   of an allocation that took a new segment or failed.
//! - As before, but an allocation with new segments follows, and it can't have been short of
//!   memory: at another time PyTorch held as much as it would have held without the run. Besides,
//!   neither `max_split_size_mb` nor garbage collection is set, which also give back segments.

use std::collections::{BTreeMap, HashMap};

use super::source::Budget;
use super::value::{Event, Pickle, Stack, Value};
use super::words::Word;
use super::{Problem, Settings, Snapshot};
use crate::compact::CompactSort;
use crate::requests::Request;
use crate::units::{Bytes, id32};

/// Bytes counted for an entry of a tree, its share of half-empty nodes included.
const TREE_ENTRY: u64 = 96;

/// The id of a freed block.
const GONE: u32 = u32::MAX;

/// A block that was live before the recording began.
struct Start {
    addr: i64,
    size: u64,
    stream: i64,
}

/// A segment of fixed size and how many live blocks it has.
struct Segment {
    size: i64,
    live: u32,
}

/// What the first pass over the events finds.
#[derive(Default)]
struct Past {
    blocks: Vec<Start>,
    /// Segments that existed before the recording, by address and size.
    segments: Vec<(i64, i64)>,
    /// Bytes held before the recording; negative when the events contradict the segments.
    reserved: i128,
    /// The most bytes held at any time.
    most: i128,
    /// Bytes held and free at the last failure.
    capacity: Option<i128>,
    /// Every address that ever had a block; all ids are [`GONE`].
    ids: HashMap<i64, u32>,
    /// Whether the trace has `free_requested` events only.
    by_request: bool,
    /// Whether the events contradict each other or the segments.
    contradicted: bool,
    private: bool,
    notes: Vec<String>,
}

fn contradiction(at: usize, what: &str) -> Problem {
    Problem::Contradiction(format!("event {at} of the trace {what}; record the snapshot again"))
}

/// The event at position `at`; `Ok(None)` when its action has no meaning here.
fn event(pickle: &Pickle, events: &[Value], at: usize) -> Result<Option<Event>, Problem> {
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
fn room<V>(map: &mut HashMap<i64, V>, budget: &mut Budget) -> Result<(), Problem> {
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

fn past(
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
    past.blocks.compact_sort_by_key(|b| b.addr);
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
        past.private |= pool.iter().any(|v| *v != Value::Int(0));
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

/// Segments given back without a request between them.
struct Run {
    /// How many requests came before.
    at: usize,
    /// Bytes held before and after.
    before: i128,
    after: i128,
    /// Bytes taken since.
    grown: i128,
    /// Whether it left idle segments.
    idle: bool,
    /// Whether other events came between its parts.
    mixed: bool,
    stack: Stack,
}

struct Builder<'a> {
    budget: &'a mut Budget,
    requests: Vec<Request>,
    expected: Vec<u64>,
    streams: Vec<i64>,
    stream_ids: HashMap<i64, u32>,
    ids: HashMap<i64, u32>,
    next: u32,
    segments: BTreeMap<i64, Segment>,
    /// How many of `segments` have no live block.
    idle: usize,
    reserved: i128,
    most: i128,
    capacity: Option<i128>,
    run: Option<Run>,
    /// Whether segments are also given back for reasons other than want of memory.
    collects: bool,
    emptied: u64,
    retried: u64,
    unclear: u64,
    renewed: u64,
}

/// The requests of `device`, whose trace is `events`.
pub(super) fn build(
    pickle: &Pickle,
    device: u32,
    events: &[Value],
    settings: Settings,
    budget: &mut Budget,
) -> Result<Snapshot, Problem> {
    let mut past = past(pickle, device, events, budget)?;
    let mut builder = Builder {
        budget,
        requests: Vec::new(),
        expected: Vec::new(),
        streams: Vec::new(),
        stream_ids: HashMap::new(),
        ids: std::mem::take(&mut past.ids),
        next: 0,
        segments: BTreeMap::new(),
        idle: 0,
        reserved: past.reserved,
        most: past.most,
        capacity: past.capacity,
        run: None,
        collects: settings.alloc_conf.is_none()
            || settings.max_split_size.is_some()
            || settings.garbage_collection_threshold.is_some(),
        emptied: 0,
        retried: 0,
        unclear: 0,
        renewed: 0,
    };
    for (addr, size) in &past.segments {
        builder.segment(*addr, *size)?;
    }
    for block in &past.blocks {
        builder.allocate(block.addr, block.size, block.stream)?;
    }
    let at_start = builder.requests.len();
    let mut failed = Vec::new();
    for at in 0..events.len() {
        if let Some(e) = event(pickle, events, at)? {
            builder.apply(&e, past.by_request, &mut failed)?;
        }
    }
    builder.decide(false)?;
    let mut notes = past.notes;
    builder.notes(&mut notes, &failed);
    if at_start > 0 || past.reserved > 0 {
        notes.push(format!(
            "When the recording began, {at_start} blocks were live in {} of segments; they are allocated first, in address order, so what is held may differ from what was: record from the job's start for an exact replay.",
            Bytes(u64::try_from(past.reserved).unwrap_or(0))
        ));
    }
    if past.reserved < 0 {
        notes.push("The trace takes more segments than stand at the snapshot; what PyTorch held is not known.".to_owned());
    }
    if past.private {
        notes.push(
            "Some segments are of private pools (CUDA graphs or MemPool), which are replayed as if they were the common pool.".to_owned(),
        );
    }
    if past.by_request {
        notes.push(
            "The trace has no free_completed events: free_requested was taken for them.".to_owned(),
        );
    }
    let exact = past.reserved == 0
        && at_start == 0
        && !past.contradicted
        && !past.by_request
        && builder.renewed == 0;
    Ok(Snapshot {
        device,
        expected_reserved: exact.then_some(builder.expected),
        requests: builder.requests,
        at_start,
        reserved_at_start: Bytes(u64::try_from(past.reserved).unwrap_or(0)),
        streams: builder.streams,
        failed,
        capacity: past.capacity.and_then(|c| u64::try_from(c).ok()).map(Bytes),
        settings,
        notes,
    })
}

impl Builder<'_> {
    /// Turns an event into requests.
    fn apply(&mut self, e: &Event, by_request: bool, failed: &mut Vec<u32>) -> Result<(), Problem> {
        match e.action {
            Word::Alloc => {
                self.decide(true)?;
                self.allocate(e.addr, e.size as u64, e.stream)
            }
            Word::FreeRequested => {
                self.decide(false)?;
                if by_request { self.free(e.addr) } else { Ok(()) }
            }
            Word::FreeCompleted => self.free(e.addr),
            Word::SegmentAlloc | Word::SegmentMap => {
                self.reserved += i128::from(e.size);
                if let Some(run) = &mut self.run {
                    run.grown += i128::from(e.size);
                }
                if e.action == Word::SegmentAlloc { self.segment(e.addr, e.size) } else { Ok(()) }
            }
            Word::SegmentFree | Word::SegmentUnmap => {
                self.give_back(e);
                Ok(())
            }
            Word::Oom => {
                self.run = None;
                self.budget.push(failed, self.next)?;
                self.fail(e.size as u64, e.stream)
            }
            _ => self.decide(false),
        }
    }

    fn request(&mut self, request: Request) -> Result<(), Problem> {
        self.budget.push(&mut self.requests, request)?;
        let held = u64::try_from(self.reserved).unwrap_or(0);
        self.budget.push(&mut self.expected, held)
    }

    fn stream(&mut self, stream: i64) -> Result<u32, Problem> {
        if let Some(n) = self.stream_ids.get(&stream) {
            return Ok(*n);
        }
        let n = id32(self.streams.len());
        room(&mut self.stream_ids, self.budget)?;
        self.stream_ids.insert(stream, n);
        self.budget.push(&mut self.streams, stream)?;
        Ok(n)
    }

    fn id(&mut self) -> Result<u32, Problem> {
        let id = self.next;
        if id == GONE {
            return Err(Problem::Contradiction(
                "the trace has more than 2^32 allocations; record fewer".to_owned(),
            ));
        }
        self.next += 1;
        Ok(id)
    }

    fn allocate(&mut self, addr: i64, size: u64, stream: i64) -> Result<(), Problem> {
        if self.ids.get(&addr).is_some_and(|id| *id != GONE) {
            self.renewed += 1;
            self.free(addr)?;
        }
        let (id, stream) = (self.id()?, self.stream(stream)?);
        self.request(Request::Allocate { id, bytes: Bytes(size), stream })?;
        // The first pass inserted every address, so the table never grows.
        self.ids.insert(addr, id);
        self.count(addr, true);
        Ok(())
    }

    /// Adds an allocation that failed when it was recorded, and its free, so that a replay in which
    /// it succeeds doesn't keep it.
    fn fail(&mut self, size: u64, stream: i64) -> Result<(), Problem> {
        let (id, stream) = (self.id()?, self.stream(stream)?);
        self.request(Request::Allocate { id, bytes: Bytes(size), stream })?;
        self.request(Request::Free { id })
    }

    fn free(&mut self, addr: i64) -> Result<(), Problem> {
        match self.ids.get_mut(&addr) {
            Some(id) if *id != GONE => {
                let id = std::mem::replace(id, GONE);
                self.request(Request::Free { id })?;
                self.count(addr, false);
            }
            _ => {}
        }
        Ok(())
    }

    /// Updates the count of live blocks of the segment around `addr`, if it is of fixed size.
    fn count(&mut self, addr: i64, live: bool) {
        let Some((start, segment)) = self.segments.range_mut(..=addr).next_back() else { return };
        if addr.wrapping_sub(*start) >= segment.size {
            return;
        }
        if live {
            self.idle -= usize::from(segment.live == 0);
            segment.live += 1;
        } else if segment.live > 0 {
            segment.live -= 1;
            self.idle += usize::from(segment.live == 0);
        }
    }

    fn segment(&mut self, addr: i64, size: i64) -> Result<(), Problem> {
        self.forget(addr);
        self.budget.charge(TREE_ENTRY, 0)?;
        self.segments.insert(addr, Segment { size, live: 0 });
        self.idle += 1;
        Ok(())
    }

    fn forget(&mut self, addr: i64) {
        if let Some(old) = self.segments.remove(&addr) {
            self.budget.release(TREE_ENTRY);
            self.idle -= usize::from(old.live == 0);
        }
    }

    fn give_back(&mut self, e: &Event) {
        let before = self.reserved;
        self.reserved -= i128::from(e.size);
        if e.action == Word::SegmentFree {
            self.forget(e.addr);
        }
        let now = self.requests.len();
        let idle = self.idle > 0;
        let run = self.run.get_or_insert(Run {
            at: now,
            before,
            after: 0,
            grown: 0,
            idle,
            mixed: false,
            stack: Stack::Unknown,
        });
        run.mixed |= run.at != now || run.grown > 0;
        (run.at, run.after, run.idle) = (now, self.reserved, idle);
        if e.stack == Stack::EmptyCache || run.stack == Stack::Unknown {
            run.stack = e.stack;
        }
    }

    /// Decides what the last run of segments given back was, given that the next event is an
    /// allocation or not.
    fn decide(&mut self, allocation: bool) -> Result<(), Problem> {
        let Some(run) = self.run.take() else { return Ok(()) };
        let retry = allocation && run.grown > 0;
        let plain = !run.mixed && !run.idle;
        let emptied = match run.stack {
            Stack::EmptyCache => true,
            Stack::Other => false,
            Stack::Unknown if retry => {
                plain && !self.collects && run.before + run.grown <= self.most
            }
            Stack::Unknown => plain,
        };
        if emptied {
            self.emptied += 1;
            // Only frees came since, and each request is moved once.
            self.budget.reserve(&mut self.requests, 1)?;
            self.requests.insert(run.at, Request::EmptyCache);
            self.budget.reserve(&mut self.expected, 1)?;
            self.expected.insert(run.at, u64::try_from(run.after).unwrap_or(0));
        } else if retry
            && (run.stack == Stack::Other
                || self.capacity.is_some_and(|c| run.before + run.grown > c))
        {
            self.retried += 1;
        } else {
            self.unclear += 1;
        }
        Ok(())
    }

    fn notes(&self, notes: &mut Vec<String>, failed: &[u32]) {
        let mut note = |n: u64, what: &str| {
            if n > 0 {
                notes.push(format!("{what}: {n}."));
            }
        };
        note(self.emptied, "Calls of torch.cuda.empty_cache");
        note(
            self.retried,
            "Allocations that gave back cached segments to succeed when they were recorded",
        );
        note(
            self.unclear,
            "Times that segments were given back by an allocation tried again or by empty_cache (the snapshot doesn't say which, the first was taken; record with stacks to know)",
        );
        note(
            self.renewed,
            "Blocks allocated again without a free in the trace (they are freed just before)",
        );
        note(
            failed.len() as u64,
            "Allocations that failed when they were recorded (each is asked for and given back at once)",
        );
    }
}
