//! The lines of a script that allocated, kept while a snapshot is read: of each stack the innermost
//! line of Python outside PyTorch and neap.

use std::collections::HashMap;

use super::Problem;
use super::source::Budget;
use super::value::Value;
use super::words::Word;
use crate::units::id32;

/// Bytes counted for an entry of a hash table: its slack, and the smaller table that it moved from.
const ENTRY: u64 = 64;

/// No line is known.
const NONE: u32 = u32::MAX;

/// The lines of a script that allocated.
#[derive(Clone, Debug, Default)]
pub struct AllocatedAt {
    texts: Vec<String>,
    /// By id, an index into `texts`.
    of: Vec<u32>,
}

impl AllocatedAt {
    /// The line that made the allocation with this id, such as `models/resnet.py:12 (forward)`.
    #[must_use]
    pub fn line(&self, id: u32) -> Option<&str> {
        self.texts.get(*self.of.get(id as usize)? as usize).map(String::as_str)
    }

    /// The next id's line.
    pub(super) fn push(&mut self, line: Option<u32>, budget: &mut Budget) -> Result<(), Problem> {
        budget.push(&mut self.of, line.unwrap_or(NONE))
    }
}

/// A frame of Python.
#[derive(Clone, Copy, Debug)]
struct Frame {
    line: u32,
    /// Whether it is outside PyTorch.
    own: bool,
}

/// What is known of stacks while a pickle is read. Frames, stacks and events are known by the
/// numbers of their collections.
#[derive(Debug, Default)]
pub(super) struct Lines {
    texts: Vec<String>,
    known: HashMap<String, u32>,
    frames: HashMap<u32, Frame>,
    stacks: HashMap<u32, Frame>,
    events: HashMap<u32, u32>,
}

impl Lines {
    /// A dictionary has these entries; keeps it if it is a frame of Python.
    pub fn entries(
        &mut self,
        dictionary: u32,
        entries: &[(Word, Value)],
        texts: &[Box<[u8]>],
        budget: &mut Budget,
    ) -> Result<(), Problem> {
        let get = |key| entries.iter().find(|(k, _)| *k == key).map(|(_, value)| *value);
        let text = |key| match get(key) {
            Some(Value::Text(n)) => texts.get(n as usize).map(|t| String::from_utf8_lossy(t)),
            _ => None,
        };
        let (Some(file), Some(Value::Int(number))) = (text(Word::Filename), get(Word::Line)) else {
            return Ok(());
        };
        if !(file.ends_with(".py") || file.starts_with('<') || file.contains("ipykernel")) {
            return Ok(());
        }
        let own = !["/torch/", "/neap/dry/", "<frozen"].iter().any(|other| file.contains(other));
        // The folder and the file tell a module from others; the whole path hides them.
        let start = file.rmatch_indices('/').nth(1).map_or(0, |(at, _)| at + 1);
        let mut line = format!("{}:{number}", &file[start..]);
        if let Some(name) = text(Word::Name).filter(|name| !name.is_empty()) {
            line += &format!(" ({name})");
        }
        let line = match self.known.get(&line) {
            Some(known) => *known,
            None => {
                let new = id32(self.texts.len());
                // It is kept here, as a key, and in what comes of it.
                budget.charge(3 * line.len() as u64 + 2 * ENTRY, 0)?;
                self.texts.push(line.clone());
                self.known.insert(line, new);
                new
            }
        };
        budget.charge(ENTRY, 0)?;
        self.frames.insert(dictionary, Frame { line, own });
        Ok(())
    }

    /// A stack goes on with these frames, the innermost first.
    pub fn frames(
        &mut self,
        stack: u32,
        frames: &[Value],
        budget: &mut Budget,
    ) -> Result<(), Problem> {
        let known = self.stacks.get(&stack).copied();
        if known.is_some_and(|frame| frame.own) {
            return Ok(());
        }
        let mut found = frames.iter().filter_map(|value| match value {
            Value::Node(n) => self.frames.get(n).copied(),
            _ => None,
        });
        let first = known.or_else(|| found.next());
        let best = first.filter(|f| f.own).or_else(|| found.find(|f| f.own)).or(first);
        if let Some(best) = best {
            budget.charge(ENTRY, 0)?;
            self.stacks.insert(stack, best);
        }
        Ok(())
    }

    /// An event has this stack.
    pub fn event(&mut self, event: u32, stack: u32, budget: &mut Budget) -> Result<(), Problem> {
        if let Some(frame) = self.stacks.get(&stack) {
            budget.charge(ENTRY, 0)?;
            self.events.insert(event, frame.line);
        }
        Ok(())
    }

    /// The line of an event.
    pub fn line(&self, event: Value) -> Option<u32> {
        let Value::Node(n) = event else { return None };
        self.events.get(&n).copied()
    }

    /// All lines, of no id yet.
    pub fn texts(&self) -> AllocatedAt {
        AllocatedAt { texts: self.texts.clone(), of: Vec::new() }
    }
}
