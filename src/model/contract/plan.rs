//! A plan: for each job its events with their triggers, and an address for every residency.
//!
//! # What a plan means
//!
//! One iteration runs the job's operators in order on the compute stream. Between them stand the
//! *events*. Their meaning is fixed here, and [`super::check`], the engine (`sim`) and the
//! executor (`run`) each implement it on their own.
//!
//! **Program order.** A trigger `after: Some(k)` stands between operator k and operator k+1,
//! `after: None` before operator 0. Events with the same `after` follow their order in the list.
//! Events stand in the list in nondecreasing `after`. The *steps* of the compute stream are the
//! operators and the recomputes, in program order.
//!
//! **Residency.** A tensor holds device bytes from the start of what brings it (the step that
//! generates it, its swap-in's copy, its recompute, or the start of the iteration) to the end of what
//! ends it. At most one residency per tensor at a time. A step belongs to the residency that is open
//! at its place in program order. A residency ends, without any event, at the end of the last step of
//! the iteration that belongs to it if the tensor is generated in the iteration; a tensor that nothing generates stays
//! to the end of the iteration, and round it. A residency that is to end and that no step belongs to ends with
//! the copy that brought it (at the start of the iteration if nothing brought it). An event ends a residency once: a
//! second swap-out or release of the same residency is wrong.
//!
//! `kept_until` says what the framework does without a plan; under a plan such a tensor is given back like any other.
//!
//! - [`Event::SwapOut`]: the copy to the host begins when the event is due, and waits for the last step
//!   before it in program order that wrote the tensor (or for the swap-in's copy that brought it).
//!   The residency ends at the later of the copy's end and the end of its last step. No step may write
//!   the tensor after the event within the residency. Steps may still read it, until the tensor's next residency
//!   begins: the residency stays open in program order. It always copies, even what is valid on the host already.
//! - [`Event::Release`]: the residency ends at the end of its last step before the event (delay is zero).
//!   No later step belongs to it.
//! - [`Event::SwapIn`]: begins a residency when its copy starts. Wants a valid host copy.
//! - [`Event::Recompute`]: a step that runs operator `operator` again, at its place in program order, which is
//!   after that operator. It begins a residency for each tensor in `keep` (a subset of what the operator generates); what
//!   else it generates lives in the step's workspace and is gone at its end. In-place writes of the
//!   operator happen to the resident tensor, which must be at the version before, unless
//!   [`crate::job::Replay::SkipUpdates`] leaves out those on tensors that nothing generates. What is left out is not
//!   read either: the recompute does not touch these tensors, at any version, and they need not be resident.
//!   An operator that is `Pure` may not be run again if it updates a tensor that nothing generates.
//!
//! **Host copies.** A host copy holds the version that was copied, and is valid until a step writes
//! the tensor again (a recompute that keeps or updates it included, whatever version it makes). A tensor that
//! nothing generates and whose first event is a swap-in before any use
//! starts the iteration on the host, at its steady-state version; no other host copy exists at the start.
//! Each tensor that a swap-out or swap-in names has one slot in the pinned slab: its bytes rounded up to 512. No other
//! tensor has one. The slot of a tensor that starts the iteration on the host is its own for good; that of another is its own from the start of its
//! first copy to the end of its last, first and last by their place in the list. Two slots may share bytes if the last copy of the one stands before
//! the first of the other: that first copy then waits for the end of all copies of the one.
//!
//! **Queues.** Each direction of the link is one queue, in list order, one copy at a time. A copy
//! starts when its trigger is due (the end of operator `after`, or the start of the iteration, plus `delay`), the copy before it in its queue has
//! ended, what it reads is there, its slot is its own, and (swap-in) the tensor's earlier residency has ended and its
//! address is free. A step starts when the step before it has ended, all it touches is there, the earlier residencies of
//! the tensors it begins one for have ended, and its
//! addresses are free. When a step waits for a swap-in whose delay runs still, or for one behind such a
//! one in the queue, those delays are cut short: the swap-in is *passive*. A step waits from the end of the step before
//! it (or the start of the iteration), for each swap-in that brings a residency it belongs to; from then on
//! those swap-ins, and all before them in the queue, are due. Nothing else cuts a delay, and a swap-out's is never cut.
//! The iteration ends when all steps and copies have ended.
//!
//! **Link.** A copy of b bytes (the tensor's own, not rounded) is b·10^9 + overhead_ns·rate units of work, where `rate` is its direction's rate
//! alone, in bytes a second. Each nanosecond does `rate` units, or the direction's contended rate while the other
//! direction is copying too. It ends at the first whole nanosecond at which its work is done, and takes at least one.
//!
//! **Same instant.** What ends at an instant ends before anything starts at it: bytes are free, queues move
//! on, steps are ready, and a link's contention is judged, after all ends at that instant. Contention is judged once all
//! that can start at the instant has started.
//!
//! **Addresses.** Placements stand in one order. One waits for the end of every earlier one in the
//! list whose bytes it shares. Every residency is placed, one that stays round the end once, and so is a step's workspace if it is not empty;
//! that lives as long as the step, and a recompute's is the operator's workspace plus what it generates without keeping, each rounded up to 512.
//! A tensor that stays round the end of the iteration has the same offset at both ends. What is on the device at the
//! start (a tensor that never leaves too) stands before the whole list with the part that begins there; its place in the list is that of the part that
//! begins later and stays round the end. That part, like a tensor that never leaves, never ends within the iteration, so nothing may wait for it.
//!
//! **Libraries.** Where a job names the algorithms of an operator ([`JobPlan::libraries`]), its workspace is at least theirs, a recompute's
//! included, whatever the graph's file says; a device with such libraries runs these algorithms or refuses. The host has none.
//!
//! **Steady state.** The set of tensors on the device at the end is the set at the start, and a tensor
//! that starts on the host ends with a valid host copy of its last version, swapped out or released.
//!
//! **First iteration.** Before it, each tensor that nothing generates and that starts on the device is loaded: one copy after
//! another, each alone on the link, in any order. A steady iteration follows.
//!
//! **Several jobs.** Each repeats its iteration on a clock of its own, and nothing is known of their phases. So no byte of the arena or of
//! the pinned slab is ever two jobs' own, and the plan is safe at every alignment. Jobs share compute and link: what one waits for another's copies
//! or operators is late, never wrong. The figures of a plan of several jobs are those of each job alone, put together: peaks and
//! times summed (one iteration of each, one after another), arena and slab to the highest address that any of them uses.
//!
//! **The window.** Jobs may have one stretch of the arena together, the same for all of them ([`Window`]). A placement lies in it whole or outside it
//! whole; what is on the device at the iteration's boundary lies outside. A job's residencies in the window fall into *stretches*: one ends and the next begins
//! with each operator in `hands_over_after` (the operator and the events of operators before it belong to the one before, its own events and what follows to the next).
//! Every residency of a stretch waits for the end of all residencies of the stretch before it, alone on the device too. At any time at most one job *holds* the
//! window. The step or swap-in that would begin a job's first residency of a stretch, and waits for nothing else but its wire, asks
//! for it, and starts no sooner than the job holds it. The job lets go at the end of the stretch's last residency. Who asks first holds it
//! first, of those that ask at the same instant the lower job. Nobody waits for ever: what a stretch needs to end never waits for
//! another stretch of the same job that has not begun, for that one waits for it; it waits for no other job either, since a wire is only ever taken by a copy that
//! waits for nothing else. So whoever holds the window lets go of it, and everybody before in the line is one job. The sum of peaks counts the
//! window once, for the job with the most in it.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::device::Profile;
pub use crate::device::latency::{Latency, Source};
pub use crate::device::library::Chosen;
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
        /// What.
        tensor: TensorId,
        /// When.
        trigger: Trigger,
    },
    /// Take bytes and copy from the host.
    SwapIn {
        /// What.
        tensor: TensorId,
        /// When.
        trigger: Trigger,
    },
    /// Give the bytes back without a copy: the host copy is valid, or the tensor is recomputed, or not wanted again.
    Release {
        /// What.
        tensor: TensorId,
        /// When.
        trigger: Trigger,
    },
    /// Run an operator again.
    Recompute {
        /// Which.
        operator: OpId,
        /// When.
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
    /// The `residency`-th residency of a tensor in the iteration, in program order, from 0. A tensor that starts the
    /// iteration on the device, leaves and comes back has its first and its last listed apart, at the same offset.
    Tensor {
        /// Which tensor.
        tensor: TensorId,
        /// Which of its residencies, in program order.
        residency: u32,
    },
    /// The workspace of a step (its position among the steps in program order), scratch outputs of a recompute included.
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
    /// How many.
    pub bytes: Bytes,
    /// Operators after whose end, in program order, the job has nothing in the window and another may hold it. Ascending.
    pub hands_over_after: Vec<OpId>,
}

/// The plan of one job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobPlan {
    /// Where its graph is, relative to the plan's file.
    pub graph: String,
    /// SHA-256 of the graph's canonical JSON, in hex.
    pub graph_sha256: String,
    /// One for each operator.
    pub latencies: Vec<Latency>,
    /// For operators whose latency is that of certain algorithms: a run uses these and no others. Workspaces in the plan's graph are at
    /// least theirs.
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
