//! `neap cache`: what neap keeps on this machine.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::{fmt, fs};

use anyhow::{Context, bail};
use neap::report::table::{Side, Table};
use neap::units::Bytes;
use serde::Serialize;

use crate::output::{self, Answer, note};

/// List, clear or make what neap keeps on this machine: CUDA kernels that it has compiled, plans of
/// `neap torch`, and what `neap dry` and `neap torch` have unpacked.
///
/// It is in the folder NEAP_CACHE, or else in `neap` under XDG_CACHE_HOME or ~/.cache.
#[derive(clap::Args)]
pub struct Flags {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    /// List what is in the folder.
    List,
    /// Delete it, but for what a running script uses. A run that needs it makes it again.
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
        kept.clear(&folder)?;
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

/// What a folder holds.
#[derive(Serialize)]
struct Kept {
    folder: String,
    cleared: bool,
    total_bytes: Bytes,
    kernels: Vec<Item>,
    /// Of `neap torch`.
    plans: Vec<Item>,
    packages: Vec<Package>,
}

#[derive(Serialize)]
struct Item {
    file: String,
    bytes: Bytes,
}

/// A folder that `neap dry` and `neap torch` unpacked.
#[derive(Serialize)]
struct Package {
    #[serde(flatten)]
    item: Item,
    state: &'static str,
}

/// The folder of plans within the cache.
const PLANS: &str = "torch";

impl Kept {
    fn read(folder: &Path) -> anyhow::Result<Self> {
        let (mut kernels, mut packages) = (Vec::new(), Vec::new());
        for (file, about) in entries(folder)? {
            // Other files in the folder are not neap's.
            if about.is_file() && file.ends_with(".cubin") {
                kernels.push(Item { file, bytes: Bytes(about.len()) });
            } else if about.is_dir()
                && let Some(state) = package(folder, &file)
            {
                let bytes = size(&folder.join(&file));
                packages.push(Package { item: Item { file, bytes }, state });
            }
        }
        let plans = entries(&folder.join(PLANS))?.into_iter().filter(|(file, about)| {
            let unfinished = file.ends_with(".tmp");
            about.is_file() && (file.ends_with(".json") || unfinished)
        });
        let plan = |(file, about): (String, fs::Metadata)| Item {
            file: format!("{PLANS}/{file}"),
            bytes: Bytes(about.len()),
        };
        let plans: Vec<Item> = plans.map(plan).collect();
        let folder = folder.display().to_string();
        let mut kept =
            Self { folder, cleared: false, total_bytes: Bytes::ZERO, kernels, plans, packages };
        kept.total_bytes = kept.items().map(|item| item.bytes).sum();
        Ok(kept)
    }

    fn items(&self) -> impl Iterator<Item = &Item> {
        let packages = self.packages.iter().map(|package| &package.item);
        self.kernels.iter().chain(&self.plans).chain(packages)
    }

    /// Deletes it. What stays is in use, and is listed no more.
    fn clear(&mut self, folder: &Path) -> anyhow::Result<()> {
        let gone = |path: &Path, done: io::Result<()>| match done {
            // Another process may have deleted it since the listing.
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
            done => done.with_context(|| format!("{}: cannot be deleted", path.display())),
        };
        for item in self.kernels.iter().chain(&self.plans) {
            let path = folder.join(&item.file);
            gone(&path, fs::remove_file(&path))?;
        }
        let mut deleted = Vec::new();
        for package in self.packages.drain(..) {
            let path = folder.join(&package.item.file);
            let used = fs::File::open(&path)
                .is_ok_and(|folder| matches!(folder.try_lock(), Err(fs::TryLockError::WouldBlock)));
            if used {
                note(&format!("note: {} stays: a running script uses it", path.display()));
                self.total_bytes = Bytes(self.total_bytes.0 - package.item.bytes.0);
            } else {
                gone(&path, fs::remove_dir_all(&path))?;
                deleted.push(package);
            }
        }
        self.packages = deleted;
        self.cleared = true;
        Ok(())
    }
}

/// A folder's entries by name, sorted; none where there is no such folder.
fn entries(folder: &Path) -> anyhow::Result<Vec<(String, fs::Metadata)>> {
    let place = || folder.display().to_string();
    let found = match fs::read_dir(folder) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.with_context(place)?,
    };
    let mut all = Vec::new();
    for entry in found {
        let entry = entry.with_context(place)?;
        if let (Ok(name), Ok(about)) = (entry.file_name().into_string(), entry.metadata()) {
            all.push((name, about));
        }
    }
    all.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(all)
}

/// What state a folder is in that `neap dry` or `neap torch` unpacked, if it is one.
#[cfg(target_os = "linux")]
fn package(folder: &Path, name: &str) -> Option<&'static str> {
    use crate::dry::unpack;
    if name.starts_with(unpack::UNFINISHED) {
        return Some("unfinished");
    }
    name.strip_prefix(unpack::FOLDER)?;
    Some(match name == unpack::folder_name() {
        false => "of another version",
        true if unpack::is_whole(&folder.join(name)) => "whole",
        true => "damaged",
    })
}

#[cfg(not(target_os = "linux"))]
fn package(_folder: &Path, _name: &str) -> Option<&'static str> {
    None
}

/// The bytes of all files in a folder.
fn size(folder: &Path) -> Bytes {
    let within = entries(folder).unwrap_or_default();
    let size = |(name, about): &(String, fs::Metadata)| match about.is_dir() {
        true => size(&folder.join(name)),
        false => Bytes(about.len()),
    };
    within.iter().map(size).sum()
}

impl fmt::Display for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = |many: usize, what: &str| match many {
            1 => format!("1 {what}"),
            many => format!("{many} {what}s"),
        };
        let counts = [
            count(self.kernels.len(), "compiled kernel"),
            count(self.plans.len(), "plan"),
            count(self.packages.len(), "unpacked package"),
        ]
        .join(", ");
        let (total, folder) = (self.total_bytes, &self.folder);
        if self.cleared {
            return write!(f, "deleted {counts}, together {total}, from {folder}");
        }
        if self.items().next().is_some() {
            let columns = [("file", Side::Left), ("size", Side::Right), ("state", Side::Left)];
            let mut table = Table::new(&columns);
            for item in self.kernels.iter().chain(&self.plans) {
                table.row([item.file.clone(), item.bytes.to_string(), String::new()]);
            }
            for Package { item, state } in &self.packages {
                table.row([item.file.clone(), item.bytes.to_string(), (*state).to_owned()]);
            }
            writeln!(f, "{table}")?;
        }
        write!(f, "{counts}, together {total}, in {folder}")
    }
}
