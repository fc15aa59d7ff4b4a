//! The planner on a small network: forward, then backward over what forward kept.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::choose::{Chooser, Setting};
use super::improve::polish::{Before, Choice, Judge, Made, polish};
use super::{Apart, Options, Rule, Variant, improve, linger, prefetch};
use crate::clock;
use crate::contract::{Event, Latency, Source};
use crate::device::Link;
use crate::gaps::Gaps;
use crate::job::{Arg, Dtype, Graph, Operand, Operator, Phase, Replay, Role, Tensor};
use crate::planner::{Given, Memory, Planner as _};
use crate::recompute::{Part, Reach};
use crate::residency::{Gap, Lifetime, Residencies, Swap};
use crate::units::{Bytes, Nanos, TensorId};

const LAYERS: usize = 12;
const SIZE: u64 = 1 << 20;

/// A byte is a nanosecond, alone or not.
const LINK: Link = Link {
    h2d: 1_000_000_000,
    d2h: 1_000_000_000,
    h2d_contended: 1_000_000_000,
    d2h_contended: 1_000_000_000,
    overhead_ns: 0,
};

fn operator(name: String, phase: Phase, reads: &[usize], makes: usize) -> Operator {
    let operand = |tensor: usize| Operand {
        tensor: TensorId::from_index(tensor),
        version: 0,
        dtype: Dtype::U8,
        offset: 0,
        shape: vec![SIZE],
        stride: vec![1],
    };
    Operator {
        name,
        kind: "test".to_owned(),
        phase,
        args: reads.iter().map(|&t| Arg::Tensor(operand(t))).collect(),
        outputs: vec![Some(operand(makes))],
        hidden: Vec::new(),
        workspace: Bytes::ZERO,
        replay: Replay::Pure,
        random: false,
        ..Operator::default()
    }
}

/// Tensor i + 1 is made from tensor i (0 is the input); backward reads them from the last to the
/// first.
fn graph() -> Graph {
    let mut operators: Vec<Operator> =
        (0..LAYERS).map(|i| operator(format!("f{i}"), Phase::Forward, &[i], i + 1)).collect();
    for i in 0..LAYERS {
        let gradient = LAYERS + i;
        operators.push(operator(
            format!("b{i}"),
            Phase::Backward,
            &[gradient, LAYERS - 1 - i],
            gradient + 1,
        ));
    }
    let tensors = (0..=2 * LAYERS).map(|i| Tensor {
        name: format!("t{i}"),
        bytes: Bytes(SIZE),
        role: if i == 0 { Role::Input } else { Role::Activation },
        dtype: Dtype::U8,
        shape: vec![SIZE],
        kept_until: None,
    });
    Graph::new("chain".to_owned(), tensors.collect(), operators, None, None, None).unwrap()
}

/// Even operators are cheap, odd ones dear.
fn latencies() -> Vec<Latency> {
    let time = |i: usize| Nanos(if i < LAYERS && i.is_multiple_of(2) { 1_000 } else { 300_000 });
    (0..2 * LAYERS).map(|i| Latency { time: time(i), source: Source::Graph }).collect()
}

fn given<'a>(graph: &'a Graph, latencies: &'a [Latency], target: u64) -> Given<'a> {
    Given { graph, latencies, link: &LINK, pinned: Bytes(1 << 30), target }
}

#[test]
fn what_is_cheap_is_made_again_and_what_is_dear_swapped() {
    let (graph, latencies) = (graph(), latencies());
    let decided = Options::default().decide(&given(&graph, &latencies, 9 * SIZE));
    assert!(decided.reached);
    let recomputed: Vec<u32> = decided
        .emitted
        .events
        .iter()
        .filter_map(
            |e| if let Event::Recompute { operator, .. } = e { Some(operator.0) } else { None },
        )
        .collect();
    assert!(!recomputed.is_empty() && recomputed.iter().all(|op| op % 2 == 0), "{recomputed:?}");
}

/// The swap of the chain's input, and the first and the last use of a large tensor that is made
/// while it is away. Operators of the forward take `forward` nanoseconds.
fn beside_a_large_tensor(forward: u64, apart: Apart) -> (Swap, u32, u32) {
    let time = |i: usize| Nanos(if i < LAYERS { forward } else { 100_000 });
    let latencies: Vec<Latency> =
        (0..2 * LAYERS).map(|i| Latency { time: time(i), source: Source::Graph }).collect();
    let (mut graph, input, large) = (graph(), TensorId::from_index(0), TensorId::from_index(3));
    graph.tensors[large.index()].bytes = Bytes(2 * SIZE);
    let clock = clock::Clock::nominal(&latencies);
    let mut residencies = Residencies::new(&graph);
    let swap = residencies.tightest(input, 0);
    residencies.decide(input, 0, Gap::Swap(swap));
    prefetch::fit(&mut residencies, &clock, &LINK, 16 * SIZE, Variant::FIRST, apart);
    let Gap::Swap(swap) = residencies.gap(input, 0) else { panic!("it is swapped") };
    let uses = &residencies.lifetime(large).uses;
    (swap, uses[0], uses[uses.len() - 1])
}

#[test]
fn what_nothing_generates_comes_back_after_a_large_tensor_that_began_while_it_was_away() {
    // Leaving takes one operator of forward, coming back ten of backward.
    let (swap, _, ends) = beside_a_large_tensor(2_000_000, Apart::No);
    assert!(swap.back_from < ends);
    let (swap, _, ends) = beside_a_large_tensor(2_000_000, Apart::After);
    assert_eq!(swap.back_from, ends + 1);
}

#[test]
fn what_nothing_generates_leaves_before_a_large_tensor_that_can_lie_at_its_address() {
    // Leaving takes ten operators.
    let (swap, begins, _) = beside_a_large_tensor(100_000, Apart::After);
    assert!(swap.out_until >= begins);
    let (swap, begins, _) = beside_a_large_tensor(100_000, Apart::Around);
    assert_eq!(swap.out_until, begins - 1);
}

#[test]
fn a_copy_out_may_begin_once_nothing_writes_the_tensor_and_it_is_there() {
    let (graph, tensor) = (graph(), TensorId::from_index(0));
    // Operators 0, 4, 8 and 20 use it.
    let from = |long_lived: bool, write: Option<u32>, before: [Gap; 2], last: Gap| {
        let mut residencies = Residencies::new(&graph);
        let lifetime = &mut residencies.lifetimes[tensor.index()];
        let gaps = [before[0], before[1], Gap::Keep, last];
        lifetime.uses = Arc::new(vec![1, 9, 17, 41]);
        lifetime.gaps = gaps.into_iter().take(3 + usize::from(long_lived)).collect();
        lifetime.writes = Arc::new(write.into_iter().collect());
        lifetime.long_lived = long_lived;
        residencies.leaves_from(tensor, 2)
    };
    let (keep, kept) = (Gap::Keep, [Gap::Keep; 2]);
    // From the end of the operator that writes it last.
    let places = [0, 4, 8].map(|write| from(false, Some(write), kept, keep));
    assert_eq!(places, [1, 5, 9]);
    // A recompute is a write too, and what comes back over the link is there for its next use.
    assert_eq!(from(false, Some(0), [keep, Gap::Recompute], keep), 9);
    assert_eq!(from(false, Some(0), [Gap::Recompute, keep], keep), 5);
    // What is there at the start of the iteration may leave from then on.
    assert_eq!(from(true, None, kept, keep), 0);
    assert_eq!(from(true, Some(20), kept, Gap::Recompute), 1);
}

#[test]
fn copies_out_begin_early_where_the_link_is_free() {
    let (graph, tensor) = (graph(), TensorId::from_index(0));
    // A copy takes about three operators. Operators 0, 4 and 20 use the tensor.
    let latency = Latency { time: Nanos(400_000), source: Source::Graph };
    let latencies = vec![latency; 2 * LAYERS];
    let nominal = clock::Clock::nominal(&latencies);
    let left = |early, cut_off| {
        let mut residencies = Residencies::new(&graph);
        let lifetime = &mut residencies.lifetimes[tensor.index()];
        lifetime.uses = Arc::new(vec![1, 9, 41]);
        lifetime.gaps = Gaps::kept(2);
        lifetime.writes = Arc::new(vec![0]);
        lifetime.long_lived = false;
        let tight = residencies.tightest(tensor, 1);
        residencies.decide(tensor, 1, Gap::Swap(tight));
        let variant = Variant { early, ..Variant::FIRST };
        prefetch::fit(&mut residencies, &nominal, &LINK, 24 * SIZE, variant, Apart::No);
        if cut_off {
            residencies.decide(tensor, 0, Gap::Recompute);
        }
        let Gap::Swap(swap) = residencies.gap(tensor, 1) else { panic!("it is swapped") };
        (residencies.out_place(tensor, 1, &swap), swap.out_until)
    };
    assert_eq!(left(false, false), (5, 15));
    // The copy ends during operator 3; the tensor stays for operator 4.
    assert_eq!(left(true, false), (1, 9));
    // What is dropped before that use is not there until then.
    assert_eq!(left(true, true).0, 5);
}

#[test]
fn what_was_copied_out_ahead_leaves_without_a_copy() {
    let (graph, options, parameter) = (graph(), Options::default(), TensorId::from_index(0));
    let latency = Latency { time: Nanos(400_000), source: Source::Graph };
    let latencies = vec![latency; 2 * LAYERS];
    let clock = clock::Clock::nominal(&latencies);
    // Operators 4 and 20 use it; one of these or a last one writes it.
    let swapped = |writes: u32| {
        let mut residencies = Residencies::new(&graph);
        let lifetime = &mut residencies.lifetimes[parameter.index()];
        lifetime.uses = Arc::new(vec![9, 41]);
        lifetime.gaps = Gaps::kept(2);
        lifetime.writes = Arc::new(vec![writes]);
        let setting = Setting {
            latencies: &latencies,
            link: &LINK,
            pinned: Bytes(1 << 30),
            target: 9 * SIZE,
            options: &options,
            clock: &clock,
            variant: Variant { ahead: true, ..Variant::FIRST },
            rules: &[],
            all: &[],
            large: &[],
        };
        let mut chooser = Chooser::new(residencies, setting);
        let before = chooser.residencies.load.at(24);
        let swaps = chooser.swap_ahead(parameter, 0, 24);
        let Residencies { load, .. } = &chooser.residencies;
        assert_eq!(before - load.at(24), if swaps { SIZE } else { 0 });
        swaps.then_some(chooser)
    };
    let chooser = swapped(20).unwrap();
    assert!(chooser.residencies.clean(parameter, 0) && !chooser.residencies.clean(parameter, 1));
    let Gap::Swap(round) = chooser.residencies.gap(parameter, 1) else { panic!("it is swapped") };
    // Each way takes three operators; the first one back is there for operator 4.
    assert_eq!((round.out_place, round.out_until, round.back_from), (21, 47, 2));
    assert_eq!(chooser.choices.len(), 2);
    // What its first use writes has to be copied out again.
    assert!(swapped(4).is_none());
}

#[test]
fn what_relieves_most_slots_is_swapped_before_what_is_largest() {
    let mut graph = graph();
    // One of the last of the forward is the largest, and away for a short time.
    graph.tensors[LAYERS - 3].bytes = Bytes(2 * SIZE);
    let latency = Latency { time: Nanos(8_000_000), source: Source::Graph };
    let latencies = vec![latency; 2 * LAYERS];
    let clock = clock::Clock::nominal(&latencies);
    let all: Vec<TensorId> = (0..=2 * LAYERS).map(TensorId::from_index).collect();
    let rules = vec![Rule::default(); all.len()];
    let first = |by_reach| {
        let options = Options { by_reach, recompute: false, ..Options::default() };
        let residencies = Residencies::new(&graph);
        let target = residencies.load.peak().1 - 3 * SIZE;
        let setting = Setting {
            latencies: &latencies,
            link: &LINK,
            pinned: Bytes(1 << 30),
            target,
            options: &options,
            clock: &clock,
            variant: Variant::FIRST,
            rules: &rules,
            all: &all,
            large: &all,
        };
        let mut chooser = Chooser::new(residencies, setting);
        chooser.rounds();
        assert!(chooser.residencies.load.peak().1 <= target);
        chooser.choices[0].tensor
    };
    // The input is there longest, and leaves without a copy.
    assert_eq!(first(true), TensorId::from_index(0));
    assert_eq!(first(false), TensorId::from_index(LAYERS - 3));
}

#[test]
fn a_choice_has_no_gap_where_another_use_leaves_no_slot() {
    let graph = graph();
    let mut residencies = Residencies::new(&graph);
    let long = |of: &Lifetime| of.uses.len() == 2 && of.uses[1] - of.uses[0] > 8;
    let tensor = TensorId::from_index(residencies.lifetimes.iter().position(long).unwrap());
    let until = residencies.lifetime(tensor).uses[1];
    let choice = Choice { tensor, until, made: Made::Again(0), windows: None };
    assert_eq!(choice.gap(&residencies), Some(0));
    // A recompute for the operator that uses it next reads it too.
    residencies.use_at(tensor, until & !1);
    assert_eq!(choice.gap(&residencies), None);
}

#[test]
fn effort_never_makes_it_worse_and_plans_are_the_same_each_time() {
    let (graph, latencies) = (graph(), latencies());
    for target in (4..14).map(|n| n * SIZE) {
        let given = given(&graph, &latencies, target);
        let time = |effort| {
            let (residencies, _) = improve::search(
                &given,
                &Options { effort, ..Options::default() },
                &Memory::Nothing,
            );
            (residencies.load.peak().1 > target, clock::run(&residencies, &latencies, &LINK).total)
        };
        let times: Vec<_> = [0, 1, 4, 16, 64].map(time).into();
        assert!(times.iter().all(|t| *t <= times[0]), "{target}: {times:?}");
        let twice = [(); 2].map(|()| Options::default().decide(&given).emitted.events);
        assert_eq!(twice[0], twice[1]);
    }
}

#[test]
fn a_chain_makes_what_is_gone_too_and_only_as_deep_as_it_may() {
    let (graph, latencies) = (graph(), latencies());
    let mut residencies = Residencies::new(&graph);
    // Tensor 3 is dropped, then 4, which is made from it.
    let reach = Options::default().reach();
    for tensor in [TensorId(3), TensorId(4)] {
        let recompute = residencies.recompute_of(&latencies, tensor, 1, reach).unwrap();
        residencies.apply(tensor, 1, recompute, 0, reach);
    }
    let made = |t: u32| residencies.chains.keys().filter(|k| k.1 == TensorId(t)).count();
    assert_eq!((made(3), made(4)), (2, 1), "3 is made for 4's sake, and again for its own use");
    let before = residencies.load.at(0);
    let shallow = Reach { depth: 0, ..reach };
    assert_eq!(
        residencies.recompute_of(&latencies, TensorId(5), 1, shallow),
        None,
        "4 is gone by then"
    );
    let deep = residencies.recompute_of(&latencies, TensorId(5), 1, reach).unwrap();
    let order: Vec<u32> =
        deep.parts.iter().map(|p| if let Part::Made(t, _) = p { t.0 } else { u32::MAX }).collect();
    assert_eq!(order, [3, 4, 5]);
    assert_eq!(residencies.load.at(0), before);
    assert!(matches!(residencies.gap(TensorId(4), 1), Gap::Recompute));
}

/// A forward of small tensors, then an update of each of several states, which nothing else uses.
fn states(count: usize) -> Graph {
    let mut operators: Vec<Operator> =
        (0..LAYERS).map(|i| operator(format!("f{i}"), Phase::Forward, &[i], i + 1)).collect();
    let tensor = |role| Tensor {
        name: format!("{role:?}"),
        bytes: Bytes(SIZE),
        role,
        dtype: Dtype::U8,
        shape: vec![SIZE],
        kept_until: None,
    };
    let mut tensors: Vec<Tensor> = (0..=LAYERS).map(|_| tensor(Role::Activation)).collect();
    tensors[0].role = Role::Input;
    for state in 0..count {
        let at = tensors.len();
        tensors.push(tensor(Role::OptimizerState));
        let mut update = operator(format!("u{state}"), Phase::Optimize, &[at], at);
        update.outputs.iter_mut().flatten().for_each(|o| o.version = 1);
        operators.push(update);
    }
    for (index, tensor) in tensors.iter_mut().enumerate() {
        tensor.name = format!("t{index}");
    }
    Graph::new("states".to_owned(), tensors, operators, None, None, None).unwrap()
}

#[test]
fn what_is_updated_last_leaves_in_the_next_forward() {
    let graph = states(4);
    let time = Nanos(SIZE);
    let latencies = vec![Latency { time, source: Source::Graph }; graph.operators.len()];
    let mut residencies = Residencies::new(&graph);
    let target = residencies.load.peak().1;
    let streamed: Vec<TensorId> = (LAYERS + 1..LAYERS + 5).map(TensorId::from_index).collect();
    for &state in &streamed {
        let tight = residencies.tightest(state, 0);
        residencies.decide(state, 0, Gap::Swap(Swap { back_from: 10, ..tight }));
    }
    let before = clock::run(&residencies, &latencies, &LINK);
    let nominal = clock::Clock::nominal(&latencies);
    let lingered = |most| {
        let mut residencies = residencies.clone();
        let variant = Variant { linger: most, ..Variant::FIRST };
        linger::linger(&mut residencies, &nominal, &LINK, target, variant);
        assert!(residencies.load.peak().1 <= target);
        residencies
    };
    for most in 0..=4 {
        let stays = |state: &&TensorId| lingered(most).lifetime(**state).gaps.len() == 2;
        let last: Vec<TensorId> = streamed.iter().filter(stays).copied().collect();
        assert_eq!(last, streamed[4 - most as usize..], "{most} at most");
    }
    let residencies = lingered(u32::MAX);
    // All leave in the forward, one after the other, and none at the end.
    for (number, &state) in (1..).zip(streamed.iter().rev()) {
        let Gap::Swap(swap) = residencies.gap(state, 0) else { panic!("{state:?} does not leave") };
        assert_eq!((swap.out_place, swap.out_until), (0, 2 * number - 1), "{state:?}");
        assert_eq!(residencies.gap(state, 1), Gap::Keep);
    }
    let after = clock::run(&residencies, &latencies, &LINK);
    assert_eq!((before.total, after.total), (20 * SIZE, 16 * SIZE));
}

/// Takes every change, and checks that it is within the target and better than the last taken.
struct Taking<F> {
    time: F,
    target: u64,
    best: u64,
    quicker: u32,
}

impl<F: Fn(&Residencies<'_>) -> u64 + Sync> Judge for Taking<F> {
    type Verdict = u64;

    fn look(&self, found: &Residencies<'_>) -> Option<u64> {
        let time = (self.time)(found);
        assert!(found.load.peak().1 <= self.target, "{}", self.target);
        assert!(time <= self.best, "{}: {time} after {}", self.target, self.best);
        Some(time)
    }

    fn take(&mut self, time: u64) {
        self.quicker += u32::from(time < self.best);
        self.best = time;
    }
}

/// Takes no change, and counts them.
#[derive(Default)]
struct Refusing(AtomicU32);

impl Judge for Refusing {
    type Verdict = ();

    fn look(&self, _: &Residencies<'_>) -> Option<()> {
        self.0.fetch_add(1, Ordering::Relaxed);
        None
    }

    fn take(&mut self, (): ()) {}
}

#[test]
fn choices_made_again_are_the_same_and_changes_are_quicker_within_the_target() {
    let (graph, latencies) = (graph(), latencies());
    let options = Options { effort: 2, ..Options::default() };
    let (mut quicker, mut by_pairs) = (0, 0);
    for target in (4..14).map(|n| n * SIZE) {
        let given = given(&graph, &latencies, target);
        let (residencies, warm) = improve::search(&given, &options, &Memory::Nothing);
        if residencies.load.peak().1 > target {
            continue;
        }
        let time = |of: &Residencies<'_>| clock::run(of, &latencies, &LINK).total;
        for before in [Before::Nothing, Before::Linger, Before::Random] {
            let mut taking = Taking { time: &time, target, best: time(&residencies), quicker: 0 };
            polish([given, given], &options, &warm, before, &mut taking);
            quicker += taking.quicker;
            let single = Options { pairs: false, ..options.clone() };
            let mut alone = Taking { time: &time, target, best: time(&residencies), quicker: 0 };
            polish([given, given], &single, &warm, before, &mut alone);
            assert!(taking.best <= alone.best, "{target}: {} by pairs", taking.best);
            by_pairs += u32::from(taking.best < alone.best);
            // There is something to be asked about just where something is taken.
            let mut refusing = Refusing::default();
            polish([given, given], &options, &warm, before, &mut refusing);
            let (asked, taken) = (refusing.0.into_inner(), taking.quicker);
            assert_eq!(asked > 0, taken > 0, "{target}: {asked} asked, {taken} taken");
        }
    }
    assert!(quicker > 0, "no change was for the better");
    assert!(by_pairs > 0, "no pair was for the better");
}
