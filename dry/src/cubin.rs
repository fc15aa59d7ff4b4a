//! Kernels' attributes, from the object that a compiler made: an ELF file of one architecture.

use std::collections::BTreeMap;
use std::ffi::CString;

/// What a device says of a kernel.
#[derive(Clone, Copy)]
pub struct Attributes {
    pub registers: i32,
    /// Shared memory of a fixed size, in bytes.
    pub shared: usize,
    /// Constants of the kernel's module.
    pub constant: usize,
    /// Stack and spilled registers a thread.
    pub local: usize,
    /// What the compiler was given as the largest block.
    pub max_threads: i32,
    /// The architecture of the source that the compiler translated.
    pub ptx: i32,
    /// The architecture that it was translated for.
    pub binary: i32,
}

/// The kernels of an object, by a hash of their names.
pub struct Cubin {
    pub architecture: i32,
    kernels: Vec<(u64, Attributes)>,
    /// The names themselves, where they were asked for.
    names: Vec<CString>,
}

/// Compilers put this much before a kernel's own shared memory from 9.0 on: the system's, which
/// devices count apart.
const SYSTEM_SHARED: usize = 1024;
const SYSTEM_SHARED_SINCE: i32 = 90;

/// Attributes in sections `.nv.info`, and the form that is followed by a size and as many bytes.
const MAX_THREADS: u8 = 0x05;
const FRAME: u8 = 0x11;
const STACK: u8 = 0x12;
const REGISTERS: u8 = 0x2f;
const SIZED: u8 = 4;

/// FNV-1a: names are long, and only compared.
fn hash(name: &[u8]) -> u64 {
    name.iter()
        .fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3))
}

fn word<const N: usize>(bytes: &[u8], at: usize) -> Option<u64> {
    let mut eight = [0; 8];
    eight[..N].copy_from_slice(bytes.get(at..at.checked_add(N)?)?);
    Some(u64::from_le_bytes(eight))
}

struct Section<'a> {
    name: &'a [u8],
    kind: u64,
    at: usize,
    bytes: usize,
    link: usize,
    info: u64,
}

impl Section<'_> {
    fn data<'a>(&self, image: &'a [u8]) -> Option<&'a [u8]> {
        image.get(self.at..self.at.checked_add(self.bytes)?)
    }
}

fn text(strings: &[u8], at: usize) -> Option<&[u8]> {
    let rest = strings.get(at..)?;
    Some(&rest[..rest.iter().position(|b| *b == 0)?])
}

const HEADER: usize = 64;

fn sections(image: &[u8]) -> Option<Vec<Section<'_>>> {
    let start = word::<8>(image, 0x28)? as usize;
    let (many, names) = (word::<2>(image, 0x3c)? as usize, word::<2>(image, 0x3e)? as usize);
    let at = |i: usize| start.checked_add(i * HEADER);
    let names = at(names)?;
    let (names_at, bytes) = (word::<8>(image, names + 24)?, word::<8>(image, names + 32)?);
    let end = (names_at as usize).checked_add(bytes as usize)?;
    let strings = image.get(names_at as usize..end)?;
    let all = (0..many).map(|i| {
        let at = at(i)?;
        Some(Section {
            name: text(strings, word::<4>(image, at)? as usize)?,
            kind: word::<4>(image, at + 4)?,
            at: word::<8>(image, at + 24)? as usize,
            bytes: word::<8>(image, at + 32)? as usize,
            link: word::<4>(image, at + 40)? as usize,
            info: word::<4>(image, at + 44)?,
        })
    });
    all.collect()
}

/// The attributes of a section `.nv.info` that have a size: kind and value.
fn information(mut bytes: &[u8]) -> impl Iterator<Item = (u8, &[u8])> {
    std::iter::from_fn(move || {
        loop {
            let [form, kind, low, high] = *bytes.first_chunk()?;
            bytes = &bytes[4..];
            if form == SIZED {
                let value;
                (value, bytes) =
                    bytes.split_at_checked(usize::from(u16::from_le_bytes([low, high])))?;
                return Some((kind, value));
            }
        }
    })
}

/// The architecture of the source, as a note says it since CUDA 12.8, or the flags before.
fn source(image: &[u8], sections: &[Section<'_>], flags: u64) -> Option<i32> {
    if let Some(note) = sections.iter().find(|s| s.name == b".note.nv.cuinfo") {
        // Three words, the owner's name, then the note's version and the architecture.
        let bytes = note.data(image)?;
        let owner = word::<4>(bytes, 0)? as usize;
        return Some(word::<2>(bytes, 12 + owner.next_multiple_of(4) + 2)? as i32);
    }
    Some((flags >> 16 & 0xff) as i32)
}

/// How many bytes an ELF file in memory has: its table of sections ends it, or one of these does.
///
/// # Safety
/// At `at` is an ELF file.
pub unsafe fn length(at: *const u8) -> Option<usize> {
    // SAFETY: the caller says so.
    let header = unsafe { std::slice::from_raw_parts(at, HEADER) };
    let table = word::<8>(header, 0x28)? as usize;
    let end = table.checked_add(HEADER * word::<2>(header, 0x3c)? as usize)?;
    // SAFETY: the file reaches as far as its own table.
    let sections = unsafe { std::slice::from_raw_parts(at.add(table), end - table) };
    let programs = word::<8>(header, 0x20)? as usize + 56 * word::<2>(header, 0x38)? as usize;
    sections.chunks_exact(HEADER).try_fold(end.max(programs), |end, section| {
        const WITHOUT_DATA: u64 = 8;
        let bytes =
            if word::<4>(section, 4)? == WITHOUT_DATA { 0 } else { word::<8>(section, 32)? };
        Some(end.max(word::<8>(section, 24)?.checked_add(bytes)? as usize))
    })
}

impl Cubin {
    /// Reads an object, with the kernels' names where a caller may list them; none where it is
    /// something else.
    pub fn read(image: &[u8], named: bool) -> Option<Self> {
        if !image.starts_with(b"\x7fELF\x02\x01") {
            return None;
        }
        let flags = word::<4>(image, 0x30)?;
        let version = *image.get(8)?;
        let architecture = if version >= 8 { flags >> 8 & 0xff } else { flags & 0xff } as i32;
        let sections = sections(image)?;
        let constant = sections.iter().find(|s| s.name == b".nv.constant3").map_or(0, |s| s.bytes);
        let fresh = Attributes {
            registers: 0,
            shared: 0,
            constant,
            local: 0,
            max_threads: 1024,
            ptx: source(image, &sections, flags)?,
            binary: architecture,
        };
        let mut kernels = BTreeMap::new();
        for section in &sections {
            if let Some(name) = section.name.strip_prefix(b".text.") {
                // Where compilers wrote the registers before there was an attribute for them.
                let registers = (section.info >> 24) as i32;
                kernels.insert(name, Attributes { registers, ..fresh });
            }
        }
        for section in &sections {
            if let Some(name) = section.name.strip_prefix(b".nv.shared.")
                && let Some(kernel) = kernels.get_mut(name)
            {
                let system = if architecture >= SYSTEM_SHARED_SINCE { SYSTEM_SHARED } else { 0 };
                kernel.shared = section.bytes.saturating_sub(system);
            } else if let Some(name) = section.name.strip_prefix(b".nv.info.")
                && let Some(kernel) = kernels.get_mut(name)
            {
                for (kind, value) in information(section.data(image)?) {
                    if kind == MAX_THREADS {
                        let block = (0..3).map(|i| word::<4>(value, 4 * i));
                        kernel.max_threads = block.product::<Option<u64>>()? as i32;
                    }
                }
            } else if section.name == b".nv.info" {
                of_all(image, &sections, section, &mut kernels)?;
            }
        }
        let names =
            if named { kernels.keys().flat_map(|n| CString::new(*n)).collect() } else { vec![] };
        let mut kernels: Vec<_> = kernels.into_iter().map(|(n, k)| (hash(n), k)).collect();
        kernels.sort_unstable_by_key(|(hash, _)| *hash);
        Some(Self { architecture, kernels, names })
    }

    /// The kernels' names; empty unless the object was read with them.
    pub fn names(&self) -> &[CString] {
        &self.names
    }

    /// A kernel's attributes.
    pub fn find(&self, name: &[u8]) -> Option<Attributes> {
        let at = self.kernels.binary_search_by_key(&hash(name), |(hash, _)| *hash).ok()?;
        Some(self.kernels[at].1)
    }
}

/// Adds what one section says of all kernels, by their symbols.
fn of_all<'a>(
    image: &'a [u8],
    sections: &[Section<'a>],
    section: &Section<'a>,
    kernels: &mut BTreeMap<&'a [u8], Attributes>,
) -> Option<()> {
    const SYMBOLS: u64 = 2;
    let table = sections.iter().find(|s| s.kind == SYMBOLS)?;
    let names = sections.get(table.link)?.data(image)?;
    let symbols = table.data(image)?;
    for (kind, value) in information(section.data(image)?) {
        if !matches!(kind, REGISTERS | FRAME | STACK) {
            continue;
        }
        let (symbol, value) = (word::<4>(value, 0)? as usize, word::<4>(value, 4)?);
        let name = text(names, word::<4>(symbols, 24 * symbol)? as usize)?;
        if let Some(kernel) = kernels.get_mut(name) {
            if kind == REGISTERS {
                kernel.registers = value as i32;
            } else {
                kernel.local = kernel.local.max(value as usize);
            }
        }
    }
    Some(())
}
