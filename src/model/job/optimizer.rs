//! Optimizers and their parameter groups, and one row for each optimizer that neap steps itself.
//!
//! [`RULES`] is what the importer and the runner share: the class, the update operator, its states
//! and its hyperparameters. An optimizer that has no row keeps the operators that were recorded.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The parameter groups of all optimizers of a job. An update operator names its group by position.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Optimizer {
    /// At least one.
    pub groups: Vec<Group>,
}

/// Parameters that are stepped with the same hyperparameters.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Group {
    /// The framework's class: one of [`RULES`], or another.
    pub class: String,
    /// Hyperparameters by the framework's names; betas are `beta1` and `beta2`, flags are 0 or 1.
    pub values: BTreeMap<String, f64>,
    /// Hyperparameters that change from step to step: the value of each step from the first. The
    /// last one stays. What is not here has its value of `values` in all steps.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub schedules: BTreeMap<String, Vec<f64>>,
    /// Values were recovered from rounded scalars rather than recorded.
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

    /// Whether a flag is set or a number is other than 0.
    #[must_use]
    pub fn on(&self, name: &str) -> bool {
        self.values.get(name).is_some_and(|v| *v != 0.0)
    }
}

impl Optimizer {
    /// One group of all parameters.
    #[must_use]
    pub fn of(group: Group) -> Self {
        Self { groups: vec![group] }
    }

    /// The group that an update operator names; the first when it names none.
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

/// An optimizer that neap steps itself, one update operator for each parameter.
#[derive(Debug)]
pub struct Rule {
    /// The framework's class.
    pub class: &'static str,
    /// The update operator. Its arguments are the parameter, its gradient and the states.
    pub kind: &'static str,
    /// States by the framework's names, in the order of the update's arguments, each with the
    /// hyperparameter that turns it on; `""`: it is always there.
    pub states: &'static [(&'static str, &'static str)],
    /// Hyperparameters without which there is no step.
    pub needs: &'static [&'static str],
    /// What the framework adds under a root where nothing else is known.
    pub eps: f64,
    /// The framework's fused operator, without `_fused_` and the last `_`; `""`: it has none.
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
    fused: "adam",
    fused_lists: &["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"],
    fused_values: &["lr", "beta1", "beta2", "weight_decay", "eps", "amsgrad", "maximize"],
};

/// One row for each optimizer that neap steps itself.
pub const RULES: [Rule; 5] = [
    ADAM,
    Rule { class: "AdamW", kind: "neap::adamw", fused: "adamw", ..ADAM },
    Rule {
        class: "SGD",
        kind: "neap::sgd",
        states: &[("momentum_buffer", "momentum")],
        needs: &["lr"],
        eps: 0.0,
        fused: "sgd",
        fused_lists: &["momentum_buffer"],
        fused_values: &["weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize"],
    },
    Rule {
        class: "RMSprop",
        kind: "neap::rmsprop",
        states: &[("square_avg", ""), ("momentum_buffer", "momentum"), ("grad_avg", "centered")],
        needs: &["lr", "alpha", "eps"],
        eps: 1e-8,
        fused: "",
        fused_lists: &[],
        fused_values: &[],
    },
    Rule {
        class: "Adagrad",
        kind: "neap::adagrad",
        states: &[("sum", "")],
        needs: &["lr", "eps"],
        eps: 1e-10,
        fused: "adagrad",
        fused_lists: &["sum", "step"],
        fused_values: &["lr", "lr_decay", "weight_decay", "eps", "maximize"],
    },
];

impl Rule {
    /// The row of a framework's class.
    #[must_use]
    pub fn of_class(class: &str) -> Option<&'static Self> {
        RULES.iter().find(|r| r.class == class)
    }

    /// The row of an update operator.
    #[must_use]
    pub fn of_kind(kind: &str) -> Option<&'static Self> {
        RULES.iter().find(|r| r.kind == kind)
    }

    /// The row of a fused operator of the framework, by its short name.
    #[must_use]
    pub fn of_fused(base: &str) -> Option<&'static Self> {
        RULES.iter().find(|r| !base.is_empty() && r.fused == base)
    }

    /// The states that a group's updates have, in the order of their arguments.
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
}
