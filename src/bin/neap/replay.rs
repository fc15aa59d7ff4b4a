//! `neap replay`: allocator requests through the framework's allocator.

use std::io::{BufRead as _, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use neap::report::curve::{Across, Curve, Line, svg_across};
use neap::report::table::{Side, Table};
use neap::sim::allocator::replay::{
    LARGEST_DEVICE, Replay, Report, Setting, smallest_capacity, sweep,
};
use neap::sim::allocator::{Config, Stats};
use neap::sim::sequence::{Expected, Reader, Sequence};
use neap::sim::snapshot::{self, Snapshot};
use neap::units::{Bytes, Nanos};
use serde_json::json;

use crate::output::{self, Answer, note};
use crate::settings;

/// Replay a framework's allocator requests, to the byte.
#[derive(clap::Args)]
pub struct Flags {
    /// A table of events (CSV with op,id,bytes,stream) or a snapshot of torch.cuda.memory._dump_snapshot (pickle; nothing in it is
    /// executed); may be gzipped.
    events: PathBuf,
    /// The allocator's settings, as in PYTORCH_CUDA_ALLOC_CONF. Several with --sweep.
    #[arg(long, value_name = "CONF", allow_hyphen_values = true)]
    alloc_conf: Vec<String>,
    /// A built-in device or a *.device.json file, less its context's reserve; without one nothing runs out. Several with --sweep.
    #[arg(long, value_name = "NAME|FILE")]
    device: Vec<String>,
    /// The device's memory in bytes, in place of --device. Several with --sweep.
    #[arg(long, value_name = "BYTES")]
    device_bytes: Vec<Bytes>,
    /// Which GPU of a snapshot; needed where several have events.
    #[arg(long, value_name = "N")]
    gpu: Option<u32>,
    /// The share of the device that the process may reserve, from 0 to 1.
    #[arg(long, value_name = "F", value_parser = fraction)]
    memory_fraction: Option<f64>,
    /// Compare with the table's result, allocated, reserved and segments; stop at the first row that differs.
    #[arg(long, conflicts_with_all = ["sweep", "smallest_device"])]
    check: bool,
    /// Try every --alloc-conf (a few usual ones if none is given) on every device and say which fit.
    #[arg(long, conflicts_with_all = ["curve", "plot"])]
    sweep: bool,
    /// Find the least device memory at which nothing fails.
    #[arg(long)]
    smallest_device: bool,
    /// Write allocated and reserved bytes and segments after every event.
    #[arg(long, value_name = "FILE.csv")]
    curve: Option<PathBuf>,
    /// Draw allocated and reserved bytes over the events.
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
}

/// What a sweep tries when nothing is named.
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

/// A device with a name for people.
struct Target {
    name: String,
    capacity: Bytes,
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
    if all.is_empty() {
        all.push(Target { name: "unlimited".to_owned(), capacity: LARGEST_DEVICE });
    }
    Ok(all)
}

/// Each configuration with the text it was read from.
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
                "--memory-fraction: --alloc-conf says another per_process_memory_fraction; leave one away"
            );
        }
        Ok((text.to_owned(), config))
    };
    texts.into_iter().map(read).collect()
}

pub fn main(flags: &Flags, as_json: bool) -> anyhow::Result<Answer> {
    let mut inputs = vec![flags.events.as_path()];
    inputs.extend(flags.device.iter().map(Path::new));
    settings::outputs(&inputs, &[flags.curve.as_deref(), flags.plot.as_deref()])?;
    let (mut configs, mut targets) = (configs(flags)?, targets(flags)?);
    let mut limited = !flags.device.is_empty() || !flags.device_bytes.is_empty();
    let recorded = recorded(flags)?;
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
        if !limited
            && flags.check
            && let Some(capacity) = snapshot.capacity
        {
            targets = vec![Target {
                name: "as recorded".to_owned(),
                capacity: Bytes(capacity.0.min(LARGEST_DEVICE.0)),
            }];
            limited = true;
        }
    } else if flags.gpu.is_some() {
        bail!(
            "--gpu: {} is a table of events, of one device; leave it away",
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
        return sweep_all(flags, input, &configs, &targets, as_json);
    }
    if configs.len() > 1 || targets.len() > 1 {
        bail!("several --alloc-conf or devices are for --sweep; add it, or name one");
    }
    let (_, config) = &configs[0];
    if flags.smallest_device {
        return smallest(flags, input, config, as_json);
    }
    one(flags, input, config, &targets[0], limited, as_json)
}

/// The requests' file, a snapshot read already.
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
    let is_snapshot = file.fill_buf().is_ok_and(snapshot::looks_like_pickle);
    Ok(if is_snapshot { Some(snapshot::read(&flags.events, flags.gpu)?) } else { None })
}

/// The first row that an answer differs in.
struct Difference {
    line: u64,
    row: String,
    expected: Expected,
    ok: bool,
    now: Stats,
}

impl Difference {
    fn of(reader: &Reader, ok: bool, now: &Stats) -> Option<Self> {
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

    fn json(&self) -> serde_json::Value {
        let want = &self.expected;
        json!({
            "matches": false,
            "line": self.line,
            "expected": {
                "ok": want.ok,
                "allocated_bytes": want.allocated,
                "reserved_bytes": want.reserved,
                "segments": want.segments,
            },
            "replayed": {
                "ok": self.ok,
                "allocated_bytes": self.now.allocated.0,
                "reserved_bytes": self.now.reserved.0,
                "segments": self.now.segments,
            },
        })
    }

    fn told(&self) -> String {
        let word = |ok| if ok { "ok" } else { "oom" };
        let number = |n: Option<u64>| n.map_or_else(|| "-".to_owned(), |n| n.to_string());
        let want = &self.expected;
        format!(
            "line {} differs: {}\n  the file: result {}, allocated {}, reserved {}, segments {}\n  replayed: result {}, allocated {}, reserved {}, segments {}",
            self.line,
            self.row,
            want.ok.map_or("-", word),
            number(want.allocated),
            number(want.reserved),
            number(want.segments),
            word(self.ok),
            self.now.allocated.0,
            self.now.reserved.0,
            self.now.segments,
        )
    }
}

fn one(
    flags: &Flags,
    input: Input<'_>,
    config: &Config,
    target: &Target,
    limited: bool,
    as_json: bool,
) -> anyhow::Result<Answer> {
    let mut reader = input.reader()?;
    if flags.check && !reader.answered() {
        bail!(
            "{}: --check needs a column result, allocated, reserved or segments, or a snapshot recorded from the job's start; there is none",
            flags.events.display()
        );
    }
    let mut replay = Replay::new(config, target.capacity, flags.memory_fraction);
    let mut points = Points::new(flags.plot.is_some());
    let mut difference = None;
    let mut run = |curve: Option<&mut dyn std::io::Write>| -> anyhow::Result<()> {
        let mut curve = curve;
        if let Some(out) = curve.as_mut() {
            writeln!(out, "event,allocated_bytes,reserved_bytes,segments")?;
        }
        let mut index: u64 = 0;
        while let Some(request) = reader.request()? {
            let ok = replay.step(request);
            if flags.check {
                difference = Difference::of(&reader, ok, replay.allocator().stats());
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
        // An error of the events is not one of the curve's file.
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
        note(&format!("written: {}", path.display()));
    } else {
        run(None)?;
    }
    let report = replay.report();
    if let Some(path) = &flags.plot {
        points.draw(path, &flags.events, &report, limited.then_some(target))?;
    }
    if let Some(difference) = &difference {
        if as_json {
            output::json(&difference.json())?
        } else {
            output::data(&difference.told())?
        }
        return Ok(Answer::No);
    }
    tell(flags, target, limited, &report, as_json)?;
    Ok(if !flags.check && report.stats.ooms > 0 { Answer::No } else { Answer::Yes })
}

fn tell(
    flags: &Flags,
    target: &Target,
    limited: bool,
    report: &Report,
    as_json: bool,
) -> anyhow::Result<()> {
    let (stats, peak) = (&report.stats, &report.at_peak);
    if as_json {
        let mut object = json!({
            "file": flags.events.display().to_string(),
            "events": report.events,
            "peak_reserved_bytes": peak.reserved.0,
            "peak_allocated_bytes": stats.peak_allocated.0,
            "peak_requested_bytes": stats.peak_requested.0,
            "peak_event": report.peak_index,
            "allocated_at_peak_bytes": peak.allocated.0,
            "requested_at_peak_bytes": peak.requested.0,
            "fragmentation_bytes": peak.fragmentation().0,
            "segments": peak.segments,
            "peak_segments": stats.peak_segments,
            "ooms": stats.ooms,
            "first_oom_event": report.first_oom,
            "retries": stats.retries,
            "device_bytes": limited.then_some(target.capacity.0),
        });
        if flags.check {
            object["matches"] = json!(true);
        }
        return output::json(&object);
    }
    let share = (u128::from(peak.fragmentation().0) * 1000)
        .checked_div(u128::from(peak.reserved.0))
        .unwrap_or(0);
    let both = |b: Bytes| format!("{b} ({} bytes)", b.0);
    let mut lines = vec![
        ("events", report.events.to_string()),
        ("peak reserved", both(peak.reserved)),
        ("peak allocated", both(stats.peak_allocated)),
        ("peak requested", both(stats.peak_requested)),
        (
            "at the peak",
            format!(
                "after event {}: {} allocated, {} segments",
                report.peak_index, peak.allocated, peak.segments
            ),
        ),
        (
            "fragmentation",
            format!("{} of it not in use ({}.{} %)", peak.fragmentation(), share / 10, share % 10),
        ),
    ];
    if limited {
        lines.push(("device", format!("{}, {}", target.name, both(target.capacity))));
    }
    let first = report.first_oom.map(|e| format!(", first at event {e}")).unwrap_or_default();
    lines.push((
        "out of memory",
        format!(
            "{} times{first}; {} retries after giving all cached memory back",
            stats.ooms, stats.retries
        ),
    ));
    if flags.check {
        lines.push(("check", "every row is as in the file".to_owned()));
    }
    let width = lines.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    let text: Vec<String> =
        lines.iter().map(|(name, value)| format!("{name:width$}  {value}")).collect();
    output::data(&text.join("\n"))
}

fn sweep_all(
    flags: &Flags,
    input: Input<'_>,
    configs: &[(String, Config)],
    targets: &[Target],
    as_json: bool,
) -> anyhow::Result<Answer> {
    let sequence = Sequence::rest(&mut input.reader()?)?;
    let pairs: Vec<(&str, &Config, &Target)> = targets
        .iter()
        .flat_map(|t| configs.iter().map(move |(text, config)| (text.as_str(), config, t)))
        .collect();
    let settings: Vec<Setting> = pairs
        .iter()
        .map(|(_, config, target)| Setting {
            config: (*config).clone(),
            capacity: target.capacity,
            memory_fraction: flags.memory_fraction,
        })
        .collect();
    let reports = sweep(&sequence.requests, &settings);
    let least: Vec<Option<_>> = if flags.smallest_device {
        configs
            .iter()
            .map(|(_, config)| smallest_capacity(&sequence.requests, config, flags.memory_fraction))
            .collect()
    } else {
        Vec::new()
    };
    let any = reports.iter().any(|r| r.stats.ooms == 0);
    let rows = pairs
        .iter()
        .zip(&reports)
        .enumerate()
        .map(|(i, (pair, report))| (pair, report, least.get(i % configs.len())));
    if as_json {
        let rows: Vec<_> = rows
            .map(|((conf, _, target), report, least)| {
                let mut row = json!({
                    "alloc_conf": conf,
                    "device": target.name,
                    "device_bytes": target.capacity.0,
                    "fits": report.stats.ooms == 0,
                    "peak_reserved_bytes": report.at_peak.reserved.0,
                    "peak_allocated_bytes": report.stats.peak_allocated.0,
                    "fragmentation_bytes": report.at_peak.fragmentation().0,
                    "segments": report.at_peak.segments,
                    "ooms": report.stats.ooms,
                    "retries": report.stats.retries,
                });
                if let Some(least) = least {
                    row["smallest_device_bytes"] = json!(least.map(|l| l.capacity.0));
                }
                row
            })
            .collect();
        output::json(&json!({ "fits": any, "settings": rows }))?;
    } else {
        let mut columns = vec![
            ("setting", Side::Left),
            ("device", Side::Left),
            ("fits", Side::Left),
            ("reserved", Side::Right),
            ("allocated", Side::Right),
            ("not in use", Side::Right),
            ("segments", Side::Right),
            ("OOMs", Side::Right),
            ("retries", Side::Right),
        ];
        if flags.smallest_device {
            columns.push(("smallest device", Side::Right));
        }
        let mut table = Table::new(&columns);
        for ((conf, _, target), report, least) in rows {
            let mut row = vec![
                if conf.is_empty() { "default".to_owned() } else { (*conf).to_owned() },
                target.name.clone(),
                if report.stats.ooms == 0 { "yes" } else { "no" }.to_owned(),
                report.at_peak.reserved.to_string(),
                report.stats.peak_allocated.to_string(),
                report.at_peak.fragmentation().to_string(),
                report.at_peak.segments.to_string(),
                report.stats.ooms.to_string(),
                report.stats.retries.to_string(),
            ];
            if let Some(least) = least {
                row.push(least.map_or_else(|| "none".to_owned(), |l| l.capacity.to_string()));
            }
            table.row(row);
        }
        output::data(&table.to_string())?;
    }
    if !any {
        note("no setting fits");
    }
    Ok(if any { Answer::Yes } else { Answer::No })
}

fn smallest(
    flags: &Flags,
    input: Input<'_>,
    config: &Config,
    as_json: bool,
) -> anyhow::Result<Answer> {
    if !flags.device.is_empty()
        || !flags.device_bytes.is_empty()
        || flags.curve.is_some()
        || flags.plot.is_some()
    {
        bail!(
            "--smallest-device looks for the device itself; leave --device, --device-bytes, --curve and --plot away"
        );
    }
    let sequence = Sequence::rest(&mut input.reader()?)?;
    let Some(least) = smallest_capacity(&sequence.requests, config, flags.memory_fraction) else {
        note(&format!("no device up to {LARGEST_DEVICE} serves every request"));
        return Ok(Answer::No);
    };
    let report = neap::sim::allocator::replay::replay(
        &sequence.requests,
        config,
        least.capacity,
        flags.memory_fraction,
    );
    if as_json {
        output::json(&json!({
            "file": flags.events.display().to_string(),
            "smallest_device_bytes": least.capacity.0,
            "proven": least.proven,
            "peak_reserved_bytes": report.at_peak.reserved.0,
            "peak_allocated_bytes": report.stats.peak_allocated.0,
            "retries": report.stats.retries,
        }))?;
    } else {
        let sure = if least.proven {
            "every smaller one fails"
        } else {
            "found by bisection: a smaller one may do"
        };
        output::data(&format!(
            "smallest device  {} ({} bytes), for the job alone; {sure}\nretries on it    {}",
            least.capacity, least.capacity.0, report.stats.retries
        ))?;
    }
    Ok(Answer::Yes)
}

/// A curve being thinned while it grows: at most so many stretches of events, each with its first, highest, lowest and
/// last values of allocated and reserved bytes.
struct Points {
    wanted: bool,
    stride: u64,
    all: Vec<[Stretch; 2]>,
    end: u64,
}

#[derive(Clone, Copy)]
struct Stretch {
    first: u64,
    highest: u64,
    lowest: u64,
    last: u64,
}

impl Stretch {
    fn join(&mut self, later: Self) {
        self.highest = self.highest.max(later.highest);
        self.lowest = self.lowest.min(later.lowest);
        self.last = later.last;
    }
}

impl Points {
    const MOST: usize = 1 << 13;

    const fn new(wanted: bool) -> Self {
        Self { wanted, stride: 1, all: Vec::new(), end: 0 }
    }

    fn add(&mut self, index: u64, now: &Stats) {
        if !self.wanted {
            return;
        }
        let new = [now.allocated.0, now.reserved.0].map(|v| Stretch {
            first: v,
            highest: v,
            lowest: v,
            last: v,
        });
        match self.all.get_mut((index / self.stride) as usize) {
            Some(stretch) => stretch.iter_mut().zip(new).for_each(|(s, n)| s.join(n)),
            None => self.all.push(new),
        }
        if self.all.len() == Self::MOST {
            self.stride *= 2;
            let pairs = self.all.chunks_exact(2).map(|pair| {
                let mut joined = pair[0];
                joined.iter_mut().zip(pair[1]).for_each(|(s, n)| s.join(n));
                joined
            });
            self.all = pairs.collect();
        }
        self.end = index;
    }

    fn curve(&self, which: usize) -> Vec<(Nanos, Bytes)> {
        let at = |index: usize, part: u64, value: u64| {
            (
                Nanos((index as u64 * self.stride + part * self.stride / 4).min(self.end)),
                Bytes(value),
            )
        };
        let four = |(i, s): (usize, &[Stretch; 2])| {
            let Stretch { first, highest, lowest, last } = s[which];
            [at(i, 0, first), at(i, 1, highest), at(i, 2, lowest), at(i, 3, last)]
        };
        self.all.iter().enumerate().flat_map(four).collect()
    }

    fn draw(
        &self,
        path: &Path,
        events: &Path,
        report: &Report,
        target: Option<&Target>,
    ) -> anyhow::Result<()> {
        let (allocated, reserved) = (self.curve(0), self.curve(1));
        let curves = [
            Curve { name: "reserved", points: &reserved },
            Curve { name: "allocated", points: &allocated },
        ];
        // A device far above the curve would only flatten it.
        let near = target.filter(|t| t.capacity.0 / 2 <= report.at_peak.reserved.0);
        let lines: Vec<_> =
            near.map(|t| Line { name: &t.name, value: t.capacity }).into_iter().collect();
        let title =
            events.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let drawing = svg_across(Across::Events, &title, &curves, &lines)?;
        neap::files::write(path, |f| f.write_all(drawing.as_bytes()))?;
        note(&format!("written: {}", path.display()));
        Ok(())
    }
}
