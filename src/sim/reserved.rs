//! How much memory a framework's allocator reserves for a job's residencies.
//!
//! Each residency is an allocation and a free. They are replayed in the order of simulated time,
//! iteration after iteration, until an iteration changes nothing more. All requests are on one
//! stream. Besides the tensors and workspaces of the graph, the two threads of a training iteration
//! each allocate a workspace for the matrix library at their first multiplication and keep it
//! ([`library_workspace`]). Under a plan a product in each thread comes before the tensors are
//! loaded, so that the workspaces do not lie among those that come and go. `neap run` does not use
//! this: it has one arena with planned addresses.

use std::collections::{BTreeMap, BTreeSet};

use super::allocator::replay::{LARGEST_DEVICE, Replay};
use super::allocator::{Config, Stats};
use super::engine::{self, Run};
use super::program::{Begin, Program};
use super::requests::Request;
use crate::contract::Plan;
use crate::device::Profile;
use crate::job::liveness::{Span, spans};
use crate::job::{Graph, Operator, Phase, Role};
use crate::units::{Bytes, Nanos, OpId, ParseBytesError, TensorId};

/// The framework's allocator settings and its device.
#[derive(Clone, Debug, PartialEq)]
pub struct Framework {
    /// The allocator's settings.
    pub config: Config,
    /// Bytes that each of its threads allocates at its first matrix multiplication.
    pub library: Bytes,
    /// The device's bytes, of which a memory fraction is taken. Without a fraction this has no
    /// effect.
    pub capacity: Bytes,
    /// One block of this size is requested and freed before anything else, so that all large blocks
    /// are cut out of one segment. Nothing where it is zero.
    pub first: Bytes,
}

impl Framework {
    /// `PyTorch` with these settings on `device`.
    #[must_use]
    pub fn on(device: &Profile, config: Config) -> Self {
        let limited = config.memory_fraction.is_some();
        let capacity =
            if limited { device.available().min(LARGEST_DEVICE) } else { LARGEST_DEVICE };
        Self { config, library: library_workspace(device), capacity, first: Bytes::ZERO }
    }

    /// The bytes of both threads' workspaces for the matrix library.
    #[must_use]
    pub const fn workspaces(&self) -> Bytes {
        Bytes(self.library.0 * 2)
    }

    /// With the first block that `plan` records for such settings.
    ///
    /// # Errors
    /// Where the plan's option is no number of bytes.
    pub fn for_plan(self, plan: &Plan) -> Result<Self, ParseBytesError> {
        let recorded = plan.options.get(FIRST_BLOCK).map(|bytes| bytes.parse()).transpose()?;
        Ok(Self { first: recorded.filter(|_| !self.config.expandable).unwrap_or_default(), ..self })
    }
}

/// The workspace that `PyTorch` allocates for cuBLAS in each thread: 8 MiB + 128 KiB before Hopper,
/// 32 MiB from Hopper on. A device of unknown generation counts as Hopper.
#[must_use]
pub fn library_workspace(device: &Profile) -> Bytes {
    const HOPPER: u32 = 9;
    if device.multiprocessors.is_some_and(|m| m.capability < HOPPER) {
        Bytes((8 << 20) + (128 << 10))
    } else {
        Bytes(32 << 20)
    }
}

/// What an allocator did for a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reserved {
    /// The counters when most was reserved over all iterations; of several such states the one with
    /// most bytes in use.
    pub at_peak: Stats,
    /// Counters at the end of the last iteration, and each one's own peak.
    pub stats: Stats,
    /// Iterations simulated, until one reserved the same bytes at every instant as the one before.
    pub iterations: u32,
    /// Whether the simulation reached that state.
    pub settled: bool,
    /// The last iteration: reserved and allocated bytes from each instant on.
    pub curve: Vec<(Nanos, Bytes, Bytes)>,
}

/// The name by which a plan records [`Framework::first`] among its options, in bytes.
pub const FIRST_BLOCK: &str = "first-block";

/// The most iterations that are simulated, settled or not.
const ITERATIONS: u32 = 24;

/// And for a first look: what reserves too much nearly always does so by then.
const EXCEEDING: u32 = 2;

/// A block's number. There is at most one block of a number at a time.
type BlockId = u32;

/// What a block of a [`Timeline`] is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holder {
    /// A tensor.
    Tensor(TensorId),
    /// An operator's workspace.
    Workspace(OpId),
    /// A workspace of the matrix library.
    Library,
    /// Nothing: [`Framework::first`].
    First,
}

/// The requests of a job: the blocks before the first iteration, and the changes in each iteration.
#[derive(Clone, Debug)]
pub struct Timeline {
    /// The block that is requested and freed before all others, if there is one.
    first: Option<(BlockId, Bytes)>,
    /// Blocks that exist before the first iteration.
    initial: Vec<(BlockId, Bytes)>,
    /// In time order, ends before begins.
    changes: Vec<(Nanos, Change)>,
    /// Number of tensors. Their blocks have the lowest ids.
    tensors: usize,
    /// The operators whose workspaces have the next ids.
    operators: Vec<OpId>,
    /// How long an iteration takes.
    iteration: Nanos,
}

#[derive(Clone, Copy, Debug)]
enum Change {
    End(BlockId),
    Begin(BlockId, Bytes),
    /// Begins in the first iteration and stays.
    Once(BlockId, Bytes),
}

impl Change {
    /// The request that this change makes in an iteration, counted from 0.
    const fn request(self, iteration: u32) -> Option<Request> {
        match self {
            Self::End(id) => Some(Request::Free { id }),
            Self::Begin(id, bytes) => Some(allocate(id, bytes)),
            Self::Once(id, bytes) if iteration == 0 => Some(allocate(id, bytes)),
            Self::Once(..) => None,
        }
    }
}

const fn allocate(id: BlockId, bytes: Bytes) -> Request {
    Request::Allocate { id, bytes, stream: 0 }
}

impl Timeline {
    fn new(graph: &Graph, operators: Vec<OpId>, run: &Run) -> Self {
        Self {
            first: None,
            initial: Vec::new(),
            changes: Vec::new(),
            tensors: graph.tensors.len(),
            operators,
            iteration: run.iteration,
        }
    }

    /// What the block with this id holds.
    #[must_use]
    pub fn holder(&self, id: u32) -> Holder {
        if self.first.is_some_and(|first| first.0 == id) {
            return Holder::First;
        }
        let id = id as usize;
        if id < self.tensors {
            return Holder::Tensor(TensorId::from_index(id));
        }
        self.operators.get(id - self.tensors).map_or(Holder::Library, |o| Holder::Workspace(*o))
    }

    /// All requests of the first `iterations` iterations, each with its time since the first one
    /// began.
    pub fn requests(&self, iterations: u32) -> impl Iterator<Item = (Nanos, Request)> + '_ {
        let before = self.before().map(|request| (Nanos::ZERO, request));
        let each = move |iteration: u32| {
            let began = Nanos(self.iteration.0.saturating_mul(u64::from(iteration)));
            self.changes.iter().filter_map(move |&(at, change)| {
                Some((Nanos(began.0.saturating_add(at.0)), change.request(iteration)?))
            })
        };
        before.chain((0..iterations).flat_map(each))
    }

    /// The requests before the first iteration.
    fn before(&self) -> impl Iterator<Item = Request> + '_ {
        let first = self.first.into_iter();
        first
            .flat_map(|(id, bytes)| [allocate(id, bytes), Request::Free { id }])
            .chain(self.initial.iter().map(|&(id, bytes)| allocate(id, bytes)))
    }

    /// The most bytes that blocks hold at a time.
    #[must_use]
    pub fn allocated(&self) -> Bytes {
        let (mut held, mut now, mut most) = (BTreeMap::new(), Bytes::ZERO, Bytes::ZERO);
        for (_, request) in self.requests(1).skip(2 * usize::from(self.first.is_some())) {
            match request {
                Request::Allocate { id, bytes, .. } => {
                    now += bytes;
                    held.insert(id, bytes);
                }
                Request::Free { id } => now -= held.remove(&id).unwrap_or_default(),
                Request::EmptyCache => {}
            }
            most = most.max(now);
        }
        most
    }

    /// The most that the allocator reserves for requests of at most `bytes`.
    #[must_use]
    pub fn reserved_by(&self, framework: &Framework, bytes: Bytes) -> Bytes {
        let mut replay = Replay::new(&framework.config, framework.capacity, None);
        let mut served = BTreeSet::new();
        for (_, request) in self.requests(EXCEEDING) {
            let counts = match request {
                Request::Allocate { id, bytes: its, .. } => its <= bytes && served.insert(id),
                Request::Free { id } => served.remove(&id),
                Request::EmptyCache => true,
            };
            if counts {
                replay.step(request);
            }
        }
        replay.report().at_peak.reserved
    }

    /// Sorts changes by time, ends before begins; otherwise the order stays.
    fn sorted(mut self) -> Self {
        self.changes.sort_by_key(|(at, change)| (*at, !matches!(change, Change::End(_))));
        self
    }

    /// Whether the allocator comes to reserve more than `most` bytes, and how many at that moment.
    #[must_use]
    pub fn exceeds(&self, framework: &Framework, most: Bytes) -> Option<Bytes> {
        let mut replay = Replay::new(&framework.config, framework.capacity, None);
        self.requests(EXCEEDING).find_map(|(_, request)| {
            replay.step(request);
            Some(replay.allocator().stats().reserved).filter(|reserved| *reserved > most)
        })
    }

    /// Replays iteration after iteration until one reserves the same bytes at every instant as the
    /// one before.
    #[must_use]
    pub fn settle(&self, framework: &Framework) -> Reserved {
        let mut replay = Replay::new(&framework.config, framework.capacity, None);
        for request in self.before() {
            replay.step(request);
        }
        let mut before = None;
        let mut iteration = 0;
        loop {
            let mut curve = Vec::with_capacity(self.changes.len());
            let now = replay.allocator().stats();
            curve.push((Nanos::ZERO, now.reserved, now.allocated));
            for &(at, change) in &self.changes {
                if let Some(request) = change.request(iteration) {
                    replay.step(request);
                }
                let now = replay.allocator().stats();
                match curve.last_mut() {
                    Some(last) if last.0 == at => *last = (at, now.reserved, now.allocated),
                    _ => curve.push((at, now.reserved, now.allocated)),
                }
            }
            iteration += 1;
            let held = |curve: &[(Nanos, Bytes, Bytes)]| {
                curve.iter().map(|(at, held, _)| (*at, *held)).collect::<Vec<_>>()
            };
            let settled = before.as_ref().is_some_and(|b: &Vec<_>| held(b) == held(&curve));
            if settled || iteration == ITERATIONS {
                let mut report = replay.report();
                if self.first.is_some() {
                    // While the first block was in use, nothing else was.
                    let used = || curve.iter().map(|(_, held, used)| (*held, *used));
                    report.at_peak.allocated = used().max().unwrap_or_default().1;
                    report.at_peak.segments = report.stats.segments;
                    report.stats.peak_allocated = used().map(|of| of.1).max().unwrap_or_default();
                }
                return Reserved {
                    at_peak: report.at_peak,
                    stats: report.stats,
                    iterations: iteration,
                    settled,
                    curve,
                };
            }
            before = Some(curve);
        }
    }
}

/// The two workspaces of the matrix library: one in the forward and optimize phases, one in
/// backward.
struct Library {
    ids: [Option<BlockId>; 2],
    bytes: Bytes,
}

impl Library {
    fn new(id: BlockId, framework: &Framework) -> Self {
        Self { ids: [Some(id), Some(id + 1)], bytes: framework.library }
    }

    fn before(&mut self, operator: &Operator) -> Option<Change> {
        const MULTIPLY: [&str; 10] = [
            "addbmm",
            "addmm",
            "addmv",
            "baddbmm",
            "bmm",
            "linear",
            "matmul",
            "mm",
            "mv",
            "_addmm_activation",
        ];
        let kind = operator.kind.rsplit("::").next().unwrap_or_default();
        if self.bytes == Bytes::ZERO || !MULTIPLY.contains(&kind) {
            return None;
        }
        let id = self.ids[usize::from(operator.phase == Phase::Backward)].take()?;
        Some(Change::Once(id, self.bytes))
    }
}

fn small(index: usize) -> BlockId {
    BlockId::try_from(index).unwrap_or(BlockId::MAX)
}

/// A job without a plan: tensors live as the framework keeps them ([`crate::job::liveness`]), and
/// the optimizer states are allocated at the optimizer step of the first iteration.
#[must_use]
pub fn unplanned(graph: &Graph, run: &Run, framework: &Framework) -> Timeline {
    let all = (0..graph.operators.len()).map(OpId::from_index).collect();
    let mut timeline = Timeline::new(graph, all, run);
    let (tensors, operators) = (graph.tensors.len(), graph.operators.len());
    let stepped = graph.operators.iter().position(|o| o.phase == Phase::Optimize);
    let mut library = Library::new(small(tensors + operators), framework);
    // For each operator, the tensors that begin with it and those that end before it.
    let (mut begins, mut ends) = (vec![Vec::new(); operators], vec![Vec::new(); operators + 1]);
    let mut states = Vec::new();
    for (index, span) in spans(graph).into_iter().enumerate() {
        let tensor = &graph.tensors[index];
        match span {
            Span::Always if tensor.role == Role::OptimizerState && stepped.is_some() => {
                states.push(index)
            }
            Span::Always => timeline.initial.push((small(index), tensor.bytes)),
            Span::Within { first, last } => {
                begins[first.index()].push(index);
                ends[last.index() + 1].push(index);
            }
            Span::Wraps { first, until } => {
                begins[first.index()].push(index);
                ends[until.index()].push(index);
            }
        }
    }
    let mut now = Nanos::ZERO;
    for (index, operator) in graph.operators.iter().enumerate() {
        let (start, end) = run.steps.get(index).copied().unwrap_or((now, now));
        now = end;
        timeline.changes.extend(ends[index].iter().map(|&t| (start, Change::End(small(t)))));
        timeline.changes.extend(library.before(operator).map(|change| (start, change)));
        if stepped == Some(index) {
            timeline.changes.extend(
                states.iter().map(|&t| (start, Change::Once(small(t), graph.tensors[t].bytes))),
            );
        }
        timeline.changes.extend(
            begins[index].iter().map(|&t| (start, Change::Begin(small(t), graph.tensors[t].bytes))),
        );
        if operator.workspace > Bytes::ZERO {
            let id = small(tensors + index);
            timeline
                .changes
                .extend([(start, Change::Begin(id, operator.workspace)), (end, Change::End(id))]);
        }
    }
    timeline.changes.extend(ends[operators].iter().map(|&t| (now, Change::End(small(t)))));
    timeline.sorted()
}

/// A job under a plan: its program's residencies in a run. Tensors that start on the device are
/// loaded before the first iteration, those that never leave it first.
#[must_use]
pub fn planned(graph: &Graph, program: &Program, run: &Run, framework: &Framework) -> Timeline {
    let steps = program.steps.iter().map(|s| s.operator).collect();
    let mut timeline = Timeline::new(graph, steps, run);
    let tensors = graph.tensors.len();
    let mut library = Library::new(small(tensors + program.steps.len()), framework);
    if framework.first > Bytes::ZERO {
        timeline.first = Some((small(tensors + program.steps.len() + 2), framework.first));
    }
    let mut leave = Vec::new();
    for step in &program.steps {
        if let Some(Change::Once(id, bytes)) = library.before(graph.operator(step.operator)) {
            timeline.initial.push((id, bytes));
        }
    }
    for residency in &program.residencies {
        let (begin, end) = engine::life(residency, run);
        let (id, bytes) = match (residency.tensor, residency.first_step) {
            (Some(tensor), _) => (small(tensor.index()), graph.tensor(tensor).bytes),
            (None, step) => (small(tensors + step.unwrap_or_default()), residency.bytes),
        };
        let starts = residency.begin == Begin::Iteration;
        if starts {
            if residency.stays { &mut timeline.initial } else { &mut leave }.push((id, bytes));
        }
        // A residency of no duration takes no bytes.
        if !residency.stays && begin >= end && !starts {
            continue;
        }
        if !starts {
            timeline.changes.push((begin, Change::Begin(id, bytes)));
        }
        if !residency.stays {
            timeline.changes.push((end, Change::End(id)));
        }
    }
    timeline.initial.extend(leave);
    timeline.sorted()
}
