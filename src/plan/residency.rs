//! When each tensor is resident on the device, and what that loads every slot with.
//!
//! Program order is cut into *slots*: slot 2i is the moment before operator i, in which recomputes
//! for it run; slot 2i + 1 is operator i. A tensor that is resident in a slot has bytes of its own
//! for all of it, at any speed of link and compute, so what fits here fits at any timing. A *gap*
//! lies between two successive uses of a tensor; the last gap of a tensor that nothing generates
//! goes round the end of the iteration. A use is one of an operator (odd slot), or of a recompute
//! alone (even slot): then the tensor may be gone before the operator itself runs.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::gaps::Gaps;
use super::load::Load;
use crate::contract::Latency;
use crate::job::{Graph, Replay};
use crate::units::{OpId, TensorId};

/// When a swapped tensor leaves and comes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Swap {
    /// The last slot in which it may still be leaving.
    pub out_until: u32,
    /// The first slot in which it may be coming back; even.
    pub back_from: u32,
    /// The place (operators before it) at which it leaves.
    pub out_place: u32,
    /// The instants at which its copies are meant to begin, which order the queues.
    pub starts: (u64, u64),
    /// Chosen although an operator may have to wait for it.
    pub passive: bool,
}

/// What happens to a tensor between two uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gap {
    /// It stays.
    Keep,
    /// It leaves and comes back over the link.
    Swap(Swap),
    /// It is dropped, and recomputed for its next use.
    Recompute,
}

/// One tensor's uses, and what is decided for the gaps between them.
#[derive(Clone, Debug)]
pub struct Lifetime {
    /// Rounded to blocks.
    pub bytes: u64,
    /// The slots in which it is used, ascending: odd ones by operators, even ones by recomputes.
    pub uses: Arc<Vec<u32>>,
    /// Operators that write it, in order.
    pub writes: Arc<Vec<u32>>,
    /// One for each pair of successive uses; for a long-lived tensor one more, round the end.
    pub gaps: Gaps,
    /// Nothing generates it.
    pub long_lived: bool,
}

impl Lifetime {
    /// Whether nothing writes it from the iteration's start until a gap begins.
    #[must_use]
    pub fn unwritten_before(&self, gap: usize) -> bool {
        self.writes.first().is_none_or(|write| 2 * write + 1 > self.uses[gap])
    }
}

/// What operators touch, side by side: planning asks for little else of them, and often.
#[derive(Debug)]
struct Touched {
    /// What is read, with repetitions, then what is generated, then what is updated, operator by
    /// operator.
    tensors: Vec<TensorId>,
    /// By operator, where each of these begins; and the end.
    at: Vec<[u32; 3]>,
    /// By operator: its workspace, and once each what it generates.
    scratch: Vec<u64>,
}

impl Touched {
    fn new(graph: &Graph) -> Self {
        let mut touched = Self { tensors: Vec::new(), at: Vec::new(), scratch: Vec::new() };
        for operator in &graph.operators {
            let mut at = [0; 3];
            for (list, at) in at.iter_mut().enumerate() {
                *at = u32::try_from(touched.tensors.len()).unwrap_or(u32::MAX);
                match list {
                    0 => touched.tensors.extend(operator.reads().map(|o| o.tensor)),
                    1 => touched.tensors.extend(operator.generates().map(|o| o.tensor)),
                    _ => touched.tensors.extend(operator.updates().map(|o| o.tensor)),
                }
            }
            touched.at.push(at);
            let mut generated = touched.tensors[at[1] as usize..at[2] as usize].to_vec();
            generated.sort_unstable();
            generated.dedup();
            let bytes: u64 =
                generated.into_iter().map(|t| graph.tensor(t).bytes.in_blocks().0).sum();
            touched.scratch.push(operator.workspace.in_blocks().0 + bytes);
        }
        touched.at.push([u32::try_from(touched.tensors.len()).unwrap_or(u32::MAX); 3]);
        touched
    }

    fn list(&self, id: OpId, list: usize) -> &[TensorId] {
        let at = &self.at[id.index()];
        let until = at.get(list + 1).copied().unwrap_or(self.at[id.index() + 1][0]);
        &self.tensors[at[list] as usize..until as usize]
    }
}

/// A recompute of one tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    /// The operators that run again, in order.
    pub operators: Vec<OpId>,
    /// Chains of one slot run by turn, then by tensor, but after those that make what they read.
    pub turn: usize,
}

/// The residencies of a job's tensors, as decided so far.
#[derive(Clone, Debug)]
pub struct Residencies<'a> {
    /// The job.
    pub graph: &'a Graph,
    /// By tensor.
    pub lifetimes: Vec<Lifetime>,
    /// Resident bytes and scratch by slot.
    pub load: Load,
    /// Scratch of recomputes by place, the largest of them.
    pub scratch: Vec<u64>,
    /// Recomputes by slot and tensor.
    pub chains: BTreeMap<(u32, TensorId), Chain>,
    /// What another tensor's chain makes and keeps along with it: by slot and tensor, that other.
    pub shared: BTreeMap<(u32, TensorId), TensorId>,
    touched: Arc<Touched>,
}

impl<'a> Residencies<'a> {
    /// Everything kept to its last use.
    #[must_use]
    pub fn new(graph: &'a Graph) -> Self {
        let n = graph.operators.len();
        let generators = graph.generators();
        let mut lifetimes: Vec<Lifetime> = graph
            .tensors
            .iter()
            .zip(&generators)
            .map(|(t, g)| Lifetime {
                bytes: t.bytes.in_blocks().0,
                uses: Arc::default(),
                writes: Arc::default(),
                gaps: Gaps::default(),
                long_lived: g.is_none(),
            })
            .collect();
        let mut change = vec![0i64; 2 * n + 2];
        let add = |change: &mut Vec<i64>, from: usize, until: usize, bytes: u64| {
            // Sums stay below 2^62, which the graph's maker checked.
            let bytes = bytes.cast_signed();
            change[from] += bytes;
            change[until] -= bytes;
        };
        for (index, operator) in graph.operators.iter().enumerate() {
            let index32 = u32::try_from(index).unwrap_or(u32::MAX);
            add(&mut change, 2 * index + 1, 2 * index + 2, operator.workspace.in_blocks().0);
            for tensor in operator.touches() {
                Arc::make_mut(&mut lifetimes[tensor.index()].uses).push(2 * index32 + 1);
            }
            for operand in operator.writes() {
                let writes = Arc::make_mut(&mut lifetimes[operand.tensor.index()].writes);
                if writes.last() != Some(&index32) {
                    writes.push(index32);
                }
            }
        }
        for lifetime in &mut lifetimes {
            let gaps = (lifetime.uses.len() + usize::from(lifetime.long_lived)).saturating_sub(1);
            lifetime.gaps = Gaps::kept(if lifetime.uses.is_empty() { 0 } else { gaps });
            match (lifetime.long_lived, lifetime.uses.first(), lifetime.uses.last()) {
                (true, _, _) => add(&mut change, 0, 2 * n + 1, lifetime.bytes),
                (false, Some(&first), Some(&last)) => {
                    add(&mut change, first as usize, last as usize + 1, lifetime.bytes)
                }
                _ => {}
            }
        }
        let mut level = 0i64;
        let bytes: Vec<u64> = change[..=2 * n]
            .iter()
            .map(|c| {
                level += c;
                level.cast_unsigned()
            })
            .collect();
        Self {
            graph,
            lifetimes,
            load: Load::new(&bytes),
            scratch: vec![0; n + 1],
            chains: BTreeMap::new(),
            shared: BTreeMap::new(),
            touched: Arc::new(Touched::new(graph)),
        }
    }

    /// What an operator reads, with repetitions.
    #[must_use]
    pub fn reads(&self, id: OpId) -> &[TensorId] {
        self.touched.list(id, 0)
    }

    /// What it generates.
    #[must_use]
    pub fn generates(&self, id: OpId) -> &[TensorId] {
        self.touched.list(id, 1)
    }

    /// What it writes in place.
    #[must_use]
    pub fn updates(&self, id: OpId) -> &[TensorId] {
        self.touched.list(id, 2)
    }

    /// Its workspace and what it generates, but for one tensor.
    #[must_use]
    pub fn scratch_without(&self, id: OpId, tensor: TensorId) -> u64 {
        let own =
            if self.generates(id).contains(&tensor) { self.lifetime(tensor).bytes } else { 0 };
        self.touched.scratch[id.index()] - own
    }

    /// The lifetime of a tensor.
    #[must_use]
    pub fn lifetime(&self, tensor: TensorId) -> &Lifetime {
        &self.lifetimes[tensor.index()]
    }

    /// What is decided for a gap.
    #[must_use]
    pub fn gap(&self, tensor: TensorId, gap: usize) -> Gap {
        self.lifetime(tensor).gaps[gap]
    }

    /// The slots of the uses at the ends of a gap, and whether it goes round the end of the
    /// iteration.
    #[must_use]
    pub fn ends(&self, tensor: TensorId, gap: usize) -> (u32, u32, bool) {
        let uses = &self.lifetime(tensor).uses;
        if gap + 1 < uses.len() {
            (uses[gap], uses[gap + 1], false)
        } else {
            (uses[gap], uses[0], true)
        }
    }

    /// The operators at the ends of a gap, and whether it goes round the end of the iteration.
    #[must_use]
    pub fn operators(&self, tensor: TensorId, gap: usize) -> (u32, u32, bool) {
        let (a, b, round) = self.ends(tensor, gap);
        (a / 2, b / 2, round)
    }

    /// Visits every swap, tensor by tensor.
    pub fn each_swap(&self, mut visit: impl FnMut(TensorId, usize, Swap)) {
        for (index, lifetime) in self.lifetimes.iter().enumerate() {
            for (gap, decision) in lifetime.gaps.others() {
                if let Gap::Swap(swap) = decision {
                    visit(TensorId::from_index(index), gap, swap);
                }
            }
        }
    }

    /// Every gap of every tensor that is not kept, with what is decided for it.
    pub fn decisions(&self) -> impl Iterator<Item = (TensorId, usize, Gap)> {
        self.lifetimes.iter().enumerate().flat_map(|(index, lifetime)| {
            lifetime
                .gaps
                .others()
                .map(move |(gap, decision)| (TensorId::from_index(index), gap, decision))
        })
    }

    /// The slots in which the tensor is away under a decision: one or two half-open ranges.
    #[inline]
    #[must_use]
    pub fn away(&self, tensor: TensorId, gap: usize, decision: Gap) -> [(usize, usize); 2] {
        let (a, b, round) = self.ends(tensor, gap);
        match decision {
            Gap::Keep => [(0, 0), (0, 0)],
            Gap::Swap(w) if round => {
                [(w.out_until as usize + 1, self.load.slots()), (0, w.back_from as usize)]
            }
            Gap::Swap(w) => [(w.out_until as usize + 1, w.back_from as usize), (0, 0)],
            Gap::Recompute => [(a as usize + 1, (b & !1) as usize), (0, 0)],
        }
    }

    /// The swap of this gap that is away longest: it leaves at once and comes back at the last
    /// moment.
    #[must_use]
    pub fn tightest(&self, tensor: TensorId, gap: usize) -> Swap {
        let (a, b, _) = self.ends(tensor, gap);
        let (out_place, back_from) = (a.div_ceil(2), b & !1);
        Swap { out_until: a, back_from, out_place, starts: (0, 0), passive: false }
    }

    /// The first place at which a swap of this gap may begin to copy the tensor out: steps may
    /// still read it then, but none writes it any more. Not for what leaves without a copy.
    #[must_use]
    pub fn leaves_from(&self, tensor: TensorId, gap: usize) -> u32 {
        let lifetime = self.lifetime(tensor);
        let written = |of: u32| of % 2 == 1 && lifetime.writes.binary_search(&(of / 2)).is_ok();
        let mut first = gap;
        while !written(lifetime.uses[first]) {
            match first.checked_sub(1) {
                Some(before) if lifetime.gaps[before] == Gap::Keep => first = before,
                // It is there from the start of the iteration.
                None if lifetime.gaps[lifetime.gaps.len() - 1] == Gap::Keep => return 0,
                _ => break,
            }
        }
        let (from, until) = (lifetime.uses[first], lifetime.uses[gap]);
        if first == gap { until.div_ceil(2) } else { from / 2 + 1 }
    }

    /// The place at which a swapped tensor begins to leave: choices made since may have cut off
    /// what was before its last use.
    #[must_use]
    pub fn out_place(&self, tensor: TensorId, gap: usize, swap: &Swap) -> u32 {
        let last = self.lifetime(tensor).uses[gap].div_ceil(2);
        if swap.out_place >= last {
            swap.out_place
        } else {
            swap.out_place.max(self.leaves_from(tensor, gap))
        }
    }

    /// Whether deciding `decision` frees bytes in `slot`.
    #[must_use]
    pub fn relieves(&self, tensor: TensorId, gap: usize, decision: Gap, slot: usize) -> bool {
        self.away(tensor, gap, decision).iter().any(|&(a, b)| a <= slot && slot < b)
    }

    /// How long all recomputes take, in nanoseconds.
    #[must_use]
    pub fn made_again(&self, latencies: &[Latency]) -> u64 {
        let all = self.chains.values().flat_map(|chain| &chain.operators);
        all.map(|id| latencies[id.index()].time.0.max(1)).sum()
    }

    /// The gap that ends with the use in slot `until`.
    #[must_use]
    pub fn gap_until(&self, tensor: TensorId, until: u32) -> Option<usize> {
        let gaps = self.lifetime(tensor).gaps.len();
        (0..gaps).rev().find(|&gap| self.ends(tensor, gap).1 == until)
    }

    /// The gap in which `slot` lies: the tensor is neither used nor made there.
    #[must_use]
    pub fn gap_over(&self, tensor: TensorId, slot: u32) -> Option<usize> {
        let lifetime = self.lifetime(tensor);
        let before = lifetime.uses.partition_point(|&u| u < slot);
        if lifetime.uses.get(before) == Some(&slot) {
            return None;
        }
        let gap = match before.checked_sub(1) {
            Some(gap) => gap,
            None if lifetime.long_lived => lifetime.gaps.len().checked_sub(1)?,
            None => return None,
        };
        if gap >= lifetime.gaps.len() {
            return None;
        }
        // Where the swap that is away longest is.
        let (a, b, round) = self.ends(tensor, gap);
        let (gone, back) = (slot > a && (slot as usize) < self.load.slots(), slot < b & !1);
        (if round { gone || back } else { gone && back }).then_some(gap)
    }

    /// Changes the decision of a gap.
    pub fn decide(&mut self, tensor: TensorId, gap: usize, decision: Gap) {
        let lifetime = self.lifetime(tensor);
        let (bytes, before) = (lifetime.bytes, lifetime.gaps[gap]);
        if before == decision {
            return;
        }
        for (old, new) in
            self.away(tensor, gap, before).into_iter().zip(self.away(tensor, gap, decision))
        {
            if old.0 < old.1 && new.0 < new.1 && old.0 < new.1 && new.0 < old.1 {
                // They overlap: only the ends change.
                self.load.add(old.0, new.0, bytes);
                self.load.subtract(new.0, old.0, bytes);
                self.load.add(new.1, old.1, bytes);
                self.load.subtract(old.1, new.1, bytes);
            } else {
                self.load.add(old.0, old.1, bytes);
                self.load.subtract(new.0, new.1, bytes);
            }
        }
        self.lifetimes[tensor.index()].gaps.set(gap, decision);
    }

    /// Whether the tensor is surely there in a slot: a swapped one counts as gone as soon as it may
    /// leave.
    #[must_use]
    pub fn held(&self, tensor: TensorId, slot: u32) -> bool {
        let lifetime = self.lifetime(tensor);
        let (Some(&first), Some(&last)) = (lifetime.uses.first(), lifetime.uses.last()) else {
            return lifetime.long_lived;
        };
        if !lifetime.long_lived && (slot < first || slot > last) {
            return false;
        }
        let gone = |gap: usize| {
            let decision = match lifetime.gaps[gap] {
                Gap::Swap(swap) => Gap::Swap(Swap { out_until: lifetime.uses[gap], ..swap }),
                other => other,
            };
            self.relieves(tensor, gap, decision, slot as usize)
        };
        let before = lifetime.uses.partition_point(|&u| u <= slot);
        let inside = before.checked_sub(1).filter(|&g| g < lifetime.gaps.len());
        let round = lifetime.long_lived.then(|| lifetime.gaps.len() - 1);
        !inside.into_iter().chain(round).any(gone)
    }

    /// Whether the host holds the tensor's version when the gap starts, so that leaving costs no
    /// copy.
    #[must_use]
    pub fn clean(&self, tensor: TensorId, gap: usize) -> bool {
        let lifetime = self.lifetime(tensor);
        let last = lifetime.gaps.len() - 1;
        let here = lifetime.uses[gap];
        let written = lifetime.writes.iter().rev().map(|w| 2 * w + 1).find(|&w| w <= here);
        let swapped = |g: usize| matches!(lifetime.gaps[g], Gap::Swap(_));
        let since = written.unwrap_or(0);
        let round = lifetime.long_lived && swapped(last);
        // What was on the host at the start is right until it is written.
        let from_start = round && written.is_none();
        // A gap that starts at or after the last write and is swapped made the copy, unless a
        // recompute wrote since.
        let before = lifetime.gaps.others().rev().skip_while(|&(g, _)| g >= gap);
        let made = before
            .take_while(|(_, decision)| *decision != Gap::Recompute)
            .any(|(g, _)| lifetime.uses[g] >= since);
        let untouched = lifetime.long_lived && lifetime.writes.is_empty() && gap == last;
        from_start || made || untouched
    }

    /// What an operator needs besides `tensor` to run again: its inputs, without the statistics
    /// that a recompute leaves out.
    pub fn needs(&self, id: OpId, tensor: TensorId) -> impl Iterator<Item = TensorId> {
        self.reads(id).iter().copied().filter(move |&t| t != tensor && !self.left_out(id, t))
    }

    fn left_out(&self, id: OpId, tensor: TensorId) -> bool {
        self.lifetime(tensor).long_lived
            && self.graph.operator(id).replay == Replay::SkipUpdates
            && self.updates(id).contains(&tensor)
    }

    /// The tensor whose chain makes this one in a slot, if one does.
    #[must_use]
    pub fn made_by(&self, slot: u32, tensor: TensorId) -> Option<TensorId> {
        self.shared
            .get(&(slot, tensor))
            .copied()
            .or_else(|| self.chains.contains_key(&(slot, tensor)).then_some(tensor))
    }

    /// Whether a tensor is written after operator `id` and before `slot`.
    #[must_use]
    pub fn rewritten(&self, tensor: TensorId, id: OpId, slot: u32) -> bool {
        let writes = &self.lifetime(tensor).writes;
        writes.get(writes.partition_point(|&w| w <= id.0)).is_some_and(|&w| 2 * w + 1 < slot)
    }

    /// Adds a use in a slot in which the tensor is held, splitting the gap it falls into.
    pub fn use_at(&mut self, tensor: TensorId, slot: u32) {
        let lifetime = &mut self.lifetimes[tensor.index()];
        let Err(at) = lifetime.uses.binary_search(&slot) else { return };
        let last = lifetime.uses.len();
        Arc::make_mut(&mut lifetime.uses).insert(at, slot);
        let gaps = &mut lifetime.gaps;
        if last == 0 {
            if lifetime.long_lived {
                gaps.insert(0);
            }
        } else if at == last {
            // After the last use of a long-lived tensor: kept up to here; the round gap starts
            // here.
            gaps.insert(at - 1);
        } else {
            // What brings it lies before: the part after is kept. Before the first use, that is the
            // round gap.
            gaps.insert(at);
        }
    }

    /// Adds a use after the last one of a tensor that dies with it: it lives on until then.
    pub fn live_on(&mut self, tensor: TensorId, slot: u32) {
        let lifetime = &mut self.lifetimes[tensor.index()];
        let (last, bytes) = (lifetime.uses.last().copied().unwrap_or(slot), lifetime.bytes);
        Arc::make_mut(&mut lifetime.uses).push(slot);
        lifetime.gaps.insert(lifetime.gaps.len());
        self.load.add(last as usize + 1, slot as usize + 1, bytes);
    }
}
