//! `neap cache`: the compiled CUDA kernels that neap keeps.

use std::fmt;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use neap::compact::CompactSort;
use neap::report::table::{Side, Table};
use neap::units::Bytes;
use serde::Serialize;

use crate::output::{self, Answer};

/// List, clear or make what neap keeps on this machine: CUDA kernels that it has compiled.
///
/// They are in the folder NEAP_CACHE, or else in `neap` under XDG_CACHE_HOME or ~/.cache.
#[derive(clap::Args)]
pub struct Flags {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    /// List the folder's compiled kernels.
    List,
    /// Delete them. A run that needs them compiles them again.
    Clear,
    /// Compile all kernels now, without a GPU: about a minute of processor time.
    Fill {
        /// The GPU's architecture.
        #[arg(long, value_name = "ARCH", default_value = "sm_90", value_parser = architecture)]
        arch: String,
        /// The folder of NVRTC, searched before Python environments and the loader's path.
        #[arg(long, value_name = "DIR")]
        cuda_libs: Option<PathBuf>,
    },
}

pub fn main(flags: &Flags, as_json: bool) -> anyhow::Result<Answer> {
    let Some(folder) = neap::files::cache() else {
        bail!("there is no cache folder: neither NEAP_CACHE, XDG_CACHE_HOME nor HOME is set")
    };
    if let Command::Fill { arch, cuda_libs } = &flags.command {
        neap::run::compile_kernels(arch, cuda_libs.as_deref()).map_err(anyhow::Error::msg)?;
    }
    let mut kept = Kept::read(&folder)?;
    if matches!(flags.command, Command::Clear) {
        for kernel in &kept.kernels {
            let path = folder.join(&kernel.file);
            match fs::remove_file(&path) {
                // Another process may have deleted it since the listing.
                Err(e) if e.kind() == ErrorKind::NotFound => {}
                done => done.with_context(|| format!("{}: cannot be deleted", path.display()))?,
            }
        }
        kept.cleared = true;
    }
    output::report(&kept, as_json)?;
    Ok(Answer::Yes)
}

fn architecture(text: &str) -> Result<String, String> {
    let digits = text.strip_prefix("sm_").unwrap_or_default();
    if digits.len() >= 2 && digits.bytes().all(|b| b.is_ascii_digit()) {
        Ok(text.to_owned())
    } else {
        Err(format!("`{text}` is no architecture such as sm_90"))
    }
}

/// The compiled kernels of a folder.
#[derive(Serialize)]
struct Kept {
    folder: String,
    cleared: bool,
    total_bytes: Bytes,
    kernels: Vec<Kernel>,
}

#[derive(Serialize)]
struct Kernel {
    file: String,
    bytes: Bytes,
}

impl Kept {
    fn read(folder: &Path) -> anyhow::Result<Self> {
        let mut kernels = Vec::new();
        let entries = match fs::read_dir(folder) {
            Err(e) if e.kind() == ErrorKind::NotFound => None,
            entries => Some(entries.with_context(|| folder.display().to_string())?),
        };
        for entry in entries.into_iter().flatten() {
            let entry = entry.with_context(|| folder.display().to_string())?;
            let file = PathBuf::from(entry.file_name());
            // Other files in the folder are not neap's.
            if file.extension().is_some_and(|e| e == "cubin")
                && let Ok(about) = entry.metadata()
                && about.is_file()
            {
                let file = file.to_string_lossy().into_owned();
                kernels.push(Kernel { file, bytes: Bytes(about.len()) });
            }
        }
        kernels.compact_sort_by(|a, b| a.file.cmp(&b.file));
        let total_bytes = kernels.iter().map(|k| k.bytes).sum();
        Ok(Self { folder: folder.display().to_string(), cleared: false, total_bytes, kernels })
    }
}

impl fmt::Display for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (count, total, folder) = (self.kernels.len(), self.total_bytes, &self.folder);
        if self.cleared {
            return write!(f, "deleted {count} compiled kernels, {total}, from {folder}");
        }
        if !self.kernels.is_empty() {
            let mut table = Table::new(&[("kernel", Side::Left), ("size", Side::Right)]);
            for kernel in &self.kernels {
                table.row([kernel.file.clone(), kernel.bytes.to_string()]);
            }
            writeln!(f, "{table}")?;
        }
        write!(f, "{count} compiled kernels, {total}, in {folder}")
    }
}
