//! Free blocks by size, then address: what best fit asks.
//!
//! For: the smallest block that is large enough, the lowest of those. Not for: what a block is.

use std::collections::BTreeMap;

/// The free blocks of one pool on one stream.
#[derive(Clone, Debug, Default)]
pub struct FreeSet {
    all: BTreeMap<(u64, u64), u32>,
}

impl FreeSet {
    /// Adds the block at `address`, which is not there yet.
    pub fn insert(&mut self, size: u64, address: u64, block: u32) {
        self.all.insert((size, address), block);
    }

    /// Takes the block at `address` out.
    pub fn remove(&mut self, size: u64, address: u64) {
        self.all.remove(&(size, address));
    }

    /// Blocks of at least `size`, smallest first.
    pub fn from(&self, size: u64) -> impl Iterator<Item = u32> + '_ {
        self.all.range((size, 0)..).map(|(_, b)| *b)
    }

    /// The largest block; of several the one at the highest address.
    #[must_use]
    pub fn largest(&self) -> Option<u32> {
        self.all.last_key_value().map(|(_, b)| *b)
    }

    /// All blocks, smallest first.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.all.values().copied()
    }
}
