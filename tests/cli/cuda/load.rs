//! `neap profile --load` on CUDA: what the test driver saw on which stream, and that it changes no
//! result. How long anything takes over the test driver means nothing.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use neap::contract::json;
use neap::run::{Settings, Target};

use super::{built, faked, json as asked, watched, with};
use crate::cli::folder::{Folder, fixture, number};

const CUDA: [&str; 6] = ["--on", "cuda", "--cuda-libs", ".", "--device", "h100"];

/// Of each stream, in the order in which they were made: kernels launched, copies to the device and
/// from it, and what had not run when the stream was given back.
fn streams(folder: &Folder) -> Vec<[u64; 4]> {
    let number = |count: &str| count.parse().unwrap();
    let one = |word: &str| {
        let counts: Vec<u64> = word.split('/').map(number).collect();
        counts.try_into().unwrap()
    };
    folder.text("report.txt").split_whitespace().skip(6).map(one).collect()
}

/// The driver itself stops with an error where memory or a stream is not given back.
fn profiled(folder: &Folder, more: &[&str]) -> Vec<[u64; 4]> {
    let report = folder.path("report.txt");
    let more = [&["profile", "--repeats", "2", "-o", "t.csv"], &CUDA[..], more].concat();
    let answer = with(folder, &[("FAKE_REPORT", report.to_str().unwrap())], &more);
    assert_eq!(answer.code, Some(0), "neap {more:?}: {answer:?}");
    streams(folder)
}

/// The loads of the table's rows, with the operator of each.
fn rows(folder: &Folder) -> Vec<(String, String)> {
    let table = folder.text("t.csv");
    let mut reader = csv::Reader::from_reader(table.as_bytes());
    let all: Vec<csv::StringRecord> = reader.records().map(Result::unwrap).collect();
    all.iter().map(|row| (row[5].to_owned(), row[0].to_owned())).collect()
}

#[test]
fn other_streams_are_busy_while_operators_are_measured() {
    let Some(folder) = faked() else { return };
    folder.import("tiny_cnn-adam.et.json.gz", &[]);
    let alone = profiled(&folder, &["job.graph.json"]);
    assert_eq!(alone.len(), 3, "{alone:?}");
    // The first three are those of the measurement without a load, the next three the others'.
    let all = profiled(&folder, &["job.graph.json", "--load", "50,0"]);
    assert_eq!(all.len(), 9, "{all:?}");
    assert_eq!(all[..3], alone);
    assert_eq!(all[3..6], alone, "the measured job's work is the same under a load");
    // By what they do, since three threads make them in any order: each measures its work with
    // three bursts of one, and has at least one burst while the job runs.
    let mut load: Vec<[u64; 4]> = all[6..].to_vec();
    load.sort_unstable();
    let [out, into, compute] = load[..] else { panic!("{load:?}") };
    assert!(compute[0] > 3 && compute[1..] == [0, 0, 0], "{compute:?}");
    assert!(into[1] > 3 && [into[0], into[2], into[3]] == [0; 3], "{into:?}");
    assert!(out[2] > 3 && [out[0], out[1], out[3]] == [0; 3], "{out:?}");

    let rows = rows(&folder);
    let of = |load: &str| -> BTreeSet<String> {
        rows.iter().filter(|row| row.0 == load).map(|row| row.1.clone()).collect()
    };
    assert!(!of("0").is_empty() && of("0") == of("50"), "{rows:?}");
    assert_eq!(of("0").len() + of("50").len(), rows.len());
    let simulated = asked(
        &folder,
        &["simulate", "job.graph.json", "--device", "h100", "--latencies", "t.csv", "--load", "50"],
    );
    assert!(number(&simulated, "iteration_ns") > 0);
}

/// Each shape has a device of its own, and so a load of its own.
#[test]
fn shapes_are_measured_under_a_full_load() {
    let Some(folder) = faked() else { return };
    let sweep = ["--sweep", "relu", "--samples", "2", "--rounds", "1", "--load", "100"];
    let all = profiled(&folder, &sweep);
    assert_eq!(all.len(), 12, "{all:?}");
    assert!(all.iter().all(|stream| stream[3] == 0), "{all:?}");
    assert_eq!(rows(&folder).iter().filter(|row| row.0 == "100").count(), 2);
}

/// The driver that watches finds no byte that the load and the job both touch.
#[test]
fn the_load_touches_nothing_of_the_jobs() {
    let Some(folder) = watched() else { return };
    folder.import("tiny_cnn-inference.et.json.gz", &[]);
    let all = profiled(&folder, &["job.graph.json", "--load", "50"]);
    assert_eq!(all.len(), 6, "{all:?}");
}

#[test]
fn what_the_load_lacks_is_named() {
    let Some(folder) = faked() else { return };
    folder.import("tiny_cnn-inference.et.json.gz", &[]);
    // The job has what it pins, and the first of the two streams that copy.
    let profile = ["profile", "job.graph.json", "--load", "50", "--repeats", "1", "-o", "t.csv"];
    let answer = with(&folder, &[("FAKE_PINS", "3")], &[&profile[..], &CUDA].concat());
    assert_eq!(answer.code, Some(2), "{answer:?}");
    let word = "--load: the GPU's other work does not start: the machine pins no 2.0 MiB\n";
    assert!(answer.stderr.ends_with(word), "{} does not say `{word}`", answer.stderr);
    assert_eq!(answer.stderr.lines().count(), 1, "{}", answer.stderr);
    assert!(!folder.path("t.csv").exists());
}

/// Where the child finds the folder with the plan.
const HOME: &str = "NEAP_LOADED_HOME";

/// `neap run` has no load, so this runs the library over the test driver, in a process of its own.
#[test]
fn results_are_the_same_under_a_load() {
    if let Some(home) = std::env::var_os(HOME) {
        return print_checksums(Path::new(&home));
    }
    let Some(folder) = faked() else { return };
    folder.import("tiny_cnn-adam.et.json.gz", &[]);
    folder.json(&["plan", "job.graph.json", "--budget", "min", "-o", "job.plan.json"]);
    let here = folder.path("");
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "cli::cuda::load::results_are_the_same_under_a_load", "--nocapture"])
        .env("LD_LIBRARY_PATH", &here)
        .env("NEAP_CACHE", built().path().join("cache"))
        .env("FAKE_SHIM", Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels/shim.h"))
        .env(HOME, &here)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    let sums: Vec<&str> = said.lines().filter_map(|line| line.strip_prefix("sum ")).collect();
    assert!(sums.len() == 3 && sums.iter().all(|sum| *sum == sums[0]), "{said}");
}

fn print_checksums(home: &Path) {
    let (plan, graphs) = json::load(&home.join("job.plan.json"), &[]).unwrap();
    for load_percent in [0, 50, 90] {
        let settings = Settings {
            target: Target::Cuda { libs: Some(home.to_owned()), tf32: false },
            iterations: 3,
            weights: Some(fixture("tiny_cnn-adam.safetensors").into()),
            load_percent,
            ..Settings::default()
        };
        let (job, nothing) = (&plan.jobs[0], &mut |_| {});
        let ran = neap::run::run(&graphs[0], job, plan.budget, &plan.device, &settings, nothing);
        let ran = ran.unwrap();
        println!("\nsum {} {:?}", ran.checksum, ran.losses);
    }
}
