//! The memory that a job really used, from the file beside its trace, and the error of an estimate.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::files::{self, FileError};
use crate::units::Bytes;

/// The largest file that is read, far above any truth.
const LARGEST_FILE: u64 = 1 << 24;

/// The memory that a job used: the largest peaks over its iterations, and how it was run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Truth {
    /// Bytes taken from the device.
    pub reserved: Bytes,
    /// Bytes of blocks in use.
    pub allocated: Bytes,
    /// A description of the job, its model first: `resnet50:adam:…`.
    pub job: Option<String>,
    /// The allocator's configuration, in the form of PYTORCH_CUDA_ALLOC_CONF.
    pub alloc_conf: String,
}

/// Why a truth can't be used.
#[derive(Debug, thiserror::Error)]
pub enum TruthError {
    /// It can't be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// It is not a truth.
    #[error("{}: is no truth: {problem}; wanted is {{\"peaks\": [{{\"peak_reserved_bytes\": N, \"peak_allocated_bytes\": N}}, …]}}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
}

#[derive(Deserialize)]
struct Document {
    job: Option<String>,
    #[serde(default)]
    alloc_conf: String,
    peaks: Vec<Peak>,
}

#[derive(Deserialize)]
struct Peak {
    peak_reserved_bytes: Bytes,
    peak_allocated_bytes: Bytes,
}

impl Truth {
    /// Reads a truth.
    ///
    /// # Errors
    /// The error names the file and what is wrong with it.
    pub fn read(path: &Path) -> Result<Self, TruthError> {
        let bad = |problem: String| TruthError::Content { path: path.to_owned(), problem };
        let Document { job, alloc_conf, peaks } =
            serde_json::from_slice(&files::read(path, LARGEST_FILE)?)
                .map_err(|e| bad(e.to_string()))?;
        let most = |of: fn(&Peak) -> Bytes| peaks.iter().map(of).max().filter(|b| b.0 > 0);
        match (most(|p| p.peak_reserved_bytes), most(|p| p.peak_allocated_bytes)) {
            (Some(reserved), Some(allocated)) => Ok(Self { reserved, allocated, job, alloc_conf }),
            _ if peaks.is_empty() => Err(bad("its peaks are empty".to_owned())),
            _ => Err(bad("it has no peak above 0".to_owned())),
        }
    }
}

/// The relative error of `estimated`: 0.01 means one percent too much.
#[must_use]
pub fn relative(estimated: Bytes, actual: Bytes) -> f64 {
    match (estimated.0, actual.0) {
        (0, 0) => 0.0,
        (_, 0) => f64::INFINITY,
        (e, a) => (e as f64 - a as f64) / a as f64,
    }
}

/// The error of `estimate` in percent of `truth`; negative when it is too low.
#[must_use]
pub fn error_percent(estimate: Bytes, truth: Bytes) -> f64 {
    relative(estimate, truth) * 100.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_peaks_count_and_anything_else_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.json");
        let read = |text: &str| {
            std::fs::write(&path, text).unwrap();
            Truth::read(&path)
        };
        let peak = |r, a| {
            format!("{{\"after\":\"x\",\"peak_reserved_bytes\":{r},\"peak_allocated_bytes\":{a}}}")
        };
        let truth = read(&format!("{{\"peaks\":[{},{}]}}", peak(5, 3), peak(4, 4))).unwrap();
        assert_eq!((truth.reserved, truth.allocated), (Bytes(5), Bytes(4)));
        for bad in [
            "",
            "[]",
            "{}",
            "{\"peaks\":[]}",
            "{\"peaks\":[{\"peak_reserved_bytes\":-1,\"peak_allocated_bytes\":1}]}",
            &format!("{{\"peaks\":[{}]}}", peak(0, 0)),
        ] {
            assert!(read(bad).unwrap_err().to_string().contains("t.json"), "{bad}");
        }
        let run = read("{\"job\":\"m:adam\",\"alloc_conf\":\"max_split_size_mb:64\",\"peaks\":[{\"peak_reserved_bytes\":1,\"peak_allocated_bytes\":1}]}").unwrap();
        assert_eq!(
            (run.job.as_deref(), run.alloc_conf.as_str(), truth.alloc_conf.as_str()),
            (Some("m:adam"), "max_split_size_mb:64", "")
        );
    }

    #[test]
    fn errors_are_relative_to_the_truth() {
        assert_eq!(relative(Bytes(99), Bytes(100)), -0.01);
        assert_eq!(relative(Bytes(0), Bytes(0)), 0.0);
        assert!(relative(Bytes(1), Bytes(0)).is_infinite());
        assert!((error_percent(Bytes(99), Bytes(100)) + 1.0).abs() < 1e-12);
    }
}
