"""Which tensors of the device hold what a GPU's would: the values are in the device's own memory.

The device library has which bytes are known, and forgets them with their block. A write that was
not followed shows in the tensor's version: for each storage the version is noted up to which its
known bytes are right.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

UNKNOWN, KNOWN, ASSUMED = 0, 1, 2
"""What is known of a tensor; ``ASSUMED`` follows from an answer of neap's own, such as that of
``all()``."""

WHOLE = 16 << 20
"""The most bytes of a tensor of integers or booleans that is followed: a mask of attention is one
for each pair of tokens."""
REAL = 1 << 18
"""The most bytes of a tensor of floats that is followed."""
FILLED = 4096
"""The most bytes whose filling is followed: larger ones are most often workspaces."""

PLAIN = (torch.Tensor, torch.nn.Parameter)
_CPU = torch.device("cpu")

versions: dict[int, int] = {}
"""The version that each storage with known bytes had, by its address."""
makers: dict[int, str] = {}
"""The operator that made a number which is not known, by the number's address."""


def _nothing(*_: int) -> int:
    return 0


_content: Callable[[int, int, int], int] = _nothing
_set_content: Callable[[int, int, int, int], int] = _nothing
_answer: Callable[[int, int], int] = _nothing


def start() -> bool:
    """Finds the device library's functions; false where this process is not on neap's device."""
    global _content, _set_content, _answer
    # With Python's lock held: these calls are short, and call nothing back.
    library = ctypes.PyDLL(None)
    if not hasattr(library, "neap_dry_content"):
        return False
    _content = library.neap_dry_content
    places = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64]
    _content.argtypes = places  # type: ignore[attr-defined]
    _set_content = library.neap_dry_set_content
    _set_content.argtypes = [*places, ctypes.c_int]  # type: ignore[attr-defined]
    _answer = library.neap_dry_answer
    _answer.argtypes = [ctypes.c_uint64, ctypes.c_uint64]  # type: ignore[attr-defined]
    for function in (_set_content, _answer):
        function.restype = None  # type: ignore[attr-defined]
    return True


def plain(value: Any) -> bool:
    """Whether a value is a strided tensor on the device, of no subclass that hides its memory."""
    return value.__class__ in PLAIN and value.is_cuda and value.layout is torch.strided


def followed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is small enough to have its values computed."""
    size = tensor.numel() * tensor.element_size()
    return size <= REAL or (size <= WHOLE and not tensor.is_floating_point())


def base_of(tensor: torch.Tensor) -> int:
    """Where a plain tensor's storage begins."""
    at, before = tensor.data_ptr(), int(tensor.storage_offset())
    return at - before * tensor.element_size() if before else at


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written to; 0 for an inference tensor, which does not count."""
    try:
        return tensor._version
    except RuntimeError:
        return 0


def answer_counts(count: int) -> None:
    """Sets what this thread reads of counts that a kernel should have made, or ends that."""
    _answer(4, count)
    _answer(8, count)


def noted_version(base: int) -> int | None:
    """The version that was noted of a storage, if it is the one that lies there now."""
    noted = versions.get(base)
    return noted if noted is not None and _content(base, base, 0) else None


def content(tensor: torch.Tensor) -> int:
    """What is known of a plain tensor. What was written unseen is forgotten here."""
    base = base_of(tensor)
    noted = versions.get(base)
    if noted is None:
        return UNKNOWN if tensor.numel() else KNOWN
    # A lower version than noted is that of another counter: a tensor's ``data`` has its own.
    if version_of(tensor) > noted:
        forget_storage(tensor, base)
        return UNKNOWN
    return _content(base, tensor.data_ptr(), _reach(tensor))


def _reach(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to its last one's end."""
    if tensor.is_contiguous():
        return tensor.numel() * tensor.element_size()
    if not tensor.numel():
        return 0
    last = 0
    for extent, stride in zip(tensor.shape, tensor.stride(), strict=True):
        last += (extent - 1) * stride
    return (last + 1) * tensor.element_size()


def note(tensor: torch.Tensor, version: int, how: int) -> None:
    """Notes what is known of a plain tensor, whose values were written to its memory."""
    base = base_of(tensor)
    versions[base] = version
    _set_content(base, tensor.data_ptr(), _reach(tensor), how)


def forget(tensor: torch.Tensor) -> None:
    """Makes a plain tensor unknown, and 0; other parts of its storage stay known."""
    _set_content(0, tensor.data_ptr(), _reach(tensor), UNKNOWN)


def forget_storage(tensor: torch.Tensor, base: int) -> None:
    """Makes a plain tensor's whole storage unknown."""
    versions.pop(base, None)
    _set_content(0, base, tensor.untyped_storage().nbytes(), UNKNOWN)


def moved(tensor: torch.Tensor, before: int) -> None:
    """Notes that a tensor has been given another storage, whose values keep their version."""
    if plain(tensor):
        base = base_of(tensor)
        if base != before and base in versions:
            versions[base] = version_of(tensor)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the device memory of a plain tensor: it holds the known values."""
    at = tensor.data_ptr()
    if tensor.ndim:
        return _over(tensor, at)
    key = at, tensor.dtype
    found = _single.get(key)
    if found is None:
        if len(_single) > 4096:
            _single.clear()
        found = _single[key] = _over(tensor, at)
    return found


_single: dict[tuple[int, torch.dtype], torch.Tensor] = {}
"""Those over single numbers: counters are written to again and again."""


def _over(tensor: torch.Tensor, at: int) -> torch.Tensor:
    storage = torch._C._construct_storage_from_data_pointer(at, _CPU, _reach(tensor))
    alias = torch.empty(0, dtype=tensor.dtype, device=_CPU)
    return alias.set_(storage, 0, tensor.shape, tensor.stride())
