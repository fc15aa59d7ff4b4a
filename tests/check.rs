//! The checker against a brute-force interpreter: on plans that are right, and on damaged ones.

use std::collections::BTreeMap;

use crate::common::random::Random;
use crate::interpreter::{Machine, make};
use neap::contract::Plan;
use neap::contract::check::{Refusal, check, check_safety};
use neap::job::Graph;

/// Random timings that an accepted plan must survive, and in which a refused one must fail.
const TIMINGS: usize = 6;

/// How many damaged plans; what a minute allows without optimisation.
fn cases() -> usize {
    crate::common::cases(100_000) as usize
}

/// What goes wrong in some timing, if anything.
fn failure(random: &mut Random, plan: &Plan, graph: &Graph, timings: usize) -> Option<String> {
    (0..timings).find_map(|_| Machine::new(plan, graph, true).and_then(|m| m.run(random)).err())
}

/// Wrong by what is written, before anything runs: such a plan means nothing, or breaks a rule that
/// may happen to cost nothing.
fn structural(refusal: &Refusal) -> bool {
    use Refusal::*;
    matches!(
        refusal,
        Latencies { .. }
            | LatencyZero { .. }
            | UnknownOperator { .. }
            | UnknownTensor { .. }
            | Unsorted { .. }
            | RecomputeTooEarly { .. }
            | NeverReplayed { .. }
            | KeepsOther { .. }
            | KeepsTwice { .. }
            | NothingToEnd { .. }
            | EndedTwice { .. }
            | SlotUnused { .. }
            | SlotMisaligned { .. }
            | SlotsOverlap { .. }
            | NotPlaced { .. }
            | PlacedTwice { .. }
            | PlacedNothing { .. }
            | Misaligned { .. }
    )
}

/// The variant's name.
fn kind(refusal: &Refusal) -> String {
    format!("{refusal:?}").chars().take_while(|c| c.is_alphanumeric()).collect()
}

#[test]
fn damaged_plans_are_refused_exactly_when_they_can_fail() {
    let wanted = cases();
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    let start = std::time::Instant::now();
    let parts: Vec<Tally> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|t| scope.spawn(move || hunt(t as u64, wanted.div_ceil(threads))))
            .collect();
        workers.into_iter().map(|w| w.join().expect("an agreeing worker")).collect()
    });
    let mut tally = Tally::default();
    for part in parts {
        tally.accepted += part.accepted;
        tally.failed += part.failed;
        tally.structural += part.structural;
        for (kind, count) in part.kinds {
            *tally.kinds.entry(kind).or_default() += count;
        }
    }
    let Tally { accepted, failed, structural, kinds } = &tally;
    println!(
        "{} damaged plans in {:.1?}: {accepted} accepted and sound, {failed} refused and failing, {structural} refused by structure; {kinds:?}",
        accepted + failed + structural,
        start.elapsed()
    );
    if wanted >= 20_000 {
        for kind in EXPECTED {
            assert!(kinds.contains_key(*kind), "no damage led to {kind}");
        }
    }
}

/// What damage leads to; the rest has tests of its own.
const EXPECTED: &[&str] = &[
    "Latencies",
    "LatencyZero",
    "UnknownOperator",
    "UnknownTensor",
    "Unsorted",
    "RecomputeTooEarly",
    "NeverReplayed",
    "UpdatesTwice",
    "KeepsOther",
    "KeepsTwice",
    "NotResident",
    "WrongVersion",
    "WrittenAfterSwapOut",
    "StillResident",
    "NothingToEnd",
    "EndedTwice",
    "NoHostCopy",
    "StaleHostCopy",
    "LeavesDevice",
    "StaysOnDevice",
    "HostCopyLost",
    "SlotMissing",
    "SlotUnused",
    "SlotMisaligned",
    "SlotsOverlap",
    "BeyondPinned",
    "NotPlaced",
    "PlacedTwice",
    "PlacedNothing",
    "Misaligned",
    "BeyondBudget",
    "Overlap",
    "Deadlock",
];

#[derive(Default)]
struct Tally {
    accepted: usize,
    failed: usize,
    structural: usize,
    kinds: BTreeMap<String, usize>,
}

fn hunt(worker: u64, wanted: usize) -> Tally {
    let mut tally = Tally::default();
    let mut seed = worker << 40;
    while tally.accepted + tally.failed + tally.structural < wanted {
        seed += 1;
        let mut random = Random(seed);
        let graph = crate::common::random::graph(&mut random);
        let good = make::plan(&mut random, &graph);
        for case in 0..40 {
            let mut plan = good.clone();
            make::damage(&mut random, &graph, &mut plan);
            if random.once_in(4) {
                make::damage(&mut random, &graph, &mut plan);
            }
            let at = format!("seed {seed}, case {case}");
            match check_safety(&plan, std::slice::from_ref(&graph)) {
                Ok(_) => {
                    if let Some(problem) = failure(&mut random, &plan, &graph, TIMINGS) {
                        panic!("{at}: accepted, but {problem}\n{}", show(&plan, &graph));
                    }
                    tally.accepted += 1;
                }
                Err(refusals) => {
                    assert!(!refusals.is_empty(), "{at}: refused without a reason");
                    if refusals.iter().any(structural) {
                        tally.structural += 1;
                    } else {
                        let problem = failure(&mut random, &plan, &graph, 4 * TIMINGS);
                        assert!(
                            problem.is_some(),
                            "{at}: nothing fails, but {}\n{}",
                            refusals[0],
                            show(&plan, &graph)
                        );
                        tally.failed += 1;
                    }
                    for refusal in &refusals {
                        *tally.kinds.entry(kind(refusal)).or_default() += 1;
                    }
                }
            }
        }
    }
    tally
}

#[test]
fn right_plans_are_accepted_and_take_what_a_clock_says() {
    let (mut lively, mut shared) = (0, 0);
    for seed in 0..(cases() / 50) as u64 {
        let mut random = Random(seed ^ 0x5eed_0000_0000);
        let graph = crate::common::random::graph(&mut random);
        let mut plan = make::plan(&mut random, &graph);
        if seed % 2 == 0 {
            let apart = plan.jobs[0].host_slots.clone();
            let shares = make::share(&graph, &mut plan);
            // Placements that go against the order of events may not go with waits along it.
            if let Some(why) = failure(&mut random, &plan, &graph, 1) {
                assert_eq!(why, "deadlock", "seed {seed}");
                plan.jobs[0].host_slots = apart;
            } else {
                shared += usize::from(shares);
            }
        }
        let graphs = std::slice::from_ref(&graph);
        let proof = check_safety(&plan, graphs)
            .unwrap_or_else(|r| panic!("seed {seed}: {}\n{}", r[0], show(&plan, &graph)));
        lively += usize::from(plan.jobs[0].events.len() > 2);
        assert_eq!(
            failure(&mut random, &plan, &graph, TIMINGS),
            None,
            "seed {seed}\n{}",
            show(&plan, &graph)
        );
        let measured = Machine::new(&plan, &graph, true)
            .and_then(Machine::measure)
            .unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        let found = (proof.figures.iteration_ns.0, proof.figures.peak_bytes.0);
        assert_eq!(
            found,
            (measured.iteration_ns, measured.peak_bytes),
            "seed {seed}\n{}",
            show(&plan, &graph)
        );
        assert!(
            proof.figures.peak_bytes <= proof.figures.arena_bytes
                && proof.figures.arena_bytes <= plan.budget
        );
        // Without events nothing is won or lost.
        plan.jobs[0].events.clear();
        plan.jobs[0].host_slots.clear();
        assert!(make::place(&mut random, &graph, &mut plan));
        let bare =
            check_safety(&plan, graphs).unwrap_or_else(|r| panic!("seed {seed}: {}", r[0])).figures;
        assert_eq!(bare.iteration_ns, bare.unplanned_iteration_ns, "seed {seed}");
        // Without a plan the framework may keep tensors past their last use, which no plan does.
        let kept = graph.tensors.iter().any(|t| t.kept_until.is_some());
        assert!(bare.peak_bytes <= bare.unplanned_peak_bytes, "seed {seed}");
        assert!(kept || bare.peak_bytes == bare.unplanned_peak_bytes, "seed {seed}");
        // Figures are compared.
        plan.figures = bare;
        assert!(check(&plan, graphs).is_ok());
        plan.figures.peak_bytes.0 += 512;
        let refusals = check(&plan, graphs).expect_err("a wrong figure");
        assert!(matches!(refusals[..], [Refusal::Figure { figure: "peak_bytes", .. }]));
    }
    assert!(lively * 2 > cases() / 50, "only {lively} plans do something");
    assert!(shared * 50 > cases() / 50, "only {shared} plans share bytes of the pool");
}

fn show(plan: &Plan, graph: &Graph) -> String {
    let mut text = String::new();
    for (i, t) in graph.tensors.iter().enumerate() {
        text += &format!("tensor {i} {} {} kept {:?}\n", t.name, t.bytes.0, t.kept_until);
    }
    for (i, op) in graph.operators.iter().enumerate() {
        let list = |it: Vec<(u32, u32)>| format!("{it:?}");
        let reads = list(op.reads().map(|o| (o.tensor.0, o.version)).collect());
        let writes = list(op.writes().map(|o| (o.tensor.0, o.version)).collect());
        text += &format!(
            "op {i} {} {:?} reads {reads} writes {writes} ws {}\n",
            op.name, op.replay, op.workspace.0
        );
    }
    let job = &plan.jobs[0];
    for (i, e) in job.events.iter().enumerate() {
        text += &format!("event {i} {e:?}\n");
    }
    text + &format!(
        "{:?}\n{:?} budget {} pinned {}",
        job.placements, job.host_slots, plan.budget.0, plan.device.pinned_bytes.0
    )
}

#[test]
fn hostile_plans_do_not_panic() {
    use neap::contract::{Event, Latency, Place, Placement, Source, Trigger};
    use neap::units::{Bytes, Nanos, OpId, TensorId};
    for seed in 0..(cases() / 20) as u64 {
        let mut random = Random(seed ^ 0xbad_0000_0000);
        let mut graph = crate::common::random::graph(&mut random);
        for tensor in &mut graph.tensors {
            if random.once_in(3) {
                tensor.bytes = Bytes(1 << (30 + random.below(29)));
            }
        }
        let mut plan = make::plan(&mut random, &crate::common::random::graph(&mut Random(seed)));
        plan.budget = Bytes(u64::MAX);
        plan.device.memory_bytes = Bytes(1 << 60);
        if random.once_in(2) {
            plan.budget = Bytes(1 << 60);
            plan.device.pinned_bytes = Bytes(1 << 60);
        }
        let number = |random: &mut Random| match random.below(4) {
            0 => u64::MAX - random.below(1024) as u64,
            1 => 1 << random.below(64),
            _ => random.below(4096) as u64,
        };
        let id = |random: &mut Random| {
            if random.once_in(40) {
                u32::MAX - random.below(2) as u32
            } else {
                random.below(12) as u32
            }
        };
        let job = &mut plan.jobs[0];
        let time =
            |random: &mut Random| Latency { time: Nanos(number(random)), source: Source::Roofline };
        job.latencies = graph.operators.iter().map(|_| time(&mut random)).collect();
        for _ in 0..random.below(12) {
            let trigger = Trigger { after: Some(OpId(id(&mut random))) };
            let (tensor, operator) = (TensorId(id(&mut random)), OpId(id(&mut random)));
            job.events.push(match random.below(4) {
                0 => Event::SwapOut { tensor, trigger },
                1 => Event::SwapIn { tensor, trigger },
                2 => Event::Release { tensor, trigger },
                _ => Event::Recompute { operator, trigger, keep: vec![tensor; random.below(3)] },
            });
            job.host_slots.insert(tensor, Bytes(number(&mut random)));
            let place = Place::Tensor { tensor, residency: id(&mut random) };
            job.placements.push(Placement { place, offset: Bytes(number(&mut random)) });
        }
        if random.once_in(2) {
            job.events.sort_by_key(|e| e.trigger().after);
        }
        let _ = check(&plan, &[graph]);
    }
}
