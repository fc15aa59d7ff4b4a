//! Making it happen: executor, swap executor, and the devices behind one trait.
//!
//! [`run`] executes a checked plan on the host device and says what it was like; [`run_replanning`] has it planned anew while
//! it runs, when latencies drift ([`controller`]). [`profile`](mod@profile) and [`measure`] find out how fast operators and devices are. Not for: how plans are found,
//! nor proving them ([`crate::schedule::check`]): a plan that was not checked gives an error or wrong numbers,
//! but touches no byte outside its memories.

pub mod controller;
pub mod device;
pub mod executor;
pub mod measure;
pub mod profile;
pub mod seed;
mod start;
pub mod support;
pub mod sweep;
pub mod weights;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::thread;

use sha2::{Digest, Sha256};

pub use controller::{Change, Replan};
pub use device::host::calls::Lookup;
pub use support::Missing;

use crate::device::{Link, Profile};
use crate::files::FileError;
use crate::job::{Dtype, Graph, Role};
use crate::schedule::{Chosen, JobPlan, Plan};
use crate::sim::program::{Program, ProgramError};
use crate::units::{Bytes, Nanos, OpId, TensorId};
use controller::Controller;
use device::host::link::LinkRate;
use device::{Device, Failure, Memory, host};
use executor::{Executor, Record};
use start::{has_algorithms, on_cuda, open};

/// How fast the host device's copies go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rate {
    /// As the device's profile says, contention and overhead included.
    #[default]
    Profile,
    /// So many bytes a second in each direction.
    BytesPerSecond(u64),
    /// As fast as memory can be copied.
    Unlimited,
}

/// What a job runs on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Target {
    /// The embedded host device.
    #[default]
    Host,
    /// The first NVIDIA GPU.
    Cuda {
        /// Where to look for NVIDIA's libraries first.
        libs: Option<PathBuf>,
        /// Round the factors of f32 products to TF32.
        tf32: bool,
    },
}

impl Target {
    /// As tables of latencies call it, for a profile of this name.
    #[must_use]
    pub fn key<'n>(&self, profile: &'n str) -> &'n str {
        match self {
            Self::Host => "host",
            Self::Cuda { .. } => profile,
        }
    }

    /// As errors call it.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Cuda { .. } => "CUDA",
        }
    }
}

/// What a run is told besides the plan.
#[derive(Clone, Debug)]
pub struct Settings {
    /// What it runs on; rates, throttling and jitter are the host device's alone.
    pub target: Target,
    /// How many iterations.
    pub iterations: u32,
    /// How fast copies go.
    pub link_rate: Rate,
    /// Thousandths of that; 1000 for all of it.
    pub throttle_per_mille: u32,
    /// From these iterations on, other thousandths; in order.
    pub throttle_later: Vec<(u64, u32)>,
    /// How busy others shall keep the device meanwhile, in percent of the time.
    pub load_percent: u32,
    /// For whatever no weights file gives.
    pub seed: u64,
    /// A safetensors file with initial values.
    pub weights: Option<PathBuf>,
    /// A safetensors file to write parameters, buffers and optimizer states to at the end.
    pub save: Option<PathBuf>,
    /// Keep parameters and buffers in the outcome.
    pub keep_state: bool,
    /// Fill memory with a pattern wherever something begins that holds nothing yet, so that reading it shows.
    pub poison: bool,
    /// Sleep up to this long before each copy: for tests that order, not speed, makes results.
    pub jitter: Nanos,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            target: Target::Host,
            iterations: 1,
            link_rate: Rate::Profile,
            throttle_per_mille: 1000,
            throttle_later: Vec::new(),
            load_percent: 0,
            seed: 0,
            weights: None,
            save: None,
            keep_state: false,
            poison: false,
            jitter: Nanos::ZERO,
        }
    }
}

/// A tensor's value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Value {
    /// Type of its elements.
    pub dtype: Dtype,
    /// Its shape.
    pub shape: Vec<u64>,
    /// Little-endian elements in row-major order.
    pub data: Vec<u8>,
}

/// What a run was like.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// One for each iteration; empty when the graph has no recognised loss.
    pub losses: Vec<f32>,
    /// SHA-256 in hex over parameters and buffers in order of name: each one's name, a zero byte, its bytes.
    pub checksum: String,
    /// The end of the highest bytes that were touched.
    pub peak_bytes: Bytes,
    /// Largest sum of resident bytes at any instant, by the measured times.
    pub resident_peak_bytes: Bytes,
    /// How long each iteration took.
    pub iteration_ns: Vec<Nanos>,
    /// How often a step found what it reads still on its way.
    pub late_copies: u64,
    /// How often a swap-in's delay was cut short because a step waited for it.
    pub passive_copies: u64,
    /// By operator, how long its own turn (not its recomputes) took in each iteration.
    pub operator_ns: Vec<Vec<Nanos>>,
    /// What libraries chose for operators for which they have several algorithms.
    pub libraries: BTreeMap<OpId, Chosen>,
    /// Parameters and buffers at the end by their keys (`parameter:NAME`), when they were to be kept.
    pub state: Option<BTreeMap<String, Value>>,
    /// What should be said about it.
    pub notes: Vec<String>,
    /// What was planned anew meanwhile, in order.
    pub changes: Vec<Change>,
}

/// Why a job did not run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// Operators that the device does not have.
    #[error("the {0} device lacks {list}", list = list_missing(.1))]
    Unsupported(&'static str, Vec<Missing>),
    /// Numbers that were never recorded.
    #[error(
        "operator `{first}`{} uses a number that the trace does not record; record it with neap.scalar, see README",
        others(*.operators)
    )]
    UnknownNumber {
        /// The first operator's name.
        first: String,
        /// How many there are.
        operators: usize,
    },
    /// The graph contradicts itself in a way that matters only here.
    #[error("{0}")]
    Graph(String),
    /// The plan can't be read as a program.
    #[error("the plan can't be run: {0}")]
    Program(#[from] ProgramError),
    /// The plan can't be run.
    #[error("the plan can't be run: {0}; `neap check` says more")]
    Plan(String),
    /// Initial values.
    #[error(transparent)]
    Weights(#[from] weights::WeightsError),
    /// The final state could not be written.
    #[error(transparent)]
    Save(#[from] FileError),
    /// An operator could not be run.
    #[error("operator `{name}` ({kind}): {problem}")]
    Operator {
        /// Its name.
        name: String,
        /// Its kind.
        kind: String,
        /// What its kernel said.
        problem: String,
    },
    /// The device failed.
    #[error("the {0} device: {1}")]
    Device(&'static str, String),
}

fn list_missing(missing: &[Missing]) -> String {
    let one = |m: &Missing| format!("`{}` ({} operators, first `{}`)", m.kind, m.operators, m.first);
    missing.iter().map(one).collect::<Vec<_>>().join(", ")
}

fn others(operators: usize) -> String {
    if operators > 1 { format!(" (and {} others)", operators - 1) } else { String::new() }
}

/// The operator kinds of `graph` that the host device lacks.
#[must_use]
pub fn supported(graph: &Graph) -> Vec<Missing> {
    support::missing(graph, |kind| host::kernels::find(kind).is_some())
}

/// Runs `job`, a checked plan of `graph`, on its device with an arena of exactly `arena_bytes`.
///
/// `progress` is told after each iteration how many are done.
///
/// # Errors
/// Before anything runs: missing operators, unrecorded numbers, weights that don't fit, a plan that makes no sense.
/// Later: an operator that fails, a file that can't be written.
pub fn run(
    graph: &Graph,
    job: &JobPlan,
    arena_bytes: Bytes,
    device: &Profile,
    settings: &Settings,
    progress: &mut dyn FnMut(u32),
) -> Result<Outcome, RunError> {
    run_with(host::kernels::find, graph, job, arena_bytes, device, settings, progress)
}

/// [`run`] with other kernels on the host.
///
/// # Errors
/// As [`run`].
pub fn run_with(
    kernels: Lookup,
    graph: &Graph,
    job: &JobPlan,
    arena_bytes: Bytes,
    profile: &Profile,
    settings: &Settings,
    progress: &mut dyn FnMut(u32),
) -> Result<Outcome, RunError> {
    Job::new(kernels, graph, profile, settings)?.run((job, arena_bytes), None, progress)
}

/// Runs `plan`, checked and of one job, and has it planned anew when measured latencies drift. A new plan takes over between
/// two iterations and changes no result.
///
/// # Errors
/// As [`run`]; and when the plan has no job.
pub fn run_replanning(
    graph: &Graph,
    plan: &Plan,
    settings: &Settings,
    replan: &Replan<'_>,
    progress: &mut dyn FnMut(u32),
) -> Result<Outcome, RunError> {
    let job = plan.jobs.first().ok_or_else(|| RunError::Plan("it has no job".to_owned()))?;
    Job::new(host::kernels::find, graph, &plan.device, settings)?.run((job, plan.budget), Some(replan), progress)
}

/// A job that can run: what stays the same whichever plan is followed.
struct Job<'a> {
    kernels: Lookup,
    graph: &'a Graph,
    profile: &'a Profile,
    settings: &'a Settings,
    values: weights::Values<'a>,
    batch: Vec<Vec<u8>>,
    random_keys: Vec<u64>,
    /// What libraries must use.
    libraries: BTreeMap<OpId, Chosen>,
    notes: Vec<String>,
    /// What long-lived tensors hold while one plan hands over to the next.
    carried: BTreeMap<TensorId, Vec<u8>>,
    record: Record,
    high_water: Bytes,
}

/// How a session ended.
enum End {
    /// All iterations have run.
    Done(Box<Outcome>),
    /// Another plan takes over, from this iteration on.
    Switch(u32),
}

impl<'a> Job<'a> {
    fn new(kernels: Lookup, graph: &'a Graph, profile: &'a Profile, settings: &'a Settings) -> Result<Self, RunError> {
        let missing = match settings.target {
            Target::Host => support::missing(graph, |kind| kernels(kind).is_some()),
            Target::Cuda { .. } => support::missing(graph, on_cuda),
        };
        if !missing.is_empty() {
            return Err(RunError::Unsupported(settings.target.name(), missing));
        }
        let unknown = support::unknown_numbers(graph);
        if let Some(first) = unknown.first() {
            return Err(RunError::UnknownNumber { first: (*first).to_owned(), operators: unknown.len() });
        }
        let batch = support::batch(graph).map_err(RunError::Graph)?;
        let mut values = weights::Values::new(graph, &batch, settings.weights.as_deref(), settings.seed)?;
        let mut notes = support::notes(graph);
        notes.append(&mut values.notes);
        let batch = std::mem::take(&mut values.batch);
        Ok(Self {
            kernels,
            graph,
            profile,
            settings,
            values,
            batch,
            random_keys: support::random_keys(graph),
            libraries: BTreeMap::new(),
            notes,
            carried: BTreeMap::new(),
            record: Record::default(),
            high_water: Bytes::ZERO,
        })
    }

    fn options(&self) -> host::Options {
        let settings = self.settings;
        host::Options {
            link: match settings.link_rate {
                Rate::Profile => LinkRate::Of(self.profile.link),
                Rate::Unlimited => LinkRate::Unlimited,
                Rate::BytesPerSecond(rate) => {
                    LinkRate::Of(Link { h2d: rate, d2h: rate, h2d_contended: rate, d2h_contended: rate, overhead_ns: 0 })
                }
            },
            throttle_per_mille: settings.throttle_per_mille,
            throttle_later: settings.throttle_later.clone(),
            load_percent: settings.load_percent,
            poison: settings.poison,
            jitter: settings.jitter,
        }
    }

    fn run(
        mut self,
        (job, arena): (&JobPlan, Bytes),
        replan: Option<&Replan<'_>>,
        progress: &mut dyn FnMut(u32),
    ) -> Result<Outcome, RunError> {
        let (graph, link) = (self.graph, self.profile.link);
        self.libraries.clone_from(&job.libraries);
        thread::scope(|scope| {
            let mut controller = replan.map(|replan| Controller::new(scope, graph, self.profile, job, replan));
            let (mut plan, mut arena) = (Cow::Borrowed(job), arena);
            let (mut first, mut link) = (0, link);
            loop {
                let program = Program::placed(graph, &plan)?;
                if let Some(controller) = &mut controller {
                    controller.follow(&program, &link);
                }
                match self.session(&plan, arena, &program, first, controller.as_mut(), progress)? {
                    End::Done(mut outcome) => {
                        outcome.changes = controller.map(|c| c.changes(&outcome.iteration_ns)).unwrap_or_default();
                        return Ok(*outcome);
                    }
                    End::Switch(next) => {
                        let Some(new) = controller.as_mut().and_then(Controller::take) else {
                            return Err(RunError::Plan("no plan took over".to_owned()));
                        };
                        (first, link, arena) = (next, new.device.link, new.budget);
                        let job = new.jobs.into_iter().next().ok_or_else(|| RunError::Plan("the new plan has no job".to_owned()))?;
                        plan = Cow::Owned(job);
                    }
                }
            }
        })
    }

    /// Follows one plan from iteration `first` on.
    fn session(
        &mut self,
        plan: &JobPlan,
        arena: Bytes,
        program: &Program,
        first: u32,
        mut controller: Option<&mut Controller<'_, '_>>,
        progress: &mut dyn FnMut(u32),
    ) -> Result<End, RunError> {
        let (graph, settings) = (self.graph, self.settings);
        let script = executor::script(graph, plan, program, arena, &self.random_keys)?;
        let homes = homes(graph, plan, program)?;
        let fail = |failure| match failure {
            Failure::Device(problem) => RunError::Device(settings.target.name(), problem),
            Failure::Operator { operator, problem } => {
                let operator = graph.operator(operator);
                RunError::Operator { name: operator.name.clone(), kind: operator.kind.clone(), problem }
            }
        };
        let (batch, options) = (std::mem::take(&mut self.batch), self.options());
        let work = |device: &mut dyn Device| {
            for home in &homes {
                let data = self.carried.remove(&home.tensor).unwrap_or_else(|| self.values.take(home.tensor));
                device.write(home.first.0, home.first.1, &data).map_err(fail)?;
            }
            let executor = Executor { graph, program, script: &script };
            let mut switch = false;
            let reached = executor.run(device, (first, settings.iterations), &mut self.record, &mut |iteration, measured| {
                progress(iteration + 1);
                let last = iteration + 1 == settings.iterations;
                switch = controller.as_mut().is_some_and(|c| c.boundary(iteration, measured)) && !last;
                switch
            });
            let reached = reached.map_err(fail)?;
            self.high_water = self.high_water.max(device.high_water());
            if switch {
                for home in &homes {
                    let mut data = vec![0; usize::try_from(graph.tensor(home.tensor).bytes.0).unwrap_or(0)];
                    device.read(home.last.0, home.last.1, &mut data).map_err(fail)?;
                    self.carried.insert(home.tensor, data);
                }
                return Ok(End::Switch(reached));
            }
            let record = std::mem::take(&mut self.record);
            let mut outcome = Outcome {
                losses: record.losses,
                peak_bytes: self.high_water,
                resident_peak_bytes: record.resident_peak,
                iteration_ns: record.iteration_ns,
                late_copies: record.late,
                passive_copies: record.passive,
                operator_ns: record.operator_ns,
                notes: std::mem::take(&mut self.notes),
                ..Outcome::default()
            };
            finish(graph, &homes, device, settings, &mut outcome, fail)?;
            Ok(End::Done(Box::new(outcome)))
        };
        let libraries = std::mem::take(&mut self.libraries);
        let end = open(&settings.target, graph, (&script, &libraries), self.kernels, &batch, &options, work);
        (self.batch, self.libraries) = (batch, libraries);
        let (mut end, mut said) = end.map_err(fail)?;
        match &mut end {
            Ok(End::Done(outcome)) => {
                outcome.notes.append(&mut said.notes);
                outcome.libraries = said.libraries;
            }
            _ => self.notes.append(&mut said.notes),
        }
        end
    }
}

/// Where a long-lived tensor is between iterations.
struct Home {
    tensor: TensorId,
    /// Before the first iteration.
    first: (Memory, Bytes),
    /// After the last: the same place in a plan whose steady state closes.
    last: (Memory, Bytes),
}

fn homes(graph: &Graph, job: &JobPlan, program: &Program) -> Result<Vec<Home>, RunError> {
    let mut first = BTreeMap::new();
    let mut last = BTreeMap::new();
    for r in &program.residencies {
        if let (Some(tensor), Some(offset)) = (r.tensor, r.offset) {
            if r.begin == crate::sim::program::Begin::Iteration {
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
            (None, None) => Err(RunError::Plan(format!("`{}` has no place between iterations", graph.tensor(tensor).name))),
        };
        let (first, last) = (home(first.get(&tensor))?, home(last.get(&tensor))?);
        if first != last {
            let name = &graph.tensor(tensor).name;
            return Err(RunError::Plan(format!("`{name}` does not end the iteration where it starts it")));
        }
        homes.push(Home { tensor, first, last });
    }
    Ok(homes)
}

/// Reads parameters and buffers back: checksum, the state to keep, the file to save.
fn finish(
    graph: &Graph,
    homes: &[Home],
    device: &mut dyn Device,
    settings: &Settings,
    outcome: &mut Outcome,
    fail: impl Fn(Failure) -> RunError,
) -> Result<(), RunError> {
    let mut named: Vec<&Home> = homes.iter().filter(|h| matches!(graph.tensor(h.tensor).role, Role::Parameter | Role::Buffer)).collect();
    named.sort_by_key(|h| &graph.tensor(h.tensor).name);
    let mut hash = Sha256::new();
    let mut state = BTreeMap::new();
    for home in named {
        let tensor = graph.tensor(home.tensor);
        let data = fetch(graph, home, device).map_err(&fail)?;
        hash.update(tensor.name.as_bytes());
        hash.update([0]);
        hash.update(&data);
        if settings.keep_state {
            state.insert(weights::key(tensor), Value { dtype: tensor.dtype, shape: tensor.shape.clone(), data });
        }
    }
    outcome.checksum = hash.finalize().iter().map(|b| format!("{b:02x}")).collect();
    outcome.state = settings.keep_state.then_some(state);
    if let Some(path) = &settings.save {
        let saved = |r: Role| matches!(r, Role::Parameter | Role::Buffer | Role::OptimizerState);
        let by_key: BTreeMap<String, &Home> =
            homes.iter().filter(|h| saved(graph.tensor(h.tensor).role)).map(|h| (weights::key(graph.tensor(h.tensor)), h)).collect();
        let shapes = by_key.iter().map(|(k, h)| (k.clone(), (graph.tensor(h.tensor).dtype, graph.tensor(h.tensor).shape.clone())));
        weights::save(path, &shapes.collect(), |key| {
            let home = by_key.get(key).ok_or(io::ErrorKind::NotFound)?;
            fetch(graph, home, device).map_err(|f| io::Error::other(f.to_string()))
        })?;
    }
    Ok(())
}

/// A long-lived tensor's elements after the last iteration: its first shape's worth of the storage.
fn fetch(graph: &Graph, home: &Home, device: &mut dyn Device) -> Result<Vec<u8>, Failure> {
    let tensor = graph.tensor(home.tensor);
    let shown = tensor.shape.iter().try_fold(tensor.dtype.size(), |n, &x| n.checked_mul(x)).unwrap_or(u64::MAX);
    let mut data = vec![0; usize::try_from(shown.min(tensor.bytes.0)).unwrap_or(0)];
    device.read(home.last.0, home.last.1, &mut data)?;
    Ok(data)
}

#[cfg(test)]
mod tests;
