//! The independent proof that a plan is safe.
//!
//! The checker implements the meaning of a plan ([`super::plan`]) on its own: it reads the events,
//! derives the waits and keeps the time with code of its own. It shares no code with planners or
//! engine, so that a mistake there can't hide here. A plan is safe if, whatever time operators and
//! copies take, every step finds its inputs, in the right version, at addresses that no other
//! residency of any job holds; if nothing waits for ever; and if the iteration can repeat. The code
//! that loads the files compares the hash of the graph.

mod arrangement;
mod memory;
mod order;
mod program;
mod refusal;
mod several;
mod task;
#[cfg(test)]
mod tests;
mod timeline;
mod window;

pub use refusal::Refusal;

use super::plan::{Figures, JobPlan, Plan};
use crate::job::Graph;
use crate::units::{Bytes, Nanos, OpId};
use program::Program;

/// The figures of a plan that was proved safe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proof {
    /// Figures of the plan, computed without those that the plan claims.
    pub figures: Figures,
    /// The same figures for each job alone.
    pub jobs: Vec<Figures>,
}

/// The most reasons that are collected.
const MOST: usize = 64;

/// Proves a plan safe and its figures right. `graphs` has the graph of each job.
///
/// # Errors
/// All reasons to refuse the plan. Plans are untrusted; graphs were checked by [`Graph::new`].
pub fn check(plan: &Plan, graphs: &[Graph]) -> Result<Proof, Vec<Refusal>> {
    let proof = check_safety(plan, graphs)?;
    let (claimed, found) = (plan.figures, proof.figures);
    let mut refusals = Vec::new();
    for (figure, claimed, found) in [
        ("peak_bytes", claimed.peak_bytes.0, found.peak_bytes.0),
        ("arena_bytes", claimed.arena_bytes.0, found.arena_bytes.0),
        ("pinned_bytes", claimed.pinned_bytes.0, found.pinned_bytes.0),
        ("iteration_ns", claimed.iteration_ns.0, found.iteration_ns.0),
        ("first_iteration_ns", claimed.first_iteration_ns.0, found.first_iteration_ns.0),
        ("unplanned_peak_bytes", claimed.unplanned_peak_bytes.0, found.unplanned_peak_bytes.0),
        (
            "unplanned_iteration_ns",
            claimed.unplanned_iteration_ns.0,
            found.unplanned_iteration_ns.0,
        ),
    ] {
        if claimed != found {
            refusals.push(Refusal::Figure { figure, claimed, found: u128::from(found) });
        }
    }
    if refusals.is_empty() { Ok(proof) } else { Err(refusals) }
}

/// Proves a plan safe, whatever figures it claims. The proof has the right figures.
///
/// # Errors
/// All reasons to refuse the plan.
pub fn check_safety(plan: &Plan, graphs: &[Graph]) -> Result<Proof, Vec<Refusal>> {
    if plan.jobs.is_empty() || plan.jobs.len() != graphs.len() {
        return Err(vec![Refusal::Jobs { jobs: plan.jobs.len(), graphs: graphs.len() }]);
    }
    if let Err(problem) = plan.device.validate() {
        return Err(vec![Refusal::Device(problem)]);
    }
    let mut refusals = Refusals::default();
    if plan.budget > plan.device.available() {
        refusals.add(Refusal::BudgetBeyondDevice {
            budget: plan.budget.0,
            available: plan.device.available().0,
        });
    }
    let mut proved = Vec::with_capacity(plan.jobs.len());
    for (index, (job, graph)) in plan.jobs.iter().zip(graphs).enumerate() {
        match prove(plan, job, graph, std::mem::take(&mut refusals)) {
            Ok(job) => proved.push(job),
            Err(reasons) if plan.jobs.len() == 1 => return Err(reasons),
            Err(reasons) => {
                let job = format!("job {index} (`{}`)", graph.name);
                return Err(reasons
                    .into_iter()
                    .map(|reason| Refusal::Job { job: job.clone(), reason: Box::new(reason) })
                    .collect());
            }
        }
    }
    several::apart(graphs, &proved, &mut refusals);
    refusals.so_far()?;
    let figures = several::figures(&proved).ok_or_else(|| vec![Refusal::TooLong])?;
    Ok(Proof { figures, jobs: proved.into_iter().map(|job| job.figures).collect() })
}

/// Proves one job safe, as if it were alone. `refusals` has the reasons found so far.
fn prove(
    plan: &Plan,
    job: &JobPlan,
    graph: &Graph,
    mut refusals: Refusals,
) -> Result<Proved, Vec<Refusal>> {
    if job.latencies.len() != graph.operators.len() {
        refusals.add(Refusal::Latencies {
            latencies: job.latencies.len(),
            operators: graph.operators.len(),
        });
    }
    for (latency, operator) in job.latencies.iter().zip(&graph.operators) {
        if latency.time == Nanos::ZERO {
            refusals.add(Refusal::LatencyZero { operator: operator.name.clone() });
        }
    }
    arrangement::prove(job, graph, &mut refusals);
    refusals.so_far()?;
    // Every later part relies on what the ones before have proved.
    program::ids(job, graph, &mut refusals);
    window::ids(job, graph, &mut refusals);
    refusals.so_far()?;
    let mut program = Program::read(job, graph, &mut refusals);
    let pinned = memory::slots(job, &mut program, plan.device.pinned_bytes, &mut refusals);
    refusals.so_far()?;
    let (spots, arena) = memory::places(job, &mut program, plan.budget, &mut refusals);
    refusals.so_far()?;
    let inside = window::read(job, &mut program, &spots, u128::from(plan.budget.0), &mut refusals);
    refusals.so_far()?;
    order::prove(&program, &mut refusals);
    refusals.so_far()?;
    let Some(clock) = timeline::run(job, &program, &plan.device.link) else {
        return Err(vec![Refusal::TooLong]);
    };
    let unplanned_time = unplanned_time(job, graph);
    let loading = memory::loading(&program, &plan.device.link);
    let narrow = |value: u128| u64::try_from(value).map_err(|_| vec![Refusal::TooLong]);
    let extent = |ranges: &[(u128, u128)]| ranges.iter().map(|r| r.1).max().unwrap_or(0);
    let own = memory::peak(
        &program,
        &clock,
        |r| !inside.residencies.contains(&r),
        |step| !inside.workspaces.contains(&step),
    );
    let in_window = memory::peak(
        &program,
        &clock,
        |r| inside.residencies.contains(&r),
        |step| inside.workspaces.contains(&step),
    );
    let figures = Figures {
        peak_bytes: Bytes(narrow(memory::peak(&program, &clock, |_| true, |_| true))?),
        arena_bytes: Bytes(narrow(arena)?),
        pinned_bytes: Bytes(narrow(extent(&pinned))?),
        iteration_ns: Nanos(narrow(clock.end)?),
        first_iteration_ns: Nanos(narrow(clock.end.saturating_add(loading))?),
        unplanned_peak_bytes: Bytes(narrow(memory::unplanned_peak(graph.framework()))?),
        unplanned_iteration_ns: Nanos(narrow(unplanned_time)?),
    };
    let peaks = [Bytes(narrow(own)?), Bytes(narrow(in_window)?)];
    Ok(Proved { figures, arena: inside.own, pinned, window: inside.window, peaks })
}

/// What the operators of the graph's file take one after the other.
fn unplanned_time(job: &JobPlan, graph: &Graph) -> u128 {
    let times = job.latencies.iter().map(|l| u128::from(l.time.0));
    let Some(origin) = &graph.origin else { return times.sum() };
    let runs_whole = |(_, piece): &(OpId, Option<u32>)| piece.is_none();
    let whole = origin.operators.iter().map(runs_whole).zip(times);
    whole.filter(|(whole, _)| *whole).map(|(_, time)| time).sum::<u128>()
        + job.whole.values().map(|l| u128::from(l.time.0)).sum::<u128>()
}

/// What was found of one job: its figures, and the stretches of both memories that are ever its
/// own.
struct Proved {
    figures: Figures,
    arena: Vec<(u128, u128)>,
    pinned: Vec<(u128, u128)>,
    /// Its window in the arena.
    window: Option<(u128, u128)>,
    /// Its largest sums of bytes outside the window, and in the window.
    peaks: [Bytes; 2],
}

/// The reasons so far; beyond a limit they are dropped.
#[derive(Default)]
struct Refusals(Vec<Refusal>);

impl Refusals {
    fn add(&mut self, refusal: Refusal) {
        match self.0.len() {
            0..MOST => self.0.push(refusal),
            MOST => self.0.push(Refusal::More),
            _ => {}
        }
    }

    fn so_far(&mut self) -> Result<(), Vec<Refusal>> {
        if self.0.is_empty() { Ok(()) } else { Err(std::mem::take(&mut self.0)) }
    }
}

/// The bytes that a tensor or workspace of `bytes` occupies.
fn blocks(bytes: Bytes) -> u128 {
    u128::from(bytes.0).div_ceil(512) * 512
}
