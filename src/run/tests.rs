//! Small graphs with kernels of their own: planned runs equal unplanned ones, whatever copies do.

use std::collections::BTreeMap;

use super::backend::host::kernels::Kernel;
use super::backend::operators::KernelError;
use super::backend::operators::view::{Call, Operand as Seen, View};
use super::*;
use crate::contract::{Event, Latency, Source, Trigger};
use crate::device::Rates;
use crate::job::{Arg, Operand, Operator, Phase, Replay, Role, Tensor};
use crate::plan::emit::Emitted;
use crate::plan::place;
use crate::units::{OpId, TensorId};

mod replan;

const N: u64 = 3000;

fn profile() -> Profile {
    let giga = 1_000_000_000;
    Profile {
        name: "test".into(),
        source: String::new(),
        memory_bytes: Bytes(1 << 30),
        reserve_bytes: Bytes::ZERO,
        flops: Rates { f32: giga, f16: giga, f64: giga },
        memory_bandwidth: giga,
        efficiency_percent: 100,
        link: Link {
            h2d: giga,
            d2h: giga,
            h2d_contended: giga / 2,
            d2h_contended: giga / 2,
            overhead_ns: 1000,
        },
        launch_overhead_ns: 0,
        pinned_bytes: Bytes(1 << 30),
        multiprocessors: None,
    }
}

// Kernels: every view is contiguous f32, of any length.

fn get(view: &View, i: usize) -> f32 {
    // SAFETY: tests only ask for elements of the view's shape.
    unsafe { view.data.cast::<f32>().add(i).read() }
}

fn put(view: &View, i: usize, value: f32) {
    // SAFETY: as in `get`.
    unsafe { view.data.cast::<f32>().add(i).write(value) }
}

fn len(view: &View) -> usize {
    view.shape.iter().product()
}

fn arg<'a>(call: &'a Call<'_>, i: usize) -> &'a View {
    match &call.args[i] {
        Seen::Tensor(view) => view,
        other => panic!("argument {i} is {other:?}"),
    }
}

fn out<'a>(call: &'a Call<'_>) -> &'a View {
    call.outputs[0].as_ref().expect("an output")
}

fn each(call: &Call<'_>, f: impl Fn(usize) -> f32) -> Result<(), KernelError> {
    (0..len(out(call))).for_each(|i| put(out(call), i, f(i)));
    Ok(())
}

fn input(call: &Call<'_>) -> Result<(), KernelError> {
    let data = &call.batch[0];
    each(call, |i| f32::from_le_bytes(data[4 * i..4 * i + 4].try_into().unwrap()))
}

fn mul(call: &Call<'_>) -> Result<(), KernelError> {
    each(call, |i| get(arg(call, 0), i) * get(arg(call, 1), i))
}

fn blend(call: &Call<'_>) -> Result<(), KernelError> {
    each(call, |i| get(arg(call, 0), i) * 0.625 + get(arg(call, 1), i) * 0.5)
}

fn relu_(call: &Call<'_>) -> Result<(), KernelError> {
    each(call, |i| get(arg(call, 0), i).max(0.0))
}

fn kept(call: &Call<'_>, i: usize) -> bool {
    seed::mix(call.random_key << 40 ^ call.iteration << 20 ^ i as u64) & 1 == 1
}

fn drop_some(call: &Call<'_>) -> Result<(), KernelError> {
    each(call, |i| if kept(call, i) { get(arg(call, 0), i) * 2.0 } else { 0.0 })
}

fn drop_backward(call: &Call<'_>) -> Result<(), KernelError> {
    let mask = (0..len(out(call))).all(|i| (get(arg(call, 1), i) != 0.0) <= kept(call, i));
    if !mask {
        return Err("the mask is another".into());
    }
    drop_some(call)
}

fn stat(call: &Call<'_>) -> Result<(), KernelError> {
    let n = len(arg(call, 0));
    if !call.replay {
        let mean = (0..n).map(|i| get(arg(call, 0), i)).sum::<f32>() / n as f32;
        put(arg(call, 1), 0, get(arg(call, 1), 0) * 0.9 + mean * 0.1);
    }
    each(call, |i| get(arg(call, 0), i) * 0.5)
}

fn sum(call: &Call<'_>) -> Result<(), KernelError> {
    put(out(call), 0, (0..len(arg(call, 0))).map(|i| get(arg(call, 0), i)).sum());
    Ok(())
}

fn update(call: &Call<'_>) -> Result<(), KernelError> {
    (0..len(arg(call, 0)))
        .for_each(|i| put(arg(call, 0), i, get(arg(call, 0), i) - 0.01 * get(arg(call, 1), i)));
    Ok(())
}

fn fail(call: &Call<'_>) -> Result<(), KernelError> {
    if call.iteration < 2 { blend(call) } else { Err("enough".into()) }
}

fn broken(call: &Call<'_>) -> Result<(), KernelError> {
    assert!(call.iteration < 2, "a bug at {}", call.iteration);
    blend(call)
}

fn kernels(kind: &str) -> Option<Kernel> {
    Some(match kind {
        "t::input" => input,
        "t::mul" => mul,
        "t::blend" => blend,
        "t::relu_" => relu_,
        "t::drop" => drop_some,
        "t::drop_backward" => drop_backward,
        "t::stat" => stat,
        "t::sum" => sum,
        "t::update" => update,
        "t::fail" => fail,
        "t::broken" => broken,
        _ => return None,
    })
}

/// Builds graphs; tensors go by name, with the version they are at.
struct Build {
    graph: Graph,
    versions: Vec<u32>,
}

impl Build {
    fn new() -> Self {
        let graph = Graph {
            name: "t".into(),
            tensors: vec![],
            operators: vec![],
            optimizer: None,
            loss: None,
            recorded_peak: None,
        };
        Self { graph, versions: Vec::new() }
    }

    fn tensor(&mut self, name: &str, role: Role, n: u64) {
        let tensor = Tensor {
            name: name.into(),
            bytes: Bytes(n * 4),
            role,
            dtype: Dtype::F32,
            shape: vec![n],
            kept_until: None,
        };
        self.graph.tensors.push(tensor);
        self.versions.push(0);
    }

    fn id(&self, name: &str) -> TensorId {
        TensorId::of(self.graph.tensors.iter().position(|t| t.name == name).unwrap())
    }

    fn see(&self, name: &str) -> Operand {
        let tensor = self.id(name);
        let shape = self.graph.tensor(tensor).shape.clone();
        Operand {
            tensor,
            version: self.versions[tensor.index()],
            dtype: Dtype::F32,
            offset: 0,
            shape,
            stride: vec![1],
        }
    }

    /// `writes` are made, or updated when they are among `reads`; a star before a name makes it a
    /// hidden write.
    fn op(&mut self, kind: &str, reads: &[&str], writes: &[&str]) -> &mut Operator {
        let mut args: Vec<Arg> = reads.iter().map(|r| Arg::Tensor(self.see(r))).collect();
        if kind == "t::input" {
            args.push(Arg::Host { dtype: Dtype::F32, shape: vec![N], value: None, input: Some(0) });
        }
        let (mut outputs, mut hidden) = (Vec::new(), Vec::new());
        for write in writes {
            let name = write.trim_start_matches('*');
            if reads.contains(&name) {
                let id = self.id(name);
                self.versions[id.index()] += 1;
            } else if !self.graph.tensors.iter().any(|t| t.name == name) {
                self.tensor(name, Role::Activation, if kind == "t::sum" { 1 } else { N });
            }
            if write.starts_with('*') {
                hidden.push(self.see(name))
            } else {
                outputs.push(Some(self.see(name)))
            }
        }
        self.graph.operators.push(Operator {
            name: format!("op{}", self.graph.operators.len()),
            kind: kind.into(),
            phase: Phase::Forward,
            args,
            outputs,
            hidden,
            workspace: Bytes(700),
            replay: Replay::Pure,
            random: kind == "t::drop",
            ..Operator::default()
        });
        self.graph.operators.last_mut().unwrap()
    }
}

/// Two layers with dropout, an in-place activation, running statistics and updates.
fn net() -> Build {
    let mut b = Build::new();
    b.tensor("w1", Role::Parameter, N);
    b.tensor("w2.weight", Role::Parameter, N);
    b.tensor("mean", Role::Buffer, 1);
    b.op("t::input", &[], &["x"]); // 0
    b.op("t::mul", &["x", "w1"], &["h1"]);
    b.op("t::relu_", &["h1"], &["h1"]);
    b.op("t::drop", &["h1"], &["h2"]);
    b.op("t::mul", &["h2", "w2.weight"], &["h3"]);
    b.op("t::stat", &["h3", "mean"], &["h4", "*mean"]).replay = Replay::SkipUpdates; // 5
    b.op("t::sum", &["h4"], &["loss"]);
    b.graph.loss = Some(b.see("loss"));
    b.op("t::blend", &["h4", "h3"], &["g4"]);
    b.op("t::drop_backward", &["g4", "h2"], &["g2"]);
    b.op("t::mul", &["g4", "h2"], &["gw2"]);
    b.op("t::mul", &["g2", "h1"], &["gw1"]); // 10
    b.op("t::update", &["w2.weight", "gw2"], &["*w2.weight"]);
    b.op("t::update", &["w1", "gw1"], &["*w1"]);
    b
}

fn latencies(graph: &Graph) -> Vec<Latency> {
    vec![Latency { time: Nanos(1000), source: Source::Graph }; graph.operators.len()]
}

fn after(operator: Option<usize>, delay: u64) -> Trigger {
    Trigger { after: operator.map(OpId::of), delay: Nanos(delay) }
}

fn first_fit(program: &Program) -> (Vec<crate::contract::Placement>, Bytes) {
    let tied = place::items(program, &Emitted::default());
    let layout = place::place(&tied.iter().map(|(item, _)| item.clone()).collect::<Vec<_>>(), 0);
    (place::placements(program, &tied, &layout), Bytes(layout.height))
}

/// A plan with first-fit addresses and a slot for everything that is ever copied.
fn plan(graph: &Graph, events: Vec<Event>) -> (JobPlan, Bytes) {
    let latencies = latencies(graph);
    let (placements, arena) = first_fit(&Program::new(graph, &latencies, &events).unwrap());
    let mut host_slots = BTreeMap::new();
    let mut next = Bytes::ZERO;
    for event in &events {
        if let Event::SwapIn { tensor, .. } | Event::SwapOut { tensor, .. } = event {
            host_slots.entry(*tensor).or_insert_with(|| {
                let at = next;
                next += graph.tensor(*tensor).bytes.in_blocks();
                at
            });
        }
    }
    let (graph, graph_sha256, libraries) = (String::new(), String::new(), BTreeMap::new());
    (
        JobPlan {
            graph,
            graph_sha256,
            latencies,
            libraries,
            events,
            placements,
            host_slots,
            window: None,
        },
        arena,
    )
}

fn settings(iterations: u32) -> Settings {
    Settings { iterations, seed: 7, keep_state: true, ..Settings::default() }
}

fn go(
    graph: &Graph,
    (job, arena): &(JobPlan, Bytes),
    settings: &Settings,
) -> Result<Outcome, RunError> {
    run_with(kernels, graph, job, *arena, &profile(), settings, &mut |_| {})
}

/// Swaps, a recomputed in-place chain, a recomputed random operator, statistics replayed, a
/// parameter that lives on the host.
fn events(b: &Build, delay: u64) -> Vec<Event> {
    let id = |name| b.id(name);
    vec![
        Event::SwapIn { tensor: id("w1"), trigger: after(None, 0) },
        Event::Release { tensor: id("w1"), trigger: after(Some(2), 0) },
        Event::Release { tensor: id("h1"), trigger: after(Some(3), 0) },
        Event::SwapOut { tensor: id("x"), trigger: after(Some(3), 0) },
        Event::Release { tensor: id("h2"), trigger: after(Some(4), 0) },
        Event::Release { tensor: id("h4"), trigger: after(Some(5), 0) },
        Event::Recompute { operator: OpId(5), trigger: after(Some(5), 0), keep: vec![id("h4")] },
        Event::SwapIn { tensor: id("w1"), trigger: after(Some(6), delay) },
        Event::SwapIn { tensor: id("x"), trigger: after(Some(6), delay) },
        Event::Recompute { operator: OpId(1), trigger: after(Some(7), 0), keep: vec![id("h1")] },
        Event::Recompute { operator: OpId(2), trigger: after(Some(7), 0), keep: vec![] },
        Event::Recompute { operator: OpId(3), trigger: after(Some(7), 0), keep: vec![id("h2")] },
        Event::SwapOut { tensor: id("h1"), trigger: after(Some(8), 0) },
        Event::SwapIn { tensor: id("h1"), trigger: after(Some(9), 0) },
        Event::SwapOut { tensor: id("w1"), trigger: after(Some(12), 0) },
    ]
}

#[test]
fn planned_equals_unplanned() {
    let b = net();
    let bare = plan(&b.graph, Vec::new());
    let plain = go(&b.graph, &bare, &settings(4)).unwrap();
    assert_eq!((plain.losses.len(), plain.iteration_ns.len(), plain.checksum.len()), (4, 4, 64));
    assert!(plain.losses.windows(2).all(|w| w[0] != w[1]), "{:?}", plain.losses);
    assert_eq!(plain.peak_bytes, bare.1);
    assert_eq!(plain.late_copies, 0);
    assert!(plain.operator_ns.iter().all(|times| times.len() == 4));
    let planned = plan(&b.graph, events(&b, 0));
    for poison in [false, true] {
        let with = go(&b.graph, &planned, &Settings { poison, ..settings(4) }).unwrap();
        assert_eq!(bits(&with.losses), bits(&plain.losses));
        assert_eq!(with.checksum, plain.checksum);
        assert_eq!(with.state, plain.state);
        assert!(with.peak_bytes <= planned.1 && with.peak_bytes > Bytes::ZERO);
        assert!(with.resident_peak_bytes <= with.peak_bytes, "{:?}", with.resident_peak_bytes);
    }
}

fn bits(losses: &[f32]) -> Vec<u32> {
    losses.iter().map(|l| l.to_bits()).collect()
}

#[test]
fn late_and_passive_copies_cost_time_only() {
    let b = net();
    let plain = go(&b.graph, &plan(&b.graph, Vec::new()), &settings(3)).unwrap();
    let slow = Settings { throttle_per_mille: 5, ..settings(3) };
    let late = go(&b.graph, &plan(&b.graph, events(&b, 0)), &slow).unwrap();
    assert!(late.late_copies >= 3, "{}", late.late_copies);
    assert_eq!(late.checksum, plain.checksum);
    // 12 kB at 5 MB/s takes 2.4 ms, and several such stand one behind the other.
    assert!(late.iteration_ns.iter().all(|t| *t > Nanos(6_000_000)), "{:?}", late.iteration_ns);
    // A delay of an hour is cut short at once.
    let passive =
        go(&b.graph, &plan(&b.graph, events(&b, 3_600_000_000_000)), &settings(3)).unwrap();
    assert_eq!(passive.passive_copies, 6);
    assert_eq!(passive.checksum, plain.checksum);
}

#[test]
fn a_delay_is_kept() {
    let b = net();
    let mut events = events(&b, 0);
    // No step waits for this one, so it goes when its time has come.
    *events.last_mut().unwrap() =
        Event::SwapOut { tensor: b.id("w1"), trigger: after(Some(12), 20_000_000) };
    let outcome = go(&b.graph, &plan(&b.graph, events), &settings(2)).unwrap();
    assert!(
        outcome.iteration_ns.iter().all(|t| *t >= Nanos(20_000_000)),
        "{:?}",
        outcome.iteration_ns
    );
}

#[test]
fn failing_operators_end_the_run_by_name() {
    for (kind, says) in [("t::fail", "enough"), ("t::broken", "a bug at 2")] {
        let mut b = net();
        b.graph.operators[7].kind = kind.into();
        let error = go(
            &b.graph,
            &plan(&b.graph, events(&b, 1000)),
            &Settings { throttle_per_mille: 5, ..settings(5) },
        )
        .unwrap_err();
        let text = error.to_string();
        assert!(text.contains("op7") && text.contains(kind) && text.contains(says), "{text}");
    }
}

#[test]
fn what_cannot_run_is_said_first() {
    let mut b = net();
    b.graph.operators[4].kind = "t::unheard".into();
    b.graph.operators[9].kind = "t::unheard".into();
    let bare = plan(&b.graph, Vec::new());
    let text = go(&b.graph, &bare, &settings(1)).unwrap_err().to_string();
    assert_eq!(text, "the host device lacks `t::unheard` (2 operators, first `op4`)");
    let mut b = net();
    b.graph.operators[4].args.push(Arg::Host {
        dtype: Dtype::F64,
        shape: vec![],
        value: None,
        input: None,
    });
    let text = go(&b.graph, &bare, &settings(1)).unwrap_err().to_string();
    assert!(text.contains("`op4`") && text.contains("neap.scalar"), "{text}");
    let (op, dtype) = (&mut b.graph.operators[4], Dtype::I64);
    *op.args.last_mut().unwrap() = Arg::Host { dtype, shape: vec![], value: None, input: None };
    assert_eq!(support::unknown_numbers(&b.graph), ["op4"]);
    b.graph.operators[4].kind = "aten::_scaled_dot_product_efficient_attention_backward".into();
    assert!(support::unknown_numbers(&b.graph).is_empty());
    let b = net();
    let text =
        go(&b.graph, &(bare.0.clone(), Bytes(bare.1.0 - 1)), &settings(1)).unwrap_err().to_string();
    assert!(text.contains("beyond the arena"), "{text}");
    let mut planned = plan(&b.graph, events(&b, 0));
    planned.0.host_slots.remove(&b.id("x"));
    assert!(go(&b.graph, &planned, &settings(1)).unwrap_err().to_string().contains("no slot"));
}

#[test]
fn a_plan_that_would_deadlock_is_refused() {
    let b = net();
    let (mut job, arena) = plan(&b.graph, events(&b, 0));
    // Handing bytes on in the opposite order makes early residencies wait for later ones.
    job.placements.reverse();
    let text = go(&b.graph, &(job, arena), &settings(1)).unwrap_err().to_string();
    assert!(text.contains("deadlocks") || text.contains("stays"), "{text}");
}

#[test]
fn a_thousand_iterations() {
    let b = net();
    let planned = plan(&b.graph, events(&b, 5000));
    let quick = Settings { link_rate: Rate::Unlimited, ..settings(1000) };
    let mut told = 0;
    let outcome =
        run_with(kernels, &b.graph, &planned.0, planned.1, &profile(), &quick, &mut |i| told = i)
            .unwrap();
    let plain = go(&b.graph, &plan(&b.graph, Vec::new()), &quick).unwrap();
    assert_eq!((told, outcome.losses.len()), (1000, 1000));
    assert_eq!(outcome.checksum, plain.checksum);
}

#[test]
fn weights_come_in_and_go_out() {
    let b = net();
    let bare = plan(&b.graph, Vec::new());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("w.safetensors");
    let first = go(&b.graph, &bare, &Settings { save: Some(path.clone()), ..settings(3) }).unwrap();
    let saved = std::fs::read(&path).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&saved).unwrap();
    let mut state = first.state.unwrap();
    assert_eq!(tensors.len(), 3);
    for (key, value) in &state {
        assert_eq!(tensors.tensor(key).unwrap().data(), value.data);
    }
    // Without the batch they can't be used.
    let again = Settings { weights: Some(path.clone()), ..settings(2) };
    let text = go(&b.graph, &bare, &again).unwrap_err().to_string();
    assert!(text.contains("has no `input:x`") && text.contains("buffer:mean"), "{text}");
    let data = seed::batch(7, "input:x", Dtype::F32, N, 0);
    state.insert("input:x".into(), Value { dtype: Dtype::F32, shape: vec![N], data });
    let write = |state: &BTreeMap<String, Value>| {
        let shapes = state.iter().map(|(k, v)| (k.clone(), (v.dtype, v.shape.clone()))).collect();
        weights::save(&path, &shapes, |key| Ok(state[key].data.clone())).unwrap();
    };
    write(&state);
    let continued = go(&b.graph, &plan(&b.graph, events(&b, 0)), &again).unwrap();
    // Dropout starts from iteration 0 again, so only a run without it would go on as if
    // uninterrupted; but it differs from a fresh one.
    assert_ne!(bits(&continued.losses), bits(&first.losses[..2]));
    let same = go(&b.graph, &bare, &again).unwrap();
    assert_eq!(same.checksum, continued.checksum);
    state.get_mut("parameter:w1").unwrap().dtype = Dtype::I32;
    write(&state);
    let text = go(&b.graph, &bare, &again).unwrap_err().to_string();
    assert!(text.contains("`parameter:w1` is I32 [3000]; the graph wants F32 [3000]"), "{text}");
    let whole = std::fs::read(&path).unwrap();
    for damaged in [
        &whole[..4],
        &whole[..40],
        &whole[..whole.len() - 1],
        b"[[[[[[[[[[[[[[",
        &[&whole[..], b"x"].concat(),
    ] {
        std::fs::write(&path, damaged).unwrap();
        assert!(matches!(go(&b.graph, &bare, &again).unwrap_err(), RunError::Weights(_)));
    }
}

#[test]
fn backward_draws_what_forward_drew() {
    let b = net();
    let keys = support::random_keys(&b.graph);
    assert_eq!(keys, [0, 1, 2, 3, 4, 5, 6, 7, 3, 9, 10, 11, 12]);
}

#[test]
fn indices_stay_below_every_table() {
    let mut b = net();
    assert_eq!(support::index_limit(&b.graph), None);
    b.graph.operators[1].kind = "aten::embedding".into();
    assert_eq!(support::index_limit(&b.graph), Some(N));
}

/// A random chain of blends, each tensor swapped out after a use and back before the next at random
/// places.
fn random_job(case: u64) -> (Build, Vec<Event>) {
    let mut turn = case << 20;
    let mut random = |below: u64| {
        turn += 1;
        seed::mix(turn) % below
    };
    let mut b = Build::new();
    let parameters = 1 + random(3);
    for p in 0..parameters {
        b.tensor(&format!("p{p}"), Role::Parameter, N);
    }
    let mut names: Vec<String> = b.graph.tensors.iter().map(|t| t.name.clone()).collect();
    let steps = 4 + random(12);
    for step in 0..steps {
        let pick = |r: u64| names[r as usize].clone();
        let (x, y) = (pick(random(names.len() as u64)), pick(random(names.len() as u64)));
        if random(5) == 0 && x != y {
            b.op("t::update", &[&x, &y], &[&format!("*{x}")]);
        } else {
            let made = format!("t{step}");
            b.op("t::blend", &[&x, &y], &[&made]);
            names.push(made);
        }
    }
    // Every parameter ends changed, so that the checksum sees everything.
    for p in 0..parameters {
        let last = names.last().unwrap().clone();
        b.op("t::update", &[&format!("p{p}"), &last], &[&format!("*p{p}")]);
    }
    let mut events = Vec::new();
    for (t, accesses) in b.graph.accesses().into_iter().enumerate() {
        let tensor = TensorId::of(t);
        for pair in accesses.windows(2) {
            let (from, to) = (pair[0].index(), pair[1].index());
            if to > from + 1 && random(2) == 0 {
                let out = from + random((to - from - 1) as u64) as usize;
                let back = out + random((to - out) as u64) as usize;
                events.push(Event::SwapOut { tensor, trigger: after(Some(out), random(20_000)) });
                events.push(Event::SwapIn { tensor, trigger: after(Some(back), random(20_000)) });
            }
        }
    }
    events.sort_by_key(|e| e.trigger().after);
    (b, events)
}

#[test]
fn random_jobs_with_jitter_equal_their_unplanned_runs() {
    let mut swaps = 0;
    for case in 0..150 {
        let (b, events) = random_job(case);
        swaps += events.len();
        let plain = go(&b.graph, &plan(&b.graph, Vec::new()), &settings(3)).unwrap();
        let shaken = Settings { jitter: Nanos(80_000), poison: case % 2 == 0, ..settings(3) };
        let with = go(&b.graph, &plan(&b.graph, events), &shaken)
            .unwrap_or_else(|e| panic!("case {case}: {e}"));
        assert_eq!(with.checksum, plain.checksum, "case {case}");
    }
    assert!(swaps > 300, "{swaps}");
}

#[test]
fn load_changes_no_result() {
    let b = net();
    let bare = plan(&b.graph, Vec::new());
    let loaded = go(&b.graph, &bare, &Settings { load_percent: 50, ..settings(3) }).unwrap();
    assert_eq!(loaded.checksum, go(&b.graph, &bare, &settings(3)).unwrap().checksum);
}

#[test]
fn a_stop_ends_the_run_at_the_iteration_boundary() {
    let b = net();
    let (job, arena) = plan(&b.graph, Vec::new());
    let asked = settings(5);
    let stop = asked.stop.clone();
    let mut after_two = |done| {
        if done == 2 {
            stop.request();
        }
    };
    let stopped =
        run_with(kernels, &b.graph, &job, arena, &profile(), &asked, &mut after_two).unwrap();
    assert!(stopped.stopped);
    assert_eq!(stopped.iteration_ns.len(), 2);
    let whole = go(&b.graph, &(job, arena), &settings(2)).unwrap();
    assert!(!whole.stopped);
    assert_eq!((stopped.checksum, stopped.losses), (whole.checksum, whole.losses));
}
