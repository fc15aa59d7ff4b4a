//! A plan: for each job its events with their triggers, and an address for every residency.
//!
//! `docs/plan-semantics.md` specifies their meaning. [`super::check`], the engine (`sim`) and the
//! executor (`run`) each implement it on their own.

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
    /// The operator at whose end it starts; `None` for the start of the iteration.
    pub after: Option<OpId>,
}

/// An action of the plan besides running the operators.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// Copy the tensor to the host, then free its device bytes.
    SwapOut {
        /// The tensor.
        tensor: TensorId,
        /// When it happens.
        trigger: Trigger,
    },
    /// Take device bytes and copy the tensor from the host.
    SwapIn {
        /// The tensor.
        tensor: TensorId,
        /// When it happens.
        trigger: Trigger,
    },
    /// Free the device bytes without a copy: the host copy is valid, the tensor will be recomputed,
    /// or it is not needed again.
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
        /// Which of the tensors that it generates become resident; the others are scratch.
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

/// Something with an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Place {
    /// A residency of a tensor. Residencies of the iteration are numbered in program order, from 0.
    /// A tensor that starts the iteration on the device, leaves and comes back has its first and
    /// its last listed separately, at the same offset.
    Tensor {
        /// The tensor.
        tensor: TensorId,
        /// The number of the residency.
        residency: u32,
    },
    /// The workspace of a step, scratch outputs of a recompute included.
    Workspace {
        /// The step's position in program order, from 0.
        step: u32,
    },
}

/// The address of a residency or workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Placement {
    /// The residency or workspace.
    pub place: Place,
    /// Its first byte in the arena; a multiple of 512.
    pub offset: Bytes,
}

/// The figures that a plan promises without noise; [`super::check`] computes them again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub struct Figures {
    /// The largest sum of resident bytes at any instant.
    pub peak_bytes: Bytes,
    /// The highest end of a placement.
    pub arena_bytes: Bytes,
    /// The bytes of the pinned pool.
    pub pinned_bytes: Bytes,
    /// The time of a steady iteration.
    pub iteration_ns: Nanos,
    /// The time to load the tensors that start on the device, plus a steady iteration.
    pub first_iteration_ns: Nanos,
    /// The liveness peak without a plan.
    pub unplanned_peak_bytes: Bytes,
    /// The time of an iteration without a plan.
    pub unplanned_iteration_ns: Nanos,
}

/// The window: bytes of the arena that jobs share and hold in turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// Its first byte in the arena.
    pub offset: Bytes,
    /// Its size.
    pub bytes: Bytes,
    /// Operators after which, in program order, the job has nothing in the window, so that another
    /// job may hold it. Ascending.
    pub hands_over_after: Vec<OpId>,
}

/// The plan of one job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobPlan {
    /// The path of its graph, relative to the plan's file.
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
    /// The algorithms for operators whose latency is that of certain algorithms. A run uses these
    /// and no others. Workspaces in the plan's graph are at least as large as theirs.
    pub libraries: BTreeMap<OpId, Chosen>,
    /// Events in program order.
    pub events: Vec<Event>,
    /// Placements in the order in which residencies take over shared bytes.
    pub placements: Vec<Placement>,
    /// For each tensor that is ever copied, its offset in the pinned pool (a multiple of 512).
    pub host_slots: BTreeMap<TensorId, Bytes>,
    /// The window that it shares with other jobs, if it has one.
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
    /// The planner that made it.
    pub planner: String,
    /// The planner's switches, as given.
    pub options: BTreeMap<String, String>,
    /// The complete profile of the device for which it was made.
    pub device: Profile,
    /// The largest allowed value of `arena_bytes`.
    pub budget: Bytes,
    /// The plan of each job.
    pub jobs: Vec<JobPlan>,
    /// The figures that the plan promises, without noise.
    pub figures: Figures,
}

impl Plan {
    /// The window that its jobs hold in turn, if they share one.
    #[must_use]
    pub fn window(&self) -> Option<&Window> {
        self.jobs.iter().find_map(|job| job.window.as_ref())
    }
}
