//! The operators of the host device, one file per family.
//!
//! [`find`] names the function for an operator's kind. Every kernel is deterministic: the same views and
//! the same [`Call`] give the same bits, whatever the addresses. Kernels take no memory of their own
//! beyond fixed-size tiles (see [`super::view::TILE_BYTES`]). Not for: graphs, plans, threads.

mod activation;
mod arguments;
mod attention;
mod dropout;
mod elements;
mod embedding;
mod layer_norm;
mod loss;
mod math;
mod pointwise;
#[cfg(test)]
mod pytorch;
mod random;
mod reduce;
mod shape;
mod softmax;
#[cfg(test)]
mod tests;

use super::view::Call;

/// A kernel. An error is one sentence saying what about the call it can't do.
pub type Kernel = fn(&Call<'_>) -> Result<(), String>;

/// The kernel for an operator kind such as `aten::conv2d`, if there is one.
#[must_use]
pub fn find(kind: &str) -> Option<Kernel> {
    let families = [
        pointwise::find,
        activation::find,
        reduce::find,
        shape::find,
        softmax::find,
        loss::find,
        layer_norm::find,
        attention::find,
        embedding::find,
        dropout::find,
    ];
    families.iter().find_map(|find| find(kind))
}
