//! From an operator's call to the CUDA actions that carry it out, one file per family, as on the host.
//!
//! What a call must be is checked here as the host's kernels check it, before anything runs; views hold device
//! addresses, which nothing here reads. Not for: running.

mod args;
mod attention;
mod conv;
mod index;
mod loss;
mod map;
mod matrix;
mod norm;
pub mod optimizer;
mod pointwise;
mod pool;
mod reduce;
mod rows;
mod shape;

pub use matrix::layout;

use super::super::host::view::Call;
use super::launch::Actions;

/// Adds an operator's actions. An error is one sentence saying what about the call can't be done.
pub type Emit = fn(&Call<'_>, &mut Actions) -> Result<(), String>;

/// What makes the actions of an operator kind such as `aten::conv2d`, if CUDA has it.
#[must_use]
pub fn find(kind: &str) -> Option<Emit> {
    let families = [
        conv::find,
        matrix::find,
        norm::find,
        pool::find,
        optimizer::find,
        pointwise::find,
        reduce::find,
        shape::find,
        loss::find,
        attention::find,
        index::find,
    ];
    families.iter().find_map(|family| family(kind))
}

#[cfg(test)]
mod tests {
    #[test]
    fn as_many_kinds_as_the_host() {
        let source =
            |name: &str| std::fs::read_to_string(format!("{}/src/run/device/host/kernels/{name}.rs", env!("CARGO_MANIFEST_DIR"))).unwrap();
        let mut kinds = 0;
        for entry in std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/src/run/device/host/kernels")).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            // Every quoted word that the host knows as a kind, CUDA knows as well.
            for word in source(name.strip_suffix(".rs").unwrap()).split('"').skip(1).step_by(2) {
                for kind in [word.to_owned(), format!("aten::{word}"), format!("aten::{word}_")] {
                    if crate::run::device::host::kernels::find(&kind).is_some() {
                        kinds += 1;
                        assert!(super::find(&kind).is_some(), "{kind}");
                    }
                }
            }
        }
        assert!(kinds > 200, "{kinds}");
    }
}
