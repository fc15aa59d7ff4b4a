//! The files of a simulation of one job: a drawing, a timeline, a table of latencies.

use std::path::Path;

use neap::contract::Latency;
use neap::device::latency::{Row, Table as LatencyTable};
use neap::report::curve::{Curve, Line, svg};
use neap::sim::engine::Run;
use neap::sim::recording;
use neap::sim::reserved::{Framework, Reserved, Timeline};
use neap::units::{Bytes, Nanos, OpId};

use super::one::Case;
use crate::output::{self, note};

/// Unplanned memory over the operators' nominal times, from liveness.
fn unplanned_curve(case: &Case) -> Vec<(Nanos, Bytes)> {
    let liveness = &case.liveness;
    let mut points = Vec::with_capacity(liveness.resident.len() + 1);
    let mut now = Nanos::ZERO;
    for (bytes, latency) in liveness.resident.iter().zip(&case.latencies) {
        points.push((now, *bytes));
        now += latency.time;
    }
    points.push((now, liveness.resident.last().copied().unwrap_or_default()));
    points
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
    let before = unplanned_curve(case);
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
        Row::of(o, &case.device.name, l.time).by(case.libraries.get(&OpId::of(index)))
    };
    let rows = case.graph.operators.iter().zip(&case.latencies).enumerate().map(row);
    LatencyTable::write(path, &rows.collect::<Vec<Row>>())?;
    output::written(path);
    Ok(())
}
