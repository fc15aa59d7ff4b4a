//! `neap profile`: measures how long operators take on a machine.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use neap::device::latency::{self, Row, Table as LatencyTable};
use neap::device::{Profile, profile as device_profile, roofline};
use neap::job::Graph;
use neap::report::table::{Side, Table};
use neap::run::{self, Settings, Target, profile, sweep, vary};
use neap::units::{Bytes, Nanos};
use serde::Serialize;

use crate::making::{unplanned, within};
use crate::output::{self, Answer, Ending, note};
use crate::progress::bar;
use crate::settings::{self, Outputs, TargetFlags};

/// Large enough for nearly all workspaces that cuDNN asks for.
const CONV_WORKSPACE: Bytes = Bytes(256 << 20);

/// Measure operators: those of a job in their order, or one kind over many shapes.
#[derive(clap::Args)]
pub struct Flags {
    /// The job whose operators are measured.
    #[arg(required_unless_present = "sweep", conflicts_with = "sweep")]
    graph: Option<PathBuf>,
    /// Measure these kinds of operators over many shapes instead, for `neap train`.
    #[arg(long, value_name = "KIND,…", value_delimiter = ',')]
    sweep: Vec<String>,
    /// Measure operators like those of the job instead, up to N of each kind, whose extents are
    /// others, for `neap train`. Operators that the machine lacks are left out.
    #[arg(long, value_name = "N", conflicts_with = "sweep",
          value_parser = clap::value_parser!(u32).range(1..=100_000))]
    vary: Option<u32>,
    /// Number of shapes of each kind.
    #[arg(long, value_name = "N", default_value_t = 500, requires = "sweep",
          value_parser = clap::value_parser!(u32).range(1..=100_000))]
    samples: u32,
    #[command(flatten)]
    on: TargetFlags,
    /// A built-in device or a *.device.json file: its roofline is compared, and its memory is the
    /// job's. `host` by default.
    #[arg(long, value_name = "NAME|FILE")]
    device: Option<String>,
    /// Measure while other threads, or other streams of the GPU, compute and copy for this share of
    /// the time. Several shares are measured one after the other.
    #[arg(long, value_name = "PERCENT,…", value_delimiter = ',', default_value = "0",
          value_parser = clap::value_parser!(u32).range(0..=100))]
    load: Vec<u32>,
    /// How many times each operator is measured; the median is reported.
    #[arg(long, value_name = "N", default_value_t = 5,
          value_parser = clap::value_parser!(u32).range(1..=100_000))]
    repeats: u32,
    /// How many times `--sweep` and `--vary` measure all shapes. The fastest time of each counts,
    /// because other programs only slow it down.
    #[arg(long, value_name = "N", default_value_t = 3,
          value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// The largest workspace of a convolution on the GPU, 256MiB by default. The table contains the
    /// workspaces used.
    #[arg(long, value_name = "BYTES")]
    conv_workspace: Option<Bytes>,
    /// With `--sweep` and `--vary`: measure nothing, and take the times by the roofline of
    /// `--device`, which need not be at hand.
    #[arg(long, conflicts_with_all = ["on", "load", "repeats", "rounds", "conv_workspace"])]
    by_roofline: bool,
    /// Seed of the shapes and of the data.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// The table's file; without it the times are only reported.
    #[arg(short, long, value_name = "FILE.latency.csv")]
    output: Option<PathBuf>,
}

pub fn main(flags: &Flags, as_json: bool) -> anyhow::Result<Answer> {
    if flags.by_roofline {
        return by_roofline(flags, as_json);
    }
    let target = flags.on.choose(None)?;
    let inputs: Vec<_> = flags
        .graph
        .iter()
        .map(PathBuf::as_path)
        .chain(flags.device.as_deref().map(Path::new))
        .collect();
    Outputs::new(&inputs, &[flags.output.as_deref()])?;
    if target != Target::Host && flags.device.is_none() {
        bail!(
            "--device: name the GPU's profile, under which the table's rows stand (`neap device list`, or `neap device measure`)"
        );
    }
    if target == Target::Host && flags.conv_workspace.is_some() {
        bail!("--conv-workspace: is for --on cuda; leave it out");
    }
    let device = device_profile::load(flags.device.as_deref().unwrap_or("host"))?;
    let mut loads = flags.load.clone();
    loads.sort_unstable();
    loads.dedup();
    let rows = match &flags.graph {
        Some(path) => {
            let mut graph = settings::graph(path)?;
            allow(flags, &target, &mut graph)?;
            if let Some(count) = flags.vary {
                let usable = |sample: &Graph| measurable(flags, &target, sample, &device);
                let graphs = vary::samples(&graph, count, flags.seed, usable);
                of_samples(flags, &target, &device, &loads, &graphs)?
            } else {
                of_job(flags, &target, &graph, path, &device, &loads)?
            }
        }
        None => of_kinds(flags, &target, &device, &loads)?,
    };
    finish(flags, &rows, target.key(&device.name), as_json)
}

fn finish(flags: &Flags, rows: &[Row], device: &str, as_json: bool) -> anyhow::Result<Answer> {
    let mut ending = Ending::reporting(&Report::new(rows, device), as_json);
    if let Some(path) = &flags.output {
        ending.then(|| {
            LatencyTable::write(path, rows)?;
            output::written(path);
            Ok(())
        });
    }
    ending.with(Answer::Yes)
}

/// The shapes that would be measured, with the device's roofline in place of measured times.
fn by_roofline(flags: &Flags, as_json: bool) -> anyhow::Result<Answer> {
    let inputs: Vec<_> = flags.graph.iter().map(PathBuf::as_path).collect();
    Outputs::new(&inputs, &[flags.output.as_deref()])?;
    let device = device_profile::load(flags.device.as_deref().unwrap_or("host"))?;
    let samples = match (&flags.graph, flags.vary) {
        (Some(path), Some(count)) => {
            vary::samples(&settings::graph(path)?, count, flags.seed, |_| true)
        }
        (Some(path), None) => bail!(
            "--by-roofline: is for --vary and --sweep; `neap simulate {} --latencies-out FILE` \
             writes the job's own times",
            path.display()
        ),
        (None, _) => swept(flags)?,
    };
    let row = |sample: &Graph| {
        let operator = sample.operators.first()?;
        let time = roofline::time(operator, &device);
        Some(Row::new(operator, &device.name, time).beside(operator, &device))
    };
    let rows: Vec<Row> = samples.iter().filter_map(row).collect();
    finish(flags, &rows, &device.name, as_json)
}

/// Lets convolutions on the GPU use workspaces.
fn allow(flags: &Flags, target: &Target, graph: &mut Graph) -> anyhow::Result<()> {
    if *target != Target::Host {
        profile::allow(graph, flags.conv_workspace.unwrap_or(CONV_WORKSPACE))
            .context("--conv-workspace")?;
    }
    Ok(())
}

fn settings(flags: &Flags, target: &Target, load: u32) -> Settings {
    Settings {
        target: target.clone(),
        iterations: flags.repeats,
        load_percent: load,
        seed: flags.seed,
        ..Settings::default()
    }
}

fn of_job(
    flags: &Flags,
    target: &Target,
    graph: &Graph,
    path: &Path,
    device: &Profile,
    loads: &[u32],
) -> anyhow::Result<Vec<Row>> {
    let latencies = latency::latencies(graph, device, None);
    let (mut job, mut arena): (_, Bytes) = unplanned(graph, device, &latencies)?;
    if arena > device.available() {
        note(&format!(
            "note: without a plan the job takes {arena}, more than {} offers; it is measured under a plan",
            device.name
        ));
        let planned = within(
            graph,
            device,
            &latencies,
            device.available(),
            neap::plan::Method::default(),
            BTreeMap::new(),
        )
        .with_context(|| path.display().to_string())?;
        (arena, job) = (planned.budget, planned.jobs.into_iter().next().unwrap_or(job));
    }
    let bar = bar(
        (u64::from(flags.repeats) + u64::from(profile::WARM_UP)) * loads.len() as u64,
        "iterations",
    );
    let mut rows = Vec::new();
    for &load in loads {
        let measured =
            profile::job(graph, &job, arena, device, &settings(flags, target, load), &mut |_| {
                bar.inc(1)
            });
        rows.extend(
            measured.map_err(|e| anyhow::Error::new(e).context(path.display().to_string()))?,
        );
    }
    bar.finish_and_clear();
    Ok(rows)
}

fn of_kinds(
    flags: &Flags,
    target: &Target,
    device: &Profile,
    loads: &[u32],
) -> anyhow::Result<Vec<Row>> {
    let mut graphs = swept(flags)?;
    graphs.iter_mut().try_for_each(|graph| allow(flags, target, graph))?;
    of_samples(flags, target, device, loads, &graphs)
}

/// The operators of `--sweep`.
fn swept(flags: &Flags) -> anyhow::Result<Vec<Graph>> {
    let mut graphs = Vec::new();
    for kind in &flags.sweep {
        match sweep::samples(kind, flags.samples, flags.seed) {
            Some(all) => graphs.extend(all),
            None => {
                bail!("--sweep: no kind is named `{kind}`; there are {}", sweep::names().join(", "))
            }
        }
    }
    Ok(graphs)
}

/// Whether the machine has the operator, with these shapes.
fn measurable(flags: &Flags, target: &Target, sample: &Graph, device: &Profile) -> bool {
    let once = Settings { iterations: 1, ..settings(flags, target, 0) };
    run::profile::alone(sample, device, &once, &run::Spare::default()).is_ok()
}

/// Measures graphs of one operator each. Of each the fastest round counts.
fn of_samples(
    flags: &Flags,
    target: &Target,
    device: &Profile,
    loads: &[u32],
    graphs: &[Graph],
) -> anyhow::Result<Vec<Row>> {
    let bar = bar(graphs.len() as u64 * loads.len() as u64 * u64::from(flags.rounds), "shapes");
    let (mut best, spare): (Vec<Row>, _) = (Vec::new(), run::Spare::default());
    for round in 0..flags.rounds {
        let mut at = 0;
        for graph in graphs {
            for &load in loads {
                let row =
                    run::profile::alone(graph, device, &settings(flags, target, load), &spare)?;
                if round == 0 {
                    best.push(row);
                } else if row.ns < best[at].ns {
                    best[at] = row;
                }
                at += 1;
                bar.inc(1);
            }
        }
    }
    bar.finish_and_clear();
    Ok(best)
}

/// The measured times.
#[derive(Serialize)]
struct Report {
    device: String,
    rows: usize,
    kinds: Vec<KindReport>,
}

/// One kind of operator at one load.
#[derive(Serialize)]
struct KindReport {
    kind: String,
    load_percent: u32,
    operators: u64,
    total_ns: Nanos,
    roofline_ns: Nanos,
}

impl Report {
    /// Kinds by load, the longest first.
    fn new(rows: &[Row], device: &str) -> Self {
        let mut kinds: BTreeMap<(&str, u32), KindReport> = BTreeMap::new();
        for row in rows {
            let sum = kinds.entry((&row.kind, row.load_percent)).or_insert_with(|| KindReport {
                kind: row.kind.clone(),
                load_percent: row.load_percent,
                operators: 0,
                total_ns: Nanos::ZERO,
                roofline_ns: Nanos::ZERO,
            });
            sum.operators += 1;
            sum.total_ns = Nanos(sum.total_ns.0.saturating_add(row.ns));
            let roofline = row.roofline_ns.unwrap_or(0);
            sum.roofline_ns = Nanos(sum.roofline_ns.0.saturating_add(roofline));
        }
        let mut kinds: Vec<KindReport> = kinds.into_values().collect();
        kinds.sort_by_key(|k| (k.load_percent, std::cmp::Reverse(k.total_ns)));
        Self { device: device.to_owned(), rows: rows.len(), kinds }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new(&[
            ("kind", Side::Left),
            ("load", Side::Right),
            ("operators", Side::Right),
            ("time", Side::Right),
            ("roofline", Side::Right),
        ]);
        for of in &self.kinds {
            table.row([
                of.kind.clone(),
                format!("{} %", of.load_percent),
                of.operators.to_string(),
                of.total_ns.to_string(),
                of.roofline_ns.to_string(),
            ]);
        }
        write!(f, "{table}")
    }
}
