//! `FILE.graph.json@0.5`: a job, and the largest share of its tensors that may be swapped.

use std::ffi::OsString;
use std::path::PathBuf;

use neap::plan::{Method, Share};

/// A graph's file and the share of the job that may be swapped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobArg {
    /// Its file.
    pub path: PathBuf,
    /// The share of its tensors that may be swapped.
    pub share: Share,
}

impl JobArg {
    /// Reads a file's name, which may end in `@` and a share. If a file has the whole text as its
    /// name, that file is meant.
    ///
    /// # Errors
    /// When the text after the `@` is a number but not a share.
    pub fn read(text: OsString) -> Result<Self, String> {
        // A name may contain an @, or bytes that are not UTF-8.
        let number =
            |tail: &str| tail.starts_with(|c: char| c.is_ascii_digit() || c == '-' || c == '.');
        let parts = text
            .to_str()
            .and_then(|t| t.rsplit_once('@'))
            .filter(|(path, tail)| !path.is_empty() && number(tail));
        let Some((path, share)) = parts.filter(|_| !PathBuf::from(&text).is_file()) else {
            return Ok(Self { path: PathBuf::from(text), share: Share::ALL });
        };
        let share = share.parse().map_err(|()| {
            format!(
                "`@{share}` is not a share of the tensors; give a number from 0 to 1 with at most \
                 three decimals, such as {path}@0.5"
            )
        })?;
        Ok(Self { path: PathBuf::from(path), share })
    }

    /// The planner, limited to the job's share.
    ///
    /// # Errors
    /// When the planner has no such limit.
    pub fn limited(&self, method: Method) -> anyhow::Result<Method> {
        if self.share == Share::ALL {
            return Ok(method);
        }
        method.limited(self.share).ok_or_else(|| {
            anyhow::anyhow!(
                "{}@{}: planner {} has no limit on swapping; use neap or tensile, or leave the \
                 share out",
                self.path.display(),
                self.share,
                method.name()
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_read() {
        let job = |path: &str, share: &str| {
            Ok(JobArg { path: PathBuf::from(path), share: share.parse().unwrap() })
        };
        let read = |text: &str| JobArg::read(OsString::from(text));
        assert_eq!(read("a.graph.json"), job("a.graph.json", "1"));
        assert_eq!(read("a.graph.json@0.5"), job("a.graph.json", "0.500"));
        assert_eq!(read("a@home.graph.json"), job("a@home.graph.json", "1.0"));
        assert_eq!(read("a@1"), job("a", "1"));
        for bad in ["a@2", "a@-1", "a@0.55555", "a@1e9"] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }
}
