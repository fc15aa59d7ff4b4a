//! Device and host memory: who has what, and which bytes were really copied.

use std::collections::BTreeMap;

use crate::config::config;
use crate::log;
use crate::ranges::Ranges;
use crate::sys;
use crate::together::{self, Together};

/// Copies from the host of at most this many bytes are real; so is every copy of what is known.
pub const BACKED: u64 = 1 << 20;
/// Device memory goes out in pages of this size.
pub const PAGE: u64 = 2 << 20;
/// Pieces of the driver's pool are multiples of this.
const PIECE: u64 = 512;
/// Mappings are multiples of this.
const SYSTEM_PAGE: u64 = 1 << 16;
/// Where device addresses begin, and where none is any more: a stretch that Linux gives to nothing
/// by itself.
const FIRST: u64 = 0x2000_0000_0000;
const LAST: u64 = 0x5000_0000_0000;
/// Address space between two allocations: segments never touch.
const GAP: u64 = 1 << 30;

/// A stretch of device addresses.
#[derive(Clone, Copy)]
pub struct Block {
    /// Length of the mapping.
    pub mapped: u64,
    /// Bytes that count against the device: 0 for a mere reservation of addresses.
    pub charged: u64,
    pub device: i32,
    /// A piece of the driver's pool: too many to log each.
    pub pooled: bool,
}

/// A stretch of pinned host memory.
#[derive(Clone, Copy, Debug)]
pub struct Pinned {
    pub bytes: u64,
    /// Whether it is ours to unmap.
    pub ours: bool,
    /// Whether its pages read 0 once they are given back to the system.
    pub lazy: bool,
}

/// The memory of all devices, and the pinned host memory.
pub struct Memory {
    next: u64,
    blocks: BTreeMap<u64, Block>,
    used: Vec<u64>,
    /// The most of `used` since the caller last asked.
    peaks: Vec<u64>,
    highest: Vec<u64>,
    /// Pinned host memory, by address.
    pinned: BTreeMap<u64, Pinned>,
    /// Device bytes with the content that a GPU's would have. All others are 0.
    known: Ranges,
    /// Those of them that follow from an answer of neap's own: a GPU's may differ.
    assumed: Ranges,
    /// What other processes of the run have.
    together: Together,
    /// Whether the log says what this process is called.
    named: bool,
}

/// What is known of a stretch of device memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// A part of it, or all, is not known.
    Unknown = 0,
    Known = 1,
    /// It follows from an answer of neap's own.
    Assumed = 2,
}

impl Memory {
    pub fn new() -> Self {
        let devices = config().devices.max(1) as usize;
        Memory {
            next: FIRST,
            blocks: BTreeMap::new(),
            used: vec![0; devices],
            peaks: vec![0; devices],
            highest: vec![0; devices],
            pinned: BTreeMap::new(),
            known: Ranges::default(),
            assumed: Ranges::default(),
            together: Together::new(),
            named: false,
        }
    }

    pub fn used(&self, device: i32) -> u64 {
        self.used.get(device as usize).copied().unwrap_or(0)
    }

    /// The most that a device had given out since this was last asked.
    pub fn take_peak(&mut self, device: i32) -> u64 {
        let used = self.used(device);
        self.peaks.get_mut(device as usize).map_or(0, |peak| std::mem::replace(peak, used))
    }

    /// The most that a device ever had given out.
    pub fn highest(&self, device: i32) -> u64 {
        self.highest.get(device as usize).copied().unwrap_or(0)
    }

    /// Changes what this process has on a device, if `more` bytes have room there; false if not.
    /// `change` gives what it has then. `logs` is the event for the log, if that is to know.
    fn change(
        &mut self,
        device: i32,
        more: u64,
        change: impl FnOnce(u64) -> u64,
        logs: Option<(char, u64)>,
    ) -> bool {
        if self.together.is_copy() {
            (self.together, self.named) = (Together::new(), false);
            self.used.fill(0);
        }
        let mut rows = self.together.rows();
        let used = self.used.get(device as usize).copied().unwrap_or(0);
        let others = rows.as_mut().map_or(0, |rows| rows.others(device));
        if more > config().capacity_bytes.saturating_sub(used.saturating_add(others)) {
            log::line(format_args!("refused {device} {more} {used}"));
            return false;
        }
        let Some(place) = self.used.get_mut(device as usize) else { return more == 0 };
        *place = change(used);
        let used = *place;
        for peaks in [&mut self.peaks, &mut self.highest] {
            let peak = &mut peaks[device as usize];
            *peak = used.max(*peak);
        }
        if !std::mem::replace(&mut self.named, true) {
            log::line(format_args!("process {}", together::name()));
        }
        if let Some((sign, bytes)) = logs {
            log::line(format_args!("segment {sign} {device} {bytes} {used} {}", together::now()));
        }
        if let Some(rows) = &mut rows {
            rows.put(device, used);
        }
        true
    }

    /// What a device has left, for this process and all others of the run.
    pub fn free(&self, device: i32) -> u64 {
        config().capacity_bytes.saturating_sub(self.taken(device))
    }

    /// What a device says is free: no more than its size, where it never gets full.
    pub fn said_free(&self, device: i32) -> u64 {
        self.free(device).min(config().total_bytes.saturating_sub(self.taken(device)))
    }

    /// What all processes of the run have on a device.
    fn taken(&self, device: i32) -> u64 {
        if self.together.is_copy() {
            // It has the parent's lock, and nothing of its own.
            return Together::new().rows().map_or(0, |mut rows| rows.others(device));
        }
        let others = self.together.rows().map_or(0, |mut rows| rows.others(device));
        self.used(device) + others
    }

    /// Charges a device for `bytes`, or says that it has no room.
    pub fn charge(&mut self, device: i32, bytes: u64) -> bool {
        self.change(device, bytes, |used| used + bytes, Some(('+', bytes)))
    }

    pub fn discharge(&mut self, device: i32, bytes: u64) {
        self.change(device, 0, |used| used.saturating_sub(bytes), Some(('-', bytes)));
    }

    /// New device addresses, each holding 0 until something is copied there.
    pub fn reserve(&mut self, device: i32, bytes: u64) -> Option<u64> {
        let mapped = round(bytes);
        while self.next + mapped < LAST {
            let at = self.next;
            self.next += mapped + GAP;
            if sys::map_lazily(at, mapped as usize).is_some() {
                self.blocks.insert(at, Block { mapped, charged: 0, device, pooled: false });
                return Some(at);
            }
        }
        self.reserve_anywhere(device, mapped)
    }

    fn reserve_anywhere(&mut self, device: i32, mapped: u64) -> Option<u64> {
        let at = sys::map_lazily(0, mapped as usize)?;
        self.blocks.insert(at, Block { mapped, charged: 0, device, pooled: false });
        Some(at)
    }

    /// Memory of the driver's own pool (`cudaMallocAsync`), which cuts pages into pieces. How it
    /// does that is not known: here it wastes nothing.
    pub fn allocate_pooled(&mut self, device: i32, bytes: u64) -> Option<u64> {
        let charged = bytes.max(1).div_ceil(PIECE) * PIECE;
        if !self.change(device, charged, |used| used + charged, None) {
            return None;
        }
        let mapped = bytes.max(1).div_ceil(SYSTEM_PAGE) * SYSTEM_PAGE;
        let Some(at) = self.reserve_anywhere(device, mapped) else {
            self.change(device, 0, |used| used.saturating_sub(charged), None);
            return None;
        };
        if let Some(block) = self.blocks.get_mut(&at) {
            block.charged = charged;
            block.pooled = true;
        }
        Some(at)
    }

    /// Device memory, charged by whole pages.
    pub fn allocate(&mut self, device: i32, bytes: u64) -> Option<u64> {
        let charged = round(bytes);
        if !self.charge(device, charged) {
            return None;
        }
        let Some(at) = self.reserve(device, bytes) else {
            self.discharge(device, charged);
            return None;
        };
        if let Some(block) = self.blocks.get_mut(&at) {
            block.charged = charged;
        }
        Some(at)
    }

    /// Takes back what `allocate` or `reserve` gave; false for any other address.
    pub fn release(&mut self, at: u64) -> bool {
        let Some(block) = self.blocks.remove(&at) else { return false };
        self.forget(at, at + block.mapped);
        sys::unmap(at, block.mapped as usize);
        if block.pooled {
            self.change(block.device, 0, |used| used.saturating_sub(block.charged), None);
        } else if block.charged > 0 {
            self.discharge(block.device, block.charged);
        }
        true
    }

    /// The block that an address lies in.
    pub fn block_of(&self, at: u64) -> Option<(u64, Block)> {
        let (&start, &block) = self.blocks.range(..=at).next_back()?;
        (at < start + block.mapped).then_some((start, block))
    }

    pub fn pin(&mut self, at: u64, pinned: Pinned) {
        self.pinned.insert(at, pinned);
    }

    /// Forgets pinned memory, and unmaps it where it is ours.
    pub fn unpin(&mut self, at: u64) -> bool {
        let Some(Pinned { bytes, ours, .. }) = self.pinned.remove(&at) else { return false };
        if ours {
            sys::unmap(at, bytes as usize);
        }
        true
    }

    pub fn is_pinned(&self, at: u64) -> bool {
        self.pinned.range(..=at).next_back().is_some_and(|(&s, pinned)| at < s + pinned.bytes)
    }

    /// Whether a stretch lies in memory whose pages read 0 once they are given back to the system:
    /// a device's, and most pinned memory.
    pub fn is_lazy(&self, at: u64, bytes: u64) -> bool {
        let found = self.pinned.range(..=at).next_back();
        found.is_some_and(|(&s, pinned)| pinned.lazy && at + bytes <= s + pinned.bytes)
            || self.block_of(at).is_some_and(|(s, block)| at + bytes <= s + block.mapped)
    }

    /// What is known of a stretch.
    pub fn content(&self, start: u64, end: u64) -> Content {
        if !self.known.holds(start, end) {
            Content::Unknown
        } else if self.assumed.parts(start, end).is_empty() {
            Content::Known
        } else {
            Content::Assumed
        }
    }

    /// The parts of a stretch whose bytes are known.
    pub fn known_parts(&self, start: u64, end: u64) -> Vec<(u64, u64)> {
        self.known.parts(start, end)
    }

    /// Notes that a stretch holds what a GPU's would hold.
    pub fn note(&mut self, start: u64, end: u64) {
        self.known.add(start, end);
        self.assumed.remove(start, end);
    }

    /// Notes that a stretch holds an answer of neap's own.
    pub fn note_assumed(&mut self, start: u64, end: u64) {
        self.known.add(start, end);
        self.assumed.add(start, end);
    }

    /// Makes a stretch unknown, and 0.
    pub fn forget(&mut self, start: u64, end: u64) {
        for (s, e) in self.known.remove(start, end) {
            sys::zero_lazily(s, e - s);
        }
        self.assumed.remove(start, end);
    }

    /// Makes of one stretch what is known of another one of the same length.
    pub fn carry(&mut self, from: u64, to: u64, bytes: u64) {
        let there = |at: u64| to + (at - from);
        let assumed = self.assumed.parts(from, from + bytes);
        let content = |(start, end): (u64, u64)| {
            // SAFETY: inside a block of ours, which is mapped.
            let bytes =
                unsafe { std::slice::from_raw_parts(start as *const u8, (end - start) as usize) };
            (there(start), bytes.to_vec())
        };
        let known: Vec<_> = self.known.parts(from, from + bytes).into_iter().map(content).collect();
        self.forget(to, to + bytes);
        for (at, bytes) in known {
            // SAFETY: as above.
            unsafe { std::ptr::copy(bytes.as_ptr(), at as *mut u8, bytes.len()) };
            self.note(at, at + bytes.len() as u64);
        }
        for (start, end) in assumed {
            self.assumed.add(there(start), there(end));
        }
    }
}

/// A size in whole pages.
pub fn round(bytes: u64) -> u64 {
    bytes.max(1).div_ceil(PAGE) * PAGE
}
