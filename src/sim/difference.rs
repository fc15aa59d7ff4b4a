//! Finds the differences between a run's requests and a recording's.
//!
//! A recording may begin after the job began and end before it ended, so the recording's requests
//! are searched for within the run's. After a difference the comparison continues where both agree
//! again for a while, so that one extra block does not make all later requests differ.

use std::collections::HashMap;

use crate::requests::Request;
use crate::units::Bytes;

/// The allocator's unit of block sizes, in bytes.
const GRANULE: u64 = 512;
/// How many requests must agree for the comparison to continue after a difference.
const AGREE: usize = 8;
/// The most requests that may be skipped for that, on both sides together.
const SKIP: usize = 256;
/// Searches of that length that may fail before shorter ones do, and how long those are: what has
/// nothing in common is not worth the time.
const FAILURES: usize = 500;
const SHORT_SKIP: usize = 8;
/// How many requests are compared at each place where the recording may begin.
const TRIED: usize = 20_000;
/// The most places that are tried, if the live blocks don't determine the place.
const PLACES: usize = 1 << 20;

/// A request in a form that does not depend on the ids and streams of its sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Whether it allocates rather than frees.
    pub allocates: bool,
    /// The requested bytes.
    pub bytes: Bytes,
    /// For an allocation its stream, numbered by first use. For a free, how many allocations ago
    /// the block was allocated; `None` if that was before the comparison.
    pub relation: Option<u64>,
    /// The index of the request.
    pub index: usize,
}

impl Step {
    fn is_like(&self, other: &Self) -> bool {
        (self.allocates, self.bytes) == (other.allocates, other.bytes)
    }
}

/// The result of a comparison.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Comparison {
    /// The index in the run at which the recording begins.
    pub begins: usize,
    /// The index in the run after the last request that was compared.
    pub ends: usize,
    /// Whether exactly the recording's first live blocks are live there.
    pub begins_exactly: bool,
    /// Number of requests that agree.
    pub agree: u64,
    /// Number of requests that only the run has, up to the recording's end.
    pub only_run: u64,
    /// Number of requests that only the recording has.
    pub only_recorded: u64,
    /// Number of the recording's requests after the run's end.
    pub beyond: u64,
    /// The first requests that differ, of the run and of the recording.
    pub first: Option<(Step, Step)>,
}

/// Compares a run with a recording. The recording's first `at_start` requests stand for the blocks
/// that were live when it began.
#[must_use]
pub fn compare(run: &[Request], recorded: &[Request], at_start: usize) -> Comparison {
    let there = steps(recorded, at_start);
    let (begins, begins_exactly) = beginning(run, &recorded[..at_start], &there);
    let here = steps(run, begins);
    let mut found = Comparison { begins, ends: begins, begins_exactly, ..Comparison::default() };
    let (mut i, mut j, mut failures) = (0, 0, 0);
    while i < here.len() && j < there.len() {
        let strictly = found.first.is_none();
        if here[i].is_like(&there[j]) && (!strictly || here[i].relation == there[j].relation) {
            found.agree += 1;
            (i, j) = (i + 1, j + 1);
            continue;
        }
        found.first.get_or_insert((here[i], there[j]));
        let most = if failures < FAILURES { SKIP } else { SHORT_SKIP };
        let skipped = together_again(&here[i..], &there[j..], most);
        failures += usize::from(skipped.is_none());
        let (skip_here, skip_there) = skipped.unwrap_or((1, 1));
        found.only_run += skip_here as u64;
        found.only_recorded += skip_there as u64;
        (i, j) = ((i + skip_here).min(here.len()), (j + skip_there).min(there.len()));
    }
    found.beyond = (there.len() - j) as u64;
    found.ends = here[..i].last().map_or(begins, |step| step.index + 1);
    found
}

/// How many to skip on each side, `most` together, until both agree for a while.
fn together_again(here: &[Step], there: &[Step], most: usize) -> Option<(usize, usize)> {
    let agree = |i: usize, j: usize| {
        let (a, b) = (&here[i.min(here.len())..], &there[j.min(there.len())..]);
        let many = AGREE.min(a.len()).min(b.len());
        many > 0 && a[..many].iter().zip(b).all(|(a, b)| a.is_like(b))
    };
    let mut all = (0..=most).flat_map(|both| (0..=both).map(move |here| (here, both - here)));
    all.find(|&(i, j)| agree(i, j))
}

/// The steps from a request on. Emptying the cache is left out, because snapshots don't always
/// record it.
fn steps(requests: &[Request], from: usize) -> Vec<Step> {
    let mut made: HashMap<u32, (Bytes, Option<u64>)> = HashMap::new();
    let mut streams: HashMap<u32, u64> = HashMap::new();
    let mut count = 0;
    let mut all = Vec::with_capacity(requests.len().saturating_sub(from));
    for (index, request) in requests.iter().enumerate() {
        let inside = index >= from;
        match *request {
            Request::Allocate { id, bytes, stream } => {
                made.insert(id, (bytes, inside.then_some(count)));
                if inside {
                    count += 1;
                    let next = streams.len() as u64;
                    let relation = Some(*streams.entry(stream).or_insert(next));
                    all.push(Step { allocates: true, bytes, relation, index });
                }
            }
            Request::Free { id } => {
                if let Some((bytes, at)) = made.remove(&id)
                    && inside
                {
                    let relation = at.map(|at| count - at);
                    all.push(Step { allocates: false, bytes, relation, index });
                }
            }
            Request::EmptyCache => {}
        }
    }
    all
}

/// The index in `run` at which the recording begins: exactly the recording's first blocks are live
/// there, and the requests after it agree longest. With it, false if no place has exactly these
/// blocks.
fn beginning(run: &[Request], living: &[Request], there: &[Step]) -> (usize, bool) {
    if living.is_empty() {
        return (0, true);
    }
    // By how many blocks of each size the run has more than the recording had at its start.
    let mut more: HashMap<u64, i64> = HashMap::new();
    let mut count = |step: &Step, by: i64| {
        let size = step.bytes.0.div_ceil(GRANULE);
        let now = more.entry(size).or_default();
        *now += by;
        if *now == 0 {
            more.remove(&size);
        }
        more.is_empty()
    };
    for step in steps(living, 0).iter().filter(|step| step.allocates) {
        count(step, -1);
    }
    let all = steps(run, 0);
    let (mut places, mut anywhere) = (Vec::new(), Vec::new());
    for step in &all {
        let first = step.allocates && there.first().is_some_and(|first| first.is_like(step));
        if first && anywhere.len() < PLACES {
            anywhere.push(step.index);
        }
        if count(step, if step.allocates { 1 } else { -1 }) && step.index + 1 < run.len() {
            places.push(step.index + 1);
        }
    }
    let exactly = !places.is_empty();
    if !exactly {
        places = anywhere;
    }
    let longest = |&place: &usize| {
        let from = all.partition_point(|s| s.index < place);
        let pairs = all[from..].iter().zip(there).take(TRIED);
        (pairs.take_while(|(a, b)| a.is_like(b)).count(), std::cmp::Reverse(place))
    };
    (places.into_iter().max_by_key(longest).unwrap_or(0), exactly)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(id: u32, bytes: u64) -> Request {
        Request::Allocate { id, bytes: Bytes(bytes), stream: 0 }
    }

    const fn free(id: u32) -> Request {
        Request::Free { id }
    }

    /// A parameter, then iterations of an activation, a gradient and their frees.
    fn job(iterations: u32) -> Vec<Request> {
        let mut all = vec![take(0, 5000), take(1, 700)];
        for i in 0..iterations {
            let id = 2 + 2 * i;
            all.extend([take(id, 9000 + u64::from(i)), take(id + 1, 700), free(id), free(id + 1)]);
        }
        all
    }

    #[test]
    fn equal_sequences_agree_to_the_end_of_the_shorter() {
        for (run, recorded, agree, beyond) in [(5, 3, 14, 0), (1, 3, 6, 8)] {
            let found = compare(&job(run), &job(recorded), 0);
            assert_eq!((found.agree, found.first, found.beyond), (agree, None, beyond));
        }
    }

    #[test]
    fn a_recording_that_began_later_is_found_inside_the_run() {
        let run = job(5);
        // It began with the two long-lived blocks, in another order, as iteration 2 began.
        let mut recorded = vec![take(0, 700), take(1, 5000)];
        recorded.extend([take(2, 9002), take(3, 700), free(2), free(3), take(4, 9003)]);
        let found = compare(&run, &recorded, 2);
        assert_eq!((found.begins, found.begins_exactly), (10, true));
        assert_eq!((found.agree, found.first), (5, None));
    }

    #[test]
    fn one_extra_block_is_the_first_difference_and_the_only_one() {
        let mut recorded = job(6);
        recorded.splice(6..6, [take(100, 1 << 20), free(100)]);
        let found = compare(&job(6), &recorded, 0);
        assert_eq!((found.only_run, found.only_recorded, found.agree), (0, 2, 26));
        let (here, there) = found.first.expect("they differ");
        assert_eq!((here.bytes, there.bytes), (Bytes(9001), Bytes(1 << 20)));
    }

    #[test]
    fn frees_of_another_block_of_the_same_size_differ() {
        let run = [take(0, 512), take(1, 512), free(0)];
        let recorded = [take(0, 512), take(1, 512), free(1)];
        assert_eq!(compare(&run, &run, 0).first, None);
        assert!(compare(&run, &recorded, 0).first.is_some());
    }

    #[test]
    fn sequences_with_nothing_in_common_are_told_apart_quickly() {
        let odd: Vec<_> = (0..200_000).map(|i| take(i, 1 + 2 * u64::from(i))).collect();
        let even: Vec<_> = (0..200_000).map(|i| take(i, 2 + 2 * u64::from(i))).collect();
        let found = compare(&odd, &even, 0);
        assert_eq!((found.agree, found.only_run, found.only_recorded), (0, 200_000, 200_000));
    }
}
