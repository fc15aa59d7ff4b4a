//! Optimizers, their parameter groups, and the optimizers that neap steps itself.
//!
//! [`RULES`] has a row for each optimizer that neap steps itself: class, update operator, states
//! and hyperparameters. Importer and runner share it. Other optimizers keep the recorded operators.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::graph::Operator;

/// The kind of the step of a class without a row in [`RULES`] begins with this; the class follows.
const OTHER: &str = "optimizer::";

/// Whether an operator is an optimizer's update: one of [`RULES`], or the recorded step of another
/// class. It draws no random numbers and generates no tensor. It may run as soon as what it reads
/// is final.
#[must_use]
pub fn is_update(operator: &Operator) -> bool {
    (operator.kind.starts_with(OTHER) || Rule::of_kind(&operator.kind).is_some())
        && !operator.random
        && operator.generates().next().is_none()
}

/// The parameter groups of all optimizers of a job. An update operator gives its group's position.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Optimizer {
    /// The groups; at least one.
    pub groups: Vec<Group>,
}

/// Parameters that share their hyperparameters.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Group {
    /// The framework's class: one of [`RULES`], or another class.
    pub class: String,
    /// Hyperparameters by the framework's names; betas are `beta1` and `beta2`, flags are 0 or 1.
    pub values: BTreeMap<String, f64>,
    /// The values of hyperparameters that change, for each step from the first. The last value
    /// stays. A hyperparameter without a schedule has its value in `values` in all steps.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub schedules: BTreeMap<String, Vec<f64>>,
    /// Whether values were recovered from rounded scalars.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub recovered: bool,
}

impl Group {
    /// The hyperparameter `name` in the step after `done` steps.
    #[must_use]
    pub fn value(&self, name: &str, done: u64) -> Option<f64> {
        let at = usize::try_from(done).unwrap_or(usize::MAX);
        let schedule = self.schedules.get(name).filter(|s| !s.is_empty());
        schedule.and_then(|s| s.get(at).or(s.last())).or_else(|| self.values.get(name)).copied()
    }

    /// Whether the hyperparameter is present and not 0.
    #[must_use]
    pub fn on(&self, name: &str) -> bool {
        self.values.get(name).is_some_and(|v| *v != 0.0)
    }
}

impl Optimizer {
    /// An optimizer with one group of all parameters.
    #[must_use]
    pub fn new(group: Group) -> Self {
        Self { groups: vec![group] }
    }

    /// The group that an update operator steps; the first when it gives none.
    #[must_use]
    pub fn group(&self, named: Option<u32>) -> Option<&Group> {
        self.groups.get(named.unwrap_or(0) as usize)
    }

    /// Whether any group's values were recovered from rounded scalars.
    #[must_use]
    pub fn recovered(&self) -> bool {
        self.groups.iter().any(|g| g.recovered)
    }
}

/// An optimizer that neap steps itself, with one update operator for each parameter.
#[derive(Debug)]
pub struct Rule {
    /// The framework's class name.
    pub class: &'static str,
    /// The update operator. Its arguments are the parameter, its gradient and the states.
    pub kind: &'static str,
    /// States by the framework's names, in the order of the update's arguments, each with the
    /// hyperparameter that turns it on; `""` if the state is always there.
    pub states: &'static [(&'static str, &'static str)],
    /// Hyperparameters that a step cannot do without.
    pub needs: &'static [&'static str],
    /// The framework's default for `eps`.
    pub eps: f64,
    /// Floating-point operations for each element of the parameter.
    pub flops: u32,
    /// The short name of the fused operator: `adam` for `_fused_adam_`; `""` if there is none.
    pub fused: &'static str,
    /// The fused operator's lists after parameters and gradients.
    pub fused_lists: &'static [&'static str],
    /// The fused operator's arguments after its lists.
    pub fused_values: &'static [&'static str],
}

const ADAM: Rule = Rule {
    class: "Adam",
    kind: "neap::adam",
    states: &[("exp_avg", ""), ("exp_avg_sq", ""), ("max_exp_avg_sq", "amsgrad")],
    needs: &["lr", "beta1", "beta2", "eps"],
    eps: 1e-8,
    flops: 14,
    fused: "adam",
    fused_lists: &["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"],
    fused_values: &["lr", "beta1", "beta2", "weight_decay", "eps", "amsgrad", "maximize"],
};

const MOMENTS: [(&str, &str); 2] = [("exp_avg", ""), ("exp_avg_sq", "")];

/// What rows of optimizers without a fused operator start from; their own fields are Adam's.
const UNFUSED: Rule = Rule { fused: "", fused_lists: &[], fused_values: &[], ..ADAM };

/// One row for each optimizer that neap steps itself.
pub const RULES: &[Rule] = &[
    ADAM,
    Rule { class: "AdamW", kind: "neap::adamw", fused: "adamw", ..ADAM },
    Rule {
        class: "SGD",
        kind: "neap::sgd",
        states: &[("momentum_buffer", "momentum")],
        needs: &["lr"],
        eps: 0.0,
        flops: 4,
        fused: "sgd",
        fused_lists: &["momentum_buffer"],
        fused_values: &["weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize"],
    },
    Rule {
        class: "RMSprop",
        kind: "neap::rmsprop",
        states: &[("square_avg", ""), ("momentum_buffer", "momentum"), ("grad_avg", "centered")],
        needs: &["lr", "alpha", "eps"],
        flops: 8,
        ..UNFUSED
    },
    Rule {
        class: "Adagrad",
        kind: "neap::adagrad",
        states: &[("sum", "")],
        needs: &["lr", "eps"],
        eps: 1e-10,
        flops: 8,
        fused: "adagrad",
        fused_lists: &["sum", "step"],
        fused_values: &["lr", "lr_decay", "weight_decay", "eps", "maximize"],
    },
    Rule { class: "NAdam", kind: "neap::nadam", states: &MOMENTS, flops: 16, ..UNFUSED },
    Rule { class: "RAdam", kind: "neap::radam", states: &MOMENTS, ..UNFUSED },
    Rule {
        class: "Adamax",
        kind: "neap::adamax",
        states: &[("exp_avg", ""), ("exp_inf", "")],
        flops: 10,
        ..UNFUSED
    },
    Rule {
        class: "Adadelta",
        kind: "neap::adadelta",
        states: &[("square_avg", ""), ("acc_delta", "")],
        needs: &["lr", "rho", "eps"],
        eps: 1e-6,
        flops: 16,
        ..UNFUSED
    },
    Rule {
        class: "ASGD",
        kind: "neap::asgd",
        states: &[("ax", "")],
        needs: &["lr", "lambd", "alpha", "t0"],
        eps: 0.0,
        flops: 6,
        ..UNFUSED
    },
    Rule {
        class: "Rprop",
        kind: "neap::rprop",
        states: &[("prev", ""), ("step_size", "")],
        needs: &["lr", "eta1", "eta2", "step_size1", "step_size2"],
        eps: 0.0,
        flops: 10,
        ..UNFUSED
    },
];

impl Rule {
    /// The rule of a framework's class.
    #[must_use]
    pub fn of_class(class: &str) -> Option<&'static Self> {
        RULES.iter().find(|r| r.class == class)
    }

    /// The rule of an update operator.
    #[must_use]
    pub fn of_kind(kind: &str) -> Option<&'static Self> {
        RULES.iter().find(|r| r.kind == kind)
    }

    /// The rule of a fused operator of the framework, by its short name.
    #[must_use]
    pub fn of_fused(base: &str) -> Option<&'static Self> {
        RULES.iter().find(|r| !base.is_empty() && r.fused == base)
    }

    /// The states of a group's updates, in the order of the update's arguments.
    pub fn states_of(&self, group: &Group) -> impl Iterator<Item = &'static str> {
        let is_on = |flag: &str| flag.is_empty() || group.on(flag);
        self.states.iter().filter(move |(_, flag)| is_on(flag)).map(|(key, _)| *key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_schedule_gives_each_step_its_rate_and_keeps_the_last() {
        let mut group = Group { values: [("lr".into(), 0.5)].into(), ..Group::default() };
        assert_eq!(group.value("lr", 7), Some(0.5));
        group.schedules.insert("lr".into(), vec![0.1, 0.2]);
        let rates: Vec<_> = (0..4).map(|done| group.value("lr", done).unwrap()).collect();
        assert_eq!(rates, [0.1, 0.2, 0.2, 0.2]);
        assert_eq!(group.value("eps", 0), None);
    }

    #[test]
    fn states_follow_the_flags() {
        let mut group = Group::default();
        let rule = Rule::of_class("RMSprop").unwrap();
        assert_eq!(rule.states_of(&group).collect::<Vec<_>>(), ["square_avg"]);
        group.values.insert("centered".into(), 1.0);
        assert_eq!(rule.states_of(&group).collect::<Vec<_>>(), ["square_avg", "grad_avg"]);
    }

    /// `neap.torch` has the same list in Python: a class, its update, and its states with their
    /// flags.
    #[test]
    fn python_knows_every_rule() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../python/neap/torch/_lower.py");
        let text: String = std::fs::read_to_string(file).unwrap().split_whitespace().collect();
        for rule in RULES {
            let state = |(key, on): &(&str, &str)| match *on {
                "" => format!("(\"{key}\",None)"),
                on => format!("(\"{key}\",\"{on}\")"),
            };
            let states: Vec<String> = rule.states.iter().map(state).collect();
            let row =
                format!("torch.optim.{}:(\"{}\",[{}]", rule.class, rule.kind, states.join(","));
            assert!(text.contains(&row), "{file} lacks {row}");
        }
    }
}
