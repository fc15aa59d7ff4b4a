//! The operators of the host device, one file per family.
//!
//! [`find`] names the function for an operator's kind. Every kernel is deterministic: the same
//! views and the same [`Call`] give the same bits, whatever the addresses. Kernels take no memory
//! of their own beyond fixed-size tiles (see [`crate::backend::operators::view::TILE_BYTES`]). Not
//! for: graphs, plans, threads.

mod activation;
mod attention;
mod bag;
mod conv;
mod conv_rank;
mod conv_volume;
mod distance;
mod dropout;
mod edge;
pub(in crate::backend) mod elements;
mod embedding;
mod foreach;
mod gemm;
mod group_norm;
pub(in crate::backend) mod half;
mod layer_norm;
mod loss;
mod math;
pub(in crate::backend) mod norm;
pub(in crate::backend) mod optimizer;
mod order;
mod pairs;
mod patches;
mod pointwise;
mod pool;
mod product;
mod recurrent;
pub(in crate::backend) mod reduce;
mod reparametrized;
mod resize;
mod sample;
mod scaler;
mod scatter;
mod shape;
mod softmax;
pub(in crate::backend) mod strided;
mod unfold;
mod volume;

#[cfg(test)]
pub(in crate::backend) mod against_pytorch;
#[cfg(test)]
pub(in crate::backend) mod pytorch;
#[cfg(test)]
mod tests;

use crate::backend::operators::view::Call;
use crate::backend::operators::{self, Family, KernelError, Listed, Table};

/// A kernel. An error is one sentence saying what about the call it can't do.
pub type Kernel = fn(&Call<'_>) -> Result<(), KernelError>;

/// Types of operators that compute in f32 alone; the others are converted.
const REAL: &str = "f32, bf16, f16, f64";

/// Types of operators that take whole numbers and flags too.
const ALL: &str = "f32, bf16, f16, f64, i64, i32, u8, bool";

const fn family(table: Table<Kernel>, types: &'static str) -> Family<Kernel> {
    Family { table, in_place: false, types }
}

/// All families of operators.
const FAMILIES: &[Family<Kernel>] = &[
    family(conv_rank::TABLE, REAL),
    family(gemm::TABLE, REAL),
    family(norm::TABLE, REAL),
    family(group_norm::TABLE, REAL),
    family(layer_norm::TABLE, REAL),
    family(pool::TABLE, REAL),
    family(resize::TABLE, REAL),
    family(volume::TABLE, REAL),
    family(edge::TABLE, REAL),
    family(order::TABLE, ALL),
    family(product::TABLE, REAL),
    family(pairs::TABLE, REAL),
    family(patches::TABLE, REAL),
    family(reparametrized::TABLE, REAL),
    family(bag::TABLE, REAL),
    family(sample::TABLE, REAL),
    family(foreach::TABLE, REAL),
    family(scaler::TABLE, REAL),
    Family { table: pointwise::TABLE, in_place: true, types: ALL },
    Family { table: activation::TABLE, in_place: true, types: REAL },
    family(reduce::TABLE, ALL),
    family(shape::TABLE, ALL),
    family(softmax::TABLE, REAL),
    family(loss::TABLE, REAL),
    family(distance::TABLE, REAL),
    family(attention::TABLE, REAL),
    family(embedding::TABLE, ALL),
    family(scatter::TABLE, ALL),
    family(recurrent::TABLE, REAL),
    family(dropout::TABLE, REAL),
];

/// The kernel for an operator kind such as `aten::conv2d`, if there is one.
#[must_use]
pub fn find(kind: &str) -> Option<Kernel> {
    operators::find(FAMILIES, kind).or_else(|| optimizer::find(kind))
}

/// All operators, with the types that they work in.
#[must_use]
pub fn list() -> Vec<Listed> {
    let optimizers = operators::optimizer::kinds();
    let optimizers = optimizers.map(|kind| Listed { kind: kind.to_owned(), types: REAL });
    operators::list(FAMILIES).into_iter().chain(optimizers).collect()
}
