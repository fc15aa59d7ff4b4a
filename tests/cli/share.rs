//! `neap share`: tables, files, verdicts and refusals, on a small trace of our own.

use serde_json::Value;

use crate::cli::folder::{Folder, fixture, number};

const HEAD: &str = "job,persistent_bytes,ephemeral_bytes,submit_s,duration_s\n";

fn share(folder: &Folder, more: &[&str]) -> Value {
    folder.json(
        &[&["share", &fixture("share/jobs.csv"), "--memory", &fixture("share/memory.csv")], more]
            .concat(),
    )
}

fn figure(all: &Value, policy: &str, key: &str) -> f64 {
    let entry = all["policies"].as_array().unwrap().iter().find(|p| p["policy"] == policy).unwrap();
    entry[key].as_f64().unwrap()
}

#[test]
fn every_policy_is_told_and_ours_ends_jobs_soonest() {
    let folder = Folder::new();
    let all = share(&folder, &["--csv", "rows.csv", "--plot", "ends.svg"]);
    assert_eq!(number(&all, "capacity_bytes"), 16 << 30);
    for policy in ["fifo", "srtf", "pack", "fair"] {
        // Shortest-first may leave one job to end alone: half a per cent of the makespan on this trace.
        for (key, limit) in [("makespan_s", 1.005), ("mean_completion_s", 1.0)] {
            assert!(
                figure(&all, "neap", key) <= figure(&all, policy, key) * limit,
                "{policy} {key}: {all:#}"
            );
        }
    }
    assert_eq!(folder.text("rows.csv").lines().count(), 1 + 5 * 7);
    let mut plots: Vec<String> =
        ["fifo", "srtf", "pack", "fair", "neap"].iter().map(|p| format!("ends.{p}.svg")).collect();
    plots.extend(["ends.svg".to_owned(), "rows.csv".to_owned()]);
    plots.sort();
    assert_eq!(folder.files(), plots);
    assert!(
        folder.text("ends.svg").contains("share of jobs")
            && folder.text("ends.neap.svg").contains("2nd lane")
    );
    let again = Folder::new();
    assert_eq!(share(&again, &["--csv", "rows.csv", "--plot", "ends.svg"]), all);
    assert_eq!(again.text("rows.csv"), folder.text("rows.csv"));
    assert_eq!(again.text("ends.neap.svg"), folder.text("ends.neap.svg"));
}

#[test]
fn memory_over_time_and_a_timeline_are_of_one_run() {
    let folder = Folder::new();
    let files = ["--curve", "memory.csv", "--timeline", "jobs.json"];
    let all = share(&folder, &[&files[..], &["--policies", "pack"]].concat());
    let curve = folder.text("memory.csv");
    let mut lines = curve.lines();
    let heads = "time_ns,persistent_bytes,lanes_bytes,lanes,running,waiting";
    assert_eq!(lines.next(), Some(heads));
    let rows: Vec<Vec<u64>> =
        lines.map(|line| line.split(',').map(|cell| cell.parse().unwrap()).collect()).collect();
    // The mean over the makespan is that of the curve.
    let held = |pair: &[Vec<u64>]| {
        u128::from(pair[0][1] + pair[0][2]) * u128::from(pair[1][0] - pair[0][0])
    };
    let (first, last) = (rows[0][0], rows[rows.len() - 1][0]);
    let mean = rows.windows(2).map(held).sum::<u128>() / u128::from(last - first);
    assert_eq!(mean, u128::from(number(&all["policies"][0], "mean_memory_bytes")));
    let most = rows.iter().map(|row| row[1] + row[2]).max();
    assert_eq!(most, Some(number(&all["policies"][0], "peak_memory_bytes")));
    let timeline: Value = serde_json::from_str(&folder.text("jobs.json")).unwrap();
    let events = timeline["traceEvents"].as_array().unwrap();
    let named = |name: &str| events.iter().filter(|e| e["name"] == name).count();
    assert!(named("runs") >= 7 && named("waits") > 0 && named("memory") == rows.len());
    folder.refuses(
        2,
        &["--curve", "--policies pack"],
        &[
            "share",
            &fixture("share/jobs.csv"),
            "--memory",
            &fixture("share/memory.csv"),
            "--curve",
            "again.csv",
        ],
    );
}

#[test]
fn each_mode_has_its_lanes() {
    let folder = Folder::new();
    let of = |mode| share(&folder, &["--mode", mode, "--check"]);
    let (neap, paper, released) = (of("neap"), of("paper"), of("as-released"));
    for all in [&neap, &paper, &released] {
        for entry in all["policies"].as_array().unwrap() {
            assert_eq!((&entry["harm"], number(entry, "done")), (&Value::Null, 7), "{entry:#}");
            let policy = entry["policy"].as_str().unwrap();
            let [admission, queuing] =
                ["mean_admission_s", "mean_queuing_s"].map(|key| figure(all, policy, key));
            assert!(admission <= queuing, "{entry:#}");
        }
    }
    // Several lanes fill each other's gaps; the released scripts have one.
    let end = |all| figure(all, "fair", "makespan_s");
    let alone = figure(&released, "fifo", "makespan_s");
    assert!(end(&paper) < 0.9 * end(&neap) && (end(&released) - alone).abs() < 0.001);
    // A job that waits in its lane for shorter ones was admitted long before.
    assert!(
        figure(&neap, "srtf", "mean_admission_s") < figure(&neap, "srtf", "mean_queuing_s"),
        "{neap:#}"
    );
}

#[test]
fn a_wait_is_explained() {
    let folder = Folder::new();
    let all = share(&folder, &["--policies", "fifo,neap", "--explain", "check"]);
    let why = |at: usize| all["policies"][at]["explained"]["why"].as_array().unwrap().clone();
    assert!(why(0)[0]["what"].as_str().unwrap().contains("waits"), "{all:#}");
    assert!(why(0).iter().any(|w| w["what"] == "runs"));
    let text = folder
        .neap(&[
            "share",
            &fixture("share/jobs.csv"),
            "--memory",
            &fixture("share/memory.csv"),
            "--explain",
            "check",
        ])
        .stdout;
    assert!(text.contains("check under neap: done"), "{text}");
    folder.refuses(
        2,
        &["--explain", "nobody"],
        &[
            "share",
            &fixture("share/jobs.csv"),
            "--memory",
            &fixture("share/memory.csv"),
            "--explain",
            "nobody",
        ],
    );
}

#[test]
fn graphs_are_jobs_too() {
    let folder = Folder::new();
    std::fs::copy(fixture("mlp.graph.json"), folder.path("mlp.graph.json")).unwrap();
    folder.write("jobs.csv", "job,graph,submit_s,iterations,iteration_s\na,mlp.graph.json,0,100,0.01\nb,mlp.graph.json,0,100,0.01\n");
    let all = folder.json(&["share", "jobs.csv", "--policies", "fifo"]);
    assert_eq!(figure(&all, "fifo", "makespan_s"), 2.0);
    let small = folder.neap(&["share", "jobs.csv", "--policies", "fifo", "--memory-bytes", "1KiB"]);
    assert_eq!(small.code, Some(1), "{small:?}");
    assert!(small.stdout.contains("never fits"));
    // Estimates that may be a third too low ask for that much more.
    folder.write("near.csv", format!("{HEAD}a,6GiB,8GiB,0,1\n"));
    assert_eq!(folder.neap(&["share", "near.csv"]).code, Some(0));
    assert_eq!(folder.neap(&["share", "near.csv", "--margin", "34"]).code, Some(1));
}

#[test]
fn estimates_are_jobs_with_their_errors() {
    let folder = Folder::new();
    let estimate =
        folder.json(&["estimate", &fixture("traces/tiny_cnn-adam-8-32-start.profile.json.gz")]);
    folder.write("e.json", estimate.to_string());
    let wanted = number(&estimate, "peak_reserved_bytes") + number(&estimate, "margin_bytes");
    folder.write("jobs.csv", "job,estimate,submit_s,iterations,iteration_s\na,e.json,0,100,0.01\n");
    let fits = |bytes: u64, more: &[&str]| {
        let bytes = bytes.to_string();
        folder
            .neap(
                &[&["share", "jobs.csv", "--policies", "fifo", "--memory-bytes", &bytes], more]
                    .concat(),
            )
            .code
    };
    // Its own margin, whatever --margin says of the others.
    assert_eq!((fits(wanted, &["--margin", "50"]), fits(wanted - 1, &[])), (Some(0), Some(1)));
    folder.write(
        "jobs.csv",
        "job,estimate,submit_s,iterations,iteration_s,error_percent\na,e.json,0,100,0.01,0\n",
    );
    let peak = number(&estimate, "peak_reserved_bytes");
    assert_eq!((fits(peak, &[]), fits(peak - 1, &[])), (Some(0), Some(1)));
    for (wrong, told) in [
        ("{}", "is not an estimate"),
        ("[1", "is not an estimate"),
        (
            r#"{"peak_reserved_bytes":1,"margin_bytes":0,"at_peak":{"parameters_bytes":2,"buffers_bytes":0,"optimizer_states_bytes":0,"workspaces_bytes":0}}"#,
            "stays across",
        ),
    ] {
        folder.write("e.json", wrong);
        folder.refuses(
            2,
            &["jobs.csv", "line 2", "e.json", told, "neap estimate --json"],
            &["share", "jobs.csv"],
        );
    }
}

#[test]
fn who_outgrows_its_admission_is_told() {
    let folder = Folder::new();
    let head = "job,persistent_bytes,ephemeral_bytes,submit_s,duration_s,utilisation,actual_ephemeral_bytes,grows_after\n";
    folder.write("jobs.csv", format!("{head}a,2GiB,3GiB,0,10,0.1,6GiB,3\nb,2GiB,7GiB,0,20,0.1,,\nc,1GiB,1GiB,0,5,0.1,99GiB,\n"));
    let answer =
        folder.neap(&["share", "jobs.csv", "--policies", "pack", "--check", "--explain", "a"]);
    assert_eq!(answer.code, Some(1), "{answer:?}");
    for words in [
        "pack: c: outgrew the device",
        "pack: 2 jobs outgrew what they were admitted with, 1 of them had to leave and wait",
        "changes of memory proved safe",
        "needs 2.0 GiB + 6.0 GiB where it was admitted with 2.0 GiB + 3.0 GiB: there is no room, so it leaves and waits with its true need",
    ] {
        assert!(answer.stdout.contains(words), "{words}: {}", answer.stdout);
    }
    let all: Value = serde_json::from_str(
        &folder.neap(&["share", "jobs.csv", "--policies", "pack", "--check", "--json"]).stdout,
    )
    .unwrap();
    let entry = &all["policies"][0];
    assert_eq!(
        (&entry["outgrew_the_device"][0], &entry["harm"], number(entry, "left_to_grow")),
        (&"c".into(), &Value::Null, 1),
        "{entry:#}"
    );
    assert!(number(entry, "proved_changes") > 0);
}

#[test]
fn odd_jobs_get_a_verdict() {
    let folder = Folder::new();
    folder.write(
        "jobs.csv",
        format!("{HEAD}late,1GiB,1GiB,5,10\nempty,1GiB,1GiB,0,0\nnever,1GiB,99GiB,0,1\n"),
    );
    let answer = folder.neap(&["share", "jobs.csv", "--json"]);
    assert_eq!(answer.code, Some(1), "{answer:?}");
    assert!(answer.stderr.contains("not in order of submission"), "{}", answer.stderr);
    let all: Value = serde_json::from_str(&answer.stdout).unwrap();
    for entry in all["policies"].as_array().unwrap() {
        assert_eq!(
            (&entry["never_fits"][0], &entry["nothing_to_do"][0], &entry["done"]),
            (&"never".into(), &"empty".into(), &2.into()),
            "{entry:#}"
        );
    }
}

#[test]
fn inference_has_latencies_and_needs_devices() {
    let folder = Folder::new();
    folder.write(
        "jobs.csv",
        format!("{},rate_per_s,iteration_s\na,1GiB,8GiB,0,60,20,0.01\nb,1GiB,8GiB,0,60,20,0.01\nt,1GiB,2GiB,0,30,,\n", HEAD.trim_end()),
    );
    let lanes = folder.json(&["share", "jobs.csv", "--policies", "neap"]);
    assert_eq!(lanes["policies"][0]["inference"]["devices"], 1, "{lanes:#}");
    let mean = lanes["policies"][0]["inference"]["mean_s"].as_f64().unwrap();
    assert!((0.01..0.1).contains(&mean), "{mean}");
    let mps = folder.json(&["share", "jobs.csv", "--policies", "pack", "--mechanism", "mps"]);
    assert_eq!(mps["policies"][0]["inference"]["devices"], 2, "{mps:#}");
}

#[test]
fn what_is_malformed_is_refused() {
    let folder = Folder::new();
    for (text, words) in [
        ("", ["jobs.csv", "job"]),
        ("job,submit_s\na\n", ["line 2", "cells"]),
        ("a day at the sea", ["line 1", "columns"]),
        (&format!("{HEAD}a,1,1,0,1\na,1,1,0,1\n"), ["line 3", "twice"]),
        (&format!("{HEAD}a,1,1,0,-1\n"), ["line 2", "duration_s"]),
        (&format!("{HEAD}a,1,1,1e9,1\n"), ["line 2", "submit_s"]),
        ("job,workload,submit_s,duration_s\na,vgg,0,1\n", ["line 2", "--memory"]),
    ] {
        folder.write("jobs.csv", text);
        folder.refuses(2, &words, &["share", "jobs.csv", "--csv", "x.csv", "--plot", "x.svg"]);
    }
    folder.write("jobs.csv", format!("{HEAD}a,1,1,0,1\n"));
    folder.refuses(2, &["lottery"], &["share", "jobs.csv", "--policies", "lottery"]);
    folder.refuses(2, &["memory-bytes"], &["share", "jobs.csv", "--memory-bytes", "0"]);
    folder.refuses(2, &["nowhere"], &["share", "jobs.csv", "--memory", "nowhere.csv"]);
    folder.refuses(
        2,
        &["jobs.csv", "read by this command"],
        &["share", "jobs.csv", "--csv", "jobs.csv"],
    );
    folder.refuses(2, &["turn"], &["share", "jobs.csv", "--turn", "0"]);
}

/// Item 16: more work than the device can do is said, and by how much.
#[test]
fn demand_beyond_the_device_is_said() {
    let folder = Folder::new();
    let rows = |gap: u64| (0..12).map(move |n| format!("j{n},1GiB,1GiB,{},60\n", n * gap));
    folder.write("over.csv", format!("{HEAD}{}", rows(40).collect::<String>()));
    let over = folder.neap(&["share", "over.csv"]);
    assert!(over.stderr.contains("150 % of what the device can do"), "{over:?}");
    folder.write("under.csv", format!("{HEAD}{}", rows(80).collect::<String>()));
    let under = folder.neap(&["share", "under.csv"]);
    assert!(!under.stderr.contains("of what the device can do"), "{under:?}");
}
