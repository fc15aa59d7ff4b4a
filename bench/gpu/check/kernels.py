"""What a device says of PyTorch's own kernels: registers, memory, threads, and how many blocks a
multiprocessor holds.

    python kernels.py OUT.json [--like OTHER.json] [--count 200]

Takes kernels of libtorch_cuda.so at equal distances, or those that another run took. Nothing
of them is launched.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

CONTAINER = 0xBA55ED50
"""What a fat binary begins with."""
ATTRIBUTES = {"max_threads": 0, "shared_bytes": 1, "local_bytes": 3, "registers": 4, "binary": 6}
"""By their numbers in ``CUfunction_attribute``."""
BLOCKS = ((128, 0), (256, 0), (512, 0), (1024, 0), (256, 16384))
"""Threads of a block, and its dynamic shared memory in bytes."""
EACH = 5
"""The most kernels of one fat binary; some have fewer, most at least three."""


class Driver:
    """Calls of the driver in PyTorch's context; a status other than 0 is an error."""

    def __init__(self) -> None:
        """Lets PyTorch make its context."""
        torch.ones(1, device="cuda")
        self._library = ctypes.CDLL("libcuda.so.1")

    def __call__(self, name: str, *given: Any) -> None:
        """Calls a function.

        Raises:
            OSError: if it refuses.
        """
        if code := getattr(self._library, name)(*given):
            raise OSError(code, f"{name}: CUDA's error {code}")


def section(image: mmap.mmap, wanted: bytes) -> tuple[int, int]:
    """Where a section of an ELF file is, and its bytes."""
    table = struct.unpack_from("<Q", image, 0x28)[0]
    size, many, names = struct.unpack_from("<HHH", image, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", image, table + at * size) for at in range(many)]
    for name, _, _, _, at, length in headers:
        text = headers[names][4] + name
        if image[text : text + len(wanted) + 1] == wanted + b"\0":
            return at, length
    raise ValueError(f"no section {wanted.decode()}")


def binaries(image: mmap.mmap) -> Iterator[int]:
    """Where the fat binaries of a library are."""
    at, length = section(image, b".nv_fatbin")
    end = at + length
    while at + 16 <= end:
        magic, _, head, body = struct.unpack_from("<IHHQ", image, at)
        if magic == CONTAINER:
            yield at
            at += head + body
        else:
            at += 8


def names_of(driver: Driver, module: ctypes.c_void_p) -> list[str]:
    """The kernels of a module."""
    many = ctypes.c_uint()
    driver("cuModuleGetFunctionCount", ctypes.byref(many), module)
    functions = (ctypes.c_void_p * many.value)()
    driver("cuModuleEnumerateFunctions", functions, many, module)
    found = []
    for function in functions:
        name = ctypes.c_char_p()
        driver("cuFuncGetName", ctypes.byref(name), ctypes.c_void_p(function))
        found.append((name.value or b"").decode())
    return sorted(found)


def said(driver: Driver, module: ctypes.c_void_p, name: str) -> dict[str, Any]:
    """What the device says of one kernel."""
    function, value = ctypes.c_void_p(), ctypes.c_int()
    driver("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
    found: dict[str, Any] = {}
    for key, number in ATTRIBUTES.items():
        driver("cuFuncGetAttribute", ctypes.byref(value), number, function)
        found[key] = value.value
    found["blocks"] = []
    for threads, dynamic in BLOCKS:
        if threads > found["max_threads"]:
            continue
        driver(
            "cuOccupancyMaxActiveBlocksPerMultiprocessor",
            ctypes.byref(value),
            function,
            threads,
            ctypes.c_size_t(dynamic),
        )
        found["blocks"].append(value.value)
    return found


def library() -> Path:
    """PyTorch's kernels."""
    return Path(torch.__path__[0]) / "lib" / "libtorch_cuda.so"


def main() -> int:
    """Writes the answers, by the fat binary's place and the kernel's name."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--like", type=Path, help="take the kernels of this file")
    parser.add_argument("--count", type=int, default=200, help="at least so many")
    asked = parser.parse_args()
    path = library()
    with open(path, "rb") as file:
        image = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    base = ctypes.addressof(ctypes.c_char.from_buffer(image))
    driver = Driver()
    wanted: dict[int, list[str] | None]
    if asked.like:
        taken = json.loads(asked.like.read_text())
        wanted = {int(at): list(kernels) for at, kernels in taken.items()}
    else:
        places = list(binaries(image))
        step = max(1, len(places) * 3 // asked.count)
        wanted = dict.fromkeys(places[::step])
    found: dict[str, dict[str, Any]] = {}
    for at, names in wanted.items():
        module = ctypes.c_void_p()
        try:
            driver("cuModuleLoadData", ctypes.byref(module), ctypes.c_void_p(base + at))
        except OSError:
            # It has no code for this device.
            continue
        if names is None:
            every = names_of(driver, module)
            names = every[:: max(1, len(every) // EACH)][:EACH]
        found[str(at)] = {name: said(driver, module, name) for name in names}
    asked.out.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
