"""Lines that read the device: the dry device computes nothing, so what they read may be wrong."""

from __future__ import annotations

from typing import Any

from neap.dry._guard import guarded
from neap.dry._known import makers
from neap.dry._library import Library
from neap.dry._lines import Line, moves_memory, user_line

_KINDS = {1: "computed", 2: "known", 3: "assumed"}
_KNOWN = 2
_last: dict[str, Any] = {}


def made_up(operator: str | None, line: Line | None) -> None:
    """Remembers the last value that the script got and that a GPU's may differ from."""
    _last["operator"], _last["line"] = operator, line


def last_made_up() -> dict[str, Any] | None:
    """As the report has it, or nothing where every value was right."""
    if not _last:
        return None
    line = _last["line"]
    return {
        "op": _last["operator"],
        "file": line[0] if line else None,
        "line": line[1] if line else None,
    }


class Reads:
    """Counts copies to the host by line; the device calls back after each."""

    def __init__(self, library: Library | None = None) -> None:
        self.counts: dict[tuple[Line | None, str], list[int]] = {}
        self._library = library

    def start(self) -> None:
        """Asks the device, where it is neap's, to tell."""
        if self._library is not None:
            self._library.watch_reads(guarded(self._read))

    def stop(self) -> None:
        """No more calls; before the interpreter ends."""
        if self._library is not None:
            self._library.watch_reads(None)
            self._library = None

    def _read(self, kind: int, address: int, size: int) -> None:
        if moves_memory(1):
            return  # What neap.torch copies away and back is no result that the script reads.
        line = user_line(1)
        if kind != _KNOWN:
            name = makers.get(address)
            made_up(f"aten::{name}" if name is not None else None, line)
        key = line, _KINDS.get(kind, "computed")
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
