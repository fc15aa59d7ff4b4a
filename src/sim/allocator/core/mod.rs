//! Best fit with coalescing: the part that caching allocators of all frameworks have in common.
//!
//! This module keeps blocks, segments and free lists, and fixes the order in which a request tries
//! them. The rules of one framework implement [`Rules`], one file each ([`super::pytorch`]).

mod growing;

use std::collections::BTreeMap;

use super::device::Device;
use super::free::FreeSet;
use super::stats::{BlockView, Change, SegmentChange, SegmentView, State, Stats};
use crate::requests::PRIVATE;
use crate::units::{Bytes, id32};

/// Stands for "no block" or "no segment".
pub(super) const NONE: u32 = u32::MAX;

/// A request as a framework's rules have rounded it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Want {
    /// Least size of the block, in bytes.
    pub size: u64,
    /// Size of the segment that would be taken for it, in bytes.
    pub segment: u64,
    /// The pool's number, below [`Rules::POOLS`].
    pub pool: usize,
    /// The stream.
    pub stream: u32,
}

/// What a framework does before its next attempt to get memory from the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Ask the device.
    Ask {
        /// Whether this counts as a retry.
        retry: bool,
    },
    /// This step gained nothing; go to the next one.
    Next,
    /// Out of memory.
    GiveUp,
}

/// A framework's rules over the core. All sizes are bytes.
pub trait Rules: Sized {
    /// How many pools a stream has.
    const POOLS: usize;

    /// Rounds a request of at least one byte and says where it belongs.
    fn want(&self, bytes: u64, stream: u32) -> Want;

    /// Whether the best-fitting free block of `block` bytes may serve the request.
    fn fits(&self, want: &Want, block: u64) -> bool;

    /// Whether a block of `block` bytes that serves the request is split.
    fn splits(&self, want: &Want, block: u64) -> bool;

    /// The page size by which this pool's segments grow, or `None` if they have a fixed size.
    fn page(&self, pool: usize) -> Option<u64>;

    /// Whether a segment of `segment` bytes may be added to the `reserved` bytes.
    fn allows(&self, reserved: u64, segment: u64) -> bool;

    /// Does step number `step` (from 0) of what comes before asking the device.
    fn before_asking(core: &mut Core<Self>, want: &Want, step: u32) -> Step;
}

/// The framework is out of memory: neither cached blocks nor the device can serve the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("out of memory: {requested} ({} bytes) asked for, {reserved} reserved of {capacity}", requested.0)]
pub struct OutOfMemory {
    /// Bytes that were asked for.
    pub requested: Bytes,
    /// Bytes that the framework held when it gave up.
    pub reserved: Bytes,
    /// Bytes of the device.
    pub capacity: Bytes,
}

/// A block in use. It is valid until the block is freed, and only for the allocator that gave it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockHandle(u32);

impl BlockHandle {
    /// The handle of a request for zero bytes.
    pub const NOTHING: Self = Self(NONE);
}

#[derive(Clone, Debug)]
pub(super) struct Block {
    pub address: u64,
    pub size: u64,
    /// Bytes that were asked for, while the block is in use.
    requested: u64,
    /// The pool's count of searches when the block became free.
    since: u64,
    pub prev: u32,
    pub next: u32,
    /// Stream × pools + pool.
    list: u32,
    /// The growing segment, if it is in one.
    growing: u32,
    pub state: State,
}

impl Block {
    pub const fn is_split(&self) -> bool {
        self.prev != NONE || self.next != NONE
    }

    const fn view(&self) -> BlockView {
        let requested = if matches!(self.state, State::Used) { self.requested } else { 0 };
        BlockView {
            address: self.address,
            bytes: Bytes(self.size),
            requested: Bytes(requested),
            state: self.state,
        }
    }
}

/// One pool of one stream.
#[derive(Clone, Debug, Default)]
struct List {
    free: FreeSet,
    /// Addresses of growing segments that have no memory behind them, by address.
    unmapped: BTreeMap<u64, u32>,
}

/// A growing segment's addresses.
#[derive(Clone, Debug)]
struct Growing {
    base: u64,
    page: u64,
}

/// The place of a stream's pools among all: streams at even places, private pools at odd ones.
const fn place_of(stream: u32) -> usize {
    (stream & !PRIVATE) as usize * 2 + (stream & PRIVATE != 0) as usize
}

/// The stream whose pools are at a place.
fn stream_of(place: usize) -> u32 {
    id32(place / 2) | if place.is_multiple_of(2) { 0 } else { PRIVATE }
}

/// A caching allocator with a framework's rules.
#[derive(Clone, Debug)]
pub struct Core<R> {
    pub(super) rules: R,
    device: Device,
    blocks: Vec<Block>,
    /// Entries of `blocks` that may be used again.
    vacant: Vec<u32>,
    lists: Vec<List>,
    growing: Vec<Growing>,
    /// Searches for a free block so far, by pool.
    searches: Vec<u64>,
    stats: Stats,
    /// Segments taken and given back, while recording is on.
    recorded: Option<Vec<SegmentChange>>,
}

impl<R: Rules> Core<R> {
    /// An allocator that holds nothing, over an empty device.
    #[must_use]
    pub fn over(rules: R, device: Device) -> Self {
        Self {
            rules,
            device,
            blocks: Vec::new(),
            vacant: Vec::new(),
            lists: Vec::new(),
            growing: Vec::new(),
            searches: vec![0; R::POOLS],
            stats: Stats::default(),
            recorded: None,
        }
    }

    /// Starts to record which segments are taken from the device and given back, for
    /// [`Core::take_changes`].
    pub fn record(&mut self) {
        self.recorded.get_or_insert_default();
    }

    /// Segments taken from the device and given back since the last call, in order. Empty unless
    /// [`Core::record`] was called.
    pub fn take_changes(&mut self) -> Vec<SegmentChange> {
        self.recorded.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// A block in use; `None` for a request of no bytes.
    #[must_use]
    pub fn view(&self, handle: BlockHandle) -> Option<BlockView> {
        let b = self.blocks.get(handle.0 as usize).filter(|b| b.state == State::Used)?;
        Some(b.view())
    }

    fn note(&mut self, change: Change, address: u64, bytes: u64, list: u32) {
        if let Some(recorded) = &mut self.recorded {
            let stream = stream_of(list as usize / R::POOLS);
            recorded.push(SegmentChange { change, address, bytes: Bytes(bytes), stream });
        }
    }

    /// Asks for `bytes` on `stream`, a small number. Streams share no blocks.
    ///
    /// # Errors
    /// When neither cached blocks nor the device can serve the request, even after all that can be
    /// given back was given back.
    pub fn allocate(&mut self, bytes: Bytes, stream: u32) -> Result<BlockHandle, OutOfMemory> {
        if bytes == Bytes::ZERO {
            return Ok(BlockHandle::NOTHING);
        }
        // This limit is far above any device, and below it no rounding overflows.
        let want = self.rules.want(bytes.0.min(1 << 61), stream);
        let list = self.list(&want);
        // A private pool counts on its own, and nothing looks at the age of its blocks.
        self.searches[want.pool] += u64::from(stream & PRIVATE == 0);
        let Some(found) = self.best_fit(list, &want).or_else(|| self.fresh_block(list, &want))
        else {
            self.stats.ooms += 1;
            return Err(OutOfMemory {
                requested: bytes,
                reserved: self.stats.reserved,
                capacity: self.device.capacity(),
            });
        };
        let block = self.cut(found, &want);
        let b = &mut self.blocks[block as usize];
        b.state = State::Used;
        b.requested = bytes.0;
        self.stats.allocate(Bytes(b.size), bytes);
        Ok(BlockHandle(block))
    }

    /// Gives a block back to its pool and merges it with its free neighbours. A handle of a block
    /// that is not in use is ignored.
    pub fn free(&mut self, handle: BlockHandle) {
        let block = handle.0;
        let Some(b) = self.blocks.get_mut(block as usize).filter(|b| b.state == State::Used) else {
            return;
        };
        b.state = State::Free;
        self.stats.free(Bytes(b.size), Bytes(b.requested));
        let (prev, next) = (b.prev, b.next);
        self.merge(block, prev);
        self.merge(block, next);
        self.insert_free(block);
    }

    /// Gives every cached segment without a block in use back to the device. Private pools keep
    /// theirs.
    pub fn empty_cache(&mut self) {
        for list in (0..self.lists.len()).filter(|list| (list / R::POOLS).is_multiple_of(2)) {
            let free: Vec<u32> = self.lists[list].free.iter().collect();
            for block in free {
                if self.blocks[block as usize].growing != NONE {
                    self.unmap(block);
                } else if !self.blocks[block as usize].is_split() {
                    self.release(block);
                }
            }
        }
    }

    /// Counters and peaks.
    #[must_use]
    pub const fn stats(&self) -> &Stats {
        &self.stats
    }

    /// The device below.
    #[must_use]
    pub const fn device(&self) -> &Device {
        &self.device
    }

    /// Every segment with its blocks, by address, for drawing. Takes one pass over all blocks.
    #[must_use]
    pub fn segments(&self) -> Vec<SegmentView> {
        let heads = self.blocks.iter().filter(|b| b.prev == NONE && b.state != State::Gone);
        let mut all: Vec<SegmentView> = heads
            .map(|head| {
                let mut blocks = Vec::new();
                let mut next = Some(head);
                while let Some(b) = next {
                    blocks.push(b.view());
                    next = self.blocks.get(b.next as usize);
                }
                // The last block of a growing segment may be addresses without memory, which is not
                // shown.
                if blocks.len() > 1 {
                    blocks.pop_if(|b| b.state == State::Unmapped);
                }
                let (place, pool) = (head.list as usize / R::POOLS, head.list as usize % R::POOLS);
                SegmentView {
                    address: head.address,
                    stream: stream_of(place),
                    pool,
                    growing: head.growing != NONE,
                    blocks,
                }
            })
            .collect();
        all.sort_by_key(|s| s.address);
        all
    }

    /// The free list of the request's pool on its stream.
    fn list(&mut self, want: &Want) -> u32 {
        let place = place_of(want.stream);
        let list = place * R::POOLS + want.pool;
        if list >= self.lists.len() {
            self.lists.resize_with((place + 1) * R::POOLS, List::default);
        }
        id32(list)
    }

    /// The smallest free block that may serve the request, taken out of its list.
    fn best_fit(&mut self, list: u32, want: &Want) -> Option<u32> {
        let free = &self.lists[list as usize].free;
        let mut place = free.seek(want.size)?;
        let mut best = free.at(place);
        // A block that can grow counts with the size that it can grow to.
        if self.blocks[best as usize].growing != NONE {
            let becomes = |b: u32| {
                let b = &self.blocks[b as usize];
                let tail = self.blocks.get(b.next as usize).filter(|n| n.state == State::Unmapped);
                b.size + tail.map_or(0, |n| n.size)
            };
            while let Some(next) = free.after(place) {
                if becomes(free.at(next)) >= becomes(best) {
                    break;
                }
                place = next;
                best = free.at(next);
            }
        }
        if !self.rules.fits(want, self.blocks[best as usize].size) {
            return None;
        }
        self.lists[list as usize].free.remove_at(place);
        Some(best)
    }

    /// Takes new memory for a block, which is not put in its list. Before each attempt the
    /// framework's rules do their next step.
    fn fresh_block(&mut self, list: u32, want: &Want) -> Option<u32> {
        for step in 0.. {
            match R::before_asking(self, want, step) {
                Step::Next => {}
                Step::GiveUp => break,
                Step::Ask { retry } => {
                    self.stats.retries += u64::from(retry);
                    if let Some(block) = self.ask(list, want) {
                        return Some(block);
                    }
                }
            }
        }
        None
    }

    fn ask(&mut self, list: u32, want: &Want) -> Option<u32> {
        if !self.rules.allows(self.stats.reserved.0, want.segment) {
            return None;
        }
        if let Some(page) = self.rules.page(want.pool) {
            return self.grow(list, want.size, page);
        }
        let address = self.device.take(want.segment)?;
        self.stats.reserve(Bytes(want.segment));
        self.stats.add_segment();
        self.note(Change::Taken, address, want.segment, list);
        Some(self.add(Block {
            address,
            size: want.segment,
            requested: 0,
            since: 0,
            prev: NONE,
            next: NONE,
            list,
            growing: NONE,
            state: State::Free,
        }))
    }

    /// Splits off the end that the request doesn't need, if the rules say so.
    fn cut(&mut self, found: u32, want: &Want) -> u32 {
        if !self.rules.splits(want, self.blocks[found as usize].size) {
            return found;
        }
        let b = &mut self.blocks[found as usize];
        let rest = Block {
            address: b.address + want.size,
            size: b.size - want.size,
            prev: found,
            ..b.clone()
        };
        let next = rest.next;
        b.size = want.size;
        let rest = self.add(rest);
        self.blocks[found as usize].next = rest;
        if let Some(n) = self.blocks.get_mut(next as usize) {
            n.prev = rest;
        }
        self.insert_free(rest);
        found
    }

    /// Merges the neighbour `other` into `block` (which is in no list) if both are free and of the
    /// same kind. Returns whether it did.
    fn merge(&mut self, block: u32, other: u32) {
        let state = self.blocks[block as usize].state;
        let Some(o) = self.blocks.get(other as usize).filter(|o| o.state == state) else { return };
        let (address, size, prev, next) = (o.address, o.size, o.prev, o.next);
        if state == State::Unmapped {
            self.lists[o.list as usize].unmapped.remove(&address);
        } else {
            self.remove_free(other);
        }
        let b = &mut self.blocks[block as usize];
        b.size += size;
        if b.prev == other {
            b.address = address;
            b.prev = prev;
            if let Some(p) = self.blocks.get_mut(prev as usize) {
                p.next = block;
            }
        } else {
            b.next = next;
            if let Some(n) = self.blocks.get_mut(next as usize) {
                n.prev = block;
            }
        }
        self.drop_block(other);
    }

    fn insert_free(&mut self, block: u32) {
        let b = &mut self.blocks[block as usize];
        b.since = self.searches[b.list as usize % R::POOLS];
        self.lists[b.list as usize].free.insert(b.size, b.address, block);
    }

    fn remove_free(&mut self, block: u32) {
        let b = &self.blocks[block as usize];
        self.lists[b.list as usize].free.remove(b.size, b.address);
    }

    fn add(&mut self, block: Block) -> u32 {
        if let Some(place) = self.vacant.pop() {
            self.blocks[place as usize] = block;
            return place;
        }
        self.blocks.push(block);
        id32(self.blocks.len() - 1)
    }

    fn drop_block(&mut self, block: u32) {
        let b = &mut self.blocks[block as usize];
        b.state = State::Gone;
        b.prev = NONE;
        b.next = NONE;
        self.vacant.push(block);
    }
}

/// What the framework's rules may look at and do before the device is asked.
impl<R: Rules> Core<R> {
    /// Among the pool's free blocks on this stream: the smallest of at least `size` bytes, and the
    /// largest of all.
    pub(super) fn at_least(&self, want: &Want, size: u64) -> (Option<u32>, Option<u32>) {
        let free = &self.lists[place_of(want.stream) * R::POOLS + want.pool].free;
        (free.seek(size).map(|p| free.at(p)), free.largest())
    }

    /// Unsplit free blocks of a pool, on all streams, each with its age in searches.
    pub(super) fn releasable(&self, pool: usize) -> Vec<(u32, u64)> {
        // Private pools, every second one, keep what they have.
        let lists = self.lists.iter().skip(pool).step_by(2 * R::POOLS);
        lists
            .flat_map(|l| l.free.iter())
            .map(|b| (b, &self.blocks[b as usize]))
            .filter(|(_, b)| !b.is_split() && b.growing == NONE)
            .map(|(i, b)| (i, self.searches[pool] - b.since))
            .collect()
    }

    pub(super) fn block(&self, block: u32) -> &Block {
        &self.blocks[block as usize]
    }

    /// Whether the block is in a segment that grows.
    pub(super) fn grows(&self, block: u32) -> bool {
        self.blocks[block as usize].growing != NONE
    }

    /// Gives an unsplit free block's segment back to the device.
    pub(super) fn release(&mut self, block: u32) {
        self.remove_free(block);
        let Block { address, size, list, .. } = self.blocks[block as usize];
        self.device.give(size);
        self.note(Change::GivenBack, address, size, list);
        self.stats.unreserve(Bytes(size));
        self.stats.segments -= 1;
        self.drop_block(block);
    }
}
