//! No plan beats a bound: small random jobs, with every decision for their gaps tried by the engine.
//!
//! Plans are run without addresses here: an address only makes a plan wait, so these are at least as good as placed ones.

use std::collections::BTreeMap;

use crate::common::random::{self, Random};
use neap::contract::Latency;
use neap::device::{Link, latency};
use neap::job::{Graph, chakra};
use neap::plan::bound::Bounds;
use neap::plan::emit;
use neap::plan::residency::{Gap, Residencies, Swap};
use neap::sim::engine::{self, Durations};
use neap::sim::program::Program;
use neap::units::{Bytes, Nanos, TensorId};

/// At most so many plans of a job; beyond that, as many drawn at random.
const PLANS: u64 = 3_000;

fn jobs() -> u64 {
    crate::common::cases(1_500)
}

/// Every swap of a gap: after which operator it leaves, before which it comes back.
fn swaps(residencies: &Residencies<'_>, tensor: TensorId, gap: usize) -> Vec<Gap> {
    let operators = residencies.graph.operators.len() as u32;
    let (p, n, round) = residencies.operators(tensor, gap);
    let writes = &residencies.lifetime(tensor).writes;
    let first_out = writes.iter().rev().find(|&&w| w <= p).copied().unwrap_or(p);
    let decision = |out_after: u32, back: u32, early: u64| {
        Gap::Swap(Swap {
            out_until: 2 * out_after.max(p) + 1,
            back_from: 2 * back,
            out_place: out_after + 1,
            starts: (early, u64::from(n)),
            passive: false,
        })
    };
    let mut all = Vec::new();
    for out_after in [first_out, p].into_iter().chain(p + 1..if round { operators } else { n }) {
        for back in if round { 0..=n } else { out_after.max(p) + 1..=n } {
            all.push(decision(out_after, back, 0));
        }
    }
    all.dedup();
    all
}

/// What can be decided for the gaps that hold most bytes.
fn choices(residencies: &Residencies<'_>) -> Vec<(TensorId, usize, Vec<Option<Gap>>)> {
    let mut gaps: Vec<(u64, TensorId, usize)> = Vec::new();
    for (index, lifetime) in residencies.lifetimes.iter().enumerate() {
        let tensor = TensorId::from_index(index);
        for gap in 0..lifetime.gaps.len() {
            let (p, n, round) = residencies.operators(tensor, gap);
            if round || n > p + 1 {
                gaps.push((lifetime.bytes, tensor, gap));
            }
        }
    }
    gaps.sort_unstable_by(|a, b| b.cmp(a));
    gaps.truncate(6);
    let options = |tensor, gap| {
        let mut options = vec![None];
        if !residencies.lifetime(tensor).long_lived {
            options.push(Some(Gap::Recompute));
        }
        options.extend(swaps(residencies, tensor, gap).into_iter().map(Some));
        options
    };
    gaps.into_iter().map(|(_, tensor, gap)| (tensor, gap, options(tensor, gap))).collect()
}

/// The plan of one choice for each gap, in peak and time; `None` where it can't be.
fn tried(
    whole: &Residencies<'_>,
    latencies: &[Latency],
    link: &Link,
    decisions: &[(TensorId, usize, Option<Gap>)],
) -> Option<(Bytes, Nanos)> {
    let mut residencies = whole.clone();
    for &(tensor, gap, decision) in decisions {
        if let Some(swap @ Gap::Swap(_)) = decision {
            residencies.decide(tensor, gap, swap);
        }
    }
    // Recomputing adds uses, which shifts the gaps after them: the latest gap first.
    let mut again: Vec<(TensorId, usize)> = decisions
        .iter()
        .filter(|d| d.2 == Some(Gap::Recompute))
        .map(|&(tensor, gap, _)| (tensor, gap))
        .collect();
    again.sort_unstable_by_key(|&(tensor, gap)| std::cmp::Reverse(whole.operators(tensor, gap).1));
    for (tensor, gap) in again {
        let (p, n, _) = whole.operators(tensor, gap);
        let uses = &residencies.lifetime(tensor).uses;
        let at = uses.binary_search(&(2 * p + 1)).ok()?;
        if uses.get(at + 1) != Some(&(2 * n + 1)) {
            return None;
        }
        let (operators, _) = residencies.direct(latencies, tensor, at)?;
        residencies.recompute(tensor, at, operators);
    }
    let program =
        Program::new(residencies.graph, latencies, &emit::events(&residencies).events).ok()?;
    let run = engine::run(&program, link, &Durations::nominal(&program, link)).ok()?;
    Some((engine::peak(&engine::memory(&program, &run)), run.iteration))
}

struct Seen {
    plans: u64,
    /// Of the jobs whose bound lies below the unplanned peak: how far below, and how far the best plan without added time comes.
    possible: u64,
    reached: u64,
}

fn try_all(
    seed: u64,
    graph: &Graph,
    latencies: &[Latency],
    link: &Link,
    random: &mut Random,
    seen: &mut Seen,
) {
    let bounds = Bounds::new(graph, latencies, link);
    let whole = Residencies::new(graph);
    let choices = choices(&whole);
    let total = choices.iter().fold(1u64, |product, c| product.saturating_mul(c.2.len() as u64));
    let unplanned: Nanos = latencies.iter().map(|l| l.time).sum();
    let mut best = Bytes(u64::MAX);
    let mut least_of = BTreeMap::new();
    for number in 0..total.min(PLANS) {
        let mut rest = number;
        let decisions: Vec<_> = choices
            .iter()
            .map(|(tensor, gap, options)| {
                let drawn = if total > PLANS { random.next() } else { rest };
                rest /= options.len() as u64;
                (*tensor, *gap, options[(drawn % options.len() as u64) as usize])
            })
            .collect();
        let Some((peak, time)) = tried(&whole, latencies, link, &decisions) else { continue };
        seen.plans += 1;
        let added = time.saturating_sub(unplanned);
        assert!(
            bounds.peak(added) <= peak,
            "seed {seed}: {peak:?} with {added:?} more beats {:?}: {decisions:?}",
            bounds.peak(added)
        );
        // Many plans have the same peak.
        let least = *least_of.entry(peak).or_insert_with(|| {
            let least = bounds.iteration_for(peak, Nanos(u64::MAX));
            least.unwrap_or_else(|| panic!("seed {seed}: {peak:?} is below the floor"))
        });
        assert!(least <= time, "seed {seed}: {time:?} at {peak:?} beats {least:?}: {decisions:?}");
        if added == Nanos::ZERO {
            best = best.min(peak);
        }
    }
    let bound = bounds.peak(Nanos::ZERO);
    let unplanned_peak = Bytes(whole.load.peak().1);
    seen.possible += unplanned_peak.saturating_sub(bound).0;
    seen.reached += unplanned_peak.saturating_sub(best).0;
}

#[test]
fn no_plan_beats_a_bound() {
    let mut seen = Seen { plans: 0, possible: 0, reached: 0 };
    for seed in 0..jobs() {
        let mut random = Random(seed ^ 0xb0d5);
        let graph = random::graph(&mut random);
        if graph.operators.len() > 7 {
            continue;
        }
        let mut device = neap::device::builtin::find("host").expect("built in");
        device.link.h2d = random.between(100_000_000, 4_000_000_000) as u64;
        device.link.d2h = random.between(100_000_000, 4_000_000_000) as u64;
        device.link.h2d_contended = device.link.h2d * 3 / 4;
        device.link.d2h_contended = device.link.d2h * 3 / 4;
        device.link.overhead_ns = random.below(300) as u64;
        let mut latencies = latency::latencies(&graph, &device, None);
        for latency in &mut latencies {
            latency.time = Nanos(random.between(1, 3_000) as u64);
        }
        try_all(seed, &graph, &latencies, &device.link, &mut random, &mut seen);
    }
    println!(
        "{} plans; without added time {} of at most {} bytes saved",
        seen.plans, seen.reached, seen.possible
    );
    assert!(seen.plans > 1_000 && seen.possible > 0, "the jobs are too easy");
    assert!(
        seen.reached * 10 > seen.possible,
        "the bound is far below what can be reached: {} of {}",
        seen.reached,
        seen.possible
    );
}

#[test]
fn what_exceeds_a_budget_has_its_peak_above_it() {
    let trace = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/resnet18-adam.et.json.gz");
    let graph = chakra::import(trace.as_ref(), &chakra::Options::default()).unwrap().graph;
    let device = neap::device::builtin::find("a6000").expect("built in");
    let latencies = latency::latencies(&graph, &device, None);
    let bounds = Bounds::new(&graph, &latencies, &device.link);
    for added in [0, 50_000, 500_000, 5_000_000].map(Nanos) {
        let peak = bounds.peak(added);
        assert!(bounds.exceeds(added, Bytes(peak.0 - 1)), "{added:?}");
        assert!(!bounds.exceeds(added, peak), "{added:?}");
    }
}
