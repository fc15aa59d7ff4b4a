//! Plans in which parameters and states leave before large tensors, and come back only after them.
//!
//! A tensor that nothing generates has one address, at which it ends an iteration and begins the
//! next. If it is still there when a large tensor is made, or comes back while one is alive that
//! was made while it was away, the large one can't lie there, so the bytes that the tensor frees
//! are of no use to it. The load does not show that, only the placement. The embedding of a
//! language model that is also its last layer is away between two uses while three tensors with
//! an element for each token and word are alive: one of them can lie where it was.

use super::{Attempt, PlanError, Planned, Search};
use crate::method::Method;
use crate::neap::{self, Apart};

/// How many targets are tried, each lower than the one before. Pythia-160m at half its peak on an
/// a6000 adds 18 % with four of them, and 22 % with one.
const TARGETS: usize = 4;

impl Search<'_> {
    /// Where the plan for the whole budget can't be placed: one in which such tensors leave sooner
    /// and come back later, if that can be. From then on only what is quicker is of use. `height`
    /// is that of the plan which can't be placed.
    pub(super) fn apart(&mut self, height: u64) -> Result<Option<Planned>, PlanError> {
        let Method::Neap(options) = &self.request.method else { return Ok(None) };
        if !options.prefetch || !options.apart {
            return Ok(None);
        }
        let memory = self.memory.clone();
        let mut best = None;
        for set_apart in [Apart::After, Apart::Around] {
            let method = Method::Neap(neap::Options { set_apart, ..options.clone() });
            let mut target = self.budget;
            for attempt in 0..TARGETS {
                let lower = match self.attempt(target, &method)? {
                    Attempt::Fits(planned) => {
                        self.quicker(&mut best, *planned);
                        None
                    }
                    // Nothing is kept apart.
                    Attempt::TooHigh(same) if attempt == 0 && same == height => None,
                    Attempt::TooHigh(height) => self.tighter(target, height, attempt),
                    Attempt::Blocked => None,
                };
                let Some(lower) = lower else { break };
                target = lower;
            }
            self.memory.clone_from(&memory);
        }
        Ok(best)
    }
}
