//! Several jobs: one plan, side by side on one device, coming and going.

use crate::cli::folder::{Folder, fixture, number};

#[test]
fn two_jobs_get_one_plan_and_run_side_by_side() {
    let folder = Folder::new();
    folder.import("tiny_cnn-adam.et.json.gz", &[]);
    let mlp = fixture("mlp.graph.json");
    let plan = [
        "plan",
        "job.graph.json",
        &mlp,
        "job.graph.json",
        "--device",
        "a6000",
        "--budget",
        "60%",
        "-o",
        "all.plan.json",
    ];
    let planned = folder.json(&plan);
    assert!(number(&planned, "arena_bytes") <= number(&planned, "budget_bytes"));
    let jobs = planned["jobs"].as_array().unwrap();
    let arenas: u64 = jobs.iter().map(|job| number(job, "arena_bytes")).sum();
    assert_eq!((jobs.len(), arenas), (3, number(&planned, "arena_bytes")));
    let checked = folder.json(&["check", "all.plan.json"]);
    assert_eq!(number(&checked, "peak_bytes"), number(&planned, "peak_bytes"));

    let seen =
        folder.json(&["simulate", "all.plan.json", "--iterations", "3", "--plot", "all.svg"]);
    assert!(number(&seen, "peak_bytes") <= number(&planned, "peak_bytes"));
    for (job, alone) in seen["jobs"].as_array().unwrap().iter().zip(jobs) {
        assert_eq!(number(job, "alone_ns"), number(alone, "iteration_ns"));
        assert!(number(job, "iteration_ns") >= number(job, "alone_ns"), "{job}");
    }
    assert!(folder.text("all.svg").contains("3 jobs on a6000"));

    let two = folder.text("all.plan.json");
    folder.json(&plan);
    assert_eq!(two, folder.text("all.plan.json"), "not the same twice");
}

#[test]
fn two_jobs_share_bytes_and_wait_for_each_other() {
    let folder = Folder::new();
    let mlp = fixture("mlp.graph.json");
    let plan = ["plan", &mlp, &mlp, "--device", "a6000", "--budget", "32%"];
    // A sub-arena for each is too much, and with a window between them it is not.
    assert_eq!(folder.neap(&plan).code, Some(1));
    let planned = folder.json(&[&plan[..], &["--overlap", "-o", "two.plan.json"]].concat());
    let window = number(&planned, "window_bytes");
    assert!(
        window > 0 && number(&planned, "arena_bytes") <= number(&planned, "budget_bytes"),
        "{planned}"
    );
    assert_eq!(
        (&planned["fits_apart"], &planned["jobs"][0]["beside_apart_ns"]),
        (&false.into(), &serde_json::Value::Null)
    );
    let own: u64 =
        planned["jobs"].as_array().unwrap().iter().map(|job| number(job, "arena_bytes")).sum();
    assert_eq!(own + window, number(&planned, "arena_bytes"));
    let checked = folder.json(&["check", "two.plan.json"]);
    assert_eq!(
        (number(&checked, "window_bytes"), number(&checked, "peak_bytes")),
        (window, number(&planned, "peak_bytes"))
    );
    assert!(folder.neap(&["check", "two.plan.json"]).stdout.contains("; 2 jobs hold"));

    let seen = folder.json(&["simulate", "two.plan.json", "--iterations", "4"]);
    assert!(number(&seen, "peak_bytes") <= number(&planned, "arena_bytes"), "{seen}");
    assert_eq!(number(&seen, "window_bytes"), window);
    let waits: u64 =
        seen["jobs"].as_array().unwrap().iter().map(|job| number(job, "window_waits")).sum();
    let waited: u64 =
        seen["jobs"].as_array().unwrap().iter().map(|job| number(job, "window_wait_ns")).sum();
    assert!(waits > 0 && waited > 0, "{seen}");
    assert!(folder.neap(&["simulate", "two.plan.json"]).stdout.contains("held in turn:"));
    assert_eq!(folder.neap(&["diff", "two.plan.json", "two.plan.json"]).code, Some(0));

    // Another job's window.
    let text = folder.text("two.plan.json").replacen(
        &format!("\"bytes\":{window}"),
        &format!("\"bytes\":{}", window + 512),
        1,
    );
    folder.write("changed.plan.json", &text);
    let refused = folder.neap(&["check", "changed.plan.json"]);
    assert!(
        refused.code == Some(1) && refused.stdout.contains("the windows of job 0"),
        "{}",
        refused.stdout
    );
    let differs = folder.neap(&["diff", "two.plan.json", "changed.plan.json"]);
    assert!(
        differs.code == Some(1) && differs.stdout.contains("the window was"),
        "{}",
        differs.stdout
    );
    let alone = folder.neap(&["plan", &mlp, "--overlap"]);
    assert!(
        alone.code == Some(2) && alone.stderr.contains("no other to share bytes with"),
        "{}",
        alone.stderr
    );
}

#[test]
fn latencies_are_those_under_the_load_of_the_other_jobs() {
    let folder = Folder::new();
    folder.import("tiny_cnn-adam.et.json.gz", &[]);
    folder.json(&["profile", "job.graph.json", "--repeats", "1", "--load", "0,100", "-o", "m.csv"]);
    let measured = folder.text("m.csv");
    let mut rows = csv::Reader::from_reader(measured.as_bytes());
    let head = rows.headers().unwrap().clone();
    let column = |name: &str| head.iter().position(|h| h == name).unwrap();
    let (load, ns) = (column("load_percent"), column("ns"));
    let mut out = csv::Writer::from_path(folder.path("lat.csv")).unwrap();
    out.write_record(&head).unwrap();
    for row in rows.records() {
        let row = row.unwrap();
        // So short that each job uses all of the device.
        let time = if &row[load] == "0" { "10" } else { "70" };
        out.write_record(row.iter().enumerate().map(|(i, x)| if i == ns { time } else { x }))
            .unwrap();
    }
    out.flush().unwrap();
    drop(out);
    let unplanned = |more: &[&str], jobs: usize| {
        let graphs = vec!["job.graph.json"; jobs];
        let plan = [&["plan"][..], &graphs, &["--budget", "100%", "--latencies", "lat.csv"], more];
        number(&folder.json(&plan.concat()), "unplanned_iteration_ns")
    };
    let alone = unplanned(&[], 1);
    assert_eq!(unplanned(&["--load", "100"], 1), 7 * alone);
    assert_eq!(unplanned(&[], 2), 2 * 7 * alone, "each has the other's load");
    assert_eq!(unplanned(&["--load", "0"], 2), 2 * alone, "one load is named");
}

#[test]
fn a_share_of_swapping_is_kept_to() {
    let folder = Folder::new();
    let mlp = fixture("mlp.graph.json");
    for planner in ["neap", "tensile"] {
        let plan = |share: &str| {
            let job = format!("{mlp}{share}");
            folder
                .neap(&[
                    "plan",
                    &job,
                    "--device",
                    "a6000",
                    "--budget",
                    "75%",
                    "--planner",
                    planner,
                    "--no-recompute",
                ])
                .code
        };
        // One of its tensors alone doesn't do.
        assert_eq!((plan(""), plan("@0.05")), (Some(0), Some(1)), "{planner}");
    }
    let refused = folder.neap(&["plan", &format!("{mlp}@0.5"), "--planner", "checkpoint"]);
    assert_eq!(refused.code, Some(2));
    assert!(
        refused.stderr.contains("planner checkpoint has no limit on swapping"),
        "{}",
        refused.stderr
    );
}

#[test]
fn a_part_of_all_swaps_is_recorded_and_kept_to() {
    let folder = Folder::new();
    let mlp = fixture("mlp.graph.json");
    let limited = format!("{mlp}@1:0.3");
    let plan =
        ["plan", &mlp, &limited, "--device", "a6000", "--budget", "70%", "-o", "p.plan.json"];
    let swaps = |seen: serde_json::Value| {
        let of = |job: usize| {
            let job = &seen["jobs"][job];
            ["swap_ins", "swap_outs"].map(|key| job[key].as_u64().unwrap()).iter().sum::<u64>()
        };
        (of(0), of(1))
    };
    let (first, second) = swaps(folder.json(&plan));
    assert!(second < first, "{first}, {second}");
    let plan = std::fs::read_to_string(folder.path("p.plan.json")).unwrap();
    let recorded = serde_json::from_str::<serde_json::Value>(&plan).unwrap()["options"].clone();
    assert_eq!(recorded["swap-limit-1"], "0.300", "{recorded}");
    for (arguments, what) in [
        (vec!["plan", &limited], "a job without others makes all swaps"),
        (vec!["compare", &limited, "--budget", "70%"], "a job without others makes all swaps"),
        (vec!["plan", &mlp, &limited, "--overlap"], "--overlap has no limit"),
        (vec!["plan", &mlp, &limited, "--planner", "capuchin"], "has no limit on swapping"),
        (vec!["plan", &mlp, "x.graph.json@1:3"], "`:3` is not a share of all jobs' swaps"),
    ] {
        let refused = folder.neap(&arguments);
        assert_eq!(refused.code, Some(2), "{arguments:?}");
        assert!(refused.stderr.contains(what), "{arguments:?}: {}", refused.stderr);
    }
}

#[test]
fn jobs_come_and_go() {
    let folder = Folder::new();
    std::fs::copy(fixture("mlp.graph.json"), folder.path("mlp.graph.json")).unwrap();
    folder.write("jobs.csv", "graph,submit_s,iterations\nmlp.graph.json,0,8\nmlp.graph.json,0.1,4\nmlp.graph.json,0.2,2\n");
    let seen = folder.json(&[
        "simulate",
        "--arrivals",
        "jobs.csv",
        "--device",
        "a6000",
        "--budget",
        "60%",
    ]);
    let jobs = seen["jobs"].as_array().unwrap();
    for (job, iterations) in jobs.iter().zip([8, 4, 2]) {
        assert_eq!(number(job, "iterations"), iterations, "{job}");
        assert!(number(job, "admitted_ns") >= number(job, "submit_ns"), "{job}");
    }
    assert!(number(&seen, "replans") >= 3);
    // The first one made room for the second.
    assert!(jobs[0]["arenas"].as_array().unwrap().len() > 1, "{seen}");

    folder.write("large.csv", "graph,submit_s,iterations\nmlp.graph.json,0,1\n");
    let never = folder.neap(&[
        "simulate",
        "--arrivals",
        "large.csv",
        "--device",
        "a6000",
        "--budget",
        "1MiB",
    ]);
    assert_eq!(never.code, Some(1), "{}", never.stderr);
    assert!(never.stdout.contains("job 0 waited for 1.0 MiB of memory"), "{}", never.stdout);
}

#[test]
fn arrivals_under_a_policy_with_noise_by_another_planner() {
    let folder = Folder::new();
    std::fs::copy(fixture("mlp.graph.json"), folder.path("mlp.graph.json")).unwrap();
    folder
        .write("jobs.csv", "graph,submit_s,iterations\nmlp.graph.json,0,8\nmlp.graph.json,0.1,4\n");
    let with = |more: &[&str]| {
        let all = ["simulate", "--arrivals", "jobs.csv", "--device", "a6000", "--budget", "90%"];
        folder.json(&[&all, more].concat())
    };
    let all_at_once = with(&[]);
    assert_eq!(all_at_once["policy"], "pack");
    let job = |seen: &serde_json::Value, index: usize, key: &str| number(&seen["jobs"][index], key);
    // In turn: the second waits until the first has ended.
    let fifo = with(&["--policy", "fifo"]);
    assert!(job(&fifo, 1, "end_ns") > job(&fifo, 0, "end_ns"), "{fifo}");
    assert!(number(&fifo, "mean_queuing_ns") > number(&all_at_once, "mean_queuing_ns"), "{fifo}");
    let srtf = with(&["--policy", "srtf"]);
    assert!(job(&srtf, 1, "end_ns") < job(&srtf, 0, "end_ns"), "{srtf}");
    let noisy = with(&["--noise", "20%", "--seed", "1"]);
    assert_ne!(number(&noisy, "end_ns"), number(&all_at_once, "end_ns"));
    assert_eq!(noisy, with(&["--noise", "20%", "--seed", "1"]));
    let capuchin = with(&["--planner", "capuchin"]);
    assert!(capuchin["jobs"].as_array().unwrap().iter().all(|job| job["end_ns"].is_u64()));
    for (flags, remedy) in [
        (["--policy", "lifo"], "fair"),
        (["--planner", "lifo"], "capuchin"),
        (["--runs", "3"], "--arrivals"),
    ] {
        let flags = [&["simulate", "--arrivals", "jobs.csv"], &flags[..]].concat();
        let answer = folder.neap(&flags);
        assert!(answer.code == Some(2) && answer.stderr.contains(remedy), "{}", answer.stderr);
    }
}

#[test]
fn arrivals_run_at_real_latencies() {
    let folder = Folder::new();
    let trace = fixture("tiny_cnn-adam.et.json.gz");
    folder.neap(&["import", &trace, "-o", "cnn.graph.json"]);
    folder.neap(&["simulate", "cnn.graph.json", "--device", "a6000", "--latencies-out", "n.csv"]);
    let table = std::fs::read_to_string(folder.path("n.csv")).unwrap();
    let mut reader = csv::Reader::from_reader(table.as_bytes());
    let heads = reader.headers().unwrap().clone();
    let column = |name: &str| heads.iter().position(|head| head == name).unwrap();
    let (key, ns) = (column("key"), column("ns"));
    let mut slow = csv::Writer::from_writer(Vec::new());
    slow.write_record(["key", "ns"]).unwrap();
    for row in reader.records().map(Result::unwrap) {
        let tripled = 3 * row[ns].parse::<u64>().unwrap();
        slow.write_record([&row[key], &tripled.to_string()]).unwrap();
    }
    let slow = String::from_utf8(slow.into_inner().unwrap()).unwrap();
    folder.write("slow.csv", &slow);
    folder.write("jobs.csv", "graph,submit_s,iterations\ncnn.graph.json,0,8\n");
    let arrivals = ["simulate", "--arrivals", "jobs.csv", "--device", "a6000"];
    let planned = folder.json(&arrivals);
    let real = folder.json(&[&arrivals[..], &["--real", "slow.csv"]].concat());
    assert_eq!(
        number(&real["jobs"][0], "iteration_ns"),
        3 * number(&planned["jobs"][0], "iteration_ns"),
        "{real}"
    );
    // So do the jobs of one plan.
    let two = ["cnn.graph.json", "cnn.graph.json", "--device", "a6000", "-o", "two.plan.json"];
    folder.json(&[&["plan"], &two[..]].concat());
    let planned = folder.json(&["simulate", "two.plan.json"]);
    let real = folder.json(&["simulate", "two.plan.json", "--real", "slow.csv"]);
    for job in 0..2 {
        let alone = |ran: &serde_json::Value| number(&ran["jobs"][job], "alone_ns");
        assert_eq!(alone(&real), 3 * alone(&planned), "{real}");
        assert_eq!(number(&real["jobs"][job], "swap_in_stall_ns"), 0);
    }
}

#[test]
fn tables_of_jobs_are_refused_with_line_and_remedy() {
    let folder = Folder::new();
    std::fs::copy(fixture("mlp.graph.json"), folder.path("m.graph.json")).unwrap();
    for (table, told) in [
        ("", "the column `graph` is missing"),
        ("graph,submit_s,iterations\n", "no jobs below its header"),
        ("graph,submit_s\nm.graph.json,0\n", "the column `iterations` is missing"),
        ("graph,submit_s,iterations,colour\nm.graph.json,0,1,red\n", "there is no column `colour`"),
        ("graph,submit_s,iterations\nm.graph.json,0,0\n", "line 2: iterations: `0` is not"),
        ("graph,submit_s,iterations\nm.graph.json,-1,1\n", "line 2: submit_s: `-1` is not a time"),
        (
            "graph,submit_s,iterations\nm.graph.json,1e99,1\n",
            "line 2: submit_s: `1e99` is not a time",
        ),
        (
            "graph,submit_s,iterations\nm.graph.json,5,1\nm.graph.json,4,1\n",
            "line 3: 4 s is before the job above came",
        ),
        ("graph,submit_s,iterations\nm.graph.json@7,0,1\n", "`@7` is not a share"),
        ("graph,submit_s,iterations\n,0,1\n", "it names no graph"),
        (
            "graph,submit_s,iterations\nnowhere.graph.json,0,1\n",
            "nowhere.graph.json: cannot be read",
        ),
        ("graph,submit_s,iterations\nm.graph.json,0,99999999999\n", "line 2"),
        ("graph,submit_s,iterations\nm.graph.json,0\n", "has 2 cells where the heading has 3"),
    ] {
        folder.write("jobs.csv", table);
        let answer = folder.neap(&["simulate", "--arrivals", "jobs.csv"]);
        assert_eq!((answer.code, &*answer.stdout), (Some(2), ""), "{table}: {}", answer.stderr);
        assert!(
            answer.stderr.contains("jobs.csv") && answer.stderr.contains(told),
            "{table}: {}",
            answer.stderr
        );
    }
}

/// Item 20: a table of many jobs takes time in proportion to its rows.
#[test]
fn many_jobs_come_and_go_in_time() {
    let folder = Folder::new();
    std::fs::copy(fixture("mlp.graph.json"), folder.path("mlp.graph.json")).unwrap();
    let mut table = "graph,submit_s,iterations\n".to_owned();
    for row in 0..60 {
        table += &format!("mlp.graph.json,0.{row:02},2\n");
    }
    folder.write("jobs.csv", &table);
    // Few fit at once: the others wait, and each is let in once.
    let seen = folder.json(&["simulate", "--arrivals", "jobs.csv", "--budget", "700MiB"]);
    let jobs = seen["jobs"].as_array().unwrap();
    assert!(jobs.iter().all(|job| job["end_ns"].is_u64()), "{seen}");
    let waited = jobs.iter().filter(|job| job["waited_for"].is_string()).count();
    assert!(waited > 40, "{waited}");
    assert!(number(&seen, "replans") < 3 * 60, "{}", seen["replans"]);
}
