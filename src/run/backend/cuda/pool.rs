//! Pinned memory that outlives the plan that it was pinned for.
//!
//! Pinning a GiB takes tenths of a second, and a job's next plan needs about as much. A device
//! leaves its pinned memory in a [`Pool`], where the next one takes it if it is large enough.

use std::cell::OnceCell;
use std::sync::Mutex;

use super::driver::{Context, Fault, PinnedMemory};

/// Pinned memory that no device uses.
#[derive(Default)]
pub struct Pool(Mutex<Vec<Free>>);

struct Free(PinnedMemory);

// SAFETY: pinned memory belongs to a context, not to a thread, and each thread that uses a pool has
// entered that context.
unsafe impl Send for Free {}

impl Pool {
    /// Pinned memory for `bytes` bytes: the smallest that is large enough, or new memory. Its
    /// content is arbitrary.
    ///
    /// What is too small for the new memory's owner is unpinned first, so that the machine never
    /// pins much more than its devices use at the same time.
    ///
    /// # Errors
    /// When the machine can't pin as much.
    pub fn take(&self, context: &Context, bytes: usize) -> Result<PinnedMemory, Fault> {
        let mut free = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let fits = free.iter().enumerate().filter(|(_, f)| f.0.room() >= bytes);
        if let Some((at, _)) = fits.min_by_key(|(_, f)| f.0.room()) {
            return Ok(free.swap_remove(at).0.of_size(bytes));
        }
        free.retain(|f| f.0.room() < SMALL);
        drop(free);
        context.pin(bytes)
    }

    /// Takes memory back that no stream uses any more.
    pub fn give(&self, memory: PinnedMemory) {
        if memory.room() > 0 {
            let mut free = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            free.push(Free(memory));
        }
    }
}

/// Memory below this size may stay when more is pinned.
const SMALL: usize = 1 << 20;

/// What the devices of a job that is alone on the GPU leave to those after them.
#[derive(Default)]
pub struct Spare {
    // Before the context, so that it is dropped first.
    pub(super) pool: Pool,
    context: OnceCell<Context>,
}

impl Spare {
    /// Keeps the context, which would end with the last device otherwise, and with it all that is
    /// pinned.
    ///
    /// # Errors
    /// When there is none to be had.
    pub(super) fn pool(&self) -> Result<&Pool, Fault> {
        if self.context.get().is_none() {
            let _ = self.context.set(Context::new(0)?);
        }
        Ok(&self.pool)
    }
}
