//! Flags that several commands share, and what they resolve to. Nothing deeper knows clap.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, bail};
use neap::contract::{Latency, Plan, json};
use neap::device::Profile;
use neap::device::latency::{self, Sources, Table};
use neap::device::library::{self, Chosen};
use neap::device::predictor::Predictor;
use neap::estimate::forecast::Forecast;
use neap::job::Graph;
use neap::units::{Bytes, OpId};

use crate::output::note;

/// The device and where latencies come from.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct DeviceFlags {
    /// A built-in device (`neap device list`) or a *.device.json file.
    /// `host` if not given.
    #[arg(long, value_name = "NAME|FILE")]
    pub device: Option<String>,
    /// A table of measured latencies, used before the roofline.
    #[arg(long, value_name = "FILE.csv")]
    pub latencies: Option<PathBuf>,
    /// A predictor (`neap train`), for what the table lacks.
    #[arg(long, value_name = "FILE.predictor.json")]
    pub predictor: Option<PathBuf>,
    /// How busy others keep the device: latencies are those measured or learned at the load nearest to it.
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

    /// Refuses these flags beside a plan, which records its own device and latencies.
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
                "--device, --latencies, --predictor, --load: {} is a plan and records its own; plan anew with them, or leave them away",
                plan.display()
            );
        }
        Ok(())
    }

    /// Loads the profile, gives every operator its latency, and those whose algorithms were measured the workspace that these want.
    ///
    /// # Errors
    /// When a file can't be read or the name is unknown.
    pub fn resolve(&self, graph: &mut Graph) -> anyhow::Result<Site> {
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
        let sources = Sources {
            table: table.as_ref(),
            predictor: predictor.as_ref(),
            load_percent: self.load.unwrap_or(0),
        };
        let latencies = latency::latencies_from(graph, &device, &sources);
        let sha256 = neap::job::json::sha256(graph);
        let libraries = table.as_ref().map(|t| library::chosen(graph, t)).unwrap_or_default();
        if let Some(path) = self.latencies.as_deref().filter(|_| !libraries.is_empty()) {
            let wanted = libraries.iter().map(|(id, chosen)| (*id, chosen.workspace));
            graph
                .reserve(wanted)
                .with_context(|| format!("{}: with its `workspace_bytes`", path.display()))?;
        }
        Ok(Site { device, latencies, libraries, sha256 })
    }
}

/// A job where it is to run.
pub struct Site {
    /// The device.
    pub device: Profile,
    /// One for each operator.
    pub latencies: Vec<Latency>,
    /// The algorithms that were measured.
    pub libraries: BTreeMap<OpId, Chosen>,
    /// Of the graph as its file has it.
    pub sha256: String,
}

/// Gives every operator its latency, from a table of measured ones where it is in one.
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

/// A budget as the user says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Budget {
    /// So many bytes.
    Bytes(Bytes),
    /// A share of the unplanned peak, in thousandths of a percent.
    Share(u64),
    /// The lowest that can be met.
    Minimum,
}

impl FromStr for Budget {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        if text == "min" {
            return Ok(Self::Minimum);
        }
        let Some(percent) = text.strip_suffix('%') else {
            return match text.parse::<Bytes>() {
                Ok(Bytes(0)) => Err(
                    "a budget of 0 can't hold anything; give bytes (12GiB), a share (60%) or `min`"
                        .to_owned(),
                ),
                Ok(bytes) => Ok(Self::Bytes(bytes)),
                Err(_) => Err(format!(
                    "`{text}` is not a budget; give bytes (12GiB), a share of the unplanned peak (60%) or `min`"
                )),
            };
        };
        match thousandths(percent) {
            Some(0) => Err("a budget of 0 % can't hold anything; give a share such as 60%, bytes (12GiB) or `min`".to_owned()),
            Some(share) if share <= 10_000_000 => Ok(Self::Share(share)),
            _ => Err(format!("`{text}` is not a share; give a percentage from 0.001% to 10000%")),
        }
    }
}

/// Reads a decimal with at most three places as thousandths.
pub fn thousandths(text: &str) -> Option<u64> {
    let (whole, fraction) = text.trim().split_once('.').unwrap_or((text.trim(), ""));
    if whole.is_empty()
        || fraction.len() > 3
        || !whole.bytes().chain(fraction.bytes()).all(|b| b.is_ascii_digit())
    {
        return None;
    }
    let whole: u64 = whole.parse().ok()?;
    let fraction: u64 = format!("{fraction:0<3}").parse().ok()?;
    whole.checked_mul(1000)?.checked_add(fraction)
}

/// Reads the largest deviation of a latency, in thousandths of a percent.
///
/// # Errors
/// When it isn't a percentage up to 100.
pub fn deviation(text: &str) -> Result<u64, String> {
    let problem = || format!("`{text}` is not a share; give a percentage from 0% to 100%");
    let share = thousandths(text.strip_suffix('%').ok_or_else(problem)?).ok_or_else(problem)?;
    if share > 100_000 { Err(problem()) } else { Ok(share) }
}

impl Budget {
    /// In bytes, for a job with this unplanned peak on this device; `None` for the minimum.
    ///
    /// # Errors
    /// Explicit bytes above the device.
    pub fn resolve(self, peak: Bytes, device: &Profile) -> anyhow::Result<Option<Bytes>> {
        let available = device.available();
        match self {
            Self::Minimum => Ok(None),
            Self::Bytes(bytes) if bytes > available => bail!(
                "--budget: {bytes} ({} bytes) is more than {} offers, {available} ({} bytes) after the context's reserve; lower it or name another --device",
                bytes.0,
                device.name,
                available.0
            ),
            Self::Bytes(bytes) => Ok(Some(bytes)),
            Self::Share(share) => {
                let bytes = Bytes(
                    u64::try_from(u128::from(peak.0) * u128::from(share) / 100_000)
                        .unwrap_or(u64::MAX),
                );
                if bytes > available {
                    note(&format!(
                        "note: {bytes} is more than {} offers; the budget is {available}",
                        device.name
                    ));
                }
                Ok(Some(bytes.min(available)))
            }
        }
    }
}

/// Reads a graph, saying what to do when the file is a trace.
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

/// Refuses outputs that can't be written or would replace what is read, before any work is done for them.
///
/// # Errors
/// Naming the file.
pub fn outputs(inputs: &[&Path], outputs: &[Option<&Path>]) -> anyhow::Result<()> {
    // Devices and pipes may be read and written at once.
    let file = |path: &Path| path.canonicalize().ok().filter(|p| p.is_file());
    let mut taken: Vec<(PathBuf, &str)> =
        inputs.iter().filter_map(|p| Some((file(p)?, "is read by this command too"))).collect();
    for output in outputs.iter().flatten() {
        neap::files::writable(output)?;
        let folder =
            output.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let same =
            file(output).or_else(|| Some(folder.canonicalize().ok()?.join(output.file_name()?)));
        let Some(same) = same.filter(|s| s.is_file() || !s.exists()) else { continue };
        if let Some((_, why)) = taken.iter().find(|(t, _)| *t == same) {
            bail!("{}: {why}; name another output", output.display());
        }
        taken.push((same, "is named as an output twice"));
    }
    Ok(())
}

/// The files that [`subject`] is named, for [`outputs`].
pub fn subject_files<'a>(path: &'a Path, graphs: &'a [PathBuf]) -> Vec<&'a Path> {
    std::iter::once(path).chain(graphs.iter().map(PathBuf::as_path)).collect()
}

/// A plan with its graphs, or a graph alone.
pub enum Subject {
    /// A plan.
    Plan(Box<Plan>, Vec<Graph>),
    /// A graph, to go without a plan.
    Graph(Box<Graph>),
}

/// Reads a plan with its graphs, or a graph.
///
/// # Errors
/// When it can't be read, is neither, or one of `writes` would replace a graph that the plan names.
pub fn subject(
    path: &Path,
    graphs: &[PathBuf],
    writes: &[Option<&Path>],
) -> anyhow::Result<Subject> {
    let name = path.to_string_lossy();
    if name.ends_with(".graph.json") || name.ends_with(".graph.json.gz") {
        if !graphs.is_empty() {
            bail!("--graph: {} is a graph itself; leave --graph away", path.display());
        }
        return Ok(Subject::Graph(Box::new(graph(path)?)));
    }
    let (plan, graphs) = plan(path, graphs)?;
    let named: Vec<PathBuf> =
        plan.jobs.iter().map(|job| json::graph_path(path, &job.graph)).collect();
    outputs(&named.iter().map(PathBuf::as_path).collect::<Vec<_>>(), writes)?;
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

/// Checks a plan before anything is done with it; says what is wrong with it otherwise.
///
/// # Errors
/// When the plan is refused.
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

/// The file of `path` for messages and outputs, without folders.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_read() {
        assert_eq!("60%".parse(), Ok(Budget::Share(60_000)));
        assert_eq!("12.5%".parse(), Ok(Budget::Share(12_500)));
        assert_eq!("min".parse(), Ok(Budget::Minimum));
        assert_eq!("1KiB".parse(), Ok(Budget::Bytes(Bytes(1024))));
        for bad in
            ["0", "0%", "-5%", "", "%", "1e3%", "5.1234%", "nan%", "max", "99999999999999999999%"]
        {
            assert!(bad.parse::<Budget>().is_err(), "{bad}");
        }
    }
}

/// Whose rules make an estimate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Rules {
    /// This project's.
    Neap,
    /// The original estimator's, as a baseline.
    Xmem,
}

impl Rules {
    /// How they turn a job into requests.
    pub fn rules(self) -> neap::estimate::score::Rules {
        match self {
            Self::Neap => Forecast::of,
            Self::Xmem => |job, _| neap::estimate::xmem::forecast(job),
        }
    }
}
