//! The planner `neap`.
//!
//! TODO

pub mod book;
pub mod choose;
pub mod clock;
pub mod load;
pub mod remake;
pub mod windows;
pub mod write;

use super::method::{Decision, Given};
use crate::units::Bytes;
use book::Book;
use choose::Chooser;
use clock::Clock;

/// The planner's switches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Swap tensors.
    pub swap: bool,
    /// Swap what nothing generates round the end of the iteration.
    pub across: bool,
    /// Let it leave in the head of the next iteration where that is enough.
    pub head: bool,
    /// Make tensors again.
    pub recompute: bool,
    /// How many tensors may be made for one other's sake.
    pub depth: usize,
    /// The link goes to what is dearest to make again, rather than to what is largest.
    pub price: bool,
    /// Swap with waiting where nothing else is left.
    pub passive: bool,
    /// Windows are fitted to the clock after choosing.
    pub fit: bool,
    /// Leave smaller tensors alone while there is anything else.
    pub min_swap: Bytes,
    /// Steps of improvement.
    pub effort: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            swap: true,
            across: true,
            head: true,
            recompute: true,
            depth: 16,
            price: true,
            passive: true,
            fit: true,
            min_swap: Bytes(64 << 10),
            effort: 4,
        }
    }
}

/// What differs between the starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variant {
    /// Copies are taken to be as slow as when both directions are busy.
    pub contended: bool,
    /// What costs fewer picoseconds... to make again for a byte is never swapped first.
    pub cheap: u64,
}

/// Decides until no slot's load exceeds the target, or nothing is left to do.
#[must_use]
pub fn decide(given: &Given<'_>, options: &Options) -> Decision {
    let Given { graph, latencies, link, pinned, target } = *given;
    let nominal = Clock::nominal(latencies);
    let fresh = Book::new(graph);
    let mut best: Option<(u64, Book<'_>)> = None;
    let debug = std::env::var("NEAPDEBUG").is_ok();
    let t0 = std::time::Instant::now();
    for contended in [false, true] {
        let mut clock = nominal.clone();
        for step in 0..options.effort {
            let variant = Variant { contended, cheap: 0 };
            let t = std::time::Instant::now();
            let mut chooser = Chooser::new(fresh.clone(), latencies, link, pinned, &clock, target, options, variant);
            chooser.rounds();
            let t1 = t.elapsed();
            let mut book = chooser.book;
            let before = clock::run(&book, latencies, link);
            if debug { eprintln!("  contended {contended} step {step}: {:.4} excess {} late {} [{:?}]", before.total as f64 / nominal.total as f64, book.load.peak().1.saturating_sub(target), before.late.len(), t1); }
            let reached = book.load.peak().1 <= target;
            let mut now = before.clone();
            let mut keep = |total: u64, book: &Book<'_>| {};
            if options.fit && reached {
                for i in 0..3 {
                    let mut fitted = book.clone();
                    windows::fit(&mut fitted, &now, link, target, contended);
                    let after = clock::run(&fitted, latencies, link);
                    if debug { eprintln!("     fit {i}: {:.4} late {} excess {}", after.total as f64 / nominal.total as f64, after.late.len(), fitted.load.peak().1.saturating_sub(target)); }
                    let key = after.total;
                    if best.as_ref().is_none_or(|b| key < b.0) { best = Some((key, fitted.clone())); }
                    now = after;
                }
            }
            let key = if reached { before.total } else { u64::MAX };
            if best.as_ref().is_none_or(|b| key < b.0) { best = Some((key, book.clone())); }
            if now.total <= clock.total { break; }
            clock = now;
        }
    }
    let book = best.unwrap().1;
    if debug { eprintln!("  decide {:?}", t0.elapsed()); }
    let peak = book.load.peak();
    Decision { emitted: write::events(&book), peak, reached: peak.1 <= target }
}
