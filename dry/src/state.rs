//! The lock, and what it guards: all but kernels, which have their own. Neither is ever held over a
//! fork or while foreign code runs.

use std::cell::UnsafeCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

use crate::graph::Captures;
use crate::memory::Memory;
use crate::watch::Allocations;

/// Everything that the device remembers.
pub struct State {
    pub memory: Memory,
    pub captures: Captures,
    pub allocations: Allocations,
    /// Functions whose answers are estimates, and how often each was asked.
    pub estimated: BTreeMap<&'static str, u64>,
    /// Libraries that bring a CUDA runtime of their own.
    pub foreign: BTreeSet<String>,
}

static STATE: Mutex<Option<State>> = Mutex::new(None);
static FORK: Once = Once::new();

type Guards =
    (MutexGuard<'static, Option<State>>, MutexGuard<'static, Option<crate::kernels::Kernels>>);

struct Held(UnsafeCell<Option<Guards>>);
// SAFETY: only fork handlers touch it, and only between `prepare` and the handler after it, in one
// thread.
unsafe impl Sync for Held {}
static HELD: Held = Held(UnsafeCell::new(None));

extern "C" fn prepare() {
    // The other lock is never taken under this one.
    let kernels = crate::kernels::lock();
    let state = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: see `Held`.
    unsafe { *HELD.0.get() = Some((state, kernels)) };
}

extern "C" fn release() {
    // SAFETY: see `Held`.
    unsafe { *HELD.0.get() = None };
}

/// Sees to it that no fork leaves a lock taken.
pub fn prepare_for_forks() {
    FORK.call_once(|| {
        // SAFETY: the handlers live as long as the process.
        unsafe { crate::sys::pthread_atfork(prepare, release, release) };
    });
}

/// Runs `f` under the lock.
pub fn with<T>(f: impl FnOnce(&mut State) -> T) -> T {
    prepare_for_forks();
    let mut guard = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    let state = guard.get_or_insert_with(|| State {
        memory: Memory::new(),
        captures: Captures::default(),
        allocations: Allocations::default(),
        estimated: BTreeMap::new(),
        foreign: BTreeSet::new(),
    });
    f(state)
}
