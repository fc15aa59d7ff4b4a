//! Gradients in pieces, each made just before its part of the update.
//!
//! Where the first layer shares its weights with the last one, as in most language models, the
//! gradient is the sum of two that take as much memory as it does. Sum and update are both
//! elementwise, so they run in turn, piece by piece, and there is never more than a piece of the
//! sum. The same holds for the conversion of a gradient to the type of a master weight, and for the
//! gradient of an embedding, which is made row by row: neither it nor the sum is ever there as a
//! whole.

use super::makers::in_pieces;
use super::{Candidate, PIECE, arrangement};
use crate::budget::Request;
use crate::job::arrange::{Arrangement, Moved, Pieces, row, splittable};
use crate::method::Method;
use crate::units::OpId;

/// The job with its updates early and in pieces, and with gradients in pieces, with all but rows in
/// pieces, and whole, where these differ: while the pieces run, summands that are whole take
/// memory, and with a whole gradient only that does.
pub(super) fn ways(request: &Request<'_>) -> Vec<Candidate> {
    let Some(whole) = arrangement(request, PIECE) else { return Vec::new() };
    let mut found = Vec::new();
    let mut last = None;
    for rows in [Some(true), Some(false), None] {
        let mut way = whole.clone();
        if let Some(rows) = rows {
            cut(request, &mut way, rows);
        }
        if !way.is_empty() && last.as_ref() != Some(&way) {
            found.extend(Candidate::new(request, &way));
        }
        last = Some(way);
    }
    found
}

/// Lets gradients of updates that are in pieces come in pieces too, where the update runs right
/// behind what makes its gradient, and the planner may do it. With `rows` also what makes rows
/// runs in pieces.
pub(super) fn cut(request: &Request<'_>, arrangement: &mut Arrangement, rows: bool) {
    let Method::Neap(options) = &request.method else { return };
    if !options.split_gradients || !options.reorder {
        return;
    }
    let graph = request.graph;
    for (update, mut makers) in in_pieces(graph) {
        let Some(&last) = makers.last() else { continue };
        makers.retain(|maker| rows || row(graph.operator(*maker)).is_none());
        if makers.last() != Some(&last) {
            continue;
        }
        let Some(of) = arrangement.pieces.iter().position(|of| of.operator == update) else {
            continue;
        };
        let Ok(all) = splittable(graph, update) else { continue };
        // Whole rows.
        let mut widths = makers.iter().filter_map(|maker| row(graph.operator(*maker)));
        let width = widths.next().unwrap_or(1);
        let elements = arrangement.pieces[of].elements.next_multiple_of(width);
        let order = &mut arrangement.order;
        let moves: Vec<OpId> =
            order.iter().filter(|m| m.piece.is_none()).map(|m| m.operator).collect();
        if elements >= all
            || widths.any(|other| other != width)
            || makers.iter().any(|maker| moves.contains(maker))
            || order.iter().any(|m| m.operator == update && m.piece.is_some())
        {
            continue;
        }
        let stays = |at: usize| {
            !moves.contains(&OpId::from_index(at)) && !makers.contains(&OpId::from_index(at))
        };
        let at = match order.iter().position(|m| m.operator == update) {
            Some(at) if order[at].after == Some(last) => {
                order.remove(at);
                at
            }
            None if !(last.index() + 1..update.index()).any(stays) => order.len(),
            _ => continue,
        };
        let after = (0..last.index()).rev().find(|at| stays(*at)).map(OpId::from_index);
        let behind = order.split_off(at);
        for number in 0..u32::try_from(all.div_ceil(elements)).unwrap_or(u32::MAX) {
            for &operator in makers.iter().chain([&update]) {
                order.push(Moved { operator, piece: Some(number), after });
            }
        }
        order.extend(behind);
        arrangement.pieces[of].elements = elements;
        for operator in makers {
            arrangement.pieces.push(Pieces { operator, elements });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::candidate;
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
        let half = TensorId::from_index(tensors.len());
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
            *until = OpId::from_index(until.index() + usize::from(until.index() >= sum));
        }
        let at = operators.iter().position(|o| o.name == update.name).unwrap();
        let optimizer = graph.optimizer.clone();
        let graph = Graph::new(graph.name, tensors, operators, optimizer, graph.loss, None);
        (graph.unwrap(), OpId::from_index(sum), OpId::from_index(at))
    }

    #[test]
    fn a_sum_and_its_update_run_in_turn() {
        let (graph, sum, update) = with_a_sum();
        assert!(in_pieces(&graph).contains(&(update, vec![sum])));
        let device = crate::device::builtin::find("a6000").unwrap();
        let latencies = latency::latencies(&graph, &device, None);
        let request = Request::new(&graph, &device, &latencies, Bytes(1 << 30));
        let whole = arrangement(&request, 1 << 20).unwrap();
        let mut cut_up = whole.clone();
        cut(&request, &mut cut_up, true);
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
        cut(&Request { method: Method::Neap(options), ..request.clone() }, &mut same, true);
        assert_eq!(same, whole);
        let pieces = vec![Pieces { operator: sum, elements: 512 }];
        let refused = crate::job::arrange(&graph, &Arrangement { order: Vec::new(), pieces });
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains("makes `"), "{refused}");
    }

    /// As [`with_a_sum`], with the rows of an embedding's gradient as one summand, and what makes
    /// these.
    fn with_rows(row: u64) -> (Graph, [OpId; 3]) {
        let (graph, sum, update) = with_a_sum();
        let (mut tensors, mut operators) = (graph.tensors.clone(), graph.operators.clone());
        let rows = TensorId::from_index(tensors.len());
        let whole = operators[sum.index()].reads().next().unwrap().clone();
        tensors.push(Tensor { name: "rows".to_owned(), ..graph.tensor(whole.tensor).clone() });
        let count = whole.elements() / row;
        let made = crate::job::Operand { tensor: rows, ..whole };
        let input = |o: &&crate::job::Operand| graph.tensor(o.tensor).role == Role::Input;
        let inputs = graph.operators.iter().flat_map(Operator::reads).filter(input);
        let small = inputs.min_by_key(|o| graph.tensor(o.tensor).bytes).unwrap();
        let args = [small, small].map(|o| Arg::Tensor(o.clone()));
        operators[sum.index()].args[1] = Arg::Tensor(made.clone());
        operators.insert(
            sum.index(),
            Operator {
                name: "table".to_owned(),
                kind: "aten::embedding_backward".to_owned(),
                phase: Phase::Backward,
                args: args.into_iter().chain([Arg::Int(count as i64)]).collect(),
                outputs: vec![Some(crate::job::Operand {
                    shape: vec![count, row],
                    stride: vec![row, 1],
                    ..made
                })],
                ..Operator::default()
            },
        );
        for until in tensors.iter_mut().filter_map(|t| t.kept_until.as_mut()) {
            *until = OpId::from_index(until.index() + usize::from(until.index() >= sum.index()));
        }
        let optimizer = graph.optimizer.clone();
        let graph = Graph::new(graph.name, tensors, operators, optimizer, graph.loss, None);
        let next = |id: OpId| OpId::from_index(id.index() + 1);
        (graph.unwrap(), [sum, next(sum), next(update)])
    }

    #[test]
    fn rows_run_in_turn_with_sum_and_update() {
        let row = 1536;
        let (graph, [rows, sum, update]) = with_rows(row);
        assert!(in_pieces(&graph).contains(&(update, vec![rows, sum])));
        let device = crate::device::builtin::find("a6000").unwrap();
        let latencies = latency::latencies(&graph, &device, None);
        let request = Request::new(&graph, &device, &latencies, Bytes(1 << 30));
        let candidate = candidate(&request, 1 << 20).unwrap().graph;
        let origin = candidate.origin.as_ref().unwrap();
        let all = origin.operators.iter().map(|(id, _)| *id);
        let in_turn: Vec<OpId> = all.filter(|id| [rows, sum, update].contains(id)).collect();
        assert_eq!(in_turn, [rows, sum, update].repeat(9));
        let pieces = candidate.operators.iter().filter(|o| o.name.starts_with("table#"));
        let mut first = 0;
        for piece in pieces {
            let made = piece.generates().next().unwrap();
            assert_eq!(made.shape[1], row);
            assert_eq!(candidate.tensor(made.tensor).bytes.0, made.elements() * 4);
            assert_eq!(piece.args[2], Arg::Ints(vec![first, (9 << 18) / row as i64]));
            first += made.shape[0] as i64;
        }
        assert_eq!(first as u64 * row, 9 << 18);
        // Pieces are whole rows, and what is read is read as a whole.
        let pieces = [rows, sum, update].map(|operator| Pieces { operator, elements: 1 << 18 });
        let arrangement = Arrangement { order: Vec::new(), pieces: pieces.to_vec() };
        let refused = crate::job::arrange(&graph, &arrangement).unwrap_err().to_string();
        assert!(refused.contains("ends within one; give a multiple of 1536"), "{refused}");
    }
}
