//! A plan: for each job its events with their triggers, and an address for every residency.
//!
//! `docs/plan-semantics.md` is the specification of what they mean. [`super::check`], the engine
//! (`sim`) and the executor (`run`) each implement it on their own.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::device::Profile;
pub use crate::device::latency::{Latency, Source};
pub use crate::device::library::Chosen;
use crate::job::{Arrangement, Graph};
use crate::units::{Bytes, Nanos, OpId, TensorId};

/// When an event becomes due.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Trigger {
    /// The operator after whose end; `None` for the start of the iteration.
    pub after: Option<OpId>,
    /// And how long after that. Zero for releases and recomputes.
    pub delay: Nanos,
}

/// Something a plan does besides running the operators.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// Copy to the host, then give the bytes back.
    SwapOut {
        /// The tensor.
        tensor: TensorId,
        /// When it happens.
        trigger: Trigger,
    },
    /// Take bytes and copy from the host.
    SwapIn {
        /// The tensor.
        tensor: TensorId,
        /// When it happens.
        trigger: Trigger,
    },
    /// Give the bytes back without a copy: the host copy is valid, or the tensor is recomputed, or
    /// not wanted again.
    Release {
        /// The tensor.
        tensor: TensorId,
        /// When it happens.
        trigger: Trigger,
    },
    /// Run an operator again.
    Recompute {
        /// The operator.
        operator: OpId,
        /// When it happens.
        trigger: Trigger,
        /// What of its generated tensors becomes resident; the rest is scratch.
        keep: Vec<TensorId>,
    },
}

impl Event {
    /// When it becomes due.
    #[must_use]
    pub const fn trigger(&self) -> Trigger {
        match self {
            Self::SwapOut { trigger, .. }
            | Self::SwapIn { trigger, .. }
            | Self::Release { trigger, .. }
            | Self::Recompute { trigger, .. } => *trigger,
        }
    }
}

/// What is placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Place {
    /// The `residency`-th residency of a tensor in the iteration, in program order, from 0. A
    /// tensor that starts the iteration on the device, leaves and comes back has its first and its
    /// last listed apart, at the same offset.
    Tensor {
        /// The tensor.
        tensor: TensorId,
        /// Which of its residencies, in program order.
        residency: u32,
    },
    /// The workspace of a step (its position among the steps in program order), scratch outputs of
    /// a recompute included.
    Workspace {
        /// Which step, from 0.
        step: u32,
    },
}

/// An address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Placement {
    /// Of what.
    pub place: Place,
    /// First byte in the arena; a multiple of 512.
    pub offset: Bytes,
}

/// What a plan promises without noise; [`super::check`] recomputes them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub struct Figures {
    /// Largest sum of resident bytes at any instant.
    pub peak_bytes: Bytes,
    /// Highest placed address.
    pub arena_bytes: Bytes,
    /// Bytes of the pinned slab.
    pub pinned_bytes: Bytes,
    /// Duration of a steady iteration.
    pub iteration_ns: Nanos,
    /// Loading what starts on the device, then a steady iteration.
    pub first_iteration_ns: Nanos,
    /// Liveness peak without a plan.
    pub unplanned_peak_bytes: Bytes,
    /// Duration of an iteration without a plan.
    pub unplanned_iteration_ns: Nanos,
}

/// Bytes of the arena that jobs have together and hold in turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// First byte in the arena.
    pub offset: Bytes,
    /// Its size.
    pub bytes: Bytes,
    /// Operators after whose end, in program order, the job has nothing in the window and another
    /// may hold it. Ascending.
    pub hands_over_after: Vec<OpId>,
}

/// The plan of one job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobPlan {
    /// Where its graph is, relative to the plan's file.
    pub graph: String,
    /// SHA-256 of the graph's canonical JSON, in hex.
    pub graph_sha256: String,
    /// What it changes in the graph's list of operators. Everything else here refers to the
    /// arranged graph ([`crate::job::arrange()`]).
    pub arrangement: Arrangement,
    /// For each operator of the graph's file that runs in pieces, what it takes as a whole.
    pub whole: BTreeMap<OpId, Latency>,
    /// One for each operator.
    pub latencies: Vec<Latency>,
    /// For operators whose latency is that of certain algorithms: a run uses these and no others.
    /// Workspaces in the plan's graph are at least theirs.
    pub libraries: BTreeMap<OpId, Chosen>,
    /// In program order.
    pub events: Vec<Event>,
    /// In the order in which shared bytes pass from hand to hand.
    pub placements: Vec<Placement>,
    /// For each tensor that is ever copied, its offset in the pinned slab (a multiple of 512).
    pub host_slots: BTreeMap<TensorId, Bytes>,
    /// What it shares with other jobs, if it does.
    pub window: Option<Window>,
}

impl JobPlan {
    /// What the operators of the graph's file take, in its order; `graph` is the plan's, arranged
    /// or not.
    #[must_use]
    pub fn framework_latencies(&self, graph: &Graph) -> Vec<Latency> {
        let Some(origin) = &graph.origin else { return self.latencies.clone() };
        let none = Latency { time: Nanos::ZERO, source: Source::Graph };
        let mut all = vec![none; origin.graph.operators.len()];
        for (&(id, piece), latency) in origin.operators.iter().zip(&self.latencies) {
            if piece.is_none() {
                all[id.index()] = *latency;
            }
        }
        for (id, latency) in &self.whole {
            all[id.index()] = *latency;
        }
        all
    }
}

/// A plan for all jobs of one device.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Which planner made it.
    pub planner: String,
    /// Its switches, as given.
    pub options: BTreeMap<String, String>,
    /// The device it was made for, whole.
    pub device: Profile,
    /// What `arena_bytes` may not exceed.
    pub budget: Bytes,
    /// One for each job.
    pub jobs: Vec<JobPlan>,
    /// Without noise.
    pub figures: Figures,
}
