//! Recomputes made of recomputes: what must run again, and what must come back early, so that a tensor can be made anew.
//!
//! A chain's inputs that are gone are made again too, as deep as [`super::Options::depth`] allows: dropping a whole run of
//! cheap operators (normalisation, activation, concatenation, dropout) costs the run once, from what is kept. What is
//! made for another's sake stays for its own next use where that costs no peak. A swapped input comes back for it.
//! Sources: Chen et al., "Training deep nets with sublinear memory cost" (segments); Kirisame et al., "Dynamic tensor
//! rematerialization" (cost of a tensor with its evicted neighbourhood); Peng et al., "Capuchin" (MSPS, chains).
//! Not for: which gaps to decide so ([`super::choose`]).

use super::Options;
use super::book::{Book, Gap, Window};
use crate::contract::Latency;
use crate::job::Replay;
use crate::units::{OpId, TensorId};

/// One tensor of a remake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// Made by so many of the operators that write it, from the first.
    Made(TensorId, usize),
    /// Brought back by its swap-in by then, and kept to its next use.
    Fetched(TensorId, usize),
    /// Kept from what another tensor's chain generates in an earlier slot.
    Shared(TensorId, u32, TensorId),
}

/// All that a remake takes; the last part makes the tensor itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remake {
    /// In order.
    pub parts: Vec<Part>,
    /// The time of all operators.
    pub cost: u64,
    /// What the slot holds more while it runs.
    pub extra: u64,
}

/// Finds out what remakes take, one after the other.
pub struct Maker<'b, 'a> {
    book: &'b Book<'a>,
    latencies: &'b [Latency],
    options: &'b Options,
    slot: u32,
    target: TensorId,
    /// Other chains in the slot may read the target.
    wanted_here: bool,
    visiting: Vec<TensorId>,
    parts: Vec<Part>,
    cost: u64,
    extra: u64,
    scratch: u64,
}

impl Book<'_> {
    /// What it takes to make `tensor` anew at the end of `gap`; `None` where that is impossible or too deep.
    #[must_use]
    pub fn remake(
        &self,
        latencies: &[Latency],
        tensor: TensorId,
        gap: usize,
        options: &Options,
    ) -> Option<Remake> {
        let mut maker = Maker::new(self, latencies, options);
        let cost = maker.cost(tensor, gap)?;
        Some(Remake { parts: maker.parts, cost, extra: maker.extra })
    }

    /// Decides a gap so. `limit` is the load below which what was made stays for its own next use.
    pub fn apply(
        &mut self,
        tensor: TensorId,
        gap: usize,
        remake: Remake,
        limit: u64,
        options: &Options,
    ) {
        let slot = self.ends(tensor, gap).1 & !1;
        let place = slot as usize / 2;
        let mut scratch = self.scratch[place];
        let last = remake.parts.len() - 1;
        let mut reads = Vec::new();
        for (index, part) in remake.parts.into_iter().enumerate() {
            match part {
                Part::Fetched(fetched, gap) => {
                    if let Gap::Swap(w) = self.gap(fetched, gap) {
                        self.decide(
                            fetched,
                            gap,
                            Gap::Swap(Window { back_from: w.back_from.min(slot), ..w }),
                        );
                        self.use_at(fetched, slot);
                    }
                }
                Part::Shared(tensor, at, maker) => {
                    self.use_at(tensor, at);
                    self.decide(tensor, gap, Gap::Remake);
                    self.shared.insert((at, tensor), maker);
                }
                // A part before it took this one along.
                Part::Made(made, _) if index != last && self.maker(slot, made).is_some() => {}
                Part::Made(made, count) => {
                    let operators: Vec<OpId> =
                        self.account(made).writes[..count].iter().map(|&w| OpId(w)).collect();
                    scratch = scratch.max(self.chain_scratch(made, &operators));
                    if index == last {
                        self.decide(made, gap, Gap::Remake);
                    } else {
                        self.make_in_passing(made, slot, limit);
                    }
                    for &id in &operators {
                        reads.extend(self.needs(id, made));
                    }
                    let generator = operators[0];
                    self.chains.insert((slot, made), operators);
                    if options.share {
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

    /// A tensor that is dropped or dead in `slot` is made there for another's sake.
    fn make_in_passing(&mut self, tensor: TensorId, slot: u32, limit: u64) {
        let Some(gap) = self.gap_over(tensor, slot) else {
            self.live_on(tensor, slot);
            let gap = self.account(tensor).gaps.len() - 1;
            self.decide(tensor, gap, Gap::Remake);
            return;
        };
        let (_, b, _) = self.ends(tensor, gap);
        let then = b & !1;
        let bytes = self.account(tensor).bytes;
        let sharers = self
            .shared
            .range((then, TensorId(0))..(then + 1, TensorId(0)))
            .any(|(_, &maker)| maker == tensor);
        let stays = !sharers && self.load.most(slot as usize, then as usize) + bytes <= limit;
        self.decide(tensor, gap, Gap::Keep);
        self.use_at(tensor, slot);
        self.decide(tensor, gap, Gap::Remake);
        if stays {
            self.chains.remove(&(then, tensor));
            self.shared.remove(&(then, tensor));
        } else {
            self.decide(tensor, gap + 1, Gap::Remake);
        }
    }

    /// An earlier chain in the gap that runs what generates the tensor, and may keep it.
    fn sibling(&self, tensor: TensorId, gap: usize) -> Option<(u32, TensorId)> {
        if self.chains.is_empty() {
            return None;
        }
        let (a, b, _) = self.ends(tensor, gap);
        let generator = self.only_writer(tensor, b)?;
        let others = self.generates(generator).iter().copied().filter(|&t| t != tensor);
        others
            .flat_map(|other| {
                let account = self.account(other);
                let remade = account.gaps.iter().enumerate().filter(|(_, g)| **g == Gap::Remake);
                remade.filter_map(move |(g, _)| Some((account.uses.get(g + 1)? & !1, other)))
            })
            .filter(|key| key.0 > a && key.0 < (b & !1) && self.chains.contains_key(key))
            .max()
    }

    /// The operator that generates a tensor, if no other has written it before `slot`.
    fn only_writer(&self, tensor: TensorId, slot: u32) -> Option<OpId> {
        if self.account(tensor).long_lived {
            return None;
        }
        let writes = &self.account(tensor).writes;
        let first = *writes.first().filter(|&&w| 2 * w + 1 < slot)?;
        writes.get(1).is_none_or(|&w| 2 * w + 1 >= slot).then_some(OpId(first))
    }

    /// What the chain's generator makes besides, and would be made again later, stays from here where there is room.
    fn take_along(&mut self, made: TensorId, generator: OpId, slot: u32, limit: u64) {
        let siblings: Vec<TensorId> =
            self.generates(generator).iter().copied().filter(|&t| t != made).collect();
        for sibling in siblings {
            let Some(gap) = self.gap_over(sibling, slot) else { continue };
            let (_, b, round) = self.ends(sibling, gap);
            let then = b & !1;
            if round
                || self.gap(sibling, gap) != Gap::Remake
                || self.only_writer(sibling, b) != Some(generator)
            {
                continue;
            }
            let sharers = self
                .shared
                .range((then, TensorId(0))..(then + 1, TensorId(0)))
                .any(|(_, &maker)| maker == sibling);
            let bytes = self.account(sibling).bytes;
            if !sharers
                && self.chains.contains_key(&(then, sibling))
                && self.load.most(slot as usize, then as usize) + bytes <= limit
            {
                self.decide(sibling, gap, Gap::Keep);
                self.use_at(sibling, slot);
                self.decide(sibling, gap, Gap::Remake);
                self.chains.remove(&(then, sibling));
                self.shared.insert((slot, sibling), made);
            }
        }
    }

    /// Scratch of a chain: the largest of its steps, each with what it generates without keeping.
    fn chain_scratch(&self, tensor: TensorId, chain: &[OpId]) -> u64 {
        chain.iter().map(|&id| self.scratch_without(id, tensor)).max().unwrap_or(0)
    }

    /// Whether the making of `made` in `slot` reads `from`, directly or not.
    fn made_from(&self, slot: u32, made: TensorId, from: TensorId) -> bool {
        let mut stack = vec![made];
        let mut seen = Vec::new();
        while let Some(tensor) = stack.pop() {
            if tensor == from {
                return true;
            }
            if let Some(maker) = self.maker(slot, tensor)
                && !seen.contains(&maker)
            {
                seen.push(maker);
                stack.extend(
                    self.chains[&(slot, maker)].iter().flat_map(|&id| self.needs(id, maker)),
                );
            }
        }
        false
    }
}

impl<'b, 'a> Maker<'b, 'a> {
    /// Nothing found out yet.
    #[must_use]
    pub fn new(book: &'b Book<'a>, latencies: &'b [Latency], options: &'b Options) -> Self {
        Self {
            book,
            latencies,
            options,
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

    /// The time that it takes to make `tensor` anew at the end of `gap`; `None` where that is impossible or too deep. What else it takes is left
    /// in the maker.
    pub fn cost(&mut self, tensor: TensorId, gap: usize) -> Option<u64> {
        let (_, b, round) = self.book.ends(tensor, gap);
        if round {
            return None;
        }
        self.visiting.clear();
        self.parts.clear();
        (self.cost, self.extra) = (0, 0);
        if self.options.share
            && let Some((at, maker)) = self.book.sibling(tensor, gap)
        {
            self.parts.push(Part::Shared(tensor, at, maker));
            return Some(0);
        }
        (self.slot, self.target, self.wanted_here) = (b & !1, tensor, b.is_multiple_of(2));
        let before = self.book.scratch[self.slot as usize / 2];
        self.scratch = before;
        self.make(tensor)?;
        self.extra = self.extra - self.book.account(tensor).bytes + self.scratch - before;
        Some(self.cost)
    }

    fn make(&mut self, tensor: TensorId) -> Option<()> {
        let book = self.book;
        let account = book.account(tensor);
        if account.long_lived
            || self.visiting.contains(&tensor)
            || self.parts.len() + self.visiting.len() > self.options.depth
        {
            return None;
        }
        self.visiting.push(tensor);
        let operators =
            &account.writes[..account.writes.partition_point(|&w| 2 * w + 1 < self.slot)];
        for (position, id) in operators.iter().map(|&w| OpId(w)).enumerate() {
            let replay = book.graph.operator(id).replay;
            if replay == Replay::Never || book.generates(id).contains(&tensor) != (position == 0) {
                return None;
            }
            for &update in book.updates(id) {
                let left_out = replay == Replay::SkipUpdates && book.account(update).long_lived;
                if update != tensor && !left_out {
                    return None;
                }
            }
            for read in book.needs(id, tensor) {
                if book.rewritten(read, id, self.slot) {
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
            self.scratch = self.scratch.max(book.scratch_without(id, tensor));
        }
        self.extra += account.bytes;
        self.parts.push(Part::Made(tensor, operators.len()));
        Some(())
    }

    fn input(&mut self, tensor: TensorId) -> Option<()> {
        let book = self.book;
        if self
            .parts
            .iter()
            .any(|p| matches!(p, Part::Made(t, _) | Part::Fetched(t, _) if *t == tensor))
        {
            return Some(());
        }
        if book.held(tensor, self.slot) {
            let circular = self.wanted_here && book.made_from(self.slot, tensor, self.target);
            return (!circular && tensor != self.target).then_some(());
        }
        if let Some(gap) = book.gap_over(tensor, self.slot)
            && let Gap::Swap(w) = book.gap(tensor, gap)
        {
            // It may come back early, once it has left.
            let (_, _, round) = book.ends(tensor, gap);
            if self.options.depth == 0 || round || w.out_until + 2 >= self.slot {
                return None;
            }
            if w.back_from > self.slot {
                self.extra += book.account(tensor).bytes;
            }
            self.parts.push(Part::Fetched(tensor, gap));
            return Some(());
        }
        if self.options.depth == 0 {
            return None;
        }
        self.make(tensor)
    }
}
