//! Turns one device's events of a decoded snapshot into requests: first the blocks that were live
//! before the recording, then the events in order.
//!
//! A snapshot records allocations with their requested bytes, when a free was requested and when it
//! completed (later, if another stream still used the block), and the segments taken and given
//! back. Only `free_completed` counts as a free: a replay could not predict when it came.
//!
//! `torch.cuda.empty_cache` itself leaves no event, only the segments that it gives back. But an
//! allocation that fails and is tried again gives segments back too. What it was, [`super::guide`]
//! finds by asking the allocator. Where that explains nothing, because the recording began late or
//! the allocator did what its rules don't say, a run of segments given back becomes
//! [`Request::EmptyCache`] in these cases:
//!
//! - A stack was recorded with it and contains `empty_cache` of `torch/cuda/memory.py`.
//! - No stacks were recorded, the run leaves no segment idle, and the next event can't be the rest
//!   of an allocation that took a new segment or failed.
//! - As before, but an allocation with new segments follows, and it can't have been short of
//!   memory: at another time PyTorch held as much as it would have held without the run. Besides,
//!   neither `max_split_size_mb` nor garbage collection is set, which also give back segments.

use std::collections::{BTreeMap, HashMap};

use super::guide::{self, Mark, Reading};
use super::lines::{AllocatedAt, Lines};
use super::past::{GONE, Past, event, past};
use super::source::Budget;
use super::value::{Event, Pickle, Stack, Value};
use super::words::Word;
use super::{Problem, Settings, Snapshot};
use crate::requests::Request;
use crate::units::Bytes;

/// Bytes counted for an entry of a tree, its share of half-empty nodes included.
const TREE_ENTRY: u64 = 96;

/// A segment of fixed size and how many live blocks it has.
struct Segment {
    size: i64,
    live: u32,
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
    past: &'a Past,
    requests: Vec<Request>,
    expected: Vec<u64>,
    ids: HashMap<i64, u32>,
    next: u32,
    /// Of each id, where lines are wanted.
    lines: Option<AllocatedAt>,
    /// The line of the present event.
    line: Option<u32>,
    segments: BTreeMap<i64, Segment>,
    /// How many of `segments` have no live block.
    idle: usize,
    reserved: i128,
    most: i128,
    capacity: Option<i128>,
    run: Option<Run>,
    /// Blocks whose frees completed while the next allocation waited for other streams.
    later: Vec<i64>,
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
    let reading = guide::read(pickle, events, &past, &settings, budget)?;
    let ids = std::mem::take(&mut past.ids);
    let mut builder = Builder {
        budget,
        past: &past,
        requests: Vec::new(),
        expected: Vec::new(),
        ids,
        next: 0,
        lines: pickle.lines.as_ref().map(Lines::texts),
        line: None,
        segments: BTreeMap::new(),
        idle: 0,
        reserved: past.reserved,
        most: past.most,
        capacity: past.capacity,
        run: None,
        later: Vec::new(),
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
        let stream = past.stream_at(0, block.addr, block.stream, true);
        builder.allocate(block.addr, block.size, stream)?;
    }
    let at_start = builder.requests.len();
    let mut failed = Vec::new();
    builder.all(pickle, events, &reading, &mut failed)?;
    builder.decide(false)?;
    let mut notes = past.notes.clone();
    builder.notes(&mut notes, &failed);
    notes.extend(unexplained(&reading, events.len()));
    if at_start > 0 || past.reserved > 0 {
        notes.push(format!(
            "When the recording began, {at_start} blocks were live in {} of segments; they are allocated first, in address order, so what is held may differ from what was: record from the job's start for an exact replay.",
            Bytes(u64::try_from(past.reserved).unwrap_or(0))
        ));
    }
    if past.reserved < 0 {
        notes.push("The trace takes more segments than stand at the snapshot; what PyTorch held is not known.".to_owned());
    }
    if past.has_pools() {
        notes.push(
            "Some segments are of private pools (CUDA graphs or MemPool): as far as the file names them they are replayed apart from the common pool.".to_owned(),
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
        streams: past.streams.clone(),
        failed,
        limit: reading.limit.filter(|_| reading.until == events.len()),
        capacity: past.capacity.and_then(|c| u64::try_from(c).ok()).map(Bytes),
        settings,
        notes,
        lines: builder.lines.unwrap_or_default(),
    })
}

/// What to say of a trace that the allocator's rules explain in part only.
fn unexplained(reading: &Reading, events: usize) -> Option<String> {
    if reading.limit.is_none() || reading.until >= events {
        return None;
    }
    let at = reading.stopped;
    Some(if reading.needless {
        format!(
            "Event {at} of the trace took new memory although a cached block would have done: perhaps for a private pool (CUDA graph or MemPool) that is gone, which a snapshot does not name. From there on all is replayed as the common pool, so what is held may differ from what was."
        )
    } else {
        format!(
            "From event {at} on, the trace is not what PyTorch's allocator does with these settings; what is held may differ from what was."
        )
    })
}

impl Builder<'_> {
    /// Turns all events into requests.
    fn all(
        &mut self,
        pickle: &Pickle,
        events: &[Value],
        reading: &Reading,
        failed: &mut Vec<u32>,
    ) -> Result<(), Problem> {
        let mut marks = reading.marks.iter().peekable();
        for at in 0..events.len() {
            let Some(e) = event(pickle, events, at)? else { continue };
            self.line = pickle.lines.as_ref().and_then(|lines| lines.line(events[at]));
            if at >= reading.until {
                self.apply(at, &e, failed)?;
                continue;
            }
            let (mut emptied, mut later, mut then) = (false, false, None);
            while let Some((_, mark)) = marks.next_if(|(of, _)| *of == at) {
                match *mark {
                    Mark::Emptied => emptied = true,
                    Mark::Later => later = true,
                    Mark::EmptiedThen(held) => then = Some(held),
                }
            }
            if later {
                self.budget.push(&mut self.later, e.addr)?;
            } else {
                self.follow(at, &e, then, failed)?;
            }
            if emptied {
                self.empty()?;
            }
        }
        Ok(())
    }

    /// Turns an event into requests.
    fn apply(&mut self, at: usize, e: &Event, failed: &mut Vec<u32>) -> Result<(), Problem> {
        match e.action {
            Word::Alloc => {
                self.decide(true)?;
                self.allocate(e.addr, e.size as u64, self.past.stream_of(at, e))
            }
            Word::FreeRequested => {
                self.decide(false)?;
                if self.past.by_request { self.free(e.addr) } else { Ok(()) }
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
                self.fail(e.size as u64, self.past.stream_of(at, e))
            }
            _ => self.decide(false),
        }
    }

    /// Turns an event into requests whose reading is known. After an allocation come the frees that
    /// completed while it waited; with `then`, its answer was given with that many bytes held, and
    /// cached memory went back.
    fn follow(
        &mut self,
        at: usize,
        e: &Event,
        then: Option<u64>,
        failed: &mut Vec<u32>,
    ) -> Result<(), Problem> {
        match e.action {
            Word::SegmentFree | Word::SegmentUnmap => {
                self.reserved -= i128::from(e.size);
                if e.action == Word::SegmentFree {
                    self.forget(e.addr);
                }
                return Ok(());
            }
            Word::Alloc | Word::Oom => {}
            _ => return self.apply(at, e, failed),
        }
        let now = self.reserved;
        self.reserved = then.map_or(now, i128::from);
        self.apply(at, e, failed)?;
        for addr in std::mem::take(&mut self.later) {
            self.free(addr)?;
        }
        self.reserved = now;
        if then.is_some() {
            self.empty()?;
            self.emptied -= 1;
        }
        Ok(())
    }

    /// Here the cache was emptied.
    fn empty(&mut self) -> Result<(), Problem> {
        self.emptied += 1;
        self.request(Request::EmptyCache)
    }

    fn request(&mut self, request: Request) -> Result<(), Problem> {
        self.budget.push(&mut self.requests, request)?;
        let held = u64::try_from(self.reserved).unwrap_or(0);
        self.budget.push(&mut self.expected, held)
    }

    fn id(&mut self) -> Result<u32, Problem> {
        let id = self.next;
        if let Some(lines) = &mut self.lines {
            lines.push(self.line, self.budget)?;
        }
        if id == GONE {
            return Err(Problem::Contradiction(
                "the trace has more than 2^32 allocations; record fewer".to_owned(),
            ));
        }
        self.next += 1;
        Ok(id)
    }

    fn allocate(&mut self, addr: i64, size: u64, stream: u32) -> Result<(), Problem> {
        if self.ids.get(&addr).is_some_and(|id| *id != GONE) {
            self.renewed += 1;
            self.free(addr)?;
        }
        let id = self.id()?;
        self.request(Request::Allocate { id, bytes: Bytes(size), stream })?;
        // The first pass inserted every address, so the table never grows.
        self.ids.insert(addr, id);
        self.count(addr, true);
        Ok(())
    }

    /// Adds an allocation that failed when it was recorded, and its free, so that a replay in which
    /// it succeeds doesn't keep it.
    fn fail(&mut self, size: u64, stream: u32) -> Result<(), Problem> {
        let id = self.id()?;
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
