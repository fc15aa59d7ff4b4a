//! How long reading, planning, simulating and checking take; figures only, never assertions.
//!
//! `cargo bench` uses the fixtures; NEAP_BENCH_GRAPH names another *.graph.json.

use std::collections::BTreeMap;
use std::path::PathBuf;

use divan::{Bencher, black_box};
use neap::device::{builtin, latency};
use neap::job::chakra::{Options as Import, import};
use neap::job::{Graph, json};
use neap::plan::{self, Request};
use neap::schedule::check::check;
use neap::sim::engine::{self, Durations};
use neap::sim::program::Program;
use neap::units::Bytes;

fn main() {
    divan::main();
}

fn trace() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures/resnet18-adam.et.json.gz")
}

fn graph() -> Graph {
    match std::env::var_os("NEAP_BENCH_GRAPH") {
        Some(path) => json::read(path.as_ref()).expect("readable"),
        None => import(&trace(), &Import { as_recorded: false, updates_early: false }).expect("imports").graph,
    }
}

fn with_request<R>(share: u64, f: impl FnOnce(&Request<'_>) -> R) -> R {
    let graph = graph();
    let device = builtin::find("a6000").expect("built in");
    let latencies = latency::latencies(&graph, &device, None);
    let peak = neap::job::liveness::Liveness::of(&graph).peak;
    f(&Request {
        graph: &graph,
        file: (String::new(), json::sha256(&graph)),
        device: &device,
        latencies: &latencies,
        budget: Bytes(peak.0 * share / 100),
        method: plan::Method::default(),
        recorded_options: BTreeMap::new(),
    })
}

#[divan::bench]
fn import_a_trace(bencher: Bencher) {
    bencher.bench(|| import(&trace(), &Import { as_recorded: false, updates_early: false }));
}

#[divan::bench(args = [90, 80, 70, 60])]
fn plan_at(bencher: Bencher, share: u64) {
    with_request(share, |request| bencher.bench_local(|| plan::make(black_box(request)).is_ok()));
}

#[divan::bench]
fn simulate(bencher: Bencher) {
    with_request(80, |request| {
        let planned = plan::make(request).expect("fits");
        let program = Program::placed(request.graph, &planned.plan.jobs[0]).expect("reads");
        let durations = Durations::nominal(&program, &request.device.link);
        bencher.bench_local(|| engine::run(black_box(&program), &request.device.link, &durations).is_ok());
    });
}

#[divan::bench]
fn prove(bencher: Bencher) {
    with_request(80, |request| {
        let planned = plan::make(request).expect("fits");
        let graphs = [request.graph.clone()];
        bencher.bench_local(|| check(black_box(&planned.plan), &graphs).is_ok());
    });
}
