//! Finds and opens NVIDIA's libraries at run time: in given folders, in Python environments, on the
//! loader's path.
//!
//! Each library is opened by its absolute path where one is found. Its version is read, and it is
//! never closed, so that its functions may be called at any time.

use std::env;
use std::ffi::{CStr, c_char, c_int};
use std::path::{Path, PathBuf};

use libloading::Library;

/// A library that the device uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// Compiles kernels.
    Nvrtc,
    /// Multiplies matrices.
    CublasLt,
    /// Convolves.
    Cudnn,
}

impl Which {
    /// Its name in messages.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nvrtc => "NVRTC",
            Self::CublasLt => "cuBLASLt",
            Self::Cudnn => "cuDNN",
        }
    }

    /// The major version that neap supports.
    #[must_use]
    pub const fn major(self) -> u64 {
        match self {
            Self::Nvrtc | Self::CublasLt => 13,
            Self::Cudnn => 9,
        }
    }

    const fn stem(self) -> &'static str {
        match self {
            Self::Nvrtc => "libnvrtc.so.",
            Self::CublasLt => "libcublasLt.so.",
            Self::Cudnn => "libcudnn.so.",
        }
    }

    fn file(self) -> String {
        format!("{}{}", self.stem(), self.major())
    }
}

/// Why a library can't be used.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum LibError {
    /// It was not found.
    #[error(
        "{name} {major} ({file}) is not found in {folders} folders nor on the loader's path; name its folder with --cuda-libs"
    )]
    Missing {
        /// Its name.
        name: &'static str,
        /// The version that is needed.
        major: u64,
        /// The name of its file.
        file: String,
        /// How many folders were searched.
        folders: usize,
    },
    /// Only another version was found.
    #[error("{name} at {} is version {found}; version {needed} is needed: name its folder with --cuda-libs", place.display())]
    Version {
        /// Its name.
        name: &'static str,
        /// The library or folder that was tried.
        place: PathBuf,
        /// Its major version.
        found: u64,
        /// The version that is needed.
        needed: u64,
    },
    /// It can't be opened, or lacks a function.
    #[error("{name} at {} can't be used: {problem}", place.display())]
    Broken {
        /// Its name.
        name: &'static str,
        /// The library or folder that was tried.
        place: PathBuf,
        /// The loader's error.
        problem: String,
    },
}

/// An open library of the right version.
#[derive(Clone, Copy, Debug)]
pub struct Opened {
    /// The library.
    pub which: Which,
    /// The handle.
    pub library: &'static Library,
    /// Its full version.
    pub version: u64,
}

impl Opened {
    /// One of its functions.
    ///
    /// # Errors
    /// When it has no function of that name.
    ///
    /// # Safety
    /// `F` must be the function's type.
    pub unsafe fn function<F: Copy>(&self, name: &CStr) -> Result<F, LibError> {
        // SAFETY: the caller guarantees the type; the library is never closed.
        unsafe { self.library.get::<F>(name.to_bytes_with_nul()) }.map(|f| *f).map_err(|_| {
            LibError::Broken {
                name: self.which.name(),
                place: PathBuf::from(self.which.file()),
                problem: format!("it lacks {}", name.to_string_lossy()),
            }
        })
    }
}

/// Opens a library from the first of `folders` that has it, or else from the loader's path.
///
/// # Errors
/// When it is missing, has another major version, or can't be opened. Each error names the library.
pub fn open(which: Which, folders: &[PathBuf]) -> Result<Opened, LibError> {
    let broken = |place: &Path, problem: String| LibError::Broken {
        name: which.name(),
        place: place.into(),
        problem,
    };
    let mut other = None;
    for folder in folders {
        let path = folder.join(which.file());
        if path.exists() {
            companions(which, folder);
            // SAFETY: the initialisers of NVIDIA's libraries have no requirements.
            let library =
                unsafe { Library::new(&path) }.map_err(|e| broken(&path, e.to_string()))?;
            return checked(which, library, path);
        }
        other = other.or_else(|| other_major(which, folder));
    }
    // SAFETY: as above.
    match unsafe { Library::new(which.file()) } {
        Ok(library) => checked(which, library, PathBuf::from(which.file())),
        Err(_) => Err(match other {
            Some((place, found)) => {
                LibError::Version { name: which.name(), place, found, needed: which.major() }
            }
            None => LibError::Missing {
                name: which.name(),
                major: which.major(),
                file: which.file(),
                folders: folders.len(),
            },
        }),
    }
}

/// Opens the libraries that `which` loads by bare name, so that it finds them.
fn companions(which: Which, folder: &Path) {
    let prefixes: &[&str] = match which {
        Which::Nvrtc => &["libnvrtc-builtins.so.13"],
        Which::CublasLt => &[],
        Which::Cudnn => &["libcublas.so.13"],
    };
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    let mut paths: Vec<PathBuf> = entries.flatten().map(|e| e.path()).collect();
    paths.sort();
    for path in paths {
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        if prefixes.iter().any(|p| name.starts_with(p)) {
            // SAFETY: as in `open`; kept open by forgetting the handle.
            if let Ok(library) = unsafe { Library::new(&path) } {
                std::mem::forget(library);
            }
        }
    }
}

fn other_major(which: Which, folder: &Path) -> Option<(PathBuf, u64)> {
    let entries = std::fs::read_dir(folder).ok()?;
    let major = |path: &Path| {
        path.file_name()?.to_str()?.strip_prefix(which.stem())?.split('.').next()?.parse().ok()
    };
    let mut found: Vec<(PathBuf, u64)> =
        entries.flatten().filter_map(|e| Some((e.path(), major(&e.path())?))).collect();
    found.sort();
    found.pop()
}

fn checked(which: Which, library: Library, place: PathBuf) -> Result<Opened, LibError> {
    let opened = Opened { which, library: Box::leak(Box::new(library)), version: 0 };
    let mut parts: [c_int; 2] = [0; 2];
    // SAFETY: each function has the type that its library documents; the two numbers outlive the
    // call.
    let version = unsafe {
        match which {
            Which::Nvrtc => {
                let of: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int =
                    opened.function(c"nvrtcVersion")?;
                of(&raw mut parts[0], &raw mut parts[1]);
                u64::try_from(parts[0]).unwrap_or(0) * 10_000 + u64::try_from(parts[1]).unwrap_or(0)
            }
            Which::CublasLt => {
                opened.function::<unsafe extern "C" fn() -> usize>(c"cublasLtGetVersion")?() as u64
            }
            Which::Cudnn => {
                opened.function::<unsafe extern "C" fn() -> usize>(c"cudnnGetVersion")?() as u64
            }
        }
    };
    // Until version 9, cuDNN counted majors in thousands.
    let found = if version < 10_000 { version / 1_000 } else { version / 10_000 };
    if found != which.major() {
        return Err(LibError::Version { name: which.name(), place, found, needed: which.major() });
    }
    Ok(Opened { version, ..opened })
}

/// The folders to search: the given one, then those of Python environments and of CUDA's own
/// installation.
#[must_use]
pub fn folders(given: Option<&Path>) -> Vec<PathBuf> {
    let mut roots: Vec<PathBuf> = Vec::new();
    for name in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
        roots.extend(env::var_os(name).map(PathBuf::from));
    }
    // The environment of whichever python3 comes first.
    for folder in env::var_os("PATH").iter().flat_map(env::split_paths) {
        if let Ok(python) = folder.join("python3").canonicalize() {
            roots.extend(python.parent().and_then(Path::parent).map(Path::to_path_buf));
            roots.extend(folder.parent().map(Path::to_path_buf));
            break;
        }
    }
    roots.extend(env::var_os("HOME").map(|home| PathBuf::from(home).join(".local")));
    roots.extend(["/usr/local", "/usr", "/opt/conda"].map(PathBuf::from));
    let mut all: Vec<PathBuf> = given.map(Path::to_path_buf).into_iter().collect();
    for root in roots {
        for python in sorted(&root.join("lib")).into_iter().filter(|p| starts(p, "python3")) {
            for packages in ["site-packages", "dist-packages"] {
                for package in sorted(&python.join(packages).join("nvidia")) {
                    all.push(package.join("lib"));
                }
            }
        }
    }
    all.extend(
        ["/usr/local/cuda/lib64", "/usr/local/cuda/targets/x86_64-linux/lib"].map(PathBuf::from),
    );
    all.retain(|folder| folder.is_dir());
    let mut seen = Vec::new();
    all.retain(|folder| {
        !seen.contains(folder) && {
            seen.push(folder.clone());
            true
        }
    });
    all
}

fn starts(path: &Path, prefix: &str) -> bool {
    path.file_name().and_then(|n| n.to_str()).is_some_and(|n| n.starts_with(prefix))
}

/// The entries of a folder in order of name; none if the folder doesn't exist.
fn sorted(folder: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> =
        std::fs::read_dir(folder).into_iter().flatten().flatten().map(|e| e.path()).collect();
    paths.sort();
    paths
}

/// A message that belongs to a library.
///
/// # Safety
/// `text` must be null or a C string that is never freed.
#[must_use]
pub unsafe fn words(text: *const c_char) -> String {
    if text.is_null() {
        return "no reason given".to_owned();
    }
    // SAFETY: the caller guarantees the string.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn what_is_missing_is_named() {
        let empty = tempfile::tempdir().unwrap();
        let error = open(Which::Cudnn, &[empty.path().to_path_buf()]);
        // If the machine has it on the loader's path, it can't be missing.
        if let Err(error) = error {
            assert!(
                error.to_string().starts_with("cuDNN 9 (libcudnn.so.9) is not found in 1 folders"),
                "{error}"
            );
        }
    }

    #[test]
    fn another_major_is_named_whether_by_its_file_or_by_its_word() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("libcudnn.so.8"), b"").unwrap();
        let folders = [folder.path().to_path_buf()];
        if let Err(error) = open(Which::Cudnn, &folders) {
            assert!(
                error.to_string().contains("libcudnn.so.8 is version 8; version 9 is needed"),
                "{error}"
            );
        }
        std::fs::write(folder.path().join("libcudnn.so.9"), b"not a library").unwrap();
        assert!(matches!(
            open(Which::Cudnn, &folders),
            Err(LibError::Broken { name: "cuDNN", .. })
        ));
        let compile = |source: &str, file: &str| {
            let text = folder.path().join("stub.c");
            std::fs::write(&text, source).unwrap();
            let made = Command::new("cc")
                .args(["-shared", "-fPIC", "-o"])
                .arg(folder.path().join(file))
                .arg(&text)
                .status();
            made.is_ok_and(|s| s.success())
        };
        if !compile("unsigned long cudnnGetVersion(void) { return 8907; }", "libcudnn.so.9") {
            println!("skipped: a library of another version: there is no C compiler");
            return;
        }
        let error = open(Which::Cudnn, &folders).unwrap_err();
        assert!(
            error.to_string().contains("cuDNN at")
                && error.to_string().contains("is version 8; version 9 is needed"),
            "{error}"
        );
        let apart = tempfile::tempdir().unwrap();
        let text = apart.path().join("stub.c");
        std::fs::write(&text, "unsigned long cublasLtGetVersion(void) { return 130100; }").unwrap();
        let file = apart.path().join("libcublasLt.so.13");
        assert!(
            Command::new("cc")
                .args(["-shared", "-fPIC", "-o"])
                .arg(&file)
                .arg(&text)
                .status()
                .unwrap()
                .success()
        );
        let opened = open(Which::CublasLt, &[apart.path().to_path_buf()]).unwrap();
        assert_eq!(opened.version, 130_100);
        // SAFETY: there is no such function to be called.
        let lacks = unsafe { opened.function::<unsafe extern "C" fn()>(c"cublasLtCreate") };
        assert!(lacks.unwrap_err().to_string().contains("it lacks cublasLtCreate"));
    }

    #[test]
    fn the_given_folder_comes_first() {
        let given = tempfile::tempdir().unwrap();
        assert_eq!(folders(Some(given.path())).first().map(PathBuf::as_path), Some(given.path()));
    }
}
