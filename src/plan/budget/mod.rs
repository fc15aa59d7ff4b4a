//! The budget loop: decide, write down, place, and again with a tighter target until the arena
//! fits.
//!
//! Where the planner fails, quick planners are asked too ([`Method::portfolio`]), and a plan that
//! another planner made says so in its options. Where there is a plan to beat, one that can't be
//! quicker even without addresses is not placed. Before a budget is refused, the lowest
//! plan is looked for over the whole range of targets ([`minimum`]), so every budget is met from
//! the least one found on, and a refusal says what was found. Plans for tighter budgets count too,
//! so that no looser budget has a slower plan (`rungs`).

mod apart;
mod blocked;
mod first;
mod mend;
mod minimum;
mod polish;
mod proof;
mod reserve;
mod rungs;
mod written;

use std::collections::BTreeMap;
use std::sync::Arc;

use super::emit::Emitted;
use super::method::Method;
use super::planner::{Given, Memory};
use super::{pinned, place};
pub(super) use first::{First, make_of};
pub use minimum::{minimum, minimum_for};
pub(super) use polish::slow;
pub(crate) use reserve::quicker_for;
pub(super) use rungs::settled;
pub(super) use written::on_device;
pub use written::{unplanned, written};

use crate::contract::{Figures, JobPlan, Latency, Placement, Plan};
use crate::device::{Link, Profile};
use crate::job::Graph;
use crate::job::liveness::Liveness;
use crate::parallel::in_parallel;
use crate::sim::engine::{self, Run};
use crate::sim::program::{Direction, Program};
use crate::sim::reserved::{self, Framework, Reserved};
use crate::units::{Bytes, Nanos, OpId};

/// What to plan.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    /// The job.
    pub graph: &'a Graph,
    /// Its file, as the plan shall name it, and its hash.
    pub file: (String, String),
    /// The device.
    pub device: &'a Profile,
    /// One for each operator.
    pub latencies: &'a [Latency],
    /// Of an arranged graph: what operators of its file that run in pieces take as a whole. Where
    /// it is not known it is the sum of the pieces.
    pub whole: BTreeMap<OpId, Latency>,
    /// What the arena may not exceed.
    pub budget: Bytes,
    /// The planner and its switches.
    pub method: Method,
    /// The switches that differ from their defaults, for the plan's record.
    pub recorded_options: BTreeMap<String, String>,
}

impl<'a> Request<'a> {
    /// A request for the default planner, for a graph without a file.
    #[must_use]
    pub fn new(
        graph: &'a Graph,
        device: &'a Profile,
        latencies: &'a [Latency],
        budget: Bytes,
    ) -> Self {
        Self {
            graph,
            file: (String::new(), String::new()),
            device,
            latencies,
            whole: BTreeMap::new(),
            budget,
            method: Method::default(),
            recorded_options: BTreeMap::new(),
        }
    }

    /// The time of the iteration without a plan.
    pub(super) fn unplanned(&self) -> Nanos {
        self.latencies.iter().map(|l| l.time).sum()
    }
}

/// A plan and its noise-free run.
#[derive(Clone, Debug)]
pub struct Planned {
    /// The plan.
    pub plan: Plan,
    /// Its program.
    pub program: Program,
    /// Its iteration.
    pub run: Run,
    /// What a framework's allocator reserves for it, where the budget is one of reserved bytes.
    pub reserved: Option<Reserved>,
    /// What polishing begins with.
    basis: Option<Arc<polish::Basis>>,
}

impl Planned {
    /// What the budget binds: the arena, and where it was planned for a framework's allocator what
    /// that reserves too.
    #[must_use]
    pub fn bound(&self) -> Bytes {
        let reserved = self.reserved.as_ref().map_or(Bytes::ZERO, |r| r.at_peak.reserved);
        self.plan.figures.arena_bytes.max(reserved)
    }

    /// A framework's allocator refuses a request of it.
    fn fails(&self) -> bool {
        self.reserved.as_ref().is_some_and(|r| r.stats.ooms > 0)
    }
}

/// The budget can't be met.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Infeasible {
    /// What was asked for.
    pub budget: Bytes,
    /// No plan is below this.
    pub floor: Bytes,
    /// The least that was found of what the budget binds.
    pub lowest: Bytes,
    /// What stands in the way.
    pub blocked: String,
}

/// No plan.
#[derive(Clone, Debug, thiserror::Error)]
pub enum PlanError {
    /// The answer is no.
    #[error("the budget of {} ({} bytes) can't be met: floor {} ({} bytes), lowest reached {} ({} bytes); {}", .0.budget, .0.budget.0, .0.floor, .0.floor.0, .0.lowest, .0.lowest.0, .0.blocked)]
    Infeasible(Box<Infeasible>),
    /// The planner contradicted itself: a defect of neap, never the user's fault.
    #[error(
        "the planner made a plan that it can't simulate ({0}); this is a defect of neap, please report it with the graph"
    )]
    Defect(String),
}

/// Separates plans that can't be made from defects.
///
/// # Errors
/// Only [`PlanError::Defect`].
pub fn feasible<T>(made: Result<T, PlanError>) -> Result<Result<T, Box<Infeasible>>, PlanError> {
    match made {
        Err(PlanError::Infeasible(no)) => Ok(Err(no)),
        made => made.map(Ok),
    }
}

/// How often the target is tightened before giving up.
const TIGHTENINGS: usize = 12;

/// And how many targets between the budget and the floor are tried after that.
const SWEEP: u64 = 8;

/// How often it is for planners that only stand in.
const FEW: usize = 2;

/// Where waiting takes no more than this part of the unplanned time, tighter budgets are not
/// looked at.
const WAITING: u64 = 16;

/// Makes a plan within the budget.
///
/// # Errors
/// [`PlanError::Infeasible`] when there is none to be found.
pub fn make(request: &Request<'_>) -> Result<Planned, PlanError> {
    make_for(request, None)
}

/// As [`make`]; with a framework the budget binds what its allocator would reserve, beside the
/// arena.
///
/// # Errors
/// As [`make`].
pub fn make_for(
    request: &Request<'_>,
    framework: Option<&Framework>,
) -> Result<Planned, PlanError> {
    make_against(request, framework, None)
}

/// As [`make_for`]. With the time of a plan that another order of the job has within the same
/// budget, plans that are proved to be no quicker are not looked for.
///
/// # Errors
/// As [`make`].
pub(super) fn make_against(
    request: &Request<'_>,
    framework: Option<&Framework>,
    other: Option<Nanos>,
) -> Result<Planned, PlanError> {
    let first = First::new(request, framework);
    if framework.is_none() {
        return make_of(request, first, other);
    }
    let mut no = match first {
        First { made: Err(PlanError::Infeasible(no)), proved: false } => no,
        First { made, .. } => return made,
    };
    let liveness = Liveness::new(request.graph);
    match minimum::anywhere(request, &liveness, framework)? {
        Some(planned) if planned.bound() <= request.budget => Ok(bound_by(planned, request.budget)),
        found => {
            no.lowest = found.map_or(no.lowest, |planned| planned.bound().min(no.lowest));
            Err(PlanError::Infeasible(no))
        }
    }
}

/// The plan, or a quicker one in which single choices of it are changed.
pub(super) fn polished(request: &Request<'_>, planned: Planned) -> Result<Planned, PlanError> {
    polish::polish(request, &Liveness::new(request.graph), planned)
}

/// A plan for a tighter budget as one for this budget.
fn bound_by(mut planned: Planned, budget: Bytes) -> Planned {
    planned.plan.budget = budget;
    planned
}

/// Operators wait long for the link.
fn waits(planned: &Planned) -> bool {
    let stalls = planned.run.stalls;
    (stalls.swap_in + stalls.swap_out + stalls.tail).0
        > planned.plan.figures.unplanned_iteration_ns.0 / WAITING
}

/// As [`make_for`], for one of many plans: refused without looking for the lowest plan.
///
/// # Errors
/// As [`make`].
pub(super) fn within(
    request: &Request<'_>,
    framework: Option<&Framework>,
) -> Result<Planned, PlanError> {
    let liveness = Liveness::new(request.graph);
    let own = alone(request, &liveness, framework, None, &mut Memory::Nothing);
    let fails = matches!(own, Err(PlanError::Infeasible(_)));
    let mut best = own;
    let mut methods = if fails { request.method.portfolio() } else { Vec::new() };
    let with = |method: &Method| Request { method: method.clone(), ..request.clone() };
    methods.retain(|method| proof::floor(&with(method), &liveness) <= request.budget);
    let made = in_parallel(methods.len(), |at| {
        let request = with(&methods[at]);
        alone(&request, &liveness, framework, Some(Nanos(u64::MAX)), &mut Memory::Nothing)
    });
    for (method, made) in methods.iter().zip(made) {
        match made {
            Ok(mut other) => {
                let rival = best.as_ref().map_or(Nanos(u64::MAX), |b| b.run.iteration);
                if other.run.iteration < rival {
                    stand_in(request, &mut other, method);
                    best = Ok(other);
                }
            }
            Err(PlanError::Infeasible(no)) => {
                if let Err(PlanError::Infeasible(own)) = &mut best {
                    own.lowest = own.lowest.min(no.lowest);
                }
            }
            Err(defect) => return Err(defect),
        }
    }
    best
}

/// As [`within`], without other planners that stand in.
pub(super) fn by_itself(request: &Request<'_>) -> Result<Planned, PlanError> {
    alone(request, &Liveness::new(request.graph), None, None, &mut Memory::Nothing)
}

/// A plan of another planner becomes this one's, and says whose it was.
fn stand_in(request: &Request<'_>, planned: &mut Planned, method: &Method) {
    if method.name() != request.method.name() {
        request.method.name().clone_into(&mut planned.plan.planner);
        planned.plan.options.insert("portfolio".to_owned(), method.name().to_owned());
    }
}

/// The planner by itself; with a rival, only what is quicker counts, and little is done to find it.
fn alone(
    request: &Request<'_>,
    liveness: &Liveness,
    framework: Option<&Framework>,
    rival: Option<Nanos>,
    memory: &mut Memory,
) -> Result<Planned, PlanError> {
    let budget = request.budget.0 / 512 * 512;
    let mut search = Search::new(request, framework, liveness, rival, memory);
    if framework.is_some() {
        return match search.reserve()? {
            Some(planned) => Ok(planned),
            None => Err(search.refusal()),
        };
    }
    let mut target = budget;
    let own = matches!(request.method, Method::Neap(_));
    let mut apart = None;
    for attempt in 0..if rival.is_some() && !own { FEW } else { TIGHTENINGS } {
        let height = match search.attempt(target, &request.method)? {
            Attempt::Fits(planned) => return Ok(*planned),
            Attempt::TooHigh(height) => height,
            Attempt::Blocked => break,
        };
        if attempt == 0 {
            apart = search.apart(height)?;
        }
        let Some(next) = search.tighter(target, height, attempt) else { break };
        target = next;
    }
    if let Some(planned) = apart {
        return Ok(planned);
    }
    // What can't be placed at one target often can at a lower one, and more easily when nothing
    // lingers or comes back early: other tensors leave, other holes open.
    let narrow = request.method.narrow().filter(|_| rival.is_none());
    let spread = budget.saturating_sub(liveness.floor.0);
    if let Some(narrow) = narrow.filter(|_| spread > 0) {
        for part in 0..SWEEP {
            let target = (budget - spread * part / SWEEP) / 512 * 512;
            if let Attempt::Fits(planned) = search.attempt(target, &narrow)? {
                return Ok(*planned);
            }
        }
    }
    Err(search.refusal())
}

/// As [`make`] with little effort, for one of many plans: the planner by itself, and a few targets
/// only.
///
/// # Errors
/// As [`make`].
pub(super) fn once(request: &Request<'_>) -> Result<Planned, PlanError> {
    let liveness = Liveness::new(request.graph);
    let budget = request.budget.0 / 512 * 512;
    let memory = &mut Memory::Nothing;
    let mut search = Search::new(request, None, &liveness, None, memory);
    let mut target = budget;
    for attempt in 0..FEW {
        match search.attempt(target, &request.method)? {
            Attempt::Fits(planned) => return Ok(*planned),
            Attempt::TooHigh(height) => match search.tighter(target, height, attempt) {
                Some(next) => target = next,
                None => break,
            },
            Attempt::Blocked => break,
        }
    }
    Err(search.refusal())
}

/// What came of one target.
enum Attempt {
    Fits(Box<Planned>),
    /// The target is reached, but the arena, or what the allocator would reserve, needs at least
    /// this many bytes.
    TooHigh(u64),
    /// The target can't be reached.
    Blocked,
}

struct Search<'a> {
    request: &'a Request<'a>,
    framework: Option<&'a Framework>,
    liveness: &'a Liveness,
    budget: u64,
    lowest: u64,
    blocked: String,
    /// What takes as long is of no use.
    rival: Option<Nanos>,
    /// How much an allocator reserves beyond the budget is of no use either.
    brief: bool,
    memory: &'a mut Memory,
}

impl<'a> Search<'a> {
    fn new(
        request: &'a Request<'a>,
        framework: Option<&'a Framework>,
        liveness: &'a Liveness,
        rival: Option<Nanos>,
        memory: &'a mut Memory,
    ) -> Self {
        Self {
            request,
            framework,
            liveness,
            budget: request.budget.0 / 512 * 512,
            lowest: u64::MAX,
            blocked: String::new(),
            rival,
            brief: false,
            memory,
        }
    }

    /// The target after one whose plan is too high. What is decided then is placed differently, so
    /// it is lower by somewhat more than what was too much; ever more.
    fn tighter(&self, target: u64, height: u64, attempt: usize) -> Option<u64> {
        let step = (height - self.budget) + ((self.budget / 1024) << attempt.min(6)).max(512);
        (step < target).then(|| (target - step) / 512 * 512)
    }

    fn refusal(self) -> PlanError {
        PlanError::Infeasible(Box::new(Infeasible {
            budget: self.request.budget,
            floor: self.liveness.floor,
            lowest: Bytes(self.lowest),
            blocked: self.blocked,
        }))
    }

    fn attempt(&mut self, target: u64, method: &Method) -> Result<Attempt, PlanError> {
        let request = self.request;
        let Request { graph, latencies, device, .. } = *request;
        let given =
            Given { graph, latencies, link: &device.link, pinned: device.pinned_bytes, target };
        let decided = method.decide(&given, self.memory);
        let emitted = decided.emitted;
        let program = Program::new(request.graph, request.latencies, &emitted.events)
            .map_err(|e| PlanError::Defect(e.to_string()))?;
        // Without addresses it is no slower than with them.
        if self.rival.is_some() || self.framework.is_some() {
            let run = nominal(&program, &device.link)?;
            if self.rival.is_some_and(|rival| run.iteration >= rival) {
                return Ok(Attempt::Blocked);
            }
            // Addresses hardly change times, and finding them takes as long as planning.
            if let Some(framework) = self.framework.filter(|_| decided.reached) {
                let requests = reserved::planned(graph, &program, &run, framework);
                if let Some(bound) = requests.exceeds(framework, Bytes(self.budget)) {
                    if self.brief {
                        return Ok(Attempt::TooHigh(bound.0));
                    }
                    let bound = requests.settle(framework).at_peak.reserved;
                    self.reserves(Bytes(decided.peak.1), bound);
                    return Ok(Attempt::TooHigh(bound.0));
                }
            }
        }
        let (program, placements, height) = placed(program, &emitted, self.budget)?;
        if height <= self.budget {
            let mut planned = finish(request, self.liveness, emitted, program, placements, height)?;
            if self.rival.is_some_and(|rival| planned.run.iteration >= rival) {
                return Ok(Attempt::Blocked);
            }
            planned.reserved = simulated(request.graph, &planned, self.framework);
            let bound = planned.bound().0;
            if bound <= self.budget && !planned.fails() {
                let basis = polish::Basis::new(method, target, self.memory, self.framework);
                planned.basis = basis.map(Arc::new);
                return Ok(Attempt::Fits(Box::new(planned)));
            }
            self.reserves(Bytes(height), Bytes(bound));
            // A failure within the budget is one of the memory fraction's.
            return Ok(Attempt::TooHigh(bound.max(self.budget + 512)));
        }
        self.lowest = self.lowest.min(height);
        if !decided.reached {
            if self.blocked.is_empty() {
                self.blocked = blocked::blocked(request, decided.peak, &emitted.events);
            }
            return Ok(Attempt::Blocked);
        }
        if self.blocked.is_empty() {
            self.blocked = format!(
                "tensors fit by size ({}) but not in one piece: placing them takes {}",
                Bytes(decided.peak.1),
                Bytes(height)
            );
        }
        Ok(Attempt::TooHigh(height))
    }
}

/// What a framework's allocator reserves for a plan.
fn simulated(graph: &Graph, planned: &Planned, framework: Option<&Framework>) -> Option<Reserved> {
    framework.map(|f| reserved::planned(graph, &planned.program, &planned.run, f).settle(f))
}

fn placed(
    mut program: Program,
    emitted: &Emitted,
    budget: u64,
) -> Result<(Program, Vec<Placement>, u64), PlanError> {
    let tied = place::items(&program, emitted);
    let bare: Vec<place::Item> = tied.iter().map(|(item, _)| item.clone()).collect();
    let layout = place::place(&bare, budget);
    let placements = place::placements(&program, &tied, &layout.offsets);
    program.place(&placements).map_err(|e| PlanError::Defect(e.to_string()))?;
    Ok((program, placements, layout.height))
}

pub(super) fn nominal(program: &Program, link: &Link) -> Result<Run, PlanError> {
    engine::nominal(program, link).map_err(|e| PlanError::Defect(e.to_string()))
}

fn finish(
    request: &Request<'_>,
    liveness: &Liveness,
    emitted: Emitted,
    mut program: Program,
    placements: Vec<Placement>,
    height: u64,
) -> Result<Planned, PlanError> {
    let link = &request.device.link;
    let pool = pinned::place(&mut program, link, request.device.pinned_bytes)
        .map_err(|e| PlanError::Defect(e.to_string()))?;
    let (host_slots, pinned, run) = (pool.offsets, pool.bytes, pool.run);
    let framework = request.graph.framework();
    let unplanned_peak =
        if request.graph.origin.is_some() { Liveness::new(framework).peak } else { liveness.peak };
    let job = JobPlan {
        graph: request.file.0.clone(),
        graph_sha256: request.file.1.clone(),
        arrangement: request
            .graph
            .origin
            .as_ref()
            .map(|o| o.arrangement.clone())
            .unwrap_or_default(),
        whole: whole(request),
        latencies: request.latencies.to_vec(),
        libraries: BTreeMap::new(),
        events: emitted.events,
        placements,
        host_slots,
        window: None,
    };
    let unplanned = job.framework_latencies(request.graph).iter().map(|l| l.time).sum();
    let figures = Figures {
        peak_bytes: engine::peak(&engine::memory(&program, &run)),
        arena_bytes: Bytes(height),
        pinned_bytes: pinned,
        iteration_ns: run.iteration,
        first_iteration_ns: first_load(request.graph, &program, request.device) + run.iteration,
        unplanned_peak_bytes: unplanned_peak,
        unplanned_iteration_ns: unplanned,
    };
    let plan = Plan {
        planner: request.method.name().to_owned(),
        options: request.recorded_options.clone(),
        device: request.device.clone(),
        budget: request.budget,
        jobs: vec![job],
        figures,
    };
    Ok(Planned { plan, program, run, reserved: None, basis: None })
}

/// What operators of the file that run in pieces take as a whole.
fn whole(request: &Request<'_>) -> BTreeMap<OpId, Latency> {
    let Some(origin) = &request.graph.origin else { return BTreeMap::new() };
    let mut whole: BTreeMap<OpId, Latency> = BTreeMap::new();
    for (&(id, piece), latency) in origin.operators.iter().zip(request.latencies) {
        if piece.is_some() {
            let none = Latency { time: Nanos::ZERO, source: latency.source };
            whole.entry(id).or_insert(none).time += latency.time;
        }
    }
    for (id, of) in &mut whole {
        *of = request.whole.get(id).copied().unwrap_or(*of);
    }
    whole
}

/// Loading what starts on the device, one tensor after the other.
pub(super) fn first_load(graph: &Graph, program: &Program, device: &Profile) -> Nanos {
    let starters =
        program.residencies.iter().filter(|r| r.begin == crate::sim::program::Begin::Iteration);
    starters
        .filter_map(|r| r.tensor)
        .map(|t| engine::copy_time(&device.link, Direction::H2d, graph.tensor(t).bytes, false))
        .sum()
}
