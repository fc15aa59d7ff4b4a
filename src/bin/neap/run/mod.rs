//! `neap run`: executes plans, or jobs without a plan.

mod one;
mod requests;
mod service;

use std::path::{Path, PathBuf};

use neap::device::Profile;
use neap::device::latency::{Row, Table as LatencyTable};
use neap::job::Graph;
use neap::run::{Outcome, Rate, Settings};
use neap::units::{Nanos, OpId};

use crate::accounting;
use crate::output::{self, Answer};
use crate::settings::{DeviceFlags, TargetFlags, values};

/// Run a plan, or a job without a plan, or several of them at once.
#[derive(clap::Args)]
pub struct Flags {
    /// A *.plan.json, or a *.graph.json to run without a plan. Several share the device according
    /// to --policy.
    #[arg(value_name = "PLAN", required_unless_present_any = ["listen", "watch"])]
    subjects: Vec<PathBuf>,
    /// The graph of the plan; by default at the path that the plan records.
    #[arg(long, value_name = "FILE.graph.json")]
    graph: Vec<PathBuf>,
    /// For a graph without a plan.
    #[command(flatten)]
    device: DeviceFlags,
    #[command(flatten)]
    on: TargetFlags,
    /// Number of iterations; for several jobs one number for all, or one for each.
    #[arg(long, value_name = "N,…", default_value = "1", value_delimiter = ',',
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    iterations: Vec<u32>,
    #[command(flatten)]
    service: service::Several,
    /// Initial values: parameter:NAME, buffer:NAME, optimizer_state:KEY:NAME, input:NAME.
    #[arg(long, value_name = "FILE.safetensors")]
    weights: Option<PathBuf>,
    /// Write parameters, buffers and optimizer states at the end of the run.
    #[arg(long, value_name = "FILE.safetensors")]
    save: Option<PathBuf>,
    /// Seed of the initial values and batches that no file provides.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Slow the link to this share of its speed, such as 0.05. With @N from iteration N on, counted
    /// from 0, such as 0.05@3,1@8.
    #[arg(long, value_name = "SHARE[@N],…", value_delimiter = ',', value_parser = throttle)]
    throttle_link: Vec<(u64, u32)>,
    /// Copy as fast as memory allows instead of at the device's link rate.
    #[arg(long, conflicts_with = "throttle_link")]
    unlimited_link: bool,
    /// Write each operator's measured time (the median over the last 1024 iterations).
    #[arg(long, value_name = "FILE.csv")]
    latencies_out: Option<PathBuf>,
    /// Write the last iteration as it was measured, on the tracks of `simulate --timeline`:
    /// Chrome's trace format, which <https://ui.perfetto.dev> opens.
    #[arg(long, value_name = "FILE.json", conflicts_with = "replan")]
    timeline: Option<PathBuf>,
    /// Fill memory with a pattern where a tensor's place in it begins, so that bytes of another
    /// tensor show in the results. On a GPU, also check after each iteration that nothing was
    /// written beyond a tensor's end. Slower; for finding mistakes.
    #[arg(long)]
    debug_memory: bool,
    /// Plan again in the background when measured latencies drift, and use the new plan from the
    /// next iteration on. With several jobs, plan all of them together again whenever one drifts,
    /// comes or ends.
    #[arg(long)]
    replan: bool,
    /// By which share the summed latency of operators, or of one direction's copies, must change
    /// for that; 0.3 by default.
    #[arg(long, value_name = "SHARE", value_parser = threshold, requires = "replan")]
    replan_threshold: Option<u64>,
}

/// The iteration from which it holds, and the share in thousandths.
fn throttle(text: &str) -> Result<(u64, u32), String> {
    let problem = || {
        format!(
            "`{text}` is not a share of the link; give a number above 0 and up to 1 with at most \
             three decimals, and @N to begin at iteration N"
        )
    };
    let (share, from) = text.split_once('@').unwrap_or((text, "0"));
    let from: u32 = from.parse().map_err(|_| problem())?;
    let share = values::thousandths(share)
        .and_then(|s| u32::try_from(s).ok())
        .filter(|s| (1..=1000).contains(s));
    Ok((from.into(), share.ok_or_else(problem)?))
}

fn threshold(text: &str) -> Result<u64, String> {
    let share = values::thousandths(text).filter(|s| (1..=1_000_000).contains(s));
    share.ok_or_else(|| {
        format!(
            "`{text}` is not a threshold; give a number above 0 with at most three decimals, such \
             as 0.3"
        )
    })
}

impl Flags {
    /// The settings of every job.
    fn settings(&self) -> anyhow::Result<Settings> {
        // A GPU's link can't be slowed.
        let host_only = !self.throttle_link.is_empty() || self.unlimited_link;
        let target = self.on.choose(host_only.then_some("--throttle-link, --unlimited-link"))?;
        let mut throttle = self.throttle_link.clone();
        throttle.sort_by_key(|t| t.0);
        Ok(Settings {
            target,
            link_rate: if self.unlimited_link { Rate::Unlimited } else { Rate::Profile },
            throttle_later: throttle,
            seed: self.seed,
            weights: self.weights.clone(),
            save: self.save.clone(),
            poison: self.debug_memory,
            timed: self.latencies_out.is_some() || self.replan,
            ..Settings::default()
        })
    }

    /// All files that the command writes.
    fn outputs(&self) -> [Option<&Path>; 4] {
        [&self.save, &self.latencies_out, &self.timeline, &self.service.log].map(Option::as_deref)
    }
}

pub fn main(flags: &Flags, as_json: bool) -> anyhow::Result<Answer> {
    let settings = flags.settings()?;
    match &flags.subjects[..] {
        [subject] if !flags.service.asked() => match one::main(flags, subject, &settings, as_json)?
        {
            one::Ended::Answered(answer) => Ok(answer),
            one::Ended::HasSeveralJobs => service::main(flags, settings, as_json),
        },
        _ => service::main(flags, settings, as_json),
    }
}

/// Writes the measured time of each operator of the jobs that ran.
fn latencies(
    path: &Path,
    ran: &[(&Graph, &Profile, &Outcome)],
    settings: &Settings,
) -> anyhow::Result<()> {
    let mut rows = Vec::new();
    for (graph, device, outcome) in ran {
        for (index, (o, t)) in graph.operators.iter().zip(&outcome.operator_ns).enumerate() {
            let row = Row::new(o, settings.target.key(&device.name), median(t));
            rows.push(row.beside(o, device).by(outcome.libraries.get(&OpId::from_index(index))));
        }
    }
    LatencyTable::write(path, &rows)?;
    output::written(path);
    Ok(())
}

/// The median of measured times. The first iteration warms up and is left out, unless it is the
/// only one.
fn median(times: &[Nanos]) -> Nanos {
    let first = usize::from(times.len() > 1);
    accounting::median(times.iter().skip(first).copied()).max(Nanos(1))
}
