//! The files of an estimate: curves, a picture, a table of modules.

use std::path::Path;

use neap::estimate::attribution::{Places, Usage};
use neap::estimate::forecast::Forecast;
use neap::estimate::recording;
use neap::estimate::roles::Role;
use neap::report::curve::Line;
use neap::report::memory::{Instant, LAYERS, Stack};
use neap::sim::allocator::Config;
use neap::sim::allocator::replay::{LARGEST_DEVICE, Replay, observe};
use neap::sim::requests::Request;
use neap::sim::snapshot::write::Target;
use neap::units::Nanos;

use super::Estimate;
use crate::output;

/// There is a layer for each role.
const _: () = assert!(Role::ALL.len() == LAYERS);

pub fn curve(path: &Path, forecast: &Forecast, config: &Config) -> anyhow::Result<()> {
    neap::files::write(path, |out| {
        writeln!(out, "time_ns,requested_bytes,allocated_bytes,reserved_bytes")?;
        let mut replay = Replay::new(config, LARGEST_DEVICE, None);
        for (&request, time) in forecast.requests.iter().zip(&forecast.times) {
            replay.step(request);
            let now = replay.allocator().stats();
            writeln!(out, "{time},{},{},{}", now.requested.0, now.allocated.0, now.reserved.0)?;
        }
        Ok(())
    })?;
    output::written(path);
    Ok(())
}

pub fn snapshot(
    path: &Path,
    estimate: &Estimate<'_>,
    places: &Places<'_>,
    config: &Config,
    alloc_conf: &str,
) -> anyhow::Result<()> {
    let target = Target::unlimited(config, alloc_conf);
    neap::files::write(path, |mut out| {
        recording::write(&mut out, &estimate.job, places, &estimate.forecast, &target)
    })?;
    output::written(path);
    Ok(())
}

pub fn plot(
    path: &Path,
    estimate: &Estimate<'_>,
    config: &Config,
    limited: bool,
) -> anyhow::Result<()> {
    let forecast = &estimate.forecast;
    let mut stack = Stack::new(Nanos(forecast.times.last().copied().unwrap_or(0)));
    let mut now = Instant::default();
    let layer = |id: u32| {
        Role::ALL.iter().position(|r| *r == forecast.blocks[id as usize].role).unwrap_or(0)
    };
    observe(&forecast.requests, config, LARGEST_DEVICE, None, |index, ok, allocator| {
        match forecast.requests[index] {
            Request::Allocate { id, bytes, .. } if ok => now.layers[layer(id)] += bytes.0,
            // Freeing an id whose allocation failed changes nothing.
            Request::Free { id } => {
                let sum = &mut now.layers[layer(id)];
                *sum = sum.saturating_sub(forecast.blocks[id as usize].bytes);
            }
            _ => {}
        }
        now.time = Nanos(forecast.times[index]);
        now.reserved = allocator.stats().reserved.0;
        stack.add(now);
    });
    let names = Role::ALL.map(|r| r.name().replace('_', " "));
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    // A line for a device far above the curve would flatten the curve.
    let reserved = estimate.answer.stats.peak_reserved.0;
    let near = estimate.judged.iter().filter(|j| limited && j.available.0 / 2 <= reserved);
    let lines: Vec<Line<'_>> = near.map(|j| Line { name: &j.device, value: j.available }).collect();
    let starts: Vec<Nanos> =
        forecast.starts.iter().filter_map(|&s| forecast.times.get(s)).map(|&t| Nanos(t)).collect();
    let title =
        estimate.file.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let drawing = stack.svg(
        &format!("{title} on {}", estimate.target.profile.name),
        &names,
        &lines,
        &starts,
    )?;
    neap::files::write(path, |f| f.write_all(drawing.as_bytes()))?;
    output::written(path);
    Ok(())
}

/// The modules that use any memory, as CSV.
pub fn by_module(usages: &[Usage]) -> anyhow::Result<String> {
    let mut table = csv::Writer::from_writer(Vec::new());
    table.write_record([
        "module",
        "calls",
        "activation_bytes",
        "temporary_bytes",
        "gradient_bytes",
        "at_peak_bytes",
    ])?;
    for usage in usages {
        let numbers = [
            usage.calls,
            usage.activations,
            usage.largest_temporary,
            usage.gradients,
            usage.at_peak,
        ];
        table.write_record(
            std::iter::once(usage.module.clone()).chain(numbers.iter().map(u64::to_string)),
        )?;
    }
    let bytes = table.into_inner().map_err(|e| e.into_error())?;
    Ok(String::from_utf8_lossy(&bytes).trim_end().to_owned())
}
