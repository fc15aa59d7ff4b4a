//! Lowering: a framework's optimizer step becomes one update operator per parameter.
//!
//! Multi-tensor steps touch every parameter, gradient and state at once, so nothing of it can leave the
//! device meanwhile. Element i of their lists depends only on element i of the others, so one update per
//! parameter computes the same. The updates know the step, which recorded scalars do not.
//!
//! | kind | arguments after parameter and gradient |
//! | --- | --- |
//! | `neap::sgd` | `momentum_buffer` (with momentum) |
//! | `neap::adam`, `neap::adamw` | `exp_avg`, `exp_avg_sq`, `max_exp_avg_sq` (with amsgrad) |
//! | `neap::rmsprop` | `square_avg`, `momentum_buffer` (with momentum), `grad_avg` (centered) |
//! | `neap::adagrad` | `sum` |
//!
//! Each writes its parameter and states in place (`hidden`). Not for: what the update computes.

mod columns;
mod recover;

pub(super) use columns::{Column, columns, state_keys};
use recover::Unclear;

use std::collections::BTreeMap;

use super::{Arg, Graph, Operand, Operator, Optimizer, Phase, Replay, Role, Tensor};
use crate::units::{Bytes, OpId, TensorId};

/// What the importer knows beyond the graph.
#[derive(Debug, Default)]
pub(super) struct Step {
    /// For each operator, whether it belongs to the optimizer's step.
    pub operators: Vec<bool>,
    /// One for each parameter that the step updates.
    pub columns: Vec<Column>,
    /// Hyperparameters, where the trace records them.
    pub recorded: Option<Optimizer>,
    /// The optimizer's class, where the trace says it.
    pub class: Option<String>,
    /// How many steps it had taken by the end of this one, where the trace shows a counter.
    pub steps: Option<f64>,
}

/// The update operator of a class.
fn kind(class: &str) -> Option<&'static str> {
    Some(match class {
        "SGD" => "neap::sgd",
        "Adam" => "neap::adam",
        "AdamW" => "neap::adamw",
        "RMSprop" => "neap::rmsprop",
        "Adagrad" => "neap::adagrad",
        _ => return None,
    })
}

/// The states an optimizer needs, in the order of its update's arguments.
fn states(optimizer: &Optimizer) -> Vec<&'static str> {
    let on = |key: &str| optimizer.values.get(key).is_some_and(|v| *v != 0.0);
    match optimizer.class.as_str() {
        "SGD" => Vec::from_iter(on("momentum").then_some("momentum_buffer")),
        "Adam" | "AdamW" => ["exp_avg", "exp_avg_sq"]
            .into_iter()
            .chain(on("amsgrad").then_some("max_exp_avg_sq"))
            .collect(),
        "RMSprop" => {
            let more =
                [on("momentum").then_some("momentum_buffer"), on("centered").then_some("grad_avg")];
            ["square_avg"].into_iter().chain(more.into_iter().flatten()).collect()
        }
        "Adagrad" => vec!["sum"],
        _ => Vec::new(),
    }
}

/// The optimizer of a step: as recorded, else recovered from the step's scalars. A note says what was assumed.
///
/// # Errors
/// With the reason when it is not one of the five, for the graph to stay as recorded.
pub(super) fn optimizer(
    graph: &Graph,
    step: &Step,
    notes: &mut Vec<String>,
) -> Result<Optimizer, String> {
    if let Some(recorded) = &step.recorded {
        if kind(&recorded.class).is_none() {
            return Err(unknown(&recorded.class));
        }
        compare(recorded, recover::recover(graph, step), notes)?;
        return Ok(recorded.clone());
    }
    if let Some(class) = &step.class
        && kind(class).is_none()
    {
        return Err(unknown(class));
    }
    let optimizer = recover::recover(graph, step)
        .map_err(|(Unclear::Missing(why) | Unclear::Differing(why))| why)?;
    let values: Vec<String> = optimizer.values.iter().map(|(k, v)| format!("{k} {v}")).collect();
    notes.push(format!(
        "the optimizer's hyperparameters are not recorded; recovered from scalars rounded to six decimals (a smaller eps is the framework's default): {} with {}",
        optimizer.class,
        values.join(", ")
    ));
    Ok(optimizer)
}

/// Recorded hyperparameters are the optimizer's defaults; the scalars show what the step used.
fn compare(
    recorded: &Optimizer,
    recovered: Result<Optimizer, Unclear>,
    notes: &mut Vec<String>,
) -> Result<(), String> {
    let recovered = match recovered {
        Ok(recovered) => recovered,
        Err(Unclear::Differing(why)) => return Err(why),
        // What the scalars don't show can't contradict.
        Err(Unclear::Missing(_)) => return Ok(()),
    };
    let (Some(said), Some(used)) = (recorded.values.get("lr"), recovered.values.get("lr")) else {
        return Ok(());
    };
    if (said - used).abs() > 0.05 * said.abs() + 2e-6 {
        notes.push(format!("the optimizer is recorded with lr {said}, but its step used about {used}; lr {said} is kept"));
    }
    Ok(())
}

fn unknown(class: &str) -> String {
    format!(
        "optimizer {class} is not recognised; its operators stay as recorded and its scalars are frozen at the recorded step"
    )
}

/// Replaces the step's operators by updates.
///
/// # Errors
/// With the reason when the step does not have the shape its class promises, for the graph to stay as recorded.
pub(super) fn lower(
    graph: &Graph,
    step: &Step,
    optimizer: Optimizer,
    early: bool,
    notes: &mut Vec<String>,
) -> Result<Graph, String> {
    let refuse = |why: String| {
        format!(
            "optimizer {} is not lowered: {why}; its scalars are frozen at the recorded step",
            optimizer.class
        )
    };
    let kind = kind(&optimizer.class).ok_or_else(|| unknown(&optimizer.class))?;
    check(graph, step).map_err(refuse)?;
    let mut tensors = graph.tensors.clone();
    let states = states(&optimizer);
    let mut updates: Vec<(usize, Operator)> = Vec::new();
    let short = kind.trim_start_matches("neap::");
    let first_seen = first_seen(graph, step);
    let last_write = last_write(graph, step);
    let last_outside = last_outside(graph, step);
    let mut generated = vec![false; graph.tensors.len()];
    graph
        .operators
        .iter()
        .flat_map(Operator::generates)
        .for_each(|o| generated[o.tensor.index()] = true);
    for column in &step.columns {
        let seen = |t: TensorId| first_seen.get(&t).map(|o| (*o).clone());
        let (Some(parameter), Some(gradient)) = (seen(column.parameter), seen(column.gradient))
        else {
            continue;
        };
        // A parameter that the step reads but never writes is frozen by the framework.
        let Some(&place) = last_write.get(&column.parameter) else { continue };
        let mut args = vec![Arg::Tensor(parameter.clone()), Arg::Tensor(gradient)];
        let mut written = vec![parameter];
        for key in &states {
            let state = match column.states.get(*key) {
                Some(&state) if !generated[state.index()] => seen(state),
                _ => None,
            };
            let state = state.unwrap_or_else(|| new_state(&mut tensors, key, column.parameter));
            args.push(Arg::Tensor(state.clone()));
            written.push(state);
        }
        written.iter_mut().for_each(|o| o.version += 1);
        let at = if early { last_outside.ready(column) } else { place };
        let name = format!("{short}_{}", updates.len());
        let (phase, replay) = (Phase::Optimize, Replay::Never);
        let (kind, outputs, workspace) = (kind.to_owned(), Vec::new(), Bytes::ZERO);
        updates.push((
            at,
            Operator {
                name,
                kind,
                phase,
                args,
                outputs,
                hidden: written,
                workspace,
                replay,
                random: false,
                duration_ns: None,
            },
        ));
    }
    if updates.is_empty() {
        return Err(refuse("no parameter with its gradient was found in its step".into()));
    }
    if tensors.len() > graph.tensors.len() {
        notes.push(
            "the recorded step is the optimizer's first and makes its states; lowered, they live across iterations as in every later one"
                .to_owned(),
        );
    }
    let lowered: Vec<TensorId> = step.columns.iter().map(|c| c.gradient).collect();
    for gradient in lowered {
        tensors[gradient.index()].kept_until = None;
    }
    Ok(assemble(graph, step, tensors, updates, optimizer))
}

/// Refuses steps whose results others use.
fn check(graph: &Graph, step: &Step) -> Result<(), String> {
    let mut made = vec![false; graph.tensors.len()];
    for (operator, inside) in graph.operators.iter().zip(&step.operators) {
        if *inside {
            operator.generates().for_each(|o| made[o.tensor.index()] = true);
        } else if let Some(used) = operator.reads().find(|o| made[o.tensor.index()]) {
            let tensor = &graph.tensors[used.tensor.index()].name;
            return Err(format!(
                "operator `{}` uses `{tensor}`, which its step makes",
                operator.name
            ));
        }
    }
    let parameters: Vec<TensorId> = step.columns.iter().map(|c| c.parameter).collect();
    let stray = graph
        .operators
        .iter()
        .zip(&step.operators)
        .filter(|(_, inside)| **inside)
        .flat_map(|(o, _)| o.updates())
        .find(|o| {
            let tensor = &graph.tensors[o.tensor.index()];
            tensor.role == Role::Parameter && !parameters.contains(&o.tensor)
        });
    stray.map_or(Ok(()), |o| {
        Err(format!(
            "no gradient was found for parameter `{}`",
            graph.tensors[o.tensor.index()].name
        ))
    })
}

/// How the step first sees each tensor.
fn first_seen<'a>(graph: &'a Graph, step: &Step) -> BTreeMap<TensorId, &'a Operand> {
    let mut seen = BTreeMap::new();
    for (operator, _) in graph.operators.iter().zip(&step.operators).filter(|(_, inside)| **inside)
    {
        for operand in operator.reads() {
            seen.entry(operand.tensor).or_insert(operand);
        }
    }
    seen
}

/// Which operator of the step last writes each tensor in place.
fn last_write(graph: &Graph, step: &Step) -> BTreeMap<TensorId, usize> {
    let inside = graph.operators.iter().enumerate().filter(|(at, _)| step.operators[*at]);
    inside.flat_map(|(at, o)| o.updates().map(move |w| (w.tensor, at))).collect()
}

/// A state the first step has yet to make.
fn new_state(tensors: &mut Vec<Tensor>, key: &str, parameter: TensorId) -> Operand {
    let Tensor { name, bytes, dtype, shape, .. } = tensors[parameter.index()].clone();
    let (id, stride) = (TensorId::of(tensors.len()), super::graph::contiguous(&shape));
    tensors.push(Tensor {
        name: format!("{key}:{name}"),
        bytes,
        role: Role::OptimizerState,
        dtype,
        shape: shape.clone(),
        kept_until: None,
    });
    Operand { tensor: id, version: 0, dtype, offset: 0, shape, stride }
}

/// For each tensor the last operator outside the step that writes it, and that touches it at all.
struct LastOutside {
    write: Vec<usize>,
    touch: Vec<usize>,
}

fn last_outside(graph: &Graph, step: &Step) -> LastOutside {
    let mut last =
        LastOutside { write: vec![0; graph.tensors.len()], touch: vec![0; graph.tensors.len()] };
    for (at, operator) in graph.operators.iter().enumerate().filter(|(at, _)| !step.operators[*at])
    {
        operator.writes().for_each(|o| last.write[o.tensor.index()] = at);
        operator.reads().chain(operator.writes()).for_each(|o| last.touch[o.tensor.index()] = at);
    }
    last
}

impl LastOutside {
    /// The operator that an update must follow: whatever writes its gradient or touches its parameter or states.
    fn ready(&self, column: &Column) -> usize {
        let touched =
            column.states.values().chain([&column.parameter]).map(|t| self.touch[t.index()]);
        touched.chain([self.write[column.gradient.index()]]).max().unwrap_or(0)
    }
}

/// Operators and updates in their new order, tensors without those that only the step used.
fn assemble(
    graph: &Graph,
    step: &Step,
    tensors: Vec<Tensor>,
    updates: Vec<(usize, Operator)>,
    optimizer: Optimizer,
) -> Graph {
    let mut updates = updates;
    updates.sort_by_key(|(at, _)| *at);
    let mut updates = updates.into_iter().peekable();
    let mut operators = Vec::new();
    let mut new_place = Vec::new();
    for (at, operator) in graph.operators.iter().enumerate() {
        new_place.push(OpId::of(operators.len()));
        if !step.operators[at] {
            operators.push(operator.clone());
        }
        while let Some((_, update)) = updates.next_if(|(place, _)| *place == at) {
            operators.push(update);
        }
    }
    let mut touched = vec![false; tensors.len()];
    operators.iter().flat_map(Operator::touches).for_each(|t| touched[t.index()] = true);
    let mut of_step = vec![false; tensors.len()];
    graph.operators.iter().flat_map(Operator::touches).for_each(|t| of_step[t.index()] = true);
    let mut new_id = vec![None; tensors.len()];
    let mut kept = Vec::new();
    for (at, mut tensor) in tensors.into_iter().enumerate() {
        // A tensor that nothing ever touched is there by its name.
        if touched[at] || !of_step[at] || tensor.role != Role::Activation {
            new_id[at] = Some(TensorId::of(kept.len()));
            tensor.kept_until = tensor.kept_until.map(|o| new_place[o.index()]);
            kept.push(tensor);
        }
    }
    let renumber = |operand: &mut Operand| {
        if let Some(id) = new_id[operand.tensor.index()] {
            operand.tensor = id;
        }
    };
    for operator in &mut operators {
        for arg in &mut operator.args {
            match arg {
                Arg::Tensor(operand) => renumber(operand),
                Arg::Tensors(list) => list.iter_mut().flatten().for_each(renumber),
                _ => {}
            }
        }
        operator.outputs.iter_mut().flatten().chain(&mut operator.hidden).for_each(renumber);
    }
    let mut loss = graph.loss.clone();
    loss.iter_mut().for_each(renumber);
    Graph {
        name: graph.name.clone(),
        tensors: kept,
        operators,
        optimizer: Some(optimizer),
        loss,
        recorded_peak: graph.recorded_peak,
    }
}
