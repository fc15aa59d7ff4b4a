//! Plans that were worse than others at the same budget, and switches that did not bind.

use crate::cli::folder::{Folder, number};

#[test]
fn the_least_budget_is_met_and_every_larger_one_too() {
    let folder = Folder::new();
    folder.import("tiny_cnn-adam.et.json.gz", &[]);
    for switches in [&[][..], &["--no-swap"], &["--no-recompute"]] {
        let plan = |budget: &str| {
            folder.json(&[&["plan", "job.graph.json", "--budget", budget], switches].concat())
        };
        let least = plan("min");
        let (bytes, peak) =
            (number(&least, "budget_bytes"), number(&least, "unplanned_peak_bytes"));
        for eighth in 0..8 {
            let budget = bytes + (peak - bytes) * eighth / 8;
            assert!(number(&plan(&format!("{budget}B")), "arena_bytes") <= budget);
        }
    }
}

#[test]
fn a_refusal_gives_the_least_budget() {
    let folder = Folder::new();
    folder.import("tiny_cnn-adam.et.json.gz", &[]);
    let least = number(
        &folder.json(&["plan", "job.graph.json", "--budget", "min", "--no-swap"]),
        "budget_bytes",
    );
    let below = format!("{}B", least - 512);
    let plan = ["plan", "job.graph.json", "--no-swap", "--budget", below.as_str()];
    folder.refuses(1, &[&format!("({least} bytes)")], &plan);
}

#[test]
fn more_effort_never_makes_a_plan_slower() {
    let folder = Folder::new();
    folder.import("tiny_gpt2-adamw.et.json.gz", &[]);
    let plan = ["plan", "job.graph.json", "--device", "rtx4090", "--budget", "40%"];
    let time = |effort: &str| {
        number(&folder.json(&[&plan[..], &["--effort", effort]].concat()), "iteration_ns")
    };
    // A search with that much effort alone ends at a plan that is 3 % slower.
    assert!(time("64") <= time("16"));
}

#[test]
fn a_switch_that_the_planner_has_not_is_refused() {
    let folder = Folder::new();
    folder.import("tiny_cnn-adam.et.json.gz", &[]);
    let plan = ["plan", "job.graph.json", "--budget", "80%", "--planner"];
    for (planner, switch) in [
        ("capuchin", "--no-swap"),
        ("vdnn-all", "--no-recompute"),
        ("checkpoint", "--min-swap=1MiB"),
        ("tensile", "--effort=3"),
        ("neap", "--no-stop-rule"),
    ] {
        let name = switch.split('=').next().unwrap_or(switch);
        folder.refuses(2, &[name, planner], &[&plan[..], &[planner, switch]].concat());
    }
    let swaps = folder.json(&[&plan[..], &["tensile", "--no-swap"]].concat());
    assert_eq!(number(&swaps, "swap_outs"), 0);
}
