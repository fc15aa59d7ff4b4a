//! The first plan for a budget, and what comes of it. Several orders of a job are compared by their
//! first plans, which take little time.

use super::{PlanError, Planned, Request, proof, rungs, within};
use crate::job::liveness::Liveness;
use crate::units::Nanos;

/// What is planned at first for a budget of an arena: a plan, or why there is none.
pub(crate) struct First {
    made: Result<Planned, PlanError>,
    /// It is proved that no plan is within the budget.
    proved: bool,
}

impl First {
    pub(crate) fn of(request: &Request<'_>) -> Self {
        match proof::refusal(request, &Liveness::of(request.graph), None) {
            Ok(Some(no)) => Self { made: Err(PlanError::Infeasible(no)), proved: true },
            Ok(None) => Self { made: within(request, None), proved: false },
            Err(defect) => Self { made: Err(defect), proved: true },
        }
    }

    /// The plan's time.
    pub(crate) fn time(&self) -> Option<Nanos> {
        self.made.as_ref().ok().map(|planned| planned.run.iteration)
    }
}

/// The quickest plan that is found from a first one on. With the time of a plan that another order
/// of the job has within the same budget, plans that are no quicker are not looked for.
///
/// # Errors
/// As [`make`].
pub(crate) fn make_of(
    request: &Request<'_>,
    first: First,
    other: Option<Nanos>,
) -> Result<Planned, PlanError> {
    if first.proved {
        return first.made;
    }
    rungs::make(request, &Liveness::of(request.graph), first.made, other)
}
