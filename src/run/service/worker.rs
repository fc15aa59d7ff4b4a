//! A job's thread: it carries out commands at its iteration boundaries, and says what came of it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::Receiver;

use super::memory::Spot;
use super::split::Split;
use crate::backend::{Measured, host};
use crate::contract::JobPlan;
use crate::device::Profile;
use crate::job::Graph;
use crate::plan::Method;
use crate::session::{End, Job, Next, Pilot};
use crate::sim::program::Program;
use crate::start::Shared;
use crate::units::{Bytes, Nanos};
use crate::{Outcome, RunError, Settings};

/// Commands to a worker.
#[derive(Clone, Debug)]
pub enum Command {
    /// Come in here; with another plan from now on, if there is one.
    Enter(Spot, Option<Box<JobPlan>>),
    /// Run an iteration.
    Go,
    /// Go out with all that is kept.
    Leave,
    /// End.
    Stop,
}

/// What a worker says.
#[derive(Debug)]
pub enum Said {
    /// It can run, once it may.
    Ready,
    /// It has run an iteration.
    Ran(Nanos),
    /// It is out.
    Left,
    /// It has ended: all iterations, or asked to stop before.
    Ended(Box<Outcome>, bool),
    /// It can't go on.
    Failed(RunError),
}

/// A job with all that it needs.
#[derive(Clone, Debug)]
pub struct Work {
    /// The job.
    pub graph: Graph,
    /// Its checked plan.
    pub plan: JobPlan,
    /// The device that it was planned for.
    pub profile: Profile,
    /// Who planned it, and so plans it anew.
    pub method: Method,
    /// How much a loss of its time counts when all are planned anew, in thousandths.
    pub priority: u64,
    /// Iterations, seed and initial values.
    pub settings: Settings,
}

/// Runs a job as `commands` say.
pub fn work(
    work: &Work,
    arena: Bytes,
    shared: &Shared,
    commands: &Receiver<Command>,
    said: &dyn Fn(Said),
) {
    let result = catch_unwind(AssertUnwindSafe(|| go(work, arena, shared, commands, said)));
    let last = match result {
        Ok(Ok((outcome, whole))) => Said::Ended(outcome, whole),
        Ok(Err(error)) => Said::Failed(error),
        Err(_) => Said::Failed(RunError::Device(
            work.settings.target.name(),
            "the job's thread broke off".to_owned(),
        )),
    };
    said(last);
}

fn go(
    work: &Work,
    arena: Bytes,
    shared: &Shared,
    commands: &Receiver<Command>,
    said: &dyn Fn(Said),
) -> Result<(Box<Outcome>, bool), RunError> {
    let mut job =
        Job::new(host::kernels::find, &work.graph, &work.profile, &work.settings, Some(shared))?;
    job.libraries.clone_from(&work.plan.libraries);
    let mut plan = work.plan.clone();
    let mut program = Program::placed(&work.graph, &plan)?;
    let mut split = Split::of(&program);
    job.fill();
    said(Said::Ready);
    let mut first = 0;
    while let Ok(command) = commands.recv() {
        let Command::Enter(spot, newer) = command else { break };
        if let Some(newer) = newer {
            plan = *newer;
            program = Program::placed(&work.graph, &plan)?;
            split = Split::of(&program);
        }
        let here = split.moved(&program, spot.persistent, spot.ephemeral);
        match job.session(&plan, arena, &here, first, &mut Told { commands, said })? {
            End::Done(outcome) => return Ok((outcome, true)),
            End::Stopped(outcome) => return Ok((outcome, false)),
            End::Left(next) => {
                first = next;
                said(Said::Left);
            }
        }
    }
    Ok((Box::new(job.told()), false))
}

struct Told<'a> {
    commands: &'a Receiver<Command>,
    said: &'a dyn Fn(Said),
}

impl Pilot for Told<'_> {
    fn next(&mut self, _: u32) -> Next {
        match self.commands.recv() {
            Ok(Command::Go) => Next::Go,
            Ok(Command::Leave) => Next::Leave,
            Ok(Command::Enter(..) | Command::Stop) | Err(_) => Next::Stop,
        }
    }

    fn ended(&mut self, _: u32, measured: &Measured) {
        (self.said)(Said::Ran(measured.iteration));
    }
}
