//! The part of operators that all backends share: a call's views and arguments, and their checks.
//!
//! A call is checked here once. The backends ([`super::host::kernels`] and `cuda::emit`) execute
//! what the checks return.

pub mod arguments;
pub mod attention;
pub mod conv;
pub(in crate::backend) mod error;
pub mod foreach;
pub mod index;
pub mod loss;
pub mod matrix;
pub mod moves;
pub mod norm;
pub mod optimizer;
pub mod pool;
pub mod random;
pub mod reduce;
pub mod scaler;
pub mod shapes;
pub mod view;

pub use error::KernelError;

/// The operators of a family: their kinds without `aten::`, and the function that executes them.
pub type Table<K> = &'static [(&'static [&'static str], K)];

/// A [`Table`] with a row for each operator: `"kind" | "other kind" => function,`.
macro_rules! table {
    ($($($kind:literal)|+ => $run:expr,)*) => { &[$((&[$($kind),+], $run)),*] };
}

pub(in crate::backend) use table;

/// A family of operators.
pub struct Family<K: 'static> {
    /// Its operators.
    pub table: Table<K>,
    /// Whether each operator also has an in-place form, whose name ends in `_`.
    pub in_place: bool,
    /// The element types that it supports.
    pub types: &'static str,
}

/// An operator that a backend supports.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
pub struct Listed {
    /// The kind, such as `aten::conv2d`.
    pub kind: String,
    /// The element types that it supports.
    pub types: &'static str,
}

/// The function that executes operators of `kind`, such as `aten::conv2d`.
pub fn find<K: Copy>(families: &[Family<K>], kind: &str) -> Option<K> {
    let name = kind.strip_prefix("aten::")?;
    let has = |family: &Family<K>, name: &str| {
        family.table.iter().find(|(kinds, _)| kinds.contains(&name)).map(|(_, run)| *run)
    };
    let of = |family: &Family<K>| {
        let base = name.strip_suffix('_').filter(|_| family.in_place);
        has(family, name).or_else(|| has(family, base?))
    };
    families.iter().find_map(of)
}

/// What an operator in place keeps of its input for backward: a result that the recording has
/// beside the declared ones, of the shape and type of argument 0; and argument 0.
pub fn kept_input<'a>(call: &view::Call<'a>) -> Option<(&'a view::View, &'a view::View)> {
    let (Some(view::Operand::Tensor(input)), [kept]) = (call.args.first(), call.hidden) else {
        return None;
    };
    let in_place = call.operator.kind.ends_with('_') && !call.operator.kind.contains("_foreach_");
    let apart = call.reads().chain(call.outputs.iter().flatten()).all(|v| v.data != kept.data);
    let like = kept.shape == input.shape && kept.dtype == input.dtype;
    (in_place && apart && like && !kept.data.is_null()).then_some((kept, input))
}

/// All operators of `families`, sorted. In-place forms are listed only if they have rows of their
/// own.
#[must_use]
pub fn list<K>(families: &[Family<K>]) -> Vec<Listed> {
    let mut all: Vec<Listed> = families
        .iter()
        .flat_map(|family| {
            let kinds = family.table.iter().flat_map(|(kinds, _)| kinds.iter());
            kinds.map(|kind| Listed { kind: format!("aten::{kind}"), types: family.types })
        })
        .collect();
    all.sort();
    all
}
