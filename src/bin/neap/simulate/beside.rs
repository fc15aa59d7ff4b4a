//! `neap simulate` of a plan of several jobs, which run beside each other on one device for some
//! iterations.

use std::path::Path;

use neap::contract::{JobPlan, Plan, Window};
use neap::device::roofline::utilisation;
use neap::job::Graph;
use neap::report::curve::{Curve, Line, svg};
use neap::report::table::Table;
use neap::sim::beside::{WHOLE, Work, busy};
use neap::sim::engine::{self, Deadlock, Durations, Run};
use neap::sim::program::Program;
use neap::sim::rounds::{self, Course, Side};
use neap::units::{Bytes, Nanos};
use serde_json::{Value, json};

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
    let mut ending = Ending::printing(&report(plan, graphs, &sides, &course, &memory)?, as_json);
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

/// What is printed: figures and text.
fn report(
    plan: &Plan,
    graphs: &[Graph],
    sides: &[Side<'_>],
    course: &Course,
    memory: &[(Nanos, Bytes)],
) -> Result<(Value, String), Deadlock> {
    let mut table = Table::headed(
        "<job|of the device|sub-arena|iteration alone|beside the others|slower by|late copies",
    );
    let (mut jobs, mut waiting, mut in_turn) = (Vec::new(), String::new(), Nanos::ZERO);
    for (index, (side, runs)) in sides.iter().zip(&course.runs).enumerate() {
        let (work, name) = (&side.work, &graphs[index].name);
        let alone = engine::run(work.program, &plan.device.link, work.durations)?.iteration;
        in_turn += Nanos(alone.0.saturating_mul(u64::from(side.iterations)));
        let iteration = median(runs.iter().map(|(_, run)| run.iteration));
        let late: u64 = runs.iter().map(|(_, run)| u64::from(run.late_copies)).sum();
        let arena = own_bytes(work.program, plan.jobs[index].window.as_ref());
        let used = f64::from(work.utilisation) / f64::from(WHOLE);
        table.row([
            format!("{index} {name}"),
            format!("{:.1} %", used * 100.0),
            arena.to_string(),
            alone.to_string(),
            iteration.to_string(),
            format!("{:.3}", ratio(iteration.0, alone.0)),
            late.to_string(),
        ]);
        let waits = course.waited.iter().filter(|wait| wait.job == index);
        let waits: Vec<Nanos> = waits.map(|wait| wait.until - wait.from).collect();
        let (waited, longest): (Nanos, _) = (waits.iter().copied().sum(), waits.iter().max());
        waiting += &match (waits.len(), longest) {
            (0, _) | (_, None) => format!("  job {index} never waited for it\n"),
            (1, _) => format!("  job {index} waited for it once, {waited}\n"),
            (times, Some(longest)) => format!(
                "  job {index} waited for it {times} times, {waited} in all and {longest} at most\n"
            ),
        };
        let sum = |of: fn(&Run) -> Nanos| -> Nanos { runs.iter().map(|(_, run)| of(run)).sum() };
        let again = work.program.steps.iter().filter(|s| s.event.is_some()).map(|s| s.time);
        let again = Nanos(again.sum::<Nanos>().0.saturating_mul(runs.len() as u64));
        let end = runs.last().map_or(Nanos::ZERO, |(start, run)| *start + run.iteration);
        // Stalls and recomputes are those of all iterations, as in the simulation of one job.
        jobs.push(json!({
            "name": name,
            "utilisation": used,
            "arena_bytes": arena,
            "alone_ns": alone,
            "iteration_ns": iteration,
            "end_ns": end,
            "late_copies": late,
            "swap_in_stall_ns": sum(|run| run.stalls.swap_in),
            "swap_out_stall_ns": sum(|run| run.stalls.swap_out),
            "tail_stall_ns": sum(|run| run.stalls.tail),
            "recompute_ns": again,
            "window_waits": waits.len(),
            "window_wait_ns": waited,
        }));
    }
    let [up, down] = busy(&course.carried).map(|busy| ratio(busy.0, course.end.0));
    let (peak, budget, end) = (engine::peak(memory), plan.budget, course.end);
    let mut text = format!(
        "{table}\nall ended after {end}, {in_turn} one after another; largest sum of resident bytes \
         {peak} ({} bytes) of a budget of {budget}\n\
         the link was busy {:.1} % of the time to the device and {:.1} % from it\n",
        peak.0,
        up * 100.0,
        down * 100.0
    );
    let window = plan.window().map_or(Bytes::ZERO, |window| window.bytes);
    if window > Bytes::ZERO {
        text += &format!("window {window} ({} bytes), held in turn:\n{waiting}", window.0);
    }
    let figures = json!({
        "jobs": jobs,
        "peak_bytes": peak,
        "budget_bytes": budget,
        "arena_bytes": plan.figures.arena_bytes,
        "window_bytes": window,
        "end_ns": end,
        "in_turn_ns": in_turn,
        "h2d_busy": up,
        "d2h_busy": down,
    });
    Ok((figures, text))
}
