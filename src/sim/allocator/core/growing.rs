//! Segments that grow page by page (`expandable_segments`).

use super::*;
use neap_model::units::id32;

impl<R: Rules> Core<R> {
    /// Makes a block of at least `size` bytes from free and newly mapped memory, at the lowest
    /// address possible. The block is in no list.
    pub(super) fn grow(&mut self, list: u32, size: u64, page: u64) -> Option<u32> {
        let mut block = self.expandable(list, size, page)?;
        if self.blocks[block as usize].state == State::Unmapped {
            let part = self.blocks[block as usize].size.min(size);
            self.map(block, part)?;
        }
        while self.blocks[block as usize].size < size {
            let b = &self.blocks[block as usize];
            let next = b.next;
            let part = self.blocks.get(next as usize)?.size.min(size - b.size);
            self.map(next, part)?;
            block = next;
        }
        self.remove_free(block);
        Some(block)
    }

    /// The first block of a run of free or unmapped blocks with room for `size` bytes. If there is
    /// no such run, the first block of a new segment.
    fn expandable(&mut self, list: u32, size: u64, page: u64) -> Option<u32> {
        let blocks = &self.blocks;
        let usable = |b: u32| {
            blocks.get(b as usize).filter(|b| matches!(b.state, State::Free | State::Unmapped))
        };
        for &unmapped in self.lists[list as usize].unmapped.values() {
            let before = blocks[unmapped as usize].prev;
            let first = if usable(before).is_some() { before } else { unmapped };
            let (mut room, mut at) = (0, first);
            while let Some(b) = usable(at).filter(|_| room < size) {
                room += b.size;
                at = b.next;
            }
            if room >= size {
                return Some(first);
            }
        }
        // Reserves addresses for an eighth more than the device has, because holes may stay.
        let capacity = self.device.capacity().0;
        let room = (capacity + capacity / 8).div_ceil(page) * page;
        if size > room {
            // This exceeds the device, so the call only records how much it would have taken.
            self.device.map(size.next_multiple_of(page));
            return None;
        }
        let base = self.device.reserve(room)?;
        self.growing.push(Growing { base, page });
        let block = self.add(Block {
            address: base,
            size: room,
            requested: 0,
            since: 0,
            prev: NONE,
            next: NONE,
            list,
            growing: id32(self.growing.len() - 1),
            state: State::Unmapped,
        });
        self.lists[list as usize].unmapped.insert(base, block);
        Some(block)
    }

    /// Maps the pages that the first `size` bytes of an unmapped block need; merges it with its
    /// free neighbours.
    fn map(&mut self, block: u32, size: u64) -> Option<()> {
        let b = &self.blocks[block as usize];
        let (page, list) = (self.growing[b.growing as usize].page, b.list as usize);
        let mapped = size.next_multiple_of(page);
        if !self.device.map(mapped) {
            return None;
        }
        self.lists[list].unmapped.remove(&b.address);
        if mapped < b.size {
            let rest = Block {
                address: b.address + mapped,
                size: b.size - mapped,
                prev: block,
                ..b.clone()
            };
            let (address, next) = (rest.address, rest.next);
            let rest = self.add(rest);
            self.lists[list].unmapped.insert(address, rest);
            if let Some(n) = self.blocks.get_mut(next as usize) {
                n.prev = rest;
            }
            self.blocks[block as usize].next = rest;
        }
        let b = &mut self.blocks[block as usize];
        b.size = mapped;
        b.state = State::Free;
        let (prev, next, address, list) = (b.prev, b.next, b.address, b.list);
        self.note(Change::Mapped, address, mapped, list);
        self.merge(block, prev);
        self.merge(block, next);
        self.insert_free(block);
        self.stats.reserve(Bytes(mapped));
        Some(())
    }

    /// Gives the whole pages inside a free block back; the addresses stay until the whole segment
    /// is free.
    pub(super) fn unmap(&mut self, block: u32) {
        let b = &self.blocks[block as usize];
        let Growing { base, page } = self.growing[b.growing as usize];
        let (start, end) = (b.address, b.address + b.size);
        let first = base + (start - base).next_multiple_of(page);
        let last = end - (end - base) % page;
        if first >= last {
            return;
        }
        self.remove_free(block);
        for (from, to) in [(start, first), (last, end)] {
            if from < to {
                self.set_apart(block, from, to);
            }
        }
        let b = &mut self.blocks[block as usize];
        b.address = first;
        b.size = last - first;
        b.state = State::Unmapped;
        let (prev, next, list) = (b.prev, b.next, b.list);
        self.note(Change::Unmapped, first, last - first, list);
        self.merge(block, prev);
        self.merge(block, next);
        self.device.unmap(last - first);
        self.stats.unreserve(Bytes(last - first));
        let b = &self.blocks[block as usize];
        if b.is_split() {
            self.lists[b.list as usize].unmapped.insert(b.address, block);
        } else {
            self.drop_block(block);
        }
    }

    /// Splits `from..to`, one end of `block`, off as a free block of its own.
    fn set_apart(&mut self, block: u32, from: u64, to: u64) {
        let b = &self.blocks[block as usize];
        let before = from == b.address;
        let (prev, next) = if before { (b.prev, block) } else { (block, b.next) };
        let part = Block { address: from, size: to - from, prev, next, ..b.clone() };
        let part = self.add(part);
        if let Some(p) = self.blocks.get_mut(prev as usize) {
            p.next = part;
        }
        if let Some(n) = self.blocks.get_mut(next as usize) {
            n.prev = part;
        }
        self.insert_free(part);
    }
}
