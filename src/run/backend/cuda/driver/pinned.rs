//! Pinned host memory: pages that the driver copies from and to without the processor.

use std::alloc::Layout;
use std::ffi::c_void;

use cudarc::driver::sys;

use super::{Context, Fault, inside};
use crate::units::Bytes;

impl Context {
    /// Pinned host memory of a size, zeros, cached, that the device sees at the same address.
    ///
    /// Several threads touch the pages first: the driver pins touched pages much faster than it
    /// makes new ones.
    ///
    /// # Errors
    /// When they can't be had.
    pub fn pin(&self, bytes: usize) -> Result<PinnedMemory, Fault> {
        let none = || Fault(format!("the machine pins no {}", Bytes(bytes as u64)));
        if bytes == 0 {
            return Ok(PinnedMemory { start: std::ptr::null_mut(), bytes, pages: None });
        }
        let layout = pages(bytes).ok_or_else(none)?;
        // SAFETY: the layout has a size above zero; given back below or by `PinnedMemory`.
        let start = unsafe { std::alloc::alloc(layout) };
        if start.is_null() {
            return Err(none());
        }
        touch(start, layout.size());
        let (memory, whole) = (start.cast(), layout.size());
        // SAFETY: the pages are this allocation's alone, and unregistered before they go.
        let pinned = unsafe { sys::cuMemHostRegister_v2(memory, whole, 0) }.result();
        if pinned.is_err() {
            // SAFETY: allocated above with this layout.
            unsafe { std::alloc::dealloc(start, layout) };
            return Err(none());
        }
        Ok(PinnedMemory { start, bytes, pages: Some(layout) })
    }
}

/// Pages that the driver pins: at least as many bytes, aligned to the processor's large pages where
/// there are many.
fn pages(bytes: usize) -> Option<Layout> {
    const SMALL: usize = 4 << 10;
    const LARGE: usize = 2 << 20;
    let page = if bytes >= LARGE { LARGE } else { SMALL };
    Layout::from_size_align(bytes.checked_next_multiple_of(page)?, page).ok()
}

/// Writes zeros into new pages, on several threads where there are many.
fn touch(start: *mut u8, bytes: usize) {
    const PIECE: usize = 64 << 20;
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(16);
    let piece = bytes.div_ceil(threads).max(PIECE);
    std::thread::scope(|scope| {
        for from in (0..bytes).step_by(piece) {
            let (at, size) =
                (start.wrapping_add(from).expose_provenance(), piece.min(bytes - from));
            // SAFETY: each thread writes its own part of an allocation that outlives them.
            scope.spawn(move || unsafe {
                std::ptr::with_exposed_provenance_mut::<u8>(at).write_bytes(0, size);
            });
        }
    });
}

/// Pinned host memory.
pub struct PinnedMemory {
    start: *mut u8,
    bytes: usize,
    /// What was allocated.
    pages: Option<Layout>,
}

impl PinnedMemory {
    /// How many bytes are pinned.
    #[must_use]
    pub fn room(&self) -> usize {
        self.pages.map_or(0, |pages| pages.size())
    }

    /// The first `bytes` of it, at most [`PinnedMemory::room`].
    #[must_use]
    pub fn of_size(mut self, bytes: usize) -> Self {
        self.bytes = bytes.min(self.room());
        self
    }

    /// The address of a stretch.
    ///
    /// # Errors
    /// When it is not inside.
    pub fn at(&self, offset: Bytes, size: Bytes) -> Result<*mut c_void, Fault> {
        inside(self.bytes, offset.0 as usize, size.0 as usize, "host store")?;
        Ok(self.start.wrapping_add(offset.0 as usize).cast())
    }

    /// Writes while nothing runs.
    ///
    /// # Errors
    /// Outside.
    pub fn write(&self, offset: usize, data: &[u8]) -> Result<(), Fault> {
        inside(self.bytes, offset, data.len(), "host store")?;
        // SAFETY: inside the allocation, checked.
        unsafe {
            self.start.wrapping_add(offset).copy_from_nonoverlapping(data.as_ptr(), data.len())
        };
        Ok(())
    }

    /// Reads while nothing runs.
    ///
    /// # Errors
    /// Outside.
    pub fn read(&self, offset: usize, into: &mut [u8]) -> Result<(), Fault> {
        inside(self.bytes, offset, into.len(), "host store")?;
        // SAFETY: inside the allocation, checked.
        unsafe {
            self.start.wrapping_add(offset).copy_to_nonoverlapping(into.as_mut_ptr(), into.len())
        };
        Ok(())
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        if let Some(layout) = self.pages {
            // SAFETY: registered and allocated once in `Context::pin`, with this layout.
            unsafe {
                let _ = sys::cuMemHostUnregister(self.start.cast());
                std::alloc::dealloc(self.start, layout);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_touch_each_page_once_and_nothing_behind() {
        // Two whole pieces, and a part of one.
        let bytes = (130 << 20) + 3;
        let mut memory = vec![7_u8; bytes + 64];
        touch(memory.as_mut_ptr(), bytes);
        assert!(memory[..bytes].iter().all(|byte| *byte == 0));
        assert!(memory[bytes..].iter().all(|byte| *byte == 7));
    }
}
