//! Random jobs that share bytes: proved, and run side by side at random phases and speeds without a deadlock and without two of them
//! ever holding the same byte.
//!
//! Run with `NEAP_DEEP=1`, `NEAP_CASES=N` or `NEAP_FIRST=SEED` (see `crate::common::cases`).

use std::collections::{BTreeMap, BTreeSet};

use crate::common::random::{self, Random};
use neap::contract::check::{Refusal, check, check_safety};
use neap::contract::{Latency, Plan, Window};
use neap::device::{Profile, builtin, latency};
use neap::job::Graph;
use neap::job::json::sha256;
use neap::plan::overlap;
use neap::plan::together::{self, Job, Jobs, Memo};
use neap::plan::{Method, PlanError, Share};
use neap::sim::beside::{Shared, WHOLE, Waited, Work};
use neap::sim::engine::{self, Durations, Run};
use neap::sim::program::{Begin, Program};
use neap::units::{Bytes, Nanos, OpId};

fn plans() -> u64 {
    crate::common::cases(2_000)
}

fn first() -> u64 {
    crate::common::first()
}

/// Every iteration of every job: whose, from when on, and its course.
struct Seen {
    iterations: Vec<(usize, Nanos, Run)>,
    waited: Vec<Waited>,
}

/// Runs jobs side by side from random instants on, with pauses between iterations, everything taking a half to three times what is planned.
fn side_by_side(
    random: &mut Random,
    device: &Profile,
    programs: &[Program],
    rounds: usize,
) -> Seen {
    let noisy = |random: &mut Random, program: &Program| {
        let mut durations = Durations::nominal(program, &device.link);
        for time in &mut durations.steps {
            *time = Nanos(time.0 * random.between(50, 300) as u64 / 100 + 1);
        }
        for work in &mut durations.copies {
            *work = *work * random.between(50, 300) as u128 / 100 + 1;
        }
        durations
    };
    let durations: Vec<Vec<Durations>> =
        programs.iter().map(|p| (0..rounds).map(|_| noisy(random, p)).collect()).collect();
    let length: u64 = programs[0].steps.iter().map(|s| s.time.0).sum();
    let pause = |random: &mut Random| {
        if random.once_in(2) { 0 } else { random.below(2 * length as usize + 1) as u64 }
    };
    let mut shared: Shared<'_, &Program, &Durations> = Shared::new(&device.link);
    let mut starts: Vec<Option<Nanos>> =
        programs.iter().map(|_| Some(Nanos(pause(random)))).collect();
    let mut done = vec![0; programs.len()];
    let mut iterations = Vec::new();
    loop {
        let next = starts.iter().flatten().min().copied();
        let ended = shared
            .until(next.unwrap_or(Nanos(u64::MAX)))
            .unwrap_or_else(|e| panic!("wait for each other for ever: {e}"));
        let now = shared.now();
        match ended {
            Some((job, run)) => {
                iterations.push((job, now - run.iteration, run));
                done[job] += 1;
                if done[job] < rounds {
                    starts[job] = Some(now + Nanos(pause(random)));
                }
            }
            None if next.is_none() => break,
            None => {}
        }
        for job in 0..programs.len() {
            if starts[job].is_some_and(|at| at <= now) {
                starts[job] = None;
                let utilisation = random.between(100, WHOLE as usize) as u32;
                shared.begin(
                    job,
                    Work {
                        program: &programs[job],
                        durations: &durations[job][done[job]],
                        utilisation,
                    },
                );
            }
        }
    }
    assert!(done.iter().all(|&d| d == rounds), "{done:?}");
    Seen { iterations, waited: shared.waited }
}

/// How often two residencies hold the same byte at once, of any job.
fn conflicts(programs: &[Program], seen: &Seen) -> usize {
    let mut held: Vec<[u64; 4]> = Vec::new();
    for (job, start, run) in &seen.iterations {
        for r in &programs[*job].residencies {
            let (from, until) = engine::life(r, run);
            let offset = r.offset.expect("placed").0;
            if from < until && r.bytes.0 > 0 {
                held.push([(*start + from).0, (*start + until).0, offset, offset + r.bytes.0]);
            }
        }
    }
    held.sort_unstable();
    let mut count = 0;
    let mut open: Vec<[u64; 4]> = Vec::new();
    for this in held {
        open.retain(|other| other[1] > this[0]);
        count += open.iter().filter(|other| other[2] < this[3] && this[2] < other[3]).count();
        open.push(this);
    }
    count
}

fn placed(graphs: &[Graph], plan: &Plan) -> Vec<Program> {
    graphs
        .iter()
        .zip(&plan.jobs)
        .map(|(graph, job)| Program::placed(graph, job).expect("placed"))
        .collect()
}

/// What stays round a job's boundary is its own, and so apart from all others at any time: the rest is [`conflicts`].
fn boundaries_are_own(programs: &[Program], plan: &Plan, seed: u64) {
    for (program, job) in programs.iter().zip(&plan.jobs) {
        let Some(window) = &job.window else { continue };
        for r in program
            .residencies
            .iter()
            .filter(|r| (r.begin == Begin::Iteration || r.stays) && r.bytes.0 > 0)
        {
            let offset = r.offset.expect("placed");
            assert!(
                offset + r.bytes <= window.offset || offset >= window.offset + window.bytes,
                "seed {seed}: {:?}",
                r.place
            );
        }
    }
}

struct Site {
    device: Profile,
    graphs: Vec<Graph>,
    latencies: Vec<Vec<Latency>>,
}

impl Site {
    fn new(random: &mut Random) -> Self {
        let mut device = builtin::find("host").expect("built in");
        device.link.h2d = random.between(100_000_000, 2_000_000_000) as u64;
        device.link.h2d_contended = device.link.h2d / 2;
        if random.once_in(3) {
            device.pinned_bytes = Bytes(random.between(1 << 12, 1 << 22) as u64);
        }
        let mut graphs: Vec<_> = (0..random.between(2, 4)).map(|_| random::graph(random)).collect();
        if random.once_in(3) {
            graphs[1] = graphs[0].clone();
        }
        let latencies =
            graphs.iter().map(|graph| latency::latencies(graph, &device, None)).collect();
        Self { device, graphs, latencies }
    }

    fn jobs(&self, method: &Method, budget: Bytes) -> Jobs<'_> {
        let job = |(graph, latencies)| Job {
            graph,
            file: ("x.graph.json".to_owned(), sha256(graph)),
            latencies,
            method: method.clone(),
            priority: 1000,
            swap_limit: Share::ALL,
        };
        let jobs =
            self.graphs.iter().zip(self.latencies.iter().map(Vec::as_slice)).map(job).collect();
        Jobs { jobs, device: &self.device, budget, recorded_options: BTreeMap::new() }
    }
}

#[test]
fn planned_windows_are_held_in_turn() {
    let (mut met, mut shared, mut only, mut lower, mut refused, mut waits, mut runs, mut broken) =
        (0, 0, 0, 0, 0, 0, 0, 0);
    for seed in first()..first() + plans() / 4 {
        let mut random = Random(seed ^ 0x00e1);
        let site = Site::new(&mut random);
        let methods = [
            Method::default(),
            Method::named("tensile").expect("a planner"),
            Method::named("checkpoint").expect("a planner"),
        ];
        let method = &methods[random.below(methods.len())];
        let unplanned = together::unplanned_peak(&site.graphs.iter().collect::<Vec<_>>());
        let budget =
            Bytes(unplanned.0 * random.between(35, 105) as u64 / 100).min(site.device.available());
        let asked = site.jobs(method, budget);
        let (least, memo) = (random.once_in(8), Memo::on_all_cores());
        let made =
            if least { overlap::minimum(&asked, &memo) } else { overlap::make(&asked, &memo) };
        let overlapped = match made {
            Ok(made) => made,
            Err(PlanError::Infeasible(no)) => {
                assert!(no.lowest > budget, "seed {seed}: {no:?}");
                refused += 1;
                continue;
            }
            Err(defect) => panic!("seed {seed}: {defect}"),
        };
        let plan = &overlapped.together.plan;
        let proof = check(plan, &site.graphs).unwrap_or_else(|r| panic!("seed {seed}: {}", r[0]));
        assert!(
            plan.figures.arena_bytes <= plan.budget && (least || plan.budget <= budget),
            "seed {seed}"
        );
        if least && let Ok(apart) = together::minimum(&asked, &Memo::on_all_cores()) {
            assert!(
                plan.budget <= apart.plan.budget,
                "seed {seed}: {} with a window, {} without",
                plan.budget,
                apart.plan.budget
            );
            lower += usize::from(plan.budget < apart.plan.budget);
        }
        let programs = placed(&site.graphs, plan);
        for ((program, figures), part) in
            programs.iter().zip(&proof.jobs).zip(&overlapped.together.parts)
        {
            let run = engine::nominal(program, &site.device.link)
                .unwrap_or_else(|e| panic!("seed {seed}: {e}"));
            assert_eq!(run.iteration, figures.iteration_ns, "seed {seed}");
            assert_eq!(
                run.iteration, part.run.iteration,
                "seed {seed}: sharing made it slower alone"
            );
        }
        met += 1;
        if overlapped.together.plan.window().is_none() {
            continue;
        }
        shared += 1;
        only += usize::from(overlapped.apart.is_none());
        boundaries_are_own(&programs, plan, seed);
        for _ in 0..20 {
            let seen = side_by_side(&mut random, &site.device, &programs, 3);
            assert_eq!(conflicts(&programs, &seen), 0, "seed {seed}");
            waits += seen.waited.len();
            runs += 1;
        }
        let mut lawless = programs;
        lawless
            .iter_mut()
            .for_each(|program| program.stretches = neap::sim::window::Stretches::default());
        broken += usize::from(
            conflicts(&lawless, &side_by_side(&mut random, &site.device, &lawless, 3)) > 0,
        );
    }
    println!(
        "{met} plans, {shared} with a window ({only} would not fit without), {lower} least budgets lowered, {refused} refused; \
         {runs} runs with {waits} waits; {broken} break when nobody waits"
    );
    assert!(
        shared * 10 > met && only > 0 && waits > runs && broken * 4 > shared,
        "too easy: {shared} of {met}, {waits} waits, {broken} broken"
    );
}

/// Whatever the checker lets pass runs to its end, however the bytes were divided and handed over.
#[test]
fn any_window_that_is_let_pass_is_safe() {
    let (mut passed, mut handed, mut circles, mut refused, mut waits, mut runs, mut broken) =
        (0, 0, 0, 0, 0, 0, 0);
    for seed in first()..first() + 5 * plans() {
        let mut random = Random(seed ^ 0x5a7e);
        let site = Site::new(&mut random);
        let methods = ["tensile", "capuchin", "checkpoint"]
            .map(|name| Method::named(name).expect("a planner"));
        let method = &methods[random.below(methods.len())];
        let unplanned = together::unplanned_peak(&site.graphs.iter().collect::<Vec<_>>());
        let budget =
            Bytes(unplanned.0 * random.between(60, 110) as u64 / 100).min(site.device.available());
        let Ok(together) = together::make(&site.jobs(method, budget), &Memo::on_all_cores()) else {
            continue;
        };
        let mut plan = together.plan.clone();
        let offset = plan.figures.arena_bytes;
        let bytes = together
            .parts
            .iter()
            .map(|part| part.plan.figures.arena_bytes)
            .max()
            .unwrap_or_default();
        let mut base = Bytes::ZERO;
        for ((job, part), graph) in plan.jobs.iter_mut().zip(&together.parts).zip(&site.graphs) {
            let passes = |place| {
                let mut all = part.program.residencies.iter().filter(|r| r.place == place);
                all.all(|r| r.begin != Begin::Iteration && !r.stays)
            };
            let share = if random.once_in(2) { 1 } else { random.between(1, 9) };
            for placement in &mut job.placements {
                // Rarely what is there at the boundary, too, which must be refused.
                if random.below(10) < share && (passes(placement.place) || random.once_in(60)) {
                    placement.offset = offset + (placement.offset - base);
                }
            }
            let hand_overs = random.below(3);
            let after: BTreeSet<usize> =
                (0..hand_overs).map(|_| random.below(graph.operators.len())).collect();
            let hands_over_after = after.into_iter().map(OpId::from_index).collect();
            job.window = Some(Window { offset, bytes, hands_over_after });
            base += part.plan.figures.arena_bytes;
        }
        plan.budget = offset + bytes;
        if let Err(reasons) = check_safety(&plan, &site.graphs) {
            let inner = |refusal: &Refusal| match refusal {
                Refusal::Job { reason, .. } => (**reason).clone(),
                other => other.clone(),
            };
            match inner(&reasons[0]) {
                Refusal::Deadlock { .. } => circles += 1,
                Refusal::WindowAtBoundary { .. } => refused += 1,
                other => panic!("seed {seed}: {other}"),
            }
            continue;
        }
        passed += 1;
        let programs = placed(&site.graphs, &plan);
        handed += programs.iter().filter(|program| program.stretches.count() > 1).count();
        boundaries_are_own(&programs, &plan, seed);
        for (job, program) in programs.iter().enumerate() {
            engine::nominal(program, &site.device.link)
                .unwrap_or_else(|e| panic!("seed {seed}: job {job} alone: {e}"));
        }
        for _ in 0..10 {
            let seen = side_by_side(&mut random, &site.device, &programs, 3);
            assert_eq!(conflicts(&programs, &seen), 0, "seed {seed}");
            waits += seen.waited.len();
            runs += 1;
        }
        let mut lawless = programs;
        lawless
            .iter_mut()
            .for_each(|program| program.stretches = neap::sim::window::Stretches::default());
        broken += usize::from(
            conflicts(&lawless, &side_by_side(&mut random, &site.device, &lawless, 3)) > 0,
        );
    }
    println!(
        "{passed} plans passed ({handed} jobs hand over), {circles} circles and {refused} at the boundary refused; {runs} runs with {waits} waits; \
         {broken} break when nobody waits"
    );
    assert!(
        handed * 4 > passed && circles > 0 && refused > 0 && waits > runs && broken * 4 > passed,
        "too easy"
    );
}
