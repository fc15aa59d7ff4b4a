//! A recomputed dropout draws the mask that it drew before: results are equal bit for bit.
//!
//! Each test runs the same plan a second time with kernels that draw anew in every execution, which must show: so they have the power to
//! fail. One job has dropout with a mask, one drops inside attention, where the backward draws the mask again.

use std::path::Path;

use neap::contract::check::{check, check_safety};
use neap::contract::{Event, JobPlan, Plan, Trigger};
use neap::device::{builtin, latency};
use neap::job::json::sha256;
use neap::job::liveness::Liveness;
use neap::job::{Arg, Dtype, Graph, Operand, Operator, Phase, Replay, Role, Tensor, chakra};
use neap::plan::emit::Emitted;
use neap::plan::{self, Method, Request, place};
use neap::run::backend::host::kernels::{Kernel, find};
use neap::run::backend::operators::KernelError;
use neap::run::backend::operators::view::Call;
use neap::run::{Lookup, Outcome, Rate, Settings, run_with};
use neap::sim::program::Program;
use neap::units::{Bytes, OpId, TensorId};

const DROPOUT: &str = "aten::native_dropout";
const ATTENTION: &str = "aten::_scaled_dot_product_efficient_attention";

/// Runs a kernel with a key of its own in every recompute.
fn drawn_anew(kind: &str, call: &Call<'_>) -> Result<(), KernelError> {
    let random_key = if call.replay { call.random_key ^ 1 << 32 } else { call.random_key };
    find(kind).expect("a kernel")(&Call { random_key, ..*call })
}

/// The host's kernels, but keyed per execution where they draw.
fn wrong(kind: &str) -> Option<Kernel> {
    match kind {
        DROPOUT => Some(|call| drawn_anew(DROPOUT, call)),
        ATTENTION => Some(|call| drawn_anew(ATTENTION, call)),
        _ => find(kind),
    }
}

fn request(graph: &Graph, method: Method, then: impl FnOnce(&Request<'_>) -> Plan) -> Plan {
    let device = builtin::find("host").expect("built in");
    let latencies = latency::latencies(graph, &device, None);
    then(&Request {
        file: ("x.graph.json".to_owned(), sha256(graph)),
        method,
        ..Request::new(graph, &device, &latencies, Liveness::new(graph).peak)
    })
}

fn go(kernels: Lookup, graph: &Graph, job: &JobPlan, arena: Bytes) -> Outcome {
    let settings = Settings {
        iterations: 3,
        seed: 5,
        link_rate: Rate::Unlimited,
        poison: true,
        keep_state: true,
        ..Settings::default()
    };
    let device = builtin::find("host").expect("built in");
    run_with(kernels, graph, job, arena, &device, &settings, &mut |_| {}).expect("it runs")
}

/// A plan of these events, at first-fit addresses.
fn by_hand(request: &Request<'_>, events: Vec<Event>) -> Plan {
    let mut plan = plan::unplanned(request).expect("unplanned").plan;
    let program = Program::new(request.graph, request.latencies, &events).expect("a program");
    let items = place::items(&program, &Emitted::default());
    let layout = place::place(&items.iter().map(|(item, _)| item.clone()).collect::<Vec<_>>(), 0);
    plan.budget = Bytes(layout.height);
    plan.jobs[0].placements = place::placements(&program, &items, &layout.offsets);
    plan.jobs[0].events = events;
    plan.figures = check_safety(&plan, std::slice::from_ref(request.graph)).expect("safe").figures;
    plan
}

/// The plan runs as the unplanned job does, and does not if recomputes draw anew.
fn same_mask(graph: &Graph, planned: &Plan) {
    check(planned, std::slice::from_ref(graph)).expect("safe");
    let job = &planned.jobs[0];
    let recomputed = |e: &Event| matches!(e, Event::Recompute { operator, keep, .. } if graph.operator(*operator).random && !keep.is_empty());
    assert!(job.events.iter().any(recomputed), "nothing random is recomputed: {:?}", job.events);
    let unplanned = request(graph, Method::Checkpoint(Default::default()), |r| {
        plan::unplanned(r).expect("unplanned").plan
    });
    let plain = go(find, graph, &unplanned.jobs[0], unplanned.figures.arena_bytes);
    let with = go(find, graph, job, planned.figures.arena_bytes);
    assert_eq!(with.checksum, plain.checksum);
    assert_eq!(with.state, plain.state);
    let bits = |o: &Outcome| o.losses.iter().map(|l| l.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&with), bits(&plain));
    let mutated = go(wrong, graph, job, planned.figures.arena_bytes);
    assert_ne!(mutated.checksum, plain.checksum, "another mask does not show");
    let unplanned_mutated = go(wrong, graph, &unplanned.jobs[0], unplanned.figures.arena_bytes);
    assert_eq!(unplanned_mutated.checksum, plain.checksum, "what shows is not the recompute");
}

const WIDTH: u64 = 1024;

fn see(graph: &[Tensor], name: &str, version: u32) -> Operand {
    let index = graph.iter().position(|t| t.name == name).expect("a tensor");
    let t = &graph[index];
    Operand {
        tensor: TensorId::from_index(index),
        version,
        dtype: t.dtype,
        offset: 0,
        shape: t.shape.clone(),
        stride: vec![1],
    }
}

fn call(name: &str, kind: &str, phase: Phase, args: Vec<Arg>, outputs: Vec<Operand>) -> Operator {
    let outputs = outputs.into_iter().map(Some).collect();
    Operator {
        name: name.to_owned(),
        kind: kind.to_owned(),
        phase,
        args,
        outputs,
        hidden: Vec::new(),
        workspace: Bytes::ZERO,
        replay: Replay::Pure,
        random: kind == DROPOUT,
        ..Operator::default()
    }
}

/// y = dropout(v·w) · v; then something of the size of a gradient by way of the dropped values and by way of the mask, and two updates.
fn dropped() -> Graph {
    let tensor = |name: &str, role, dtype: Dtype| Tensor {
        name: name.to_owned(),
        bytes: Bytes(dtype.size() * WIDTH),
        role,
        dtype,
        shape: vec![WIDTH],
        kept_until: None,
    };
    let mut all: Vec<Tensor> = ["v", "w"].map(|n| tensor(n, Role::Parameter, Dtype::F32)).to_vec();
    all.extend(
        ["h", "dropped", "y", "gy", "gv", "gw"].map(|n| tensor(n, Role::Activation, Dtype::F32)),
    );
    all.push(tensor("mask", Role::Activation, Dtype::Bool));
    let see = |name: &str, version| see(&all, name, version);
    let read = |name: &str| Arg::Tensor(see(name, 0));
    let (forward, backward, optimize) = (Phase::Forward, Phase::Backward, Phase::Optimize);
    let operators = vec![
        call("h", "aten::mul", forward, vec![read("v"), read("w")], vec![see("h", 0)]),
        call(
            "dropout",
            DROPOUT,
            forward,
            vec![read("h"), Arg::Float(0.5), Arg::Bool(true)],
            vec![see("dropped", 0), see("mask", 0)],
        ),
        call("y", "aten::mul", forward, vec![read("dropped"), read("v")], vec![see("y", 0)]),
        call(
            "gy",
            "aten::add",
            backward,
            vec![read("y"), read("w"), Arg::Float(1.0)],
            vec![see("gy", 0)],
        ),
        call("gv", "aten::mul", backward, vec![read("gy"), read("dropped")], vec![see("gv", 0)]),
        call(
            "gw",
            "aten::native_dropout_backward",
            backward,
            vec![read("gy"), read("mask"), Arg::Float(2.0)],
            vec![see("gw", 0)],
        ),
        call(
            "v",
            "aten::add_",
            optimize,
            vec![read("v"), read("gv"), Arg::Float(-0.5)],
            vec![see("v", 1)],
        ),
        call(
            "w",
            "aten::add_",
            optimize,
            vec![read("w"), read("gw"), Arg::Float(-0.5)],
            vec![see("w", 1)],
        ),
    ];
    Graph::new("dropped".to_owned(), all, operators, None, None, None).expect("a graph")
}

#[test]
fn a_mask_is_drawn_again() {
    let graph = dropped();
    let at = |op: u32| Trigger { after: Some(OpId(op)) };
    let id = |name: &str| see(&graph.tensors, name, 0).tensor;
    // Dropped after the forward, made again before the backward, both outputs.
    let events = vec![
        Event::Release { tensor: id("dropped"), trigger: at(2) },
        Event::Release { tensor: id("mask"), trigger: at(2) },
        Event::Recompute {
            operator: OpId(1),
            trigger: at(3),
            keep: vec![id("dropped"), id("mask")],
        },
    ];
    let planned = request(&graph, Method::Checkpoint(Default::default()), |r| by_hand(r, events));
    same_mask(&graph, &planned);
}

#[test]
fn attention_drops_again_what_it_dropped() {
    let trace = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/tiny_gpt2-adamw.et.json.gz");
    let mut graph = chakra::import(&trace, &chakra::Options::default()).expect("a trace").graph;
    // The trace was recorded without dropout: here a third is dropped.
    let mut changed = 0;
    for operator in &mut graph.operators {
        let at = match operator.kind.strip_prefix(ATTENTION) {
            Some("") => 5,
            Some("_backward") => 9,
            _ => continue,
        };
        assert_eq!(operator.args[at], Arg::Float(0.0));
        operator.args[at] = Arg::Float(0.3);
        operator.random = at == 5;
        changed += 1;
    }
    assert_eq!(changed, 4);
    let planned = request(&graph, Method::Checkpoint(Default::default()), |r| {
        plan::minimum(r).expect("a plan").plan
    });
    same_mask(&graph, &planned);
}
