//! What blocks are for.
//!
//! Roles explain a peak, and tell which blocks an iteration leaves to the next. No block is left
//! out because of its role.

use super::calls::NONE;
use super::lives::Life;
use super::phases::Phases;
use super::trace::Trace;

/// What a block is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// A weight or bias.
    Parameter,
    /// A running statistic, a table.
    Buffer,
    /// What the optimizer keeps for each parameter.
    OptimizerState,
    /// What backward leaves for the optimizer.
    Gradient,
    /// What forward keeps for backward.
    Activation,
    /// The iteration's input.
    BatchData,
    /// Given back in the phase that took it.
    Temporary,
    /// Held by a library.
    Workspace,
}

impl Role {
    /// All, in the order in which people read them.
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

    /// As a key and in tables.
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

/// What a block of the trace, or one that a rule added, is for.
#[must_use]
pub fn role(trace: &Trace, phases: &Phases, life: &Life) -> Role {
    if life.rule == Some("workspaces") {
        return Role::Workspace;
    }
    let ends_after = |time: u64| life.end.is_none_or(|k| k.time > time);
    if life.before {
        // Given back by the first zero_grad, or wherever the first iteration replaced it.
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

/// Gradients that an old `zero_grad` makes anew are no input.
fn is_zeros(trace: &Trace, op: u32) -> bool {
    trace.text(trace.ops[op as usize].name) == "aten::zeros_like"
}
