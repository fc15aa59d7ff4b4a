//! Operators that make a gradient and may wait for its update.
//!
//! The gradient of a fully connected layer's weights is a product of what the layer read and of the
//! gradient of what it made. With few samples these are far smaller than it: 1.5 MiB and 0.1 MiB in
//! the first such layer of VGG-16 with 8 images, against 392 MiB. So where the update of such a
//! gradient runs late, the gradient is made late too, and until then only what it is made from
//! takes memory.
//!
//! The makers of an update's gradient are a chain: each writes one tensor that only the next one
//! reads, and the last writes the gradient, which only the update reads. For mixed precision these
//! are the product and the conversion after it. Bounds hold for plans that run them at any time
//! from their place in the framework's order on ([`crate::bound`]).
//!
//! Sums, conversions and gradients of embeddings that make a gradient may also run in pieces, in
//! turn with its update ([`in_pieces`], [`super::gradients`]).

use std::collections::{BTreeMap, BTreeSet};

use crate::job::arrange::{row, splittable};
use crate::job::optimizer::is_update;
use crate::job::{Graph, Operator, Role};
use crate::units::{OpId, TensorId};

/// A gradient waits where what it is made from takes at most this part of its bytes. (For language
/// models with a batch of some thousand tokens, what a gradient is made from is larger than it.)
const SMALLER: u64 = 4;

/// The most operators that wait together.
const TOGETHER: usize = 4;

/// By update, the operators that make its gradient and may wait for it, in order.
#[must_use]
pub fn makers(graph: &Graph) -> BTreeMap<OpId, Vec<OpId>> {
    let touched = Touched::new(graph);
    let all = (0..graph.operators.len()).map(OpId::from_index);
    let updates = all.filter(|id| is_update(graph.operator(*id)));
    updates.filter_map(|update| Some((update, touched.makers(graph, update)?))).collect()
}

/// Updates that may run in pieces, each with the operators that make its gradient, in order, and
/// may run in pieces of the same size, so that there is never more than a piece of the gradient nor
/// of what only these operators use. The last one makes the gradient.
#[must_use]
pub fn in_pieces(graph: &Graph) -> Vec<(OpId, Vec<OpId>)> {
    let touched = Touched::new(graph);
    let mut found = Vec::new();
    for update in (0..graph.operators.len()).map(OpId::from_index) {
        if is_update(graph.operator(update))
            && let Ok(elements) = splittable(graph, update)
        {
            let makers = touched.in_pieces(graph, update, elements);
            found.extend((!makers.is_empty()).then_some((update, makers)));
        }
    }
    found
}

/// By operator, whether it is an update, or may wait for one or run in pieces with it.
#[must_use]
pub fn may_wait(graph: &Graph) -> Vec<bool> {
    let mut may: Vec<bool> = graph.operators.iter().map(is_update).collect();
    let in_pieces = in_pieces(graph).into_iter().map(|(_, makers)| makers);
    makers(graph).into_values().chain(in_pieces).flatten().for_each(|id| may[id.index()] = true);
    may
}

/// By tensor, what works on it.
struct Touched {
    /// The first three operators that touch it.
    first: Vec<[Option<OpId>; 3]>,
    /// The last operator that writes it.
    written: Vec<Option<OpId>>,
    /// Operators until which the framework keeps a tensor.
    awaited: BTreeSet<OpId>,
}

impl Touched {
    // In one piece, as `makes`: both searches ask for it.
    #[inline(never)]
    fn new(graph: &Graph) -> Self {
        let mut first = vec![[None; 3]; graph.tensors.len()];
        let mut written = vec![None; graph.tensors.len()];
        for (at, operator) in graph.operators.iter().enumerate() {
            for tensor in operator.touches() {
                let slot = first[tensor.index()].iter_mut().find(|slot| slot.is_none());
                slot.into_iter().for_each(|slot| *slot = Some(OpId::from_index(at)));
            }
            operator.writes().for_each(|o| written[o.tensor.index()] = Some(OpId::from_index(at)));
        }
        let awaited = graph.tensors.iter().filter_map(|tensor| tensor.kept_until).collect();
        Self { first, written, awaited }
    }

    /// The makers of the gradient of an update; `None` where it does not wait.
    fn makers(&self, graph: &Graph, update: OpId) -> Option<Vec<OpId>> {
        let reads = graph.operator(update).reads().map(|o| o.tensor);
        reads.filter(|t| graph.tensor(*t).role == Role::Gradient).find_map(|gradient| {
            let most = graph.tensor(gradient).bytes.0 / SMALLER;
            let mut makers = Vec::new();
            let (mut made, mut next) = (vec![gradient], update);
            while makers.len() < TOGETHER {
                let (maker, tensor) =
                    made.iter().find_map(|t| Some((self.makes(graph, *t, next)?, *t)))?;
                makers.insert(0, maker);
                let operator = graph.operator(maker);
                made = operator.touches();
                made.retain(|t| *t != tensor);
                next = maker;
                if made.iter().map(|t| graph.tensor(*t).bytes.0).sum::<u64>() <= most {
                    return Some(makers);
                }
            }
            None
        })
    }

    /// The operators that make the gradient of an update, in order, and may run in pieces with it.
    fn in_pieces(&self, graph: &Graph, update: OpId, elements: u64) -> Vec<OpId> {
        let (mut makers, mut readers) = (Vec::new(), vec![update]);
        while let Some(reader) = readers.pop() {
            if row(graph.operator(reader)).is_some() {
                continue;
            }
            for tensor in graph.operator(reader).touches() {
                if let Some(maker) = self.makes(graph, tensor, reader)
                    && splittable(graph, maker) == Ok(elements)
                    && is_elementwise_or_small(graph, maker, tensor)
                {
                    let at = makers.partition_point(|other| *other < maker);
                    makers.insert(at, maker);
                    readers.push(maker);
                }
            }
        }
        makers
    }

    /// The operator that generates a tensor and writes nothing else, if `next` alone reads it and
    /// it may run later.
    #[inline(never)]
    fn makes(&self, graph: &Graph, tensor: TensorId, next: OpId) -> Option<OpId> {
        let [Some(maker), Some(reader), None] = self.first[tensor.index()] else { return None };
        let operator = graph.operator(maker);
        let alone = reader == next
            && graph.loss.as_ref().is_none_or(|loss| loss.tensor != tensor)
            && operator.writes().count() == 1
            && operator.generates().any(|o| o.tensor == tensor);
        (alone && self.may_run_later(operator, maker)).then_some(maker)
    }

    /// It draws no random numbers, nothing changes what it reads after it, and the framework keeps
    /// no tensor until it runs.
    fn may_run_later(&self, operator: &Operator, id: OpId) -> bool {
        let same = |tensor: TensorId| self.written[tensor.index()].is_none_or(|last| last <= id);
        !operator.random && !self.awaited.contains(&id) && operator.reads().all(|o| same(o.tensor))
    }
}

/// An operator that makes rows may wait where all that it reads is far smaller than these.
fn is_elementwise_or_small(graph: &Graph, id: OpId, made: TensorId) -> bool {
    let operator = graph.operator(id);
    let bytes = |tensor: TensorId| graph.tensor(tensor).bytes.0;
    let touched: u64 = operator.touches().into_iter().map(bytes).sum();
    row(operator).is_none() || touched - bytes(made) <= bytes(made) / SMALLER
}
