//! Turns a placed program into a device's script, and runs it.
//!
//! [`script`] computes once which items wait for which. [`Executor::run`] only enqueues them.

use std::time::Instant;

use super::RunError;
use super::backend::{Capture, Device, Failure, Item, Measured, Script, StepWork, Stream, Work};
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
        let stretches: Result<_, RunError> =
            (0..self.program.stretches.count()).map(|k| self.ends(k)).collect();
        let stretches = stretches?;
        let mut script = Script { items, streams, order, arena: self.arena, store, stretches };
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

    /// The items after which a stretch in the window is over.
    fn ends(&self, stretch: usize) -> Result<Vec<usize>, RunError> {
        let mut ends = Vec::new();
        for &last in self.program.stretches.lasts(stretch) {
            self.end(last, &mut ends)?;
        }
        ends.sort();
        ends.dedup();
        Ok(ends)
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
        addresses.sort();
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
        Ok(Item {
            stream: Stream::Compute,
            waits,
            fetches,
            trigger: None,
            work: Work::Step(work),
            top,
            stretch: self.program.stretches.at(Begin::Step(index)),
        })
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
        let work = Work::Copy { device, host, bytes: copy.bytes };
        let stretch = self.program.stretches.at(Begin::Copy(index));
        Ok(Item { stream, waits, fetches: Vec::new(), trigger: copy.trigger, work, top, stretch })
    }

    /// An order of enqueueing in which each item comes after all items that it waits for.
    fn order(&self, items: &[Item], streams: &[Vec<usize>; 3]) -> Result<Vec<usize>, RunError> {
        let mut placed = vec![false; items.len()];
        let mut next = [0; 3];
        let mut order = Vec::with_capacity(items.len());
        while order.len() < items.len() {
            let before = order.len();
            for (index, (stream, next)) in streams.iter().zip(&mut next).enumerate() {
                // One step, then the copies that it lets go: a device's launch queue is limited,
                // and a copy that stands behind many steps would start late.
                let most = if index == Stream::Compute.index() { 1 } else { usize::MAX };
                for &item in stream.iter().skip(*next).take(most) {
                    let trigger = items[item].trigger;
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

/// Drops waits that follow from the order on a stream and from other waits, and doubles: each one
/// that stays costs the device a call, and none can be left out.
fn prune(script: &mut Script) {
    let stream: Vec<usize> = script.items.iter().map(|i| i.stream.index()).collect();
    let (mut place, mut rank) = (vec![0; stream.len()], vec![0; stream.len()]);
    for items in &script.streams {
        items.iter().enumerate().for_each(|(at, &item)| place[item] = at + 1);
    }
    script.order.iter().enumerate().for_each(|(at, &item)| rank[item] = at);
    // How many items of each stream have ended once an item has; and once the last of a stream has.
    let mut after = vec![[0; 3]; stream.len()];
    let mut last = [[0; 3]; 3];
    let join = |into: &mut [usize; 3], from: [usize; 3]| {
        into.iter_mut().zip(from).for_each(|(a, b)| *a = b.max(*a));
    };
    for &index in &script.order {
        let item = &mut script.items[index];
        let mut known = last[stream[index]];
        let trigger = item.trigger;
        item.waits.extend(trigger);
        // An item implies only what stands before it in the order.
        item.waits.sort_by_key(|&w| std::cmp::Reverse(rank[w]));
        item.waits.retain(|&w| {
            let new = stream[w] != stream[index] && known[stream[w]] < place[w];
            if new {
                join(&mut known, after[w]);
            }
            new
        });
        item.waits.sort_unstable();
        item.fetches.sort();
        item.fetches.dedup();
        known[stream[index]] = place[index];
        (after[index], last[stream[index]]) = (known, known);
    }
}

/// How many times of an operator are kept: enough for a median, and a job may run for days.
pub const KEPT: usize = 1024;

/// The measurements of a run.
#[derive(Clone, Debug, Default)]
pub struct Record {
    /// The loss of each iteration, if the graph has a loss.
    pub losses: Vec<f32>,
    /// How long each iteration took on the device; on a GPU until the next one began.
    pub iteration_ns: Vec<Nanos>,
    /// How long each iteration of a job that is alone took by the host's clock, until the next
    /// could begin.
    pub wall_ns: Vec<Nanos>,
    /// How long it took in each of these until all items were enqueued.
    pub submit_ns: Vec<Nanos>,
    /// In how many iterations items were timed.
    pub timed: u32,
    /// By operator, how long its own turn took in the first and the last [`KEPT`] of these.
    pub operator_ns: Vec<Vec<Nanos>>,
    /// How many steps of these had to wait for a copy that they read.
    pub late: u64,
    /// How long all iterations waited for the window.
    pub window: Nanos,
    /// The largest sum of resident bytes, from the measured times.
    pub resident_peak: Bytes,
    /// When each step and copy of the last of these started and ended.
    pub last: Option<engine::Run>,
}

/// Runs iterations on a device.
pub struct Executor<'a> {
    /// The graph, for the number of its operators.
    pub graph: &'a Graph,
    /// The program that runs.
    pub program: &'a Program,
    /// The program as the device's script.
    pub script: &'a Script,
    /// Whether items must be timed in each iteration, not in the first and the last only.
    pub timed: bool,
    /// Whether the job has the device for itself: between iterations it waits for no other.
    pub alone: bool,
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
            let began = Instant::now();
            let passed = || Nanos(u64::try_from(began.elapsed().as_nanos()).unwrap_or(0));
            let timed = self.timed || iteration == from || iteration + 1 == to;
            device.begin(u64::from(iteration), timed)?;
            for &item in &self.script.order {
                device.enqueue(item)?;
            }
            let submitted = passed();
            device.finish(&mut measured)?;
            if let Some(before) = record.iteration_ns.last_mut().filter(|_| self.alone) {
                *before += measured.gap;
            }
            self.note(&measured, record);
            let stops = boundary(iteration, &measured);
            if self.alone {
                record.submit_ns.push(submitted);
                record.wall_ns.push(passed());
            }
            if stops {
                return Ok(iteration + 1);
            }
        }
        Ok(to)
    }

    fn note(&self, measured: &Measured, record: &mut Record) {
        record.losses.extend(measured.loss);
        record.iteration_ns.push(measured.iteration);
        record.window += measured.window;
        if measured.items.is_empty() {
            return;
        }
        record.timed += 1;
        record.late += measured.late;
        let (steps, copies) = measured.items.split_at(self.program.steps.len());
        for (step, (start, end)) in self.program.steps.iter().zip(steps) {
            if step.event.is_none() {
                let times = &mut record.operator_ns[step.operator.index()];
                if times.len() < KEPT {
                    times.push(*end - *start);
                } else {
                    // In place of the oldest; the first stays, which medians leave out.
                    times[1 + record.timed as usize % (KEPT - 1)] = *end - *start;
                }
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
        record.last = Some(run);
    }
}
