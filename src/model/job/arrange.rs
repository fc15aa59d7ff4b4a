//! Another order of a job's operators, and operators in pieces.
//!
//! An [`Arrangement`] says which operators of a graph move, and which run as several over
//! consecutive elements: elementwise ones, and those whose result's rows do not depend on each
//! other. [`arrange`] makes the *arranged graph* of it: the same computation with those operators
//! in their new places, under the names `NAME#0`, `NAME#1` … where they are pieces. A tensor that
//! only operators in pieces of one size touch becomes one tensor for each piece. Planners,
//! simulator and runner work on the arranged graph as on any other; it remembers its [`Origin`].
//! The planner chooses the arrangement, and the checker proves that it is legal
//! (`contract::check`).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use super::graph::{Arg, Graph, GraphError, Operand, Operator, Tensor};
use super::optimizer::Rule;
use crate::units::{Bytes, OpId, TensorId};

/// Operators in pieces have no more of them together.
const MOST_PIECES: u64 = 1 << 20;

/// Kinds that run in pieces beside updates: each makes one tensor, element by element.
const POINTWISE: [&str; 2] = ["aten::add", "aten::_to_copy"];

/// Kinds that make a matrix row by row, and run in pieces of whole rows. All that they read they
/// read as a whole. A piece has its first row and the rows of all in place of the argument
/// `ROWS`, which says how many rows there are.
const BY_ROWS: [&str; 2] = ["aten::embedding_backward", "aten::embedding_dense_backward"];
const ROWS: usize = 2;

/// What a plan changes in the framework's list of operators. Ids are those of the graph's file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Arrangement {
    /// Operators that run elsewhere. Those with the same place follow their order in this list.
    pub order: Vec<Moved>,
    /// Operators that run in pieces.
    pub pieces: Vec<Pieces>,
}

/// An operator that runs elsewhere than listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    /// Which.
    pub operator: OpId,
    /// Which of its pieces, if it is one alone: the others run where the operator does.
    pub piece: Option<u32>,
    /// The operator behind which it runs, one that does not move; `None` for the start.
    pub after: Option<OpId>,
}

/// An operator that runs as several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pieces {
    /// Which.
    pub operator: OpId,
    /// How many elements a piece has; the last one has the rest. Where the operator makes a matrix
    /// row by row, these are whole rows.
    pub elements: u64,
}

/// What an arranged graph was made of.
#[derive(Clone, Debug, PartialEq)]
pub struct Origin {
    /// The graph as its file has it.
    pub graph: Graph,
    /// What was changed.
    pub arrangement: Arrangement,
    /// For each operator, which one of the file it is, and which piece of that.
    pub operators: Vec<(OpId, Option<u32>)>,
    /// For each tensor, which one of the file it is, and at which byte of that it begins.
    pub tensors: Vec<(TensorId, Bytes)>,
}

/// An arrangement that the graph does not allow.
#[derive(Debug, thiserror::Error)]
pub enum ArrangeError {
    /// An operator can't be moved or split like this.
    #[error("operator `{operator}`: {problem}")]
    Operator {
        /// Its name.
        operator: String,
        /// What is wrong.
        problem: String,
    },
    /// There is no such operator.
    #[error("operator {0} is not in the graph")]
    Unknown(u32),
    /// What is made of it is no graph.
    #[error(transparent)]
    Graph(#[from] GraphError),
}

impl Arrangement {
    /// Nothing is changed.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.order.is_empty() && self.pieces.is_empty()
    }

    /// The operators of the file in the order in which they run, and between them the pieces that
    /// run elsewhere than the rest of their operator.
    ///
    /// # Errors
    /// When an operator does not exist, moves twice, or moves behind one that moves.
    pub fn sequence(&self, graph: &Graph) -> Result<Vec<(OpId, Option<u32>)>, ArrangeError> {
        let count = graph.operators.len();
        let mut moves = vec![false; count];
        let mut alone = BTreeSet::new();
        for Moved { operator, piece, .. } in &self.order {
            let moves = moves.get_mut(operator.index()).ok_or(ArrangeError::Unknown(operator.0))?;
            let twice = match piece {
                None => std::mem::replace(moves, true),
                Some(piece) => !alone.insert((*operator, *piece)),
            };
            if twice {
                return Err(refusal(graph, *operator, "moves twice; list it once in `order`"));
            }
        }
        let mut behind: BTreeMap<Option<OpId>, Vec<(OpId, Option<u32>)>> = BTreeMap::new();
        for Moved { operator, piece, after } in &self.order {
            if let Some(after) = after {
                match moves.get(after.index()) {
                    None => return Err(ArrangeError::Unknown(after.0)),
                    Some(true) => {
                        let name = &graph.operator(*after).name;
                        let problem =
                            format!("moves behind `{name}`, which moves too; name one that stays");
                        return Err(refusal(graph, *operator, problem));
                    }
                    Some(false) => {}
                }
            }
            behind.entry(*after).or_default().push((*operator, *piece));
        }
        let mut sequence = Vec::with_capacity(count);
        sequence.extend(behind.remove(&None).unwrap_or_default());
        for id in (0..count).map(OpId::from_index).filter(|id| !moves[id.index()]) {
            sequence.push((id, None));
            sequence.extend(behind.remove(&Some(id)).unwrap_or_default());
        }
        Ok(sequence)
    }
}

impl Arrangement {
    /// The pieces that run by themselves.
    fn alone(&self, graph: &Graph, split: &Split) -> Result<BTreeSet<(OpId, u32)>, ArrangeError> {
        let mut alone = BTreeSet::new();
        for &Moved { operator, piece, .. } in &self.order {
            let Some(piece) = piece else { continue };
            let count = split.count(operator).unwrap_or(0);
            if piece >= count {
                let problem = format!("has {count} pieces, so none of number {piece} moves");
                return Err(refusal(graph, operator, problem));
            }
            alone.insert((operator, piece));
        }
        Ok(alone)
    }
}

impl Graph {
    /// The graph as its file has it: itself, unless it is arranged.
    #[must_use]
    pub fn framework(&self) -> &Self {
        self.origin.as_ref().map_or(self, |origin| &origin.graph)
    }

    /// The operator of the file that one of this graph is, or is a piece of.
    #[must_use]
    pub fn framework_operator(&self, id: OpId) -> OpId {
        self.origin.as_ref().map_or(id, |origin| origin.operators[id.index()].0)
    }

    /// The tensor of the file that one of this graph is or is a piece of, and the byte of that at
    /// which it begins.
    #[must_use]
    pub fn framework_tensor(&self, id: TensorId) -> (TensorId, Bytes) {
        self.origin.as_ref().map_or((id, Bytes::ZERO), |origin| origin.tensors[id.index()])
    }
}

/// The elements of a row of the matrix that an operator makes row by row; `None` for all others.
#[must_use]
pub fn row(operator: &Operator) -> Option<u64> {
    if !BY_ROWS.contains(&operator.kind.as_str()) {
        return None;
    }
    let [rows, row] = operator.outputs.first()?.as_ref()?.shape[..] else { return None };
    let all = i64::try_from(rows).map(Arg::Int);
    (row > 0 && all.is_ok_and(|all| operator.args.get(ROWS) == Some(&all))).then_some(row)
}

/// Why an operator can't run in pieces, if it can't; otherwise how many elements it writes.
///
/// # Errors
/// A sentence's end for people.
pub fn splittable(graph: &Graph, id: OpId) -> Result<u64, &'static str> {
    let operator = graph.operator(id);
    let update = Rule::of_kind(&operator.kind).is_some();
    let by_rows = row(operator).is_some();
    if !update && !by_rows && !POINTWISE.contains(&operator.kind.as_str()) {
        return Err("runs as a whole: only updates, sums, conversions and the gradients of \
                    embeddings run in pieces");
    }
    let mut elements = None;
    for operand in operator.reads().filter(|_| !by_rows).chain(operator.writes()) {
        let tensor = graph.tensor(operand.tensor);
        let count = operand.elements();
        let whole = operand.is_contiguous()
            && operand.dtype == tensor.dtype
            && operand.offset == 0
            && Some(tensor.bytes.0) == count.checked_mul(operand.dtype.size());
        if !whole {
            return Err("works on part of a tensor, or not in the order of its elements");
        }
        if *elements.get_or_insert(count) != count {
            return Err("works on tensors of several sizes");
        }
    }
    // Each piece has room for the whole operator's workspace.
    if operator.random || operator.generates().count() != usize::from(!update) {
        return Err("draws random numbers, or makes more or fewer tensors than others of its kind");
    }
    elements.ok_or("works on no tensor")
}

/// The arranged graph; without any change the graph itself.
///
/// # Errors
/// When an operator can't be moved or split as the arrangement says. Arrangements are untrusted.
pub fn arrange(graph: &Graph, arrangement: &Arrangement) -> Result<Graph, ArrangeError> {
    if arrangement.is_empty() {
        return Ok(graph.clone());
    }
    let sequence = arrangement.sequence(graph)?;
    let split = Split::new(graph, arrangement)?;
    let (tensors, sources, first) = split.tensors(graph);
    let mut writer = Writer {
        graph,
        split: &split,
        first: &first,
        new: HashMap::new(),
        ran: vec![0; graph.operators.len()],
    };
    let alone = arrangement.alone(graph, &split)?;
    let mut operators = Vec::with_capacity(graph.operators.len());
    let mut origins = Vec::with_capacity(graph.operators.len());
    let mut begins = vec![None; graph.operators.len()];
    for (id, piece) in sequence {
        let pieces = match (split.count(id), piece) {
            (None, _) => vec![None],
            (Some(_), Some(piece)) => vec![Some(piece)],
            (Some(count), None) => {
                (0..count).filter(|n| !alone.contains(&(id, *n))).map(Some).collect()
            }
        };
        for piece in pieces {
            begins[id.index()].get_or_insert(OpId::from_index(operators.len()));
            operators.push(match piece {
                None => writer.whole(id)?,
                Some(piece) => writer.piece(id, piece)?,
            });
            origins.push((id, piece));
        }
    }
    let mut tensors = tensors;
    for until in tensors.iter_mut().filter_map(|t| t.kept_until.as_mut()) {
        *until = begins[until.index()].unwrap_or(*until);
    }
    let mut loss = graph.loss.clone();
    if let Some(loss) = &mut loss {
        *loss =
            writer.whole_operand(loss).ok_or(GraphError::Loss("nothing makes it".to_owned()))?;
    }
    let names: Vec<String> = operators.iter().map(|o| o.name.clone()).collect();
    let (name, optimizer) = (graph.name.clone(), graph.optimizer.clone());
    let mut made = Graph::new(name, tensors, operators, optimizer, loss, graph.recorded_peak)?;
    let listed = made.operators.iter().map(|o| &o.name);
    if let Some((_, name)) = listed.zip(&names).find(|(now, then)| now != then) {
        return Err(ArrangeError::Operator {
            operator: name.clone(),
            problem: "runs before something that it waits for; move it further back".to_owned(),
        });
    }
    made.origin = Some(Arc::new(Origin {
        graph: graph.clone(),
        arrangement: arrangement.clone(),
        operators: origins,
        tensors: sources,
    }));
    Ok(made)
}

fn refusal(graph: &Graph, id: OpId, problem: impl Into<String>) -> ArrangeError {
    let operator = graph.operator(id).name.clone();
    ArrangeError::Operator { operator, problem: problem.into() }
}

/// What runs and lies in pieces.
struct Split {
    /// By operator, elements of each piece and of all; zero where it stays whole.
    operators: Vec<(u64, u64)>,
    /// By tensor, elements of each piece; zero where it stays whole.
    tensors: Vec<u64>,
}

impl Split {
    fn new(graph: &Graph, arrangement: &Arrangement) -> Result<Self, ArrangeError> {
        let mut operators = vec![(0, 0); graph.operators.len()];
        let mut pieces = 0;
        for &Pieces { operator, elements } in &arrangement.pieces {
            let Some(slot) = operators.get_mut(operator.index()) else {
                return Err(ArrangeError::Unknown(operator.0));
            };
            if slot.0 > 0 {
                return Err(refusal(graph, operator, "is split twice; list it once in `pieces`"));
            }
            let all = splittable(graph, operator).map_err(|why| refusal(graph, operator, why))?;
            if elements == 0 || elements >= all {
                let problem = format!(
                    "has {all} elements, so a piece of {elements} is none; give 1 to {}",
                    all.saturating_sub(1)
                );
                return Err(refusal(graph, operator, problem));
            }
            if let Some(row) = row(graph.operator(operator)).filter(|row| elements % row > 0) {
                let problem = format!(
                    "makes rows of {row} elements, so a piece of {elements} ends within one; give \
                     a multiple of {row}"
                );
                return Err(refusal(graph, operator, problem));
            }
            pieces += all.div_ceil(elements);
            if pieces > MOST_PIECES {
                return Err(refusal(
                    graph,
                    operator,
                    "makes more than 2^20 pieces; make them larger",
                ));
            }
            *slot = (elements, all);
        }
        let mut tensors: Vec<Option<u64>> = vec![None; graph.tensors.len()];
        for (operator, &(elements, _)) in graph.operators.iter().zip(&operators) {
            let read = if row(operator).is_some() { 0 } else { elements };
            let reads = operator.reads().map(|operand| (operand, read));
            for (operand, elements) in reads.chain(operator.writes().map(|o| (o, elements))) {
                let size = tensors[operand.tensor.index()].get_or_insert(elements);
                *size = if *size == elements { *size } else { 0 };
            }
        }
        let loss = graph.loss.as_ref().map(|l| l.tensor.index());
        let lies = |(index, elements): (usize, Option<u64>)| {
            elements.filter(|_| loss != Some(index)).unwrap_or(0)
        };
        let tensors: Vec<u64> = tensors.into_iter().enumerate().map(lies).collect();
        for &Pieces { operator, .. } in &arrangement.pieces {
            let mut made = graph.operator(operator).generates();
            if let Some(whole) = made.find(|made| tensors[made.tensor.index()] == 0) {
                let name = &graph.tensor(whole.tensor).name;
                let problem = format!(
                    "makes `{name}`, and not all that works on it has pieces of one size; split \
                     all of that alike, or this not"
                );
                return Err(refusal(graph, operator, problem));
            }
        }
        Ok(Self { operators, tensors })
    }

    /// How many pieces an operator has, where it is split.
    fn count(&self, id: OpId) -> Option<u32> {
        let (elements, all) = self.operators[id.index()];
        (elements > 0).then(|| u32::try_from(all.div_ceil(elements)).unwrap_or(u32::MAX))
    }

    /// The tensors, whole and in pieces; where each is from; and for each tensor of the graph the
    /// first of them.
    fn tensors(&self, graph: &Graph) -> (Vec<Tensor>, Vec<(TensorId, Bytes)>, Vec<TensorId>) {
        let (mut tensors, mut sources, mut first) = (Vec::new(), Vec::new(), Vec::new());
        for (index, tensor) in graph.tensors.iter().enumerate() {
            let (id, size) = (TensorId::from_index(index), tensor.dtype.size());
            first.push(TensorId::from_index(tensors.len()));
            let elements = self.tensors[index];
            if elements == 0 {
                tensors.push(tensor.clone());
                sources.push((id, Bytes::ZERO));
                continue;
            }
            let all = tensor.bytes.0 / size;
            for (piece, begin) in
                (0..all).step_by(usize::try_from(elements).unwrap_or(usize::MAX)).enumerate()
            {
                let count = elements.min(all - begin);
                tensors.push(Tensor {
                    name: format!("{}#{piece}", tensor.name),
                    bytes: Bytes(count * size),
                    shape: vec![count],
                    ..tensor.clone()
                });
                sources.push((id, Bytes(begin * size)));
            }
        }
        (tensors, sources, first)
    }
}

/// Writes operators under new ids and versions.
struct Writer<'a> {
    graph: &'a Graph,
    split: &'a Split,
    first: &'a [TensorId],
    /// The new number of a version that is written; of version 0 only where it is not 0.
    new: HashMap<(TensorId, u32), u32>,
    /// By operator, how many of its pieces have run.
    ran: Vec<u32>,
}

impl Writer<'_> {
    /// A version's new number; `None` where nothing has written it yet.
    fn version(&self, tensor: TensorId, version: u32) -> Option<u32> {
        if version == 0 { Some(0) } else { self.new.get(&(tensor, version)).copied() }
    }

    fn whole_operand(&self, operand: &Operand) -> Option<Operand> {
        let version = self.version(operand.tensor, operand.version)?;
        let tensor = self.first[operand.tensor.index()];
        Some(Operand { tensor, version, ..operand.clone() })
    }

    fn early(&self, id: OpId, operand: &Operand) -> ArrangeError {
        let name = &self.graph.tensor(operand.tensor).name;
        let problem = format!("runs before what writes the `{name}` that it reads");
        refusal(self.graph, id, problem)
    }

    /// An operator as it is.
    fn whole(&mut self, id: OpId) -> Result<Operator, ArrangeError> {
        let mut operator = self.graph.operator(id).clone();
        for operand in operator.args.iter_mut().flat_map(Arg::operands_mut) {
            *operand = self.whole_operand(operand).ok_or_else(|| self.early(id, operand))?;
        }
        let written = operator.outputs.iter_mut().flatten().chain(&mut operator.hidden);
        for operand in written {
            let version = match operand.version.checked_sub(1) {
                None => 0,
                Some(before) => {
                    let before = self.version(operand.tensor, before);
                    before.ok_or_else(|| self.early(id, operand))? + 1
                }
            };
            self.new.insert((operand.tensor, operand.version), version);
            operand.tensor = self.first[operand.tensor.index()];
            operand.version = version;
        }
        Ok(operator)
    }

    /// One piece of an operator. All its operands are whole tensors of as many elements, but for
    /// what it reads where it makes rows.
    fn piece(&mut self, id: OpId, piece: u32) -> Result<Operator, ArrangeError> {
        let of = self.graph.operator(id);
        let ran = self.ran[id.index()];
        let (elements, all) = self.split.operators[id.index()];
        let begin = u64::from(piece) * elements;
        let count = elements.min(all - begin);
        let mut operator = of.clone();
        operator.name = format!("{}#{piece}", of.name);
        let share = |ns: u64| u128::from(ns) * u128::from(count) / u128::from(all);
        operator.duration_ns =
            of.duration_ns.map(|ns| u64::try_from(share(ns)).unwrap_or(ns).max(1));
        let slice = |operand: &Operand| -> Option<Operand> {
            let in_pieces = self.split.tensors[operand.tensor.index()] > 0;
            let writes = of.updates().any(|w| w.tensor == operand.tensor);
            // What the pieces before this one have written of a tensor that stays whole.
            let before = if writes && !in_pieces { ran } else { 0 };
            let index = if in_pieces { piece } else { 0 };
            Some(Operand {
                tensor: TensorId(self.first[operand.tensor.index()].0 + index),
                version: self.version(operand.tensor, operand.version)? + before,
                dtype: operand.dtype,
                offset: if in_pieces { 0 } else { begin },
                shape: vec![count],
                stride: vec![1],
            })
        };
        let row = row(of);
        for operand in operator.args.iter_mut().flat_map(Arg::operands_mut) {
            let read = if row.is_some() { self.whole_operand(operand) } else { slice(operand) };
            *operand = read.ok_or_else(|| self.early(id, operand))?;
        }
        for operand in operator.outputs.iter_mut().flatten().chain(&mut operator.hidden) {
            let made = u32::from(operand.version > 0);
            let before = Operand { version: operand.version - made, ..operand.clone() };
            let read = slice(&before).ok_or_else(|| self.early(id, operand))?;
            *operand = Operand { version: read.version + made, ..read };
            if let Some(row) = row {
                (operand.shape, operand.stride) = (vec![count / row, row], vec![row, 1]);
            }
        }
        if let Some(row) = row {
            let rows = [begin / row, all / row].map(|rows| i64::try_from(rows).unwrap_or(i64::MAX));
            operator.args[ROWS] = Arg::Ints(rows.to_vec());
        }
        self.ran[id.index()] += 1;
        if self.split.count(id) == Some(ran + 1) {
            self.end(id, ran + 1);
        }
        Ok(operator)
    }

    /// All pieces of an operator have been written.
    fn end(&mut self, id: OpId, pieces: u32) {
        for operand in self.graph.operator(id).updates() {
            let in_pieces = self.split.tensors[operand.tensor.index()] > 0;
            let before = self.version(operand.tensor, operand.version - 1).unwrap_or(0);
            let version = before + if in_pieces { 1 } else { pieces };
            self.new.insert((operand.tensor, operand.version), version);
        }
    }
}
