//! Where persistent memory and lanes lie: addresses for what [`super::lanes`] decided.
//!
//! Persistent memory is placed from the bottom, lanes from the top, each in the first hole that fits. When none does though the sums
//! allow it, everything is packed: at iteration boundaries only, when no ephemeral byte holds anything. So the safety condition
//! suffices down to addresses. Not for: deciding who may come.

use std::collections::BTreeMap;

use super::lanes::{JobId, LaneId, Lanes};
use crate::units::Bytes;

/// What lies somewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Item {
    /// A job's persistent memory.
    Persistent(JobId),
    /// A lane.
    Lane(LaneId),
}

/// Addresses: offset and size of each.
#[derive(Clone, Debug, Default)]
pub struct Layout {
    capacity: u64,
    items: BTreeMap<Item, (u64, u64)>,
}

/// What a change of layout cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Times that everything was packed.
    pub defragmentations: u64,
    /// Persistent bytes copied within the device.
    pub bytes: Bytes,
}

impl Layout {
    /// An empty device.
    #[must_use]
    pub fn new(capacity: Bytes) -> Self {
        Self { capacity: capacity.0, items: BTreeMap::new() }
    }

    /// The items with offset and size.
    pub fn items(&self) -> impl Iterator<Item = (Item, Bytes, Bytes)> {
        self.items.iter().map(|(item, (at, size))| (*item, Bytes(*at), Bytes(*size)))
    }

    /// Brings it to what the lanes say now, at an iteration boundary.
    pub fn follow(&mut self, lanes: &Lanes) -> Moved {
        let persistent = lanes.residents().map(|(job, bytes, _)| (Item::Persistent(job), bytes.0));
        let wanted: BTreeMap<Item, u64> = persistent.chain(lanes.lanes().map(|(id, lane)| (Item::Lane(id), lane.size.0))).collect();
        self.items.retain(|item, _| wanted.contains_key(item));
        let mut moved = Moved::default();
        // Shrink in place first: a lane keeps its upper end, persistent memory its lower.
        for (item, place) in &mut self.items {
            let size = wanted[item];
            if size <= place.1 {
                if matches!(item, Item::Lane(_)) {
                    place.0 += place.1 - size;
                }
                place.1 = size;
            }
        }
        for (item, size) in wanted {
            let was = self.items.get(&item).copied();
            if was.is_some_and(|(_, has)| has == size) {
                continue;
            }
            self.items.remove(&item);
            let at = match self.hole(item, size) {
                Some(at) => at,
                None => {
                    moved.defragmentations += 1;
                    moved.bytes += self.pack();
                    // The sums fit, so that after packing the one hole does.
                    match self.hole(item, size) {
                        Some(at) => at,
                        None => continue,
                    }
                }
            };
            if let (Item::Persistent(_), Some((before, has))) = (item, was)
                && before != at
            {
                moved.bytes += Bytes(has);
            }
            self.items.insert(item, (at, size));
        }
        moved
    }

    /// The lowest hole for persistent memory, the highest for a lane.
    fn hole(&self, item: Item, size: u64) -> Option<u64> {
        let mut taken: Vec<(u64, u64)> = self.items.values().filter(|(_, s)| *s > 0).copied().collect();
        taken.sort_unstable();
        let mut holes = Vec::with_capacity(taken.len() + 1);
        let mut end = 0;
        for (at, bytes) in taken.into_iter().chain([(self.capacity, 0)]) {
            if at.saturating_sub(end) >= size {
                holes.push((end, at));
            }
            end = at + bytes;
        }
        match item {
            Item::Persistent(_) => holes.first().map(|h| h.0),
            Item::Lane(_) => holes.last().map(|h| h.1 - size),
        }
    }

    /// Packs persistent memory to the bottom and lanes to the top, in the order in which they lie; persistent bytes moved.
    fn pack(&mut self) -> Bytes {
        let mut order: Vec<Item> = self.items.keys().copied().collect();
        order.sort_by_key(|item| (self.items[item].0, *item));
        let (mut low, mut moved) = (0, 0);
        for item in order.iter().filter(|i| matches!(i, Item::Persistent(_))) {
            if let Some((at, size)) = self.items.get_mut(item) {
                moved += if *at == low { 0 } else { *size };
                *at = low;
                low += *size;
            }
        }
        let mut high = self.capacity;
        for item in order.iter().rev().filter(|i| matches!(i, Item::Lane(_))) {
            if let Some((at, size)) = self.items.get_mut(item) {
                high -= *size;
                *at = high;
            }
        }
        Bytes(moved)
    }
}
