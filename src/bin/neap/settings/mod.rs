//! Flags that several commands share, and the settings made from them. Only this module and the
//! commands know clap.

pub mod allocator;
mod job;
mod outputs;
pub mod planner;
mod target;
pub mod values;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use neap::contract::{Latency, Plan, json};
use neap::device::latency::{self, Sources, Table};
use neap::device::library::{self, Chosen};
use neap::device::predictor::Predictor;
use neap::device::{Profile, roofline};
use neap::estimate::forecast::Forecast;
use neap::job::Graph;
use neap::units::OpId;

use crate::output::note;

pub use job::JobArg;
pub use outputs::Outputs;
pub use target::TargetFlags;
pub use values::{Budget, NamedBudget};

/// The device, and the sources of latencies.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct DeviceFlags {
    /// A built-in device (`neap device list`) or a *.device.json file; `host` by default.
    #[arg(long, value_name = "NAME|FILE")]
    pub device: Option<String>,
    /// A table of measured latencies, used before the roofline.
    #[arg(long, value_name = "FILE.csv")]
    pub latencies: Option<PathBuf>,
    /// A predictor from `neap train`, for operators that the table lacks.
    #[arg(long, value_name = "FILE.predictor.json")]
    pub predictor: Option<PathBuf>,
    /// How busy other programs keep the device. Latencies are those measured or learned at the
    /// nearest load.
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u32).range(0..=100))]
    pub load: Option<u32>,
}

impl DeviceFlags {
    /// The files that these flags name, after `others`.
    pub fn inputs<'a>(&'a self, others: &[&'a Path]) -> Vec<&'a Path> {
        let mut all = others.to_vec();
        all.extend(self.device.as_deref().map(Path::new));
        all.extend(self.latencies.as_deref());
        all.extend(self.predictor.as_deref());
        all
    }

    /// Returns an error if one of these flags is given with a plan, which records its own device
    /// and latencies.
    ///
    /// # Errors
    /// When one is given.
    pub fn not_with_a_plan(&self, plan: &Path) -> anyhow::Result<()> {
        if self.device.is_some()
            || self.latencies.is_some()
            || self.predictor.is_some()
            || self.load.is_some()
        {
            bail!(
                "--device, --latencies, --predictor, --load: {} is a plan and records its own; plan \
                 anew with them, or leave them out",
                plan.display()
            );
        }
        Ok(())
    }

    /// Reads the files that these flags name.
    ///
    /// # Errors
    /// When a file can't be read or the name is unknown.
    pub fn read(&self) -> anyhow::Result<Learned> {
        let device = neap::device::profile::load(self.device.as_deref().unwrap_or("host"))?;
        let table = self.latencies.as_deref().map(Table::read).transpose()?;
        let predictor = self.predictor.as_deref().map(Predictor::read).transpose()?;
        let of_table =
            table.iter().flat_map(|t| t.devices().map(|d| ("the latencies were measured", d)));
        let of_predictor =
            predictor.iter().map(|p| ("the predictor was trained", p.device.as_str()));
        for (what, name) in of_table
            .chain(of_predictor)
            .filter(|(_, name)| *name != device.name && !name.is_empty())
        {
            note(&format!("note: {what} on {name}, the device is {}", device.name));
        }
        Ok(Learned { device, table, predictor, flags: self.clone() })
    }

    /// As [`Learned::resolve`], for one job.
    ///
    /// # Errors
    /// As [`Self::read`] and [`Learned::resolve`].
    pub fn resolve(&self, graph: &mut Graph) -> anyhow::Result<Site> {
        self.read()?.resolve(graph)
    }

    /// As [`Self::resolve`], for jobs that run beside each other: the load on each is what the
    /// others use of the device, unless `--load` says another.
    ///
    /// # Errors
    /// As [`Self::resolve`].
    pub fn resolve_all(&self, graphs: &mut [Graph]) -> anyhow::Result<Vec<Site>> {
        let learned = self.read()?;
        let sites = graphs.iter_mut().map(|graph| learned.resolve(graph));
        let mut sites = sites.collect::<anyhow::Result<Vec<_>>>()?;
        let used = graphs.iter().zip(&sites).map(|(graph, site)| {
            roofline::utilisation(&graph.operators, &site.latencies, &site.device)
        });
        let used: Vec<u32> = used.collect();
        let all: u32 = used.iter().sum();
        for ((graph, site), used) in graphs.iter().zip(&mut sites).zip(used) {
            if let Some(latencies) = learned.at_load((all - used) / 100, graph) {
                site.latencies = latencies;
            }
        }
        Ok(sites)
    }
}

/// A device, and what was measured or learned on it.
#[derive(Clone, Debug)]
pub struct Learned {
    /// The device.
    pub device: Profile,
    table: Option<Table>,
    predictor: Option<Predictor>,
    flags: DeviceFlags,
}

impl Learned {
    fn at(&self, graph: &Graph, load_percent: u32) -> Vec<Latency> {
        let (table, predictor) = (self.table.as_ref(), self.predictor.as_ref());
        latency::latencies_from(graph, &self.device, &Sources { table, predictor, load_percent })
    }

    /// The latencies of a graph's operators at a load of this many tenths; `None` if `--load` names
    /// one load, or nothing was learned at other loads.
    fn at_load(&self, tenths: u32, graph: &Graph) -> Option<Vec<Latency>> {
        let known = self.table.is_some() || self.predictor.is_some();
        (known && self.flags.load.is_none()).then(|| self.at(graph, tenths.min(10) * 10))
    }

    /// The latencies at loads of 0, 10, … 100 %; none where [`Self::at_load`] has none.
    pub fn at_loads(&self, graph: &Graph) -> Vec<Vec<Latency>> {
        (0..=10).filter_map(|load| self.at_load(load, graph)).collect()
    }

    /// The latency of every operator. Operators whose algorithms were measured get the workspace of
    /// these algorithms.
    ///
    /// # Errors
    /// When the table has a workspace that no graph can have.
    pub fn resolve(&self, graph: &mut Graph) -> anyhow::Result<Site> {
        let latencies = self.at(graph, self.flags.load.unwrap_or(0));
        let sha256 = neap::job::json::sha256(graph);
        let libraries = self.table.as_ref().map(|t| library::chosen(graph, t)).unwrap_or_default();
        if let Some(path) = self.flags.latencies.as_deref().filter(|_| !libraries.is_empty()) {
            let wanted = libraries.iter().map(|(id, chosen)| (*id, chosen.workspace));
            graph
                .reserve(wanted)
                .with_context(|| format!("{}: with its `workspace_bytes`", path.display()))?;
        }
        Ok(Site { device: self.device.clone(), latencies, libraries, sha256 })
    }
}

/// A job on its device.
pub struct Site {
    /// The device.
    pub device: Profile,
    /// The latency of each operator.
    pub latencies: Vec<Latency>,
    /// The algorithms that were measured.
    pub libraries: BTreeMap<OpId, Chosen>,
    /// SHA-256 of the graph as it is in the file.
    pub sha256: String,
}

/// The latency of every operator, from a table of measured ones if it is there.
///
/// # Errors
/// When the table can't be read.
pub fn latencies(
    graph: &Graph,
    device: &Profile,
    table: Option<&Path>,
) -> anyhow::Result<Vec<Latency>> {
    let table = table.map(Table::read).transpose()?;
    if let Some(table) = &table {
        let others: Vec<&str> = table.devices().filter(|d| *d != device.name).collect();
        if !others.is_empty() {
            note(&format!(
                "note: the latencies were measured on {}, the device is {}",
                others.join(", "),
                device.name
            ));
        }
    }
    Ok(latency::latencies(graph, device, table.as_ref()))
}

/// Reads a graph. The error for a trace says how to import it.
///
/// # Errors
/// When it can't be read.
pub fn graph(path: &Path) -> anyhow::Result<Graph> {
    let name = path.to_string_lossy();
    neap::job::json::read(path).map_err(|error| {
        let error = anyhow::Error::new(error);
        if name.ends_with(".et.json") || name.ends_with(".et.json.gz") {
            return error.context(
                "this looks like an execution trace: turn it into a job with `neap import` first",
            );
        }
        error
    })
}

/// Reads the graphs of several jobs.
///
/// # Errors
/// As [`graph`].
pub fn graphs(jobs: &[JobArg]) -> anyhow::Result<Vec<Graph>> {
    jobs.iter().map(|job| graph(&job.path)).collect()
}

/// The files that a command with a [`subject`] reads.
pub fn subject_files<'a>(path: &'a Path, graphs: &'a [PathBuf]) -> Vec<&'a Path> {
    std::iter::once(path).chain(graphs.iter().map(PathBuf::as_path)).collect()
}

/// A plan with its graphs, or a graph alone.
pub enum Subject {
    /// A plan.
    Plan(Box<Plan>, Vec<Graph>),
    /// A graph, used without a plan.
    Graph(Box<Graph>),
}

/// Reads a plan with its graphs, or a graph.
///
/// # Errors
/// When it can't be read, or is neither.
pub fn subject(path: &Path, graphs: &[PathBuf]) -> anyhow::Result<Subject> {
    let name = path.to_string_lossy();
    if name.ends_with(".graph.json") || name.ends_with(".graph.json.gz") {
        if !graphs.is_empty() {
            bail!("--graph: {} is a graph itself; leave --graph out", path.display());
        }
        return Ok(Subject::Graph(Box::new(graph(path)?)));
    }
    let (plan, graphs) = plan(path, graphs)?;
    Ok(Subject::Plan(Box::new(plan), graphs))
}

/// Reads a plan with its graphs.
///
/// # Errors
/// When they can't be read or don't belong together.
pub fn plan(path: &Path, graphs: &[PathBuf]) -> anyhow::Result<(Plan, Vec<Graph>)> {
    let (plan, graphs) = json::load(path, graphs)?;
    if plan.jobs.is_empty() {
        bail!("{}: has 0 jobs; plan again from a graph", path.display());
    }
    Ok((plan, graphs))
}

/// Checks a plan before it is used, and prints what is wrong with it. Returns whether it is safe.
pub fn checked(path: &Path, plan: &Plan, graphs: &[Graph]) -> anyhow::Result<bool> {
    match neap::contract::check::check(plan, graphs) {
        Ok(_) => Ok(true),
        Err(refusals) => {
            for refusal in refusals.iter().take(10) {
                note(&format!("{}: refused: {refusal}", path.display()));
            }
            if refusals.len() > 10 {
                note(&format!("… and {} more reasons", refusals.len() - 10));
            }
            Ok(false)
        }
    }
}

/// Returns an error for the first of these flags that is given; `why` follows its name.
pub fn none_given<const N: usize>(
    flags: [(bool, &str); N],
    why: impl std::fmt::Display,
) -> anyhow::Result<()> {
    match flags.iter().find(|(given, _)| *given) {
        Some((_, flag)) => bail!("{flag}: {why}"),
        None => Ok(()),
    }
}

/// A file's name without folders and endings, for messages and outputs.
pub fn stem(path: &Path) -> anyhow::Result<String> {
    let name = path.file_name().context("names no file")?.to_string_lossy().into_owned();
    let name = name.strip_suffix(".gz").unwrap_or(&name);
    let name = name.strip_suffix(".json").unwrap_or(name);
    Ok([".et", ".graph", ".plan"]
        .iter()
        .find_map(|s| name.strip_suffix(s))
        .unwrap_or(name)
        .to_owned())
}

/// The rules that make an estimate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Rules {
    /// neap's own.
    Neap,
    /// xMem's, as a baseline.
    Xmem,
}

impl Rules {
    /// The function that makes a forecast of a job by these rules.
    pub fn rules(self) -> neap::estimate::score::Rules {
        match self {
            Self::Neap => Forecast::new,
            Self::Xmem => |job, _| neap::estimate::xmem::forecast(job),
        }
    }
}
