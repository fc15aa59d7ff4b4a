//! Keeps outputs from replacing inputs. This is the only place that compares their paths.

use std::path::{Path, PathBuf};

use anyhow::bail;

/// The files that a command is to write.
pub struct Outputs(Vec<PathBuf>);

impl Outputs {
    /// Returns an error, before any work is done, if a file can't be written, is named twice, or is
    /// one of `inputs`.
    ///
    /// # Errors
    /// The error names the file.
    pub fn new(inputs: &[&Path], outputs: &[Option<&Path>]) -> anyhow::Result<Self> {
        let mut taken: Vec<(PathBuf, &str)> =
            inputs.iter().filter_map(|path| Some((file(path)?, READ))).collect();
        for output in outputs.iter().flatten() {
            neap::files::writable(output)?;
            let folder =
                output.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
            let same = file(output)
                .or_else(|| Some(folder.canonicalize().ok()?.join(output.file_name()?)));
            let Some(same) = same.filter(|s| s.is_file() || !s.exists()) else { continue };
            if let Some((_, why)) = taken.iter().find(|(t, _)| *t == same) {
                bail!("{}: {why}; name another output", output.display());
            }
            taken.push((same, "is named as an output twice"));
        }
        Ok(Self(outputs.iter().flatten().map(|path| path.to_path_buf()).collect()))
    }

    /// Returns an error if an output is a file that this process has read: other inputs may name
    /// further files. Call it when all inputs have been read and nothing is computed yet.
    ///
    /// # Errors
    /// The error names the file.
    pub fn apart_from_what_was_read(&self) -> anyhow::Result<()> {
        match self.0.iter().find(|path| neap::files::was_read(path)) {
            Some(path) => bail!("{}: {READ}; name another output", path.display()),
            None => Ok(()),
        }
    }
}

const READ: &str = "is read by this command too";

/// The file behind a path; `None` for devices and pipes, which may be read and written at the same
/// time.
fn file(path: &Path) -> Option<PathBuf> {
    path.canonicalize().ok().filter(|p| p.is_file())
}
