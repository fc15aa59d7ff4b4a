//! Tables of comma-separated rows as files give them: of any size, and perhaps made to fill memory.

use std::io::{self, BufRead, Read};
use std::path::Path;

use crate::files::{self, FileError};
use crate::units::Bytes;

/// The longest row that is read, in bytes.
pub const LONGEST: u64 = 64 << 10;

/// A table's text. Reading fails at a row longer than [`LONGEST`], so that what parses it takes no
/// more memory than for that, and where the whole is too large.
pub struct Records {
    inner: Box<dyn BufRead>,
    largest: u64,
    left: u64,
    line: u64,
    /// The line on which the present row begins, and its bytes so far.
    first: u64,
    row: u64,
    place: Place,
}

/// Where in a row the text is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    /// At a cell's first byte.
    Begins,
    /// In a cell without quotes.
    Plain,
    /// Behind a quote that closes, unless another one follows.
    Closed,
    /// Between quotes, where a line's end is part of the cell.
    Quoted,
}

/// Why a row can't be read.
#[derive(Debug, thiserror::Error)]
#[error("{problem}")]
struct Unread {
    line: u64,
    problem: String,
}

impl Records {
    /// Opens a table, gzipped or not, of which at most `largest` bytes are read.
    ///
    /// # Errors
    /// As [`files::open`].
    pub fn open(path: &Path, largest: u64) -> Result<Self, FileError> {
        let inner = files::open(path)?;
        let place = Place::Begins;
        Ok(Self { inner, largest, left: largest, line: 1, first: 1, row: 0, place })
    }

    fn pass(&mut self, byte: u8) -> io::Result<()> {
        if self.row == 0 {
            self.first = self.line;
        }
        self.row += 1;
        self.place = match (self.place, byte) {
            (Place::Begins | Place::Closed, b'"') => Place::Quoted,
            (Place::Quoted, b'"') => Place::Closed,
            (Place::Quoted, _) => Place::Quoted,
            (_, b',') => Place::Begins,
            (_, b'\n' | b'\r') => {
                self.row = 0;
                Place::Begins
            }
            _ => Place::Plain,
        };
        self.line += u64::from(byte == b'\n');
        if self.row > LONGEST {
            let problem = format!("is longer than {}; this is no such table", Bytes(LONGEST));
            return Err(io::Error::other(Unread { line: self.first, problem }));
        }
        Ok(())
    }
}

impl Read for Records {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer).map_err(|error| match error.kind() {
            io::ErrorKind::Interrupted => error,
            _ => {
                let problem = format!("cannot be read further: {error}; the file may be cut off");
                io::Error::other(Unread { line: self.line, problem })
            }
        })?;
        self.left = self.left.checked_sub(read as u64).ok_or_else(|| {
            let problem = format!("the table is larger than {}; cut it", Bytes(self.largest));
            io::Error::other(Unread { line: self.line, problem })
        })?;
        buffer[..read].iter().try_for_each(|byte| self.pass(*byte))?;
        Ok(read)
    }
}

/// The line of an error of [`Records`], and what is wrong, if it is one.
#[must_use]
pub fn unread(error: &csv::Error) -> Option<(u64, String)> {
    let csv::ErrorKind::Io(error) = error.kind() else { return None };
    let found: &Unread = error.get_ref()?.downcast_ref()?;
    Some((found.line, found.problem.clone()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rows that the parser finds, or the line and the text of the error.
    fn rows(text: &[u8], largest: u64) -> Result<usize, (u64, String)> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.csv");
        std::fs::write(&path, text).unwrap();
        let records = Records::open(&path, largest).unwrap();
        let mut reader = csv::ReaderBuilder::new().flexible(true).from_reader(records);
        let mut count = 0;
        for record in reader.records() {
            record.map_err(|error| unread(&error).unwrap())?;
            count += 1;
        }
        Ok(count)
    }

    #[test]
    fn a_row_of_any_length_is_refused_and_rows_of_any_number_are_read() {
        let most = u64::MAX;
        let long = vec![b','; 1 << 20];
        let (line, why) = rows(&[b"a,b\n1,2\n", &long[..]].concat(), most).unwrap_err();
        assert!(line == 3 && why.contains("is longer than 64.0 KiB"), "{line}: {why}");
        // Quotes hide line ends, and a doubled quote is one of the cell's.
        let hidden = [b"a,b\n\"x\"\"", "\n".repeat(1 << 20).as_bytes(), b"\",1\n"].concat();
        assert_eq!(rows(&hidden, most).unwrap_err().0, 2);
        // A quote within a cell hides nothing.
        let plain = [b"a,b\n".to_vec(), b"3.5\" disk,1\n".repeat(100_000)].concat();
        assert_eq!(rows(&plain, most), Ok(100_000));
        // A gzip that was cut off.
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        std::io::Write::write_all(&mut gzip, &plain).unwrap();
        let packed = gzip.finish().unwrap();
        assert_eq!(rows(&packed, most), Ok(100_000));
        let (line, why) = rows(&packed[..packed.len() / 2], most).unwrap_err();
        assert!(line > 1000 && why.contains("cannot be read further"), "{line}: {why}");
        let (line, why) = rows(&plain, 1 << 16).unwrap_err();
        assert!(line > 1000 && why.contains("larger than"), "{line}: {why}");
    }
}
