//! Requests written as a PyTorch memory snapshot, as `torch.cuda.memory._dump_snapshot` writes one.
//!
//! The requests are replayed through the allocator, so the file has what a recording of the same
//! job has: every allocation and free with its stack, every segment taken and given back, and the
//! final segments and blocks. PyTorch's viewer (`memory_viz`), `torch.cuda._memory_viz` and
//! [`super::read`] open it. Addresses are those of the simulated device.

use std::collections::HashMap;
use std::io::{self, Write};

use crate::allocator::replay::{LARGEST_DEVICE, Replay};
use crate::allocator::{BlockView, Change, Config, SegmentChange, SegmentView, State};
use crate::requests::Request;
use crate::units::{Bytes, Nanos, id32};

/// One line of a stack.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Frame {
    /// The source file, or a text in its place.
    pub filename: String,
    /// The function, or a text in its place.
    pub name: String,
    /// The line in the file, from 1; 0 if there is none.
    pub line: u32,
}

/// The number of a stack in [`Stacks`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct StackId(u32);

/// The stacks of a snapshot, each kept once. [`StackId::default`] is the empty stack.
#[derive(Clone, Debug)]
pub struct Stacks {
    frames: Vec<Frame>,
    known_frames: HashMap<Frame, u32>,
    stacks: Vec<Vec<u32>>,
    known_stacks: HashMap<Vec<u32>, u32>,
}

impl Default for Stacks {
    fn default() -> Self {
        Self {
            frames: Vec::new(),
            known_frames: HashMap::new(),
            stacks: vec![Vec::new()],
            known_stacks: HashMap::from([(Vec::new(), 0)]),
        }
    }
}

impl Stacks {
    /// Adds a stack, or finds it. The innermost frame comes first, as PyTorch lists them.
    pub fn add(&mut self, frames: impl IntoIterator<Item = Frame>) -> StackId {
        let mut stack = Vec::new();
        for frame in frames {
            let new = id32(self.frames.len());
            let id = *self.known_frames.entry(frame).or_insert_with_key(|frame| {
                self.frames.push(frame.clone());
                new
            });
            stack.push(id);
        }
        let new = id32(self.stacks.len());
        StackId(*self.known_stacks.entry(stack).or_insert_with_key(|stack| {
            self.stacks.push(stack.clone());
            new
        }))
    }
}

/// A request as the recording contains it.
#[derive(Clone, Copy, Debug)]
pub struct Event<'a> {
    /// The request.
    pub request: Request,
    /// Time since the recording's start.
    pub time: Nanos,
    /// The call stack of the request.
    pub stack: StackId,
    /// What an allocated block is for; PyTorch's viewer colours blocks by it. `None` if not known.
    pub category: Option<&'a str>,
}

/// The allocator and the device that answer the requests.
#[derive(Clone, Copy, Debug)]
pub struct Target<'a> {
    /// The allocator's settings.
    pub config: &'a Config,
    /// The same settings as a text in the form of `PYTORCH_CUDA_ALLOC_CONF`.
    pub alloc_conf: &'a str,
    /// The device's memory; [`LARGEST_DEVICE`] for one that is never full.
    pub capacity: Bytes,
}

impl<'a> Target<'a> {
    /// A device that is never full.
    #[must_use]
    pub const fn unlimited(config: &'a Config, alloc_conf: &'a str) -> Self {
        Self { config, alloc_conf, capacity: LARGEST_DEVICE }
    }
}

/// Writes the snapshot of device 0 after `events`, in protocol 4 of Python's pickle.
///
/// # Errors
/// When `out` fails.
pub fn write<'a>(
    out: &mut dyn Write,
    target: &Target<'_>,
    stacks: &Stacks,
    events: impl IntoIterator<Item = Event<'a>>,
) -> io::Result<()> {
    let mut pen = Pen { out, memo: 0, texts: HashMap::new(), stacks, written: HashMap::new() };
    pen.op(&[0x80, 4, b'}', b'('])?;
    pen.text("device_traces")?;
    // A list of devices, with the list of the events of device 0.
    pen.op(b"](]")?;
    let mut trace = Trace {
        pen,
        replay: Replay::new(target.config, target.capacity, None),
        live: HashMap::new(),
        entries: 0,
    };
    trace.replay.record();
    for event in events {
        trace.event(&event)?;
    }
    let Trace { mut pen, replay, live, entries } = trace;
    if entries % BATCH != 0 {
        pen.op(b"e")?;
    }
    pen.op(b"e")?;
    pen.text("segments")?;
    pen.op(b"](")?;
    for segment in replay.allocator().segments() {
        for part in segment.blocks.split(|b| b.state == State::Unmapped).filter(|p| !p.is_empty()) {
            pen.segment(&segment, part, &live)?;
        }
    }
    pen.op(b"e")?;
    pen.settings(target)?;
    pen.text("external_annotations")?;
    pen.op(b"]u.")
}

/// How many elements of a list are appended at once; Python's own pickler uses the same number.
const BATCH: usize = 1000;

/// The category of a block without one.
const UNKNOWN: &str = "unknown";

/// File and function of the frame that marks segments given back by `torch.cuda.empty_cache`.
const EMPTY_CACHE: (&str, &str) = ("torch/cuda/memory.py", "empty_cache");

/// A block in use.
#[derive(Clone, Copy)]
struct Live {
    stack: StackId,
    stream: u32,
}

/// The events of a device, while they are written.
struct Trace<'a> {
    pen: Pen<'a>,
    replay: Replay,
    /// Blocks in use, by address.
    live: HashMap<u64, Live>,
    /// How many events were written.
    entries: usize,
}

impl Trace<'_> {
    fn event(&mut self, event: &Event<'_>) -> io::Result<()> {
        let freed = match event.request {
            Request::Free { id } => self.replay.block(id),
            _ => None,
        };
        let served = self.replay.step(event.request);
        for change in self.replay.take_changes() {
            self.change(&change, event)?;
        }
        match event.request {
            Request::Allocate { bytes, stream, .. } if !served => {
                let device = self.replay.allocator().device();
                let free = device.capacity().saturating_sub(device.used());
                self.entry("oom", free.0, bytes, stream, event, None)
            }
            Request::Allocate { id, bytes, stream } => {
                let Some(block) = self.replay.block(id) else { return Ok(()) };
                self.live.insert(block.address, Live { stack: event.stack, stream });
                let category = Some(event.category.unwrap_or(UNKNOWN));
                self.entry("alloc", block.address, bytes, stream, event, category)
            }
            Request::Free { .. } => {
                let Some(block) = freed else { return Ok(()) };
                let stream = self.live.remove(&block.address).map_or(0, |l| l.stream);
                for action in ["free_requested", "free_completed"] {
                    self.entry(action, block.address, block.requested, stream, event, None)?;
                }
                Ok(())
            }
            Request::EmptyCache => Ok(()),
        }
    }

    fn change(&mut self, change: &SegmentChange, event: &Event<'_>) -> io::Result<()> {
        let action = match change.change {
            Change::Taken => "segment_alloc",
            Change::GivenBack => "segment_free",
            Change::Mapped => "segment_map",
            Change::Unmapped => "segment_unmap",
        };
        // PyTorch's viewer fails on an event without a category when others have one, so segments
        // get `unknown`.
        let category = event.category.map(|_| UNKNOWN);
        self.entry(action, change.address, change.bytes, change.stream, event, category)
    }

    fn entry(
        &mut self,
        action: &str,
        address: u64,
        bytes: Bytes,
        stream: u32,
        event: &Event<'_>,
        category: Option<&str>,
    ) -> io::Result<()> {
        let pen = &mut self.pen;
        if self.entries.is_multiple_of(BATCH) {
            pen.op(b"(")?;
        }
        pen.op(b"}(")?;
        pen.pair("action", action)?;
        pen.number(if action == "oom" { "device_free" } else { "addr" }, address)?;
        pen.number("size", bytes.0)?;
        pen.number("stream", u64::from(stream))?;
        pen.number("time_us", event.time.0 / 1000)?;
        if let Some(category) = category {
            pen.pair("category", category)?;
        }
        pen.text("frames")?;
        pen.stack(event.stack, event.request == Request::EmptyCache)?;
        pen.op(b"u")?;
        self.entries += 1;
        if self.entries.is_multiple_of(BATCH) { pen.op(b"e") } else { Ok(()) }
    }
}

/// Writes opcodes. Values that occur again are memoised when they first occur.
struct Pen<'a> {
    out: &'a mut dyn Write,
    /// Number of memo entries.
    memo: u32,
    texts: HashMap<String, u32>,
    stacks: &'a Stacks,
    /// Memo entries of stacks and frames.
    written: HashMap<Kept, u32>,
}

/// A memoised value that is not a text.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Kept {
    Frame(u32),
    Stack(StackId, bool),
    EmptyCache,
}

impl Pen<'_> {
    fn op(&mut self, codes: &[u8]) -> io::Result<()> {
        self.out.write_all(codes)
    }

    /// Memoises what was just written.
    fn memoise(&mut self) -> io::Result<u32> {
        self.op(&[0x94])?;
        self.memo += 1;
        Ok(self.memo - 1)
    }

    fn recall(&mut self, memo: u32) -> io::Result<()> {
        match u8::try_from(memo) {
            Ok(short) => self.op(&[b'h', short]),
            Err(_) => {
                self.op(b"j")?;
                self.op(&memo.to_le_bytes())
            }
        }
    }

    fn text(&mut self, text: &str) -> io::Result<()> {
        if let Some(&memo) = self.texts.get(text) {
            return self.recall(memo);
        }
        match u8::try_from(text.len()) {
            Ok(short) => self.op(&[0x8c, short])?,
            Err(_) => {
                // Names of operators and files are far below 4 GiB.
                let length = u32::try_from(text.len()).map_err(io::Error::other)?;
                self.op(b"X")?;
                self.op(&length.to_le_bytes())?;
            }
        }
        self.op(text.as_bytes())?;
        let memo = self.memoise()?;
        self.texts.insert(text.to_owned(), memo);
        Ok(())
    }

    fn int(&mut self, number: i64) -> io::Result<()> {
        match (u8::try_from(number), i32::try_from(number)) {
            (Ok(byte), _) => self.op(&[b'K', byte]),
            (_, Ok(word)) => {
                self.op(b"J")?;
                self.op(&word.to_le_bytes())
            }
            _ => {
                self.op(&[0x8a, 8])?;
                self.op(&number.to_le_bytes())
            }
        }
    }

    /// Writes a number under a key. Sizes and addresses are below 2^63.
    fn number(&mut self, key: &str, number: u64) -> io::Result<()> {
        self.text(key)?;
        self.int(i64::try_from(number).unwrap_or(i64::MAX))
    }

    fn pair(&mut self, key: &str, text: &str) -> io::Result<()> {
        self.text(key)?;
        self.text(text)
    }

    fn truth(&mut self, key: &str, value: bool) -> io::Result<()> {
        self.text(key)?;
        self.op(&[if value { 0x88 } else { 0x89 }])
    }

    /// Writes a value the first time, and recalls it from then on.
    fn once(
        &mut self,
        what: Kept,
        write: impl FnOnce(&mut Self) -> io::Result<()>,
    ) -> io::Result<()> {
        if let Some(&memo) = self.written.get(&what) {
            return self.recall(memo);
        }
        write(self)?;
        let memo = self.memoise()?;
        self.written.insert(what, memo);
        Ok(())
    }

    fn frame(&mut self, filename: &str, name: &str, line: u32) -> io::Result<()> {
        self.op(b"}(")?;
        self.pair("name", name)?;
        self.pair("filename", filename)?;
        self.number("line", u64::from(line))?;
        self.op(b"u")
    }

    /// Writes a list of frames. If `emptied`, the frame of `torch.cuda.empty_cache` is added.
    fn stack(&mut self, stack: StackId, emptied: bool) -> io::Result<()> {
        let stacks = self.stacks;
        self.once(Kept::Stack(stack, emptied), |pen| {
            pen.op(b"](")?;
            if emptied {
                let (filename, name) = EMPTY_CACHE;
                pen.once(Kept::EmptyCache, |pen| pen.frame(filename, name, 0))?;
            }
            for &id in &stacks.stacks[stack.0 as usize] {
                let frame = &stacks.frames[id as usize];
                pen.once(Kept::Frame(id), |pen| {
                    pen.frame(&frame.filename, &frame.name, frame.line)
                })?;
            }
            pen.op(b"e")
        })
    }

    /// Writes a segment, or the part of a growing segment between two unmapped ranges.
    fn segment(
        &mut self,
        segment: &SegmentView,
        blocks: &[BlockView],
        live: &HashMap<u64, Live>,
    ) -> io::Result<()> {
        let used = || blocks.iter().filter(|b| b.state == State::Used);
        let allocated: u64 = used().map(|b| b.bytes.0).sum();
        self.op(b"}(")?;
        self.number("device", 0)?;
        self.number("address", blocks[0].address)?;
        self.number("total_size", blocks.iter().map(|b| b.bytes.0).sum())?;
        self.number("allocated_size", allocated)?;
        self.number("active_size", allocated)?;
        self.number("requested_size", used().map(|b| b.requested.0).sum())?;
        self.number("stream", u64::from(segment.stream))?;
        self.pair("segment_type", if segment.pool == 0 { "small" } else { "large" })?;
        self.text("segment_pool_id")?;
        self.op(&[b'K', 0, b'K', 0, 0x86])?;
        self.truth("is_expandable", segment.growing)?;
        self.text("frames")?;
        self.op(b"]")?;
        self.text("blocks")?;
        self.op(b"](")?;
        for block in blocks {
            let used = block.state == State::Used;
            let stack = live.get(&block.address).filter(|_| used).map(|l| l.stack);
            self.op(b"}(")?;
            self.number("address", block.address)?;
            self.number("size", block.bytes.0)?;
            self.number("requested_size", block.requested.0)?;
            self.pair("state", if used { "active_allocated" } else { "inactive" })?;
            self.text("frames")?;
            self.stack(stack.unwrap_or_default(), false)?;
            self.op(b"u")?;
        }
        self.op(b"eu")
    }

    fn settings(&mut self, target: &Target<'_>) -> io::Result<()> {
        let Config { expandable, gc_threshold, max_split, divisions, .. } = target.config;
        self.text("allocator_settings")?;
        self.op(b"}(")?;
        self.pair("PYTORCH_CUDA_ALLOC_CONF", target.alloc_conf)?;
        self.text("max_split_size")?;
        self.int(max_split.map_or(-1, |b| i64::try_from(b.0).unwrap_or(i64::MAX)))?;
        self.text("garbage_collection_threshold")?;
        self.op(b"G")?;
        self.op(&gc_threshold.unwrap_or(0.0).to_be_bytes())?;
        self.truth("expandable_segments", *expandable)?;
        self.text("roundup_power2_divisions")?;
        self.op(b"}(")?;
        for (power, &division) in divisions.iter().enumerate() {
            self.number(&(1u32 << power).to_string(), division)?;
        }
        self.op(b"uu")
    }
}
