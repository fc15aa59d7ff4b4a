//! The requests that a job will make on a GPU, and what each block is for.
//!
//! One trace becomes one sequence of requests, which can be extended by any number of iterations.
//! [`super::answer`] replays the sequence through the allocator.

use neap_model::units::id32;
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::path::Path;

use super::before::Before;
use super::calls::Calls;
use super::gpu::{self, Effect, Rule, Settings};
use super::phases::Phases;
use super::roles::{Role, role};
use super::sequence::Sequence;
use super::trace::{self, Limits, Trace, TraceError};
use crate::sim::requests::Request;

/// A trace with its calls and iterations.
#[derive(Clone, Debug)]
pub struct Job {
    /// The trace as read.
    pub trace: Trace,
    /// The nesting of its operators.
    pub calls: Calls,
    /// Its iterations.
    pub phases: Phases,
}

impl Job {
    /// Reads a profiler's trace.
    ///
    /// # Errors
    /// When the trace can't be used, as [`trace::read`].
    pub fn read(path: &Path, limits: &Limits) -> Result<Self, TraceError> {
        Ok(Self::new(trace::read(path, limits)?))
    }

    /// Nests a trace's operators and finds its iterations.
    #[must_use]
    pub fn new(trace: Trace) -> Self {
        let calls = Calls::new(&trace);
        let phases = Phases::new(&trace, &calls);
        Self { trace, calls, phases }
    }
}

/// A block that will be requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// The requested bytes.
    pub bytes: u64,
    /// The purpose of the block.
    pub role: Role,
    /// The innermost operator that requests it, an index into [`Trace::ops`].
    pub op: Option<u32>,
    /// The rule that added it; `None` for a block of the trace.
    pub rule: Option<&'static str>,
    /// Whether it exists before the trace begins.
    pub before: bool,
}

/// The requests of a job.
#[derive(Clone, Debug)]
pub struct Forecast {
    /// In order.
    pub requests: Vec<Request>,
    /// The time of each request, in nanoseconds since the trace's first event.
    pub times: Vec<u64>,
    /// Blocks by id.
    pub blocks: Vec<Block>,
    /// Where each iteration begins in `requests`. The first entry is the end of the blocks from
    /// before.
    pub starts: Vec<usize>,
    /// What each rule changed.
    pub effects: BTreeMap<Rule, Effect>,
    /// Bytes of parameters, buffers and states from before the trace.
    pub before: BTreeMap<Role, u64>,
    /// Sentences about assumptions and omissions.
    pub notes: Vec<String>,
}

impl Forecast {
    /// Makes the forecast of a job.
    #[must_use]
    pub fn new(job: &Job, settings: &Settings) -> Self {
        let Job { trace, calls, phases } = job;
        let edited = gpu::edit(trace, calls, settings);
        let before = if settings.without.contains(&Rule::Before) {
            Before::default()
        } else {
            Before::new(trace, calls, &edited)
        };
        let sequence = Sequence::new(&before, &edited.lives);
        let from_before = before.roles();
        let blocks = sequence
            .lives
            .iter()
            .enumerate()
            .map(|(id, &life)| {
                let Some(life) = edited.lives.list.get(life as usize) else {
                    let (bytes, role) = from_before[id];
                    return Block { bytes, role, op: None, rule: None, before: true };
                };
                let op = Some(life.op).filter(|&o| o != super::calls::NONE);
                Block {
                    bytes: life.bytes,
                    role: role(trace, phases, life),
                    op,
                    rule: life.rule,
                    before: life.before,
                }
            })
            .collect::<Vec<_>>();
        let mut sums = BTreeMap::new();
        for block in blocks.iter().filter(|b| b.before) {
            let sum: &mut u64 = sums.entry(block.role).or_default();
            *sum = sum.saturating_add(block.bytes);
        }
        let starts = phases
            .iterations
            .iter()
            .map(|i| sequence.times.partition_point(|&t| t < i.span.start).max(sequence.before))
            .collect();
        let notes = trace.notes.iter().chain(&before.notes).chain(&edited.notes).cloned().collect();
        Self {
            requests: sequence.requests,
            times: sequence.times,
            blocks,
            starts,
            effects: edited.effects,
            before: sums,
            notes,
        }
    }

    /// Replaces what follows the last whole iteration by `count` iterations like it. Does nothing
    /// when the trace has no whole iteration.
    pub fn repeat(&mut self, phases: &Phases, count: usize) {
        let last = self.times.last().copied().unwrap_or(0);
        let stepped = phases.iterations.iter().any(|i| !i.steps.is_empty());
        let whole = |i: &super::phases::Iteration| {
            i.span.end <= last || (stepped && i.steps.iter().any(|s| s.end <= last))
        };
        let Some(index) = phases.iterations.iter().rposition(whole) else { return };
        let iteration = &phases.iterations[index];
        let from = self.starts[index];
        let to = self.times.partition_point(|&t| t <= iteration.span.end).max(from);
        let pattern: Vec<(Request, u64)> = self.requests[from..to]
            .iter()
            .copied()
            .zip(self.times[from..to].iter().copied())
            .collect();
        self.requests.truncate(to);
        self.times.truncate(to);
        self.starts.truncate(index + 1);
        let cleared = iteration.clears.first().map(|c| c.end);
        let mut pass = Pass::new(&pattern, &self.blocks, cleared);
        for round in 0..count {
            self.starts.push(self.requests.len());
            let later = (round as u64 + 1)
                .saturating_mul((iteration.span.end - iteration.span.start).saturating_add(1));
            pass.append(self, &pattern, later);
        }
    }
}

/// State for repeating an iteration.
struct Pass {
    /// Ids of the blocks that the repeated iteration allocates and leaves to the next one.
    left: HashSet<u32>,
    /// Blocks of the iteration before, by bytes and role, in order.
    previous: BTreeMap<(u64, Role), VecDeque<u32>>,
    /// When gradients are cleared, if the repeated iteration doesn't show that.
    clear_at: Option<u64>,
    /// Whether gradients are never freed.
    gradients_stay: bool,
}

impl Pass {
    fn new(pattern: &[(Request, u64)], blocks: &[Block], cleared: Option<u64>) -> Self {
        let mut left = HashSet::new();
        let mut order = Vec::new();
        let mut frees_older_gradients = false;
        for (request, _) in pattern {
            match *request {
                Request::Allocate { id, .. } => {
                    left.insert(id);
                    order.push(id);
                }
                Request::Free { id } => {
                    frees_older_gradients |=
                        !left.remove(&id) && blocks[id as usize].role == Role::Gradient;
                }
                Request::EmptyCache => {}
            }
        }
        let mut previous: BTreeMap<_, VecDeque<u32>> = BTreeMap::new();
        for id in order.into_iter().filter(|id| left.contains(id)) {
            let block = blocks[id as usize];
            previous.entry((block.bytes, block.role)).or_default().push_back(id);
        }
        let clear_at = cleared.filter(|_| !frees_older_gradients);
        Self {
            left,
            previous,
            clear_at,
            gradients_stay: !frees_older_gradients && cleared.is_none(),
        }
    }

    fn append(&mut self, forecast: &mut Forecast, pattern: &[(Request, u64)], later: u64) {
        let mut ids: HashMap<u32, u32> = HashMap::new();
        let mut left = Vec::new();
        let mut clear_at = self.clear_at;
        for &(request, time) in pattern {
            if clear_at.is_some_and(|at| time > at) {
                clear_at = None;
                let gradients: Vec<u32> = self
                    .previous
                    .iter_mut()
                    .filter(|((_, role), _)| *role == Role::Gradient)
                    .flat_map(|(_, ids)| ids.drain(..))
                    .collect();
                for id in gradients {
                    forecast.push(Request::Free { id }, time.saturating_add(later));
                }
            }
            match request {
                Request::Allocate { id, bytes, stream } => {
                    let block = forecast.blocks[id as usize];
                    let stays = self.left.contains(&id);
                    if stays
                        && (matches!(block.role, Role::OptimizerState | Role::Workspace)
                            || block.role == Role::Gradient && self.gradients_stay)
                    {
                        continue;
                    }
                    let new = id32(forecast.blocks.len());
                    forecast.blocks.push(block);
                    ids.insert(id, new);
                    forecast.push(
                        Request::Allocate { id: new, bytes, stream },
                        time.saturating_add(later),
                    );
                    if stays {
                        left.push(new);
                        if block.role != Role::Gradient
                            && let Some(old) = self.take(block)
                        {
                            forecast.push(Request::Free { id: old }, time.saturating_add(later));
                        }
                    }
                }
                Request::Free { id } => {
                    let old = ids.remove(&id).or_else(|| self.take(forecast.blocks[id as usize]));
                    if let Some(id) = old {
                        forecast.push(Request::Free { id }, time.saturating_add(later));
                    }
                }
                Request::EmptyCache => forecast.push(request, time.saturating_add(later)),
            }
        }
        for id in left {
            let block = forecast.blocks[id as usize];
            self.previous.entry((block.bytes, block.role)).or_default().push_back(id);
        }
    }

    fn take(&mut self, block: Block) -> Option<u32> {
        self.previous.get_mut(&(block.bytes, block.role))?.pop_front()
    }
}

impl Forecast {
    fn push(&mut self, request: Request, time: u64) {
        self.requests.push(request);
        self.times.push(time);
    }
}
