//! Finds the files of a folder that belong to one job.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::ScoreError;

/// The files of one job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pair {
    /// Their common name, without endings.
    pub name: String,
    /// NAME.profile.json or NAME.profile.json.gz.
    pub trace: PathBuf,
    /// NAME.truth.json or NAME.truth.json.gz.
    pub truth: PathBuf,
    /// NAME.truth.events.csv or NAME.truth.events.csv.gz, where there is one.
    pub events: Option<PathBuf>,
}

/// The pairs of `folder` by name, and a sentence for each file that lacks its partner.
///
/// # Errors
/// When the folder can't be listed or has no pair.
pub fn pairs(folder: &Path) -> Result<(Vec<Pair>, Vec<String>), ScoreError> {
    const KINDS: [&str; 3] = [".profile.json", ".truth.json", ".truth.events.csv"];
    let bad = |problem: String| ScoreError::Bad { path: folder.to_owned(), problem };
    let cannot = |e: std::io::Error| bad(format!("cannot be listed: {e}; name a folder"));
    let mut found: BTreeMap<String, [Option<PathBuf>; 3]> = BTreeMap::new();
    for entry in std::fs::read_dir(folder).map_err(cannot)? {
        let path = entry.map_err(cannot)?.path();
        let file = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let plain = file.strip_suffix(".gz").unwrap_or(&file);
        for (kind, ending) in KINDS.iter().enumerate() {
            if let Some(name) = plain.strip_suffix(ending).filter(|n| !n.is_empty()) {
                let slot = &mut found.entry(name.to_owned()).or_default()[kind];
                // If both exist, the uncompressed one.
                if slot.as_ref().is_none_or(|old| *old > path) {
                    *slot = Some(path.clone());
                }
            }
        }
    }
    let mut notes = Vec::new();
    let mut all = Vec::new();
    for (name, files) in found {
        match files {
            [Some(trace), Some(truth), events] => {
                if events.is_none() {
                    notes.push(format!("{name}: no {name}{}[.gz]: its errors count, its failures and conservation are not known", KINDS[2]));
                }
                all.push(Pair { name, trace, truth, events });
            }
            [Some(_), None, _] => {
                notes.push(format!("{name}: a trace without {name}{}; left out", KINDS[1]))
            }
            _ => notes.push(format!("{name}: a truth without {name}{}[.gz]; left out", KINDS[0])),
        }
    }
    if all.is_empty() {
        let more =
            if notes.is_empty() { String::new() } else { format!(" ({})", notes.join("; ")) };
        return Err(bad(format!(
            "no trace with its truth: put NAME.profile.json[.gz] beside NAME.truth.json{more}"
        )));
    }
    Ok((all, notes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_find_their_partners() {
        let folder = tempfile::tempdir().unwrap();
        for name in [
            "b.profile.json.gz",
            "b.truth.json",
            "b.truth.events.csv.gz",
            "a.profile.json",
            "a.profile.json.gz",
            "a.truth.json.gz",
            "c.truth.json",
            "d.profile.json",
            "other.csv",
            ".truth.json",
        ] {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        let (found, notes) = pairs(folder.path()).unwrap();
        let file = |name: &str| folder.path().join(name);
        assert_eq!(found.iter().map(|p| p.name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!((&found[0].trace, &found[0].events), (&file("a.profile.json"), &None));
        assert_eq!(found[1].events, Some(file("b.truth.events.csv.gz")));
        assert_eq!(notes.len(), 3, "{notes:?}");
        for (note, word) in
            notes.iter().zip(["a.truth.events.csv", "c.profile.json", "d.truth.json"])
        {
            assert!(note.contains(word), "{note}");
        }
    }

    #[test]
    fn a_folder_without_pairs_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        assert!(pairs(folder.path()).unwrap_err().to_string().contains("no trace with its truth"));
        std::fs::write(folder.path().join("x.truth.json"), "{}").unwrap();
        assert!(pairs(folder.path()).unwrap_err().to_string().contains("x.profile.json"));
        assert!(pairs(&folder.path().join("none")).is_err());
    }
}
