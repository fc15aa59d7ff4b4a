//! The accuracy of estimates: compares a folder of traces with what PyTorch's allocator really did.
//!
//! Scores are the errors of the peaks, the two-round check of the xMem paper (arXiv 2510.21048),
//! and the memory that estimates conserve (its Eq. 7).
//!
//! A truth is the record of a run on a device that is never full. The paper's truths (its Eq. 2 and
//! 3) differ in two ways. They are runs capped at the estimate, where PyTorch gives cached memory
//! back and so comes closer to the estimate; [`Score::capped`] is the peak of such a run. And they
//! are read from NVML, which includes the context. Here neither estimate nor truth includes the
//! context (the paper's "init" and "framework" memory): a device offers the memory that its context
//! leaves, and the estimate is of the allocator alone.

mod pairs;
mod tally;

use std::path::PathBuf;
use std::time::Instant;

use super::answer::answer;
use super::forecast::{Forecast, Job};
use super::gpu::Settings;
use super::trace::{Limits, TraceError};
use super::truth::{Truth, TruthError, relative};
use crate::parallel::in_parallel;
use crate::sim::allocator::replay::{LARGEST_DEVICE, replay};
use crate::sim::allocator::{Config, ConfigError};
use crate::sim::requests::Request;
use crate::sim::sequence::{Sequence, SequenceError};
use crate::units::Bytes;

pub use pairs::{Pair, pairs};
pub use tally::{Fate, Group, Spread, by};

/// Why a pair could not be scored.
#[derive(Debug, thiserror::Error)]
pub enum ScoreError {
    /// The trace can't be used.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The truth can't be used.
    #[error(transparent)]
    Truth(#[from] TruthError),
    /// The events can't be used.
    #[error(transparent)]
    Events(#[from] SequenceError),
    /// The truth's allocator configuration can't be used.
    #[error("{}: alloc_conf: {cause}", path.display())]
    Config {
        /// The truth.
        path: PathBuf,
        /// What is wrong.
        cause: ConfigError,
    },
    /// The truth or the folder is not as required.
    #[error("{}: {problem}", path.display())]
    Bad {
        /// The file.
        path: PathBuf,
        /// What is wrong, and the remedy.
        problem: String,
    },
}

/// A function that makes a forecast of a job.
pub type Rules = fn(&Job, &Settings) -> Forecast;

/// A device that jobs are tried on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Its name.
    pub name: String,
    /// Its memory in bytes.
    pub memory: Bytes,
    /// Bytes that its context leaves.
    pub available: Bytes,
}

/// How estimates are made and checked.
#[derive(Clone, Debug)]
pub struct Options {
    /// The rules of the estimate; [`Forecast::new`] are neap's own.
    pub rules: Rules,
    /// The class of GPU that the truths were made on.
    pub settings: Settings,
    /// The allocator's configuration; `None`: the one with which each truth was made.
    pub config: Option<Config>,
    /// The devices on which jobs are tried.
    pub devices: Vec<Device>,
}

/// Peaks over all iterations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Peaks {
    /// Bytes that the allocator takes from the device.
    pub reserved: Bytes,
    /// Bytes of blocks in use.
    pub allocated: Bytes,
}

/// One job tried on one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The device's memory in bytes.
    pub memory: Bytes,
    /// Bytes that its context leaves.
    pub available: Bytes,
    /// Whether the forecast runs out of memory on it.
    pub predicted_oom: bool,
    /// Whether the job itself runs out of memory on it.
    pub oom: bool,
    /// The job's cap in round two, without and with the margin: the estimate, or the device's bytes
    /// if these are fewer.
    pub caps: [Bytes; 2],
    /// Whether the job survives each cap.
    pub survives: [bool; 2],
}

/// Index of the figures without the margin.
pub const BARE: usize = 0;
/// Index of the figures with the margin.
pub const MARGIN: usize = 1;

impl Run {
    /// Whether the estimate failed. In round one it fails by a wrong verdict for the device. In
    /// round two, if the job fits, it fails when the job runs out of memory under its cap. `with`
    /// is [`BARE`] or [`MARGIN`].
    #[must_use]
    pub const fn fails(&self, with: usize) -> bool {
        self.predicted_oom != self.oom || !self.oom && !self.survives[with]
    }

    /// The bytes that using the estimate conserves: the paper's saved memory by Eq. 7 as printed,
    /// whose mean over runs is its MCP.
    ///
    /// A job that fits and survives its cap leaves the rest of the device to other jobs: its memory
    /// less context and cap, since the paper's estimate is of both. A job that is rightly turned
    /// away leaves the whole device. Any failure ([`Run::fails`]) costs the whole device.
    #[must_use]
    pub const fn conserved(&self, with: usize) -> i64 {
        if self.fails(with) { -(self.memory.0 as i64) } else { self.conserved_leniently(with) }
    }

    /// As [`Run::conserved`], except that a job that dies under its cap costs nothing. The paper's
    /// published analysis can also be read this way.
    #[must_use]
    pub const fn conserved_leniently(&self, with: usize) -> i64 {
        match (self.predicted_oom == self.oom, self.oom) {
            (false, _) => -(self.memory.0 as i64),
            (true, true) => self.memory.0 as i64,
            (true, false) if self.survives[with] => {
                self.available.0 as i64 - self.caps[with].0 as i64
            }
            (true, false) => 0,
        }
    }
}

/// The accuracy of one estimate.
#[derive(Clone, Debug)]
pub struct Score {
    /// The name of the pair.
    pub name: String,
    /// The model that the truth names, or else the pair's name.
    pub model: String,
    /// The job's real peaks.
    pub actual: Peaks,
    /// The estimated peaks.
    pub estimated: Peaks,
    /// The margin that is added to the reserved peak.
    pub margin: Bytes,
    /// The job's reserved peak when it is capped at the estimate: the paper's truth. `None` if it
    /// dies there, or without events.
    pub capped: Option<Bytes>,
    /// The tries, one for each device in the options' order; empty without events.
    pub runs: Vec<Run>,
    /// Time to read the trace and estimate, in nanoseconds of this machine.
    pub elapsed_ns: u64,
    /// Sentences about problems in the files.
    pub notes: Vec<String>,
}

impl Score {
    /// Relative error of the reserved peak; negative when the estimate is too low.
    #[must_use]
    pub fn reserved_error(&self) -> f64 {
        relative(self.estimated.reserved, self.actual.reserved)
    }

    /// Relative error of the estimate against the job's peak when it is capped at the estimate, or
    /// against its free peak if it dies there; `None` without events. Never negative in the first
    /// case.
    #[must_use]
    pub fn capped_error(&self) -> Option<f64> {
        let truth = self.capped.unwrap_or(self.actual.reserved);
        (!self.runs.is_empty()).then(|| relative(self.estimated.reserved, truth))
    }

    /// Relative error of the allocated peak.
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
    let truth = Truth::read(&pair.truth)?;
    let its: Config = truth
        .alloc_conf
        .parse()
        .map_err(|cause| ScoreError::Config { path: pair.truth.clone(), cause })?;
    let mut actual = Peaks { reserved: truth.reserved, allocated: truth.allocated };
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
                pair.name,
                replayed.reserved.0,
                replayed.allocated.0,
                actual.reserved.0,
                actual.allocated.0
            ));
        }
    } else if *config != its {
        return Err(bad("was made with another --alloc-conf and has no events to replay; leave --alloc-conf out".to_owned()));
    }

    let start = Instant::now();
    let job = Job::read(&pair.trace, &Limits::default())?;
    let mut forecast = (options.rules)(&job, &options.settings);
    let answer = answer(&job, &mut forecast, config);
    let elapsed_ns = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);

    let estimated =
        Peaks { reserved: answer.stats.peak_reserved, allocated: answer.stats.peak_allocated };
    let margin = answer.margin();
    let capped = events.as_ref().and_then(|events| {
        let outcome = replay(events, config, estimated.reserved, None);
        outcome.first_oom.is_none().then_some(outcome.stats.peak_reserved)
    });
    let runs = events.map_or_else(Vec::new, |events| {
        tries(&forecast.requests, &events, estimated.reserved, margin, config, &options.devices)
    });
    let model = truth
        .job
        .as_deref()
        .and_then(|j| j.split(':').next())
        .filter(|m| !m.is_empty())
        .unwrap_or(&pair.name);
    Ok(Score {
        name: pair.name.clone(),
        model: model.to_owned(),
        actual,
        estimated,
        margin,
        capped,
        runs,
        elapsed_ns,
        notes,
    })
}

/// The two rounds on each device.
fn tries(
    forecast: &[Request],
    events: &[Request],
    estimate: Bytes,
    margin: Bytes,
    config: &Config,
    devices: &[Device],
) -> Vec<Run> {
    let dies = |requests: &[Request], capacity: Bytes| {
        replay(requests, config, capacity, None).first_oom.is_some()
    };
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
/// The error of the first pair that can't be read.
pub fn score_all(pairs: &[Pair], options: &Options) -> Result<Vec<Score>, ScoreError> {
    in_parallel(pairs.len(), |i| score(&pairs[i], options)).into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const MIB: u64 = 1 << 20;

    fn device(gib: u64) -> Device {
        Device {
            name: format!("{gib}"),
            memory: Bytes(gib * GIB),
            available: Bytes((gib - 1) * GIB),
        }
    }

    fn sizes(all: &[u64]) -> Vec<Request> {
        all.iter()
            .enumerate()
            .map(|(id, b)| Request::Allocate { id: id as u32, bytes: Bytes(*b), stream: 0 })
            .collect()
    }

    /// A forecast of one block and a job of one block, on 8 and 12 GiB less 1 GiB of context.
    fn one(forecast: u64, actual: u64, margin: u64) -> Vec<Run> {
        let devices = [device(8), device(12)];
        tries(
            &sizes(&[forecast]),
            &sizes(&[actual]),
            Bytes(forecast),
            Bytes(margin),
            &Config::default(),
            &devices,
        )
    }

    #[test]
    fn an_estimate_that_is_enough_conserves_what_is_left() {
        let runs = one(4 * GIB, 3 * GIB, GIB);
        assert!(runs.iter().all(|r| !r.fails(BARE) && !r.fails(MARGIN)));
        assert_eq!(
            runs.iter().map(|r| r.conserved(BARE)).collect::<Vec<_>>(),
            [3, 7].map(|g| g * GIB as i64)
        );
        assert_eq!(
            runs.iter().map(|r| r.conserved(MARGIN)).collect::<Vec<_>>(),
            [2, 6].map(|g| g * GIB as i64)
        );
    }

    #[test]
    fn an_estimate_below_the_job_fails_its_second_round_and_the_margin_mends_it() {
        let runs = one(3 * GIB, 3 * GIB + 2 * MIB, 2 * MIB);
        assert!(runs.iter().all(|r| r.fails(BARE) && !r.fails(MARGIN)));
        assert_eq!(runs[0].conserved(BARE), -(8 * GIB as i64), "as Eq. 7 is printed");
        assert_eq!(runs[0].conserved_leniently(BARE), 0);
        let fate = Fate::new(&runs);
        assert_eq!((fate.mcp(BARE), fate.lenient_mcp(BARE)), (Some(-(10 * GIB as i64)), Some(0)));
        assert_eq!(runs[0].conserved(MARGIN), (4 * GIB - 2 * MIB) as i64);
    }

    #[test]
    fn a_wrong_verdict_costs_the_device_and_a_right_refusal_frees_it() {
        // 9 GiB estimated, 3 needed: the small device is refused without need.
        let runs = one(9 * GIB, 3 * GIB, 0);
        assert_eq!((runs[0].fails(BARE), runs[0].conserved(BARE)), (true, -(8 * GIB as i64)));
        assert_eq!((runs[1].fails(BARE), runs[1].conserved(BARE)), (false, 2 * GIB as i64));
        // 3 GiB estimated, 9 needed: the job dies where it was admitted.
        let runs = one(3 * GIB, 9 * GIB, 0);
        assert_eq!((runs[0].fails(MARGIN), runs[0].conserved(MARGIN)), (true, -(8 * GIB as i64)));
        // Both too large for the small device.
        let runs = one(9 * GIB, 9 * GIB, 0);
        assert_eq!((runs[0].fails(BARE), runs[0].conserved(BARE)), (false, 8 * GIB as i64));
        let fate = Fate::new(&runs);
        assert_eq!((fate.failure(BARE), fate.mcp(BARE)), (Some(0.0), Some(5 * GIB as i64)));
        assert_eq!(Fate::new([]).mcp(MARGIN), None);
    }

    #[test]
    fn a_cap_never_exceeds_the_device() {
        let runs = one(7 * GIB, 7 * GIB, GIB);
        assert_eq!(runs[0].caps, [Bytes(7 * GIB); 2]);
        assert_eq!(runs[1].caps, [Bytes(7 * GIB), Bytes(8 * GIB)]);
        assert!(!runs[0].fails(MARGIN));
    }
}
