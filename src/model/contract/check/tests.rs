//! The smallest plan for each reason to refuse one.

use std::collections::BTreeMap;

use super::{Refusal, Refusals, check, check_safety, memory, program::Program};
use crate::contract::plan::{
    Event, Figures, JobPlan, Latency, Place, Placement, Plan, Source, Trigger, Window,
};
use crate::device::{Link, Profile, Rates};
use crate::job::{Arg, Dtype, Graph, Operand, Operator, Phase, Replay, Role, Tensor};
use crate::units::{Bytes, Nanos, OpId, TensorId};

const W: TensorId = TensorId(0);
const S: TensorId = TensorId(1);
const X: TensorId = TensorId(2);
const Y: TensorId = TensorId(3);
const G: TensorId = TensorId(4);

fn operand(tensor: TensorId, version: u32) -> Operand {
    Operand { tensor, version, dtype: Dtype::U8, offset: 0, shape: vec![1000], stride: vec![1] }
}

fn operator(
    name: &str,
    reads: &[(TensorId, u32)],
    writes: &[(TensorId, u32)],
    replay: Replay,
) -> Operator {
    Operator {
        name: name.to_owned(),
        kind: "test".to_owned(),
        phase: Phase::Forward,
        args: reads.iter().map(|(t, v)| Arg::Tensor(operand(*t, *v))).collect(),
        outputs: writes.iter().map(|(t, v)| Some(operand(*t, *v))).collect(),
        hidden: Vec::new(),
        workspace: Bytes::ZERO,
        replay,
        random: false,
        ..Operator::default()
    }
}

/// w, s long-lived; make: w -> x; relu: x in place; norm: x, s -> y, s updated; use: x, y -> g
/// (kept); update: g -> w.
fn graph() -> Graph {
    let tensor = |name: &str, role, kept_until| Tensor {
        name: name.to_owned(),
        bytes: Bytes(1000),
        role,
        dtype: Dtype::U8,
        shape: vec![1000],
        kept_until,
    };
    Graph {
        name: "small".to_owned(),
        tensors: vec![
            tensor("w", Role::Parameter, None),
            tensor("s", Role::Buffer, None),
            tensor("x", Role::Activation, None),
            tensor("y", Role::Activation, None),
            tensor("g", Role::Gradient, Some(OpId(1))),
        ],
        operators: vec![
            operator("make", &[(W, 0)], &[(X, 0)], Replay::Pure),
            operator("relu", &[(X, 0)], &[(X, 1)], Replay::Pure),
            operator("norm", &[(X, 1), (S, 0)], &[(Y, 0), (S, 1)], Replay::SkipUpdates),
            operator("use", &[(X, 1), (Y, 0)], &[(G, 0)], Replay::Never),
            operator("update", &[(G, 0), (W, 0)], &[(W, 1)], Replay::Pure),
        ],
        optimizer: None,
        loss: None,
        recorded_peak: None,
        origin: None,
    }
}

fn device() -> Profile {
    Profile {
        name: "test".to_owned(),
        source: "none".to_owned(),
        memory_bytes: Bytes(1 << 20),
        reserve_bytes: Bytes(0),
        flops: Rates { f32: 1, f16: 1, f64: 1 },
        memory_bandwidth: 1,
        efficiency_percent: 100,
        // A copy of 1,000 bytes: 10 ns and 100 ns, 200 ns contended.
        link: Link {
            h2d: 10_000_000_000,
            d2h: 10_000_000_000,
            h2d_contended: 5_000_000_000,
            d2h_contended: 5_000_000_000,
            overhead_ns: 10,
        },
        launch_overhead_ns: 0,
        pinned_bytes: Bytes(1 << 16),
        multiprocessors: None,
    }
}

fn out(tensor: TensorId, after: u32) -> Event {
    Event::SwapOut { tensor, trigger: at(after) }
}

fn inward(tensor: TensorId, after: u32) -> Event {
    Event::SwapIn { tensor, trigger: at(after) }
}

fn release(tensor: TensorId, after: u32) -> Event {
    Event::Release { tensor, trigger: at(after) }
}

fn again(operator: u32, after: u32, keep: &[TensorId]) -> Event {
    Event::Recompute { operator: OpId(operator), trigger: at(after), keep: keep.to_vec() }
}

fn at(after: u32) -> Trigger {
    Trigger { after: Some(OpId(after)) }
}

/// A plan with these events, with an address and a slot of its own for each tensor.
fn plan(events: &[Event]) -> Plan {
    let graph = graph();
    let latencies =
        vec![Latency { time: Nanos(1000), source: Source::Graph }; graph.operators.len()];
    let job = JobPlan {
        graph: String::new(),
        graph_sha256: String::new(),
        arrangement: Default::default(),
        whole: Default::default(),
        latencies,
        libraries: BTreeMap::new(),
        events: events.to_vec(),
        placements: Vec::new(),
        host_slots: BTreeMap::new(),
        window: None,
    };
    let mut plan = Plan {
        planner: String::new(),
        options: BTreeMap::new(),
        device: device(),
        budget: Bytes(1 << 16),
        jobs: vec![job],
        figures: Figures::default(),
    };
    place(&mut plan);
    plan
}

fn place(plan: &mut Plan) {
    let graph = graph();
    let job = &mut plan.jobs[0];
    let program = Program::read(job, &graph, &mut Refusals::default());
    job.host_slots = (0..5)
        .filter(|t| program.copied[*t])
        .map(|t| (TensorId::from_index(t), Bytes(1024 * t as u64)))
        .collect();
    let places = (0..program.residencies.len())
        .map(|r| (program.residencies[r].tensor, program.residencies[r].number));
    let mut places: Vec<Place> = places
        .map(|(t, residency)| Place::Tensor { tensor: TensorId::from_index(t), residency })
        .collect();
    places.extend(
        (0u32..)
            .zip(&program.steps)
            .filter(|(_, t)| program.tasks[**t].workspace > 0)
            .map(|(step, _)| Place::Workspace { step }),
    );
    places.sort_unstable();
    places.dedup();
    job.placements =
        (0..).zip(places).map(|(i, place)| Placement { place, offset: Bytes(i * 2048) }).collect();
}

fn refusals(plan: &Plan) -> Vec<Refusal> {
    check_safety(plan, &[graph()]).expect_err("a plan to refuse")
}

/// Asserts that the plan is refused for one reason, of this kind.
macro_rules! refused {
    ($plan:expr, $pattern:pat) => {{
        let refusals = refusals(&$plan);
        assert!(refusals.iter().any(|r| matches!(r, $pattern)), "{refusals:?}");
        refused(&refusals)
    }};
}

fn refused(refusals: &[Refusal]) -> Vec<String> {
    refusals.iter().map(ToString::to_string).collect()
}

/// A plan with no events, changed.
fn changed(change: impl FnOnce(&mut Plan)) -> Plan {
    let mut plan = plan(&[]);
    change(&mut plan);
    plan
}

fn offset(plan: &mut Plan, tensor: TensorId, residency: u32) -> &mut Bytes {
    let place = Place::Tensor { tensor, residency };
    let found = plan.jobs[0].placements.iter_mut().find(|p| p.place == place);
    &mut found.expect("a placement").offset
}

#[test]
fn figures_are_recomputed_and_compared() {
    let plan = plan(&[]);
    let figures = check_safety(&plan, &[graph()]).unwrap().figures;
    // w, s, x, y, g at `use`; g waits round the end for relu.
    assert_eq!(
        (figures.peak_bytes, figures.unplanned_peak_bytes),
        (Bytes(5 * 1024), Bytes(5 * 1024))
    );
    assert_eq!((figures.iteration_ns, figures.unplanned_iteration_ns), (Nanos(5000), Nanos(5000)));
    // w and s are loaded; g is not read before it is made.
    assert_eq!(figures.first_iteration_ns, Nanos(5000 + 2 * 110));
    assert_eq!((figures.arena_bytes, figures.pinned_bytes), (Bytes(4 * 2048 + 1024), Bytes::ZERO));
    assert!(check(&Plan { figures, ..plan.clone() }, &[graph()]).is_ok());
    let wrong = check(&plan, &[graph()]).unwrap_err();
    assert_eq!(wrong.len(), 6);
    assert_eq!(wrong[0].to_string(), "the plan says that `peak_bytes` is 0, but it is 5120");
}

#[test]
fn swaps_recomputes_and_parameters_on_the_host_pass() {
    let none = Trigger { after: None };
    for events in [
        vec![out(X, 1), inward(X, 2)],
        vec![release(X, 2), again(0, 2, &[X]), again(1, 2, &[])],
        vec![again(2, 2, &[])],
        vec![Event::SwapIn { tensor: W, trigger: none }, release(W, 0), inward(W, 3), out(W, 4)],
        vec![out(W, 0), inward(W, 1)],
        vec![release(G, 4)],
        vec![out(G, 3), inward(G, 3)],
        // Read once more while it is being copied.
        vec![out(Y, 2)],
    ] {
        let plan = plan(&events);
        assert!(check_safety(&plan, &[graph()]).is_ok(), "{events:?}: {:?}", refusals(&plan));
    }
    // The first operator waits for the swap-in.
    let early = plan(&[Event::SwapIn { tensor: W, trigger: none }, out(W, 4)]);
    let figures = check_safety(&early, &[graph()]).unwrap().figures;
    assert_eq!(
        (figures.iteration_ns, figures.first_iteration_ns),
        (Nanos(110 + 5000 + 110), Nanos(110 + 5000 + 110 + 110))
    );
    // Both directions at once, each at half its rate.
    let both = plan(&[out(S, 2), inward(S, 4), out(G, 4)]);
    assert_eq!(check_safety(&both, &[graph()]).unwrap().figures.iteration_ns, Nanos(5000 + 220));
}

/// Two copies of the small job, the second behind the first in both memories.
fn two(change: impl FnOnce(&mut Plan)) -> Plan {
    let mut plan = plan(&[out(X, 1), inward(X, 2)]);
    let mut second = plan.jobs[0].clone();
    second.placements.iter_mut().for_each(|p| p.offset += Bytes(1 << 15));
    second.host_slots.values_mut().for_each(|slot| *slot += Bytes(1 << 14));
    plan.jobs.push(second);
    change(&mut plan);
    plan
}

#[test]
fn several_jobs_have_bytes_of_their_own() {
    let one = check_safety(&plan(&[out(X, 1), inward(X, 2)]), &[graph()]).unwrap();
    let both = check_safety(&two(|_| ()), &[graph(), graph()]).unwrap();
    let figures = one.figures;
    assert_eq!(both.figures.peak_bytes, figures.peak_bytes + figures.peak_bytes);
    assert_eq!(both.figures.iteration_ns, figures.iteration_ns + figures.iteration_ns);
    assert_eq!(both.figures.arena_bytes, figures.arena_bytes + Bytes(1 << 15));
    assert_eq!(both.figures.pinned_bytes, figures.pinned_bytes + Bytes(1 << 14));
    assert_eq!(both.jobs[0], figures);

    let refused = |change: fn(&mut Plan)| {
        refused(&check_safety(&two(change), &[graph(), graph()]).unwrap_err())
    };
    let same = refused(|p| p.jobs[1].placements = p.jobs[0].placements.clone());
    assert_eq!(
        same[0],
        "job 0 (`small`) and job 1 (`small`) both use byte 0 of the arena; every job has bytes of its own"
    );
    let pool = refused(|p| p.jobs[1].host_slots = p.jobs[0].host_slots.clone());
    assert!(pool[0].ends_with("of the pinned pool; every job has bytes of its own"), "{pool:?}");
    let inside = refused(|p| p.jobs[1].latencies[0].time = Nanos::ZERO);
    assert_eq!(
        inside,
        ["job 1 (`small`): the latency of operator `make` is zero; it must be at least 1 ns"]
    );
    assert!(matches!(
        check_safety(&two(|_| ()), &[graph()]).unwrap_err()[..],
        [Refusal::Jobs { jobs: 2, graphs: 1 }]
    ));
}

/// Both jobs have X in a window above all other bytes.
fn window(change: impl FnOnce(&mut Plan)) -> Plan {
    two(|plan| {
        let (low, bytes) = (Bytes(1 << 15) + Bytes(1 << 14), Bytes(4096));
        for job in &mut plan.jobs {
            let mut offset = low;
            for placement in &mut job.placements {
                if matches!(placement.place, Place::Tensor { tensor: X, .. }) {
                    placement.offset = offset;
                    offset += Bytes(2048);
                }
            }
            job.window = Some(Window { offset: low, bytes, hands_over_after: Vec::new() });
        }
        change(plan);
    })
}

#[test]
fn a_window_is_shared_and_nothing_else() {
    let check = |change: fn(&mut Plan)| check_safety(&window(change), &[graph(), graph()]);
    let (shared, apart) =
        (check(|_| ()).unwrap(), check_safety(&two(|_| ()), &[graph(), graph()]).unwrap());
    assert_eq!(
        shared.figures.iteration_ns, apart.figures.iteration_ns,
        "one stretch waits for nothing"
    );
    assert!(
        shared.figures.peak_bytes < apart.figures.peak_bytes,
        "the window counts once: {}",
        shared.figures.peak_bytes
    );
    // X leaves after operator 1 and comes back after operator 2. If the window is handed over in
    // between, the copy back waits for the copy out.
    assert!(check(|p| p.jobs[0].window.as_mut().unwrap().hands_over_after = vec![OpId(1)]).is_ok());

    let refused = |change: fn(&mut Plan)| refused(&check(change).unwrap_err());
    let differ = refused(|p| p.jobs[1].window.as_mut().unwrap().bytes += Bytes(512));
    assert_eq!(
        differ[0],
        "the windows of job 0 (`small`) and job 1 (`small`) differ; all jobs of a plan that have one have the same"
    );
    let alone = refused(|p| p.jobs[1].window = None);
    assert!(alone[0].contains("both use byte 49152 of the arena"), "{alone:?}");
    let border = refused(|p| {
        p.jobs.iter_mut().for_each(|job| job.window.as_mut().unwrap().offset += Bytes(512))
    });
    assert!(border[0].contains("lies across the border of the window"), "{border:?}");
    let beyond = refused(|p| p.jobs[0].window.as_mut().unwrap().bytes = Bytes(1 << 20));
    assert!(beyond[0].contains("the window ends at"), "{beyond:?}");
    let order =
        refused(|p| p.jobs[0].window.as_mut().unwrap().hands_over_after = vec![OpId(1), OpId(1)]);
    assert!(order[0].ends_with("do not stand in ascending order"), "{order:?}");
    let operator =
        refused(|p| p.jobs[0].window.as_mut().unwrap().hands_over_after = vec![OpId(99)]);
    assert!(operator[0].contains("handed over after operator 99"), "{operator:?}");
    let boundary = refused(|p| {
        let low = p.jobs[0].window.as_ref().unwrap().offset;
        *offset(p, S, 0) = low + Bytes(1024);
    });
    assert!(
        boundary.iter().any(|b| b.contains("is there at the iteration's boundary")),
        "{boundary:?}"
    );
    // Operator 2 reads X, so it can't wait for X to leave before it makes Y.
    let circle = refused(|p| {
        let low = p.jobs[0].window.as_ref().unwrap().offset;
        p.jobs.iter_mut().for_each(|job| job.window.as_mut().unwrap().bytes = Bytes(8192));
        *offset(p, Y, 0) = low + Bytes(4096);
        p.jobs[0].window.as_mut().unwrap().hands_over_after = vec![OpId(1)];
    });
    assert!(
        circle[0]
            .contains("operator `norm` waits for the window, held to the end of operator `norm`"),
        "{circle:?}"
    );
}

#[test]
fn what_is_given_must_fit_together() {
    assert!(matches!(
        check(&plan(&[]), &[]).unwrap_err()[..],
        [Refusal::Jobs { jobs: 1, graphs: 0 }]
    ));
    refused!(changed(|p| p.device.link.h2d = 0), Refusal::Device(_));
    refused!(changed(|p| p.budget = Bytes(1 << 21)), Refusal::BudgetBeyondDevice { .. });
    refused!(
        changed(|p| _ = p.jobs[0].latencies.pop()),
        Refusal::Latencies { latencies: 4, operators: 5 }
    );
    refused!(changed(|p| p.jobs[0].latencies[2].time = Nanos(0)), Refusal::LatencyZero { .. });
    refused!(changed(|p| p.jobs[0].latencies[2].time = Nanos(u64::MAX)), Refusal::TooLong);
    let with = |event: Event| changed(|p| p.jobs[0].events.push(event));
    refused!(with(release(X, 5)), Refusal::UnknownOperator { event: 0, id: 5, .. });
    refused!(with(again(9, 1, &[])), Refusal::UnknownOperator { event: 0, id: 9, .. });
    refused!(with(release(TensorId(5), 2)), Refusal::UnknownTensor { id: 5, .. });
    refused!(with(again(0, 1, &[TensorId(5)])), Refusal::UnknownTensor { id: 5, .. });
    let strange = Place::Tensor { tensor: TensorId(7), residency: 0 };
    refused!(
        changed(|p| p.jobs[0].placements[0].place = strange),
        Refusal::UnknownTensor { id: 7, .. }
    );
    refused!(
        changed(|p| _ = p.jobs[0].host_slots.insert(TensorId(8), Bytes(0))),
        Refusal::UnknownTensor { id: 8, .. }
    );
    refused!(plan(&[release(X, 3), release(Y, 2)]), Refusal::Unsorted { event: 1 });
}

#[test]
fn recomputes_that_can_not_be() {
    refused!(
        changed(|p| p.jobs[0].events.push(again(3, 2, &[]))),
        Refusal::RecomputeTooEarly { event: 0, .. }
    );
    refused!(plan(&[again(3, 4, &[])]), Refusal::NeverReplayed { event: 0, .. });
    let refused = refused!(plan(&[again(4, 4, &[])]), Refusal::UpdatesTwice { .. });
    assert_eq!(
        refused[0],
        "event 0 recomputes operator `update`, which would update `w` a second time"
    );
    refused!(plan(&[again(0, 3, &[Y])]), Refusal::KeepsOther { .. });
    refused!(plan(&[release(X, 3), again(0, 3, &[X, X])]), Refusal::KeepsTwice { .. });
    refused!(plan(&[again(1, 2, &[])]), Refusal::WrongVersion { wanted: 0, found: 1, .. });
    refused!(plan(&[again(0, 2, &[X])]), Refusal::StillResident { .. });
    // Also where no later operator uses it: only an event ends a residency that another follows.
    let refused = refused!(plan(&[again(0, 3, &[X])]), Refusal::StillResident { .. });
    assert!(refused[0].ends_with("where it still is: no event ends its residency"), "{refused:?}");
    assert!(check_safety(&plan(&[release(X, 3), again(0, 3, &[X])]), &[graph()]).is_ok());
}

#[test]
fn what_steps_need() {
    let refused = refused!(plan(&[release(X, 1)]), Refusal::NotResident { .. });
    assert_eq!(refused[0], "operator `norm` needs `x`, which is not on the device then");
    // Recomputed without its in-place write.
    refused!(
        plan(&[release(X, 2), again(0, 2, &[X])]),
        Refusal::WrongVersion { wanted: 1, found: 0, .. }
    );
    refused!(plan(&[out(X, 0)]), Refusal::WrittenAfterSwapOut { event: 0, .. });
    refused!(plan(&[inward(X, 2)]), Refusal::StillResident { .. });
    refused!(
        changed(|p| p.jobs[0].events.push(release(G, 0))),
        Refusal::NothingToEnd { event: 0, .. }
    );
    refused!(plan(&[out(X, 2), release(X, 2)]), Refusal::EndedTwice { event: 1, earlier: 0, .. });
    refused!(plan(&[release(X, 2), inward(X, 2)]), Refusal::NoHostCopy { event: 1, .. });
    let stale = plan(&[inward(S, 0), release(S, 2), inward(S, 3), out(S, 4)]);
    let refused = refused!(stale, Refusal::StaleHostCopy { event: 2, .. });
    assert_eq!(
        refused[0],
        "event 2 swaps `s` in, but operator `norm` wrote the tensor after it was copied to the host"
    );
}

#[test]
fn a_steady_state_closes() {
    refused!(plan(&[out(S, 2)]), Refusal::LeavesDevice { .. });
    refused!(plan(&[inward(S, 0)]), Refusal::StaysOnDevice { .. });
    refused!(plan(&[inward(S, 0), release(S, 2)]), Refusal::HostCopyLost { .. });
}

#[test]
fn the_pinned_pool() {
    let swapped = |change: &dyn Fn(&mut BTreeMap<TensorId, Bytes>)| {
        let mut plan = plan(&[out(X, 1), out(Y, 2), inward(X, 2), inward(Y, 2)]);
        change(&mut plan.jobs[0].host_slots);
        plan
    };
    assert_eq!(
        check_safety(&swapped(&|_| ()), &[graph()]).unwrap().figures.pinned_bytes,
        Bytes(3 * 1024 + 1024)
    );
    refused!(swapped(&|s| _ = s.remove(&X)), Refusal::SlotMissing { .. });
    refused!(swapped(&|s| _ = s.insert(W, Bytes(0))), Refusal::SlotUnused { .. });
    refused!(
        swapped(&|s| _ = s.insert(X, Bytes(100))),
        Refusal::SlotMisaligned { offset: 100, .. }
    );
    refused!(
        swapped(&|s| _ = s.insert(X, Bytes(5 * 512))),
        Refusal::SlotsOverlap { offset: 3072, .. }
    );
    // They may share bytes one after the other, and the second waits for the first.
    let turns = |shared: bool| {
        let mut plan = plan(&[out(X, 1), inward(X, 1), out(Y, 2), inward(Y, 2)]);
        if shared {
            let slot = plan.jobs[0].host_slots[&Y];
            plan.jobs[0].host_slots.insert(X, slot);
        }
        check_safety(&plan, &[graph()]).unwrap().figures
    };
    assert!(
        turns(true).pinned_bytes <= turns(false).pinned_bytes
            && turns(true).iteration_ns >= turns(false).iteration_ns
    );
    refused!(swapped(&|s| _ = s.insert(X, Bytes(1 << 16))), Refusal::BeyondPinned { .. });
    refused!(swapped(&|s| _ = s.insert(X, Bytes(u64::MAX - 511))), Refusal::BeyondPinned { .. });
}

#[test]
fn placements() {
    refused!(changed(|p| _ = p.jobs[0].placements.pop()), Refusal::NotPlaced { .. });
    refused!(
        changed(|p| p.jobs[0].placements.extend_from_within(..1)),
        Refusal::PlacedTwice { .. }
    );
    let nothing = Place::Workspace { step: u32::MAX };
    refused!(
        changed(|p| p.jobs[0].placements.push(Placement { place: nothing, offset: Bytes(0) })),
        Refusal::PlacedNothing { .. }
    );
    refused!(changed(|p| offset(p, X, 0).0 += 8), Refusal::Misaligned { .. });
    refused!(changed(|p| p.budget = Bytes(9 * 1024 - 1)), Refusal::BeyondBudget { .. });
    refused!(changed(|p| offset(p, X, 0).0 = u64::MAX - 511), Refusal::BeyondBudget { .. });
    // A parameter never leaves.
    let refused =
        refused!(changed(|p| *offset(p, X, 0) = Bytes(0)), Refusal::Overlap { offset: 0, .. });
    assert_eq!(
        refused[0],
        "residency 0 of `w` and residency 0 of `x` share bytes from offset 0, and the first is there until the end of the iteration"
    );
    refused!(changed(|p| *offset(p, S, 0) = Bytes(512)), Refusal::Overlap { offset: 512, .. });
    // norm reads x and writes y.
    let refused =
        refused!(changed(|p| *offset(p, Y, 0) = Bytes(2 * 2048 + 512)), Refusal::Deadlock { .. });
    assert!(
        refused[0].contains("operator `norm` waits for the bytes from offset 4608 of residency 0 of `x`, held to the end of operator `use`"),
        "{refused:?}"
    );
    // A tensor that a recompute generates and does not keep is in the workspace.
    let mut scratch = plan(&[again(0, 3, &[])]);
    assert!(check_safety(&scratch, &[graph()]).is_ok());
    scratch.jobs[0].placements.retain(|p| matches!(p.place, Place::Tensor { .. }));
    refused!(scratch, Refusal::NotPlaced { .. });
}

#[test]
fn bytes_pass_from_hand_to_hand() {
    // x leaves, y takes its address, x comes back elsewhere: valid only in this order.
    let mut swapped = plan(&[out(X, 2), inward(X, 2)]);
    let first = *offset(&mut swapped, X, 0);
    *offset(&mut swapped, X, 1) = first;
    assert!(check_safety(&swapped, &[graph()]).is_ok());
    let list = &mut swapped.jobs[0].placements;
    list.sort_by_key(|p| !matches!(p.place, Place::Tensor { tensor: X, residency: 1 }));
    refused!(swapped, Refusal::Deadlock { .. });
}

#[test]
fn many_reasons_are_cut_short() {
    let events: Vec<Event> = (0..100).map(|_| release(X, 3)).collect();
    let refusals = refusals(&plan(&events));
    assert_eq!((refusals.len(), refusals.last()), (super::MOST + 1, Some(&Refusal::More)));
}

#[test]
fn unplanned_peak_of_kept_tensors() {
    let mut graph = graph();
    assert_eq!(memory::unplanned_peak(&graph), 5 * 1024);
    graph.operators[0].workspace = Bytes(10 * 512);
    // At make: w, s, x, the last iteration's g, and the workspace.
    assert_eq!(memory::unplanned_peak(&graph), 4 * 1024 + 10 * 512);
    graph.tensors[4].kept_until = Some(OpId(0));
    assert_eq!(memory::unplanned_peak(&graph), 3 * 1024 + 10 * 512);
}
