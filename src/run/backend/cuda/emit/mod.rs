//! Turns an operator's call into CUDA actions, one file for each family of operators, as on the
//! host.
//!
//! The call is checked here, before anything runs, as the host's kernels check it. Views hold
//! device addresses, which this code never reads through.

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
pub(super) mod reduce;
mod rows;
mod scaler;
mod shape;

pub use map::blocks;
pub use matrix::layout;

use super::launch::Actions;
use crate::backend::operators::error::unsupported;
use crate::backend::operators::view::Call;
use crate::backend::operators::{self, Family, KernelError, Listed, Table};
use crate::job::Dtype;

/// Adds an operator's actions. An error is one sentence about what can't be done.
pub type Emit = fn(&Call<'_>, &mut Actions) -> Result<(), KernelError>;

/// Whether a library has several algorithms, with workspaces, for operators of this kind.
#[must_use]
pub fn has_algorithms(kind: &str) -> bool {
    operators::find(&FAMILIES[..1], kind).is_some()
}

const REAL: &str = "f32, bf16, f16";
/// f64 is computed in f32, as on the host.
const ALL: &str = "f32, bf16, f16, f64, i64, i32, u8, bool";

const fn family(table: Table<Emit>, types: &'static str) -> Family<Emit> {
    Family { table, in_place: false, types }
}

/// All families of operators; the first one is the convolutions.
const FAMILIES: &[Family<Emit>] = &[
    family(conv::TABLE, REAL),
    family(matrix::TABLE, REAL),
    family(norm::TABLE, REAL),
    family(pool::TABLE, REAL),
    family(pointwise::MORE, REAL),
    Family { table: pointwise::TABLE, in_place: true, types: ALL },
    family(reduce::TABLE, ALL),
    family(shape::TABLE, ALL),
    family(loss::TABLE, REAL),
    family(attention::TABLE, REAL),
    family(index::TABLE, ALL),
    family(scaler::TABLE, REAL),
];

/// The function that makes the actions of an operator kind such as `aten::conv2d`; `None` if CUDA
/// does not support it.
#[must_use]
pub fn find(kind: &str) -> Option<Emit> {
    operators::find(FAMILIES, kind).or_else(|| optimizer::find(kind))
}

/// Refuses f64 where a kind's kernels or libraries do not take it.
///
/// # Errors
/// For such a call.
pub fn takes(call: &Call<'_>) -> Result<(), KernelError> {
    let kind = &call.operator.kind;
    let all = |family: &&Family<Emit>| family.types == ALL;
    let wide = FAMILIES
        .iter()
        .filter(all)
        .any(|f| operators::find(std::slice::from_ref(f), kind).is_some());
    match call.views().find(|view| view.dtype == Dtype::F64) {
        Some(_) if !wide => Err(unsupported!("CUDA has no `{kind}` of f64")),
        _ => Ok(()),
    }
}

/// All operators, with the element types that each supports.
#[must_use]
pub fn list() -> Vec<Listed> {
    let optimizers = optimizer::kinds().map(|kind| Listed { kind: kind.to_owned(), types: REAL });
    operators::list(FAMILIES).into_iter().chain(optimizers).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_operator_is_the_hosts_too() {
        let all = super::list();
        assert!(all.len() > 200, "{}", all.len());
        for listed in all {
            assert!(crate::backend::host::kernels::find(&listed.kind).is_some(), "{listed:?}");
        }
    }

    /// Turns all operators of a recorded job into actions. Returns how many there are, how many
    /// products and convolutions use a library, and how many don't.
    fn actions_of(trace: &std::path::Path) -> (usize, usize, usize) {
        use super::super::launch::Action;
        use super::super::prepare::emitted;
        use crate::backend::Work;
        use crate::backend::host::calls::operands;
        use crate::device::{builtin, latency};
        use crate::units::Bytes;
        use crate::{executor, support};
        let graph = crate::job::chakra::import(trace, &Default::default()).unwrap().graph;
        let device = builtin::find("a100-80g").unwrap();
        let latencies = latency::latencies(&graph, &device, None);
        let request = crate::plan::budget::Request::new(&graph, &device, &latencies, Bytes::ZERO);
        let plan = crate::plan::budget::unplanned(&request).unwrap().plan;
        let program = crate::sim::program::Program::placed(&graph, &plan.jobs[0]).unwrap();
        let script = executor::script(
            &graph,
            &plan.jobs[0],
            &program,
            plan.budget,
            &support::random_keys(&graph),
        )
        .unwrap();
        let bytes = |(dtype, shape): (crate::job::Dtype, Vec<u64>)| {
            vec![0; (shape.iter().product::<u64>() * dtype.size()) as usize]
        };
        let batch: Vec<Vec<u8>> = support::batch(&graph).unwrap().into_iter().map(bytes).collect();
        let (mut all, mut library, mut plain) = (0, 0, 0);
        for item in &script.items {
            let Work::Step(work) = &item.work else { continue };
            // Addresses through which nothing is read.
            let at = |offset: Bytes, _: Bytes| {
                Some(std::ptr::without_provenance_mut((1 << 40) + offset.0 as usize))
            };
            let name = || format!("{} of {}", graph.operator(work.operator).kind, trace.display());
            let seen = operands(&graph, work, &at).unwrap_or_else(|e| panic!("{}: {e}", name()));
            let list = emitted(&graph, work, &seen, &batch, std::ptr::null_mut(), true)
                .unwrap_or_else(|e| panic!("{}: {e}", name()));
            all += list.len();
            library +=
                list.iter().filter(|a| matches!(a, Action::Gemm(_) | Action::Conv(_))).count();
            plain += list
                .iter()
                .filter(|a| matches!(a, Action::Launch(l) if l.kernel == "matrix_product"))
                .count();
        }
        (all, library, plain)
    }

    #[test]
    fn recorded_jobs_have_actions_for_every_operator() {
        let here = &std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let (all, library, plain) = actions_of(&here.join("fixtures/resnet18-adam.et.json.gz"));
        assert!(
            all > 200 && library >= 60 && plain == 0,
            "{all} actions, {library} for libraries, {plain} plain products"
        );
        let truth = std::env::var_os("NEAP_TRUTH")
            .map_or_else(|| here.join("../shared/truth"), Into::into)
            .join("graphs");
        for job in [
            "resnet50-adam-16-224-start",
            "vgg16-adam-16-224-start",
            "inception_v3-adam-16-299-start",
            "gpt2-adamw-4-512-start",
        ] {
            let trace = truth.join(format!("{job}.et.json.gz"));
            if !trace.exists() {
                println!("skipped: no {}", trace.display());
                continue;
            }
            let (all, library, plain) = actions_of(&trace);
            println!(
                "{job}: {all} actions, {library} for libraries, {plain} products by the plain kernel"
            );
            assert!(library > 20 && plain == 0, "{job}");
        }
    }
}
