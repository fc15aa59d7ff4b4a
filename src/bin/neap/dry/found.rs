//! What a run left in its scratch folder: each process's report, requests and device log.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use neap::sim::allocator::Config;
use neap::units::Bytes;
use serde::{Deserialize, Serialize};

/// The bytes of the largest report or log that is read.
pub const LARGEST: u64 = 256 << 20;

/// What the Python side says of one process. Bytes everywhere.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Process {
    pub pid: u32,
    pub rank: Option<u32>,
    pub torch: String,
    pub cuda: Option<String>,
    pub ended_by: String,
    pub exception: Option<Exception>,
    pub steps: u64,
    pub devices: Vec<DeviceUse>,
    pub phases: Vec<Phase>,
    /// Where phases begin.
    pub marks: Vec<PhaseMark>,
    /// By step and phase: the most allocated.
    pub step_peaks: Vec<(u64, String, u64)>,
    pub extents: Extents,
    pub peak: Option<Peak>,
    pub categories_at_phase: Vec<PhaseCategories>,
    pub reads: Vec<Read>,
    pub last_made_up: Option<MadeUp>,
    pub data_dependent: Vec<DataDependent>,
    /// DDP's first buckets, which PyTorch 2.8 and later may free later than here.
    pub late_bucket_bytes: Bytes,
    pub redirected_writes: Vec<String>,
    pub recorded: Option<Recorded>,
    /// The memory snapshot that it wrote.
    pub snapshot: Option<String>,
    /// Why files that were asked for are not there.
    pub unwritten: Vec<String>,
    /// What went wrong in neap's own code inside the script.
    pub problems: Vec<String>,
    /// What was counted where PyTorch is built for the CPU only.
    pub allocated_only: Option<AllocatedOnly>,
    /// The allocator's settings as PyTorch had them, in the form of PYTORCH_CUDA_ALLOC_CONF.
    pub alloc_conf: String,
    /// PyTorch's name of its allocator.
    pub allocator: String,
    /// Whether PyTorch kept a history of its allocator; if not, the figures are the device's own.
    pub history: bool,
}

impl Process {
    /// The settings of its allocator, which the script may have set itself; PyTorch's own where
    /// they are none that neap knows.
    pub fn allocator_settings(&self) -> Config {
        self.alloc_conf.parse().unwrap_or_default()
    }

    /// The most that it reserved on one device.
    pub fn peak_reserved(&self) -> Bytes {
        Bytes(self.devices.iter().map(|d| d.peak_reserved_bytes).max().unwrap_or_default())
    }

    /// The device of which it reserved most.
    pub fn main_device(&self) -> u32 {
        let most = |d: &&DeviceUse| (d.peak_reserved_bytes, std::cmp::Reverse(d.index));
        self.devices.iter().max_by_key(most).map_or(0, |d| d.index)
    }
}

/// Bytes of storages, for a run that uses no device and so no device's allocator. All figures but
/// the peak are from after the last optimizer steps.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct AllocatedOnly {
    pub peak_bytes: Bytes,
    pub parameter_bytes: Bytes,
    pub gradient_bytes: Bytes,
    pub state_bytes: Bytes,
}

/// An exception that ended the script.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct Exception {
    #[serde(rename = "type")]
    pub kind: String,
    pub message: String,
    pub file: Option<String>,
    pub line: Option<u64>,
}

/// A value that the script got and that a GPU's may differ from.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct MadeUp {
    /// The operator that made it, where that is known.
    pub op: Option<String>,
    pub file: Option<String>,
    pub line: Option<u64>,
}

/// One device's memory.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct DeviceUse {
    pub index: u32,
    pub peak_reserved_bytes: u64,
    pub peak_allocated_bytes: u64,
    pub retries: u64,
    pub ooms: u64,
}

/// A phase's peaks.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct Phase {
    pub name: String,
    pub peak_allocated_bytes: u64,
    pub peak_reserved_bytes: u64,
}

/// Where a phase begins.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct PhaseMark {
    /// Events before it.
    pub event: u64,
    pub step: u64,
    pub phase: String,
}

/// The sizes of what the script calls its models with, as far as they vary.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Extents {
    pub names: Vec<String>,
    /// By step: the largest of each.
    pub steps: Vec<(u64, Vec<u64>)>,
}

/// What stands at the peak of what is allocated.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct Peak {
    pub device: u32,
    pub allocated_bytes: u64,
    pub step: u64,
    pub phase: String,
    pub module: Option<String>,
    pub line: Option<String>,
    pub categories: BTreeMap<String, u64>,
    pub blocks: Vec<Block>,
    /// What of it waits for Python's garbage collector.
    pub cycles: Option<Cycles>,
}

/// Blocks at the peak that only Python's garbage collector frees.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct Cycles {
    pub bytes: u64,
    pub lines: Vec<CycleLine>,
    /// The peak if they went with the optimizer step that they were made before, or at once where
    /// none follows.
    pub peak_at_once_bytes: u64,
    /// The peak if the collector never ran by itself.
    pub peak_never_bytes: u64,
}

/// Where blocks in reference cycles were made.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct CycleLine {
    pub line: String,
    pub bytes: u64,
}

/// One block.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct Block {
    pub bytes: u64,
    pub category: String,
    pub name: Option<String>,
    pub line: Option<String>,
}

/// What stands at one phase's own peak.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct PhaseCategories {
    pub phase: String,
    pub categories: BTreeMap<String, u64>,
}

/// A line of the script that read the device.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct Read {
    /// None in a thread that runs no Python.
    pub file: Option<String>,
    pub line: Option<u64>,
    pub kind: String,
    pub count: u64,
    pub bytes: u64,
}

/// A line whose result's size depends on values.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct DataDependent {
    pub op: String,
    /// None in a thread that runs no Python, such as autograd's.
    pub file: Option<String>,
    pub line: Option<u64>,
    pub count: u64,
    pub treatment: String,
}

/// How `--record` went.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct Recorded {
    pub path: Option<String>,
    pub step: Option<u64>,
    /// Whether it watched a step.
    pub began: bool,
    pub error: Option<String>,
}

/// What the device library logged of one process.
#[derive(Clone, Debug, Default)]
pub struct DeviceLog {
    pub peak_bytes: BTreeMap<u32, u64>,
    pub refused: Vec<(u32, u64, u64)>,
    /// Functions that did nothing, and how often they were called.
    pub stubs: BTreeMap<String, u64>,
    /// Functions whose answers were estimates, and how often they were asked.
    pub estimated: BTreeMap<String, u64>,
    /// Libraries that bring a CUDA runtime of their own, which this device does not serve.
    pub foreign: BTreeSet<String>,
    /// A library without kernels for this device.
    pub unserved: Option<Unserved>,
    /// What the process is called.
    pub name: String,
    /// What it had on which device from when on.
    pub moments: Vec<Had>,
    /// Which other processes were found to have ended, and when.
    pub gone: Vec<(u32, u64)>,
}

/// What a process had on a device from an instant on, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Had {
    pub at_ns: u64,
    pub device: u32,
    pub bytes: u64,
}

/// A library without kernels for a device: the device's compute capability, those for which it has
/// kernels (major × 10 + minor), and its path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unserved {
    pub capability: u32,
    pub served: Vec<u32>,
    pub library: String,
}

impl Unserved {
    fn read(line: &str) -> Option<Self> {
        let mut words = line.splitn(4, ' ').skip(1);
        let capability = words.next()?.parse().ok()?;
        let served = words.next()?.split(',').map(str::parse).collect::<Result<_, _>>().ok()?;
        Some(Self { capability, served, library: words.next()?.to_owned() })
    }
}

/// What the start-up hook found in a Python process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Python {
    Ready,
    NoTorch,
    CpuOnly,
    Failed,
}

/// All of it.
#[derive(Debug, Default)]
pub struct Found {
    pub processes: Vec<Process>,
    pub logs: BTreeMap<u32, DeviceLog>,
    pub pythons: Vec<(Python, String)>,
    /// Why reports could not be read.
    pub damaged: Vec<String>,
    pub scratch: PathBuf,
}

impl Found {
    /// Reads the scratch folder. What is damaged or absent is left out: the processes may have been
    /// killed.
    pub fn read(scratch: &Path) -> Self {
        let mut found = Self { scratch: scratch.to_owned(), ..Self::default() };
        let entries = fs::read_dir(scratch).into_iter().flatten().flatten();
        let mut paths: Vec<PathBuf> = entries.map(|e| e.path()).collect();
        paths.sort();
        for path in paths {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let pid = |prefix: &str, suffix: &str| -> Option<u32> {
                name.strip_prefix(prefix)?.strip_suffix(suffix)?.parse().ok()
            };
            let text = || neap::files::read_regular(&path, LARGEST);
            if pid("report-", ".json").is_some() {
                let read = text().map_err(anyhow::Error::new);
                match read.and_then(|text| Ok(serde_json::from_str(&text)?)) {
                    Ok(process) => found.processes.push(process),
                    Err(error) => found.damaged.push(error.to_string()),
                }
            } else if let Some(pid) = pid("device-", ".log") {
                found.logs.insert(pid, log(&text().unwrap_or_default()));
            } else if pid("python-", "").is_some() {
                let text = text().unwrap_or_default();
                let mut lines = text.lines();
                let state = match lines.next() {
                    Some("ready") => Python::Ready,
                    Some("none") => Python::NoTorch,
                    Some("cpu") => Python::CpuOnly,
                    _ => Python::Failed,
                };
                found.pythons.push((state, lines.next().unwrap_or_default().to_owned()));
            }
        }
        let used = |p: &Process| std::cmp::Reverse(p.peak_reserved());
        found.processes.sort_by_key(|p| (p.rank, used(p), p.pid));
        found
    }

    /// Whether the device was too small for the script.
    pub fn out_of_memory(&self) -> bool {
        self.processes.iter().any(|p| p.ended_by == "oom")
    }

    /// The process to report first: rank 0, or the one that used most.
    pub fn main(&self) -> Option<&Process> {
        self.processes.first()
    }

    /// What the device library logged of a process; nothing where it wrote nothing.
    pub fn log(&self, process: &Process) -> DeviceLog {
        self.logs.get(&process.pid).cloned().unwrap_or_default()
    }

    /// What each allocation of a process is, if it wrote that.
    pub fn allocations(&self, pid: u32) -> Option<PathBuf> {
        Some(self.scratch.join(format!("allocations-{pid}.json"))).filter(|p| p.exists())
    }

    /// The requests to the allocator of a process, if it wrote them.
    pub fn events(&self, pid: u32) -> Option<PathBuf> {
        let names = [format!("events-{pid}.csv.gz"), format!("events-{pid}.csv")];
        names.into_iter().map(|n| self.scratch.join(n)).find(|p| p.exists())
    }
}

fn log(text: &str) -> DeviceLog {
    let mut log = DeviceLog::default();
    for line in text.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let number = |i: usize| words.get(i).and_then(|w| w.parse::<u64>().ok());
        match (words.first().copied(), number(1), number(2), number(3), number(4)) {
            (Some("segment"), _, Some(device), Some(_), Some(used)) => {
                let peak = log.peak_bytes.entry(device as u32).or_default();
                *peak = used.max(*peak);
                let at_ns = number(5).unwrap_or_default();
                log.moments.push(Had { at_ns, device: device as u32, bytes: used });
            }
            (Some("process"), ..) => {
                line.split_once(' ').map_or("", |(_, name)| name).clone_into(&mut log.name);
            }
            (Some("gone"), Some(process), Some(_), Some(_), Some(at_ns)) => {
                log.gone.push((process as u32, at_ns));
            }
            (Some("refused"), Some(device), Some(bytes), Some(used), _) => {
                log.refused.push((device as u32, bytes, used));
            }
            (Some(kind @ ("stub" | "estimate")), _, Some(count), ..) => {
                let all = if kind == "stub" { &mut log.stubs } else { &mut log.estimated };
                let entry = all.entry(words[1].to_owned()).or_default();
                *entry = count.max(*entry);
            }
            (Some("unserved"), ..) => {
                log.unserved = log.unserved.or_else(|| Unserved::read(line));
            }
            (Some("foreign"), ..) => {
                log.foreign.extend(line.split_once(' ').map(|(_, library)| library.to_owned()));
            }
            _ => {}
        }
    }
    log
}
