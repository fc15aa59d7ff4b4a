//! What `neap dry` says at the end, and its exit code.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, bail};
use neap::device::Profile;
use neap::report::page::Limit;
use neap::report::table::{Side, Table};
use neap::sim::allocator::replay::smallest_capacity;
use neap::sim::requests::Request;
use neap::units::Bytes;
use serde_json::{Value, json};

use super::against::{Against, Recorded};
use super::baseline::Baseline;
use super::events::{self, Allocations, Event};
use super::found::{Found, Peak, Process, Python};
use super::linux::Ending;
use super::notes::{self, Certainty};
use super::others::{self, Again};
use super::sizes::{self, Sizes};
use super::unpack::Unpacked;
use super::verdicts::{self, Asked, Own, Runner, Says, Verdict};
use super::{Flags, launch, on_cpu, page, plot, whole};
use crate::output::{self, Answer, note};

/// The largest blocks that are printed.
const BLOCKS: usize = 10;

/// How the run is to be judged.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Fits,
    OutOfMemory,
    Failed,
    Stopped,
}

impl Outcome {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fits => "fits",
            Self::OutOfMemory => "out of memory",
            Self::Failed => "failed",
            Self::Stopped => "interrupted",
        }
    }

    /// Whether the script ran as far as the device let it.
    pub const fn is_whole(self) -> bool {
        matches!(self, Self::Fits | Self::OutOfMemory)
    }
}

/// A run to report.
pub struct Run<'a> {
    pub flags: &'a Flags,
    pub profile: &'a Profile,
    pub found: &'a Found,
    pub ending: Ending,
    pub unpacked: &'a Unpacked,
}

impl Run<'_> {
    /// What the device has for allocations.
    pub fn available(&self) -> Bytes {
        self.flags.device_bytes.unwrap_or_else(|| self.profile.available())
    }

    /// The device in words.
    fn card(&self) -> String {
        match self.flags.device_bytes {
            Some(bytes) => format!("{} with {bytes}", self.profile.name),
            None => self.profile.name.clone(),
        }
    }
}

/// What the run is compared with.
pub struct Besides<'a> {
    pub recorded: Option<&'a Recorded>,
    pub baseline: Option<&'a Baseline>,
}

/// Writes the files that were asked for, prints the report, and answers.
///
/// # Errors
/// When a file can't be written.
pub fn report(
    run: &Run<'_>,
    again: Option<&Again>,
    besides: &Besides<'_>,
    as_json: bool,
) -> anyhow::Result<Answer> {
    let Run { flags, profile, found, ending, .. } = *run;
    let Some(process) = found.main() else {
        return Ok(without_python(found, ending));
    };
    let outcome = outcome(found, ending);
    if let Some(counted) = process.allocated_only {
        if besides.baseline.is_some() {
            bail!("--baseline: this PyTorch is built for the CPU only; install a CUDA build");
        }
        return on_cpu::report(run, process, counted, outcome, as_json);
    }
    if let Some(to) = &flags.events {
        write_events(found, process, to)?;
    }
    // After an out-of-memory error the requests end early: those of the second run go on. Of a
    // script that failed otherwise no run shows what it takes, so there is nothing to judge.
    let whole = match outcome {
        Outcome::Fits => Some((found, process)),
        Outcome::OutOfMemory => again.and_then(|a| Some((&a.found, a.found.main()?))),
        Outcome::Failed | Outcome::Stopped => None,
    };
    let requests = whole.and_then(|(found, process)| requests(found, process));
    let config = process.allocator_settings();
    let smallest = match &requests {
        Some(requests) => smallest_capacity(requests, &config, None).map(|s| s.capacity),
        None => whole.and_then(|(_, process)| without_history(process)),
    };
    let asked = whole.zip(requests).and_then(|((_, process), r)| others::asked(process, r));
    let verdicts = verdicts(run, outcome, process, asked);
    let (events, allocations) = detail(found, process)?;
    let available = run.available();
    let card = run.card();
    let by_size = whole.and_then(|(_, process)| Sizes::new(process));
    plot_sizes(flags, by_size.as_ref(), (&card, available))?;
    let own = events::of_device(&events, process.main_device());
    let early = process.ended_by == "steps";
    let against = besides.recorded.map(|r| Against::new(r, &own, &config, &allocations, early));
    let mut form = object(run, outcome, smallest, &verdicts);
    form["sizes"] = by_size.as_ref().map_or(Value::Null, |s| s.form(flags.at.as_ref(), available));
    // A run that did not end well has no peak to compare.
    let growth = besides.baseline.filter(|_| outcome == Outcome::Fits);
    let growth = growth.map(|before| before.against(&form, flags.tolerance)).transpose()?;
    pictures(run, process, (&events, &allocations), (&verdicts, &form))?;
    if as_json {
        if let Some(against) = &against {
            form["against"] = against.json();
        }
        if let Some(growth) = &growth {
            form["baseline"] = growth.json();
        }
        output::json(&form)?;
    } else {
        for process in &found.processes {
            output::data(&peaks(profile, process, found.processes.len() > 1, outcome.is_whole()))?;
        }
        for device in whole::fullest(&found.logs) {
            output::data(&whole::table(&device, &profile.name))?;
        }
        details(process)?;
        if let Some(sizes) = &by_size {
            output::data(&sizes.table(flags.at.as_ref(), &card, available))?;
        }
        if !verdicts.is_empty() {
            output::data(&verdicts::table(&verdicts))?;
        }
        if let Some(against) = &against {
            output::data(&against.table())?;
        }
        if let Some(growth) = &growth {
            output::data(&growth.table())?;
        }
    }
    notes::notes(run, process, outcome, smallest);
    if let Some(why) = flags.at.as_ref().and_then(|at| sizes::why_not(by_size.as_ref(), at)) {
        note(&format!("note: {why}"));
    }
    if let Some(against) = &against {
        against.notes();
    }
    if let Some(problem) = found.processes.iter().find_map(|p| p.unwritten.first()) {
        bail!("{problem}");
    }
    Ok(match outcome {
        Outcome::Fits => Answer::yes_if(
            against.is_none_or(|a| a.is_equal()) && growth.is_none_or(|growth| !growth.grew),
        ),
        Outcome::OutOfMemory => Answer::No,
        Outcome::Failed => Answer::Failed,
        Outcome::Stopped => Answer::Stopped,
    })
}

/// The events of a process, and what its allocations are where that was asked for.
fn detail(found: &Found, process: &Process) -> anyhow::Result<(Vec<Event>, Allocations)> {
    let Some(path) = found.allocations(process.pid) else { return Ok(Default::default()) };
    let events = found.events(process.pid).map(|p| events::read(&p)).transpose()?;
    Ok((events.unwrap_or_default(), Allocations::read(&path)?))
}

/// Draws memory over time, as a picture and as a page, where that was asked for.
fn pictures(
    run: &Run<'_>,
    process: &Process,
    (events, allocations): (&[Event], &Allocations),
    (verdicts, form): (&[Verdict], &Value),
) -> anyhow::Result<()> {
    let command: Vec<_> = run.flags.command.iter().map(|c| c.to_string_lossy()).collect();
    let title = format!("{} on {}", command.join(" "), run.profile.name);
    if let Some(to) = &run.flags.plot {
        let config = process.allocator_settings();
        plot::plot(&title, process, (events, allocations), &config, to)?;
    }
    let Some(to) = &run.flags.html else { return Ok(()) };
    let shown = page::Shown {
        title,
        process,
        events,
        allocations,
        limit: Limit { name: run.card(), value: run.available().0 },
        fits: verdicts::tabled(verdicts),
        report: form.clone(),
    };
    shown.write(to)
}

/// Draws the peak by size where that was asked for.
fn plot_sizes(flags: &Flags, sizes: Option<&Sizes<'_>>, on: (&str, Bytes)) -> anyhow::Result<()> {
    let Some(to) = &flags.plot_sizes else { return Ok(()) };
    let Some(sizes) = sizes else { bail!("--plot-sizes: {}", sizes::ONE) };
    sizes.plot(flags.at.as_ref(), on, to)
}

/// The command ended and no Python process reported: says why.
fn without_python(found: &Found, ending: Ending) -> Answer {
    let states: Vec<Python> = found.pythons.iter().map(|(state, _)| *state).collect();
    let python = found.pythons.first().map_or("", |(_, path)| path.as_str());
    if ending.interrupted {
        let used = if found.logs.is_empty() { "used the device" } else { "reported" };
        note(&format!("error: interrupted before the script {used}"));
        return Answer::Stopped;
    }
    if let Some(signal) = ending.signal {
        note(&format!("error: the command was ended by signal {signal} before it reported"));
    } else if let Some(why) = found.damaged.first() {
        note(&format!("error: the report of a process cannot be read: {why}"));
    } else if states.contains(&Python::Ready) && ending.code.is_some_and(|code| code != 0) {
        let code = ending.code.unwrap_or_default();
        note(&format!(
            "error: the script failed by itself before it used the device: exit code {code}"
        ));
    } else if states.contains(&Python::Ready) {
        note(
            "error: the script ended without using the device, so that there is nothing to report",
        );
    } else if states.contains(&Python::Failed) {
        note("error: the device could not be put under PyTorch; the message above says why");
    } else if states.contains(&Python::CpuOnly) {
        note(&format!(
            "error: the PyTorch of {python} is built for the CPU only; install a CUDA build, or use `neap estimate`"
        ));
    } else if states.contains(&Python::NoTorch) {
        note(&format!("error: {python} has no PyTorch; activate the environment that has it"));
    } else {
        note(
            "error: the command started no Python that reads PYTHONPATH (python -I and -E do not)",
        );
    }
    Answer::Failed
}

/// How a run is to be judged.
pub fn outcome(found: &Found, ending: Ending) -> Outcome {
    if ending.interrupted {
        return Outcome::Stopped;
    }
    if found.out_of_memory() {
        return Outcome::OutOfMemory;
    }
    let failed = found.processes.iter().any(|p| p.ended_by == "exception");
    if failed || ending.code != Some(0) { Outcome::Failed } else { Outcome::Fits }
}

fn write_events(found: &Found, process: &Process, to: &Path) -> anyhow::Result<()> {
    let from = found.events(process.pid).context("the script left no requests to write")?;
    let bytes = neap::files::read(&from, events::LARGEST)?;
    neap::files::write(to, |file| file.write_all(&bytes))?;
    note(&format!("written: {}", to.display()));
    Ok(())
}

/// A process's requests on the device of which it reserved most.
pub fn requests(found: &Found, process: &Process) -> Option<Vec<Request>> {
    let events = events::read(&found.events(process.pid)?).ok()?;
    let requests = events::of_device(&events, process.main_device());
    (!requests.is_empty()).then_some(requests)
}

/// The least device where PyTorch kept no history: what the device gave out at most.
fn without_history(process: &Process) -> Option<Bytes> {
    let most = process.devices.iter().map(|d| d.peak_reserved_bytes).max()?;
    (!process.history && most > 0).then_some(Bytes(most))
}

/// What is known of each built-in device. A script that failed has no verdict.
fn verdicts(
    run: &Run<'_>,
    outcome: Outcome,
    process: &Process,
    asked: Option<Asked>,
) -> Vec<Verdict> {
    let Run { flags, profile, unpacked, .. } = *run;
    let from = "this run".to_owned();
    let says = match outcome {
        Outcome::Fits => Says::Fits { reserved: process.peak_reserved(), from },
        Outcome::OutOfMemory => Says::DoesNotFit { from },
        Outcome::Failed | Outcome::Stopped => return Vec::new(),
    };
    let says = Some(says).filter(|_| flags.device_bytes.is_none());
    if says.is_none() && asked.is_none() && !flags.all_devices {
        return Vec::new();
    }
    let runner = |device: &Profile| others::run(flags, device, unpacked);
    // Several processes meet at a port, which two runs at a time would share.
    let at_once = if run.found.processes.len() > 1 { 1 } else { launch::AT_ONCE };
    if flags.all_devices {
        note("note: the script runs silently on other devices (--all-devices)");
    }
    let runner = flags.all_devices.then_some(&runner as Runner<'_>);
    verdicts::verdicts(&Own { profile, says, asked }, runner, at_once)
}

/// What cuBLAS takes for each handle and stream, through PyTorch's allocator: before Hopper, and
/// since (on Blackwell since PyTorch 2.13).
const WORKSPACE_BEFORE: Bytes = Bytes((8 << 20) + (128 << 10));
const WORKSPACE_HOPPER: Bytes = Bytes(32 << 20);

/// What cuBLAS takes for each handle and stream on a device.
pub fn workspace(profile: &Profile) -> Bytes {
    let hopper = profile.multiprocessors.as_ref().is_none_or(|m| m.capability >= 9);
    if hopper { WORKSPACE_HOPPER } else { WORKSPACE_BEFORE }
}

/// One process's peaks, of the whole run or of what came before it failed.
fn peaks(profile: &Profile, process: &Process, several: bool, whole: bool) -> String {
    let so_far = if whole { "" } else { " so far" };
    let mut table = Table::new(&[
        ("", Side::Left),
        ("reserved", Side::Right),
        ("allocated", Side::Right),
        ("reserved, bytes", Side::Right),
        ("allocated, bytes", Side::Right),
    ]);
    let row = |table: &mut Table, name: String, reserved: u64, allocated: u64| {
        table.row([
            name,
            Bytes(reserved).to_string(),
            Bytes(allocated).to_string(),
            reserved.to_string(),
            allocated.to_string(),
        ]);
    };
    for device in &process.devices {
        let rank =
            process.rank.filter(|_| several).map_or(String::new(), |r| format!("rank {r}, "));
        let name = format!("{rank}{} {}: peak{so_far}", profile.name, device.index);
        row(&mut table, name, device.peak_reserved_bytes, device.peak_allocated_bytes);
    }
    for phase in &process.phases {
        let name = format!("  {}", phase.name);
        row(&mut table, name, phase.peak_reserved_bytes, phase.peak_allocated_bytes);
    }
    table.to_string()
}

/// Where the peak is, and what it is made of.
fn details(process: &Process) -> anyhow::Result<()> {
    let Some(peak) = &process.peak else { return Ok(()) };
    let part = |word: &str, text: &Option<String>| match text.as_deref() {
        None | Some("") => String::new(),
        Some(text) => format!(", {word} {text}"),
    };
    let (module, line) = (part("in", &peak.module), part("at", &peak.line));
    output::data(&format!(
        "\nThe peak of {} allocated is in step {}, {}{module}{line}.",
        Bytes(peak.allocated_bytes),
        peak.step,
        peak.phase
    ))?;
    output::data(&category_table(process, peak))?;
    if !peak.blocks.is_empty() {
        let mut table = Table::new(&[
            ("at the peak", Side::Right),
            ("category", Side::Left),
            ("name", Side::Left),
            ("made at", Side::Left),
        ]);
        for block in peak.blocks.iter().take(BLOCKS) {
            table.row([
                Bytes(block.bytes).to_string(),
                block.category.replace('_', " "),
                block.name.clone().unwrap_or_else(|| "-".into()),
                block.line.clone().unwrap_or_else(|| "-".into()),
            ]);
        }
        output::data(&format!("\n{table}"))?;
    }
    Ok(())
}

/// Categories at the peak, and at each phase's own.
fn category_table(process: &Process, peak: &Peak) -> String {
    let mut columns = vec![("category", Side::Left), ("at the peak", Side::Right)];
    let phases: Vec<_> = process.categories_at_phase.iter().collect();
    columns.extend(phases.iter().map(|p| (p.phase.as_str(), Side::Right)));
    let mut table = Table::new(&columns);
    let held = |name: &String| {
        let at = |c: &BTreeMap<String, u64>| c.get(name).is_some_and(|bytes| *bytes > 0);
        at(&peak.categories) || phases.iter().any(|p| at(&p.categories))
    };
    let mut names: Vec<_> = peak.categories.iter().filter(|(name, _)| held(name)).collect();
    names.sort_by_key(|(name, bytes)| (std::cmp::Reverse(**bytes), name.as_str()));
    for (name, bytes) in names {
        let others = phases.iter().map(|p| p.categories.get(name).copied().unwrap_or(0));
        let cells = std::iter::once(*bytes).chain(others).map(|b| Bytes(b).to_string());
        table.row(std::iter::once(name.replace('_', " ")).chain(cells));
    }
    table.to_string()
}

/// The report for programs.
fn object(run: &Run<'_>, outcome: Outcome, least: Option<Bytes>, verdicts: &[Verdict]) -> Value {
    let Run { flags, profile, found, .. } = *run;
    let processes: Vec<Value> = found
        .processes
        .iter()
        .map(|p| {
            json!({
                "pid": p.pid, "rank": p.rank, "torch": p.torch, "ended_by": p.ended_by, "exception": p.exception,
                "steps": p.steps, "devices": p.devices, "phases": p.phases, "peak": p.peak, "reads": p.reads,
                "last_made_up": p.last_made_up,
                "data_dependent": p.data_dependent, "late_bucket_bytes": p.late_bucket_bytes,
                "redirected_writes": p.redirected_writes, "recorded": p.recorded,
                "problems": p.problems, "allocator": p.allocator, "history": p.history,
                "estimated": found.log(p).estimated, "did_nothing": notes::did_nothing(&found.log(p)),
                "own_runtimes": found.log(p).foreign,
            })
        })
        .collect();
    let main = found.main();
    let all = || main.iter().flat_map(|p| &p.devices);
    json!({
        "device": profile.name,
        "outcome": outcome.name(),
        "certainty": main
            .filter(|_| outcome.is_whole())
            .map(|p| Certainty::new(flags, found, p).to_string()),
        "peak_reserved_bytes": all().map(|d| d.peak_reserved_bytes).max(),
        "peak_allocated_bytes": all().map(|d| d.peak_allocated_bytes).max(),
        "smallest_device_bytes": least.map(|b| b.0),
        "verdicts": verdicts::form(verdicts),
        "devices": whole::form(&whole::fullest(&found.logs)),
        "processes": processes,
    })
}
