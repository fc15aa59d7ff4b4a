//! A graph's file form, `*.graph.json`: easy to write by hand, and exact when read back.
//!
//! This module reads and writes it, and computes the hash by which plans identify their graph.
//! [`Graph::new`] checks the content. The serde types are in `form`.

use std::collections::HashMap;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};

pub use super::form::GraphFile;
use super::form::{
    ArgForm, HostForm, Item, OperandForm, OperatorForm, OptimizerForm, Real, TensorForm,
};
pub(crate) use super::form::{FormatName, Tag, Version};
use super::graph::{Arg, Graph, GraphError, Operand, Operator, Tensor, contiguous};
use crate::files::{self, FileError};
use crate::units::{Bytes, OpId, TensorId};

/// The largest file that is read, in bytes after decompression. Graphs of thousands of operators
/// have a few MiB. A parsed file takes up to about twenty times its text, so this limit keeps a
/// hostile gzip within a few GiB of memory.
pub const LARGEST: u64 = 128 << 20;

/// Why a file could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The file can't be opened or read.
    #[error(transparent)]
    File(#[from] FileError),
    /// The content is wrong.
    #[error("{}: {problem}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// The place, what is wrong, and the remedy.
        problem: String,
    },
}

impl ReadError {
    /// An error about the content of `path`.
    pub fn content(path: &Path, problem: impl ToString) -> Self {
        Self::Content { path: path.to_owned(), problem: problem.to_string() }
    }

    /// Whether as many files are open as may be, so that it may be read once one is closed.
    #[cfg(unix)]
    #[must_use]
    pub fn wants_room(&self) -> bool {
        matches!(self, Self::File(error) if error.wants_room())
    }
}

/// Reads the graph of a `*.graph.json`, gzipped or not.
///
/// # Errors
/// An error that names the file, the line and column or the tensor or operator, and the remedy.
pub fn read(path: &Path) -> Result<Graph, ReadError> {
    let file: GraphFile<'_> = parse(path)?;
    resolve(file).map_err(|e| ReadError::content(path, e))
}

/// Reads a graph whose path another process or a file has named: never from a pipe or a device.
///
/// # Errors
/// As [`read`], and where it is no file.
pub fn read_regular(path: &Path) -> Result<Graph, ReadError> {
    let file: GraphFile<'_> = parse_from(files::open_regular(path)?, path)?;
    resolve(file).map_err(|e| ReadError::content(path, e))
}

/// Reads any JSON file into its serde type as a stream, so that a file of another form fails early
/// and takes little memory.
///
/// # Errors
/// An error that names the file, the line and column, and what was found.
pub fn parse<T: DeserializeOwned>(path: &Path) -> Result<T, ReadError> {
    parse_from(files::open(path)?, path)
}

fn parse_from<T: DeserializeOwned>(file: Box<dyn BufRead>, path: &Path) -> Result<T, ReadError> {
    let mut reader = BufReader::with_capacity(1 << 16, file.take(LARGEST));
    let result = serde_json::from_reader(&mut reader);
    let exhausted = reader.get_ref().limit() == 0;
    result.map_err(|e| {
        let problem = match e.classify() {
            _ if exhausted => format!("larger than {} once decompressed", Bytes(LARGEST)),
            serde_json::error::Category::Io => {
                format!("cut off or damaged: {e}; copy or make the file again")
            }
            serde_json::error::Category::Eof => {
                format!("cut off: {e}; copy or make the file again")
            }
            serde_json::error::Category::Syntax => format!("not JSON: {e}"),
            serde_json::error::Category::Data => e.to_string(),
        };
        ReadError::content(path, problem)
    })
}

/// Writes a graph; the file appears whole or not at all.
///
/// # Errors
/// When it can't be written.
pub fn write(path: &Path, graph: &Graph) -> Result<(), FileError> {
    files::write(path, |out| emit(out, graph))
}

/// The bytes of a graph's file.
#[must_use]
pub fn canonical(graph: &Graph) -> Vec<u8> {
    let mut all = Vec::new();
    emit(&mut all, graph).unwrap_or_else(|e| unreachable!("writing to memory: {e}"));
    all
}

/// SHA-256 of [`canonical`] in hex: the same for two files with the same content. Of an arranged
/// graph it is that of the graph in the file.
#[must_use]
pub fn sha256(graph: &Graph) -> String {
    Sha256::digest(canonical(graph.framework())).iter().map(|b| format!("{b:02x}")).collect()
}

/// Writes one line for each tensor and operator, so that files can be read and compared line by
/// line.
fn emit(out: &mut dyn Write, graph: &Graph) -> io::Result<()> {
    let mut out = io::BufWriter::with_capacity(1 << 16, out);
    let file = GraphFile {
        version: Version::needed(is_second(graph)),
        tensors: graph.tensors.iter().map(|t| tensor_form(graph, t)).collect(),
        operators: graph.operators.iter().map(|o| operator_form(graph, o)).collect(),
        optimizer: graph.optimizer.as_ref().map(OptimizerForm::new),
        loss: graph.loss.as_ref().map(|o| operand_form(graph, o)),
        recorded_peak_bytes: graph.recorded_peak,
        ..GraphFile::named(&graph.name)
    };
    write!(
        out,
        "{{\"format\":{},\"version\":{},\"name\":{}",
        text(&file.format)?,
        text(&file.version)?,
        text(&file.name)?
    )?;
    if let Some(optimizer) = &file.optimizer {
        write!(out, ",\n\"optimizer\":{}", text(optimizer)?)?;
    }
    if let Some(loss) = &file.loss {
        write!(out, ",\n\"loss\":{}", text(loss)?)?;
    }
    if let Some(bytes) = &file.recorded_peak_bytes {
        write!(out, ",\n\"recorded_peak_bytes\":{}", bytes.0)?;
    }
    write!(out, ",\n\"tensors\":")?;
    lines(&mut out, &file.tensors)?;
    write!(out, ",\n\"operators\":")?;
    lines(&mut out, &file.operators)?;
    writeln!(out, "}}")?;
    out.flush()
}

/// What an `optimizer` must have.
const OPTIMIZER: &str =
    "it has either one group's `class` and `values`, or `groups`, which may not be empty";

/// Whether the graph needs version 2: it has parameter groups, schedules or modules.
fn is_second(graph: &Graph) -> bool {
    graph.operators.iter().any(|o| o.group.is_some() || o.module.is_some())
        || graph
            .optimizer
            .as_ref()
            .is_some_and(|o| o.groups.len() > 1 || o.groups.iter().any(|g| !g.schedules.is_empty()))
}

/// A small value as JSON.
pub(crate) fn text(value: &impl serde::Serialize) -> io::Result<String> {
    serde_json::to_string(value).map_err(io::Error::from)
}

/// A JSON list with one line for each entry.
pub(crate) fn lines(out: &mut impl Write, all: &[impl serde::Serialize]) -> io::Result<()> {
    for (index, entry) in all.iter().enumerate() {
        out.write_all(if index == 0 { b"[\n" } else { b",\n" })?;
        serde_json::to_writer(&mut *out, entry)?;
    }
    out.write_all(if all.is_empty() { b"[]" } else { b"\n]" })
}

fn tensor_form<'a>(graph: &'a Graph, tensor: &'a Tensor) -> TensorForm<'a> {
    TensorForm {
        name: (&*tensor.name).into(),
        role: tensor.role,
        dtype: tensor.dtype,
        shape: (&*tensor.shape).into(),
        bytes: (natural_bytes(tensor.dtype, &tensor.shape) != Some(tensor.bytes.0))
            .then_some(tensor.bytes),
        kept_until: tensor.kept_until.map(|op| (&*graph.operator(op).name).into()),
    }
}

/// The bytes of a tensor whose storage holds just its elements.
fn natural_bytes(dtype: super::Dtype, shape: &[u64]) -> Option<u64> {
    shape.iter().try_fold(dtype.size(), |all, &n| all.checked_mul(n))
}

fn operand_form<'a>(graph: &'a Graph, operand: &'a Operand) -> OperandForm<'a> {
    let tensor = graph.tensor(operand.tensor);
    OperandForm {
        tensor: (&*tensor.name).into(),
        version: operand.version,
        dtype: (operand.dtype != tensor.dtype).then_some(operand.dtype),
        offset: operand.offset,
        shape: (operand.shape != tensor.shape).then(|| (&*operand.shape).into()),
        stride: (operand.stride != contiguous(&operand.shape)).then(|| (&*operand.stride).into()),
    }
}

fn operator_form<'a>(graph: &'a Graph, operator: &'a Operator) -> OperatorForm<'a> {
    OperatorForm {
        name: (&*operator.name).into(),
        kind: (&*operator.kind).into(),
        phase: operator.phase,
        args: operator.args.iter().map(|arg| arg_form(graph, arg)).collect(),
        outputs: operator
            .outputs
            .iter()
            .map(|o| o.as_ref().map(|o| operand_form(graph, o)))
            .collect(),
        hidden: operator.hidden.iter().map(|o| operand_form(graph, o)).collect(),
        workspace_bytes: operator.workspace,
        replay: operator.replay,
        random: operator.random,
        duration_ns: operator.duration_ns,
        group: operator.group,
        module: operator.module.as_deref().map(Into::into),
    }
}

fn arg_form<'a>(graph: &'a Graph, arg: &'a Arg) -> ArgForm<'a> {
    match arg {
        Arg::None => ArgForm::One(Item::None),
        Arg::Tensor(operand) => ArgForm::One(Item::Operand(Box::new(operand_form(graph, operand)))),
        Arg::Tensors(list) if list.is_empty() => ArgForm::EmptyTensors,
        Arg::Tensors(list) => ArgForm::Many(
            list.iter()
                .map(|o| {
                    o.as_ref()
                        .map_or(Item::None, |o| Item::Operand(Box::new(operand_form(graph, o))))
                })
                .collect(),
        ),
        Arg::Host { dtype, shape, value, input } => ArgForm::Host(HostForm {
            host: *dtype,
            shape: (&**shape).into(),
            value: value.map(Real),
            input: *input,
        }),
        Arg::Int(n) => ArgForm::One(Item::Int(*n)),
        Arg::Float(x) => ArgForm::One(Item::Float(Real(*x))),
        Arg::Bool(b) => ArgForm::One(Item::Bool(*b)),
        Arg::Ints(all) => ArgForm::Many(all.iter().map(|&n| Item::Int(n)).collect()),
        Arg::Floats(all) if all.is_empty() => ArgForm::EmptyFloats,
        Arg::Floats(all) => ArgForm::Many(all.iter().map(|&x| Item::Float(Real(x))).collect()),
        Arg::Bools(all) if all.is_empty() => ArgForm::EmptyBools,
        Arg::Bools(all) => ArgForm::Many(all.iter().map(|&b| Item::Bool(b)).collect()),
        Arg::Text(text) => ArgForm::One(Item::Text((&**text).into())),
    }
}

/// The positions of names, while a file is resolved.
struct Names {
    tensors: HashMap<String, TensorId>,
    list: Vec<Tensor>,
}

fn resolve(file: GraphFile<'_>) -> Result<Graph, GraphError> {
    if u32::try_from(file.tensors.len()).is_err() || u32::try_from(file.operators.len()).is_err() {
        return Err(GraphError::TooLarge);
    }
    // If two operators have one name, either is found here; Graph::new refuses both.
    let operators: HashMap<_, _> = file
        .operators
        .iter()
        .enumerate()
        .map(|(index, o)| (o.name.to_string(), OpId::from_index(index)))
        .collect();
    let mut names = Names {
        tensors: HashMap::with_capacity(file.tensors.len()),
        list: Vec::with_capacity(file.tensors.len()),
    };
    for (index, form) in file.tensors.into_iter().enumerate() {
        let fail = |problem| Err(GraphError::Tensor { tensor: form.name.to_string(), problem });
        let Some(bytes) = form.bytes.or(natural_bytes(form.dtype, &form.shape).map(Bytes)) else {
            return fail(format!("its shape {:?} has more bytes than can be counted", form.shape));
        };
        let kept_until = match &form.kept_until {
            None => None,
            Some(name) => match operators.get(&**name) {
                Some(id) => Some(*id),
                None => {
                    return fail(format!(
                        "`kept_until` names operator `{name}`, which the graph does not have"
                    ));
                }
            },
        };
        let name = form.name.into_owned();
        names.tensors.insert(name.clone(), TensorId::from_index(index));
        names.list.push(Tensor {
            name,
            bytes,
            role: form.role,
            dtype: form.dtype,
            shape: form.shape.into_owned(),
            kept_until,
        });
    }
    let mut list = Vec::with_capacity(file.operators.len());
    for form in file.operators {
        let name = form.name.to_string();
        list.push(
            names
                .operator(form)
                .map_err(|problem| GraphError::Operator { operator: name, problem })?,
        );
    }
    let loss = file.loss.map(|form| names.operand(form)).transpose().map_err(GraphError::Loss)?;
    let optimizer = file
        .optimizer
        .map(|form| form.optimizer().ok_or(GraphError::Optimizer(OPTIMIZER.to_owned())))
        .transpose()?;
    Graph::new(file.name.into_owned(), names.list, list, optimizer, loss, file.recorded_peak_bytes)
}

impl Names {
    fn operator(&self, form: OperatorForm<'_>) -> Result<Operator, String> {
        Ok(Operator {
            name: form.name.into_owned(),
            kind: form.kind.into_owned(),
            phase: form.phase,
            args: form.args.into_iter().map(|arg| self.arg(arg)).collect::<Result<_, _>>()?,
            outputs: form
                .outputs
                .into_iter()
                .map(|o| o.map(|o| self.operand(o)).transpose())
                .collect::<Result<_, _>>()?,
            hidden: form.hidden.into_iter().map(|o| self.operand(o)).collect::<Result<_, _>>()?,
            workspace: form.workspace_bytes,
            replay: form.replay,
            random: form.random,
            duration_ns: form.duration_ns,
            group: form.group,
            module: form.module.map(std::borrow::Cow::into_owned),
        })
    }

    fn operand(&self, form: OperandForm<'_>) -> Result<Operand, String> {
        let Some(&id) = self.tensors.get(&*form.tensor) else {
            return Err(format!(
                "there is no tensor named `{}`; list it under `tensors`",
                form.tensor
            ));
        };
        let tensor = &self.list[id.index()];
        let shape = form.shape.map_or_else(|| tensor.shape.clone(), std::borrow::Cow::into_owned);
        let stride = form.stride.map_or_else(|| contiguous(&shape), std::borrow::Cow::into_owned);
        Ok(Operand {
            tensor: id,
            version: form.version,
            dtype: form.dtype.unwrap_or(tensor.dtype),
            offset: form.offset,
            shape,
            stride,
        })
    }

    fn arg(&self, form: ArgForm<'_>) -> Result<Arg, String> {
        Ok(match form {
            ArgForm::One(Item::None) => Arg::None,
            ArgForm::One(Item::Bool(b)) => Arg::Bool(b),
            ArgForm::One(Item::Int(n)) => Arg::Int(n),
            ArgForm::One(Item::Float(Real(x))) => Arg::Float(x),
            ArgForm::One(Item::Text(text)) => Arg::Text(text.into_owned()),
            ArgForm::One(Item::Operand(operand)) => Arg::Tensor(self.operand(*operand)?),
            ArgForm::Host(HostForm { host, shape, value, input }) => Arg::Host {
                dtype: host,
                shape: shape.into_owned(),
                value: value.map(|v| v.0),
                input,
            },
            ArgForm::EmptyTensors => Arg::Tensors(Vec::new()),
            ArgForm::EmptyFloats => Arg::Floats(Vec::new()),
            ArgForm::EmptyBools => Arg::Bools(Vec::new()),
            ArgForm::Many(items) => self.list_arg(items)?,
        })
    }

    /// The kind of a list, from its entries. Numbers of which one has a point are floats.
    fn list_arg(&self, items: Vec<Item<'_>>) -> Result<Arg, String> {
        let all = |test: fn(&Item<'_>) -> bool| items.iter().all(test);
        if all(|i| matches!(i, Item::Int(_))) {
            return Ok(Arg::Ints(
                items
                    .into_iter()
                    .filter_map(|i| if let Item::Int(n) = i { Some(n) } else { None })
                    .collect(),
            ));
        }
        if all(|i| matches!(i, Item::Int(_) | Item::Float(_))) {
            let number = |i| match i {
                #[expect(
                    clippy::cast_precision_loss,
                    reason = "a whole number among floats means the nearest float"
                )]
                Item::Int(n) => Some(n as f64),
                Item::Float(Real(x)) => Some(x),
                _ => None,
            };
            return Ok(Arg::Floats(items.into_iter().filter_map(number).collect()));
        }
        if all(|i| matches!(i, Item::Bool(_))) {
            return Ok(Arg::Bools(
                items
                    .into_iter()
                    .filter_map(|i| if let Item::Bool(b) = i { Some(b) } else { None })
                    .collect(),
            ));
        }
        if all(|i| matches!(i, Item::None | Item::Operand(_))) {
            let operand =
                |i| if let Item::Operand(o) = i { self.operand(*o).map(Some) } else { Ok(None) };
            return Ok(Arg::Tensors(items.into_iter().map(operand).collect::<Result<_, _>>()?));
        }
        Err("a list argument holds numbers, or flags, or operands and nulls; this one mixes them"
            .to_owned())
    }
}

#[cfg(test)]
mod tests;
