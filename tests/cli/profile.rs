//! Measured, learned, planned with; and planned anew while it runs.

use serde_json::Value;

use crate::cli::folder::{Folder, fixture, number};

#[test]
fn a_profile_covers_the_job_and_plans_it() {
    let folder = Folder::new();
    folder.import("tiny_cnn-adam.et.json.gz", &[]);
    let profile = folder.json(&[
        "profile",
        "job.graph.json",
        "--on",
        "host",
        "--repeats",
        "2",
        "--load",
        "0,60",
        "-o",
        "x.latency.csv",
    ]);
    let operators = number(&folder.json(&["inspect", "job.graph.json"]), "operators");
    assert_eq!(number(&profile, "rows"), 2 * operators);
    let table = folder.text("x.latency.csv");
    let header = "operator,kind,shapes,arguments,device,load_percent,ns,flops,bytes,roofline_ns,algorithm,workspace_bytes,key";
    assert_eq!(table.lines().next(), Some(header));
    for load in ["0", "60"] {
        let plan = folder.json(&[
            "plan",
            "job.graph.json",
            "--budget",
            "80%",
            "--latencies",
            "x.latency.csv",
            "--load",
            load,
        ]);
        assert_eq!(number(&plan["latency_sources"], "measured"), operators);
    }
    let simulated = folder.json(&["simulate", "job.graph.json", "--latencies", "x.latency.csv"]);
    assert!(number(&simulated, "iteration_ns") > 0);
    folder.refuses(2, &["GRAPH", "--sweep"], &["profile", "job.graph.json", "--sweep", "mm"]);
    folder.refuses(2, &["no kind is named `gemm`", "conv2d"], &["profile", "--sweep", "gemm"]);
    folder.refuses(2, &["101"], &["profile", "job.graph.json", "--load", "101"]);
    folder.refuses(
        2,
        &["read by this command"],
        &["profile", "job.graph.json", "-o", "job.graph.json"],
    );
    folder.refuses(
        2,
        &["--load", "records its own"],
        &["simulate", &planned(&folder), "--load", "10"],
    );
}

#[test]
fn scratch_that_a_table_names_is_reserved_and_checked() {
    let folder = Folder::new();
    folder.import("tiny_cnn-adam.et.json.gz", &[]);
    let plan = |out: &str| {
        folder.json(&[
            "plan",
            "job.graph.json",
            "--device",
            "a100-80g",
            "--latencies",
            "x.csv",
            "--budget",
            "min",
            "-o",
            out,
        ])
    };
    folder.json(&[
        "simulate",
        "job.graph.json",
        "--device",
        "a100-80g",
        "--latencies-out",
        "x.csv",
    ]);
    let without = plan("without.plan.json");
    let plain = folder.text("x.csv");
    let chosen = |workspace: u64| -> String {
        let row = |line: &str| {
            if line.contains(",aten::conv2d,") {
                line.replacen(",,,,", &format!(",,6,{workspace},"), 1)
            } else {
                line.to_owned()
            }
        };
        plain.lines().map(|line| row(line) + "\n").collect()
    };
    folder.write("x.csv", chosen(50_000_000));
    let with = plan("with.plan.json");
    assert!(
        number(&with, "unplanned_peak_bytes") >= 50_000_000
            && number(&without, "unplanned_peak_bytes") < 50_000_000
    );
    assert!(
        number(&with, "arena_bytes") >= 50_000_256 && number(&with, "budget_bytes") >= 50_000_256
    );
    let text = folder.text("with.plan.json");
    assert!(text.contains("\"algorithm\":[6],\"workspace_bytes\":50000000"), "{text}");
    assert!(!folder.text("without.plan.json").contains("\"algorithm\""));
    folder.json(&["check", "with.plan.json"]);
    assert_eq!(folder.neap(&["diff", "with.plan.json", "without.plan.json"]).code, Some(1));
    // The times that a simulation writes are still those of the algorithms.
    folder.json(&["simulate", "with.plan.json", "--latencies-out", "y.csv"]);
    assert_eq!(folder.text("y.csv"), folder.text("x.csv"));
    // On the host they mean nothing but room.
    let run = |plan: &str| {
        folder.json(&["run", plan, "--on", "host", "--iterations", "2"])["losses"].clone()
    };
    assert_eq!(run("with.plan.json"), run("without.plan.json"));
    // A plan that lacks the room is refused.
    folder.write(
        "less.plan.json",
        text.replace("\"workspace_bytes\":50000000", "\"workspace_bytes\":60000000"),
    );
    assert_eq!(folder.neap(&["check", "less.plan.json"]).code, Some(1));
    folder.write(
        "less.plan.json",
        text.replace("\"workspace_bytes\":50000000", "\"workspace_bytes\":4611686018427387900"),
    );
    folder.refuses(
        2,
        &["less.plan.json: with its `workspace_bytes`"],
        &["check", "less.plan.json"],
    );
    folder.write("x.csv", chosen(1 << 60));
    folder.refuses(
        2,
        &["x.csv: with its `workspace_bytes`"],
        &["plan", "job.graph.json", "--latencies", "x.csv"],
    );
    folder.write("x.csv", chosen(0).replace(",6,0,", ",implicit,0,"));
    folder.refuses(
        2,
        &["x.csv", "column `algorithm` is `implicit`"],
        &["plan", "job.graph.json", "--latencies", "x.csv"],
    );
}

fn planned(folder: &Folder) -> String {
    folder.json(&["plan", "job.graph.json", "--budget", "80%", "-o", "job.plan.json"]);
    "job.plan.json".to_owned()
}

#[test]
fn operators_like_a_jobs_are_measured_at_other_shapes() {
    let folder = Folder::new();
    folder.import("tiny_cnn-adam.et.json.gz", &[]);
    let vary = ["profile", "job.graph.json", "--vary", "25", "--rounds", "1", "--repeats", "1"];
    let measured = folder.json(&[&vary[..], &["-o", "like.csv"]].concat());
    let kinds: Vec<&str> =
        measured["kinds"].as_array().unwrap().iter().map(|k| k["kind"].as_str().unwrap()).collect();
    for kind in ["aten::relu", "neap::adam"] {
        assert!(kinds.contains(&kind), "{kinds:?}");
    }
    folder.json(&["train", "like.csv", "--steps", "100", "-o", "like.predictor.json"]);
    let flags = ["--predictor", "like.predictor.json", "--budget", "80%", "-o", "a.plan.json"];
    let plan = folder.json(&[&["plan", "job.graph.json"], &flags[..]].concat());
    assert!(number(&plan["latency_sources"], "predicted") > 0);
    folder.refuses(2, &["--vary", "--sweep"], &["profile", "--sweep", "mm", "--vary", "3"]);
}

#[test]
fn a_predictor_of_a_device_that_is_not_at_hand_covers_a_job() {
    let folder = Folder::new();
    folder.import("tiny_gpt2-adamw.et.json.gz", &[]);
    let vary = ["profile", "job.graph.json", "--vary", "60", "--by-roofline", "--device", "a6000"];
    folder.json(&[&vary[..], &["-o", "varied.csv"]].concat());
    let trained = folder.json(&["train", "varied.csv", "--steps", "300", "-o", "p.predictor.json"]);
    let fit = number(&trained["fit"], "r2_per_mille");
    assert!((900..=1000).contains(&fit), "{fit}");
    // Many of these times are lines in bytes, which are learned to the nanosecond.
    assert!(number(&trained["fit"], "mse_millionths") < 10_000);
    number(&trained["models"][0]["fit"], "r2_per_mille");
    let flags = ["--predictor", "p.predictor.json", "--device", "a6000", "--budget", "90%"];
    let plan = ["plan", "job.graph.json", "-o", "a.plan.json"];
    let sources = folder.json(&[&plan[..], &flags[..]].concat())["latency_sources"].clone();
    let predicted = number(&sources, "predicted");
    let all = predicted + number(&sources, "roofline");
    assert!(predicted * 100 >= all * 95, "{predicted} of {all} operators");
    folder.refuses(2, &["--load", "--by-roofline"], &[&vary[..], &["--load", "50"]].concat());
    folder.refuses(
        2,
        &["--latencies-out"],
        &["profile", "job.graph.json", "--by-roofline", "--device", "a6000"],
    );
}

#[test]
fn a_sweep_trains_a_predictor_that_plans_with_it() {
    let folder = Folder::new();
    let sweep = [
        "profile",
        "--sweep",
        "relu",
        "--samples",
        "40",
        "--rounds",
        "1",
        "--repeats",
        "1",
        "-o",
        "relu.csv",
    ];
    assert_eq!(number(&folder.json(&sweep), "rows"), 40);
    for name in ["1", "2"] {
        let predictor = format!("{name}.predictor.json");
        let trained = folder.json(&["train", "relu.csv", "--steps", "200", "-o", &predictor]);
        let model = &trained["models"][0];
        assert_eq!(model["kind"], "aten::relu");
        assert!(
            number(model, "held_out_rows") > 0
                && number(model, "rows") + number(model, "held_out_rows") <= 40
        );
        number(model, "median_error_per_mille");
        number(model, "roofline_median_error_per_mille");
    }
    assert!(
        folder.text("1.predictor.json") == folder.text("2.predictor.json"),
        "training is the same twice"
    );

    folder.import("tiny_cnn-adam.et.json.gz", &[]);
    let mut plans = Vec::new();
    for name in ["a.plan.json", "b.plan.json"] {
        let plan = folder.json(&[
            "plan",
            "job.graph.json",
            "--budget",
            "80%",
            "--predictor",
            "1.predictor.json",
            "-o",
            name,
        ]);
        assert!(
            number(&plan["latency_sources"], "predicted") > 0
                && number(&plan["latency_sources"], "roofline") > 0
        );
        plans.push(folder.text(name));
    }
    assert_eq!(plans[0], plans[1]);
    assert!(plans[0].contains("\"predicted\""));
    folder.json(&["check", "a.plan.json"]);
    number(
        &folder.json(&["simulate", "job.graph.json", "--predictor", "1.predictor.json"]),
        "iteration_ns",
    );

    folder
        .write("few.csv", folder.text("relu.csv").lines().take(10).collect::<Vec<_>>().join("\n"));
    folder.refuses(
        2,
        &["few.csv", "20 shapes", "--sweep"],
        &["train", "few.csv", "-o", "x.predictor.json"],
    );
    folder.refuses(
        2,
        &["relu.csv", "neap train"],
        &["plan", "job.graph.json", "--predictor", "relu.csv"],
    );
    folder.refuses(
        2,
        &["absent"],
        &["plan", "job.graph.json", "--predictor", "absent.predictor.json"],
    );
}

#[test]
fn a_measured_device_is_a_device() {
    let folder = Folder::new();
    // Without optimisation this takes a while: once, for both forms of the answer.
    let measured = folder.json(&["device", "measure", "--name", "desk", "-o", "desk.device.json"]);
    assert_eq!(measured["device"]["name"], "desk");
    assert!(
        measured["link"]
            .as_array()
            .is_some_and(|l| l.len() >= 4 && l.iter().any(|r| r["loaded"] == true))
    );
    let shown = folder.json(&["device", "show", "desk.device.json"]);
    assert_eq!(shown, measured["device"]);
    folder.import("tiny_cnn-adam.et.json.gz", &[]);
    let plan =
        folder.json(&["plan", "job.graph.json", "--budget", "80%", "--device", "desk.device.json"]);
    assert_eq!(plan["device"], "desk");
    folder.refuses(2, &["abacus"], &["device", "measure", "--device", "abacus"]);
}

#[test]
fn a_replanned_run_computes_the_same() {
    let folder = Folder::new();
    folder.import("tiny_gpt2-adamw.et.json.gz", &[]);
    folder.json(&["profile", "job.graph.json", "--repeats", "2", "-o", "host.csv"]);
    folder.json(&[
        "plan",
        "job.graph.json",
        "--budget",
        "60%",
        "--latencies",
        "host.csv",
        "--no-recompute",
        "-o",
        "job.plan.json",
    ]);
    let plain = folder.json(&["run", "job.graph.json", "--iterations", "9"]);
    assert_eq!(plain["changes"], Value::Null);
    // Operators that a busy machine slows down stay below this threshold: a plan made for them
    // may have no copies, or not be ready before the run ends.
    let run = folder.json(&[
        "run",
        "job.plan.json",
        "--iterations",
        "9",
        "--throttle-link",
        "0.001@3",
        "--replan",
        "--replan-threshold",
        "9",
    ]);
    assert_eq!(run["checksum"], plain["checksum"]);
    assert_eq!(run["losses"], plain["losses"]);
    assert_eq!(run["iterations_ns"].as_array().map(Vec::len), Some(9));
    let changes = run["changes"].as_array().unwrap();
    let throttled = changes.iter().find(|c| {
        c["h2d_per_mille"].as_u64() > Some(10_000) || c["d2h_per_mille"].as_u64() > Some(10_000)
    });
    let throttled = throttled.unwrap_or_else(|| panic!("the slow link is not seen: {changes:?}"));
    assert!(number(throttled, "seen_after_iteration") >= 3);
    folder.refuses(2, &["--replan", "without a plan"], &["run", "job.graph.json", "--replan"]);
    folder.refuses(2, &["--replan"], &["run", "job.plan.json", "--replan-threshold", "0.5"]);
    folder.refuses(2, &["@N"], &["run", "job.plan.json", "--throttle-link", "0.5@x"]);
    folder.refuses(2, &["cuda"], &["profile", "job.graph.json", "--on", "cuda"]);
    folder.refuses(
        2,
        &["x.csv"],
        &["run", &fixture("tiny_cnn-adam.et.json.gz"), "--latencies-out", "no/x.csv"],
    );
}
