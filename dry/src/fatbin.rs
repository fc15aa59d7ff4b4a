//! Fat binaries: the same kernels compiled for several architectures, of which a driver takes one.

use std::borrow::Cow;
use std::ffi::c_void;

/// What `nvcc` hands to `__cudaRegisterFatBinary`, and the fat binary itself.
const WRAPPER: u32 = 0x4662_43b1;
const CONTAINER: u32 = 0xba55_ed50;

const PTX: u16 = 1;
const CUBIN: u16 = 2;
/// Flags of an entry: how its data are compressed, and for which devices they are.
const LZ4: u64 = 0x2000;
const ZSTD: u64 = 0x8000;
const EXACT: u64 = 0x10_0000;
const FAMILY: u64 = 0x20_0000;
/// No compiled library's entry is larger.
const LARGEST: u64 = 1 << 31;

/// One architecture's kernels.
#[derive(Clone, Copy)]
pub struct Entry {
    kind: u16,
    /// Major × 10 + minor.
    pub architecture: i32,
    flags: u64,
    data: &'static [u8],
    /// What the data decompress to.
    bytes: usize,
}

impl Entry {
    /// Whether a device of this capability can run it, for PTX by compiling it.
    fn serves(&self, capability: i32) -> bool {
        let family = self.architecture / 10 == capability / 10;
        if self.flags & EXACT != 0 {
            return self.architecture == capability;
        }
        self.architecture <= capability && (self.kind == PTX && self.flags & FAMILY == 0 || family)
    }

    /// Whether a driver has to compile it.
    pub fn is_source(&self) -> bool {
        self.kind == PTX
    }

    /// The object that it holds.
    pub fn image(&self) -> Option<Cow<'static, [u8]>> {
        if self.flags & ZSTD != 0 {
            return crate::zstd::decompress(self.data, self.bytes).map(Cow::Owned);
        }
        if self.flags & LZ4 != 0 {
            return crate::lz4::decompress(self.data, self.bytes).map(Cow::Owned);
        }
        Some(Cow::Borrowed(self.data))
    }
}

unsafe fn read<T: Copy>(at: *const u8, offset: usize) -> T {
    // SAFETY: callers say that there is such a value.
    unsafe { at.add(offset).cast::<T>().read_unaligned() }
}

/// The entries of a fat binary, or of the wrapper around one; none for anything else.
///
/// # Safety
/// At `at` is a wrapper, a fat binary, or at least four bytes of something else; a fat binary stays
/// where it is.
pub unsafe fn entries(at: *const c_void) -> Option<Vec<Entry>> {
    let mut at = at.cast::<u8>();
    if at.is_null() {
        return None;
    }
    // SAFETY: as the caller says; sizes are the compiler's own.
    unsafe {
        if read::<u32>(at, 0) == WRAPPER {
            at = read::<*const u8>(at, 8);
        }
        if at.is_null() || read::<u32>(at, 0) != CONTAINER {
            return None;
        }
        let mut offset = usize::from(read::<u16>(at, 6));
        let end = offset + read::<u64>(at, 8) as usize;
        let mut all = Vec::new();
        while offset < end {
            let entry = at.add(offset);
            let header = read::<u32>(entry, 4) as usize;
            let (size, packed) = (read::<u64>(entry, 8), read::<u32>(entry, 16));
            let flags: u64 = read(entry, 40);
            let compressed = flags & (LZ4 | ZSTD) != 0;
            let bytes = if compressed { read::<u64>(entry, 56) } else { size };
            if header < 64 || size > LARGEST || bytes > LARGEST || u64::from(packed) > size {
                return None;
            }
            let length = if compressed { packed as usize } else { size as usize };
            all.push(Entry {
                kind: read(entry, 0),
                architecture: read::<u32>(entry, 28) as i32,
                flags,
                data: std::slice::from_raw_parts(entry.add(header), length),
                bytes: bytes as usize,
            });
            offset += header + size as usize;
        }
        Some(all)
    }
}

/// The entry that a driver takes for a device: machine code of the device's own kind rather than of
/// its family, of its family rather than of its generation, the newest of these; else the newest
/// source.
pub fn choose(entries: &[Entry], capability: i32) -> Option<Entry> {
    let of = |kind: u16| {
        let able = entries.iter().filter(move |e| e.kind == kind && e.serves(capability));
        able.max_by_key(|e| (e.architecture, e.flags & EXACT != 0, e.flags & FAMILY != 0)).copied()
    };
    of(CUBIN).or_else(|| of(PTX))
}
