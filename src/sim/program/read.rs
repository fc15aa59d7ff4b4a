//! Reading a job's events in program order into steps, copies and residencies.

use super::*;

/// Where a tensor is while events are read in program order.
#[derive(Clone, Copy, Default)]
struct State {
    /// Its current residency, if it is on the device.
    open: Option<usize>,
    /// Whether a swap-out of the current residency was read.
    leaving: bool,
    /// The copy of its latest swap-out, which wrote the host's version.
    host: Option<usize>,
    /// How many residencies it has had.
    count: u32,
    /// The last residency it had.
    last: Option<usize>,
    /// The last step that wrote it.
    writer: Option<usize>,
}

pub(super) struct Reader<'a> {
    graph: &'a Graph,
    latencies: &'a [Latency],
    /// Whether an operator generates the tensor.
    generated: Vec<bool>,
    states: Vec<State>,
    program: Program,
}

impl<'a> Reader<'a> {
    pub(super) fn new(graph: &'a Graph, latencies: &'a [Latency]) -> Self {
        let program = Program {
            steps: Vec::with_capacity(graph.operators.len()),
            copies: Vec::new(),
            residencies: Vec::with_capacity(graph.tensors.len()),
            loaded: Bytes::ZERO,
            stretches: Stretches::default(),
        };
        let mut generated = vec![false; graph.tensors.len()];
        for operand in graph.operators.iter().flat_map(|o| o.generates()) {
            generated[operand.tensor.index()] = true;
        }
        Self {
            graph,
            latencies,
            generated,
            states: vec![State::default(); graph.tensors.len()],
            program,
        }
    }

    pub(super) fn read(mut self, events: &[Event]) -> Result<Program, ProgramError> {
        self.begin_iteration(events);
        let mut step_of = Vec::with_capacity(self.graph.operators.len());
        let mut next = 0;
        for index in 0..=self.graph.operators.len() {
            while let Some(event) = events.get(next) {
                let place = event.trigger().after.map_or(0, |k| k.index() + 1);
                if place > index {
                    break;
                }
                if place < index {
                    return Err(error(next, "stands after events of a later operator"));
                }
                self.event(next, event, step_of.last().copied())?;
                next += 1;
            }
            if index < self.graph.operators.len() {
                step_of.push(self.program.steps.len());
                self.step(OpId::from_index(index), None, &[])?;
            }
        }
        if next < events.len() {
            return Err(error(next, "its trigger is beyond the last operator"));
        }
        self.go_round();
        Ok(self.program)
    }

    /// A tensor that no operator generates and that is still resident stays round the end. Its
    /// residency then gets the name of the tensor's first one.
    fn go_round(&mut self) {
        for (state, generated) in self.states.iter().zip(&self.generated) {
            if let (Some(open), false, false) = (state.open, state.leaving, *generated) {
                let last = &mut self.program.residencies[open];
                last.stays = true;
                if let Place::Tensor { residency, .. } = &mut last.place {
                    *residency = 0;
                }
            }
        }
    }

    /// Tensors that no operator generates start on the device, unless their first event is a
    /// swap-in that comes before any use.
    fn begin_iteration(&mut self, events: &[Event]) {
        let mut on_host = vec![false; self.graph.tensors.len()];
        let mut first_use = vec![usize::MAX; self.graph.tensors.len()];
        for (index, operator) in self.graph.operators.iter().enumerate() {
            for operand in operator.reads().chain(operator.writes()) {
                let first = &mut first_use[operand.tensor.index()];
                *first = (*first).min(index);
            }
        }
        let mut seen = vec![false; self.graph.tensors.len()];
        for event in events {
            if let Event::SwapOut { tensor, .. }
            | Event::SwapIn { tensor, .. }
            | Event::Release { tensor, .. } = event
            {
                let t = tensor.index();
                if t < seen.len() && !std::mem::replace(&mut seen[t], true) {
                    let place = event.trigger().after.map_or(0, |k| k.index() + 1);
                    on_host[t] = matches!(event, Event::SwapIn { .. }) && place <= first_use[t];
                }
            }
        }
        for (index, tensor) in self.graph.tensors.iter().enumerate() {
            if !self.generated[index] && !on_host[index] {
                self.open(TensorId::from_index(index), Begin::Iteration);
                self.program.loaded += tensor.bytes;
            }
        }
    }

    fn open(&mut self, tensor: TensorId, begin: Begin) -> usize {
        let index = self.program.residencies.len();
        let state = &mut self.states[tensor.index()];
        let place = Place::Tensor { tensor, residency: state.count };
        let previous = state.last;
        state.count += 1;
        state.open = Some(index);
        state.last = Some(index);
        state.leaving = false;
        let bytes = self.graph.tensor(tensor).bytes.in_blocks();
        self.program.residencies.push(Residency {
            tensor: Some(tensor),
            place,
            bytes,
            begin,
            first_step: None,
            last_step: None,
            out: None,
            stays: false,
            offset: None,
            previous,
            after: Vec::new(),
        });
        index
    }

    fn event(
        &mut self,
        index: usize,
        event: &Event,
        trigger: Option<usize>,
    ) -> Result<(), ProgramError> {
        let tensor = match event {
            Event::Recompute { operator, keep, .. } => {
                if operator.index() >= self.graph.operators.len() {
                    return Err(error(
                        index,
                        "recomputes an operator that the graph does not have",
                    ));
                }
                return self.step(*operator, Some(index), keep);
            }
            Event::SwapOut { tensor, .. }
            | Event::SwapIn { tensor, .. }
            | Event::Release { tensor, .. } => *tensor,
        };
        let t = tensor.index();
        if t >= self.states.len() {
            return Err(error(index, "names a tensor that the graph does not have"));
        }
        let bytes = self.graph.tensors[t].bytes;
        let state = self.states[t];
        match event {
            Event::Release { .. } => {
                let (Some(_), false) = (state.open, state.leaving) else {
                    return Err(error(index, "releases a tensor that is not resident"));
                };
                self.states[t].open = None;
            }
            Event::SwapOut { .. } => {
                let (Some(open), false) = (state.open, state.leaving) else {
                    return Err(error(index, "swaps out a tensor that is not resident"));
                };
                let copy = self.program.copies.len();
                let source = match self.program.residencies[open].begin {
                    Begin::Copy(c) => Some(c),
                    _ => None,
                };
                self.program.residencies[open].out = Some(copy);
                let written_by = state.writer;
                self.program.copies.push(Copy {
                    direction: Direction::D2h,
                    tensor,
                    bytes,
                    residency: open,
                    trigger,
                    written_by,
                    source,
                    event: index,
                    pool_waits: Vec::new(),
                });
                let state = &mut self.states[t];
                state.leaving = true;
                state.host = Some(copy);
            }
            Event::SwapIn { .. } => {
                if state.open.is_some() && !state.leaving {
                    return Err(error(index, "swaps in a tensor that is resident already"));
                }
                let copy = self.program.copies.len();
                let residency = self.open(tensor, Begin::Copy(copy));
                self.program.copies.push(Copy {
                    direction: Direction::H2d,
                    tensor,
                    bytes,
                    residency,
                    trigger,
                    written_by: None,
                    source: state.host,
                    event: index,
                    pool_waits: Vec::new(),
                });
            }
            Event::Recompute { .. } => unreachable!("returned above"),
        }
        Ok(())
    }

    fn step(
        &mut self,
        id: OpId,
        event: Option<usize>,
        keep: &[TensorId],
    ) -> Result<(), ProgramError> {
        let operator = self.graph.operator(id);
        let index = self.program.steps.len();
        let replayed = event.is_some();
        let fail = |problem: &str| ProgramError {
            event,
            problem: format!("operator `{}`: {problem}", operator.name),
        };
        let mut step = Step {
            operator: id,
            event,
            time: self.latencies.get(id.index()).map_or(Nanos(1), |l| l.time),
            binds: Vec::new(),
            scratch: Vec::new(),
            workspace: None,
            reads_copies: Vec::new(),
            begins: Vec::new(),
        };
        let mut workspace = operator.workspace.in_blocks();
        let mut bound: Vec<TensorId> = Vec::new();
        for operand in operator.generates() {
            if bound.contains(&operand.tensor) {
                continue;
            }
            bound.push(operand.tensor);
            if replayed && !keep.contains(&operand.tensor) {
                step.scratch.push((operand.tensor, workspace));
                workspace += self.graph.tensor(operand.tensor).bytes.in_blocks();
                continue;
            }
            let state = self.states[operand.tensor.index()];
            if state.open.is_some() && !state.leaving {
                return Err(fail("generates a tensor that is resident already"));
            }
            let residency = self.open(operand.tensor, Begin::Step(index));
            self.program.residencies[residency].first_step = Some(index);
            self.program.residencies[residency].last_step = Some(index);
            step.binds.push((operand.tensor, residency));
            step.begins.push(residency);
            self.states[operand.tensor.index()].writer = Some(index);
        }
        if let Some(stranger) = keep.iter().find(|t| !bound.contains(t)) {
            return Err(fail(&format!(
                "does not generate tensor {}, which its recompute keeps",
                stranger.0
            )));
        }
        let skip = replayed && operator.replay == Replay::SkipUpdates;
        for (operand, written) in
            operator.reads().map(|o| (o, false)).chain(operator.updates().map(|o| (o, true)))
        {
            let t = operand.tensor.index();
            if step.scratch.iter().any(|(s, _)| *s == operand.tensor) {
                continue;
            }
            if skip
                && !self.generated[t]
                && (written || operator.updates().any(|u| u.tensor == operand.tensor))
            {
                continue;
            }
            if !bound.contains(&operand.tensor) {
                bound.push(operand.tensor);
                if !self.bind(&mut step, index, operand.tensor) {
                    return Err(fail(&format!(
                        "needs `{}`, which is not resident",
                        self.graph.tensors[t].name
                    )));
                }
            }
            if written {
                if self.states[t].leaving {
                    return Err(fail(&format!(
                        "writes `{}` while it is being swapped out",
                        self.graph.tensors[t].name
                    )));
                }
                self.states[t].writer = Some(index);
            }
        }
        if workspace > Bytes::ZERO {
            let number = u32::try_from(index).map_err(|_| fail("too many steps"))?;
            let residency = self.workspace(number, workspace);
            step.workspace = Some(residency);
            step.begins.push(residency);
        }
        self.program.steps.push(step);
        Ok(())
    }

    /// Binds a step to the tensor's current residency. Returns false if it has none.
    fn bind(&mut self, step: &mut Step, index: usize, tensor: TensorId) -> bool {
        let Some(open) = self.states[tensor.index()].open else { return false };
        let residency = &mut self.program.residencies[open];
        residency.first_step.get_or_insert(index);
        residency.last_step = Some(index);
        if let Begin::Copy(copy) = residency.begin {
            step.reads_copies.push(copy);
        }
        step.binds.push((tensor, open));
        true
    }

    /// Adds the residency of a step's workspace.
    fn workspace(&mut self, step: u32, bytes: Bytes) -> usize {
        let index = step as usize;
        self.program.residencies.push(Residency {
            tensor: None,
            place: Place::Workspace { step },
            bytes,
            begin: Begin::Step(index),
            first_step: Some(index),
            last_step: Some(index),
            out: None,
            stays: false,
            offset: None,
            previous: None,
            after: Vec::new(),
        });
        self.program.residencies.len() - 1
    }
}

fn error(event: usize, problem: &str) -> ProgramError {
    ProgramError { event: Some(event), problem: problem.to_owned() }
}
