//! The planners by name, each with its switches.
//!
//! For: one place where a name becomes a way to decide. Not for: how any of them decides.

use std::collections::BTreeMap;
use std::str::FromStr;

use super::emit::{self, Emitted};
use super::{capuchin, checkpoint, neap, tensile, vdnn};
use crate::contract::Latency;
use crate::device::Link;
use crate::job::Graph;
use crate::units::Bytes;

/// What every planner is given: a job, what it runs on, and the load that no slot may exceed.
#[derive(Clone, Copy, Debug)]
pub struct Given<'a> {
    /// The job.
    pub graph: &'a Graph,
    /// One for each operator.
    pub latencies: &'a [Latency],
    /// The link.
    pub link: &'a Link,
    /// Host memory for copies.
    pub pinned: Bytes,
    /// The load in bytes that is aimed at.
    pub target: u64,
}

/// What a planner decided, written down.
#[derive(Clone, Debug)]
pub struct Decision {
    /// The events.
    pub emitted: Emitted,
    /// Slot and load at the end.
    pub peak: (usize, u64),
    /// The load is within the target.
    pub reached: bool,
}

impl From<tensile::Decided<'_>> for Decision {
    fn from(decided: tensile::Decided<'_>) -> Self {
        Self {
            emitted: emit::events(&decided.ledger),
            peak: decided.peak,
            reached: decided.reached,
        }
    }
}

/// Up to so many operators planning takes next to no time.
pub(super) const SMALL: usize = 400;

/// A planner and its switches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Method {
    /// TENSILE.
    Tensile(tensile::Options),
    /// vDNN with one of its static policies.
    Vdnn(vdnn::Policy),
    /// Capuchin.
    Capuchin,
    /// Segments that are run again.
    Checkpoint,
    /// neap's own.
    Neap(neap::Options),
}

impl Default for Method {
    fn default() -> Self {
        Self::Neap(neap::Options::default())
    }
}

impl Method {
    /// Every planner with its default switches, in the order in which tables show them.
    #[must_use]
    pub fn all() -> Vec<Self> {
        vec![
            Self::Vdnn(vdnn::Policy::All),
            Self::Vdnn(vdnn::Policy::Conv),
            Self::Checkpoint,
            Self::Capuchin,
            Self::Tensile(tensile::Options::default()),
            Self::Neap(neap::Options::default()),
        ]
    }

    /// The planner of a name, with its default switches.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::all().into_iter().find(|m| m.name() == name)
    }

    /// The planner of a plan's record with its switches as recorded; switches of other things are passed over.
    ///
    /// # Errors
    /// When there is no such planner, or a switch has no such value.
    pub fn recorded(name: &str, options: &BTreeMap<String, String>) -> Result<Self, String> {
        fn set<T: FromStr>(
            options: &BTreeMap<String, String>,
            key: &str,
            to: &mut T,
        ) -> Result<(), String> {
            let Some(value) = options.get(key) else { return Ok(()) };
            *to = value.parse().map_err(|_| format!("the plan records `{key}` as `{value}`"))?;
            Ok(())
        }
        let mut method = Self::named(name)
            .ok_or_else(|| format!("the plan was made by `{name}`, which is no planner"))?;
        match &mut method {
            Self::Neap(o) => {
                let mut chains = true;
                for (key, to) in [
                    ("swap", &mut o.swap),
                    ("across", &mut o.across),
                    ("head", &mut o.head),
                    ("recompute", &mut o.recompute),
                    ("chains", &mut chains),
                    ("share", &mut o.share),
                    ("extend", &mut o.extend),
                    ("passive", &mut o.passive),
                    ("drop", &mut o.drop),
                    ("prefetch", &mut o.fit),
                    ("joint", &mut o.joint),
                    ("link-share", &mut o.link_share),
                ] {
                    set(options, key, to)?;
                }
                if !chains {
                    o.depth = 0;
                }
                set(options, "min-swap", &mut o.min_swap)?;
                set(options, "effort", &mut o.effort)?;
            }
            Self::Tensile(o) => {
                for (key, to) in [
                    ("swap", &mut o.swap),
                    ("across", &mut o.across),
                    ("recompute", &mut o.recompute),
                    ("passive", &mut o.passive),
                    ("prefetch", &mut o.prefetch),
                    ("stop-rule", &mut o.stop_rule),
                ] {
                    set(options, key, to)?;
                }
                set(options, "max-swap-rate", &mut o.max_swap_rate)?;
                set(options, "min-swap", &mut o.min_swap)?;
            }
            Self::Vdnn(_) | Self::Capuchin | Self::Checkpoint => {}
        }
        Ok(method)
    }

    /// As `--planner` and the plan's record say it.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Tensile(_) => "tensile",
            Self::Vdnn(vdnn::Policy::All) => "vdnn-all",
            Self::Vdnn(vdnn::Policy::Conv) => "vdnn-conv",
            Self::Capuchin => "capuchin",
            Self::Checkpoint => "checkpoint",
            Self::Neap(_) => "neap",
        }
    }

    /// Decides for every gap of every tensor. `warm` is what was learnt on the way, for nearly the same target.
    #[must_use]
    pub fn decide(&self, given: &Given<'_>, warm: &mut Option<neap::Warm>) -> Decision {
        match self {
            Self::Tensile(options) => tensile::decide(
                given.graph,
                given.latencies,
                given.link,
                given.pinned,
                given.target,
                options,
            )
            .into(),
            Self::Vdnn(policy) => vdnn::decide(given, *policy).into(),
            Self::Capuchin => capuchin::decide(given).into(),
            Self::Checkpoint => checkpoint::decide(given).into(),
            Self::Neap(options) => neap::decide(given, options, warm),
        }
    }

    /// The same planner without improvement, to see whether a budget can be met at all.
    #[must_use]
    pub fn quick(&self) -> Self {
        match self {
            Self::Neap(options) => Self::Neap(neap::Options { effort: 0, ..options.clone() }),
            other => other.clone(),
        }
    }

    /// The same planner for one of many plans: without improvement, and nobody stands in.
    #[must_use]
    pub fn sketch(&self) -> Self {
        match self {
            Self::Neap(options) => {
                Self::Neap(neap::Options { effort: 0, portfolio: false, ..options.clone() })
            }
            other => other.clone(),
        }
    }

    /// Those whose plans stand in where this planner's is slow or missing: the quick ones that keep to its switches, and on graphs of
    /// few operators the planner itself without heads, as there a few huge tensors decide and every placement is different luck.
    #[must_use]
    pub fn portfolio(&self, operators: usize) -> Vec<Self> {
        match self {
            Self::Neap(options) if options.portfolio => {
                let neap::Options { swap, across, recompute, passive, fit, min_swap, .. } =
                    *options;
                let mut all = Vec::new();
                // These know no switches; neither goes round the end.
                if swap {
                    all.push(Self::Vdnn(vdnn::Policy::All));
                }
                if swap && recompute && passive {
                    all.push(Self::Capuchin);
                }
                let tensile = tensile::Options {
                    swap,
                    across,
                    recompute,
                    passive,
                    prefetch: fit,
                    min_swap,
                    ..tensile::Options::default()
                };
                all.push(Self::Tensile(tensile));
                if operators <= SMALL && options.head {
                    all.push(Self::Neap(neap::Options {
                        head: false,
                        portfolio: false,
                        ..options.clone()
                    }));
                }
                all
            }
            _ => Vec::new(),
        }
    }

    /// The same planner that swaps at most this share of the tensors, in thousandths; `None` where it has no such limit.
    #[must_use]
    pub fn limited(self, share: u32) -> Option<Self> {
        match self {
            Self::Tensile(options) => {
                Some(Self::Tensile(tensile::Options { max_swap_rate: share / 10, ..options }))
            }
            // Nobody in the portfolio would keep to it.
            Self::Neap(options) => {
                Some(Self::Neap(neap::Options { swap_share: share, portfolio: false, ..options }))
            }
            Self::Vdnn(_) | Self::Capuchin | Self::Checkpoint => None,
        }
    }

    /// The same planner made easier to place, for targets that could not be placed: nothing lingers or comes back early.
    #[must_use]
    pub fn narrow(&self) -> Option<Self> {
        match self {
            Self::Tensile(options) => {
                Some(Self::Tensile(tensile::Options { prefetch: false, ..options.clone() }))
            }
            Self::Vdnn(_) | Self::Capuchin | Self::Checkpoint => None,
            Self::Neap(options) => {
                options.fit.then(|| Self::Neap(neap::Options { fit: false, ..options.clone() }))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_gives_the_method_back() {
        let record = |pairs: &[(&str, &str)]| {
            pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
        };
        for method in Method::all() {
            assert_eq!(
                Method::recorded(method.name(), &record(&[("allocator", "pytorch")])),
                Ok(method)
            );
        }
        let neap = Method::recorded(
            "neap",
            &record(&[
                ("chains", "false"),
                ("min-swap", "512"),
                ("prefetch", "false"),
                ("joint", "false"),
            ]),
        );
        let neap = neap.unwrap();
        let want = neap::Options {
            depth: 0,
            min_swap: Bytes(512),
            fit: false,
            joint: false,
            ..neap::Options::default()
        };
        assert_eq!(neap, Method::Neap(want));
        let tensile =
            Method::recorded("tensile", &record(&[("max-swap-rate", "7"), ("stop-rule", "false")]))
                .unwrap();
        assert_eq!(
            tensile,
            Method::Tensile(tensile::Options {
                max_swap_rate: 7,
                stop_rule: false,
                ..tensile::Options::default()
            })
        );
        assert!(Method::recorded("none", &record(&[])).is_err());
        assert!(
            Method::recorded("neap", &record(&[("effort", "much")])).unwrap_err().contains("much")
        );
    }
}
