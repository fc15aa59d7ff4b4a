//! The planner's accounts: who holds bytes in which slot, and what is decided for each gap.
//!
//! Program order is cut into *slots*: slot 2i is the moment before operator i, when recomputes for it
//! run; slot 2i+1 is operator i itself. A tensor that is resident in a slot has bytes of its own for
//! all of it, whatever the timing: so loads here bound real memory at any speed of link or compute.
//! A *gap* lies between two uses of a tensor; for a tensor that nothing generates the last gap goes
//! round the end of the iteration. Cost: O(slots) a decision. Not for: choosing ([`super::tensile`]).

use crate::job::{Graph, Replay};
use crate::units::{Bytes, OpId, TensorId};

/// What happens to a tensor between two uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gap {
    /// It stays.
    Keep,
    /// It leaves and comes back over the link.
    Swap {
        /// The last slot in which it may still be leaving.
        out_until: u32,
        /// The first slot in which it may be coming back.
        back_from: u32,
        /// The operator after whose end it leaves.
        out_after: u32,
        /// The nominal instants at which its copies out and in begin, which order the queues.
        starts: (u64, u64),
        /// Chosen although the link may not be in time: the prefetch pass may widen it.
        passive: bool,
    },
    /// It is dropped and made again just before the next use.
    Recompute,
}

/// One tensor's uses and what is decided between them.
#[derive(Clone, Debug)]
pub struct Account {
    /// Rounded to blocks.
    pub bytes: u64,
    /// Operators that use it, or before which a recompute does, in order.
    pub uses: Vec<u32>,
    /// Operators that write it, in order; the i-th makes version i (or i + 1 for what nothing generates).
    pub writes: Vec<u32>,
    /// One for each pair of successive uses; for a long-lived tensor one more, round the end.
    pub gaps: Vec<Gap>,
    /// Nothing generates it.
    pub long_lived: bool,
}

/// The accounts of a job.
#[derive(Clone, Debug)]
pub struct Ledger<'a> {
    /// The job.
    pub graph: &'a Graph,
    /// By tensor.
    pub accounts: Vec<Account>,
    /// Resident bytes and scratch by slot.
    pub load: Vec<u64>,
    /// Scratch by slot: an operator's workspace, the largest recompute's scratch.
    scratch: Vec<u64>,
    /// Recomputes run again: for each gap decided so, its chain.
    pub chains: Vec<Chain>,
}

/// A tensor made again: which operators run, in order, before which use.
#[derive(Clone, Debug)]
pub struct Chain {
    /// The tensor.
    pub tensor: TensorId,
    /// The operator before which it is wanted.
    pub before: u32,
    /// The operators that run again.
    pub operators: Vec<OpId>,
}

impl<'a> Ledger<'a> {
    /// Everything kept: the accounts of the job without a plan (but nothing is kept past its last use).
    #[must_use]
    pub fn new(graph: &'a Graph) -> Self {
        let n = graph.operators.len();
        let generators = graph.generators();
        let mut accounts: Vec<Account> = graph
            .tensors
            .iter()
            .zip(&generators)
            .map(|(t, g)| Account {
                bytes: t.bytes.in_blocks().0,
                uses: Vec::new(),
                writes: Vec::new(),
                gaps: Vec::new(),
                long_lived: g.is_none(),
            })
            .collect();
        let mut scratch = vec![0; 2 * n + 1];
        for (index, operator) in graph.operators.iter().enumerate() {
            let index32 = u32::try_from(index).unwrap_or(u32::MAX);
            scratch[2 * index + 1] = operator.workspace.in_blocks().0;
            for tensor in operator.touches() {
                accounts[tensor.index()].uses.push(index32);
            }
            for operand in operator.writes() {
                let writes = &mut accounts[operand.tensor.index()].writes;
                if writes.last() != Some(&index32) {
                    writes.push(index32);
                }
            }
        }
        for account in &mut accounts {
            let gaps = (account.uses.len() + usize::from(account.long_lived)).saturating_sub(1);
            account.gaps = vec![Gap::Keep; if account.uses.is_empty() { 0 } else { gaps }];
        }
        // Where bytes begin and end; sums stay below 2^62, which the graph's maker checked.
        let mut change = vec![0i64; scratch.len() + 1];
        for account in &accounts {
            let (from, until) =
                match (account.long_lived, account.uses.first(), account.uses.last()) {
                    (true, _, _) => (0, scratch.len()),
                    (false, Some(&first), Some(&last)) => {
                        (2 * first as usize + 1, 2 * last as usize + 2)
                    }
                    _ => continue,
                };
            change[from] += account.bytes.cast_signed();
            change[until] -= account.bytes.cast_signed();
        }
        let mut level = 0i64;
        let standing = |(by, scratch): (&i64, &u64)| {
            level += by;
            level.cast_unsigned() + scratch
        };
        let load = change.iter().zip(&scratch).map(standing).collect();
        Self { graph, accounts, load, scratch, chains: Vec::new() }
    }

    /// The number of slots; the last one is the end of the iteration, after all operators.
    #[must_use]
    pub fn slots(&self) -> usize {
        self.load.len()
    }

    fn add(&mut self, from: usize, until: usize, bytes: u64) {
        for load in &mut self.load[from..until.max(from)] {
            *load += bytes;
        }
    }

    fn subtract(&mut self, from: usize, until: usize, bytes: u64) {
        for load in &mut self.load[from..until.max(from)] {
            *load -= bytes;
        }
    }

    /// The first slot with the largest load, and that load.
    #[must_use]
    pub fn peak(&self) -> (usize, u64) {
        let mut best = (0, 0);
        for (slot, &load) in self.load.iter().enumerate() {
            if load > best.1 {
                best = (slot, load);
            }
        }
        best
    }

    /// The bytes above `target`, summed over all slots.
    #[must_use]
    pub fn excess(&self, target: u64) -> u128 {
        self.load.iter().map(|&load| u128::from(load.saturating_sub(target))).sum()
    }

    /// The operators at the ends of a gap, and whether it goes round the end of the iteration.
    #[must_use]
    pub fn ends(&self, tensor: TensorId, gap: usize) -> (u32, u32, bool) {
        let uses = &self.accounts[tensor.index()].uses;
        if gap + 1 < uses.len() {
            (uses[gap], uses[gap + 1], false)
        } else {
            (uses[gap], uses[0], true)
        }
    }

    /// The slots in which the tensor is away under a decision: one or two half-open ranges.
    fn away(&self, tensor: TensorId, gap: usize, decision: Gap) -> [(usize, usize); 2] {
        let (p, n, round) = self.ends(tensor, gap);
        match decision {
            Gap::Keep => [(0, 0), (0, 0)],
            Gap::Swap { out_until, back_from, .. } if round => {
                [(out_until as usize + 1, self.slots()), (0, back_from as usize)]
            }
            Gap::Swap { out_until, back_from, .. } => {
                [(out_until as usize + 1, back_from as usize), (0, 0)]
            }
            Gap::Recompute => [(2 * p as usize + 2, 2 * n as usize), (0, 0)],
        }
    }

    /// The swap of this gap that is away longest: it leaves at once and comes back at the last moment.
    #[must_use]
    pub fn tightest(&self, tensor: TensorId, gap: usize) -> Gap {
        let (p, n, _) = self.ends(tensor, gap);
        Gap::Swap {
            out_until: 2 * p + 1,
            back_from: 2 * n,
            out_after: p,
            starts: (0, 0),
            passive: true,
        }
    }

    /// Whether deciding `decision` frees bytes in `slot`.
    #[must_use]
    pub fn relieves(&self, tensor: TensorId, gap: usize, decision: Gap, slot: usize) -> bool {
        self.away(tensor, gap, decision).iter().any(|&(a, b)| a <= slot && slot < b)
    }

    /// The gap of a tensor that covers `slot` strictly, if there is one: the tensor is neither used nor wanted there.
    #[must_use]
    pub fn gap_over(&self, tensor: TensorId, slot: usize) -> Option<usize> {
        let account = &self.accounts[tensor.index()];
        let before = account.uses.partition_point(|&u| 2 * u as usize + 1 < slot);
        let gap = match before.checked_sub(1) {
            Some(gap) => gap,
            None if account.long_lived => account.gaps.len().checked_sub(1)?,
            None => return None,
        };
        (gap < account.gaps.len() && self.relieves(tensor, gap, self.tightest(tensor, gap), slot))
            .then_some(gap)
    }

    /// Changes the decision of a gap.
    pub fn decide(&mut self, tensor: TensorId, gap: usize, decision: Gap) {
        let bytes = self.accounts[tensor.index()].bytes;
        let before = self.accounts[tensor.index()].gaps[gap];
        for (a, b) in self.away(tensor, gap, before) {
            self.add(a, b, bytes);
        }
        for (a, b) in self.away(tensor, gap, decision) {
            self.subtract(a, b, bytes);
        }
        self.accounts[tensor.index()].gaps[gap] = decision;
    }

    /// Whether the tensor is surely there in a slot: a swapped one counts as gone as soon as it may leave.
    #[must_use]
    pub fn held(&self, tensor: TensorId, slot: usize) -> bool {
        let account = &self.accounts[tensor.index()];
        let (Some(&first), Some(&last)) = (account.uses.first(), account.uses.last()) else {
            return account.long_lived;
        };
        if !account.long_lived && (slot < 2 * first as usize + 1 || slot > 2 * last as usize + 1) {
            return false;
        }
        account.gaps.iter().enumerate().all(|(gap, &decision)| {
            let surely = match decision {
                Gap::Swap { back_from, out_after, starts, passive, .. } => {
                    let (p, _, _) = self.ends(tensor, gap);
                    Gap::Swap { out_until: 2 * p + 1, back_from, out_after, starts, passive }
                }
                other => other,
            };
            !self.relieves(tensor, gap, surely, slot)
        })
    }

    /// Whether the host holds the tensor's current version when the gap starts, so that leaving costs no copy.
    #[must_use]
    pub fn clean(&self, tensor: TensorId, gap: usize) -> bool {
        let account = &self.accounts[tensor.index()];
        let here = account.uses[gap];
        let written = account.writes.iter().rev().find(|&&w| w <= here);
        let swapped = |g: usize| matches!(account.gaps[g], Gap::Swap { .. });
        let since = written.copied().unwrap_or(0);
        let from_host = account.long_lived
            && written.is_none()
            && account.gaps.last().is_some_and(|_| swapped(account.gaps.len() - 1));
        // A gap that starts at or after the last write, before this one, and is swapped, made the copy. A recompute since
        // then writes the tensor anew, which costs the host copy its validity.
        let remade =
            (0..gap).rev().find(|&g| account.gaps[g] == Gap::Recompute).map_or(0, |g| g + 1);
        let made = (remade..gap).any(|g| account.uses[g] >= since && swapped(g));
        // Never written in the iteration: what the host gave at the start is still right at its end.
        let untouched = account.long_lived && account.writes.is_empty();
        from_host || made || (untouched && gap == account.gaps.len() - 1)
    }

    /// The operators to run again so that `tensor` exists before operator `n`; `None` where that is impossible.
    /// Every other input must be resident there, at the version it had (TENSILE's never-released accesses).
    #[must_use]
    pub fn chain(&self, tensor: TensorId, gap: usize) -> Option<Vec<OpId>> {
        let (p, n, round) = self.ends(tensor, gap);
        let account = &self.accounts[tensor.index()];
        if round || account.long_lived {
            return None;
        }
        let operators: Vec<OpId> =
            account.writes.iter().filter(|&&w| w <= p).map(|&w| OpId(w)).collect();
        for (position, &id) in operators.iter().enumerate() {
            let operator = self.graph.operator(id);
            if operator.replay == Replay::Never {
                return None;
            }
            for update in operator.updates() {
                let mine = update.tensor == tensor;
                let left_out = operator.replay == Replay::SkipUpdates
                    && self.accounts[update.tensor.index()].long_lived;
                if !mine && !left_out {
                    return None;
                }
            }
            let generates = operator.generates().any(|o| o.tensor == tensor);
            if generates != (position == 0) {
                return None;
            }
            for read in self.needs(id, tensor) {
                let changed = self.accounts[read.index()].writes.iter().any(|&w| w > id.0 && w < n);
                if changed || !self.held(read, 2 * n as usize) || self.made_from(read, n, tensor) {
                    return None;
                }
            }
        }
        if operators.is_empty() { None } else { Some(operators) }
    }

    /// What an operator needs besides `tensor` to run again: its inputs, without the statistics that a recompute leaves out.
    fn needs(&self, id: OpId, tensor: TensorId) -> Vec<TensorId> {
        let operator = self.graph.operator(id);
        let left_out = |t: TensorId| {
            let skips =
                operator.replay == Replay::SkipUpdates && self.accounts[t.index()].long_lived;
            skips && operator.updates().any(|u| u.tensor == t)
        };
        operator.reads().map(|o| o.tensor).filter(|&t| t != tensor && !left_out(t)).collect()
    }

    /// Whether `made` is itself recomputed before operator `n`, directly or not from `from`.
    fn made_from(&self, made: TensorId, n: u32, from: TensorId) -> bool {
        let mut seen = vec![made];
        let mut next = 0;
        while let Some(&tensor) = seen.get(next) {
            if tensor == from {
                return true;
            }
            next += 1;
            for chain in self.chains.iter().filter(|c| c.before == n && c.tensor == tensor) {
                for read in chain.operators.iter().flat_map(|&id| self.graph.operator(id).reads()) {
                    if !seen.contains(&read.tensor) {
                        seen.push(read.tensor);
                    }
                }
            }
        }
        false
    }

    /// Scratch of a chain in its slot: the largest of its steps.
    fn chain_scratch(&self, tensor: TensorId, chain: &[OpId]) -> u64 {
        chain
            .iter()
            .map(|&id| {
                let operator = self.graph.operator(id);
                let mut seen: Vec<TensorId> = vec![tensor];
                let mut bytes = operator.workspace.in_blocks();
                for operand in operator.generates() {
                    if !seen.contains(&operand.tensor) {
                        seen.push(operand.tensor);
                        bytes += self.graph.tensor(operand.tensor).bytes.in_blocks();
                    }
                }
                bytes
            })
            .max()
            .unwrap_or(Bytes::ZERO)
            .0
    }

    /// What the slot before operator `n` would carry with this chain run in it.
    #[must_use]
    pub fn load_with_chain(&self, tensor: TensorId, before: u32, chain: &[OpId]) -> u64 {
        let slot = 2 * before as usize;
        self.load[slot] - self.scratch[slot]
            + self.scratch[slot].max(self.chain_scratch(tensor, chain))
    }

    /// Decides a gap to be recomputed by `chain`: its inputs gain a use there.
    pub fn recompute(&mut self, tensor: TensorId, gap: usize, chain: Vec<OpId>) {
        let (_, before, _) = self.ends(tensor, gap);
        let slot = 2 * before as usize;
        let scratch = self.scratch[slot].max(self.chain_scratch(tensor, &chain));
        self.load[slot] += scratch - self.scratch[slot];
        self.scratch[slot] = scratch;
        self.decide(tensor, gap, Gap::Recompute);
        for &id in &chain {
            for read in self.needs(id, tensor) {
                self.use_before(read, before);
            }
        }
        self.chains.push(Chain { tensor, before, operators: chain });
    }

    /// Has the tensor there just before operator `n`, for something that is recomputed then. One that nobody wants any more by
    /// then lives on until there, and no longer.
    pub fn want(&mut self, tensor: TensorId, n: u32) {
        let account = &mut self.accounts[tensor.index()];
        match account.uses.last() {
            Some(&last) if !account.long_lived && last < n => {
                account.uses.push(n);
                account.gaps.push(Gap::Keep);
                let bytes = account.bytes;
                self.add(2 * last as usize + 2, 2 * n as usize + 1, bytes);
            }
            _ => self.use_before(tensor, n),
        }
    }

    /// Adds a use just before operator `n`, splitting the gap it falls into.
    fn use_before(&mut self, tensor: TensorId, n: u32) {
        let account = &mut self.accounts[tensor.index()];
        if account.uses.is_empty() {
            account.uses.push(n);
            account.gaps = vec![Gap::Keep; usize::from(account.long_lived)];
            return;
        }
        let Err(at) = account.uses.binary_search(&n) else { return };
        // The tensor is resident here, so a swap's return lies before: the part after is kept.
        if at == 0 {
            // Before the first use: the round gap ends here now, and the first use follows.
            account.uses.insert(0, n);
            account.gaps.insert(0, Gap::Keep);
        } else if at == account.uses.len() {
            // After the last use of a long-lived tensor: kept up to here; the round gap starts here.
            account.uses.push(n);
            account.gaps.insert(at - 1, Gap::Keep);
        } else {
            account.uses.insert(at, n);
            account.gaps.insert(at, Gap::Keep);
        }
    }
}
