//! The command itself: unpack, run, gather, answer.

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;
use std::{env, fs, io, thread};

use anyhow::Context;
use neap::device::{Profile, profile};
use neap::private;
use tempfile::TempDir;

use super::against::Recorded;
use super::baseline::Baseline;
use super::found::Found;
use super::launch::Memory;
use super::others::{self, Again};
use super::unpack::Unpacked;
use super::{Flags, launch, prepare, report, unpack};
use crate::output::{self, Answer, note};
use crate::settings::Outputs;

/// Runs the command and reports.
///
/// # Errors
/// Bad use.
pub fn main(flags: &Flags, as_json: bool) -> anyhow::Result<Answer> {
    if let Some(torch) = &flags.prepare {
        let scratch = env::var_os("NEAP_DRY_DIR").map_or_else(env::temp_dir, PathBuf::from);
        let unpacked = unpack::unpack(&scratch)?;
        let prepared = prepare::prepare(torch, &unpacked, &scratch)?;
        output::data(&launch::environment(&prepared))?;
        return Ok(Answer::Yes);
    }
    let outputs = [&flags.record, &flags.snapshot, &flags.events, &flags.plot, &flags.html];
    let mut inputs = vec![Path::new(&flags.device)];
    inputs.extend(flags.check_against.as_deref());
    inputs.extend(flags.baseline.as_deref());
    inputs.extend(flags.command.iter().map(Path::new).filter(|path| path.is_file()));
    Outputs::new(&inputs, &outputs.map(|path| path.as_deref()))?;
    let recorded = flags.check_against.as_deref().map(Recorded::read).transpose()?;
    let baseline = flags.baseline.as_deref().map(Baseline::read).transpose()?;
    let profile = profile::load(&flags.device)?;
    if let Some(baseline) = &baseline {
        baseline.must_be_of(&profile.name)?;
    }
    let memory = Memory::asked(flags, &profile)?;
    // From before there is a folder that a signal could leave behind.
    launch::forward_signals();
    let scratch = scratch()?;
    let unpacked = unpack::unpack(scratch.path())?;
    let mut command = launch::command(flags, &profile, memory, &unpacked, scratch.path())?;
    if as_json {
        // The report alone is data.
        command.stdout(Stdio::from(io::stderr()));
    }
    let status = launch::run(command)?;
    let found = Found::read(scratch.path());
    let ending = Ending::new(status);
    let ended = ending.signal.is_some() || ending.interrupted;
    let again = if found.out_of_memory() && !flags.no_second_run && !ended {
        second_run(flags, &profile, &unpacked)?
    } else {
        None
    };
    let run = report::Run { flags, profile: &profile, found: &found, ending, unpacked: &unpacked };
    let besides = report::Besides { recorded: recorded.as_ref(), baseline: baseline.as_ref() };
    let answer = report::report(&run, again.as_ref(), &besides, as_json);
    remove(scratch);
    answer
}

/// Removes the run's folder, again if a process that the script left behind wrote there meanwhile.
fn remove(scratch: TempDir) {
    let folder = scratch.keep();
    for _ in 0..20 {
        if fs::remove_dir_all(&folder).is_ok() || !folder.exists() {
            return;
        }
        thread::sleep(Duration::from_millis(50));
    }
}

/// Runs the script once more, silently and on a device that is never full. No other way shows what
/// the script asks for after the place where it failed.
fn second_run(
    flags: &Flags,
    profile: &Profile,
    unpacked: &Unpacked,
) -> anyhow::Result<Option<Again>> {
    note(
        "note: out of memory; running the script again on a device without a limit (--no-second-run skips this)",
    );
    let again = others::silently(flags, profile, Memory::UNLIMITED, unpacked)?;
    Ok(Some(again).filter(|again| again.ending.code == Some(0)))
}

/// A run's own folder.
///
/// # Errors
/// When it can't be made.
pub fn scratch() -> anyhow::Result<TempDir> {
    private::temporary("neap-dry-", None)
        .context("no scratch folder can be made; TMPDIR names another place")
}

/// How the command ended.
#[derive(Clone, Copy)]
pub struct Ending {
    pub code: Option<i32>,
    pub signal: Option<i32>,
    /// Whether a signal asked this process to end.
    pub interrupted: bool,
}

impl Ending {
    /// That of a command.
    pub fn new(status: ExitStatus) -> Self {
        Self { code: status.code(), signal: status.signal(), interrupted: launch::interrupted() }
    }
}
