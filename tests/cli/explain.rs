//! Why plans do what they do: every planner's plans, by what must add up.

use neap::plan::Method;
use serde_json::Value;

use crate::cli::folder::{Folder, number};

fn check(planner: &str, graph: &Value, plan: &Value, told: &Value) -> [usize; 3] {
    assert_eq!(number(told, "peak_bytes"), number(plan, "peak_bytes"), "{planner}");
    let tensors = told["tensors"].as_array().unwrap();
    assert_eq!(number(told, "tensors_at_peak"), tensors.len() as u64);
    let sum: u64 = tensors.iter().map(|t| number(t, "bytes")).sum();
    assert_eq!(
        sum + number(told, "workspace_at_peak_bytes"),
        number(told, "peak_bytes"),
        "{planner}"
    );
    let operators = graph["operators"].as_array().unwrap();
    let peak = operators.iter().find(|o| o["name"] == told["peak_operator"]).unwrap().to_string();
    let mut seen = [0; 3];
    for tensor in tensors {
        let name = &tensor["tensor"];
        if tensor["at_peak"] == "in_use" {
            assert!(peak.contains(&name.to_string()), "{planner}: {name} is not {peak}");
        }
        for gap in tensor["gaps"].as_array().unwrap() {
            let ways = ["keep", "swap", "recompute"];
            let chosen: Vec<&&str> =
                ways.iter().filter(|w| gap[**w]["verdict"] == "chosen").collect();
            assert_eq!(chosen, [&gap["plan"].as_str().unwrap()], "{planner}: {gap}");
            seen[ways.iter().position(|w| gap["plan"] == *w).unwrap()] += 1;
            for way in ways.iter().map(|w| &gap[*w]) {
                match way["verdict"].as_str().unwrap() {
                    "against" if !way["needed_ns"].is_null() => {
                        assert!(number(way, "needed_ns") > number(way, "available_ns"), "{gap}")
                    }
                    "against" => assert!(!way["because"].as_str().unwrap().is_empty()),
                    "possible" => assert!(number(way, "cost_ns") < 1 << 40),
                    other => assert_eq!(other, "chosen"),
                }
            }
            if gap["plan"] == "swap" {
                assert!(number(gap, "back_exposed_ns") <= number(gap, "back_ns"), "{gap}");
            }
            if gap["plan"] == "recompute" {
                assert!(
                    number(gap, "recompute_ns") > 0
                        && !gap["operators"].as_array().unwrap().is_empty(),
                    "{gap}"
                );
            }
        }
    }
    seen
}

#[test]
fn every_planners_plans_add_up() {
    let folder = Folder::new();
    folder.import("tiny_cnn-adam.et.json.gz", &[]);
    let graph: Value = serde_json::from_str(&folder.text("job.graph.json")).unwrap();
    for planner in Method::all().iter().map(Method::name) {
        let arguments = [
            "plan",
            "job.graph.json",
            "--device",
            "a6000",
            "--budget",
            "min",
            "--planner",
            planner,
        ];
        // The others have no such switch.
        let switch: &[&str] =
            if matches!(planner, "neap" | "tensile") { &["--min-swap", "512"] } else { &[] };
        let plan = folder.json(&[&arguments[..], switch, &["-o", "job.plan.json"]].concat());
        let told = folder.json(&["explain", "job.plan.json", "--top", "100000"]);
        let [kept, swapped, recomputed] = check(planner, &graph, &plan, &told);
        assert_eq!(told["planner"], planner);
        assert!(
            kept > 0
                && (planner != "checkpoint" || swapped == 0)
                && (!planner.starts_with("vdnn") || recomputed == 0)
        );
        assert!(planner != "neap" || swapped + recomputed > 0);
        let text = folder.neap(&["explain", "job.plan.json", "--top", "3"]);
        assert_eq!(text.code, Some(0), "{}", text.stderr);
        assert!(
            text.stdout.contains("at the peak") && text.stdout.contains(planner),
            "{}",
            text.stdout
        );
    }
}

#[test]
fn a_plan_without_events_keeps_everything() {
    let folder = Folder::new();
    folder.import("tiny_cnn-adam.et.json.gz", &[]);
    let graph: Value = serde_json::from_str(&folder.text("job.graph.json")).unwrap();
    let plan = folder.json(&["plan", "job.graph.json", "--budget", "200%", "-o", "job.plan.json"]);
    let told = folder.json(&["explain", "job.plan.json", "--top", "100000"]);
    let [_, swapped, recomputed] = check("none", &graph, &plan, &told);
    assert_eq!((swapped, recomputed), (0, 0));
}

#[test]
fn one_tensor_in_full_and_near_names() {
    let folder = Folder::new();
    folder.import("tiny_cnn-adam.et.json.gz", &[]);
    folder.json(&["plan", "job.graph.json", "--budget", "min", "-o", "job.plan.json"]);
    let told = folder.json(&["explain", "job.plan.json"]);
    let name = told["tensors"][0]["tensor"].as_str().unwrap().to_owned();
    let one = folder.json(&["explain", "job.plan.json", &name]);
    assert_eq!(one["tensors"], serde_json::json!([told["tensors"][0]]));
    let text = folder.neap(&["explain", "job.plan.json", &name]);
    assert!(
        text.stdout.contains(&format!("`{name}`")) && text.stdout.contains("on the device from"),
        "{}",
        text.stdout
    );
    let wrong = format!("{name}x");
    folder.refuses(
        2,
        &["no tensor is named", &wrong, &format!("`{name}`")],
        &["explain", "job.plan.json", &wrong],
    );
    folder.refuses(2, &["job.graph.json"], &["explain", "job.graph.json"]);
}
