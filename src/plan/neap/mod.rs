//! The planner `neap`.
//!
//! TODO

pub mod book;
pub mod choose;
pub mod clock;
pub mod drop;
pub mod extend;
pub mod load;
pub mod remake;
pub mod windows;
pub mod write;

use super::method::{Decision, Given};
use crate::device::Link;
use crate::sim::engine::copy_time;
use crate::sim::program::Direction;
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
            effort: std::env::var("EFFORT").map_or(40, |e| e.parse().unwrap()),
        }
    }
}

/// What differs between the starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variant {
    /// Copies are taken to last so much longer than alone, in percent.
    pub slack: u64,
    /// What is cheapest to make again is not swapped at first: this share of what must go, in percent.
    pub remade: u64,
    /// The dearest to make again go first, rather than the largest.
    pub dearest: bool,
    /// Dead inputs live on where that frees more than it costs.
    pub extend: bool,
    /// Long-lived tensors leave before the end of the iteration rather than after it, where both would do: the link has
    /// nothing else to do then, but little time.
    pub tail: bool,
}

impl Variant {
    fn time(self, link: &Link, direction: Direction, bytes: Bytes) -> u64 {
        copy_time(link, direction, bytes, false).0 * (100 + self.slack) / 100
    }
}

/// What a tensor may not be chosen for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ban {
    /// Swapping in time.
    pub swap: bool,
    /// Making again.
    pub remake: bool,
}

struct Search<'a, 'o> {
    given: &'o Given<'a>,
    options: &'o Options,
    fresh: Book<'a>,
    nominal: Clock,
    runs: u32,
}

#[derive(Clone)]
struct Found<'a> {
    key: (bool, u64, u64),
    book: Book<'a>,
    clock: Clock,
    variant: Variant,
    bans: Vec<Ban>,
}

impl<'a> Search<'a, '_> {
    fn tries(&mut self, variant: Variant, bans: &[Ban]) -> Found<'a> {
        let Given { latencies, link, pinned, target, .. } = *self.given;
        self.runs += 1;
        let mut fresh = self.fresh.clone();
        if variant.extend {
            let (slot, _) = fresh.load.peak();
            extend::extend(&mut fresh, slot as u32, self.options.min_swap.0);
        }
        let mut chooser = Chooser::new(fresh, latencies, link, pinned, &self.nominal, target, self.options, variant, bans);
        chooser.rounds();
        let mut book = chooser.book;
        if std::env::var("NODROP").is_err() {
            drop::drop(&mut book, latencies, target);
        }
        let clock = clock::run(&book, latencies, link);
        let peak = book.load.peak().1;
        let mut best = Found { key: (peak > target, clock.total, peak), book, clock, variant, bans: bans.to_vec() };
        if self.options.fit && peak <= target {
            for slack in [variant.slack, 33] {
                for _ in 0..2 {
                    let mut fitted = best.book.clone();
                    windows::fit(&mut fitted, &best.clock, link, target, Variant { slack, ..variant });
                    let clock = clock::run(&fitted, latencies, link);
                    if clock.total < best.clock.total {
                        best.key = (false, clock.total, fitted.load.peak().1);
                        best.book = fitted;
                        best.clock = clock;
                    } else {
                        break;
                    }
                }
            }
        }
        best
    }
}

/// Decides until no slot's load exceeds the target, or nothing is left to do.
#[must_use]
pub fn decide(given: &Given<'_>, options: &Options) -> Decision {
    let debug = std::env::var("NEAPDEBUG").is_ok();
    let t0 = std::time::Instant::now();
    let mut search = Search { given, options, fresh: Book::new(given.graph), nominal: Clock::nominal(given.latencies), runs: 0 };
    let none = vec![Ban::default(); given.graph.tensors.len()];
    let mut best: Option<Found<'_>> = None;
    let mut variant = Variant { slack: 15, remade: 50, dearest: false, extend: false, tail: false };
    let mut seen: Vec<Variant> = Vec::new();
    'again: for _ in 0..3 {
        let before = variant;
        for dimension in 0..5 {
            let turns: Vec<Variant> = match dimension {
                0 => [0, 15, 33].into_iter().map(|slack| Variant { slack, ..variant }).collect(),
                1 => [0, 25, 50, 75, 100, 150].into_iter().map(|remade| Variant { remade, ..variant }).collect(),
                2 => [false, true].into_iter().map(|extend| Variant { extend, ..variant }).collect(),
                3 => [false, true].into_iter().map(|tail| Variant { tail, ..variant }).collect(),
                _ => [false, true].into_iter().map(|dearest| Variant { dearest, ..variant }).collect(),
            };
            for turn in turns {
                if seen.contains(&turn) { continue; }
                seen.push(turn);
                let found = search.tries(turn, &none);
                if best.as_ref().is_none_or(|b| found.key < b.key) {
                    variant = turn;
                    best = Some(found);
                }
            }
        }
        if variant == before { break 'again; }
    }
    let mut best = best.unwrap();
    let nominal = search.nominal.total as f64;
    if debug {
        eprintln!("  start {:.4} {:?} runs {} {:?}", best.key.1 as f64 / nominal, best.variant, search.runs, t0.elapsed());
    }
    let mut left = options.effort;
    'outer: while left > 0 {
        let mut moves: Vec<(u64, bool, crate::units::TensorId)> = best.clock.late.iter().map(|&(t, _, w)| (w, true, t)).collect();
        for (&(_, t), chain) in &best.book.chains {
            moves.push((chain.iter().map(|id| given.latencies[id.index()].time.0).sum(), false, t));
        }
        moves.sort_unstable_by_key(|m| std::cmp::Reverse(*m));
        moves.dedup_by_key(|m| m.2);
        for (_, late, tensor) in moves {
            if left == 0 {
                break 'outer;
            }
            let mut bans = best.bans.clone();
            let ban = &mut bans[tensor.index()];
            if late { if ban.swap { continue; } ban.swap = true } else { if ban.remake { continue; } ban.remake = true };
            left -= 1;
            let found = search.tries(best.variant, &bans);
            if found.key < best.key {
                best = found;
                continue 'outer;
            }
        }
        break;
    }
    if std::env::var("LATE").is_ok() {
        for (t, g, w) in &best.clock.late { eprintln!("   late {} gap {g} {:?} ends {:?} waited {:.5} {:?} need at {:.4}", given.graph.tensor(*t).name, given.graph.tensor(*t).bytes, best.book.ends(*t,*g), *w as f64 / nominal, best.book.gap(*t,*g), best.clock.slot(best.book.ends(*t,*g).1) as f64 / nominal); }
        for i in 0..50 { let n = best.book.load.slots(); let (a,b)=(i*n/50,(i+1)*n/50); eprint!(" {:.3}", best.book.load.most(a,b) as f64 / given.target as f64); } eprintln!();
        std::process::exit(0);
    }
    let book = best.book;
    if debug {
        eprintln!("  decide {:.4} runs {} {:?}", best.key.1 as f64 / nominal, search.runs, t0.elapsed());
    }
    let peak = book.load.peak();
    Decision { emitted: write::events(&book), peak, reached: peak.1 <= given.target }
}
