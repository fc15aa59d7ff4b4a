//! `neap score`: estimates compared with measured truths.

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use neap::device::Profile;
use neap::estimate::gpu::{Class, Settings};
use neap::estimate::score::{self, BARE, Device, Fate, Group, MARGIN, Options, Score, Spread};
use neap::report::table::{Side, Table};
use neap::sim::allocator::Config;
use neap::units::Bytes;
use serde::Serialize;

use crate::output::{self, Answer, Ending, note};
use crate::progress;
use crate::settings::{self, Outputs};

mod files;

/// Compare the estimates of a folder of traces with their truths.
///
/// A job is NAME.profile.json[.gz] beside NAME.truth.json. Failures and conserved memory also need
/// NAME.truth.events.csv[.gz]. Truths are runs on a device that is never full. Each job is tried on
/// several devices. Round one compares the forecast's verdict with the job's. Round two caps the
/// job at its own estimate, without and with the margin. Neither estimate nor cap includes the
/// context: a device offers the memory that its context leaves.
#[derive(clap::Args)]
pub struct Flags {
    /// The folder with the jobs' files.
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,
    /// The rules that make the estimates.
    #[arg(long, value_name = "RULES", default_value = "neap")]
    rules: settings::Rules,
    /// The GPU on which the truths were made: a built-in device (`neap device list`) or a
    /// *.device.json file.
    #[arg(long, value_name = "NAME|FILE", default_value = "h100")]
    device: String,
    /// The value of PYTORCH_CUDA_ALLOC_CONF, in place of each truth's own.
    #[arg(long, value_name = "CONF", allow_hyphen_values = true)]
    alloc_conf: Option<String>,
    /// The devices on which each job is tried: built-in devices, *.device.json files, or sizes such
    /// as 3GiB, which leave all their memory to the job.
    #[arg(long, value_name = "NAME|FILE|SIZE", value_delimiter = ',', default_values = TRIED)]
    devices: Vec<String>,
    /// Write a row for every job, with the time that its estimate took.
    #[arg(long, value_name = "FILE.csv")]
    csv: Option<PathBuf>,
    /// Draw the four-quadrant plot: horizontally the share of a model's runs that fail, vertically
    /// its median error. Lines at 20 % separate optimal, accurate but failing (too low), safe but
    /// wasteful (too high), and neither.
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
}

/// The devices on which jobs are tried, with the memory sizes of the paper. Its Table 3 is of runs
/// on the first two.
const TRIED: [&str; 3] = ["rtx4060", "rtx3060", "a100-40g"];
/// How many of [`TRIED`] the paper's Table 3 is of.
const PAPERS: usize = 2;

/// Figures of the xMem paper, whose truths were capped at the estimate and read from NVML. What
/// runs conserve and their times are printed there; errors and failures follow from its published
/// raw results.
struct Published {
    name: &'static str,
    /// The median relative error, in thousandths.
    error: u32,
    /// The share of failed runs, in thousandths.
    failure: Option<u32>,
    /// Table 3, overall: the mean of what a run conserves, in hundredths of a GB.
    conserved: u32,
    /// Table 4: the mean run time, in seconds.
    seconds: u32,
}

const PUBLISHED: [Published; 4] = [
    Published { name: "xMem", error: 37, failure: Some(95), conserved: 782, seconds: 26 },
    Published { name: "DNNMem", error: 176, failure: None, conserved: 211, seconds: 33 },
    Published { name: "SchedTune", error: 300, failure: None, conserved: 38, seconds: 2 },
    Published { name: "LLMem", error: 740, failure: None, conserved: 169, seconds: 17 },
];

pub fn main(flags: &Flags, as_json: bool) -> anyhow::Result<Answer> {
    let outputs = [flags.csv.as_deref(), flags.plot.as_deref()];
    Outputs::new(&[Path::new(&flags.device)], &outputs)?;
    let profile = neap::device::profile::load(&flags.device)?;
    let config = flags
        .alloc_conf
        .as_deref()
        .map(|c| c.parse::<Config>().context("--alloc-conf"))
        .transpose()?;
    let options = Options {
        rules: flags.rules.rules(),
        settings: Settings { class: class(&profile)?, without: Vec::new(), cudnn_workspace: 0 },
        config,
        devices: flags.devices.iter().map(|of| device(of)).collect::<Result<_, _>>()?,
    };
    let (pairs, notes) = score::pairs(&flags.folder)?;
    let files =
        pairs.iter().flat_map(|p| [Some(&p.trace), Some(&p.truth), p.events.as_ref()]).flatten();
    Outputs::new(&files.map(PathBuf::as_path).collect::<Vec<_>>(), &outputs)?;
    notes.iter().for_each(|n| note(n));
    let working = progress::working(&format!("estimating {} jobs", pairs.len()));
    let scores = score::score_all(&pairs, &options);
    working.finish_and_clear();
    let scores = scores?;
    scores.iter().flat_map(|s| &s.notes).for_each(|n| note(&format!("note: {n}")));

    let times = Spread::new(scores.iter().map(|s| s.elapsed_ns as f64 / 1e9));
    note(&format!(
        "{} traces: {:.2} s each in the median, {:.2} s at most, on this machine under its load",
        scores.len(),
        times.median,
        times.worst
    ));
    let mut ending = Ending::reporting(&Report::new(&scores, &options), as_json);
    if let Some(path) = &flags.csv {
        ending.then(|| {
            neap::files::write(path, |out| files::csv(&scores, &options, out))?;
            output::written(path);
            Ok(())
        });
    }
    if let Some(path) = &flags.plot {
        let title =
            flags.folder.file_name().map_or_else(|| "estimates".into(), |n| n.to_string_lossy());
        let title = format!("{title}: {} jobs, rules of {:?}", scores.len(), flags.rules);
        ending.then(|| output::write(path, &files::plot(&title.to_lowercase(), &scores)?));
    }
    ending.with(Answer::Yes)
}

/// A device on which jobs are tried, by its name, its file or its bytes.
fn device(of: &str) -> anyhow::Result<Device> {
    if let Ok(memory) = of.parse::<Bytes>() {
        if memory == Bytes::ZERO || memory.0 > 1 << 50 {
            bail!("--devices: {of} is not a device's memory; give a size up to 1PiB, such as 3GiB");
        }
        return Ok(Device { name: of.to_owned(), memory, available: memory });
    }
    let profile = neap::device::profile::load(of)?;
    Ok(Device {
        name: profile.name.clone(),
        memory: profile.memory_bytes,
        available: profile.available(),
    })
}

/// The properties of a device on which the scratch of its kernels depends.
fn class(profile: &Profile) -> anyhow::Result<Class> {
    let Some(sm) = profile.multiprocessors else {
        bail!(
            "--device: {} has no multiprocessors; name a GPU, or add them to its file",
            profile.name
        );
    };
    Ok(Class {
        capability: sm.capability,
        multiprocessors: u64::from(sm.count),
        threads: u64::from(sm.threads),
    })
}

fn percent(share: f64) -> String {
    format!("{:.2} %", share * 100.0)
}

fn signed(share: f64) -> String {
    // A value that rounds to zero has no sign.
    let text = format!("{:+.2} %", share * 100.0);
    if text.trim_start_matches(['+', '-']) == "0.00 %" { "0.00 %".to_owned() } else { text }
}

/// Bytes in units of 1000³, as the paper counts, with a sign where it is negative.
fn gb(bytes: i64) -> String {
    format!("{:.2} GB", bytes as f64 / 1e9)
}

fn word(runs: &[neap::estimate::score::Run], with: usize) -> &'static str {
    // The cap is the same on every device that is at least as large as the cap.
    match runs.iter().max_by_key(|r| r.available) {
        None => "-",
        Some(run) if run.survives[with] => "survives",
        Some(_) => "dies",
    }
}

fn failed(runs: &[neap::estimate::score::Run], with: usize) -> String {
    if runs.is_empty() {
        "-".to_owned()
    } else {
        format!("{}/{}", runs.iter().filter(|r| r.fails(with)).count(), runs.len())
    }
}

fn text(scores: &[Score], options: &Options) -> String {
    let mut jobs = Table::new(&[
        ("job", Side::Left),
        ("reserved", Side::Right),
        ("estimate", Side::Right),
        ("error", Side::Right),
        ("allocated", Side::Right),
        ("estimate", Side::Right),
        ("error", Side::Right),
        ("capped at estimate", Side::Left),
        ("+ margin", Side::Left),
        ("fails", Side::Right),
        ("+ margin", Side::Right),
    ]);
    for s in scores {
        jobs.row([
            s.name.clone(),
            s.actual.reserved.to_string(),
            s.estimated.reserved.to_string(),
            signed(s.reserved_error()),
            s.actual.allocated.to_string(),
            s.estimated.allocated.to_string(),
            signed(s.allocated_error()),
            word(&s.runs, BARE).to_owned(),
            word(&s.runs, MARGIN).to_owned(),
            failed(&s.runs, BARE),
            failed(&s.runs, MARGIN),
        ]);
    }
    let (reserved, allocated) = errors(scores);
    let mut all = Table::new(&[
        ("", Side::Left),
        ("median error (MRE)", Side::Right),
        ("p90", Side::Right),
        ("worst", Side::Right),
        ("failure (PEF)", Side::Right),
        ("+ margin", Side::Right),
        ("conserved (MCP)", Side::Right),
        ("+ margin", Side::Right),
        ("if a death costs 0", Side::Right),
        ("+ margin", Side::Right),
    ]);
    let fate = Fate::new(scores.iter().flat_map(|s| &s.runs));
    let fates = |f: &Fate| {
        let failure = |with| f.failure(with).map_or_else(|| "-".to_owned(), percent);
        let size = |mcp: Option<i64>| mcp.map_or_else(|| "-".to_owned(), gb);
        let [bare, margin] = [BARE, MARGIN].map(|with| size(f.mcp(with)));
        let [lenient, lenient_margin] = [BARE, MARGIN].map(|with| size(f.lenient_mcp(with)));
        [failure(BARE), failure(MARGIN), bare, margin, lenient, lenient_margin]
    };
    let spread = |s: &Spread| [percent(s.median), percent(s.p90), percent(s.worst)];
    let line = |name: &str, spread: [String; 3], fates: [String; 6]| {
        [vec![name.to_owned()], spread.to_vec(), fates.to_vec()].concat()
    };
    all.row(line("reserved", spread(&reserved), fates(&fate)));
    all.row(line("reserved, capped", spread(&capped(scores)), Default::default()));
    all.row(line("allocated", spread(&allocated), Default::default()));
    for (index, device) in options.devices.iter().enumerate() {
        let runs = Fate::new(scores.iter().filter_map(|s| s.runs.get(index)));
        all.row(line(
            &format!("  on {}, {}", device.name, device.memory),
            Default::default(),
            fates(&runs),
        ));
    }
    if let Some(fate) = on_the_papers(scores, options) {
        all.row(line("  on the paper's two devices", Default::default(), fates(&fate)));
    }
    for p in &PUBLISHED {
        let failure = p.failure.map_or_else(|| "-".to_owned(), |f| percent(f64::from(f) / 1000.0));
        let mut row = vec![
            format!("published: {}", p.name),
            percent(f64::from(p.error) / 1000.0),
            "-".to_owned(),
            "-".to_owned(),
            failure,
            "-".to_owned(),
            format!("{}.{:02} GB", p.conserved / 100, p.conserved % 100),
        ];
        row.resize(10, "-".to_owned());
        all.row(row);
    }
    format!(
        "{jobs}\n{all}\n{}",
        "Published figures are of other jobs, on two devices: they used capped truth and NVML. \
         Errors and failures are of the\npaper's raw results, which it does not print. A run is \
         a job on a device; it fails when the verdict is wrong, or\nwhen the job fits and dies \
         capped at its estimate. Context is outside both. *Capped* is against the peak of\nthat \
         second run, the truth of Eq. 2 and 3 of the xMem paper. MCP is its Eq. 7, with context \
         and estimate subtracted\nfrom the device; it counts a failed run as the whole device \
         lost. The columns behind it count only a wrong verdict so."
    )
}

fn errors(scores: &[Score]) -> (Spread, Spread) {
    (
        Spread::new(scores.iter().map(Score::reserved_error)),
        Spread::new(scores.iter().map(Score::allocated_error)),
    )
}

/// The spread of errors against the capped runs.
fn capped(scores: &[Score]) -> Spread {
    Spread::new(scores.iter().filter_map(Score::capped_error))
}

/// How the runs on the devices of the paper's Table 3 ended, where these and others were tried.
fn on_the_papers(scores: &[Score], options: &Options) -> Option<Fate> {
    let names: Vec<&str> = options.devices.iter().map(|device| &*device.name).collect();
    if names.len() == PAPERS || !names.starts_with(&TRIED[..PAPERS]) {
        return None;
    }
    Some(Fate::new(scores.iter().flat_map(|score| score.runs.iter().take(PAPERS))))
}

/// The optimizer, or where gradients are cleared, from a job's name of the form
/// model-optimizer-batch-size-zero_grad.
fn part(score: &Score, from_end: usize) -> String {
    let parts: Vec<&str> = score.name.rsplit('-').collect();
    parts
        .get(from_end)
        .filter(|_| parts.len() >= 5)
        .map_or_else(|| "?".to_owned(), |p| (*p).to_owned())
}

/// The accuracy of estimates.
#[derive(Serialize)]
struct Report<'a> {
    reserved_error: SpreadReport,
    capped_error: SpreadReport,
    allocated_error: SpreadReport,
    fate: FateReport,
    #[serde(skip_serializing_if = "Option::is_none")]
    fate_on_the_papers_devices: Option<FateReport>,
    devices: Vec<DeviceReport<'a>>,
    models: Vec<GroupReport>,
    optimizers: Vec<GroupReport>,
    zero_grad: Vec<GroupReport>,
    jobs: Vec<JobReport<'a>>,
    published: Vec<PublishedReport>,
    published_note: &'static str,
    #[serde(skip)]
    text: String,
}

/// Relative errors.
#[derive(Serialize)]
struct SpreadReport {
    median: f64,
    p90: f64,
    worst: f64,
}

/// How runs ended.
#[derive(Serialize)]
struct FateReport {
    runs: u64,
    failure: Option<f64>,
    failure_with_margin: Option<f64>,
    conserved_bytes: Option<i64>,
    conserved_with_margin_bytes: Option<i64>,
    lenient_conserved_bytes: Option<i64>,
    lenient_conserved_with_margin_bytes: Option<i64>,
}

#[derive(Serialize)]
struct DeviceReport<'a> {
    device: &'a str,
    device_bytes: Bytes,
    fate: FateReport,
}

/// Jobs with something in common.
#[derive(Serialize)]
struct GroupReport {
    name: String,
    jobs: usize,
    error: SpreadReport,
    fate: FateReport,
}

#[derive(Serialize)]
struct JobReport<'a> {
    name: &'a str,
    model: &'a str,
    peak_reserved_bytes: Bytes,
    estimated_peak_reserved_bytes: Bytes,
    reserved_error: f64,
    peak_allocated_bytes: Bytes,
    estimated_peak_allocated_bytes: Bytes,
    allocated_error: f64,
    margin_bytes: Bytes,
    capped_peak_reserved_bytes: Option<Bytes>,
    capped_error: Option<f64>,
    elapsed_ns: u64,
    runs: Vec<RunReport<'a>>,
}

/// A job on a device.
#[derive(Serialize)]
struct RunReport<'a> {
    device: &'a str,
    predicted_oom: bool,
    oom: bool,
    survives_estimate: bool,
    survives_estimate_and_margin: bool,
    conserved_bytes: i64,
    conserved_with_margin_bytes: i64,
}

#[derive(Serialize)]
struct PublishedReport {
    name: &'static str,
    median_error: f64,
    failure: Option<f64>,
    conserved_gb: f64,
    seconds: u32,
}

impl SpreadReport {
    fn new(s: &Spread) -> Self {
        Self { median: s.median, p90: s.p90, worst: s.worst }
    }
}

impl FateReport {
    fn new(f: &Fate) -> Self {
        Self {
            runs: f.runs,
            failure: f.failure(BARE),
            failure_with_margin: f.failure(MARGIN),
            conserved_bytes: f.mcp(BARE),
            conserved_with_margin_bytes: f.mcp(MARGIN),
            lenient_conserved_bytes: f.lenient_mcp(BARE),
            lenient_conserved_with_margin_bytes: f.lenient_mcp(MARGIN),
        }
    }
}

impl GroupReport {
    fn new(g: &Group) -> Self {
        let (error, fate) = (SpreadReport::new(&g.error), FateReport::new(&g.fate));
        Self { name: g.name.clone(), jobs: g.jobs, error, fate }
    }
}

impl<'a> JobReport<'a> {
    fn new(s: &'a Score, devices: &'a [Device]) -> Self {
        let run = |(r, d): (&score::Run, &'a Device)| RunReport {
            device: &d.name,
            predicted_oom: r.predicted_oom,
            oom: r.oom,
            survives_estimate: r.survives[BARE],
            survives_estimate_and_margin: r.survives[MARGIN],
            conserved_bytes: r.conserved(BARE),
            conserved_with_margin_bytes: r.conserved(MARGIN),
        };
        Self {
            name: &s.name,
            model: &s.model,
            peak_reserved_bytes: s.actual.reserved,
            estimated_peak_reserved_bytes: s.estimated.reserved,
            reserved_error: s.reserved_error(),
            peak_allocated_bytes: s.actual.allocated,
            estimated_peak_allocated_bytes: s.estimated.allocated,
            allocated_error: s.allocated_error(),
            margin_bytes: s.margin,
            capped_peak_reserved_bytes: s.capped,
            capped_error: s.capped_error(),
            elapsed_ns: s.elapsed_ns,
            runs: s.runs.iter().zip(devices).map(run).collect(),
        }
    }
}

impl<'a> Report<'a> {
    fn new(scores: &'a [Score], options: &'a Options) -> Self {
        let (reserved, allocated) = errors(scores);
        let groups = |all: Vec<Group>| all.iter().map(GroupReport::new).collect();
        let device = |(i, d): (usize, &'a Device)| DeviceReport {
            device: &d.name,
            device_bytes: d.memory,
            fate: FateReport::new(&Fate::new(scores.iter().filter_map(|s| s.runs.get(i)))),
        };
        let share = |thousandths: u32| f64::from(thousandths) / 1000.0;
        let published = |p: &Published| PublishedReport {
            name: p.name,
            median_error: share(p.error),
            failure: p.failure.map(share),
            conserved_gb: f64::from(p.conserved) / 100.0,
            seconds: p.seconds,
        };
        Self {
            reserved_error: SpreadReport::new(&reserved),
            capped_error: SpreadReport::new(&capped(scores)),
            allocated_error: SpreadReport::new(&allocated),
            fate: FateReport::new(&Fate::new(scores.iter().flat_map(|s| &s.runs))),
            fate_on_the_papers_devices: on_the_papers(scores, options)
                .map(|fate| FateReport::new(&fate)),
            devices: options.devices.iter().enumerate().map(device).collect(),
            models: groups(score::by(scores, |s| s.model.clone())),
            optimizers: groups(score::by(scores, |s| part(s, 3))),
            zero_grad: groups(score::by(scores, |s| part(s, 0))),
            jobs: scores.iter().map(|s| JobReport::new(s, &options.devices)).collect(),
            published: PUBLISHED.iter().map(published).collect(),
            published_note: "they used capped truth and NVML",
            text: text(scores, options),
        }
    }
}

impl fmt::Display for Report<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}
