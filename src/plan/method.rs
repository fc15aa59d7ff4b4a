//! The planners by name, and their switches. Only this module turns a name into a planner.

use std::collections::BTreeMap;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::planner::{Decision, Given, Memory, Planner};
use super::share::{Of, Share};
use super::{capuchin, dtr, neap, tensile, vdnn};
use crate::contract::Plan;
use crate::units::Bytes;

/// A graph of at most this many operators is planned almost at once.
pub(super) const SMALL: usize = 400;

/// Makes [`Method`] of a row for each planner: its variant, its options, its name, and its line in
/// the help of `--planner`.
macro_rules! planners {
    ($($variant:ident($module:ident::$options:ident) = $name:literal: $about:literal;)*) => {
        /// A planner and its switches.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub enum Method {
            $(#[doc = $about] $variant(super::$module::$options),)*
        }

        $(impl From<super::$module::$options> for Method {
            fn from(options: super::$module::$options) -> Self {
                Self::$variant(options)
            }
        })*

        impl Method {
            /// Every planner with its default switches, in the order in which tables show them.
            #[must_use]
            pub fn all() -> Vec<Self> {
                vec![$(Self::$variant(super::$module::$options::default())),*]
            }

            /// Its name for `--planner` and in a plan's record.
            #[must_use]
            pub const fn name(&self) -> &'static str {
                match self { $(Self::$variant(_) => $name),* }
            }

            /// What it does, in one sentence.
            #[must_use]
            pub const fn about(&self) -> &'static str {
                match self { $(Self::$variant(_) => $about),* }
            }

            fn planner(&self) -> &dyn AnyPlanner {
                match self { $(Self::$variant(options) => options),* }
            }
        }
    };
}

planners! {
    VdnnAll(vdnn::All) = "vdnn-all":
        "vDNN: every layer's feature maps are swapped out during the forward, whatever the budget";
    VdnnConv(vdnn::Conv) = "vdnn-conv":
        "vDNN: only the feature maps of convolutions are swapped out";
    Checkpoint(checkpoint::Checkpoint) = "checkpoint":
        "Gradient checkpointing: segments of the forward run again before their backward";
    Capuchin(capuchin::Capuchin) = "capuchin":
        "Capuchin: swaps by free time, recomputation by memory saved per second";
    Tensile(tensile::Options) = "tensile":
        "TENSILE's algorithms 1 to 3, with passive swapping as the last resort";
    OffloadOptimizer(offload::Optimizer) = "offload-optimizer":
        "ZeRO-Offload's residence of states: every optimizer state is on the host and comes for its \
         update, whatever the budget";
    Dtr(dtr::Dtr) = "dtr":
        "Dynamic tensor rematerialization: evicts by cost, neighbourhood, bytes and staleness";
    Neap(neap::Options) = "neap":
        "Decides for each tensor whether to swap, recompute or keep it, and improves the plan step \
         by step";
}

/// A [`Planner`] whose type is hidden, so that [`Method`] asks all planners alike.
trait AnyPlanner {
    fn values(&self) -> Map<String, Value>;
    fn with(&self, name: &'static str, switches: &[(&str, &str)]) -> Result<Method, SwitchError>;
    fn decide(&self, given: &Given<'_>, memory: &mut Memory) -> Decision;
    fn quick(&self) -> Method;
    fn narrow(&self) -> Option<Method>;
    fn limited(&self, share: u32) -> Option<Method>;
}

impl<P: Planner + Serialize + DeserializeOwned> AnyPlanner for P
where
    Method: From<P>,
{
    fn values(&self) -> Map<String, Value> {
        values(self)
    }

    fn with(&self, name: &'static str, switches: &[(&str, &str)]) -> Result<Method, SwitchError> {
        set(self, name, switches).map(Method::from)
    }

    fn decide(&self, given: &Given<'_>, memory: &mut Memory) -> Decision {
        self.decide_again(given, memory)
    }

    fn quick(&self) -> Method {
        Planner::quick(self).into()
    }

    fn narrow(&self) -> Option<Method> {
        Planner::narrow(self).map(Method::from)
    }

    fn limited(&self, share: u32) -> Option<Method> {
        Planner::limited(self, share).map(Method::from)
    }
}

impl Default for Method {
    fn default() -> Self {
        Self::Neap(neap::Options::default())
    }
}

impl Method {
    /// The planner with this name and its default switches.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::all().into_iter().find(|m| m.name() == name)
    }

    /// The same planner with some switches set, by name and value as text.
    ///
    /// # Errors
    /// The first switch that this planner does not have, or whose value is not allowed.
    pub fn with<'s>(
        &self,
        switches: impl IntoIterator<Item = (&'s str, &'s str)>,
    ) -> Result<Self, SwitchError> {
        let switches: Vec<_> = switches.into_iter().collect();
        self.planner().with(self.name(), &switches)
    }

    /// The switches that differ from their defaults, for the plan's record.
    #[must_use]
    pub fn switches(&self) -> BTreeMap<String, String> {
        let default = Self::named(self.name()).map(|m| m.values()).unwrap_or_default();
        let changed =
            self.values().into_iter().filter(|(key, value)| default.get(key) != Some(value));
        changed.map(|(key, value)| (key, text(&value))).collect()
    }

    fn values(&self) -> Map<String, Value> {
        self.planner().values()
    }

    /// The planner of a job of a plan, with its switches and its limit on swapping as recorded.
    ///
    /// # Errors
    /// When there is no such planner, or a switch's value is not allowed.
    pub fn recorded(plan: &Plan, job: usize) -> Result<Self, String> {
        let method = Self::named(&plan.planner).ok_or_else(|| {
            format!("the plan was made by `{}`, which is no planner", plan.planner)
        })?;
        let known = method.values();
        // Other records (the allocator, noise) are no switches. Nor is `portfolio`, the name of the
        // planner whose plan was used in place of this planner's.
        let switch = |(key, value): &(&str, &str)| {
            known.contains_key(*key) && (*key != "portfolio" || Self::named(value).is_none())
        };
        // The former name of a switch.
        let named = |key| if key == "joint" { "together" } else { key };
        let switches = plan.options.iter().map(|(key, value)| (named(&**key), &**value));
        let switches = switches.filter(switch);
        let method = method.with(switches).map_err(|e| match e {
            SwitchError::Unknown { .. } => e.to_string(),
            SwitchError::Value { switch, value, .. } => {
                format!("the plan records `{switch}` as `{value}`")
            }
        })?;
        let share = Share::recorded(plan, Of::Tensors, job)?;
        if share == Share::ALL {
            return Ok(method);
        }
        method.limited(share).ok_or_else(|| {
            format!("the plan records a limit on swapping, which `{}` has not", plan.planner)
        })
    }

    /// Decides for every gap of every tensor.
    #[must_use]
    pub fn decide(&self, given: &Given<'_>, memory: &mut Memory) -> Decision {
        self.planner().decide(given, memory)
    }

    /// See [`Planner::quick`].
    #[must_use]
    pub fn quick(&self) -> Self {
        self.planner().quick()
    }

    /// See [`Planner::narrow`].
    #[must_use]
    pub fn narrow(&self) -> Option<Self> {
        self.planner().narrow()
    }

    /// Variants of the planner, each with one heuristic switched off: other plans for the same
    /// target.
    #[must_use]
    pub fn variants(&self) -> Vec<Self> {
        let mut all = Vec::new();
        if let Self::Neap(o) = self {
            let less = [
                neap::Options { effort: o.effort / 4, ..o.clone() },
                neap::Options { effort: 0, ..o.clone() },
                neap::Options { min_swap: o.min_swap.max(Bytes(1 << 20)), ..o.clone() },
                neap::Options { min_swap: o.min_swap.max(Bytes(8 << 20)), ..o.clone() },
                neap::Options { drop: false, ..o.clone() },
                neap::Options { share: false, ..o.clone() },
                neap::Options { extend: false, ..o.clone() },
            ];
            all.extend(less.into_iter().filter(|l| l != o).map(Self::Neap));
        }
        all
    }

    /// Whether its plans may copy tensors to the host.
    #[must_use]
    pub const fn swaps(&self) -> bool {
        match self {
            Self::Neap(options) => options.swap,
            Self::Checkpoint(_) | Self::Dtr(_) => false,
            _ => true,
        }
    }

    /// See [`Planner::limited`].
    #[must_use]
    pub fn limited(&self, share: Share) -> Option<Self> {
        self.planner().limited(share.thousandths())
    }

    /// The same planner with little effort and without other planners' plans, for one plan of many.
    #[must_use]
    pub fn sketch(&self) -> Self {
        match self {
            Self::Neap(options) => {
                Self::Neap(neap::Options { portfolio: false, ..Planner::quick(options) })
            }
            other => other.quick(),
        }
    }

    /// The same planner, which plans each of several jobs as if it were alone.
    #[must_use]
    pub fn alone(&self) -> Self {
        match self {
            Self::Neap(options) => Self::Neap(neap::Options { together: false, ..options.clone() }),
            other => other.clone(),
        }
    }

    /// Planners whose plans are used where this planner finds none: those that respect its
    /// switches.
    #[must_use]
    pub fn portfolio(&self) -> Vec<Self> {
        let Self::Neap(options) = self else { return Vec::new() };
        if !options.portfolio {
            return Vec::new();
        }
        let mut all = Vec::new();
        // These two have no switches, and swap no tensor round the end of the iteration.
        if options.swap {
            all.push(Self::VdnnAll(vdnn::All::default()));
        }
        if options.swap && options.recompute && options.passive {
            all.push(Self::Capuchin(capuchin::Capuchin::default()));
        }
        all.push(Self::Tensile(tensile::Options::from(options)));
        if options.recompute && options.chains {
            all.push(Self::Dtr(dtr::Dtr::default()));
        }
        all
    }
}

/// Why a switch can't be set.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SwitchError {
    /// The planner has no such switch.
    #[error("planner {planner} has no switch `{switch}`; it has {}", if known.is_empty() { "none".to_owned() } else { known.join(", ") })]
    Unknown {
        /// The planner.
        planner: &'static str,
        /// The switch.
        switch: String,
        /// The switches that the planner has.
        known: Vec<String>,
    },
    /// The switch has no such value.
    #[error("planner {planner}: `{switch}` can't be `{value}`")]
    Value {
        /// The planner.
        planner: &'static str,
        /// The switch.
        switch: String,
        /// The value.
        value: String,
    },
}

fn values<P: Serialize>(planner: &P) -> Map<String, Value> {
    match serde_json::to_value(planner) {
        Ok(Value::Object(values)) => values,
        _ => Map::new(),
    }
}

fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn set<P: Serialize + DeserializeOwned>(
    planner: &P,
    name: &'static str,
    switches: &[(&str, &str)],
) -> Result<P, SwitchError> {
    let mut values = values(planner);
    let mut changed: P = read(&values).ok_or_else(|| unknown(name, "", &values))?;
    for &(switch, value) in switches {
        let Some(place) = values.get_mut(switch) else {
            return Err(unknown(name, switch, &values));
        };
        *place = serde_json::from_str(value).unwrap_or_else(|_| Value::from(value));
        changed = read(&values).ok_or_else(|| SwitchError::Value {
            planner: name,
            switch: switch.to_owned(),
            value: value.to_owned(),
        })?;
    }
    Ok(changed)
}

fn read<P: DeserializeOwned>(values: &Map<String, Value>) -> Option<P> {
    serde_json::from_value(Value::Object(values.clone())).ok()
}

fn unknown(planner: &'static str, switch: &str, values: &Map<String, Value>) -> SwitchError {
    SwitchError::Unknown {
        planner,
        switch: switch.to_owned(),
        known: values.keys().cloned().collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::Figures;
    use crate::device::builtin;
    use crate::units::Nanos;

    fn plan(planner: &str, options: &[(&str, &str)]) -> Plan {
        let figures = Figures {
            peak_bytes: Bytes::ZERO,
            arena_bytes: Bytes::ZERO,
            pinned_bytes: Bytes::ZERO,
            iteration_ns: Nanos::ZERO,
            first_iteration_ns: Nanos::ZERO,
            unplanned_peak_bytes: Bytes::ZERO,
            unplanned_iteration_ns: Nanos::ZERO,
        };
        Plan {
            planner: planner.to_owned(),
            options: options.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
            device: builtin::find("host").unwrap(),
            budget: Bytes::ZERO,
            jobs: Vec::new(),
            figures,
        }
    }

    #[test]
    fn a_record_gives_the_planner_back() {
        for method in Method::all() {
            let plan = plan(method.name(), &[("allocator", "pytorch"), ("portfolio", "capuchin")]);
            assert_eq!(Method::recorded(&plan, 0), Ok(method));
        }
        let options = neap::Options {
            chains: false,
            min_swap: Bytes(512),
            prefetch: false,
            together: false,
            portfolio: false,
            ..neap::Options::default()
        };
        let switches = [
            ("chains", "false"),
            ("min-swap", "512"),
            ("portfolio", "false"),
            ("prefetch", "false"),
            ("together", "false"),
        ];
        let method = Method::Neap(options);
        assert_eq!(Method::recorded(&plan("neap", &switches), 0), Ok(method.clone()));
        let recorded = method.switches();
        assert!(recorded.iter().map(|(k, v)| (&**k, &**v)).eq(switches));
        let alone = Method::recorded(&plan("neap", &[("together", "false")]), 0);
        assert_eq!(Method::recorded(&plan("neap", &[("joint", "false")]), 0), alone);
        let tensile = tensile::Options { max_swap_rate: 7, stop_rule: false, ..Default::default() };
        let recorded = plan("tensile", &[("max-swap-rate", "7"), ("stop-rule", "false")]);
        assert_eq!(Method::recorded(&recorded, 0), Ok(Method::Tensile(tensile)));
        assert!(Method::recorded(&plan("none", &[]), 0).is_err());
        let much = Method::recorded(&plan("neap", &[("effort", "much")]), 0);
        assert!(much.unwrap_err().contains("much"));
    }

    #[test]
    fn a_record_keeps_the_limit_on_swapping() {
        let recorded = plan("neap", &[("swap-share", "0.000")]);
        let Ok(Method::Neap(options)) = Method::recorded(&recorded, 0) else { panic!("neap") };
        assert_eq!((options.swap_share, options.portfolio), (0, false));
        assert_eq!(Share::recorded(&recorded, Of::Tensors, 0).map(Share::priority), Ok(1_000_000));
        assert!(Method::recorded(&plan("neap", &[("swap-share", "half")]), 0).is_err());
        assert!(Method::recorded(&plan("capuchin", &[("swap-share", "0.500")]), 0).is_err());
    }

    #[test]
    fn a_switch_binds_or_is_refused() {
        for method in Method::all() {
            match method.with([("swap", "false")]) {
                Ok(changed) => assert_ne!(changed, method),
                Err(error) => assert!(error.to_string().contains(method.name()), "{error}"),
            }
        }
        assert!(Method::named("capuchin").unwrap().with([("swap", "false")]).is_err());
    }
}
