//! A device as the planner sees it: memory, peak rates, link, overheads.
//!
//! Its file form (`*.device.json`, [`Document`]) has the same keys after a format and a version.

use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::builtin;
use crate::files::{self, FileError};
use crate::job::Dtype;
use crate::units::Bytes;

const FORMAT: &str = "neap.device";
const VERSION: u32 = 1;

/// The largest file that is read, far above any profile.
const LARGEST_FILE: u64 = 1 << 20;

/// Peak arithmetic rates, in floating-point operations per second.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Rates {
    /// Single precision, without TF32.
    pub f32: u64,
    /// Half precision (f16 and bf16) on whatever unit is fastest.
    pub f16: u64,
    /// Double precision.
    pub f64: u64,
}

/// The host–device link. Rates are in bytes per second.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Host to device, alone.
    pub h2d: u64,
    /// Device to host, alone.
    pub d2h: u64,
    /// Host to device while the other direction is busy too.
    pub h2d_contended: u64,
    /// Device to host while the other direction is busy too.
    pub d2h_contended: u64,
    /// Time to submit one copy, in nanoseconds.
    pub overhead_ns: u64,
}

impl Link {
    /// The link with other rates, which `rate` gives for those to the device and from it.
    #[must_use]
    pub fn with(self, rate: [impl Fn(u64) -> u64; 2]) -> Self {
        let [to, from] = rate;
        Self {
            h2d: to(self.h2d),
            d2h: from(self.d2h),
            h2d_contended: to(self.h2d_contended),
            d2h_contended: from(self.d2h_contended),
            ..self
        }
    }
}

/// The properties on which the workspace of a GPU's kernels and libraries depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Multiprocessors {
    /// The major number of its compute capability.
    pub capability: u32,
    /// Number of multiprocessors.
    pub count: u32,
    /// Threads that one multiprocessor runs at once.
    pub threads: u32,
}

/// A device. All rates are at least 1; [`Profile::validate`] checks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Its name.
    pub name: String,
    /// The sources of its figures.
    pub source: String,
    /// Its memory in bytes.
    pub memory_bytes: Bytes,
    /// Bytes that the context takes before a job gets any; outside every budget.
    pub reserve_bytes: Bytes,
    /// Peak arithmetic rates.
    pub flops: Rates,
    /// Memory bandwidth in bytes per second.
    pub memory_bandwidth: u64,
    /// The share of the peak rates that a real operator reaches, in percent.
    pub efficiency_percent: u32,
    /// The link between host and device.
    pub link: Link,
    /// Time to launch one kernel, in nanoseconds.
    pub launch_overhead_ns: u64,
    /// Bytes of pinned host memory that may be used.
    pub pinned_bytes: Bytes,
    /// A GPU's multiprocessors; absent where the device is not a GPU, or where they are not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub multiprocessors: Option<Multiprocessors>,
}

impl Profile {
    /// The memory that jobs can use: without the context's reserve.
    #[must_use]
    pub const fn available(&self) -> Bytes {
        self.memory_bytes.saturating_sub(self.reserve_bytes)
    }

    /// The peak rate for elements of `dtype`.
    #[must_use]
    pub const fn rate(&self, dtype: Dtype) -> u64 {
        match dtype {
            Dtype::F16 | Dtype::Bf16 => self.flops.f16,
            Dtype::F64 | Dtype::C128 => self.flops.f64,
            _ => self.flops.f32,
        }
    }

    /// Checks that every figure is possible.
    ///
    /// # Errors
    /// One sentence that names the key at fault and its allowed values.
    pub fn validate(&self) -> Result<(), String> {
        let positive = [
            ("memory_bytes", self.memory_bytes.0),
            ("flops.f32", self.flops.f32),
            ("flops.f16", self.flops.f16),
            ("flops.f64", self.flops.f64),
            ("memory_bandwidth", self.memory_bandwidth),
            ("efficiency_percent", u64::from(self.efficiency_percent)),
            ("link.h2d", self.link.h2d),
            ("link.d2h", self.link.d2h),
            ("link.h2d_contended", self.link.h2d_contended),
            ("link.d2h_contended", self.link.d2h_contended),
        ];
        for (key, value) in positive {
            if value == 0 || value > 1 << 60 {
                return Err(format!("`{key}` is {value}; it must be from 1 to 2^60"));
            }
        }
        for (key, value) in [
            ("link.overhead_ns", self.link.overhead_ns),
            ("launch_overhead_ns", self.launch_overhead_ns),
        ] {
            if value > 1_000_000_000 {
                return Err(format!(
                    "`{key}` is {value}; an overhead above a second is not credible"
                ));
            }
        }
        if self.link.h2d_contended > self.link.h2d || self.link.d2h_contended > self.link.d2h {
            return Err("`link`: a direction can't be faster contended than alone".to_owned());
        }
        if self.efficiency_percent > 100 {
            return Err(format!(
                "`efficiency_percent` is {}; it must be from 1 to 100",
                self.efficiency_percent
            ));
        }
        if self.reserve_bytes >= self.memory_bytes {
            return Err("`reserve_bytes` leaves no memory".to_owned());
        }
        if let Some(m) = self.multiprocessors {
            for (key, value) in
                [("capability", m.capability), ("count", m.count), ("threads", m.threads)]
            {
                if value == 0 || value > 100_000 {
                    return Err(format!(
                        "`multiprocessors.{key}` is {value}; it must be from 1 to 100000"
                    ));
                }
            }
        }
        if self.pinned_bytes.0 > 1 << 60 {
            return Err("`pinned_bytes` must be at most 2^60".to_owned());
        }
        Ok(())
    }
}

/// Why a device profile could not be found, read or written.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The name is neither a built-in device nor a file.
    #[error("no device is named `{name}`, and there is no such file; built in are {}; others come from a *.device.json file", builtin::names().join(", "))]
    Unknown {
        /// The name as given.
        name: String,
    },
    /// The file could not be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// Not JSON, or a key is missing, unknown or of the wrong type.
    #[error("{}: {source}; compare it with what `neap device show rtx4090 --json` prints", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The JSON error, with line and column.
        source: serde_json::Error,
    },
    /// Another format or version.
    #[error("{}: this is {found}; wanted is \"format\": \"{FORMAT}\", \"version\": 1 or 2", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// The format and version found.
        found: String,
    },
    /// A figure is impossible.
    #[error("{}: {problem}; correct it there", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// The figure and its allowed values.
        problem: String,
    },
}

/// The fields with which every neap file starts.
#[derive(Deserialize)]
struct Header {
    #[serde(default)]
    format: serde_json::Value,
    #[serde(default)]
    version: serde_json::Value,
}

/// A `*.device.json` file: a [`Profile`] behind its format and version.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Document {
    /// `neap.device`.
    pub format: String,
    /// 1 or 2, which are alike for a device; 1 is written.
    pub version: u32,
    /// Its name.
    pub name: String,
    /// The sources of its figures.
    pub source: String,
    /// Its memory in bytes.
    pub memory_bytes: Bytes,
    /// Bytes that the context takes before a job gets any; outside every budget.
    pub reserve_bytes: Bytes,
    /// Peak arithmetic rates.
    pub flops: Rates,
    /// Memory bandwidth in bytes per second.
    pub memory_bandwidth: u64,
    /// The share of the peak rates that a real operator reaches, in percent.
    pub efficiency_percent: u32,
    /// The link between host and device.
    pub link: Link,
    /// Time to launch one kernel, in nanoseconds.
    pub launch_overhead_ns: u64,
    /// Bytes of pinned host memory that may be used.
    pub pinned_bytes: Bytes,
    /// A GPU's multiprocessors; absent where the device is not a GPU, or where they are not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub multiprocessors: Option<Multiprocessors>,
}

impl From<Profile> for Document {
    fn from(p: Profile) -> Self {
        let Profile {
            name,
            source,
            memory_bytes,
            reserve_bytes,
            flops,
            memory_bandwidth,
            efficiency_percent,
            link,
            launch_overhead_ns,
            pinned_bytes,
            multiprocessors,
        } = p;
        Self {
            format: FORMAT.to_owned(),
            version: VERSION,
            name,
            source,
            memory_bytes,
            reserve_bytes,
            flops,
            memory_bandwidth,
            efficiency_percent,
            link,
            launch_overhead_ns,
            pinned_bytes,
            multiprocessors,
        }
    }
}

impl From<Document> for Profile {
    fn from(d: Document) -> Self {
        Self {
            name: d.name,
            source: d.source,
            memory_bytes: d.memory_bytes,
            reserve_bytes: d.reserve_bytes,
            flops: d.flops,
            memory_bandwidth: d.memory_bandwidth,
            efficiency_percent: d.efficiency_percent,
            link: d.link,
            launch_overhead_ns: d.launch_overhead_ns,
            pinned_bytes: d.pinned_bytes,
            multiprocessors: d.multiprocessors,
        }
    }
}

/// The built-in device of that name, or the one that a `*.device.json` file (plain or gzip)
/// describes.
///
/// # Errors
/// When there is neither, or the file is not a valid profile. The error names the file, the place
/// in it, and the remedy.
pub fn load(name_or_path: &str) -> Result<Profile, DeviceError> {
    if let Some(profile) = builtin::find(name_or_path) {
        return Ok(profile);
    }
    let path = Path::new(name_or_path);
    if !name_or_path.contains(['/', '.']) && !path.exists() {
        return Err(DeviceError::Unknown { name: name_or_path.to_owned() });
    }
    let json = |source| DeviceError::Json { path: path.to_owned(), source };
    let content = files::read(path, LARGEST_FILE)?;
    let header: Header = serde_json::from_slice(&content).map_err(json)?;
    if header.format != FORMAT || (header.version != 1 && header.version != 2) {
        let found = format!("\"format\": {}, \"version\": {}", header.format, header.version);
        return Err(DeviceError::Format { path: path.to_owned(), found });
    }
    let profile = Profile::from(serde_json::from_slice::<Document>(&content).map_err(json)?);
    profile
        .validate()
        .map_err(|problem| DeviceError::Invalid { path: path.to_owned(), problem })?;
    Ok(profile)
}

/// Writes `profile` as a `*.device.json` file.
///
/// # Errors
/// When the file can't be written.
pub fn write(path: &Path, profile: &Profile) -> Result<(), DeviceError> {
    let document = Document::from(profile.clone());
    files::write(path, |out| {
        serde_json::to_writer_pretty(&mut *out, &document)?;
        out.write_all(b"\n")
    })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_in_profiles_round_trip_through_files() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.device.json");
        for name in builtin::names() {
            let profile = load(name).unwrap();
            write(&path, &profile).unwrap();
            assert_eq!(load(path.to_str().unwrap()).unwrap(), profile);
        }
    }

    #[test]
    fn bad_devices_are_refused_with_file_place_and_remedy() {
        let unknown = load("rtx9999").unwrap_err().to_string();
        assert!(unknown.contains("rtx9999") && unknown.contains("l40s, a6000"), "{unknown}");

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.device.json");
        write(&path, &load("h100").unwrap()).unwrap();
        let good = std::fs::read_to_string(&path).unwrap();
        for (from, to, want) in [
            ("neap.device", "neap.plan", "neap.plan"),
            ("\"version\": 1", "\"version\": 3", "\"version\": 3"),
            ("\"memory_bytes\": 85899345920", "\"memory_bytes\": -1", "line 6"),
            ("\"memory_bytes\": 85899345920", "\"memory_bytes\": 0", "`memory_bytes` is 0"),
            ("launch_overhead_ns", "launch_overhead", "launch_overhead`"),
            ("\n}", "", "EOF"),
        ] {
            let bad = good.replacen(from, to, 1);
            assert_ne!(bad, good, "{from}");
            std::fs::write(&path, bad).unwrap();
            let error = load(path.to_str().unwrap()).unwrap_err().to_string();
            assert!(error.contains("x.device.json") && error.contains(want), "{error}");
        }
        assert!(
            load(folder.path().to_str().unwrap()).unwrap_err().to_string().contains("directory")
        );
        assert!(load("no/such.device.json").is_err());
    }
}
