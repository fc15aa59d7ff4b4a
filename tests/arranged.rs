//! Random small jobs with operators moved, and updates and gradients in pieces: planned, checked,
//! run on the host. Results are equal to those of the job as listed; damaged orders and pieces are
//! refused.
//!
//! Run with `NEAP_DEEP=1`, `NEAP_CASES=N` or `NEAP_FIRST=SEED` (see `crate::common::cases`).

use std::sync::Arc;

use crate::common::random::{self, Random, operand};
use neap::contract::check::check;
use neap::contract::json;
use neap::device::{Link, builtin, latency};
use neap::job::json::sha256;
use neap::job::optimizer::is_update;
use neap::job::{self, Arg, Arrangement, Graph, Moved, Phase, Pieces, Replay, Role, arrange};
use neap::plan::arrange::{Candidate, early, early_job, in_pieces, may_wait};
use neap::plan::bound::Bounds;
use neap::plan::neap::Options;
use neap::plan::{self, Method, PlanError, Planned, Request};
use neap::run::backend::host::kernels::Kernel;
use neap::run::backend::operators::KernelError;
use neap::run::backend::operators::view::{Call, Operand, View};
use neap::run::{Rate, Settings, run_with};
use neap::units::{Bytes, Nanos, OpId};

fn bytes(view: &View) -> (*mut u8, usize) {
    (view.data, view.shape.iter().product())
}

/// Any operator: every output is a mix of all inputs.
fn mix(call: &Call<'_>) -> Result<(), KernelError> {
    let name = call.operator.name.bytes().fold(7u64, |h, b| h.wrapping_mul(31) ^ u64::from(b));
    let mut sum = Random(name);
    let skips = |tensor| {
        call.operator.replay == Replay::SkipUpdates
            && call.operator.updates().any(|u| u.tensor == tensor)
    };
    for (arg, operand) in call.args.iter().zip(&call.operator.args) {
        if let (Operand::Tensor(view), Arg::Tensor(of)) = (arg, operand)
            && !skips(of.tensor)
        {
            let (data, length) = bytes(view);
            for i in 0..length {
                // SAFETY: the executor gives views inside its arena.
                sum.0 ^= u64::from(unsafe { *data.add(i) }) << (i % 8 * 8);
                sum.next();
            }
        }
    }
    let written = call.operator.outputs.iter().flatten().zip(call.outputs.iter().flatten());
    let written = written.chain(call.operator.hidden.iter().zip(call.hidden));
    for (number, (operand, view)) in written.enumerate() {
        if call.replay && operand.version > 0 && call.operator.replay == Replay::SkipUpdates {
            continue;
        }
        let (data, length) = bytes(view);
        let mut stream = Random(sum.0 ^ number as u64);
        for i in 0..length {
            // SAFETY: as above; no other thread touches the view while the step runs.
            unsafe {
                let before = if operand.version > 0 { *data.add(i) } else { 0 };
                *data.add(i) = before.rotate_left(3) ^ stream.next() as u8;
            }
        }
    }
    Ok(())
}

const KNOWN: &str = "neap::adamw";
/// The step of a class that neap does not know.
const OTHER: &str = "optimizer::Script";
/// Makes a gradient of two, as for weights that two layers share.
const SUM: &str = "aten::add";
/// Makes a gradient, or a part of such a sum, row by row, and how many elements a row has.
const ROWS: &str = "aten::embedding_dense_backward";
const WIDTH: u64 = 3;

/// An update: element i of all depends on element i of all.
fn update(call: &Call<'_>) -> Result<(), KernelError> {
    let views: Vec<(*mut u8, usize)> = call
        .args
        .iter()
        .filter_map(|a| if let Operand::Tensor(view) = a { Some(bytes(view)) } else { None })
        .collect();
    for i in 0..views[0].1 {
        // SAFETY: the executor gives views inside its arena, all of one length.
        let old: Vec<u8> = views.iter().map(|(data, _)| unsafe { *data.add(i) }).collect();
        let sum = old.iter().fold(1u8, |s, b| s.rotate_left(1).wrapping_mul(5) ^ b);
        for (at, (data, _)) in views.iter().enumerate().filter(|(at, _)| *at != 1) {
            // SAFETY: as above.
            unsafe { *data.add(i) = old[at].wrapping_add(sum).rotate_left(at as u32) };
        }
    }
    Ok(())
}

/// A sum: element i depends on element i of all.
fn sum(call: &Call<'_>) -> Result<(), KernelError> {
    let of = call.args.iter().filter_map(|of| match of {
        Operand::Tensor(view) => Some(bytes(view)),
        _ => None,
    });
    let [a, b] = of.collect::<Vec<_>>()[..] else { panic!("not two summands") };
    let made = bytes(call.outputs[0].as_ref().expect("a sum"));
    for i in 0..made.1 {
        // SAFETY: the executor gives views inside its arena, all of one length.
        unsafe { *made.0.add(i) = (*a.0.add(i)).rotate_left(3) ^ *b.0.add(i) };
    }
    Ok(())
}

/// Rows: each depends on all that is read, and on its number in the whole matrix.
fn rows(call: &Call<'_>) -> Result<(), KernelError> {
    let first = match &call.operator.args[2] {
        Arg::Ints(rows) => rows[0] as u64,
        _ => 0,
    };
    let mut sum = 7u64;
    for operand in call.args {
        let Operand::Tensor(view) = operand else { continue };
        let (data, length) = bytes(view);
        // SAFETY: the executor gives views inside its arena.
        let all = (0..length).map(|i| u64::from(unsafe { *data.add(i) }));
        sum = all.fold(sum, |sum, byte| sum.wrapping_mul(31) ^ byte);
    }
    let made = bytes(call.outputs[0].as_ref().expect("rows"));
    for i in 0..made.1 {
        let number = first * WIDTH + i as u64;
        // SAFETY: as above.
        unsafe { *made.0.add(i) = Random(sum ^ number).next() as u8 };
    }
    Ok(())
}

fn kernels(kind: &str) -> Option<Kernel> {
    Some(match kind {
        KNOWN | OTHER => update,
        SUM => sum,
        ROWS => rows,
        _ => mix,
    })
}

/// A random job with some parameters that have gradients, states and an update each.
fn job(random: &mut Random) -> Graph {
    let mut graph = random::graph(random);
    let mut last = graph.operators.len();
    for number in 0..random.between(1, 4) {
        let most = if random.once_in(3) { 16_384 } else { 4096 };
        let size = (random.between(2, most) as u64).next_multiple_of(WIDTH);
        // Rows are drawn apart, so that all else is drawn as without them.
        let mut apart = Random(random.0 ^ size);
        let mut add = |name: &str, role| {
            graph.tensors.push(random::tensor(format!("{name}{number}"), size, role));
            graph.tensors.len() - 1
        };
        let p = add("p", Role::Parameter);
        let g = add("g", Role::Gradient);
        let states = [add("m", Role::OptimizerState), add("v", Role::OptimizerState)];
        // Sums and rows do nothing else.
        let mixes = |graph: &Graph, at: usize| ![SUM, ROWS].contains(&&*graph.operators[at].kind);
        let mut any = || loop {
            let at = random.below(last);
            if mixes(&graph, at) {
                break at;
            }
        };
        let (reads, makes) = (any(), any());
        let tensors = graph.tensors.clone();
        let of = |t: usize, version: u32| operand(&tensors, t, version);
        graph.operators[reads].args.push(Arg::Tensor(of(p, 0)));
        match maker(random, &graph, makes) {
            _ if number % 2 == 0 && random.once_in(2) => {
                let before = (0..=makes).rev().filter(|at| mixes(&graph, *at));
                let before: Vec<usize> = before.collect();
                let summand = |graph: &mut Graph| {
                    let name = format!("summand{number}.{}", graph.tensors.len());
                    graph.tensors.push(random::tensor(name, size, Role::Activation));
                    operand(&graph.tensors, graph.tensors.len() - 1, 0)
                };
                let summands = [(); 2].map(|()| summand(&mut graph));
                let at = before[random.below(before.len())];
                graph.operators[at].hidden.push(summands[0].clone());
                let mut end = makes + 1;
                match maker(&mut apart, &graph, makes) {
                    Some(from) => {
                        let rows = by_rows(format!("rows{number}"), from, &summands[1]);
                        insert(&mut graph, end, rows);
                        end += 1;
                    }
                    None => graph.operators[makes].hidden.push(summands[1].clone()),
                }
                let mut sum = random::operator(format!("sum{number}"), Phase::Backward);
                sum.kind = SUM.to_owned();
                sum.args = summands.map(Arg::Tensor).to_vec();
                sum.outputs = vec![Some(of(g, 0))];
                insert(&mut graph, end, sum);
                last += end - makes;
            }
            Some(from) if apart.once_in(3) => {
                let rows = by_rows(format!("gradient{number}"), from, &of(g, 0));
                insert(&mut graph, makes + 1, rows);
                last += 1;
            }
            Some(from) => {
                let mut maker = random::operator(format!("gradient{number}"), Phase::Backward);
                maker.args = vec![Arg::Tensor(from)];
                maker.outputs = vec![Some(of(g, 0))];
                insert(&mut graph, makes + 1, maker);
                last += 1;
            }
            None => graph.operators[makes].hidden.push(of(g, 0)),
        }
        let mut step = random::operator(format!("step{number}"), Phase::Optimize);
        step.kind = if number % 2 == 0 { KNOWN } else { OTHER }.to_owned();
        step.args = [p, g, states[0], states[1]].map(|t| Arg::Tensor(of(t, 0))).to_vec();
        step.hidden = [p, states[0], states[1]].map(|t| of(t, 1)).to_vec();
        step.replay = Replay::Never;
        graph.operators.push(step);
    }
    graph
}

/// An operator that makes all of a tensor row by row.
fn by_rows(name: String, from: job::Operand, made: &job::Operand) -> job::Operator {
    let mut rows = random::operator(name, Phase::Backward);
    rows.kind = ROWS.to_owned();
    let count = made.elements() / WIDTH;
    rows.args = vec![Arg::Tensor(from.clone()), Arg::Tensor(from), Arg::Int(count as i64)];
    let (shape, stride) = (vec![count, WIDTH], vec![WIDTH, 1]);
    rows.outputs = vec![Some(job::Operand { shape, stride, ..made.clone() })];
    rows
}

/// What the gradient is made from that one operator makes by itself, in a half of the cases: what
/// another one has made.
fn maker(random: &mut Random, graph: &Graph, makes: usize) -> Option<job::Operand> {
    let generated = graph.operators[makes].generates().next().cloned();
    generated.filter(|_| random.once_in(2))
}

/// Puts an operator before the one at a place.
fn insert(graph: &mut Graph, at: usize, operator: job::Operator) {
    graph.operators.insert(at, operator);
    for until in graph.tensors.iter_mut().filter_map(|t| t.kept_until.as_mut()) {
        *until = OpId::from_index(until.index() + usize::from(until.index() >= at));
    }
}

/// Random moves that the job allows, and pieces of any size.
fn arrangement(random: &mut Random, graph: &Graph, updates: bool) -> (Arrangement, [usize; 3]) {
    let mut arrangement = Arrangement::default();
    let (mut refused, mut in_turn) = (0, [0, 0]);
    let all = may_wait(graph).into_iter().enumerate();
    let moves: Vec<OpId> =
        all.filter(|of| !updates || of.1).map(|(at, _)| OpId::from_index(at)).collect();
    for (index, operator) in graph.operators.iter().enumerate() {
        if operator.kind == KNOWN && !random.once_in(3) {
            let all = operator.reads().next().expect("reads").elements();
            let elements = random.between(1, all as usize - 1).max(all as usize / 9) as u64;
            arrangement.pieces.push(Pieces { operator: OpId::from_index(index), elements });
        }
    }
    for (update, makers) in in_pieces(graph) {
        let of = arrangement.pieces.iter().position(|pieces| pieces.operator == update);
        let Some(of) = of.filter(|_| !random.once_in(3)) else { continue };
        let all = graph.operator(update).reads().next().expect("reads").elements();
        let by_rows = makers.iter().any(|maker| graph.operator(*maker).kind == ROWS);
        let row = if by_rows { WIDTH } else { 1 };
        let elements = arrangement.pieces[of].elements.next_multiple_of(row);
        if elements >= all {
            continue;
        }
        arrangement.pieces[of].elements = elements;
        arrangement.pieces.extend(makers.iter().map(|&operator| Pieces { operator, elements }));
        // In turn, so that there is never more than a piece of the gradient.
        let last = makers.last().expect("a maker").index();
        let at = random.between(last, graph.operators.len() - 1);
        let after = at.checked_sub(1).map(OpId::from_index);
        let count = u32::try_from(all.div_ceil(elements)).expect("few pieces");
        let mut tried = arrangement.clone();
        tried.order.extend((0..count).flat_map(|number| {
            let operators = makers.iter().copied().chain([update]);
            operators.map(move |operator| Moved { operator, piece: Some(number), after })
        }));
        if arrange(graph, &tried).is_ok() {
            in_turn[usize::from(by_rows)] += 1;
            arrangement = tried;
        }
    }
    for _ in 0..12 {
        let operator = moves[random.below(moves.len())];
        let after = random.below(graph.operators.len() + 1).checked_sub(1).map(OpId::from_index);
        let mut tried = arrangement.clone();
        let of = arrangement.pieces.iter().any(|pieces| pieces.operator == operator);
        let piece = (of && !random.once_in(3)).then(|| random.below(9) as u32);
        tried.order.push(Moved { operator, piece, after });
        match arrange(graph, &tried) {
            Ok(_) => arrangement = tried,
            Err(_) => refused += 1,
        }
    }
    (arrangement, [in_turn[0], in_turn[1], refused])
}

/// What must hold does not depend on how long the planner looks: it seldom looks as long as usual.
fn options(random: &mut Random) -> Options {
    if random.once_in(40) {
        return Options::default();
    }
    let mut on = || random.once_in(20);
    Options {
        stream: on(),
        linger: on(),
        apart: on(),
        twice: on(),
        guide: on(),
        polish: on(),
        effort: 0,
        portfolio: false,
        ..Options::default()
    }
}

fn settings() -> Settings {
    Settings {
        iterations: 2,
        link_rate: Rate::Unlimited,
        poison: true,
        keep_state: true,
        ..Settings::default()
    }
}

#[test]
fn updates_of_any_class_run_early() {
    let moved = |kind: &str| {
        let jobs = (0..20).map(|seed| job(&mut Random(seed)));
        let early = |graph: Graph| {
            let of = |m: &Moved| graph.operator(m.operator).kind == kind;
            early(&graph).iter().filter(|m| of(m)).count()
        };
        jobs.map(early).sum::<usize>()
    };
    assert!(moved(KNOWN) > 10 && moved(OTHER) > 5, "{} {}", moved(KNOWN), moved(OTHER));
}

#[test]
fn moved_and_split_operators_compute_the_same() {
    let cases = crate::common::cases(1_000);
    let counts = crate::common::on_all_cores(cases, |seed| {
        let mut random = Random(seed);
        let graph = job(&mut random);
        let mut device = builtin::find("host").expect("built in");
        if random.once_in(2) {
            // Copies take as long as operators, so that bounds say something.
            let rate = 100_000_000;
            device.link = Link {
                h2d: rate,
                d2h: rate,
                h2d_contended: rate,
                d2h_contended: rate,
                overhead_ns: 0,
            };
        }
        let latencies = latency::latencies(&graph, &device, None);
        let request = Request {
            file: ("x.graph.json".to_owned(), sha256(&graph)),
            ..Request::new(&graph, &device, &latencies, Bytes::ZERO)
        };
        let unplanned = plan::unplanned(&request).expect("unplanned");
        let arena = unplanned.plan.figures.arena_bytes;
        let run = |graph: &Graph, of: &Planned, bytes: Bytes| {
            let job = &of.plan.jobs[0];
            run_with(kernels, graph, job, bytes, &device, &settings(), &mut |_| {})
                .unwrap_or_else(|e| panic!("seed {seed}: {e}"))
        };
        let without = run(&graph, &unplanned, arena);
        let updates = random.once_in(2);
        let (arrangement, [in_turn, in_rows, refused]) = arrangement(&mut random, &graph, updates);
        if arrangement.is_empty() {
            return [0, 0, 0, 0, 0, 0, refused];
        }
        let candidate = Candidate::new(&request, &arrangement)
            .unwrap_or_else(|| panic!("seed {seed}: the arrangement is refused"));
        let budget = Bytes(arena.0 * random.between(60, 110) as u64 / 100);
        let method = Method::Neap(options(&mut random));
        let asked = Request { budget, method, ..candidate.request(&request) };
        let planned = match plan::make(&asked) {
            Ok(planned) => planned,
            Err(PlanError::Infeasible(_)) => return [0, 0, 0, 0, 0, 0, refused],
            Err(defect) => panic!("seed {seed}: {defect}"),
        };
        let graphs = [candidate.graph];
        let proof =
            check(&planned.plan, &graphs).unwrap_or_else(|r| panic!("seed {seed}: {}", r[0]));
        assert_eq!(proof.figures.unplanned_peak_bytes, unplanned.plan.figures.unplanned_peak_bytes);
        assert_eq!(
            proof.figures.unplanned_iteration_ns, unplanned.plan.figures.unplanned_iteration_ns,
            "seed {seed}"
        );
        let mut late = 0;
        if updates {
            let (early, of_early) = early_job(&graph, &latencies);
            let bounds = Bounds::any_order(&early, &of_early, &device.link);
            let bound = bounds.iteration_for(proof.figures.peak_bytes, Nanos(u64::MAX));
            assert!(
                bound.is_some_and(|bound| bound <= proof.figures.iteration_ns),
                "seed {seed}: {bound:?} is no bound"
            );
            // The bound says something of a plan that makes a gradient late.
            let waits = |moved: &Moved| !is_update(graph.operator(moved.operator));
            let adds = bound > Some(proof.figures.unplanned_iteration_ns);
            late = usize::from(adds && arrangement.order.iter().any(waits));
        }
        let with = run(&graphs[0], &planned, planned.plan.budget);
        assert_eq!(without.checksum, with.checksum, "seed {seed}");
        assert_eq!(without.state, with.state, "seed {seed}");
        round_trip(seed, &graph, &planned, &graphs);
        damaged(seed, &mut random, &planned, &graphs);
        let moved = usize::from(!arrangement.order.is_empty());
        let pieces = &arrangement.pieces;
        let split = usize::from(!pieces.is_empty());
        [1, moved, late, split, in_turn.min(1), in_rows.min(1), refused]
    });
    let [met, moved, late, split, in_turn, in_rows, refused] = counts;
    println!(
        "{met} run, {moved} with moved operators, {split} with pieces, {in_turn} with gradients in \
         pieces too, {in_rows} with rows in pieces; {late} make a gradient late and are bounded; \
         {refused} moves refused"
    );
    assert!(moved * 2 > met && split * 2 > met && refused > met, "the jobs are too easy");
    assert!(late * 100 > met, "gradients are seldom made late");
    assert!(in_turn * 10 > met, "gradients are seldom made in pieces");
    assert!(in_rows * 40 > met, "rows are seldom made in pieces");
}

/// The file says the same.
fn round_trip(seed: u64, graph: &Graph, planned: &Planned, graphs: &[Graph]) {
    let bytes = json::to_bytes(&planned.plan, graphs);
    let file: json::PlanFile<'_> = serde_json::from_slice(&bytes).expect("JSON");
    let again = json::arranged(&file, vec![graph.clone()]).expect("arranged");
    let plan = json::resolve(file, &again).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
    assert_eq!(plan, planned.plan, "seed {seed}");
    check(&plan, &again).unwrap_or_else(|r| panic!("seed {seed}: {}", r[0]));
}

/// An order or pieces that the arranged graph has not, and an arranged graph that is wrong, are
/// refused.
fn damaged(seed: u64, random: &mut Random, planned: &Planned, graphs: &[Graph]) {
    let refused = |plan: &neap::contract::Plan, graph: &Graph, what: &str| {
        let answer = check(plan, std::slice::from_ref(graph));
        assert!(answer.is_err(), "seed {seed}: {what} passes");
    };
    let mut plan = planned.plan.clone();
    let arrangement = &mut plan.jobs[0].arrangement;
    if let Some(pieces) = arrangement.pieces.first_mut() {
        pieces.elements += 1;
    } else {
        arrangement.order.pop();
    }
    refused(&plan, &graphs[0], "another arrangement");
    let mut plan = planned.plan.clone();
    let order = &mut plan.jobs[0].arrangement.order;
    if let Some(moved) = order.iter_mut().find(|moved| moved.piece.is_some()) {
        moved.piece = moved.piece.map(|piece| piece + 1);
        refused(&plan, &graphs[0], "another piece");
    }
    let mut graph = graphs[0].clone();
    let origin = Arc::clone(graph.origin.as_ref().expect("arranged"));
    // Two operators change places, the arranged graph and its record alike.
    let at = random.below(graph.operators.len() - 1);
    graph.operators.swap(at, at + 1);
    let mut swapped = (*origin).clone();
    swapped.operators.swap(at, at + 1);
    graph.origin = Some(Arc::new(swapped));
    refused(&planned.plan, &graph, "operators out of place");
    // A piece makes other rows.
    let mut graph = graphs[0].clone();
    let mut args = graph.operators.iter_mut().flat_map(|operator| &mut operator.args);
    if let Some(Arg::Ints(rows)) = args.find(|arg| matches!(arg, Arg::Ints(_))) {
        rows[0] += 1;
        refused(&planned.plan, &graph, "other rows");
    }
    // An operand sees something else.
    let mut graph = graphs[0].clone();
    let at = random.below(graph.operators.len());
    let operator = &mut graph.operators[at];
    if let Some(Arg::Tensor(operand)) = operator.args.first_mut() {
        match random.below(3) {
            0 => operand.version += 1,
            1 => operand.offset += 1,
            _ => operand.shape = vec![operand.elements() + 1],
        }
        refused(&planned.plan, &graph, "another operand");
    }
}
