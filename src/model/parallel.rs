//! Work on all cores.

use std::cell::Cell;
use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use crate::compact::CompactSort;

thread_local! {
    /// The cores that this thread may use; zero where it is not one of several.
    static CORES: Cell<usize> = const { Cell::new(0) };
}

/// How many threads [`in_parallel`] uses here: one for each core, and within another call as many
/// as each of that call's threads has cores.
#[must_use]
pub fn width() -> usize {
    match CORES.get() {
        0 => thread::available_parallelism().map_or(1, NonZero::get),
        cores => cores,
    }
}

/// Gives a thread some of the cores until this is dropped.
struct Cores(usize);

impl Cores {
    fn of(cores: usize) -> Self {
        Self(CORES.replace(cores.max(1)))
    }
}

impl Drop for Cores {
    fn drop(&mut self) {
        CORES.set(self.0);
    }
}

/// Runs `work(0)` to `work(count - 1)` on all cores. Results are in that order.
pub fn in_parallel<T: Send>(count: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let all = width();
    let workers = all.min(count);
    if workers <= 1 {
        return (0..count).map(work).collect();
    }
    let next = AtomicUsize::new(0);
    let mut all: Vec<(usize, T)> = thread::scope(|scope| {
        let run = || {
            let _cores = Cores::of(all / workers);
            let mut mine = Vec::new();
            loop {
                let i = next.fetch_add(1, Ordering::Relaxed);
                if i >= count {
                    return mine;
                }
                mine.push((i, work(i)));
            }
        };
        let threads: Vec<_> = (1..workers).map(|_| scope.spawn(run)).collect();
        let mut all = run();
        for thread in threads {
            match thread.join() {
                Ok(more) => all.extend(more),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        all
    });
    all.compact_sort_by_key(|(i, _)| *i);
    all.into_iter().map(|(_, t)| t).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_within_work_shares_the_cores() {
        let cores = width();
        for count in [1, 2, 9] {
            let squares = in_parallel(count, |at| (at * at, width()));
            assert!(squares.iter().map(|of| of.0).eq((0..count).map(|at| at * at)));
            let each = (cores / cores.min(count)).max(1);
            assert!(squares.iter().all(|of| of.1 == each), "{count}: {squares:?} of {cores}");
            assert_eq!(width(), cores);
        }
    }
}
