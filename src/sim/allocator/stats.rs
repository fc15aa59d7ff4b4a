//! What an allocator reports about itself: counters, peaks, its segments and their blocks.

use crate::units::Bytes;

/// Counters and peaks. A peak is over the states between requests, as a row-by-row observer sees
/// them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// In blocks in use, rounded.
    pub allocated: Bytes,
    /// In blocks in use, as asked for.
    pub requested: Bytes,
    /// Taken from the device.
    pub reserved: Bytes,
    /// Segments taken from the device; growing ones don't count, as in `PyTorch`.
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
    /// Requests that asked the device again after all cached segments had been given back.
    pub retries: u64,
}

impl Stats {
    /// Reserved and not in use.
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
    /// Merged into another or given back; never in a picture.
    Gone,
}

/// What happened to memory of the device.
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

/// Memory taken from the device or given back to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentChange {
    /// What was changed.
    pub change: Change,
    /// Where the bytes begin.
    pub address: u64,
    /// How many bytes.
    pub bytes: Bytes,
    /// The stream.
    pub stream: u32,
}

/// A block in a picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockView {
    /// Where it begins.
    pub address: u64,
    /// Its size.
    pub bytes: Bytes,
    /// What was asked for, if it is in use.
    pub requested: Bytes,
    /// Its state.
    pub state: State,
}

/// A segment in a picture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentView {
    /// Where it begins.
    pub address: u64,
    /// The stream.
    pub stream: u32,
    /// Which pool of the stream; for `PyTorch` 0 small, 1 large.
    pub pool: usize,
    /// Whether it grows page by page.
    pub growing: bool,
    /// By address, without gaps, less a growing segment's unmapped end.
    pub blocks: Vec<BlockView>,
}

impl SegmentView {
    /// What it takes of the device.
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
