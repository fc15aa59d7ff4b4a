//! Several jobs on one device. Nothing is known of the phases of their iterations, so they may
//! share nothing but the window, which they hold in turn.

use super::refusal::Refusal;
use super::{Proved, Refusals};
use crate::contract::plan::Figures;
use crate::job::Graph;
use crate::units::{Bytes, Nanos, saturated};

/// Checks that no byte of the arena or the pinned pool belongs to two jobs.
pub(super) fn apart(graphs: &[Graph], jobs: &[Proved], refusals: &mut Refusals) {
    let name = |job: usize| format!("job {job} (`{}`)", graphs[job].name);
    let windows: Vec<(usize, (u128, u128))> =
        jobs.iter().enumerate().filter_map(|(job, found)| Some((job, found.window?))).collect();
    for pair in windows.windows(2).filter(|pair| pair[0].1 != pair[1].1) {
        refusals.add(Refusal::WindowsDiffer { first: name(pair[0].0), second: name(pair[1].0) });
    }
    for (memory, of_arena) in [("the arena", true), ("the pinned pool", false)] {
        let mut all: Vec<(u128, u128, usize)> = Vec::new();
        for (job, found) in jobs.iter().enumerate() {
            // Other jobs' bytes may not be in a window, just as they may not be in a job's own
            // part. One job stands for all jobs that share the window.
            if of_arena && windows.first().is_some_and(|first| first.0 == job) {
                all.extend(found.window.map(|(start, end)| (start, end, job)));
            }
            all.extend(
                union(if of_arena { &found.arena } else { &found.pinned })
                    .into_iter()
                    .map(|(start, end)| (start, end, job)),
            );
        }
        all.sort();
        // A job's own ranges are disjoint, so if any two ranges overlap, two neighbours do.
        for pair in all.windows(2).filter(|pair| pair[1].0 < pair[0].1) {
            refusals.add(Refusal::JobsOverlap {
                first: name(pair[0].2),
                second: name(pair[1].2),
                memory,
                offset: saturated(pair[1].0),
            });
        }
    }
}

/// The union of ranges, as disjoint ranges.
fn union(ranges: &[(u128, u128)]) -> Vec<(u128, u128)> {
    let mut sorted: Vec<(u128, u128)> =
        ranges.iter().copied().filter(|(start, end)| start < end).collect();
    sorted.sort();
    let mut apart: Vec<(u128, u128)> = Vec::new();
    for (start, end) in sorted {
        match apart.last_mut() {
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => apart.push((start, end)),
        }
    }
    apart
}

/// The bytes and times of all jobs together; `None` on overflow.
pub(super) fn figures(jobs: &[Proved]) -> Option<Figures> {
    let sum = |of: fn(&Figures) -> u64| {
        jobs.iter().try_fold(0u64, |sum, job| sum.checked_add(of(&job.figures)))
    };
    let most = |of: fn(&Figures) -> u64| jobs.iter().map(|job| of(&job.figures)).max();
    let own = jobs.iter().try_fold(0u64, |sum, job| sum.checked_add(job.peaks[0].0))?;
    let held = jobs.iter().map(|job| job.peaks[1].0).max()?;
    Some(Figures {
        // The window counts once, for the job with the most in it. The peak is at most the sum of
        // peaks.
        peak_bytes: Bytes(sum(|f| f.peak_bytes.0)?.min(own.checked_add(held)?)),
        arena_bytes: Bytes(most(|f| f.arena_bytes.0)?),
        pinned_bytes: Bytes(most(|f| f.pinned_bytes.0)?),
        iteration_ns: Nanos(sum(|f| f.iteration_ns.0)?),
        first_iteration_ns: Nanos(sum(|f| f.first_iteration_ns.0)?),
        unplanned_peak_bytes: Bytes(sum(|f| f.unplanned_peak_bytes.0)?),
        unplanned_iteration_ns: Nanos(sum(|f| f.unplanned_iteration_ns.0)?),
    })
}
