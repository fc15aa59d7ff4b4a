//! What a job asks its framework's allocator for, in order: the one form in which event tables,
//! memory snapshots, estimates and plans meet the allocator ([`super::allocator`]).

use crate::units::Bytes;

/// A request to the framework's allocator. Ids are the sequence's own, given out from 0 without
/// gaps, so that a replay can keep its blocks in a plain table; an id is allocated at most once at
/// a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Wants `bytes` on `stream` (a small number that the sequence gives each stream, 0 the first
    /// seen).
    Allocate {
        /// Names the block from now on.
        id: u32,
        /// As asked for, before any rounding.
        bytes: Bytes,
        /// On which stream.
        stream: u32,
    },
    /// Gives the block back. Freeing an id whose allocation failed does nothing.
    Free {
        /// The block.
        id: u32,
    },
    /// Gives all cached memory back to the device (`torch.cuda.empty_cache`).
    EmptyCache,
}
