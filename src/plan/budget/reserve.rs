//! Plans for which a framework's allocator reserves no more than the budget.

use super::{Attempt, FEW, PlanError, Planned, Search};
use crate::method::Method;
use crate::planner::Memory;

/// How often the target is lowered until an allocator reserves little enough, and how often it is
/// raised by halves after that.
const SHRINKS: usize = 24;
const HALVINGS: usize = 3;

/// At how many targets variants of the planner are tried for an allocator.
const VARIED: u64 = 20;

impl Search<'_> {
    /// The quickest plan found for which a framework's allocator reserves no more than the budget.
    ///
    /// What is reserved beyond the target is fragmentation, which differs from plan to plan without
    /// rule. So the target goes down by a part of what is too much until a plan fits, and up again
    /// by halves; then variants of the planner are tried at every target, as long as one of them
    /// promises to be quicker.
    pub(super) fn reserve(&mut self) -> Result<Option<Planned>, PlanError> {
        let stands_in = self.rival.is_some();
        let method = self.request.method.clone();
        let mut own: Vec<(Method, Memory)> = [method.narrow(), Some(method)]
            .into_iter()
            .flatten()
            .rev()
            .map(|m| (m, None))
            .collect();
        let (mut fits, mut above, mut target) = (None, self.budget, self.budget);
        for _ in 0..if stands_in { FEW } else { SHRINKS } {
            let over = self.try_all(target, &mut own, &mut fits)?;
            if fits.is_some() || over.is_none() || target <= self.liveness.floor.0 {
                break;
            }
            above = target;
            let step = (over.unwrap_or(0) / 4).max(self.budget / 128);
            target = target.saturating_sub(step) / 512 * 512;
        }
        if stands_in {
            return Ok(fits);
        }
        for _ in 0..if fits.is_some() { HALVINGS } else { 0 } {
            let middle = (target + (above - target) / 2) / 512 * 512;
            let before = fits.as_ref().map(|f| f.run.iteration);
            self.try_all(middle, &mut own, &mut fits)?;
            if fits.as_ref().map(|f| f.run.iteration) < before {
                target = middle;
            } else {
                above = middle;
            }
        }
        let mut variants: Vec<(Method, Memory)> =
            self.request.method.variants().into_iter().map(|m| (m, None)).collect();
        for part in 0..VARIED {
            let target = (self.budget - self.budget / 48 * part) / 512 * 512;
            let promising = self.try_all(target, &mut variants, &mut fits)?.is_some();
            if !promising || target <= self.liveness.floor.0 {
                break;
            }
        }
        Ok(fits)
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

    /// Keeps the quicker one; from now on only what is quicker still is of use.
    fn quicker(&mut self, best: &mut Option<Planned>, planned: Planned) {
        if best.as_ref().is_none_or(|b| planned.run.iteration < b.run.iteration) {
            self.rival = Some(planned.run.iteration);
            *best = Some(planned);
        }
    }
}
