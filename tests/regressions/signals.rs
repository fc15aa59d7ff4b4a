//! Signals during a run: the iteration ends, what was asked is written, and the answer is given.

use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use crate::cli::folder::{Folder, number};

fn start(folder: &Folder, arguments: &[&str]) -> Child {
    let child = Command::new(env!("CARGO_BIN_EXE_neap"))
        .args(arguments)
        .current_dir(folder.path("."))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // It has set its handlers long before a million iterations are over.
    std::thread::sleep(Duration::from_secs(3));
    child
}

fn kill(signal: &str, child: &Child) {
    let status = Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
    assert!(status.success());
}

fn stopped(folder: &Folder, signal: &str, arguments: &[&str]) -> Output {
    let child = start(folder, arguments);
    kill(signal, &child);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{output:?}");
    output
}

#[test]
fn a_signal_ends_a_run_at_its_iteration_boundary() {
    for signal in ["-INT", "-TERM", "-HUP"] {
        let folder = Folder::new();
        folder.import("tiny_cnn-adam.et.json.gz", &[]);
        let run = ["run", "job.graph.json", "--on", "host", "--iterations", "1000000", "--json"];
        let files = ["--save", "end.safetensors", "--latencies-out", "host.csv"];
        let output = stopped(&folder, signal, &[&run[..], &files].concat());
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(report["stopped"], true);
        let ran = report["losses"].as_array().unwrap().len();
        assert!(ran > 0 && ran < 1_000_000);
        assert!(folder.path("end.safetensors").exists() && folder.path("host.csv").exists());
        assert!(number(&report, "peak_bytes") > 0);
    }
}

#[test]
fn a_signal_ends_a_service_with_its_log() {
    let folder = Folder::new();
    folder.import("tiny_cnn-adam.et.json.gz", &[]);
    let run = ["run", "job.graph.json", "job.graph.json", "--on", "host", "--json"];
    let files = ["--iterations", "1000000", "--log", "log.csv"];
    let output = stopped(&folder, "-INT", &[&run[..], &files].concat());
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["jobs"].as_array().unwrap().len(), 2);
    assert!(folder.text("log.csv").lines().count() > 2);
}
