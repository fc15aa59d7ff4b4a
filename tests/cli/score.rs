//! `neap score` over folders of pairs: what is printed, written and refused.

use serde_json::Value;

use crate::cli::folder::{Folder, fixture, number};

const NAME: &str = "tiny_cnn-adam-8-32-start";

/// A pair called `name` in a folder `pairs`.
fn put(folder: &Folder, name: &str) {
    let _ = std::fs::create_dir(folder.path("pairs"));
    for ending in ["profile.json.gz", "truth.json", "truth.events.csv.gz"] {
        std::fs::copy(
            fixture(&format!("traces/{NAME}.{ending}")),
            folder.path(&format!("pairs/{name}.{ending}")),
        )
        .unwrap();
    }
}

#[test]
fn a_pair_is_scored() {
    let folder = Folder::new();
    put(&folder, "b-adam-8-32-start");
    put(&folder, "a-sgd-8-32-backward");
    let object = folder.json(&["score", "pairs", "--csv", "out.csv", "--plot", "out.svg"]);
    let jobs = object["jobs"].as_array().unwrap();
    assert_eq!(
        jobs.iter().map(|j| j["name"].as_str().unwrap()).collect::<Vec<_>>(),
        ["a-sgd-8-32-backward", "b-adam-8-32-start"]
    );
    for job in jobs {
        assert_eq!(job["model"], "tiny_cnn");
        assert_eq!(number(job, "peak_reserved_bytes"), 73_400_320);
        assert_eq!(number(job, "peak_allocated_bytes"), 71_247_872);
        for key in ["reserved_error", "allocated_error"] {
            assert!(job[key].as_f64().unwrap().abs() < 0.01, "{key}: {job:#}");
        }
        let runs = job["runs"].as_array().unwrap();
        assert_eq!(
            runs.iter().map(|r| r["device"].as_str().unwrap()).collect::<Vec<_>>(),
            ["rtx4060", "rtx3060", "a100-40g"]
        );
        assert!(runs.iter().all(|r| r["oom"] == false
            && r["predicted_oom"] == false
            && r["survives_estimate_and_margin"] == true));
        // What a device's context leaves, less the estimate.
        assert_eq!(
            number(&runs[0], "conserved_bytes"),
            (8 << 30) - (640 << 20) - number(job, "estimated_peak_reserved_bytes")
        );
    }
    assert_eq!(object["fate"]["runs"], 6);
    assert_eq!(object["fate"]["failure_with_margin"], 0.0);
    let names = |key: &str| {
        object[key].as_array().unwrap().iter().map(|g| g["name"].clone()).collect::<Vec<Value>>()
    };
    assert_eq!(names("optimizers"), ["adam", "sgd"]);
    assert_eq!(names("zero_grad"), ["backward", "start"]);
    assert_eq!(folder.text("out.csv").lines().count(), 3);
    assert!(folder.text("out.svg").contains("xMem, published"));
}

#[test]
fn the_table_is_the_same_every_time_and_labels_what_is_published() {
    let folder = Folder::new();
    for name in ["c", "a", "b"] {
        put(&folder, name);
    }
    let first = folder.neap(&["score", "pairs"]);
    assert_eq!(first.code, Some(0), "{}", first.stderr);
    assert_eq!(first.stdout, folder.neap(&["score", "pairs"]).stdout);
    for word in ["published: LLMem", "they used capped truth and NVML", "0/3"] {
        assert!(first.stdout.contains(word), "{word}: {}", first.stdout);
    }
}

#[test]
fn files_without_partners_are_named_and_missing_events_leave_failures_open() {
    let folder = Folder::new();
    put(&folder, "whole");
    put(&folder, "bare");
    std::fs::remove_file(folder.path("pairs/bare.truth.events.csv.gz")).unwrap();
    folder.write("pairs/alone.truth.json", "{}");
    let answer = folder.neap(&["score", "pairs", "--json"]);
    assert_eq!(answer.code, Some(0), "{}", answer.stderr);
    assert!(
        answer.stderr.contains("alone.profile.json")
            && answer.stderr.contains("bare.truth.events.csv"),
        "{}",
        answer.stderr
    );
    let object: Value = serde_json::from_str(&answer.stdout).unwrap();
    assert_eq!(object["jobs"].as_array().unwrap().len(), 2);
    assert_eq!(object["fate"]["runs"], 3);
}

#[test]
fn another_configuration_replays_the_truth_too() {
    let folder = Folder::new();
    put(&folder, "x");
    let job = folder.json(&["score", "pairs", "--alloc-conf", "expandable_segments:True"])["jobs"]
        [0]
    .clone();
    assert_ne!(number(&job, "peak_reserved_bytes"), 73_400_320);
    assert_eq!(job["reserved_error"], 0.0, "{job:#}");
    std::fs::remove_file(folder.path("pairs/x.truth.events.csv.gz")).unwrap();
    folder.refuses(
        2,
        &["x.truth.json", "--alloc-conf"],
        &["score", "pairs", "--alloc-conf", "expandable_segments:True"],
    );
}

#[test]
fn verdicts_can_be_no_on_devices_of_any_size() {
    let folder = Folder::new();
    put(&folder, "x");
    // The job reserves 70 MiB.
    let sizes = ["score", "pairs", "--devices", "64MiB,80MiB,rtx4060", "--csv", "out.csv"];
    let object = folder.json(&sizes);
    let runs = object["jobs"][0]["runs"].as_array().unwrap();
    let of = |key: &str| runs.iter().map(|run| run[key].clone()).collect::<Vec<_>>();
    assert_eq!(of("device"), ["64MiB", "80MiB", "rtx4060"]);
    assert_eq!((of("oom")[0].clone(), of("predicted_oom")[0].clone()), (true.into(), true.into()));
    assert_eq!(
        (of("oom")[1].clone(), object["fate"]["failure"].clone()),
        (false.into(), 0.0.into())
    );
    // Rightly turned away, it leaves the whole device; a size has no context.
    let conserved = of("conserved_bytes");
    assert_eq!((&conserved[0], &conserved[1]), (&(64 << 20).into(), &(10 << 20).into()));
    assert!(object.get("fate_on_the_papers_devices").is_none());
    for wrong in ["0", "2PiB", "nothing-such"] {
        folder.refuses(2, &[wrong], &["score", "pairs", "--devices", wrong]);
    }
}

/// xMem's Eq. 2 and 3: the truth is the peak of the run that is capped at the estimate.
#[test]
fn the_capped_run_is_a_truth_of_its_own() {
    let folder = Folder::new();
    put(&folder, "x");
    let object = folder.json(&["score", "pairs", "--csv", "out.csv"]);
    let job = &object["jobs"][0];
    assert_eq!(number(job, "capped_peak_reserved_bytes"), 73_400_320);
    assert_eq!(
        (&job["capped_error"], &object["capped_error"]["worst"]),
        (&0.0.into(), &0.0.into())
    );
    let papers = &object["fate_on_the_papers_devices"];
    let available = |gib: i64| (gib << 30) - (640 << 20) - 73_400_320;
    assert_eq!(papers["conserved_bytes"], (available(8) + available(12)) / 2);
    let csv = folder.text("out.csv");
    let (heads, row) = csv.split_once('\n').unwrap();
    let at = |name: &str| heads.split(',').position(|head| head == name).unwrap();
    let cell = |name: &str| row.trim_end().split(',').nth(at(name)).unwrap();
    assert_eq!(cell("capped_peak_reserved_bytes"), "73400320");
    assert_eq!(
        cell("conserved_on_the_papers_devices_bytes"),
        papers["conserved_bytes"].to_string()
    );
    // Where the capped run dies there is no such truth, and the free run's counts.
    let object = folder.json(&["score", "pairs", "--rules", "xmem"]);
    let job = &object["jobs"][0];
    assert_eq!(job["capped_peak_reserved_bytes"], Value::Null);
    assert_eq!(job["capped_error"], job["reserved_error"]);
}

#[test]
fn the_originals_rules_know_no_workspaces() {
    let folder = Folder::new();
    put(&folder, "x");
    let object = folder.json(&["score", "pairs", "--rules", "xmem"]);
    assert!(object["jobs"][0]["reserved_error"].as_f64().unwrap() < -0.5, "{object:#}");
    assert_eq!(object["fate"]["failure"], 1.0);
    // No verdict is wrong and every capped run dies: as Eq. 7 is printed that costs the devices.
    let devices = -((8 << 30) + (12 << 30) + (40i64 << 30));
    assert_eq!(object["fate"]["conserved_bytes"], devices / 3);
    assert_eq!(object["fate"]["lenient_conserved_bytes"], 0);
}

#[test]
fn what_cannot_be_scored_is_refused() {
    let folder = Folder::new();
    std::fs::create_dir(folder.path("empty")).unwrap();
    folder.refuses(2, &["empty", "NAME.profile.json"], &["score", "empty"]);
    folder.refuses(2, &["nowhere"], &["score", "nowhere"]);
    put(&folder, "x");
    folder.refuses(
        2,
        &["--alloc-conf", "max_split_size_mb"],
        &["score", "pairs", "--alloc-conf", "splits:1"],
    );
    folder.refuses(2, &["host", "multiprocessors"], &["score", "pairs", "--device", "host"]);
    folder.refuses(2, &["abacus"], &["score", "pairs", "--rules", "abacus"]);
    folder.refuses(2, &["nowhere"], &["score", "pairs", "--csv", "nowhere/x.csv"]);
    for (truth, word) in [
        ("[]", "peaks"),
        ("{\"peaks\":[]}", "empty"),
        ("{\"peaks\":[{\"peak_reserved_bytes\":-1,\"peak_allocated_bytes\":1}]}", "truth"),
    ] {
        folder.write("pairs/x.truth.json", truth);
        folder.refuses(2, &["x.truth.json", word], &["score", "pairs"]);
    }
    put(&folder, "x");
    folder.write("pairs/x.truth.events.csv.gz", "op,id\n");
    folder.refuses(2, &["x.truth.events.csv"], &["score", "pairs"]);
    put(&folder, "x");
    folder.write("pairs/x.profile.json.gz", "a day at the sea");
    folder.refuses(2, &["x.profile.json"], &["score", "pairs"]);
}
