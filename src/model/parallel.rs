//! Work on all cores.

use std::cell::Cell;
use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

thread_local! {
    /// This thread is one of several that share the cores.
    static SHARES: Cell<bool> = const { Cell::new(false) };
}

/// How many threads [`in_parallel`] uses here: one for each core, or one alone within another call,
/// which has the cores already.
#[must_use]
pub fn width() -> usize {
    if SHARES.get() { 1 } else { thread::available_parallelism().map_or(1, NonZero::get) }
}

/// Marks a thread as one of several until it is dropped.
struct Sharing;

impl Sharing {
    fn begin() -> Self {
        SHARES.set(true);
        Self
    }
}

impl Drop for Sharing {
    fn drop(&mut self) {
        SHARES.set(false);
    }
}

/// Runs `work(0)` to `work(count - 1)` on all cores. Results are in that order.
pub fn in_parallel<T: Send>(count: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let workers = width().min(count);
    if workers <= 1 {
        return (0..count).map(work).collect();
    }
    let next = AtomicUsize::new(0);
    let mut all: Vec<(usize, T)> = thread::scope(|scope| {
        let run = || {
            let _sharing = Sharing::begin();
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
    all.sort_unstable_by_key(|(i, _)| *i);
    all.into_iter().map(|(_, t)| t).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_within_work_uses_one_thread() {
        let squares = in_parallel(9, |at| (at * at, width()));
        let cores = width();
        assert!(squares.iter().map(|of| of.0).eq((0..9).map(|at| at * at)));
        assert!(squares.iter().all(|of| of.1 == 1) || cores == 1);
        // One alone has all cores.
        assert_eq!(in_parallel(1, |_| width()), [cores]);
    }
}
