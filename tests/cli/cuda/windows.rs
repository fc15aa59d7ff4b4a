//! Jobs that pass a window on within their iterations, over the test driver that watches every
//! access.

use super::{json, watched};
use crate::cli::folder::number;

#[test]
fn a_window_is_passed_on_within_iterations_over_a_driver_that_is_none() {
    let Some(folder) = watched() else { return };
    folder.import("tiny_cnn-adam.et.json.gz", &[]);
    folder.json(&["plan", "job.graph.json", "--budget", "min", "-o", "one.plan.json"]);
    let plan = ["--budget", "min", "--overlap", "-o", "all.plan.json"];
    let plan = folder.json(&[&["plan"][..], &["job.graph.json"; 3], &plan].concat());
    assert!(number(&plan, "window_bytes") > 0);
    let arena = number(&plan, "arena_bytes").to_string();
    // On a busy machine the first job may be done before the others are ready.
    for iterations in ["2", "10", "50"] {
        let more = ["--on", "cuda", "--cuda-libs", ".", "--iterations", iterations];
        let alone = json(&folder, &[&["run", "one.plan.json"][..], &more].concat());
        let run = ["run", "all.plan.json", "--policy", "pack", "--memory", &arena];
        let report = json(&folder, &[&run[..], &more].concat());
        let all = report["jobs"].as_array().unwrap();
        for job in all {
            assert_eq!((&job["losses"], &job["checksum"]), (&alone["losses"], &alone["checksum"]));
        }
        if all.iter().any(|job| number(job, "window_waited_ns") > 0) {
            return;
        }
    }
    panic!("no job ever waited for the window");
}
