//! Which of the admitted jobs begin their next iteration: the policies of
//! [`crate::sim::share::policy`], asked whenever a job is between two iterations.

use crate::compact::CompactSort;
use crate::sim::share::policy::{Policy, Style, choose};
use crate::units::Nanos;

/// An admitted job, as a policy sees it.
#[derive(Clone, Copy, Debug)]
pub struct Resident {
    /// When it was submitted.
    pub submit: Nanos,
    /// Its rank by the policy.
    pub rank: u64,
    /// The share of the device that it keeps busy alone, per mille.
    pub utilisation: u32,
    /// The time of its iterations so far. A new job begins with the least of the present jobs.
    pub service: Nanos,
    /// Whether it has begun its first iteration.
    pub begun: bool,
    /// Whether it is within an iteration.
    pub running: bool,
    /// Whether it can begin an iteration now: its memory is in place.
    pub ready: bool,
    /// Whether it waits at most for its memory to move: what it keeps was loaded before.
    pub loaded: bool,
}

/// Which of the residents, in the order of their launch, begin an iteration now. `overdue`
/// is the resident that goes first whatever its rank.
pub fn begin(policy: &Policy, residents: &[Resident], overdue: Option<usize>) -> Vec<usize> {
    let rank =
        |&job: &usize| (overdue != Some(job), residents[job].rank, residents[job].submit, job);
    let idle = residents.iter().all(|resident| !resident.running);
    let ready = |job: &usize| residents[*job].ready && !residents[*job].running;
    let able = |job: &usize| residents[*job].loaded;
    let all = 0..residents.len();
    // A policy of one job at a time waits for the running one.
    let alone = |job: Option<usize>| job.filter(|_| idle).into_iter().collect();
    match policy.style {
        Style::All => all.filter(ready).collect(),
        Style::One { preempts: false } => {
            let begun = all.clone().find(|&job| residents[job].begun);
            alone(begun.or(all.min_by_key(rank)).filter(ready))
        }
        Style::One { preempts: true } => alone(all.filter(able).min_by_key(rank).filter(ready)),
        Style::Rotating => {
            let served = |&job: &usize| (residents[job].service, job);
            alone(all.filter(able).min_by_key(served).filter(ready))
        }
        Style::UntilBusy { .. } => {
            let mut ranked: Vec<usize> = all.filter(able).collect();
            ranked.compact_sort_by_key(rank);
            let head = overdue.is_some() && ranked.first().copied() == overdue;
            let utilised = ranked.into_iter().map(|job| (job, residents[job].utilisation));
            let mut chosen = choose(utilised, residents.len(), head, |_| true);
            chosen.retain(ready);
            chosen.sort_unstable();
            chosen
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::share::policy::find;

    /// A job of this submission, work left and service.
    type Job = (Resident, Nanos);

    fn job(submit: u64, left: u64, service: u64) -> Job {
        let (submit, service) = (Nanos(submit), Nanos(service));
        let (rank, utilisation, begun, running, ready, loaded) = (0, 600, false, false, true, true);
        let resident =
            Resident { submit, rank, utilisation, service, begun, running, ready, loaded };
        (resident, Nanos(left))
    }

    fn asked(policy: &str, jobs: &[Job]) -> Vec<usize> {
        overdue(policy, jobs, None)
    }

    fn overdue(policy: &str, jobs: &[Job], overdue: Option<usize>) -> Vec<usize> {
        let policy = find(policy).expect("a policy");
        let ranked = |(job, left): &Job| Resident { rank: policy.rank(job.submit, *left), ..*job };
        begin(policy, &jobs.iter().map(ranked).collect::<Vec<_>>(), overdue)
    }

    #[test]
    fn each_policy_begins_its_own() {
        let mut jobs = [job(0, 50, 30), job(1, 10, 40), job(2, 30, 20)];
        assert_eq!(asked("fifo", &jobs), [0]);
        assert_eq!(asked("srtf", &jobs), [1]);
        assert_eq!(asked("pack", &jobs), [0, 1, 2]);
        assert_eq!(asked("fair", &jobs), [2]);
        // Two jobs of 600 per mille keep the device busy: the two with the least work left.
        assert_eq!(asked("neap", &jobs), [1, 2]);
        // The first job that began runs to its end.
        jobs[2].0.begun = true;
        assert_eq!(asked("fifo", &jobs), [2]);
        // One job at a time: all wait for the running one.
        jobs[0].0.running = true;
        for policy in ["fifo", "srtf", "fair"] {
            assert!(asked(policy, &jobs).is_empty(), "{policy}");
        }
        assert_eq!(asked("pack", &jobs), [1, 2]);
        assert_eq!(asked("neap", &jobs), [1, 2]);
    }

    #[test]
    fn a_job_whose_memory_moves_is_waited_for_and_one_that_loads_is_not() {
        let mut jobs = [job(0, 50, 30), job(1, 10, 10)];
        jobs[1].0.ready = false;
        assert!(asked("srtf", &jobs).is_empty() && asked("fair", &jobs).is_empty());
        jobs[1].0.loaded = false;
        assert_eq!([asked("srtf", &jobs), asked("fair", &jobs)], [[0], [0]]);
    }

    #[test]
    fn an_overdue_job_goes_first_and_is_not_slowed() {
        let jobs = [job(0, 50, 0), job(1, 10, 0), job(2, 30, 0)];
        assert_eq!(overdue("neap", &jobs, Some(0)), [0]);
    }
}
