//! `neap replay`: replays allocator requests through the framework's allocator.

mod page;
mod points;
mod sweep;

use std::fmt;
use std::io::{BufRead as _, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use neap::sim::allocator::replay::{LARGEST_DEVICE, Replay, Report};
use neap::sim::allocator::{Config, Stats};
use neap::sim::sequence::{Expected, Reader};
use neap::sim::snapshot::{self, Limit, Snapshot};
use neap::units::Bytes;
use serde::Serialize;

use crate::output::{self, Answer, Ending, note};
use crate::settings::Outputs;
use page::Seen;
use points::Points;

/// Replay the requests to a framework's allocator, exactly to the byte.
#[derive(clap::Args)]
pub struct Flags {
    /// A table of events (CSV with op,id,bytes,stream) or a snapshot of
    /// torch.cuda.memory._dump_snapshot (pickle; nothing in it is executed); may be gzipped.
    events: PathBuf,
    /// The allocator's settings, as in PYTORCH_CUDA_ALLOC_CONF; several with --sweep.
    #[arg(long, value_name = "CONF", allow_hyphen_values = true)]
    alloc_conf: Vec<String>,
    /// A built-in device or a *.device.json file; the context's reserve is not available. By
    /// default memory never runs out. With --sweep several may be given.
    #[arg(long, value_name = "NAME|FILE")]
    device: Vec<String>,
    /// The device's memory in bytes, in place of --device; several with --sweep.
    #[arg(long, value_name = "BYTES")]
    device_bytes: Vec<Bytes>,
    /// The GPU of a snapshot; needed if several GPUs have events.
    #[arg(long, value_name = "N")]
    gpu: Option<u32>,
    /// The share of the device that the process may reserve, from 0 to 1.
    #[arg(long, value_name = "F", value_parser = fraction)]
    memory_fraction: Option<f64>,
    /// Compare with the table's result, allocated, reserved and segments; stop at the first row
    /// that differs.
    #[arg(long, conflicts_with_all = ["sweep", "smallest_device"])]
    check: bool,
    /// Try every --alloc-conf (a few usual ones if none is given) on every device, and report which
    /// fit.
    #[arg(long, conflicts_with_all = ["curve", "plot", "html"])]
    sweep: bool,
    /// Find the smallest device memory at which no request fails.
    #[arg(long)]
    smallest_device: bool,
    /// Write allocated and reserved bytes and segments after every event.
    #[arg(long, value_name = "FILE.csv")]
    curve: Option<PathBuf>,
    /// Draw allocated and reserved bytes over the events.
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    /// Write a page to look at in a browser: every block over the events, to zoom and to search.
    #[arg(long, value_name = "FILE.html")]
    html: Option<PathBuf>,
}

/// The settings that a sweep tries by default.
const USUAL: [&str; 6] = [
    "",
    "expandable_segments:True",
    "max_split_size_mb:512",
    "max_split_size_mb:128",
    "max_split_size_mb:32",
    "roundup_power2_divisions:8",
];

fn fraction(text: &str) -> Result<f64, String> {
    let value = text.parse().ok().filter(|f| (0.0..=1.0).contains(f));
    value.ok_or_else(|| format!("`{text}` is not a fraction; give a number from 0 to 1"))
}

/// A device and its name.
struct Target {
    name: String,
    capacity: Bytes,
}

/// What a replay on a named device takes for granted: the file says only what one device was asked.
fn assumed(flags: &Flags) -> Option<&'static str> {
    (!flags.device.is_empty()).then_some(
        "an answer for a device holds if the script requests the same there; PyTorch may take other \
         kernels and workspaces on another generation",
    )
}

fn targets(flags: &Flags) -> anyhow::Result<Vec<Target>> {
    let mut all = Vec::new();
    for name in &flags.device {
        let profile = neap::device::profile::load(name)?;
        all.push(Target { capacity: profile.available(), name: profile.name });
    }
    for &bytes in &flags.device_bytes {
        all.push(Target { name: bytes.to_string(), capacity: bytes });
    }
    if let Some(target) = all.iter().find(|t| t.capacity > LARGEST_DEVICE) {
        bail!(
            "the device {} has more memory than is modelled, {LARGEST_DEVICE}; name a smaller one",
            target.name
        );
    }
    if let Some(assumed) = assumed(flags) {
        note(&format!("note: {assumed}"));
    }
    if all.is_empty() {
        all.push(Target { name: "unlimited".to_owned(), capacity: LARGEST_DEVICE });
    }
    Ok(all)
}

/// Each configuration with its text.
fn configs(flags: &Flags) -> anyhow::Result<Vec<(String, Config)>> {
    let texts: Vec<&str> = match flags.alloc_conf.as_slice() {
        [] if flags.sweep => USUAL.to_vec(),
        [] => vec![""],
        given => given.iter().map(String::as_str).collect(),
    };
    let read = |text: &str| -> anyhow::Result<_> {
        let config: Config = text.parse().context("--alloc-conf")?;
        if flags.memory_fraction.is_some_and(|f| config.memory_fraction.is_some_and(|c| c != f)) {
            bail!(
                "--memory-fraction: --alloc-conf says another per_process_memory_fraction; leave one out"
            );
        }
        Ok((text.to_owned(), config))
    };
    texts.into_iter().map(read).collect()
}

pub fn main(flags: &Flags, as_json: bool) -> anyhow::Result<Answer> {
    let mut inputs = vec![flags.events.as_path()];
    inputs.extend(flags.device.iter().map(Path::new));
    let outputs = [&flags.curve, &flags.plot, &flags.html];
    Outputs::new(&inputs, &outputs.map(|path| path.as_deref()))?;
    let (mut configs, mut targets) = (configs(flags)?, targets(flags)?);
    let mut limited = !flags.device.is_empty() || !flags.device_bytes.is_empty();
    let recorded = recorded(flags)?;
    let mut share = flags.memory_fraction;
    if let Some(snapshot) = &recorded {
        snapshot.notes.iter().for_each(|n| note(&format!("note: {n}")));
        if flags.alloc_conf.is_empty()
            && !flags.sweep
            && let Some(conf) = snapshot.settings.alloc_conf.as_deref().filter(|c| !c.is_empty())
        {
            note(&format!("note: the allocator is set as the snapshot was recorded: {conf}"));
            configs = vec![(
                conf.to_owned(),
                conf.parse()
                    .context("the snapshot's settings; give --alloc-conf in their place")?,
            )];
        }
        if !limited && flags.check && share.is_none() {
            let device = snapshot.capacity.unwrap_or(LARGEST_DEVICE).min(LARGEST_DEVICE);
            let whole = Limit { capacity: device, fraction: None };
            let limit = snapshot.limit.unwrap_or(whole);
            targets = vec![Target { name: "as recorded".to_owned(), capacity: limit.capacity }];
            limited = limit.capacity < LARGEST_DEVICE;
            // What the settings say of a share is in the limit.
            share = Some(limit.fraction.unwrap_or(1.0));
            configs.iter_mut().for_each(|(_, config)| config.memory_fraction = None);
        }
    } else if flags.gpu.is_some() {
        bail!(
            "--gpu: {} is a table of events, of one device; leave it out",
            flags.events.display()
        );
    }
    let input = Input { path: &flags.events, recorded };
    let fraction =
        flags.memory_fraction.is_some() || configs.iter().any(|(_, c)| c.memory_fraction.is_some());
    if fraction && !limited && !flags.smallest_device {
        bail!("a memory fraction is of a device; name it with --device or --device-bytes");
    }
    if flags.sweep {
        return sweep::all(flags, input, &configs, &targets, as_json);
    }
    if configs.len() > 1 || targets.len() > 1 {
        bail!("several --alloc-conf or devices are for --sweep; add it, or name one");
    }
    let (_, config) = &configs[0];
    if flags.smallest_device {
        return sweep::smallest(flags, input, config, as_json);
    }
    one(flags, input, (config, share), &targets[0], limited, as_json)
}

/// The file of requests, and the snapshot if it is one.
struct Input<'a> {
    path: &'a Path,
    recorded: Option<Snapshot>,
}

impl Input<'_> {
    fn reader(self) -> anyhow::Result<Reader> {
        Ok(match self.recorded {
            Some(snapshot) => Reader::snapshot(self.path, snapshot),
            None => Reader::open(self.path)?,
        })
    }
}

/// The snapshot, if the file is one.
fn recorded(flags: &Flags) -> anyhow::Result<Option<Snapshot>> {
    let mut file = neap::files::open(&flags.events)?;
    // An empty file may be either: the reader of snapshots says what is wrong with it.
    let is_snapshot =
        file.fill_buf().is_ok_and(|first| first.is_empty() || snapshot::looks_like_pickle(first));
    if !is_snapshot {
        return Ok(None);
    }
    let (file, lines) = (&flags.events, flags.html.is_some());
    Ok(Some(snapshot::read_within(file, flags.gpu, snapshot::MEMORY_LIMIT, lines)?))
}

/// The first row whose answer differs.
struct Difference {
    line: u64,
    row: String,
    expected: Expected,
    ok: bool,
    now: Stats,
}

impl Difference {
    fn new(reader: &Reader, ok: bool, now: &Stats) -> Option<Self> {
        let want = reader.expected();
        let same = want.ok.is_none_or(|w| w == ok)
            && want.allocated.is_none_or(|w| w == now.allocated.0)
            && want.reserved.is_none_or(|w| w == now.reserved.0)
            && want.segments.is_none_or(|w| w == now.segments);
        if same {
            None
        } else {
            Some(Self { line: reader.line(), row: reader.row(), expected: *want, ok, now: *now })
        }
    }
}

/// Where a replay differs from the file.
#[derive(Serialize)]
struct DifferenceReport {
    matches: bool,
    line: u64,
    expected: Answered,
    replayed: Answered,
    #[serde(skip)]
    row: String,
}

/// An allocator's answer to one request.
#[derive(Serialize)]
struct Answered {
    ok: Option<bool>,
    allocated_bytes: Option<u64>,
    reserved_bytes: Option<u64>,
    segments: Option<u64>,
}

impl DifferenceReport {
    fn new(difference: &Difference) -> Self {
        let (want, now) = (&difference.expected, &difference.now);
        Self {
            matches: false,
            line: difference.line,
            expected: Answered {
                ok: want.ok,
                allocated_bytes: want.allocated,
                reserved_bytes: want.reserved,
                segments: want.segments,
            },
            replayed: Answered {
                ok: Some(difference.ok),
                allocated_bytes: Some(now.allocated.0),
                reserved_bytes: Some(now.reserved.0),
                segments: Some(now.segments),
            },
            row: difference.row.clone(),
        }
    }
}

impl fmt::Display for DifferenceReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "line {} differs: {}", self.line, self.row)?;
        writeln!(f, "  the file: {}", self.expected)?;
        write!(f, "  replayed: {}", self.replayed)
    }
}

impl fmt::Display for Answered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = |n: Option<u64>| n.map_or_else(|| "-".to_owned(), |n| n.to_string());
        write!(
            f,
            "result {}, allocated {}, reserved {}, segments {}",
            self.ok.map_or("-", |ok| if ok { "ok" } else { "oom" }),
            number(self.allocated_bytes),
            number(self.reserved_bytes),
            number(self.segments)
        )
    }
}

fn one(
    flags: &Flags,
    input: Input<'_>,
    (config, share): (&Config, Option<f64>),
    target: &Target,
    limited: bool,
    as_json: bool,
) -> anyhow::Result<Answer> {
    let lines = input.recorded.as_ref().map(|s| s.lines.clone()).unwrap_or_default();
    let mut reader = input.reader()?;
    if flags.check && !reader.answered() {
        bail!(
            "{}: --check needs a column result, allocated, reserved or segments, or a snapshot recorded from the job's start",
            flags.events.display()
        );
    }
    let mut replay = Replay::new(config, target.capacity, share);
    let mut points = Points::new(flags.plot.is_some());
    let mut seen = flags.html.is_some().then(|| Seen::new(lines));
    let mut difference = None;
    let mut run = |curve: Option<&mut dyn std::io::Write>| -> anyhow::Result<()> {
        let mut curve = curve;
        if let Some(out) = curve.as_mut() {
            writeln!(out, "event,allocated_bytes,reserved_bytes,segments")?;
        }
        let mut index: u64 = 0;
        while let Some(request) = reader.request()? {
            let ok = replay.step(request);
            if let Some(seen) = &mut seen {
                seen.follow(request, &replay);
            }
            if flags.check {
                difference = Difference::new(&reader, ok, replay.allocator().stats());
                if difference.is_some() {
                    break;
                }
            }
            if curve.is_some() || points.wanted {
                let now = replay.allocator().stats();
                points.add(index, now);
                if let Some(out) = curve.as_mut() {
                    writeln!(
                        out,
                        "{index},{},{},{}",
                        now.allocated.0, now.reserved.0, now.segments
                    )?;
                }
            }
            index += 1;
        }
        Ok(())
    };
    if let Some(path) = &flags.curve {
        // Errors of the events must not be reported as errors of the curve's file.
        let mut failed = None;
        let written = neap::files::write(path, |out| {
            run(Some(out)).map_err(|e| {
                e.downcast().unwrap_or_else(|e: anyhow::Error| {
                    let text = e.to_string();
                    failed = Some(e);
                    std::io::Error::other(text)
                })
            })
        });
        if let Some(error) = failed {
            return Err(error);
        }
        written?;
        output::written(path);
    } else {
        run(None)?;
    }
    let report = replay.report();
    let mut ending = Ending::default();
    let summary = Summary::new(flags, target, limited, &report);
    ending.then(|| match &difference {
        Some(difference) => output::report(&DifferenceReport::new(difference), as_json),
        None => output::report(&summary, as_json),
    });
    if let Some(path) = &flags.plot {
        ending.then(|| points.draw(path, &flags.events, &report, limited.then_some(target)));
    }
    if let Some((seen, path)) = seen.zip(flags.html.as_deref()) {
        let form = match &difference {
            Some(difference) => serde_json::to_value(DifferenceReport::new(difference))?,
            None => serde_json::to_value(&summary)?,
        };
        ending.then(|| seen.write(path, &flags.events, limited.then_some(target), form));
    }
    let good = difference.is_none() && (flags.check || report.stats.ooms == 0);
    ending.with(Answer::yes_if(good))
}

/// The result of a replay.
#[derive(Serialize)]
struct Summary {
    file: String,
    events: u64,
    peak_reserved_bytes: Bytes,
    peak_allocated_bytes: Bytes,
    peak_requested_bytes: Bytes,
    peak_event: u64,
    allocated_at_peak_bytes: Bytes,
    requested_at_peak_bytes: Bytes,
    fragmentation_bytes: Bytes,
    segments: u64,
    peak_segments: u64,
    ooms: u64,
    first_oom_event: Option<u64>,
    retries: u64,
    device_bytes: Option<Bytes>,
    #[serde(skip_serializing_if = "Option::is_none")]
    matches: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    assumes: Option<&'static str>,
    #[serde(skip)]
    device: String,
}

impl Summary {
    fn new(flags: &Flags, target: &Target, limited: bool, report: &Report) -> Self {
        let (stats, peak) = (&report.stats, &report.at_peak);
        Self {
            file: flags.events.display().to_string(),
            events: report.events,
            peak_reserved_bytes: peak.reserved,
            peak_allocated_bytes: stats.peak_allocated,
            peak_requested_bytes: stats.peak_requested,
            peak_event: report.peak_index,
            allocated_at_peak_bytes: peak.allocated,
            requested_at_peak_bytes: peak.requested,
            fragmentation_bytes: peak.fragmentation(),
            segments: peak.segments,
            peak_segments: stats.peak_segments,
            ooms: stats.ooms,
            first_oom_event: report.first_oom,
            retries: stats.retries,
            device_bytes: limited.then_some(target.capacity),
            matches: flags.check.then_some(true),
            assumes: assumed(flags),
            device: target.name.clone(),
        }
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let both = |b: Bytes| format!("{b} ({} bytes)", b.0);
        let mut line = |name: &str, value: &str| writeln!(f, "{name:14}  {value}");
        line("events", &self.events.to_string())?;
        line("peak reserved", &both(self.peak_reserved_bytes))?;
        line("peak allocated", &both(self.peak_allocated_bytes))?;
        line("peak requested", &both(self.peak_requested_bytes))?;
        let (event, allocated) = (self.peak_event, self.allocated_at_peak_bytes);
        let at = format!("after event {event}: {allocated} allocated, {} segments", self.segments);
        line("at the peak", &at)?;
        let unused = self.fragmentation_bytes;
        let share = (u128::from(unused.0) * 1000)
            .checked_div(u128::from(self.peak_reserved_bytes.0))
            .unwrap_or(0);
        let unused = format!("{unused} of it not in use ({}.{} %)", share / 10, share % 10);
        line("fragmentation", &unused)?;
        if let Some(capacity) = self.device_bytes {
            line("device", &format!("{}, {}", self.device, both(capacity)))?;
        }
        let first = self.first_oom_event.map(|e| format!(", first at event {e}"));
        let ooms = format!(
            "{} times{}; {} retries after giving all cached memory back",
            self.ooms,
            first.unwrap_or_default(),
            self.retries
        );
        line("out of memory", &ooms)?;
        match self.matches {
            Some(_) => line("check", "every row is as in the file"),
            None => Ok(()),
        }
    }
}
