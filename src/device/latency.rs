//! How long each operator takes, and where that figure is from.
//!
//! In this order: what the graph's author wrote (`duration_ns`), a measured table
//! (`--latencies FILE.csv`), the [`super::roofline`]. A table's rows are found by [`key`],
//! which names what an operator does and on which shapes, so that a table measured on one graph
//! serves every other. Not for: predicting ([`crate::plan`] gets finished figures).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Profile, roofline};
use crate::files::{self, FileError, LineError};
use crate::job::{Arg, Graph, Operand, Operator};
use crate::units::Nanos;

/// The longest an operator may take: an hour. With it, the times of a million operators still add up
/// far below 2^64 nanoseconds.
pub const LONGEST: Nanos = Nanos(3_600_000_000_000);

/// Larger than any table of operators; a larger file is something else.
const LARGEST_FILE: u64 = 256 << 20;

/// Where a latency came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// The graph's author wrote it down.
    Graph,
    /// A row of the table given with `--latencies`.
    Measured,
    /// Arithmetic and bytes against the device's peaks.
    Roofline,
}

/// How long an operator takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Latency {
    /// At least one nanosecond, at most [`LONGEST`].
    pub time: Nanos,
    /// Where the figure is from.
    pub source: Source,
}

/// A latency for each of the graph's operators, in their order.
#[must_use]
pub fn latencies(graph: &Graph, device: &Profile, table: Option<&Table>) -> Vec<Latency> {
    let of = |operator: &Operator| {
        let (time, source) = if let Some(time) = operator.duration_ns {
            (Nanos(time), Source::Graph)
        } else if let Some(time) = table.and_then(|t| t.get(&key(operator))) {
            (time, Source::Measured)
        } else {
            (roofline::time(operator, device), Source::Roofline)
        };
        Latency { time: time.clamp(Nanos(1), LONGEST), source }
    };
    graph.operators.iter().map(of).collect()
}

/// What an operator does and on which shapes: its kind, then each argument in schema order. A tensor is
/// its type and shape, `f32[16,64,7,7]`, with its strides behind when it is not contiguous. Values of
/// numbers that arrive as tensors on the host are left out; scalar arguments are in.
#[must_use]
pub fn key(operator: &Operator) -> String {
    let mut key = format!("{}(", operator.kind);
    for (index, arg) in operator.args.iter().enumerate() {
        if index > 0 {
            key.push(',');
        }
        argument(&mut key, arg);
    }
    key.push(')');
    key
}

fn argument(out: &mut String, arg: &Arg) {
    // Writing to a String cannot fail.
    let _ = match arg {
        Arg::None => write!(out, "-"),
        Arg::Tensor(operand) => view(out, operand),
        Arg::Tensors(operands) => list(out, operands, |out, one| match one {
            Some(operand) => view(out, operand),
            None => write!(out, "-"),
        }),
        Arg::Host { dtype, shape, .. } => write!(out, "host ").and_then(|()| typed(out, *dtype, shape)),
        Arg::Int(x) => write!(out, "{x}"),
        Arg::Float(x) => write!(out, "{x:?}"),
        Arg::Bool(x) => write!(out, "{x}"),
        Arg::Ints(all) => list(out, all, |out, x| write!(out, "{x}")),
        Arg::Floats(all) => list(out, all, |out, x| write!(out, "{x:?}")),
        Arg::Bools(all) => list(out, all, |out, x| write!(out, "{x}")),
        Arg::Text(text) => write!(out, "{text:?}"),
    };
}

fn view(out: &mut String, operand: &Operand) -> std::fmt::Result {
    typed(out, operand.dtype, &operand.shape)?;
    if operand.is_contiguous() {
        return Ok(());
    }
    write!(out, "/")?;
    list(out, &operand.stride, |out, x| write!(out, "{x}"))
}

fn typed(out: &mut String, dtype: crate::job::Dtype, shape: &[u64]) -> std::fmt::Result {
    write!(out, "{}", format!("{dtype:?}").to_ascii_lowercase())?;
    list(out, shape, |out, x| write!(out, "{x}"))
}

fn list<T>(out: &mut String, all: &[T], mut one: impl FnMut(&mut String, &T) -> std::fmt::Result) -> std::fmt::Result {
    out.push('[');
    for (index, x) in all.iter().enumerate() {
        if index > 0 {
            out.push(',');
        }
        one(out, x)?;
    }
    out.push(']');
    Ok(())
}

/// One measurement, as a line of the file. Only `key` and `ns` are read back; the rest is for people.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Row {
    /// The operator's name in its graph.
    pub operator: String,
    /// Its kind.
    pub kind: String,
    /// Types and shapes of its tensors.
    pub shapes: String,
    /// Its other arguments.
    pub arguments: String,
    /// The device it ran on.
    pub device: String,
    /// How long it took.
    pub ns: u64,
    /// What finds the row: [`key`].
    pub key: String,
}

impl Row {
    /// The row that says `operator` took `time` on the device named `device`; no time is less than 1 ns.
    #[must_use]
    pub fn of(operator: &Operator, device: &str, time: Nanos) -> Self {
        let some = |tensors: bool| {
            let mut out = String::new();
            for arg in &operator.args {
                if tensors == matches!(arg, Arg::Tensor(_) | Arg::Tensors(_) | Arg::Host { .. }) && *arg != Arg::None {
                    if !out.is_empty() {
                        out.push(' ');
                    }
                    argument(&mut out, arg);
                }
            }
            out
        };
        Self {
            operator: operator.name.clone(),
            kind: operator.kind.clone(),
            shapes: some(true),
            arguments: some(false),
            device: device.to_owned(),
            ns: time.0.clamp(1, LONGEST.0),
            key: key(operator),
        }
    }
}

/// A measured table: for each key the median of its rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    times: BTreeMap<String, Nanos>,
    devices: BTreeSet<String>,
}

/// A table that could not be read or written.
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

impl Table {
    /// Reads a table (plain or gzip): comma-separated, with a header that has at least the columns `key`
    /// and `ns`. Where a key has several rows their median counts, rounded down between the middle two.
    ///
    /// # Errors
    /// Naming file, line and column, when the file can't be read, a row is malformed, a time is not a
    /// whole number from 1 to [`LONGEST`], or there is no row.
    pub fn read(path: &Path) -> Result<Self, LatencyError> {
        let at = |line, problem| LatencyError::from(LineError { path: path.to_owned(), line, problem });
        let broken = |error: csv::Error| {
            let line = error.position().map_or(1, csv::Position::line);
            let problem = match error.kind() {
                csv::ErrorKind::UnequalLengths { expected_len, len, .. } => {
                    format!("it has {len} columns and the header {expected_len}; quote what contains commas")
                }
                csv::ErrorKind::Utf8 { err, .. } => format!("column {} is not UTF-8 text", err.field() + 1),
                _ => error.to_string(),
            };
            at(line, problem)
        };
        let content = files::read(path, LARGEST_FILE)?;
        let mut reader = csv::Reader::from_reader(content.as_slice());
        let header = reader.headers().map_err(broken)?.clone();
        let column = |name: &str| header.iter().position(|h| h.trim() == name);
        let wanted =
            |name: &str| column(name).ok_or_else(|| at(1, format!("the header has no column `{name}`; it must have `key` and `ns`")));
        let (key, ns, device) = (wanted("key")?, wanted("ns")?, column("device"));

        let mut times: BTreeMap<String, Vec<u64>> = BTreeMap::new();
        let mut devices = BTreeSet::new();
        for record in reader.records() {
            let record = record.map_err(broken)?;
            let line = record.position().map_or(0, csv::Position::line);
            let field = |index: usize| record.get(index).unwrap_or_default();
            if field(key).is_empty() {
                return Err(at(line, "column `key` is empty".to_owned()));
            }
            let time = field(ns).trim().parse::<u64>().ok().filter(|t| (1..=LONGEST.0).contains(t));
            let Some(time) = time else {
                return Err(at(line, format!("column `ns` is `{}`; it must be whole nanoseconds from 1 to {}", field(ns), LONGEST.0)));
            };
            times.entry(field(key).to_owned()).or_default().push(time);
            devices.extend(device.map(field).filter(|d| !d.is_empty()).map(str::to_owned));
        }
        if times.is_empty() {
            return Err(LatencyError::Empty { path: path.to_owned() });
        }
        Ok(Self { times: times.into_iter().map(|(key, all)| (key, Nanos(median(all)))).collect(), devices })
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

    /// The time of an operator's [`key`].
    #[must_use]
    pub fn get(&self, key: &str) -> Option<Nanos> {
        self.times.get(key).copied()
    }

    /// The devices that its rows name, sorted, so that a command can say when they are not the planned one.
    pub fn devices(&self) -> impl Iterator<Item = &str> {
        self.devices.iter().map(String::as_str)
    }
}

/// Of at least one number.
fn median(mut all: Vec<u64>) -> u64 {
    all.sort_unstable();
    let upper = all.len() / 2;
    if all.len() % 2 == 1 { all[upper] } else { all[upper - 1].midpoint(all[upper]) }
}

#[cfg(test)]
mod tests {
    use super::super::builtin;
    use super::*;
    use crate::job::{Dtype, Phase, Replay};
    use crate::units::{Bytes, TensorId};

    fn operand(shape: &[u64], stride: &[u64]) -> Operand {
        Operand { tensor: TensorId(0), version: 0, dtype: Dtype::F32, offset: 3, shape: shape.to_vec(), stride: stride.to_vec() }
    }

    fn operator(kind: &str, args: Vec<Arg>) -> Operator {
        Operator {
            name: "o".to_owned(),
            kind: kind.to_owned(),
            phase: Phase::Forward,
            args,
            outputs: Vec::new(),
            hidden: Vec::new(),
            workspace: Bytes::ZERO,
            replay: Replay::Pure,
            random: false,
            duration_ns: None,
        }
    }

    fn sample() -> Operator {
        operator(
            "aten::mixed",
            vec![
                Arg::Tensor(operand(&[2, 3], &[3, 1])),
                Arg::Tensors(vec![Some(operand(&[3, 2], &[1, 3])), None]),
                Arg::Host { dtype: Dtype::F64, shape: Vec::new(), value: Some(0.5), input: None },
                Arg::None,
                Arg::Int(-1),
                Arg::Float(1e-5),
                Arg::Ints(vec![1, 2]),
                Arg::Bools(vec![true, false]),
                Arg::Text("ze\"ro,s".to_owned()),
            ],
        )
    }

    #[test]
    fn a_key_says_kind_shapes_and_scalars_and_nothing_of_the_graph() {
        let text = r#"aten::mixed(f32[2,3],[f32[3,2]/[1,3],-],host f64[],-,-1,1e-5,[1,2],[true,false],"ze\"ro,s")"#;
        assert_eq!(key(&sample()), text);
        assert_eq!(key(&operator("aten::none", Vec::new())), "aten::none()");
    }

    #[test]
    fn tables_round_trip_and_take_the_median() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.latency.csv");
        let rows: Vec<_> = [30, 10, 20, 1000].map(|ns| Row::of(&sample(), "host", Nanos(ns))).into();
        Table::write(&path, &rows).unwrap();
        let table = Table::read(&path).unwrap();
        assert_eq!(table.get(&key(&sample())), Some(Nanos(25)));
        assert_eq!(table.get("aten::mixed"), None);
        assert_eq!(table.devices().collect::<Vec<_>>(), ["host"]);
        Table::write(&path, &rows[..3]).unwrap();
        assert_eq!(Table::read(&path).unwrap().get(&key(&sample())), Some(Nanos(20)));
    }

    #[test]
    fn the_order_of_sources() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.csv");
        std::fs::write(&path, "ns, key\n77,aten::none()\n").unwrap();
        let table = Table::read(&path).unwrap();
        let mut written = operator("aten::none", Vec::new());
        written.duration_ns = Some(0);
        let graph = Graph {
            name: String::new(),
            tensors: Vec::new(),
            operators: vec![written, operator("aten::none", Vec::new()), operator("aten::other", Vec::new())],
            optimizer: None,
            loss: None,
            recorded_peak: None,
        };
        let device = builtin::find("h100").unwrap();
        let found = latencies(&graph, &device, Some(&table));
        assert_eq!(found[0], Latency { time: Nanos(1), source: Source::Graph });
        assert_eq!(found[1], Latency { time: Nanos(77), source: Source::Measured });
        assert_eq!(found[2], Latency { time: Nanos(5_000), source: Source::Roofline });
        assert_eq!(latencies(&graph, &device, None)[1].source, Source::Roofline);
    }

    #[test]
    fn bad_tables_name_line_and_column() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("bad.csv");
        for (content, want) in [
            (&b""[..], "no column `key`"),
            (b"key,ns\n", "no rows"),
            (b"key,time\na,1\n", "line 1: the header has no column `ns`"),
            (b"key,ns\na,1\nb,-1\n", "line 3: column `ns` is `-1`"),
            (b"key,ns\na,0\n", "line 2: column `ns` is `0`"),
            (b"key,ns\na,1.5\n", "line 2: column `ns` is `1.5`"),
            (b"key,ns\na,99999999999999999999\n", "line 2: column `ns`"),
            (b"key,ns\na,3600000000001\n", "line 2: column `ns`"),
            (b"key,ns\n,1\n", "line 2: column `key` is empty"),
            (b"key,ns\na,b,1\n", "line 2: it has 3 columns and the header 2"),
            (b"key,ns\n\xff,1\n", "line 2: column 1 is not UTF-8"),
        ] {
            std::fs::write(&path, content).unwrap();
            let error = Table::read(&path).unwrap_err().to_string();
            assert!(error.contains("bad.csv") && error.contains(want), "{error}");
        }
        assert!(Table::read(folder.path()).is_err());
    }
}
