//! What several test binaries use.
#![allow(dead_code, reason = "none of them uses all of it")]

pub mod counting;
pub mod random;

/// `NEAP_CASES`, or the number that is usual.
pub fn cases(usual: u64) -> u64 {
    std::env::var("NEAP_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(usual)
}
