//! A moving window on a stream, and a thread that reads and decompresses ahead of it.
//!
//! The trace reader needs each event in one piece, but never the whole file.

use std::io::{self, Read};
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use super::read::TraceError;
use crate::files;

/// The buffer's first size; it grows when one event needs more.
const FIRST: usize = 1 << 20;
/// Bytes that the reading thread hands over at once.
const CHUNK: usize = 1 << 18;

/// A window on a stream.
pub(super) struct Buffer<R> {
    source: R,
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    /// Bytes of the stream before `buffer`.
    passed: u64,
    limit: usize,
    ended: bool,
    /// Why the stream ended early, if it did.
    pub broken: Option<io::Error>,
}

/// The result of asking for more bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum More {
    /// There are more bytes now.
    Yes,
    /// The stream is at its end.
    Ended,
    /// The buffer has reached its largest size.
    Full,
}

impl<R: Read> Buffer<R> {
    /// A buffer of at most `limit` bytes.
    pub fn new(source: R, limit: usize) -> Self {
        Self {
            source,
            buffer: vec![0; FIRST.min(limit).max(1)],
            start: 0,
            end: 0,
            passed: 0,
            limit,
            ended: false,
            broken: None,
        }
    }

    /// The bytes in the buffer.
    pub fn bytes(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    /// Offset in the stream at which the buffer begins.
    pub fn offset(&self) -> u64 {
        self.passed + self.start as u64
    }

    /// Drops `bytes` bytes from the buffer's start.
    pub fn advance(&mut self, bytes: usize) {
        self.start += bytes.min(self.end - self.start);
    }

    /// Fills the buffer up. A stream that fails counts as ended, and `broken` says why.
    pub fn more(&mut self) -> More {
        if self.ended {
            return More::Ended;
        }
        if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            self.passed += self.start as u64;
            self.end -= self.start;
            self.start = 0;
        }
        if self.end == self.buffer.len() {
            if self.buffer.len() >= self.limit {
                return More::Full;
            }
            self.buffer.resize((self.buffer.len() * 2).min(self.limit), 0);
        }
        let before = self.end;
        while self.end < self.buffer.len() && !self.ended {
            match self.source.read(&mut self.buffer[self.end..]) {
                Ok(0) => self.ended = true,
                Ok(n) => self.end += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => {
                    self.broken = Some(e);
                    self.ended = true;
                }
            }
        }
        if self.end > before { More::Yes } else { More::Ended }
    }
}

/// A file read and decompressed by a thread of its own, a few chunks ahead.
pub(super) struct Ahead {
    chunks: Receiver<io::Result<Vec<u8>>>,
    empty: SyncSender<Vec<u8>>,
    chunk: Vec<u8>,
    at: usize,
}

impl Ahead {
    /// Opens `path`.
    pub fn open(path: &Path) -> Result<Self, TraceError> {
        let (opened, whether) = sync_channel(1);
        let (full, chunks) = sync_channel(4);
        let (empty, recycled) = sync_channel(8);
        let file = path.to_owned();
        // The thread ends by itself when the other end of either channel is gone.
        let reading = move || {
            let mut reader = match files::open(&file) {
                Ok(reader) => reader,
                Err(e) => return drop(opened.send(Err(e))),
            };
            if opened.send(Ok(())).is_err() {
                return;
            }
            loop {
                let mut chunk: Vec<u8> = recycled.try_recv().unwrap_or_default();
                chunk.resize(CHUNK, 0);
                let result = loop {
                    match reader.read(&mut chunk) {
                        Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                        other => break other,
                    }
                };
                let (last, message) = match result {
                    Ok(n) => {
                        chunk.truncate(n);
                        (n == 0, Ok(chunk))
                    }
                    Err(e) => (true, Err(e)),
                };
                if full.send(message).is_err() || last {
                    return;
                }
            }
        };
        let cannot = |cause| TraceError::Thread { path: path.to_owned(), cause };
        thread::Builder::new().spawn(reading).map_err(cannot)?;
        whether.recv().map_err(|_| cannot(io::Error::other("it ended early")))??;
        Ok(Self { chunks, empty, chunk: Vec::new(), at: 0 })
    }
}

impl Read for Ahead {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.at == self.chunk.len() {
            let Ok(message) = self.chunks.recv() else { return Ok(0) };
            let old = std::mem::replace(&mut self.chunk, message?);
            drop(self.empty.try_send(old));
            self.at = 0;
        }
        let n = buffer.len().min(self.chunk.len() - self.at);
        buffer[..n].copy_from_slice(&self.chunk[self.at..self.at + n]);
        self.at += n;
        Ok(n)
    }
}
