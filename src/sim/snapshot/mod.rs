//! PyTorch memory snapshots (`torch.cuda.memory._dump_snapshot`): read as a sequence of requests,
//! and written from one.
//!
//! Reading gives the requests of a real job's allocator, from the state in which the recording
//! began. Stacks and names are left out, but for the lines that allocated, if they are wanted.
//! [`mod@write`] makes the file that PyTorch would have recorded.

mod guide;
mod lines;
mod past;
mod pickle;
mod sequence;
mod source;
#[cfg(test)]
mod tests;
mod value;
mod words;
pub mod write;

use std::path::{Path, PathBuf};

use crate::allocator::Config;
use crate::files;
use crate::units::Bytes;

use super::requests::Request;
pub use lines::AllocatedAt;
use source::{Budget, Source};
use value::{Pickle, Value};
use words::Word;

/// The most memory that [`read`] takes for its tables, results included. Buffers add less than a
/// mebibyte. An event takes about 110 bytes, so ten million of them fit; its stack takes nothing.
pub const MEMORY_LIMIT: Bytes = Bytes(1 << 30);

/// The requests to one device's allocator, and what it held.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// The device's number.
    pub device: u32,
    /// Every request in order. A request that failed when it was recorded is in the list, followed
    /// by its free.
    pub requests: Vec<Request>,
    /// Bytes that PyTorch held in segments after each request. A replay with `settings` on
    /// `capacity` bytes reaches the same. `None` when the recording contradicts itself, or began
    /// with segments whose layout it doesn't say.
    pub expected_reserved: Option<Vec<u64>>,
    /// How many of `requests`, at the front, stand for blocks that were live before the recording
    /// began.
    pub at_start: usize,
    /// The bytes held in segments when the recording began.
    pub reserved_at_start: Bytes,
    /// PyTorch's names (`cudaStream_t`) of the requests' streams.
    pub streams: Vec<i64>,
    /// The ids whose allocation failed when it was recorded, in ascending order.
    pub failed: Vec<u32>,
    /// The device's memory for the job: held plus free bytes at the last failure; `None` without
    /// failures. A snapshot does not say whether a memory fraction set a lower limit.
    pub capacity: Option<Bytes>,
    /// What limited the job, as far as its trace shows it: a replay within it fails and gives
    /// memory back as the recording did. `None` where the trace was not followed.
    pub limit: Option<Limit>,
    /// The allocator's settings; all unset in snapshots of old versions.
    pub settings: Settings,
    /// Sentences about what the result leaves out or assumes.
    pub notes: Vec<String>,
    /// The lines that allocated, as far as they were recorded and wanted.
    pub lines: AllocatedAt,
}

/// What a job could take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limit {
    /// The device's memory.
    pub capacity: Bytes,
    /// The share of it that the process may reserve; none when that is all.
    pub fraction: Option<f64>,
}

/// The allocator's settings that a snapshot carries.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settings {
    /// `PYTORCH_CUDA_ALLOC_CONF` as it was set, perhaps empty; none when the snapshot has no
    /// settings.
    pub alloc_conf: Option<String>,
    /// `expandable_segments`.
    pub expandable_segments: Option<bool>,
    /// `max_split_size_mb`, in bytes; none when blocks may always be split.
    pub max_split_size: Option<Bytes>,
    /// `garbage_collection_threshold`; none when it is off.
    pub garbage_collection_threshold: Option<f64>,
    /// `roundup_power2_divisions`: the divisions for sizes from 1, 2, 4, … 32768 MiB; empty when it
    /// is off.
    pub roundup_power2_divisions: Vec<u64>,
}

/// A snapshot that could not be read.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// The file can't be opened.
    #[error(transparent)]
    File(#[from] files::FileError),
    /// The content is not a usable snapshot.
    #[error("{}: {problem}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: Problem,
    },
}

/// What is wrong with a snapshot's content. Offsets are in the decompressed file.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    /// Reading or decompressing failed.
    #[error("cannot be read beyond byte {offset} of its content: {cause}; record or copy it again")]
    Unreadable {
        /// The offset up to which it could be read.
        offset: u64,
        /// The error of the read.
        cause: std::io::Error,
    },
    /// The file has no content.
    #[error("empty file: the dump was not finished; record it again")]
    Empty,
    /// The file ends inside the pickle.
    #[error("the pickle is cut off at byte {offset}; record or copy it again")]
    CutOff {
        /// The file's length.
        offset: u64,
    },
    /// An opcode that could run code, or that no snapshot contains.
    #[error(
        "the pickle's opcode {name} at byte {offset} is refused: only plain data is read and nothing is run; save the snapshot with torch.cuda.memory._dump_snapshot"
    )]
    Refused {
        /// The opcode's name in Python's `pickletools`.
        name: &'static str,
        /// Its offset.
        offset: u64,
    },
    /// A byte that is not an opcode.
    #[error(
        "byte {offset} of the pickle, 0x{code:02x}, is no opcode; save the snapshot with torch.cuda.memory._dump_snapshot"
    )]
    Unknown {
        /// The byte.
        code: u8,
        /// Offset in the file, in bytes.
        offset: u64,
    },
    /// A sequence of opcodes that makes no value.
    #[error("the pickle is malformed at byte {offset}: {what}")]
    Malformed {
        /// Offset in the file, in bytes.
        offset: u64,
        /// What is wrong.
        what: &'static str,
    },
    /// It needs more than the memory limit.
    #[error(
        "reading it takes more than {limit} of memory; record fewer events (max_entries of _record_memory_history)"
    )]
    TooLarge {
        /// The limit.
        limit: Bytes,
    },
    /// A pickle that is not a memory snapshot.
    #[error("it is no memory snapshot: {0}; save one with torch.cuda.memory._dump_snapshot")]
    NoSnapshot(String),
    /// Segments without a trace.
    #[error(
        "it has segments and no trace of requests: record_memory_history was not on; call torch.cuda.memory._record_memory_history() before the work, and torch.cuda.memory._dump_snapshot after it"
    )]
    NoTrace,
    /// The device has no events, or several devices have events and none was chosen.
    #[error("{problem}; it has {}", devices(present))]
    Device {
        /// What is wrong.
        problem: String,
        /// Each device and its number of events.
        present: Vec<(usize, usize)>,
    },
    /// Contradictory content.
    #[error("{0}")]
    Contradiction(String),
}

/// The number of events of each device, for an error. A long list is cut.
fn devices(present: &[(usize, usize)]) -> String {
    let mut all: Vec<_> =
        present.iter().take(16).map(|(d, n)| format!("{n} events of device {d}")).collect();
    if all.is_empty() {
        all.push("no device".to_owned());
    }
    if present.len() > 16 {
        all.push(format!("{} more devices", present.len() - 16));
    }
    all.join(", ")
}

/// Whether the first bytes of a file (once decompressed) are those of a pickle.
#[must_use]
pub fn looks_like_pickle(first_bytes: &[u8]) -> bool {
    match first_bytes {
        [0x80, version, ..] => (2..=5).contains(version),
        // Protocols 0 and 1 have no header; a snapshot is a dictionary that is memoised first.
        [b'(', b'd', b'p', ..] | [b'}', b'q', ..] => true,
        _ => false,
    }
}

/// Reads the snapshot in `path`, which may be gzipped: the requests of `device`, or of the only
/// device that has events.
///
/// # Errors
/// When the file can't be read, isn't a pickle of plain data in the form of a snapshot, takes more
/// than [`MEMORY_LIMIT`], or has no events of the device.
pub fn read(path: &Path, device: Option<u32>) -> Result<Snapshot, SnapshotError> {
    read_within(path, device, MEMORY_LIMIT, false)
}

/// As [`read`], within `limit` bytes of memory, and with the lines that allocated if `lines`.
///
/// # Errors
/// As [`read`].
pub fn read_within(
    path: &Path,
    device: Option<u32>,
    limit: Bytes,
    lines: bool,
) -> Result<Snapshot, SnapshotError> {
    let reader = files::open(path)?;
    let mut budget = Budget::new(limit);
    Pickle::read(Source::new(reader), &mut budget, lines)
        .and_then(|p| snapshot(&p, device, &mut budget))
        .map_err(|problem| match problem {
            Problem::CutOff { offset: 0 } => Problem::Empty,
            other => other,
        })
        .map_err(|problem| SnapshotError::Content { path: path.to_owned(), problem })
}

fn snapshot(
    pickle: &Pickle,
    device: Option<u32>,
    budget: &mut Budget,
) -> Result<Snapshot, Problem> {
    let missing = |what: &str| Problem::NoSnapshot(what.to_owned());
    let traces = pickle.get(pickle.root, Word::DeviceTraces).ok_or_else(|| {
        if segments_alone(pickle) {
            return Problem::NoTrace;
        }
        missing("it has no `device_traces`")
    })?;
    let traces = pickle.list(traces).ok_or_else(|| missing("its `device_traces` is no list"))?;
    let (device, events) = choose(pickle, traces, device)?;
    let settings = pickle
        .get(pickle.root, Word::AllocatorSettings)
        .map(|s| settings(pickle, s))
        .unwrap_or_default();
    let mut snapshot = sequence::build(pickle, device, events, settings, budget)?;
    if pickle.more {
        snapshot
            .notes
            .push("What follows the end of the pickle in the file was not read.".to_owned());
    }
    Ok(snapshot)
}

/// Whether it has segments and nothing of how they came to be: what
/// `torch.cuda.memory_snapshot()` gives.
fn segments_alone(pickle: &Pickle) -> bool {
    let first = pickle.list(pickle.root).and_then(|all| all.first().copied());
    let segment = first.is_some_and(|s| pickle.get(s, Word::Blocks).is_some());
    segment || pickle.get(pickle.root, Word::Segments).is_some()
}

/// The device to read, and its events.
fn choose<'a>(
    pickle: &'a Pickle,
    traces: &[Value],
    device: Option<u32>,
) -> Result<(u32, &'a [Value]), Problem> {
    // Notes that a library writes into a trace (`user_defined`) are of no allocator. The list is
    // short, so that a list shared by a million devices makes no long error.
    let mut left = pickle.nodes.len();
    let mut counts = |trace: &Value| {
        let all = pickle.list(*trace).unwrap_or_default();
        // Each event is a dictionary of its own. More than that are shared, and only counted.
        let Some(rest) = left.checked_sub(all.len()) else { return all.len() };
        left = rest;
        let noted = |e: &&Value| pickle.get(**e, Word::Action) == Some(Value::Other);
        all.len() - all.iter().filter(noted).count()
    };
    let present: Vec<(usize, usize)> =
        traces.iter().map(&mut counts).enumerate().filter(|(_, n)| *n > 0).take(17).collect();
    let fail = |problem: String| Problem::Device { problem, present: present.clone() };
    let chosen = match (device, present.as_slice()) {
        (Some(d), _) => d as usize,
        (None, [(d, _)]) => *d,
        (None, []) => {
            return Err(fail("nothing was recorded, since record_memory_history was not on: call torch.cuda.memory._record_memory_history() before the work".to_owned()));
        }
        (None, _) => return Err(fail("several devices have events: name one".to_owned())),
    };
    let trace = traces.get(chosen).ok_or_else(|| fail(format!("there is no device {chosen}")))?;
    let events = pickle
        .list(*trace)
        .ok_or_else(|| Problem::NoSnapshot(format!("the trace of device {chosen} is no list")))?;
    let seen = present.len() > 16 || present.iter().any(|(d, _)| *d == chosen);
    if events.is_empty() || !seen {
        return Err(fail(format!("device {chosen} has no events")));
    }
    Ok((u32::try_from(chosen).unwrap_or(u32::MAX), events))
}

impl Settings {
    /// The settings as the allocator takes them; none where they are not known here.
    fn config(&self) -> Option<Config> {
        if let Some(conf) = &self.alloc_conf {
            return conf.parse().ok();
        }
        let mut config = Config {
            expandable: self.expandable_segments.unwrap_or(false),
            max_split: self.max_split_size,
            gc_threshold: self.garbage_collection_threshold,
            ..Config::default()
        };
        let divisions = config.divisions.iter_mut().zip(&self.roundup_power2_divisions);
        divisions.for_each(|(to, from)| *to = *from);
        Some(config)
    }
}

fn settings(pickle: &Pickle, value: Value) -> Settings {
    let get = |key| pickle.get(value, key);
    let divisions = get(Word::RoundupPower2).map(|d| {
        let division = |i| match pickle.get(d, Word::Power(i)) {
            Some(Value::Int(n)) => u64::try_from(n).unwrap_or(0),
            _ => 0,
        };
        (0..16).map(division).collect::<Vec<_>>()
    });
    Settings {
        alloc_conf: get(Word::Conf).and_then(|v| pickle.text(v)),
        expandable_segments: match get(Word::ExpandableSegments) {
            Some(Value::Bool(b)) => Some(b),
            _ => None,
        },
        // -1 says that there is no limit.
        max_split_size: match get(Word::MaxSplitSize) {
            Some(Value::Int(n)) => u64::try_from(n).ok().map(Bytes),
            _ => None,
        },
        garbage_collection_threshold: match get(Word::GcThreshold) {
            Some(Value::Float(f)) if f > 0.0 => Some(f),
            _ => None,
        },
        roundup_power2_divisions: divisions
            .filter(|d| d.iter().any(|n| *n != 0))
            .unwrap_or_default(),
    }
}
