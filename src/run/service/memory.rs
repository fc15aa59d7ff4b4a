//! A device's memory under the service: lanes with addresses, which change only where no job is
//! disturbed.
//!
//! Lanes decide whether a job is admitted, the layout decides its addresses. A change that would
//! move a job's memory takes two steps. First the jobs concerned leave at their next iteration
//! boundaries. Then all items get their new addresses.

use std::collections::{BTreeMap, BTreeSet};

use crate::compact::Gather;
use crate::sim::share::check::{Picture, Resident};
use crate::sim::share::lanes::{JobId, Join, LaneId, Lanes, Mode};
use crate::sim::share::layout::{Item, Layout};
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
    lanes: Lanes,
    layout: Layout,
    /// Bytes that the iterations of each resident need.
    needs: BTreeMap<JobId, Bytes>,
}

impl Memory {
    /// An empty arena with at most `most` lanes.
    #[must_use]
    pub fn new(arena: Bytes, most: usize) -> Self {
        Self {
            lanes: Lanes::new(arena, Mode::Neap, most),
            layout: Layout::new(arena),
            needs: BTreeMap::new(),
        }
    }

    /// The size of the arena.
    #[must_use]
    pub fn arena(&self) -> Bytes {
        self.lanes.capacity()
    }

    /// Free bytes.
    #[must_use]
    pub fn free(&self) -> Bytes {
        self.lanes.free()
    }

    /// Whether a job with this need fits in the empty arena.
    #[must_use]
    pub fn ever(&self, persistent: Bytes, ephemeral: Bytes) -> bool {
        self.lanes.ever(persistent, ephemeral)
    }

    /// Whether a job is admitted.
    #[must_use]
    pub fn holds(&self, job: JobId) -> bool {
        self.needs.contains_key(&job)
    }

    /// Admits a job, unless the memory of a job that is not in `out` would have to move.
    pub fn admit(
        &mut self,
        job: JobId,
        (persistent, ephemeral): (Bytes, Bytes),
        join: Join,
        out: &BTreeSet<JobId>,
    ) -> Entry {
        let mut next = self.clone();
        if next.lanes.admit(job, persistent, ephemeral, join).is_none() {
            return Entry::Full;
        }
        next.needs.insert(job, ephemeral);
        next.layout.follow(&next.lanes);
        let before = self.spots();
        let moved = |(id, spot): (&JobId, &Spot)| {
            before.get(id).is_some_and(|old| old != spot && !out.contains(id)).then_some(*id)
        };
        let moves: BTreeSet<JobId> = next.spots().iter().filter_map(moved).gather();
        if !moves.is_empty() {
            return Entry::Moves(moves);
        }
        *self = next;
        Entry::In
    }

    /// Frees a job's memory.
    pub fn leave(&mut self, job: JobId) {
        if self.needs.remove(&job).is_some() {
            self.lanes.leave(job);
            self.layout.follow(&self.lanes);
        }
    }

    /// The addresses of every job.
    #[must_use]
    pub fn spots(&self) -> BTreeMap<JobId, Spot> {
        let places: BTreeMap<Item, (Bytes, Bytes)> =
            self.layout.items().map(|(item, at, size)| (item, (at, size))).gather();
        let spot = |(job, _, lane): (JobId, Bytes, Option<LaneId>)| {
            let lane = lane?;
            let (at, size) = places.get(&Item::Lane(lane))?;
            let persistent = places.get(&Item::Persistent(job))?.0;
            let need = self.needs.get(&job).copied().unwrap_or_default();
            Some((job, Spot { persistent, ephemeral: Bytes(at.0 + size.0 - need.0), lane }))
        };
        self.lanes.residents().filter_map(spot).gather()
    }

    /// The bytes in use: persistent memory and lanes.
    #[must_use]
    pub fn used(&self) -> Bytes {
        self.arena() - self.free()
    }

    /// The state of the memory, for the checker.
    #[must_use]
    pub fn picture(&self) -> Picture {
        let mut picture = Picture { capacity: self.arena().0, ..Picture::default() };
        let mut places: BTreeMap<Item, u64> =
            self.layout.items().map(|(item, at, _)| (item, at.0)).gather();
        for (job, persistent, lane) in self.lanes.residents() {
            let ephemeral = self.needs.get(&job).map_or(0, |n| n.0);
            picture.residents.push(Resident {
                persistent: persistent.0,
                at: places.remove(&Item::Persistent(job)),
                ephemeral,
                lane,
            });
        }
        for (lane, it) in self.lanes.lanes() {
            picture.lanes.push((lane, it.size.0, places.remove(&Item::Lane(lane))));
        }
        picture
    }
}
