//! From a graph to a plan that is proved, simulated and run.

use serde_json::Value;

use crate::cli::folder::{Folder, fixture, number};

const PLANNED: [(&str, &str); 5] = [
    ("tiny_cnn-adam.et.json.gz", "80%"),
    ("tiny_cnn-adam.et.json.gz", "min"),
    ("tiny_gpt2-adamw.et.json.gz", "60%"),
    ("tiny_gpt2-adamw.et.json.gz", "min"),
    ("tiny_cnn-inference.et.json.gz", "min"),
];

/// The keys that others build on.
const FIGURES: [&str; 7] = [
    "peak_bytes",
    "budget_bytes",
    "iteration_ns",
    "arena_bytes",
    "first_iteration_ns",
    "unplanned_peak_bytes",
    "unplanned_iteration_ns",
];

fn same(a: &Value, b: &Value, keys: &[&str]) {
    for key in keys {
        assert_eq!(number(a, key), number(b, key), "{key}");
    }
}

#[test]
fn planner_checker_and_engine_agree_and_the_run_is_equal() {
    for (trace, budget) in PLANNED {
        let folder = Folder::new();
        folder.import(trace, &[]);
        let plan =
            folder.json(&["plan", "job.graph.json", "--budget", budget, "-o", "job.plan.json"]);
        let check = folder.json(&["check", "job.plan.json"]);
        let simulated = folder.json(&["simulate", "job.plan.json"]);
        assert_eq!(check["safe"], true);
        same(&plan, &check, &FIGURES);
        same(&plan, &simulated, &FIGURES);
        assert!(number(&plan, "peak_bytes") <= number(&plan, "arena_bytes"));
        assert!(number(&plan, "arena_bytes") <= number(&plan, "budget_bytes"));
        assert!(
            number(&plan, "peak_bytes") < number(&plan, "unplanned_peak_bytes"),
            "{trace} {budget} gains nothing"
        );
        let unplanned =
            folder.json(&["run", "job.graph.json", "--on", "host", "--iterations", "2"]);
        let planned = folder.json(&["run", "job.plan.json", "--on", "host", "--iterations", "2"]);
        assert_eq!(unplanned["checksum"], planned["checksum"], "{trace} {budget}");
        assert_eq!(unplanned["losses"], planned["losses"], "{trace} {budget}");
        assert!(planned["checksum"].as_str().is_some_and(|c| c.len() == 64));
        assert!(
            number(&planned, "peak_bytes") <= number(&plan, "arena_bytes"),
            "the run leaves its arena"
        );
        assert_eq!(number(&unplanned, "late_copies"), 0);
        number(&planned, "late_copies");
        number(&planned, "iteration_ns");
    }
}

#[test]
fn a_slow_link_costs_time_and_changes_nothing_else() {
    let folder = Folder::new();
    folder.import("tiny_gpt2-adamw.et.json.gz", &[]);
    folder.json(&["plan", "job.graph.json", "--budget", "min", "-o", "job.plan.json"]);
    let unplanned =
        folder.json(&["run", "job.graph.json", "--on", "host", "--iterations", "2", "--seed", "7"]);
    let slow = folder.json(&[
        "run",
        "job.plan.json",
        "--on",
        "host",
        "--iterations",
        "2",
        "--seed",
        "7",
        "--throttle-link",
        "0.05",
    ]);
    assert!(number(&slow, "late_copies") > 0);
    assert_eq!(unplanned["checksum"], slow["checksum"]);
    let other =
        folder.json(&["run", "job.graph.json", "--on", "host", "--iterations", "2", "--seed", "8"]);
    assert_ne!(unplanned["checksum"], other["checksum"]);
}

#[test]
fn with_pytorchs_weights_the_losses_are_pytorchs() {
    for name in ["tiny_cnn-adam", "tiny_gpt2-adamw"] {
        let truth: Value = serde_json::from_str(
            &std::fs::read_to_string(fixture(&format!("{name}.json"))).unwrap(),
        )
        .unwrap();
        let folder = Folder::new();
        folder.import(&format!("{name}.et.json.gz"), &[]);
        folder.json(&["plan", "job.graph.json", "--budget", "min", "-o", "job.plan.json"]);
        let weights = fixture(&format!("{name}.safetensors"));
        let mut checksums = Vec::new();
        for subject in ["job.graph.json", "job.plan.json"] {
            let run = folder.json(&[
                "run",
                subject,
                "--on",
                "host",
                "--iterations",
                "4",
                "--weights",
                &weights,
                "--save",
                "end.safetensors",
            ]);
            let losses = run["losses"].as_array().unwrap();
            let expected = truth["losses"].as_array().unwrap();
            assert_eq!(losses.len(), 4);
            for (loss, expected) in losses
                .iter()
                .map(|l| l.as_f64().unwrap())
                .zip(expected.iter().map(|l| l.as_f64().unwrap()))
            {
                assert!(
                    (loss - expected).abs() <= 1e-5 * expected.abs(),
                    "{name} {subject}: {loss}, PyTorch has {expected}"
                );
            }
            assert!(folder.path("end.safetensors").exists());
            checksums.push(run["checksum"].clone());
        }
        assert_eq!(checksums[0], checksums[1]);
    }
}

#[test]
fn two_runs_write_the_same_bytes() {
    let folder = Folder::new();
    folder.import("tiny_gpt2-adamw.et.json.gz", &[]);
    for n in ["1", "2"] {
        let (plan, svg, timeline) =
            (format!("{n}.plan.json"), format!("{n}.svg"), format!("{n}.json"));
        folder.json(&[
            "plan",
            "job.graph.json",
            "--device",
            "rtx4060",
            "--budget",
            "60%",
            "-o",
            &plan,
        ]);
        let noisy = [
            "simulate",
            &plan,
            "--noise",
            "20%",
            "--seed",
            "3",
            "--runs",
            "50",
            "--plot",
            &svg,
            "--timeline",
            &timeline,
        ];
        folder.write(&format!("{n}.txt"), folder.json(&noisy).to_string());
    }
    for kind in ["plan.json", "svg", "json", "txt"] {
        assert!(folder.text(&format!("1.{kind}")) == folder.text(&format!("2.{kind}")), "{kind}");
    }
    assert!(folder.text("1.svg").contains("</svg>"));
    let timeline: Value = serde_json::from_str(&folder.text("1.json")).unwrap();
    assert!(timeline["traceEvents"].as_array().unwrap().len() > 100);
}

#[test]
fn noise_spreads_the_times_and_keeps_the_peak_within_the_budget() {
    let folder = Folder::new();
    folder.import("tiny_cnn-adam.et.json.gz", &[]);
    let plan = folder.json(&["plan", "job.graph.json", "--budget", "min", "-o", "job.plan.json"]);
    let noise =
        folder.json(&["simulate", "job.plan.json", "--noise", "30%", "--runs", "200"])["noise"]
            .clone();
    assert!(
        number(&noise, "p50_ns") < number(&noise, "p95_ns")
            && number(&noise, "p95_ns") <= number(&noise, "p99_ns")
    );
    assert!(number(&noise, "peak_bytes") <= number(&plan, "budget_bytes"));
}

#[test]
fn measured_latencies_come_back_as_a_table() {
    let folder = Folder::new();
    folder.import("tiny_cnn-adam.et.json.gz", &[]);
    folder.json(&[
        "run",
        "job.graph.json",
        "--on",
        "host",
        "--iterations",
        "2",
        "--latencies-out",
        "host.csv",
    ]);
    let plan =
        folder.json(&["plan", "job.graph.json", "--budget", "80%", "--latencies", "host.csv"]);
    let operators = number(&folder.json(&["inspect", "job.graph.json"]), "operators");
    assert_eq!(number(&plan["latency_sources"], "measured"), operators);
}

#[test]
fn a_plan_names_its_graph_relative_to_itself() {
    let folder = Folder::new();
    folder.import("tiny_cnn-adam.et.json.gz", &[]);
    std::fs::create_dir(folder.path("plans")).unwrap();
    let plan =
        folder.json(&["plan", "job.graph.json", "--budget", "80%", "-o", "plans/job.plan.json"]);
    assert!(folder.text("plans/job.plan.json").contains("\"../job.graph.json\""));
    same(&plan, &folder.json(&["simulate", "plans/job.plan.json"]), &FIGURES);
    std::fs::rename(folder.path("job.graph.json"), folder.path("moved.graph.json")).unwrap();
    folder.refuses(2, &["job.graph.json"], &["check", "plans/job.plan.json"]);
    same(
        &plan,
        &folder.json(&["check", "plans/job.plan.json", "--graph", "moved.graph.json"]),
        &FIGURES,
    );
}

#[test]
fn a_hand_written_graph_plans_and_simulates() {
    let folder = Folder::new();
    std::fs::copy(fixture("mlp.graph.json"), folder.path("mlp.graph.json")).unwrap();
    let plan = folder.json(&[
        "plan",
        "mlp.graph.json",
        "--device",
        "a6000",
        "--budget",
        "60%",
        "-o",
        "mlp.plan.json",
    ]);
    same(&plan, &folder.json(&["simulate", "mlp.plan.json"]), &FIGURES);
    // Its operators are its own: the host names them before anything runs.
    folder.refuses(
        2,
        &["mlp::linear", "mlp::momentum"],
        &["run", "mlp.graph.json", "--on", "host"],
    );
}

#[test]
fn diff_names_what_changed() {
    let folder = Folder::new();
    folder.import("tiny_cnn-adam.et.json.gz", &[]);
    for (name, budget) in [("a.plan.json", "80%"), ("b.plan.json", "80%"), ("c.plan.json", "min")] {
        folder.json(&["plan", "job.graph.json", "--budget", budget, "-o", name]);
    }
    assert_eq!(folder.json(&["diff", "a.plan.json", "b.plan.json"])["equal"], true);
    let changed = folder.neap(&["diff", "a.plan.json", "c.plan.json"]);
    assert_eq!(changed.code, Some(1));
    assert!(changed.stdout.contains("budget_bytes"), "{}", changed.stdout);
}

#[test]
fn the_graph_of_the_docs_is_a_graph() {
    let folder = Folder::new();
    let page = include_str!("../../docs/graph.md");
    let (_, graph) = page.split_once("```json\n").unwrap();
    folder.write("two.graph.json", graph.split_once("```").unwrap().0);
    let plan = folder.json(&["plan", "two.graph.json", "--budget", "min", "-o", "two.plan.json"]);
    same(&plan, &folder.json(&["simulate", "two.plan.json"]), &FIGURES);
    assert_eq!(number(&plan, "unplanned_iteration_ns"), 250_000);
}

#[test]
fn plans_for_noise_are_plans() {
    let folder = Folder::new();
    folder.import("tiny_cnn-adam.et.json.gz", &[]);
    let plain = folder.json(&["run", "job.graph.json", "--iterations", "2"]);
    for (planner, budget) in [("neap", "70%"), ("tensile", "80%"), ("neap", "min")] {
        let arguments = [
            "plan",
            "job.graph.json",
            "--budget",
            budget,
            "--min-swap",
            "512",
            "--planner",
            planner,
            "--noise",
            "20%",
        ];
        let plan = folder.json(&[&arguments[..], &["-o", "job.plan.json"]].concat());
        assert_eq!(
            plan,
            folder.json(&[&arguments[..], &["-o", "job.plan.json"]].concat()),
            "not the same twice"
        );
        let noise = &plan["noise"];
        assert!(number(noise, "p95_ns") <= number(noise, "p95_without_ns"), "{noise}");
        assert!(folder.text("job.plan.json").contains("\"noise\":\"20%\""));
        same(&plan, &folder.json(&["check", "job.plan.json"]), &FIGURES[..3]);
        // The same runs as the planner's.
        let (runs, seed) = (number(noise, "runs").to_string(), number(noise, "seed").to_string());
        let again = folder.json(&[
            "simulate",
            "job.plan.json",
            "--noise",
            "20%",
            "--runs",
            &runs,
            "--seed",
            &seed,
        ])["noise"]
            .clone();
        assert_eq!(again["p95_ns"], noise["p95_ns"]);
        assert!(number(&again, "peak_bytes") <= number(&plan, "budget_bytes"));
        let run = folder.json(&["run", "job.plan.json", "--iterations", "2"]);
        assert_eq!(run["checksum"], plain["checksum"], "{planner} {budget}");
        assert_eq!(run["losses"], plain["losses"], "{planner} {budget}");
    }
    folder.refuses(2, &["noise", "120%"], &["plan", "job.graph.json", "--noise", "120%"]);
}
