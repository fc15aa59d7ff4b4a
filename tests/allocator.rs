//! The framework's allocator against `PyTorch`'s own answers, and what must hold in any of its states.

use std::path::{Path, PathBuf};

use neap::sim::allocator::replay::{
    LARGEST_DEVICE, Replay, Setting, observe, replay, smallest_capacity, sweep,
};
use neap::sim::allocator::{Allocator, Config, GRANULE, State};
use neap::sim::requests::Request;
use neap::sim::sequence::{Reader, Sequence};
use neap::units::Bytes;
use proptest::prelude::*;
use serde_json::Value;

/// Where the answers are: ours in `fixtures/`, and many more in the shared truth where it is at hand.
fn folders() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let truth = std::env::var_os("NEAP_TRUTH")
        .map_or_else(|| root.join("../shared/truth"), PathBuf::from)
        .join("allocator");
    let mut all = vec![root.join("fixtures/allocator")];
    if truth.exists() {
        all.push(truth);
    } else {
        println!("skipped: {} is not there", truth.display());
    }
    all
}

struct Vector {
    path: PathBuf,
    config: Config,
    capacity: Bytes,
    fraction: Option<f64>,
}

fn vectors(folder: &Path) -> Vec<Vector> {
    let index: Value =
        serde_json::from_slice(&std::fs::read(folder.join("index.json")).unwrap()).unwrap();
    let vector = |v: &Value| Vector {
        path: folder.join(v["file"].as_str().unwrap()),
        config: v["alloc_conf"].as_str().unwrap().parse().unwrap(),
        capacity: Bytes(v["device_bytes"].as_u64().unwrap()),
        fraction: v["memory_fraction"].as_f64(),
    };
    index["vectors"].as_array().unwrap().iter().map(vector).collect()
}

#[test]
fn every_row_is_as_pytorch_answered() {
    for folder in folders() {
        let mut rows = 0;
        for Vector { path, config, capacity, fraction } in vectors(&folder) {
            let mut replay = Replay::new(&config, capacity, fraction);
            let mut reader = Reader::open(&path).unwrap();
            while let Some(request) = reader.request().unwrap() {
                let ok = replay.step(request);
                let (now, want) = (replay.allocator().stats(), reader.expected());
                let answer =
                    (Some(ok), Some(now.allocated.0), Some(now.reserved.0), Some(now.segments));
                let wanted = (want.ok, want.allocated, want.reserved, want.segments);
                assert_eq!(
                    answer,
                    wanted,
                    "{} line {}: {request:?}",
                    path.display(),
                    reader.line()
                );
                rows += 1;
            }
        }
        println!("{}: {rows} rows", folder.display());
        assert!(rows > 0);
    }
}

#[test]
fn the_smallest_device_serves_all_and_none_below_does() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/allocator");
    for name in ["default", "max-split", "expandable", "power2"] {
        let requests = Sequence::read(&folder.join(format!("{name}.csv.gz"))).unwrap().requests;
        for conf in ["", "expandable_segments:True", "max_split_size_mb:32"] {
            let config = conf.parse().unwrap();
            let least = smallest_capacity(&requests, &config, None).unwrap();
            assert_eq!(least.capacity.0 % GRANULE, 0);
            assert!(least.proven, "{name} {conf}");
            let fails = |capacity| replay(&requests, &config, Bytes(capacity), None).stats.ooms > 0;
            assert!(!fails(least.capacity.0), "{name} {conf}");
            for step in 1..=40 {
                assert!(
                    fails(least.capacity.0 - step * GRANULE),
                    "{name} {conf}: {step} granules less do too"
                );
            }
        }
    }
}

#[test]
fn a_sweep_is_its_replays_in_order() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/allocator/default.csv.gz");
    let requests = Sequence::read(&path).unwrap().requests;
    let settings: Vec<Setting> =
        [("", 100), ("expandable_segments:True", 300), ("max_split_size_mb:20", 700)]
            .into_iter()
            .map(|(conf, mib)| Setting {
                config: conf.parse().unwrap(),
                capacity: Bytes(mib << 20),
                memory_fraction: None,
            })
            .collect();
    let reports = sweep(&requests, &settings);
    for (setting, report) in settings.iter().zip(&reports) {
        assert_eq!(*report, replay(&requests, &setting.config, setting.capacity, None));
    }
    assert!(reports[0].first_oom.is_some() && reports[0].stats.ooms > reports[2].stats.ooms);
}

#[test]
fn requests_for_nothing_take_nothing_and_impossible_ones_fail() {
    let mut allocator = Allocator::new(&Config::default(), Bytes(1 << 30), None);
    let nothing = allocator.allocate(Bytes(0), 0).unwrap();
    assert_eq!(allocator.stats().reserved, Bytes(0));
    allocator.free(nothing);
    for bytes in [u64::MAX, 1 << 62, (1 << 30) + 1] {
        assert!(allocator.allocate(Bytes(bytes), 0).is_err());
    }
    let block = allocator.allocate(Bytes(1), 0).unwrap();
    allocator.free(block);
    allocator.free(block);
    assert_eq!((allocator.stats().allocated, allocator.stats().ooms), (Bytes(0), 3));
}

/// What must hold between any two requests.
fn consistent(allocator: &Allocator) {
    let segments = allocator.segments();
    let stats = allocator.stats();
    let (mut allocated, mut requested, mut reserved, mut used) = (0, 0, 0, 0);
    let mut end = 0;
    for segment in &segments {
        assert!(segment.address >= end, "segments don't overlap");
        let mut at = segment.address;
        for pair in segment.blocks.windows(2) {
            assert!(
                pair[0].state != pair[1].state || pair[0].state == State::Used,
                "free neighbours are merged: {pair:?}"
            );
        }
        for block in &segment.blocks {
            assert_eq!(block.address, at, "blocks tile their segment");
            assert!(block.bytes.0 > 0 && block.state != State::Gone);
            at += block.bytes.0;
            if block.state == State::Used {
                assert!(block.requested <= block.bytes);
                allocated += block.bytes.0;
                requested += block.requested.0;
            }
        }
        end = at;
        reserved += segment.bytes().0;
        used += segment.bytes().0.next_multiple_of(GRANULE);
        assert!(segment.inactive_split() <= segment.bytes());
    }
    assert_eq!(
        (stats.allocated.0, stats.requested.0, stats.reserved.0),
        (allocated, requested, reserved)
    );
    assert_eq!(stats.segments, segments.iter().filter(|s| !s.growing).count() as u64);
    assert_eq!(stats.fragmentation(), Bytes(reserved - allocated));
    assert_eq!(allocator.device().used().0, used);
    assert!(used <= allocator.device().capacity().0);
    assert!(
        stats.peak_allocated >= stats.allocated
            && stats.peak_reserved >= stats.reserved
            && stats.peak_segments >= stats.segments
    );
}

const MIB: u64 = 1 << 20;

fn sizes() -> impl Strategy<Value = u64> {
    prop_oneof![
        0..3000u64,
        MIB - 1024..MIB + 1024,
        9 * MIB..11 * MIB,
        MIB..80 * MIB,
        prop::sample::select(vec![
            0,
            1,
            512,
            513,
            MIB,
            MIB + 1,
            2 * MIB,
            10 * MIB - 1,
            10 * MIB,
            20 * MIB,
            32 * MIB,
            64 * MIB
        ]),
    ]
}

fn configs() -> impl Strategy<Value = Config> {
    let parts = (
        any::<bool>(),
        prop::sample::select(vec![
            "",
            "max_split_size_mb:20,",
            "max_split_size_mb:48,",
            "max_split_size_mb:48,max_non_split_rounding_mb:64,",
        ]),
        prop::sample::select(vec![
            "",
            "roundup_power2_divisions:4,",
            "roundup_power2_divisions:[1:8,16:2,>:1],",
        ]),
        prop::sample::select(vec![
            "",
            "garbage_collection_threshold:0.3,per_process_memory_fraction:0.7,",
            "per_process_memory_fraction:0.9",
        ]),
    );
    parts.prop_map(|(grow, split, round, limit)| {
        let grow = if grow { "expandable_segments:True," } else { "" };
        format!("{grow}{split}{round}{limit}").parse().unwrap()
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn every_state_is_consistent(
        config in configs(),
        capacity in prop::sample::select(vec![24 * MIB, 100 * MIB, 700 * MIB, LARGEST_DEVICE.0]),
        wishes in prop::collection::vec((0..100u8, 0..40u32, sizes(), 0..3u32), 1..250),
    ) {
        let mut live = [false; 40];
        let mut requests = Vec::new();
        for (kind, id, bytes, stream) in wishes {
            requests.push(match (kind, live[id as usize]) {
                (0, _) => Request::EmptyCache,
                (_, true) => Request::Free { id },
                (_, false) => Request::Allocate { id, bytes: Bytes(bytes), stream },
            });
            if kind > 0 {
                live[id as usize] ^= true;
            }
        }
        let mut peak = 0;
        let report = observe(&requests, &config, Bytes(capacity), None, |_, _, allocator| {
            consistent(allocator);
            peak = peak.max(allocator.stats().reserved.0);
        });
        prop_assert_eq!(report.stats.peak_reserved.0, peak);
        prop_assert_eq!(report.events, requests.len() as u64);

        // Everything freed and the cache emptied, nothing is held.
        let mut again = Replay::new(&config, Bytes(capacity), None);
        for request in requests.iter().copied().chain((0..40).map(|id| Request::Free { id })) {
            again.step(request);
        }
        again.step(Request::EmptyCache);
        let stats = again.allocator().stats();
        prop_assert_eq!((stats.allocated, stats.requested, stats.reserved, stats.segments), (Bytes(0), Bytes(0), Bytes(0), 0));
        prop_assert_eq!(again.allocator().device().used(), Bytes(0));
    }
}
