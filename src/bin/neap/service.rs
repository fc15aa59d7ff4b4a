//! `neap run` of several jobs: flags, files and requests into a service, and its report.
//!
//! Not for: one job ([`crate::run`]).

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, Read};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, SystemTime};

use anyhow::{Context, bail};
use neap::contract::{JobPlan, check};
use neap::device::Profile;
use neap::plan::global::{self, Job, Jobs};
use neap::plan::{Method, Share};
use neap::report::table::{Side, Table};
use neap::run::Settings;
use neap::run::service::{
    self, Mailbox, Notice, Options, Remote, Report, Request, Tenant, Verdict, Work,
};
use neap::sim::share::policy;
use neap::units::{Bytes, Nanos};
use serde_json::json;

use crate::output::{self, Answer, note};
use crate::run;
use crate::settings::{self, DeviceFlags, Site, Subject};
use crate::share::seconds;

/// Several jobs at once.
#[derive(clap::Args)]
pub struct Several {
    /// Whose turn it is when several jobs share the device; `neap` if not given.
    #[arg(long, value_parser = policy::NAMES)]
    policy: Option<String>,
    /// What the jobs share; what all of them need together if not given, and at most what the device has.
    #[arg(long, value_name = "SIZE")]
    memory: Option<Bytes>,
    /// When each job comes, from the start on; 0 for those that are left out.
    #[arg(long, value_name = "SECONDS,…", value_delimiter = ',', value_parser = instant)]
    submit: Vec<Nanos>,
    /// From when on a job that is there goes first (policy neap); 28800 if not given.
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    patience: Option<Nanos>,
    /// The least service for which memory is moved between turns (policy fair); 10 if not given.
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    turn: Option<Nanos>,
    /// Take requests from stdin while it runs, a line each: `run PLAN [ITERATIONS]`, `end JOB`, `quit`.
    #[arg(long)]
    listen: bool,
    /// Run every plan that appears in this folder, end a job whose plan disappears, and end for good when a file `stop` lies there.
    #[arg(long, value_name = "DIR", conflicts_with = "listen")]
    watch: Option<PathBuf>,
    /// Write what happened to whom, a row for each moment.
    #[arg(long, value_name = "FILE.csv")]
    pub log: Option<PathBuf>,
}

fn instant(text: &str) -> Result<Nanos, String> {
    if text.trim() == "0" {
        Ok(Nanos::ZERO)
    } else {
        seconds(text).map_err(|e| e.replace("give seconds", "give 0, or seconds"))
    }
}

impl Several {
    /// Whether any of these is given.
    pub fn asked(&self) -> bool {
        let Self { policy, memory, submit, patience, turn, listen, watch, log } = self;
        let times = patience.is_some() || turn.is_some() || !submit.is_empty();
        policy.is_some() || memory.is_some() || times || *listen || watch.is_some() || log.is_some()
    }
}

/// What jobs are read with.
struct Reader {
    device: DeviceFlags,
    settings: Settings,
}

/// A plan that the checker refused, which it has said.
struct Refused;

impl Reader {
    /// The jobs of a file.
    fn read(
        &self,
        path: &Path,
        iterations: u32,
        outputs: &[Option<&Path>],
    ) -> anyhow::Result<Result<Vec<Tenant>, Refused>> {
        let settings = Settings { iterations, ..self.settings.clone() };
        let tenant = |name: String, work: Work| Tenant { name, work, submit: Nanos::ZERO };
        let stem = settings::stem(path)?;
        match settings::subject(path, &[], outputs)? {
            Subject::Plan(plan, graphs) => {
                self.device.not_with_a_plan(path)?;
                if !settings::checked(path, &plan, &graphs)? {
                    return Ok(Err(Refused));
                }
                let at = |problem: String| anyhow::anyhow!("{}: {problem}", path.display());
                let mut planners = Vec::with_capacity(plan.jobs.len());
                for job in 0..plan.jobs.len() {
                    let share = Share::recorded(&plan, job).map_err(at)?;
                    planners.push((Method::recorded(&plan, job).map_err(at)?, share.priority()));
                }
                let several = plan.jobs.len() > 1;
                let jobs = plan.jobs.into_iter().zip(graphs).zip(planners);
                let all = jobs.map(|((job, graph), (method, priority))| {
                    let name = if several { graph.name.clone() } else { stem.clone() };
                    tenant(
                        name,
                        Work {
                            graph,
                            plan: job,
                            profile: plan.device.clone(),
                            method,
                            priority,
                            settings: settings.clone(),
                        },
                    )
                });
                Ok(Ok(all.collect()))
            }
            Subject::Graph(mut graph) => {
                let Site { device, latencies, libraries, .. } = self.device.resolve(&mut graph)?;
                let (mut plan, _) = run::unplanned(&graph, &device, &latencies)?;
                plan.libraries = libraries;
                Ok(Ok(vec![tenant(
                    stem,
                    Work {
                        graph: *graph,
                        plan,
                        profile: device,
                        method: Method::default(),
                        priority: Share::ALL.priority(),
                        settings,
                    },
                )]))
            }
        }
    }
}

pub fn main(
    flags: &run::Flags,
    settings: Settings,
    outputs: &[Option<&Path>],
    as_json: bool,
) -> anyhow::Result<Answer> {
    for (given, flag) in [
        (flags.weights.is_some(), "--weights"),
        (flags.save.is_some(), "--save"),
        (flags.latencies_out.is_some(), "--latencies-out"),
        (!flags.graph.is_empty(), "--graph"),
        (flags.replan_threshold.is_some(), "--replan-threshold"),
        (
            !settings.throttle_later.is_empty() && settings.throttle_later.iter().any(|t| t.0 > 0),
            "--throttle-link with @N",
        ),
    ] {
        if given {
            bail!("{flag}: is for one job; leave it away, or run the job by itself");
        }
    }
    let files: Vec<&Path> = flags.subjects.iter().map(PathBuf::as_path).collect();
    settings::outputs(&flags.device.inputs(&files), outputs)?;
    let mut settings = settings;
    if let Some((_, throttle)) = settings.throttle_later.pop() {
        settings.throttle_per_mille = throttle;
    }
    let Some(tenants) = tenants(flags, &settings, outputs)? else { return Ok(Answer::No) };
    let asked = &flags.service;
    let name = asked.policy.as_deref().unwrap_or("neap");
    let policy = policy::find(name).with_context(|| format!("--policy: there is no {name}"))?;
    let device = match tenants.first() {
        Some(tenant) => tenant.work.profile.clone(),
        None => neap::device::profile::load(flags.device.device.as_deref().unwrap_or("host"))?,
    };
    for other in tenants.iter().filter(|t| t.work.profile.name != device.name) {
        note(&format!(
            "note: `{}` was planned for {}, `{}` for {}",
            tenants[0].name, device.name, other.name, other.work.profile.name
        ));
    }
    let arena = arena(asked, &tenants, &device)?;
    let options = Options {
        policy,
        arena,
        patience: asked.patience.unwrap_or(Nanos(28_800_000_000_000)),
        turn: asked.turn.unwrap_or(Nanos(10_000_000_000)),
        settings: &settings,
        device: &device,
        planner: if flags.replan { Some(&together) } else { None },
    };
    let mut mailbox = Mailbox::default();
    if asked.listen || asked.watch.is_some() {
        let reader = Reader { device: flags.device.clone(), settings: settings.clone() };
        let names = tenants.iter().map(|t| t.name.clone()).collect();
        let mut asking =
            Asking { reader, iterations: flags.iterations[0], remote: mailbox.remote(), names };
        // It ends with the process at the latest: reading stdin can't be broken off.
        match asked.watch.clone() {
            Some(folder) => drop(thread::spawn(move || asking.watch(&folder))),
            None => drop(thread::spawn(move || asking.listen())),
        }
    }
    let bar = run::bar(tenants.iter().map(|t| u64::from(t.work.settings.iterations)).sum());
    let mut told = |notice: Notice<'_>| {
        let said = match notice {
            Notice::Iteration => return bar.inc(1),
            Notice::Queued(job, why) => format!("`{job}` waits for {why}"),
            Notice::Admitted(_, Nanos(..1_000_000)) => return,
            Notice::Admitted(job, waited) => format!("`{job}` is in after {waited}"),
            Notice::Ended(job, verdict) => match verdict.reason() {
                Some(why) => format!("`{job}` {}: {why}", verdict.word()),
                None => format!("`{job}` {}", verdict.word()),
            },
            Notice::Unknown(job) => format!("no job `{job}` is there to end"),
            Notice::Planned(Ok(0)) => "planned anew together: nothing changes".to_owned(),
            Notice::Planned(Ok(jobs)) => {
                format!("planned anew together: {jobs} of the plans are new")
            }
            Notice::Planned(Err(why)) => format!("the plans stay: {why}"),
        };
        bar.suspend(|| note(&said));
    };
    let report = service::serve(&options, tenants, mailbox, &mut told);
    bar.finish_and_clear();
    let report = match report {
        Ok(report) => report,
        Err(no @ service::ServiceError::NeverFits { .. }) => {
            note(&no.to_string());
            return Ok(Answer::No);
        }
        Err(error) => return Err(error.into()),
    };
    if let Some(path) = &asked.log {
        log(path, &report)?;
        note(&format!("written: {}", path.display()));
    }
    tell(name, &report, as_json)?;
    let good = |v: &Verdict| matches!(v, Verdict::Done | Verdict::Stopped);
    Ok(if report.jobs.iter().all(|j| good(&j.verdict)) { Answer::Yes } else { Answer::No })
}

/// The jobs that are there from the start; `None` when the checker refused one.
fn tenants(
    flags: &run::Flags,
    settings: &Settings,
    outputs: &[Option<&Path>],
) -> anyhow::Result<Option<Vec<Tenant>>> {
    let reader = Reader { device: flags.device.clone(), settings: settings.clone() };
    let mut all: Vec<Tenant> = Vec::new();
    for path in &flags.subjects {
        match reader.read(path, 1, outputs)? {
            Ok(mut tenants) => all.append(&mut tenants),
            Err(Refused) => return Ok(None),
        }
    }
    let (iterations, submit) = (&flags.iterations, &flags.service.submit);
    let listed = |what: &str, given: usize| {
        anyhow::anyhow!("--{what}: {given} numbers for {} jobs; give one for each", all.len())
    };
    if iterations.len() != 1 && iterations.len() != all.len() {
        return Err(listed("iterations", iterations.len()));
    }
    if submit.len() > all.len() {
        return Err(listed("submit", submit.len()));
    }
    let mut names = BTreeSet::new();
    for (index, tenant) in all.iter_mut().enumerate() {
        tenant.work.settings.iterations = *iterations.get(index).unwrap_or(&iterations[0]);
        tenant.submit = submit.get(index).copied().unwrap_or_default();
        tenant.name = apart(&tenant.name, &mut names);
    }
    Ok(Some(all))
}

/// A name that nobody has.
fn apart(name: &str, names: &mut BTreeSet<String>) -> String {
    let numbered = (2..).map(|n: u64| format!("{name}-{n}"));
    let free = std::iter::once(name.to_owned())
        .chain(numbered)
        .find(|n| !names.contains(n))
        .unwrap_or_default();
    names.insert(free.clone());
    free
}

/// The size of the arena.
fn arena(flags: &Several, tenants: &[Tenant], device: &Profile) -> anyhow::Result<Bytes> {
    let available = device.available();
    match flags.memory {
        Some(bytes) if bytes > available => {
            bail!("--memory: {bytes} is more than {} offers, {available}; lower it", device.name)
        }
        Some(bytes) => Ok(bytes),
        None if flags.listen || flags.watch.is_some() => {
            bail!("--memory: with --listen and --watch, say what the jobs share")
        }
        None => {
            let (mut all, mut window) = (0u64, 0);
            for tenant in tenants {
                let needs =
                    service::needs(&tenant.work).with_context(|| format!("`{}`", tenant.name))?;
                // A window is there once.
                let shared = tenant
                    .work
                    .plan
                    .window
                    .as_ref()
                    .map_or(0, |w| w.bytes.0.min(needs.ephemeral.0));
                all = all.saturating_add(needs.persistent.0 + needs.ephemeral.0 - shared);
                window = window.max(shared);
            }
            Ok(Bytes(all.saturating_add(window)).min(available))
        }
    }
}

/// Plans all jobs within the arena.
fn together(works: &[&Work], arena: Bytes) -> Result<Vec<JobPlan>, String> {
    let Some(device) = works.first().map(|w| &w.profile) else { return Ok(Vec::new()) };
    let mut jobs = Vec::with_capacity(works.len());
    for work in works {
        jobs.push(Job {
            graph: &work.graph,
            file: (String::new(), neap::job::json::sha256(&work.graph)),
            latencies: &work.plan.latencies,
            method: work.method.clone(),
            priority: work.priority,
        });
    }
    let asked = Jobs { jobs, device, budget: arena, recorded_options: BTreeMap::new() };
    let planned = global::make(&asked).map_err(|e| e.to_string())?;
    let mut plans = Vec::with_capacity(works.len());
    for (part, work) in planned.parts.into_iter().zip(works) {
        check::check(&part.plan, std::slice::from_ref(&work.graph)).map_err(|r| {
            format!(
                "a new plan is refused: {}",
                r.first().map(ToString::to_string).unwrap_or_default()
            )
        })?;
        plans.extend(part.plan.jobs.into_iter().take(1));
    }
    Ok(plans)
}

/// Requests from outside.
struct Asking {
    reader: Reader,
    iterations: u32,
    remote: Remote,
    /// All names that jobs have had.
    names: BTreeSet<String>,
}

/// The longest request, in bytes.
const LINE: u64 = 1 << 16;

/// How often a folder is looked at.
const LOOK: Duration = Duration::from_millis(200);

impl Asking {
    /// Lines of stdin; its end is the end of requests.
    fn listen(&mut self) {
        let mut stdin = std::io::stdin().lock();
        loop {
            let mut line = Vec::new();
            match stdin.by_ref().take(LINE).read_until(b'\n', &mut line) {
                Ok(0) | Err(_) => break,
                Ok(_) => {}
            }
            let whole = line.last() == Some(&b'\n') || (line.len() as u64) < LINE;
            let line = String::from_utf8_lossy(&line).trim().to_owned();
            if !whole {
                note(&format!(
                    "stdin: a line of more than {LINE} bytes is no request; nothing more is taken"
                ));
                break;
            }
            let words: Vec<&str> = line.split_whitespace().collect();
            let went = match words[..] {
                [] => true,
                ["quit"] => break,
                ["end", job] => self.remote.ask(Request::End(job.to_owned())),
                ["run", plan] => self.run(Path::new(plan), self.iterations).is_some(),
                ["run", plan, iterations] => match iterations.parse::<u32>() {
                    Ok(n @ 1..=1_000_000) => self.run(Path::new(plan), n).is_some(),
                    _ => {
                        note(&format!(
                            "stdin: `{iterations}` is not a number of iterations; give 1 to 1000000"
                        ));
                        true
                    }
                },
                _ => {
                    note(&format!(
                        "stdin: `{line}` is no request; ask `run PLAN [ITERATIONS]` (a path without spaces), `end JOB` or `quit`"
                    ));
                    true
                }
            };
            if !went {
                return;
            }
        }
        let _ = self.remote.ask(Request::Close);
    }

    /// Reads a plan and submits its jobs; their names, or nothing once the service is gone. What can't be read is said, and passed over.
    fn run(&mut self, path: &Path, iterations: u32) -> Option<Vec<String>> {
        let tenants = match self.reader.read(path, iterations, &[]) {
            Ok(Ok(tenants)) => tenants,
            Ok(Err(Refused)) => return Some(Vec::new()),
            Err(error) => {
                note(&format!("not run: {error:#}"));
                return Some(Vec::new());
            }
        };
        let mut submitted = Vec::with_capacity(tenants.len());
        for mut tenant in tenants {
            tenant.name = apart(&tenant.name, &mut self.names);
            submitted.push(tenant.name.clone());
            if !self.remote.ask(Request::Submit(Box::new(tenant))) {
                return None;
            }
        }
        Some(submitted)
    }

    /// Plans that lie in a folder, as they come and go. One that can't be read is tried again when it changes.
    fn watch(&mut self, folder: &Path) {
        let mut taken: BTreeMap<PathBuf, Vec<String>> = BTreeMap::new();
        let mut failed: BTreeMap<PathBuf, (u64, Option<SystemTime>)> = BTreeMap::new();
        loop {
            let there: BTreeMap<PathBuf, (u64, Option<SystemTime>)> =
                match std::fs::read_dir(folder) {
                    Ok(entries) => entries.filter_map(|e| look(&e.ok()?.path())).collect(),
                    Err(error) => {
                        note(&format!(
                            "--watch: {}: {error}; nothing more is taken from it",
                            folder.display()
                        ));
                        break;
                    }
                };
            let gone: Vec<PathBuf> =
                taken.keys().filter(|p| !there.contains_key(*p)).cloned().collect();
            for job in gone.iter().filter_map(|p| taken.remove(p)).flatten() {
                if !self.remote.ask(Request::End(job)) {
                    return;
                }
            }
            for (path, state) in there.iter().filter(|(path, _)| is_plan(path)) {
                if taken.contains_key(path) || failed.get(path) == Some(state) {
                    continue;
                }
                let Some(jobs) = self.run(path, self.iterations) else { return };
                if jobs.is_empty() {
                    failed.insert(path.clone(), *state);
                } else {
                    taken.insert(path.clone(), jobs);
                }
            }
            if there.contains_key(&folder.join("stop")) {
                break;
            }
            thread::sleep(LOOK);
        }
        let _ = self.remote.ask(Request::Close);
    }
}

/// A plain file's size and time of change.
fn look(path: &Path) -> Option<(PathBuf, (u64, Option<SystemTime>))> {
    let of = std::fs::metadata(path).ok().filter(std::fs::Metadata::is_file)?;
    Some((path.to_owned(), (of.len(), of.modified().ok())))
}

/// What begins with a dot is still being written.
fn is_plan(path: &Path) -> bool {
    let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    !name.starts_with('.') && (name.ends_with(".plan.json") || name.ends_with(".plan.json.gz"))
}

fn log(path: &Path, report: &Report) -> anyhow::Result<()> {
    neap::files::write(path, |out| {
        let mut rows = csv::Writer::from_writer(out);
        rows.write_record(["time_ns", "job", "what"])?;
        for moment in &report.moments {
            let name = report.jobs.get(moment.job).map_or("", |j| &j.name);
            rows.write_record([&moment.at.0.to_string(), name, moment.what])?;
        }
        rows.flush()
    })?;
    Ok(())
}

fn tell(policy: &str, report: &Report, as_json: bool) -> anyhow::Result<()> {
    if as_json {
        let jobs: Vec<serde_json::Value> = report.jobs.iter().map(job_json).collect();
        let stretch = |s: &service::Stretch| {
            let services: serde_json::Map<String, serde_json::Value> = s
                .service
                .iter()
                .filter_map(|(job, time)| Some((report.jobs.get(*job)?.name.clone(), json!(time))))
                .collect();
            json!({ "from_ns": s.from, "to_ns": s.to, "service_ns": services })
        };
        return output::json(&json!({
            "policy": policy,
            "arena_bytes": report.arena,
            "reserved_peak_bytes": report.reserved_peak,
            "touched_peak_bytes": report.touched_peak,
            "makespan_ns": report.makespan,
            "jobs": jobs,
            "stretches": report.stretches.iter().map(stretch).collect::<Vec<_>>(),
        }));
    }
    let mut table = Table::new(&[
        ("job", Side::Left),
        ("ended", Side::Left),
        ("iterations", Side::Right),
        ("waited", Side::Right),
        ("service", Side::Right),
        ("completion", Side::Right),
        ("memory", Side::Right),
        ("loss", Side::Right),
        ("checksum", Side::Left),
    ]);
    for job in &report.jobs {
        table.row([
            job.name.clone(),
            job.verdict.word().to_owned(),
            job.iterations.to_string(),
            job.started
                .map_or_else(|| "-".to_owned(), |at| at.saturating_sub(job.submitted).to_string()),
            job.service.to_string(),
            job.ended.saturating_sub(job.submitted).to_string(),
            format!("{} + {}", job.persistent, job.ephemeral),
            job.outcome.losses.last().map_or_else(|| "-".to_owned(), ToString::to_string),
            job.outcome.checksum.chars().take(16).collect(),
        ]);
    }
    output::data(&format!(
        "{table}\n{policy}: all of it took {}; at most {} ({} bytes) promised at once of an arena of {}\n",
        report.makespan, report.reserved_peak, report.reserved_peak.0, report.arena
    ))
}

fn job_json(job: &service::JobReport) -> serde_json::Value {
    json!({
        "name": job.name,
        "verdict": job.verdict.word(),
        "reason": job.verdict.reason(),
        "submitted_ns": job.submitted,
        "started_ns": job.started,
        "ended_ns": job.ended,
        "waited_for": job.waited_for,
        "service_ns": job.service,
        "iterations": job.iterations,
        "sent_out": job.left,
        "persistent_bytes": job.persistent,
        "ephemeral_bytes": job.ephemeral,
        "losses": job.outcome.losses,
        "checksum": job.outcome.checksum,
        "iteration_ns": run::median(&job.outcome.iteration_ns),
        "late_copies": job.outcome.late_copies,
        "passive_copies": job.outcome.passive_copies,
        "notes": job.outcome.notes,
    })
}
