//! What a job's residencies make a framework's allocator reserve.
//!
//! For: every residency as a request and its end as a free, in simulated time order, iteration after iteration until
//! nothing changes any more. Not for: addresses in one arena, which is what `run` does.
//!
//! Everything is asked for on one stream. Besides the tensors and workspaces of the graph, the two threads of a training
//! iteration each ask once for a workspace of the library that multiplies matrices, at their first multiplication, and
//! keep it ([`library_workspace`]).

use super::allocator::replay::{LARGEST_DEVICE, Replay};
use super::allocator::{Config, Stats};
use super::engine::{self, Run};
use super::program::{Begin, Program};
use super::requests::Request;
use crate::device::Profile;
use crate::job::liveness::{Span, spans};
use crate::job::{Graph, Operator, Phase, Role};
use crate::units::{Bytes, Nanos};

/// The framework whose allocator is meant.
#[derive(Clone, Debug, PartialEq)]
pub struct Framework {
    /// Its settings.
    pub config: Config,
    /// What each of its threads asks for at its first matrix multiplication.
    pub library: Bytes,
    /// The device; what a memory fraction is of. Without a fraction nothing depends on it.
    pub capacity: Bytes,
}

impl Framework {
    /// `PyTorch` with these settings on `device`.
    #[must_use]
    pub fn on(device: &Profile, config: Config) -> Self {
        let limited = config.memory_fraction.is_some();
        let capacity =
            if limited { device.available().min(LARGEST_DEVICE) } else { LARGEST_DEVICE };
        Self { config, library: library_workspace(device), capacity }
    }
}

/// What `PyTorch` asks for on behalf of cuBLAS for each of its threads: 8 MiB + 128 KiB before Hopper, 32 MiB from
/// Hopper on. Of a device that neap does not know the generation of, the larger is assumed.
#[must_use]
pub fn library_workspace(device: &Profile) -> Bytes {
    const BEFORE_HOPPER: [&str; 8] =
        ["p100", "rtx2080ti", "rtx3060", "rtx4060", "rtx4090", "a6000", "a100-40g", "a100-80g"];
    if BEFORE_HOPPER.contains(&device.name.as_str()) {
        Bytes((8 << 20) + (128 << 10))
    } else {
        Bytes(32 << 20)
    }
}

/// What a job makes an allocator do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reserved {
    /// When most was reserved, over all iterations, and most of it in use.
    pub at_peak: Stats,
    /// Counters at the end of the last iteration, and each one's own peak.
    pub stats: Stats,
    /// Iterations simulated: until one reserved at every instant what the one before did.
    pub iterations: u32,
    /// Whether that came about.
    pub settled: bool,
    /// The last iteration: reserved and allocated bytes from each instant on.
    pub curve: Vec<(Nanos, Bytes, Bytes)>,
}

/// After so many iterations a job that still isn't settled is taken as it is.
const ITERATIONS: u32 = 24;

/// At most one block at a time.
type Slot = u32;

/// What happens in every iteration, in order, and what before and in the first one only.
#[derive(Default)]
struct Timeline {
    /// Blocks there before the first iteration.
    initial: Vec<(Slot, Bytes)>,
    /// In time order, ends before begins.
    changes: Vec<(Nanos, Change)>,
}

#[derive(Clone, Copy)]
enum Change {
    End(Slot),
    Begin(Slot, Bytes),
    /// Begins in the first iteration and stays.
    Once(Slot, Bytes),
}

impl Timeline {
    /// Ends before begins at the same instant; otherwise as they were added.
    fn sorted(mut self) -> Self {
        self.changes.sort_by_key(|(at, change)| (*at, !matches!(change, Change::End(_))));
        self
    }

    fn settle(&self, framework: &Framework) -> Reserved {
        let mut replay = Replay::new(&framework.config, framework.capacity, None);
        let ask = |replay: &mut Replay, id, bytes| {
            replay.step(Request::Allocate { id, bytes, stream: 0 });
        };
        for &(slot, bytes) in &self.initial {
            ask(&mut replay, slot, bytes);
        }
        let mut before = None;
        let mut iteration = 0;
        loop {
            iteration += 1;
            let mut curve = Vec::with_capacity(self.changes.len());
            let now = replay.allocator().stats();
            curve.push((Nanos::ZERO, now.reserved, now.allocated));
            for &(at, change) in &self.changes {
                match change {
                    Change::End(id) => {
                        replay.step(Request::Free { id });
                    }
                    Change::Begin(slot, bytes) => ask(&mut replay, slot, bytes),
                    Change::Once(slot, bytes) if iteration == 1 => ask(&mut replay, slot, bytes),
                    Change::Once(..) => {}
                }
                let now = replay.allocator().stats();
                match curve.last_mut() {
                    Some(last) if last.0 == at => *last = (at, now.reserved, now.allocated),
                    _ => curve.push((at, now.reserved, now.allocated)),
                }
            }
            let held = |curve: &[(Nanos, Bytes, Bytes)]| {
                curve.iter().map(|(at, held, _)| (*at, *held)).collect::<Vec<_>>()
            };
            let settled = before.as_ref().is_some_and(|b: &Vec<_>| held(b) == held(&curve));
            if settled || iteration == ITERATIONS {
                let report = replay.report();
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

/// The two workspaces of the library: in the forward and optimize phases, and in the backward phase.
struct Library {
    slots: [Option<Slot>; 2],
    bytes: Bytes,
}

impl Library {
    fn new(slot: Slot, framework: &Framework) -> Self {
        Self { slots: [Some(slot), Some(slot + 1)], bytes: framework.library }
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
        let slot = self.slots[usize::from(operator.phase == Phase::Backward)].take()?;
        Some(Change::Once(slot, self.bytes))
    }
}

fn small(index: usize) -> Slot {
    Slot::try_from(index).unwrap_or(Slot::MAX)
}

/// A job without a plan: tensors live as the framework keeps them ([`crate::job::liveness`]), and optimizer states come
/// to be at the first iteration's optimizer step, as in any training that starts.
#[must_use]
pub fn unplanned(graph: &Graph, run: &Run, framework: &Framework) -> Reserved {
    let mut timeline = Timeline::default();
    let (tensors, operators) = (graph.tensors.len(), graph.operators.len());
    let stepped = graph.operators.iter().position(|o| o.phase == Phase::Optimize);
    let mut library = Library::new(small(tensors + operators), framework);
    // Tensors that begin with, and that end before, each operator.
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
            let slot = small(tensors + index);
            timeline.changes.extend([
                (start, Change::Begin(slot, operator.workspace)),
                (end, Change::End(slot)),
            ]);
        }
    }
    timeline.changes.extend(ends[operators].iter().map(|&t| (now, Change::End(small(t)))));
    timeline.sorted().settle(framework)
}

/// A job under a plan: its program's residencies in a run. What starts on the device is loaded before the first iteration.
#[must_use]
pub fn planned(graph: &Graph, program: &Program, run: &Run, framework: &Framework) -> Reserved {
    let mut timeline = Timeline::default();
    let tensors = graph.tensors.len();
    let mut library = Library::new(small(tensors + program.steps.len()), framework);
    for (step, (start, _)) in program.steps.iter().zip(&run.steps) {
        timeline
            .changes
            .extend(library.before(graph.operator(step.operator)).map(|change| (*start, change)));
    }
    for residency in &program.residencies {
        let (begin, end) = engine::life(residency, run);
        let (slot, bytes) = match (residency.tensor, residency.first_step) {
            (Some(tensor), _) => (small(tensor.index()), graph.tensor(tensor).bytes),
            (None, step) => (small(tensors + step.unwrap_or_default()), residency.bytes),
        };
        let starts = residency.begin == Begin::Iteration;
        if starts {
            timeline.initial.push((slot, bytes));
        }
        // One that takes no time takes no bytes either.
        if !residency.stays && begin >= end && !starts {
            continue;
        }
        if !starts {
            timeline.changes.push((begin, Change::Begin(slot, bytes)));
        }
        if !residency.stays {
            timeline.changes.push((end, Change::End(slot)));
        }
    }
    timeline.sorted().settle(framework)
}
