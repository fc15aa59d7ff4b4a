//! Where persistent memory and lanes lie: addresses for what [`super::lanes`] decided.
//!
//! Persistent memory is placed from the bottom and lanes from the top, each in the smallest hole
//! that fits. When the sums allow an item but no hole fits, everything is packed. That happens only
//! at iteration boundaries, when no ephemeral bytes are in use. So the safety condition on sums is
//! enough for addresses too. A change costs O(log n), packing O(n).

use std::collections::{BTreeMap, BTreeSet};

use super::lanes::{JobId, LaneId, Lanes};
use crate::units::Bytes;

/// Something with an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Item {
    /// A job's persistent memory.
    Persistent(JobId),
    /// A lane.
    Lane(LaneId),
}

impl Item {
    const fn is_lane(self) -> bool {
        matches!(self, Self::Lane(_))
    }
}

/// The addresses of all items.
#[derive(Clone, Debug, Default)]
pub struct Layout {
    capacity: u64,
    items: BTreeMap<Item, (u64, u64)>,
    /// Start and end of each non-empty item.
    ends: BTreeMap<u64, u64>,
    /// Size and offset of each hole between them.
    holes: BTreeSet<(u64, u64)>,
}

/// What a change of layout moved.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// How many times everything was packed.
    pub defragmentations: u64,
    /// Persistent bytes copied within the device.
    pub bytes: Bytes,
    /// The items. The jobs that use them must be between two iterations.
    pub items: Vec<Item>,
}

impl Layout {
    /// An empty device of `capacity` bytes.
    #[must_use]
    pub fn new(capacity: Bytes) -> Self {
        let mut empty = Self { capacity: capacity.0, ..Self::default() };
        empty.open(0, capacity.0);
        empty
    }

    /// An item's offset.
    #[must_use]
    pub fn at(&self, item: Item) -> Option<Bytes> {
        self.items.get(&item).map(|place| Bytes(place.0))
    }

    /// Brings the layout up to date with `lanes`, at an iteration boundary.
    pub fn follow(&mut self, lanes: &Lanes) -> Moved {
        let kept = lanes.residents().keys().copied().map(Item::Persistent);
        let all = kept.chain(lanes.lanes().keys().copied().map(Item::Lane));
        self.update(lanes, &mut all.chain(self.items.keys().copied()).collect())
    }

    /// As [`Layout::follow`], where only the items in `changed` may have changed; it is emptied.
    pub fn update(&mut self, lanes: &Lanes, changed: &mut Vec<Item>) -> Moved {
        changed.sort_unstable();
        changed.dedup();
        let wanted = |item: Item| match item {
            Item::Persistent(job) => lanes.residents().get(&job).map(|held| held.0.0),
            Item::Lane(id) => lanes.lanes().get(&id).map(|lane| lane.size.0),
        };
        // Items that leave or shrink make room first. A lane keeps its upper end, persistent memory
        // its lower end.
        for &item in &*changed {
            match (self.items.get(&item).copied(), wanted(item)) {
                (Some(_), None) => self.remove(item),
                (Some((at, had)), Some(size)) if size < had => {
                    self.remove(item);
                    self.insert(item, if item.is_lane() { at + had - size } else { at }, size);
                }
                _ => {}
            }
        }
        let mut moved = Moved::default();
        for item in changed.drain(..) {
            let Some(size) = wanted(item) else { continue };
            let was = self.items.get(&item).copied();
            if was.is_some_and(|(_, has)| has == size) {
                continue;
            }
            self.remove(item);
            let wider = was.and_then(|was| self.wider(item, was, size));
            let at = wider.or_else(|| self.hole(item, size)).or_else(|| {
                self.pack(&mut moved);
                // The sums fit, so after packing the only hole is large enough.
                self.hole(item, size)
            });
            let Some(at) = at else { continue };
            if let Some((before, has)) = was
                && before != at
            {
                moved.items.push(item);
                moved.bytes += Bytes(if item.is_lane() { 0 } else { has });
            }
            self.insert(item, at, size);
        }
        moved
    }

    /// The offset at which an item that lay at `was` can grow without moving its bytes.
    fn wider(&self, item: Item, was: (u64, u64), size: u64) -> Option<u64> {
        let (low, high) = self.around(was.0);
        match item {
            Item::Persistent(_) => (was.0 + size <= high).then_some(was.0),
            Item::Lane(_) => (was.0 + was.1).checked_sub(size).filter(|at| *at >= low),
        }
    }

    /// The offset in the smallest hole that is large enough: at its bottom for persistent memory,
    /// at its top for a lane.
    fn hole(&self, item: Item, size: u64) -> Option<u64> {
        if size == 0 {
            return Some(0);
        }
        let (room, at) = *self.holes.range((size, 0)..).next()?;
        Some(if item.is_lane() { at + room - size } else { at })
    }

    /// The end of what lies below an offset where nothing lies, and the start of what lies above.
    fn around(&self, at: u64) -> (u64, u64) {
        let low = self.ends.range(..=at).next_back().map_or(0, |e| *e.1);
        (low, self.ends.range(at..).next().map_or(self.capacity, |e| *e.0))
    }

    fn open(&mut self, from: u64, to: u64) {
        if from < to {
            self.holes.insert((to - from, from));
        }
    }

    fn insert(&mut self, item: Item, at: u64, size: u64) {
        self.items.insert(item, (at, size));
        if size == 0 {
            return;
        }
        let (low, high) = self.around(at);
        self.holes.remove(&(high - low, low));
        self.ends.insert(at, at + size);
        self.open(low, at);
        self.open(at + size, high);
    }

    fn remove(&mut self, item: Item) {
        let Some((at, size)) = self.items.remove(&item).filter(|place| place.1 > 0) else { return };
        self.ends.remove(&at);
        let (low, high) = self.around(at);
        self.holes.remove(&(at - low, low));
        self.holes.remove(&(high - at - size, at + size));
        self.open(low, high);
    }

    /// Packs persistent memory to the bottom and lanes to the top, keeping their order.
    fn pack(&mut self, moved: &mut Moved) {
        moved.defragmentations += 1;
        let mut order: Vec<Item> = self.items.keys().copied().collect();
        order.sort_unstable_by_key(|item| (self.items[item].0, *item));
        let (mut low, mut high) = (0, self.capacity);
        let persistent = order.iter().filter(|item| !item.is_lane());
        for item in persistent.chain(order.iter().rev().filter(|item| item.is_lane())) {
            let Some((at, size)) = self.items.get_mut(item) else { continue };
            let to = if item.is_lane() { high - *size } else { low };
            if *at != to && *size > 0 {
                moved.items.push(*item);
                moved.bytes += Bytes(if item.is_lane() { 0 } else { *size });
            }
            if item.is_lane() {
                high = to;
            } else {
                low += *size;
            }
            *at = to;
        }
        let places = self.items.values().filter(|place| place.1 > 0);
        self.ends = places.map(|(at, size)| (*at, at + size)).collect();
        self.holes.clear();
        self.open(low, high);
    }
}
