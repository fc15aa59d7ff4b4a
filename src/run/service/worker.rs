//! A job's thread. It obeys commands at iteration boundaries and reports the results.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::Receiver;

use super::memory::Spot;
use super::split::Split;
use crate::backend::{Measured, host};
use crate::contract::{JobPlan, Latency, Window};
use crate::device::Profile;
use crate::job::Graph;
use crate::plan::{Method, Share};
use crate::session::{End, Job, Next, Pilot};
use crate::sim::program::Program;
use crate::sim::share::lanes::JobId;
use crate::start::Shared;
use crate::units::Bytes;
use crate::{Outcome, RunError, Settings, Target};

/// A command to a worker.
#[derive(Clone, Debug)]
pub enum Command {
    /// Enter the device at these addresses, with this plan if one is given.
    Enter(Spot, Option<Box<JobPlan>>),
    /// Run an iteration.
    Go,
    /// Leave the device with everything that is kept between iterations.
    Leave,
    /// End.
    Stop,
}

/// A report from a worker.
#[derive(Debug)]
pub enum Progress {
    /// The job is ready to run.
    Ready,
    /// It has run an iteration: its measurements.
    Ran(Box<Measured>),
    /// It has left the device.
    Left,
    /// It has ended: its outcome, and whether all iterations ran.
    Ended(Box<Outcome>, bool),
    /// It failed.
    Failed(RunError),
}

/// A job with its plan and settings.
#[derive(Clone, Debug)]
pub struct Work {
    /// The job.
    pub graph: Graph,
    /// Its checked plan.
    pub plan: JobPlan,
    /// The device that it was planned for.
    pub profile: Profile,
    /// The planner that made the plan, and that plans it again.
    pub method: Method,
    /// The weight of its lost time when all jobs are planned again, in thousandths.
    pub priority: u64,
    /// The largest part of all jobs' swaps that it may make, then.
    pub swap_limit: Share,
    /// The latencies of its operators while other jobs use 0, 10, … 100 % of the device; empty
    /// where one is known for all loads.
    pub at_loads: Vec<Vec<Latency>>,
    /// Iterations, seed and initial values.
    pub settings: Settings,
}

impl Work {
    /// The window of a plan of this job, if it can be passed on within iterations: on the host.
    #[must_use]
    pub fn passes<'p>(&self, plan: &'p JobPlan) -> Option<&'p Window> {
        plan.window.as_ref().filter(|_| self.settings.target == Target::Host)
    }
}

/// Runs a job under the commands of the service.
pub fn work(
    (id, work): (JobId, &Work),
    arena: Bytes,
    shared: &Shared,
    commands: &Receiver<Command>,
    report: &dyn Fn(Progress),
) {
    let result = catch_unwind(AssertUnwindSafe(|| go((id, work), arena, shared, commands, report)));
    let last = match result {
        Ok(Ok((outcome, whole))) => Progress::Ended(outcome, whole),
        Ok(Err(error)) => Progress::Failed(error),
        Err(_) => Progress::Failed(RunError::Device(
            work.settings.target.name(),
            "the job's thread panicked".to_owned(),
        )),
    };
    report(last);
}

fn go(
    (id, work): (JobId, &Work),
    arena: Bytes,
    shared: &Shared,
    commands: &Receiver<Command>,
    report: &dyn Fn(Progress),
) -> Result<(Box<Outcome>, bool), RunError> {
    let mut job =
        Job::new(host::kernels::find, &work.graph, &work.profile, &work.settings, Some(shared))?;
    job.libraries.clone_from(&work.plan.libraries);
    let mut plan = work.plan.clone();
    let mut program = Program::placed(&work.graph, &plan)?;
    let mut split = Split::of(&program, work.passes(&plan));
    job.fill();
    report(Progress::Ready);
    let mut first = 0;
    while let Ok(command) = commands.recv() {
        let Command::Enter(spot, newer) = command else { break };
        if let Some(newer) = newer {
            plan = *newer;
            program = Program::placed(&work.graph, &plan)?;
            split = Split::of(&program, work.passes(&plan));
        }
        job.member = work.passes(&plan).map(|_| (spot.lane, id));
        let here = split.moved(&program, spot.persistent, spot.ephemeral);
        match job.session(&plan, arena, &here, first, &mut Commanded { commands, report })? {
            End::Done(outcome) => return Ok((outcome, true)),
            End::Stopped(outcome) => return Ok((outcome, false)),
            End::Left(next) => {
                first = next;
                report(Progress::Left);
            }
        }
    }
    Ok((Box::new(job.outcome_so_far()), false))
}

struct Commanded<'a> {
    commands: &'a Receiver<Command>,
    report: &'a dyn Fn(Progress),
}

impl Pilot for Commanded<'_> {
    fn next(&mut self, _: u32) -> Next {
        match self.commands.recv() {
            Ok(Command::Go) => Next::Go,
            Ok(Command::Leave) => Next::Leave,
            Ok(Command::Enter(..) | Command::Stop) | Err(_) => Next::Stop,
        }
    }

    fn ended(&mut self, _: u32, measured: &Measured) {
        (self.report)(Progress::Ran(Box::new(measured.clone())));
    }
}
