//! How many requests a second the framework's allocator answers; figures only, never assertions.
//!
//! `cargo bench --bench allocator`. Sequences are in memory; ten million events each, from a fixed seed.

use std::sync::OnceLock;

use divan::counter::ItemsCount;
use divan::{Bencher, black_box};
use neap::sim::allocator::Config;
use neap::sim::allocator::replay::{LARGEST_DEVICE, replay};
use neap::sim::requests::Request;
use neap::units::Bytes;
use rand_core::Rng;
use rand_pcg::Pcg64Mcg;

const EVENTS: usize = 10_000_000;

fn main() {
    divan::main();
}

struct Random(Pcg64Mcg);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        (self.0.next_u64() % n as u64) as usize
    }
}

/// Blocks of 400 sizes from 512 B to 32 MiB come and go, up to 1,500 alive, on two streams.
fn churn() -> &'static [Request] {
    static ALL: OnceLock<Vec<Request>> = OnceLock::new();
    ALL.get_or_init(|| {
        let mut random = Random(Pcg64Mcg::new(5));
        let sizes: Vec<Bytes> = (0..400)
            .map(|i| Bytes((512 << (i / 25)) + random.below(512 << (i / 25)) as u64))
            .collect();
        let (mut live, mut vacant, mut all) =
            (Vec::new(), (0..1500).rev().collect::<Vec<u32>>(), Vec::with_capacity(EVENTS));
        while all.len() < EVENTS {
            if !live.is_empty() && (vacant.is_empty() || random.below(100) < 48) {
                let at =
                    if random.below(2) == 0 { live.len() - 1 } else { random.below(live.len()) };
                let id = live.swap_remove(at);
                vacant.push(id);
                all.push(Request::Free { id });
            } else {
                let id = vacant.pop().expect("some are vacant");
                live.push(id);
                let stream = u32::from(random.below(20) == 0);
                all.push(Request::Allocate { id, bytes: sizes[random.below(sizes.len())], stream });
            }
        }
        all
    })
}

/// Iterations of training: 300 layers' activations, freed in reverse with a gradient and a temporary each.
fn training() -> &'static [Request] {
    static ALL: OnceLock<Vec<Request>> = OnceLock::new();
    ALL.get_or_init(|| {
        let mut random = Random(Pcg64Mcg::new(7));
        let sizes: Vec<Bytes> =
            (0..300).map(|i| Bytes((4096 << (i % 13)) + 8 * random.below(500) as u64)).collect();
        let mut all = Vec::with_capacity(EVENTS + 2000);
        let allocate = |id, bytes| Request::Allocate { id, bytes, stream: 0 };
        while all.len() < EVENTS {
            for (id, &bytes) in (0..300).zip(&sizes) {
                all.extend([
                    allocate(1000 + id, bytes),
                    allocate(id, bytes),
                    Request::Free { id: 1000 + id },
                ]);
            }
            for (id, &bytes) in (0..300).zip(&sizes).rev() {
                all.extend([
                    allocate(2000 + id, bytes),
                    allocate(1000 + id, bytes),
                    Request::Free { id },
                    Request::Free { id: 1000 + id },
                ]);
            }
            all.extend((0..300).map(|id| Request::Free { id: 2000 + id }));
        }
        all.truncate(EVENTS);
        all
    })
}

fn measure(bencher: Bencher<'_, '_>, requests: &[Request], conf: &str) {
    let config: Config = conf.parse().expect("a configuration");
    bencher
        .counter(ItemsCount::new(requests.len()))
        .bench_local(|| replay(black_box(requests), &config, LARGEST_DEVICE, None));
}

#[divan::bench(args = ["", "max_split_size_mb:64", "expandable_segments:True"], sample_count = 3, sample_size = 1)]
fn churn_of(bencher: Bencher, conf: &str) {
    measure(bencher, churn(), conf);
}

#[divan::bench(args = ["", "max_split_size_mb:64", "expandable_segments:True"], sample_count = 3, sample_size = 1)]
fn training_of(bencher: Bencher, conf: &str) {
    measure(bencher, training(), conf);
}
