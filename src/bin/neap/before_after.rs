//! An iteration without and with its plan, as a chart of a page: both curves over one axis, and
//! below them operators, recomputes, copies and the time for which operators wait.

use neap::contract::{Latency, Plan};
use neap::job::Graph;
use neap::job::liveness::Liveness;
use neap::report::page::{Chart, Course, Kind, Lane, Limit, Span, Table};
use neap::sim::engine::Run;
use neap::sim::program::{Direction, Program};
use neap::units::{Bytes, Nanos};

/// Unplanned memory over the operators' nominal times, from liveness.
pub fn unplanned(liveness: &Liveness, latencies: &[Latency]) -> Vec<(Nanos, Bytes)> {
    let mut points = Vec::with_capacity(liveness.resident.len() + 1);
    let mut now = Nanos::ZERO;
    for (bytes, latency) in liveness.resident.iter().zip(latencies) {
        points.push((now, *bytes));
        now += latency.time;
    }
    points.push((now, liveness.resident.last().copied().unwrap_or_default()));
    points
}

/// The chart. `program` and `run` are those of the plan, if there is one, and `planned` its memory
/// then; `floor` is the least that any plan needs.
pub fn chart(
    graph: &Graph,
    (program, run): (&Program, &Run),
    unplanned: &[(Nanos, Bytes)],
    planned: Option<(&Plan, &[(Nanos, Bytes)])>,
    floor: Bytes,
) -> Chart {
    let plain =
        |points: &[(Nanos, Bytes)]| -> Vec<_> { points.iter().map(|(t, b)| (t.0, b.0)).collect() };
    let mut curves = vec![("without a plan", plain(unplanned))];
    let mut limits = vec![Limit { name: "floor".to_owned(), value: floor.0 }];
    if let Some((plan, memory)) = planned {
        curves.push(("with the plan", plain(memory)));
        limits.insert(0, Limit { name: "budget".to_owned(), value: plan.budget.0 });
    }
    // The shorter curve ends where its iteration does.
    let end = unplanned.last().map_or(0, |p| p.0.0);
    if end < run.iteration.0 {
        curves[0].1.push((end, 0));
    }
    let mut course = Course::of_curves(&curves);
    course.end_at(run.iteration.0);
    let mut lanes = vec![compute(graph, program, run)];
    for (direction, kind, name) in
        [(Direction::D2h, "out", "to the host"), (Direction::H2d, "in", "from it")]
    {
        let copies = program.copies.iter().zip(&run.copies);
        let mut spans: Vec<Span> = copies
            .filter(|(copy, _)| copy.direction == direction)
            .map(|(copy, &(from, until))| Span {
                name: graph.tensor(copy.tensor).name.clone(),
                kind,
                from: from.0,
                until: until.0,
                bytes: Some(copy.bytes),
            })
            .collect();
        spans.sort_by_key(|span| span.from);
        if !spans.is_empty() {
            lanes.push(Lane { name: name.to_owned(), spans });
        }
    }
    Chart { name: "Memory of one iteration".to_owned(), course, limits, lanes, ..Chart::default() }
}

/// The waits that a chart shows, the longest first.
pub fn waits(chart: &Chart) -> Option<Table> {
    let spans = chart.lanes.iter().flat_map(|lane| &lane.spans);
    let mut lost: Vec<&Span> = spans.filter(|span| span.kind == "lost").collect();
    lost.sort_by_key(|span| (std::cmp::Reverse(span.until - span.from), span.from));
    let row = |span: &&Span| {
        vec![span.name.as_str().into(), span.from.into(), (span.until - span.from).into()]
    };
    let table = Table {
        name: "Where operators wait".to_owned(),
        columns: vec![("wait", Kind::Text), ("from", Kind::Nanos), ("lost", Kind::Nanos)],
        rows: lost.iter().map(row).collect(),
    };
    (!table.rows.is_empty()).then_some(table)
}

/// The operators in order, and between them the time for which the next one waits.
fn compute(graph: &Graph, program: &Program, run: &Run) -> Lane {
    let mut spans = Vec::new();
    let mut before = Nanos::ZERO;
    let lost = |name: String, from: Nanos, until: Nanos| Span {
        name,
        kind: "lost",
        from: from.0,
        until: until.0,
        bytes: None,
    };
    for (step, &(from, until)) in program.steps.iter().zip(&run.steps) {
        let name = &graph.operator(step.operator).name;
        if from > before {
            spans.push(lost(format!("before {name}"), before, from));
        }
        let kind = if step.event.is_some() { "recompute" } else { "operator" };
        spans.push(Span { name: name.clone(), kind, from: from.0, until: until.0, bytes: None });
        before = until;
    }
    if run.iteration > before {
        spans.push(lost("at the end".to_owned(), before, run.iteration));
    }
    Lane { name: "compute".to_owned(), spans }
}
