//! Plans of events that are given: none, decisions, or those of another plan.

use super::{PlanError, Planned, Request, finish, placed};
use crate::emit::Emitted;
use crate::job::liveness::Liveness;
use crate::sim::program::{Program, ProgramError};
use crate::units::Bytes;

/// The job without any event, placed: what an unplanned run does.
///
/// # Errors
/// [`PlanError::Defect`] only.
pub fn unplanned(request: &Request<'_>) -> Result<Planned, PlanError> {
    let mut planned = written(request, Emitted::default())?;
    planned.plan.planner = "none".to_owned();
    Ok(planned)
}

/// A plan of these events, however they were decided, with the budget that its arena takes.
///
/// # Errors
/// [`PlanError::Defect`] where the events contradict each other.
pub fn written(request: &Request<'_>, emitted: Emitted) -> Result<Planned, PlanError> {
    let program = Program::new(request.graph, request.latencies, &emitted.events)
        .map_err(|e| PlanError::Defect(e.to_string()))?;
    let (program, placements, height) = placed(program, &emitted, 0)?;
    let liveness = Liveness::new(request.graph);
    let mut planned = finish(request, &liveness, emitted, program, placements, height)?;
    planned.plan.budget = Bytes(height);
    Ok(planned)
}

/// The same events at the same addresses on the request's device: what differs is time, and with it
/// where host copies lie.
///
/// # Errors
/// [`PlanError::Defect`] only.
pub(crate) fn on_device(request: &Request<'_>, planned: &Planned) -> Result<Planned, PlanError> {
    let defect = |e: ProgramError| PlanError::Defect(e.to_string());
    let [job] = &planned.plan.jobs[..] else {
        return Err(PlanError::Defect("not a plan of one job".to_owned()));
    };
    let mut program =
        Program::new(request.graph, request.latencies, &job.events).map_err(defect)?;
    program.place(&job.placements).map_err(defect)?;
    let emitted = Emitted { events: job.events.clone(), ..Emitted::default() };
    let height = planned.plan.figures.arena_bytes.0;
    finish(request, &Liveness::new(request.graph), emitted, program, job.placements.clone(), height)
}
