//! `neap replay`.

use serde_json::Value;

use crate::cli::folder::{Folder, fixture, number};

/// A small block, a large one, the large one freed and asked for again a little smaller, and one that nothing serves.
const EVENTS: &str = "op,id,bytes,stream,result,allocated,reserved,segments
a,0,512,0,ok,512,2097152,1
a,9,11000000,0,ok,11000832,14680064,2
f,9,,,ok,512,14680064,2
a,9,12000000,0,ok,12583424,14680064,2
a,18446744073709551615,200000000,7,oom,12583424,14680064,2
e,,,,ok,12583424,14680064,2
f,18446744073709551615,,,ok,12583424,14680064,2
";

fn folder() -> Folder {
    let folder = Folder::new();
    folder.write("x.csv", EVENTS);
    folder
}

#[test]
fn recorded_answers_are_checked_row_by_row() {
    let index: Value =
        serde_json::from_slice(&std::fs::read(fixture("allocator/index.json")).unwrap()).unwrap();
    for vector in index["vectors"].as_array().unwrap() {
        let file = fixture(&format!("allocator/{}", vector["file"].as_str().unwrap()));
        let device = vector["device_bytes"].to_string();
        let mut arguments = vec![
            "replay",
            &file,
            "--check",
            "--device-bytes",
            &device,
            "--alloc-conf",
            vector["alloc_conf"].as_str().unwrap(),
        ];
        let fraction = vector["memory_fraction"].to_string();
        if fraction != "null" {
            arguments.extend(["--memory-fraction", &fraction]);
        }
        let said = Folder::new().json(&arguments);
        assert_eq!(said["matches"], true);
        assert_eq!(number(&said, "peak_reserved_bytes"), number(vector, "peak_reserved"));
        assert_eq!(
            (number(&said, "ooms"), number(&said, "events")),
            (number(vector, "ooms"), number(vector, "events"))
        );
    }
}

#[test]
fn the_first_row_that_differs_is_shown_with_both_states() {
    let folder = folder();
    let capped = ["replay", "x.csv", "--device-bytes", "100MiB", "--check"];
    // 12,000,000 bytes leave less than 1 MiB of the cached 12 MiB: it isn't split.
    let said = folder.neap(&capped);
    assert_eq!(said.code, Some(0), "{said:?}");
    folder
        .write("x.csv", EVENTS.replace("a,9,12000000,0,ok,12583424", "a,9,12000000,0,ok,12583423"));
    let said = folder.neap(&capped);
    assert_eq!(said.code, Some(1));
    for word in [
        "line 5",
        "a,9,12000000,0,ok",
        "allocated 12583423, reserved 14680064",
        "allocated 12583424, reserved 14680064",
    ] {
        assert!(said.stdout.contains(word), "{word}: {}", said.stdout);
    }
    let said = folder.neap(&[&["--json"], &capped[..]].concat());
    let said: Value = serde_json::from_str(&said.stdout).unwrap();
    assert_eq!((number(&said, "line"), &said["matches"]), (5, &Value::Bool(false)));
    assert_eq!(number(&said["replayed"], "allocated_bytes"), 12_583_424);
}

#[test]
fn what_does_not_fit_is_a_no_and_what_has_no_limit_fits() {
    let folder = folder();
    let said = folder.neap(&["replay", "x.csv", "--device-bytes", "100MiB", "--json"]);
    assert_eq!(said.code, Some(1));
    let said: Value = serde_json::from_str(&said.stdout).unwrap();
    let figures =
        ["ooms", "retries", "first_oom_event", "peak_event", "segments", "fragmentation_bytes"]
            .map(|key| number(&said, key));
    assert_eq!(figures, [1, 1, 4, 3, 2, 14_680_064 - 12_583_424]);
    let unlimited = folder.json(&["replay", "x.csv"]);
    assert_eq!((number(&unlimited, "ooms"), &unlimited["device_bytes"]), (0, &Value::Null));
    let named = folder.json(&["replay", "x.csv", "--device", "h100"]);
    assert_eq!(number(&named, "ooms"), 0);
    // The file does not say what the script would ask of that device.
    let assumes = named["assumes"].as_str().unwrap();
    assert!(assumes.contains("if the script requests the same"), "{named}");
    assert_eq!(unlimited["assumes"], Value::Null);
}

#[test]
fn a_sweep_says_which_setting_fits() {
    let folder = folder();
    let said = folder.json(&[
        "replay",
        "x.csv",
        "--sweep",
        "--device-bytes",
        "100MiB",
        "--device-bytes",
        "1GiB",
        "--smallest-device",
    ]);
    let rows = said["settings"].as_array().unwrap();
    assert_eq!(rows.len(), 12);
    for row in rows {
        assert_eq!(row["fits"], number(row, "device_bytes") > 100 << 20);
        assert_eq!(number(row, "smallest_device_bytes") % (2 << 20), 0);
    }
    let none = folder.neap(&[
        "replay",
        "x.csv",
        "--sweep",
        "--device-bytes",
        "100MiB",
        "--alloc-conf",
        "expandable_segments:True",
    ]);
    assert_eq!(none.code, Some(1));
    assert!(
        none.stderr.contains("no setting fits") && none.stdout.contains("expandable_segments:True"),
        "{none:?}"
    );
}

#[test]
fn the_smallest_device_is_found() {
    let folder = folder();
    let said = folder.json(&["replay", "x.csv", "--smallest-device"]);
    // The small block's segment, the large one's 12 MiB, and 192 MiB for 200,000,000 bytes.
    assert_eq!(
        (number(&said, "smallest_device_bytes"), &said["proven"]),
        ((2 + 12 + 192) << 20, &Value::Bool(true))
    );
}

#[test]
fn curves_are_written_and_drawn() {
    let folder = folder();
    folder.json(&["replay", "x.csv", "--curve", "c.csv", "--plot", "p.svg"]);
    let curve = folder.text("c.csv");
    assert_eq!(curve.lines().count(), 8);
    assert!(curve.starts_with("event,allocated_bytes,reserved_bytes,segments\n0,512,2097152,1\n1,11000832,14680064,2\n"), "{curve}");
    let plot = folder.text("p.svg");
    for word in ["reserved, peak 206.00 MiB", "allocated", "x.csv", "event"] {
        assert!(plot.contains(word), "{word}: {plot}");
    }
}

#[test]
fn contradictions_between_flags_are_bad_input() {
    let folder = folder();
    for (arguments, words) in [
        (&["--alloc-conf", "max_split:1"][..], &["no option `max_split`", "max_split_size_mb"][..]),
        (&["--alloc-conf", "backend:cudaMallocAsync"], &["not modelled"]),
        (&["--alloc-conf", "", "--alloc-conf", ""], &["--sweep"]),
        (&["--device-bytes", "1GiB", "--device", "h100"], &["--sweep"]),
        (&["--device-bytes", "1000TiB"], &["64.0 TiB"]),
        (&["--device", "abacus"], &["abacus"]),
        (&["--memory-fraction", "0.5"], &["--device"]),
        (&["--memory-fraction", "1.5"], &["from 0 to 1"]),
        (
            &[
                "--memory-fraction",
                "0.5",
                "--alloc-conf",
                "per_process_memory_fraction:0.6",
                "--device-bytes",
                "1GiB",
            ],
            &["leave one out"],
        ),
        (&["--smallest-device", "--device-bytes", "1GiB"], &["leave --device"]),
        (&["--check", "--sweep"], &["--sweep"]),
        (&["--curve", "x.csv"], &["is read by this command too"]),
        (&["--plot", "no/x.svg"], &["no such folder"]),
    ] {
        folder.refuses(2, words, &[&["replay", "x.csv"], arguments].concat());
    }
}

#[test]
fn tables_that_are_none_are_bad_input_named_by_line() {
    let folder = Folder::new();
    let header = "op,id,bytes,stream\n";
    let rows = |rows: &str| format!("{header}{rows}");
    for (content, words) in [
        (String::new(), &["empty file", "not finished"][..]),
        ("a,1,512,0\n".to_owned(), &["line 1", "lacks op"]),
        ("op,id,bytes\n".to_owned(), &["line 1", "lacks stream"]),
        ("op,id,id,bytes,stream\n".to_owned(), &["line 1", "id twice"]),
        (rows("a,0,512,0\na,0,512,0\n"), &["line 3", "allocated already"]),
        (rows("\r\na,0,512,0\nf,1,,\n"), &["line 4", "not allocated"]),
        (rows("a,0,512,0\nf,0,,\nf,0,,\n"), &["line 4", "not allocated"]),
        (rows("a,-1,512,0\n"), &["line 2", "id is `-1`"]),
        (rows("a,0,-512,0\n"), &["line 2", "bytes is `-512`"]),
        (rows("a,0,5e9,0\n"), &["line 2", "bytes is `5e9`"]),
        (rows("a,0,18446744073709551616,0\n"), &["line 2", "bytes is"]),
        (rows("a,0,18446744073709551615,0\n"), &["line 2", "2^60"]),
        (rows("a,0,,0\n"), &["line 2", "bytes is empty"]),
        (rows("a,0,512\n"), &["line 2", "stream is empty"]),
        (rows("x,0,512,0\n"), &["line 2", "op is `x`"]),
        (rows("\"a\",0,512,0\n"), &["line 2", "op is"]),
        (rows(&"1".repeat(1 << 20)), &["line 2", "longer than"]),
        ("op,id,bytes,stream,result\na,0,1,0,maybe\n".to_owned(), &["line 2", "result is `maybe`"]),
        ("op,id,bytes,stream,reserved\na,0,1,0,-\n".to_owned(), &["line 2", "reserved is `-`"]),
    ] {
        folder.write("x.csv", content);
        for more in [&[][..], &["--smallest-device"], &["--curve", "out.csv"]] {
            folder.refuses(
                2,
                &[&["x.csv"], words].concat(),
                &[&["replay", "x.csv"], more].concat(),
            );
        }
    }
    folder.write("x.csv", rows("a,0,512,0\n"));
    folder.refuses(2, &["--check needs a column"], &["replay", "x.csv", "--check"]);
    folder.refuses(2, &["absent.csv"], &["replay", "absent.csv"]);
    folder.write("x.csv", b"\x80\x04\x95");
    folder.refuses(2, &["x.csv", "pickle"], &["replay", "x.csv"]);
    let zipped = std::fs::read(fixture("allocator/default.csv.gz")).unwrap();
    folder.write("cut.csv.gz", &zipped[..zipped.len() / 2]);
    folder.refuses(2, &["cut.csv.gz", "cut off"], &["replay", "cut.csv.gz"]);
}

/// The small cases that users' reports led to, if they are there.
fn field(name: &str) -> Option<String> {
    let named = std::env::var_os("NEAP_TRUTH").map(std::path::PathBuf::from);
    let beside = || {
        let here = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        here.parent().map(|p| p.join("shared/truth"))
    };
    let path = named.or_else(beside)?.join("field").join(name);
    path.is_file().then(|| path.display().to_string())
}

/// Items 8 and 16: the right answers to the field's snapshots.
#[test]
fn snapshots_from_reports_have_their_right_answers() {
    let folder = Folder::new();
    for (name, reserved) in [("pool", 80), ("rank2", 40), ("long9", 40)] {
        let Some(file) = field(&format!("{name}.pickle")) else {
            println!("skipped: {name}.pickle is not there (NEAP_TRUTH)");
            continue;
        };
        let said = folder.json(&["replay", "--check", &file]);
        assert_eq!(number(&said, "peak_reserved_bytes"), reserved << 20, "{name}");
        assert_eq!(said["matches"], true, "{name}");
    }
    if let Some(file) = field("poolgone.pickle") {
        let said = folder.neap(&["replay", "--check", &file]);
        assert_eq!(said.code, Some(1), "{said:?}");
        assert!(said.stderr.contains("private pool") && !said.stdout.contains("every row"));
    }
    for (name, words) in
        [("empty", "empty file"), ("segments_only", "record_memory_history was not on")]
    {
        let Some(file) = field(&format!("{name}.pickle")) else { continue };
        folder.refuses(2, &[words], &["replay", &file]);
    }
}

/// Item 8: snapshots of random requests are checked under the limit that they were recorded under,
/// which no flag names, and each failure is a failure again.
#[test]
fn random_snapshots_are_checked_within_their_own_limit() {
    for (name, ooms) in [("expandable", 3), ("max_split", 2), ("collected", 0), ("all", 2)] {
        let file = fixture(&format!("snapshots/random-{name}.pickle.gz"));
        let said = Folder::new().json(&["replay", "--check", &file]);
        assert_eq!((number(&said, "ooms"), &said["matches"]), (ooms, &true.into()), "{name}");
    }
}
