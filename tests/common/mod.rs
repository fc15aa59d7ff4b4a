//! What several test binaries use.
#![allow(dead_code, reason = "none of them uses all of it")]

pub mod counting;
pub mod random;

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use neap::parallel::in_parallel;

/// How many random cases a property test runs: a twentieth of `deep`, all of it with `NEAP_DEEP=1`
/// (as `.ci/run` sets it), or the number in `NEAP_CASES`.
pub fn cases(deep: u64) -> u64 {
    let number = |name| std::env::var(name).ok().and_then(|n: String| n.parse::<u64>().ok());
    number("NEAP_CASES").unwrap_or(if is_deep() { deep } else { deep.div_ceil(20) })
}

/// The seeds of a fuzz target's inputs: [`cases`] of them from [`first`] on. With
/// `NEAP_FUZZ_SECONDS` it is for so long, from a seed that is another one each time unless
/// `NEAP_FIRST` names it.
pub fn seeds(deep: u64) -> impl Iterator<Item = u64> {
    let asked = std::env::var("NEAP_FUZZ_SECONDS").ok().and_then(|n| n.parse().ok());
    let Some(seconds) = asked else {
        let (from, count) = (first(), cases(deep));
        return Seeds { next: from, from, left: Some(count), until: None };
    };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_nanos() as u64);
    let from = if std::env::var_os("NEAP_FIRST").is_some() { first() } else { now };
    let until = Some(Instant::now() + Duration::from_secs(seconds));
    Seeds { next: from, from, left: None, until }
}

struct Seeds {
    next: u64,
    from: u64,
    left: Option<u64>,
    until: Option<Instant>,
}

impl Iterator for Seeds {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        let ended = self.until.is_some_and(|until| Instant::now() >= until);
        if ended || self.left == Some(0) {
            if self.until.is_some() {
                println!("{} inputs, of seeds from {} on", self.next - self.from, self.from);
            }
            return None;
        }
        self.left = self.left.map(|left| left - 1);
        self.next += 1;
        Some(self.next - 1)
    }
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
