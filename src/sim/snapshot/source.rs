//! A stream of bytes with its offset, and an account of the memory that the reader may take.

use std::io::{BufRead, Read};

use super::Problem;
use crate::units::Bytes;

/// Strings longer than this are skipped, not kept.
pub(super) const TEXT: usize = 4096;

const CHUNK: usize = 1 << 16;

/// A stream read in chunks, and the offset reached.
pub(super) struct Source {
    reader: Box<dyn BufRead>,
    chunk: Box<[u8]>,
    at: usize,
    end: usize,
    /// Offset of `chunk` in the decompressed file.
    base: u64,
    text: Vec<u8>,
}

impl Source {
    pub(super) fn new(reader: Box<dyn BufRead>) -> Self {
        Self {
            reader,
            chunk: vec![0; CHUNK].into_boxed_slice(),
            at: 0,
            end: 0,
            base: 0,
            text: Vec::with_capacity(TEXT),
        }
    }

    /// How many bytes have been taken.
    pub(super) fn offset(&self) -> u64 {
        self.base + self.at as u64
    }

    /// Reads the next chunk; `false` at the end. Only called when all of the present chunk is
    /// taken.
    #[cold]
    fn refill(&mut self) -> Result<bool, Problem> {
        self.base += self.end as u64;
        (self.at, self.end) = (0, 0);
        loop {
            match self.reader.read(&mut self.chunk) {
                Ok(n) => {
                    self.end = n;
                    return Ok(n > 0);
                }
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(cause) => return Err(Problem::Unreadable { offset: self.base, cause }),
            }
        }
    }

    /// Whether the stream is at its end. Reaching the end also checks a gzip file's checksum.
    pub(super) fn at_end(&mut self) -> Result<bool, Problem> {
        Ok(self.at == self.end && !self.refill()?)
    }

    /// The bytes of the present chunk that are not taken yet; may be empty.
    pub(super) fn rest(&self) -> &[u8] {
        &self.chunk[self.at..self.end]
    }

    /// Takes `n` bytes of [`Self::rest`].
    pub(super) fn advance(&mut self, n: usize) {
        self.at += n.min(self.end - self.at);
    }

    #[inline]
    pub(super) fn byte(&mut self) -> Result<u8, Problem> {
        if self.at == self.end && !self.refill()? {
            return Err(Problem::CutOff { offset: self.offset() });
        }
        self.at += 1;
        Ok(self.chunk[self.at - 1])
    }

    #[inline]
    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], Problem> {
        let mut all = [0; N];
        if let Some(here) = self.chunk[self.at..self.end].first_chunk::<N>() {
            all = *here;
            self.at += N;
        } else {
            for b in &mut all {
                *b = self.byte()?;
            }
        }
        Ok(all)
    }

    /// Passes over `n` bytes.
    pub(super) fn skip(&mut self, mut n: u64) -> Result<(), Problem> {
        loop {
            let here = n.min((self.end - self.at) as u64);
            #[expect(clippy::cast_possible_truncation, reason = "at most the chunk's length")]
            let taken = here as usize;
            self.at += taken;
            n -= here;
            if n == 0 {
                return Ok(());
            }
            if !self.refill()? {
                return Err(Problem::CutOff { offset: self.offset() });
            }
        }
    }

    /// Takes the next `n` bytes. Returns them, or `None` when they are longer than [`TEXT`].
    #[inline]
    pub(super) fn text(&mut self, n: u64) -> Result<Option<&[u8]>, Problem> {
        if n > TEXT as u64 {
            self.skip(n)?;
            return Ok(None);
        }
        #[expect(clippy::cast_possible_truncation, reason = "at most `TEXT`")]
        let n = n as usize;
        if self.end - self.at >= n {
            self.at += n;
            return Ok(Some(&self.chunk[self.at - n..self.at]));
        }
        self.text.clear();
        for _ in 0..n {
            let b = self.byte()?;
            self.text.push(b);
        }
        Ok(Some(&self.text))
    }

    /// Takes the bytes up to the next newline, and the newline. Returns the bytes, or `None` when
    /// they are longer than [`TEXT`].
    pub(super) fn line(&mut self) -> Result<Option<&[u8]>, Problem> {
        self.text.clear();
        let mut fits = true;
        loop {
            match self.byte()? {
                b'\n' => return Ok(fits.then_some(&self.text)),
                b if self.text.len() < TEXT => self.text.push(b),
                _ => fits = false,
            }
        }
    }
}

/// An account of the memory that the reader may take, charged before memory is taken.
pub(super) struct Budget {
    used: u64,
    limit: u64,
}

impl Budget {
    pub(super) fn new(limit: Bytes) -> Self {
        Self { used: 0, limit: limit.0 }
    }

    /// Charges `more` bytes that stay, and checks that `passing` more bytes fit for now.
    pub(super) fn charge(&mut self, more: u64, passing: u64) -> Result<(), Problem> {
        let used = self.used.saturating_add(more);
        if used.saturating_add(passing) > self.limit {
            return Err(Problem::TooLarge { limit: Bytes(self.limit) });
        }
        self.used = used;
        Ok(())
    }

    /// Takes `bytes` off the account.
    pub(super) fn release(&mut self, bytes: u64) {
        self.used = self.used.saturating_sub(bytes);
    }

    /// Makes room for `more` entries. While a table moves to a larger place, both count.
    #[inline]
    pub(super) fn reserve<T>(&mut self, all: &mut Vec<T>, more: usize) -> Result<(), Problem> {
        if all.capacity() - all.len() >= more { Ok(()) } else { self.grow(all, more) }
    }

    #[cold]
    fn grow<T>(&mut self, all: &mut Vec<T>, more: usize) -> Result<(), Problem> {
        let size = size_of::<T>() as u64;
        let old = all.capacity();
        // A first reservation is exact: most lists of a snapshot are filled once.
        let new = if old == 0 { more } else { (all.len() + more).max(old * 2) };
        self.charge((new - old) as u64 * size, old as u64 * size)?;
        all.reserve_exact(new - all.len());
        Ok(())
    }

    /// Appends to `all`.
    #[inline]
    pub(super) fn push<T>(&mut self, all: &mut Vec<T>, value: T) -> Result<(), Problem> {
        self.reserve(all, 1)?;
        all.push(value);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_join_and_offsets_count() {
        let content: Vec<u8> = (0..200_000u32).map(|i| (i % 251) as u8).collect();
        let mut source = Source::new(Box::new(std::io::BufReader::with_capacity(
            7,
            std::io::Cursor::new(content.clone()),
        )));
        source.skip(65_530).unwrap();
        assert_eq!(source.array::<12>().unwrap(), content[65_530..65_542]);
        assert_eq!(source.text(4000).unwrap().unwrap(), &content[65_542..69_542]);
        assert!(source.text(5000).unwrap().is_none());
        assert_eq!(source.offset(), 74_542);
        assert!(matches!(source.skip(1 << 40), Err(Problem::CutOff { offset: 200_000 })));
        assert!(source.at_end().unwrap());
    }

    #[test]
    fn a_budget_counts_moves_too() {
        let mut budget = Budget::new(Bytes(96));
        let mut all = Vec::new();
        for i in 0..8u64 {
            budget.push(&mut all, i).unwrap();
        }
        assert!(budget.push(&mut all, 8).is_err());
        assert!(all.capacity() <= 8);
    }
}
