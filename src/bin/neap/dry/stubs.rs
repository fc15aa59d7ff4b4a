//! Writes a small ELF shared object whose functions count their calls and return one value.

use anyhow::Context;
use object::elf;
use object::endian::Endianness;
use object::write::StringId;
use object::write::elf::{FileHeader, ProgramHeader, Sym, Writer};

/// A function to write: its name, and what it returns.
pub struct Stub {
    pub name: String,
    pub returns: u8,
}

/// Segments begin at multiples of this, which covers every page size that Linux uses.
const PAGE: usize = 0x1_0000;
/// Bytes of code a function, on either architecture.
const CODE: usize = 24;

/// The machine code of one function at `at` that counts in `counter`.
fn code(at: u64, counter: u64, returns: u8) -> [u8; CODE] {
    let mut out = [0; CODE];
    if cfg!(target_arch = "aarch64") {
        let pages = ((counter & !0xfff).wrapping_sub(at & !0xfff) >> 12) as u32;
        let offset = ((counter & 0xfff) >> 3) as u32;
        let words: [u32; 6] = [
            // adrp x16, page; ldr x17, [x16, offset]; add x17, x17, 1; str x17, [x16, offset]
            0x9000_0010 | (pages & 3) << 29 | (pages >> 2 & 0x7_ffff) << 5,
            0xf940_0211 | offset << 10,
            0x9100_0631,
            0xf900_0211 | offset << 10,
            // mov w0, value; ret
            0x5280_0000 | u32::from(returns) << 5,
            0xd65f_03c0,
        ];
        for (bytes, word) in out.chunks_exact_mut(4).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        return out;
    }
    // endbr64; inc qword ptr [rip + distance]; mov eax, value; ret
    out[..4].copy_from_slice(&[0xf3, 0x0f, 0x1e, 0xfa]);
    out[4..7].copy_from_slice(&[0x48, 0xff, 0x05]);
    let distance = counter.wrapping_sub(at + 11) as u32;
    out[7..11].copy_from_slice(&distance.to_le_bytes());
    out[11] = 0xb8;
    out[12] = returns;
    out[16] = 0xc3;
    out
}

/// Where the parts of the object lie, as offsets in the file and addresses at once.
struct Layout {
    hash: usize,
    dynsym: usize,
    dynstr: usize,
    dynstr_bytes: usize,
    names: usize,
    names_bytes: usize,
    many: usize,
    read_end: usize,
    text: usize,
    text_end: usize,
    dynamic: usize,
    write_end: usize,
    /// Behind the file's end, in memory alone.
    counts: usize,
    buckets: u32,
}

/// What the object exports besides its functions: their counters, their names, and how many there
/// are.
const DATA: [&str; 3] = ["neap_stub_counts", "neap_stub_names", "neap_stub_many"];

/// Reserves read-only data, then code, then what the loader and the counters write to.
fn reserve(w: &mut Writer<'_>, functions: usize, names_bytes: usize, needed: usize) -> Layout {
    let symbols = functions + DATA.len();
    let chains = symbols as u32 + 1;
    let buckets = (chains.next_power_of_two() / 2).max(1);
    w.reserve_file_header();
    w.reserve_program_headers(5);
    let hash = w.reserve_hash(buckets, chains);
    w.reserve_null_dynamic_symbol_index();
    for _ in 0..symbols {
        w.reserve_dynamic_symbol_index();
    }
    let dynsym = w.reserve_dynsym();
    let dynstr = w.reserve_dynstr();
    let dynstr_bytes = w.dynstr_len();
    let names = w.reserve(names_bytes, 1);
    let many = w.reserve(8, 8);
    let read_end = w.reserved_len();
    let text = w.reserve(functions * CODE, PAGE);
    let text_end = w.reserved_len();
    w.reserve(0, PAGE);
    let dynamic = w.reserve_dynamic(needed + 7);
    let write_end = w.reserved_len();
    let counts = write_end.next_multiple_of(8);
    Layout {
        hash,
        dynsym,
        dynstr,
        dynstr_bytes,
        names,
        names_bytes,
        many,
        read_end,
        text,
        text_end,
        dynamic,
        write_end,
        counts,
        buckets,
    }
}

fn write_headers(w: &mut Writer<'_>, at: &Layout, functions: usize) -> anyhow::Result<()> {
    let machine = if cfg!(target_arch = "aarch64") { elf::EM_AARCH64 } else { elf::EM_X86_64 };
    w.write_file_header(&FileHeader {
        os_abi: elf::ELFOSABI_SYSV,
        abi_version: 0,
        e_type: elf::ET_DYN,
        e_machine: machine,
        e_entry: 0,
        e_flags: 0,
    })
    .context("the stub library cannot be written")?;
    w.write_align_program_headers();
    let (load, read, written) = (elf::PT_LOAD, elf::PF_R, elf::PF_R | elf::PF_W);
    let memory_end = at.counts + 8 * functions;
    let page = at.dynamic / PAGE * PAGE;
    // Kind, flags, where it starts and ends in the file, where it ends in memory, alignment.
    for (kind, flags, start, end, memory, align) in [
        (load, read, 0, at.read_end, at.read_end, PAGE),
        (load, read | elf::PF_X, at.text, at.text_end, at.text_end, PAGE),
        (load, written, page, at.write_end, memory_end, PAGE),
        (elf::PT_DYNAMIC, written, at.dynamic, at.write_end, at.write_end, 8),
        (elf::PT_GNU_STACK, written, 0, 0, 0, 16),
    ] {
        w.write_program_header(&ProgramHeader {
            p_type: kind,
            p_flags: flags,
            p_offset: start as u64,
            p_vaddr: start as u64,
            p_paddr: start as u64,
            p_filesz: (end - start) as u64,
            p_memsz: (memory - start) as u64,
            p_align: align as u64,
        });
    }
    Ok(())
}

fn write_symbols(w: &mut Writer<'_>, at: &Layout, all: &[&str], ids: &[StringId]) {
    let functions = all.len() - DATA.len();
    w.write_hash(at.buckets, all.len() as u32 + 1, |i| {
        (i > 0).then(|| elf::hash(all[i as usize - 1].as_bytes()))
    });
    w.write_null_dynamic_symbol();
    for (i, id) in ids.iter().enumerate() {
        let (kind, section, value, size) = match i.checked_sub(functions) {
            None => (elf::STT_FUNC, 2, at.text + i * CODE, CODE),
            Some(0) => (elf::STT_OBJECT, 3, at.counts, 8 * functions),
            Some(1) => (elf::STT_OBJECT, 1, at.names, at.names_bytes),
            Some(_) => (elf::STT_OBJECT, 1, at.many, 8),
        };
        w.write_dynamic_symbol(&Sym {
            name: Some(*id),
            section: None,
            st_info: elf::STB_GLOBAL << 4 | kind,
            st_other: elf::STV_DEFAULT,
            st_shndx: section,
            st_value: value as u64,
            st_size: size as u64,
        });
    }
    w.write_dynstr();
}

/// The shared object: `soname`, the libraries that it needs, and its functions, in order. It also
/// exports [`DATA`], which the device's log reads.
///
/// # Errors
/// When the object would be too large for ELF.
pub fn write(soname: &str, needed: &[&str], stubs: &[Stub]) -> anyhow::Result<Vec<u8>> {
    let mut out = Vec::new();
    let mut w = Writer::new(Endianness::Little, true, &mut out);
    let names: Vec<u8> = stubs.iter().flat_map(|s| s.name.bytes().chain([0])).collect();
    let soname = w.add_dynamic_string(soname.as_bytes());
    let needed: Vec<_> = needed.iter().map(|n| w.add_dynamic_string(n.as_bytes())).collect();
    let all: Vec<&str> = stubs.iter().map(|s| s.name.as_str()).chain(DATA).collect();
    let ids: Vec<_> = all.iter().map(|n| w.add_dynamic_string(n.as_bytes())).collect();
    let at = reserve(&mut w, stubs.len(), names.len(), needed.len());

    write_headers(&mut w, &at, stubs.len())?;
    write_symbols(&mut w, &at, &all, &ids);
    w.write(&names);
    w.pad_until(at.many);
    w.write(&(stubs.len() as u64).to_le_bytes());
    w.pad_until(at.text);
    for (i, stub) in stubs.iter().enumerate() {
        w.write(&code((at.text + i * CODE) as u64, (at.counts + 8 * i) as u64, stub.returns));
    }
    w.pad_until(at.dynamic);
    for id in needed {
        w.write_dynamic_string(elf::DT_NEEDED, id)?;
    }
    w.write_dynamic_string(elf::DT_SONAME, soname)?;
    w.write_dynamic(elf::DT_HASH, at.hash as u64)?;
    w.write_dynamic(elf::DT_SYMTAB, at.dynsym as u64)?;
    w.write_dynamic(elf::DT_STRTAB, at.dynstr as u64)?;
    w.write_dynamic(elf::DT_STRSZ, at.dynstr_bytes as u64)?;
    w.write_dynamic(elf::DT_SYMENT, 24)?;
    w.write_dynamic(elf::DT_NULL, 0)?;
    Ok(out)
}
