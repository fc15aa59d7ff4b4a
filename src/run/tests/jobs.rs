//! Graphs, plans and kernels that the tests of the executor share.

use super::*;

pub const N: u64 = 3000;

pub fn profile() -> Profile {
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

pub fn get(view: &View, i: usize) -> f32 {
    // SAFETY: tests only ask for elements of the view's shape.
    unsafe { view.data.cast::<f32>().add(i).read() }
}

pub fn put(view: &View, i: usize, value: f32) {
    // SAFETY: as in `get`.
    unsafe { view.data.cast::<f32>().add(i).write(value) }
}

pub fn len(view: &View) -> usize {
    view.shape.iter().product()
}

pub fn arg<'a>(call: &'a Call<'_>, i: usize) -> &'a View {
    match &call.args[i] {
        Seen::Tensor(view) => view,
        other => panic!("argument {i} is {other:?}"),
    }
}

pub fn out<'a>(call: &'a Call<'_>) -> &'a View {
    call.outputs[0].as_ref().expect("an output")
}

pub fn each(call: &Call<'_>, f: impl Fn(usize) -> f32) -> Result<(), KernelError> {
    (0..len(out(call))).for_each(|i| put(out(call), i, f(i)));
    Ok(())
}

pub fn input(call: &Call<'_>) -> Result<(), KernelError> {
    let data = &call.batch[0];
    each(call, |i| f32::from_le_bytes(data[4 * i..4 * i + 4].try_into().unwrap()))
}

pub fn mul(call: &Call<'_>) -> Result<(), KernelError> {
    each(call, |i| get(arg(call, 0), i) * get(arg(call, 1), i))
}

pub fn blend(call: &Call<'_>) -> Result<(), KernelError> {
    each(call, |i| get(arg(call, 0), i) * 0.625 + get(arg(call, 1), i) * 0.5)
}

pub fn relu_(call: &Call<'_>) -> Result<(), KernelError> {
    each(call, |i| get(arg(call, 0), i).max(0.0))
}

pub fn kept(call: &Call<'_>, i: usize) -> bool {
    seed::mix(call.random_key << 40 ^ call.iteration << 20 ^ i as u64) & 1 == 1
}

pub fn drop_some(call: &Call<'_>) -> Result<(), KernelError> {
    each(call, |i| if kept(call, i) { get(arg(call, 0), i) * 2.0 } else { 0.0 })
}

pub fn drop_backward(call: &Call<'_>) -> Result<(), KernelError> {
    let mask = (0..len(out(call))).all(|i| (get(arg(call, 1), i) != 0.0) <= kept(call, i));
    if !mask {
        return Err("the mask is another".into());
    }
    drop_some(call)
}

pub fn stat(call: &Call<'_>) -> Result<(), KernelError> {
    let n = len(arg(call, 0));
    if !call.replay {
        let mean = (0..n).map(|i| get(arg(call, 0), i)).sum::<f32>() / n as f32;
        put(arg(call, 1), 0, get(arg(call, 1), 0) * 0.9 + mean * 0.1);
    }
    each(call, |i| get(arg(call, 0), i) * 0.5)
}

pub fn sum(call: &Call<'_>) -> Result<(), KernelError> {
    put(out(call), 0, (0..len(arg(call, 0))).map(|i| get(arg(call, 0), i)).sum());
    Ok(())
}

pub fn update(call: &Call<'_>) -> Result<(), KernelError> {
    (0..len(arg(call, 0)))
        .for_each(|i| put(arg(call, 0), i, get(arg(call, 0), i) - 0.01 * get(arg(call, 1), i)));
    Ok(())
}

pub fn fail(call: &Call<'_>) -> Result<(), KernelError> {
    if call.iteration < 2 { blend(call) } else { Err("enough".into()) }
}

pub fn broken(call: &Call<'_>) -> Result<(), KernelError> {
    assert!(call.iteration < 2, "a bug at {}", call.iteration);
    blend(call)
}

pub fn kernels(kind: &str) -> Option<Kernel> {
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

/// Builds graphs. Tensors are named; each has a current version.
pub struct Build {
    pub graph: Graph,
    versions: Vec<u32>,
}

impl Build {
    pub fn new() -> Self {
        let graph = Graph {
            name: "t".into(),
            tensors: vec![],
            operators: vec![],
            optimizer: None,
            loss: None,
            recorded_peak: None,
            origin: None,
        };
        Self { graph, versions: Vec::new() }
    }

    pub fn tensor(&mut self, name: &str, role: Role, n: u64) {
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

    pub fn id(&self, name: &str) -> TensorId {
        TensorId::from_index(self.graph.tensors.iter().position(|t| t.name == name).unwrap())
    }

    pub fn see(&self, name: &str) -> Operand {
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

    /// Adds an operator. `writes` are generated, or updated when they are among `reads`. A star
    /// before a name makes it a hidden write.
    pub fn op(&mut self, kind: &str, reads: &[&str], writes: &[&str]) -> &mut Operator {
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
pub fn net() -> Build {
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

pub fn latencies(graph: &Graph) -> Vec<Latency> {
    vec![Latency { time: Nanos(1000), source: Source::Graph }; graph.operators.len()]
}

pub fn after(operator: Option<usize>) -> Trigger {
    Trigger { after: operator.map(OpId::from_index) }
}

pub fn first_fit(program: &Program) -> (Vec<crate::contract::Placement>, Bytes) {
    let tied = place::items(program, &Emitted::default());
    let layout = place::place(&tied.iter().map(|(item, _)| item.clone()).collect::<Vec<_>>(), 0);
    (place::placements(program, &tied, &layout.offsets), Bytes(layout.height))
}

/// A plan with first-fit addresses and a slot in host memory for every tensor that is copied.
pub fn plan(graph: &Graph, events: Vec<Event>) -> (JobPlan, Bytes) {
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
            arrangement: Default::default(),
            whole: Default::default(),
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

pub fn settings(iterations: u32) -> Settings {
    Settings { iterations, seed: 7, keep_state: true, ..Settings::default() }
}

pub fn go(
    graph: &Graph,
    (job, arena): &(JobPlan, Bytes),
    settings: &Settings,
) -> Result<Outcome, RunError> {
    run_with(kernels, graph, job, *arena, &profile(), settings, &mut |_| {})
}

/// Swaps, a recomputed in-place chain, a recomputed random operator, replayed statistics, a
/// parameter that lives on the host.
pub fn events(b: &Build) -> Vec<Event> {
    let id = |name| b.id(name);
    vec![
        Event::SwapIn { tensor: id("w1"), trigger: after(None) },
        Event::Release { tensor: id("w1"), trigger: after(Some(2)) },
        Event::Release { tensor: id("h1"), trigger: after(Some(3)) },
        Event::SwapOut { tensor: id("x"), trigger: after(Some(3)) },
        Event::Release { tensor: id("h2"), trigger: after(Some(4)) },
        Event::Release { tensor: id("h4"), trigger: after(Some(5)) },
        Event::Recompute { operator: OpId(5), trigger: after(Some(5)), keep: vec![id("h4")] },
        Event::SwapIn { tensor: id("w1"), trigger: after(Some(6)) },
        Event::SwapIn { tensor: id("x"), trigger: after(Some(6)) },
        Event::Recompute { operator: OpId(1), trigger: after(Some(7)), keep: vec![id("h1")] },
        Event::Recompute { operator: OpId(2), trigger: after(Some(7)), keep: vec![] },
        Event::Recompute { operator: OpId(3), trigger: after(Some(7)), keep: vec![id("h2")] },
        Event::SwapOut { tensor: id("h1"), trigger: after(Some(8)) },
        Event::SwapIn { tensor: id("h1"), trigger: after(Some(9)) },
        Event::SwapOut { tensor: id("w1"), trigger: after(Some(12)) },
    ]
}

/// A random chain of blends. Each tensor is swapped out after a use and back before the next one,
/// at random places.
pub fn random_job(case: u64) -> (Build, Vec<Event>) {
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
    // Every parameter is changed at the end, so that the checksum covers everything.
    for p in 0..parameters {
        let last = names.last().unwrap().clone();
        b.op("t::update", &[&format!("p{p}"), &last], &[&format!("*p{p}")]);
    }
    let mut events = Vec::new();
    for (t, accesses) in b.graph.accesses().into_iter().enumerate() {
        let tensor = TensorId::from_index(t);
        for pair in accesses.windows(2) {
            let (from, to) = (pair[0].index(), pair[1].index());
            if to > from + 1 && random(2) == 0 {
                let out = from + random((to - from - 1) as u64) as usize;
                let back = out + random((to - out) as u64) as usize;
                events.push(Event::SwapOut { tensor, trigger: after(Some(out)) });
                events.push(Event::SwapIn { tensor, trigger: after(Some(back)) });
            }
        }
    }
    events.sort_by_key(|e| e.trigger().after);
    (b, events)
}
