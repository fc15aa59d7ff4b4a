//! Several jobs beside each other on one device for some iterations each, and how long a round of
//! them takes.
//!
//! Plans for several jobs are compared by such rounds. Each job runs on its own clock and their
//! alignment is not known, so a [`Round`] takes the mean of two alignments: all jobs start at once,
//! or their starts are evenly staggered. Jobs with shorter iterations run more of them, so that all
//! jobs are busy for about as long. [`super::beside`] simulates the device.

use super::beside::{Carried, Shared, WHOLE, Waited, Work};
use super::engine::{self, Deadlock, Durations, Run};
use super::program::{Direction, Program};
use crate::device::Link;
use crate::units::{Bytes, Nanos};

/// A job's iteration under its plan.
pub type Under<'a> = Work<&'a Program, &'a Durations>;

/// A job, when it starts and how many iterations it runs.
#[derive(Clone, Copy, Debug)]
pub struct Side<'a> {
    /// What it runs.
    pub work: Under<'a>,
    /// When it starts.
    pub start: Nanos,
    /// How many iterations it runs.
    pub iterations: u32,
}

/// What happened in a simulation.
#[derive(Clone, Debug, Default)]
pub struct Course {
    /// For each job, the start and the run of each iteration.
    pub runs: Vec<Vec<(Nanos, Run)>>,
    /// Every copy, in order of its end.
    pub carried: Vec<Carried>,
    /// Every wait for the window that took time, in order of its end.
    pub waited: Vec<Waited>,
    /// When the last job ended.
    pub end: Nanos,
}

/// Runs all jobs to their ends.
///
/// # Errors
/// When a job's items wait for each other in a circle, which the checker excludes.
pub fn run(sides: &[Side<'_>], link: &Link) -> Result<Course, Deadlock> {
    let mut device = Shared::new(link);
    let mut runs: Vec<Vec<(Nanos, Run)>> = vec![Vec::new(); sides.len()];
    let mut coming: Vec<usize> = (0..sides.len()).filter(|&j| sides[j].iterations > 0).collect();
    // Popped from the back: the job that starts first is last.
    coming.sort_by_key(|&job| std::cmp::Reverse((sides[job].start, job)));
    loop {
        while let Some(&job) = coming.last()
            && sides[job].start <= device.now()
        {
            device.begin(job, sides[job].work);
            coming.pop();
        }
        let limit = coming.last().map_or(Nanos(u64::MAX), |&job| sides[job].start);
        let Some((job, run)) = device.until(limit)? else {
            if coming.is_empty() {
                break;
            }
            continue;
        };
        runs[job].push((device.now() - run.iteration, run));
        if runs[job].len() < sides[job].iterations as usize {
            device.begin(job, sides[job].work);
        }
    }
    let end = device.now();
    Ok(Course { runs, carried: device.carried, waited: device.waited, end })
}

/// Resident bytes of all jobs together over time. Between its iterations a job keeps the tensors
/// that stay round their end. After its last iteration it holds nothing.
#[must_use]
pub fn memory(programs: &[&Program], runs: &[Vec<(Nanos, Run)>]) -> Vec<(Nanos, Bytes)> {
    let mut changes: Vec<(Nanos, i64)> = Vec::new();
    for (program, runs) in programs.iter().zip(runs) {
        let mut level = 0;
        for (start, run) in runs {
            let mut points = engine::memory(program, run);
            points.retain(|point| point.0 < run.iteration);
            for (at, bytes) in points {
                let bytes = bytes.0.cast_signed();
                changes.push((*start + at, bytes - level));
                level = bytes;
            }
        }
        let end = runs.last().map_or(Nanos::ZERO, |(start, run)| *start + run.iteration);
        changes.push((end, -level));
    }
    engine::curve(changes)
}

/// The number of pairs of copies that use the same direction of the link at the same time. It must
/// be 0: this checks a simulation by the start and end of each copy alone.
#[must_use]
pub fn overlaps(carried: &[Carried]) -> usize {
    let mut found = 0;
    for direction in [Direction::H2d, Direction::D2h] {
        let mut copies: Vec<(Nanos, Nanos)> =
            carried.iter().filter(|c| c.direction == direction).map(|c| (c.start, c.end)).collect();
        copies.sort_unstable();
        for (index, copy) in copies.iter().enumerate() {
            let meet = copies[index + 1..].iter().take_while(|next| next.0 < copy.1);
            found += meet.filter(|next| next.0 < next.1).count();
        }
    }
    found
}

/// How many iterations the job with the longest iteration runs.
pub const ROUNDS: u32 = 4;

/// The most iterations that a job runs for one iteration of the longest job.
const OFTEN: u64 = 4;

/// Some iterations of every job.
#[derive(Clone, Debug)]
pub struct Round {
    /// Time for one iteration of the longest job and those of the other jobs beside it: the mean of
    /// all alignments.
    pub time: Nanos,
    /// The course of each alignment.
    pub courses: Vec<Course>,
}

/// Simulates a round of jobs under both alignments: staggered, and all at once. A `short` one takes
/// an eighth of the time: the job with the longest iteration runs one, and starts are staggered.
/// With each job comes the time of its iteration alone and without a plan. It fixes how many
/// iterations run and when they start, so that rounds of different plans of the same jobs are
/// comparable.
///
/// # Errors
/// As [`run`].
pub fn round(jobs: &[(Under<'_>, Nanos)], link: &Link, short: bool) -> Result<Round, Deadlock> {
    let mut sides = staggered(jobs, if short { 1 } else { ROUNDS });
    let staggered = run(&sides, link)?;
    if short {
        return Ok(Round { time: staggered.end, courses: vec![staggered] });
    }
    for side in &mut sides {
        side.start = Nanos::ZERO;
    }
    let at_once = run(&sides, link)?;
    let time = Nanos(at_once.end.0.saturating_add(staggered.end.0) / (2 * u64::from(ROUNDS)));
    Ok(Round { time, courses: vec![at_once, staggered] })
}

/// Each job's iterations, and its start.
fn staggered<'a>(jobs: &[(Under<'a>, Nanos)], rounds: u32) -> Vec<Side<'a>> {
    let longest = jobs.iter().map(|(_, own)| own.0).max().unwrap_or(0);
    let wanted: u64 = jobs.iter().map(|(work, _)| u64::from(work.utilisation)).sum();
    // All jobs are slowed by this ratio while all compute; their starts are spread over that time.
    let slowed = u128::from(wanted.max(u64::from(WHOLE)));
    let spread = u128::from(WHOLE) * jobs.len().max(1) as u128;
    let mut sides = Vec::with_capacity(jobs.len());
    let mut start = 0u64;
    for &(work, Nanos(own)) in jobs {
        let often = (longest.saturating_add(own / 2) / own.max(1)).clamp(1, OFTEN);
        let iterations = rounds.saturating_mul(u32::try_from(often).unwrap_or(1));
        sides.push(Side { work, start: Nanos(start), iterations });
        let after = u64::try_from(u128::from(own) * slowed / spread);
        start = start.saturating_add(after.unwrap_or(u64::MAX / 4));
    }
    sides
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_copies_are_counted() {
        let copy = |direction, start, end| Carried {
            job: 0,
            direction,
            start: Nanos(start),
            end: Nanos(end),
        };
        let (up, down) = (Direction::H2d, Direction::D2h);
        assert_eq!(overlaps(&[copy(up, 0, 5), copy(down, 0, 5), copy(up, 5, 9)]), 0);
        assert_eq!(
            overlaps(&[copy(up, 0, 5), copy(up, 4, 9), copy(up, 3, 8), copy(down, 5, 6)]),
            3
        );
    }
}
