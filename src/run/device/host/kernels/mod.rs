//! The operators of the host device, one file per family.
//!
//! [`find`] names the function for an operator's kind. Every kernel is deterministic: the same views and
//! the same [`Call`] give the same bits, whatever the addresses. Kernels take no memory of their own
//! beyond fixed-size tiles (see [`super::view::TILE_BYTES`]). Not for: graphs, plans, threads.

pub mod conv;
pub mod foreach;
pub mod gemm;
pub mod norm;
pub mod optimizer;
pub mod pool;
pub mod strided;
pub mod unfold;

#[cfg(test)]
mod against_pytorch;

use super::view::Call;

/// A kernel. An error is one sentence saying what about the call it can't do.
pub type Kernel = fn(&Call<'_>) -> Result<(), String>;

/// The kernel for an operator kind such as `aten::conv2d`, if there is one.
#[must_use]
pub fn find(kind: &str) -> Option<Kernel> {
    [conv::find, gemm::find, norm::find, pool::find, optimizer::find, foreach::find].iter().find_map(|family| family(kind))
}
