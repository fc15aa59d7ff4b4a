//! The blocks of memory in a trace, each with its lifetime.
//!
//! The rules of [`super::gpu`] change this table from the CPU's blocks into a GPU's.

use super::calls::{Calls, NONE};
use super::trace::Trace;
use neap_model::units::id32;

/// A position in the order of events: a time, and a rank among the events of that time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// Nanoseconds since the trace's first event.
    pub time: u64,
    /// 0: before the trace's own events of that time; 1: one of them; 2: after them.
    pub side: u8,
    /// Rank among the keys of the same time and side.
    pub order: u32,
}

/// A block.
#[derive(Clone, Copy, Debug)]
pub struct Life {
    /// The requested bytes.
    pub bytes: u64,
    /// When it is allocated.
    pub start: Key,
    /// When it is freed; `None` when the trace ends first.
    pub end: Option<Key>,
    /// The innermost operator that allocates it, or [`NONE`].
    pub op: u32,
    /// Whether the GPU has no such block.
    pub dropped: bool,
    /// Whether it existed before the trace began.
    pub before: bool,
    /// The rule that added it; `None` for a block of the trace.
    pub rule: Option<&'static str>,
}

/// Stands for "no block".
pub const NO_LIFE: u32 = u32::MAX;

/// All blocks of a trace in the order of their first event, then those that rules add.
#[derive(Clone, Debug)]
pub struct Lives {
    /// The blocks.
    pub list: Vec<Life>,
    /// The block of each memory event, or [`NO_LIFE`] (a GPU's event, a free of nothing).
    pub of_event: Vec<u32>,
    /// The rank of the next key that a rule makes.
    next: u32,
}

impl Lives {
    /// Pairs `trace`'s allocations with their frees, by address.
    #[must_use]
    pub fn new(trace: &Trace, calls: &Calls) -> Self {
        let mut lives = Self {
            list: Vec::with_capacity(trace.memory.len() / 2 + 16),
            of_event: vec![NO_LIFE; trace.memory.len()],
            next: 0,
        };
        // This map is only looked up and never iterated, so its order can't affect a result.
        let mut at = std::collections::HashMap::<u64, u32>::new();
        for (index, memory) in trace.memory.iter().enumerate() {
            if !memory.host || memory.bytes == 0 {
                continue;
            }
            let key = Key { time: memory.time, side: 1, order: id32(index) };
            let id = if memory.bytes > 0 {
                let id = lives.push(Life {
                    bytes: memory.bytes as u64,
                    start: key,
                    end: None,
                    op: calls.owner[index],
                    dropped: false,
                    before: false,
                    rule: None,
                });
                // The same address is allocated again without a free, so the trace lacks that free.
                if let Some(lost) = at.insert(memory.address, id) {
                    lives.list[lost as usize].end = Some(key);
                }
                id
            } else if let Some(id) = at.remove(&memory.address) {
                lives.list[id as usize].end = Some(key);
                id
            } else {
                lives.push(Life {
                    bytes: memory.bytes.unsigned_abs(),
                    start: Key::default(),
                    end: Some(key),
                    op: NONE,
                    dropped: false,
                    before: true,
                    rule: None,
                })
            };
            lives.of_event[index] = id;
        }
        lives
    }

    fn push(&mut self, life: Life) -> u32 {
        self.list.push(life);
        id32(self.list.len() - 1)
    }

    /// A key just before (`side` 0) or just after (2) the trace's events at `time`, and after all
    /// such keys made so far.
    pub fn key(&mut self, time: u64, side: u8) -> Key {
        self.next += 1;
        Key { time, side, order: self.next }
    }

    /// Adds a block.
    pub fn add(
        &mut self,
        bytes: u64,
        start: Key,
        end: Option<Key>,
        op: u32,
        rule: &'static str,
    ) -> u32 {
        self.push(Life {
            bytes,
            start,
            end,
            op,
            dropped: bytes == 0,
            before: false,
            rule: Some(rule),
        })
    }
}
