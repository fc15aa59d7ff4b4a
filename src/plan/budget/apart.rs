//! Plans in which parameters and states come back only after large tensors.
//!
//! A tensor that nothing generates has one address, at which it ends an iteration and begins the
//! next. If it comes back while a large tensor is alive that was made while it was away, the large
//! one can't lie there, so the bytes that the tensor frees are of no use to it. The load does not
//! show that, only the placement.

use super::{Attempt, PlanError, Planned, Search};
use crate::method::Method;
use crate::neap;

impl Search<'_> {
    /// Where the plan for the whole budget can't be placed: one in which such tensors come back
    /// later, if that can be. From then on only what is quicker is of use.
    pub(super) fn apart(&mut self) -> Result<Option<Planned>, PlanError> {
        let Method::Neap(options) = &self.request.method else { return Ok(None) };
        if !options.prefetch || !options.apart {
            return Ok(None);
        }
        let method = Method::Neap(neap::Options { set_apart: true, ..options.clone() });
        let memory = self.memory.clone();
        let mut best = None;
        if let Attempt::Fits(planned) = self.attempt(self.budget, &method)? {
            self.quicker(&mut best, *planned);
        }
        *self.memory = memory;
        Ok(best)
    }
}
