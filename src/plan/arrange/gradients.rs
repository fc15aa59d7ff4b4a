//! Gradients in pieces, each made just before its part of the update.
//!
//! Where the first layer shares its weights with the last one, as in most language models, the
//! gradient is the sum of two that take as much memory as it does. Sum and update are both
//! elementwise, so they run in turn, piece by piece, and there is never more than a piece of the
//! sum. The same holds for the conversion of a gradient to the type of a master weight.

use super::makers::in_pieces;
use super::{Candidate, PIECE, arrangement};
use crate::budget::Request;
use crate::job::arrange::{Arrangement, Moved, Pieces, splittable};
use crate::method::Method;
use crate::units::OpId;

/// The job with its updates early and in pieces, and gradients whole, where [`cut`] would change
/// that: while the pieces run, both summands take memory, and with a whole gradient only that does.
pub(super) fn whole(request: &Request<'_>) -> Option<Candidate> {
    let whole = arrangement(request, PIECE)?;
    let mut other = whole.clone();
    cut(request, &mut other);
    if whole == other { None } else { Candidate::new(request, &whole) }
}

/// Lets gradients of updates that are in pieces come in pieces too, where the update runs right
/// behind what makes its gradient, and the planner may do it.
pub(super) fn cut(request: &Request<'_>, arrangement: &mut Arrangement) {
    let Method::Neap(options) = &request.method else { return };
    if !options.split_gradients || !options.reorder {
        return;
    }
    let graph = request.graph;
    for (update, maker) in in_pieces(graph) {
        let of = |pieces: &&Pieces| pieces.operator == update;
        let Some(elements) = arrangement.pieces.iter().find(of).map(|of| of.elements) else {
            continue;
        };
        let Some(count) = splittable(graph, update).ok().map(|all| all.div_ceil(elements)) else {
            continue;
        };
        let order = &mut arrangement.order;
        let moves: Vec<OpId> =
            order.iter().filter(|m| m.piece.is_none()).map(|m| m.operator).collect();
        if moves.contains(&maker) || order.iter().any(|m| m.operator == update && m.piece.is_some())
        {
            continue;
        }
        let stays = |at: usize| !moves.contains(&OpId::of(at));
        let at = match order.iter().position(|m| m.operator == update) {
            Some(at) if order[at].after == Some(maker) => {
                order.remove(at);
                at
            }
            None if !(maker.index() + 1..update.index()).any(stays) => order.len(),
            _ => continue,
        };
        let after = (0..maker.index()).rev().find(|at| stays(*at)).map(OpId::of);
        let pair =
            |number| [maker, update].map(|operator| Moved { operator, piece: Some(number), after });
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        order.splice(at..at, (0..count).flat_map(pair));
        arrangement.pieces.push(Pieces { operator: maker, elements });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::latency;
    use crate::exact;
    use crate::job::{Arg, Graph, Operator, Phase, Role, Tensor};
    use crate::neap::Options;
    use crate::units::{Bytes, TensorId};

    /// A ResNet-18 in which the gradient of the largest update is a sum, and the operators of both.
    fn with_a_sum() -> (Graph, OpId, OpId) {
        let graph = exact::resnet18();
        let (mut tensors, mut operators) = (graph.tensors.clone(), graph.operators.clone());
        let states = |operator: &Operator| -> Bytes {
            let read = operator.reads().map(|o| graph.tensor(o.tensor));
            read.filter(|t| t.role == Role::OptimizerState).map(|t| t.bytes).sum()
        };
        let update = operators.iter().max_by_key(|operator| states(operator)).unwrap().clone();
        let gradients = update.reads().filter(|o| graph.tensor(o.tensor).role == Role::Gradient);
        let gradient = gradients.last().unwrap().clone();
        let half = TensorId::of(tensors.len());
        let role = Role::Activation;
        tensors.push(Tensor {
            name: "half".to_owned(),
            role,
            ..graph.tensor(gradient.tensor).clone()
        });
        let maker = graph.generators()[gradient.tensor.index()].unwrap();
        let of = &mut operators[maker.index()];
        for made in of.outputs.iter_mut().flatten().chain(&mut of.hidden) {
            if made.tensor == gradient.tensor {
                made.tensor = half;
            }
        }
        let summand = Arg::Tensor(crate::job::Operand { tensor: half, ..gradient.clone() });
        let sum = maker.index() + 1;
        operators.insert(
            sum,
            Operator {
                name: "both halves".to_owned(),
                kind: "aten::add".to_owned(),
                phase: Phase::Backward,
                args: vec![summand.clone(), summand, Arg::Int(1)],
                outputs: vec![Some(gradient)],
                ..Operator::default()
            },
        );
        for until in tensors.iter_mut().filter_map(|t| t.kept_until.as_mut()) {
            *until = OpId::of(until.index() + usize::from(until.index() >= sum));
        }
        let at = operators.iter().position(|o| o.name == update.name).unwrap();
        let optimizer = graph.optimizer.clone();
        let graph = Graph::new(graph.name, tensors, operators, optimizer, graph.loss, None);
        (graph.unwrap(), OpId::of(sum), OpId::of(at))
    }

    #[test]
    fn a_sum_and_its_update_run_in_turn() {
        let (graph, sum, update) = with_a_sum();
        assert!(in_pieces(&graph).contains(&(update, sum)));
        let device = crate::device::builtin::find("a6000").unwrap();
        let latencies = latency::latencies(&graph, &device, None);
        let request = Request::new(&graph, &device, &latencies, Bytes(1 << 30));
        let whole = arrangement(&request, 1 << 20).unwrap();
        let mut cut_up = whole.clone();
        cut(&request, &mut cut_up);
        let candidate = Candidate::new(&request, &cut_up).unwrap();
        let run: Vec<OpId> = candidate
            .graph
            .operators
            .iter()
            .filter_map(|o| {
                let (name, _) = o.name.rsplit_once('#')?;
                [sum, update].into_iter().find(|id| graph.operator(*id).name == name)
            })
            .collect();
        // The largest states have 9 MiB.
        assert_eq!(run, [sum, update].repeat(9));
        let gradient = |graph: &Graph| {
            let made = graph.operators.iter().find(|o| o.name.starts_with("both halves")).unwrap();
            graph.tensor(made.generates().next().unwrap().tensor).bytes
        };
        assert_eq!(gradient(&candidate.graph).0, 1 << 20);
        let candidate = Candidate::new(&request, &whole).unwrap();
        assert_eq!(gradient(&candidate.graph).0, 9 << 20);
        // Not where the planner may not, nor without the update.
        let options = Options { split_gradients: false, ..Options::default() };
        let mut same = whole.clone();
        cut(&Request { method: Method::Neap(options), ..request.clone() }, &mut same);
        assert_eq!(same, whole);
        let pieces = vec![Pieces { operator: sum, elements: 512 }];
        let refused = crate::job::arrange(&graph, &Arrangement { order: Vec::new(), pieces });
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains("makes `"), "{refused}");
    }
}
