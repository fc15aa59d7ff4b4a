//! The input of every planner, and its decision.

use std::sync::Arc;

use super::emit::{self, Emitted};
use super::neap::Warm;
use super::relax::Hint;
use super::residency::Residencies;
use crate::contract::Latency;
use crate::device::Link;
use crate::job::Graph;
use crate::units::Bytes;

/// A job, its device, and the load that no slot may exceed.
#[derive(Clone, Copy, Debug)]
pub struct Given<'a> {
    /// The job.
    pub graph: &'a Graph,
    /// The latency of each operator.
    pub latencies: &'a [Latency],
    /// The link.
    pub link: &'a Link,
    /// Bytes of host memory for copies.
    pub pinned: Bytes,
    /// The largest load that is allowed, in bytes.
    pub target: u64,
}

/// The decisions of a planner, as events.
#[derive(Clone, Debug)]
pub struct Decision {
    /// The events.
    pub emitted: Emitted,
    /// The slot with the highest load, and that load in bytes.
    pub peak: (usize, u64),
    /// By operator, the load in bytes while it runs.
    pub loads: Vec<u64>,
    /// Whether the load is within the target.
    pub reached: bool,
}

impl Decision {
    /// The decision that `residencies` describe.
    #[must_use]
    pub fn new(residencies: &Residencies<'_>, target: u64) -> Self {
        let peak = residencies.load.peak();
        let loads = residencies.load.all().into_iter().skip(1).step_by(2).collect();
        Self { emitted: emit::events(residencies), peak, loads, reached: peak.1 <= target }
    }
}

/// What neap's own planner knows before it decides.
#[derive(Clone, Debug, Default)]
pub enum Memory {
    /// Nothing.
    #[default]
    Nothing,
    /// What a linear program says of each tensor ([`crate::relax::Guide`]), and the number of the
    /// set of draws by it.
    Hints(Arc<[Hint]>, u64),
    /// What it learned while it decided for a similar target.
    Warm(Warm),
}

impl Memory {
    /// What was learned.
    #[must_use]
    pub const fn warm(&self) -> Option<&Warm> {
        if let Self::Warm(warm) = self { Some(warm) } else { None }
    }
}

/// Decides for every gap of every tensor whether the tensor stays, is swapped or is recomputed.
///
/// A planner is the value of its options, which `serde` reads and writes: each field is a switch by
/// the field's name in kebab-case. To add a planner, implement this trait and add a row to
/// `planners!` in [`super::method`].
pub trait Planner: Clone {
    /// Decides until no slot's load exceeds the target, or nothing more can be done.
    fn decide(&self, given: &Given<'_>) -> Decision;

    /// The same with what the planner knows before, which it replaces by what it learns from this
    /// target.
    fn decide_again(&self, given: &Given<'_>, _memory: &mut Memory) -> Decision {
        self.decide(given)
    }

    /// The same planner with little effort, to find out whether a budget can be met at all.
    #[must_use]
    fn quick(&self) -> Self {
        self.clone()
    }

    /// The same planner with plans that are easier to place, for targets whose plans could not be
    /// placed: no copy runs earlier or later than necessary.
    #[must_use]
    fn narrow(&self) -> Option<Self> {
        None
    }

    /// The same planner that swaps at most this share of the tensors, in thousandths, or less if it
    /// is limited to less; `None` where it has no such limit.
    #[must_use]
    fn limited(&self, _share: u32) -> Option<Self> {
        None
    }
}
