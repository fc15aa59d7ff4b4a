//! Kernels compiled by NVRTC, and kept on disk so that it happens once.

use std::ffi::{CString, c_char, c_int, c_void};

use sha2::{Digest, Sha256};

use super::launch::Family;
use super::libs::{LibError, Opened};
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
    version: u64,
}

/// Of a program: the size of something, or the thing.
type Getter = unsafe extern "C" fn(Program, *mut c_void) -> c_int;

impl Nvrtc {
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
                version: library.version,
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
        // SAFETY: the first writes a size, the second so many bytes.
        unsafe {
            if size(program, (&raw mut bytes).cast()) != 0 {
                return None;
            }
            let mut all = vec![0u8; bytes];
            (data(program, all.as_mut_ptr().cast()) == 0).then_some(all)
        }
    }

    /// [`Nvrtc::compile`], from the disk where it was done before.
    ///
    /// # Errors
    /// What the compiler says; a disk that fails only costs time.
    pub fn cached(&self, family: Family, arch: &str) -> Result<Vec<u8>, String> {
        let hash = Sha256::digest(format!("{}\0{arch}\0{}", self.version, family.source()));
        let hash: String = hash.iter().map(|b| format!("{b:02x}")).collect();
        let path = files::cache()
            .map(|folder| folder.join(format!("{}-{arch}-{hash}.cubin", family.name())));
        if let Some(code) =
            path.as_ref().and_then(|p| std::fs::read(p).ok()).filter(|code| !code.is_empty())
        {
            return Ok(code);
        }
        let code = self.compile(family, arch)?;
        if let Some(path) = path {
            // Appears whole or not at all.
            let kept = path.parent().and_then(|folder| {
                std::fs::create_dir_all(folder).ok()?;
                let mut file = tempfile::NamedTempFile::new_in(folder).ok()?;
                std::io::Write::write_all(&mut file, &code).ok()?;
                file.persist(&path).ok()
            });
            drop(kept);
        }
        Ok(code)
    }
}
