//! Initial values of long-lived tensors and batch data, from a safetensors file or a seed, and
//! writing them back.
//!
//! Keys are `parameter:NAME`, `buffer:NAME`, `optimizer_state:KEY:NAME`, and `input:NAME` for batch
//! data, by the name of the tensor on the device. A file may use `input:x`, `input:y`, `input:2` …
//! instead, by the order of the copies.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use safetensors::tensor::Metadata;

use super::{seed, support};
use crate::files;
use crate::job::{Arg, Dtype, Graph, Role, Tensor};
use crate::units::TensorId;

/// The longest header that is accepted, in bytes: of about 150,000 tensors. Reading it takes some
/// 15 times as much memory.
const HEADER_LIMIT: u64 = 16 << 20;

/// Why initial values can't be used.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// The file can't be opened.
    #[error(transparent)]
    File(#[from] files::FileError),
    /// The file's content is wrong.
    #[error("{}: {problem}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// What is wrong, and the remedy.
        problem: String,
    },
}

/// Initial values of one run.
pub struct Values<'a> {
    graph: &'a Graph,
    /// Tensors of the file that lie in pieces, until the last piece is taken.
    split: BTreeMap<TensorId, Vec<u8>>,
    seed: u64,
    /// The limit of whole numbers in batch data.
    limit: u64,
    file: BTreeMap<String, Vec<u8>>,
    /// Batch data, by the number of the host-to-device copy.
    pub batch: Vec<Vec<u8>>,
    /// Sentences for the user.
    pub notes: Vec<String>,
}

/// A tensor's key in weight files.
#[must_use]
pub fn key(tensor: &Tensor) -> String {
    let role = match tensor.role {
        Role::Parameter => "parameter",
        Role::Buffer => "buffer",
        Role::OptimizerState => "optimizer_state",
        Role::Input => "input",
        Role::Gradient | Role::Activation => "tensor",
    };
    format!("{role}:{}", tensor.name)
}

/// The key of batch data by the order of the copies, which also gives its seed.
fn batch_number(number: usize) -> String {
    match number {
        0 => "input:x".to_owned(),
        1 => "input:y".to_owned(),
        n => format!("input:{n}"),
    }
}

/// The key of batch data by the name of the tensor that it becomes, if it becomes one.
fn batch_key(graph: &Graph, number: usize) -> String {
    let is = |arg: &Arg| matches!(arg, Arg::Host { input: Some(n), .. } if *n as usize == number);
    let copy = graph.operators.iter().find(|o| o.args.iter().any(is));
    let made = copy.and_then(|o| o.generates().next());
    made.map_or_else(|| batch_number(number), |o| format!("input:{}", graph.tensor(o.tensor).name))
}

/// The tensors that live across iterations: those that no operator generates.
#[must_use]
pub fn long_lived(graph: &Graph) -> Vec<TensorId> {
    let generators = graph.generators();
    (0..graph.tensors.len())
        .filter(|&t| generators[t].is_none())
        .map(TensorId::from_index)
        .collect()
}

struct Wanted {
    dtype: Dtype,
    shape: Vec<u64>,
    required: bool,
}

impl<'a> Values<'a> {
    /// Reads the file `weights`, or notes the seed.
    ///
    /// # Errors
    /// When the file can't be read, lacks a parameter, buffer or batch input, or has one in another
    /// type or shape.
    pub fn new(
        graph: &'a Graph,
        batch: &[(Dtype, Vec<u64>)],
        weights: Option<&Path>,
        seed: u64,
    ) -> Result<Self, WeightsError> {
        let (limit, file) = (support::index_limit(graph).unwrap_or(2), graph.framework());
        let mut values = Self {
            graph,
            split: BTreeMap::new(),
            seed,
            limit,
            file: BTreeMap::new(),
            batch: Vec::new(),
            notes: Vec::new(),
        };
        if let Some(path) = weights {
            let mut wanted = BTreeMap::new();
            let mut numbered = BTreeMap::new();
            for id in long_lived(file) {
                let tensor = file.tensor(id);
                let required = matches!(tensor.role, Role::Parameter | Role::Buffer | Role::Input);
                wanted.insert(
                    key(tensor),
                    Wanted { dtype: tensor.dtype, shape: tensor.shape.clone(), required },
                );
            }
            for (number, (dtype, shape)) in batch.iter().enumerate() {
                let key = batch_key(graph, number);
                numbered.insert(key.clone(), batch_number(number));
                wanted.insert(key, Wanted { dtype: *dtype, shape: shape.clone(), required: true });
            }
            values.file = read(path, &wanted, &numbered)?;
            let states = |t: &&TensorId| file.tensor(**t).role == Role::OptimizerState;
            let absent = long_lived(file)
                .iter()
                .filter(states)
                .filter(|t| !values.file.contains_key(&key(file.tensor(**t))))
                .count();
            if absent > 0 {
                values.notes.push(format!(
                    "{absent} optimizer states are not in the weights file and start as at step 0"
                ));
            }
        }
        for (number, (dtype, shape)) in batch.iter().enumerate() {
            let data = values.file.remove(&batch_key(graph, number));
            let key = batch_number(number);
            values.batch.push(
                data.unwrap_or_else(|| {
                    seed::batch(seed, &key, *dtype, shape.iter().product(), limit)
                }),
            );
        }
        Ok(values)
    }

    /// The initial bytes of a long-lived tensor, as many as its storage has.
    pub fn take(&mut self, id: TensorId) -> Vec<u8> {
        let ((of, begin), file) = (self.graph.framework_tensor(id), self.graph.framework());
        let (tensor, bytes) = (file.tensor(of), self.graph.tensor(id).bytes);
        if bytes == tensor.bytes {
            return self.whole(tensor);
        }
        let whole = match self.split.remove(&of) {
            Some(whole) => whole,
            None => self.whole(tensor),
        };
        let place = |at: u64| usize::try_from(at).unwrap_or(usize::MAX).min(whole.len());
        let piece = whole[place(begin.0)..place(begin.0 + bytes.0)].to_vec();
        if begin + bytes < tensor.bytes {
            self.split.insert(of, whole);
        }
        piece
    }

    fn whole(&mut self, tensor: &Tensor) -> Vec<u8> {
        let bytes = usize::try_from(tensor.bytes.0).unwrap_or(usize::MAX);
        let mut data = self
            .file
            .remove(&key(tensor))
            .unwrap_or_else(|| seed::initial(self.seed, tensor, self.state(tensor), self.limit));
        data.resize(bytes, 0);
        data
    }

    /// The initial value of an optimizer state: 0, except for Adagrad's sum.
    fn state(&self, tensor: &Tensor) -> f64 {
        let mut groups = self.graph.optimizer.iter().flat_map(|o| &o.groups);
        let adagrad = groups.find(|g| g.class == "Adagrad" && tensor.name.starts_with("sum:"));
        adagrad.and_then(|g| g.value("initial_accumulator_value", 0)).unwrap_or(0.0)
    }
}

fn spell(dtype: Dtype) -> safetensors::Dtype {
    match dtype {
        Dtype::F32 => safetensors::Dtype::F32,
        Dtype::F64 => safetensors::Dtype::F64,
        Dtype::F16 => safetensors::Dtype::F16,
        Dtype::Bf16 => safetensors::Dtype::BF16,
        Dtype::I64 => safetensors::Dtype::I64,
        Dtype::I32 => safetensors::Dtype::I32,
        Dtype::I16 => safetensors::Dtype::I16,
        Dtype::I8 => safetensors::Dtype::I8,
        Dtype::U8 => safetensors::Dtype::U8,
        Dtype::Bool => safetensors::Dtype::BOOL,
        // The format has no double complex, so each is written as two doubles.
        Dtype::C64 | Dtype::C128 => safetensors::Dtype::C64,
    }
}

/// Reads the tensors that are wanted and skips the rest, so that memory is limited by the graph and
/// not by the file. `numbered` has other keys for some of them.
fn read(
    path: &Path,
    wanted: &BTreeMap<String, Wanted>,
    numbered: &BTreeMap<String, String>,
) -> Result<BTreeMap<String, Vec<u8>>, WeightsError> {
    let content = |problem: String| WeightsError::Content { path: path.to_owned(), problem };
    let cut = |e: io::Error| content(format!("is cut off or damaged: {e}; save it again"));
    let mut file = files::open_regular(path)?;
    let mut length = [0; 8];
    file.read_exact(&mut length).map_err(cut)?;
    let length = u64::from_le_bytes(length);
    if length > HEADER_LIMIT {
        return Err(content(
            "does not begin like a safetensors file; name one written by safetensors".to_owned(),
        ));
    }
    let mut header = Vec::new();
    file.by_ref().take(length).read_to_end(&mut header).map_err(cut)?;
    let metadata: Metadata = serde_json::from_slice(&header).map_err(|e| {
        content(format!("is not a safetensors file: its header can't be read: {e}"))
    })?;
    let names = metadata.offset_keys();
    let in_file = |key: &String| match numbered.get(key) {
        Some(number) if metadata.info(key).is_none() => number.clone(),
        _ => key.clone(),
    };
    let keys: BTreeMap<String, &String> = wanted.keys().map(|key| (in_file(key), key)).collect();
    check(wanted, &keys, &metadata, &names).map_err(content)?;
    let mut found = BTreeMap::new();
    for name in names {
        let Some(info) = metadata.info(&name) else { continue };
        let bytes = info.data_offsets.1 - info.data_offsets.0;
        if let Some(&key) = keys.get(&name) {
            let mut data = vec![0; bytes];
            file.read_exact(&mut data).map_err(cut)?;
            found.insert(key.clone(), data);
        } else {
            let passed =
                io::copy(&mut file.by_ref().take(bytes as u64), &mut io::sink()).map_err(cut)?;
            if passed < bytes as u64 {
                return Err(cut(io::ErrorKind::UnexpectedEof.into()));
            }
        }
    }
    if file.read(&mut [0]).map_err(cut)? > 0 {
        return Err(content("goes on after its last tensor; save it again".to_owned()));
    }
    Ok(found)
}

/// Checks that all wanted tensors are in the file; `keys` are the keys found.
fn check(
    wanted: &BTreeMap<String, Wanted>,
    keys: &BTreeMap<String, &String>,
    metadata: &Metadata,
    names: &[String],
) -> Result<(), String> {
    let missing: Vec<&str> = keys
        .iter()
        .filter(|(in_file, key)| wanted[**key].required && metadata.info(in_file).is_none())
        .map(|(_, key)| key.as_str())
        .collect();
    if let Some(first) = missing.first() {
        let mut text = format!("has no `{first}`");
        if missing.len() > 1 {
            let _ = write!(text, " nor {} others that the graph wants", missing.len() - 1);
        }
        let mut some: Vec<&str> = names.iter().map(String::as_str).collect();
        some.sort();
        some.truncate(4);
        let _ = write!(text, "; it has {} tensors, such as {}", names.len(), some.join(", "));
        return Err(text);
    }
    for (key, name) in keys {
        let (Some(info), Some(want)) = (metadata.info(key), wanted.get(*name)) else { continue };
        let same_shape = info.shape.iter().map(|&x| x as u64).eq(want.shape.iter().copied());
        if info.dtype != spell(want.dtype) || !same_shape {
            let want_dtype = spell(want.dtype);
            return Err(format!(
                "`{key}` is {:?} {:?}; the graph wants {want_dtype:?} {:?}",
                info.dtype, info.shape, want.shape
            ));
        }
    }
    Ok(())
}

/// Writes tensors as a safetensors file. It asks `data` for the bytes of one after the other.
///
/// # Errors
/// When the file can't be written, or `data` fails.
pub fn save(
    path: &Path,
    tensors: &BTreeMap<String, (Dtype, Vec<u64>)>,
    mut data: impl FnMut(&str) -> io::Result<Vec<u8>>,
) -> Result<(), files::FileError> {
    files::write(path, |file| {
        let mut header = BTreeMap::new();
        let mut at = 0;
        for (key, (dtype, shape)) in tensors {
            let end = at + shape.iter().product::<u64>() * dtype.size();
            let dtype = serde_json::to_value(spell(*dtype))?;
            header.insert(
                key,
                serde_json::json!({"dtype": dtype, "shape": shape, "data_offsets": [at, end]}),
            );
            at = end;
        }
        let mut header = serde_json::to_vec(&header)?;
        header.resize(header.len().next_multiple_of(8), b' ');
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(&header)?;
        for key in tensors.keys() {
            file.write_all(&data(key)?)?;
        }
        Ok(())
    })
}
