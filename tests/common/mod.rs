//! What several test binaries use.
#![allow(dead_code, reason = "none of them uses all of it")]

pub mod counting;
pub mod random;

use neap::parallel::in_parallel;

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
    let first = first();
    let counted = in_parallel(count as usize, |case| test(first + case as u64));
    counted.into_iter().fold([0; N], |sums, more| std::array::from_fn(|i| sums[i] + more[i]))
}

/// The first seed: `NEAP_FIRST`, or 0. A failure names its seed; this starts there.
pub fn first() -> u64 {
    std::env::var("NEAP_FIRST").ok().and_then(|n| n.parse().ok()).unwrap_or(0)
}
