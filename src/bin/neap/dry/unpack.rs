//! Puts what the executable carries into a cache folder: the device library, the Python package,
//! the start-up hook.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::{env, fs, io};

use anyhow::Context;
use flate2::read::GzDecoder;
use sha2::{Digest, Sha256};

/// Compressed by build.rs, as are the package's files.
const DEVICE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libneap_dry.so.gz"));
const HOOK: &[u8] = include_bytes!("sitecustomize.py");
const TORCH_HOOK: &[u8] = include_bytes!("../torch/sitecustomize.py");
/// The package's files: a path and a number of bytes each, and their contents one after another.
const PYTHON: &[(&str, u64)] = include!(concat!(env!("OUT_DIR"), "/python_files.rs"));
const PYTHON_CONTENT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/python.gz"));

/// Where everything lies.
pub struct Unpacked {
    pub root: PathBuf,
    /// The device library.
    pub device: PathBuf,
    /// The folder with the start-up hook, for PYTHONPATH.
    pub hook: PathBuf,
    /// The same for `neap torch`.
    pub torch_hook: PathBuf,
    /// The folder with the package `neap`, for PYTHONPATH.
    pub python: PathBuf,
}

/// Unpacks, or finds what an earlier run unpacked: the folder is named by a hash of its content. A
/// cache that can't be used gives way to the run's own folder.
///
/// # Errors
/// When neither can be written.
pub fn unpack(scratch: &Path) -> anyhow::Result<Unpacked> {
    let named = |name: &str| env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let own = named("XDG_CACHE_HOME").or_else(|| Some(named("HOME")?.join(".cache")));
    if let Some(cache) = own.filter(|path| can_be_preloaded(path))
        && let Ok(unpacked) = unpack_in(&cache.join("neap"))
    {
        return Ok(unpacked);
    }
    if !can_be_preloaded(scratch) {
        anyhow::bail!(
            "{}: the loader takes no library from a path with a space or a colon; TMPDIR or \
             XDG_CACHE_HOME names another place",
            scratch.display()
        );
    }
    unpack_in(&scratch.join("cache"))
}

/// Whether LD_PRELOAD, which is cut at spaces and colons, can name a library in this folder.
fn can_be_preloaded(folder: &Path) -> bool {
    folder.to_str().is_some_and(|text| !text.contains([' ', ':', '\t', '\n']))
}

fn unpack_in(cache: &Path) -> anyhow::Result<Unpacked> {
    let root = cache.join(format!("dry-{}", hash()));
    let unpacked = Unpacked {
        device: root.join("libneap_dry.so"),
        hook: root.join("site"),
        torch_hook: root.join("site-torch"),
        python: root.join("python"),
        root,
    };
    let root = &unpacked.root;
    let last = PYTHON.last().map_or("", |(name, _)| *name);
    if !unpacked.device.exists() || !unpacked.python.join(last).exists() {
        // What stands there was damaged: a folder appears whole.
        let _ = fs::remove_dir_all(root);
        folder_by_rename(root, |new| {
            put(&new.join("libneap_dry.so"), GzDecoder::new(DEVICE))?;
            put(&new.join("site/sitecustomize.py"), HOOK)?;
            put(&new.join("site-torch/sitecustomize.py"), TORCH_HOOK)?;
            let mut content = GzDecoder::new(PYTHON_CONTENT);
            PYTHON.iter().try_for_each(|(name, length)| {
                put(&new.join("python").join(name), content.by_ref().take(*length))
            })
        })?;
    }
    Ok(unpacked)
}

fn put(path: &Path, mut content: impl Read) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    io::copy(&mut content, &mut fs::File::create(path)?)?;
    Ok(())
}

/// Fills a new folder beside `folder` and renames it, so that no other process sees half of it.
///
/// # Errors
/// When it can't be written.
pub fn folder_by_rename(
    folder: &Path,
    fill: impl FnOnce(&Path) -> io::Result<()>,
) -> anyhow::Result<()> {
    let beside = folder.parent().context("a cache folder has a parent")?;
    let place =
        || format!("{} cannot be written; XDG_CACHE_HOME names another cache", beside.display());
    fs::create_dir_all(beside).with_context(place)?;
    let new = tempfile::Builder::new().prefix(".new-").tempdir_in(beside).with_context(place)?;
    fill(new.path()).with_context(place)?;
    match fs::rename(new.path(), folder) {
        Ok(()) => {
            // The folder has a new name: there is nothing left to remove.
            let _ = new.keep();
            Ok(())
        }
        // Another process was quicker; both made the same.
        Err(_) if folder.exists() => Ok(()),
        Err(error) => Err(error).with_context(place),
    }
}

fn hash() -> String {
    let mut all = Sha256::new();
    for (name, length) in PYTHON {
        all.update((name.len() as u64).to_le_bytes());
        all.update(name);
        all.update(length.to_le_bytes());
    }
    for content in [PYTHON_CONTENT, HOOK, TORCH_HOOK, DEVICE] {
        all.update((content.len() as u64).to_le_bytes());
        all.update(content);
    }
    all.finalize().iter().take(8).map(|b| format!("{b:02x}")).collect()
}
