//! `neap profile`: how long operators take where they run.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, bail};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use neap::device::latency::{self, Row, Table as LatencyTable};
use neap::device::{Profile, profile as device_profile};
use neap::job::Graph;
use neap::report::table::{Side, Table};
use neap::run::{self, Settings, Target, profile, sweep};
use neap::units::{Bytes, Nanos};
use serde_json::json;

use crate::output::{self, Answer, note};
use crate::run::{Where, unplanned, within};
use crate::settings;

/// Enough for nearly all that cuDNN would like.
const CONV_WORKSPACE: Bytes = Bytes(256 << 20);

/// Measure operators: a job's in their places, or one kind's over many shapes.
#[derive(clap::Args)]
pub struct Flags {
    /// The job whose operators are measured.
    #[arg(required_unless_present = "sweep", conflicts_with = "sweep")]
    graph: Option<PathBuf>,
    /// Measure these kinds over many shapes instead, for `neap train`.
    #[arg(long, value_name = "KIND,…", value_delimiter = ',')]
    sweep: Vec<String>,
    /// How many shapes of each kind.
    #[arg(long, value_name = "N", default_value_t = 500, requires = "sweep", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    samples: u32,
    #[command(flatten)]
    on: Where,
    /// A built-in device or a *.device.json file: the roofline to compare with, and the memory that a job has. `host` if not given.
    #[arg(long, value_name = "NAME|FILE")]
    device: Option<String>,
    /// Measure while others compute and copy for this share of the time; several are measured one after the other.
    #[arg(long, value_name = "PERCENT,…", value_delimiter = ',', default_value = "0", value_parser = clap::value_parser!(u32).range(0..=100))]
    load: Vec<u32>,
    /// How often each operator is measured; the median counts.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    repeats: u32,
    /// How often a sweep goes over all its shapes; each shape's best round counts, as others on the machine only ever add.
    #[arg(long, value_name = "N", default_value_t = 3, requires = "sweep", value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// How much scratch a convolution may have on the GPU; the table says what it took. 256MiB if not given.
    #[arg(long, value_name = "BYTES")]
    conv_workspace: Option<Bytes>,
    /// Where shapes and numbers come from.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Where to write the table; only reported if not given.
    #[arg(short, long, value_name = "FILE.latency.csv")]
    output: Option<PathBuf>,
}

pub fn main(flags: &Flags, as_json: bool) -> anyhow::Result<Answer> {
    // Others at work are made on the host only.
    let target = flags.on.choose(flags.load.iter().any(|load| *load > 0).then_some("--load"))?;
    let inputs: Vec<_> = flags
        .graph
        .iter()
        .map(PathBuf::as_path)
        .chain(flags.device.as_deref().map(std::path::Path::new))
        .collect();
    settings::outputs(&inputs, &[flags.output.as_deref()])?;
    if target != Target::Host && flags.device.is_none() {
        bail!(
            "--device: name the GPU's profile, under which the table's rows stand (`neap device list`, or `neap device measure`)"
        );
    }
    if target == Target::Host && flags.conv_workspace.is_some() {
        bail!("--conv-workspace: for --on cuda; leave it away");
    }
    let device = device_profile::load(flags.device.as_deref().unwrap_or("host"))?;
    let mut loads = flags.load.clone();
    loads.sort_unstable();
    loads.dedup();
    let rows = match &flags.graph {
        Some(path) => {
            let mut graph = settings::graph(path)?;
            allow(flags, &target, &mut graph)?;
            of_job(flags, &target, &graph, path, &device, &loads)?
        }
        None => of_kinds(flags, &target, &device, &loads)?,
    };
    if let Some(path) = &flags.output {
        LatencyTable::write(path, &rows)?;
        note(&format!("written: {}", path.display()));
    }
    report(&rows, target.key(&device.name), as_json)?;
    Ok(Answer::Yes)
}

/// Gives convolutions their scratch on the GPU.
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

fn bar(length: u64, what: &str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(length), ProgressDrawTarget::stderr());
    if let Ok(style) =
        ProgressStyle::with_template(&format!("{{bar:30}} {{pos}}/{{len}} {what}, {{eta}} left"))
    {
        bar.set_style(style);
    }
    bar
}

fn of_job(
    flags: &Flags,
    target: &Target,
    graph: &Graph,
    path: &std::path::Path,
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
        )?;
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
    let mut graphs = Vec::new();
    for kind in &flags.sweep {
        match sweep::samples(kind, flags.samples, flags.seed) {
            Some(all) => graphs.extend(all),
            None => {
                bail!("--sweep: no kind is named `{kind}`; there are {}", sweep::names().join(", "))
            }
        }
    }
    graphs.iter_mut().try_for_each(|graph| allow(flags, target, graph))?;
    let bar = bar(graphs.len() as u64 * loads.len() as u64 * u64::from(flags.rounds), "shapes");
    let mut best: Vec<Row> = Vec::new();
    for round in 0..flags.rounds {
        let mut at = 0;
        for graph in &graphs {
            for &load in loads {
                let row = run::profile::alone(graph, device, &settings(flags, target, load))?;
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

fn report(rows: &[Row], on: &str, as_json: bool) -> anyhow::Result<()> {
    // By kind and load: rows, time, the roofline's time.
    let mut kinds: BTreeMap<(&str, u32), (u64, u64, u64)> = BTreeMap::new();
    for row in rows {
        let sum = kinds.entry((&row.kind, row.load_percent)).or_default();
        *sum = (
            sum.0 + 1,
            sum.1.saturating_add(row.ns),
            sum.2.saturating_add(row.roofline_ns.unwrap_or(0)),
        );
    }
    let mut kinds: Vec<_> = kinds.into_iter().collect();
    kinds.sort_by_key(|((kind, load), sum)| (*load, std::cmp::Reverse(sum.1), *kind));
    if as_json {
        let one = |((kind, load), (rows, ns, roofline)): &((&str, u32), (u64, u64, u64))| json!({ "kind": kind, "load_percent": load, "operators": rows, "total_ns": ns, "roofline_ns": roofline });
        return output::json(
            &json!({ "device": on, "rows": rows.len(), "kinds": kinds.iter().map(one).collect::<Vec<_>>() }),
        );
    }
    let mut table = Table::new(&[
        ("kind", Side::Left),
        ("load", Side::Right),
        ("operators", Side::Right),
        ("time", Side::Right),
        ("roofline", Side::Right),
    ]);
    for ((kind, load), (rows, ns, roofline)) in kinds {
        table.row([
            kind.to_owned(),
            format!("{load} %"),
            rows.to_string(),
            Nanos(ns).to_string(),
            Nanos(roofline).to_string(),
        ]);
    }
    output::data(&table.to_string())
}
