//! `neap simulate` for a plan of several jobs: side by side on one device, for some iterations.

use std::path::Path;

use neap::contract::Plan;
use neap::device::roofline;
use neap::job::Graph;
use neap::report::curve::{Curve, Line, svg};
use neap::report::table::{Side, Table};
use neap::sim::engine::{self, Durations, Run};
use neap::sim::joint;
use neap::sim::program::{Direction, Program};
use neap::sim::together::{Shared, WHOLE, Work};
use neap::units::{Bytes, Nanos};
use serde_json::json;

use crate::output::{self, Answer, note};
use crate::simulate::ratio;

/// A job among others.
struct Seen {
    name: String,
    utilisation: u32,
    arena: Bytes,
    /// Its iteration when it has the device to itself.
    alone: Nanos,
    /// Start and course of each iteration beside the others.
    runs: Vec<(Nanos, Run)>,
    /// How long each wait for the window took.
    waits: Vec<Nanos>,
}

impl Seen {
    /// The middle of its iterations' times.
    fn median(&self) -> Nanos {
        let mut times: Vec<Nanos> = self.runs.iter().map(|(_, run)| run.iteration).collect();
        times.sort_unstable();
        times.get(times.len() / 2).copied().unwrap_or_default()
    }

    fn end(&self) -> Nanos {
        self.runs.last().map_or(Nanos::ZERO, |(start, run)| *start + run.iteration)
    }

    fn late(&self) -> u64 {
        self.runs.iter().map(|(_, run)| u64::from(run.late_copies)).sum()
    }
}

/// Simulates and reports. Every job runs `iterations` and leaves.
///
/// # Errors
/// When a picture can't be written.
pub fn main(
    plan: &Plan,
    graphs: &[Graph],
    iterations: u32,
    picture: Option<&Path>,
    as_json: bool,
) -> anyhow::Result<Answer> {
    let link = &plan.device.link;
    let programs = graphs
        .iter()
        .zip(&plan.jobs)
        .map(|(graph, job)| Program::placed(graph, job))
        .collect::<Result<Vec<_>, _>>()?;
    let durations: Vec<Durations> =
        programs.iter().map(|program| Durations::nominal(program, link)).collect();
    let mut seen = Vec::with_capacity(programs.len());
    for (index, program) in programs.iter().enumerate() {
        let (graph, job) = (&graphs[index], &plan.jobs[index]);
        let own = |offset: Bytes| {
            job.window.as_ref().is_none_or(|w| offset < w.offset || offset >= w.offset + w.bytes)
        };
        let placed = program.residencies.iter().filter_map(|r| Some((r.offset?, r.bytes)));
        let extent = placed
            .filter(|(offset, _)| own(*offset))
            .map(|(offset, bytes)| (offset, offset + bytes));
        let (low, high) = extent
            .fold((Bytes(u64::MAX), Bytes::ZERO), |(low, high), (start, end)| {
                (low.min(start), high.max(end))
            });
        seen.push(Seen {
            name: graph.name.clone(),
            utilisation: roofline::utilisation(&graph.operators, &job.latencies, &plan.device),
            arena: high.saturating_sub(low),
            alone: engine::run(program, link, &durations[index])?.iteration,
            runs: Vec::new(),
            waits: Vec::new(),
        });
    }
    let mut device = Shared::new(link);
    let work = |index: usize, seen: &Seen| Work {
        program: &programs[index],
        durations: &durations[index],
        utilisation: seen.utilisation,
    };
    for (index, job) in seen.iter().enumerate() {
        device.begin(index, work(index, job));
    }
    while let Some((index, run)) = device.until(Nanos(u64::MAX))? {
        let job = &mut seen[index];
        job.runs.push((device.now() - run.iteration, run));
        if job.runs.len() < iterations as usize {
            device.begin(index, work(index, job));
        }
    }
    for wait in &device.waited {
        seen[wait.job].waits.push(wait.until - wait.from);
    }
    let runs: Vec<&[(Nanos, Run)]> = seen.iter().map(|job| &*job.runs).collect();
    let memory = joint::memory(&programs.iter().collect::<Vec<_>>(), &runs);
    if let Some(path) = picture {
        let title = format!("{} jobs on {}", graphs.len(), plan.device.name);
        let curves = [Curve { name: "all jobs", points: &memory }];
        let drawing = svg(&title, &curves, &[Line { name: "budget", value: plan.budget }])?;
        neap::files::write(path, |f| f.write_all(drawing.as_bytes()))?;
        note(&format!("written: {}", path.display()));
    }
    let busy = |direction| {
        let all: Nanos = device
            .carried
            .iter()
            .filter(|c| c.direction == direction)
            .map(|c| c.end - c.start)
            .sum();
        ratio(all.0, device.now().0)
    };
    let busy = (busy(Direction::H2d), busy(Direction::D2h));
    report(plan, &seen, engine::peak(&memory), busy, as_json)
}

fn report(
    plan: &Plan,
    seen: &[Seen],
    peak: Bytes,
    busy: (f64, f64),
    as_json: bool,
) -> anyhow::Result<Answer> {
    let end = seen.iter().map(Seen::end).max().unwrap_or_default();
    let in_turn: Nanos =
        seen.iter().map(|job| Nanos(job.alone.0.saturating_mul(job.runs.len() as u64))).sum();
    let window = plan.jobs.iter().find_map(|job| job.window.as_ref());
    if as_json {
        let job = |job: &Seen| {
            json!({
                "name": job.name,
                "utilisation": f64::from(job.utilisation) / f64::from(WHOLE),
                "arena_bytes": job.arena,
                "alone_ns": job.alone,
                "iteration_ns": job.median(),
                "end_ns": job.end(),
                "late_copies": job.late(),
                "window_waits": job.waits.len(),
                "window_wait_ns": job.waits.iter().copied().sum::<Nanos>(),
            })
        };
        return output::json(&json!({
            "jobs": seen.iter().map(job).collect::<Vec<_>>(),
            "peak_bytes": peak,
            "budget_bytes": plan.budget,
            "arena_bytes": plan.figures.arena_bytes,
            "window_bytes": window.map_or(Bytes::ZERO, |w| w.bytes),
            "end_ns": end,
            "in_turn_ns": in_turn,
            "h2d_busy": busy.0,
            "d2h_busy": busy.1,
        }))
        .map(|()| Answer::Yes);
    }
    let heads = [
        "job",
        "of the device",
        "sub-arena",
        "iteration alone",
        "beside the others",
        "slower by",
        "late copies",
    ];
    let mut table =
        Table::new(&heads.map(|head| (head, if head == "job" { Side::Left } else { Side::Right })));
    for (index, job) in seen.iter().enumerate() {
        table.row([
            format!("{index} {}", job.name),
            format!("{} %", f64::from(job.utilisation) / 10.0),
            job.arena.to_string(),
            job.alone.to_string(),
            job.median().to_string(),
            format!("{:.3}", ratio(job.median().0, job.alone.0)),
            job.late().to_string(),
        ]);
    }
    let mut shared = String::new();
    if let Some(window) = window {
        shared = format!("\nwindow {} ({} bytes), held in turn:", window.bytes, window.bytes.0);
        for (index, job) in seen.iter().enumerate() {
            let (waited, longest) = (
                job.waits.iter().copied().sum::<Nanos>(),
                job.waits.iter().copied().max().unwrap_or_default(),
            );
            shared += &match job.waits.len() {
                0 => format!("\n  job {index} never waited for it"),
                1 => format!("\n  job {index} waited for it once, {waited}"),
                times => format!(
                    "\n  job {index} waited for it {times} times, {waited} in all and {longest} at most"
                ),
            };
        }
    }
    output::data(&format!(
        "{table}\nall ended after {end}, {in_turn} one after another; largest sum of resident bytes {peak} ({} bytes) of a budget of {}\n\
         the link was busy {:.1} % of the time to the device and {:.1} % from it{shared}",
        peak.0,
        plan.budget,
        busy.0 * 100.0,
        busy.1 * 100.0
    ))
    .map(|()| Answer::Yes)
}
