//! The operators of the host device, one file per family.
//!
//! [`find`] names the function for an operator's kind. Every kernel is deterministic: the same views and
//! the same [`Call`] give the same bits, whatever the addresses. Kernels take no memory of their own
//! beyond fixed-size tiles (see [`super::view::TILE_BYTES`]). Not for: graphs, plans, threads.

mod activation;
pub(in crate::backend) mod arguments;
mod attention;
mod conv;
mod dropout;
pub(in crate::backend) mod elements;
mod embedding;
mod foreach;
mod gemm;
mod layer_norm;
mod loss;
mod math;
pub(in crate::backend) mod norm;
pub(in crate::backend) mod optimizer;
mod pointwise;
mod pool;
pub(in crate::backend) mod random;
pub(in crate::backend) mod reduce;
mod shape;
mod softmax;
pub(in crate::backend) mod strided;
mod unfold;

#[cfg(test)]
pub(in crate::backend) mod against_pytorch;
#[cfg(test)]
pub(in crate::backend) mod pytorch;
#[cfg(test)]
mod tests;

use super::view::Call;

/// A kernel. An error is one sentence saying what about the call it can't do.
pub type Kernel = fn(&Call<'_>) -> Result<(), String>;

/// The kernel for an operator kind such as `aten::conv2d`, if there is one.
#[must_use]
pub fn find(kind: &str) -> Option<Kernel> {
    let families = [
        conv::find,
        gemm::find,
        norm::find,
        pool::find,
        optimizer::find,
        foreach::find,
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
    families.iter().find_map(|family| family(kind))
}
