//! The files of `neap share`: a row for each job, drawings, memory over time, a timeline.

use std::path::{Path, PathBuf};

use neap::report::curve::Line;
use neap::report::distribution;
use neap::report::memory::{Instant, LAYERS, Stack};
use neap::report::timeline::{Span, Value, Writer};
use neap::sim::share::jobs::Job;
use neap::sim::share::result::{JobResult, Moment, Verdict};
use neap::units::Nanos;

use super::Run;
use crate::output;

/// Writes the memory in use and the number of jobs at every change of the one run.
pub fn curve(path: &Path, runs: &[Run]) -> anyhow::Result<()> {
    let heads = "time_ns,persistent_bytes,lanes_bytes,lanes,running,waiting";
    let row = |moment: &Moment| {
        let (at, persistent, lanes) = (moment.at.0, moment.persistent.0, moment.in_lanes().0);
        let (running, waiting) = (moment.running as u64, moment.waiting as u64);
        [at, persistent, lanes, moment.lanes.len() as u64, running, waiting].map(|n| n.to_string())
    };
    let moments = runs.iter().flat_map(|run| &run.outcome.moments);
    output::csv(path, heads.split(','), moments.map(row))
}

/// Writes the one run as a timeline: a track for each job, and the device's memory.
pub fn timeline(path: &Path, runs: &[Run], jobs: &[Job]) -> anyhow::Result<()> {
    neap::files::write(path, |f| {
        let mut writer = Writer::new(f)?;
        for run in runs {
            let (device, []) = writer.process(&format!("device, {}", run.name), [])?;
            for moment in &run.outcome.moments {
                let values = [
                    ("persistent_bytes", moment.persistent.0),
                    ("lanes_bytes", moment.in_lanes().0),
                ];
                writer.counter(device, "memory", moment.at, &values)?;
            }
            let mut stretches = run.outcome.stretches.clone();
            stretches.sort_by_key(|stretch| (stretch.job, stretch.from));
            for of in stretches.chunk_by(|a, b| a.job == b.job) {
                let job = &jobs[of[0].job as usize];
                let (_, [track]) = writer.process(&job.name, ["job"])?;
                let (persistent, ephemeral) = (job.need.0.0, job.need.1.0);
                let args = [
                    ("persistent_bytes", Value::Number(persistent)),
                    ("ephemeral_bytes", Value::Number(ephemeral)),
                ];
                for stretch in of {
                    let (start, duration) = (stretch.from, stretch.to - stretch.from);
                    let name = stretch.doing.word();
                    writer.span(track, &Span { name, start, duration, args: &args })?;
                }
            }
        }
        writer.finish().map(|_| ())
    })?;
    output::written(path);
    Ok(())
}

/// Writes a row for each job of each run.
pub fn rows<'r>(path: &Path, runs: &'r [Run], jobs: &[Job]) -> anyhow::Result<()> {
    let times = |t: Nanos| format!("{}.{:09}", t.0 / 1_000_000_000, t.0 % 1_000_000_000);
    let heads = "policy,mechanism,job,verdict,submit_s,admitted_s,start_s,end_s,work_s,served_s,\
                 switches";
    let row = |(run, (job, result)): (&Run, (&Job, &JobResult))| {
        [
            run.policy.to_owned(),
            run.mechanism.to_owned(),
            job.name.to_string(),
            result.verdict.word().to_owned(),
            times(job.submit),
            result.admitted.map(times).unwrap_or_default(),
            result.start.map(times).unwrap_or_default(),
            times(result.end),
            times(job.work),
            times(result.served),
            result.switches.to_string(),
        ]
    };
    let of = |run: &'r Run| jobs.iter().zip(&run.outcome.jobs).map(move |both| (run, both));
    output::csv(path, heads.split(','), runs.iter().flat_map(of).map(row))
}

/// What pictures and pages call the layers of memory.
pub const LAYER_NAMES: [&str; LAYERS] = [
    "persistent",
    "1st lane",
    "2nd lane",
    "3rd lane",
    "4th lane",
    "5th lane",
    "6th lane",
    "further lanes",
];

/// The bytes of each layer of memory: lanes by rank of their number, the longest-lived lowest.
pub fn stacked(moment: &Moment) -> [u64; LAYERS] {
    let mut layers = [0; LAYERS];
    layers[0] = moment.persistent.0;
    for (rank, (_, size)) in moment.lanes.iter().enumerate() {
        layers[(rank + 1).min(LAYERS - 1)] += size.0;
    }
    layers
}

/// Draws when jobs end, and each run's memory over time.
pub fn draw(path: &Path, plots: &[PathBuf], runs: &[Run], jobs: &[Job]) -> anyhow::Result<()> {
    let times = |run: &Run| {
        let done = run.outcome.jobs.iter().zip(jobs).filter(|(r, _)| r.verdict == Verdict::Done);
        let mut times: Vec<Nanos> = done.map(|(r, j)| r.end.saturating_sub(j.submit)).collect();
        times.sort_unstable();
        (run.name.clone(), times)
    };
    let (count, what) = (jobs.len(), "time from submission to end");
    let series: Vec<_> = runs.iter().map(times).collect();
    output::write(path, &distribution::svg(&format!("{count} jobs: {what}"), what, &series)?)?;
    for (run, path) in runs.iter().zip(plots) {
        let end = run.outcome.moments.last().map_or(Nanos::ZERO, |m| m.at);
        let mut stack = Stack::new(end);
        for moment in &run.outcome.moments {
            let layers = stacked(moment);
            stack.add(Instant { time: moment.at, layers, reserved: layers.iter().sum() });
        }
        let lines = [Line { name: "capacity", value: run.settings.capacity }];
        let title = format!("{count} jobs, policy {}, {}", run.policy, run.mechanism);
        output::write(path, &stack.svg(&title, &LAYER_NAMES, &lines, &[])?)?;
    }
    Ok(())
}
