//! What a run records on the GPU, and how long an iteration is: the test driver counts events.

use neap::contract::json;
use neap::run::executor::script;
use neap::sim::program::Program;
use serde_json::Value;

use super::{faked, with};
use crate::cli::folder::{Folder, number};

/// What `neap run` answers, and how many events it recorded.
fn counted(folder: &Folder, arguments: &[&str], iterations: u64) -> (Value, u64) {
    let report = folder.path("report.txt");
    let more = [("FAKE_REPORT", report.to_str().unwrap())];
    let iterations = iterations.to_string();
    let run = ["--json", "run", "--on", "cuda", "--cuda-libs", ".", "--iterations", &iterations];
    let answer = with(folder, &more, &[&run, arguments].concat());
    assert_eq!(answer.code, Some(0), "neap {arguments:?}: {answer:?}");
    let events = folder.text("report.txt").split_whitespace().nth(5).unwrap().parse().unwrap();
    (serde_json::from_str(&answer.stdout).unwrap(), events)
}

/// Each iteration records its start and the end of each stream that has work. Where items are timed
/// each of them records its end, otherwise only those for which another stream waits.
#[test]
fn only_what_is_waited_for_records_an_event_unless_items_are_timed() {
    let Some(folder) = faked() else { return };
    folder.import("tiny_cnn-adam.et.json.gz", &[]);
    folder.json(&["plan", "job.graph.json", "--budget", "min", "-o", "job.plan.json"]);
    let (plan, graphs) = json::load(&folder.path("job.plan.json"), &[]).unwrap();
    let (graph, job) = (&graphs[0], &plan.jobs[0]);
    let program = Program::placed(graph, job).unwrap();
    let script = script(graph, job, &program, plan.budget, &[]).unwrap();
    let mut awaited: Vec<usize> = script.items.iter().flat_map(|i| i.waits.clone()).collect();
    awaited.sort_unstable();
    awaited.dedup();
    assert!(awaited.len() > 10 && awaited.len() < script.items.len() / 2, "{}", awaited.len());
    assert!(script.streams.iter().all(|items| !items.is_empty()));

    for (job, items, awaited, streams) in [
        ("job.plan.json", script.items.len() as u64, awaited.len() as u64, 3),
        ("job.graph.json", graph.operators.len() as u64, 0, 1),
    ] {
        let (timed, not) = (1 + streams + items, 1 + streams + awaited);
        let (plain, events) = counted(&folder, &[job], 6);
        assert_eq!((events, number(&plain, "timed_iterations")), (2 * timed + 4 * not, 2), "{job}");
        let (one, events) = counted(&folder, &[job, "--timeline", "t.json"], 1);
        assert_eq!((events, number(&one, "timed_iterations")), (timed, 1), "{job}");
        let (all, events) = counted(&folder, &[job, "--latencies-out", "t.csv"], 6);
        assert_eq!((events, number(&all, "timed_iterations")), (6 * timed, 6), "{job}");
        assert_eq!((&all["losses"], &all["checksum"]), (&plain["losses"], &plain["checksum"]));
        assert_eq!(plain["iterations_ns"].as_array().map(Vec::len), Some(6));
    }
    // A new plan comes of the times of each iteration.
    let (again, _) = counted(&folder, &["job.plan.json", "--replan"], 6);
    assert_eq!(number(&again, "timed_iterations"), 6);
}

/// An iteration lasts until the next begins: the host, which wakes late, keeps the device waiting.
#[test]
fn an_iteration_ends_where_the_next_begins() {
    let Some(folder) = faked() else { return };
    folder.import("tiny_cnn-inference.et.json.gz", &[]);
    let pause = 60_000_000;
    let run = ["--json", "run", "job.graph.json", "--on", "cuda", "--cuda-libs", "."];
    let more = [("FAKE_PAUSE", "60")];
    for timed in [&[][..], &["--latencies-out", "t.csv"]] {
        let answer = with(&folder, &more, &[&run[..], &["--iterations", "4"], timed].concat());
        assert_eq!(answer.code, Some(0), "{answer:?}");
        let said: Value = serde_json::from_str(&answer.stdout).unwrap();
        let times = |key: &str| -> Vec<u64> {
            said[key].as_array().unwrap().iter().map(|t| t.as_u64().unwrap()).collect()
        };
        let (device, host) = (times("iterations_ns"), times("walls_ns"));
        assert!(device[..3].iter().all(|&time| time >= pause), "{device:?}");
        // None follows the last.
        assert!(device[3] + pause <= host[3], "{device:?}, {host:?}");
        // Work is on its streams before the host waits for its end.
        let submitted = times("submits_ns");
        assert!(submitted.iter().zip(&host).all(|(s, h)| s + pause <= *h), "{submitted:?}");
    }
}
