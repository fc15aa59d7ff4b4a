//! What `neap dry` says where PyTorch is built for the CPU only: what the script allocates, without
//! an allocator.

use neap::report::table::{Side, Table};
use neap::units::Bytes;
use serde::Serialize;

use super::found::{AllocatedOnly, Process};
use super::report::{Outcome, Run, workspace};
use crate::output::{self, Answer, note};
use crate::settings;

/// The threads of an iteration that multiply: forward's and backward's. Each has a cuBLAS
/// workspace.
const THREADS: u64 = 2;

/// The answer.
#[derive(Serialize)]
struct Report<'a> {
    outcome: &'static str,
    device: &'a str,
    available_bytes: Bytes,
    steps: u64,
    /// Peak of all storages, and the workspaces that cuBLAS would take.
    allocated_bytes: Bytes,
    workspace_bytes: Bytes,
    allocated_only: AllocatedOnly,
}

/// Prints what was counted, and whether the device has at least that.
///
/// # Errors
/// When an output was asked for that needs a device.
pub fn report(
    run: &Run<'_>,
    process: &Process,
    counted: AllocatedOnly,
    outcome: Outcome,
    as_json: bool,
) -> anyhow::Result<Answer> {
    let flags = run.flags;
    settings::none_given(
        [
            (flags.record.is_some(), "--record"),
            (flags.snapshot.is_some(), "--snapshot"),
            (flags.events.is_some(), "--events"),
            (flags.plot.is_some(), "--plot"),
            (flags.html.is_some(), "--html"),
            (flags.at.is_some(), "--at"),
            (flags.plot_sizes.is_some(), "--plot-sizes"),
            (flags.check_against.is_some(), "--check-against"),
        ],
        "this PyTorch is built for the CPU only; install a CUDA build",
    )?;
    let workspaces = Bytes(THREADS * workspace(run.profile).0);
    let all = counted.peak_bytes + workspaces;
    let available = run.available();
    let fits = all <= available;
    let answer = match outcome {
        Outcome::Fits if fits => "may fit",
        Outcome::Fits => "does not fit",
        other => other.name(),
    };
    if as_json {
        output::json(&serde_json::to_value(Report {
            outcome: answer,
            device: &run.profile.name,
            available_bytes: available,
            steps: process.steps,
            allocated_bytes: all,
            workspace_bytes: workspaces,
            allocated_only: counted,
        })?)?;
    } else {
        let mut table = Table::new(&[
            ("allocated only, on fake tensors", Side::Left),
            ("", Side::Right),
            ("bytes", Side::Right),
        ]);
        for (name, bytes) in [
            ("peak, with cuBLAS's workspaces", all),
            ("parameters", counted.parameter_bytes),
            ("gradients after the last step", counted.gradient_bytes),
            ("optimizer states", counted.state_bytes),
            ("cuBLAS's workspaces", workspaces),
        ] {
            table.row([name.to_owned(), bytes.to_string(), bytes.0.to_string()]);
        }
        output::data(&table.to_string())?;
    }
    match outcome {
        Outcome::Fits => note(&format!(
            "allocated only: {answer} on {} with {available}. This PyTorch is built for the CPU \
             only, so its operators were the CPU's and no allocator ran: PyTorch reserves more, \
             and attention may take less. Install a CUDA build for an exact answer",
            run.profile.name
        )),
        _ => {
            let why = process.exception.as_ref().map_or_else(
                || "it gave no reason".to_owned(),
                |e| format!("{}: {}", e.kind, e.message.lines().next().unwrap_or_default()),
            );
            note(&format!(
                "error: the script {answer}: {why}. This PyTorch is built for the CPU only: the \
                 script ran on the CPU with tensors that have shapes and no values"
            ));
        }
    }
    Ok(match outcome {
        Outcome::Fits => Answer::yes_if(fits),
        Outcome::OutOfMemory => Answer::No,
        Outcome::Failed => Answer::Failed,
        Outcome::Stopped => Answer::Stopped,
    })
}
