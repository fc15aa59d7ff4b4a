//! Planners against each other: one table, its CSV and its drawing.

use neap::plan::Method;
use serde_json::Value;

use crate::cli::folder::{Folder, fixture, number};

const PLANNERS: [&str; 5] = ["vdnn-all", "vdnn-conv", "checkpoint", "capuchin", "tensile"];

fn rows(of: &Value) -> &Vec<Value> {
    of["rows"].as_array().unwrap()
}

#[test]
fn every_planner_at_every_budget_on_every_device() {
    let folder = Folder::new();
    folder.import("tiny_cnn-adam.et.json.gz", &[]);
    let names = PLANNERS.join(",");
    let arguments = [
        "compare",
        "job.graph.json",
        "--planners",
        &names,
        "--device",
        "a6000",
        "--device",
        "rtx2080ti",
    ];
    let compared = folder.json(
        &[&arguments[..], &["--budget", "90%,75%", "--csv", "a.csv", "--plot", "a.svg"]].concat(),
    );
    let all = rows(&compared);
    assert_eq!(all.len(), 2 * 2 * PLANNERS.len());
    for (index, row) in all.iter().enumerate() {
        assert_eq!(row["planner"], PLANNERS[index % 5]);
        assert_eq!(row["device"], ["a6000", "rtx2080ti"][index / 10]);
        assert_eq!(row["budget"], ["90%", "75%"][index / 5 % 2]);
        if row["fits"] == false {
            assert!(number(row, "lowest_bytes") > number(row, "budget_bytes"), "{row}");
            continue;
        }
        assert!(number(row, "peak_bytes") <= number(row, "budget_bytes"), "{row}");
        assert!(number(row, "peak_bytes") >= number(row, "bound_bytes"), "{row}");
        assert!(number(row, "iteration_ns") >= number(row, "bound_ns"), "{row}");
        let (msr, eor, cbr) = (
            row["msr"].as_f64().unwrap(),
            row["eor"].as_f64().unwrap(),
            row["cbr"].as_f64().unwrap(),
        );
        assert!(
            row["msr_no_free"].as_f64().unwrap() > msr && (cbr - msr / eor).abs() < 1e-4,
            "{row}"
        );
        let swaps_only = row["planner"].as_str().unwrap().starts_with("vdnn");
        assert!(!swaps_only || number(row, "recomputed_bytes") == 0, "{row}");
        assert!(row["planner"] != "checkpoint" || number(row, "moved_bytes") == 0, "{row}");
    }
    for planner in ["vdnn-all", "checkpoint", "capuchin", "tensile"] {
        let work = |r: &&Value| {
            r["planner"] == planner
                && r["fits"] == true
                && (number(r, "moved_bytes") + number(r, "recomputed_bytes") > 0)
        };
        assert!(all.iter().any(|r| work(&r)), "{planner} does nothing");
    }
    // The table that `plan` makes, and the same twice.
    let plan =
        ["plan", "job.graph.json", "--device", "a6000", "--budget", "90%", "--planner", "capuchin"];
    let plan = folder.json(&plan);
    for key in ["peak_bytes", "iteration_ns", "arena_bytes", "bound_ns"] {
        assert_eq!(number(&plan, key), number(&all[3], key), "{key}");
    }
    let again = folder.json(
        &[&arguments[..], &["--budget", "90%,75%", "--csv", "b.csv", "--plot", "b.svg"]].concat(),
    );
    assert_eq!(compared, again);
    assert_eq!(
        (folder.text("a.csv"), folder.text("a.svg")),
        (folder.text("b.csv"), folder.text("b.svg"))
    );
    let csv = folder.text("a.csv");
    assert_eq!(csv.lines().count(), 1 + all.len());
    assert!(csv.starts_with("device,planner,budget,budget_bytes,fits,"), "{csv}");
    let line = csv.lines().nth(4).unwrap();
    assert!(
        line.starts_with("a6000,capuchin,90%,")
            && line.contains(&format!(",{},", number(&all[3], "peak_bytes"))),
        "{line}"
    );
    for part in ["vdnn-conv", "tensile", "on a6000", "on rtx2080ti", "bound"] {
        assert!(folder.text("a.svg").contains(part), "{part}");
    }
}

#[test]
fn the_answer_is_no_where_no_planner_meets_a_budget() {
    let folder = Folder::new();
    folder.import("tiny_cnn-adam.et.json.gz", &[]);
    let answer = folder.neap(&[
        "compare",
        "job.graph.json",
        "--planners",
        "vdnn-all,checkpoint",
        "--budget",
        "90%,10KiB",
    ]);
    assert_eq!(answer.code, Some(1), "{answer:?}");
    assert!(answer.stdout.contains("no: "), "{answer:?}");
    let answer = folder.neap(&[
        "compare",
        "job.graph.json",
        "--planners",
        "checkpoint,tensile",
        "--budget",
        "min",
    ]);
    assert_eq!(answer.code, Some(0), "{answer:?}");
}

#[test]
fn a_budget_cut_down_to_another_is_left_out_and_timing_is_asked_for() {
    let folder = Folder::new();
    std::fs::copy(fixture("mlp.graph.json"), folder.path("mlp.graph.json")).unwrap();
    let compared = folder.json(&[
        "compare",
        "mlp.graph.json",
        "--planners",
        "tensile",
        "--budget",
        "80%,80.000%",
        "--timing",
    ]);
    assert_eq!(rows(&compared).len(), 1);
    assert!(compared["rows"][0]["planning_s"].as_f64().is_some());
    folder.refuses(
        2,
        &["invalid value 'best'", "vdnn-all"],
        &["compare", "mlp.graph.json", "--planners", "best"],
    );
    folder.refuses(
        2,
        &["named as an output twice"],
        &["compare", "mlp.graph.json", "--csv", "x.csv", "--plot", "x.csv"],
    );
    folder.refuses(
        2,
        &["is read by this command too"],
        &["compare", "mlp.graph.json", "--csv", "mlp.graph.json"],
    );
}

#[test]
fn several_jobs_are_planned_together_by_every_planner() {
    let folder = Folder::new();
    folder.import("tiny_cnn-adam.et.json.gz", &[]);
    let arguments =
        ["compare", "job.graph.json", "job.graph.json", "--device", "a6000", "--budget", "90%,75%"];
    let compared = folder.json(&[&arguments[..], &["--csv", "a.csv", "--plot", "a.svg"]].concat());
    let all = rows(&compared);
    let planners = Method::all().len();
    assert_eq!(all.len(), 2 * planners);
    for (index, row) in all.iter().enumerate() {
        assert_eq!(row["budget"], ["90%", "75%"][index / planners]);
        if row["fits"] == false {
            assert!(number(row, "lowest_bytes") > number(row, "budget_bytes"), "{row}");
            continue;
        }
        assert!(number(row, "arena_bytes") <= number(row, "budget_bytes"), "{row}");
        assert!(number(row, "seen_peak_bytes") <= number(row, "peak_bytes"), "{row}");
        assert_eq!(number(row, "overlapping_copies"), 0, "{row}");
        let (msr, eor, cbr) = (
            row["msr"].as_f64().unwrap(),
            row["eor"].as_f64().unwrap(),
            row["cbr"].as_f64().unwrap(),
        );
        assert!((cbr - msr / eor).abs() < 1e-4, "{row}");
        assert!(
            number(row, "moved_bytes") == 0 || row["h2d_busy"].as_f64().unwrap() > 0.0,
            "{row}"
        );
        // The best of them at its budget.
        let ours = all
            .iter()
            .find(|r| r["planner"] == "neap" && r["budget"] == row["budget"])
            .unwrap_or_else(|| panic!("{row}"));
        assert!(
            ours["fits"] == true && number(ours, "round_ns") <= number(row, "round_ns"),
            "{row} {ours}"
        );
    }
    // The plan that `plan` makes, by whichever planner, and the same twice.
    for row in &all[..planners] {
        let name = row["planner"].as_str().unwrap();
        let answer = folder.neap(&[
            "--json",
            "plan",
            "job.graph.json",
            "job.graph.json",
            "--device",
            "a6000",
            "--budget",
            "90%",
            "--planner",
            name,
        ]);
        let planned: Value = serde_json::from_str(&answer.stdout).unwrap();
        assert_eq!(planned["fits"], row["fits"], "{name}");
        assert_eq!(
            (&planned["arena_bytes"], &planned["peak_bytes"]),
            (&row["arena_bytes"], &row["peak_bytes"]),
            "{name}"
        );
    }
    let again = folder.json(&[&arguments[..], &["--csv", "b.csv", "--plot", "b.svg"]].concat());
    assert_eq!(compared, again);
    assert_eq!(
        (folder.text("a.csv"), folder.text("a.svg")),
        (folder.text("b.csv"), folder.text("b.svg"))
    );
    assert!(
        folder.text("a.csv").starts_with("device,planner,budget,budget_bytes,fits,")
            && folder.text("a.svg").contains("2 jobs on a6000")
    );
}

#[test]
fn a_share_leaves_out_planners_without_a_limit() {
    let folder = Folder::new();
    folder.import("tiny_cnn-adam.et.json.gz", &[]);
    let answer = folder.neap(&[
        "--json",
        "compare",
        "job.graph.json@0.5",
        "job.graph.json",
        "--device",
        "a6000",
        "--budget",
        "90%",
    ]);
    assert_eq!(answer.code, Some(0), "{}", answer.stderr);
    let compared: Value = serde_json::from_str(&answer.stdout).unwrap();
    let names: Vec<&str> =
        rows(&compared).iter().map(|row| row["planner"].as_str().unwrap()).collect();
    assert_eq!(names, ["tensile", "neap"]);
    assert!(
        answer.stderr.contains("capuchin is left out")
            && answer.stderr.contains("has no limit on swapping"),
        "{}",
        answer.stderr
    );
    folder.refuses(
        2,
        &["none of them has a limit on swapping"],
        &["compare", "job.graph.json@0.5", "--planners", "capuchin,checkpoint"],
    );
    folder.refuses(
        2,
        &["is for one job"],
        &["compare", "job.graph.json", "job.graph.json", "--accounting", "paper"],
    );
}
