//! Bounds, plans and the best schedule: small random training jobs, whose best schedule a search
//! over all schedules finds.
//!
//! The bound must not be above the best schedule, and the best schedule must not be slower than the
//! plan. What lies between plan and bound is either the plan's fault or the bound's; the test
//! prints how much is whose. `search` does not use neap's engine, planner or bound.

mod search;

use search::Job;

use crate::arrange::{early_job, make_for};
use crate::bound::Bounds;
use crate::budget::{self, PlanError, Request};
use crate::contract::{Latency, Source};
use crate::device::{Link, Profile, builtin};
use crate::job::chakra;
use crate::job::{Arg, Dtype, Graph, Operand, Operator, Phase, Replay, Role, Tensor};
use crate::units::{Bytes, Nanos, TensorId, mix};

/// Small numbers that follow from a seed.
pub struct Random(pub u64);

impl Random {
    /// Between the two, both included.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        self.0 = mix(self.0);
        low + self.0 % (high - low + 1)
    }
}

/// A tensor of bytes.
pub fn tensor(name: String, bytes: u64, role: Role) -> Tensor {
    let shape = vec![bytes];
    Tensor { name, bytes: Bytes(bytes), role, dtype: Dtype::U8, shape, kept_until: None }
}

/// All of a tensor.
pub fn operand(tensors: &[Tensor], tensor: usize, version: u32) -> Operand {
    let shape = tensors[tensor].shape.clone();
    Operand {
        tensor: TensorId::from_index(tensor),
        version,
        dtype: Dtype::U8,
        offset: 0,
        shape,
        stride: vec![1],
    }
}

/// An operator that may run again.
pub fn operator(name: String, phase: Phase, reads: &[usize], tensors: &[Tensor]) -> Operator {
    Operator {
        name,
        kind: "test".to_owned(),
        phase,
        args: reads.iter().map(|&t| Arg::Tensor(operand(tensors, t, 0))).collect(),
        replay: Replay::Pure,
        ..Operator::default()
    }
}

/// How many jobs are looked at.
const JOBS: u64 = 10;

/// Tensors have this many bytes or a small multiple, and operators take this many nanoseconds or a
/// small multiple. A byte takes a nanosecond over the link: much ends at the same time, so that
/// the search has fewer states to look at.
const UNIT: u64 = 1024;

/// A job of two or three layers, of which one or two have a parameter with a state: forward,
/// gradients of activations and parameters, updates.
pub fn job(random: &mut Random) -> (Graph, Vec<Latency>) {
    job_with(random, 1)
}

/// The same with parameters that are far larger than what layers read.
pub fn wide_job(random: &mut Random) -> (Graph, Vec<Latency>) {
    job_with(random, 12)
}

fn job_with(random: &mut Random, wide: u64) -> (Graph, Vec<Latency>) {
    let with = random.between(1, 2);
    let layers = random.between(2, 4 - with);
    let first = random.between(0, layers - with);
    let mut tensors = Vec::new();
    let mut add = |random: &mut Random, name: String, role| {
        let times = if role == Role::Parameter { wide } else { 1 };
        tensors.push(tensor(name, random.between(1, 3) * UNIT * times, role));
        tensors.len() - 1
    };
    let input = add(random, "in".to_owned(), Role::Input);
    let mut outputs = vec![input];
    let (layers, with, first) = (layers as usize, with as usize, first as usize);
    let mut owned = vec![None; layers];
    for (layer, owned) in owned.iter_mut().enumerate() {
        outputs.push(add(random, format!("a{layer}"), Role::Activation));
        if (first..first + with).contains(&layer) {
            let parameter = add(random, format!("w{layer}"), Role::Parameter);
            *owned = Some(parameter);
        }
    }
    // Gradients and states are as large as what they belong to.
    let mut alike = |name: String, of: usize, role| {
        let bytes = tensors[of].bytes.0;
        tensors.push(tensor(name, bytes, role));
        tensors.len() - 1
    };
    let mut made: Vec<(String, Phase, Vec<usize>, usize)> = Vec::new();
    for layer in 0..layers {
        let reads = [Some(outputs[layer]), owned[layer]];
        let reads = reads.into_iter().flatten().collect();
        made.push((format!("forward{layer}"), Phase::Forward, reads, outputs[layer + 1]));
    }
    let mut updates = Vec::new();
    let mut gradient = outputs[layers];
    for layer in (0..layers).rev() {
        if let Some(parameter) = owned[layer] {
            let of = alike(format!("g{layer}"), parameter, Role::Gradient);
            let state = alike(format!("m{layer}"), parameter, Role::OptimizerState);
            let reads = vec![outputs[layer], gradient];
            made.push((format!("weight{layer}"), Phase::Backward, reads, of));
            updates.push((layer, parameter, of, state));
        }
        if layer > first {
            let below = alike(format!("d{layer}"), outputs[layer], Role::Gradient);
            let reads = [Some(outputs[layer]), Some(gradient), owned[layer]];
            let reads = reads.into_iter().flatten().collect();
            made.push((format!("data{layer}"), Phase::Backward, reads, below));
            gradient = below;
        }
    }
    let mut operators: Vec<Operator> = Vec::new();
    for (name, phase, reads, output) in made {
        let outputs = vec![Some(operand(&tensors, output, 0))];
        operators.push(Operator { outputs, ..operator(name, phase, &reads, &tensors) });
    }
    for (layer, parameter, gradient, state) in updates {
        let reads = [parameter, gradient, state];
        operators.push(Operator {
            kind: "optimizer::Script".to_owned(),
            hidden: [parameter, state].map(|t| operand(&tensors, t, 1)).to_vec(),
            replay: Replay::Never,
            ..operator(format!("update{layer}"), Phase::Optimize, &reads, &tensors)
        });
    }
    let time =
        |_: &Operator| Latency { time: Nanos(random.between(1, 3) * UNIT), source: Source::Graph };
    let latencies = operators.iter().map(time).collect();
    let graph = Graph::new("exact".to_owned(), tensors, operators, None, None, None);
    (graph.expect("the job is one"), latencies)
}

/// A link whose directions do not slow each other, so that the search need not count how far a copy
/// is while the other direction comes and goes.
pub fn device() -> Profile {
    let mut device = builtin::find("host").expect("built in");
    let rate = 1_000_000_000;
    device.link =
        Link { h2d: rate, d2h: rate, h2d_contended: rate, d2h_contended: rate, overhead_ns: 0 };
    device
}

/// A ResNet-18 with Adam, from a trace of it.
pub fn resnet18() -> Graph {
    let trace = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fixtures/resnet18-adam.et.json.gz");
    chakra::import(&trace, &chakra::Options::default()).expect("a fixture").graph
}

/// What was seen at one share of the peak.
#[derive(Default)]
struct Seen {
    cases: u64,
    /// The plan takes as long as the best schedule; the bound does.
    plan_is_best: u64,
    bound_is_best: u64,
    /// What is added to the sum of the operators' times, as parts of it: by the bound, by the best
    /// schedule, by the best one in which nothing comes back ahead of its iteration, by the plan.
    added: [f64; 4],
    /// No plan, though there is a schedule.
    missed: u64,
}

#[test]
fn the_best_schedule_lies_between_bound_and_plan() {
    let device = device();
    let mut all = Seen::default();
    println!(
        "budget: cases; plan is best, bound is best; missed; added by bound, best, not ahead, plan"
    );
    for share in [90, 80, 70] {
        let mut seen = Seen::default();
        for seed in 0..JOBS {
            let (graph, latencies) = job(&mut Random(seed));
            case(seed, share, &graph, &latencies, &device, &mut seen);
        }
        let [bound, best, within, plan] = seen.added.map(|of| 100.0 * of / seen.cases as f64);
        println!(
            "{share} %: {}; {}, {}; {}; {bound:.1} %, {best:.1} %, {within:.1} %, {plan:.1} %",
            seen.cases, seen.plan_is_best, seen.bound_is_best, seen.missed
        );
        all.cases += seen.cases;
        all.plan_is_best += seen.plan_is_best;
        all.bound_is_best += seen.bound_is_best;
    }
    // Neither is always at fault, and neither never.
    assert!(all.cases >= 2 * JOBS, "{} cases", all.cases);
    assert!((1..all.cases).contains(&all.plan_is_best), "{} plans are best", all.plan_is_best);
    assert!((1..all.cases).contains(&all.bound_is_best), "{} bounds are", all.bound_is_best);
}

fn case(
    seed: u64,
    share: u64,
    graph: &Graph,
    latencies: &[Latency],
    device: &Profile,
    seen: &mut Seen,
) {
    let request = Request::new(graph, device, latencies, Bytes::ZERO);
    let peak = budget::unplanned(&request).expect("unplanned").plan.figures.peak_bytes;
    let budget = Bytes(peak.0 * share / 100 / 512 * 512);
    let (early, of_early) = early_job(graph, latencies);
    let bounds = Bounds::any_order(&early, &of_early, &device.link);
    let bound = bounds.iteration_for(budget, Nanos(u64::MAX));
    let planned = match make_for(&Request { budget, ..request }, None) {
        Ok(arranged) => Some(arranged.planned.run.iteration),
        Err(PlanError::Infeasible(_)) => None,
        Err(defect) => panic!("seed {seed}: {defect}"),
    };
    let unplanned: Nanos = latencies.iter().map(|l| l.time).sum();
    // Where there is no plan, only whether there is a schedule that is not very slow.
    let limit = planned.unwrap_or(Nanos(unplanned.0 * 2));
    let mut job = Job::new(graph, latencies, &device.link, budget);
    let Some(best) = job.best(limit) else {
        assert!(planned.is_none(), "seed {seed}, {share} %: the search misses the plan");
        return;
    };
    let bound = bound.unwrap_or_else(|| panic!("seed {seed}, {share} %: below the floor: {best}"));
    assert!(bound <= best, "seed {seed}, {share} %: {best} beats the bound of {bound}");
    let Some(plan) = planned else {
        seen.missed += 1;
        return;
    };
    job.ahead = false;
    let within = job.best(plan).unwrap_or(plan);
    seen.cases += 1;
    seen.plan_is_best += u64::from(plan == best);
    seen.bound_is_best += u64::from(bound == best);
    for (sum, time) in seen.added.iter_mut().zip([bound, best, within, plan]) {
        *sum += time.0 as f64 / unplanned.0 as f64 - 1.0;
    }
}
