//! A plan's order and pieces: names to ids and back, and the graphs that are arranged by them.

use std::collections::BTreeMap;

use super::{LIMIT, Names, ResolveError};
use crate::contract::form::{JobForm, MovedForm, PiecesForm, PlanFile};
use crate::contract::plan::{JobPlan, Latency, Source};
use crate::job::Graph;
use crate::job::arrange::{ArrangeError, Arrangement, Moved, Pieces, arrange};
use crate::units::{Nanos, OpId};

/// The graph of a job with the workspaces of its libraries.
pub(super) fn reserve(job: &JobPlan, mut graph: Graph) -> Result<Graph, ArrangeError> {
    let mut wanted = job.libraries.iter().map(|(id, chosen)| (*id, chosen.workspace)).peekable();
    if wanted.peek().is_none() {
        return Ok(graph);
    }
    if graph.origin.is_none() {
        graph.reserve(wanted)?;
        return Ok(graph);
    }
    let mut framework = graph.framework().clone();
    framework.reserve(wanted.map(|(id, bytes)| (graph.framework_operator(id), bytes)))?;
    arrange(&framework, &job.arrangement)
}

/// The graphs of a plan's jobs with their operators in the plan's order and pieces.
///
/// # Errors
/// When a graph does not allow that.
pub fn arranged(file: &PlanFile<'_>, graphs: Vec<Graph>) -> Result<Vec<Graph>, ResolveError> {
    let arranged = |(index, (graph, job)): (usize, (Graph, &JobForm<'_>))| {
        let fail = |problem: String| ResolveError {
            place: format!("job {index} (`{}`): ", graph.name),
            problem,
        };
        if job.order.is_empty() && job.pieces.is_empty() {
            return Ok(graph);
        }
        let arrangement = Names::new(&graph).arrangement(job).map_err(&fail)?;
        arrange(&graph, &arrangement).map_err(|e| fail(format!("`order` and `pieces`: {e}")))
    };
    graphs.into_iter().zip(&file.jobs).enumerate().map(arranged).collect()
}

impl Names<'_> {
    fn arrangement(&self, job: &JobForm<'_>) -> Result<Arrangement, String> {
        let moved = |form: &MovedForm<'_>| {
            let after = form.after.as_deref().map(|name| self.operator(name)).transpose()?;
            let operator = self.operator(&form.operator)?;
            Ok(Moved { operator, piece: form.piece, after })
        };
        let in_pieces = |form: &PiecesForm<'_>| {
            Ok(Pieces { operator: self.operator(&form.operator)?, elements: form.elements })
        };
        Ok(Arrangement {
            order: job
                .order
                .iter()
                .map(moved)
                .collect::<Result<_, String>>()
                .map_err(|e| format!("`order`: {e}"))?,
            pieces: job
                .pieces
                .iter()
                .map(in_pieces)
                .collect::<Result<_, String>>()
                .map_err(|e| format!("`pieces`: {e}"))?,
        })
    }
}

/// What a job changes in its graph's list, which the graph must have been arranged by, and the
/// latencies of what then runs in pieces.
pub(super) fn arrangement(
    form: &JobForm<'_>,
    graph: &Graph,
) -> Result<(Arrangement, BTreeMap<OpId, Latency>), String> {
    let none = Arrangement::default();
    let has = graph.origin.as_ref().map_or(&none, |origin| &origin.arrangement);
    if form.order.is_empty() && form.pieces.is_empty() && has.is_empty() {
        return Ok((none, BTreeMap::new()));
    }
    let names = Names::new(graph.framework());
    let arrangement = names.arrangement(form)?;
    if arrangement != *has {
        return Err("the graph is not in the order and pieces of the plan".to_owned());
    }
    let mut whole = BTreeMap::new();
    for (pieces, of) in form.pieces.iter().zip(&arrangement.pieces) {
        if pieces.ns.0 == 0 || pieces.ns.0 > LIMIT {
            return Err(format!(
                "`pieces`: the latency of operator `{}` is impossible: it is 1 ns to 2^62 ns",
                pieces.operator
            ));
        }
        whole.insert(of.operator, Latency { time: pieces.ns, source: pieces.source });
    }
    Ok((arrangement, whole))
}

pub(super) fn moved_form<'a>(moved: &Moved, graph: &'a Graph) -> MovedForm<'a> {
    let operator = |id: OpId| (&*graph.framework().operator(id).name).into();
    MovedForm {
        operator: operator(moved.operator),
        piece: moved.piece,
        after: moved.after.map(operator),
    }
}

pub(super) fn pieces_form<'a>(pieces: &Pieces, job: &JobPlan, graph: &'a Graph) -> PiecesForm<'a> {
    let none = Latency { time: Nanos::ZERO, source: Source::Graph };
    let Latency { time: ns, source } = job.whole.get(&pieces.operator).copied().unwrap_or(none);
    let operator = (&*graph.framework().operator(pieces.operator).name).into();
    PiecesForm { operator, elements: pieces.elements, ns, source }
}
