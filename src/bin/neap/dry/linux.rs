//! The command itself: unpack, run, gather, answer.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;

use anyhow::Context;
use neap::device::profile;

use super::found::Found;
use super::{Flags, launch, prepare, report, unpack};
use crate::output::{self, Answer};
use crate::settings::Outputs;

/// Runs the command and reports.
///
/// # Errors
/// Bad use.
pub fn main(flags: &Flags, as_json: bool) -> anyhow::Result<Answer> {
    if let Some(torch) = &flags.prepare {
        let prepared = prepare::prepare(torch, &unpack::unpack()?)?;
        output::data(&launch::environment(&prepared))?;
        return Ok(Answer::Yes);
    }
    let outputs = [flags.record.as_deref(), flags.snapshot.as_deref(), flags.events.as_deref()];
    Outputs::new(&[Path::new(&flags.device)], &outputs)?;
    let profile = profile::load(&flags.device)?;
    let unpacked = unpack::unpack()?;
    let scratch = tempfile::Builder::new()
        .prefix("neap-dry-")
        .tempdir()
        .context("no scratch folder can be made; TMPDIR names another place")?;
    let command = launch::command(flags, &profile, &unpacked, scratch.path(), as_json)?;
    let status = launch::run(command)?;
    let found = Found::read(scratch.path());
    report::report(
        flags,
        &profile,
        &found,
        Ending { code: status.code(), signal: status.signal() },
        as_json,
    )
}

/// How the command ended.
#[derive(Clone, Copy)]
pub struct Ending {
    pub code: Option<i32>,
    pub signal: Option<i32>,
}
