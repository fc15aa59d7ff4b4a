"""An independent reader of a library's kernels: what each architecture's compiler wrote of them.

It shares nothing with the device library of `neap dry`, against which tests hold it.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

LAUNCHES = ((32, 0), (96, 2048), (128, 0), (256, 16384), (512, 0), (768, 0), (1024, 0))
"""What occupancy is asked for: threads of a block, and bytes of its dynamic shared memory."""
SECTION = struct.Struct("<IIQQQQIIQQ")


@dataclass(frozen=True)
class Kernel:
    """What a device says of a kernel."""

    registers: int
    shared: int
    constant: int
    local: int
    largest: int
    ptx: int
    binary: int


@dataclass(frozen=True)
class Entry:
    """One architecture's object inside a fat binary."""

    kind: int
    architecture: int
    flags: int
    packed: bytes
    size: int

    def image(self) -> bytes:
        """The object."""
        if self.flags & 0x8000:
            import zstandard

            decompressor = zstandard.ZstdDecompressor()
            return decompressor.decompress(self.packed, max_output_size=self.size)
        if self.flags & 0x2000:
            import lz4.block

            return bytes(lz4.block.decompress(self.packed, uncompressed_size=self.size))
        return self.packed


def sections(image: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Names and headers of an ELF file's sections."""
    (start,) = struct.unpack_from("<Q", image, 0x28)
    count, names = struct.unpack_from("<HH", image, 0x3C)
    headers = [SECTION.unpack_from(image, start + SECTION.size * i) for i in range(count)]
    strings = headers[names][4]

    def name(at: int) -> str:
        return bytes(image[strings + at : image.find(b"\0", strings + at)]).decode()

    return [(name(header[0]), header) for header in headers]


class Library:
    """A library's fat binaries, by their addresses in it."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self.bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        found = dict(sections(self.bytes))[".nv_fatbin"]
        self.address, self.start, self.size = found[3:6]

    def binaries(self) -> Iterator[tuple[int, list[Entry]]]:
        """Each fat binary's address, and its entries."""
        at = self.start
        while at < self.start + self.size:
            magic, _, header, size = struct.unpack_from("<IHHQ", self.bytes, at)
            if magic != 0xBA55ED50:
                at += 8  # Padding between two.
                continue
            end = at + header + size
            yield self.address + at - self.start, list(self._entries(at + header, end))
            at = end

    def _entries(self, at: int, end: int) -> Iterator[Entry]:
        while at < end:
            kind, _, header, size, packed = struct.unpack_from("<HHIQI", self.bytes, at)
            (architecture,) = struct.unpack_from("<I", self.bytes, at + 28)
            (flags,) = struct.unpack_from("<Q", self.bytes, at + 40)
            compressed = flags & 0xA000
            whole = struct.unpack_from("<Q", self.bytes, at + 56)[0] if compressed else size
            length = packed if compressed else size
            data = self.bytes[at + header : at + header + length]
            yield Entry(kind, architecture, flags, data, whole)
            at += header + size


def chosen(entries: list[Entry], capability: int) -> Entry | None:
    """The machine code that a driver takes for a device."""
    best = None
    for entry in entries:
        if entry.kind != 2 or entry.architecture // 10 != capability // 10:
            continue
        exact = entry.flags & 0x100000
        if entry.architecture > capability or (exact and entry.architecture != capability):
            continue
        rank = (entry.architecture, exact, entry.flags & 0x200000)
        if best is None or rank > best[0]:
            best = rank, entry
    return best[1] if best else None


def attributes(section: bytes) -> Iterator[tuple[int, bytes]]:
    """Kinds and values of an information section."""
    at = 0
    while at < len(section):
        form, kind, size = struct.unpack_from("<BBH", section, at)
        at += 4
        if form == 4:
            yield kind, section[at : at + size]
            at += size


def kernels(image: bytes) -> dict[str, Kernel]:
    """All kernels of an object, by name."""
    found = sections(image)
    data = {name: image[h[4] : h[4] + h[5]] for name, h in found if h[1] != 8}
    sizes = {name: header[5] for name, header in found}
    (flags,) = struct.unpack_from("<I", image, 0x30)
    architecture = flags >> 8 & 0xFF if image[8] >= 8 else flags & 0xFF
    note = data.get(".note.nv.cuinfo")
    ptx = struct.unpack_from("<H", note, 26)[0] if note else flags >> 16 & 0xFF
    names = {}
    for i in range(0, len(data[".symtab"]), 24):
        (at,) = struct.unpack_from("<I", data[".symtab"], i)
        names[i // 24] = data[".strtab"][at : data[".strtab"].index(b"\0", at)].decode()
    registers, local = {}, {}
    for kind, value in attributes(data[".nv.info"]):
        if kind in (0x2F, 0x11, 0x12):
            symbol, number = struct.unpack("<II", value)
            if kind == 0x2F:
                registers[names[symbol]] = number
            else:
                local[names[symbol]] = max(number, local.get(names[symbol], 0))
    result = {}
    for name in [n[6:] for n in sizes if n.startswith(".text.")]:
        block = 1024
        for kind, value in attributes(data.get(f".nv.info.{name}", b"")):
            if kind == 0x05:
                block = prod(struct.unpack("<3I", value))
        shared = sizes.get(f".nv.shared.{name}", 0)
        if architecture >= 90:
            shared = max(0, shared - 1024)
        constant = sizes.get(".nv.constant3", 0)
        result[name] = Kernel(
            registers[name], shared, constant, local.get(name, 0), block, ptx, architecture
        )
    return result


SHARED = {60: 64, 70: 96, 75: 64, 80: 164, 86: 100, 89: 100, 90: 228, 100: 228, 120: 100}
SHARED_A_BLOCK = {60: 48, 70: 96, 75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
THREADS = {60: 2048, 70: 2048, 75: 1024, 80: 2048, 86: 1536, 89: 1536, 90: 2048, 100: 2048}
BLOCKS = {60: 32, 70: 32, 75: 16, 80: 32, 86: 16, 89: 24, 90: 32, 100: 32, 120: 24}


def warps(kernel: Kernel, capability: int) -> int:
    """Warps for which a multiprocessor has registers: each of its parts has 64 Ki / parts."""
    parts = 2 if capability == 60 else 4
    each = max(256, -(-kernel.registers * 32 // 256) * 256)
    return parts * (65536 // parts // each)


def occupancy(kernel: Kernel, capability: int, threads: int, dynamic: int) -> int:
    """Blocks a multiprocessor, by the table and the formula of NVIDIA's programming guide."""
    new = capability >= 80
    shared = kernel.shared + dynamic
    most = min(1024, kernel.largest, 32 * warps(kernel, capability))
    if threads > most or shared > SHARED_A_BLOCK[capability] * 1024:
        return 0
    in_block = -(-threads // 32)
    unit = 128 if new else 256
    taken = -(-(shared + (1024 if new else 0)) // unit) * unit
    return min(
        BLOCKS[capability],
        THREADS.get(capability, 1536) // 32 // in_block,
        warps(kernel, capability) // in_block,
        SHARED[capability] * 1024 // taken if taken else 1 << 30,
    )


def differences(rows: list[dict[str, Any]], capability: int) -> list[str]:
    """Where a device's answers (`asked.py`) differ from what its libraries' files say."""
    libraries: dict[str, dict[int, list[Entry]]] = {}
    read: dict[tuple[str, int], dict[str, Kernel]] = {}
    problems = []
    for row in rows:
        path, address = row["library"], row["binary"]
        if path not in libraries:
            libraries[path] = dict(Library(Path(path)).binaries())
        entry = chosen(libraries[path][address], capability)
        if entry is None:
            if row["status"] != 209:
                problems.append(f"{row['kernel']}: no entry, status {row['status']}")
            continue
        if (path, address) not in read:
            read[path, address] = kernels(entry.image())
        kernel = read[path, address][row["kernel"]]
        largest = min(1024, kernel.largest, 32 * warps(kernel, capability))
        own = (kernel.shared, kernel.constant, kernel.local, largest, kernel.registers)
        own += (kernel.ptx, kernel.binary, 0, 49152 - kernel.shared)
        blocks = [occupancy(kernel, capability, *launch) for launch in LAUNCHES]
        if row["status"] or own != tuple(row["attributes"]) or blocks != row["blocks"]:
            problems.append(f"{row}: the file says {own}, {blocks}")
    return problems
