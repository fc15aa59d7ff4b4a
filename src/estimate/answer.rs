//! What the allocator makes of a forecast: peaks, the least device, what stands at the peak.
//!
//! For: one forecast, one configuration. Not for: printing.

use std::collections::BTreeMap;

use super::forecast::{Forecast, Job};
use super::roles::Role;
use crate::sim::allocator::replay::{LARGEST_DEVICE, Replay, smallest_capacity};
use crate::sim::allocator::{Config, Stats};
use crate::sim::requests::Request;
use crate::units::Bytes;

/// Iterations that are replayed even where a trace has fewer.
const ITERATIONS: usize = 3;
/// Iterations more, at most, until what is reserved no longer grows.
const MORE: usize = 5;

/// The margin that covers what estimates were seen to miss, in thousandths of the peak. See the README for the jobs.
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
    /// The least capacity with which no request fails.
    pub smallest: Option<Bytes>,
}

impl Answer {
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
    answer.smallest = smallest_capacity(&forecast.requests, config, None).map(|s| s.capacity);
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
        *by_role.entry(block.role).or_default() += block.bytes;
    }
    let highest = |upto: usize| iterations[..upto].iter().map(|i| i.0).max().unwrap_or_default();
    let steady = iterations.len() >= 2 && highest(iterations.len()) == highest(iterations.len() - 1);
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
