//! Files that hold allocator requests: event tables.
//!
//! For: reading them in one pass in bounded memory, ids made small, mistakes named by line. Not for: answering requests
//! ([`super::allocator`]).
//!
//! A table is CSV with a header: `op` (a allocates, f frees, e empties the cache), `id`, `bytes`, `stream`, and
//! optionally what an allocator answered: `result` (ok or oom), `allocated`, `reserved`, `segments` after the request.

use std::collections::HashMap;
use std::io::BufRead;
use std::path::{Path, PathBuf};

use super::requests::Request;
use crate::files::{self, FileError};
use crate::units::Bytes;

/// No request is larger; far above any device.
const LARGEST_REQUEST: u64 = 1 << 60;

/// A longer line is no event.
const LONGEST_LINE: usize = 4096;

/// A row's columns beyond this are not looked at.
const COLUMNS: usize = 16;

/// A sequence that could not be read.
#[derive(Debug, thiserror::Error)]
pub enum SequenceError {
    /// The file could not be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// A line says something impossible.
    #[error("{}: line {line}: {problem}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// From 1, the header included.
        line: u64,
        /// What, and what would do.
        problem: String,
    },
}

/// What a table says an allocator answered, as far as it has the columns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Expected {
    /// Whether the request was served.
    pub ok: Option<bool>,
    /// Bytes in blocks in use after it.
    pub allocated: Option<u64>,
    /// Bytes reserved after it.
    pub reserved: Option<u64>,
    /// Segments after it.
    pub segments: Option<u64>,
}

/// One row of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// What is asked. Ids are used again after their free, so that they stay as small as the most blocks alive at once.
    pub request: Request,
    /// What was answered.
    pub expected: Expected,
    /// Where it stands, from 1 with the header; in other files its position, from 1.
    pub line: u64,
}

/// A whole sequence in memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sequence {
    /// In order. Ids may be used again after their free.
    pub requests: Vec<Request>,
    /// Whether the file says what was answered, so that a replay can be checked against it.
    pub answered: bool,
}

impl Sequence {
    /// Reads all of `path`.
    ///
    /// # Errors
    /// As [`Reader::open`] and [`Reader::event`].
    pub fn read(path: &Path) -> Result<Self, SequenceError> {
        let mut reader = Reader::open(path)?;
        let mut requests = Vec::new();
        while let Some(event) = reader.event()? {
            requests.push(event.request);
        }
        Ok(Self { requests, answered: reader.answered() })
    }
}

/// A file of requests being read.
pub struct Reader {
    path: PathBuf,
    file: Box<dyn BufRead>,
    line: u64,
    columns: Columns,
    ids: Ids,
    streams: HashMap<u64, u32>,
    /// The stream of the row before, which the next one mostly has too.
    recent: (u64, u32),
    /// The beginning of a line that the buffer cut.
    partial: Vec<u8>,
}

/// Where each column stands.
#[derive(Clone, Copy, Debug, Default)]
struct Columns {
    op: usize,
    id: usize,
    bytes: usize,
    stream: usize,
    result: Option<usize>,
    allocated: Option<usize>,
    reserved: Option<usize>,
    segments: Option<usize>,
}

impl Reader {
    /// Opens an event table, plain or gzip.
    ///
    /// # Errors
    /// When it can't be read, or its first line is not a header with the columns op, id, bytes and stream.
    pub fn open(path: &Path) -> Result<Self, SequenceError> {
        let mut reader = Self {
            path: path.to_owned(),
            file: files::open(path)?,
            line: 0,
            columns: Columns::default(),
            ids: Ids::default(),
            streams: HashMap::new(),
            recent: (0, u32::MAX),
            partial: Vec::new(),
        };
        let header = reader.with_line(|_, line| Ok(String::from_utf8_lossy(line).into_owned()))?;
        let header = header.unwrap_or_default();
        reader.columns = Columns::of(header.trim_start_matches('\u{feff}')).map_err(|problem| reader.error(problem))?;
        Ok(reader)
    }

    /// Whether the file has a column of what was answered.
    #[must_use]
    pub const fn answered(&self) -> bool {
        let c = &self.columns;
        c.result.is_some() || c.allocated.is_some() || c.reserved.is_some() || c.segments.is_some()
    }

    /// The next event; none at the end.
    ///
    /// # Errors
    /// When the file can't be read further, or its next line is not an event or contradicts those before it.
    pub fn event(&mut self) -> Result<Option<Event>, SequenceError> {
        self.with_line(Self::parse)
    }

    /// Calls `parse` with the next line that isn't empty.
    fn with_line<T>(&mut self, parse: impl FnOnce(&mut Self, &[u8]) -> Result<T, String>) -> Result<Option<T>, SequenceError> {
        // Taken out, so that a line in its buffer can be parsed in place.
        let mut file = std::mem::replace(&mut self.file, Box::new(std::io::empty()));
        let result = self.next_line(file.as_mut(), parse);
        self.file = file;
        result
    }

    fn next_line<T>(
        &mut self,
        file: &mut dyn BufRead,
        parse: impl FnOnce(&mut Self, &[u8]) -> Result<T, String>,
    ) -> Result<Option<T>, SequenceError> {
        loop {
            let buffer = match file.fill_buf() {
                Ok(buffer) => buffer,
                Err(e) => return Err(self.error(format!("cannot be read further: {e}; the file may be cut off"))),
            };
            let end = buffer.iter().position(|b| *b == b'\n');
            let (text, used) = (&buffer[..end.unwrap_or(buffer.len())], end.map_or(buffer.len(), |n| n + 1));
            if end.is_none() && used > 0 {
                self.partial.extend_from_slice(text);
                file.consume(used);
                if self.partial.len() > LONGEST_LINE {
                    self.line += 1;
                    return Err(self.error(format!("is longer than {LONGEST_LINE} bytes; this is no event table")));
                }
                continue;
            }
            let at_end = used == 0;
            if at_end && self.partial.is_empty() {
                return Ok(None);
            }
            self.line += 1;
            let mut whole = std::mem::take(&mut self.partial);
            let line = if whole.is_empty() {
                text
            } else {
                whole.extend_from_slice(text);
                &whole
            };
            let line = line.strip_suffix(b"\r").unwrap_or(line);
            if line.is_empty() {
                file.consume(used);
                continue;
            }
            let parsed = parse(self, line);
            file.consume(used);
            return parsed.map(Some).map_err(|problem| self.error(problem));
        }
    }

    fn error(&self, problem: String) -> SequenceError {
        SequenceError::Line { path: self.path.clone(), line: self.line.max(1), problem }
    }

    fn parse(&mut self, line: &[u8]) -> Result<Event, String> {
        let mut fields: [&[u8]; COLUMNS] = [&[]; COLUMNS];
        let mut start = 0;
        let mut field = 0;
        for (at, byte) in line.iter().enumerate() {
            if *byte == b',' {
                fields[field] = &line[start..at];
                start = at + 1;
                field += 1;
                if field == COLUMNS {
                    break;
                }
            }
        }
        if field < COLUMNS {
            fields[field] = &line[start..];
        }
        let c = self.columns;
        let optional = |name: &str, column: Option<usize>| match column.map(|c| fields[c]) {
            None | Some([]) => Ok(None),
            Some(text) => number(name, text).map(Some),
        };
        let expected = Expected {
            ok: match c.result.map(|c| fields[c]) {
                None | Some([]) => None,
                Some(b"ok") => Some(true),
                Some(b"oom") => Some(false),
                Some(other) => return Err(format!("result is {}; it must be ok or oom", shown(other))),
            },
            allocated: optional("allocated", c.allocated)?,
            reserved: optional("reserved", c.reserved)?,
            segments: optional("segments", c.segments)?,
        };
        let request = match fields[c.op] {
            b"a" => {
                let id = number("id", fields[c.id])?;
                let bytes = number("bytes", fields[c.bytes])?;
                if bytes > LARGEST_REQUEST {
                    return Err(format!("bytes is {bytes}; at most 2^60 is possible"));
                }
                let stream = self.stream(number("stream", fields[c.stream])?);
                let id = self.ids.allocate(id, expected.ok == Some(false))?;
                Request::Allocate { id, bytes: Bytes(bytes), stream }
            }
            b"f" => Request::Free { id: self.ids.free(number("id", fields[c.id])?)? },
            b"e" => Request::EmptyCache,
            other => return Err(format!("op is {}; it must be a (allocate), f (free) or e (empty the cache)", shown(other))),
        };
        Ok(Event { request, expected, line: self.line })
    }

    fn stream(&mut self, stream: u64) -> u32 {
        if self.recent.0 == stream && self.recent.1 != u32::MAX {
            return self.recent.1;
        }
        let next = self.streams.len() as u32;
        let small = *self.streams.entry(stream).or_insert(next);
        self.recent = (stream, small);
        small
    }
}

impl Columns {
    fn of(header: &str) -> Result<Self, String> {
        let names: Vec<&str> = header.split(',').map(str::trim).take(COLUMNS).collect();
        let find = |name: &str| {
            let mut at = names.iter().enumerate().filter(|(_, n)| **n == name).map(|(i, _)| i);
            let first = at.next();
            if at.next().is_some() { Err(format!("the header has {name} twice; rename one")) } else { Ok(first) }
        };
        let need = |name: &str| {
            find(name)?.ok_or_else(|| {
                format!(
                    "the header lacks {name}; an event table begins with op,id,bytes,stream and may have result,allocated,reserved,segments"
                )
            })
        };
        Ok(Self {
            op: need("op")?,
            id: need("id")?,
            bytes: need("bytes")?,
            stream: need("stream")?,
            result: find("result")?,
            allocated: find("allocated")?,
            reserved: find("reserved")?,
            segments: find("segments")?,
        })
    }
}

fn number(name: &str, text: &[u8]) -> Result<u64, String> {
    let mut value: u64 = 0;
    for byte in text {
        let digit = byte.wrapping_sub(b'0');
        match value.checked_mul(10).and_then(|v| v.checked_add(u64::from(digit))) {
            Some(next) if digit < 10 => value = next,
            _ => return Err(format!("{name} is {}; it must be a whole number from 0 to 2^64 - 1", shown(text))),
        }
    }
    if text.is_empty() { Err(format!("{name} is empty; it must be a whole number")) } else { Ok(value) }
}

fn shown(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    let short: String = text.chars().take(40).collect();
    format!("`{short}{}`", if short.len() < text.len() { "…" } else { "" })
}

/// The file's ids of blocks alive, each with a small number.
#[derive(Default)]
struct Ids {
    /// By id, for ids about as small as the file has events: the number plus one, 0 for none.
    near: Vec<u32>,
    /// All others.
    far: HashMap<u64, u32>,
    /// Ids whose allocation the file says failed: they may be allocated again without a free.
    failed: HashMap<u64, ()>,
    /// Numbers that may be used again.
    vacant: Vec<u32>,
    /// How many were ever in use at once.
    count: u32,
    /// Allocations seen.
    seen: u64,
}

impl Ids {
    fn allocate(&mut self, id: u64, fails: bool) -> Result<u32, String> {
        self.seen += 1;
        let number = match self.take(id) {
            Some(number) if self.failed.remove(&id).is_some() => number,
            Some(_) => return Err(format!("allocates block {id}, which is allocated already; free it first, or use another id")),
            None => match self.vacant.pop() {
                Some(number) => number,
                None if self.count == u32::MAX - 1 => return Err("has more than 2^32 blocks alive at once".to_owned()),
                None => {
                    self.count += 1;
                    self.count - 1
                }
            },
        };
        if fails {
            self.failed.insert(id, ());
        }
        let limit = 4 * self.seen + 4096;
        if id < limit {
            let at = id as usize;
            if at >= self.near.len() {
                self.near.resize((at + 1).max(self.near.len() * 2), 0);
            }
            self.near[at] = number + 1;
        } else {
            self.far.insert(id, number);
        }
        Ok(number)
    }

    fn free(&mut self, id: u64) -> Result<u32, String> {
        let Some(number) = self.take(id) else {
            return Err(format!("frees block {id}, which is not allocated; allocate it first, or leave this line away"));
        };
        if !self.failed.is_empty() {
            self.failed.remove(&id);
        }
        self.vacant.push(number);
        Ok(number)
    }

    fn take(&mut self, id: u64) -> Option<u32> {
        if let Some(near) = usize::try_from(id).ok().and_then(|at| self.near.get_mut(at)).filter(|n| **n > 0) {
            return Some(std::mem::take(near) - 1);
        }
        if self.far.is_empty() { None } else { self.far.remove(&id) }
    }
}
