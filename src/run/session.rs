//! Runs a job's iterations, with any plan and at any place in a device's memory.
//!
//! A [`Job`] is made once. Each of its sessions uses one plan at one place. Before each iteration
//! the session asks its [`Pilot`] whether to continue, to leave the device with all long-lived
//! tensors, or to stop.

use std::collections::BTreeMap;
use std::io;

use sha2::{Digest, Sha256};

use super::backend::host;
use super::backend::window::Member;
use super::backend::{Device, Failure, Measured, Memory};
use super::executor::{self, Executor, Record};
use super::start::{Shared, Spare, on_cuda, open};
use super::{Costs, Lookup, Outcome, RunError, Settings, Target, Value, support, weights};
use crate::contract::{Chosen, JobPlan};
use crate::device::Profile;
use crate::job::{Graph, Role, Tensor};
use crate::sim::program::{Begin, Program};
use crate::units::{Bytes, Nanos, OpId, TensorId};

/// Decides at each iteration boundary what comes next.
pub(super) trait Pilot {
    /// What to do before iteration `next`.
    fn next(&mut self, next: u32) -> Next;
    /// An iteration has ended.
    fn ended(&mut self, iteration: u32, measured: &Measured);
}

/// The pilot's decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Run the next iteration.
    Go,
    /// Leave the device: other jobs need its memory, so long-lived tensors are copied out.
    Leave,
    /// Stop the job.
    Stop,
}

/// A job that can run. It does not depend on the plan or on the place of its memory.
pub(super) struct Job<'a> {
    kernels: Lookup,
    pub(super) graph: &'a Graph,
    profile: &'a Profile,
    settings: &'a Settings,
    shared: Option<&'a Shared>,
    /// Where it passes its window on to other jobs.
    pub(super) member: Option<Member>,
    values: weights::Values<'a>,
    pub(super) batch: Vec<Vec<u8>>,
    random_keys: Vec<u64>,
    /// The algorithms that libraries must use.
    pub(super) libraries: BTreeMap<OpId, Chosen>,
    notes: Vec<String>,
    /// The bytes of long-lived tensors between one session and the next.
    carried: BTreeMap<TensorId, Vec<u8>>,
    record: Record,
    high_water: Bytes,
    /// What a session's device leaves to the next one's.
    spare: Spare,
    /// How long it took to pin memory in all sessions.
    pinning: Nanos,
}

/// How a session ended.
pub(super) enum End {
    /// All iterations have run.
    Done(Box<Outcome>),
    /// Long-lived tensors were copied out; this iteration is next.
    Left(u32),
    /// It was stopped. The outcome so far has no checksum.
    Stopped(Box<Outcome>),
}

impl<'a> Job<'a> {
    /// Checks whether the job can run, and finds its initial values. It uses memory of its own
    /// unless there is a `shared` one.
    ///
    /// # Errors
    /// Missing operators, unrecorded numbers, weights that don't fit.
    pub(super) fn new(
        kernels: Lookup,
        graph: &'a Graph,
        profile: &'a Profile,
        settings: &'a Settings,
        shared: Option<&'a Shared>,
    ) -> Result<Self, RunError> {
        let missing = match settings.target {
            Target::Host => support::missing(graph, |kind| kernels(kind).is_some()),
            Target::Cuda { .. } => support::missing(graph, on_cuda),
        };
        if !missing.is_empty() {
            return Err(RunError::Unsupported(settings.target.name(), missing));
        }
        let unknown = support::unknown_numbers(graph);
        if let Some(first) = unknown.first() {
            return Err(RunError::UnknownNumber {
                first: (*first).to_owned(),
                operators: unknown.len(),
            });
        }
        let batch = support::batch(graph).map_err(RunError::Graph)?;
        let mut values =
            weights::Values::new(graph, &batch, settings.weights.as_deref(), settings.seed)?;
        let mut notes = support::notes(graph);
        notes.append(&mut values.notes);
        let batch = std::mem::take(&mut values.batch);
        Ok(Self {
            kernels,
            graph,
            profile,
            settings,
            shared,
            member: None,
            values,
            batch,
            random_keys: support::random_keys(graph),
            libraries: BTreeMap::new(),
            notes,
            carried: BTreeMap::new(),
            record: Record::default(),
            high_water: Bytes::ZERO,
            spare: Spare::default(),
            pinning: Nanos::ZERO,
        })
    }

    /// Computes all initial values now, rather than when the device first needs them.
    pub(super) fn fill(&mut self) {
        for tensor in weights::long_lived(self.graph) {
            let data = self.values.take(tensor);
            self.carried.insert(tensor, data);
        }
    }

    fn options(&self) -> host::Options {
        host::Options { member: self.member, ..self.settings.host(self.profile) }
    }

    /// Returns the outcome so far.
    pub(super) fn outcome_so_far(&mut self) -> Outcome {
        let record = std::mem::take(&mut self.record);
        self.notes.extend(not_finite(&record.losses));
        Outcome {
            losses: record.losses,
            peak_bytes: self.high_water,
            resident_peak_bytes: record.resident_peak,
            iteration_ns: record.iteration_ns,
            wall_ns: record.wall_ns,
            submit_ns: record.submit_ns,
            last: record.last,
            timed_iterations: record.timed,
            late_copies: record.late,
            window_ns: record.window,
            operator_ns: record.operator_ns,
            notes: std::mem::take(&mut self.notes),
            ..Outcome::default()
        }
    }

    /// Runs one plan from iteration `first` on, in an arena of `arena` bytes unless memory is
    /// shared.
    ///
    /// # Errors
    /// When the plan can't be read, an operator or the device fails, or a file can't be written.
    pub(super) fn session(
        &mut self,
        plan: &JobPlan,
        arena: Bytes,
        program: &Program,
        first: u32,
        pilot: &mut dyn Pilot,
    ) -> Result<End, RunError> {
        let (graph, settings) = (self.graph, self.settings);
        let script = executor::script(graph, plan, program, arena, &self.random_keys)?;
        let homes = homes(graph, plan, program)?;
        let fail = |failure| match failure {
            Failure::Device(problem) => RunError::Device(settings.target.name(), problem),
            Failure::Operator { operator, problem } => {
                let operator = graph.operator(operator);
                RunError::Operator {
                    name: operator.name.clone(),
                    kind: operator.kind.clone(),
                    problem,
                }
            }
        };
        let (batch, options) = (std::mem::take(&mut self.batch), self.options());
        let (libraries, spare) =
            (std::mem::take(&mut self.libraries), std::mem::take(&mut self.spare));
        let (kernels, shared) = (self.kernels, self.shared);
        let work = |device: &mut dyn Device| {
            for home in &homes {
                let data = self
                    .carried
                    .remove(&home.tensor)
                    .unwrap_or_else(|| self.values.take(home.tensor));
                device.write(home.first.0, home.first.1, &data).map_err(fail)?;
            }
            let (timed, alone) = (settings.timed, shared.is_none());
            let executor = Executor { graph, program, script: &script, timed, alone };
            let mut next = pilot.next(first);
            let mut reached = first;
            if next == Next::Go && !settings.stop.requested() {
                let run = executor.run(
                    device,
                    (first, settings.iterations),
                    &mut self.record,
                    &mut |iteration, measured| {
                        pilot.ended(iteration, measured);
                        next = if iteration + 1 == settings.iterations {
                            Next::Go
                        } else {
                            pilot.next(iteration + 1)
                        };
                        next != Next::Go || settings.stop.requested()
                    },
                );
                reached = run.map_err(fail)?;
            }
            self.high_water = self.high_water.max(device.high_water());
            match next {
                Next::Leave => {
                    for home in &homes {
                        let mut data = vec![
                            0;
                            usize::try_from(graph.tensor(home.tensor).bytes.0)
                                .unwrap_or(0)
                        ];
                        device.read(home.last.0, home.last.1, &mut data).map_err(fail)?;
                        self.carried.insert(home.tensor, data);
                    }
                    Ok(End::Left(reached))
                }
                Next::Stop => Ok(End::Stopped(Box::new(self.outcome_so_far()))),
                Next::Go => {
                    let mut outcome = self.outcome_so_far();
                    outcome.stopped = reached < settings.iterations;
                    finish(graph, &homes, device, settings, &mut outcome, fail)?;
                    Ok(End::Done(Box::new(outcome)))
                }
            }
        };
        let end = open(
            (&settings.target, shared, &spare),
            graph,
            (&script, &libraries),
            kernels,
            &batch,
            &options,
            work,
        );
        (self.batch, self.libraries, self.spare) = (batch, libraries, spare);
        let (mut end, mut said) = end.map_err(fail)?;
        self.pinning += said.costs.pinning;
        match &mut end {
            Ok(End::Done(outcome)) => {
                outcome.notes.append(&mut said.notes);
                outcome.libraries = said.libraries;
                outcome.costs = Costs { pinning: self.pinning, ..said.costs };
            }
            _ => self.notes.append(&mut said.notes),
        }
        end
    }
}

/// A sentence about the first loss that is not finite.
fn not_finite(losses: &[f32]) -> Option<String> {
    let at = losses.iter().position(|loss| !loss.is_finite())?;
    let what = if losses[at].is_nan() { "not a number (NaN)" } else { "infinite" };
    Some(format!(
        "THE LOSS IS {what} from iteration {} on: nothing that was computed after it means anything; \
         check the weights, the learning rate and the optimizer's eps",
        at + 1
    ))
}

/// The place of a long-lived tensor between iterations.
struct Home {
    tensor: TensorId,
    /// Its place before the first iteration.
    first: (Memory, Bytes),
    /// Its place after the last iteration. In a plan for repeated iterations it is the same.
    last: (Memory, Bytes),
}

fn homes(graph: &Graph, job: &JobPlan, program: &Program) -> Result<Vec<Home>, RunError> {
    let mut first = BTreeMap::new();
    let mut last = BTreeMap::new();
    for r in &program.residencies {
        if let (Some(tensor), Some(offset)) = (r.tensor, r.offset) {
            if r.begin == Begin::Iteration {
                first.insert(tensor, offset);
            }
            if r.stays {
                last.insert(tensor, offset);
            }
        }
    }
    let mut homes = Vec::new();
    for tensor in weights::long_lived(graph) {
        let home = |on_device: Option<&Bytes>| match (on_device, job.host_slots.get(&tensor)) {
            (Some(offset), _) => Ok((Memory::Device, *offset)),
            (None, Some(slot)) => Ok((Memory::Host, *slot)),
            (None, None) => Err(RunError::Plan(format!(
                "`{}` has no place between iterations",
                graph.tensor(tensor).name
            ))),
        };
        let (first, last) = (home(first.get(&tensor))?, home(last.get(&tensor))?);
        if first != last {
            let name = &graph.tensor(tensor).name;
            return Err(RunError::Plan(format!(
                "`{name}` does not end the iteration where it starts it"
            )));
        }
        homes.push(Home { tensor, first, last });
    }
    Ok(homes)
}

/// A long-lived tensor of the graph's file, and where it is: in one piece or in several.
struct Kept<'a> {
    tensor: &'a Tensor,
    parts: Vec<(&'a Home, Bytes)>,
}

fn kept<'a>(graph: &'a Graph, homes: &'a [Home]) -> Vec<Kept<'a>> {
    let mut all: BTreeMap<TensorId, Kept<'a>> = BTreeMap::new();
    for home in homes {
        let (of, _) = graph.framework_tensor(home.tensor);
        let tensor = graph.framework().tensor(of);
        let kept = all.entry(of).or_insert(Kept { tensor, parts: Vec::new() });
        kept.parts.push((home, graph.tensor(home.tensor).bytes));
    }
    all.into_values().collect()
}

/// Reads parameters and buffers back, for the checksum, the outcome and the file.
fn finish(
    graph: &Graph,
    homes: &[Home],
    device: &mut dyn Device,
    settings: &Settings,
    outcome: &mut Outcome,
    fail: impl Fn(Failure) -> RunError,
) -> Result<(), RunError> {
    let all = kept(graph, homes);
    let mut named: Vec<&Kept<'_>> =
        all.iter().filter(|k| matches!(k.tensor.role, Role::Parameter | Role::Buffer)).collect();
    named.sort_by_key(|kept| &kept.tensor.name);
    let mut hash = Sha256::new();
    let mut state = BTreeMap::new();
    for kept in named {
        let tensor = kept.tensor;
        let data = fetch(kept, device).map_err(&fail)?;
        hash.update(tensor.name.as_bytes());
        hash.update([0]);
        hash.update(&data);
        if settings.keep_state {
            state.insert(
                weights::key(tensor),
                Value { dtype: tensor.dtype, shape: tensor.shape.clone(), data },
            );
        }
    }
    outcome.checksum = hash.finalize().iter().map(|b| format!("{b:02x}")).collect();
    outcome.state = settings.keep_state.then_some(state);
    if let Some(path) = &settings.save {
        let saved = |r: Role| matches!(r, Role::Parameter | Role::Buffer | Role::OptimizerState);
        let by_key: BTreeMap<String, &Kept<'_>> = all
            .iter()
            .filter(|kept| saved(kept.tensor.role))
            .map(|kept| (weights::key(kept.tensor), kept))
            .collect();
        let shapes = by_key
            .iter()
            .map(|(k, kept)| (k.clone(), (kept.tensor.dtype, kept.tensor.shape.clone())));
        weights::save(path, &shapes.collect(), |key| {
            let kept = by_key.get(key).ok_or(io::ErrorKind::NotFound)?;
            fetch(kept, device).map_err(|f| io::Error::other(f.to_string()))
        })?;
    }
    Ok(())
}

/// A long-lived tensor's elements after the last iteration: as many of the storage as its shape
/// has.
fn fetch(kept: &Kept<'_>, device: &mut dyn Device) -> Result<Vec<u8>, Failure> {
    let tensor = kept.tensor;
    let shown = tensor
        .shape
        .iter()
        .try_fold(tensor.dtype.size(), |n, &x| n.checked_mul(x))
        .unwrap_or(u64::MAX);
    let mut data = vec![0; usize::try_from(shown.min(tensor.bytes.0)).unwrap_or(0)];
    let mut rest = &mut data[..];
    for (home, bytes) in &kept.parts {
        let size = usize::try_from(bytes.0).unwrap_or(usize::MAX).min(rest.len());
        let (part, after) = rest.split_at_mut(size);
        device.read(home.last.0, home.last.1, part)?;
        rest = after;
    }
    Ok(data)
}

#[cfg(test)]
mod tests {
    use super::not_finite;

    #[test]
    fn a_loss_that_is_no_number_is_said() {
        assert_eq!(not_finite(&[1.0, 2.5]), None);
        let nan = not_finite(&[1.0, f32::NAN, 2.0]).unwrap();
        assert!(nan.contains("not a number") && nan.contains("iteration 2"), "{nan}");
        assert!(not_finite(&[f32::NEG_INFINITY]).unwrap().contains("infinite"));
    }
}
