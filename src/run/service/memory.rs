//! A device's memory under the service: lanes with addresses, which change only where no job is
//! disturbed.
//!
//! Lanes decide whether a job is admitted, the layout decides its addresses. A change that would
//! move a job's memory takes two steps. First the jobs concerned leave at their next iteration
//! boundaries. Then all items get their new addresses.

use std::collections::{BTreeMap, BTreeSet};

use crate::sim::share::lanes::{Held, JobId, Join, LaneId, Lanes, Mode};
use crate::sim::share::layout::{Item, Layout};
use crate::sim::share::memory::Need;
use crate::units::Bytes;

/// The addresses of a job's two parts.
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
    pub lanes: Lanes,
    pub layout: Layout,
}

impl Memory {
    /// An empty arena with at most `most` lanes.
    pub fn new(arena: Bytes, most: usize) -> Self {
        Self { lanes: Lanes::new(arena, Mode::Neap, most), layout: Layout::new(arena) }
    }

    /// Admits a job, unless the memory of a job that is not in `out` would have to move.
    pub fn admit(&mut self, job: JobId, need: Need, join: Join, out: &BTreeSet<JobId>) -> Entry {
        let mut next = self.clone();
        if next.lanes.admit(job, need, join).is_none() {
            return Entry::Full;
        }
        next.layout.follow(&next.lanes);
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
        self.layout.follow(&self.lanes);
    }

    /// The addresses of every job.
    pub fn spots(&self) -> BTreeMap<JobId, Spot> {
        let spot = |(&job, held): (&JobId, &Held)| {
            let (lane, need) = held.1?;
            let persistent = self.layout.at(Item::Persistent(job))?;
            let end = self.layout.at(Item::Lane(lane))? + self.lanes.lanes().get(&lane)?.size;
            Some((job, Spot { persistent, ephemeral: end - need, lane }))
        };
        self.lanes.residents().iter().filter_map(spot).collect()
    }
}
