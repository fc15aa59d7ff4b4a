//! How often memory is pinned, which takes long: the test driver counts it.

use serde_json::Value;

use super::{faked, with};
use crate::cli::folder::{Folder, number};

/// What `neap` answers, and how often it pinned memory.
fn counted(folder: &Folder, arguments: &[&str]) -> (Value, u64) {
    let report = folder.path("report.txt");
    let more = [("FAKE_REPORT", report.to_str().unwrap())];
    let answer = with(folder, &more, &[&["--json"], arguments].concat());
    assert_eq!(answer.code, Some(0), "neap {arguments:?}: {answer:?}");
    let pins = folder.text("report.txt").split_whitespace().nth(4).unwrap().parse().unwrap();
    (serde_json::from_str(&answer.stdout).unwrap(), pins)
}

const CUDA: [&str; 4] = ["--on", "cuda", "--cuda-libs", "."];

/// A plan for a slow link runs operators again; the driver's copies are quick, so that the next plan
/// swaps. Each plan needs pinned memory twice: a few bytes for losses and its host store.
#[test]
fn a_new_plan_pins_only_what_it_needs_more() {
    let Some(folder) = faked() else { return };
    folder.import("tiny_cnn-adam.et.json.gz", &[]);
    let mut slow = folder.json(&["device", "show", "h100"]);
    let link = slow["link"].as_object_mut().unwrap();
    for (key, rate) in link.iter_mut() {
        *rate = match key.as_str() {
            "overhead_ns" => 10_000_000.into(),
            _ => (rate.as_u64().unwrap() / 1000).into(),
        };
    }
    folder.write("slow.device.json", slow.to_string());
    let plan = ["plan", "job.graph.json", "--device", "slow.device.json", "--budget", "60%"];
    folder.json(&[&plan[..], &["-o", "job.plan.json"]].concat());
    let run = [&["run", "job.plan.json", "--iterations", "6"], &CUDA[..]].concat();
    let (plain, pins) = counted(&folder, &run);
    assert_eq!(pins, 2);
    let (changed, pins) = counted(&folder, &[&run[..], &["--replan"]].concat());
    let plans = changed["changes"].as_array().unwrap();
    let applied = plans.iter().filter(|c| c["applied_from_iteration"].is_u64()).count();
    assert!(applied > 0, "{plans:?}");
    assert!(pins <= 2 + applied as u64, "{applied} new plans, pinned {pins} times");
    assert_eq!((&plain["losses"], &plain["checksum"]), (&changed["losses"], &changed["checksum"]));
}

/// Two jobs that take turns on the device, of which only one has room.
#[test]
fn a_job_that_comes_back_pins_nothing() {
    let Some(folder) = faked() else { return };
    let mut room = 0;
    for name in ["one", "two"] {
        folder.import("idioms/f16_adam.et.json.gz", &[]);
        let graph = format!("{name}.graph.json");
        std::fs::rename(folder.path("job.graph.json"), folder.path(&graph)).unwrap();
        let made =
            folder.json(&["plan", &graph, "--budget", "min", "-o", &format!("{name}.plan.json")]);
        room = number(&made, "arena_bytes");
    }
    let room = (room + room / 8).to_string();
    let jobs = ["run", "one.plan.json", "two.plan.json", "--iterations", "1000", "--memory", &room];
    let fair = ["--policy", "fair", "--turn", "0.001"];
    let (report, pins) = counted(&folder, &[&jobs[..], &CUDA, &fair].concat());
    let left: u64 =
        report["jobs"].as_array().unwrap().iter().map(|job| number(job, "sent_out")).sum();
    assert!(left > 2, "{left} times sent out");
    assert!(pins <= 4, "{left} times sent out, pinned {pins} times");
}

/// Each figure of a device is measured by a device of its own. The largest copies come first.
#[test]
fn a_device_is_measured_with_few_allocations() {
    let Some(folder) = faked() else { return };
    let measure = ["device", "measure", "--name", "none", "--device", "h100", "--quick"];
    let (_, pins) = counted(&folder, &[&measure[..], &CUDA, &["-o", "d.json"]].concat());
    assert!(pins <= 3, "pinned {pins} times");
}
