//! What annotations in a trace say: long-lived tensors, the iteration, the optimizer, phases, scalars.
//!
//! For: the `neap.*` names and the marks PyTorch itself leaves (`Optimizer.step#…`, `Optimizer.zero_grad#…`,
//! `autograd::engine::evaluate_function: …`). Not for: judging what has no name ([`super::roles`]).

use std::collections::{BTreeMap, HashMap, HashSet};

use super::parse::Trace;
use super::value::Value;
use crate::job::{Optimizer, Role};

/// Where a call stands.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Context {
    /// Part of the iteration.
    pub included: bool,
    pub backward: bool,
    /// Inside an optimizer's step.
    pub step: bool,
    /// Inside the node that hands a parameter its gradient.
    pub accumulate: bool,
    /// The Python number that the call combines with a tensor.
    pub scalar: Option<f64>,
    /// The forward call that this one helps to differentiate.
    pub sequence: i64,
}

/// A long-lived tensor with its name.
#[derive(Debug)]
pub(super) struct Named {
    pub life: u32,
    pub role: Role,
    /// For an optimizer's state `KEY:NAME`.
    pub name: String,
}

/// All that annotations say.
#[derive(Debug, Default)]
pub(super) struct Names {
    pub context: Vec<Context>,
    pub named: Vec<Named>,
    /// From `neap.optimizer:`.
    pub optimizer: Option<Optimizer>,
    /// From `Optimizer.step#CLASS.step`.
    pub class: Option<String>,
    pub zero_grad: Option<usize>,
    /// How many steps the optimizer had taken by the end of this one.
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
        if context.backward && node.sequence >= 0 {
            context.sequence = node.sequence;
        }
        context.backward |= text.starts_with("autograd::engine::evaluate_function");
        context.accumulate |= text == "torch::autograd::AccumulateGrad";
        if let Some(class) = text.strip_prefix("Optimizer.step#") {
            context.step = true;
            if context.included {
                names
                    .class
                    .get_or_insert_with(|| class.strip_suffix(".step").unwrap_or(class).to_owned());
            }
        }
        if text.starts_with("Optimizer.zero_grad#") && context.included {
            names.zero_grad.get_or_insert(at);
        }
        if context.step
            && text == "aten::_local_scalar_dense"
            && let Some(Value::Float(steps)) = node.outputs.first()
        {
            names.steps = Some(names.steps.map_or(*steps, |most| most.max(*steps)));
        }
        names.context[at] = context;
        if let Some(text) = text.strip_prefix("neap.optimizer:") {
            names.optimizer = Some(optimizer(text));
        }
        let named = [
            ("neap.parameter:", Role::Parameter),
            ("neap.buffer:", Role::Buffer),
            ("neap.optimizer_state:", Role::OptimizerState),
        ];
        if let Some((role, name)) =
            named.iter().find_map(|(prefix, role)| Some((*role, text.strip_prefix(prefix)?)))
            && let Some(life) = subject(trace, at)
            && seen.insert(life)
        {
            names.named.push(Named { life, role, name: name.to_owned() });
        }
    }
    names
}

/// The device tensor that the first call inside an annotation reads.
fn subject(trace: &Trace, mark: usize) -> Option<u32> {
    let inside = (mark + 1..=trace.nodes[mark].end).filter(|&n| trace.inside(n, mark));
    let mut views = inside.flat_map(|n| trace.nodes[n].inputs.iter().flat_map(Value::views));
    views.next().filter(|v| !v.host && v.end > 0).map(|v| v.life)
}

/// The iteration is what stands inside its mark, with what other threads do until the mark's thread goes on.
fn include(trace: &Trace, mark: Option<usize>, context: &mut [Context]) {
    let Some(mark) = mark else {
        context.iter_mut().for_each(|c| c.included = true);
        return;
    };
    // The thread: the outermost node around a call but for the root.
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

/// Reads `CLASS:key=value,…`. Flags are 0 or 1, `betas=a/b` is `beta1` and `beta2`, `None` is left out.
fn optimizer(text: &str) -> Optimizer {
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
    Optimizer { class: class.to_owned(), values, recovered: false }
}

#[cfg(test)]
mod tests {
    #[test]
    fn hyperparameters_are_read() {
        let o =
            super::optimizer("AdamW:lr=0.001,betas=0.9/0.999,eps=1e-08,amsgrad=False,foreach=None");
        assert_eq!(o.class, "AdamW");
        let expected =
            [("amsgrad", 0.0), ("beta1", 0.9), ("beta2", 0.999), ("eps", 1e-8), ("lr", 1e-3)];
        assert_eq!(o.values, expected.map(|(k, v)| (k.to_owned(), v)).into());
    }
}
