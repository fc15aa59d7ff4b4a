//! What a job asks its framework's allocator for, in order. Event tables, memory snapshots,
//! estimates and plans are all turned into these requests for the allocator ([`super::allocator`]).

use crate::units::Bytes;

/// Marks a stream that is a private pool. Like a stream it shares no blocks with others, but its
/// cached memory is not given back while the pool lives.
pub const PRIVATE: u32 = 1 << 31;

/// A request to the framework's allocator. The sequence numbers its blocks from 0 without gaps, so
/// that a replay can keep them in an array. An id has at most one block at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Asks for `bytes` on `stream`.
    Allocate {
        /// The block's id from now on.
        id: u32,
        /// Bytes before any rounding.
        bytes: Bytes,
        /// The stream. The sequence numbers its streams from 0 in order of first use. With
        /// [`PRIVATE`] added it is a private pool: of a CUDA graph, or a `MemPool`.
        stream: u32,
    },
    /// Gives the block back. Freeing an id whose allocation failed does nothing.
    Free {
        /// The block's id.
        id: u32,
    },
    /// Gives all cached memory back to the device (`torch.cuda.empty_cache`).
    EmptyCache,
}
