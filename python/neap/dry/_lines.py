"""Which line of the user's code runs."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Sequence
from types import CodeType, FrameType

from neap.dry import _frames

_PACKAGES = tuple(
    os.path.join(path, "")
    for path in {sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]}
)
_LIBRARY = os.path.join(sysconfig.get_paths()["stdlib"], "")
_HERE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_WATCHES = (os.path.join(_HERE, "dry", ""), os.path.join(_HERE, "torch", "_quiet.py"))
"""neap.dry, and what wraps its callbacks."""
_OWN = 3
_MOVES = os.path.join(_HERE, "torch", "")
"""neap.torch copies tensors to the host and back."""
_kinds: dict[str, int] = {}
_reader = _frames.found()
_codes: dict[int, int] = {}
"""What :func:`_kind` says of code objects, by address; 3 for neap.dry's own."""
_known: dict[int, CodeType] = {}
"""These code objects, so that no other gets the address of one."""
_line_numbers: dict[int, int] = {}
"""By the address of an instruction."""

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


def _code_kind(address: int) -> int:
    kind = _codes.get(address)
    if kind is None:
        code = _frames.code_at(address)
        if code is None:
            return _OWN
        file = code.co_filename
        kind = _codes[address] = _OWN if file.startswith(_WATCHES) else _kind(file)
        _known[address] = code
    return kind


def _user_place(words: Sequence[int]) -> int:
    """Where the innermost frame of the user's code is, else of a package; else where all end."""
    place, package = 0, -1
    while address := words[place]:
        kind = _codes.get(address)
        if kind is None:
            kind = _code_kind(address)
        if kind == 0:
            return place
        if kind == 1 and package < 0:
            package = place
        place += 2
    return place if package < 0 else package


def _line_at(address: int, instruction: int) -> Line:
    code = _known[address]
    number = _line_numbers.get(instruction)
    if number is None:
        number = _line_numbers[instruction] = _frames.line_at(code, instruction)
    return code.co_filename, number


def moves_memory(depth: int = 1) -> bool:
    """Whether neap.torch copies or looks, in place of the script: the innermost frame but for
    neap.dry's own.
    """
    if _reader is not None:
        words = _reader.look()
        place = 0
        while words[place] and _code_kind(words[place]) == _OWN:
            place += 2
        code = _known.get(words[place])
        _reader.done(words)
        return code is not None and code.co_filename.startswith(_MOVES)
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None and frame.f_code.co_filename.startswith(_WATCHES):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_MOVES)


def user_line(depth: int = 1) -> Line | None:
    """File and line of the innermost frame in the user's code; else in an installed package.

    Nothing in threads that run no such code, such as autograd's.
    """
    if _reader is not None:
        words = _reader.look()
        place = _user_place(words)
        found = _line_at(words[place], words[place + 1]) if words[place] else None
        _reader.done(words)
        return found
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
