//! What several test binaries use.
#![allow(dead_code, reason = "none of them uses all of it")]

pub mod counting;
pub mod random;

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

/// The first seed: `NEAP_FIRST`, or 0. A failure names its seed; this starts there.
pub fn first() -> u64 {
    std::env::var("NEAP_FIRST").ok().and_then(|n| n.parse().ok()).unwrap_or(0)
}
