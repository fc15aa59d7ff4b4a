//! Plans for a script that runs in PyTorch: the `neap.torch` package records an iteration and what
//! can move in it ([`problem`]), this module decides, and the package carries out the [`actions`].
//!
//! Only what PyTorch can carry out is planned: activations leave after forward's last use and come
//! back for backward, optimizer states are on the device for their updates, and calls of modules
//! and operators run again (`ranges.rs`). For a set of these [`world`] is the iteration that comes
//! of it, [`graph`] makes a job of it for the planner, and [`search`] compares sets.

pub mod actions;
pub mod course;
mod fitted;
mod graph;
mod loans;
pub mod problem;
mod ranges;
mod reserved;
pub mod search;
#[cfg(test)]
mod tests;
mod updates;
pub mod world;

use serde::{Deserialize, Serialize};

pub use problem::Problem;
pub use search::plan;

use crate::budget::PlanError;
use crate::job::{Graph, GraphError};

/// What a plan is asked for.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ask {
    /// The budget in bytes.
    pub budget: u64,
    /// Bytes of it that the allocator needs beyond what it gives out, with all updates in the step
    /// and with updates inside backward; negative where the peak was seen to be lower than planned.
    pub less: (i64, i64),
    /// Whether the allocator's segments grow, which is what its simulation is asked for.
    pub expandable: bool,
    /// Such bytes beside these where what the allocator reserves is not predicted: with other
    /// segments, with updates inside backward, and where parameters leave.
    pub unpredicted: i64,
    /// Ranges that must not run again, of the usual iteration and of that with early updates.
    pub banned: (Vec<usize>, Vec<usize>),
    /// The planner's effort; nothing for the usual.
    pub effort: Option<u32>,
}

/// A plan for a script.
#[derive(Debug, Serialize)]
pub struct Answer {
    /// Whether it keeps to the budget; else it is the lowest that was found.
    pub met: bool,
    /// Whether updates run inside backward.
    pub early: bool,
    /// The predicted time of an iteration.
    pub iteration_ns: u64,
    /// The ranges that run again.
    pub ranges: Vec<usize>,
    /// Whether copies of states run beside the updates of other pieces.
    pub ahead: bool,
    /// The bytes of states that a piece of the step should have.
    pub piece: u64,
    /// What is done when.
    #[serde(flatten)]
    pub actions: actions::Actions,
    /// The iteration with the plan beside that without: the text of a [`course::Course`].
    pub course: String,
}

/// The usual iteration as a graph in which only what can move is a tensor.
///
/// # Errors
/// When the recording contradicts itself.
pub fn graph(problem: &Problem) -> Result<Graph, GraphError> {
    let way = world::Way { piece: problem.piece.bytes, ..world::Way::default() };
    let world = world::World::new(problem, way, Vec::new());
    graph::graph(&world, problem.move_states).map(|planned| planned.graph)
}

/// Why there is no plan at all.
#[derive(Debug, thiserror::Error)]
pub enum ScriptError {
    /// The recording contradicts itself.
    #[error("the recorded iteration makes no graph: {0}")]
    Graph(#[from] GraphError),
    /// The planner contradicted itself.
    #[error(transparent)]
    Plan(#[from] PlanError),
}
