//! The planners `vdnn-all` and `vdnn-conv`: vDNN (Rhu et al., MICRO 2016), its two static policies.
//!
//! What the paper defines (section III-B, "Core Operations And Its Design", and III-C, "vDNN Memory
//! Transfer Policy"; read from others' notes and implementations of it, where headings and the
//! listing of `findPrefetchLayer` are quoted, not from the paper itself):
//! - A layer's input feature maps X are offloaded while its forward runs, by the last layer that
//!   uses them (a reference count settles that at forks). The stream waits for the offload at the
//!   layer's end, then X is released.
//! - `vDNN_all` offloads the X of every feature extraction layer, `vDNN_conv` only that of
//!   convolutions. The classification layers (everything from the first fully connected layer on)
//!   are left alone.
//! - An activation layer works in place: its X is its Y and is not offloaded by it.
//! - Before each layer's backward, `findPrefetchLayer` looks at the layers before it, nearest
//!   first, for one whose X was offloaded and not yet fetched; the search ends with the nearest
//!   convolution, so that nothing comes back far too early. What is found is fetched during that
//!   backward, which ends when the copy has ended.
//! - Nothing is recomputed, and nothing but feature maps leaves. The policies are static: they know
//!   no budget.
//!
//! Here a layer is a forward operator, and its backward starts with the first operator after the
//! forward that uses one of its X. Departures: the engine waits for an offload where its bytes are
//! needed, and for a prefetch where its tensor is used, not at every layer's end. That can only
//! help the paper's planner. Workspaces are those of the graph, so the choice of convolution
//! algorithms (`m`, `p`, and the dynamic policy) has no counterpart. The paper does not treat
//! networks without convolutions: here their matrix multiplications count as convolutions, and they
//! have no classifier. Cost: O(accesses + decisions · slots). If this planner does not meet a
//! budget, the answer is that the budget is infeasible.

use serde::{Deserialize, Serialize};

use super::clock::Clock;
use super::planner::{Decision, Given, Planner};
use super::residency::{Gap, Residencies, Swap};
use crate::job::{Graph, Operator, Phase, Role};
use crate::units::TensorId;

/// `vdnn-all`: the feature maps of all feature extraction layers are swapped out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct All {}

/// `vdnn-conv`: the feature maps of convolutions are swapped out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Conv {}

impl Planner for All {
    fn decide(&self, given: &Given<'_>) -> Decision {
        offload(given, |_, _| true)
    }
}

impl Planner for Conv {
    fn decide(&self, given: &Given<'_>) -> Decision {
        offload(given, |layers, tensor| layers.convolved[tensor.index()])
    }
}

/// A feature map that is offloaded.
struct Offload {
    tensor: TensorId,
    gap: usize,
    /// The layer that uses it last, and the first operator after the forward that uses it.
    layer: u32,
    wanted: u32,
}

/// Decides by the policy, whatever the target.
fn offload(given: &Given<'_>, policy: impl Fn(&Layers, TensorId) -> bool) -> Decision {
    let mut residencies = Residencies::new(given.graph);
    let clock = Clock::nominal(given.latencies);
    let layers = Layers::new(given.graph);
    let saved = saved(&residencies, &layers);
    // For each layer, its offloads and the start of its backward.
    let mut offloads: Vec<Vec<&Offload>> =
        (0..given.graph.operators.len()).map(|_| Vec::new()).collect();
    let mut backward: Vec<Option<u32>> = vec![None; given.graph.operators.len()];
    let mut pinned = given.pinned.0;
    for offload in &saved {
        let start = &mut backward[offload.layer as usize];
        *start = Some(start.map_or(offload.wanted, |b| b.min(offload.wanted)));
        let lifetime = residencies.lifetime(offload.tensor);
        let chosen = offload.layer < layers.classifier && policy(&layers, offload.tensor);
        if chosen && lifetime.bytes <= pinned {
            pinned -= lifetime.bytes;
            offloads[offload.layer as usize].push(offload);
        }
    }
    let fetched = prefetch(&layers, &offloads, &backward);
    for (layer, offloads) in offloads.iter().enumerate() {
        for offload in offloads {
            let last_use = offload.layer;
            let written =
                residencies.lifetime(offload.tensor).writes.iter().rev().find(|&&w| w <= last_use);
            // The copy begins with the layer. If the layer writes the tensor, the layer must end
            // first.
            let out_after = written.map_or(0, |&w| w).max(last_use.saturating_sub(1));
            let back =
                fetched[layer].map_or(offload.wanted, |b| b.min(offload.wanted)).max(last_use + 1);
            let swap = Swap {
                out_until: 2 * last_use + 1,
                back_from: 2 * back,
                out_place: out_after + 1,
                starts: (clock.end(out_after), clock.start(back)),
                passive: false,
            };
            residencies.decide(offload.tensor, offload.gap, Gap::Swap(swap));
        }
    }
    Decision::new(&residencies, given.target)
}

/// For each layer that offloads, the operator before which its feature maps are fetched; `None` if
/// no search finds it.
fn prefetch(
    layers: &Layers,
    offloads: &[Vec<&Offload>],
    backward: &[Option<u32>],
) -> Vec<Option<u32>> {
    let mut fetched: Vec<Option<u32>> = vec![None; offloads.len()];
    for current in (0..offloads.len()).rev() {
        let Some(start) = backward[current] else { continue };
        for before in (0..current).rev() {
            if !offloads[before].is_empty() && fetched[before].is_none() {
                fetched[before] = Some(start);
                break;
            }
            if layers.convolution[before] {
                break;
            }
        }
    }
    fetched
}

/// Feature maps that are used in the forward and after it, sorted by their last layer.
fn saved(residencies: &Residencies<'_>, layers: &Layers) -> Vec<Offload> {
    let mut found = Vec::new();
    for (index, lifetime) in residencies.lifetimes.iter().enumerate() {
        let tensor = TensorId::from_index(index);
        if lifetime.bytes == 0
            || !matches!(residencies.graph.tensor(tensor).role, Role::Activation | Role::Input)
        {
            continue;
        }
        let ends = lifetime
            .uses
            .windows(2)
            .position(|u| layers.forward[u[0] as usize / 2] && !layers.forward[u[1] as usize / 2]);
        let Some(gap) = ends else { continue };
        let (layer, wanted) = (lifetime.uses[gap] / 2, lifetime.uses[gap + 1] / 2);
        // Only inputs. A tensor that a layer makes for its own backward stays.
        if layers.reads(residencies.graph, layer, tensor) {
            found.push(Offload { tensor, gap, layer, wanted });
        }
    }
    found.sort_by_key(|o| (o.layer, o.tensor));
    found
}

/// The forward operators as the paper's layers.
struct Layers {
    forward: Vec<bool>,
    convolution: Vec<bool>,
    /// For each tensor, whether a convolution reads it.
    convolved: Vec<bool>,
    /// The first layer of the classifier.
    classifier: u32,
}

impl Layers {
    fn new(graph: &Graph) -> Self {
        let forward: Vec<bool> =
            graph.operators.iter().map(|o| o.phase == Phase::Forward).collect();
        let kinds = |is: fn(&Operator) -> bool| -> Vec<bool> {
            graph.operators.iter().zip(&forward).map(|(o, &forward)| forward && is(o)).collect()
        };
        let (mut convolution, dense) = (kinds(is_convolution), kinds(is_dense));
        let mut classifier = graph.operators.len();
        match convolution.iter().rposition(|&c| c) {
            Some(last) => {
                classifier = (last..graph.operators.len()).find(|&i| dense[i]).unwrap_or(classifier)
            }
            None => convolution = dense,
        }
        let mut convolved = vec![false; graph.tensors.len()];
        for (operator, _) in graph.operators.iter().zip(&convolution).filter(|(_, c)| **c) {
            for read in operator.reads() {
                convolved[read.tensor.index()] = true;
            }
        }
        Self {
            forward,
            convolution,
            convolved,
            classifier: u32::try_from(classifier).unwrap_or(u32::MAX),
        }
    }

    fn reads(&self, graph: &Graph, layer: u32, tensor: TensorId) -> bool {
        graph.operators[layer as usize].reads().any(|r| r.tensor == tensor)
    }
}

fn is_convolution(operator: &Operator) -> bool {
    operator.kind.contains("conv")
}

fn is_dense(operator: &Operator) -> bool {
    let name = operator.kind.rsplit("::").next().unwrap_or_default();
    matches!(name, "linear" | "addmm" | "mm" | "bmm" | "matmul" | "baddbmm")
}
