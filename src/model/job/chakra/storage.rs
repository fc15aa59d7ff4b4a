//! Lives of storages. The ids in a trace are addresses, which the framework uses again and again.
//! This gives every mention of a tensor the life that it belongs to.
//!
//! A life begins at the start of the outermost call that outputs the storage without reading it, or
//! of the innermost of nested calls that do. That call is the life's maker. If a child of the maker
//! reads the storage, it need not have existed before the maker. A storage that is read before any
//! call outputs it is older than the trace and has no maker.

use crate::units::id32;
use std::collections::{HashMap, HashSet};

use super::parse::Trace;
use super::value::Value;
use crate::job::Dtype;

/// One storage, from its allocation to the next allocation at the same address.
#[derive(Debug)]
pub(super) struct Life {
    /// The call that allocates it.
    pub maker: Option<usize>,
    pub host: bool,
    /// The largest end of any view of it, in bytes.
    pub bytes: u64,
    pub dtype: Dtype,
    pub shape: Vec<u64>,
    /// The last call that reads it.
    pub last_read: Option<usize>,
    /// The last position in the trace where it is known to exist.
    pub last_seen: usize,
}

const NONE: u32 = u32::MAX;

/// Finds all lives and writes them into the trace's views. Views without elements get none.
pub(super) fn lives(trace: &mut Trace) -> Vec<Life> {
    on_host_only(trace);
    let mut all: Vec<Life> = Vec::new();
    let mut current: HashMap<u64, u32> = HashMap::new();
    let count = trace.nodes.len();
    // The nodes that end at each position, innermost first: a linked list through `below`.
    let mut ending = vec![NONE; count];
    let mut below = vec![NONE; count];
    for (at, below) in below.iter_mut().enumerate() {
        *below = std::mem::replace(&mut ending[trace.nodes[at].end], id32(at));
    }
    for (at, &innermost) in ending.iter().enumerate() {
        start(trace, at, &mut all, &mut current);
        let mut closing = innermost;
        while closing != NONE {
            let node = &mut trace.nodes[closing as usize];
            let end = node.end;
            for view in node.outputs.iter_mut().flat_map(Value::views_mut).filter(|v| v.end > 0) {
                if let Some(&life) = current.get(&view.storage) {
                    view.life = life;
                    let life = &mut all[life as usize];
                    life.bytes = life.bytes.max(view.end);
                    life.last_seen = life.last_seen.max(end);
                }
            }
            closing = below[closing as usize];
        }
    }
    all
}

/// The start of a call. Storages that it reads exist; storages that it outputs without reading are
/// new.
fn start(trace: &mut Trace, at: usize, all: &mut Vec<Life>, current: &mut HashMap<u64, u32>) {
    let mut inputs = std::mem::take(&mut trace.nodes[at].inputs);
    let add = |view: &super::value::View,
               maker: Option<usize>,
               all: &mut Vec<Life>,
               current: &mut HashMap<u64, u32>| {
        let id = id32(all.len());
        let (host, bytes, dtype, shape) = (view.host, view.end, view.dtype, view.shape.clone());
        all.push(Life { maker, host, bytes, dtype, shape, last_read: None, last_seen: at });
        current.insert(view.storage, id);
        id
    };
    for view in inputs.iter_mut().flat_map(Value::views_mut).filter(|v| v.end > 0) {
        view.life = match current.get(&view.storage) {
            Some(&life) => life,
            None => add(view, None, all, current),
        };
        let life = &mut all[view.life as usize];
        life.bytes = life.bytes.max(view.end);
        life.last_read = Some(at);
        life.last_seen = life.last_seen.max(at);
    }
    let read: HashSet<u64> = match trace.nodes[at].outputs.is_empty() {
        true => HashSet::new(),
        false => {
            inputs.iter().flat_map(Value::views).filter(|i| i.end > 0).map(|i| i.storage).collect()
        }
    };
    for view in trace.nodes[at]
        .outputs
        .iter()
        .flat_map(Value::views)
        .filter(|v| v.end > 0 && !read.contains(&v.storage))
    {
        if let Some(&id) = current.get(&view.storage) {
            let life = &mut all[id as usize];
            match life.maker {
                // The storage is twice among its own outputs.
                Some(maker) if maker == at => continue,
                // An enclosing call also outputs it, and no call has used it since: this call makes
                // it.
                Some(maker) if life.last_read.is_none() && trace.inside(at, maker) => {
                    life.maker = Some(at);
                    continue;
                }
                _ => {}
            }
        }
        add(view, Some(at), all, current);
    }
    trace.nodes[at].inputs = inputs;
}

/// In a trace of a run on the CPU alone, the CPU counts as the device.
fn on_host_only(trace: &mut Trace) {
    let views = |n: &super::parse::Node| {
        n.inputs.iter().chain(&n.outputs).flat_map(Value::views).any(|v| !v.host)
    };
    if trace.nodes.iter().any(views) {
        return;
    }
    for node in &mut trace.nodes {
        for view in node.inputs.iter_mut().chain(&mut node.outputs).flat_map(Value::views_mut) {
            view.host = false;
        }
    }
    trace.notes.push("recorded on the CPU: operators and their scratch are the CPU's, not a GPU's; record on a GPU where you can".into());
}
