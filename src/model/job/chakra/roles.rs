//! Finds the role and name of each tensor, and finishes the graph.
//!
//! It decides roles and names, gradients that wait for `zero_grad`, and whether to lower. Names in
//! the trace come first. Without them it decides by the operators and phases that read and write a
//! tensor.

use std::collections::{BTreeMap, HashSet};

use super::Options;
use super::build::{Built, Facts, SCALER};
use super::names::Names;
use crate::job::liveness::Liveness;
use crate::job::lower::{self, Column, Step};
use crate::job::{Arg, Dtype, Graph, GraphError, Operator, Phase, Role, Tensor};
use crate::units::{OpId, TensorId};

/// How operators outside the optimizer's step use a tensor.
#[derive(Clone, Copy, Debug, Default)]
struct Use {
    read_outside: bool,
    written_forward: bool,
    written_backward: bool,
    written_in_step: bool,
    made_in_step: bool,
}

pub(super) fn finish(
    mut built: Built,
    names: Names,
    options: &Options,
    notes: &mut Vec<String>,
) -> Result<Graph, GraphError> {
    notes.append(&mut built.notes);
    let mut classes = names.classes;
    if built.step.iter().all(|of| *of == 0) {
        let multi = |o: &Operator| {
            o.phase == Phase::Optimize
                && (o.kind.contains("_foreach_") || o.kind.contains("_fused_"))
        };
        built.step = built.operators.iter().map(|o| u16::from(multi(o))).collect();
        classes = vec![String::new()];
    }
    let uses = uses(&built);
    if let (Some(recorded), [only]) = (&names.optimizer, &mut classes[..]) {
        only.clone_from(&recorded.class);
    }
    let columns = pair(&mut built, &uses, &classes);
    remaining(&mut built, &uses);
    unique(&mut built.tensors);
    if let Some(until) = built.zero_grad {
        keep(&mut built, until);
    }
    let tensors =
        |lives: Vec<u32>| lives.iter().filter_map(|l| built.tensor_of.get(l).copied()).collect();
    let marked = names.groups.into_iter().map(|g| (g.group, tensors(g.lives))).collect();
    let step = Step {
        operators: built.step,
        columns,
        recorded: names.optimizer,
        marked,
        classes,
        steps: names.steps,
    };
    let parts = Graph {
        name: built.name,
        tensors: built.tensors,
        operators: built.operators,
        optimizer: None,
        loss: built.loss,
        recorded_peak: None,
        origin: None,
    };
    let mut recorded = check(parts)?;
    if options.as_recorded {
        recorded.optimizer = lower::as_recorded(&recorded, &step, notes);
        return Ok(recorded);
    }
    let peak = Liveness::new(&recorded).peak;
    let (before, kinds) = (recorded.operators.len(), has_updates);
    let lowered = lower::split(lower::lower(recorded, &step, options.updates_early, notes));
    let changed = lowered.operators.len() != before || kinds(&lowered);
    check(Graph { recorded_peak: changed.then_some(peak), ..lowered })
}

/// Whether any step was lowered.
fn has_updates(graph: &Graph) -> bool {
    graph.operators.iter().any(|o| o.group.is_some() || o.kind.starts_with("neap::"))
}

/// Checks the graph. The operators are already in a valid order, which stays.
fn check(parts: Graph) -> Result<Graph, GraphError> {
    let Graph { name, tensors, operators, optimizer, loss, recorded_peak, .. } = parts;
    Graph::new(name, tensors, operators, optimizer, loss, recorded_peak)
}

fn uses(built: &Built) -> Vec<Use> {
    let mut uses = vec![Use::default(); built.tensors.len()];
    for (operator, &step) in built.operators.iter().zip(&built.step) {
        let step = step > 0;
        for operand in operator.reads() {
            uses[operand.tensor.index()].read_outside |= !step;
        }
        for operand in operator.writes() {
            let of = &mut uses[operand.tensor.index()];
            match (step, operand.version, operator.phase) {
                (true, 0, _) => of.made_in_step = true,
                (true, ..) => of.written_in_step = true,
                (false, _, Phase::Forward) => of.written_forward = true,
                (false, ..) => of.written_backward = true,
            }
        }
    }
    uses
}

/// Finds each parameter's gradient and states by the operands that the step combines, and gives
/// them roles and names.
fn pair(built: &mut Built, uses: &[Use], classes: &[String]) -> Vec<Column> {
    let keys = lower::state_keys(&built.operators, &built.step, classes);
    let mut found = Vec::new();
    let sets = |number| {
        let sets = lower::columns(&built.operators, &built.step, number, built.tensors.len());
        sets.into_iter().map(move |members| (number, members))
    };
    let steps = u16::try_from(classes.len()).unwrap_or(u16::MAX);
    for (step, members) in (1..=steps).flat_map(sets).collect::<Vec<_>>() {
        let is = |t: TensorId, role: Role| {
            built.facts[t.index()].named && built.tensors[t.index()].role == role
        };
        let older = |t: TensorId| !built.facts[t.index()].generated;
        let (mut named, mut guessed, mut gradients) = (Vec::new(), Vec::new(), Vec::new());
        for &t in &members {
            let (of, facts) = (&uses[t.index()], built.facts[t.index()]);
            if is(t, Role::Parameter) {
                named.push(t);
            } else if facts.accumulated
                || (facts.generated && !of.made_in_step)
                || (older(t) && !facts.named && of.written_backward)
            {
                gradients.push(t);
            } else if older(t) && !facts.named && of.read_outside && of.written_in_step {
                guessed.push(t);
            }
        }
        let Some(&parameter) = named.first().or(guessed.first()) else { continue };
        let bytes = |t: TensorId| built.tensors[t.index()].shape.iter().product::<u64>();
        let same = |t: &&TensorId| bytes(**t) == bytes(parameter);
        let gradient = gradients
            .iter()
            .filter(same)
            .find(|t| built.facts[t.index()].accumulated)
            .or(gradients.iter().find(same))
            .copied();
        let states = members.iter().filter(|t| {
            older(**t) && **t != parameter && Some(**t) != gradient && !gradients.contains(t)
        });
        let states: Vec<TensorId> = states
            .copied()
            .filter(|t| uses[t.index()].written_in_step || is(*t, Role::OptimizerState))
            .collect();
        found.push((parameter, step, gradient, states));
    }
    found.sort_by_key(|(parameter, ..)| *parameter);
    let mut number = 0;
    let mut columns = Vec::new();
    for (parameter, step, gradient, states) in found {
        let tensor = &mut built.tensors[parameter.index()];
        tensor.role = Role::Parameter;
        if !built.facts[parameter.index()].named {
            tensor.name = format!("parameter_{number}");
            number += 1;
        }
        let name = built.tensors[parameter.index()].name.clone();
        let mut by_key = BTreeMap::new();
        for state in states {
            let tensor = &mut built.tensors[state.index()];
            tensor.role = Role::OptimizerState;
            let key = if built.facts[state.index()].named {
                tensor.name.split(':').next().unwrap_or("").to_owned()
            } else {
                let key = keys.get(&state).copied().unwrap_or("state");
                tensor.name = format!("{key}:{name}");
                key.to_owned()
            };
            by_key.entry(key).or_insert(state);
        }
        let Some(gradient) = gradient else { continue };
        let tensor = &mut built.tensors[gradient.index()];
        (tensor.role, tensor.name) = (Role::Gradient, format!("grad:{name}"));
        columns.push(Column { step, parameter, gradient, states: by_key });
    }
    columns
}

/// Roles and names of the tensors that neither names nor the optimizer explain.
fn remaining(built: &mut Built, uses: &[Use]) {
    let scaler = scaler(&built.operators);
    let explained = built.facts.iter().any(|f| f.named)
        || built.tensors.iter().any(|t| t.role == Role::Parameter);
    let (mut gradients, mut parameters, mut buffers) =
        (0, built.tensors.iter().filter(|t| t.name.starts_with("parameter_")).count(), 0);
    for (at, tensor) in built.tensors.iter_mut().enumerate() {
        let Facts { generated, named, accumulated, statistics } = built.facts[at];
        let floating = matches!(
            tensor.dtype,
            Dtype::F16 | Dtype::Bf16 | Dtype::F32 | Dtype::F64 | Dtype::C64 | Dtype::C128
        );
        if accumulated && !named && tensor.role == Role::Activation {
            tensor.role = Role::Gradient;
            tensor.name = number("grad", &mut gradients);
        } else if let Some(name) = scaler.get(&TensorId::from_index(at)) {
            (tensor.role, tensor.name) = (Role::Buffer, (*name).to_owned());
        } else if !generated && !named && tensor.role == Role::Activation {
            let lasting = statistics || uses[at].written_forward || !floating || explained;
            (tensor.role, tensor.name) = match lasting {
                true => (Role::Buffer, number("buffer", &mut buffers)),
                false => (Role::Parameter, number("parameter", &mut parameters)),
            };
        }
    }
}

/// The states of a gradient scaler.
fn scaler(operators: &[Operator]) -> BTreeMap<TensorId, &'static str> {
    let updates = operators.iter().filter(|o| o.kind == SCALER);
    let states = updates.flat_map(|o| o.args.iter().zip(["scaler.scale", "scaler.growth_tracker"]));
    let states = states.filter_map(|(arg, name)| match arg {
        Arg::Tensor(state) => Some((state.tensor, name)),
        _ => None,
    });
    states.collect()
}

fn number(kind: &str, next: &mut usize) -> String {
    *next += 1;
    format!("{kind}_{}", *next - 1)
}

/// Makes every name unique.
fn unique(tensors: &mut [Tensor]) {
    let mut seen = HashSet::new();
    for tensor in tensors {
        let mut name = tensor.name.clone();
        let mut n = 2;
        while !seen.insert(name.clone()) {
            name = format!("{}~{n}", tensor.name);
            n += 1;
        }
        tensor.name = name;
    }
}

/// Gradients of the iteration live until the next `zero_grad`. A `zero_grad` that comes after a
/// gradient is made in the same iteration ends it there, not in the next iteration.
fn keep(built: &mut Built, until: OpId) {
    let made = built.operators.iter().take(until.index()).flat_map(Operator::generates);
    let before: HashSet<TensorId> = made.map(|o| o.tensor).collect();
    for (at, (tensor, facts)) in built.tensors.iter_mut().zip(&built.facts).enumerate() {
        if tensor.role == Role::Gradient
            && facts.generated
            && !before.contains(&TensorId::from_index(at))
        {
            tensor.kept_until = Some(until);
        }
    }
}
