//! The planners by name, each with its switches.
//!
//! For: one place where a name becomes a way to decide. Not for: how any of them decides.

use super::emit::{self, Emitted};
use super::{neap, tensile};
use crate::device::Link;
use crate::job::Graph;
use crate::schedule::Latency;
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
        Self { emitted: emit::events(&decided.ledger), peak: decided.peak, reached: decided.reached }
    }
}

/// A planner and its switches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Method {
    /// TENSILE.
    Tensile(tensile::Options),
    /// neap's own.
    Neap(neap::Options),
}

impl Default for Method {
    fn default() -> Self {
        Self::Neap(neap::Options::default())
    }
}

impl Method {
    /// As `--planner` and the plan's record say it.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Tensile(_) => "tensile",
            Self::Neap(_) => "neap",
        }
    }

    /// Decides for every gap of every tensor.
    #[must_use]
    pub fn decide(&self, given: &Given<'_>) -> Decision {
        match self {
            Self::Tensile(options) => tensile::decide(given.graph, given.latencies, given.link, given.pinned, given.target, options).into(),
            Self::Neap(options) => neap::decide(given, options),
        }
    }

    /// The same planner made easier to place, for targets that could not be placed: nothing lingers or comes back early.
    #[must_use]
    pub fn narrow(&self) -> Option<Self> {
        match self {
            Self::Tensile(options) => Some(Self::Tensile(tensile::Options { prefetch: false, ..options.clone() })),
            Self::Neap(options) => options.fit.then(|| Self::Neap(neap::Options { fit: false, ..options.clone() })),
        }
    }
}
