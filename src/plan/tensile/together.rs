//! TENSILE for several jobs: one search over all jobs' tensors and one link.
//!
//! The jobs' iterations are not aligned, so the paper plans against the sum of the jobs' peaks.
//! Each round takes the largest tensor at any job's peak (the paper's memory peak tensors of all
//! jobs) that can be swapped in time. No copy may be at a time when another job's copy has the
//! link. That holds for iterations that begin together: in a job's iteration, the copies of a
//! shorter job come as often as its iterations do, and those of a longer one are folded. Jobs of
//! different lengths drift apart, which the paper does not treat either.
//!
//! Each job keeps its own limit on the tensors that it swaps, and the paper's max swapping rate:
//! while other jobs swap too few, it swaps none more.

use std::cmp::Reverse;

use super::{Options, STOP_AFTER, STOP_WINDOW, Scheduled, Search};
use crate::planner::{Decision, Given};
use crate::units::TensorId;

/// The most iterations of a short job that are looked at within one of a long job. Later ones are
/// left out, since the jobs have drifted apart by then.
const REPEATS: u64 = 1000;

/// Decides for all jobs until the sum of their peaks is at most `target`, or nothing more can be
/// done. A job's own target is ignored.
pub(crate) fn together(given: &[Given<'_>], options: &[Options], target: u64) -> Vec<Decision> {
    let mut all = All {
        searches: given.iter().zip(options).map(|(given, o)| Search::new(given, o)).collect(),
    };
    all.rounds(target);
    for index in 0..all.searches.len() {
        let search = &mut all.searches[index];
        if search.options.prefetch {
            // No slot may exceed the job's present peak.
            let peak = search.residencies.load.peak().1;
            search.widen_passive(peak);
            all.share(index);
        }
    }
    let decided = |search: &Search<'_, '_>| {
        Decision::new(&search.residencies, search.residencies.load.peak().1)
    };
    all.searches.iter().map(decided).collect()
}

/// A tensor that is idle at its job's peak: the job, the tensor and its gap.
type Idle = (usize, TensorId, usize);

struct All<'a, 'o> {
    searches: Vec<Search<'a, 'o>>,
}

impl All<'_, '_> {
    /// The slot of each job's peak, and its bytes.
    fn peaks(&self) -> Vec<(u32, u64)> {
        let peak = |search: &Search<'_, '_>| {
            let (slot, load) = search.residencies.load.peak();
            (u32::try_from(slot).unwrap_or(u32::MAX), load)
        };
        self.searches.iter().map(peak).collect()
    }

    fn rounds(&mut self, target: u64) {
        let first = sum(&self.peaks());
        // A job's part of the target, by which the stop rule counts what is left to do.
        let part = |load: u64| {
            let part = u128::from(target) * u128::from(load) / u128::from(first.max(1));
            u64::try_from(part).unwrap_or(u64::MAX)
        };
        let parts: Vec<u64> = self.peaks().into_iter().map(|(_, load)| part(load)).collect();
        let mut excess: Vec<u128> = Vec::new();
        let mut in_time = self.searches.iter().any(|search| search.options.swap);
        loop {
            let peaks = self.peaks();
            if sum(&peaks) <= target {
                return;
            }
            if in_time && self.searches.iter().all(|search| search.options.stop_rule) {
                let of = |(search, part): (&Search<'_, '_>, &u64)| search.excess(*part);
                excess.push(self.searches.iter().zip(&parts).map(of).sum());
                if excess.len() > STOP_AFTER {
                    let last = excess.len() - 1;
                    let (before, now) = (excess[last - STOP_WINDOW], excess[last]);
                    in_time = before.saturating_sub(now) * 2000 >= before;
                }
            }
            let large = self.idle(&peaks, true);
            if in_time && self.swap_in_time(&peaks, &large, target) {
                continue;
            }
            if !self.relieve(&peaks, &large) {
                let small = self.idle(&peaks, false);
                if !self.relieve(&peaks, &small) {
                    return;
                }
            }
        }
    }

    /// What is idle at its job's peak, of all jobs, the largest first.
    fn idle(&self, peaks: &[(u32, u64)], large: bool) -> Vec<Idle> {
        let mut all: Vec<Idle> = Vec::new();
        for (index, search) in self.searches.iter().enumerate() {
            let among = if large { &search.large } else { &search.small };
            let found = search.at_peak(peaks[index].0, among);
            all.extend(found.into_iter().map(|(tensor, gap)| (index, tensor, gap)));
        }
        let bytes = |&(index, tensor, _): &Idle| {
            self.searches[index].residencies.lifetimes[tensor.index()].bytes
        };
        all.sort_by_key(|idle| (Reverse(bytes(idle)), *idle));
        all
    }

    fn swap_in_time(&mut self, peaks: &[(u32, u64)], idle: &[Idle], target: u64) -> bool {
        let mut any = false;
        for &(index, tensor, gap) in idle {
            let load = |(search, peak): (&Search<'_, '_>, &(u32, u64))| {
                search.residencies.load.at(peak.0 as usize)
            };
            if self.searches.iter().zip(peaks).map(load).sum::<u64>() <= target {
                break;
            }
            let within = self.keeps_part(index, tensor);
            let search = &mut self.searches[index];
            if within
                && search.options.swap
                && search.may_swap(tensor, gap)
                && search.try_swap(tensor, gap, Some(peaks[index].0))
            {
                search.remaining_gaps(tensor, gap);
                self.share(index);
                any = true;
            }
        }
        any
    }

    /// Frees bytes if no swap in time does: recomputes what frees most bytes per second of all
    /// jobs' tensors, then swaps the largest passively.
    fn relieve(&mut self, peaks: &[(u32, u64)], idle: &[Idle]) -> bool {
        let mut ranked = Vec::new();
        let mut order: Vec<usize> = Vec::new();
        for &(index, ..) in idle {
            if order.contains(&index) {
                continue;
            }
            order.push(index);
            let search = &self.searches[index];
            if search.options.recompute {
                let found = search.by_msps(peaks[index].0, &of_job(idle, index));
                ranked.extend(found.into_iter().map(|(msps, t, gap)| (msps, index, t, gap)));
            }
        }
        ranked.sort_by_key(|&(msps, index, tensor, gap)| (Reverse(msps), index, tensor, gap));
        let recomputed = ranked.into_iter().any(|(_, index, tensor, gap)| {
            self.searches[index].try_recompute(tensor, gap, peaks[index].1)
        });
        recomputed
            || order.into_iter().any(|index| {
                let mut own = of_job(idle, index);
                own.retain(|&(tensor, _)| self.keeps_part(index, tensor));
                let search = &mut self.searches[index];
                search.options.passive
                    && search.options.swap
                    && search.swap_passively(peaks[index].0, &own)
            })
    }

    /// Whether a job may swap a tensor without being above its part of all tensors swapped. It is
    /// above by less than one tensor, so that someone can begin.
    fn keeps_part(&self, index: usize, tensor: TensorId) -> bool {
        let search = &self.searches[index];
        let all: usize = self.searches.iter().map(|search| search.swapped_count).sum();
        let part = search.options.max_swap_part as usize;
        search.swapped[tensor.index()] || (part > 0 && search.swapped_count * 100 <= part * all)
    }

    /// Makes the link busy for all other jobs while it carries the copies that a job scheduled.
    fn share(&mut self, of: usize) {
        let copies = std::mem::take(&mut self.searches[of].scheduled);
        let period = self.searches[of].clock.total.max(1);
        for (index, search) in self.searches.iter_mut().enumerate() {
            if index == of {
                continue;
            }
            let own = search.clock.total.max(1);
            for copy in &copies {
                for lane in search.lanes(copy.direction) {
                    for (start, length) in seen(copy, period, own) {
                        lane.cover(start, length);
                    }
                }
            }
        }
    }
}

/// When another job's copy has the link, within an iteration of `own` nanoseconds that begins
/// together with one of `period`.
fn seen(copy: &Scheduled, period: u64, own: u64) -> Vec<(u64, u64)> {
    let mut all = Vec::new();
    for time in 0..own.div_ceil(period).min(REPEATS) {
        // What is later than this iteration is in one of the next.
        let start = (time * period).saturating_add(copy.start) % own;
        let length = copy.length.min(own);
        let within = length.min(own - start);
        all.push((start, within));
        if length > within {
            all.push((0, length - within));
        }
    }
    all
}

fn sum(peaks: &[(u32, u64)]) -> u64 {
    peaks.iter().map(|(_, load)| load).fold(0, |all, load| all.saturating_add(*load))
}

/// The tensors of one job.
fn of_job(idle: &[Idle], job: usize) -> Vec<(TensorId, usize)> {
    let own = idle.iter().filter(|(index, ..)| *index == job);
    own.map(|&(_, tensor, gap)| (tensor, gap)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::program::Direction;

    fn copy(start: u64, length: u64) -> Scheduled {
        Scheduled { direction: Direction::D2h, start, length }
    }

    #[test]
    fn a_shorter_jobs_copies_come_again_and_a_longer_ones_are_folded() {
        assert_eq!(seen(&copy(10, 5), 100, 100), [(10, 5)]);
        assert_eq!(seen(&copy(10, 5), 50, 120), [(10, 5), (60, 5), (110, 5)]);
        assert_eq!(seen(&copy(130, 5), 200, 100), [(30, 5)]);
        assert_eq!(seen(&copy(98, 5), 200, 100), [(98, 2), (0, 3)]);
        assert_eq!(seen(&copy(98, 500), 600, 100), [(98, 2), (0, 98)]);
    }
}
