//! Places updates among the operators that stay, and counts the versions of tensors again.

use std::collections::{BTreeMap, HashMap};

use super::columns::Column;
use crate::job::optimizer::Optimizer;
use crate::job::{Arg, Graph, Operand, Operator, Role, Tensor};
use crate::units::{OpId, TensorId};

/// How the replaced operators use each tensor.
#[derive(Default)]
pub(super) struct Seen<'a> {
    /// Their first read of it.
    pub first: BTreeMap<TensorId, &'a Operand>,
    /// The position of the first of them that touches it.
    first_at: BTreeMap<TensorId, usize>,
    /// The position of the last of them that writes it in place, and the version written.
    pub last_write: BTreeMap<TensorId, (usize, u32)>,
}

pub(super) fn seen<'a>(graph: &'a Graph, inside: &[bool]) -> Seen<'a> {
    let mut seen = Seen::default();
    for (at, operator) in graph.operators.iter().enumerate().filter(|(at, _)| inside[*at]) {
        for operand in operator.reads() {
            seen.first.entry(operand.tensor).or_insert(operand);
        }
        for operand in operator.reads().chain(operator.writes()) {
            seen.first_at.entry(operand.tensor).or_insert(at);
        }
        seen.last_write.extend(operator.updates().map(|w| (w.tensor, (at, w.version))));
    }
    seen
}

/// For each tensor, the positions of the operators that stay and write it, and of those that touch
/// it.
pub(super) struct Outside {
    writes: Vec<Vec<usize>>,
    touches: Vec<Vec<usize>>,
}

impl Outside {
    pub(super) fn new(graph: &Graph, inside: &[bool]) -> Self {
        let none = || vec![Vec::new(); graph.tensors.len()];
        let mut outside = Self { writes: none(), touches: none() };
        for (at, operator) in graph.operators.iter().enumerate().filter(|(at, _)| !inside[*at]) {
            operator.writes().for_each(|o| outside.writes[o.tensor.index()].push(at));
            let all = operator.reads().chain(operator.writes());
            all.for_each(|o| outside.touches[o.tensor.index()].push(at));
        }
        outside
    }

    /// The operator after which an update may run: the last one before the step that writes the
    /// gradient or touches the parameter or its states.
    pub(super) fn ready(&self, column: &Column, seen: &Seen<'_>) -> usize {
        let begin = [column.parameter, column.gradient]
            .iter()
            .filter_map(|t| seen.first_at.get(t).copied())
            .min()
            .unwrap_or(usize::MAX);
        let last = |of: &[Vec<usize>], t: TensorId| {
            let before = |list: &Vec<usize>| list.partition_point(|at| *at < begin);
            let list = of.get(t.index())?;
            list[..before(list)].last().copied()
        };
        let touched = column.states.values().chain([&column.parameter]);
        touched
            .filter_map(|t| last(&self.touches, *t))
            .chain(last(&self.writes, column.gradient))
            .max()
            .unwrap_or(0)
    }
}

/// The operators that stay and the updates in their new order, and the tensors without those that
/// only replaced operators used.
///
/// # Errors
/// When an operator that stays reads a tensor that only replaced operators made.
pub(super) fn assemble(
    graph: &Graph,
    inside: &[bool],
    tensors: Vec<Tensor>,
    mut updates: Vec<(usize, Operator)>,
    optimizer: Option<Optimizer>,
) -> Result<Graph, String> {
    updates.sort_by_key(|(at, _)| *at);
    let mut updates = updates.into_iter().peekable();
    let mut operators = Vec::new();
    let mut new_place = Vec::new();
    for (at, operator) in graph.operators.iter().enumerate() {
        new_place.push(OpId::from_index(operators.len()));
        if !inside[at] {
            operators.push(operator.clone());
        }
        while let Some((_, update)) = updates.next_if(|(place, _)| *place == at) {
            operators.push(update);
        }
    }
    let mut loss = graph.loss.clone();
    renumber(&mut operators, &mut loss, &tensors)?;
    let mut touched = vec![false; tensors.len()];
    operators.iter().flat_map(Operator::touches).for_each(|t| touched[t.index()] = true);
    let mut of_step = vec![false; tensors.len()];
    graph.operators.iter().flat_map(Operator::touches).for_each(|t| of_step[t.index()] = true);
    let mut new_id = vec![None; tensors.len()];
    let mut kept = Vec::new();
    for (at, mut tensor) in tensors.into_iter().enumerate() {
        // A tensor that no operator touches is kept if it has a name.
        if touched[at] || !of_step[at] || tensor.role != Role::Activation {
            new_id[at] = Some(TensorId::from_index(kept.len()));
            tensor.kept_until = tensor.kept_until.map(|o| new_place[o.index()]);
            kept.push(tensor);
        }
    }
    let rename = |operand: &mut Operand| {
        if let Some(id) = new_id[operand.tensor.index()] {
            operand.tensor = id;
        }
    };
    operators.iter_mut().flat_map(Operator::operands_mut).for_each(rename);
    loss.iter_mut().for_each(rename);
    Ok(Graph {
        name: graph.name.clone(),
        tensors: kept,
        operators,
        optimizer,
        loss,
        recorded_peak: graph.recorded_peak,
        origin: None,
    })
}

/// Numbers the versions again, after several writes became one or one became several. Operands that
/// read a version that is still written get its new number.
///
/// # Errors
/// When an operand reads a version that is no longer written.
pub(super) fn renumber(
    operators: &mut [Operator],
    loss: &mut Option<Operand>,
    tensors: &[Tensor],
) -> Result<(), String> {
    let mut now = vec![0u32; tensors.len()];
    let mut new: HashMap<(TensorId, u32), u32> = HashMap::new();
    for operator in operators {
        let mut written: BTreeMap<TensorId, u32> = BTreeMap::new();
        for operand in operator.outputs.iter().flatten().chain(&operator.hidden) {
            let next = if operand.version == 0 { 0 } else { now[operand.tensor.index()] + 1 };
            written.insert(operand.tensor, next);
        }
        for operand in operator.args.iter_mut().flat_map(Arg::operands_mut) {
            operand.version = if written.contains_key(&operand.tensor) {
                now[operand.tensor.index()]
            } else {
                read(operand, &new).ok_or_else(|| {
                    let name = &tensors[operand.tensor.index()].name;
                    format!("operator `{}` reads `{name}` as it is within the step", operator.name)
                })?
            };
        }
        let Operator { outputs, hidden, .. } = operator;
        for operand in outputs.iter_mut().flatten().chain(hidden) {
            let version = written[&operand.tensor];
            new.insert((operand.tensor, operand.version), version);
            now[operand.tensor.index()] = version;
            operand.version = version;
        }
    }
    if let Some(loss) = loss {
        loss.version = read(loss, &new).ok_or("the loss is something that the step makes")?;
    }
    Ok(())
}

/// The new number of the version that an operand reads.
fn read(operand: &Operand, new: &HashMap<(TensorId, u32), u32>) -> Option<u32> {
    let known = new.get(&(operand.tensor, operand.version)).copied();
    known.or((operand.version == 0).then_some(0))
}
