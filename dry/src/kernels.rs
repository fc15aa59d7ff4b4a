//! Kernels: which library registered them, what the compiler wrote of them, and whether there is
//! one for this device at all.

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::config::config;
use crate::cubin::{Attributes, Cubin};
use crate::fatbin::{self, Entry};
use crate::sys::{self, SUCCESS, Status, put};

type Handle = *mut c_void;

/// `cudaErrorInvalidDeviceFunction`: the image has no such kernel.
const INVALID_FUNCTION: Status = 98;
/// `cudaErrorNoKernelImageForDevice` and `CUDA_ERROR_NO_BINARY_FOR_GPU`.
pub const NO_IMAGE: Status = 209;

/// A tie from a host function to a kernel. Tens of thousands are made while PyTorch is imported, so
/// that nothing is looked at before it is asked for.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Registered {
    function: usize,
    /// The wrapper of the fat binary.
    binary: usize,
    name: *const c_char,
}
// SAFETY: the name is a constant of a library.
unsafe impl Send for Registered {}

/// What a driver would load.
enum Image {
    Object(Cubin),
    /// Source for this architecture, which the driver compiles.
    Source(i32),
    /// Neither is there, or it can't be read.
    Unknown,
}

impl Image {
    /// What one entry of a fat binary is; a module's kernels can be listed by name.
    fn of_entry(entry: Entry, named: bool) -> Self {
        if entry.is_source() {
            return Self::Source(entry.architecture);
        }
        let read = entry.image().and_then(|image| Cubin::read(&image, named));
        read.map_or(Self::Unknown, Self::Object)
    }

    /// What a driver makes of what `cuModuleLoadData` was given.
    unsafe fn of_data(data: *const c_void) -> Result<Self, Status> {
        if data.is_null() {
            return Ok(Self::Unknown);
        }
        // SAFETY: the caller's image: an ELF file, a fat binary, its wrapper, or text.
        let image = unsafe {
            if std::slice::from_raw_parts(data.cast::<u8>(), 4) == b"\x7fELF" {
                let length = crate::cubin::length(data.cast());
                let image = length.map(|n| std::slice::from_raw_parts(data.cast(), n));
                let read = image.and_then(|image| Cubin::read(image, true));
                read.map_or(Self::Unknown, Self::Object)
            } else {
                match fatbin::entries(data) {
                    Some(all) => {
                        let entry = fatbin::choose(&all, config().capability).ok_or(NO_IMAGE)?;
                        Self::of_entry(entry, true)
                    }
                    None => Self::Unknown,
                }
            }
        };
        match &image {
            Self::Object(cubin) if !runs(cubin.architecture) => Err(NO_IMAGE),
            _ => Ok(image),
        }
    }

    /// A kernel's attributes, and whether they are known.
    fn kernel(&self, name: &[u8]) -> Result<(Attributes, bool), Status> {
        match self {
            Self::Object(cubin) => match cubin.find(name) {
                Some(found) => Ok((found, true)),
                None => Err(INVALID_FUNCTION),
            },
            Self::Source(architecture) => Ok((guess(*architecture), false)),
            Self::Unknown => Ok((guess(config().capability), false)),
        }
    }
}

fn runs(architecture: i32) -> bool {
    let capability = config().capability;
    architecture / 10 == capability / 10 && architecture <= capability
}

/// A kernel of which only the source's architecture is known.
fn guess(ptx: i32) -> Attributes {
    Attributes {
        registers: 32,
        shared: 0,
        constant: 0,
        local: 0,
        max_threads: 1024,
        ptx,
        binary: config().capability,
    }
}

/// What is known of kernels.
#[derive(Default)]
pub struct Kernels {
    registered: Vec<Registered>,
    /// How many of these are sorted by function.
    sorted: usize,
    /// Whether fat binaries have an entry for this device, by their wrappers.
    served: HashMap<usize, bool>,
    images: HashMap<usize, Image>,
    /// Kernels of modules, by the handles that callers have.
    loaded: HashMap<usize, (Attributes, bool)>,
    /// The names of those that a caller listed, by handle; modules and their names stay.
    listed: HashMap<usize, usize>,
    /// The most dynamic shared memory, where a caller set that.
    dynamic: HashMap<usize, i32>,
}

static KERNELS: Mutex<Option<Kernels>> = Mutex::new(None);

/// The lock, for a fork.
pub fn lock() -> MutexGuard<'static, Option<Kernels>> {
    KERNELS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn with<T>(f: impl FnOnce(&mut Kernels) -> T) -> T {
    crate::state::prepare_for_forks();
    f(lock().get_or_insert_with(Kernels::default))
}

impl Kernels {
    fn find(&mut self, function: usize) -> Option<Registered> {
        if self.sorted < self.registered.len() {
            // Of a function that was registered twice, the library is another by now.
            self.registered.sort_by_key(|r| r.function);
            self.sorted = self.registered.len();
        }
        let end = self.registered.partition_point(|r| r.function <= function);
        let found = self.registered.get(end.checked_sub(1)?)?;
        (found.function == function).then_some(*found)
    }

    /// Whether a fat binary has an entry for this device. Says once which ones it has, if not.
    fn serves(&mut self, binary: usize) -> bool {
        let first = self.served.values().all(|served| *served);
        *self.served.entry(binary).or_insert_with(|| {
            // SAFETY: a library registered it.
            let Some(all) = (unsafe { fatbin::entries(binary as *const c_void) }) else {
                return true;
            };
            let served = fatbin::choose(&all, config().capability).is_some();
            if !served && first {
                let mut names: Vec<_> = all.iter().map(|e| e.architecture).collect();
                names.sort_unstable();
                names.dedup();
                let names: Vec<_> = names.iter().map(i32::to_string).collect();
                let library = sys::library_at(binary as *const c_void).unwrap_or_default();
                let (names, own) = (names.join(","), config().capability);
                crate::log::line(format_args!("unserved {own} {names} {library}"));
            }
            served
        })
    }

    fn attributes(&mut self, function: usize) -> Result<(Attributes, bool), Status> {
        if let Some(found) = self.loaded.get(&function) {
            return Ok(*found);
        }
        let Some(found) = self.find(function) else {
            return Ok((guess(config().capability), false));
        };
        if !self.serves(found.binary) {
            return Err(NO_IMAGE);
        }
        let image = self.images.entry(found.binary).or_insert_with(|| {
            // SAFETY: a library registered it.
            let all = unsafe { fatbin::entries(found.binary as *const c_void) };
            let entry = all.and_then(|all| fatbin::choose(&all, config().capability));
            entry.map_or(Image::Unknown, |entry| Image::of_entry(entry, false))
        });
        // SAFETY: the library gave a C string.
        image.kernel(unsafe { CStr::from_ptr(found.name) }.to_bytes())
    }
}

/// A kernel's attributes as the device has them, or the device's refusal. An answer that is a guess
/// is counted for the report.
pub fn attributes(function: *const c_void, asked: &'static str) -> Result<Attributes, Status> {
    let (found, known) = with(|k| k.attributes(function as usize))?;
    if !known {
        crate::log::estimated(asked);
    }
    Ok(found)
}

/// What a kernel may ask for as dynamic shared memory.
pub fn most_dynamic(function: *const c_void, attributes: &Attributes) -> i32 {
    let set = with(|k| k.dynamic.get(&(function as usize)).copied());
    set.unwrap_or(crate::properties::SHARED_PER_BLOCK - attributes.shared as i32)
}

/// Sets that.
pub fn set_most_dynamic(function: *const c_void, bytes: i32) {
    with(|k| k.dynamic.insert(function as usize, bytes));
}

/// Functions that were launched before, by a part of their addresses.
static LAUNCHED: [AtomicUsize; 4096] = [const { AtomicUsize::new(0) }; 4096];

/// Whether a function's library has kernels for this device.
pub fn can_launch(function: *const c_void) -> bool {
    let function = function as usize;
    let seen = &LAUNCHED[(function >> 4) % LAUNCHED.len()];
    if seen.load(Ordering::Relaxed) == function {
        return true;
    }
    let served = with(|k| match k.find(function) {
        Some(found) => k.serves(found.binary),
        None => true,
    });
    if served {
        seen.store(function, Ordering::Relaxed);
    }
    served
}

/// The handle of a fat binary is its wrapper.
#[unsafe(no_mangle)]
pub extern "C" fn __cudaRegisterFatBinary(wrapper: Handle) -> Handle {
    wrapper
}

#[unsafe(no_mangle)]
pub extern "C" fn __cudaRegisterFunction(
    binary: Handle,
    function: Handle,
    _device: *const c_char,
    name: *const c_char,
) {
    let registered = Registered { function: function as usize, binary: binary as usize, name };
    with(|k| k.registered.push(registered));
}

/// Copies the first `room` registered kernels to `out`; how many there are.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn neap_dry_kernels(out: *mut Registered, room: u64) -> u64 {
    with(|k| {
        let many = k.registered.len().min(room as usize);
        // SAFETY: the caller has room for as many.
        unsafe { std::ptr::copy_nonoverlapping(k.registered.as_ptr(), out, many) };
        k.registered.len() as u64
    })
}

/// A module: what was loaded, or the device's refusal.
fn module(out: *mut Handle, image: Result<Image, Status>) -> Status {
    match image {
        Ok(image) => {
            unsafe { put(out, Box::into_raw(Box::new(image)).cast()) };
            SUCCESS
        }
        Err(status) => status,
    }
}

/// Defines functions that load a module from memory.
macro_rules! loads {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(out: *mut Handle, data: *const c_void) -> Status {
            // SAFETY: the caller gives an image.
            module(out, unsafe { Image::of_data(data) })
        }
    )* };
}

loads! {
    cuModuleLoadData cuModuleLoadDataEx cuModuleLoadFatBinary cuLibraryLoadData
    cudaLibraryLoadData
}

/// Defines functions that load a module from a file.
macro_rules! opens {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(out: *mut Handle, path: *const c_char) -> Status {
            // SAFETY: the caller gives a C string.
            let path = unsafe { CStr::from_ptr(path) }.to_string_lossy();
            let Ok(bytes) = std::fs::read(&*path) else {
                return sys::FILE_NOT_FOUND;
            };
            if let Some(cubin) = Cubin::read(&bytes, true) {
                let runs = runs(cubin.architecture);
                return module(out, if runs { Ok(Image::Object(cubin)) } else { Err(NO_IMAGE) });
            }
            // A fat binary stays; text is closed by a zero byte.
            let Ok(text) = CString::new(bytes) else {
                return module(out, Ok(Image::Unknown));
            };
            // SAFETY: at least the zero byte is there.
            module(out, unsafe { Image::of_data(text.into_raw().cast()) })
        }
    )* };
}

opens! { cuModuleLoad cuLibraryLoadFromFile cudaLibraryLoadFromFile }

/// Defines functions that look a kernel up in a module.
macro_rules! finds {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            out: *mut Handle,
            module: *const c_void,
            name: *const c_char,
        ) -> Status {
            // SAFETY: the caller gives a module of ours, or null, and a C string.
            let (image, name) = unsafe {
                (module.cast::<Image>().as_ref().unwrap_or(&Image::Unknown), CStr::from_ptr(name))
            };
            let Ok(found) = image.kernel(name.to_bytes()) else {
                return sys::NOT_FOUND;
            };
            let handle: Handle = Box::into_raw(Box::new([0u64; 2])).cast();
            with(|k| k.loaded.insert(handle as usize, found));
            unsafe { put(out, handle) };
            SUCCESS
        }
    )* };
}

finds! { cuModuleGetFunction cuLibraryGetKernel cudaLibraryGetKernel }

/// The names of a module's kernels.
unsafe fn names<'a>(module: *const c_void) -> &'a [CString] {
    // SAFETY: the caller gives a module of ours, which is never freed, or null.
    match unsafe { module.cast::<Image>().as_ref() } {
        Some(Image::Object(cubin)) => cubin.names(),
        _ => &[],
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetFunctionCount(
    out: *mut c_uint,
    module: *const c_void,
) -> Status {
    unsafe { put(out, names(module).len() as c_uint) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleEnumerateFunctions(
    out: *mut Handle,
    most: c_uint,
    module: *const c_void,
) -> Status {
    // SAFETY: the caller gives room for that many handles.
    for (at, name) in unsafe { names(module) }.iter().take(most as usize).enumerate() {
        let status = unsafe { cuModuleGetFunction(out.add(at), module, name.as_ptr()) };
        if status != SUCCESS {
            return status;
        }
        let handle = unsafe { *out.add(at) } as usize;
        with(|k| k.listed.insert(handle, name.as_ptr() as usize));
    }
    SUCCESS
}

/// Of kernels that were listed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFuncGetName(out: *mut *const c_char, function: Handle) -> Status {
    match with(|k| k.listed.get(&(function as usize)).copied()) {
        Some(name) => {
            unsafe { put(out, name as *const c_char) };
            SUCCESS
        }
        None => sys::NOT_FOUND,
    }
}

/// Defines functions whose answer is the handle that they are given.
macro_rules! sames {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(out: *mut Handle, handle: Handle) -> Status {
            unsafe { put(out, handle) };
            SUCCESS
        }
    )* };
}

sames! { cuLibraryGetModule cuKernelGetFunction __cudaGetKernel cudaGetFuncBySymbol }

/// Of what follows a kernel's attributes, only that no division of the cache was set.
const NO_CARVEOUT: c_int = -1;

/// `struct cudaFuncAttributes` of CUDA 12 and 13, without the reserved words.
#[repr(C)]
pub struct FunctionAttributes {
    shared: usize,
    constant: usize,
    local: usize,
    max_threads: c_int,
    registers: c_int,
    ptx_version: c_int,
    binary_version: c_int,
    cache_mode: c_int,
    max_dynamic_shared: c_int,
    carveout: c_int,
    /// Whether clusters are a must, their shape, their scheduling, whether large ones are allowed.
    clusters: [c_int; 6],
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaFuncGetAttributes(
    out: *mut FunctionAttributes,
    function: *const c_void,
) -> Status {
    match attributes(function, "cudaFuncGetAttributes") {
        Ok(found) => {
            let answer = FunctionAttributes {
                shared: found.shared,
                constant: found.constant,
                local: found.local,
                max_threads: crate::occupancy::largest_block(&found),
                registers: found.registers,
                ptx_version: found.ptx,
                binary_version: found.binary,
                cache_mode: 0,
                max_dynamic_shared: most_dynamic(function, &found),
                carveout: NO_CARVEOUT,
                clusters: [0; 6],
            };
            unsafe { put(out, answer) };
            SUCCESS
        }
        Err(status) => crate::device::fail(status),
    }
}

/// A `CUfunction_attribute`.
fn attribute(function: *const c_void, which: c_int) -> Result<c_int, Status> {
    let found = attributes(function, "cuFuncGetAttribute")?;
    Ok(match which {
        0 => crate::occupancy::largest_block(&found),
        1 => found.shared as c_int,
        2 => found.constant as c_int,
        3 => found.local as c_int,
        4 => found.registers,
        5 => found.ptx,
        6 => found.binary,
        8 => most_dynamic(function, &found),
        9 => NO_CARVEOUT,
        _ => 0,
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFuncGetAttribute(
    out: *mut c_int,
    which: c_int,
    function: *const c_void,
) -> Status {
    attribute(function, which).map_or_else(
        |status| status,
        |value| {
            unsafe { put(out, value) };
            SUCCESS
        },
    )
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuKernelGetAttribute(
    out: *mut c_int,
    which: c_int,
    kernel: *const c_void,
    _device: c_int,
) -> Status {
    unsafe { cuFuncGetAttribute(out, which, kernel) }
}

/// Sets an attribute. Of those, the most dynamic shared memory is remembered; more than a block may
/// have is refused.
fn set(function: *const c_void, which: c_int, value: c_int) -> Status {
    const MAX_DYNAMIC_SHARED: c_int = 8;
    if which != MAX_DYNAMIC_SHARED {
        return SUCCESS;
    }
    match attributes(function, "cudaFuncSetAttribute") {
        Ok(found)
            if value < 0 || value + found.shared as c_int > crate::occupancy::most_shared() =>
        {
            sys::INVALID_VALUE
        }
        Ok(_) => {
            set_most_dynamic(function, value);
            SUCCESS
        }
        Err(status) => status,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaFuncSetAttribute(f: *const c_void, which: c_int, value: c_int) -> Status {
    match set(f, which, value) {
        SUCCESS => SUCCESS,
        status => crate::device::fail(status),
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFuncSetAttribute(f: *const c_void, which: c_int, value: c_int) -> Status {
    set(f, which, value)
}
