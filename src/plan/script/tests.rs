//! Plans for synthetic scripts, counted anew from their actions.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::course::{Course, Kind};
use super::problem::{
    Asked, Iteration, Life, Operator, Pack, Phase, PieceSize, Range, Role, Storage,
};
use super::{Answer, Ask, Problem, plan};
use crate::device::{Profile, builtin};

const MIB: u64 = 1 << 20;

/// A layer of a chain: the bytes of its output and its parameter, and its time.
#[derive(Clone, Copy, Debug)]
struct Layer {
    output: u64,
    parameter: u64,
    ns: u64,
    /// Whether it may run again.
    again: bool,
}

/// A chain of layers, each of which saves its output, with updates of Adam after backward. Layer i
/// is operator i; its backward is operator 2n − 1 − i, its update operator 2n + i. Storages are
/// outputs, then parameters, then two states for each parameter.
fn chain(layers: &[Layer]) -> Problem {
    let n = layers.len();
    let (parameter, state) = (|i| n + i, |i: usize, which: usize| 2 * n + 2 * i + which);
    let storage =
        |name: String, bytes, role| Storage { name, bytes, role, dtype: "f32".to_owned() };
    let mut storages = Vec::new();
    storages.extend((0..n).map(|i| storage(format!("out{i}"), layers[i].output, Role::Other)));
    storages.extend((0..n).map(|i| storage(format!("p{i}"), layers[i].parameter, Role::Parameter)));
    for (i, layer) in layers.iter().enumerate() {
        for kind in ["exp_avg", "exp_avg_sq"] {
            let name = format!("{kind}:p{i}");
            storages.push(storage(name, layer.parameter, Role::OptimizerState));
        }
    }
    let always: u64 = layers.iter().map(|layer| 3 * layer.parameter).sum();
    let mut operators = Vec::new();
    for place in 0..3 * n {
        let (phase, i) = match place / n {
            0 => (Phase::Forward, place),
            1 => (Phase::Backward, 2 * n - 1 - place),
            _ => (Phase::Optimize, place - 2 * n),
        };
        let before = i.checked_sub(1);
        let (reads, writes, makes) = match phase {
            Phase::Forward => (before.into_iter().chain([parameter(i)]).collect(), vec![], vec![i]),
            Phase::Backward => (vec![i, parameter(i)], vec![], vec![]),
            Phase::Optimize => {
                let all = vec![parameter(i), state(i, 0), state(i, 1)];
                (all.clone(), all, vec![])
            }
        };
        let alive = |&j: &usize| j <= place && place < 2 * n - j;
        let outputs: u64 = (0..n).filter(alive).map(|j| layers[j].output).sum();
        operators.push(Operator {
            name: format!("op{place}"),
            ns: layers[i].ns,
            phase,
            update: phase == Phase::Optimize,
            workspace: 0,
            standing: always + outputs,
            reads,
            writes,
            makes,
        });
    }
    let lives = (0..n).map(|i| Life {
        storage: i,
        born: Some(i),
        end: 2 * n - i,
        let_go: (i + 2).min(2 * n - 1 - i),
        let_go_pack: 0,
        until: None,
        held: false,
    });
    let packs = (0..n).map(|i| Pack {
        storage: Some(i),
        module: format!("layer{i}"),
        packed: i + 1,
        order: 0,
        asked: vec![Asked { place: 2 * n - 1 - i, order: u32::try_from(n - 1 - i).unwrap() }],
    });
    let ranges = (1..n).filter(|&i| layers[i].again).map(|i| Range {
        name: format!("layer{i}"),
        call: None,
        inside: None,
        first: i,
        cut: i + 1,
        again: 2 * n - 1 - i,
        over: 2 * n - i,
        order: u32::try_from(n - 1 - i).unwrap(),
        brings: vec![i],
        inputs: vec![i - 1],
        saved: vec![i],
        asked: vec![i - 1],
    });
    let usual = Iteration {
        operators,
        lives: lives.collect(),
        packs: packs.collect(),
        ranges: ranges.collect(),
    };
    Problem {
        name: "chain".to_owned(),
        storages,
        usual,
        soon: None,
        lend: Vec::new(),
        backward: None,
        multi_tensor: false,
        move_states: true,
        smallest: 1,
        piece: PieceSize { bytes: 64 * MIB, parameters: 64 },
    }
}

/// The chain with a second backward through its graph in place of the updates. Layer i's is
/// operator 3n − 1 − i.
fn twice(layers: &[Layer]) -> Problem {
    let mut problem = chain(layers);
    let n = layers.len();
    let outputs: Vec<u64> = problem.storages[..n].iter().map(Storage::blocks).collect();
    let always: u64 = problem.storages[n..].iter().map(Storage::blocks).sum();
    for place in n..3 * n {
        let alive = 0..(3 * n - place).min(n);
        let operators = &mut problem.usual.operators;
        let like = operators[n + place % n].clone();
        operators[place] = Operator {
            name: format!("op{place}"),
            standing: always + outputs[alive].iter().sum::<u64>(),
            ..like
        };
    }
    for (i, pack) in problem.usual.packs.iter_mut().enumerate() {
        let first = pack.asked[0];
        let order = first.order + u32::try_from(n).unwrap();
        pack.asked.push(Asked { place: 3 * n - 1 - i, order });
        problem.usual.lives[i].end = 3 * n - i;
    }
    problem
}

fn device() -> Profile {
    builtin::find("a6000").unwrap()
}

fn ask(budget: u64) -> Ask {
    Ask {
        budget,
        less: (0, 0),
        expandable: true,
        unpredicted: 0,
        banned: (Vec::new(), Vec::new()),
        effort: Some(0),
    }
}

fn unplanned(problem: &Problem) -> u64 {
    problem.usual.operators.iter().map(|operator| operator.standing).max().unwrap()
}

/// The most bytes of outputs that are on the device, from the actions alone: an output is there
/// from its layer to its drop, from its coming back to its backward, and while its layer has run
/// again. States count as here.
fn counted(problem: &Problem, answer: &Answer) -> u64 {
    let n = problem.usual.packs.len();
    let runs = problem.usual.packs[0].asked.len();
    let again: BTreeSet<usize> =
        answer.ranges.iter().map(|&range| problem.usual.ranges[range].brings[0]).collect();
    // By output: the operators before which it goes, and those before which it is back.
    let mut away = vec![(Vec::new(), Vec::new()); n];
    for &(kind, number, ref things) in &answer.actions.actions {
        // What is done as a tensor is saved happens before the operator after its layer; as one is
        // asked for, before its backward.
        let before =
            if kind == "pack" { number + 1 } else { (2 + number / n) * n - 1 - number % n };
        for &(what, one) in things {
            let (goes, backs) = &mut away[answer.actions.moved[one]];
            match what {
                "drop" => goes.push(before),
                "in" => backs.push(before),
                _ => assert_eq!(what, "out"),
            }
        }
    }
    for (goes, backs) in &mut away {
        goes.sort_unstable();
        backs.sort_unstable();
    }
    let always: u64 = problem.storages[n..].iter().map(|storage| storage.blocks()).sum();
    let here = |i: usize, place: usize| {
        let backward = (1 + runs) * n - 1 - i;
        let kept_for_next = again.contains(&(i + 1)) && place <= backward;
        let there = place >= i && place <= backward;
        let dropped = again.contains(&i) && place > i + 1 && place < backward;
        let mut absences = away[i].0.iter().zip(&away[i].1);
        let moved = absences.any(|(&go, &back)| place >= go && place < back);
        there && (!dropped || (kept_for_next && place == backward - 1)) && !moved
    };
    let standing =
        |place| (0..n).filter(|&i| here(i, place)).map(|i| problem.storages[i].blocks()).sum();
    always + (0..(1 + runs) * n).map(standing).max().unwrap_or(0u64)
}

#[test]
fn a_chain_is_held_to_half_of_its_outputs() {
    let layer = Layer { output: 32 * MIB, parameter: 512, ns: 4_000_000, again: false };
    let problem = chain(&[layer; 12]);
    let budget = unplanned(&problem) / 2;
    let answer = plan(&problem, &device(), &ask(budget)).unwrap();
    assert!(answer.met && answer.actions.moved.len() >= 6, "{answer:?}");
    assert!(answer.actions.peak_bytes <= budget, "{answer:?}");
    assert!(counted(&problem, &answer) <= budget, "{answer:?}");
    let unplanned: u64 = problem.usual.operators.iter().map(|operator| operator.ns).sum();
    assert!(answer.iteration_ns <= unplanned + unplanned / 20, "{answer:?}");
}

/// The highest value of a curve, and where it ends.
fn peak_and_end(points: &[(u64, u64)]) -> (u64, u64) {
    (points.iter().map(|point| point.1).max().unwrap(), points.last().unwrap().0)
}

#[test]
fn the_course_has_the_plans_peaks_and_times() {
    let layer = Layer { output: 32 * MIB, parameter: MIB, ns: 4_000_000, again: true };
    let problem = chain(&[layer; 12]);
    let (peak, ns) = (unplanned(&problem), 36 * layer.ns);
    let answer = plan(&problem, &device(), &ask(peak / 2)).unwrap();
    let course = Course::read(&answer.course).unwrap();
    assert_eq!(peak_and_end(&course.unplanned.points().unwrap()), (peak, ns));
    let planned = peak_and_end(&course.planned.points().unwrap());
    assert_eq!(planned, (answer.actions.peak_bytes, answer.iteration_ns));
    let of = |kind: Kind| course.things.iter().filter(move |thing| thing.kind == kind);
    assert_eq!(of(Kind::Again).count(), answer.ranges.len());
    assert!(of(Kind::Activation).count() >= answer.actions.moved.len());
    assert_eq!(course.count, course.things.len());
    for thing in &course.things {
        assert!(!thing.spans.is_empty() && thing.away_ns <= answer.iteration_ns, "{thing:?}");
        // It is no more than all that stands without a plan, with what runs again for it.
        assert!(thing.else_bytes <= peak + thing.bytes, "{thing:?}");
        if thing.kind == Kind::Activation {
            assert_eq!(thing.module, thing.name.replace("out", "layer"));
        }
    }
    // Without all its absences the peak would be the unplanned one: some alone are over the budget.
    assert!(course.things.iter().any(|thing| thing.else_bytes > peak / 2), "{course:?}");
}

#[test]
fn the_course_without_a_plan_has_the_temporaries_of_the_whole_step() {
    let layer = Layer { output: 32 * MIB, parameter: MIB, ns: 4_000_000, again: false };
    let mut several = chain(&[layer; 12]);
    several.multi_tensor = true;
    for operator in several.usual.operators.iter_mut().filter(|operator| operator.update) {
        operator.workspace = 40 * MIB;
        operator.standing += 40 * MIB;
    }
    let all = several.usual.operators[24].standing + 11 * 40 * MIB;
    let answer = plan(&several, &device(), &ask(2 * all)).unwrap();
    let course = Course::read(&answer.course).unwrap();
    assert_eq!(peak_and_end(&course.unplanned.points().unwrap()), (all, 36 * layer.ns));
    assert!(course.things.is_empty() && answer.actions.peak_bytes == all, "{course:?}");
}

#[test]
fn what_is_held_until_later_tensors_are_saved_leaves_after_these() {
    let layer = Layer { output: 32 * MIB, parameter: 512, ns: 4_000_000, again: false };
    let mut problem = chain(&[layer; 12]);
    for life in &mut problem.usual.lives {
        life.let_go_pack = (life.storage + 2).min(12);
    }
    let answer = plan(&problem, &device(), &ask(unplanned(&problem) / 2)).unwrap();
    assert!(answer.met && answer.actions.moved.len() >= 6, "{answer:?}");
    for (kind, number, things) in &answer.actions.actions {
        for (what, one) in things.iter().filter(|_| *kind == "pack") {
            assert!(*number >= answer.actions.moved[*one] + 2, "{what} {one} at {number}");
        }
    }
}

#[test]
fn what_backward_asks_for_again_leaves_in_between() {
    let layer = Layer { output: 32 * MIB, parameter: 512, ns: 4_000_000, again: false };
    let problem = twice(&[layer; 12]);
    assert!(problem.validate().is_ok());
    let budget = unplanned(&problem) / 2;
    let answer = plan(&problem, &device(), &ask(budget)).unwrap();
    assert!(answer.met && answer.actions.peak_bytes <= budget, "{answer:?}");
    assert!(counted(&problem, &answer) <= budget, "{answer:?}");
    // All are there when the first backward has ended, unless some leave again.
    let again = answer.actions.actions.iter().filter(|(_, number, _)| *number >= 12);
    assert!(again.flat_map(|(_, _, things)| things).any(|&(what, _)| what == "in"), "{answer:?}");
}

#[test]
fn what_is_quicker_to_run_again_is_not_moved() {
    let layer = Layer { output: 64 * MIB, parameter: 512, ns: 20_000, again: false };
    let mut layers = [layer; 12];
    (1..12).step_by(2).for_each(|i| layers[i].again = true);
    let problem = chain(&layers);
    let budget = unplanned(&problem) * 7 / 10;
    let answer = plan(&problem, &device(), &ask(budget)).unwrap();
    assert!(answer.met && !answer.ranges.is_empty(), "{answer:?}");
    let mut alone = problem.clone();
    alone.usual.ranges.clear();
    let swapped = plan(&alone, &device(), &ask(budget)).unwrap();
    assert!(answer.iteration_ns < swapped.iteration_ns, "{answer:?} {swapped:?}");
    let all = (0..problem.usual.ranges.len()).collect();
    let banned = Ask { banned: (all, Vec::new()), ..ask(budget) };
    assert!(plan(&problem, &device(), &banned).unwrap().ranges.is_empty());
}

#[test]
fn states_leave_together_where_outputs_are_not_enough() {
    let layer = Layer { output: MIB, parameter: 32 * MIB, ns: 4_000_000, again: false };
    let problem = chain(&[layer; 6]);
    let budget = unplanned(&problem) * 7 / 10;
    let answer = plan(&problem, &device(), &ask(budget)).unwrap();
    assert!(answer.met, "{answer:?}");
    for parameter in 0..6 {
        let names = ["exp_avg", "exp_avg_sq"].map(|kind| format!("{kind}:p{parameter}"));
        let away = names.map(|name| answer.actions.away.contains(&name));
        assert_eq!(away[0], away[1], "{answer:?}");
    }
    let stays = Problem { move_states: false, ..problem };
    assert!(!plan(&stays, &device(), &ask(budget)).unwrap().met);
}

#[test]
fn a_budget_below_all_is_refused_with_the_lowest_plan() {
    let layer = Layer { output: 32 * MIB, parameter: 512, ns: 4_000_000, again: false };
    let problem = chain(&[layer; 6]);
    let answer = plan(&problem, &device(), &ask(MIB)).unwrap();
    assert!(!answer.met && answer.actions.peak_bytes < unplanned(&problem), "{answer:?}");
}

#[test]
fn what_refers_to_nothing_is_refused() {
    let layer = Layer { output: MIB, parameter: 512, ns: 1000, again: true };
    let good = chain(&[layer; 4]);
    assert!(good.validate().is_ok());
    let damages: [fn(&mut Problem); 10] = [
        |p| p.usual.operators.clear(),
        |p| p.storages[0].bytes = u64::MAX,
        |p| p.lend.push(99),
        |p| p.usual.operators[0].reads.push(99),
        |p| p.usual.lives[0].let_go = 99,
        |p| p.usual.lives[0].let_go_pack = 99,
        |p| p.usual.packs[0].asked[0].place = 99,
        |p| p.usual.packs[0].asked.insert(0, Asked { place: 12, order: 0 }),
        |p| p.usual.ranges[1].inside = Some(1),
        |p| p.usual.ranges[0].brings.clear(),
    ];
    for damage in damages {
        let mut bad = good.clone();
        damage(&mut bad);
        assert!(bad.validate().is_err());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn actions_stand_for_no_more_than_they_say(
        sizes in prop::collection::vec((1u64..64, 1u64..8, 1u64..6000, any::<bool>()), 3..14),
        share in 40u64..100,
    ) {
        let layer = |&(output, parameter, us, again): &(u64, u64, u64, bool)| Layer {
            output: output * MIB,
            parameter: parameter * MIB,
            ns: us * 1000,
            again,
        };
        let problem = chain(&sizes.iter().map(layer).collect::<Vec<_>>());
        prop_assert!(problem.validate().is_ok());
        let budget = unplanned(&problem) * share / 100;
        let answer = plan(&problem, &device(), &ask(budget)).unwrap();
        if answer.actions.away.is_empty() && answer.ranges.is_empty() {
            let counted = counted(&problem, &answer);
            prop_assert!(counted <= answer.actions.peak_bytes, "{} {:?}", counted, answer);
            prop_assert!(counted <= answer.actions.reserved_bytes, "{} {:?}", counted, answer);
        }
        let again = plan(&problem, &device(), &ask(budget)).unwrap();
        prop_assert_eq!(format!("{answer:?}"), format!("{again:?}"));
        let mut at: Vec<Vec<&str>> = vec![Vec::new(); answer.actions.moved.len()];
        for (_, _, things) in &answer.actions.actions {
            things.iter().for_each(|&(what, one)| at[one].push(what));
        }
        for mut whats in at {
            whats.sort_unstable();
            prop_assert!(whats.is_empty() || whats == ["drop", "in", "out"]);
        }
    }
}
