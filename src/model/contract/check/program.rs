//! The checker's reading of the events: steps, copies and residencies in program order, the
//! versions of tensors, and the waits of each task.

use super::refusal::Refusal;
pub(super) use super::task::{Kind, Residency, Task, Wait, Why};
use super::{Refusals, blocks};
use crate::contract::plan::{Event, JobPlan, Place, Trigger};
use crate::job::{Graph, Operator, Replay};
use crate::units::TensorId;

/// A job's iteration.
pub(super) struct Program<'a> {
    pub graph: &'a Graph,
    pub tasks: Vec<Task>,
    pub residencies: Vec<Residency>,
    /// The task of each step, in order.
    pub steps: Vec<usize>,
    /// For each operator the task that runs it.
    pub runs: Vec<usize>,
    /// For each tensor whether it starts on the host.
    pub on_host: Vec<bool>,
    /// For each tensor whether an event copies it.
    pub copied: Vec<bool>,
    /// For each tensor whether an operator generates it.
    pub generated: Vec<bool>,
}

/// The state of a tensor while events are read.
#[derive(Clone, Copy, Default)]
struct State {
    open: Option<usize>,
    version: u32,
    /// The task that last wrote the residency's bytes.
    written: Option<usize>,
    /// The swap-in that brought the residency.
    brought: Option<usize>,
    latest: Option<usize>,
    host: Host,
}

#[derive(Clone, Copy, Default)]
enum Host {
    #[default]
    Nothing,
    Valid(u32),
    /// It was written since the copy, by this task.
    Stale(usize),
}

/// Checks that ids are in range and triggers in order.
pub(super) fn ids(job: &JobPlan, graph: &Graph, refusals: &mut Refusals) {
    let (tensors, operators) = (graph.tensors.len(), graph.operators.len());
    let mut before = None;
    for (event, what) in job.events.iter().enumerate() {
        let Trigger { after } = what.trigger();
        let mut operator = |id: u32| {
            if id as usize >= operators {
                refusals.add(Refusal::UnknownOperator { event, id, operators });
            }
        };
        if let Some(after) = after {
            operator(after.0);
        }
        if let Event::Recompute { operator: op, .. } = what {
            operator(op.0);
        }
        let mut tensor = |id: TensorId| {
            if id.index() >= tensors {
                refusals.add(Refusal::UnknownTensor {
                    place: format!("event {event}"),
                    id: id.0,
                    tensors,
                });
            }
        };
        match what {
            Event::SwapOut { tensor: id, .. }
            | Event::SwapIn { tensor: id, .. }
            | Event::Release { tensor: id, .. } => tensor(*id),
            Event::Recompute { keep, .. } => keep.iter().copied().for_each(tensor),
        }
        if after < before {
            refusals.add(Refusal::Unsorted { event });
        }
        before = after;
    }
    for id in job.host_slots.keys().filter(|id| id.index() >= tensors) {
        refusals.add(Refusal::UnknownTensor {
            place: "a slot of the pinned pool".to_owned(),
            id: id.0,
            tensors,
        });
    }
    for (position, placement) in job.placements.iter().enumerate() {
        if let Place::Tensor { tensor, .. } = placement.place
            && tensor.index() >= tensors
        {
            refusals.add(Refusal::UnknownTensor {
                place: format!("placement {position}"),
                id: tensor.0,
                tensors,
            });
        }
    }
}

impl<'a> Program<'a> {
    /// Reads a plan that passed [`ids`].
    pub fn read(job: &JobPlan, graph: &'a Graph, refusals: &mut Refusals) -> Self {
        let mut generated = vec![false; graph.tensors.len()];
        for operand in graph.operators.iter().flat_map(Operator::generates) {
            generated[operand.tensor.index()] = true;
        }
        let mut program = Self {
            graph,
            tasks: Vec::with_capacity(job.events.len() + graph.operators.len()),
            residencies: Vec::with_capacity(job.events.len() + graph.tensors.len()),
            steps: Vec::new(),
            runs: vec![usize::MAX; graph.operators.len()],
            on_host: starts_on_host(job, graph, &generated),
            copied: vec![false; graph.tensors.len()],
            generated,
        };
        let mut walk = Walk {
            state: vec![State::default(); graph.tensors.len()],
            out: None,
            inward: None,
            refusals,
        };
        for tensor in 0..graph.tensors.len() {
            if program.on_host[tensor] {
                walk.state[tensor].host = Host::Valid(0);
            } else if !program.generated[tensor] {
                walk.begin(&mut program, tensor, None);
            }
        }
        let mut events = job.events.iter().enumerate().peekable();
        for position in 0..=graph.operators.len() {
            // The events after the operator before `position` come before operator `position`.
            while let Some((event, what)) =
                events.next_if(|(_, e)| e.trigger().after.map_or(0, |k| k.index() + 1) <= position)
            {
                walk.event(&mut program, event, what);
            }
            if position < graph.operators.len() {
                program.runs[position] = program.tasks.len();
                walk.step(&mut program, position, None, &[]);
            }
        }
        let Walk { state, .. } = walk;
        program.close(&state, refusals);
        program
    }

    pub fn tensor(&self, tensor: usize) -> String {
        self.graph.tensors[tensor].name.clone()
    }

    /// The description of a task.
    pub fn task(&self, task: usize) -> String {
        match self.tasks[task].kind {
            Kind::Step { operator, event: None } => {
                format!("operator `{}`", self.graph.operators[operator].name)
            }
            Kind::Step { operator, event: Some(event) } => {
                format!(
                    "the recompute of `{}` (event {event})",
                    self.graph.operators[operator].name
                )
            }
            Kind::Out { tensor, event } => {
                format!("the swap-out of `{}` (event {event})", self.tensor(tensor))
            }
            Kind::In { tensor, event } => {
                format!("the swap-in of `{}` (event {event})", self.tensor(tensor))
            }
        }
    }

    /// The description of a place; its ids need not exist.
    pub fn place(&self, place: Place) -> String {
        match place {
            Place::Tensor { tensor, residency } => {
                let name = self.graph.tensors.get(tensor.index()).map_or("?", |t| &t.name);
                format!("residency {residency} of `{name}`")
            }
            Place::Workspace { step } => match self.steps.get(step as usize) {
                Some(task) => format!("the workspace of step {step}, {}", self.task(*task)),
                None => format!("the workspace of step {step}"),
            },
        }
    }

    /// The end of the iteration: checks that its residencies are those of the start, and numbers
    /// residencies as placements do.
    fn close(&mut self, state: &[State], refusals: &mut Refusals) {
        let mut last_version = vec![0; self.graph.tensors.len()];
        for operand in self.graph.operators.iter().flat_map(Operator::updates) {
            let version = &mut last_version[operand.tensor.index()];
            *version = operand.version.max(*version);
        }
        let mut count = vec![0u32; self.graph.tensors.len()];
        for (tensor, state) in state.iter().enumerate() {
            let open = state.open.filter(|r| self.residencies[*r].out.is_none());
            let stays = if self.generated[tensor] {
                false
            } else {
                let name = || self.graph.tensors[tensor].name.clone();
                let valid = matches!(state.host, Host::Valid(v) if v == last_version[tensor]);
                match (self.on_host[tensor], open) {
                    (false, None) => refusals.add(Refusal::LeavesDevice { tensor: name() }),
                    (true, Some(_)) => refusals.add(Refusal::StaysOnDevice { tensor: name() }),
                    (true, None) if !valid => {
                        refusals.add(Refusal::HostCopyLost { tensor: name() });
                    }
                    _ => {}
                }
                open.is_some()
            };
            if let (true, Some(open)) = (stays, open) {
                self.residencies[open].stays = true;
                // The residency at the start is its first one.
                count[tensor] = 1;
            }
        }
        for residency in &mut self.residencies {
            let next = &mut count[residency.tensor];
            if residency.stays || (residency.begin.is_none() && *next > 0) {
                residency.number = 0;
            } else {
                residency.number = *next;
                *next += 1;
            }
        }
    }
}

/// The tensors that no operator generates and whose first event is a swap-in before any use.
fn starts_on_host(job: &JobPlan, graph: &Graph, generated: &[bool]) -> Vec<bool> {
    let mut first_use = vec![usize::MAX; graph.tensors.len()];
    for (position, operator) in graph.operators.iter().enumerate().rev() {
        for operand in operator.reads().chain(operator.writes()) {
            first_use[operand.tensor.index()] = position;
        }
    }
    let mut seen = generated.to_vec();
    let mut on_host = vec![false; graph.tensors.len()];
    for event in &job.events {
        let (tensor, inward) = match event {
            Event::SwapIn { tensor, .. } => (tensor.index(), true),
            Event::SwapOut { tensor, .. } | Event::Release { tensor, .. } => {
                (tensor.index(), false)
            }
            Event::Recompute { .. } => continue,
        };
        let position = event.trigger().after.map_or(0, |k| k.index() + 1);
        on_host[tensor] |= inward && !seen[tensor] && position <= first_use[tensor];
        seen[tensor] = true;
    }
    on_host
}

struct Walk<'r> {
    state: Vec<State>,
    /// The last copy in each direction.
    out: Option<usize>,
    inward: Option<usize>,
    refusals: &'r mut Refusals,
}

impl Walk<'_> {
    fn event(&mut self, program: &mut Program, event: usize, what: &Event) {
        match what {
            Event::SwapOut { tensor, trigger } => {
                self.swap_out(program, event, tensor.index(), *trigger)
            }
            Event::SwapIn { tensor, trigger } => {
                self.swap_in(program, event, tensor.index(), *trigger)
            }
            Event::Release { tensor, .. } => {
                if let Some(open) = self.end(program, event, tensor.index()) {
                    program.residencies[open].ended_by = Some(event);
                    self.state[tensor.index()].open = None;
                }
            }
            Event::Recompute { operator, keep, .. } => {
                self.recompute(program, event, operator.index(), keep)
            }
        }
    }

    /// Begins a residency with a task, or with the iteration.
    fn begin(&mut self, program: &mut Program, tensor: usize, task: Option<usize>) {
        let state = &mut self.state[tensor];
        if let (Some(task), Some(earlier)) = (task, state.latest) {
            let waits =
                program.residencies[earlier].ends(&program.tasks).filter(|end| *end != task);
            let waits: Vec<_> =
                waits.map(|task| Wait { task, why: Why::Earlier(tensor) }).collect();
            program.tasks[task].waits.extend(waits);
        }
        state.open = Some(program.residencies.len());
        state.latest = state.open;
        state.written = task;
        state.brought = None;
        program.residencies.push(Residency {
            tensor,
            number: 0,
            begin: task,
            last: None,
            out: None,
            stays: false,
            ended_by: None,
        });
    }

    /// The residency that an event may end.
    fn end(&mut self, program: &Program, event: usize, tensor: usize) -> Option<usize> {
        let state = self.state[tensor];
        let earlier = state.latest.and_then(|r| program.residencies[r].ended_by);
        let refusal = match (state.open, earlier) {
            (Some(open), None) => return Some(open),
            (_, Some(earlier)) => {
                Refusal::EndedTwice { event, tensor: program.tensor(tensor), earlier }
            }
            (None, None) => Refusal::NothingToEnd { event, tensor: program.tensor(tensor) },
        };
        self.refusals.add(refusal);
        None
    }

    fn copy(
        program: &mut Program,
        kind: Kind,
        trigger: Trigger,
        queue: &mut Option<usize>,
    ) -> usize {
        let mut waits = Vec::with_capacity(3);
        if let Some(after) = trigger.after {
            waits.push(Wait { task: program.runs[after.index()], why: Why::Trigger });
        }
        if let Some(before) = *queue {
            waits.push(Wait { task: before, why: Why::Queue });
        }
        *queue = Some(program.tasks.len());
        program.tasks.push(Task { kind, waits, workspace: 0 });
        program.tasks.len() - 1
    }

    fn swap_out(&mut self, program: &mut Program, event: usize, tensor: usize, trigger: Trigger) {
        program.copied[tensor] = true;
        let Some(open) = self.end(program, event, tensor) else { return };
        let task = Self::copy(program, Kind::Out { tensor, event }, trigger, &mut self.out);
        let state = &mut self.state[tensor];
        if let Some(written) = state.written {
            program.tasks[task].waits.push(Wait { task: written, why: Why::Data(tensor) });
        }
        state.host = Host::Valid(state.version);
        program.residencies[open].out = Some(task);
        program.residencies[open].ended_by = Some(event);
    }

    fn swap_in(&mut self, program: &mut Program, event: usize, tensor: usize, trigger: Trigger) {
        program.copied[tensor] = true;
        let task = Self::copy(program, Kind::In { tensor, event }, trigger, &mut self.inward);
        match self.state[tensor].host {
            Host::Valid(version) => self.state[tensor].version = version,
            Host::Nothing => {
                self.refusals.add(Refusal::NoHostCopy { event, tensor: program.tensor(tensor) })
            }
            Host::Stale(writer) => {
                let writer = program.task(writer);
                self.refusals.add(Refusal::StaleHostCopy {
                    event,
                    tensor: program.tensor(tensor),
                    writer,
                });
            }
        }
        self.vacant(program, tensor, task);
        self.begin(program, tensor, Some(task));
        self.state[tensor].brought = Some(task);
    }

    /// Checks that every residency of the tensor was ended by an event.
    fn vacant(&mut self, program: &Program, tensor: usize, task: usize) {
        if self.state[tensor].open.is_some_and(|r| program.residencies[r].out.is_none()) {
            self.refusals.add(Refusal::StillResident {
                step: program.task(task),
                tensor: program.tensor(tensor),
            });
        }
    }

    fn recompute(
        &mut self,
        program: &mut Program,
        event: usize,
        operator: usize,
        keep: &[TensorId],
    ) {
        let what = &program.graph.operators[operator];
        let name = || what.name.clone();
        if program.runs[operator] == usize::MAX {
            self.refusals.add(Refusal::RecomputeTooEarly { event, operator: name() });
        }
        match what.replay {
            Replay::Never => self.refusals.add(Refusal::NeverReplayed { event, operator: name() }),
            Replay::SkipUpdates => {}
            Replay::Pure => {
                for update in what.updates().filter(|o| !program.generated[o.tensor.index()]) {
                    let tensor = program.tensor(update.tensor.index());
                    self.refusals.add(Refusal::UpdatesTwice { event, operator: name(), tensor });
                }
            }
        }
        let mut generates: Vec<_> = what.generates().map(|o| o.tensor).collect();
        generates.sort_unstable();
        let mut keep = keep.to_vec();
        keep.sort_unstable();
        for pair in keep.windows(2).filter(|pair| pair[0] == pair[1]) {
            self.refusals
                .add(Refusal::KeepsTwice { event, tensor: program.tensor(pair[0].index()) });
        }
        keep.dedup();
        for other in keep.iter().filter(|t| generates.binary_search(t).is_err()) {
            self.refusals.add(Refusal::KeepsOther {
                event,
                operator: name(),
                tensor: program.tensor(other.index()),
            });
        }
        self.step(program, operator, Some(event), &keep);
    }

    /// Reads a step: an operator, or a recompute with the tensors that it keeps (sorted).
    fn step(
        &mut self,
        program: &mut Program,
        operator: usize,
        event: Option<usize>,
        keep: &[TensorId],
    ) {
        let graph = program.graph;
        let what = &graph.operators[operator];
        let task = program.tasks.len();
        let previous = program.steps.last().copied();
        let waits = previous.map(|task| Wait { task, why: Why::Program }).into_iter().collect();
        program.tasks.push(Task {
            kind: Kind::Step { operator, event },
            waits,
            workspace: blocks(what.workspace),
        });
        program.steps.push(task);
        // The writes that the recompute leaves out.
        let mut skipped: Vec<TensorId> = match (event, what.replay) {
            (Some(_), Replay::SkipUpdates) => {
                what.updates().map(|o| o.tensor).filter(|t| !program.generated[t.index()]).collect()
            }
            _ => Vec::new(),
        };
        skipped.sort_unstable();
        let left_out = |tensor: TensorId| skipped.binary_search(&tensor).is_ok();
        for operand in what.reads().filter(|o| !left_out(o.tensor)) {
            self.touch(program, task, operand.tensor.index(), operand.version);
        }
        for operand in what.updates().filter(|o| !left_out(o.tensor)) {
            let tensor = operand.tensor.index();
            self.touch(program, task, tensor, operand.version - 1);
            let state = &mut self.state[tensor];
            if let Some(Kind::Out { event, .. }) = state
                .open
                .and_then(|r| program.residencies[r].out)
                .map(|out| program.tasks[out].kind)
            {
                self.refusals.add(Refusal::WrittenAfterSwapOut {
                    step: program.task(task),
                    tensor: program.tensor(tensor),
                    event,
                });
            }
            state.written = Some(task);
            state.version = operand.version;
            state.host = state.host.spoil(task);
        }
        for operand in what.generates() {
            let tensor = operand.tensor.index();
            if event.is_some() && keep.binary_search(&operand.tensor).is_err() {
                program.tasks[task].workspace += blocks(graph.tensors[tensor].bytes);
                continue;
            }
            self.vacant(program, tensor, task);
            self.begin(program, tensor, Some(task));
            let state = &mut self.state[tensor];
            state.version = 0;
            state.host = state.host.spoil(task);
            if let Some(open) = state.open {
                program.residencies[open].last = Some(task);
            }
        }
    }

    /// A step reads a version of a tensor.
    fn touch(&mut self, program: &mut Program, task: usize, tensor: usize, wanted: u32) {
        let state = self.state[tensor];
        let Some(open) = state.open else {
            self.refusals.add(Refusal::NotResident {
                step: program.task(task),
                tensor: program.tensor(tensor),
            });
            return;
        };
        if state.version != wanted {
            let (step, tensor) = (program.task(task), program.tensor(tensor));
            self.refusals.add(Refusal::WrongVersion { step, tensor, wanted, found: state.version });
        }
        if program.residencies[open].last != Some(task)
            && let Some(brought) = state.brought
        {
            program.tasks[task].waits.push(Wait { task: brought, why: Why::Data(tensor) });
        }
        program.residencies[open].last = Some(task);
    }
}

impl Host {
    /// The state of a host copy after a task has written the tensor.
    const fn spoil(self, task: usize) -> Self {
        match self {
            Self::Valid(_) => Self::Stale(task),
            other => other,
        }
    }
}
