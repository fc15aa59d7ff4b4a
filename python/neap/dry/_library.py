"""The device library's functions, where this process runs on neap's device."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from neap._dry_library import dry_library

NO_ANSWER = 0xFFFFFFFFFFFFFFFF
"""Ends an answer to reads of one size."""
NOWHERE = 0xFFFFFFFF
"""The place of an allocation of which Python was not asked."""


class Library:
    """Calls into the device library. Callbacks come from any thread, with Python's lock."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._kept: list[Any] = []
        """Callbacks that the library may still call."""
        for name, result, arguments in (
            ("allocations", ctypes.c_uint64, []),
            ("allocation_at", ctypes.c_int64, [ctypes.c_uint64]),
            ("all_allocations", ctypes.c_uint64, [ctypes.c_void_p, ctypes.c_uint64]),
            ("workspace_allocations", ctypes.c_uint64, [ctypes.c_void_p, ctypes.c_uint64]),
            ("answer", None, [ctypes.c_uint64, ctypes.c_uint64]),
            ("collected_allocations", ctypes.c_uint64, [ctypes.c_void_p, ctypes.c_uint64]),
            ("collecting", None, [ctypes.c_int]),
            ("take_peak", ctypes.c_uint64, [ctypes.c_int]),
            ("flush", None, []),
        ):
            function = getattr(library, f"neap_dry_{name}")
            function.restype, function.argtypes = result, arguments

    @staticmethod
    def found() -> Library | None:
        """The library, or nothing in a process that does not run on neap's device."""
        library = dry_library()
        return None if library is None else Library(library)

    def watch_allocations(self, place: Callable[[], int] | None, keep_stacks: bool) -> None:
        """Asks ``place`` before each allocation where it comes from; a number below 2**32."""
        kind = ctypes.CFUNCTYPE(ctypes.c_uint32)
        callback = kind(place) if place is not None else kind()
        self._kept.append(callback)
        function = self._library.neap_dry_watch_allocations
        function.restype, function.argtypes = None, [kind, ctypes.c_int]
        function(callback, int(keep_stacks))

    def watch_reads(self, read: Callable[[int, int, int], None] | None) -> None:
        """Calls ``read`` with kind, address and bytes after each copy to the host."""
        kind = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64)
        callback = kind(read) if read is not None else kind()
        self._kept.append(callback)
        function = self._library.neap_dry_on_read
        function.restype, function.argtypes = None, [kind]
        function(callback)

    def allocations(self) -> int:
        """How many allocations the caching allocator has made."""
        return int(self._library.neap_dry_allocations())

    def allocation_at(self, address: int) -> int | None:
        """The number of the allocation that stands at an address."""
        number = int(self._library.neap_dry_allocation_at(address))
        return number if number >= 0 else None

    def all_allocations(self) -> list[tuple[int, int]]:
        """Place and device of every allocation, in order."""
        import struct

        room = self.allocations()
        buffer = ctypes.create_string_buffer(16 * room)
        many = self._library.neap_dry_all_allocations(buffer, room)
        rows = struct.iter_unpack("<QII", memoryview(buffer)[: 16 * many])
        return [(place, device) for _, place, device in rows]

    def workspace_allocations(self) -> set[int]:
        """The numbers of the allocations that cuBLAS was given as its workspace."""
        room = int(self._library.neap_dry_workspace_allocations(None, 0))
        numbers = (ctypes.c_uint64 * room)()
        self._library.neap_dry_workspace_allocations(numbers, room)
        return set(numbers)

    @contextmanager
    def answers(self, values: dict[int, int]) -> Iterator[None]:
        """In this thread, a read of what the device computed gives the value for its size in
        bytes; who watches reads does not hear of it.
        """
        for size, value in values.items():
            self._library.neap_dry_answer(size, value)
        try:
            yield
        finally:
            for size in values:
                self._library.neap_dry_answer(size, NO_ANSWER)

    def collecting(self, on: bool) -> None:
        """Says whether what this thread frees from now on was found by the garbage collector."""
        self._library.neap_dry_collecting(int(on))

    def collected_allocations(self) -> list[int]:
        """The numbers of the allocations that the collector freed, in the order of that."""
        room = self._library.neap_dry_collected_allocations(None, 0)
        buffer = (ctypes.c_uint64 * room)()
        self._library.neap_dry_collected_allocations(buffer, room)
        return list(buffer)

    def take_peak(self, device: int) -> int:
        """The most bytes that a device had given out since the last call."""
        return int(self._library.neap_dry_take_peak(device))

    def flush(self) -> None:
        """Writes the calls of stubs to the log: for processes that end without cleaning up."""
        self._library.neap_dry_flush()
