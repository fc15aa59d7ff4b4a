//! The times of a trace's iterations, backward passes and optimizer steps.
//!
//! They come from the trace's marks. Without `ProfilerStep` marks an iteration ends with its
//! optimizer step. They serve to explain blocks and to repeat iterations. They do not decide what
//! is requested.

use super::calls::{Calls, NONE};
use super::gpu::{NODE, step_class};
use super::trace::Trace;

/// A span of time, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Its first nanosecond.
    pub start: u64,
    /// Its last nanosecond.
    pub end: u64,
}

impl Span {
    /// Whether `time` is within the span.
    #[must_use]
    pub const fn holds(self, time: u64) -> bool {
        self.start <= time && time <= self.end
    }
}

/// The parts of an iteration.
#[derive(Clone, Debug)]
pub struct Iteration {
    /// The whole iteration.
    pub span: Span,
    /// From the first backward node to the last; `None` if there is none.
    pub backward: Option<Span>,
    /// When the model is first called; the iteration's start if the trace does not say.
    pub called: u64,
    /// Optimizer steps.
    pub steps: Vec<Span>,
    /// `zero_grad` calls.
    pub clears: Vec<Span>,
}

/// A trace's iterations, in order.
#[derive(Clone, Debug, Default)]
pub struct Phases {
    /// In order, without overlap.
    pub iterations: Vec<Iteration>,
    /// Whether `ProfilerStep` marks delimit them.
    pub marked: bool,
}

impl Phases {
    /// Finds the iterations of a trace.
    #[must_use]
    pub fn new(trace: &Trace, calls: &Calls) -> Self {
        let spans = |wanted: &dyn Fn(&str) -> bool| -> Vec<Span> {
            trace
                .marks
                .iter()
                .filter(|m| wanted(trace.text(m.name)))
                .map(|m| Span { start: m.start, end: m.end })
                .collect()
        };
        let steps = spans(&|name| step_class(name).is_some());
        let clears = spans(&|name| name.starts_with("Optimizer.zero_grad#"));
        let end = trace
            .ops
            .iter()
            .map(|o| o.end)
            .chain(trace.memory.iter().map(|m| m.time))
            .max()
            .unwrap_or(0);
        let mut whole = spans(&|name| name.starts_with("ProfilerStep#"));
        let marked = !whole.is_empty();
        if !marked {
            let mut start = 0;
            for step in &steps {
                whole.push(Span { start, end: step.end });
                start = step.end.saturating_add(1);
            }
            if whole.is_empty() {
                whole.push(Span { start: 0, end });
            }
        }
        // A file that is cut off may have the marks of iterations without their memory events.
        let last = trace.memory.last().map_or(0, |m| m.time);
        whole.retain(|s| s.start <= last);
        let mut iterations: Vec<Iteration> = whole
            .into_iter()
            .map(|span| Iteration {
                span,
                backward: None,
                called: trace
                    .modules
                    .iter()
                    .find(|m| span.holds(m.start))
                    .map_or(span.start, |m| m.start),
                steps: steps.iter().copied().filter(|s| span.holds(s.start)).collect(),
                clears: clears.iter().copied().filter(|s| span.holds(s.start)).collect(),
            })
            .collect();
        let mut at = 0;
        for (index, op) in trace.ops.iter().enumerate() {
            if calls.parent[index] != NONE || !trace.text(op.name).starts_with(NODE) {
                continue;
            }
            while at + 1 < iterations.len() && iterations[at + 1].span.start <= op.start {
                at += 1;
            }
            if let Some(iteration) = iterations.get_mut(at).filter(|i| i.span.holds(op.start)) {
                let backward =
                    iteration.backward.get_or_insert(Span { start: op.start, end: op.end });
                backward.end = backward.end.max(op.end);
            }
        }
        Self { iterations, marked }
    }

    /// The index of the iteration that contains `time`.
    #[must_use]
    pub fn at(&self, time: u64) -> Option<usize> {
        let after = self.iterations.partition_point(|i| i.span.start <= time);
        after.checked_sub(1).filter(|&i| self.iterations[i].span.holds(time))
    }
}
