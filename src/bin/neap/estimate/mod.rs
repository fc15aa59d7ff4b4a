//! `neap estimate`: the GPU memory that a job needs, from a trace of the job on a CPU.

mod files;
mod measured;
mod page;
mod report;

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use neap::device::{Profile, builtin, profile};
use neap::estimate::answer::{self, Verdict, answer, peaks};
use neap::estimate::attribution::Places;
use neap::estimate::forecast::{Forecast, Job};
use neap::estimate::gpu::{Class, Rule, Settings};
use neap::estimate::trace::{LARGEST_BLOCK, Limits};
use neap::estimate::truth::Truth;
use neap::estimate::what_if::WhatIf;
use neap::sim::allocator::Config;
use neap::sim::allocator::replay::LARGEST_DEVICE;
use neap::units::Bytes;
use serde_json::json;

use crate::output::{self, Answer, Ending};
use crate::settings::{self, Outputs};

/// Estimate the GPU memory of a job from PyTorch's profile of it on a CPU.
#[derive(clap::Args)]
pub struct Flags {
    /// The file that torch.profiler's export_chrome_trace wrote, with profile_memory, record_shapes
    /// and with_stack on; may be gzipped.
    #[arg(required = true)]
    traces: Vec<PathBuf>,
    /// A built-in device or a *.device.json file. Its memory counts less the context's reserve. The
    /// figures are for the first device named. By default they are for h100, and each built-in GPU
    /// gets a verdict.
    #[arg(long, value_name = "NAME|FILE")]
    device: Vec<String>,
    /// The allocator's settings, as in PYTORCH_CUDA_ALLOC_CONF.
    #[arg(long, value_name = "CONF", allow_hyphen_values = true, default_value = "")]
    alloc_conf: String,
    /// The workspace of cuDNN around each convolution, which the trace does not have.
    #[arg(long, value_name = "BYTES", default_value = "0", value_parser = workspace)]
    cudnn_workspace: Bytes,
    /// Rules to switch off, to see what each does.
    #[arg(long, value_name = "RULE,...", value_delimiter = ',', value_parser = rule)]
    without: Vec<Rule>,
    /// The rules that make the estimate.
    #[arg(long, value_name = "RULES", default_value = "neap")]
    rules: settings::Rules,
    /// Edit the job: zero-grad=start|backward, dtype=bf16. The measured accuracy of such edits is
    /// printed.
    #[arg(long, value_name = "WHAT=VALUE,...")]
    what_if: Option<WhatIf>,
    /// Draw memory over time by the role of blocks.
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    /// Write a page to look at in a browser: every block over time with its operator and module, to
    /// zoom and to search, and the devices that it fits.
    #[arg(long, value_name = "FILE.html")]
    html: Option<PathBuf>,
    /// Write requested, allocated and reserved bytes after every change.
    #[arg(long, value_name = "FILE.csv")]
    curve: Option<PathBuf>,
    /// Write the forecast as a PyTorch memory snapshot, which memory_viz opens
    /// (pytorch.org/memory_viz).
    #[arg(long, value_name = "FILE.pickle")]
    snapshot: Option<PathBuf>,
    /// Print only the memory of each module, as CSV.
    #[arg(long, value_name = "WHAT")]
    by: Option<By>,
    /// Compare with the memory that the job really used: a *.truth.json, or a folder that has
    /// NAME.truth.json for NAME.profile.json.gz.
    #[arg(long, value_name = "TRUTH.json|FOLDER")]
    against: Option<PathBuf>,
    /// How many of the largest blocks at the peak to print.
    #[arg(long, value_name = "N", default_value_t = 10)]
    top: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum By {
    /// By nn.Module, with a row for blocks of no module.
    Module,
}

fn rule(name: &str) -> Result<Rule, String> {
    let names = || Rule::ALL.iter().map(|r| r.name()).collect::<Vec<_>>().join(", ");
    Rule::ALL
        .iter()
        .copied()
        .find(|r| r.name() == name)
        .ok_or_else(|| format!("there is no rule `{name}`; there are {}", names()))
}

/// The class of a device whose profile lacks it: the A100's.
const USUAL: Class = Class { capability: 8, multiprocessors: 108, threads: 2048 };
/// The device of the figures when none is named.
const HEADLINE: &str = "h100";

/// A device that gets a verdict.
struct Target {
    profile: Profile,
    class: Class,
    /// Whether its profile gives its class.
    said: bool,
}

impl Target {
    fn new(profile: Profile) -> Self {
        let class = profile.multiprocessors.map(|m| Class {
            capability: m.capability,
            multiprocessors: u64::from(m.count),
            threads: u64::from(m.threads),
        });
        Self { profile, class: class.unwrap_or(USUAL), said: class.is_some() }
    }
}

/// One device's verdict.
struct Judged {
    device: String,
    available: Bytes,
    verdict: Verdict,
    wanted: Bytes,
}

/// The estimate of one trace for the first device.
struct Estimate<'a> {
    file: &'a Path,
    target: &'a Target,
    settings: Settings,
    job: Job,
    forecast: Forecast,
    answer: answer::Answer,
    judged: Vec<Judged>,
    truth: Option<Truth>,
}

pub fn main(flags: &Flags, as_json: bool) -> anyhow::Result<Answer> {
    let mut inputs: Vec<&Path> = flags.traces.iter().map(PathBuf::as_path).collect();
    inputs.extend(flags.device.iter().map(Path::new));
    inputs.extend(flags.against.as_deref());
    let outputs = Outputs::new(
        &inputs,
        &[&flags.curve, &flags.plot, &flags.html, &flags.snapshot].map(|file| file.as_deref()),
    )?;
    let several = flags.traces.len() > 1;
    let files = [&flags.plot, &flags.html, &flags.curve, &flags.snapshot];
    if several && files.iter().any(|file| file.is_some()) {
        bail!("--plot, --html, --curve, --snapshot: each writes one file; name one trace");
    }
    if several && flags.by.is_some() && !as_json {
        bail!("--by module: prints one table; name one trace, or add --json");
    }
    if flags.by.is_some() && flags.against.is_some() && !as_json {
        bail!("--by module: prints nothing else; leave --against out, or add --json");
    }
    if flags.rules == settings::Rules::Xmem
        && (flags.what_if.is_some() || !flags.without.is_empty() || flags.cudnn_workspace.0 > 0)
    {
        bail!(
            "--rules xmem: the original has no --what-if, --without or --cudnn-workspace; leave them out"
        );
    }
    let config: Config = flags.alloc_conf.parse().context("--alloc-conf")?;
    let targets = targets(&flags.device)?;
    let headline = if flags.device.is_empty() {
        targets.iter().position(|t| t.profile.name == HEADLINE).unwrap_or(0)
    } else {
        0
    };
    let truths =
        flags.traces.iter().map(|trace| truth(flags, trace)).collect::<anyhow::Result<Vec<_>>>()?;
    outputs.apart_from_what_was_read()?;

    let mut fits = true;
    let mut objects = Vec::new();
    for (index, (file, truth)) in flags.traces.iter().zip(truths).enumerate() {
        let job = Job::read(file, &Limits::default())?;
        if let Some(found) = measured::compared(flags, file, &job.trace)? {
            if several && as_json {
                objects.push(serde_json::to_value(&found)?);
            } else {
                output::report(&found, as_json)?;
            }
            continue;
        }
        let estimate = estimate(flags, (file, job), &config, &targets, headline, truth);
        fits &= flags.device.is_empty()
            || estimate.judged.iter().all(|j| j.verdict != Verdict::DoesNotFit);
        let places = Places::new(&estimate.job);
        let mut ending = Ending::default();
        if as_json {
            let by_module = flags.by.is_some();
            let report = report::Report::new(&estimate, &places, flags.top, by_module);
            let object = serde_json::to_value(report)?;
            if several {
                objects.push(object);
            } else {
                ending.then(|| output::json(&object));
            }
        } else if flags.by.is_some() {
            let usages = places.by_module(&estimate.forecast, &estimate.answer);
            ending.then(|| output::data(&files::by_module(&usages)?));
        } else {
            let gap = if index > 0 { "\n" } else { "" };
            let text = report::text(&estimate, &places, flags.top);
            ending.then(|| output::data(&format!("{gap}{text}")));
        }
        if let Some(path) = &flags.curve {
            ending.then(|| files::curve(path, &estimate.forecast, &config));
        }
        if let Some(path) = &flags.plot {
            ending.then(|| files::plot(path, &estimate, &config, !flags.device.is_empty()));
        }
        if let Some(path) = &flags.html {
            let report = report::Report::new(&estimate, &places, flags.top, flags.by.is_some());
            let report = serde_json::to_value(report)?;
            ending.then(|| page::write(path, &estimate, &places, &config, report));
        }
        if let Some(path) = &flags.snapshot {
            ending.then(|| files::snapshot(path, &estimate, &places, &config, &flags.alloc_conf));
        }
        ending.with(Answer::Yes)?;
    }
    if several && as_json {
        output::json(&json!({ "traces": objects }))?;
    }
    Ok(Answer::yes_if(fits))
}

fn workspace(text: &str) -> Result<Bytes, String> {
    let bytes: Bytes = text.parse().map_err(|e: neap::units::ParseBytesError| e.to_string())?;
    let most = Bytes(LARGEST_BLOCK);
    if bytes <= most {
        Ok(bytes)
    } else {
        Err(format!("{bytes} is more than any device has; give at most {most}"))
    }
}

fn targets(named: &[String]) -> anyhow::Result<Vec<Target>> {
    let targets: Vec<Target> = if named.is_empty() {
        builtin::names()
            .iter()
            .filter(|n| **n != "host")
            .filter_map(|n| builtin::find(n))
            .map(Target::new)
            .collect()
    } else {
        named
            .iter()
            .map(|name| Ok(Target::new(profile::load(name)?)))
            .collect::<anyhow::Result<_>>()?
    };
    if let Some(target) = targets.iter().find(|t| t.profile.memory_bytes > LARGEST_DEVICE) {
        bail!(
            "the device {} has more memory than is modelled, {LARGEST_DEVICE}; name a smaller one",
            target.profile.name
        );
    }
    Ok(targets)
}

fn truth(flags: &Flags, trace: &Path) -> anyhow::Result<Option<Truth>> {
    let Some(path) = &flags.against else { return Ok(None) };
    if !path.is_dir() {
        if flags.traces.len() > 1 {
            bail!(
                "--against: {} is one truth for {} traces; name the folder of their truths",
                path.display(),
                flags.traces.len()
            );
        }
        return Ok(Some(Truth::read(path)?));
    }
    let stem = settings::stem(trace)?;
    let stem = stem.strip_suffix(".profile").unwrap_or(&stem);
    Ok(Some(Truth::read(&path.join(format!("{stem}.truth.json")))?))
}

/// The requests of the job on a GPU. This is the only place that chooses the rules.
fn forecast(flags: &Flags, job: &Job, settings: &Settings) -> Forecast {
    let forecast = flags.rules.rules()(job, settings);
    let Some(what_if) = &flags.what_if else { return forecast };
    let mut forecast = what_if.apply(job, forecast);
    forecast.notes.extend(what_if.accuracy());
    forecast
}

fn estimate<'a>(
    flags: &Flags,
    (file, job): (&'a Path, Job),
    config: &Config,
    targets: &'a [Target],
    headline: usize,
    truth: Option<Truth>,
) -> Estimate<'a> {
    let target = &targets[headline];
    let settings = |class| Settings {
        class,
        without: flags.without.clone(),
        cudnn_workspace: flags.cudnn_workspace.0,
    };
    let mut first = forecast(flags, &job, &settings(target.class));
    let answered = answer(&job, &mut first, config);
    // Devices of one class share a forecast.
    let mut judged: Vec<Option<Judged>> = targets.iter().map(|_| None).collect();
    let mut judge = |class: Class, forecast: &Forecast, answer: &answer::Answer| {
        for (target, judged) in targets.iter().zip(&mut judged).filter(|(t, _)| t.class == class) {
            let available = target.profile.available();
            let verdict = answer.verdict(forecast, config, available);
            *judged = Some(Judged {
                device: target.profile.name.clone(),
                available,
                verdict,
                wanted: answer.wanted(),
            });
        }
    };
    judge(target.class, &first, &answered);
    for (index, other) in targets.iter().enumerate() {
        if other.class == target.class || targets[..index].iter().any(|t| t.class == other.class) {
            continue;
        }
        let mut other_forecast = forecast(flags, &job, &settings(other.class));
        let answer = peaks(&job, &mut other_forecast, config);
        judge(other.class, &other_forecast, &answer);
    }
    let judged = judged.into_iter().flatten().collect();
    Estimate {
        file,
        target,
        settings: settings(target.class),
        job,
        forecast: first,
        answer: answered,
        judged,
        truth,
    }
}
