//! `neap estimate` on the tiny trace: what it says, what it writes, what it refuses.

use serde_json::{Value, json};

use crate::cli::folder::{Folder, fixture, number};

const TRACE: &str = "traces/tiny_cnn-adam-8-32-start.profile.json.gz";

fn sum(object: &Value) -> u64 {
    object.as_object().unwrap().values().map(|v| v.as_u64().unwrap()).sum()
}

#[test]
fn a_trace_is_estimated_to_the_byte() {
    let folder = Folder::new();
    let trace = fixture(TRACE);
    let truth: Value = serde_json::from_str(
        &std::fs::read_to_string(fixture("traces/tiny_cnn-adam-8-32-start.truth.json")).unwrap(),
    )
    .unwrap();
    let most = |key: &str| {
        truth["peaks"].as_array().unwrap().iter().map(|p| number(p, key)).max().unwrap()
    };
    let told = folder.json(&["estimate", &trace, "--against", &fixture("traces")]);
    for key in ["peak_reserved_bytes", "peak_allocated_bytes"] {
        assert_eq!(number(&told, key), most(key), "{key}");
    }
    assert_eq!(told["truth"]["reserved_error_percent"], json!(0.0));
    // Everything that stands at the peak has a name, and the names add up to what is reserved then.
    let at_peak = &told["at_peak"];
    assert_eq!(
        sum(at_peak) - number(at_peak, "cached_bytes"),
        number(&told, "peak_allocated_bytes")
    );
    assert_eq!(number(at_peak, "parameters_bytes"), 41_896, "the truth's parameter_bytes");
    assert_eq!(number(at_peak, "buffers_bytes"), 272);
    let verdicts = told["verdicts"].as_array().unwrap();
    let gpus = neap::device::builtin::names().iter().filter(|name| **name != "host").count();
    assert_eq!(verdicts.len(), gpus);
    assert!(
        verdicts.iter().all(|v| v["verdict"] == "fits" && v["spare_bytes"].as_i64().unwrap() > 0)
    );
    assert_eq!(told["device"], "h100");
    assert_eq!(
        (
            number(&told, "recorded_iterations"),
            told["iterations"].as_array().unwrap().len(),
            &told["steady"]
        ),
        (3, 3, &json!(true))
    );
    assert_eq!(number(&told["top_blocks"][0], "bytes"), 32 << 20);
    assert_eq!(told["top_blocks"].as_array().unwrap().len(), 10);
    let rules: Vec<&str> = told["assumptions"]
        .as_array()
        .unwrap()
        .iter()
        .map(|a| a["rule"].as_str().unwrap())
        .collect();
    for rule in ["before", "workspaces", "optimizer", "cudnn", "context", "margin"] {
        assert!(rules.contains(&rule), "{rule}: {rules:?}");
    }
    let text = folder.neap(&["estimate", &trace, "--top", "3"]).stdout;
    for part in [
        "peak reserved",
        "70.0 MiB",
        "rtx4090",
        "largest blocks",
        "TinyCnn_0/Sequential_3/Linear_0",
        "assumed",
        "margin",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn verdicts_follow_the_device() {
    let folder = Folder::new();
    let trace = fixture(TRACE);
    let told = folder.json(&["estimate", &trace, "--device", "rtx3060"]);
    let (reserved, margin) = (number(&told, "peak_reserved_bytes"), number(&told, "margin_bytes"));
    let smallest = number(&told, "smallest_device_bytes");
    let show: Value = folder.json(&["device", "show", "rtx3060"]);
    for (name, bytes, verdict, code) in [
        ("roomy", reserved + margin, "fits", 0),
        ("narrow", reserved + margin - 1, "tight", 0),
        ("least", smallest, "tight", 0),
        ("small", smallest - 1, "does not fit", 1),
    ] {
        let mut device = show.clone();
        (device["name"], device["memory_bytes"], device["reserve_bytes"]) =
            (json!(name), json!(bytes + (1 << 20)), json!(1 << 20));
        folder.write("d.device.json", device.to_string());
        let answer = folder.neap(&[
            "--json",
            "estimate",
            &trace,
            "--device",
            "rtx3060",
            "--device",
            "d.device.json",
        ]);
        assert_eq!(answer.code, Some(code), "{name}: {answer:?}");
        let told: Value = serde_json::from_str(&answer.stdout).unwrap();
        let last = &told["verdicts"][1];
        assert_eq!((&last["device"], &last["verdict"]), (&json!(name), &json!(verdict)));
        assert_eq!(
            last["spare_bytes"].as_i64().unwrap(),
            bytes as i64 - (reserved + margin) as i64
        );
        assert_eq!(told["verdicts"][0]["verdict"], "fits");
    }
    // A share of the device is less than the device.
    let answer = folder.neap(&[
        "estimate",
        &trace,
        "--device",
        "rtx4060",
        "--alloc-conf",
        "per_process_memory_fraction:0.001",
    ]);
    assert_eq!(answer.code, Some(1), "{answer:?}");
    // Another class, other workspaces.
    assert!(
        reserved
            < number(
                &folder.json(&["estimate", &trace, "--device", "h200"]),
                "peak_reserved_bytes"
            )
    );
    let host = folder.json(&["estimate", &trace, "--device", "host"]);
    assert!(host["assumptions"].to_string().contains("says nothing of multiprocessors"));
}

#[test]
fn curves_pictures_and_modules_agree_with_the_figures() {
    let folder = Folder::new();
    let trace = fixture(TRACE);
    let told = folder.json(&[
        "estimate", &trace, "--curve", "a.csv", "--plot", "a.svg", "--by", "module", "--device",
        "h100",
    ]);
    let curve = folder.text("a.csv");
    let rows: Vec<Vec<u64>> =
        curve.lines().skip(1).map(|l| l.split(',').map(|n| n.parse().unwrap()).collect()).collect();
    assert_eq!(
        curve.lines().next(),
        Some("time_ns,requested_bytes,allocated_bytes,reserved_bytes")
    );
    let most = |column: usize| rows.iter().map(|r| r[column]).max().unwrap();
    assert_eq!(
        (most(2), most(3)),
        (number(&told, "peak_allocated_bytes"), number(&told, "peak_reserved_bytes"))
    );
    assert!(rows.is_sorted_by_key(|r| r[0]) && rows.iter().all(|r| r[1] <= r[2] && r[2] <= r[3]));
    let svg = folder.text("a.svg");
    for part in ["optimizer states", "reserved 70.00 MiB", "iteration 3", "</svg>"] {
        assert!(svg.contains(part), "{part}");
    }
    let modules = told["modules"].as_array().unwrap();
    let at_peak: u64 = modules.iter().map(|m| number(m, "at_peak_bytes")).sum();
    let at = &told["at_peak"];
    assert_eq!(at_peak, sum(at) - number(at, "rounding_bytes") - number(at, "cached_bytes"));
    let table = folder.neap(&["estimate", &trace, "--by", "module"]).stdout;
    assert_eq!(table.lines().count(), modules.len() + 1);
    assert!(
        table.starts_with("module,calls,activation_bytes,")
            && table.lines().last().unwrap().starts_with("(none),"),
        "{table}"
    );
    let again = folder.json(&[
        "estimate", &trace, "--curve", "b.csv", "--plot", "b.svg", "--by", "module", "--device",
        "h100",
    ]);
    assert!(
        again == told && folder.text("b.csv") == curve && folder.text("b.svg") == svg,
        "two runs differ"
    );
}

#[test]
fn rules_are_switches_and_several_traces_are_one_object() {
    let folder = Folder::new();
    let trace = fixture(TRACE);
    let all = folder.json(&["estimate", &trace]);
    let less = folder.json(&["estimate", &trace, "--without", "workspaces,before"]);
    assert_eq!(
        number(&less["at_peak"], "workspaces_bytes") + number(&less["at_peak"], "parameters_bytes"),
        0
    );
    assert!(less["assumptions"].to_string().contains("left out (--without)"));
    assert!(number(&less, "peak_reserved_bytes") < number(&all, "peak_reserved_bytes"));
    let cudnn = folder.json(&["estimate", &trace, "--cudnn-workspace", "64MiB"]);
    assert!(
        number(&cudnn, "peak_reserved_bytes") >= number(&all, "peak_reserved_bytes") + (60 << 20)
    );
    let both = folder.json(&["estimate", &trace, &trace, "--against", &fixture("traces")]);
    assert_eq!(both["traces"].as_array().unwrap().len(), 2);
    assert_eq!(both["traces"][1]["peak_reserved_bytes"], all["peak_reserved_bytes"]);
    assert_eq!(both["traces"][0]["file"], json!(trace));
}

#[test]
fn bad_input_is_refused_before_any_work() {
    let folder = Folder::new();
    let trace = fixture(TRACE);
    folder.refuses(2, &["absent.json"], &["estimate", "absent.json"]);
    folder.write("text.json", "a day at the sea\n");
    folder.refuses(2, &["text.json"], &["estimate", "text.json"]);
    let execution = fixture("tiny_cnn-adam.et.json.gz");
    folder.refuses(2, &["tiny_cnn-adam.et.json.gz"], &["estimate", &execution]);
    folder.write("none.json", r#"{"traceEvents":[{"ph":"X","cat":"cpu_op","name":"aten::add","pid":1,"tid":1,"ts":1,"dur":1}]}"#);
    folder.refuses(2, &["none.json", "profile_memory"], &["estimate", "none.json"]);
    folder.refuses(2, &["abacus"], &["estimate", &trace, "--device", "abacus"]);
    folder.refuses(2, &["nonsense", "workspaces"], &["estimate", &trace, "--without", "nonsense"]);
    folder.refuses(2, &["--alloc-conf"], &["estimate", &trace, "--alloc-conf", "speed:11"]);
    folder.refuses(2, &["name one trace"], &["estimate", &trace, &trace, "--plot", "a.svg"]);
    folder.refuses(2, &["name one trace"], &["estimate", &trace, &trace, "--by", "module"]);
    // Outputs and truths are looked at before traces: none of these gets as far as the missing trace.
    for flag in ["--plot", "--curve"] {
        for output in ["nowhere/x", "."] {
            folder.refuses(2, &[output, "written"], &["estimate", "absent.json", flag, output]);
        }
    }
    folder.write("t.truth.json", "{}");
    folder.refuses(
        2,
        &["t.truth.json", "no truth"],
        &["estimate", "absent.json", "--against", "t.truth.json"],
    );
    folder.refuses(2, &["absent.truth.json"], &["estimate", "absent.json", "--against", "."]);
    folder.refuses(
        2,
        &["t.truth.json", "folder"],
        &["estimate", &trace, &trace, "--against", "t.truth.json"],
    );
    folder.refuses(2, &["text.json"], &["estimate", "text.json", "--curve", "text.json"]);
}

#[test]
fn sizes_that_no_machine_has_overflow_nothing() {
    let folder = Folder::new();
    let memory = |time: u64, bytes: i64| {
        format!(
            r#"{{"ph":"i","cat":"cpu_instant_event","name":"[memory]","pid":1,"tid":1,"ts":{time},"s":"t","args":{{"Device Type":0,"Addr":{},"Bytes":{bytes}}}}}"#,
            time * 4096
        )
    };
    let events: Vec<String> = (1..6)
        .map(|t| memory(t, i64::MAX))
        .chain([memory(7, 1024), memory(9, i64::MIN + 1)])
        .collect();
    folder.write("huge.json", format!(r#"{{"traceEvents":[{}]}}"#, events.join(",")));
    let answer = folder.neap(&[
        "--json",
        "estimate",
        "huge.json",
        "--device",
        "h100",
        "--plot",
        "a.svg",
        "--by",
        "module",
    ]);
    assert!(
        matches!(answer.code, Some(1 | 2)) && !answer.stderr.contains("panicked"),
        "{answer:?}"
    );
}

/// A forecast is written as the snapshot that PyTorch would record, and replays to the same peaks.
#[test]
fn a_forecast_is_written_as_a_snapshot() {
    let folder = Folder::new();
    let trace = fixture("traces/tiny_cnn-adam-8-32-start.profile.json.gz");
    for conf in ["", "expandable_segments:True"] {
        let estimate = [
            "estimate",
            &trace,
            "--alloc-conf",
            conf,
            "--device",
            "h100",
            "--snapshot",
            "s.pickle",
        ];
        let estimated = folder.json(&estimate);
        let replayed = folder.json(&["replay", "s.pickle", "--check"]);
        assert_eq!(replayed["matches"], true, "{conf}: {replayed}");
        for key in ["peak_reserved_bytes", "peak_allocated_bytes"] {
            assert_eq!(number(&replayed, key), number(&estimated, key), "{conf} {key}");
        }
    }
    let bytes = std::fs::read(folder.path("s.pickle")).unwrap();
    for word in ["aten::", "optimizer_states", "active_allocated"] {
        assert!(bytes.windows(word.len()).any(|w| w == word.as_bytes()), "{word}");
    }
}

/// A profiler's trace with three changes of a GPU's memory and one of the host's.
fn of_a_gpu(totals: bool) -> String {
    let event = |at: u32, bytes: i64, device: i32, allocated: u64, reserved: u64| {
        let kind = u8::from(device >= 0);
        let totals = match totals {
            true => format!(r#","Total Allocated":{allocated},"Total Reserved":{reserved}"#),
            false => String::new(),
        };
        format!(
            r#"{{"ph":"i","cat":"cpu_instant_event","s":"t","name":"[memory]","pid":3,"tid":3,"ts":{at},"args":{{"Bytes":{bytes},"Addr":{at},"Device Id":{device},"Device Type":{kind}{totals}}}}}"#
        )
    };
    let events = [
        event(10, 64, -1, 64, 0),
        event(11, 3_000, 0, 3_000, 2 << 20),
        event(12, 5_000_000_000, 0, 5_000_003_000, 5_100_273_664),
        event(13, -5_000_000_000, 0, 3_000, 5_100_273_664),
    ];
    format!(r#"{{"traceEvents":[{}]}}"#, events.join(","))
}

/// Item 7: a recording of a GPU is reported as it was measured, and nothing is made of it.
#[test]
fn a_trace_recorded_on_a_gpu_is_measured_and_not_estimated() {
    let folder = Folder::new();
    folder.write("gpu.json", of_a_gpu(true));
    let told = folder.json(&["estimate", "gpu.json"]);
    let wanted = json!([{
        "device": "cuda:0", "allocated_bytes": 5_000_003_000_u64, "reserved_bytes": 5_100_273_664_u64,
        "memory_events": 3,
    }]);
    assert_eq!(told["measured"], wanted);
    let text = folder.neap(&["estimate", "gpu.json"]).stdout;
    assert!(text.contains("5100273664") && text.contains("no device judged"), "{text}");
    assert!(!text.contains("fits") && !text.contains("h100"), "{text}");
    let judged = ["estimate", "gpu.json", "--device", "a100-40g"];
    folder.refuses(2, &["recorded on a GPU", "neap dry"], &judged);
    // Without totals there is nothing to report.
    folder.write("old.json", of_a_gpu(false));
    folder.refuses(2, &["no totals", "neap dry"], &["estimate", "old.json"]);
}
