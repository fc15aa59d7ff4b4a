//! How good estimates are: a folder of traces held against what PyTorch's allocator really did.
//!
//! For: errors of the peaks, the two-round check of the xMem paper (arXiv 2510.21048) and the memory that estimates conserve
//! (its Eq. 7). Not for: making truths, nor printing.
//!
//! A truth is a run on a device that is never full. The paper's own truths are runs capped at the estimate, where PyTorch
//! gives cached memory back and so moves toward it, read from NVML with the context: its figures and these differ in that.
//! Context (the paper's "init" and "framework" memory) is in neither estimate nor truth here: a device offers what its
//! context leaves, and the estimate is of the allocator alone.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde::Deserialize;

use super::answer::answer;
use super::forecast::{Forecast, Job};
use super::trace::{Limits, TraceError};
use super::twin::Settings;
use crate::files::{self, FileError};
use crate::sim::allocator::replay::{LARGEST_DEVICE, in_parallel, replay};
use crate::sim::allocator::{Config, ConfigError};
use crate::sim::requests::Request;
use crate::sim::sequence::{Sequence, SequenceError};
use crate::units::Bytes;

/// Far above any truth; a larger file is something else.
const LARGEST_TRUTH: u64 = 16 << 20;

/// A pair that could not be scored.
#[derive(Debug, thiserror::Error)]
pub enum ScoreError {
    /// A file could not be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// The trace is none.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The events are none.
    #[error(transparent)]
    Events(#[from] SequenceError),
    /// The truth's allocator configuration is none.
    #[error("{}: alloc_conf: {cause}", path.display())]
    Config {
        /// The truth.
        path: PathBuf,
        /// Why.
        cause: ConfigError,
    },
    /// The truth or the folder is not as it must be.
    #[error("{}: {problem}", path.display())]
    Bad {
        /// Which.
        path: PathBuf,
        /// What, and what would do.
        problem: String,
    },
}

/// Rules that make an estimate.
pub type Rules = fn(&Job, &Settings) -> Forecast;

/// A device that jobs are tried on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// What users call it.
    pub name: String,
    /// All of its memory.
    pub memory: Bytes,
    /// What its context leaves.
    pub available: Bytes,
}

/// How estimates are made and tried.
#[derive(Clone, Debug)]
pub struct Options {
    /// Whose rules; [`Forecast::of`] are this project's.
    pub rules: Rules,
    /// The class of GPU that the truths were made on.
    pub settings: Settings,
    /// The allocator's configuration; none: the one each truth was made with.
    pub config: Option<Config>,
    /// What jobs are tried on.
    pub devices: Vec<Device>,
}

/// The files of one job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pair {
    /// What they are called, without endings.
    pub name: String,
    /// NAME.profile.json or NAME.profile.json.gz.
    pub trace: PathBuf,
    /// NAME.truth.json or NAME.truth.json.gz.
    pub truth: PathBuf,
    /// NAME.truth.events.csv or NAME.truth.events.csv.gz, where there is one.
    pub events: Option<PathBuf>,
}

/// The pairs of `folder` by name, and a sentence for each file that lacks its partner.
///
/// # Errors
/// When it can't be listed or has no pair.
pub fn pairs(folder: &Path) -> Result<(Vec<Pair>, Vec<String>), ScoreError> {
    const KINDS: [&str; 3] = [".profile.json", ".truth.json", ".truth.events.csv"];
    let bad = |problem: String| ScoreError::Bad { path: folder.to_owned(), problem };
    let cannot = |e: std::io::Error| bad(format!("cannot be listed: {e}; name a folder"));
    let mut found: BTreeMap<String, [Option<PathBuf>; 3]> = BTreeMap::new();
    for entry in std::fs::read_dir(folder).map_err(cannot)? {
        let path = entry.map_err(cannot)?.path();
        let file = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let plain = file.strip_suffix(".gz").unwrap_or(&file);
        for (kind, ending) in KINDS.iter().enumerate() {
            if let Some(name) = plain.strip_suffix(ending).filter(|n| !n.is_empty()) {
                let slot = &mut found.entry(name.to_owned()).or_default()[kind];
                // Where both are there, the one that needs no unpacking.
                if slot.as_ref().is_none_or(|old| *old > path) {
                    *slot = Some(path.clone());
                }
            }
        }
    }
    let mut notes = Vec::new();
    let mut all = Vec::new();
    for (name, files) in found {
        match files {
            [Some(trace), Some(truth), events] => {
                if events.is_none() {
                    notes.push(format!("{name}: no {name}{}[.gz]: its errors count, failures and conservation can't be told", KINDS[2]));
                }
                all.push(Pair { name, trace, truth, events });
            }
            [Some(_), None, _] => notes.push(format!("{name}: a trace without {name}{}; left out", KINDS[1])),
            _ => notes.push(format!("{name}: a truth without {name}{}[.gz]; left out", KINDS[0])),
        }
    }
    if all.is_empty() {
        let more = if notes.is_empty() { String::new() } else { format!(" ({})", notes.join("; ")) };
        return Err(bad(format!("no trace with its truth: put NAME.profile.json[.gz] beside NAME.truth.json{more}")));
    }
    Ok((all, notes))
}

/// What a truth says, as far as it is used.
#[derive(Deserialize)]
struct Truth {
    job: Option<String>,
    #[serde(default)]
    alloc_conf: String,
    peaks: Vec<TruthPeaks>,
}

#[derive(Deserialize)]
struct TruthPeaks {
    peak_reserved_bytes: u64,
    peak_allocated_bytes: u64,
}

/// Peaks over all iterations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Peaks {
    /// What the allocator holds of the device.
    pub reserved: Bytes,
    /// What tensors hold of that.
    pub allocated: Bytes,
}

/// One job tried on one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// All of the device.
    pub memory: Bytes,
    /// What its context leaves.
    pub available: Bytes,
    /// Whether the forecast runs out of memory on it.
    pub predicted_oom: bool,
    /// Whether the job does.
    pub oom: bool,
    /// The job's cap in round two, without and with the margin: the estimate, or the device where that is less.
    pub caps: [Bytes; 2],
    /// Whether the job survives that cap.
    pub survives: [bool; 2],
}

/// Without the margin, in the pairs of figures here.
pub const BARE: usize = 0;
/// With it.
pub const MARGIN: usize = 1;

impl Run {
    /// Whether the estimate failed: round one, a wrong verdict for the device; round two, where the job fits, it dies when
    /// capped at context + estimate. `with` is [`BARE`] or [`MARGIN`].
    #[must_use]
    pub const fn fails(&self, with: usize) -> bool {
        self.predicted_oom != self.oom || !self.oom && !self.survives[with]
    }

    /// What using the estimate conserves: M_save of the paper, whose mean over runs is its Eq. 7 (MCP). In bytes.
    ///
    /// As the paper's published analysis computes it: a job that fits and survives its cap leaves the device less context and
    /// cap to others; a job rightly turned away leaves the whole device; one that dies at its cap conserves nothing; a wrong
    /// verdict costs the whole device (the penalty).
    #[must_use]
    pub const fn conserved(&self, with: usize) -> i64 {
        match (self.predicted_oom == self.oom, self.oom) {
            (false, _) => -(self.memory.0 as i64),
            (true, true) => self.memory.0 as i64,
            (true, false) if self.survives[with] => self.available.0 as i64 - self.caps[with].0 as i64,
            (true, false) => 0,
        }
    }
}

/// How good one estimate is.
#[derive(Clone, Debug)]
pub struct Score {
    /// The pair's.
    pub name: String,
    /// As the truth says; the name where it doesn't.
    pub model: String,
    /// What the job took.
    pub actual: Peaks,
    /// What it was thought to take.
    pub estimated: Peaks,
    /// What a careful user adds to the reserved peak.
    pub margin: Bytes,
    /// By device, in the options' order; empty without events.
    pub runs: Vec<Run>,
    /// Reading the trace and estimating, in nanoseconds of this machine.
    pub elapsed_ns: u64,
    /// What is odd about the files, in whole sentences.
    pub notes: Vec<String>,
}

/// `estimated` relative to `actual`: 0.01 is one percent too much.
#[must_use]
pub fn relative(estimated: Bytes, actual: Bytes) -> f64 {
    match (estimated.0, actual.0) {
        (0, 0) => 0.0,
        (_, 0) => f64::INFINITY,
        (e, a) => (e as f64 - a as f64) / a as f64,
    }
}

impl Score {
    /// Of the reserved peak; negative when the estimate is too low.
    #[must_use]
    pub fn reserved_error(&self) -> f64 {
        relative(self.estimated.reserved, self.actual.reserved)
    }

    /// Of the allocated peak.
    #[must_use]
    pub fn allocated_error(&self) -> f64 {
        relative(self.estimated.allocated, self.actual.allocated)
    }
}

/// Scores one pair.
///
/// # Errors
/// When one of its files can't be read.
pub fn score(pair: &Pair, options: &Options) -> Result<Score, ScoreError> {
    let bad = |problem: String| ScoreError::Bad { path: pair.truth.clone(), problem };
    let truth: Truth = serde_json::from_slice(&files::read(&pair.truth, LARGEST_TRUTH)?)
        .map_err(|e| bad(format!("no truth: {e}; it needs peaks with peak_reserved_bytes and peak_allocated_bytes")))?;
    let its: Config = truth.alloc_conf.parse().map_err(|cause| ScoreError::Config { path: pair.truth.clone(), cause })?;
    let most =
        |of: fn(&TruthPeaks) -> u64| truth.peaks.iter().map(of).max().map(Bytes).ok_or_else(|| bad("its peaks are empty".to_owned()));
    let mut actual = Peaks { reserved: most(|p| p.peak_reserved_bytes)?, allocated: most(|p| p.peak_allocated_bytes)? };
    let events = pair.events.as_deref().map(Sequence::read).transpose()?.map(|s| s.requests);
    let config = options.config.as_ref().unwrap_or(&its);
    let mut notes = Vec::new();
    if let Some(events) = &events {
        let stats = replay(events, config, LARGEST_DEVICE, None).stats;
        let replayed = Peaks { reserved: stats.peak_reserved, allocated: stats.peak_allocated };
        if *config != its {
            actual = replayed;
        } else if replayed != actual {
            notes.push(format!(
                "{}: its events reserve {} and allocate {} bytes, its truth says {} and {}",
                pair.name, replayed.reserved.0, replayed.allocated.0, actual.reserved.0, actual.allocated.0
            ));
        }
    } else if *config != its {
        return Err(bad("was made with another --alloc-conf and has no events to replay; leave --alloc-conf away".to_owned()));
    }

    let start = Instant::now();
    let job = Job::read(&pair.trace, &Limits::default())?;
    let mut forecast = (options.rules)(&job, &options.settings);
    let answer = answer(&job, &mut forecast, config);
    let elapsed_ns = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);

    let estimated = Peaks { reserved: answer.stats.peak_reserved, allocated: answer.stats.peak_allocated };
    let margin = answer.margin();
    let runs =
        events.map_or_else(Vec::new, |events| tries(&forecast.requests, &events, estimated.reserved, margin, config, &options.devices));
    let model = truth.job.as_deref().and_then(|j| j.split(':').next()).filter(|m| !m.is_empty()).unwrap_or(&pair.name);
    Ok(Score { name: pair.name.clone(), model: model.to_owned(), actual, estimated, margin, runs, elapsed_ns, notes })
}

/// The two rounds on each device.
fn tries(forecast: &[Request], events: &[Request], estimate: Bytes, margin: Bytes, config: &Config, devices: &[Device]) -> Vec<Run> {
    let dies = |requests: &[Request], capacity: Bytes| replay(requests, config, capacity, None).first_oom.is_some();
    devices
        .iter()
        .map(|device| {
            let caps = [estimate, estimate + margin].map(|c| c.min(device.available));
            Run {
                memory: device.memory,
                available: device.available,
                predicted_oom: dies(forecast, device.available),
                oom: dies(events, device.available),
                caps,
                survives: caps.map(|cap| !dies(events, cap)),
            }
        })
        .collect()
}

/// Scores all pairs on all cores, in their order.
///
/// # Errors
/// The first pair's that can't be read.
pub fn score_all(pairs: &[Pair], options: &Options) -> Result<Vec<Score>, ScoreError> {
    in_parallel(pairs.len(), |i| score(&pairs[i], options)).into_iter().collect()
}

/// How absolute values are spread; zeros without any.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Spread {
    /// The middle one, or the mean of the middle two. Of relative errors it is the paper's MRE.
    pub median: f64,
    /// The least that nine tenths don't exceed.
    pub p90: f64,
    /// The largest.
    pub worst: f64,
}

impl Spread {
    /// Of `values`.
    #[must_use]
    pub fn of(values: impl IntoIterator<Item = f64>) -> Self {
        let mut all: Vec<f64> = values.into_iter().map(f64::abs).collect();
        all.sort_unstable_by(f64::total_cmp);
        let Some(&worst) = all.last() else { return Self::default() };
        let n = all.len();
        Self { median: f64::midpoint(all[(n - 1) / 2], all[n / 2]), p90: all[(n * 9).div_ceil(10) - 1], worst }
    }
}

/// How estimates fared over runs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Fate {
    /// How many runs: jobs times devices.
    pub runs: u64,
    /// How many of them failed, without and with the margin.
    pub failed: [u64; 2],
    /// What they conserved, summed, in bytes.
    pub conserved: [i128; 2],
}

impl Fate {
    /// Of `runs`.
    #[must_use]
    pub fn of<'a>(runs: impl IntoIterator<Item = &'a Run>) -> Self {
        let mut fate = Self::default();
        for run in runs {
            fate.runs += 1;
            for with in [BARE, MARGIN] {
                fate.failed[with] += u64::from(run.fails(with));
                fate.conserved[with] += i128::from(run.conserved(with));
            }
        }
        fate
    }

    /// PEF: the share that failed; none without runs.
    #[must_use]
    pub fn failure(&self, with: usize) -> Option<f64> {
        (self.runs > 0).then(|| self.failed[with] as f64 / self.runs as f64)
    }

    /// MCP: bytes conserved a run, rounded toward zero; none without runs.
    #[must_use]
    pub fn mcp(&self, with: usize) -> Option<i64> {
        (self.runs > 0).then(|| (self.conserved[with] / i128::from(self.runs)) as i64)
    }
}

/// A model's errors and failures: one point of the four-quadrant plot.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    /// The model.
    pub name: String,
    /// How many jobs.
    pub jobs: usize,
    /// Errors of the reserved peak.
    pub error: Spread,
    /// Its runs.
    pub fate: Fate,
}

/// Scores by what `key` says, in its order.
#[must_use]
pub fn by(scores: &[Score], key: impl Fn(&Score) -> String) -> Vec<Group> {
    let mut groups: BTreeMap<String, Vec<&Score>> = BTreeMap::new();
    for score in scores {
        groups.entry(key(score)).or_default().push(score);
    }
    groups
        .into_iter()
        .map(|(name, all)| Group {
            name,
            jobs: all.len(),
            error: Spread::of(all.iter().map(|s| s.reserved_error())),
            fate: Fate::of(all.iter().flat_map(|s| &s.runs)),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const MIB: u64 = 1 << 20;

    fn device(gib: u64) -> Device {
        Device { name: format!("{gib}"), memory: Bytes(gib * GIB), available: Bytes((gib - 1) * GIB) }
    }

    fn sizes(all: &[u64]) -> Vec<Request> {
        all.iter().enumerate().map(|(id, b)| Request::Allocate { id: id as u32, bytes: Bytes(*b), stream: 0 }).collect()
    }

    /// A forecast of one block against a job of one block, on 8 and 12 GiB less 1 GiB of context.
    fn one(forecast: u64, actual: u64, margin: u64) -> Vec<Run> {
        let devices = [device(8), device(12)];
        tries(&sizes(&[forecast]), &sizes(&[actual]), Bytes(forecast), Bytes(margin), &Config::default(), &devices)
    }

    #[test]
    fn an_estimate_that_is_enough_conserves_what_is_left() {
        let runs = one(4 * GIB, 3 * GIB, GIB);
        assert!(runs.iter().all(|r| !r.fails(BARE) && !r.fails(MARGIN)));
        assert_eq!(runs.iter().map(|r| r.conserved(BARE)).collect::<Vec<_>>(), [3, 7].map(|g| g * GIB as i64));
        assert_eq!(runs.iter().map(|r| r.conserved(MARGIN)).collect::<Vec<_>>(), [2, 6].map(|g| g * GIB as i64));
    }

    #[test]
    fn an_estimate_below_the_job_fails_its_second_round_and_the_margin_mends_it() {
        let runs = one(3 * GIB, 3 * GIB + 2 * MIB, 2 * MIB);
        assert!(runs.iter().all(|r| r.fails(BARE) && !r.fails(MARGIN)));
        assert_eq!(runs[0].conserved(BARE), 0);
        assert_eq!(runs[0].conserved(MARGIN), (4 * GIB - 2 * MIB) as i64);
    }

    #[test]
    fn a_wrong_verdict_costs_the_device_and_a_right_refusal_frees_it() {
        // 9 GiB thought, 3 needed: refused by the small device for nothing.
        let runs = one(9 * GIB, 3 * GIB, 0);
        assert_eq!((runs[0].fails(BARE), runs[0].conserved(BARE)), (true, -(8 * GIB as i64)));
        assert_eq!((runs[1].fails(BARE), runs[1].conserved(BARE)), (false, 2 * GIB as i64));
        // 3 thought, 9 needed: dies where it was let in.
        let runs = one(3 * GIB, 9 * GIB, 0);
        assert_eq!((runs[0].fails(MARGIN), runs[0].conserved(MARGIN)), (true, -(8 * GIB as i64)));
        // Both too large for the small device.
        let runs = one(9 * GIB, 9 * GIB, 0);
        assert_eq!((runs[0].fails(BARE), runs[0].conserved(BARE)), (false, 8 * GIB as i64));
        let fate = Fate::of(&runs);
        assert_eq!((fate.failure(BARE), fate.mcp(BARE)), (Some(0.0), Some(5 * GIB as i64)));
        assert_eq!(Fate::of([]).mcp(MARGIN), None);
    }

    #[test]
    fn a_cap_never_exceeds_the_device() {
        let runs = one(7 * GIB, 7 * GIB, GIB);
        assert_eq!(runs[0].caps, [Bytes(7 * GIB); 2]);
        assert_eq!(runs[1].caps, [Bytes(7 * GIB), Bytes(8 * GIB)]);
        assert!(!runs[0].fails(MARGIN));
    }

    #[test]
    fn spreads() {
        assert_eq!(Spread::of([]), Spread::default());
        assert_eq!(Spread::of([-0.5]), Spread { median: 0.5, p90: 0.5, worst: 0.5 });
        assert_eq!(Spread::of((1..=10).map(f64::from)), Spread { median: 5.5, p90: 9.0, worst: 10.0 });
        assert_eq!(Spread::of((1..=11).map(|n| -f64::from(n))), Spread { median: 6.0, p90: 10.0, worst: 11.0 });
        assert_eq!(relative(Bytes(99), Bytes(100)), -0.01);
        assert_eq!(relative(Bytes(0), Bytes(0)), 0.0);
        assert!(relative(Bytes(1), Bytes(0)).is_infinite());
    }

    #[test]
    fn files_find_their_partners() {
        let folder = tempfile::tempdir().unwrap();
        for name in [
            "b.profile.json.gz",
            "b.truth.json",
            "b.truth.events.csv.gz",
            "a.profile.json",
            "a.profile.json.gz",
            "a.truth.json.gz",
            "c.truth.json",
            "d.profile.json",
            "other.csv",
            ".truth.json",
        ] {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        let (found, notes) = pairs(folder.path()).unwrap();
        let file = |name: &str| folder.path().join(name);
        assert_eq!(found.iter().map(|p| p.name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!((&found[0].trace, &found[0].events), (&file("a.profile.json"), &None));
        assert_eq!(found[1].events, Some(file("b.truth.events.csv.gz")));
        assert_eq!(notes.len(), 3, "{notes:?}");
        for (note, word) in notes.iter().zip(["a.truth.events.csv", "c.profile.json", "d.truth.json"]) {
            assert!(note.contains(word), "{note}");
        }
    }

    #[test]
    fn a_folder_without_pairs_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        assert!(pairs(folder.path()).unwrap_err().to_string().contains("no trace with its truth"));
        std::fs::write(folder.path().join("x.truth.json"), "{}").unwrap();
        assert!(pairs(folder.path()).unwrap_err().to_string().contains("x.profile.json"));
        assert!(pairs(&folder.path().join("none")).is_err());
    }
}
