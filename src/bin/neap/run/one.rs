//! `neap run` of one job, alone on the device.

use std::fmt;
use std::path::Path;

use anyhow::bail;
use neap::contract::{JobPlan, Plan};
use neap::device::Profile;
use neap::job::Graph;
use neap::plan::Method;
use neap::report::table::{Side, Table};
use neap::run::drift::THRESHOLD;
use neap::run::{Change, Outcome, Product, Replan, RunError, Settings};
use neap::sim::engine;
use neap::sim::program::Program;
use neap::units::{Bytes, Nanos};
use serde::Serialize;

use super::{Flags, latencies, median};
use crate::output::{Answer, Ending, note};
use crate::settings::{self, Outputs, Site, Subject};
use crate::{making, progress, signals, timeline};

/// The result of running a file.
pub enum Ended {
    Answered(Answer),
    /// The file is a plan of several jobs.
    HasSeveralJobs,
}

/// A job that ran.
struct Ran {
    graph: Graph,
    job: JobPlan,
    device: Profile,
    arena: Bytes,
    planned: bool,
    outcome: Outcome,
}

pub fn main(
    flags: &Flags,
    subject: &Path,
    settings: &Settings,
    as_json: bool,
) -> anyhow::Result<Ended> {
    let mut inputs = flags.device.inputs(&settings::subject_files(subject, &flags.graph));
    inputs.extend(flags.weights.as_deref());
    let outputs = Outputs::new(&inputs, &flags.outputs())?;
    let read = settings::subject(subject, &flags.graph)?;
    let settings = Settings { iterations: flags.iterations[0], ..settings.clone() };
    let ran = match read {
        Subject::Plan(plan, graphs) => {
            flags.device.not_with_a_plan(subject)?;
            outputs.apart_from_what_was_read()?;
            if !settings::checked(subject, &plan, &graphs)? {
                return Ok(Ended::Answered(Answer::No));
            }
            if plan.jobs.len() > 1 {
                return Ok(Ended::HasSeveralJobs);
            }
            planned(flags, subject, *plan, graphs, &settings)?
        }
        Subject::Graph(graph) => {
            if flags.replan {
                bail!(
                    "--replan: {} is a job without a plan; `neap plan` makes one",
                    subject.display()
                );
            }
            unplanned(flags, subject, *graph, &settings, &outputs)?
        }
    };
    for text in &ran.outcome.notes {
        note(&format!("note: {text}"));
    }
    ran.outcome.changes.iter().for_each(tell);
    let stopped = ran.outcome.stopped;
    if stopped {
        let (ran, all) = (ran.outcome.iteration_ns.len(), settings.iterations);
        note(&format!("stopped by a signal after {ran} of {all} iterations"));
    }
    let mut ending = Ending::reporting(&Report::new(&ran, flags.replan), as_json);
    if let Some(path) = &flags.latencies_out {
        let ran = (&ran.graph, &ran.device, &ran.outcome);
        ending.then(|| latencies(path, &[ran], &settings));
    }
    if let (Some(path), Some(last)) = (&flags.timeline, &ran.outcome.last) {
        ending.then(|| {
            let program = Program::placed(&ran.graph, &ran.job)?;
            let curve = engine::memory(&program, last);
            let budget = ran.planned.then_some(ran.arena);
            timeline::write(path, &ran.graph, &program, last, &curve, budget)
        });
    }
    ending.with(if stopped { Answer::Stopped } else { Answer::Yes }).map(Ended::Answered)
}

fn planned(
    flags: &Flags,
    subject: &Path,
    mut plan: Plan,
    mut graphs: Vec<Graph>,
    settings: &Settings,
) -> anyhow::Result<Ran> {
    flags.one_number_of_iterations()?;
    let graph = graphs.remove(0);
    signals::request_at_signals(&settings.stop)?;
    let bar = progress::bar(settings.iterations.into(), "iterations");
    let mut progress = |done: u32| bar.set_position(u64::from(done));
    let outcome = if flags.replan {
        replanning(flags, subject, &graph, &plan, settings, &mut progress)?
    } else {
        let (job, device) = (&plan.jobs[0], &plan.device);
        neap::run::run(&graph, job, plan.budget, device, settings, &mut progress)
    };
    bar.finish_and_clear();
    let outcome = outcome.map_err(|e| with_file(subject, settings, e))?;
    let (job, device, arena) = (plan.jobs.remove(0), plan.device, plan.budget);
    Ok(Ran { graph, job, device, arena, planned: true, outcome })
}

fn unplanned(
    flags: &Flags,
    subject: &Path,
    mut graph: Graph,
    settings: &Settings,
    outputs: &Outputs,
) -> anyhow::Result<Ran> {
    flags.one_number_of_iterations()?;
    let Site { device, latencies, libraries, .. } = flags.device.resolve(&mut graph)?;
    outputs.apart_from_what_was_read()?;
    let (mut job, arena) = making::unplanned(&graph, &device, &latencies)?;
    job.libraries = libraries;
    signals::request_at_signals(&settings.stop)?;
    let bar = progress::bar(settings.iterations.into(), "iterations");
    let mut progress = |done: u32| bar.set_position(u64::from(done));
    let outcome = neap::run::run(&graph, &job, arena, &device, settings, &mut progress);
    bar.finish_and_clear();
    let outcome = outcome.map_err(|e| with_file(subject, settings, e))?;
    Ok(Ran { graph, job, device, arena, planned: false, outcome })
}

impl Flags {
    fn one_number_of_iterations(&self) -> anyhow::Result<()> {
        if self.iterations.len() > 1 {
            bail!("--iterations: one number for one job");
        }
        Ok(())
    }
}

/// Runs a plan that a newer plan may replace: by the same planner, within the same budget.
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
        making::within(graph, device, latencies, plan.budget, method.clone(), plan.options.clone())
            .map_err(|e| e.to_string())
    };
    let replan = Replan {
        planner: &planner,
        threshold_per_mille: flags.replan_threshold.unwrap_or(THRESHOLD),
    };
    Ok(neap::run::run_replanning(graph, plan, settings, &replan, progress))
}

/// Prints the result of planning again.
fn tell(change: &Change) {
    let sums = change.drift;
    let percent = |per_mille: u64| format!("{} %", per_mille / 10);
    let time = |t: Option<Nanos>| t.map_or_else(|| "unknown".to_owned(), |t| t.to_string());
    let seen = format!(
        "replan: after iteration {} operators take {} of their planned time, copies to the device \
         {}, from it {}; planned anew in {}",
        change.seen,
        percent(sums.operators_per_mille),
        percent(sums.h2d_per_mille),
        percent(sums.d2h_per_mille),
        change.planning
    );
    match (change.applied, &change.kept_because) {
        (Some(applied), _) => note(&format!(
            "{seen}; from iteration {applied} on: predicted {} instead of {}, measured {} instead \
             of {} ({} before the drift)",
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

/// Names the file that the error is about: what the data say is the weights', if there are any.
fn with_file(subject: &Path, settings: &Settings, error: RunError) -> anyhow::Error {
    let weights = settings.weights.as_deref().filter(|_| error.is_about_data());
    let file = weights.unwrap_or(subject).display().to_string();
    anyhow::Error::new(error).context(file)
}

/// Figures of a run of one job.
#[derive(Serialize)]
struct Report<'a> {
    name: &'a str,
    planned: bool,
    /// Whether a signal ended it before the last iteration.
    stopped: bool,
    losses: &'a [f32],
    checksum: &'a str,
    arena_bytes: Bytes,
    peak_bytes: Bytes,
    resident_peak_bytes: Bytes,
    iteration_ns: Nanos,
    /// On the device; on a GPU each until the next one began.
    iterations_ns: &'a [Nanos],
    /// By the host's clock, what lies between two iterations included.
    walls_ns: &'a [Nanos],
    /// Of these, until all work was on the device's streams.
    submits_ns: &'a [Nanos],
    /// Operators on neap's plain kernels in place of the GPU's libraries.
    fallbacks: usize,
    /// Device memory beside the arena, where the GPU's libraries work.
    scratch_bytes: Bytes,
    pinning_ns: Nanos,
    /// How the GPU's library carries out each shape of matrix product.
    #[serde(skip_serializing_if = "<[Product]>::is_empty")]
    products: &'a [Product],
    /// In how many iterations operators and copies were timed; late ones were counted in these.
    timed_iterations: u32,
    late_copies: u64,
    notes: &'a [String],
    #[serde(skip_serializing_if = "Option::is_none")]
    changes: Option<Vec<ChangeReport<'a>>>,
}

/// What a new plan changed.
#[derive(Serialize)]
struct ChangeReport<'a> {
    seen_after_iteration: u32,
    operators_per_mille: u64,
    h2d_per_mille: u64,
    d2h_per_mille: u64,
    applied_from_iteration: Option<u32>,
    kept_because: Option<&'a str>,
    predicted_before_ns: Option<Nanos>,
    predicted_after_ns: Option<Nanos>,
    measured_undisturbed_ns: Option<Nanos>,
    measured_before_ns: Option<Nanos>,
    measured_after_ns: Option<Nanos>,
    planning_ns: Nanos,
}

impl<'a> ChangeReport<'a> {
    fn new(change: &'a Change) -> Self {
        Self {
            seen_after_iteration: change.seen,
            operators_per_mille: change.drift.operators_per_mille,
            h2d_per_mille: change.drift.h2d_per_mille,
            d2h_per_mille: change.drift.d2h_per_mille,
            applied_from_iteration: change.applied,
            kept_because: change.kept_because.as_deref(),
            predicted_before_ns: change.predicted_before,
            predicted_after_ns: change.predicted_after,
            measured_undisturbed_ns: change.measured_undisturbed,
            measured_before_ns: change.measured_before,
            measured_after_ns: change.measured_after,
            planning_ns: change.planning,
        }
    }
}

impl<'a> Report<'a> {
    fn new(ran: &'a Ran, replan: bool) -> Self {
        let outcome = &ran.outcome;
        Self {
            name: &ran.graph.name,
            planned: ran.planned,
            stopped: outcome.stopped,
            losses: &outcome.losses,
            checksum: &outcome.checksum,
            arena_bytes: ran.arena,
            peak_bytes: outcome.peak_bytes,
            resident_peak_bytes: outcome.resident_peak_bytes,
            iteration_ns: median(&outcome.iteration_ns),
            iterations_ns: &outcome.iteration_ns,
            walls_ns: &outcome.wall_ns,
            submits_ns: &outcome.submit_ns,
            fallbacks: outcome.costs.fallbacks,
            scratch_bytes: outcome.costs.scratch,
            pinning_ns: outcome.costs.pinning,
            products: &outcome.costs.products,
            timed_iterations: outcome.timed_iterations,
            late_copies: outcome.late_copies,
            notes: &outcome.notes,
            changes: replan.then(|| outcome.changes.iter().map(ChangeReport::new).collect()),
        }
    }
}

impl fmt::Display for Report<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.losses.is_empty() {
            writeln!(f, "no loss was recognised in this graph")?;
        } else {
            let heads = [("iteration", Side::Right), ("loss", Side::Right), ("time", Side::Right)];
            let mut table = Table::new(&heads);
            for (index, (loss, time)) in self.losses.iter().zip(self.iterations_ns).enumerate() {
                table.row([index.to_string(), loss.to_string(), time.to_string()]);
            }
            writeln!(f, "{table}")?;
        }
        writeln!(
            f,
            "memory touched {} ({} bytes) of an arena of {}; median iteration {}; {} late copies{}\n\
             checksum {}",
            self.peak_bytes,
            self.peak_bytes.0,
            self.arena_bytes,
            self.iteration_ns,
            self.late_copies,
            if (self.timed_iterations as usize) < self.iterations_ns.len() {
                format!(" in {} iterations that were timed", self.timed_iterations)
            } else {
                String::new()
            },
            self.checksum
        )
    }
}
