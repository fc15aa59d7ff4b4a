//! `neap run` of several jobs at once.

use std::io::Write;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::cli::folder::{Folder, fixture, number};

const NAMES: [&str; 3] = ["tiny_cnn-adam", "tiny_gpt2-adamw", "resnet18-adam"];

/// A folder with a plan of each, at a budget of its own.
fn plans(names: &[&str]) -> Folder {
    let folder = Folder::new();
    for (name, budget) in names.iter().zip(["min", "80%", "70%"]) {
        let graph = format!("{name}.graph.json");
        folder.json(&["import", &fixture(&format!("{name}.et.json.gz")), "-o", &graph]);
        folder.json(&["plan", &graph, "--budget", budget, "-o", &format!("{name}.plan.json")]);
    }
    folder
}

fn alone(folder: &Folder, name: &str, iterations: &str) -> Value {
    folder.json(&["run", &format!("{name}.plan.json"), "--on", "host", "--iterations", iterations])
}

fn job<'a>(report: &'a Value, name: &str) -> &'a Value {
    report["jobs"]
        .as_array()
        .unwrap()
        .iter()
        .find(|j| j["name"] == name)
        .unwrap_or_else(|| panic!("no `{name}` in {report:#}"))
}

#[track_caller]
fn same_numbers(report: &Value, name: &str, alone: &Value) {
    let job = job(report, name);
    assert_eq!(job["verdict"], "done", "{job:#}");
    assert_eq!(
        (&job["losses"], &job["checksum"]),
        (&alone["losses"], &alone["checksum"]),
        "{name}"
    );
    assert!(!job["losses"].as_array().unwrap().is_empty());
}

#[test]
fn under_every_policy_every_job_computes_what_it_computes_alone() {
    let folder = plans(&NAMES);
    let iterations = ["5", "4", "1"];
    let alone: Vec<Value> =
        NAMES.iter().zip(iterations).map(|(name, n)| alone(&folder, name, n)).collect();
    let run = |policy: &str, more: &[&str]| {
        let subjects = NAMES.map(|n| format!("{n}.plan.json"));
        let mut arguments = vec![
            "run",
            &subjects[0],
            &subjects[1],
            &subjects[2],
            "--on",
            "host",
            "--iterations",
            "5,4,1",
            "--policy",
            policy,
        ];
        arguments.extend(more);
        folder.json(&arguments)
    };
    let largest = number(&alone[2], "arena_bytes");
    for policy in ["fifo", "srtf", "pack", "fair", "neap"] {
        // Once with room for all; and where memory moves once with room for one and a little.
        let tight = (largest + largest / 100).to_string();
        let moves = matches!(policy, "fair" | "neap");
        for memory in [None, Some(tight.as_str())].into_iter().take(1 + usize::from(moves)) {
            let report =
                run(policy, &memory.map_or(vec![], |m| vec!["--memory", m, "--turn", "0.001"]));
            for (name, alone) in NAMES.iter().zip(&alone) {
                same_numbers(&report, name, alone);
            }
            assert!(number(&report, "reserved_peak_bytes") <= number(&report, "arena_bytes"));
            assert!(number(&report, "touched_peak_bytes") <= number(&report, "arena_bytes"));
            let started = |name: &str| number(job(&report, name), "started_ns");
            let ended = |name: &str| number(job(&report, name), "ended_ns");
            match policy {
                "fifo" => assert!(
                    ended(NAMES[0]) <= started(NAMES[1]) && ended(NAMES[1]) <= started(NAMES[2])
                ),
                "srtf" => assert!(ended(NAMES[0]).max(ended(NAMES[1])) <= ended(NAMES[2])),
                _ => {}
            }
        }
    }
}

#[test]
fn planned_anew_together_they_compute_the_same_in_less() {
    let folder = plans(&NAMES[..2]);
    // Without a plan they want more than there is.
    let full: Vec<Value> = NAMES[..2]
        .iter()
        .map(|n| folder.json(&["plan", &format!("{n}.graph.json"), "--budget", "100%"]))
        .collect();
    let memory = full.iter().map(|p| number(p, "arena_bytes")).sum::<u64>() * 7 / 10;
    let graphs = NAMES.map(|n| format!("{n}.graph.json"));
    let memory = memory.to_string();
    let arguments = [
        "run",
        &graphs[0],
        &graphs[1],
        "--on",
        "host",
        "--iterations",
        "12",
        "--policy",
        "pack",
        "--memory",
        &memory,
        "--replan",
    ];
    let report = folder.json(&arguments);
    for name in &NAMES[..2] {
        same_numbers(&report, name, &alone(&folder, name, "12"));
    }
    assert!(number(&report, "reserved_peak_bytes").to_string().len() <= memory.len());
    let answer = folder.neap(&arguments);
    assert!(answer.stderr.contains("planned anew together"), "{}", answer.stderr);
}

#[test]
fn a_link_that_slows_down_brings_new_plans_of_all_jobs_and_the_same_numbers() {
    let folder = Folder::new();
    for name in &NAMES[..2] {
        let graph = format!("{name}.graph.json");
        folder.json(&["import", &fixture(&format!("{name}.et.json.gz")), "-o", &graph]);
        folder.json(&["plan", &graph, "--budget", "70%", "-o", &format!("{name}.plan.json")]);
    }
    let solo: Vec<Value> = NAMES[..2].iter().map(|name| alone(&folder, name, "40")).collect();
    let subjects = ["tiny_cnn-adam.plan.json", "tiny_gpt2-adamw.plan.json"];
    for (jobs, policy) in [(2, "pack"), (3, "pack"), (3, "fair")] {
        let mut arguments = vec!["run", subjects[0], subjects[1], subjects[0]];
        arguments.truncate(1 + jobs);
        arguments.extend(["--on", "host", "--policy", policy, "--turn", "0.001"]);
        // Only the link drifts by more than 200 %.
        arguments.extend(["--iterations", "40", "--replan", "--replan-threshold", "2"]);
        arguments.extend(["--throttle-link", "0.02@15"]);
        arguments.extend(["--log", "log.csv", "--latencies-out", "lat.csv"]);
        let report = folder.json(&arguments);
        for (name, alone) in NAMES.iter().zip(&solo) {
            same_numbers(&report, name, alone);
        }
        let plannings = report["plannings"].as_array().unwrap();
        let why = |p: &Value| p["why"].as_str().unwrap().to_owned();
        assert!(plannings.iter().any(|p| why(p).contains(" came")), "{plannings:#?}");
        let slow = plannings.iter().find(|p| why(p).contains("copies "));
        let Some(slow) = slow else {
            // One runs at a time, and in one lane for all of them no job has to swap: they are
            // planned to take what they take without a plan, whatever the link does.
            assert_eq!(policy, "fair", "no drift was seen: {plannings:#?}");
            let unplanned = |subject: &&str| {
                let graph = subject.replace(".plan.", ".graph.");
                number(&folder.json(&["simulate", &graph]), "iteration_ns")
            };
            let all: u64 = arguments[1..=jobs].iter().map(unplanned).sum();
            let came = plannings.iter().find(|p| why(p).contains(" came")).expect("there is one");
            assert_eq!(came["new_plans"].as_array().map(Vec::len), Some(jobs), "{came:#}");
            assert_eq!(number(came, "predicted_after_ns"), all, "{came:#}");
            let new = |p: &&Value| p["new_plans"].as_array().is_some_and(|n| !n.is_empty());
            assert_eq!(plannings.iter().filter(new).count(), 1, "{plannings:#?}");
            continue;
        };
        if slow["new_plans"].as_array().is_some_and(|new| !new.is_empty()) {
            assert!(number(slow, "predicted_after_ns") < number(slow, "predicted_before_ns"));
            assert!(folder.text("log.csv").contains(&why(slow)), "the log has the reason");
        } else {
            assert!(slow["kept_because"].is_string(), "{slow:#}");
        }
        assert!(folder.text("lat.csv").lines().count() > 50);
    }
}

#[test]
fn a_plan_of_several_jobs_runs_in_its_arena_with_a_window_or_without() {
    let folder = plans(&NAMES[..2]);
    let graphs = NAMES.map(|n| format!("{n}.graph.json"));
    for more in [&[][..], &["--overlap"]] {
        let plan = folder.json(
            &[&["plan", &graphs[0], &graphs[1], "--budget", "70%", "-o", "both.plan.json"], more]
                .concat(),
        );
        let report = folder.json(&[
            "run",
            "both.plan.json",
            "--on",
            "host",
            "--iterations",
            "4",
            "--policy",
            "pack",
        ]);
        for name in &NAMES[..2] {
            same_numbers(&report, name, &alone(&folder, name, "4"));
        }
        assert!(
            number(&report, "reserved_peak_bytes") <= number(&plan, "arena_bytes"),
            "{report:#}"
        );
        // In no more than the plan's own arena they are all in at once.
        let arena = number(&plan, "arena_bytes").to_string();
        let report = folder.json(&[
            "run",
            "both.plan.json",
            "--on",
            "host",
            "--iterations",
            "4,6",
            "--policy",
            "pack",
            "--memory",
            &arena,
        ]);
        assert!(
            report["jobs"].as_array().unwrap().iter().all(|j| j["waited_for"].is_null()),
            "{report:#}"
        );
    }
}

#[test]
fn a_window_is_passed_on_within_iterations() {
    let folder = plans(&NAMES[..2]);
    let graphs = NAMES.map(|n| format!("{n}.graph.json"));
    let plan = folder.json(&[
        "plan",
        &graphs[0],
        &graphs[1],
        &graphs[0],
        "--budget",
        "min",
        "--overlap",
        "-o",
        "all.plan.json",
    ]);
    assert!(number(&plan, "window_bytes") > 0);
    let arena = number(&plan, "arena_bytes").to_string();
    let solo = NAMES[..2].iter().map(|name| alone(&folder, name, "30")).collect::<Vec<_>>();
    for policy in ["pack", "srtf"] {
        let report = folder.json(&[
            "run",
            "all.plan.json",
            "--on",
            "host",
            "--iterations",
            "30",
            "--policy",
            policy,
            "--memory",
            &arena,
        ]);
        for (name, alone) in NAMES.iter().zip(&solo) {
            same_numbers(&report, name, alone);
        }
        let jobs = report["jobs"].as_array().unwrap();
        assert_eq!(jobs[2]["checksum"], jobs[0]["checksum"], "the same job twice");
        assert!(jobs.iter().all(|j| j["waited_for"].is_null() || policy == "srtf"), "{report:#}");
        let waited: u64 = jobs.iter().map(|j| number(j, "window_waited_ns")).sum();
        // Jobs wait for each other within their iterations only if these run at once.
        assert_eq!(waited > 0, policy == "pack", "{policy}: {report:#}");
    }
}

/// Runs the service with a way to write to its stdin.
fn listening(
    folder: &Folder,
    arguments: &[&str],
    talk: impl FnOnce(&mut dyn Write),
) -> (Option<i32>, Value, String) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_neap"))
        .args(["--json", "run", "--on", "host", "--listen"])
        .args(arguments)
        .current_dir(folder.path(""))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    talk(child.stdin.as_mut().unwrap());
    drop(child.stdin.take());
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    (output.status.code(), serde_json::from_slice(&output.stdout).unwrap_or(Value::Null), text)
}

#[test]
fn jobs_come_and_go_while_it_runs() {
    let folder = plans(&NAMES[..2]);
    let (code, report, stderr) = listening(
        &folder,
        &["tiny_cnn-adam.plan.json", "--iterations", "1000000", "--memory", "8MiB"],
        |stdin| {
            let mut say = |line: &str| {
                stdin.write_all(line.as_bytes()).unwrap();
                stdin.write_all(b"\n").unwrap();
                stdin.flush().unwrap();
            };
            say("run tiny_gpt2-adamw.plan.json 3");
            say("run tiny_gpt2-adamw.plan.json 2");
            say("run nothing.plan.json");
            say("\u{fffd}\u{1}");
            say("run tiny_gpt2-adamw.plan.json many");
            say("dance");
            say("end nobody");
            std::thread::sleep(Duration::from_millis(500));
            say("end tiny_cnn-adam");
            say("quit");
        },
    );
    assert_eq!(code, Some(0), "{stderr}");
    for (name, iterations) in [("tiny_gpt2-adamw", "3"), ("tiny_gpt2-adamw-2", "2")] {
        same_numbers(&report, name, &alone(&folder, "tiny_gpt2-adamw", iterations));
    }
    let stopped = job(&report, "tiny_cnn-adam");
    assert_eq!(stopped["verdict"], "stopped");
    assert!((1..1_000_000).contains(&number(stopped, "iterations")));
    assert_eq!(stopped["checksum"], "");
    for word in [
        "nothing.plan.json",
        "`many` is not a number",
        "`dance` is not a request",
        "there is no job `nobody`",
    ] {
        assert!(stderr.contains(word), "{word}: {stderr}");
    }
}

#[test]
fn a_job_that_arrives_is_queued_with_the_reason() {
    let folder = plans(&NAMES[..2]);
    let arguments = [
        "run",
        "tiny_cnn-adam.plan.json",
        "tiny_gpt2-adamw.plan.json",
        "--on",
        "host",
        "--policy",
        "fifo",
    ];
    let answer = folder.neap(
        &[&arguments[..], &["--iterations", "20,1", "--submit", "0,0.01", "--log", "log.csv"]]
            .concat(),
    );
    assert_eq!(answer.code, Some(0), "{answer:?}");
    assert!(
        answer.stderr.contains("`tiny_gpt2-adamw` waits for the jobs before it to end"),
        "{}",
        answer.stderr
    );
    assert!(answer.stderr.contains("`tiny_gpt2-adamw` is in after"), "{}", answer.stderr);
    let log = folder.text("log.csv");
    assert!(log.starts_with("time_ns,job,what,why\n"), "{log}");
    assert_eq!(log.lines().filter(|l| l.ends_with("tiny_cnn-adam,ran,")).count(), 20);
    let all: Vec<&str> = log.lines().skip(1).collect();
    let second = all.iter().position(|l| l.ends_with("tiny_gpt2-adamw,go,")).unwrap();
    assert!(all[..second].iter().any(|l| l.ends_with("tiny_cnn-adam,end,")));
}

#[test]
fn who_never_fits_is_refused_and_the_others_go_on() {
    let folder = plans(&NAMES);
    let (code, report, stderr) = listening(
        &folder,
        &["tiny_cnn-adam.plan.json", "--iterations", "3", "--memory", "8MiB"],
        |stdin| {
            stdin.write_all(b"run resnet18-adam.plan.json 2\n").unwrap();
        },
    );
    assert_eq!(code, Some(1), "{stderr}");
    same_numbers(&report, "tiny_cnn-adam", &alone(&folder, "tiny_cnn-adam", "3"));
    let refused = job(&report, "resnet18-adam");
    assert_eq!(refused["verdict"], "refused");
    assert!(refused["reason"].as_str().unwrap().contains("never fits"), "{refused:#}");
}

#[test]
fn what_is_no_folder_is_not_watched() {
    let folder = Folder::new();
    folder.write("file", "");
    for watched in ["missing", "file"] {
        let words = ["--watch", watched, "is no folder"];
        let command = ["run", "--on", "host", "--memory", "8MiB", "--watch", watched];
        folder.refuses(2, &words, &command);
    }
}

#[test]
fn a_folder_is_watched() {
    let folder = plans(&NAMES[..1]);
    std::fs::create_dir(folder.path("in")).unwrap();
    // Half of a plan, completed later; and something that can never be read.
    let whole = folder
        .text("tiny_cnn-adam.plan.json")
        .replace("tiny_cnn-adam.graph.json", "../tiny_cnn-adam.graph.json");
    std::fs::write(folder.path("in").join("half.plan.json"), &whole[..whole.len() / 2]).unwrap();
    std::fs::create_dir(folder.path("in").join("folder.plan.json")).unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_neap"))
        .args([
            "--json",
            "run",
            "--on",
            "host",
            "--watch",
            "in",
            "--memory",
            "8MiB",
            "--iterations",
            "2",
        ])
        .current_dir(folder.path(""))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let graph = "tiny_cnn-adam.graph.json";
    std::fs::copy(folder.path(graph), folder.path("in").join(graph)).unwrap();
    folder.json(&[
        "plan",
        "in/tiny_cnn-adam.graph.json",
        "--budget",
        "90%",
        "-o",
        "in/one.plan.json",
    ]);
    std::thread::sleep(Duration::from_millis(500));
    std::fs::write(folder.path("in").join("half.plan.json"), &whole).unwrap();
    // They are taken some time before the end is asked for.
    std::thread::sleep(Duration::from_millis(1200));
    std::fs::write(folder.path("in").join("stop"), "").unwrap();
    let limit = Instant::now() + Duration::from_secs(60);
    while child.try_wait().unwrap().is_none() {
        assert!(Instant::now() < limit, "it does not stop");
        std::thread::sleep(Duration::from_millis(50));
    }
    let output = child.wait_with_output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    for name in ["one", "half"] {
        same_numbers(&report, name, &alone(&folder, "tiny_cnn-adam", "2"));
    }
}

#[test]
fn what_makes_no_sense_is_refused() {
    let folder = plans(&NAMES[..2]);
    let (one, two) = ("tiny_cnn-adam.plan.json", "tiny_gpt2-adamw.plan.json");
    let both = ["run", one, two, "--on", "host"];
    let with = |more: &[&'static str]| [&both[..], more].concat();
    folder.refuses(1, &["never fits", "--memory", "1.0 MiB"], &with(&["--memory", "1MiB"]));
    folder.refuses(2, &["--iterations: 3 numbers for 2 jobs"], &with(&["--iterations", "1,2,3"]));
    folder.refuses(2, &["--submit: 3 numbers for 2 jobs"], &with(&["--submit", "0,0,1"]));
    folder.refuses(2, &["--weights: is for one job"], &with(&["--weights", "w.safetensors"]));
    folder.refuses(2, &["--save: is for one job"], &with(&["--save", "s.safetensors"]));
    folder.refuses(2, &["`x` is not a time"], &with(&["--submit", "x"]));
    folder.refuses(2, &["'best'"], &with(&["--policy", "best"]));
    folder.refuses(2, &["--memory: with --listen"], &with(&["--listen"]));
    folder.refuses(2, &["more than host offers"], &with(&["--memory", "100000GiB"]));
    folder.refuses(2, &["nothing.plan.json"], &["run", one, "nothing.plan.json", "--on", "host"]);
    folder.refuses(2, &["read by this command"], &["run", one, "--on", "host", "--log", one]);
}
