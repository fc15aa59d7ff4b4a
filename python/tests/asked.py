"""Run under `neap dry`: asks the device for attributes and occupancy of kernels, prints answers.

python asked.py KERNELS BINARIES: so many kernels, from so many fat binaries of PyTorch's libraries.
"""

from __future__ import annotations

import ctypes
import json
import random
import struct
import sys
from collections import defaultdict

import torch
from cubins import LAUNCHES

ATTRIBUTES = struct.Struct("<QQQiiiiii")


def libraries() -> list[tuple[int, int, str]]:
    """Where each library's file is mapped: from, to, path."""
    found: dict[str, list[int]] = {}
    with open("/proc/self/maps", encoding="utf-8") as file:
        for line in file:
            words = line.split()
            if len(words) == 6 and words[5].endswith(".so"):
                low, high = (int(word, 16) for word in words[0].split("-"))
                known = found.setdefault(words[5], [low, high])
                known[:] = [min(known[0], low), max(known[1], high)]
    return [(low, high, path) for path, (low, high) in found.items()]


def registered(device: ctypes.CDLL) -> dict[int, list[tuple[int, str]]]:
    """Host functions and names of kernels, by the addresses of their fat binaries."""
    ask = device.neap_dry_kernels
    ask.restype, ask.argtypes = ctypes.c_uint64, [ctypes.c_void_p, ctypes.c_uint64]
    room = ask(None, 0)
    rows = (ctypes.c_uint64 * (3 * room))()
    ask(rows, room)
    found = defaultdict(list)
    for i in range(0, 3 * room, 3):
        function, wrapper, name = rows[i : i + 3]
        binary = ctypes.c_uint64.from_address(wrapper + 8).value
        found[binary].append((function, ctypes.string_at(name).decode()))
    return found


def main() -> None:
    """Prints one line a kernel."""
    kernels, binaries = (int(word) for word in sys.argv[1:])
    torch.cuda.init()
    device = ctypes.CDLL(None)
    mapped = libraries()
    found = registered(device)
    chooses = random.Random(7)
    some = chooses.sample(sorted(found), min(binaries, len(found)))
    each = -(-kernels // len(some))
    rows = [(b, *k) for b in some for k in chooses.sample(found[b], min(each, len(found[b])))]
    # Binaries of few kernels leave room for more of the others.
    rest = [(b, *k) for b in some for k in found[b]]
    chooses.shuffle(rest)
    for binary, function, name in list(dict.fromkeys(rows + rest))[:kernels]:
        out = ctypes.create_string_buffer(256)
        status = device.cudaFuncGetAttributes(out, ctypes.c_void_p(function))
        blocks = []
        for threads, dynamic in LAUNCHES:
            count = ctypes.c_int(-1)
            device.cudaOccupancyMaxActiveBlocksPerMultiprocessor(
                ctypes.byref(count), ctypes.c_void_p(function), threads, ctypes.c_size_t(dynamic)
            )
            blocks.append(count.value)
        low, path = next((low, path) for low, high, path in mapped if low <= binary < high)
        row = {"library": path, "binary": binary - low, "kernel": name, "status": status}
        row["attributes"] = ATTRIBUTES.unpack_from(out.raw)
        print(json.dumps({**row, "blocks": blocks}))


if __name__ == "__main__":
    main()
