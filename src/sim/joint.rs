//! Several jobs side by side on one device for some iterations each, and how long a round of them
//! takes.
//!
//! This is what a plan of several jobs comes to. Each job runs on its own clock and their alignment
//! is not known, so a [`Round`] takes the mean of two alignments: all at once, and evenly
//! staggered. Jobs with shorter iterations run more of them, so that all are busy for about as
//! long. [`super::together`] is the device.

use super::engine::{self, Deadlock, Durations, Run};
use super::program::{Direction, Program};
use super::together::{Carried, Shared, WHOLE, Work};
use crate::device::Link;
use crate::units::{Bytes, Nanos};

/// A job and what it does.
#[derive(Clone, Copy, Debug)]
pub struct Side<'a> {
    /// Its iteration under its plan.
    pub program: &'a Program,
    /// How long things take alone.
    pub durations: &'a Durations,
    /// The part of the device's compute that it uses, in thousandths.
    pub utilisation: u32,
    /// When it starts.
    pub start: Nanos,
    /// After so many iterations it ends.
    pub iterations: u32,
}

impl<'a> Side<'a> {
    const fn work(&self) -> Work<&'a Program, &'a Durations> {
        Work { program: self.program, durations: self.durations, utilisation: self.utilisation }
    }
}

/// The outcome of a simulation.
#[derive(Clone, Debug, Default)]
pub struct Course {
    /// For each job, start and course of its iterations.
    pub runs: Vec<Vec<(Nanos, Run)>>,
    /// Every copy, in order of its end.
    pub carried: Vec<Carried>,
    /// When the last one ended.
    pub end: Nanos,
}

/// Lets all jobs run.
///
/// # Errors
/// When a job's items wait for each other in a circle, which the checker excludes.
pub fn run(sides: &[Side<'_>], link: &Link) -> Result<Course, Deadlock> {
    let mut device = Shared::new(link);
    let mut runs: Vec<Vec<(Nanos, Run)>> = vec![Vec::new(); sides.len()];
    let mut coming: Vec<usize> = (0..sides.len()).filter(|&j| sides[j].iterations > 0).collect();
    // The next to come is the last one.
    coming.sort_by_key(|&job| std::cmp::Reverse((sides[job].start, job)));
    loop {
        while let Some(&job) = coming.last()
            && sides[job].start <= device.now()
        {
            device.begin(job, sides[job].work());
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
            device.begin(job, sides[job].work());
        }
    }
    let end = device.now();
    Ok(Course { runs, carried: device.carried, end })
}

/// Resident bytes of all jobs together over time. Between its iterations a job keeps what stays
/// round their end; after its last, nothing.
#[must_use]
pub fn memory(programs: &[&Program], runs: &[&[(Nanos, Run)]]) -> Vec<(Nanos, Bytes)> {
    let mut changes: Vec<(Nanos, i128)> = Vec::new();
    for (program, runs) in programs.iter().zip(runs) {
        let mut level = 0;
        for (start, run) in *runs {
            for (at, bytes) in
                engine::memory(program, run).into_iter().filter(|point| point.0 < run.iteration)
            {
                changes.push((*start + at, i128::from(bytes.0) - level));
                level = i128::from(bytes.0);
            }
        }
        let end = runs.last().map_or(Nanos::ZERO, |(start, run)| *start + run.iteration);
        changes.push((end, -level));
    }
    changes.sort_unstable();
    let mut curve: Vec<(Nanos, Bytes)> = Vec::new();
    let mut level = 0i128;
    for (at, change) in changes {
        level += change;
        let bytes = Bytes(u64::try_from(level).unwrap_or_default());
        match curve.last_mut() {
            Some(last) if last.0 == at => last.1 = bytes,
            _ => curve.push((at, bytes)),
        }
    }
    curve
}

/// How many pairs of copies share an instant of one direction of the link: none, ever. Looks at
/// start and end alone.
#[must_use]
pub fn overlaps(carried: &[Carried]) -> usize {
    let mut found = 0;
    for direction in [Direction::H2d, Direction::D2h] {
        let mut copies: Vec<(Nanos, Nanos)> =
            carried.iter().filter(|c| c.direction == direction).map(|c| (c.start, c.end)).collect();
        copies.sort_unstable();
        for (index, copy) in copies.iter().enumerate() {
            found += copies[index + 1..]
                .iter()
                .take_while(|next| next.0 < copy.1)
                .filter(|next| next.0 < next.1)
                .count();
        }
    }
    found
}

/// Iterations of the job whose are the longest.
pub const ROUNDS: u32 = 4;

/// No job runs more than so many times as often.
const OFTEN: u64 = 4;

/// A job of a round.
#[derive(Clone, Copy, Debug)]
pub struct Party<'a> {
    /// Its iteration under its plan.
    pub program: &'a Program,
    /// How long things take alone.
    pub durations: &'a Durations,
    /// The part of the device's compute that it uses, in thousandths.
    pub utilisation: u32,
    /// Its iteration without a plan, alone: rounds of different plans of the same jobs have the
    /// same iterations and starts.
    pub own: Nanos,
}

/// Some iterations of every job, under both alignments.
#[derive(Clone, Debug)]
pub struct Round {
    /// For one iteration of the longest job, and as many of the others as take about as long: mean
    /// of both.
    pub time: Nanos,
    /// All at once, and staggered.
    pub courses: [Course; 2],
}

/// Runs rounds.
///
/// # Errors
/// As [`run`].
pub fn round(parties: &[Party<'_>], link: &Link) -> Result<Round, Deadlock> {
    let longest = parties.iter().map(|p| p.own.0).max().unwrap_or(0);
    let wanted: u64 = parties.iter().map(|p| u64::from(p.utilisation)).sum();
    // By so much all are slowed while all compute, and over so much their starts are spread.
    let slowed = u128::from(wanted.max(u64::from(WHOLE)));
    let spread = u128::from(WHOLE) * parties.len().max(1) as u128;
    let mut sides = Vec::with_capacity(parties.len());
    let mut start = 0u64;
    for party in parties {
        let often = (longest.saturating_add(party.own.0 / 2) / party.own.0.max(1)).clamp(1, OFTEN);
        let iterations = ROUNDS.saturating_mul(u32::try_from(often).unwrap_or(1));
        let Party { program, durations, utilisation, own } = *party;
        sides.push(Side { program, durations, utilisation, start: Nanos(start), iterations });
        start = start.saturating_add(
            u64::try_from(u128::from(own.0) * slowed / spread).unwrap_or(u64::MAX / 4),
        );
    }
    let staggered = run(&sides, link)?;
    for side in &mut sides {
        side.start = Nanos::ZERO;
    }
    let at_once = run(&sides, link)?;
    let time = Nanos(at_once.end.0.saturating_add(staggered.end.0) / (2 * u64::from(ROUNDS)));
    Ok(Round { time, courses: [at_once, staggered] })
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
