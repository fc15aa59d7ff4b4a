//! Kernels compiled by NVRTC, and kept on disk so that it happens once.

use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};

use neap_model::private;
use sha2::{Digest, Sha256};

use super::launch::Family;
use super::libs::{self, LibError, Opened, Which};
use crate::files;

type Program = *mut c_void;

/// NVRTC's functions.
pub struct Nvrtc {
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> c_int,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int,
    destroy: unsafe extern "C" fn(*mut Program) -> c_int,
    log: [Getter; 2],
    ptx: [Getter; 2],
    cubin: [Getter; 2],
}

/// Of a program: the size of something, or the thing.
type Getter = unsafe extern "C" fn(Program, *mut c_void) -> c_int;

impl Nvrtc {
    /// The compiler in the first of `folders` that has it.
    ///
    /// # Errors
    /// As [`libs::open`].
    pub fn open(folders: &[PathBuf]) -> Result<Self, LibError> {
        Self::new(&libs::open(Which::Nvrtc, folders)?)
    }

    /// The functions of an open library.
    ///
    /// # Errors
    /// When one is missing.
    pub fn new(library: &Opened) -> Result<Self, LibError> {
        // SAFETY: the types are those of nvrtc.h of CUDA 13; both kinds of getters take a program
        // and a pointer.
        unsafe {
            Ok(Self {
                create: library.function(c"nvrtcCreateProgram")?,
                compile: library.function(c"nvrtcCompileProgram")?,
                destroy: library.function(c"nvrtcDestroyProgram")?,
                log: [
                    library.function(c"nvrtcGetProgramLogSize")?,
                    library.function(c"nvrtcGetProgramLog")?,
                ],
                ptx: [library.function(c"nvrtcGetPTXSize")?, library.function(c"nvrtcGetPTX")?],
                cubin: [
                    library.function(c"nvrtcGetCUBINSize")?,
                    library.function(c"nvrtcGetCUBIN")?,
                ],
            })
        }
    }

    /// A family's kernels for `arch`: PTX for `compute_90`, machine code for `sm_90`.
    ///
    /// # Errors
    /// What the compiler says.
    pub fn compile(&self, family: Family, arch: &str) -> Result<Vec<u8>, String> {
        let text =
            |s: String| CString::new(s).map_err(|_| "a zero byte in a kernel's source".to_owned());
        let (source, name) = (text(family.source())?, text(format!("{}.cu", family.name()))?);
        let options =
            [text(format!("--gpu-architecture={arch}"))?, text("--std=c++17".to_owned())?];
        let pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        let mut program: Program = std::ptr::null_mut();
        // SAFETY: all strings outlive the calls; the program is destroyed once, after its last use.
        unsafe {
            if (self.create)(
                &raw mut program,
                source.as_ptr(),
                name.as_ptr(),
                0,
                std::ptr::null(),
                std::ptr::null(),
            ) != 0
            {
                return Err(format!("NVRTC takes no program for {}.cu", family.name()));
            }
            let failed = (self.compile)(program, pointers.len() as c_int, pointers.as_ptr()) != 0;
            let result = if failed {
                let log = self.get(&self.log, program).unwrap_or_default();
                Err(format!(
                    "{}.cu does not compile for {arch}: {}",
                    family.name(),
                    String::from_utf8_lossy(&log).trim_end_matches('\0')
                ))
            } else {
                self.get(if arch.starts_with("compute") { &self.ptx } else { &self.cubin }, program)
                    .ok_or_else(|| format!("NVRTC gives no code for {}.cu", family.name()))
            };
            (self.destroy)(&raw mut program);
            result
        }
    }

    /// # Safety
    /// `program` is one, compiled.
    unsafe fn get(&self, [size, data]: &[Getter; 2], program: Program) -> Option<Vec<u8>> {
        let mut bytes = 0usize;
        // SAFETY: the first writes a size, the second that many bytes.
        unsafe {
            if size(program, (&raw mut bytes).cast()) != 0 {
                return None;
            }
            let mut all = vec![0u8; bytes];
            (data(program, all.as_mut_ptr().cast()) == 0).then_some(all)
        }
    }
}

/// The machine code of each family for `arch`. Code that an earlier run compiled is read from the
/// disk cache. All other families are compiled, each on a thread of its own, and cached; `open` is
/// called only if there are such families.
///
/// # Errors
/// When the compiler can't be opened or reports an error. A cache that can't be read or written
/// only costs time.
pub fn code(
    families: impl IntoIterator<Item = Family>,
    arch: &str,
    open: impl FnOnce() -> Result<Nvrtc, String>,
) -> Result<BTreeMap<Family, Vec<u8>>, String> {
    let kept = |family| place(family, arch).and_then(|path| std::fs::read(path).ok());
    let (mut all, mut missing) = (BTreeMap::new(), Vec::new());
    for family in families {
        match kept(family).filter(|code| !code.is_empty()) {
            Some(code) => drop(all.insert(family, code)),
            None => missing.push(family),
        }
    }
    if missing.is_empty() {
        return Ok(all);
    }
    let nvrtc = open()?;
    let compiled: Vec<Result<(Family, Vec<u8>), String>> = std::thread::scope(|scope| {
        let nvrtc = &nvrtc;
        let one = move |family| nvrtc.compile(family, arch).map(|code| (family, code));
        let running: Vec<_> =
            missing.into_iter().map(|family| scope.spawn(move || one(family))).collect();
        let ended = running
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| Err("NVRTC's thread ended".to_owned())));
        ended.collect()
    });
    for one in compiled {
        let (family, code) = one?;
        keep(family, arch, &code);
        all.insert(family, code);
    }
    Ok(all)
}

/// Where a family's machine code is kept: under a name that changes with its source. The compiler's
/// version is not in it, so that a machine without the compiler can use what another has made.
fn place(family: Family, arch: &str) -> Option<PathBuf> {
    let hash = Sha256::digest(format!("13\0{arch}\0{}", family.source()));
    let hash: String = hash.iter().map(|b| format!("{b:02x}")).collect();
    let folder = files::cache()?;
    // A folder that the caller names may be one that others fill on purpose.
    if std::env::var_os("NEAP_CACHE").is_none() {
        private::folder(&folder).ok()?;
    }
    Some(folder.join(format!("{}-{arch}-{hash}.cubin", family.name())))
}

/// Appears whole or not at all.
fn keep(family: Family, arch: &str, code: &[u8]) -> Option<()> {
    let path = place(family, arch)?;
    let folder = path.parent()?;
    private::make(folder).ok()?;
    let mut file = tempfile::NamedTempFile::new_in(folder).ok()?;
    std::io::Write::write_all(&mut file, code).ok()?;
    // Else a loss of power could leave the name without the content.
    file.as_file().sync_all().ok()?;
    file.persist(&path).ok()?;
    Some(())
}

/// Compiles all families for `arch` into the cache, without a GPU.
///
/// # Errors
/// As [`code`].
pub fn fill(arch: &str, libs: Option<&Path>) -> Result<(), String> {
    let open = || Nvrtc::open(&libs::folders(libs)).map_err(|e| e.to_string());
    code(Family::ALL, arch, open).map(drop)
}
