//! `neap run`: a plan, or a job without one, executed for real.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::bail;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use neap::contract::{JobPlan, Plan};
use neap::device::latency::{Row, Table as LatencyTable};
use neap::device::{Profile, present};
use neap::job::Graph;
use neap::plan::{self, Method, PlanError, Request};
use neap::report::table::{Side, Table};
use neap::run::controller::THRESHOLD;
use neap::run::{Change, Outcome, Rate, Replan, RunError, Settings, Target};
use neap::units::{Bytes, Nanos, OpId};
use serde_json::json;

use crate::output::{self, Answer, note};
use crate::service;
use crate::settings::{self, DeviceFlags, Site, Subject};

/// Run a plan, or a job without one; or several at once.
#[derive(clap::Args)]
pub struct Flags {
    /// A *.plan.json, or a *.graph.json to run without a plan. Several share the device, as --policy says.
    #[arg(value_name = "PLAN", required_unless_present_any = ["listen", "watch"])]
    pub subjects: Vec<PathBuf>,
    /// The plan's graph, in place of the path that the plan records.
    #[arg(long, value_name = "FILE.graph.json")]
    pub graph: Vec<PathBuf>,
    /// For a graph without a plan.
    #[command(flatten)]
    pub device: DeviceFlags,
    #[command(flatten)]
    on: Where,
    /// How many iterations; of several jobs one number for all, or one for each.
    #[arg(long, value_name = "N,…", default_value = "1", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub iterations: Vec<u32>,
    #[command(flatten)]
    pub service: service::Several,
    /// Initial values: parameter:NAME, buffer:NAME, optimizer_state:KEY:NAME, input:x, input:y.
    #[arg(long, value_name = "FILE.safetensors")]
    pub weights: Option<PathBuf>,
    /// Write parameters, buffers and optimizer states at the end.
    #[arg(long, value_name = "FILE.safetensors")]
    pub save: Option<PathBuf>,
    /// Where initial values and batches come from when no file gives them.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Slow the link to this share of its speed, such as 0.05; with @N from iteration N on, counted from 0, such as 0.05@3,1@8.
    #[arg(long, value_name = "SHARE[@N],…", value_delimiter = ',', value_parser = throttle)]
    throttle_link: Vec<(u64, u32)>,
    /// Copy as fast as memory goes instead of at the device's link rate.
    #[arg(long, conflicts_with = "throttle_link")]
    unlimited_link: bool,
    /// Write each operator's measured time (the median over iterations).
    #[arg(long, value_name = "FILE.csv")]
    pub latencies_out: Option<PathBuf>,
    /// Plan anew in the background when measured latencies drift, and follow the new plan from the next iteration on; with several
    /// jobs, plan all of them anew together whenever one comes or ends.
    #[arg(long)]
    pub replan: bool,
    /// How far the summed latency of operators, or of a direction's copies, has to move for that; 0.3 if not given.
    #[arg(long, value_name = "SHARE", value_parser = threshold, requires = "replan")]
    pub replan_threshold: Option<u64>,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum On {
    /// The embedded host device.
    Host,
    /// An NVIDIA GPU.
    Cuda,
}

/// From which iteration on, and thousandths.
fn throttle(text: &str) -> Result<(u64, u32), String> {
    let problem = || {
        format!(
            "`{text}` is not a share of the link; give a number above 0 and up to 1 with at most three decimals, and @N to begin at iteration N"
        )
    };
    let (share, from) = text.split_once('@').unwrap_or((text, "0"));
    let from: u32 = from.parse().map_err(|_| problem())?;
    let share = settings::thousandths(share)
        .and_then(|s| u32::try_from(s).ok())
        .filter(|s| (1..=1000).contains(s));
    Ok((from.into(), share.ok_or_else(problem)?))
}

fn threshold(text: &str) -> Result<u64, String> {
    let share = settings::thousandths(text).filter(|s| (1..=1_000_000).contains(s));
    share.ok_or_else(|| format!("`{text}` is not a threshold; give a number above 0 with at most three decimals, such as 0.3"))
}

pub fn main(flags: &Flags, as_json: bool) -> anyhow::Result<Answer> {
    // A GPU's link goes as fast as it goes.
    let host_only = !flags.throttle_link.is_empty() || flags.unlimited_link;
    let target = flags.on.choose(host_only.then_some("--throttle-link, --unlimited-link"))?;
    let mut throttle = flags.throttle_link.clone();
    throttle.sort_by_key(|t| t.0);
    let settings = Settings {
        target,
        link_rate: if flags.unlimited_link { Rate::Unlimited } else { Rate::Profile },
        throttle_later: throttle,
        seed: flags.seed,
        weights: flags.weights.clone(),
        save: flags.save.clone(),
        ..Settings::default()
    };
    let outputs =
        [flags.save.as_deref(), flags.latencies_out.as_deref(), flags.service.log.as_deref()];
    match &flags.subjects[..] {
        [subject] if !flags.service.asked() => one(flags, subject, settings, &outputs, as_json),
        _ => service::main(flags, settings, &outputs, as_json),
    }
}

/// A bar on stderr, where that is a terminal.
pub fn bar(iterations: u64) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(iterations), ProgressDrawTarget::stderr());
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} iterations, {eta} left") {
        bar.set_style(style);
    }
    bar
}

/// One job, alone on the device.
fn one(
    flags: &Flags,
    subject: &Path,
    settings: Settings,
    outputs: &[Option<&Path>],
    as_json: bool,
) -> anyhow::Result<Answer> {
    settings::outputs(
        &flags.device.inputs(&settings::subject_files(subject, &flags.graph)),
        outputs,
    )?;
    let iterations = flags.iterations[0];
    let settings = Settings { iterations, ..settings };
    let bar = bar(iterations.into());
    let mut progress = |done: u32| bar.set_position(u64::from(done));
    let (graph, device, arena, planned, outcome) =
        match settings::subject(subject, &flags.graph, outputs)? {
            Subject::Plan(plan, mut graphs) => {
                flags.device.not_with_a_plan(subject)?;
                if !settings::checked(subject, &plan, &graphs)? {
                    return Ok(Answer::No);
                }
                if plan.jobs.len() > 1 {
                    bar.finish_and_clear();
                    return service::main(flags, settings, outputs, as_json);
                }
                if flags.iterations.len() > 1 {
                    bail!("--iterations: one number for one job");
                }
                let graph = graphs.remove(0);
                let outcome = if flags.replan {
                    replanning(flags, subject, &graph, &plan, &settings, &mut progress)?
                } else {
                    neap::run::run(
                        &graph,
                        &plan.jobs[0],
                        plan.budget,
                        &plan.device,
                        &settings,
                        &mut progress,
                    )
                };
                (graph, plan.device, plan.budget, true, outcome)
            }
            Subject::Graph(_) if flags.iterations.len() > 1 => {
                bail!("--iterations: one number for one job")
            }
            Subject::Graph(_) if flags.replan => bail!(
                "--replan: {} is a job without a plan; `neap plan` makes one",
                subject.display()
            ),
            Subject::Graph(mut graph) => {
                let Site { device, latencies, libraries, .. } = flags.device.resolve(&mut graph)?;
                let (mut job, arena) = unplanned(&graph, &device, &latencies)?;
                job.libraries = libraries;
                let outcome =
                    neap::run::run(&graph, &job, arena, &device, &settings, &mut progress);
                (*graph, device, arena, false, outcome)
            }
        };
    bar.finish_and_clear();
    let outcome = outcome.map_err(|e| with_file(subject, e))?;
    for text in &outcome.notes {
        note(&format!("note: {text}"));
    }
    outcome.changes.iter().for_each(tell);
    if let Some(path) = &flags.latencies_out {
        let row = |(index, (o, t)): (_, (_, &Vec<Nanos>))| {
            let chosen = outcome.libraries.get(&OpId::of(index));
            Row::of(o, settings.target.key(&device.name), median(t)).beside(o, &device).by(chosen)
        };
        LatencyTable::write(
            path,
            &graph
                .operators
                .iter()
                .zip(&outcome.operator_ns)
                .enumerate()
                .map(row)
                .collect::<Vec<Row>>(),
        )?;
        note(&format!("written: {}", path.display()));
    }
    report(&graph, arena, planned, flags.replan, &outcome, as_json)?;
    Ok(Answer::Yes)
}

/// Runs a plan that may be replaced by others of the same planner, within the same budget.
fn replanning(
    flags: &Flags,
    subject: &Path,
    graph: &Graph,
    plan: &Plan,
    settings: &Settings,
    progress: &mut dyn FnMut(u32),
) -> anyhow::Result<Result<Outcome, RunError>> {
    let at = |problem: String| anyhow::anyhow!("--replan: {}: {problem}", subject.display());
    if plan.options.contains_key("allocator") {
        return Err(at(
            "it was planned for another allocator than a run's; plan it with --allocator arena"
                .to_owned(),
        ));
    }
    let method = Method::recorded(plan, 0).map_err(at)?;
    let planner = |device: &Profile, latencies: &[neap::contract::Latency]| {
        within(graph, device, latencies, plan.budget, method.clone(), plan.options.clone())
            .map_err(|e| e.to_string())
    };
    let replan = Replan {
        planner: &planner,
        threshold_per_mille: flags.replan_threshold.unwrap_or(THRESHOLD),
    };
    Ok(neap::run::run_replanning(graph, plan, settings, &replan, progress))
}

/// A plan within a budget, checked by whoever runs it.
pub fn within(
    graph: &Graph,
    device: &Profile,
    latencies: &[neap::contract::Latency],
    budget: Bytes,
    method: Method,
    recorded_options: BTreeMap<String, String>,
) -> Result<Plan, PlanError> {
    let request = Request {
        graph,
        file: (String::new(), String::new()),
        device,
        latencies,
        budget,
        method,
        recorded_options,
    };
    plan::make(&request).map(|planned| planned.plan)
}

/// Says what came of planning anew.
fn tell(change: &Change) {
    let sums = change.drift;
    let percent = |per_mille: u64| format!("{} %", per_mille / 10);
    let time = |t: Option<Nanos>| t.map_or_else(|| "unknown".to_owned(), |t| t.to_string());
    let seen = format!(
        "replan: after iteration {} operators take {} of what was planned for, copies to the device {}, from it {}; planned anew in {}",
        change.seen,
        percent(sums.operators_per_mille),
        percent(sums.h2d_per_mille),
        percent(sums.d2h_per_mille),
        change.planning
    );
    match (change.applied, &change.kept_because) {
        (Some(applied), _) => note(&format!(
            "{seen}; from iteration {applied} on: predicted {} instead of {}, measured {} instead of {} ({} before the drift)",
            time(change.predicted_after),
            time(change.predicted_before),
            time(change.measured_after),
            time(change.measured_before),
            time(change.measured_undisturbed),
        )),
        (None, why) => note(&format!(
            "{seen}; the plan stays: {}",
            why.as_deref().unwrap_or("no reason given")
        )),
    }
}

fn change_json(change: &Change) -> serde_json::Value {
    json!({
        "seen_after_iteration": change.seen,
        "operators_per_mille": change.drift.operators_per_mille,
        "h2d_per_mille": change.drift.h2d_per_mille,
        "d2h_per_mille": change.drift.d2h_per_mille,
        "applied_from_iteration": change.applied,
        "kept_because": change.kept_because,
        "predicted_before_ns": change.predicted_before,
        "predicted_after_ns": change.predicted_after,
        "measured_undisturbed_ns": change.measured_undisturbed,
        "measured_before_ns": change.measured_before,
        "measured_after_ns": change.measured_after,
        "planning_ns": change.planning,
    })
}

fn with_file(subject: &Path, error: RunError) -> anyhow::Error {
    anyhow::Error::new(error).context(subject.display().to_string())
}

/// Which device.
#[derive(clap::Args)]
pub struct Where {
    /// Where to run; if not given, the GPU where there is one that can run it, else the host.
    #[arg(long, value_enum)]
    on: Option<On>,
    /// Where NVIDIA's libraries lie; looked at before Python environments and the loader's path.
    #[arg(long, value_name = "DIR")]
    cuda_libs: Option<PathBuf>,
    /// Let the GPU round the factors of f32 products to TF32: faster, and less exact.
    #[arg(long)]
    tf32: bool,
}

impl Where {
    /// The device that is meant; `host_only` names flags that a GPU has no use for, if any are given.
    ///
    /// # Errors
    /// When flags contradict each other, or there is no GPU.
    pub fn choose(&self, host_only: Option<&str>) -> anyhow::Result<Target> {
        let cuda = || Target::Cuda { libs: self.cuda_libs.clone(), tf32: self.tf32 };
        if let Some(folder) = self.cuda_libs.as_ref().filter(|folder| !folder.is_dir()) {
            bail!("--cuda-libs: {} is not a folder", folder.display());
        }
        match (self.on, host_only) {
            (Some(On::Host), _) if self.tf32 || self.cuda_libs.is_some() => {
                bail!("--tf32 and --cuda-libs are for --on cuda")
            }
            (Some(On::Host), _) | (None, Some(_)) => Ok(Target::Host),
            (Some(On::Cuda), Some(flags)) => bail!("{flags}: for --on host; leave it away"),
            (Some(On::Cuda), None) => match present::cuda_devices() {
                Err(why) => bail!("--on cuda: {why}; use --on host"),
                Ok(_) => Ok(cuda()),
            },
            (None, None) => match present::cuda_devices() {
                Ok(_) => Ok(cuda()),
                Err(why) => {
                    note(&format!("note: running on the host: {why}"));
                    Ok(Target::Host)
                }
            },
        }
    }
}

pub fn unplanned(
    graph: &Graph,
    device: &Profile,
    latencies: &[neap::contract::Latency],
) -> anyhow::Result<(JobPlan, Bytes)> {
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
pub fn median(times: &[Nanos]) -> Nanos {
    let mut sorted = if times.len() > 1 { times[1..].to_vec() } else { times.to_vec() };
    sorted.sort_unstable();
    sorted.get(sorted.len() / 2).copied().unwrap_or_default().max(Nanos(1))
}

fn report(
    graph: &Graph,
    arena: Bytes,
    planned: bool,
    replan: bool,
    outcome: &Outcome,
    as_json: bool,
) -> anyhow::Result<()> {
    let iteration = median(&outcome.iteration_ns);
    if as_json {
        let mut object = json!({
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
        });
        if replan {
            object["changes"] = outcome.changes.iter().map(change_json).collect();
        }
        return output::json(&object);
    }
    let mut text = String::new();
    if outcome.losses.is_empty() {
        text += "no loss was recognised in this graph\n";
    } else {
        let mut table =
            Table::new(&[("iteration", Side::Right), ("loss", Side::Right), ("time", Side::Right)]);
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
