//! A reader of pickles that hold plain data, made for PyTorch's memory snapshots.
//!
//! It reads dictionaries, lists, tuples, strings, bytes, numbers, booleans and `None` of protocols
//! 0 to 5, in bounded memory. It imports, calls and builds nothing: it refuses every opcode that
//! would, and names it.
//!
//! Most of a snapshot is stack frames and names that no replay needs. So only strings that are a
//! [`Word`] are kept, and only dictionary entries under such keys. Values are small and copied by
//! reference. A value that a pickle shares stays shared, and a value that contains itself is only a
//! reference. Nothing recurses.

use neap_model::units::id32;
use std::collections::HashMap;

use super::Problem;
use super::lines::Lines;
use super::source::{Budget, Source};
use super::value::{Event, Node, Pickle, Stack, Value};
use super::words::Word;

/// How many collections may be open at once; snapshots need six.
const DEPTH: usize = 1000;

/// Bytes counted for a memo entry out of order: a hash table's entry, its slack, and the smaller
/// table that it moved from.
const SPARSE: usize = 128;

impl Pickle {
    /// Reads one pickle from `source`, counting what it keeps against `budget`; of stacks their
    /// lines, if they are wanted.
    pub(super) fn read(source: Source, budget: &mut Budget, lines: bool) -> Result<Self, Problem> {
        let mut machine = Machine {
            source,
            budget,
            stack: Vec::new(),
            marks: Vec::new(),
            memo: Vec::new(),
            sparse: HashMap::new(),
            nodes: Vec::new(),
            texts: Vec::new(),
            empty_cache: Vec::new(),
            lines: lines.then(Lines::default),
            at: 0,
        };
        let root = machine.run()?;
        let more = !machine.source.at_end()?;
        let bytes = |n: usize, each: usize| n as u64 * each as u64;
        let gone = bytes(machine.stack.capacity(), size_of::<Value>())
            + bytes(machine.memo.capacity(), size_of::<Value>())
            + bytes(machine.marks.capacity(), size_of::<usize>())
            + bytes(machine.sparse.len(), SPARSE);
        machine.budget.release(gone);
        Ok(Self { root, nodes: machine.nodes, texts: machine.texts, more, lines: machine.lines })
    }
}

struct Machine<'a> {
    source: Source,
    budget: &'a mut Budget,
    stack: Vec<Value>,
    marks: Vec<usize>,
    /// Memo entries 0, 1, 2, …, as all picklers number them. Other entries are in `sparse`.
    memo: Vec<Value>,
    sparse: HashMap<u32, Value>,
    nodes: Vec<Node>,
    texts: Vec<Box<[u8]>>,
    /// Dictionaries that are the stack frame of `torch.cuda.empty_cache`. There are few.
    empty_cache: Vec<u32>,
    lines: Option<Lines>,
    /// The offset of the present opcode.
    at: u64,
}

impl Machine<'_> {
    fn run(&mut self) -> Result<Value, Problem> {
        loop {
            self.at = self.source.offset();
            let code = self.source.byte()?;
            match code {
                b'h' | b'j' | b'g' | 0x94 | b'q' | b'r' | b'p' => self.memo(code)?,
                b'N' | 0x88 | 0x89 | b'K' | b'M' | b'J' | b'G' => self.scalar(code)?,
                0x8a => {
                    let n = self.source.byte()?;
                    self.long(u64::from(n))?;
                }
                0x8b => {
                    let n = self.length4()?;
                    self.long(n)?;
                }
                b'I' | b'L' | b'F' => self.number(code)?,
                0x8c | b'U' | b'X' | b'T' | 0x8d => self.text(code)?,
                b'S' | b'V' => self.string_line(code)?,
                b'C' | b'B' | 0x8e => {
                    let n = match code {
                        b'C' => u64::from(self.source.byte()?),
                        b'B' => u64::from(u32::from_le_bytes(self.source.array()?)),
                        _ => u64::from_le_bytes(self.source.array()?),
                    };
                    self.source.skip(n)?;
                    self.push(Value::Other)?;
                }
                b'(' => {
                    if self.marks.len() == DEPTH {
                        return Err(
                            self.wrong("it opens more than 1000 collections inside each other")
                        );
                    }
                    self.budget.push(&mut self.marks, self.stack.len())?;
                }
                b'}' => self.node(Node::Dict(Vec::new()))?,
                b']' => self.empty_list()?,
                b')' => self.node(Node::Tuple(Vec::new()))?,
                b'd' => {
                    let from = self.mark()?;
                    let dict = id32(self.nodes.len());
                    self.set_items(Some(dict), from)?;
                }
                b'l' | b't' => {
                    let from = self.mark()?;
                    self.collect(code == b't', from)?;
                }
                0x85..=0x87 => {
                    let from = self.below(usize::from(code - 0x84))?;
                    self.collect(true, from)?;
                }
                b'a' => {
                    let from = self.below(1)?;
                    self.append(from)?;
                }
                b'e' => {
                    let from = self.mark()?;
                    self.append(from)?;
                }
                b's' => {
                    let from = self.below(2)?;
                    self.set_items(None, from)?;
                }
                b'u' => {
                    let from = self.mark()?;
                    self.set_items(None, from)?;
                }
                b'0' if self.marks.last() == Some(&self.stack.len()) => drop(self.marks.pop()),
                b'0' => drop(self.pop()?),
                b'1' => {
                    let from = self.mark()?;
                    self.stack.truncate(from);
                }
                b'2' => {
                    let top = self.top()?;
                    self.push(top)?;
                }
                0x80 => {
                    let version = self.source.byte()?;
                    if version > 5 {
                        return Err(self.wrong(
                            "its protocol is newer than 5; save it with pickle protocol 5 or older",
                        ));
                    }
                }
                // A frame's length is only a hint how much to read at once.
                0x95 => drop(self.source.array::<8>()?),
                b'.' => return self.pop(),
                _ => return Err(self.refused(code)),
            }
        }
    }

    /// Reads `None`, a boolean, or a number of fixed width.
    #[inline]
    fn scalar(&mut self, code: u8) -> Result<(), Problem> {
        let value = match code {
            b'N' => Value::None,
            0x88 | 0x89 => Value::Bool(code == 0x88),
            b'K' => Value::Int(i64::from(self.source.byte()?)),
            b'M' => Value::Int(i64::from(u16::from_le_bytes(self.source.array()?))),
            b'J' => Value::Int(i64::from(i32::from_le_bytes(self.source.array()?))),
            _ => Value::Float(f64::from_be_bytes(self.source.array()?)),
        };
        self.push(value)
    }

    /// Recalls or makes a memo entry.
    #[inline]
    fn memo(&mut self, code: u8) -> Result<(), Problem> {
        match code {
            b'h' => {
                let n = self.source.byte()?;
                self.recall(u32::from(n))?;
                self.recall_more();
            }
            b'j' => {
                let n = u32::from_le_bytes(self.source.array()?);
                self.recall(n)?;
                self.recall_more();
            }
            b'g' => {
                let n = self.index()?;
                self.recall(n)?;
            }
            0x94 => {
                let n = u32::try_from(self.memo.len() + self.sparse.len())
                    .map_err(|_| self.wrong("it memoises too much"))?;
                self.memoise(n)?;
            }
            b'q' => {
                let n = self.source.byte()?;
                self.memoise(u32::from(n))?;
            }
            b'r' => {
                let n = u32::from_le_bytes(self.source.array()?);
                self.memoise(n)?;
            }
            b'p' => {
                let n = self.index()?;
                self.memoise(n)?;
            }
            _ => {}
        }
        Ok(())
    }

    /// Reads a string whose length precedes it.
    #[inline]
    fn text(&mut self, code: u8) -> Result<(), Problem> {
        let length = match code {
            0x8c | b'U' => u64::from(self.source.byte()?),
            b'X' => u64::from(u32::from_le_bytes(self.source.array()?)),
            b'T' => self.length4()?,
            _ => u64::from_le_bytes(self.source.array()?),
        };
        self.string(length)
    }

    fn wrong(&self, what: &'static str) -> Problem {
        Problem::Malformed { offset: self.at, what }
    }

    fn refused(&self, code: u8) -> Problem {
        match REFUSED.iter().find(|(c, _)| *c == code) {
            Some((_, name)) => Problem::Refused { name, offset: self.at },
            None => Problem::Unknown { code, offset: self.at },
        }
    }

    fn push(&mut self, value: Value) -> Result<(), Problem> {
        self.budget.push(&mut self.stack, value)
    }

    /// The position of the topmost `n` values. It is an error if a mark lies among them.
    fn below(&self, n: usize) -> Result<usize, Problem> {
        let floor = self.marks.last().copied().unwrap_or(0);
        match self.stack.len().checked_sub(n) {
            Some(from) if from >= floor => Ok(from),
            _ => Err(self.wrong("an operation lacks its operands")),
        }
    }

    fn top(&self) -> Result<Value, Problem> {
        self.below(1).map(|at| self.stack[at])
    }

    fn pop(&mut self) -> Result<Value, Problem> {
        let top = self.top()?;
        self.stack.pop();
        Ok(top)
    }

    fn mark(&mut self) -> Result<usize, Problem> {
        self.marks.pop().ok_or_else(|| self.wrong("an operation lacks its mark"))
    }

    /// A signed length of four bytes.
    fn length4(&mut self) -> Result<u64, Problem> {
        let n = i32::from_le_bytes(self.source.array()?);
        u64::try_from(n).map_err(|_| self.wrong("a length is negative"))
    }

    /// A memo index in decimal.
    fn index(&mut self) -> Result<u32, Problem> {
        let n = self.source.line()?.and_then(|t| std::str::from_utf8(t).ok()?.trim().parse().ok());
        n.ok_or_else(|| self.wrong("a memo index is no number"))
    }

    fn recall(&mut self, n: u32) -> Result<(), Problem> {
        let value = self.memo.get(n as usize).or_else(|| self.sparse.get(&n)).copied();
        let value = value.ok_or_else(|| self.wrong("it recalls a value that it never memoised"))?;
        self.push(value)
    }

    /// Reads the run of recalls that follows, as stacks consist of them, while none of them is
    /// special.
    fn recall_more(&mut self) {
        let (rest, mut taken) = (self.source.rest(), 0);
        while self.stack.len() < self.stack.capacity() {
            let (n, length) = match &rest[taken..] {
                [b'j', a, b, c, d, ..] => (u32::from_le_bytes([*a, *b, *c, *d]) as usize, 5),
                [b'h', n, ..] => (usize::from(*n), 2),
                _ => break,
            };
            let Some(value) = self.memo.get(n) else { break };
            self.stack.push(*value);
            taken += length;
        }
        self.source.advance(taken);
    }

    fn memoise(&mut self, n: u32) -> Result<(), Problem> {
        let value = self.top()?;
        match (n as usize).cmp(&self.memo.len()) {
            std::cmp::Ordering::Less => self.memo[n as usize] = value,
            std::cmp::Ordering::Equal => {
                if !self.sparse.is_empty() {
                    self.sparse.remove(&n);
                }
                self.budget.push(&mut self.memo, value)?;
            }
            std::cmp::Ordering::Greater => {
                // A moved entry's old place is not given back: it may be counted twice, but never
                // too little.
                if !self.sparse.contains_key(&n) {
                    self.budget.charge(SPARSE as u64, 0)?;
                }
                self.sparse.insert(n, value);
            }
        }
        Ok(())
    }

    fn node(&mut self, node: Node) -> Result<(), Problem> {
        let n = u32::try_from(self.nodes.len())
            .map_err(|_| self.wrong("it holds more than 2^32 collections"))?;
        self.budget.push(&mut self.nodes, node)?;
        self.push(Value::Node(n))
    }

    /// Makes a list. A list under the key `frames` keeps nothing, since stacks are most of a
    /// snapshot.
    fn empty_list(&mut self) -> Result<(), Problem> {
        let frames = self.top().is_ok_and(|top| top == Value::Word(Word::Frames));
        self.node(if frames { Node::Frames(Stack::Other) } else { Node::List(Vec::new()) })
    }

    fn collect(&mut self, tuple: bool, from: usize) -> Result<(), Problem> {
        let mut all = Vec::new();
        self.budget.reserve(&mut all, self.stack.len() - from)?;
        all.extend_from_slice(&self.stack[from..]);
        self.stack.truncate(from);
        self.node(if tuple { Node::Tuple(all) } else { Node::List(all) })
    }

    /// Appends the values from position `from` up to the list below them.
    fn append(&mut self, from: usize) -> Result<(), Problem> {
        let under = from.checked_sub(1).map(|at| self.stack[at]);
        let Some(Value::Node(n)) = under else {
            return Err(self.wrong("it appends to something that is no list"));
        };
        let items = &self.stack[from..];
        match &mut self.nodes[n as usize] {
            Node::List(all) => {
                self.budget.reserve(all, items.len())?;
                all.extend_from_slice(items);
            }
            Node::Frames(stack) => {
                if let Some(lines) = &mut self.lines {
                    lines.frames(n, items, self.budget)?;
                }
                if !self.empty_cache.is_empty() {
                    let known = &self.empty_cache;
                    if items.iter().any(|v| matches!(v, Value::Node(n) if known.contains(n))) {
                        *stack = Stack::EmptyCache;
                    }
                }
            }
            _ => return Err(self.wrong("it appends to something that is no list")),
        }
        self.stack.truncate(from);
        Ok(())
    }

    /// Puts the pairs from position `from` up into the dictionary below them, or into the new
    /// dictionary `fresh`, which is pushed.
    fn set_items(&mut self, fresh: Option<u32>, from: usize) -> Result<(), Problem> {
        if !(self.stack.len() - from).is_multiple_of(2) {
            return Err(self.wrong("a dictionary's key lacks its value"));
        }
        let n = match fresh {
            Some(n) => {
                self.budget.push(&mut self.nodes, Node::Dict(Vec::new()))?;
                n
            }
            None => match from.checked_sub(1).map(|at| self.stack[at]) {
                Some(Value::Node(n)) => n,
                _ => return Err(self.wrong("it sets an entry of something that is no dictionary")),
            },
        };
        let pairs = self.stack[from..].chunks_exact(2).filter_map(|p| match p[0] {
            Value::Word(key) => Some((key, p[1])),
            _ => None,
        });
        if let Some(lines) = &mut self.lines
            && let Some((_, Value::Node(stack))) = pairs.clone().find(|(k, _)| *k == Word::Frames)
        {
            lines.event(n, stack, self.budget)?;
        }
        if matches!(&self.nodes[n as usize], Node::Dict(all) if all.is_empty())
            && let Some(event) = Event::new(pairs.clone(), &self.nodes)
        {
            self.nodes[n as usize] = Node::Event(event);
        } else {
            let mut all = match &mut self.nodes[n as usize] {
                Node::Dict(all) => std::mem::take(all),
                Node::Event(event) => unpacked(event, self.budget)?,
                _ => return Err(self.wrong("it sets an entry of something that is no dictionary")),
            };
            if all.capacity() == 0 {
                self.budget.reserve(&mut all, pairs.clone().count().min(64))?;
            }
            for (key, value) in pairs {
                match all.iter_mut().find(|(k, _)| *k == key) {
                    Some((_, v)) => *v = value,
                    None => self.budget.push(&mut all, (key, value))?,
                }
            }
            let has = |key, word| all.contains(&(key, Value::Word(word)));
            let empties = has(Word::Name, Word::EmptyCache) && has(Word::Filename, Word::MemoryPy);
            if empties && self.empty_cache.len() < 8 && !self.empty_cache.contains(&n) {
                self.budget.push(&mut self.empty_cache, n)?;
            }
            if let Some(lines) = &mut self.lines {
                lines.entries(n, &all, &self.texts, self.budget)?;
            }
            self.nodes[n as usize] = Node::Dict(all);
        }
        self.stack.truncate(from);
        if fresh.is_some() { self.push(Value::Node(n)) } else { Ok(()) }
    }

    /// An integer of `n` bytes, least first, in two's complement. One of 64 bits without a sign,
    /// as an address may be, keeps its bits.
    fn long(&mut self, n: u64) -> Result<(), Problem> {
        let value = match self.source.text(n)? {
            Some([low @ .., 0]) if low.len() == 8 => {
                Value::Int(i64::from_le_bytes(low.try_into().unwrap_or_default()))
            }
            Some(bytes) if bytes.len() <= 8 => {
                let fill = if bytes.last().is_some_and(|b| *b >= 0x80) { 0xff } else { 0 };
                let mut all = [fill; 8];
                all[..bytes.len()].copy_from_slice(bytes);
                Value::Int(i64::from_le_bytes(all))
            }
            _ => Value::Other,
        };
        self.push(value)
    }

    /// Reads a number written as text.
    fn number(&mut self, code: u8) -> Result<(), Problem> {
        let text = self.source.line()?.and_then(|t| std::str::from_utf8(t).ok()).map(str::trim);
        let value = match (code, text) {
            (_, None) => Some(Value::Other),
            (b'I', Some("00")) => Some(Value::Bool(false)),
            (b'I', Some("01")) => Some(Value::Bool(true)),
            (b'F', Some(t)) => t.parse().ok().map(Value::Float),
            (_, Some(t)) => {
                let t = t.strip_suffix('L').unwrap_or(t);
                let digits = t.strip_prefix('-').unwrap_or(t);
                if digits.is_empty() || digits.bytes().any(|b| !b.is_ascii_digit()) {
                    None
                } else {
                    let unsigned = || t.parse().map(u64::cast_signed);
                    Some(t.parse().or_else(|_| unsigned()).map_or(Value::Other, Value::Int))
                }
            }
        };
        let value = value.ok_or_else(|| self.wrong("a number is malformed"))?;
        self.push(value)
    }

    /// What is kept of the next string, by the key before it.
    fn keep(&self) -> Keep {
        match self.stack.last() {
            Some(Value::Word(Word::Conf)) => Keep::Text,
            Some(Value::Word(Word::Filename | Word::Name)) if self.lines.is_some() => Keep::Both,
            _ => Keep::Word,
        }
    }

    /// Reads a string of `n` bytes.
    fn string(&mut self, n: u64) -> Result<(), Problem> {
        let keep = self.keep();
        let text = self.source.text(n)?;
        let value = string(text, keep, &mut self.texts, self.budget)?;
        self.push(value)
    }

    /// Reads a string on a line, quoted as by Python 2 or not. Escapes are not decoded, because no
    /// [`Word`] has any.
    fn string_line(&mut self, code: u8) -> Result<(), Problem> {
        let keep = self.keep();
        let mut text = self.source.line()?;
        if code == b'S' {
            text = text.and_then(|t| match t {
                [b'\'', inner @ .., b'\''] | [b'"', inner @ .., b'"'] => Some(inner),
                _ => None,
            });
        }
        let value = string(text, keep, &mut self.texts, self.budget)?;
        self.push(value)
    }
}

/// What is kept of a string.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Keep {
    /// The [`Word`] that it spells, if any.
    Word,
    /// Its text.
    Text,
    /// The word if there is one, else the text.
    Both,
}

/// A string's value.
fn string(
    text: Option<&[u8]>,
    keep: Keep,
    texts: &mut Vec<Box<[u8]>>,
    budget: &mut Budget,
) -> Result<Value, Problem> {
    let Some(text) = text else { return Ok(Value::Other) };
    let word = Word::parse(text).filter(|_| keep != Keep::Text);
    if word.is_some() || keep == Keep::Word {
        return Ok(word.map_or(Value::Other, Value::Word));
    }
    let n = id32(texts.len());
    budget.charge(text.len() as u64, 0)?;
    budget.push(texts, text.into())?;
    Ok(Value::Text(n))
}

/// An event's fields as the entries of a dictionary.
fn unpacked(event: &Event, budget: &mut Budget) -> Result<Vec<(Word, Value)>, Problem> {
    let mut all = Vec::new();
    budget.reserve(&mut all, 4)?;
    all.push((Word::Action, Value::Word(event.action)));
    all.push((
        if event.action == Word::Oom { Word::DeviceFree } else { Word::Addr },
        Value::Int(event.addr),
    ));
    all.push((Word::Size, Value::Int(event.size)));
    all.push((Word::Stream, Value::Int(event.stream)));
    Ok(all)
}

/// Opcodes that import, call or build, or that no snapshot contains.
const REFUSED: &[(u8, &str)] = &[
    (b'c', "GLOBAL"),
    (b'R', "REDUCE"),
    (b'b', "BUILD"),
    (b'i', "INST"),
    (b'o', "OBJ"),
    (b'P', "PERSID"),
    (b'Q', "BINPERSID"),
    (0x81, "NEWOBJ"),
    (0x82, "EXT1"),
    (0x83, "EXT2"),
    (0x84, "EXT4"),
    (0x8f, "EMPTY_SET"),
    (0x90, "ADDITEMS"),
    (0x91, "FROZENSET"),
    (0x92, "NEWOBJ_EX"),
    (0x93, "STACK_GLOBAL"),
    (0x96, "BYTEARRAY8"),
    (0x97, "NEXT_BUFFER"),
    (0x98, "READONLY_BUFFER"),
];
