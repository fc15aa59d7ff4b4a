//! Finds the blocks from before the trace: parameters, buffers, optimizer states.
//!
//! A profiler that starts after the model was made never records them. Parameters are the tensors
//! that the optimizer's step updates, in its order, or into which gradients accumulate. Buffers are
//! the statistics with which batch norms are called. States from before the trace are those that
//! the optimizer's class keeps and the first step does not make. A block whose free is in the trace
//! is in [`super::lives`] already.

use neap_model::units::id32;
use std::collections::{HashMap, HashSet};

use super::calls::{Calls, NONE};
use super::gpu::{Edited, NODE, Step, step_class};
use super::inputs::Inputs;
use super::lives::Lives;
use super::roles::Role;
use super::trace::Trace;

/// Sizes in bytes of the blocks from before the trace, in the order in which they were made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Before {
    /// Parameters.
    pub parameters: Vec<u64>,
    /// Buffers, each with the number of parameters before it.
    pub buffers: Vec<(usize, u64)>,
    /// Optimizer states.
    pub states: Vec<u64>,
    /// Sentences about how they were found.
    pub notes: Vec<String>,
}

impl Before {
    /// Finds the blocks from before `trace`.
    #[must_use]
    pub fn new(trace: &Trace, calls: &Calls, edited: &Edited) -> Self {
        let mut before = Self::default();
        let updated = edited
            .steps
            .iter()
            .map(|s| &s.parameters)
            .max_by_key(|p| p.len())
            .cloned()
            .unwrap_or_default();
        let accumulated = accumulated(trace, calls);
        before.parameters = if updated.len() >= accumulated.len() { updated } else { accumulated };
        if before.parameters.is_empty() {
            before.notes.push("no optimizer step and no gradient in the trace: parameters from before it are not counted".to_owned());
        }
        if trace.modules.iter().any(|m| trace.text(m.name).starts_with("MultiheadAttention_")) {
            before.move_projections();
        }
        before.find_buffers(trace);
        before.find_tables(trace, calls, &edited.lives);
        if let Some(step) = edited.steps.first() {
            before.find_states(step, edited);
        }
        before
    }

    /// Sizes and roles in the order in which they were made: parameters and buffers as modules hold
    /// them.
    #[must_use]
    pub fn roles(&self) -> Vec<(u64, Role)> {
        let mut buffers = self.buffers.iter().peekable();
        let mut all = Vec::with_capacity(self.parameters.len() + self.buffers.len());
        for (index, &bytes) in self.parameters.iter().enumerate() {
            all.push((bytes, Role::Parameter));
            while let Some((_, bytes)) = buffers.next_if(|(after, _)| *after <= index + 1) {
                all.push((*bytes, Role::Buffer));
            }
        }
        all.extend(buffers.map(|(_, b)| (*b, Role::Buffer)));
        all.extend(self.states.iter().map(|&b| (b, Role::OptimizerState)));
        all
    }

    /// Moving a model to a device moves a module's children before its own parameters, but
    /// optimizers list them the other way round. Of PyTorch's modules with both, only
    /// `MultiheadAttention` has weights: its input projection is three times as large as its
    /// child's.
    fn move_projections(&mut self) {
        let mut at = 0;
        while let Some(&[weight, bias, child_weight, child_bias]) = self.parameters.get(at..at + 4)
        {
            if weight == 3 * child_weight
                && bias == 3 * child_bias
                && child_bias > 0
                && child_weight > child_bias
            {
                self.parameters[at..at + 4].rotate_left(2);
                at += 4;
            } else {
                at += 1;
            }
        }
    }

    /// Buffers of batch norms: running statistics, which a call in training takes, and a counter.
    fn find_buffers(&mut self, trace: &Trace) {
        let first_end = first_step_end(trace);
        let mut at = 0;
        let mut parsed = HashMap::new();
        for op in &trace.ops {
            if op.start > first_end {
                break;
            }
            if trace.text(op.name) != "aten::batch_norm" {
                continue;
            }
            let inputs: &Inputs = parsed
                .entry(op.args)
                .or_insert_with(|| Inputs::new(trace, trace.args[op.args as usize]));
            let statistics: Vec<u64> = [3, 4]
                .iter()
                .filter_map(|&i| inputs.tensor(i))
                .map(|t| t.bytes())
                .filter(|&b| b > 0)
                .collect();
            if statistics.is_empty() {
                continue;
            }
            // The layer's weight and bias are two parameters of the same size next to each other.
            let weight = inputs.tensor(1).map_or(0, |t| t.bytes());
            let place = (at..self.parameters.len().saturating_sub(1))
                .find(|&i| self.parameters[i] == weight && self.parameters[i + 1] == weight);
            at = place.map_or(at, |i| i + 2);
            self.buffers.extend(statistics.into_iter().chain([8]).map(|b| (at, b)));
        }
    }

    /// Masks, positions and other tables of integers that modules hold. Such a table is a
    /// contiguous tensor that forward takes a part of while no block of its size is alive. Each
    /// module that does that has one.
    fn find_tables(&mut self, trace: &Trace, calls: &Calls, lives: &Lives) {
        let first_end = first_step_end(trace);
        let mut alive: HashMap<u64, i64> = HashMap::new();
        let mut seen = HashSet::new();
        let mut parsed = HashMap::new();
        let mut events = trace.memory.iter().enumerate().peekable();
        for life in lives.list.iter().filter(|l| l.before) {
            *alive.entry(life.bytes).or_default() += 1;
        }
        for (index, op) in trace.ops.iter().enumerate() {
            if op.start > first_end {
                break;
            }
            while let Some((_, memory)) = events.next_if(|(_, m)| m.time <= op.start) {
                *alive.entry(memory.bytes.unsigned_abs()).or_default() += memory.bytes.signum();
            }
            if !matches!(
                trace.text(op.name),
                "aten::slice" | "aten::select" | "aten::index" | "aten::index_select"
            ) {
                continue;
            }
            if trace.text(trace.ops[calls.outermost(id32(index)) as usize].name).starts_with(NODE) {
                continue;
            }
            let inputs: &Inputs = parsed
                .entry(op.args)
                .or_insert_with(|| Inputs::new(trace, trace.args[op.args as usize]));
            let Some(table) = inputs.tensor(0) else { continue };
            let bytes = table.bytes();
            if !table.integral
                || table.dims.len() < 2
                || !table.is_contiguous()
                || alive.get(&bytes).is_some_and(|&n| n > 0)
            {
                continue;
            }
            let module = trace.modules[..trace.modules.partition_point(|m| m.start <= op.start)]
                .iter()
                .rev()
                .find(|m| m.end >= op.end);
            if seen.insert((module.map(|m| m.name), bytes)) {
                self.buffers.push((self.parameters.len(), bytes));
            }
        }
    }

    fn find_states(&mut self, step: &Step, edited: &Edited) {
        // Adagrad makes its sums when it is constructed. The others make theirs at their first
        // step.
        let lists = match step.class.as_str() {
            "Adagrad" => 1,
            "Adam" | "AdamW" | "NAdam" | "RAdam" | "Adadelta" | "Adamax" => 2,
            "RMSprop" => 1,
            "SGD" if step.momentum => 1,
            _ => 0,
        };
        if lists == 0 {
            return;
        }
        let all: u64 = step.parameters.iter().sum();
        let made: u64 = edited
            .lives
            .list
            .iter()
            .filter(|l| {
                l.start.side == 1
                    && !l.dropped
                    && step.start <= l.start.time
                    && l.start.time <= step.end
                    && l.end.is_none_or(|k| k.time > step.end)
            })
            .map(|l| l.bytes)
            .sum();
        if step.class == "Adagrad" || made < all / 2 {
            for _ in 0..lists {
                self.states.extend(&step.parameters);
            }
        }
    }
}

/// The end of the first optimizer step.
fn first_step_end(trace: &Trace) -> u64 {
    trace
        .marks
        .iter()
        .find(|m| step_class(trace.text(m.name)).is_some())
        .map_or(u64::MAX, |m| m.end)
}

/// Sizes of the gradients that the first backward pass accumulates, the last one first.
fn accumulated(trace: &Trace, calls: &Calls) -> Vec<u64> {
    let mut sizes = Vec::new();
    for (index, op) in trace.ops.iter().enumerate() {
        let name = trace.text(op.name);
        if name == "torch::autograd::AccumulateGrad" {
            if let Some(gradient) = Inputs::new(trace, trace.args[op.args as usize]).tensor(0) {
                sizes.push(gradient.bytes());
            }
        } else if !sizes.is_empty() && calls.parent[index] == NONE && name == "aten::zeros_like" {
            break;
        }
        if trace
            .marks
            .iter()
            .any(|m| trace.text(m.name).starts_with("Optimizer.step#") && m.start <= op.start)
            && !sizes.is_empty()
        {
            break;
        }
    }
    sizes.reverse();
    sizes
}
