//! Figures computed by hand: five operators of 1,000 ns, tensors of 1,024 bytes, a link of one byte
//! per nanosecond.

use super::*;
use crate::contract::check::{check, check_safety};
use crate::contract::{Event, Latency, Source, Trigger};
use crate::device::{Link, builtin};
use crate::emit::Emitted;
use crate::job::{Arg, Dtype, Operand, Operator, Phase, Replay, Role, Tensor};
use crate::{Request, place};

const LINK: Link = Link {
    h2d: 1_000_000_000,
    d2h: 1_000_000_000,
    h2d_contended: 1_000_000_000,
    d2h_contended: 1_000_000_000,
    overhead_ns: 0,
};

fn see(tensor: u32, version: u32) -> Operand {
    Operand {
        tensor: TensorId(tensor),
        version,
        dtype: Dtype::U8,
        offset: 0,
        shape: vec![1024],
        stride: vec![1],
    }
}

fn operator(index: usize, reads: &[u32], writes: &[(u32, u32)]) -> Operator {
    Operator {
        name: format!("op{index}"),
        kind: "test".to_owned(),
        phase: Phase::Forward,
        args: reads.iter().map(|&t| Arg::Tensor(see(t, 0))).collect(),
        outputs: writes.iter().map(|&(t, v)| Some(see(t, v))).collect(),
        hidden: Vec::new(),
        workspace: Bytes::ZERO,
        replay: Replay::Pure,
        random: false,
        ..Operator::default()
    }
}

/// op0 makes a, op1 makes b, op2 makes c from b, op3 reads a, op4 reads b and c, changing b; p is
/// read by op0 and op4.
fn graph() -> Graph {
    let tensor = |name: &str, role| Tensor {
        name: name.to_owned(),
        bytes: Bytes(1024),
        role,
        dtype: Dtype::U8,
        shape: vec![1024],
        kept_until: None,
    };
    let tensors = [
        ("a", Role::Activation),
        ("b", Role::Activation),
        ("c", Role::Activation),
        ("p", Role::Parameter),
    ];
    let tensors = tensors.iter().map(|&(n, r)| tensor(n, r)).collect();
    let operators = vec![
        operator(0, &[3], &[(0, 0)]),
        operator(1, &[], &[(1, 0)]),
        operator(2, &[1], &[(2, 0)]),
        operator(3, &[0], &[]),
        operator(4, &[1, 2, 3], &[(1, 1)]),
    ];
    Graph::new("five".to_owned(), tensors, operators, None, None, None).unwrap()
}

fn after(op: u32) -> Trigger {
    Trigger { after: Some(OpId(op)) }
}

fn plan(graph: &Graph, events: Vec<Event>, budget: u64) -> Plan {
    let device = crate::device::Profile {
        link: LINK,
        pinned_bytes: Bytes(1024),
        ..builtin::find("host").unwrap()
    };
    let latencies =
        vec![Latency { time: Nanos(1000), source: Source::Graph }; graph.operators.len()];
    let request = Request::new(graph, &device, &latencies, Bytes(budget));
    let mut plan = crate::unplanned(&request).unwrap().plan;
    let program = Program::new(graph, &latencies, &events).unwrap();
    let items = place::items(&program, &Emitted::default());
    let layout = place::place(&items.iter().map(|(item, _)| item.clone()).collect::<Vec<_>>(), 0);
    plan.jobs[0].placements = place::placements(&program, &items, &layout.offsets);
    for event in &events {
        if let Event::SwapOut { tensor, .. } = event {
            plan.jobs[0].host_slots.insert(*tensor, Bytes::ZERO);
        }
    }
    plan.jobs[0].events = events;
    plan.budget = Bytes(budget);
    plan.figures = check_safety(&plan, std::slice::from_ref(graph)).unwrap().figures;
    check(&plan, std::slice::from_ref(graph)).unwrap();
    plan
}

/// a leaves after op0 and comes back after op1.
fn swapped() -> Vec<Event> {
    vec![
        Event::SwapOut { tensor: TensorId(0), trigger: after(0) },
        Event::SwapIn { tensor: TensorId(0), trigger: after(1) },
    ]
}

#[test]
fn what_is_swapped_and_what_is_not() {
    let graph = graph();
    let plan = plan(&graph, swapped(), 4096);
    let explained = Explained::new(&plan, &graph).unwrap();
    // a leaves from 1,000 to 2,024. b's op1 waits for it, because they share bytes. a comes back
    // from 3,024 to 4,048, that is, 24 after op2 has ended.
    let a = explained.story(TensorId(0));
    assert_eq!(a.residencies, [(Nanos(0), Nanos(2024)), (Nanos(3024), Nanos(5048))]);
    assert_eq!(a.gaps.len(), 1);
    let copied = |exposed| Copied { time: Nanos(1024), exposed: Nanos(exposed) };
    assert_eq!(a.gaps[0].choice, Choice::Swap { out: Some(copied(1024)), back: copied(24) });
    assert_eq!((a.gaps[0].length, a.gaps[0].round), (Nanos(3048), false));
    assert_eq!(a.gaps[0].keep, Verdict::Possible(Nanos::ZERO));
    assert_eq!(a.gaps[0].recompute, Verdict::Possible(Nanos(1000)));
    // All four are resident from when c begins and a's copy starts.
    assert_eq!(
        (explained.peak, explained.peak_bytes, explained.peak_step),
        ((Nanos(3024), Nanos(5048)), Bytes(4096), 2)
    );
    let presence = |t| explained.story(TensorId(t)).presence;
    assert_eq!(
        [0, 1, 2, 3].map(presence),
        [Presence::Arriving, Presence::InUse, Presence::InUse, Presence::Kept]
    );
    // The pinned pool is full with a's copy.
    let b = explained.story(TensorId(1));
    assert!(b.gaps.iter().all(|g| g.choice == Choice::Keep));
    assert_eq!(
        b.gaps[1].swap,
        Verdict::Against(Reason::Pinned { wanted: Bytes(1024), left: Bytes::ZERO })
    );
    assert_eq!(b.gaps[1].recompute, Verdict::Possible(Nanos(1000)));
}

#[test]
fn what_links_and_switches_forbid() {
    let graph = graph();
    let mut plan = plan(&graph, swapped(), 4096);
    plan.device.pinned_bytes = Bytes(1 << 20);
    let story = |plan: &Plan, t| Explained::new(plan, &graph).unwrap().story(TensorId(t));
    let b = story(&plan, 1);
    let short = |available| Reason::Short {
        way: "out and back",
        needed: Nanos(2048),
        available: Nanos(available),
    };
    assert_eq!(b.gaps[0].swap, Verdict::Against(short(0)));
    assert_eq!(b.gaps[1].swap, Verdict::Against(short(1024)));
    // p has 4,048 in all, but must be gone by 3,024, and a's copy takes 1,024 of that.
    let p = story(&plan, 3);
    assert_eq!(
        p.gaps.iter().map(|g| (g.length, g.round)).collect::<Vec<_>>(),
        [(Nanos(4048), false), (Nanos(0), true)]
    );
    assert_eq!(
        p.gaps[0].swap,
        Verdict::Against(Reason::Busy { way: "out", needed: Nanos(1024), free: Nanos(1000) })
    );
    assert_eq!(p.gaps[0].recompute, Verdict::Against(Reason::NoProducer));
    plan.planner = "neap".to_owned();
    assert_eq!(
        story(&plan, 1).gaps[1].swap,
        Verdict::Against(Reason::Small { least: Bytes(64 << 10) })
    );
    plan.options.insert("swap".to_owned(), "false".to_owned());
    plan.options.insert("recompute".to_owned(), "false".to_owned());
    let b = story(&plan, 1);
    assert_eq!(b.gaps[1].swap, Verdict::Against(Reason::Switch("swap".to_owned())));
    assert_eq!(b.gaps[1].recompute, Verdict::Against(Reason::Switch("recompute".to_owned())));
}

#[test]
fn what_is_made_again_and_what_cannot_be() {
    // b is dropped after op2, made again for op4.
    let events = vec![
        Event::Release { tensor: TensorId(1), trigger: after(2) },
        Event::Recompute { operator: OpId(1), trigger: after(3), keep: vec![TensorId(1)] },
    ];
    let mut graph = graph();
    let made = plan(&graph, events, 4096);
    let b = Explained::new(&made, &graph).unwrap().story(TensorId(1));
    let choices: Vec<&str> = b.gaps.iter().map(|g| g.choice.word()).collect();
    assert_eq!(choices, ["keep", "recompute", "keep"]);
    assert_eq!(b.gaps[1].choice, Choice::Recompute { operators: vec![OpId(1)], time: Nanos(1000) });
    // Without b, c can't be made again.
    let c = Explained::new(&made, &graph).unwrap().story(TensorId(2));
    assert_eq!(c.gaps[0].recompute, Verdict::Possible(Nanos(1000)), "b is recomputed by then");
    graph.operators[3].args.clear();
    graph.operators[3].args.push(Arg::Tensor(see(2, 0)));
    graph.operators[1].replay = Replay::Never;
    graph.operators[4].args.truncate(1);
    let unplanned = plan(&graph, Vec::new(), 4096);
    let explained = Explained::new(&unplanned, &graph).unwrap();
    assert_eq!(
        explained.story(TensorId(1)).gaps[1].recompute,
        Verdict::Against(Reason::Never("op1".to_owned()))
    );
    // a has no further use: there is nothing to decide.
    assert!(explained.story(TensorId(0)).gaps.is_empty());
}

#[test]
fn inputs_that_are_gone_or_overwritten() {
    let mut graph = graph();
    // op3 reads c, op4 only changes b; c is used again at a sixth.
    graph.operators[3] = operator(3, &[0], &[]);
    graph.operators[4] = operator(4, &[1], &[(1, 1)]);
    graph.operators.push(operator(5, &[2], &[]));
    let graph =
        Graph::new("six".to_owned(), graph.tensors, graph.operators, None, None, None).unwrap();
    let c = |graph: &Graph| {
        let plan = plan(graph, Vec::new(), 8192);
        Explained::new(&plan, graph).unwrap().story(TensorId(2)).gaps[0].recompute.clone()
    };
    assert_eq!(
        c(&graph),
        Verdict::Against(Reason::Overwritten { input: "b".to_owned(), by: "op4".to_owned() })
    );
    let mut pure = graph.clone();
    pure.operators[4] = operator(4, &[1], &[]);
    assert_eq!(c(&pure), Verdict::Against(Reason::InputsGone(vec!["b".to_owned()])));
}
