//! Reads a Kineto Chrome trace, plain or gzipped, in one pass and bounded memory.
//!
//! It accepts the files that profilers and other tools really write: damaged, cut off, with keys in
//! any order. GPU events are skipped. Chakra execution traces are read by [`crate::job::chakra`].

use std::io::{self, Read};
use std::path::{Path, PathBuf};

use super::Trace;
use super::buffer::{Ahead, Buffer, More};
use super::event::Event;
use super::keep::Keeper;
use super::scan::{Cursor, Stop};
use crate::files::FileError;
use crate::units::Bytes;

/// How much of a trace is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of records (operators, memory events, marks, modules). If a trace has more, its latest
    /// iterations are left out, with a note.
    pub records_bytes: u64,
    /// Bytes of names and arguments, each different one counted once, and of their tables. More is
    /// an error.
    pub texts_bytes: u64,
    /// Bytes of the longest event. Longer events are left out, with a note.
    pub event_bytes: usize,
}

impl Default for Limits {
    /// Enough for about fifty iterations of a model with 25,000 operators in each.
    fn default() -> Self {
        Self { records_bytes: 96 << 20, texts_bytes: 48 << 20, event_bytes: 4 << 20 }
    }
}

impl Limits {
    /// The most memory that reading a file takes: the records and room to sort them, the texts, an
    /// event in the buffer and its copies, and the reading thread's chunks.
    #[must_use]
    pub const fn memory(&self) -> Bytes {
        Bytes(
            self.records_bytes
                + self.records_bytes / 2
                + self.texts_bytes
                + 8 * self.event_bytes as u64
                + (8 << 20),
        )
    }
}

/// Why a trace can't be used.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// It can't be opened.
    #[error(transparent)]
    File(#[from] FileError),
    /// Reading it failed.
    #[error("{}: byte {offset}: cannot be read: {cause}; copy the file elsewhere and try again", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Offset in the decompressed file.
        offset: u64,
        /// The system's error.
        cause: io::Error,
    },
    /// The reading thread could not be started.
    #[error("{}: no thread to read it with: {cause}; end other programs and try again", path.display())]
    Thread {
        /// The file.
        path: PathBuf,
        /// The system's error.
        cause: io::Error,
    },
    /// It is not a trace, or lacks what an estimate needs.
    #[error("{}: byte {offset}: {problem}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// Offset in the decompressed file.
        offset: u64,
        /// What is wrong, and the remedy.
        problem: String,
    },
}

/// Reads the trace in `path`.
///
/// # Errors
/// The error names the file, the offset in the decompressed file, and the remedy.
pub fn read(path: &Path, limits: &Limits) -> Result<Trace, TraceError> {
    parse(Ahead::open(path)?, path, limits)
}

/// Reads a trace from a stream; `path` is for messages.
///
/// # Errors
/// As [`read`].
pub fn parse(source: impl Read, path: &Path, limits: &Limits) -> Result<Trace, TraceError> {
    let mut reader = Reader {
        buffer: Buffer::new(source, limits.event_bytes),
        keeper: Keeper::new(limits),
        path,
        limits,
        cut: None,
        damaged: 0,
        damaged_at: 0,
        oversized: 0,
    };
    reader.document()?;
    reader.finish()
}

/// The number of damaged events above which a file is refused, if they are also more than one in a
/// hundred.
const DAMAGED: u64 = 100;

struct Reader<'p, R> {
    buffer: Buffer<R>,
    keeper: Keeper,
    path: &'p Path,
    limits: &'p Limits,
    /// Where the file ends, if it ends inside its JSON.
    cut: Option<u64>,
    damaged: u64,
    damaged_at: u64,
    oversized: u64,
}

impl<R: Read> Reader<'_, R> {
    fn error(&self, offset: u64, problem: impl Into<String>) -> TraceError {
        TraceError::Content { path: self.path.to_owned(), offset, problem: problem.into() }
    }

    /// The next byte that is neither white space nor a comma; the buffer then begins with it. A
    /// zero byte is neither, because a file of only zeros may never end.
    fn token(&mut self) -> Option<u8> {
        loop {
            let bytes = self.buffer.bytes();
            let found = bytes.iter().position(|b| (*b > b' ' || *b == 0) && *b != b',');
            let byte = found.map(|at| bytes[at]);
            self.buffer.advance(found.unwrap_or(bytes.len()));
            if byte.is_some() || self.buffer.more() != More::Yes {
                return byte;
            }
        }
    }

    fn document(&mut self) -> Result<(), TraceError> {
        self.buffer.more();
        if self.buffer.bytes().starts_with(b"\xef\xbb\xbf") {
            self.buffer.advance(3);
        }
        let (found, problem) = match self.token() {
            Some(b'[') => {
                self.buffer.advance(1);
                return self.events();
            }
            Some(b'{') => {
                self.buffer.advance(1);
                return self.members();
            }
            None if self.buffer.broken.is_some() => return Ok(()),
            None => ("is empty", "record the trace again"),
            Some(0x80) => ("looks like a pickle", "a memory snapshot is for `neap replay`"),
            Some(0xff | 0xfe) => ("looks like UTF-16", "save it as UTF-8"),
            Some(_) => {
                ("is not JSON", "give the file that torch.profiler's export_chrome_trace wrote")
            }
        };
        Err(self.error(self.buffer.offset(), format!("the file {found}; {problem}")))
    }

    /// Reads the members of the outermost object, up to the events.
    fn members(&mut self) -> Result<(), TraceError> {
        loop {
            let offset = self.buffer.offset();
            match self.token() {
                Some(b'"') => {}
                Some(b'}') => {
                    return Err(self.error(
                        offset,
                        "it is JSON but no trace: it has no `traceEvents`; give the file that torch.profiler's export_chrome_trace wrote",
                    ));
                }
                Some(_) => {
                    return Err(self.error(
                        self.buffer.offset(),
                        "is not JSON: a name in quotes belongs here; record the trace again",
                    ));
                }
                None => break,
            }
            let offset = self.buffer.offset();
            let key = loop {
                let mut cursor = Cursor::new(self.buffer.bytes());
                match cursor.string().and_then(|key| cursor.expect(b':').map(|()| key)) {
                    Ok(key) => break Some((key == b"traceEvents", key == b"nodes", cursor.at)),
                    Err(Stop::Bad(at)) => {
                        return Err(self.error(
                            offset + at as u64,
                            "is not JSON: a colon belongs here; record the trace again",
                        ));
                    }
                    Err(Stop::More) => match self.buffer.more() {
                        More::Yes => {}
                        More::Ended => break None,
                        More::Full => {
                            return Err(self.error(
                                offset,
                                format!(
                                    "a name longer than {}; give another file",
                                    Bytes(self.limits.event_bytes as u64)
                                ),
                            ));
                        }
                    },
                }
            };
            let Some((events, nodes, length)) = key else { break };
            self.buffer.advance(length);
            match self.token() {
                Some(b'[') if events => {
                    self.buffer.advance(1);
                    return self.events();
                }
                Some(b'[') if nodes => {
                    return Err(self.error(offset, "it is an execution trace (it has `nodes`), which has no memory events: `neap import` reads it; for an estimate give what torch.profiler's export_chrome_trace wrote"));
                }
                Some(_) if self.skip() => {}
                _ => break,
            }
        }
        self.cut = Some(self.end());
        Ok(())
    }

    /// The length of the stream, once it was read to its end.
    fn end(&self) -> u64 {
        self.buffer.offset() + self.buffer.bytes().len() as u64
    }

    /// Reads the events, up to the end of their array.
    fn events(&mut self) -> Result<(), TraceError> {
        loop {
            match self.token() {
                Some(b']') => {
                    self.buffer.advance(1);
                    return Ok(());
                }
                Some(b'{') => self.event()?,
                Some(b'"' | b'[' | b'0'..=b'9' | b'-' | b'n' | b't' | b'f') => {
                    self.skip();
                }
                Some(_) => self.damage(0)?,
                None => {
                    self.cut.get_or_insert(self.end());
                    return Ok(());
                }
            }
        }
    }

    fn event(&mut self) -> Result<(), TraceError> {
        loop {
            let offset = self.buffer.offset();
            match Event::parse(self.buffer.bytes()) {
                Ok((event, length)) => {
                    if let Err(problem) = self.keeper.add(&event, offset) {
                        return Err(self.error(offset, problem));
                    }
                    self.buffer.advance(length);
                    return Ok(());
                }
                Err(Stop::Bad(at)) => return self.damage(at as u64),
                Err(Stop::More) => match self.buffer.more() {
                    More::Yes => {}
                    More::Ended => {
                        self.cut = Some(self.end());
                        self.buffer.advance(usize::MAX);
                        return Ok(());
                    }
                    More::Full => {
                        self.oversized += 1;
                        self.skip();
                        return Ok(());
                    }
                },
            }
        }
    }

    /// Continues with the next object that looks like an event, after an event that is damaged `at`
    /// bytes from its start.
    fn damage(&mut self, at: u64) -> Result<(), TraceError> {
        let offset = self.buffer.offset() + at;
        if self.damaged == 0 {
            self.damaged_at = offset;
        }
        self.damaged += 1;
        if self.damaged > DAMAGED && self.damaged > self.keeper.events / 100 {
            return Err(self.error(
                self.damaged_at,
                format!("is not JSON, here and in {} events by byte {offset}: copy the file or record the trace again", self.damaged),
            ));
        }
        self.buffer.advance(1);
        loop {
            let bytes = self.buffer.bytes();
            let Some(brace) = bytes.iter().position(|b| *b == b'{') else {
                self.buffer.advance(bytes.len());
                if self.buffer.more() == More::Yes {
                    continue;
                }
                return Ok(());
            };
            let mut cursor = Cursor::new(&bytes[brace + 1..]);
            let key = cursor
                .token()
                .and_then(|byte| if byte == b'"' { cursor.string() } else { Err(Stop::Bad(0)) });
            match key {
                Ok(b"ph" | b"name" | b"cat" | b"pid" | b"tid" | b"ts" | b"args") => {
                    self.buffer.advance(brace);
                    return Ok(());
                }
                Ok(_) | Err(Stop::Bad(_)) => self.buffer.advance(brace + 1),
                Err(Stop::More) => {
                    self.buffer.advance(brace);
                    if self.buffer.more() != More::Yes {
                        self.buffer.advance(1);
                    }
                }
            }
        }
    }

    /// Skips the value at the start of the buffer, whatever its length. Returns false when the file
    /// ends within it.
    fn skip(&mut self) -> bool {
        let (mut depth, mut inside, mut escaped, mut first) = (0u64, false, false, true);
        loop {
            let mut end = None;
            for (at, &byte) in self.buffer.bytes().iter().enumerate() {
                let scalar_ends = !first && depth == 0 && !inside;
                first = false;
                match byte {
                    _ if escaped => escaped = false,
                    b'\\' if inside => escaped = true,
                    b'"' => {
                        inside = !inside;
                        if !inside && depth == 0 {
                            end = Some(at + 1);
                            break;
                        }
                    }
                    _ if inside => {}
                    b'{' | b'[' => depth += 1,
                    b'}' | b']' if depth > 0 => {
                        depth -= 1;
                        if depth == 0 {
                            end = Some(at + 1);
                            break;
                        }
                    }
                    b'}' | b']' | b',' | 0..=b' ' if scalar_ends => {
                        end = Some(at);
                        break;
                    }
                    _ => {}
                }
            }
            let length = self.buffer.bytes().len();
            self.buffer.advance(end.unwrap_or(length));
            if end.is_some() {
                return true;
            }
            if self.buffer.more() != More::Yes {
                self.cut = Some(self.end());
                return false;
            }
        }
    }

    fn finish(mut self) -> Result<Trace, TraceError> {
        let mut notes = Vec::new();
        let end = self.end();
        if let Some(cause) = self.buffer.broken.take() {
            // gzip's reader gives these errors when its data is cut off or damaged; others come
            // from the file system.
            match cause.kind() {
                io::ErrorKind::UnexpectedEof => self.cut = Some(end),
                io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData => {
                    if !self.keeper.has_memory() {
                        return Err(self.error(
                            end,
                            "the file's compression is damaged here, before any memory event: copy it or record the trace again",
                        ));
                    }
                    notes.push(format!("The file's compression is damaged after byte {end} of the trace: what comes after was not read."));
                    self.cut = None;
                }
                _ => {
                    return Err(TraceError::Read {
                        path: self.path.to_owned(),
                        offset: end,
                        cause,
                    });
                }
            }
        }
        if let Some(at) = self.cut {
            notes.push(format!(
                "The file ends at byte {at}, in the middle of the trace: what came before was used."
            ));
        }
        if !self.keeper.has_memory() {
            if self.damaged > 0 && self.keeper.events == 0 {
                return Err(self.error(
                    self.damaged_at,
                    "is not JSON from here on: copy the file or record the trace again",
                ));
            }
            let problem = match (notes.is_empty(), self.keeper.events) {
                (false, _) => {
                    "the file ends before any memory event (PyTorch writes them after the operators): copy it or record the trace again"
                }
                (true, 0) => {
                    "it is JSON but no trace: it holds no events; give the file that torch.profiler's export_chrome_trace wrote"
                }
                (true, _) => {
                    "the trace has no `[memory]` event: record it with torch.profiler.profile(profile_memory=True)"
                }
            };
            return Err(self.error(end, problem));
        }
        if self.damaged > 0 {
            notes.push(format!(
                "Events that are not JSON, or nest too deep, were left out: {}, the first at byte {}.",
                self.damaged, self.damaged_at
            ));
        }
        if self.oversized > 0 {
            notes.push(format!(
                "Events longer than {} were left out: {}.",
                Bytes(self.limits.event_bytes as u64),
                self.oversized
            ));
        }
        let path = self.path.to_owned();
        self.keeper.finish(notes, Bytes(end)).map_err(|problem| TraceError::Content {
            path,
            offset: end,
            problem,
        })
    }
}
