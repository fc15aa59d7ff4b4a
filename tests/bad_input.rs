//! What a hostile or clumsy user gives `neap`: one clear error, the right exit code, no output left, no panic.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use flate2::{Compression, write::GzEncoder};
use serde_json::{Value, json};

/// A folder with a trace, its graph and a plan for it.
struct Room(tempfile::TempDir);

impl Room {
    fn new() -> Self {
        let room = Self(tempfile::tempdir().unwrap());
        let trace = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/tiny_cnn-adam.et.json.gz");
        std::fs::copy(trace, room.path("t.et.json.gz")).unwrap();
        room.must("import t.et.json.gz -o g.graph.json");
        room.must("plan g.graph.json --budget 70% -o p.plan.json");
        room
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn neap(&self, line: &str) -> Output {
        Command::new(env!("CARGO_BIN_EXE_neap"))
            .args(line.split(' '))
            .current_dir(self.0.path())
            .output()
            .unwrap()
    }

    fn must(&self, line: &str) {
        let output = self.neap(line);
        assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    }

    fn files(&self) -> Vec<String> {
        let mut all: Vec<_> = std::fs::read_dir(self.0.path())
            .unwrap()
            .map(|e| e.unwrap().file_name().to_string_lossy().into_owned())
            .collect();
        all.sort();
        all
    }

    /// Runs `line`, which must end with `code`, say all of `words` on stderr, and leave the folder as it is.
    fn refuses(&self, line: &str, code: i32, words: &[&str]) {
        let before = self.files();
        let output = self.neap(line);
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{line}: {text}");
        for word in words {
            assert!(text.contains(word), "{line}: `{word}` is not in: {text}");
        }
        assert!(
            text.lines().filter(|l| l.starts_with("error:")).count() <= 1 && text.len() < 6000,
            "{line}: {text}"
        );
        assert!(!text.contains("panicked") && !text.contains('\u{1b}'), "{line}: {text}");
        assert_eq!(self.files(), before, "{line}");
    }

    fn json(&self, name: &str) -> Value {
        serde_json::from_slice(&std::fs::read(self.path(name)).unwrap()).unwrap()
    }

    fn put(&self, name: &str, content: impl AsRef<[u8]>) {
        std::fs::write(self.path(name), content).unwrap();
    }

    /// A gzip of `head` and then `unit` again and again.
    fn bomb(&self, name: &str, head: &str, unit: &str, mebibytes: usize) {
        let mut gzip =
            GzEncoder::new(std::fs::File::create(self.path(name)).unwrap(), Compression::fast());
        gzip.write_all(head.as_bytes()).unwrap();
        let block = unit.repeat((1 << 20) / unit.len());
        for _ in 0..mebibytes {
            gzip.write_all(block.as_bytes()).unwrap();
        }
        gzip.finish().unwrap();
    }
}

#[test]
fn traces() {
    let room = Room::new();
    let gzip = std::fs::read(room.path("t.et.json.gz")).unwrap();
    let mut plain = Vec::new();
    std::io::Read::read_to_end(&mut flate2::read::GzDecoder::new(&*gzip), &mut plain).unwrap();
    let schema = |to: &str| {
        String::from_utf8(plain.clone()).unwrap().replacen("1.1.1-chakra.0.0.4", to, 1).into_bytes()
    };
    let many = format!("[{}1]", "1,".repeat(100_000));
    let shape = String::from_utf8(plain.clone()).unwrap().replacen(
        "\"shapes\": [[16,3,3,3]]",
        &format!("\"shapes\": [{many}]"),
        1,
    );
    for (name, content, words) in [
        ("cut.gz", gzip[..gzip.len() / 2].to_vec(), &["damaged or cut off"][..]),
        ("tail.gz", gzip[..gzip.len() - 4].to_vec(), &["damaged or cut off"]),
        ("cut.json", plain[..plain.len() / 2].to_vec(), &["cut off", "line"]),
        ("empty", Vec::new(), &["cut off"]),
        ("words", b"hello".to_vec(), &["not JSON", "line 1 column 1"]),
        ("binary", b"{\"schema\":\"\xff\"}".to_vec(), &["not JSON"]),
        ("list", b"[]".to_vec(), &["not an execution trace"]),
        (
            "nothing",
            schema("1.1.1-chakra.0.0.4")[..0].iter().copied().chain(*b"{}").collect(),
            &["no `schema`"],
        ),
        ("schema", schema("7.0"), &["schema `7.0` is not known", "record the trace"]),
        ("forged", schema("\\u001b[31m\\nerror: forged"), &["is not known"]),
        ("long", schema(&"x".repeat(1 << 20)), &["is not known"]),
        ("dims", shape.into_bytes(), &["[…]"]),
        ("deep", "[".repeat(1 << 20).into_bytes(), &["not an execution trace"]),
    ] {
        room.put(name, content);
        room.refuses(&format!("import {name} -o out.graph.json"), 2, &[&[name], words].concat());
    }
}

#[test]
fn graphs() {
    let room = Room::new();
    let graph = room.json("g.graph.json");
    let damage = |pointer: &str, to: Value| {
        let mut graph = graph.clone();
        *graph.pointer_mut(pointer).unwrap() = to;
        graph.to_string()
    };
    let ring = |n: usize| {
        let tensors: Vec<_> = (0..n).map(|i| json!({"name": i.to_string(), "role": "activation", "dtype": "f32", "shape": [4]})).collect();
        let operators: Vec<_> = (0..n)
            .map(|i| json!({"name": format!("o{i}"), "args": [{"tensor": i.to_string()}], "outputs": [{"tensor": ((i + 1) % n).to_string()}]}))
            .collect();
        json!({"format": "neap.graph", "version": 1, "name": "ring", "tensors": tensors, "operators": operators}).to_string()
    };
    let mut twice = graph.clone();
    let first = twice["tensors"][0].clone();
    twice["tensors"].as_array_mut().unwrap().push(first);
    for (content, words) in [
        (String::new(), &["cut off"][..]),
        (ring(3), &["circle: o0 -> o1 -> o2"]),
        (ring(20_000), &["circle: o0 -> o1", "[…]", "break it"]),
        (twice.to_string(), &["two tensors are named"]),
        (damage("/version", json!(3)), &["version 3"]),
        (damage("/format", json!("\n\u{1b}[31merror: forged")), &["neap.graph"]),
        (damage("/tensors/0/shape", json!([u64::MAX, 2])), &["tensor `"]),
        (damage("/tensors/0/shape", json!([-1])), &["line 1 column"]),
        (graph.to_string().replacen("\"role\":", "\"kept\":7,\"role\":", 1), &["unknown field"]),
        (damage("/tensors/0/name", json!(null)), &["line 1 column"]),
        (
            graph.to_string().replacen("\"role\":", "\"kept_until\":\"nope\",\"role\":", 1),
            &["`kept_until` names operator `nope`"],
        ),
        (
            graph.to_string().replacen("\"version\":1", "\"version\":1e400", 1),
            &["number out of range"],
        ),
    ] {
        room.put("x.graph.json", content);
        for command in [
            "inspect x.graph.json",
            "plan x.graph.json -o out.plan.json",
            "simulate x.graph.json",
            "run x.graph.json",
        ] {
            room.refuses(command, 2, &[&["x.graph.json"], words].concat());
        }
    }
}

#[test]
fn graphs_with_nothing_in_them_are_answered() {
    let room = Room::new();
    let empty = json!({"format": "neap.graph", "version": 1, "name": "\u{1b}[31mred\nerror: forged", "tensors": [], "operators": []});
    let mut idle = empty.clone();
    idle["tensors"] = json!([{"name": "t", "role": "input", "dtype": "f32", "shape": [4]}]);
    for graph in [empty, idle] {
        room.put("x.graph.json", graph.to_string());
        for command in ["inspect", "plan", "simulate", "run"] {
            let output = room.neap(&format!("{command} x.graph.json"));
            assert!(
                output.status.success(),
                "{command}: {}",
                String::from_utf8_lossy(&output.stderr)
            );
            assert!(!output.stdout.contains(&0x1b) && !output.stderr.contains(&0x1b), "{command}");
        }
    }
}

#[test]
fn plans() {
    let room = Room::new();
    let plan = room.json("p.plan.json");
    let damage = |pointer: &str, to: Value| {
        let mut plan = plan.clone();
        *plan.pointer_mut(pointer).unwrap() = to;
        plan.to_string()
    };
    for (content, code, words) in [
        (damage("/jobs/0/graph_sha256", json!("00")), 2, "made for another graph"),
        (
            damage("/jobs/0/graph", json!("nowhere")),
            2,
            "x.plan.json: its graph is not where it says: nowhere: cannot be read",
        ),
        (damage("/jobs/0/graph", json!("")), 2, "say where with `--graph`"),
        (damage("/jobs/0/graph", json!(".")), 2, "it is a directory"),
        (damage("/jobs", json!([])), 2, "has 0 jobs"),
        (damage("/jobs/0/latencies", json!([])), 2, "has no latency"),
        (damage("/jobs/0/latencies/0/ns", json!(u64::MAX)), 2, "impossible"),
        (damage("/jobs/0/placements/0/offset_bytes", json!(-1)), 2, "line 1 column"),
        (damage("/jobs/0/placements/0/offset_bytes", json!(u64::MAX)), 2, "2^62"),
        (damage("/jobs/0/placements/0/offset_bytes", json!(1u64 << 62)), 1, ""),
        (damage("/jobs/0/placements/0/offset_bytes", json!(1u64 << 30)), 1, ""),
        (
            damage("/jobs/0/events/0/tensor", json!("x\n\u{1b}[31m")),
            2,
            "event 0: the graph has no tensor",
        ),
        (damage("/jobs/0/events/0/event", json!("explode")), 2, "unknown variant"),
        (damage("/device/link/h2d", json!(0)), 2, "device"),
        (damage("/budget_bytes", json!(0)), 1, ""),
    ] {
        room.put("x.plan.json", content);
        for command in ["check", "simulate", "run"] {
            room.refuses(&format!("{command} x.plan.json"), code, &[words]);
        }
    }
    room.refuses("check g.graph.json", 2, &["neap.plan"]);
    room.refuses(
        "check p.plan.json --graph g.graph.json --graph g.graph.json",
        2,
        &["2 graphs are given"],
    );
}

#[test]
fn settings() {
    let room = Room::new();
    for budget in [
        "0",
        "0%",
        "-5",
        "-5%",
        "abc",
        "%",
        "nan",
        "1e400",
        "99999%",
        "18446744073709551616",
        "1000TiB",
    ] {
        room.refuses(
            &format!("plan g.graph.json --budget={budget} -o out.plan.json"),
            2,
            &["budget"],
        );
    }
    room.refuses("plan g.graph.json --budget 1B -o out.plan.json", 1, &["floor"]);
    for share in ["0", "2", "abc", "-1", "nan"] {
        room.refuses(&format!("run p.plan.json --throttle-link={share}"), 2, &["throttle-link"]);
    }
    for (name, content) in [("x.device.json", "{}"), ("y.device.json", "[["), ("z.device.json", "")]
    {
        room.put(name, content);
        room.refuses(&format!("plan g.graph.json --device {name} -o out.plan.json"), 2, &[name]);
    }
    for flag in ["--runs 5", "--seed 3"] {
        room.refuses(&format!("simulate p.plan.json {flag}"), 2, &["--noise"]);
    }
    room.put("x.csv", "key,ns,device\na,1,\"x\nerror: forged\nerror: again\"\n");
    let output = room.neap("plan g.graph.json --latencies x.csv");
    assert!(
        !String::from_utf8_lossy(&output.stderr).contains("\nerror:"),
        "names cannot forge lines"
    );
}

#[test]
fn outputs() {
    let room = Room::new();
    std::fs::create_dir(room.path("folder")).unwrap();
    let before: Vec<_> = ["t.et.json.gz", "g.graph.json", "p.plan.json"]
        .map(|n| std::fs::read(room.path(n)).unwrap())
        .into();
    for (line, words) in [
        (
            "import t.et.json.gz -o folder",
            &["folder: cannot be written: it is a directory; name a file"][..],
        ),
        (
            "import t.et.json.gz -o nowhere/x",
            &["nowhere/x: cannot be written: there is no such folder"],
        ),
        ("import t.et.json.gz -o g.graph.json/x", &["cannot be written"]),
        ("import t.et.json.gz -o t.et.json.gz", &["t.et.json.gz: is read by this command too"]),
        ("plan g.graph.json -o g.graph.json", &["is read by this command too"]),
        ("plan g.graph.json -o folder/../g.graph.json", &["is read by this command too"]),
        ("plan g.graph.json -o nowhere/x", &["there is no such folder"]),
        ("simulate p.plan.json --plot p.plan.json", &["is read by this command too"]),
        ("simulate p.plan.json --plot x.svg --timeline nowhere/x", &["there is no such folder"]),
        ("simulate p.plan.json --plot x --timeline folder/../x", &["named as an output twice"]),
        ("run p.plan.json --save x --latencies-out nowhere/x", &["there is no such folder"]),
        ("run p.plan.json --weights x --save folder", &["it is a directory"]),
    ] {
        room.refuses(line, 2, words);
        let text = String::from_utf8(room.neap(line).stderr).unwrap();
        assert_eq!(
            text.matches("cannot be written").count(),
            usize::from(text.contains("cannot be written")),
            "said once: {text}"
        );
    }
    let after: Vec<_> = ["t.et.json.gz", "g.graph.json", "p.plan.json"]
        .map(|n| std::fs::read(room.path(n)).unwrap())
        .into();
    assert_eq!(before, after);
    for input in ["folder", "nowhere"] {
        for command in ["import", "inspect", "plan", "simulate", "run", "check"] {
            room.refuses(&format!("{command} {input}"), 2, &[input]);
        }
    }
}

#[test]
fn weights() {
    let room = Room::new();
    let good = std::fs::read(
        Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/tiny_cnn-adam.safetensors"),
    )
    .unwrap();
    let (length, rest) = good.split_first_chunk::<8>().unwrap();
    let length = u64::from_le_bytes(*length) as usize;
    let header: Value = serde_json::from_slice(&rest[..length]).unwrap();
    let key =
        header.as_object().unwrap().keys().find(|k| k.starts_with("parameter:")).unwrap().clone();
    let with = |header: Value| {
        let text = header.to_string();
        [&(text.len() as u64).to_le_bytes(), text.as_bytes(), &rest[length..]].concat()
    };
    let damage = |field: &str, to: Value| {
        let mut header = header.clone();
        header[&key][field] = to;
        with(header)
    };
    let mut lacking = header.clone();
    lacking.as_object_mut().unwrap().remove(&key);
    for content in [
        Vec::new(),
        good[..good.len() - 9].to_vec(),
        good[..length / 2].to_vec(),
        [&u64::MAX.to_le_bytes()[..], b"{}"].concat(),
        [&good[..], b"x"].concat(),
        damage("dtype", json!("I32")),
        damage("dtype", json!("\n\u{1b}")),
        damage("shape", json!([u64::MAX, 2])),
        damage("data_offsets", json!([10, 0])),
        damage("data_offsets", json!([u64::MAX - 1, u64::MAX])),
        with(lacking),
    ] {
        room.put("x.safetensors", content);
        room.refuses("run g.graph.json --weights x.safetensors --save out", 2, &["x.safetensors"]);
    }
}

/// Small gzips that unpack to far more than any real file: refused within bounded text, hence bounded memory.
#[test]
fn bombs() {
    let room = Room::new();
    for unit in ["[", " "] {
        room.bomb("x.graph.json", "", unit, 160);
        room.refuses("inspect x.graph.json", 2, &["x.graph.json"]);
    }
    for (head, unit) in [
        ("", "["),
        ("", " "),
        (
            "{\"schema\":\"1.1.1-chakra.0.0.4\",\"nodes\":[",
            "{\"id\":1,\"name\":\"x\",\"ctrl_deps\":0},",
        ),
    ] {
        room.bomb("x.gz", head, unit, 80);
        room.refuses("import x.gz -o out.graph.json", 2, &["x.gz"]);
    }
}

/// What a command finds out to be its input only while it reads is not replaced either.
#[test]
fn outputs_never_replace_what_inputs_name() {
    let room = Room::new();
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/traces");
    let pairs: Vec<_> = std::fs::read_dir(fixtures).unwrap().map(|e| e.unwrap().path()).collect();
    for file in &pairs {
        std::fs::copy(file, room.path(file.file_name().unwrap().to_str().unwrap())).unwrap();
    }
    let name = |ending: &str| {
        pairs
            .iter()
            .map(|p| p.file_name().unwrap().to_str().unwrap())
            .find(|n| n.contains(ending))
            .unwrap()
    };
    for line in [
        "run p.plan.json --save g.graph.json".to_owned(),
        "run p.plan.json --latencies-out ./g.graph.json".to_owned(),
        "simulate p.plan.json --plot g.graph.json".to_owned(),
        "simulate p.plan.json --timeline g.graph.json".to_owned(),
        format!("score . --csv {}", name(".truth.json")),
        format!("score . --plot {}", name(".profile.json")),
        format!("score . --csv {}", name(".truth.events")),
    ] {
        let file = room.path(line.split(' ').next_back().unwrap());
        let before = std::fs::read(&file).unwrap();
        room.refuses(&line, 2, &["is read by this command too"]);
        assert_eq!(std::fs::read(&file).unwrap(), before, "{line}");
    }
}

/// Numbers in a trace, and in a flag beside one, that no sum of a few survives.
#[test]
fn traces_of_incredible_numbers_are_answered() {
    let room = Room::new();
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fixtures/traces/tiny_cnn-adam-8-32-start.profile.json.gz");
    std::fs::copy(&fixture, room.path("t.profile.json.gz")).unwrap();
    let mut text = String::new();
    std::io::Read::read_to_string(&mut neap::files::open(&fixture).unwrap(), &mut text).unwrap();
    // The number that was there goes to a key that no reader knows.
    for (key, value) in [
        ("Bytes", "4611686018427387904"),
        ("Bytes", "1099511627776"),
        ("Input Dims", "[[9223372036854775807, 9223372036854775807], [0, 9223372036854775807, 3]]"),
        ("Input Strides", "[[9223372036854775807, 9223372036854775807]]"),
        ("ts", "-9223372036854775"),
        ("dur", "9223372036854775"),
    ] {
        let damaged =
            text.replace(&format!("\"{key}\": "), &format!("\"{key}\": {value}, \"unread\": "));
        assert_ne!(damaged, text);
        room.put("x.profile.json", damaged);
        for flags in ["--by module", "--what-if dtype=bf16,zero-grad=start"] {
            let output = room.neap(&format!("estimate x.profile.json {flags}"));
            let text = String::from_utf8_lossy(&output.stderr);
            assert!(
                matches!(output.status.code(), Some(0 | 2)) && !text.contains("panicked"),
                "{key} {value} {flags}: {text}"
            );
        }
    }
    room.put(
        "x.profile.json",
        text.replacen("\"Bytes\": ", "\"Bytes\": 1099511627777, \"unread\": ", 1),
    );
    room.refuses(
        "estimate x.profile.json",
        2,
        &["x.profile.json: byte ", "1099511627777 bytes", "larger than 1.0 TiB"],
    );
    room.refuses(
        "estimate t.profile.json.gz --cudnn-workspace 1EiB",
        2,
        &["--cudnn-workspace", "at most 1.0 TiB"],
    );
}

/// Endless and not JSON: seen from the first byte.
#[cfg(target_os = "linux")]
#[test]
fn a_file_of_zeros_is_no_trace() {
    let room = Room::new();
    room.put("zeros.json", vec![0; 9 << 20]);
    for input in ["zeros.json", "/dev/zero"] {
        room.refuses(&format!("estimate {input}"), 2, &[input, "byte 0", "not JSON"]);
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_graph_whose_name_a_plan_cannot_hold_is_refused() {
    use std::os::unix::ffi::OsStrExt;
    let room = Room::new();
    let name = std::ffi::OsStr::from_bytes(b"\xff.graph.json");
    std::fs::copy(room.path("g.graph.json"), room.0.path().join(name)).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_neap"));
    let output = command
        .arg("plan")
        .arg(name)
        .args(["-o", "out.plan.json"])
        .current_dir(room.0.path())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.code() == Some(2) && text.contains("UTF-8") && text.contains("rename"),
        "{text}"
    );
    assert!(!room.path("out.plan.json").exists());
}

/// A reader that has seen enough is not an error, and does not turn a no into a yes.
#[test]
fn a_closed_pipe_is_no_error_and_changes_no_answer() {
    let room = Room::new();
    let mut unsafe_plan = room.json("p.plan.json");
    unsafe_plan["budget_bytes"] = json!(0);
    room.put("unsafe.plan.json", unsafe_plan.to_string());
    room.put("e.csv", "op,id,bytes,stream\na,1,9000000,0\n");
    for (line, code) in [
        ("inspect g.graph.json --top 1000", 0),
        ("check p.plan.json", 0),
        ("check unsafe.plan.json", 1),
        ("check unsafe.plan.json --json", 1),
        ("plan g.graph.json --budget 1B --json", 1),
        ("replay e.csv --device-bytes 1MiB", 1),
        ("diff p.plan.json unsafe.plan.json", 1),
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = Command::new(env!("CARGO_BIN_EXE_neap"));
        let output = command
            .args(line.split(' '))
            .current_dir(room.0.path())
            .stdout(writer)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{line}: {text}");
        assert!(!text.contains("error"), "{line}: {text}");
    }
}

/// A device that is full is named, by every command that writes to it.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_named() {
    let room = Room::new();
    room.put("e.csv", "op,id,bytes,stream\na,1,9000000,0\n");
    for line in [
        "replay e.csv --curve",
        "replay e.csv --plot",
        "simulate p.plan.json --timeline",
        "run p.plan.json --latencies-out",
    ] {
        room.refuses(&format!("{line} /dev/full"), 2, &["/dev/full: cannot be written"]);
    }
}

#[test]
fn tables_made_to_fill_memory_are_refused_at_their_first_long_row() {
    let room = Room::new();
    let jobs = "job,submit_s,persistent_bytes,ephemeral_bytes\n";
    let memory = "workload,persistent_bytes,ephemeral_bytes\n";
    room.put("jobs.csv", format!("{jobs}a,0,1,1\n"));
    for (line, header) in [
        ("share FILE", jobs),
        ("share jobs.csv --memory FILE", memory),
        ("train FILE", "key,ns\n"),
        ("place FILE", "id,lower,upper,size\n"),
    ] {
        // Half a mebibyte of gzip, half a gibibyte of text.
        for (head, unit) in
            [(header, ","), (header, "x"), (&*format!("{header}\""), "x\n"), ("", "key,")]
        {
            room.bomb("bomb.csv.gz", head, unit, 512);
            // More than the program itself takes, and far less than the text.
            let line = line.replace("FILE", "bomb.csv.gz");
            let limited = format!("ulimit -v 400000; exec \"$0\" {line}");
            let output = Command::new("sh")
                .args(["-c", &limited, env!("CARGO_BIN_EXE_neap")])
                .current_dir(room.0.path())
                .output()
                .unwrap();
            let text = String::from_utf8_lossy(&output.stderr);
            let at = if head.is_empty() { 1 } else { 2 };
            let place = format!("bomb.csv.gz: line {at}: is longer than 64.0 KiB");
            assert_eq!(output.status.code(), Some(2), "{line}: {text}");
            assert!(text.contains(&place), "{line}: {text}");
        }
    }
}
