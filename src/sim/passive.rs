//! Passive mode: one iteration within a budget without any plan, evicting on demand.
//!
//! This is what Capuchin (Peng et al., ASPLOS 2020, section 4.2) does in its first iteration, while
//! it measures when tensors are accessed. Where the next operator's tensors have no room, the least
//! recently used tensors leave until there is room. A tensor that is missing is fetched. Both
//! *block*: no operator runs meanwhile, and a copy is alone on the link. Questions that the paper
//! leaves open are settled as follows:
//!
//! - Any tensor that the operator does not touch may leave, parameters and optimizer states
//!   included. Of tensors last used by the same operator, the one with the lowest number leaves
//!   first. A tensor that an operator of the iteration generates is freed after its last use.
//! - A host copy is valid until the tensor is written, as in plans, so a clean tensor leaves
//!   without a copy.
//! - A tensor that no operator generates starts on the device as long as there is room, in order of
//!   first use. The others start on the host.
//! - Room is counted in bytes, every tensor and workspace rounded to blocks. Fragmentation is left
//!   out, which favours passive mode.
//!
//! The cost is O(accesses · log). `plan::capuchin` models the iterations after the first.

use std::collections::BTreeSet;

use super::engine::copy_time;
use super::program::Direction;
use crate::device::Link;
use crate::device::latency::Latency;
use crate::job::Graph;
use crate::units::{Bytes, Nanos, OpId, TensorId};

/// The outcome of the iteration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Passive {
    /// Time of the iteration, waits included.
    pub iteration: Nanos,
    /// The part of it that waited for tensors to leave.
    pub out: Nanos,
    /// The part of it that waited for tensors to be fetched.
    pub back: Nanos,
    /// How many tensors left, with or without a copy.
    pub evictions: u64,
    /// Bytes copied to the host.
    pub evicted: Bytes,
    /// Bytes copied from the host.
    pub fetched: Bytes,
    /// The largest sum of resident bytes.
    pub peak: Bytes,
}

/// An operator's own tensors and workspace exceed the budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("operator {} needs {needed} ({} bytes) at once", operator.0, needed.0)]
pub struct TooSmall {
    /// The operator.
    pub operator: OpId,
    /// Its working set.
    pub needed: Bytes,
}

/// Runs one iteration within `budget` bytes.
///
/// # Errors
/// When an operator alone exceeds it.
pub fn run(
    graph: &Graph,
    latencies: &[Latency],
    link: &Link,
    budget: Bytes,
) -> Result<Passive, TooSmall> {
    let mut memory = Memory::start(graph, link, budget);
    let mut last = vec![None; graph.tensors.len()];
    for (index, operator) in graph.operators.iter().enumerate() {
        for tensor in operator.touches() {
            last[tensor.index()] = Some(index);
        }
    }
    let generators = graph.generators();
    for (index, (operator, latency)) in graph.operators.iter().zip(latencies).enumerate() {
        let touched = operator.touches();
        let workspace = operator.workspace.in_blocks();
        let needed = workspace + touched.iter().map(|t| memory.bytes[t.index()]).sum::<Bytes>();
        if needed > budget {
            return Err(TooSmall { operator: OpId::from_index(index), needed });
        }
        // The operator's tensors that are resident may not be evicted now.
        for &tensor in &touched {
            memory.take_out(tensor);
        }
        for &tensor in &touched {
            if !memory.resident[tensor.index()] {
                memory.room(memory.bytes[tensor.index()]);
                if generators[tensor.index()] != Some(OpId::from_index(index)) {
                    memory.fetch(tensor);
                }
                memory.resident[tensor.index()] = true;
                memory.used += memory.bytes[tensor.index()];
            }
        }
        memory.room(workspace);
        memory.done.peak = memory.done.peak.max(memory.used + workspace);
        memory.done.iteration += latency.time.max(Nanos(1));
        for operand in operator.writes() {
            memory.on_host[operand.tensor.index()] = false;
        }
        for &tensor in &touched {
            if last[tensor.index()] == Some(index) && generators[tensor.index()].is_some() {
                memory.resident[tensor.index()] = false;
                memory.used = memory.used.saturating_sub(memory.bytes[tensor.index()]);
            } else {
                memory.put_back(tensor, index + 1);
            }
        }
    }
    let done = memory.done;
    Ok(Passive { iteration: done.iteration + done.out + done.back, ..done })
}

struct Memory<'a> {
    graph: &'a Graph,
    link: &'a Link,
    budget: Bytes,
    used: Bytes,
    /// Size of each tensor, rounded to blocks.
    bytes: Vec<Bytes>,
    resident: Vec<bool>,
    /// Whether the host holds the current version of each tensor.
    on_host: Vec<bool>,
    /// When each tensor was used last: the operator's position plus 1, or 0 if not in this
    /// iteration.
    used_at: Vec<usize>,
    /// The tensors that may leave, the least recently used first.
    idle: BTreeSet<(usize, TensorId)>,
    done: Passive,
}

impl<'a> Memory<'a> {
    fn start(graph: &'a Graph, link: &'a Link, budget: Bytes) -> Self {
        let bytes: Vec<Bytes> = graph.tensors.iter().map(|t| t.bytes.in_blocks()).collect();
        let count = graph.tensors.len();
        let mut memory = Self {
            graph,
            link,
            budget,
            used: Bytes::ZERO,
            bytes,
            resident: vec![false; count],
            on_host: vec![false; count],
            used_at: vec![0; count],
            idle: BTreeSet::new(),
            done: Passive::default(),
        };
        let mut first = vec![usize::MAX; count];
        for (index, operator) in graph.operators.iter().enumerate() {
            for tensor in operator.touches() {
                first[tensor.index()] = first[tensor.index()].min(index);
            }
        }
        let generators = graph.generators();
        let mut long_lived: Vec<TensorId> = (0..count)
            .map(TensorId::from_index)
            .filter(|t| generators[t.index()].is_none())
            .collect();
        long_lived.sort_by_key(|t| (first[t.index()], *t));
        for tensor in long_lived {
            let fits = memory.used + memory.bytes[tensor.index()] <= budget;
            memory.resident[tensor.index()] = fits;
            memory.on_host[tensor.index()] = !fits;
            if fits {
                memory.used += memory.bytes[tensor.index()];
                memory.idle.insert((0, tensor));
            }
        }
        memory.done.peak = memory.used;
        memory
    }

    fn take_out(&mut self, tensor: TensorId) {
        self.idle.remove(&(self.used_at[tensor.index()], tensor));
    }

    fn put_back(&mut self, tensor: TensorId, at: usize) {
        self.used_at[tensor.index()] = at;
        self.idle.insert((at, tensor));
    }

    /// Evicts tensors until `more` bytes fit, or until no tensor may leave.
    fn room(&mut self, more: Bytes) {
        while self.used + more > self.budget {
            let Some((_, tensor)) = self.idle.pop_first() else { return };
            let bytes = self.graph.tensor(tensor).bytes;
            if !std::mem::replace(&mut self.on_host[tensor.index()], true) {
                self.done.out += copy_time(self.link, Direction::D2h, bytes, false);
                self.done.evicted += bytes;
            }
            self.done.evictions += 1;
            self.resident[tensor.index()] = false;
            self.used = self.used.saturating_sub(self.bytes[tensor.index()]);
        }
    }

    fn fetch(&mut self, tensor: TensorId) {
        let bytes = self.graph.tensor(tensor).bytes;
        self.done.back += copy_time(self.link, Direction::H2d, bytes, false);
        self.done.fetched += bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::Source;
    use crate::engine::tests::{LINK, graph};

    fn passive(budget: u64) -> Result<Passive, TooSmall> {
        run(
            &graph(),
            &[Latency { time: Nanos(1000), source: Source::Graph }; 5],
            &LINK,
            Bytes(budget),
        )
    }

    #[test]
    fn with_room_for_all_nothing_leaves() {
        assert_eq!(
            passive(3072),
            Ok(Passive { iteration: Nanos(5000), peak: Bytes(3072), ..Passive::default() })
        );
    }

    #[test]
    fn the_least_recently_used_leaves_and_its_next_use_waits() {
        // op2 makes c while b is resident: a leaves. op3 needs a: b leaves, which op2 used like c,
        // but has the lower number. op4 needs b: a is dead by then.
        let expected = Passive {
            iteration: Nanos(5000 + 4 * 1024),
            out: Nanos(2048),
            back: Nanos(2048),
            evictions: 2,
            evicted: Bytes(2048),
            fetched: Bytes(2048),
            peak: Bytes(2048),
        };
        assert_eq!(passive(2048), Ok(expected));
    }

    #[test]
    fn an_operator_that_does_not_fit_is_named() {
        assert_eq!(passive(2047), Err(TooSmall { operator: OpId(2), needed: Bytes(2048) }));
    }
}
