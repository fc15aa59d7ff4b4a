//! The run against a memory snapshot: of a real GPU, or of another run.

use std::path::Path;

use neap::report::table::{Side, Table};
use neap::sim::allocator::Config;
use neap::sim::allocator::replay::{LARGEST_DEVICE, observe};
use neap::sim::difference::{self, Comparison, Step};
use neap::sim::requests::Request;
use neap::sim::snapshot::{self, Snapshot};
use neap::units::Bytes;
use serde_json::{Value, json};

use super::events::Allocations;
use crate::output::note;

/// The allocator's unit of what it gives out.
const GRANULE: u64 = 512;

/// What was recorded.
pub struct Recorded {
    name: String,
    snapshot: Snapshot,
    /// Without those that failed.
    requests: Vec<Request>,
}

impl Recorded {
    /// Reads a snapshot; of several devices' that of the first.
    ///
    /// # Errors
    /// When it can't be read.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let snapshot = snapshot::read(path, None).or_else(|_| snapshot::read(path, Some(0)))?;
        let failed = |id: u32| snapshot.failed.binary_search(&id).is_ok();
        let requests = snapshot.requests.iter().copied().filter(|request| match *request {
            Request::Allocate { id, .. } | Request::Free { id } => !failed(id),
            Request::EmptyCache => true,
        });
        let requests = requests.collect();
        Ok(Self { name: path.display().to_string(), snapshot, requests })
    }
}

/// What came of it.
pub struct Against<'a> {
    recorded: &'a Recorded,
    found: Comparison,
    /// Requests up to the recording's end.
    run: u64,
    there: u64,
    run_peak: Peak,
    recorded_peak: Peak,
    /// The first difference in words.
    first: Option<String>,
}

/// The most that was held; what is reserved is not known of every recording.
#[derive(Clone, Copy, Default)]
struct Peak {
    allocated: u64,
    reserved: Option<u64>,
}

impl<'a> Against<'a> {
    /// Compares the requests of a run's first device. A run that was ended after some steps may be
    /// shorter than the recording.
    pub fn new(
        recorded: &'a Recorded,
        requests: &[Request],
        config: &Config,
        allocations: &Allocations,
        ended_early: bool,
    ) -> Self {
        let at_start = recorded.snapshot.at_start.min(recorded.requests.len());
        let mut found = difference::compare(requests, &recorded.requests, at_start);
        if ended_early {
            found.beyond = 0;
        }
        let step = |r: &&Request| **r != Request::EmptyCache;
        let run = requests[found.begins..found.ends].iter().filter(step).count() as u64;
        let there = recorded.requests[at_start..].iter().filter(step).count() as u64;
        let first = found.first.map(|(here, there)| {
            let place = place(requests, here, allocations).unwrap_or_default();
            let (at, here, there) = (here.index, words(here), words(there));
            format!("request {at} of the run, {here}{place}; recorded: {there}")
        });
        let reserved = recorded.snapshot.expected_reserved.as_ref();
        Self {
            recorded,
            found,
            run,
            there,
            run_peak: Peak {
                allocated: allocated(requests, found.begins..found.ends),
                reserved: Some(reserved_between(requests, config, found.begins..found.ends)),
            },
            recorded_peak: Peak {
                allocated: allocated(&recorded.requests, at_start..recorded.requests.len()),
                reserved: reserved.and_then(|r| r.iter().max().copied()),
            },
            first,
        }
    }

    /// Whether nothing differs.
    pub const fn is_equal(&self) -> bool {
        self.found.first.is_none() && self.found.beyond == 0 && self.found.begins_exactly
    }

    /// A table of totals.
    pub fn table(&self) -> String {
        let mut table = Table::new(&[
            ("against the recording", Side::Left),
            ("run", Side::Right),
            ("recorded", Side::Right),
            ("difference", Side::Right),
        ]);
        let mut row = |name: &str, run: Option<u64>, recorded: Option<u64>| {
            let cell = |v: Option<u64>| v.map_or("-".to_owned(), |v| v.to_string());
            let difference = run
                .zip(recorded)
                .map_or("-".to_owned(), |(a, b)| (i128::from(a) - i128::from(b)).to_string());
            table.row([name.to_owned(), cell(run), cell(recorded), difference]);
        };
        row("requests", Some(self.run), Some(self.there));
        row("requests of its own", Some(self.found.only_run), Some(self.found.only_recorded));
        row(
            "peak allocated, bytes",
            Some(self.run_peak.allocated),
            Some(self.recorded_peak.allocated),
        );
        row("peak reserved, bytes", self.run_peak.reserved, self.recorded_peak.reserved);
        format!("\n{table}")
    }

    /// What else to say, and the answer in a line.
    pub fn notes(&self) {
        let name = &self.recorded.name;
        for text in &self.recorded.snapshot.notes {
            note(&format!("note: {name}: {text}"));
        }
        if !self.found.begins_exactly {
            note(&format!("note: {name} began with blocks that the run never has just so"));
        }
        if let Some(first) = &self.first {
            note(&format!("note: the first difference is {first}"));
        }
        if self.found.beyond > 0 {
            let more = self.found.beyond;
            note(&format!("note: {name} goes on for {more} requests after the run's end"));
        }
        let agree = self.found.agree;
        if self.is_equal() {
            note(&format!("equal to {name}: {agree} requests agree in order"));
        } else {
            note(&format!("differs from {name}: {agree} of its {} requests agree", self.there));
        }
    }

    /// For programs.
    pub fn json(&self) -> Value {
        json!({
            "snapshot": self.recorded.name, "equal": self.is_equal(), "first_difference": self.first,
            "agreeing_requests": self.found.agree, "run_requests": self.run,
            "recorded_requests": self.there, "only_run_requests": self.found.only_run,
            "only_recorded_requests": self.found.only_recorded,
            "recorded_requests_beyond": self.found.beyond,
            "run_peak_allocated_bytes": self.run_peak.allocated,
            "recorded_peak_allocated_bytes": self.recorded_peak.allocated,
            "run_peak_reserved_bytes": self.run_peak.reserved,
            "recorded_peak_reserved_bytes": self.recorded_peak.reserved,
        })
    }
}

fn words(step: Step) -> String {
    if step.allocates {
        return format!("{} bytes are allocated", step.bytes.0);
    }
    let ago = |count| format!("{count} allocations ago");
    let age = step.relation.map_or("before the comparison".to_owned(), ago);
    format!("a block of {} bytes is freed that was made {age}", step.bytes.0)
}

/// Where a request of the run comes from.
fn place(requests: &[Request], step: Step, allocations: &Allocations) -> Option<String> {
    let (Request::Allocate { id, .. } | Request::Free { id }) = *requests.get(step.index)? else {
        return None;
    };
    let place = allocations.place(id)?;
    let line = place.line.as_ref().map_or(String::new(), |line| format!(" at {line}"));
    let module = place.module.as_ref().map_or(String::new(), |module| format!(" in {module}"));
    let made = if step.allocates { "" } else { " (made" };
    let end = if step.allocates { "" } else { ")" };
    Some(format!("{made}{line}{module}, step {}, {}{end}", place.step, place.phase))
}

/// The most that stood in whole blocks after a request of the range.
fn allocated(requests: &[Request], range: std::ops::Range<usize>) -> u64 {
    let mut sizes = std::collections::HashMap::new();
    let (mut now, mut most) = (0, 0);
    for (index, request) in requests.iter().enumerate().take(range.end) {
        match *request {
            Request::Allocate { id, bytes: Bytes(bytes), .. } => {
                let size = bytes.div_ceil(GRANULE) * GRANULE;
                sizes.insert(id, size);
                now += size;
            }
            Request::Free { id } => now -= sizes.remove(&id).unwrap_or(0),
            Request::EmptyCache => {}
        }
        if index >= range.start {
            most = now.max(most);
        }
    }
    most
}

fn reserved_between(requests: &[Request], config: &Config, range: std::ops::Range<usize>) -> u64 {
    let mut most = 0;
    observe(&requests[..range.end], config, LARGEST_DEVICE, None, |index, _, allocator| {
        if index >= range.start {
            most = allocator.stats().reserved.0.max(most);
        }
    });
    most
}
