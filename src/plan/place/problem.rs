//! Placement problems: reads them from CSV, and writes the answer.
//!
//! A problem has a header and a row for each item: `id`, `lower` and `upper` (alive during the
//! half-open `lower..upper`) and `size`. Optional are `alignment` (the offset is a multiple of it)
//! and `offset` (a given offset, or empty). Other columns are ignored.

use std::collections::HashMap;
use std::io::Write;
use std::path::{Path, PathBuf};

use super::check::{self, Held};
use super::{Item, Layout};
use crate::files::FileError;
use crate::records::{self, Records};

/// The most rows that are read: with more, first fit alone would take minutes.
pub const ROWS: usize = 100_000;

/// The largest file in bytes, decompressed.
const LARGEST_FILE: u64 = 1 << 26;

/// The largest size, offset and alignment, so that no sum of them wraps.
const LARGEST: u64 = 1 << 44;

/// A problem that could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ProblemError {
    /// The file could not be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// A line is wrong.
    #[error("{}: line {line}: {problem}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The line, from 1 with the header.
        line: u64,
        /// What is wrong, and the remedy.
        problem: String,
    },
}

/// A row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its name.
    pub id: String,
    /// The first moment at which it is alive.
    pub lower: u64,
    /// The first moment at which it is no longer alive.
    pub upper: u64,
    /// Its size.
    pub size: u64,
    /// Its alignment: its offset is a multiple of this.
    pub alignment: u64,
    /// Its offset, if that is given.
    pub offset: Option<u64>,
}

/// A problem.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Problem {
    /// In the order of the file.
    pub entries: Vec<Entry>,
}

/// The position of each column.
struct Columns {
    id: usize,
    lower: usize,
    upper: usize,
    size: usize,
    alignment: Option<usize>,
    offset: Option<usize>,
}

impl Columns {
    fn parse(header: &csv::StringRecord) -> Result<Self, String> {
        let at = |name: &str| {
            let mut found =
                header.iter().enumerate().filter(|(_, h)| h.trim() == name).map(|(at, _)| at);
            match (found.next(), found.next()) {
                (_, Some(_)) => Err(format!("the column `{name}` is there twice; remove one")),
                (found, None) => Ok(found),
            }
        };
        let must = |name: &str| {
            at(name)?.ok_or_else(|| {
                format!("there is no column `{name}`; the header is id,lower,upper,size")
            })
        };
        Ok(Self {
            id: must("id")?,
            lower: must("lower")?,
            upper: must("upper")?,
            size: must("size")?,
            alignment: at("alignment")?,
            offset: at("offset")?,
        })
    }
}

impl Problem {
    /// Reads `path`, which may be gzipped.
    ///
    /// # Errors
    /// When it can't be read, has no items or too many, or a line is wrong. The error names the
    /// line and the remedy.
    pub fn read(path: &Path) -> Result<Self, ProblemError> {
        let content = Records::open(path, LARGEST_FILE)?;
        let fail = |line: u64, problem: String| ProblemError::Line {
            path: path.to_owned(),
            line,
            problem,
        };
        let mut reader = csv::ReaderBuilder::new().has_headers(false).from_reader(content);
        let mut record = csv::StringRecord::new();
        let mut columns = None;
        let mut problem = Self::default();
        let mut lines: HashMap<String, u64> = HashMap::new();
        let mut place: Vec<u64> = Vec::new();
        loop {
            match reader.read_record(&mut record) {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => {
                    if let Some((line, problem)) = records::unread(&error) {
                        return Err(fail(line, problem));
                    }
                    let line = error.position().map_or(1, csv::Position::line);
                    let what = match error.kind() {
                        csv::ErrorKind::Utf8 { .. } => {
                            "is not UTF-8 text; write it as plain CSV".to_owned()
                        }
                        csv::ErrorKind::UnequalLengths { expected_len, len, .. } => {
                            format!(
                                "has {len} columns where the header has {expected_len}; give every row as many"
                            )
                        }
                        _ => format!("cannot be read as CSV ({error}); write id,lower,upper,size"),
                    };
                    return Err(fail(line, what));
                }
            }
            let line = record.position().map_or(1, csv::Position::line);
            let Some(columns) = &columns else {
                columns = Some(Columns::parse(&record).map_err(|e| fail(line, e))?);
                continue;
            };
            if problem.entries.len() == ROWS {
                return Err(fail(
                    line,
                    format!("more than {ROWS} items; split the problem where nothing is alive"),
                ));
            }
            let entry = entry(&record, columns).map_err(|e| fail(line, e))?;
            if let Some(first) = lines.insert(entry.id.clone(), line) {
                return Err(fail(
                    line,
                    format!(
                        "the id `{}` stands on line {first} already; give each item its own",
                        entry.id
                    ),
                ));
            }
            place.push(line);
            problem.entries.push(entry);
        }
        if columns.is_none() {
            return Err(fail(
                1,
                "the file is empty; write a header id,lower,upper,size and a row for each item"
                    .to_owned(),
            ));
        }
        if problem.entries.is_empty() {
            return Err(fail(
                1,
                "there are no items; write a row id,lower,upper,size for each".to_owned(),
            ));
        }
        // Given offsets that overlap are an error of the file.
        let given: Vec<Held> = problem
            .entries
            .iter()
            .enumerate()
            .filter_map(|(i, e)| Some(held(i, e, e.offset?)))
            .collect();
        if let Err(check::Fault::Overlap(a, b)) = check::check(&given, u64::MAX) {
            let (a, b) = (a.min(b), a.max(b));
            let other = place[a];
            return Err(fail(
                place[b],
                format!(
                    "its given offset clashes with that of line {other}; leave one of them empty"
                ),
            ));
        }
        Ok(problem)
    }

    /// Its items. Moments at or above 2^32 are replaced by their rank among all moments.
    #[must_use]
    pub fn items(&self) -> Vec<Item> {
        let all_small = self.entries.iter().all(|e| u32::try_from(e.upper).is_ok());
        let mut moments: Vec<u64> = self.entries.iter().flat_map(|e| [e.lower, e.upper]).collect();
        moments.sort_unstable();
        moments.dedup();
        let rank = |moment: u64| {
            let at =
                if all_small { moment } else { moments.partition_point(|&m| m < moment) as u64 };
            u32::try_from(at).unwrap_or(u32::MAX)
        };
        let item = |e: &Entry| Item {
            bytes: e.size,
            spans: vec![(rank(e.lower), rank(e.upper))],
            align: e.alignment,
            fixed: e.offset,
        };
        self.entries.iter().map(item).collect()
    }

    /// The moment from which the most bytes are alive, and how many these are.
    #[must_use]
    pub fn fullest(&self) -> (u64, u64) {
        let mut changes: Vec<(u64, bool, u64)> = self
            .entries
            .iter()
            .flat_map(|e| [(e.lower, true, e.size), (e.upper, false, e.size)])
            .collect();
        changes.sort_unstable();
        let (mut level, mut most) = (0, (0, 0));
        for (moment, begins, size) in changes {
            level = if begins { level + size } else { level - size };
            if level > most.1 {
                most = (moment, level);
            }
        }
        most
    }

    /// Proves a layout of this problem. Returns its height.
    ///
    /// # Errors
    /// What is wrong, and in which rows.
    pub fn check(&self, layout: &Layout, capacity: u64) -> Result<u64, String> {
        if layout.offsets.len() != self.entries.len() {
            return Err("there is not one offset for each item".to_owned());
        }
        for (entry, &offset) in self.entries.iter().zip(&layout.offsets) {
            if !offset.is_multiple_of(entry.alignment) || entry.offset.is_some_and(|o| o != offset)
            {
                return Err(format!("item `{}` is not at its given offset or alignment", entry.id));
            }
        }
        let all: Vec<Held> = self
            .entries
            .iter()
            .zip(&layout.offsets)
            .enumerate()
            .map(|(i, (e, &o))| held(i, e, o))
            .collect();
        check::check(&all, capacity).map_err(|fault| match fault {
            check::Fault::Overlap(a, b) => {
                format!(
                    "items `{}` and `{}` share bytes while both are alive",
                    self.entries[a].id, self.entries[b].id
                )
            }
            check::Fault::TooHigh(a) => {
                format!("item `{}` ends above the capacity", self.entries[a].id)
            }
        })
    }

    /// Writes `id,lower,upper,size,offset`.
    ///
    /// # Errors
    /// When `out` can't be written.
    pub fn write(&self, layout: &Layout, out: &mut dyn Write) -> std::io::Result<()> {
        let mut writer = csv::Writer::from_writer(out);
        writer.write_record(["id", "lower", "upper", "size", "offset"])?;
        for (e, offset) in self.entries.iter().zip(&layout.offsets) {
            writer.write_record([
                &*e.id,
                &e.lower.to_string(),
                &e.upper.to_string(),
                &e.size.to_string(),
                &offset.to_string(),
            ])?;
        }
        writer.flush()
    }
}

const fn held(owner: usize, entry: &Entry, offset: u64) -> Held {
    Held { owner, from: entry.lower, until: entry.upper, offset, size: entry.size }
}

fn entry(record: &csv::StringRecord, columns: &Columns) -> Result<Entry, String> {
    let text = |at: usize| record.get(at).unwrap_or_default().trim();
    let number = |name: &str, text: &str| -> Result<u64, String> {
        text.parse()
            .map_err(|_| format!("{name} is `{text}`; write a whole number from 0 to {}", u64::MAX))
    };
    let limited = |name: &str, at: usize, least: u64| {
        let value = number(name, text(at))?;
        if value < least || value > LARGEST {
            return Err(format!("{name} is {value}; write a number from {least} to {LARGEST}"));
        }
        Ok(value)
    };
    let given =
        |name: &str, at: Option<usize>, least: u64| match at.filter(|&at| !text(at).is_empty()) {
            Some(at) => limited(name, at, least).map(Some),
            None => Ok(None),
        };
    let entry = Entry {
        id: text(columns.id).to_owned(),
        lower: number("lower", text(columns.lower))?,
        upper: number("upper", text(columns.upper))?,
        size: limited("size", columns.size, 1)?,
        alignment: given("alignment", columns.alignment, 1)?.unwrap_or(1),
        offset: given("offset", columns.offset, 0)?,
    };
    if entry.id.is_empty() {
        return Err("the id is empty; give each item its own".to_owned());
    }
    if entry.lower >= entry.upper {
        return Err(format!(
            "lower is {}, upper {}; lower must be less, as upper is the first moment after",
            entry.lower, entry.upper
        ));
    }
    if let Some(offset) = entry.offset.filter(|o| !o.is_multiple_of(entry.alignment)) {
        return Err(format!(
            "the offset {offset} is not a multiple of the alignment {}; change one of them",
            entry.alignment
        ));
    }
    Ok(entry)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Problem, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("p.csv");
        std::fs::write(&path, text).unwrap();
        Problem::read(&path)
            .map_err(|e| e.to_string().replace(&path.display().to_string(), "p.csv"))
    }

    #[test]
    fn rows_read_and_answers_written() {
        let problem = read("size,id,lower,upper,note,alignment,offset\n4,a,0,18446744073709551615,x,,\n2,b,5,7,y,8,16\n").unwrap();
        assert_eq!(problem.fullest(), (5, 6));
        let items = problem.items();
        assert_eq!(
            (items[0].spans[0], items[1].spans[0], items[1].align, items[1].fixed),
            ((0, 3), (1, 2), 8, Some(16))
        );
        let layout = Layout { offsets: vec![0, 16], height: 18 };
        assert_eq!(problem.check(&layout, 18), Ok(18));
        assert!(problem.check(&layout, 17).unwrap_err().contains("`b` ends above"));
        assert!(
            problem
                .check(&Layout { offsets: vec![15, 16], height: 19 }, 99)
                .unwrap_err()
                .contains("share bytes")
        );
        assert!(
            problem
                .check(&Layout { offsets: vec![0, 24], height: 26 }, 99)
                .unwrap_err()
                .contains("alignment")
        );
        let mut out = Vec::new();
        problem.write(&layout, &mut out).unwrap();
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "id,lower,upper,size,offset\na,0,18446744073709551615,4,0\nb,5,7,2,16\n"
        );
    }

    #[test]
    fn mistakes_are_named_by_line() {
        let head = "id,lower,upper,size\n";
        for (text, words) in [
            (String::new(), "line 1: the file is empty"),
            (head.to_owned(), "there are no items"),
            ("id,lower,upper\n1,2,3\n".to_owned(), "line 1: there is no column `size`"),
            ("id,id,lower,upper,size\n".to_owned(), "twice"),
            (format!("{head}a,0,1,1\na,0,1,1\n"), "line 3: the id `a` stands on line 2"),
            (format!("{head}a,1,1,1\n"), "line 2: lower is 1, upper 1"),
            (format!("{head}a,2,1,1\n"), "lower must be less"),
            (format!("{head}a,0,1,0\n"), "line 2: size is 0"),
            (format!("{head}a,0,1,99999999999999999\n"), "write a number from 1 to"),
            (format!("{head}a,0,1,99999999999999999999999\n"), "whole number"),
            (format!("{head}a,-1,1,1\n"), "lower is `-1`"),
            (format!("{head},0,1,1\n"), "the id is empty"),
            (format!("{head}a,0,1\n"), "line 2: has 3 columns where the header has 4"),
            (
                "id,lower,upper,size,offset\na,0,2,2,0\nb,1,2,2,1\n".to_owned(),
                "line 3: its given offset clashes with that of line 2",
            ),
            ("id,lower,upper,size,offset,alignment\na,0,2,2,3,2\n".to_owned(), "not a multiple"),
        ] {
            let problem = read(&text).unwrap_err();
            assert!(
                problem.starts_with("p.csv: line ") && problem.contains(words),
                "{text}: {problem}"
            );
        }
    }
}
