//! That another order and pieces compute what the graph's file says.
//!
//! Walks the arranged operators and keeps, for every byte of every tensor of the file, which
//! version it holds. Each operator must find what the file's operator reads, and all of it must be
//! written in the end: that covers reads after writes, writes after reads and writes after writes.
//! Shares no code with what arranges graphs.

use std::collections::BTreeMap;

use super::{Refusal, Refusals};
use crate::contract::plan::JobPlan;
use crate::job::{Arg, Graph, Operand, Operator, Origin};
use crate::units::{Nanos, OpId};

/// Kinds that treat each element by itself, whatever stands beside it.
const ELEMENTWISE: [&str; 13] = [
    "aten::add",
    "aten::_to_copy",
    "neap::sgd",
    "neap::adam",
    "neap::adamw",
    "neap::rmsprop",
    "neap::adagrad",
    "neap::nadam",
    "neap::radam",
    "neap::adamax",
    "neap::adadelta",
    "neap::asgd",
    "neap::rprop",
];

/// Kinds that make each row of a matrix by itself, from all that they read.
const BY_ROWS: [&str; 2] = ["aten::embedding_backward", "aten::embedding_dense_backward"];

/// Adds a refusal for the first thing that is wrong with a job's order and pieces.
pub fn prove(job: &JobPlan, graph: &Graph, refusals: &mut Refusals) {
    let proved = match &graph.origin {
        None if job.arrangement.is_empty() && job.whole.is_empty() => Ok(()),
        None => Err("the graph stands in the order of its file, the plan has another".to_owned()),
        Some(origin) if origin.arrangement != job.arrangement => {
            Err("the graph is not in the order and pieces of the plan".to_owned())
        }
        Some(origin) => whole(job, origin).and_then(|()| Walk::new(origin, graph)?.walk()),
    };
    if let Err(problem) = proved {
        refusals.add(Refusal::Arrangement(problem));
    }
}

/// Each operator in pieces, and no other, has a latency as a whole.
fn whole(job: &JobPlan, origin: &Origin) -> Result<(), String> {
    let mut split: Vec<OpId> = job.arrangement.pieces.iter().map(|p| p.operator).collect();
    split.sort();
    if !job.whole.keys().eq(&split) || job.whole.values().any(|l| l.time == Nanos::ZERO) {
        return Err("each operator in pieces has one latency as a whole, of 1 ns at least".into());
    }
    match split.iter().find(|id| id.index() >= origin.graph.operators.len()) {
        Some(id) => Err(format!("operator {} is not in the graph's file", id.0)),
        None => Ok(()),
    }
}

/// A piece: its number, elements of a piece, and of all.
type Piece = (u64, u64, u64);

/// The elements of a row of what an operator makes, if it makes it row by row.
fn row(operator: &Operator) -> Option<u64> {
    let made = operator.outputs.iter().flatten().next().filter(|_| operator.hidden.is_empty())?;
    let is_so = BY_ROWS.contains(&operator.kind.as_str()) && operator.outputs.len() == 1;
    match made.shape[..] {
        [_, row] if is_so && row > 0 => Some(row),
        _ => None,
    }
}

/// The file's operators, and the pieces of those that run in pieces, in the order that the plan
/// says. `elements` has the elements of a piece by operator.
fn sequence(
    origin: &Origin,
    elements: &BTreeMap<OpId, u64>,
) -> Result<Vec<(OpId, Option<Piece>)>, String> {
    let count = origin.graph.operators.len();
    // Where each stands: behind which position of the file, and the how manieth there.
    let mut places: Vec<(usize, usize)> = (0..count).map(|at| (at + 1, 0)).collect();
    let mut pieces = BTreeMap::new();
    let mut moves = vec![false; count];
    for (number, moved) in origin.arrangement.order.iter().enumerate() {
        let at = moved.operator.index();
        let behind = moved.after.map_or(0, |after| after.index() + 1);
        let place = (behind, number + 1);
        let known = at < count && behind <= count;
        let again = known
            && match moved.piece {
                None => std::mem::replace(&mut moves[at], true),
                Some(piece) => pieces.insert((moved.operator, u64::from(piece)), place).is_some(),
            };
        if !known || again {
            return Err("`order` names an operator that is not there, or one twice".to_owned());
        }
        if moved.piece.is_none() {
            places[at] = place;
        }
    }
    let stays = |moved: &crate::job::Moved| moved.after.is_none_or(|after| !moves[after.index()]);
    if !origin.arrangement.order.iter().all(stays) {
        return Err("`order` moves an operator behind one that moves itself".to_owned());
    }
    let mut order = Vec::with_capacity(count);
    for id in (0..count).map(OpId::from_index) {
        let place = places[id.index()];
        let Some(&size) = elements.get(&id) else {
            order.push((place, (id, None)));
            continue;
        };
        let all = origin.graph.operator(id).writes().next().map_or(0, Operand::elements);
        for number in 0..all.div_ceil(size) {
            let place = pieces.remove(&(id, number)).unwrap_or(place);
            order.push((place, (id, Some((number, size, all)))));
        }
    }
    if let Some((id, number)) = pieces.keys().next() {
        let name = &origin.graph.operator(*id).name;
        return Err(format!("`order` moves piece {number} of `{name}`, which has none of that"));
    }
    order.sort_by_key(|(place, _)| *place);
    Ok(order.into_iter().map(|(_, step)| step).collect())
}

/// What bytes of a tensor hold: from each position on, a version; `None` before anything is made.
type Held = Vec<(u64, Option<u32>)>;

struct Walk<'a> {
    origin: &'a Origin,
    graph: &'a Graph,
    /// By tensor of the file.
    held: Vec<Held>,
    /// By tensor of the arranged graph, the version that is on it now.
    now: Vec<u32>,
    /// By operator of the file, elements of a piece.
    elements: BTreeMap<OpId, u64>,
    /// Under which number each of the file's versions is on its whole tensor.
    numbers: BTreeMap<(u32, u32), u32>,
}

impl<'a> Walk<'a> {
    fn new(origin: &'a Origin, graph: &'a Graph) -> Result<Self, String> {
        if origin.operators.len() != graph.operators.len()
            || origin.tensors.len() != graph.tensors.len()
        {
            return Err("the arranged graph does not say where it comes from".to_owned());
        }
        tensors(origin, graph)?;
        let made = origin.graph.generators();
        let begin = |made: &Option<OpId>| vec![(0, if made.is_some() { None } else { Some(0) })];
        let mut elements = BTreeMap::new();
        for pieces in &origin.arrangement.pieces {
            let operator = origin.graph.operator(pieces.operator);
            let in_rows = row(operator).is_some_and(|row| pieces.elements.is_multiple_of(row));
            if !in_rows && !ELEMENTWISE.contains(&operator.kind.as_str()) {
                return Err(format!(
                    "operator `{}` runs in pieces, but `{}` is not elementwise, nor are these \
                     whole rows",
                    operator.name, operator.kind
                ));
            }
            if elements.insert(pieces.operator, pieces.elements).is_some() || pieces.elements == 0 {
                return Err(format!(
                    "operator `{}` is split twice, or into nothing",
                    operator.name
                ));
            }
        }
        Ok(Self {
            origin,
            graph,
            held: made.iter().map(begin).collect(),
            now: vec![0; graph.tensors.len()],
            elements,
            numbers: BTreeMap::new(),
        })
    }

    fn walk(mut self) -> Result<(), String> {
        let mut at = 0;
        let (mut random, mut begins) = (None, vec![None; self.origin.graph.operators.len()]);
        for (id, piece) in sequence(self.origin, &self.elements)? {
            let operator = self.origin.graph.operator(id);
            if operator.random && random.replace(id) > Some(id) {
                return Err(format!(
                    "operator `{}` draws random numbers and runs out of turn",
                    operator.name
                ));
            }
            begins[id.index()].get_or_insert(at);
            if at == self.graph.operators.len() {
                return Err("operators are missing from the arranged graph".to_owned());
            }
            self.operator(id, operator, at, piece)
                .map_err(|what| format!("operator `{}` {what}", self.graph.operators[at].name))?;
            at += 1;
        }
        if at < self.graph.operators.len() {
            return Err("the arranged graph has operators that the file has not".to_owned());
        }
        self.end(&begins)
    }

    /// Everything has been written, and what refers to operators and versions was kept.
    fn end(&self, begins: &[Option<usize>]) -> Result<(), String> {
        let file = &self.origin.graph;
        let mut last: Vec<Option<u32>> = self.held.iter().map(|h| h[0].1).collect();
        for write in file.operators.iter().flat_map(Operator::writes) {
            let last = &mut last[write.tensor.index()];
            *last = (*last).max(Some(write.version));
        }
        for ((held, last), tensor) in self.held.iter().zip(last).zip(&file.tensors) {
            if held.iter().any(|(_, version)| *version != last) {
                return Err(format!("`{}` is not written as a whole", tensor.name));
            }
        }
        for (tensor, &(of, _)) in self.graph.tensors.iter().zip(&self.origin.tensors) {
            let until = file.tensor(of).kept_until.and_then(|until| begins[until.index()]);
            let until = until.map(OpId::from_index);
            if tensor.kept_until != until {
                return Err(format!("`{}` is kept until another operator", tensor.name));
            }
        }
        let same = match (&file.loss, &self.graph.loss) {
            (None, None) => true,
            (Some(then), Some(now)) => {
                let number = self.numbers.get(&(then.tensor.0, then.version)).copied();
                now.version == number.unwrap_or(0)
                    && self.origin.tensors[now.tensor.index()].0 == then.tensor
                    && sees(then, now)
            }
            _ => false,
        };
        if same { Ok(()) } else { Err("the loss is another".to_owned()) }
    }

    /// One operator of the arranged graph, or a piece.
    fn operator(
        &mut self,
        id: OpId,
        file: &Operator,
        at: usize,
        piece: Option<Piece>,
    ) -> Result<(), String> {
        let now = &self.graph.operators[at];
        let (of, part) = self.origin.operators[at];
        let row = piece.and(row(file));
        let number = piece.map(|(n, ..)| n);
        if of != id || part.map(u64::from) != number || !alike(file, now, piece) {
            return Err(format!("does not stand for `{}`", file.name));
        }
        let reads: Vec<_> = file.reads().zip(now.reads()).collect();
        let writes: Vec<_> = file.writes().zip(now.writes()).collect();
        for (then, now) in &reads {
            let range = self.range(then, now, piece.filter(|_| row.is_none()), None)?;
            self.holds(then, range, Some(then.version))?;
            self.numbered(now, self.now[now.tensor.index()])?;
        }
        // One operator may mention what it writes several times.
        let mut written: BTreeMap<u32, (u64, u64)> = BTreeMap::new();
        for (then, now) in &writes {
            let range = self.range(then, now, piece, row)?;
            if written.insert(now.tensor.0, range).is_none() {
                self.holds(then, range, then.version.checked_sub(1))?;
            }
            let next = if then.version == 0 { 0 } else { self.now[now.tensor.index()] + 1 };
            self.numbered(now, next)?;
        }
        for (then, now) in &writes {
            if let Some(range) = written.remove(&now.tensor.0) {
                let size = self.origin.graph.tensor(then.tensor).bytes.0;
                set(&mut self.held[then.tensor.index()], range, size, then.version);
                self.now[now.tensor.index()] = now.version;
                self.numbers.insert((then.tensor.0, then.version), now.version);
            }
        }
        Ok(())
    }

    /// The bytes of the file's tensor that an operand stands for; with `row` it has whole rows.
    fn range(
        &self,
        then: &Operand,
        now: &Operand,
        piece: Option<Piece>,
        row: Option<u64>,
    ) -> Result<(u64, u64), String> {
        let tensor = self.origin.graph.tensor(then.tensor);
        let (of, base) = self.origin.tensors[now.tensor.index()];
        let lies = self.graph.tensor(now.tensor).bytes;
        let other = || format!("sees another part of `{}` than it should", tensor.name);
        if of != then.tensor {
            return Err(other());
        }
        let Some((number, elements, all)) = piece else {
            let is_whole = base.0 == 0 && lies == tensor.bytes && sees(then, now);
            return if is_whole { Ok((0, tensor.bytes.0.max(1))) } else { Err(other()) };
        };
        let size = then.dtype.size();
        let is_whole = then.elements() == all
            && then.offset == 0
            && then.is_contiguous()
            && all.checked_mul(size) == Some(tensor.bytes.0);
        let begin = number * elements;
        let count = elements.min(all - begin);
        let in_order = match row {
            None => now.shape == [count] && now.stride == [1],
            Some(row) => now.shape == [count / row, row] && now.stride == [row, 1],
        };
        let sees_its_own = now.dtype == then.dtype
            && in_order
            && now.offset.checked_mul(size).and_then(|o| o.checked_add(base.0))
                == Some(begin * size);
        if is_whole && sees_its_own && then.version.max(now.version) < u32::MAX {
            return Ok((begin * size, (begin + count) * size));
        }
        Err(other())
    }

    fn holds(
        &self,
        operand: &Operand,
        (from, until): (u64, u64),
        wanted: Option<u32>,
    ) -> Result<(), String> {
        let held = &self.held[operand.tensor.index()];
        let first = held.partition_point(|(begin, _)| *begin <= from) - 1;
        let over = held[first..].iter().take_while(|(begin, _)| *begin < until);
        match over.map(|(_, version)| *version).find(|version| *version != wanted) {
            None => Ok(()),
            Some(found) => {
                let name = &self.origin.graph.tensor(operand.tensor).name;
                let say = |version: Option<u32>| match version {
                    Some(version) => format!("version {version}"),
                    None => "nothing yet".to_owned(),
                };
                Err(format!(
                    "runs out of order: of `{name}` it needs {}, and finds {}",
                    say(wanted),
                    say(found)
                ))
            }
        }
    }

    fn numbered(&self, operand: &Operand, version: u32) -> Result<(), String> {
        if operand.version == version {
            return Ok(());
        }
        let name = &self.graph.tensor(operand.tensor).name;
        Err(format!("names version {} of `{name}`, which is {version}", operand.version))
    }
}

/// The tensors of the file, each as a whole or in consecutive parts.
fn tensors(origin: &Origin, graph: &Graph) -> Result<(), String> {
    let mut reached = vec![None; origin.graph.tensors.len()];
    for (tensor, &(of, base)) in graph.tensors.iter().zip(&origin.tensors) {
        let wrong = || format!("`{}` is no part of a tensor of the file", tensor.name);
        let file = origin.graph.tensors.get(of.index()).ok_or_else(wrong)?;
        let until = &mut reached[of.index()];
        let alike = file.role == tensor.role && file.dtype == tensor.dtype;
        if !alike || until.unwrap_or(0) != base.0 || (until.is_some() && tensor.bytes.0 == 0) {
            return Err(wrong());
        }
        *until = Some(base.0 + tensor.bytes.0);
    }
    for (tensor, until) in origin.graph.tensors.iter().zip(reached) {
        if until != Some(tensor.bytes.0) {
            return Err(format!("parts of `{}` are missing", tensor.name));
        }
    }
    Ok(())
}

/// The same view of the same storage.
fn sees(then: &Operand, now: &Operand) -> bool {
    (then.dtype, then.offset, &then.shape, &then.stride)
        == (now.dtype, now.offset, &now.shape, &now.stride)
}

/// The same operator but for what it works on. A piece that makes rows says which.
fn alike(file: &Operator, now: &Operator, piece: Option<Piece>) -> bool {
    let name = piece.map_or_else(|| file.name.clone(), |(n, ..)| format!("{}#{n}", file.name));
    let bare = |operator: &Operator| {
        let mut bare = operator.clone();
        let listed = bare.args.iter_mut().flat_map(|arg| match arg {
            Arg::Tensor(operand) => vec![operand],
            Arg::Tensors(list) => list.iter_mut().flatten().collect(),
            _ => Vec::new(),
        });
        let written = bare.outputs.iter_mut().flatten().chain(&mut bare.hidden);
        for operand in listed.chain(written) {
            *operand = Operand {
                tensor: crate::units::TensorId(0),
                version: 0,
                dtype: operand.dtype,
                offset: 0,
                shape: Vec::new(),
                stride: Vec::new(),
            };
        }
        bare.name.clear();
        // A piece takes its part of the time.
        bare.duration_ns = bare.duration_ns.filter(|_| piece.is_none());
        bare
    };
    let mut expected = bare(file);
    if let Some(((number, elements, all), row)) = piece.zip(row(file)) {
        let rows = [number * elements / row, all / row].map(i64::try_from);
        match (expected.args.get_mut(2), rows) {
            (Some(of), [Ok(first), Ok(all)]) if *of == Arg::Int(all) => {
                *of = Arg::Ints(vec![first, all]);
            }
            _ => return false,
        }
    }
    now.name == name && expected == bare(now)
}

/// Bytes of a tensor of `size` now hold a version.
fn set(held: &mut Held, (from, until): (u64, u64), size: u64, version: u32) {
    let after = held[held.partition_point(|(begin, _)| *begin <= until) - 1].1;
    held.retain(|(begin, _)| *begin < from || *begin > until);
    let at = held.partition_point(|(begin, _)| *begin < from);
    held.insert(at, (from, Some(version)));
    if until < size {
        held.insert(at + 1, (until, after));
    }
    held.dedup_by_key(|(_, version)| *version);
}

#[cfg(test)]
mod tests {
    use super::ELEMENTWISE;
    use crate::job::optimizer::RULES;

    /// A new optimizer belongs here if its arithmetic is elementwise; if not, it must not be split.
    #[test]
    fn every_update_that_may_be_split_is_elementwise() {
        assert!(RULES.iter().all(|rule| ELEMENTWISE.contains(&rule.kind)));
    }
}
