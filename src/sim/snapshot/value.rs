//! The values of a pickle, and how they are looked up.

use super::lines::Lines;
use super::words::Word;

/// A value. Collections and texts are references into [`Pickle`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Value {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Word(Word),
    /// An index into [`Pickle::texts`].
    Text(u32),
    /// An index into [`Pickle::nodes`].
    Node(u32),
    /// A value that is not kept: another string, bytes, or a number beyond 64 bits. Addresses from
    /// 2^63 up are negative numbers, which stay in order among themselves.
    Other,
}

/// An event of a device's trace.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Event {
    /// The device's free bytes when `action` is [`Word::Oom`], which has no address.
    pub(super) addr: i64,
    pub(super) size: i64,
    pub(super) stream: i64,
    pub(super) action: Word,
    pub(super) stack: Stack,
    /// The pool that PyTorch 2.15 and later name, see [`pool`].
    pub(super) pool: u32,
}

/// A pool's two numbers in one; 0 is the common pool.
pub(super) fn pool(numbers: &[Value]) -> u32 {
    match *numbers {
        [Value::Int(a), Value::Int(b)]
            if (0..1 << 16).contains(&a) && (0..1 << 16).contains(&b) =>
        {
            u32::try_from(a << 16 | b).unwrap_or(u32::MAX)
        }
        [] => 0,
        _ => u32::MAX,
    }
}

/// What is kept of an event's stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stack {
    /// No stack was recorded: there is no `frames` entry.
    Unknown,
    /// A stack without `torch.cuda.empty_cache`; may be empty, as in a thread without Python.
    Other,
    /// A stack with `torch.cuda.empty_cache`.
    EmptyCache,
}

/// A collection.
#[derive(Debug)]
pub(super) enum Node {
    List(Vec<Value>),
    Tuple(Vec<Value>),
    /// Only the entries whose key is a word, each key once.
    Dict(Vec<(Word, Value)>),
    /// A dictionary with an event's entries, stored compactly: snapshots hold millions of them.
    Event(Event),
    /// The list under a `frames` key, reduced to its kind.
    Frames(Stack),
}

impl Event {
    pub(super) fn new(pairs: impl Iterator<Item = (Word, Value)>, nodes: &[Node]) -> Option<Self> {
        let (mut addr, mut free, mut size, mut stream, mut action, mut stack, mut of) =
            (None, None, None, None, None, Stack::Unknown, 0);
        for (key, value) in pairs {
            match (key, value) {
                (Word::Addr, Value::Int(n)) => addr = Some(n),
                (Word::DeviceFree, Value::Int(n)) => free = Some(n),
                (Word::Size, Value::Int(n)) => size = Some(n),
                (Word::Stream, Value::Int(n)) => stream = Some(n),
                (Word::Action, Value::Word(w)) => action = Some(w),
                (Word::PoolId, Value::Node(n)) => {
                    if let Some(Node::Tuple(all)) = nodes.get(n as usize) {
                        of = pool(all);
                    }
                }
                (Word::Frames, Value::Node(n)) => {
                    if let Some(Node::Frames(s)) = nodes.get(n as usize) {
                        stack = *s;
                    }
                }
                _ => {}
            }
        }
        let action = action?;
        let addr = if action == Word::Oom { free } else { addr };
        // `snapshot` events have no fields but a time.
        let n = |x: Option<i64>| if action == Word::Taken { Some(x.unwrap_or(0)) } else { x };
        let (addr, size, stream) = (n(addr)?, n(size)?, n(stream)?);
        Some(Self { addr, size, stream, action, stack, pool: of })
    }
}

/// A pickle's content: its value and everything that the value refers to.
#[derive(Debug)]
pub(super) struct Pickle {
    pub(super) root: Value,
    pub(super) nodes: Vec<Node>,
    pub(super) texts: Vec<Box<[u8]>>,
    /// Whether bytes follow the pickle's end.
    pub(super) more: bool,
    /// The lines of its stacks, where they were wanted.
    pub(super) lines: Option<Lines>,
}

impl Pickle {
    /// The entry of dictionary `value` under `key`.
    pub(super) fn get(&self, value: Value, key: Word) -> Option<Value> {
        let Value::Node(n) = value else { return None };
        let Node::Dict(pairs) = self.nodes.get(n as usize)? else { return None };
        pairs.iter().find(|(k, _)| *k == key).map(|(_, v)| *v)
    }

    /// The entries of list or tuple `value`.
    pub(super) fn list(&self, value: Value) -> Option<&[Value]> {
        let Value::Node(n) = value else { return None };
        match self.nodes.get(n as usize)? {
            Node::List(all) | Node::Tuple(all) => Some(all),
            _ => None,
        }
    }

    /// The event that dictionary `value` describes.
    pub(super) fn event(&self, value: Value) -> Option<Event> {
        let Value::Node(n) = value else { return None };
        match self.nodes.get(n as usize)? {
            Node::Event(event) => Some(*event),
            Node::Dict(pairs) => Event::new(pairs.iter().copied(), &self.nodes),
            _ => None,
        }
    }

    /// The text of a string value.
    pub(super) fn text(&self, value: Value) -> Option<String> {
        if value == Value::Word(Word::Empty) {
            return Some(String::new());
        }
        let Value::Text(n) = value else { return None };
        self.texts.get(n as usize).map(|t| String::from_utf8_lossy(t).into_owned())
    }
}
