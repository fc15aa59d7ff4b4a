use std::path::Path;

use super::path::{AWAY, Course, DROPPED, Event, Flow, Instant, NEVER, Paths, Prices, Step};
use super::*;
use crate::arrange::early_job;
use crate::contract::Source;
use crate::device::builtin;
use crate::device::latency::latencies;
use crate::exact::{self, operand, operator, tensor};
use crate::job::chakra;
use crate::job::liveness::Liveness;
use crate::job::optimizer::is_update;
use crate::job::{Operator, Phase, Role};

/// A sequence of numbers (a linear congruential generator).
struct Random(u64);

impl Random {
    fn below(&mut self, most: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % most
    }

    fn part(&mut self) -> f64 {
        self.below(1 << 20) as f64 / f64::from(1 << 20)
    }
}

fn prices(random: &mut Random, count: usize) -> Prices {
    let mut all = || (0..count).map(|_| random.part()).collect::<Vec<f64>>();
    Prices { memory: all(), back: all(), out: all(), again: all(), room: all() }
}

fn course(random: &mut Random, count: usize, round: bool) -> Course {
    let replays = !round && random.below(3) > 0;
    let step = |at: usize| {
        let last = !round && at + 1 == count;
        let event = match random.below(4) {
            _ if last => Event::Use,
            0 => Event::Use,
            1 => Event::Write,
            _ => Event::None,
        };
        let instant = match random.below(5) {
            _ if last => Instant::Held,
            0 => Instant::Held,
            1 => Instant::Away,
            _ => Instant::Counted,
        };
        let price = if replays { random.below(2000) } else { NEVER };
        Step { at: u32::try_from(at).unwrap(), event, instant, price }
    };
    Course { steps: (0..count).map(step).collect(), round, copied: 256 }
}

/// What a path takes, priced: what it is worth.
fn priced(flow: &Flow, prices: &Prices) -> f64 {
    let sum = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    sum(&flow.away, &prices.memory)
        - sum(&flow.back, &prices.back)
        - sum(&flow.out, &prices.out)
        - sum(&flow.again, &prices.again)
}

/// The best of all sequences of states, said apart from the code under test.
fn tried(course: &Course, prices: &Prices) -> f64 {
    let steps = course.steps.len();
    let mut best = f64::NEG_INFINITY;
    for number in 0..4usize.pow(u32::try_from(steps).unwrap() + 1) {
        let states: Vec<usize> = (0..=steps).map(|at| number / 4usize.pow(at as u32) % 4).collect();
        let ends = if course.round {
            states[0] == states[steps] && states[0] != DROPPED
        } else {
            states[0] == 0
        };
        if ends {
            best = best.max(worth(course, prices, &states).unwrap_or(f64::NEG_INFINITY));
        }
    }
    best
}

fn worth(course: &Course, prices: &Prices, states: &[usize]) -> Option<f64> {
    let mut sum = 0.0;
    for (step, pair) in course.steps.iter().zip(states.windows(2)) {
        let (at, gone) = (step.at as usize, |state: usize| state == AWAY || state == DROPPED);
        let rests = step.event == Event::None && gone(pair[0]) && pair[0] == pair[1];
        let again = match step.price {
            NEVER => f64::INFINITY,
            price => prices.again[at] * price as f64 * 1.024,
        };
        let mut right = pair[0] == 1 || pair[0] == AWAY;
        if !rests {
            match pair[0] {
                AWAY => sum -= prices.back[at].min(again),
                DROPPED => sum -= again,
                _ => {}
            }
            right &= step.event != Event::Write;
            match pair[1] {
                0 if right => return None,
                1 | AWAY if !right => sum -= prices.out[at],
                DROPPED if again == f64::INFINITY => return None,
                _ => {}
            }
        }
        match step.instant {
            Instant::Held if gone(pair[1]) => return None,
            Instant::Away if !gone(pair[1]) => return None,
            Instant::Counted | Instant::Away if gone(pair[1]) => sum += prices.memory[at],
            _ => {}
        }
    }
    Some(sum)
}

#[test]
fn the_best_path_is_the_best_of_all_and_its_flow_has_its_worth() {
    let mut paths = Paths::default();
    for seed in 0..300 {
        let mut random = Random(seed);
        let count = 2 + random.below(4) as usize;
        let course = course(&mut random, count, seed % 2 == 0);
        let prices = prices(&mut random, count);
        let best = paths.best(&course, &prices);
        let close = |a: f64, b: f64| (a - b).abs() < 1e-9;
        let all = tried(&course, &prices);
        assert!(close(best, all), "seed {seed}: {best} {all}");
        let mut flow = Flow::default();
        flow.clear(count);
        paths.add(&course, &prices, None, 1.0, &mut flow);
        let flows = priced(&flow, &prices);
        assert!(close(best, flows), "seed {seed}: {best} {flows}");
    }
}

#[test]
fn an_update_may_happen_in_any_interval() {
    let mut paths = Paths::default();
    for seed in 0..200 {
        let mut random = Random(seed);
        let count = 2 + random.below(4) as usize;
        let course = course(&mut random, count, true);
        let prices = prices(&mut random, count);
        let mut worths = vec![0.0; count];
        paths.with_updates(&course, &prices, Event::Write, 0..count, &mut worths, 1.0);
        for (at, all) in worths.into_iter().enumerate() {
            let mut with = course.clone();
            with.steps[at].event = Event::Write;
            let best = tried(&with, &prices);
            let walked = paths.best_with(&course, &prices, (at, Event::Write));
            assert!((all - best).abs() < 1e-9 && (walked - best).abs() < 1e-9, "seed {seed}");
        }
    }
}

#[test]
fn a_gradient_lives_until_its_update_runs() {
    let mut paths = Paths::default();
    for seed in 0..200 {
        let mut random = Random(seed);
        let count = 3 + random.below(3) as usize;
        let width = 2 + random.below(count as u64 - 2) as usize;
        let mut course = course(&mut random, count, false);
        let prices = prices(&mut random, count);
        for (at, step) in course.steps.iter_mut().enumerate().skip(count - width) {
            step.instant = if at + 1 == count { Instant::Held } else { Instant::Extra };
            step.event = Event::None;
        }
        let mut worths = vec![0.0; width];
        paths.until(&course, &prices, &mut worths, 1.0);
        for (by, worth) in worths.into_iter().enumerate() {
            let at = count - width + by;
            assert!((paths.walk_until(&course, &prices, at) - worth).abs() < 1e-9, "seed {seed}");
            let mut flow = Flow::default();
            flow.clear(count);
            paths.add(&course, &prices, None, 1.0, &mut flow);
            assert!((priced(&flow, &prices) - worth).abs() < 1e-9, "seed {seed}");
            // What waits takes memory.
            assert!(flow.away[count - width..].iter().all(|away| *away <= 0.0), "seed {seed}");
        }
    }
}

fn relaxations(late: bool, parts: &[u32]) -> Vec<Relaxation> {
    let graph = crate::exact::resnet18();
    let device = builtin::find("rtx4090").unwrap();
    let times = latencies(&graph, &device, None);
    let budget = Bytes(Liveness::new(&graph).peak.0 / 2);
    let rules = Rules { budget, late, needs: false, ends: true, proving: Some(20) };
    let (graph, times) = early_job(&graph, &times);
    let residencies = Residencies::new(&graph);
    let new = |parts: &u32| Relaxation::new(&residencies, &times, &device.link, rules, *parts);
    parts.iter().filter_map(new).collect()
}

#[test]
fn planes_lie_above_the_value() {
    for late in [false, true] {
        let relaxation = &relaxations(late, &[12])[0];
        let mut memory = Memory::default();
        let mut random = Random(u64::from(late));
        let mut point = || {
            let mut point: Vec<f64> =
                (0..3 * relaxation.count()).map(|_| random.part() / 2.0).collect();
            let memory = relaxation.count();
            point[..memory].iter_mut().for_each(|price| *price /= 10.0);
            point
        };
        for _ in 0..100 {
            let (a, b) = (point(), point());
            let (mut rises, mut none) = (vec![0.0; a.len()], vec![0.0; a.len()]);
            let at_a = relaxation.value(&a, &mut rises, &mut memory);
            let at_b = relaxation.value(&b, &mut none, &mut memory);
            let plane: f64 =
                rises.iter().zip(a.iter().zip(&b)).map(|(r, (a, b))| r * (b - a)).sum();
            assert!(at_b <= at_a + plane + 1e-9, "{at_b} {at_a} {plane}");
        }
    }
}

#[test]
fn more_instants_and_fixed_updates_never_bound_less() {
    let mut least = 0.0;
    for late in [true, false] {
        let mut last: Option<(Relaxation, Found)> = None;
        let mut before = 0.0;
        for relaxation in relaxations(late, &[6, 12, 24]) {
            let found = relaxation.rise(last.as_ref(), f64::INFINITY);
            assert!(found.value >= before - 1e-12, "{} {before}", found.value);
            before = found.value;
            last = Some((relaxation, found));
        }
        // The early order is one of those that are allowed with late updates.
        assert!(before >= least - 1e-3, "{before} {least}");
        least = before;
    }
    assert!(least > 0.05, "{least}");
}

#[test]
fn a_job_of_updates_alone_is_not_bounded() {
    let trace =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/tiny_cnn-adam.et.json.gz");
    let graph = chakra::import(&trace, &chakra::Options::default()).unwrap().graph;
    let operators = graph.operators.iter().filter(|operator| is_update(operator)).cloned();
    let updates = Graph { operators: operators.collect(), ..graph };
    assert!(!updates.operators.is_empty());
    let device = builtin::find("rtx4090").unwrap();
    let times = latencies(&updates, &device, None);
    for late in [false, true] {
        let bound = added(&updates, &times, &device.link, Bytes(512), late, Nanos(u64::MAX), None);
        assert_eq!(bound, Nanos::ZERO);
    }
    let Guide { hints, added, .. } = guide(&updates, &times, &device.link, Bytes(512));
    assert!(added == Nanos::ZERO && hints.iter().all(|hint| *hint == Hint::default()));
}

#[test]
fn prices_of_one_budget_bound_another_one() {
    let graph = crate::exact::resnet18();
    let device = builtin::find("rtx4090").unwrap();
    let times = latencies(&graph, &device, None);
    let of = |budget| guide(&graph, &times, &device.link, budget);
    let peak = Liveness::new(&graph).peak.0;
    let (half, less) = (Bytes(peak / 2), Bytes(peak / 2 - peak / 20));
    let (guide, tighter) = (of(half), of(less));
    assert_eq!(guide.added_within(half), guide.added);
    let proved = guide.added_within(less);
    assert!(proved > guide.added && proved.0 <= tighter.added.0 + tighter.added.0 / 1000);
    assert!(guide.added_within(Bytes(peak)) == Nanos::ZERO);
}

#[test]
fn what_does_not_fit_beside_an_operator_leaves_as_a_whole() {
    let all = [
        ("in", 512, Role::Input),
        ("weight", 65_536, Role::Parameter),
        ("small", 512, Role::Activation),
        ("large", 32_768, Role::Activation),
        ("less", 512, Role::Activation),
        ("end", 512, Role::Activation),
    ];
    let tensors: Vec<_> =
        all.iter().map(|&(name, bytes, role)| tensor(name.to_owned(), bytes, role)).collect();
    let reads: [(&[usize], usize); 4] = [(&[0, 1], 2), (&[2], 3), (&[3], 4), (&[4, 1], 5)];
    let operators = reads.iter().enumerate().map(|(at, &(reads, output))| Operator {
        outputs: vec![Some(operand(&tensors, output, 0))],
        ..operator(format!("operator{at}"), Phase::Forward, reads, &tensors)
    });
    let operators = operators.collect();
    let graph = Graph::new("job".to_owned(), tensors, operators, None, None, None).unwrap();
    let times = [1000; 4].map(|time| Latency { time: Nanos(time), source: Source::Graph });
    let link = exact::device().link;
    let most = Nanos(u64::MAX);
    let added = |budget| added(&graph, &times, &link, Bytes(budget), true, most, None).0;
    // The weight and what the second and the third operator need.
    let all = 65_536 + 32_768 + 512;
    assert_eq!(added(all + 512), 0);
    // A byte takes a nanosecond over the link, and the weight comes when the third one has ended.
    assert!((65_000..=65_536).contains(&added(all - 512)), "{}", added(all - 512));
}
