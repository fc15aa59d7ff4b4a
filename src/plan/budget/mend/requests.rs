//! The requests of a run with some tensors that stay on the device, and where they need more memory
//! than the budget.

use std::collections::{BTreeMap, BTreeSet};

use crate::job::Graph;
use crate::sim::allocator::replay::Replay;
use crate::sim::allocator::{BlockView, Config, SegmentView, State};
use crate::sim::requests::Request;
use crate::sim::reserved::{Framework, Timeline};
use crate::units::{Bytes, TensorId};

/// How many iterations are replayed. Most plans reserve no more after them.
const ITERATIONS: usize = 3;

/// The requests before the first iteration, and those of each iteration.
pub(super) struct Requests {
    before: Vec<Request>,
    each: Vec<Request>,
    /// By tensor, whether it exists before the iteration.
    old: Vec<bool>,
    bytes: Vec<Bytes>,
}

/// The first request for which the allocator reserves more than the budget.
pub(super) struct Growth {
    /// The id that it gives its block.
    pub request: u32,
    /// Tensors that make room if they stay; empty where that is not enough.
    pub between: Vec<TensorId>,
    /// Otherwise, tensors that make room if they are away; empty where that is not enough.
    pub way: Vec<TensorId>,
}

impl Requests {
    pub fn new(timeline: &Timeline, graph: &Graph) -> Self {
        let before: Vec<Request> = timeline.requests(0).map(|(_, request)| request).collect();
        let each = timeline.requests(1).skip(before.len()).map(|(_, request)| request).collect();
        let old = graph.generators().iter().map(Option::is_none).collect();
        Self { before, each, old, bytes: graph.tensors.iter().map(|t| t.bytes).collect() }
    }

    /// Where the allocator first reserves more than `most` if `kept` stay, and which of the tensors
    /// that `may` stay would make room there, or of those that `leaves` allows to be away at that
    /// request.
    pub fn growth(
        &self,
        framework: &Framework,
        most: u64,
        kept: &BTreeSet<TensorId>,
        may: &BTreeSet<TensorId>,
        leaves: impl Fn(u32, TensorId) -> bool,
    ) -> Option<Growth> {
        let all = self.with(kept);
        let replay = || Replay::new(&framework.config, framework.capacity, None);
        let mut first = replay();
        let at = all.iter().position(|request| {
            first.step(*request);
            first.allocator().stats().reserved.0 > most
        })?;
        let Request::Allocate { id: request, bytes, .. } = all[at] else { return None };
        let mut again = replay();
        let mut live = BTreeSet::new();
        for request in &all[..at] {
            again.step(*request);
            match request {
                Request::Allocate { id, .. } => live.insert(*id),
                Request::Free { id } => live.remove(id),
                Request::EmptyCache => true,
            };
        }
        // Which pool serves the request is seen from where its block came to lie.
        let address = first.block(request).map_or(0, |block| block.address);
        let segments = first.allocator().segments();
        let holds = |s: &&SegmentView| s.blocks.iter().any(|b| b.address == address);
        let pool = segments.iter().find(holds).map_or(0, |s| s.pool);
        let holders: BTreeMap<u64, u32> =
            live.iter().filter_map(|id| Some((again.block(*id)?.address, *id))).collect();
        let left = most.saturating_sub(again.allocator().stats().reserved.0);
        let page = Config::default().large_segment.0;
        let held = |b: &BlockView| match b.state {
            State::Used => Some(holders.get(&b.address).copied().unwrap_or(u32::MAX)),
            _ => None,
        };
        let blocks = |segment: &SegmentView| {
            let grows = segment.growing.then_some((left / page * page, None));
            segment.blocks.iter().map(|b| (b.bytes.0, held(b))).chain(grows).collect()
        };
        let segments = again.allocator().segments();
        let segments: Vec<Vec<(u64, Option<u32>)>> =
            segments.iter().filter(|s| s.pool == pool && pool > 0).map(blocks).collect();
        let best = |may: &dyn Fn(u32) -> bool| {
            let found = segments.iter().filter_map(|blocks| cheapest(blocks, bytes.0, may));
            found.min_by_key(|found| found.0).map_or_else(Vec::new, |found| found.1)
        };
        let between = best(&|id| may.contains(&TensorId(id)) && !kept.contains(&TensorId(id)));
        if !between.is_empty() {
            return Some(Growth { request, between, way: Vec::new() });
        }
        let way = best(&|id| (id as usize) < self.old.len() && leaves(request, TensorId(id)));
        Some(Growth { request, between, way })
    }

    /// The requests of a few iterations with tensors that stay.
    fn with(&self, kept: &BTreeSet<TensorId>) -> Vec<Request> {
        let mut each = Vec::with_capacity(self.each.len());
        let stays = |id: u32| kept.contains(&TensorId(id));
        // What the iteration makes still begins and ends once.
        let mut ends: BTreeMap<u32, usize> = BTreeMap::new();
        for (at, request) in self.each.iter().enumerate() {
            if let Request::Free { id } = request
                && stays(*id)
            {
                ends.insert(*id, at);
            }
        }
        let mut begun = BTreeSet::new();
        for (at, request) in self.each.iter().enumerate() {
            let counts = match request {
                Request::Allocate { id, .. } if stays(*id) => {
                    !self.old[*id as usize] && begun.insert(*id)
                }
                Request::Free { id } if stays(*id) => {
                    !self.old[*id as usize] && ends.get(id) == Some(&at)
                }
                _ => true,
            };
            if counts {
                each.push(*request);
            }
        }
        let mut all: Vec<Request> = Vec::with_capacity(self.before.len() + 3 * each.len());
        // The first block and the library's workspaces, then what stays.
        let is_tensor = |id: u32| (id as usize) < self.old.len();
        let (tensors, others): (Vec<Request>, Vec<Request>) = self
            .before
            .iter()
            .partition(|request| matches!(request, Request::Allocate { id, .. } if is_tensor(*id)));
        all.extend(others);
        for tensor in kept.iter().filter(|t| self.old[t.index()]) {
            let bytes = self.bytes[tensor.index()];
            all.push(Request::Allocate { id: tensor.0, bytes, stream: 0 });
        }
        let leaves =
            |request: &Request| !matches!(request, Request::Allocate { id, .. } if stays(*id));
        all.extend(tensors.into_iter().filter(leaves));
        for _ in 0..ITERATIONS {
            all.extend_from_slice(&each);
        }
        all
    }
}

/// The adjacent blocks with room for `bytes` in which the fewest bytes are held, all by ids that
/// `may` go, and these.
fn cheapest(
    blocks: &[(u64, Option<u32>)],
    bytes: u64,
    may: impl Fn(u32) -> bool,
) -> Option<(u64, Vec<TensorId>)> {
    let mut best: Option<(u64, usize, usize)> = None;
    let (mut from, mut until, mut room, mut held) = (0, 0, 0, 0);
    while from < blocks.len() {
        while until < blocks.len() && room < bytes && blocks[until].1.is_none_or(&may) {
            room += blocks[until].0;
            held += if blocks[until].1.is_some() { blocks[until].0 } else { 0 };
            until += 1;
        }
        if room >= bytes {
            if best.is_none_or(|best| held < best.0) {
                best = Some((held, from, until));
            }
            room -= blocks[from].0;
            held -= if blocks[from].1.is_some() { blocks[from].0 } else { 0 };
            from += 1;
        } else {
            // What lies here stays, or nothing is left.
            (from, until, room, held) = (until + 1, until + 1, 0, 0);
        }
    }
    let (held, from, until) = best?;
    Some((held, blocks[from..until].iter().filter_map(|b| b.1.map(TensorId)).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_run_with_the_fewest_bytes_in_the_way_is_found() {
        let blocks =
            [(10, Some(1)), (5, None), (20, Some(2)), (30, None), (4, Some(3)), (30, None)];
        let ids = |of: &[u32]| of.iter().map(|id| TensorId(*id)).collect::<Vec<_>>();
        assert_eq!(cheapest(&blocks, 60, |_| true), Some((4, ids(&[3]))));
        // What may not stay ends every run.
        assert_eq!(cheapest(&blocks, 60, |id| id != 3), Some((30, ids(&[1, 2]))));
        assert_eq!(cheapest(&blocks, 60, |id| id == 1), None);
        assert_eq!(cheapest(&blocks, 30, |_| false), Some((0, ids(&[]))));
        assert_eq!(cheapest(&blocks, 99, |_| true), Some((34, ids(&[1, 2, 3]))));
        assert_eq!(cheapest(&blocks, 100, |_| true), None);
    }

    #[test]
    fn what_stays_is_requested_once() {
        let allocate = |id| Request::Allocate { id, bytes: Bytes(1 << 20), stream: 0 };
        let free = |id| Request::Free { id };
        // Tensor 0 is there first, leaves and comes back; 1 is made, leaves and comes back; 2 is
        // the library's.
        let requests = Requests {
            before: vec![allocate(2), allocate(0)],
            each: vec![allocate(1), free(0), free(1), allocate(1), allocate(0), free(1)],
            old: vec![true, false],
            bytes: vec![Bytes(1 << 20); 2],
        };
        let with = |kept: &[u32]| requests.with(&kept.iter().map(|t| TensorId(*t)).collect());
        assert_eq!(with(&[]).len(), 2 + ITERATIONS * 6);
        let all = with(&[0, 1]);
        assert_eq!(all[..4], [allocate(2), allocate(0), allocate(1), free(1)]);
        assert_eq!(all.len(), 2 + ITERATIONS * 2);
    }
}
