//! A plan's events read into steps, copies and residencies, and what each of them waits for.
//!
//! The engine and the executor both run programs. The meaning of a plan is fixed in
//! [`crate::contract::plan`]; the checker ([`crate::contract::check`]) reads plans with code of its
//! own.

mod read;

use std::collections::BTreeMap;

use super::window::Stretches;
use crate::contract::{Event, JobPlan, Latency, Place, Placement, Window};
use crate::job::{Graph, Replay};
use crate::units::{Bytes, Nanos, OpId, TensorId};
use read::Reader;

/// A direction of the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Direction {
    /// Host to device.
    H2d,
    /// Device to host.
    D2h,
}

/// The item whose start begins a residency.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begin {
    /// The start of the iteration.
    Iteration,
    /// The start of a step.
    Step(usize),
    /// The start of a swap-in's copy.
    Copy(usize),
}

/// An interval in which a tensor or a step's workspace holds device bytes.
#[derive(Clone, Debug)]
pub struct Residency {
    /// The tensor; `None` for a workspace.
    pub tensor: Option<TensorId>,
    /// Its name in the plan.
    pub place: Place,
    /// Size in bytes, rounded to blocks.
    pub bytes: Bytes,
    /// The item with which it begins.
    pub begin: Begin,
    /// The first step that uses it.
    pub first_step: Option<usize>,
    /// The last step that uses it.
    pub last_step: Option<usize>,
    /// The swap-out that ends it.
    pub out: Option<usize>,
    /// Whether it stays resident round the end of the iteration.
    pub stays: bool,
    /// Its address in the arena, in bytes, once placed.
    pub offset: Option<Bytes>,
    /// The tensor's residency before this one, which must have ended before this one begins.
    pub previous: Option<usize>,
    /// Residencies that must have ended before this one begins, because they share bytes.
    pub after: Vec<usize>,
}

/// One item of the compute stream.
#[derive(Clone, Debug)]
pub struct Step {
    /// The operator.
    pub operator: OpId,
    /// The recompute event that runs the operator again; `None` for its first run.
    pub event: Option<usize>,
    /// Its planned time.
    pub time: Nanos,
    /// Every tensor that it touches and that tensor's residency, sorted by tensor.
    pub binds: Vec<(TensorId, usize)>,
    /// Generated tensors that live only in the workspace, with their offset in it.
    pub scratch: Vec<(TensorId, Bytes)>,
    /// Its workspace, scratch outputs included; `None` when empty.
    pub workspace: Option<usize>,
    /// The swap-ins whose tensors it reads.
    pub reads_copies: Vec<usize>,
    /// Residencies that it begins: outputs, tensors that a recompute keeps, the workspace.
    pub begins: Vec<usize>,
}

/// One copy over the link.
#[derive(Clone, Debug)]
pub struct Copy {
    /// Its direction.
    pub direction: Direction,
    /// The tensor that it copies.
    pub tensor: TensorId,
    /// The tensor's unrounded bytes.
    pub bytes: Bytes,
    /// The residency on the device that it copies from or to.
    pub residency: usize,
    /// The step after whose end it becomes due; `None` for the start of the iteration.
    pub trigger: Option<usize>,
    /// The step that wrote what a swap-out copies.
    pub written_by: Option<usize>,
    /// The copy that this one needs: for a swap-out, the swap-in that brought the tensor; for a
    /// swap-in, the swap-out that wrote the host copy.
    pub source: Option<usize>,
    /// The position of its event in the plan.
    pub event: usize,
    /// The copies that this one waits for because they used the same bytes of the pinned pool: for
    /// each earlier tensor in those bytes, its last copies of either direction. Only a tensor's
    /// first copy has any.
    pub pool_waits: Vec<usize>,
}

/// A job's iteration under a plan.
#[derive(Clone, Debug)]
pub struct Program {
    /// In the order in which they run.
    pub steps: Vec<Step>,
    /// In event order; each direction's queue is its copies in this order.
    pub copies: Vec<Copy>,
    /// Residencies of tensors in the order in which they begin, then workspaces.
    pub residencies: Vec<Residency>,
    /// Unrounded bytes of the tensors that are on the device at the start of the iteration.
    pub loaded: Bytes,
    /// The steps and swap-ins that need the window that several jobs share.
    pub stretches: Stretches,
}

/// A plan that can't be read as a program. Plans that passed [`crate::contract::check`] never give
/// one.
#[derive(Debug, thiserror::Error)]
#[error("event {event:?}: {problem}")]
pub struct ProgramError {
    /// Position of the event at fault, if there is one.
    pub event: Option<usize>,
    /// What is wrong.
    pub problem: String,
}

impl Program {
    /// Reads `events` over `graph`. Residencies are not placed yet.
    ///
    /// # Errors
    /// When events contradict the graph or each other, so that the plan has no meaning.
    pub fn new(
        graph: &Graph,
        latencies: &[Latency],
        events: &[Event],
    ) -> Result<Self, ProgramError> {
        Reader::new(graph, latencies).read(events)
    }

    /// [`Program::new`] with the plan's own addresses.
    ///
    /// # Errors
    /// As [`Program::new`], and when a residency has no placement.
    pub fn placed(graph: &Graph, job: &JobPlan) -> Result<Self, ProgramError> {
        let mut program = Self::new(graph, &job.latencies, &job.events)?;
        program.place(&job.placements)?;
        program.share(&job.host_slots);
        if let Some(window) = &job.window {
            program.enter(window);
        }
        if let Some(r) = program.residencies.iter().find(|r| r.offset.is_none()) {
            return Err(ProgramError {
                event: None,
                problem: format!("{:?} has no placement", r.place),
            });
        }
        Ok(program)
    }

    /// Gives residencies their addresses. Residencies that share bytes follow each other in this
    /// order: those that exist at the start of the iteration, then those of the list.
    ///
    /// # Errors
    /// When a placement names a residency that the program doesn't have.
    pub fn place(&mut self, placements: &[Placement]) -> Result<(), ProgramError> {
        // A tensor that leaves and comes back to stay has one placement for its first and its last
        // residency.
        let mut starters: BTreeMap<Place, usize> = BTreeMap::new();
        let mut later: BTreeMap<Place, usize> = BTreeMap::new();
        for (index, r) in self.residencies.iter().enumerate() {
            if r.begin == Begin::Iteration { &mut starters } else { &mut later }
                .insert(r.place, index);
        }
        let mut order = Vec::with_capacity(self.residencies.len());
        order.extend(placements.iter().filter_map(|p| Some((*starters.get(&p.place)?, p.offset))));
        for p in placements {
            match later.get(&p.place) {
                Some(&index) => order.push((index, p.offset)),
                None if starters.contains_key(&p.place) => {}
                None => {
                    return Err(ProgramError {
                        event: None,
                        problem: format!("{:?} is placed but never resident", p.place),
                    });
                }
            }
        }
        self.hand_over(&order);
        Ok(())
    }

    fn hand_over(&mut self, order: &[(usize, Bytes)]) {
        // The last holders are enough: earlier holders of the same bytes have ended by then,
        // because later ones waited for them.
        let mut holders = Holders::default();
        for &(index, offset) in order {
            let residency = &mut self.residencies[index];
            residency.offset = Some(offset);
            residency.after = holders.take(offset.0, offset.0 + residency.bytes.0, index);
        }
    }

    /// Finds the steps and swap-ins that need the window that several jobs share. All residencies
    /// must have their addresses. They then wait for the stretch before theirs.
    pub fn enter(&mut self, window: &Window) {
        self.stretches = Stretches::new(self, window);
        for r in &mut self.residencies {
            let stretch = self.stretches.at(r.begin);
            // Residencies outside the window that such a step begins also wait, because they start
            // with it.
            if let Some(before) = stretch.and_then(|k| k.checked_sub(1)) {
                r.after.extend(self.stretches.lasts(before));
                r.after.sort_unstable();
                r.after.dedup();
            }
        }
    }

    /// Makes a tensor's first copy wait for the copies that used the same bytes of the pinned pool
    /// before.
    pub fn share(&mut self, slots: &BTreeMap<TensorId, Bytes>) {
        // Tensors in order of their first copy; each tensor's last copy in each direction.
        let mut lasts: BTreeMap<TensorId, [Option<usize>; 2]> = BTreeMap::new();
        let mut holders = Holders::default();
        let mut order = Vec::new();
        for (index, copy) in self.copies.iter_mut().enumerate() {
            copy.pool_waits.clear();
            let last = lasts.entry(copy.tensor).or_insert_with(|| {
                order.push((index, copy.tensor));
                [None, None]
            });
            last[usize::from(copy.direction == Direction::H2d)] = Some(index);
        }
        for (first, tensor) in order {
            let Some(offset) = slots.get(&tensor) else { continue };
            let end = offset.0.saturating_add(self.copies[first].bytes.in_blocks().0);
            let mut waits: Vec<usize> = Vec::new();
            for earlier in holders.take(offset.0, end, first) {
                waits.extend(lasts[&self.copies[earlier].tensor].iter().flatten());
            }
            waits.sort_unstable();
            self.copies[first].pool_waits = waits;
        }
    }
}

/// Which item (a residency or a tensor) last held each range of bytes.
#[derive(Default)]
struct Holders {
    /// By start of the range: its end and its holder.
    map: BTreeMap<u64, (u64, usize)>,
}

impl Holders {
    /// Gives `start..end` to a newcomer. Returns the holders of any of these bytes, sorted.
    fn take(&mut self, start: u64, end: u64, newcomer: usize) -> Vec<usize> {
        let mut after = Vec::new();
        let mut kept = Vec::new();
        let first = self.map.range(..=start).next_back().map_or(start, |(&s, _)| s);
        let hit: Vec<u64> = self
            .map
            .range(first..end.max(first))
            .filter(|(_, (e, _))| *e > start)
            .map(|(&s, _)| s)
            .collect();
        for key in hit {
            let (until, holder) = self.map.remove(&key).unwrap_or_default();
            if !after.contains(&holder) {
                after.push(holder);
            }
            if key < start {
                kept.push((key, start, holder));
            }
            if until > end {
                kept.push((end, until, holder));
            }
        }
        for (s, e, holder) in kept {
            self.map.insert(s, (e, holder));
        }
        if end > start {
            self.map.insert(start, (end, newcomer));
        }
        after.sort_unstable();
        after
    }
}
