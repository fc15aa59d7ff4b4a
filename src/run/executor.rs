//! Turns a placed program into a device's script, and runs it.
//!
//! [`script`] computes once which items wait for which. [`Executor::run`] only enqueues them.

use super::RunError;
use super::backend::{
    Capture, Device, Due, Failure, Item, Measured, Script, StepWork, Stream, Work,
};
use crate::contract::JobPlan;
use crate::job::{Dtype, Graph};
use crate::sim::engine;
use crate::sim::program::{Begin, Direction, Program};
use crate::units::{Bytes, Nanos, TensorId};

/// Turns a program into the items that a device runs in each iteration.
///
/// # Errors
/// When an address is outside the arena, a copy has no slot in the pinned pool, or an item waits
/// for one that never ends. Plans that passed the checker never give an error.
pub fn script(
    graph: &Graph,
    job: &JobPlan,
    program: &Program,
    arena: Bytes,
    random_keys: &[u64],
) -> Result<Script, RunError> {
    Builder { graph, job, program, arena, random_keys }.build()
}

struct Builder<'a> {
    graph: &'a Graph,
    job: &'a JobPlan,
    program: &'a Program,
    arena: Bytes,
    random_keys: &'a [u64],
}

impl Builder<'_> {
    fn build(&self) -> Result<Script, RunError> {
        let steps = self.program.steps.len();
        let mut items = Vec::with_capacity(steps + self.program.copies.len());
        for index in 0..steps {
            items.push(self.step(index)?);
        }
        for index in 0..self.program.copies.len() {
            items.push(self.copy(index)?);
        }
        let mut streams = [Vec::new(), Vec::new(), Vec::new()];
        for (index, item) in items.iter().enumerate() {
            streams[item.stream.index()].push(index);
        }
        let store = self.job.host_slots.iter().map(|(t, slot)| {
            Bytes(slot.0.saturating_add(self.graph.tensor(*t).bytes.0)).in_blocks()
        });
        let store = store.max().unwrap_or_default();
        let order = self.order(&items, &streams)?;
        let mut script = Script { items, streams, order, arena: self.arena, store };
        prune(&mut script);
        Ok(script)
    }

    /// The range of addresses of a residency in the arena.
    fn range(&self, residency: usize) -> Result<(Bytes, Bytes), RunError> {
        let r = &self.program.residencies[residency];
        let offset =
            r.offset.ok_or_else(|| RunError::Plan(format!("{:?} has no address", r.place)))?;
        match offset.0.checked_add(r.bytes.0) {
            Some(end) if end <= self.arena.0 => Ok((offset, Bytes(end))),
            _ => Err(RunError::Plan(format!(
                "{:?} is placed at {}, beyond the arena of {} bytes",
                r.place, offset.0, self.arena.0
            ))),
        }
    }

    /// The items that must have ended before a residency may begin.
    fn free(&self, residency: usize, waits: &mut Vec<usize>) -> Result<(), RunError> {
        let r = &self.program.residencies[residency];
        r.previous.iter().chain(&r.after).try_for_each(|&earlier| self.end(earlier, waits))
    }

    /// The items after which a residency's bytes are free.
    fn end(&self, residency: usize, waits: &mut Vec<usize>) -> Result<(), RunError> {
        let r = &self.program.residencies[residency];
        if r.stays {
            return Err(RunError::Plan(format!(
                "{:?} stays for good, but its bytes are given to another",
                r.place
            )));
        }
        let copies = self.program.steps.len();
        match r.begin {
            Begin::Iteration => {}
            Begin::Step(s) => waits.push(s),
            Begin::Copy(c) => waits.push(copies + c),
        }
        waits.extend(r.last_step);
        waits.extend(r.out.map(|c| copies + c));
        Ok(())
    }

    fn step(&self, index: usize) -> Result<Item, RunError> {
        let step = &self.program.steps[index];
        let operator = self.graph.operator(step.operator);
        let copies = self.program.steps.len();
        let fetches: Vec<usize> = step.reads_copies.iter().map(|c| copies + c).collect();
        let mut waits = fetches.clone();
        let mut begins = Vec::with_capacity(step.begins.len());
        let mut top = Bytes::ZERO;
        for &r in &step.begins {
            self.free(r, &mut waits)?;
            let (offset, end) = self.range(r)?;
            begins.push((offset, end - offset));
            top = top.max(end);
        }
        let mut addresses = Vec::with_capacity(step.binds.len() + step.scratch.len());
        for &(tensor, r) in &step.binds {
            let (offset, end) = self.range(r)?;
            addresses.push((tensor, offset));
            top = top.max(end);
        }
        if let Some(workspace) = step.workspace {
            let (offset, _) = self.range(workspace)?;
            addresses.extend(step.scratch.iter().map(|&(tensor, at)| (tensor, offset + at)));
        } else {
            // Scratch outputs without a workspace have no bytes.
            addresses.extend(step.scratch.iter().map(|&(tensor, _)| (tensor, Bytes::ZERO)));
        }
        addresses.sort_unstable();
        // Scratch outputs follow the operator's own workspace in the same range.
        let own = operator.workspace.in_blocks();
        let workspace = step
            .workspace
            .filter(|_| own > Bytes::ZERO)
            .map(|r| self.range(r))
            .transpose()?
            .map(|(offset, _)| (offset, own));
        let work = StepWork {
            operator: step.operator,
            capture: self.capture(index, &addresses),
            addresses,
            replay: step.event.is_some(),
            random_key: self
                .random_keys
                .get(step.operator.index())
                .copied()
                .unwrap_or(u64::from(step.operator.0)),
            begins,
            workspace,
        };
        for operand in operator.reads().chain(operator.writes()) {
            if operand.end_byte().is_none_or(|end| end > self.graph.tensor(operand.tensor).bytes.0)
            {
                let name = &self.graph.tensor(operand.tensor).name;
                return Err(RunError::Plan(format!(
                    "operator `{}` sees `{name}` beyond its end",
                    operator.name
                )));
            }
        }
        Ok(Item { stream: Stream::Compute, waits, fetches, due: None, work: Work::Step(work), top })
    }

    /// Where to read the loss, if this step writes it.
    fn capture(&self, index: usize, addresses: &[(TensorId, Bytes)]) -> Option<Capture> {
        let loss = self.graph.loss.as_ref()?;
        let step = &self.program.steps[index];
        let writes = |w: &crate::job::Operand| w.tensor == loss.tensor && w.version == loss.version;
        let floating = matches!(loss.dtype, Dtype::F32 | Dtype::F64 | Dtype::F16 | Dtype::Bf16);
        if step.event.is_some()
            || !floating
            || !self.graph.operator(step.operator).writes().any(writes)
        {
            return None;
        }
        let at = addresses.binary_search_by_key(&loss.tensor, |a| a.0).ok()?;
        let inside =
            loss.elements() > 0 && loss.end_byte()? <= self.graph.tensor(loss.tensor).bytes.0;
        inside.then(|| Capture {
            offset: addresses[at].1 + Bytes(loss.offset * loss.dtype.size()),
            dtype: loss.dtype,
        })
    }

    fn copy(&self, index: usize) -> Result<Item, RunError> {
        let copy = &self.program.copies[index];
        let copies = self.program.steps.len();
        let (device, top) = self.range(copy.residency)?;
        let host = *self.job.host_slots.get(&copy.tensor).ok_or_else(|| {
            RunError::Plan(format!(
                "`{}` is swapped but has no slot in host memory",
                self.graph.tensor(copy.tensor).name
            ))
        })?;
        let mut waits = Vec::new();
        waits.extend(copy.written_by);
        waits.extend(copy.source.map(|c| copies + c));
        waits.extend(copy.pool_waits.iter().map(|c| copies + c));
        if copy.direction == Direction::H2d {
            self.free(copy.residency, &mut waits)?;
        }
        let stream = match copy.direction {
            Direction::H2d => Stream::H2d,
            Direction::D2h => Stream::D2h,
        };
        let due = Some(Due { after: copy.trigger, delay: copy.delay });
        let work = Work::Copy { device, host, bytes: copy.bytes };
        Ok(Item { stream, waits, fetches: Vec::new(), due, work, top })
    }

    /// An order of enqueueing in which each item comes after all items that it waits for.
    fn order(&self, items: &[Item], streams: &[Vec<usize>; 3]) -> Result<Vec<usize>, RunError> {
        let mut placed = vec![false; items.len()];
        let mut next = [0; 3];
        let mut order = Vec::with_capacity(items.len());
        while order.len() < items.len() {
            let before = order.len();
            for (stream, next) in streams.iter().zip(&mut next) {
                while let Some(&item) = stream.get(*next) {
                    let trigger = items[item].due.and_then(|d| d.after);
                    if !items[item].waits.iter().chain(&trigger).all(|&w| placed[w]) {
                        break;
                    }
                    placed[item] = true;
                    order.push(item);
                    *next += 1;
                }
            }
            if order.len() == before {
                let step = streams[0].get(next[0]).map_or_else(
                    || "a copy".to_owned(),
                    |&s| {
                        format!(
                            "operator `{}`",
                            self.graph.operator(self.program.steps[s].operator).name
                        )
                    },
                );
                return Err(RunError::Plan(format!("the plan deadlocks: {step} never starts")));
            }
        }
        Ok(order)
    }
}

/// Removes duplicate waits, and waits that the order of a stream implies.
fn prune(script: &mut Script) {
    let stream: Vec<Stream> = script.items.iter().map(|i| i.stream).collect();
    for item in &mut script.items {
        item.waits.retain(|&w| stream[w] != item.stream);
        item.waits.sort_unstable();
        item.waits.dedup();
        item.fetches.sort_unstable();
        item.fetches.dedup();
    }
}

/// The measurements of a run.
#[derive(Clone, Debug, Default)]
pub struct Record {
    /// The loss of each iteration, if the graph has a loss.
    pub losses: Vec<f32>,
    /// The time of each iteration.
    pub iteration_ns: Vec<Nanos>,
    /// For each operator, the time of its own run (not its recomputes) in each iteration.
    pub operator_ns: Vec<Vec<Nanos>>,
    /// How many steps had to wait for a copy that they read.
    pub late: u64,
    /// How many copies started without their delay because a step waited for them.
    pub passive: u64,
    /// The largest sum of resident bytes, from the measured times.
    pub resident_peak: Bytes,
}

/// Runs iterations on a device.
pub struct Executor<'a> {
    /// The graph, for the number of its operators.
    pub graph: &'a Graph,
    /// The program that runs.
    pub program: &'a Program,
    /// The program as the device's script.
    pub script: &'a Script,
}

impl Executor<'_> {
    /// Runs iterations `from..to` and adds to the record. After each one it calls `boundary` with
    /// the iteration and its measurements, which returns whether to stop there. Returns the number
    /// of the next iteration.
    ///
    /// # Errors
    /// The first failure of the device.
    pub fn run(
        &self,
        device: &mut dyn Device,
        (from, to): (u32, u32),
        record: &mut Record,
        boundary: &mut dyn FnMut(u32, &Measured) -> bool,
    ) -> Result<u32, Failure> {
        record.operator_ns.resize(self.graph.operators.len(), Vec::new());
        let mut measured =
            Measured { items: Vec::with_capacity(self.script.items.len()), ..Measured::default() };
        for iteration in from..to {
            device.begin(u64::from(iteration))?;
            for &item in &self.script.order {
                device.enqueue(item)?;
            }
            device.finish(&mut measured)?;
            self.note(&measured, record);
            if boundary(iteration, &measured) {
                return Ok(iteration + 1);
            }
        }
        Ok(to)
    }

    fn note(&self, measured: &Measured, record: &mut Record) {
        record.losses.extend(measured.loss);
        record.iteration_ns.push(measured.iteration);
        record.late += measured.late;
        record.passive += measured.passive;
        let (steps, copies) = measured.items.split_at(self.program.steps.len());
        for (step, (start, end)) in self.program.steps.iter().zip(steps) {
            if step.event.is_none() {
                record.operator_ns[step.operator.index()].push(*end - *start);
            }
        }
        let run = engine::Run {
            steps: steps.to_vec(),
            copies: copies.to_vec(),
            iteration: measured.iteration,
            stalls: engine::Stalls::default(),
            late_copies: 0,
        };
        record.resident_peak =
            record.resident_peak.max(engine::peak(&engine::memory(self.program, &run)));
    }
}
