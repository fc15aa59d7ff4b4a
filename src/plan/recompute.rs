//! Recomputes that need other recomputes: what must run again, and what must come back early, to
//! recompute a tensor.
//!
//! If an operator's inputs are gone, they are recomputed too, up to [`Reach::depth`]. So a run of
//! cheap operators (normalisation, activation, concatenation, dropout) is dropped as a whole and
//! recomputed once, from the tensors that are kept. A tensor that is recomputed for another one
//! stays for its own next use if the peak allows. A swapped input comes back for a recompute.
//!
//! Sources: Chen et al., "Training deep nets with sublinear memory cost" (segments); Kirisame et
//! al., "Dynamic tensor rematerialization" (cost of a tensor with its evicted neighbourhood); Peng
//! et al., "Capuchin" (MSPS, chains).

use super::residency::{Chain, Gap, Residencies, Swap};
use crate::contract::Latency;
use crate::job::Replay;
use crate::units::{OpId, TensorId};

/// How far a recompute may go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reach {
    /// The most tensors that one recompute may make or bring back besides its own. With 0 every
    /// input must be on the device.
    pub depth: usize,
    /// Whether other outputs of a recompute are kept if they would be recomputed later.
    pub share: bool,
}

impl Reach {
    /// Recomputes from inputs on the device only (TENSILE's never-released accesses).
    pub const DIRECT: Self = Self { depth: 0, share: false };
}

/// One tensor of a recompute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// Recomputed by the first `usize` of the operators that write it.
    Made(TensorId, usize),
    /// Swapped in at the end of this gap, and kept to its next use.
    Fetched(TensorId, usize),
    /// Kept from an earlier slot, in which another tensor's chain generates it.
    Shared(TensorId, u32, TensorId),
}

/// Everything that a recompute does. The last part makes the tensor itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recompute {
    /// The parts, in order.
    pub parts: Vec<Part>,
    /// The sum of the operators' times.
    pub cost: u64,
    /// Bytes that the slot holds in addition while it runs.
    pub extra: u64,
}

/// Finds out what recomputes need.
pub struct Recomputer<'b, 'a> {
    residencies: &'b Residencies<'a>,
    latencies: &'b [Latency],
    reach: Reach,
    slot: u32,
    target: TensorId,
    /// Whether other chains in the slot may read the target.
    wanted_here: bool,
    visiting: Vec<TensorId>,
    parts: Vec<Part>,
    cost: u64,
    extra: u64,
    scratch: u64,
}

impl Residencies<'_> {
    /// The recompute that makes `tensor` at the end of `gap`; `None` if that is impossible or too
    /// deep.
    #[must_use]
    pub fn recompute_of(
        &self,
        latencies: &[Latency],
        tensor: TensorId,
        gap: usize,
        reach: Reach,
    ) -> Option<Recompute> {
        let mut recomputer = Recomputer::new(self, latencies, reach);
        let cost = recomputer.cost(tensor, gap)?;
        Some(Recompute { parts: recomputer.parts, cost, extra: recomputer.extra })
    }

    /// Decides to recompute in a gap. A tensor that is made stays for its own next use if the load
    /// is below `limit`.
    pub fn apply(
        &mut self,
        tensor: TensorId,
        gap: usize,
        recompute: Recompute,
        limit: u64,
        reach: Reach,
    ) {
        let slot = self.ends(tensor, gap).1 & !1;
        let place = slot as usize / 2;
        let mut scratch = self.scratch[place];
        let last = recompute.parts.len() - 1;
        let mut reads = Vec::new();
        for (index, part) in recompute.parts.into_iter().enumerate() {
            match part {
                Part::Fetched(fetched, gap) => {
                    if let Gap::Swap(w) = self.gap(fetched, gap) {
                        self.decide(
                            fetched,
                            gap,
                            Gap::Swap(Swap { back_from: w.back_from.min(slot), ..w }),
                        );
                        self.use_at(fetched, slot);
                    }
                }
                Part::Shared(tensor, at, maker) => {
                    self.use_at(tensor, at);
                    self.decide(tensor, gap, Gap::Recompute);
                    self.shared.insert((at, tensor), maker);
                }
                // An earlier part kept this one as well.
                Part::Made(made, _) if index != last && self.made_by(slot, made).is_some() => {}
                Part::Made(made, count) => {
                    let operators: Vec<OpId> =
                        self.lifetime(made).writes[..count].iter().map(|&w| OpId(w)).collect();
                    scratch = scratch.max(self.chain_scratch(made, &operators));
                    if index == last {
                        self.decide(made, gap, Gap::Recompute);
                    } else {
                        self.make_in_passing(made, slot, limit);
                    }
                    for &id in &operators {
                        reads.extend(self.needs(id, made));
                    }
                    let generator = operators[0];
                    self.chains.insert((slot, made), Chain { operators, turn: 0 });
                    if reach.share {
                        self.take_along(made, generator, slot, limit);
                    }
                }
            }
        }
        for read in reads {
            self.use_at(read, slot);
        }
        self.load.add(slot as usize, slot as usize + 1, scratch - self.scratch[place]);
        self.scratch[place] = scratch;
    }

    /// Decides that `operators` recompute the tensor in a gap. Their inputs must be on the device,
    /// and count as used by the operator for which the recompute runs.
    pub fn recompute(&mut self, tensor: TensorId, gap: usize, operators: Vec<OpId>) {
        let slot = self.ends(tensor, gap).1 & !1;
        let place = slot as usize / 2;
        let scratch = self.scratch[place].max(self.chain_scratch(tensor, &operators));
        self.load.add(slot as usize, slot as usize + 1, scratch - self.scratch[place]);
        self.scratch[place] = scratch;
        self.decide(tensor, gap, Gap::Recompute);
        let reads: Vec<TensorId> =
            operators.iter().flat_map(|&id| self.needs(id, tensor)).collect();
        for read in reads {
            self.use_at(read, slot + 1);
        }
        let turn = self.chains.len();
        self.chains.insert((slot, tensor), Chain { operators, turn });
    }

    /// The operators that make `tensor` at the end of `gap` from inputs on the device, and the load
    /// of the slot in which they run; `None` if that is impossible.
    #[must_use]
    pub fn direct(
        &self,
        latencies: &[Latency],
        tensor: TensorId,
        gap: usize,
    ) -> Option<(Vec<OpId>, u64)> {
        let recompute = self.recompute_of(latencies, tensor, gap, Reach::DIRECT)?;
        let Some(Part::Made(_, count)) = recompute.parts.last() else { return None };
        let operators = self.lifetime(tensor).writes[..*count].iter().map(|&w| OpId(w)).collect();
        let slot = self.ends(tensor, gap).1 & !1;
        Some((operators, self.load.at(slot as usize) + recompute.extra))
    }

    /// Makes a tensor, which is dropped or dead in `slot`, because another one needs it.
    fn make_in_passing(&mut self, tensor: TensorId, slot: u32, limit: u64) {
        let Some(gap) = self.gap_over(tensor, slot) else {
            self.live_on(tensor, slot);
            let gap = self.lifetime(tensor).gaps.len() - 1;
            self.decide(tensor, gap, Gap::Recompute);
            return;
        };
        let (_, b, _) = self.ends(tensor, gap);
        let then = b & !1;
        let bytes = self.lifetime(tensor).bytes;
        let sharers = self
            .shared
            .range((then, TensorId(0))..(then + 1, TensorId(0)))
            .any(|(_, &maker)| maker == tensor);
        let stays = !sharers && self.load.most(slot as usize, then as usize) + bytes <= limit;
        self.decide(tensor, gap, Gap::Keep);
        self.use_at(tensor, slot);
        self.decide(tensor, gap, Gap::Recompute);
        if stays {
            self.chains.remove(&(then, tensor));
            self.shared.remove(&(then, tensor));
        } else {
            self.decide(tensor, gap + 1, Gap::Recompute);
        }
    }

    /// An earlier chain in the gap that runs the tensor's generating operator, and may keep the
    /// tensor.
    fn sibling(&self, tensor: TensorId, gap: usize) -> Option<(u32, TensorId)> {
        if self.chains.is_empty() {
            return None;
        }
        let (a, b, _) = self.ends(tensor, gap);
        let generator = self.only_writer(tensor, b)?;
        let others = self.generates(generator).iter().copied().filter(|&t| t != tensor);
        others
            .flat_map(|other| {
                let lifetime = self.lifetime(other);
                let remade = lifetime.gaps.others().filter(|(_, g)| *g == Gap::Recompute);
                remade.filter_map(move |(g, _)| Some((lifetime.uses.get(g + 1)? & !1, other)))
            })
            .filter(|key| key.0 > a && key.0 < (b & !1) && self.chains.contains_key(key))
            .max()
    }

    /// The operator that generates a tensor, if no other operator writes it before `slot`.
    fn only_writer(&self, tensor: TensorId, slot: u32) -> Option<OpId> {
        if self.lifetime(tensor).long_lived {
            return None;
        }
        let writes = &self.lifetime(tensor).writes;
        let first = *writes.first().filter(|&&w| 2 * w + 1 < slot)?;
        writes.get(1).is_none_or(|&w| 2 * w + 1 >= slot).then_some(OpId(first))
    }

    /// Other outputs of the chain's generating operator that would be recomputed later stay from
    /// here on, if there is room.
    fn take_along(&mut self, made: TensorId, generator: OpId, slot: u32, limit: u64) {
        let siblings: Vec<TensorId> =
            self.generates(generator).iter().copied().filter(|&t| t != made).collect();
        for sibling in siblings {
            let Some(gap) = self.gap_over(sibling, slot) else { continue };
            let (_, b, round) = self.ends(sibling, gap);
            let then = b & !1;
            if round
                || self.gap(sibling, gap) != Gap::Recompute
                || self.only_writer(sibling, b) != Some(generator)
            {
                continue;
            }
            let sharers = self
                .shared
                .range((then, TensorId(0))..(then + 1, TensorId(0)))
                .any(|(_, &maker)| maker == sibling);
            let bytes = self.lifetime(sibling).bytes;
            if !sharers
                && self.chains.contains_key(&(then, sibling))
                && self.load.most(slot as usize, then as usize) + bytes <= limit
            {
                self.decide(sibling, gap, Gap::Keep);
                self.use_at(sibling, slot);
                self.decide(sibling, gap, Gap::Recompute);
                self.chains.remove(&(then, sibling));
                self.shared.insert((slot, sibling), made);
            }
        }
    }

    /// Scratch bytes of a chain: the largest of its steps, each with the outputs that it doesn't
    /// keep.
    fn chain_scratch(&self, tensor: TensorId, chain: &[OpId]) -> u64 {
        chain.iter().map(|&id| self.scratch_without(id, tensor)).max().unwrap_or(0)
    }

    /// Whether the recompute of `made` in `slot` reads `from`, directly or through others.
    fn made_from(&self, slot: u32, made: TensorId, from: TensorId) -> bool {
        let mut stack = vec![made];
        let mut seen = Vec::new();
        while let Some(tensor) = stack.pop() {
            if tensor == from {
                return true;
            }
            if let Some(maker) = self.made_by(slot, tensor)
                && !seen.contains(&maker)
            {
                seen.push(maker);
                stack.extend(
                    self.chains[&(slot, maker)]
                        .operators
                        .iter()
                        .flat_map(|&id| self.needs(id, maker)),
                );
            }
        }
        false
    }
}

impl<'b, 'a> Recomputer<'b, 'a> {
    /// A recomputer that has found out nothing yet.
    #[must_use]
    pub fn new(residencies: &'b Residencies<'a>, latencies: &'b [Latency], reach: Reach) -> Self {
        Self {
            residencies,
            latencies,
            reach,
            slot: 0,
            target: TensorId(0),
            wanted_here: false,
            visiting: Vec::new(),
            parts: Vec::new(),
            cost: 0,
            extra: 0,
            scratch: 0,
        }
    }

    /// The time to make `tensor` at the end of `gap`; `None` if that is impossible or too deep. The
    /// other results stay in the recomputer.
    pub fn cost(&mut self, tensor: TensorId, gap: usize) -> Option<u64> {
        let (_, b, round) = self.residencies.ends(tensor, gap);
        if round {
            return None;
        }
        self.visiting.clear();
        self.parts.clear();
        (self.cost, self.extra) = (0, 0);
        if self.reach.share
            && let Some((at, maker)) = self.residencies.sibling(tensor, gap)
        {
            self.parts.push(Part::Shared(tensor, at, maker));
            return Some(0);
        }
        (self.slot, self.target) = (b & !1, tensor);
        self.wanted_here = b.is_multiple_of(2) || self.reach == Reach::DIRECT;
        let before = self.residencies.scratch[self.slot as usize / 2];
        self.scratch = before;
        self.make(tensor)?;
        self.extra = self.extra - self.residencies.lifetime(tensor).bytes + self.scratch - before;
        Some(self.cost)
    }

    fn make(&mut self, tensor: TensorId) -> Option<()> {
        let residencies = self.residencies;
        let lifetime = residencies.lifetime(tensor);
        if lifetime.long_lived
            || self.visiting.contains(&tensor)
            || self.parts.len() + self.visiting.len() > self.reach.depth
        {
            return None;
        }
        self.visiting.push(tensor);
        let operators =
            &lifetime.writes[..lifetime.writes.partition_point(|&w| 2 * w + 1 < self.slot)];
        for (position, id) in operators.iter().map(|&w| OpId(w)).enumerate() {
            let replay = residencies.graph.operator(id).replay;
            if replay == Replay::Never
                || residencies.generates(id).contains(&tensor) != (position == 0)
            {
                return None;
            }
            for &update in residencies.updates(id) {
                let left_out =
                    replay == Replay::SkipUpdates && residencies.lifetime(update).long_lived;
                if update != tensor && !left_out {
                    return None;
                }
            }
            for read in residencies.needs(id, tensor) {
                if residencies.rewritten(read, id, self.slot) {
                    return None;
                }
                self.input(read)?;
            }
        }
        if operators.is_empty() {
            return None;
        }
        self.visiting.pop();
        for id in operators.iter().map(|&w| OpId(w)) {
            self.cost += self.latencies[id.index()].time.0;
            self.scratch = self.scratch.max(residencies.scratch_without(id, tensor));
        }
        self.extra += lifetime.bytes;
        self.parts.push(Part::Made(tensor, operators.len()));
        Some(())
    }

    fn input(&mut self, tensor: TensorId) -> Option<()> {
        let residencies = self.residencies;
        if self
            .parts
            .iter()
            .any(|p| matches!(p, Part::Made(t, _) | Part::Fetched(t, _) if *t == tensor))
        {
            return Some(());
        }
        if residencies.held(tensor, self.slot) {
            let circular =
                self.wanted_here && residencies.made_from(self.slot, tensor, self.target);
            return (!circular && tensor != self.target).then_some(());
        }
        if let Some(gap) = residencies.gap_over(tensor, self.slot)
            && let Gap::Swap(w) = residencies.gap(tensor, gap)
        {
            // It may come back early, after it has left.
            let (_, _, round) = residencies.ends(tensor, gap);
            if self.reach.depth == 0 || round || w.out_until + 2 >= self.slot {
                return None;
            }
            if w.back_from > self.slot {
                self.extra += residencies.lifetime(tensor).bytes;
            }
            self.parts.push(Part::Fetched(tensor, gap));
            return Some(());
        }
        if self.reach.depth == 0 {
            return None;
        }
        self.make(tensor)
    }
}
