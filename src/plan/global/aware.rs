//! Several jobs planned in several ways, and what they come to side by side.
//!
//! A job's own plan promises what it would take alone. Beside others its copies wait for theirs,
//! and its waits are hidden by their compute: a plan that is the best alone need not be the best
//! among others. So with the planner `neap` all jobs are planned in several ways (`Way`), all
//! within the budget, and the one is taken that costs least in a simulated [`joint::Round`]: its
//! time, and each job's mean iteration in it, relative to what they are unplanned and alone; of
//! equals the first. Then jobs take over what another way made of them, one after the other, where
//! that fits and costs less.
//!
//! Who gets how much memory is decided once, by steps down in the first way, which plans each job
//! for its part of the link; the others, with less effort, plan for that and for even parts. Equal
//! jobs of many operators get even parts at once. Other planners know one way, theirs. Switches:
//! `joint`, `link-share`, `portfolio` in [`neap::Options`]. Cost: one descent of all jobs where
//! they differ, a plan of each different job a way, and some milliseconds a round. More than `FEW`
//! jobs are planned as if alone. Few huge tensors are dear: each part that can't be placed is
//! searched for.

use super::{Jobs, Memo, Together, join, parts, shares};
use crate::budget::{self, Infeasible, PlanError, Planned};
use crate::device::{Link, Profile, roofline};
use crate::job::liveness::Liveness;
use crate::method::{Method, SMALL};
use crate::sim::engine::Durations;
use crate::sim::joint::{self, Party, Round};
use crate::sim::program::Program;
use crate::units::{Bytes, Nanos};
use crate::{neap, tensile};

/// A way to plan all jobs.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Way {
    /// As if each were alone.
    Alone,
    /// At another rate of the link, in thousandths of its own for each job.
    Link(&'static str, Vec<u64>),
    /// By another planner.
    Planner(Box<Method>),
}

impl Way {
    /// For the plan's record; `None` for the first.
    fn name(&self) -> Option<&str> {
        match self {
            Self::Alone => None,
            Self::Link(name, _) => Some(name),
            Self::Planner(method) => Some(method.name()),
        }
    }
}

/// Makes the plan.
///
/// # Errors
/// As [`super::make`].
pub(super) fn make(jobs: &Jobs<'_>, memo: &mut Memo) -> Result<Together, PlanError> {
    let ways = ways(jobs);
    let several = ways.len() > 1;
    let sights = jobs.jobs.iter().map(|job| Sight::of(jobs, job)).collect();
    let mut trial = Trial { jobs, ways: &ways, sights, found: Vec::new(), why: None };
    // Equal jobs get equal parts. Where few huge tensors decide, other parts are other luck.
    let even = even(jobs);
    let alike = jobs
        .jobs
        .windows(2)
        .all(|pair| pair[0].file.1 == pair[1].file.1 && pair[0].priority == pair[1].priority);
    let large = jobs.jobs.iter().any(|job| job.graph.operators.len() > SMALL);
    let equal = several && alike && large && trial.plan(0, Some((&even, false)), memo)?;
    if !equal {
        // Who gets how much is decided once, in the first way, or as if alone if that does not meet
        // the budget.
        for index in (0..ways.len()).filter(|&index| index == 0 || ways[index] == Way::Alone) {
            if trial.plan(index, None, memo)? {
                break;
            }
        }
    }
    if several
        && let Some((_, base, parts)) = trial.found.last()
        && !(*base == 0 && untouched(parts))
    {
        let (base, arenas) =
            (*base, parts.iter().map(|part| part.plan.figures.arena_bytes).collect::<Vec<Bytes>>());
        // On small graphs the planners that stand in have been asked, and what fails to be placed
        // takes long.
        for index in
            (0..ways.len()).filter(|&index| large && index != base && ways[index] != Way::Alone)
        {
            trial.plan(index, Some((if equal { &even } else { &arenas }, true)), memo)?;
        }
        for index in (0..ways.len()).filter(|&index| {
            !equal && matches!(ways[index], Way::Link(..)) && (index == 0 || !large)
        }) {
            trial.plan(index, Some((&even, index != 0)), memo)?;
        }
    }
    let Trial { sights, mut found, why, .. } = trial;
    found.sort_by_key(|(cost, index, _)| (*cost, *index));
    if found.is_empty() {
        return Err(why.map_or_else(
            || PlanError::Defect("no way to plan".to_owned()),
            PlanError::Infeasible,
        ));
    }
    let best = found.remove(0);
    if !several {
        return Ok(join(jobs, best.2));
    }
    found.retain(|(cost, ..)| *cost <= best.0 + best.0 / NEAR);
    let mixed = mix(jobs, &sights, best.0, &best.2, found.iter().take(OTHERS).map(|o| &o.2[..]))?;
    let mut together = join(jobs, mixed);
    if let Some(way) = ways[best.1].name() {
        together.plan.options.insert("way".to_owned(), way.to_owned());
    }
    Ok(together)
}

/// Plans of all jobs in several ways, each with its round.
struct Trial<'t, 'a> {
    jobs: &'t Jobs<'a>,
    ways: &'t [Way],
    sights: Vec<Sight>,
    found: Vec<(u128, usize, Vec<Planned>)>,
    /// Why the first that failed did.
    why: Option<Box<Infeasible>>,
}

impl Trial<'_, '_> {
    /// Plans in a way, within these arenas or within the budget; whether that can be met.
    fn plan(
        &mut self,
        index: usize,
        arenas: Option<(&[Bytes], bool)>,
        memo: &mut Memo,
    ) -> Result<bool, PlanError> {
        match planned(self.jobs, &self.ways[index], arenas, memo) {
            Ok(parts) => {
                let all: Vec<&Planned> = parts.iter().collect();
                // Where there is no choice there is nothing to compare, and nothing is quicker than
                // what runs as if unplanned.
                let known = || {
                    self.found.iter().find(|(_, _, known)| {
                        known.iter().zip(&parts).all(|(a, b)| a.plan.jobs == b.plan.jobs)
                    })
                };
                let cost = match (self.ways.len() > 1 && !untouched(&parts)).then(known) {
                    None => 0,
                    Some(Some((cost, ..))) => *cost,
                    Some(None) => cost(self.jobs, &self.sights, &all)?,
                };
                self.found.push((cost, index, parts));
                Ok(true)
            }
            Err(PlanError::Infeasible(no)) => {
                // Of parts it says nothing about the whole.
                self.why = self.why.take().or(arenas.is_none().then_some(no));
                Ok(false)
            }
            Err(defect) => Err(defect),
        }
    }
}

/// Nothing is moved or made again.
fn untouched(parts: &[Planned]) -> bool {
    parts.iter().all(|part| part.plan.jobs.iter().all(|job| job.events.is_empty()))
}

/// The budget divided by the jobs' unplanned peaks.
fn even(jobs: &Jobs<'_>) -> Vec<Bytes> {
    let peaks: Vec<u128> =
        jobs.jobs.iter().map(|job| u128::from(Liveness::of(job.graph).peak.0)).collect();
    let all = peaks.iter().sum::<u128>().max(1);
    peaks
        .iter()
        .map(|peak| {
            Bytes(u64::try_from(u128::from(jobs.budget.0) * peak / all).unwrap_or(0) / 512 * 512)
        })
        .collect()
}

/// Of more jobs than this a round takes too long to be simulated for every way and every exchange.
pub(crate) const FEW: usize = 8;

/// The ways to plan these jobs, at least one.
fn ways(jobs: &Jobs<'_>) -> Vec<Way> {
    let mut ways = Vec::new();
    let alone = || vec![Way::Alone];
    let options: Vec<&neap::Options> = jobs
        .jobs
        .iter()
        .filter_map(
            |job| if let Method::Neap(options) = &job.method { Some(options) } else { None },
        )
        .collect();
    // One switch for all.
    let [first, ..] = options[..] else { return alone() };
    if !(2..=FEW).contains(&jobs.jobs.len())
        || options.len() < jobs.jobs.len()
        || !options.iter().all(|o| o.joint)
    {
        return alone();
    }
    if options.iter().all(|o| o.link_share) {
        for (name, percent) in SHARES {
            let way = Way::Link(name, link_parts(jobs, percent));
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

/// How much of its part of the link a job is planned for, in percent: bursts of the others get in
/// the way, and their waits leave room.
const SHARES: [(&str, u64); 3] =
    [("link-share", 100), ("link-share-80", 80), ("link-share-125", 125)];

/// The link's rate as each job sees it in its own time, in thousandths. While all compute, all are
/// slowed by what they want of the device together; the link is shared among all, by priority.
/// Copies of a slowed job have more time.
fn link_parts(jobs: &Jobs<'_>, percent: u64) -> Vec<u64> {
    let wanted: u64 = jobs
        .jobs
        .iter()
        .map(|job| {
            u64::from(roofline::utilisation(&job.graph.operators, job.latencies, jobs.device))
        })
        .sum();
    let priorities: u128 = jobs.jobs.iter().map(|job| u128::from(job.priority.max(1))).sum();
    let slowed = u128::from(wanted.max(FULL)) * u128::from(percent);
    let part = |priority: u64| {
        u64::try_from(slowed * u128::from(priority.max(1)) / (100 * priorities.max(1)))
            .unwrap_or(FULL)
    };
    jobs.jobs.iter().map(|job| part(job.priority).clamp(1, FULL)).collect()
}

/// All jobs planned in one way, on the device as it is, each in its arena where these are given,
/// with little effort if said so.
fn planned(
    jobs: &Jobs<'_>,
    way: &Way,
    arenas: Option<(&[Bytes], bool)>,
    memo: &mut Memo,
) -> Result<Vec<Planned>, PlanError> {
    let mut asked = jobs.clone();
    if let Way::Planner(method) = way {
        for job in &mut asked.jobs {
            job.method = Method::clone(method);
        }
    }
    let seen = |devices: Vec<Profile>| -> Vec<Profile> {
        let Way::Link(_, parts) = way else { return devices };
        devices
            .into_iter()
            .zip(parts)
            .map(|(device, &part)| Profile { link: at_rate(&device.link, part), ..device })
            .collect()
    };
    let mut attempt = |devices: Vec<Profile>| -> Result<Vec<Planned>, PlanError> {
        let devices = seen(devices);
        let made = match arenas {
            None => parts(&asked, &devices, memo)?,
            Some((arenas, quick)) => {
                let mut made = Vec::with_capacity(arenas.len());
                for ((job, device), &arena) in asked.jobs.iter().zip(&devices).zip(arenas) {
                    let request = job.request(device, arena, jobs);
                    let part = if quick { memo.once(&request)? } else { memo.plan(&request)? };
                    made.push(part.map_err(PlanError::Infeasible)?);
                }
                made
            }
        };
        if !matches!(way, Way::Link(..)) {
            return Ok(made);
        }
        let mut back: Vec<Planned> = Vec::with_capacity(made.len());
        for (index, (job, part)) in asked.jobs.iter().zip(&made).enumerate() {
            let alike = |&other: &usize| {
                let known = &asked.jobs[other];
                known.file == job.file
                    && known.method == job.method
                    && made[other].plan.jobs == part.plan.jobs
            };
            let same = (0..index).find(alike).map(|other| back[other].clone());
            back.push(match same {
                Some(same) => same,
                None => budget::on_device(&job.request(jobs.device, jobs.budget, jobs), part)?,
            });
        }
        Ok(back)
    };
    let made = attempt(vec![jobs.device.clone(); jobs.jobs.len()])?;
    if pinned(&made) <= jobs.device.pinned_bytes {
        return Ok(made);
    }
    // Together they take more of the host than there is: each gets its part.
    attempt(shares(jobs))
}

fn pinned(parts: &[Planned]) -> Bytes {
    parts.iter().map(|p| p.plan.figures.pinned_bytes).sum()
}

fn at_rate(link: &Link, part: u64) -> Link {
    let rate = |rate: u64| {
        u64::try_from(u128::from(rate) * u128::from(part) / u128::from(FULL))
            .unwrap_or(u64::MAX)
            .max(1)
    };
    Link {
        h2d: rate(link.h2d),
        d2h: rate(link.d2h),
        h2d_contended: rate(link.h2d_contended),
        d2h_contended: rate(link.d2h_contended),
        ..*link
    }
}

/// What of a job its rounds have in common.
struct Sight {
    utilisation: u32,
    own: Nanos,
}

impl Sight {
    fn of(jobs: &Jobs<'_>, job: &super::Job<'_>) -> Self {
        Self {
            utilisation: roofline::utilisation(&job.graph.operators, job.latencies, jobs.device),
            own: job.latencies.iter().map(|l| l.time).sum(),
        }
    }
}

/// A round of all jobs under these plans, which are of one job each, in order.
///
/// # Errors
/// [`PlanError::Defect`] only.
pub fn round(jobs: &Jobs<'_>, programs: &[&Program]) -> Result<Round, PlanError> {
    let sights: Vec<Sight> = jobs.jobs.iter().map(|job| Sight::of(jobs, job)).collect();
    side_by_side(jobs, &sights, programs)
}

fn side_by_side(
    jobs: &Jobs<'_>,
    sights: &[Sight],
    programs: &[&Program],
) -> Result<Round, PlanError> {
    let link = &jobs.device.link;
    let durations: Vec<Durations> =
        programs.iter().map(|program| Durations::nominal(program, link)).collect();
    let mut parties = Vec::with_capacity(programs.len());
    for ((&program, durations), sight) in programs.iter().zip(&durations).zip(sights) {
        parties.push(Party { program, durations, utilisation: sight.utilisation, own: sight.own });
    }
    joint::round(&parties, link).map_err(|e| PlanError::Defect(e.to_string()))
}

/// How much longer a round is than the longest job unplanned and alone, and how much longer the
/// jobs' iterations are in it, the mean of all by priority: both count alike, in millionths. The
/// first alone would sacrifice short jobs to the longest, the second is blind to who ends last.
fn cost(jobs: &Jobs<'_>, sights: &[Sight], parts: &[&Planned]) -> Result<u128, PlanError> {
    let programs: Vec<&Program> = parts.iter().map(|part| &part.program).collect();
    let round = side_by_side(jobs, sights, &programs)?;
    let one = |(index, (job, sight)): (usize, (&super::Job<'_>, &Sight))| {
        let runs = round.courses.iter().flat_map(|course| &course.runs[index]);
        let (sum, count) = runs.fold((0u128, 0u128), |(sum, count), (_, run)| {
            (sum + u128::from(run.iteration.0), count + 1)
        });
        sum * u128::from(job.priority.max(1)) * 1_000_000 / (count * u128::from(sight.own.0)).max(1)
    };
    let each: u128 = jobs.jobs.iter().zip(sights).enumerate().map(one).sum();
    let priorities: u128 = jobs.jobs.iter().map(|job| u128::from(job.priority.max(1))).sum();
    let longest = sights.iter().map(|s| s.own.0).max().unwrap_or(0).max(1);
    Ok(each / priorities + u128::from(round.time.0) * 1_000_000 / u128::from(longest))
}

/// From so many other ways jobs may take over plans, the best first, which cost at most this part
/// more.
const OTHERS: usize = 3;
const NEAR: u128 = 10;

/// Takes over from other ways, job by job, what costs less.
fn mix<'p>(
    jobs: &Jobs<'_>,
    sights: &[Sight],
    mut best: u128,
    from: &'p [Planned],
    others: impl Iterator<Item = &'p [Planned]>,
) -> Result<Vec<Planned>, PlanError> {
    let mut now: Vec<&Planned> = from.iter().collect();
    let sum = |parts: &[&Planned], of: fn(&Planned) -> Bytes| -> Bytes {
        parts.iter().map(|p| of(p)).sum()
    };
    for other in others {
        for index in 0..now.len() {
            let mut tried = now.clone();
            tried[index] = &other[index];
            let fits = sum(&tried, |p| p.plan.figures.arena_bytes) <= jobs.budget
                && sum(&tried, |p| p.plan.figures.pinned_bytes) <= jobs.device.pinned_bytes;
            if !fits || tried[index].plan.jobs[0].events == now[index].plan.jobs[0].events {
                continue;
            }
            let cost = cost(jobs, sights, &tried)?;
            if cost < best {
                (best, now) = (cost, tried);
            }
        }
    }
    Ok(now.into_iter().cloned().collect())
}
