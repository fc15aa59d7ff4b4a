//! The files of a simulation of one job: a drawing, a page, a timeline, a table of latencies.

use std::path::Path;

use neap::contract::Latency;
use neap::device::latency::{Row, Table as LatencyTable};
use neap::report::curve::{Curve, Line, svg};
use neap::report::page::{Page, View};
use neap::sim::engine::Run;
use neap::sim::program::Program;
use neap::sim::recording;
use neap::sim::reserved::{Framework, Reserved, Timeline};
use neap::units::{Bytes, Nanos, OpId};
use serde_json::Value;

use super::one::Case;
use crate::before_after;
use crate::explain::page::reasons;
use crate::output::{self, note};

/// The tensors for which a page has reasons.
const REASONS: usize = 200;

/// Unplanned memory over the operators' nominal times.
fn unplanned(case: &Case) -> Vec<(Nanos, Bytes)> {
    match &case.plan {
        Some(plan) => {
            let latencies = plan.jobs[0].framework_latencies(&case.graph);
            before_after::unplanned(&case.liveness, &latencies)
        }
        None => before_after::unplanned(&case.liveness, &case.latencies),
    }
}

/// Writes the page; `report` is what `--json` prints.
pub fn page(
    path: &Path,
    case: &Case,
    (program, run): (&Program, &Run),
    curve: &[(Nanos, Bytes)],
    report: Value,
) -> anyhow::Result<()> {
    let planned = case.plan.as_ref().map(|plan| (plan, curve));
    let (graph, floor) = (&case.graph, case.liveness.floor);
    let chart = before_after::chart(graph, (program, run), &unplanned(case), planned, floor);
    let mut view = View {
        name: "memory over time".to_owned(),
        about: "One iteration of the job.".to_owned(),
        tables: before_after::waits(&chart).into_iter().collect(),
        charts: vec![chart],
    };
    if let Some(plan) = &case.plan {
        view.name = "before and after".to_owned();
        view.about = "One iteration without and with the plan, and why its tensors are where they \
                      are."
            .to_owned();
        view.tables.push(reasons(plan, graph, REASONS)?);
    }
    let page = Page {
        title: format!("{} on {}", graph.name, case.device.name),
        command: "neap simulate",
        report,
        views: vec![view],
        ..Page::default()
    };
    output::page(path, &page)
}

/// Draws memory over time; `of` names the simulated file.
pub fn plot(
    path: &Path,
    of: &Path,
    case: &Case,
    run: &Run,
    curve: &[(Nanos, Bytes)],
    reserved: Option<&Reserved>,
) -> anyhow::Result<()> {
    let before = unplanned(case);
    let mut after = curve.to_vec();
    let last = after.last().map_or(Bytes::ZERO, |p| p.1);
    after.push((run.iteration, last));
    let (held, used, name): (Vec<_>, Vec<_>, String);
    let mut curves = vec![Curve { name: "without a plan", points: &before }];
    let mut lines = Vec::new();
    if let Some(plan) = &case.plan {
        curves.push(Curve { name: "with the plan", points: &after });
        lines.push(Line { name: "budget", value: plan.budget });
    }
    lines.push(Line { name: "floor", value: case.liveness.floor });
    if let Some(reserved) = reserved {
        // The difference between the two curves is fragmentation.
        held = reserved.curve.iter().map(|(at, reserved, _)| (*at, *reserved)).collect();
        used = reserved.curve.iter().map(|(at, _, allocated)| (*at, *allocated)).collect();
        name = format!("reserved, {} segments", reserved.at_peak.segments);
        curves.extend([
            Curve { name: &name, points: &held },
            Curve { name: "allocated", points: &used },
        ]);
    }
    let title = format!("{} on {}", case.graph.name, case.device.name);
    let drawing = svg(&title, &curves, &lines)?;
    neap::files::write(path, |f| f.write_all(drawing.as_bytes()))?;
    note(&format!("written: {} ({})", path.display(), of.display()));
    Ok(())
}

/// Writes the requests to PyTorch's allocator as a memory snapshot.
pub fn snapshot(
    path: &Path,
    case: &Case,
    requests: &Timeline,
    framework: &Framework,
    conf: &str,
    iterations: u32,
) -> anyhow::Result<()> {
    neap::files::write(path, |mut out| {
        recording::write(&mut out, &case.graph, requests, framework, conf, iterations)
    })?;
    output::written(path);
    Ok(())
}

/// Writes the latencies that were used.
pub fn latencies(path: &Path, case: &Case) -> anyhow::Result<()> {
    let row = |(index, (o, l)): (_, (_, &Latency))| {
        Row::new(o, &case.device.name, l.time).by(case.libraries.get(&OpId::from_index(index)))
    };
    let rows = case.graph.operators.iter().zip(&case.latencies).enumerate().map(row);
    LatencyTable::write(path, &rows.collect::<Vec<Row>>())?;
    output::written(path);
    Ok(())
}
