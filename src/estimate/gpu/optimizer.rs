//! Optimizers: on a GPU PyTorch takes their multi-tensor form, which holds its temporaries for all
//! parameters at once.
//!
//! The CPU trace shows the single-tensor form, one parameter at a time. Which lists of temporaries
//! the other form makes follows from the algorithm (torch/optim, `_multi_tensor_*` of each class).
//! States are the same in both. A step that already runs `_foreach_` or `_fused_` operators, or a
//! custom optimizer, is kept as it was recorded.

use super::super::calls::NONE;
use super::{Editor, Rule};

/// One recognised optimizer step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// `Adam`, `SGD`, …
    pub class: String,
    /// On which thread.
    pub thread: u16,
    /// When it began.
    pub start: u64,
    /// When it ended.
    pub end: u64,
    /// Bytes of each parameter it updated, in order; empty where its operators don't say.
    pub parameters: Vec<u64>,
    /// Whether it scales a momentum buffer first (SGD).
    pub momentum: bool,
    /// Whether it is to be rewritten.
    multi_tensor: bool,
    /// Lists of temporaries made before anything else and held until the end.
    early: u64,
    /// Lists of temporaries made at the end.
    late: u64,
}

impl Step {
    /// Whether `op` belongs to it and nothing but its own rule may touch what it took.
    pub(super) fn holds(&self, op: &super::Op) -> bool {
        self.multi_tensor
            && op.thread.0 == self.thread
            && self.start <= op.start
            && op.start <= self.end
    }
}

/// The class that a mark names, if it is an optimizer's step.
pub fn step_class(mark: &str) -> Option<&str> {
    mark.strip_prefix("Optimizer.step#")?.strip_suffix(".step")
}

/// How each of PyTorch's multi-tensor optimizers updates a parameter (the operator, its argument)
/// and how many lists of temporaries it makes, without weight decay.
fn algorithm(class: &str) -> Option<(&'static str, u64)> {
    Some(match class {
        "SGD" => ("aten::add_", 0),
        "Adam" | "AdamW" | "RMSprop" | "NAdam" => ("aten::addcdiv_", 1),
        "Adagrad" => ("aten::addcdiv_", 2),
        "RAdam" => ("aten::add_", 1),
        "Adadelta" => ("aten::add_", 2),
        "Adamax" => ("aten::addcdiv_", 2),
        _ => return None,
    })
}

impl Editor<'_> {
    /// Every step that is marked, in order.
    pub(super) fn optimizer_steps(&mut self) -> Vec<Step> {
        let trace = self.trace;
        let mut steps = Vec::new();
        for mark in &trace.marks {
            let Some(class) = step_class(trace.text(mark.name)) else { continue };
            let mut step = Step {
                class: class.to_owned(),
                thread: mark.thread.0,
                start: mark.start,
                end: mark.end,
                parameters: Vec::new(),
                momentum: false,
                multi_tensor: false,
                early: 0,
                late: 0,
            };
            self.recognise(&mut step);
            steps.push(step);
        }
        steps
    }

    fn recognise(&mut self, step: &mut Step) {
        let trace = self.trace;
        let list = &self.calls.threads()[usize::from(step.thread)];
        let from = list.partition_point(|&o| trace.ops[o as usize].start < step.start);
        let own =
            list[from..].iter().copied().take_while(|&o| trace.ops[o as usize].start <= step.end);
        let outermost: Vec<u32> = own
            .filter(|&o| {
                let parent = self.calls.parent[o as usize];
                parent == NONE || trace.ops[parent as usize].start < step.start
            })
            .collect();
        let Some((update, late)) = algorithm(&step.class) else { return };
        if outermost.iter().any(|&o| {
            self.name(o).starts_with("aten::_foreach_") || self.name(o).starts_with("aten::_fused_")
        }) {
            return;
        }
        let mut updates: Vec<u32> =
            outermost.iter().copied().filter(|&o| self.name(o) == update).collect();
        let count = |name: &str| outermost.iter().filter(|&&o| self.name(o) == name).count();
        let (scaled, summed) = (count("aten::mul_"), count("aten::add"));
        if step.class == "SGD" && scaled > 0 && updates.len() == 2 * scaled {
            step.momentum = true;
            // Momentum adds to its buffer first, then to the parameter.
            updates = updates.into_iter().skip(1).step_by(2).collect();
        }
        for op in updates {
            if let Some(parameter) = self.inputs(op).tensor(0) {
                // Steps count themselves in a tensor of no dimensions.
                if !parameter.dims.is_empty() || step.class == "SGD" {
                    step.parameters.push(parameter.bytes());
                }
            }
        }
        step.multi_tensor = !step.parameters.is_empty() && self.applies(Rule::Optimizer);
        step.late = late;
        // Weight decay added to the gradients makes a list of its own; in Adagrad that list serves
        // as the numerator too.
        if summed >= step.parameters.len() && !step.parameters.is_empty() && step.class != "AdamW" {
            step.early = 1;
            step.late -= u64::from(step.class == "Adagrad");
        }
    }

    /// Leaves the single-tensor form's temporaries out and puts the multi-tensor form's in.
    pub(super) fn optimizer(&mut self, step: &Step) {
        if !step.multi_tensor {
            return;
        }
        let events = self.calls.events(self.trace, step.thread, step.start, step.end).to_vec();
        for event in events {
            let life = self.edited.lives.of_event[event as usize];
            if self.trace.memory[event as usize].bytes > 0 && life != super::super::lives::NO_LIFE {
                let ends = self.edited.lives.list[life as usize].end;
                if ends.is_some_and(|k| k.time <= step.end) {
                    self.drop(life, Rule::Optimizer);
                }
            }
        }
        let mut lists = Vec::new();
        for (count, time) in [(step.early, step.start), (step.late, step.end)] {
            for _ in 0..count {
                lists.push(
                    step.parameters
                        .iter()
                        .map(|&bytes| (bytes, self.edited.lives.key(time, 0)))
                        .collect::<Vec<_>>(),
                );
            }
        }
        // Python gives a list's elements back from its end.
        for (bytes, start) in lists.into_iter().flat_map(|list| list.into_iter().rev()) {
            let end = self.edited.lives.key(step.end, 0);
            self.add(bytes, start, Some(end), NONE, Rule::Optimizer);
        }
    }
}
