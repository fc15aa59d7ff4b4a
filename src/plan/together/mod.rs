//! Plans several jobs for one memory and one link.
//!
//! Each job gets a part of the budget, its *sub-arena*, so the plan is safe at every alignment of
//! the jobs' iterations. (TENSILE's multi-job scheduler plans against the sum of the jobs' peaks
//! for the same reason.) The jobs start with their unplanned needs. While the sum exceeds the
//! budget, one job takes a step down: the one that loses the least time for the bytes that it gives
//! up. A job's lost time counts relative to its own iteration. A job of priority p counts p times
//! as much. Bytes left over at the end go to the job that gains most by them.
//!
//! A planner of one job does not see the others: it plans for the full rate of device and link. So
//! the planner `neap` plans all jobs in several ways, simulates each way beside each other and
//! chooses the best ([`mod@ways`]). Cost of a way: one plan of a job for each step, about `STEPS`
//! steps for each job; equal jobs are planned once. A caller who plans many times keeps a [`Memo`].

pub mod limits;
mod memo;
pub mod papers;
pub mod ways;

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::sync::Arc;

use super::budget::{Infeasible, PlanError, Planned, Request};
use super::method::Method;
use super::share::Share;
use crate::contract::{Figures, Latency, Plan};
use crate::device::Profile;
use crate::job::Graph;
use crate::job::liveness::Liveness;
use crate::units::{Bytes, saturated};
pub use memo::Memo;

/// The number of steps from a job's unplanned need down to zero.
const STEPS: u64 = 32;

/// One of the jobs.
#[derive(Clone, Debug)]
pub struct Job<'a> {
    /// The job.
    pub graph: &'a Graph,
    /// The path of its file in the plan, and the file's hash.
    pub file: (String, String),
    /// The latency of each operator.
    pub latencies: &'a [Latency],
    /// The planner and its switches, which may differ from job to job.
    pub method: Method,
    /// Weight of its lost time, in thousandths, at least 1: a job of 2,000 loses time only where a
    /// job of 1,000 would lose twice as much.
    pub priority: u64,
    /// The largest part of all jobs' swaps that this job may make ([`limits`]).
    pub swap_limit: Share,
}

/// The jobs to plan.
#[derive(Clone, Debug)]
pub struct Jobs<'a> {
    /// At least one.
    pub jobs: Vec<Job<'a>>,
    /// The device.
    pub device: &'a Profile,
    /// The largest arena for all jobs together.
    pub budget: Bytes,
    /// Options to record in the plan.
    pub recorded_options: BTreeMap<String, String>,
}

impl Jobs<'_> {
    /// The request to plan one of them alone.
    pub(super) fn request<'r>(
        &self,
        job: &Job<'r>,
        device: &'r Profile,
        budget: Bytes,
    ) -> Request<'r> {
        Request {
            file: job.file.clone(),
            method: job.method.clone(),
            recorded_options: self.recorded_options.clone(),
            ..Request::new(job.graph, device, job.latencies, budget)
        }
    }
}

/// One plan for all jobs, and the plans that it consists of.
#[derive(Clone, Debug)]
pub struct Together {
    /// The plan, with the jobs' sub-arenas one after the other.
    pub plan: Plan,
    /// Each job's own plan, from address 0.
    pub parts: Vec<Arc<Planned>>,
}

/// Makes one plan of all jobs within the budget; `memo` has the plans made before.
///
/// # Errors
/// [`PlanError::Infeasible`] when no plan is found.
pub fn make(jobs: &Jobs<'_>, memo: &Memo) -> Result<Together, PlanError> {
    limits::within(jobs, memo, |jobs, memo| {
        papers::make(jobs, memo).unwrap_or_else(|| ways::make(jobs, memo))
    })
}

impl Together {
    /// One plan from the jobs' own plans.
    fn new(jobs: &Jobs<'_>, parts: Vec<Arc<Planned>>) -> Self {
        Self { plan: joined(jobs, &parts), parts }
    }
}

/// Some bytes of all jobs' own plans, added up.
fn sum(parts: &[Arc<Planned>], of: fn(&Figures) -> Bytes) -> Bytes {
    parts.iter().map(|part| of(&part.plan.figures)).sum()
}

/// Plans of all jobs within the budget, each as if it were alone on its device.
fn parts(
    jobs: &Jobs<'_>,
    devices: &[Profile],
    memo: &Memo,
) -> Result<Vec<Arc<Planned>>, PlanError> {
    let mut ladder = Ladder::new(jobs, devices, memo)?;
    ladder.descend()?;
    Ok(ladder.parts())
}

/// Makes the plan in which each job has the smallest arena found for it.
///
/// # Errors
/// [`PlanError::Infeasible`] when a job can't even be placed unplanned within the budget.
pub fn minimum(jobs: &Jobs<'_>, memo: &Memo) -> Result<Together, PlanError> {
    let mut together = limits::within(jobs, memo, |jobs, memo| {
        papers::least(jobs, memo).unwrap_or_else(|| least(jobs, memo))
    })?;
    together.plan.budget = together.plan.figures.arena_bytes;
    Ok(together)
}

fn least(jobs: &Jobs<'_>, memo: &Memo) -> Result<Together, PlanError> {
    let devices = shares(jobs, memo);
    let mut ladder = Ladder::new(jobs, &devices, memo)?;
    for rung in &mut ladder.rungs {
        let least = memo.least(&rung.request, Bytes(rung.arena()))?;
        rung.now = least.map_err(PlanError::Infeasible)?;
    }
    Ok(Together::new(jobs, ladder.parts()))
}

/// The device of each job: host memory is divided in proportion to the bytes that jobs use.
pub(super) fn shares(jobs: &Jobs<'_>, memo: &Memo) -> Vec<Profile> {
    let pinned = jobs.device.pinned_bytes;
    let parts = by_peak(jobs, pinned, memo).into_iter();
    let parts = parts.map(|part| memo.pinned(part, pinned));
    let seen = |pinned_bytes| Profile { pinned_bytes, ..jobs.device.clone() };
    parts.map(seen).collect()
}

/// Bytes divided in proportion to the jobs' unplanned peaks.
fn by_peak(jobs: &Jobs<'_>, bytes: Bytes, memo: &Memo) -> Vec<Bytes> {
    let peak = |job| u128::from(memo.known(job, jobs.device).peak.0);
    let peaks: Vec<u128> = jobs.jobs.iter().map(peak).collect();
    let all = peaks.iter().sum::<u128>().max(1);
    let part = |peak| saturated(u128::from(bytes.0) * peak / all / 512 * 512);
    peaks.into_iter().map(|peak| Bytes(part(peak))).collect()
}

/// A job's present plan, and its plan a step further down.
struct Rung<'a> {
    request: Request<'a>,
    priority: u64,
    now: Arc<Planned>,
    next: Option<Arc<Planned>>,
    step: u64,
    floor: u64,
    blocked: Option<Box<Infeasible>>,
}

/// The plan a step further down if there is one, and why a target was refused.
type Look = (Option<Arc<Planned>>, Option<Box<Infeasible>>);

impl Rung<'_> {
    fn arena(&self) -> u64 {
        self.now.plan.figures.arena_bytes.0
    }

    /// The plan of the next step, or why there is none; a larger step while the excess is large.
    /// The plan is made with little effort if the planner allows that, and if that fails with full
    /// effort, unless hundreds of plans are made.
    fn look(&self, excess: u64, memo: &Memo) -> Result<Look, PlanError> {
        let sketch = self.request.method.sketch();
        let differs = sketch != self.request.method;
        let step = if excess > 8 * self.step { 2 * self.step } else { self.step };
        // A target that can't be met may be met a little lower, because placements differ.
        let arena = self.arena();
        let targets = (1..=3).map(|steps| arena.saturating_sub(steps * step) / 512 * 512);
        let targets: Vec<u64> = targets.take_while(|&target| target >= self.floor).collect();
        let mut blocked = None;
        let full = !differs || !memo.is_coarse();
        for quick in [differs.then_some(true), full.then_some(false)].into_iter().flatten() {
            for &target in &targets {
                let made = match quick {
                    true => {
                        memo.once(&Request { method: sketch.clone(), ..self.within(target) })?
                    }
                    false => memo.plan(&self.within(target))?,
                };
                match made {
                    Ok(planned) => return Ok((Some(planned), blocked)),
                    Err(no) => blocked = Some(no),
                }
            }
        }
        Ok((None, blocked))
    }

    /// The plan of the present step with full effort, if the job has taken a step and that is no
    /// slower.
    fn settled(&self, memo: &Memo) -> Result<Option<Arc<Planned>>, PlanError> {
        if self.now.plan.jobs[0].events.is_empty() {
            return Ok(None);
        }
        let proper = memo.plan(&self.within(self.arena()))?.ok();
        let now = self.now.plan.figures.iteration_ns;
        Ok(proper.filter(|proper| proper.plan.figures.iteration_ns <= now))
    }

    /// The request for a plan within these bytes.
    fn within(&self, target: u64) -> Request<'_> {
        Request { budget: Bytes(target), ..self.request.clone() }
    }

    /// The plan with the smallest arena found for the job, if that is smaller than the present one.
    /// Where hundreds of plans are made, jobs beside others get no lower than little effort gets
    /// them: with less they swap so much that they slow each other.
    fn sunk(&self, alone: bool, memo: &Memo) -> Result<Option<Arc<Planned>>, PlanError> {
        let least = if memo.is_coarse() && !alone {
            memo.lowest(&self.request)?
        } else {
            memo.least(&self.request, self.now.plan.figures.arena_bytes)?
        };
        Ok(least.ok().filter(|least| least.plan.figures.arena_bytes.0 < self.arena()))
    }

    /// The time lost by the next step relative to the job's own time, for each byte given up, as a
    /// fraction.
    fn price(&self) -> Option<(u128, u128)> {
        let (now, next) = (&self.now.plan.figures, &self.next.as_ref()?.plan.figures);
        let lost = next.iteration_ns.saturating_sub(now.iteration_ns);
        let own = now.unplanned_iteration_ns.0.max(1);
        let given = self.arena().saturating_sub(next.arena_bytes.0).max(1);
        let lost = u128::from(lost.0) * u128::from(self.priority);
        Some((lost, u128::from(own) * u128::from(given)))
    }

    /// Whether this job and `other` are equal in every respect.
    fn is_like(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.now, &other.now)
            && self.priority == other.priority
            && self.request.file.1 == other.request.file.1
            && self.request.device.pinned_bytes == other.request.device.pinned_bytes
            && self.request.method == other.request.method
    }
}

/// Compares two fractions whose cross products may overflow: by their whole parts, then by the
/// reciprocals of what remains.
fn compare(mut one: (u128, u128), mut other: (u128, u128)) -> Ordering {
    loop {
        let whole = (one.0 / one.1).cmp(&(other.0 / other.1));
        let (rest, left) = (one.0 % one.1, other.0 % other.1);
        if whole.is_ne() || rest == 0 || left == 0 {
            return whole.then(rest.min(1).cmp(&left.min(1)));
        }
        (one, other) = ((other.1, left), (one.1, rest));
    }
}

struct Ladder<'a> {
    jobs: &'a Jobs<'a>,
    rungs: Vec<Rung<'a>>,
    memo: &'a Memo,
}

impl<'a> Ladder<'a> {
    fn new(jobs: &'a Jobs<'a>, devices: &'a [Profile], memo: &'a Memo) -> Result<Self, PlanError> {
        let mut rung = |(job, device): (&Job<'a>, &'a Profile)| {
            let request = jobs.request(job, device, jobs.budget);
            let now = memo.unplanned(&request)?;
            let step = (now.plan.figures.arena_bytes.0 / STEPS).max(512);
            let floor = memo.known(job, device).floor.0;
            let (priority, next, blocked) = (job.priority.max(1), None, None);
            Ok(Rung { request, priority, now, next, step, floor, blocked })
        };
        let rungs =
            jobs.jobs.iter().zip(devices).map(&mut rung).collect::<Result<_, PlanError>>()?;
        Ok(Self { jobs, rungs, memo })
    }

    fn sum(&self) -> u64 {
        self.rungs.iter().map(Rung::arena).fold(0, u64::saturating_add)
    }

    /// Takes steps down until all jobs fit.
    fn descend(&mut self) -> Result<(), PlanError> {
        let budget = self.jobs.budget.0 / 512 * 512;
        let mut unknown: Vec<usize> = (0..self.rungs.len()).collect();
        while let over @ 1.. = self.sum().saturating_sub(budget) {
            let excess = over / self.rungs.len().max(1) as u64;
            let looks =
                self.memo.each(unknown.len(), |at| self.rungs[unknown[at]].look(excess, self.memo));
            for (index, look) in unknown.drain(..).zip(looks) {
                let rung = &mut self.rungs[index];
                let (next, blocked) = look?;
                rung.next = next;
                rung.blocked = blocked.or(rung.blocked.take());
            }
            let prices = self.rungs.iter().enumerate();
            let prices = prices.filter_map(|(index, rung)| Some((rung.price()?, index)));
            // Of equal prices the first job's is the lowest.
            let cheapest = prices.min_by(|a, b| compare(a.0, b.0));
            let Some((_, index)) = cheapest else {
                // Steps may have missed the smallest arena of a job.
                let alone = self.rungs.len() == 1;
                if self.exchange(|rung, memo| rung.sunk(alone, memo))? {
                    continue;
                }
                return Err(self.infeasible());
            };
            let rung = &mut self.rungs[index];
            if let Some(next) = rung.next.take() {
                rung.now = next;
            }
            unknown.push(index);
        }
        self.exchange(|rung, memo| rung.settled(memo))?;
        for _ in 0..self.rungs.len() {
            if !self.spread(budget)? {
                break;
            }
        }
        Ok(())
    }

    /// Gives each job the plan found for it, if one is. Returns whether there is any.
    fn exchange(
        &mut self,
        find: impl Fn(&Rung<'_>, &Memo) -> Result<Option<Arc<Planned>>, PlanError> + Sync,
    ) -> Result<bool, PlanError> {
        let found = self.memo.each(self.rungs.len(), |index| find(&self.rungs[index], self.memo));
        let mut any = false;
        for (rung, plan) in self.rungs.iter_mut().zip(found) {
            if let Some(plan) = plan? {
                (rung.now, any) = (plan, true);
            }
        }
        Ok(any)
    }

    /// Gives bytes left over to the job that gains most. Returns whether any job gains.
    fn spread(&mut self, budget: u64) -> Result<bool, PlanError> {
        let left = budget - self.sum();
        let mut best: Option<(u128, usize, Arc<Planned>)> = None;
        let mut tried: Vec<usize> = Vec::new();
        for (index, rung) in self.rungs.iter().enumerate() {
            let figures = &rung.now.plan.figures;
            let may = left >= 512 && figures.iteration_ns > figures.unplanned_iteration_ns;
            // Of equal jobs only the first is tried.
            if may && !tried.iter().any(|&other| rung.is_like(&self.rungs[other])) {
                tried.push(index);
            }
        }
        let wider = self.memo.each(tried.len(), |at| {
            let rung = &self.rungs[tried[at]];
            self.memo.plan(&rung.within(rung.arena() + left))
        });
        for (index, wider) in tried.into_iter().zip(wider) {
            let Ok(wider) = wider? else { continue };
            let rung = &self.rungs[index];
            let figures = &rung.now.plan.figures;
            let gained = figures.iteration_ns.saturating_sub(wider.plan.figures.iteration_ns);
            let own = figures.unplanned_iteration_ns.0.max(1);
            // The gain, in billionths of the job's own time.
            let gained = u128::from(gained.0) * u128::from(rung.priority);
            let gain = gained * 1_000_000_000 / u128::from(own);
            if gain > best.as_ref().map_or(0, |b| b.0) {
                best = Some((gain, index, wider));
            }
        }
        let Some((_, index, wider)) = best else { return Ok(false) };
        self.rungs[index].now = wider;
        Ok(true)
    }

    fn infeasible(&self) -> PlanError {
        let blocked = self.rungs.iter().enumerate().map(|(index, rung)| {
            let floor = || format!("its floor is {}", Bytes(rung.floor));
            let why = rung.blocked.as_ref().map_or_else(floor, |no| no.blocked.clone());
            let (name, arena) = (&rung.request.graph.name, Bytes(rung.arena()));
            format!("job {index} (`{name}`) gets no further down than {arena}: {why}")
        });
        PlanError::Infeasible(Box::new(Infeasible {
            budget: self.jobs.budget,
            floor: Bytes(self.rungs.iter().map(|r| r.floor).fold(0, u64::saturating_add)),
            lowest: Bytes(self.sum()),
            blocked: blocked.collect::<Vec<_>>().join("; "),
        }))
    }

    fn parts(self) -> Vec<Arc<Planned>> {
        self.rungs.into_iter().map(|rung| rung.now).collect()
    }
}

/// One plan from the jobs' own plans. The sub-arena and the pinned slots of each lie behind those
/// before it.
pub(super) fn joined(asked: &Jobs<'_>, parts: &[Arc<Planned>]) -> Plan {
    let mut jobs = Vec::with_capacity(parts.len());
    let mut figures = Figures::default();
    for part in parts {
        let own = &part.plan.figures;
        for mut job in part.plan.jobs.iter().cloned() {
            job.placements.iter_mut().for_each(|place| place.offset += figures.arena_bytes);
            job.host_slots.values_mut().for_each(|slot| *slot += figures.pinned_bytes);
            jobs.push(job);
        }
        figures.peak_bytes += own.peak_bytes;
        figures.arena_bytes += own.arena_bytes;
        figures.pinned_bytes += own.pinned_bytes;
        figures.unplanned_peak_bytes += own.unplanned_peak_bytes;
        figures.iteration_ns += own.iteration_ns;
        figures.first_iteration_ns += own.first_iteration_ns;
        figures.unplanned_iteration_ns += own.unplanned_iteration_ns;
    }
    let planner = asked.jobs.first().map_or("none", |job| job.method.name());
    Plan {
        planner: planner.to_owned(),
        options: asked.recorded_options.clone(),
        device: asked.device.clone(),
        budget: asked.budget,
        jobs,
        figures,
    }
}

/// The sum of the jobs' unplanned peaks, of which a budget may be a share.
#[must_use]
pub fn unplanned_peak(graphs: &[&Graph]) -> Bytes {
    let peaks = graphs.iter().map(|graph| u128::from(Liveness::new(graph).peak.0));
    Bytes(saturated(peaks.sum()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fractions_compare_exactly_even_where_their_products_overflow() {
        for (a, b) in [(1u128, 2u128), (7, 3), (0, 5), (22, 7), (355, 113)] {
            for (c, d) in [(1, 2), (14, 6), (0, 1), (355, 113), (9, 4)] {
                assert_eq!(compare((a, b), (c, d)), (a * d).cmp(&(c * b)), "{a}/{b} {c}/{d}");
            }
        }
        let large = 1 << 120;
        assert_eq!(compare((large, large + 1), (large + 1, large + 2)), Ordering::Less);
        assert_eq!(compare((large + 1, large), (large + 2, large + 1)), Ordering::Greater);
    }
}
