//! How long requests to inference jobs take. Each request is one iteration, and a lane runs one at
//! a time.
//!
//! The gaps between requests are drawn uniformly from 0 to twice the mean, in integers from a
//! seeded generator, so that runs repeat on any machine. Iterations are slowed by the mean slowdown
//! of the device while the job was served.

use rand_core::Rng;
use rand_pcg::Pcg64;

use super::jobs::Job;
use super::mechanism::Mechanism;
use super::result::JobResult;
use crate::noise::percentile;
use crate::units::{Nanos, saturated};

/// The latencies of the requests to one job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Latency {
    /// The job's position in the trace.
    pub job: usize,
    /// Number of requests.
    pub requests: usize,
    /// Mean latency.
    pub mean: Nanos,
    /// 99th percentile, by nearest rank.
    pub p99: Nanos,
}

/// The most requests that are simulated for a trace. Each job gets its share of them.
const MOST: usize = 4_000_000;

/// The latencies of all inference jobs that were served.
#[must_use]
pub fn latencies(jobs: &[Job], results: &[JobResult], mechanism: Mechanism) -> Vec<Latency> {
    let served = |(index, (job, result)): (usize, (&Job, &JobResult))| {
        Some((index, job.rate?, result.start?.0, result.end.0))
    };
    let served: Vec<(usize, u64, u64, u64)> =
        jobs.iter().zip(results).enumerate().filter_map(served).collect();
    let mut requests: Vec<(u64, usize)> = Vec::new();
    for (place, &(index, rate, start, end)) in served.iter().enumerate() {
        let mut random = Pcg64::new(index as u128, 7);
        // The rate is in requests per thousand seconds.
        let gap = 1_000_000_000_000 / rate.max(1);
        let mut at = start;
        for _ in 0..MOST / served.len() {
            at = at.saturating_add(random.next_u64() % (2 * gap + 1));
            if at >= end {
                break;
            }
            requests.push((at, place));
        }
    }
    requests.sort_unstable();
    // When each server is free: one lane for all jobs, or one process each.
    let mut free = vec![0u64; served.len()];
    let mut times: Vec<Vec<Nanos>> = vec![Vec::new(); served.len()];
    for (at, place) in requests {
        let index = served[place].0;
        let lane = if mechanism == Mechanism::Lanes { 0 } else { place };
        let service =
            u128::from(jobs[index].iteration.0) * u128::from(results[index].dilation) / 1000;
        free[lane] = free[lane].max(at).saturating_add(saturated(service));
        times[place].push(Nanos(free[lane] - at));
    }
    let summed = |(&(job, ..), mut all): (&(usize, _, _, _), Vec<Nanos>)| {
        all.sort_unstable();
        let sum: u128 = all.iter().map(|t| u128::from(t.0)).sum();
        let mean = Nanos(saturated(sum / all.len().max(1) as u128));
        Latency { job, requests: all.len(), mean, p99: percentile(&all, 99) }
    };
    served.iter().zip(times).map(summed).collect()
}
