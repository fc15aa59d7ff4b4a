//! Reads a Chakra execution trace one node at a time, in bounded memory.
//!
//! The result is a [`Trace`]: nodes in the order of their start, each with its parent.

use std::cell::Cell;
use std::collections::HashMap;
use std::fmt;
use std::io::{self, BufRead, Read};
use std::path::Path;
use std::rc::Rc;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};

use super::value::{Raw, Signature, Skip, Value, values};
use super::{ImportError, Place};

/// The most bytes of one node, far above real traces with lists of thousands of tensors.
const NODE_BYTES: u64 = 64 << 20;
/// The most nodes, far above one iteration of any model.
const MOST_NODES: usize = 4_000_000;
/// The deepest nesting of calls.
const MOST_DEPTH: u32 = 1000;
/// The most calls that exceptions may end in one iteration.
const MOST_UNFINISHED: usize = 10_000;
/// The schema for which the importer was written.
const SCHEMA: &str = "1.1.1-chakra.0.0.4";

/// One call.
#[derive(Debug)]
pub(super) struct Node {
    /// The recorder's id, in order of start.
    pub id: u64,
    pub name: String,
    /// Position of the parent; a root is its own parent.
    pub parent: usize,
    /// Position of the last node inside it, at any depth.
    pub end: usize,
    /// Euler tour: the nodes inside are those with a number in `tour.0..tour.1`.
    pub tour: (usize, usize),
    pub inputs: Vec<Value>,
    pub outputs: Vec<Value>,
    /// Matches a backward node with its forward call; negative for most nodes.
    pub sequence: i64,
    /// Absent for annotations, which are not calls of operators.
    pub signature: Option<Rc<Signature>>,
}

/// A whole trace, nodes in the order of their start.
pub(super) struct Trace {
    pub nodes: Vec<Node>,
    pub notes: Vec<String>,
}

impl Trace {
    /// Whether node `inner` is `outer` or inside it.
    pub(super) fn inside(&self, inner: usize, outer: usize) -> bool {
        let (from, to) = self.nodes[outer].tour;
        (from..to).contains(&self.nodes[inner].tour.0)
    }

    /// The node and the nodes around it, from the inside out.
    pub(super) fn around(&self, node: usize) -> impl Iterator<Item = usize> {
        std::iter::successors(Some(node), |&n| Some(self.nodes[n].parent).filter(|&p| p != n))
    }
}

/// The inputs or the outputs of a node, as written.
#[derive(Deserialize, Default)]
#[serde(default)]
pub(super) struct Side {
    pub values: Vec<Raw>,
    pub shapes: Vec<Raw>,
    pub types: Vec<String>,
    pub strides: Vec<Raw>,
}

#[derive(Deserialize)]
struct RawNode {
    id: u64,
    name: String,
    ctrl_deps: Raw,
    #[serde(default)]
    inputs: Side,
    #[serde(default)]
    outputs: Side,
    #[serde(default)]
    attrs: Vec<RawAttribute>,
}

#[derive(Deserialize)]
struct RawAttribute {
    name: String,
    #[serde(default)]
    value: Raw,
}

/// A reader that fails after more than the limit since the last reset.
struct Bounded<R> {
    inner: R,
    since: Rc<Cell<u64>>,
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(to)?;
        self.since.set(self.since.get() + n as u64);
        if self.since.get() > NODE_BYTES {
            return Err(io::Error::other(format!(
                "{} MiB without the end of a node",
                NODE_BYTES >> 20
            )));
        }
        Ok(n)
    }
}

/// A node and its place in the tree.
struct Start {
    node: Node,
    parent: u64,
    thread: i64,
}

/// The nodes and notes that the visitor gathers.
struct Reader {
    since: Rc<Cell<u64>>,
    schema: Option<String>,
    nodes: Vec<Start>,
    signatures: HashMap<String, Rc<Signature>>,
    has_nodes: bool,
    trouble: Option<ImportError>,
    path: std::path::PathBuf,
}

pub(super) fn read(path: &Path) -> Result<Trace, ImportError> {
    let since = Rc::new(Cell::new(0));
    let source = Bounded { inner: crate::files::open(path)?, since: since.clone() };
    let source = io::BufReader::with_capacity(1 << 16, source);
    read_from(path, source, since)
}

fn read_from(
    path: &Path,
    source: impl BufRead,
    since: Rc<Cell<u64>>,
) -> Result<Trace, ImportError> {
    let mut reader = Reader {
        since,
        schema: None,
        nodes: Vec::new(),
        signatures: HashMap::new(),
        has_nodes: false,
        trouble: None,
        path: path.to_owned(),
    };
    let mut json = serde_json::Deserializer::from_reader(source);
    let outcome = json.deserialize_map(Top(&mut reader)).and_then(|()| json.end());
    if let Some(trouble) = reader.trouble.take() {
        return Err(trouble);
    }
    outcome.map_err(|source| ImportError::json(path, source))?;
    let fail =
        |problem: &str| ImportError::Trace { path: path.to_owned(), problem: problem.to_owned() };
    let mut notes = Vec::new();
    match reader.schema.as_deref() {
        None => {
            return Err(fail(
                "it has no `schema`, so it is not a PyTorch execution trace; record one with torch.profiler.ExecutionTraceObserver",
            ));
        }
        Some(SCHEMA) => {}
        Some(other) => notes.push(format!("schema {other} is not {SCHEMA}, which this importer was written for; look the result over")),
    }
    if !reader.has_nodes || reader.nodes.is_empty() {
        return Err(fail("it has no nodes: nothing ran between the observer's start and stop"));
    }
    order(path, reader.nodes, notes)
}

/// Sorts nodes by start and resolves parents.
fn order(path: &Path, mut all: Vec<Start>, mut notes: Vec<String>) -> Result<Trace, ImportError> {
    all.sort_by_key(|s| s.node.id);
    let fail = |n: &Node, problem: String| ImportError::Node {
        path: path.to_owned(),
        place: Place { id: n.id, name: n.name.clone() },
        problem,
    };
    let ids: Vec<u64> = all.iter().map(|s| s.node.id).collect();
    let mut depth = vec![0u32; all.len()];
    let mut unfinished = 0;
    for at in 0..all.len() {
        if at > 0 && ids[at - 1] == ids[at] {
            return Err(fail(
                &all[at].node,
                "its id is used twice; the trace is damaged, record it again".into(),
            ));
        }
        let parent = all[at].parent;
        let parent_at = match ids.binary_search(&parent) {
            Ok(parent_at) => parent_at,
            Err(_) => {
                unfinished += 1;
                let found =
                    around_missing(&all, &ids, at).filter(|_| unfinished <= MOST_UNFINISHED);
                found.ok_or_else(|| {
                    fail(&all[at].node, format!("its parent {parent} is not in the trace; record it again, or export it whole"))
                })?
            }
        };
        // A parent starts before its children, so this also refuses circles.
        if parent_at > at {
            let name = all[parent_at].node.name.clone();
            let problem = format!(
                "its parent {parent} `{name}` starts after it, or they contain each other; record the trace again"
            );
            return Err(fail(&all[at].node, problem));
        }
        depth[at] = if parent_at == at { 0 } else { depth[parent_at] + 1 };
        if depth[at] > MOST_DEPTH {
            let problem = format!(
                "it is nested more than {MOST_DEPTH} calls deep; the trace is damaged, record it again"
            );
            return Err(fail(&all[at].node, problem));
        }
        all[at].node.parent = parent_at;
    }
    if unfinished > 0 {
        notes.push(format!("{unfinished} calls stand in calls that never ended (activation checkpointing stops them so); taken as part of what is around those"));
    }
    let mut nodes: Vec<Node> = all.into_iter().map(|s| s.node).collect();
    let mut size = vec![1usize; nodes.len()];
    for at in (0..nodes.len()).rev() {
        nodes[at].end = nodes[at].end.max(at);
        let (parent, end) = (nodes[at].parent, nodes[at].end);
        if parent != at {
            nodes[parent].end = nodes[parent].end.max(end);
            size[parent] += size[at];
        }
    }
    // Children get their places in the tour in the order of their start.
    let mut next = vec![0usize; nodes.len()];
    let mut roots = 0;
    for at in 0..nodes.len() {
        let parent = nodes[at].parent;
        let place = if parent == at { &mut roots } else { &mut next[parent] };
        let from = *place;
        *place += size[at];
        next[at] = from + 1;
        nodes[at].tour = (from, from + size[at]);
    }
    Ok(Trace { nodes, notes })
}

/// The call around a call that an exception ended, which was not recorded: the parent of the
/// thread's next call that began before that call did.
fn around_missing(all: &[Start], ids: &[u64], at: usize) -> Option<usize> {
    let Start { node, parent: missing, thread } = &all[at];
    if *missing >= node.id || *missing <= ids[0] {
        return None;
    }
    let later = all[at + 1..]
        .iter()
        .take(10_000)
        .filter(|s| s.thread == *thread && s.parent < *missing && s.parent != s.node.id);
    later
        .filter_map(|s| ids.binary_search(&s.parent).ok())
        .next()
        .or_else(|| all[..at].iter().position(|s| s.thread == *thread))
}

struct Top<'a>(&'a mut Reader);

impl<'de> Visitor<'de> for Top<'_> {
    type Value = ();
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an execution trace: an object with `schema` and `nodes`")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "schema" => {
                    let schema: String = map.next_value()?;
                    if !(schema.starts_with("1.") && schema.contains("chakra")) {
                        self.0.trouble = Some(ImportError::Schema {
                            path: self.0.path.clone(),
                            found: schema.chars().take(80).collect(),
                        });
                        return Err(A::Error::custom("schema"));
                    }
                    self.0.schema = Some(schema);
                }
                "nodes" => {
                    self.0.has_nodes = true;
                    map.next_value_seed(Nodes(self.0))?;
                }
                _ => {
                    map.next_value::<Skip>()?;
                }
            }
        }
        Ok(())
    }
}

struct Nodes<'a>(&'a mut Reader);

impl<'de> DeserializeSeed<'de> for Nodes<'_> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Nodes<'_> {
    type Value = ();
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of nodes")
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        while let Some(raw) = seq.next_element::<RawNode>()? {
            self.0.since.set(0);
            if self.0.nodes.len() >= MOST_NODES {
                return Err(A::Error::custom(format!(
                    "more than {MOST_NODES} nodes; record a single iteration"
                )));
            }
            let place = Place { id: raw.id, name: raw.name.clone() };
            match self.0.node(raw) {
                Ok(node) => self.0.nodes.push(node),
                Err(problem) => {
                    self.0.trouble =
                        Some(ImportError::Node { path: self.0.path.clone(), place, problem });
                    return Err(A::Error::custom("node"));
                }
            }
        }
        Ok(())
    }
}

impl Reader {
    fn node(&mut self, raw: RawNode) -> Result<Start, String> {
        let parent = match raw.ctrl_deps {
            Raw::Int(parent) if parent >= 0 => parent as u64,
            Raw::List(list) => match list.first() {
                Some(Raw::Int(parent)) if *parent >= 0 => *parent as u64,
                None => raw.id,
                _ => return Err("its `ctrl_deps` is not a node's id".into()),
            },
            _ => return Err("its `ctrl_deps` is not a node's id".into()),
        };
        let (mut schema, mut sequence, mut thread) = (String::new(), -1, -1);
        for attribute in raw.attrs {
            match (attribute.name.as_str(), attribute.value) {
                ("op_schema", Raw::Text(text)) => schema = text,
                ("seq_id", Raw::Int(n)) => sequence = n,
                ("tid", Raw::Int(n)) => thread = n,
                ("kernel_backend", Raw::Text(backend)) if !backend.is_empty() => {
                    return Err(format!(
                        "it is a compiled kernel ({backend}), which says nothing of what it computes; record the model without torch.compile"
                    ));
                }
                _ => {}
            }
        }
        let inputs = values(raw.inputs).map_err(|e| format!("inputs: {e}"))?;
        let outputs = values(raw.outputs).map_err(|e| format!("outputs: {e}"))?;
        let signature = if !schema.is_empty() {
            Some(
                self.signatures
                    .entry(schema)
                    .or_insert_with_key(|s| Rc::new(Signature::parse(s)))
                    .clone(),
            )
        } else if raw.name.starts_with("aten::") || !outputs.is_empty() {
            // Without a schema, PyTorch's naming convention decides: an operator whose name ends in
            // one underscore writes its first argument.
            let writes = raw.name.ends_with('_') && !raw.name.ends_with("__");
            let arguments = (0..inputs.len()).map(|i| (String::new(), writes && i == 0)).collect();
            Some(Rc::new(Signature { arguments }))
        } else {
            None
        };
        let node = Node {
            id: raw.id,
            name: raw.name,
            parent: 0,
            end: 0,
            tour: (0, 0),
            inputs,
            outputs,
            sequence,
            signature,
        };
        Ok(Start { node, parent, thread })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_from(inner: impl Read) -> Result<Trace, String> {
        let since = Rc::new(Cell::new(0));
        let source = io::BufReader::new(Bounded { inner, since: since.clone() });
        read_from(Path::new("x.json"), source, since).map_err(|e| e.to_string())
    }

    fn parse(text: &str) -> Result<Trace, String> {
        parse_from(text.as_bytes())
    }

    fn trace(nodes: &str) -> Result<Trace, String> {
        parse(&format!(r#"{{"schema": "1.1.1-chakra.0.0.4", "nodes": [{nodes}]}}"#))
    }

    #[test]
    fn a_tree_in_any_order_is_read_by_start() {
        let t = trace(
            r#"{"id": 3, "name": "c", "ctrl_deps": 2}, {"id": 2, "name": "b", "ctrl_deps": 1},
               {"id": 4, "name": "d", "ctrl_deps": 1}, {"id": 1, "name": "a", "ctrl_deps": 1}"#,
        )
        .unwrap();
        assert_eq!(t.nodes.iter().map(|n| n.name.as_str()).collect::<String>(), "abcd");
        assert_eq!(t.nodes[1].end, 2);
        assert!(t.inside(2, 1) && t.inside(3, 0) && !t.inside(3, 1));
        assert_eq!(t.around(2).collect::<Vec<_>>(), [2, 1, 0]);
    }

    #[test]
    fn bad_input_is_named() {
        let error = |text: &str| parse(text).err().unwrap();
        assert!(error("hello").contains("x.json"));
        assert!(error("").contains("cut off"));
        assert!(
            error(r#"{"schema": "1.1.1-chakra.0.0.4", "nodes": [{"id": 1, "#).contains("cut off")
        );
        assert!(error(r#"{"schema": "7.0", "nodes": []}"#).contains("7.0"));
        assert!(error(r#"{"nodes": []}"#).contains("schema"));
        assert!(error(r#"{"schema": "1.1.1-chakra.0.0.4", "nodes": []}"#).contains("no nodes"));
        let endless = parse_from((&br#"{"x": ""#[..]).chain(io::repeat(b'a')));
        assert!(endless.err().unwrap().contains("64 MiB"));
        let deep = |before: &str| error(&format!("{before}{}", "[".repeat(1 << 20)));
        assert!(deep("").contains("execution trace"));
        assert!(deep(r#"{"x": "#).contains("recursion"));
        assert!(
            deep(r#"{"schema": "1.1.1-chakra.0.0.4", "nodes": [{"id": 1, "name": "#)
                .contains("line 1")
        );
        let node = |text: &str| trace(text).err().unwrap();
        assert!(node(r#"{"id": 1, "name": "a", "ctrl_deps": 9}"#).contains("parent 9"));
        let circle = node(
            r#"{"id": 1, "name": "a", "ctrl_deps": 2}, {"id": 2, "name": "b", "ctrl_deps": 1}"#,
        );
        let aborted = trace(
            r#"{"id": 1, "name": "a", "ctrl_deps": 1}, {"id": 2, "name": "b", "ctrl_deps": 1}, {"id": 4, "name": "d", "ctrl_deps": 3},
               {"id": 5, "name": "e", "ctrl_deps": 2}"#,
        )
        .unwrap();
        assert_eq!((aborted.nodes[2].parent, aborted.notes.len()), (1, 1));
        assert!(circle.contains("node 1 `a`") && circle.contains("parent 2 `b`"), "{circle}");
        let mut chain = String::from(r#"{"id": 0, "name": "n", "ctrl_deps": 0}"#);
        for id in 1..3000 {
            chain += &format!(r#",{{"id": {id}, "name": "n", "ctrl_deps": {}}}"#, id - 1);
        }
        assert!(node(&chain).contains("deep"));
    }
}
