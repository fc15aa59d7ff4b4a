//! Making a graph. [`Graph::new`] is the only way to make one, and checks everything that later
//! code relies on.

use std::collections::HashSet;

use super::graph::{Arg, Graph, GraphError, Operand, Operator, Tensor};
use super::optimizer::Optimizer;
use super::order;
use crate::units::{Bytes, OpId, TensorId};

/// Upper limit of sizes, of sums of sizes, and of sums of durations.
const LIMIT: u64 = 1 << 62;

impl Graph {
    /// Makes a graph of these parts. It checks them, rounds workspaces up to blocks, and sorts
    /// operators into one deterministic order of execution ([`super::order`]). A listing that is
    /// already in a valid order is kept. `kept_until` refers to the operators as given.
    ///
    /// # Errors
    /// When names repeat, an id or version does not exist, a version is written twice or never, a
    /// view reaches outside its storage, sizes or times overflow, or operators wait for each other.
    pub fn new(
        name: String,
        mut tensors: Vec<Tensor>,
        mut operators: Vec<Operator>,
        optimizer: Option<Optimizer>,
        loss: Option<Operand>,
        recorded_peak: Option<Bytes>,
    ) -> Result<Self, GraphError> {
        if u32::try_from(tensors.len()).is_err()
            || u32::try_from(operators.len()).is_err()
            || recorded_peak.is_some_and(|b| b.0 > LIMIT)
        {
            return Err(GraphError::TooLarge);
        }
        unique("tensors", tensors.iter().map(|t| t.name.as_str()))?;
        unique("operators", operators.iter().map(|o| o.name.as_str()))?;
        sizes(&tensors, &mut operators)?;
        let groups = optimizer.as_ref().map_or(0, |o| o.groups.len());
        if optimizer.is_some() && groups == 0 {
            return Err(GraphError::Optimizer("it has no parameter group; leave it out".into()));
        }
        for operator in &operators {
            operands(operator, &tensors).and_then(|()| group(operator, groups)).map_err(
                |problem| GraphError::Operator { operator: operator.name.clone(), problem },
            )?;
        }
        let versions = Versions::new(&tensors, &operators)?;
        for tensor in tensors.iter().enumerate().filter(|(_, t)| t.kept_until.is_some()) {
            kept(tensor, &versions, operators.len())?;
        }
        if let Some(loss) = &loss {
            view(loss, &tensors)
                .and_then(|()| versions.exists(loss, &tensors))
                .map_err(GraphError::Loss)?;
        }
        let before = order::dependencies(&tensors, &operators, &versions)?;
        let listed = order::order(&operators, &before)?;
        reorder(&mut tensors, &mut operators, &listed);
        Ok(Self { name, tensors, operators, optimizer, loss, recorded_peak, origin: None })
    }

    /// Raises the workspaces of operators to at least these sizes, rounded up to blocks: the
    /// algorithms of a library may need more than was recorded. The graph's file and hash keep the
    /// recorded sizes.
    ///
    /// # Errors
    /// When sizes overflow; the graph may then have some of them.
    pub fn reserve(
        &mut self,
        wanted: impl IntoIterator<Item = (OpId, Bytes)>,
    ) -> Result<(), GraphError> {
        for (id, bytes) in wanted {
            if let Some(operator) = self.operators.get_mut(id.index()) {
                operator.workspace = operator.workspace.max(bytes);
            }
        }
        sizes(&self.tensors, &mut self.operators)
    }
}

fn unique<'a>(what: &'static str, names: impl Iterator<Item = &'a str>) -> Result<(), GraphError> {
    let mut seen = HashSet::new();
    for name in names {
        if !seen.insert(name) {
            return Err(GraphError::DuplicateName { what, name: name.to_owned() });
        }
    }
    Ok(())
}

/// The product of a shape's extents, with zeros counted as one so that the product may be taken in
/// any order; `None` above the limit.
fn volume(shape: &[u64]) -> Option<u64> {
    shape.iter().try_fold(1u64, |all, &n| all.checked_mul(n.max(1)).filter(|&x| x <= LIMIT / 16))
}

/// Checks that the parameter group that the operator names exists.
fn group(operator: &Operator, groups: usize) -> Result<(), String> {
    match operator.group {
        Some(group) if group as usize >= groups => {
            Err(format!("it names parameter group {group}, and the optimizer has {groups}"))
        }
        _ => Ok(()),
    }
}

fn sizes(tensors: &[Tensor], operators: &mut [Operator]) -> Result<(), GraphError> {
    let mut total = 0u64;
    let mut add = |bytes: Bytes| {
        total = if bytes.0 > LIMIT { LIMIT } else { total + bytes.in_blocks().0 };
        if total >= LIMIT { Err(GraphError::TooLarge) } else { Ok(()) }
    };
    for tensor in tensors {
        if volume(&tensor.shape).is_none() {
            let problem =
                format!("its shape {:?} has more elements than can be counted", tensor.shape);
            return Err(GraphError::Tensor { tensor: tensor.name.clone(), problem });
        }
        add(tensor.bytes)?;
    }
    let mut duration = 0u64;
    for operator in operators {
        add(operator.workspace)?;
        operator.workspace = operator.workspace.in_blocks();
        duration = duration.saturating_add(operator.duration_ns.unwrap_or(0));
        if duration >= LIMIT {
            let problem =
                "with it, all durations together exceed 2^62 ns; check `duration_ns`".to_owned();
            return Err(GraphError::Operator { operator: operator.name.clone(), problem });
        }
    }
    Ok(())
}

fn operands(operator: &Operator, tensors: &[Tensor]) -> Result<(), String> {
    for operand in operator.reads().chain(operator.writes()) {
        view(operand, tensors)?;
    }
    for arg in &operator.args {
        if let Arg::Host { shape, .. } = arg
            && volume(shape).is_none()
        {
            return Err(format!(
                "a host argument's shape {shape:?} has more elements than can be counted"
            ));
        }
    }
    Ok(())
}

/// Checks that a view lies inside its storage.
fn view(operand: &Operand, tensors: &[Tensor]) -> Result<(), String> {
    let Some(tensor) = tensors.get(operand.tensor.index()) else {
        return Err(format!("refers to tensor {} of {}", operand.tensor.0, tensors.len()));
    };
    let Operand { offset, shape, stride, .. } = operand;
    if shape.len() != stride.len() {
        return Err(format!(
            "its view of `{}` has shape {shape:?} but stride {stride:?}; give one step for each dimension",
            tensor.name
        ));
    }
    if volume(shape).is_none() {
        return Err(format!(
            "its view of `{}` has more elements than can be counted: {shape:?}",
            tensor.name
        ));
    }
    match operand.end_byte() {
        Some(end) if end <= tensor.bytes.0 => Ok(()),
        end => Err(format!(
            "its view of `{}` (offset {offset}, shape {shape:?}, stride {stride:?}) ends at byte {}, but the tensor has {} bytes",
            tensor.name,
            end.map_or("2^64 or later".to_owned(), |e| e.to_string()),
            tensor.bytes.0
        )),
    }
}

fn kept(
    (id, tensor): (usize, &Tensor),
    versions: &Versions,
    operators: usize,
) -> Result<(), GraphError> {
    let fail = |problem: &str| {
        Err(GraphError::Tensor { tensor: tensor.name.clone(), problem: problem.to_owned() })
    };
    if tensor.kept_until.is_some_and(|op| op.index() >= operators) {
        return fail("`kept_until` names an operator that the graph does not have");
    }
    if versions.generator(TensorId::from_index(id)).is_none() {
        return fail(
            "`kept_until` is for tensors that the iteration generates; nothing generates this one, so it stays anyway",
        );
    }
    Ok(())
}

/// The operators that write the versions of each tensor.
pub(super) struct Versions {
    /// Tensor, version, operator; sorted. The versions of each tensor are consecutive, from 0 or 1.
    writes: Vec<(u32, u32, u32)>,
    /// Where each tensor's part of `writes` begins, followed by the end of `writes`.
    starts: Vec<usize>,
}

impl Versions {
    fn new(tensors: &[Tensor], operators: &[Operator]) -> Result<Self, GraphError> {
        let mut writes = Vec::new();
        for (index, operator) in operators.iter().enumerate() {
            writes.extend(
                operator.writes().map(|o| (o.tensor.0, o.version, OpId::from_index(index).0)),
            );
        }
        writes.sort_unstable();
        // One operator may name a tensor that it writes several times, through several views.
        writes.dedup();
        let mut starts = vec![writes.len(); tensors.len() + 1];
        for (position, &(tensor, ..)) in writes.iter().enumerate().rev() {
            starts[tensor as usize] = position;
        }
        for tensor in (0..tensors.len()).rev() {
            starts[tensor] = starts[tensor].min(starts[tensor + 1]);
        }
        let all = Self { writes, starts };
        for (index, tensor) in tensors.iter().enumerate() {
            all.consecutive(TensorId::from_index(index)).map_err(|(operator, problem)| {
                GraphError::Operator {
                    operator: operators[operator as usize].name.clone(),
                    problem: format!("{problem} of tensor `{}`", tensor.name),
                }
            })?;
        }
        for operator in operators {
            let fail = |problem| GraphError::Operator { operator: operator.name.clone(), problem };
            for operand in operator.reads() {
                all.exists(operand, tensors).map_err(fail)?;
            }
        }
        Ok(all)
    }

    /// The writes of a tensor: version and operator, by version.
    pub(super) fn writes(&self, tensor: TensorId) -> impl Iterator<Item = (u32, u32)> {
        self.slice(tensor).iter().map(|&(_, version, operator)| (version, operator))
    }

    /// The operator that writes a version, if there is one.
    pub(super) fn writer(&self, tensor: TensorId, version: u32) -> Option<u32> {
        let all = self.slice(tensor);
        let first = all.first()?.1;
        all.get(version.checked_sub(first)? as usize).map(|w| w.2)
    }

    /// The operator that generates a tensor, if there is one.
    pub(super) fn generator(&self, tensor: TensorId) -> Option<u32> {
        self.writer(tensor, 0)
    }

    fn slice(&self, tensor: TensorId) -> &[(u32, u32, u32)] {
        &self.writes[self.starts[tensor.index()]..self.starts[tensor.index() + 1]]
    }

    fn consecutive(&self, tensor: TensorId) -> Result<(), (u32, String)> {
        let mut next = None;
        for (version, operator) in self.writes(tensor) {
            match next {
                None if version > 1 => {
                    return Err((
                        operator,
                        format!("writes version {version}, but nothing writes version 1"),
                    ));
                }
                Some(n) if version < n => {
                    return Err((
                        operator,
                        format!("writes version {version}, which another operator writes too,"),
                    ));
                }
                Some(n) if version > n => {
                    return Err((
                        operator,
                        format!("writes version {version}, but nothing writes version {n}"),
                    ));
                }
                _ => {}
            }
            // This cannot wrap: versions are consecutive so far, and there are fewer writes than
            // 2^32.
            next = version.checked_add(1);
        }
        Ok(())
    }

    fn exists(&self, operand: &Operand, tensors: &[Tensor]) -> Result<(), String> {
        if operand.version == 0 || self.writer(operand.tensor, operand.version).is_some() {
            return Ok(());
        }
        let name = &tensors[operand.tensor.index()].name;
        Err(format!("reads version {} of tensor `{name}`, which nothing writes", operand.version))
    }
}

/// Sorts operators into the order `listed`, and adapts `kept_until`.
fn reorder(tensors: &mut [Tensor], operators: &mut Vec<Operator>, listed: &[u32]) {
    if listed.is_sorted() {
        return;
    }
    let mut new = vec![0; listed.len()];
    for (position, &old) in listed.iter().enumerate() {
        new[old as usize] = position;
    }
    for until in tensors.iter_mut().filter_map(|t| t.kept_until.as_mut()) {
        *until = OpId::from_index(new[until.index()]);
    }
    let mut numbered: Vec<_> = std::mem::take(operators).into_iter().zip(new).collect();
    numbered.sort_by_key(|(_, position)| *position);
    *operators = numbered.into_iter().map(|(operator, _)| operator).collect();
}

#[cfg(test)]
mod tests;
