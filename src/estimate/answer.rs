//! Replays a forecast through the allocator: its peaks, the smallest device that is enough, and the
//! blocks alive at the peak.

use std::collections::BTreeMap;

use super::forecast::{Forecast, Job};
use super::roles::Role;
use crate::sim::allocator::replay::{self, LARGEST_DEVICE, Replay, smallest_capacity};
use crate::sim::allocator::{Config, Stats};
use crate::sim::requests::Request;
use crate::units::Bytes;

/// The fewest iterations that are replayed; the last one is repeated if a trace has fewer.
const ITERATIONS: usize = 3;
/// The most iterations that are added until the reserved bytes no longer grow.
const MORE: usize = 5;

/// The margin added to an estimate, in thousandths of the peak. It covers the errors that were
/// measured; the README names the jobs.
pub const MARGIN_PER_MILLE: u64 = 30;

/// The answer for one allocator configuration, on a device that is never full.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Counters at the end, and peaks.
    pub stats: Stats,
    /// Counters when the allocated bytes first reached their peak.
    pub at_peak: Stats,
    /// The index of the request after which that was.
    pub peak_index: usize,
    /// Ids of the blocks alive then, in order.
    pub alive: Vec<u32>,
    /// Requested bytes of the blocks alive then, by role.
    pub by_role: BTreeMap<Role, u64>,
    /// The largest reserved and allocated bytes of each iteration. The first entry is the time
    /// before the first iteration.
    pub iterations: Vec<(Bytes, Bytes)>,
    /// How many of these iterations the trace itself contains.
    pub recorded: usize,
    /// Whether the last iteration reserved no more than the one before it.
    pub steady: bool,
    /// The least capacity at which no request fails. `None` if no device is large enough, or if it
    /// was not searched for ([`peaks`]).
    pub smallest: Option<Bytes>,
}

/// Whether a job runs on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// It fits, with the margin.
    Fits,
    /// It fits only without the margin, or only because the allocator gives cached memory back.
    Tight,
    /// It does not fit: a request fails.
    DoesNotFit,
}

impl Verdict {
    /// The verdict as text, for tables and `--json`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fits => "fits",
            Self::Tight => "tight",
            Self::DoesNotFit => "does not fit",
        }
    }
}

impl Answer {
    /// The peak plus its margin.
    #[must_use]
    pub fn wanted(&self) -> Bytes {
        self.stats.peak_reserved + self.margin()
    }

    /// The verdict for a device with `available` bytes. `forecast` must be the one that this
    /// answers.
    #[must_use]
    pub fn verdict(&self, forecast: &Forecast, config: &Config, available: Bytes) -> Verdict {
        if self.stats.ooms > 0 {
            return Verdict::DoesNotFit;
        }
        // A memory fraction is at most 1.
        #[expect(clippy::cast_possible_truncation, reason = "a float saturates")]
        let share = |f| Bytes((available.0 as f64 * f) as u64);
        let limit = config.memory_fraction.map_or(available, share);
        if self.wanted() <= limit {
            return Verdict::Fits;
        }
        match replay::replay(&forecast.requests, config, available, None).first_oom {
            None => Verdict::Tight,
            Some(_) => Verdict::DoesNotFit,
        }
    }

    /// The iteration of the allocated peak, from 1; 0 before the first iteration.
    #[must_use]
    pub fn peak_iteration(&self, forecast: &Forecast) -> usize {
        forecast.starts.partition_point(|&s| s <= self.peak_index)
    }

    /// The bytes to add to the peak for safety.
    #[must_use]
    pub fn margin(&self) -> Bytes {
        const MIB: u64 = 1 << 20;
        Bytes((self.stats.peak_reserved.0 * MARGIN_PER_MILLE / 1000).next_multiple_of(MIB))
    }
}

/// Replays `forecast`, and repeats its last iteration until the reserved bytes no longer grow.
#[must_use]
pub fn answer(job: &Job, forecast: &mut Forecast, config: &Config) -> Answer {
    let mut answer = peaks(job, forecast, config);
    answer.smallest = smallest_capacity(&forecast.requests, config, None).map(|s| s.capacity);
    answer
}

/// As [`answer()`], without the search for the smallest capacity, which takes most of the time.
#[must_use]
pub fn peaks(job: &Job, forecast: &mut Forecast, config: &Config) -> Answer {
    let recorded = forecast.starts.len();
    let mut missing = ITERATIONS.saturating_sub(recorded);
    let mut answer = replay(forecast, config);
    let original = forecast.clone();
    for _ in 0..MORE {
        if missing == 0 && answer.steady {
            break;
        }
        let more = missing.max(forecast.starts.len().saturating_sub(recorded) + 1);
        missing = 0;
        *forecast = original.clone();
        forecast.repeat(&job.phases, more);
        if forecast.starts.len() <= recorded {
            break;
        }
        answer = replay(forecast, config);
    }
    answer.recorded = recorded;
    answer
}

fn replay(forecast: &Forecast, config: &Config) -> Answer {
    let mut replay = Replay::new(config, LARGEST_DEVICE, None);
    let mut iterations = vec![(Bytes::ZERO, Bytes::ZERO); forecast.starts.len() + 1];
    let mut at = 0;
    let (mut at_peak, mut peak_index) = (Stats::default(), 0);
    for (index, &request) in forecast.requests.iter().enumerate() {
        while at < forecast.starts.len() && forecast.starts[at] <= index {
            at += 1;
        }
        replay.step(request);
        let stats = replay.allocator().stats();
        if stats.allocated > at_peak.allocated {
            (at_peak, peak_index) = (*stats, index);
        }
        let (reserved, allocated) = &mut iterations[at];
        *reserved = (*reserved).max(stats.reserved);
        *allocated = (*allocated).max(stats.allocated);
    }
    let mut alive = std::collections::BTreeSet::new();
    for request in forecast.requests.iter().take(peak_index + 1) {
        match *request {
            Request::Allocate { id, .. } => {
                alive.insert(id);
            }
            Request::Free { id } => {
                alive.remove(&id);
            }
            Request::EmptyCache => {}
        }
    }
    let mut by_role = BTreeMap::new();
    for &id in &alive {
        let block = forecast.blocks[id as usize];
        let bytes: &mut u64 = by_role.entry(block.role).or_default();
        *bytes = bytes.saturating_add(block.bytes);
    }
    let highest = |upto: usize| iterations[..upto].iter().map(|i| i.0).max().unwrap_or_default();
    let steady =
        iterations.len() >= 2 && highest(iterations.len()) == highest(iterations.len() - 1);
    Answer {
        stats: replay.report().stats,
        at_peak,
        peak_index,
        alive: alive.into_iter().collect(),
        by_role,
        iterations,
        recorded: forecast.starts.len(),
        steady,
        smallest: None,
    }
}
