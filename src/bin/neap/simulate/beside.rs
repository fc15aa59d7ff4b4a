//! `neap simulate` of a plan of several jobs, which run beside each other on one device for some
//! iterations.

use std::fmt;
use std::path::Path;

use neap::contract::{JobPlan, Plan, Window};
use neap::device::roofline::utilisation;
use neap::job::Graph;
use neap::report::curve::{Curve, Line, svg};
use neap::report::table::Table;
use neap::sim::beside::{WHOLE, Work, busy};
use neap::sim::engine::{self, Deadlock, Durations, Run};
use neap::sim::program::{Direction, Program};
use neap::sim::rounds::{self, Side};
use neap::units::{Bytes, Nanos};
use serde::Serialize;

use crate::accounting::{median, ratio};
use crate::output::{self, Answer, Ending};

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
    let placed = |(graph, job): (&Graph, &JobPlan)| Program::placed(graph, job);
    let programs = graphs.iter().zip(&plan.jobs).map(placed).collect::<Result<Vec<_>, _>>()?;
    let durations: Vec<Durations> =
        programs.iter().map(|program| Durations::nominal(program, link)).collect();
    let side = |(index, job): (usize, &JobPlan)| Side {
        work: Work {
            program: &programs[index],
            durations: &durations[index],
            utilisation: utilisation(&graphs[index].operators, &job.latencies, &plan.device),
        },
        start: Nanos::ZERO,
        iterations,
    };
    let sides: Vec<Side<'_>> = plan.jobs.iter().enumerate().map(side).collect();
    let course = rounds::run(&sides, link)?;
    let memory = rounds::memory(&programs.iter().collect::<Vec<_>>(), &course.runs);
    let report = |index: usize| -> Result<JobReport, Deadlock> {
        let (work, runs) = (&sides[index].work, &course.runs[index]);
        let sum = |of: fn(&Run) -> Nanos| runs.iter().map(|(_, run)| of(run)).sum();
        let again = work.program.steps.iter().filter(|s| s.event.is_some()).map(|s| s.time);
        let waits = course.waited.iter().filter(|wait| wait.job == index);
        let waits: Vec<Nanos> = waits.map(|wait| wait.until - wait.from).collect();
        Ok(JobReport {
            name: graphs[index].name.clone(),
            utilisation: f64::from(work.utilisation) / f64::from(WHOLE),
            arena_bytes: own_bytes(work.program, plan.jobs[index].window.as_ref()),
            alone_ns: engine::run(work.program, link, work.durations)?.iteration,
            iteration_ns: median(runs.iter().map(|(_, run)| run.iteration)),
            end_ns: runs.last().map_or(Nanos::ZERO, |(start, run)| *start + run.iteration),
            late_copies: runs.iter().map(|(_, run)| u64::from(run.late_copies)).sum(),
            swap_in_stall_ns: sum(|run| run.stalls.swap_in),
            swap_out_stall_ns: sum(|run| run.stalls.swap_out),
            tail_stall_ns: sum(|run| run.stalls.tail),
            recompute_ns: Nanos(again.sum::<Nanos>().0.saturating_mul(runs.len() as u64)),
            window_waits: waits.len(),
            window_wait_ns: waits.iter().copied().sum(),
            longest_wait: waits.iter().copied().max().unwrap_or_default(),
        })
    };
    let jobs = (0..sides.len()).map(report).collect::<Result<Vec<_>, _>>()?;
    let busy = |direction| ratio(busy(&course.carried, direction).0, course.end.0);
    let window = plan.window();
    let in_turn = |job: &JobReport| job.alone_ns.0.saturating_mul(u64::from(iterations));
    let report = Report {
        peak_bytes: engine::peak(&memory),
        budget_bytes: plan.budget,
        arena_bytes: plan.figures.arena_bytes,
        window_bytes: window.map_or(Bytes::ZERO, |w| w.bytes),
        end_ns: course.end,
        in_turn_ns: jobs.iter().map(|job| Nanos(in_turn(job))).sum(),
        h2d_busy: busy(Direction::H2d),
        d2h_busy: busy(Direction::D2h),
        jobs,
    };
    let mut ending = Ending::reporting(&report, as_json);
    ending.file(picture, |path| {
        let title = format!("{} jobs on {}", graphs.len(), plan.device.name);
        let curves = [Curve { name: "all jobs", points: &memory }];
        let lines = [Line { name: "budget", value: plan.budget }];
        output::write(path, &svg(&title, &curves, &lines)?)
    });
    ending.with(Answer::Yes)
}

/// The bytes from a job's lowest address to its highest, apart from the window.
fn own_bytes(program: &Program, window: Option<&Window>) -> Bytes {
    let own = |at: Bytes| window.is_none_or(|w| at < w.offset || at >= w.offset + w.bytes);
    let placed = program.residencies.iter().filter_map(|r| Some((r.offset?, r.bytes)));
    let placed: Vec<(Bytes, Bytes)> = placed.filter(|(at, _)| own(*at)).collect();
    let low = placed.iter().map(|(at, _)| *at).min().unwrap_or_default();
    let high = placed.iter().map(|(at, bytes)| *at + *bytes).max().unwrap_or_default();
    high - low
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

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::headed(
            "<job|of the device|sub-arena|iteration alone|beside the others|slower by|late copies",
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
