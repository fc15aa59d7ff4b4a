//! What an allocator reports about itself: counters, peaks, its segments and their blocks.

use crate::units::Bytes;

/// Counters and peaks. A peak is over the states between requests, as an observer sees them who
/// looks after each request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Bytes of blocks in use, rounded.
    pub allocated: Bytes,
    /// Bytes of blocks in use, as requested.
    pub requested: Bytes,
    /// Bytes taken from the device.
    pub reserved: Bytes,
    /// Segments taken from the device. As in `PyTorch`, growing segments don't count.
    pub segments: u64,
    /// The largest `allocated` so far.
    pub peak_allocated: Bytes,
    /// The largest `requested` so far.
    pub peak_requested: Bytes,
    /// The largest `reserved` so far, also within a request.
    pub peak_reserved: Bytes,
    /// The largest `segments` so far, also within a request.
    pub peak_segments: u64,
    /// Requests that failed.
    pub ooms: u64,
    /// Requests that asked the device again after all cached segments were given back.
    pub retries: u64,
}

impl Stats {
    /// Bytes reserved and not in use.
    #[must_use]
    pub const fn fragmentation(&self) -> Bytes {
        self.reserved.saturating_sub(self.allocated)
    }

    pub(super) fn allocate(&mut self, size: Bytes, requested: Bytes) {
        self.allocated += size;
        self.requested += requested;
        self.peak_allocated = self.peak_allocated.max(self.allocated);
        self.peak_requested = self.peak_requested.max(self.requested);
    }

    pub(super) fn free(&mut self, size: Bytes, requested: Bytes) {
        self.allocated -= size;
        self.requested -= requested;
    }

    pub(super) fn reserve(&mut self, bytes: Bytes) {
        self.reserved += bytes;
        self.peak_reserved = self.peak_reserved.max(self.reserved);
    }

    pub(super) fn unreserve(&mut self, bytes: Bytes) {
        self.reserved -= bytes;
    }

    pub(super) fn add_segment(&mut self) {
        self.segments += 1;
        self.peak_segments = self.peak_segments.max(self.segments);
    }
}

/// The state of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Cached.
    Free,
    /// Given to a request.
    Used,
    /// Addresses of a growing segment without memory behind them.
    Unmapped,
    /// Merged into another block or given back. No [`BlockView`] has this state.
    Gone,
}

/// What happened to a segment or its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// A segment was allocated.
    Taken,
    /// A segment was freed.
    GivenBack,
    /// Pages of a growing segment got memory.
    Mapped,
    /// Pages of a growing segment lost their memory.
    Unmapped,
}

/// One change of the memory taken from the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentChange {
    /// The kind of change.
    pub change: Change,
    /// The first address.
    pub address: u64,
    /// The number of bytes.
    pub bytes: Bytes,
    /// The stream.
    pub stream: u32,
}

/// A block, for drawing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockView {
    /// Its first address.
    pub address: u64,
    /// Its size in bytes.
    pub bytes: Bytes,
    /// The bytes requested, if it is in use.
    pub requested: Bytes,
    /// Its state.
    pub state: State,
}

/// A segment, for drawing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentView {
    /// Its first address.
    pub address: u64,
    /// The stream.
    pub stream: u32,
    /// The number of the pool in its stream; for `PyTorch` 0 is small and 1 is large.
    pub pool: usize,
    /// Whether it grows page by page.
    pub growing: bool,
    /// By address, without gaps. The unmapped end of a growing segment is left out.
    pub blocks: Vec<BlockView>,
}

impl SegmentView {
    /// The bytes that it takes from the device.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        self.blocks.iter().filter(|b| b.state != State::Unmapped).map(|b| b.bytes).sum()
    }

    /// Free bytes that can't be given back because other blocks of the segment are in use
    /// (`PyTorch`'s `inactive_split_bytes`).
    #[must_use]
    pub fn inactive_split(&self) -> Bytes {
        if self.growing || self.blocks.len() < 2 {
            return Bytes::ZERO;
        }
        self.blocks.iter().filter(|b| b.state == State::Free).map(|b| b.bytes).sum()
    }
}
