//! `neap simulate`: the time and memory of a plan, without running it.

mod arrivals;
mod beside;
mod files;
mod one;

use std::path::{Path, PathBuf};

use anyhow::bail;
use neap::contract::Plan;
use neap::device::latency::{Table, latencies};
use neap::job::Graph;
use neap::plan::Method;
use neap::sim::share::policy::Policy;

use crate::accounting::Accounting;
use crate::output::Answer;
use crate::settings::allocator::AllocatorFlags;
use crate::settings::planner::named;
use crate::settings::values::policy;
use crate::settings::{self, Budget, DeviceFlags, Outputs, Subject};

/// Simulate a plan, or a job without a plan.
#[derive(clap::Args)]
pub struct Flags {
    /// A *.plan.json, or a *.graph.json to simulate without a plan.
    #[arg(required_unless_present = "arrivals", conflicts_with = "arrivals")]
    subject: Option<PathBuf>,
    /// Simulate jobs that come and go. At each launch and each end all jobs are planned again
    /// together. The table has the columns graph, submit_s, iterations.
    #[arg(long, value_name = "JOBS.csv", conflicts_with_all = [
        "graph", "allocator", "accounting", "passive", "runs", "timeline", "latencies_out", "snapshot",
        "html"
    ])]
    arrivals: Option<PathBuf>,
    /// With --arrivals: the budget of all jobs together, as bytes or a share of the sum of their
    /// peaks; by default the whole device.
    #[arg(long, requires = "arrivals")]
    budget: Option<Budget>,
    /// With --arrivals: the planner of all jobs.
    #[arg(long, value_name = "NAME", requires = "arrivals", value_parser = named())]
    planner: Option<Method>,
    /// With --arrivals: the policy that decides the order of admission, and which of the admitted
    /// jobs run their next iteration; `pack` by default, under which all do.
    #[arg(long, value_name = "NAME", requires = "arrivals", value_parser = policy())]
    policy: Option<&'static Policy>,
    /// The graph of the plan; by default at the path that the plan records.
    #[arg(long, value_name = "FILE.graph.json")]
    graph: Vec<PathBuf>,
    /// For a graph without a plan.
    #[command(flatten)]
    device: DeviceFlags,
    #[command(flatten)]
    allocator: AllocatorFlags,
    /// Also give peak and time by the papers' accounting.
    #[arg(long, value_enum, default_value_t = Accounting::Physical)]
    accounting: Accounting,
    /// A table of the operators' real latencies. Plans run at these instead of those for which
    /// they were made.
    #[arg(long, value_name = "FILE.csv")]
    real: Option<PathBuf>,
    /// For a graph: also simulate one iteration in passive mode within this budget. It evicts the
    /// least recently used tensors on demand, and operators wait for it.
    #[arg(long, value_name = "BUDGET")]
    passive: Option<Budget>,
    /// Let every latency vary by up to this share, such as 20%.
    #[arg(long, value_name = "P", value_parser = settings::values::deviation)]
    noise: Option<u64>,
    /// Seed of the noise.
    #[arg(long, value_name = "N", default_value_t = 0, requires = "noise")]
    seed: u64,
    /// Number of noisy iterations.
    #[arg(long, value_name = "N", default_value_t = 1000, requires = "noise",
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    runs: u32,
    /// For a plan of several jobs, which run beside each other: the iterations of each job; 10 by
    /// default.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    iterations: Option<u32>,
    /// Draw memory over time, without and with the plan.
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    /// Write a page to look at in a browser: memory without and with the plan, copies, recomputes
    /// and waits below it, and the reasons for each tensor.
    #[arg(long, value_name = "FILE.html")]
    html: Option<PathBuf>,
    /// Write compute, copies and memory for ui.perfetto.dev.
    #[arg(long, value_name = "FILE.json")]
    timeline: Option<PathBuf>,
    /// Write the requests to PyTorch's allocator as a PyTorch memory snapshot, which memory_viz
    /// opens (pytorch.org/memory_viz).
    #[arg(long, value_name = "FILE.pickle")]
    snapshot: Option<PathBuf>,
    /// Write the latencies used, as a table for --latencies.
    #[arg(long, value_name = "FILE.csv")]
    latencies_out: Option<PathBuf>,
}

impl Flags {
    /// Returns an error for flags that are for another kind of input.
    fn validate(&self) -> anyhow::Result<()> {
        if self.iterations.is_some() && self.arrivals.is_some() {
            bail!("--iterations: the table says how many iterations each job runs; leave it out");
        }
        if self.budget.is_some() && self.arrivals.is_none() {
            bail!("--budget: is for --arrivals; a plan keeps to its own, and a graph has none");
        }
        Ok(())
    }

    /// The file that is simulated.
    fn subject(&self) -> &Path {
        self.subject.as_deref().unwrap_or(Path::new(""))
    }

    /// Returns an error for flags that are for one job.
    fn only_side_by_side(&self, jobs: usize) -> anyhow::Result<()> {
        let file = self.subject().display();
        settings::none_given(
            [
                (self.noise.is_some(), "--noise"),
                (self.accounting != Accounting::Physical, "--accounting paper"),
                (self.allocator.is_pytorch(), "--allocator pytorch"),
                (self.html.is_some(), "--html"),
                (self.timeline.is_some(), "--timeline"),
                (self.latencies_out.is_some(), "--latencies-out"),
                (self.snapshot.is_some(), "--snapshot"),
            ],
            format_args!("{file} is a plan of {jobs} jobs, and this is for one; leave it out"),
        )
    }

    /// Returns an error for flags that are for a graph, and `false` for a plan that is not safe.
    fn plan(&self, plan: &Plan, graphs: &[Graph]) -> anyhow::Result<bool> {
        self.device.not_with_a_plan(self.subject())?;
        if self.passive.is_some() {
            bail!(
                "--passive: {} is a plan, and passive mode has none; name its graph instead",
                self.subject().display()
            );
        }
        settings::checked(self.subject(), plan, graphs)
    }
}

pub fn main(flags: &Flags, as_json: bool) -> anyhow::Result<Answer> {
    flags.validate()?;
    if let Some(table) = &flags.arrivals {
        return arrivals::main(table, flags, as_json);
    }
    let mut inputs = flags.device.inputs(&settings::subject_files(flags.subject(), &flags.graph));
    inputs.extend(flags.real.as_deref());
    let outputs =
        [&flags.plot, &flags.html, &flags.timeline, &flags.latencies_out, &flags.snapshot];
    let outputs = outputs.map(Option::as_deref);
    let outputs = Outputs::new(&inputs, &outputs)?;
    let subject = settings::subject(flags.subject(), &flags.graph)?;
    outputs.apart_from_what_was_read()?;
    match subject {
        Subject::Graph(graph) => one::graph(flags, *graph, as_json),
        Subject::Plan(mut plan, graphs) => {
            if !flags.plan(&plan, &graphs)? {
                return Ok(Answer::No);
            }
            if plan.jobs.len() == 1 {
                return one::plan(flags, *plan, graphs, as_json);
            }
            flags.only_side_by_side(plan.jobs.len())?;
            flags.allocator.resolve(&plan.device)?;
            if let Some(real) = &flags.real {
                // The plan's proof holds for any latencies.
                let table = Table::read(real)?;
                for (graph, job) in graphs.iter().zip(&mut plan.jobs) {
                    job.latencies = latencies(graph, &plan.device, Some(&table));
                }
            }
            let iterations = flags.iterations.unwrap_or(10);
            beside::main(&plan, &graphs, iterations, flags.plot.as_deref(), as_json)
        }
    }
}
