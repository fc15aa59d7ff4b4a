//! Kernels are compiled side by side, once for each architecture and source.

use serde_json::Value;

use super::{faked, with};
use crate::cli::folder::{Answer, Folder, number};

/// `neap cache fill`, and how many programs it compiled, `together` at once.
fn fill(folder: &Folder, arch: &str, together: &str) -> (Answer, usize) {
    let (cache, log) = (folder.path("kept"), folder.path("compiled.txt"));
    folder.write("compiled.txt", "");
    let more = [
        ("NEAP_CACHE", cache.to_str().unwrap()),
        ("FAKE_COMPILED", log.to_str().unwrap()),
        ("FAKE_TOGETHER", together),
    ];
    let fill = ["--json", "cache", "fill", "--arch", arch, "--cuda-libs", "."];
    let answer = with(folder, &more, &fill);
    (answer, folder.text("compiled.txt").lines().count())
}

#[test]
fn all_kernels_are_compiled_at_once_and_kept() {
    let Some(folder) = faked() else { return };
    // Each waits for all others: one after another they would fail.
    let (answer, compiled) = fill(&folder, "sm_90", "11");
    assert_eq!((answer.code, compiled), (Some(0), 11), "{answer:?}");
    let kept: Value = serde_json::from_str(&answer.stdout).unwrap();
    assert_eq!(kept["kernels"].as_array().unwrap().len(), 11);
    assert_eq!(number(&kept, "total_bytes"), 11 * 7);
    // Nothing is compiled again, but for another GPU, and what is missing or empty.
    assert_eq!(fill(&folder, "sm_90", "1").1, 0);
    assert_eq!(fill(&folder, "sm_80", "11").1, 11);
    let named = |file: &Value| folder.path("kept").join(file["file"].as_str().unwrap());
    let kernels = kept["kernels"].as_array().unwrap();
    std::fs::remove_file(named(&kernels[0])).unwrap();
    std::fs::write(named(&kernels[1]), "").unwrap();
    let (answer, compiled) = fill(&folder, "sm_90", "2");
    assert_eq!((answer.code, compiled), (Some(0), 2), "{answer:?}");
    assert_eq!(fill(&folder, "sm_90", "1").1, 0);
}
