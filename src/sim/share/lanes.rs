//! Lanes: which jobs may share a device's memory. Pure decisions in integer bytes, over sums,
//! without addresses.
//!
//! A job holds its persistent bytes while it is resident, and its iterations run in a lane, one at
//! a time. A device is safe when the persistent bytes and the lanes' sizes add up to at most its
//! capacity and no lane is smaller than a member needs (Salus, section 3.3). [`Lanes::admit`] is
//! Salus's Algorithm 1 with its gaps closed: persistent bytes count on every branch, a replaced
//! lane never falls below what its members need, the smallest lane that fits is joined, and (mode
//! `neap`) the largest lane is the one that is widened, and lanes shrink when their largest job
//! leaves. Addresses are in [`super::layout`], turns in [`super::policy`].

use std::collections::{BTreeMap, BTreeSet};

use super::check::{Picture, Resident};
use super::layout::Item;
use super::memory::Need;
use crate::units::{Bytes, saturated};

/// The rules for lanes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// The paper's algorithm with its gaps closed. A lane keeps its size until it is empty, and
    /// persistent memory never moves.
    Paper,
    /// Salus's released code, with its margins and reserve. A lane is opened with its first job's
    /// persistent and ephemeral bytes. Another job joins it only if its persistent bytes fit beside
    /// the largest ephemeral bytes, so lanes are hardly ever shared. With a limit of one, as in the
    /// scripts for policies that take turns, the lane is the whole device.
    AsReleased,
    /// neap's own rules. Lanes shrink, and persistent memory may move to the host if the policy
    /// says so.
    #[default]
    Neap,
}

/// The bytes that the released code keeps in reserve.
const RESERVED: u64 = 300 << 20;

/// The most lanes at once: as many as devices of compute capability 6 to 9 run kernels at once.
pub const MOST: usize = 128;

/// A lane's number, never used again.
pub type LaneId = u32;

/// A job's number.
pub type JobId = u32;

/// A resident's persistent bytes, and its lane with its bytes in it if it has one.
pub type Held = (Bytes, Option<(LaneId, Bytes)>);

/// A lane.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lane {
    /// Size in bytes.
    pub size: Bytes,
    /// Its members and the bytes that each needs, smallest first.
    pub members: BTreeSet<(Bytes, JobId)>,
}

impl Lane {
    fn need(&self) -> Bytes {
        self.members.last().map_or(Bytes::ZERO, |m| m.0)
    }
}

/// Whether a job may join a lane that has members.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Join {
    /// It gets a lane of its own, or is not admitted.
    Own,
    /// It gets a new lane while the limit allows one, otherwise it joins another lane.
    Share,
    /// It joins another lane, which is widened if necessary. It gets a new lane only if there is
    /// none.
    Serve,
}

/// The lanes of a device.
#[derive(Clone, Debug, Default)]
pub struct Lanes {
    capacity: Bytes,
    /// The most bytes of one job.
    each: Bytes,
    /// Bytes that each job keeps besides its own.
    context: Bytes,
    /// Whether no two jobs share a lane, whatever they ask for.
    apart: bool,
    mode: Mode,
    most: usize,
    persistent: Bytes,
    sizes: Bytes,
    lanes: BTreeMap<LaneId, Lane>,
    jobs: BTreeMap<JobId, Held>,
    next: LaneId,
}

impl Lanes {
    /// An empty device with at most `most` lanes.
    #[must_use]
    pub fn new(capacity: Bytes, mode: Mode, most: usize) -> Self {
        let reserved = if mode == Mode::AsReleased { RESERVED } else { 0 };
        let capacity = capacity.saturating_sub(Bytes(reserved));
        Self { capacity, each: capacity, mode, most: most.min(MOST), ..Self::default() }
    }

    /// An empty device for at most `most` processes. Each has at most `each` bytes, its context
    /// among them.
    #[must_use]
    pub fn of_processes(capacity: Bytes, each: Bytes, most: usize, context: Bytes) -> Self {
        let each = each.min(capacity);
        Self { each, context, apart: true, ..Self::new(capacity, Mode::Neap, most) }
    }

    /// The bytes charged for a job: persistent, and in its lane.
    #[must_use]
    pub fn charge(&self, (persistent, ephemeral): Need) -> Need {
        if self.mode != Mode::AsReleased {
            return (persistent + self.context, ephemeral);
        }
        let more = |b: Bytes, percent: u128| Bytes(saturated(u128::from(b.0) * percent / 100));
        let persistent = more(persistent, 110);
        let sum = persistent + ephemeral;
        // A job that fits with less than the margin gets the whole device.
        let total = more(sum, 105).min(self.capacity).max(sum);
        (persistent, total - persistent)
    }

    /// Whether a job with this need fits on the empty device.
    #[must_use]
    pub fn ever(&self, need: Need) -> bool {
        let (persistent, ephemeral) = self.charge(need);
        persistent + ephemeral <= self.each
    }

    /// Bytes that are neither persistent nor in a lane.
    #[must_use]
    pub fn free(&self) -> Bytes {
        self.capacity.saturating_sub(self.persistent + self.sizes)
    }

    /// Bytes that are persistent or in a lane.
    #[must_use]
    pub fn used(&self) -> Bytes {
        self.capacity.saturating_sub(self.free())
    }

    /// Sum of the persistent bytes of all residents.
    #[must_use]
    pub fn persistent(&self) -> Bytes {
        self.persistent
    }

    /// The bytes that persistent memory and lanes may use together.
    #[must_use]
    pub fn capacity(&self) -> Bytes {
        self.capacity
    }

    /// The lanes by number.
    #[must_use]
    pub fn lanes(&self) -> &BTreeMap<LaneId, Lane> {
        &self.lanes
    }

    /// The size of the largest lane; zero if there is none.
    #[must_use]
    pub fn widest(&self) -> Bytes {
        self.lanes.values().map(|lane| lane.size).max().unwrap_or_default()
    }

    /// The jobs that hold memory.
    #[must_use]
    pub fn residents(&self) -> &BTreeMap<JobId, Held> {
        &self.jobs
    }

    /// What the checker is to see of a device of `capacity` bytes: residents with the needs that
    /// they asked for, and the addresses of their memory and lanes.
    pub fn picture(
        &self,
        capacity: Bytes,
        need: impl Fn(JobId) -> Need,
        at: impl Fn(Item) -> Option<Bytes>,
    ) -> Picture {
        let at = |item| at(item).map(|at| at.0);
        let resident = |(&id, (held, lane)): (&JobId, &Held)| Resident {
            persistent: need(id).0.max(*held).0,
            at: at(Item::Persistent(id)),
            ephemeral: need(id).1.0,
            lane: lane.map(|lane| lane.0),
        };
        Picture {
            capacity: capacity.0,
            residents: self.jobs.iter().map(resident).collect(),
            lanes: self.lanes.iter().map(|(&id, l)| (id, l.size.0, at(Item::Lane(id)))).collect(),
        }
    }

    /// A resident's lane, if it has one.
    #[must_use]
    pub fn lane_of(&self, job: JobId) -> Option<LaneId> {
        Some(self.jobs.get(&job)?.1?.0)
    }

    /// Admits a job, or gives a lane to a resident without one. Returns the lane.
    pub fn admit(&mut self, job: JobId, need: Need, join: Join) -> Option<LaneId> {
        let (persistent, ephemeral) = self.charge(need);
        let held = match self.jobs.get(&job) {
            Some((_, Some((lane, _)))) => return Some(*lane),
            Some((held, None)) => *held,
            None => Bytes::ZERO,
        };
        if persistent + ephemeral > self.each {
            return None;
        }
        let more = persistent.saturating_sub(held);
        let join = if self.apart { Join::Own } else { join };
        let free = self.free();
        let released = self.mode == Mode::AsReleased;
        let new = self.lanes.len() < self.most
            && (join != Join::Serve || self.lanes.is_empty() || released);
        let lane = if new && more + ephemeral <= free {
            self.next += 1;
            self.next - 1
        } else if join == Join::Own {
            return None;
        } else if released {
            self.within(more, ephemeral)?
        } else if more > free {
            return None;
        } else {
            self.shared(ephemeral, free - more)?
        };
        self.persistent += more;
        let entry = self.lanes.entry(lane).or_default();
        let size = if !released {
            entry.size.max(ephemeral)
        } else if !entry.members.is_empty() {
            entry.size - more
        } else if self.most == 1 {
            free - more
        } else {
            ephemeral
        };
        self.sizes = self.sizes + size - entry.size;
        entry.size = size;
        entry.members.insert((ephemeral, job));
        self.jobs.insert(job, (persistent.max(held), Some((lane, ephemeral))));
        Some(lane)
    }

    /// The lane that a job joins: the smallest that is large enough, or else one that is widened by
    /// at most `free` bytes.
    fn shared(&self, ephemeral: Bytes, free: Bytes) -> Option<LaneId> {
        let lanes = || self.lanes.iter().map(|(id, lane)| (lane.size, *id));
        let at_least = |size: Bytes| lanes().filter(|lane| lane.0 >= size).min();
        let widened = || match self.mode {
            // The largest needs the fewest additional bytes.
            Mode::Neap => lanes().max().filter(|lane| lane.0 + free >= ephemeral),
            // As printed: the first that is safe, in ascending order of size.
            Mode::Paper | Mode::AsReleased => at_least(ephemeral.saturating_sub(free)),
        };
        at_least(ephemeral).or_else(widened).map(|lane| lane.1)
    }

    /// In the released code, the lane whose own bytes hold a job's persistent bytes beside the
    /// largest ephemeral bytes.
    fn within(&self, persistent: Bytes, ephemeral: Bytes) -> Option<LaneId> {
        let fits = |lane: &Lane| persistent + lane.need().max(ephemeral) <= lane.size;
        let fitting = self.lanes.iter().filter(|(_, lane)| fits(lane));
        fitting.min_by_key(|(id, lane)| (lane.size, **id)).map(|(id, _)| *id)
    }

    /// Takes a resident out of its lane at an iteration boundary; it keeps its persistent bytes.
    pub fn park(&mut self, job: JobId) {
        let Some((_, lane)) = self.jobs.get_mut(&job) else { return };
        let Some((id, ephemeral)) = lane.take() else { return };
        let Some(entry) = self.lanes.get_mut(&id) else { return };
        entry.members.remove(&(ephemeral, job));
        if entry.members.is_empty() {
            self.sizes -= entry.size;
            self.lanes.remove(&id);
        } else if self.mode == Mode::Neap {
            let need = entry.need();
            self.sizes -= entry.size - need;
            entry.size = need;
        }
    }

    /// A job that is not here yet holds persistent bytes, without a lane. Returns false, and
    /// changes nothing, if they don't fit.
    pub fn hold(&mut self, job: JobId, persistent: Bytes) -> bool {
        if persistent > self.free() || self.jobs.contains_key(&job) {
            return false;
        }
        self.persistent += persistent;
        self.jobs.insert(job, (persistent, None));
        true
    }

    /// Frees a job's memory: it ended, or its persistent bytes go to the host.
    pub fn leave(&mut self, job: JobId) {
        let lane = self.lane_of(job);
        self.park(job);
        if let Some((persistent, _)) = self.jobs.remove(&job) {
            self.persistent -= persistent;
            // The released code's lane keeps them.
            if self.mode == Mode::AsReleased
                && let Some(lane) = lane.and_then(|id| self.lanes.get_mut(&id))
            {
                lane.size += persistent;
                self.sizes += persistent;
            }
        }
    }

    /// A job in a lane needs more than it was admitted with. Returns whether it gets that. If not,
    /// nothing changes, and the job must leave before its next iteration.
    pub fn grow(&mut self, job: JobId, (persistent, ephemeral): Need) -> bool {
        let Some(&(held, Some((id, had)))) = self.jobs.get(&job) else { return false };
        // The released code's margins are for this.
        let released = self.mode == Mode::AsReleased;
        let (persistent, free) = ((persistent + self.context).max(held), self.free());
        let more = persistent - held;
        let Some(entry) = self.lanes.get_mut(&id) else { return false };
        let ephemeral = ephemeral.max(had);
        let wider = ephemeral.saturating_sub(entry.size);
        let fits = if released {
            more + ephemeral.max(entry.need()) <= entry.size
        } else {
            more + wider <= free && persistent + ephemeral <= self.each
        };
        if !fits {
            return false;
        }
        self.persistent += more;
        // A released lane's own bytes become persistent; another lane is widened.
        let size = if released { entry.size - more } else { entry.size + wider };
        self.sizes = self.sizes + size - entry.size;
        entry.size = size;
        entry.members.remove(&(had, job));
        entry.members.insert((ephemeral, job));
        self.jobs.insert(job, (persistent, Some((id, ephemeral))));
        true
    }
}
