//! Splits multi-tensor operators outside a lowered step into one operator for each tensor of their
//! lists.

use std::collections::{HashMap, HashSet};

use super::place::renumber;
use crate::job::{Arg, Graph, Operand, Operator};
use crate::units::{OpId, TensorId};

/// Splits every multi-tensor operator whose elements depend only on each other. Of neighbouring
/// operators, the pieces for one tensor are put together.
pub(in crate::job) fn split(graph: Graph) -> Graph {
    let whole = graph.clone();
    let Graph { name, mut tensors, operators, optimizer, mut loss, recorded_peak, .. } = graph;
    let mut pieces: Vec<Operator> = Vec::with_capacity(operators.len());
    let mut new_place = Vec::with_capacity(operators.len());
    // Neighbours that were split into the same number of pieces: where they begin, and that number.
    let mut run: Option<(usize, usize)> = None;
    for operator in operators {
        new_place.push(OpId::from_index(pieces.len()));
        let parts = parts(&operator);
        let count = parts.as_ref().map(Vec::len);
        if let Some((from, length)) = run.filter(|(_, length)| Some(*length) != count) {
            interleave(&mut pieces[from..], length);
            run = None;
        }
        match parts {
            Some(parts) => {
                run.get_or_insert((pieces.len(), parts.len()));
                pieces.extend(parts);
            }
            None => pieces.push(operator),
        }
    }
    if let Some((from, length)) = run {
        interleave(&mut pieces[from..], length);
    }
    if renumber(&mut pieces, &mut loss, &tensors).is_err() {
        return whole;
    }
    for until in tensors.iter_mut().filter_map(|t| t.kept_until.as_mut()) {
        *until = new_place[until.index()];
    }
    Graph { name, tensors, operators: pieces, optimizer, loss, recorded_peak, origin: None }
}

/// The pieces of a multi-tensor operator; `None` for other operators, and where the pieces would
/// not compute the same.
fn parts(operator: &Operator) -> Option<Vec<Operator>> {
    if !operator.kind.contains("_foreach_") {
        return None;
    }
    let length = |arg: &Arg| if let Arg::Tensors(list) = arg { Some(list.len()) } else { None };
    let count = operator.args.iter().filter_map(length).max().filter(|n| *n > 1)?;
    let lists_agree = operator.args.iter().filter_map(length).all(|n| n == count || n == 0);
    // A host tensor of several numbers has one for each element, and they are not recorded.
    let held = |arg: &Arg| matches!(arg, Arg::Host { shape, .. } if !shape.is_empty());
    let outputs = operator.outputs.len();
    if !lists_agree || operator.args.iter().any(held) || (outputs > 0 && outputs != count) {
        return None;
    }
    let mut parts: Vec<Operator> = (0..count)
        .map(|at| Operator {
            name: format!("{}.{at}", operator.name),
            args: operator.args.iter().map(|arg| element(arg, at, count)).collect(),
            outputs: operator.outputs.get(at).cloned().into_iter().collect(),
            hidden: Vec::new(),
            ..operator.clone()
        })
        .collect();
    // The piece to which each tensor of the lists belongs. Arguments outside lists belong to all
    // pieces.
    let mut owner: HashMap<TensorId, usize> = HashMap::new();
    for (at, part) in parts.iter().enumerate() {
        let listed =
            part.args.iter().filter_map(|a| if let Arg::Tensors(l) = a { Some(l) } else { None });
        for operand in listed.flatten().flatten().chain(part.outputs.iter().flatten()) {
            if *owner.entry(operand.tensor).or_insert(at) != at && is_written(operator, operand) {
                return None;
            }
        }
    }
    for operand in &operator.hidden {
        match owner.get(&operand.tensor) {
            Some(&at) => parts[at].hidden.push(operand.clone()),
            // All elements set this flag: the pieces write it in turn.
            None if operand.version > 0 => {
                parts.iter_mut().for_each(|part| part.hidden.push(operand.clone()));
            }
            None => return None,
        }
    }
    parts.iter().all(|part| part.reads().next().is_some()).then_some(parts)
}

fn is_written(operator: &Operator, operand: &Operand) -> bool {
    operator.writes().any(|w| w.tensor == operand.tensor)
}

/// The argument for one element of the lists, of which there are `count`; other arguments stay.
fn element(arg: &Arg, at: usize, count: usize) -> Arg {
    match arg {
        Arg::Tensors(list) => Arg::Tensors(list.get(at).cloned().into_iter().collect()),
        Arg::Floats(list) if list.len() == count => Arg::Floats(vec![list[at]]),
        Arg::Ints(list) if list.len() == count => Arg::Ints(vec![list[at]]),
        other => other.clone(),
    }
}

/// Sorts the pieces of several operators (`length` pieces each) by tensor, unless one piece writes
/// a tensor that a piece for another tensor touches.
fn interleave(pieces: &mut [Operator], length: usize) {
    let written: HashSet<TensorId> =
        pieces.iter().flat_map(Operator::writes).map(|o| o.tensor).collect();
    let mut owner: HashMap<TensorId, usize> = HashMap::new();
    for (position, piece) in pieces.iter().enumerate() {
        let at = position % length;
        for tensor in piece.touches().into_iter().filter(|t| written.contains(t)) {
            if *owner.entry(tensor).or_insert(at) != at {
                return;
            }
        }
    }
    let mut numbered: Vec<(usize, Operator)> =
        pieces.iter_mut().map(std::mem::take).enumerate().collect();
    numbered.sort_by_key(|(position, _)| position % length);
    pieces.iter_mut().zip(numbered).for_each(|(slot, (_, piece))| *slot = piece);
}
