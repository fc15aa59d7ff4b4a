//! What annotations in a trace say about long-lived tensors, the iteration, the optimizer, phases
//! and scalars.
//!
//! Annotations are the `neap.*` names and the marks that PyTorch leaves (`Optimizer.step#…`,
//! `Optimizer.zero_grad#…`, `autograd::engine::evaluate_function: …`).

use crate::units::id32;
use std::collections::{BTreeMap, HashMap, HashSet};

use super::parse::Trace;
use super::value::Value;
use crate::job::{Group, Phase, Role};

/// What surrounds a call.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Context {
    /// Whether it belongs to the iteration.
    pub included: bool,
    pub backward: bool,
    /// The number of the optimizer step around it, from 1; 0 if there is none.
    pub step: u16,
    /// Whether it is inside the node that hands a parameter its gradient.
    pub accumulate: bool,
    /// The Python number that the call combines with a tensor.
    pub scalar: Option<f64>,
    /// The sequence number of the forward call whose backward this is part of.
    pub sequence: i64,
    /// Position of the mark of the module around it.
    pub module: Option<u32>,
    /// Position of the mark of the batch data that it copies.
    pub input: Option<u32>,
}

impl Context {
    /// The phase of an operator at this place.
    pub fn phase(&self) -> Phase {
        match (self.step > 0, self.backward) {
            (true, _) => Phase::Optimize,
            (_, true) => Phase::Backward,
            _ => Phase::Forward,
        }
    }
}

/// A long-lived tensor and its name.
#[derive(Debug)]
pub(super) struct Named {
    pub life: u32,
    pub role: Role,
    /// The name; for an optimizer state `KEY:NAME`.
    pub name: String,
}

/// A parameter group that the trace marks.
#[derive(Debug)]
pub(super) struct MarkedGroup {
    pub group: Group,
    /// Its parameters.
    pub lives: Vec<u32>,
}

/// Everything that the annotations say.
#[derive(Debug, Default)]
pub(super) struct Names {
    pub context: Vec<Context>,
    pub named: Vec<Named>,
    /// The group of all parameters, from `neap.optimizer:`.
    pub optimizer: Option<Group>,
    /// The marked groups, from `neap.group:`.
    pub groups: Vec<MarkedGroup>,
    /// The optimizer's class in each step of the iteration, from `Optimizer.step#CLASS.step`.
    pub classes: Vec<String>,
    pub zero_grad: Option<usize>,
    /// How many steps the optimizer had taken by the end of the last step.
    pub steps: Option<f64>,
    /// Numbers that autograd saves for backward, by forward call and address.
    pub saved: HashMap<(i64, u64), f64>,
}

pub(super) fn find(trace: &Trace) -> Names {
    let mut names = Names {
        context: vec![Context { sequence: -1, ..Context::default() }; trace.nodes.len()],
        ..Names::default()
    };
    let mut seen = HashSet::new();
    let mark = trace.nodes.iter().position(|n| n.name == "neap.iteration");
    include(trace, mark, &mut names.context);
    let starts = step_starts(trace);
    let mut modules: HashMap<i64, u32> = HashMap::new();
    for (at, node) in trace.nodes.iter().enumerate() {
        let mut context =
            Context { included: names.context[at].included, ..names.context[node.parent] };
        let text = node.name.as_str();
        if let Some(scalar) = text.strip_prefix("neap.scalar:") {
            context.scalar = scalar.parse().ok();
        }
        if let Some(scalar) = context.scalar.filter(|_| node.sequence >= 0) {
            let numbers =
                node.inputs.iter().flat_map(Value::views).filter(|v| v.host && v.shape.is_empty());
            names.saved.extend(numbers.map(|v| ((node.sequence, v.storage), scalar)));
        }
        if text.starts_with("neap.module:") {
            context.module = Some(id32(at));
        }
        if text.starts_with("neap.input:") {
            context.input = Some(id32(at));
        }
        if context.backward && node.sequence >= 0 {
            context.sequence = node.sequence;
            context.module = modules.get(&node.sequence).copied();
        } else if let Some(module) = context.module.filter(|_| node.sequence >= 0) {
            modules.insert(node.sequence, module);
        }
        context.backward |= text.starts_with("autograd::engine::evaluate_function");
        context.accumulate |= text == "torch::autograd::AccumulateGrad";
        if context.included
            && let Some(from) = starts.get(&at)
        {
            let class = node.name.strip_prefix("Optimizer.step#").unwrap_or_default();
            names.classes.push(class.strip_suffix(".step").unwrap_or(class).to_owned());
            let number = u16::try_from(names.classes.len()).unwrap_or(u16::MAX);
            names.context[*from..=node.end].iter_mut().for_each(|c| c.step = number);
        }
        context.step = names.context[at].step;
        if text.starts_with("Optimizer.zero_grad#") && context.included {
            names.zero_grad.get_or_insert(at);
        }
        if context.step > 0
            && text == "aten::_local_scalar_dense"
            && let Some(Value::Float(steps)) = node.outputs.first()
        {
            names.steps = Some(names.steps.map_or(*steps, |most| most.max(*steps)));
        }
        names.context[at] = context;
        names.mark(trace, at, &mut seen);
    }
    names
}

/// For each optimizer step, the position where it begins to step: after its closure.
fn step_starts(trace: &Trace) -> HashMap<usize, usize> {
    let is_step = |at: &usize| trace.nodes[*at].name.starts_with("Optimizer.step#");
    let steps = (0..trace.nodes.len()).filter(is_step);
    let begins = steps.map(|at| {
        let last_backward = (at..=trace.nodes[at].end).rev().find(|&n| {
            let name = &trace.nodes[n].name;
            name.starts_with("autograd::engine::evaluate_function")
        });
        // If backward runs on the step's own thread, its last node may contain others.
        (at, last_backward.map_or(at, |n| trace.nodes[n].end.min(trace.nodes[at].end) + 1))
    });
    begins.filter(|(at, from)| *from <= trace.nodes[*at].end).collect()
}

impl Names {
    /// Reads `neap.schedule:GROUP:KEY:VALUE/VALUE…`. Marks of one group and key continue each
    /// other.
    fn schedule(&mut self, text: &str) -> Option<()> {
        let mut parts = text.strip_prefix("neap.schedule:")?.splitn(3, ':');
        let number: usize = parts.next()?.parse().ok()?;
        let (key, list) = (parts.next()?, parts.next()?);
        let values = list.split('/').map(|v| v.parse().ok().filter(|v: &f64| v.is_finite()));
        let values: Vec<f64> = values.collect::<Option<_>>()?;
        let schedules = &mut self.groups.get_mut(number)?.group.schedules;
        schedules.entry(key.to_owned()).or_default().extend(values);
        Some(())
    }

    /// Reads one of neap's own annotations.
    fn mark(&mut self, trace: &Trace, at: usize, seen: &mut HashSet<u32>) {
        let text = trace.nodes[at].name.as_str();
        if let Some(text) = text.strip_prefix("neap.optimizer:") {
            self.optimizer = Some(group(text));
        }
        if let Some(text) = text.strip_prefix("neap.group:") {
            self.groups
                .push(MarkedGroup { group: group(text), lives: subjects(trace, at).collect() });
        }
        self.schedule(text);
        let named = [
            ("neap.parameter:", Role::Parameter),
            ("neap.buffer:", Role::Buffer),
            ("neap.batch:", Role::Input),
            ("neap.optimizer_state:", Role::OptimizerState),
        ];
        if let Some((role, name)) =
            named.iter().find_map(|(prefix, role)| Some((*role, text.strip_prefix(prefix)?)))
            && let Some(life) = subject(trace, at)
            && seen.insert(life)
        {
            self.named.push(Named { life, role, name: name.to_owned() });
        }
    }
}

/// The device tensors that the calls directly inside an annotation read first.
fn subjects(trace: &Trace, mark: usize) -> impl Iterator<Item = u32> + '_ {
    let inside = (mark + 1..=trace.nodes[mark].end).filter(move |&n| trace.nodes[n].parent == mark);
    let first = |n: usize| trace.nodes[n].inputs.iter().flat_map(Value::views).next();
    inside.filter_map(first).filter(|v| !v.host && v.end > 0).map(|v| v.life)
}

/// The device tensor that the first call inside an annotation reads.
fn subject(trace: &Trace, mark: usize) -> Option<u32> {
    let inside = (mark + 1..=trace.nodes[mark].end).filter(|&n| trace.inside(n, mark));
    let mut views = inside.flat_map(|n| trace.nodes[n].inputs.iter().flat_map(Value::views));
    views.next().filter(|v| !v.host && v.end > 0).map(|v| v.life)
}

/// The iteration is everything inside its mark, and what other threads do until the mark's thread
/// goes on.
fn include(trace: &Trace, mark: Option<usize>, context: &mut [Context]) {
    let Some(mark) = mark else {
        context.iter_mut().for_each(|c| c.included = true);
        return;
    };
    // A call's thread is the outermost node around it below the root.
    let thread = |node: usize| {
        trace.around(node).filter(|&n| trace.nodes[n].parent != n).last().unwrap_or(node)
    };
    let home = thread(mark);
    for (at, context) in context.iter_mut().enumerate().skip(mark) {
        if !trace.inside(at, mark) && trace.inside(at, home) {
            break;
        }
        context.included = true;
    }
}

/// Reads `CLASS:key=value,…`. Flags are 0 or 1, `betas=a/b` is `beta1` and `beta2`, `None` is left
/// out.
fn group(text: &str) -> Group {
    let (class, list) = text.split_once(':').unwrap_or((text, ""));
    let mut values = BTreeMap::new();
    for (key, value) in list.split(',').filter_map(|pair| pair.split_once('=')) {
        let number = |v: &str| match v {
            "True" => Some(1.0),
            "False" => Some(0.0),
            _ => v.parse::<f64>().ok().filter(|v| v.is_finite()),
        };
        if value.contains('/') {
            let key = key.strip_suffix('s').unwrap_or(key);
            for (n, part) in value.split('/').enumerate() {
                values.extend(number(part).map(|v| (format!("{key}{}", n + 1), v)));
            }
        } else {
            values.extend(number(value).map(|v| (key.to_owned(), v)));
        }
    }
    Group { class: class.to_owned(), values, ..Group::default() }
}

#[cfg(test)]
mod tests {
    #[test]
    fn hyperparameters_are_read() {
        let o = super::group("AdamW:lr=0.001,betas=0.9/0.999,eps=1e-08,amsgrad=False,foreach=None");
        assert_eq!(o.class, "AdamW");
        let expected =
            [("amsgrad", 0.0), ("beta1", 0.9), ("beta2", 0.999), ("eps", 1e-8), ("lr", 1e-3)];
        assert_eq!(o.values, expected.map(|(k, v)| (k.to_owned(), v)).into());
    }
}
