//! How long placement takes; figures only, never assertions.
//!
//! NEAP_BENCH_PROBLEM names a problem (CSV with id,lower,upper,size) in place of the made ones; NEAP_BENCH_CAPACITY its capacity.

use std::path::Path;

use divan::{Bencher, black_box};
use neap::plan::place::problem::Problem;
use neap::plan::place::search::{Options, search};
use neap::plan::place::{self, Item, check, heuristic};

fn main() {
    divan::main();
}

/// Lives that nest, as activations' do, and short ones among them; the sizes from a fixed sequence.
fn made(count: u32) -> Vec<Item> {
    let mut state = 1u64;
    let mut next = |below: u64| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    (0..count)
        .map(|i| {
            let size = 512 * (1 + next(4096));
            let span = if i % 3 == 0 {
                (2 * i, 4 * count - 2 * i)
            } else {
                (2 * i, 2 * i + 2 + next(8) as u32)
            };
            Item::new(size, vec![(span.0.min(span.1 - 1), span.1)])
        })
        .collect()
}

fn problem() -> (Vec<Item>, u64) {
    match std::env::var_os("NEAP_BENCH_PROBLEM") {
        Some(path) => {
            let items = Problem::read(Path::new(&path)).expect("readable").items();
            let capacity = std::env::var("NEAP_BENCH_CAPACITY").ok().and_then(|c| c.parse().ok());
            let load = place::load(&items);
            (items, capacity.unwrap_or(load))
        }
        None => {
            let items = made(200);
            let load = place::load(&items);
            (items, load)
        }
    }
}

#[divan::bench(args = [100, 1000, 5000])]
fn quick(bencher: Bencher, count: u32) {
    let items = made(count);
    let load = place::load(&items);
    bencher.bench_local(|| heuristic::place(black_box(&items), load));
}

#[divan::bench(args = [100, 1000, 5000])]
fn plan(bencher: Bencher, count: u32) {
    let items = made(count);
    let load = place::load(&items);
    bencher.bench_local(|| place::place(black_box(&items), load));
}

#[divan::bench(sample_count = 5, sample_size = 1)]
fn a_million_steps(bencher: Bencher) {
    let (items, capacity) = problem();
    let options = Options { effort: 1_000_000, without: Vec::new() };
    bencher.bench_local(|| search(black_box(&items), capacity, &options));
}

#[divan::bench(args = [1000, 100_000])]
fn checked(bencher: Bencher, count: u64) {
    let all: Vec<check::Held> = (0..count)
        .map(|i| check::Held {
            owner: i as usize,
            from: i,
            until: i + 50,
            offset: i % 50 * 8,
            size: 8,
        })
        .collect();
    bencher.bench_local(|| check::check(black_box(&all), u64::MAX));
}
