//! A device's memory under a scheduler: lanes with addresses, which change only where no job is
//! disturbed.
//!
//! Lanes decide whether a job is admitted, the layout decides its addresses. A change that would
//! move a job's memory takes two steps. First the jobs concerned leave at their next iteration
//! boundaries. Then all items get their new addresses. Processes that map pages themselves need no
//! addresses: for them sums decide alone.

use std::collections::{BTreeMap, BTreeSet};

use super::lanes::{Held, JobId, Join, LaneId, Lanes, Mode};
use super::layout::{Item, Layout};
use super::memory::Need;
use crate::units::Bytes;

/// The addresses of a job's two parts; 0 where memory has none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spot {
    /// Address of the bytes that it holds between iterations.
    pub persistent: Bytes,
    /// Address of the bytes that its iterations need, at the upper end of its lane. So a lane that
    /// shrinks from below leaves them in place.
    pub ephemeral: Bytes,
    /// The lane.
    pub lane: LaneId,
}

/// The result of an attempt to admit a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    /// It is admitted.
    In,
    /// It could be admitted if these jobs were out.
    Moves(BTreeSet<JobId>),
    /// There is no room.
    Full,
}

/// Lanes and their addresses.
#[derive(Clone, Debug)]
pub struct Memory {
    /// The lanes.
    pub lanes: Lanes,
    /// Their addresses; none where each process maps its own pages.
    pub layout: Option<Layout>,
}

impl Memory {
    /// An empty arena with at most `most` lanes.
    #[must_use]
    pub fn new(arena: Bytes, most: usize) -> Self {
        Self { lanes: Lanes::new(arena, Mode::Neap, most), layout: Some(Layout::new(arena)) }
    }

    /// The same for processes that map their own pages: only sums count.
    #[must_use]
    pub fn of_sums(arena: Bytes, most: usize) -> Self {
        Self { layout: None, ..Self::new(arena, most) }
    }

    /// Admits a job, unless the memory of a job that is not in `out` would have to move.
    pub fn admit(&mut self, job: JobId, need: Need, join: Join, out: &BTreeSet<JobId>) -> Entry {
        let mut next = self.clone();
        if next.lanes.admit(job, need, join).is_none() {
            return Entry::Full;
        }
        next.follow();
        let before = self.spots();
        let moved = |(id, spot): (&JobId, &Spot)| {
            before.get(id).is_some_and(|old| old != spot && !out.contains(id)).then_some(*id)
        };
        let moves: BTreeSet<JobId> = next.spots().iter().filter_map(moved).collect();
        if !moves.is_empty() {
            return Entry::Moves(moves);
        }
        *self = next;
        Entry::In
    }

    /// Frees a job's memory.
    pub fn leave(&mut self, job: JobId) {
        self.lanes.leave(job);
        self.follow();
    }

    fn follow(&mut self) {
        if let Some(layout) = &mut self.layout {
            layout.follow(&self.lanes);
        }
    }

    /// The addresses of every job that has a lane.
    #[must_use]
    pub fn spots(&self) -> BTreeMap<JobId, Spot> {
        let spot = |(&job, held): (&JobId, &Held)| {
            let (lane, need) = held.1?;
            let Some(layout) = &self.layout else {
                let (persistent, ephemeral) = (Bytes::ZERO, Bytes::ZERO);
                return Some((job, Spot { persistent, ephemeral, lane }));
            };
            let persistent = layout.at(Item::Persistent(job))?;
            let end = layout.at(Item::Lane(lane))? + self.lanes.lanes().get(&lane)?.size;
            Some((job, Spot { persistent, ephemeral: end - need, lane }))
        };
        self.lanes.residents().iter().filter_map(spot).collect()
    }
}
