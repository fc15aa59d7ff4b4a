//! What every planner is given, and what it decides.

use super::emit::{self, Emitted};
use super::residency::Residencies;
use crate::contract::Latency;
use crate::device::Link;
use crate::job::Graph;
use crate::units::Bytes;

/// A job, what it runs on, and the load that no slot may exceed.
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
    /// The load to aim at, in bytes.
    pub target: u64,
}

/// What a planner decided, written down as events.
#[derive(Clone, Debug)]
pub struct Decision {
    /// The events.
    pub emitted: Emitted,
    /// The slot with the highest load, and that load in bytes.
    pub peak: (usize, u64),
    /// The load is within the target.
    pub reached: bool,
}

impl Decision {
    /// What `residencies` come to.
    #[must_use]
    pub fn of(residencies: &Residencies<'_>, target: u64) -> Self {
        let peak = residencies.load.peak();
        Self { emitted: emit::events(residencies), peak, reached: peak.1 <= target }
    }
}

/// A way to decide for every gap of every tensor whether it stays, is swapped or is recomputed.
///
/// A planner is the value of its options, which `serde` reads and writes: each field is a switch by
/// the field's name in kebab-case. To add a planner, implement this trait and add a variant to
/// [`super::method::Method`].
pub trait Planner: Clone {
    /// What it learns while it decides, and uses the next time for nearly the same target.
    type Memory;

    /// Decides until no slot's load exceeds the target, or nothing is left to do.
    fn decide(&self, given: &Given<'_>, memory: &mut Self::Memory) -> Decision;

    /// The same planner with little effort, to see whether a budget can be met at all.
    #[must_use]
    fn quick(&self) -> Self {
        self.clone()
    }

    /// The same planner with plans that are easier to place, for targets that could not be placed:
    /// no copy runs earlier or later than it must.
    #[must_use]
    fn narrow(&self) -> Option<Self> {
        None
    }

    /// The same planner that swaps at most this share of the tensors, in thousandths; `None` where
    /// it has no such limit.
    #[must_use]
    fn limited(&self, _share: u32) -> Option<Self> {
        None
    }
}
