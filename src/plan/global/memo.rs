//! Plans of single jobs that are made once and looked up afterwards.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::STEPS;
use crate::budget::{self, Infeasible, PlanError, Planned, Request};
use crate::job::liveness::Liveness;
use crate::units::Bytes;

/// Plans made before, by graph, planner, host memory and target. A lookup gives the same as
/// planning again.
#[derive(Clone, Debug, Default)]
pub struct Memo {
    made: BTreeMap<Key, Step>,
    /// Plans made for a slower link, and the same on the device, by the former's address and the
    /// budget.
    on_device: BTreeMap<(usize, Bytes), (Arc<Planned>, Arc<Planned>)>,
    /// The peak and the floor of each graph, where targets and link rates are rounded.
    coarse: Option<BTreeMap<String, (Bytes, Bytes)>>,
}

/// Hash of the graph, planner, host memory and the link's rates, target.
type Key = (String, String, [u64; 5], u64);

/// A plan, shared by equal jobs, or why there is none.
pub(crate) type Step = Result<Arc<Planned>, Box<Infeasible>>;

impl Memo {
    /// For a caller who plans hundreds of times. Targets are rounded down to a grid of `STEPS`
    /// parts between a job's floor and peak, and link rates to a grid of their own, so that most
    /// plans are found again. Least plans are made with little effort, and ways of planning are
    /// compared over short rounds.
    #[must_use]
    pub const fn for_many() -> Self {
        Self { made: BTreeMap::new(), on_device: BTreeMap::new(), coarse: Some(BTreeMap::new()) }
    }

    pub(super) const fn is_coarse(&self) -> bool {
        self.coarse.is_some()
    }

    /// A link's rate on the grid, in thousandths: each is four fifths of the one above.
    pub(super) const fn rate(&self, part: u64) -> u64 {
        if !self.is_coarse() {
            return part;
        }
        let mut rate = 1000;
        while rate > part && rate > 1 {
            rate = rate * 4 / 5;
        }
        rate
    }

    /// A target on the grid, which begins at the job's floor.
    fn rounded<'r>(&mut self, request: &Request<'r>) -> Request<'r> {
        let mut request = request.clone();
        if let Some(known) = &mut self.coarse {
            let (peak, floor) = *known.entry(request.file.1.clone()).or_insert_with(|| {
                let liveness = Liveness::of(request.graph);
                (liveness.peak, liveness.floor)
            });
            let part = ((peak.0 - floor.0) / STEPS / 512 * 512).max(512);
            let above = request.budget.0.saturating_sub(floor.0) / part * part;
            request.budget = request.budget.min(floor + Bytes(above));
        }
        request
    }

    /// The plan within the request's budget.
    pub(crate) fn plan(&mut self, request: &Request<'_>) -> Result<Step, PlanError> {
        let request = &self.rounded(request);
        self.keep(request, "", |request| budget::within(request, None))
    }

    /// The plan made with little effort.
    pub(super) fn once(&mut self, request: &Request<'_>) -> Result<Step, PlanError> {
        let request = &self.rounded(request);
        self.keep(request, "once", budget::once)
    }

    /// The plan without events.
    pub(crate) fn unplanned(&mut self, request: &Request<'_>) -> Result<Arc<Planned>, PlanError> {
        let request = Request { budget: Bytes::ZERO, ..request.clone() };
        self.keep(&request, "unplanned", budget::unplanned)?.map_err(PlanError::Infeasible)
    }

    /// The plan with the smallest arena found below `most`; the result depends on `most`.
    pub(crate) fn least(&mut self, request: &Request<'_>, most: Bytes) -> Result<Step, PlanError> {
        let mut request = Request { budget: most, ..request.clone() };
        if self.is_coarse() {
            request.budget = self.unplanned(&request)?.plan.figures.arena_bytes;
            request.method = request.method.sketch();
        }
        self.keep(&request, "least", budget::minimum)
    }

    /// A plan made for a slower link, with its figures on the request's device.
    pub(super) fn on_device(
        &mut self,
        request: &Request<'_>,
        part: &Arc<Planned>,
    ) -> Result<Arc<Planned>, PlanError> {
        let key = (Arc::as_ptr(part).addr(), request.budget);
        if let Some((_, known)) = self.on_device.get(&key) {
            return Ok(Arc::clone(known));
        }
        let made = Arc::new(budget::on_device(request, part)?);
        self.on_device.insert(key, (Arc::clone(part), Arc::clone(&made)));
        Ok(made)
    }

    /// Returns the result of `make` for a request, which is called once.
    fn keep(
        &mut self,
        request: &Request<'_>,
        how: &str,
        make: impl Fn(&Request<'_>) -> Result<Planned, PlanError>,
    ) -> Result<Step, PlanError> {
        let link = &request.device.link;
        let seen = [
            request.device.pinned_bytes.0,
            link.h2d,
            link.d2h,
            link.h2d_contended,
            link.d2h_contended,
        ];
        let key =
            (request.file.1.clone(), format!("{:?} {how}", request.method), seen, request.budget.0);
        if let Some(known) = self.made.get(&key) {
            return Ok(known.clone());
        }
        let made = match make(request) {
            Ok(planned) => Ok(Arc::new(planned)),
            Err(PlanError::Infeasible(no)) => Err(no),
            Err(defect) => return Err(defect),
        };
        self.made.insert(key, made.clone());
        Ok(made)
    }
}
