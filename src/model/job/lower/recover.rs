//! Recovers hyperparameters from the scalars of a recorded step.
//!
//! Scalars are recorded with six decimals and belong to the recorded iteration. So a recovered
//! value is the number with the fewest digits that agrees with them, and is marked as recovered.

use std::collections::BTreeMap;

use super::Step;
use super::columns::base;
use crate::job::optimizer::{Group, RULES, Rule};
use crate::job::{Arg, Graph, Operator};
use crate::units::TensorId;

/// Half of the last recorded decimal.
const ROUNDING: f64 = 5e-7;

/// The part that an operand plays in the step.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Part {
    Parameter,
    Gradient,
    State(&'static str),
    Scratch,
}

/// Parameters that are stepped together, in ascending order, and their hyperparameters, or the
/// reason why these are unknown.
pub(super) type Recovered = (Vec<TensorId>, Result<Group, String>);

/// Recovers the values of each set of parameters that the operators of step `number` treat alike.
/// It also recognises the class, if the trace does not say it.
pub(super) fn recover(graph: &Graph, step: &Step, number: u16) -> Vec<Recovered> {
    let mut parts: BTreeMap<TensorId, Part> = BTreeMap::new();
    for column in step.columns.iter().filter(|c| c.step == number) {
        parts.insert(column.parameter, Part::Parameter);
        parts.insert(column.gradient, Part::Gradient);
        for (key, state) in &column.states {
            let known = RULES.iter().flat_map(|r| r.states).map(|(key, _)| *key).find(|k| k == key);
            parts.insert(*state, Part::State(known.unwrap_or("momentum_buffer")));
        }
    }
    let of = |operators: &[&Operator]| -> Vec<TensorId> {
        let updated = operators.iter().flat_map(|o| o.updates()).map(|o| o.tensor);
        let mut all: Vec<TensorId> =
            updated.filter(|t| parts.get(t) == Some(&Part::Parameter)).collect();
        all.sort_unstable();
        all.dedup();
        all
    };
    groups(graph, step, number)
        .into_iter()
        .map(|operators| (of(&operators), group(&operators, &parts, step, number)))
        .filter(|(parameters, _)| !parameters.is_empty())
        .collect()
}

/// The step's operators, grouped by the parameters that they step together.
fn groups<'a>(graph: &'a Graph, step: &Step, number: u16) -> Vec<Vec<&'a Operator>> {
    let inside = graph.operators.iter().zip(&step.operators).filter(|(_, of)| **of == number);
    let operators: Vec<&Operator> = inside.map(|(o, _)| o).collect();
    // Tensors of more than one element connect operators. A single number may be shared by all
    // groups.
    let mut sets = petgraph::unionfind::UnionFind::<usize>::new(operators.len());
    let mut first: BTreeMap<TensorId, usize> = BTreeMap::new();
    let singles = |o: &Operator| o.reads().chain(o.writes()).all(|x| x.elements() == 1);
    for (at, operator) in operators.iter().enumerate() {
        let single = singles(operator);
        for operand in
            operator.reads().chain(operator.writes()).filter(|o| single || o.elements() > 1)
        {
            let other = *first.entry(operand.tensor).or_insert(at);
            sets.union(other, at);
        }
    }
    let mut groups: BTreeMap<usize, Vec<&Operator>> = BTreeMap::new();
    for (at, operator) in operators.iter().enumerate() {
        groups.entry(sets.find(at)).or_default().push(operator);
    }
    groups.into_values().collect()
}

fn group(
    operators: &[&Operator],
    parts: &BTreeMap<TensorId, Part>,
    step: &Step,
    number: u16,
) -> Result<Group, String> {
    let calls: Vec<Call> = operators.iter().map(|o| Call::new(o, parts)).collect();
    let class = step.class(number).map(str::to_owned).or_else(|| classify(&calls));
    let class = class.ok_or("the optimizer is not recognised by its operators; its scalars are frozen at the recorded step")?;
    let rule = Rule::of_class(&class).ok_or_else(|| super::hyper::unknown(&class))?;
    let lacks = |what: &str| {
        format!(
            "the {what} of optimizer {class} is not in the trace; its scalars are frozen at the recorded step"
        )
    };
    let mut values = match operators.iter().find(|o| o.kind.contains("_fused_")) {
        Some(fused) => fused_values(fused),
        None => match rule.class {
            "SGD" => sgd(&calls).ok_or_else(|| lacks("momentum"))?,
            "Adam" | "AdamW" => adam(&calls, step.steps),
            "RMSprop" => rmsprop(&calls).ok_or_else(|| lacks("momentum"))?,
            "Adagrad" => adagrad(&calls),
            other => return Err(super::hyper::unknown(other)),
        },
    };
    if calls.iter().any(|c| c.base == "neg" && c.first == Part::Gradient) {
        set(&mut values, "maximize", Some(1.0));
    }
    if values.get("lr").is_none_or(|lr| *lr <= 0.0) {
        return Err(lacks("learning rate"));
    }
    // The value was rounded away; the framework's default is the best guess.
    if let Some(eps) = values.get_mut("eps").filter(|e| **e == 0.0) {
        *eps = rule.eps;
    }
    Ok(Group { class, values, recovered: true, ..Group::default() })
}

/// One operator of the step, in a form for matching.
struct Call<'a> {
    base: &'a str,
    first: Part,
    second: Option<Part>,
    in_place: bool,
    scalar: Option<f64>,
}

impl<'a> Call<'a> {
    fn new(operator: &'a Operator, parts: &BTreeMap<TensorId, Part>) -> Self {
        let part = |arg: &Arg| match arg {
            Arg::Tensor(o) => Some(parts.get(&o.tensor).copied().unwrap_or(Part::Scratch)),
            Arg::Tensors(list) => list
                .iter()
                .flatten()
                .next()
                .map(|o| parts.get(&o.tensor).copied().unwrap_or(Part::Scratch)),
            _ => None,
        };
        // A number that became a host tensor is the relevant scalar; the `alpha` after it is 1.
        let host = operator
            .args
            .iter()
            .find_map(|arg| if let Arg::Host { value, .. } = arg { Some(*value) } else { None });
        let scalar = host.unwrap_or_else(|| {
            operator.args.iter().rev().find_map(|arg| match arg {
                Arg::Float(v) => Some(*v),
                Arg::Int(v) => Some(*v as f64),
                Arg::Floats(v) => v.first().copied(),
                _ => None,
            })
        });
        Self {
            base: base(&operator.kind),
            first: operator.args.first().and_then(part).unwrap_or(Part::Scratch),
            second: operator.args.get(1).and_then(part),
            in_place: operator.generates().next().is_none(),
            scalar,
        }
    }

    fn updates_parameter(&self) -> bool {
        self.in_place && self.first == Part::Parameter
    }
}

fn classify(calls: &[Call]) -> Option<String> {
    let has = |b: &str| calls.iter().any(|c| c.base == b);
    let class = if let Some(rule) = calls.iter().find_map(|c| Rule::of_fused(c.base)) {
        rule.class
    } else if has("addcdiv") && has("sqrt") && has("addcmul") {
        let averages = calls
            .iter()
            .any(|c| c.base == "mul" && c.in_place && matches!(c.first, Part::State(_)));
        match (has("lerp"), averages) {
            (true, _) if calls.iter().any(|c| c.base == "mul" && c.updates_parameter()) => "AdamW",
            (true, _) => "Adam",
            (false, true) => "RMSprop",
            (false, false) => "Adagrad",
        }
    } else if calls.iter().any(|c| c.base == "add" && c.updates_parameter())
        && calls.iter().all(|c| matches!(c.base, "add" | "mul" | "neg" | "clone"))
    {
        "SGD"
    } else {
        return None;
    };
    Some(class.to_owned())
}

type Values = BTreeMap<String, f64>;

/// The first scalar among the calls that fit.
fn scalar(calls: &[Call], fits: impl Fn(&Call) -> bool) -> Option<f64> {
    calls.iter().filter(|c| fits(c)).find_map(|c| c.scalar)
}

fn set(values: &mut Values, key: &str, value: Option<f64>) {
    values.extend(value.filter(|v| v.is_finite()).map(|v| (key.to_owned(), v)));
}

/// Weight decay that is added to the gradient.
fn decay(calls: &[Call]) -> f64 {
    scalar(calls, |c| c.base == "add" && c.second == Some(Part::Parameter))
        .map_or(0.0, |v| neat(v, ROUNDING))
}

/// Values of SGD; `None` if there is momentum whose value is not recorded.
fn sgd(calls: &[Call]) -> Option<Values> {
    let mut values = Values::new();
    let state = |c: &Call| c.in_place && matches!(c.first, Part::State(_));
    // The first step makes the momentum buffers and does not use the momentum.
    let buffers =
        calls.iter().any(|c| state(c) || (c.base == "clone" && c.first != Part::Parameter));
    let momentum = scalar(calls, |c| c.base == "mul" && state(c));
    if buffers && momentum.is_none() {
        return None;
    }
    set(
        &mut values,
        "lr",
        scalar(calls, |c| c.base == "add" && c.updates_parameter()).map(|v| neat(-v, ROUNDING)),
    );
    set(&mut values, "weight_decay", Some(decay(calls)));
    set(&mut values, "momentum", Some(momentum.map_or(0.0, |v| neat(v, ROUNDING))));
    set(
        &mut values,
        "dampening",
        Some(
            scalar(calls, |c| c.base == "add" && state(c)).map_or(0.0, |v| neat(1.0 - v, ROUNDING)),
        ),
    );
    let nesterov = calls.iter().any(|c| {
        c.base == "add" && c.first != Part::Parameter && matches!(c.second, Some(Part::State(_)))
    });
    set(&mut values, "nesterov", Some(f64::from(u8::from(nesterov))));
    Some(values)
}

fn adam(calls: &[Call], steps: Option<f64>) -> Values {
    let mut values = Values::new();
    let beta1 = neat(1.0 - scalar(calls, |c| c.base == "lerp").unwrap_or(0.1), ROUNDING);
    let beta2 = neat(1.0 - scalar(calls, |c| c.base == "addcmul").unwrap_or(0.001), ROUNDING);
    set(&mut values, "beta1", Some(beta1));
    set(&mut values, "beta2", Some(beta2));
    set(
        &mut values,
        "eps",
        Some(
            scalar(calls, |c| c.base == "add" && c.first == Part::Scratch && c.second.is_none())
                .unwrap_or(0.0),
        ),
    );
    set(
        &mut values,
        "amsgrad",
        Some(f64::from(u8::from(calls.iter().any(|c| c.base == "maximum")))),
    );
    // The rate follows from the number of steps, which a counter shows, or else from sqrt(1 -
    // beta2^t).
    let correction = scalar(calls, |c| c.base == "div" && matches!(c.first, Part::Scratch));
    let t = steps
        .filter(|t| *t >= 1.0)
        .or(correction.map(|c| ((1.0 - c * c).ln() / beta2.ln()).round().max(1.0)));
    let size = scalar(calls, |c| c.base == "addcdiv" && c.updates_parameter());
    let rate = size.zip(t).map(|(size, t)| {
        let correction1 = 1.0 - beta1.powf(t);
        neat(-size * correction1, ROUNDING * correction1)
    });
    set(&mut values, "lr", rate);
    let decoupled = scalar(calls, |c| c.base == "mul" && c.updates_parameter());
    let weight_decay = match (decoupled, rate) {
        (Some(factor), Some(rate)) if rate > 0.0 => neat((1.0 - factor) / rate, ROUNDING / rate),
        _ => decay(calls),
    };
    set(&mut values, "weight_decay", Some(weight_decay));
    values
}

/// Values of RMSprop; `None` if there is momentum whose value is not recorded.
fn rmsprop(calls: &[Call]) -> Option<Values> {
    let mut values = Values::new();
    let square = |c: &Call| c.base == "addcmul" && c.in_place;
    set(&mut values, "alpha", scalar(calls, square).map(|v| neat(1.0 - v, ROUNDING)));
    let rate = scalar(calls, |c| matches!(c.base, "addcdiv" | "add") && c.updates_parameter());
    set(&mut values, "lr", rate.map(|v| neat(-v, ROUNDING)));
    let eps = scalar(calls, |c| c.base == "add" && c.first == Part::Scratch && c.second.is_none());
    set(&mut values, "eps", Some(eps.unwrap_or(0.0)));
    set(&mut values, "centered", Some(f64::from(u8::from(calls.iter().any(|c| c.base == "lerp")))));
    let buffer =
        |c: &Call| c.base == "mul" && c.in_place && c.first == Part::State("momentum_buffer");
    let momentum = scalar(calls, buffer);
    if momentum.is_none() && calls.iter().any(|c| c.first == Part::State("momentum_buffer")) {
        return None;
    }
    set(&mut values, "momentum", Some(momentum.map_or(0.0, |v| neat(v, ROUNDING))));
    set(&mut values, "weight_decay", Some(decay(calls)));
    Some(values)
}

fn adagrad(calls: &[Call]) -> Values {
    let mut values = Values::new();
    // The rate scales either the gradient first, or the quotient.
    let scaled =
        scalar(calls, |c| c.base == "mul" && matches!(c.first, Part::Gradient | Part::Scratch));
    let rate = scaled.or_else(|| scalar(calls, |c| c.base == "addcdiv" && c.updates_parameter()));
    set(&mut values, "lr", rate.map(|v| neat(-v, ROUNDING)));
    set(&mut values, "lr_decay", Some(0.0));
    let eps = scalar(calls, |c| c.base == "add" && c.first == Part::Scratch && c.second.is_none());
    set(&mut values, "eps", Some(eps.unwrap_or(0.0)));
    set(&mut values, "weight_decay", Some(decay(calls)));
    values
}

/// The values of a fused operator, which are its arguments.
fn fused_values(operator: &Operator) -> Values {
    let mut values = Values::new();
    let Some(rule) = Rule::of_fused(base(&operator.kind)) else { return values };
    // Parameters and gradients come before the rule's lists.
    let scalars = operator.args.iter().skip(2 + rule.fused_lists.len());
    for (name, arg) in rule.fused_values.iter().zip(scalars) {
        let value = match arg {
            Arg::Float(v) => Some(neat(*v, ROUNDING)),
            Arg::Int(v) => Some(*v as f64),
            Arg::Bool(v) => Some(f64::from(u8::from(*v))),
            _ => None,
        };
        set(&mut values, name, value);
    }
    values
}

/// The number with the fewest decimal digits within `slack` of `value`.
fn neat(value: f64, slack: f64) -> f64 {
    (0..17)
        .map(|digits| format!("{value:.digits$e}").parse::<f64>().unwrap_or(value))
        .find(|v| (v - value).abs() <= slack * 1.01)
        .unwrap_or(value)
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_neatest_number_wins() {
        assert_eq!(super::neat(9.994e-5, 1e-7), 1e-4);
        assert_eq!(super::neat(0.0029999, 5e-7), 3e-3);
        assert_eq!(super::neat(0.000_000_4, 5e-7), 4e-7);
        assert_eq!(super::neat(0.0, 5e-7), 0.0);
    }
}
