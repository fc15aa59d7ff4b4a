//! Which operator called which, and in which operator each memory event happened.
//!
//! The flat lists of a [`Trace`] are nested by time, thread by thread, in one pass over operators
//! and memory events.

use super::trace::Trace;
use neap_model::units::id32;

/// Stands for "no operator".
pub const NONE: u32 = u32::MAX;

/// The call forest of a trace, in indexes into [`Trace::ops`] and [`Trace::memory`].
#[derive(Clone, Debug)]
pub struct Calls {
    /// The enclosing operator of each operator, or [`NONE`].
    pub parent: Vec<u32>,
    /// The innermost operator of each memory event, or [`NONE`].
    pub owner: Vec<u32>,
    /// Each thread's operators, in order.
    threads: Vec<Vec<u32>>,
    /// Each thread's memory events, in order.
    events: Vec<Vec<u32>>,
    /// Position of each operator in its thread.
    position: Vec<u32>,
    /// For each operator, the position in its thread after the last operator inside it.
    after: Vec<u32>,
}

impl Calls {
    /// Nests the operators of a trace.
    #[must_use]
    pub fn new(trace: &Trace) -> Self {
        let count = trace
            .ops
            .iter()
            .map(|o| o.thread.0)
            .chain(trace.memory.iter().map(|m| m.thread.0))
            .chain(trace.marks.iter().map(|m| m.thread.0))
            .max()
            .map_or(0, |t| usize::from(t) + 1);
        let mut calls = Self {
            parent: vec![NONE; trace.ops.len()],
            owner: vec![NONE; trace.memory.len()],
            threads: vec![Vec::new(); count],
            events: vec![Vec::new(); count],
            position: vec![0; trace.ops.len()],
            after: vec![0; trace.ops.len()],
        };
        let mut stacks: Vec<Vec<u32>> = vec![Vec::new(); count];
        let mut ops = trace.ops.iter().enumerate().peekable();
        for (event, memory) in trace.memory.iter().enumerate() {
            while let Some((index, op)) = ops.next_if(|(_, op)| op.start <= memory.time) {
                calls.enter(&mut stacks[usize::from(op.thread.0)], trace, index);
            }
            let thread = usize::from(memory.thread.0);
            calls.leave(&mut stacks[thread], trace, |op| op.end < memory.time);
            calls.owner[event] = stacks[thread].last().copied().unwrap_or(NONE);
            calls.events[thread].push(id32(event));
        }
        for (index, op) in ops {
            calls.enter(&mut stacks[usize::from(op.thread.0)], trace, index);
        }
        for stack in &mut stacks {
            calls.leave(stack, trace, |_| true);
        }
        calls
    }

    fn enter(&mut self, stack: &mut Vec<u32>, trace: &Trace, index: usize) {
        let op = &trace.ops[index];
        self.leave(stack, trace, |outer| {
            outer.end <= op.start && outer.start < op.start || outer.end < op.end
        });
        self.parent[index] = stack.last().copied().unwrap_or(NONE);
        let list = &mut self.threads[usize::from(op.thread.0)];
        self.position[index] = id32(list.len());
        list.push(id32(index));
        stack.push(id32(index));
    }

    fn leave(
        &mut self,
        stack: &mut Vec<u32>,
        trace: &Trace,
        gone: impl Fn(&super::trace::Op) -> bool,
    ) {
        while let Some(&top) = stack.last() {
            let op = &trace.ops[top as usize];
            if !gone(op) {
                break;
            }
            self.after[top as usize] = id32(self.threads[usize::from(op.thread.0)].len());
            stack.pop();
        }
    }

    /// The operators of each thread, by time.
    #[must_use]
    pub fn threads(&self) -> &[Vec<u32>] {
        &self.threads
    }

    /// The operators inside `op`, in order, without itself.
    #[must_use]
    pub fn inside(&self, trace: &Trace, op: u32) -> &[u32] {
        let list = &self.threads[usize::from(trace.ops[op as usize].thread.0)];
        &list[self.position[op as usize] as usize + 1..self.after[op as usize] as usize]
    }

    /// The position in its thread after `op` and the operators inside it.
    #[must_use]
    pub fn after(&self, op: u32) -> usize {
        self.after[op as usize] as usize
    }

    /// The operators of the same thread that come after `op` and the operators inside it.
    #[must_use]
    pub fn following(&self, trace: &Trace, op: u32) -> &[u32] {
        &self.threads[usize::from(trace.ops[op as usize].thread.0)]
            [self.after[op as usize] as usize..]
    }

    /// The memory events of `thread` from `start` to `end`, both included.
    #[must_use]
    pub fn events(&self, trace: &Trace, thread: u16, start: u64, end: u64) -> &[u32] {
        let list = &self.events[usize::from(thread)];
        let from = list.partition_point(|&e| trace.memory[e as usize].time < start);
        let to = list.partition_point(|&e| trace.memory[e as usize].time <= end);
        &list[from..to]
    }

    /// The memory events inside `op`.
    pub fn events_of<'a>(
        &'a self,
        trace: &Trace,
        op: u32,
    ) -> impl Iterator<Item = u32> + 'a + use<'a> {
        let o = trace.ops[op as usize];
        let (from, to) = (self.position[op as usize], self.after[op as usize]);
        let position = &self.position;
        self.events(trace, o.thread.0, o.start, o.end).iter().copied().filter(move |&e| {
            let owner = self.owner[e as usize];
            owner != NONE && (from..to).contains(&position[owner as usize])
        })
    }

    /// The outermost operator around `op`.
    #[must_use]
    pub fn outermost(&self, mut op: u32) -> u32 {
        while self.parent[op as usize] != NONE {
            op = self.parent[op as usize];
        }
        op
    }
}
