//! Makes the stubs for one installation of PyTorch: which functions its NVIDIA libraries export and
//! its own libraries ask for, less those that the device library answers.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use memmap2::Mmap;
use object::elf::{FileHeader64, SHN_UNDEF, STT_FUNC, STT_NOTYPE};
use object::endian::Endianness;
use object::read::elf::{FileHeader, SectionHeader, Sym};
use sha2::{Digest, Sha256};

use super::stubs::{self, Stub};
use super::unpack::{self, Unpacked};

/// NVIDIA's libraries that get stubs, by how their file names begin. What compiles code (nvrtc,
/// nvJitLink) stays.
const LIBRARIES: [&str; 14] = [
    "libcudart.so",
    "libcublas.so",
    "libcublasLt.so",
    "libcudnn",
    "libcufft.so",
    "libcurand.so",
    "libcusolver.so",
    "libcusolverMg.so",
    "libcusparse.so",
    "libcusparseLt.so",
    "libcupti.so",
    "libcufile.so",
    "libnccl.so",
    "libnvshmem_host.so",
];

/// PyTorch's own libraries, which name what they ask for.
const TORCH: [&str; 7] = [
    "libtorch_cuda.so",
    "libtorch_cuda_linalg.so",
    "libc10_cuda.so",
    "libtorch_python.so",
    "libtorch_cpu.so",
    "libcaffe2_nvrtc.so",
    "libtorch_nvshmem.so",
];

/// How the names of all those functions begin.
const PREFIXES: [&str; 16] = [
    "cuda", "__cuda", "cublas", "cudnn", "cufft", "curand", "cusolver", "cusparse", "cupti",
    "cuFile", "nccl", "pnccl", "nvshmem", "nvml", "cu", "__nccl",
];

/// What the environment of a process under the dry device must have for one PyTorch.
pub struct Prepared {
    /// `LD_PRELOAD`, in order.
    pub preload: Vec<PathBuf>,
    /// The folder with `libcuda.so.1` and `libnvidia-ml.so.1`, for `LD_LIBRARY_PATH`.
    pub libraries: PathBuf,
    /// CUDA version as the runtime counts it, e.g. 13000.
    pub cuda: u32,
}

/// Makes the stubs for the PyTorch in folder `torch`, or finds them in the cache.
///
/// # Errors
/// When the folder holds no PyTorch built for CUDA 12 or later, or neither the cache nor the run's
/// folder `scratch` can be written.
pub fn prepare(torch: &Path, unpacked: &Unpacked, scratch: &Path) -> anyhow::Result<Prepared> {
    let version = fs::read_to_string(torch.join("version.py"))
        .with_context(|| format!("{}: version.py cannot be read", torch.display()))?;
    let Some(cuda) = cuda_version(&version) else {
        anyhow::bail!(
            "{}: this PyTorch is not built for CUDA; install a CUDA build of PyTorch, or use `neap estimate`",
            torch.display()
        );
    };
    let name = format!("{}{}", unpack::STUBS, fingerprint(torch, &version)?);
    let mut folder = unpacked.root.join(&name);
    if !are_whole(&folder, unpacked) {
        let bytes = stubs(torch, unpacked)?;
        if write(&folder, &bytes, unpacked).is_err() {
            // The cache was filled by another user, or became full.
            folder = scratch.join(&name);
            write(&folder, &bytes, unpacked)?;
        }
    }
    Ok(Prepared {
        preload: vec![unpacked.device.clone(), folder.join("libcuda.so.1")],
        libraries: folder,
        cuda,
    })
}

/// The stubs as a shared object.
fn stubs(torch: &Path, unpacked: &Unpacked) -> anyhow::Result<Vec<u8>> {
    let names = names(torch, &unpacked.device)?;
    let all: Vec<Stub> = names
        .into_iter()
        // An answer of NVML that says nothing would be read: those functions are not supported.
        .map(|name| Stub { returns: if name.starts_with("nvml") { 3 } else { 0 }, name })
        .collect();
    stubs::write("libcuda.so.1", &["libneap_dry.so"], &all)
}

/// The stubs' names: the driver's and NVML's, for the loader, and the hash of what they hold.
const DRIVER_FILE: &str = "libcuda.so.1";
const NVML_FILE: &str = "libnvidia-ml.so.1";
const HASH_FILE: &str = "sha256";
/// Another name of the device library.
const LINK: &str = "libcuda.so";

fn write(folder: &Path, bytes: &[u8], unpacked: &Unpacked) -> anyhow::Result<()> {
    let whole = |folder: &Path| are_whole(folder, unpacked);
    unpack::folder_by_rename(folder, whole, |new| {
        unpack::put(&new.join(DRIVER_FILE), bytes)?;
        unpack::put(&new.join(HASH_FILE), &Sha256::digest(bytes))?;
        // One file under two names is one library to the loader.
        fs::hard_link(new.join(DRIVER_FILE), new.join(NVML_FILE))?;
        // Triton in PyTorch 2.6 links its launcher against libcuda.so: any library with symbols in
        // sections does.
        std::os::unix::fs::symlink(&unpacked.device, new.join(LINK))
    })
}

/// Whether stubs are as they were written.
fn are_whole(folder: &Path, unpacked: &Unpacked) -> bool {
    let read = |name: &str| fs::read(folder.join(name)).unwrap_or_default();
    let file = |name: &str| fs::metadata(folder.join(name)).ok().map(|m| (m.dev(), m.ino()));
    file(DRIVER_FILE).is_some()
        && file(DRIVER_FILE) == file(NVML_FILE)
        && fs::read_link(folder.join(LINK)).is_ok_and(|to| to == unpacked.device)
        && read(HASH_FILE) == Sha256::digest(read(DRIVER_FILE)).as_slice()
}

/// `cuda = '13.0'` or `cuda: Optional[str] = '12.4'` in version.py.
fn cuda_version(text: &str) -> Option<u32> {
    let line = text.lines().find(|l| l.starts_with("cuda") && l.contains('='))?;
    let version = line.split('=').next_back()?.trim().trim_matches(['\'', '"']);
    let (major, minor) = version.split_once('.')?;
    Some(major.parse::<u32>().ok()? * 1000 + minor.parse::<u32>().ok()? * 10)
}

/// What tells one installation from another.
fn fingerprint(torch: &Path, version: &str) -> anyhow::Result<String> {
    let library = torch.join("lib/libtorch_cuda.so");
    let about = fs::metadata(&library)
        .with_context(|| format!("{} is missing: no CUDA build of PyTorch", library.display()))?;
    let changed = about.modified().ok().and_then(|t| t.duration_since(std::time::UNIX_EPOCH).ok());
    let key = format!("{}\n{version}\n{}\n{changed:?}", torch.display(), about.len());
    let digest = Sha256::digest(key.as_bytes());
    Ok(digest.iter().take(8).map(|b| format!("{b:02x}")).collect())
}

/// Folders in which the NVIDIA libraries of a PyTorch lie: its wheels', its own, and the
/// environment's (conda).
fn folders(torch: &Path) -> Vec<PathBuf> {
    let mut all = vec![torch.join("lib")];
    let Some(site) = torch.parent() else { return all };
    for package in subfolders(&site.join("nvidia")) {
        all.push(package.join("lib"));
    }
    if let Some(environment) = site.parent().and_then(Path::parent) {
        all.push(environment.to_path_buf());
    }
    all
}

fn subfolders(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut all: Vec<_> = entries.map(|e| e.path()).filter(|p| p.is_dir()).collect();
    all.sort();
    all
}

fn names(torch: &Path, device: &Path) -> anyhow::Result<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    for folder in folders(torch) {
        let entries = fs::read_dir(&folder).into_iter().flatten().flatten();
        for path in entries.map(|e| e.path()) {
            let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if LIBRARIES.iter().any(|l| file.starts_with(l)) {
                symbols(&path, true, &mut names);
                let speaks_to_driver = ["libcudart", "libcupti", "libnccl"];
                if speaks_to_driver.iter().any(|l| file.starts_with(l)) {
                    driver_names(&path, &mut names);
                }
            }
        }
    }
    for library in TORCH {
        let path = torch.join("lib").join(library);
        symbols(&path, false, &mut names);
        driver_names(&path, &mut names);
    }
    let mut answered = BTreeSet::new();
    symbols(device, true, &mut answered);
    names.retain(|n| !answered.contains(n) && PREFIXES.iter().any(|p| n.starts_with(p)));
    if names.is_empty() {
        anyhow::bail!("{}: no NVIDIA library was found beside this PyTorch", torch.display());
    }
    Ok(names)
}

fn map(path: &Path) -> Option<Mmap> {
    let file = File::open(path).ok()?;
    // SAFETY: installed libraries are not changed while they are read; if one is, the stubs are
    // wrong, not memory.
    unsafe { Mmap::map(&file) }.ok()
}

/// Adds the functions that a library defines or asks for.
fn symbols(path: &Path, defined: bool, names: &mut BTreeSet<String>) {
    let Some(bytes) = map(path) else { return };
    let Some(found) = dynamic_symbols(&bytes, defined) else { return };
    names.extend(found);
}

fn dynamic_symbols(bytes: &[u8], defined: bool) -> Option<Vec<String>> {
    let header = FileHeader64::<Endianness>::parse(bytes).ok()?;
    let endian = header.endian().ok()?;
    let sections = header.sections(endian, bytes).ok()?;
    let table = sections.symbols(endian, bytes, object::elf::SHT_DYNSYM).ok()?;
    let mut all = Vec::new();
    for symbol in table.iter() {
        let is_defined = symbol.st_shndx(endian) != SHN_UNDEF;
        if is_defined != defined || !matches!(symbol.st_type(), STT_FUNC | STT_NOTYPE) {
            continue;
        }
        let Ok(name) = symbol.name(endian, table.strings()) else { continue };
        if let Ok(name) = std::str::from_utf8(name) {
            all.push(name.to_string());
        }
    }
    Some(all)
}

/// What may follow the prefix `cu` in the names of the driver's functions.
const DRIVER: [&str; 33] = [
    "Init",
    "Driver",
    "Device",
    "Ctx",
    "Module",
    "Library",
    "Kernel",
    "Link",
    "Mem",
    "Stream",
    "Event",
    "Func",
    "Launch",
    "Graph",
    "Array",
    "Mipmapped",
    "Tex",
    "Surf",
    "Pointer",
    "Occupancy",
    "Profiler",
    "Get",
    "External",
    "Import",
    "Signal",
    "Wait",
    "Destroy",
    "Multicast",
    "Tensor",
    "Green",
    "Ipc",
    "Thread",
    "UserObject",
];

/// Adds the names of driver and NVML functions that a library holds as text: it looks them up at
/// run time.
fn driver_names(path: &Path, names: &mut BTreeSet<String>) {
    let Some(bytes) = map(path) else { return };
    let Some(text) = read_only_data(&bytes) else { return };
    for word in text.split(|b| *b == 0) {
        if !(6..=60).contains(&word.len())
            || !word.iter().all(|b| b.is_ascii_alphanumeric() || *b == b'_')
        {
            continue;
        }
        let Ok(word) = std::str::from_utf8(word) else { continue };
        let driver =
            word.strip_prefix("cu").is_some_and(|w| DRIVER.iter().any(|d| w.starts_with(d)));
        let nvml = word
            .strip_prefix("nvml")
            .is_some_and(|w| w.starts_with(|c: char| c.is_ascii_uppercase()));
        if driver || nvml {
            names.insert(word.to_string());
        }
    }
}

fn read_only_data(bytes: &[u8]) -> Option<&[u8]> {
    let header = FileHeader64::<Endianness>::parse(bytes).ok()?;
    let endian = header.endian().ok()?;
    let sections = header.sections(endian, bytes).ok()?;
    let (_, section) = sections.section_by_name(endian, b".rodata")?;
    section.data(endian, bytes).ok()
}
