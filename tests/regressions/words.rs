//! Words on the command line that were misread, and what shells and people ask of it.

use crate::cli::folder::{Folder, fixture};

#[test]
fn a_budget_of_60_asks_for_60_percent() {
    let folder = Folder::new();
    folder.import("tiny_cnn-adam.et.json.gz", &[]);
    let words = ["did you mean 60%?", "12GiB"];
    folder.refuses(2, &words, &["plan", "job.graph.json", "--budget", "60"]);
    folder.refuses(2, &words, &["compare", "job.graph.json", "--budget", "80%,60"]);
}

#[test]
fn a_file_with_a_share_in_its_name_is_that_file() {
    let folder = Folder::new();
    std::fs::copy(fixture("mlp.graph.json"), folder.path("mlp.graph.json@0.5")).unwrap();
    folder.json(&["plan", "mlp.graph.json@0.5", "--device", "a6000", "--budget", "90%"]);
}

#[test]
fn the_version_names_the_commit() {
    let said = Folder::new().neap(&["--version"]);
    assert_eq!(said.code, Some(0));
    assert!(said.stdout.starts_with(&format!("neap {}", env!("CARGO_PKG_VERSION"))));
}

#[test]
fn shells_complete_and_man_reads() {
    let folder = Folder::new();
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let script = folder.neap(&["completions", shell]);
        assert_eq!(script.code, Some(0));
        assert!(script.stdout.contains("simulate"), "{shell}");
    }
    assert_eq!(folder.neap(&["man", "pages"]).code, Some(0));
    for page in ["neap.1", "neap-plan.1", "neap-cache-clear.1"] {
        assert!(folder.text(&format!("pages/{page}")).contains(".TH"), "{page}");
    }
}

#[test]
fn the_cache_is_listed_and_cleared() {
    let folder = Folder::new();
    std::fs::create_dir(folder.path("cache")).unwrap();
    folder.write("cache/pool-sm_90-1.cubin", "code");
    folder.write("cache/mine.txt", "not neap's");
    let cache = folder.path("cache").display().to_string();
    let neap = |what: &str| {
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_neap"))
            .args(["--json", "cache", what])
            .env("NEAP_CACHE", &cache)
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap()
    };
    assert_eq!(neap("list")["total_bytes"], 4);
    assert_eq!(neap("clear")["cleared"], true);
    assert_eq!(neap("list")["total_bytes"], 0);
    assert!(
        folder.path("cache/mine.txt").exists() && !folder.path("cache/pool-sm_90-1.cubin").exists()
    );
}

#[test]
fn a_bad_target_in_the_weights_names_their_file() {
    let folder = Folder::new();
    let trace = fixture("idioms/groups_three.et.json.gz");
    folder.neap(&["import", &trace, "-o", "job.graph.json"]);
    let mut bytes = std::fs::read(fixture("idioms/groups_three.safetensors")).unwrap();
    // Every number of the batch's targets becomes far too large.
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let text: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    let at = |i: usize| text["input:y"]["data_offsets"][i].as_u64().unwrap() as usize;
    bytes[8 + header + at(0)..8 + header + at(1)].fill(99);
    std::fs::write(folder.path("bad.safetensors"), bytes).unwrap();
    let run = ["run", "job.graph.json", "--on", "host", "--weights", "bad.safetensors"];
    folder.refuses(2, &["bad.safetensors", "target"], &run);
}
