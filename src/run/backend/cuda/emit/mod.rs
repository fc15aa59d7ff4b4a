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

/// Whether a library has several algorithms for operators of this kind, which take scratch.
#[must_use]
pub fn has_algorithms(kind: &str) -> bool {
    conv::find(kind).is_some()
}

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
        let source = |name: &str| {
            std::fs::read_to_string(format!(
                "{}/../../src/run/backend/host/kernels/{name}.rs",
                env!("CARGO_MANIFEST_DIR")
            ))
            .unwrap()
        };
        let mut kinds = 0;
        for entry in std::fs::read_dir(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../src/run/backend/host/kernels"
        ))
        .unwrap()
        {
            let name = entry.unwrap().file_name().into_string().unwrap();
            // Every quoted word that the host knows as a kind, CUDA knows as well.
            for word in source(name.strip_suffix(".rs").unwrap()).split('"').skip(1).step_by(2) {
                for kind in [word.to_owned(), format!("aten::{word}"), format!("aten::{word}_")] {
                    if crate::backend::host::kernels::find(&kind).is_some() {
                        kinds += 1;
                        assert!(super::find(&kind).is_some(), "{kind}");
                    }
                }
            }
        }
        assert!(kinds > 200, "{kinds}");
    }

    /// All operators of a recorded job as actions: how many, and of the products and convolutions how many go to a library.
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
        let request = crate::plan::budget::Request {
            graph: &graph,
            file: (String::new(), String::new()),
            device: &device,
            latencies: &latencies,
            budget: Bytes::ZERO,
            method: Default::default(),
            recorded_options: Default::default(),
        };
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
            // Addresses that nothing is read through.
            let at = |offset: Bytes, _: Bytes| {
                Some(std::ptr::without_provenance_mut((1 << 40) + offset.0 as usize))
            };
            let name = || format!("{} of {}", graph.operator(work.operator).kind, trace.display());
            let seen = operands(&graph, work, &at).unwrap_or_else(|e| panic!("{}: {e}", name()));
            let list = emitted(&graph, work, &seen, &batch, std::ptr::null_mut())
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
