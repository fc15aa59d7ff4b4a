//! The result of reading the events: tasks, their waits, and residencies.

use crate::contract::plan::Place;

/// A task: a step of the compute stream or a copy. Tasks are numbered in program order.
pub(super) struct Task {
    pub kind: Kind,
    /// The waits before it starts.
    pub waits: Vec<Wait>,
    /// For a step: the bytes of its workspace, scratch outputs included, in blocks.
    pub workspace: u128,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// The operator, and the event if it is a recompute.
    Step { operator: usize, event: Option<usize> },
    /// The tensor and the event.
    Out { tensor: usize, event: usize },
    /// The tensor and the event.
    In { tensor: usize, event: usize },
}

/// The start of a task waits for the end of another task.
#[derive(Clone, Copy)]
pub(super) struct Wait {
    pub task: usize,
    pub why: Why,
}

#[derive(Clone, Copy)]
pub(super) enum Why {
    /// The step before it.
    Program,
    /// The copy before it in the same direction.
    Queue,
    /// The operator of its trigger.
    Trigger,
    /// A tensor that the other task brings or writes.
    Data(usize),
    /// The end of the tensor's earlier residency.
    Earlier(usize),
    /// Bytes of this place, at this offset, are held until then.
    Address(Place, u64),
    /// Bytes of the pinned pool belong to this tensor until then.
    Pool(usize),
    /// The stretch before, in the window that jobs hold in turn.
    Window,
}

/// A residency of a tensor.
pub(super) struct Residency {
    pub tensor: usize,
    /// Its number in placements.
    pub number: u32,
    /// The task whose start begins it; `None` at the start of the iteration.
    pub begin: Option<usize>,
    /// Its last step.
    pub last: Option<usize>,
    /// The copy that ends it.
    pub out: Option<usize>,
    /// Whether it stays to the end of the iteration.
    pub stays: bool,
    /// The event that ends it.
    pub ended_by: Option<usize>,
}

impl Residency {
    /// The tasks at whose end it may end.
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
