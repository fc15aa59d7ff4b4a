//! The device under a framework's allocator: whole pages out of a capacity, at addresses that never
//! adjoin.
//!
//! It decides which calls of `cudaMalloc` and of the virtual-memory functions succeed. It does not
//! know how a segment is divided.

use crate::units::Bytes;

/// What the device hands out is a multiple of this: pages of 2 MiB.
pub const GRANULE: u64 = 2 << 20;

/// Addresses left between two segments, so that no two ever adjoin.
const GAP: u64 = GRANULE;

/// The end of all addresses. Addresses are never reused, so a very long sequence on a very large
/// device can reach it.
const END: u64 = 1 << 63;

/// A device's memory. Virtual addresses only grow. A call fails when the sum of the memory held
/// would exceed the capacity, never for want of a contiguous place.
#[derive(Clone, Debug)]
pub struct Device {
    capacity: u64,
    used: u64,
    next: u64,
    /// The least capacity at which one of the calls refused so far would have succeeded.
    wanted: u64,
}

impl Device {
    /// A device of `capacity` bytes with nothing on it.
    #[must_use]
    pub const fn new(capacity: Bytes) -> Self {
        Self { capacity: capacity.0, used: 0, next: GAP, wanted: u64::MAX }
    }

    /// The capacity in bytes.
    #[must_use]
    pub const fn capacity(&self) -> Bytes {
        Bytes(self.capacity)
    }

    /// The bytes held, in whole granules.
    #[must_use]
    pub const fn used(&self) -> Bytes {
        Bytes(self.used)
    }

    /// The least capacity at which one of the calls refused so far would have succeeded; `None` if
    /// no call was refused.
    #[must_use]
    pub const fn refused(&self) -> Option<Bytes> {
        if self.wanted == u64::MAX { None } else { Some(Bytes(self.wanted)) }
    }

    /// Takes `bytes` in whole granules (`cudaMalloc`). Returns the address.
    pub fn take(&mut self, bytes: u64) -> Option<u64> {
        let bytes = bytes.next_multiple_of(GRANULE);
        if !self.map(bytes) {
            return None;
        }
        let address = self.reserve(bytes);
        if address.is_none() {
            self.unmap(bytes);
        }
        address
    }

    /// Gives back what [`Device::take`] took.
    pub const fn give(&mut self, bytes: u64) {
        self.used -= bytes.next_multiple_of(GRANULE);
    }

    /// Reserves addresses without memory behind them; `None` when no addresses are left.
    pub fn reserve(&mut self, bytes: u64) -> Option<u64> {
        let address = self.next;
        let next =
            address.checked_add(bytes.next_multiple_of(GRANULE) + GAP).filter(|n| *n < END)?;
        self.next = next;
        Some(address)
    }

    /// Takes memory for addresses already reserved. Returns whether there was enough.
    pub fn map(&mut self, bytes: u64) -> bool {
        let after = self.used + bytes;
        if after > self.capacity {
            self.wanted = self.wanted.min(after);
            return false;
        }
        self.used = after;
        true
    }

    /// Gives back what [`Device::map`] took.
    pub const fn unmap(&mut self, bytes: u64) {
        self.used -= bytes;
    }
}
