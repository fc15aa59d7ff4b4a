//! `neap run`: a plan, or a job without one, executed for real.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::bail;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use neap::device::latency::{Row, Table as LatencyTable};
use neap::device::{Profile, present};
use neap::job::Graph;
use neap::plan::{self, Request};
use neap::report::table::{Side, Table};
use neap::run::{Outcome, Rate, RunError, Settings, Target};
use neap::schedule::JobPlan;
use neap::units::{Bytes, Nanos};
use serde_json::json;

use crate::output::{self, Answer, note};
use crate::settings::{self, DeviceFlags, Subject};

/// Run a plan, or a job without one.
#[derive(clap::Args)]
pub struct Flags {
    /// A *.plan.json, or a *.graph.json to run without a plan.
    subject: PathBuf,
    /// The plan's graph, in place of the path that the plan records.
    #[arg(long, value_name = "FILE.graph.json")]
    graph: Vec<PathBuf>,
    /// For a graph without a plan.
    #[command(flatten)]
    device: DeviceFlags,
    /// Where to run; if not given, the GPU where there is one that can run it, else the host.
    #[arg(long, value_enum)]
    on: Option<On>,
    /// Where NVIDIA's libraries lie; looked at before Python environments and the loader's path.
    #[arg(long, value_name = "DIR")]
    cuda_libs: Option<PathBuf>,
    /// Let the GPU round the factors of f32 products to TF32: faster, and less exact.
    #[arg(long)]
    tf32: bool,
    /// How many iterations.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    iterations: u32,
    /// Initial values: parameter:NAME, buffer:NAME, optimizer_state:KEY:NAME, input:x, input:y.
    #[arg(long, value_name = "FILE.safetensors")]
    weights: Option<PathBuf>,
    /// Write parameters, buffers and optimizer states at the end.
    #[arg(long, value_name = "FILE.safetensors")]
    save: Option<PathBuf>,
    /// Where initial values and batches come from when no file gives them.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Slow the link to this share of its speed, such as 0.05.
    #[arg(long, value_name = "SHARE", default_value = "1", value_parser = throttle)]
    throttle_link: u32,
    /// Copy as fast as memory goes instead of at the device's link rate.
    #[arg(long, conflicts_with = "throttle_link")]
    unlimited_link: bool,
    /// Write each operator's measured time (the median over iterations).
    #[arg(long, value_name = "FILE.csv")]
    latencies_out: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum On {
    /// The embedded host device.
    Host,
    /// An NVIDIA GPU.
    Cuda,
}

fn throttle(text: &str) -> Result<u32, String> {
    let problem = || format!("`{text}` is not a share of the link; give a number above 0 and up to 1 with at most three decimals");
    let share = settings::thousandths(text).ok_or_else(problem)?;
    u32::try_from(share).ok().filter(|s| (1..=1000).contains(s)).ok_or_else(problem)
}

pub fn main(flags: &Flags, as_json: bool) -> anyhow::Result<Answer> {
    let target = choose_device(flags)?;
    let outputs = [flags.save.as_deref(), flags.latencies_out.as_deref()];
    settings::outputs(&flags.device.inputs(&settings::subject_files(&flags.subject, &flags.graph)), &outputs)?;
    let (graph, job, arena, device, planned) = match settings::subject(&flags.subject, &flags.graph)? {
        Subject::Plan(plan, mut graphs) => {
            flags.device.not_with_a_plan(&flags.subject)?;
            if !settings::checked(&flags.subject, &plan, &graphs)? {
                return Ok(Answer::No);
            }
            let mut plan = *plan;
            (graphs.remove(0), plan.jobs.remove(0), plan.budget, plan.device, true)
        }
        Subject::Graph(graph) => {
            let (device, latencies) = flags.device.resolve(&graph)?;
            let (job, arena) = unplanned(&graph, &device, &latencies)?;
            (*graph, job, arena, device, false)
        }
    };
    let settings = Settings {
        target,
        iterations: flags.iterations,
        link_rate: if flags.unlimited_link { Rate::Unlimited } else { Rate::Profile },
        throttle_per_mille: flags.throttle_link,
        seed: flags.seed,
        weights: flags.weights.clone(),
        save: flags.save.clone(),
        ..Settings::default()
    };
    let bar = ProgressBar::with_draw_target(Some(u64::from(flags.iterations)), ProgressDrawTarget::stderr());
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} iterations, {eta} left") {
        bar.set_style(style);
    }
    let outcome = neap::run::run(&graph, &job, arena, &device, &settings, &mut |done| bar.set_position(u64::from(done)));
    bar.finish_and_clear();
    let outcome = outcome.map_err(|e| with_file(flags, e))?;
    for text in &outcome.notes {
        note(&format!("note: {text}"));
    }
    let device_key = if settings.target == Target::Host { "host" } else { device.name.as_str() };
    if let Some(path) = &flags.latencies_out {
        let rows: Vec<Row> = graph.operators.iter().zip(&outcome.operator_ns).map(|(o, t)| Row::of(o, device_key, median(t))).collect();
        LatencyTable::write(path, &rows)?;
        note(&format!("written: {}", path.display()));
    }
    report(&graph, arena, planned, &outcome, as_json)?;
    Ok(Answer::Yes)
}

fn with_file(flags: &Flags, error: RunError) -> anyhow::Error {
    anyhow::Error::new(error).context(flags.subject.display().to_string())
}

fn choose_device(flags: &Flags) -> anyhow::Result<Target> {
    let cuda = || Target::Cuda { libs: flags.cuda_libs.clone(), tf32: flags.tf32 };
    if let Some(folder) = flags.cuda_libs.as_ref().filter(|folder| !folder.is_dir()) {
        bail!("--cuda-libs: {} is not a folder", folder.display());
    }
    let host_only = flags.throttle_link != 1000 || flags.unlimited_link;
    match flags.on {
        Some(On::Host) if flags.tf32 || flags.cuda_libs.is_some() => bail!("--tf32 and --cuda-libs are for --on cuda"),
        Some(On::Host) => Ok(Target::Host),
        Some(On::Cuda) if host_only => {
            bail!("--throttle-link and --unlimited-link are for --on host: a GPU's link goes as fast as it goes")
        }
        Some(On::Cuda) => match present::cuda_devices() {
            Err(why) => bail!("--on cuda: {why}; use --on host"),
            Ok(_) => Ok(cuda()),
        },
        None if host_only => Ok(Target::Host),
        None => match present::cuda_devices() {
            Ok(_) => Ok(cuda()),
            Err(why) => {
                note(&format!("note: running on the host: {why}"));
                Ok(Target::Host)
            }
        },
    }
}

fn unplanned(graph: &Graph, device: &Profile, latencies: &[neap::schedule::Latency]) -> anyhow::Result<(JobPlan, Bytes)> {
    let request = Request {
        graph,
        file: (String::new(), String::new()),
        device,
        latencies,
        budget: Bytes::ZERO,
        method: plan::Method::default(),
        recorded_options: BTreeMap::new(),
    };
    let mut planned = plan::unplanned(&request)?;
    Ok((planned.plan.jobs.remove(0), planned.plan.figures.arena_bytes))
}

/// The middle of what was measured; the first iteration, which warms up, counts only when it is alone.
fn median(times: &[Nanos]) -> Nanos {
    let mut sorted = if times.len() > 1 { times[1..].to_vec() } else { times.to_vec() };
    sorted.sort_unstable();
    sorted.get(sorted.len() / 2).copied().unwrap_or_default().max(Nanos(1))
}

fn report(graph: &Graph, arena: Bytes, planned: bool, outcome: &Outcome, as_json: bool) -> anyhow::Result<()> {
    let iteration = median(&outcome.iteration_ns);
    if as_json {
        return output::json(&json!({
            "name": graph.name,
            "planned": planned,
            "losses": outcome.losses,
            "checksum": outcome.checksum,
            "arena_bytes": arena,
            "peak_bytes": outcome.peak_bytes,
            "resident_peak_bytes": outcome.resident_peak_bytes,
            "iteration_ns": iteration,
            "iterations_ns": outcome.iteration_ns,
            "late_copies": outcome.late_copies,
            "passive_copies": outcome.passive_copies,
            "notes": outcome.notes,
        }));
    }
    let mut text = String::new();
    if outcome.losses.is_empty() {
        text += "no loss was recognised in this graph\n";
    } else {
        let mut table = Table::new(&[("iteration", Side::Right), ("loss", Side::Right), ("time", Side::Right)]);
        for (index, (loss, time)) in outcome.losses.iter().zip(&outcome.iteration_ns).enumerate() {
            table.row([index.to_string(), loss.to_string(), time.to_string()]);
        }
        text += &format!("{table}\n");
    }
    text += &format!(
        "memory touched {} ({} bytes) of an arena of {}; median iteration {iteration}; {} late copies\nchecksum {}\n",
        outcome.peak_bytes, outcome.peak_bytes.0, arena, outcome.late_copies, outcome.checksum
    );
    output::data(&text)
}
