//! Measured latencies: a CSV table whose rows are found by an operator's kind and shapes.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::figure::LONGEST;
use super::key::{argument, key};
use super::library::Chosen;
use super::{Profile, roofline};
use crate::files::{self, FileError, LineError};
use crate::job::{Arg, Operator};
use crate::records::{self, Records};
use crate::units::{Bytes, Nanos};

/// The largest file that is read, far above any table of operators.
const LARGEST_FILE: u64 = 256 << 20;
/// The most rows that are read.
const MOST: usize = 1 << 20;

/// One measurement, as a line of the file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Row {
    /// The operator's name in its graph.
    pub operator: String,
    /// Its kind.
    pub kind: String,
    /// Types and shapes of its tensors, for readers.
    pub shapes: String,
    /// Its other arguments, for readers.
    pub arguments: String,
    /// The device it ran on.
    pub device: String,
    /// How busy other jobs kept the device meanwhile, in percent.
    pub load_percent: u32,
    /// Its latency in nanoseconds.
    pub ns: u64,
    /// Floating-point operations, as the roofline counts them.
    pub flops: Option<u64>,
    /// Bytes of device memory read and written, as the roofline counts them.
    pub bytes: Option<u64>,
    /// The roofline's time for the profile, for comparison.
    pub roofline_ns: Option<u64>,
    /// The library's algorithms that were measured, one for each pass ([`Chosen::text`]). Empty
    /// where the library has no choice.
    pub algorithm: String,
    /// Bytes of the algorithms' workspace.
    pub workspace_bytes: Option<u64>,
    /// The [`key`] by which the row is found.
    pub key: String,
}

impl Row {
    /// The row of a measurement: `operator` took `time` on the device named `device` under no load.
    /// A time below 1 ns counts as 1 ns.
    #[must_use]
    pub fn new(operator: &Operator, device: &str, time: Nanos) -> Self {
        let some = |tensors: bool| {
            let mut out = String::new();
            for arg in &operator.args {
                if tensors == matches!(arg, Arg::Tensor(_) | Arg::Tensors(_) | Arg::Host { .. })
                    && *arg != Arg::None
                {
                    if !out.is_empty() {
                        out.push(' ');
                    }
                    argument(&mut out, arg);
                }
            }
            out
        };
        let count = |n: u128| Some(u64::try_from(n).unwrap_or(u64::MAX));
        Self {
            operator: operator.name.clone(),
            kind: operator.kind.clone(),
            shapes: some(true),
            arguments: some(false),
            device: device.to_owned(),
            load_percent: 0,
            ns: time.0.clamp(1, LONGEST.0),
            flops: count(roofline::flops(operator)),
            bytes: count(roofline::bytes(operator)),
            roofline_ns: None,
            algorithm: String::new(),
            workspace_bytes: None,
            key: key(operator),
        }
    }

    /// The same row with the time of `profile`'s roofline.
    #[must_use]
    pub fn beside(mut self, operator: &Operator, profile: &Profile) -> Self {
        self.roofline_ns = Some(roofline::time(operator, profile).0);
        self
    }

    /// The same row with the library's choice, if there was one.
    #[must_use]
    pub fn by(mut self, chosen: Option<&Chosen>) -> Self {
        if let Some(chosen) = chosen {
            (self.algorithm, self.workspace_bytes) = (chosen.text(), Some(chosen.workspace.0));
        }
        self
    }
}

/// What a table knows about one key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Known {
    /// The median of its rows for each load.
    times: BTreeMap<u32, Nanos>,
    /// The same for each operator's name. Operators with the same key differ in time because the
    /// caches hold different data before them.
    named: BTreeMap<(String, u32), Nanos>,
    /// The choice of the first row that names one.
    chosen: Option<Chosen>,
}

/// A measured table: for each key the median of its rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    known: BTreeMap<String, Known>,
    devices: BTreeSet<String>,
}

/// Why a table could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum LatencyError {
    /// The file could not be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// A line or a column is wrong.
    #[error(transparent)]
    Line(#[from] LineError),
    /// It has no rows.
    #[error("{}: the table has no rows below its header; `neap profile` and `neap run --latencies-out` write such tables", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
}

/// Reads the rows of a table, plain or gzip. The table is CSV with a header that has at least the
/// columns `key` and `ns`. The other fields of [`Row`] may be missing or empty.
///
/// # Errors
/// When the file can't be read, a row is malformed, a time is not a whole number from 1 to
/// [`LONGEST`], or there is no row. The error names file, line and column.
pub fn rows(path: &Path) -> Result<Vec<Row>, LatencyError> {
    let at = |line, problem| LatencyError::from(LineError { path: path.to_owned(), line, problem });
    let broken = |error: csv::Error| {
        if let Some((line, problem)) = records::unread(&error) {
            return at(line, problem);
        }
        let line = error.position().map_or(1, csv::Position::line);
        let problem = match error.kind() {
            csv::ErrorKind::UnequalLengths { expected_len, len, .. } => {
                format!(
                    "it has {len} columns and the header {expected_len}; quote what contains commas"
                )
            }
            csv::ErrorKind::Utf8 { err, .. } => {
                format!("column {} is not UTF-8 text", err.field() + 1)
            }
            _ => error.to_string(),
        };
        at(line, problem)
    };
    let mut reader = csv::Reader::from_reader(Records::open(path, LARGEST_FILE)?);
    let columns = columns(reader.headers().map_err(broken)?).map_err(|problem| at(1, problem))?;
    let mut rows = Vec::new();
    for record in reader.records() {
        let record = record.map_err(broken)?;
        let line = record.position().map_or(0, csv::Position::line);
        if rows.len() == MOST {
            return Err(at(line, format!("more than {MOST} rows; leave some out")));
        }
        rows.push(row(&columns, &record).map_err(|problem| at(line, problem))?);
    }
    if rows.is_empty() {
        return Err(LatencyError::Empty { path: path.to_owned() });
    }
    Ok(rows)
}

/// The position in the header of every column that [`Row`] has. An error says what is wrong.
fn columns(header: &csv::StringRecord) -> Result<BTreeMap<&'static str, usize>, String> {
    let column = |name: &str| header.iter().position(|h| h.trim() == name);
    for name in ["key", "ns"] {
        if column(name).is_none() {
            return Err(format!("the header has no column `{name}`; it must have `key` and `ns`"));
        }
    }
    let twice = |name: &&str| header.iter().filter(|h| h.trim() == *name).count() > 1;
    if let Some(name) = ["key", "ns", "device", "load_percent"].iter().find(|name| twice(name)) {
        return Err(format!("the header has `{name}` twice; rename one"));
    }
    const NAMES: [&str; 13] = [
        "key",
        "ns",
        "operator",
        "kind",
        "shapes",
        "arguments",
        "device",
        "algorithm",
        "load_percent",
        "flops",
        "bytes",
        "roofline_ns",
        "workspace_bytes",
    ];
    Ok(NAMES.into_iter().filter_map(|name| Some((name, column(name)?))).collect())
}

/// Parses one row. An error names the column.
fn row(columns: &BTreeMap<&'static str, usize>, record: &csv::StringRecord) -> Result<Row, String> {
    let field =
        |name: &str| columns.get(name).and_then(|&index| record.get(index)).unwrap_or_default();
    let text = |name: &str| field(name).to_owned();
    let whole = |name: &str, low: u64, high: u64, what: &str| match field(name).trim() {
        "" if name != "ns" => Ok(None),
        digits => match digits.parse::<u64>().ok().filter(|x| (low..=high).contains(x)) {
            Some(number) => Ok(Some(number)),
            None => Err(format!(
                "column `{name}` is `{}`; it must be {what} from {low} to {high}",
                field(name)
            )),
        },
    };
    if field("key").is_empty() {
        return Err("column `key` is empty".to_owned());
    }
    let algorithm = text("algorithm");
    if !algorithm.is_empty() && Chosen::read(&algorithm, Bytes::ZERO).is_none() {
        return Err(format!(
            "column `algorithm` is `{algorithm}`; it must be a library's numbers with `;` between them"
        ));
    }
    Ok(Row {
        operator: text("operator"),
        kind: text("kind"),
        shapes: text("shapes"),
        arguments: text("arguments"),
        device: text("device"),
        load_percent: whole("load_percent", 0, 100, "a percentage")?
            .and_then(|x| u32::try_from(x).ok())
            .unwrap_or(0),
        ns: whole("ns", 1, LONGEST.0, "whole nanoseconds")?.unwrap_or(1),
        flops: whole("flops", 0, u64::MAX, "a whole number")?,
        bytes: whole("bytes", 0, u64::MAX, "whole bytes")?,
        roofline_ns: whole("roofline_ns", 1, LONGEST.0, "whole nanoseconds")?,
        algorithm,
        workspace_bytes: whole("workspace_bytes", 0, 1 << 60, "whole bytes")?,
        key: text("key"),
    })
}

impl Table {
    /// Reads a table as [`rows`] does. Several rows of one key under one load count as their
    /// median; between the middle two it is rounded down.
    ///
    /// # Errors
    /// As [`rows`].
    pub fn read(path: &Path) -> Result<Self, LatencyError> {
        Ok(Self::of_rows(&rows(path)?))
    }

    /// The table of these rows.
    #[must_use]
    pub fn of_rows(rows: &[Row]) -> Self {
        let mut times: BTreeMap<(&str, u32), Vec<u64>> = BTreeMap::new();
        let mut named: BTreeMap<(&str, &str, u32), Vec<u64>> = BTreeMap::new();
        let mut known: BTreeMap<String, Known> = BTreeMap::new();
        for row in rows {
            times.entry((&row.key, row.load_percent)).or_default().push(row.ns);
            if !row.operator.is_empty() {
                named.entry((&row.key, &row.operator, row.load_percent)).or_default().push(row.ns);
            }
            let known = known.entry(row.key.clone()).or_default();
            if known.chosen.is_none() {
                known.chosen =
                    Chosen::read(&row.algorithm, Bytes(row.workspace_bytes.unwrap_or(0)));
            }
        }
        for ((key, load), all) in times {
            known.entry(key.to_owned()).or_default().times.insert(load, Nanos(median(all)));
        }
        for ((key, name, load), all) in named {
            known
                .entry(key.to_owned())
                .or_default()
                .named
                .insert((name.to_owned(), load), Nanos(median(all)));
        }
        let devices =
            rows.iter().filter(|r| !r.device.is_empty()).map(|r| r.device.clone()).collect();
        Self { known, devices }
    }

    /// Writes rows as a table that [`Table::read`] understands.
    ///
    /// # Errors
    /// When the file can't be written.
    pub fn write(path: &Path, rows: &[Row]) -> Result<(), LatencyError> {
        files::write(path, |out| {
            let mut writer = csv::Writer::from_writer(out);
            for row in rows {
                writer.serialize(row)?;
            }
            writer.flush()
        })?;
        Ok(())
    }

    /// The time of an operator's [`key`] under the least load that was measured.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<Nanos> {
        self.known.get(key)?.times.values().next().copied()
    }

    /// The time of an operator at the measured load nearest to `load`; of two loads that are as
    /// near, the lower one. Rows with the operator's name and key come before rows with its key
    /// only.
    #[must_use]
    pub fn time(&self, operator: &Operator, load: u32) -> Option<Nanos> {
        let known = self.known.get(&key(operator))?;
        let nearest = *known.times.keys().min_by_key(|l| l.abs_diff(load))?;
        known
            .named
            .get(&(operator.name.clone(), nearest))
            .or_else(|| known.times.get(&nearest))
            .copied()
    }

    /// The algorithms that were measured for an operator's [`key`], and the scratch they take.
    #[must_use]
    pub fn chosen(&self, key: &str) -> Option<&Chosen> {
        self.known.get(key)?.chosen.as_ref()
    }

    /// The devices that its rows name, sorted, so that a command can warn when they are not the
    /// planned one.
    pub fn devices(&self) -> impl Iterator<Item = &str> {
        self.devices.iter().map(String::as_str)
    }
}

/// The median of at least one number.
pub(super) fn median(mut all: Vec<u64>) -> u64 {
    all.sort_unstable();
    let upper = all.len() / 2;
    if all.len() % 2 == 1 { all[upper] } else { all[upper - 1].midpoint(all[upper]) }
}

#[cfg(test)]
mod tests;
