//! The papers' accounting, extra time by cause, other latencies than planned, and passive mode.

use serde_json::Value;

use crate::cli::folder::{Folder, fixture, number};

fn extra(of: &Value) -> i64 {
    let parts = ["recompute_ns", "swap_in_ns", "swap_out_ns", "tail_ns", "contention_ns"];
    parts.iter().map(|part| of["extra"][part].as_i64().unwrap()).sum()
}

fn added(of: &Value, unplanned: u64) -> i64 {
    i64::try_from(number(of, "iteration_ns")).unwrap() - i64::try_from(unplanned).unwrap()
}

#[test]
fn the_papers_accounting_is_a_second_reading_of_the_same_plan() {
    let folder = Folder::new();
    folder.import("tiny_cnn-adam.et.json.gz", &[]);
    let plan = |more: &[&str], file: &str| {
        let base = [
            "plan",
            "job.graph.json",
            "--device",
            "rtx2080ti",
            "--planner",
            "tensile",
            "--budget",
            "75%",
            "-o",
            file,
        ];
        folder.json(&[&base[..], more].concat())
    };
    let physical = plan(&[], "a.plan.json");
    let both = plan(&["--accounting", "paper"], "b.plan.json");
    assert!(physical["paper"].is_null());
    assert_eq!(folder.text("a.plan.json"), folder.text("b.plan.json"));
    let unplanned = number(&both, "unplanned_iteration_ns");
    let paper = &both["paper"];
    assert_eq!(&folder.json(&["simulate", "a.plan.json", "--accounting", "paper"])["paper"], paper);
    assert!(
        number(paper, "unplanned_peak_bytes") < number(&both, "unplanned_peak_bytes"),
        "{paper}"
    );
    assert!(number(paper, "peak_bytes") < number(&both, "peak_bytes"), "{paper}");
    assert_eq!(extra(paper), added(paper, unplanned), "{paper}");
    let simulated = folder.json(&["simulate", "a.plan.json"]);
    assert!(simulated["paper"].is_null());
    assert_eq!(extra(&simulated), added(&simulated, unplanned));
    let compared = [
        "compare",
        "job.graph.json",
        "--device",
        "rtx2080ti",
        "--planners",
        "tensile",
        "--budget",
        "75%",
    ];
    let compared =
        folder.json(&[&compared[..], &["--accounting", "paper", "--csv", "c.csv"]].concat());
    assert_eq!(&compared["rows"][0]["paper"], paper);
    let csv = folder.text("c.csv");
    let (header, row) = csv.split_once('\n').unwrap();
    let column = header.split(',').position(|c| c == "paper_extra_contention_ns").unwrap();
    assert_eq!(
        row.trim().split(',').nth(column).unwrap(),
        paper["extra"]["contention_ns"].to_string()
    );
    assert!(
        folder
            .neap(&["simulate", "a.plan.json", "--accounting", "paper"])
            .stdout
            .contains("by the papers' accounting: peak")
    );
}

#[test]
fn a_plan_runs_at_other_latencies_than_it_was_made_for() {
    let folder = Folder::new();
    folder.import("tiny_cnn-adam.et.json.gz", &[]);
    folder.json(&[
        "plan",
        "job.graph.json",
        "--device",
        "a6000",
        "--budget",
        "70%",
        "-o",
        "p.plan.json",
    ]);
    let nominal = folder.json(&["simulate", "p.plan.json", "--latencies-out", "l.csv"]);
    assert_eq!(folder.json(&["simulate", "p.plan.json", "--real", "l.csv"]), nominal);
    let (header, rows) =
        folder.text("l.csv").split_once('\n').map(|(h, r)| (h.to_owned(), r.to_owned())).unwrap();
    let [ns, key] = ["ns", "key"].map(|name| header.split(',').position(|c| c == name).unwrap());
    // Twice as long everywhere: the link has more time, and what no copy is waited for for takes twice as long.
    let mut writer = csv::Writer::from_writer(Vec::new());
    writer.write_record(["key", "ns"]).unwrap();
    let mut whole = csv::ReaderBuilder::new().has_headers(false).from_reader(rows.as_bytes());
    for row in whole.records().map(Result::unwrap) {
        writer
            .write_record([&row[key], &(row[ns].parse::<u64>().unwrap() * 2).to_string()])
            .unwrap();
    }
    folder.write("slow.csv", writer.into_inner().unwrap());
    let slow = folder.json(&["simulate", "p.plan.json", "--real", "slow.csv"]);
    assert_eq!(
        number(&slow, "unplanned_iteration_ns"),
        2 * number(&nominal, "unplanned_iteration_ns")
    );
    assert!(
        number(&slow, "iteration_ns") <= 2 * number(&nominal, "iteration_ns")
            && number(&slow, "iteration_ns") > number(&nominal, "iteration_ns")
    );
    folder.refuses(
        2,
        &["--real", "--latencies"],
        &["simulate", "job.graph.json", "--real", "slow.csv"],
    );
    folder.refuses(
        2,
        &["is read by this command too"],
        &["simulate", "p.plan.json", "--real", "l.csv", "--latencies-out", "l.csv"],
    );
}

#[test]
fn passive_mode_waits_for_every_copy() {
    let folder = Folder::new();
    folder.import("tiny_cnn-adam.et.json.gz", &[]);
    let at = |budget: &str| {
        folder.json(&["simulate", "job.graph.json", "--device", "a6000", "--passive", budget])
    };
    let roomy = at("200%");
    assert_eq!(
        (number(&roomy["passive"], "evictions"), &roomy["passive"]["iteration_ns"]),
        (0, &roomy["unplanned_iteration_ns"])
    );
    let tight = at("60%");
    let passive = &tight["passive"];
    assert!(
        number(passive, "evictions") > 0
            && number(passive, "peak_bytes") <= number(passive, "budget_bytes"),
        "{passive}"
    );
    let waited = number(passive, "swap_out_stall_ns") + number(passive, "swap_in_stall_ns");
    assert_eq!(number(passive, "iteration_ns"), number(&tight, "unplanned_iteration_ns") + waited);
    assert!(number(&at("min")["passive"], "iteration_ns") > number(passive, "iteration_ns"));
    let answer = folder.neap(&["simulate", "job.graph.json", "--passive", "1KiB"]);
    assert_eq!(answer.code, Some(1));
    assert!(answer.stderr.contains("at once") && answer.stdout.is_empty(), "{answer:?}");
    folder.json(&["plan", "job.graph.json", "-o", "p.plan.json"]);
    folder.refuses(2, &["--passive", "graph"], &["simulate", "p.plan.json", "--passive", "60%"]);
}

/// TENSILE's paper plans for a link that carries one tensor at a time, whichever way it goes
/// (§IV-C). What is planned for a link with two directions is late on such a link.
#[test]
fn a_plan_for_one_timetable_is_in_time_on_the_papers_link() {
    let folder = Folder::new();
    let in_time = |more: &[&str]| {
        let graph = fixture("mlp.graph.json");
        let base = ["plan", &graph, "--device", "rtx2080ti", "--planner", "tensile"];
        let least = ["--no-recompute", "--no-passive", "--budget", "min", "-o", "p.plan.json"];
        folder.json(&[&base[..], &least, more, &["--accounting", "paper"]].concat())
    };
    let (two, one) = (in_time(&[]), in_time(&["--no-duplex"]));
    let eor = |of: &Value| of["paper"]["eor"].as_f64().unwrap();
    assert!(eor(&two) > 1.01, "{two:#}");
    assert_eq!((eor(&one), extra(&one["paper"])), (1.0, 0), "{one:#}");
    assert!(one["paper"]["msr"].as_f64().unwrap() > 0.1, "{one:#}");
    folder.refuses(
        2,
        &["--no-duplex", "capuchin"],
        &["plan", &fixture("mlp.graph.json"), "--planner", "capuchin", "--no-duplex"],
    );
}
