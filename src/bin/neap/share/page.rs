//! Simulated jobs as a page: a view for each policy, with memory, lanes, the queue and every job.

use std::path::Path;

use neap::report::page::{Cell, Chart, Course, Kind, Lane, Limit, Page, Span, Table, Unit, View};
use neap::sim::share::jobs::Job;
use neap::sim::share::result::{JobResult, Verdict};
use neap::units::Nanos;
use serde_json::Value;

use super::files::{LAYER_NAMES, stacked};
use super::{Run, remarks};
use crate::output;

/// Writes the page; `report` is what `--json` prints.
///
/// # Errors
/// When the file can't be written.
pub fn write(
    to: &Path,
    file: &Path,
    runs: &[Run],
    jobs: &[Job],
    report: Value,
) -> anyhow::Result<()> {
    let title = file.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let mut views: Vec<View> = runs.iter().map(|run| view(run, jobs)).collect();
    if runs.len() > 1 {
        views.insert(0, compared(runs));
    }
    let title = format!("{title}: {} jobs", jobs.len());
    let page = Page { title, command: "neap share", report, views, ..Page::default() };
    output::page(to, &page)
}

/// The policies beside each other.
fn compared(runs: &[Run]) -> View {
    let row = |run: &Run| {
        let f = &run.figures;
        let times = [f.makespan, f.queuing, f.completion, f.p95];
        let switches = run.outcome.switches;
        let mut row: Vec<Cell> = vec![run.name.as_str().into()];
        row.extend(times.map(Cell::from));
        row.extend([switches, f.done as u64].map(Cell::from));
        row
    };
    let table = Table {
        name: "Policies".to_owned(),
        columns: vec![
            ("policy", Kind::Text),
            ("makespan", Kind::Nanos),
            ("mean queuing", Kind::Nanos),
            ("mean completion", Kind::Nanos),
            ("95 % completion", Kind::Nanos),
            ("switches", Kind::Count),
            ("done", Kind::Count),
        ],
        rows: runs.iter().map(row).collect(),
    };
    View {
        name: "policies".to_owned(),
        about: "The same jobs under each policy; a tab for each has its memory and its jobs."
            .to_owned(),
        tables: vec![table],
        ..View::default()
    }
}

fn view(run: &Run, jobs: &[Job]) -> View {
    let mut memory = Course::new("in use", &LAYER_NAMES, &[]);
    for moment in &run.outcome.moments {
        memory.add(moment.at.0, &stacked(moment));
    }
    let both = || jobs.iter().zip(&run.outcome.jobs);
    let end = both().map(|(_, r)| r.end).max().unwrap_or_default();
    memory.end_at(end.0);
    let capacity = Limit { name: "capacity".to_owned(), value: run.settings.capacity.0 };
    let memory = Chart {
        name: "Memory of the device".to_owned(),
        course: memory,
        limits: vec![capacity],
        lanes: lanes(both().filter(|(_, r)| r.admitted.is_some())),
        ..Chart::default()
    };
    let waiting = both().map(|(j, r)| (j.submit, r.admitted.unwrap_or(r.end)));
    let there = both().filter_map(|(_, r)| Some((r.admitted?, r.end)));
    let mut course =
        Course::of_curves(&[("waiting", counted(waiting)), ("on the device", counted(there))]);
    course.end_at(end.0);
    let queue = Chart { name: "Jobs".to_owned(), unit: Unit::Count, course, ..Chart::default() };
    let mut about = format!("Policy {} under {}.", run.policy, run.mechanism);
    for remark in remarks(run, jobs) {
        about += &format!(" {remark}.");
    }
    View { name: run.name.clone(), about, charts: vec![memory, queue], tables: vec![table(both())] }
}

/// Rows of jobs on the device, from admission to end; each in the first row that is free.
fn lanes<'a>(jobs: impl Iterator<Item = (&'a Job, &'a JobResult)>) -> Vec<Lane> {
    let mut spans: Vec<Span> = jobs
        .map(|(job, result)| Span {
            name: job.name.to_string(),
            kind: "running",
            from: result.admitted.unwrap_or(result.end).0,
            until: result.end.0,
            bytes: Some(job.need.0 + job.need.1),
        })
        .collect();
    spans.sort_by_key(|span| span.from);
    let mut lanes: Vec<Lane> = Vec::new();
    for span in spans {
        let free = |lane: &Lane| lane.spans.last().is_none_or(|last| last.until <= span.from);
        match lanes.iter_mut().find(|lane| free(lane)) {
            Some(lane) => lane.spans.push(span),
            None => lanes.push(Lane { name: format!("{}", lanes.len() + 1), spans: vec![span] }),
        }
    }
    lanes
}

/// How many of some intervals hold at each time.
fn counted(intervals: impl Iterator<Item = (Nanos, Nanos)>) -> Vec<(u64, u64)> {
    let mut changes: Vec<(u64, i64)> =
        intervals.flat_map(|(from, until)| [(from.0, 1), (until.0, -1)]).collect();
    changes.sort_unstable();
    let mut now = 0i64;
    let steps = changes.chunk_by(|a, b| a.0 == b.0).map(|together| {
        now += together.iter().map(|c| c.1).sum::<i64>();
        (together[0].0, u64::try_from(now).unwrap_or(0))
    });
    steps.collect()
}

/// Every job.
fn table<'a>(jobs: impl Iterator<Item = (&'a Job, &'a JobResult)>) -> Table {
    let row = |(job, r): (&Job, &JobResult)| {
        let waited = r.admitted.unwrap_or(r.end).saturating_sub(job.submit);
        let served = if r.verdict == Verdict::Empty { Nanos::ZERO } else { r.served };
        vec![
            (*job.name).into(),
            r.verdict.word().into(),
            (job.need.0 + job.need.1).into(),
            job.submit.into(),
            waited.into(),
            r.start.into(),
            r.end.into(),
            served.into(),
            u64::from(r.switches).into(),
        ]
    };
    Table {
        name: "Every job".to_owned(),
        columns: vec![
            ("job", Kind::Text),
            ("how it ended", Kind::Text),
            ("memory", Kind::Bytes),
            ("submitted", Kind::Nanos),
            ("waited", Kind::Nanos),
            ("started", Kind::Nanos),
            ("ended", Kind::Nanos),
            ("work done", Kind::Nanos),
            ("switches", Kind::Count),
        ],
        rows: jobs.map(row).collect(),
    }
}
