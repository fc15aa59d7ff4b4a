//! How long traces of ten thousand and a million jobs take; figures only, never assertions.
//!
//! `cargo bench --bench share`. Jobs are in memory: six kinds, a load of one, from a fixed seed.

use divan::{Bencher, black_box};
use neap::sim::share::engine::{Keep, simulate};
use neap::sim::share::jobs::Job;
use neap::sim::share::mechanism::Settings;
use neap::sim::share::policy;
use neap::units::{Bytes, Nanos};
use rand_core::Rng;
use rand_pcg::Pcg64;

fn main() {
    divan::main();
}

fn trace(count: u64) -> Vec<Job> {
    let mut random = Pcg64::new(1, 1);
    let mut below = |n: u64| random.next_u64() % n;
    let mut now = 0;
    (0..count)
        .map(|i| {
            now += below(40_000_000_000);
            let kind = below(6);
            Job {
                name: format!("{i}").into(),
                submit: Nanos(now),
                work: Nanos(500_000_000 + below(40_000_000_000)),
                iteration: Nanos(100_000_000),
                need: (Bytes((50 + 100 * kind) << 20), Bytes((800 + 1000 * kind) << 20)),
                utilisation: 400 + 100 * kind as u32,
                priority: 0,
                kill: None,
                rate: None,
                growth: None,
            }
        })
        .collect()
}

#[divan::bench(args = [(10_000, "fifo"), (10_000, "srtf"), (10_000, "pack"), (10_000, "fair"), (10_000, "neap"), (1_000_000, "fifo"), (1_000_000, "srtf"), (1_000_000, "pack"), (1_000_000, "fair"), (1_000_000, "neap")], sample_count = 3)]
fn share(bencher: Bencher, (count, name): (u64, &str)) {
    let settings = Settings::default();
    let Some(policy) = policy::find(name) else { return };
    bencher
        .with_inputs(|| trace(count))
        .bench_refs(|jobs| black_box(simulate(jobs, policy, &settings, Keep::default())));
}
