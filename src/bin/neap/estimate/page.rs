//! An estimate as a page: every block of the forecast over time, and the devices that it fits.

use std::path::Path;

use neap::estimate::attribution::Places;
use neap::estimate::roles::Role;
use neap::report::page::{self, Kind, Label, Limit, Mark, Memory, Page, Table, View};
use neap::sim::allocator::Config;
use neap::sim::allocator::replay::{LARGEST_DEVICE, Replay};
use neap::sim::requests::Request;
use serde_json::Value;

use super::{Estimate, Judged};
use crate::output;

/// Writes the page; `report` is what `--json` prints.
///
/// # Errors
/// When the file can't be written.
pub fn write(
    to: &Path,
    estimate: &Estimate<'_>,
    places: &Places<'_>,
    config: &Config,
    report: Value,
) -> anyhow::Result<()> {
    let title = estimate.file.file_name().map(|n| n.to_string_lossy().into_owned());
    let page = Page {
        title: format!("{} on {}", title.unwrap_or_default(), estimate.target.profile.name),
        command: "neap estimate",
        report,
        notes: estimate.forecast.notes.clone(),
        views: vec![memory(estimate, places, config), fits(estimate)],
    };
    output::page(to, &page)
}

fn memory(estimate: &Estimate<'_>, places: &Places<'_>, config: &Config) -> View {
    let forecast = &estimate.forecast;
    let names = Role::ALL.map(|r| r.name().replace('_', " "));
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut memory = Memory::new(&names);
    let mut replay = Replay::new(config, LARGEST_DEVICE, None);
    for (&request, &at) in forecast.requests.iter().zip(&forecast.times) {
        replay.step(request);
        memory.follow(at, request, &replay, |_| match request {
            Request::Allocate { id, .. } => {
                let block = forecast.blocks[id as usize];
                let layer = Role::ALL.iter().position(|r| *r == block.role).unwrap_or(0);
                let operator = block.op.map(|op| places.operator(op)).unwrap_or_default();
                let module = block.op.and_then(|op| places.module(op)).map(|m| places.path(m));
                let rule = block.rule.map(|rule| format!("rule {rule}"));
                let name = [Some(operator.to_owned()).filter(|o| !o.is_empty()), rule];
                let name = name.into_iter().flatten().collect::<Vec<_>>().join(", ");
                (layer, Label { name, module: module.unwrap_or_default(), line: String::new() })
            }
            _ => (0, Label::default()),
        });
    }
    let end = forecast.times.last().copied().unwrap_or(0);
    let mut chart = memory.chart("Memory over the time of the trace", end);
    let starts = forecast.starts.iter().filter_map(|&s| forecast.times.get(s));
    let mark = |(index, &at): (usize, &u64)| Mark {
        at,
        name: format!("iteration {}", index + 1),
        step: true,
    };
    chart.marks = starts.enumerate().map(mark).collect();
    let target = &estimate.target.profile;
    chart.limits = vec![Limit { name: target.name.clone(), value: target.available().0 }];
    View {
        name: "memory over time".to_owned(),
        about: "What PyTorch's allocator would give out on the GPU, by what it holds. Times are \
                those of the recorded run on the CPU."
            .to_owned(),
        charts: vec![chart],
        ..View::default()
    }
}

fn fits(estimate: &Estimate<'_>) -> View {
    let row = |j: &Judged| {
        let share = page::share(j.wanted, j.available);
        let answer = j.verdict.name().replace('_', " ");
        vec![
            j.device.as_str().into(),
            j.available.into(),
            j.wanted.into(),
            share.into(),
            answer.into(),
        ]
    };
    let devices = Table {
        name: "Devices".to_owned(),
        columns: vec![
            ("device", Kind::Text),
            ("memory", Kind::Bytes),
            ("peak with margin", Kind::Bytes),
            ("share of it", Kind::Share),
            ("answer", Kind::Text),
        ],
        rows: estimate.judged.iter().map(row).collect(),
    };
    View {
        name: "where it fits".to_owned(),
        about: "The forecast for each device with its own workspaces and multiprocessors, if the \
                job runs the same operators there."
            .to_owned(),
        tables: vec![devices],
        ..View::default()
    }
}
