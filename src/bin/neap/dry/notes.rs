//! What else to know about a run, and how far its figures hold.

use std::fmt;

use neap::device::builtin;
use neap::units::Bytes;

use super::Flags;
use super::found::{DeviceLog, Exception, Found, Process, Read, Unserved};
use super::linux::Ending;
use super::report::{Outcome, Run};
use crate::output::note;

/// The lines of the script, or functions, that are printed of each kind.
const LINES: usize = 12;

/// Why a script that did not run to its end gets no verdict.
const UNKNOWN: &str = "What it takes from there on is not known, so there is no verdict";

/// How far the figures hold, given that what kernels compute of unknown values is 0.
pub struct Certainty {
    word: &'static str,
    /// Lines of the script read results, and might decide by them what runs.
    reads: bool,
    /// cuDNN's workspaces are not known, and were taken as nothing.
    without_workspaces: bool,
    /// DDP's first buckets, which a GPU may free later.
    late: Bytes,
    /// Libraries whose own memory is not seen.
    unseen: usize,
    /// Some steps ran under `--record`, which makes and keeps a few tensors of its own.
    recorded: bool,
}

impl Certainty {
    /// That of one process.
    pub fn new(flags: &Flags, found: &Found, process: &Process) -> Self {
        let log = found.log(process);
        let most =
            |treatment: &str| process.data_dependent.iter().any(|d| d.treatment == treatment);
        let estimated = log.estimated.keys().any(|name| !is_workspace(name))
            || did_nothing(&log).iter().any(|(name, _)| asks(name));
        let word = if estimated || most("zero") || !process.history && !process.devices.is_empty() {
            "estimate"
        } else if most("max") {
            "bound"
        } else {
            "exact"
        };
        Self {
            word,
            reads: process.reads.iter().any(is_made_up),
            without_workspaces: unknown_workspaces(flags, &log) > 0,
            late: process.late_bucket_bytes,
            unseen: log.foreign.len(),
            recorded: process.recorded.as_ref().is_some_and(|r| r.began),
        }
    }

    /// *exact*, *bound* or *estimate*.
    pub const fn word(&self) -> &'static str {
        self.word
    }
}

impl fmt::Display for Certainty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word)?;
        if self.without_workspaces {
            f.write_str(", cuDNN's workspaces aside")?;
        }
        if self.unseen > 0 {
            f.write_str(", what the libraries with a CUDA runtime of their own take aside")?;
        }
        if self.recorded {
            f.write_str(", what recording adds to two steps aside")?;
        }
        if self.late > Bytes::ZERO {
            write!(f, ", but up to {} more while DDP replaces its first buckets", self.late)?;
        }
        if self.reads {
            f.write_str(", if no line listed above decides what runs")?;
        }
        Ok(())
    }
}

/// Whether a function asks for one of cuDNN's workspaces, which are taken as nothing.
fn is_workspace(name: &str) -> bool {
    is_plan(name)
        || name.starts_with("cudnnGetBatchNormalization")
        || name.starts_with("cudnnGetCTCLoss")
}

/// Whether it asks for that of a convolution or an attention, which `--cudnn-workspace` sets.
fn is_plan(name: &str) -> bool {
    name == "cudnnBackendGetAttribute" || name.starts_with("cudnnGetConvolution")
}

/// How often cuDNN was asked for a workspace that neither this device nor a flag knows.
fn unknown_workspaces(flags: &Flags, log: &DeviceLog) -> u64 {
    let known = |name: &str| flags.cudnn_workspace.is_some() && is_plan(name);
    let asked = log.estimated.iter().filter(|(name, _)| is_workspace(name) && !known(name));
    asked.map(|(_, count)| count).sum()
}

/// How often the script ran out of memory and went on.
fn caught(process: &Process) -> u64 {
    let met = process.devices.iter().map(|d| d.ooms).sum();
    if process.ended_by == "oom" { 0 } else { met }
}

/// What else to know, and the answer in one line.
pub fn notes(run: &Run<'_>, process: &Process, outcome: Outcome, least: Option<Bytes>) {
    let Run { flags, found, ending, .. } = *run;
    script(process);
    device(flags, &found.log(process), process);
    match process.recorded.as_ref().map(|r| (&r.path, &r.error)) {
        Some((_, Some(error))) => note(&format!("error: no job graph was recorded: {error}")),
        Some((Some(path), _)) => note(&format!("written: {path}")),
        _ => {}
    }
    if let Some(path) = &process.snapshot {
        note(&format!("written: {path}"));
    }
    let exact = Certainty::new(flags, found, process);
    let least = least.map_or(String::new(), |b| {
        format!("; the smallest device that would do offers {b} ({} bytes)", b.0)
    });
    match outcome {
        Outcome::Fits if caught(process) > 0 => note(&format!(
            "{exact}: fits, as the script went on after {} OutOfMemoryError{}; with more memory it \
             would do more",
            caught(process),
            if caught(process) == 1 { "" } else { "s" },
        )),
        Outcome::Fits => note(&format!("{exact}: fits{least}")),
        Outcome::OutOfMemory => {
            let place = process.exception.as_ref().map_or(String::new(), place);
            note(&format!("{exact}: out of memory{place}{least}"));
        }
        Outcome::Failed => {
            let why = why(process, ending);
            let made_up = made_up(process);
            if process.exception.as_ref().is_some_and(|e| e.message.contains("C compiler")) {
                let place = process.exception.as_ref().map_or(String::new(), place);
                note(&format!(
                    "error: torch.compile{place} needs a C compiler for Triton's kernels, and there is none on the \
                     PATH: install gcc or clang, or run the script without torch.compile"
                ));
                return;
            }
            note(&format!("error: the script failed by itself: {why}{made_up}. {UNKNOWN}"));
        }
        Outcome::Stopped => {
            let place = process.exception.as_ref().map_or(String::new(), place);
            let made_up = made_up(process);
            note(&format!("error: interrupted{place} before the script ended{made_up}. {UNKNOWN}"));
        }
    }
}

/// Why a script failed.
pub fn why(process: &Process, ending: Ending) -> String {
    match (&process.exception, ending.code, ending.signal) {
        (Some(e), ..) => format!("{}{}: {}", e.kind, place(e), first_line(&e.message)),
        (None, Some(code), _) => format!("exit code {code}"),
        (None, None, Some(signal)) => format!("ended by signal {signal}"),
        _ => "no exit code".to_owned(),
    }
}

/// Whether a line of the script got a value that a GPU's may differ from.
fn is_made_up(read: &Read) -> bool {
    matches!(read.kind.as_str(), "computed" | "assumed")
}

/// What to know of a script that failed, or waited for a result without end: the last value that
/// was made up.
fn made_up(process: &Process) -> String {
    let Some(last) = &process.last_made_up else { return String::new() };
    let place = line(last.file.as_deref(), last.line);
    match &last.op {
        Some(op) => format!("; the last value made up here is that of {op}, at {place}"),
        None => format!("; the last value made up here was read at {place}"),
    }
}

/// Notes on the script's own lines.
fn script(process: &Process) {
    let reads: Vec<_> = process.reads.iter().filter(|r| is_made_up(r)).collect();
    for read in reads.iter().take(LINES) {
        let (times, place) = (times(read.count), line(read.file.as_deref(), read.line));
        if read.kind == "assumed" {
            note(&format!(
                "note: {place} asks {times} whether all is true, or finite, of what the device \
                 computed: the answer is yes here"
            ));
        } else {
            note(&format!("note: {place} reads a result of the device {times}: it reads 0 here"));
        }
    }
    more(reads.len(), "lines that read a result");
    for call in process.data_dependent.iter().take(LINES) {
        let taken = if call.treatment == "max" { "as large as it can be" } else { "empty" };
        let (times, place) = (times(call.count), line(call.file.as_deref(), call.line));
        note(&format!(
            "note: {} calls {} {times}, whose size depends on values: it is taken {taken}",
            place, call.op
        ));
    }
    more(process.data_dependent.len(), "calls whose size depends on values");
    if !process.redirected_writes.is_empty() {
        let files = process.redirected_writes.join(", ");
        note(&format!(
            "note: not saved, since values are not real here (--allow-writes saves): {files}"
        ));
    }
    cycles(process);
    if caught(process) > 0 {
        let times = times(caught(process));
        note(&format!("note: the script met an OutOfMemoryError {times} and went on"));
    }
    for problem in process.problems.iter().take(LINES) {
        note(&format!(
            "note: names and lines may be missing, since neap's own hook failed: {problem}"
        ));
    }
}

/// A note on what of the peak only Python's garbage collector frees, where that matters.
fn cycles(process: &Process) {
    let Some(peak) = &process.peak else { return };
    let Some(cycles) = peak.cycles.as_ref().filter(|c| c.bytes >= peak.allocated_bytes / 100)
    else {
        return;
    };
    let (at_once, never) = (Bytes(cycles.peak_at_once_bytes), Bytes(cycles.peak_never_bytes));
    let made = match cycles.lines.as_slice() {
        [] => String::new(),
        [one] => format!(" made at {}", one.line),
        [first, rest @ ..] => format!(" made at {} and {} more places", first.line, rest.len()),
    };
    note(&format!(
        "note: {} of the peak are in reference cycles{made}, which only Python's garbage collector \
         frees: what is allocated peaks between {at_once} (collected at the end of each step, at \
         once where none follows) and {never} (never collected)",
        Bytes(cycles.bytes)
    ));
}

/// Notes on what the device could not know.
fn device(flags: &Flags, log: &DeviceLog, process: &Process) {
    let unknown = unknown_workspaces(flags, log);
    if unknown > 0 {
        let times = times(unknown);
        note(&format!(
            "note: cuDNN was asked {times} for a workspace's size, which only a real GPU knows: \
             taken as 0 bytes (--cudnn-workspace sets that of convolutions)"
        ));
    }
    for (name, count) in log.estimated.iter().filter(|(n, _)| !is_workspace(n)).take(LINES) {
        let times = times(*count);
        note(&format!(
            "note: {name} was asked {times} for a size that only a real GPU knows: estimated"
        ));
    }
    let idle = did_nothing(log);
    for (name, count) in idle.iter().take(LINES) {
        let times = times(*count);
        note(&format!("note: {name} was called {times} and did nothing"));
    }
    more(idle.len(), "functions that did nothing");
    if let Some(unserved) = &log.unserved {
        note(&no_kernels(unserved, &process.torch));
    }
    for library in &log.foreign {
        note(&format!(
            "note: {library} brings a CUDA runtime of its own, to which this device does not \
             answer: the library's calls fail here, and what it takes on a GPU is not counted"
        ));
    }
    if !process.history && !process.devices.is_empty() {
        note(&format!(
            "note: PyTorch keeps no history of its allocator here ({}): the figures are what the \
             device gave out, and no block is listed",
            process.allocator
        ));
    }
}

/// Which devices a library has kernels for, where this one is none of them.
fn no_kernels(unserved: &Unserved, torch: &str) -> String {
    let Unserved { capability, served, library } = unserved;
    let able = |of: u32| served.iter().any(|s| s / 10 == of / 10 && *s <= of);
    let names = builtin::names();
    let devices = names.iter().filter(|name| {
        let profile = builtin::find(name).filter(|p| p.multiprocessors.is_some());
        profile.is_some_and(|p| able(super::launch::Kernels::new(&p).capability))
    });
    let devices: Vec<_> = devices.map(ToString::to_string).collect();
    let file = library.rsplit('/').next().unwrap_or_default();
    format!(
        "note: {file} under PyTorch {torch} has no kernels for this device's compute capability, \
         {}.{}, on a real one neither; it has them for {}",
        capability / 10,
        capability % 10,
        devices.join(", ")
    )
}

fn more(count: usize, what: &str) {
    if count > LINES {
        note(&format!("note: and {} more {what}; --json has all", count - LINES));
    }
}

fn line(file: Option<&str>, line: Option<u64>) -> String {
    match (file, line) {
        (Some(file), Some(line)) => format!("{file}:{line}"),
        _ => "a thread without Python code".to_owned(),
    }
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}

fn place(exception: &Exception) -> String {
    match (&exception.file, exception.line) {
        (Some(file), Some(line)) => format!(" at {file}:{line}"),
        _ => String::new(),
    }
}

fn times(count: u64) -> String {
    if count == 1 { "once".to_owned() } else { format!("{count} times") }
}

/// Libraries whose results scripts look at on the host: decompositions, transforms, storage. That
/// kernels, cuBLAS and cuDNN compute nothing is what the device is.
const LOOKED_AT: [&str; 6] = ["cusolver", "cusparse", "cufft", "curand", "cuFile", "nvshmem"];

/// Whether a function asks for a size.
fn asks(name: &str) -> bool {
    ["bufferSize", "WorkspaceSize", "GetSize", "SpaceSize"].iter().any(|a| name.contains(a))
}

/// Functions that did nothing although a caller may have counted on them, and their calls.
pub fn did_nothing(log: &DeviceLog) -> Vec<(String, u64)> {
    const ARRANGING: [&str; 6] = ["Create", "Destroy", "Set", "Stream", "Version", "Init"];
    let matters = |name: &str| {
        let works = LOOKED_AT.iter().any(|l| name.starts_with(l))
            && !ARRANGING.iter().any(|a| name.contains(a));
        works || asks(name)
    };
    log.stubs.iter().filter(|(n, _)| matters(n)).map(|(n, c)| (n.clone(), *c)).collect()
}
