//! `neap simulate --arrivals`: jobs that come and go on one device. At each launch and each end all
//! jobs are planned again together.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use neap::contract::Latency;
use neap::device::Profile;
use neap::device::latency::Table as Latencies;
use neap::job::Graph;
use neap::plan::live::{Arrival, Conditions, Live, Outcome, Story};
use neap::plan::together::{self, Job};
use neap::report::curve::{Across, Curve, Line, svg_across};
use neap::report::table::Table;
use neap::sim::beside::busy;
use neap::sim::noise::Noise;
use neap::sim::program::Direction;
use neap::sim::share::policy::{PACK, Policy};
use neap::sim::share::rows;
use neap::units::{Bytes, Nanos};
use serde::Serialize;

use super::Flags;
use crate::accounting::{median, ratio};
use crate::output::{self, Answer, Ending};
use crate::progress;
use crate::settings::{self, Budget, JobArg, Outputs};

/// The largest table that is read.
const LARGEST: u64 = 64 << 20;

/// The columns. A graph's file is relative to the table's folder, and may end in @ and a share as
/// for `neap plan`.
const COLUMNS: &str = "graph,submit_s,iterations";

/// A parsed row.
struct Coming {
    job: JobArg,
    submitted: Nanos,
    iterations: u32,
}

fn read(path: &Path) -> anyhow::Result<Vec<Coming>> {
    let folder = path.parent().unwrap_or(Path::new(""));
    let mut all: Vec<Coming> = Vec::new();
    rows::read(path, LARGEST, COLUMNS, COLUMNS, |row| {
        let submitted = row.time("submit_s")?.ok_or("submit_s is empty; say when the job comes")?;
        if all.last().is_some_and(|last| last.submitted > submitted) {
            let at = row.cell("submit_s").unwrap_or_default();
            return Err(format!("{at} s is before the job above came; sort the lines by submit_s"));
        }
        let what = "a number of iterations from 1 to 100000, which are simulated one by one";
        let iterations = row.parsed("iterations", what, |text| {
            text.parse().ok().filter(|n| (1..=100_000).contains(n))
        })?;
        let graph = row.cell("graph").ok_or("it names no graph")?;
        all.push(Coming {
            job: JobArg::read(folder.join(graph).into_os_string())?,
            submitted,
            iterations: iterations.ok_or("iterations is empty; say how many it runs")?,
        });
        Ok(())
    })?;
    if all.is_empty() {
        bail!("{}: it has no jobs below its header; the columns are {COLUMNS}", path.display());
    }
    Ok(all)
}

/// Reads the table, simulates and reports.
///
/// # Errors
/// On bad input; the error names the remedy.
pub fn main(table: &Path, flags: &Flags, as_json: bool) -> anyhow::Result<Answer> {
    let plot = flags.plot.as_deref();
    let mut inputs = flags.device.inputs(&[table]);
    inputs.extend(flags.real.as_deref());
    let outputs = Outputs::new(&inputs, &[plot])?;
    let coming = read(table)?;
    let policy = flags.policy.unwrap_or(&PACK);
    let real = flags.real.as_deref().map(Latencies::read).transpose()?;
    // Each graph is read once.
    let mut graphs: BTreeMap<PathBuf, (Graph, Vec<Latency>, String)> = BTreeMap::new();
    let learned = flags.device.read()?;
    for (index, job) in coming.iter().enumerate() {
        if !graphs.contains_key(&job.job.path) {
            let mut graph = settings::graph(&job.job.path)
                .with_context(|| format!("{}: job {index}", table.display()))?;
            let site = learned.resolve(&mut graph)?;
            graphs.insert(job.job.path.clone(), (graph, site.latencies, site.sha256));
        }
    }
    let device = learned.device;
    let all: Vec<&Graph> = coming.iter().map(|c| &graphs[&c.job.path].0).collect();
    let budget = flags.budget.unwrap_or(Budget::Bytes(device.available()));
    let Some(budget) = budget.resolve(together::unplanned_peak(&all), &device)? else {
        bail!(
            "--budget min: jobs that come and go have no least memory; give bytes or a share of all jobs' peaks"
        )
    };
    let mut arrivals = Vec::with_capacity(coming.len());
    for job in &coming {
        let (graph, latencies, hash) = &graphs[&job.job.path];
        arrivals.push(Arrival {
            job: Job {
                graph,
                file: (job.job.path.display().to_string(), hash.clone()),
                latencies,
                method: job.job.limited(flags.planner.clone().unwrap_or_default())?,
                priority: job.job.share.priority(),
                swap_limit: job.job.swap_limit,
            },
            submitted: job.submitted,
            iterations: job.iterations,
        });
    }
    outputs.apart_from_what_was_read()?;
    let bar = progress::bar(arrivals.len() as u64, "jobs ended");
    let live = Live::new(&arrivals, &device, budget).under(Conditions {
        policy,
        real: real.as_ref(),
        noise: flags.noise.map(|share| Noise { share, seed: flags.seed }),
    });
    let outcome = live.run_with(|ended| bar.set_position(ended as u64))?;
    bar.finish_and_clear();
    let report = Report::of(&arrivals, &outcome, &device, budget, policy);
    let mut ending = Ending::reporting(&report, as_json);
    let picture = || drawing(&arrivals, &outcome, &device, budget);
    ending.file(plot, |path| output::write(path, &picture()?));
    ending.with(Answer::yes_if(outcome.jobs.iter().all(|job| job.ended.is_some())))
}

/// The sum of all jobs' sub-arenas over time.
fn drawing(
    arrivals: &[Arrival<'_>],
    outcome: &Outcome,
    device: &Profile,
    budget: Bytes,
) -> anyhow::Result<String> {
    let mut changes: Vec<(Nanos, i128)> = Vec::new();
    for job in &outcome.jobs {
        let mut level = 0;
        for arena in &job.arenas {
            let bytes = i128::from(arena.arena_bytes.0);
            changes.push((arena.at_ns, bytes - level));
            level = bytes;
        }
        changes.extend(job.ended.map(|at| (at, -level)));
    }
    changes.sort_unstable();
    let mut points = vec![(Nanos::ZERO, Bytes::ZERO)];
    let mut level = 0i128;
    for (at, change) in changes {
        level += change;
        points.push((at, Bytes(u64::try_from(level).unwrap_or_default())));
    }
    let title = format!("{} jobs on {}", arrivals.len(), device.name);
    let curves = [Curve { name: "sub-arenas of all jobs", points: &points }];
    Ok(svg_across(Across::Time, &title, &curves, &[Line { name: "budget", value: budget }])?)
}

/// Figures of jobs that came and went.
#[derive(Serialize)]
struct Report<'a> {
    device: &'a str,
    policy: &'static str,
    budget_bytes: Bytes,
    end_ns: Nanos,
    /// The mean time from submission to the first iteration of the jobs that ran.
    mean_queuing_ns: Nanos,
    /// The mean time from submission to the end of the jobs that ended.
    mean_completion_ns: Nanos,
    replans: u32,
    h2d_busy: f64,
    d2h_busy: f64,
    jobs: Vec<JobReport<'a>>,
}

/// Figures of one job.
#[derive(Serialize)]
struct JobReport<'a> {
    name: &'a str,
    submit_ns: Nanos,
    iterations: usize,
    iteration_ns: Nanos,
    #[serde(flatten)]
    story: &'a Story,
}

impl<'a> Report<'a> {
    fn of(
        arrivals: &'a [Arrival<'_>],
        outcome: &'a Outcome,
        device: &'a Profile,
        budget: Bytes,
        policy: &'static Policy,
    ) -> Self {
        let end = outcome.jobs.iter().filter_map(|job| job.ended).max().unwrap_or_default();
        let busy = |direction| ratio(busy(&outcome.carried, direction).0, end.0);
        let job = |(arrival, story): (&'a Arrival<'_>, &'a Story)| JobReport {
            name: &arrival.job.graph.name,
            submit_ns: arrival.submitted,
            iterations: story.iterations.len(),
            iteration_ns: median(story.iterations.iter().map(|i| i.1)),
            story,
        };
        let mean = |of: fn(&Story) -> Option<Nanos>| {
            let since = |(a, j): (&Arrival<'_>, &Story)| of(j).map(|at| at - a.submitted);
            let times: Vec<Nanos> = arrivals.iter().zip(&outcome.jobs).filter_map(since).collect();
            let sum: Nanos = times.iter().copied().sum();
            Nanos(sum.0 / (times.len() as u64).max(1))
        };
        Self {
            device: &device.name,
            policy: policy.name,
            budget_bytes: budget,
            end_ns: end,
            mean_queuing_ns: mean(|job| job.iterations.first().map(|iteration| iteration.0)),
            mean_completion_ns: mean(|job| job.ended),
            replans: outcome.replans,
            h2d_busy: busy(Direction::H2d),
            d2h_busy: busy(Direction::D2h),
            jobs: arrivals.iter().zip(&outcome.jobs).map(job).collect(),
        }
    }
}

impl fmt::Display for Report<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::headed(
            "<job|came|let in|ended|iterations|each|sub-arena, largest|smallest|late copies",
        );
        for (index, job) in self.jobs.iter().enumerate() {
            let sizes = job.story.arenas.iter().map(|a| a.arena_bytes);
            let when =
                |time: Option<Nanos>| time.map_or_else(|| "never".to_owned(), |t| t.to_string());
            table.row([
                format!("{index} {}", job.name),
                job.submit_ns.to_string(),
                when(job.story.admitted),
                when(job.story.ended),
                job.iterations.to_string(),
                job.iteration_ns.to_string(),
                sizes.clone().max().unwrap_or_default().to_string(),
                sizes.min().unwrap_or_default().to_string(),
                job.story.late.to_string(),
            ]);
        }
        writeln!(f, "{table}")?;
        for (index, job) in self.jobs.iter().enumerate() {
            if let Some(why) = &job.story.waited_for {
                writeln!(f, "job {index} waited for {why}")?;
            }
        }
        writeln!(
            f,
            "{}: all ended after {}; queuing {} and completion {} in the mean; planned anew {} \
             times; the link was busy {:.1} % of the time to the device and {:.1} % from it",
            self.policy,
            self.end_ns,
            self.mean_queuing_ns,
            self.mean_completion_ns,
            self.replans,
            self.h2d_busy * 100.0,
            self.d2h_busy * 100.0
        )
    }
}
