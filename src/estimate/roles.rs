//! The purpose of each block.
//!
//! Roles explain a peak, and decide which blocks an iteration leaves to the next. No block is left
//! out because of its role.

use super::calls::NONE;
use super::lives::Life;
use super::phases::Phases;
use super::trace::Trace;

/// The purpose of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// A weight or bias.
    Parameter,
    /// A running statistic or a table.
    Buffer,
    /// A tensor that the optimizer keeps for a parameter.
    OptimizerState,
    /// A gradient that backward leaves for the optimizer.
    Gradient,
    /// A tensor that forward keeps for backward.
    Activation,
    /// The iteration's input.
    BatchData,
    /// A block that is freed in the phase that allocated it.
    Temporary,
    /// Held by a library.
    Workspace,
}

impl Role {
    /// All roles, in the order of tables.
    pub const ALL: [Self; 8] = [
        Self::Parameter,
        Self::Buffer,
        Self::OptimizerState,
        Self::Gradient,
        Self::Activation,
        Self::BatchData,
        Self::Temporary,
        Self::Workspace,
    ];

    /// The name in tables and `--json`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Parameter => "parameters",
            Self::Buffer => "buffers",
            Self::OptimizerState => "optimizer_states",
            Self::Gradient => "gradients",
            Self::Activation => "activations",
            Self::BatchData => "batch_data",
            Self::Temporary => "temporaries",
            Self::Workspace => "workspaces",
        }
    }
}

/// The role of a block of the trace, or of one that a rule added.
#[must_use]
pub fn role(trace: &Trace, phases: &Phases, life: &Life) -> Role {
    if life.rule == Some("workspaces") {
        return Role::Workspace;
    }
    let ends_after = |time: u64| life.end.is_none_or(|k| k.time > time);
    if life.before {
        // Freed by the first zero_grad, or where the first iteration replaced it.
        let cleared = life.end.is_some_and(|k| {
            phases.iterations.iter().any(|i| i.clears.iter().any(|c| c.holds(k.time)))
        });
        return if cleared { Role::Gradient } else { Role::Activation };
    }
    let time = life.start.time;
    let Some(iteration) = phases.at(time).map(|i| &phases.iterations[i]) else {
        return Role::Temporary;
    };
    if let Some(step) = iteration.steps.iter().find(|s| s.holds(time)) {
        return if ends_after(step.end) { Role::OptimizerState } else { Role::Temporary };
    }
    let Some(backward) = iteration.backward else {
        return if ends_after(iteration.span.end) { Role::Activation } else { Role::Temporary };
    };
    if time < backward.start {
        return match ends_after(backward.start) {
            false => Role::Temporary,
            true if time < iteration.called && life.op != NONE && !is_zeros(trace, life.op) => {
                Role::BatchData
            }
            true => Role::Activation,
        };
    }
    if backward.holds(time) && ends_after(backward.end) { Role::Gradient } else { Role::Temporary }
}

/// Whether `op` makes zero gradients, as an old `zero_grad` does; those are no input.
fn is_zeros(trace: &Trace, op: u32) -> bool {
    trace.text(trace.ops[op as usize].name) == "aten::zeros_like"
}
