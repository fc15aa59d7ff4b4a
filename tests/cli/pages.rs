//! README.md and docs/ are true: every console block is run, in order, and its output compared.
//!
//! In a block `…` stands for any text, and a line `…` for any lines: what is left out, or differs
//! from run to run. `NEAP_BLESS=1` writes what the commands print now into the pages.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cli::folder::{Folder, fixture};

/// Pages whose commands need PyTorch; the Python package's tests run those.
const WITH_PYTORCH: [&str; 2] = ["dry.md", "torch.md"];

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// A command of a block, and the lines that it prints.
struct Step {
    command: String,
    printed: Vec<String>,
    /// The lines of the page that `printed` stands on.
    lines: std::ops::Range<usize>,
}

/// The commands of a page's console blocks.
fn steps(page: &str) -> Vec<Step> {
    let mut all: Vec<Step> = Vec::new();
    let (mut inside, mut fresh) = (false, false);
    for (index, line) in page.lines().enumerate() {
        match line {
            "```console" => (inside, fresh) = (true, true),
            "```" => inside = false,
            _ if !inside => {}
            _ => match line.strip_prefix("$ ") {
                Some(command) => {
                    let lines = index + 1..index + 1;
                    all.push(Step { command: command.to_owned(), printed: Vec::new(), lines });
                    fresh = false;
                }
                None => {
                    assert!(!fresh, "line {}: a block begins with a command", index + 1);
                    let step = all.last_mut().expect("a command comes first");
                    step.printed.push(line.to_owned());
                    step.lines.end = index + 1;
                }
            },
        }
    }
    all
}

/// Whether `line` is what `want` says, where `…` is any text.
fn line_matches(want: &str, line: &str) -> bool {
    let mut parts = want.split('…');
    let Some(mut rest) = parts.next().and_then(|first| line.strip_prefix(first)) else {
        return false;
    };
    let mut parts = parts.peekable();
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            return rest.ends_with(part);
        }
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.is_empty()
}

/// Whether `lines` are what `want` says, where a line `…` is any lines.
fn matches(want: &[String], lines: &[&str]) -> bool {
    match want.split_first() {
        None => lines.is_empty(),
        Some((first, rest)) if first == "…" => {
            (0..=lines.len()).any(|skipped| matches(rest, &lines[skipped..]))
        }
        Some((first, rest)) => lines
            .split_first()
            .is_some_and(|(line, others)| line_matches(first, line) && matches(rest, others)),
    }
}

/// Runs a command; what a terminal would show of it, without notes on how long it took.
fn run(folder: &Folder, command: &str) -> Vec<String> {
    let mut words = command.split_whitespace();
    assert_eq!(words.next(), Some("neap"), "`{command}` is not run by this test");
    let output = Command::new(env!("CARGO_BIN_EXE_neap"))
        .args(words)
        .current_dir(folder.path("."))
        .output()
        .unwrap();
    assert!(output.status.code().is_some_and(|c| c < 2), "{command}: {output:?}");
    let chatter = |line: &&str| {
        !["written: ", "note: ", "planned in ", "no CUDA device here"]
            .iter()
            .any(|start| line.starts_with(start))
    };
    let (stdout, stderr) =
        (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    stdout.lines().chain(stderr.lines().filter(chatter)).map(str::to_owned).collect()
}

/// A page's commands print what it says.
fn is_true(path: &Path) {
    let page = std::fs::read_to_string(path).unwrap();
    let folder = Folder::new();
    #[cfg(unix)]
    std::os::unix::fs::symlink(fixture(""), folder.path("fixtures")).unwrap();
    let (mut wrong, mut mended) = (Vec::new(), Vec::new());
    let steps = steps(&page);
    for step in &steps {
        let printed = run(&folder, &step.command);
        let lines: Vec<&str> = printed.iter().map(String::as_str).collect();
        if !matches(&step.printed, &lines) {
            wrong.push(format!("$ {}\n{}", step.command, printed.join("\n")));
            mended.push((step.lines.clone(), printed));
        }
    }
    if std::env::var_os("NEAP_BLESS").is_some() {
        let mut lines: Vec<String> = page.lines().map(str::to_owned).collect();
        for (range, printed) in mended.into_iter().rev() {
            lines.splice(range, printed);
        }
        std::fs::write(path, lines.join("\n") + "\n").unwrap();
        return;
    }
    assert!(
        wrong.is_empty(),
        "{} says something else than these commands print:\n\n{}",
        path.display(),
        wrong.join("\n\n")
    );
}

#[test]
#[cfg(unix)]
fn the_readme_is_true() {
    let path = root().join("README.md");
    is_true(&path);
    let lines = std::fs::read_to_string(path).unwrap().lines().count();
    assert!(lines <= 160, "README.md has {lines} lines; move a subject to docs/");
}

#[test]
#[cfg(unix)]
fn the_pages_of_docs_are_true() {
    let mut pages: Vec<PathBuf> = std::fs::read_dir(root().join("docs"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == "md"))
        .filter(|path| !WITH_PYTORCH.iter().any(|name| path.ends_with(name)))
        .collect();
    pages.sort();
    for page in pages {
        is_true(&page);
    }
}

#[test]
fn links_lead_somewhere() {
    let pages = std::fs::read_dir(root().join("docs")).unwrap().map(|e| e.unwrap().path());
    for page in pages.chain([root().join("README.md")]) {
        if page.extension().is_none_or(|e| e != "md") {
            continue;
        }
        let text = std::fs::read_to_string(&page).unwrap();
        for target in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let file = target.split('#').next().unwrap_or_default();
            if file.is_empty() || file.contains("://") {
                continue;
            }
            let there = page.parent().unwrap().join(file);
            assert!(there.exists(), "{}: {target} leads nowhere", page.display());
        }
    }
}

#[test]
fn dots_stand_for_what_is_left_out() {
    let lines = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
    let holds = |want: &str, is: &str| matches(&lines(want), &is.lines().collect::<Vec<_>>());
    assert!(holds("a\n…\nd", "a\nb\nc\nd") && holds("a\n…", "a") && holds("0  … ms", "0  12 ms"));
    assert!(!holds("a\n…\nd", "a\nb") && !holds("0  … ms", "0  12 s") && !holds("a", "a\nb"));
}
