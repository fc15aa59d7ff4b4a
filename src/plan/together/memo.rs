//! Plans of single jobs that are made once and looked up afterwards.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::Job;
use crate::budget::{self, Infeasible, PlanError, Planned, Request};
use crate::contract::Latency;
use crate::device::{Link, Profile, roofline};
use crate::job::Graph;
use crate::job::liveness::Liveness;
use crate::method::Method;
use crate::parallel::in_parallel;
use crate::units::{Bytes, Nanos};

/// Plans made before, by graph, planner, host memory and target. A lookup gives the same as
/// planning again, whichever threads ask and in whichever order.
#[derive(Debug, Default)]
pub struct Memo {
    made: Once<Key, Result<Step, PlanError>>,
    /// Plans made for a slower link, and the same on the device, by the former's address and the
    /// budget.
    on_device: Once<(usize, Bytes), Result<Pair, PlanError>>,
    /// What is known of each graph, by its hash.
    known: Once<String, Known>,
    /// The planners that were asked, by number.
    methods: Mutex<Vec<Method>>,
    /// Whether targets, link rates and host memory are rounded.
    coarse: bool,
    /// Whether plans are made on all cores.
    wide: bool,
}

/// A plan for a slower link, and the same on the device.
type Pair = [Arc<Planned>; 2];

/// Values that are computed once.
type Once<K, V> = Mutex<BTreeMap<K, Arc<OnceLock<V>>>>;

/// The value for a key. A thread that asks for it while another computes it waits.
fn once<K: Ord, V: Clone>(all: &Once<K, V>, key: K, make: impl FnOnce() -> V) -> V {
    let slot = Arc::clone(locked(all).entry(key).or_default());
    slot.get_or_init(make).clone()
}

/// No code panics while it holds one of these locks for a change in parts.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The parts between a job's floor and its peak to which targets are rounded.
const GRID: u64 = 16;

/// What is known of a job before it is planned.
#[derive(Clone, Copy, Debug)]
pub(super) struct Known {
    pub(super) peak: Bytes,
    pub(super) floor: Bytes,
    pub(super) utilisation: u32,
    /// The time of its iteration alone and without a plan.
    pub(super) own: Nanos,
}

impl Known {
    /// The grid's step.
    fn part(&self) -> u64 {
        ((self.peak.0 - self.floor.0) / GRID / 512 * 512).max(512)
    }
}

/// The graph's hash and the planner's number, the effort, host memory and the link's rates, target.
type Key = (String, usize, Effort, [u64; 5], u64);

/// How a plan was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Effort {
    Full,
    Once,
    Unplanned,
    Least,
}

/// A plan, shared by equal jobs, or why there is none.
pub(crate) type Step = Result<Arc<Planned>, Box<Infeasible>>;

impl Memo {
    /// For a caller who plans hundreds of times. Targets are rounded down to a grid of `GRID` parts
    /// between a job's floor and peak, and link rates and parts of the host memory to grids of
    /// their own, so that most plans are found again. Least plans are made with little effort, and
    /// ways of planning are compared over short rounds.
    #[must_use]
    pub fn for_many() -> Self {
        Self { coarse: true, wide: true, ..Self::default() }
    }

    /// For a caller who has the machine to itself: plans are made on all cores.
    #[must_use]
    pub fn on_all_cores() -> Self {
        Self { wide: true, ..Self::default() }
    }

    /// Runs `work(0)` to `work(count - 1)`, on all cores where that is asked for. Results are in
    /// that order.
    pub(super) fn each<T: Send>(&self, count: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
        if self.wide { in_parallel(count, work) } else { (0..count).map(work).collect() }
    }

    pub(super) const fn is_coarse(&self) -> bool {
        self.coarse
    }

    /// How many plans of single jobs were made.
    #[must_use]
    pub fn made(&self) -> usize {
        locked(&self.made).len()
    }

    /// A link's rate on the grid, in thousandths: each is four fifths of the one above.
    pub(super) const fn rate(&self, part: u64) -> u64 {
        if !self.coarse {
            return part;
        }
        let mut rate = 1000;
        while rate > part && rate > 1 {
            rate = rate * 4 / 5;
        }
        rate
    }

    /// A part of the host memory on the grid: each is half of the one above.
    pub(super) const fn pinned(&self, part: Bytes, whole: Bytes) -> Bytes {
        let mut rounded = if self.coarse { whole } else { part };
        while rounded.0 > part.0 {
            rounded.0 = rounded.0 / 1024 * 512;
        }
        rounded
    }

    /// What is known of a job on this device.
    pub(super) fn known(&self, job: &Job<'_>, device: &Profile) -> Known {
        self.look_up(&job.file.1, job.graph, job.latencies, device)
    }

    fn look_up(&self, hash: &str, graph: &Graph, latencies: &[Latency], device: &Profile) -> Known {
        once(&self.known, hash.to_owned(), || {
            let liveness = Liveness::new(graph);
            Known {
                peak: liveness.peak,
                floor: liveness.floor,
                utilisation: roofline::utilisation(&graph.operators, latencies, device),
                own: latencies.iter().map(|latency| latency.time).sum(),
            }
        })
    }

    fn of_request(&self, request: &Request<'_>) -> Known {
        self.look_up(&request.file.1, request.graph, request.latencies, request.device)
    }

    /// A target on the grid, which begins at the job's floor.
    fn rounded<'r>(&self, request: &Request<'r>) -> Request<'r> {
        let mut request = request.clone();
        if self.coarse {
            let known = self.of_request(&request);
            let above = request.budget.saturating_sub(known.floor).0 / known.part() * known.part();
            request.budget = request.budget.min(known.floor + Bytes(above));
        }
        request
    }

    /// The plan within the request's budget. Where hundreds of plans are made, no other planner
    /// stands in: that takes most of the time and hardly ever helps.
    pub(crate) fn plan(&self, request: &Request<'_>) -> Result<Step, PlanError> {
        let request = &self.rounded(request);
        self.keep(request, Effort::Full, |request| match self.coarse {
            true => budget::by_itself(request),
            false => budget::within(request, None),
        })
    }

    /// The plan made with little effort.
    pub(super) fn once(&self, request: &Request<'_>) -> Result<Step, PlanError> {
        let request = &self.rounded(request);
        self.keep(request, Effort::Once, budget::once)
    }

    /// The plan without events.
    pub(crate) fn unplanned(&self, request: &Request<'_>) -> Result<Arc<Planned>, PlanError> {
        let request = Request { budget: Bytes::ZERO, ..request.clone() };
        let made = self.keep(&request, Effort::Unplanned, budget::unplanned)?;
        made.map_err(PlanError::Infeasible)
    }

    /// The plan with the smallest arena found below `most`; the result depends on `most`.
    pub(crate) fn least(&self, request: &Request<'_>, most: Bytes) -> Result<Step, PlanError> {
        let mut request = Request { budget: most, ..request.clone() };
        if self.coarse {
            request.budget = self.unplanned(&request)?.plan.figures.arena_bytes;
            request.method = request.method.sketch();
        }
        self.keep(&request, Effort::Least, budget::minimum)
    }

    /// The lowest plan on the grid that takes little effort.
    pub(super) fn lowest(&self, request: &Request<'_>) -> Result<Step, PlanError> {
        let known = self.of_request(request);
        let method = request.method.sketch();
        let mut target = known.floor.0;
        loop {
            let budget = Bytes(target);
            let step = self.once(&Request { budget, method: method.clone(), ..request.clone() })?;
            if step.is_ok() || target >= known.peak.0 {
                return Ok(step);
            }
            target += known.part();
        }
    }

    /// A plan made for a slower link, with its figures on the request's device.
    pub(super) fn on_device(
        &self,
        request: &Request<'_>,
        part: &Arc<Planned>,
    ) -> Result<Arc<Planned>, PlanError> {
        let key = (Arc::as_ptr(part).addr(), request.budget);
        let make = || Ok([Arc::clone(part), Arc::new(budget::on_device(request, part)?)]);
        once(&self.on_device, key, make).map(|[_, on_device]| on_device)
    }

    fn method(&self, method: &Method) -> usize {
        let mut methods = locked(&self.methods);
        methods.iter().position(|known| known == method).unwrap_or_else(|| {
            methods.push(method.clone());
            methods.len() - 1
        })
    }

    /// Returns the result of `make` for a request, which is called once.
    fn keep(
        &self,
        request: &Request<'_>,
        effort: Effort,
        make: impl Fn(&Request<'_>) -> Result<Planned, PlanError>,
    ) -> Result<Step, PlanError> {
        let Link { h2d, d2h, h2d_contended, d2h_contended, .. } = request.device.link;
        let pinned = request.device.pinned_bytes.0;
        let seen = [pinned, h2d, d2h, h2d_contended, d2h_contended];
        let (graph, method) = (request.file.1.clone(), self.method(&request.method));
        let key = (graph, method, effort, seen, request.budget.0);
        once(&self.made, key, || budget::feasible(make(request).map(Arc::new)))
    }
}
