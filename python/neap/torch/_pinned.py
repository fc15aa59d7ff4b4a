"""Pinned memory of the host, of the size that is asked for.

PyTorch's own allocator of pinned memory rounds each request up to a power of two, so that a pool of
4.5 GiB would pin 8. Here memory of the exact size is registered with CUDA instead.
"""

from __future__ import annotations

import mmap
import sys
import weakref
from collections import deque
from pathlib import Path
from typing import Any

import torch

LARGE = 1 << 20
"""Fewer bytes come from PyTorch's allocator: what it adds is little."""
_PAGE = mmap.PAGESIZE
_CHUNK = 64 << 20
"""A pool grows by this many bytes, or more where a region needs it."""

_standing = [0]


class _Pages(mmap.mmap):
    """Pages that are pinned until the last tensor in them is gone."""

    address = 0

    def pin(self, address: int) -> None:
        """Pins all of it, which begins at this address.

        Raises:
            RuntimeError: if the host or CUDA refuses.
        """
        code = int(torch.cuda.cudart().cudaHostRegister(address, len(self), 0))
        if code:
            raise RuntimeError(
                f"the host refuses to pin {len(self)} bytes (CUDA's error {code}); the plan needs "
                "them for what leaves the device"
            )
        self.address = address
        _standing[0] += len(self)

    def __del__(self) -> None:
        if not self.address:
            return
        _standing[0] -= len(self)
        if not sys.is_finalizing():
            torch.cuda.synchronize()  # A copy may be on its way.
            torch.cuda.cudart().cudaHostUnregister(self.address)


def host_memory(size: int, pin: bool) -> torch.Tensor:
    """Memory of the host of this size in bytes, pinned where that is asked for.

    Raises:
        RuntimeError: if there is not enough memory to pin.
    """
    if not pin or size < LARGE:
        return torch.empty(size, dtype=torch.uint8, pin_memory=pin)
    free = room()
    if free is not None and size > free:
        raise RuntimeError(
            f"the plan needs {size} bytes of pinned memory, and the host has {free} left"
        )
    rounded = -(-size // _PAGE) * _PAGE
    pages = _Pages(-1, rounded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(pages, dtype=torch.uint8)
    pages.pin(tensor.data_ptr())
    return tensor[:size]


def standing() -> int:
    """Bytes that are pinned now by :func:`host_memory`, but for small ones."""
    return _standing[0]


def room() -> int | None:
    """Bytes of the host that can still be had, by the system and by the container's limit; nothing
    where the system does not say.
    """
    found = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) << 10)
    except (OSError, ValueError, IndexError):
        return None
    groups = Path("/sys/fs/cgroup")
    for most, now in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit, used = (int((groups / name).read_text()) for name in (most, now))
        except (OSError, ValueError):  # No such limit.
            continue
        found.append(max(limit - used, 0))
    return min(found) if found else None


def usable(free: int) -> int:
    """The bytes that may be pinned of these: an eighth is left to the script and the system."""
    return free - free // 8


class _Chunk:
    """Memory of a pool, of which regions are taken one after another until all are given back."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.taken = 0
        self.given: deque[None] = deque()
        """One entry for each region that was given back, in whatever thread."""
        self.regions = 0

    def take(self, size: int) -> torch.Tensor | None:
        """The next bytes; nothing if there are not as many."""
        if self.regions and len(self.given) == self.regions:
            self.taken = self.regions = 0
            self.given.clear()
        if self.memory.numel() - self.taken < size:
            return None
        self.taken += size
        self.regions += 1
        return self.memory[self.taken - size : self.taken]


class Region:
    """A part of a chunk.

    Attributes:
        memory: its bytes.
    """

    def __init__(self, memory: torch.Tensor, chunk: _Chunk) -> None:
        self.memory = memory
        self._chunk = chunk

    def give(self) -> None:
        """Nothing uses it any more, or what does is ordered before its next use."""
        self._chunk.given.append(None)


class HostPool:
    """Memory of the host for copies of any size, which is used again.

    Args:
        pin: whether it is pinned.
    """

    def __init__(self, pin: bool) -> None:
        self._pin = pin
        self._chunks: list[_Chunk] = []
        self._full = False
        """Whether the host had no more."""
        self._lent: dict[int, weakref.ref[Any]] = {}
        """What uses a region until it is gone."""

    @property
    def is_lent(self) -> bool:
        """Whether something uses a region that was lent."""
        return bool(self._lent)

    def lend(self, user: Any, size: int) -> torch.Tensor | None:
        """This many bytes until ``user`` is gone; nothing if the host has no more.

        They are another's then at once, so copies that use the pool are in order: those to it run
        on one stream, and the compute stream has waited for those from it.
        """
        region = self.take(size)
        if region is None:
            return None
        lent, key = self._lent, id(region)  # One user may have several.

        def gone(_: weakref.ref[Any]) -> None:
            region.give()
            del lent[key]

        lent[key] = weakref.ref(user, gone)
        return region.memory

    def take(self, size: int) -> Region | None:
        """A region of this many bytes; nothing if the host has no more."""
        rounded = -(-size // _PAGE) * _PAGE
        for chunk in self._chunks:
            memory = chunk.take(rounded)
            if memory is not None:
                return Region(memory[:size], chunk)
        another = None if self._full else self._another(max(rounded, _CHUNK))
        if another is None:
            self._full = True
            return None
        self._chunks.append(another)
        memory = another.take(rounded)
        assert memory is not None
        return Region(memory[:size], another)

    def _another(self, size: int) -> _Chunk | None:
        """A new chunk; nothing if the host has no room for it."""
        free = room() if self._pin else None
        if free is not None and usable(free) < size:
            return None
        try:
            return _Chunk(host_memory(size, self._pin))
        except (RuntimeError, OSError):
            return None
