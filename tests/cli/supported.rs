//! docs/supported.md lists what the code has: its tables are made here and compared.
//!
//! `NEAP_PAGES=write` writes them.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use neap::device::builtin;
use neap::run::backend::host::kernels;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// All names of operators in the sources below a folder.
fn names(folder: &Path, all: &mut BTreeSet<String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            names(&path, all);
        } else if path.extension().is_some_and(|e| e == "rs") {
            let text = fs::read_to_string(path).unwrap();
            let quoted = text.split('"').filter(|word| {
                (word.starts_with("aten::") || word.starts_with("neap::"))
                    && word.bytes().all(|b| b.is_ascii_alphanumeric() || b"_:.".contains(&b))
            });
            all.extend(quoted.map(str::to_owned));
        }
    }
}

/// The operators that the host runs.
fn operators() -> Vec<String> {
    let mut all = BTreeSet::new();
    names(&root().join("src/run/backend"), &mut all);
    all.into_iter().filter(|name| kernels::find(name).is_some()).collect()
}

fn devices() -> String {
    let mut table = String::from("| device | memory | source |\n| --- | ---: | --- |\n");
    for profile in builtin::names().iter().filter_map(|name| builtin::find(name)) {
        let source = profile.source.replace('|', "/");
        table += &format!("| `{}` | {} | {source} |\n", profile.name, profile.memory_bytes);
    }
    table
}

/// The page's text with the table `name` replaced.
fn with(page: &str, name: &str, table: &str) -> String {
    let (begin, end) = (format!("<!-- {name} -->\n"), format!("<!-- end of {name} -->"));
    let (before, rest) = page.split_once(&begin).unwrap_or_else(|| panic!("no table {name}"));
    let (_, after) = rest.split_once(&end).unwrap_or_else(|| panic!("table {name} has no end"));
    format!("{before}{begin}{table}{end}{after}")
}

#[test]
fn the_tables_are_the_codes() {
    let path = root().join("docs/supported.md");
    let page = fs::read_to_string(&path).unwrap();
    let all = operators();
    let list = |kinds: Vec<&String>| {
        let names: Vec<String> = kinds.iter().map(|k| format!("`{k}`")).collect();
        format!("{} kinds:\n\n{}\n", names.len(), names.join(",\n"))
    };
    let (updates, rest): (Vec<&String>, Vec<&String>) =
        all.iter().partition(|kind| kind.starts_with("neap::"));
    let made = with(&page, "devices", &devices());
    let made = with(&made, "optimizers", &list(updates));
    let made = with(&made, "operators", &list(rest));
    if std::env::var("NEAP_PAGES").is_ok_and(|v| v == "write") {
        fs::write(&path, &made).unwrap();
        return;
    }
    assert!(page == made, "docs/supported.md is stale: run this test with NEAP_PAGES=write");
}
