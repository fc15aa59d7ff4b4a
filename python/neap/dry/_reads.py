"""Lines that read the device: the dry device computes nothing, so what they read may be wrong."""

from __future__ import annotations

import ctypes
from typing import Any

from neap.dry._lines import Line, user_line

_KINDS = {1: "computed", 2: "copied"}


class Reads:
    """Counts copies to the host by line; the device calls back after each."""

    def __init__(self) -> None:
        self.counts: dict[tuple[Line | None, str], list[int]] = {}
        self._callback: Any = None
        self._library: Any = None

    def start(self) -> None:
        """Asks the device, where it is neap's, to tell."""
        library = ctypes.CDLL(None)
        if not hasattr(library, "neap_dry_on_read"):
            return
        kind = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64)
        self._library = library
        self._callback = kind(self._read)
        library.neap_dry_on_read.argtypes = [kind]
        library.neap_dry_on_read.restype = None
        library.neap_dry_on_read(self._callback)

    def stop(self) -> None:
        """No more calls; before the interpreter ends."""
        if self._library is not None:
            self._library.neap_dry_on_read(type(self._callback)())
            self._library = None

    def _read(self, kind: int, address: int, size: int) -> None:
        key = user_line(2), _KINDS.get(kind, "computed")
        found = self.counts.setdefault(key, [0, 0])
        found[0] += 1
        found[1] += size

    def rows(self) -> list[dict[str, Any]]:
        """As the report has them."""
        return [
            {
                "file": line[0] if line else None,
                "line": line[1] if line else None,
                "kind": kind,
                "count": count,
                "bytes": size,
            }
            for (line, kind), (count, size) in sorted(
                self.counts.items(), key=lambda item: (item[0][0] or ("", 0), item[0][1])
            )
        ]
