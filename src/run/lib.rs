//! Runs plans: the executor, the controller, and the devices behind one trait.
//!
//! [`run`] executes a checked plan on a device and returns its measurements. [`run_replanning`]
//! also plans again during the run when latencies drift ([`controller`]). [`profile`](mod@profile)
//! and [`measure`] measure operators and devices. A plan that was not checked gives an error or
//! wrong numbers, but touches no byte outside its memories.

// Bytes, times and ids are never cut off silently.
#![cfg_attr(not(test), warn(clippy::cast_possible_truncation))]

use neap_model::{contract, device, files, job, units};
use neap_plan as plan;
use neap_sim as sim;

pub mod backend;
pub mod controller;
pub mod drift;
pub mod executor;
pub mod measure;
pub mod profile;
pub mod seed;
pub mod service;
mod session;
mod start;
pub mod support;
pub mod sweep;
pub mod vary;
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
pub use start::Spare;
use start::{has_algorithms, open};

/// The rate of the host device's copies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rate {
    /// The rates of the device's profile, with contention and overhead.
    #[default]
    Profile,
    /// This many bytes per second in each direction.
    BytesPerSecond(u64),
    /// As fast as memory can be copied.
    Unlimited,
}

/// The kind of device that a job runs on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Target {
    /// The embedded host device.
    #[default]
    Host,
    /// The first NVIDIA GPU.
    Cuda {
        /// The folder to search first for NVIDIA's libraries.
        libs: Option<PathBuf>,
        /// Whether to round the factors of f32 products to TF32.
        tf32: bool,
    },
}

impl Target {
    /// The device's name in tables of latencies, for a profile of this name.
    #[must_use]
    pub fn key<'n>(&self, profile: &'n str) -> &'n str {
        match self {
            Self::Host => "host",
            Self::Cuda { .. } => profile,
        }
    }

    /// The device's name in errors.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Cuda { .. } => "CUDA",
        }
    }
}

/// The settings of a run besides its plan.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The kind of device. Rates, throttling and jitter apply to the host device only.
    pub target: Target,
    /// Number of iterations.
    pub iterations: u32,
    /// The rate of copies.
    pub link_rate: Rate,
    /// The share of that rate, in thousandths; 1000 for all of it.
    pub throttle_per_mille: u32,
    /// Other shares from these iterations on, in order.
    pub throttle_later: Vec<(u64, u32)>,
    /// For how much of the time, in percent, other work is queued on the device meanwhile.
    pub load_percent: u32,
    /// Seed of the initial values that no weights file provides.
    pub seed: u64,
    /// A safetensors file with initial values.
    pub weights: Option<PathBuf>,
    /// A safetensors file for parameters, buffers and optimizer states at the end.
    pub save: Option<PathBuf>,
    /// Whether to return parameters and buffers in the outcome.
    pub keep_state: bool,
    /// Whether to fill memory with a pattern where a residency begins without content, so that
    /// reading such bytes is noticed.
    pub poison: bool,
    /// The longest random sleep before each copy. Tests use it to prove that timing changes no
    /// result.
    pub jitter: Nanos,
    /// Whether a GPU times each operator and copy in every iteration, which costs it time, or only
    /// in the first and the last. The host always times them.
    pub timed: bool,
    /// Lets others end the run after the running iteration.
    pub stop: Stop,
}

/// A request to stop. Clones are the same request, so a signal handler can hold one.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// Ends the run after the running iteration. Its state and its outcome are still written.
    pub fn request(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// The flag that a signal handler sets to request the stop.
    #[must_use]
    pub fn flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.0)
    }

    /// Whether the stop was requested.
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
            timed: false,
            stop: Stop::default(),
        }
    }
}

impl Settings {
    /// The host device's options for a profile.
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
            member: None,
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

/// The results and measurements of a run.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// The loss of each iteration; empty when the graph has no recognised loss.
    pub losses: Vec<f32>,
    /// Whether it ended early because it was asked to. `iteration_ns` has the iterations that ran.
    pub stopped: bool,
    /// SHA-256 in hex over parameters and buffers in order of name: each one's name, a zero byte,
    /// its bytes.
    pub checksum: String,
    /// The end of the highest bytes that were touched.
    pub peak_bytes: Bytes,
    /// Largest sum of resident bytes at any instant, by the measured times.
    pub resident_peak_bytes: Bytes,
    /// How long each iteration took on the device; on a GPU until the next one began, unless other
    /// jobs run too.
    pub iteration_ns: Vec<Nanos>,
    /// How long each iteration took by the host's clock, what lies between two included; none where
    /// other jobs run too.
    pub wall_ns: Vec<Nanos>,
    /// How long the host took in each of these to put all work on the device's streams.
    pub submit_ns: Vec<Nanos>,
    /// In how many iterations operators and copies were timed.
    pub timed_iterations: u32,
    /// How often, in these, a step had to wait because a copy of a tensor that it reads had not
    /// ended.
    pub late_copies: u64,
    /// How long all iterations waited for a window that other jobs held.
    pub window_ns: Nanos,
    /// For each operator, the time of its own run (not its recomputes) in these; of more than 1024
    /// in the first and the last of them.
    pub operator_ns: Vec<Vec<Nanos>>,
    /// When each step and copy of the last of these started and ended.
    pub last: Option<crate::sim::engine::Run>,
    /// What libraries chose for operators for which they have several algorithms.
    pub libraries: BTreeMap<OpId, Chosen>,
    /// What the device took besides, of the last plan that it followed where nothing else is said.
    pub costs: Costs,
    /// Parameters and buffers at the end by their keys (`parameter:NAME`), when they were to be
    /// kept.
    pub state: Option<BTreeMap<String, Value>>,
    /// Sentences for the user.
    pub notes: Vec<String>,
    /// What was planned again during the run, in order.
    pub changes: Vec<Change>,
}

/// What a GPU takes besides the plan's arena and iterations; nothing on the host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Costs {
    /// Operators that neap's plain kernels carry out in place of NVIDIA's libraries.
    pub fallbacks: usize,
    /// Device memory beside the arena, where libraries work when the plan reserves nothing.
    pub scratch: Bytes,
    /// How long it took to pin the host store, of all plans that it followed.
    pub pinning: Nanos,
    /// How the library carries out each shape of matrix product, in order.
    pub products: Vec<Product>,
}

/// How the GPU's library carries out matrix products of `m` by `k` and `k` by `n`. The same for
/// every plan of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[allow(missing_docs, reason = "the names of the formula")]
pub struct Product {
    pub m: i64,
    pub n: i64,
    pub k: i64,
    pub batch: i64,
    #[serde(rename = "type")]
    pub dtype: Dtype,
    /// Whether it adds a bias.
    pub bias: bool,
    /// The library's number of the algorithm.
    pub algorithm: u32,
    /// The library's number of its tile.
    pub tile: u32,
    /// In how many parts it cuts each sum.
    pub parts: u32,
    /// The library's number of how parts are added.
    pub reduction: u32,
}

/// Why a job did not run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The device lacks kernels for some operators.
    #[error("the {0} device lacks {list}", list = list_missing(.1))]
    Unsupported(&'static str, Vec<Missing>),
    /// The graph needs numbers that were not recorded.
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
    /// The graph contradicts itself in a way that matters only for a run.
    #[error("{0}")]
    Graph(String),
    /// The plan can't be read as a program.
    #[error("the plan can't be run: {0}")]
    Program(#[from] ProgramError),
    /// The plan can't be run.
    #[error("the plan can't be run: {0}; `neap check` says more")]
    Plan(String),
    /// The initial values can't be used.
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
        /// The kernel's error.
        problem: backend::operators::KernelError,
    },
    /// The device failed.
    #[error("the {0} device: {1}")]
    Device(&'static str, String),
}

impl RunError {
    /// An operator met values that it can't work with, such as an index beyond a table.
    #[must_use]
    pub fn is_about_data(&self) -> bool {
        matches!(self, Self::Operator { problem: backend::operators::KernelError::Data(_), .. })
    }
}

fn list_missing(missing: &[Missing]) -> String {
    let one =
        |m: &Missing| format!("`{}` ({} operators, first `{}`)", m.kind, m.operators, m.first);
    missing.iter().map(one).collect::<Vec<_>>().join(", ")
}

fn others(operators: usize) -> String {
    if operators > 1 { format!(" (and {} others)", operators - 1) } else { String::new() }
}

/// The operators of a device, with the element types that each supports, sorted by kind. Empty if
/// this program was built without the device.
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

/// Compiles all CUDA kernels for an architecture such as `sm_90` into the cache, without a GPU.
/// `libs` says where to look for NVRTC first.
///
/// # Errors
/// When NVRTC is missing or refuses; or this program was built without CUDA.
#[cfg(feature = "cuda")]
pub fn compile_kernels(arch: &str, libs: Option<&std::path::Path>) -> Result<(), String> {
    backend::cuda::kernels::fill(arch, libs)
}

/// As the other of this name.
///
/// # Errors
/// Always.
#[cfg(not(feature = "cuda"))]
pub fn compile_kernels(_: &str, _: Option<&std::path::Path>) -> Result<(), String> {
    Err("built without the cuda feature".to_owned())
}

/// The operator kinds of `graph` that the host device lacks.
#[must_use]
pub fn supported(graph: &Graph) -> Vec<Missing> {
    support::missing(graph, |kind| host::kernels::find(kind).is_some())
}

/// Runs `job`, a checked plan of `graph`, on its device with an arena of `arena_bytes`. After each
/// iteration it calls `progress` with the number of iterations done.
///
/// # Errors
/// Before the run: missing operators, unrecorded numbers, weights that don't fit, a plan that can't
/// be read. During the run: an operator that fails, a file that can't be written.
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

/// Runs `plan`, a checked plan of one job, and plans it again when measured latencies drift. A new
/// plan is used from the next iteration on and changes no result.
///
/// # Errors
/// As [`run`], and when the plan has no job.
pub fn run_replanning(
    graph: &Graph,
    plan: &Plan,
    settings: &Settings,
    replan: &Replan<'_>,
    progress: &mut dyn FnMut(u32),
) -> Result<Outcome, RunError> {
    let job = plan.jobs.first().ok_or_else(|| RunError::Plan("it has no job".to_owned()))?;
    let settings = Settings { timed: true, ..settings.clone() };
    let run = Job::new(host::kernels::find, graph, &plan.device, &settings, None)?;
    follow(run, &plan.device, (job, plan.budget), Some(replan), progress)
}

/// Runs a job alone, and changes its plan if there is a planner.
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

/// The pilot of a job that is alone on the device.
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
