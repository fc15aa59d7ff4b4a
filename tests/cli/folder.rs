//! A temporary folder in which `neap` is run, and what it answered.

use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;

/// A folder that disappears with the test.
pub struct Folder(tempfile::TempDir);

/// What one run of `neap` said.
#[derive(Debug, PartialEq, Eq)]
pub struct Answer {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

/// A file of `fixtures/`, as an argument.
pub fn fixture(name: &str) -> String {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(name).display().to_string()
}

impl Folder {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn text(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap()
    }

    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        std::fs::write(self.path(name), content).unwrap();
    }

    /// The names of its files, sorted.
    pub fn files(&self) -> Vec<String> {
        let mut names: Vec<String> = std::fs::read_dir(self.0.path())
            .unwrap()
            .map(|f| f.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    /// Runs `neap` here.
    pub fn neap(&self, arguments: &[&str]) -> Answer {
        let output = Command::new(env!("CARGO_BIN_EXE_neap"))
            .args(arguments)
            .current_dir(self.0.path())
            .output()
            .unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Answer {
            code: output.status.code(),
            stdout: text(output.stdout),
            stderr: text(output.stderr),
        }
    }

    /// Runs `neap --json`, which must succeed with one object on stdout.
    pub fn json(&self, arguments: &[&str]) -> Value {
        let answer = self.neap(&[&["--json"], arguments].concat());
        assert_eq!(answer.code, Some(0), "neap {arguments:?}: {}", answer.stderr);
        let value: Value = serde_json::from_str(&answer.stdout).unwrap();
        assert!(value.is_object());
        value
    }

    /// Runs `neap`, which must end with `code`, say each of `words` on stderr, and add no file.
    pub fn refuses(&self, code: i32, words: &[&str], arguments: &[&str]) {
        let before = self.files();
        let answer = self.neap(arguments);
        assert_eq!(answer.code, Some(code), "neap {arguments:?}: {answer:?}");
        for word in words {
            assert!(
                answer.stderr.contains(word),
                "neap {arguments:?} does not say `{word}`: {}",
                answer.stderr
            );
        }
        assert!(!answer.stderr.contains("panicked"), "{}", answer.stderr);
        assert_eq!(self.files(), before, "neap {arguments:?} left a file");
    }

    /// Imports a fixture's trace as `job.graph.json`.
    pub fn import(&self, trace: &str, more: &[&str]) {
        self.json(&[&["import", &fixture(trace), "-o", "job.graph.json"], more].concat());
    }
}

/// An object's number.
pub fn number(of: &Value, key: &str) -> u64 {
    of[key].as_u64().unwrap_or_else(|| panic!("no number `{key}` in {of:#}"))
}
