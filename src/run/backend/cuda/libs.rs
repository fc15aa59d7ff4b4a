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

    /// The Python package that has it.
    const fn wheel(self) -> &'static str {
        match self {
            Self::Nvrtc => "nvidia-cuda-nvrtc==13.0.88",
            Self::CublasLt => "'nvidia-cublas>=13,<14'",
            Self::Cudnn => "nvidia-cudnn-cu13",
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
        "{name} {major} ({file}) is not found in {folders} folders nor on the loader's path; name its folder with --cuda-libs, or install it: pip install {wheel}"
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
        /// The Python package that has it.
        wheel: &'static str,
    },
    /// Only another version is there.
    #[error("{name} at {} is version {found}; version {needed} is needed: name its folder with --cuda-libs, or install it: pip install {wheel}", place.display())]
    Version {
        /// Its name.
        name: &'static str,
        /// The library or folder that was tried.
        place: PathBuf,
        /// Its major version.
        found: u64,
        /// The version that is needed.
        needed: u64,
        /// The Python package that has it.
        wheel: &'static str,
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
        unsafe { self.library.get::<F>(name.to_bytes_with_nul()) }
            .map(|f| *f)
            .map_err(|_| self.lacks(name))
    }

    #[cold]
    fn lacks(&self, name: &CStr) -> LibError {
        LibError::Broken {
            name: self.which.name(),
            place: PathBuf::from(self.which.file()),
            problem: format!("it lacks {}", name.to_string_lossy()),
        }
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
            companions(which, folder, folders);
            // SAFETY: NVIDIA's libraries have no initialisers with demands of their own.
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
            Some((place, found)) => LibError::Version {
                name: which.name(),
                place,
                found,
                needed: which.major(),
                wheel: which.wheel(),
            },
            None => LibError::Missing {
                name: which.name(),
                major: which.major(),
                file: which.file(),
                folders: folders.len(),
                wheel: which.wheel(),
            },
        }),
    }
}

/// Opens what a library looks for by bare name, from the library's own folder and those of its
/// wheels: it finds what is open already, so a loader's path with other versions mixes nothing in.
fn companions(which: Which, folder: &Path, folders: &[PathBuf]) {
    let prefixes: &[&str] = match which {
        Which::Nvrtc => &["libnvrtc-builtins.so.13"],
        Which::CublasLt => &[],
        // Each needs those before it.
        Which::Cudnn => &[
            "libnvrtc-builtins.so.13",
            "libnvrtc.so.13",
            "libcublasLt.so.13",
            "libcublas.so.13",
            "libcudnn_graph.so.9",
            "libcudnn_ops.so.9",
            "libcudnn_cnn.so.9",
            "libcudnn_adv.so.9",
            "libcudnn_heuristic.so.9",
            "libcudnn_engines_precompiled.so.9",
            "libcudnn_engines_runtime_compiled.so.9",
        ],
    };
    for prefix in prefixes {
        let mut paths = std::iter::once(folder).chain(folders.iter().map(PathBuf::as_path));
        let found =
            paths.find_map(|folder| sorted(folder).into_iter().find(|path| starts(path, prefix)));
        // SAFETY: as in `open`; kept open by forgetting the handle.
        if let Some(library) = found.and_then(|path| unsafe { Library::new(path) }.ok()) {
            std::mem::forget(library);
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
        return Err(LibError::Version {
            name: which.name(),
            place,
            found,
            needed: which.major(),
            wheel: which.wheel(),
        });
    }
    Ok(Opened { version, ..opened })
}

/// Where to look: in and around the given folder, then in Python environments and CUDA's own
/// installation.
///
/// NVIDIA's wheels put each library into a folder of its own, `nvidia/cu13/lib` and
/// `nvidia/cudnn/lib`, so the given folder may be any of them, `nvidia`, `site-packages`, or a
/// whole environment.
#[must_use]
pub fn folders(given: Option<&Path>) -> Vec<PathBuf> {
    let mut all = Vec::new();
    if let Some(given) = given {
        all.extend([given.to_path_buf(), given.join("lib"), given.join("lib64")]);
        wheels(given, &mut all);
        packages(given, &mut all);
        // One of the wheels' folders: the others stand beside it.
        if let Some(nvidia) = given.ancestors().take(3).find(|a| starts(a, "nvidia")) {
            wheels(nvidia, &mut all);
        }
        environment(given, &mut all, 0);
    }
    for name in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
        env::var_os(name).iter().for_each(|root| environment(Path::new(root), &mut all, 0));
    }
    // The environment of whichever python3 comes first.
    for folder in env::var_os("PATH").iter().flat_map(env::split_paths) {
        if let Ok(python) = folder.join("python3").canonicalize() {
            folder.parent().into_iter().for_each(|root| environment(root, &mut all, 0));
            let root = python.parent().and_then(Path::parent);
            root.into_iter().for_each(|root| environment(root, &mut all, 0));
            break;
        }
    }
    let home = env::var_os("HOME").map(|home| PathBuf::from(home).join(".local"));
    let fixed = ["/usr/local", "/usr", "/opt/conda"].map(PathBuf::from);
    home.iter().chain(&fixed).for_each(|root| environment(root, &mut all, 0));
    all.extend(
        ["/usr/local/cuda/lib64", "/usr/local/cuda/targets/x86_64-linux/lib"].map(PathBuf::from),
    );
    let mut seen = std::collections::BTreeSet::new();
    all.retain(|folder| folder.is_dir() && seen.insert(folder.clone()));
    all
}

/// The folders of wheels in a folder `nvidia`.
fn wheels(nvidia: &Path, all: &mut Vec<PathBuf>) {
    all.extend(sorted(nvidia).into_iter().map(|package| package.join("lib")));
}

/// The folders of wheels in a folder of Python packages, and in those that its `.pth` files name.
fn packages(site: &Path, all: &mut Vec<PathBuf>) {
    wheels(&site.join("nvidia"), all);
    for path in sorted(site).into_iter().filter(|p| p.extension().is_some_and(|e| e == "pth")) {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        for line in text.lines().map(str::trim).filter(|line| line.starts_with('/')) {
            wheels(&Path::new(line).join("nvidia"), all);
        }
    }
}

/// An environment's folders of wheels, and those of the one that it was made from.
fn environment(root: &Path, all: &mut Vec<PathBuf>, depth: u32) {
    for python in sorted(&root.join("lib")).into_iter().filter(|p| starts(p, "python3")) {
        for site in ["site-packages", "dist-packages"] {
            packages(&python.join(site), all);
        }
    }
    let about = std::fs::read_to_string(root.join("pyvenv.cfg")).unwrap_or_default();
    let home = about.lines().find_map(|line| line.strip_prefix("home")?.trim().strip_prefix('='));
    if let Some(base) = home.and_then(|home| Path::new(home.trim()).parent())
        && depth < 4
        && base != root
    {
        environment(base, all, depth + 1);
    }
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
    fn split_wheels_are_found_from_any_of_their_folders_and_through_chained_environments() {
        let root = tempfile::tempdir().unwrap();
        let site = |name: &str| root.path().join(name).join("lib/python3.11/site-packages");
        let wheel = |name: &str, package: &str| {
            let folder = site(name).join("nvidia").join(package).join("lib");
            std::fs::create_dir_all(&folder).unwrap();
            folder
        };
        let (cuda, cudnn) = (wheel("base", "cu13"), wheel("base", "cudnn"));
        let own = wheel("venv", "cu13");
        std::fs::write(
            root.path().join("venv/pyvenv.cfg"),
            format!(
                "home = {}\ninclude-system-site-packages = true\n",
                root.path().join("base/bin").display()
            ),
        )
        .unwrap();
        // One wheel's folder, the environment, its packages: both libraries' folders come first.
        for given in
            [cuda.clone(), root.path().join("base"), site("base"), site("base").join("nvidia")]
        {
            let found = folders(Some(&given));
            let at = |folder: &PathBuf| found.iter().position(|f| f == folder);
            assert!(at(&cuda).is_some_and(|at| at < 3), "{given:?}: {found:?}");
            assert!(at(&cudnn).is_some_and(|at| at < 4), "{given:?}: {found:?}");
        }
        // An environment made from another; one that names another's packages.
        let chained = folders(Some(&root.path().join("venv")));
        assert_eq!(
            &chained[..4],
            &[root.path().join("venv"), root.path().join("venv/lib"), own, cuda],
            "{chained:?}"
        );
        wheel("third", "nothing");
        std::fs::write(site("third").join("more.pth"), format!("{}\n", site("base").display()))
            .unwrap();
        assert!(folders(Some(&root.path().join("third"))).contains(&cudnn));
    }

    #[test]
    fn the_given_folder_comes_first() {
        let given = tempfile::tempdir().unwrap();
        assert_eq!(folders(Some(given.path())).first().map(PathBuf::as_path), Some(given.path()));
    }
}
