//! docs/supported.md lists what the code has: its tables are made here and compared.
//!
//! `NEAP_BLESS=1` writes them.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use neap::device::builtin;
use neap::run::{self, Listed, Target};

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// The operators that the host runs, with their element types there and on CUDA.
fn operators(updates: bool) -> String {
    let cuda = run::operators(&Target::Cuda { libs: None, tf32: false });
    let cuda: BTreeMap<&str, &str> = cuda.iter().map(|o| (o.kind.as_str(), o.types)).collect();
    let mut table =
        String::from("| operator | types on the host | on CUDA |\n| --- | --- | --- |\n");
    for Listed { kind, types } in run::operators(&Target::Host) {
        if kind.starts_with("neap::") == updates {
            let there = cuda.get(kind.as_str()).copied().unwrap_or("");
            table += &format!("| `{kind}` | {types} | {there} |\n");
        }
    }
    table
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
    let made = with(&page, "devices", &devices());
    let made = with(&made, "optimizers", &operators(true));
    let made = with(&made, "operators", &operators(false));
    if std::env::var_os("NEAP_BLESS").is_some() {
        fs::write(&path, &made).unwrap();
        return;
    }
    assert!(
        page == made,
        "docs/supported.md is stale: NEAP_BLESS=1 cargo test --test suite supported:: writes it anew"
    );
}
