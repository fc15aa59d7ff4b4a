//! `FILE.graph.json@0.5:0.25`: a job, the largest share of its tensors that may be swapped, and the
//! largest part of all jobs' swaps that it may make.

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;

use neap::job::Graph;
use neap::plan::together::Job;
use neap::plan::{Method, Of, Share};

use super::Site;

/// A graph's file and the limits on the job's swaps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobArg {
    /// Its file.
    pub path: PathBuf,
    /// The share of its tensors that may be swapped.
    pub share: Share,
    /// The part of all jobs' swaps that it may make.
    pub swap_limit: Share,
}

impl JobArg {
    /// Reads a file's name, which may end in `@` and a share, and then in `:` and another. If a
    /// file has the whole text as its name, that file is meant. A socket is read alike.
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
        let Some((path, share)) = parts.filter(|_| !PathBuf::from(&text).exists()) else {
            return Ok(Self {
                path: PathBuf::from(text),
                share: Share::ALL,
                swap_limit: Share::ALL,
            });
        };
        let (share, limit) = share.split_once(':').unwrap_or((share, "1"));
        let read = |text: &str, sign: char, what: &str, example: &str| {
            text.parse().map_err(|()| {
                format!(
                    "`{sign}{text}` is not a share of {what}; give a number from 0 to 1 with at \
                     most three decimals, such as {path}@{example}"
                )
            })
        };
        Ok(Self {
            path: PathBuf::from(path),
            share: read(share, '@', "the tensors", "0.5")?,
            swap_limit: read(limit, ':', "all jobs' swaps", "1:0.25")?,
        })
    }

    /// Whether there is a limit.
    pub fn is_limited(&self) -> bool {
        (self.share, self.swap_limit) != (Share::ALL, Share::ALL)
    }

    /// Refuses a limit on the part of all jobs' swaps for a job without others.
    ///
    /// # Errors
    /// When there is such a limit.
    pub fn alone(&self) -> anyhow::Result<()> {
        if self.swap_limit == Share::ALL {
            return Ok(());
        }
        let limit = self.swap_limit;
        anyhow::bail!(
            "{self}: a job without others makes all swaps; leave `:{limit}` out or add jobs"
        )
    }

    /// The planner, limited to the job's share.
    ///
    /// # Errors
    /// When the planner has no such limit.
    pub fn limited(&self, method: Method) -> anyhow::Result<Method> {
        if !self.is_limited() {
            return Ok(method);
        }
        let Some(limited) = method.limited(self.share) else {
            anyhow::bail!(
                "{self}: planner {} has no limit on swapping; use neap or tensile, or leave the \
                 shares out",
                method.name()
            )
        };
        Ok(if self.share == Share::ALL { method } else { limited })
    }

    /// The job as `method` plans it beside others; `file` is its path in the plan.
    pub fn job<'a>(
        &self,
        graph: &'a Graph,
        site: &'a Site,
        file: String,
        method: Method,
    ) -> Job<'a> {
        Job {
            graph,
            file: (file, site.sha256.clone()),
            latencies: &site.latencies,
            method,
            priority: self.share.priority(),
            swap_limit: self.swap_limit,
        }
    }

    /// What a plan records of the limits; with the job's number if the plan has several jobs.
    pub fn record(&self, job: Option<usize>) -> impl Iterator<Item = (String, String)> {
        self.share
            .record(Of::Tensors, job)
            .into_iter()
            .chain(self.swap_limit.record(Of::Swaps, job))
    }
}

impl fmt::Display for JobArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}:{}", self.path.display(), self.share, self.swap_limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_read() {
        let limited = |path: &str, share: &str, limit: &str| {
            let [share, swap_limit] = [share, limit].map(|text| text.parse().unwrap());
            Ok(JobArg { path: PathBuf::from(path), share, swap_limit })
        };
        let job = |path: &str, share: &str| limited(path, share, "1");
        let read = |text: &str| JobArg::read(OsString::from(text));
        assert_eq!(read("a.graph.json"), job("a.graph.json", "1"));
        assert_eq!(read("a.graph.json@0.5"), job("a.graph.json", "0.500"));
        assert_eq!(read("a@home.graph.json"), job("a@home.graph.json", "1.0"));
        assert_eq!(read("a@1"), job("a", "1"));
        assert_eq!(read("a@1:0.25"), limited("a", "1", "0.25"));
        for bad in ["a@2", "a@-1", "a@0.55555", "a@1e9", "a@1:", "a@1:2", "a@0.5:1:1"] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }
}
