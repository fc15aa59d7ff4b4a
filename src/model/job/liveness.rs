//! Residency without a plan: every tensor from its generation to its last use.
//!
//! It gives the peak that plans are measured against, the tensors resident at it, the floor below
//! which no plan can go, and bytes by role.

use std::collections::BTreeMap;

use super::graph::{Graph, Role};
use crate::units::{Bytes, OpId, TensorId};

/// A tensor that is resident at the peak.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    /// The tensor.
    pub tensor: TensorId,
    /// Its bytes, rounded to blocks.
    pub bytes: Bytes,
    /// The operator that generates it; `None` for tensors older than the iteration.
    pub made_by: Option<OpId>,
}

/// The memory of a job under liveness. Sizes are rounded to blocks unless a field says otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Liveness {
    /// Bytes resident during each operator, its outputs and workspace included.
    pub resident: Vec<Bytes>,
    /// The largest of them. Without operators: the bytes that are always resident.
    pub peak: Bytes,
    /// The operator during which the peak is first reached.
    pub peak_at: Option<OpId>,
    /// The tensors resident at the peak, largest first, then in the graph's order.
    pub at_peak: Vec<Standing>,
    /// The workspace of the operator at the peak.
    pub workspace_at_peak: Bytes,
    /// The largest working set of one operator: the tensors that it touches and its workspace. All
    /// other tensors can leave meanwhile.
    pub floor: Bytes,
    /// The first operator with that working set.
    pub floor_at: Option<OpId>,
    /// All tensors and the largest workspace: the papers' baseline, which frees nothing.
    pub no_free: Bytes,
    /// Unrounded bytes of the tensors of each role, roles without tensors included.
    pub by_role: BTreeMap<Role, Bytes>,
}

/// The operators during which a tensor is resident, first and last included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Span {
    /// All the time, because no operator generates it.
    Always,
    /// From its generation to its last use.
    Within {
        /// The operator that generates it.
        first: OpId,
        /// The last operator that touches it.
        last: OpId,
    },
    /// From its generation to the end of the iteration, and from the start of the next one until
    /// the operator before `until`.
    Wraps {
        /// The operator that generates it.
        first: OpId,
        /// The operator before which it is freed.
        until: OpId,
    },
}

/// When each tensor is resident without a plan.
#[must_use]
pub fn spans(graph: &Graph) -> Vec<Span> {
    let mut spans = vec![Span::Always; graph.tensors.len()];
    let mut last = vec![OpId(0); graph.tensors.len()];
    for (index, operator) in graph.operators.iter().enumerate() {
        for operand in operator.reads().chain(operator.writes()) {
            last[operand.tensor.index()] = OpId::from_index(index);
        }
    }
    for (tensor, generator) in graph.generators().into_iter().enumerate() {
        if let Some(first) = generator {
            spans[tensor] = match graph.tensors[tensor].kept_until {
                Some(until) => Span::Wraps { first, until },
                None => Span::Within { first, last: last[tensor] },
            };
        }
    }
    spans
}

impl Span {
    /// Whether the tensor is resident during an operator.
    #[must_use]
    pub fn contains(self, op: OpId) -> bool {
        match self {
            Self::Always => true,
            Self::Within { first, last } => first <= op && op <= last,
            Self::Wraps { first, until } => first <= op || op < until,
        }
    }
}

impl Liveness {
    /// Computes the figures of a graph, in linear time.
    #[must_use]
    pub fn new(graph: &Graph) -> Self {
        let spans = spans(graph);
        let size = |tensor: TensorId| graph.tensor(tensor).bytes.in_blocks();
        let mut always = Bytes::ZERO;
        // Bytes that begin at each operator, and bytes that end before it.
        let mut begins = vec![Bytes::ZERO; graph.operators.len() + 1];
        let mut ends = begins.clone();
        for (index, span) in spans.iter().enumerate() {
            let bytes = size(TensorId::from_index(index));
            match *span {
                Span::Always => always += bytes,
                Span::Within { first, last } => {
                    begins[first.index()] += bytes;
                    ends[last.index() + 1] += bytes;
                }
                Span::Wraps { first, until } => {
                    begins[0] += bytes;
                    ends[until.index()] += bytes;
                    begins[first.index()] += bytes;
                }
            }
        }
        let (mut standing, mut resident) = (always, Vec::with_capacity(graph.operators.len()));
        let (mut floor, mut floor_at) = (Bytes::ZERO, None);
        let mut touched = vec![None; graph.tensors.len()];
        for (index, operator) in graph.operators.iter().enumerate() {
            let op = OpId::from_index(index);
            standing = standing + begins[index] - ends[index];
            resident.push(standing + operator.workspace.in_blocks());
            let mut working = operator.workspace.in_blocks();
            for operand in operator.reads().chain(operator.writes()) {
                if touched[operand.tensor.index()].replace(op) != Some(op) {
                    working += size(operand.tensor);
                }
            }
            if floor_at.is_none() || working > floor {
                (floor, floor_at) = (working, Some(op));
            }
        }
        let peak = resident.iter().copied().max().unwrap_or(always);
        let peak_at = resident.iter().position(|&b| b == peak).map(OpId::from_index);
        let generators = graph.generators();
        let mut at_peak: Vec<_> = (0..graph.tensors.len())
            .filter(|&t| peak_at.map_or(spans[t] == Span::Always, |op| spans[t].contains(op)))
            .map(|t| Standing {
                tensor: TensorId::from_index(t),
                bytes: size(TensorId::from_index(t)),
                made_by: generators[t],
            })
            .collect();
        at_peak.sort_by_key(|s| std::cmp::Reverse(s.bytes));
        let mut by_role: BTreeMap<_, _> = [
            Role::Input,
            Role::Parameter,
            Role::Buffer,
            Role::OptimizerState,
            Role::Gradient,
            Role::Activation,
        ]
        .map(|r| (r, Bytes::ZERO))
        .into();
        for tensor in &graph.tensors {
            *by_role.entry(tensor.role).or_default() += tensor.bytes;
        }
        let workspaces =
            graph.operators.iter().map(|o| o.workspace.in_blocks()).max().unwrap_or_default();
        let no_free = graph.tensors.iter().map(|t| t.bytes.in_blocks()).sum::<Bytes>() + workspaces;
        let workspace_at_peak =
            peak_at.map_or(Bytes::ZERO, |op| graph.operator(op).workspace.in_blocks());
        Self {
            resident,
            peak,
            peak_at,
            at_peak,
            workspace_at_peak,
            floor,
            floor_at,
            no_free,
            by_role,
        }
    }

    /// Unrounded bytes of the tensors of one role.
    #[must_use]
    pub fn role(&self, role: Role) -> Bytes {
        self.by_role.get(&role).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::{Dtype, Operand, Operator, Phase, Replay, Tensor};

    fn tensor(name: &str, role: Role, elements: u64, kept_until: Option<OpId>) -> Tensor {
        Tensor {
            name: name.to_owned(),
            bytes: Bytes(elements),
            role,
            dtype: Dtype::U8,
            shape: vec![elements],
            kept_until,
        }
    }

    fn operator(
        name: &str,
        reads: &[(u32, u32)],
        writes: &[(u32, u32)],
        workspace: u64,
        tensors: &[Tensor],
    ) -> Operator {
        let operand = |&(tensor, version): &(u32, u32)| {
            let shape = tensors[tensor as usize].shape.clone();
            Operand {
                tensor: TensorId(tensor),
                version,
                dtype: Dtype::U8,
                offset: 0,
                stride: vec![1],
                shape,
            }
        };
        Operator {
            name: name.to_owned(),
            kind: "custom".to_owned(),
            phase: Phase::Forward,
            args: reads.iter().map(|r| crate::job::Arg::Tensor(operand(r))).collect(),
            outputs: writes.iter().map(|w| Some(operand(w))).collect(),
            hidden: Vec::new(),
            workspace: Bytes(workspace),
            replay: Replay::Pure,
            random: false,
            ..Operator::default()
        }
    }

    #[test]
    fn lives_end_after_the_last_use_and_kept_ones_wrap() {
        let tensors = vec![
            tensor("w", Role::Parameter, 1000, None),
            tensor("never touched", Role::Buffer, 10, None),
            tensor("a", Role::Activation, 2000, None),
            tensor("b", Role::Activation, 512, None),
            tensor("g", Role::Gradient, 1000, Some(OpId(1))),
        ];
        let operators = vec![
            operator("make a", &[(0, 0)], &[(2, 0)], 0, &tensors),
            operator("make b", &[(2, 0)], &[(3, 0)], 1, &tensors),
            operator("make g", &[(3, 0)], &[(4, 0)], 0, &tensors),
            operator("step", &[(4, 0), (0, 0), (0, 0)], &[(0, 1)], 0, &tensors),
        ];
        let graph = Graph::new("g".to_owned(), tensors, operators, None, None, None).unwrap();
        let live = Liveness::new(&graph);
        // Always resident: w 1024, never touched 512. Then a 2048, b 512, g 1024; g of the last
        // iteration also during "make a".
        assert_eq!(
            live.resident,
            [1536 + 2048 + 1024, 1536 + 2048 + 512 + 512, 1536 + 512 + 1024, 1536 + 1024]
                .map(Bytes)
        );
        assert_eq!(
            (live.peak, live.peak_at),
            (Bytes(4608), Some(OpId(0))),
            "two operators share the peak; the first counts"
        );
        assert_eq!(
            live.at_peak.iter().map(|s| (s.tensor.0, s.bytes.0)).collect::<Vec<_>>(),
            [(2, 2048), (0, 1024), (4, 1024), (1, 512)]
        );
        assert_eq!(live.at_peak[0].made_by, Some(OpId(0)));
        assert_eq!((live.floor, live.floor_at), (Bytes(2048 + 512 + 512), Some(OpId(0))));
        assert_eq!(live.no_free, Bytes(1024 + 512 + 2048 + 512 + 1024 + 512));
        assert_eq!(
            (live.role(Role::Parameter), live.role(Role::Buffer), live.role(Role::Input)),
            (Bytes(1000), Bytes(10), Bytes(0))
        );
    }

    #[test]
    fn without_operators_the_peak_is_what_always_stays() {
        let graph = Graph::new(
            "g".to_owned(),
            vec![tensor("w", Role::Parameter, 1, None)],
            vec![],
            None,
            None,
            None,
        )
        .unwrap();
        let live = Liveness::new(&graph);
        assert_eq!(
            (live.peak, live.peak_at, live.floor, live.at_peak.len()),
            (Bytes(512), None, Bytes(0), 1)
        );
    }
}
