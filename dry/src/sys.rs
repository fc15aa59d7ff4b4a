//! The few functions of libc that the library calls, and CUDA's status codes.

use std::ffi::{CStr, c_char, c_int, c_long, c_void};

/// A status as the CUDA runtime, the driver and the libraries return it; 0 is success everywhere.
pub type Status = c_int;

pub const SUCCESS: Status = 0;
pub const INVALID_VALUE: Status = 1;
/// `cudaErrorMemoryAllocation` and `CUDA_ERROR_OUT_OF_MEMORY`.
pub const OUT_OF_MEMORY: Status = 2;
pub const INVALID_DEVICE: Status = 101;
/// `cudaErrorFileNotFound` and `CUDA_ERROR_FILE_NOT_FOUND`.
pub const FILE_NOT_FOUND: Status = 301;
/// `CUDA_ERROR_NOT_FOUND` and `cudaErrorSymbolNotFound`.
pub const NOT_FOUND: Status = 500;
/// `cudaErrorNotReady` and `CUDA_ERROR_NOT_READY`.
pub const NOT_READY: Status = 600;
/// `cudaErrorNotSupported` and `CUDA_ERROR_NOT_SUPPORTED`.
pub const NOT_SUPPORTED: Status = 801;

pub const PROT_READ_WRITE: c_int = 3;
pub const MAP_PRIVATE_ANONYMOUS: c_int = 0x22;
pub const MAP_NORESERVE: c_int = 0x4000;
pub const MAP_FIXED_NOREPLACE: c_int = 0x10_0000;
/// The pages of anonymous private memory are given back: they read 0 when they are touched again.
const MADV_DONTNEED: c_int = 4;
const PAGE: u64 = 4096;
const O_RDONLY_CLOEXEC: c_int = 0x8_0000;
pub const RTLD_LAZY: c_int = 1;
pub const RTLD_NOLOAD: c_int = 4;

unsafe extern "C" {
    pub fn mmap(
        at: *mut c_void,
        n: usize,
        prot: c_int,
        flags: c_int,
        fd: c_int,
        off: c_long,
    ) -> *mut c_void;
    pub fn munmap(at: *mut c_void, n: usize) -> c_int;
    fn open(path: *const c_char, flags: c_int, ...) -> c_int;
    fn pread(file: c_int, to: *mut c_void, n: usize, at: c_long) -> isize;
    fn close(file: c_int) -> c_int;
    fn madvise(at: *mut c_void, n: usize, advice: c_int) -> c_int;
    pub fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
    pub fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
    fn dladdr(at: *const c_void, about: *mut Place) -> c_int;
    pub fn pthread_atfork(
        prepare: extern "C" fn(),
        parent: extern "C" fn(),
        child: extern "C" fn(),
    ) -> c_int;
}

/// What the loader knows of an address: `Dl_info`.
#[repr(C)]
struct Place {
    library: *const c_char,
    base: *mut c_void,
    symbol: *const c_char,
    symbol_at: *mut c_void,
}

/// The path of the library that holds an address.
pub fn library_at(at: *const c_void) -> Option<String> {
    let nothing: *mut c_void = std::ptr::null_mut();
    let mut place = Place {
        library: nothing.cast(),
        base: nothing,
        symbol: nothing.cast(),
        symbol_at: nothing,
    };
    // SAFETY: the loader looks the address up and does not read what is there.
    if unsafe { dladdr(at, &raw mut place) } == 0 || place.library.is_null() {
        return None;
    }
    // SAFETY: the loader keeps the name while the library is loaded.
    let name = unsafe { CStr::from_ptr(place.library) };
    Some(name.to_string_lossy().replace('\n', " "))
}

/// Maps `bytes` of zeros that cost nothing until they are touched; at `at` where that is free.
pub fn map_lazily(at: u64, bytes: usize) -> Option<u64> {
    let fixed = if at == 0 { 0 } else { MAP_FIXED_NOREPLACE };
    let flags = MAP_PRIVATE_ANONYMOUS | MAP_NORESERVE | fixed;
    // SAFETY: an anonymous mapping that replaces no other one.
    let p = unsafe { mmap(at as *mut c_void, bytes, PROT_READ_WRITE, flags, -1, 0) } as u64;
    let taken = at != 0 && p != at;
    if p == u64::MAX {
        return None;
    }
    if taken {
        unmap(p, bytes);
        return None;
    }
    Some(p)
}

/// Where the first page that lies wholly in a stretch begins, and where the last one ends.
pub fn whole_pages(at: u64, bytes: u64) -> (u64, u64) {
    (at.next_multiple_of(PAGE), (at + bytes) / PAGE * PAGE)
}

/// Makes bytes of private memory without a file read 0. Whole pages that were never touched cost
/// nothing.
pub fn zero_lazily(at: u64, bytes: u64) {
    let end = at + bytes;
    let (first, last) = whole_pages(at, bytes);
    // SAFETY: callers pass a stretch of such memory, which is theirs to change.
    unsafe {
        if first >= last
            || madvise(first as *mut c_void, (last - first) as usize, MADV_DONTNEED) != 0
        {
            std::ptr::write_bytes(at as *mut u8, 0, bytes as usize);
            return;
        }
        // The pages at both ends may hold something else, too.
        std::ptr::write_bytes(at as *mut u8, 0, (first - at) as usize);
        std::ptr::write_bytes(last as *mut u8, 0, (end - last) as usize);
    }
}

/// Whether a stretch of this process's memory is private and has no file behind it.
pub fn is_private(at: u64, bytes: u64) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps");
    maps.is_ok_and(|maps| all_private(&maps, at, at + bytes))
}

/// The same by the kernel's list of mappings, which is in order.
fn all_private(maps: &str, first: u64, end: u64) -> bool {
    let mut at = first;
    for line in maps.lines() {
        let mut words = line.split_ascii_whitespace();
        let (range, rights) = (words.next().unwrap_or(""), words.next().unwrap_or(""));
        let file = words.nth(2).unwrap_or("");
        let Some((from, to)) = range.split_once('-') else { return false };
        let (Ok(from), Ok(to)) = (u64::from_str_radix(from, 16), u64::from_str_radix(to, 16))
        else {
            return false;
        };
        if to <= at {
            continue;
        }
        if from > at || !rights.starts_with("rw") || !rights.ends_with('p') || file != "0" {
            return false;
        }
        at = to;
        if at >= end {
            return true;
        }
    }
    false
}

/// Whether no page that lies wholly in a stretch was ever touched, so that these read 0; false
/// where Linux does not say.
pub fn is_untouched(at: u64, bytes: u64) -> bool {
    let (first, last) = whole_pages(at, bytes);
    let (first, last) = (first / PAGE, last / PAGE);
    let mut entries = [0_u64; 256];
    if first >= last || last - first > entries.len() as u64 {
        return false;
    }
    let room = 8 * (last - first) as usize;
    // SAFETY: `entries` has room for one word a page. A parent's descriptor would show the
    // parent's memory, so that the file is opened each time.
    let read = unsafe {
        let file = open(c"/proc/self/pagemap".as_ptr(), O_RDONLY_CLOEXEC);
        if file < 0 {
            return false;
        }
        let read = pread(file, entries.as_mut_ptr().cast(), room, (8 * first) as c_long);
        close(file);
        read
    };
    const PRESENT_OR_SWAPPED: u64 = 3 << 62;
    read == room as isize && entries.iter().all(|entry| entry & PRESENT_OR_SWAPPED == 0)
}

/// Gives a mapping back.
pub fn unmap(at: u64, bytes: usize) {
    // SAFETY: callers pass what `map_lazily` returned.
    unsafe { munmap(at as *mut c_void, bytes) };
}

/// The function `name` among all libraries that the process has loaded globally.
pub fn symbol(name: &CStr) -> *mut c_void {
    // SAFETY: a null handle is RTLD_DEFAULT.
    unsafe { dlsym(std::ptr::null_mut(), name.as_ptr()) }
}

/// The function `name` of a library that is already loaded, past this one's own definition.
pub fn real(library: &CStr, name: &CStr) -> Option<*mut c_void> {
    // SAFETY: RTLD_NOLOAD never loads anything.
    let handle = unsafe { dlopen(library.as_ptr(), RTLD_LAZY | RTLD_NOLOAD) };
    if handle.is_null() {
        return None;
    }
    // SAFETY: the handle is valid.
    let found = unsafe { dlsym(handle, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

/// Copies `text` with its terminating zero into a buffer of `room` bytes, cut where it does not
/// fit.
pub unsafe fn put_text(out: *mut c_char, room: usize, text: &str) {
    if out.is_null() || room == 0 {
        return;
    }
    let n = text.len().min(room - 1);
    // SAFETY: the caller gives `room` bytes at `out`.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), out, n);
        *out.add(n) = 0;
    }
}

/// Writes through an out-parameter that may be null.
pub unsafe fn put<T>(out: *mut T, value: T) {
    if !out.is_null() {
        // SAFETY: the caller says that `out` is null or valid.
        unsafe { out.write_unaligned(value) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_private_memory_without_a_file_is_given_back() {
        let maps = "\
            1000-3000 rw-p 00000000 00:00 0 \n\
            3000-4000 rw-p 00000000 00:00 0                  [heap]\n\
            4000-5000 rw-p 00000000 08:01 77                 /data/weights\n\
            6000-7000 rw-s 00000000 00:00 0\n\
            7000-8000 r--p 00000000 00:00 0\n";
        for (first, end, is) in [
            (0x1000, 0x4000, true),
            (0x2800, 0x3800, true),
            (0x3800, 0x4800, false),
            (0x0800, 0x1800, false),
            (0x4800, 0x6800, false),
            (0x6000, 0x7000, false),
            (0x7000, 0x8000, false),
            (0x8000, 0x9000, false),
        ] {
            assert_eq!(all_private(maps, first, end), is, "{first:x} to {end:x}");
        }
    }

    #[test]
    fn memory_of_this_process_is_zeroed_by_pages() {
        let mut bytes = vec![7_u8; 3 << 20];
        let at = bytes.as_mut_ptr() as u64;
        assert!(is_private(at, bytes.len() as u64));
        zero_lazily(at + 5, (2 << 20) + 1);
        assert_eq!(bytes.iter().filter(|byte| **byte == 0).count(), (2 << 20) + 1);
        assert_eq!((bytes[4], bytes[5], bytes[(2 << 20) + 6]), (7, 0, 7));
    }
}
