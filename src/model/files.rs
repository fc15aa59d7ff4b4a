//! Reading files that may be gzipped, and writing files that appear whole or not at all.
//!
//! Every path that a user names goes through here.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use flate2::read::MultiGzDecoder;

/// A file that could not be read or written.
#[derive(Debug, thiserror::Error)]
#[error("{}: {doing}: {cause}", path.display())]
pub struct FileError {
    path: PathBuf,
    doing: &'static str,
    cause: io::Error,
}

impl FileError {
    fn new(path: &Path, doing: &'static str, cause: io::Error) -> Self {
        Self { path: path.to_owned(), doing, cause }
    }

    /// Whether as many files are open as this process or the machine may have.
    #[cfg(unix)]
    #[must_use]
    pub fn wants_room(&self) -> bool {
        matches!(self.cause.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
    }
}

/// A line of a table that is wrong.
#[derive(Debug, thiserror::Error)]
#[error("{}: line {line}: {problem}", path.display())]
pub struct LineError {
    /// The file.
    pub path: PathBuf,
    /// The line, from 1 with the header.
    pub line: u64,
    /// What is wrong, and the remedy.
    pub problem: String,
}

/// Opens `path` for reading. Content that starts like gzip is decompressed.
///
/// # Errors
/// When it can't be opened, is a directory, or its first bytes can't be read.
pub fn open(path: &Path) -> Result<Box<dyn BufRead>, FileError> {
    let file = File::open(path).map_err(|e| unread(path, e))?;
    opened(path, file)
}

/// Opens a file as [`open`] does, but no pipe or device, since these could be waited for without
/// end: for a path that another process or a file has named, and during work that a signal does not
/// end.
///
/// # Errors
/// As [`open`], and where it is no file.
pub fn open_regular(path: &Path) -> Result<Box<dyn BufRead>, FileError> {
    let mut options = File::options();
    options.read(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(
        &mut options,
        libc::O_NONBLOCK | libc::O_NOCTTY,
    );
    let file = options.open(path).map_err(|e| unread(path, e))?;
    let kind = file.metadata().map_err(|e| unread(path, e))?;
    if kind.is_file() || kind.is_dir() {
        opened(path, file)
    } else {
        let problem = "it is a pipe or a device; name a file";
        Err(unread(path, io::Error::other(problem)))
    }
}

fn unread(path: &Path, cause: io::Error) -> FileError {
    FileError::new(path, "cannot be read", cause)
}

fn opened(path: &Path, file: File) -> Result<Box<dyn BufRead>, FileError> {
    if file.metadata().map_err(|e| unread(path, e))?.is_dir() {
        return Err(unread(
            path,
            io::Error::new(io::ErrorKind::IsADirectory, "it is a directory; name a file"),
        ));
    }
    remember(path);
    let mut reader = BufReader::with_capacity(1 << 16, file);
    let gzipped = reader.fill_buf().map_err(|e| unread(path, e))?.starts_with(&[0x1f, 0x8b]);
    Ok(if gzipped {
        Box::new(BufReader::with_capacity(1 << 16, MultiGzDecoder::new(reader)))
    } else {
        Box::new(reader)
    })
}

/// The files that this process has opened for reading, by their canonical paths.
static READ: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

fn remember(path: &Path) {
    // A device or a pipe may be read and written at once.
    if let Ok(path) = path.canonicalize()
        && path.is_file()
    {
        READ.lock().unwrap_or_else(PoisonError::into_inner).insert(path);
    }
}

/// Whether this process has read the file behind `path`, so that no output replaces an input that
/// another input named.
#[must_use]
pub fn was_read(path: &Path) -> bool {
    let read = READ.lock().unwrap_or_else(PoisonError::into_inner);
    path.canonicalize().is_ok_and(|path| read.contains(&path))
}

/// The cache folder: NEAP_CACHE, or `neap` under XDG_CACHE_HOME or ~/.cache.
#[must_use]
pub fn cache() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    set("NEAP_CACHE").or_else(|| {
        Some(set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")))?.join("neap"))
    })
}

/// Reads all of `path`, decompressed. More than `limit` bytes are an error.
///
/// # Errors
/// As [`open`], when the content is cut off, or larger than `limit`.
pub fn read(path: &Path, limit: u64) -> Result<Vec<u8>, FileError> {
    content(path, open(path)?, limit)
}

/// Reads a file whose path another process has named, as text.
///
/// # Errors
/// As [`open_regular`] and [`read`], and when the content is not UTF-8.
pub fn read_regular(path: &Path, limit: u64) -> Result<String, FileError> {
    let bytes = content(path, open_regular(path)?, limit)?;
    String::from_utf8(bytes).map_err(|e| unread(path, io::Error::other(e)))
}

fn content(path: &Path, file: Box<dyn BufRead>, limit: u64) -> Result<Vec<u8>, FileError> {
    let fail = |e| unread(path, e);
    let mut all = Vec::new();
    file.take(limit + 1).read_to_end(&mut all).map_err(fail)?;
    if all.len() as u64 > limit {
        return Err(fail(io::Error::other(format!(
            "larger than {} once decompressed",
            crate::units::Bytes(limit)
        ))));
    }
    Ok(all)
}

/// Writes `path` by renaming a finished temporary file to it. After an error nothing is left
/// behind.
///
/// # Errors
/// When the folder can't be written, or `fill` fails.
pub fn write(
    path: &Path,
    fill: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<(), FileError> {
    let mut output = Output::new(path)?;
    let filled = fill(output.writer());
    filled.and_then(|()| output.keep()).map_err(|e| unwritten(path, e))
}

fn unwritten(path: &Path, cause: io::Error) -> FileError {
    FileError::new(path, "cannot be written", cause)
}

/// Where [`write()`] writes.
enum Output {
    /// A device or a pipe (/dev/stdout, /dev/null) can't be replaced by renaming.
    Through(io::BufWriter<Pipe>),
    /// To be renamed.
    Whole(io::BufWriter<tempfile::NamedTempFile>, PathBuf),
}

impl Output {
    fn new(path: &Path) -> Result<Self, FileError> {
        not_a_folder(path)?;
        let target = behind(path).to_path_buf();
        if std::fs::metadata(&target).is_ok_and(|m| !m.is_file()) {
            let file = std::fs::OpenOptions::new().write(true).open(target);
            let file = Pipe(file.map_err(|e| unwritten(path, e))?);
            return Ok(Self::Through(io::BufWriter::with_capacity(1 << 16, file)));
        }
        let file = temporary(&target)?;
        Ok(Self::Whole(io::BufWriter::with_capacity(1 << 16, file), target))
    }

    fn writer(&mut self) -> &mut dyn Write {
        match self {
            Self::Through(file) => file,
            Self::Whole(file, _) => file,
        }
    }

    fn keep(self) -> io::Result<()> {
        match self {
            Self::Through(mut file) => file.flush(),
            Self::Whole(file, target) => {
                let file = file.into_inner().map_err(io::IntoInnerError::into_error)?;
                // A file that only its user may read stays so.
                if let Ok(there) = std::fs::metadata(&target) {
                    file.as_file().set_permissions(there.permissions())?;
                }
                file.persist(target).map(drop).map_err(|e| e.error)
            }
        }
    }
}

/// An output whose reader may stop early (`| head`), which is no error.
struct Pipe(File);

impl Write for Pipe {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.0.write(bytes) {
            Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(bytes.len()),
            written => written,
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Checks that [`write()`] can write `path`, so that no work is done for a file that can't be kept.
///
/// # Errors
/// When it can't.
pub fn writable(path: &Path) -> Result<(), FileError> {
    not_a_folder(path)?;
    if std::fs::metadata(path).is_ok_and(|m| !m.is_file()) {
        Ok(())
    } else {
        temporary(&behind(path)).map(drop)
    }
}

/// The file to which a symbolic link leads, whether it exists or not, so that writing keeps the
/// link.
fn behind(path: &Path) -> std::borrow::Cow<'_, Path> {
    let mut target = std::borrow::Cow::Borrowed(path);
    // The operating system follows as many links.
    for _ in 0..40 {
        let Ok(next) = std::fs::read_link(&target) else { break };
        target = target.parent().unwrap_or(Path::new("")).join(next).into();
    }
    target
}

fn not_a_folder(path: &Path) -> Result<(), FileError> {
    #[cfg(unix)]
    if let Err(error) = std::fs::metadata(path)
        && error.raw_os_error() == Some(libc::ELOOP)
    {
        return Err(unwritten(path, error));
    }
    let problem = match path.file_name() {
        _ if path.is_dir() => "it is a directory; name a file",
        None => "it names no file",
        Some(_) => return Ok(()),
    };
    Err(FileError::new(
        path,
        "cannot be written",
        io::Error::new(io::ErrorKind::IsADirectory, problem),
    ))
}

/// An empty file beside `path`, gone when dropped.
fn temporary(path: &Path) -> Result<tempfile::NamedTempFile, FileError> {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut builder = tempfile::Builder::new();
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(std::fs::Permissions::from_mode(0o644));
    }
    builder.prefix(".neap-").tempfile_in(folder).map_err(|e| {
        // tempfile's own error names its temporary file, which the user does not know.
        let problem = match e.kind() {
            io::ErrorKind::NotFound => "there is no such folder; make it first".to_owned(),
            io::ErrorKind::NotADirectory => "its folder is a file; name another".to_owned(),
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                "its folder may not be written; name another".to_owned()
            }
            kind => format!("its folder cannot hold a new file ({kind}); name another"),
        };
        FileError::new(path, "cannot be written", io::Error::new(e.kind(), problem))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_write_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.json");
        assert!(write(&path, |_| Err(io::Error::other("no"))).is_err());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        write(&path, |f| f.write_all(b"{}")).unwrap();
        assert_eq!(read(&path, 100).unwrap(), b"{}");
        assert!(read(&path, 1).is_err());
        assert!(open(folder.path()).is_err());
    }

    #[cfg(unix)]
    #[test]
    fn a_symbolic_link_is_written_through_and_stays() {
        let folder = tempfile::tempdir().unwrap();
        let place = |name: &str| folder.path().join(name);
        std::fs::create_dir(place("deep")).unwrap();
        std::os::unix::fs::symlink("deep/x.json", place("link")).unwrap();
        for text in ["first", "second"] {
            writable(&place("link")).unwrap();
            write(&place("link"), |f| f.write_all(text.as_bytes())).unwrap();
            assert_eq!(std::fs::read_to_string(place("deep/x.json")).unwrap(), text);
            assert!(std::fs::symlink_metadata(place("link")).unwrap().is_symlink());
        }
        std::os::unix::fs::symlink("loop", place("loop")).unwrap();
        assert!(write(&place("loop"), |_| Ok(())).is_err());
        assert!(std::fs::symlink_metadata(place("loop")).unwrap().is_symlink());
    }

    #[cfg(unix)]
    #[test]
    fn a_file_that_others_may_not_read_stays_so() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("private");
        std::fs::write(&path, "first").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        write(&path, |f| f.write_all(b"second")).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "second");
    }
}
