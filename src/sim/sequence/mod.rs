//! Files that hold allocator requests: event tables.
//!
//! A table is read in one pass in bounded memory. Ids become small numbers, and errors name the
//! line. A table is CSV with a header: `op` (a allocates, f frees, e empties the cache), `id`,
//! `bytes`, `stream`, and optionally what an allocator answered: `result` (ok or oom), and
//! `allocated`, `reserved` and `segments` after the request.

use std::collections::HashMap;
use std::io::{BufRead, Read};
use std::path::{Path, PathBuf};

use super::requests::Request;
use super::snapshot::{self, Snapshot, SnapshotError};
use crate::files::{self, FileError, LineError};
use crate::units::{Bytes, id32};

/// The largest request, far above any device.
const LARGEST_REQUEST: u64 = 1 << 60;

/// The longest line of a table, in bytes.
const LONGEST_LINE: u64 = 4096;

/// Columns beyond this many are ignored.
const COLUMNS: usize = 16;

/// A sequence that could not be read.
#[derive(Debug, thiserror::Error)]
pub enum SequenceError {
    /// A snapshot that can't be read.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// The file could not be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// A line that contradicts the lines before it, or cannot be read.
    #[error(transparent)]
    Line(#[from] LineError),
}

/// What a table says that an allocator answered. `None` where it lacks the column.
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

/// A whole sequence in memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sequence {
    /// In order. Ids may be used again after their free.
    pub requests: Vec<Request>,
    /// Bytes reserved after each request, where the file is a snapshot that says so.
    pub reserved: Option<Vec<u64>>,
    /// The ids whose allocation failed when it was recorded, ascending. No id is used twice.
    pub failed: Vec<u32>,
}

impl Sequence {
    /// Reads all of `path`.
    ///
    /// # Errors
    /// As [`Reader::open`] and [`Reader::request`].
    pub fn read(path: &Path) -> Result<Self, SequenceError> {
        Self::rest(&mut Reader::open(path)?)
    }

    /// Reads the remaining requests of `reader`.
    ///
    /// # Errors
    /// As [`Reader::request`].
    pub fn rest(reader: &mut Reader) -> Result<Self, SequenceError> {
        let mut requests = Vec::new();
        while let Some(request) = reader.request()? {
            requests.push(request);
        }
        Ok(Self { requests, ..Self::default() })
    }
}

/// A file of requests being read.
pub struct Reader {
    path: PathBuf,
    file: Box<dyn BufRead>,
    line: u64,
    /// All requests, where the file is not a table.
    whole: Option<Whole>,
    columns: Columns,
    ids: Ids,
    streams: HashMap<u64, u32>,
    /// The id and the number of the last row's stream, since the next row mostly has the same.
    recent: (u64, u32),
    expected: Expected,
    text: Vec<u8>,
}

/// A sequence in memory and how much of it was read.
struct Whole {
    requests: std::vec::IntoIter<Request>,
    reserved: Option<std::vec::IntoIter<u64>>,
    failed: Vec<u32>,
}

/// The position of each column in a row.
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
    /// The last of these positions.
    last: usize,
    /// Whether the columns are op, id, bytes, stream and no others.
    plain: bool,
}

/// A line of the simplest form, `a,1,512,0` or `f,1,,`. Nearly every line of a large table has it,
/// so it is parsed in place.
struct Row {
    allocates: bool,
    id: u64,
    bytes: u64,
    stream: u64,
    /// The line's length in bytes, with its newline.
    used: usize,
}

impl Row {
    /// Parses the line at the start of `text`. `None` if it has another form or is incomplete.
    fn plain(text: &[u8]) -> Option<Self> {
        let allocates = *text.first()? == b'a';
        if !allocates && text[0] != b'f' || *text.get(1)? != b',' {
            return None;
        }
        let (id, mut at) = digits(text, 2)?;
        let (mut bytes, mut stream) = (0, 0);
        if allocates {
            (bytes, at) = digits(text, expect(text, at, b',')?)?;
            (stream, at) = digits(text, expect(text, at, b',')?)?;
        } else if text.get(at..at + 2)? == b",," {
            at += 2;
        }
        Some(Self { allocates, id, bytes, stream, used: expect(text, at, b'\n')? })
    }
}

/// The position after `byte`, if `byte` is at `at`.
fn expect(text: &[u8], at: usize, byte: u8) -> Option<usize> {
    (*text.get(at)? == byte).then_some(at + 1)
}

/// A number of at most 19 digits, which can't overflow, and the position after it. `None` if the
/// text ends within it.
fn digits(text: &[u8], from: usize) -> Option<(u64, usize)> {
    let (mut value, mut at) = (0, from);
    loop {
        let digit = text.get(at)?.wrapping_sub(b'0');
        if digit > 9 {
            break;
        }
        if at - from == 19 {
            return None;
        }
        value = value * 10 + u64::from(digit);
        at += 1;
    }
    if at == from { None } else { Some((value, at)) }
}

impl Reader {
    /// Opens a file of requests, plain or gzip. Its content decides whether it is a table or a
    /// snapshot.
    ///
    /// # Errors
    /// When it can't be read, or its first line is not a header with the columns op, id, bytes and
    /// stream.
    pub fn open(path: &Path) -> Result<Self, SequenceError> {
        let mut file = files::open(path)?;
        let first = file.fill_buf().unwrap_or_default();
        if first.is_empty() || snapshot::looks_like_pickle(first) {
            return Ok(Self::snapshot(path, snapshot::read(path, None)?));
        }
        Self::over(path, file)
    }

    /// A snapshot's requests, and what PyTorch had reserved after each where the snapshot says so.
    #[must_use]
    pub fn snapshot(path: &Path, snapshot: Snapshot) -> Self {
        Self::new(
            path,
            Sequence {
                requests: snapshot.requests,
                reserved: snapshot.expected_reserved,
                failed: snapshot.failed,
            },
        )
    }

    /// Reads a sequence that is in memory as if from a file; `path` names it in errors.
    #[must_use]
    pub fn new(path: &Path, sequence: Sequence) -> Self {
        let mut reader = Self::empty(path, Box::new(std::io::empty()));
        let Sequence { requests, reserved, failed } = sequence;
        let (requests, reserved) = (requests.into_iter(), reserved.map(Vec::into_iter));
        reader.whole = Some(Whole { requests, reserved, failed });
        reader
    }

    /// Reads an event table's text; `path` names it in errors.
    ///
    /// # Errors
    /// As [`Reader::open`].
    pub fn over(path: &Path, file: Box<dyn BufRead>) -> Result<Self, SequenceError> {
        let mut reader = Self::empty(path, file);
        reader.next_line()?;
        let header = String::from_utf8_lossy(&reader.text).into_owned();
        reader.columns = Columns::parse(header.trim_start_matches('\u{feff}'))
            .map_err(|problem| reader.error(problem))?;
        Ok(reader)
    }

    fn empty(path: &Path, file: Box<dyn BufRead>) -> Self {
        Self {
            path: path.to_owned(),
            file,
            line: 0,
            whole: None,
            columns: Columns::default(),
            ids: Ids::default(),
            streams: HashMap::new(),
            recent: (0, u32::MAX),
            expected: Expected::default(),
            text: Vec::new(),
        }
    }

    /// Whether the table has columns with an allocator's answers.
    #[must_use]
    pub const fn answered(&self) -> bool {
        if let Some(whole) = &self.whole {
            return whole.reserved.is_some();
        }
        let c = &self.columns;
        c.result.is_some() || c.allocated.is_some() || c.reserved.is_some() || c.segments.is_some()
    }

    /// The number of the line last read, from 1 with the header. For a file that is not a table,
    /// the number of the request, from 1.
    #[must_use]
    pub const fn line(&self) -> u64 {
        self.line
    }

    /// The answer that the file gives for the request last read.
    #[must_use]
    pub const fn expected(&self) -> &Expected {
        &self.expected
    }

    /// The text of the row last read, in a file with answers.
    #[must_use]
    pub fn row(&self) -> String {
        String::from_utf8_lossy(&self.text).into_owned()
    }

    /// The next request, or `None` at the end. Ids are used again after their free, so that they
    /// stay below the largest number of blocks that are alive at once.
    ///
    /// # Errors
    /// When the file can't be read further, or its next line is not an event or contradicts those
    /// before it.
    pub fn request(&mut self) -> Result<Option<Request>, SequenceError> {
        if let Some(whole) = &mut self.whole {
            self.line += 1;
            let request = whole.requests.next();
            self.expected.reserved = whole.reserved.as_mut().and_then(Iterator::next);
            self.expected.ok = match request {
                Some(Request::Allocate { id, .. }) if whole.reserved.is_some() => {
                    Some(whole.failed.binary_search(&id).is_err())
                }
                _ => None,
            };
            return Ok(request);
        }
        if self.columns.plain
            && let Some(row) = self.file.fill_buf().ok().and_then(Row::plain)
        {
            self.file.consume(row.used);
            self.line += 1;
            return self.plain(&row).map(Some).map_err(|problem| self.error(problem));
        }
        if !self.next_line()? {
            return Ok(None);
        }
        let text = std::mem::take(&mut self.text);
        let request = self.parse(&text);
        self.text = text;
        request.map(Some).map_err(|problem| self.error(problem))
    }

    /// Reads the next non-empty line into `text`. Returns false at the end.
    fn next_line(&mut self) -> Result<bool, SequenceError> {
        loop {
            self.text.clear();
            self.line += 1;
            let read = self.file.as_mut().take(LONGEST_LINE).read_until(b'\n', &mut self.text);
            match read {
                Err(e) => {
                    return Err(
                        self.error(format!("cannot be read further: {e}; the file may be cut off"))
                    );
                }
                Ok(0) => return Ok(false),
                Ok(_) => {}
            }
            if self.text.pop_if(|b| *b == b'\n').is_none() && self.text.len() as u64 == LONGEST_LINE
            {
                return Err(self.error(format!(
                    "is longer than {LONGEST_LINE} bytes; this is no event table"
                )));
            }
            self.text.pop_if(|b| *b == b'\r');
            if !self.text.is_empty() {
                return Ok(true);
            }
        }
    }

    fn error(&self, problem: String) -> SequenceError {
        LineError { path: self.path.clone(), line: self.line, problem }.into()
    }

    fn parse(&mut self, line: &[u8]) -> Result<Request, String> {
        let c = self.columns;
        let mut fields: [&[u8]; COLUMNS] = [&[]; COLUMNS];
        for (field, text) in fields[..=c.last].iter_mut().zip(line.split(|b| *b == b',')) {
            *field = text;
        }
        if self.answered() {
            self.expected = expected(&c, &fields)?;
        }
        Ok(match fields[c.op] {
            b"a" => {
                let id = number("id", fields[c.id])?;
                let bytes = number("bytes", fields[c.bytes])?;
                self.allocate(id, bytes, number("stream", fields[c.stream])?)?
            }
            b"f" => Request::Free { id: self.ids.free(number("id", fields[c.id])?)? },
            b"e" => Request::EmptyCache,
            other => {
                return Err(format!(
                    "op is {}; it must be a (allocate), f (free) or e (empty the cache)",
                    shown(other)
                ));
            }
        })
    }

    fn plain(&mut self, row: &Row) -> Result<Request, String> {
        if row.allocates {
            self.allocate(row.id, row.bytes, row.stream)
        } else {
            Ok(Request::Free { id: self.ids.free(row.id)? })
        }
    }

    fn allocate(&mut self, id: u64, bytes: u64, stream: u64) -> Result<Request, String> {
        if bytes > LARGEST_REQUEST {
            return Err(format!("bytes is {bytes}; at most 2^60 is possible"));
        }
        let stream = self.stream(stream);
        let id = self.ids.allocate(id, self.expected.ok == Some(false))?;
        Ok(Request::Allocate { id, bytes: Bytes(bytes), stream })
    }

    fn stream(&mut self, stream: u64) -> u32 {
        if self.recent.0 == stream && self.recent.1 != u32::MAX {
            return self.recent.1;
        }
        let next = id32(self.streams.len());
        let small = *self.streams.entry(stream).or_insert(next);
        self.recent = (stream, small);
        small
    }
}

impl Columns {
    fn parse(header: &str) -> Result<Self, String> {
        let names: Vec<&str> = header.split(',').map(str::trim).take(COLUMNS).collect();
        let find = |name: &str| {
            let mut at = names.iter().enumerate().filter(|(_, n)| **n == name).map(|(i, _)| i);
            let first = at.next();
            if at.next().is_some() {
                Err(format!("the header has {name} twice; rename one"))
            } else {
                Ok(first)
            }
        };
        let need = |name: &str| {
            find(name)?.ok_or_else(|| {
                format!(
                    "the header lacks {name}; an event table begins with op,id,bytes,stream and may have result,allocated,reserved,segments"
                )
            })
        };
        let mut columns = Self {
            op: need("op")?,
            id: need("id")?,
            bytes: need("bytes")?,
            stream: need("stream")?,
            result: find("result")?,
            allocated: find("allocated")?,
            reserved: find("reserved")?,
            segments: find("segments")?,
            last: 0,
            plain: names == ["op", "id", "bytes", "stream"],
        };
        let optional = [columns.result, columns.allocated, columns.reserved, columns.segments];
        let needed = [columns.op, columns.id, columns.bytes, columns.stream];
        columns.last = optional.into_iter().flatten().chain(needed).max().unwrap_or(0);
        Ok(columns)
    }
}

fn expected(columns: &Columns, fields: &[&[u8]; COLUMNS]) -> Result<Expected, String> {
    let optional = |name: &str, column: Option<usize>| match column.map(|c| fields[c]) {
        None | Some([]) => Ok(None),
        Some(text) => number(name, text).map(Some),
    };
    Ok(Expected {
        ok: match columns.result.map(|c| fields[c]) {
            None | Some([]) => None,
            Some(b"ok") => Some(true),
            Some(b"oom") => Some(false),
            Some(other) => return Err(format!("result is {}; it must be ok or oom", shown(other))),
        },
        allocated: optional("allocated", columns.allocated)?,
        reserved: optional("reserved", columns.reserved)?,
        segments: optional("segments", columns.segments)?,
    })
}

#[inline]
fn number(name: &str, text: &[u8]) -> Result<u64, String> {
    let mut value: u64 = 0;
    // Nineteen digits can't overflow.
    if (1..20).contains(&text.len()) && text.iter().all(u8::is_ascii_digit) {
        return Ok(text.iter().fold(0, |value, digit| value * 10 + u64::from(digit - b'0')));
    }
    for byte in text {
        let digit = byte.wrapping_sub(b'0');
        match value.checked_mul(10).and_then(|v| v.checked_add(u64::from(digit))) {
            Some(next) if digit < 10 => value = next,
            _ => {
                return Err(format!(
                    "{name} is {}; it must be a whole number from 0 to 2^64 - 1",
                    shown(text)
                ));
            }
        }
    }
    if text.is_empty() {
        Err(format!("{name} is empty; it must be a whole number"))
    } else {
        Ok(value)
    }
}

fn shown(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    let short: String = text.chars().take(40).collect();
    format!("`{short}{}`", if short.len() < text.len() { "…" } else { "" })
}

/// Maps the file's ids of live blocks to small numbers.
#[derive(Default)]
struct Ids {
    /// By id, for ids up to about the number of events: the small number plus one, or 0 for none.
    near: Vec<u32>,
    /// All other ids.
    far: HashMap<u64, u32>,
    /// Ids whose allocation the file says failed: they may be allocated again without a free.
    failed: HashMap<u64, ()>,
    /// Numbers that may be used again.
    vacant: Vec<u32>,
    /// The largest number of blocks alive at once so far.
    count: u32,
    /// Allocations seen.
    seen: u64,
}

impl Ids {
    fn allocate(&mut self, id: u64, fails: bool) -> Result<u32, String> {
        self.seen += 1;
        let number = match self.take(id) {
            Some(number) if self.failed.remove(&id).is_some() => number,
            Some(_) => {
                return Err(format!(
                    "allocates block {id}, which is allocated already; free it first, or use another id"
                ));
            }
            None => match self.vacant.pop() {
                Some(number) => number,
                None if self.count == u32::MAX - 1 => {
                    return Err("has more than 2^32 blocks alive at once".to_owned());
                }
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
            #[expect(clippy::cast_possible_truncation, reason = "the limit is a list's length")]
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
            return Err(format!(
                "frees block {id}, which is not allocated; allocate it first, or remove this line"
            ));
        };
        if !self.failed.is_empty() {
            self.failed.remove(&id);
        }
        self.vacant.push(number);
        Ok(number)
    }

    fn take(&mut self, id: u64) -> Option<u32> {
        if let Some(near) =
            usize::try_from(id).ok().and_then(|at| self.near.get_mut(at)).filter(|n| **n > 0)
        {
            return Some(std::mem::take(near) - 1);
        }
        if self.far.is_empty() { None } else { self.far.remove(&id) }
    }
}

#[cfg(test)]
mod tests;
