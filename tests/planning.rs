//! Random small jobs planned, checked, simulated and run on the host: the three figures agree and the results are equal.
//!
//! Run with `NEAP_DEEP=1`, `NEAP_CASES=N` or `NEAP_FIRST=SEED` (see `crate::common::cases`).

use crate::common::random::{self, Random};
use neap::contract::check::check;
use neap::device::{Profile, builtin, latency};
use neap::job::json::sha256;
use neap::job::{Arg, Graph, Replay};
use neap::plan::bound::Bounds;
use neap::plan::method::Method;
use neap::plan::robust;
use neap::plan::tensile::Options;
use neap::plan::{self, PlanError, Planned, Request};
use neap::run::backend::host::kernels::Kernel;
use neap::run::backend::operators::KernelError;
use neap::run::backend::operators::view::{Call, Operand, View};
use neap::run::{Rate, Settings, run_with};
use neap::sim::engine::{self, Durations};
use neap::sim::program::Program;
use neap::units::{Bytes, Nanos};

fn bytes(view: &View) -> (*mut u8, usize) {
    (view.data, view.shape.iter().product())
}

/// Writes every output as a mix of all inputs, itself included where it is written in place.
fn mix(call: &Call<'_>) -> Result<(), KernelError> {
    let left_out = |index: usize| {
        let Some(Arg::Tensor(arg)) = call.operator.args.get(index) else { return false };
        call.operator.replay == Replay::SkipUpdates
            && call.operator.updates().any(|u| u.tensor == arg.tensor)
    };
    let mut sum = Random(call.position);
    for (index, arg) in call.args.iter().enumerate() {
        if let (Operand::Tensor(view), false) = (arg, left_out(index)) {
            let (data, length) = bytes(view);
            for i in 0..length {
                // SAFETY: the executor gives views inside its arena.
                sum.0 ^= u64::from(unsafe { *data.add(i) }) << (i % 8 * 8);
                sum.next();
            }
        }
    }
    let written = call.operator.outputs.iter().flatten().zip(call.outputs.iter().flatten());
    let written = written.chain(call.operator.hidden.iter().zip(call.hidden));
    for (operand, view) in written {
        let skipped =
            call.replay && call.operator.replay == Replay::SkipUpdates && operand.version > 0;
        if skipped {
            continue;
        }
        let (data, length) = bytes(view);
        let mut stream = Random(sum.0 ^ u64::from(operand.tensor.0));
        for i in 0..length {
            // SAFETY: as above; no other thread touches the view while the step runs.
            unsafe {
                let before = if operand.version > 0 { *data.add(i) } else { 0 };
                *data.add(i) = before.rotate_left(3) ^ stream.next() as u8;
            }
        }
    }
    Ok(())
}

fn kernels(_: &str) -> Option<Kernel> {
    Some(mix)
}

fn device(random: &mut Random) -> Profile {
    let mut device = builtin::find("host").expect("built in");
    // Slow enough that copies take about as long as operators.
    device.link.h2d = random.between(100_000_000, 2_000_000_000) as u64;
    device.link.d2h = random.between(100_000_000, 2_000_000_000) as u64;
    device.link.h2d_contended = device.link.h2d * 3 / 4;
    device.link.d2h_contended = device.link.d2h * 3 / 4;
    device.link.overhead_ns = random.below(500) as u64;
    device
}

fn agree(seed: u64, graph: &Graph, planned: &Planned) {
    let proof = check(&planned.plan, std::slice::from_ref(graph))
        .unwrap_or_else(|r| panic!("seed {seed}: {}", r[0]));
    assert_eq!(proof.figures, planned.plan.figures, "seed {seed}");
    let job = &planned.plan.jobs[0];
    let program = Program::placed(graph, job).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
    let link = &planned.plan.device.link;
    let run = engine::run(&program, link, &Durations::nominal(&program, link))
        .unwrap_or_else(|e| panic!("seed {seed}: {e}"));
    assert_eq!(
        engine::peak(&engine::memory(&program, &run)),
        proof.figures.peak_bytes,
        "seed {seed}"
    );
    assert_eq!(run.iteration, proof.figures.iteration_ns, "seed {seed}");
    let (peak, time) = (proof.figures.peak_bytes, proof.figures.iteration_ns);
    let bounds = Bounds::new(graph, &job.latencies, link);
    assert!(
        bounds.peak(time.saturating_sub(proof.figures.unplanned_iteration_ns)) <= peak,
        "seed {seed}: below the bound"
    );
    assert!(
        bounds.iteration_for(peak, Nanos(u64::MAX)).is_some_and(|bound| bound <= time),
        "seed {seed}: quicker than the bound"
    );
    assert!(
        proof.figures.arena_bytes <= planned.plan.budget || planned.plan.planner == "none",
        "seed {seed}"
    );
}

/// Each planner, with switches drawn.
fn methods(random: &mut Random) -> Vec<Method> {
    let min_swap = Bytes(512 * random.below(2) as u64);
    let mut rarely = || !random.once_in(8);
    let neap = neap::plan::neap::Options {
        across: rarely(),
        recompute: rarely(),
        chains: rarely(),
        share: rarely(),
        extend: rarely(),
        by_reach: !rarely(),
        drop: rarely(),
        passive: rarely(),
        prefetch: rarely(),
        min_swap,
        effort: random.below(12) as u32,
        ..neap::plan::neap::Options::default()
    };
    let own = |method: &Method| matches!(method, Method::Tensile(_) | Method::Neap(_));
    let mut others: Vec<Method> = Method::all().into_iter().filter(|m| !own(m)).collect();
    let other = others.swap_remove(random.below(others.len()));
    vec![Method::Tensile(Options { min_swap, ..Options::default() }), Method::Neap(neap), other]
}

#[test]
fn planned_checked_simulated_and_run() {
    let [met, refused, moved] = crate::common::on_all_cores(crate::common::cases(2_000), |seed| {
        let (mut met, mut refused, mut moved) = (0, 0, 0);
        let mut random = Random(seed);
        let graph = random::graph(&mut random);
        let device = device(&mut random);
        let latencies = latency::latencies(&graph, &device, None);
        let mut request = Request {
            file: ("x.graph.json".to_owned(), sha256(&graph)),
            ..Request::new(&graph, &device, &latencies, Bytes::ZERO)
        };
        let unplanned = plan::unplanned(&request).expect("unplanned");
        agree(seed, &graph, &unplanned);
        let arena = unplanned.plan.figures.arena_bytes;
        // A refusal takes long, too: it names the lowest plan.
        let lowest_share = if random.once_in(5) { 40 } else { 75 };
        let share = random.between(lowest_share, 100) as u64;
        let budget = Bytes(arena.0 * share / 100);
        // The lowest plan takes long to find.
        let least = random.once_in(10);
        let settings = Settings {
            iterations: 2,
            link_rate: Rate::Unlimited,
            poison: true,
            keep_state: true,
            ..Settings::default()
        };
        let run = |of: &Planned, bytes: Bytes| {
            run_with(kernels, &graph, &of.plan.jobs[0], bytes, &device, &settings, &mut |_| {})
                .unwrap_or_else(|e| panic!("seed {seed} {}: {e}", of.plan.planner))
        };
        let without = run(&unplanned, arena);
        for method in methods(&mut random) {
            request.method = method;
            // Plans for noise differ in how they are chosen, not in what must hold.
            let noise = random.once_in(8).then(|| 1_000 * random.between(0, 100) as u64);
            let planned = if let Some(share) = noise {
                robust::make_for(&Request { budget, ..request.clone() }, share, None)
                    .map(|r| r.planned)
            } else if least {
                plan::minimum(&Request { budget: arena, ..request.clone() })
            } else {
                plan::make(&Request { budget, ..request.clone() })
            };
            let planned = match planned {
                Ok(planned) => planned,
                Err(PlanError::Infeasible(no)) => {
                    assert!(no.lowest > budget && no.floor <= no.lowest, "seed {seed}: {no:?}");
                    refused += 1;
                    continue;
                }
                Err(defect) => panic!("seed {seed} {}: {defect}", request.method.name()),
            };
            agree(seed, &graph, &planned);
            met += 1;
            moved += usize::from(!planned.plan.jobs[0].events.is_empty());
            let with = run(&planned, planned.plan.budget);
            assert_eq!(without.checksum, with.checksum, "seed {seed}");
            assert_eq!(without.state, with.state, "seed {seed}");
            assert!(with.peak_bytes <= planned.plan.budget, "seed {seed}");
        }
        [met, refused, moved]
    });
    println!("{met} plans made and run ({moved} with events), {refused} budgets refused");
    assert!(
        moved * 3 > met && refused > 0,
        "the jobs are too easy: {met} met, {moved} with events, {refused} refused"
    );
}

/// Budgets at whole tenths of the peak, which are the planner's rungs, and one between two of
/// them: the next rung is at least as quick.
#[test]
fn a_looser_budget_is_never_slower() {
    let first = crate::common::first();
    let mut slower_than_unplanned = 0;
    for seed in first..first + crate::common::cases(60) {
        let mut random = Random(seed);
        let graph = random::graph(&mut random);
        let device = device(&mut random);
        let latencies = latency::latencies(&graph, &device, None);
        let request = Request {
            file: ("x.graph.json".to_owned(), sha256(&graph)),
            ..Request::new(&graph, &device, &latencies, device.available())
        };
        let unplanned = plan::unplanned(&request).expect("unplanned").plan.figures;
        let peak = unplanned.unplanned_peak_bytes.0;
        let rung = |number: u64| Bytes((peak / 10 * number + peak % 10 * number / 10) / 512 * 512);
        let made = |budget: Bytes| match plan::make(&Request { budget, ..request.clone() }) {
            Ok(planned) => Some(planned.run.iteration),
            Err(PlanError::Infeasible(_)) => None,
            Err(defect) => panic!("seed {seed}: {defect}"),
        };
        let mut tighter = None;
        for number in 3..=10 {
            let time = made(rung(number));
            let between = made(Bytes(rung(number).0 + random.below(peak as usize / 10 + 1) as u64));
            if let Some(tighter) = tighter {
                assert!(time.is_some_and(|t| t <= tighter), "seed {seed}: rung {number}");
            }
            if let Some(time) = time {
                assert!(between.is_some_and(|t| t <= time), "seed {seed}: above rung {number}");
                slower_than_unplanned += u64::from(time > unplanned.unplanned_iteration_ns);
            }
            tighter = time.or(tighter);
        }
        let least = plan::minimum(&request).expect("a least plan").plan.budget;
        for below in (1..=10).map(rung).chain([Bytes(least.0 - 512)]).filter(|b| *b < least) {
            assert!(made(below).is_none(), "seed {seed}: {below} below the least, {least}");
        }
        assert!(made(least).is_some(), "seed {seed}: the least budget is not met");
    }
    assert!(slower_than_unplanned > 0, "the jobs are too easy");
}
