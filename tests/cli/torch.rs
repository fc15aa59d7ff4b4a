//! `neap torch` around any command. What acts inside Python has tests of its own (`python/tests`).

use std::process::{Command, Output};

use serde_json::{Value, json};
use tempfile::TempDir;

/// Runs `neap torch` with these flags around a line of shell, allocator settings as given.
fn torch(flags: &[&str], line: &str, settings: Option<&str>) -> Output {
    let folder = TempDir::new().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_neap"));
    command.arg("torch").args(flags).args(["--", "sh", "-c", line]).current_dir(folder.path());
    command.env("XDG_CACHE_HOME", folder.path());
    command.env_remove("PYTORCH_CUDA_ALLOC_CONF").env_remove("PYTORCH_ALLOC_CONF");
    settings.inspect(|text| {
        command.env("PYTORCH_CUDA_ALLOC_CONF", text);
    });
    command.output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn the_exit_code_is_the_commands() {
    for code in [0, 1, 7] {
        let found = torch(&["--budget", "1GiB"], &format!("exit {code}"), None);
        assert_eq!(found.status.code(), Some(code), "{}", text(&found.stderr));
        assert!(text(&found.stderr).contains("no Python process of this command"));
    }
    let found = torch(&["--budget", "1GiB"], "kill -9 $$", None);
    assert_eq!(found.status.code(), Some(128 + 9));
}

#[test]
fn the_script_finds_what_was_asked_for() {
    let line = "echo $NEAP_TORCH_BUDGET $NEAP_TORCH_RECOMPUTE $NEAP_TORCH_EARLY \
                $PYTORCH_CUDA_ALLOC_CONF; \
                p=${PYTHONPATH%%:*}; test -e $p/sitecustomize.py && echo hook; \
                p=${PYTHONPATH#*:}; test -e ${p%%:*}/neap/torch/_fit.py && echo package";
    let found = torch(&["--budget", "1GiB"], line, None);
    let expected = "1073741824 1 0 expandable_segments:True\nhook\npackage\n";
    assert_eq!(text(&found.stdout), expected, "{}", text(&found.stderr));
    let flags = ["--budget", "62.5%", "--no-recompute", "--early-updates"];
    let found = torch(&flags, line, Some("max_split_size_mb:64"));
    let expected = "62.500% 0 1 max_split_size_mb:64\nhook\npackage\n";
    assert_eq!(text(&found.stdout), expected, "{}", text(&found.stderr));
}

#[test]
fn reports_of_all_processes_are_the_answer_with_json() {
    let line = "echo said; echo '{\"pid\": 1}' > $NEAP_TORCH_DIR/report-1.json; \
                echo '{\"pid\": 2}' > $NEAP_TORCH_DIR/report-2.json; echo no > \
                $NEAP_TORCH_DIR/report-3.json";
    let found = torch(&["--budget", "1GiB", "--json"], line, None);
    let reports: Value = serde_json::from_slice(&found.stdout).unwrap();
    assert_eq!(reports, json!([{"pid": 1}, {"pid": 2}]));
    assert!(text(&found.stderr).contains("said"));
}

#[test]
fn bad_use_runs_nothing() {
    let folder = TempDir::new().unwrap();
    let write = |name: &str, content: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, content).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let other = write("other.json", "{\"format\": \"neap.plan\"}");
    let newer = write("newer.json", "{\"format\": \"neap.torch.schedule\", \"version\": 9}");
    let broken = write("broken.json", "{");
    let cases: [(&[&str], &str); 8] = [
        (&[], "--budget"),
        (&["--budget", "min"], "not a budget to run in"),
        (&["--budget", "much"], "budget"),
        (&["--budget", "1GiB", "--device", "abacus"], "abacus"),
        (&["--plan", "/nowhere.json"], "cannot be read"),
        (&["--plan", &broken], "is not JSON"),
        (&["--plan", &other], "neap.torch.schedule"),
        (&["--plan", &newer], "version 9"),
    ];
    for (flags, word) in cases {
        let found = torch(flags, "touch ran; echo ran", None);
        let said = text(&found.stderr);
        assert_eq!(found.status.code(), Some(2), "{flags:?}: {said}");
        assert!(said.contains(word), "{flags:?}: {said}");
        assert!(found.stdout.is_empty(), "{flags:?} ran the command");
    }
}
