//! What several test binaries use.
#![allow(dead_code, reason = "none of them uses all of it")]

pub mod counting;
pub mod random;

use std::num::NonZero;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

/// How many random cases a property test runs: a twentieth of `deep`, all of it with `NEAP_DEEP=1`
/// (as `.ci/run` sets it), or the number in `NEAP_CASES`.
pub fn cases(deep: u64) -> u64 {
    let number = |name| std::env::var(name).ok().and_then(|n: String| n.parse::<u64>().ok());
    number("NEAP_CASES").unwrap_or(if is_deep() { deep } else { deep.div_ceil(20) })
}

/// `NEAP_DEEP` asks for every case of the property tests.
pub fn is_deep() -> bool {
    std::env::var_os("NEAP_DEEP").is_some_and(|v| v != "0" && !v.is_empty())
}

/// Runs a test for `count` seeds on all cores. Returns the sums of what the runs counted; panics
/// where one panics.
pub fn on_all_cores<const N: usize>(
    count: u64,
    test: impl Fn(u64) -> [usize; N] + Sync,
) -> [usize; N] {
    let (next, end) = (AtomicU64::new(first()), first() + count);
    let work = || {
        let mut sums = [0; N];
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= end {
                return sums;
            }
            for (sum, counted) in sums.iter_mut().zip(test(seed)) {
                *sum += counted;
            }
        }
    };
    thread::scope(|scope| {
        let cores = thread::available_parallelism().map_or(1, NonZero::get);
        let workers: Vec<_> = (0..cores).map(|_| scope.spawn(work)).collect();
        let mut sums = [0; N];
        for worker in workers {
            let counted = worker.join().unwrap_or_else(|panic| resume_unwind(panic));
            for (sum, counted) in sums.iter_mut().zip(counted) {
                *sum += counted;
            }
        }
        sums
    })
}

/// The first seed: `NEAP_FIRST`, or 0. A failure names its seed; this starts there.
pub fn first() -> u64 {
    std::env::var("NEAP_FIRST").ok().and_then(|n| n.parse().ok()).unwrap_or(0)
}
