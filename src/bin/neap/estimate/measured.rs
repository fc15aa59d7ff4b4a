//! A trace that was recorded on a GPU: its figures are measured, so there is nothing to estimate.

use std::fmt;
use std::path::Path;

use anyhow::bail;
use neap::estimate::trace::{Measured, Trace};
use neap::report::table::{Side, Table};
use neap::units::Bytes;
use serde::Serialize;

use super::Flags;
use crate::settings;

/// What a file says of a GPU's memory.
#[derive(Serialize)]
pub struct Report {
    file: String,
    measured: Vec<Device>,
}

#[derive(Serialize)]
struct Device {
    device: String,
    allocated_bytes: Option<Bytes>,
    reserved_bytes: Option<Bytes>,
    memory_events: u64,
}

/// How a job is recorded so that it can be estimated, or had for sure.
const REMEDY: &str = "to estimate, record the job with its model and data on the CPU \
    (activities=[ProfilerActivity.CPU]); for exact figures run the script under `neap dry`, or \
    replay a snapshot of torch.cuda.memory._dump_snapshot with `neap replay`";

/// The measured figures of a trace, if it was recorded on a GPU.
///
/// # Errors
/// When the file has no totals, or flags ask for what only an estimate has.
pub fn compared(flags: &Flags, file: &Path, trace: &Trace) -> anyhow::Result<Option<Report>> {
    if trace.measured.is_empty() {
        return Ok(None);
    }
    let recorded = format!("{} was recorded on a GPU", file.display());
    settings::none_given(
        [
            (flags.plot.is_some(), "--plot"),
            (flags.html.is_some(), "--html"),
            (flags.curve.is_some(), "--curve"),
            (flags.snapshot.is_some(), "--snapshot"),
            (flags.by.is_some(), "--by"),
            (flags.what_if.is_some(), "--what-if"),
            (flags.against.is_some(), "--against"),
            (!flags.device.is_empty(), "--device"),
        ],
        format!("{recorded}: its figures are measured and not estimated; {REMEDY}"),
    )?;
    if trace.measured.iter().all(|m| m.allocated.is_none() && m.reserved.is_none()) {
        bail!("{recorded}, and its memory events have no totals; {REMEDY}");
    }
    let device = |m: &Measured| Device {
        device: match m.kind {
            1 => format!("cuda:{}", m.device),
            kind => format!("device {} of type {kind}", m.device),
        },
        allocated_bytes: m.allocated,
        reserved_bytes: m.reserved,
        memory_events: m.events,
    };
    let measured = trace.measured.iter().map(device).collect();
    Ok(Some(Report { file: file.display().to_string(), measured }))
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: recorded on a GPU; the largest totals that its events have", self.file)?;
        let mut table = Table::new(&[
            ("measured", Side::Left),
            ("reserved", Side::Right),
            ("allocated", Side::Right),
            ("reserved, bytes", Side::Right),
            ("allocated, bytes", Side::Right),
            ("events", Side::Right),
        ]);
        let words = |b: Option<Bytes>| b.map_or("-".to_owned(), |b| b.to_string());
        let exact = |b: Option<Bytes>| b.map_or("-".to_owned(), |b| b.0.to_string());
        for one in &self.measured {
            table.row([
                one.device.clone(),
                words(one.reserved_bytes),
                words(one.allocated_bytes),
                exact(one.reserved_bytes),
                exact(one.allocated_bytes),
                one.memory_events.to_string(),
            ]);
        }
        writeln!(f, "{table}")?;
        write!(
            f,
            "Measured, so nothing is estimated and no device judged: what came before or after the recording, and \
             what another GPU would take, it does not say; {REMEDY}."
        )
    }
}
