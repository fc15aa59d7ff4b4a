//! Keeps each job's part of all jobs' swaps within its limit.
//!
//! The limit serves what the *max swapping rate* of TENSILE's paper serves: it keeps one job (of
//! high priority, say) from paying for the others. The paper counts a job's swapped tensors over
//! all jobs', as `tensile` does with `max_swap_part`; here a job's swaps are the bytes that it
//! copies in either direction, per second of its planned iteration alone. A job above its limit may
//! swap a smaller share of its tensors, step by step down to none, and the others give up memory in
//! its place.

use std::sync::Arc;

use super::{Jobs, Memo, PlanError, Planned, Share, Together};

/// The shares of its tensors to which a job above its limit is held, one after the other, in
/// thousandths.
const STEPS: [u32; 9] = [800, 650, 500, 350, 250, 150, 100, 50, 0];

/// Makes a plan by `make`, in which every job keeps its limit.
pub(super) fn within(
    jobs: &Jobs<'_>,
    memo: &Memo,
    make: impl Fn(&Jobs<'_>, &Memo) -> Result<Together, PlanError>,
) -> Result<Together, PlanError> {
    let mut asked = jobs.clone();
    let mut steps = vec![STEPS.iter(); jobs.jobs.len()];
    loop {
        let made = make(&asked, memo).map_err(|error| because(error, &asked, jobs))?;
        let mut held = false;
        for (index, part) in swap_parts(&made.parts).into_iter().enumerate() {
            let job = &mut asked.jobs[index];
            if part <= job.swap_limit {
                continue;
            }
            let share = steps[index].next().map(|&step| Share::of_thousandths(step));
            if let Some(method) = share.and_then(|share| job.method.limited(share)) {
                job.method = method;
                held = true;
            }
        }
        if !held {
            return Ok(made);
        }
    }
}

/// Names the jobs whose limit is why there is no plan.
fn because(error: PlanError, asked: &Jobs<'_>, jobs: &Jobs<'_>) -> PlanError {
    let PlanError::Infeasible(mut no) = error else { return error };
    for (held, job) in asked.jobs.iter().zip(&jobs.jobs) {
        if held.method != job.method {
            let (name, limit) = (&job.graph.name, job.swap_limit);
            no.blocked += &format!("; `{name}` may make no more than {limit} of all swaps");
        }
    }
    PlanError::Infeasible(no)
}

/// The part of all jobs' swaps that each job makes, rounded up. A job without others makes none,
/// because there is nothing to share.
#[must_use]
pub fn swap_parts(plans: &[Arc<Planned>]) -> Vec<Share> {
    let rate = |planned: &Arc<Planned>| {
        let bytes: u128 = planned.program.copies.iter().map(|copy| u128::from(copy.bytes.0)).sum();
        bytes * 1_000_000_000 / u128::from(planned.run.iteration.0.max(1))
    };
    let rates: Vec<u128> = plans.iter().map(rate).collect();
    let all = rates.iter().sum::<u128>().max(1);
    let part = |rate: u128| match plans.len() {
        1 => Share::NONE,
        _ => Share::of_thousandths(u32::try_from((rate * 1000).div_ceil(all)).unwrap_or(1000)),
    };
    rates.into_iter().map(part).collect()
}
