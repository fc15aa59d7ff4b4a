//! A device's memory under the service: lanes with addresses, changed only where no job is
//! disturbed.
//!
//! Lanes decide whether a job may come in, the layout where. A change that would move a job is
//! made in two steps: those concerned leave at their next iteration boundaries, then everything is
//! put where it goes.

use std::collections::{BTreeMap, BTreeSet};

use crate::sim::share::check::{Picture, Resident};
use crate::sim::share::lanes::{JobId, Join, LaneId, Lanes, Mode};
use crate::sim::share::layout::{Item, Layout};
use crate::units::Bytes;

/// Where a job's two parts lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spot {
    /// Bytes that it holds between iterations.
    pub persistent: Bytes,
    /// What its iterations need: the upper end of its lane, so that a lane that shrinks from below
    /// leaves it where it is.
    pub ephemeral: Bytes,
    /// The lane.
    pub lane: LaneId,
}

/// What became of an attempt to let a job in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    /// It is in.
    In,
    /// It would be, if these were out at the time.
    Moves(BTreeSet<JobId>),
    /// There is no room.
    Full,
}

/// Lanes and where they lie.
#[derive(Clone, Debug)]
pub struct Memory {
    lanes: Lanes,
    layout: Layout,
    /// What each resident's iterations need.
    needs: BTreeMap<JobId, Bytes>,
}

impl Memory {
    /// An empty arena, with `most` lanes at most.
    #[must_use]
    pub fn new(arena: Bytes, most: usize) -> Self {
        Self {
            lanes: Lanes::new(arena, Mode::Neap, most),
            layout: Layout::new(arena),
            needs: BTreeMap::new(),
        }
    }

    /// The arena.
    #[must_use]
    pub fn arena(&self) -> Bytes {
        self.lanes.capacity()
    }

    /// Bytes that no job has.
    #[must_use]
    pub fn free(&self) -> Bytes {
        self.lanes.free()
    }

    /// Whether a job could ever be here.
    #[must_use]
    pub fn ever(&self, persistent: Bytes, ephemeral: Bytes) -> bool {
        self.lanes.ever(persistent, ephemeral)
    }

    /// Whether it is in.
    #[must_use]
    pub fn holds(&self, job: JobId) -> bool {
        self.needs.contains_key(&job)
    }

    /// Lets a job in, unless a job that is not `out` would have to move for it.
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
        let moves: BTreeSet<JobId> = next.spots().iter().filter_map(moved).collect();
        if !moves.is_empty() {
            return Entry::Moves(moves);
        }
        *self = next;
        Entry::In
    }

    /// What a job held is free.
    pub fn leave(&mut self, job: JobId) {
        if self.needs.remove(&job).is_some() {
            self.lanes.leave(job);
            self.layout.follow(&self.lanes);
        }
    }

    /// Where every job is.
    #[must_use]
    pub fn spots(&self) -> BTreeMap<JobId, Spot> {
        let places: BTreeMap<Item, (Bytes, Bytes)> =
            self.layout.items().map(|(item, at, size)| (item, (at, size))).collect();
        let spot = |(job, _, lane): (JobId, Bytes, Option<LaneId>)| {
            let lane = lane?;
            let (at, size) = places.get(&Item::Lane(lane))?;
            let persistent = places.get(&Item::Persistent(job))?.0;
            let need = self.needs.get(&job).copied().unwrap_or_default();
            Some((job, Spot { persistent, ephemeral: Bytes(at.0 + size.0 - need.0), lane }))
        };
        self.lanes.residents().filter_map(spot).collect()
    }

    /// What is promised now: persistent memory and lanes.
    #[must_use]
    pub fn used(&self) -> Bytes {
        self.arena() - self.free()
    }

    /// For the checker.
    #[must_use]
    pub fn picture(&self) -> Picture {
        let mut picture = Picture { capacity: self.arena().0, ..Picture::default() };
        let mut places: BTreeMap<Item, u64> =
            self.layout.items().map(|(item, at, _)| (item, at.0)).collect();
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
