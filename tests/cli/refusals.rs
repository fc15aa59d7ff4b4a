//! Bad input and answers that are no: one clear error, the right exit code, no file.

use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};

use crate::cli::folder::{Folder, fixture};

fn planned(folder: &Folder) {
    folder.import("tiny_cnn-adam.et.json.gz", &[]);
    folder.json(&["plan", "job.graph.json", "--budget", "80%", "-o", "job.plan.json"]);
}

#[test]
fn a_budget_below_the_floor_is_refused_with_the_floor_and_what_blocks() {
    let folder = Folder::new();
    folder.import("tiny_cnn-adam.et.json.gz", &[]);
    let words = ["floor", "1576448 bytes", "lowest reached", "cudnn_batch_norm_backward"];
    folder.refuses(
        1,
        &words,
        &["plan", "job.graph.json", "--budget", "50%", "-o", "job.plan.json"],
    );
    folder.refuses(
        1,
        &words,
        &["plan", "job.graph.json", "--budget", "1KiB", "-o", "job.plan.json"],
    );
}

#[test]
fn a_budget_for_which_pinned_memory_is_short_is_refused_with_that() {
    let folder = Folder::new();
    folder.import("tiny_cnn-adam.et.json.gz", &[]);
    let mut device = folder.json(&["device", "show", "a6000"]);
    device["pinned_bytes"] = json!(128 << 10);
    folder.write("small.device.json", device.to_string());
    let plan = ["plan", "job.graph.json", "--budget", "80%", "--no-recompute", "--device"];
    let words = ["128.0 KiB of the 128.0 KiB of pinned memory", "`pinned_bytes`"];
    folder.refuses(1, &words, &[&plan[..], &["small.device.json"]].concat());
    folder.json(&[&plan[..], &["a6000"]].concat());
}

#[test]
fn budgets_that_mean_nothing_are_bad_input() {
    let folder = Folder::new();
    folder.import("tiny_cnn-adam.et.json.gz", &[]);
    for budget in ["0", "0%", "900GiB", "-5%", "many", ""] {
        folder.refuses(
            2,
            &["budget"],
            &["plan", "job.graph.json", &format!("--budget={budget}"), "-o", "job.plan.json"],
        );
    }
    let clamped =
        folder.neap(&["plan", "job.graph.json", "--budget", "10000%", "--device", "host"]);
    assert_eq!(clamped.code, Some(0), "a share above the device is clamped: {}", clamped.stderr);
}

#[test]
fn unknown_words_are_bad_input() {
    let folder = Folder::new();
    planned(&folder);
    folder.refuses(2, &["abacus"], &["plan", "job.graph.json", "--device", "abacus"]);
    folder.refuses(2, &["--sideways"], &["plan", "job.graph.json", "--sideways"]);
    folder.refuses(2, &["frobnicate"], &["frobnicate"]);
    folder.refuses(2, &["throttle-link"], &["run", "job.plan.json", "--throttle-link", "2"]);
    folder.refuses(2, &["noise"], &["simulate", "job.plan.json", "--noise", "1"]);
}

#[test]
fn broken_traces_are_refused() {
    let folder = Folder::new();
    let trace = std::fs::read(fixture("tiny_cnn-adam.et.json.gz")).unwrap();
    let mut plain = Vec::new();
    std::io::Read::read_to_end(&mut flate2::read::MultiGzDecoder::new(&trace[..]), &mut plain)
        .unwrap();
    folder.write("cut.et.json.gz", &trace[..trace.len() / 2]);
    folder.write("cut.et.json", &plain[..plain.len() / 2]);
    folder.write("empty.et.json", "");
    folder.write("text.et.json", "a day at the sea\n");
    folder.write("other.et.json", "{\"traceEvents\": []}\n");
    let text = String::from_utf8(plain).unwrap();
    folder.write("schema.et.json", text.replace("1.1.1-chakra", "9.9.9-chakra"));
    for name in [
        "cut.et.json.gz",
        "cut.et.json",
        "empty.et.json",
        "text.et.json",
        "other.et.json",
        "schema.et.json",
        "absent.et.json",
    ] {
        folder.refuses(2, &[name], &["import", name, "-o", "job.graph.json"]);
    }
    folder.refuses(2, &["directory"], &["import", ".", "-o", "job.graph.json"]);
}

#[test]
fn a_small_file_that_expands_to_four_gibibytes_is_refused() {
    let folder = Folder::new();
    let mut member = GzEncoder::new(Vec::new(), Compression::best());
    member.write_all(&vec![b'['; 64 << 20]).unwrap();
    folder.write("bomb.et.json.gz", member.finish().unwrap().repeat(64));
    for arguments in [
        ["import", "bomb.et.json.gz"],
        ["inspect", "bomb.et.json.gz"],
        ["check", "bomb.et.json.gz"],
    ] {
        folder.refuses(2, &["bomb.et.json.gz"], &arguments);
    }
}

#[test]
fn outputs_that_cannot_be_written_are_refused() {
    let folder = Folder::new();
    planned(&folder);
    let trace = fixture("tiny_cnn-adam.et.json.gz");
    for output in ["nowhere/x.json", "."] {
        folder.refuses(2, &[output, "written"], &["import", &trace, "-o", output]);
        folder.refuses(2, &[output, "written"], &["plan", "job.graph.json", "-o", output]);
        folder.refuses(2, &[output, "written"], &["simulate", "job.plan.json", "--plot", output]);
        folder.refuses(
            2,
            &[output, "written"],
            &["simulate", "job.plan.json", "--timeline", output],
        );
        folder.refuses(2, &[output], &["run", "job.plan.json", "--latencies-out", output]);
        folder.refuses(2, &[output], &["run", "job.plan.json", "--save", output]);
    }
}

#[test]
fn broken_graphs_and_plans_are_refused() {
    let folder = Folder::new();
    planned(&folder);
    let graph = std::fs::read_to_string(fixture("mlp.graph.json")).unwrap();
    folder.write("version.graph.json", graph.replacen("\"version\":1", "\"version\":3", 1));
    folder.write("field.graph.json", graph.replacen("\"loss\"", "\"los\"", 1));
    folder.write(
        "tensor.graph.json",
        graph.replacen("{\"tensor\":\"w1\"}", "{\"tensor\":\"w9\"}", 1),
    );
    let cycle = graph.replacen("{\"tensor\":\"x\"}", "{\"tensor\":\"d.z1\"}", 1);
    folder.write("cycle.graph.json", &cycle);
    for name in [
        "version.graph.json",
        "field.graph.json",
        "tensor.graph.json",
        "cycle.graph.json",
        "job.plan.json",
    ] {
        folder.refuses(2, &[name], &["inspect", name]);
        folder.refuses(2, &[name], &["plan", name, "-o", "x.plan.json"]);
    }
    folder.refuses(
        2,
        &["cycle", "linear1", "gelu1.backward"],
        &["plan", "cycle.graph.json", "-o", "x.plan.json"],
    );
    folder.refuses(2, &["job.graph.json", "neap.plan"], &["check", "job.graph.json"]);
}

#[test]
fn a_plan_for_another_graph_is_bad_input() {
    let folder = Folder::new();
    planned(&folder);
    folder.import("tiny_cnn-adam.et.json.gz", &["--updates", "early"]);
    for command in ["check", "simulate", "run"] {
        folder.refuses(2, &["job.graph.json"], &[command, "job.plan.json"]);
    }
}

#[test]
fn a_damaged_plan_fails_the_check_and_neither_simulates_nor_runs() {
    let folder = Folder::new();
    planned(&folder);
    let plan: Value = serde_json::from_str(&folder.text("job.plan.json")).unwrap();
    let mut bad = plan.clone();
    bad["jobs"][0]["events"].as_array_mut().unwrap().retain(|e| e["event"] != "swap_in");
    assert_ne!(bad, plan, "the plan swaps nothing");
    folder.write("bad.plan.json", bad.to_string());
    let checked = folder.neap(&["check", "bad.plan.json"]);
    assert_eq!(checked.code, Some(1), "{checked:?}");
    for command in ["check", "simulate", "run"] {
        folder.refuses(1, &[], &[command, "bad.plan.json"]);
    }
    let mut far = plan;
    far["jobs"][0]["placements"][0]["offset_bytes"] = json!(1_u64 << 40);
    folder.write("far.plan.json", far.to_string());
    folder.refuses(1, &[], &["check", "far.plan.json"]);
}
