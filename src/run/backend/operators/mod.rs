//! Operators as every backend sees them: a call's views and arguments, and what must hold of them.
//!
//! A call is checked here once. The backends ([`super::host::kernels`] and `cuda::emit`) carry out
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
pub mod shapes;
pub mod view;

pub use error::KernelError;

/// Operators of one family: their kinds without `aten::`, and what carries them out.
pub type Table<K> = &'static [(&'static [&'static str], K)];

/// A [`Table`], a row an operator: `"kind" | "other kind" => function,`.
macro_rules! table {
    ($($($kind:literal)|+ => $run:expr,)*) => { &[$((&[$($kind),+], $run)),*] };
}

pub(in crate::backend) use table;

/// A family of operators.
pub struct Family<K: 'static> {
    /// Its operators.
    pub table: Table<K>,
    /// Each operator has a form in place too, whose name ends in `_`.
    pub in_place: bool,
    /// The types that it works in.
    pub types: &'static str,
}

/// An operator that a backend has.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
pub struct Listed {
    /// Such as `aten::conv2d`.
    pub kind: String,
    /// The element types that it works in.
    pub types: &'static str,
}

/// What carries out operators of `kind`, such as `aten::conv2d`.
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

/// All operators of `families`, sorted; forms in place are listed where they have rows of their
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
