//! `neap run` of several jobs: passes flags, files and requests to a service, and reports.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread;

use anyhow::{Context, bail};
use indicatif::ProgressBar;
use neap::device::Profile;
use neap::report::table::Table;
use neap::run::Settings;
use neap::run::drift::THRESHOLD;
use neap::run::service::{self, Mailbox, Notice, Options, Planning, Request};
use neap::run::service::{ServiceError, Tenant, Verdict};
use neap::sim::share::policy::{NEAP, Policy};
use neap::units::{Bytes, Nanos};
use serde_json::{Value, json};

use super::requests::{Asking, Names, Reader, apart, end_at};
use super::{Flags, latencies, median};
use crate::output::{self, Answer, Ending, note};
use crate::settings::values::{instant, policy, seconds};
use crate::settings::{self, Outputs};
use crate::{progress, signals};

/// Several jobs at once.
#[derive(clap::Args)]
pub struct Several {
    /// The policy that decides which job runs when several share the device; `neap` by default.
    #[arg(long, value_parser = policy())]
    policy: Option<&'static Policy>,
    /// The memory that the jobs share; by default the sum of their needs, at most the device's
    /// memory.
    #[arg(long, value_name = "SIZE")]
    memory: Option<Bytes>,
    /// When each job is submitted, in seconds from the start; 0 for jobs without a number.
    #[arg(long, value_name = "SECONDS,…", value_delimiter = ',', value_parser = instant)]
    submit: Vec<Nanos>,
    /// How long a job waits before it goes first (policy neap); 28800 by default.
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    patience: Option<Nanos>,
    /// The shortest turn after which memory is moved (policy fair); 10 by default.
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    turn: Option<Nanos>,
    /// Read requests from stdin during the run, one in each line: `run PLAN [ITERATIONS]`, `end
    /// JOB`, `quit`.
    #[arg(long)]
    listen: bool,
    /// Run every plan that appears in this folder, end a job whose plan disappears, and end the
    /// service when a file named `stop` appears.
    #[arg(long, value_name = "DIR", conflicts_with = "listen")]
    watch: Option<PathBuf>,
    /// Write the events of all jobs, a row for each.
    #[arg(long, value_name = "FILE.csv")]
    pub log: Option<PathBuf>,
}

impl Several {
    /// Whether any of these flags is given.
    pub fn asked(&self) -> bool {
        let Self { policy, memory, submit, patience, turn, listen, watch, log } = self;
        let times = patience.is_some() || turn.is_some() || !submit.is_empty();
        policy.is_some() || memory.is_some() || times || *listen || watch.is_some() || log.is_some()
    }
}

pub fn main(flags: &Flags, mut settings: Settings, as_json: bool) -> anyhow::Result<Answer> {
    settings::none_given(
        [
            (flags.weights.is_some(), "--weights"),
            (flags.save.is_some(), "--save"),
            (flags.timeline.is_some(), "--timeline"),
            (!flags.graph.is_empty(), "--graph"),
        ],
        "is for one job; leave it out, or run the job by itself",
    )?;
    if let Some(folder) = &flags.service.watch
        && !folder.is_dir()
    {
        bail!("--watch: {} is no folder; make it first, or name another", folder.display());
    }
    let files: Vec<&Path> = flags.subjects.iter().map(PathBuf::as_path).collect();
    let outputs = Outputs::new(&flags.device.inputs(&files), &flags.outputs())?;
    // From the first iteration on, it is the rate with which the link begins.
    if let Some(at) = settings.throttle_later.iter().rposition(|(from, _)| *from == 0) {
        settings.throttle_per_mille = settings.throttle_later[at].1;
        settings.throttle_later.drain(..=at);
    }
    let reader = Reader::new(&flags.device, &settings)?;
    let Some(tenants) = tenants(flags, &reader)? else { return Ok(Answer::No) };
    outputs.apart_from_what_was_read()?;
    let asked = &flags.service;
    let policy = asked.policy.unwrap_or(&NEAP);
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
    let options = Options {
        policy,
        arena: arena(asked, &tenants, &device)?,
        patience: asked.patience.unwrap_or(Nanos(28_800_000_000_000)),
        turn: asked.turn.unwrap_or(Nanos(10_000_000_000)),
        settings: &settings,
        device: &device,
        replan: flags.replan,
        threshold_per_mille: flags.replan_threshold.unwrap_or(THRESHOLD),
        events: asked.log.is_some(),
    };
    signals::request_at_signals(&settings.stop)?;
    take_memory_from_one_heap();
    let mut mailbox = Mailbox::default();
    let names: Names = Arc::new(Mutex::new(tenants.iter().map(|t| t.name.clone()).collect()));
    let (remote, stop, of) = (mailbox.remote(), settings.stop.clone(), Arc::clone(&names));
    thread::spawn(move || end_at(&stop, &remote, &of));
    if asked.listen || asked.watch.is_some() {
        let mut asking =
            Asking { reader, iterations: flags.iterations[0], remote: mailbox.remote(), names };
        // The thread ends with the process: reading stdin can't be interrupted.
        match asked.watch.clone() {
            Some(folder) => drop(thread::spawn(move || asking.watch(&folder))),
            None => drop(thread::spawn(move || asking.listen())),
        }
    } else {
        // Only a signal may end the service.
        let _ = mailbox.remote().ask(Request::Close);
    }
    let all = tenants.iter().map(|t| u64::from(t.work.settings.iterations)).sum();
    let bar = progress::bar(all, "iterations");
    let mut told = |notice: Notice<'_>| match notice {
        // The job had ended before the signal came.
        Notice::Unknown(_) if settings.stop.requested() => {}
        notice => say(&bar, &notice),
    };
    let report = service::serve(&options, tenants, mailbox, &mut told);
    bar.finish_and_clear();
    if let Err(no @ ServiceError::NeverFits { .. }) = &report {
        note(&no.to_string());
        return Ok(Answer::No);
    }
    let report = report?;
    let mut ending = Ending::printing(&printed(policy.name, &report), as_json);
    ending.file(flags.latencies_out.as_deref(), |path| {
        let ran = report.jobs.iter().filter_map(|j| Some((j.work.as_ref()?, &j.outcome)));
        let ran: Vec<_> = ran.map(|(work, o)| (&work.graph, &work.profile, o)).collect();
        latencies(path, &ran, &settings)
    });
    ending.file(asked.log.as_deref(), |path| {
        let row = |moment: &service::Moment| {
            let name = report.jobs.get(moment.job).map_or("", |j| &j.name).to_owned();
            [moment.at.0.to_string(), name, moment.what.to_owned(), moment.why.clone()]
        };
        output::csv(path, ["time_ns", "job", "what", "why"], report.moments.iter().map(row))
    });
    let good = |v: &Verdict| matches!(v, Verdict::Done | Verdict::Stopped);
    if settings.stop.requested() {
        note("stopped by a signal");
        return ending.with(Answer::Stopped);
    }
    ending.with(Answer::yes_if(report.jobs.iter().all(|j| good(&j.verdict))))
}

/// Lets all threads take memory from one heap. Each planning has threads of its own, and with a
/// heap for some of them the memory that they have given back stays with each: it grows for as long
/// as the service plans.
fn take_memory_from_one_heap() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the call sets a limit, and takes any number.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

/// Prints an event above the progress bar.
fn say(bar: &ProgressBar, notice: &Notice<'_>) {
    let said = match notice {
        Notice::Iteration => return bar.inc(1),
        Notice::Queued(job, why) => format!("`{job}` waits for {why}"),
        Notice::Admitted(_, Nanos(..1_000_000)) => return,
        Notice::Admitted(job, waited) => format!("`{job}` is in after {waited}"),
        Notice::Ended(job, verdict) => match verdict.reason() {
            Some(why) => format!("`{job}` {}: {why}", verdict.word()),
            None => format!("`{job}` {}", verdict.word()),
        },
        Notice::Unknown(job) => format!("there is no job `{job}`"),
        Notice::Planned(planning) => planned(planning),
    };
    bar.suspend(|| note(&said));
}

/// What planning all jobs again has changed, and why it was done.
fn planned(planning: &Planning) -> String {
    let why = &planning.why;
    if let Some(problem) = &planning.kept_because {
        return format!("{why}: the plans stay: {problem}");
    }
    let times = match (planning.predicted_before_ns, planning.predicted_after_ns) {
        (Some(before), Some(after)) => {
            format!("; an iteration of each is predicted to take {after} instead of {before}")
        }
        _ => String::new(),
    };
    match planning.new_plans.len() {
        0 => format!("{why}: planned anew together: nothing changes"),
        new => format!("{why}: planned anew together: {new} of the plans are new{times}"),
    }
}

/// The jobs that are submitted at the start; `None` if the checker refused one.
fn tenants(flags: &Flags, reader: &Reader) -> anyhow::Result<Option<Vec<Tenant>>> {
    let mut all: Vec<Tenant> = Vec::new();
    for path in &flags.subjects {
        let Some(tenants) = reader.read(path, 1)? else { return Ok(None) };
        all.extend(tenants);
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
                let Tenant { name, work, .. } = tenant;
                let (persistent, ephemeral) =
                    service::needs(work).with_context(|| format!("`{name}`"))?;
                // A window counts only once.
                let window_bytes = work.plan.window.as_ref().map_or(0, |w| w.bytes.0);
                let shared = window_bytes.min(ephemeral.0);
                all = all.saturating_add(persistent.0 + ephemeral.0 - shared);
                window = window.max(shared);
            }
            Ok(Bytes(all.saturating_add(window)).min(available))
        }
    }
}

/// What is printed: figures of a run of several jobs, and text.
fn printed(policy: &str, all: &service::Report) -> (Value, String) {
    let mut table =
        Table::headed("<job|<ended|iterations|waited|service|completion|memory|loss|<checksum");
    let (mut jobs, none) = (Vec::with_capacity(all.jobs.len()), || "-".to_owned());
    for job in &all.jobs {
        let ran = &job.outcome;
        let waited = job.started_ns.map(|at| at.saturating_sub(job.submitted_ns).to_string());
        table.row([
            job.name.clone(),
            job.verdict.word().to_owned(),
            job.iterations.to_string(),
            waited.unwrap_or_else(none),
            job.service_ns.to_string(),
            job.ended_ns.saturating_sub(job.submitted_ns).to_string(),
            format!("{} + {}", job.persistent_bytes, job.ephemeral_bytes),
            ran.losses.last().map_or_else(none, ToString::to_string),
            ran.checksum.chars().take(16).collect(),
        ]);
        let mut figures = json!(job);
        figures["verdict"] = json!(job.verdict.word());
        figures["reason"] = json!(job.verdict.reason());
        figures["losses"] = json!(ran.losses);
        figures["checksum"] = json!(ran.checksum);
        figures["iteration_ns"] = json!(median(&ran.iteration_ns));
        figures["late_copies"] = json!(ran.late_copies);
        // How long it waited for a window that other jobs held.
        figures["window_waited_ns"] = json!(ran.window_ns);
        figures["notes"] = json!(ran.notes);
        jobs.push(figures);
    }
    let mut figures = json!(all);
    figures["policy"] = json!(policy);
    figures["jobs"] = json!(jobs);
    let (took, most) = (all.makespan_ns, all.reserved_peak_bytes);
    let text = format!(
        "{table}\n{policy}: all of it took {took}; at most {most} ({} bytes) promised at once of an \
         arena of {}\n",
        most.0, all.arena_bytes
    );
    (figures, text)
}
