//! What the checker reads out of the events: tasks, what they wait for, and residencies.

use crate::contract::plan::Place;

/// What runs: a step of the compute stream or a copy. Tasks are numbered in program order.
pub(super) struct Task {
    pub kind: Kind,
    /// Before it starts.
    pub waits: Vec<Wait>,
    /// A step: the latest swap-in that brings something it touches.
    pub cuts: Option<usize>,
    /// A step: its workspace, scratch included, in blocks.
    pub workspace: u128,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Operator, and the event when it is a recompute.
    Step { operator: usize, event: Option<usize> },
    /// Tensor and event.
    Out { tensor: usize, event: usize },
    /// Tensor and event.
    In { tensor: usize, event: usize },
}

/// The start of a task waits for another's end.
#[derive(Clone, Copy)]
pub(super) struct Wait {
    pub task: usize,
    pub why: Why,
}

#[derive(Clone, Copy)]
pub(super) enum Why {
    /// One step after another.
    Program,
    /// One copy after another.
    Queue,
    /// The operator of its trigger.
    Trigger,
    /// A tensor that this task brings or writes.
    Data(usize),
    /// The end of the tensor's earlier residency.
    Earlier(usize),
    /// Bytes at an offset, held until then.
    Address(Place, u64),
    /// Bytes of the pinned slab that are this tensor's until then.
    Slab(usize),
    /// The stretch before in the window that jobs hold in turn.
    Window,
}

/// A stay on the device.
pub(super) struct Residency {
    pub tensor: usize,
    /// As placements count them.
    pub number: u32,
    /// The task whose start begins it; `None` at the start of the iteration.
    pub begin: Option<usize>,
    /// Its last step.
    pub last: Option<usize>,
    /// The copy that ends it.
    pub out: Option<usize>,
    /// To the end of the iteration.
    pub stays: bool,
    /// The event that ends it.
    pub ended_by: Option<usize>,
}

impl Residency {
    /// The tasks whose end it lasts for.
    pub fn ends(&self, tasks: &[Task]) -> impl Iterator<Item = usize> {
        let copy = match self.begin {
            Some(begin)
                if self.last.is_none()
                    && self.out.is_none()
                    && !matches!(tasks[begin].kind, Kind::Step { .. }) =>
            {
                Some(begin)
            }
            _ => None,
        };
        [self.last, self.out, copy].into_iter().flatten()
    }
}
