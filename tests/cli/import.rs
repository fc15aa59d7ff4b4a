//! `neap import`, `neap inspect` and `neap device`.

use crate::cli::folder::{Folder, fixture, number};

const TRACES: [&str; 4] = [
    "tiny_cnn-adam.et.json.gz",
    "tiny_gpt2-adamw.et.json.gz",
    "tiny_cnn-inference.et.json.gz",
    "resnet18-adam.et.json.gz",
];

#[test]
fn every_trace_imports_to_the_same_bytes_twice() {
    for trace in TRACES {
        let folder = Folder::new();
        let said = folder.json(&["import", &fixture(trace), "-o", "a.graph.json"]);
        folder.json(&["import", &fixture(trace), "-o", "b.graph.json"]);
        assert!(folder.text("a.graph.json") == folder.text("b.graph.json"), "{trace}");
        let seen = folder.json(&["inspect", "a.graph.json"]);
        assert_eq!(said["peak_bytes"], seen["peak_bytes"], "{trace}");
        assert_eq!(said["operators"], seen["operators"], "{trace}");
    }
}

#[test]
fn the_output_is_named_after_the_trace_and_a_plain_trace_reads_as_a_gzipped_one() {
    let folder = Folder::new();
    let zipped = std::fs::File::open(fixture(TRACES[2])).unwrap();
    let mut plain = Vec::new();
    std::io::Read::read_to_end(&mut flate2::read::MultiGzDecoder::new(zipped), &mut plain).unwrap();
    folder.write("plain.json", plain);
    folder.json(&["import", &fixture(TRACES[2])]);
    folder.json(&["import", "plain.json", "-o", "plain.graph.json"]);
    let name =
        |text: String| text.replacen("\"name\":\"plain\"", "\"name\":\"tiny_cnn-inference\"", 1);
    assert_eq!(name(folder.text("plain.graph.json")), folder.text("tiny_cnn-inference.graph.json"));
}

#[test]
fn inspect_has_the_keys_that_others_build_on() {
    let folder = Folder::new();
    folder.import(TRACES[0], &[]);
    let seen = folder.json(&["inspect", "job.graph.json"]);
    let weights = std::fs::read(fixture("tiny_cnn-adam.safetensors")).unwrap();
    let weights = safetensors::SafeTensors::deserialize(&weights).unwrap();
    let parameters = weights.iter().filter(|(name, _)| name.starts_with("parameter:"));
    assert_eq!(
        number(&seen, "parameter_bytes"),
        parameters.map(|(_, t)| t.data().len() as u64).sum::<u64>()
    );
    for key in ["buffer_bytes", "peak_bytes", "recorded_peak_bytes", "floor_bytes", "operators"] {
        number(&seen, key);
    }
    assert!(number(&seen, "floor_bytes") <= number(&seen, "peak_bytes"));
    assert!(
        number(&seen, "peak_bytes") <= number(&seen, "recorded_peak_bytes"),
        "lowering never adds memory"
    );
    let shown = folder.neap(&["inspect", "job.graph.json", "--top", "3"]).stdout;
    assert!(shown.contains("The peak is at"), "{shown}");
}

#[test]
fn as_recorded_keeps_the_frameworks_operators_and_plans_and_runs() {
    let folder = Folder::new();
    folder.import(TRACES[0], &["--as-recorded"]);
    let seen = folder.json(&["inspect", "job.graph.json"]);
    let kinds: Vec<&String> = seen["kinds"].as_object().unwrap().keys().collect();
    assert!(
        kinds.iter().any(|k| k.contains("_foreach_"))
            && !kinds.iter().any(|k| k.starts_with("neap::")),
        "{kinds:?}"
    );
    let plan = folder.json(&["plan", "job.graph.json", "--budget", "min", "-o", "job.plan.json"]);
    let simulated = folder.json(&["simulate", "job.plan.json"]);
    assert_eq!(plan["peak_bytes"], simulated["peak_bytes"]);
    let run = folder.neap(&["run", "job.graph.json", "--on", "host"]);
    assert_eq!(run.code, Some(0));
    assert!(run.stderr.contains("frozen"), "{}", run.stderr);
}

#[test]
fn early_updates_never_raise_the_peak() {
    let folder = Folder::new();
    folder.import(TRACES[1], &[]);
    let at_step = number(&folder.json(&["inspect", "job.graph.json"]), "peak_bytes");
    folder.import(TRACES[1], &["--updates", "early"]);
    let early = number(&folder.json(&["inspect", "job.graph.json"]), "peak_bytes");
    assert!(early <= at_step, "{early} {at_step}");
}

#[test]
fn a_device_shown_as_json_is_a_device_file() {
    let folder = Folder::new();
    assert!(folder.neap(&["device", "list"]).stdout.contains("a100-80g"));
    let shown = folder.neap(&["device", "show", "a6000", "--json"]);
    folder.write("mine.device.json", shown.stdout);
    folder.import(TRACES[0], &[]);
    let built_in = folder.json(&["simulate", "job.graph.json", "--device", "a6000"]);
    assert_eq!(
        folder.json(&["simulate", "job.graph.json", "--device", "mine.device.json"]),
        built_in
    );
    assert_ne!(folder.json(&["simulate", "job.graph.json"]), built_in);
}

#[test]
fn an_optimizer_that_is_not_recognised_stays_as_recorded_and_is_said_to_be_frozen() {
    let folder = Folder::new();
    let imported =
        folder.neap(&["import", &fixture("small-adafactor.et.json.gz"), "-o", "job.graph.json"]);
    assert_eq!(imported.code, Some(0));
    assert!(imported.stderr.contains("Adafactor is not recognised"), "{}", imported.stderr);
    folder.json(&["plan", "job.graph.json", "--budget", "min", "-o", "job.plan.json"]);
    let mut checksums = Vec::new();
    for subject in ["job.graph.json", "job.plan.json"] {
        let run = folder.json(&["run", subject, "--on", "host", "--iterations", "2"]);
        assert!(run["notes"].to_string().contains("frozen"), "{}", run["notes"]);
        checksums.push(run["checksum"].clone());
    }
    assert_eq!(checksums[0], checksums[1]);
}

#[test]
fn a_trace_without_any_marks_imports_plans_and_simulates() {
    let folder = Folder::new();
    let imported =
        folder.neap(&["import", &fixture("small-unmarked.et.json.gz"), "-o", "job.graph.json"]);
    assert_eq!(imported.code, Some(0));
    assert!(
        imported.stderr.contains("lr 0.001"),
        "the hyperparameters are recovered and said: {}",
        imported.stderr
    );
    let seen = folder.json(&["inspect", "job.graph.json"]);
    // 3 → 8 convolution of 3 × 3, batch norm of 8, 8 → 10 linear with bias: 322 numbers, and two of Adam's for each.
    assert_eq!(number(&seen, "parameter_bytes"), 322 * 4);
    assert_eq!(number(&seen, "optimizer_state_bytes"), 2 * 322 * 4);
    let plan = folder.json(&["plan", "job.graph.json", "--budget", "min", "-o", "job.plan.json"]);
    assert_eq!(plan["peak_bytes"], folder.json(&["simulate", "job.plan.json"])["peak_bytes"]);
    // Batch norm adds 1 to a counter on the device; the 1 is not in the trace, but known.
    assert!(imported.stderr.contains("batch norms count"), "said: {}", imported.stderr);
    let (without, with) = (
        folder.json(&["run", "job.graph.json", "--on", "host"]),
        folder.json(&["run", "job.plan.json", "--on", "host"]),
    );
    assert_eq!(without["checksum"], with["checksum"]);
}
