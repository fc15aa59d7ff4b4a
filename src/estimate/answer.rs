//! What the allocator makes of one forecast: its peaks, the smallest device that is enough, and the
//! blocks that stand at the peak.

use std::collections::BTreeMap;

use super::forecast::{Forecast, Job};
use super::roles::Role;
use crate::sim::allocator::replay::{self, LARGEST_DEVICE, Replay, smallest_capacity};
use crate::sim::allocator::{Config, Stats};
use crate::sim::requests::Request;
use crate::units::Bytes;

/// Iterations that are replayed even where a trace has fewer.
const ITERATIONS: usize = 3;
/// Iterations more, at most, until what is reserved no longer grows.
const MORE: usize = 5;

/// The margin that covers what estimates were seen to miss, in thousandths of the peak. See the
/// README for the jobs.
pub const MARGIN_PER_MILLE: u64 = 30;

/// The answer for one configuration, on a device that is never full.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Counters and peaks.
    pub stats: Stats,
    /// Counters when what is allocated was first at its peak.
    pub at_peak: Stats,
    /// The request after which that was.
    pub peak_index: usize,
    /// Ids alive then, in order.
    pub alive: Vec<u32>,
    /// Bytes alive then, by role, as requested.
    pub by_role: BTreeMap<Role, u64>,
    /// What is reserved and allocated at most, by iteration; the first entry is what stood before.
    pub iterations: Vec<(Bytes, Bytes)>,
    /// Of those, how many the trace itself has.
    pub recorded: usize,
    /// Whether the last iteration reserved no more than the one before.
    pub steady: bool,
    /// The least capacity with which no request fails; none where no device is large enough, or
    /// where it was not searched for ([`peaks`]).
    pub smallest: Option<Bytes>,
}

/// Whether a job runs on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// With the margin.
    Fits,
    /// Without the margin, or only because the allocator gives cached memory back.
    Tight,
    /// A request fails.
    DoesNotFit,
}

impl Verdict {
    /// For people and for programs.
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
    /// The peak and its margin.
    #[must_use]
    pub fn wanted(&self) -> Bytes {
        self.stats.peak_reserved + self.margin()
    }

    /// Whether the forecast that this is the answer to runs where `available` bytes are to be had.
    #[must_use]
    pub fn verdict(&self, forecast: &Forecast, config: &Config, available: Bytes) -> Verdict {
        if self.stats.ooms > 0 {
            return Verdict::DoesNotFit;
        }
        // A fraction is never above 1.
        let limit =
            config.memory_fraction.map_or(available, |f| Bytes((available.0 as f64 * f) as u64));
        if self.wanted() <= limit {
            return Verdict::Fits;
        }
        match replay::replay(&forecast.requests, config, available, None).first_oom {
            None => Verdict::Tight,
            Some(_) => Verdict::DoesNotFit,
        }
    }

    /// The iteration in which what is allocated was at its peak, from 1; 0 before the first.
    #[must_use]
    pub fn peak_iteration(&self, forecast: &Forecast) -> usize {
        forecast.starts.partition_point(|&s| s <= self.peak_index)
    }

    /// What to add to the peak for safety.
    #[must_use]
    pub fn margin(&self) -> Bytes {
        const MIB: u64 = 1 << 20;
        Bytes((self.stats.peak_reserved.0 * MARGIN_PER_MILLE / 1000).next_multiple_of(MIB))
    }
}

/// Replays `forecast`, adding iterations like the last until what is reserved no longer grows.
#[must_use]
pub fn answer(job: &Job, forecast: &mut Forecast, config: &Config) -> Answer {
    let mut answer = peaks(job, forecast, config);
    answer.smallest = smallest_capacity(&forecast.requests, config, None).map(|s| s.capacity);
    answer
}

/// As [`answer()`], without the search for the smallest capacity, which takes most of its time.
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
