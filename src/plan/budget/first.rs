//! The first plan for a budget, and what comes of it. Several orders of a job are compared by their
//! first plans, which take little time.

use super::{PlanError, Planned, Request, proof, rungs, slow, within};
use crate::job::liveness::Liveness;
use crate::sim::reserved::Framework;
use crate::units::Nanos;

/// What is planned at first for a budget: a plan, or why there is none.
pub(crate) struct First {
    pub(super) made: Result<Planned, PlanError>,
    /// It is proved that no plan is within the budget.
    pub(super) proved: bool,
}

impl First {
    pub(crate) fn new(request: &Request<'_>, framework: Option<&Framework>) -> Self {
        match proof::refusal(request, &Liveness::new(request.graph), framework) {
            Ok(Some(no)) => Self { made: Err(PlanError::Infeasible(no)), proved: true },
            Ok(None) => Self { made: within(request, framework), proved: false },
            Err(defect) => Self { made: Err(defect), proved: true },
        }
    }

    /// There is a plan, and there is none to compare it with or that takes longer.
    pub(crate) fn is_quicker_than(&self, other: &Self) -> bool {
        self.time().is_some_and(|time| other.time().is_none_or(|other| time < other))
    }

    /// There is no plan, or there is much to gain.
    pub(crate) fn is_slow(&self) -> bool {
        self.made.as_ref().map_or(true, slow)
    }

    /// The plan's time.
    pub(crate) fn time(&self) -> Option<Nanos> {
        self.made.as_ref().ok().map(|planned| planned.run.iteration)
    }
}

/// The quickest plan for an arena that is found from a first one on. With the time of a plan that
/// another order of the job has within the same budget, plans that are no quicker are not looked
/// for.
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
    rungs::make(request, &Liveness::new(request.graph), first.made, other)
}
