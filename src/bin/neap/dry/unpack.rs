//! Puts what the executable carries into a cache folder: the device library, the Python package,
//! the start-up hook.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::{fs, io};

use anyhow::Context;
use flate2::read::GzDecoder;
use neap::private;
use sha2::{Digest, Sha256};

use crate::output::note;

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
    /// The cache folder that holds it, for NEAP_CACHE: what runs neap again finds it whatever its
    /// working directory is.
    pub cache: PathBuf,
    /// The device library.
    pub device: PathBuf,
    /// The folder with the start-up hook, for PYTHONPATH.
    pub hook: PathBuf,
    /// The same for `neap torch`.
    pub torch_hook: PathBuf,
    /// The folder with the package `neap`, for PYTHONPATH.
    pub python: PathBuf,
    /// Held as long as it is used, so that `neap cache clear` leaves it.
    _used: Option<fs::File>,
}

/// Unpacks, or finds what an earlier run unpacked: the folder is named by a hash of its content. A
/// cache that can't be used, or in which another user could have put something else, gives way to
/// the run's own folder.
///
/// # Errors
/// When neither can be used.
pub fn unpack(scratch: &Path) -> anyhow::Result<Unpacked> {
    let own = neap::files::cache().and_then(|path| std::path::absolute(path).ok());
    let preloadable = own.as_deref().is_none_or(can_be_preloaded);
    if let Some(cache) = own.as_deref().filter(|_| preloadable) {
        match private::folder(cache) {
            Ok(cache) => {
                if let Ok(unpacked) = unpack_in(&cache) {
                    return Ok(unpacked);
                }
            }
            Err(why) => note(&format!(
                "note: {why}; so nothing is run from the cache {}, and what neap runs is unpacked \
                 for this run alone",
                cache.display()
            )),
        }
    }
    if !can_be_preloaded(scratch) {
        anyhow::bail!(
            "{}: the loader takes no library from a path with a space or a colon; TMPDIR or \
             XDG_CACHE_HOME names another place",
            scratch.display()
        );
    }
    let cache = private::folder(&scratch.join("cache"))
        .map_err(|why| anyhow::anyhow!("{why}; TMPDIR or XDG_CACHE_HOME names another place"))?;
    let mut unpacked = unpack_in(&cache)?;
    if let Some(own) = own.filter(|_| !preloadable) {
        unpacked.cache = own;
    }
    Ok(unpacked)
}

/// Whether LD_PRELOAD, which is cut at spaces and colons, can name a library in this folder.
fn can_be_preloaded(folder: &Path) -> bool {
    folder.to_str().is_some_and(|text| !text.contains([' ', ':', '\t', '\n']))
}

fn unpack_in(cache: &Path) -> anyhow::Result<Unpacked> {
    let root = cache.join(folder_name());
    let mut unpacked = Unpacked {
        cache: cache.to_owned(),
        device: root.join(LIBRARY),
        hook: root.join("site"),
        torch_hook: root.join("site-torch"),
        python: root.join("python"),
        root,
        _used: None,
    };
    let root = &unpacked.root;
    if !is_whole(root) {
        let damaged = root.symlink_metadata().is_ok();
        folder_by_rename(root, is_whole, |new| {
            contents(|name, content| put(&new.join(name), content))
        })?;
        if damaged {
            note(&format!("note: {} was damaged; it has been unpacked again", root.display()));
        }
    }
    unpacked._used = fs::File::open(root).ok();
    if let Some(folder) = &unpacked._used {
        // Where the file system has no locks, `neap cache clear` sees no use either.
        let _ = folder.try_lock_shared();
    }
    Ok(unpacked)
}

/// How the names of unpacked folders begin.
pub const FOLDER: &str = "dry-";
/// How the names of folders begin that are being filled.
pub const UNFINISHED: &str = ".new-";
/// How the names of folders with stubs begin, which lie in an unpacked one.
pub const STUBS: &str = "stubs-";
const LIBRARY: &str = "libneap_dry.so";
const HOOK_FILE: &str = "site/sitecustomize.py";
const TORCH_HOOK_FILE: &str = "site-torch/sitecustomize.py";

/// Hands over each file that is unpacked: its path below the folder, and its content.
fn contents(mut each: impl FnMut(&str, &[u8]) -> io::Result<()>) -> io::Result<()> {
    let mut content = Vec::new();
    GzDecoder::new(DEVICE).read_to_end(&mut content)?;
    each(LIBRARY, &content)?;
    each(HOOK_FILE, HOOK)?;
    each(TORCH_HOOK_FILE, TORCH_HOOK)?;
    let mut package = GzDecoder::new(PYTHON_CONTENT);
    PYTHON.iter().try_for_each(|(name, length)| {
        content.clear();
        package.by_ref().take(*length).read_to_end(&mut content)?;
        each(&format!("python/{name}"), &content)
    })
}

/// Whether a folder holds what was unpacked, byte for byte, nothing else that Python or the loader
/// would take, and nothing that another user may change.
pub fn is_whole(root: &Path) -> bool {
    let names = PYTHON.iter().map(|(name, _)| Path::new("python").join(name));
    let mut files: BTreeSet<PathBuf> = names.collect();
    files.extend([LIBRARY, HOOK_FILE, TORCH_HOOK_FILE].map(PathBuf::from));
    let known = |path: &Path| {
        // Python keeps its bytecode beside each file; the stubs have a check of their own.
        let bytecode = path.extension().is_some_and(|e| e == "pyc")
            && path.parent().is_some_and(|p| p.ends_with("__pycache__"));
        let first = path.components().next().map(|c| c.as_os_str().to_string_lossy());
        bytecode || files.contains(path) || first.is_some_and(|name| name.starts_with(STUBS))
    };
    let alike = |name: &str, content: &[u8]| match fs::read(root.join(name)) {
        Ok(found) if found == content => Ok(()),
        _ => Err(io::ErrorKind::InvalidData.into()),
    };
    only_ours(root, Path::new(""), &known) && contents(alike).is_ok()
}

/// Whether all in a folder is the caller's, may not be written to by others, and is `known` by its
/// path below `root`.
fn only_ours(root: &Path, below: &Path, known: &dyn Fn(&Path) -> bool) -> bool {
    let at = root.join(below);
    let Ok(about) = at.symlink_metadata() else { return false };
    if about.is_symlink() {
        // That a link may be written to by others says nothing.
        let place = below.parent().and_then(Path::to_str).unwrap_or_default();
        return about.uid() == private::user() && place.starts_with(STUBS) && known(below);
    }
    if !private::is_own(&about) {
        return false;
    }
    if !about.is_dir() {
        return about.is_file() && known(below);
    }
    let Ok(mut entries) = fs::read_dir(&at) else { return false };
    entries.all(|entry| {
        entry.is_ok_and(|entry| only_ours(root, &below.join(entry.file_name()), known))
    })
}

/// Writes a new file for the caller alone, through to the disk.
pub fn put(path: &Path, content: &[u8]) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        private::make(folder)?;
    }
    let mut file = private::create(path)?;
    file.write_all(content)?;
    file.sync_all()
}

/// Fills a new folder beside `folder` and gives it that name, so that no other process sees half of
/// it, nor finds half of it after a loss of power. What stood there, and is not whole, goes.
///
/// # Errors
/// When it can't be written, or what stands there can't be moved away.
pub fn folder_by_rename(
    folder: &Path,
    is_whole: impl Fn(&Path) -> bool,
    fill: impl FnOnce(&Path) -> io::Result<()>,
) -> anyhow::Result<()> {
    let beside = folder.parent().context("a cache folder has a parent")?;
    let place =
        || format!("{} cannot be written; XDG_CACHE_HOME names another cache", beside.display());
    let new = private::temporary(UNFINISHED, Some(beside)).with_context(place)?;
    let filled = new.path().join("new");
    private::make(&filled).and_then(|()| fill(&filled)).with_context(place)?;
    sync_folders(&filled).with_context(place)?;
    // Another process may have been quicker; both made the same.
    if is_whole(folder) {
        return Ok(());
    }
    if folder.symlink_metadata().is_ok() {
        let _ = fs::rename(folder, new.path().join("damaged"));
    }
    match fs::rename(&filled, folder) {
        Ok(()) => fs::File::open(beside).and_then(|f| f.sync_all()).with_context(place),
        Err(_) if is_whole(folder) => Ok(()),
        Err(error) => Err(error).with_context(place),
    }
}

/// Writes the entries of a folder and of those within through to the disk.
fn sync_folders(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            sync_folders(&entry.path())?;
        }
    }
    fs::File::open(folder)?.sync_all()
}

/// The name of the folder that this executable unpacks: a hash of its content is part of it.
pub fn folder_name() -> String {
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
    let hash: String = all.finalize().iter().take(8).map(|b| format!("{b:02x}")).collect();
    format!("{FOLDER}{hash}")
}
