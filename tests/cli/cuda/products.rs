//! Products whose sums cuBLASLt cuts in parts: the same algorithm, parts and bits in every run of a job.

use serde_json::Value;

use super::{faked, with};
use crate::cli::folder::{Folder, fixture};

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

/// A convolution of one element is a product in each of its passes, with PyTorch's losses, and the
/// same bits in every run of a table, whether library calls are replayed or not.
#[test]
fn convolutions_of_one_element_are_products() {
    let Some(folder) = faked() else { return };
    folder.import("idioms/conv_pointwise.et.json.gz", &[]);
    let weights = fixture("idioms/conv_pointwise.safetensors");
    let profile = ["profile", "job.graph.json", "--on", "cuda", "--cuda-libs", "."];
    let more = ["--device", "h200", "--repeats", "1", "-o", "t.csv"];
    let answer = with(&folder, &[], &[&profile[..], &more].concat());
    assert_eq!(answer.code, Some(0), "{answer:?}");
    let table = folder.text("t.csv");
    // Forward: 72 channels out, then 8. Back: to weights of both, to the input of the second.
    for passes in [",1000,0,", ",1,1000,", ",1000;1000,4608,", ",1000,1728,"] {
        assert!(table.contains(passes), "{passes}: {table}");
    }
    let with_table = ["--device", "h200", "--latencies", "t.csv"];
    let budget = ["--budget", "min", "-o", "min.plan.json"];
    folder.json(&[&["plan", "job.graph.json"], &with_table[..], &budget].concat());
    let unplanned =
        run(&folder, "job.graph.json", &[], &[&with_table[..], &["--weights", &weights]].concat());
    let record = std::fs::read_to_string(fixture("idioms/conv_pointwise.json")).unwrap();
    let record: Value = serde_json::from_str(&record).unwrap();
    let losses = |of: &Value| -> Vec<f64> {
        of["losses"].as_array().unwrap().iter().filter_map(Value::as_f64).collect()
    };
    let (ours, theirs) = (losses(&unplanned), losses(&record));
    assert_eq!(ours.len(), theirs.len());
    for (ours, theirs) in ours.iter().zip(&theirs) {
        assert!((ours - theirs).abs() <= 1e-4 * theirs, "{ours} {theirs}");
    }
    for environment in [&[][..], &[("FAKE_NO_GRAPHS", "1")]] {
        let planned = run(&folder, "min.plan.json", environment, &["--weights", &weights]);
        for key in ["losses", "checksum", "products", "fallbacks"] {
            assert_eq!(planned[key], unplanned[key], "{environment:?}: {key}");
        }
    }
}
