//! Folders that no other user of the machine can change.
//!
//! What neap executes it takes only from such a folder: a user who can write to it, or to a folder
//! above it, could have code of their own run in the caller's name.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::path::{Path, PathBuf};

/// Whether no other user can change what has this metadata: it is the caller's, and only the caller
/// may write to it.
#[cfg(unix)]
#[must_use]
pub fn is_own(about: &fs::Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    about.uid() == user() && about.mode() & 0o022 == 0
}

/// The user in whose name this process acts.
#[cfg(unix)]
#[must_use]
pub fn user() -> u32 {
    // SAFETY: it has no conditions and can't fail.
    unsafe { libc::geteuid() }
}

/// The folder's own path without symbolic links, if only the caller can change what is in it. It is
/// made, as are the folders above it, where it is missing.
///
/// # Errors
/// Why others can change it, or why it can't be made; the text begins with the path concerned.
pub fn folder(path: &Path) -> Result<PathBuf, String> {
    let failed = |error: io::Error| format!("{}: {error}", path.display());
    make(path).map_err(failed)?;
    let found = path.canonicalize().map_err(failed)?;
    alone(&found)?;
    Ok(found)
}

/// Makes a folder and those above it, for the caller alone whatever the umask is.
///
/// # Errors
/// When it can't be made.
pub fn make(path: &Path) -> io::Result<()> {
    let mut builder = DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(path)
}

/// Checks a folder that is there, named without symbolic links: it must be the caller's, those
/// above it the caller's or root's, and no other user may write to any of them. In a folder such as
/// /tmp, where all may write, no one else can rename or remove what is the caller's.
#[cfg(unix)]
fn alone(folder: &Path) -> Result<(), String> {
    use std::os::unix::fs::MetadataExt;
    const STICKY: u32 = 0o1000;
    for at in folder.ancestors() {
        let about = fs::symlink_metadata(at).map_err(|e| format!("{}: {e}", at.display()))?;
        let (owner, mode) = (about.uid(), about.mode());
        if owner != user() && (at == folder || owner != 0) {
            return Err(format!("{} belongs to another user, {owner}", at.display()));
        }
        let guarded = at != folder && mode & STICKY != 0;
        if mode & 0o022 != 0 && !guarded {
            return Err(format!(
                "{} may be written to by other users (mode {:03o}; `chmod go-w` changes that)",
                at.display(),
                mode & 0o7777
            ));
        }
    }
    Ok(())
}

#[cfg(not(unix))]
fn alone(_folder: &Path) -> Result<(), String> {
    Ok(())
}

/// Creates a file that is not there yet, for the caller alone whatever the umask is.
///
/// # Errors
/// When it can't be made, or something is there.
pub fn create(path: &Path) -> io::Result<File> {
    let mut options = fs::OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path)
}

/// A new folder for the caller alone in the system's place for temporary files, or in `within`;
/// gone when dropped.
///
/// # Errors
/// When it can't be made.
pub fn temporary(prefix: &str, within: Option<&Path>) -> io::Result<tempfile::TempDir> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(prefix);
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o700));
    match within {
        Some(folder) => builder.tempdir_in(folder),
        None => builder.tempdir(),
    }
}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn set(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn what_others_can_change_is_refused_and_named() {
        let room = temporary("neap-", None).unwrap();
        let (above, within) = (room.path().join("above"), room.path().join("above/cache"));
        let found = folder(&within).unwrap();
        assert_eq!(found, within.canonicalize().unwrap());
        for path in [room.path(), &above, &within] {
            assert_eq!(fs::metadata(path).unwrap().permissions().mode() & 0o7777, 0o700);
        }
        for (path, mode) in [(&within, 0o720), (&within, 0o1702), (&above, 0o770)] {
            set(path, mode);
            let why = folder(&within).unwrap_err();
            let named = path.canonicalize().unwrap();
            assert!(why.starts_with(named.to_str().unwrap()) && why.contains("written"), "{why}");
            set(path, 0o700);
        }
        // As /tmp is.
        set(&above, 0o1777);
        folder(&within).unwrap();
        // By a link it is the folder behind it that counts.
        std::os::unix::fs::symlink(&within, room.path().join("link")).unwrap();
        assert_eq!(folder(&room.path().join("link")).unwrap(), found);
    }
}
