//! `neap simulate` of a plan of several jobs, which run beside each other on one device for some
//! iterations.

use std::fmt;
use std::path::Path;

use neap::contract::Plan;
use neap::device::roofline;
use neap::job::Graph;
use neap::report::curve::{Curve, Line, svg};
use neap::report::table::{Side, Table};
use neap::sim::beside::{Shared, WHOLE, Work};
use neap::sim::engine::{self, Durations, Run};
use neap::sim::program::{Direction, Program};
use neap::sim::rounds;
use neap::units::{Bytes, Nanos};
use serde::Serialize;

use crate::accounting::ratio;
use crate::output::{self, Answer, Ending};

/// A job's simulation beside the others.
struct Seen {
    name: String,
    utilisation: u32,
    arena: Bytes,
    /// Time of its iteration alone on the device.
    alone: Nanos,
    /// Time of the operators that it runs again in an iteration.
    again: Nanos,
    /// Start and run of each iteration beside the others.
    runs: Vec<(Nanos, Run)>,
    /// Length of each wait for the window.
    waits: Vec<Nanos>,
}

impl Seen {
    /// The median of its iteration times.
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

/// Simulates and reports. Every job runs `iterations` iterations and ends.
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
            again: program.steps.iter().filter(|s| s.event.is_some()).map(|s| s.time).sum(),
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
    let memory = rounds::memory(&programs.iter().collect::<Vec<_>>(), &runs);
    let busy = |direction| {
        let all: Nanos = device
            .carried
            .iter()
            .filter(|c| c.direction == direction)
            .map(|c| c.end - c.start)
            .sum();
        ratio(all.0, device.now().0)
    };
    let window = plan.jobs.iter().find_map(|job| job.window.as_ref());
    let in_turn = |job: &Seen| Nanos(job.alone.0.saturating_mul(job.runs.len() as u64));
    let report = Report {
        jobs: seen.iter().map(JobReport::of).collect(),
        peak_bytes: engine::peak(&memory),
        budget_bytes: plan.budget,
        arena_bytes: plan.figures.arena_bytes,
        window_bytes: window.map_or(Bytes::ZERO, |w| w.bytes),
        end_ns: seen.iter().map(Seen::end).max().unwrap_or_default(),
        in_turn_ns: seen.iter().map(in_turn).sum(),
        h2d_busy: busy(Direction::H2d),
        d2h_busy: busy(Direction::D2h),
    };
    let mut ending = Ending::default();
    ending.then(|| output::report(&report, as_json));
    if let Some(path) = picture {
        let title = format!("{} jobs on {}", graphs.len(), plan.device.name);
        let curves = [Curve { name: "all jobs", points: &memory }];
        let lines = [Line { name: "budget", value: plan.budget }];
        ending.then(|| output::write(path, &svg(&title, &curves, &lines)?));
    }
    ending.with(Answer::Yes)
}

/// Jobs of a plan beside each other.
#[derive(Serialize)]
struct Report {
    jobs: Vec<JobReport>,
    /// The largest sum of resident bytes.
    peak_bytes: Bytes,
    budget_bytes: Bytes,
    arena_bytes: Bytes,
    window_bytes: Bytes,
    end_ns: Nanos,
    /// The time of the same iterations one after the other.
    in_turn_ns: Nanos,
    h2d_busy: f64,
    d2h_busy: f64,
}

#[derive(Serialize)]
struct JobReport {
    name: String,
    /// The share of the device that its operators use.
    utilisation: f64,
    arena_bytes: Bytes,
    alone_ns: Nanos,
    iteration_ns: Nanos,
    end_ns: Nanos,
    late_copies: u64,
    /// Waiting in all iterations, as in the simulation of one job.
    swap_in_stall_ns: Nanos,
    swap_out_stall_ns: Nanos,
    tail_stall_ns: Nanos,
    /// Running operators again, in all iterations.
    recompute_ns: Nanos,
    window_waits: usize,
    window_wait_ns: Nanos,
    #[serde(skip)]
    longest_wait: Nanos,
}

impl JobReport {
    fn of(job: &Seen) -> Self {
        let sum = |of: fn(&Run) -> Nanos| job.runs.iter().map(|(_, run)| of(run)).sum();
        Self {
            name: job.name.clone(),
            utilisation: f64::from(job.utilisation) / f64::from(WHOLE),
            arena_bytes: job.arena,
            alone_ns: job.alone,
            iteration_ns: job.median(),
            end_ns: job.end(),
            late_copies: job.late(),
            swap_in_stall_ns: sum(|run| run.stalls.swap_in),
            swap_out_stall_ns: sum(|run| run.stalls.swap_out),
            tail_stall_ns: sum(|run| run.stalls.tail),
            recompute_ns: Nanos(job.again.0.saturating_mul(job.runs.len() as u64)),
            window_waits: job.waits.len(),
            window_wait_ns: job.waits.iter().copied().sum(),
            longest_wait: job.waits.iter().copied().max().unwrap_or_default(),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let heads = [
            "job",
            "of the device",
            "sub-arena",
            "iteration alone",
            "beside the others",
            "slower by",
            "late copies",
        ];
        let mut table = Table::new(
            &heads.map(|head| (head, if head == "job" { Side::Left } else { Side::Right })),
        );
        for (index, job) in self.jobs.iter().enumerate() {
            table.row([
                format!("{index} {}", job.name),
                format!("{:.1} %", job.utilisation * 100.0),
                job.arena_bytes.to_string(),
                job.alone_ns.to_string(),
                job.iteration_ns.to_string(),
                format!("{:.3}", ratio(job.iteration_ns.0, job.alone_ns.0)),
                job.late_copies.to_string(),
            ]);
        }
        writeln!(
            f,
            "{table}\nall ended after {}, {} one after another; largest sum of resident bytes {} \
             ({} bytes) of a budget of {}\n\
             the link was busy {:.1} % of the time to the device and {:.1} % from it",
            self.end_ns,
            self.in_turn_ns,
            self.peak_bytes,
            self.peak_bytes.0,
            self.budget_bytes,
            self.h2d_busy * 100.0,
            self.d2h_busy * 100.0
        )?;
        if self.window_bytes == Bytes::ZERO {
            return Ok(());
        }
        let window = self.window_bytes;
        writeln!(f, "window {window} ({} bytes), held in turn:", window.0)?;
        for (index, job) in self.jobs.iter().enumerate() {
            let (waited, longest) = (job.window_wait_ns, job.longest_wait);
            match job.window_waits {
                0 => writeln!(f, "  job {index} never waited for it")?,
                1 => writeln!(f, "  job {index} waited for it once, {waited}")?,
                times => writeln!(
                    f,
                    "  job {index} waited for it {times} times, {waited} in all and {longest} at \
                     most"
                )?,
            }
        }
        Ok(())
    }
}
