//! Work on all cores.

use std::sync::atomic::{AtomicIsize, AtomicUsize, Ordering};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::thread::{self, Scope};

/// Cores on which nothing runs. It may be negative for moments: a thread that waited for others
/// goes on without asking.
static IDLE: LazyLock<AtomicIsize> = LazyLock::new(|| {
    let cores = thread::available_parallelism().map_or(1, |cores| cores.get().cast_signed());
    AtomicIsize::new(cores - 1)
});

/// On how many cores work may run from here on, at the moment.
#[must_use]
pub fn width() -> usize {
    usize::try_from(1 + IDLE.load(Ordering::Relaxed)).unwrap_or(0).max(1)
}

/// A core that becomes idle when this is dropped.
struct Core;

impl Core {
    /// An idle core, if there is one.
    fn take() -> Option<Self> {
        let less = |idle: isize| (idle > 0).then(|| idle - 1);
        IDLE.try_update(Ordering::Relaxed, Ordering::Relaxed, less).ok().map(|_| Self)
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        IDLE.fetch_add(1, Ordering::Relaxed);
    }
}

/// A core that others use until this is dropped, while its thread waits.
struct Lent;

impl Lent {
    fn now() -> Self {
        IDLE.fetch_add(1, Ordering::Relaxed);
        Self
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        IDLE.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Pieces of work, numbered up to `count`, and the number of the next one.
struct Pieces<'a> {
    count: usize,
    next: AtomicUsize,
    work: &'a (dyn Fn(usize) + Sync),
}

impl Pieces<'_> {
    /// Does one after the other. Before each, a core that is idle helps with those behind it.
    fn run<'s>(&'s self, scope: &'s Scope<'s, '_>) {
        loop {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            if number >= self.count {
                return;
            }
            if number + 1 < self.count
                && let Some(core) = Core::take()
            {
                scope.spawn(move || {
                    let _core = core;
                    self.run(scope);
                });
            }
            (self.work)(number);
        }
    }
}

/// Runs `work(0)` to `work(count - 1)` on all idle cores. Results are in that order.
pub fn in_parallel<T: Send>(count: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
    if count <= 1 {
        return (0..count).map(work).collect();
    }
    let all = Mutex::new(Vec::with_capacity(count));
    let work = |number: usize| {
        let done = work(number);
        all.lock().unwrap_or_else(PoisonError::into_inner).push((number, done));
    };
    let pieces = Pieces { count, next: AtomicUsize::new(0), work: &work };
    let mut lent = None;
    thread::scope(|scope| {
        pieces.run(scope);
        // The others may still be at work.
        lent = Some(Lent::now());
    });
    drop(lent);
    let mut all = all.into_inner().unwrap_or_else(PoisonError::into_inner);
    all.sort_by_key(|(number, _)| *number);
    all.into_iter().map(|(_, done)| done).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_in_order_at_any_depth() {
        let squares = |count| in_parallel(count, |at| at * at);
        for count in [0, 1, 2, 9] {
            let all = in_parallel(count, |at| (at, squares(at)));
            for (number, (at, inner)) in all.into_iter().enumerate() {
                assert_eq!(at, number);
                assert!(inner.into_iter().eq((0..number).map(|at| at * at)));
            }
        }
    }

    #[test]
    fn what_panics_gives_its_core_back() {
        let fails = |at: usize| assert!(at < 2, "piece {at}");
        for _ in 0..8 {
            assert!(std::panic::catch_unwind(|| in_parallel(4, fails)).is_err());
        }
        // Other tests use cores too.
        let cores = thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let most = (0..1000).map(|_| {
            thread::sleep(std::time::Duration::from_millis(1));
            width()
        });
        let seen: Vec<usize> = most.take_while(|now| *now != cores).collect();
        assert!(seen.len() < 1000, "{} of {cores}", width());
    }
}
