//! Lowering: operators over many tensors become one operator for each tensor.
//!
//! Multi-tensor operators touch every parameter, gradient and state at once, so none of these can
//! leave the device meanwhile. Element i of their lists depends only on element i of the other
//! lists, so one operator for each element computes the same.
//!
//! - The step of an optimizer that [`RULES`](super::optimizer::RULES) knows becomes one update
//!   operator for each parameter ([`lower`]). Updates know the step; recorded scalars do not.
//! - Other multi-tensor operators (clipping, averages of weights, unknown optimizers) are split
//!   ([`split`]): the same operator with lists of one.
//!
//! An update's arguments are the parameter, its gradient and its states; it writes the parameter
//! and the states in place (`hidden`).

mod columns;
mod hyper;
mod place;
mod recover;
mod split;

pub(super) use columns::{Column, columns, state_keys};
pub(super) use split::split;

use std::collections::{BTreeMap, HashSet};

use super::optimizer::{Group, Optimizer, Rule};
use super::{Arg, Graph, Operand, Operator, Phase, Replay, Role, Tensor};
use crate::units::{TensorId, id32};
use place::Outside;

/// What the importer knows about the optimizer beyond the graph.
#[derive(Debug, Default)]
pub(super) struct Step {
    /// For each operator, the number of its optimizer step, from 1; 0 if it belongs to none.
    pub operators: Vec<u16>,
    /// The column of each parameter that a step updates.
    pub columns: Vec<Column>,
    /// Hyperparameters of all parameters, if the trace records them for the whole optimizer.
    pub recorded: Option<Group>,
    /// Parameter groups with their parameters, if the trace marks them.
    pub marked: Vec<(Group, Vec<TensorId>)>,
    /// The optimizer's class in each step; empty if the trace does not say.
    pub classes: Vec<String>,
    /// How many steps the optimizer had taken by the end of the last step, if the trace has a
    /// counter.
    pub steps: Option<f64>,
}

impl Step {
    /// The optimizer's class in a step, if the trace says.
    fn class(&self, number: u16) -> Option<&str> {
        let class = self.classes.get(usize::from(number).checked_sub(1)?)?;
        (!class.is_empty()).then_some(class)
    }

    /// The numbers of the steps that update parameters.
    fn numbers(&self) -> Vec<u16> {
        let mut all: Vec<u16> = self.columns.iter().map(|c| c.step).collect();
        all.sort();
        all.dedup();
        all
    }
}

/// Replaces the operators of each recognised optimizer step by updates. Notes say what is assumed,
/// and why a step stays as recorded.
pub(super) fn lower(mut graph: Graph, step: &Step, early: bool, notes: &mut Vec<String>) -> Graph {
    let mut groups = Groups::default();
    let mut lowered = Vec::new();
    for number in step.numbers() {
        match hyper::groups(&graph, step, number, notes) {
            Ok(of) => match check(&graph, step, number) {
                Ok(()) => {
                    groups.add(of);
                    lowered.push(number);
                }
                Err(why) => notes.push(not_lowered(step, number, &why)),
            },
            Err(why) => notes.push(why),
        }
    }
    for number in step.numbers().into_iter().filter(|n| !lowered.contains(n)) {
        restore_eps(&mut graph, step, number, notes);
    }
    if lowered.is_empty() {
        return Graph { optimizer: recorded(step), ..graph };
    }
    match updates(&graph, step, &lowered, groups, early, notes) {
        Ok(lowered) => lowered,
        Err(why) => {
            notes.push(not_lowered(step, lowered[0], &why));
            Graph { optimizer: recorded(step), ..graph }
        }
    }
}

/// Restores eps in a step that stays as recorded: a trace rounds scalars to six decimals, so it
/// shows the addition of zero.
fn restore_eps(graph: &mut Graph, step: &Step, number: u16, notes: &mut Vec<String>) {
    let said = step.marked.iter().map(|(group, _)| group).chain(&step.recorded);
    let said = said.filter_map(|group| group.values.get("eps")).copied().next();
    let eps = said.filter(|eps| *eps > 0.0).unwrap_or(1e-8);
    let mut restored = 0;
    for (operator, &of) in graph.operators.iter_mut().zip(&step.operators) {
        if of == number && columns::base(&operator.kind) == "add" {
            for arg in operator.args.iter_mut().skip(1).take(1) {
                if *arg == Arg::Float(0.0) {
                    *arg = Arg::Float(eps);
                    restored += 1;
                }
            }
        }
    }
    if restored > 0 {
        let from = if said.is_some() { "as the trace marks it" } else { "the framework's default" };
        notes.push(format!(
            "{restored} operators of the optimizer's step add a number that the trace rounded to 0; it is taken for eps, {eps} ({from})"
        ));
    }
}

/// The optimizer of a step that stays as recorded, as far as its values are known.
pub(super) fn as_recorded(
    graph: &Graph,
    step: &Step,
    notes: &mut Vec<String>,
) -> Option<Optimizer> {
    let mut groups = Groups::default();
    for number in step.numbers() {
        match hyper::groups(graph, step, number, notes) {
            Ok(of) => groups.add(of),
            Err(why) => {
                notes.push(why);
                return recorded(step);
            }
        }
    }
    (!groups.all.is_empty()).then_some(Optimizer { groups: groups.all })
}

/// The optimizer as the trace itself describes it.
fn recorded(step: &Step) -> Option<Optimizer> {
    let mut groups: Vec<Group> = step.marked.iter().map(|(group, _)| group.clone()).collect();
    groups.extend(step.recorded.clone().filter(|_| step.marked.is_empty()));
    (!groups.is_empty()).then_some(Optimizer { groups })
}

fn not_lowered(step: &Step, number: u16, why: &str) -> String {
    let class = step.class(number).unwrap_or("of unknown class");
    format!("optimizer {class} is not lowered: {why}; its scalars are frozen at the recorded step")
}

/// The distinct parameter groups, and the group of each parameter.
#[derive(Default)]
struct Groups {
    all: Vec<Group>,
    of: BTreeMap<TensorId, usize>,
}

impl Groups {
    fn add(&mut self, groups: Vec<(TensorId, Group)>) {
        for (parameter, group) in groups {
            let at = self.all.iter().position(|g| *g == group).unwrap_or_else(|| {
                self.all.push(group);
                self.all.len() - 1
            });
            self.of.insert(parameter, at);
        }
    }
}

/// Returns an error for a step that updates can't replace.
fn check(graph: &Graph, step: &Step, number: u16) -> Result<(), String> {
    let mut made = vec![false; graph.tensors.len()];
    for (operator, &of) in graph.operators.iter().zip(&step.operators) {
        if of == number {
            // The last two arguments are a GradScaler's scale and flag.
            let scaled = operator.args.iter().rev().take(2).any(|a| matches!(a, Arg::Tensor(_)));
            if operator.kind.contains("_fused_") && scaled {
                return Err("its fused operator also unscales gradients (GradScaler); build the optimizer with foreach=True".into());
            }
            operator.generates().for_each(|o| made[o.tensor.index()] = true);
        } else if let Some(used) = operator.reads().find(|o| made[o.tensor.index()]) {
            let tensor = &graph.tensors[used.tensor.index()].name;
            return Err(format!(
                "operator `{}` uses `{tensor}`, which its step makes",
                operator.name
            ));
        }
    }
    let (own, others): (Vec<&Column>, Vec<&Column>) =
        step.columns.iter().partition(|c| c.step == number);
    let others: HashSet<TensorId> = others.into_iter().map(|c| c.parameter).collect();
    if let Some(twice) = own.iter().find(|c| others.contains(&c.parameter)) {
        let name = &graph.tensors[twice.parameter.index()].name;
        return Err(format!(
            "parameter `{name}` is stepped more than once in the iteration; record an iteration of one step"
        ));
    }
    let parameters: HashSet<TensorId> = own.iter().map(|c| c.parameter).collect();
    let inside = graph.operators.iter().zip(&step.operators).filter(|(_, of)| **of == number);
    let stray = inside.flat_map(|(o, _)| o.updates()).find(|o| {
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

/// The graph with updates in place of the operators of the steps in `lowered`.
fn updates(
    graph: &Graph,
    step: &Step,
    lowered: &[u16],
    groups: Groups,
    early: bool,
    notes: &mut Vec<String>,
) -> Result<Graph, String> {
    let inside: Vec<bool> = step.operators.iter().map(|of| lowered.contains(of)).collect();
    let mut tensors = graph.tensors.clone();
    let seen = place::seen(graph, &inside);
    let outside = Outside::new(graph, &inside);
    let generated: HashSet<TensorId> =
        graph.operators.iter().flat_map(Operator::generates).map(|o| o.tensor).collect();
    let mut updates: Vec<(usize, Operator)> = Vec::new();
    let mut numbers: BTreeMap<&str, usize> = BTreeMap::new();
    for column in step.columns.iter().filter(|c| lowered.contains(&c.step)) {
        let first = |t: TensorId| seen.first.get(&t).map(|o| (*o).clone());
        let (Some(parameter), Some(gradient)) = (first(column.parameter), first(column.gradient))
        else {
            continue;
        };
        // The step reads this parameter but never writes it: the framework has frozen it.
        let Some(&(place, _)) = seen.last_write.get(&column.parameter) else { continue };
        let Some(&group) = groups.of.get(&column.parameter) else { continue };
        let Some(rule) = Rule::of_class(&groups.all[group].class) else { continue };
        let mut args = vec![Arg::Tensor(parameter.clone()), Arg::Tensor(gradient)];
        let mut written = vec![parameter];
        for key in rule.states_of(&groups.all[group]) {
            let state = match column.states.get(key) {
                Some(&state) if !generated.contains(&state) => first(state),
                _ => None,
            };
            let state = state.unwrap_or_else(|| new_state(&mut tensors, key, column.parameter));
            args.push(Arg::Tensor(state.clone()));
            written.push(state);
        }
        for operand in &mut written {
            let last = seen.last_write.get(&operand.tensor);
            operand.version = last.map_or(operand.version + 1, |(_, version)| *version);
        }
        let at = if early { outside.ready(column, &seen) } else { place };
        let short = rule.kind.trim_start_matches("neap::");
        let number = numbers.entry(short).or_default();
        let name = format!("{short}_{number}");
        *number += 1;
        let operator = Operator {
            name,
            kind: rule.kind.to_owned(),
            phase: Phase::Optimize,
            args,
            hidden: written,
            replay: Replay::Never,
            group: (groups.all.len() > 1).then_some(id32(group)),
            ..Operator::default()
        };
        updates.push((at, operator));
    }
    if updates.is_empty() {
        return Err("no parameter with its gradient was found in its step".into());
    }
    if tensors.len() > graph.tensors.len() {
        notes.push(
            "the recorded step is the optimizer's first and makes its states; lowered, they live across iterations as in every later one"
                .to_owned(),
        );
    }
    for column in step.columns.iter().filter(|c| lowered.contains(&c.step)) {
        tensors[column.gradient.index()].kept_until = None;
    }
    let optimizer = Some(Optimizer { groups: groups.all });
    place::assemble(graph, &inside, tensors, updates, optimizer)
}

/// Adds a state that the recorded step, the optimizer's first, has yet to make.
fn new_state(tensors: &mut Vec<Tensor>, key: &str, parameter: TensorId) -> Operand {
    let Tensor { name, bytes, dtype, shape, .. } = tensors[parameter.index()].clone();
    let (id, stride) = (TensorId::from_index(tensors.len()), super::graph::contiguous(&shape));
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
