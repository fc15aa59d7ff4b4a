//! Bytes at a fixed address that several threads reach by raw pointers.
//!
//! The plan's waits decide which step may touch which bytes, and when.

use std::alloc::{Layout, alloc_zeroed, dealloc};

use crate::units::{BLOCK, Bytes};

/// What fills memory that holds nothing yet, when that is asked for: as f32 a small negative
/// number, as an index far out of range.
pub const POISON: u8 = 0xA5;

/// Memory of exactly the size asked for, aligned to [`BLOCK`].
pub struct Arena {
    base: *mut u8,
    layout: Layout,
    bytes: usize,
}

// SAFETY: the memory belongs to the arena until it is dropped, and all access is by raw pointer
// under the waits between streams, which are mutex hand-overs.
unsafe impl Send for Arena {}
// SAFETY: as above; `&Arena` only gives away the address.
unsafe impl Sync for Arena {}

impl Arena {
    /// Takes `bytes`, zeroed, or filled with [`POISON`]. `None` when the machine has not got them.
    #[must_use]
    pub fn new(bytes: Bytes, poison: bool) -> Option<Self> {
        let bytes = usize::try_from(bytes.0).ok()?;
        let layout = Layout::from_size_align(bytes.max(1), usize::try_from(BLOCK).ok()?).ok()?;
        // SAFETY: the layout's size is at least 1.
        let base = unsafe { alloc_zeroed(layout) };
        if base.is_null() {
            return None;
        }
        let arena = Self { base, layout, bytes };
        if poison {
            // SAFETY: the whole of a fresh allocation.
            unsafe { base.write_bytes(POISON, bytes) };
        }
        Some(arena)
    }

    /// The address of `offset`, when the `len` bytes from there are inside.
    #[must_use]
    pub fn at(&self, offset: Bytes, len: Bytes) -> Option<*mut u8> {
        let end = offset.0.checked_add(len.0)?;
        if end > self.bytes as u64 {
            return None;
        }
        // SAFETY: offset is at most the allocation's size.
        Some(unsafe { self.base.add(usize::try_from(offset.0).ok()?) })
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout, and dropped once.
        unsafe { dealloc(self.base, self.layout) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exactly_that_large_and_aligned() {
        let arena = Arena::new(Bytes(1025), true).unwrap();
        let base = arena.at(Bytes(0), Bytes(1025)).unwrap();
        assert_eq!(base as usize % 512, 0);
        // SAFETY: inside.
        assert_eq!(unsafe { *base.add(1024) }, POISON);
        assert!(arena.at(Bytes(1), Bytes(1025)).is_none());
        assert!(arena.at(Bytes(u64::MAX), Bytes(2)).is_none());
        assert!(Arena::new(Bytes(u64::MAX), false).is_none());
        assert!(Arena::new(Bytes::ZERO, false).unwrap().at(Bytes::ZERO, Bytes::ZERO).is_some());
    }
}
