"""The library of ``neap dry``'s device, where this process runs on it."""

from __future__ import annotations

import ctypes


def dry_library() -> ctypes.CDLL | None:
    """The library, or nothing in a process that does not run on neap's device."""
    library = ctypes.CDLL(None)
    return library if hasattr(library, "neap_dry_allocations") else None
