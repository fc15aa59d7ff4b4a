//! Optimizers: on a GPU PyTorch uses their multi-tensor form, which holds its temporaries for all
//! parameters at once.
//!
//! The CPU trace has the single-tensor form, one parameter at a time. The lists of temporaries of
//! the other form follow from the algorithm (torch/optim, `_multi_tensor_*` of each class). States
//! are the same in both. A step that already runs `_foreach_` or `_fused_` operators stays as
//! recorded, and so does the step of a custom optimizer.

use super::super::calls::NONE;
use super::{Editor, Rule};

/// One recognised optimizer step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// The class, such as `Adam`.
    pub class: String,
    /// Its thread.
    pub thread: u16,
    /// When it began.
    pub start: u64,
    /// When it ended.
    pub end: u64,
    /// Bytes of each parameter that it updates, in order; empty if its operators don't say.
    pub parameters: Vec<u64>,
    /// Whether it scales a momentum buffer first (SGD).
    pub momentum: bool,
    /// Whether it is rewritten.
    multi_tensor: bool,
    /// Number of lists of temporaries that are made first and held until the end.
    early: u64,
    /// Number of lists of temporaries that are made at the end.
    late: u64,
}

impl Step {
    /// Whether `op` belongs to the step, so that no other rule may change its blocks.
    pub(super) fn holds(&self, op: &super::Op) -> bool {
        self.multi_tensor
            && op.thread.0 == self.thread
            && self.start <= op.start
            && op.start <= self.end
    }
}

/// The optimizer class of a mark; `None` if the mark is not an optimizer's step.
pub fn step_class(mark: &str) -> Option<&str> {
    mark.strip_prefix("Optimizer.step#")?.strip_suffix(".step")
}

/// For each of PyTorch's multi-tensor optimizers: the operator that updates a parameter, the
/// argument with the parameter, and the number of lists of temporaries without weight decay.
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
    /// All marked steps, in order.
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
            // Momentum first adds to its buffer, then to the parameter.
            updates = updates.into_iter().skip(1).step_by(2).collect();
        }
        for op in updates {
            if let Some(parameter) = self.inputs(op).tensor(0) {
                // Steps are counted in a tensor without dimensions.
                if !parameter.dims.is_empty() || step.class == "SGD" {
                    step.parameters.push(parameter.bytes());
                }
            }
        }
        step.multi_tensor = !step.parameters.is_empty() && self.applies(Rule::Optimizer);
        step.late = late;
        // Weight decay that is added to the gradients makes a list of its own. In Adagrad that list
        // also serves as the numerator.
        if summed >= step.parameters.len() && !step.parameters.is_empty() && step.class != "AdamW" {
            step.early = 1;
            step.late -= u64::from(step.class == "Adagrad");
        }
    }

    /// Replaces the temporaries of the single-tensor form by those of the multi-tensor form.
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
        // Python frees a list's elements from its end.
        for (bytes, start) in lists.into_iter().flat_map(|list| list.into_iter().rev()) {
            let end = self.edited.lives.key(step.end, 0);
            self.add(bytes, start, Some(end), NONE, Rule::Optimizer);
        }
    }
}
