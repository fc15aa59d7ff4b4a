//! How fast a profiler's trace is read; figures only, never assertions.
//!
//! `cargo bench --bench trace` uses the fixture; NEAP_BENCH_TRACE names another, plain or gzipped.

use std::io::Read;
use std::path::PathBuf;

use divan::counter::BytesCount;
use divan::{Bencher, black_box};
use neap::estimate::trace::{Limits, parse, read};

fn main() {
    divan::main();
}

fn path() -> PathBuf {
    let fixture = || {
        PathBuf::from(env!("CARGO_MANIFEST_DIR"))
            .join("fixtures/traces/tiny_cnn-adam-8-32-start.profile.json.gz")
    };
    std::env::var_os("NEAP_BENCH_TRACE").map_or_else(fixture, PathBuf::from)
}

/// From the file, decompressing in a second thread; throughput is of decompressed bytes.
#[divan::bench]
fn from_file(bencher: Bencher) {
    let path = path();
    let bytes = read(&path, &Limits::default()).expect("a trace").bytes.0;
    bencher
        .counter(BytesCount::new(bytes))
        .bench(|| read(black_box(&path), &Limits::default()).expect("a trace"));
}

/// From memory, in one thread: the scanner itself.
#[divan::bench]
fn from_memory(bencher: Bencher) {
    let (path, mut text) = (path(), Vec::new());
    neap::files::open(&path).expect("opens").read_to_end(&mut text).expect("readable");
    bencher
        .counter(BytesCount::new(text.len()))
        .bench(|| parse(black_box(&text[..]), &path, &Limits::default()).expect("a trace"));
}
