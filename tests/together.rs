//! Several random jobs planned against one memory: proved, within the budget, and each as safe as alone.
//!
//! Run with `NEAP_DEEP=1`, `NEAP_CASES=N` or `NEAP_FIRST=SEED` (see `crate::common::cases`).

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use crate::common::random::{self, Random};
use neap::contract::Plan;
use neap::contract::check::check;
use neap::device::{Latency, Profile, builtin, latency};
use neap::job::json::sha256;
use neap::job::{Graph, chakra};
use neap::plan::live::{Arena, Arrival, Conditions, Live, Outcome};
use neap::plan::together::{self, Job, Jobs, Memo, limits, ways};
use neap::plan::{Method, PlanError, Planned, Share};
use neap::sim::beside::{Shared, WHOLE, Work};
use neap::sim::engine::{self, Durations};
use neap::sim::noise::Noise;
use neap::sim::program::{Direction, Program};
use neap::sim::rounds;
use neap::sim::share::policy::{self, Policy};
use neap::units::{Bytes, Nanos};

fn plans() -> u64 {
    crate::common::cases(1_000)
}

/// As many random graphs as a random number in a range, with their latencies on a device.
fn random_graphs(
    random: &mut Random,
    device: &Profile,
    (least, most): (usize, usize),
) -> (Vec<Graph>, Vec<Vec<Latency>>) {
    let graphs: Vec<_> = (0..random.between(least, most)).map(|_| random::graph(random)).collect();
    let latencies = graphs.iter().map(|graph| latency::latencies(graph, device, None)).collect();
    (graphs, latencies)
}

/// A job of usual priority without limits.
fn plain<'a>(graph: &'a Graph, latencies: &'a [Latency], method: &Method) -> Job<'a> {
    Job {
        graph,
        file: ("x.graph.json".to_owned(), sha256(graph)),
        latencies,
        method: method.clone(),
        priority: 1000,
        swap_limit: Share::ALL,
    }
}

/// Jobs on one device: alone as the engine has it, together never two copies on one wire, and never faster than their operators. (A job
/// beside others may be faster than alone, if rarely: what comes later may meet less contention between the link's directions.)
fn side_by_side(seed: u64, graphs: &[Graph], plan: &Plan) {
    let link = &plan.device.link;
    let programs: Vec<Program> = graphs
        .iter()
        .zip(&plan.jobs)
        .map(|(graph, job)| Program::placed(graph, job).expect("placed"))
        .collect();
    let durations: Vec<Durations> =
        programs.iter().map(|program| Durations::nominal(program, link)).collect();
    let work = |job: usize| Work {
        program: &programs[job],
        durations: &durations[job],
        utilisation: WHOLE,
    };
    let mut alone = Vec::new();
    for (job, program) in programs.iter().enumerate() {
        let once =
            engine::run(program, link, &Durations::nominal(program, link)).expect("no deadlock");
        let mut device = Shared::new(link);
        for _ in 0..2 {
            device.begin(0, work(job));
            let (seat, run) =
                device.until(Nanos(u64::MAX)).expect("no deadlock").expect("an iteration");
            assert_eq!(
                (seat, &run.steps, &run.copies, run.iteration),
                (0, &once.steps, &once.copies, once.iteration),
                "seed {seed}"
            );
            assert_eq!(
                (run.stalls, run.late_copies),
                (once.stalls, once.late_copies),
                "seed {seed}"
            );
        }
        let operators: u64 = program.steps.iter().map(|step| step.time.0).sum();
        assert!(once.iteration.0 >= operators, "seed {seed}");
        alone.push(Nanos(operators));
    }
    let mut device = Shared::new(link);
    let mut left = vec![3u32; programs.len()];
    for job in 0..programs.len() {
        device.begin(job, work(job));
    }
    while let Some((job, run)) = device.until(Nanos(u64::MAX)).expect("no deadlock") {
        assert!(
            run.iteration >= alone[job],
            "seed {seed}: job {job} took {}, its operators {}",
            run.iteration,
            alone[job]
        );
        left[job] -= 1;
        if left[job] > 0 {
            device.begin(job, work(job));
        }
    }
    assert!(left.iter().all(|&l| l == 0), "seed {seed}: {left:?}");
    for direction in [Direction::H2d, Direction::D2h] {
        let copies: Vec<_> = device.carried.iter().filter(|c| c.direction == direction).collect();
        assert!(
            copies.windows(2).all(|pair| pair[0].end <= pair[1].start),
            "seed {seed}: two copies at once"
        );
    }
    // However they stand to each other, and as the planner sees them.
    let own = |job: usize| plan.jobs[job].latencies.iter().map(|l| l.time).sum();
    let job = |job: usize| {
        let (program, durations) = (&programs[job], &durations[job]);
        (Work { program, durations, utilisation: WHOLE }, own(job))
    };
    let jobs: Vec<_> = (0..programs.len()).map(job).collect();
    let round = rounds::round(&jobs, link, false).expect("no deadlock");
    for course in &round.courses {
        assert_eq!(rounds::overlaps(&course.carried), 0, "seed {seed}: two copies at once");
        assert!(
            course.runs.iter().all(|runs| runs.len() >= rounds::ROUNDS as usize),
            "seed {seed}"
        );
        assert!(
            course.runs.iter().flatten().all(|(start, run)| *start + run.iteration <= course.end),
            "seed {seed}"
        );
    }
    if let [program] = &programs[..] {
        let once = engine::run(program, link, &durations[0]).expect("no deadlock");
        assert_eq!(
            round.time, once.iteration,
            "seed {seed}: a job by itself is not what the engine says"
        );
    }
    let compute: u64 = plan.jobs.iter().flat_map(|j| &j.latencies).map(|l| l.time.0).sum();
    assert!(device.now().0 >= 3 * compute, "seed {seed}: more than the whole device was used");
}

#[test]
fn random_jobs_together() {
    let first = crate::common::first();
    let (mut met, mut shrunk, mut refused) = (0, 0, 0);
    for seed in first..first + plans() {
        let mut random = Random(seed);
        let mut device = builtin::find("host").expect("built in");
        device.link.h2d = random.between(100_000_000, 2_000_000_000) as u64;
        device.link.h2d_contended = device.link.h2d / 2;
        device.pinned_bytes = Bytes(random.between(1 << 12, 1 << 22) as u64);
        let (graphs, latencies) = random_graphs(&mut random, &device, (1, 3));
        let methods = [
            Method::default(),
            Method::named("tensile").expect("a planner"),
            Method::named("checkpoint").expect("a planner"),
            Method::named("capuchin").expect("a planner"),
            Method::named("vdnn-conv").expect("a planner"),
        ];
        let method = methods[random.below(methods.len())].clone();
        let job = |(graph, latencies)| plain(graph, latencies, &method);
        let jobs: Vec<Job<'_>> =
            graphs.iter().zip(latencies.iter().map(Vec::as_slice)).map(job).collect();
        let unplanned = together::unplanned_peak(&graphs.iter().collect::<Vec<_>>());
        let budget =
            Bytes(unplanned.0 * random.between(45, 110) as u64 / 100).min(device.available());
        let asked = Jobs { jobs, device: &device, budget, recorded_options: BTreeMap::new() };
        let together = match if random.once_in(8) {
            together::minimum(&asked, &Memo::on_all_cores())
        } else {
            together::make(&asked, &Memo::on_all_cores())
        } {
            Ok(together) => together,
            Err(PlanError::Infeasible(no)) => {
                assert!(no.lowest > budget && no.floor <= no.lowest, "seed {seed}: {no:?}");
                refused += 1;
                continue;
            }
            Err(defect) => panic!("seed {seed}: {defect}"),
        };
        let plan = &together.plan;
        let proof = check(plan, &graphs).unwrap_or_else(|r| panic!("seed {seed}: {}", r[0]));
        assert!(plan.figures.arena_bytes <= plan.budget, "seed {seed}");
        for ((graph, job), figures) in graphs.iter().zip(&plan.jobs).zip(&proof.jobs) {
            let program =
                Program::placed(graph, job).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
            let link = &device.link;
            let run = engine::run(&program, link, &Durations::nominal(&program, link))
                .unwrap_or_else(|e| panic!("seed {seed}: {e}"));
            assert_eq!(
                (run.iteration, engine::peak(&engine::memory(&program, &run))),
                (figures.iteration_ns, figures.peak_bytes),
                "seed {seed}"
            );
        }
        side_by_side(seed, &graphs, plan);
        met += 1;
        shrunk += usize::from(plan.jobs.iter().any(|job| !job.events.is_empty()));
    }
    println!("{met} plans of several jobs ({shrunk} with events), {refused} budgets refused");
    assert!(
        shrunk * 3 > met && refused > 0,
        "too easy: {met} met, {shrunk} with events, {refused} refused"
    );
}

/// Planned for each other, jobs take less time side by side than planned each as if alone: not always, but on the whole.
#[test]
fn jobs_planned_for_each_other() {
    let first = crate::common::first();
    let (mut both, mut worse, mut sums) = (0, 0, [0u128; 2]);
    for seed in first..first + plans() / 2 {
        let mut random = Random(seed ^ 0x10c);
        let mut device = builtin::find("host").expect("built in");
        device.link.h2d = random.between(100_000_000, 2_000_000_000) as u64;
        (device.link.d2h, device.link.h2d_contended, device.link.d2h_contended) =
            (device.link.h2d, device.link.h2d / 2, device.link.h2d / 2);
        let (graphs, latencies) = random_graphs(&mut random, &device, (2, 4));
        let unplanned = together::unplanned_peak(&graphs.iter().collect::<Vec<_>>());
        let budget = Bytes(unplanned.0 * random.between(60, 95) as u64 / 100);
        let rounds: Vec<Option<Nanos>> = [true, false]
            .into_iter()
            .map(|together| {
                let method = Method::Neap(neap::plan::neap::Options {
                    together,
                    ..neap::plan::neap::Options::default()
                });
                let job = |(graph, latencies)| plain(graph, latencies, &method);
                let jobs =
                    graphs.iter().zip(latencies.iter().map(Vec::as_slice)).map(job).collect();
                let asked =
                    Jobs { jobs, device: &device, budget, recorded_options: BTreeMap::new() };
                let together = match together::make(&asked, &Memo::on_all_cores()) {
                    Ok(together) => together,
                    Err(PlanError::Infeasible(_)) => return None,
                    Err(defect) => panic!("seed {seed}: {defect}"),
                };
                assert!(together.plan.figures.arena_bytes <= budget, "seed {seed}");
                check(&together.plan, &graphs).unwrap_or_else(|r| panic!("seed {seed}: {}", r[0]));
                let programs: Vec<&Program> =
                    together.parts.iter().map(|part| &part.program).collect();
                Some(ways::round(&asked, &programs).expect("no deadlock").time)
            })
            .collect();
        let [ours, alone] = rounds[..] else { unreachable!() };
        assert!(ours.is_some() || alone.is_none(), "seed {seed}: only planned alone they fit");
        if let (Some(ours), Some(alone)) = (ours, alone) {
            both += 1;
            worse += usize::from(ours > alone);
            sums = [sums[0] + u128::from(ours.0), sums[1] + u128::from(alone.0)];
        }
    }
    println!(
        "{both} sets of jobs, {worse} slower when planned for each other, {} of {} ns in all",
        sums[0], sums[1]
    );
    // A single set may lose; most don't, and all together gain.
    assert!(
        both > 0 && worse * 3 < both && (both < 200 || sums[0] < sums[1]),
        "{both} sets, {worse} slower, {sums:?}"
    );
}

/// Otherwise the last step down, or the bytes left over, would make one of several equal jobs far
/// slower or faster than its twins.
#[test]
fn equal_jobs_get_even_parts() {
    let device = builtin::find("host").expect("built in");
    let (mut swaps, method) = (0, Method::default());
    for name in ["tiny_cnn-adam", "tiny_gpt2-adamw"] {
        let trace =
            Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("fixtures/{name}.et.json.gz"));
        let graph = chakra::import(&trace, &chakra::Options::default()).expect("a trace").graph;
        let latencies = latency::latencies(&graph, &device, None);
        for (copies, percent) in [(2, 75), (2, 60), (3, 70), (3, 55)] {
            let unplanned = together::unplanned_peak(&vec![&graph; copies]);
            let asked = Jobs {
                jobs: vec![plain(&graph, &latencies, &method); copies],
                device: &device,
                budget: Bytes(unplanned.0 * percent / 100),
                recorded_options: BTreeMap::new(),
            };
            let made = together::make(&asked, &Memo::on_all_cores()).expect("a plan").parts;
            for part in &made {
                assert_eq!(part.plan.figures, made[0].plan.figures, "{copies} {name}, {percent} %");
            }
            swaps += made.iter().map(|part| part.program.copies.len()).sum::<usize>();
        }
    }
    assert!(swaps > 0);
}

/// A limit on a job's part of all jobs' swaps: half of them have one.
fn limit(random: &mut Random) -> Share {
    let limit = Share::of_thousandths(random.between(50, 600) as u32);
    if random.once_in(2) { limit } else { Share::ALL }
}

/// The job that swaps most is held to less: no plan lets it make more, and some let it swap.
#[test]
fn no_job_makes_more_than_its_part_of_all_swaps() {
    let first = crate::common::first();
    let (mut lowered, mut without, mut refused) = (0, 0, 0);
    for seed in first..first + plans() / 4 {
        let mut random = Random(seed ^ 0x11a17);
        let device = builtin::find("host").expect("built in");
        let (graphs, latencies) = random_graphs(&mut random, &device, (2, 3));
        let unplanned = together::unplanned_peak(&graphs.iter().collect::<Vec<_>>());
        let planners = ["neap", "tensile"];
        let method = Method::named(planners[random.below(2)]).expect("a planner");
        let job = |(graph, latencies)| plain(graph, latencies, &method);
        let jobs = graphs.iter().zip(latencies.iter().map(Vec::as_slice)).map(job).collect();
        let budget = Bytes(unplanned.0 * random.between(60, 95) as u64 / 100);
        let mut asked = Jobs { jobs, device: &device, budget, recorded_options: BTreeMap::new() };
        let Ok(free) = together::make(&asked, &Memo::on_all_cores()) else { continue };
        let parts = limits::swap_parts(&free.parts);
        let Some((most, part)) = parts.iter().enumerate().max_by_key(|(_, part)| **part) else {
            continue;
        };
        if *part == Share::NONE {
            continue;
        }
        let limit = Share::of_thousandths(part.thousandths() * random.between(40, 95) as u32 / 100);
        asked.jobs[most].swap_limit = limit;
        match together::make(&asked, &Memo::on_all_cores()) {
            Ok(held) => {
                check(&held.plan, &graphs).unwrap_or_else(|r| panic!("seed {seed}: {}", r[0]));
                let now = limits::swap_parts(&held.parts)[most];
                assert!(now <= limit, "seed {seed}: {now} of all swaps, {limit} allowed");
                *(if now > Share::NONE { &mut lowered } else { &mut without }) += 1;
            }
            Err(PlanError::Infeasible(no)) => {
                assert!(no.blocked.contains("of all swaps"), "seed {seed}: {}", no.blocked);
                refused += 1;
            }
            Err(defect) => panic!("seed {seed}: {defect}"),
        }
    }
    println!("{lowered} jobs swap less, {without} no more, {refused} sets no longer fit");
    assert!(lowered > 0 && without > 0, "{lowered}, {without}, {refused}");
}

/// By TENSILE's max swapping rate each job's swapped tensors are at most its part of all jobs', but
/// for one tensor, so that a job can begin.
#[test]
fn tensile_holds_every_job_to_its_part_of_all_tensors_swapped() {
    let first = crate::common::first();
    let device = builtin::find("host").expect("built in");
    let (mut planned, mut beyond) = (0, 0);
    for seed in first..first + plans() / 4 {
        let mut random = Random(seed ^ 0x7e45);
        let (graphs, latencies) = random_graphs(&mut random, &device, (2, 3));
        let unplanned = together::unplanned_peak(&graphs.iter().collect::<Vec<_>>());
        let budget = Bytes(unplanned.0 * random.between(70, 95) as u64 / 100);
        let percent = random.between(20, 60);
        let swapped = |part: &str| {
            let method = Method::named("tensile").expect("a planner");
            let method = method.with([("max-swap-part", part)]).expect("a switch");
            let job = |(graph, latencies)| plain(graph, latencies, &method);
            let jobs = graphs.iter().zip(latencies.iter().map(Vec::as_slice)).map(job).collect();
            let asked = Jobs { jobs, device: &device, budget, recorded_options: BTreeMap::new() };
            let made = together::make(&asked, &Memo::on_all_cores()).ok()?;
            check(&made.plan, &graphs).unwrap_or_else(|r| panic!("seed {seed}: {}", r[0]));
            let count = |part: &Arc<Planned>| {
                let tensors = part.program.copies.iter().map(|copy| copy.tensor);
                tensors.collect::<BTreeSet<_>>().len()
            };
            Some(made.parts.iter().map(count).collect::<Vec<_>>())
        };
        let within = |counts: &[usize]| {
            let all: usize = counts.iter().sum();
            counts.iter().all(|count| count * 100 <= percent * all + 100)
        };
        if let Some(counts) = swapped(&percent.to_string()) {
            assert!(within(&counts), "seed {seed}: {counts:?}, {percent} %");
            planned += 1;
        }
        beyond += usize::from(swapped("100").is_some_and(|counts| !within(&counts)));
    }
    println!("{planned} plans within the part; without it {beyond} are beyond");
    assert!(planned > 0 && beyond > 0, "{planned}, {beyond}");
}

/// With more than a few jobs, too, memory is divided among all of them, and each keeps its limit.
#[test]
fn twelve_and_twenty_jobs_are_planned_together() {
    let first = crate::common::first();
    let (mut for_each_other, mut swapped) = (0, 0);
    for seed in first..first + (plans() / 40).max(2) {
        let mut random = Random(seed ^ 0x7e57);
        let device = builtin::find("host").expect("built in");
        let count = if random.once_in(2) { 12 } else { 20 };
        let (graphs, latencies) = random_graphs(&mut random, &device, (count, count));
        let unplanned = together::unplanned_peak(&graphs.iter().collect::<Vec<_>>());
        let job = |(graph, latencies)| Job {
            graph,
            file: (String::new(), sha256(graph)),
            latencies,
            method: Method::default(),
            priority: 1000,
            swap_limit: limit(&mut random),
        };
        let jobs: Vec<_> =
            graphs.iter().zip(latencies.iter().map(Vec::as_slice)).map(job).collect();
        let budget = Bytes(unplanned.0 * 7 / 10);
        let asked = Jobs { jobs, device: &device, budget, recorded_options: BTreeMap::new() };
        let made = match together::make(&asked, &Memo::on_all_cores()) {
            Ok(made) => made,
            Err(PlanError::Infeasible(_)) => continue,
            Err(defect) => panic!("seed {seed}: {defect}"),
        };
        assert!(made.plan.figures.arena_bytes <= budget, "seed {seed}");
        check(&made.plan, &graphs).unwrap_or_else(|r| panic!("seed {seed}: {}", r[0]));
        for (job, part) in asked.jobs.iter().zip(limits::swap_parts(&made.parts)) {
            assert!(part <= job.swap_limit, "seed {seed}: {part}, {} allowed", job.swap_limit);
            swapped += usize::from(part > Share::NONE);
        }
        for_each_other += usize::from(made.plan.options.contains_key("way"));
    }
    println!("{for_each_other} sets of jobs in a way of several, {swapped} jobs swap");
    assert!(for_each_other > 0 && swapped > 0, "{for_each_other}, {swapped}");
}

/// The jobs change and all are planned again, many times with the same memory of plans.
#[test]
fn priority_holds_through_any_number_of_replans() {
    let first = crate::common::first();
    let (mut compared, mut slower) = (0, 0);
    for seed in first..first + plans() / 8 {
        let mut random = Random(seed ^ 0x9a11);
        let device = builtin::find("host").expect("built in");
        let (graphs, latencies) = random_graphs(&mut random, &device, (1, 3));
        let method = ["tensile", "neap"][random.below(2)];
        let memo = if random.below(2) == 0 { Memo::default() } else { Memo::for_many() };
        let mut present: Vec<Job<'_>> = Vec::new();
        for replan in 0..6 {
            if present.len() > 2 && random.below(3) == 0 {
                present.remove(random.below(present.len()));
            } else {
                let graph = random.below(graphs.len());
                let method = Method::named(method).expect("a planner");
                present.push(Job {
                    priority: [250, 1000, 4000][random.below(3)],
                    ..plain(&graphs[graph], &latencies[graph], &method)
                });
            }
            let all: Vec<&Graph> = present.iter().map(|job| job.graph).collect();
            let share = random.between(50, 100) as u64;
            let asked = Jobs {
                jobs: present.clone(),
                device: &device,
                budget: Bytes(together::unplanned_peak(&all).0 * share / 100),
                recorded_options: BTreeMap::new(),
            };
            let together = match together::make(&asked, &memo) {
                Ok(together) => together,
                Err(PlanError::Infeasible(_)) => continue,
                Err(defect) => panic!("seed {seed}: {defect}"),
            };
            let time = |job: usize| together.parts[job].plan.figures.iteration_ns;
            for (a, high) in present.iter().enumerate() {
                for (b, low) in present.iter().enumerate() {
                    if high.file == low.file && high.priority > low.priority {
                        assert!(time(a) <= time(b), "seed {seed}, plan {replan}: jobs {a}, {b}");
                        compared += 1;
                        slower += usize::from(time(a) < time(b));
                    }
                }
            }
        }
    }
    println!("{compared} pairs, {slower} with the quicker plan for the higher priority");
    assert!(compared > 0 && slower > 0, "{compared}, {slower}");
}

/// Plans that are made on all cores are those that are made on one.
#[test]
fn the_number_of_cores_changes_no_plan() {
    let first = crate::common::first();
    let mut swapped = 0;
    for seed in first..first + plans() / 40 {
        let mut random = Random(seed ^ 0xc03e);
        let device = builtin::find("host").expect("built in");
        let (graphs, latencies) = random_graphs(&mut random, &device, (1, 2));
        let job = |graph: usize| plain(&graphs[graph], &latencies[graph], &Method::default());
        let jobs: Vec<Job<'_>> = (0..3).map(|_| job(random.below(graphs.len()))).collect();
        let all: Vec<&Graph> = jobs.iter().map(|job| job.graph).collect();
        let share = random.between(60, 95) as u64;
        let budget = Bytes(together::unplanned_peak(&all).0 * share / 100);
        let asked = Jobs { jobs, device: &device, budget, recorded_options: BTreeMap::new() };
        let made = [Memo::default(), Memo::on_all_cores()].map(|memo| {
            together::make(&asked, &memo).map(|made| made.plan).map_err(|e| e.to_string())
        });
        assert_eq!(made[0], made[1], "seed {seed}");
        let swaps = |plan: &Plan| plan.jobs.iter().any(|job| !job.events.is_empty());
        swapped += usize::from(made[0].as_ref().is_ok_and(swaps));
    }
    assert!(swapped > 0);
}

/// Where far more jobs come than the device can run, launches and ends find most plans made.
#[test]
fn many_times_as_many_jobs_need_few_more_plans() {
    let first = crate::common::first();
    let mut random = Random(first ^ 0xf10d);
    let device = builtin::find("host").expect("built in");
    let (graphs, latencies) = random_graphs(&mut random, &device, (3, 3));
    let peak = |graph| together::unplanned_peak(&[graph]).0;
    let budget = Bytes(graphs.iter().map(peak).max().unwrap_or(0) * 4);
    for policy in ["pack", "neap"] {
        let conditions =
            Conditions { policy: policy::find(policy).expect("a policy"), ..Conditions::default() };
        let plans = [40, 200].map(|count| {
            let arrival = |index: usize| Arrival {
                job: plain(&graphs[index % 3], &latencies[index % 3], &Method::default()),
                submitted: Nanos(index as u64 * 1000),
                iterations: 1 + index as u32 % 5,
            };
            let arrivals: Vec<Arrival<'_>> = (0..count).map(arrival).collect();
            let outcome =
                Live::new(&arrivals, &device, budget).under(conditions).run().expect("plans");
            assert!(outcome.jobs.iter().all(|job| job.ended.is_some()), "{policy}");
            assert!(outcome.replans as usize > count, "{policy}: {}", outcome.replans);
            println!("{policy}, {count}: {} plans, {} looks", outcome.plans, outcome.looks);
            outcome.plans
        });
        assert!(plans[0] > 3 && plans[1] < 2 * plans[0], "{policy}: {plans:?} plans");
    }
}

/// Under policies of one job at a time no two iterations overlap.
fn one_at_a_time(seed: u64, policy: &Policy, outcome: &Outcome) {
    if !policy.style.in_turn() {
        return;
    }
    let mut iterations: Vec<(Nanos, Nanos)> =
        outcome.jobs.iter().flat_map(|job| job.iterations.iter().copied()).collect();
    iterations.sort_unstable();
    let apart = iterations.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0);
    assert!(apart, "seed {seed}, {}: two jobs run at once", policy.name);
}

/// Jobs that come and go: every one that is let in ends, and at no instant do two hold the same
/// bytes or more than the budget.
#[test]
fn random_jobs_come_and_go() {
    let first = crate::common::first();
    let (mut ran, mut waited, mut moved, mut never, mut limited) = (0, 0, 0, 0, 0);
    for seed in first..first + plans() / 4 {
        let mut random = Random(seed ^ 0x5eed);
        let device = builtin::find("host").expect("built in");
        let (graphs, latencies) = random_graphs(&mut random, &device, (2, 5));
        let largest =
            graphs.iter().map(|graph| together::unplanned_peak(&[graph]).0).max().unwrap_or(0);
        let budget = Bytes(largest * random.between(60, 250) as u64 / 100);
        let mut at = 0;
        let mut arrivals = Vec::new();
        for (graph, latencies) in graphs.iter().zip(&latencies) {
            let own: u64 = latencies.iter().map(|l| l.time.0).sum();
            at += random.below(3 * own as usize + 1) as u64;
            let job = Job {
                graph,
                file: (String::new(), sha256(graph)),
                latencies,
                method: Method::named("tensile").expect("a planner"),
                priority: 1000,
                swap_limit: limit(&mut random),
            };
            arrivals.push(Arrival {
                job,
                submitted: Nanos(at),
                iterations: random.between(1, 6) as u32,
            });
        }
        let noise = (random.below(2) == 0)
            .then(|| Noise { share: random.below(50_000) as u64, seed: random.0 });
        let policy = &policy::ALL[random.below(policy::ALL.len())];
        let conditions = Conditions { policy, noise, real: None };
        let run = || {
            Live::new(&arrivals, &device, budget)
                .under(conditions)
                .run()
                .unwrap_or_else(|e| panic!("seed {seed}, {}: {e}", policy.name))
        };
        let outcome = run();
        assert_eq!(format!("{outcome:?}"), format!("{:?}", run()), "seed {seed}");
        one_at_a_time(seed, policy, &outcome);
        // From when until when each job holds which bytes.
        let mut held: Vec<(u64, u64, u64, u64)> = Vec::new();
        for (arrival, job) in arrivals.iter().zip(&outcome.jobs) {
            let Some(ended) = job.ended else {
                assert!(
                    job.admitted.is_none() && job.waited_for.is_some(),
                    "seed {seed}: it never ends"
                );
                never += 1;
                continue;
            };
            assert_eq!(job.iterations.len(), arrival.iterations as usize, "seed {seed}");
            assert!(job.swap_part <= arrival.job.swap_limit, "seed {seed}: above its limit");
            limited +=
                usize::from(job.swap_part > Share::NONE && arrival.job.swap_limit < Share::ALL);
            assert!(job.admitted.is_some_and(|at| at >= arrival.submitted), "seed {seed}");
            assert!(
                job.iterations.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0),
                "seed {seed}"
            );
            assert!(
                job.iterations[0].0 >= job.arenas[0].at_ns,
                "seed {seed}: it ran before it had memory"
            );
            for (index, &arena) in job.arenas.iter().enumerate() {
                let Arena { at_ns: from, base_bytes: base, arena_bytes: bytes } = arena;
                let until = job.arenas.get(index + 1).map_or(ended, |next| next.at_ns);
                assert!(base + bytes <= budget, "seed {seed}: beyond the budget");
                // It moves between iterations only.
                assert!(
                    job.iterations
                        .iter()
                        .all(|&(start, length)| from <= start || from >= start + length),
                    "seed {seed}"
                );
                held.push((from.0, until.0, base.0, bytes.0));
            }
            ran += 1;
            waited += usize::from(job.waited_for.is_some());
            moved += usize::from(job.arenas.len() > 1);
        }
        for (index, a) in held.iter().enumerate() {
            for b in &held[..index] {
                let apart = a.1 <= b.0 || b.1 <= a.0 || a.2 + a.3 <= b.2 || b.2 + b.3 <= a.2;
                assert!(apart, "seed {seed}: {a:?} and {b:?} hold the same bytes at once");
            }
        }
        for direction in [Direction::H2d, Direction::D2h] {
            let copies: Vec<_> =
                outcome.carried.iter().filter(|c| c.direction == direction).collect();
            assert!(
                copies.windows(2).all(|pair| pair[0].end <= pair[1].start),
                "seed {seed}: two copies at once"
            );
        }
    }
    println!(
        "{ran} jobs came and went, {waited} waited, {moved} moved, {never} never fitted, {limited} swapped within a limit"
    );
    assert!(
        crate::common::cases(1_000) < 500 || (waited > 0 && moved > 0 && never > 0 && limited > 0),
        "too easy: {ran} ran, {waited} waited, {moved} moved, {never} never fitted"
    );
}
