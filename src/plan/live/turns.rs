//! Which of the admitted jobs begin their next iteration: the policies of
//! [`crate::sim::share::policy`], asked whenever a job is between two iterations.

use crate::sim::share::policy::{Candidate, Policy, Style};

/// An admitted job, as a policy sees it.
#[derive(Clone, Copy, Debug)]
pub struct Resident {
    /// What its place in the policy's order follows from.
    pub candidate: Candidate,
    /// The share of the device that it keeps busy alone, per mille.
    pub utilisation: u32,
    /// Whether it is within an iteration.
    pub running: bool,
    /// Whether it can begin an iteration now: its memory is in place.
    pub ready: bool,
    /// Whether it waits at most for its memory to move: what it keeps was loaded before.
    pub loaded: bool,
}

/// Which of the residents, in the order of their launch, begin an iteration now.
pub fn begin(policy: &Policy, residents: &[Resident]) -> Vec<usize> {
    let able = |job: &usize| policy.style == Style::One || residents[*job].loaded;
    let mut ranked: Vec<usize> = (0..residents.len()).filter(able).collect();
    ranked.sort_by_key(|&job| (policy.place(&residents[job].candidate), job));
    let overdue = ranked.first().is_some_and(|&first| residents[first].candidate.overdue);
    let utilised = ranked.into_iter().map(|job| (job, residents[job].utilisation));
    let mut chosen = policy.choose(utilised, residents.len(), overdue, |_| true);
    // A policy of one job at a time waits for the running one.
    let busy = policy.style.in_turn() && residents.iter().any(|resident| resident.running);
    chosen.retain(|&job| !busy && residents[job].ready && !residents[job].running);
    chosen.sort();
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::share::policy::find;
    use crate::units::Nanos;

    /// A job of this submission, work left and service.
    type Job = (Resident, Nanos);

    fn job(submit: u64, left: u64, service: u64) -> Job {
        let (submit, service) = (Nanos(submit), Nanos(service));
        let candidate = Candidate { submit, service, ..Candidate::default() };
        let (utilisation, running, ready, loaded) = (600, false, true, true);
        (Resident { candidate, utilisation, running, ready, loaded }, Nanos(left))
    }

    fn asked(policy: &str, jobs: &[Job]) -> Vec<usize> {
        let policy = find(policy).expect("a policy");
        let ranked = |(job, left): &Job| {
            let rank = policy.rank(job.candidate.submit, *left);
            Resident { candidate: Candidate { rank, ..job.candidate }, ..*job }
        };
        begin(policy, &jobs.iter().map(ranked).collect::<Vec<_>>())
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
        jobs[2].0.candidate.begun = true;
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
        let mut jobs = [job(0, 50, 0), job(1, 10, 0), job(2, 30, 0)];
        jobs[0].0.candidate.overdue = true;
        assert_eq!(asked("neap", &jobs), [0]);
    }
}
