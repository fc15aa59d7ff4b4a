//! The command itself: unpack, run, and where the first iterations do not fit, plan on the dry
//! device and run again.

use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::Ordering;
use std::time::Duration;
use std::{env, fs, io, thread};

use anyhow::{Context, bail};
use neap::device::latency::Table;
use neap::device::predictor::Predictor;
use neap::device::profile;
use neap::plan::Share;
use neap::private;
use neap::report::page::Page;
use neap::run::Stop;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::card::Card;
use super::passing::Asked;
use super::rehearsal::Rehearsal;
use super::serve::{self, Server};
use super::{Flags, Mode, story};
use crate::dry;
use crate::dry::launch;
use crate::dry::unpack::{self, Unpacked};
use crate::output::{self, Answer, note};
use crate::script::page;
use crate::settings::{Budget, Outputs};
use crate::signals;

/// The format of what `--save-plan` writes, and its version.
const FORMAT: &str = "neap.torch.schedule";
const VERSION: u64 = 1;
/// The bytes of such a file that are read.
pub const LARGEST_PLAN: u64 = 256 << 20;
/// The bytes of the largest report of a process that is read.
pub const LARGEST_REPORT: u64 = 64 << 20;
/// PyTorch reads the settings of its allocator from one of these.
const ALLOCATOR: [&str; 2] = ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"];

/// How often is looked whether other scripts have gone.
const LOOK: Duration = Duration::from_millis(100);

/// `neap dry` as a command line of its own.
#[derive(clap::Parser)]
pub struct Dry {
    #[command(flatten)]
    pub flags: dry::Flags,
}

/// The device whose times count where nothing says which.
pub const UNKNOWN: &str = "a6000";

/// Runs the command.
///
/// # Errors
/// Bad use.
pub fn main(flags: &Flags, as_json: bool) -> anyhow::Result<Answer> {
    if let Some(Budget::Minimum) = flags.budget {
        bail!("`min` is not a budget to run in; give bytes (12GiB) or a share (60%)");
    }
    let policy = flags.policy()?;
    let outputs =
        [&flags.save_plan, &flags.timeline, &flags.html, &flags.log, &flags.latencies_out];
    let outputs = outputs.map(|path| path.as_deref());
    let named = flags.device.as_deref().map(Path::new);
    let inputs = [&flags.plan, &flags.latencies, &flags.predictor].map(|path| path.as_deref());
    let inputs: Vec<&Path> = inputs.into_iter().flatten().chain(named).collect();
    Outputs::new(&inputs, &outputs)?;
    let device = profile::load(flags.device.as_deref().unwrap_or(UNKNOWN))?;
    // The script's processes read them; what is wrong with them is said before it runs.
    flags.latencies.as_deref().map(Table::read).transpose()?;
    flags.predictor.as_deref().map(Predictor::read).transpose()?;
    if let Some(plan) = &flags.plan {
        judge(plan)?;
    }
    let stop = Stop::default();
    // From before there is anything that a signal could leave behind.
    if flags.command.is_empty() {
        signals::only_request_at_signals(&stop)?;
    } else {
        launch::forward_signals();
    }
    let server = match (&flags.serve, flags.budget) {
        (Some(path), Some(Budget::Bytes(budget))) => {
            let asked = Asked { policy, limit: flags.token_limit, log: flags.log.clone() };
            let mode = match flags.mode {
                Mode::Shares => serve::Mode::Shares(device),
                Mode::Lanes => serve::Mode::Lanes(asked),
            };
            Some(Server::start(path, budget, mode)?)
        }
        (Some(_), _) => bail!("--serve: the budget of several scripts is in bytes, such as 12GiB"),
        (None, _) => None,
    };
    let joined = flags.join.as_ref().map(|join| serve::has_lanes(&join.path)).transpose()?;
    let has_lane = joined.unwrap_or_else(|| server.as_ref().is_some_and(Server::has_lanes));
    flags.fits(has_lane)?;
    let Some(server) = server else { return script(flags, as_json, None, has_lane) };
    if flags.command.is_empty() {
        let answer = until_interrupted(&server, &stop);
        timeline(flags, &server)?;
        if let Some(path) = &flags.html {
            let socket = flags.serve.as_deref().unwrap_or(Path::new(""));
            let title = format!("scripts that joined {}", socket.display());
            let views = vec![server.view()];
            let report = json!({ "budget_bytes": server.budget(), "scripts": server.scripts() });
            let command = "neap torch --serve";
            let page = Page { title, command, report, views, ..Page::default() };
            output::page(path, &page)?;
        }
        return Ok(answer);
    }
    let answer = script(flags, as_json, Some(&server), has_lane);
    if server.scripts() > 0 {
        note("note: other scripts have joined; this waits until they have gone");
    }
    while server.scripts() > 0 && !launch::interrupted() {
        thread::sleep(LOOK);
    }
    timeline(flags, &server)?;
    answer
}

/// Writes what happened in lanes, where that was asked for.
fn timeline(flags: &Flags, server: &Server) -> anyhow::Result<()> {
    match flags.timeline.as_deref().filter(|_| server.has_lanes()) {
        Some(path) => story::timeline(path, &server.happened()),
        None => Ok(()),
    }
}

/// Divides the budget among scripts until a signal comes.
fn until_interrupted(server: &Server, stop: &Stop) -> Answer {
    note("note: waiting for scripts that join; Ctrl-C ends this");
    while !stop.flag().load(Ordering::SeqCst) {
        thread::sleep(LOOK);
    }
    if server.scripts() > 0 {
        note("note: the scripts that have joined go on with the shares that they have");
    }
    Answer::Yes
}

/// Runs a script, perhaps the first of a server's.
fn script(
    flags: &Flags,
    as_json: bool,
    server: Option<&Server>,
    has_lane: bool,
) -> anyhow::Result<Answer> {
    let scratch = scratch()?;
    let unpacked = unpack::unpack(scratch.path())?;
    let scouted = match flags.scout {
        Some(_) => scout(flags, &unpacked, scratch.path())?,
        None => None,
    };
    let plan = flags.plan.as_deref().or(scouted.as_deref());
    let mut status = run(flags, plan, &unpacked, scratch.path(), (as_json, has_lane))?;
    let mut reports = Reports::read(scratch.path());
    if let Some(card) = reports.card.take()
        && !status.success()
        && plan.is_none()
        && !flags.no_second_run
    {
        note(
            "note: the first iterations do not fit; planning on the dry device \
             (--no-second-run skips this)",
        );
        let dry = Rehearsal { flags, card: &card, unpacked: &unpacked };
        if let Some(plan) = dry.plan(scratch.path())? {
            note("note: starting the command again, with that plan from the first iteration on");
            let again = self::scratch()?;
            status = run(flags, Some(&plan), &unpacked, again.path(), (as_json, has_lane))?;
            reports = Reports::read(again.path());
        }
    }
    let missed = reports.reports.is_empty() || reports.reports.iter().any(|r| r["met"] == false);
    let html = flags.html.as_deref().filter(|_| !reports.reports.is_empty() && !has_lane);
    if let Some(path) = html {
        let words: Vec<_> = flags.command.iter().map(|word| word.to_string_lossy()).collect();
        let mut page = page::from_reports(words.join(" "), reports.reports.clone())?;
        page.views.extend(server.map(Server::view));
        output::page(path, &page)?;
    }
    if as_json {
        output::json(&Value::Array(reports.reports))?;
    } else if reports.reports.is_empty() {
        note(&match status.signal() {
            Some(signal) => format!("note: signal {signal} ended the command before its report"),
            None => "note: no Python process of this command took an optimizer step of PyTorch, \
                     so there was nothing to plan"
                .to_owned(),
        });
    }
    if flags.strict && missed && !is_off() && status.success() {
        note("note: it is not known that the budget is met: with --strict, exit code 1");
        return Ok(Answer::Code(1));
    }
    Ok(Answer::Code(code(status)))
}

/// The plan for the script's first steps, made on a dry device that is like the first GPU here.
fn scout(flags: &Flags, unpacked: &Unpacked, folder: &Path) -> anyhow::Result<Option<PathBuf>> {
    if is_off() {
        return Ok(None);
    }
    let card = match Card::here() {
        Ok(card) => card,
        Err(why) => {
            note(&format!("note: --scout plans for a GPU, and there is none: {why}"));
            return Ok(None);
        }
    };
    note("note: --scout: the first steps run on the dry device");
    Rehearsal { flags, card: &card, unpacked }.plan(folder)
}

/// Whether the user turned neap off.
fn is_off() -> bool {
    env::var_os("NEAP_OFF").is_some_and(|off| off == "1")
}

/// The command's exit code; of one that a signal ended, what a shell gives.
fn code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    u8::try_from(code.unwrap_or(1) & 0xff).unwrap_or(1)
}

/// Refuses a file that is no plan before anything runs.
fn judge(plan: &Path) -> anyhow::Result<()> {
    let mut file = neap::files::open_regular(plan)?.take(LARGEST_PLAN);
    let form: Value = serde_json::from_reader(&mut file)
        .with_context(|| format!("{}: is not JSON; --save-plan writes plans", plan.display()))?;
    if form["format"] != FORMAT {
        bail!("{}: is no {FORMAT}; `neap torch --save-plan FILE` writes one", plan.display());
    }
    if form["version"] != VERSION {
        bail!(
            "{}: has version {} of {FORMAT}, this neap reads {VERSION}; plan again",
            plan.display(),
            form["version"]
        );
    }
    Ok(())
}

pub fn scratch() -> anyhow::Result<TempDir> {
    private::temporary("neap-torch-", None)
        .context("no scratch folder can be made; TMPDIR names another place")
}

fn run(
    flags: &Flags,
    plan: Option<&Path>,
    unpacked: &Unpacked,
    scratch: &Path,
    (as_json, has_lane): (bool, bool),
) -> anyhow::Result<ExitStatus> {
    let (program, arguments) = flags.command.split_first().context("a command is needed")?;
    let mut command = Command::new(program);
    command.args(arguments);
    environment(&mut command, flags, plan, scratch)?;
    command.env("NEAP_CACHE", &unpacked.cache);
    paths(&mut command, &[&unpacked.torch_hook, &unpacked.python])?;
    let outputs = [
        ("NEAP_TORCH_SAVE_PLAN", &flags.save_plan),
        ("NEAP_TORCH_LATENCIES_OUT", &flags.latencies_out),
    ];
    for (name, path) in outputs {
        if let Some(path) = path {
            command.env(name, std::path::absolute(path)?);
        }
    }
    if let Some(path) = flags.timeline.as_ref().filter(|_| !has_lane) {
        command.env("NEAP_TORCH_TIMELINE", std::path::absolute(path)?);
    }
    if has_lane {
        command.env("NEAP_TORCH_LANE", "1");
    } else {
        command.env_remove("NEAP_TORCH_LANE");
    }
    match flags.needs {
        Some((kept, within)) => command.env("NEAP_TORCH_NEEDS", format!("{}+{}", kept.0, within.0)),
        None => command.env_remove("NEAP_TORCH_NEEDS"),
    };
    match flags.work {
        Some(work) => command.env("NEAP_TORCH_WORK", work.0.to_string()),
        None => command.env_remove("NEAP_TORCH_WORK"),
    };
    if as_json {
        // The report alone is data.
        command.stdout(Stdio::from(io::stderr()));
    }
    launch::run(command)
}

/// What `neap.torch` reads inside the script.
pub fn environment(
    command: &mut Command,
    flags: &Flags,
    plan: Option<&Path>,
    scratch: &Path,
) -> anyhow::Result<()> {
    match flags.budget {
        Some(Budget::Bytes(bytes)) => {
            command.env("NEAP_TORCH_BUDGET", bytes.0.to_string());
        }
        Some(Budget::Share(share)) => {
            let text = format!("{}.{:03}%", share / 1000, share % 1000);
            command.env("NEAP_TORCH_BUDGET", text);
        }
        _ => {}
    }
    match flags.join.as_ref().map(|join| &join.path).or(flags.serve.as_ref()) {
        Some(socket) => {
            command.env("NEAP_TORCH_JOIN", std::path::absolute(socket)?);
            command.env_remove("NEAP_TORCH_BUDGET");
        }
        None => {
            command.env_remove("NEAP_TORCH_JOIN");
        }
    }
    match flags.join.as_ref().filter(|join| join.is_limited()) {
        Some(join) => {
            let [share, limit] = [join.share, join.swap_limit].map(Share::thousandths);
            command.env("NEAP_TORCH_LIMITS", format!("{share}:{limit}"))
        }
        None => command.env_remove("NEAP_TORCH_LIMITS"),
    };
    match &flags.device {
        Some(file) if Path::new(file).exists() => {
            command.env("NEAP_TORCH_DEVICE", std::path::absolute(file)?)
        }
        Some(name) => command.env("NEAP_TORCH_DEVICE", name),
        None => command.env_remove("NEAP_TORCH_DEVICE"),
    };
    let learned =
        [("NEAP_TORCH_LATENCIES", &flags.latencies), ("NEAP_TORCH_PREDICTOR", &flags.predictor)];
    for (name, path) in learned {
        match path {
            Some(path) => command.env(name, std::path::absolute(path)?),
            None => command.env_remove(name),
        };
    }
    command.env("NEAP_TORCH_DIR", scratch);
    command.env("NEAP_TORCH_RECOMPUTE", if flags.no_recompute { "0" } else { "1" });
    command.env("NEAP_TORCH_STRICT", if flags.strict { "1" } else { "0" });
    command.env("NEAP_TORCH_EARLY", if flags.early_updates { "1" } else { "0" });
    command.env("NEAP_TORCH_CACHE", if flags.no_cache { "0" } else { "1" });
    if env::var_os("NEAP").is_none() {
        command.env("NEAP", env::current_exe().context("this executable cannot be found")?);
    }
    match plan {
        Some(plan) => command.env("NEAP_TORCH_PLAN", std::path::absolute(plan)?),
        None => command.env_remove("NEAP_TORCH_PLAN"),
    };
    if ALLOCATOR.iter().all(|name| env::var_os(name).is_none()) {
        // Without it the allocator keeps pieces that fit nothing, and reserves more than it gives
        // out.
        command.env(ALLOCATOR[0], "expandable_segments:True");
    }
    Ok(())
}

/// PYTHONPATH: these folders, then the user's own.
pub fn paths(command: &mut Command, folders: &[&PathBuf]) -> anyhow::Result<()> {
    let own = env::var_os("PYTHONPATH").unwrap_or_default();
    let own = env::split_paths(&own).filter(|p| !p.as_os_str().is_empty());
    let all: Vec<PathBuf> = folders.iter().map(|p| p.to_path_buf()).chain(own).collect();
    command.env("PYTHONPATH", env::join_paths(all)?);
    Ok(())
}

/// What the processes of the script left.
pub struct Reports {
    pub reports: Vec<Value>,
    /// The card on which one ran out of memory before any plan acted.
    card: Option<Card>,
}

impl Reports {
    pub fn read(scratch: &Path) -> Self {
        let mut found = Self { reports: Vec::new(), card: None };
        let entries = fs::read_dir(scratch).into_iter().flatten().flatten();
        let mut paths: Vec<PathBuf> = entries.map(|e| e.path()).collect();
        paths.sort();
        for path in paths {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if name.starts_with("card-") && !found.card.as_ref().is_some_and(Card::is_known) {
                found.card = Some(Card::read(&path));
            }
            if name.starts_with("report-")
                && let Some(report) = neap::files::read_regular(&path, LARGEST_REPORT)
                    .ok()
                    .and_then(|text| serde_json::from_str(&text).ok())
            {
                found.reports.push(report);
            }
        }
        found
    }
}
