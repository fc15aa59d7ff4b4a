//! Plans for which a framework's allocator reserves no more than the budget.

use super::{Attempt, FEW, PlanError, Planned, Request, Search};
use crate::job::liveness::Liveness;
use crate::method::Method;
use crate::neap;
use crate::planner::Memory;
use crate::sim::reserved::Framework;
use crate::units::{Bytes, Nanos};

/// How often the target is lowered until an allocator reserves little enough, and how often it is
/// raised by halves after that.
const SHRINKS: usize = 24;
const HALVINGS: usize = 3;

/// At how many targets variants of the planner are tried for an allocator.
const VARIED: u64 = 20;

/// Graphs of at most this many operators are planned at closely spaced targets, and how many
/// operators are planned so in all, which takes less than half a second.
const FINE: usize = 600;
const OPERATORS: usize = 50_000;

/// The step from target to target as a part of the budget, and the most targets: down to four
/// fifths of the budget.
const STEP: u64 = 256;
const TARGETS: usize = 51;

/// The same for planners of larger graphs that leave small tensors where they are: down to seven
/// eighths of the budget.
const COARSE_STEP: u64 = 128;
const COARSE: u64 = 16;

/// A plan that takes less time than `rival` and for which the framework's allocator reserves no
/// more than the budget, if one is found among a number of targets that falls with the size of the
/// graph. With `mend`, plans are mended too where the planner's switch allows it.
///
/// # Errors
/// [`PlanError::Defect`] only.
pub(crate) fn quicker_for(
    request: &Request<'_>,
    framework: &Framework,
    rival: Nanos,
    mend: bool,
) -> Result<Option<Planned>, PlanError> {
    let liveness = Liveness::new(request.graph);
    let memory = &mut Memory::Nothing;
    let mut search = Search::new(request, Some(framework), &liveness, Some(rival), memory);
    search.brief = true;
    search.nearby(mend)
}

/// The same planner for tensors of at least these sizes: what is smaller stays, and does not lie
/// where large tensors need room.
const LARGE: [Bytes; 3] = [Bytes(8 << 20), Bytes(20 << 20), Bytes(32 << 20)];

fn only_large(method: &Method) -> impl Iterator<Item = Method> + use<> {
    let own = if let Method::Neap(options) = method { Some(options.clone()) } else { None };
    LARGE.into_iter().filter_map(move |least| {
        let options = own.as_ref().filter(|o| o.min_swap < least)?;
        Some(Method::Neap(neap::Options { min_swap: least, ..options.clone() }))
    })
}

impl Search<'_> {
    /// The quickest plan found for which a framework's allocator reserves no more than the budget.
    ///
    /// After [`Search::lowered`] come variants of the planner.
    pub(super) fn reserve(&mut self) -> Result<Option<Planned>, PlanError> {
        if self.rival.is_some() {
            return self.lowered(FEW, 0);
        }
        let mut fits = self.lowered(SHRINKS, HALVINGS)?;
        self.varied(&mut fits)?;
        Ok(fits)
    }

    /// Tries variants of the planner at every target, as long as one of them promises to be
    /// quicker.
    fn varied(&mut self, fits: &mut Option<Planned>) -> Result<(), PlanError> {
        let mut variants: Vec<(Method, Memory)> =
            self.request.method.variants().into_iter().map(|m| (m, Memory::Nothing)).collect();
        for part in 0..VARIED {
            let target = (self.budget - self.budget / 48 * part) / 512 * 512;
            let promising = self.try_all(target, &mut variants, fits)?.is_some();
            if !promising || target <= self.liveness.floor.0 {
                break;
            }
        }
        Ok(())
    }

    /// A plan for which a framework's allocator reserves no more than the budget.
    ///
    /// What is reserved beyond the target is fragmentation, which differs from plan to plan without
    /// rule. So the target goes down by a part of what is too much until a plan fits, and up again
    /// by halves.
    fn lowered(&mut self, shrinks: usize, halvings: usize) -> Result<Option<Planned>, PlanError> {
        let method = self.request.method.clone();
        let mut own: Vec<(Method, Memory)> = [method.narrow(), Some(method)]
            .into_iter()
            .flatten()
            .rev()
            .map(|m| (m, Memory::Nothing))
            .collect();
        let (mut fits, mut above, mut target) = (None, self.budget, self.budget);
        for _ in 0..shrinks {
            let over = self.try_all(target, &mut own, &mut fits)?;
            if fits.is_some() || over.is_none() || target <= self.liveness.floor.0 {
                break;
            }
            above = target;
            let step = (over.unwrap_or(0) / 4).max(self.budget / 128);
            target = target.saturating_sub(step) / 512 * 512;
        }
        for _ in 0..if fits.is_some() { halvings } else { 0 } {
            let middle = (target + (above - target) / 2) / 512 * 512;
            let before = fits.as_ref().map(|f| f.run.iteration);
            self.try_all(middle, &mut own, &mut fits)?;
            if fits.as_ref().map(|f| f.run.iteration) < before {
                target = middle;
            } else {
                above = middle;
            }
        }
        Ok(fits)
    }

    /// The quickest of a plan for the budget as it is, of those that [`Search::mended`] finds, and
    /// of the plans at targets closely below the budget, as long as there are any that promise to
    /// be quicker. A large graph without a plan so far is planned as by [`Search::reserve`], and
    /// then by [`Search::only_large`].
    fn nearby(&mut self, mend: bool) -> Result<Option<Planned>, PlanError> {
        let mut fits = self.lowered(1, 0)?;
        if mend {
            self.mended(&mut fits)?;
        }
        if matches!(&self.request.method, Method::Neap(options) if options.thorough) {
            return Ok(fits);
        }
        let operators = self.request.graph.framework().operators.len().max(1);
        if operators > FINE && fits.is_some() {
            return Ok(fits);
        }
        let mut fits = self.lowered(SHRINKS, HALVINGS)?.or(fits);
        if operators > FINE {
            self.varied(&mut fits)?;
            self.only_large(&mut fits)?;
            return Ok(fits);
        }
        let method = &self.request.method;
        let others = method.variants().into_iter().chain(method.narrow()).chain(only_large(method));
        let mut methods: Vec<(Method, Memory)> =
            std::iter::once(method.clone()).chain(others).map(|m| (m, Memory::Nothing)).collect();
        let targets = (OPERATORS / operators / methods.len()).clamp(1, TARGETS) as u64;
        let mut missed = 0;
        for part in 0..targets {
            let target = (self.budget - self.budget / STEP * part) / 512 * 512;
            let promising = self.try_all(target, &mut methods, &mut fits)?.is_some();
            missed = if promising { 0 } else { missed + 1 };
            if missed > 1 || target <= self.liveness.floor.0 {
                break;
            }
        }
        Ok(fits)
    }

    /// Tries planners that swap only what is large, each at targets closely below the budget as
    /// long as it promises to be quicker.
    fn only_large(&mut self, fits: &mut Option<Planned>) -> Result<(), PlanError> {
        for method in only_large(&self.request.method) {
            let own = &mut [(method, Memory::Nothing)];
            let mut missed = 0;
            for part in 0..COARSE {
                let target = (self.budget - self.budget / COARSE_STEP * part) / 512 * 512;
                let promising = self.try_all(target, own, fits)?.is_some();
                missed = if promising { 0 } else { missed + 1 };
                if missed > 1 || target <= self.liveness.floor.0 {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Tries planners at a target; the least that was too much, if anything was.
    fn try_all(
        &mut self,
        target: u64,
        methods: &mut [(Method, Memory)],
        fits: &mut Option<Planned>,
    ) -> Result<Option<u64>, PlanError> {
        let mut over: Option<u64> = None;
        for (method, memory) in methods {
            std::mem::swap(self.memory, memory);
            let attempt = self.attempt(target, method)?;
            std::mem::swap(self.memory, memory);
            match attempt {
                Attempt::Fits(planned) => {
                    self.quicker(fits, *planned);
                    over = over.or(Some(0));
                }
                Attempt::TooHigh(bound) => {
                    let by = bound - self.budget;
                    over = Some(over.map_or(by, |o| if o == 0 { by } else { o.min(by) }));
                }
                Attempt::Blocked => {}
            }
        }
        Ok(over)
    }

    /// An allocator reserves too much for tensors that fit into fewer bytes.
    pub(super) fn reserves(&mut self, fits: Bytes, bound: Bytes) {
        self.lowest = self.lowest.min(bound.0);
        if self.blocked.is_empty() {
            self.blocked =
                format!("tensors fit in {fits}, but the allocator reserves {bound} for them");
        }
    }

    /// Keeps the quicker one; from now on only what is quicker still is of use.
    pub(super) fn quicker(&mut self, best: &mut Option<Planned>, planned: Planned) {
        if best.as_ref().is_none_or(|b| planned.run.iteration < b.run.iteration) {
            self.rival = Some(planned.run.iteration);
            *best = Some(planned);
        }
    }
}
