"""Which line of the user's code runs."""

from __future__ import annotations

import os
import sys
import sysconfig
from types import FrameType

_PACKAGES = tuple(
    os.path.join(path, "")
    for path in {sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]}
)
_LIBRARY = os.path.join(sysconfig.get_paths()["stdlib"], "")
_HERE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_DRY = os.path.join(_HERE, "dry", "")
_MOVES = os.path.join(_HERE, "torch", "")
"""neap.torch copies tensors to the host and back."""
_kinds: dict[str, int] = {}

Line = tuple[str, int]


def _kind(file: str) -> int:
    """0 for the user's code, 1 for an installed package, 2 for PyTorch, Python itself and neap."""
    path = os.path.abspath(file)
    found = 0
    if file.startswith("<") or path.startswith((_HERE, _LIBRARY)):
        found = 2
    for folder in _PACKAGES:
        if path.startswith(folder):
            found = 2 if path.startswith(os.path.join(folder, "torch", "")) else 1
    if f"{os.sep}site-packages{os.sep}" in path and found == 0:
        found = 2 if f"{os.sep}site-packages{os.sep}torch{os.sep}" in path else 1
    _kinds[file] = found
    return found


def moves_memory(depth: int = 1) -> bool:
    """Whether neap.torch copies or looks, in place of the script: the innermost frame but for
    neap.dry's own.
    """
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None and frame.f_code.co_filename.startswith(_DRY):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_MOVES)


def user_line(depth: int = 1) -> Line | None:
    """File and line of the innermost frame in the user's code; else in an installed package.

    Nothing in threads that run no such code, such as autograd's.
    """
    try:
        frame: FrameType | None = sys._getframe(depth)
    except ValueError:
        return None
    package: Line | None = None
    while frame is not None:
        file = frame.f_code.co_filename
        kind = _kinds.get(file)
        if kind is None:
            kind = _kind(file)
        if kind == 0:
            return file, frame.f_lineno
        if kind == 1 and package is None:
            package = file, frame.f_lineno
        frame = frame.f_back
    return package


def text(line: Line | None) -> str | None:
    """``train.py:44``, relative to the working folder where it is below."""
    if line is None:
        return None
    file = line[0]
    relative = os.path.relpath(file) if os.path.isabs(file) else file
    return f"{file if relative.startswith('..') else relative}:{line[1]}"
