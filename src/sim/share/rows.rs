//! Tables of comma-separated rows, whose cells are found by their columns' names.

use std::fmt;
use std::path::Path;

use csv::{ErrorKind, Position, ReaderBuilder, StringRecord, Trim};

use crate::files::{FileError, LineError};
use crate::records::{self, Records};
use crate::units::{Bytes, Nanos, saturated};

/// A table that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RowsError {
    /// The file could not be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// A row is wrong.
    #[error(transparent)]
    Line(#[from] LineError),
}

impl RowsError {
    pub(super) fn at(path: &Path, line: u64, problem: impl Into<String>) -> Self {
        LineError { path: path.to_owned(), line, problem: problem.into() }.into()
    }
}

/// A row.
pub struct Row<'a> {
    /// Its line, from 1 with the header.
    pub line: u64,
    record: &'a StringRecord,
    names: &'a [&'a str],
    places: &'a [Option<usize>],
}

/// The longest time that is accepted: about 30 years, in seconds.
pub const LONGEST_S: u128 = 1_000_000_000;

/// Reads a table of at most `largest` bytes with columns of these names (with commas between them),
/// of which the `needed` must be there, and hands each row to `each`.
///
/// # Errors
/// An error that names file, line and remedy.
pub fn read(
    path: &Path,
    largest: u64,
    names: &str,
    needed: &str,
    mut each: impl FnMut(&Row<'_>) -> Result<(), String>,
) -> Result<(), RowsError> {
    let names: &Vec<&str> = &names.split(',').collect();
    open(
        path,
        largest,
        |headers| {
            let (odd, all) = (headers.iter().find(|h| !names.contains(h)), names.join(", "));
            if let Some(odd) = odd {
                return Err(format!("there is no column `{odd}`; the columns are {all}"));
            }
            let twice = |name: &&&str| headers.iter().filter(|h| h == *name).count() > 1;
            if let Some(twice) = names.iter().find(twice) {
                return Err(format!("the column `{twice}` stands there twice; keep one"));
            }
            if let Some(missing) =
                needed.split(',').find(|name| !headers.iter().any(|h| h == *name))
            {
                return Err(format!("the column `{missing}` is missing; the columns are {all}"));
            }
            Ok(names.iter().map(|name| headers.iter().position(|h| h == *name)).collect::<Vec<_>>())
        },
        |places, record, line| each(&Row { line, record, names, places }),
    )
}

/// Reads a table: what `head` makes of its headers goes to `each`, with each record and its line.
pub(super) fn open<H>(
    path: &Path,
    largest: u64,
    head: impl FnOnce(&StringRecord) -> Result<H, String>,
    mut each: impl FnMut(&H, &StringRecord, u64) -> Result<(), String>,
) -> Result<(), RowsError> {
    let content = Records::open(path, largest)?;
    let mut reader = ReaderBuilder::new().trim(Trim::All).from_reader(content);
    let broken = |error: csv::Error| {
        if let Some((line, problem)) = records::unread(&error) {
            return RowsError::at(path, line, problem);
        }
        let problem = match error.kind() {
            ErrorKind::UnequalLengths { expected_len, len, .. } => {
                format!("has {len} cells where the heading has {expected_len}")
            }
            ErrorKind::Utf8 { .. } => "is not UTF-8 text; save it as such".to_owned(),
            _ => format!("{error}; write comma-separated rows"),
        };
        RowsError::at(path, error.position().map_or(1, Position::line), problem)
    };
    let head = head(reader.headers().map_err(broken)?).map_err(|e| RowsError::at(path, 1, e))?;
    let mut record = StringRecord::new();
    while reader.read_record(&mut record).map_err(broken)? {
        let line = record.position().map_or(0, Position::line);
        each(&head, &record, line).map_err(|problem| RowsError::at(path, line, problem))?;
    }
    Ok(())
}

impl Row<'_> {
    /// The cell in the column of this name, unless it is empty.
    #[must_use]
    pub fn cell(&self, name: &str) -> Option<&str> {
        let at = self.names.iter().position(|column| *column == name)?;
        self.record.get(self.places[at]?).filter(|text| !text.is_empty())
    }

    /// What `parse` makes of a cell, unless it is empty; `what` says what it must be.
    ///
    /// # Errors
    /// When `parse` makes nothing of it.
    pub fn parsed<T>(
        &self,
        name: &str,
        what: impl fmt::Display,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Result<Option<T>, String> {
        let Some(text) = self.cell(name) else { return Ok(None) };
        parse(text).map(Some).ok_or_else(|| format!("{name}: `{text}` is not {what}"))
    }

    /// A time, in seconds.
    ///
    /// # Errors
    /// When the cell holds something else.
    pub fn time(&self, name: &str) -> Result<Option<Nanos>, String> {
        let what = format_args!("a time; write seconds from 0 to {LONGEST_S}, such as 12.5");
        let time = |text: &str| decimal(text).filter(|t| *t <= LONGEST_S * 1_000_000_000);
        self.parsed(name, what, |text| Some(Nanos(saturated(time(text)?))))
    }

    /// A size of at most 1 PiB.
    ///
    /// # Errors
    /// When the cell holds something else.
    pub fn size(&self, name: &str) -> Result<Option<Bytes>, String> {
        self.parsed(name, "a size; write bytes, or a size such as 300MiB", |text| {
            text.parse::<Bytes>().ok().filter(|b| b.0 <= 1 << 50)
        })
    }
}

/// Reads a decimal without sign or exponent, in billionths; further digits round up. The whole part
/// must be below 2^64.
#[must_use]
pub fn decimal(text: &str) -> Option<u128> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let digits = |t: &str| t.bytes().all(|b| b.is_ascii_digit());
    if whole.is_empty() || !digits(whole) || !digits(fraction) || fraction.len() > 40 {
        return None;
    }
    let whole: u64 = whole.parse().ok()?;
    let kept = format!("{:0<9}", &fraction[..fraction.len().min(9)]);
    let rest = fraction.len() > 9 && fraction[9..].bytes().any(|b| b != b'0');
    Some(u128::from(whole) * 1_000_000_000 + kept.parse::<u128>().ok()? + u128::from(rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decimals_are_exact() {
        assert_eq!(decimal("12.5"), Some(12_500_000_000));
        assert_eq!(decimal("0.0000000001"), Some(1));
        for bad in ["", "-1", "1e3", ".5", "nan", "1.2.3", "99999999999999999999"] {
            assert_eq!(decimal(bad), None, "{bad}");
        }
    }
}
