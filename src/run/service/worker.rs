//! A job's thread. It obeys commands at iteration boundaries and reports the results.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::Receiver;

use super::split::Split;
use crate::backend::{Measured, host};
use crate::contract::{JobPlan, Latency};
use crate::device::Profile;
use crate::job::Graph;
use crate::plan::{Method, Share};
use crate::session::{End, Job, Next, Pilot};
use crate::sim::program::Program;
use crate::sim::share::lanes::JobId;
use crate::sim::share::scheduler::Order;
use crate::start::Shared;
use crate::units::Bytes;
use crate::{Outcome, RunError, Settings};

/// An order to a worker, and the plan with which it enters if that is another than before.
pub type Command = (Order, Option<Box<JobPlan>>);

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

/// Runs a job under the commands of the service.
pub(super) struct Worker<'a> {
    pub(super) id: JobId,
    pub(super) work: &'a Work,
    pub(super) arena: Bytes,
    pub(super) shared: &'a Shared,
    pub(super) commands: Receiver<Command>,
    pub(super) report: &'a dyn Fn(Progress),
}

impl Worker<'_> {
    /// Runs the job to its end, which is reported.
    pub(super) fn run(mut self) {
        let last = match catch_unwind(AssertUnwindSafe(|| self.go())) {
            Ok(Ok((outcome, whole))) => Progress::Ended(outcome, whole),
            Ok(Err(error)) => Progress::Failed(error),
            Err(_) => Progress::Failed(RunError::Device(
                self.work.settings.target.name(),
                "the job's thread panicked".to_owned(),
            )),
        };
        (self.report)(last);
    }

    fn go(&mut self) -> Result<(Box<Outcome>, bool), RunError> {
        let Work { graph, profile, settings, .. } = self.work;
        let mut job = Job::new(host::kernels::find, graph, profile, settings, Some(self.shared))?;
        let mut plan = self.work.plan.clone();
        job.libraries.clone_from(&plan.libraries);
        let read = |plan: &JobPlan| -> Result<(Program, Split), RunError> {
            let program = Program::placed(graph, plan)?;
            let split = Split::new(&program, plan.window.as_ref());
            Ok((program, split))
        };
        let (mut program, mut split) = read(&plan)?;
        job.fill();
        (self.report)(Progress::Ready);
        let mut first = 0;
        while let Ok((Order::Enter(spot, _), newer)) = self.commands.recv() {
            if let Some(newer) = newer {
                plan = *newer;
                (program, split) = read(&plan)?;
            }
            job.member = plan.window.as_ref().map(|_| (spot.lane, self.id));
            let here = split.moved(&program, spot.persistent, spot.ephemeral);
            match job.session(&plan, self.arena, &here, first, self)? {
                End::Done(outcome) => return Ok((outcome, true)),
                End::Stopped(outcome) => return Ok((outcome, false)),
                End::Left(next) => {
                    first = next;
                    (self.report)(Progress::Left);
                }
            }
        }
        Ok((Box::new(job.outcome_so_far()), false))
    }
}

impl Pilot for Worker<'_> {
    fn next(&mut self, _: u32) -> Next {
        match self.commands.recv() {
            Ok((Order::Go, _)) => Next::Go,
            Ok((Order::Leave, _)) => Next::Leave,
            _ => Next::Stop,
        }
    }

    fn ended(&mut self, _: u32, measured: &Measured) {
        (self.report)(Progress::Ran(Box::new(measured.clone())));
    }
}
