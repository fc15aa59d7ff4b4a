//! Chooses which calls become operators.
//!
//! A call becomes an operator if its declared outputs include everything that is made inside it and
//! read after it. Otherwise its children are considered, except where the call itself allocates or
//! writes something. The outermost such call is chosen. A call without effect on device memory is
//! dropped with all that it contains. Calls are classified by their effect, never by name:
//! `aten::to` may do nothing or copy.

use crate::units::id32;
use std::collections::HashSet;

use super::names::Names;
use super::parse::{Node, Trace};
use super::storage::Life;
use super::value::{Value, View};

/// In-place by their schema, but they change a tensor's metadata and not its data.
const METADATA: [&str; 15] = [
    "aten::_resize_output_",
    "aten::as_strided_",
    "aten::detach_",
    "aten::rename_",
    "aten::requires_grad_",
    "aten::resize_",
    "aten::resize_as_",
    "aten::set_",
    "aten::squeeze_",
    "aten::swapaxes_",
    "aten::swapdims_",
    "aten::t_",
    "aten::transpose_",
    "aten::unsqueeze_",
    "aten::retain_grad_",
];

/// Device views that a call itself writes in place, and whether its schema leaves that out.
pub(super) fn writes(node: &Node) -> Vec<(&View, bool)> {
    let Some(signature) = &node.signature else { return Vec::new() };
    if METADATA.contains(&node.name.as_str()) {
        return Vec::new();
    }
    let mut all = Vec::new();
    for (value, (name, written)) in node.inputs.iter().zip(&signature.arguments) {
        let statistics = matches!(name.as_str(), "running_mean" | "running_var");
        if *written || (statistics && updates_statistics(node)) {
            all.extend(value.views().filter(|v| !v.host && v.end > 0).map(|v| (v, statistics)));
        }
    }
    all
}

/// Whether a normalisation updates its running statistics, which most schemas don't say.
fn updates_statistics(node: &Node) -> bool {
    let Some(signature) = &node.signature else { return false };
    if node.name.contains("backward") {
        return false;
    }
    if node.name.starts_with("aten::batch_norm_gather_stats")
        || node.name == "aten::batch_norm_update_stats"
    {
        return true;
    }
    let flag =
        ["training", "train", "use_input_stats"].iter().find_map(|name| signature.position(name));
    flag.is_some_and(|at| matches!(node.inputs.get(at), Some(Value::Bool(true))))
}

/// The lives that each call declares as results.
pub(super) struct Declared {
    /// Sorted, one range for each call.
    lives: Vec<u32>,
    ends: Vec<usize>,
}

impl Declared {
    pub(super) fn new(trace: &Trace) -> Self {
        let (mut lives, mut ends) = (Vec::new(), Vec::with_capacity(trace.nodes.len()));
        for node in &trace.nodes {
            let from = lives.len();
            lives.extend(
                node.outputs.iter().flat_map(Value::views).filter(|v| v.end > 0).map(|v| v.life),
            );
            lives[from..].sort_unstable();
            ends.push(lives.len());
        }
        Self { lives, ends }
    }

    pub(super) fn has(&self, node: usize, life: u32) -> bool {
        let from = if node == 0 { 0 } else { self.ends[node - 1] };
        self.lives[from..self.ends[node]].binary_search(&life).is_ok()
    }
}

/// The effect of a call.
#[derive(Clone, Copy, Default)]
struct Effect {
    /// It makes a storage that it returns or that is read after it.
    makes: bool,
    /// It makes a storage that is read after it and does not return it.
    undeclared: bool,
    /// It writes a storage that existed before it.
    writes: bool,
    /// It allocates a result itself.
    allocates: bool,
}

/// The positions of the calls that become operators, in order.
pub(super) fn choose(
    trace: &Trace,
    lives: &[Life],
    names: &Names,
    declared: &Declared,
) -> Vec<usize> {
    let effects = effects(trace, lives, declared);
    let mut chosen = Vec::new();
    let mut covered = vec![false; trace.nodes.len()];
    for at in 0..trace.nodes.len() {
        let node = &trace.nodes[at];
        if node.parent != at && covered[node.parent] {
            covered[at] = true;
            continue;
        }
        if node.signature.is_none() || !names.context[at].included {
            continue;
        }
        let effect = effects[at];
        covered[at] = true;
        if !effect.makes && !effect.writes {
            continue;
        }
        if !effect.undeclared || effect.allocates || writes_itself(trace, at) {
            chosen.push(at);
        } else {
            covered[at] = false;
        }
    }
    chosen
}

fn effects(trace: &Trace, lives: &[Life], declared: &Declared) -> Vec<Effect> {
    let mut effects = vec![Effect::default(); trace.nodes.len()];
    for (id, life) in lives.iter().enumerate().filter(|(_, l)| !l.host) {
        let Some(maker) = life.maker else { continue };
        effects[maker].allocates = true;
        for at in trace.around(maker) {
            let node = &trace.nodes[at];
            let escapes = life.last_read.is_some_and(|read| read > node.end);
            let declared = declared.has(at, id32(id));
            effects[at].makes |= escapes || declared;
            effects[at].undeclared |= escapes && !declared;
            if !escapes && !declared {
                break;
            }
        }
    }
    for (writer, node) in trace.nodes.iter().enumerate() {
        for (view, _) in writes(node) {
            for at in trace.around(writer) {
                if lives[view.life as usize].maker.is_some_and(|maker| trace.inside(maker, at)) {
                    break;
                }
                effects[at].writes = true;
            }
        }
    }
    effects
}

/// Whether a call writes a storage that no call inside it writes.
fn writes_itself(trace: &Trace, at: usize) -> bool {
    let inside = (at + 1..=trace.nodes[at].end).filter(|&n| trace.inside(n, at));
    let by_children: HashSet<u32> =
        inside.flat_map(|n| writes(&trace.nodes[n])).map(|(v, _)| v.life).collect();
    writes(&trace.nodes[at]).iter().any(|(view, _)| !by_children.contains(&view.life))
}
