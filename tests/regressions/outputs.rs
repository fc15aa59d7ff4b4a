//! Outputs that replaced inputs, and answers that were lost with an output.

use crate::cli::folder::{Folder, fixture, number};

#[test]
fn a_save_never_replaces_the_weights() {
    let folder = Folder::new();
    folder.import("tiny_cnn-adam.et.json.gz", &[]);
    std::fs::copy(fixture("tiny_cnn-adam.safetensors"), folder.path("w.safetensors")).unwrap();
    let before = std::fs::read(folder.path("w.safetensors")).unwrap();
    let run = ["run", "job.graph.json", "--on", "host", "--weights", "w.safetensors"];
    for output in ["--save", "--latencies-out"] {
        let arguments = [&run[..], &[output, "w.safetensors"]].concat();
        folder.refuses(2, &["w.safetensors", "read by this command"], &arguments);
    }
    assert_eq!(std::fs::read(folder.path("w.safetensors")).unwrap(), before);
}

#[test]
fn a_table_never_replaces_what_the_jobs_name() {
    let folder = Folder::new();
    std::fs::copy(fixture("mlp.graph.json"), folder.path("mlp.graph.json")).unwrap();
    folder.write("jobs.csv", "job,graph,submit_s,iterations\na,mlp.graph.json,0,3\n");
    let share = ["share", "jobs.csv", "--device", "a6000", "--csv"];
    let arguments = [&share[..], &["mlp.graph.json"]].concat();
    folder.refuses(2, &["mlp.graph.json", "read by this command"], &arguments);
    folder.json(&[&share[..], &["out.csv"]].concat());
    folder.write("come.csv", "graph,submit_s,iterations\nmlp.graph.json,0,1\n");
    let simulate = ["simulate", "--arrivals", "come.csv", "--device", "a6000", "--plot"];
    let arguments = [&simulate[..], &["mlp.graph.json"]].concat();
    folder.refuses(2, &["mlp.graph.json", "read by this command"], &arguments);
}

#[test]
fn a_curve_never_replaces_the_truth() {
    let folder = Folder::new();
    let name = "tiny_cnn-adam-8-32-start";
    for end in ["profile.json.gz", "truth.json"] {
        let from = fixture(&format!("traces/{name}.{end}"));
        std::fs::copy(from, folder.path(&format!("{name}.{end}"))).unwrap();
    }
    let (trace, truth) = (format!("{name}.profile.json.gz"), format!("{name}.truth.json"));
    // Found in a folder, so that no flag names it.
    let arguments = ["estimate", &trace, "--against", ".", "--curve", &truth];
    folder.refuses(2, &[&truth, "read by this command"], &arguments);
}

#[test]
fn a_plan_never_replaces_its_graph() {
    let folder = Folder::new();
    folder.import("tiny_cnn-adam.et.json.gz", &[]);
    folder.json(&["plan", "job.graph.json", "--budget", "80%", "-o", "job.plan.json"]);
    for command in [
        &["simulate", "job.plan.json", "--plot", "job.graph.json"][..],
        &["run", "job.plan.json", "--on", "host", "--save", "job.graph.json"],
    ] {
        folder.refuses(2, &["job.graph.json", "read by this command"], command);
    }
}

/// A folder that lets nothing be written, while outputs are checked when the run begins.
#[test]
#[cfg(target_os = "linux")]
fn an_output_that_fails_loses_neither_the_answer_nor_the_others() {
    let folder = Folder::new();
    folder.import("tiny_cnn-adam.et.json.gz", &[]);
    // Writing to it fails with ENOSPC, and nothing can know before.
    let answer = folder.neap(&[
        "--json",
        "simulate",
        "job.graph.json",
        "--plot",
        "/dev/full",
        "--timeline",
        "timeline.json",
    ]);
    assert_eq!(answer.code, Some(2), "{answer:?}");
    let object: serde_json::Value = serde_json::from_str(&answer.stdout).unwrap();
    assert!(number(&object, "peak_bytes") > 0);
    assert!(answer.stderr.contains("/dev/full"), "{}", answer.stderr);
    assert!(folder.path("timeline.json").exists());
}
