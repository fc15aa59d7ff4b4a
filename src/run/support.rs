//! Properties of a graph that are known before a run: missing kernels, unrecorded numbers, frozen
//! scalars, random operators.

use std::collections::BTreeMap;

use crate::job::{Arg, Dtype, Graph, Operator, Phase, Role};
use crate::units::OpId;

/// An operator kind for which a device has no kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    /// The kind, such as `aten::conv3d`.
    pub kind: String,
    /// Number of operators of this kind.
    pub operators: usize,
    /// Name of the first one.
    pub first: String,
}

/// The kinds of `graph` that a device does not know, sorted.
#[must_use]
pub fn missing(graph: &Graph, knows: impl Fn(&str) -> bool) -> Vec<Missing> {
    let mut of: BTreeMap<&str, Missing> = BTreeMap::new();
    for operator in &graph.operators {
        if !knows(&operator.kind) {
            of.entry(&operator.kind)
                .or_insert_with(|| Missing {
                    kind: operator.kind.clone(),
                    operators: 0,
                    first: operator.name.clone(),
                })
                .operators += 1;
        }
    }
    of.into_values().collect()
}

/// Names of the operators that need a number which the trace has not recorded.
///
/// The state of the framework's random generator, which attention and dropout pass to their
/// backward, is not needed: a counter replaces it.
#[must_use]
pub fn unknown_numbers(graph: &Graph) -> Vec<&str> {
    let unknown = |o: &Operator| {
        let draws = o.kind.contains("attention") || o.kind.contains("dropout");
        o.args.iter().any(|arg| match arg {
            Arg::Host { value: None, input: None, shape, dtype } => {
                !(shape.contains(&0) || draws && *dtype == Dtype::I64)
            }
            _ => false,
        })
    };
    graph.operators.iter().filter(|o| unknown(o)).map(|o| o.name.as_str()).collect()
}

/// Type and shape of each batch input, by the number of its host-to-device copy.
///
/// # Errors
/// When the numbers have gaps, or one number has two shapes.
pub fn batch(graph: &Graph) -> Result<Vec<(Dtype, Vec<u64>)>, String> {
    let mut found: BTreeMap<u32, (Dtype, Vec<u64>)> = BTreeMap::new();
    for operator in &graph.operators {
        for arg in &operator.args {
            if let Arg::Host { dtype, shape, input: Some(number), .. } = arg {
                let seen = found.entry(*number).or_insert_with(|| (*dtype, shape.clone()));
                if *seen != (*dtype, shape.clone()) {
                    return Err(format!(
                        "operator `{}` sees batch input {number} in another type or shape than one before it",
                        operator.name
                    ));
                }
            }
        }
    }
    if let Some((gap, _)) = (0..).zip(found.keys()).find(|(i, n)| i != *n) {
        return Err(format!("batch inputs are numbered, and number {gap} is not there"));
    }
    Ok(found.into_values().collect())
}

/// The smallest bound of an index among the operators that look up rows: rows of embeddings,
/// classes of losses.
#[must_use]
pub fn index_limit(graph: &Graph) -> Option<u64> {
    let extent = |operator: &Operator| {
        let Some(Arg::Tensor(first)) = operator.args.first() else { return None };
        match operator.kind.as_str() {
            "aten::embedding" => first.shape.first().copied(),
            "aten::nll_loss_forward"
            | "aten::nll_loss_nd"
            | "aten::nll_loss"
            | "aten::cross_entropy_loss"
            | "aten::nll_loss2d_forward" => first.shape.get(1).or(first.shape.first()).copied(),
            "aten::_log_softmax" | "aten::log_softmax" => first.shape.last().copied(),
            _ => None,
        }
    };
    graph.operators.iter().filter_map(extent).min()
}

/// The operator whose random numbers each operator uses: its own, or those of the forward operator
/// that it differentiates.
#[must_use]
pub fn random_keys(graph: &Graph) -> Vec<u64> {
    let file = file_keys(graph.framework());
    let of = |index: usize| file[graph.framework_operator(OpId::from_index(index)).index()];
    (0..graph.operators.len()).map(of).collect()
}

/// The keys of a graph as its file has it.
fn file_keys(graph: &Graph) -> Vec<u64> {
    let mut writers = BTreeMap::new();
    let mut keys = Vec::with_capacity(graph.operators.len());
    for (index, operator) in graph.operators.iter().enumerate() {
        let mut key = index;
        if operator.kind.contains("backward") {
            let base = base(&operator.kind);
            let made_by = |o: &crate::job::Operand| writers.get(&(o.tensor, o.version)).copied();
            let undone = |w: &usize| {
                graph.operators[*w].random && self::base(&graph.operators[*w].kind) == base
            };
            key = operator.reads().filter_map(made_by).find(undone).unwrap_or(index);
        }
        keys.push(key as u64);
        for operand in operator.writes() {
            writers.insert((operand.tensor, operand.version), index);
        }
    }
    keys
}

/// A kind without the words for forward and backward: `native_dropout_backward` belongs to
/// `native_dropout`, `_efficient_attention_backward` to `_efficient_attention_forward`.
fn base(kind: &str) -> String {
    kind.replace("_backward", "").replace("_forward", "")
}

/// Sentences about how a run of `graph` differs from the framework's.
#[must_use]
pub fn notes(graph: &Graph) -> Vec<String> {
    let mut notes = Vec::new();
    let trained = |o: &&Operator| {
        let long_lived = |id: crate::units::TensorId| {
            matches!(graph.tensor(id).role, Role::Parameter | Role::OptimizerState)
        };
        o.phase == Phase::Optimize
            && !o.kind.starts_with("neap::")
            && o.updates().any(|u| long_lived(u.tensor))
    };
    let frozen = graph.operators.iter().filter(trained).count();
    if frozen > 0 {
        notes.push(format!(
            "{frozen} optimizer operators run as recorded: their scalars (bias corrections, rounded constants) are frozen at the recorded iteration"
        ));
    }
    if graph.optimizer.as_ref().is_some_and(crate::job::Optimizer::recovered) {
        notes.push("the optimizer's values were recovered from rounded scalars; record them with neap.optimizer for exact ones".to_owned());
    }
    if graph.loss.is_none() {
        notes.push("no loss was recognised, so none is reported".to_owned());
    }
    notes
}
