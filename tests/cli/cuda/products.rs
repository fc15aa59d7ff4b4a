//! Products whose sums cuBLASLt cuts in parts: the same algorithm, parts and bits in every run of a job.

use serde_json::Value;

use super::{faked, with};
use crate::cli::folder::Folder;

fn run(folder: &Folder, job: &str, environment: &[(&str, &str)], more: &[&str]) -> Value {
    let flags = ["--json", "run", job, "--on", "cuda", "--cuda-libs", ".", "--iterations", "6"];
    let answer = with(folder, environment, &[&flags[..], more].concat());
    assert_eq!(answer.code, Some(0), "{answer:?}");
    serde_json::from_str(&answer.stdout).unwrap()
}

#[test]
fn sums_in_parts_give_the_same_bits_in_every_run() {
    let Some(folder) = faked() else { return };
    folder.import("tiny_gpt2-adamw.et.json.gz", &[]);
    for (budget, plan) in [("min", "min.plan.json"), ("75%", "75.plan.json")] {
        folder.json(&["plan", "job.graph.json", "--budget", budget, "-o", plan]);
    }
    let unplanned = run(&folder, "job.graph.json", &[], &[]);
    let products = unplanned["products"].as_array().unwrap();
    let cut = |product: &&Value| product["parts"] == 3 && product["reduction"] == 2;
    let cut = products.iter().filter(cut).count();
    assert!(cut > 2 && cut < products.len(), "{products:?}");
    // Predicted times are far from what the test driver takes: with --replan, a run changes its plan.
    let runs = [("min.plan.json", &[][..]), ("75.plan.json", &[]), ("75.plan.json", &["--replan"])];
    for (plan, more) in runs {
        let planned = run(&folder, plan, &[], more);
        for key in ["losses", "checksum", "products", "fallbacks"] {
            assert_eq!(planned[key], unplanned[key], "{plan} {more:?}: {key}");
        }
        if !more.is_empty() {
            let changes = planned["changes"].as_array().unwrap();
            assert!(!changes.is_empty(), "{planned}");
        }
    }
    // In one part each sum has other bits: so the parts were really made.
    let whole = run(&folder, "job.graph.json", &[("FAKE_WHOLE", "1")], &[]);
    assert!(whole["products"].as_array().unwrap().iter().all(|p| p["parts"] == 1), "{whole}");
    assert_ne!(whole["checksum"], unplanned["checksum"]);
}

#[test]
fn parts_that_are_added_in_any_order_are_refused() {
    let Some(folder) = faked() else { return };
    folder.import("tiny_gpt2-adamw.et.json.gz", &[]);
    let refused = run(&folder, "job.graph.json", &[("FAKE_IN_PLACE", "1")], &[]);
    assert!(refused["fallbacks"].as_u64() > Some(2), "{refused}");
    assert!(refused["products"].as_array().unwrap().iter().all(|p| p["parts"] == 1), "{refused}");
}
