//! Making it happen: executor, swap executor, and the devices behind one trait.
//!
//! [`run`] executes a checked plan on the host device and says what it was like; [`run_replanning`]
//! has it planned anew while it runs, when latencies drift ([`controller`]).
//! [`profile`](mod@profile) and [`measure`] find out how fast operators and devices are. A plan
//! that was not checked gives an error or wrong numbers, but touches no byte outside its memories.

use neap_model::{contract, device, files, job, units};
use neap_plan as plan;
use neap_sim as sim;

pub mod backend;
pub mod controller;
pub mod executor;
pub mod measure;
pub mod profile;
pub mod seed;
pub mod service;
mod session;
mod start;
pub mod support;
pub mod sweep;
pub mod weights;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

pub use backend::host::calls::Lookup;
pub use backend::operators::Listed;
pub use controller::{Change, Replan};
pub use support::Missing;

use crate::contract::{Chosen, JobPlan, Plan};
use crate::device::{Link, Profile};
use crate::files::FileError;
use crate::job::{Dtype, Graph};
use crate::sim::program::{Program, ProgramError};
use crate::units::{Bytes, Nanos, OpId};
use backend::host::link::LinkRate;
use backend::{Measured, host};
use controller::Controller;
use session::{End, Job, Next, Pilot};
use start::{has_algorithms, open};

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

/// What a run takes besides the plan.
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
    /// Fill memory with a pattern wherever something begins that holds nothing yet, so that reading
    /// it shows.
    pub poison: bool,
    /// Sleep up to this long before each copy: for tests that order, not speed, makes results.
    pub jitter: Nanos,
    /// Set by others to end the run after the iteration that is running.
    pub stop: Stop,
}

/// A request to stop. Clones are the same request, so a signal handler can hold one.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// Asks for the run to end after the iteration that is running. What was asked of the run (its
    /// state, its outcome) is still written.
    pub fn request(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// What a signal handler sets to ask for it.
    #[must_use]
    pub fn flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.0)
    }

    /// Whether it has been asked for.
    #[must_use]
    pub fn requested(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
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
            stop: Stop::default(),
        }
    }
}

impl Settings {
    /// What the host device takes for a profile.
    fn host(&self, profile: &Profile) -> host::Options {
        host::Options {
            link: match self.link_rate {
                Rate::Profile => LinkRate::Of(profile.link),
                Rate::Unlimited => LinkRate::Unlimited,
                Rate::BytesPerSecond(rate) => LinkRate::Of(Link {
                    h2d: rate,
                    d2h: rate,
                    h2d_contended: rate,
                    d2h_contended: rate,
                    overhead_ns: 0,
                }),
            },
            throttle_per_mille: self.throttle_per_mille,
            throttle_later: self.throttle_later.clone(),
            load_percent: self.load_percent,
            poison: self.poison,
            jitter: self.jitter,
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
    /// It ended early because it was asked to, after as many iterations as there are times.
    pub stopped: bool,
    /// SHA-256 in hex over parameters and buffers in order of name: each one's name, a zero byte,
    /// its bytes.
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
    /// Parameters and buffers at the end by their keys (`parameter:NAME`), when they were to be
    /// kept.
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
        /// Number of operators.
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
        problem: backend::operators::KernelError,
    },
    /// The device failed.
    #[error("the {0} device: {1}")]
    Device(&'static str, String),
}

fn list_missing(missing: &[Missing]) -> String {
    let one =
        |m: &Missing| format!("`{}` ({} operators, first `{}`)", m.kind, m.operators, m.first);
    missing.iter().map(one).collect::<Vec<_>>().join(", ")
}

fn others(operators: usize) -> String {
    if operators > 1 { format!(" (and {} others)", operators - 1) } else { String::new() }
}

/// The operators that a device has, with the element types that each works in, sorted by kind.
/// None where this program was built without that device.
#[must_use]
pub fn operators(target: &Target) -> Vec<Listed> {
    match target {
        Target::Host => host::kernels::list(),
        #[cfg(feature = "cuda")]
        Target::Cuda { .. } => backend::cuda::emit::list(),
        #[cfg(not(feature = "cuda"))]
        Target::Cuda { .. } => Vec::new(),
    }
}

/// The operator kinds of `graph` that the host device lacks.
#[must_use]
pub fn supported(graph: &Graph) -> Vec<Missing> {
    support::missing(graph, |kind| host::kernels::find(kind).is_some())
}

/// Runs `job`, a checked plan of `graph`, on its device with an arena of exactly `arena_bytes`.
///
/// `progress` gets the number of iterations done, after each.
///
/// # Errors
/// Before anything runs: missing operators, unrecorded numbers, weights that don't fit, a plan that
/// makes no sense. Later: an operator that fails, a file that can't be written.
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
    follow(
        Job::new(kernels, graph, profile, settings, None)?,
        profile,
        (job, arena_bytes),
        None,
        progress,
    )
}

/// Runs `plan`, checked and of one job, and has it planned anew when measured latencies drift. A
/// new plan takes over between two iterations and changes no result.
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
    let run = Job::new(host::kernels::find, graph, &plan.device, settings, None)?;
    follow(run, &plan.device, (job, plan.budget), Some(replan), progress)
}

/// Runs a job alone, from plan to plan if there is a planner to make them.
fn follow(
    mut run: Job<'_>,
    profile: &Profile,
    (job, arena): (&JobPlan, Bytes),
    replan: Option<&Replan<'_>>,
    progress: &mut dyn FnMut(u32),
) -> Result<Outcome, RunError> {
    run.libraries.clone_from(&job.libraries);
    let graph = run.graph;
    thread::scope(|scope| {
        let controller = replan.map(|replan| Controller::new(scope, graph, profile, job, replan));
        let mut alone = Alone { controller, switch: false, progress };
        let (mut plan, mut arena) = (Cow::Borrowed(job), arena);
        let (mut first, mut link) = (0, profile.link);
        loop {
            let program = Program::placed(graph, &plan)?;
            if let Some(controller) = &mut alone.controller {
                controller.follow(&program, &link);
            }
            alone.switch = false;
            match run.session(&plan, arena, &program, first, &mut alone)? {
                End::Done(mut outcome) => {
                    outcome.changes = alone
                        .controller
                        .map(|c| c.changes(&outcome.iteration_ns))
                        .unwrap_or_default();
                    return Ok(*outcome);
                }
                End::Stopped(outcome) => return Ok(*outcome),
                End::Left(next) => {
                    let Some(new) = alone.controller.as_mut().and_then(Controller::take) else {
                        return Err(RunError::Plan("no plan took over".to_owned()));
                    };
                    (first, link, arena) = (next, new.device.link, new.budget);
                    let job = new
                        .jobs
                        .into_iter()
                        .next()
                        .ok_or_else(|| RunError::Plan("the new plan has no job".to_owned()))?;
                    plan = Cow::Owned(job);
                }
            }
        }
    })
}

/// The pilot of a job that has the device for itself.
struct Alone<'scope, 'env, 'p> {
    controller: Option<Controller<'scope, 'env>>,
    switch: bool,
    progress: &'p mut dyn FnMut(u32),
}

impl Pilot for Alone<'_, '_, '_> {
    fn next(&mut self, _: u32) -> Next {
        if self.switch { Next::Leave } else { Next::Go }
    }

    fn ended(&mut self, iteration: u32, measured: &Measured) {
        (self.progress)(iteration + 1);
        self.switch = self.controller.as_mut().is_some_and(|c| c.boundary(iteration, measured));
    }
}

#[cfg(test)]
mod tests;
