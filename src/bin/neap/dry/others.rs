//! The script on other devices: silently, and without a trace.

use std::process::{Command, Stdio};

use neap::device::Profile;
use neap::sim::requests::Request;
use tempfile::TempDir;

use super::Flags;
use super::found::{Found, Process};
use super::launch::{self, Kernels, Memory};
use super::linux::{Ending, scratch};
use super::notes::{Certainty, why};
use super::report::{Outcome, outcome, requests};
use super::unpack::Unpacked;
use super::verdicts::{Asked, Ran, Says};

/// A silent run: what it left, how it ended, and the folder that it is in.
pub struct Again {
    pub found: Found,
    pub ending: Ending,
    _scratch: TempDir,
}

/// Runs the script once more on a device. It reads and prints nothing, and what it saves goes to
/// scratch.
///
/// # Errors
/// When it can't be started.
pub fn silently(
    flags: &Flags,
    profile: &Profile,
    memory: Memory,
    unpacked: &Unpacked,
) -> anyhow::Result<Again> {
    let scratch = scratch()?;
    let mut command = launch::command(flags, profile, memory, unpacked, scratch.path())?;
    silence(&mut command);
    let ending = Ending::new(launch::run(command)?);
    Ok(Again { found: Found::read(scratch.path()), ending, _scratch: scratch })
}

fn silence(command: &mut Command) {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.env_remove("NEAP_DRY_RECORD").env_remove("NEAP_DRY_SNAPSHOT");
    command.env("NEAP_DRY_DETAIL", "0").env("NEAP_DRY_ALLOW_WRITES", "0");
    launch::stay_offline(command);
}

/// Runs the script on a device with that device's own memory.
pub fn run(flags: &Flags, profile: &Profile, unpacked: &Unpacked) -> Ran {
    let nothing = |says| Ran { says, asked: None };
    if launch::interrupted() {
        return nothing(Says::NotKnown);
    }
    let again = match silently(flags, profile, Memory::new(profile), unpacked) {
        Ok(again) => again,
        Err(error) => return nothing(Says::Fails { why: format!("{error:#}") }),
    };
    let Again { found, ending, .. } = &again;
    if ending.interrupted {
        return nothing(Says::NotKnown);
    }
    let Some(process) = found.main() else {
        return nothing(Says::Fails { why: "it left no report".to_owned() });
    };
    let from = match Certainty::new(flags, found, process).word() {
        "exact" => "a run on it".to_owned(),
        word => format!("a run on it ({word})"),
    };
    match outcome(found, *ending) {
        Outcome::Fits => {
            let reserved = process.peak_reserved();
            let asked = requests(found, process).and_then(|r| asked(process, r));
            Ran { says: Says::Fits { reserved, from }, asked }
        }
        Outcome::OutOfMemory => nothing(Says::DoesNotFit { from }),
        Outcome::Failed => nothing(Says::Fails { why: failure(profile, process, *ending) }),
        Outcome::Stopped => nothing(Says::NotKnown),
    }
}

/// What a script asked for that reached its end, unless the memory decided that.
pub fn asked(process: &Process, requests: Vec<Request>) -> Option<Asked> {
    let met = process.devices.iter().any(|d| d.ooms > 0);
    let config = process.allocator_settings();
    (!met).then(|| Asked { requests: requests.into(), config })
}

/// Why a run failed, in a few words.
fn failure(profile: &Profile, process: &Process, ending: Ending) -> String {
    let message = process.exception.as_ref().map_or("", |e| &e.message);
    if message.contains("no kernel image is available") {
        let capability = Kernels::new(profile).capability;
        let (major, minor) = (capability / 10, capability % 10);
        return format!(
            "the installed PyTorch has no kernels for compute capability {major}.{minor}"
        );
    }
    why(process, ending)
}
