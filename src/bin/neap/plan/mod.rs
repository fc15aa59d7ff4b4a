//! `neap plan`: a plan within a budget, proved safe before it is written.

mod one;
mod together;

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::builder::{OsStringValueParser, TypedValueParser};
use neap::contract::{Event, JobPlan, Plan, json as plan_json};
use neap::job::Graph;
use neap::plan::{Method, PlanError};
use neap::units::Bytes;
use serde::Serialize;

use crate::accounting::Accounting;
use crate::output::{self, Answer, note};
use crate::settings::allocator::AllocatorFlags;
use crate::settings::planner::{Switches, named};
use crate::settings::{self, Budget, DeviceFlags, JobArg, Outputs};

/// Find a plan that keeps a job, or several jobs on one device, within a memory budget.
#[derive(clap::Args)]
pub struct Flags {
    /// The job, or several jobs that share the device. With FILE@0.5 at most half of that job's
    /// tensors are swapped, and the other jobs give up memory first. With FILE@1:0.25 the job makes
    /// at most a quarter of all jobs' swaps, in bytes per second.
    #[arg(required = true, value_name = "FILE.graph.json[@SHARE[:PART]]",
          value_parser = OsStringValueParser::new().try_map(JobArg::read))]
    graphs: Vec<JobArg>,
    #[command(flatten)]
    device: DeviceFlags,
    /// The budget: bytes (12GiB), a share of the unplanned peak (60%), or `min`; by default all
    /// memory that the device offers.
    #[arg(long)]
    budget: Option<Budget>,
    /// The plan's file; without it the plan is only reported.
    #[arg(short, long, value_name = "FILE.plan.json")]
    output: Option<PathBuf>,
    /// For several jobs: let them share bytes that no job holds at the boundary of its iteration. A
    /// job waits for these bytes at an operator boundary. The plan does this only if it is faster
    /// or the only way to meet the budget.
    #[arg(long)]
    overlap: bool,
    /// The planner.
    #[arg(long, value_parser = named(), default_value = "neap")]
    planner: Method,
    /// Also give peak and time by the papers' accounting. The plan is bound by the physical
    /// figures.
    #[arg(long, value_enum, default_value_t = Accounting::Physical)]
    accounting: Accounting,
    /// Plan for the 95th percentile of the iteration's time while every latency varies by up to
    /// this share, such as 20%.
    #[arg(long, value_name = "P", value_parser = settings::values::deviation)]
    noise: Option<u64>,
    /// With `pytorch` the budget limits the bytes that PyTorch's allocator reserves.
    #[command(flatten)]
    allocator: AllocatorFlags,
    #[command(flatten)]
    switches: Switches,
}

pub fn main(flags: &Flags, as_json: bool) -> anyhow::Result<Answer> {
    let inputs: Vec<&Path> = flags.graphs.iter().map(|g| &*g.path).collect();
    Outputs::new(&flags.device.inputs(&inputs), &[flags.output.as_deref()])?;
    match &flags.graphs[..] {
        [_] if flags.overlap => {
            bail!("--overlap: one job has no other to share bytes with; leave it out or add jobs")
        }
        [_] if flags.switches.max_swap_part.is_some() => {
            bail!("--max-swap-part: one job makes all swaps; leave it out or add jobs")
        }
        _ if flags.overlap && flags.switches.max_swap_part.is_some() => {
            bail!("--max-swap-part: jobs that share bytes are not held to it; leave --overlap out")
        }
        [job] => job.alone().and_then(|()| one::main(flags, job, as_json)),
        _ => together::main(flags, as_json),
    }
}

/// Why there is no plan.
#[derive(Serialize)]
struct Refusal {
    fits: bool,
    budget_bytes: Bytes,
    floor_bytes: Bytes,
    lowest_bytes: Bytes,
    unplanned_peak_bytes: Bytes,
    blocked: String,
}

/// Prints that no plan was found, if that is the error.
///
/// # Errors
/// Any other error, which is a defect.
fn does_not_fit(
    error: PlanError,
    of: &str,
    unplanned_peak_bytes: Bytes,
    as_json: bool,
) -> anyhow::Result<Answer> {
    let PlanError::Infeasible(no) = error else { return Err(error.into()) };
    if as_json {
        output::json(&serde_json::to_value(Refusal {
            fits: false,
            budget_bytes: no.budget,
            floor_bytes: no.floor,
            lowest_bytes: no.lowest,
            unplanned_peak_bytes,
            blocked: no.blocked.clone(),
        })?)?;
    }
    note(&format!("{of}{}", PlanError::Infeasible(no)));
    Ok(Answer::No)
}

/// Proves a plan and writes it. A plan that fails the proof is never written.
///
/// # Errors
/// When the proof fails, or the file can't be written.
fn prove_and_write(flags: &Flags, plan: &Plan, graphs: &[Graph]) -> anyhow::Result<()> {
    if let Err(refusals) = neap::contract::check::check(plan, graphs) {
        let reasons: Vec<String> = refusals.iter().take(5).map(ToString::to_string).collect();
        bail!(
            "the plan did not pass the checker; this is a defect of neap, please report it with \
             the graphs: {}",
            reasons.join("; ")
        );
    }
    if let Some(output) = &flags.output {
        plan_json::write(output, plan, graphs)?;
    }
    Ok(())
}

/// The graph's path in the plan: relative to the plan's folder.
fn graph_path(flags: &Flags, graph: &Path) -> anyhow::Result<String> {
    let plan = flags.output.as_deref().unwrap_or(Path::new("job.plan.json"));
    plan_json::relative(plan, graph).with_context(|| {
        format!("{}: cannot be written so that it names {}", plan.display(), graph.display())
    })
}

/// The number of events of each kind in a job's plan.
#[derive(Serialize)]
struct Events {
    swap_outs: usize,
    swap_ins: usize,
    recomputes: usize,
}

impl Events {
    fn new(job: &JobPlan) -> Self {
        let count = |f: fn(&Event) -> bool| job.events.iter().filter(|e| f(e)).count();
        Self {
            swap_outs: count(|e| matches!(e, Event::SwapOut { .. })),
            swap_ins: count(|e| matches!(e, Event::SwapIn { .. })),
            recomputes: count(|e| matches!(e, Event::Recompute { .. })),
        }
    }
}

impl fmt::Display for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { swap_outs, swap_ins, recomputes } = self;
        write!(f, "{swap_outs} swap-outs, {swap_ins} swap-ins, {recomputes} recomputes")
    }
}
