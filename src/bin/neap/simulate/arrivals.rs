//! `neap simulate --arrivals`: jobs that come and go on one device. At each launch and each end all
//! jobs are planned again together.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use neap::device::Profile;
use neap::device::latency::Table as Latencies;
use neap::job::Graph;
use neap::plan::live::{Arrival, Conditions, Live, Outcome, Story};
use neap::plan::together;
use neap::report::curve::{Across, Curve, Line, svg_across};
use neap::report::table::Table;
use neap::sim::beside::busy;
use neap::sim::noise::Noise;
use neap::sim::share::policy::PACK;
use neap::sim::share::rows;
use neap::units::{Bytes, Nanos};
use serde_json::{Value, json};

use super::Flags;
use crate::accounting::{median, ratio};
use crate::output::{self, Answer, Ending};
use crate::progress;
use crate::settings::{self, Budget, JobArg, Outputs, Site};

/// The largest table that is read.
const LARGEST: u64 = 64 << 20;

/// The columns. A graph's file is relative to the table's folder, and may end in @ and a share as
/// for `neap plan`.
const COLUMNS: &str = "graph,submit_s,iterations";

/// Reads each job, when it is submitted and how many iterations it runs.
fn read(path: &Path) -> anyhow::Result<Vec<(JobArg, Nanos, u32)>> {
    let folder = path.parent().unwrap_or(Path::new(""));
    let mut all: Vec<(JobArg, Nanos, u32)> = Vec::new();
    rows::read(path, LARGEST, COLUMNS, COLUMNS, |row| {
        let submitted = row.time("submit_s")?.ok_or("submit_s is empty; say when the job comes")?;
        if all.last().is_some_and(|last| last.1 > submitted) {
            let at = row.cell("submit_s").unwrap_or_default();
            return Err(format!("{at} s is before the job above came; sort the lines by submit_s"));
        }
        let what = "a number of iterations from 1 to 100000, which are simulated one by one";
        let iterations = row.parsed("iterations", what, |text| {
            text.parse().ok().filter(|n| (1..=100_000).contains(n))
        })?;
        let graph = row.cell("graph").ok_or("it names no graph")?;
        let job = JobArg::read(folder.join(graph).into_os_string())?;
        let iterations = iterations.ok_or("iterations is empty; say how many it runs")?;
        all.push((job, submitted, iterations));
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
    let mut graphs: BTreeMap<PathBuf, (Graph, Site)> = BTreeMap::new();
    let learned = flags.device.read()?;
    for (index, (job, ..)) in coming.iter().enumerate() {
        if !graphs.contains_key(&job.path) {
            let mut graph = settings::graph(&job.path)
                .with_context(|| format!("{}: job {index}", table.display()))?;
            let site = learned.resolve(&mut graph)?;
            graphs.insert(job.path.clone(), (graph, site));
        }
    }
    let device = learned.device;
    let all: Vec<&Graph> = coming.iter().map(|(job, ..)| &graphs[&job.path].0).collect();
    let budget = flags.budget.unwrap_or(Budget::Bytes(device.available()));
    let Some(budget) = budget.resolve(together::unplanned_peak(&all), &device)? else {
        bail!(
            "--budget min: jobs that come and go have no least memory; give bytes or a share of all jobs' peaks"
        )
    };
    let mut arrivals = Vec::with_capacity(coming.len());
    for &(ref job, submitted, iterations) in &coming {
        let ((graph, site), path) = (&graphs[&job.path], job.path.display().to_string());
        let method = job.limited(flags.planner.clone().unwrap_or_default())?;
        arrivals.push(Arrival { job: job.job(graph, site, path, method), submitted, iterations });
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
    let printed = report(&arrivals, &outcome, &device, budget, policy.name);
    let mut ending = Ending::printing(&printed, as_json);
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

/// What is printed: figures of jobs that came and went, and text.
fn report(
    arrivals: &[Arrival<'_>],
    outcome: &Outcome,
    device: &Profile,
    budget: Bytes,
    policy: &'static str,
) -> (Value, String) {
    let mut table = Table::headed(
        "<job|came|let in|ended|iterations|each|sub-arena, largest|smallest|late copies",
    );
    let (mut jobs, mut waiting) = (Vec::new(), String::new());
    for (index, (arrival, story)) in arrivals.iter().zip(&outcome.jobs).enumerate() {
        let (name, submitted) = (&arrival.job.graph.name, arrival.submitted);
        let (count, each) =
            (story.iterations.len(), median(story.iterations.iter().map(|of| of.1)));
        let sizes = story.arenas.iter().map(|a| a.arena_bytes);
        let when = |time: Option<Nanos>| time.map_or_else(|| "never".to_owned(), |t| t.to_string());
        table.row([
            format!("{index} {name}"),
            submitted.to_string(),
            when(story.admitted),
            when(story.ended),
            count.to_string(),
            each.to_string(),
            sizes.clone().max().unwrap_or_default().to_string(),
            sizes.min().unwrap_or_default().to_string(),
            story.late.to_string(),
        ]);
        if let Some(why) = &story.waited_for {
            waiting += &format!("job {index} waited for {why}\n");
        }
        let mut job = json!(story);
        job["name"] = json!(name);
        job["submit_ns"] = json!(submitted);
        job["iterations"] = json!(count);
        job["iteration_ns"] = json!(each);
        job["largest_swap_part"] = json!(story.swap_part.to_string());
        jobs.push(job);
    }
    // The mean time from submission to an event of the jobs that got so far.
    let mean = |of: fn(&Story) -> Option<Nanos>| {
        let since = |(a, j): (&Arrival<'_>, &Story)| of(j).map(|at| at - a.submitted);
        let times: Vec<Nanos> = arrivals.iter().zip(&outcome.jobs).filter_map(since).collect();
        Nanos(times.iter().copied().sum::<Nanos>().0 / (times.len() as u64).max(1))
    };
    let queuing = mean(|job| job.iterations.first().map(|iteration| iteration.0));
    let (completion, replans) = (mean(|job| job.ended), outcome.replans);
    let end = outcome.jobs.iter().filter_map(|job| job.ended).max().unwrap_or_default();
    let [up, down] = busy(&outcome.carried).map(|busy| ratio(busy.0, end.0));
    let text = format!(
        "{table}\n{waiting}{policy}: all ended after {end}; queuing {queuing} and completion \
         {completion} in the mean; planned anew {replans} times; the link was busy {:.1} % of the \
         time to the device and {:.1} % from it\n",
        up * 100.0,
        down * 100.0
    );
    let figures = json!({
        "device": device.name,
        "policy": policy,
        "budget_bytes": budget,
        "end_ns": end,
        "mean_queuing_ns": queuing,
        "mean_completion_ns": completion,
        "replans": replans,
        "h2d_busy": up,
        "d2h_busy": down,
        "jobs": jobs,
    });
    (figures, text)
}
