//! `run --on cuda` without a GPU: what is missing is named; and the whole device over a test driver (`tests/cuda`).

mod compiled;
mod events;
mod libraries;
mod load;
mod pinned;
mod products;
mod windows;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use serde_json::Value;

use crate::cli::folder::{Answer, Folder, fixture};

/// A machine with a GPU answers these otherwise.
fn has_driver() -> bool {
    let there = neap::device::present::cuda_devices().is_ok();
    if there {
        println!("skipped: this machine has a GPU");
    }
    there
}

fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cuda").join(name)
}

/// Runs `neap` with the folder's libraries as the machine's.
fn with(folder: &Folder, more: &[(&str, &str)], arguments: &[&str]) -> Answer {
    let here = folder.path("");
    // The driver that watches has other kernels.
    let cache = if folder.path("watch.o").exists() { "watched" } else { "cache" };
    let output = Command::new(env!("CARGO_BIN_EXE_neap"))
        .args(arguments)
        .current_dir(&here)
        .env("LD_LIBRARY_PATH", &here)
        .env("NEAP_CACHE", built().path().join(cache))
        .env("FAKE_SHIM", Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels/shim.h"))
        .envs(more.iter().copied())
        .output()
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Answer { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

#[test]
fn no_driver_is_one_clear_error_or_the_host() {
    if has_driver() {
        return;
    }
    let folder = Folder::new();
    folder.import("tiny_cnn-inference.et.json.gz", &[]);
    let run = ["run", "job.graph.json"];
    folder.refuses(
        2,
        &["--on cuda: no NVIDIA driver on this machine", "use --on host"],
        &[&run[..], &["--on", "cuda"]].concat(),
    );
    let host = folder.neap(&run);
    assert_eq!(host.code, Some(0), "{host:?}");
    assert!(host.stderr.contains("running on the host: no NVIDIA driver"), "{}", host.stderr);
    folder.refuses(
        2,
        &["not a folder"],
        &[&run[..], &["--on", "cuda", "--cuda-libs", "nowhere"]].concat(),
    );
    folder.refuses(2, &["--tf32"], &[&run[..], &["--on", "host", "--tf32"]].concat());
    folder.refuses(2, &["--on host"], &[&run[..], &["--on", "cuda", "--unlimited-link"]].concat());
}

#[test]
fn a_driver_without_a_device_is_one_clear_error_or_the_host() {
    let Some(folder) = faked() else { return };
    let none = [("FAKE_NO_DEVICE", "1")];
    folder.import("tiny_cnn-inference.et.json.gz", &[]);
    let refused = with(&folder, &none, &["run", "job.graph.json", "--on", "cuda"]);
    assert_eq!(refused.code, Some(2), "{refused:?}");
    assert!(
        refused.stderr.contains("--on cuda: the NVIDIA driver finds no device"),
        "{}",
        refused.stderr
    );
    let host = with(&folder, &none, &["run", "job.graph.json"]);
    assert_eq!(host.code, Some(0), "{host:?}");
    assert!(
        host.stderr.contains("running on the host: the NVIDIA driver finds no device"),
        "{}",
        host.stderr
    );
}

/// The folder with the test driver (`lib`), the one that watches every access (`races`), and the
/// kernels that their compiler made.
fn built() -> &'static tempfile::TempDir {
    static FOLDER: OnceLock<tempfile::TempDir> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        if Command::new("c++").arg("--version").output().is_ok() {
            for (name, more) in [("lib", None), ("races", Some("races"))] {
                let mut build = Command::new(source("build"));
                let output = build.arg(folder.path().join(name)).args(more).output().unwrap();
                assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            }
        }
        folder
    })
}

/// A folder with the test driver and its libraries; `None` where there is no compiler.
fn faked() -> Option<Folder> {
    folder_for("lib")
}

/// The same, with the driver that watches.
fn watched() -> Option<Folder> {
    folder_for("races")
}

fn folder_for(kind: &str) -> Option<Folder> {
    let folder = Folder::new();
    let Ok(libraries) = std::fs::read_dir(built().path().join(kind)) else {
        assert!(std::env::var_os("NEAP_REQUIRE_NVRTC").is_none(), "there is no C++ compiler");
        println!("skipped: the test driver: there is no C++ compiler");
        return None;
    };
    for library in libraries {
        let library = library.unwrap();
        std::fs::copy(library.path(), folder.path(library.file_name().to_str().unwrap())).unwrap();
    }
    Some(folder)
}

fn json(folder: &Folder, arguments: &[&str]) -> Value {
    let answer = with(folder, &[], &[&["--json"], arguments].concat());
    assert_eq!(answer.code, Some(0), "neap {arguments:?}: {answer:?}");
    serde_json::from_str(&answer.stdout).unwrap()
}

#[test]
fn what_is_missing_or_of_another_version_is_named() {
    let Some(folder) = faked() else { return };
    folder.import("tiny_cnn-adam.et.json.gz", &[]);
    let run = ["run", "job.graph.json", "--on", "cuda", "--cuda-libs", "."];
    let says = |more: &[(&str, &str)], word: &str| {
        let answer = with(&folder, more, &run);
        assert_eq!(answer.code, Some(2), "{answer:?}");
        assert!(answer.stderr.contains(word), "{} does not say `{word}`", answer.stderr);
    };
    says(&[("FAKE_DRIVER_VERSION", "12040")], "the driver is for CUDA 12.4; 13.0");
    // Another version's file beside is no help.
    std::fs::rename(folder.path("libcudnn.so.9"), folder.path("libcudnn.so.8")).unwrap();
    if !Path::new("/usr/lib/x86_64-linux-gnu/libcudnn.so.9").exists() {
        says(&[], "cuDNN at ");
        says(&[], "is version 8; version 9 is needed");
        std::fs::remove_file(folder.path("libcudnn.so.8")).unwrap();
        says(&[], "cuDNN 9 (libcudnn.so.9) is not found");
    }
    std::fs::remove_file(folder.path("libcublasLt.so.13")).unwrap();
    says(&[], "cuBLASLt 13 (libcublasLt.so.13) is not found");
}

/// Losses of unplanned and planned runs over the fake driver, against each other to the bit and against the host.
fn train(folder: &Folder, base: &str, iterations: &str) {
    folder.import(&format!("{base}.et.json.gz"), &[]);
    folder.json(&["plan", "job.graph.json", "--budget", "min", "-o", "job.plan.json"]);
    let weights = fixture(&format!("{base}.safetensors"));
    let go = |subject: &str, on: &str| {
        let mut arguments =
            vec!["run", subject, "--on", on, "--iterations", iterations, "--weights", &weights];
        if on == "cuda" {
            arguments.extend(["--cuda-libs", "."]);
        }
        json(folder, &arguments)
    };
    let (host, unplanned, planned) =
        (go("job.graph.json", "host"), go("job.graph.json", "cuda"), go("job.plan.json", "cuda"));
    assert_eq!(unplanned["losses"], planned["losses"], "{base}");
    assert_eq!(unplanned["checksum"], planned["checksum"], "{base}");
    assert!(
        planned["peak_bytes"].as_u64() <= planned["arena_bytes"].as_u64()
            && planned["arena_bytes"].as_u64() < unplanned["arena_bytes"].as_u64()
    );
    let losses = |of: &Value| {
        of["losses"].as_array().unwrap().iter().map(|l| l.as_f64().unwrap()).collect::<Vec<_>>()
    };
    assert!(!losses(&host).is_empty());
    for (ours, theirs) in losses(&planned).into_iter().zip(losses(&host)) {
        assert!((ours - theirs).abs() <= 1e-5 * theirs.abs(), "{base}: {ours}, the host {theirs}");
    }
    assert!(planned["iteration_ns"].as_u64() > Some(0));
    assert!(
        planned["notes"].as_array().unwrap().iter().any(|n| n
            .as_str()
            .unwrap()
            .contains("cuDNN 91300")
            || base.contains("gpt2"))
    );
}

#[test]
fn planned_runs_equal_unplanned_ones_over_a_driver_that_is_none() {
    let Some(folder) = faked() else { return };
    train(&folder, "tiny_cnn-adam", "3");
    train(&folder, "tiny_gpt2-adamw", "2");
}

/// Recorded loops in bf16, in f16, and with scaled gradients, whose updates mix types.
#[test]
fn half_precision_trains_over_a_driver_that_is_none() {
    let Some(folder) = faked() else { return };
    // One unit in the last place of the loss, which has the model's type.
    for (idiom, unit) in [("bf16_adamw", 1.0 / 128.0), ("f16_adam", 1.0 / 1024.0), ("scaler", 1e-5)]
    {
        folder.import(&format!("idioms/{idiom}.et.json.gz"), &[]);
        folder.json(&["plan", "job.graph.json", "--budget", "80%", "-o", "job.plan.json"]);
        let weights = fixture(&format!("idioms/{idiom}.safetensors"));
        let go = |subject: &str, on: &[&str]| {
            let run = ["run", subject, "--iterations", "6", "--weights", &weights];
            json(&folder, &[&run[..], on].concat())
        };
        let cuda = ["--on", "cuda", "--cuda-libs", "."];
        let (plain, planned) = (go("job.graph.json", &cuda), go("job.plan.json", &cuda));
        assert_eq!(plain["losses"], planned["losses"], "{idiom}");
        assert_eq!(plain["checksum"], planned["checksum"], "{idiom}");
        assert_eq!(plain["fallbacks"], 0, "{idiom}");
        let host = go("job.graph.json", &["--on", "host"]);
        let losses = |of: &Value| {
            of["losses"].as_array().unwrap().iter().map(|l| l.as_f64().unwrap()).collect::<Vec<_>>()
        };
        let record = std::fs::read(fixture(&format!("idioms/{idiom}.json"))).unwrap();
        let record: Value = serde_json::from_slice(&record).unwrap();
        for theirs in [losses(&host), losses(&record)] {
            assert_eq!(losses(&plain).len(), theirs.len(), "{idiom}");
            for (ours, theirs) in losses(&plain).into_iter().zip(theirs) {
                assert!((ours - theirs).abs() <= unit * theirs.abs(), "{idiom}: {ours}, {theirs}");
            }
        }
    }
}

#[test]
fn several_jobs_share_a_driver_that_is_none() {
    let Some(folder) = faked() else { return };
    let names = ["tiny_cnn-adam", "tiny_gpt2-adamw"];
    let cuda = ["--on", "cuda", "--cuda-libs", ".", "--iterations", "2"];
    let mut alone = Vec::new();
    let mut memory = 0;
    for name in names {
        folder.import(&format!("{name}.et.json.gz"), &[]);
        std::fs::rename(folder.path("job.graph.json"), folder.path(&format!("{name}.graph.json")))
            .unwrap();
        folder.json(&[
            "plan",
            &format!("{name}.graph.json"),
            "--budget",
            "min",
            "-o",
            &format!("{name}.plan.json"),
        ]);
        alone.push(json(&folder, &[&["run", &format!("{name}.plan.json")][..], &cuda].concat()));
        memory = memory.max(alone.last().unwrap()["arena_bytes"].as_u64().unwrap());
    }
    // Side by side; and with room for little more than one, so that they go out and in.
    let tight = (memory + memory / 8).to_string();
    for more in
        [&["--policy", "pack"][..], &["--policy", "fair", "--turn", "0.001", "--memory", &tight]]
    {
        let report = json(
            &folder,
            &[&["run", "tiny_cnn-adam.plan.json", "tiny_gpt2-adamw.plan.json"][..], &cuda, more]
                .concat(),
        );
        for (job, alone) in report["jobs"].as_array().unwrap().iter().zip(&alone) {
            assert_eq!(
                (&job["losses"], &job["checksum"]),
                (&alone["losses"], &alone["checksum"]),
                "{more:?}"
            );
            assert_eq!(job["verdict"], "done");
        }
        assert!(report["touched_peak_bytes"].as_u64() <= report["arena_bytes"].as_u64());
    }
}

#[test]
fn algorithms_that_were_profiled_are_reserved_and_used() {
    let Some(folder) = faked() else { return };
    let base = "tiny_cnn-adam";
    folder.import(&format!("{base}.et.json.gz"), &[]);
    let weights = fixture(&format!("{base}.safetensors"));
    let cuda = ["--on", "cuda", "--cuda-libs", "."];
    let profile = ["profile", "job.graph.json", "--device", "a100-80g", "--repeats", "1"];
    json(&folder, &[&profile[..], &cuda, &["-o", "t.csv"]].concat());
    let table = std::fs::read_to_string(folder.path("t.csv")).unwrap();
    let of = |kind: &str| {
        table.lines().filter(|l| l.contains(kind) && l.contains(",a100-80g,")).collect::<Vec<_>>()
    };
    let (forward, backward) = (of(",aten::conv2d,"), of(",aten::convolution_backward,"));
    assert!(!forward.is_empty() && forward.iter().all(|l| l.contains(",1,1000,")), "{forward:?}");
    // The first convolution's input wants no gradient; one of 1 x 1 makes its weights' by products.
    let ways = [",4;3,3000,", ",4;1000,8192,", ",3,2000,"];
    let taken = |way: &&str| backward.iter().filter(|l| l.contains(*way)).count();
    assert_eq!(ways.iter().map(taken).sum::<usize>(), backward.len(), "{backward:?}");
    assert!(ways.iter().all(|way| taken(way) > 0), "{backward:?}");

    let plan = [
        "plan",
        "job.graph.json",
        "--device",
        "a100-80g",
        "--latencies",
        "t.csv",
        "--budget",
        "min",
        "-o",
        "job.plan.json",
    ];
    let with_scratch = folder.json(&plan);
    let without =
        folder.json(&["plan", "job.graph.json", "--device", "a100-80g", "--budget", "min"]);
    assert!(
        with_scratch["unplanned_peak_bytes"].as_u64() >= without["unplanned_peak_bytes"].as_u64()
    );
    let text = std::fs::read_to_string(folder.path("job.plan.json")).unwrap();
    let written: Value = serde_json::from_str(&text).unwrap();
    let placed = written["jobs"][0]["placements"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|p| p["step"].is_u64())
        .count();
    assert!(placed >= forward.len() + backward.len(), "{placed} workspaces");
    assert_eq!(folder.neap(&["check", "job.plan.json"]).code, Some(0));
    assert_eq!(folder.neap(&["simulate", "job.plan.json"]).code, Some(0));
    assert_eq!(folder.neap(&["explain", "job.plan.json"]).code, Some(0));
    assert_eq!(folder.neap(&["diff", "job.plan.json", "job.plan.json"]).code, Some(0));

    let run = |subject: &[&str], on: &[&str]| {
        json(
            &folder,
            &[&["run"], subject, on, &["--iterations", "2", "--weights", &weights]].concat(),
        )
    };
    let planned = run(&["job.plan.json"], &cuda);
    let unplanned = run(&["job.graph.json", "--device", "a100-80g", "--latencies", "t.csv"], &cuda);
    assert_eq!(
        (&planned["losses"], &planned["checksum"]),
        (&unplanned["losses"], &unplanned["checksum"]),
        "the same algorithms, the same bits"
    );
    let losses = |of: Value| {
        of["losses"].as_array().unwrap().iter().map(|l| l.as_f64().unwrap()).collect::<Vec<_>>()
    };
    for (ours, theirs) in
        losses(planned).into_iter().zip(losses(run(&["job.plan.json"], &["--on", "host"])))
    {
        assert!((ours - theirs).abs() <= 1e-5 * theirs.abs(), "{ours}, the host {theirs}");
    }

    let refused = |from: &str, to: &str, word: &str| {
        assert!(text.contains(from), "{from}");
        std::fs::write(folder.path("other.plan.json"), text.replace(from, to)).unwrap();
        let answer = with(&folder, &[], &[&["run", "other.plan.json"][..], &cuda].concat());
        assert_eq!(answer.code, Some(2), "{answer:?}");
        assert!(
            answer.stderr.contains(word) && answer.stderr.contains("profile and plan again"),
            "{}",
            answer.stderr
        );
    };
    refused(
        "\"algorithm\":[1]",
        "\"algorithm\":[7]",
        "the plan was made for algorithm 7, which the libraries do not have",
    );
    refused(
        "\"algorithm\":[4,3]",
        "\"algorithm\":[4]",
        "the plan names 1 algorithms, which is too few",
    );
    // The checker counts what the plan says that its algorithms take.
    std::fs::write(
        folder.path("other.plan.json"),
        text.replace("\"workspace_bytes\":3000", "\"workspace_bytes\":30000000"),
    )
    .unwrap();
    assert_eq!(folder.neap(&["check", "other.plan.json"]).code, Some(1));
    assert!(folder.neap(&["diff", "job.plan.json", "other.plan.json"]).stdout.contains("scratch"));

    // Plain kernels where nothing fits; and the host has no use for it.
    json(&folder, &[&profile[..], &cuda, &["--conv-workspace", "1500", "-o", "t.csv"]].concat());
    let table = std::fs::read_to_string(folder.path("t.csv")).unwrap();
    assert!(table.contains(",-1;-1,0,") && table.contains(",1,1000,"), "{table}");
    folder.refuses(
        2,
        &["--conv-workspace: is for --on cuda"],
        &["profile", "job.graph.json", "--on", "host", "--conv-workspace", "1"],
    );
    std::fs::write(folder.path("t.csv"), table.replace(",1,1000,", ",1,1152921504606846976,"))
        .unwrap();
    folder.refuses(
        2,
        &["t.csv: with its `workspace_bytes`"],
        &["plan", "job.graph.json", "--latencies", "t.csv", "--budget", "min"],
    );
}

#[test]
fn operators_without_a_library_are_counted_and_named() {
    let Some(folder) = faked() else { return };
    folder.import("tiny_cnn-adam.et.json.gz", &[]);
    let run = ["--json", "run", "job.graph.json", "--on", "cuda", "--cuda-libs", "."];
    let report = |more: &[(&str, &str)], flags: &[&str]| -> Value {
        let answer = with(&folder, more, &[&run[..], flags].concat());
        assert_eq!(answer.code, Some(0), "{answer:?}");
        serde_json::from_str(&answer.stdout).unwrap()
    };
    let (fast, slow) = (report(&[], &[]), report(&[("FAKE_NO_ALGORITHM", "1")], &[]));
    assert_eq!((&fast["fallbacks"], &fast["scratch_bytes"]), (&0.into(), &4096.into()));
    // Sums of parts need some too.
    assert!(slow["fallbacks"].as_u64() > Some(5), "{slow}");
    assert!(slow["scratch_bytes"].as_u64() < Some(4096), "{slow}");
    let note = slow["notes"].to_string();
    assert!(note.contains("run on neap's plain kernels") && note.contains("conv2d"), "{note}");
    // Where no plan says otherwise, cuBLASLt may work in 32 MiB on a Hopper GPU.
    let (most, more) = (32 << 20, (32 << 20) + 1);
    let with_least = |bytes: u64| report(&[("FAKE_LEAST", &bytes.to_string())], &[]);
    assert_eq!(with_least(most)["fallbacks"], 0);
    assert!(with_least(more)["fallbacks"].as_u64() > Some(0));
    // The test library refuses to run in another type than it said that it computes in.
    assert_eq!(report(&[], &["--tf32"])["fallbacks"], 0);
    for times in ["walls_ns", "iterations_ns"] {
        assert_eq!(fast[times].as_array().unwrap().len(), 1);
    }
    assert!(fast["pinning_ns"].as_u64() > Some(0));
}

/// Where the library has no product with a bias, it is asked for one without: no plain kernel, and
/// the same numbers.
#[test]
fn a_product_without_a_bias_is_the_second_choice() {
    let Some(folder) = faked() else { return };
    folder.import("tiny_gpt2-adamw.et.json.gz", &[]);
    folder.json(&["plan", "job.graph.json", "--budget", "min", "-o", "job.plan.json"]);
    let report = |job: &str, more: &[(&str, &str)]| -> Value {
        let flags = ["--on", "cuda", "--cuda-libs", ".", "--iterations", "2"];
        let answer = with(&folder, more, &[&["--json", "run", job][..], &flags].concat());
        assert_eq!(answer.code, Some(0), "{answer:?}");
        serde_json::from_str(&answer.stdout).unwrap()
    };
    let one = report("job.graph.json", &[]);
    for job in ["job.graph.json", "job.plan.json"] {
        let two = report(job, &[("FAKE_NO_EPILOGUE", "1")]);
        assert_eq!(two["fallbacks"], 0, "{two}");
        assert_eq!((&two["losses"], &two["checksum"]), (&one["losses"], &one["checksum"]));
    }
    // That the library is asked for products with a bias at all.
    let none = report("job.graph.json", &[("FAKE_NO_ALGORITHM", "1")]);
    assert!(none["fallbacks"].as_u64() > Some(10), "{none}");
}

/// The driver that watches finds no race in a planned run, and one as soon as a wait is left out
/// that protects bytes. Only copies have others, which keep their time.
#[test]
fn a_wait_that_is_left_out_is_a_race() {
    let Some(folder) = watched() else { return };
    folder.import("idioms/f16_adam.et.json.gz", &[]);
    folder.json(&["plan", "job.graph.json", "--budget", "min", "-o", "job.plan.json"]);
    let report = folder.path("waits.txt");
    let run = |left_out: [(&str, i64); 2]| {
        let left_out = left_out.map(|(name, at)| (name, at.to_string()));
        let mut more: Vec<_> = left_out.iter().map(|(name, at)| (*name, at.as_str())).collect();
        more.push(("FAKE_REPORT", report.to_str().unwrap()));
        let flags = ["--on", "cuda", "--cuda-libs", ".", "--iterations", "2", "--debug-memory"];
        let answer = with(&folder, &more, &[&["run", "job.plan.json"][..], &flags].concat());
        let text = std::fs::read_to_string(&report).unwrap_or_default();
        (answer, text.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    };
    let none = [("FAKE_DROP_WAIT", -1), ("FAKE_DROP_SYNC", -1)];
    let (answer, said) = run(none);
    assert_eq!(answer.code, Some(0), "{answer:?}");
    let count = |at: usize| said[at].parse::<i64>().unwrap();
    let (waits, syncs) = (count(0), count(2));
    assert!(waits > 5 && syncs > 3, "{said:?}");
    let (mut races, mut timed) = (0, 0);
    for (at, which) in (0..waits).map(|w| (w, 0)).chain((0..syncs).map(|s| (s, 1))) {
        let mut left_out = none;
        left_out[which].1 = at;
        let (answer, said) = run(left_out);
        if answer.code == Some(0) {
            let spare = said[1] == "redundant";
            assert!(spare || which == 0 && said[3] == "copy", "{left_out:?}: {said:?}");
            timed += usize::from(!spare);
        } else {
            // A race; or the host asks for a time that has not come.
            let shows = ["race: ", "NOT_READY"].iter().any(|word| answer.stderr.contains(word));
            assert!(shows, "{left_out:?}: {answer:?}");
            races += 1;
        }
    }
    println!("{races} waits protect bytes, and each shows when left out; {timed} keep a time");
    assert!(races > 5, "{races} of {waits}");
}

#[test]
fn a_write_beyond_a_tensors_end_is_found() {
    let Some(folder) = faked() else { return };
    folder.import("tiny_cnn-adam.et.json.gz", &[]);
    let run = ["--json", "run", "job.graph.json", "--on", "cuda", "--cuda-libs", "."];
    let go =
        |more: &[(&str, &str)], flags: &[&str]| with(&folder, more, &[&run[..], flags].concat());
    let (plain, checked) = (go(&[], &[]), go(&[], &["--debug-memory"]));
    assert_eq!((plain.code, checked.code), (Some(0), Some(0)), "{checked:?}");
    let losses = |of: &Answer| serde_json::from_str::<Value>(&of.stdout).unwrap()["losses"].clone();
    assert_eq!(losses(&plain), losses(&checked));
    let broken = go(&[("FAKE_OVERRUN", "1")], &["--debug-memory"]);
    assert_eq!(broken.code, Some(2), "{broken:?}");
    assert!(broken.stderr.contains("it wrote beyond the end of `"), "{}", broken.stderr);
}

#[test]
fn a_measured_timeline_has_the_tracks_of_a_simulated_one() {
    let Some(folder) = faked() else { return };
    folder.import("tiny_cnn-inference.et.json.gz", &[]);
    folder.json(&["plan", "job.graph.json", "--budget", "min", "-o", "job.plan.json"]);
    let flags = ["--on", "cuda", "--cuda-libs", ".", "--timeline", "cuda.json"];
    json(&folder, &[&["run", "job.plan.json"][..], &flags].concat());
    folder.json(&["run", "job.plan.json", "--on", "host", "--timeline", "host.json"]);
    folder.json(&["simulate", "job.plan.json", "--timeline", "simulated.json"]);
    let spans = |file: &str| {
        let text = std::fs::read_to_string(folder.path(file)).unwrap();
        let trace: Value = serde_json::from_str(&text).unwrap();
        let mut names: Vec<_> = trace["traceEvents"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|e| e["ph"] != "C")
            .map(|e| (e["ph"].to_string(), e["tid"].to_string(), e["name"].to_string()))
            .collect();
        names.sort();
        names
    };
    let simulated = spans("simulated.json");
    assert!(simulated.len() > 10);
    assert_eq!(spans("host.json"), simulated);
    assert_eq!(spans("cuda.json"), simulated);
}
