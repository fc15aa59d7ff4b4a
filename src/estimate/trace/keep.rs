//! Turns [`Event`]s into a [`Trace`] within a limit: records, interned texts, and counts of what
//! was left out.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};

use super::event::{Category, Event, MEMORY, MODULE};
use super::intern::{Interner, unescape};
use super::number::{address, nanos, whole};
use super::read::Limits;
use super::{Args, LARGEST_BLOCK, Mark, Measured, Memory, Module, Op, Text, Thread, Trace};
use crate::units::{Bytes, Nanos, id32};

/// The most begin events (`B`) that wait for their end event (`E`).
const OPEN: usize = 10_000;

/// The most devices of which memory is counted.
const DEVICES: usize = 4096;

/// An event that has begun: its record, or that it is not kept.
#[derive(Clone, Copy)]
enum Record {
    Op(Op),
    Mark(Mark),
    Module(Module),
    Nothing,
}

/// The records so far. Until [`Keeper::finish`], times are nanoseconds biased by 2^63, so that they
/// sort as unsigned numbers.
pub(super) struct Keeper {
    limits: Limits,
    names: Interner,
    args: Vec<Args>,
    args_ids: HashMap<Args, u32>,
    threads: Interner,
    /// The process and thread of the last event; the next event mostly has the same.
    last_thread: (Vec<u8>, Thread),
    ops: Vec<Op>,
    memory: Vec<Memory>,
    marks: Vec<Mark>,
    modules: Vec<Module>,
    /// Open events by thread; no list is empty.
    open: BTreeMap<Thread, Vec<Record>>,
    opened: usize,
    /// Records that begin at this time or later are not kept.
    until: u64,
    latest: u64,
    /// Number of events with a `ph` field.
    pub events: u64,
    left_out: u64,
    unreadable: u64,
    /// Offset of the first unreadable event.
    unreadable_at: u64,
    unpaired: u64,
    has_memory: bool,
    /// By kind and number of a device that is not the host.
    measured: BTreeMap<(i64, i64), Measured>,
}

impl Keeper {
    pub fn new(limits: &Limits) -> Self {
        Self {
            limits: *limits,
            names: Interner::default(),
            args: Vec::new(),
            args_ids: HashMap::new(),
            threads: Interner::default(),
            last_thread: (Vec::new(), Thread(0)),
            ops: Vec::new(),
            memory: Vec::new(),
            marks: Vec::new(),
            modules: Vec::new(),
            open: BTreeMap::new(),
            opened: 0,
            until: u64::MAX,
            latest: 0,
            events: 0,
            left_out: 0,
            unreadable: 0,
            unreadable_at: 0,
            unpaired: 0,
            has_memory: false,
            measured: BTreeMap::new(),
        }
    }

    /// Records `event`, which is at `offset`. The error names the limit that is exceeded, and the
    /// remedy.
    pub fn add(&mut self, event: &Event<'_>, offset: u64) -> Result<(), String> {
        self.events += u64::from(event.phase != 0);
        match event.phase {
            b'X' | b'B' => self.spanning(event, offset),
            b'E' => self.ended(event, offset),
            b'i' | b'I' if event.name == MEMORY => self.memory_event(event, offset),
            _ => Ok(()),
        }
    }

    /// Whether there was any memory event, kept or not.
    pub const fn has_memory(&self) -> bool {
        self.has_memory
    }

    fn spanning(&mut self, event: &Event<'_>, offset: u64) -> Result<(), String> {
        let begun = event.phase == b'B';
        let wanted = match event.category {
            Category::Operator | Category::Annotation => true,
            Category::Python => event.name.starts_with(MODULE),
            Category::Other => false,
        };
        if !wanted {
            return if begun { self.begin(event, Record::Nothing) } else { Ok(()) };
        }
        let Some(start) = nanos(event.time).map(biased) else {
            self.unreadable(offset);
            return if begun { self.begin(event, Record::Nothing) } else { Ok(()) };
        };
        let duration = nanos(event.duration).map_or(0, |d| u64::try_from(d).unwrap_or(0));
        let end = start.saturating_add(duration);
        self.latest = self.latest.max(end);
        if start >= self.until {
            self.left_out += 1;
            return if begun { self.begin(event, Record::Nothing) } else { Ok(()) };
        }
        let thread = self.thread(event)?;
        let record = match event.category {
            Category::Python => Record::Module(Module {
                start,
                end,
                name: self.name(&event.name[MODULE.len()..])?,
                thread,
            }),
            Category::Operator if !is_mark(event.name) => {
                let (name, args) = (self.name(event.name)?, self.arguments(event.inputs)?);
                Record::Op(Op {
                    start,
                    end,
                    name,
                    thread,
                    args,
                    sequence: whole(event.sequence).unwrap_or(-1),
                })
            }
            _ => Record::Mark(Mark { start, end, name: self.name(event.name)?, thread }),
        };
        if begun { self.begin(event, record) } else { self.push(record) }
    }

    fn memory_event(&mut self, event: &Event<'_>, offset: u64) -> Result<(), String> {
        let (Some(time), Some(address), Some(bytes)) =
            (nanos(event.time).map(biased), address(event.address), whole(event.bytes))
        else {
            self.unreadable(offset);
            return Ok(());
        };
        if bytes.unsigned_abs() > LARGEST_BLOCK {
            return Err(format!(
                "a block of {bytes} bytes, and none is larger than {}: record the trace again",
                Bytes(LARGEST_BLOCK)
            ));
        }
        self.has_memory = true;
        let host = event.device_type.is_empty() || whole(event.device_type) == Some(0);
        if !host {
            self.measure(event)?;
        }
        self.latest = self.latest.max(time);
        if time >= self.until {
            self.left_out += 1;
            return Ok(());
        }
        let thread = self.thread(event)?;
        grow(&mut self.memory);
        self.memory.push(Memory { time, address, bytes, thread, host });
        self.within_limit()
    }

    /// Takes the totals of an event of a GPU's memory as they were recorded.
    fn measure(&mut self, event: &Event<'_>) -> Result<(), String> {
        let kind = whole(event.device_type).unwrap_or(-1);
        let device = whole(event.device).unwrap_or(0);
        if self.measured.len() == DEVICES && !self.measured.contains_key(&(kind, device)) {
            return Err(format!("memory events of more than {DEVICES} devices"));
        }
        let total = |text| whole(text).and_then(|n| u64::try_from(n).ok()).map(Bytes);
        let one = self.measured.entry((kind, device)).or_default();
        (one.kind, one.device) = (kind, device);
        one.events += 1;
        one.allocated = one.allocated.max(total(event.total_allocated));
        one.reserved = one.reserved.max(total(event.total_reserved));
        Ok(())
    }

    fn begin(&mut self, event: &Event<'_>, record: Record) -> Result<(), String> {
        if self.opened == OPEN {
            return Err(format!(
                "more than {OPEN} events begin (\"B\") and don't end (\"E\"): record the trace again"
            ));
        }
        let thread = self.thread(event)?;
        self.open.entry(thread).or_default().push(record);
        self.opened += 1;
        Ok(())
    }

    fn ended(&mut self, event: &Event<'_>, offset: u64) -> Result<(), String> {
        let thread = self.thread(event)?;
        let Some(stack) = self.open.get_mut(&thread) else { return Ok(()) };
        let record = stack.pop().unwrap_or(Record::Nothing);
        if stack.is_empty() {
            self.open.remove(&thread);
        }
        self.opened -= 1;
        let Some(time) = nanos(event.time).map(biased) else {
            self.unreadable(offset);
            return Ok(());
        };
        self.latest = self.latest.max(time);
        self.close(record, time)
    }

    fn close(&mut self, mut record: Record, time: u64) -> Result<(), String> {
        match &mut record {
            Record::Op(Op { end, .. })
            | Record::Mark(Mark { end, .. })
            | Record::Module(Module { end, .. }) => *end = time.max(*end),
            Record::Nothing => return Ok(()),
        }
        self.push(record)
    }

    fn push(&mut self, record: Record) -> Result<(), String> {
        match record {
            Record::Op(op) => {
                grow(&mut self.ops);
                self.ops.push(op);
            }
            Record::Mark(mark) => {
                grow(&mut self.marks);
                self.marks.push(mark);
            }
            Record::Module(module) => {
                grow(&mut self.modules);
                self.modules.push(module);
            }
            Record::Nothing => {}
        }
        self.within_limit()
    }

    const fn unreadable(&mut self, offset: u64) {
        if self.unreadable == 0 {
            self.unreadable_at = offset;
        }
        self.unreadable += 1;
    }

    fn thread(&mut self, event: &Event<'_>) -> Result<Thread, String> {
        let (known, thread) = &mut self.last_thread;
        let (process, rest) = known.split_at(event.process.len().min(known.len()));
        if process == event.process
            && rest.split_first().is_some_and(|(zero, last)| *zero == 0 && last == event.thread)
        {
            return Ok(*thread);
        }
        known.clear();
        known.extend_from_slice(event.process);
        known.push(0);
        known.extend_from_slice(event.thread);
        let id = self.threads.id(known);
        *thread = Thread(
            u16::try_from(id)
                .map_err(|_| "more than 65,536 threads: record the trace again".to_owned())?,
        );
        let thread = *thread;
        self.texts_within_limit()?;
        Ok(thread)
    }

    fn name(&mut self, raw: &[u8]) -> Result<Text, String> {
        let id = self.names.id(&unescape(raw));
        self.texts_within_limit()?;
        Ok(Text(id))
    }

    fn arguments(&mut self, inputs: [Option<&[u8]>; 4]) -> Result<u32, String> {
        let [dims, strides, types, concrete] =
            inputs.map(|raw| raw.map(|raw| Text(self.names.id(raw))));
        let args = Args { dims, strides, types, concrete };
        let id = match self.args_ids.get(&args) {
            Some(id) => *id,
            None => {
                let id = id32(self.args.len());
                self.args.push(args);
                self.args_ids.insert(args, id);
                id
            }
        };
        self.texts_within_limit()?;
        Ok(id)
    }

    fn texts_within_limit(&self) -> Result<(), String> {
        // The argument lists and their places in the table, while both double.
        let lists = self.args.len() as u64 * (size_of::<Args>() as u64 * 8);
        if self.names.bytes + self.threads.bytes + lists <= self.limits.texts_bytes {
            return Ok(());
        }
        Err(format!(
            "the names and arguments of the events up to here take more than {}, which is unlike a training job: record fewer iterations",
            Bytes(self.limits.texts_bytes)
        ))
    }

    fn records_bytes(&self) -> u64 {
        (self.ops.len() * size_of::<Op>()
            + self.memory.len() * size_of::<Memory>()
            + self.marks.len() * size_of::<Mark>()
            + self.modules.len() * size_of::<Module>()) as u64
    }

    /// Drops the latest records when there are too many: those from the start of the latest
    /// iteration before which the records take at most half the limit.
    fn within_limit(&mut self) -> Result<(), String> {
        if self.records_bytes() <= self.limits.records_bytes {
            return Ok(());
        }
        let target = self.limits.records_bytes / 2;
        let (mut low, mut high) = (0, self.until);
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            if self.bytes_before(middle) <= target { low = middle } else { high = middle - 1 }
        }
        let steps = self
            .marks
            .iter()
            .filter(|m| self.names.texts[m.name.0 as usize].starts_with(STEP))
            .map(|m| m.start);
        let until = steps.filter(|t| *t <= low && self.bytes_before(*t) > 0).max().unwrap_or(low);
        if self.bytes_before(until) == 0 {
            return Err(format!(
                "more events at one instant than {} of records hold: record the trace again",
                Bytes(self.limits.records_bytes)
            ));
        }
        let before = self.ops.len() + self.memory.len() + self.marks.len() + self.modules.len();
        self.ops.retain(|o| o.start < until);
        self.memory.retain(|m| m.time < until);
        self.marks.retain(|m| m.start < until);
        self.modules.retain(|m| m.start < until);
        let after = self.ops.len() + self.memory.len() + self.marks.len() + self.modules.len();
        self.left_out += (before - after) as u64;
        self.until = until;
        Ok(())
    }

    fn bytes_before(&self, until: u64) -> u64 {
        (self.ops.iter().filter(|o| o.start < until).count() * size_of::<Op>()
            + self.memory.iter().filter(|m| m.time < until).count() * size_of::<Memory>()
            + self.marks.iter().filter(|m| m.start < until).count() * size_of::<Mark>()
            + self.modules.iter().filter(|m| m.start < until).count() * size_of::<Module>())
            as u64
    }

    /// Sorts the records, and counts times from the first one.
    pub fn finish(mut self, mut notes: Vec<String>, bytes: Bytes) -> Result<Trace, String> {
        for record in std::mem::take(&mut self.open).into_values().flatten() {
            self.unpaired += u64::from(!matches!(record, Record::Nothing));
            self.close(record, self.latest)?;
        }
        if self.memory.is_empty() {
            return Err(format!(
                "the first memory event comes after more events than {} of records hold: record the trace again",
                Bytes(self.limits.records_bytes)
            ));
        }
        let Self { mut ops, mut memory, mut marks, mut modules, until, latest, .. } = self;
        let starts = ops.iter().map(|o| o.start).chain(memory.iter().map(|m| m.time));
        let base = starts
            .chain(marks.iter().map(|m| m.start))
            .chain(modules.iter().map(|m| m.start))
            .min()
            .unwrap_or(0);
        ops.iter_mut().for_each(|o| (o.start, o.end) = (o.start - base, o.end - base));
        memory.iter_mut().for_each(|m| m.time -= base);
        marks.iter_mut().for_each(|m| (m.start, m.end) = (m.start - base, m.end - base));
        modules.iter_mut().for_each(|m| (m.start, m.end) = (m.start - base, m.end - base));
        sort(&mut ops, |o| (o.start, Reverse(o.end)));
        sort(&mut memory, |m| m.time);
        sort(&mut marks, |m| (m.start, Reverse(m.end)));
        sort(&mut modules, |m| (m.start, Reverse(m.end)));
        if self.left_out > 0 {
            notes.push(format!(
                "The trace has more events than {} of records hold: {} events that begin {} or more after its start were left out (it lasts {}).",
                Bytes(self.limits.records_bytes),
                self.left_out,
                Nanos(until.saturating_sub(base)),
                Nanos(latest - base)
            ));
        }
        if self.unreadable > 0 {
            notes.push(format!(
                "Events without a readable time, address or size were left out: {}, the first at byte {}.",
                self.unreadable, self.unreadable_at
            ));
        }
        if self.unpaired > 0 {
            notes.push(format!(
                "Events that begin and don't end were taken to last to the end of the trace: {}.",
                self.unpaired
            ));
        }
        Ok(Trace {
            texts: self.names.texts,
            args: self.args,
            ops,
            memory,
            marks,
            modules,
            measured: self.measured.into_values().collect(),
            notes,
            bytes,
        })
    }
}

/// The prefix of an iteration's mark.
const STEP: &str = "ProfilerStep#";

/// Whether an operator's name is that of a mark: before PyTorch 1.11 both had the same category.
fn is_mark(name: &[u8]) -> bool {
    name.starts_with(STEP.as_bytes()) || name.starts_with(b"Optimizer.")
}

const fn biased(ns: i64) -> u64 {
    ns.cast_unsigned() ^ 1 << 63
}

/// Reserves room for one more, growing by an eighth: doubling could exceed the memory limit by as
/// much again.
fn grow<T>(list: &mut Vec<T>) {
    if list.len() == list.capacity() {
        list.reserve_exact((list.len() / 8).max(1024));
    }
}

/// Sorts stably by key. A list that is sorted already, as PyTorch writes them, takes no memory.
fn sort<T, K: Ord>(list: &mut Vec<T>, key: impl Fn(&T) -> K) {
    if !list.is_sorted_by_key(&key) {
        list.sort_by_key(key);
    }
    list.shrink_to_fit();
}
