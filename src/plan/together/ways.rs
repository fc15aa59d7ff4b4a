//! Plans several jobs in several ways, and compares how they run beside each other.
//!
//! A job's own plan is made for the job alone. Beside other jobs its copies wait for theirs, and
//! their computation fills its waits. So the best plan alone need not be the best beside others.
//! The planner `neap` therefore plans all jobs in several ways (`Way`), each within the budget, and
//! simulates a [`rounds::Round`] of each way. The cost of a way is the round's time and each job's
//! mean iteration in it, relative to the unplanned jobs alone. The cheapest way is chosen; of equal
//! ways the first. Then one job after the other takes its plan from another way, if that fits and
//! lowers the cost. Last, memory is divided anew with each job's losses as they were beside the
//! others: copies wait for the copies of others, so a job that swaps little may lose far more than
//! alone.
//!
//! The first way decides how much memory each job gets, by the steps of [`super::make`], with each
//! job planned for its part of the link. The other ways plan with less effort for the same parts
//! and for even parts. Equal jobs of many operators get even parts at once, others in the end if
//! that costs little. Other planners have only one way. Switches: `together`, `link-share`,
//! `portfolio` in [`neap::Options`]. Cost: one descent of all jobs if they differ, a plan of each
//! different job for each way, and some milliseconds for each round, twice as many for twice the
//! jobs. More than `MANY` jobs are planned as if alone. Jobs with few huge tensors take long,
//! because each part whose tensors can't be placed is searched for.

use std::sync::Arc;

use super::memo::Known;
use super::{Job, Jobs, Memo, Together, by_peak, parts, shares, sum};
use crate::budget::{Infeasible, PlanError, Planned, feasible};
use crate::device::Profile;
use crate::method::{Method, SMALL};
use crate::sim::beside::Work;
use crate::sim::engine::Durations;
use crate::sim::program::Program;
use crate::sim::rounds::{self, Round};
use crate::units::{Bytes, Nanos, saturated, scaled};
use crate::{neap, tensile};

/// A way to plan all jobs.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Way {
    /// Each job as if it were alone.
    Alone,
    /// Each job for a slower link: its name, and for each job the rate in thousandths.
    Link(&'static str, Vec<u64>),
    /// All jobs by another planner.
    Planner(Box<Method>),
}

impl Way {
    /// Its name in the plan's record; `None` for [`Way::Alone`].
    fn name(&self) -> Option<&str> {
        match self {
            Self::Alone => None,
            Self::Link(name, _) => Some(name),
            Self::Planner(method) => Some(method.name()),
        }
    }
}

/// Makes one plan of all jobs.
///
/// # Errors
/// As [`super::make`].
pub(super) fn make(jobs: &Jobs<'_>, memo: &Memo) -> Result<Together, PlanError> {
    let rounds = Rounds::new(jobs, memo);
    let ways = ways(jobs, &rounds.known, memo);
    let several = ways.len() > 1;
    let mut trial = Trial { ways: &ways, rounds, found: Vec::new(), why: None };
    // Equal jobs get equal parts. With few huge tensors, other parts may happen to be better.
    let even = by_peak(jobs, jobs.budget, memo);
    let like_first =
        |job: &Job<'_>| job.file.1 == jobs.jobs[0].file.1 && job.priority == jobs.jobs[0].priority;
    let alike = jobs.jobs.iter().all(like_first);
    let large = jobs.jobs.iter().any(|job| job.graph.operators.len() > SMALL);
    let equal = several && alike && large && trial.plan(&[(0, Some((&even, false)))], memo)?;
    if !equal {
        // The first way decides how much memory each job gets; if it does not meet the budget,
        // planning each job alone decides.
        for index in (0..ways.len()).filter(|&index| index == 0 || ways[index] == Way::Alone) {
            if trial.plan(&[(index, None)], memo)? {
                break;
            }
        }
    }
    if several
        && let Some((_, base, parts)) = trial.found.last()
        && !(*base == 0 && untouched(parts))
    {
        let base = *base;
        let arenas: Vec<Bytes> = parts.iter().map(|part| part.plan.figures.arena_bytes).collect();
        let arenas = if equal { &even } else { &arenas };
        // Small graphs have tried the other planners already, and a failed placement takes long.
        let others = |&index: &usize| large && index != base && ways[index] != Way::Alone;
        let evenly = |&index: &usize| {
            !equal && matches!(ways[index], Way::Link(..)) && (index == 0 || !large)
        };
        let all = 0..ways.len();
        let mut asked: Vec<(usize, Within<'_>)> =
            all.clone().filter(others).map(|index| (index, Some((&arenas[..], true)))).collect();
        let quick = |index| index != 0 || memo.is_coarse();
        asked.extend(all.filter(evenly).map(|index| (index, Some((&even[..], quick(index))))));
        trial.plan(&asked, memo)?;
    }
    let Trial { rounds, mut found, why, .. } = trial;
    found.sort_by_key(|(cost, index, _)| (*cost, *index));
    if found.is_empty() {
        let none = || PlanError::Defect("no way to plan".to_owned());
        return Err(why.map_or_else(none, PlanError::Infeasible));
    }
    let best = found.remove(0);
    if !several {
        return Ok(Together::new(jobs, by_priority(jobs, best.2)));
    }
    found.retain(|(cost, ..)| *cost <= best.0 + best.0 / NEAR);
    let others = if memo.is_coarse() { 0 } else { OTHERS };
    let mixed = mix(&rounds, best.0, best.2, found.iter().take(others).map(|o| &o.2[..]))?;
    let way = &ways[best.1];
    let divided = if memo.is_coarse() {
        mixed.1
    } else {
        level(&rounds, way, divide(&rounds, way, mixed, memo)?, memo)?
    };
    let mut made = Together::new(jobs, by_priority(jobs, divided));
    made.plan.options.extend(way.name().map(|name| ("way".to_owned(), name.to_owned())));
    Ok(made)
}

/// The arenas of a way's jobs, and whether they are planned with little effort; `None` for the
/// whole budget.
type Within<'a> = Option<(&'a [Bytes], bool)>;

/// Plans of all jobs in several ways, each with its round.
struct Trial<'t, 'a> {
    ways: &'t [Way],
    rounds: Rounds<'t, 'a>,
    found: Vec<(u128, usize, Vec<Arc<Planned>>)>,
    /// Why the first way that failed did so.
    why: Option<Box<Infeasible>>,
}

impl Trial<'_, '_> {
    /// Plans in these ways, each within its arenas or else within the budget. Returns whether any
    /// of them was possible.
    fn plan(&mut self, asked: &[(usize, Within<'_>)], memo: &Memo) -> Result<bool, PlanError> {
        let planned = memo.each(asked.len(), |at| {
            let (index, arenas) = asked[at];
            planned(self.rounds.jobs, &self.ways[index], arenas, memo)
        });
        let first = self.found.len();
        for (&(index, arenas), made) in asked.iter().zip(planned) {
            match feasible(made)? {
                Ok(parts) => self.found.push((0, index, parts)),
                // A failure with given arenas says nothing about the whole budget.
                Err(no) => self.why = self.why.take().or(arenas.is_none().then_some(no)),
            }
        }
        // With only one way there is nothing to compare, and no plan is faster than one without
        // events.
        let compared = |at: &usize| self.ways.len() > 1 && !untouched(&self.found[*at].2);
        // The cost of equal plans is known.
        let twin = |at: usize| {
            let parts = &self.found[at].2;
            let same =
                |other: &usize| self.found[*other].2.iter().zip(parts).all(|(a, b)| alike(a, b));
            (at, (0..at).find(same))
        };
        let compared = (first..self.found.len()).filter(compared).map(twin);
        let (new, known): (Vec<_>, Vec<_>) = compared.partition(|(_, twin)| twin.is_none());
        let costs = memo.each(new.len(), |at| self.rounds.cost(&self.found[new[at].0].2));
        for ((at, _), cost) in new.into_iter().zip(costs) {
            self.found[at].0 = cost?;
        }
        for (at, twin) in known {
            self.found[at].0 = twin.map_or(0, |twin| self.found[twin].0);
        }
        Ok(self.found.len() > first)
    }
}

/// Whether two plans of a job do the same.
fn alike(a: &Arc<Planned>, b: &Arc<Planned>) -> bool {
    Arc::ptr_eq(a, b) || a.plan.jobs == b.plan.jobs
}

/// Whether no job swaps or recomputes.
fn untouched(parts: &[Arc<Planned>]) -> bool {
    parts.iter().all(|part| part.plan.jobs.iter().all(|job| job.events.is_empty()))
}

/// The most jobs for which rounds are simulated. (40 jobs of 60 to 227 operators take 9 s.)
const MANY: usize = 48;

/// The same for a caller who plans hundreds of times.
pub(crate) const FEW: usize = 8;

/// The ways to plan these jobs, at least one.
fn ways<'j, 'a>(jobs: &'j Jobs<'a>, known: &[Known], memo: &Memo) -> Vec<Way> {
    let mut ways = Vec::new();
    let alone = || vec![Way::Alone];
    let neap = |job: &'j Job<'a>| match &job.method {
        Method::Neap(options) => Some(options),
        _ => None,
    };
    let options: Vec<&neap::Options> = jobs.jobs.iter().filter_map(neap).collect();
    // A switch counts only if all jobs have it on.
    let [first, ..] = options[..] else { return alone() };
    let most = if memo.is_coarse() { FEW } else { MANY };
    if !(2..=most).contains(&jobs.jobs.len())
        || options.len() < jobs.jobs.len()
        || !options.iter().all(|o| o.together)
    {
        return alone();
    }
    if options.iter().all(|o| o.link_share) {
        for (name, percent) in SHARES {
            let way = Way::Link(name, link_parts(jobs, known, percent, memo));
            if way != Way::Link(name, vec![FULL; jobs.jobs.len()]) {
                ways.push(way);
            }
        }
    }
    ways.push(Way::Alone);
    if options.iter().all(|o| o.portfolio) {
        if first.recompute {
            ways.push(Way::Planner(Box::new(Method::Checkpoint(Default::default()))));
        }
        let tensile = tensile::Options::from(first);
        ways.push(Way::Planner(Box::new(Method::Tensile(tensile))));
    }
    ways
}

const FULL: u64 = 1000;

/// The names of ways, and the percentage of its part of the link for which each job is planned.
/// Bursts of other jobs leave less, their waits leave more.
const SHARES: [(&str, u64); 3] =
    [("link-share", 100), ("link-share-80", 80), ("link-share-125", 125)];

/// For each job the link's rate relative to the job's own speed, in thousandths. While all jobs
/// compute, all are slowed by the sum of their utilisations, so their copies have more time. The
/// link is divided by priority.
fn link_parts(jobs: &Jobs<'_>, known: &[Known], percent: u64, memo: &Memo) -> Vec<u64> {
    let wanted: u64 = known.iter().map(|job| u64::from(job.utilisation)).sum();
    let priorities: u128 = jobs.jobs.iter().map(|job| u128::from(job.priority.max(1))).sum();
    let slowed = u128::from(wanted.max(FULL)) * u128::from(percent);
    let part = |priority| saturated(slowed * u128::from(priority) / (100 * priorities.max(1)));
    jobs.jobs.iter().map(|job| memo.rate(part(job.priority.max(1)).clamp(1, FULL))).collect()
}

/// Plans all jobs in one way, with the figures of the real device. With `arenas` each job is
/// planned within its arena, with little effort if the flag beside them is set.
fn planned(
    jobs: &Jobs<'_>,
    way: &Way,
    arenas: Within<'_>,
    memo: &Memo,
) -> Result<Vec<Arc<Planned>>, PlanError> {
    let mut asked = jobs.clone();
    if let Way::Planner(method) = way {
        for job in &mut asked.jobs {
            job.method = Method::clone(method);
        }
    }
    let attempt = |mut devices: Vec<Profile>| -> Result<Vec<_>, PlanError> {
        if let Way::Link(_, parts) = way {
            for (device, &part) in devices.iter_mut().zip(parts) {
                device.link = device.link.with([|rate| scaled(rate, part, FULL).max(1); 2]);
            }
        }
        let made = match arenas {
            None => parts(&asked, &devices, memo)?,
            Some((arenas, quick)) => {
                let parts = memo.each(arenas.len(), |index| {
                    let request = asked.request(&asked.jobs[index], &devices[index], arenas[index]);
                    let part = if quick { memo.once(&request)? } else { memo.plan(&request)? };
                    part.map_err(PlanError::Infeasible)
                });
                parts.into_iter().collect::<Result<Vec<_>, _>>()?
            }
        };
        if !matches!(way, Way::Link(..)) {
            return Ok(made);
        }
        let back = memo.each(made.len(), |index| {
            let request = asked.request(&asked.jobs[index], jobs.device, jobs.budget);
            memo.on_device(&request, &made[index])
        });
        back.into_iter().collect()
    };
    let made = attempt(vec![jobs.device.clone(); jobs.jobs.len()])?;
    if sum(&made, |figures| figures.pinned_bytes) <= jobs.device.pinned_bytes {
        return Ok(made);
    }
    // Together they need more pinned memory than there is, so each job gets its part.
    attempt(shares(jobs, memo))
}

/// Rounds of the same jobs with different plans.
struct Rounds<'j, 'a> {
    jobs: &'j Jobs<'a>,
    known: Vec<Known>,
    short: bool,
}

/// Simulates a round of all jobs with these programs, one for each job in order.
///
/// # Errors
/// Only [`PlanError::Defect`].
pub fn round(jobs: &Jobs<'_>, programs: &[&Program]) -> Result<Round, PlanError> {
    Rounds::new(jobs, &Memo::default()).run(programs)
}

/// The mean time of an iteration of each job in a round.
///
/// # Errors
/// As [`round`].
pub fn beside(jobs: &Jobs<'_>, programs: &[&Program]) -> Result<Vec<Nanos>, PlanError> {
    Rounds::new(jobs, &Memo::default()).beside(programs)
}

/// The sum of the times of a job's iterations in a round, and how many there are.
fn taken(round: &Round, job: usize) -> (u128, u128) {
    let runs = round.courses.iter().flat_map(|course| &course.runs[job]);
    runs.fold((0, 0), |(sum, count), (_, run)| (sum + u128::from(run.iteration.0), count + 1))
}

impl<'j, 'a> Rounds<'j, 'a> {
    fn new(jobs: &'j Jobs<'a>, memo: &Memo) -> Self {
        let known = jobs.jobs.iter().map(|job| memo.known(job, jobs.device)).collect();
        Self { jobs, known, short: memo.is_coarse() }
    }

    fn run(&self, programs: &[&Program]) -> Result<Round, PlanError> {
        let link = &self.jobs.device.link;
        let durations: Vec<Durations> =
            programs.iter().map(|program| Durations::nominal(program, link)).collect();
        let job = |(index, &Known { utilisation, own, .. }): (usize, &Known)| {
            (Work { program: programs[index], durations: &durations[index], utilisation }, own)
        };
        let jobs: Vec<_> = self.known.iter().enumerate().map(job).collect();
        rounds::round(&jobs, link, self.short).map_err(|e| PlanError::Defect(e.to_string()))
    }

    fn beside(&self, programs: &[&Program]) -> Result<Vec<Nanos>, PlanError> {
        let round = self.run(programs)?;
        let mean = |job| {
            let (sum, count) = taken(&round, job);
            Nanos(saturated(sum / count.max(1)))
        };
        Ok((0..programs.len()).map(mean).collect())
    }

    /// The jobs, each with its priority times the ratio of its loss in a round to its loss alone,
    /// the least such ratio as one. `None` if the ratios differ little.
    fn weighed(&self, parts: &[Arc<Planned>]) -> Result<Option<Jobs<'a>>, PlanError> {
        let programs: Vec<&Program> = parts.iter().map(|part| &part.program).collect();
        let beside = self.beside(&programs)?;
        let ratio = |index: usize| {
            let own = self.known[index].own;
            let loss = |time: Nanos| u128::from(time.saturating_sub(own).0.max(1 + own.0 / 100));
            loss(beside[index]) * 1000 / loss(parts[index].plan.figures.iteration_ns)
        };
        let ratios: Vec<u128> = (0..parts.len()).map(|index| ratio(index).max(1)).collect();
        // Equal jobs have equal weights.
        let even = |index: usize| {
            let twins = twins(self.jobs, index);
            twins.iter().map(|&twin| ratios[twin]).sum::<u128>() / twins.len().max(1) as u128
        };
        let even: Vec<u128> = (0..ratios.len()).map(even).collect();
        let (least, most) = (even.iter().min(), even.iter().max());
        let (Some(&least), Some(&most)) = (least, most) else { return Ok(None) };
        if most < least * 3 / 2 {
            return Ok(None);
        }
        let mut jobs = self.jobs.clone();
        for (job, ratio) in jobs.jobs.iter_mut().zip(even) {
            let priority = u128::from(job.priority.max(1)) * ratio / least.max(1);
            job.priority = saturated(priority).clamp(1, 1 << 40);
        }
        Ok(Some(jobs))
    }

    /// The sum of two ratios, in millionths: the time of a round to that of the longest job
    /// unplanned and alone, and the mean (weighted by priority) of each job's iteration in the
    /// round to its own unplanned one. The first ratio alone would sacrifice short jobs to the
    /// longest one, the second alone would ignore which job ends last.
    fn cost(&self, parts: &[Arc<Planned>]) -> Result<u128, PlanError> {
        let programs: Vec<&Program> = parts.iter().map(|part| &part.program).collect();
        let round = self.run(&programs)?;
        let priority = |job: &Job<'_>| u128::from(job.priority.max(1));
        let one = |(index, (job, known)): (usize, (&Job<'_>, &Known))| {
            let (sum, count) = taken(&round, index);
            sum * priority(job) * 1_000_000 / (count * u128::from(known.own.0)).max(1)
        };
        let each: u128 = self.jobs.jobs.iter().zip(&self.known).enumerate().map(one).sum();
        let priorities: u128 = self.jobs.jobs.iter().map(priority).sum();
        let longest = self.known.iter().map(|known| known.own.0).max().unwrap_or(0).max(1);
        Ok(each / priorities + u128::from(round.time.0) * 1_000_000 / u128::from(longest))
    }
}

/// The number of other ways from which jobs may take plans, the best first.
const OTHERS: usize = 3;
/// Such a way costs at most this part (one in 10) more than the best way.
const NEAR: u128 = 10;

/// Of jobs that differ in priority alone, one of higher priority never has the slower plan: each
/// takes from their plans by priority. That holds whatever was planned before.
pub(super) fn by_priority(jobs: &Jobs<'_>, mut parts: Vec<Arc<Planned>>) -> Vec<Arc<Planned>> {
    let alike = |a: usize, b: usize| {
        let (a, b) = (&jobs.jobs[a], &jobs.jobs[b]);
        a.file == b.file && a.method == b.method && a.swap_limit == b.swap_limit
    };
    for first in 0..parts.len() {
        if (0..first).any(|other| alike(other, first)) {
            continue;
        }
        let mut group: Vec<usize> = (first..parts.len()).filter(|&j| alike(first, j)).collect();
        let mut plans: Vec<Arc<Planned>> = group.iter().map(|&j| Arc::clone(&parts[j])).collect();
        group.sort_by_key(|&job| std::cmp::Reverse(jobs.jobs[job].priority));
        plans.sort_by_key(|plan| plan.plan.figures.iteration_ns);
        if group.windows(2).any(|pair| jobs.jobs[pair[0]].priority > jobs.jobs[pair[1]].priority) {
            group.into_iter().zip(plans).for_each(|(job, plan)| parts[job] = plan);
        }
    }
    parts
}

/// Job by job, takes plans from other ways if that lowers the cost.
fn mix<'p>(
    rounds: &Rounds<'_, '_>,
    mut best: u128,
    mut now: Vec<Arc<Planned>>,
    others: impl Iterator<Item = &'p [Arc<Planned>]>,
) -> Result<(u128, Vec<Arc<Planned>>), PlanError> {
    let jobs = rounds.jobs;
    for other in others {
        for index in 0..now.len() {
            let mut tried = now.clone();
            tried[index] = Arc::clone(&other[index]);
            let fits = sum(&tried, |figures| figures.arena_bytes) <= jobs.budget
                && sum(&tried, |figures| figures.pinned_bytes) <= jobs.device.pinned_bytes;
            if !fits || tried[index].plan.jobs[0].events == now[index].plan.jobs[0].events {
                continue;
            }
            let cost = rounds.cost(&tried)?;
            if cost < best {
                (best, now) = (cost, tried);
            }
        }
    }
    Ok((best, now))
}

/// How often memory is divided anew.
const AGAIN: usize = 2;

/// Divides the memory anew, with the losses that jobs had beside the others in place of those
/// alone, as long as that lowers the cost.
fn divide(
    rounds: &Rounds<'_, '_>,
    way: &Way,
    (mut best, mut now): (u128, Vec<Arc<Planned>>),
    memo: &Memo,
) -> Result<(u128, Vec<Arc<Planned>>), PlanError> {
    for _ in 0..AGAIN {
        // Nothing costs less than plans without events.
        if best == 0 {
            break;
        }
        let Some(weighed) = rounds.weighed(&now)? else { break };
        let Ok(parts) = feasible(planned(&weighed, way, None, memo))? else { break };
        let cost = rounds.cost(&parts)?;
        if cost >= best {
            break;
        }
        (best, now) = (cost, parts);
    }
    Ok((best, now))
}

/// The jobs that are equal to this one in every respect, itself among them.
fn twins(jobs: &Jobs<'_>, index: usize) -> Vec<usize> {
    let one = &jobs.jobs[index];
    let alike = |other: &Job<'_>| {
        other.file.1 == one.file.1
            && other.method == one.method
            && other.priority == one.priority
            && other.swap_limit == one.swap_limit
    };
    (0..jobs.jobs.len()).filter(|&other| alike(&jobs.jobs[other])).collect()
}

/// Gives equal jobs with different plans even parts of the memory, if that costs little. Otherwise
/// the last steps down and the bytes left over may all be one job's, which is then far slower, or
/// far faster, than its twin.
fn level(
    rounds: &Rounds<'_, '_>,
    way: &Way,
    (best, now): (u128, Vec<Arc<Planned>>),
    memo: &Memo,
) -> Result<Vec<Arc<Planned>>, PlanError> {
    let jobs = rounds.jobs;
    let arena = |index: usize| now[index].plan.figures.arena_bytes.0;
    let uneven =
        |index: usize| twins(jobs, index).iter().any(|&twin| !alike(&now[twin], &now[index]));
    let even = |index: usize| {
        let twins = twins(jobs, index);
        Bytes(twins.iter().map(|&twin| arena(twin)).sum::<u64>() / twins.len() as u64 / 512 * 512)
    };
    let all = 0..now.len();
    if !all.clone().any(uneven) {
        return Ok(now);
    }
    let arenas: Vec<Bytes> = all.map(even).collect();
    let Ok(mut leveled) = feasible(planned(jobs, way, Some((&arenas, false)), memo))? else {
        return Ok(now);
    };
    for index in (0..now.len()).filter(|&index| !uneven(index)) {
        leveled[index] = Arc::clone(&now[index]);
    }
    let takes = sum(&leveled, |figures| figures.pinned_bytes) <= jobs.device.pinned_bytes
        && rounds.cost(&leveled)? <= best + best / NEAR;
    Ok(if takes { leveled } else { now })
}
