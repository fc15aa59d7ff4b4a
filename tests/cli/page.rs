//! `--html`: the page's numbers are those of `--json`, and no name of an input becomes markup.
//! `python/tests/test_html.py` looks at the pages in a browser.

use serde_json::{Value, json};

use crate::cli::folder::{Folder, fixture, number};

const HOSTILE: &str = "</script><script>alert(1)</script><img src=x onerror=alert(2)>";

/// The data in a page, which must be the only thing in it that an input decides.
fn data(html: &str) -> Value {
    assert_eq!(html.matches("<script").count(), 2);
    assert_eq!(html.matches("</script>").count(), 2);
    assert!(!html.contains("<img"));
    let (_, after) = html.split_once("id=\"data\">").unwrap();
    serde_json::from_str(after.split_once("</script>").unwrap().0).unwrap()
}

/// Runs a command with `--html`; what it printed must be in the page as its report.
fn shown(folder: &Folder, arguments: &[&str]) -> Value {
    let said = folder.json(&[arguments, &["--html", "page.html"]].concat());
    let page = data(&folder.text("page.html"));
    assert_eq!(page["report"], said);
    assert_eq!(page["command"], format!("neap {}", arguments[0]));
    page
}

/// The values of a column of differences.
fn summed(differences: &Value) -> Vec<i64> {
    let all = differences.as_array().unwrap().iter().map(|d| d.as_i64().unwrap());
    all.scan(0, |sum, d| Some(std::mem::replace(sum, *sum + d) + d)).collect()
}

fn peak<'a>(chart: &'a Value, name: &str) -> &'a Value {
    let peaks = chart["peaks"].as_array().unwrap();
    peaks.iter().find(|p| p["name"] == name).unwrap_or_else(|| panic!("{chart:#}"))
}

/// The highest value that blocks of a chart add up to.
fn highest(blocks: &Value) -> i64 {
    let (from, bytes) = (summed(&blocks["from"]), blocks["bytes"].as_array().unwrap());
    let lives = blocks["life"].as_array().unwrap().iter().map(|l| l.as_i64().unwrap());
    let mut changes = Vec::new();
    for ((from, life), bytes) in from.into_iter().zip(lives).zip(bytes) {
        let bytes = bytes.as_i64().unwrap();
        changes.push((from, bytes));
        if life > 0 {
            changes.push((from + life - 1, -bytes));
        }
    }
    changes.sort_unstable();
    let after = changes.iter().scan(0, |sum, (_, change)| {
        *sum += change;
        Some(*sum)
    });
    after.max().unwrap()
}

#[test]
fn a_replay_shows_every_block_and_its_peaks() {
    let folder = Folder::new();
    let page = shown(&folder, &["replay", &fixture("allocator/default.csv.gz")]);
    let (chart, report) = (&page["views"][0]["charts"][0], &page["report"]);
    assert_eq!(peak(chart, "allocated")["value"], report["peak_allocated_bytes"]);
    let reserved = peak(chart, "reserved");
    assert_eq!(reserved["value"], report["peak_reserved_bytes"]);
    assert_eq!(reserved["at"], report["peak_event"]);
    assert_eq!(highest(&chart["blocks"]) as u64, number(report, "peak_allocated_bytes"));
    assert_eq!(number(chart, "end"), number(report, "events"));
}

#[test]
fn a_snapshot_shows_the_lines_that_allocated() {
    let folder = Folder::new();
    let file = fixture("snapshots/tiny_cnn-adam-empty_cache.pickle.gz");
    let page = shown(&folder, &["replay", &file]);
    let blocks = &page["views"][0]["charts"][0]["blocks"];
    let labels = blocks["labels"].as_array().unwrap();
    let label = labels.iter().position(|l| l["line"] == "capture.py:111 (iteration)").unwrap();
    let of = blocks["label"].as_array().unwrap().iter().filter(|l| **l == json!(label));
    assert_eq!(of.count(), 56);
    // A file without requests is no reason to fail.
    folder.write("none.csv", "op,id,bytes,stream\n");
    let page = shown(&folder, &["replay", "none.csv"]);
    assert_eq!(page["views"][0]["charts"][0]["peaks"], json!([]));
}

#[test]
fn an_estimate_shows_its_blocks_and_where_it_fits() {
    let folder = Folder::new();
    let page =
        shown(&folder, &["estimate", &fixture("traces/tiny_cnn-adam-8-32-start.profile.json.gz")]);
    let (chart, report) = (&page["views"][0]["charts"][0], &page["report"]);
    for kind in ["allocated", "reserved"] {
        assert_eq!(peak(chart, kind)["value"], report[format!("peak_{kind}_bytes")]);
    }
    let labels = chart["blocks"]["labels"].as_array().unwrap();
    assert!(labels.iter().any(|l| l["name"] == "aten::conv2d" && l["module"] != Value::Null));
    let rows = page["views"][1]["tables"][0]["rows"].as_array().unwrap();
    let verdicts = report["verdicts"].as_array().unwrap();
    assert_eq!(rows.len(), verdicts.len());
    for (row, verdict) in rows.iter().zip(verdicts) {
        assert_eq!((&row[0], &row[1]), (&verdict["device"], &verdict["available_bytes"]));
        let spare = row[1].as_i64().unwrap() - row[2].as_i64().unwrap();
        assert_eq!(spare, verdict["spare_bytes"].as_i64().unwrap());
    }
}

/// A folder with a job and its plan; the job's first tensor has a hostile name.
fn planned() -> (Folder, String) {
    let folder = Folder::new();
    folder.import("tiny_gpt2-adamw.et.json.gz", &[]);
    let mut graph: Value = serde_json::from_str(&folder.text("job.graph.json")).unwrap();
    let name = graph["tensors"][0]["name"].as_str().unwrap().to_owned();
    let quoted = json!(name).to_string();
    let text = graph.to_string().replace(&quoted, &json!(HOSTILE).to_string());
    graph = serde_json::from_str(&text).unwrap();
    graph["name"] = HOSTILE.into();
    folder.write("job.graph.json", graph.to_string());
    folder.json(&["plan", "job.graph.json", "--budget", "60%", "-o", "job.plan.json"]);
    (folder, name)
}

#[test]
fn a_plan_is_shown_beside_the_iteration_without_it() {
    let (folder, _) = planned();
    let page = shown(&folder, &["simulate", "job.plan.json"]);
    assert!(page["title"].as_str().unwrap().contains(HOSTILE));
    let (view, report) = (&page["views"][0], &page["report"]);
    let chart = &view["charts"][0];
    for (line, key) in [("without a plan", "unplanned_peak_bytes"), ("with the plan", "peak_bytes")]
    {
        assert_eq!(peak(chart, line)["value"], report[key], "{line}");
    }
    assert_eq!(chart["limits"][0], json!({ "name": "budget", "value": report["budget_bytes"] }));
    let spans = |lane: usize| chart["lanes"][lane]["spans"].as_array().unwrap().iter();
    let lost: u64 = spans(0)
        .filter(|s| s["kind"] == "lost")
        .map(|s| number(s, "until") - number(s, "from"))
        .sum();
    let waited = ["swap_in_stall_ns", "swap_out_stall_ns", "tail_stall_ns"];
    assert_eq!(lost, waited.iter().map(|key| number(report, key)).sum::<u64>());
    let ends = |lane| spans(lane).map(|s| number(s, "until")).max().unwrap();
    assert_eq!(ends(0), number(report, "iteration_ns"));
    assert!(spans(1).all(|s| s["kind"] == "out") && spans(1).next().is_some());

    let page = shown(&folder, &["explain", "job.plan.json"]);
    let view = &page["views"][0];
    assert_eq!(peak(&view["charts"][0], "with the plan")["value"], page["report"]["peak_bytes"]);
    let rows = view["tables"].as_array().unwrap().last().unwrap()["rows"].as_array().unwrap();
    for (row, tensor) in rows.iter().zip(page["report"]["tensors"].as_array().unwrap()) {
        assert_eq!((&row[0], &row[2]), (&tensor["tensor"], &tensor["bytes"]));
        assert!(!row[5].as_str().unwrap().is_empty());
    }
    // A job without a plan has one curve.
    let page = shown(&folder, &["simulate", "job.graph.json", "--device", "a6000"]);
    let chart = &page["views"][0]["charts"][0];
    assert_eq!(chart["lines"], json!(["without a plan"]));
    assert_eq!(peak(chart, "without a plan")["value"], page["report"]["peak_bytes"]);
}

#[test]
fn hostile_names_reach_the_page_as_texts() {
    let (folder, name) = planned();
    let page = shown(&folder, &["explain", "job.plan.json", HOSTILE]);
    let text = page["views"][0].to_string();
    assert!(text.contains("alert(1)") && !text.contains(&format!("\"{name}\"")));
    folder.write(
        "jobs.csv",
        format!(
            "job,persistent_bytes,ephemeral_bytes,submit_s,duration_s\n{HOSTILE},1GiB,1GiB,0,10\n"
        ),
    );
    let page = shown(&folder, &["share", "jobs.csv"]);
    assert!(page["views"][1]["tables"][0]["rows"][0][0] == HOSTILE);
}

#[test]
fn jobs_are_shown_for_every_policy() {
    let folder = Folder::new();
    let memory = fixture("share/memory.csv");
    let page = shown(&folder, &["share", &fixture("share/jobs.csv"), "--memory", &memory]);
    let (views, report) = (page["views"].as_array().unwrap(), &page["report"]);
    let policies = report["policies"].as_array().unwrap();
    assert_eq!(views.len(), 1 + policies.len());
    for (view, policy) in views[1..].iter().zip(policies) {
        assert_eq!(view["name"], policy["policy"]);
        let rows = view["tables"][0]["rows"].as_array().unwrap();
        assert_eq!(rows.len() as u64, number(report, "jobs"));
        let ends = rows.iter().map(|row| row[6].as_i64().unwrap());
        let last = ends.max().unwrap() as f64 / 1e9;
        assert_eq!(last, view["charts"][0]["end"].as_f64().unwrap() / 1e9);
        let waited: i64 = rows.iter().map(|row| row[4].as_i64().unwrap()).sum();
        let mean = policy["mean_admission_s"].as_f64().unwrap();
        assert!((waited as f64 / 1e9 / rows.len() as f64 - mean).abs() < 1e-6, "{policy}");
        // On the device at once: as many as there are rows of spans.
        let lanes = view["charts"][0]["lanes"].as_array().unwrap().len() as u64;
        assert_eq!(peak(&view["charts"][1], "on the device")["value"], lanes);
    }
}

#[test]
fn a_page_is_written_whole_or_not_at_all() {
    let folder = Folder::new();
    folder.write("x.csv", "op,id,bytes,stream\na,0,512,0\nz,0,512,0\n");
    folder.refuses(2, &["x.csv"], &["replay", "x.csv", "--html", "page.html"]);
    folder.refuses(2, &["x.csv", "read by this command"], &["replay", "x.csv", "--html", "x.csv"]);
    let both = ["replay", "x.csv", "--html", "a", "--plot", "a"];
    folder.refuses(2, &["named as an output twice"], &both);
}
