//! Random plans that the interpreter accepts, and damage to them.

use super::{Machine, sizes};
use crate::common::random::Random;
use neap::contract::{Event, Figures, JobPlan, Latency, Place, Placement, Plan, Source, Trigger};
use neap::device::{Link, Profile, Rates};
use neap::job::Graph;
use neap::units::{Bytes, Nanos, OpId, TensorId};

/// A device with a slow link, so that copies take about as long as operators.
pub fn device(random: &mut Random) -> Profile {
    let mut rate = || random.between(1_000_000_000, 40_000_000_000) as u64;
    let (h2d, d2h) = (rate(), rate());
    let (a, b) = (rate(), rate());
    Profile {
        name: "test".to_owned(),
        source: "none".to_owned(),
        memory_bytes: Bytes(1 << 30),
        reserve_bytes: Bytes(0),
        flops: Rates { f32: 1, f16: 1, f64: 1 },
        memory_bandwidth: 1,
        efficiency_percent: 100,
        link: Link {
            h2d,
            d2h,
            h2d_contended: a.min(h2d),
            d2h_contended: b.min(d2h),
            overhead_ns: random.below(30) as u64,
        },
        launch_overhead_ns: 0,
        pinned_bytes: Bytes(64 * 512),
        multiprocessors: None,
    }
}

/// A plan without events, placements or figures.
pub fn empty(random: &mut Random, graph: &Graph) -> Plan {
    let latency = |random: &mut Random| Latency {
        time: Nanos(random.between(1, 120) as u64),
        source: Source::Graph,
    };
    let latencies = graph.operators.iter().map(|_| latency(random)).collect();
    let job = JobPlan {
        graph: String::new(),
        graph_sha256: String::new(),
        arrangement: Default::default(),
        whole: Default::default(),
        latencies,
        libraries: std::collections::BTreeMap::new(),
        events: Vec::new(),
        placements: Vec::new(),
        host_slots: std::collections::BTreeMap::new(),
        window: None,
    };
    let (options, figures) = (std::collections::BTreeMap::new(), Figures::default());
    Plan {
        planner: "random".to_owned(),
        options,
        device: device(random),
        budget: Bytes::ZERO,
        jobs: vec![job],
        figures,
    }
}

/// A plan that the interpreter runs.
pub fn plan(random: &mut Random, graph: &Graph) -> Plan {
    let mut plan = empty(random, graph);
    for _ in 0..random.between(0, 14) {
        let before = plan.jobs[0].events.clone();
        propose(random, graph, &mut plan.jobs[0].events);
        slots(graph, &mut plan);
        if plan.jobs[0].events != before
            && !Machine::new(&plan, graph, false).is_ok_and(|m| m.run(random).is_ok())
        {
            plan.jobs[0].events = before;
        }
    }
    slots(graph, &mut plan);
    assert!(place(random, graph, &mut plan), "a plan that ran can be placed");
    plan
}

/// Gives each tensor that is copied a slot.
pub fn slots(graph: &Graph, plan: &mut Plan) {
    let job = &mut plan.jobs[0];
    let mut next = 0;
    job.host_slots.clear();
    for event in &job.events {
        if let Event::SwapIn { tensor, .. } | Event::SwapOut { tensor, .. } = event
            && tensor.index() < graph.tensors.len()
        {
            job.host_slots.entry(*tensor).or_insert_with(|| {
                let offset = next;
                next += graph.tensors[tensor.index()].bytes.in_blocks().0;
                Bytes(offset)
            });
        }
    }
    plan.device.pinned_bytes = Bytes(next.max(512));
}

/// First fit of slots over the list of events. Whether any two share bytes.
pub fn share(graph: &Graph, plan: &mut Plan) -> bool {
    let Ok(machine) = Machine::new(plan, graph, false) else { return false };
    let on_host = machine.reading.on_host.clone();
    let job = &mut plan.jobs[0];
    let copies = |tensor: TensorId| {
        let of = move |e: &Event| matches!(e, Event::SwapIn { tensor: t, .. } | Event::SwapOut { tensor: t, .. } if *t == tensor);
        (job.events.iter().position(of).unwrap_or(0), job.events.iter().rposition(of).unwrap_or(0))
    };
    let mut placed: Vec<(TensorId, u64, u64)> = Vec::new();
    let mut shared = false;
    for &tensor in job.host_slots.keys() {
        let bytes = graph.tensors[tensor.index()].bytes.in_blocks().0;
        let apart = |other: TensorId| {
            let (one, two) = (copies(tensor), copies(other));
            !on_host[tensor.index()] && !on_host[other.index()] && (one.1 < two.0 || two.1 < one.0)
        };
        let mut at = 0;
        while let Some(clash) = placed.iter().find(|p| at < p.2 && p.1 < at + bytes && !apart(p.0))
        {
            at = clash.2;
        }
        shared |= placed.iter().any(|p| at < p.2 && p.1 < at + bytes);
        placed.push((tensor, at, at + bytes));
    }
    job.host_slots = placed.iter().map(|p| (p.0, Bytes(p.1))).collect();
    shared
}

/// First fit over one random execution. False (and nothing changed) if the plan does not run.
pub fn place(random: &mut Random, graph: &Graph, plan: &mut Plan) -> bool {
    let Ok(machine) = Machine::new(plan, graph, false) else { return false };
    let sizes = sizes(graph, &machine.reading);
    let names = machine.reading.places(&sizes);
    let starts: Vec<bool> = machine.reading.stays.iter().map(|s| s.begin.is_none()).collect();
    let Ok(held) = machine.run(random) else { return false };
    // Each place once, with one or two intervals, in the order of the part that begins in the iteration.
    type Wanted = (u64, Place, usize, Vec<(u64, u64)>);
    let mut places: Vec<Wanted> = Vec::new();
    for (i, name) in names.iter().enumerate() {
        let Some(name) = name else { continue };
        let begin = if starts.get(i) == Some(&true) { 0 } else { held.begin[i] };
        let interval = (begin, held.end[i]);
        match places.iter_mut().find(|p| p.1 == *name) {
            Some(other) => {
                other.0 = begin.max(other.0);
                other.3.push(interval);
            }
            None => places.push((begin, *name, sizes[i], vec![interval])),
        }
    }
    places.sort_by_key(|p| p.0);
    let meet = |a: &[(u64, u64)], b: &[(u64, u64)]| {
        a.iter().any(|x| b.iter().any(|y| x.0 < y.1 && y.0 < x.1))
    };
    let mut at: Vec<usize> = Vec::new();
    for (i, place) in places.iter().enumerate() {
        let mut offset = 0;
        loop {
            let clash = (0..i).find(|j| {
                offset < at[*j] + places[*j].2
                    && at[*j] < offset + place.2
                    && meet(&places[*j].3, &place.3)
            });
            match clash {
                Some(j) => offset = at[j] + places[j].2,
                None => break,
            }
        }
        at.push(offset);
    }
    let extent = places.iter().zip(&at).map(|(p, at)| at + p.2).max().unwrap_or(0);
    plan.budget =
        Bytes((extent + if random.once_in(2) { 0 } else { random.below(4) }) as u64 * 512);
    plan.jobs[0].placements = places
        .iter()
        .zip(&at)
        .map(|(p, at)| Placement { place: p.1, offset: Bytes(*at as u64 * 512) })
        .collect();
    true
}

/// The trigger of an event that stands before the operator at this position.
fn now(position: usize) -> Trigger {
    Trigger { after: position.checked_sub(1).map(OpId::from_index) }
}

/// Puts an event among those of its trigger.
fn insert(random: &mut Random, events: &mut Vec<Event>, event: Event) {
    let after = event.trigger().after;
    let low = events.partition_point(|e| e.trigger().after < after);
    let high = events.partition_point(|e| e.trigger().after <= after);
    // Mostly behind its peers, so that events proposed in order stand in order.
    let at = if random.once_in(3) { random.between(low, high) } else { high };
    events.insert(at, event);
}

/// Adds something that a planner might do; it may be impossible.
fn propose(random: &mut Random, graph: &Graph, events: &mut Vec<Event>) {
    let id = TensorId::from_index(random.below(graph.tensors.len()));
    let accesses: Vec<usize> = graph.accesses()[id.index()].iter().map(|o| o.index()).collect();
    let generator = graph.generators()[id.index()];
    let Some((&first, &last)) = accesses.first().zip(accesses.last()) else { return };
    let count = graph.operators.len();
    let gap = random.below(accesses.len());
    let (use_, next) = (accesses[gap], accesses.get(gap + 1).copied());
    let leave = |random: &mut Random, position: usize| {
        if random.once_in(4) {
            Event::Release { tensor: id, trigger: now(position) }
        } else {
            Event::SwapOut { tensor: id, trigger: now(position) }
        }
    };
    match (random.below(6), next) {
        (0..=2, Some(next)) => {
            let earliest = if random.once_in(3) { first + 1 } else { use_ + 1 };
            let out = random.between(earliest, next);
            let back = random.between(out.max(use_ + 1), next);
            let event = leave(random, out);
            insert(random, events, event);
            let event = Event::SwapIn { tensor: id, trigger: now(back) };
            insert(random, events, event);
        }
        (3, Some(next)) => {
            if let Some(generator) = generator {
                let out = random.between(use_ + 1, next);
                insert(random, events, Event::Release { tensor: id, trigger: now(out) });
                again(
                    random,
                    graph,
                    events,
                    id,
                    generator,
                    random.clone().between(out, next),
                    next,
                );
            }
        }
        (0..=3, None) if generator.is_none() => {
            let event = leave(random, random.clone().between(last + 1, count));
            insert(random, events, event);
            let event =
                Event::SwapIn { tensor: id, trigger: now(random.clone().between(0, first)) };
            insert(random, events, event);
        }
        (4, _) => {
            let position = random.between(last + 1, count);
            let event = leave(random, position);
            insert(random, events, event);
        }
        _ => {
            let operator = random.below(count);
            let position = random.between(operator + 1, count);
            let event = Event::Recompute {
                operator: OpId::from_index(operator),
                trigger: now(position),
                keep: Vec::new(),
            };
            insert(random, events, event);
        }
    }
}

/// Recomputes a tensor, with the in-place writes that it had.
fn again(
    random: &mut Random,
    graph: &Graph,
    events: &mut Vec<Event>,
    id: TensorId,
    generator: OpId,
    position: usize,
    next: usize,
) {
    let mut keep: Vec<TensorId> = graph.operator(generator).generates().map(|o| o.tensor).collect();
    keep.retain(|t| *t == id || random.once_in(8));
    insert(random, events, Event::Recompute { operator: generator, trigger: now(position), keep });
    for (index, operator) in graph.operators.iter().enumerate().take(next) {
        if operator.updates().any(|o| o.tensor == id) {
            insert(
                random,
                events,
                Event::Recompute {
                    operator: OpId::from_index(index),
                    trigger: now(position),
                    keep: Vec::new(),
                },
            );
        }
    }
}

/// Harms a plan (or only changes it) in one way.
pub fn damage(random: &mut Random, graph: &Graph, plan: &mut Plan) {
    let (tensors, operators) = (graph.tensors.len(), graph.operators.len());
    let kind = random.below(30);
    let job = &mut plan.jobs[0];
    let events = &mut job.events;
    let at = random.below(events.len());
    match kind {
        0..=3 if !events.is_empty() => {
            events.remove(at);
        }
        4..=8 if !events.is_empty() => {
            // Later or earlier, and to its place in the list.
            let mut event = events.remove(at);
            let position = random.below(operators + 1);
            *trigger_of(&mut event) = now(position);
            insert(random, events, event);
        }
        9..=10 if !events.is_empty() => {
            trigger_of(&mut events[at]).after = now(random.below(operators + 2)).after
        }
        11 if !events.is_empty() => {
            // Places in the list, triggers stay.
            let other = random.below(events.len());
            let (a, b) = (events[at].trigger(), events[other].trigger());
            events.swap(at, other);
            trigger_of(&mut events[at]).after = a.after;
            trigger_of(&mut events[other]).after = b.after;
        }
        12..=13 if !events.is_empty() => {
            let target = TensorId::from_index(stray(random, tensors));
            match &mut events[at] {
                Event::SwapIn { tensor, .. }
                | Event::SwapOut { tensor, .. }
                | Event::Release { tensor, .. } => *tensor = target,
                Event::Recompute { keep, operator, .. } => match random.below(4) {
                    0 => keep.push(target),
                    1 => {
                        keep.pop();
                    }
                    2 => keep.extend(keep.clone()),
                    _ => *operator = OpId::from_index(stray(random, operators)),
                },
            }
        }
        14 if !events.is_empty() => {
            let trigger = events[at].trigger();
            if let Event::SwapIn { tensor, .. }
            | Event::SwapOut { tensor, .. }
            | Event::Release { tensor, .. } = events[at]
            {
                events[at] = match random.below(3) {
                    0 => Event::SwapOut { tensor, trigger },
                    1 => Event::SwapIn { tensor, trigger },
                    _ => Event::Release { tensor, trigger },
                };
            }
        }
        15 if !events.is_empty() => {
            let event = events[at].clone();
            events.insert(at, event);
        }
        16..=17 => propose(random, graph, events),
        18..=25 => return misplace(random, plan),
        26 => {
            let slots: Vec<TensorId> = job.host_slots.keys().copied().collect();
            if let (Some(one), Some(other)) = (random.clone().pick(&slots), random.pick(&slots)) {
                let offset = match random.below(5) {
                    0 => job.host_slots[other].0,
                    1 => job.host_slots[one].0 + 512,
                    2 => job.host_slots[one].0 + 8,
                    3 => plan.device.pinned_bytes.0,
                    _ => random.below(8) as u64 * 512,
                };
                job.host_slots.insert(*one, Bytes(offset));
            }
        }
        27 => {
            let tensor = TensorId::from_index(stray(random, tensors));
            if job.host_slots.remove(&tensor).is_none() {
                job.host_slots.insert(tensor, plan.device.pinned_bytes);
            }
        }
        28 => match random.below(4) {
            0 => drop(job.latencies.pop()),
            1 => job.latencies[0].time = Nanos::ZERO,
            2 => plan.budget = Bytes(plan.budget.0.saturating_sub(512)),
            _ => plan.device.pinned_bytes = Bytes(plan.device.pinned_bytes.0.saturating_sub(512)),
        },
        _ => {}
    }
    // Half the time what the events mean now is placed anew, so that placements hide nothing.
    if random.once_in(2) {
        if random.once_in(2) {
            slots(graph, plan);
        }
        place(random, graph, plan);
    }
}

/// Below `n`, rarely beyond.
fn stray(random: &mut Random, n: usize) -> usize {
    let beyond = usize::from(random.once_in(10));
    random.below(n + beyond)
}

fn trigger_of(event: &mut Event) -> &mut Trigger {
    match event {
        Event::SwapOut { trigger, .. }
        | Event::SwapIn { trigger, .. }
        | Event::Release { trigger, .. }
        | Event::Recompute { trigger, .. } => trigger,
    }
}

fn misplace(random: &mut Random, plan: &mut Plan) {
    let budget = plan.budget.0;
    let placements = &mut plan.jobs[0].placements;
    let (one, other) = (random.below(placements.len()), random.below(placements.len()));
    match random.below(12) {
        0..=2 => placements[one].offset = placements[other].offset,
        3..=5 => {
            placements[one].offset = Bytes(random.below(budget as usize / 512 + 1) as u64 * 512)
        }
        6..=8 => placements.swap(one, other),
        9 => {
            let moved = placements.remove(one);
            placements.insert(other.min(placements.len()), moved);
        }
        10 => match random.below(4) {
            0 => drop(placements.remove(one)),
            1 => placements.push(placements[one]),
            2 => placements[one].offset.0 += 8,
            _ => match &mut placements[one].place {
                Place::Tensor { residency, .. } => *residency += 1,
                Place::Workspace { step } => *step += 1,
            },
        },
        _ => {
            placements[one].offset = Bytes(if random.once_in(2) { u64::MAX - 511 } else { budget })
        }
    }
}
