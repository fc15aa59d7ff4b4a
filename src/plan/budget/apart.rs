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

impl Search<'_> {
    /// Where the plan for the whole budget can't be placed: one in which such tensors leave sooner
    /// and come back later, if that can be. From then on only what is quicker is of use.
    pub(super) fn apart(&mut self) -> Result<Option<Planned>, PlanError> {
        let Method::Neap(options) = &self.request.method else { return Ok(None) };
        if !options.prefetch || !options.apart {
            return Ok(None);
        }
        let memory = self.memory.clone();
        let mut best = None;
        for set_apart in [Apart::After, Apart::Around] {
            let method = Method::Neap(neap::Options { set_apart, ..options.clone() });
            if let Attempt::Fits(planned) = self.attempt(self.budget, &method)? {
                self.quicker(&mut best, *planned);
            }
            self.memory.clone_from(&memory);
        }
        Ok(best)
    }
}
