//! `neap share`: a trace of jobs on one device, under policies and mechanisms.

mod files;
mod page;

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use neap::device::profile::{self, Profile};
use neap::report::table::Table;
use neap::sim::share::courses;
use neap::sim::share::engine::{self, Keep};
use neap::sim::share::events::{self, Log};
use neap::sim::share::jobs::{self, Job};
use neap::sim::share::lanes::Mode;
use neap::sim::share::latency::{Latency, latencies};
use neap::sim::share::mechanism::{self, Mechanism, Settings};
use neap::sim::share::memory;
use neap::sim::share::policy::{self, Policy};
use neap::sim::share::replay;
use neap::sim::share::result::{Figures, JobResult, Outcome, Verdict};
use neap::units::{Bytes, Nanos, saturated};
use serde_json::{Value, json};

use crate::output::{Answer, Ending, note};
use crate::settings::Outputs;
use crate::settings::values::{named, policy, seconds};

/// The rules for lanes by name.
const MODES: [(&str, Mode); 3] =
    [("paper", Mode::Paper), ("as-released", Mode::AsReleased), ("neap", Mode::Neap)];

/// Simulate many jobs on one device.
///
/// JOBS.csv has a row for each job: its name (job), submit_s, and duration_s (alone) or iterations.
/// Its memory is given by workload (looked up in --memory), by graph (a *.graph.json), by estimate
/// (a file that `neap estimate --json` wrote), or by persistent_bytes and ephemeral_bytes. Optional
/// columns: iteration_s, utilisation, priority, kill_s (after submission), rate_per_s (requests to
/// an inference job); error_percent (by how much an estimate may be too low, added as a margin),
/// actual_persistent_bytes and actual_ephemeral_bytes (the job's need from the end of iteration
/// grows_after on). Jobs slow each other down by a calibrated contention model.
///
/// LOG.jsonl is what `neap torch --serve --log` wrote. The scripts are the jobs, each with the
/// iterations, memory and time of coming that were logged, on a device of the server's budget.
/// Under the mechanism `lanes` the server's own decisions are replayed for each policy; under
/// another one memory stays, and no script slows another one, since times were measured side by
/// side. What really happened is a row besides, `logged`.
#[derive(clap::Args)]
pub struct Flags {
    /// The trace of jobs, or the log of a server.
    #[arg(value_name = "JOBS.csv|LOG.jsonl")]
    jobs: PathBuf,
    /// The memory of workloads: columns workload, persistent_bytes, ephemeral_bytes; or the columns
    /// that Salus published.
    #[arg(long, value_name = "MEMORY.csv")]
    memory: Option<PathBuf>,
    /// A built-in device (`neap device list`) or a *.device.json file, for memory and link.
    #[arg(long, value_name = "NAME|FILE", default_value = "p100")]
    device: String,
    /// The memory that jobs share, in place of the device's whole memory.
    #[arg(long, value_name = "SIZE")]
    memory_bytes: Option<Bytes>,
    /// The policies that decide which job goes first; several are simulated one after the other.
    #[arg(long, value_delimiter = ',', default_values = policy::names(), value_parser = policy())]
    policies: Vec<&'static Policy>,
    /// The mechanisms by which jobs share the device; several are simulated one after the other.
    #[arg(long, value_delimiter = ',', default_value = "lanes",
          value_parser = named(&mechanism::NAMES))]
    mechanism: Vec<(&'static str, Mechanism)>,
    /// The rules for lanes: of Salus's paper, with the gaps of its algorithm closed (srtf and fair
    /// decide in each of several lanes); of its released code, as the scripts of the published runs
    /// set it up; or neap's own (srtf and fair have one lane).
    #[arg(long, default_value = "neap", value_parser = named(&MODES))]
    mode: (&'static str, Mode),
    /// The memory of a process's context (static, mps, mps-oc).
    #[arg(long, value_name = "SIZE", default_value = "300MiB")]
    context: Bytes,
    /// By how many per cent the given memory may be too low: a margin for every job that has no
    /// error of its own.
    #[arg(long, value_name = "PERCENT", default_value_t = 0,
          value_parser = clap::value_parser!(u32).range(0..=1000))]
    margin: u32,
    /// Number of equal partitions (static).
    #[arg(long, value_name = "N", default_value_t = 2,
          value_parser = clap::value_parser!(u32).range(1..=48))]
    partitions: u32,
    /// The memory that is promised, in per cent of the device (mps-oc).
    #[arg(long, value_name = "PERCENT", default_value_t = 200,
          value_parser = clap::value_parser!(u32).range(100..=1000))]
    overcommit: u32,
    /// Length of a turn where turns move persistent memory (fair).
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = seconds)]
    turn: Nanos,
    /// How long a job waits until it is overdue. Then no job passes it, and under policy neap it
    /// goes first.
    #[arg(long, value_name = "SECONDS", default_value = "28800", value_parser = seconds)]
    patience: Nanos,
    /// Write a row for each job, policy and mechanism.
    #[arg(long, value_name = "FILE.csv")]
    csv: Option<PathBuf>,
    /// Draw the share of jobs that have ended by each time, and as FILE.POLICY.svg each policy's
    /// memory over time.
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    /// Write the memory in use and the number of jobs at every change; for one policy and
    /// mechanism.
    #[arg(long, value_name = "FILE.csv")]
    curve: Option<PathBuf>,
    /// Write a timeline of all jobs and of the memory in Chrome's trace format
    /// (<https://ui.perfetto.dev>); for one policy and mechanism.
    #[arg(long, value_name = "FILE.json")]
    timeline: Option<PathBuf>,
    /// Write a page to look at in a browser: for each policy memory, jobs and queue over time, to
    /// zoom, and a table of all jobs.
    #[arg(long, value_name = "FILE.html")]
    html: Option<PathBuf>,
    /// Prove after every change that no byte is promised twice (lanes). The checker shares no code
    /// with the policies.
    #[arg(long)]
    check: bool,
    /// Print why a job waited.
    #[arg(long, value_name = "JOB")]
    explain: Option<String>,
}

/// A simulation of one policy under one mechanism.
struct Run {
    /// The policy, and the mechanism if there are several.
    name: String,
    policy: &'static str,
    mechanism: &'static str,
    settings: Settings,
    outcome: Outcome,
    figures: Figures,
    latencies: Vec<Latency>,
    /// The number of devices that hold all inference jobs at once.
    devices: Option<usize>,
}

pub fn main(flags: &Flags, as_json: bool) -> anyhow::Result<Answer> {
    let plots = plots(flags);
    let mut inputs = vec![flags.jobs.as_path(), Path::new(&flags.device)];
    inputs.extend(flags.memory.as_deref());
    let one = [("--curve", &flags.curve), ("--timeline", &flags.timeline)];
    if let Some((flag, _)) = one.iter().find(|(_, file)| file.is_some())
        && flags.policies.len() * flags.mechanism.len() > 1
    {
        bail!(
            "{flag} writes one file for one run; name one policy and one mechanism, such as \
             `--policies pack`"
        );
    }
    let mut outputs = vec![&flags.csv, &flags.plot, &flags.html, &flags.curve, &flags.timeline]
        .into_iter()
        .map(Option::as_deref)
        .collect::<Vec<_>>();
    outputs.extend(plots.iter().map(|p| Some(p.as_path())));
    let outputs = Outputs::new(&inputs, &outputs)?;
    let device = profile::load(&flags.device)?;
    let log = events::is_log(&flags.jobs).then(|| events::read(&flags.jobs)).transpose()?;
    let lanes = flags.mechanism.iter().any(|(_, mechanism)| *mechanism == Mechanism::Lanes);
    if log.is_some() && lanes && flags.explain.is_some() {
        bail!("--explain follows no log in lanes; name another mechanism, or a table of jobs");
    }
    let whole = log.as_ref().map_or(device.memory_bytes, |log| log.budget);
    let capacity = flags.memory_bytes.unwrap_or(whole);
    if capacity == Bytes::ZERO || capacity.0 > 1 << 50 {
        bail!(
            "--memory-bytes: {capacity} is not a device's memory; give a size up to 1PiB, such as 16GiB"
        );
    }
    let memory = flags.memory.as_deref().map(memory::read).transpose()?.unwrap_or_default();
    let trace = match &log {
        Some(log) => courses::trace(&log.courses),
        None => jobs::read(&flags.jobs, &memory, flags.margin)?,
    };
    let file = flags.jobs.display();
    if !trace.sorted {
        note(&format!(
            "note: {file}: the rows are not in order of submission; they are taken in that order"
        ));
    }
    outputs.apart_from_what_was_read()?;
    let jobs = &trace.jobs;
    if let Some(percent) = jobs::demand(jobs).filter(|percent| *percent > 100) {
        note(&format!(
            "note: {file}: jobs come with {percent} % of what the device can do: under any policy the queue grows \
             until the last has come, and drains only then"
        ));
    }
    let place = |name: &String| {
        let at = jobs.iter().position(|j| *j.name == **name);
        at.with_context(|| {
            format!("--explain: {file} has no job `{name}`; give a name from its column `job`")
        })
    };
    let explained = flags.explain.as_ref().map(place).transpose()?;
    let mut runs = simulate(flags, jobs, &device, (capacity, log.as_ref()), explained);
    runs.extend(
        log.filter(|_| one.iter().all(|flag| flag.1.is_none())).map(|log| logged(&log, jobs)),
    );
    let never = |run: &Run| {
        let never = |j: &JobResult| matches!(j.verdict, Verdict::NeverFits | Verdict::Outgrew);
        run.outcome.jobs.iter().any(never) || run.outcome.harm.is_some()
    };
    let policies: Value = runs.iter().map(|run| figures(run, jobs, explained)).collect();
    let all = json!({ "jobs": jobs.len(), "capacity_bytes": capacity, "policies": policies });
    let both = (all, text(&runs, jobs, explained));
    let mut ending = Ending::printing(&both, as_json);
    ending.file(flags.html.as_deref(), |path| page::write(path, &flags.jobs, &runs, jobs, both.0));
    ending.file(flags.csv.as_deref(), |path| files::rows(path, &runs, jobs));
    ending.file(flags.plot.as_deref(), |path| files::draw(path, &plots, &runs, jobs));
    ending.file(flags.curve.as_deref(), |path| files::curve(path, &runs));
    ending.file(flags.timeline.as_deref(), |path| files::timeline(path, &runs, jobs));
    ending.with(Answer::yes_if(!runs.iter().any(never)))
}

/// The files that `--plot` writes, FILE.POLICY.svg for FILE.svg: one for each mechanism and policy.
fn plots(flags: &Flags) -> Vec<PathBuf> {
    let Some(plot) = &flags.plot else { return Vec::new() };
    let of = |mechanism: &str, policy: &Policy| match flags.mechanism.len() {
        1 => plot.with_extension(format!("{}.svg", policy.name)),
        _ => plot.with_extension(format!("{mechanism}.{}.svg", policy.name)),
    };
    let all = flags.mechanism.iter().flat_map(|m| flags.policies.iter().map(|p| of(m.0, p)));
    all.collect()
}

/// Simulates each policy under each mechanism that the flags name.
fn simulate(
    flags: &Flags,
    jobs: &[Job],
    device: &Profile,
    (capacity, log): (Bytes, Option<&Log>),
    explained: Option<usize>,
) -> Vec<Run> {
    let keep = Keep {
        moments: [&flags.plot, &flags.html, &flags.curve, &flags.timeline]
            .iter()
            .any(|file| file.is_some()),
        stretches: flags.timeline.is_some(),
        reasons: explained.map(|e| e as u32),
        proof: flags.check,
    };
    let mut runs = Vec::new();
    for &(name, mechanism) in &flags.mechanism {
        let settings = Settings {
            capacity,
            h2d: device.link.h2d,
            d2h: device.link.d2h,
            memory_bandwidth: device.memory_bandwidth,
            mechanism,
            mode: flags.mode.1,
            context: flags.context,
            partitions: flags.partitions,
            overcommit: flags.overcommit,
            turn: flags.turn,
            patience: flags.patience,
            stays: log.is_some(),
        };
        for policy in &flags.policies {
            let outcome = match log {
                Some(log) if mechanism == Mechanism::Lanes => {
                    let events = replay::events(&log.courses, policy, capacity);
                    let proof = keep.proof.then_some(capacity);
                    replay::outcome(&log.courses, &events, keep.moments, proof)
                }
                _ => engine::simulate(jobs, policy, &settings, keep),
            };
            runs.push(Run {
                name: match flags.mechanism.len() {
                    1 => policy.name.to_owned(),
                    _ => format!("{}, {name}", policy.name),
                },
                policy: policy.name,
                mechanism: name,
                settings,
                figures: outcome.figures(jobs),
                latencies: latencies(jobs, &outcome.jobs, mechanism),
                devices: settings.devices(jobs.iter().filter(|j| j.rate.is_some())),
                outcome,
            });
        }
    }
    runs
}

/// What really happened, as a run.
fn logged(log: &Log, jobs: &[Job]) -> Run {
    let policy = policy::find(&log.policy).map_or("unknown", |policy| policy.name);
    let outcome = courses::outcome(&log.courses);
    Run {
        name: format!("logged, {policy}"),
        policy,
        mechanism: "logged",
        settings: Settings { capacity: log.budget, ..Settings::default() },
        figures: outcome.figures(jobs),
        latencies: Vec::new(),
        devices: None,
        outcome,
    }
}

fn s(nanos: u64) -> f64 {
    nanos as f64 / 1e9
}

fn text(runs: &[Run], jobs: &[Job], explained: Option<usize>) -> String {
    let long = runs.iter().any(|r| r.figures.makespan > 600_000_000_000);
    let time = |n: u64| match long {
        true => format!("{:.1}", n as f64 / 6e10),
        false => format!("{:.2}", s(n)),
    };
    let mut table = Table::headed(
        "<policy|makespan|queuing|completion|95 %|busy|fairness|switches|moved|packed|done",
    );
    let bytes = |b: u128| Bytes(saturated(b)).to_string();
    for run in runs {
        let f = &run.figures;
        table.row([
            run.name.clone(),
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
        remarks(run, jobs).iter().for_each(|it| text += &format!("{}: {it}\n", run.name));
    }
    let Some(job) = explained else { return text };
    for run in runs {
        let (result, reasons) = (&run.outcome.jobs[job], &run.outcome.reasons);
        let (name, word, end) = (&jobs[job].name, result.verdict.word(), s(result.end.0));
        text += &format!("\n{name} under {}: {word} at {end:.1} s\n", run.name);
        for (at, why) in reasons.iter().take(40) {
            text += &format!("{:>12.1} s  {why}\n", s(at.0));
        }
        if reasons.len() > 40 {
            text += &format!("              and {} more changes\n", reasons.len() - 40);
        }
    }
    text
}

/// What else is to be said of a run: jobs that are not done, growth, proof, inference.
fn remarks(run: &Run, jobs: &[Job]) -> Vec<String> {
    let o = &run.outcome;
    let odd = o.jobs.iter().zip(jobs).filter(|(r, _)| r.verdict != Verdict::Done);
    let odd = odd.map(|(r, job)| format!("{}: {}", job.name, r.verdict.word()));
    let mut all: Vec<String> = odd.collect();
    if let Some(more) = all.len().checked_sub(10).filter(|more| *more > 0) {
        all.truncate(10);
        all.push(format!("and {more} more"));
    }
    if o.grew > 0 {
        all.push(format!(
            "{} jobs outgrew what they were admitted with, {} of them had to leave and wait",
            o.grew, o.outgrown
        ));
    }
    match &o.harm {
        Some((at, why)) => all.push(format!("not safe at {:.3} s: {why}", s(at.0))),
        None if o.proved > 0 => all.push(format!("{} changes of memory proved safe", o.proved)),
        None => {}
    }
    if !o.moments.is_empty() {
        let (mean, most) = (run.figures.memory, o.most);
        all.push(format!("memory: {mean} in the mean over the makespan, {most} at most"));
    }
    if let Some((mean, p99)) = worst(&run.latencies) {
        let devices = run.devices.map_or("none".to_owned(), |d| d.to_string());
        all.push(format!(
            "inference: requests take {mean} in the mean, {p99} at 99 %; devices for all at once: {devices}"
        ));
    }
    all
}

/// The mean over all requests, and the highest 99th percentile of a job.
fn worst(all: &[Latency]) -> Option<(Nanos, Nanos)> {
    let requests: u128 = all.iter().map(|l| l.requests as u128).sum();
    let sum: u128 = all.iter().map(|l| l.requests as u128 * u128::from(l.mean.0)).sum();
    Some((Nanos(u64::try_from(sum.checked_div(requests)?).ok()?), all.iter().map(|l| l.p99).max()?))
}

/// The result under one policy and one mechanism, for `--json`.
fn figures(run: &Run, jobs: &[Job], explained: Option<usize>) -> Value {
    let (f, o) = (&run.figures, &run.outcome);
    let ended = |v: Verdict| -> Value {
        let all = o.jobs.iter().zip(jobs).filter(|(r, _)| r.verdict == v);
        all.map(|(_, job)| &*job.name).collect()
    };
    let mut all = json!({
        "policy": run.policy,
        "mechanism": run.mechanism,
        "makespan_s": s(f.makespan),
        "mean_admission_s": s(f.admission),
        "mean_queuing_s": s(f.queuing),
        "mean_completion_s": s(f.completion),
        "p95_completion_s": s(f.p95),
        "utilisation": f.utilisation,
        "fairness": f.fairness,
        "mean_memory_bytes": f.memory,
        "peak_memory_bytes": o.most,
        "switches": o.switches,
        "moved_bytes": saturated(o.moved),
        "packed_bytes": saturated(o.packed),
        "packs": o.packs,
        "outgrew": o.grew,
        "left_to_grow": o.outgrown,
        "done": f.done,
        "killed": ended(Verdict::Killed),
        "never_fits": ended(Verdict::NeverFits),
        "outgrew_the_device": ended(Verdict::Outgrew),
        "nothing_to_do": ended(Verdict::Empty),
    });
    let dated = |(at, what): &(Nanos, String), key: &str| json!({ "at_s": s(at.0), key: what });
    if o.proved > 0 {
        all["proved_changes"] = o.proved.into();
        all["harm"] = o.harm.as_ref().map(|harm| dated(harm, "why")).into();
    }
    if let Some((mean, p99)) = worst(&run.latencies) {
        let requests = |l: &Latency| {
            let (mean_s, p99_s) = (s(l.mean.0), s(l.p99.0));
            let (job, requests) = (&jobs[l.job].name, l.requests);
            json!({ "job": job, "requests": requests, "mean_s": mean_s, "p99_s": p99_s })
        };
        all["inference"] = json!({
            "mean_s": s(mean.0),
            "worst_p99_s": s(p99.0),
            "devices": run.devices,
            "jobs": run.latencies.iter().map(requests).collect::<Value>(),
        });
    }
    if let Some(job) = explained {
        let why = o.reasons.iter().map(|reason| dated(reason, "what")).collect::<Value>();
        all["explained"] = json!({ "job": jobs[job].name, "why": why });
    }
    all
}
