//! Files that name pipes, and that ask for more than a machine has: refused, with one error, at
//! once.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::cli::folder::{Folder, fixture};

/// A folder with a plan, and a pipe that nothing is ever written to.
fn planned() -> Folder {
    let folder = Folder::new();
    folder.import("tiny_cnn-adam.et.json.gz", &[]);
    folder.json(&["plan", "job.graph.json", "--budget", "80%", "-o", "job.plan.json"]);
    assert!(Command::new("mkfifo").arg(folder.path("pipe")).status().unwrap().success());
    folder
}

fn start(folder: &Folder, arguments: &[&str]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_neap"));
    command.args(arguments).current_dir(folder.path("")).stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Whether a process ends within some seconds; it is killed if it doesn't.
fn ends(child: &mut Child) -> bool {
    let began = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if began.elapsed() > Duration::from_secs(20) {
            child.kill().unwrap();
            child.wait().unwrap();
            return false;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    true
}

/// Runs `neap`, which must end by itself with exit code 2 and one error that has these words.
fn refuses(folder: &Folder, words: &[&str], arguments: &[&str]) {
    let before = folder.files();
    let mut child = start(folder, arguments);
    assert!(ends(&mut child), "neap {arguments:?} waits without end");
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "neap {arguments:?}: {said}");
    let errors: Vec<&str> = said.lines().filter(|line| line.starts_with("error")).collect();
    assert!(matches!(errors[..], [one] if words.iter().all(|w| one.contains(w))), "{said}");
    assert_eq!(folder.files(), before, "neap {arguments:?} left a file");
}

#[test]
fn a_plan_that_names_a_pipe_as_its_graph_is_refused() {
    let folder = planned();
    let plan = folder.text("job.plan.json").replace("\"job.graph.json\"", "\"pipe\"");
    folder.write("bad.plan.json", plan);
    for command in ["run", "check", "simulate", "explain"] {
        refuses(&folder, &["bad.plan.json", "it is a pipe"], &[command, "bad.plan.json"]);
    }
}

#[test]
fn weights_come_from_files_alone() {
    let folder = planned();
    let run = ["run", "job.plan.json", "--on", "host", "--save", "out.safetensors", "--weights"];
    for (name, word) in [("pipe", "it is a pipe"), (".", "directory"), ("none", "No such file")] {
        refuses(&folder, &[word], &[&run[..], &[name]].concat());
    }
    // A link to a file is that file.
    let whole = fixture("tiny_cnn-adam.safetensors");
    std::os::unix::fs::symlink(&whole, folder.path("link")).unwrap();
    folder.json(&["run", "job.plan.json", "--on", "host", "--weights", "link"]);
}

#[test]
fn damaged_weights_are_refused() {
    let folder = planned();
    let whole = std::fs::read(fixture("tiny_cnn-adam.safetensors")).unwrap();
    let length = usize::try_from(u64::from_le_bytes(whole[..8].try_into().unwrap())).unwrap();
    let (header, data) = (&whole[8..8 + length], &whole[8 + length..]);
    let header: serde_json::Value = serde_json::from_slice(header).unwrap();
    let file = |header: &serde_json::Value, length: Option<u64>| {
        let text = header.to_string();
        let length = length.unwrap_or(text.len() as u64).to_le_bytes();
        [&length[..], text.as_bytes(), data].concat()
    };
    let name = "parameter:stem.1.weight";
    let with = |key: &str, value: serde_json::Value| {
        let mut header = header.clone();
        header[name][key] = value;
        file(&header, None)
    };
    let empty = json!({"dtype": "U8", "shape": [0], "data_offsets": [0, 0]});
    // So many that reading them all would take a gigabyte.
    let many: serde_json::Map<_, _> =
        (0..350_000).map(|number| (format!("tensor {number}"), empty.clone())).collect();
    let damaged = [
        whole[..7].to_vec(),
        whole[..8 + length / 2].to_vec(),
        whole[..whole.len() - 1].to_vec(),
        [&whole[..], b"x"].concat(),
        file(&header, Some(u64::MAX)),
        file(&header, Some(99_999_999)),
        with("data_offsets", json!([0, u64::MAX])),
        with("data_offsets", json!([u64::MAX, 0])),
        with("data_offsets", json!([0, 64])),
        with("data_offsets", json!([-1, 0.5])),
        with("shape", json!([u64::MAX, u64::MAX])),
        with("shape", json!([-1])),
        with("dtype", json!("NaN")),
        file(&many.into(), None),
    ];
    let save = ["--save", "out.safetensors"];
    let run = [&["run", "job.plan.json", "--on", "host", "--weights", "bad"], &save[..]].concat();
    folder.write("bad", "");
    for content in damaged {
        folder.write("bad", content);
        refuses(&folder, &["bad: "], &run);
    }
    let large = file(&json!({"x": "y".repeat(17 << 20)}), None);
    folder.write("bad", large);
    refuses(&folder, &["does not begin like a safetensors file"], &run);
}

#[test]
fn the_first_signal_ends_a_run_that_still_reads() {
    let folder = planned();
    let mut child = start(&folder, &["run", "pipe", "--on", "host"]);
    std::thread::sleep(Duration::from_millis(300));
    let number = child.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &number]).status().unwrap().success());
    assert!(ends(&mut child), "a signal did not end it");
}
