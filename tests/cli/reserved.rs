//! `--allocator pytorch`: what a framework's allocator would reserve for a job or a plan.

use serde_json::Value;

use crate::cli::folder::{Folder, number};

/// Plans without the longest searches, which take minutes: what the allocator must reserve does not
/// depend on them.
const QUICK: [&str; 6] =
    ["--effort", "0", "--without", "guide,twice", "--no-reorder", "--no-split"];

#[test]
fn a_recorded_iteration_reserves_what_pytorch_reserved() {
    let folder = Folder::new();
    folder.import("resnet18-adam.et.json.gz", &["--as-recorded"]);
    // The largest of three iterations of the same job, on a device of Hopper's class.
    for (conf, truth) in [
        ("", 322_961_408),
        ("expandable_segments:True", 316_669_952),
        ("max_split_size_mb:64", 322_961_408),
        ("roundup_power2_divisions:8", 322_961_408),
    ] {
        let said = folder.json(&[
            "simulate",
            "job.graph.json",
            "--allocator",
            "pytorch",
            "--alloc-conf",
            conf,
            "--device",
            "h100",
        ]);
        let reserved = number(&said, "peak_reserved_bytes");
        assert!(reserved.abs_diff(truth) * 100 <= truth, "{conf}: {reserved} of {truth}");
        assert_eq!(said["allocator_settled"], true);
        assert!(
            number(&said, "peak_allocated_bytes") <= reserved
                && number(&said, "fragmentation_bytes") < reserved
        );
        assert_eq!(number(&said, "segments") == 0, conf.starts_with("expandable"));
    }
}

#[test]
fn the_jobs_of_the_shared_truth_reserve_what_pytorch_reserved() {
    let folder = std::env::var_os("NEAP_TRUTH").map_or_else(
        || std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/truth"),
        std::path::PathBuf::from,
    );
    let Ok(files) = std::fs::read_dir(folder.join("graphs")) else {
        println!("skipped: {} is not there", folder.display());
        return;
    };
    let names: Vec<String> = files.map(|f| f.unwrap().file_name().into_string().unwrap()).collect();
    let jobs: Vec<&str> = names.iter().filter_map(|n| n.strip_suffix(".et.json.gz")).collect();
    assert!(!jobs.is_empty());
    for job in jobs {
        let truth: Value = serde_json::from_slice(
            &std::fs::read(folder.join(format!("graphs/{job}.truth.json"))).unwrap(),
        )
        .unwrap();
        let truth = truth["peaks"]
            .as_array()
            .unwrap()
            .iter()
            .map(|p| number(p, "peak_reserved_bytes"))
            .max()
            .unwrap();
        let room = Folder::new();
        let trace = folder.join(format!("graphs/{job}.et.json.gz"));
        room.json(&["import", trace.to_str().unwrap(), "--as-recorded", "-o", "job.graph.json"]);
        let said = room.json(&["simulate", "job.graph.json", "--allocator", "pytorch"]);
        let reserved = number(&said, "peak_reserved_bytes");
        println!("{job}: {:.4} of PyTorch's", reserved as f64 / truth as f64);
        assert!(reserved.abs_diff(truth) * 20 <= truth, "{job}: {reserved} of {truth}");
    }
}

#[test]
fn a_budget_can_bind_what_is_reserved() {
    let folder = Folder::new();
    folder.import("resnet18-adam.et.json.gz", &[]);
    let pytorch = ["--allocator", "pytorch", "--device", "a6000"];
    let unplanned = number(
        &folder.json(&[&["simulate", "job.graph.json"], &pytorch[..]].concat()),
        "peak_reserved_bytes",
    );
    for (share, conf) in [(90, ""), (75, ""), (75, "expandable_segments:True")] {
        let budget = (unplanned * share / 100).to_string();
        let plan = [
            &["plan", "job.graph.json", "--budget", &budget, "-o", "p.plan.json"][..],
            &["--alloc-conf", conf],
            &pytorch,
            if share == 90 { &[] } else { &QUICK },
        ]
        .concat();
        let planned = folder.json(&plan);
        let reserved = number(&planned, "peak_reserved_bytes");
        assert!(reserved <= number(&planned, "budget_bytes"), "{reserved} of {budget}");
        assert!(
            number(&planned, "arena_bytes") < reserved,
            "the arena alone would have been allowed more"
        );
        let simulated = folder.json(&[
            "simulate",
            "p.plan.json",
            "--allocator",
            "pytorch",
            "--alloc-conf",
            conf,
        ]);
        for key in [
            "peak_reserved_bytes",
            "peak_allocated_bytes",
            "segments",
            "fragmentation_bytes",
            "arena_bytes",
        ] {
            if planned[key].is_number() {
                assert_eq!(simulated[key], planned[key], "{key}");
            }
        }
        let text: Value = serde_json::from_str(&folder.text("p.plan.json")).unwrap();
        assert_eq!(
            (&text["options"]["allocator"], &text["options"]["alloc-conf"]),
            (&"pytorch".into(), &conf.into())
        );
    }
    let least = folder
        .json(&[&["plan", "job.graph.json", "--budget", "min"][..], &pytorch, &QUICK].concat());
    assert_eq!(number(&least, "budget_bytes"), number(&least, "peak_reserved_bytes"));
    let below = (number(&least, "budget_bytes") / 2).to_string();
    let refused = [
        &["plan", "job.graph.json", "--budget", &below, "-o", "no.plan.json"][..],
        &pytorch,
        &QUICK,
    ]
    .concat();
    folder.refuses(1, &["budget", "lowest reached"], &refused);
}

/// A plan may ask for one block before all others: without segments that grow, what follows is cut
/// out of it.
#[test]
fn the_first_block_that_a_plan_records_is_counted() {
    let folder = Folder::new();
    folder.import("resnet18-adam.et.json.gz", &[]);
    folder.json(&["plan", "job.graph.json", "--budget", "80%", "-o", "p.plan.json"]);
    let simulated = |conf| {
        let of = ["simulate", "p.plan.json", "--allocator", "pytorch", "--alloc-conf", conf];
        folder.json(&of)
    };
    let before = ["", "expandable_segments:True"].map(simulated);
    let mut plan: Value = serde_json::from_str(&folder.text("p.plan.json")).unwrap();
    let first = 512 << 20;
    plan["options"]["first-block"] = first.to_string().into();
    std::fs::write(folder.path("p.plan.json"), plan.to_string()).unwrap();
    let after = simulated("");
    let reserved = number(&after, "peak_reserved_bytes");
    assert!(reserved >= first && reserved - first < 64 << 20, "{reserved}");
    assert!(number(&after, "segments") < number(&before[0], "segments"));
    assert!(number(&after, "peak_allocated_bytes") < first, "the block itself holds nothing");
    assert_eq!(simulated("expandable_segments:True"), before[1]);
    plan["options"]["first-block"] = "much".into();
    std::fs::write(folder.path("p.plan.json"), plan.to_string()).unwrap();
    folder.refuses(
        2,
        &["p.plan.json: options.first-block", "`much` is not a size"],
        &["simulate", "p.plan.json"],
    );
}

/// What polishing and mending change of a plan still binds what the allocator reserves.
#[test]
fn a_slow_plan_for_the_allocator_keeps_to_the_budget() {
    let folder = Folder::new();
    folder.import("resnet18-adam.et.json.gz", &[]);
    let plan = ["plan", "job.graph.json", "--device", "a6000", "--budget", "60%"];
    let pytorch = ["--allocator", "pytorch", "-o", "p.plan.json"];
    let times = [&["--without=mend,polish"][..], &["--without=mend"], &["--without=polish"], &[]]
        .map(|off| {
            let made = folder.json(&[&plan[..], &pytorch, &QUICK, off].concat());
            let [reserved, budget] =
                ["peak_reserved_bytes", "budget_bytes"].map(|of| number(&made, of));
            assert!(reserved <= budget, "{off:?}: {reserved} of {budget}");
            let [time, alone] =
                ["iteration_ns", "unplanned_iteration_ns"].map(|of| number(&made, of));
            assert!(time > alone + alone / 64, "{off:?}: nothing to polish: {time} of {alone}");
            time
        });
    assert!(times[1] <= times[0] && times[3] <= times[2], "{times:?}");
}

#[test]
fn it_is_told_and_drawn() {
    let folder = Folder::new();
    folder.import("tiny_cnn-adam.et.json.gz", &[]);
    let said = folder.neap(&[
        "simulate",
        "job.graph.json",
        "--allocator",
        "pytorch",
        "--library-workspace",
        "1MiB",
        "--plot",
        "p.svg",
    ]);
    assert_eq!(said.code, Some(0), "{said:?}");
    assert!(said.stdout.contains("PyTorch's allocator reserves"), "{}", said.stdout);
    assert!(
        folder.text("p.svg").contains("reserved, ")
            && folder.text("p.svg").contains("allocated, peak")
    );
    let more = |bytes: &str| {
        let said = folder.json(&[
            "simulate",
            "job.graph.json",
            "--allocator",
            "pytorch",
            "--library-workspace",
            bytes,
        ]);
        number(&said, "peak_allocated_bytes")
    };
    assert_eq!(
        more("4MiB") - more("0"),
        8 << 20,
        "one for the forward and one for the backward thread"
    );
}

#[test]
fn settings_without_the_allocator_or_without_meaning_are_bad_input() {
    let folder = Folder::new();
    folder.import("tiny_cnn-adam.et.json.gz", &[]);
    for command in ["plan", "simulate"] {
        folder.refuses(
            2,
            &["--allocator pytorch"],
            &[command, "job.graph.json", "--alloc-conf", "expandable_segments:True"],
        );
        folder.refuses(
            2,
            &["no option `x`"],
            &[command, "job.graph.json", "--allocator", "pytorch", "--alloc-conf", "x:1"],
        );
        folder.refuses(
            2,
            &["arena", "pytorch"],
            &[command, "job.graph.json", "--allocator", "jax"],
        );
    }
}

/// Item 8: a plan's arena beside what PyTorch's own allocator would hold for it.
#[test]
fn what_pytorch_would_reserve_stands_beside_the_arena() {
    let folder = Folder::new();
    folder.import("resnet18-adam.et.json.gz", &[]);
    let plan =
        ["plan", "job.graph.json", "--device", "a6000", "--budget", "80%", "-o", "p.plan.json"];
    let planned = folder.json(&plan);
    let said = folder.neap(&plan);
    assert!(said.stdout.contains("cuBLAS workspaces included"), "{}", said.stdout);
    let counted = folder.json(&["simulate", "p.plan.json", "--allocator", "pytorch"]);
    for of in [&planned, &folder.json(&["simulate", "p.plan.json"])] {
        for key in ["reserved_bytes", "allocated_bytes"] {
            assert_eq!(of["pytorch"][key], counted[format!("peak_{key}")], "{key}");
        }
    }
    // The blocks are the arena's and two workspaces.
    assert!(number(&planned["pytorch"], "allocated_bytes") > number(&planned, "peak_bytes"));
}

/// A snapshot of a simulated job replays to what the job reserves.
#[test]
fn a_simulated_job_is_written_as_a_snapshot() {
    let folder = Folder::new();
    folder.import("tiny_cnn-adam.et.json.gz", &[]);
    for conf in ["", "expandable_segments:True", "max_split_size_mb:32"] {
        let simulated = folder.json(&[
            "simulate",
            "job.graph.json",
            "--allocator",
            "pytorch",
            "--alloc-conf",
            conf,
            "--snapshot",
            "s.pickle",
        ]);
        let replayed = folder.json(&["replay", "s.pickle", "--check"]);
        assert_eq!(replayed["matches"], true, "{conf}: {replayed}");
        for key in ["peak_reserved_bytes", "peak_allocated_bytes"] {
            assert_eq!(number(&replayed, key), number(&simulated, key), "{conf} {key}");
        }
    }
    let bytes = std::fs::read(folder.path("s.pickle")).unwrap();
    for word in ["device_traces", "segments", "allocator_settings", "parameters", "forward"] {
        assert!(bytes.windows(word.len()).any(|w| w == word.as_bytes()), "{word}");
    }
    folder.refuses(
        2,
        &["job.graph.json"],
        &["simulate", "job.graph.json", "--snapshot", "job.graph.json"],
    );
}
