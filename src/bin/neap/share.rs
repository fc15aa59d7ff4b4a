//! `neap share`: a trace of jobs on one device, under policies and mechanisms.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use neap::report::curve::Line;
use neap::report::distribution;
use neap::report::memory::{Instant, LAYERS, Stack};
use neap::report::table::{Side, Table};
use neap::sim::share::engine::{self, Keep};
use neap::sim::share::jobs::{self, Job};
use neap::sim::share::lanes::Mode;
use neap::sim::share::latency::{Latency, latencies};
use neap::sim::share::mechanism::{self, Settings};
use neap::sim::share::memory::Memory;
use neap::sim::share::policy::{self, Policy};
use neap::sim::share::result::{Figures, Outcome, Verdict};
use neap::units::{Bytes, Nanos};
use serde_json::json;

use crate::output::{self, Answer, note};
use crate::settings;

/// Simulate many jobs on one device.
///
/// JOBS.csv has a row for each job: job, submit_s, and duration_s (alone) or iterations; by workload (looked up in --memory),
/// graph (a *.graph.json), estimate (what `neap estimate --json` wrote), or persistent_bytes and ephemeral_bytes. Optional: iteration_s,
/// utilisation, priority, kill_s (after its submission), rate_per_s (an inference job's requests); error_percent (how far an estimate may
/// be too low, asked for as a margin), actual_persistent_bytes and actual_ephemeral_bytes (what the job turns out to need at the end of its
/// iteration grows_after). Jobs slow each other down by a calibrated contention model.
#[derive(clap::Args)]
pub struct Flags {
    /// The trace of jobs.
    #[arg(value_name = "JOBS.csv")]
    jobs: PathBuf,
    /// What workloads take: workload, persistent_bytes, ephemeral_bytes; or the columns that Salus published.
    #[arg(long, value_name = "MEMORY.csv")]
    memory: Option<PathBuf>,
    /// A built-in device (`neap device list`) or a *.device.json file, for memory and link.
    #[arg(long, value_name = "NAME|FILE", default_value = "p100")]
    device: String,
    /// What jobs may have in place of the device's whole memory.
    #[arg(long, value_name = "SIZE")]
    memory_bytes: Option<Bytes>,
    /// Who goes first.
    #[arg(long, value_delimiter = ',', default_value = "fifo,srtf,pack,fair,neap", value_parser = policy::NAMES)]
    policies: Vec<String>,
    /// By which means; several are tried in turn.
    #[arg(long, value_delimiter = ',', default_value = "lanes", value_parser = ["exclusive", "static", "mps", "mps-oc", "checkpoint", "lanes"])]
    mechanism: Vec<String>,
    /// Whose rules for lanes: the paper's algorithm made right, the released code's, or ours.
    #[arg(long, default_value = "neap", value_parser = ["paper", "as-released", "neap"])]
    mode: String,
    /// What a process's context takes (static, mps, mps-oc).
    #[arg(long, value_name = "SIZE", default_value = "300MiB")]
    context: Bytes,
    /// How far the memory given may be too low, in per cent: so much more is asked for every job without an error of its own.
    #[arg(long, value_name = "PERCENT", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1000))]
    margin: u32,
    /// Equal partitions (static).
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=48))]
    partitions: u32,
    /// What is promised, in per cent of the device (mps-oc).
    #[arg(long, value_name = "PERCENT", default_value_t = 200, value_parser = clap::value_parser!(u32).range(100..=1000))]
    overcommit: u32,
    /// A turn where turns move persistent memory (fair).
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = seconds)]
    turn: Nanos,
    /// From when on a job that is there is overdue: nobody passes it any more, and under policy neap it goes first.
    #[arg(long, value_name = "SECONDS", default_value = "28800", value_parser = seconds)]
    patience: Nanos,
    /// Write a row for each job, policy and mechanism.
    #[arg(long, value_name = "FILE.csv")]
    csv: Option<PathBuf>,
    /// Draw the share of jobs that ended by a time; and beside it, as FILE.POLICY.svg, the memory of each policy over time.
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    /// Prove after every change, by a checker that shares no code with what decides, that no byte is promised twice (lanes).
    #[arg(long)]
    check: bool,
    /// Say what a job waited for.
    #[arg(long, value_name = "JOB")]
    explain: Option<String>,
}

pub fn seconds(text: &str) -> Result<Nanos, String> {
    let time = jobs::decimal(text).filter(|t| (1_000_000..=1_000_000_000_000_000_000).contains(t));
    time.map(|t| Nanos(t as u64))
        .ok_or_else(|| format!("`{text}` is not a time; give seconds from 0.001 to 1000000000"))
}

/// One policy under one mechanism.
struct Run {
    policy: &'static dyn Policy,
    mechanism: &'static str,
    settings: Settings,
    outcome: Outcome,
    figures: Figures,
    latencies: Vec<Latency>,
}

impl Run {
    fn name(&self, several: bool) -> String {
        if several {
            format!("{}, {}", self.policy.name(), self.mechanism)
        } else {
            self.policy.name().to_owned()
        }
    }
}

pub fn main(flags: &Flags, as_json: bool) -> anyhow::Result<Answer> {
    let mut inputs = vec![flags.jobs.as_path(), Path::new(&flags.device)];
    inputs.extend(flags.memory.as_deref());
    let several = flags.mechanism.len() > 1;
    let plots: Vec<PathBuf> = match &flags.plot {
        Some(plot) => flags
            .mechanism
            .iter()
            .flat_map(|m| flags.policies.iter().map(move |p| beside(plot, p, m, several)))
            .collect(),
        None => Vec::new(),
    };
    let mut outputs = vec![flags.csv.as_deref(), flags.plot.as_deref()];
    outputs.extend(plots.iter().map(|p| Some(p.as_path())));
    settings::outputs(&inputs, &outputs)?;
    let device = neap::device::profile::load(&flags.device)?;
    let capacity = flags.memory_bytes.unwrap_or(device.memory_bytes);
    if capacity == Bytes::ZERO || capacity.0 > 1 << 50 {
        bail!("--memory-bytes: {capacity} is no device; give a size up to 1PiB, such as 16GiB");
    }
    let memory = flags.memory.as_deref().map(Memory::read).transpose()?.unwrap_or_default();
    let trace = jobs::read(&flags.jobs, &memory, flags.margin)?;
    if !trace.sorted {
        note(&format!(
            "note: {}: the rows are not in order of submission; they are taken in that order",
            flags.jobs.display()
        ));
    }
    let all = &trace.jobs;
    let explained = match &flags.explain {
        None => None,
        Some(name) => {
            let at = all.iter().position(|j| *j.name == **name);
            Some(at.with_context(|| {
                format!(
                    "--explain: {} has no job `{name}`; name one of its column `job`",
                    flags.jobs.display()
                )
            })?)
        }
    };
    let mode = match flags.mode.as_str() {
        "paper" => Mode::Paper,
        "as-released" => Mode::AsReleased,
        _ => Mode::Neap,
    };
    let keep = Keep {
        moments: flags.plot.is_some(),
        reasons: explained.map(|e| e as u32),
        proof: flags.check,
    };
    let mut runs = Vec::new();
    for wanted in &flags.mechanism {
        let Some((name, mechanism)) = mechanism::NAMES.iter().find(|n| n.0 == wanted) else {
            bail!("--mechanism: there is no `{wanted}`")
        };
        let settings = Settings {
            capacity,
            h2d: device.link.h2d,
            d2h: device.link.d2h,
            memory_bandwidth: device.memory_bandwidth,
            mechanism: *mechanism,
            mode,
            context: flags.context,
            partitions: flags.partitions,
            overcommit: flags.overcommit,
            turn: flags.turn,
            patience: flags.patience,
        };
        for wanted in &flags.policies {
            let Some(policy) = policy::find(wanted) else {
                bail!("--policies: there is no `{wanted}`")
            };
            let outcome = engine::simulate(all, policy, &settings, keep);
            let figures = outcome.figures(all);
            let latencies = latencies(all, &outcome.jobs, *mechanism);
            runs.push(Run { policy, mechanism: name, settings, outcome, figures, latencies });
        }
    }
    if let Some(path) = &flags.csv {
        neap::files::write(path, |out| rows(&runs, all, out))?;
        note(&format!("written: {}", path.display()));
    }
    if let Some(path) = &flags.plot {
        draw(path, &plots, &runs, all, several)?;
    }
    let never = runs
        .iter()
        .flat_map(|r| &r.outcome.jobs)
        .any(|j| matches!(j.verdict, Verdict::NeverFits | Verdict::Outgrew))
        || runs.iter().any(|r| r.outcome.harm.is_some());
    if as_json {
        output::json(&object(&runs, all, explained))?;
    } else {
        output::data(&told(&runs, all, explained, several))?;
    }
    Ok(if never { Answer::No } else { Answer::Yes })
}

/// FILE.POLICY.svg for FILE.svg.
fn beside(plot: &Path, policy: &str, mechanism: &str, several: bool) -> PathBuf {
    if several {
        plot.with_extension(format!("{mechanism}.{policy}.svg"))
    } else {
        plot.with_extension(format!("{policy}.svg"))
    }
}

fn s(nanos: u64) -> f64 {
    nanos as f64 / 1e9
}

fn minutes(nanos: u64) -> String {
    format!("{:.1}", nanos as f64 / 6e10)
}

fn told(runs: &[Run], jobs: &[Job], explained: Option<usize>, several: bool) -> String {
    let long = runs.iter().any(|r| r.figures.makespan > 600_000_000_000);
    let time = |n: u64| if long { minutes(n) } else { format!("{:.2}", s(n)) };
    let mut table = Table::new(&[
        ("policy", Side::Left),
        ("makespan", Side::Right),
        ("queuing", Side::Right),
        ("completion", Side::Right),
        ("95 %", Side::Right),
        ("busy", Side::Right),
        ("fairness", Side::Right),
        ("switches", Side::Right),
        ("moved", Side::Right),
        ("packed", Side::Right),
        ("done", Side::Right),
    ]);
    let bytes = |b: u128| Bytes(u64::try_from(b).unwrap_or(u64::MAX)).to_string();
    for run in runs {
        let f = &run.figures;
        table.row([
            run.name(several),
            time(f.makespan),
            time(f.queuing),
            time(f.completion),
            time(f.p95),
            format!("{:.0} %", f.utilisation * 100.0),
            format!("{:.3}", f.fairness),
            run.outcome.switches.to_string(),
            bytes(run.outcome.moved),
            bytes(run.outcome.packed),
            format!("{}/{}", f.done, jobs.len()),
        ]);
    }
    let mut text = format!("times in {}\n{table}", if long { "minutes" } else { "seconds" });
    for run in runs {
        let odd: Vec<_> =
            run.outcome.jobs.iter().zip(jobs).filter(|(r, _)| r.verdict != Verdict::Done).collect();
        for (result, job) in odd.iter().take(10) {
            text += &format!("{}: {}: {}\n", run.name(several), job.name, result.verdict.word());
        }
        if odd.len() > 10 {
            text += &format!("{}: and {} more\n", run.name(several), odd.len() - 10);
        }
        let o = &run.outcome;
        if o.grew > 0 {
            text += &format!(
                "{}: {} jobs outgrew what they were admitted with, {} of them had to leave and wait\n",
                run.name(several),
                o.grew,
                o.outgrown
            );
        }
        match &o.harm {
            Some((at, why)) => {
                text += &format!("{}: not safe at {:.3} s: {why}\n", run.name(several), s(at.0))
            }
            None if o.proved > 0 => {
                text +=
                    &format!("{}: {} changes of memory proved safe\n", run.name(several), o.proved)
            }
            None => {}
        }
        if let Some((mean, p99)) = worst(&run.latencies) {
            let devices = devices(run, jobs).map_or("none".to_owned(), |d| d.to_string());
            text += &format!(
                "{}: inference: requests take {mean} in the mean, {p99} at 99 %; devices for all at once: {devices}\n",
                run.name(several)
            );
        }
    }
    if let Some(job) = explained {
        for run in runs {
            let result = &run.outcome.jobs[job];
            text += &format!(
                "\n{} under {}: {} at {:.1} s\n",
                jobs[job].name,
                run.name(several),
                result.verdict.word(),
                s(result.end.0)
            );
            for (at, why) in run.outcome.reasons.iter().take(40) {
                text += &format!("{:>12.1} s  {why}\n", s(at.0));
            }
            if run.outcome.reasons.len() > 40 {
                text +=
                    &format!("              and {} more changes\n", run.outcome.reasons.len() - 40);
            }
        }
    }
    text
}

/// The mean over all requests, and the worst job's 99th.
fn worst(all: &[Latency]) -> Option<(Nanos, Nanos)> {
    let requests: u128 = all.iter().map(|l| l.requests as u128).sum();
    let sum: u128 = all.iter().map(|l| l.requests as u128 * u128::from(l.mean.0)).sum();
    Some((Nanos(u64::try_from(sum.checked_div(requests)?).ok()?), all.iter().map(|l| l.p99).max()?))
}

fn devices(run: &Run, jobs: &[Job]) -> Option<usize> {
    run.settings.devices(jobs.iter().filter(|j| j.rate.is_some()))
}

fn object(runs: &[Run], jobs: &[Job], explained: Option<usize>) -> serde_json::Value {
    let policies: Vec<_> = runs
        .iter()
        .map(|run| {
            let (f, o) = (&run.figures, &run.outcome);
            let mut entry = json!({
                "policy": run.policy.name(),
                "mechanism": run.mechanism,
                "makespan_s": s(f.makespan),
                "mean_queuing_s": s(f.queuing),
                "mean_completion_s": s(f.completion),
                "p95_completion_s": s(f.p95),
                "utilisation": f.utilisation,
                "fairness": f.fairness,
                "switches": o.switches,
                "moved_bytes": u64::try_from(o.moved).unwrap_or(u64::MAX),
                "packed_bytes": u64::try_from(o.packed).unwrap_or(u64::MAX),
                "packs": o.packs,
                "outgrew": o.grew,
                "left_to_grow": o.outgrown,
                "done": f.done,
            });
            let odd =
                |v: Verdict| -> Vec<&str> { o.jobs.iter().zip(jobs).filter(|(r, _)| r.verdict == v).map(|(_, j)| &*j.name).collect() };
            for (key, verdict) in [
                ("killed", Verdict::Killed),
                ("never_fits", Verdict::NeverFits),
                ("outgrew_the_device", Verdict::Outgrew),
                ("nothing_to_do", Verdict::Empty),
            ] {
                entry[key] = json!(odd(verdict));
            }
            if o.proved > 0 {
                entry["proved_changes"] = json!(o.proved);
                entry["harm"] = json!(o.harm.as_ref().map(|(at, why)| json!({ "at_s": s(at.0), "why": why })));
            }
            if let Some((mean, p99)) = worst(&run.latencies) {
                let told =
                    |l: &Latency| json!({ "job": &*jobs[l.job].name, "requests": l.requests, "mean_s": s(l.mean.0), "p99_s": s(l.p99.0) });
                entry["inference"] = json!({
                    "mean_s": s(mean.0),
                    "worst_p99_s": s(p99.0),
                    "devices": devices(run, jobs),
                    "jobs": run.latencies.iter().map(told).collect::<Vec<_>>(),
                });
            }
            if let Some(job) = explained {
                let why = |(at, text): &(Nanos, String)| json!({ "at_s": s(at.0), "what": text });
                entry["explained"] = json!({ "job": &*jobs[job].name, "why": o.reasons.iter().map(why).collect::<Vec<_>>() });
            }
            entry
        })
        .collect();
    json!({ "jobs": jobs.len(), "capacity_bytes": runs.first().map_or(0, |r| r.settings.capacity.0), "policies": policies })
}

fn rows(runs: &[Run], jobs: &[Job], out: &mut dyn std::io::Write) -> std::io::Result<()> {
    let mut rows = csv::Writer::from_writer(out);
    let times = |t: Nanos| format!("{}.{:09}", t.0 / 1_000_000_000, t.0 % 1_000_000_000);
    rows.write_record([
        "policy",
        "mechanism",
        "job",
        "verdict",
        "submit_s",
        "start_s",
        "end_s",
        "work_s",
        "served_s",
        "switches",
    ])?;
    for run in runs {
        for (job, result) in jobs.iter().zip(&run.outcome.jobs) {
            rows.write_record([
                run.policy.name(),
                run.mechanism,
                &job.name,
                result.verdict.word(),
                &times(job.submit),
                &result.start.map(times).unwrap_or_default(),
                &times(result.end),
                &times(job.work),
                &times(result.served),
                &result.switches.to_string(),
            ])?;
        }
    }
    rows.flush()
}

fn draw(
    path: &Path,
    plots: &[PathBuf],
    runs: &[Run],
    jobs: &[Job],
    several: bool,
) -> anyhow::Result<()> {
    let ends: Vec<(String, Vec<Nanos>)> = runs
        .iter()
        .map(|run| {
            let done =
                run.outcome.jobs.iter().zip(jobs).filter(|(r, _)| r.verdict == Verdict::Done);
            let mut times: Vec<Nanos> = done.map(|(r, j)| r.end.saturating_sub(j.submit)).collect();
            times.sort_unstable();
            (run.name(several), times)
        })
        .collect();
    let series: Vec<(&str, &[Nanos])> =
        ends.iter().map(|(name, times)| (name.as_str(), times.as_slice())).collect();
    let drawn = distribution::svg(
        &format!("{} jobs: time from submission to end", jobs.len()),
        "time from submission to end",
        &series,
    )?;
    neap::files::write(path, |out| out.write_all(drawn.as_bytes()))?;
    note(&format!("written: {}", path.display()));
    for (run, path) in runs.iter().zip(plots) {
        let end = run.outcome.moments.last().map_or(Nanos::ZERO, |m| m.at);
        let mut stack = Stack::new(end);
        for moment in &run.outcome.moments {
            let mut layers = [0; LAYERS];
            layers[0] = moment.persistent.0;
            // Lanes by rank of their number: the longest-lived lowest.
            for (rank, (_, size)) in moment.lanes.iter().enumerate() {
                layers[(rank + 1).min(LAYERS - 1)] += size.0;
            }
            stack.add(Instant { time: moment.at, layers, reserved: layers.iter().sum() });
        }
        let names = [
            "persistent",
            "1st lane",
            "2nd lane",
            "3rd lane",
            "4th lane",
            "5th lane",
            "6th lane",
            "further lanes",
        ];
        let lines = [Line { name: "capacity", value: run.settings.capacity }];
        let title = format!("{} jobs, policy {}, {}", jobs.len(), run.policy.name(), run.mechanism);
        let drawn = stack.svg(&title, &names, &lines, &[])?;
        neap::files::write(path, |out| out.write_all(drawn.as_bytes()))?;
        note(&format!("written: {}", path.display()));
    }
    Ok(())
}
