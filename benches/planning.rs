//! How long reading, planning, simulating and checking take; figures only, never assertions.
//!
//! `cargo bench` uses the fixtures; NEAP_BENCH_GRAPH names another *.graph.json.

use std::path::PathBuf;

use divan::{Bencher, black_box};
use neap::contract::check::check;
use neap::device::{builtin, latency};
use neap::job::chakra::{Options as Import, import};
use neap::job::{Arg, Dtype, Graph, Operand, Operator, Phase, Replay, Role, Tensor, json};
use neap::plan::{self, Request};
use neap::sim::engine::{self, Durations};
use neap::sim::program::Program;
use neap::units::{Bytes, TensorId};

fn main() {
    divan::main();
}

fn trace() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures/resnet18-adam.et.json.gz")
}

fn graph() -> Graph {
    match std::env::var_os("NEAP_BENCH_GRAPH") {
        Some(path) => json::read(path.as_ref()).expect("readable"),
        None => {
            import(&trace(), &Import { as_recorded: false, updates_early: false })
                .expect("imports")
                .graph
        }
    }
}

/// Forward and backward over so many layers with weights: two operators for each, of sizes and times from a fixed sequence.
fn chain(operators: usize) -> Graph {
    let layers = operators / 2;
    let mut state = 1u64;
    let mut next = |below: u64| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    // The input and what each layer makes; weights; gradients of both, from the last layer to the first.
    let (weight, gradient) = (layers + 1, 2 * layers + 1);
    let sizes: Vec<u64> = (0..=layers).map(|_| (1 + next(64)) << 16).collect();
    let bytes = |tensor: usize| match tensor {
        t if t < weight => sizes[t],
        t if t < gradient => 1 << 16,
        t if (t - gradient).is_multiple_of(2) => sizes[layers - (t - gradient) / 2],
        _ => 1 << 16,
    };
    let operand = |tensor: usize| Operand {
        tensor: TensorId::from_index(tensor),
        version: 0,
        dtype: Dtype::U8,
        offset: 0,
        shape: vec![bytes(tensor)],
        stride: vec![1],
    };
    let operator = |name: String, phase, reads: &[usize], makes: &[usize], time: u64| Operator {
        name,
        kind: "layer".to_owned(),
        phase,
        args: reads.iter().map(|&t| Arg::Tensor(operand(t))).collect(),
        outputs: makes.iter().map(|&t| Some(operand(t))).collect(),
        hidden: Vec::new(),
        workspace: Bytes::ZERO,
        replay: Replay::Pure,
        random: false,
        duration_ns: Some(time),
        ..Operator::default()
    };
    let mut all: Vec<Operator> = (0..layers)
        .map(|i| {
            operator(
                format!("f{i}"),
                Phase::Forward,
                &[i, weight + i],
                &[i + 1],
                10_000 + next(200_000),
            )
        })
        .collect();
    for i in 0..layers {
        let (layer, from, to) = (layers - 1 - i, gradient + 2 * i, gradient + 2 * i + 2);
        let first = if i == 0 { layers } else { from };
        all.push(operator(
            format!("b{i}"),
            Phase::Backward,
            &[first, layer, weight + layer],
            &[from + 1, to],
            20_000 + next(400_000),
        ));
    }
    let tensors = (0..gradient + 2 * layers + 2).map(|i| Tensor {
        name: format!("t{i}"),
        bytes: Bytes(bytes(i)),
        role: if i >= weight && i < gradient { Role::Parameter } else { Role::Activation },
        dtype: Dtype::U8,
        shape: vec![bytes(i)],
        kept_until: None,
    });
    Graph::new("chain".to_owned(), tensors.collect(), all, None, None, None).expect("a chain")
}

#[divan::bench(args = [1_000, 10_000, 100_000], sample_count = 1, sample_size = 1)]
fn chain_of(bencher: Bencher, operators: usize) {
    with_graph(&chain(operators), 50, |request| {
        bencher.bench_local(|| plan::make(black_box(request)).is_ok())
    });
}

fn with_request<R>(share: u64, f: impl FnOnce(&Request<'_>) -> R) -> R {
    with_graph(&graph(), share, f)
}

fn with_graph<R>(graph: &Graph, share: u64, f: impl FnOnce(&Request<'_>) -> R) -> R {
    let device = builtin::find("a6000").expect("built in");
    let latencies = latency::latencies(graph, &device, None);
    let peak = neap::job::liveness::Liveness::new(graph).peak;
    f(&Request {
        file: (String::new(), json::sha256(graph)),
        ..Request::new(graph, &device, &latencies, Bytes(peak.0 * share / 100))
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
        bencher.bench_local(|| {
            engine::run(black_box(&program), &request.device.link, &durations).is_ok()
        });
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
