//! An explained plan as a page: both curves, and a reason for each tensor.

use std::path::Path;

use neap::contract::Plan;
use neap::job::Graph;
use neap::job::liveness::Liveness;
use neap::plan::explain::{Explained, Story};
use neap::report::page::{Cell, Kind, Page, Table, View};
use neap::sim::engine::{self, Durations};
use neap::sim::program::Program;
use serde_json::Value;

use super::Words;
use crate::{before_after, output};

/// Writes the page; `report` is what `--json` prints.
///
/// # Errors
/// When the plan can't be simulated or the file can't be written.
pub fn write(
    to: &Path,
    plan: &Plan,
    graph: &Graph,
    table: Table,
    report: Value,
) -> anyhow::Result<()> {
    let job = &plan.jobs[0];
    let program = Program::placed(graph, job)?;
    let link = &plan.device.link;
    let run = engine::run(&program, link, &Durations::nominal(&program, link))?;
    let mut memory = engine::memory(&program, &run);
    // Residencies that end with the iteration continue in the next one.
    memory.retain(|point| point.0 < run.iteration);
    let liveness = Liveness::new(graph.framework());
    let unplanned = before_after::unplanned(&liveness, &job.framework_latencies(graph));
    let planned = Some((plan, memory.as_slice()));
    let chart = before_after::chart(graph, (&program, &run), &unplanned, planned, liveness.floor);
    let view = View {
        name: "before and after".to_owned(),
        about: "One iteration without and with the plan, and why its tensors are where they are."
            .to_owned(),
        tables: before_after::waits(&chart).into_iter().chain([table]).collect(),
        charts: vec![chart],
    };
    let page = Page {
        title: format!("{} on {}, planned by {}", graph.name, plan.device.name, plan.planner),
        command: "neap explain",
        report,
        views: vec![view],
        ..Page::default()
    };
    output::page(to, &page)
}

/// The largest tensors at the planned peak, at most `top`, with the reasons for each.
///
/// # Errors
/// When the plan can't be explained.
pub fn reasons(plan: &Plan, graph: &Graph, top: usize) -> anyhow::Result<Table> {
    let explained = Explained::new(plan, graph).map_err(anyhow::Error::msg)?;
    let words = Words { graph, explained: &explained };
    let tensors = explained.at_peak().into_iter().take(top);
    let stories: Vec<Story> = tensors.map(|tensor| explained.story(tensor)).collect();
    Ok(words.reasons(&stories))
}

impl Words<'_> {
    /// A row for each tensor: where it is at the peak, what the plan does with it, and why it does
    /// nothing else.
    pub(super) fn reasons(&self, stories: &[Story]) -> Table {
        let row = |story: &Story| {
            let tensor = self.graph.tensor(story.tensor);
            let gap = story.gaps.iter().find(|g| g.at_peak);
            let why = self.why(story);
            // Without the name, which has a column of its own.
            let why = why.trim().strip_prefix(&format!("`{}`: ", tensor.name)).unwrap_or(&why);
            let why: Vec<&str> = why.lines().map(str::trim).collect();
            vec![
                tensor.name.as_str().into(),
                output::word(tensor.role).into(),
                story.bytes.into(),
                super::word(story.presence).into(),
                gap.map_or(Cell::Nothing, |gap| gap.choice.word().into()),
                why.join("; ").into(),
            ]
        };
        Table {
            name: "The largest tensors at the planned peak".to_owned(),
            columns: vec![
                ("tensor", Kind::Text),
                ("role", Kind::Text),
                ("bytes", Kind::Bytes),
                ("at the peak", Kind::Text),
                ("plan", Kind::Text),
                ("why", Kind::Text),
            ],
            rows: stories.iter().map(row).collect(),
        }
    }
}
